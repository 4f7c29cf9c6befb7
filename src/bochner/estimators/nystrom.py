"""Functions `f(x) = sum_j c_j K(x, z_j)` on a few centres z_j: their factor, and fits as sums over blocks of rows.

With `L L' = K(Z, Z)` and `phi(x) = L^-1 K(Z, x)` such a function is `phi(x) . a`, its squared norm is |a|^2, and its
coefficients are `c = L^-T a`. A fit needs products with `G = sum_i w_i phi(x_i) phi(x_i)'` alone. A sample of the rows
gives an estimate of G whose Cholesky factor makes conjugate gradients end after a dozen passes over the rows
(Rudi, Carratino and Rosasco 2017). Memory: one tile of the kernel and a few M x M matrices.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.utils import check_array
from torch import Tensor

from bochner._checks import BochnerError, is_int, one_of, positive_float, positive_int
from bochner.estimators.rows import Block, Rows
from bochner.matvec import Kernel, pivoted_cholesky, ridge_factor
from bochner.matvec.profiles import ALIASES, PROFILES
from bochner.matvec.tiles import Tiles, left, right

KERNELS = sorted({*PROFILES, *ALIASES})
RULES = ("auto", "random", "pivoted", "leverage")
EXACT = 4096  # rows up to which every row is a centre
TILE = 512  # rows of a tile
PAIR = 1e-9  # seconds for one pair in single precision, the use of its value included, and for each further ...
COLUMN = 1.5e-10  # ... column
CUBE = 2e-10  # seconds, times M^3: the factors
PASSES = 15
NOISE = 5e-6  # that rounding of products in single precision is worth, in entries of the kernel
SAMPLES = (2, 3, 4, 6, 8, 12, 16)  # rows for each centre in the sample


@dataclass(frozen=True)
class Centers:
    """How the centres of a kernel method are chosen.

    Args:
        count: how many. None: all of up to 4,096 rows; else 4,096, halved until the work fits into `seconds`.
        rule: `"random"` rows; `"pivoted"` by randomly pivoted Cholesky, a row in proportion to what the others leave of
            it; `"leverage"` in proportion to ridge leverage scores. `"auto"`: pivoted up to 2,048 centres, else random.
        seconds: what a ridge may take on one core, about; a classifier takes three times as long.

    >>> Centers(500, rule="pivoted")
    Centers(count=500, rule='pivoted', seconds=60.0)
    """

    count: int | None = None
    rule: str = "auto"
    seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.count is not None:
            positive_int(self.count, "count", "Centers")
        one_of(self.rule, "rule", "Centers", RULES)
        positive_float(self.seconds, "seconds", "Centers")

    @staticmethod
    def of(value: Any, d: int, owner: str) -> Centers | np.ndarray:
        """From what an estimator was given: "auto", "all", a number, an array of centres, or `Centers`."""
        if isinstance(value, Centers):
            return value
        if isinstance(value, np.ndarray) and value.ndim == 2 and len(value) and value.shape[1] == d:
            return check_array(value, dtype=np.float64, input_name="centers")
        if isinstance(value, str) and value in ("auto", "all"):
            return Centers(None if value == "auto" else sys.maxsize)
        if is_int(value):
            return Centers(positive_int(value, "centers", owner))
        raise BochnerError(
            f"The 'centers' of {owner} must be 'auto', 'all', a positive int, an array (M, {d}) or Centers(...), got "
            f"{f'one of shape {value.shape}' if isinstance(value, np.ndarray) else repr(value)}."
        )

    def number(self, n: int, columns: int) -> int:
        """How many of n rows, for so many columns of targets."""
        if self.count is not None:
            return min(self.count, n)
        if n <= EXACT:
            return n
        pass_ = PASSES * n * (PAIR + COLUMN * (columns - 1))
        m = EXACT
        while m > 256 and m * pass_ + CUBE * m**3 > self.seconds:
            m //= 2
        return m


class CrossKernel:
    """The kernel between rows and centres, tile by tile; cheap to send, rebuilt from its four parts."""

    def __init__(self, name: str, bandwidth: Any, centers: Tensor, arithmetic: str) -> None:
        self.parts = (name, bandwidth, centers, arithmetic)
        self.kernel = Kernel(name, bandwidth)
        self.frame = self.kernel.frame(centers, arithmetic)
        self.keys = right(self.frame.place(centers))
        self._own = threading.local()  # a buffer for each thread: Dask runs several blocks at once

    def __reduce__(self) -> Any:
        return CrossKernel, self.parts

    @property
    def dtype(self) -> torch.dtype:
        return self.frame.dtype

    def __len__(self) -> int:
        return len(self.keys)

    def tiles(self, X: np.ndarray) -> Iterator[tuple[slice, Tensor]]:
        """K(X, centres) for some rows at a time; overwritten by the next in the same thread."""
        if not hasattr(self._own, "tiles"):
            self._own.tiles = Tiles(self.frame)
        for i in range(0, len(X), TILE):
            part = slice(i, i + TILE)
            points = torch.from_numpy(np.array(X[part], dtype=np.float64))
            yield part, self._own.tiles(left(self.frame.place(points)), self.keys)

    def predict(self, X: np.ndarray, coefficients: Tensor) -> np.ndarray:
        """`K(X, centres) coefficients'` for coefficients (c, M), float64 (n, c)."""
        out = np.empty((len(X), len(coefficients)))
        v = coefficients.to(self.dtype)
        for part, K in self.tiles(X):
            out[part] = (v @ K.T).T.numpy()
        return out


def moments(block: Block, shift: np.ndarray) -> tuple[Any, ...]:
    """Rows, weight, and weighted sums of x - shift, of its modulus, of its squares, and of y."""
    if block.X.shape[1] != len(shift):
        raise BochnerError(f"A block of rows X has {block.X.shape[1]} columns, another {len(shift)}.")
    X = block.X.astype(np.float64) - shift
    if not np.isfinite(X).all():
        raise BochnerError("The rows of X must be finite; a block has NaN or infinity in it.")
    w = block.weight
    with np.errstate(over="ignore"):
        return (len(X),), w.sum(), w @ X, w @ np.abs(X), w @ np.square(X), w @ block.y


def normal_product(block: Block, cross: CrossKernel, v: Tensor) -> tuple[Tensor]:
    """`K' W K v`."""
    out, w = torch.zeros(v.shape, dtype=torch.float64), _weight(block, cross)
    for part, K in cross.tiles(block.X):
        out += (v @ K.T * w[part]) @ K
    return (out,)


def right_side(block: Block, cross: CrossKernel, offset: np.ndarray) -> tuple[Tensor]:
    """`K' W (y - offset)`."""
    y = torch.from_numpy(np.ascontiguousarray((block.y - offset).T)).to(cross.dtype)
    out, w = torch.zeros(len(y), len(cross), dtype=torch.float64), _weight(block, cross)
    for part, K in cross.tiles(block.X):
        out += (y[:, part] * w[part]) @ K
    return (out,)


def logistic(block: Block, cross: CrossKernel, v: Tensor, offset: np.ndarray) -> tuple[float, Tensor]:
    """Loss of the scores `K v + offset` and its gradient to v; y (b, c): indicators, or (b, 1) for two classes."""
    y = torch.from_numpy(np.ascontiguousarray(block.y.T)).to(cross.dtype)
    base = torch.from_numpy(offset).to(cross.dtype)[:, None]
    out, w, loss = torch.zeros(v.shape, dtype=torch.float64), _weight(block, cross), 0.0
    for part, K in cross.tiles(block.X):
        score, target = torch.addmm(base, v, K.T), y[:, part]
        if len(v) == 1:
            log_total, p = torch.nn.functional.softplus(score), torch.sigmoid(score)
        else:
            log_total, p = torch.logsumexp(score, 0, keepdim=True), torch.softmax(score, 0)
        loss += float((w[part] * (log_total - (target * score).sum(0, keepdim=True))).sum(dtype=torch.float64))
        out += ((p - target) * w[part]) @ K
    return loss, out


def _weight(block: Block, cross: CrossKernel) -> Tensor:
    return torch.from_numpy(block.weight).to(cross.dtype)


@dataclass(frozen=True)
class Basis:
    """Centres, the factor L of their kernel, and G as a sample of the rows has it."""

    cross: CrossKernel
    lower: Tensor  # L (M, M), float64
    gram: Tensor  # (M, M), scaled to all rows

    def coefficients(self, a: Tensor) -> Tensor:
        """`c = L^-T a` for every row of a (c, M)."""
        return torch.linalg.solve_triangular(self.lower, a, upper=False, left=False)

    def gradient(self, g: Tensor) -> Tensor:
        """`L^-1 g` for every row of g (c, M)."""
        return torch.linalg.solve_triangular(self.lower, g.T, upper=False).T

    def preconditioner(self, alpha: float, curvature: float = 1.0) -> Tensor:
        """The Cholesky factor of `curvature G + alpha I`."""
        return ridge_factor(curvature * self.gram, alpha)


def sample_size(n: int, m: int) -> int:
    """Rows of the sample that G is estimated from: their cost against that of the passes they save.

    From k M rows conjugate gradients take about 4 (sqrt(k) + 1) / (sqrt(k) - 1) passes.
    """
    if n <= max(EXACT, 2 * m):
        return n
    costs = {k: CUBE * k * m**3 / 2 + 4 * (math.sqrt(k) + 1) / (math.sqrt(k) - 1) * PAIR * n * m for k in SAMPLES}
    return min(n, m * min(costs, key=lambda k: costs[k]))


def make_basis(
    name: str, bandwidth: Any, rows: Rows, centers: Centers | np.ndarray, alpha: float, columns: int, seed: int
) -> Basis:
    """Centres chosen from a sample of the rows, their factor, and G of the sample."""
    n, kernel = len(rows), Kernel(name, bandwidth)
    m = centers.number(n, columns) if isinstance(centers, Centers) else len(centers)
    block = rows.sample(sample_size(n, m), np.random.RandomState(seed))
    share = len(block.X) / n
    if share == 1:  # a row of weight two is two rows, also where centres are chosen
        block = block.merged()
    X = torch.from_numpy(np.array(block.X, dtype=np.float64))
    weight = torch.from_numpy(block.weight)
    if isinstance(centers, Centers):
        points = X[chosen_centers(kernel, X, m, centers.rule, seed)]
    else:
        points = torch.from_numpy(centers.copy())
    single = n > EXACT and kernel.profile.convex  # the peak of the Laplace kernel magnifies rounding
    precise = kernel.precise if n <= EXACT else "float64"
    cross = CrossKernel(name, bandwidth, points, "float32" if single else precise)
    # Rounding of single precision is noise in the kernel: this ridge keeps coefficients so small that it does not show.
    jitter = min(1e-2, max(1e-6, n * NOISE**2 / alpha)) if single else 1e-13 * len(points)
    lower = ridge_factor(kernel.block(points), jitter)
    gram = torch.zeros_like(lower)
    for part, phi in features(kernel, points, lower, X):
        gram.addmm_(phi * weight[part], phi.T)
    return Basis(cross, lower, gram.div_(share))


def features(kernel: Kernel, points: Tensor, lower: Tensor, X: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """`phi(x) = L^-1 K(Z, x)` of the rows of X, (M, b) for some of them at a time."""
    for i in range(0, len(X), 2048):
        part = slice(i, i + 2048)
        yield part, torch.linalg.solve_triangular(lower, kernel.block(points, X[part]), upper=False)


def chosen_centers(kernel: Kernel, X: Tensor, m: int, rule: str, seed: int) -> Tensor:
    """Which rows of the sample are centres; all of few rows."""
    generator = torch.Generator().manual_seed(seed)
    if m >= len(X):
        return torch.arange(len(X))
    if rule == "pivoted" or (rule == "auto" and m <= EXACT // 2):
        return pivoted_cholesky(kernel, X, m, seed=seed).pivots
    first = torch.randperm(len(X), generator=generator)[:m]
    if rule != "leverage":
        return first
    # Ridge leverage scores at the ridge that leaves about m of them, from features on random centres.
    lower = ridge_factor(kernel.block(X[first]), 1e-10 * m)
    phi = torch.linalg.solve_triangular(lower, kernel.block(X[first], X), upper=False)
    left_out = (1 - phi.square().sum(0)).clamp_min(0)
    ridge = float(left_out.sum()) / m + 1e-8
    score = (phi * torch.cholesky_solve(phi, ridge_factor(phi @ phi.T, ridge))).sum(0) + left_out / ridge
    return torch.multinomial(score.clamp_min(1e-12), m, generator=generator)


def shown(seconds: float) -> bool:
    """Whether progress is shown: work of more than five seconds, on a terminal."""
    return seconds > 5.0 and sys.stderr.isatty()


def leave_one_out(kernel: Kernel, block: Block, m: int, alphas: np.ndarray, seed: int) -> np.ndarray:
    """The mean squared error of every row, predicted from the others, for each alpha: (len(alphas),).

    On m centres by pivoted Cholesky, whose factor has the features phi as its rows. With `G = Q diag(s) Q'` every alpha
    costs O(n m): a row's residual is divided by 1 - h, `h = w phi' (G + alpha I)^-1 phi`.
    """
    X = torch.from_numpy(np.array(block.X, dtype=np.float64))
    y = torch.from_numpy(block.y - np.average(block.y, axis=0, weights=block.weight))
    w = torch.from_numpy(block.weight)[:, None]
    phi = pivoted_cholesky(kernel, X, min(m, len(X)), seed=seed).rows
    values, vectors = torch.linalg.eigh((phi * w).T @ phi)
    psi = phi @ vectors
    inverse = 1 / (values.clamp_min(0)[:, None] + torch.from_numpy(alphas))  # (m, alphas)
    leverage = w * (psi.square() @ inverse)
    right = psi.T @ (w * y)
    errors = []
    for k in range(len(alphas)):
        residual = (y - psi @ (inverse[:, k : k + 1] * right)) / (1 - leverage[:, k : k + 1]).clamp_min(1e-6)
        errors.append(float((w * residual.square()).sum() / (w.sum() * y.shape[1])))
    return np.array(errors)
