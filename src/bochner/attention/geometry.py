"""Where the rows and keys of windowed attention lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bochner._products import is_composed, memory
from bochner.attention.call import Call

SLIDING_BLOCK = 64  # rows of a block of a symmetric sliding window, at least
CAUSAL_BLOCK = 16  # the same for a causal one
pad = torch.nn.functional.pad


@dataclass(frozen=True)
class Geometry:
    """`blocks` blocks of `block` rows, the first at place `origin` of the sequence.

    Row 0 of the call is row `lead` of the first block. Keys are laid out from `before` blocks before the first block of
    rows to `after` blocks behind the last; a block's zone is those `before` it, itself and those `after` it. The first
    key given goes to place `front` of the layout. A call that fits into one block (`single`) is laid out as it is: its
    zone is whatever keys there are, of which `held` come before the first row.
    """

    call: Call
    blocks: int
    block: int
    origin: int
    lead: int
    rows: int
    held: int
    keys: int
    before: int
    after: int
    single: bool

    @classmethod
    def of(cls, call: Call, n: int, seen: int, held: int, keys: int) -> Geometry:
        """For n rows after `seen` keys; `keys` are given, of which the first `held` are the last of those."""
        w, aligned = call.window, call.window > 0 and call.window_kind == "block"
        c = w if aligned else max(w, CAUSAL_BLOCK if call.is_causal else SLIDING_BLOCK)
        lead = seen % w if aligned else 0
        if not keys or (not torch.compiler.is_compiling() and lead + n <= c):
            return cls(call, 1, n, seen, 0, n, held, keys, 0, 0, True)
        near = 1 if w else 0
        t = (lead + n + c - 1) // c
        return cls(call, t, c, seen - lead, lead, n, held - lead, keys, near, 0 if call.is_causal else near, False)

    @property
    def aligned(self) -> bool:
        """Whether zones are whole blocks: nothing in them is left to the kernel."""
        return self.call.window > 0 and self.call.window_kind == "block"

    @property
    def is_stairs(self) -> bool:
        """Whether the kernel sees of a zone the block before the rows, row i its places up to i."""
        return not (self.single or self.aligned) and self.call.is_causal and self.block == self.call.window

    @property
    def front(self) -> int:
        return 0 if self.single else self.before * self.block - self.held

    @property
    def width(self) -> int:
        """Keys of a zone."""
        return self.keys if self.single else (1 + self.before + self.after) * self.block

    @property
    def absorbed(self) -> int:
        """How many of the given keys lie before the zone of the last block."""
        return 0 if self.single else max(0, (self.blocks - 1) * self.block - self.front)

    def take_rows(self, q: Tensor, blocks: slice) -> Tensor:
        """Rows (b, g, r, n, d) of some blocks, (b, g, r, t, c, d), zeros where there is none."""
        if self.single:
            return q.unsqueeze(3)
        c = self.block
        return cut(q, 3, blocks.start * c - self.lead, blocks.stop * c - self.lead).unflatten(3, (-1, c))

    def all_rows(self, q: Tensor) -> Tensor:
        """Rows (b, g, r, n, d) as whole blocks, (b, g, r, t c, d)."""
        return self.take_rows(q, slice(0, self.blocks)).flatten(3, 4)

    def put_rows(self, total: Tensor, blocks: slice, more: Tensor) -> None:
        """Add what belongs to the rows (b, g, r, t c, d) of some blocks to all, (b, g, r, n, d)."""
        start = blocks.start * self.block - self.lead
        first, last = max(0, start), min(self.rows, start + more.shape[3])
        total[:, :, :, first:last] += more[:, :, :, first - start : last - start]

    def take(self, k: Tensor, span: slice, *, name: str | None = None) -> Tensor:
        """Keys (b, g, s, d) of a span of the layout, zeros where there is none; with a name valid until the next."""
        return k if self.single else cut(k, 2, span.start - self.front, span.stop - self.front, name=name)

    def take_mask(self, hole: Tensor, span: slice) -> Tensor:
        """The same for a mask (b, s), True where there is none."""
        if self.single:
            return hole
        return cut(hole.unsqueeze(-1), 1, span.start - self.front, span.stop - self.front, 1.0).squeeze(-1)

    def put(self, total: Tensor, span: slice, more: Tensor) -> None:
        """Add what belongs to a span of the layout to the keys (b, g, s, d)."""
        start, stop = (0, self.keys) if self.single else (span.start - self.front, span.stop - self.front)
        first, last = max(0, start), min(total.shape[2], stop)
        if first < last:
            total[:, :, first:last] += more[:, :, first - start : last - start]

    @property
    def everything(self) -> slice:
        """The span of all laid-out keys."""
        return self.span(slice(0, self.blocks))

    def has_gaps(self, span: slice) -> bool:
        """Whether some places of a span have no key."""
        return not self.single and (span.start < self.front or span.stop - self.front > self.keys)

    def span(self, blocks: slice) -> slice:
        """The laid-out keys that some blocks of rows see."""
        if self.single:
            return slice(0, self.width)
        return slice(blocks.start * self.block, (blocks.stop + self.before + self.after) * self.block)

    def zones(self, x: Tensor) -> Tensor:
        """A span of laid-out keys (b, g, keys, d) as the zones of its blocks of rows, (b, g, t, z, d): views."""
        return x.unsqueeze(2) if self.single else x.unfold(2, self.width, self.block).mT

    def zones_adjoint(self, zones: Tensor) -> Tensor:
        """The gradient of the span from that of its zones."""
        if self.single:
            return zones.squeeze(2)
        b, g, t, _, d = zones.shape
        total = zones.new_zeros(b, g, t + self.before + self.after, self.block, d)
        for i, piece in enumerate(zones.split(self.block, dim=3)):
            total[:, :, i : i + t] += piece
        return total.flatten(2, 3)

    def offsets(self, device: torch.device) -> Tensor:
        """Place of a zone's key minus place of a block's row, (c, z)."""
        start = self.held if self.single else self.before * self.block
        i = torch.arange(self.block, device=device)[:, None]
        return torch.arange(self.width, device=device)[None, :] - start - i

    def exact(self, device: torch.device) -> Tensor | None:
        """Which keys of its zone a row sees exactly, (c, z), None for all."""
        if self.aligned and not self.call.is_causal:
            return None
        w, offset = self.call.window, self.offsets(device)
        if self.aligned:
            return offset <= 0
        return (offset > -w) & (offset <= 0) if self.call.is_causal else offset.abs() < w

    def by_kernel(self, device: torch.device) -> Tensor | None:
        """Which keys of its zone a row sees by the kernel, (c, z), None for none."""
        if self.aligned:
            return None
        w, offset = self.call.window, self.offsets(device)
        return offset <= -w if self.call.is_causal else offset.abs() >= w

    def sees_sinks(self, position: Tensor, blocks: slice) -> Tensor:
        """Which sinks (b, s) the rows of some blocks see beside their zone, (b, t, c, s)."""
        start = self.origin + blocks.start * self.block
        i = start + torch.arange((blocks.stop - blocks.start) * self.block, device=position.device)[:, None]
        j, w = position[:, None, :], self.call.window
        if self.aligned:
            apart = i // w - torch.div(j, w, rounding_mode="floor")
            far = apart > 1 if self.call.is_causal else apart.abs() > 1
        else:
            far = j <= i - w if self.call.is_causal else (i - j).abs() >= w
        return (far & (j >= 0)).unflatten(1, (-1, self.block))


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
    if name is not None and x.device.type == "cpu" and not (torch.is_grad_enabled() or is_composed()):
        out = memory(name, (*x.shape[:dim], stop - start, *x.shape[dim + 1 :]), x.dtype)
        out.narrow(dim, 0, front).fill_(value)
        out.narrow(dim, front, last - first).copy_(found)
        out.narrow(dim, front + last - first, stop - start - front - (last - first)).fill_(value)
        return out
    return pad(found, (0, 0) * (x.dim() - 1 - dim) + (front, stop - start - front - (last - first)), value=value)
