"""Kernel principal components by Lanczos iteration."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.extmath import svd_flip
from sklearn.utils.validation import check_is_fitted, validate_data

from bochner._checks import positive_float, positive_int
from bochner.estimators._kernel import centred, draw_seed, linear_kernel, positive, resolve_gamma, tile
from bochner.matvec import KernelOperator

DENSE = 512  # rows up to which the whole spectrum is computed


class KernelPCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Principal components in the feature space of the Gaussian kernel: the top of `H K H`, H = I - 11'/n.

    Lanczos iteration on a strictly linear kernel operator: n x n is never held beyond 2 GB. By Weyl's inequality every
    eigenvalue is within `eps` of the true one. Up to 512 rows, and for more than a quarter as many components as rows,
    the whole spectrum is computed from the dense matrix (n^2 numbers, O(n^3)) unless `method` says otherwise.

    Args:
        n_components: how many, at most n.
        gamma: a positive number, or `"scale"`: 1 / (d var(X)).
        eps: error allowed in a kernel product, relative to |x|.
        method: of `KernelOperator`.
        tol: of the Lanczos iteration, relative to each eigenvalue; 0 is machine precision.
        random_state: of the start vector and of approximate products.

    Attributes: `eigenvalues_` (descending), `eigenvectors_` (n, n_components), `gamma_`, `operator_`.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).normal(size=(100, 4))
    >>> KernelPCA(3).fit_transform(X).shape
    (100, 3)
    """

    def __init__(
        self,
        n_components: int = 2,
        *,
        gamma: float | str = "scale",
        eps: float = 1e-3,
        method: str = "auto",
        tol: float = 1e-6,
        random_state: Any = 0,
    ) -> None:
        self.n_components = n_components
        self.gamma = gamma
        self.eps = eps
        self.method = method
        self.tol = tol
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> KernelPCA:
        X = validate_data(self, X, dtype=[np.float64, np.float32], ensure_min_samples=2)
        owner, n = type(self).__name__, X.shape[0]
        k = min(positive_int(self.n_components, "n_components", owner), n)
        eps = positive_float(self.eps, "eps", owner)
        tol = positive(self.tol, "tol", owner, zero=True)
        self.gamma_ = resolve_gamma(self.gamma, X, owner)
        rng = check_random_state(self.random_state)
        points, seed = centred(X, self.gamma_, eps), draw_seed(rng)
        self.mean_ = points.mean
        ones = torch.ones(n, 1, dtype=torch.float64)
        if self.method == "auto" and (n <= DENSE or k > n // 4):
            z = torch.from_numpy(points.rows).double()
            K = tile(z, z, self.gamma_)
            means = K.mean(0)
            values, vectors = np.linalg.eigh((K - means - means[:, None] + means.mean()).numpy())
        else:
            product = linear_kernel(points.rows, self.gamma_, eps, self.method, seed).product
            means = (product(ones) / n)[:, 0]

            def matvec(x: np.ndarray) -> np.ndarray:
                v = x.reshape(n, 1) - x.mean()
                out = product(torch.from_numpy(v)).numpy()[:, 0]
                return out - out.mean()

            operator = LinearOperator((n, n), matvec=matvec, dtype=np.float64)
            start = rng.normal(size=n)
            values, vectors = eigsh(operator, k=k, tol=tol, v0=start - start.mean())
        order = np.argsort(values)[::-1][:k]
        self.eigenvalues_ = np.maximum(values[order], 0.0)
        self.eigenvectors_, _ = svd_flip(u=vectors[:, order], v=None)
        self._column_means = means.numpy()
        self.operator_ = KernelOperator(
            points.rows[:1], points.rows, gamma=self.gamma_, eps=eps, method=self.method, seed=seed
        )
        self._n_features_out = k
        return self

    def fit_transform(self, X: Any, y: Any = None) -> np.ndarray:
        self.fit(X)
        return self.eigenvectors_ * np.sqrt(self.eigenvalues_)

    def transform(self, X: Any) -> np.ndarray:
        """The components of each row of X, (n, n_components)."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        queries = (X - self.mean_).astype(self.operator_.dtype, copy=False)
        # A component without variance is noise: it is left at zero.
        kept = self.eigenvalues_ > 1e-10 * max(self.eigenvalues_[0], 1e-300)
        scaled = self.eigenvectors_ * np.where(kept, 1 / np.sqrt(np.where(kept, self.eigenvalues_, 1.0)), 0.0)
        # The columns sum to zero, so that subtracting the mean of a query's row of the kernel changes nothing.
        scaled = scaled - scaled.mean(0)
        product = np.asarray(self.operator_.with_queries(queries) @ scaled, dtype=np.float64)
        return product - self._column_means @ scaled
