"""Attention over the first keys, the last keys, and the older keys with the highest scores.

Every key gets a score when it is computed. It is seen by all rows while it is in the window. When it leaves, it takes
the place of the least of the older keys that its head holds, or it is let go. What a row sees depends on the scores
alone, so that a text gives the same whole, in pieces or token by token.

One tensor holds all slots of a layer: a ring of `window` slots for each key head, then as many slots for older keys as
the budget of each head says. The first keys, the attention sinks, are not rounded to integers, since much of the
attention rests on them. Decoding is one product with all slots; a mask keeps the heads apart. For inference: nothing
here has a gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bochner._checks import ArgumentError, BochnerError
from bochner.hf.precision import Basis, Floating, Parts, Precision, nbytes, precision_of

EMPTY = -(2**31)  # the rank of no key, of padding and of attention sinks, which have their own slots
PLACES = 65536  # positions that ranks tell apart
BLOCK = 256  # rows that are read at a time
RANK_BYTES = 4  # of the rank of a key


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

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ArgumentError(f"The 'window' of SelectedKeys must be a positive int, got {self.window!r}.")
        if self.sinks < 0 or any(b < 0 for b in self.budgets) or not self.budgets:
            raise ArgumentError(
                "The 'sinks' and 'budgets' of SelectedKeys must be ints of at least 0, one budget for each key head, "
                f"got {self.sinks!r} and {self.budgets!r}."
            )
        precision_of(self.precision)


def sink_dtype(precision: str | Precision, dtype: torch.dtype) -> torch.dtype:
    """How attention sinks are stored: in bfloat16 where that is less, unless the model's own precision is asked for."""
    return torch.bfloat16 if precision_of(precision).name != "model" and dtype == torch.float32 else dtype


class Bases(NamedTuple):
    """Bases of the keys and of the values of a layer; see `precision`."""

    keys: Basis
    values: Basis


def ranks(scores: Tensor, position: Tensor, sinks: int) -> Tensor:
    """Scores (b, g, n) as a total order of keys, int32 (b, g, n); EMPTY where positions (b, n) are below `sinks`.

    Scores are compared in float16; of equal ones the older key is worth more.
    """
    bits = (scores.float().clamp(-65504.0, 65504.0).half() + 0.0).view(torch.int16)  # -0 becomes 0
    order = torch.where(bits < 0, bits ^ 0x7FFF, bits).to(torch.int32)
    place = position[:, None].to(torch.int32)
    return torch.where(place < sinks, EMPTY, order * PLACES + (PLACES - 1 - place % PLACES))


def alive(held: Tensor, arriving: Tensor, capacity: int) -> Tensor:
    """Which keys are held at each of c rows: bool (b, c, m + c), the held ones first, then those that arrive.

    held (b, m), arriving (b, c): ranks; key t of `arriving` is there from row t on. A key is held as long as fewer than
    `capacity` of those that have left the window rank above it.
    """
    m, c = held.shape[-1], arriving.shape[-1]
    every = torch.cat([held, arriving], dim=-1)
    there = (every > EMPTY)[:, None].expand(-1, c, -1)
    arrived = torch.ones(c, m + c, dtype=torch.bool, device=held.device).tril(m)
    if m + c <= capacity:
        return there & arrived
    ordered = held.sort(dim=-1).values
    above = m - torch.searchsorted(ordered, every, right=True, out_int32=True)
    more = (arriving.unsqueeze(-1) > every.unsqueeze(1)).cumsum(1, dtype=torch.int32)
    return there & arrived & (more + above.unsqueeze(1) < capacity)


class New(NamedTuple):
    """Tokens to be added: ranks (b, g, n), keys and values as stored (b, g, n, .), positions (b, n)."""

    rank: Tensor
    keys: Parts
    values: Parts
    position: Tensor


class Pool(NamedTuple):
    """Keys and values of one head as stored, (b, m, .), with their ranks (b, m)."""

    rank: Tensor
    keys: Parts
    values: Parts


