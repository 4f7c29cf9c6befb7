"""Where rows and keys lie: blocks, the zone of keys that a block of rows sees pair by pair, left padding.

Rows come in blocks of c. A block of rows sees the keys of its *zone* pair by pair, and all blocks of keys outside it by
their sums, so that no kernel product is ever masked. Without a window the zone is the block itself, and its pairs are
the kernel's. With one the zone is the block and its neighbours (causal: the one before): all exact for windows of kind
`"block"`, exact in a band and the kernel's elsewhere for kind `"sliding"`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bochner._products import may_look
from bochner.attention.features import MASKED

CHUNK = 64  # rows of a block without a window
SLIDING_BLOCK = 64  # rows of a block of a symmetric sliding window, at least
CAUSAL_BLOCK = 16  # the same for a causal one
pad = torch.nn.functional.pad


class Near:
    """Which keys a row sees exactly: `window` keys of a `kind`, 0 for none, and the first `sinks` ones."""

    def __init__(self, is_causal: bool, window: int = 0, kind: str = "block", sinks: int = 0) -> None:
        self.is_causal, self.window, self.kind, self.sinks = is_causal, window, kind, sinks
        self.setting = window, sinks, kind
        self.exact = window > 0 or sinks > 0
        self.in_blocks = window > 0 and kind == "block"  # whether zones are exact as a whole
        self.most_held = 2 * window - 1 if self.in_blocks else window  # keys that a row sees exactly before its own

    def held_from(self, seen: int) -> int:
        """The place of the first key that the next row sees exactly, after `seen` keys."""
        w = self.window
        if not w:
            return seen
        return max(0, (seen // w - 1) * w if self.in_blocks else seen - w)

    def held_places(self, start: Tensor, seen: int) -> Tensor:
        """The same for sequences whose blocks begin at the places `start` (b,), wherever those not begun will begin."""
        w = self.window
        begun = ((seen - start) // w - 1) * w + start
        return torch.where(start < seen, begun, seen - 2 * w + 1).clamp_min(0)


class Part(NamedTuple):
    """Some blocks of rows, and some rows of each; the laid-out keys that they see, and of the blocks of those the ones
    whose features are needed."""

    blocks: slice
    rows: slice
    span: slice
    kernel: slice
    number: int
    is_last: bool


class Layout:
    """Blocks of `block` rows and the keys around them.

    Row 0 is row `lead` of the first block; row 0 has seen `seen` keys, the last `held` of which are given in front of
    its own. Keys are laid out from the first zone to the last. A call that fits into one block (`single`) is laid out
    as it is: its zone is whatever keys there are.
    """

    def __init__(
        self, near: Near, rows: int, keys: int, seen: int, held: int, block: int, lead: int, *, single: bool = False
    ) -> None:
        self.near, self.rows, self.keys, self.seen = near, rows, keys, seen
        self.block, self.lead, self.single = block, lead, single
        self.blocks = 1 if single else (lead + rows + block - 1) // block
        before = 0 if single or not near.window else 1
        self.neighbours = before if near.is_causal else 2 * before  # blocks of a zone beside its own
        self.offset = held if single else before * block  # the place in its zone of a block's first row
        self.front = self.offset + lead - held  # the place of the first given key
        self.width = keys if single else (1 + self.neighbours) * block  # keys of a zone
        self.has_kernel_pairs = not near.in_blocks and self.width > 0  # whether the kernel sees some pairs of a zone
        # Whether those are the lower triangle of the first block of the zone, and nothing else.
        whole = held == 0 and not near.window if single else near.window in (0, block)
        self.is_triangle = self.has_kernel_pairs and near.is_causal and whole
        # What enters the state with the rows: so many whole blocks of keys that have left every later zone, and so many
        # of the given keys with them.
        left = near.held_from(seen + rows) - seen + held + self.front
        self.gone = 0 if single else left // block if near.window else self.blocks
        self.done = max(0, self.gone * block - self.front) if single or near.window else keys

    @classmethod
    def of(cls, near: Near, n: int, seen: int, held: int, keys: int) -> Layout:
        """For n rows after `seen` keys; `keys` are given, of which the first `held` are the last of those."""
        w = near.window
        c = w if near.in_blocks else max(w, CAUSAL_BLOCK if near.is_causal else SLIDING_BLOCK) if w else CHUNK
        lead = seen % w if near.in_blocks else 0
        if not keys or (not torch.compiler.is_compiling() and lead + n <= c):
            return cls(near, n, keys, seen, held, n, 0, single=True)
        return cls(near, n, keys, seen, held, c, lead)

    def parts(self, rows: int | None) -> list[Part]:
        """All rows, about so many at a time: whole blocks, or some rows of one block; None for all at once."""
        c, t = self.block, self.blocks
        if rows is None or self.rows <= rows:
            return [self._part(slice(0, t), slice(0, c), 0, True)]
        if rows < c:
            cuts = [slice(i, min(i + rows, c)) for i in range(0, c, rows)]
            found = [(slice(i, i + 1), rows) for i in range(t) for rows in cuts]
        else:
            size = -(-t // -(-t // (rows // c)))  # parts of one size
            found = [(slice(i, min(i + size, t)), slice(0, c)) for i in range(0, t, size)]
        return [self._part(*both, i, i + 1 == len(found)) for i, both in enumerate(found)]

    def _part(self, blocks: slice, rows: slice, index: int, is_last: bool) -> Part:
        count, c = blocks.stop - blocks.start, self.block
        span, kernel = slice(blocks.start * c, blocks.stop * c + self.width - c), slice(0, count + self.neighbours)
        if self.near.is_causal and (self.near.in_blocks or self.is_triangle):
            kernel = slice(0, count)
        elif self.near.in_blocks and not torch.compiler.is_compiling():  # not those in front of all keys and behind
            first, last = max(0, self.front - span.start), max(0, span.stop - self.front - self.keys)
            kernel = slice(first // c, kernel.stop - last // c)
        return Part(blocks, rows, span, kernel, index, is_last)

    # Rows and keys, taken from tensors and put back.

    def take_rows(self, q: Tensor, part: Part) -> Tensor:
        """Rows (b, g, r, n, d) of a part, (b, g, t, r c, d), zeros where there is none."""
        c, blocks = self.block, part.blocks
        found = cut(q, 3, blocks.start * c - self.lead, blocks.stop * c - self.lead).unflatten(3, (-1, c))
        return found[..., part.rows, :].transpose(2, 3).flatten(3, 4)

    def put_rows(self, total: Tensor, part: Part, more: Tensor) -> None:
        """Add what belongs to the rows (b, g, t, r c, d) of a part to all, (b, g, r, n, d)."""
        _add_at(total, 3, part.blocks.start * self.block + part.rows.start - self.lead, by_head(more, total.shape[2]))

    def take(self, x: Tensor, part: Part) -> Tensor:
        """The laid-out keys of a part of x (b, g, s, d), zeros where there is none."""
        return cut(x, 2, part.span.start - self.front, part.span.stop - self.front)

    def put(self, total: Tensor, part: Part, more: Tensor) -> None:
        """Add what belongs to the laid-out keys of a part to the given ones (b, g, s, d)."""
        _add_at(total, 2, part.span.start - self.front, more)

    def bias(self, holes: Tensor | None, span: slice, like: Tensor) -> Tensor | None:
        """What is added to the logits of the laid-out keys of a span, (b, 1, span, 1), so that those of the mask
        (b, s) and those that do not exist count for nothing; None where all are there."""
        first, last = span.start - self.front, span.stop - self.front
        if holes is None and first >= 0 and last <= self.keys and not torch.compiler.is_compiling():
            return None
        found = like.new_zeros((1, self.keys) if holes is None else holes.shape)
        found = found if holes is None else found.masked_fill(holes, MASKED)
        return cut(found[:, None, :, None], 2, first, last, MASKED)

    def zones(self, x: Tensor) -> Tensor:
        """The laid-out keys of a part (b, g, keys, d) as the zones of its blocks of rows, (b, g, t, z, d): views."""
        if self.width == self.block:
            return x.unflatten(2, (-1, self.block))
        return x.unfold(2, self.width, self.block).mT

    def own(self, x: Tensor, part: Part) -> Tensor:
        """Of the laid-out keys (b, g, keys, d) of a part those at the places of its blocks of rows, (b, g, t, c, d)."""
        end = self.offset + (part.blocks.stop - part.blocks.start) * self.block
        return x[:, :, self.offset : end].unflatten(2, (-1, self.block))

    # Which keys of its zone a row sees, and how.

    def exact_mask(self, part: Part, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """What is added to the exact logits of the rows of a part, (1, 1, 1, c, z): 0 for the keys of its zone that a
        row sees exactly; None for all."""
        near, w = self.near, self.near.window
        if near.in_blocks and not near.is_causal:
            return None
        offset = self._offsets(part, device)
        hidden = offset > 0 if near.is_causal else offset.abs() >= w
        if near.is_causal and not near.in_blocks:
            hidden |= offset <= -w
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill(hidden, MASKED)[None, None, None]

    def kernel_mask(self, part: Part, device: torch.device) -> Tensor:
        """Which keys of its zone a row does not see by the kernel, (c, z)."""
        w, offset = self.near.window, self._offsets(part, device)
        return offset > -w if self.near.is_causal else offset.abs() < w

    def sees_sinks(self, place: Tensor, there: Tensor, part: Part) -> Tensor:
        """Which of the sinks (b, s) at these places, as far as they are there, the rows of a part see beside their
        zone, (b, t, c, s)."""
        w, c, blocks = self.near.window, self.block, part.blocks
        i = torch.arange(blocks.start * c, blocks.stop * c, device=place.device)[:, None] - self.lead
        j = place[:, None, :]
        if self.near.in_blocks:
            i, j = ((x + self.seen % w).div(w, rounding_mode="floor") for x in (i, j))
            w = 2
        far = j <= i - w if self.near.is_causal else (i - j).abs() >= w
        return (far & there[:, None, :]).unflatten(1, (-1, c))[:, :, part.rows]

    def _offsets(self, part: Part, device: torch.device) -> Tensor:
        """Place of a zone's key minus place of a block's row, (c, z)."""
        rows = torch.arange(self.block, device=device)[part.rows, None]
        return torch.arange(self.width, device=device) - self.offset - rows


def by_head(x: Tensor, r: int) -> Tensor:
    """Rows in the order of `take_rows` as heads: (b, g, t, r c, d) to (b, g, r, t c, d)."""
    return x.unflatten(3, (r, -1)).transpose(2, 3).flatten(3, 4)


def cut(x: Tensor, dim: int, start: int, stop: int, value: float = 0.0) -> Tensor:
    """Places `start` to `stop` of a dimension of x, `value` where it has none; a view where it has all."""
    size, behind = x.shape[dim], (0, 0) * (x.dim() - 1 - dim)
    if torch.compiler.is_compiling():
        return pad(x, (*behind, -start, stop - size), value=value)  # negative: cut off
    first, last = min(max(start, 0), size), min(max(stop, 0), size)
    found = x.narrow(dim, first, last - first)
    if last - first == stop - start:
        return found
    front = min(max(-start, 0), stop - start)
    return pad(found, (*behind, front, stop - start - front - (last - first)), value=value)


def _add_at(total: Tensor, dim: int, start: int, more: Tensor) -> None:
    """Add to the places of a dimension from `start` on; what lies outside is dropped."""
    first, last = max(0, start), min(total.shape[dim], start + more.shape[dim])
    if first < last:
        total.narrow(dim, first, last - first).add_(more.narrow(dim, first - start, last - first))


# Left padding. Blocks are counted from each sequence's first unpadded key: sequences that begin at different places are
# moved so that their blocks lie on each other, and their rows are moved back.


def starts(near: Near, mask: Tensor | None, known: Tensor | None, seen: int) -> Tensor | None:
    """The place of each sequence's first unpadded key, (b,), or that behind the last; `known` from the keys before.
    None where blocks counted from the first place are the same."""
    if not near.in_blocks:
        return None
    if known is not None:
        return torch.where(known < seen, known, seen if mask is None else seen + leading(mask))
    if seen or mask is None or (may_look(mask) and not bool(mask[:, 0].any())):
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
