"""What kernel products are for: densities, regression, eigenvalues, attention."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, cg, eigsh
from torch import Tensor

from .._checks import BochnerError, make_generator, one_of, positive_float, positive_int
from .inputs import as_points
from .operator import KernelOperator
from .sparsity import reduce_attention


class _Estimator:
    """scikit-learn's parameter protocol, without importing scikit-learn."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        return {
            name: getattr(self, name) for name in inspect.signature(type(self).__init__).parameters if name != "self"
        }

    def set_params(self, **parameters: Any) -> Any:
        valid = self.get_params()
        for name, value in parameters.items():
            if name not in valid:
                raise BochnerError(f"Unknown parameter {name!r} of {type(self).__name__}; valid are {sorted(valid)}.")
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        inside = ", ".join(f"{k}={v!r}" for k, v in self.get_params().items())
        return f"{type(self).__name__}({inside})"

    def _fitted(self) -> KernelOperator:
        operator = getattr(self, "operator_", None)
        if operator is None:
            raise BochnerError(f"This {type(self).__name__} is not fitted yet; call fit first.")
        return operator


def _targets(y: Any, n: int, owner: str) -> np.ndarray:
    values = np.asarray(y.detach() if isinstance(y, Tensor) else y, dtype=np.float64)
    if values.ndim not in (1, 2) or len(values) != n:
        raise BochnerError(f"The 'y' of {owner} must have shape ({n},) or ({n}, r), got {values.shape}.")
    if not np.isfinite(values).all():
        raise BochnerError(f"The 'y' of {owner} must be finite.")
    return values


class KernelDensity(_Estimator):
    """Gaussian kernel density with weights of any sign: p(q) = sum_j w_j N(q; k_j, sigma^2 I) / sum_j |w_j|.

    `score_samples` is the log density, as in scikit-learn, for non-negative weights; `density` also serves signed
    ones (differences of densities, residuals). Error: each call's kernel product is within eps |w|_2.

    Example:
        >>> import numpy as np
        >>> from bochner.matvec import KernelDensity
        >>> X = np.zeros((10, 2))
        >>> bool(np.isclose(KernelDensity(bandwidth=1.0).fit(X).density([[0.0, 0.0]])[0], 1 / (2 * np.pi)))
        True
    """

    def __init__(self, bandwidth: float = 1.0, eps: float = 0.1, method: str = "auto", seed: int = 0) -> None:
        self.bandwidth, self.eps, self.method, self.seed = bandwidth, eps, method, seed

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> KernelDensity:
        points = as_points(X, "X")
        weight = np.ones(points.shape[0]) if sample_weight is None else sample_weight
        self.weight_ = _targets(weight, points.shape[0], "KernelDensity.fit (sample_weight)").reshape(-1)
        if not np.any(self.weight_):
            raise BochnerError("The 'sample_weight' of KernelDensity.fit is zero everywhere.")
        self.operator_ = KernelOperator(
            points[:1], points, bandwidth=self.bandwidth, eps=self.eps, method=self.method, seed=self.seed
        )
        self.n_features_in_ = points.shape[1]
        return self

    def density(self, X: Any) -> np.ndarray:
        """The (signed) density at each row of X."""
        base = self._fitted()
        product = base.with_queries(X) @ self.weight_
        d = self.n_features_in_
        scale = (2 * math.pi * self.bandwidth**2) ** (-d / 2) / np.abs(self.weight_).sum()
        return np.asarray(product, dtype=np.float64) * scale

    def score_samples(self, X: Any) -> np.ndarray:
        """The log density at each row of X; -inf where it vanishes."""
        self._fitted()
        if (self.weight_ < 0).any():
            raise BochnerError("The log density needs non-negative weights; use KernelDensity.density for signed ones.")
        with np.errstate(divide="ignore"):
            return np.log(np.maximum(self.density(X), 0.0))


class KernelRidge(_Estimator):
    """Kernel ridge regression by conjugate gradients: (K + alpha I) c = y, f(q) = sum_j c_j K(q, k_j).

    The operator is linear, so that cg sees one fixed matrix within eps of K: the solution solves a system
    perturbed by at most eps in operator norm, which `alpha` should exceed.
    """

    def __init__(
        self,
        alpha: float = 1.0,
        bandwidth: float = 1.0,
        eps: float = 0.05,
        method: str = "auto",
        seed: int = 0,
        tol: float = 1e-4,
        max_iter: int = 500,
    ) -> None:
        self.alpha, self.bandwidth, self.eps, self.method = alpha, bandwidth, eps, method
        self.seed, self.tol, self.max_iter = seed, tol, max_iter

    def fit(self, X: Any, y: Any) -> KernelRidge:
        alpha = positive_float(self.alpha, "alpha", "KernelRidge")
        K = KernelOperator(X, bandwidth=self.bandwidth, eps=self.eps, method=self.method, seed=self.seed)
        targets = _targets(y, K.shape[0], "KernelRidge.fit")
        system = LinearOperator(K.shape, matvec=lambda v: K @ v.reshape(-1) + alpha * v.reshape(-1), dtype=np.float64)
        columns = []
        for column in targets.reshape(len(targets), -1).T:
            solution, status = cg(system, column, rtol=self.tol, maxiter=self.max_iter)
            if status != 0:
                raise BochnerError(
                    f"Conjugate gradients did not reach tol={self.tol} in {self.max_iter} steps; raise alpha "
                    f"(now {alpha:g}), max_iter, or lower eps (now {self.eps:g})."
                )
            columns.append(solution)
        self.dual_coef_ = np.stack(columns, 1).reshape(targets.shape)
        self.operator_ = K
        return self

    def predict(self, X: Any) -> np.ndarray:
        return np.asarray(self._fitted().with_queries(X) @ self.dual_coef_, dtype=np.float64)


