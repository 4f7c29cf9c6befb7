"""Attention of one call: the path it takes, the state after it, and the rows that could not be divided.

One token after a state is one `absorb` and one `read` in as few operations as they take. Its numbers are those of the
scan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bochner.attention.features import EMPTY, MASKED, PreparedMap
from bochner.attention.layout import Layout, Near, moved, starts
from bochner.attention.scan import Call, Result, Sinks, absorb_keys, scan_rows
from bochner.attention.softmax import attend_zones, softmax
from bochner.attention.state import (
    Keys,
    State,
    Sums,
    WindowState,
    add_key,
    finished,
    joined,
    read_sums,
    spread_mask,
    value_sums,
    with_means,
)


def attention(call: Call, q: Tensor, keys: Keys, state: State | None, decay: Tensor | None = None) -> Result:
    """Attention of q (b, h, n, d) over keys (b, g, s, .), zero where padded, after those of `state`.

    `decay` (b, g, s) or less: the logarithm of what every token leaves of the weight of those before it.
    """
    (b, g, s, d), n, near, prepared = keys.k.shape, q.shape[-2], call.near, call.map
    k, v, mask = keys[:3]
    has_sinks = not near.sinks or (state is not None and state.window is not None and state.window.complete)
    one = near.is_causal and n == s == 1 and not (call.composed or torch.is_grad_enabled())
    if state is not None and one and has_sinks:
        return step(call, q, keys, state, decay)
    fuses = prepared.phi.is_exponential and (call.looks or call.composed)
    if fuses and state is None and not (near.is_causal or near.exact):
        return Result(_by_softmax(call, q.reshape(b, g, -1, d), k, v, mask))
    if near.is_causal:
        prepared.phi.check_causal()
    else:
        call = call._replace(map=prepared.fitted_to(k, mask))
    is_whole = state is None and not call.goes_on
    state = state or nothing_seen(call.map, k, v)
    q = q.reshape(b, g, call.groups, n, d)
    if call.recompute and torch.is_grad_enabled() and not call.composed and not call.map.is_closed(q[:, :, 0], k):
        call = call._replace(recompute=False)
    if decay is not None:
        # A weight exp(g_i - g_j), with g the running sum, is a shift -g_j of the keys: a factor of a row cancels.
        decay = decay.expand(b, g, s).cumsum(-1)
        keys = keys._replace(shift=-decay.unsqueeze(-1))
        if keys.shift is not None and keys.shift.requires_grad and is_whole and not call.composed:
            keys.shift.register_hook(_without_sum)
    if near.is_causal and n < s:
        state = after_keys(call, keys.part(slice(0, s - n)), state)
        keys = keys.part(slice(s - n, s))
    before = state.total
    rows, bad, state = _rows(call, q, keys, state)
    assert rows is not None
    out, after = rows.flatten(2, 3), None
    if call.goes_on:
        after = state if decay is None else _lowered(state, decay[..., -1])
    if bad is None:
        return Result(out, after)
    # Rows that cannot be divided get the mean of the values that they may see.
    bad, values = bad.flatten(2, 3), keys.v.to(out.dtype)
    if near.is_causal:
        seen = torch.nn.functional.pad(values, (0, 1), value=1.0)
        seen = seen if keys.padded is None else seen.masked_fill(spread_mask(keys.padded), 0)
        seen = (seen.cumsum(-2) + before.unsqueeze(-2)).repeat(1, 1, call.groups, 1)
    else:
        seen = (value_sums(values, mask) + before)[:, :, None]
    out, bad = with_means(out, bad, seen)
    return Result(out, after, bad)


def _without_sum(grad: Tensor | None) -> Tensor | None:
    """Gradients (b, g, s, 1) of the shifts of all keys. A common shift changes no row, so that their sum is rounding;
    decays would count it as often as there are tokens."""
    if grad is None:
        return None
    size = grad.abs()
    return grad - size * (grad.sum(2, keepdim=True) / size.sum(2, keepdim=True).clamp_min(1e-300))


def after_keys(call: Call, keys: Keys, state: State) -> State:
    """The state after more keys (b, g, s, .), at which no row looks."""
    return _rows(call._replace(goes_on=True), None, keys, state)[2]


def _lowered(state: State, decay: Tensor) -> State:
    """A state counted from the last key on, after decays that sum up to (b, g): its numbers never grow large."""
    dtype, sums = state.sums.dtype, state.sums
    if decay.requires_grad:
        sums = sums * (decay - decay.detach()).to(dtype).exp()[..., None, None]
    window = None if state.window is None else _decayed(state.window, decay[..., None, None], dtype)
    return state._replace(sums=sums, log_scale=(state.log_scale + decay.detach()).to(dtype), window=window)


def nothing_seen(prepared: PreparedMap, k: Tensor, v: Tensor) -> State:
    """The state before the first of the keys k and v (b, g, s, .)."""
    (b, g), phi, size = k.shape[:2], prepared.phi, v.shape[-1]
    zero = torch.zeros((), dtype=prepared.dtype, device=k.device)  # takes no more memory than this
    columns = size + 1 if prepared.reader is None else prepared.reader.num_columns(size)
    return State(
        zero.expand(b, g, phi.feature_dim, columns),
        torch.full((b, g), EMPTY, dtype=prepared.dtype, device=k.device),
        zero.expand(b, g, size + 1),
    )


def _by_softmax(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """All keys, by an exponential map: one absorb and one read, both as softmax attention, stable at any scale.

    With the frequencies w_i as queries the keys are summed up, `kv_i / norm_i = softmax_j(w_i . y_j + row_j) v_j`; with
    the w_i as keys they are read, `out = softmax_i(w_i . x + log norm_i) kv_i / norm_i`.
    """
    query, key, dtype = call.map.exponent("query"), call.map.exponent("key"), call.map.dtype
    plain = call.composed or (torch.is_grad_enabled() and not call.recompute)
    y, row = key.at(k.to(dtype))
    if mask is not None:
        row = row.masked_fill(spread_mask(mask), MASKED)
    kv, log_norm = softmax(key.weight.expand(*k.shape[:2], -1, -1), y, v.to(dtype), row.mT, plain=plain)
    for offset in (key.offset, query.offset):
        if offset is not None:
            log_norm = log_norm + offset.unsqueeze(-1)
    x, _ = query.at(q.to(dtype))
    return softmax(x, query.weight.expand(*k.shape[:2], -1, -1), kv, log_norm.mT, plain=plain)[0]


def _rows(call: Call, q: Tensor | None, new: Keys, state: State) -> tuple[Tensor | None, Tensor | None, State]:
    """Rows of q (b, g, r, n, d) whose own keys are `new`, after those of `state`; which are bad; the state then.

    Without q no row looks at the keys, and the state is all that is asked for.
    """
    near, sums, past = call.near, Sums(state.sums, state.log_scale), state.window
    if past is None:
        none = Keys(new.k[:, :, :0], new.v[:, :, :0])
        past = WindowState(none, none, none.k.new_zeros(new.k.shape[0], 0, dtype=torch.int64), 0, near.setting)
    start = starts(near, new.padded, past.start, past.seen)
    sinks, new = find_sinks(near, past, new)
    if q is not None and not (near.window or near.is_causal):  # no zones: the kernel sees all keys but the sinks
        sums = absorb_keys(call, sums, new)
        layout = Layout.of(near, q.shape[3], 0, 0, 0)
        return *scan_rows(call, q, new.part(slice(0, 0)), sinks, sums, layout)[:2], state
    keys, seen, done = joined(past.held, new) if past.seen else new, past.seen + new.k.shape[2], 0
    out: Tensor | None = None
    bad: Tensor | None = None
    if q is not None and (start is None or seen <= near.window):  # no key has left, wherever blocks begin
        layout = Layout.of(near, q.shape[3], past.seen, past.held.k.shape[2], keys.k.shape[2])
        out, bad, sums = scan_rows(call, q, keys, sinks, sums, layout)
        done = layout.done if start is None else 0
    elif q is not None and start is not None:
        out, bad = _moved_rows(call, q, keys, sinks, sums, start, past.seen)
    if not call.goes_on:
        return out, bad, state
    total = state.total + value_sums(new.v.to(call.map.dtype), new.padded)
    window = past._replace(held=keys, seen=seen, start=start, complete=not near.sinks)
    if sinks is not None:
        _, place, there = sinks
        told = window.unpadded or (call.looks and place.shape[1] == near.sinks and bool(there.all()))
        complete = past.complete or (seen >= near.sinks and told)
        place = torch.where(there, place + past.seen, -1).expand(new.k.shape[0], -1)
        window = window._replace(sinks=sinks.keys, sink_position=place, complete=complete)
    sums, window = leave(call, sums, window, done)
    return out, bad, State(*sums, total, window if near.exact else None)


def _moved_rows(
    call: Call, q: Tensor, keys: Keys, sinks: Sinks | None, sums: Sums, start: Tensor, seen: int
) -> tuple[Tensor, Tensor | None]:
    """Rows of sequences whose blocks begin at the places `start`: moved so that their blocks lie on each other."""
    near, w, n, (b, _, s, _) = call.near, call.near.window, q.shape[3], keys.k.shape
    blocks, after = (n + 2 * w - 2) // w, 0 if near.is_causal else 1
    lead = (seen - start) % w
    front, length = lead + w - (s - n), (blocks + 1 + after) * w
    padded = torch.zeros(b, s, dtype=torch.bool, device=start.device) if keys.padded is None else keys.padded
    there = keys.each(lambda t, dim: moved(t, front, length, dim))
    there = there._replace(padded=moved(padded, front, length, 1, True))
    if sinks is not None:
        sinks = sinks._replace(place=sinks.place + lead[:, None])
    layout = Layout(near, blocks * w, length, 0, w, w, 0)
    out, bad, _ = scan_rows(call._replace(goes_on=False), moved(q, lead, blocks * w, 3), there, sinks, sums, layout)
    return moved(out, -lead, n, 3), None if bad is None else moved(bad, -lead, n, 3, True)


def leave(call: Call, sums: Sums, window: WindowState, done: int = 0) -> tuple[Sums, WindowState]:
    """The kernel's sums with the keys that the next row does not see exactly, and the window without them.

    The first `done` keys are in the sums already, where blocks begin at the same place for all sequences.
    """
    near, seen, keys = call.near, window.seen, window.held
    count = keys.k.shape[2]
    first, left = seen - count, near.held_from(seen) - seen + count
    if window.start is not None:
        gone = torch.arange(first, seen, device=keys.k.device) < near.held_places(window.start, seen)[:, None]
        hidden = ~gone if keys.far_holes is None else keys.far_holes | ~gone
        if not call.looks or not bool(hidden.all()):
            sums = absorb_keys(call, sums, keys._replace(padded=hidden))
        keys = keys._replace(padded=gone if keys.padded is None else keys.padded | gone)
        left = max(0, count - near.most_held)
    elif left > done:
        some = keys.part(slice(done, left))
        if keys.padded is None and first + done >= near.sinks:
            some = some._replace(sink=None)
        sums = absorb_keys(call, sums, some)
    keys = keys.part(slice(left, None)) if left else keys
    if window.unpadded and first + left >= near.sinks:  # none of those that stay is a sink
        keys = keys._replace(sink=None)
    return sums, window._replace(held=keys)


def find_sinks(near: Near, past: WindowState, new: Keys) -> tuple[Sinks | None, Keys]:
    """The first t unpadded keys of those seen before and the new ones, which are marked."""
    if not near.sinks:
        return None, new
    b, s = new.k.shape[::2]
    here = torch.arange(s, device=new.k.device).expand(b, s)
    if not past.seen and new.padded is None:
        first = here[:1, : near.sinks]
        return Sinks(new.part(slice(0, near.sinks)), first, first >= 0), new._replace(sink=here < near.sinks)
    known = past.sink_position >= 0
    there = torch.cat([known, torch.ones_like(here, dtype=torch.bool) if new.padded is None else ~new.padded], dim=1)
    place = torch.cat([past.sink_position - past.seen, here], dim=1)
    is_sink = there & (there.cumsum(1) <= near.sinks)
    chosen = is_sink.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, : near.sinks]
    at = chosen[:, None, :, None]
    keys = joined(past.sinks, new)._replace(padded=None, sink=None)
    keys = keys.each(lambda t, _: t.gather(2, at.expand(-1, t.shape[1], -1, t.shape[-1])))
    sinks = Sinks(keys, place.gather(1, chosen), is_sink.gather(1, chosen))
    return sinks, new._replace(sink=is_sink[:, known.shape[1] :])


def step(call: Call, q: Tensor, keys: Keys, state: State, decay: Tensor | None) -> Result:
    """Attention of one query (b, h, 1, d) after one more key and value (b, g, 1, .)."""
    k, v, mask, *_ = keys
    prepared, near, (b, g, _, d) = call.map, call.near, k.shape
    x, u, sums, window = q.reshape(b, g, -1, d), v.to(prepared.dtype), Sums(state.sums, state.log_scale), state.window
    if decay is not None:  # everything is counted from this token on
        decay = decay.to(u.dtype).expand(b, g, 1)
        sums = sums._replace(ref=sums.ref + decay.squeeze(-1))
        window = None if window is None else _decayed(window, decay.unsqueeze(-1), u.dtype)
    new = torch.cat([u, u.new_ones(b, g, 1, 1)], dim=-1)
    total = state.total + (new if mask is None else new.masked_fill(spread_mask(mask), 0)).squeeze(2)
    phi, own = prepared.few_features("query", x, scaled=near.exact)
    if window is None or not near.exact:
        features = prepared.few_features("key", k)
        columns = prepared.reader.columns(features, u) if prepared.reader else None
        sums = add_key(sums, features, new if columns is None else columns, mask, looks=call.looks)
        rows, _, bound = read_sums(phi, sums, prepared.reader, positive=prepared.positive)
        out, bad, _ = finished(rows, own, bound, (), prepared.floor, looks=call.looks)
    else:
        window = window._replace(start=starts(near, mask, window.start, window.seen))
        seen = joined(window.held, keys, _beside(near, window))  # copied once
        window = window._replace(held=seen.part(slice(0, window.held.k.shape[2] + 1)), seen=window.seen + 1)
        if not near.in_blocks:  # a key leaves before the token is read, a block behind the row that ends one
            last = window.held.k.shape[2]
            sums, window = leave(call, sums, window)
            seen = seen.part(slice(last - window.held.k.shape[2], None))
        rows, factor, bound = read_sums(phi, sums, prepared.reader, positive=prepared.positive)
        log_weight = sums.ref[..., None, None] + (own if factor is None else own + factor)
        exact = _exact_rows(call, x, seen)
        out, bad, _ = finished(rows, log_weight, bound, [exact], prepared.floor, looks=call.looks)
        if near.in_blocks:
            sums, window = leave(call, sums, window)
    if bad is not None:
        out, bad = with_means(out, bad, total.unsqueeze(-2))
    return Result(out, State(*sums, total, window, state.origin), bad)


def _decayed(window: WindowState, decay: Tensor, dtype: torch.dtype) -> WindowState:
    """A window whose keys weigh exp(decay) of what they did, (b, g, 1, 1)."""
    shifts = [(decay.expand(*t.k.shape[:3], 1) if t.shift is None else t.shift + decay).to(dtype) for t in window[:2]]
    held, sinks = (t._replace(shift=shift) for t, shift in zip(window[:2], shifts, strict=True))
    return window._replace(held=held, sinks=sinks)


def _beside(near: Near, window: WindowState) -> Keys:
    """The sinks that the next row sees beside the keys that a window holds; those that it holds are padding."""
    begin = window.seen - window.held.k.shape[2]
    if not near.in_blocks:
        begin = max(begin, near.held_from(window.seen + 1))
    if window.unpadded or not near.sinks:
        return window.sinks.part(slice(0, min(begin, near.sinks)))
    first = begin if window.start is None else near.held_places(window.start, window.seen)[:, None]
    return window.sinks._replace(padded=window.sink_position >= first)


def _exact_rows(call: Call, x: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
    """Rows by the exact terms alone, (b, g, r, v), and the logarithm of their normalisers."""
    dtype, bias = call.map.dtype, None if keys.shift is None else keys.shift.mT
    if (hidden := keys.padded) is not None:
        mask = torch.zeros(hidden.shape, dtype=dtype, device=x.device).masked_fill(hidden, MASKED)[:, None, None]
        bias = mask if bias is None else bias + mask
    x, k, v = x.to(dtype), keys.k.to(dtype), keys.v.to(dtype)
    return attend_zones(x, k, v, bias, call.map.scale, call.map.phi.kernel)
