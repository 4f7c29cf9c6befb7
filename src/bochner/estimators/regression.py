"""Kernel regression: ridge, Gaussian processes and local averages, on kernel products."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from bochner._checks import BochnerError, positive_float, positive_int
from bochner.estimators._kernel import (
    centred,
    check_weight,
    draw_seed,
    positive,
    resolve_bandwidth,
    resolve_gamma,
    smoother,
    tile,
)
from bochner.estimators._solve import System, variance
from bochner.matvec import KernelOperator

COLUMNS = 128  # right-hand sides solved together for variances
VARIANCE = 100.0  # times tol: their relative error when conjugate gradients stop, at most 0.01


class _DualRegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """`f(q) = sum_j c_j exp(-gamma |q - x_j|^2)` with `(K + alpha W^-1) c = y`: fit, predict and their options."""

    def _fit_dual(self, X: np.ndarray, y: np.ndarray, alpha: float, weight: np.ndarray | None) -> System:
        owner = type(self).__name__
        self.gamma_ = resolve_gamma(self.gamma, X, owner, weight)
        self.eps_ = (
            min(0.1, max(alpha / 10, 1e-12)) if self.eps is None else positive_float(_plain(self.eps), "eps", owner)
        )
        tol, max_iter = positive_float(_plain(self.tol), "tol", owner), positive_int(self.max_iter, "max_iter", owner)
        rank = _plain(self.rank)
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 0):
            raise BochnerError(f"The 'rank' of {owner} must be None or a non-negative int, got {rank!r}.")
        points = centred(X, self.gamma_, self.eps_)
        self.mean_, seed = points.mean, draw_seed(check_random_state(self.random_state))
        root = None if weight is None else np.sqrt(weight)
        system = System(
            points.rows,
            self.gamma_,
            alpha,
            root,
            eps=self.eps_,
            method=self.method,
            rank=rank,
            seed=seed,
            tol=tol,
        )
        targets = torch.from_numpy(np.require(y.reshape(len(y), -1), np.float64, ["C", "W"]))
        column = 1.0 if root is None else torch.from_numpy(root)[:, None]
        solution = system.solve(column * targets, tol, max_iter)
        self.n_iter_, self.solver_ = solution.steps, system.method
        if not solution.converged(tol):
            warnings.warn(
                f"{owner} stopped after {solution.steps} steps at a relative residual of {solution.residual:.2g}, "
                f"above tol={tol:g}; {_remedy(system, alpha)}.",
                ConvergenceWarning,
                stacklevel=3,
            )
        self.dual_coef_ = (column * solution.value).numpy().reshape(y.shape)
        self.operator_ = KernelOperator(
            points.rows[:1], points.rows, gamma=self.gamma_, eps=self.eps_, method=self.method, seed=seed
        )
        return system

    def _place(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        return (X - self.mean_).astype(self.operator_.dtype, copy=False)

    def _mean(self, queries: np.ndarray) -> np.ndarray:
        return np.asarray(self.operator_.with_queries(queries) @ self.dual_coef_, dtype=np.float64)


class KernelRidge(_DualRegressor):
    """Kernel ridge regression, `min_f sum_i w_i (y_i - f(x_i))^2 + alpha |f|^2`: `(K + alpha W^-1) c = y`.

    Few rows are solved by Cholesky factorisation; many by conjugate gradients, preconditioned with randomly pivoted
    Cholesky so that small alpha converges too, on a kernel that is never held as a matrix beyond 2 GB: 100,000 rows
    and more fit. Up to 23,170 rows an alpha too small for that is solved by factorisation again, refined.

    Args:
        alpha: the ridge parameter, in the units of `sklearn.kernel_ridge.KernelRidge`.
        gamma: a positive number, or `"scale"`: 1 / (d var(X)).
        eps: error allowed in a kernel product, relative to |x|. None: alpha / 10, at most 0.1. As `alpha c` is
            the training residual, the products' error is then at most a tenth of it.
        method: of `KernelOperator`; `"auto"` measures and chooses.
        rank: of the preconditioner; None means 1,000, or as much as pays off within 1 GB, 0 goes without.
        tol: relative residual at which conjugate gradients stop.
        max_iter: the most steps; a `ConvergenceWarning` says when they did not suffice.
        random_state: of the pivots and of approximate products.

    Attributes: `dual_coef_`, `n_iter_` (1: solved directly), `solver_` ("cholesky", or how products were made),
    `gamma_`, `eps_`, `operator_`.

    >>> import numpy as np
    >>> X = np.linspace(0, 1, 50)[:, None]
    >>> model = KernelRidge(alpha=1e-3).fit(X, np.sin(6 * X[:, 0]))
    >>> round(model.score(X, np.sin(6 * X[:, 0])), 2)
    1.0
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        gamma: float | str = "scale",
        eps: float | None = None,
        method: str = "auto",
        rank: int | None = None,
        tol: float = 1e-4,
        max_iter: int = 500,
        random_state: Any = 0,
    ) -> None:
        self.alpha = alpha
        self.gamma = gamma
        self.eps = eps
        self.method = method
        self.rank = rank
        self.tol = tol
        self.max_iter = max_iter
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> KernelRidge:
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], multi_output=True, y_numeric=True)
        weight = None if sample_weight is None else check_weight(sample_weight, len(X), "KernelRidge.fit")
        self._fit_dual(X, y, positive_float(_plain(self.alpha), "alpha", type(self).__name__), weight)
        return self

    def predict(self, X: Any) -> np.ndarray:
        return self._mean(self._place(X))


