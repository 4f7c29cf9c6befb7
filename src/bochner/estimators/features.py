"""Random features of every family as one scikit-learn transformer."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from bochner._checks import BochnerError, one_of, positive_int
from bochner.estimators._checks import draw_seed, resolve_gamma
from bochner.estimators.rows import blockwise, refuse_dask
from bochner.maps import FeatureMap, feature_map, named, options_of

KERNELS = ("gaussian", "softmax")
CALIBRATION_ROWS = 2048
BLOCK = 1 << 16  # features computed at a time: they stay in the second-level cache
EVEN = 16  # columns up to which low-discrepancy points are more even than random ones
LEAST = {"gmm_prf": 2, "gmm_rks": 2, "generative_prf": 2, "generative_rks": 2, "landmark": 2}  # of projections
BOUNDED = ("trig",)  # whose sampling error is far above the rounding of single precision, whatever x is
SINGLE = 256.0  # the largest scaled norm whose phases single precision resolves to 1e-4


@dataclass(eq=False, repr=False)
class RandomFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Features whose inner products estimate a kernel, `phi(x) . phi(y) ~ K(x, y)`, for any linear model after it.

    `kernel="gaussian"` is `exp(-gamma |x - y|^2)`, `"softmax"` is `exp(2 gamma x.y)`, the same without its row factors:
    the map sees `sqrt(2 gamma) x`. Maps of other kernels (`tensor_sketch`, `relu`, ...) estimate their own. Maps with
    data statistics are calibrated on the training rows.

    Args:
        n_components: length of the features, rounded down to what the map can have, or up to its least;
            `bochner.theory.features_needed` says which length an error takes.
        feature_map: a name of `bochner.maps.FEATURE_MAPS`, those of `bochner.register_map` among them.
        kernel: `"gaussian"` or `"softmax"`, for the maps that estimate both; `landmark` wants `"softmax"`.
        gamma: a positive number, or `"scale"`: 1 / (d var(X)), as in `RBFSampler`; for all kernels but the Gaussian,
            which see where X is, 1 / (d mean(X^2)).
        projection: the law of the frequencies; `"auto"` is `"halton"` for `trig` in up to 16 columns, where evenly
            spread points serve a regression best, else `"orthogonal"`.
        map_params: further keywords of the map, such as `{"degree": 3}`.
        random_state: of the frequencies.

    `transform` gives the features of queries; for maps whose keys have others, `transform(X, role="key")` gives those.
    Sparse X is read in blocks of rows.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).normal(size=(100, 4))
    >>> RandomFeatures(64, random_state=0).fit_transform(X).shape
    (100, 64)
    """

    n_components: int = 256
    _: KW_ONLY
    feature_map: str = "trig"
    kernel: str = "gaussian"
    gamma: float | str = "scale"
    projection: str = "auto"
    map_params: dict[str, Any] | None = None
    random_state: Any = None

    def fit(self, X: Any, y: Any = None) -> RandomFeatures:
        refuse_dask(type(self).__name__, X)
        X = validate_data(self, X, accept_sparse="csr", dtype=[np.float64, np.float32])
        owner = type(self).__name__
        one_of(self.kernel, "kernel", owner, KERNELS)
        self.projection_ = self.projection
        if self.projection == "auto":
            self.projection_ = "halton" if self.feature_map == "trig" and X.shape[1] <= EVEN else "orthogonal"
        rng = check_random_state(self.random_state)
        seed = draw_seed(rng)
        # The Gaussian kernel does not see a shift; single precision does.
        shift = self._probe(X.shape[1]).kernel == "gaussian"
        self.gamma_ = resolve_gamma(self.gamma, X, owner, centred=shift)
        self.mean_ = np.asarray(X.mean(0, dtype=np.float64)).reshape(-1) if shift else np.zeros(X.shape[1])
        length = positive_int(self.n_components, "n_components", owner)
        self.feature_map_ = self._build(X.shape[1], length, seed)
        if len(rows := rng.permutation(X.shape[0])[:CALIBRATION_ROWS]) > 1:
            x = self._place(X[rows])
            self.feature_map_.calibrate_(x, x)
        self.n_components_ = self._n_features_out = self.feature_map_.feature_dim
        return self

    @blockwise(lambda model: (model.n_components_, None))
    def transform(self, X: Any, role: str = "query") -> np.ndarray:
        """The features of the rows of X, (n, n_components_)."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False)
        out = np.empty((X.shape[0], self.n_components_), dtype=X.dtype)
        rows = max(16, BLOCK // self.n_components_)
        with torch.no_grad():
            for i in range(0, X.shape[0], rows):
                out[i : i + rows] = self._features(self._place(X[i : i + rows]), role, X.dtype)
        if not np.isfinite(out).all():
            raise BochnerError(
                f"The features of {self.feature_map!r} overflow {out.dtype} at gamma={self.gamma_:g}; use "
                "kernel='gaussian', scale X, or lower gamma."
            )
        return out

    def _features(self, x: torch.Tensor, role: str, dtype: np.dtype) -> np.ndarray:
        """Of placed rows; each row is the same whatever its neighbours are."""
        if self.feature_map not in BOUNDED and dtype == np.float64:
            return self.feature_map_(x, role).dense().numpy()
        block = self.feature_map_(x.float(), role).dense().numpy()
        far = (x.square().sum(1) > SINGLE**2).numpy()
        if far.any():
            block = block.astype(np.float64)
            block[far] = self.feature_map_(x[far], role).dense().numpy()
        return block

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _place(self, X: Any) -> torch.Tensor:
        """Rows as the map wants them: dense, centred, scaled."""
        dense = X.toarray() if sparse.issparse(X) else X
        return torch.from_numpy((dense - self.mean_) * math.sqrt(2 * self.gamma_))

    def _build(self, d: int, length: int, seed: int) -> FeatureMap:
        """The map whose features are at most `length` long, with one projection at least."""
        factor = max(1, round(self._probe(d).feature_dim / 16))
        options = self._options()
        least = int(options.get("num_components", LEAST.get(self.feature_map, 1)))  # a feature for every component
        return feature_map(self.feature_map, dim=d, num_features=max(least, length // factor), seed=seed, **options)

    def _probe(self, d: int) -> FeatureMap:
        """A small map of the same kind, whose kernel must be the one asked for where it is one of the two."""
        phi = feature_map(self.feature_map, dim=d, num_features=16, seed=0, **self._options())
        if phi.kernel not in KERNELS and self.kernel == "softmax":
            raise BochnerError(
                f"The feature map {self.feature_map!r} has no kernel 'softmax', it estimates one of its own; leave "
                "'kernel' out."
            )
        if phi.kernel in KERNELS and phi.kernel != self.kernel:
            raise BochnerError(
                f"The feature map {self.feature_map!r} estimates the kernel {phi.kernel!r} here, not {self.kernel!r}; "
                f"give RandomFeatures kernel={phi.kernel!r}, or take another map."
            )
        return phi

    def _options(self) -> dict[str, Any]:
        if self.map_params is not None and not isinstance(self.map_params, dict):
            raise BochnerError(
                f"The 'map_params' of {type(self).__name__} must be None or a dict of keywords of the map, got "
                f"{self.map_params!r}."
            )
        options: dict[str, Any] = dict(self.map_params or {})
        if "kernel" in options_of(named(self.feature_map, type(self).__name__)):
            options.setdefault("kernel", self.kernel)
        options.setdefault("projection", self.projection_)
        return options
