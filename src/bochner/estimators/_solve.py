"""Solving `(K + alpha I) c = y`: randomly pivoted Cholesky as preconditioner, conjugate gradients in lockstep."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bochner._checks import BochnerError
from bochner.estimators._kernel import DIRECT, MEMORY, Product, TileCholesky, linear_kernel, tile

BLOCK = 128
RANK = 1000  # pivots of a preconditioner that are always worth their time
STEP = {"matrix": 15.0, "exact": 100.0}  # what a step takes for each entry of K, in multiplications and additions
CHEAP = 2.0  # the same for methods that evaluate few entries
REFINEMENTS = 5


def pivoted_cholesky(
    points: Tensor,
    gamma: float,
    rank: int,
    enough: Callable[[float, int], bool],
    generator: torch.Generator,
) -> Tensor:
    """A factor F (n, r) with `K ~ F F'`, r <= rank; stops when `enough(trace of what is left, r)`.

    Pivots are drawn in proportion to the remaining diagonal, a block at a time with rejection, which has the law of
    drawing them one by one (Chen, Epperly, Tropp and Webber 2025; Epperly, Tropp and Webber 2024). The remainder is
    positive semidefinite, so that its trace bounds its norm. O(n r^2) and n r kernel entries.
    """
    n = len(points)
    points = points.double()
    factor = torch.empty(n, min(rank, n), dtype=torch.float64)
    left = torch.ones(n, dtype=torch.float64)  # the diagonal of K - F F'
    r = 0
    while r < factor.shape[1] and not (r and enough(float(left.sum()), r)):
        drawn = torch.multinomial(left, min(BLOCK, factor.shape[1] - r), replacement=True, generator=generator)
        block = tile(points[drawn], points[drawn], gamma) - factor[drawn, :r] @ factor[drawn, :r].T
        drawn = drawn[_accepted(block.numpy(), generator)]
        if drawn.numel() == 0:  # what is left is rounding
            break
        columns = tile(points, points[drawn], gamma)
        columns.addmm_(factor[:, :r], factor[drawn, :r].T, alpha=-1)
        core = columns[drawn]
        core.diagonal().add_(1e-14 * float(core.trace()) + 1e-300)
        lower, failed = torch.linalg.cholesky_ex((core + core.T) / 2)
        if int(failed):
            break
        new = torch.linalg.solve_triangular(lower, columns.T, upper=False).T
        factor[:, r : r + len(drawn)] = new
        r += len(drawn)
        left = (left - new.square().sum(1)).clamp_(min=0.0)
        left[drawn] = 0.0
    return factor[:, :r]


def _accepted(block: np.ndarray, generator: torch.Generator) -> Tensor:
    """Which of the proposed pivots to keep: each with the share of its diagonal that the earlier ones left."""
    a = block.copy()
    first = a.diagonal().copy()
    u = torch.rand(len(a), generator=generator, dtype=torch.float64).numpy()
    keep = np.zeros(len(a), dtype=bool)
    for i in range(len(a)):
        if a[i, i] > 1e-12 and u[i] * first[i] < a[i, i]:
            keep[i] = True
            column = a[i:, i] / math.sqrt(a[i, i])
            a[i:, i:] -= np.outer(column, column)
    return torch.from_numpy(keep)


@dataclass(frozen=True)
class Preconditioner:
    """`(F F' + alpha I)^-1` by Woodbury's identity, in float64: the difference cancels when alpha is small."""

    factor: Tensor
    lower: Tensor
    alpha: float

    def __call__(self, x: Tensor) -> Tensor:
        inner = torch.cholesky_solve(self.factor.T @ x, self.lower)
        return torch.addmm(x, self.factor, inner, alpha=-1).div_(self.alpha)


def preconditioner(factor: Tensor, alpha: float) -> Preconditioner:
    gram = factor.T @ factor
    gram.diagonal().add_(alpha)
    return Preconditioner(factor, _cholesky(gram, alpha), alpha)


def _cholesky(matrix: Tensor, alpha: float) -> Tensor:
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        raise BochnerError(f"The kernel matrix plus alpha={alpha:g} is singular to double precision; raise 'alpha'.")
    return lower


