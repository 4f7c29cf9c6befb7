"""Sparse: the near entries that matter, evaluated once and kept, for many products.

Most near entries are negligible. They are dropped from the smallest upwards while no row and no column loses more than
its share of eps; with what the cells skip that bounds the error of every product, for every x (Schur's test). Of a
symmetric matrix the entries above the diagonal are kept once and used on both sides.
"""

from __future__ import annotations

import math
import warnings
from functools import cached_property

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from .._checks import BochnerError
from .._progress import track
from .cells import CellsEngine
from .engine import Certified, Engine
from .tiles import ROWS

TOTAL_SHARE = 0.95  # of eps, for what is skipped and what is dropped together, rounding not counted
ENTRIES = 1 << 22  # of all tiles of a strip of rows
PROBED_CELLS = 48  # whose tiles say at which size entries can be dropped
USED, COMMON = 0.8, 0.03  # of a limit, by an ordinary row; the kept entries whose rows ask for a lower threshold
POSITION = 4  # bytes that say in which column an entry is
LARGEST = 2**31 - 1  # entries that 32-bit positions can count
ALL = 1 << 62


class TooLarge(BochnerError):
    """The kept entries do not fit into the memory allowed."""


class CompressedRows:
    """A sparse matrix. torch multiplies it by MKL where it can, two to four times faster than scipy."""

    def __init__(self, matrix: sparse.csr_array) -> None:
        self.scipy = matrix

    @cached_property
    def _torch(self) -> Tensor | None:
        """The same arrays as torch's matrix, or None where torch could not multiply it."""
        matrix = self.scipy
        if not torch.backends.mkl.is_available() or matrix.indptr.dtype != np.int32 or matrix.nnz == 0:
            return None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Sparse CSR tensor support is in beta state")
            start, columns, values = map(torch.from_numpy, (matrix.indptr, matrix.indices, matrix.data))
            return torch.sparse_csr_tensor(start, columns, values, size=matrix.shape, check_invariants=False)

    def __matmul__(self, x: Tensor) -> Tensor:
        """The product with x (s, r), in the dtype of the entries."""
        matrix = self._torch
        if matrix is None:
            return torch.from_numpy(np.ascontiguousarray(self.scipy @ x.numpy()))
        return torch.mv(matrix, x[:, 0].contiguous())[:, None] if x.shape[1] == 1 else matrix @ x

    @cached_property
    def transposed(self) -> CompressedRows:
        """Cost: one pass and the memory of a second matrix."""
        return CompressedRows(self.scipy.T.tocsr())

    @cached_property
    def longest(self) -> int:
        """The most entries in a row or a column."""
        rows = np.diff(self.scipy.indptr).max(initial=0)
        return int(max(rows, np.bincount(self.scipy.indices, minlength=1).max()))


class Budget:
    """What rows and columns have lost, at most `limit` each; of a symmetric matrix both are one vector."""

    def __init__(self, rows: Tensor, columns: Tensor, limit: float, symmetric: bool) -> None:
        self.rows, self.limit, self.symmetric = rows.clone(), limit, symmetric
        self.columns = self.rows if symmetric else columns.clone()

    def drop(self, tile: Tensor, lo: int, position: Tensor, tau: float) -> Tensor:
        """Which entries of a tile to drop (as a tile of them): those up to tau, none where too much would be lost.

        `lo`: the row at which the tile begins; `position`: its columns, in ascending order. A point of a symmetric
        matrix may lose half its budget as a column, before its turn as a row comes.
        """
        hi = lo + tile.shape[0]
        small = torch.where(tile <= tau, tile, 0.0)
        room = (self.limit - self.rows[lo:hi]) * (0.5 if self.symmetric else 1.0)
        small[small.sum(1, dtype=torch.float64) > room] = 0.0
        columns = small.sum(0, dtype=torch.float64)
        share = self.limit * (0.75 if self.symmetric else 1.0)
        over = self.columns[position] + columns > share
        if bool(over.any()):
            small[:, over] = 0.0
            columns[over] = 0.0
        self.rows[lo:hi] += small.sum(1, dtype=torch.float64)
        self.columns.index_add_(0, position, columns)
        return small

    @property
    def norm(self) -> float:
        """Bound on |E|_2 of what was lost."""
        return math.sqrt(float(self.rows.max()) * float(self.columns.max()))


