"""Exact tiles: every pair, in the cheapest arithmetic whose rounding stays far below eps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..problem import Problem
from ..tiles import (
    TYPICAL,
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
)
from .base import Applied, Engine


class ExactEngine(Engine):
    name, exact, certain = "exact", True, True

    def __init__(self, frame: Frame, queries: Tensor, keys: Tensor, symmetric: bool) -> None:
        self.frame, self.symmetric, self.dtype = frame, symmetric, frame.dtype
        z = frame.place(queries)
        self.z, self.w = left(z), right(z if symmetric else frame.place(keys))

    def apply(self, x: Tensor, adjoint: bool = False) -> Applied:
        tiles = Tiles(self.frame)
        return Applied(self._multiply(tiles, x, adjoint), tiles.pairs)

    def _multiply(self, tiles: Tiles, x: Tensor, adjoint: bool) -> Tensor:
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
        relative = relative.double() + summation_error(others.shape[0], self.dtype)
        bound = relative[:, None] * absolute.value.double()
        floor = self.frame.kernel.floor_value(self.dtype) * x.double().abs().sum(0)
        return bound.norm(dim=0) + floor * math.sqrt(bound.shape[0]), absolute.pairs


def exact_engine(problem: Problem) -> ExactEngine:
    """Exact tiles in the cheapest arithmetic that loses less than min(eps/10, 1e-3) per entry, as a rule.

    float64 points are always multiplied in float64.
    """
    frame = make_frame(problem.kernel, problem.keys, problem.bandwidth, "float32")
    if problem.dtype == torch.float32:
        reach = extent(frame, problem.queries) + extent(frame, problem.keys)
        lost = argument_error(reach, problem.keys.shape[1], frame) / TYPICAL
        if reach < 1e15 and problem.kernel.change(lost) <= min(problem.eps / 10, 1e-3):
            return ExactEngine(frame, problem.queries, problem.keys, problem.symmetric)
    return precise_engine(problem)


def precise_engine(problem: Problem) -> ExactEngine:
    """Exact tiles in double precision."""
    frame = precise_frame(problem.kernel, problem.queries, problem.keys, problem.bandwidth)
    return ExactEngine(frame, problem.queries, problem.keys, problem.symmetric)
