"""The attention and mask functions that transformers calls under the name `bochner`, and what they refuse.

transformers hands over queries (b, h, n, d), keys and values (b, g, s, d) with rotary and norms applied, a mask made by
the mask function of the same name, and a scale. Whatever linear attention cannot honour is refused with its reason:
ignoring it would give wrong numbers.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bochner._checks import BochnerError, BochnerWarning
from bochner.attention.core import linear_attention
from bochner.maps import feature_map
from bochner.maps.base import FeatureMap

NAME = "bochner"

# Keywords of transformers' attention calls that change the result; each with the reason for refusing it.
REFUSED = {
    "position_bias": "a position bias added to the logits (T5) is not a kernel of query and key",
    "bias": "a bias added to the logits is not a kernel of query and key",
    "softcap": "a soft cap on the logits (Gemma-2) is not a softmax kernel",
    "sliding_window": "its layers attend to a sliding window only, which is linear already",
    "s_aux": "attention sinks as extra logits (gpt-oss) are not supported",
    "cache": "the paged cache of continuous batching is not supported",
    "indices": "sparse attention by indices is linear already",
    "block_indices": "block-sparse attention is linear already",
    "cu_seq_lens_q": "packed sequences are not supported; pad them instead",
    "cu_seq_lens_k": "packed sequences are not supported; pad them instead",
}


class Call:
    """One attention call as transformers makes it, with its mask understood: `padding` (b, s) is True at padding."""

    __slots__ = ("dropout", "is_causal", "key", "module", "padding", "query", "scale", "value")

    def __init__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None,
        is_causal: bool | None,
        kwargs: dict[str, Any],
    ) -> None:
        owner = type(module).__name__
        for name, reason in REFUSED.items():
            if kwargs.get(name) is not None:
                raise BochnerError(f"{owner} cannot use linear attention: it passes {name!r}, and {reason}.")
        if attention_mask is not None and attention_mask.ndim != 2:
            raise BochnerError(
                f"{owner} cannot use linear attention: it passes a mask of shape {tuple(attention_mask.shape)}, and "
                "only padding masks (b, s) can be honoured; pass the 2-D attention mask of the tokenizer."
            )
        # The mask function knows whether the mask is causal; models that make no mask say it by is_causal.
        causal = getattr(attention_mask, "_bochner_causal", None)
        if causal is None:
            causal = is_causal if is_causal is not None else getattr(module, "is_causal", False)
        if attention_mask is not None and attention_mask.shape[1] < key.shape[-2]:
            # A cache of fixed size: the slots beyond the mask hold zeros, and the feature of zero is not zero.
            key, value = key[..., : attention_mask.shape[1], :], value[..., : attention_mask.shape[1], :]
        self.module, self.query, self.key, self.value = module, query, key, value
        self.is_causal = bool(causal)
        self.scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        padding = None if attention_mask is None else ~attention_mask.bool()
        if padding is not None and not torch.compiler.is_compiling() and not padding.any():
            padding = None
        self.padding = padding


class _Defaults(threading.local):
    """What `attn_implementation="bochner"` does to modules that `convert` has not equipped."""

    settings: dict[str, Any] = {"name": "positive", "num_features": 256, "seed": 0, "options": {}}  # noqa: RUF012


_defaults = _Defaults()
_maps: WeakKeyDictionary[nn.Module, FeatureMap] = WeakKeyDictionary()


def register(name: str = "positive", num_features: int = 256, *, seed: int = 0, **options: Any) -> None:
    """Make `attn_implementation="bochner"` known to transformers; call it once, before loading a model.

    Registers the attention function and its mask function (without it padding would silently be ignored), makes models
    saved after `convert` load with their maps, and makes families whose attention ignores the interface refuse
    the name instead of silently staying softmax.

    `name`, `num_features`, `seed`, `options`: the feature map of attention modules that `convert` has not equipped, one
    per module and key head. `convert` gives better ones: calibrated on real activations, with windows and a plan.

    >>> register()
    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    >>> model = BertModel._from_config(config, attn_implementation="bochner")
    """
    transformers = _transformers()
    feature_map(name, dim=4, num_features=num_features, num_heads=1, seed=seed, **options)  # a wrong name fails here
    _defaults.settings = {"name": name, "num_features": num_features, "seed": seed, "options": options}
    _maps.clear()
    transformers.AttentionInterface.register(NAME, attention_forward)
    transformers.masking_utils.AttentionMaskInterface.register(NAME, padding_mask)
    _refuse_families_without_the_interface(transformers.PreTrainedModel)
    from bochner.hf.serialize import equip_models_when_built

    equip_models_when_built(transformers.PreTrainedModel)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in linear time under transformers' calling convention; returns (b, n, h, v) and no weights."""
    from bochner.hf.cache import take_pending

    pending = take_pending()
    call = Call(module, query, key, value, attention_mask, scaling, is_causal, kwargs)
    if dropout and not torch.compiler.is_compiling():
        warnings.warn(
            f"{type(module).__name__} asks for attention dropout {dropout}; linear attention forms no weights to drop "
            "and goes without. Set the config's attention dropout to 0.",
            BochnerWarning,
            stacklevel=2,
        )
    equipped = getattr(module, "linear_attn", None)
    if equipped is not None:
        out = equipped(
            call.query,
            call.key,
            call.value,
            is_causal=call.is_causal,
            padding=call.padding,
            scale=call.scale,
            cache=pending,
        )
    else:
        if getattr(getattr(module, "config", None), "bochner", None) is not None:
            raise BochnerError(
                f"The model's config holds a conversion plan, but {type(module).__name__} has no maps: it was made for "
                "another model, or bochner.hf.register() was not called before loading."
            )
        out = attend(call, default_map(call))
    return out.transpose(1, 2).contiguous(), None


