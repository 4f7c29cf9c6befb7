"""Attention calls as transformers makes them: what linear attention can honour, and the function it stands in for.

Our mask function keeps what it was asked, so that a layer that stays as it was, or a call that is too short to gain,
gets the very mask that its own implementation would have got, and runs through its own function: bit by bit the
original. Everything else becomes a `Call`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bochner._checks import BochnerError, extra
from bochner.hf.layer import Call, LinearAttention

# Keywords of transformers' attention calls that change the result; each with the reason why a layer stays exact.
REFUSED = {
    "position_bias": "a position bias added to the logits (T5) is not a kernel of query and key",
    "bias": "a bias added to the logits is not a kernel of query and key",
    "softcap": "a soft cap on the logits (Gemma-2) is not a softmax kernel",
    "sliding_window": "its own sliding window is linear already",
    "cache": "the paged cache of continuous batching is not supported",
    "indices": "sparse attention by indices is linear already",
    "block_indices": "block-sparse attention is linear already",
}


def transformers_module() -> Any:
    """The package transformers, or the sentence that says what to install."""
    extra("transformers.masking_utils", "hf", "bochner.hf")
    return extra("transformers", "hf", "bochner.hf")


class Obstacle(NamedTuple):
    """Why a layer stays exact, and how many keys it keeps if it has a window of its own."""

    reason: str
    limit: int = 0


@dataclass(eq=False)
class Mask:
    """What our mask function makes, for linear attention and for the original one.

    `keep` (b, s): which keys count, None for the first `length`; `is_causal`: whether later ones are hidden from
    earlier rows; `segments` (b, n): the sequence that each token of a packed batch belongs to; `obstacle`: what of the
    mask these do not say.
    `asked`: the arguments of the mask function, from which the original mask is made when it is needed.
    """

    keep: Tensor | None
    length: int
    is_causal: bool
    segments: Tensor | None = None
    obstacle: Obstacle | None = None
    asked: dict[str, Any] = field(default_factory=dict)
    made: dict[Any, Any] = field(default_factory=dict)

    # `generate` makes masks before the model does if the cache is a static one, and takes them for tensors: with four
    # axes the model leaves them as they are.
    ndim = 4

    def contiguous(self) -> Mask:
        return self

    def original(self, implementation: str, keys: int, segments: Tensor | None = None) -> Any:
        """The mask that an attention implementation would have got for so many keys.

        Before a static cache becomes states, a mask is asked for as long as its slots; the attention gets the keys that
        there are. `segments` (b, n): the sequences of a packed batch, if the mask function does not know of them.
        """
        place = (implementation, keys, segments is None)
        if place not in self.made:
            masking = _masking()
            function = masking.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.get(implementation)
            asked = {**self.asked, "kv_length": min(keys, self.asked["kv_length"])}
            if segments is not None:
                if function is None:
                    raise BochnerError(_cannot_pack(f"{implementation!r} attention"))
                alone = masking.packed_sequence_mask_function(segments)
                asked["mask_function"] = masking.and_masks(asked["mask_function"], alone)
                skips = ("allow_is_causal_skip", "allow_is_bidirectional_skip")
                asked.update({name: False for name in skips if name in asked})
            self.made[place] = None if function is None else function(**asked)
        return self.made[place]


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | Mask | None = None,
    device: Any = None,
    **kwargs: Any,
) -> Mask:
    """The mask function of our attention functions."""
    if isinstance(attention_mask, Mask):
        return attention_mask
    asked = dict(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, device=device, **kwargs,
    )  # fmt: skip
    masking = _masking()
    causal, segments, beyond = mask_function is masking.causal_mask_function, None, None
    compiling = torch.compiler.is_compiling()
    if not causal and mask_function is not masking.bidirectional_mask_function:
        causal = True
        if not compiling:  # while compiling, packing cannot be told from its absence, and Llama then always reports it
            segments = _packing(mask_function, masking)
            if segments is None:
                beyond = _beyond(mask_function, masking)
    length = kv_length
    if not compiling:  # slots of a fixed-size cache that are not filled yet
        length = min(kv_length, int(q_offset) + q_length) if causal else kv_length
    keep = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + length].bool()
    return Mask(keep, length if keep is None else keep.shape[1], causal, segments, beyond, asked)


def _masking() -> Any:
    # It is there when a model calls us; importing it, as `transformers_module` does, is nothing that can be compiled.
    return sys.modules["transformers.masking_utils"]


def _leaves(function: Any) -> list[Any]:
    """The mask functions that one is put together from."""
    parts = next((x for x in _inside(function) if isinstance(x, tuple) and all(map(callable, x))), None)
    return [function] if parts is None else [leaf for part in parts for leaf in _leaves(part)]


def _inside(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def _packing(mask_function: Any, masking: Any) -> Tensor | None:
    """The sequence of each token, (b, n), if a mask function is "causal and of the same sequence" and nothing else."""
    leaves = _leaves(mask_function)
    others = [f for f in leaves if f is not masking.causal_mask_function]
    joined = getattr(mask_function, "__qualname__", "").startswith("and_masks.")
    if not joined or len(leaves) != 2 or len(others) != 1 or _maker(others[0]) != "packed_sequence_mask_function":
        return None
    return next((x for x in _inside(others[0]) if isinstance(x, Tensor)), None)


def _maker(mask_function: Any) -> str:
    return str(getattr(mask_function, "__qualname__", repr(mask_function))).split(".")[0]


def _beyond(mask_function: Any, masking: Any) -> Obstacle:
    """What a mask function hides or shows beyond causality and padding."""
    plain = (masking.causal_mask_function, masking.bidirectional_mask_function)
    others = [f for f in _leaves(mask_function) if f not in plain]
    for leaf in others:
        size = next((x for x in _inside(leaf) if isinstance(x, int)), 0)
        if _maker(leaf).startswith("sliding_window"):
            return Obstacle(f"its own sliding window, of {size} tokens, is linear already", abs(size))
        if _maker(leaf).startswith("chunked"):
            return Obstacle(f"its own chunks, of {size} tokens, are linear already", size)
    names = ", ".join(map(_maker, others))
    return Obstacle(f"its mask ({names}) is more than causal or bidirectional with padding")


def obstacle(mask: Any, kwargs: dict[str, Any]) -> Obstacle | None:
    """What of an attention call linear attention cannot honour, None if nothing."""
    for name, reason in REFUSED.items():
        if kwargs.get(name) is not None:
            limit = kwargs[name] if name == "sliding_window" and isinstance(kwargs[name], int) else 0
            return Obstacle(f"it passes {name!r}, and {reason}", limit)
    if isinstance(mask, Mask):
        if mask.obstacle is not None:
            return mask.obstacle
        if kwargs.get("s_aux") is not None and not mask.is_causal:
            return Obstacle("it passes 's_aux', and sinks as extra logits are supported in causal attention only")
    elif mask is not None and mask.ndim != 2:
        return Obstacle(
            f"it passes a mask of shape {tuple(mask.shape)}, and only padding masks (b, s) can be honoured; pass the "
            "2-D attention mask of the tokenizer"
        )
    return None


def understand(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> Call:
    """An attention call as transformers makes it; what linear attention cannot honour is refused."""
    found = obstacle(mask, kwargs)
    if found is not None:
        raise BochnerError(f"{type(module).__name__} cannot use linear attention: {found.reason}.")
    keep, length = (mask.keep, mask.length) if isinstance(mask, Mask) else (mask, key.shape[-2])
    if isinstance(mask, Mask):
        causal = mask.is_causal
    else:  # models that make no mask say it by is_causal
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", False)
        length = length if mask is None else mask.shape[1]
    if length < key.shape[-2]:  # the slots of a fixed cache beyond the mask hold zeros; the feature of 0 is not 0
        key, value = key[..., :length, :], value[..., :length, :]
    padding = None
    if keep is not None:
        padding = ~keep.bool()
        if not torch.compiler.is_compiling() and not padding.any():
            padding = None
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    segments = mask.segments if isinstance(mask, Mask) else None
    if segments is None and kwargs.get("cu_seq_lens_q") is not None:
        segments = _segments(kwargs["cu_seq_lens_q"], query, key)
    return Call(query, key, value, bool(causal), padding, scale, kwargs.get("s_aux"), segments)


def _segments(bounds: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The sequence of each token, (1, n), from the bounds that flash-attention takes."""
    n = query.shape[-2]
    if query.shape[0] != 1 or key.shape[-2] != n or int(bounds[-1]) != n:
        raise BochnerError(
            f"'cu_seq_lens_q' bounds {int(bounds[-1])} tokens, the call has {tuple(query.shape)} queries and "
            f"{key.shape[-2]} keys; pack the sequences into a batch of one."
        )
    places = torch.arange(n, device=query.device)
    return torch.bucketize(places, bounds.to(query.device), right=True)[None]


