"""`KernelOperator`: the kernel matrix as a scipy linear operator, with its error bounded."""

from __future__ import annotations

import math
import time
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from .._checks import BochnerError, make_generator, one_of, positive_float, positive_int
from .choose import METHODS, Plan, choose
from .exact import PlacedKeys
from .inputs import OWNER, as_points, as_real, as_values
from .kernels import Kernel, KernelProduct, Problem
from .lowrank import LowRankEngine, Preconditioner, pivoted_cholesky, ridge_factor
from .solve import LogDet, conjugate_gradients, logdet
from .tiles import BLOCK, norms

FLOORS = {torch.float32: 1e-6, torch.float64: 1e-13}
DIRECT = 2048  # rows up to which solving and determinants are by factorisation
LONG = 5.0  # seconds from which a product shows its progress
PAIR = 2e-9  # seconds of a pair, roughly


@dataclass(frozen=True)
class Estimate:
    """A product y and bounds on its error: |Kx - y|_2 <= `bound`, and |Kx - y|_i <= `row_bounds[i]` for every row.

    `relative` divides the bound by |x|_2, which is what `eps` limits. `pairs`: kernel entries evaluated, or
    numbers of the factor read, of `all_pairs` in the matrix.
    """

    value: Any
    bound: float
    row_bounds: Any
    norm_x: float
    eps: float
    method: str
    pairs: int
    all_pairs: int
    seconds: float

    @property
    def relative(self) -> float:
        return self.bound / self.norm_x if self.norm_x > 0 else 0.0

    @property
    def met(self) -> bool:
        """Whether the bound is within eps |x|."""
        return self.bound <= self.eps * self.norm_x

    @property
    def statement(self) -> str:
        """The statement in words."""
        return (
            f"|Kx - y| <= {self.bound:.3g} = {self.relative:.3g} |x|, and no row is off by more than "
            f"{float(self.row_bounds.max()):.3g}: deterministically, rounding included."
        )

    def __str__(self) -> str:
        share = self.pairs / max(1, self.all_pairs)
        return f"{self.statement} {self.method}: {share:.1%} of the pairs, {self.seconds:.3g} s."


