"""Points sorted into cells, each cell with its own origin: what near tiles, far cells and bounds work on.

Keys are grouped into about 2 sqrt(s) cells by k-means, queries by the nearest cell. Every point is stored relative to
the origin of its cell (the mean of the cell's keys): coordinates are then as small as the cells are, and single
precision serves clouds any number of bandwidths wide and any distance from zero.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from .tiles import BLOCK, Frame, norms


def assign(points: Tensor, frame: Frame, centres: Tensor) -> Tensor:
    """The index of the nearest centre of each point; centres are placed, points not."""
    half = centres.square().sum(1).mul_(0.5)
    label = torch.empty(points.shape[0], dtype=torch.long)
    for part, target in zip(points.split(2048), label.split(2048), strict=True):
        distance = torch.addmm(half, frame.place(part), centres.T, alpha=-1)
        # numpy finds the smallest entry of a row ten times faster than torch does.
        target.copy_(torch.from_numpy(distance.numpy().argmin(1)))
    return label


def k_means(points: Tensor, frame: Frame, cells: int, generator: torch.Generator, rounds: int = 4) -> Tensor:
    """Placed centres of about `cells` cells: Lloyd's iteration on a sample of 40 points per cell. Cost O(cells^2 d)."""
    sample = points[torch.randperm(points.shape[0], generator=generator)[: 40 * cells]]
    centres = frame.place(sample[:cells])
    placed = frame.place(sample)
    for _ in range(rounds):
        label = assign(sample, frame, centres)
        count = torch.bincount(label, minlength=centres.shape[0])
        total = torch.zeros_like(centres).index_add_(0, label, placed)
        filled = count > 0
        centres = total[filled] / count[filled, None]
    return centres


@dataclass
class Side:
    """Queries or keys sorted by cell, relative to the origins of their cells."""

    points: Tensor  # (n, d) as the caller gave them, in his order
    order: Tensor  # (n,) position in the caller's order of each sorted point
    start: Tensor  # (cells+1,) where each cell begins
    rows: Tensor  # (n, d+2) augmented as `tiles.right`
    radius: Tensor  # (cells,) largest distance from the origin

    @property
    def count(self) -> Tensor:
        return self.start.diff()

    @property
    def label(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(self.count.numel()), self.count)

    @property
    def caller_label(self) -> Tensor:
        """The cell of each point, in the caller's order."""
        label = torch.empty_like(self.order)
        label[self.order] = self.label
        return label

    def ranges(self) -> list[tuple[int, int]]:
        """Where each cell begins and ends."""
        start = self.start.tolist()
        return list(itertools.pairwise(start))

    def cell_sums(self, x: Tensor) -> Tensor:
        """Sums of sorted x (n, r) over cells: (cells, r)."""
        return x.new_zeros(self.count.numel(), x.shape[1]).index_add_(0, self.label, x)