def first_threshold(rows: list[Tensor], limit: float) -> tuple[float, float]:
    """From whole rows, sorted upwards: what an ordinary one can drop; and the kept share of the entries."""
    taus, counts = [], []
    for table in rows:
        place = (table.double().cumsum(1) <= USED * limit).sum(1)
        counts.append(table.shape[1] - place)
        taus.append(table.gather(1, place[:, None].clamp_max(table.shape[1] - 1))[:, 0])
    count, (tau, order) = torch.cat(counts), torch.cat(taus).sort()
    kept = count[order].cumsum(0)
    if int(kept[-1]) == 0:  # all of it can be dropped
        return float(tau[-1]), 0.0
    return float(tau[int((kept <= COMMON * kept[-1]).sum())]), int(kept[-1]) / sum(table.numel() for table in rows)


class SparseEngine(Engine):
    """Keeps entries of a `CellsEngine`; strictly linear, and exactly symmetric if K is."""

    name = "sparse"

    def __init__(self, cells: CellsEngine, memory: int, progress: bool = False) -> None:
        self.cells, self.problem, self.symmetric, self.memory = cells, cells.problem, cells.symmetric, memory
        self._collect(progress)
        while not self._check() and cells.refine():  # rounding has taken too much: once more, in finer arithmetic
            self._collect(progress)
        self.pairs = self.matrix.scipy.nnz

    @property
    def dtype(self) -> torch.dtype:
        return self.cells.dtype

    def _collect(self, progress: bool) -> None:
        """Evaluate the near tiles, strip by strip, and keep what is too large to drop."""
        cells, near = self.cells, self.cells.tiles()
        skipped, keys = cells.near.skipped, cells.index.keys
        rows = (skipped @ keys.count.double())[cells.queries.sorted_label]
        columns = (skipped.T @ cells.queries.count.double())[keys.sorted_label]
        # The sums of what is dropped are as rounded as the entries are.
        limit = TOTAL_SHARE * self.problem.eps - cells.limit * 0.5
        self.lost = Budget(rows, columns, limit, self.symmetric)
        tau, fraction = first_threshold(list(self._probed_rows()), limit - float(rows.max()))
        self._refuse(self._bytes * fraction * cells.pairs, 2.0)
        values, positions, counts, size = [], [], [], 0
        ranges = cells.queries.ranges()
        for a, (begin, end) in track(enumerate(ranges), len(ranges), "keeping near entries", progress):
            parts = list(near.keys(a, ALL)) if begin < end else []
            if not parts:
                counts.append(np.zeros(end - begin, dtype=np.int64))
                continue
            ((position, w),) = parts
            step = max(16, min(ROWS, ENTRIES // position.numel()))
            for lo in range(begin, end, step):
                hi = min(lo + step, end)
                tile = near(near.rows(lo, hi), w)
                if self.symmetric:  # of its own cell, whose keys come first, only what is above the diagonal
                    tile[:, : end - begin].triu_(lo - begin + 1)
                dropped = self.lost.drop(tile, lo, position, tau)
                where = np.flatnonzero(np.not_equal(tile.numpy(), dropped.numpy()))
                counts.append(np.diff(np.searchsorted(where, np.arange(hi - lo + 1) * position.numel())))
                values.append(tile.numpy().reshape(-1)[where])
                positions.append(position.to(torch.int32).numpy()[where % position.numel()])
                size += where.size
            self._refuse(self._bytes * size)
        start = np.zeros(self.problem.shape[0] + 1, dtype=np.int64 if size > LARGEST else np.int32)
        np.cumsum(np.concatenate(counts), out=start[1:])
        arrays = (np.concatenate(part) if part else np.zeros(0) for part in (values, positions))
        self.matrix = CompressedRows(sparse.csr_array((*arrays, start), shape=self.problem.shape))

    def _probed_rows(self) -> list[Tensor]:
        """A few rows of some cells against all their near keys, sorted upwards."""
        cells, near = self.cells, self.cells.tiles()
        near.symmetric = False
        filled = (cells.queries.count > 0).nonzero()[:, 0]
        chosen = filled[torch.linspace(0, filled.numel() - 1, min(PROBED_CELLS, filled.numel())).long()]
        out = []
        for a in chosen.tolist():
            lo, hi = int(cells.queries.start[a]), int(cells.queries.start[a + 1])
            out += [near(near.rows(lo, min(hi, lo + 8)), w).sort(1).values for _, w in near.keys(a, ALL)]
        return out or [torch.zeros(1, 1)]

    @property
    def _bytes(self) -> int:
        """Of one kept entry while it is collected, its mirror image counted."""
        return (self.dtype.itemsize + POSITION) * (3 if self.symmetric else 2)

    def _refuse(self, size: float, slack: float = 1.0) -> None:
        if size > slack * self.memory:
            raise TooLarge(
                f"The near entries of this kernel would take about {size / 2**30:.2g} GB while they are collected, "
                f"more than the {self.memory / 2**30:.2g} GB of 'KernelOperator.memory'; raise it, or use "
                "method='cells'."
            )

    def _check(self) -> bool:
        """Bound what rounding takes from any x, from the sums of the kept entries; whether it is within eps."""
        by_row, by_column, absolute = self.cells._relative()
        ones = torch.ones(self.problem.shape[1], 1, dtype=self.dtype)
        rows = self._multiply(ones, False)[:, 0].double()
        columns = rows
        if not self.symmetric:
            columns = self._multiply(torch.ones(len(rows), 1, dtype=self.dtype), True)[:, 0].double()
        unit = torch.finfo(self.dtype).eps / 2
        self.relative = float(torch.maximum(by_row.max(), by_column.max())) + unit * (2 * self.matrix.longest + 8)
        largest = math.sqrt(float(rows.max()) * float(columns.max())) + self.lost.norm
        self.rounded = self.relative * (1.0 + 2.0 * self.relative) * largest
        self.rounded += absolute * math.sqrt(math.prod(self.problem.shape))
        return self.norm <= self.problem.eps

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Where each query, and each key, of the caller's order is in the sorted one."""
        return self.cells.queries.order.argsort(), self.cells.index.keys.order.argsort()

    def _multiply(self, x: Tensor, back: bool) -> Tensor:
        """The product with sorted x."""
        if self.symmetric:
            return (self.matrix @ x).add_(self.matrix.transposed @ x).add_(x)
        return (self.matrix.transposed if back else self.matrix) @ x

    def apply(self, x: Tensor, adjoint: bool = False) -> Tensor:
        back = adjoint and not self.symmetric
        inward, outward = self.cells.index.keys.order, self._places[0]
        if back:
            inward, outward = self.cells.queries.order, self._places[1]
        return _permuted(self._multiply(_permuted(x.to(self.dtype), inward), back).double(), outward)

    @property
    def norm(self) -> float:
        return self.lost.norm + self.rounded

    def certified(self, x: Tensor) -> Certified:
        y = self.apply(torch.cat([x, x.abs()], 1))
        tiny = self.cells._relative()[2] * float(x.abs().sum())
        rounding = self.relative * (1.0 + 2.0 * self.relative) * (y[:, 1] + self.lost.rows[self._places[0]])
        left_out = self.lost.rows[self._places[0]] * float(x.abs().max())
        return Certified(y[:, :1], left_out + rounding + tiny)

    def describe(self) -> str:
        share = self.pairs / math.prod(self.problem.shape) * (2 if self.symmetric else 1)
        return f"{share:.2%} of the matrix is kept. What is left out is at most {self.lost.norm:.2g} |x|, for every x."


def _permuted(x: Tensor, order: Tensor) -> Tensor:
    """The rows of x (n, r) in this order; single columns as vectors, which torch permutes four times faster."""
    return x[:, 0].index_select(0, order)[:, None] if x.shape[1] == 1 else x.index_select(0, order)
