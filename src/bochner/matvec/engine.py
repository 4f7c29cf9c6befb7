"""The problem, and the interface of an engine: one way to multiply whose error is bounded before x is known."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .kernels import Kernel
from .profiles import Profile
from .tiles import Frame, Sums, argument_error, differences_error

COARSE = 0.25  # an error of the argument above which an arithmetic is not considered


@dataclass(frozen=True)
class Problem:
    """The kernel matrix between `queries` (n, d) and `keys` (s, d), and how well it must be multiplied."""

    kernel: Kernel
    queries: Tensor
    keys: Tensor
    symmetric: bool  # the queries are the keys
    eps: float
    seed: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.queries.shape[0], self.keys.shape[0]

    @property
    def pairs(self) -> float:
        """Kernel entries that an exact product evaluates."""
        return math.prod(self.shape) / (2 if self.symmetric else 1)

    @property
    def dtype(self) -> torch.dtype:
        """Of the points, and so of the answers."""
        return self.queries.dtype


class Certified(NamedTuple):
    """A product y (n, 1) of one column, and bounds on |Kx - y| for each of its rows (n,)."""

    value: Tensor
    rows: Tensor


class Engine:
    """`apply` multiplies x (s, r), or for the adjoint (n, r), and returns float64. Linear, and repeatable."""

    name = ""
    progress = False
    pairs = 0  # kernel entries evaluated, or read, by one product
    problem: Problem

    def apply(self, x: Tensor, adjoint: bool = False) -> Tensor:
        raise NotImplementedError

    def certified(self, x: Tensor) -> Certified:
        """The product with one column (s, 1), and what each of its rows can be off by, rounding included."""
        raise NotImplementedError

    @property
    def norm(self) -> float:
        """Bound on |K - what this multiplies by|_2, rounding included; known after the first product at the latest."""
        raise NotImplementedError

    @property
    def certain(self) -> bool:
        """Whether the error of every product is within eps."""
        return self.norm <= self.problem.eps


class TileEngine(Engine):
    """Evaluates kernel tiles in every product, in the cheapest arithmetic whose rounding leaves room for eps.

    What rounding can take from any x follows from the sums of K over rows and columns (Schur's test):
    |E|_2 <= sqrt(largest row sum * largest column sum) of the error matrix E. Where they are not known to be small, the
    first product forms them beside its own sums; if they are too large, it is repeated in finer arithmetic.
    """

    limit: float  # on what rounding may take from any x, relative to |x|
    lost: float = math.inf  # a bound on that, once it is settled
    symmetric: bool

    @property
    def settled(self) -> bool:
        return self.lost <= self.limit

    @property
    def certain(self) -> bool:
        return not self.settled or self.norm <= self.problem.eps

    def apply(self, x: Tensor, adjoint: bool = False) -> Tensor:
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

    def _multiply(self, x: Tensor, adjoint: bool, sums: Sums | None) -> Tensor:
        """The product; the sums of the rows and columns of K are added to `sums`, in the caller's order."""
        raise NotImplementedError

    def _relative(self) -> tuple[Tensor, Tensor, float]:
        """Bounds on the relative rounding of the terms of a row (n,) and of a column (s,), and of an entry, absolute.

        The last is for entries too small for the first two.
        """
        raise NotImplementedError

    def refine(self) -> bool:
        """Go on to finer arithmetic; False if there is none."""
        raise NotImplementedError

    def _lost(self, rows: Tensor, columns: Tensor) -> float:
        """Schur's test; the sums of K themselves were rounded too."""
        by_row, by_column, absolute = self._relative()
        margin = 1.0 + 2.0 * float(torch.maximum(by_row.max(), by_column.max()))
        most = float((by_row * rows).max()) * float((by_column * columns).max())
        return margin * math.sqrt(most) + absolute * math.sqrt(rows.numel() * columns.numel())

    def certified(self, x: Tensor) -> Certified:
        y = self.apply(torch.cat([x, x.abs()], 1))
        by_row, _, absolute = self._relative()
        margin = 1.0 + 2.0 * float(by_row.max())
        return Certified(y[:, :1], margin * by_row * y[:, 1] + absolute * float(x.abs().sum()))


def entry_rounding(frame: Frame, own: Tensor, other: float, tiny: float) -> tuple[Tensor, float]:
    """Bounds on the relative error of the entries of rows with placed lengths `own`, others at most `other` long.

    Where entries beyond some distance are all below `tiny`, they may be off by that, the second result; the others
    lie within that distance of the row, which limits |z| + |w|.
    """
    profile, d, longest = frame.profile, frame.centre.shape[0], float(own.max()) + other
    if frame.arithmetic == "difference":
        return torch.zeros(own.shape, dtype=torch.float64), differences_error(d) + profile.floor_value(frame.dtype)
    worst = profile.change(argument_error(longest, d, frame))
    far = _beyond(profile, longest, tiny)
    if not profile.convex or not 0 < longest < math.inf:
        return torch.full(own.shape, min(worst, 1e30), dtype=torch.float64), profile.floor_value(frame.dtype)
    reach = own.double() + (own.double() + far).clamp_max(other)
    # `change` is convex: half the error of an argument does at most half the harm.
    return min(worst, 1e30) * (reach / longest).square(), tiny + profile.floor_value(frame.dtype)


def _beyond(profile: Profile, longest: float, tiny: float) -> float:
    """A distance beyond which the kernel, its argument off by at most COARSE, is below `tiny`; inf if there is none."""
    distance = torch.linspace(0.0, min(longest, 1e4), 512, dtype=torch.float64)
    small = profile.value(distance.square().mul_(-0.5).add_(COARSE).clamp_max_(0.0)) <= tiny
    return float(distance[small][0]) if bool(small.any()) else math.inf
