"""What a model's attention really computes: every call of a forward pass, handed to an observer.

transformers hands over queries (b, h, n, d), keys and values (b, g, s, d) with rotary and norms applied, a mask made by
the mask function of the implementation's name, and a scale. Modules and head sizes are found by running the model once
under a recording attention function, never by the names of attributes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bochner._checks import BochnerError
from bochner.hf import inputs
from bochner.hf.calls import Call
from bochner.hf.interface import (
    UNSUPPORTED,
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
    attached_to,
    configs_of,
    hidden_states,
    note_hidden,
    original_attention,
    read_call,
    softmax_of,
    supported,
)
from bochner.hf.masks import Obstacle, make_mask

RECORDER = "bochner_recorder"
PARTS = ("encoder", "decoder", "cross")  # of an encoder-decoder
Observer = Callable[[str, Call], "Tensor | None"]


class Shape(NamedTuple):
    """What discovery learns of one attention module; `queries`, `keys`: how many there were."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    is_causal: bool
    is_cross: bool
    obstacle: Obstacle | None = None
    queries: int = 0
    keys: int = 0

    @property
    def part(self) -> str:
        """Which part of an encoder-decoder it belongs to."""
        return "cross" if self.is_cross else ("decoder" if self.is_causal else "encoder")

    @classmethod
    def of(cls, name: str, call: Call) -> Shape:
        (_, h, n, d), (_, g, s, v) = call.query.shape, call.value.shape
        return cls(name, h, g, d, v, call.is_causal, n != s, queries=n, keys=s)


@dataclass
class Recording:
    """Who looks at the attention calls of a model: names and implementations by the id of a module, and the findings.

    `obstacles`: layers with calls that linear attention cannot honour, and their shapes.
    """

    observer: Observer
    modules: dict[int, tuple[str, str]]
    hidden: frozenset[str] = frozenset()
    obstacles: dict[str, tuple[Obstacle, Shape]] = field(default_factory=dict)


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


