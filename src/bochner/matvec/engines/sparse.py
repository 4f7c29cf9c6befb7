"""Sparse: the near entries that matter, evaluated once and kept as a sparse matrix.

Most near pairs are negligible. Entries are dropped from the smallest upwards while no row and no column loses more
than its share of eps, which is known when the matrix is built: with what the plan skips it bounds the error of every
product, for every x (Schur's test, as in `plan`). Far cells, where a plan has them, are kept as a second sparse matrix.
Strictly linear, repeatable, and exactly symmetric: of a symmetric matrix the entries above the diagonal are kept once
and used on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..._checks import BochnerError
from ..._progress import track
from ..budget import Budget, first_threshold
from ..csr import BYTES, CompressedRows, RowWriter, numpy_dtype
from ..index import KeyIndex
from ..plan import NearTiles, Plan
from ..tiles import ROWS, swapped
from .base import Applied, Engine
from .cells import CellsEngine

TOTAL_SHARE = 0.95  # of eps, for what is skipped and what is dropped together
FAR_SHARE = 0.05  # of eps, for the smallest far cells
ENTRIES = 1 << 18  # of a tile
PROBED_CELLS = 48  # whose tiles say at which size entries can be dropped


class TooLarge(BochnerError):
    """The kept entries do not fit into the memory allowed."""


class SparseEngine(Engine):
    name, linear = "sparse", True

    def __init__(self, index: KeyIndex, plan: Plan, eps: float, memory: int, progress: bool = False) -> None:
        self.index, self.plan, self.dtype = index, plan, index.frame.dtype
        limit = TOTAL_SHARE * eps - (plan.skipped_norm if plan.certain else 0.5 * eps)
        n, s = plan.queries.rows.shape[0], index.keys.rows.shape[0]
        self.lost = Budget(n, s, limit, plan.symmetric, self.dtype)
        self.near = self._collect(memory, progress)
        self.mirror = self.near.transposed() if plan.symmetric else None
        self.far = self._collect_far(eps) if plan.beta > 0 else None

    @property
    def certain(self) -> bool:  # type: ignore[override]
        return self.plan.certain

    @property
    def entries(self) -> int:
        """Kept entries of the matrix, mirror images not counted."""
        return sum(m.entries for m in (self.near, self.far) if m is not None)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Where each query, and each key, of the caller's order is in the sorted one."""
        queries = self.plan.queries.order.argsort()
        return queries, queries if self.plan.symmetric else self.index.keys.order.argsort()

    @cached_property
    def _backward(self) -> tuple[CompressedRows, CompressedRows | None]:
        """The transposes of both matrices; of a symmetric near matrix it is there from the beginning."""
        return self.mirror or self.near.transposed(), None if self.far is None else self.far.transposed()

    # ---- building ---------------------------------------------------------------------------------------------------

    def _tiles(self, near: NearTiles, a: int) -> list[tuple[int, int, Tensor, Tensor]]:
        """Rows lo:hi of cell a against all their near keys: (lo, hi, positions of the keys, the keys)."""
        lo, hi = int(self.plan.queries.start[a]), int(self.plan.queries.start[a + 1])
        out = []
        for position, w in near.keys(a, 1 << 62) if lo < hi else ():
            step = max(16, min(ROWS, ENTRIES // position.numel()))
            out += [(i, min(i + step, hi), position, w) for i in range(lo, hi, step)]
        return out

    def _probed_rows(self, near: NearTiles) -> Iterator[Tensor]:
        """A few rows of some cells against all their near keys, sorted upwards."""
        filled = (self.plan.queries.count > 0).nonzero()[:, 0]
        chosen = filled[torch.linspace(0, filled.numel() - 1, min(PROBED_CELLS, filled.numel())).long()]
        for a in chosen.tolist():
            for lo, hi, _, w in self._tiles(near, a)[:1]:
                yield near(near.rows(lo, min(hi, lo + 16)), w).sort(1).values

    def _collect(self, memory: int, progress: bool) -> CompressedRows:
        plan, index = self.plan, self.index
        near = NearTiles(index, plan)
        tau, fraction = first_threshold(list(self._probed_rows(near)), self.lost.limit)
        copies = 2 if plan.symmetric else 1  # a symmetric matrix is kept with its mirror image
        expected = fraction * plan.pairs(index)
        if copies * BYTES * expected > 2 * memory:
            raise TooLarge(_too_large(copies * BYTES * expected, memory))
        written = RowWriter(numpy_dtype(self.dtype), int(2 * expected))
        cells = range(index.cells)
        for a in track(cells, len(cells), "keeping near entries", progress):
            tiles = self._tiles(near, a)
            if not tiles:
                written.skip(int(plan.queries.count[a]))
            for lo, hi, position, w in tiles:
                tile = near(near.rows(lo, hi), w)
                if plan.symmetric:  # ones on the diagonal, and below it what is kept above
                    own = int(plan.queries.start[a])
                    tile[:, : int(plan.queries.start[a + 1]) - own].triu_(lo - own + 1)
                dropped = self.lost.drop(tile, lo, position, tau)
                keep = np.not_equal(tile.numpy(), dropped.numpy())
                written.add(tile.numpy(), keep, position.to(torch.int32).numpy())
            if copies * BYTES * written.size > memory:
                raise TooLarge(_too_large(copies * BYTES * max(expected, written.size), memory))
        return written.matrix((self.lost.rows.numel(), self.lost.columns.numel()))

    def _collect_far(self, eps: float) -> CompressedRows:
        """beta times the blurred kernel of far cells, (n, cells), without the smallest."""
        plan, index = self.plan, self.index
        n = plan.queries.rows.shape[0]
        written = RowWriter(numpy_dtype(self.dtype), n)
        names = np.arange(index.cells, dtype=np.int32)
        share = 0.5 if plan.symmetric else 1.0
        smallest = (FAR_SHARE * eps / index.cells / index.count.to(self.dtype)).numpy()
        for a, (lo, hi) in enumerate(plan.queries.ranges()):
            for i in range(lo, hi, ROWS):
                far = index.far(swapped(plan.queries.rows[i : min(i + ROWS, hi)]), a).mul_(plan.beta * share)
                far[:, plan.near[a]] = 0.0
                written.add(far.numpy(), far.numpy() > smallest, names)
        return written.matrix((n, index.cells))

    # ---- products ---------------------------------------------------------------------------------------------------

    def apply(self, x: Tensor, adjoint: bool = False) -> Applied:
        keys, queries = self.index.keys.order, self.plan.queries.order
        back = adjoint and not self.plan.symmetric
        inward, outward = (queries, self._places[1]) if back else (keys, self._places[0])
        y = self._multiply(_permuted(x.to(self.dtype), inward), back)
        return Applied(_permuted(y, outward), self.entries)

    def slope(self, x: Tensor) -> Tensor | None:
        return CellsEngine(self.index, self.plan).slope(x)

    def _multiply(self, x: Tensor, back: bool) -> Tensor:
        """The product with sorted x."""
        y = self._backward[0] @ x if back else self.near @ x
        if self.mirror is not None:
            y += self.mirror @ x
            y += x
        if self.far is not None:
            if not back:
                y += self.far @ self.index.keys.cell_sums(x)
            if (back or self.plan.symmetric) and (transpose := self._backward[1]) is not None:
                y += (transpose @ x)[self.index.keys.label]
        return y

    def error_bound(self, x: Tensor, adjoint: bool = False) -> tuple[Tensor, int]:
        if not self.certain:
            return super().error_bound(x, adjoint)
        applied = self.apply(x.abs(), adjoint)
        unit = torch.finfo(self.dtype).eps / 2
        terms = self.near.longest_row()
        columns = int(np.bincount(self.near.columns, minlength=1).max())
        terms = terms + columns + 1 if self.plan.symmetric else columns if adjoint else terms
        relative = float(self.plan.rounding.max()) + unit * (terms + 8)
        x = x.double()
        rounding = relative * applied.value.double().norm(dim=0)
        floor = self.index.frame.kernel.floor_value(self.dtype) * x.abs().sum(0) * math.sqrt(applied.value.shape[0])
        return self.norm_bound * x.norm(dim=0) + rounding + floor, applied.pairs

    @property
    def norm_bound(self) -> float:
        """Bound on |E|_2 of what is skipped and dropped; inf if the plan is not certain."""
        return self.plan.skipped_norm + self.lost.norm

    def describe(self) -> str:
        n, s = self.near.shape
        line = (
            f"{self.entries} entries kept, {self.entries / (n * s):.2%} of the matrix, {BYTES * self.entries >> 20} MB."
        )
        if self.certain:
            line += f" What is left out is at most {self.norm_bound:.2g} |x|, for every x."
        return line


def _permuted(x: Tensor, order: Tensor) -> Tensor:
    """The rows of x (n, r) in this order; single columns as vectors, which torch permutes four times faster."""
    return x[:, 0].index_select(0, order)[:, None] if x.shape[1] == 1 else x.index_select(0, order)


def _too_large(expected: float, memory: int) -> str:
    return (
        f"The near entries of this kernel would take about {expected / 2**30:.2g} GB while they are collected, more "
        f"than 'memory' allows ({memory / 2**30:.2g} GB); raise 'memory', or use method='cells'."
    )
