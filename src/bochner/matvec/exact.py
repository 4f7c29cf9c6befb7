"""Gaussian kernel tiles and the exact product.

Points are centred and scaled once so that `K_ij = 2 ** (-|z_i - w_j|^2 / 2)`. Two more columns then make one
matrix product yield the whole exponent:

    [z, -|z|^2/2, 1] . [w, 1, -|w|^2/2] = -|z - w|^2 / 2

`exp2` in place and a product with x finish a tile. The exponent is clamped at -100 first: below 2**-126 single
precision is denormal, and arithmetic on denormals is 3 to 30 times slower; 2**-100 is 8e-31, far below rounding
(double precision: 2**-1000).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._progress import track

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
FLOOR = -100.0
ROWS, COLUMNS, SQUARE = 384, 768, 512  # tiles of about 1 MB in float32 stay in the second-level cache


class Frame(NamedTuple):
    """Where the origin is and how long a unit is: `z = (point - centre) * scale`."""

    centre: Tensor
    scale: float
    arithmetic: str  # "float32", "float64" or "difference"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.arithmetic == "float32" else torch.float64

    def place(self, points: Tensor) -> Tensor:
        """The points in this frame, (n, d); differences are taken in float64 before rounding."""
        placed = torch.empty(points.shape, dtype=self.dtype)
        for source, target in zip(points.split(4096), placed.split(4096), strict=True):
            target.copy_((source.double() - self.centre) * self.scale)
        return placed


def make_frame(keys: Tensor, bandwidth: float, arithmetic: str) -> Frame:
    """The frame centred on the keys, in which one bandwidth is sqrt(log2 e) long."""
    return Frame(keys.mean(0, dtype=torch.float64), math.sqrt(LOG2E) / bandwidth, arithmetic)


def rounding_error(z: Tensor) -> float:
    """Relative error of a kernel entry computed by `Tiles` between points like these.

    The exponent is a difference of numbers of size |z|^2, rounded a few times on the way. The exponent of a point
    with itself shows it: it should be 0. Measured on the 4,096 largest points, where it is worst; never taken
    below four roundings of |z|^2, because points on a coarse grid can cancel by luck.
    """
    if z.shape[0] == 0:
        return 0.0
    size = z.square().sum(1)
    largest = z[size.topk(min(4096, z.shape[0])).indices]
    exponent = torch.bmm(left(largest).unsqueeze(1), right(largest).unsqueeze(2))
    unit = torch.finfo(z.dtype).eps / 2
    return LN2 * max(2.0 * float(exponent.abs().max()), 4.0 * unit * float(size.max()))


def left(z: Tensor) -> Tensor:
    """Rows of queries with the two extra columns: [z, -|z|^2/2, 1]."""
    h = z.square().sum(1, keepdim=True).mul_(-0.5)
    return torch.cat([z, h, torch.ones_like(h)], 1)


def right(w: Tensor) -> Tensor:
    """Rows of keys with the two extra columns: [w, 1, -|w|^2/2]."""
    h = w.square().sum(1, keepdim=True).mul_(-0.5)
    return torch.cat([w, torch.ones_like(h), h], 1)


def move_right(w: Tensor, origin: Tensor) -> None:
    """Move augmented rows of keys to another origin, in place."""
    w[:, :-2] -= origin
    torch.linalg.vector_norm(w[:, :-2], dim=1, out=w[:, -1]).square_().mul_(-0.5)


class Tiles:
    """Evaluates kernel tiles into one reused buffer and counts the pairs."""

    def __init__(self, frame: Frame) -> None:
        self.difference = frame.arithmetic == "difference"
        self.floor = FLOOR if frame.dtype == torch.float32 else 10 * FLOOR
        self.buffer = torch.empty(0, dtype=frame.dtype)
        self.pairs = 0

    def __call__(self, z: Tensor, w: Tensor) -> Tensor:
        """K between augmented rows `z` (`left`) and `w` (`right`); overwritten by the next call."""
        n, s = z.shape[0], w.shape[0]
        self.pairs += n * s
        if self.difference:
            distance = torch.cdist(z[:, :-2], w[:, :-2], compute_mode="donot_use_mm_for_euclid_dist")
            return distance.square_().mul_(-0.5).exp2_()
        if self.buffer.numel() < n * s:
            self.buffer = torch.empty(n * s, dtype=z.dtype)
        tile = self.buffer[: n * s].view(n, s)
        torch.mm(z, w.T, out=tile)
        return tile.clamp_min_(self.floor).exp2_()


def exact_product(tiles: Tiles, z: Tensor, w: Tensor, x: Tensor, progress: bool = False) -> Tensor:
    """`K x` for augmented queries `z` (n, d+2), keys `w` (s, d+2) and `x` (s, r): n s pairs, O(1) memory."""
    y = z.new_zeros(z.shape[0], x.shape[1])
    starts = range(0, z.shape[0], ROWS)
    for i in track(starts, len(starts), "exact product", progress):
        rows = y[i : i + ROWS]
        for j in range(0, w.shape[0], COLUMNS):
            rows.addmm_(tiles(z[i : i + ROWS], w[j : j + COLUMNS]), x[j : j + COLUMNS])
    return y


def exact_symmetric(tiles: Tiles, z: Tensor, w: Tensor, x: Tensor, progress: bool = False) -> Tensor:
    """`K x` when queries and keys are the same points: a tile serves its mirror image too, n^2/2 pairs."""
    y = z.new_zeros(z.shape[0], x.shape[1])
    n = z.shape[0]
    starts = range(0, n, SQUARE)
    for i in track(starts, len(starts), "exact product", progress):
        for j in range(i, n, SQUARE):
            tile = tiles(z[i : i + SQUARE], w[j : j + SQUARE])
            y[i : i + SQUARE].addmm_(tile, x[j : j + SQUARE])
            if j > i:
                y[j : j + SQUARE].addmm_(tile.T, x[i : i + SQUARE])
    return y
