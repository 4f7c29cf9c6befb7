"""Where rows and keys lie: blocks, the zone of keys that a block of rows sees pair by pair, left padding.

Rows come in blocks of c. A block of rows sees the keys of its *zone* pair by pair, and all blocks of keys outside it by
their sums, so that no kernel product is ever masked. Without a window the zone is the block itself, and its pairs are
the kernel's. With one the zone is the block and its neighbours (causal: the one before): all exact for windows of kind
`"block"`, exact in a band and the kernel's elsewhere for kind `"sliding"`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bochner._products import in_place, is_composed, may_look, memory

CHUNK = 64  # rows of a block without a window
SLIDING_BLOCK = 64  # rows of a block of a symmetric sliding window, at least
CAUSAL_BLOCK = 16  # the same for a causal one
pad = torch.nn.functional.pad


class Part(NamedTuple):
    """Some blocks of rows, and some rows of each."""

    blocks: slice
    rows: slice


@dataclass(frozen=True)
class Near:
    """Which keys a row sees exactly: `window` keys of a `kind`, 0 for none, and the first `sinks` ones."""

    is_causal: bool
    window: int = 0
    kind: str = "block"
    sinks: int = 0

    @property
    def exact(self) -> bool:
        return self.window > 0 or self.sinks > 0

    @property
    def in_blocks(self) -> bool:
        """Whether zones are exact as a whole."""
        return self.window > 0 and self.kind == "block"

    @property
    def setting(self) -> tuple[int, int, str]:
        return self.window, self.sinks, self.kind

    def held_from(self, seen: int) -> int:
        """The place of the first key that the next row sees exactly, after `seen` keys."""
        w = self.window
        if not w:
            return seen
        return max(0, (seen // w - 1) * w if self.kind == "block" else seen - w)

    def held_places(self, start: Tensor, seen: int) -> Tensor:
        """The same for sequences whose blocks begin at the places `start` (b,).

        Of a sequence that has not begun: the first place that it may see so, wherever it will begin.
        """
        w = self.window
        begun = ((seen - start) // w - 1) * w + start
        return torch.where(start < seen, begun, seen - 2 * w + 1).clamp_min(0)

    def most_held(self) -> int:
        """The most keys that a row sees exactly before its own."""
        return 2 * self.window - 1 if self.in_blocks else self.window


@dataclass(frozen=True)
class Layout:
    """`blocks` blocks of `block` rows and the keys around them.

    Row 0 is row `lead` of the first block; row 0 has seen `seen` keys, the last `held` of which are given in front of
    its own. Keys are laid out from `before` blocks before the first block of rows to `after` blocks behind the last. A
    call that fits into one block (`single`) is laid out as it is: its zone is whatever keys there are.
    """

    near: Near
    rows: int
    keys: int
    seen: int
    held: int
    block: int
    blocks: int
    lead: int
    before: int
    after: int
    single: bool

    @classmethod
    def of(cls, near: Near, n: int, seen: int, held: int, keys: int) -> Layout:
        """For n rows after `seen` keys; `keys` are given, of which the first `held` are the last of those."""
        w = near.window
        c = w if near.in_blocks else max(w, CAUSAL_BLOCK if near.is_causal else SLIDING_BLOCK) if w else CHUNK
        lead = seen % w if near.in_blocks else 0
        if not keys or (not torch.compiler.is_compiling() and lead + n <= c):
            return cls(near, n, keys, seen, held, n, 1, 0, 0, 0, True)
        sides = 1 if w else 0
        after = 0 if near.is_causal else sides
        return cls(near, n, keys, seen, held, c, (lead + n + c - 1) // c, lead, sides, after, False)

    @property
    def front(self) -> int:
        """The place of the first given key among the laid-out ones."""
        return 0 if self.single else self.before * self.block + self.lead - self.held

    @property
    def width(self) -> int:
        """Keys of a zone."""
        return self.keys if self.single else (1 + self.before + self.after) * self.block

    @property
    def gone(self) -> int:
        """How many whole blocks of laid-out keys have left every later zone: they enter the state after the rows."""
        if self.single:
            return 0
        if not self.near.window:
            return self.blocks
        return self._left() // self.block

    @property
    def leaving(self) -> slice:
        """Of the given keys, those that leave the window behind the last row and are in no whole block that does."""
        if self.single:
            return slice(0, self.near.held_from(self.seen + self.rows) - (self.seen - self.held))
        if not self.near.window:
            return slice(0, 0)
        return slice(max(0, self.gone * self.block - self.front), max(0, self._left() - self.front))

    def _left(self) -> int:
        """The first laid-out key that the next row sees exactly."""
        return self.near.held_from(self.seen + self.rows) - self.seen + self.held + self.front

    def parts(self, rows: int) -> list[Part]:
        """All rows, about so many at a time: whole blocks, or some rows of one block."""
        c = self.block
        if is_composed() or self.rows <= rows:
            return [Part(slice(0, self.blocks), slice(0, c))]
        if rows < c:
            cuts = [slice(i, min(i + rows, c)) for i in range(0, c, rows)]
            return [Part(slice(i, i + 1), rows) for i in range(self.blocks) for rows in cuts]
        size = -(-self.blocks // -(-self.blocks // (rows // c)))  # parts of one size
        return [Part(slice(i, min(i + size, self.blocks)), slice(0, c)) for i in range(0, self.blocks, size)]

    # Rows and keys, taken from tensors and put back.

    def take_rows(self, q: Tensor, part: Part) -> Tensor:
        """Rows (b, g, r, n, d) of a part, (b, g, t, r c, d), zeros where there is none."""
        blocks, rows = part
        if self.single:
            return q[:, :, :, rows].flatten(2, 3).unsqueeze(2)
        c = self.block
        found = cut(q, 3, blocks.start * c - self.lead, blocks.stop * c - self.lead).unflatten(3, (-1, c))[..., rows, :]
        return found.squeeze(2) if found.shape[2] == 1 else found.transpose(2, 3).flatten(3, 4)

    def put_rows(self, total: Tensor, part: Part, more: Tensor) -> None:
        """Add what belongs to the rows (b, g, t, r c, d) of a part to all, (b, g, r, n, d)."""
        blocks, rows = part
        more = by_head(more, total.shape[2])
        start = blocks.start * self.block + rows.start - self.lead
        first, last = max(0, start), min(self.rows, start + more.shape[3])
        if first < last:
            total[:, :, :, first:last] += more[:, :, :, first - start : last - start]

    def span(self, blocks: slice) -> slice:
        """The laid-out keys that some blocks of rows see."""
        if self.single:
            return slice(0, self.keys)
        return slice(blocks.start * self.block, (blocks.stop + self.before + self.after) * self.block)

    def take(self, x: Tensor, span: slice, dim: int = 2, value: float = 0.0, *, name: str | None = None) -> Tensor:
        """A span of the laid-out keys of x, `value` where there is none; with a name valid until the next."""
        return x if self.single else cut(x, dim, span.start - self.front, span.stop - self.front, value, name=name)

    def put(self, total: Tensor, span: slice, more: Tensor) -> None:
        """Add what belongs to a span of the laid-out keys to the given ones (b, g, s, d)."""
        start = span.start - (0 if self.single else self.front)
        first, last = max(0, start), min(total.shape[2], start + more.shape[2])
        if first < last:
            total[:, :, first:last] += more[:, :, first - start : last - start]

    def mask(self, holes: Tensor | None, span: slice, batch: int, device: torch.device) -> Tensor | None:
        """Which laid-out keys of a span are masked (b, span) or do not exist; None where all are there."""
        gaps = not self.single and (span.start < self.front or span.stop - self.front > self.keys)
        if holes is None:
            if not gaps and not torch.compiler.is_compiling():
                return None
            holes = torch.zeros(batch, self.keys, dtype=torch.bool, device=device)
        return self.take(holes.unsqueeze(-1), span, 1, 1.0).squeeze(-1)

    def zones(self, x: Tensor) -> Tensor:
        """A span of laid-out keys (b, g, keys, d) as the zones of its blocks of rows, (b, g, t, z, d): views."""
        if self.single:
            return x.unsqueeze(2)
        if self.width == self.block:
            return x.unflatten(2, (-1, self.block))
        return x.unfold(2, self.width, self.block).mT

    # Which keys of its zone a row sees, and how.

    def kernel_blocks(self, part: Part) -> slice:
        """Of the blocks of keys laid out around a part, those whose features are needed."""
        count = part.blocks.stop - part.blocks.start
        if self.near.is_causal and (self.near.in_blocks or self.is_triangle):
            return slice(0, count)
        stop = count + self.before + self.after
        if not self.near.in_blocks or torch.compiler.is_compiling():
            return slice(0, stop)
        # Not those in front of all keys and behind them.
        span = self.span(part.blocks)
        first, last = max(0, self.front - span.start), max(0, span.stop - self.front - self.keys)
        return slice(first // self.block, stop - last // self.block)

    def exact_mask(self, device: torch.device) -> Tensor | None:
        """Which keys of its zone a row sees exactly, (c, z); None for all."""
        near = self.near
        if near.in_blocks:
            return self._offsets(device) <= 0 if near.is_causal else None
        w, offset = near.window, self._offsets(device)
        return (offset > -w) & (offset <= 0) if near.is_causal else offset.abs() < w

    def kernel_mask(self, device: torch.device) -> Tensor | None:
        """Which keys of its zone a row sees by the kernel, (c, z); None for none."""
        near = self.near
        if not self.has_kernel_pairs:
            return None
        offset = self._offsets(device)
        return offset <= -near.window if near.is_causal else offset.abs() >= near.window

    @property
    def has_kernel_pairs(self) -> bool:
        """Whether the kernel sees some pairs of a zone."""
        return not self.near.in_blocks and self.width > 0

    @property
    def is_triangle(self) -> bool:
        """Whether `kernel_mask` is the lower triangle of the first block of the zone, and nothing else."""
        near = self.near
        if near.in_blocks or not near.is_causal:
            return False
        return self.held == 0 and not near.window if self.single else near.window in (0, self.block)

    def sees_sinks(self, sinks: Any, part: Part) -> Tensor:
        """Which sinks (b, s) the rows of a part see beside their zone, (b, t, c, s) or (1, t, 1, 1) for all alike."""
        w, c, (blocks, rows) = self.near.window, self.block, part
        if sinks.place is None and self.near.in_blocks and not self.single and sinks.k.shape[2] <= w:
            return (torch.arange(blocks.start, blocks.stop, device=sinks.k.device) > 1)[None, :, None, None]
        place, there = sinks.places()
        i = torch.arange(blocks.start * c, blocks.stop * c, device=place.device)[:, None] - self.lead
        j = place[:, None, :]
        if self.near.in_blocks:
            first = self.seen % w if self.single else self.lead
            apart = (i + first) // w - torch.div(j + first, w, rounding_mode="floor")
            far = apart > 1 if self.near.is_causal else apart.abs() > 1
        else:
            far = j <= i - w if self.near.is_causal else (i - j).abs() >= w
        return (far & there[:, None, :]).unflatten(1, (-1, c))[:, :, rows]

    def _offsets(self, device: torch.device) -> Tensor:
        """Place of a zone's key minus place of a block's row, (c, z)."""
        start = self.held if self.single else self.before * self.block
        i = torch.arange(self.block, device=device)[:, None]
        return torch.arange(self.width, device=device)[None, :] - start - i


def by_head(x: Tensor, r: int) -> Tensor:
    """Rows in the order of `take_rows` as heads: (b, g, t, r c, d) to (b, g, r, t c, d)."""
    if r == 1:
        return x.flatten(2, 3).unsqueeze(2)
    return x.unflatten(3, (r, -1)).transpose(2, 3).flatten(3, 4)


def cut(x: Tensor, dim: int, start: int, stop: int, value: float = 0.0, *, name: str | None = None) -> Tensor:
    """Places `start` to `stop` of a dimension of x, `value` where it has none; a view where it has all.

    With a name it may be written into memory that is used again, as a `product` is.
    """
    size = x.shape[dim]
    if torch.compiler.is_compiling():
        return pad(x, (0, 0) * (x.dim() - 1 - dim) + (-start, stop - size), value=value)  # negative: cut off
    first, last = min(max(start, 0), size), min(max(stop, 0), size)
    found = x.narrow(dim, first, last - first)
    if last - first == stop - start:
        return found
    front = min(max(-start, 0), stop - start)
    if name is not None and in_place(x):
        out = memory(name, (*x.shape[:dim], stop - start, *x.shape[dim + 1 :]), x.dtype)
        out.narrow(dim, 0, front).fill_(value)
        out.narrow(dim, front, last - first).copy_(found)
        out.narrow(dim, front + last - first, stop - start - front - (last - first)).fill_(value)
        return out
    return pad(found, (0, 0) * (x.dim() - 1 - dim) + (front, stop - start - front - (last - first)), value=value)


# Left padding. Blocks are counted from each sequence's first unpadded key: sequences that begin at different places are
# moved so that their blocks lie on each other, and their rows are moved back.


def starts(near: Near, mask: Tensor | None, known: Tensor | None, seen: int) -> Tensor | None:
    """The place of the first unpadded key of each sequence, (b,), or that behind the last where there is none yet.

    `known`: what is known from the keys before. None where blocks counted from the first place are the same.
    """
    if not near.in_blocks:
        return None
    if known is not None:
        return torch.where(known < seen, known, seen if mask is None else seen + leading(mask))
    if seen or mask is None:
        return None
    if may_look(mask) and not bool(mask[:, 0].any()):
        return None
    return leading(mask)


def leading(mask: Tensor) -> Tensor:
    """How many keys at the front of each sequence are padding, (b,)."""
    return mask.long().cumprod(1).sum(1)


def moved(x: Tensor, by: Tensor, length: int, dim: int = 2, value: float = 0.0) -> Tensor:
    """x with sequence i moved `by[i]` places on along a dimension, in `length` places, `value` where there is none."""
    index = torch.arange(length, device=x.device) - by[:, None]
    there = (index >= 0) & (index < x.shape[dim])
    shape = (x.shape[0], *[1] * (dim - 1), length, *[1] * (x.dim() - dim - 1))
    at = index.clamp(0, x.shape[dim] - 1).view(shape).expand(*x.shape[:dim], length, *x.shape[dim + 1 :])
    return x.gather(dim, at).masked_fill(~there.view(shape), value)
