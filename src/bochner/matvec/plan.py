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
from dataclasses import dataclass

import torch
from torch import Tensor

from .index import KeyIndex, Side
from .tiles import Tiles, argument_error, norms, swapped

SKIP_SHARE = 0.5  # of eps, for what a certain plan skips


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

    def fraction(self, index: KeyIndex) -> float:
        """Of all pairs, how many lie in near blocks."""
        count = self.queries.count.double()
        total = float(count.sum() * index.count.double().sum())
        return float((self.near.double() * count[:, None] * index.count.double()).sum()) / total


def projections(index: KeyIndex, rows: Tensor, a: int, distance: Tensor) -> Tensor:
    """(b, cells): how far rows of cell a lie from the middle between the origins of a and of each cell, towards a."""
    direction = index.offsets(a).div_(-distance[:, None].clamp_min(torch.finfo(distance.dtype).tiny))
    return torch.addmm(0.5 * distance, rows[:, :-2], direction.T)


def nearest_to_middle(index: KeyIndex, side: Side, distances: Tensor) -> Tensor:
    """(cells, cells): the smallest `projections` over the points of cell a (inf if empty), for every other cell."""
    smallest = torch.full_like(distances, torch.inf)
    for a, (lo, hi) in enumerate(side.ranges()):
        if lo < hi:
            smallest[a] = projections(index, side.rows[lo:hi], a, distances[a]).amin(0)
    return smallest


def kernel_bound(
    index: KeyIndex, rows: Tensor, a: int, distance: Tensor, opposite: Tensor, radius: Tensor, own: float
) -> Tensor:
    """(b, cells): an upper bound on the kernel between rows of cell a and every point of each other cell.

    `opposite`: `nearest_to_middle` of the other side, for a; `radius`: of its cells; `own`: radius of these rows.
    """
    unit = torch.finfo(rows.dtype).eps
    slack = (rows.shape[1] + 12) * unit * (distance + own + radius)
    middle = projections(index, rows, a, distance)
    # |q - m_b|^2 from the same product: |r|^2 + L^2 + 2 r.(m_a - m_b), and the last term is 2 L (middle - L/2).
    squared = (middle * 2.0 - distance).mul_(distance).add_(distance.square()).sub_(2.0 * rows[:, -1:])
    ball = squared.sub_(slack * (distance + own)).clamp_min_(0.0).sqrt_().sub_(radius)
    gap = torch.maximum(middle.add_(opposite), ball).sub_(slack).clamp_min_(0.0)
    gap[:, distance == 0] = 0.0
    return index.frame.kernel.at_distance(gap)


def skippable(index: KeyIndex, side: Side, other: Side, distances: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """For each cell of `side`, which cells of `other` must be near, and what each row then skips at most.

    Blocks are skipped from the least kernel upwards while no row's sum exceeds `limit`.
    """
    cells = index.cells
    near = torch.ones(cells, cells, dtype=torch.bool)
    skipped = side.rows.new_zeros(side.rows.shape[0])
    opposite = nearest_to_middle(index, other, distances)
    count, filled = other.count.to(distances.dtype), other.count > 0
    for a, (lo, hi) in enumerate(side.ranges()):
        if lo == hi:
            near[a] = False
            continue
        largest = torch.zeros(cells, dtype=distances.dtype)
        parts = []
        for i in range(lo, hi, 1024):
            rows = side.rows[i : min(i + 1024, hi)]
            bound = kernel_bound(index, rows, a, distances[a], opposite[:, a], other.radius, float(side.radius[a]))
            parts.append(bound.mul_(count))
            largest = torch.maximum(largest, bound.amax(0))
        largest[a] = torch.inf if filled[a] else 0.0
        order = largest.argsort()
        order = order[largest[order] <= limit]
        if order.numel() == 0:
            continue
        sums = torch.cat([part[:, order].cumsum_(1) for part in parts])
        kept = int((sums.amax(0) <= limit).sum())
        near[a, order[:kept]] = False
        if kept:
            skipped[lo:hi] = sums[:, kept - 1] * (1.0 + 1e-5)  # the sum's own rounding
    near &= filled
    return near, skipped


def certain_plan(index: KeyIndex, queries: Side | None, eps: float) -> Plan:
    """Skip what provably sums to at most eps/2 per row and per column. Cost: two passes of n cells pairs per side."""
    symmetric = queries is None
    side = index.keys if queries is None else queries
    distances = index.distances()
    near, rows = skippable(index, side, index.keys, distances, SKIP_SHARE * eps)
    if symmetric:
        near, columns = near | near.T, rows
    else:
        back, columns = skippable(index, index.keys, side, distances, SKIP_SHARE * eps)
        near = near | back.T
    plan = Plan(side, near, 0.0, symmetric, near_rounding(index, side, near, distances), rows, columns)
    plan.predicted = plan.skipped_norm
    return plan


def near_rounding(index: KeyIndex, side: Side, near: Tensor, distances: Tensor) -> Tensor:
    """(cells,): bound on the relative rounding of the near entries of each query cell.

    Points of the other cells are seen from the origin of the query cell: |z| + |w| <= own radius + distance + radius.
    Where that is safe, only pairs within the kernel's reach count, for which |w| <= |z| + reach.
    """
    kernel, frame, d = index.frame.kernel, index.frame, side.points.shape[1]
    span = torch.where(near, distances + index.keys.radius, 0.0).amax(1)
    reach = math.sqrt(-2.0 * kernel.floor(frame.dtype))
    out = torch.zeros_like(side.radius)
    for a, (own, other) in enumerate(zip(side.radius.tolist(), span.tolist(), strict=True)):
        whole = argument_error(own + other, d, frame)
        if whole <= 1.0:
            whole = min(whole, argument_error(2 * own + min(reach, other), d, frame))
        out[a] = kernel.change(whole)
    return out


def near_keys(index: KeyIndex, plan: Plan, a: int) -> Tensor:
    """Positions of the sorted keys in the near blocks of query cell a; of a symmetric plan those from a onwards."""
    near = plan.near[a].nonzero()[:, 0]
    if plan.symmetric:
        near = near[near >= a]
    begin, count = index.keys.start[near], index.count[near]
    return torch.arange(int(count.sum())) + torch.repeat_interleave(begin - count.cumsum(0) + count, count)


class NearTiles:
    """Tiles of the near blocks, one query cell at a time, as seen from that cell's origin."""

    def __init__(self, index: KeyIndex, plan: Plan, slope: bool = False) -> None:
        self.index, self.plan = index, plan
        self.tiles = Tiles(index.frame._replace(scale=1.0), slope)  # coordinates are scaled already
        self.label = index.keys.label

    def rows(self, lo: int, hi: int) -> Tensor:
        return swapped(self.plan.queries.rows[lo:hi])

    def keys(self, part: Tensor, offsets: Tensor) -> Tensor:
        """Augmented keys at these positions, seen from the origin whose `offsets` are given."""
        w = self.index.keys.rows.index_select(0, part)
        w[:, :-2] += offsets.index_select(0, self.label[part])
        w[:, -1] = norms(w[:, :-2]).square_().mul_(-0.5)
        return w

    def __call__(self, z: Tensor, w: Tensor) -> Tensor:
        return self.tiles(z, w)
