"""Attention of one call: the path it takes, the state after it, and the rows that could not be divided."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from bochner.attention.call import Call, Keys, Near, Result
from bochner.attention.features import EMPTY, MASKED, PreparedMap
from bochner.attention.layout import Layout, moved, starts
from bochner.attention.scan import Scan, Sinks, absorb_keys, rows_at_once
from bochner.attention.softmax import attend
from bochner.attention.state import State, Sums, WindowState, mean_of, spread_mask, value_sums


def attention(call: Call, q: Tensor, keys: Keys, state: State | None, decay: Tensor | None = None) -> Result:
    """Attention of q (b, h, n, d) over keys (b, g, s, .), zero where padded, after those of `state`.

    `decay` (b, g, s) or less: the logarithm of what every token leaves of the weight of those before it.
    """
    (b, g, s, d), n, near, prepared = keys.k.shape, q.shape[-2], call.near, call.map
    k, v, mask = keys[:3]
    fuses = prepared.phi.is_exponential and (call.looks or call.composed)
    if fuses and call.normalize and not (near.is_causal or near.exact):
        return Result(_by_softmax(prepared, q.reshape(b, g, -1, d), k, v, mask))
    if near.is_causal:
        prepared.phi.check_causal()
    else:
        call = call._replace(map=prepared.fitted_to(k, mask))
    fresh = state is None and n >= s
    state = state or nothing_seen(call.map, k, v)
    q = q.reshape(b, g, call.groups, n, d)
    if call.recompute and torch.is_grad_enabled() and not call.composed and not call.map.is_closed(q[:, :, 0], k):
        call = call._replace(recompute=False)
    if decay is not None:
        # A weight exp(g_i - g_j), with g the running sum, is a shift -g_j of the keys: a factor of a row cancels.
        decay = decay.expand(b, g, s).cumsum(-1)
        keys, state = keys._replace(shift=-decay.unsqueeze(-1)), _widened(state)
    if near.is_causal and n < s:
        state = _advanced(call, keys.part(slice(0, s - n)), state)
        keys = keys.part(slice(s - n, s))
    before = state.total
    out, bad, after = _rows(call, q, keys, state, fresh=fresh)
    out = out.flatten(2, 3)
    if after is not None and decay is not None:
        after = _lowered(after, decay[..., -1])
    if bad is None:
        return Result(out, after)
    # Rows that cannot be divided get the mean of the values that they may see.
    bad, values = bad.flatten(2, 3), keys.v.to(out.dtype)
    if near.is_causal:
        seen = _running_totals(values, keys.padded, before, call.groups)
    else:
        seen = value_sums(values, mask)[:, :, None]
    return Result(torch.where(bad, mean_of(seen), out), after, bad & (seen[..., -1:] > 0))


def _widened(state: State) -> State:
    """A state with all that decay shifts in double precision."""
    window = state.window
    if window is not None and window.shift is not None and window.sink_shift is not None:
        window = window._replace(shift=window.shift.double(), sink_shift=window.sink_shift.double())
    return state._replace(log_scale=state.log_scale.double(), window=window)


def _lowered(state: State, decay: Tensor) -> State:
    """A state counted from the last key on, after decays that sum up to (b, g): its numbers never grow large."""
    dtype, window, change = state.sums.dtype, state.window, decay - decay.detach()
    if window is not None and window.shift is not None and window.sink_shift is not None:
        shifts = [(t + decay[..., None, None]).to(dtype) for t in (window.shift, window.sink_shift)]
        window = window._replace(shift=shifts[0], sink_shift=shifts[1])
    sums = state.sums * change.to(dtype).exp()[..., None, None] if decay.requires_grad else state.sums
    return state._replace(sums=sums, log_scale=(state.log_scale + decay.detach()).to(dtype), window=window)


def nothing_seen(prepared: PreparedMap, k: Tensor, v: Tensor) -> State:
    """The state before the first of the keys k and v (b, g, s, .)."""
    (b, g), phi, size = k.shape[:2], prepared.phi, v.shape[-1]
    zero = torch.zeros((), dtype=prepared.dtype, device=k.device)  # takes no more memory than this
    columns = phi.num_columns(size) if prepared.has_constant else size + 1
    return State(
        zero.expand(b, g, phi.feature_dim, columns),
        torch.full((b, g), EMPTY, dtype=prepared.dtype, device=k.device),
        zero.expand(b, g, size + 1),
    )


def _by_softmax(prepared: PreparedMap, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """All keys, by an exponential map: one absorb and one read, both as softmax attention, stable at any scale.

    With the frequencies w_i as queries the keys are summed up, `kv_i / norm_i = softmax_j(w_i . y_j + row_j) v_j`; with
    the w_i as keys they are read, `out = softmax_i(w_i . x + log norm_i) kv_i / norm_i`.
    """
    query, key, dtype = prepared.exponent("query"), prepared.exponent("key"), prepared.dtype
    y, row = key.at(k.to(dtype))
    if mask is not None:
        row = row.masked_fill(spread_mask(mask), MASKED)
    kv, log_norm = attend(key.weight.expand(*k.shape[:2], -1, -1), y, v.to(dtype), row.mT)
    for offset in (key.offset, query.offset):
        if offset is not None:
            log_norm = log_norm + offset.unsqueeze(-1)
    x, _ = query.at(q.to(dtype))
    return attend(x, query.weight.expand(*k.shape[:2], -1, -1), kv, log_norm.mT)[0]


def _rows(call: Call, q: Tensor, new: Keys, state: State, *, fresh: bool) -> tuple[Tensor, Tensor | None, State | None]:
    """Rows of q (b, g, r, n, d) whose own keys are `new`, after those of `state`; which are bad; the state then."""
    near, n, sums = call.near, q.shape[-2], Sums(state.sums, state.log_scale)
    past = state.window or empty_window(near, new.k, new.v)
    start = starts(near, new.padded, past.start, past.seen)
    sinks, new = find_sinks(near, past, new)
    if not (near.window or near.is_causal):  # no zones: the kernel sees all keys but the sinks
        sums = absorb_keys(call, sums, new)
        layout = Layout.of(near, n, 0, 0, 0)
        out, bad, _ = scan_rows(call, q, new.part(slice(0, 0)), sinks, sums, layout, fresh=False)
        return out, bad, None
    keys, held = _after_held(past, new), past.k.shape[2]
    if start is None or past.seen + n <= near.window:  # no key has left, wherever blocks begin
        layout = Layout.of(near, n, past.seen, held, keys.k.shape[2])
        out, bad, sums = scan_rows(call, q, keys, sinks, sums, layout, fresh=fresh, goes_on=call.goes_on)
        left = layout.leaving if start is None else slice(0, 0)
    else:
        out, bad = _moved_rows(call, q, keys, sinks, sums, start, past.seen, fresh=fresh)
        left = slice(0, 0)
    if not call.goes_on:
        return out, bad, None
    total = state.total + value_sums(new.v.to(call.map.dtype), new.padded)
    seen = past.seen + n
    sums, window = _left_behind(call, sums, keys, sinks, past, seen, start, left)
    return out, bad, State(*sums, total, window)


def scan_rows(
    call: Call,
    q: Tensor,
    keys: Keys,
    sinks: Sinks | None,
    sums: Sums,
    layout: Layout,
    *,
    fresh: bool,
    goes_on: bool = False,
) -> tuple[Tensor, Tensor | None, Sums]:
    """Rows of q (b, g, r, n, d) laid out among keys, which are bad, and the sums after them."""
    parts = layout.parts(rows_at_once(call, layout, keys.k))
    sink_k, sink_v = (keys.k[:, :, :0], keys.v[:, :, :0]) if sinks is None else sinks[:2]
    tensors, holes, refs = [q, keys.k, keys.v, sink_k, sink_v], (keys.padded, keys.far_holes), None
    if call.near.window and not call.near.is_causal and len(parts) > 1:
        # What lies behind the keys of each part, from the last to the first.
        bounds = [min(max(part.span.stop - layout.front, 0), layout.keys) for part in parts]
        found = [Sums(torch.zeros_like(sums.value), torch.full_like(sums.ref, EMPTY))]
        for i, j in reversed(list(pairwise(bounds))):
            some = keys.part(slice(i, j))
            found.append(absorb_keys(call, found[-1], some) if j > i else found[-1])
        refs = torch.stack([s.ref for s in reversed(found)], dim=2)
        tensors.append(torch.stack([s.value for s in reversed(found)], dim=2))
    elif keys.shift is not None:
        tensors += [keys.shift, keys.shift[:, :, :0] if sinks is None or sinks.shift is None else sinks.shift]
    out, bad, *after = Scan(call, layout, parts, holes, sinks, fresh, goes_on, refs).run(tensors, sums)
    return out, bad, Sums(*after)


def _moved_rows(
    call: Call, q: Tensor, keys: Keys, sinks: Sinks | None, sums: Sums, start: Tensor, seen: int, *, fresh: bool
) -> tuple[Tensor, Tensor | None]:
    """Rows of sequences whose blocks begin at the places `start`: moved so that their blocks lie on each other."""
    near, w, n, (b, _, s, _) = call.near, call.near.window, q.shape[3], keys.k.shape
    blocks, after = (n + 2 * w - 2) // w, 0 if near.is_causal else 1
    lead = (seen - start) % w
    front, length = lead + w - (s - n), (blocks + 1 + after) * w
    padded = torch.zeros(b, s, dtype=torch.bool, device=start.device) if keys.padded is None else keys.padded
    sink = None if keys.sink is None else moved(keys.sink, front, length, 1, False)
    k, v = (moved(t, front, length) for t in keys[:2])
    shift = None if keys.shift is None else moved(keys.shift, front, length)
    there = Keys(k, v, moved(padded, front, length, 1, True), sink, shift)
    if sinks is not None:
        place, exists = sinks.places()
        sinks = sinks._replace(place=place + lead[:, None], there=exists)
    layout = Layout(near, blocks * w, length, 0, w, w, 0)
    out, bad, _ = scan_rows(call, moved(q, lead, blocks * w, 3), there, sinks, sums, layout, fresh=fresh)
    return moved(out, -lead, n, 3), None if bad is None else moved(bad, -lead, n, 3, True)


def _advanced(call: Call, new: Keys, state: State) -> State:
    """The state after more keys that no query looks at."""
    near, sums = call.near, Sums(state.sums, state.log_scale)
    total = state.total + value_sums(new.v.to(call.map.dtype), new.padded)
    past = state.window or empty_window(near, new.k, new.v)
    start = starts(near, new.padded, past.start, past.seen)
    sinks, new = find_sinks(near, past, new)
    keys, seen = _after_held(past, new), past.seen + new.k.shape[2]
    left = slice(0, near.held_from(seen) - (past.seen - past.k.shape[2]))
    sums, window = _left_behind(call, sums, keys, sinks, past, seen, start, left)
    return State(*sums, total, window)


def _left_behind(
    call: Call,
    sums: Sums,
    keys: Keys,
    sinks: Sinks | None,
    past: WindowState,
    seen: int,
    start: Tensor | None,
    left: slice,
) -> tuple[Sums, WindowState | None]:
    """The kernel's sums with the keys that have left the window, `left` or by `start`, and what it then holds."""
    near, (b, _, count, _) = call.near, keys.k.shape
    if not near.exact:
        return absorb_keys(call, sums, keys) if left.stop > left.start else sums, None
    none = torch.zeros(count, dtype=torch.bool, device=keys.k.device).expand(b, -1)
    window = past._replace(
        k=keys.k,
        v=keys.v,
        padded=none if keys.padded is None else keys.padded,
        sink=none if keys.sink is None else keys.sink,
        seen=seen,
        start=start,
        complete=True,
        unpadded=past.unpadded and keys.padded is None and start is None,
        shift=keys.shift,
        sink_shift=None if keys.shift is None else keys.shift[:, :, :0],
    )
    if sinks is not None:
        place, there = sinks.places()
        complete = past.complete or seen >= near.sinks
        if complete and not past.complete and not window.unpadded:
            complete = call.looks and place.shape[1] == near.sinks and bool(there.all())
        place = torch.where(there, place + past.seen, -1)
        window = window._replace(
            sink_k=sinks.k, sink_v=sinks.v, sink_position=place, complete=complete, sink_shift=sinks.shift
        )
    return leave(call, sums, window, left.start)


