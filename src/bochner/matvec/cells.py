"""Points sorted into cells, and the product of the blocks that matter. A block is a query cell against a key cell.

Keys are grouped by k-means, queries by the nearest cell. Blocks are skipped only where that provably does not matter.
For a query q of cell a and a key k of cell b, the unit vector e between the two origins gives |q - k| >= (q - k).e, and
the least of both terms over their cells is known: in many dimensions this separates cells that overlap as balls do. If
what every row and every column skips sums to at most eps/2, then |E|_2 <= sqrt(max row sum * max column sum) of the
error matrix E is below it too (Schur's test), for every x.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._progress import track
from .exact import ExactEngine, PlacedKeys
from .kernels import Problem
from .tiles import BLOCK, COLUMNS, ROWS, Block, Frame, norms

SKIP_SHARE = 0.5  # of eps, for what is skipped
CELLS = 1.5  # times the square root of the number of points
WIDEST = 1e3  # units across which single precision tells cells apart
SORTED = 1024  # points at once whose distances to all origins stay in cache
ROUNDS, SAMPLED = 3, 20  # of k-means, and points per cell that it looks at


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    half = centres.square().sum(1).mul_(0.5)
    label = torch.empty(points.shape[0], dtype=torch.long)
    for part, target in zip(points.split(2048), label.split(2048), strict=True):
        # numpy finds the smallest entry of a row ten times faster than torch does.
        target.copy_(torch.from_numpy(torch.addmm(half, part, centres.T, alpha=-1).numpy().argmin(1)))
    return label


def k_means(points: Tensor, cells: int, generator: torch.Generator) -> Tensor:
    """Centres of at most `cells` cells, by Lloyd's iteration on a sample. Cost: O(cells^2 d)."""
    sample = points[torch.randperm(points.shape[0], generator=generator)[: SAMPLED * cells]]
    centres = sample[:cells]
    for _ in range(ROUNDS):
        label = nearest(sample, centres)
        count = torch.bincount(label, minlength=centres.shape[0])
        total = torch.zeros_like(centres).index_add_(0, label, sample)
        centres = total[count > 0] / count[count > 0, None]
    return centres


def number_of_cells(n: int, s: int) -> int:
    """Few queries cannot fill many cells."""
    return max(1, math.ceil(CELLS * math.sqrt(min(n, s))))


class Side(NamedTuple):
    """Queries or keys by cell."""

    label: Tensor  # (n,) the cell of each
    order: Tensor  # (n,) their numbers, sorted by cell
    sizes: Tensor  # (cells,) how many points each has
    radius: Tensor  # (cells,) largest distance from the origin
    reach: Tensor  # (cells, cells) how far points of cell a go from its origin towards that of cell b, at most

    def members(self) -> tuple[Tensor, ...]:
        return self.order.split(self.sizes.tolist())


class Index:
    """Cells of these points, by k-means: their origins and the distances between them."""

    def __init__(self, frame: Frame, extent: float, points: Tensor, cells: int, seed: int) -> None:
        self.frame, self.extent = frame, extent
        self.unit = extent if 0 < extent < math.inf else 1.0
        self.dtype = torch.float32 if extent < WIDEST else torch.float64
        centres = k_means(self._flat(points), min(cells, len(points)), torch.Generator().manual_seed(seed))
        self.origin = torch.unique(centres, dim=0).double() * self.unit  # (cells, d), placed
        placed = self.origin.to(self.dtype)
        self.distances = torch.cdist(placed, placed, compute_mode="donot_use_mm_for_euclid_dist")

    @property
    def cells(self) -> int:
        return self.origin.shape[0]

    def _flat(self, points: Tensor) -> Tensor:
        """Points placed in single precision, of about unit size: clustering does not mind the scale."""
        flat = torch.empty(points.shape, dtype=torch.float32)
        for part, target in zip(points.split(BLOCK), flat.split(BLOCK), strict=True):
            target.copy_(self.frame.place(part).div_(self.unit).nan_to_num_(0.0))
        return flat

    def sort(self, points: Tensor) -> Side:
        """Points, each in the nearest cell. Cost: O(n cells d)."""
        label = nearest(self._flat(points), (self.origin / self.unit).float())
        order, placed = label.argsort(stable=True), self.origin.to(self.dtype)
        furthest, radius = torch.full_like(self.distances, -torch.inf), torch.zeros(self.cells, dtype=self.dtype)
        for ids in order.split(SORTED):
            cell = label[ids]
            own = (self.frame.place(points[ids]) - self.origin[cell]).to(self.dtype)
            towards = own @ placed.T
            towards -= towards.gather(1, cell[:, None])
            which, count = torch.unique_consecutive(cell, return_counts=True)
            most = np.maximum.reduceat(towards.numpy(), (count.cumsum(0) - count).numpy(), axis=0)
            furthest[which] = torch.maximum(furthest[which], torch.from_numpy(most))
            radius.scatter_reduce_(0, cell, norms(own), "amax")
        sizes = torch.bincount(label, minlength=self.cells)
        return Side(label, order, sizes, radius, furthest / self.distances.clamp_min(torch.finfo(self.dtype).tiny))


