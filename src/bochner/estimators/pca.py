"""Kernel principal components by Lanczos iteration."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.extmath import svd_flip
from sklearn.utils.validation import check_is_fitted, validate_data

from bochner._checks import positive_float, positive_int
from bochner.estimators._checks import draw_seed, resolve_gamma
from bochner.estimators.nystrom import CrossKernel
from bochner.estimators.rows import blockwise, refuse_dask
from bochner.matvec import Kernel, KernelOperator

DENSE = 512  # rows up to which the whole spectrum is computed
PRODUCTS = 30  # to expect of Lanczos iteration


@dataclass(eq=False, repr=False)
class KernelPCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Principal components of X with columns of similar spread, in the feature space of the Gaussian kernel.

    The top of `H K H`, H = I - 11'/n, by Lanczos iteration on `KernelOperator`; every eigenvalue is within `eps` of the
    true one (Weyl). Up to 512 rows, and for more than a quarter as many components as rows, from the dense matrix.

    Args:
        n_components: how many, at most n.
        gamma: a positive number, or `"scale"`: 1 / (d var(X)).
        eps: error allowed in a kernel product, relative to |x|.
        method: of `KernelOperator`.
        tol: of the Lanczos iteration, relative to each eigenvalue; 0 is machine precision.
        random_state: of the start vector and of approximate products.

    Attributes: `eigenvalues_` (descending), `eigenvectors_` (n, n_components), `gamma_`.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).normal(size=(100, 4))
    >>> KernelPCA(3).fit_transform(X).shape
    (100, 3)
    """

    n_components: int = 2
    _: KW_ONLY
    gamma: float | str = "scale"
    eps: float = 1e-3
    method: str = "auto"
    tol: float = 1e-6
    random_state: Any = 0

    def fit(self, X: Any, y: Any = None) -> KernelPCA:
        refuse_dask(type(self).__name__, X)
        X = validate_data(self, X, dtype=[np.float64, np.float32], ensure_min_samples=2)
        owner, n = type(self).__name__, X.shape[0]
        k = min(positive_int(self.n_components, "n_components", owner), n)
        eps = positive_float(self.eps, "eps", owner)
        tol = 0.0 if self.tol == 0 else positive_float(self.tol, "tol", owner)
        self.gamma_ = resolve_gamma(self.gamma, X, owner)
        sigma = float((0.5 / self.gamma_) ** 0.5)
        rng = check_random_state(self.random_state)
        points = torch.from_numpy(np.array(X, dtype=np.float64))
        if self.method == "auto" and (n <= DENSE or k > n // 4):
            K = Kernel("gaussian", sigma).block(points).numpy()
            means = K.mean(0)
            values, vectors = np.linalg.eigh(K - means - means[:, None] + means.mean())
        else:
            operator = KernelOperator(
                points, bandwidth=sigma, eps=eps, seed=draw_seed(rng), method=self.method, products=PRODUCTS
            )
            means = np.asarray(operator @ np.ones(n), dtype=np.float64) / n

            def matvec(x: np.ndarray) -> np.ndarray:
                out = np.asarray(operator @ (x.ravel() - x.mean()), dtype=np.float64)
                return out - out.mean()

            start = rng.normal(size=n)
            centred = LinearOperator((n, n), matvec=matvec, dtype=np.float64)
            values, vectors = eigsh(centred, k=k, tol=tol, v0=start - start.mean())
        order = np.argsort(values)[::-1][:k]
        self.eigenvalues_ = np.maximum(values[order], 0.0)
        self.eigenvectors_, _ = svd_flip(u=vectors[:, order], v=None)
        self._means, self._n_features_out = means, k
        self._cross = CrossKernel("gaussian", sigma, points, "float64")
        return self

    def fit_transform(self, X: Any, y: Any = None) -> np.ndarray:
        self.fit(X)
        return self.eigenvectors_ * np.sqrt(self.eigenvalues_)

    @blockwise(lambda model: (model._n_features_out, np.float64))
    def transform(self, X: Any) -> np.ndarray:
        """The components of each row of X, (n, n_components)."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        # A component without variance is noise: it is left at zero.
        kept = self.eigenvalues_ > 1e-10 * max(self.eigenvalues_[0], 1e-300)
        scaled = self.eigenvectors_ * np.where(kept, 1 / np.sqrt(np.where(kept, self.eigenvalues_, 1.0)), 0.0)
        # The columns sum to zero, so that subtracting the mean of a query's row of the kernel changes nothing.
        scaled = scaled - scaled.mean(0)
        return self._cross.predict(X, torch.from_numpy(scaled.T.copy())) - self._means @ scaled
