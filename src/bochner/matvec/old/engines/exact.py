"""Exact tiles: every pair, in the cheapest arithmetic whose rounding stays below eps/2 for every x."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..problem import Problem
from ..tiles import (
    PRECISE,
    Frame,
    Tiles,
    argument_error,
    exact_product,
    exact_symmetric,
    extent,
    left,
    make_frame,
    norms,
    precise_frame,
    right,
    summation_error,
    swapped,
)
from .base import Applied, Engine

LOOKED_AT = 32  # rows, and columns, that can say at once that single precision is too coarse
COARSE = 0.25  # an error of the argument above which nobody asks any further


class ExactEngine(Engine):
    """`wide`: entries in single precision, sums over them in double precision."""

    name, exact, certain = "exact", True, True

    def __init__(self, frame: Frame, queries: Tensor, keys: Tensor, symmetric: bool) -> None:
        self.frame, self.symmetric, self.dtype, self.wide = frame, symmetric, frame.dtype, False
        z = frame.place(queries)
        self.z, self.w = left(z), right(z if symmetric else frame.place(keys))

    def apply(self, x: Tensor, adjoint: bool = False) -> Applied:
        tiles = Tiles(self.frame)
        return Applied(self._multiply(tiles, x, adjoint), tiles.pairs)

    def _multiply(self, tiles: Tiles, x: Tensor, adjoint: bool) -> Tensor:
        x = x.to(torch.float64 if self.wide else self.dtype)
        if self.symmetric:
            return exact_symmetric(tiles, self.z, self.w, x, self.progress)
        if adjoint:
            return exact_product(tiles, left(self.w[:, :-2]), right(self.z[:, :-2]), x, self.progress)
        return exact_product(tiles, self.z, self.w, x, self.progress)

    def slope(self, x: Tensor) -> Tensor:
        return self._multiply(Tiles(self.frame, slope=True), x, False)

    def error_bound(self, x: Tensor, adjoint: bool = False) -> tuple[Tensor, int]:
        """Entry by entry: rounding of the argument, of the profile, of x and of the sums, all relative to K|x|."""
        absolute = self.apply(x.abs(), adjoint)
        rows, others = (self.w, self.z) if adjoint else (self.z, self.w)
        size, most = norms(rows[:, :-2]), float(norms(others[:, :-2]).max())
        d = rows.shape[1] - 2
        relative = torch.cat(  # of 256 rows together, by the longest
            [
                torch.full(
                    (part.numel(),), self.frame.kernel.change(argument_error(float(part.max()) + most, d, self.frame))
                )
                for part in size.split(256)
            ]
        )
        relative = relative.double() + summation_error(others.shape[0], self.dtype, self.wide)
        bound = relative[:, None] * absolute.value.double()
        floor = self.frame.kernel.floor_value(self.dtype) * x.double().abs().sum(0)
        return bound.norm(dim=0) + floor * math.sqrt(bound.shape[0]), absolute.pairs


def exact_engine(problem: Problem) -> ExactEngine:
    """Exact tiles in single precision if that takes at most eps/2 from any x, else in double precision.

    float64 points are always multiplied in float64.
    """
    frame = make_frame(problem.kernel, problem.keys, problem.bandwidth, "float32")
    reach = math.inf
    if problem.dtype == torch.float32:
        reach = extent(frame, problem.queries) + extent(frame, problem.keys)
    if math.isfinite(reach) and argument_error(reach, problem.keys.shape[1], frame) <= COARSE:
        engine = ExactEngine(frame, problem.queries, problem.keys, problem.symmetric)
        wide = _sums_needed(engine, reach, 0.5 * problem.eps)
        if wide is not None:
            engine.wide = wide
            return engine
    return precise_engine(problem)


def _sums_needed(engine: ExactEngine, reach: float, limit: float) -> bool | None:
    """Whether sums must be in double precision for the rounding to take at most limit |x| from any x; None: no use."""
    loss = Loss(engine, reach)
    # 1. As if all entries were one.
    sides = [loss.most(side) for side in loss.sides]
    found = loss.enough(sides, limit)
    # 2. A few rows and columns: what is lost there is lost.
    if found is not None or loss.norm([loss.some(side) for side in loss.sides], True) > limit:
        return found
    # 3. All rows, then all columns, for the price of a product each.
    for side in loss.sides:
        sides[side] = loss.everywhere(side)
        found = loss.enough(sides, limit)
        if found is not None:
            break
    return found


class Loss:
    """What single precision can take from K: |E_ij| <= c (|z_i| + |w_j|)^2 K_ij, and sums lose a share of K|x|.

    Row sums of that need K times 1, |w| and |w|^2, and |E|_2 <= sqrt(largest row sum * largest column sum) (Schur's
    test), for every x. Side 0 are the rows, side 1 the columns, if they are other points; what is known of one are the
    lengths of its points and these three sums.
    """

    def __init__(self, engine: ExactEngine, reach: float) -> None:
        self.engine, self.sides = engine, (0,) if engine.symmetric else (0, 1)
        rows = norms(engine.z[:, :-2]).double()
        self.length = (rows, rows if engine.symmetric else norms(engine.w[:, :-2]).double())
        kernel, dtype, d = engine.frame.kernel, engine.dtype, engine.z.shape[1] - 2
        relative = kernel.change(argument_error(reach, d, engine.frame))
        # `change` is convex where it is not a square root: then only its largest value serves.
        self.constant = 0.0 if kernel.convex else relative
        self.slope = relative / max(reach * reach, 1e-300) if kernel.convex else 0.0
        self.margin = (1.0 + relative) * (1.0 + 1e-3)  # K itself and its sums were rounded too
        self.floor = kernel.floor_value(dtype) * math.sqrt(engine.z.shape[0] * engine.w.shape[0])

    def most(self, side: int) -> tuple[Tensor, Tensor]:
        own = self.length[side]
        return own, _powers(self.length[1 - side]).sum(0).expand(own.numel(), 3)

    def some(self, side: int) -> tuple[Tensor, Tensor]:
        own, engine = self.length[side], self.engine
        z, w = (engine.z, engine.w) if side == 0 else (swapped(engine.w), swapped(engine.z))
        ids = own.argsort()[:: max(1, own.numel() // LOOKED_AT)]
        powers = _powers(self.length[1 - side]).to(engine.dtype)
        return own[ids], exact_product(Tiles(engine.frame), z[ids], w, powers)

    def everywhere(self, side: int) -> tuple[Tensor, Tensor]:
        powers = _powers(self.length[1 - side]).to(self.engine.dtype)
        return self.length[side], self.engine.apply(powers, adjoint=side == 1).value

    def norm(self, sides: list[tuple[Tensor, Tensor]], wide: bool) -> float:
        share = summation_error(max(map(len, self.length)), self.engine.dtype, wide) + self.constant
        largest = []
        for own, sums in sides:
            squares = own.square() * sums[:, 0] + 2.0 * own * sums[:, 1] + sums[:, 2]
            largest.append(float((self.slope * squares + share * sums[:, 0]).max()))
        return math.sqrt(largest[0] * largest[-1]) * self.margin + self.floor

    def enough(self, sides: list[tuple[Tensor, Tensor]], limit: float) -> bool | None:
        return next((wide for wide in (False, True) if self.norm(sides, wide) <= limit), None)


def _powers(length: Tensor) -> Tensor:
    return torch.stack([torch.ones_like(length), length, length.square()], 1)


def precise_engine(problem: Problem) -> ExactEngine:
    """Exact tiles in double precision."""
    tolerance = min(PRECISE, 0.25 * problem.eps / math.sqrt(math.prod(problem.shape)))
    frame = precise_frame(problem.kernel, problem.queries, problem.keys, problem.bandwidth, tolerance)
    return ExactEngine(frame, problem.queries, problem.keys, problem.symmetric)
