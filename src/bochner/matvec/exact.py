"""Exact tiles: every pair, in the cheapest arithmetic whose rounding stays below eps/2 for every x."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .engine import COARSE, Problem, TileEngine, entry_rounding
from .tiles import (
    PRECISE,
    Frame,
    Sums,
    Tiles,
    argument_error,
    exact_product,
    extent,
    left,
    norms,
    right,
    summation_error,
    swapped,
)

LOOKED_AT = 32  # rows, and columns, that can say at once that single precision is too coarse
ROUNDING_SHARE = 0.5  # of eps


class PlacedKeys:
    """The keys in the frame of each arithmetic, placed once: operators with other queries share them."""

    def __init__(self, problem: Problem) -> None:
        self.keys, self.frame = problem.keys, problem.kernel.frame(problem.keys, "float64")
        self.extent = extent(self.frame, self.keys)
        self._rows: dict[str, tuple[Tensor, Tensor]] = {}
        self.coarse = False  # whether single precision was found too coarse for them, with any queries

    def rows(self, arithmetic: str) -> tuple[Tensor, Tensor]:
        """Augmented (`right`) keys, and their lengths."""
        if arithmetic not in self._rows:
            w = right(self.frame._replace(arithmetic=arithmetic).place(self.keys))
            self._rows[arithmetic] = w, norms(w[:, :-2]).double()
        return self._rows[arithmetic]


class ExactEngine(TileEngine):
    """`wide`: entries in single precision, sums over them in double precision."""

    name = "exact"

    def __init__(self, problem: Problem, single: bool, placed: PlacedKeys | None = None) -> None:
        self.problem, self.symmetric, self.wide = problem, problem.symmetric, False
        self.limit = ROUNDING_SHARE * problem.eps
        self.pairs = int(problem.pairs)
        self.placed = placed or PlacedKeys(problem)
        if not single or self.placed.coarse or not self._try_single():
            self._precise()

    def _place(self, frame: Frame) -> None:
        self.frame, self.dtype = frame, frame.dtype
        self.w, keys = self.placed.rows(frame.arithmetic)
        self.z = swapped(self.w) if self.symmetric else left(frame.place(self.problem.queries))
        self.lengths = (keys if self.symmetric else norms(self.z[:, :-2]).double(), keys)

    def _try_single(self) -> bool:
        """Single precision, unless it is plainly too coarse; a few rows and columns say whether sums must be wide."""
        problem, frame = self.problem, self.placed.frame._replace(arithmetic="float32")
        reach = self.placed.extent + (self.placed.extent if self.symmetric else extent(frame, problem.queries))
        if not math.isfinite(reach) or argument_error(reach, problem.keys.shape[1], frame) > COARSE:
            return False
        self._place(frame)
        for self.wide in (False, True):
            self.lost = self._lost(*self._ones())
            if self.settled:
                return True
        some = self._some_sums()
        for self.wide in (False, True):
            if self._lost(*some) <= 0.7 * self.limit:
                self.lost = math.inf
                return True
        self.placed.coarse = True
        return False

    def _ones(self) -> tuple[Tensor, Tensor]:
        """Sums of rows and columns as if all entries were one."""
        n, s = self.problem.shape
        return torch.full((n,), float(s), dtype=torch.float64), torch.full((s,), float(n), dtype=torch.float64)

    def _some_sums(self) -> tuple[Tensor, Tensor]:
        """Sums of some rows and columns, the longest and the shortest points among them; zero elsewhere."""
        sides = [(self.z, self.w, self.lengths[0])]
        if not self.symmetric:
            sides.append((swapped(self.w), swapped(self.z), self.lengths[1]))
        out = []
        for rows, others, length in sides:
            ids = length.argsort()[:: max(1, length.numel() // LOOKED_AT)]
            ones, sums = torch.ones(len(others), 1, dtype=self.dtype), torch.zeros(len(rows), dtype=torch.float64)
            sums[ids] = exact_product(Tiles(self.frame), rows[ids], others, ones)[:, 0]
            out.append(sums)
        return out[0], out[-1]

    def _precise(self) -> None:
        """Double precision, by differences where matrix products would lose too much."""
        problem, frame = self.problem, self.placed.frame._replace(arithmetic="float64")
        tolerance = min(PRECISE, 0.25 * problem.eps / math.sqrt(math.prod(problem.shape)))
        reach = self.placed.extent + (self.placed.extent if self.symmetric else extent(frame, problem.queries))
        lost = math.inf
        if math.isfinite(reach):
            lost = problem.kernel.profile.change(argument_error(reach, problem.keys.shape[1], frame))
        self.wide = False
        self._place(frame if lost <= tolerance else frame._replace(arithmetic="difference"))
        self.lost = self._lost(*self._ones())
        self.limit = max(self.limit, self.lost)  # there is nothing finer

    def refine(self) -> bool:
        if self.dtype == torch.float64:
            return False
        if self.wide:
            self._precise()
        self.wide = not self.wide and self.dtype == torch.float32
        return True

    def _multiply(self, x: Tensor, adjoint: bool, sums: Sums | None) -> Tensor:
        x = x.to(torch.float64 if self.wide else self.dtype)
        z, w = self.z, self.w
        if adjoint and not self.symmetric:
            z, w, sums = swapped(w), swapped(z), None if sums is None else (sums[1], sums[0])
        return exact_product(Tiles(self.frame), z, w, x, symmetric=self.symmetric, progress=self.progress, sums=sums)

    def _relative(self) -> tuple[Tensor, Tensor, float]:
        rows, columns = self.lengths
        n, s = self.problem.shape
        tiny = min(1e-3 * torch.finfo(self.dtype).eps, 0.02 * self.limit / math.sqrt(n * s))
        by_row, floor = entry_rounding(self.frame, rows, float(columns.max()), tiny)
        by_column, _ = entry_rounding(self.frame, columns, float(rows.max()), tiny)
        sums = summation_error(max(n, s), self.dtype, self.wide)
        return by_row + sums, by_column + sums, floor

    @property
    def norm(self) -> float:
        return self.lost
