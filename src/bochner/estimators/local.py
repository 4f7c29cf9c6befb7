"""Sums over neighbours: kernel densities and local averages, exact in log space where there are few neighbours."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from bochner._checks import BochnerError, positive_float
from bochner.estimators._checks import check_weight, draw_seed, resolve_bandwidth
from bochner.estimators.rows import blockwise, refuse_dask
from bochner.matvec import KernelOperator

PAIRS = 1 << 20  # in one block of exact rows; so few in all are exact at once
FEW = 1.0  # kernel mass, in neighbours of the largest weight, below which a row is exact


@dataclass(eq=False, repr=False)
class _Neighbours(BaseEstimator):
    """Gaussian kernel sums over weighted rows: `sum_j w_j K(q, x_j) t_j`."""

    bandwidth: float | str = 1.0
    _: KW_ONLY
    eps: float = 0.01
    method: str = "auto"
    random_state: Any = 0

    def _prepare(self, X: np.ndarray, weight: Any, signed: bool) -> None:
        owner = type(self).__name__
        self.weight_ = check_weight(weight, len(X), f"{owner}.fit", signed=signed)
        self.bandwidth_ = resolve_bandwidth(self.bandwidth, X.shape, self.weight_, owner)
        eps, seed = positive_float(self.eps, "eps", owner), draw_seed(check_random_state(self.random_state))
        self._counted = self.weight_ != 0  # a row without weight is no neighbour, however near
        self._rows = X[self._counted]
        self.operator_ = KernelOperator(
            self._rows[:1], self._rows, bandwidth=self.bandwidth_, eps=eps, seed=seed, method=self.method
        )

    def _sums(self, X: Any, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each row of X: `sums * exp(log_scale)` of K table, (n, r) and (n,).

        Rows whose mass, |first column|, is below that of one neighbour have their nearest one as scale, so that nothing
        underflows.
        """
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        if len(X) * len(self._rows) <= PAIRS:
            sums, few = np.zeros((len(X), table.shape[1])), np.arange(len(X))
        else:
            operator = self.operator_.with_queries(X.astype(self._rows.dtype, copy=False))
            sums = np.asarray(operator @ table, dtype=np.float64)
            few = np.flatnonzero(np.abs(sums[:, 0]) < FEW)
        log_scale = np.zeros(len(X))
        rows, columns = torch.from_numpy(self._rows).double(), torch.from_numpy(table)
        for part in np.array_split(few, max(1, -(-len(few) * len(rows) // PAIRS))):
            if len(part):
                queries = torch.from_numpy(np.array(X[part], dtype=np.float64))
                distance = torch.cdist(queries, rows, compute_mode="donot_use_mm_for_euclid_dist")
                exponent = distance.square_().mul_(-0.5 / self.bandwidth_**2)
                top = exponent.amax(1, keepdim=True)
                sums[part] = (exponent.sub_(top).exp_() @ columns).numpy()
                log_scale[part] = top[:, 0].numpy()
        return sums, log_scale


class KernelDensity(_Neighbours):
    """Density of X with columns of similar spread: `p(q) = sum_j w_j N(q; x_j, sigma^2 I) / sum_j |w_j|`.

    `score_samples` is the log density, as in scikit-learn; `density` also serves signed weights. Rows with a kernel
    mass below one neighbour are computed exactly in log space. So a far query has its true log density and not
    -inf. One bandwidth serves all columns: standardise them first.

    Args:
        bandwidth: sigma, or `"scott"`: n^(-1/(d+4)), or `"silverman"`: (n (d+2)/4)^(-1/(d+4)), for columns of unit
            variance and n rows.
        eps: error allowed in a kernel product, relative to |w|.
        method: of `KernelOperator`.
        random_state: of approximate products.

    >>> import numpy as np
    >>> X = np.zeros((10, 2))
    >>> bool(np.isclose(KernelDensity(bandwidth=1.0).fit(X).density([[0.0, 0.0]])[0], 1 / (2 * np.pi)))
    True
    """

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> KernelDensity:
        refuse_dask(type(self).__name__, X)
        X = validate_data(self, X, dtype=[np.float64, np.float32])
        self._prepare(X, sample_weight, signed=True)
        return self

    @blockwise(lambda model: (0, np.float64))
    def density(self, X: Any) -> np.ndarray:
        """The (signed) density at each row of X; may underflow where its logarithm does not."""
        sign, log = self._log_density(X)
        return sign * np.exp(log)

    @blockwise(lambda model: (0, np.float64))
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
        weight = self.weight_[self._counted]
        chosen = rng.choice(len(self._rows), size=n_samples, p=weight / weight.sum())
        return self._rows[chosen] + self.bandwidth_ * rng.normal(size=(n_samples, self._rows.shape[1]))

    def _log_density(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        check_is_fitted(self)
        weight = self.weight_[self._counted] / np.abs(self.weight_).max()
        sums, log_scale = self._sums(X, weight[:, None])
        with np.errstate(divide="ignore"):
            sign, log = np.sign(sums[:, 0]), np.log(np.abs(sums[:, 0])) + log_scale
        d = self.n_features_in_
        return sign, log - 0.5 * d * math.log(2 * math.pi * self.bandwidth_**2) - math.log(np.abs(weight).sum())


class NadarayaWatson(MultiOutputMixin, RegressorMixin, _Neighbours):
    """Local averages of X with columns of similar spread: `f(q) = sum_j w_j K(q, x_j) y_j / sum_j w_j K(q, x_j)`.

    Rows with a kernel mass below one neighbour are computed exactly in log space. So a far query gets the mean of its
    nearest neighbours and never 0/0.

    Args:
        bandwidth, eps, method, random_state: as in `KernelDensity`; K is `exp(-|x-y|^2 / (2 bandwidth^2))`.

    >>> import numpy as np
    >>> float(NadarayaWatson(bandwidth=1.0).fit([[0.0], [2.0]], [0.0, 1.0]).predict([[1.0]])[0])
    0.5
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> NadarayaWatson:
        refuse_dask(type(self).__name__, X, y)
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], multi_output=True, y_numeric=True)
        self._prepare(X, sample_weight, signed=False)
        self.y_ = np.asarray(y, dtype=np.float64)
        return self

    @blockwise(lambda model: (model.y_.shape[1] if model.y_.ndim == 2 else 0, np.float64))
    def predict(self, X: Any) -> np.ndarray:
        """The local average at each row of X; of a Dask array, a Dask array."""
        check_is_fitted(self)
        # Weights are scaled to a largest of 1, so that the mass counts neighbours; y is centred, so that what the
        # products round is its variation.
        weight = (self.weight_[self._counted] / self.weight_.max())[:, None]
        y = self.y_[self._counted].reshape(len(weight), -1)
        middle = y.mean(0)
        sums, _ = self._sums(X, np.concatenate([weight, weight * (y - middle)], 1))
        return (sums[:, 1:] / sums[:, :1] + middle).reshape(len(sums), *self.y_.shape[1:])
