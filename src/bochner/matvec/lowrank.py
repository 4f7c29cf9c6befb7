"""Low rank: `K ~ F F'` by randomly pivoted Cholesky; the factor multiplies, and it preconditions solvers.

What is left, R = K - F F', is positive semidefinite. Its diagonal is known, so that every entry is bounded,
|R_ij| <= sqrt(R_ii R_jj), and |R|_2 <= tr R.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from .._checks import BochnerError, finite, positive_int, spawn_seed
from .kernels import Kernel, Problem
from .tiles import PRECISE, Frame, Tiles, argument_error, differences_error, extent, left, precise_frame, right

BLOCK = 128  # pivots drawn at once
SHARE = 0.5  # of eps, for what a factor leaves out
DEPENDENT = 1e-10  # pivots this close to the span of the others are left out


@dataclass(frozen=True)
class Factor:
    """`K(X, X) ~ rows rows'`, from the columns of K at `pivots`; `remaining`: the diagonal of what is left."""

    kernel: Kernel
    points: Tensor  # (r, d) the pivots themselves
    pivots: Tensor  # (r,) where they are in X
    rows: Tensor  # (n, r) float64
    remaining: Tensor  # (n,) float64
    smallest: float  # of the pivots, as they were when they were taken

    @property
    def rank(self) -> int:
        return self.rows.shape[1]

    @property
    def trace(self) -> float:
        """tr R, an upper bound on |K - F F'|_2."""
        return float(self.remaining.sum())

    @property
    def rounding(self) -> float:
        """How far an entry of F F', as computed, may be from that of the exact factor: a small pivot magnifies."""
        return 8 * torch.finfo(torch.float64).eps * (self.rank + 16) / math.sqrt(self.smallest)

    def extend(self, Z: Tensor) -> Tensor:
        """Rows (m, r) for other points: K(Z, X) ~ extend(Z) rows'."""
        if self.rank == 0:
            return torch.zeros(len(Z), 0, dtype=torch.float64)
        block = self.kernel.block(Z.double(), self.points.double())
        return torch.linalg.solve_triangular(self.rows[self.pivots], block.T, upper=False).T.contiguous()


def pivoted_cholesky(
    kernel: Kernel,
    X: Tensor,
    rank: int,
    *,
    tolerance: float = 0.0,
    seed: int = 0,
    stop: Callable[[float, int], bool] | None = None,
) -> Factor:
    """At most `rank` columns; fewer once the trace of what is left is at most `tolerance`, or `stop(trace, r)`.

    Pivots are drawn in proportion to the diagonal of what is left, a block at a time with rejection. That has the law
    of drawing them one by one. Chen, Epperly, Tropp and Webber 2023; Epperly, Tropp and Webber 2024. Cost: O(n r^2).
    """
    frame, rank = kernel.frame(X, "float64"), positive_int(rank, "rank", "pivoted_cholesky")
    n, generator = len(finite(X, "X", "pivoted_cholesky")), torch.Generator().manual_seed(seed)
    frame = precise_frame(frame, 2 * extent(frame, X))
    z, tiles = left(frame.place(X)), Tiles(frame)
    columns = torch.empty(min(rank, n), n, dtype=torch.float64)  # F', so that unused columns are never touched
    rest = torch.ones(n, dtype=torch.float64)
    pivots: list[Tensor] = []
    r, trace, smallest = 0, float(n), 1.0
    while r < len(columns) and trace > tolerance and not (stop is not None and r and stop(trace, r)):
        # 1. Proposals, of which each stays with the share of its diagonal that the earlier ones have left.
        size = min(BLOCK, len(columns) - r, int((rest > 0).sum()))
        if size == 0:
            break
        drawn = torch.multinomial(rest, size, replacement=True, generator=generator)
        known = columns[:r, drawn]
        core = _columns(frame, tiles, z[drawn], X[drawn]) - known.T @ known
        kept = _accepted(core.numpy(), rest[drawn].numpy(), generator)
        drawn, known = drawn[kept], known[:, kept]
        if drawn.numel() == 0:  # what is left is rounding
            break
        # 2. Their columns of what is left, and the Cholesky factor of their own block.
        new = _columns(frame, tiles, z, X[drawn])
        new.addmm_(columns[:r].T, known, alpha=-1)
        own = new[drawn]
        lower, failed = torch.linalg.cholesky_ex((own + own.T) / 2.0)
        if int(failed):
            break
        new = torch.linalg.solve_triangular(lower, new.T, upper=False)
        new[:, drawn] = lower.T  # exactly triangular, as `extend` wants it
        # 3. Append them, and take their squares off the diagonal.
        columns[r : r + len(drawn)] = new
        r += len(drawn)
        rest = (rest - new.square().sum(0)).clamp_(min=0.0)
        rest[drawn] = 0.0
        trace, smallest = float(rest.sum()), min(smallest, float(lower.diagonal().square().min()))
        pivots.append(drawn)
    chosen = torch.cat(pivots) if pivots else torch.empty(0, dtype=torch.long)
    return Factor(kernel, X[chosen], chosen, columns[:r].T, rest, smallest)


def _columns(frame: Frame, tiles: Tiles, z: Tensor, points: Tensor) -> Tensor:
    w = right(frame.place(points))
    return torch.cat([tiles(part, w).clone() for part in z.split(2048)])


