"""One token after a state, in as few operations as it takes: the same numbers as the scans."""

from __future__ import annotations

import torch
from torch import Tensor

from bochner.attention.call import Call, Result
from bochner.attention.numerics import EMPTY, MASKED, finish, topped_up
from bochner.attention.phases import held_places
from bochner.attention.state import State, WindowState, packed, unpacked
from bochner.attention.window import held_from

pad = torch.nn.functional.pad


def can_step(call: Call, q: Tensor, k: Tensor, hole: Tensor | None, state: State | None) -> bool:
    """Whether `step` applies: one unpadded token, no gradients, and all sinks there."""
    if q.shape[-2] != 1 or k.shape[-2] != 1 or state is None or not call.positive or not call.is_causal:
        return False
    if torch.is_grad_enabled() or not call.may_look(q) or (hole is not None and bool(hole.any())):
        return False
    window = state.window
    if not call.exact_terms or not call.sinks:
        return not call.exact_terms or window is not None
    return (
        window is not None and window.sink_position.shape[1] == call.sinks and bool((window.sink_position >= 0).all())
    )


def step(call: Call, q: Tensor, k: Tensor, v: Tensor, state: State, start: Tensor | None = None) -> Result:
    """Attention of one query (b, h, 1, d) after one more key and value (b, g, 1, .); `start`: see `phases`."""
    b, g, _, d = k.shape
    fq = call.features("query")(q.reshape(b, g, -1, d))
    past = state.window
    if past is None:
        sums, ref = _absorbed(call, state, k, v, None)
        total, log_ref = _kernel(call, fq.values, sums), ref[..., None, None] + fq.log_scale
        rows = finish(total, log_ref, None, None, call.normalize, call.policy, call.floor)
        return Result(rows.out, unpacked(sums, ref), rows.lost)
    keys, values = torch.cat([past.k, k], dim=2), torch.cat([past.v, v], dim=2)
    new = torch.zeros(b, 1, dtype=torch.bool, device=k.device)
    padded, sink = torch.cat([past.padded, new], dim=1), torch.cat([past.sink, new], dim=1)
    seen = past.seen + 1
    begin = past.seen - past.k.shape[2]
    # 1. What has left the window enters the kernel's state: before the token is read if its window slides.
    sums, ref = packed(state), state.log_scale
    left = held_from(call, seen) - begin
    slides = call.window_kind == "sliding" or not call.window
    if left and slides:
        sums, ref = _absorbed(call, state, keys[..., :left, :], values[..., :left, :], (padded | sink)[:, :left])
    first = left if slides else 0
    # 2. Exact logits, and the kernel.
    x = q.to(call.dtype).reshape(b, g, -1, d) * call.root
    near = _logits(call, x, torch.cat([past.sink_k, keys[..., first:, :]], dim=2))
    beside = past.sink_position >= (begin + first if start is None else held_places(call, start, past.seen)[:, None])
    near = near.masked_fill(torch.cat([beside, padded[:, first:]], dim=1)[:, None, None], MASKED)
    beyond = ref[..., None, None] + fq.log_scale
    log_ref = torch.maximum(near.amax(-1, keepdim=True), beyond).clamp_min(EMPTY)
    u = pad(torch.cat([past.sink_v, values[..., first:, :]], dim=2).to(call.dtype), (0, 1), value=1.0)
    total = torch.addcmul((near - log_ref).exp() @ u, _kernel(call, fq.values, sums), (beyond - log_ref).exp())
    rows = finish(total, log_ref, None, None, call.normalize, call.policy, call.floor)
    # 3. A window of blocks is left by whole blocks, behind the row that ends one.
    held: tuple[Tensor, ...] = (keys, values, padded, sink)
    if start is not None:
        sums, ref, held = _leave(call, state, held, begin, held_places(call, start, seen))
        left = 0
    elif left and not slides:
        sums, ref = _absorbed(call, state, keys[..., :left, :], values[..., :left, :], (padded | sink)[:, :left])
    keys, values, padded, sink = held
    kept = (keys[..., left:, :], values[..., left:, :], padded[:, left:], sink[:, left:])
    window = WindowState(*kept, *past[4:7], seen, past.setting, start)
    return Result(rows.out, unpacked(sums, ref)._replace(window=window), rows.lost)


def _leave(
    call: Call, state: State, held: tuple[Tensor, ...], begin: int, first: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The packed state and its scale after the keys before the places `first` (b,) have left; the keys still held."""
    keys, values, padded, sink = held
    gone = torch.arange(begin, begin + keys.shape[2], device=keys.device) < first[:, None]
    sums, ref = packed(state), state.log_scale
    if bool((gone & ~padded).any()):
        last = int(first.max()) - begin
        hole = (padded | sink | ~gone)[:, :last]
        sums, ref = _absorbed(call, state, keys[..., :last, :], values[..., :last, :], hole)
        keys, values = (t.masked_fill(gone[:, None, :, None], 0) for t in (keys, values))
        padded, sink = padded | gone, sink & ~gone
    cut = int(first.min()) - begin
    return sums, ref, (keys[..., cut:, :], values[..., cut:, :], padded[:, cut:], sink[:, cut:])


def _kernel(call: Call, phi: Tensor, sums: Tensor) -> Tensor:
    total = phi @ sums
    return total if call.top_up is None else topped_up(total, sums[..., -1:, :], call.top_up.squeeze(-1))


def _logits(call: Call, x: Tensor, k: Tensor) -> Tensor:
    y = k.to(call.dtype) * call.root
    logits = x @ y.mT
    if call.phi.kernel == "gaussian":
        logits = logits - 0.5 * (x.square().sum(-1, keepdim=True) + y.square().sum(-1, keepdim=True).mT)
    return logits


def _absorbed(call: Call, state: State, k: Tensor, v: Tensor, hole: Tensor | None) -> tuple[Tensor, Tensor]:
    """The packed state after a few more keys, and its scale."""
    psi, scale = call.features("key")(k)
    if hole is not None:
        scale = scale.masked_fill(hole[:, None, :, None], MASKED)
    ref = torch.maximum(state.log_scale, scale.amax((-2, -1)))
    weighted = pad(v.to(call.dtype), (0, 1), value=1.0) * (scale - ref[..., None, None]).exp()
    return torch.addcmul(psi.mT @ weighted, packed(state), (state.log_scale - ref).exp()[..., None, None]), ref