@dataclass
class KeyIndex:
    """The keys sorted by cell, and the moments of each cell. Nothing in it depends on queries or on x."""

    frame: Frame
    keys: Side
    centres: Tensor  # (cells, d) placed k-means centres: they define the cells and stay when keys come and go
    origin: Tensor  # (cells, d) float64, in the caller's units: the mean of the cell's keys
    spread: Tensor  # (cells,) mean squared distance from the origin

    @property
    def cells(self) -> int:
        return self.origin.shape[0]

    @property
    def count(self) -> Tensor:
        return self.keys.count

    def offsets(self, a: int, cells: Tensor | None = None) -> Tensor:
        """(cells, d): the origins of these cells (None: of all) as seen from the origin of cell a."""
        origin = self.origin if cells is None else self.origin[cells]
        return ((origin - self.origin[a]) * self.frame.scale).to(self.frame.dtype)

    def distances(self) -> Tensor:
        """(cells, cells) between origins."""
        placed = (self.origin - self.frame.centre) * self.frame.scale
        return torch.cdist(placed, placed, compute_mode="donot_use_mm_for_euclid_dist").to(self.frame.dtype)

    def blurred(self, a: int) -> Tensor:
        """(cells, d+2): right factor whose product with rows of cell a is the argument of the blurred kernel.

        Gaussian: the kernel averaged over a Gaussian cell of variance v per axis,
        (1 + v/sigma^2)^(-d/2) exp(-|q - m|^2 / (2 (sigma^2 + v))). Other kernels: at the mean squared distance.
        """
        mean = self.offsets(a)
        squared = mean.square().sum(1)
        if self.frame.kernel.name != "gaussian":
            return torch.cat([mean, torch.ones_like(squared)[:, None], -0.5 * (squared + self.spread)[:, None]], 1)
        d = mean.shape[1]
        g = 1.0 / (1.0 + self.spread / d * 0.6931471805599453)
        last = -0.5 * g * squared + 0.5 * d * torch.log2(g)
        return torch.cat([g[:, None] * mean, g[:, None], last[:, None]], 1)

    def far(self, rows: Tensor, a: int) -> Tensor:
        """(b, cells): the blurred kernel between augmented (`left`) rows of cell a and every cell."""
        t = torch.mm(rows, self.blurred(a).T).clamp_(self.frame.kernel.floor(self.frame.dtype), 0.0)
        return self.frame.kernel.profile(t)


def sort_side(frame: Frame, points: Tensor, label: Tensor, origin: Tensor) -> Side:
    """Points sorted by cell, relative to `origin` (float64, caller's units); block by block."""
    n, d = points.shape
    order = label.argsort(stable=True)
    count = torch.bincount(label, minlength=origin.shape[0])
    rows = torch.empty(n, d + 2, dtype=frame.dtype)
    rows[:, d] = 1.0
    radius = torch.zeros(origin.shape[0], dtype=frame.dtype)
    for ids, target in zip(order.split(BLOCK), rows.split(BLOCK), strict=True):
        cell = label[ids]
        target[:, :d] = (points[ids].double() - origin[cell]) * frame.scale
        length = norms(target[:, :d])
        target[:, d + 1] = length.square().mul_(-0.5)
        radius.scatter_reduce_(0, cell, length, "amax")
    return Side(points, order, torch.cat([count.new_zeros(1), count.cumsum(0)]), rows, radius)


def build_index(frame: Frame, keys: Tensor, cells: int, generator: torch.Generator) -> KeyIndex:
    """Cells of the keys. Cost: O(s cells d), about 1 % of an exact product at s = 1e5."""
    centres = k_means(keys, frame, min(cells, keys.shape[0]), generator)
    return index_from_labels(frame, keys, assign(keys, frame, centres), centres)[0]


def index_from_labels(frame: Frame, keys: Tensor, label: Tensor, centres: Tensor) -> tuple[KeyIndex, Tensor]:
    """Sort keys into given cells and take their moments; also which cells are filled (the others are dropped)."""
    count = torch.bincount(label, minlength=centres.shape[0])
    filled = count > 0
    label, centres, count = (filled.cumsum(0) - 1)[label], centres[filled], count[filled]
    total = torch.zeros(centres.shape, dtype=torch.float64)
    for part, cell in zip(keys.split(BLOCK), label.split(BLOCK), strict=True):
        total.index_add_(0, cell, part.double() - frame.centre)
    origin = total / count[:, None] + frame.centre
    side = sort_side(frame, keys, label, origin)
    spread = side.cell_sums(side.rows[:, -1:])[:, 0].mul_(-2.0) / count
    return KeyIndex(frame, side, centres, origin, spread.to(frame.dtype)), filled


def sort_queries(index: KeyIndex, queries: Tensor) -> Side:
    """Queries sorted by nearest cell."""
    return sort_side(index.frame, queries, assign(queries, index.frame, index.centres), index.origin)


def reframe(index: KeyIndex, arithmetic: str) -> KeyIndex:
    """The same cells in another arithmetic."""
    frame = index.frame._replace(arithmetic=arithmetic)
    return index_from_labels(frame, index.keys.points, index.keys.caller_label, frame.place(index.origin))[0]
