"""Block windows of a batch whose sequences begin at different places, because of padding on their left.

Blocks are counted from each sequence's first unpadded key, so that padding moves nothing. Sequences whose blocks begin
at the same places are computed together: `shift` more places of padding in front put their blocks where they belong.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bochner._checks import BochnerError
from bochner.attention.call import Call, Result
from bochner.attention.numerics import is_composed
from bochner.attention.state import State, WindowState, leading
from bochner.attention.window import held_from

pad = torch.nn.functional.pad
Attend = Callable[[Call, Tensor, Tensor, Tensor, Tensor | None, State | None], Result]


def starts(call: Call, hole: Tensor | None, state: State | None) -> Tensor | None:
    """The place of the first unpadded key of each sequence, (b,), or that behind the last where there is none yet.

    None where blocks counted from the first place are the same, and while values may not be looked at.
    """
    if not call.window or call.window_kind != "block":
        return None
    past = None if state is None else state.window
    known, seen = (None, 0) if past is None else (past.start, past.seen)
    if is_composed():
        if known is not None:
            raise BochnerError(
                "The 'state' holds sequences whose blocks begin at different places, which cannot be resumed while "
                "compiling or under torch.func; use window_kind='sliding', or pad by multiples of the window."
            )
        return None
    if known is not None:
        return torch.where(known < seen, known, seen if hole is None else seen + leading(hole))
    if seen or hole is None or not bool(hole[:, 0].any()):
        return None
    lead = leading(hole)
    return lead if bool(((lead % call.window != 0) | (lead == hole.shape[1])).any()) else None


def held_places(call: Call, start: Tensor, seen: int) -> Tensor:
    """For each sequence the place of the first key that its next row sees exactly, (b,); see `held_from`.

    Of a sequence that has not begun: the first that it may see so, wherever it will begin.
    """
    w, shift = call.window, -start % call.window
    begun = ((seen + shift) // w - 1) * w - shift
    return torch.where(start < seen, begun, seen - 2 * w + 1).clamp_min(0)


def by_phase(
    call: Call, q: Tensor, k: Tensor, v: Tensor, hole: Tensor | None, state: State | None, start: Tensor, attend: Attend
) -> Result:
    """`attend` for sequences that begin at the places `start`: q (b, h, n, d), k and v (b, g, s, .)."""
    past = None if state is None else state.window
    seen, s = 0 if past is None else past.seen, k.shape[2]
    first = held_places(call, start, seen + s)
    held, shifts, chosen, found, states = int(first.min()), -start % call.window, [], [], []
    if call.is_causal or s <= call.window:  # where no key has left, all are exact, wherever blocks begin
        shifts = torch.where(first > 0, shifts, 0)
    for shift in shifts.unique().tolist():
        rows = (shifts == shift).nonzero().squeeze(1)
        x, y, u = (t.index_select(0, rows) for t in (q, k, v))
        gone = None if hole is None else hole.index_select(0, rows)
        own = None if state is None else _moved(call, _rows(state, rows), shift)
        if gone is not None and not seen:
            y, u, gone = pad(y, (0, 0, shift, 0)), pad(u, (0, 0, shift, 0)), pad(gone, (shift, 0), value=True)
            x = x if call.is_causal else pad(x, (0, 0, shift, 0))
        result = attend(call, x, y, u, gone if gone is not None and bool(gone.any()) else None, own)
        chosen.append(rows)
        found.append(_last(result, call.groups, q.shape[-2]))
        if result.state is not None:
            states.append(_placed(call, result.state, seen + s, held, shift))
    order = torch.cat(chosen).argsort()
    out, lost, small = (torch.cat(t).index_select(0, order) for t in zip(*found, strict=True))
    if not states:
        return Result(out, None, lost, small)
    sums = [torch.cat(t).index_select(0, order) for t in zip(*(state[:3] for state in states), strict=True)]
    held_keys = zip(*(_window(state)[:7] for state in states), strict=True)
    k, v, padded, sink, sink_k, sink_v, position = (torch.cat(t).index_select(0, order) for t in held_keys)
    setting = _window(states[0]).setting
    window = WindowState(k, v, padded, sink, sink_k, sink_v, position, seen + s, setting, start)
    return Result(out, State(sums[0], sums[1], sums[2], window), lost, small)


def _rows(state: State, rows: Tensor) -> State:
    return state.map(lambda t: t.index_select(0, rows))


def _moved(call: Call, state: State, shift: int) -> State:
    """A state of sequences of one phase as if they had begun `shift` places later."""
    past = state.window
    if past is None or not past.seen:
        return state
    seen = past.seen + shift
    position = torch.where(past.sink_position < 0, -1, past.sink_position + shift)
    kept = _fitted(past, seen - held_from(call, seen))
    return state._replace(window=WindowState(*kept, past.sink_k, past.sink_v, position, seen, past.setting))


def _placed(call: Call, state: State, seen: int, held: int, shift: int) -> State:
    """The inverse, with as many exact keys as the whole batch holds, and as many sinks as there can be."""
    past = _window(state)
    missing = min(call.sinks, seen) - past.sink_position.shape[1]
    position = torch.where(past.sink_position < 0, -1, past.sink_position - shift)
    k, v = (pad(t, (0, 0, 0, missing)) for t in (past.sink_k, past.sink_v))  # negative: cut off
    sinks = (k, v, pad(position, (0, missing), value=-1))
    return state._replace(window=WindowState(*_fitted(past, seen - held), *sinks, seen, past.setting))


def _fitted(past: WindowState, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last `count` exact keys; where there are fewer, padding in front."""
    more = count - past.k.shape[2]
    k, v = (pad(t, (0, 0, more, 0)) for t in (past.k, past.v))  # negative: cut off
    return k, v, pad(past.padded, (more, 0), value=True), pad(past.sink, (more, 0))


def _last(result: Result, groups: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The last n rows of each query head: their values, and which are lost or small."""
    nothing = torch.zeros_like(result.out[..., :1], dtype=torch.bool)
    found = (result.out, *(nothing if t is None else t for t in (result.lost, result.small)))
    out, lost, small = (t.unflatten(2, (groups, -1))[:, :, :, -n:].flatten(2, 3) for t in found)
    return out, lost, small


def _window(state: State) -> WindowState:
    assert state.window is not None
    return state.window
