"""What a model's attention really computes: every call of a forward pass, understood and handed to an observer.

transformers hands over queries (b, h, n, d), keys and values (b, g, s, d) with rotary and norms applied, a mask made by
the mask function of the implementation's name, and a scale. Modules and head sizes are found by running the model once
under a recording attention function, never by the names of attributes.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bochner._checks import BochnerError
from bochner.hf.layer import CHILD, Call
from bochner.hf.original import Obstacle, as_before, make_mask, obstacle, softmax_of, transformers_module, understand

OURS = ("bochner", "bochner_converted")
RECORDER = "bochner_recorder"
Observer = Callable[[str, Call], "Tensor | None"]

# Who looks at the calls of an attention module at present, by the module's id: its name, the implementation it has
# otherwise, the observer, and where to note calls that linear attention cannot honour.
_observers: dict[int, tuple[str, str, Observer, dict[str, tuple[Obstacle, Shape]]]] = {}


def _record(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    name, implementation, observer, obstacles = _observers[id(module)]
    found = obstacle(attention_mask, kwargs)
    if found is not None:
        causal = bool(getattr(attention_mask, "is_causal", getattr(module, "is_causal", False)))
        obstacles.setdefault(name, (found, Shape.of(name, Call(query, key, value, causal, None, 1.0))))
    else:
        call = understand(module, query, key, value, attention_mask, **kwargs)
        out = observer(name, call)
        if out is not None:
            return out.transpose(1, 2).contiguous(), None
    return as_before(module, implementation, query, key, value, attention_mask, kwargs)


@contextlib.contextmanager
def recording(model: nn.Module, observer: Observer) -> Iterator[dict[str, tuple[Obstacle, Shape]]]:
    """Run the model's own attention, showing every call that linear attention could honour to `observer(name, call)`.

    An observer that returns a tensor (b, h, n, v) replaces the attention's output by it. Gives the layers with other
    calls, by name. The model's own attention implementation and training mode come back at the end.
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
    names = {id(module) for module in model.modules()}
    if names & _observers.keys():
        raise BochnerError("This model is being observed already; do one thing at a time with one model.")
    obstacles: dict[str, tuple[Obstacle, Shape]] = {}
    for name, module in model.named_modules():
        implementation = _softmax_now(model, getattr(module, "config", None) or model.config)
        _observers[id(module)] = (name, implementation, observer, obstacles)
    try:
        for config, _ in before:
            config._attn_implementation_internal = RECORDER
        model.eval()
        yield obstacles
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        for module in was_training:
            module.training = True
        for place in names:
            del _observers[place]


def _softmax_now(model: Any, config: Any) -> str:
    """The softmax implementation of a configuration, also if it is converted."""
    present = getattr(config, "_attn_implementation_internal", None)
    if present in OURS:
        present = softmax_of(config) if present != OURS[0] else None
    return present or ("sdpa" if getattr(model, "_supports_sdpa", True) else "eager")


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
    """The transformers model in a PeftModel, that and the tokenizer of a SentenceTransformer; others as they are."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not (hasattr(model, "tokenize") and hasattr(model, "encode")):
        return model, tokenizer
    inner = next((m for m in model.modules() if isinstance(m, transformers_module().PreTrainedModel)), None)
    if inner is None:
        raise BochnerError("This SentenceTransformer holds no transformers model.")
    return inner, tokenizer or model.tokenizer


def snapshot(cache: Any) -> Any:
    """A cache as it is now: its layers replace their keys and values when they grow, and never write into them."""
    copied = copy.copy(cache)
    copied.layers = [copy.copy(layer) for layer in cache.layers]
    return copied


def run(model: nn.Module, batch: dict[str, Any], *, gradient: bool = False) -> Any:
    """One forward pass on the model's device; no cache is made, and one that is given stays as it is."""
    device = next(model.parameters()).device
    moved = {k: snapshot(v) if hasattr(v, "layers") else v for k, v in batch.items()}
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in moved.items()}
    with torch.set_grad_enabled(gradient):
        try:
            return model(**moved, use_cache=False)
        except TypeError as error:
            if "use_cache" not in str(error):
                raise
            return model(**moved)


class Shape(NamedTuple):
    """What discovery learns of one attention module; `keys`: how many there were."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    is_causal: bool
    is_cross: bool
    obstacle: Obstacle | None = None
    keys: int = 0

    @property
    def part(self) -> str:
        """Which part of an encoder-decoder it belongs to."""
        return "cross" if self.is_cross else ("decoder" if self.is_causal else "encoder")

    @classmethod
    def of(cls, name: str, call: Call) -> Shape:
        (_, h, n, d), (_, g, s, v) = call.query.shape, call.value.shape
        return cls(name, h, g, d, v, call.is_causal, n != s, keys=s)


def discover(model: nn.Module, batch: dict[str, Tensor] | None = None, unsupported: str = "keep") -> dict[str, Shape]:
    """The attention modules that go through transformers' interface, in the order in which the model holds them.

    Those that ask for something linear attention cannot honour have an `obstacle`, or with `unsupported="raise"` are
    refused. Raises when there is none at all.
    """
    if any(hasattr(m, CHILD) for m in model.modules()):
        raise BochnerError("This model is converted already; call bochner.revert(model) first.")
    found: dict[str, Shape] = {}

    def observe(name: str, call: Call) -> None:
        found.setdefault(name, Shape.of(name, call))

    with recording(model, observe) as obstacles:
        if batch is not None:
            run(model, batch)
        else:
            _run_on_dummies(model)
    for name, (reason, shape) in obstacles.items():
        if unsupported == "raise":
            raise BochnerError(f"{name} cannot use linear attention: {reason.reason}; pass unsupported='keep'.")
        found[name] = shape._replace(obstacle=reason)
    if not found:
        raise BochnerError(unsupported_message(model))
    return {name: found[name] for name, _ in model.named_modules() if name in found}


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
    labels: bool = False,
) -> list[dict[str, Tensor]]:
    """Calibration data as model inputs: texts (with a tokenizer), one batch, or a sequence of batches.

    `model`: texts without a tokenizer take the one stored beside it. `labels`: leave them in their batches.
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
    return [{k: v for k, v in b.items() if isinstance(v, Tensor) and (labels or k != "labels")} for b in calibration]


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
