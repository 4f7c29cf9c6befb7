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
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from bochner._checks import lookup
from bochner.hf.precision import INT8, PRECISIONS, Basis, Parts, Rows, Turns, nbytes

EMPTY = -(2**31)  # the rank of no key, of padding and of attention sinks, which have their own slots
NEVER = 2**31 - 1  # the rank of what is never let go: places beyond a head's budget
PLACES = 65536  # positions that ranks tell apart
BLOCK = 128  # rows that are read at a time; 256 take a tenth longer
SPARE = 16  # keys that are rounded ahead, and steps after which those that have left the window are moved
HIDDEN = -60000.0  # what is added to logits of keys that no row sees; float16 holds it
SLOT_BYTES = 6  # of a key's rank, and of what is added to its logits


@dataclass(frozen=True)
class SelectedKeys:
    """What the key heads of one layer hold.

    `window`: the last keys, of all heads. `budgets`: the most older keys of each key head. `sinks`: the first keys.
    `precision`: how older keys and values are stored, a name in `PRECISIONS`; windows hold 8 bits.
    """

    window: int
    budgets: tuple[int, ...]
    sinks: int = 4
    precision: str = "int4"


def sink_dtype(dtype: torch.dtype) -> torch.dtype:
    """How attention sinks are stored: as the model computes, but in bfloat16 for float32."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


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
    arrived = torch.arange(m + c, device=held.device) <= torch.arange(m, m + c, device=held.device)[:, None]
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

    And what is added to logits (g, 1, slots), to hide slots that are not its own. All caches share them. Sinks come
    first.
    """
    heads = torch.arange(len(kept.budgets))
    sizes = [torch.full_like(heads, n) for n in (kept.sinks, kept.window, spare_of(kept.window))]
    sizes.append(torch.tensor(kept.budgets))
    owner = torch.cat([heads.repeat_interleave(n) for n in sizes])
    every = torch.cat(sizes)
    _, first, leaving, older = (every.cumsum(0) - every).to(device).chunk(4)
    others = torch.where(owner == heads[:, None, None], 0.0, HIDDEN)
    return first, leaving, older, others.to(device)


