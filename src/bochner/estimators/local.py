"""Kernel density estimation with weights of any sign."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from bochner._checks import BochnerError
from bochner.estimators._kernel import check_weight, positive, resolve_bandwidth, smoother


class KernelDensity(BaseEstimator):
    """Gaussian kernel density, `p(q) = sum_j w_j N(q; x_j, sigma^2 I) / sum_j |w_j|`.

    `score_samples` is the log density, as in scikit-learn; `density` also serves signed weights (differences of
    densities, residuals). Rows whose kernel mass is below `exact_below` are computed exactly in log space, so that a
    far query has its true log density and not -inf.

    Args:
        bandwidth: sigma, or `"scott"`: n^(-1/(d+4)), or `"silverman"`: (n (d+2)/4)^(-1/(d+4)), for columns of unit
            variance, n being the number of rows: sum |w| of whole weights, (sum |w|)^2 / sum w^2 of others.
        eps: error allowed in a kernel product, relative to |w|.
        exact_below: kernel mass, in units of the largest |w|, below which a row is exact.
        method: of `KernelOperator`.
        random_state: of approximate products.

    >>> import numpy as np
    >>> X = np.zeros((10, 2))
    >>> bool(np.isclose(KernelDensity(bandwidth=1.0).fit(X).density([[0.0, 0.0]])[0], 1 / (2 * np.pi)))
    True
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

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> KernelDensity:
        X = validate_data(self, X, dtype=[np.float64, np.float32])
        self.weight_ = check_weight(sample_weight, len(X), "KernelDensity.fit", signed=True)
        self.bandwidth_ = resolve_bandwidth(self.bandwidth, X.shape, self.weight_, type(self).__name__)
        self._exact_below = positive(self.exact_below, "exact_below", type(self).__name__)
        points, self.operator_ = smoother(
            X, self.bandwidth_, self.eps, self.method, self.random_state, type(self).__name__
        )
        self.mean_, self._rows = points.mean, points.rows
        return self

    def density(self, X: Any) -> np.ndarray:
        """The (signed) density at each row of X; may underflow where its logarithm does not."""
        sign, log = self._log_density(X)
        return sign * np.exp(log)

    def score_samples(self, X: Any) -> np.ndarray:
        """The log density at each row of X."""
        check_is_fitted(self)
        if (self.weight_ < 0).any():
            raise BochnerError("The log density needs non-negative weights; use KernelDensity.density for signed ones.")
        return self._log_density(X)[1]

    def score(self, X: Any, y: Any = None) -> float:
        """The log likelihood of X."""
        return float(self.score_samples(X).sum())

    def sample(self, n_samples: int = 1, random_state: Any = None) -> np.ndarray:
        """Rows drawn from the density; needs non-negative weights."""
        check_is_fitted(self)
        if (self.weight_ < 0).any():
            raise BochnerError("A signed density cannot be sampled; fit with non-negative weights.")
        rng = check_random_state(random_state)
        chosen = rng.choice(len(self._rows), size=n_samples, p=self.weight_ / self.weight_.sum())
        return self.mean_ + self._rows[chosen] + self.bandwidth_ * rng.normal(size=(n_samples, self._rows.shape[1]))

    def _log_density(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """The sign and the log of the modulus."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        queries = (X - self.mean_).astype(self._rows.dtype, copy=False)
        largest = np.abs(self.weight_).max()
        weight = self.weight_ / largest
        value = np.asarray(self.operator_.with_queries(queries) @ weight, dtype=np.float64)
        with np.errstate(divide="ignore"):
            sign, log = np.sign(value), np.log(np.abs(value))
        small = np.flatnonzero(np.abs(value) < self._exact_below)
        rows, w = torch.from_numpy(self._rows).double(), torch.from_numpy(weight)
        for part in np.array_split(small, max(1, -(-len(small) * len(rows) // (1 << 22)))):
            distance = torch.cdist(
                torch.from_numpy(queries[part]).double(), rows, compute_mode="donot_use_mm_for_euclid_dist"
            )
            exponent = distance.square_().mul_(-0.5 / self.bandwidth_**2)
            top = exponent.amax(1, keepdim=True) if len(part) else exponent[:, :1]
            total = (exponent - top).exp() @ w
            sign[part], log[part] = total.sign().numpy(), (total.abs().log() + top[:, 0]).numpy()
        d = X.shape[1]
        log -= 0.5 * d * math.log(2 * math.pi * self.bandwidth_**2) + math.log(np.abs(weight).sum())
        return sign, log