def leave(call: Call, sums: Sums, keys: WindowState, done: int = 0) -> tuple[Sums, WindowState]:
    """The kernel's sums with the keys that the next row does not see exactly, and the window without them.

    The first `done` keys are in the sums already, where blocks begin at the same place for all sequences.
    """
    near, seen, count = call.near, keys.seen, keys.k.shape[2]
    first, left = seen - count, near.held_from(seen) - seen + count
    hidden: Tensor | None
    if keys.start is not None:
        gone = torch.arange(first, seen, device=keys.k.device) < near.held_places(keys.start, seen)[:, None]
        hidden, left = keys.padded | keys.sink | ~gone, max(0, count - near.most_held)
        if not call.looks or not bool(hidden.all()):
            sums = absorb_keys(call, sums, Keys(keys.k, keys.v, hidden, None, keys.shift))
        keys = keys._replace(padded=keys.padded | gone)
    elif left > done:
        hidden = None if keys.unpadded and first + done >= near.sinks else keys.padded | keys.sink
        some = Keys(keys.k, keys.v, hidden, None, keys.shift).part(slice(done, left))
        sums = absorb_keys(call, sums, some)
    if left:
        held = Keys(keys.k, keys.v, keys.padded, keys.sink, keys.shift).part(slice(left, None))
        keys = keys._replace(**held._asdict())
    return sums, keys


