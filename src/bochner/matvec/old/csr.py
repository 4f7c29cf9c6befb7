"""Sparse matrices that are written row by row and multiplied many times.

torch multiplies compressed rows by the vectorised routines of MKL where it was built with them, two to four times
faster than scipy, which serves elsewhere. Products with the transpose have no such routine: `transposed` is a matrix of
its own.
"""

from __future__ import annotations

import warnings
from functools import cached_property

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

POSITION = 4  # bytes that say in which column an entry is
LARGEST = 2**31 - 1  # entries that 32-bit positions can count


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype


class CompressedRows:
    """`values` and `columns` of the kept entries, row after row; row i begins at `start[i]`."""

    def __init__(self, values: np.ndarray, columns: np.ndarray, start: np.ndarray, shape: tuple[int, int]) -> None:
        kind = np.int32 if values.size <= LARGEST else np.int64
        self.values, self.shape = values, shape
        self.columns, self.start = columns.astype(kind, copy=False), start.astype(kind, copy=False)

    @property
    def entries(self) -> int:
        return int(self.values.size)

    @property
    def scipy(self) -> sparse.csr_array:
        """The same arrays as scipy's matrix."""
        return sparse.csr_array((self.values, self.columns, self.start), shape=self.shape)

    @cached_property
    def _torch(self) -> Tensor | None:
        """The same arrays as torch's matrix, or None where torch could not multiply it."""
        if not torch.backends.mkl.is_available() or self.start.dtype != np.int32 or self.entries == 0:
            return None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Sparse CSR tensor support is in beta state")
            return torch.sparse_csr_tensor(
                torch.from_numpy(self.start),
                torch.from_numpy(self.columns),
                torch.from_numpy(self.values),
                size=self.shape,
                check_invariants=False,
            )

    def __matmul__(self, x: Tensor) -> Tensor:
        """The product with x (s, r), in the dtype of the entries."""
        matrix = self._torch
        if matrix is None:
            return torch.from_numpy(np.ascontiguousarray(self.scipy @ x.numpy()))
        if x.shape[1] == 1:
            return torch.mv(matrix, x[:, 0].contiguous())[:, None]
        return matrix @ x

    def transposed(self) -> CompressedRows:
        """Cost: one pass and the memory of a second matrix."""
        other = self.scipy.T.tocsr()
        return CompressedRows(other.data, other.indices, other.indptr, (self.shape[1], self.shape[0]))

    def longest_row(self) -> int:
        return int(np.diff(self.start).max(initial=0))


class RowWriter:
    """Collects consecutive rows of dense tiles, written once, where they stay."""

    def __init__(self, dtype: np.dtype, expected: int) -> None:
        self.values = np.empty(max(1024, expected), dtype=dtype)
        self.columns = np.empty(self.values.size, dtype=np.int32)
        self.counts: list[np.ndarray] = []
        self.size = 0

    def add(self, tile: np.ndarray, keep: np.ndarray, positions: np.ndarray) -> None:
        """Append the entries of `tile` at which `keep`; `positions` of its columns in the whole matrix."""
        where = np.flatnonzero(keep)
        rows, columns = tile.shape
        edges = np.searchsorted(where, np.arange(rows + 1) * columns)
        count = np.diff(edges)
        end = self.size + where.size
        if end > self.values.size:
            self._grow(end)
        tile.reshape(-1).take(where, out=self.values[self.size : end], mode="clip")
        np.tile(positions, rows).take(where, out=self.columns[self.size : end], mode="clip")
        self.counts.append(count)
        self.size = end

    def skip(self, rows: int) -> None:
        """Append empty rows."""
        self.counts.append(np.zeros(rows, dtype=np.int64))

    def _grow(self, needed: int) -> None:
        size = max(needed, self.values.size + self.values.size // 4)
        self.values, self.columns = (_longer(old, self.size, size) for old in (self.values, self.columns))

    def matrix(self, shape: tuple[int, int]) -> CompressedRows:
        start = np.zeros(shape[0] + 1, dtype=np.int64)
        np.cumsum(np.concatenate(self.counts), out=start[1:])
        for array in (self.values, self.columns):  # in place: of a view of a longer one scipy would make a copy
            array.resize(self.size, refcheck=False)
        return CompressedRows(self.values, self.columns, start, shape)


def _longer(old: np.ndarray, used: int, size: int) -> np.ndarray:
    new = np.empty(size, dtype=old.dtype)
    new[:used] = old[:used]
    return new
