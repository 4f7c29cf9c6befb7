"""Sparse: the near entries that matter, evaluated once and kept as a sparse matrix.

Most near pairs are negligible. Entries are dropped from the smallest upwards while no row and no column loses more
than its share of eps, which is known when the matrix is built: with what the plan skips it bounds the error of every
product, for every x (Schur's test, as in `plan`). Far cells, where a plan has them, are kept as a second sparse matrix.
Strictly linear, repeatable, and exactly symmetric: of a symmetric matrix the entries above the diagonal are kept once
and used on both sides. Columns that a strip of rows fills well are kept as dense blocks (`panels`), entries elsewhere
with their positions, in compressed rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...._checks import BochnerError
from ...._progress import track
from ..budget import Budget, first_threshold
from ..csr import POSITION, CompressedRows, RowWriter, numpy_dtype
from ..index import KeyIndex
from ..panels import LINE, Panels
from ..plan import NearTiles, Plan
from ..tiles import ROWS, swapped
from .base import Applied, Engine
from .cells import CellsEngine

TOTAL_SHARE = 0.95  # of eps, for what is skipped and what is dropped together
FAR_SHARE = 0.05  # of eps, for the smallest far cells
ENTRIES, STRIP = 1 << 18, 1 << 22  # of a tile, and of all tiles of a strip of rows
SMALL = 1 << 17  # pairs of a strip that is not worth looking for dense columns
# The time of a dense block of (columns, LINE) and of its entries, in that of an entry kept by itself, as measured.
BLOCK_TIME, DENSE_TIME = 6000, 0.375
ALL = 1 << 62
PROBED_CELLS = 48  # whose tiles say at which size entries can be dropped


class TooLarge(BochnerError):
    """The kept entries do not fit into the memory allowed."""


class Strip(NamedTuple):
    """Rows lo:hi of a cell, and its near keys; `own`: how many of them, the first, are rows of the cell from lo on.

    Of a symmetric matrix only what is above the diagonal, which is one: keys before lo are left out.
    """

    lo: int
    hi: int
    own: int
    position: Tensor
    keys: Tensor

    @property
    def pairs(self) -> int:
        return (self.hi - self.lo) * self.position.numel()


class SparseEngine(Engine):
    name, linear = "sparse", True

    def __init__(self, index: KeyIndex, plan: Plan, eps: float, memory: int, progress: bool = False) -> None:
        self.index, self.plan, self.dtype = index, plan, index.frame.dtype
        rows, columns = (torch.zeros(side.rows.shape[0], dtype=self.dtype) for side in (plan.queries, index.keys))
        limit = TOTAL_SHARE * eps
        if plan.rows is None or plan.columns is None:
            limit -= 0.5 * eps
        else:  # what is skipped is lost already; of a symmetric matrix it is the same for rows and columns
            rows, columns = plan.rows, columns if plan.symmetric else plan.columns
            long_sums = torch.finfo(self.dtype).eps * plan.terms(index) * plan.near_norm
            limit = min(limit, eps - plan.rounded - long_sums)  # rounding takes the rest
        self.lost = Budget(rows, columns, limit, plan.symmetric)
        self.panels, self.few = self._collect(memory, progress)
        self.mirror = self.few.transposed() if plan.symmetric else None
        self.far = self._collect_far(eps) if plan.beta > 0 else None

    @property
    def certain(self) -> bool:  # type: ignore[override]
        return self.plan.certain

    @property
    def entries(self) -> int:
        """Kept entries of the matrix, mirror images not counted."""
        return self.panels.entries + self.few.entries + (0 if self.far is None else self.far.entries)

    @property
    def bytes(self) -> int:
        """What the near entries take, mirror images and their positions counted."""
        return self.dtype.itemsize * self.panels.entries + self._scattered * self.few.entries

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Where each query, and each key, of the caller's order is in the sorted one."""
        queries = self.plan.queries.order.argsort()
        return queries, queries if self.plan.symmetric else self.index.keys.order.argsort()

    @cached_property
    def _backward(self) -> tuple[CompressedRows, CompressedRows | None]:
        """The transposes of both matrices; of a symmetric near matrix it is there from the beginning."""
        return self.mirror or self.few.transposed(), None if self.far is None else self.far.transposed()

    # ---- building ---------------------------------------------------------------------------------------------------

    def _probed_rows(self, near: NearTiles) -> Iterator[Tensor]:
        """A few rows of some cells against all their near keys, sorted upwards."""
        filled = (self.plan.queries.count > 0).nonzero()[:, 0]
        chosen = filled[torch.linspace(0, filled.numel() - 1, min(PROBED_CELLS, filled.numel())).long()]
        for a in chosen.tolist():
            lo, hi = int(self.plan.queries.start[a]), int(self.plan.queries.start[a + 1])
            for _, w in near.keys(a, ALL):
                yield near(near.rows(lo, min(hi, lo + 16)), w).sort(1).values

    def _collect(self, memory: int, progress: bool) -> tuple[Panels, CompressedRows]:
        """The entries that are kept: where they are dense, and elsewhere."""
        plan, index = self.plan, self.index
        near = NearTiles(index, plan)
        tau, fraction = first_threshold(list(self._probed_rows(near)), self.lost.limit)
        expected = fraction * plan.pairs(index)
        if self._scattered * expected > 2 * memory:
            raise TooLarge(_too_large(self._scattered * expected, memory))
        panels, few = Panels(self.dtype), RowWriter(numpy_dtype(self.dtype), int(2 * expected))
        cells = plan.queries.ranges()
        for a, (begin, end) in track(enumerate(cells), len(cells), "keeping near entries", progress):
            strips = list(self._strips(near, a, begin, end))
            if not strips:
                few.skip(end - begin)
            for strip in strips:
                if strip.pairs < SMALL:
                    tile = near(near.rows(strip.lo, strip.hi), strip.keys)
                    tile[:, : strip.own].triu_(1)
                    self._scatter(tile, strip.lo, strip.position, tau, few)
                else:
                    self._keep(*self._loud(near, strip, tau), strip.lo, tau, panels, few)
            size = self.dtype.itemsize * panels.entries + self._scattered * few.size
            if size > memory:
                raise TooLarge(_too_large(max(size, self._scattered * expected), memory))
        return panels, few.matrix((self.lost.rows.numel(), self.lost.columns.numel()))

    @property
    def _scattered(self) -> int:
        """Bytes of an entry that is kept by itself; a symmetric matrix has its mirror image beside it."""
        return (self.dtype.itemsize + POSITION) * (2 if self.plan.symmetric else 1)

    def _strips(self, near: NearTiles, a: int, begin: int, end: int) -> Iterator[Strip]:
        """The rows begin:end of cell a with its near keys, a few hundred at once."""
        for position, keys in near.keys(a, ALL) if begin < end else ():
            step = max(16, min(ROWS, STRIP // position.numel()))
            for lo in range(begin, end, step):
                seen, own = (lo - begin, end - lo) if self.plan.symmetric else (0, 0)  # its own keys come first
                yield Strip(lo, min(lo + step, end), own, position[seen:], keys[seen:])

    def _loud(self, near: NearTiles, strip: Strip, tau: float) -> tuple[Tensor, Tensor]:
        """The near keys of a strip whose entries do not all go: (keys, rows) entries, and their positions.

        Tile by tile, and nearly all keys go: only the sums of what they leave behind are formed.
        """
        z = near.rows(strip.lo, strip.hi)
        step = max(16, ENTRIES // z.shape[0])
        for limit in (tau, -1.0):  # -1: rows would lose too much, and no key goes entirely
            most = self.lost.most_of_columns(strip.lo, strip.hi, strip.position, limit)
            lost, all_sums = z.new_zeros(z.shape[0]), []
            values, positions = [], []
            parts = zip(strip.position.split(step), strip.keys.split(step), most.split(step), strict=True)
            for begin, (position, w, at_most) in enumerate(parts):
                tile = near(w, z)
                first = begin * step
                tile[: max(0, strip.own - first)].tril_(first - 1)
                sums = tile.sum(1)
                loud = sums > at_most
                weight = (~loud).to(tile.dtype)
                lost.addmv_(tile.T, weight)
                all_sums.append(sums.mul_(weight))
                chosen = loud.nonzero()[:, 0]
                values.append(tile.index_select(0, chosen))
                positions.append(position.index_select(0, chosen))
            if self.lost.take_columns(strip.lo, strip.position, lost, torch.cat(all_sums)):
                break
        return torch.cat(values), torch.cat(positions)

    def _keep(self, values: Tensor, position: Tensor, lo: int, tau: float, panels: Panels, few: RowWriter) -> None:
        """Columns of a strip as a dense block where that takes less memory, the others entry by entry."""
        height = values.shape[1]
        kept = torch.hardshrink(values, tau).sign_().sum(1)  # a comparison would take three times as long
        dense = kept * self._scattered > height * self.dtype.itemsize
        if float(kept[dense].sum()) < BLOCK_TIME * height / LINE + DENSE_TIME * height * int(dense.sum()):
            dense = torch.zeros_like(dense)
        chosen, others = dense.nonzero()[:, 0], (~dense).nonzero()[:, 0]
        panels.add(lo, values.index_select(0, chosen), position.index_select(0, chosen))
        rest, where = values.index_select(0, others).T.contiguous(), position.index_select(0, others)
        self._scatter(rest, lo, where, tau, few)

    def _scatter(self, tile: Tensor, lo: int, position: Tensor, tau: float, few: RowWriter) -> None:
        """Keep a (rows, keys) tile entry by entry, without those that are dropped."""
        dropped = self.lost.drop(tile, lo, position, tau)
        few.add(tile.numpy(), np.not_equal(tile.numpy(), dropped.numpy()), position.to(torch.int32).numpy())

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
        y = self._backward[0] @ x if back else self.few @ x
        self.panels.multiply(x, y, forward=not back, backward=back or self.plan.symmetric)
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
        terms, columns = self.panels.longest()
        terms += self.few.longest_row()
        columns += int(np.bincount(self.few.columns, minlength=1).max())
        terms = terms + columns + 1 if self.plan.symmetric else columns if adjoint else terms
        relative = float(self.plan.rounding.max()) + unit * (terms + 8)
        x = x.double()
        rounding = relative * applied.value.double().norm(dim=0)
        floor = self.index.frame.kernel.floor_value(self.dtype) * x.abs().sum(0) * math.sqrt(applied.value.shape[0])
        return self.norm_bound * x.norm(dim=0) + rounding + floor, applied.pairs

    @property
    def norm_bound(self) -> float:
        """Bound on |E|_2 of what is skipped and dropped; inf if the plan is not certain."""
        return self.lost.norm if self.certain else math.inf

    def describe(self) -> str:
        n, s = self.few.shape
        line = f"{self.entries} entries kept, {self.entries / (n * s):.2%} of the matrix, {self.bytes >> 20} MB."
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