def attend(call: Call, phi: FeatureMap) -> Tensor:
    """Kernel attention of a call; with fewer queries than keys, the queries are the last ones."""
    q, n, s = call.query, call.query.shape[-2], call.key.shape[-2]
    causal = call.is_causal and n > 1
    if causal and n < s:
        # Earlier rows, to be thrown away, put the queries in their places.
        q = torch.cat([q.new_zeros(*q.shape[:2], s - n, q.shape[-1]), q], dim=-2)
    out = linear_attention(
        q, call.key, call.value, phi, is_causal=causal, key_padding_mask=call.padding, scale=call.scale
    )
    return out[..., -n:, :]


def default_map(call: Call) -> FeatureMap:
    """The map of a module that was not equipped, made at its first call; one seed gives one map everywhere."""
    phi = _maps.get(call.module)
    heads, dim = call.key.shape[1], call.key.shape[-1]
    if phi is None or (phi.num_heads, phi.dim) != (heads, dim):
        s = _defaults.settings
        seed = s["seed"] + 1000 * int(getattr(call.module, "layer_idx", None) or 0)
        phi = feature_map(
            s["name"], dim=dim, num_features=s["num_features"], num_heads=heads, seed=seed, **s["options"]
        )
        _maps[call.module] = phi.requires_grad_(False)
    if next(phi.buffers()).device != call.key.device:
        phi.to(call.key.device)
    return phi


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    device: Any = None,
    **kwargs: Any,
) -> Tensor:
    """The mask function of the name `bochner`: the 2-D padding mask, True where a key counts, tagged causal or not.

    Refuses every mask that is more than causal or bidirectional plus padding.
    """
    masking = _transformers().masking_utils
    causal = mask_function is masking.causal_mask_function
    compiling = torch.compiler.is_compiling()
    # While compiling, packing cannot be told from its absence, and Llama then always reports it.
    if compiling and not causal and mask_function is not masking.bidirectional_mask_function:
        causal = True
    elif not causal and mask_function is not masking.bidirectional_mask_function:
        what = getattr(mask_function, "__qualname__", repr(mask_function)).split(".")[0]
        raise BochnerError(
            f"Linear attention cannot honour this model's mask ({what}): only causal or bidirectional masks with "
            "padding. Sliding windows (unless the config sets them to None), chunks, packed sequences and prefix masks "
            "need attn_implementation='sdpa'."
        )
    length = kv_length
    if not compiling:  # slots of a fixed-size cache that are not filled yet
        length = min(kv_length, int(q_offset) + q_length) if causal else kv_length
    if attention_mask is None:
        mask = torch.ones(batch_size, length, dtype=torch.bool, device=device)
    else:
        mask = attention_mask[:, kv_offset : kv_offset + length].bool().clone()
    mask._bochner_causal = causal  # type: ignore[attr-defined]
    return mask


def supported(model: nn.Module | type) -> bool:
    """Whether the model's own attention goes through transformers' interface, as its source tells."""
    check = getattr(model, "_can_set_attn_implementation", None)
    return bool(check()) if check is not None else False


def _refuse_families_without_the_interface(base: type) -> None:
    """Raise where transformers would only log, or stay silent, and go on with softmax."""
    if getattr(base, "_bochner_refuses", False):
        return
    adjust, switch = base._check_and_adjust_attn_implementation, base.set_attn_implementation  # type: ignore[attr-defined]

    def refuse(self: Any, wanted: Any) -> None:
        if wanted == NAME and not supported(self):
            raise BochnerError(unsupported_message(self))

    def check_and_adjust(self: Any, attn_implementation: Any = None, *args: Any, **kwargs: Any) -> Any:
        refuse(self, attn_implementation)
        return adjust(self, attn_implementation, *args, **kwargs)

    def set_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(self, attn_implementation)
        return switch(self, attn_implementation, *args, **kwargs)

    base._check_and_adjust_attn_implementation = check_and_adjust  # type: ignore[attr-defined]
    base.set_attn_implementation = set_attn_implementation  # type: ignore[attr-defined]
    base._bochner_refuses = True  # type: ignore[attr-defined]


def unsupported_message(model: Any) -> str:
    return (
        f"{type(model).__name__} cannot use linear attention: its attention does not go through transformers' "
        "attention interface, so that a replacement would silently be ignored."
    )


def _transformers() -> Any:
    try:
        import transformers
        import transformers.masking_utils
    except ImportError as error:
        raise BochnerError("bochner.hf needs transformers; install bochner[hf].") from error
    return transformers