def empty_window(near: Near, k: Tensor, v: Tensor) -> WindowState:
    """A window before the first key."""
    nothing = torch.zeros(k.shape[0], 0, dtype=torch.bool, device=k.device)
    none_k, none_v = k[..., :0, :], v[..., :0, :]
    none = (none_k, none_v, nothing, nothing, none_k, none_v, nothing.long())
    return WindowState(*none, 0, near.setting, unpadded=True)


def find_sinks(near: Near, past: WindowState, new: Keys) -> tuple[Sinks | None, Keys]:
    """The first t unpadded keys of those seen before and the new ones, which are marked."""
    if not near.sinks:
        return None, new
    b, s = new.k.shape[::2]
    here = torch.arange(s, device=new.k.device).expand(b, s)
    if not past.seen and new.padded is None:
        t = near.sinks
        shift = None if new.shift is None else new.shift[:, :, :t]
        return Sinks(new.k[..., :t, :], new.v[..., :t, :], None, None, shift), new._replace(sink=here < t)
    known = past.sink_position >= 0
    there = torch.cat([known, torch.ones_like(here, dtype=torch.bool) if new.padded is None else ~new.padded], dim=1)
    place = torch.cat([past.sink_position - past.seen, here], dim=1)
    is_sink = there & (there.cumsum(1) <= near.sinks)
    chosen = is_sink.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, : near.sinks]
    pairs = [(past.sink_k, new.k), (past.sink_v, new.v)]
    if new.shift is not None:
        pairs.append((_shift_of(past.sink_shift, past.sink_k, new.shift), new.shift))
    found = [_chosen(torch.cat(both, dim=2), chosen) for both in pairs]
    shift = found[2] if new.shift is not None else None
    sinks = Sinks(found[0], found[1], place.gather(1, chosen), is_sink.gather(1, chosen), shift)
    return sinks, new._replace(sink=is_sink[:, known.shape[1] :])


