"""One token after a state, in as few operations as it takes: the same numbers as the scan."""

from __future__ import annotations

import torch
from torch import Tensor

from bochner._products import is_composed, may_look
from bochner.attention.attend import Result
from bochner.attention.features import EMPTY, MASKED, PreparedMap
from bochner.attention.layout import starts
from bochner.attention.scan import Call
from bochner.attention.softmax import exact_logits
from bochner.attention.state import (
    Normaliser,
    State,
    Sums,
    WindowState,
    add,
    cauchy_schwarz,
    key_sums,
    mean_of,
    normaliser,
    ones_beside,
    spread_mask,
)


def can_step(call: Call, q: Tensor, k: Tensor, state: State | None) -> bool:
    """Whether `step` applies: one token without gradients, after all sinks."""
    if state is None or q.shape[-2] != 1 or k.shape[-2] != 1 or not call.near.is_causal:
        return False
    if torch.is_grad_enabled() or is_composed() or not call.normalize:
        return False
    return not call.near.exact or (state.window is not None and (state.window.complete or not call.near.sinks))


def step(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: State) -> Result:
    """Attention of one query (b, h, 1, d) after one more key and value (b, g, 1, .)."""
    (b, g, _, d), prepared = k.shape, call.map
    x = q.reshape(b, g, -1, d)
    phi, own = prepared.features("query", x)
    new = ones_beside(v.to(prepared.dtype), name="new").squeeze(2)
    total = state.total + (new if mask is None else new.masked_fill(mask.unsqueeze(-1), 0))
    sums, past = Sums(state.sums, state.log_scale), state.window
    if past is None:
        sums = _absorbed(prepared, sums, k, v, mask)
        rows, _, bound = _kernel(prepared, phi, sums)
        den = normaliser(rows[..., -1:], bound, prepared.floor)
        return _finished(rows, den, State(*sums, total))
    rows, bound, sums, window = _windowed(call, x, phi, own, k, v, mask, sums, past)
    den = normaliser(rows[..., -1:], bound, prepared.floor)
    return _finished(rows, den, State(*sums, total, window))


def _finished(rows: Tensor, den: Normaliser, state: State) -> Result:
    out = den.divide(rows[..., :-1])
    if not den.some:
        return Result(out, state)
    seen = state.total.unsqueeze(-2)
    return Result(torch.where(den.bad, mean_of(seen), out), state, den.bad & (seen[..., -1:] > 0))


def _windowed(
    call: Call,
    x: Tensor,
    phi: Tensor,
    own: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sums: Sums,
    past: WindowState,
) -> tuple[Tensor, Tensor | None, Sums, WindowState]:
    """Values and normaliser of rows x (b, g, r, d), their bound, and sums and window after the token."""
    near, prepared, seen = call.near, call.map, past.seen + 1
    here = torch.zeros_like(past.padded[:, :1]) if past.padded.shape[1] else k.new_zeros(len(k), 1, dtype=torch.bool)
    start = starts(near, mask, past.start, past.seen)
    keys, values = torch.cat([past.k, k], dim=2), torch.cat([past.v, v], dim=2)
    padded, sink = torch.cat([past.padded, here if mask is None else mask], dim=1), torch.cat([past.sink, here], dim=1)
    begin = past.seen - past.k.shape[2]
    # 1. A key that leaves a sliding window enters the kernel's sums before the token is read.
    left = near.held_from(seen) - begin if start is None else 0
    if left and not near.in_blocks:
        sums = _absorbed(prepared, sums, keys[..., :left, :], values[..., :left, :], (padded | sink)[:, :left])
        keys, values, padded, sink = keys[..., left:, :], values[..., left:, :], padded[:, left:], sink[:, left:]
        begin, left = begin + left, 0
    # 2. Exact terms, and the kernel.
    exact_k, exact_v, hidden = keys, values, padded
    if near.sinks:
        exact_k, exact_v = torch.cat([past.sink_k, keys], dim=2), torch.cat([past.sink_v, values], dim=2)
        first: int | Tensor = begin if start is None else near.held_places(start, past.seen)[:, None]
        hidden = torch.cat([past.sink_position >= first, padded], dim=1)
    logits = exact_logits(x.to(prepared.dtype), exact_k.to(prepared.dtype), prepared.scale, prepared.phi.kernel)
    logits = logits.masked_fill(hidden[:, None, None], MASKED)
    rows, log_weight, bound = _kernel(prepared, phi, sums)
    log_weight = log_weight + own
    ref = torch.maximum(logits.amax(-1, keepdim=True), log_weight).clamp_min(EMPTY)
    weights, share = (logits - ref).exp(), (log_weight - ref).exp()
    exact = weights @ ones_beside(exact_v.to(prepared.dtype), name="columns")
    if bound is not None:
        bound = bound * share + exact[..., -1:]
    rows = torch.addcmul(exact, rows, share)
    # 3. Blocks are left as a whole, behind the row that ends one.
    if start is not None:
        gone = torch.arange(begin, seen, device=k.device) < near.held_places(start, seen)[:, None]
        if not may_look(k) or bool((gone & ~padded).any()):
            sums = _absorbed(prepared, sums, keys, values, padded | sink | ~gone)
        padded, left = padded | gone, max(0, keys.shape[2] - near.most_held())
    elif left:
        sums = _absorbed(prepared, sums, keys[..., :left, :], values[..., :left, :], (padded | sink)[:, :left])
    held = (keys[..., left:, :], values[..., left:, :], padded[:, left:], sink[:, left:])
    return rows, bound, sums, WindowState(*held, *past[4:7], seen, near.setting, start, past.complete)


def _kernel(prepared: PreparedMap, phi: Tensor, sums: Sums) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values and normaliser of rows phi (b, g, r, m), the log of their factor, and the bound of signed maps."""
    last = sums.value[..., -1:, :] if prepared.phi.has_constant else None
    bound = None if prepared.positive else cauchy_schwarz(phi, sums.value[..., -1].unsqueeze(-2))
    rows, factor = prepared.phi.answer(phi @ sums.value, last, phi)
    ref = sums.ref[..., None, None]
    return rows, ref if factor is None else ref + factor, bound


def _absorbed(prepared: PreparedMap, sums: Sums, k: Tensor, v: Tensor, mask: Tensor | None) -> Sums:
    """Sums after a few more keys."""
    psi, scale = features = prepared.features("key", k)
    if mask is not None:
        scale = scale.masked_fill(spread_mask(mask), MASKED)
    v, ref = v.to(psi.dtype), scale.amax((-2, -1))
    return add(sums, Sums(key_sums(psi, scale, v, ref, prepared.phi.columns(features, v)), ref))
