"""Attention over the first keys, the last keys, and the older keys with the highest scores.

Every key gets a score when it is computed. It is seen by all rows while it is in the window. When it leaves, it takes
the place of the least of the older keys that its head holds, or it is let go. What a row sees depends on the scores
alone, so that a text gives the same whole, in pieces or token by token.

The slots of a layer are the rings of its key heads, for their windows, then as many for older keys as the budget of
each says. Rings hold 8 bits where older keys and values have fewer: a key is rounded again when it leaves the window.
The first keys, the attention sinks, are not rounded to integers, since much of the attention rests on them. For
inference: nothing here has a gradient.

Single tokens need few operations each. Keys that are about to leave the window are rounded ahead, a few at a time, into
slots that are hidden until then, and move to those of older keys together. Which key is let go at which of these steps
is known before: the ranks of the keys that will leave are there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bochner.hf.precision import Basis, Parts, Precision, Stored, halves, nbytes

EMPTY = -(2**31)  # the rank of no key, of padding and of attention sinks, which have their own slots
NEVER = 2**31 - 1  # the rank of what is never let go: places beyond a head's budget
PLACES = 65536  # positions that ranks tell apart
BLOCK = 256  # rows that are read at a time
SPARE = 16  # keys that are rounded ahead, and steps after which those that have left the window are moved
HIDDEN = -60000.0  # what is added to logits of keys that no row sees; float16 holds it
SLOT_BYTES = 6  # of a key's rank, and of what is added to its logits


@dataclass(frozen=True)
class SelectedKeys:
    """What the key heads of one layer hold.

    `window`: the last keys, of all heads. `budgets`: the most older keys of each key head. `sinks`: the first keys.
    `precision`: how keys and values are stored, see `Stored`; sinks in bfloat16 where that is less than the model's.
    """

    window: int
    budgets: tuple[int, ...]
    sinks: int = 4
    precision: str = "model"


def sink_dtype(precision: str, dtype: torch.dtype) -> torch.dtype:
    """How attention sinks are stored: in bfloat16 where that is less, unless the model's own precision is asked for."""
    return torch.bfloat16 if precision != "model" and dtype == torch.float32 else dtype


def ranks(scores: Tensor, position: Tensor, sinks: int) -> Tensor:
    """Scores (b, g, n) as a total order of keys, int32 (b, g, n); EMPTY where positions (b, n) are below `sinks`.

    Scores are compared in float16; of equal ones the older key is worth more.
    """
    bits = (scores.float().clamp(-65504.0, 65504.0).half() + 0.0).view(torch.int16)  # -0 becomes 0
    order = torch.where(bits < 0, bits ^ 0x7FFF, bits).to(torch.int32)
    place = position[:, None].to(torch.int32)
    return torch.where(place < sinks, EMPTY, order * PLACES + (PLACES - 1 - place % PLACES))


def alive(held: Tensor, arriving: Tensor, capacity: int) -> Tensor:
    """Which keys are held at each of c rows: bool (..., c, m + c), the held ones first, then those that arrive.

    held (..., m), arriving (..., c): ranks; key t of `arriving` is there from row t on. A key is held as long as fewer
    than `capacity` of those that have left the window rank above it.
    """
    m, c = held.shape[-1], arriving.shape[-1]
    every = torch.cat([held, arriving], dim=-1)
    there = (every > EMPTY).unsqueeze(-2).expand(*every.shape[:-1], c, -1)
    arrived = torch.ones(c, m + c, dtype=torch.bool, device=held.device).tril(m)
    if m + c <= capacity:
        return there & arrived
    ordered = held.sort(dim=-1).values
    above = m - torch.searchsorted(ordered, every, right=True, out_int32=True)
    more = (arriving.unsqueeze(-1) > every.unsqueeze(-2)).cumsum(-2, dtype=torch.int32)
    return there & arrived & (more + above.unsqueeze(-2) < capacity)


def spare_of(window: int) -> int:
    """Slots of a head for keys that are leaving its window."""
    return min(SPARE, window)


def counters(window: int) -> int:
    """Bytes that a layer holds for each key head beside its slots; 18 of them are for all heads together."""
    return 12 * spare_of(window) + 18


