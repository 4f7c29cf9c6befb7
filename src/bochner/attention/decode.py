"""One token after a state: one `absorb` and one `read` in as few operations as they take.

The numbers are those of the scan. Features are relative to their largest logit, and nothing is asked of a mask where no
key was ever padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bochner.attention.attend import leave
from bochner.attention.call import Call, Keys, Result
from bochner.attention.features import EMPTY, MASKED
from bochner.attention.layout import starts
from bochner.attention.softmax import attend_zones
from bochner.attention.state import State, Sums, WindowState, add_key, divided, normaliser, read_sums, spread_mask

pad = torch.nn.functional.pad


def step(call: Call, q: Tensor, keys: Keys, state: State, decay: Tensor | None) -> Result | None:
    """Attention of one query (b, h, 1, d) after one more key and value (b, g, 1, .).

    None where that is for the scan: more tokens, gradients, sinks that are not all there yet.
    """
    k, v, mask, *_ = keys
    if q.shape[2] != 1 or k.shape[2] != 1 or call.composed or not call.normalize or torch.is_grad_enabled():
        return None
    if call.near.sinks and not (state.window is not None and state.window.complete):
        return None
    prepared, near, (b, g, _, d) = call.map, call.near, k.shape
    x, u, sums, window = q.reshape(b, g, -1, d), v.to(prepared.dtype), Sums(state.sums, state.log_scale), state.window
    if decay is not None:  # everything is counted from this token on
        decay = decay.to(u.dtype).expand(b, g, 1)
        sums = sums._replace(ref=sums.ref + decay.squeeze(-1))
        window = None if window is None else _decayed(window, decay.unsqueeze(-1))
    new = pad(u, (0, 1), value=1.0)  # (b, g, 1, v + 1)
    total = state.total + (new if mask is None else new.masked_fill(spread_mask(mask), 0)).squeeze(2)
    phi, own = prepared.few_features("query", x, scaled=near.exact)
    if window is None or not near.exact:
        features = prepared.few_features("key", k)
        columns = prepared.phi.columns(features, u) if prepared.has_constant else None
        sums = add_key(sums, features, new if columns is None else columns, mask, looks=call.looks)
        rows, _, bound = read_sums(phi, sums, prepared)
        den, bad = normaliser(rows[..., -1:], bound, prepared.floor, looks=call.looks)
        num = rows[..., :-1]
    else:
        window = _with_token(call, k, v, mask, window)
        if not near.in_blocks:  # a key leaves before the token is read, a block behind the row that ends one
            sums, window = leave(call, sums, window)
        exact, log_exact = _exact_rows(call, x, window)
        rows, factor, bound = read_sums(phi, sums, prepared)
        log_weight = sums.ref.unsqueeze(-1).unsqueeze(-1) + (own if factor is None else own + factor)
        ref = torch.maximum(log_exact, log_weight).clamp_min(EMPTY)
        weight, share = (log_exact - ref).exp(), (log_weight - ref).exp()
        bound = None if bound is None else torch.addcmul(weight, bound, share)
        den, bad = normaliser(torch.addcmul(weight, rows[..., -1:], share), bound, prepared.floor, looks=call.looks)
        num = torch.addcmul(exact * weight, rows[..., :-1], share)
        if near.in_blocks:
            sums, window = leave(call, sums, window)
    seen = total.unsqueeze(-2)
    out = divided(num, den, bad, seen)
    return Result(out, State(*sums, total, window, state.origin), None if bad is None else bad & (seen[..., -1:] > 0))


def _decayed(window: WindowState, decay: Tensor) -> WindowState:
    """A window whose keys weigh exp(decay) of what they did, (b, g, 1, 1)."""
    pairs = ((window.shift, window.k), (window.sink_shift, window.sink_k))
    shifts = [decay.expand(*k.shape[:3], 1) if t is None else t + decay for t, k in pairs]
    return window._replace(shift=shifts[0], sink_shift=shifts[1])


def _with_token(call: Call, k: Tensor, v: Tensor, mask: Tensor | None, past: WindowState) -> WindowState:
    """The window with one more key, before any leaves it."""
    near, seen = call.near, past.seen + 1
    k, v = torch.cat([past.k, k], dim=2), torch.cat([past.v, v], dim=2)
    start, unpadded = starts(near, mask, past.start, past.seen), past.unpadded and mask is None and past.start is None
    if unpadded:
        padded, begin = torch.zeros(k.shape[::2], dtype=torch.bool, device=k.device), seen - k.shape[2]
        sink = padded if begin >= near.sinks else padded | (torch.arange(begin, seen, device=k.device) < near.sinks)
    else:
        here = torch.zeros(k.shape[0], 1, dtype=torch.bool, device=k.device)
        padded = torch.cat([past.padded, here if mask is None else mask], dim=1)
        sink = torch.cat([past.sink, here], dim=1)
    shift = None if past.shift is None else pad(past.shift, (0, 0, 0, 1))
    return past._replace(k=k, v=v, padded=padded, sink=sink, seen=seen, start=start, unpadded=unpadded, shift=shift)


def _exact_rows(call: Call, x: Tensor, keys: WindowState) -> tuple[Tensor, Tensor]:
    """Rows by the exact terms alone, (b, g, r, v), and the logarithm of their normalisers."""
    k, v, shift, hidden, begin = keys.k, keys.v, keys.shift, None, keys.seen - keys.k.shape[2]
    sinks = min(begin, call.near.sinks) if keys.unpadded else call.near.sinks
    if sinks:
        k, v = torch.cat([keys.sink_k[:, :, :sinks], k], dim=2), torch.cat([keys.sink_v[:, :, :sinks], v], dim=2)
        if shift is not None and keys.sink_shift is not None:
            shift = torch.cat([keys.sink_shift[:, :, :sinks], shift], dim=2)
    if not keys.unpadded:
        hidden = keys.padded
        if sinks:
            first = begin if keys.start is None else call.near.held_places(keys.start, keys.seen - 1)[:, None]
            hidden = torch.cat([keys.sink_position >= first, hidden], dim=1)
        hidden = torch.zeros(hidden.shape, dtype=call.map.dtype, device=x.device).masked_fill(hidden, MASKED)
        hidden = hidden[:, None, None, None]
    if shift is not None:
        hidden = shift.mT.unsqueeze(2) if hidden is None else shift.mT.unsqueeze(2) + hidden
    x, k, v = (t.unsqueeze(2).to(call.map.dtype) for t in (x, k, v))
    rows, log_norm = attend_zones(x, k, v, hidden, call.map.scale, call.map.phi.kernel)
    return rows.squeeze(2), log_norm.squeeze(2)