def _accepted(core: np.ndarray, proposed: np.ndarray, generator: torch.Generator) -> Tensor:
    """Which proposed pivots stay; `core`: their block of what is left, overwritten; `proposed`: their diagonal."""
    u = torch.rand(len(core), generator=generator, dtype=torch.float64).numpy()
    keep = np.zeros(len(core), dtype=bool)
    for i in range(len(core)):
        if core[i, i] > DEPENDENT and u[i] * proposed[i] < core[i, i]:
            keep[i] = True
            column = core[i:, i] / math.sqrt(core[i, i])
            core[i:, i:] -= np.outer(column, column)
    return torch.from_numpy(keep)


def ridge_factor(matrix: Tensor, alpha: float) -> Tensor:
    """The Cholesky factor of `matrix + alpha I`; alpha is added in place."""
    matrix.diagonal().add_(alpha)
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        raise BochnerError(f"The kernel matrix plus alpha={alpha:g} is singular to double precision; raise 'alpha'.")
    return lower


class Preconditioner(LinearOperator):
    """`(F F' + alpha I)^-1` by Woodbury's identity, in float64; called with a tensor (n, r), or as scipy's `M`."""

    def __init__(self, rows: Tensor, alpha: float) -> None:
        super().__init__(np.dtype(np.float64), (rows.shape[0], rows.shape[0]))
        self.rows, self.alpha, self.lower = rows, alpha, ridge_factor(rows.T @ rows, alpha)

    def __call__(self, x: Tensor) -> Tensor:
        inner = torch.cholesky_solve(self.rows.T @ x, self.lower)
        return torch.addmm(x, self.rows, inner, alpha=-1).div_(self.alpha)

    @cached_property
    def logdet(self) -> float:
        """log det(F F' + alpha I)."""
        n, r = self.rows.shape
        return 2.0 * float(self.lower.diagonal().log().sum()) + (n - r) * math.log(self.alpha)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """(n, count): Gaussian vectors with covariance F F' + alpha I."""
        n, r = self.rows.shape
        first = torch.randn(r, count, generator=generator, dtype=torch.float64)
        rest = torch.randn(n, count, generator=generator, dtype=torch.float64)
        return torch.addmm(rest, self.rows, first, beta=math.sqrt(self.alpha))

    def _matmat(self, X: Any) -> np.ndarray:
        return self(torch.from_numpy(np.require(X, np.float64, ["C", "W"]))).numpy()

    def _adjoint(self) -> LinearOperator:
        return self


class LowRankEngine:
    """Products by the factor. Where queries are keys the rest of the diagonal is added back, which costs nothing."""

    name = "lowrank"
    progress = False

    def __init__(self, problem: Problem, rank: int, stop: Callable[[float, int], bool] | None = None) -> None:
        self.problem = problem
        n, s = problem.shape
        points = problem.keys if problem.symmetric else torch.cat([problem.keys, problem.queries])
        # |R_qk|_2 <= sqrt(tr R_qq tr R_kk), at most half of both traces together.
        tolerance = SHARE * problem.eps * (1 if problem.symmetric else 2)
        self.factor = pivoted_cholesky(
            problem.kernel, points, rank, tolerance=tolerance, seed=spawn_seed(problem.seed, 2), stop=stop
        )
        self.keys, self.queries = self.factor.rows[:s], self.factor.rows[-n:]
        self.remaining = self.factor.remaining[:s]
        left_out = self.factor.remaining + self.factor.rounding
        self.roots = left_out[-n:].sqrt(), left_out[:s].sqrt()  # of queries and of keys
        self.pairs = (n + s) * self.factor.rank

    def apply(self, x: Tensor, adjoint: bool = False) -> Tensor:
        rows, columns = (self.keys, self.queries) if adjoint else (self.queries, self.keys)
        y = rows @ (columns.T @ x)
        return y.addcmul_(self.remaining[:, None], x) if self.problem.symmetric else y

    @cached_property
    def _entry(self) -> float:
        """How far an entry may be off by rounding: of the kernel, of the factor, and of sums of n + r terms."""
        problem, unit = self.problem, torch.finfo(torch.float64).eps
        frame = problem.kernel.frame(problem.keys, "float64")
        reach = 2 * max(extent(frame, problem.queries), extent(frame, problem.keys))
        lost = differences_error(problem.keys.shape[1])
        if precise_frame(frame, reach).arithmetic != "difference":
            lost = problem.kernel.profile.change(argument_error(reach, problem.keys.shape[1], frame))
        terms = max(problem.shape) + self.factor.rank
        return 10 * min(PRECISE, lost + 8 * unit) + self.factor.rounding + unit * terms

    @property
    def norm(self) -> float:
        size = math.sqrt(math.prod(self.problem.shape))
        return float(self.roots[0].norm() * self.roots[1].norm()) + self._entry * size

    @property
    def certain(self) -> bool:
        return self.norm <= self.problem.eps

    def certified(self, x: Tensor) -> tuple[Tensor, Tensor]:
        size = float((self.roots[1] * x.abs()[:, 0]).sum())  # |R_ij| <= sqrt(R_ii R_jj)
        return self.apply(x), self.roots[0] * size + self._entry * float(x.abs().sum())
