"""Attention over the first keys, the last keys, and the older keys with the highest scores.

Every key gets a score when it is computed. It is seen by all rows while it is in the window. When it leaves, it takes
the place of the least of the older keys that its head holds, or it is let go. What a row sees depends on the scores
alone, so that a text gives the same whole, in pieces or token by token.

One tensor holds all slots of a layer. Those of a key head lie side by side: a ring for its window, then as many slots
for older keys as its budget says. The first keys, the attention sinks, are not rounded to integers, since much of the
attention rests on them. For inference: nothing here has a gradient.

Single tokens need few operations each. The ring has a few slots to spare, so that keys which leave the window move once
in so many steps. Which key is let go at which of these steps is known before: the ranks of the keys that will leave
are there.
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

from bochner.hf.precision import Basis, Floating, Parts, Precision, halves, nbytes, precision_of, rotation

EMPTY = -(2**31)  # the rank of no key, of padding and of attention sinks, which have their own slots
NEVER = 2**31 - 1  # the rank of what is never let go: places beyond a head's budget
PLACES = 65536  # positions that ranks tell apart
BLOCK = 256  # rows that are read at a time
SPARE = 16  # steps after which keys that have left the window are moved
HIDDEN = -60000.0  # what is added to logits of keys that no row sees; float16 holds it
SLOT_BYTES = 6  # of a key's rank, and of what is added to its logits


@dataclass(frozen=True)
class SelectedKeys:
    """What the key heads of one layer hold.

    `window`: the last keys, of all heads. `budgets`: the most older keys of each key head. `sinks`: the first keys.
    `precision`: how keys and values are stored; sinks are in bfloat16 where that is less than the model's.
    """

    window: int
    budgets: tuple[int, ...]
    sinks: int = 4
    precision: str | Precision = "model"


def sink_dtype(precision: str | Precision, dtype: torch.dtype) -> torch.dtype:
    """How attention sinks are stored: in bfloat16 where that is less, unless the model's own precision is asked for."""
    return torch.bfloat16 if precision_of(precision).name != "model" and dtype == torch.float32 else dtype


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


def ring_of(window: int) -> int:
    """Slots of the ring of a window: some are to spare."""
    return window + min(SPARE, window)


def counters(window: int) -> int:
    """Bytes that a layer holds for each key head beside its slots; 18 of them are for all heads together."""
    return 12 * min(SPARE, window) + 18


