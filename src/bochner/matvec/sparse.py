"""Sparse: the near entries that matter, evaluated once in double precision and kept, for many products.

Most near entries are negligible. Those up to a threshold are dropped, and what every row and column loses is counted;
with what the cells skip that bounds the error of every product, for every x (Schur's test). Of a symmetric matrix the
entries above the diagonal are kept once and used on both sides.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from .._checks import BochnerError
from .cells import CellsEngine
from .engine import Certified, Engine
from .tiles import ROWS

SHARE = 0.95  # of eps, for what is skipped and what is dropped together, rounding not counted
ENTRIES = 1 << 22  # of a tile: the rows of a strip against all near keys of their cell
PROBED_CELLS, PROBED_ROWS = 48, 8  # that say at which size entries can be dropped
BYTES = 40  # of one kept entry while it is collected
ALL = 1 << 62


class TooLarge(BochnerError):
    """The kept entries do not fit into the memory allowed."""


class SparseEngine(Engine):
    """Keeps entries of a `CellsEngine`; strictly linear, and exactly symmetric if K is."""

    name = "sparse"

    def __init__(self, cells: CellsEngine, memory: int) -> None:
        self.cells, self.problem, self.symmetric = cells, cells.problem, cells.symmetric
        while cells.dtype == torch.float32 and cells.refine():
            pass
        limit = SHARE * self.problem.eps
        tau = self._threshold(limit - cells.near.norm)
        while True:
            self._collect(tau, memory)
            if self.left_out > limit:  # a row that was not probed loses more
                tau /= 4.0
            elif self.norm <= self.problem.eps or not cells.refine():
                break
        self.pairs = self.matrix.nnz

    def _threshold(self, limit: float) -> float:
        """What the most sensitive of some rows, against all their near keys, can drop."""
        cells, tiles = self.cells, self.cells.tiles()
        filled = (cells.queries.count > 0).nonzero()[:, 0]
        tau = 1.0
        for a in filled[torch.linspace(0, len(filled) - 1, min(PROBED_CELLS, len(filled))).long()].tolist():
            lo, hi = int(cells.queries.start[a]), int(cells.queries.start[a + 1])
            for _, w in cells.keys(a, ALL, False):
                table = tiles(cells.rows(lo, min(hi, lo + PROBED_ROWS)), w).sort(1).values
                place = (table.cumsum(1) <= 0.7 * limit).sum(1, keepdim=True).clamp_max(table.shape[1] - 1)
                tau = min(tau, float(table.gather(1, place).min()))
        return 0.99 * tau

    def _collect(self, tau: float, memory: int) -> None:
        """Evaluate the near tiles, keep what is above tau, and count what is not."""
        cells, tiles, (n, s) = self.cells, self.cells.tiles(), self.problem.shape
        queries, keys, skipped = cells.queries, cells.index.keys, cells.near.skipped
        rows = torch.zeros(n, dtype=torch.float64)  # what is dropped
        columns = rows if self.symmetric else torch.zeros(s, dtype=torch.float64)
        parts = [(np.zeros(0), np.zeros(0, np.int32), np.zeros(0, np.int32))]
        size = 0
        for a, (begin, end) in enumerate(queries.ranges()):
            for position, w in cells.keys(a, ALL, self.symmetric) if begin < end else ():
                step = max(16, min(ROWS, ENTRIES // position.numel()))
                for lo in range(begin, end, step):
                    hi = min(lo + step, end)
                    tile = tiles(cells.rows(lo, hi), w)
                    if self.symmetric:  # of its own cell, whose keys come first, only what is above the diagonal
                        tile[:, : end - begin].triu_(lo - begin + 1)
                    keep = (tile > tau).nonzero(as_tuple=True)
                    indices = ((keep[0] + lo).int().numpy(), position[keep[1]].int().numpy())
                    parts.append((tile[keep].numpy(), *indices))
                    tile[keep] = 0.0
                    rows[lo:hi] += tile.sum(1)
                    columns.index_add_(0, position, tile.sum(0))
                    size += len(keep[0])
            if BYTES * size > memory:
                raise TooLarge(
                    f"The near entries of this kernel take more than the {memory / 2**30:.2g} GB of "
                    "'KernelOperator.memory'; raise it, or use method='cells'."
                )
        values, i, j = (np.concatenate(part) for part in zip(*parts, strict=True))
        self.matrix = sparse.csr_array((values, (i, j)), shape=(n, s))
        self.rows = rows + (skipped @ keys.count.double())[queries.sorted_label]
        self.columns = columns + (skipped.T @ queries.count.double())[keys.sorted_label]
        self.left_out = math.sqrt(float(self.rows.max()) * float(self.columns.max()))
        self._round()

    def _round(self) -> None:
        """Bound what rounding takes from any x, from the sums of the kept entries."""
        by_row, by_column, absolute = self.cells._relative()
        (n, s), unit = self.problem.shape, torch.finfo(torch.float64).eps / 2
        longest = max(int(np.diff(self.matrix.indptr).max()), int(np.bincount(self.matrix.indices, minlength=1).max()))
        self.relative = float(torch.maximum(by_row.max(), by_column.max())) + unit * (2 * longest + 8)
        sums = [float(self._multiply(np.ones((size, 1)), back).max()) for size, back in ((s, False), (n, True))]
        self.rounded = self.relative * (1.0 + 2.0 * self.relative) * (math.sqrt(sums[0] * sums[1]) + self.left_out)
        self.rounded += absolute * math.sqrt(n * s)

    def _multiply(self, x: np.ndarray, back: bool) -> np.ndarray:
        """The product with sorted x (., r)."""
        if self.symmetric:
            return self.matrix @ x + self.matrix.T @ x + x
        return (self.matrix.T if back else self.matrix) @ x

    def apply(self, x: Tensor, adjoint: bool = False) -> Tensor:
        inward, outward = (self.cells.queries.order, self.cells.index.keys.order)[:: 1 if adjoint else -1]
        y = torch.as_tensor(self._multiply(x.double()[inward].numpy(), adjoint))
        return torch.empty_like(y).index_copy_(0, outward, y)

    @property
    def norm(self) -> float:
        return self.left_out + self.rounded

    def certified(self, x: Tensor) -> Certified:
        y = self.apply(torch.cat([x, x.abs()], 1))
        lost = torch.empty_like(self.rows).index_copy_(0, self.cells.queries.order, self.rows)
        tiny = self.cells._relative()[2] * float(x.abs().sum())
        rounding = self.relative * (1.0 + 2.0 * self.relative) * (y[:, 1] + lost)
        return Certified(y[:, :1], lost * float(x.abs().max()) + rounding + tiny)
