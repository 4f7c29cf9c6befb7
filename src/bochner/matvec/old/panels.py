"""Dense parts of a sparse matrix: a strip of rows against the columns that it fills well.

A dense entry costs its value alone, and one reading serves a matrix and its transpose; a sparse one its column's number
too, and a copy for the transpose.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .csr import numpy_dtype

SLAB = 1 << 25  # bytes taken from the system at once, in large pages where it has them
LINE = 64  # rows of a block: longer lines are read less evenly, and slower


class Panels:
    """Strips of rows against some columns, no column twice; in blocks of few rows, each kept as (columns, rows)."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.entries = numpy_dtype(dtype), 0
        self.strips: list[tuple[int, list[np.ndarray]]] = []  # the first row, and the blocks
        self._positions: list[Tensor] = []
        self._free = np.empty(0, self.dtype)

    @property
    def position(self) -> Tensor:
        """The columns of all strips, one after the other."""
        if len(self._positions) != 1:
            self._positions = [torch.cat(self._positions) if self._positions else torch.empty(0, dtype=torch.long)]
        return self._positions[0]

    @property
    def _sizes(self) -> list[int]:
        """The columns of each strip."""
        return [len(blocks[0]) for _, blocks in self.strips]

    def add(self, lo: int, values: Tensor, position: Tensor) -> None:
        """Keep `values` (columns, rows): the matrix's rows from lo on, its columns at `position`."""
        if position.numel():
            self.strips.append((lo, [self._keep(part.numpy()) for part in values.split(LINE, 1)]))
            self._positions.append(position)
            self.entries += values.numel()

    def _keep(self, part: np.ndarray) -> np.ndarray:
        if self._free.size < part.size:
            self._free = np.empty(max(part.size, SLAB // self.dtype.itemsize), self.dtype)
        block, self._free = self._free[: part.size].reshape(part.shape), self._free[part.size :]
        block[:] = part
        return block

    def multiply(self, x: Tensor, y: Tensor, forward: bool, backward: bool) -> None:
        """Add P x to y, or P' x, or, of a square matrix, both: x and y are (n, r) in the matrix's own order.

        By numpy, which begins sooner, and whose library reads lines of this length faster than torch's.
        """
        if x.shape[1] == 1:  # matrix-vector products have routines of their own
            x, y = x[:, 0].contiguous(), y[:, 0]
        source, begin = x.numpy(), 0
        inward = x.index_select(0, self.position).numpy() if forward else None
        rows = np.zeros(y.shape, self.dtype) if forward else None  # of no row twice
        columns = np.empty((self.position.numel(), *x.shape[1:]), self.dtype) if backward else None
        for size, (lo, blocks) in zip(self._sizes, self.strips, strict=True):
            end = begin + size
            for i, block in enumerate(blocks):
                hi = lo + block.shape[1]
                if columns is not None and i == 0:
                    np.dot(block, source[lo:hi], out=columns[begin:end])
                elif columns is not None:
                    columns[begin:end] += np.dot(block, source[lo:hi])
                if rows is not None and inward is not None:
                    np.dot(block.T, inward[begin:end], out=rows[lo:hi])
                lo = hi
            begin = end
        if rows is not None:
            y += torch.from_numpy(rows)
        if columns is not None:
            y.index_add_(0, self.position, torch.from_numpy(columns))

    def longest(self) -> tuple[int, int]:
        """The most terms that a row, and that a column, sums up."""
        heights = [sum(block.shape[1] for block in blocks) for _, blocks in self.strips]
        columns = np.bincount(self.position.numpy(), weights=np.repeat(heights, self._sizes), minlength=1)
        return max(self._sizes, default=0), int(columns.max())
