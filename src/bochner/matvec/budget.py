"""What may be left out of a matrix: entries from the smallest upwards, while no row and no column loses too much.

If every row and every column of the error matrix E sums to at most a limit, |E|_2 <= sqrt(max row sum * max column sum)
is below it too (Schur's test), for every x.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LESS = 16.0  # a threshold that drops too much is divided by this
COMMON = 0.03  # of the kept entries, whose rows ask for a lower threshold than the first one


class Budget:
    """Sums of what was dropped, of rows and of columns, at most `limit` each.

    Of a symmetric matrix only the entries above the diagonal are seen: what row i loses is `rows[i] + columns[i]`.
    """

    def __init__(self, rows: int, columns: int, limit: float, symmetric: bool, dtype: torch.dtype) -> None:
        self.limit, self.symmetric = limit, symmetric
        self.rows, self.columns = torch.zeros(rows, dtype=dtype), torch.zeros(columns, dtype=dtype)

    @property
    def norm(self) -> float:
        """Bound on |E|_2 of what was dropped."""
        if self.symmetric:
            return float((self.rows + self.columns).max()) * (1 + 1e-4)
        return math.sqrt(float(self.rows.max()) * float(self.columns.max())) * (1 + 1e-4)

    def drop(self, tile: Tensor, lo: int, position: Tensor, tau: float, signed: bool = False) -> Tensor:
        """The entries of a tile to be dropped: those up to tau, less in rows and columns whose budgets are exhausted.

        `lo`: the row at which the tile begins; `position`: its columns. A row of a symmetric matrix is also a column,
        which may lose half of its budget; when the row's turn comes, it has what is left.
        """
        n = tile.shape[0]
        small = tile - torch.hardshrink(tile, tau)
        room = self.limit - self.columns[lo : lo + n] if self.symmetric else torch.full((n,), self.limit)
        _spare(small, room, tau, signed)
        before = self.columns[position]
        _spare(small.T, (0.5 if self.symmetric else 1.0) * self.limit - before, tau, signed)
        if self.symmetric:  # of the rows that are columns of this very tile
            own = int((position < lo).sum())
            _spare(small, room - _sums(small[:, own : own + n].T, signed), 0.0, signed)
        self.rows[lo : lo + n] += _sums(small, signed)
        self.columns[position] = before + _sums(small.T, signed)
        return small


def _sums(rows: Tensor, signed: bool) -> Tensor:
    return rows.abs().sum(1) if signed else rows.sum(1)


def _spare(small: Tensor, room: Tensor, tau: float, signed: bool) -> None:
    """Take the largest out of rows of `small` whose sums exceed `room`, in place: entries were dropped up to tau."""
    bad = (_sums(small, signed) > room).nonzero()[:, 0]
    while bad.numel():
        tau = tau / LESS if tau > 1e-30 else 0.0
        part = small[bad]
        part -= torch.hardshrink(part, tau)
        small[bad] = part
        bad = bad[_sums(part, signed) > room[bad].clamp_min(0.0)]


def first_threshold(rows: list[Tensor], limit: float) -> tuple[float, float]:
    """From whole rows, sizes sorted upwards: what an ordinary one can drop; and the kept share of the entries."""
    taus, counts = [], []
    for table in rows:
        place = (table.cumsum(1) <= 0.5 * limit).sum(1)
        counts.append(table.shape[1] - place)
        taus.append(table.gather(1, place[:, None].clamp_max(table.shape[1] - 1))[:, 0])
    count = torch.cat(counts)
    tau, order = torch.cat(taus).sort()
    kept = count[order].cumsum(0)
    if int(kept[-1]) == 0:  # all of it can be dropped
        return float(tau[-1]), 0.0
    return float(tau[int((kept <= COMMON * kept[-1]).sum())]), int(kept[-1]) / sum(table.numel() for table in rows)
