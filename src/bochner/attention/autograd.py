"""Backward passes that recompute: inputs are saved, everything else is made again part by part, memory O(L d).

A `Scan` carries sums from one part to the next. Its backward pass goes over the parts from the last to the first: each
is computed again with a graph, from the sums that were carried into it, and differentiated by autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from bochner._checks import BochnerError
from bochner.attention.features import PreparedMap
from bochner.attention.state import Sums


class Output(NamedTuple):
    """Of one part: the sums carried on; rows (b, g, t, r c, v) and which of them cannot be divided (.., 1), or None.

    `kept` (.., 1): each row's normaliser and its reference, with which rows need not be computed again; or None.
    """

    carry: Sums
    rows: Tensor
    bad: Tensor | None = None
    kept: tuple[Tensor, Tensor] | None = None


Known = tuple[Tensor, Tensor, Tensor]  # of a part: rows, and what was kept of them
Scanned = tuple[Tensor, Tensor | None, Tensor, Tensor]  # rows, which are bad, sums carried out, their reference


def recomputed(scan: Any, prepared: PreparedMap, tensors: Sequence[Tensor], carry: Sums) -> Scanned:
    """What `scan.forward` returns, differentiable in the tensors, the carry and the map."""
    learned = prepared.tensors()
    if any(t.requires_grad for t in (*tensors, carry.value, *learned)):
        kept = [] if prepared.phi.is_exponential else [t for t in prepared.phi.buffers() if not t.requires_grad]
        out: Scanned = _Recomputed.apply(scan, prepared, len(tensors), len(learned), *tensors, *carry, *learned, *kept)
        return out
    with torch.no_grad():
        found: Scanned = scan.forward(prepared, tensors, carry)
        return found


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scan: Any, prepared: PreparedMap, count: int, learned: int, *tensors: Tensor) -> Scanned:
        ctx.before = []
        carry = Sums(*tensors[count : count + 2])
        rows, bad, sums, ref = scan.forward(prepared, tensors[:count], carry, ctx.before)
        ctx.scan, ctx.prepared, ctx.count, ctx.learned = scan, prepared, count, learned
        sums, ref = sums.clone() if sums is carry.value else sums, ref.clone()
        ctx.save_for_backward(*tensors, rows)
        ctx.mark_non_differentiable(*([ref] if bad is None else [bad, ref]))
        ctx.set_materialize_grads(False)
        return rows, bad, sums, ref

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor | None, _: Any, grad_sums: Tensor | None, __: Any) -> Any:
        refuse_second()
        try:
            saved = ctx.saved_tensors
        except RuntimeError as error:
            raise BochnerError(
                f"The map {type(ctx.prepared.phi).__name__} or an input of linear_attention was changed between the "
                "forward and the backward pass; call redraw_ or the optimizer after backward."
            ) from error
        count, learned = ctx.count, ctx.learned
        inputs = saved[: count + 2 + learned]
        rest = (None,) * (len(ctx.needs_input_grad) - 4 - len(inputs))
        return (None, None, None, None, *_backward(ctx, inputs, saved[-1], grad_rows, grad_sums), *rest)


def _backward(
    ctx: Any, inputs: Sequence[Tensor], rows: Tensor, grad_rows: Tensor | None, grad_sums: Tensor | None
) -> list[Tensor | None]:
    """The gradients of tensors, carry and learned tensors, from the last part to the first."""
    scan, count, wanted = ctx.scan, ctx.count, ctx.needs_input_grad[4 : 4 + ctx.count]
    tensors, others = inputs[:count], inputs[count + 2 :]
    if ctx.prepared.phi.is_exponential:
        others = tuple(t.detach().requires_grad_() for t in others)
    with torch.enable_grad():
        prepared = ctx.prepared.computed_from(others)
    totals = [torch.zeros_like(t) for t in tensors]
    learned: list[Tensor | None] = [None] * len(others)
    for part, (carry, random, kept) in reversed(list(zip(scan.parts, ctx.before, strict=True))):
        taken = [t.detach().requires_grad_(w) for t, w in zip(scan.take(part, tensors), wanted, strict=True)]
        value = carry.value.detach().requires_grad_(part.number > 0 or ctx.needs_input_grad[4 + count])
        with torch.enable_grad(), _random(random, value):
            known = None if kept is None else (scan.layout.take_rows(rows, part), *kept)
            out = scan.body(prepared, part, taken, Sums(value, carry.ref), known)
        slopes = (None if grad_rows is None else scan.layout.take_rows(grad_rows, part), grad_sums)
        pairs = [(y, g) for y, g in zip((out.rows, out.carry.value), slopes, strict=True) if g is not None]
        pairs = [(y, g) for y, g in pairs if y.requires_grad]
        leaves = [t for t in (*taken, value) if t.requires_grad] + list(others)
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if pairs:
            ends, slopes = zip(*pairs, strict=True)
            found = torch.autograd.grad(ends, leaves, slopes, allow_unused=True, retain_graph=bool(others))
        grads = iter(found)
        scan.put(part, totals, [next(grads) if t.requires_grad else None for t in taken])
        grad_sums = next(grads) if value.requires_grad else None
        learned = [b if a is None else a if b is None else a + b for a, b in zip(learned, grads, strict=True)]
    return [*totals, grad_sums, None, *learned]


def random_state(like: Tensor) -> tuple[Tensor, Any]:
    """What random numbers come next, for a map that draws some: on the CPU, and on the device where that is another."""
    return torch.get_rng_state(), get_device_states(like)


@contextmanager
def _random(state: tuple[Tensor, Any] | None, like: Tensor) -> Iterator[None]:
    """The random numbers of an earlier moment, for a while."""
    devices = [] if state is None else state[1][0]
    with torch.random.fork_rng(devices, enabled=state is not None, device_type=like.device.type):
        if state is not None:
            torch.set_rng_state(state[0])
            set_device_states(*state[1], device_type=like.device.type)
        yield


def refuse_second() -> None:
    """Say at the start of a backward pass that it cannot itself be differentiated."""
    if torch.is_grad_enabled():
        raise BochnerError("Second derivatives of linear_attention need recompute=False.")
