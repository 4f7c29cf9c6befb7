"""Attention over the first keys, the last keys, and the older keys with the highest scores.

Every key gets a score when it is computed. It is seen by all rows while it is in the window. When it leaves, it takes
the place of the least of the older keys that its head holds, or it is let go. What a row sees depends on the scores
alone, so that a text gives the same whole, in pieces or token by token.

One tensor holds all slots of a layer: a ring of `window` slots for each key head, then `sinks + budget` slots for each
key head, as many as its budget says. Decoding is one product with all slots; a mask keeps the heads apart. For
inference: nothing here has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bochner._checks import ArgumentError, BochnerError
from bochner.hf.precision import Parts, Precision, nbytes, precision_of

EMPTY = -(2**31)  # the rank of no key, and of padding
SINK = 32767  # the score of a sink, above every finite score in float16
PLACES = 65536  # positions that ranks tell apart
BLOCK = 256  # rows that are read at a time


@dataclass(frozen=True)
class SelectedKeys:
    """What the key heads of one layer hold.

    `budgets`: the most older keys of each key head. `precision`: how keys and values are stored; `recent`: so many last
    ones are whole besides.
    """

    window: int
    budgets: tuple[int, ...]
    sinks: int = 4
    precision: str | Precision = "model"
    recent: int = 0

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ArgumentError(f"The 'window' of SelectedKeys must be a positive int, got {self.window!r}.")
        if self.sinks < 0 or any(b < 0 for b in self.budgets) or not self.budgets:
            raise ArgumentError(
                "The 'sinks' and 'budgets' of SelectedKeys must be ints of at least 0, one budget for each key head, "
                f"got {self.sinks!r} and {self.budgets!r}."
            )
        if not 0 <= self.recent <= self.window:
            raise ArgumentError(
                f"The 'recent' of SelectedKeys must lie between 0 and the window, {self.window}, got {self.recent!r}."
            )
        precision_of(self.precision)

    @property
    def capacities(self) -> tuple[int, ...]:
        """Older keys of each key head, sinks among them."""
        return tuple(self.sinks + b for b in self.budgets)


def ranks(scores: Tensor, position: Tensor, sinks: int) -> Tensor:
    """Scores (b, g, n) as a total order of keys, int32 (b, g, n): EMPTY at positions (b, n) below 0, sinks on top.

    Scores are compared in float16; of equal ones the older key is worth more.
    """
    bits = (scores.float().clamp(-65504.0, 65504.0).half() + 0.0).view(torch.int16)  # -0 becomes 0
    order = torch.where(bits < 0, bits ^ 0x7FFF, bits).to(torch.int32)
    place = position[:, None].to(torch.int32)
    order = torch.where(place < sinks, SINK, order)
    return torch.where(place < 0, EMPTY, order * PLACES + (PLACES - 1 - place % PLACES))


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


class SelectedState:
    """The keys and values that one layer holds for a batch, and attention to them.

    >>> state = SelectedState(SelectedKeys(window=2, budgets=(1,), sinks=0), 1, 4, 4, torch.float32)
    >>> x = torch.eye(4).expand(1, 1, 4, 4)
    >>> out = state.attend(x, x, x, scores=torch.tensor([[[2.0, 3.0, 1.0, 0.0]]]), scale=0.0)
    >>> out[0, 0, 3]
    tensor([0.0000, 0.3333, 0.3333, 0.3333])
    """

    def __init__(
        self, kept: SelectedKeys, batch: int, key_size: int, value_size: int, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        self.kept, self.dtype = kept, dtype
        self.precision = precision_of(kept.precision)
        g, window = len(kept.budgets), kept.window
        sizes = torch.tensor(kept.capacities)
        self.slots = g * window + int(sizes.sum())
        self.first = (g * window + sizes.cumsum(0) - sizes).tolist()  # slot of each head's older keys
        heads = torch.arange(g)
        self.owner = torch.cat([heads.repeat_interleave(window), heads.repeat_interleave(sizes)]).to(device)
        # Slots of the older keys of each head, as many columns as the largest has; others point past the end.
        most = int(sizes.max())
        place = torch.arange(most).expand(g, most)
        past = self.slots
        self.table = torch.where(place < sizes[:, None], torch.tensor(self.first)[:, None] + place, past).to(device)
        self.rank = torch.full((batch, self.slots), EMPTY, dtype=torch.int32, device=device)
        zeros = (torch.zeros(batch, self.slots, size, dtype=dtype, device=device) for size in (key_size, value_size))
        self.keys, self.values = (self.precision.encode(z) for z in zeros)
        self.last: Parts = tuple(
            torch.zeros(batch, g, kept.recent, size, dtype=dtype, device=device)
            for size in ((key_size, value_size) if kept.recent else ())
        )
        self.seen = 0
        self.real = torch.zeros(batch, dtype=torch.int64, device=device)  # tokens that were not padding

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that belong to the batch."""
        return nbytes((self.rank, self.real, *self.keys, *self.values, *self.last))

    def select(self, f: Callable[[Tensor], Tensor]) -> None:
        """Apply f to every tensor; all have the batch in front."""
        self.keys, self.values, self.last = (tuple(map(f, t)) for t in (self.keys, self.values, self.last))
        self.rank, self.real = f(self.rank), f(self.real)

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
        b, _, n, _ = k.shape
        there = torch.ones(b, n, dtype=torch.int64, device=k.device) if padding is None else (~padding).long()
        position = torch.where(there.bool(), self.real[:, None] + there.cumsum(1) - 1, -1)
        rank = ranks(scores, position, self.kept.sinks)
        new = _Rows(rank, self.precision.encode(k), self.precision.encode(v), k, v)
        self.real = self.real + there.sum(1)
        out = self._step(q, new, scale) if n == 1 else self._read(q, new, scale)
        self.seen += n
        return out if padding is None else out.masked_fill(padding[:, None, :, None], 0)

    # One token

    def _step(self, q: Tensor, new: _Rows, scale: float) -> Tensor:
        """A single row: one product with all slots."""
        b, g = new.rank.shape[:2]
        rows = torch.arange(b, device=q.device)[:, None]
        ring = torch.arange(g, device=q.device) * self.kept.window + self.seen % self.kept.window
        # 1. The key that leaves the window takes the place of the least older key.
        leaving = self.rank[:, ring]
        older = torch.cat([self.rank, self.rank.new_full((b, 1), 2**31 - 1)], dim=1)[:, self.table]
        least, place = older.min(dim=-1)
        slot = self.table.expand(b, -1, -1).gather(2, place[..., None])[..., 0]
        better = leaving > least
        for part in (*self.keys, *self.values):
            part[rows, slot] = torch.where(better[..., None], part[rows, ring], part[rows, slot])
        self.rank[rows, slot] = torch.where(better, leaving, least)
        # 2. The new key takes its place in the window.
        for part, x in zip((*self.keys, *self.values), (*new.keys, *new.values), strict=True):
            part[:, ring] = x[:, :, 0]
        self.rank[:, ring] = new.rank[..., 0]
        # 3. Attention to all slots; those of other heads and empty ones are masked.
        h, r = q.shape[1], q.shape[1] // g
        group = torch.arange(h, device=q.device) // r
        seen = (self.owner == group[:, None]) & (self.rank > EMPTY)[:, None]
        keys, values = self.precision.decode(self.keys, q.dtype), self.precision.decode(self.values, q.dtype)
        seen = seen | ~seen.any(-1, keepdim=True)  # rows of padding
        return scaled_dot_product_attention(
            q.transpose(1, 2), keys[:, None], values[:, None], attn_mask=seen[:, None], scale=scale
        ).transpose(1, 2)

    # Many tokens

    def _read(self, q: Tensor, new: _Rows, scale: float) -> Tensor:
        """Rows in blocks, head by head."""
        g, r = new.rank.shape[1], q.shape[1] // new.rank.shape[1]
        window = self.kept.window
        turn = (torch.arange(window, device=q.device) + self.seen) % window  # the ring, oldest first
        out = q.new_empty(*q.shape[:-1], new.v.shape[-1])
        for head in range(g):
            ring = head * window + turn
            older = torch.arange(self.kept.capacities[head], device=q.device) + self.first[head]
            before = torch.cat([older, ring])
            pool = _Pool(
                torch.cat([self.rank[:, before], new.rank[:, head]], dim=1),
                tuple(torch.cat([old[:, before], x[:, head]], dim=1) for old, x in zip(self.keys, new.keys, strict=True)),
                tuple(
                    torch.cat([old[:, before], x[:, head]], dim=1) for old, x in zip(self.values, new.values, strict=True)
                ),
            )
            group = slice(head * r, (head + 1) * r)
            out[:, group], held = self._read_head(q[:, group], pool, len(older), scale)
            self._put(pool, held, older)
            self._put(pool, torch.arange(pool.rank.shape[1] - window, pool.rank.shape[1], device=q.device), ring_after(head, window, self.seen + q.shape[2], q.device))
        return out

    def _put(self, pool: _Pool, source: Tensor, slots: Tensor) -> None:
        """Copy rows of a pool, (m,) or (b, m), to slots; slots left over become empty."""
        rows = torch.arange(len(pool.rank), device=source.device)[:, None]
        slots, left = slots[: source.shape[-1]], slots[source.shape[-1] :]
        for part, x in zip((*self.keys, *self.values), (*pool.keys, *pool.values), strict=True):
            part[:, slots] = x[rows, source]
        self.rank[:, slots] = pool.rank[rows, source]
        self.rank[:, left] = EMPTY

    def _read_head(self, q: Tensor, pool: _Pool, capacity: int, scale: float) -> tuple[Tensor, Tensor]:
        """Rows (b, r, n, d) of the queries of one key head, and which of the pool (b, m) it holds afterwards.

        The pool has `capacity` older keys, then those of the window, then the new ones.
        """
        b, _, n, _ = q.shape
        window = self.kept.window
        keys, values = self.precision.decode(pool.keys, q.dtype), self.precision.decode(pool.values, q.dtype)
        rows = torch.arange(b, device=q.device)[:, None]
        held = torch.arange(capacity, device=q.device).expand(b, -1)
        filled = (pool.rank[:, :capacity] > EMPTY).any(0)  # empty slots of all sequences are left out
        held = held[:, filled]
        out = []
        for start in range(0, n, BLOCK):
            c = min(BLOCK, n - start)
            first = capacity + start  # the key that leaves the window at the first row of the block
            band = slice(first, first + window + c)
            # 1. What each row of the block sees: held keys, then keys in and just behind the window.
            ranked = torch.cat([pool.rank[rows, held], pool.rank[:, band]], dim=1)
            m = held.shape[1]
            seen = self._visible(ranked, m, c, capacity)
            # 2. Attention to them.
            k = torch.cat([keys[rows, held], keys[:, band]], dim=1)[:, None].expand(-1, q.shape[1], -1, -1)
            v = torch.cat([values[rows, held], values[:, band]], dim=1)[:, None].expand(-1, q.shape[1], -1, -1)
            out.append(scaled_dot_product_attention(q[:, :, start : start + c], k, v, attn_mask=seen[:, None], scale=scale))
            # 3. The best of those that were held or have left the window are held.
            index = torch.cat([held, torch.arange(first, first + c, device=q.device).expand(b, -1)], dim=1)
            best = ranked[:, : m + c].topk(min(capacity, m + c), dim=1).indices
            held = index.gather(1, best)
        return torch.cat(out, dim=2), held

    def _visible(self, ranked: Tensor, m: int, c: int, capacity: int) -> Tensor:
        """For c rows, which of m held keys and of the window + c keys of the band they see: bool (b, c, m + window + c)."""
        window = self.kept.window
        row, column = torch.arange(c, device=ranked.device)[:, None], torch.arange(window + c, device=ranked.device)
        near = (column > row) & (column <= row + window)
        seen = near & (ranked[:, None, m:] > EMPTY)
        seen |= column == row + window  # padding sees itself
        old = alive(ranked[:, :m], ranked[:, m : m + c], capacity)
        seen[..., :c] |= old[..., m:]
        return torch.cat([old[..., :m], seen], dim=-1)


def ring_after(head: int, window: int, seen: int, device: torch.device) -> Tensor:
    """Slots of the last `window` tokens of a head, oldest first, after `seen` tokens."""
    return head * window + (torch.arange(window, device=device) + seen) % window


@dataclass(frozen=True)
class _Rows:
    """New keys and values: ranks (b, g, n), as stored, and whole."""

    rank: Tensor
    keys: Parts
    values: Parts
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class _Pool:
    """Keys and values of one head as stored, (b, m, .), with their ranks (b, m)."""

    rank: Tensor
    keys: Parts
    values: Parts
