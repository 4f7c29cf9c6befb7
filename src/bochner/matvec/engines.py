"""The four ways to multiply, behind one small interface used by `KernelOperator`.

An engine holds everything drawn or measured in advance and applies it to x (s, r), or the adjoint to x (n, r).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from . import cells, paper
from .cells import KeyIndex, Plan
from .exact import Frame, Tiles, exact_product, exact_symmetric, left, right
from .features import feature_product
from .planning import Planned, Ranking


@dataclass
class Applied:
    """A product, the scores from which hold-out rows are drawn, and its cost."""

    value: Tensor
    pairs: int
    scores: list[Tensor] = field(default_factory=list)
    far: Tensor | None = None
    plan: Plan | None = None


class Engine:
    """`apply` multiplies, with a bar if `progress`; `symmetric` engines are their own adjoint."""

    name = ""
    exact = False
    progress = False

    def apply(self, x: Tensor, adjoint: bool = False) -> Applied:
        raise NotImplementedError

    def row_bound(self, x: Tensor, applied: Applied) -> Tensor | None:
        """A deterministic bound on the error of each row for one column of x, or None."""
        return None

    def repair(self, x: Tensor, fraction: float) -> Applied | None:
        """A better product for this x, spending about `fraction` of all pairs, or None: go exact."""
        return None


class ExactEngine(Engine):
    name, exact = "exact", True

    def __init__(self, frame: Frame, z: Tensor, w: Tensor, symmetric: bool) -> None:
        self.frame, self.symmetric = frame, symmetric
        self.z, self.w = left(z), right(w)

    def apply(self, x: Tensor, adjoint: bool = False) -> Applied:
        tiles = Tiles(self.frame)
        if adjoint and not self.symmetric:
            d = self.z.shape[1] - 2
            value = exact_product(tiles, left(self.w[:, :d]), right(self.z[:, :d]), x, self.progress)
        else:
            multiply = exact_symmetric if self.symmetric else exact_product
            value = multiply(tiles, self.z, self.w, x, self.progress)
        return Applied(value, tiles.pairs)


class CellsEngine(Engine):
    name = "cells"

    def __init__(self, index: KeyIndex, planned: Planned) -> None:
        self.index, self.planned = index, planned

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    def _run(self, plan: Plan, x: Tensor, adjoint: bool) -> Applied:
        key_side, query_side = self.index.order, plan.order
        if adjoint and not plan.symmetric:
            key_side, query_side = query_side, key_side
        out = cells.product(self.index, plan, x[key_side], adjoint, self.progress)
        value, far = torch.empty_like(out.value), torch.empty_like(out.far)
        value[query_side], far[query_side] = out.value, out.far
        scores = []
        if not adjoint or plan.symmetric:
            missed = torch.empty_like(out.missed)
            missed[query_side] = out.missed
            count = plan.start.diff()
            by_cell = torch.empty_like(missed[:, 0])  # squared: every cell equally likely, since errors cluster
            by_cell[query_side] = torch.repeat_interleave(count.clamp_min(1).to(x.dtype).rsqrt(), count)
            scores = [missed[:, 0], missed[:, 1], by_cell]
        return Applied(value, out.pairs, scores, far, plan)

    def apply(self, x: Tensor, adjoint: bool = False) -> Applied:
        return self._run(self.plan, x, adjoint)

    def row_bound(self, x: Tensor, applied: Applied) -> Tensor | None:
        if applied.far is None or applied.plan is None:
            return None
        order = applied.plan.order
        bound = torch.empty_like(applied.far[:, 0])
        bound[order] = cells.deterministic_bound(
            self.index, applied.plan, x[self.index.order], applied.far[:, 0][order]
        )
        return bound

    def repair(self, x: Tensor, fraction: float) -> Applied | None:
        """More probes where this x has weight: blocks ranked by kernel mass times the energy of x in the cell."""
        energy = self.index.cell_sums(x[self.index.order].square().sum(1, True))[:, 0] / self.index.count
        score = self.planned.score
        score = torch.where(torch.isfinite(score), score * energy, score)
        cost = self.plan.start.diff().double()[:, None] * self.index.count.double()
        near = Ranking(score, cost).near(fraction) | self.plan.near
        near &= energy > 0  # cells on which x vanishes contribute nothing
        return self._run(replace(self.plan, near=near, symmetric=False), x, adjoint=False)


class PaperEngine(Engine):
    name = "paper"

    def __init__(
        self, frame: Frame, z: Tensor, w: Tensor, eps: float, constants: paper.Constants, seed: int, symmetric: bool
    ) -> None:
        self.frame, self.z, self.w, self.eps = frame, z, w, eps
        self.constants, self.seed, self.symmetric = constants, seed, symmetric
        self.heavy = paper.find_heavy(z, w, constants, torch.Generator().manual_seed(seed))
        self._adjoint_heavy: paper.Heavy | None = None

    def apply(self, x: Tensor, adjoint: bool = False) -> Applied:
        z, w, heavy = self.z, self.w, self.heavy
        if adjoint and not self.symmetric:
            z, w = w, z
            if self._adjoint_heavy is None:
                self._adjoint_heavy = paper.find_heavy(z, w, self.constants, torch.Generator().manual_seed(self.seed))
            heavy = self._adjoint_heavy
        columns, pairs = [], 0
        for column in x.unbind(1):
            generator = torch.Generator().manual_seed(self.seed + 1)
            y, spent = paper.approximate_product(self.frame, z, w, column, heavy, self.eps, self.constants, generator)
            columns.append(y)
            pairs += spent
        return Applied(torch.stack(columns, 1), pairs)


class FeaturesEngine(Engine):
    name = "features"

    def __init__(self, z: Tensor, w: Tensor, omega: Tensor) -> None:
        self.z, self.w, self.omega = z, w, omega

    def apply(self, x: Tensor, adjoint: bool = False) -> Applied:
        z, w = (self.w, self.z) if adjoint else (self.z, self.w)
        # No kernel entry is evaluated; a feature pair costs about as much as one.
        return Applied(feature_product(z, w, x, self.omega), math.ceil((z.shape[0] + w.shape[0]) * self.omega.shape[1]))