class GaussianProcessRegressor(_DualRegressor):
    """The posterior of a Gaussian process with kernel `amplitude exp(-gamma |x-y|^2)` and noise variance `alpha`.

    Mean `k_q' (K + s I)^-1 y`, variance `amplitude (1 - k_q' (K + s I)^-1 k_q)`, `s = alpha / amplitude`. The
    hyperparameters are given, not fitted: choose them by `GridSearchCV`, or by `sklearn`'s own on a subset. A variance
    costs one solve for each query, 128 queries at a time, until a bound says that it is right to 1 % of itself, or
    to 100 tol if that is less; conjugate gradients approach it from above, and a `ConvergenceWarning` says when
    `max_iter` did not suffice.

    Args:
        alpha: variance of the noise.
        amplitude: prior variance of the function.
        normalize_y: subtract the mean of y and divide by its standard deviation while fitting, as in scikit-learn.
        gamma, eps, method, rank, tol, max_iter, random_state: as in `KernelRidge`.

    >>> import numpy as np
    >>> X = np.linspace(0, 1, 20)[:, None]
    >>> model = GaussianProcessRegressor(alpha=1e-4, gamma=10.0).fit(X, np.sin(6 * X[:, 0]))
    >>> mean, std = model.predict([[0.5], [9.0]], return_std=True)
    >>> bool(std[0] < 0.01 and std[1] > 0.99)
    True
    """

    def __init__(
        self,
        alpha: float = 1e-2,
        *,
        amplitude: float = 1.0,
        gamma: float | str = "scale",
        normalize_y: bool = False,
        eps: float | None = None,
        method: str = "auto",
        rank: int | None = None,
        tol: float = 1e-4,
        max_iter: int = 500,
        random_state: Any = 0,
    ) -> None:
        self.alpha = alpha
        self.amplitude = amplitude
        self.gamma = gamma
        self.normalize_y = normalize_y
        self.eps = eps
        self.method = method
        self.rank = rank
        self.tol = tol
        self.max_iter = max_iter
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> GaussianProcessRegressor:
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], multi_output=True, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        owner = type(self).__name__
        alpha = positive_float(_plain(self.alpha), "alpha", owner)
        self._amplitude = positive_float(_plain(self.amplitude), "amplitude", owner)
        self.y_mean_ = y.mean(0) if self.normalize_y else np.zeros(y.shape[1:])
        spread = y.std(0) if self.normalize_y else np.ones(y.shape[1:])
        self.y_scale_ = np.where(spread > 0, spread, 1.0)
        self._system = self._fit_dual(X, (y - self.y_mean_) / self.y_scale_, alpha / self._amplitude, None)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The posterior mean; with `return_std` also the standard deviation of the function (without the noise)."""
        queries = self._place(X)
        mean = self.y_mean_ + self.y_scale_ * self._mean(queries)
        if not return_std:
            return mean
        std = np.sqrt(self._amplitude * self._variance(queries))
        return mean, std.reshape(-1, *[1] * self.y_scale_.ndim) * self.y_scale_

    def _variance(self, queries: np.ndarray) -> np.ndarray:
        system = self._system
        points = torch.from_numpy(system.points).double()
        tol, parts, worst = min(0.01, VARIANCE * self.tol), [], 0.0
        for block in torch.from_numpy(queries).double().split(COLUMNS):
            k = tile(points, block, self.gamma_)
            solution = system.solve_variance(k, tol, self.max_iter)
            worst = max(worst, solution.residual)
            parts.append(variance(k, solution.value, system.alpha))
        if worst > tol:
            warnings.warn(
                f"The variances of {type(self).__name__} may be too large by {worst:.2g} of themselves after "
                f"{self.max_iter} steps; raise max_iter or rank, or alpha (now {self.alpha:g}).",
                ConvergenceWarning,
                stacklevel=3,
            )
        return torch.cat(parts).numpy()


class NadarayaWatson(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """Kernel regression, `f(q) = sum_j w_j K(q, x_j) y_j / sum_j w_j K(q, x_j)`.

    A quotient is only as good as its denominator: rows whose kernel mass is below `exact_below` are computed
    exactly, in log space, so that a far query gets the mean of its nearest neighbours and never 0/0.

    Args:
        bandwidth: sigma in `exp(-|x-y|^2 / (2 sigma^2))`, or `"scott"`, `"silverman"` as in `KernelDensity`.
        eps: error allowed in a kernel product, relative to |x|.
        exact_below: kernel mass, in neighbours, below which a row is exact.
        method: of `KernelOperator`.
        random_state: of approximate products.

    >>> import numpy as np
    >>> float(NadarayaWatson(bandwidth=1.0).fit([[0.0], [2.0]], [0.0, 1.0]).predict([[1.0]])[0])
    0.5
    """

    def __init__(
        self,
        bandwidth: float | str = 1.0,
        *,
        eps: float = 0.01,
        exact_below: float = 1.0,
        method: str = "auto",
        random_state: Any = 0,
    ) -> None:
        self.bandwidth = bandwidth
        self.eps = eps
        self.exact_below = exact_below
        self.method = method
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> NadarayaWatson:
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], multi_output=True, y_numeric=True)
        self.weight_ = check_weight(sample_weight, len(X), "NadarayaWatson.fit")
        self.bandwidth_ = resolve_bandwidth(self.bandwidth, X.shape, self.weight_, type(self).__name__)
        self._exact_below = positive(self.exact_below, "exact_below", type(self).__name__)
        self.y_ = np.asarray(y, dtype=np.float64)
        points, self.operator_ = smoother(
            X, self.bandwidth_, self.eps, self.method, self.random_state, type(self).__name__
        )
        self.mean_, self._rows = points.mean, points.rows
        return self

    def predict(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        queries = (X - self.mean_).astype(self._rows.dtype, copy=False)
        # Weights are scaled to a largest of 1, so that the mass counts neighbours; y is centred, so that what the
        # products round is its variation.
        weight = self.weight_ / self.weight_.max()
        y = self.y_.reshape(len(self.y_), -1)
        middle = y.mean(0)
        table = np.concatenate([weight[:, None], weight[:, None] * (y - middle)], 1)
        product = np.asarray(self.operator_.with_queries(queries) @ table, dtype=np.float64)
        mass = product[:, :1]
        far = mass[:, 0] < self._exact_below
        out = product[:, 1:] / np.where(far[:, None], 1.0, mass)
        rows, values = torch.from_numpy(self._rows).double(), torch.from_numpy(y - middle)
        log_weight = torch.from_numpy(weight).log()
        where = np.flatnonzero(far)
        for part in np.array_split(where, max(1, -(-len(where) * len(rows) // (1 << 22)))):
            distance = torch.cdist(
                torch.from_numpy(queries[part]).double(), rows, compute_mode="donot_use_mm_for_euclid_dist"
            )
            logits = distance.square_().mul_(-0.5 / self.bandwidth_**2) + log_weight
            out[part] = (torch.softmax(logits, 1) @ values).numpy()
        return (out + middle).reshape(len(X), *self.y_.shape[1:])


def _remedy(system: System, alpha: float) -> str:
    """What to do about a residual that stays too large."""
    condition = len(system.points) / alpha  # at most: the trace of the kernel matrix is the number of rows
    if condition * np.finfo(np.float64).eps > 0.1:
        return (
            f"the condition number may be {condition:.1g}, which double precision cannot solve; raise alpha (now "
            f"{alpha:g}) or gamma (now {system.gamma:g})"
        )
    return f"raise max_iter or rank, or alpha (now {alpha:g})"


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