@lru_cache(maxsize=1024)
def layout(kept: SelectedKeys, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first slot (g,) of each key head: of its ring, of the keys that leave it, and of its older keys.

    And the slots (g, 1, slots) that are not its own. All caches share them.
    """
    heads = torch.arange(len(kept.budgets))
    sizes = [torch.full_like(heads, n) for n in (kept.window, spare_of(kept.window))] + [torch.tensor(kept.budgets)]
    owner = torch.cat([heads.repeat_interleave(n) for n in sizes])
    every = torch.cat(sizes)
    first, leaving, older = (every.cumsum(0) - every).to(device).chunk(3)
    return first, leaving, older, (owner != heads[:, None, None]).to(device)


class Rows(NamedTuple):
    """Tokens as stored: codes (b, ..., .) of keys and values side by side, and their steps (b, ., ...)."""

    codes: Tensor
    steps: Tensor


def asked(precision: Precision, turn: Tensor) -> Parts:
    """Matrices (g, d, k + 1) from rows to what meets stored numbers and a one: of those with a step, and those without.

    `turn` (g, d, d): from rows as they are to rows in the basis.
    """
    parts = 2 if precision.name == "split" else 1
    turns, zeros = turn.chunk(parts, dim=-1), precision.zeros(turn.shape[-1]).to(turn).chunk(parts)
    return tuple(torch.cat([x, -x @ zero[:, None]], dim=-1) for x, zero in zip(turns, zeros, strict=True))


def _products(x: Tensor, columns: Parts) -> Tensor:
    """`x [columns, 1]` (b, n, m) of rows x (b, n, k + 1) and columns (b, m, k) in parts."""
    found = x[..., -1:]
    for mine, part in zip(x[..., :-1].chunk(len(columns), dim=-1), columns, strict=True):
        found = torch.baddbmm(found, mine, part.mT)
    return found


class SelectedState:
    """The keys and values that one layer holds for a batch, and attention to them.

    `near` (b, rings, .), `codes` (b, others, .): keys and values of each slot side by side. `steps` (b, .,
    slots + 1): the step of the key, that of the value, and what is added to the logit. `rank` (b, slots + 1). The last
    place is that of no key. Keys and values are in their basis; the sinks are not, but for the centre of the keys.

    >>> state = SelectedState(SelectedKeys(window=2, budgets=(1,), sinks=0), 1, 4, 4, torch.float32)
    >>> x = torch.eye(4).expand(1, 1, 4, 4)
    >>> out = state.attend(x, x, x, scores=torch.tensor([[[2.0, 3.0, 1.0, 0.0]]]), scale=0.0)
    >>> out[0, 0, 3]
    tensor([0.0000, 0.3333, 0.3333, 0.3333])
    """

    def __init__(
        self,
        kept: SelectedKeys,
        batch: int,
        key_size: int,
        value_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        basis: Basis | None = None,
    ) -> None:
        self.kept, self.basis = kept, basis
        self.stored = Stored.of(kept.precision, dtype)
        self.exact = torch.promote_types(dtype, torch.float32)  # what is computed in
        self.scaled = self.stored.scaled  # whether there are steps
        g = len(kept.budgets)
        # 1. Where the slots of each head are: rings, then older keys.
        self.spare = spare_of(kept.window)
        others = g * self.spare + sum(kept.budgets)
        self.slots = g * kept.window + others
        self.first, self.leaving, self.older, self.others = layout(kept, torch.device(device))
        # 2. Empty slots.
        sizes = (key_size, value_size)
        zeros = [torch.zeros(1, 1, size, dtype=dtype) for size in sizes]
        rings, older = ([x.encode(zero)[0] for x, zero in zip(each, zeros, strict=True)] for each in self.stored[:2])
        self.key_codes = rings[0].shape[-1], older[0].shape[-1]
        self.near, self.codes = (
            torch.cat(each, dim=-1).new_zeros(batch, slots, sum(x.shape[-1] for x in each)).to(device)
            for each, slots in ((rings, g * kept.window), (older, others))
        )
        self.steps = torch.zeros(batch, 2 * self.scaled + 1, self.slots + 1, dtype=torch.float16, device=device)
        self.rank = torch.full((batch, self.slots + 1), EMPTY, dtype=torch.int32, device=device)
        self.rank[:, -1] = NEVER
        whole = sink_dtype(kept.precision, dtype)
        self.sinks: Parts = tuple(torch.zeros(batch, g, kept.sinks, size, dtype=whole, device=device) for size in sizes)
        # 3. How stored rows are turned back, and how single queries and outputs are turned.
        plain = tuple(torch.eye(size, device=device).expand(g, -1, -1) for size in sizes)
        self.back: Parts = plain if basis is None else basis.inverse()
        self.ask_near, self.ask = (asked(each[0], self.back[0].mT) for each in self.stored[:2])
        self.tell_near, self.tell = (asked(each[1], self.back[1].mT)[0].mT for each in self.stored[:2])
        # 4. The scores of single tokens since the last move, and the slots that are let go at each step.
        self.pending = torch.zeros(batch, g, self.spare, device=device)
        self.going = torch.zeros(batch, g, self.spare, dtype=torch.int64, device=device)
        self.moved: int | None = None  # tokens that were seen when `going` was made
        self.seen = 0
        self.real = torch.zeros(batch, dtype=torch.int64, device=device)  # tokens that were not padding
        self.complete = kept.sinks == 0  # whether all sinks are there

    @property
    def tensors(self) -> Parts:
        """All tensors that belong to the batch."""
        return (self.rank, self.real, self.near, self.codes, self.steps, self.pending, self.going, *self.sinks)

    @property
    def nbytes(self) -> int:
        return nbytes(self.tensors)

    def map(self, f: Callable[[Tensor], Tensor]) -> SelectedState:
        """A state with f applied to every tensor; all have the batch in front."""
        made = copy.copy(self)
        made.rank, made.real, made.near, made.codes, made.steps, made.pending, made.going, *sinks = map(f, self.tensors)
        made.sinks = tuple(sinks)
        return made

    @torch.no_grad()
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scores: Tensor, scale: float, padding: Tensor | None = None
    ) -> Tensor:
        """Add keys and values (b, g, n, .) with their scores (b, g, n), and answer queries (b, h, n, d).

        `padding` (b, n): True at tokens that are none; they are in front of all others. Their rows are zeros.
        """
        n, dtype = k.shape[-2], q.dtype
        least = torch.promote_types(dtype, torch.float32)
        q, k, v, self.exact = q.to(least), k.to(least), v.to(least), least
        if padding is None:
            position = self.real[:, None] + torch.arange(n, device=k.device) if n > 1 else self.real[:, None]
        else:
            there = ~padding
            position = torch.where(there, self.real[:, None] + there.cumsum(1) - 1, -1)
        if self.basis is not None:
            k = k - self.basis.centre[:, None].to(k)
        known = padding is None and self.complete  # no sink and no padding among the tokens
        if not self.complete:
            self._add_sinks(k, v, position)
        if self.basis is not None:
            k, v = k @ self.basis.keys.to(k), v @ self.basis.values.to(v)
        new = self._encode(k, v, self.stored.window)
        if n == 1:
            self._add(new, scores, position, known)
            out = self._row(q[:, :, 0], position, scale, known).unsqueeze(2)
        else:
            out = self._read(q, new, ranks(scores, position, self.kept.sinks), position, scale)
        self.real = self.real + (n if padding is None else there.sum(1))
        self.seen += n
        return (out if padding is None else out.masked_fill(padding[:, None, :, None], 0)).to(dtype)

    def _encode(self, k: Tensor, v: Tensor, stored: tuple[Precision, ...]) -> Rows:
        """Keys and values (b, g, n, .) as they are stored."""
        parts = [x.encode(y) for x, y in zip(stored, (k, v), strict=True)]
        codes = torch.cat([part[0] for part in parts], dim=-1)
        if not self.scaled:
            return Rows(codes, self.steps.new_zeros(len(codes), 0, *codes.shape[1:-1]))
        return Rows(codes, torch.stack([part[1].squeeze(-1) for part in parts], dim=1))

    def _decode(self, rows: Rows, stored: tuple[Precision, ...], dtype: torch.dtype) -> Parts:
        """Keys and values of stored rows, in their basis."""
        steps = [x.unsqueeze(-1) for x in rows.steps.unbind(1)] or [None, None]
        codes = halves(rows.codes, self.key_codes[stored == self.stored.older])
        return tuple(
            x.decode((y,) if step is None else (y, step), dtype)
            for x, y, step in zip(stored, codes, steps, strict=True)
        )

    def _again(self, rows: Rows, dtype: torch.dtype) -> Rows:
        """Rows of a window as they are stored when they have left it."""
        window, older, _ = self.stored
        return rows if window == older else self._encode(*self._decode(rows, window, dtype), older)

    def _add_sinks(self, k: Tensor, v: Tensor, position: Tensor) -> None:
        """Store the tokens at the first positions whole; each position comes once."""
        place = torch.arange(self.kept.sinks, device=k.device)
        chosen = (position[:, None, :] == place[:, None]).to(k.dtype)[:, None]  # (b, 1, sinks, n)
        self.sinks = tuple(old + (chosen @ x).to(old.dtype) for old, x in zip(self.sinks, (k, v), strict=True))
        self.complete = bool((position[:, -1] >= self.kept.sinks - 1).all())

    # One token

    def _add(self, new: Rows, scores: Tensor, position: Tensor, known: bool) -> None:
        """Put a token into the ring, and let the key go that goes at this step."""
        if self.moved is None or self.seen - self.moved == self.spare:
            self._settle()
            self._look_ahead()
        assert self.moved is not None
        t, added = self.seen - self.moved, self.steps[:, -1]
        place = self.first + self.seen % self.kept.window
        self.near.index_copy_(1, place, new.codes[:, :, 0])
        self.steps[:, :-1].index_copy_(2, place, new.steps[..., 0])
        added.index_fill_(1, self.leaving + t, 0.0)
        added.scatter_(1, self.going[..., t], HIDDEN)
        if known:
            added.index_fill_(1, place, 0.0)
        else:  # sinks have their own slots
            shown = torch.where(position < self.kept.sinks, HIDDEN, 0.0).to(added.dtype)
            added.index_copy_(1, place, shown.expand(-1, len(place)))
        self.pending[..., t] = scores[..., 0]

    def _ring_slots(self, start: int, count: int) -> Tensor:
        """The slots (g, count) of the tokens from `start` on."""
        tokens = torch.arange(start, start + count, device=self.first.device)
        return self.first[:, None] + tokens % self.kept.window

    def _leaving_slots(self, count: int) -> Tensor:
        """The slots (g, count) of keys that leave the window."""
        return self.leaving[:, None] + torch.arange(count, device=self.leaving.device)

    def _settle(self) -> None:
        """Keys that have left the window since the last move take the places of the least older keys of their head."""
        if self.moved is None or self.seen == self.moved:
            return
        count = self.seen - self.moved
        # Padding is in front of all tokens: its positions are negative.
        position = self.real[:, None] + torch.arange(-count, 0, device=self.real.device)
        new = self._ring_slots(self.moved, count)
        self.rank[:, new] = ranks(self.pending[..., :count], position, self.kept.sinks)
        # The best of those that leave meets the least of those that are held, the second best the second least, ...
        left = self._leaving_slots(count)
        leaving, order = self.rank[:, left].sort(dim=-1, descending=True)
        least, older = self._least(count)
        better, source = leaving > least, left.expand_as(order).gather(2, order)
        batch = torch.arange(len(self.rank), device=left.device)[:, None, None].expand_as(source)[better]
        source, target = source[better], older[better]
        rings, steps = self.near.shape[1], self.steps.mT
        self.codes[batch, target - rings] = self.codes[batch, source - rings]
        steps[batch, target] = steps[batch, source]
        self.rank[batch, target] = leaving[better]
        self.rank[:, self._leaving_slots(self.spare)] = EMPTY
        self.moved = self.seen

    def _least(self, count: int) -> tuple[Tensor, Tensor]:
        """The least ranks (b, g, count) of the older keys of each head, the least first, and their slots."""
        # Slots of the older keys, as many columns as the largest head has; others are that of no key.
        sizes = self.first.new_tensor(self.kept.budgets)[:, None]
        place = torch.arange(max(count, *self.kept.budgets), device=self.first.device)
        table = torch.where(place < sizes, self.older[:, None] + place, self.slots)
        rank, best = self.rank[:, table].topk(count, dim=-1, largest=False)
        return rank, table.expand(len(rank), -1, -1).gather(2, best)

    def _look_ahead(self) -> None:
        """Round the keys that will leave the window, and tell which of each head goes at each of the next steps."""
        count, device = self.spare, self.rank.device
        coming, slots = self._ring_slots(self.seen - self.kept.window, count), self._leaving_slots(count)
        left = self._again(Rows(self.near[:, coming], self.steps[:, :-1, coming]), self.exact)
        self.codes[:, slots - self.near.shape[1]] = left.codes
        self.steps[:, :-1, slots] = left.steps
        arriving, (least, older) = self.rank[:, coming], self._least(count)
        # Only the least can go: to the others, as many have to come as there are of the least.
        until = alive(least, arriving, count).sum(-2)
        until[..., count:] += torch.arange(count, device=device)
        goes = until < count  # those that are none go when they come
        every = torch.cat([older, slots.expand_as(arriving)], dim=-1)
        going = every.new_full((*arriving.shape[:2], count + 1), self.slots)
        self.going = going.scatter_(2, torch.where(goes, until, count), every)[..., :count].contiguous()
        self.steps[:, -1] = torch.where(self.rank > EMPTY, 0.0, HIDDEN)
        self.rank[:, slots] = arriving
        self.moved = self.seen

    def _row(self, q: Tensor, position: Tensor, scale: float, known: bool) -> Tensor:
        """A single row (b, h, v) for queries (b, h, d): products with the stored numbers as they are.

        All heads meet all slots of the layer at once, and slots of other heads are hidden: one product of three times
        the size is quicker than three products with what surrounds them.
        """
        g, first, rings = len(self.first), self.kept.sinks, self.near.shape[1]
        rows = q.unflatten(1, (g, -1)) * scale
        # 1. Logits of sinks.
        sink_keys, sink_values = (x.to(q.dtype) for x in self.sinks)
        near = rows @ sink_keys.mT
        if not known:
            near = near.masked_fill(~self._sinks_seen(position[..., None])[:, None], HIDDEN)
        # 2. Logits of all slots: stored numbers come in one part or two.
        (ring_keys, ring_values), (keys, values) = (
            [precision.columns(part, q.dtype) for precision, part in zip(each, halves(codes, border), strict=True)]
            for each, codes, border in (
                (self.stored.window, self.near, self.key_codes[0]),
                (self.stored.older, self.codes, self.key_codes[1]),
            )
        )
        steps = self.steps[..., None, :-1].to(q.dtype)
        to_ring, to_older = ((rows @ x.to(q)).flatten(1, 2) for x in (self.ask_near[0], self.ask[0]))
        strong, weak = (keys[:1], keys[1:]) if self.ask[1:] else (keys, ())
        found = torch.cat([_products(to_ring, ring_keys), _products(to_older, strong)], dim=-1)
        found = torch.addcmul(steps[:, -1], found, steps[:, 0]) if self.scaled else found + steps[:, -1]
        if self.ask[1:]:
            found[..., rings:] += _products((rows @ self.ask[1].to(q)).flatten(1, 2), weak)
        found = found.unflatten(1, (g, -1)).masked_fill(self.others, HIDDEN)
        # 3. Weights, values, and back from stored numbers.
        weight = torch.cat([near, found], dim=-1).softmax(-1)
        out, rest = weight[..., :first] @ sink_values, weight[..., first:].flatten(1, 2)
        rest = rest * steps[:, 1] if self.scaled else rest
        for part, columns, turn in (
            (rest[..., :rings], ring_values, self.tell_near),
            (rest[..., rings:], values, self.tell),
        ):
            sums = torch.cat([*(torch.bmm(part, x) for x in columns), part.sum(-1, keepdim=True)], dim=-1)
            out = out + sums.unflatten(1, (g, -1)) @ turn.to(q)
        return out.flatten(1, 2)

    # Many tokens

    def _read(self, q: Tensor, new: Rows, rank: Tensor, position: Tensor, scale: float) -> Tensor:
        """Rows in blocks, head by head."""
        self._settle()
        g, n, window, rings = len(self.first), q.shape[2], self.kept.window, self.near.shape[1]
        q = q.unflatten(1, (g, -1))
        out = q.new_empty(*q.shape[:-1], self.sinks[1].shape[-1])
        ring, after = self._ring_slots(self.seen - window, window), self._ring_slots(self.seen + n - window, window)
        for head, (start, budget) in enumerate(zip(self.older.tolist(), self.kept.budgets, strict=True)):
            older = torch.arange(start, start + budget, device=q.device)
            ranked = torch.cat([self.rank[:, older], self.rank[:, ring[head]], rank[:, head]], dim=1)
            near = Rows(
                torch.cat([self.near[:, ring[head]], new.codes[:, head]], dim=1),
                torch.cat([self.steps[:, :-1, ring[head]], new.steps[:, :, head]], dim=2),
            )
            left = self._again(near, q.dtype)
            far = Rows(
                torch.cat([self.codes[:, older - rings], left.codes], dim=1),
                torch.cat([self.steps[:, :-1, older], left.steps], dim=2),
            )
            out[:, head], held = self._read_head(q[:, head], (near, far, ranked), head, position, scale)
            self._put(self.codes, far, ranked, held, older, rings)
            last = torch.arange(near.codes.shape[1] - window, near.codes.shape[1], device=q.device)
            self._put(self.near, near, ranked[:, budget:], last, after[head], 0)
        self.moved = None
        return out.flatten(1, 2)

    def _put(self, codes: Tensor, rows: Rows, ranked: Tensor, source: Tensor, slots: Tensor, before: int) -> None:
        """Copy rows, (m,) or (b, m), to slots; slots left over become empty; `codes` begin at slot `before`."""
        batch = torch.arange(len(ranked), device=source.device)[:, None]
        slots, left = slots[: source.shape[-1]], slots[source.shape[-1] :]
        codes[:, slots - before] = rows.codes[batch, source]
        self.steps[:, :-1, slots] = rows.steps.mT[batch, source].mT
        self.rank[:, slots] = ranked[batch, source]
        self.rank[:, left] = EMPTY

    def _read_head(
        self, q: Tensor, pool: tuple[Rows, Rows, Tensor], head: int, position: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Rows (b, r, n, d) of the queries of one key head, and which of the pool (b, m) it holds afterwards.

        The pool has the older keys, then those of the window, then the new ones, at `position` (b, n): as they are
        stored in a window, which the older ones are not, and when they have left it, with their ranks.
        """
        b, r, n, _ = q.shape
        window, capacity = self.kept.window, self.kept.budgets[head]
        back = [x[head].to(q) for x in self.back]
        near, far = (
            [x @ turn for x, turn in zip(self._decode(rows, stored, q.dtype), back, strict=True)]
            for rows, stored in zip(pool[:2], self.stored[:2], strict=True)
        )
        rank = pool[2]
        first = tuple(x[:, head].to(q.dtype) for x in self.sinks)
        rows = torch.arange(b, device=q.device)[:, None]
        filled = (rank[:, :capacity] > EMPTY).any(0)  # slots that are empty in all sequences are left out
        held = torch.arange(capacity, device=q.device)[filled].expand(b, -1)
        out = []
        for start in range(0, n, BLOCK):
            c, m = min(BLOCK, n - start), held.shape[1]
            leaves = capacity + start  # the key that leaves the window at the first row of the block
            band = slice(leaves, leaves + window + c)
            # 1. What each row of the block sees: sinks, held keys, then keys in and just behind the window.
            ranked = torch.cat([rank[rows, held], rank[:, band]], dim=1)
            place = position[:, start : start + c, None]
            seen = torch.cat([self._sinks_seen(place), self._visible(ranked, m, c, capacity)], dim=-1)
            # 2. Attention to them. Keys that leave the window at some row are there twice.
            index = torch.cat([held, torch.arange(leaves, leaves + c, device=q.device).expand(b, -1)], dim=1)
            k, v = (
                torch.cat([x, y[rows, index], z[:, start : start + window + c]], dim=1)[:, None].expand(-1, r, -1, -1)
                for x, y, z in zip(first, far, near, strict=True)
            )
            block = q[:, :, start : start + c]
            out.append(scaled_dot_product_attention(block, k, v, attn_mask=seen[:, None], scale=scale))
            # 3. The best of those that were held or have left the window are held.
            best = ranked[:, : m + c].topk(min(capacity, m + c), dim=1).indices
            held = index.gather(1, best)
        return torch.cat(out, dim=2), held

    def _sinks_seen(self, place: Tensor) -> Tensor:
        """Which sinks rows at a place (b, c, 1) see."""
        return torch.arange(self.kept.sinks, device=place.device) <= place

    def _visible(self, ranked: Tensor, m: int, c: int, capacity: int) -> Tensor:
        """What c rows see, bool (b, c, m + c + window + c), of ranks (b, m + window + c).

        Of m held keys, of the c that leave the window meanwhile once they have left it, and of all in the window.
        """
        window = self.kept.window
        row, column = torch.arange(c, device=ranked.device)[:, None], torch.arange(window + c, device=ranked.device)
        near = (column > row) & (column <= row + window)
        seen = near & (ranked[:, None, m:] > EMPTY)
        return torch.cat([alive(ranked[:, :m], ranked[:, m : m + c], capacity), seen], dim=-1)