def _record(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    recording = _recording.get()
    if recording is None or id(module) not in recording.modules:  # of another model with the same configuration
        return original_attention(module, "sdpa", query, key, value, attention_mask, kwargs)
    name, implementation = recording.modules[id(module)]
    call, obstacle = read_call(module, query, key, value, attention_mask, kwargs)
    if obstacle is not None:
        recording.obstacles.setdefault(name, (obstacle, Shape.of(name, call)))
    else:
        out = recording.observer(name, call._replace(hidden=hidden_states()) if name in recording.hidden else call)
        if out is not None:
            return out.transpose(1, 2).contiguous(), None
    return original_attention(module, implementation, query, key, value, attention_mask, kwargs)


AttentionInterface.register(RECORDER, _record)
AttentionMaskInterface.register(RECORDER, make_mask)


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout for a while; each module's mode comes back."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter requires gradients for a while; at the end the same ones as before do, whoever was asked between."""
    wanted = {name: p.requires_grad for name, p in model.named_parameters()}
    model.requires_grad_(False)
    try:
        yield
    finally:
        for name, p in model.named_parameters():
            p.requires_grad_(wanted.get(name, p.requires_grad))


@contextlib.contextmanager
def recording(
    model: nn.Module, observer: Observer, hidden: Iterable[str] = ()
) -> Iterator[dict[str, tuple[Obstacle, Shape]]]:
    """Run the model's own attention, showing every call that linear attention could honour to `observer(name, call)`.

    An observer that returns a tensor (b, h, n, v) replaces the attention's output by it. `hidden`: names of modules
    whose calls tell what entered them. Gives the layers with other calls, by name. The model's own attention
    implementation and training mode come back at the end.
    """
    if not isinstance(model, PreTrainedModel):
        raise BochnerError(f"A transformers model is needed, got {type(model).__name__}.")
    if not supported(model):
        raise BochnerError(UNSUPPORTED.format(type(model).__name__))
    before = [(config, config._attn_implementation_internal) for config in configs_of(model)]
    if any(implementation == RECORDER for _, implementation in before):
        raise BochnerError("This model is being observed already; do one thing at a time with one model.")
    own = {name: child.original for name, child in attached_to(model).items()}
    modules = {}
    for name, module in model.named_modules():
        implementation = own.get(name) or softmax_of(model, getattr(module, "config", None) or model.config)
        modules[id(module)] = (name, implementation)
    found = Recording(observer, modules, frozenset(hidden))
    hooks = [
        module.register_forward_pre_hook(note_hidden, with_kwargs=True)
        for name, module in model.named_modules()
        if name in found.hidden
    ]
    token = _recording.set(found)
    try:
        for config, _ in before:
            config._attn_implementation_internal = RECORDER
        with evaluation_mode(model):
            yield found.obstacles
    finally:
        _recording.reset(token)
        for hook in hooks:
            hook.remove()
        for config, implementation in before:
            config._attn_implementation_internal = implementation


@contextlib.contextmanager
def softmax(model: nn.Module) -> Iterator[None]:
    """The attention that a converted model had before, for a while."""
    with recording(model, lambda name, call: None):
        yield


def run(model: nn.Module, batch: dict[str, Any], *, gradient: bool = False) -> Any:
    """One forward pass on the model's device, without a cache."""
    device = next(model.parameters()).device
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    with torch.set_grad_enabled(gradient):
        try:
            return model(**moved, use_cache=False)
        except TypeError as error:
            if "use_cache" not in str(error):
                raise
            return model(**moved)


def discover(model: nn.Module, batch: dict[str, Tensor] | None = None) -> dict[str, Shape]:
    """The attention modules that go through transformers' interface, in the order in which the model holds them.

    Those that ask for something linear attention cannot honour have an `obstacle`. Raises when there is none at all.
    """
    found = _shapes(model, batch)
    if batch is not None and "decoder_input_ids" in batch:
        # Both sides may have one length: cross-attention is where other queries meet as many keys.
        other = _shapes(model, _other_queries(batch))
        for name, shape in found.items():
            fixed = shape.queries != other[name].queries and shape.keys == other[name].keys
            found[name] = shape._replace(is_cross=shape.is_cross or fixed)
    if not found:
        raise BochnerError(UNSUPPORTED.format(type(model).__name__))
    return {name: found[name] for name, _ in model.named_modules() if name in found}


def discover_parts(
    model: Any, data: Sequence[dict[str, Tensor]], parts: Sequence[str] | None = None
) -> dict[str, Shape]:
    """The attention modules of a model, those outside `parts` with an obstacle: they stay as they are.

    `parts`: "encoder", "decoder" and "cross" of an encoder-decoder, or names of modules, as "vision_model".
    """
    shapes = discover(model, inputs.first_row(data[0]) if data else None)
    if parts is None:
        return shapes
    wanted = list(parts) if isinstance(parts, (list, tuple, set)) else [parts]
    chosen = {p: [n for n, s in shapes.items() if s.part == p or f"{n}.".startswith(f"{p}.")] for p in wanted}
    if not chosen or not all(chosen.values()):
        known = [p for p in PARTS if any(s.part == p for s in shapes.values())]
        shown = next((repr(p) for p, names in chosen.items() if not names), "nothing")
        raise BochnerError(f"The 'parts' must be of {known}, or names of modules with attention, got {shown}.")
    kept = {name for names in chosen.values() for name in names}
    left_out = Obstacle("it is not among the 'parts' to convert")
    return {n: s if n in kept or s.obstacle else s._replace(obstacle=left_out) for n, s in shapes.items()}


def _shapes(model: nn.Module, batch: dict[str, Tensor] | None) -> dict[str, Shape]:
    """What one pass over a batch, or over made-up inputs, shows of the attention modules."""
    found: dict[str, Shape] = {}

    def observe(name: str, call: Call) -> None:
        found.setdefault(name, Shape.of(name, call))

    with recording(model, observe) as obstacles:
        try:
            run(model, dummy_inputs(model) if batch is None else batch)
        except BochnerError:
            raise
        except Exception as error:  # whatever it is, the inputs are not those that the model needs
            shown = "made-up inputs"
            if batch is not None:
                shown = "the first of 'data' with " + ", ".join(f"{k} {tuple(x.shape)}" for k, x in batch.items())
            raise BochnerError(
                f"{type(model).__name__} could not be run on {shown} ({type(error).__name__}: "
                f"{' '.join(str(error).split())}); pass 'data', batches with the inputs it needs."
            ) from error
    return found | {name: shape._replace(obstacle=why) for name, (why, shape) in obstacles.items()}


def _other_queries(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch whose decoder reads a token less, or one more if there is one alone."""
    n = batch["decoder_input_ids"].shape[1]
    wide = {k: x for k, x in batch.items() if k.startswith("decoder_") and x.ndim > 1 and x.shape[1] == n}
    return batch | {k: x[:, :-1] if n > 1 else torch.cat([x, x], dim=1) for k, x in wide.items()}


def dummy_inputs(model: Any) -> dict[str, Tensor]:
    """Small inputs that the model's forward accepts, by its main input."""
    main, source = model.main_input_name, model.config
    if main == "pixel_values":
        source = getattr(source, "vision_config", None) or source
        size = source.image_size
        batch = {main: torch.zeros(1, source.num_channels, *((size, size) if isinstance(size, int) else size))}
    elif main == "input_features":  # log-mel frames, twice as many as positions after the strided convolution
        frames = 2 * getattr(source, "max_source_positions", 50)
        batch = {main: torch.zeros(1, getattr(source, "num_mel_bins", 80), frames)}
    elif main == "input_values":
        batch = {main: torch.zeros(1, 4000)}
    else:
        text = source.get_text_config()
        n = min(12, getattr(text, "max_position_embeddings", None) or 12)
        batch = {"input_ids": torch.arange(1, n + 1)[None] % min(text.vocab_size, 50)}
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        # Not as long as the input: that tells cross-attention.
        batch["decoder_input_ids"] = torch.ones(1, 7, dtype=torch.long)
    dtype = next(model.parameters()).dtype
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
