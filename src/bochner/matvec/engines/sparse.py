"""Sparse: the near entries that matter, evaluated once and kept as a sparse matrix.

Most near pairs are negligible. Entries are dropped from the smallest upwards while no row and no column loses more
than its share of eps, which is known when the matrix is built: with what the plan skips it bounds the error of every
product, for every x (Schur's test, as in `plan`). Far cells, where a plan has them, are kept as a second sparse matrix.
Strictly linear, repeatable, and exactly symmetric: of a symmetric matrix the entries above the diagonal are kept once
and used on both sides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from ..._checks import BochnerError
from ..._progress import track
from ..index import KeyIndex
from ..plan import NearTiles, Plan
from ..tiles import ROWS, swapped
from .base import Applied, Engine
from .cells import CellsEngine

TOTAL_SHARE = 0.9  # of eps, for what is skipped and what is dropped together
FAR_SHARE = 0.05  # of eps, for the smallest far cells
ENTRIES = 1 << 18  # of a tile
PROBED_CELLS = 48  # whose tiles say at which size entries can be dropped
BYTES = 8  # of an entry: a float and the position of its column


class TooLarge(BochnerError):
    """The kept entries do not fit into the memory allowed."""


@dataclass
class Collected:
    """Rows of a sparse matrix as they come: entries and columns of consecutive rows."""

    values: list[np.ndarray]
    columns: list[np.ndarray]
    counts: list[np.ndarray]

    def add(self, tile: Tensor, keep: Tensor, positions: np.ndarray) -> int:
        mask = keep.numpy()
        where, count = np.flatnonzero(mask), np.count_nonzero(mask, axis=1)
        self.values.append(tile.numpy().reshape(-1)[where])
        where -= np.repeat(np.arange(mask.shape[0]) * mask.shape[1], count)
        self.columns.append(positions[where])
        self.counts.append(count)
        return where.size

    def matrix(self, shape: tuple[int, int]) -> sparse.csr_array:
        start = np.zeros(shape[0] + 1, dtype=np.int64)
        np.cumsum(np.concatenate(self.counts), out=start[1:])
        columns = np.concatenate(self.columns)
        self.columns.clear()
        values = np.concatenate(self.values)
        self.values.clear()
        kind = np.int32 if start[-1] < 2**31 else np.int64
        return sparse.csr_array((values, columns.astype(kind, copy=False), start.astype(kind)), shape=shape)


class SparseEngine(Engine):
    name, linear = "sparse", True

    def __init__(self, index: KeyIndex, plan: Plan, eps: float, memory: int, progress: bool = False) -> None:
        self.index, self.plan, self.dtype = index, plan, index.frame.dtype
        self.budget = TOTAL_SHARE * eps - (plan.skipped_norm if plan.certain else 0.5 * eps)
        n, s = plan.queries.rows.shape[0], index.keys.rows.shape[0]
        self.lost_rows, self.lost_columns = torch.zeros(n, dtype=self.dtype), torch.zeros(s, dtype=self.dtype)
        self.near = self._collect(memory, progress)
        self.far = self._collect_far(eps) if plan.beta > 0 else None

    @property
    def certain(self) -> bool:  # type: ignore[override]
        return self.plan.certain

    @property
    def entries(self) -> int:
        """Kept entries of the matrix, mirror images not counted."""
        return sum(m.nnz for m in (self.near, self.far) if m is not None)

    # ---- building ---------------------------------------------------------------------------------------------------

    def _tiles(self, near: NearTiles, a: int) -> list[tuple[int, int, Tensor, Tensor]]:
        """Rows lo:hi of cell a against all their near keys: (lo, hi, positions of the keys, the keys)."""
        lo, hi = int(self.plan.queries.start[a]), int(self.plan.queries.start[a + 1])
        out = []
        for position, w in near.keys(a, 1 << 62) if lo < hi else ():
            step = max(16, min(ROWS, ENTRIES // position.numel()))
            out += [(i, min(i + step, hi), position, w) for i in range(lo, hi, step)]
        return out

    def _first_threshold(self, near: NearTiles) -> tuple[float, float]:
        """Entries below this can be dropped from an ordinary row; and the kept fraction of the near pairs."""
        filled = (self.plan.queries.count > 0).nonzero()[:, 0]
        chosen = filled[torch.linspace(0, filled.numel() - 1, min(PROBED_CELLS, filled.numel())).long()]
        taus, kept, seen = [], 0, 0
        for a in chosen.tolist():
            for lo, hi, _, w in self._tiles(near, a)[:1]:
                rows = near(near.rows(lo, min(hi, lo + 16)), w).sort(1).values
                index = (rows.cumsum(1) <= 0.25 * self.budget).sum(1).clamp_max(rows.shape[1] - 1)
                taus.append(rows.gather(1, index[:, None])[:, 0])
                kept, seen = kept + int((rows.shape[1] - index).sum()), seen + rows.numel()
        return float(torch.cat(taus).quantile(0.25)), kept / max(1, seen)

    def _collect(self, memory: int, progress: bool) -> sparse.csr_array:
        plan, index = self.plan, self.index
        near = NearTiles(index, plan)
        tau, fraction = self._first_threshold(near)
        expected = 2 * BYTES * fraction * plan.pairs(index)  # twice: parts and whole, for a moment
        if expected > 2 * memory:
            raise TooLarge(_too_large(expected, memory))
        collected, total, start = Collected([], [], []), 0, tau
        cells = range(index.cells)
        for a in track(cells, len(cells), "keeping near entries", progress):
            for lo, hi, position, w in self._tiles(near, a):
                tile = near(near.rows(lo, hi), w)
                if plan.symmetric:
                    self._upper(tile, lo, position)
                keep, start = self._threshold(tile, lo, hi, position, min(tau, 4 * start))
                total += collected.add(tile, keep, position.to(torch.int32).numpy())
            if 2 * BYTES * total > memory:
                raise TooLarge(_too_large(max(expected, 2 * BYTES * total), memory))
        return collected.matrix((self.lost_rows.numel(), self.lost_columns.numel()))

    def _upper(self, tile: Tensor, lo: int, position: Tensor) -> None:
        """Clear what is on and below the diagonal: ones, and what is kept above it."""
        inside = int((position < lo + tile.shape[0]).sum())
        below = position[:inside] <= torch.arange(lo, lo + tile.shape[0])[:, None]
        tile[:, :inside].masked_fill_(below, 0.0)

    def _threshold(self, tile: Tensor, lo: int, hi: int, position: Tensor, tau: float) -> tuple[Tensor, float]:
        """Which entries to keep: dropped ones must fit into what is left of their rows' and columns' budgets."""
        share = 0.5 * self.budget if self.plan.symmetric else self.budget
        room = share - self.lost_columns[position]
        while True:
            small = tile - torch.nn.functional.threshold(tile, tau, 0.0)
            rows, columns = small.sum(1), small.sum(0)
            if tau == 0.0 or (bool((rows <= share).all()) and bool((columns <= room).all())):
                break
            tau = tau / 4 if tau > 1e-30 else 0.0
        self.lost_rows[lo:hi] += rows
        self.lost_columns[position] += columns
        return tile > tau, tau

    def _collect_far(self, eps: float) -> sparse.csr_array:
        """beta times the blurred kernel of far cells, (n, cells), without the smallest."""
        plan, index = self.plan, self.index
        collected = Collected([], [], [])
        names = np.arange(index.cells, dtype=np.int32)
        share = 0.5 if plan.symmetric else 1.0
        smallest = FAR_SHARE * eps / index.cells / index.count.to(self.dtype)
        for a, (lo, hi) in enumerate(plan.queries.ranges()):
            for i in range(lo, hi, ROWS):
                far = index.far(swapped(plan.queries.rows[i : min(i + ROWS, hi)]), a).mul_(plan.beta * share)
                far[:, plan.near[a]] = 0.0
                collected.add(far, far > smallest, names)
        return collected.matrix((plan.queries.rows.shape[0], index.cells))

    # ---- products ---------------------------------------------------------------------------------------------------

    def apply(self, x: Tensor, adjoint: bool = False) -> Applied:
        keys, queries = self.index.keys.order, self.plan.queries.order
        back = adjoint and not self.plan.symmetric
        inward, outward = (queries, keys) if back else (keys, queries)
        sorted_x = x.to(self.dtype)[inward].numpy()
        y = self._multiply(sorted_x, back)
        value = torch.empty(y.shape, dtype=self.dtype).index_copy_(0, outward, torch.from_numpy(y))
        return Applied(value, self.entries)

    def slope(self, x: Tensor) -> Tensor | None:
        return CellsEngine(self.index, self.plan).slope(x)

    def _multiply(self, x: np.ndarray, back: bool) -> np.ndarray:
        y = self.near.T @ x if back else self.near @ x
        if self.plan.symmetric:
            y += self.near.T @ x
            y += x
        if self.far is not None:
            if not back:
                y += self.far @ self.index.keys.cell_sums(torch.from_numpy(x)).numpy()
            if back or self.plan.symmetric:
                y += (self.far.T @ x)[self.index.keys.label.numpy()]
        return y

    def error_bound(self, x: Tensor, adjoint: bool = False) -> tuple[Tensor, int]:
        if not self.certain:
            return super().error_bound(x, adjoint)
        applied = self.apply(x.abs(), adjoint)
        unit = torch.finfo(self.dtype).eps / 2
        terms = int(np.diff(self.near.indptr).max(initial=0))
        columns = int(np.bincount(self.near.indices, minlength=1).max())
        terms = terms + columns + 1 if self.plan.symmetric else columns if adjoint else terms
        relative = float(self.plan.rounding.max()) + unit * (terms + 8)
        x = x.double()
        rounding = relative * applied.value.double().norm(dim=0)
        floor = self.index.frame.kernel.floor_value(self.dtype) * x.abs().sum(0) * math.sqrt(applied.value.shape[0])
        return self.norm_bound * x.norm(dim=0) + rounding + floor, applied.pairs

    @property
    def norm_bound(self) -> float:
        """Bound on |E|_2 of what is skipped and dropped; inf if the plan is not certain."""
        if self.plan.symmetric:
            dropped = float((self.lost_rows + self.lost_columns).max())
        else:
            dropped = math.sqrt(float(self.lost_rows.max()) * float(self.lost_columns.max()))
        return self.plan.skipped_norm + dropped * (1 + 1e-4)

    def describe(self) -> str:
        n, s = self.near.shape
        line = (
            f"{self.entries} entries kept, {self.entries / (n * s):.2%} of the matrix, {BYTES * self.entries >> 20} MB."
        )
        if self.certain:
            line += f" What is left out is at most {self.norm_bound:.2g} |x|, for every x."
        return line


def _too_large(expected: float, memory: int) -> str:
    return (
        f"The near entries of this kernel would take about {expected / 2**30:.2g} GB while they are collected, more "
        f"than 'memory' allows ({memory / 2**30:.2g} GB); raise 'memory', or use method='cells'."
    )
