"""Exact softmax in a local window and on the first keys, jointly normalised with the kernel elsewhere.

Three partial results over disjoint sets of keys are merged row by row: the band (exact), the sinks outside the band
(exact), and the kernel on the rest. The kernel part is plain causal attention with the keys delayed by w places; for a
symmetric window the same once more on the reversed sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bochner._checks import BochnerError
from bochner.attention.state import EMPTY, MASKED, Partial, State, WindowState, cat_rows, flatten_groups

if TYPE_CHECKING:
    from bochner.attention.core import _Call


def attend(
    call: _Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    window: int,
    sinks: int,
    state: State | None,
) -> tuple[Partial, State | None]:
    """Windowed attention, rows grouped as (b, g, h/g * n); `window=0` keeps only the sinks exact."""
    b, g, n, _ = k.shape
    padded = torch.zeros(b, n, dtype=torch.bool, device=k.device) if mask is None else mask
    past = empty_window(k, v, window, sinks) if state is None or state.window is None else state.window
    # 1. The first t unpadded keys, of those seen before and these.
    here = torch.arange(past.seen, past.seen + n, device=k.device).expand(b, n)
    position = torch.cat([past.sink_position, torch.where(padded, -1, here)], dim=1)
    found = (position >= 0).cumsum(1)
    is_sink = (position >= 0) & (found <= sinks)
    chosen = torch.argsort(is_sink.to(torch.int8), dim=1, descending=True, stable=True)[:, :sinks]
    sink_position = torch.where(is_sink, position, -1).gather(1, chosen)
    sink_k, sink_v = (_take(torch.cat([old, new], dim=2), chosen) for old, new in ((past.sink_k, k), (past.sink_v, v)))
    # 2. The keys that the band can reach, with the window of the past before them.
    keys, values = torch.cat([past.k, k], dim=2), torch.cat([past.v, v], dim=2)
    holes = torch.cat([past.padded, padded], dim=1)
    kernel_holes = holes | torch.cat([past.sink, is_sink[:, past.sink_position.shape[1] :]], dim=1)
    x = q.reshape(b, g, call.groups, *q.shape[-2:])
    parts = [_band(call, x, keys, values, holes, window, is_causal)] if window else []
    if sinks:
        parts.append(_sinks(call, x, sink_k, sink_v, sink_position, past.seen, window, is_causal))
    # 3. The kernel, on keys at least w places back (and, if not causal, ahead).
    if window or is_causal:
        delayed = (keys[:, :, :n], values[:, :, :n], kernel_holes[:, :n])
        kernel, new = call.causal(q, *delayed, state, _keep)
    else:
        kernel, new = call.bidirectional(q, k, v, kernel_holes, _keep)
    parts.append(kernel)
    if window and not is_causal:
        parts.append(_ahead(call, q, k, v, kernel_holes[:, window:], window))
    total = parts[0]
    for part in parts[1:]:
        total = merge_partials(total, part)
    recent = slice(n, n + window)
    kept = WindowState(
        keys[:, :, recent],
        values[:, :, recent],
        holes[:, recent],
        (kernel_holes & ~holes)[:, recent],
        sink_k,
        sink_v,
        sink_position,
        past.seen + n,
    )
    return total, State(new.kv, new.norm, new.log_scale, kept)


def empty_window(k: Tensor, v: Tensor, window: int, sinks: int) -> WindowState:
    """A window before the first key: w padded places and no sink."""
    b, g = k.shape[:2]
    full = torch.ones(b, window, dtype=torch.bool, device=k.device)
    return WindowState(
        k.new_zeros(b, g, window, k.shape[-1]),
        v.new_zeros(b, g, window, v.shape[-1]),
        full,
        torch.zeros_like(full),
        k.new_zeros(b, g, sinks, k.shape[-1]),
        v.new_zeros(b, g, sinks, v.shape[-1]),
        torch.full((b, sinks), -1, device=k.device),
        0,
    )


def merge_partials(a: Partial, b: Partial) -> Partial:
    """Attention over the union of two disjoint sets of keys."""
    ref = torch.maximum(a.log_ref, b.log_ref).detach()
    wa, wb = (a.log_ref - ref).exp(), (b.log_ref - ref).exp()
    bound = None
    if a.bound is not None or b.bound is not None:
        # Exact terms are positive: they are their own bound.
        bounds = [p.den.detach() if p.bound is None else p.bound for p in (a, b)]
        bound = bounds[0] * wa.detach() + bounds[1] * wb.detach()
    return Partial(a.num * wa + b.num * wb, a.den * wa + b.den * wb, ref, bound)


def _band(call: _Call, q: Tensor, keys: Tensor, values: Tensor, holes: Tensor, window: int, is_causal: bool) -> Partial:
    """Exact attention inside the window; q (b, g, r, n, d), keys with w places of the past before them."""
    n = q.shape[-2]
    ahead = 0 if is_causal else window - 1
    rows = max(window, 128)

    def block(start: int, x: Tensor, y: Tensor, u: Tensor, hole: Tensor) -> Partial:
        i = torch.arange(start, start + x.shape[-2], device=x.device)[:, None]
        j = torch.arange(start, start + y.shape[-2], device=x.device)[None, :] - window
        allowed = (j > i - window) & (j <= i + ahead)
        return _exact(call, x, y, u, ~allowed[None] | hole[:, None, :])

    parts = []
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        reach = slice(start, min(stop + window + ahead, keys.shape[-2]))
        x, y, u = q[..., start:stop, :], keys[:, :, reach], values[:, :, reach]
        parts.append(call.run(block, start, x, y, u, holes[:, reach]))
    return flatten_groups(cat_rows(parts))


def _sinks(
    call: _Call, q: Tensor, k: Tensor, v: Tensor, position: Tensor, seen: int, window: int, is_causal: bool
) -> Partial:
    """Exact attention on the sinks outside the window; position (b, t), -1 for none."""
    i = torch.arange(seen, seen + q.shape[-2], device=q.device)[None, :, None]
    j = position[:, None, :]
    far = (j <= i - window) if is_causal else ((i - j).abs() >= window)
    return flatten_groups(call.run(_exact, call, q, k, v, ~far | (j < 0)))


def _ahead(call: _Call, q: Tensor, k: Tensor, v: Tensor, holes: Tensor, window: int) -> Partial:
    """The kernel on keys at least w places ahead: the delayed scan on the reversed sequence."""
    pad = torch.nn.functional.pad
    n = k.shape[-2]
    keys, values = (pad(t.flip(-2), (0, 0, window, 0))[:, :, :n] for t in (k, v))
    late = pad(holes.flip(-1), (window, 0), value=True)[:, :n]
    part, _ = call.causal(q.flip(-2), keys, values, late, None, _keep)

    def back(t: Tensor) -> Tensor:
        return t.unflatten(-2, (call.groups, n)).flip(-2).flatten(-3, -2)

    num, den, log_ref, bound = part
    return Partial(back(num), back(den), back(log_ref), None if bound is None else back(bound))


def _exact(call: _Call, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Partial:
    """Exact kernel attention; q (b, g, r, n, d), k and v (b, g, s, .), hidden (b or 1, n, s) True = ignore."""
    b, g, r, n, _ = q.shape
    x, y = (t.to(call.dtype) * call.root for t in (q.flatten(2, 3), k))
    logits = x @ y.mT
    if call.phi.kernel == "gaussian":
        logits = logits - 0.5 * (x.square().sum(-1, keepdim=True) + y.square().sum(-1, keepdim=True).mT)
    logits = logits.view(b, g, r, n, -1).masked_fill(hidden[:, None, None], MASKED)
    ref = logits.detach().amax(-1, keepdim=True).clamp_min(EMPTY)
    weights = (logits - ref).exp()
    num = (weights.flatten(2, 3) @ v.to(call.dtype)).view(b, g, r, n, -1)
    return Partial(num, weights.sum(-1, keepdim=True), ref)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (b, g, s, d) by index (b, t)."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))


def _keep(partial: Partial) -> Partial:
    return partial


def check_state(held: WindowState | None, window: int | None, sinks: int) -> None:
    """Refuse to resume with another window than the state was made with."""
    have = (0, 0) if held is None else (held.k.shape[-2], held.sink_k.shape[-2])
    if have != (window or 0, sinks):
        raise BochnerError(
            f"The 'state' was made with window={have[0]} and sinks={have[1]}, this call has window={window or 0} and "
            f"sinks={sinks}; use the same."
        )