class NadarayaWatson(_Estimator):
    """Kernel regression f(q) = sum_j K(q, k_j) y_j / sum_j K(q, k_j).

    A quotient is only as good as its denominator: rows whose kernel mass is below `exact_below` are computed
    exactly, in log space, so that a far query gets its nearest neighbours' average and never 0/0.
    """

    def __init__(
        self, bandwidth: float = 1.0, eps: float = 0.05, method: str = "auto", seed: int = 0, exact_below: float = 1.0
    ) -> None:
        self.bandwidth, self.eps, self.method = bandwidth, eps, method
        self.seed, self.exact_below = seed, exact_below

    def fit(self, X: Any, y: Any) -> NadarayaWatson:
        points = as_points(X, "X")
        self.y_ = _targets(y, points.shape[0], "NadarayaWatson.fit")
        self.operator_ = KernelOperator(
            points[:1], points, bandwidth=self.bandwidth, eps=self.eps, method=self.method, seed=self.seed
        )
        return self

    def predict(self, X: Any) -> np.ndarray:
        base = self._fitted()
        queries = as_points(X, "X")
        values = torch.from_numpy(self.y_.reshape(len(self.y_), -1))
        out, _ = _quotient(base.with_queries(queries), values, self.exact_below)
        return out.numpy().reshape(len(queries), *self.y_.shape[1:])


def _quotient(K: KernelOperator, values: Tensor, exact_below: float) -> tuple[Tensor, Tensor]:
    """(K V) / (K 1) in float64 and the rows done exactly because their denominator is small."""
    queries, keys = K._queries.double(), K._keys.double()
    table = torch.cat([torch.ones(len(values), 1, dtype=torch.float64), values.double()], 1)
    product = (K @ table).double()
    denominator = product[:, :1]
    out = product[:, 1:] / denominator.clamp_min(1e-300)
    small = (denominator[:, 0] < exact_below).nonzero()[:, 0]
    for rows in small.split(max(1, (1 << 22) // max(1, len(keys)))):
        distance = torch.cdist(queries[rows], keys, compute_mode="donot_use_mm_for_euclid_dist")
        out[rows] = torch.softmax(-K.gamma * distance.square(), 1) @ values.double()
    return out, small


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, eps: float = 0.01, exact_below: float = 1.0, method: str = "auto", seed: int = 0
) -> Tensor:
    """Softmax attention `D^-1 A V`, A = exp(Q K' / sqrt d), for one head by kernel products: q (n, d), k, v (s, .).

    The reduction (`reduce_attention`) makes A a Gaussian kernel up to a factor per row, which cancels in the
    quotient. Rows with kernel mass below `exact_below` are computed exactly: their relative error would be
    eps / mass. With sharp attention that is every row, and this is exact attention; it pays when tokens attend
    to many keys near them.
    """
    if v.ndim != 2 or v.shape[0] != k.shape[0]:
        raise BochnerError(f"The 'v' of attention must have shape ({k.shape[0]}, v), got {tuple(v.shape)}.")
    q_reduced, k_reduced = reduce_attention(q, k)
    K = KernelOperator(q_reduced, k_reduced, bandwidth=q.shape[1] ** 0.25, eps=eps, method=method, seed=seed)
    return _quotient(K, v, exact_below)[0].to(v.dtype)


def top_eigenvalues(K: KernelOperator, k: int = 1, *, method: str = "eigsh", tol: float = 1e-3) -> np.ndarray:
    """The k largest eigenvalues of a symmetric kernel operator, descending, each within eps of the true ones.

    By Weyl's inequality an operator within eps of K in norm has eigenvalues within eps. "eigsh" is Lanczos,
    "power" the noisy power method (k = 1).
    """
    one_of(method, "method", "top_eigenvalues", ("eigsh", "power"))
    positive_int(k, "k", "top_eigenvalues")
    if K.shape[0] != K.shape[1] or not K._symmetric:
        raise BochnerError("The operator of top_eigenvalues must be symmetric: build it with keys=None.")
    if method == "power":
        if k != 1:
            raise BochnerError(f"The power method finds one eigenvalue; use method='eigsh' for k={k}.")
        return np.array([noisy_power_method(K, tol=tol)[0]])
    if k >= K.shape[0]:
        return np.sort(np.linalg.eigvalsh(K @ np.eye(K.shape[0], dtype=K.dtype)))[::-1][:k]
    start = np.ones(K.shape[0], dtype=K.dtype)
    return np.sort(eigsh(K, k=k, return_eigenvectors=False, tol=tol, v0=start))[::-1]


def noisy_power_method(
    K: KernelOperator, *, iterations: int = 100, tol: float = 1e-3, seed: int = 0
) -> tuple[float, np.ndarray]:
    """Largest eigenvalue and eigenvector by power iteration on noisy products (Backurs et al. 2021, section 4).

    K has non-negative entries, so a positive start stays positive and overlaps the Perron vector. Each product
    may err by eps |x|; the best Rayleigh quotient seen is returned, so noise cannot undo progress.
    """
    x = torch.rand(K.shape[0], generator=make_generator(seed), dtype=torch.float64).numpy() + 0.1
    x /= np.linalg.norm(x)
    best, vector = -math.inf, x
    for _ in range(positive_int(iterations, "iterations", "noisy_power_method")):
        y = np.asarray(K @ x.astype(K.dtype), dtype=np.float64)
        quotient = float(x @ y)
        improved = quotient - best
        if quotient > best:
            best, vector = quotient, x
        if improved <= tol * abs(best):
            break
        x = y / np.linalg.norm(y)
    return best, vector
