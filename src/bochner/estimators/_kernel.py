"""What the estimators share: bandwidths, points, and a Gaussian kernel that is strictly linear in x."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse
from sklearn.utils import check_random_state
from torch import Tensor

from bochner._checks import BochnerError, positive_float
from bochner.matvec import KernelOperator

DIRECT = 2048  # rows up to which everything is exact, in float64, by factorisation
MEMORY = 1 << 31  # bytes that a kernel matrix kept for repeated products may take
PRODUCTS = 16  # to expect of conjugate gradients and Lanczos
SMALL, FULL = 1e-3, 0.1  # a kernel with a tenth of its entries above a thousandth is not sparse
SIDE = 512  # of its tiles: 1 MB in float32
Product = Callable[[Tensor], Tensor]


def draw_seed(rng: np.random.RandomState) -> int:
    """One seed from scikit-learn's random state."""
    return int(rng.randint(np.iinfo(np.int32).max))


def positive(value: Any, name: str, owner: str, *, zero: bool = False) -> float:
    """A number above zero, infinity among them; `zero`: or zero."""
    plain = value.item() if isinstance(value, np.generic) else value
    fits = isinstance(plain, (int, float)) and not isinstance(plain, bool) and (plain > 0 or (zero and plain == 0))
    if not fits:
        wanted = "a number that is not negative" if zero else "a positive number"
        raise BochnerError(f"The {name!r} of {owner} must be {wanted}, got {value!r}.")
    return float(plain)


def resolve_gamma(gamma: Any, X: Any, owner: str, weight: np.ndarray | None = None, *, centred: bool = True) -> float:
    """A number, or `"scale"`: 1 / (d var(X)) with rows counted by weight, one where X does not vary.

    Not `centred`, for kernels that see where X is: 1 / (d mean(X^2)).
    """
    if isinstance(gamma, str):
        if gamma != "scale":
            raise BochnerError(f"The 'gamma' of {owner} must be a positive number or 'scale', got {gamma!r}.")
        with np.errstate(over="ignore"):
            if sparse.issparse(X):
                variance = X.multiply(X).mean() - (X.mean() ** 2 if centred else 0.0)
            else:
                middle = np.average(X.mean(1, dtype=np.float64), weights=weight) if centred else 0.0
                variance = np.average(np.square(X - middle).mean(1), weights=weight)
        counted = X if weight is None else X[weight > 0]
        if not np.isfinite(variance) or (variance == 0 and counted.min() < counted.max()):
            raise BochnerError(f"The variance of the X of {owner}, for gamma='scale', is out of range; rescale X.")
        return 1.0 / (X.shape[1] * variance) if variance > 0 else 1.0
    return positive_float(gamma.item() if isinstance(gamma, np.generic) else gamma, "gamma", owner)


def resolve_bandwidth(bandwidth: Any, shape: tuple[int, int], weight: np.ndarray, owner: str) -> float:
    """A number, or the rule of Scott or Silverman for columns of unit variance.

    Whole weights count as repeated rows, others, whose scale means nothing, as their effective number.
    """
    if not isinstance(bandwidth, str):
        plain = bandwidth.item() if isinstance(bandwidth, np.generic) else bandwidth
        return positive_float(plain, "bandwidth", owner)
    d = shape[1]
    rows = float(np.abs(weight).sum())
    if not np.array_equal(weight, np.rint(weight)):
        rows = float(rows**2 / np.square(weight).sum())
    if bandwidth == "scott":
        return rows ** (-1 / (d + 4))
    if bandwidth == "silverman":
        return (rows * (d + 2) / 4) ** (-1 / (d + 4))
    raise BochnerError(
        f"The 'bandwidth' of {owner} must be a positive number, 'scott' or 'silverman', got {bandwidth!r}."
    )


