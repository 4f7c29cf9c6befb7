"""Exact tiles: every pair, in the cheapest arithmetic whose rounding stays below eps/2 for every x."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import tiles
from .kernels import Problem
from .profiles import Profile
from .tiles import PRECISE, Block, Frame, Sums, Tiles, all_blocks, argument_error, block_product, left, norms, right

COARSE = 0.25  # an error of the argument above which an arithmetic is not considered
LOOKED_AT = 32  # rows, and columns, that can say at once that single precision is too coarse


class PlacedKeys:
    """The keys in the frame of each arithmetic, and what is known of them; operators with other queries share it."""

    def __init__(self, problem: Problem) -> None:
        self.keys, self.frame = problem.keys, problem.kernel.frame(problem.keys, "float64")
        self.extent = tiles.extent(self.frame, self.keys)
        self._rows: dict[str, tuple[Tensor, Tensor]] = {}
        self.coarse = False  # whether single precision was found too coarse for them, with any queries
        self.cells: Any = None  # an index and the keys in it

    def rows(self, arithmetic: str) -> tuple[Tensor, Tensor]:
        """Augmented (`right`) keys, and their lengths."""
        if arithmetic not in self._rows:
            w = right(self.frame._replace(arithmetic=arithmetic).place(self.keys))
            self._rows[arithmetic] = w, norms(w[:, :-2]).double()
        return self._rows[arithmetic]


class ExactEngine:
    """Evaluates kernel tiles in every product. `wide`: entries in single precision, sums over them in double precision.

    What rounding can take from any x follows from the sums of K over rows and columns (Schur's test): |E|_2 <=
    sqrt(largest row sum * largest column sum) of the error matrix E. Where they are not known to be small, the first
    product forms them beside its own sums; if they are too large, it is repeated in finer arithmetic.
    """

    name = "exact"
    rounding_share = 0.5  # of eps
    progress = False
    lost = math.inf  # a bound on what rounding takes from any x, relative to |x|, once it is settled

    def __init__(self, problem: Problem, single: bool, placed: PlacedKeys) -> None:
        self.problem, self.symmetric, self.placed, self.wide = problem, problem.symmetric, placed, False
        self.limit = self.rounding_share * problem.eps
        self.pairs = math.prod(problem.shape) // (2 if self.symmetric else 1)  # kernel entries evaluated by one product
        furthest = placed.extent if self.symmetric else tiles.extent(placed.frame, problem.queries)
        self.reach = placed.extent + furthest  # |z| + |w| of placed points, at most
        if not single or placed.coarse or not self._try_single():
            self._precise()

    @property
    def settled(self) -> bool:
        return self.lost <= self.limit

    @property
    def norm(self) -> float:
        """Bound on |K - what this multiplies by|_2; known after the first product at the latest."""
        return self.lost

    @property
    def certain(self) -> bool:
        """Whether the error of every product is within eps."""
        return not self.settled or self.norm <= self.problem.eps

    def apply(self, x: Tensor, adjoint: bool = False) -> Tensor:
        """The product with x (s, r), or for the adjoint (n, r), in float64."""
        return self._multiply(x, adjoint, None) if self.settled else self._first(x, adjoint)

    def _first(self, x: Tensor, adjoint: bool) -> Tensor:
        """The product, with the sums of the rows and columns of K beside it; finer arithmetic if they ask for it."""
        rows = torch.zeros(self.problem.shape[0], dtype=torch.float64)
        columns = rows if self.symmetric else torch.zeros(self.problem.shape[1], dtype=torch.float64)
        y = self._multiply(x, adjoint, (rows, columns))
        self.lost = self._lost(rows, columns)
        if self.settled:
            return y
        margin = 1.0 + 2.0 * max(float(side.max()) for side in self._relative()[:2])
        if margin > 2.0 and self.refine():  # the sums themselves cannot be trusted
            return self._first(x, adjoint)
        while not self.settled and self.refine():
            self.lost = self._lost(margin * rows, margin * columns)
        self.limit = max(self.limit, self.lost)  # there is nothing finer
        return self._multiply(x, adjoint, None)

    def _lost(self, rows: Tensor, columns: Tensor) -> float:
        """Schur's test; the sums of K themselves were rounded too."""
        by_row, by_column, absolute = self._relative()
        margin = 1.0 + 2.0 * float(torch.maximum(by_row.max(), by_column.max()))
        most = float((by_row * rows).max()) * float((by_column * columns).max())
        return margin * math.sqrt(most) + absolute * math.sqrt(rows.numel() * columns.numel())

    def certified(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The product with one column (s, 1), and bounds on |Kx - y| for each of its rows (n,)."""
        y = self.apply(torch.cat([x, x.abs()], 1))
        by_row, _, absolute = self._relative()
        margin = 1.0 + 2.0 * float(by_row.max())
        return y[:, :1], margin * by_row * y[:, 1] + absolute * float(x.abs().sum())

    def _place(self, frame: Frame) -> None:
        self.frame, self.dtype = frame, frame.dtype
        self.w, keys = self.placed.rows(frame.arithmetic)
        self.z = tiles.swapped(self.w) if self.symmetric else left(frame.place(self.problem.queries))
        self.lengths = (keys if self.symmetric else norms(self.z[:, :-2]).double(), keys)

    def _try_single(self) -> bool:
        """Single precision, unless it is plainly too coarse; a few rows and columns say whether sums must be wide."""
        frame = self.placed.frame._replace(arithmetic="float32")
        if not argument_error(self.reach, len(frame.centre), frame) <= COARSE:
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
            sides.append((tiles.swapped(self.w), tiles.swapped(self.z), self.lengths[1]))
        out = []
        for rows, others, length in sides:
            ids = length.argsort()[:: max(1, length.numel() // LOOKED_AT)]
            ones, sums = torch.ones(len(others), 1, dtype=self.dtype), torch.zeros(len(rows), dtype=torch.float64)
            blocks = all_blocks(len(ids), len(others), False)
            sums[ids] = block_product(Tiles(self.frame), rows[ids], others, ones, blocks)[:, 0]
            out.append(sums)
        return out[0], out[-1]

    def _precise(self) -> None:
        """Double precision, by differences where matrix products would lose too much."""
        tolerance = min(PRECISE, 0.25 * self.problem.eps / math.sqrt(math.prod(self.problem.shape)))
        self.wide = False
        self._place(tiles.precise_frame(self.placed.frame, self.reach, tolerance))
        self.lost = self._lost(*self._ones())
        self.limit = max(self.limit, self.lost)  # there is nothing finer

    def refine(self) -> bool:
        """Go on to finer arithmetic; False if there is none."""
        if self.dtype == torch.float64:
            return False
        if self.wide:
            self._precise()
        self.wide = not self.wide and self.dtype == torch.float32
        return True

    def _multiply(self, x: Tensor, adjoint: bool, sums: Sums | None) -> Tensor:
        """The product; the sums of the rows and columns of K are added to `sums`."""
        z, w, blocks = self.z, self.w, self._blocks()
        if adjoint and not self.symmetric:
            z, w, sums = tiles.swapped(w), tiles.swapped(z), None if sums is None else (sums[1], sums[0])
            blocks = ((columns, rows, own) for rows, columns, own in blocks)
        x = x.to(torch.float64 if self.wide else self.dtype)
        return block_product(Tiles(self.frame), z, w, x, blocks, self.symmetric, sums)

    def _blocks(self) -> Iterator[Block]:
        return all_blocks(*self.problem.shape, self.symmetric, self.progress)

    def _relative(self) -> tuple[Tensor, Tensor, float]:
        """Bounds on the relative rounding of the terms of a row (n,) and a column (s,); of tiny entries, absolute."""
        rows, columns = self.lengths
        n, s = self.problem.shape
        tiny = min(1e-3 * torch.finfo(self.dtype).eps, 0.02 * self.limit / math.sqrt(n * s))
        by_row, floor = entry_rounding(self.frame, rows, float(columns.max()), tiny)
        by_column, _ = entry_rounding(self.frame, columns, float(rows.max()), tiny)
        sums = tiles.summation_error(max(n, s), self.dtype, self.wide)
        return by_row + sums, by_column + sums, floor


def entry_rounding(frame: Frame, own: Tensor, other: float, tiny: float) -> tuple[Tensor, float]:
    """Bounds on the relative error of the entries of rows with placed lengths `own`, others at most `other` long.

    Entries that are all below `tiny` may be off by that, the second result; the others lie so near to the row that
    |z| + |w| is limited.
    """
    profile, d, longest = frame.profile, frame.centre.shape[0], float(own.max()) + other
    floor = profile.floor_value(frame.dtype)
    if frame.arithmetic == "difference":
        return torch.zeros_like(own), tiles.differences_error(d) + floor
    worst = min(1e30, profile.change(argument_error(longest, d, frame)))
    if not profile.convex or not 0 < longest < math.inf:
        return torch.full_like(own, worst), floor
    reach = own + (own + _beyond(profile, longest, tiny)).clamp_max(other)
    # `change` is convex: half the error of an argument does at most half the harm.
    return worst * (reach / longest).square(), tiny + floor


def _beyond(profile: Profile, longest: float, tiny: float) -> float:
    """A distance beyond which the kernel, its argument off by at most COARSE, is below `tiny`; inf if there is none."""
    distance = torch.linspace(0.0, min(longest, 1e4), 512, dtype=torch.float64)
    small = profile.value(distance.square().mul_(-0.5).add_(COARSE).clamp_max_(0.0)) <= tiny
    return float(distance[small][0]) if bool(small.any()) else math.inf
