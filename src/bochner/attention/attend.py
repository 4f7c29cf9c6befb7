"""Attention of one call: the path it takes, the state after it, and the rows that could not be divided."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from bochner.attention.call import Call, Near, Result
from bochner.attention.features import EMPTY, MASKED, PreparedMap
from bochner.attention.layout import Layout, moved, starts
from bochner.attention.scan import Scan, Sinks, absorb_keys, rows_at_once
from bochner.attention.softmax import attend
from bochner.attention.state import State, Sums, WindowState, mean_of, spread_mask, value_sums


class Keys(NamedTuple):
    """Keys and values (b, g, s, .) by their places; which are padding and which sinks (b, s), None for none."""

    k: Tensor
    v: Tensor
    padded: Tensor | None
    sink: Tensor | None

    @property
    def far_holes(self) -> Tensor | None:
        """Those that the kernel leaves out."""
        if self.sink is None or self.padded is None:
            return self.padded if self.sink is None else self.sink
        return self.padded | self.sink

    def part(self, span: slice) -> Keys:
        padded, sink = (None if t is None else t[:, span] for t in (self.padded, self.sink))
        return Keys(self.k[..., span, :], self.v[..., span, :], padded, sink)


def attention(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: State | None) -> Result:
    """Attention of q (b, h, n, d) over k and v (b, g, s, .), zero where `mask` (b, s), after the keys of `state`."""
    (b, g, s, d), n, near, prepared = k.shape, q.shape[-2], call.near, call.map
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
    keys = Keys(k, v, mask, None)
    if near.is_causal and n < s:
        state = _advanced(call, keys.part(slice(0, s - n)), state)
        keys = keys.part(slice(s - n, s))
    before = state.total
    out, bad, after = _rows(call, q, keys, state, fresh=fresh)
    out = out.flatten(2, 3)
    if bad is None:
        return Result(out, after)
    # Rows that cannot be divided get the mean of the values that they may see.
    bad, values = bad.flatten(2, 3), keys.v.to(out.dtype)
    if near.is_causal:
        seen = _running_totals(values, keys.padded, before, call.groups)
    else:
        seen = value_sums(values, mask)[:, :, None]
    return Result(torch.where(bad, mean_of(seen), out), after, bad & (seen[..., -1:] > 0))


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
        sums = absorb_keys(call, sums, new.k, new.v, new.far_holes)
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
            found.append(absorb_keys(call, found[-1], some.k, some.v, some.far_holes) if j > i else found[-1])
        refs = torch.stack([s.ref for s in reversed(found)], dim=2)
        tensors.append(torch.stack([s.value for s in reversed(found)], dim=2))
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
    there = Keys(k, v, moved(padded, front, length, 1, True), sink)
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
        return absorb_keys(call, sums, keys.k, keys.v, keys.padded) if left.stop > left.start else sums, None
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
    )
    if sinks is not None:
        place, there = sinks.places()
        complete = past.complete or seen >= near.sinks
        if complete and not past.complete and not window.unpadded:
            complete = call.looks and place.shape[1] == near.sinks and bool(there.all())
        place = torch.where(there, place + past.seen, -1)
        window = window._replace(sink_k=sinks.k, sink_v=sinks.v, sink_position=place, complete=complete)
    return leave(call, sums, window, left.start)


def leave(call: Call, sums: Sums, keys: WindowState, done: int = 0) -> tuple[Sums, WindowState]:
    """The kernel's sums with the keys that the next row does not see exactly, and the window without them.

    The first `done` keys are in the sums already, where blocks begin at the same place for all sequences.
    """
    near, seen, count = call.near, keys.seen, keys.k.shape[2]
    first, left = seen - count, near.held_from(seen) - seen + count
    if keys.start is not None:
        gone = torch.arange(first, seen, device=keys.k.device) < near.held_places(keys.start, seen)[:, None]
        hidden, left = keys.padded | keys.sink | ~gone, max(0, count - near.most_held)
        if not call.looks or not bool(hidden.all()):
            sums = absorb_keys(call, sums, keys.k, keys.v, hidden)
        keys = keys._replace(padded=keys.padded | gone)
    elif left > done:
        some, hidden = slice(done, left), None
        if not keys.unpadded or first + done < near.sinks:
            hidden = (keys.padded | keys.sink)[:, some]
        sums = absorb_keys(call, sums, keys.k[:, :, some], keys.v[:, :, some], hidden)
    if left:
        k, v = keys.k[:, :, left:], keys.v[:, :, left:]
        keys = keys._replace(k=k, v=v, padded=keys.padded[:, left:], sink=keys.sink[:, left:])
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
        return Sinks(new.k[..., :t, :], new.v[..., :t, :], None, None), new._replace(sink=here < t)
    known = past.sink_position >= 0
    there = torch.cat([known, torch.ones_like(here, dtype=torch.bool) if new.padded is None else ~new.padded], dim=1)
    place = torch.cat([past.sink_position - past.seen, here], dim=1)
    is_sink = there & (there.cumsum(1) <= near.sinks)
    chosen = is_sink.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, : near.sinks]
    k, v = (_chosen(torch.cat([old, new], dim=2), chosen) for old, new in ((past.sink_k, new.k), (past.sink_v, new.v)))
    sinks = Sinks(k, v, place.gather(1, chosen), is_sink.gather(1, chosen))
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
    return Keys(k, v, padded, None if new.sink is None else torch.cat([past.sink, new.sink], dim=1))


def _running_totals(v: Tensor, mask: Tensor | None, before: Tensor, r: int) -> Tensor:
    """Sums of the values and numbers of the keys up to each row, (b, g, r n, v + 1)."""
    count = torch.ones_like(v[..., :1]) if mask is None else (~spread_mask(mask)).to(v.dtype).expand_as(v[..., :1])
    return (torch.cat([v, count], dim=-1).cumsum(-2) + before.unsqueeze(-2)).repeat(1, 1, r, 1)
