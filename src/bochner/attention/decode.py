"""One token after a state: one `absorb` and one `read` in as few operations as they take.

The numbers are those of the scan. Features are relative to their largest logit, and nothing is asked of a mask where no
key was ever padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bochner.attention.attend import leave
from bochner.attention.features import MASKED
from bochner.attention.layout import starts
from bochner.attention.scan import Call, Result
from bochner.attention.softmax import attend_zones
from bochner.attention.state import Keys, State, Sums, WindowState, add_key, finished, mean_of, read_sums, spread_mask

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
        columns = prepared.reader.columns(features, u) if prepared.reader else None
        sums = add_key(sums, features, new if columns is None else columns, mask, looks=call.looks)
        rows, _, bound = read_sums(phi, sums, prepared.reader, positive=prepared.positive)
        out, bad, _ = finished(rows, own, bound, (), prepared.floor, looks=call.looks)
    else:
        start = starts(near, mask, window.start, window.seen)
        window = window._replace(held=window.held.then(keys), seen=window.seen + 1, start=start)
        if not near.in_blocks:  # a key leaves before the token is read, a block behind the row that ends one
            sums, window = leave(call, sums, window)
        rows, factor, bound = read_sums(phi, sums, prepared.reader, positive=prepared.positive)
        log_weight = sums.ref[..., None, None] + (own if factor is None else own + factor)
        exact = _exact_rows(call, x, window)
        out, bad, _ = finished(rows, log_weight, bound, [exact], prepared.floor, looks=call.looks)
        if near.in_blocks:
            sums, window = leave(call, sums, window)
    seen = total.unsqueeze(-2)
    after = State(*sums, total, window, state.origin)
    if bad is None:
        return Result(out, after)
    return Result(torch.where(bad, mean_of(seen), out), after, bad & (seen[..., -1:] > 0))


def _decayed(window: WindowState, decay: Tensor) -> WindowState:
    """A window whose keys weigh exp(decay) of what they did, (b, g, 1, 1)."""
    shifts = [decay.expand(*t.k.shape[:3], 1) if t.shift is None else t.shift + decay for t in window[:2]]
    held, sinks = (t._replace(shift=shift) for t, shift in zip(window[:2], shifts, strict=True))
    return window._replace(held=held, sinks=sinks)


def _exact_rows(call: Call, x: Tensor, window: WindowState) -> tuple[Tensor, Tensor]:
    """Rows by the exact terms alone, (b, g, r, v), and the logarithm of their normalisers."""
    near, keys, begin, dtype = call.near, window.held, window.seen - window.held.k.shape[2], call.map.dtype
    hidden = keys.padded
    sinks = min(begin, near.sinks) if window.unpadded else near.sinks
    if sinks:
        if not window.unpadded:  # those that the window holds are seen there
            first = begin if window.start is None else near.held_places(window.start, window.seen - 1)[:, None]
            twice = window.sink_position >= first
            none = twice.new_zeros(keys.k.shape[::2])
            hidden = torch.cat([twice, none if hidden is None else hidden], dim=1)
        keys = window.sinks.part(slice(0, sinks)).then(keys)
    bias = None if keys.shift is None else keys.shift.mT.unsqueeze(2)
    if hidden is not None:
        mask = torch.zeros(hidden.shape, dtype=dtype, device=x.device).masked_fill(hidden, MASKED)[:, None, None, None]
        bias = mask if bias is None else bias + mask
    x, k, v = (t.unsqueeze(2).to(dtype) for t in (x, keys.k, keys.v))
    rows, log_norm = attend_zones(x, k, v, bias, call.map.scale, call.map.phi.kernel)
    return rows.squeeze(2), log_norm.squeeze(2)
