"""What may be left out of a matrix: entries from the smallest upwards, while no row and no column loses too much.

If every row and every column of the error matrix E sums to at most a limit, |E|_2 <= sqrt(max row sum * max column sum)
is below it too (Schur's test), for every x.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDING = 1 + 2e-3  # of sums of up to 2^14 small numbers in single precision, at most
LESS = 4.0  # a threshold that drops too much is divided by this
USED = 0.8  # of a limit, by an ordinary row at the first threshold
COMMON = 0.03  # of the kept entries, whose rows ask for a lower threshold than the first one


class Budget:
    """Sums of what was dropped, of rows and of columns, at most `limit` each; at first what is lost already.

    Of a symmetric matrix only the entries above the diagonal are seen: what row i loses is `rows[i] + columns[i]`.
    """

    def __init__(self, rows: Tensor, columns: Tensor, limit: float, symmetric: bool) -> None:
        self.limit, self.symmetric = limit, symmetric
        self.rows, self.columns = rows.clone(), columns.clone()
        # A row of a symmetric matrix may lose half of what it has as a column; when its turn comes, it has the rest.
        self._most = 0.5 * (limit - rows) if symmetric else torch.full_like(columns, limit)

    @property
    def norm(self) -> float:
        """Bound on |E|_2 of what was dropped."""
        if self.symmetric:
            return float((self.rows + self.columns).max()) * ROUNDING
        return math.sqrt(float(self.rows.max()) * float(self.columns.max())) * ROUNDING

    def drop(self, tile: Tensor, lo: int, position: Tensor, tau: float, signed: bool = False) -> Tensor:
        """The entries of a tile to be dropped: those up to tau, less in rows and columns whose budgets are exhausted.

        `lo`: the row at which the tile begins; `position`: its columns.
        """
        hi = lo + tile.shape[0]
        small = tile - torch.hardshrink(tile, tau)
        rows, room = _sums(small, signed), self._room(lo, hi)
        _spare(small, rows, room, tau, signed)
        columns, before = _sums(small.T, signed), self.columns.index_select(0, position)
        most = self._most.index_select(0, position).sub_(before)
        if self.symmetric:  # some of the rows are columns of this very tile: their turn is now
            own = ((position >= lo) & (position < hi)).nonzero()[:, 0]
            rank = position[own] - lo
            most.index_copy_(0, own, room.index_select(0, rank))
        if _spare(small.T, columns, most, tau, signed):
            rows = _sums(small, signed)
        if self.symmetric:
            room.index_add_(0, rank, columns[own], alpha=-1)
            if _spare(small, rows, room, tau, signed):
                columns = _sums(small.T, signed)
        self.rows[lo:hi] += rows
        self.columns.index_copy_(0, position, before.add_(columns))
        return small

    def most_of_columns(self, lo: int, hi: int, position: Tensor, tau: float) -> Tensor:
        """The largest sums, over rows lo:hi, of columns that may go entirely: tau, less where a budget is exhausted.

        Negative for columns of a symmetric matrix which are among these rows: they are left to `drop`.
        """
        most = self._most.index_select(0, position) - self.columns.index_select(0, position)
        most.clamp_max_(tau)
        if self.symmetric:
            most.masked_fill_((position >= lo) & (position < hi), -1.0)
        return most

    def take_columns(self, lo: int, position: Tensor, rows: Tensor, columns: Tensor) -> bool:
        """Drop columns entirely, known by their sums and by what rows from lo on lose; False if that is too much."""
        hi = lo + rows.numel()
        if bool((rows > self._room(lo, hi)).any()):
            return False
        self.rows[lo:hi] += rows
        self.columns.index_add_(0, position, columns)
        return True

    def _room(self, lo: int, hi: int) -> Tensor:
        """What these rows may still lose."""
        room = self.limit - self.rows[lo:hi]
        return room.sub_(self.columns[lo:hi]) if self.symmetric else room


def _sums(rows: Tensor, signed: bool) -> Tensor:
    return rows.abs().sum(1) if signed else rows.sum(1)


def _spare(small: Tensor, sums: Tensor, room: Tensor, tau: float, signed: bool) -> bool:
    """Take the largest out of rows of `small`, dropped up to tau, whose `sums` exceed `room`; whether there were any.

    In place, of both.
    """
    bad = over = (sums > room).nonzero()[:, 0]
    while bad.numel():
        tau = tau / LESS if tau > 1e-30 else 0.0
        part = small[bad]
        part -= torch.hardshrink(part, tau)
        small[bad] = part
        sums[bad] = _sums(part, signed)
        bad = bad[sums[bad] > room[bad].clamp_min(0.0)]
    return over.numel() > 0


def first_threshold(rows: list[Tensor], limit: float) -> tuple[float, float]:
    """From whole rows, sizes sorted upwards: what an ordinary one can drop; and the kept share of the entries."""
    taus, counts = [], []
    for table in rows:
        place = (table.cumsum(1) <= USED * limit).sum(1)
        counts.append(table.shape[1] - place)
        taus.append(table.gather(1, place[:, None].clamp_max(table.shape[1] - 1))[:, 0])
    count = torch.cat(counts)
    tau, order = torch.cat(taus).sort()
    kept = count[order].cumsum(0)
    if int(kept[-1]) == 0:  # all of it can be dropped
        return float(tau[-1]), 0.0
    return float(tau[int((kept <= COMMON * kept[-1]).sum())]), int(kept[-1]) / sum(table.numel() for table in rows)
