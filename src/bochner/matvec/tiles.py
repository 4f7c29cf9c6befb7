"""Kernel tiles, their rounding, and the exact product.

Points are moved and scaled once, so that one bandwidth has the length the profile wants. Two more columns then make
one matrix product yield the whole argument of the kernel:

    [z, -|z|^2/2, 1] . [w, 1, -|w|^2/2] = -|z - w|^2 / 2

The profile in place and a product with x finish a tile. The argument is clamped from below, where single precision
would become denormal, and from above at 0, where rounding could make a kernel larger than 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .._progress import track
from .profiles import Profile

ROWS, COLUMNS, SQUARE = 384, 768, 512  # tiles of about 1 MB in float32 stay in the second-level cache
BLOCK = 8192  # points moved at once
FEW_COLUMNS = 8  # of x
PRECISE = 1e-9  # relative error of an entry in double precision, at most


class Frame(NamedTuple):
    """A profile, where the origin is, the units per axis (d,), and the arithmetic: `z = (point - centre) * scale`.

    Arithmetic: "float32" and "float64" by matrix products; "difference", coordinate by coordinate in float64, for
    clouds so wide that the matrix product cancels: there points stay where they are and differences are scaled.
    """

    profile: Profile
    centre: Tensor
    scale: Tensor
    arithmetic: str

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.arithmetic == "float32" else torch.float64

    def place(self, points: Tensor) -> Tensor:
        """The points in this frame, (n, d); differences are taken in float64 before rounding."""
        if self.arithmetic == "difference":
            return points.double()
        placed = torch.empty(points.shape, dtype=self.dtype)
        for source, target in zip(points.split(BLOCK), placed.split(BLOCK), strict=True):
            target.copy_((source.double() - self.centre) * self.scale)
        return placed


def make_frame(profile: Profile, keys: Tensor, bandwidth: float | Tensor, arithmetic: str) -> Frame:
    """The frame centred on the keys."""
    scale = profile.unit / torch.as_tensor(bandwidth, dtype=torch.float64)
    return Frame(profile, keys.mean(0, dtype=torch.float64), scale.expand(keys.shape[1]), arithmetic)


def precise_frame(frame: Frame, reach: float, tolerance: float = PRECISE) -> Frame:
    """In double precision, or by differences where that loses over `tolerance` of an entry; |z| + |w| <= reach."""
    frame = frame._replace(arithmetic="float64")
    lost = frame.profile.change(argument_error(reach, len(frame.centre), frame)) if math.isfinite(reach) else math.inf
    return frame if lost <= tolerance else frame._replace(arithmetic="difference")


def norms(z: Tensor) -> Tensor:
    return torch.linalg.vector_norm(z, dim=1)


def extent(frame: Frame, points: Tensor) -> float:
    """The largest distance of the points from the frame's centre, in its units; inf if that overflows."""
    return max(float(norms((part.double() - frame.centre) * frame.scale).max()) for part in points.split(BLOCK))


def argument_error(reach: float, d: int, frame: Frame) -> float:
    """Bound on the rounding of `-|z - w|^2/2` by `Tiles`, for placed points with |z| + |w| <= reach.

    d + 2 products and sums of numbers whose absolute values sum to at most reach^2/2, after coordinates and squared
    lengths that were rounded once: (d + 12) roundings of reach^2/2.
    """
    return (d + 12) * torch.finfo(frame.dtype).eps / 2 * 0.5 * reach * reach


def differences_error(d: int) -> float:
    """Bound on the rounding of an entry, absolute, by coordinate differences in double precision.

    t = -|z - w|^2/2 is off by (d + 8) roundings of itself, and |t K'(t)| <= 1/2 for every profile.
    """
    return (d + 8) * torch.finfo(torch.float64).eps


def summation_error(terms: int, dtype: torch.dtype, wide: bool = False) -> float:
    """Bound on the relative rounding of x, of a profile and of sums of `terms` non-negative products, tile by tile."""
    double = torch.finfo(torch.float64).eps / 2
    unit, inside = torch.finfo(dtype).eps / 2, min(terms, COLUMNS)
    return unit * 8 + (double if wide else unit) * inside + double * math.ceil(terms / COLUMNS)


def _half_square(z: Tensor) -> Tensor:
    """-|z|^2/2 as a column, rounded once: sums of many squares in single precision would lose more."""
    return z.square().sum(1, keepdim=True, dtype=torch.float64).mul_(-0.5).to(z.dtype)


def left(z: Tensor) -> Tensor:
    """Rows of queries with the two extra columns: [z, -|z|^2/2, 1]."""
    h = _half_square(z)
    return torch.cat([z, h, torch.ones_like(h)], 1)


def right(w: Tensor) -> Tensor:
    """Rows of keys with the two extra columns: [w, 1, -|w|^2/2]."""
    h = _half_square(w)
    return torch.cat([w, torch.ones_like(h), h], 1)


def swapped(w: Tensor) -> Tensor:
    """`left` rows from `right` rows and back: the last two columns change places."""
    d = w.shape[1] - 2
    return torch.cat([w[:, :d], w[:, d + 1 :], w[:, d : d + 1]], 1)


