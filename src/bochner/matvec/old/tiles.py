"""Kernel tiles, their rounding, and the exact product.

Points are moved and scaled once, so that one bandwidth has the length the kernel wants. Two more columns then make one
matrix product yield the whole argument of the kernel:

    [z, -|z|^2/2, 1] . [w, 1, -|w|^2/2] = -|z - w|^2 / 2

The profile in place and a product with x finish a tile. The argument is clamped from below, where single precision
would become denormal, and from above at 0, where rounding could make a kernel larger than 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..._progress import track
from .kernels import Kernel

ROWS, COLUMNS, SQUARE = 384, 768, 512  # tiles of about 1 MB in float32 stay in the second-level cache
BLOCK = 8192  # points moved at once
FEW_COLUMNS = 8  # of x
# The root mean square of rounding errors is this much smaller than their bound (measured: 37 to 250): for guesses only.
TYPICAL = 32.0
PRECISE = 1e-9  # relative error of an entry in double precision, at most


class Frame(NamedTuple):
    """A kernel, where the origin is, how long a unit is, and the arithmetic: `z = (point - centre) * scale`.

    Arithmetic: "float32" and "float64" by matrix products; "difference", coordinate by coordinate in float64, for
    clouds so wide that the matrix product cancels: there points stay where they are and distances are scaled.
    """

    kernel: Kernel
    centre: Tensor
    scale: float
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


def make_frame(kernel: Kernel, keys: Tensor, bandwidth: float, arithmetic: str) -> Frame:
    """The frame centred on the keys."""
    return Frame(kernel, keys.mean(0, dtype=torch.float64), kernel.unit / bandwidth, arithmetic)


def norms(z: Tensor) -> Tensor:
    return torch.linalg.vector_norm(z, dim=1)


def argument_error(reach: float, d: int, frame: Frame) -> float:
    """Bound on the rounding of `-|z - w|^2/2` by `Tiles`, for placed points with |z| + |w| <= reach.

    d + 2 products and sums of numbers whose absolute values sum to at most reach^2/2, after coordinates and squared
    lengths that were rounded once: (d + 12) roundings of reach^2/2. Coordinate differences lose (d + 8) roundings of
    the result, which matter nowhere more than at the kernel's `heavy` place.
    """
    unit = torch.finfo(frame.dtype).eps / 2
    if frame.arithmetic == "difference":
        kernel = frame.kernel
        return (d + 8) * unit * min(0.5 * reach * reach, -kernel.floor(frame.dtype), kernel.heavy)
    return (d + 12) * unit * 0.5 * reach * reach


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
    """Evaluates kernel tiles into one reused buffer and counts the pairs; `slope` for bandwidth * dK/dbandwidth."""

    def __init__(self, frame: Frame, slope: bool = False) -> None:
        self.frame = frame
        self.profile = frame.kernel.slope if slope else frame.kernel.profile
        self.floor = frame.kernel.floor(frame.dtype)
        self.buffer = torch.empty(0, dtype=frame.dtype)
        self.pairs = 0

    def arguments(self, z: Tensor, w: Tensor) -> Tensor:
        """-|z - w|^2/2 between augmented rows `z` (`left`) and `w` (`right`); overwritten by the next call."""
        n, s = z.shape[0], w.shape[0]
        self.pairs += n * s
        if self.frame.arithmetic == "difference":
            distance = torch.cdist(z[:, :-2], w[:, :-2], compute_mode="donot_use_mm_for_euclid_dist")
            return distance.mul_(self.frame.scale).square_().mul_(-0.5).clamp_min_(self.floor)
        if self.buffer.numel() < n * s:
            self.buffer = torch.empty(n * s, dtype=z.dtype)
        tile = self.buffer[: n * s].view(n, s)
        torch.mm(z, w.T, out=tile)
        return tile.clamp_(self.floor, 0.0)

    def __call__(self, z: Tensor, w: Tensor) -> Tensor:
        """K between augmented rows; overwritten by the next call."""
        return self.profile(self.arguments(z, w))


def times(tile: Tensor, x: Tensor) -> Tensor:
    """`tile @ x` in the dtype of x; a few columns one by one, which is up to three times faster."""
    if x.dtype != tile.dtype:
        tile = tile.to(x.dtype)
    if 1 < x.shape[1] <= FEW_COLUMNS:
        return torch.stack([tile.mv(column) for column in x.T.contiguous()], 1)
    return tile @ x


def exact_product(tiles: Tiles, z: Tensor, w: Tensor, x: Tensor, progress: bool = False) -> Tensor:
    """`K x` in float64 for augmented queries `z` (n, d+2), keys `w` (s, d+2) and `x` (s, r): n s pairs, O(1) memory."""
    y = torch.zeros(z.shape[0], x.shape[1], dtype=torch.float64)  # long sums of one sign would drown in float32
    starts = range(0, z.shape[0], ROWS)
    for i in track(starts, len(starts), "exact product", progress):
        rows = y[i : i + ROWS]
        for j in range(0, w.shape[0], COLUMNS):
            rows += times(tiles(z[i : i + ROWS], w[j : j + COLUMNS]), x[j : j + COLUMNS])
    return y


def exact_symmetric(tiles: Tiles, z: Tensor, w: Tensor, x: Tensor, progress: bool = False) -> Tensor:
    """`K x` when queries and keys are the same points: a tile serves its mirror image too, n^2/2 pairs."""
    y = torch.zeros(z.shape[0], x.shape[1], dtype=torch.float64)
    n = z.shape[0]
    starts = range(0, n, SQUARE)
    for i in track(starts, len(starts), "exact product", progress):
        for j in range(i, n, SQUARE):
            tile = tiles(z[i : i + SQUARE], w[j : j + SQUARE]).to(x.dtype)
            y[i : i + SQUARE] += times(tile, x[j : j + SQUARE])
            if j > i:
                y[j : j + SQUARE] += times(tile.T, x[i : i + SQUARE])
    return y


def summation_error(terms: int, dtype: torch.dtype, wide: bool = False) -> float:
    """Bound on the relative rounding of x, of a profile and of sums of `terms` non-negative products, tile by tile.

    Sums over a tile are of its dtype, or in float64 if `wide`; sums of tiles are in float64.
    """
    double = torch.finfo(torch.float64).eps / 2
    unit, inside = torch.finfo(dtype).eps / 2, min(terms, COLUMNS)
    return unit * 8 + (double if wide else unit) * inside + double * math.ceil(terms / COLUMNS)


class ExactRows:
    """Exact rows of the product, in float64: `rows(ids)` gives (b, r). The truth that products are judged by.

    Keys are placed block by block, so that no second copy of them is held.
    """

    def __init__(
        self,
        kernel: Kernel,
        queries: Tensor,
        keys: Tensor,
        bandwidth: float,
        x: Tensor,
        frame: Frame | None = None,
    ) -> None:
        self.frame = frame or precise_frame(kernel, queries, keys, bandwidth)
        self.queries, self.keys, self.x = queries, keys, x.to(self.frame.dtype)

    def __call__(self, ids: Tensor) -> Tensor:
        z = left(self.frame.place(self.queries[ids]))
        tiles = Tiles(self.frame)
        total = torch.zeros(ids.numel(), self.x.shape[1], dtype=torch.float64)
        for part, values in zip(self.keys.split(BLOCK), self.x.split(BLOCK), strict=True):
            total += exact_product(tiles, z, right(self.frame.place(part)), values)
        return total


def precise_frame(kernel: Kernel, queries: Tensor, keys: Tensor, bandwidth: float, tolerance: float = PRECISE) -> Frame:
    """Double precision by matrix products, or by differences where those lose more than `tolerance` of an entry."""
    frame = make_frame(kernel, keys, bandwidth, "float64")
    reach = extent(frame, queries) + (extent(frame, keys) if keys is not queries else 0.0)
    reach = 2 * reach if keys is queries else reach
    lost = kernel.change(argument_error(reach, keys.shape[1], frame)) if math.isfinite(reach) else math.inf
    return frame if lost <= tolerance else frame._replace(arithmetic="difference")


def extent(frame: Frame, points: Tensor) -> float:
    """The largest distance of the points from the frame's centre, in its units; inf if that overflows."""
    largest = 0.0
    for part in points.split(BLOCK):
        largest = max(largest, float(norms(part.double() - frame.centre).max()))
    return largest * frame.scale
