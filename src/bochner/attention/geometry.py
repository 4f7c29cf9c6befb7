"""Where the rows and keys of windowed attention lie, and sums over all blocks outside a zone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bochner.attention.call import Call
from bochner.attention.numerics import is_composed

FEW = 128  # blocks whose sums are one product: quadratic, but without a loop
SLIDING_BLOCK = 64  # rows of a block of a sliding window, at least
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
        w = call.window
        aligned = w > 0 and call.window_kind == "block"
        c = w if aligned else max(w, SLIDING_BLOCK)
        lead = seen % w if aligned else 0
        if not keys or (not torch.compiler.is_compiling() and lead + n <= c):
            return cls(call, 1, n, seen, 0, n, held, keys, 0, 0, True)
        near = 1 if w else 0
        t = (lead + n + c - 1) // c
        return cls(call, t, c, seen - lead, lead, n, held - lead, keys, near, 0 if call.is_causal else near, False)

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

    def place_rows(self, q: Tensor) -> Tensor:
        """Rows (b, g, r, n, d) as whole blocks."""
        if self.single or self.blocks * self.block == self.rows:
            return q
        return pad(q, (0, 0, self.lead, self.blocks * self.block - self.lead - self.rows))

    def take_rows(self, x: Tensor) -> Tensor:
        """The inverse, as (b, g, r n, .)."""
        return x[..., self.lead : self.lead + self.rows, :].flatten(2, 3)

    def place_keys(self, k: Tensor) -> Tensor:
        """Keys (b, g, s, d) laid out, zeros where there is none."""
        return k if self.single else pad(k, (0, 0, *self._margins(k.shape[-2])))

    def place_holes(self, hole: Tensor) -> Tensor:
        """The same for a mask (b, s), True where there is none."""
        return hole if self.single else pad(hole, self._margins(hole.shape[-1]), value=True)

    def _margins(self, s: int) -> tuple[int, int]:
        total = (self.blocks + self.before + self.after) * self.block
        return self.front, total - self.front - s

    def span(self, blocks: slice) -> slice:
        """The laid-out keys that some blocks of rows see."""
        if self.single:
            return slice(0, self.width)
        return slice(blocks.start * self.block, (blocks.stop + self.before + self.after) * self.block)

    def zones(self, x: Tensor, first: Tensor | None = None) -> Tensor:
        """A span of laid-out keys (b, g, keys, d) as the zones of its blocks of rows, (b, g, t, z, d).

        `first` (b, g, s, d): keys that every zone begins with.
        """
        if self.single:
            parts = [x.unsqueeze(2)]
        else:
            x = x.unflatten(2, (-1, self.block))
            t = x.shape[2] - self.before - self.after
            parts = [x[:, :, i : i + t] for i in range(1 + self.before + self.after)]
        if first is not None and first.shape[2]:
            parts.insert(0, first.unsqueeze(2).expand(-1, -1, parts[0].shape[2], -1, -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)

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
        w, offset = self.call.window, self.offsets(device)
        if self.call.window_kind == "block" and w:
            return offset <= 0 if self.call.is_causal else None
        return (offset > -w) & (offset <= 0) if self.call.is_causal else offset.abs() < w

    def by_kernel(self, device: torch.device) -> Tensor | None:
        """Which keys of its zone a row sees by the kernel, (c, z), None for none."""
        w, offset = self.call.window, self.offsets(device)
        if self.call.window_kind == "block" and w:
            return None
        return offset <= -w if self.call.is_causal else offset.abs() >= w

    def sees_sinks(self, position: Tensor, blocks: slice) -> Tensor:
        """Which sinks (b, s) the rows of some blocks see beside their zone, (b, t, c, s)."""
        start = self.origin + blocks.start * self.block
        i = start + torch.arange((blocks.stop - blocks.start) * self.block, device=position.device)[:, None]
        j, w = position[:, None, :], self.call.window
        if self.call.window_kind == "block" and w:
            apart = i // w - torch.div(j, w, rounding_mode="floor")
            far = apart > 1 if self.call.is_causal else apart.abs() > 1
        else:
            far = j <= i - w if self.call.is_causal else (i - j).abs() >= w
        return (far & (j >= 0)).unflatten(1, (-1, self.block))


def around(sums: Tensor, weight: Tensor, width: int) -> Tensor:
    """For each zone of `width` blocks the weighted sum of all others: (b, g, t + width - 1, m, v) to (b, g, t, m, v).

    Sums from either side; nothing is subtracted.
    """
    t, count = sums.shape[2] - width + 1, sums.shape[2]
    if not torch.compiler.is_compiling() and t <= FEW:
        row, block = torch.arange(t, device=sums.device)[:, None], torch.arange(count, device=sums.device)[None, :]
        outside = ((block < row) | (block >= row + width)).to(sums.dtype)
        return ((weight.unsqueeze(-2) * outside) @ sums.flatten(3)).unflatten(-1, sums.shape[3:])
    weight = weight[..., None, None]
    if torch.is_grad_enabled() or is_composed():
        weighted = sums * weight
        before = pad(weighted[:, :, : t - 1].cumsum(2), (0, 0, 0, 0, 1, 0))
        behind = pad(weighted[:, :, width:].flip(2).cumsum(2).flip(2), (0, 0, 0, 0, 0, 1))
        return before + behind
    # Blocks in front: each step then works on contiguous memory.
    sums, weight = sums.transpose(0, 2).contiguous(), weight.transpose(0, 2).contiguous()
    out = torch.empty_like(sums[:t])
    out[0] = 0
    for i in range(t - 1):
        torch.addcmul(out[i], sums[i], weight[i], out=out[i + 1])
    behind = torch.zeros_like(out[0])
    for i in reversed(range(t - 1)):
        behind.addcmul_(sums[i + width], weight[i + width])
        out[i] += behind
    return out.transpose(0, 2)


def around_adjoint(grads: Tensor, weight: Tensor, width: int) -> Tensor:
    """The gradients of the sums, from those of what lies around each zone."""
    t = grads.shape[2]
    out = torch.zeros(*grads.shape[:2], t + width - 1, *grads.shape[3:], dtype=grads.dtype, device=grads.device)
    after, before = torch.zeros_like(grads[:, :, 0]), torch.zeros_like(grads[:, :, 0])
    for i in reversed(range(t - 1)):  # block i is before the zones of rows i + 1 and later
        after += grads[:, :, i + 1]
        out[:, :, i] = after
    for i in range(t - 1):  # block i + width is behind the zones of rows up to i
        before += grads[:, :, i]
        out[:, :, i + width] += before
    return out.mul_(weight[..., None, None])
