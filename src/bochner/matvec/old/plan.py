"""Which blocks are near. A block is one query cell against one key cell; near blocks are evaluated pair by pair.

First choice, `certain_plan`: skip only what provably does not matter. For a query q of cell a and a key k of cell b,
the unit vector e between the two origins gives |q - k| >= (q - k).e, and both terms are known: the first per query, the
second as a minimum per cell. In many dimensions this separates cells that overlap as balls do. If what every row and
every column skips sums to less than eps/2, then |E|_2 <= sqrt(max row sum * max column sum) of the error matrix E is
below it too (Schur's test), for every x.

Where that would evaluate too much (unclustered data in many dimensions), `measured.measured_plan` decides by samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .index import KeyIndex, Side
from .tiles import Tiles, argument_error, norms, swapped

SKIP_SHARE = 0.5  # of eps, for what a certain plan skips
TRIED, HOPELESS = 16, 0.5  # one cell in so many is tried; giving up if this part of the pairs is near


@dataclass
class Plan:
    """Queries sorted by cell, which blocks are near, and what is known about the rest.

    `rows` (n,) and `columns` (s,): bounds on the sums of |E_ij| over skipped blocks, in sorted order; None if the plan
    was made from samples. `beta` multiplies the far field, 0 if there is none.
    """

    queries: Side
    near: Tensor  # (cells, cells) bool: query cell x key cell
    beta: float
    symmetric: bool  # the queries are the keys
    rounding: Tensor  # (cells,) bound on the relative error of a near entry, per query cell
    rows: Tensor | None = None
    columns: Tensor | None = None
    score: Tensor | None = None  # (cells, cells) ranking of the blocks, of measured plans
    predicted: float = 0.0  # error relative to |x|: a bound if certain, else the largest measured one
    met: bool = True
    mean_row_sum: float = math.nan
    rough: bool = False  # measured plans: single precision, from one origin, loses far less than eps
    near_norm: float = math.nan  # certain plans: bound on |K|_2 of the near blocks
    rounded: float = 0.0  # the same: bound on |E|_2 of what rounding takes from products by cells

    @property
    def certain(self) -> bool:
        return self.rows is not None

    @property
    def skipped_norm(self) -> float:
        """Bound on |E|_2 of what is skipped; inf if the plan is not certain."""
        if self.rows is None or self.columns is None:
            return math.inf
        return math.sqrt(float(self.rows.max()) * float(self.columns.max()))

    def pairs(self, index: KeyIndex) -> int:
        """Near pairs evaluated by one product (a symmetric block is evaluated once for both sides)."""
        near = self.near.triu() if self.symmetric else self.near
        return int((near.double() * self.queries.count.double()[:, None] * index.count.double()).sum())

    def terms(self, index: KeyIndex) -> int:
        """The largest number of near entries in a row."""
        return int((self.near.double() @ index.count.double()).max())

    def fraction(self, index: KeyIndex) -> float:
        """Of all pairs, how many lie in near blocks."""
        count = self.queries.count.double()
        total = float(count.sum() * index.count.double().sum())
        return float((self.near.double() * count[:, None] * index.count.double()).sum()) / total


def projections(index: KeyIndex, rows: Tensor, a: int, distance: Tensor, cells: Tensor | None = None) -> Tensor:
    """(b, cells): how far rows of cell a lie from the middle between the origins of a and of other cells, towards a."""
    direction = index.offsets(a, cells).div_(-distance[:, None].clamp_min(torch.finfo(distance.dtype).tiny))
    return torch.addmm(0.5 * distance, rows[:, :-2], direction.T)


def nearest_to_middle(index: KeyIndex, side: Side, distances: Tensor) -> Tensor:
    """(cells, cells): the smallest `projections` over the points of cell a (inf if empty), for every other cell."""
    smallest = torch.full_like(distances, torch.inf)
    for a, (lo, hi) in enumerate(side.ranges()):
        if lo < hi:
            smallest[a] = projections(index, side.rows[lo:hi], a, distances[a]).amin(0)
    return smallest


def slack(distance: Tensor, own: float | Tensor, radius: Tensor, d: int) -> Tensor:
    """What rounding can hide in a projection."""
    return (d + 14) * torch.finfo(distance.dtype).eps * (distance + own + radius)


@dataclass
class Between:
    """What bounds of the kernel between the points of one cell and of others need, one entry per other cell."""

    a: int
    cells: Tensor | None  # which other cells; None: all
    distance: Tensor  # between the origins
    opposite: Tensor  # `nearest_to_middle` of the other cells' points
    radius: Tensor  # of the other cells
    own: float  # radius of this one

    def kernel_bound(self, index: KeyIndex, rows: Tensor) -> Tensor:
        """(b, cells): an upper bound on the kernel between each of these rows of cell a and any point of a cell."""
        distance, lost = self.distance, slack(self.distance, self.own, self.radius, rows.shape[1] - 2)
        middle = projections(index, rows, self.a, distance, self.cells)
        # |q - m_b|^2 from the same product: |r|^2 + L^2 + 2 r.(m_a - m_b), and the last term is 2 L (middle - L/2).
        squared = (middle * 2.0 - distance).mul_(distance).add_(distance.square()).sub_(2.0 * rows[:, -1:])
        ball = squared.sub_(lost * (distance + self.own)).clamp_min_(0.0).sqrt_().sub_(self.radius)
        gap = torch.maximum(middle.add_(self.opposite), ball).sub_(lost).clamp_min_(0.0)
        gap[:, distance == 0] = 0.0
        return index.frame.kernel.at_distance(gap)


def skippable(
    index: KeyIndex, side: Side, other: Side, distances: Tensor, middles: tuple[Tensor, Tensor], limit: float
) -> tuple[Tensor, Tensor]:
    """For each cell of `side`, which cells of `other` must be near, and what each row then skips at most.

    Blocks are skipped from the least kernel upwards while no row's sum exceeds `limit`. `middles`: `nearest_to_middle`
    of both sides. Where little can be skipped in the first cells, the others are not looked at: everything is near.
    """
    near = torch.ones(index.cells, index.cells, dtype=torch.bool)
    skipped = side.rows.new_zeros(side.rows.shape[0])
    count, filled, d = other.count.to(distances.dtype), other.count > 0, side.points.shape[1]
    for a, (lo, hi) in enumerate(side.ranges()):
        if lo == hi:
            near[a] = False
            continue
        distance, own = distances[a], float(side.radius[a])
        # 1. Whole blocks, by the closest points of both cells: nearly all of them, for a tenth of the limit.
        gap = torch.maximum(middles[0][a] + middles[1][:, a], distance - own - other.radius)
        gap = gap.sub_(slack(distance, own, other.radius, d)).clamp_min_(0.0)
        gap[distance == 0] = 0.0
        block = index.frame.kernel.at_distance(gap).mul_(count)
        block[a] = torch.inf if filled[a] else 0.0
        order = block.argsort()
        sums = block[order].cumsum(0)
        whole = int((sums <= 0.1 * limit).sum())
        near[a, order[:whole]] = False
        spent = float(sums[whole - 1]) if whole else 0.0
        # 2. The others row by row.
        some = order[whole:][torch.isfinite(block[order[whole:]])]
        between = Between(a, some, distance[some], middles[1][some, a], other.radius[some], own)
        rows = [between.kernel_bound(index, part).mul_(count[some]) for part in side.rows[lo:hi].split(1024)]
        by_size = torch.stack([part.amax(0) for part in rows]).amax(0).argsort()
        table = torch.cat([part[:, by_size].cumsum_(1) for part in rows]).add_(spent)
        kept = int((table.amax(0) <= limit).sum()) if some.numel() else 0
        near[a, some[by_size[:kept]]] = False
        skipped[lo:hi] = (table[:, kept - 1] if kept else spent) * (1.0 + 1e-4)  # the sum's own rounding
        if a == index.cells // TRIED and float((near[: a + 1].to(count.dtype) @ count).mean()) > HOPELESS * count.sum():
            return filled.expand_as(near).clone(), torch.zeros_like(skipped)
    return near & filled, skipped


def certain_plan(index: KeyIndex, queries: Side | None, eps: float) -> Plan:
    """Skip what provably sums to at most eps/2 per row and per column. Cost: two passes of n cells pairs per side."""
    symmetric = queries is None
    side = index.keys if queries is None else queries
    distances, limit = index.distances(), SKIP_SHARE * eps
    keys = nearest_to_middle(index, index.keys, distances)
    others = keys if queries is None else nearest_to_middle(index, queries, distances)
    near, rows = skippable(index, side, index.keys, distances, (others, keys), limit)
    if symmetric:
        near, columns = near | near.T, rows
    else:
        back, columns = skippable(index, index.keys, side, distances, (keys, others), limit)
        near = near | back.T
    plan = Plan(side, near, 0.0, symmetric, near_rounding(index, side, near, distances), rows, columns)
    plan.predicted = plan.skipped_norm
    return plan


def near_reach(index: KeyIndex, side: Side, near: Tensor, distances: Tensor) -> Tensor:
    """(cells,): the largest |z| + |w| of the near pairs of each query cell that matter, as seen from its origin.

    |z| + |w| <= own radius + distance + radius. Only pairs within the kernel's reach count: |z| <= |w| + reach and,
    where that is safe, |w| <= |z| + reach.
    """
    kernel, frame, d = index.frame.kernel, index.frame, side.points.shape[1]
    span = torch.where(near, distances + index.keys.radius, 0.0).amax(1)
    reach = math.sqrt(-2.0 * kernel.floor(frame.dtype))
    out = torch.zeros_like(side.radius)
    for a, (own, other) in enumerate(zip(side.radius.tolist(), span.tolist(), strict=True)):
        own = min(own, other + reach)
        out[a] = own + other
        if argument_error(own + other, d, frame) <= 1.0:
            out[a] = min(own + other, 2 * own + min(reach, other))
    return out


def near_rounding(index: KeyIndex, side: Side, near: Tensor, distances: Tensor) -> Tensor:
    """(cells,): bound on the relative rounding of the near entries of each query cell."""
    d, change = side.points.shape[1], index.frame.kernel.change
    reaches = near_reach(index, side, near, distances).tolist()
    lost = [min(change(argument_error(reach, d, index.frame)), 1e30) for reach in reaches]
    return torch.tensor(lost, dtype=side.radius.dtype)


class NearTiles:
    """Tiles of the near blocks, one query cell at a time, as seen from that cell's origin."""

    def __init__(self, index: KeyIndex, plan: Plan, slope: bool = False) -> None:
        self.index, self.plan = index, plan
        self.tiles = Tiles(index.frame._replace(scale=1.0), slope)  # coordinates are scaled already

    def rows(self, lo: int, hi: int) -> Tensor:
        """Augmented (`left`) queries at these sorted positions."""
        return swapped(self.plan.queries.rows[lo:hi])

    def keys(self, a: int, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Sorted positions and augmented (`right`) keys of the near blocks of query cell a, at most `most` at once.

        Of a symmetric plan only the blocks from a onwards: the others are their mirror images.
        """
        near = self.plan.near[a].nonzero()[:, 0]
        if self.plan.symmetric:
            near = near[near >= a]
        if near.numel() == 0:
            return
        begin, count = self.index.keys.start[near], self.index.count[near]
        which = torch.repeat_interleave(torch.arange(near.numel()), count)
        position = torch.arange(which.numel()) + (begin - count.cumsum(0) + count)[which]
        offsets = self.index.offsets(a, near)
        for part, cell in zip(position.split(most), which.split(most), strict=True):
            w = self.index.keys.rows.index_select(0, part)
            w[:, :-2] += offsets.index_select(0, cell)
            w[:, -1] = norms(w[:, :-2]).square_().mul_(-0.5)
            yield part, w

    def __call__(self, z: Tensor, w: Tensor) -> Tensor:
        return self.tiles(z, w)
