"""Cells: near blocks pair by pair, and far cells as one blurred point each where the plan asks for them.

Every far cell c, of weight X_c = sum of x over the cell, acts as `beta X_c` times the blurred kernel of `index`. Which
blocks are near, and beta, are chosen once per operator, whatever x will be: the product is linear and repeatable.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..._progress import track
from ..index import KeyIndex, reframe, sort_side
from ..measured import Ranking
from ..plan import Between, NearTiles, Plan, near_rounding, nearest_to_middle
from ..tiles import ROWS, swapped
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
        cell = self.plan.queries.label
        if adjoint and not self.plan.symmetric:
            relative = self.plan.rounding.max().expand(absolute.shape[0])
        else:
            relative = torch.empty_like(absolute[:, 0]).index_copy_(
                0, self.plan.queries.order, self.plan.rounding[cell]
            )
            if self.plan.symmetric:  # a block is evaluated from the side of its first cell
                relative = relative.clamp_min(float(self.plan.rounding.max()))
        unit = torch.finfo(self.dtype).eps / 2
        sums = unit * (NEAR_KEYS + math.ceil(self.index.keys.rows.shape[0] / NEAR_KEYS) + self.index.cells + 8)
        return (relative.double() + sums)[:, None] * absolute.double()

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
        if self.dtype == torch.float64:
            return None
        index = reframe(self.index, "float64")
        side = index.keys
        if not self.plan.symmetric:
            queries = self.plan.queries
            side = sort_side(index.frame, queries.points, queries.caller_label, index.origin)
        plan = replace(self.plan, queries=side, rounding=near_rounding(index, side, self.plan.near, index.distances()))
        return CellsEngine(index, plan)

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
