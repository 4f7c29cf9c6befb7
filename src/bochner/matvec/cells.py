"""Points sorted into cells, and the product of the blocks that matter. A block is a query cell against a key cell.

Keys are grouped by k-means, queries by the nearest cell. Every point is stored relative to the origin of its cell (the
mean of the cell's keys): coordinates are as small as the cells are, and single precision serves clouds any number of
bandwidths wide.

Blocks are skipped only where that provably does not matter. For a query q of cell a and a key k of cell b, the unit
vector e between the two origins gives |q - k| >= (q - k).e, and the least of both terms over their cells is known: in
many dimensions this separates cells that overlap as balls do. If what every row and every column skips sums to at most
eps/2, then |E|_2 <= sqrt(max row sum * max column sum) of the error matrix E is below it too (Schur's test), for every
x.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .._progress import track
from .engine import COARSE, Certified, Problem, TileEngine
from .tiles import BLOCK, ROWS, Frame, Sums, Tiles, argument_error, differences_error, extent, norms, swapped, times

SKIP_SHARE = 0.5  # of eps, for what is skipped
ROUNDING_SHARE = 0.4
NEAR_KEYS = 1024  # keys gathered at once for one query cell
CELLS = 1.5  # times the square root of the number of points
WIDEST = 1e15  # units that single precision can square
ROUNDS, SAMPLED = 3, 20  # of k-means, and points per cell that it looks at
FINER = {"float32": "float64", "float64": "difference"}


# ---- cells ---------------------------------------------------------------------------------------------------------


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """The index of the nearest centre of each point."""
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


@dataclass
class Side:
    """Queries or keys sorted by cell, relative to the origins of their cells."""

    points: Tensor  # (n, d) as the caller gave them, in his order
    label: Tensor  # (n,) the cell of each, in the caller's order
    order: Tensor  # (n,) position in the caller's order of each sorted point
    start: Tensor  # (cells+1,) where each cell begins
    rows: Tensor  # (n, d+2) augmented as `tiles.right`
    radius: Tensor  # (cells,) largest distance from the origin

    @property
    def count(self) -> Tensor:
        return self.start.diff()

    @cached_property
    def sorted_label(self) -> Tensor:
        return self.label[self.order]

    def ranges(self) -> list[tuple[int, int]]:
        """Where each cell begins and ends."""
        return list(itertools.pairwise(self.start.tolist()))

    def cell_sums(self, x: Tensor) -> Tensor:
        """Sums of sorted x (n, r) over cells: (cells, r)."""
        return x.new_zeros(self.count.numel(), x.shape[1]).index_add_(0, self.sorted_label, x)


@dataclass
class Index:
    """The keys sorted by cell. Nothing in it depends on queries or on x."""

    frame: Frame
    keys: Side
    origin: Tensor  # (cells, d) float64, in the caller's units: the mean of the cell's keys
    extent: float  # of the keys

    @property
    def cells(self) -> int:
        return self.origin.shape[0]

    def offsets(self, a: int, cells: Tensor | None = None) -> Tensor:
        """(cells, d): the origins of these cells (None: of all) as seen from the origin of cell a."""
        origin = self.origin if cells is None else self.origin[cells]
        return ((origin - self.origin[a]) * self.frame.scale).to(self.frame.dtype)

    @cached_property
    def distances(self) -> Tensor:
        """(cells, cells) between origins."""
        placed = (self.origin - self.frame.centre) * self.frame.scale
        return torch.cdist(placed, placed, compute_mode="donot_use_mm_for_euclid_dist").to(self.frame.dtype)

    def sort(self, points: Tensor) -> Side:
        """Other points, sorted by the nearest cell."""
        scaled, unit = self.frame, self.extent or 1.0
        origin = ((self.origin - scaled.centre) * (scaled.scale / unit)).float()
        label = torch.cat(
            [
                nearest(((part.double() - scaled.centre) * (scaled.scale / unit)).float(), origin)
                for part in _parts(points)
            ]
        )
        return sort_side(self.frame, points, label, self.origin)

    def refined(self, arithmetic: str) -> Index:
        """The same cells in another arithmetic."""
        frame = self.frame._replace(arithmetic=arithmetic)
        return Index(frame, sort_side(frame, self.keys.points, self.keys.label, self.origin), self.origin, self.extent)


def _parts(points: Tensor) -> tuple[Tensor, ...]:
    return points.split(BLOCK)


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
    return Side(points, label, order, torch.cat([count.new_zeros(1), count.cumsum(0)]), rows, radius)


def number_of_cells(n: int, s: int) -> int:
    """Few queries cannot fill many cells."""
    return max(1, math.ceil(CELLS * math.sqrt(min(n, s))))


def build_index(problem: Problem, cells: int, single: bool) -> Index:
    """Cells of the keys. Cost: O(s cells d)."""
    keys = problem.keys
    frame = problem.kernel.frame(keys, "float32" if single else "float64")
    reach = extent(frame, keys)
    if not reach < (WIDEST if single else 1e150):
        frame = frame._replace(arithmetic="difference")
    unit = reach if 0 < reach < math.inf else 1.0  # clustering does not mind the scale, single precision does
    flat = torch.empty(keys.shape, dtype=torch.float32)
    for part, target in zip(_parts(keys), _parts(flat), strict=True):
        target.copy_(((part.double() - frame.centre) * (frame.scale / unit)).nan_to_num_(0.0))
    generator = torch.Generator().manual_seed(problem.seed)
    label = nearest(flat, k_means(flat, min(cells, keys.shape[0]), generator))
    label = torch.unique(label, return_inverse=True)[1]  # without empty cells
    count = torch.bincount(label)
    total = torch.zeros(count.numel(), keys.shape[1], dtype=torch.float64)
    for part, cell in zip(_parts(keys), _parts(label), strict=True):
        total.index_add_(0, cell, part.double() - frame.centre)
    origin = total / count[:, None] + frame.centre
    return Index(frame, sort_side(frame, keys, label, origin), origin, unit)


# ---- which blocks are near -----------------------------------------------------------------------------------------


@dataclass
class Near:
    """Which blocks are evaluated, and what the others hold at most."""

    blocks: Tensor  # (cells, cells) bool: query cell x key cell
    skipped: Tensor  # (cells, cells) float64: bound on every entry of a skipped block, 0 for near ones
    norm: float  # bound on |E|_2 of what is skipped

    def pairs(self, queries: Side, keys: Side) -> int:
        """Entries in near blocks."""
        return int((self.blocks.double() * queries.count.double()[:, None] * keys.count.double()).sum())


def nearest_to_middle(index: Index, side: Side) -> Tensor:
    """(cells, cells): the least distance of the points of cell a to the middle between its origin and that of cell b.

    Measured along the line between the two origins; inf for empty cells.
    """
    out = torch.full_like(index.distances, torch.inf)
    for a, (lo, hi) in enumerate(side.ranges()):
        if lo < hi:
            distance = index.distances[a].clamp_min(torch.finfo(out.dtype).tiny)
            towards = torch.mm(side.rows[lo:hi, :-2], index.offsets(a).T).amax(0)
            out[a] = 0.5 * distance - towards / distance
    return out


def entry_bounds(index: Index, queries: Side) -> Tensor:
    """(cells, cells) float64: an upper bound on the kernel between any point of a query cell and any of a key cell."""
    keys, d = index.keys, queries.points.shape[1]
    theirs = nearest_to_middle(index, keys).double()
    ours = theirs if queries is keys else nearest_to_middle(index, queries).double()
    distances = index.distances.double()
    # What rounding can hide in a projection; and cells of one origin are not apart.
    lost = (d + 14) * torch.finfo(index.frame.dtype).eps * (distances + queries.radius.double()[:, None] + keys.radius)
    gap = (ours + theirs.T - lost).clamp_min_(0.0).masked_fill_(distances == 0, 0.0).nan_to_num_(nan=0.0)
    return index.frame.profile.at_distance(gap)


def near_blocks(index: Index, queries: Side, limit: float) -> Near:
    """Skip blocks, those of the least kernel first, while no row's and no column's sum exceeds `limit`."""
    bound = entry_bounds(index, queries)
    count = index.keys.count.double()
    near = needed(bound, count if queries is index.keys else queries.count.double(), count, limit)
    near &= (queries.count > 0)[:, None]
    skipped = torch.where(near, 0.0, bound)
    rows = (skipped @ index.keys.count.double())[queries.count > 0].max()
    columns = (skipped.T @ queries.count.double()).max()
    return Near(near, skipped, math.sqrt(float(rows) * float(columns)) * (1.0 + 1e-9))


def needed(bound: Tensor, queries: Tensor, keys: Tensor, limit: float) -> Tensor:
    """Which blocks may not be skipped, from bounds on their entries and the points in each query and key cell."""
    by_row = _skippable(bound * keys, limit)
    symmetric = queries is keys
    return ~(by_row & (by_row if symmetric else _skippable((bound * queries[:, None]).T, limit)).T)


def _skippable(sums: Tensor, limit: float) -> Tensor:
    """Which entries of each row, the smallest first, add up to at most `limit`."""
    ordered, order = sums.sort(1)
    return torch.zeros_like(sums, dtype=torch.bool).scatter_(1, order, ordered.cumsum(1) <= limit * (1.0 - 1e-9))


# ---- products ------------------------------------------------------------------------------------------------------


class CellsEngine(TileEngine):
    """Near blocks pair by pair, the others not at all."""

    name = "cells"

    def __init__(self, problem: Problem, index: Index, queries: Side, near: Near) -> None:
        self.problem, self.index, self.queries, self.near = problem, index, queries, near
        self.symmetric, self.limit = problem.symmetric, ROUNDING_SHARE * problem.eps
        whole = near.pairs(queries, index.keys)
        self.pairs = whole // 2 if self.symmetric else whole

    @property
    def dtype(self) -> torch.dtype:
        return self.index.frame.dtype

    def tiles(self) -> Tiles:
        """Of rows whose coordinates are scaled already."""
        frame = self.index.frame
        return Tiles(frame._replace(scale=torch.ones_like(frame.scale)))

    def rows(self, lo: int, hi: int) -> Tensor:
        """Augmented (`left`) queries at these sorted positions."""
        return swapped(self.queries.rows[lo:hi])

    def keys(self, a: int, most: int, mirrored: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Sorted positions and augmented (`right`) keys of the near blocks of query cell a, as seen from its origin.

        At most `most` at once. `mirrored`: only the blocks from a onwards, the others are their mirror images.
        """
        near = self.near.blocks[a].nonzero()[:, 0]
        if mirrored:
            near = near[near >= a]
        keys = self.index.keys
        begin, count = keys.start[near], keys.count[near]
        which = torch.repeat_interleave(torch.arange(near.numel()), count)
        position = torch.arange(which.numel()) + (begin - count.cumsum(0) + count)[which]
        offsets = self.index.offsets(a, near)
        for part, cell in zip(position.split(most), which.split(most), strict=True):
            if part.numel():
                w = keys.rows.index_select(0, part)
                w[:, :-2] += offsets.index_select(0, cell)
                w[:, -1] = norms(w[:, :-2]).square_().mul_(-0.5)
                yield part, w

    def _multiply(self, x: Tensor, adjoint: bool, sums: Sums | None) -> Tensor:
        keys, queries = self.index.keys.order, self.queries.order
        back = adjoint and not self.symmetric
        inward, outward = (queries, keys) if back else (keys, queries)
        x = x.to(self.dtype)[inward]
        y = torch.zeros(outward.numel(), x.shape[1], dtype=torch.float64)  # sums of tiles, as in `exact`
        own = None if sums is None else (torch.zeros_like(sums[0]), torch.zeros_like(sums[1]))
        tiles, blocks = self.tiles(), range(self.index.cells)
        for a in track(blocks, len(blocks), "near cells", self.progress):
            self._cell(tiles, x, y, a, back, own)
        if sums is not None and own is not None:
            sums[0].index_add_(0, queries, own[0])
            if not self.symmetric:
                sums[1].index_add_(0, keys, own[1])
        return torch.empty(y.shape, dtype=torch.float64).index_copy_(0, outward, y)

    def _cell(self, tiles: Tiles, x: Tensor, y: Tensor, a: int, back: bool, sums: Sums | None) -> None:
        """Add the near blocks of query cell `a`; a symmetric block serves its mirror image too."""
        lo, hi = int(self.queries.start[a]), int(self.queries.start[a + 1])
        if lo == hi:
            return
        rows = [(i, min(i + ROWS, hi)) for i in range(lo, hi, ROWS)]
        queries = [self.rows(i, j) for i, j in rows]
        for part, w in self.keys(a, NEAR_KEYS, self.symmetric):
            inside = int((part < hi).sum()) if self.symmetric else 0  # keys of cell a: their block is its own mirror
            for (i, j), z in zip(rows, queries, strict=True):
                tile = tiles(z, w)
                if not back:
                    y[i:j] += times(tile, x.index_select(0, part))
                if back or (inside < part.numel() and self.symmetric):
                    y.index_add_(0, part[inside:], times(tile[:, inside:].T, x[i:j]).double())
                if sums is not None:
                    sums[0][i:j] += tile.sum(1)
                    other = sums[0] if self.symmetric else sums[1]
                    other.index_add_(0, part[inside:], tile[:, inside:].sum(0).double())

    # ---- bounds ----------------------------------------------------------------------------------------------------

    @cached_property
    def _entries(self) -> Tensor:
        """(cells,): bound on the relative rounding of the near entries of each query cell, seen from its origin.

        |z| + |w| <= own radius + distance + radius, of which only pairs within the kernel's reach count: |z| <= |w| +
        reach and, where that is safe, |w| <= |z| + reach. Coordinates were rounded once more when they were moved,
        which changes a distance by two roundings of |z| + |w|, and log K by at most `steepest` times that.
        """
        index, frame, d = self.index, self.index.frame, self.queries.points.shape[1]
        span = torch.where(self.near.blocks, index.distances + index.keys.radius, 0.0).amax(1)
        reach, unit = math.sqrt(-2.0 * frame.profile.floor(frame.dtype)), torch.finfo(frame.dtype).eps
        lost = []
        for own, other in zip(self.queries.radius.tolist(), span.tolist(), strict=True):
            own = min(own, other + reach)
            total = own + other
            if frame.arithmetic == "difference":
                lost.append(min(8 * unit * total * frame.profile.steepest, 1e30))
                continue
            if argument_error(total, d, frame) <= 1.0:
                total = min(total, 2 * own + min(reach, other))
            moved = 4 * unit * total * min(total, reach)
            lost.append(min(frame.profile.change(argument_error(total, d, frame) + moved), 1e30))
        return torch.tensor(lost, dtype=torch.float64)

    def _relative(self) -> tuple[Tensor, Tensor, float]:
        queries, keys, near = self.queries, self.index.keys, self.near.blocks
        by_column = torch.where(near, self._entries[:, None], 0.0).amax(0)
        by_row = torch.maximum(by_column, self._entries) if self.symmetric else self._entries
        sums = self._summation
        tiny = self.index.frame.profile.floor_value(self.dtype) + differences_error(queries.points.shape[1])
        rows = by_row[queries.label] + sums
        return rows, rows if self.symmetric else by_column[keys.label] + sums, tiny

    @cached_property
    def _summation(self) -> float:
        """Bound on the relative rounding of x, of a profile and of sums over the near entries of a row, or column."""
        near, queries, keys = self.near.blocks.double(), self.queries.count.double(), self.index.keys.count.double()
        terms = max(int((near @ keys).max()), int((near.T @ queries).max()))
        unit, double = (torch.finfo(dtype).eps / 2 for dtype in (self.dtype, torch.float64))
        return unit * (min(terms, NEAR_KEYS) + 8) + double * terms

    def refine(self) -> bool:
        arithmetic = FINER.get(self.index.frame.arithmetic)
        if arithmetic is None:
            return False
        self.index = self.index.refined(arithmetic)
        self.queries = (
            self.index.keys
            if self.symmetric
            else sort_side(self.index.frame, self.queries.points, self.queries.label, self.index.origin)
        )
        for name in ("_entries", "_summation"):
            self.__dict__.pop(name, None)
        return True

    @property
    def norm(self) -> float:
        return self.lost + self.near.norm

    def certified(self, x: Tensor) -> Certified:
        value, rows = super().certified(x)
        weight = self.index.keys.cell_sums(x.abs()[self.index.keys.order])[:, 0]
        return Certified(value, rows + (self.near.skipped @ weight)[self.queries.label] * (1.0 + 1e-9))


def cells_engine(problem: Problem, index: Index) -> CellsEngine:
    """Cells for these queries."""
    queries = index.keys if problem.symmetric else index.sort(problem.queries)
    engine = CellsEngine(problem, index, queries, near_blocks(index, queries, SKIP_SHARE * problem.eps))
    while float(engine._entries.max()) > COARSE and engine.refine():
        pass
    return engine