class KernelOperator(LinearOperator):
    """The matrix `K_ij = exp(-|q_i - k_j|^2 / (2 sigma^2))` as an operator: `y = K @ x` for any signed x.

    The contract is |Kx - y|_2 <= eps |x|_2 for every x: what is skipped, dropped or rounded is bounded before x is
    known. Products are linear and repeatable. Gradients reach x, the points and the bandwidth where they are tensors.

    Args:
        queries: (n, d) array, numpy or torch (on the CPU), float32 or float64; shared, not copied, where it can be.
        keys: (s, d); None means the queries, and then K is symmetric and so is the operator.
        bandwidth: sigma, one number or one for each feature; 1 / sqrt(2 gamma) in scikit-learn's terms.
        eps: the error allowed, relative to |x|_2.
        seed: of clusters and pivots.
        kernel: "gaussian", or "laplace" (= "matern12"), "matern32", "matern52", "student".
        method: "auto" takes the fastest by prediction; "exact" every pair, in tiles; "cells" blocks of near pairs;
            "lowrank" a factor by pivoted Cholesky.
        products: how many products are expected. A factor pays for several.

    `memory`: bytes that a factor may take. `progress`: whether products show a bar; None: those of over five seconds.

    Example:
        >>> import torch, bochner
        >>> points = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
        >>> K = bochner.KernelOperator(points, bandwidth=1.0)
        >>> bool(((K @ torch.ones(500)) >= 1).all())
        True
        >>> print(K.plan)
        Method exact: 500 x 500 is small.
    """

    memory = 1 << 31
    progress: bool | None = None
    shift = 0.0
    plan: Plan
    build_seconds: float
    kernel: Kernel
    bandwidth: float | Tensor
    eps: float
    seed: int
    symmetric: bool  # whether the queries are the keys
    queries: Tensor
    keys: Tensor

    def __init__(
        self,
        queries: Any,
        keys: Any = None,
        bandwidth: Any = 1.0,
        eps: float = 0.1,
        seed: int = 0,
        *,
        kernel: str = "gaussian",
        method: str = "auto",
        products: int = 1,
    ) -> None:
        points = as_points(queries, "queries")
        other = points if keys is None else as_points(keys, "keys")
        if points.shape[1] != other.shape[1]:
            raise BochnerError(
                f"The 'queries' and 'keys' of {OWNER} must have the same number of columns, got {points.shape[1]} "
                f"and {other.shape[1]}."
            )
        dtype = torch.promote_types(points.dtype, other.dtype)
        positive_float(eps, "eps", OWNER)
        if eps < FLOORS[dtype]:
            remedy = "pass float64 points" if dtype == torch.float32 else "no dtype here is finer"
            raise BochnerError(
                f"The 'eps' of {OWNER} is {eps!r}, below what {dtype} can resolve ({FLOORS[dtype]:g}); {remedy}."
            )
        make_generator(seed)
        if seed is None:
            raise BochnerError(f"The 'seed' of {OWNER} must be an int: the operator has to be repeatable.")
        self._method = one_of(method, "method", OWNER, METHODS)
        self._products = positive_int(products, "products", OWNER)
        self._learned = tuple(
            value if isinstance(value, Tensor) and value.requires_grad else None for value in (queries, keys, bandwidth)
        )
        points = points.to(dtype)
        made = Kernel(kernel, bandwidth)
        made.frame(other[:1], "float64")  # a bandwidth for each feature fits them
        symmetric = keys is None
        problem = Problem(made, points, points if symmetric else other.to(dtype), symmetric, float(eps), seed)
        if any(value is not None for value in self._learned):  # an optimizer would change them under our hands
            copy = problem.queries.clone()
            problem = replace(problem, queries=copy, keys=copy if symmetric else problem.keys.clone())
        self._build(problem, PlacedKeys(problem))

    def _build(self, problem: Problem, placed: PlacedKeys) -> None:
        begun = time.perf_counter()
        numpy_dtype = np.float32 if problem.dtype == torch.float32 else np.float64
        super().__init__(np.dtype(numpy_dtype), problem.shape)
        self._problem, self._placed = problem, placed
        self.__dict__.update(vars(problem), bandwidth=problem.kernel.bandwidth)
        self._engine, self.plan = choose(problem, self._method, self._products, self.memory, placed)
        self.build_seconds = time.perf_counter() - begun

    @property
    def method(self) -> str:
        """The method in use."""
        return self._engine.name

    @property
    def certain(self) -> bool:
        """Whether eps is kept for every x: always, but for a factor that was asked for and is too small."""
        return self._engine.certain

    def __repr__(self) -> str:
        shift = f", shift={self.shift:g}" if self.shift else ""
        return (
            f"KernelOperator(shape={self.shape}, kernel={self.kernel.name!r}, bandwidth={self.kernel.told_bandwidth}, "
            f"eps={self.eps:g}, method={self.method!r}, dtype={self.dtype}{shift})"
        )

    def matvec(self, x: Any) -> Any:
        """`K x` for x of shape (s,) or (s, 1)."""
        return self._public(x, adjoint=False, columns=False)

    def rmatvec(self, x: Any) -> Any:
        """`K' x` for x of shape (n,) or (n, 1)."""
        return self._public(x, adjoint=True, columns=False)

    def matmat(self, X: Any) -> Any:
        """`K X` for X of shape (s, r): one pass for all columns."""
        return self._public(X, adjoint=False, columns=True)

    def rmatmat(self, X: Any) -> Any:
        """`K' X` for X of shape (n, r)."""
        return self._public(X, adjoint=True, columns=True)

    def dot(self, x: Any) -> Any:
        """`K x`, `K X`, or the composition with a scalar or another operator."""
        if isinstance(x, LinearOperator) or np.isscalar(x):
            return super().dot(x)
        table = as_real(x, "x")
        if table.ndim not in (1, 2):
            raise BochnerError(
                f"The 'x' of {OWNER} must have shape ({self.shape[1]},) or ({self.shape[1]}, r), got "
                f"{tuple(table.shape)}."
            )
        return self.matmat(x) if table.ndim == 2 else self.matvec(x)

    def __matmul__(self, other: Any) -> Any:
        if np.isscalar(other):
            raise BochnerError(f"{OWNER} @ x needs an array x, got the number {other!r}; write {other!r} * K.")
        return self.dot(other)

    _matvec, _rmatvec, _matmat, _rmatmat = matvec, rmatvec, matmat, rmatmat

    def _adjoint(self) -> LinearOperator:
        return self if self.symmetric else super()._adjoint()

    _transpose = _adjoint

    def _public(self, x: Any, adjoint: bool, columns: bool) -> Any:
        self._refuse_stale()
        learns = isinstance(x, Tensor) and (x.requires_grad or any(t is not None for t in self._learned))
        if learns and torch.is_grad_enabled():
            product = partial(self._product, columns=columns)
            return KernelProduct.apply(x, *self._learned, product, self._problem, adjoint)
        return self._product(x, adjoint, columns)

    def _refuse_stale(self) -> None:
        """Plans and factors are those of the values at building; compared, as `.data` changes them without a trace."""
        at_building = self.queries, self.keys, torch.as_tensor(self.bandwidth)
        for name, now, then in zip(("queries", "keys", "bandwidth"), self._learned, at_building, strict=True):
            if now is not None and not torch.equal(now.detach().to(then.dtype).reshape(then.shape), then):
                raise BochnerError(
                    f"The {name!r} of this {OWNER} have changed since it was built; build a new {OWNER} after every "
                    "change."
                )

    def _product(self, x: Any, adjoint: bool, columns: bool) -> Any:
        length = self.shape[0] if adjoint else self.shape[1]
        table, restore, _ = as_values(x, length, columns, self._problem.dtype)
        if table.shape[1] == 0:
            return restore(table.new_zeros(sum(self.shape) - length, 0))
        return restore(self._multiply(table, adjoint))

    def _multiply(self, table: Tensor, adjoint: bool = False) -> Tensor:
        """The product with a float64 table (s, r), float64."""
        self._engine.progress = self._shows_progress()
        y = self._engine.apply(table, adjoint)
        return y.add_(table, alpha=self.shift) if self.shift else y

    def _shows_progress(self, products: int = 1) -> bool:
        seconds = self._engine.pairs * PAIR * (1 + self.keys.shape[1] / 64) * products
        return seconds > LONG and self.method != "lowrank" if self.progress is None else self.progress

    def matvec_with_certificate(self, x: Any) -> Estimate:
        """`K x` for one x of shape (s,), with bounds on |Kx - y| for the whole and for every row; a little slower.

        Example:
            >>> import torch, bochner
            >>> K = bochner.KernelOperator(torch.zeros(300, 4), bandwidth=1.0)
            >>> K.matvec_with_certificate(torch.ones(300)).met
            True
        """
        self._refuse_stale()
        begun = time.perf_counter()
        table, restore, scale = as_values(x, self.shape[1], False, self._problem.dtype)
        self._engine.progress = self._shows_progress()
        value, rows = self._engine.certified(table)
        if self.shift:
            value = value + self.shift * table
            rows = rows + 4 * torch.finfo(torch.float64).eps * (self.shift * table.abs() + value.abs())[:, 0]
        factor, info = float(scale), np.finfo(self.dtype)
        # The answer is rounded to the dtype of the points; near its end, to a multiple of its last number.
        answer = value.abs()[:, 0] * float(info.eps) / 2
        norm = float(table.norm())
        rows = rows + answer
        bound = min(float(rows.norm()), self._engine.norm * norm + float(answer.norm()))
        last = float(info.smallest_subnormal) if norm else 0.0
        row_bounds = (rows * (factor * (1.0 + 1e-12)) + last).to(torch.float64)
        return Estimate(
            value=restore(value),
            bound=bound * factor * (1.0 + 1e-12) + last * math.sqrt(self.shape[0]),
            row_bounds=row_bounds if isinstance(x, Tensor) else row_bounds.numpy(),
            norm_x=norm * factor,
            eps=self.eps,
            method=self.method,
            pairs=self._engine.pairs,
            all_pairs=math.prod(self.shape),
            seconds=time.perf_counter() - begun,
        )

    def to_dense(self) -> np.ndarray:
        """K itself, (n, s), every entry by itself; the shift included."""
        block = self.kernel.block(self.queries.double(), None if self.symmetric else self.keys.double())
        if self.shift:
            block.diagonal().add_(self.shift)
        return block.numpy().astype(self.dtype, copy=False)

    def diagonal(self) -> np.ndarray:
        """The diagonal of K, exactly; the shift included."""
        n, profile = min(self.shape), self.kernel.profile
        if self.symmetric:
            return np.full(n, 1.0 + self.shift, dtype=self.dtype)
        scale = profile.unit / torch.as_tensor(self.bandwidth, dtype=torch.float64)
        pairs = zip(self.queries[:n].split(BLOCK), self.keys[:n].split(BLOCK), strict=True)
        distances = torch.cat([norms((q.double() - k.double()) * scale) for q, k in pairs])
        return profile.at_distance(distances).numpy().astype(self.dtype)

    def shifted(self, alpha: float) -> KernelOperator:
        """`K + alpha I`, with the same plan; K must be symmetric."""
        self._need_symmetric("shifted", shift=False)
        other = copy(self)
        other.shift = self.shift + positive_float(alpha, "alpha", f"{OWNER}.shifted")
        return other

    def solve(self, y: Any, tol: float = 1e-6, max_iter: int = 1000) -> Any:
        """x with `|K x + alpha x - y| <= tol |y|` for an operator that was `shifted(alpha)`; y (n,) or (n, r).

        Up to 2,048 rows by Cholesky factorisation, beyond by preconditioned conjugate gradients on this operator, whose
        eps must be below alpha: K as it multiplies is off by at most eps, which moves x by at most eps / alpha of it.
        """
        self._need_precise("solve")
        tol = positive_float(tol, "tol", f"{OWNER}.solve")
        max_iter = positive_int(max_iter, "max_iter", f"{OWNER}.solve")
        columns = getattr(y, "ndim", 1) == 2
        table, restore, _ = as_values(y, self.shape[0], columns, self._problem.dtype)
        if self.shape[0] <= DIRECT:
            return restore(torch.cholesky_solve(table, self._cholesky()))
        found = conjugate_gradients(
            self._multiply, table, self.preconditioner(), tol=tol, max_iter=max_iter, progress=self._shows_progress(50)
        )
        if found.residual > tol:
            raise BochnerError(
                f"{OWNER}.solve stopped after {found.steps} steps with a residual of {found.residual:.2g} |y|, above "
                f"tol={tol:g}; raise 'max_iter', 'tol' or the shift."
            )
        return restore(found.value)

    def logdet(self, probes: int = 16, steps: int = 50) -> LogDet:
        """`log det(K + alpha I)` of an operator that was `shifted(alpha)`, and two standard errors of it.

        Up to 2,048 rows exactly, beyond by stochastic Lanczos quadrature with `probes` random vectors.
        """
        self._need_precise("logdet")
        probes, steps = (positive_int(n, name, f"{OWNER}.logdet") for n, name in ((probes, "probes"), (steps, "steps")))
        if self.shape[0] <= DIRECT:
            return LogDet(2.0 * float(self._cholesky().diagonal().log().sum()), 0.0)
        return logdet(self._multiply, self.shape[0], self.preconditioner(), probes=probes, steps=steps, seed=self.seed)

    def preconditioner(self) -> Preconditioner:
        """`(F F' + alpha I)^-1` of an operator that was `shifted(alpha)`, F of rank 10 sqrt(n); `M` of scipy's `cg`."""
        self._need_symmetric("preconditioner")
        if isinstance(self._engine, LowRankEngine):
            return Preconditioner(self._engine.factor.rows, self.shift)
        rank = min(self.shape[0], 10 * math.isqrt(self.shape[0]))
        factor = pivoted_cholesky(
            self.kernel, self.keys, rank, seed=self.seed, stop=lambda trace, r: trace <= 2 * self.shift * r
        )
        return Preconditioner(factor.rows, self.shift)

    def _cholesky(self) -> Tensor:
        return ridge_factor(self.kernel.block(self.keys.double()), self.shift)

    def _need_symmetric(self, name: str, shift: bool = True) -> None:
        if not self.symmetric:
            raise BochnerError(f"{OWNER}.{name} needs a symmetric kernel matrix: build it with keys=None.")
        if shift and not self.shift:
            raise BochnerError(f"{OWNER}.{name} needs K + alpha I, which can be inverted: call shifted(alpha) first.")

    def _need_precise(self, name: str) -> None:
        self._need_symmetric(name)
        if self.shape[0] > DIRECT and self.eps >= self.shift:
            raise BochnerError(
                f"{OWNER}.{name} needs eps below the shift, got eps={self.eps:g} and a shift of {self.shift:g}; build "
                f"the operator with eps={self.shift / 10:.1g}."
            )

    def with_queries(self, queries: Any) -> KernelOperator:
        """The operator for other queries and the same keys; what is known of the keys is shared, not rebuilt."""
        points = as_points(queries, "queries").to(self._problem.dtype)
        if points.shape[1] != self.keys.shape[1]:
            raise BochnerError(
                f"The 'queries' of {OWNER}.with_queries must have {self.keys.shape[1]} columns, got {points.shape[1]}."
            )
        other = copy(self)
        other.shift = 0.0
        own = queries if isinstance(queries, Tensor) and queries.requires_grad else None
        other._learned = (own, self._learned[0] if self.symmetric else self._learned[1], self._learned[2])
        other._build(replace(self._problem, queries=points, symmetric=False), self._placed)
        return other
