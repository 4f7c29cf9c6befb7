"""What a model's attention really computes: every call of a forward pass, handed to an observer.

Modules and head sizes are found by running the model once under a recording attention function, never by the names of
attributes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bochner._checks import BochnerError
from bochner.hf.interface import Call, _transformers, padding_mask, supported, unsupported_message
from bochner.hf.layer import exact
from bochner.hf.serialize import CHILD, own_configs

RECORDER = "bochner_recorder"
Observer = Callable[[str, Call], "Tensor | None"]


class _Recording(threading.local):
    observer: Observer | None = None
    names: dict[int, str] = {}  # noqa: RUF012


_recording = _Recording()


def _record(
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
    call = Call(module, query, key, value, attention_mask, scaling, is_causal, kwargs)
    name = _recording.names.get(id(module), type(module).__name__)
    out = None if _recording.observer is None else _recording.observer(name, call)
    if out is None:
        out = exact(call.query, call.key, call.value, call.is_causal, call.padding, call.scale)
    return out.transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def recording(model: nn.Module, observer: Observer) -> Iterator[None]:
    """Run the model's attention exactly, showing every call to `observer(name, call)`.

    An observer that returns a tensor (b, h, n, v) replaces the attention's output by it. The model's own attention
    implementation and training mode come back at the end.
    """
    transformers = _transformers()
    if not isinstance(model, transformers.PreTrainedModel):
        raise BochnerError(f"A transformers model is needed, got {type(model).__name__}.")
    if not supported(model):
        raise BochnerError(unsupported_message(model))
    transformers.AttentionInterface.register(RECORDER, _record)
    transformers.masking_utils.AttentionMaskInterface.register(RECORDER, padding_mask)
    before = [(config, config._attn_implementation_internal) for config in own_configs(model)]
    was_training = [m for m in model.modules() if m.training]
    _recording.observer = observer
    _recording.names = {id(module): name for name, module in model.named_modules()}
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
        _recording.observer, _recording.names = None, {}


def run(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """One forward pass without cache or gradient, on the model's device."""
    device = next(model.parameters()).device
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    with torch.no_grad():
        try:
            return model(**moved, use_cache=False)
        except TypeError as error:
            if "use_cache" not in str(error):
                raise
            return model(**moved)


class Shape:
    """What discovery learns of one attention module."""

    def __init__(self, name: str, call: Call) -> None:
        self.name = name
        self.num_heads, self.num_kv_heads = call.query.shape[1], call.key.shape[1]
        self.head_dim, self.value_dim = call.query.shape[-1], call.value.shape[-1]
        self.is_causal, self.is_cross = call.is_causal, call.query.shape[-2] != call.key.shape[-2]
        self.scale = call.scale


def discover(model: nn.Module, batch: dict[str, Tensor] | None = None) -> dict[str, Shape]:
    """The attention modules that go through transformers' interface, in order of their first call.

    Raises when there is none, or when one of them asks for something linear attention cannot honour.
    """
    if any(hasattr(m, CHILD) for m in model.modules()):
        raise BochnerError("This model is converted already; call bochner.hf.revert(model) first.")
    found: dict[str, Shape] = {}

    def observe(name: str, call: Call) -> None:
        found.setdefault(name, Shape(name, call))

    with recording(model, observe):
        run(model, dummy_inputs(model) if batch is None else batch)
    if not found:
        raise BochnerError(unsupported_message(model))
    return found


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
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = torch.ones(
            1, 7, dtype=torch.long
        )  # not as long as the input: tells cross-attention
    dtype = next(model.parameters()).dtype
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


def batches(
    calibration: Any, tokenizer: Any, *, max_length: int = 256, batch_size: int = 8, minimum: int = 1
) -> list[dict[str, Tensor]]:
    """Calibration data as model inputs: texts (with a tokenizer), one batch, or a sequence of batches."""
    if isinstance(calibration, str):
        calibration = [calibration]
    if hasattr(calibration, "keys"):
        calibration = [dict(calibration)]
    if not isinstance(calibration, Sequence):
        calibration = list(calibration)
    if not calibration:
        raise BochnerError("The 'calibration' is empty; give some texts of the kind the model will see.")
    if all(isinstance(t, str) for t in calibration):
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