def _chosen(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (b, g, s, d) by index (b, t)."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))


def _after_held(past: WindowState, new: Keys) -> Keys:
    """The keys that a window holds and the new ones behind them."""
    if not past.k.shape[2]:
        return new
    k, v = torch.cat([past.k, new.k], dim=2), torch.cat([past.v, new.v], dim=2)
    padded = new.padded
    if padded is not None or not past.unpadded:
        here = torch.zeros(new.k.shape[::2], dtype=torch.bool, device=k.device) if padded is None else padded
        padded = torch.cat([past.padded, here], dim=1)
    sink, shift = None if new.sink is None else torch.cat([past.sink, new.sink], dim=1), new.shift
    if shift is not None:
        shift = torch.cat([_shift_of(past.shift, past.k, shift), shift], dim=2)
    return Keys(k, v, padded, sink, shift)


def _shift_of(known: Tensor | None, k: Tensor, like: Tensor) -> Tensor:
    """What decay has added to the log weights of keys (b, g, s, d), nothing where it begins now: (b, g, s, 1)."""
    return like.new_zeros(*k.shape[:3], 1) if known is None else known


def _running_totals(v: Tensor, mask: Tensor | None, before: Tensor, r: int) -> Tensor:
    """Sums of the values and numbers of the keys up to each row, (b, g, r n, v + 1)."""
    count = torch.ones_like(v[..., :1]) if mask is None else (~spread_mask(mask)).to(v.dtype).expand_as(v[..., :1])
    return (torch.cat([v, count], dim=-1).cumsum(-2) + before.unsqueeze(-2)).repeat(1, 1, r, 1)
