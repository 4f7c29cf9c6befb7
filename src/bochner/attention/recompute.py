"""Backward passes that recompute: inputs are saved, features made again block by block, memory O(L d).

A `Scan` computes rows from tensors and knows its own adjoint: the algebra of sums and states is differentiated by hand,
a map through its own graph. Where a second derivative or a transformation is asked for, the same scan runs as plain
differentiable operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from bochner._checks import BochnerError
from bochner.attention.call import Call
from bochner.attention.numerics import FeatureFunction, is_composed, versions
from bochner.maps.base import FeatureMap, Features


class Scan(Protocol):
    """Rows of attention with a hand-made adjoint.

    `run(*tensors)` returns its outputs and whatever `back` needs besides the tensors; the first `num_smooth` outputs
    are differentiable. `back(tensors, kept, grads)` returns one gradient per tensor, then one per parameter of the map.
    """

    @property
    def call(self) -> Call: ...

    @property
    def num_smooth(self) -> int: ...

    def run(self, *tensors: Tensor) -> tuple[tuple[Tensor, ...], Any]: ...

    def back(self, tensors: Sequence[Tensor], kept: Any, grads: Sequence[Tensor]) -> Sequence[Tensor | None]: ...


def run_scan(scan: Scan, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The outputs of a scan, differentiable with respect to the tensors and the parameters of its map."""
    call = scan.call
    if is_composed():
        return scan.run(*tensors)[0]
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *call.parameters))
    if learns and call.recompute:
        return _Recomputed.apply(scan, len(tensors), *tensors, *call.parameters)
    with torch.set_grad_enabled(learns):
        return scan.run(*tensors)[0]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scan: Scan, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs, kept = scan.run(*tensors[:count])
        ctx.kept = _apart(kept, outputs)
        ctx.scan, ctx.count, ctx.versions = scan, count, versions(scan.call.phi)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*outputs[scan.num_smooth :])
        ctx.set_materialize_grads(True)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors, scan = ctx.saved_tensors, ctx.scan
        if versions(scan.call.phi) != ctx.versions:
            raise BochnerError(
                f"The map {type(scan.call.phi).__name__} was redrawn or changed between the forward and the backward "
                "pass of linear_attention; call redraw_, step_ or the optimizer after backward."
            )
        smooth = grads[: scan.num_smooth]
        again = torch.is_grad_enabled()  # a second derivative will be wanted
        top_up = scan.call.phi.top_up
        if not again and (top_up is None or not top_up.requires_grad):  # the adjoints by hand leave that one out
            return (None, None, *scan.back(tensors[: ctx.count], ctx.kept, smooth))

        def run(*inputs: Tensor) -> Sequence[Tensor]:
            with _in_place_of(scan.call.phi, tensors[ctx.count :], inputs[ctx.count :]):
                return scan.run(*inputs[: ctx.count])[0][: scan.num_smooth]

        return (None, None, *differentiate(run, tensors, smooth, again=again))


def _apart(kept: Any, outputs: Sequence[Tensor]) -> Any:
    """The same with stand-ins for the outputs, which would otherwise hold themselves until garbage is collected."""
    if isinstance(kept, Tensor):
        return kept.detach() if any(kept is out for out in outputs) else kept
    if isinstance(kept, (tuple, list)):
        parts = [_apart(part, outputs) for part in kept]
        return type(kept)(*parts) if hasattr(kept, "_fields") else type(kept)(parts)
    return kept


@contextmanager
def _in_place_of(phi: FeatureMap, parameters: Sequence[Tensor], others: Sequence[Tensor]) -> Iterator[None]:
    """Let a map compute with other tensors than its parameters."""
    other = {id(p): t for p, t in zip(parameters, others, strict=True)}
    places: list[dict[str, Any]] = [d for m in phi.modules() for d in (m._parameters, m._buffers)]
    changed = [(d, name, t) for d in places for name, t in d.items() if id(t) in other]
    try:
        for d, name, t in changed:
            d[name] = other[id(t)]
        yield
    finally:
        for d, name, t in changed:
            d[name] = t


def differentiate(
    run: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], grads: Sequence[Tensor], *, again: bool = True
) -> list[Tensor | None]:
    """The gradients of all inputs of `run` that have one, themselves differentiable unless not `again`.

    Each is that of one input with the others held, also where one was computed from another: `run` gets stand-ins.
    """
    with torch.enable_grad():
        inputs = [t.view_as(t) if again else t.detach().requires_grad_(t.requires_grad) for t in inputs]
        outputs = run(*inputs)
    pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if y.requires_grad]
    wanted = [t for t in inputs if t.requires_grad]
    outs, grads = [y for y, _ in pairs], [g for _, g in pairs]
    found = iter(torch.autograd.grad(outs, wanted, grads, create_graph=again, materialize_grads=True))
    return [next(found) if t.requires_grad else None for t in inputs]


class Traced:
    """The features of some rows with their own graph, to pull gradients back through the map once."""

    def __init__(self, features: FeatureFunction, x: Tensor, parameters: tuple[Tensor, ...]) -> None:
        self.x, self.parameters = x.detach().requires_grad_(), parameters
        with torch.enable_grad():
            self.features = features(self.x)
        self.values, self.log_scale = (t.detach() for t in self.features)

    def pull(self, values: Tensor, log_scale: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """The gradients of x and of the parameters, from those of the values and the log scale."""
        outputs, grads = _smooth(self.features, (values, log_scale))
        with torch.enable_grad():
            dx, *rest = torch.autograd.grad(
                outputs, (self.x, *self.parameters), grads, allow_unused=True, retain_graph=bool(self.parameters)
            )
        return torch.zeros_like(self.x) if dx is None else dx, list(rest)


def _smooth(features: Features, grads: tuple[Tensor, Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [(f, g) for f, g in zip(features, grads, strict=True) if g is not None and f.requires_grad]
    return [f for f, _ in pairs], [g for _, g in pairs]


def add_up(total: list[Tensor | None], more: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients of the parameters, summed over blocks."""
    return [b if a is None else a if b is None else a + b for a, b in zip(total, more, strict=True)]
