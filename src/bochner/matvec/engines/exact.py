"""Exact tiles: every pair, in the cheapest arithmetic whose rounding stays far below eps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..problem import Problem
from ..tiles import (
    TYPICAL,
    ExactRows,
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

LOOKED_AT = 32  # rows that say what single precision loses


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

    In sums of one sign little of it cancels: what a few rows of K 1 lose must stay below eps / 4 too. float64 points
    are always multiplied in float64.
    """
    frame = make_frame(problem.kernel, problem.keys, problem.bandwidth, "float32")
    if problem.dtype == torch.float32:
        reach = extent(frame, problem.queries) + extent(frame, problem.keys)
        lost = math.inf
        if reach < 1e15:
            lost = problem.kernel.change(argument_error(reach, problem.keys.shape[1], frame) / TYPICAL)
        if lost <= min(problem.eps / 10, 1e-3) and 4 * _coherent_error(problem, frame) <= problem.eps:
            return ExactEngine(frame, problem.queries, problem.keys, problem.symmetric)
    return precise_engine(problem)


def _coherent_error(problem: Problem, frame: Frame) -> float:
    """|E 1| / |1|, E what single precision loses, from a few rows."""
    n, s = problem.shape
    ids = torch.arange(0, n, max(1, n // LOOKED_AT))
    ones = torch.ones(s, 1, dtype=torch.float64)
    precise, rough = (
        ExactRows(problem.kernel, problem.queries, problem.keys, problem.bandwidth, ones, f)(ids) for f in (None, frame)
    )
    return float((precise - rough).square().mean().sqrt()) * math.sqrt(n / s)


def precise_engine(problem: Problem) -> ExactEngine:
    """Exact tiles in double precision."""
    frame = precise_frame(problem.kernel, problem.queries, problem.keys, problem.bandwidth)
    return ExactEngine(frame, problem.queries, problem.keys, problem.symmetric)
