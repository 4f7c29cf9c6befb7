"""What a model's attention really computes: every call of a forward pass, understood and handed to an observer.

transformers hands over queries (b, h, n, d), keys and values (b, g, s, d) with rotary and norms applied, a mask made by
the mask function of the implementation's name, and a scale. Whatever linear attention cannot honour is refused with its
reason: ignoring it would give wrong numbers. Modules and head sizes are found by running the model once under a
recording attention function, never by the names of attributes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bochner._checks import BochnerError, extra
from bochner.hf.layer import CHILD, Call, exact

RECORDER = "bochner_recorder"
Observer = Callable[[str, Call], "Tensor | None"]

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


def transformers_module() -> Any:
    """The package transformers, or the sentence that says what to install."""
    extra("transformers.masking_utils", "hf", "bochner.hf")
    return extra("transformers", "hf", "bochner.hf")


class Mask(NamedTuple):
    """What our mask function makes: which keys count, (b, s), and whether later ones are hidden from earlier rows."""

    keep: Tensor
    is_causal: bool


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    device: Any = None,
    **kwargs: Any,
) -> Mask:
    """The mask function of our attention functions; refuses masks beyond causal or bidirectional plus padding."""
    masking = transformers_module().masking_utils
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
        return Mask(torch.ones(batch_size, length, dtype=torch.bool, device=device), causal)
    return Mask(attention_mask[:, kv_offset : kv_offset + length].bool(), causal)


def understand(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None,
    scaling: float | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> Call:
    """An attention call as transformers makes it; what linear attention cannot honour is refused."""
    owner = type(module).__name__
    for name, reason in REFUSED.items():
        if kwargs.get(name) is not None:
            raise BochnerError(f"{owner} cannot use linear attention: it passes {name!r}, and {reason}.")
    keep = mask.keep if isinstance(mask, Mask) else mask
    if keep is not None and keep.ndim != 2:
        raise BochnerError(
            f"{owner} cannot use linear attention: it passes a mask of shape {tuple(keep.shape)}, and "
            "only padding masks (b, s) can be honoured; pass the 2-D attention mask of the tokenizer."
        )
    if isinstance(mask, Mask):
        causal = mask.is_causal
    else:  # models that make no mask say it by is_causal
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", False)
    padding = None
    if keep is not None:
        # In a cache of fixed size the slots beyond the mask hold zeros, and the feature of zero is not zero.
        key, value = key[..., : keep.shape[1], :], value[..., : keep.shape[1], :]
        padding = ~keep.bool()
        if not torch.compiler.is_compiling() and not padding.any():
            padding = None
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return Call(query, key, value, bool(causal), padding, scale)


# Who looks at the calls of an attention module at present: its name and the observer, by the module's id.
_observers: dict[int, tuple[str, Observer]] = {}


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    call = understand(module, query, key, value, attention_mask, scaling, is_causal, kwargs)
    name, observer = _observers[id(module)]
    out = observer(name, call)
    if out is None:
        out = exact(call)
    return out.transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def recording(model: nn.Module, observer: Observer) -> Iterator[None]:
    """Run the model's attention exactly, showing every call to `observer(name, call)`.

    An observer that returns a tensor (b, h, n, v) replaces the attention's output by it. The model's own attention
    implementation and training mode come back at the end.
    """
    transformers = transformers_module()
    if not isinstance(model, transformers.PreTrainedModel):
        raise BochnerError(f"A transformers model is needed, got {type(model).__name__}.")
    if not supported(model):
        raise BochnerError(unsupported_message(model))
    transformers.AttentionInterface.register(RECORDER, _record)
    transformers.masking_utils.AttentionMaskInterface.register(RECORDER, make_mask)
    before = [(config, config._attn_implementation_internal) for config in configs_of(model)]
    was_training = [m for m in model.modules() if m.training]
    names = {id(module): name for name, module in model.named_modules()}
    if names.keys() & _observers.keys():
        raise BochnerError("This model is being observed already; do one thing at a time with one model.")
    _observers.update({place: (name, observer) for place, name in names.items()})
    try:
        for config, _ in before:
            config._attn_implementation_internal = RECORDER
        model.eval()
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        for module in was_training:
            module.training = True
        for place in names:
            del _observers[place]


def configs_of(model: nn.Module) -> list[Any]:
    """Every configuration of the model and its parts, once."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if config is None or id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            return
        found[id(config)] = config
        for name in getattr(config, "sub_configs", {}):
            add(getattr(config, name, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return list(found.values())


def supported(model: nn.Module | type) -> bool:
    """Whether the model's own attention goes through transformers' interface, as its source tells."""
    check = getattr(model, "_can_set_attn_implementation", None)
    return bool(check()) if check is not None else False


def unsupported_message(model: Any) -> str:
    return (
        f"{type(model).__name__} cannot use linear attention: its attention does not go through transformers' "
        "attention interface, so that a replacement would silently be ignored."
    )


def unwrap(model: Any, tokenizer: Any = None) -> tuple[Any, Any]:
    """The transformers model and the tokenizer of a SentenceTransformer; anything else as it is."""
    if not (hasattr(model, "tokenize") and hasattr(model, "encode")):
        return model, tokenizer
    inner = next((m for m in model.modules() if isinstance(m, transformers_module().PreTrainedModel)), None)
    if inner is None:
        raise BochnerError("This SentenceTransformer holds no transformers model.")
    return inner, tokenizer or model.tokenizer


def run(model: nn.Module, batch: dict[str, Tensor], *, gradient: bool = False) -> Any:
    """One forward pass without cache, on the model's device."""
    device = next(model.parameters()).device
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    with torch.set_grad_enabled(gradient):
        try:
            return model(**moved, use_cache=False)
        except TypeError as error:
            if "use_cache" not in str(error):
                raise
            return model(**moved)


class Shape(NamedTuple):
    """What discovery learns of one attention module."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    is_causal: bool
    is_cross: bool

    @classmethod
    def of(cls, name: str, call: Call) -> Shape:
        (_, h, n, d), (_, g, s, v) = call.query.shape, call.value.shape
        return cls(name, h, g, d, v, call.is_causal, n != s)


def discover(model: nn.Module, batch: dict[str, Tensor] | None = None) -> dict[str, Shape]:
    """The attention modules that go through transformers' interface, in order of their first call.

    Raises when there is none, or when one of them asks for something linear attention cannot honour.
    """
    if any(hasattr(m, CHILD) for m in model.modules()):
        raise BochnerError("This model is converted already; call bochner.revert(model) first.")
    found: dict[str, Shape] = {}

    def observe(name: str, call: Call) -> None:
        found.setdefault(name, Shape.of(name, call))

    with recording(model, observe):
        if batch is not None:
            run(model, batch)
        else:
            _run_on_dummies(model)
    if not found:
        raise BochnerError(unsupported_message(model))
    return found


def _run_on_dummies(model: Any) -> None:
    try:
        run(model, dummy_inputs(model))
    except BochnerError:
        raise
    except Exception as error:  # whatever it is, the inputs were ours
        raise BochnerError(
            f"{type(model).__name__} could not be run on made-up inputs ({type(error).__name__}: {error}); pass "
            "'calibration', batches with the inputs it needs."
        ) from error


def dummy_inputs(model: Any) -> dict[str, Tensor]:
    """Small inputs that the model's forward accepts, by its main input."""
    config = model.config
    main = model.main_input_name
    inner = getattr(config, "vision_config", None) if main == "pixel_values" else None
    source = inner or config
    if main == "pixel_values":
        size = source.image_size
        height, width = (size, size) if isinstance(size, int) else size
        batch: dict[str, Tensor] = {"pixel_values": torch.zeros(1, source.num_channels, height, width)}
    elif main == "input_features":  # log-mel frames, twice as many as positions after the strided convolution
        bins = getattr(source, "num_mel_bins", 80)
        batch = {"input_features": torch.zeros(1, bins, 2 * getattr(source, "max_source_positions", 50))}
    elif main == "input_values":
        batch = {"input_values": torch.zeros(1, 4000)}
    else:
        batch = {"input_ids": torch.arange(1, 13).view(1, 12) % min(source.get_text_config().vocab_size, 50)}
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        # Not as long as the input: that tells cross-attention.
        batch["decoder_input_ids"] = torch.ones(1, 7, dtype=torch.long)
    dtype = next(model.parameters()).dtype
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


def batches(
    calibration: Any,
    tokenizer: Any,
    *,
    model: Any = None,
    max_length: int = 256,
    batch_size: int = 8,
) -> list[dict[str, Tensor]]:
    """Calibration data as model inputs: texts (with a tokenizer), one batch, or a sequence of batches.

    `model`: texts without a tokenizer take the one stored beside it.
    """
    if isinstance(calibration, str):
        calibration = [calibration]
    if hasattr(calibration, "keys"):
        calibration = [dict(calibration)]
    if not isinstance(calibration, Sequence):
        calibration = list(calibration)
    if not calibration:
        raise BochnerError("The 'calibration' is empty; give some texts of the kind the model will see.")
    if all(isinstance(t, str) for t in calibration):
        tokenizer = tokenizer or _tokenizer_beside(model)
        if tokenizer is None:
            raise BochnerError("Calibration texts need a 'tokenizer'; pass the model's, or pass tokenized batches.")
        found = []
        size = batch_size if getattr(tokenizer, "pad_token", None) is not None else 1
        for start in range(0, len(calibration), size):
            texts = list(calibration[start : start + size])
            encoded = tokenizer(texts, return_tensors="pt", truncation=True, max_length=max_length, padding=size > 1)
            found.append({k: v for k, v in encoded.items() if isinstance(v, Tensor)})
        return found
    if not all(hasattr(b, "keys") for b in calibration):
        kinds = sorted({type(b).__name__ for b in calibration})
        raise BochnerError(f"The 'calibration' must be texts or batches (dicts of tensors), got {', '.join(kinds)}.")
    return [{k: v for k, v in b.items() if isinstance(v, Tensor) and k != "labels"} for b in calibration]


def first_row(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first example of a batch."""
    return {k: v[:1] for k, v in batch.items()}


def _tokenizer_beside(model: Any) -> Any:
    path = getattr(getattr(model, "config", None), "_name_or_path", "")
    if not path:
        return None
    try:
        return transformers_module().AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception:  # whatever is wrong with it, the caller is told to pass one
        return None
