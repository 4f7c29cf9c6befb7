"""Cells: near blocks pair by pair, and far cells as one blurred point each where the plan asks for them.

Every far cell c, of weight X_c = sum of x over the cell, acts as `beta X_c` times the blurred kernel of `index`. Which
blocks are near, and beta, are chosen once per operator, whatever x will be: the product is linear and repeatable.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ...._progress import track
from ..index import KeyIndex, reframe, sort_side
from ..measured import Ranking
from ..plan import Between, NearTiles, Plan, near_reach, near_rounding, nearest_to_middle
from ..tiles import ROWS, norms, swapped, times
from .base import Applied, Engine

NEAR_KEYS = 2048  # keys gathered at once for one query cell


class CellsEngine(Engine):
    name = "cells"

    def __init__(self, index: KeyIndex, plan: Plan) -> None:
        self.index, self.plan, self.dtype = index, plan, index.frame.dtype
        self.rough = plan.rough

    @property
    def certain(self) -> bool:  # type: ignore[override]
        return self.plan.certain

    # ---- products ---------------------------------------------------------------------------------------------------

    def _orders(self, adjoint: bool) -> tuple[Tensor, Tensor]:
        """The orders of what comes in and of what goes out."""
        keys, queries = self.index.keys.order, self.plan.queries.order
        return (queries, keys) if adjoint and not self.plan.symmetric else (keys, queries)

    def apply(self, x: Tensor, adjoint: bool = False) -> Applied:
        return self._run(self.plan, x, adjoint)

    def _run(self, plan: Plan, x: Tensor, adjoint: bool) -> Applied:
        """Cost: `plan.pairs` near pairs and, if beta > 0, n cells far pairs."""
        inward, outward = self._orders(adjoint)
        x = x.to(self.dtype)[inward]
        y = x.new_zeros(outward.numel(), x.shape[1])
        pairs, far, scores = 0, None, []
        if plan.beta > 0:
            missed = self._far(plan, x, y, adjoint)
            pairs = plan.queries.rows.shape[0] * self.index.cells
            far = torch.empty_like(y).index_copy_(0, outward, y)
            if missed is not None:
                count = plan.queries.count
                by_cell = torch.repeat_interleave(count.clamp_min(1).to(x.dtype).rsqrt(), count)
                # Squared, `by_cell` makes every cell equally likely: errors cluster.
                scores = [torch.empty_like(s).index_copy_(0, outward, s) for s in (*missed.unbind(1), by_cell)]
        near = NearTiles(self.index, plan)
        blocks = range(self.index.cells)
        for a in track(blocks, len(blocks), "near cells", self.progress):
            self._near(plan, near, x, y, a, adjoint)
        value = torch.empty_like(y).index_copy_(0, outward, y)
        return Applied(value, pairs + near.tiles.pairs, scores, far)

    def _far(self, plan: Plan, x: Tensor, y: Tensor, adjoint: bool) -> Tensor | None:
        """Add the far field to y, all in sorted order; two scores per row of what was not evaluated.

        The far field F of a symmetric plan is (F + F')/2.
        """
        forward, backward = not adjoint or plan.symmetric, adjoint or plan.symmetric
        r = x.shape[1]
        missed = x.new_zeros(plan.queries.rows.shape[0], 2) if forward else None
        weights = self.index.keys.cell_sums(torch.cat([x, x.abs().amax(1, True)], 1)) if forward else None
        collected = x.new_zeros(self.index.cells, r)
        for a, (lo, hi) in enumerate(plan.queries.ranges()):
            near = plan.near[a].nonzero()[:, 0]
            for i in range(lo, hi, ROWS):
                j = min(i + ROWS, hi)
                far = self.index.far(swapped(plan.queries.rows[i:j]), a).index_fill_(1, near, 0.0)
                if backward:
                    collected.addmm_(far.T, x[i:j])
                if weights is not None and missed is not None:
                    both = far @ weights
                    y[i:j] += both[:, :r]
                    missed[i:j, 0] = both[:, r]
                    missed[i:j, 1] = far.sqrt_().sqrt_() @ weights[:, r]  # a flatter score: the model may be too sure
        if backward:
            y += collected[self.index.keys.label]
        y *= plan.beta * (0.5 if plan.symmetric else 1.0)
        return missed

    def _near(self, plan: Plan, near: NearTiles, x: Tensor, y: Tensor, a: int, adjoint: bool) -> None:
        """Add the near blocks of query cell `a`; a symmetric block serves its mirror image too."""
        lo, hi = int(plan.queries.start[a]), int(plan.queries.start[a + 1])
        if lo == hi:
            return
        rows = [(i, min(i + ROWS, hi)) for i in range(lo, hi, ROWS)]
        queries = [near.rows(i, j) for i, j in rows]
        for part, w in near.keys(a, NEAR_KEYS):
            for (i, j), z in zip(rows, queries, strict=True):
                tile = near(z, w)
                if adjoint and not plan.symmetric:
                    y.index_add_(0, part, tile.T @ x[i:j])
                    continue
                y[i:j].addmm_(tile, x.index_select(0, part))
                if plan.symmetric:
                    inside = int((part < hi).sum())  # keys of cell a itself come first: their block is its own mirror
                    if inside < part.numel():
                        y.index_add_(0, part[inside:], tile[:, inside:].T @ x[i:j])

    def slope(self, x: Tensor) -> Tensor | None:
        if not self.certain:
            return None
        inward, outward = self._orders(False)
        x = x.to(self.dtype)[inward]
        y = x.new_zeros(outward.numel(), x.shape[1])
        near = NearTiles(self.index, self.plan, slope=True)
        for a in range(self.index.cells):
            self._near(self.plan, near, x, y, a, False)
        return torch.empty_like(y).index_copy_(0, outward, y)

    # ---- bounds -----------------------------------------------------------------------------------------------------

    def _rounding(self, absolute: Tensor, adjoint: bool) -> Tensor:
        """Rounding of each row, given the near part of K|x| in the caller's order, (n, r)."""
        plan, by_cell = self.plan, self.plan.rounding
        side = plan.queries
        if adjoint or plan.symmetric:  # a block is evaluated from the side of its query cell, or of its first cell
            by_cell = torch.where(plan.near, by_cell[:, None], 0.0).amax(0)
            side = self.index.keys
        relative = torch.empty_like(absolute[:, 0]).index_copy_(0, side.order, by_cell[side.label])
        return (relative.double() + self.summation)[:, None] * absolute.double()

    @property
    def summation(self) -> float:
        """Bound on the relative rounding of x, of a profile and of sums over the near entries of a row, or column."""
        keys, queries = self.plan.terms(self.index), 0
        if not self.plan.symmetric:
            queries = int((self.plan.near.T.double() @ self.plan.queries.count.double()).max())
        terms = max(keys, queries)
        # Either entry by entry, or within a block and then the blocks, of which a cell has several.
        blocks = self.index.cells + math.ceil(
            max(self.plan.queries.rows.shape[0], self.index.keys.rows.shape[0]) / ROWS
        )
        return torch.finfo(self.dtype).eps / 2 * (min(terms, NEAR_KEYS + blocks) + 8)

    def settle(self, limit: float) -> bool:
        """Bound what rounding takes from the products of a certain plan, for every x; whether it is within `limit`.

        The error of an entry is at most c (|z| + |w|)^2 K, c that of the query cell; row and column sums of it give the
        norm (Schur's test). Cost: about two products.
        """
        plan, index = self.plan, self.index
        rough = (float(plan.rounding.max()) + self.summation) * plan.near_norm
        if rough <= limit:  # known from coarser arithmetic
            plan.rounded = rough
            return True
        rows, columns = self._near_sums()
        plan.mean_row_sum = float(rows[:, 0].mean())
        margin = (1.0 + float(plan.rounding.max())) * (1.0 + 2.0 * self.summation)  # of the sums themselves
        lost = [float((side[:, 1] + self.summation * side[:, 0]).max()) for side in (rows, columns)]
        plan.near_norm = margin * math.sqrt(float(rows[:, 0].max()) * float(columns[:, 0].max()))
        floor = index.frame.kernel.floor_value(self.dtype) * math.sqrt(rows.shape[0] * columns.shape[0])
        plan.rounded = margin * math.sqrt(lost[0] * lost[1]) + floor
        return plan.rounded <= limit

    def _near_sums(self) -> tuple[Tensor, Tensor]:
        """Of near rows (n, 2) and columns (s, 2), sorted: sums of entries, and of bounds on their errors."""
        plan, index = self.plan, self.index
        rows = torch.zeros(plan.queries.rows.shape[0], 2, dtype=torch.float64)
        columns = rows if plan.symmetric else torch.zeros(index.keys.rows.shape[0], 2, dtype=torch.float64)
        reach = near_reach(index, plan.queries, plan.near, index.distances()).clamp_min(1e-30)
        near, convex = NearTiles(index, plan), index.frame.kernel.convex
        for a, (lo, hi) in enumerate(plan.queries.ranges()):
            # Where the change is not convex, half the error of an argument does more than half the harm.
            slope = float(plan.rounding[a]) / (float(reach[a]) ** 2 if convex else 1.0)
            for part, w in near.keys(a, NEAR_KEYS) if lo < hi else ():
                inside = int((part < hi).sum()) if plan.symmetric else 0  # this block is its own mirror image
                for i in range(lo, hi, ROWS):
                    z = near.rows(i, min(i + ROWS, hi))
                    tile = near(z, w)
                    long, other = (norms(side[:, :-2]) for side in (z, w))
                    rows[i : i + z.shape[0]] += _sums(tile, long, other, slope, convex)
                    if inside < part.numel():
                        mirror = _sums(tile[:, inside:].T, other[inside:], long, slope, convex)
                        columns.index_add_(0, part[inside:], mirror)
        return rows, columns

    def error_bound(self, x: Tensor, adjoint: bool = False) -> tuple[Tensor, int]:
        if not self.certain:
            return super().error_bound(x, adjoint)
        applied = self.apply(x.abs(), adjoint)
        skipped = self.plan.columns if adjoint else self.plan.rows
        assert skipped is not None
        x = x.double()
        left_out = torch.minimum(
            self.plan.skipped_norm * x.norm(dim=0), float(skipped.double().norm()) * x.abs().amax(0)
        )
        floor = self.index.frame.kernel.floor_value(self.dtype) * x.abs().sum(0) * math.sqrt(applied.value.shape[0])
        return left_out + self._rounding(applied.value, adjoint).norm(dim=0) + floor, applied.pairs

    def row_bound(self, x: Tensor) -> Tensor | None:
        """What each row leaves out at most, the far field that stands for it, and rounding; for one column (s, 1)."""
        plan, index = self.plan, self.index
        applied = self.apply(x.abs())
        weight = index.keys.cell_sums(x.abs().to(self.dtype)[index.keys.order])[:, 0]
        distances = index.distances()
        opposite = nearest_to_middle(index, index.keys, distances)
        bound = x.new_zeros(plan.queries.rows.shape[0], dtype=self.dtype)
        for a, (lo, hi) in enumerate(plan.queries.ranges()):
            skipped = torch.where(plan.near[a], 0.0, weight)
            own = float(plan.queries.radius[a])
            between = Between(a, None, distances[a], opposite[:, a], index.keys.radius, own)
            for i in range(lo, hi, ROWS):
                rows = plan.queries.rows[i : min(i + ROWS, hi)]
                bound[i : i + rows.shape[0]] = between.kernel_bound(index, rows) @ skipped
        far = applied.far if applied.far is not None else torch.zeros_like(applied.value)
        out = torch.empty_like(bound).index_copy_(0, plan.queries.order, bound).double() * (1 + 1e-5)
        floor = index.frame.kernel.floor_value(self.dtype) * float(x.abs().sum())
        return out + far[:, 0].double() + self._rounding(applied.value, False)[:, 0] + floor

    def precise(self) -> CellsEngine | None:
        return None if self.dtype == torch.float64 else self.refined("float64")

    def refined(self, arithmetic: str) -> CellsEngine:
        """The same plan in another arithmetic."""
        index = reframe(self.index, arithmetic)
        side, plan = index.keys, self.plan
        if not plan.symmetric:
            side = sort_side(index.frame, plan.queries.points, plan.queries.caller_label, index.origin)
        rounding = near_rounding(index, side, plan.near, index.distances())
        rows, columns = (None if t is None else t.to(index.frame.dtype) for t in (plan.rows, plan.columns))
        score = None if plan.score is None else plan.score.to(index.frame.dtype)
        return CellsEngine(
            index, replace(plan, queries=side, rounding=rounding, rows=rows, columns=columns, score=score)
        )

    # ---- repairs ----------------------------------------------------------------------------------------------------

    def repair(self, x: Tensor, fraction: float) -> Applied | None:
        """More probes where this x has weight: blocks ranked by kernel mass times the energy of x in the cell."""
        plan = self.plan
        if plan.score is None:
            return None
        energy = self.index.keys.cell_sums(x[self.index.keys.order].square().sum(1, True))[:, 0] / self.index.count
        score = torch.where(torch.isfinite(plan.score), plan.score * energy, plan.score)
        cost = plan.queries.count.double()[:, None] * self.index.count.double()
        near = Ranking(score, cost).near(fraction) | plan.near
        near &= energy > 0  # cells on which x vanishes contribute nothing
        return self._run(replace(plan, near=near, symmetric=False), x, adjoint=False)

    def describe(self) -> str:
        n, s = self.plan.queries.rows.shape[0], self.index.keys.rows.shape[0]
        near = self.plan.pairs(self.index)
        far = n * self.index.cells if self.plan.beta > 0 else 0
        line = (
            f"{self.index.cells} cells; a product evaluates {near} near and {far} far pairs, "
            f"{(near + far) / (n * s):.2%} of the matrix."
        )
        if self.certain:
            line += f" What is skipped is at most {self.plan.skipped_norm:.2g} |x|, for every x."
        return line


def _sums(tile: Tensor, own: Tensor, other: Tensor, slope: float, convex: bool) -> Tensor:
    """(rows, 2): sums of a tile over its columns, and of slope (own + other)^2 times it, or of slope times it."""
    if not convex:
        total = tile.sum(1).double()
        return torch.stack([total, slope * total], 1)
    zero, one, two = times(tile, torch.stack([torch.ones_like(other), other, other.square()], 1)).double().unbind(1)
    own = own.double()
    return torch.stack([zero, slope * (own.square() * zero + 2.0 * own * one + two)], 1)