@lru_cache(maxsize=1024)
def layout(kept: SelectedKeys, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first slot (g,) of each key head, and the slots (g, 1, slots) that are not its own; all caches share them."""
    sizes = torch.tensor(kept.budgets) + ring_of(kept.window)
    heads = torch.arange(len(sizes))
    owner = heads.repeat_interleave(sizes)
    return (sizes.cumsum(0) - sizes).to(device), (owner != heads[:, None, None]).to(device)


class New(NamedTuple):
    """Tokens to be added: ranks (b, g, n), codes (b, g, n, .), steps (b, ., g, n), positions (b, n)."""

    rank: Tensor
    codes: Tensor
    steps: Tensor
    position: Tensor


class Pool(NamedTuple):
    """Keys and values of one head as stored: ranks (b, m), codes (b, m, .), steps (b, ., m)."""

    rank: Tensor
    codes: Tensor
    steps: Tensor


class Reading(NamedTuple):
    """How single rows are read from stored numbers: matrices from channels to them (d, .) and back (., d).

    With integers that do not stand for themselves there are three parts: channels, for sinks, which are stored whole;
    stored numbers; and the offset of what stands for zero.
    """

    into: Tensor
    back: Tensor
    size: int
    packed: bool

    def queries(self, q: Tensor) -> tuple[Tensor, Parts, Tensor | None]:
        """Queries (..., d) for sinks, for each part of stored numbers (..., k), and an offset (..., 1)."""
        q = q @ self.into.to(q)
        if not self.packed:
            return q, (q,), None
        middle = (self.size + q.shape[-1] - 1) // 2
        return q[..., : self.size], (q[..., self.size : middle], q[..., middle:-1]), q[..., -1:]

    def outputs(self, near: Tensor, far: Tensor, weights: Tensor) -> Tensor:
        """Outputs (..., d) from those of sinks, those of stored numbers (..., k), and the weights of these."""
        found = torch.cat([near, far, weights.sum(-1, keepdim=True)], dim=-1) if self.packed else near + far
        return found @ self.back.to(found)


def _products(start: Tensor | None, x: Tensor, y: Tensor) -> Tensor:
    """`start + x y` (b, n, m)."""
    return torch.bmm(x, y) if start is None else torch.baddbmm(start, x, y)


@lru_cache(maxsize=16)
def reading(precision: Precision, size: int, rotated: bool) -> Reading:
    """The matrices for rows of `size` channels, which are few: all layers of a model have the same."""
    turn, unpacking = rotation(size) if rotated else torch.eye(size), precision.unpacking(size)
    if unpacking is None:
        return Reading(turn, turn.mT, size, False)
    every = torch.cat([torch.eye(size), unpacking, torch.full((1, size), -float(precision.zero))])
    return Reading(turn @ every.mT, every @ turn.mT, size, True)


class SelectedState:
    """The keys and values that one layer holds for a batch, and attention to them.

    `codes` (b, slots, .): keys and values of each slot side by side. `steps` (b, ., slots + 1): the step of the key,
    that of the value, and what is added to the logit. `rank` (b, slots + 1). The last place is that of no key.

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
        self.precision = precision_of(kept.precision)
        if self.precision.name == "model":
            self.precision = Floating("model", dtype)
        g = len(kept.budgets)
        # 1. Where the slots of each head are: a ring, then older keys.
        self.ring = ring_of(kept.window)
        self.spare = self.ring - kept.window
        self.slots = g * self.ring + sum(kept.budgets)
        self.first, self.others = layout(kept, torch.device(device))
        # 2. Empty slots.
        size = torch.zeros(1, 1, key_size, dtype=dtype), torch.zeros(1, 1, value_size, dtype=dtype)
        parts = [self.precision.encode(x) for x in size]
        self.key_codes, self.scaled = parts[0][0].shape[-1], len(parts[0]) - 1  # `scaled`: whether there are steps
        codes = self.key_codes + parts[1][0].shape[-1]
        self.codes = torch.zeros(batch, self.slots, codes, dtype=parts[0][0].dtype, device=device)
        self.steps = torch.zeros(batch, 2 * self.scaled + 1, self.slots + 1, dtype=torch.float16, device=device)
        self.rank = torch.full((batch, self.slots + 1), EMPTY, dtype=torch.int32, device=device)
        self.rank[:, -1] = NEVER
        whole = sink_dtype(kept.precision, dtype)
        self.sinks: Parts = tuple(
            torch.zeros(batch, g, kept.sinks, size, dtype=whole, device=device) for size in (key_size, value_size)
        )
        # 3. The scores of single tokens since the last move, and the slots that are let go at each step.
        self.pending = torch.zeros(batch, g, self.spare, device=device)
        self.going = torch.zeros(batch, g, self.spare, dtype=torch.int64, device=device)
        self.moved: int | None = None  # tokens that were seen when `going` was made
        self.seen = 0
        self.real = torch.zeros(batch, dtype=torch.int64, device=device)  # tokens that were not padding
        self.complete = kept.sinks == 0  # whether all sinks are there

    @property
    def tensors(self) -> Parts:
        """All tensors that belong to the batch."""
        return (self.rank, self.real, self.codes, self.steps, self.pending, self.going, *self.sinks)

    @property
    def nbytes(self) -> int:
        return nbytes(self.tensors)

    def map(self, f: Callable[[Tensor], Tensor]) -> SelectedState:
        """A state with f applied to every tensor; all have the batch in front."""
        made = copy.copy(self)
        made.rank, made.real, made.codes, made.steps, made.pending, made.going, *sinks = (f(t) for t in self.tensors)
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
        q, k, v = q.to(least), k.to(least), v.to(least)
        if padding is None:
            position = self.real[:, None] + torch.arange(n, device=k.device) if n > 1 else self.real[:, None]
        else:
            there = ~padding
            position = torch.where(there, self.real[:, None] + there.cumsum(1) - 1, -1)
        if self.basis is not None:  # values are only rotated: those of attention sinks are near zero and stay so
            k, v = self.basis.keys(k), v @ rotation(v.shape[-1]).to(v)
        known = padding is None and self.complete  # no sink and no padding among the tokens
        if not self.complete:
            self._add_sinks(k, v, position)
        codes, steps = self._encode(k, v)
        if n == 1:
            self._add(codes, steps, scores, position, known)
            out = self._row(q[:, :, 0], position, scale, known).unsqueeze(2)
        else:
            out = self._read(q, New(ranks(scores, position, self.kept.sinks), codes, steps, position), scale)
        self.real = self.real + (n if padding is None else there.sum(1))
        self.seen += n
        return (out if padding is None else out.masked_fill(padding[:, None, :, None], 0)).to(dtype)

    def _encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (b, g, n, .) of keys and values side by side, and their steps (b, 2, g, n), which some have not."""
        if k.shape == v.shape:  # both at once
            codes, *step = self.precision.encode(torch.stack([k, v], dim=-2))
            codes, step = codes.flatten(-2), [x.squeeze(-1).movedim(-1, 1) for x in step]
        else:
            parts = self.precision.encode(k), self.precision.encode(v)
            codes = torch.cat([part[0] for part in parts], dim=-1)
            step = [torch.stack([part[1].squeeze(-1) for part in parts], dim=1)] if self.scaled else []
        return codes, step[0] if step else self.steps.new_zeros(k.shape[0], 0, *k.shape[1:3])

    def _add_sinks(self, k: Tensor, v: Tensor, position: Tensor) -> None:
        """Store the tokens at the first positions whole; each position comes once."""
        place = torch.arange(self.kept.sinks, device=k.device)
        chosen = (position[:, None, :] == place[:, None]).to(k.dtype)[:, None]  # (b, 1, sinks, n)
        self.sinks = tuple(old + (chosen @ x).to(old.dtype) for old, x in zip(self.sinks, (k, v), strict=True))
        self.complete = bool((position[:, -1] >= self.kept.sinks - 1).all())

    # One token

    def _add(self, codes: Tensor, steps: Tensor, scores: Tensor, position: Tensor, known: bool) -> None:
        """Put a token into the ring, and let the key go that goes at this step."""
        if self.moved is None or self.seen - self.moved == self.spare:
            self._settle()
            self._look_ahead()
        assert self.moved is not None
        t, place, added = self.seen - self.moved, self.first + self.seen % self.ring, self.steps[:, -1]
        self.codes.index_copy_(1, place, codes[:, :, 0])
        self.steps[:, :-1].index_copy_(2, place, steps[..., 0])
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
        return self.first[:, None] + tokens % self.ring

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
        left = self._ring_slots(self.moved - self.kept.window, count)
        leaving, order = self.rank[:, left].sort(dim=-1, descending=True)
        least, older = self._least(count)
        source = left.expand_as(order).gather(2, order)
        target = torch.where(leaving > least, older, source)
        rows = torch.arange(len(self.rank), device=left.device)[:, None, None]
        for part in (self.codes, self.steps.mT):
            part[rows, target] = part[rows, source]
        self.rank[rows, target] = leaving
        self.rank[:, left] = EMPTY
        self.moved = self.seen

    def _least(self, count: int) -> tuple[Tensor, Tensor]:
        """The least ranks (b, g, count) of the older keys of each head, the least first, and their slots."""
        # Slots of the older keys, as many columns as the largest head has; others are that of no key.
        sizes = self.first.new_tensor(self.kept.budgets)[:, None]
        place = torch.arange(max(count, *self.kept.budgets), device=self.first.device)
        table = torch.where(place < sizes, self.first[:, None] + self.ring + place, self.slots)
        rank, best = self.rank[:, table].topk(count, dim=-1, largest=False)
        return rank, table.expand(len(rank), -1, -1).gather(2, best)

    def _look_ahead(self) -> None:
        """Which key of each head goes at each of the next steps, and which are seen now."""
        count, device = self.spare, self.rank.device
        coming = self._ring_slots(self.seen - self.kept.window, count)
        arriving, (least, older) = self.rank[:, coming], self._least(count)
        # Only the least can go: to the others, as many have to come as there are of the least.
        until = alive(least, arriving, count).sum(-2)
        until[..., count:] += torch.arange(count, device=device)
        goes = (torch.cat([least, arriving], dim=-1) > EMPTY) & (until < count)
        slots = torch.cat([older, coming.expand_as(arriving)], dim=-1)
        going = slots.new_full((*arriving.shape[:2], count + 1), self.slots)
        self.going = going.scatter_(2, torch.where(goes, until, count), slots)[..., :count].contiguous()
        self.steps[:, -1] = torch.where(self.rank > EMPTY, 0.0, HIDDEN)
        self.moved = self.seen

    def _row(self, q: Tensor, position: Tensor, scale: float, known: bool) -> Tensor:
        """A single row (b, h, v) for queries (b, h, d): products with the stored numbers as they are.

        All heads meet all slots of the layer at once, and slots of other heads are hidden: one product of three times
        the size is quicker than three products with what surrounds them.
        """
        g, first = len(self.first), self.kept.sinks
        rows = q.unflatten(1, (g, -1)) * scale
        if self.basis is not None:
            rows = rows / self.basis.scale[:, None].to(rows.dtype)
        # 1. Queries for sinks and for stored numbers; what stands for zero adds an offset.
        reader = reading(self.precision, q.shape[-1], self.basis is not None)
        to_sinks, to_codes, offset = reader.queries(rows)
        sink_keys, sink_values = (x.to(q.dtype) for x in self.sinks)
        near = to_sinks @ sink_keys.mT
        if not known:
            near = near.masked_fill(~self._sinks_seen(position[..., None])[:, None], HIDDEN)
        # 2. Logits of all slots. Stored numbers come in one part or two.
        columns = [halves(x, self.key_codes) for x in self.precision.columns(self.codes, q.dtype)]
        steps = self.steps[..., None, :-1].to(q.dtype)
        found = None if offset is None else offset.flatten(1, 2)
        for x, (keys, _) in zip(to_codes, columns, strict=True):
            found = _products(found, x.flatten(1, 2), keys.mT)
        assert found is not None
        added = steps[:, -1]
        found = torch.addcmul(added, found, steps[:, 0]) if self.scaled else found + added
        found = found.unflatten(1, (g, -1)).masked_fill(self.others, HIDDEN)
        # 3. Weights, values, and back from stored numbers.
        weight = torch.cat([near, found], dim=-1).softmax(-1)
        near, rest = weight[..., :first] @ sink_values, weight[..., first:].flatten(1, 2)
        rest = rest * steps[:, 1] if self.scaled else rest
        far = torch.cat([torch.bmm(rest, values) for _, values in columns], dim=-1)
        back = reading(self.precision, sink_values.shape[-1], self.basis is not None)
        return back.outputs(near.flatten(1, 2), far, rest)

    # Many tokens

    def _read(self, q: Tensor, new: New, scale: float) -> Tensor:
        """Rows in blocks, head by head."""
        self._settle()
        g, n, window = new.rank.shape[1], q.shape[2], self.kept.window
        q = q.unflatten(1, (g, -1))
        if self.basis is not None:
            q = self.basis.queries(q.flatten(2, 3)).view(q.shape)
        out = q.new_empty(*q.shape[:-1], self.sinks[1].shape[-1])
        ring, after = self._ring_slots(self.seen - window, window), self._ring_slots(self.seen + n - window, self.ring)
        for head, (start, budget) in enumerate(zip(self.first.tolist(), self.kept.budgets, strict=True)):
            older = torch.arange(start + self.ring, start + self.ring + budget, device=q.device)
            before = torch.cat([older, ring[head]])
            pool = Pool(
                torch.cat([self.rank[:, before], new.rank[:, head]], dim=1),
                torch.cat([self.codes[:, before], new.codes[:, head]], dim=1),
                torch.cat([self.steps[:, :-1, before], new.steps[:, :, head]], dim=2),
            )
            out[:, head], held = self._read_head(q[:, head], pool, head, new.position, scale)
            self._put(pool, held, older)
            last = torch.arange(pool.rank.shape[1] - window, pool.rank.shape[1], device=q.device)
            self._put(pool, last, after[head])
        self.moved = None
        out = out.flatten(1, 2)
        return out if self.basis is None else out @ rotation(out.shape[-1]).to(out).mT

    def _put(self, pool: Pool, source: Tensor, slots: Tensor) -> None:
        """Copy rows of a pool, (m,) or (b, m), to slots; slots left over become empty."""
        rows = torch.arange(len(pool.rank), device=source.device)[:, None]
        slots, left = slots[: source.shape[-1]], slots[source.shape[-1] :]
        self.codes[:, slots] = pool.codes[rows, source]
        self.steps[:, :-1, slots] = pool.steps.mT[rows, source].mT
        self.rank[:, slots] = pool.rank[rows, source]
        self.rank[:, left] = EMPTY

    def _read_head(self, q: Tensor, pool: Pool, head: int, position: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Rows (b, r, n, d) of the queries of one key head, and which of the pool (b, m) it holds afterwards.

        The pool has the older keys, then those of the window, then the new ones, at `position` (b, n).
        """
        b, r, n, _ = q.shape
        window, capacity = self.kept.window, self.kept.budgets[head]
        keys, values = (
            self.precision.decode(
                (codes, *(x.unsqueeze(-1) for x in pool.steps[:, i : i + self.scaled].unbind(1))), q.dtype
            )
            for i, codes in enumerate(halves(pool.codes, self.key_codes))
        )
        first = tuple(x[:, head].to(q.dtype) for x in self.sinks)
        rows = torch.arange(b, device=q.device)[:, None]
        filled = (pool.rank[:, :capacity] > EMPTY).any(0)  # slots that are empty in all sequences are left out
        held = torch.arange(capacity, device=q.device)[filled].expand(b, -1)
        out = []
        for start in range(0, n, BLOCK):
            c, m = min(BLOCK, n - start), held.shape[1]
            leaves = capacity + start  # the key that leaves the window at the first row of the block
            band = slice(leaves, leaves + window + c)
            # 1. What each row of the block sees: sinks, held keys, then keys in and just behind the window.
            ranked = torch.cat([pool.rank[rows, held], pool.rank[:, band]], dim=1)
            place = position[:, start : start + c, None]
            seen = torch.cat([self._sinks_seen(place), self._visible(ranked, m, c, capacity)], dim=-1)
            # 2. Attention to them.
            k, v = (
                torch.cat([x, y[rows, held], y[:, band]], dim=1)[:, None].expand(-1, r, -1, -1)
                for x, y in zip(first, (keys, values), strict=True)
            )
            block = q[:, :, start : start + c]
            out.append(scaled_dot_product_attention(block, k, v, attn_mask=seen[:, None], scale=scale))
            # 3. The best of those that were held or have left the window are held.
            index = torch.cat([held, torch.arange(leaves, leaves + c, device=q.device).expand(b, -1)], dim=1)
            best = ranked[:, : m + c].topk(min(capacity, m + c), dim=1).indices
            held = index.gather(1, best)
        return torch.cat(out, dim=2), held

    def _sinks_seen(self, place: Tensor) -> Tensor:
        """Which sinks rows at a place (b, c, 1) see."""
        return torch.arange(self.kept.sinks, device=place.device) <= place

    def _visible(self, ranked: Tensor, m: int, c: int, capacity: int) -> Tensor:
        """Which of m held keys, and of the window + c keys of the band, c rows see: bool (b, c, m + window + c)."""
        window = self.kept.window
        row, column = torch.arange(c, device=ranked.device)[:, None], torch.arange(window + c, device=ranked.device)
        near = (column > row) & (column <= row + window)
        seen = near & (ranked[:, None, m:] > EMPTY)
        old = alive(ranked[:, :m], ranked[:, m : m + c], capacity)
        seen[..., :c] |= old[..., m:]
        return torch.cat([old[..., :m], seen], dim=-1)