class SelectedState:
    """The keys and values that one layer holds for a batch, and attention to them.

    Slots are those of the sinks, of the rings, and of older keys. Side by side, for keys and values in their basis:
    `sinks` (b, 2, ., d) and the codes `near` (b, 2, ., d), `far` (b, 2, ., .). `steps` (b, 3, slots + 1): of keys, of
    values, and what is added to logits. `rank` (b, slots + 1). The last place is that of no key.

    >>> state = SelectedState(SelectedKeys(window=2, budgets=(1,), sinks=0), 1, 4, 4, torch.float32)
    >>> x = torch.eye(4).expand(1, 1, 4, 4)
    >>> out = state.attend(x, x, 15 * x, scores=torch.tensor([[[2.0, 3.0, 1.0, 0.0]]]), scale=0.0)
    >>> out[0, 0, 3].round().tolist()
    [0.0, 5.0, 5.0, 5.0]
    """

    def __init__(
        self,
        kept: SelectedKeys,
        batch: int,
        key_size: int,
        value_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        turns: Turns | None = None,
    ) -> None:
        self.kept, self.value_size = kept, value_size
        self.older_as = lookup(PRECISIONS, kept.precision, "precision")
        self.exact = torch.promote_types(dtype, torch.float32)  # what is computed in
        g = len(kept.budgets)
        self.turns = turns or Turns.of(Basis.plain(g, key_size, value_size, device), self.older_as, self.exact)
        # 1. Where the slots of each head are: sinks, rings, then older keys.
        self.spare = spare_of(kept.window)
        self.near_from, self.far_from = g * kept.sinks, g * (kept.sinks + kept.window)
        self.slots = self.far_from + g * self.spare + sum(kept.budgets)
        self.first, self.leaving, self.older, self.others = layout(kept, torch.device(device))
        # 2. Empty slots.
        empty = torch.zeros(batch, 2, 1, max(key_size, value_size), device=device)
        self.sinks = empty.to(sink_dtype(dtype)).repeat(1, 1, self.near_from, 1)
        self.near = INT8.encode(empty).codes.repeat(1, 1, self.far_from - self.near_from, 1)
        self.far = self.older_as.encode(empty).codes.repeat(1, 1, self.slots - self.far_from, 1)
        self.steps = torch.ones(batch, 3, self.slots + 1, dtype=torch.float16, device=device)
        self.steps[:, 2] = HIDDEN
        self.rank = torch.full((batch, self.slots + 1), EMPTY, dtype=torch.int32, device=device)
        self.rank[:, -1] = NEVER
        # 3. The scores of single tokens since the last move, and the slots that are let go at each step.
        self.pending = torch.zeros(batch, g, self.spare, device=device)
        self.going = torch.zeros(batch, g, self.spare, dtype=torch.int64, device=device)
        self.moved: int | None = None  # tokens that were seen when `going` was made
        self.seen = 0
        self.padded = torch.zeros(batch, dtype=torch.int64, device=device)  # tokens that were padding
        self.complete = kept.sinks == 0  # whether all sinks are there

    @property
    def tensors(self) -> Parts:
        """All tensors that belong to the batch."""
        return self.sinks, self.near, self.far, self.steps, self.rank, self.pending, self.going, self.padded

    @property
    def nbytes(self) -> int:
        return nbytes(self.tensors)

    def map(self, f: Callable[[Tensor], Tensor]) -> SelectedState:
        """A state with f applied to every tensor; all have the batch in front."""
        made = copy.copy(self)
        made.sinks, made.near, made.far, made.steps, made.rank, made.pending, made.going, made.padded = map(
            f, self.tensors
        )
        return made

    @torch.no_grad()
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scores: Tensor, scale: float, padding: Tensor | None = None
    ) -> Tensor:
        """Add keys and values (b, g, n, .) with their scores (b, g, n), and answer queries (b, h, n, d).

        `padding` (b, n): True at tokens that are none; they are in front of all others. Their rows are zeros.
        """
        n, dtype = k.shape[-2], q.dtype
        # 1. Keys and values in their basis, and the place of each token; single ones need it at the beginning alone.
        k, v = (pad(x, (0, self.sinks.shape[-1] - x.shape[-1])) for x in (k, v)) if k.shape != v.shape else (k, v)
        rows = torch.stack([k, v], dim=1).to(self.exact) @ self.turns.into
        rows += self.turns.start
        position = None
        if n > 1 or padding is not None or not self.complete:
            position = self.seen - self.padded[:, None] + torch.arange(n, device=k.device)
            if padding is not None:
                position = torch.where(padding, -1, position - padding.sum(1, keepdim=True))
            if not self.complete:
                self._add_sinks(rows, position)
        # 2. What is seen of them.
        q, new = q.to(self.exact), INT8.encode(rows)
        if n == 1:
            self._add(new, scores, position)
            out = self._row(q[:, :, 0] * scale).unsqueeze(2)
        else:
            assert position is not None
            out = self._read(q, new, ranks(scores, position, self.kept.sinks), position, scale)
        if padding is not None:
            self.padded = self.padded + padding.sum(1)
            out = out.masked_fill(padding[:, None, :, None], 0)
        self.seen += n
        return out.to(dtype)

    def _add_sinks(self, rows: Tensor, position: Tensor) -> None:
        """Store the tokens at the first positions whole; each position comes once."""
        place = torch.arange(self.kept.sinks, device=rows.device)
        chosen = (position[:, None, :] == place[:, None]).to(rows.dtype)[:, None, None]  # (b, 1, 1, sinks, n)
        self.sinks = self.sinks + (chosen @ rows).flatten(2, 3).to(self.sinks.dtype)
        there = (place <= position[:, -1:]).repeat(1, len(self.first))
        self.rank[:, : self.near_from] = torch.where(there, NEVER, EMPTY).to(torch.int32)
        self.steps[:, 2, : self.near_from] = torch.where(there, 0.0, HIDDEN).to(self.steps.dtype)
        self.complete = bool((position[:, -1] >= self.kept.sinks - 1).all())

    def _of_ring(self, slots: Tensor) -> Rows:
        return Rows(self.near[:, :, slots - self.near_from], self.steps[:, :2, slots])

    def _again(self, rows: Rows) -> Rows:
        """Rows of a window as they are stored when they have left it."""
        return rows if self.older_as is INT8 else self.older_as.encode(INT8.decode(rows, self.exact))

    # One token

    def _add(self, new: Rows, scores: Tensor, position: Tensor | None) -> None:
        """Put a token into the ring, and let the key go that goes at this step."""
        if self.moved is None or self.seen - self.moved == self.spare:
            self._settle()
            self._look_ahead()
        assert self.moved is not None
        t, place, w, added = self.seen - self.moved, self.seen % self.kept.window, self.kept.window, self.steps[:, 2]
        ring = slice(self.near_from + place, self.far_from, w)
        self.near[:, :, place::w] = new.codes[..., 0, :]
        self.steps[:, :2, ring] = new.steps[..., 0]
        # Sinks have their own slots.
        hidden = position is not None and torch.where(position < self.kept.sinks, HIDDEN, 0.0)
        added[:, ring] = hidden
        added[:, self.far_from + t : self.far_from + len(self.first) * self.spare : self.spare] = 0.0
        added.scatter_(1, self.going[..., t], HIDDEN)
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
        position = self.seen - self.padded[:, None] + torch.arange(-count, 0, device=self.padded.device)
        new = self._ring_slots(self.moved, count)
        self.rank[:, new] = ranks(self.pending[..., :count], position, self.kept.sinks)
        # The best of those that leave meets the least of those that are held, the second best the second least, ...
        left = self._leaving_slots(count)
        leaving, order = self.rank[:, left].sort(dim=-1, descending=True)
        least, older = self._least(count)
        better, source = leaving > least, left.expand_as(order).gather(2, order)
        batch = torch.arange(len(self.rank), device=left.device)[:, None, None].expand_as(source)[better]
        source, target = source[better], older[better]
        far, steps = self.far.transpose(1, 2), self.steps.mT
        far[batch, target - self.far_from] = far[batch, source - self.far_from]
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
        left = self._again(self._of_ring(coming))
        self.far[:, :, slots - self.far_from], self.steps[:, :2, slots] = left
        arriving, (least, older) = self.rank[:, coming], self._least(count)
        # Only the least can go: to the others, as many have to come as there are of the least.
        until = alive(least, arriving, count).sum(-2)
        until[..., count:] += torch.arange(count, device=device)
        goes = until < count  # those that are none go when they come
        every = torch.cat([older, slots.expand_as(arriving)], dim=-1)
        going = every.new_full((*arriving.shape[:2], count + 1), self.slots)
        self.going = going.scatter_(2, torch.where(goes, until, count), every)[..., :count].contiguous()
        self.steps[:, 2] = torch.where(self.rank > EMPTY, 0.0, HIDDEN)
        self.rank[:, slots] = arriving
        self.moved = self.seen

    def _row(self, q: Tensor) -> Tensor:
        """A single row (b, h, v) for scaled queries (b, h, d): products with the stored numbers as they are.

        All heads meet all slots of the layer at once, and slots of other heads are hidden: one product of three times
        the size is quicker than three products with what surrounds them.
        """
        g, d, border, dtype = len(self.first), self.near.shape[-1], self.far_from, q.dtype
        keys, values = self.far.unbind(1)
        near = torch.cat([self.sinks.to(dtype), self.near.to(dtype)], dim=2)
        key_step, value_step, added = self.steps.to(dtype)[:, :, None, None, :-1].unbind(1)
        # 1. What queries ask of the stored numbers, and the logits; slots of other heads are hidden.
        asked = (q.unflatten(1, (g, -1)) @ self.turns.ask).flatten(1, 2)
        parts = len(self.older_as.zero[0])
        mine = asked.split([d // parts] * parts + [1] * parts, dim=-1)
        columns = self.older_as.columns(keys, 0, dtype)
        strong, *weak = (torch.baddbmm(mine[parts + i], mine[i], x.mT) for i, x in enumerate(columns))
        met = torch.cat([torch.bmm(asked[..., :d], near[:, 0].mT), strong], dim=-1).unflatten(1, (g, -1))
        logits = torch.addcmul(added + self.others, met, key_step)
        if weak:  # they have no step
            logits[..., border:].add_(weak[0].unflatten(1, (g, -1)))
        # 2. Weights, values, and back from stored numbers.
        weight = logits.softmax(-1).mul_(value_step).flatten(1, 2)
        older = weight[..., border:]
        told = map(partial(torch.bmm, older), self.older_as.columns(values, 1, dtype))
        sums = torch.cat([*told, older.sum(-1, keepdim=True)], dim=-1)
        sums[..., :d].baddbmm_(weight[..., :border], near[:, 1])
        return (sums.unflatten(1, (g, -1)) @ self.turns.tell).flatten(1, 2)

    # Many tokens

    def _read(self, q: Tensor, new: Rows, rank: Tensor, position: Tensor, scale: float) -> Tensor:
        """Rows in blocks, head by head."""
        self._settle()
        g, n, window = len(self.first), q.shape[2], self.kept.window
        q = q.unflatten(1, (g, -1))
        out = q.new_empty(*q.shape[:-1], self.value_size)
        ring, after = self._ring_slots(self.seen - window, window), self._ring_slots(self.seen + n - window, window)
        for head, (start, budget) in enumerate(zip(self.older.tolist(), self.kept.budgets, strict=True)):
            older = torch.arange(start, start + budget, device=q.device)
            full = older[(self.rank[:, older] > EMPTY).any(0)]  # slots that are empty in all sequences are left out
            ranked = torch.cat([self.rank[:, full], self.rank[:, ring[head]], rank[:, head]], dim=1)
            near = self._of_ring(ring[head]).then(Rows(new.codes[:, :, head], new.steps[:, :, head]))
            far = Rows(self.far[:, :, full - self.far_from], self.steps[:, :2, full]).then(self._again(near))
            out[:, head], held = self._read_head(q[:, head], (near, far, ranked), head, position, scale)
            self._put(self.far, far, ranked, held, older, self.far_from)
            last = torch.arange(near.codes.shape[2] - window, near.codes.shape[2], device=q.device)
            self._put(self.near, near, ranked[:, len(full) :], last, after[head], self.near_from)
        self.moved = None
        return out.flatten(1, 2)

    def _put(self, codes: Tensor, rows: Rows, ranked: Tensor, source: Tensor, slots: Tensor, before: int) -> None:
        """Copy rows, (m,) or (b, m), to slots; slots left over become empty; `codes` begin at slot `before`."""
        batch = torch.arange(len(ranked), device=source.device)[:, None]
        slots, left = slots[: source.shape[-1]], slots[source.shape[-1] :]
        codes.transpose(1, 2)[:, slots - before] = rows.codes.transpose(1, 2)[batch, source]
        self.steps.mT[:, slots, :2] = rows.steps.mT[batch, source]
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
        sizes = q.shape[-1], self.value_size
        window, capacity = self.kept.window, self.kept.budgets[head]
        sinks = self.sinks.unflatten(2, (len(self.first), -1))[:, :, head].to(q.dtype)
        first, near, far = (
            [y[..., :size] for y, size in zip((x @ self.turns.back[:, head]).unbind(1), sizes, strict=True)]
            for x in (sinks, INT8.decode(pool[0], q.dtype), self.older_as.decode(pool[1], q.dtype))
        )
        rank = pool[2]
        rows = torch.arange(b, device=q.device)[:, None]
        older = rank.shape[1] - window - n
        held = torch.arange(older, device=q.device).expand(b, -1)
        out = []
        for start in range(0, n, BLOCK):
            c, m = min(BLOCK, n - start), held.shape[1]
            leaves = older + start  # the key that leaves the window at the first row of the block
            band = slice(leaves, leaves + window + c)
            # 1. What each row of the block sees: sinks, held keys, then keys in and just behind the window.
            ranked = torch.cat([rank[rows, held], rank[:, band]], dim=1)
            sinks_seen = torch.arange(self.kept.sinks, device=q.device) <= position[:, start : start + c, None]
            seen = torch.cat([sinks_seen, self._visible(ranked, m, c, capacity)], dim=-1)
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

    def _visible(self, ranked: Tensor, m: int, c: int, capacity: int) -> Tensor:
        """What c rows see, bool (b, c, m + c + window + c), of ranks (b, m + window + c).

        Of m held keys, of the c that leave the window meanwhile once they have left it, and of all in the window.
        """
        window = self.kept.window
        row, column = torch.arange(c, device=ranked.device)[:, None], torch.arange(window + c, device=ranked.device)
        near = (column > row) & (column <= row + window) & (ranked[:, None, m:] > EMPTY)
        if m <= c:
            return torch.cat([alive(ranked[:, :m], ranked[:, m : m + c], capacity), near], dim=-1)
        # Only the c least can go: to the others, as many have to come as there are of the least.
        rank, least = ranked[:, :m].topk(c, dim=1, largest=False)
        some, arriving = alive(rank, ranked[:, m : m + c], capacity - m + c).split(c, dim=-1)
        held = (ranked[:, None, :m] > EMPTY).repeat(1, c, 1).scatter_(2, least[:, None].expand(-1, c, -1), some)
        return torch.cat([held, arriving, near], dim=-1)