class Solution(NamedTuple):
    value: Tensor
    steps: int
    residual: float  # the largest of what is left over the columns, |r| / |y| or as `Left` says

    def converged(self, tol: float) -> bool:
        return self.residual <= tol


Left = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x, r, r'M^-1 r): what is left to do for each column, (r,)


def of_residual(y: Tensor) -> Left:
    """|r| / |y|."""
    norm = y.norm(dim=0).clamp_min(1e-300)
    return lambda x, r, rz: r.norm(dim=0) / norm


def of_variance(k: Tensor, alpha: float, preconditioned: bool) -> Left:
    """A bound on the relative error of the posterior variance `v = 1 - k' A^-1 k` by `1 - k' x`, A = K + alpha I.

    The error is `r' A^-1 r`, at most `r' M^-1 r` for the preconditioner M = F F' + alpha I: M <= A, as K - F F' is
    positive semidefinite. And v is at least alpha |A^-1 k|^2, which rounding cannot make negative.
    """
    share = 1.0 if preconditioned else 1.0 / alpha
    return lambda x, r, rz: share * rz / variance(k, x, alpha).clamp_min(1e-300)


def variance(k: Tensor, x: Tensor, alpha: float) -> Tensor:
    """`1 - k' x` for x near `(K + alpha I)^-1 k`, for each column."""
    return torch.maximum(1 - (k * x).sum(0), alpha * x.square().sum(0)).clamp_(max=1.0)


def conjugate_gradients(
    product: Product, alpha: float, y: Tensor, precondition: Product | None, left: Left, tol: float, max_iter: int
) -> Solution:
    """`(K + alpha I) x = y` for every column of y (n, r) at once: one product with K serves them all.

    The columns are independent runs of preconditioned conjugate gradients; one whose `left` is at most tol stands
    still.
    """
    x = torch.zeros_like(y)
    r = y.clone()
    z = r if precondition is None else precondition(r)
    p = z.clone()
    rz = (r * z).sum(0)
    steps = 0
    for steps in range(1, max_iter + 1):
        going = left(x, r, rz) > tol
        if not bool(going.any()):
            steps -= 1
            break
        q = product(p).add_(p, alpha=alpha)
        step = torch.where(going, rz / (p * q).sum(0).clamp_min(1e-300), 0.0)
        x += step * p
        r -= step * q
        z = r if precondition is None else precondition(r)
        fresh = (r * z).sum(0)
        p = z + torch.where(going, fresh / rz.clamp_min(1e-300), 0.0) * p
        rz = fresh
    return Solution(x, steps, float(left(x, r, rz).max()))


