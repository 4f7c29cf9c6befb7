"""Exact softmax near each row and on the first keys, the kernel elsewhere, one normaliser.

Keys come in blocks of c. A row sees the *zone* of its block exactly (kind `"block"`: its own and the neighbouring
blocks; causal: up to itself) and all farther blocks by the kernel, from sums of block states: no kernel product is ever
masked. Blocks are counted from the first place of the batch; `phases` sees to sequences that begin elsewhere.
Kind `"sliding"` is the same with a band of the zone exact and the rest of the zone by the kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bochner._checks import BochnerError
from bochner.attention.bidirectional import absorb_keys
from bochner.attention.call import Call, Result
from bochner.attention.careful import careful_rows
from bochner.attention.geometry import Geometry
from bochner.attention.numerics import EMPTY, may_look
from bochner.attention.recompute import run_scan
from bochner.attention.state import State, WindowState, absorb, packed, unpacked
from bochner.attention.zone import ZoneScan


class Sinks(NamedTuple):
    """The first t unpadded keys: k, v (b, g, t, .); position (b, t), -1 for one that does not exist (yet)."""

    k: Tensor
    v: Tensor
    position: Tensor


def windowed(call: Call, q: Tensor, k: Tensor, v: Tensor, hole: Tensor | None, state: State) -> Result:
    """Rows of q (b, g, r, n, d), the last n of the keys k, v (b, g, s, .), after those of `state`."""
    n, s = q.shape[-2], k.shape[-2]
    if n < s and call.is_causal:
        state = advance(call, k[..., : s - n, :], v[..., : s - n, :], None if hole is None else hole[:, : s - n], state)
        k, v, hole = k[..., s - n :, :], v[..., s - n :, :], None if hole is None else hole[:, s - n :]
    past = state.window or empty_window(call, k, v)
    padded = torch.zeros(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device) if hole is None else hole
    sinks, is_sink = find_sinks(call, past, k, v, padded)
    # 1. Keys from the first that any row sees exactly, and where they lie.
    keys, values = _joined(past.k, k), _joined(past.v, v)
    holes = torch.cat([past.padded, padded], dim=1)
    far_holes = holes | torch.cat([past.sink, is_sink], dim=1)
    if not (call.window or call.is_causal):  # no zones: the kernel sees all keys but the sinks
        state = absorb_keys(call, state, keys, values, far_holes)
        keys, values, holes, far_holes = keys[..., :0, :], values[..., :0, :], holes[:, :0], far_holes[:, :0]
    geometry = Geometry.of(call, n, past.seen, past.k.shape[2], keys.shape[2])
    # 2. The rows.
    sees_any = None if hole is None else _sees_any(call, holes, n, past, state)
    known = holes if hole is not None or past.k.shape[2] else None
    scan = ZoneScan(call, geometry, known, far_holes, sinks.position, sees_any)
    tensors = (q, keys, values, sinks.k, sinks.v, packed(state), state.log_scale)
    out, sums, lost, small, ref = run_scan(scan, *tensors)
    if call.may_look(lost) and bool(lost.any()):
        again, doubtful = careful_rows(scan, tensors, lost)
        out, lost = torch.where(lost, again, out), lost & doubtful
    out, lost, small = (t.flatten(2, 3) for t in (out, lost, small))
    # 3. The state after them: what has left the window enters the kernel.
    new = None
    if call.is_causal:
        held = slice(held_from(call, past.seen + n) - (past.seen - past.k.shape[2]), None)
        left = slice(geometry.absorbed, held.start)
        new = unpacked(sums, ref)
        if left.stop > left.start:
            features = call.features("key")(keys[..., left, :])
            new = absorb(new, features, values[..., left, :], far_holes[:, left])
        kept = (keys[..., held, :], values[..., held, :], holes[:, held], (far_holes & ~holes)[:, held])
        setting = (call.window, call.sinks, call.window_kind)
        new = State(*new[:3], WindowState(*kept, *sinks, past.seen + n, setting))
    return Result(out, new, lost, small)


def advance(call: Call, k: Tensor, v: Tensor, hole: Tensor | None, state: State) -> State:
    """The state after more keys that no query looks at."""
    past = state.window or empty_window(call, k, v)
    s = k.shape[-2]
    padded = torch.zeros(k.shape[0], s, dtype=torch.bool, device=k.device) if hole is None else hole
    sinks, is_sink = find_sinks(call, past, k, v, padded)
    keys, values = torch.cat([past.k, k], dim=2), torch.cat([past.v, v], dim=2)
    holes = torch.cat([past.padded, padded], dim=1)
    is_sink = torch.cat([past.sink, is_sink], dim=1)
    held = held_from(call, past.seen + s) - (past.seen - past.k.shape[2])
    if held:
        state = absorb_keys(call, state, keys[..., :held, :], values[..., :held, :], (holes | is_sink)[:, :held])
    kept = (keys[..., held:, :], values[..., held:, :], holes[:, held:], is_sink[:, held:])
    setting = (call.window, call.sinks, call.window_kind)
    return state._replace(window=WindowState(*kept, *sinks, past.seen + s, setting))


def held_from(call: Call, seen: int) -> int:
    """The place of the first key that the next row sees exactly, after `seen` keys."""
    w = call.window
    if not w:
        return seen
    return max(0, (seen // w - 1) * w if call.window_kind == "block" else seen - w)


def empty_window(call: Call, k: Tensor, v: Tensor) -> WindowState:
    """A window before the first key."""
    nothing = torch.zeros(k.shape[0], 0, dtype=torch.bool, device=k.device)
    none_k, none_v = k[..., :0, :], v[..., :0, :]
    position = torch.zeros(k.shape[0], 0, dtype=torch.int64, device=k.device)
    setting = (call.window, call.sinks, call.window_kind)
    return WindowState(none_k, none_v, nothing, nothing, none_k, none_v, position, 0, setting)


def find_sinks(call: Call, past: WindowState, k: Tensor, v: Tensor, padded: Tensor) -> tuple[Sinks, Tensor]:
    """The first t unpadded keys of those seen before and these; and which of these (b, s) are among them."""
    b, s = padded.shape
    if not call.sinks:
        return Sinks(past.sink_k, past.sink_v, past.sink_position), torch.zeros_like(padded)
    here = torch.arange(past.seen, past.seen + s, device=k.device).expand(b, s)
    if not past.seen and may_look(padded) and not bool(padded.any()):
        return Sinks(k[..., : call.sinks, :], v[..., : call.sinks, :], here[:, : call.sinks]), here < call.sinks
    position = torch.cat([past.sink_position, torch.where(padded, -1, here)], dim=1)
    found = (position >= 0).cumsum(1)
    is_sink = (position >= 0) & (found <= call.sinks)
    count = min(call.sinks, position.shape[1])
    chosen = torch.argsort(is_sink.to(torch.int8), dim=1, descending=True, stable=True)[:, :count]
    where = torch.where(is_sink, position, -1).gather(1, chosen)
    sink_k, sink_v = (_take(torch.cat([old, new], dim=2), chosen) for old, new in ((past.sink_k, k), (past.sink_v, v)))
    return Sinks(sink_k, sink_v, where), is_sink[:, past.sink_position.shape[1] :]


def _joined(old: Tensor, new: Tensor) -> Tensor:
    """Keys or values (b, g, s, d) one after another."""
    return torch.cat([old, new], dim=2) if old.shape[2] else new


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (b, g, s, d) by index (b, t)."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))


def _sees_any(call: Call, holes: Tensor, n: int, past: WindowState, state: State) -> Tensor:
    """Which of the n rows have any key to look at, (b, 1, r, n, 1)."""
    before = (state.log_scale > EMPTY).any(-1) | (past.sink_position >= 0).any(-1)
    there = torch.cat([before.unsqueeze(-1), ~holes], dim=-1)
    seen = there.cumsum(-1)[:, -n:] > 0 if call.is_causal else there.any(-1, keepdim=True).expand(-1, n)
    return seen[:, None, None, :, None].expand(-1, 1, call.groups, -1, -1)


def check_state(held: WindowState | None, setting: tuple[int, int, str]) -> None:
    """Refuse to resume with another window than the state was made with."""
    have = (0, 0, "") if held is None else held.setting
    if have[:2] != setting[:2] or (setting[0] and have[2] != setting[2]):
        made, asked = (f"window={s[0]}, sinks={s[1]}" + f", window_kind={s[2]!r}" * bool(s[0]) for s in (have, setting))
        raise BochnerError(f"The 'state' was made with {made}, this call has {asked}; use the same.")