class Near(NamedTuple):
    """Which blocks are evaluated, and what the others hold at most."""

    blocks: Tensor  # (cells, cells) bool: query cell x key cell
    skipped: Tensor  # (cells, cells) float64: bound on every entry of a skipped block, 0 for near ones
    norm: float  # bound on |E|_2 of what is skipped
    pairs: int  # entries in near blocks


def entry_bounds(index: Index, queries: Side, keys: Side, more: float = 1.0) -> Tensor:
    """(cells, cells) float64: an upper bound on the kernel between any point of a query cell and any of a key cell.

    `more`: a factor for the reach of cells of which only a sample is known.
    """
    distances, d = index.distances.double(), index.origin.shape[1]
    # What rounding can hide: of the coordinates, and of their products with the origins, which are up to `extent` long.
    radii = queries.radius.double()[:, None] + keys.radius
    size = distances + radii + 4.0 * index.extent * (1.0 + radii / distances)
    lost = (d + 14) * torch.finfo(index.dtype).eps * size
    gap = distances - more * (queries.reach.double() + keys.reach.double().T) - lost
    return index.frame.profile.at_distance(gap.clamp_min_(0.0).masked_fill_(distances == 0, 0.0).nan_to_num_(nan=0.0))


def near_blocks(index: Index, queries: Side, keys: Side, limit: float) -> Near:
    """Skip blocks, those of the least kernel first, while no row's and no column's sum exceeds `limit`."""
    bound = entry_bounds(index, queries, keys)
    count = keys.sizes.double()
    many = count if queries is keys else queries.sizes.double()
    near = needed(bound, many, count, limit) & (queries.sizes > 0)[:, None]
    skipped = torch.where(near, 0.0, bound)
    rows, columns = (skipped @ count)[queries.sizes > 0].max(), (skipped.T @ many)[keys.sizes > 0].max()
    pairs = int((near.double() * many[:, None] * count).sum())
    return Near(near, skipped, math.sqrt(float(rows) * float(columns)) * (1.0 + 1e-9), pairs)


def needed(bound: Tensor, queries: Tensor, keys: Tensor, limit: float) -> Tensor:
    """Which blocks may not be skipped, from bounds on their entries and the points in each query and key cell."""
    by_row = _skippable(bound * keys, limit)
    symmetric = queries is keys
    return ~(by_row & (by_row if symmetric else _skippable((bound * queries[:, None]).T, limit)).T)


def _skippable(sums: Tensor, limit: float) -> Tensor:
    """Which entries of each row, the smallest first, add up to at most `limit`."""
    ordered, order = sums.sort(1)
    return torch.zeros_like(sums, dtype=torch.bool).scatter_(1, order, ordered.cumsum(1) <= limit * (1.0 - 1e-9))


class CellsEngine(ExactEngine):
    """Near blocks pair by pair, the others not at all; arithmetic and rounding are those of exact tiles."""

    name = "cells"
    rounding_share = 0.4

    def __init__(self, problem: Problem, single: bool, placed: PlacedKeys) -> None:
        if placed.cells is None:  # from now on known, for other queries too
            index = Index(placed.frame, placed.extent, problem.keys, number_of_cells(*problem.shape), problem.seed)
            placed.cells = index, index.sort(problem.keys)
        self.index, self.keys = placed.cells
        self.queries = self.keys if problem.symmetric else self.index.sort(problem.queries)
        super().__init__(problem, single, placed)
        self.near = near_blocks(self.index, self.queries, self.keys, SKIP_SHARE * problem.eps)
        self.pairs = self.near.pairs // (2 if self.symmetric else 1)

    def _blocks(self) -> Iterator[Block]:
        """Near blocks. A symmetric one serves its mirror image too: the own cell first, then those beyond it."""
        cells, keys = self.queries.members(), self.keys.members()
        for a in track(range(len(cells)), len(cells), "near cells", self.progress):
            near = [b for b in self.near.blocks[a].nonzero()[:, 0].tolist() if b >= a or not self.symmetric]
            if not (len(cells[a]) and near):
                continue
            own = len(cells[a]) if self.symmetric and near[0] == a else 0
            for j, columns in enumerate(torch.cat([keys[b] for b in near]).split(COLUMNS)):
                for rows in cells[a].split(ROWS):
                    yield rows, columns, min(max(own - j * COLUMNS, 0), len(columns))

    def _relative(self) -> tuple[Tensor, Tensor, float]:
        """As of exact tiles; a row adds up in a tile for each near cell."""
        rows, columns, absolute = super()._relative()
        more = torch.finfo(torch.float64).eps * (self.index.cells + max(self.problem.shape) / COLUMNS)
        return rows + more, columns + more, absolute

    @property
    def norm(self) -> float:
        return self.lost + self.near.norm

    def certified(self, x: Tensor) -> tuple[Tensor, Tensor]:
        value, rows = super().certified(x)
        weight = x.new_zeros(self.index.cells).index_add_(0, self.keys.label, x.abs()[:, 0])
        return value, rows + (self.near.skipped @ weight)[self.queries.label] * (1.0 + 1e-9)