def check_weight(weight: Any, n: int, owner: str, *, signed: bool = False) -> np.ndarray:
    """Weights of the rows (n,), float64: ones if there are none, one number for all; finite and not all zero."""
    w = np.ones(n) if weight is None else np.asarray(weight, dtype=np.float64)
    w = np.full(n, float(w)) if w.ndim == 0 else w
    if w.shape != (n,):
        raise BochnerError(f"The 'sample_weight' of {owner} must have shape ({n},), got {w.shape}.")
    if not np.isfinite(w).all() or not (signed or (w >= 0).all()):
        wanted = "finite" if signed else "finite and not negative"
        raise BochnerError(f"The 'sample_weight' of {owner} must be {wanted}, got {w.min()} to {w.max()}.")
    if not w.any():
        raise BochnerError(f"The 'sample_weight' of {owner} is zero everywhere.")
    return w


class Points(NamedTuple):
    """Training rows about their mean, in the precision that `eps` asks for."""

    rows: np.ndarray
    mean: np.ndarray


def centred(X: np.ndarray, gamma: float, eps: float) -> Points:
    """Rows about their mean: in float32 where rounding them moves K, as an operator, by far less than eps.

    A coordinate rounded by u moves an entry by about u |x| / sigma; independent roundings of all entries add up to
    2 sqrt(n) of that in operator norm.
    """
    mean = X.mean(0, dtype=np.float64)
    rows = X - mean
    radius = math.sqrt(2 * gamma * float(np.square(rows).sum(1).mean()))
    if len(X) <= DIRECT:
        return Points(rows.astype(np.float64, copy=False), mean)
    moved = 2 * math.sqrt(len(X)) * np.finfo(np.float32).eps * max(1.0, radius)
    return Points(rows.astype(np.float32 if moved <= 0.1 * eps else np.float64, copy=False), mean)


def smoother(
    X: np.ndarray, bandwidth: float, eps: Any, method: str, random_state: Any, owner: str
) -> tuple[Points, KernelOperator]:
    """Rows about their mean, and their kernel as an operator that takes other queries."""
    plain = eps.item() if isinstance(eps, np.generic) else eps
    points = centred(X, 0.5 / bandwidth**2, positive_float(plain, "eps", owner))
    seed = draw_seed(check_random_state(random_state))
    return points, KernelOperator(
        points.rows[:1], points.rows, bandwidth=bandwidth, eps=plain, method=method, seed=seed
    )


def tile(x: Tensor, y: Tensor, gamma: float) -> Tensor:
    """`exp(-gamma |x_i - y_j|^2)`, (n, s), by one matrix product."""
    root = math.sqrt(2 * gamma)
    x, y = x * root, y * root
    out = torch.addmm(-0.5 * y.square().sum(1)[None], x, y.T).sub_(0.5 * x.square().sum(1, keepdim=True))
    # exp of less than -87 takes a slow path in single precision.
    return out.clamp_(-80.0 if out.dtype == torch.float32 else -700.0, 0.0).exp_()


class LinearKernel(NamedTuple):
    """The kernel matrix of the training rows as one fixed linear map, and how it is multiplied."""

    product: Product
    method: str