class System:
    """`(S K S + alpha I) c = y` for the rows of `points` and S = diag(sqrt(weight)), solved for any y.

    Up to `DIRECT` rows by Cholesky factorisation in float64, beyond by preconditioned conjugate gradients on a strictly
    linear kernel (`linear_kernel`). `rank` of the preconditioner: None stops at the r whose remainder has a trace of
    2 r alpha: its largest eigenvalue is then a few alpha, and about 12 steps suffice. Beyond 1,000 pivots it also
    stops when they have taken as long as the steps that they leave. Where a factorisation would take less time than
    these steps, and half of the matrix fits in 2 GB, that is done instead. `rank=0` goes without a preconditioner.
    """

    def __init__(
        self,
        points: np.ndarray,
        gamma: float,
        alpha: float,
        root_weight: np.ndarray | None,
        *,
        eps: float,
        method: str,
        rank: int | None,
        seed: int,
        tol: float,
    ) -> None:
        self.points, self.gamma, self.alpha, self.eps, self.seed = points, gamma, alpha, eps, seed
        self.requested, self.tol = method, tol
        self.root = None if root_weight is None else torch.from_numpy(root_weight)[:, None]
        n = len(points)
        self.precondition: Preconditioner | None = None
        self.lower: Tensor | None = None
        self.product: Product | None = None
        self.tiles: TileCholesky | None = None
        self.direct = method == "auto" and n <= DIRECT
        if self.direct:
            z = torch.from_numpy(points).double()
            matrix = self._weigh(tile(z, z, gamma))
            matrix.diagonal().add_(alpha)
            self.lower = _cholesky(matrix, alpha)
            self.method = "cholesky"
            return
        self._connect()
        if rank is None or rank > 0:
            self._precondition(rank)

    def _precondition(self, rank: int | None) -> None:
        """A factor of K; or the factorisation of the whole matrix, if that takes less time than the steps left."""
        n, left = len(self.points), math.inf

        def enough(trace: float, r: int) -> bool:
            nonlocal left
            left = trace
            return trace <= 2 * self.alpha * r or (rank is None and r >= RANK and 3 * n * r * r >= self._time(trace, r))

        most = min(n // 4, max(RANK, MEMORY // (16 * n)) if rank is None else rank)
        generator = torch.Generator().manual_seed(self.seed)
        factor = pivoted_cholesky(torch.from_numpy(self.points), self.gamma, most, enough, generator)
        fits = 4 * n * n <= MEMORY
        if rank is None and self.requested == "auto" and fits and self._time(left, factor.shape[1]) > n**3 / 3:
            self.product, self.direct = None, True
            if self._factorize():
                return
            self.direct = False
            self._connect()
        factor = factor if self.root is None else self.root * factor
        self.precondition = preconditioner(factor, self.alpha)

    def _time(self, trace: float, r: int) -> float:
        """What conjugate gradients will take with r pivots, in multiplications and additions.

        By Chebyshev's bound on the steps; the largest eigenvalue of the remainder is about twice its trace over r.
        """
        steps = 0.5 * math.sqrt(1 + 2 * trace / (r * self.alpha)) * math.log(2 / self.tol)
        n = len(self.points)
        return steps * (STEP.get(self.method, CHEAP) * n * n + 4 * n * r)

    def _factorize(self) -> bool:
        """Whether the whole matrix could be factored: it cannot if alpha drowns in rounding."""
        try:
            self.tiles = TileCholesky(torch.from_numpy(self.points), self.gamma, self.alpha, self.root)
        except torch.linalg.LinAlgError:
            return False
        self.method = "cholesky"
        return True

    def _weigh(self, matrix: Tensor) -> Tensor:
        return matrix if self.root is None else self.root * matrix * self.root.T

    def _connect(self) -> None:
        kernel = linear_kernel(self.points, self.gamma, self.eps, self.requested, self.seed)
        self.method, root = kernel.method, self.root
        self.product = kernel.product if root is None else lambda x: root * kernel.product(root * x)

    def solve(self, y: Tensor, tol: float, max_iter: int, left: Left | None = None) -> Solution:
        """c for every column of y (n, r), float64; `left` is to be at most tol, None for the relative residual."""
        if self.lower is not None:
            return Solution(torch.cholesky_solve(y, self.lower), 1, 0.0)
        if self.direct:
            return self._solve_tiles(y, tol if left is None else math.inf)
        if self.product is None:
            self._connect()
        assert self.product is not None
        left = left or of_residual(y)
        return conjugate_gradients(self.product, self.alpha, y, self.precondition, left, tol, max_iter)

    def _solve_tiles(self, y: Tensor, tol: float) -> Solution:
        """By the factorisation; refined until the residual, computed from the kernel itself, is at most tol |y|."""
        if self.tiles is None:
            self._factorize()
        assert self.tiles is not None
        x = self.tiles.solve(y)
        if not math.isfinite(tol):
            return Solution(x, 1, 0.0)
        norm, worst = y.norm(dim=0).clamp_min(1e-300), math.inf
        for _ in range(REFINEMENTS):
            rest = self.tiles.residual(x, y)
            before, worst = worst, float((rest.norm(dim=0) / norm).max())
            if worst <= tol or worst > before / 2:
                break
            x += self.tiles.solve(rest)
        return Solution(x, 1, worst)

    def solve_variance(self, k: Tensor, tol: float, max_iter: int) -> Solution:
        """c for every column of k, kernels of queries (n, r); `variance` by it has a relative error of at most tol."""
        return self.solve(k, tol, max_iter, of_variance(k, self.alpha, self.precondition is not None))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "product": None, "tiles": None}  # closures and gigabytes: built again when needed