class Tiles:
    """Evaluates kernel tiles into one reused buffer."""

    def __init__(self, frame: Frame) -> None:
        self.frame, self.profile = frame, frame.profile
        self.floor = frame.profile.floor(frame.dtype)
        self.buffer = torch.empty(0, dtype=frame.dtype)

    def arguments(self, z: Tensor, w: Tensor) -> Tensor:
        """-|z - w|^2/2 between augmented rows `z` (`left`) and `w` (`right`); overwritten by the next call."""
        n, s = z.shape[0], w.shape[0]
        if self.buffer.numel() < n * s:
            self.buffer = torch.empty(n * s, dtype=z.dtype)
        tile = self.buffer[: n * s].view(n, s)
        if self.frame.arithmetic == "difference":
            tile.zero_()
            for a, b, scale in zip(z.T[:-2], w.T[:-2], self.frame.scale.tolist(), strict=True):
                difference = torch.sub(a[:, None], b).mul_(scale)
                tile.addcmul_(difference, difference, value=-0.5)
            return tile.clamp_min_(self.floor)
        torch.mm(z, w.T, out=tile)
        return tile.clamp_(self.floor, 0.0)

    def __call__(self, z: Tensor, w: Tensor) -> Tensor:
        """K between augmented rows; overwritten by the next call."""
        return self.profile.value(self.arguments(z, w))


def times(tile: Tensor, x: Tensor) -> Tensor:
    """`tile @ x`; a few columns one by one, which is up to three times faster."""
    if x.shape[1] <= FEW_COLUMNS:
        return torch.stack([tile.mv(column) for column in x.T.contiguous()], 1)
    return tile @ x


Sums = tuple[Tensor, Tensor]  # float64: of the entries of each row (n,) and of each column (s,)
Part = slice | Tensor  # rows, by their place or by their numbers
Block = tuple[Part, Part, int]  # rows, columns, and how many of the first columns are these rows themselves


def all_blocks(n: int, s: int, symmetric: bool, progress: bool = False) -> Iterator[Block]:
    """Blocks of every pair; of a symmetric matrix those on and above the diagonal."""
    high, wide = (SQUARE, SQUARE) if symmetric else (ROWS, COLUMNS)
    starts = range(0, n, high)
    for i in track(starts, len(starts), "exact product", progress):
        rows = slice(i, i + high)
        for j in range(i if symmetric else 0, s, wide):
            yield (rows, rows, wide) if symmetric and i == j else (rows, slice(j, j + wide), 0)


def block_product(
    tiles: Tiles,
    z: Tensor,
    w: Tensor,
    x: Tensor,
    blocks: Iterable[Block],
    symmetric: bool = False,
    sums: Sums | None = None,
) -> Tensor:
    """`K x` over these blocks, in float64, for augmented queries `z` (n, d+2), keys `w` (s, d+2) and `x` (s, r).

    `symmetric`: queries are keys, and a block serves its mirror image too, its own rows left out. The sums of the rows
    and columns of K are added to `sums`, of a symmetric matrix to the first of them.
    """
    y = torch.zeros(z.shape[0], x.shape[1], dtype=torch.float64)  # long sums of one sign would drown in float32
    for rows, columns, own in blocks:
        tile = tiles(_take(z, rows), _take(w, columns))
        if rows is columns:
            tile.fill_diagonal_(1.0)
        mirror = own < tile.shape[1] if symmetric else sums is not None
        others = columns if isinstance(columns, slice) else columns[own:]
        if sums is not None:
            sums[0][rows] += tile.sum(1)
            if mirror:
                sums[0 if symmetric else 1][others] += tile[:, own:].sum(0)
        tile = tile.to(x.dtype)
        y[rows] += times(tile, _take(x, columns))
        if symmetric and mirror:
            y[others] += times(tile[:, own:].T, _take(x, rows))
    return y


def _take(table: Tensor, part: Part) -> Tensor:
    return table[part] if isinstance(part, slice) else table.index_select(0, part)


def point_gradients(
    tiles: Tiles, z: Tensor, w: Tensor, weight: Callable[[slice, slice], Tensor]
) -> tuple[Tensor, Tensor]:
    """Gradients of sum_ij G_ij K(z_i, w_j) to the placed points z (n, d) and w (s, d), float64; `weight`: blocks of G.

    With M_ij = G_ij dK/dt: for z_i sum_j M_ij (w_j - z_i), for w_j sum_i M_ij (z_i - w_j).
    """
    left_z, right_w = left(z), right(w)
    for_z, for_w = (torch.zeros(points.shape, dtype=torch.float64) for points in (z, w))
    for i in range(0, z.shape[0], ROWS):
        for j in range(0, w.shape[0], COLUMNS):
            a, b = slice(i, i + ROWS), slice(j, j + COLUMNS)
            m = tiles.profile.derivative(tiles.arguments(left_z[a], right_w[b])).mul_(weight(a, b).to(z.dtype))
            for_z[a] += torch.addmm(z[a] * -m.sum(1, keepdim=True), m, w[b])
            for_w[b] += torch.addmm(w[b] * -m.sum(0)[:, None], m.T, z[a])
    return for_z, for_w