def linear_kernel(points: np.ndarray, gamma: float, eps: float, method: str, seed: int) -> LinearKernel:
    """K as conjugate gradients and Lanczos want it: strictly linear, the same in every call, float64 in and out.

    `KernelOperator` without its checks of each product; where it would multiply exact tiles again and again and the
    matrix fits in `MEMORY`, the matrix itself.
    """
    z = torch.from_numpy(points)
    fits = len(points) ** 2 * points.itemsize <= 2 * MEMORY
    # A glance at 128 rows spares kernels that are plainly not sparse the search for a plan.
    if (
        method == "auto"
        and fits
        and float((tile(z[:: max(1, len(z) // 128)], z, gamma) > SMALL).double().mean()) > FULL
    ):
        return LinearKernel(SymmetricMatrix(z, gamma), "matrix")
    K = KernelOperator(
        points, gamma=gamma, eps=eps, method=method, seed=seed, adaptive=False, products=PRODUCTS, memory=MEMORY
    )
    if K.method == "exact" and fits:
        return LinearKernel(SymmetricMatrix(z, gamma), "matrix")
    return LinearKernel(lambda x: K.matmat(x).double(), K.method)


class SymmetricMatrix:
    """The kernel matrix as the tiles on and above its diagonal; each is read once and used on both sides."""

    def __init__(self, points: Tensor, gamma: float) -> None:
        self.n = len(points)
        parts = points.split(SIDE)
        self.places = [(i, j) for i in range(len(parts)) for j in range(i, len(parts))]
        self.tiles = torch.empty(len(self.places), SIDE, SIDE, dtype=points.dtype)
        for t, (i, j) in zip(self.tiles, self.places, strict=True):
            t[: len(parts[i]), : len(parts[j])] = tile(parts[i], parts[j], gamma)

    def __call__(self, x: Tensor) -> Tensor:
        x_parts = x.to(self.tiles.dtype).split(SIDE)
        y = torch.zeros(x.shape, dtype=self.tiles.dtype)
        y_parts = y.split(SIDE)
        for t, (i, j) in zip(self.tiles, self.places, strict=True):
            t = t[: len(x_parts[i]), : len(x_parts[j])]
            y_parts[i].addmm_(t, x_parts[j])
            if j > i:
                y_parts[j].addmm_(t.T, x_parts[i])
        return y.double()


class TileCholesky:
    """`S K S + alpha I = U'U` in double precision, on the tiles of `SymmetricMatrix`: half of a square array.

    `root`: the diagonal of S (n, 1), or None. `torch.linalg.LinAlgError` where rounding makes the matrix indefinite.
    O(n^3 / 3).
    """

    def __init__(self, points: Tensor, gamma: float, alpha: float, root: Tensor | None) -> None:
        self.points, self.gamma, self.alpha = points.double(), gamma, alpha
        self.root = torch.ones(len(points), 1, dtype=torch.float64) if root is None else root
        matrix = SymmetricMatrix(self.points, gamma)
        roots = self.root.split(SIDE)
        self.count = len(roots)
        self.upper = {}
        for t, (i, j) in zip(matrix.tiles, matrix.places, strict=True):
            u = t[: len(roots[i]), : len(roots[j])]
            u *= roots[i] * roots[j].T
            if i == j:
                u.diagonal().add_(alpha)
            self.upper[i, j] = u
        for j in range(self.count):
            for i in range(j + 1):
                self._finish(i, j)

    def _finish(self, i: int, j: int) -> None:
        """Block (i, j) of U from those above it and those of column i."""
        u = self.upper[i, j]
        for k in range(i):
            u.addmm_(self.upper[k, i].T, self.upper[k, j], alpha=-1)
        if i < j:
            u.copy_(torch.linalg.solve_triangular(self.upper[i, i].T, u, upper=False))
        else:
            u.copy_(torch.linalg.cholesky(u, upper=True))

    def solve(self, y: Tensor) -> Tensor:
        """`(S K S + alpha I)^-1 y` for every column of y (n, r)."""
        x = y.clone()
        parts = x.split(SIDE)
        for i in range(self.count):
            for k in range(i):
                parts[i].addmm_(self.upper[k, i].T, parts[k], alpha=-1)
            parts[i].copy_(torch.linalg.solve_triangular(self.upper[i, i].T, parts[i], upper=False))
        for i in reversed(range(self.count)):
            for k in range(i + 1, self.count):
                parts[i].addmm_(self.upper[i, k], parts[k], alpha=-1)
            parts[i].copy_(torch.linalg.solve_triangular(self.upper[i, i], parts[i], upper=True))
        return x

    def residual(self, x: Tensor, y: Tensor) -> Tensor:
        """`y - (S K S + alpha I) x`, from the kernel itself."""
        left = y - self.alpha * x
        z, s, x_parts, out = (t.split(SIDE) for t in (self.points, self.root, self.root * x, left))
        for i in range(self.count):
            for j in range(i, self.count):
                t = tile(z[i], z[j], self.gamma)
                out[i].sub_(s[i] * (t @ x_parts[j]))
                if j > i:
                    out[j].sub_(s[j] * (t.T @ x_parts[i]))
        return left