class SelectedState:
    """The keys and values that one layer holds for a batch, and attention to them.

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
        bases: Bases | None = None,
    ) -> None:
        self.kept, self.bases = kept, bases
        self.precision = precision_of(kept.precision)
        if self.precision.name == "model":
            self.precision = Floating("model", dtype)
        g, window = len(kept.budgets), kept.window
        sizes = torch.tensor(kept.budgets)
        self.slots = g * window + int(sizes.sum())
        self.first = (g * window + sizes.cumsum(0) - sizes).tolist()  # slot of each head's older keys
        heads = torch.arange(g)
        self.owner = torch.cat(
            [heads.repeat_interleave(kept.sinks), heads.repeat_interleave(window), heads.repeat_interleave(sizes)]
        ).to(device)
        self.others = self.place = self.owner[:0]  # made at the first step: which slots are those of other query heads
        # Slots of the older keys of each head, as many columns as the largest has; others point past the end.
        most = max(1, int(sizes.max()))
        place = torch.arange(most).expand(g, most)
        self.table = torch.where(place < sizes[:, None], torch.tensor(self.first)[:, None] + place, self.slots)
        self.table = self.table.to(device)
        zeros = (torch.zeros(batch, self.slots, size, dtype=dtype, device=device) for size in (key_size, value_size))
        self.keys, self.values = (self.precision.encode(z) for z in zeros)
        self.rank = torch.full((batch, self.slots), EMPTY, dtype=torch.int32, device=device)
        whole = sink_dtype(kept.precision, dtype)
        self.sinks: Parts = tuple(
            torch.zeros(batch, g, kept.sinks, size, dtype=whole, device=device) for size in (key_size, value_size)
        )
        self.seen = 0
        self.real = torch.zeros(batch, dtype=torch.int64, device=device)  # tokens that were not padding
        self.complete = kept.sinks == 0  # whether all sinks are there

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that belong to the batch."""
        return nbytes((self.rank, self.real, *self.keys, *self.values, *self.sinks))

    def map(self, f: Callable[[Tensor], Tensor]) -> SelectedState:
        """A state with f applied to every tensor; all have the batch in front."""
        made = copy.copy(self)
        made.keys, made.values, made.sinks = (tuple(map(f, t)) for t in (self.keys, self.values, self.sinks))
        made.rank, made.real = f(self.rank), f(self.real)
        return made

    def crop(self, tokens: int) -> None:
        """Refuse to take tokens back."""
        if tokens:
            raise BochnerError(
                f"Keys that were let go cannot come back, so that {tokens} tokens cannot be removed from this cache; "
                "generate without an assistant."
            )

    @torch.no_grad()
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scores: Tensor, scale: float, padding: Tensor | None = None
    ) -> Tensor:
        """Add keys and values (b, g, n, .) with their scores (b, g, n), and answer queries (b, h, n, d).

        `padding` (b, n): True at tokens that are none; they are in front of all others. Their rows are zeros.
        """
        b, g, n, _ = k.shape
        dtype = q.dtype
        # 1. Everything in the basis in which it is stored, in float32 at least.
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
        by_group = (g, q.shape[1] // g)
        if self.bases is not None:
            k, v = self.bases.keys.into(k), self.bases.values.into(v)
            q = self.bases.keys.queries(q.unflatten(1, by_group).flatten(2, 3)).unflatten(2, (-1, n)).flatten(1, 2)
        # 2. Where the tokens are and what they are worth.
        there = torch.ones(b, n, dtype=torch.int64, device=k.device) if padding is None else (~padding).long()
        position = torch.where(there.bool(), self.real[:, None] + there.cumsum(1) - 1, -1)
        if not self.complete:
            self._add_sinks(k, v, position)
        rank = ranks(scores, position, self.kept.sinks)
        if k.shape == v.shape:  # both at once
            both = self.precision.encode(torch.stack([k, v]))
            new = New(rank, tuple(x[0] for x in both), tuple(x[1] for x in both), position)
        else:
            new = New(rank, self.precision.encode(k), self.precision.encode(v), position)
        # 3. Rows, and the keys that are held after them.
        out = self._step(q, new, scale) if n == 1 else self._read(q, new, scale)
        self.real = self.real + there.sum(1)
        self.seen += n
        if self.bases is not None:
            out = self.bases.values.back(out.unflatten(1, by_group).flatten(2, 3)).unflatten(2, (-1, n)).flatten(1, 2)
        return (out if padding is None else out.masked_fill(padding[:, None, :, None], 0)).to(dtype)

    def _add_sinks(self, k: Tensor, v: Tensor, position: Tensor) -> None:
        """Store the tokens at the first positions whole; each position comes once."""
        place = torch.arange(self.kept.sinks, device=k.device)
        chosen = (position[:, None, :] == place[:, None]).to(k.dtype)[:, None]  # (b, 1, sinks, n)
        self.sinks = tuple(old + (chosen @ x).to(old.dtype) for old, x in zip(self.sinks, (k, v), strict=True))
        self.complete = bool((position[:, -1] >= self.kept.sinks - 1).all())

    # One token

    def _step(self, q: Tensor, new: New, scale: float) -> Tensor:
        """A single row: one product with all slots."""
        self._make_room(new.rank.shape[1])
        g = new.rank.shape[1]
        ring = self._ring(g)
        for part, x in zip((*self.keys, *self.values), (*new.keys, *new.values), strict=True):
            part[:, ring] = x[:, :, 0]
        self.rank[:, ring] = new.rank[..., 0]
        # Slots of other heads are masked, empty ones, and sinks that are yet to come.
        h, t = q.shape[1], g * self.kept.sinks
        if len(self.others) != h:
            self.others = self.owner != torch.arange(h, device=q.device)[:, None] // (h // g)
            self.place = torch.arange(self.kept.sinks, device=q.device).repeat(g)
        hidden = torch.cat([self.place > new.position, self.rank == EMPTY], dim=1)[:, None] | self.others
        first_k, first_v = (x.flatten(1, 2).to(q.dtype) for x in self.sinks)
        rows = q[:, :, 0] * scale
        logits = torch.cat([rows @ first_k.mT, self.precision.products(rows, self.keys)], dim=-1)
        weight = logits.masked_fill_(hidden, -1e30).softmax(-1)
        return (weight[..., :t] @ first_v + self.precision.mixture(weight[..., t:], self.values)).unsqueeze(2)

    def _ring(self, g: int) -> Tensor:
        """The slot of each head's oldest key in the window, which the next key takes."""
        window = self.kept.window
        return torch.arange(g, device=self.rank.device) * window + self.seen % window

    def _make_room(self, g: int) -> None:
        """The key that leaves the window takes the place of the least older key of its head, if it ranks above it."""
        b = len(self.rank)
        rows, ring = torch.arange(b, device=self.rank.device)[:, None], self._ring(g)
        leaving = self.rank[:, ring]
        older = torch.cat([self.rank, self.rank.new_full((b, 1), 2**31 - 1)], dim=1)[:, self.table]
        least, place = older.min(dim=-1)
        slot = self.table.expand(b, -1, -1).gather(2, place[..., None])[..., 0]
        better = leaving > least
        slot = torch.where(better, slot, ring)  # those that are let go are copied to where they are
        for part in (*self.keys, *self.values):
            part[rows, slot] = part[:, ring]
        self.rank[rows, slot] = leaving

    # Many tokens

    def _read(self, q: Tensor, new: New, scale: float) -> Tensor:
        """Rows in blocks, head by head."""
        g, r, n = new.rank.shape[1], q.shape[1] // new.rank.shape[1], q.shape[2]
        window = self.kept.window
        turn = torch.arange(window, device=q.device)
        out = q.new_empty(*q.shape[:-1], self.sinks[1].shape[-1])
        for head in range(g):
            older = torch.arange(self.kept.budgets[head], device=q.device) + self.first[head]
            before = torch.cat([older, head * window + (turn + self.seen) % window])  # the ring, oldest first
            old_parts, new_parts = (*self.keys, *self.values), (*new.keys, *new.values)
            joined = [torch.cat([o[:, before], x[:, head]], dim=1) for o, x in zip(old_parts, new_parts, strict=True)]
            rank = torch.cat([self.rank[:, before], new.rank[:, head]], dim=1)
            pool = Pool(rank, tuple(joined[: len(self.keys)]), tuple(joined[len(self.keys) :]))
            group = slice(head * r, (head + 1) * r)
            out[:, group], held = self._read_head(q[:, group], pool, head, new.position, scale)
            self._put(pool, held, older)
            last = torch.arange(rank.shape[1] - window, rank.shape[1], device=q.device)
            self._put(pool, last, head * window + (turn + self.seen + n) % window)
        return out

    def _put(self, pool: Pool, source: Tensor, slots: Tensor) -> None:
        """Copy rows of a pool, (m,) or (b, m), to slots; slots left over become empty."""
        rows = torch.arange(len(pool.rank), device=source.device)[:, None]
        slots, left = slots[: source.shape[-1]], slots[source.shape[-1] :]
        for part, x in zip((*self.keys, *self.values), (*pool.keys, *pool.values), strict=True):
            part[:, slots] = x[rows, source]
        self.rank[:, slots] = pool.rank[rows, source]
        self.rank[:, left] = EMPTY

    def _read_head(self, q: Tensor, pool: Pool, head: int, position: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Rows (b, r, n, d) of the queries of one key head, and which of the pool (b, m) it holds afterwards.

        The pool has the older keys, then those of the window, then the new ones, at `position` (b, n).
        """
        b, r, n, _ = q.shape
        window, capacity = self.kept.window, self.kept.budgets[head]
        keys, values = self.precision.decode(pool.keys, q.dtype), self.precision.decode(pool.values, q.dtype)
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