def _cannot_pack(who: str) -> str:
    return f"{who} cannot honour 'cu_seq_lens_q'; pack by 'position_ids' that begin again at 0 with every sequence."


def as_before(
    module: nn.Module, implementation: str, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]
) -> Any:
    """The call through the attention function that the module had before.

    Of all attention functions only those of flash-attention read `cu_seq_lens_q`; the others get it as a mask.
    """
    bounds, segments = kwargs.get("cu_seq_lens_q"), None
    if bounds is not None and "flash" not in implementation:
        if not isinstance(mask, Mask):
            raise BochnerError(_cannot_pack(type(module).__name__))
        segments = _segments(bounds, query, key) if mask.segments is None else None
    if isinstance(mask, Mask):
        mask = mask.original(implementation, key.shape[-2], segments)
    return _function(module, implementation)(module, query, key, value, mask, **kwargs)


def _function(module: nn.Module, implementation: str) -> Callable[..., Any]:
    # Not through `transformers_module`: short calls come this way, and are to cost no more than they did.
    interface: dict[str, Callable[..., Any]] = sys.modules["transformers"].AttentionInterface._global_mapping
    if implementation in interface:
        return interface[implementation]
    for cls in type(module).__mro__:  # eager attention stands beside the module, and is not registered
        function: Callable[..., Any] | None = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise BochnerError(f"No {implementation!r} attention of {type(module).__name__} was found to go back to.")


def softmax_of(config: Any) -> str:
    """The attention implementation that a configuration had before something under it was converted."""
    origins = (origin for child in list(LinearAttention.everywhere) for origin in child.origins)
    return next((origin.implementation for origin in origins if origin.config is config), "sdpa")
