"""Gaussian process regression with learned hyperparameters and intervals that cover what they say."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.special import ndtri
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from bochner._checks import BochnerError, flag, one_of, positive_float, positive_numbers
from bochner.estimators._checks import draw_seed
from bochner.estimators.evidence import Hyper, learn
from bochner.estimators.nystrom import KERNELS, Centers, chosen_centers, features
from bochner.estimators.rows import blockwise, is_dask, refuse_dask
from bochner.matvec import Kernel, ridge_factor

LEARNED_ROWS = 2000  # of which the marginal likelihood is computed
CENTERS = 1024


@dataclass(eq=False, repr=False)
class GaussianProcessRegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """Gaussian process with kernel `amplitude K` and noise variance `alpha`; X and y are standardised.

    What is not given is learned by marginal likelihood: a bandwidth for each column, the amplitude and the noise, from
    up to 2,000 rows. Up to 4,096 rows the posterior is exact, and its variances are scaled to those of rows predicted
    from the others. Beyond, it lives on 1,024 centres (Titsias 2009): amplitude and noise are learned again from all.

    Args:
        alpha: variance of the noise, in the units of standardised y; None: learned.
        amplitude: prior variance of the function; None: learned.
        gamma: 1 / (2 bandwidth^2) of the standardised columns, one number or one for each; None: learned.
        kernel: "gaussian", "laplace", "matern32", "matern52" or "student".
        centers: `"auto"`, a number, `"all"` rows, or `Centers(count, rule)`.
        standardize: whether columns of X and y are brought to mean 0 and variance 1.
        random_state: of the rows that are learned from, and of the centres.

    Attributes: `bandwidth_` (of every column, in the units of X), `amplitude_`, `noise_` (variances, in the units of
    standardised y), `centers_`.

    >>> import numpy as np
    >>> X = np.linspace(0, 1, 40)[:, None]
    >>> model = GaussianProcessRegressor(alpha=1e-4).fit(X, np.sin(6 * X[:, 0]))
    >>> mean, std = model.predict([[0.5], [9.0]], return_std=True)
    >>> bool(std[0] < 0.05 < std[1])
    True
    """

    alpha: float | None = None
    _: KW_ONLY
    amplitude: float | None = None
    gamma: Any = None
    kernel: str = "matern32"
    centers: Any = "auto"
    standardize: bool = True
    random_state: Any = 0

    def fit(self, X: Any, y: Any) -> GaussianProcessRegressor:
        refuse_dask(type(self).__name__, X, y)
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], multi_output=True, y_numeric=True)
        owner = type(self).__name__
        one_of(self.kernel, "kernel", owner, KERNELS)
        centers = Centers.of(self.centers, X.shape[1], owner)
        y = np.asarray(y, dtype=np.float64)
        self._flat, y = y.ndim == 1, y.reshape(len(y), -1)
        standardize, d = flag(self.standardize, "standardize", owner), X.shape[1]
        self._x_mean, self._x_scale = _standard(X, standardize)
        self._y_mean, self._y_scale = _standard(y, standardize)
        target = torch.from_numpy((y - self._y_mean) / self._y_scale)
        rng = check_random_state(self.random_state)
        seed = draw_seed(rng)
        chosen = rng.permutation(len(X))[:LEARNED_ROWS]
        hyper = learn(self.kernel, self._place(X[chosen]).numpy(), target[chosen], self._given(d), seed)
        self._hyper, self._kernel = hyper, Kernel(self.kernel, hyper.bandwidth)
        if isinstance(centers, Centers) and centers.number(len(X), 1) >= len(X):
            self._fit_exact(self._place(X), target)
        else:
            self._fit_centers(X, target, centers, seed)
        self.bandwidth_ = hyper.bandwidth * self._x_scale
        self.amplitude_, self.noise_ = self._hyper.amplitude, self._hyper.noise
        return self

    def _given(self, d: int) -> Hyper:
        """The hyperparameters that the caller fixed; the others are NaN."""
        owner = type(self).__name__
        noise = math.nan if self.alpha is None else positive_float(self.alpha, "alpha", owner)
        amplitude = math.nan if self.amplitude is None else positive_float(self.amplitude, "amplitude", owner)
        gamma = math.nan if self.gamma is None else positive_numbers(self.gamma, "gamma", owner, d)
        return Hyper(np.sqrt(0.5 / (gamma * np.ones(d))), amplitude, noise)

    def _place(self, X: np.ndarray) -> Tensor:
        return torch.from_numpy((X - self._x_mean) / self._x_scale)

    def _fit_exact(self, x: Tensor, y: Tensor) -> None:
        hyper = self._hyper
        self._points, self._lower = x, ridge_factor(hyper.amplitude * self._kernel.block(x), hyper.noise)
        self._inner: Tensor | None = None
        self._dual = torch.cholesky_solve(y, self._lower)
        if self.alpha is None and self.amplitude is None:
            # Rows predicted from the others: residual^2 / variance = dual^2 / diag(A^-1), on average one if A is right.
            left_out = self._dual.square() / torch.cholesky_inverse(self._lower).diagonal()[:, None]
            scale = float(left_out.mean().clamp(0.25, 4.0))
            self._hyper = hyper._replace(amplitude=scale * hyper.amplitude, noise=scale * hyper.noise)
            self._lower, self._dual = self._lower * scale**0.5, self._dual / scale

    def _fit_centers(self, X: np.ndarray, y: Tensor, centers: Any, seed: int) -> None:
        """Sums over blocks of rows of `phi phi'` and `phi y`, then the amplitude and the noise they make likely."""
        kernel, x, n = self._kernel, self._place(X), len(X)
        if isinstance(centers, Centers):
            m = min(n, centers.count or CENTERS)
            sample = x[np.random.RandomState(seed).permutation(n)[: 8 * m]]
            points = sample[chosen_centers(kernel, sample, m, centers.rule, seed)]
        else:
            points = self._place(centers)
        lower = ridge_factor(kernel.block(points), 1e-9)
        gram = torch.zeros_like(lower)
        right = torch.zeros(len(points), y.shape[1], dtype=torch.float64)
        for part, phi in features(kernel, points, lower, x):
            gram.addmm_(phi, phi.T)
            right.addmm_(phi, y[part])
        self._relearn(gram, right, y)
        inner = ridge_factor(gram, self._hyper.noise / self._hyper.amplitude)
        self._points, self._lower, self._inner = points, lower, inner
        self._dual = torch.linalg.solve_triangular(lower.T, torch.cholesky_solve(right, inner), upper=True)

    def _relearn(self, gram: Tensor, right: Tensor, y: Tensor) -> None:
        """The likeliest ratio of noise to amplitude, and amplitude, of all rows; what is fixed stays."""
        if self.alpha is not None and self.amplitude is not None:
            return
        n, c = y.shape
        values, vectors = torch.linalg.eigh(gram)
        values = values.clamp_min(0.0)
        squares, total = (vectors.T @ right).square().sum(1), float(y.square().sum())
        missing = max(0.0, n - float(values.sum()))

        def amplitude(ratio: float) -> float:
            fit = (total - float((squares / (values + ratio)).sum())) / ratio
            return max(fit / (n * c), 1e-12)

        def loss(log_ratio: float) -> float:
            ratio = math.exp(log_ratio)
            logdet = float((values + ratio).log().sum()) + (n - len(values)) * log_ratio
            return n * c * math.log(amplitude(ratio)) + c * (logdet + missing / ratio)

        found = minimize_scalar(loss, bounds=(math.log(1e-6), math.log(1e3)), method="bounded")
        ratio = math.exp(found.x)
        level = amplitude(ratio) if self.amplitude is None else self._hyper.amplitude
        self._hyper = self._hyper._replace(
            amplitude=level, noise=ratio * level if self.alpha is None else self._hyper.noise
        )

    def _posterior(self, X: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Rows in standard units, their kernel with the points, and the mean (n, c) in standard units."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        x = self._place(X)
        K = self._kernel.block(x, self._points)
        level = self._hyper.amplitude if self._inner is None else 1.0
        return x, K, level * K @ self._dual

    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False, noise: bool = True) -> Any:
        """The mean; with `return_std` the deviation, with `return_cov` the covariance of new observations.

        `noise=False`: of the function, without the noise of an observation. A Dask array gives a Dask array of means.
        """
        if is_dask(X):
            if return_std or return_cov:
                raise BochnerError("Deviations of a Dask array are computed for one block of it at a time.")
            return self._mean(X)
        x, K, mean = self._posterior(X)
        mean_ = self._out(mean.numpy() * self._y_scale + self._y_mean)
        if return_cov:
            cov = self._covariance(x, K, noise)
            return mean_, cov * self._y_scale[0] ** 2 if self._flat else cov[..., None] * self._y_scale**2
        if not return_std:
            return mean_
        std = np.sqrt(self._variance(K) + noise * self._hyper.noise)
        return mean_, self._out(std[:, None] * self._y_scale)

    @blockwise(lambda model: (0 if model._flat else len(model._y_scale), np.float64))
    def _mean(self, X: Any) -> np.ndarray:
        return self.predict(X)

    def interval(self, X: Any, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends between which a new observation is with probability `level`."""
        owner = f"{type(self).__name__}.interval"
        if not positive_float(level, "level", owner) < 1:
            raise BochnerError(f"The 'level' of {owner} must be between 0 and 1, got {level!r}.")
        mean, std = self.predict(X, return_std=True)
        width = ndtri(0.5 + 0.5 * level)
        return mean - width * std, mean + width * std

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Functions drawn from the posterior, at the rows of X: (n, n_samples), or (n, c, n_samples)."""
        x, K, mean = self._posterior(X)
        values, vectors = np.linalg.eigh(self._covariance(x, K, False))
        drawn = check_random_state(random_state).normal(size=(len(x), mean.shape[1] * n_samples))
        drawn = (vectors * np.sqrt(np.maximum(values, 0.0))) @ drawn
        paths = mean.numpy()[..., None] + drawn.reshape(len(x), -1, n_samples)
        paths = paths * self._y_scale[:, None] + self._y_mean[:, None]
        return paths[:, 0] if self._flat else paths

    def _halves(self, K: Tensor) -> list[tuple[float, Tensor]]:
        """Parts (sign, Z) of the posterior: its covariance is `amplitude K(x, x) + sum sign Z'Z`."""
        level = self._hyper.amplitude
        phi = torch.linalg.solve_triangular(self._lower, K.T, upper=False)
        if self._inner is None:
            return [(-(level**2), phi)]
        return [(-level, phi), (self._hyper.noise, torch.linalg.solve_triangular(self._inner, phi, upper=False))]

    def _variance(self, K: Tensor) -> np.ndarray:
        level = self._hyper.amplitude
        known = torch.stack([sign * Z.square().sum(0) for sign, Z in self._halves(K)]).sum(0)
        return (level + known).clamp_min_(1e-12 * level).numpy()

    def _covariance(self, x: Tensor, K: Tensor, noise: bool) -> np.ndarray:
        cov = self._hyper.amplitude * self._kernel.block(x)
        for sign, Z in self._halves(K):
            cov.addmm_(Z.T, Z, alpha=sign)
        cov.diagonal().add_(noise * self._hyper.noise)
        return cov.numpy()

    def _out(self, values: np.ndarray) -> np.ndarray:
        return values[:, 0] if self._flat else values

    @property
    def centers_(self) -> np.ndarray:
        """The centres, or all rows, in the units of X."""
        return self._points.numpy() * self._x_scale + self._x_mean


def _standard(values: np.ndarray, wanted: bool) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of columns, 1 where a column does not vary; 0 and 1 if they are not wanted."""
    if not wanted:
        return np.zeros(values.shape[1]), np.ones(values.shape[1])
    mean, deviation = values.mean(0, dtype=np.float64), values.std(0, dtype=np.float64)
    return mean, np.where(deviation > 1e-14 * np.abs(mean), deviation, 1.0)
