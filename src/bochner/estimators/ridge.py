"""Kernel ridge regression and kernel classification, from a few rows to millions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from bochner._checks import BochnerError, flag, one_of, positive_float, positive_numbers
from bochner._progress import speaker
from bochner.estimators import nystrom
from bochner.estimators._checks import check_weight, draw_seed, scale_gamma
from bochner.estimators.evidence import learn
from bochner.estimators.nystrom import Basis, Centers, CrossKernel
from bochner.estimators.rows import Rows, array_rows, blockwise, dask_rows, is_dask, streamed_rows
from bochner.matvec import (
    Kernel,
    KernelOperator,
    Preconditioner,
    Solution,
    conjugate_gradients,
    pivoted_cholesky,
    ridge_factor,
)

MAX_PASSES = 200
COMPARED_ROWS, COMPARED_CENTERS = 10_000, 1000  # of leave-one-out errors
LEARNED_ROWS = 1500  # from which bandwidths are learned


@dataclass(eq=False, repr=False)
class _CenterModel(BaseEstimator):
    """`f(x) = offset + sum_j c_j K(x, z_j)`: reading rows, scaling them, and evaluating f."""

    alpha: float = 0.1
    _: KW_ONLY
    kernel: str = "gaussian"
    gamma: Any = "auto"
    centers: Any = "auto"
    standardize: bool = True
    tol: float = 3e-3
    random_state: Any = 0

    def _read(self, X: Any, y: Any, weight: Any) -> Rows:
        owner = f"{type(self).__name__}.fit"
        if is_dask(X):
            return dask_rows(X, y, weight, owner)
        if callable(X):
            if y is not None or weight is not None:
                raise BochnerError(f"{owner} takes y and the weights of an iterator of blocks from its blocks alone.")
            return streamed_rows(X)
        if hasattr(X, "__next__"):
            raise BochnerError(
                f"{owner} reads the blocks several times: give a function that returns a new iterator, not an iterator."
            )
        if is_dask(y) or is_dask(weight):
            raise BochnerError(f"The 'y' of {owner} is a Dask array and X is not; call .compute() on it, or chunk X.")
        numeric = isinstance(self, KernelRidge)
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], multi_output=numeric, y_numeric=numeric)
        weight = None if weight is None else check_weight(weight, len(X), owner)
        return array_rows(X, y, weight)

    def _begin(
        self, X: Any, y: Any, weight: Any, encoder: Callable[[Rows], Callable[[np.ndarray], np.ndarray]]
    ) -> tuple[Rows, float, float, Centers | np.ndarray]:
        """What every fit begins with: alpha, tol, centres, and the rows, their targets encoded and measured."""
        owner = type(self).__name__
        alpha, tol = positive_float(self.alpha, "alpha", owner), positive_float(self.tol, "tol", owner)
        rows = self._read(X, y, weight)
        rows = self._measure(replace(rows, encode=encoder(rows)))
        return rows, alpha, tol, Centers.of(self.centers, self.n_features_in_, owner)

    def _measure(self, rows: Rows) -> Rows:
        """Count the rows, and find the scale of the columns and the mean of the targets."""
        first = rows.head()
        shift = first.X.mean(0, dtype=np.float64) if len(first.X) else np.zeros(first.X.shape[1])
        lengths, weight, s, moduli, squares, y = rows.total(nystrom.moments, shift)
        self.n_features_in_ = len(shift)
        if not weight > 0:
            raise BochnerError(f"{type(self).__name__}.fit got no rows, or 'sample_weight' is zero everywhere.")
        with np.errstate(over="ignore", invalid="ignore"):
            mean, variance = shift + s / weight, np.maximum(squares / weight - np.square(s / weight), 0.0)
            self._spread = (mean, np.where(variance > 1e-28 * np.square(mean), variance, 0.0))
            lost = (squares == 0) & (moduli > 0)  # squares too small for a number
        if not np.isfinite(variance).all() or lost.any():
            raise BochnerError(f"The variance of the X of {type(self).__name__} is out of range; rescale X.")
        self.offset_ = np.atleast_1d(y / weight) if self.standardize else np.zeros(np.size(y))
        self._total_weight = float(weight)
        return replace(rows, lengths=lengths)

    def _set_kernel(self, given: Any, rows: Rows, seed: int) -> None:
        """The bandwidth of every column, in the units of X, from what `gamma` can be."""
        owner = type(self).__name__
        one_of(self.kernel, "kernel", owner, nystrom.KERNELS)
        mean, variance = self._spread
        standardize = flag(self.standardize, "standardize", owner)
        scale = np.sqrt(np.where((variance > 0) & standardize, variance, 1.0))
        if not isinstance(given, str):
            gamma: Any = positive_numbers(given, "gamma", owner, len(mean))
        elif one_of(given, "gamma", owner, ("auto", "scale", "learn")) == "learn":
            block = rows.sample(LEARNED_ROWS, np.random.RandomState(seed)).merged()
            y = block.y - block.y.mean(0)
            y /= np.maximum(y.std(0), 1e-12 * max(1.0, np.abs(block.y).max()))
            gamma = 0.5 / learn(self.kernel, (block.X - mean) / scale, y, seed=seed).bandwidth ** 2
            gamma = np.exp(np.round(np.log(gamma), 3))  # further digits are rounding of the search
        else:
            pooled = np.mean(variance / scale**2) + (0.0 if standardize else np.var(mean))
            gamma = scale_gamma(pooled, len(mean), owner) * (2 if given == "auto" else 1)
        self.gamma_ = gamma
        self.bandwidth_ = scale / np.sqrt(2 * np.asarray(gamma))

    def _scores(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        return self._cross.predict(X, self._coefficients) + self.offset_

    @property
    def centers_(self) -> np.ndarray:
        """The centres (M, d), in the units of X."""
        return self._cross.parts[2].numpy()


@dataclass(eq=False, repr=False)
class KernelRidge(MultiOutputMixin, RegressorMixin, _CenterModel):
    """Kernel ridge regression, `min_f sum_i w_i (y_i - f(x_i))^2 + alpha |f|^2`; the columns of X are standardised.

    Up to 4,096 rows by a Cholesky factorisation. Beyond, f lives on up to 4,096 centres, and preconditioned conjugate
    gradients read the rows a dozen times: memory does not grow with their number. X can be an array, a memory-mapped
    one or a Dask array. It can also be a function that returns an iterator of blocks (X, y) or (X, y, weight).

    Args:
        alpha: the ridge parameter, in the units of `sklearn.kernel_ridge.KernelRidge`.
        kernel: "gaussian", "laplace", "matern32", "matern52" or "student".
        gamma: of the standardised columns, 1 / (2 bandwidth^2): a number, one for each column, `"scale"`: 1 / (d var),
            `"auto"`: twice that, or `"learn"`: one for each column, by the marginal likelihood of 1,500 rows.
        centers: `"auto"`, a number, an array of centres, `"all"` rows, or `Centers(count, rule, seconds)`.
        standardize: whether columns are divided by their deviation and the mean of y is taken off.
        tol: what conjugate gradients leave of the residual, in the norm of the preconditioner.
        warm_start: whether `fit` keeps centres and starts from the coefficients of the last one, also one that was
            interrupted.
        random_state: of the centres.

    Attributes: `dual_coef_`, `centers_`, `bandwidth_` (of every column, in the units of X), `gamma_`, `n_iter_`,
    `solver_` ("cholesky", "centers" or "all").

    >>> import numpy as np
    >>> X = np.linspace(0, 1, 50)[:, None]
    >>> model = KernelRidge(alpha=1e-3).fit(X, np.sin(6 * X[:, 0]))
    >>> round(model.score(X, np.sin(6 * X[:, 0])), 2)
    1.0
    """

    _: KW_ONLY
    warm_start: bool = False

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> KernelRidge:
        rows, alpha, tol, centers = self._begin(X, y, sample_weight, self._encoder)
        warm = flag(self.warm_start, "warm_start", type(self).__name__)
        basis: Basis | None = getattr(self, "_basis", None) if warm else None
        if basis is not None and len(self.bandwidth_) == self.n_features_in_:
            return self._fit_centers(rows, basis, alpha, tol)
        seed = draw_seed(check_random_state(self.random_state))
        alpha = self._choose(rows, alpha, seed)
        if isinstance(centers, Centers) and centers.number(len(rows), 1) >= len(rows):
            return self._fit_rows(rows, alpha, tol, seed)
        basis = nystrom.make_basis(self.kernel, self.bandwidth_, rows, centers, alpha, len(self.offset_), seed)
        return self._fit_centers(rows, basis, alpha, tol)

    def _choose(self, rows: Rows, alpha: float, seed: int) -> float:
        """The bandwidth of every column, before the fit, and alpha."""
        self._set_kernel(self.gamma, rows, seed)
        return alpha

    def _encoder(self, rows: Rows) -> Callable[[Any], np.ndarray]:
        y = rows.head().y
        self._flat = y.ndim == 1
        return partial(_as_columns, y.shape[1:])

    def _fit_rows(self, rows: Rows, alpha: float, tol: float, seed: int) -> KernelRidge:
        """Every row is a centre: `(S K S + alpha I) S^-1 c = S (y - offset)`, S = diag(sqrt(weight))."""
        n, precise = len(rows), len(rows) <= nystrom.EXACT
        if not (precise or rows.held):
            raise BochnerError(
                f"{type(self).__name__}(centers='all') would hold all {n} rows; give a number of centers."
            )
        block, kernel = rows.sample(n, np.random.RandomState(seed)), Kernel(self.kernel, self.bandwidth_)
        points = torch.from_numpy(np.array(block.X, dtype=np.float64))
        root = torch.from_numpy(np.sqrt(block.weight))[:, None]
        target = root * torch.from_numpy(block.y - self.offset_)
        if precise:
            lower = ridge_factor(root * kernel.block(points) * root.T, alpha)
            found = Solution(torch.cholesky_solve(target, lower), 1, 0.0)
        else:
            K = KernelOperator(points, bandwidth=self.bandwidth_, eps=1e-9, kernel=self.kernel, method="exact")
            factor = pivoted_cholesky(kernel, points, 1000, seed=seed, stop=lambda trace, r: trace <= 2 * alpha * r)
            found = conjugate_gradients(
                lambda x: root * (K @ (root * x)) + alpha * x,
                target,
                Preconditioner(root * factor.rows, alpha),
                tol=0.1 * tol,
                max_iter=MAX_PASSES,
                progress=nystrom.shown(nystrom.PAIR * n**2 * 10),
            )
            self._warn(found.residual, 0.1 * tol)
        self._cross = CrossKernel(self.kernel, self.bandwidth_, points, kernel.precise if precise else "float32")
        self._coefficients = (root * found.value).T.contiguous()
        self.n_iter_, self.solver_ = found.steps, "cholesky" if precise else "all"
        return self

    def _fit_centers(self, rows: Rows, basis: Basis, alpha: float, tol: float) -> KernelRidge:
        """`(G + alpha I) a = L^-1 K' W (y - offset)` by conjugate gradients, each a pass over the rows."""
        cross, lower = basis.cross, basis.preconditioner(alpha)
        y = basis.gradient(rows.total(nystrom.right_side, cross, self.offset_)[0]).T
        scale = (y * torch.cholesky_solve(y, lower)).sum(0).clamp_min(1e-300)
        start = getattr(self, "_start", None) if self.warm_start else None

        def product(a: Tensor) -> Tensor:
            v = basis.coefficients(a.T).to(cross.dtype)
            return basis.gradient(rows.total(nystrom.normal_product, cross, v)[0]).T + alpha * a

        def left(x: Tensor, r: Tensor, rz: Tensor) -> Tensor:
            if self.warm_start:  # a fit that is interrupted goes on from here
                self._basis, self._start = basis, x
            return (rz / scale).sqrt()

        found = conjugate_gradients(
            product,
            y,
            lambda r: torch.cholesky_solve(r, lower),
            tol=tol,
            max_iter=MAX_PASSES,
            start=start if start is not None and start.shape == y.shape else None,
            left=left,
            progress=nystrom.shown(15 * len(rows) * len(cross) * (nystrom.PAIR + nystrom.COLUMN * (y.shape[1] - 1))),
        )
        self._warn(found.residual, tol)
        self.n_iter_, self.solver_ = found.steps, "centers"
        self._cross, self._coefficients = cross, basis.coefficients(found.value.T)
        return self

    def _warn(self, residual: float, tol: float) -> None:
        if residual > tol:
            said = f"{type(self).__name__} stopped after {MAX_PASSES} steps at a residual of {residual:.2g}"
            warnings.warn(f"{said}, above {tol:g}; raise alpha, tol or gamma.", ConvergenceWarning, stacklevel=4)

    @property
    def dual_coef_(self) -> np.ndarray:
        """The coefficients of the centres, (M,) or (M, c)."""
        return (self._coefficients[0] if self._flat else self._coefficients.T).numpy()

    @blockwise(lambda model: (0 if model._flat else len(model.offset_), np.float64))
    def predict(self, X: Any) -> np.ndarray:
        """f at each row of X; of a Dask array, a Dask array."""
        scores = self._scores(X)
        return scores[:, 0] if self._flat else scores


@dataclass(eq=False, repr=False)
class KernelRidgeCV(KernelRidge):
    """`KernelRidge` with `alpha` and `gamma` chosen by leave-one-out errors; the columns of X are standardised.

    The error of every row of a sample, predicted from the others, is known in closed form for all alphas at once. The
    best pair is then fitted to all rows.

    Args:
        alphas: those that are compared.
        gammas: those that are compared, each a number or one for each column; None: `"auto"` and `"learn"` of
            `KernelRidge`, each also wider and narrower as long as that helps.
        others: as in `KernelRidge`.

    Attributes: `alpha_`, `errors_` (for each gamma that was tried, gamma and the mean squared error of every alpha),
    and those of `KernelRidge`.

    >>> import numpy as np
    >>> X = np.linspace(0, 1, 60)[:, None]
    >>> bool(KernelRidgeCV().fit(X, np.sin(20 * X[:, 0])).score(X, np.sin(20 * X[:, 0])) > 0.99)
    True
    """

    alpha: float = field(default=1.0, init=False)  # chosen
    gamma: Any = field(default="auto", init=False)
    warm_start: bool = field(default=False, init=False)
    alphas: Any = (1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    _: KW_ONLY
    gammas: Any = None

    def _choose(self, rows: Rows, alpha: float, seed: int) -> float:
        owner = type(self).__name__
        alphas = np.array([positive_float(alpha, "alphas", owner) for alpha in np.ravel(self.alphas)])
        if not len(alphas) or not (self.gammas is None or (hasattr(self.gammas, "__len__") and len(self.gammas))):
            raise BochnerError(f"{owner} needs a list of 'alphas' and one of 'gammas' to compare, or gammas=None.")
        block = rows.sample(COMPARED_ROWS, np.random.RandomState(seed)).merged()
        self.errors_: list[tuple[Any, np.ndarray]] = []

        def error(gamma: Any) -> float:
            self._set_kernel(gamma, rows, seed)
            found = nystrom.leave_one_out(Kernel(self.kernel, self.bandwidth_), block, COMPARED_CENTERS, alphas, seed)
            self.errors_.append((self.gamma_, found))
            return float(found.min())

        for gamma in ("auto", "learn") if self.gammas is None else self.gammas:
            best, middle = error(gamma), self.gamma_
            for step in (2.0, 0.5) if self.gammas is None else ():
                factor = step
                while (now := error(middle * factor)) < best:
                    best, factor = now, factor * step
                if factor != step:
                    break
        gamma, errors = min(self.errors_, key=lambda pair: pair[1].min())
        self.alpha_ = float(alphas[errors.argmin()])
        self._set_kernel(gamma, rows, seed)
        return self.alpha_


class KernelClassifier(ClassifierMixin, _CenterModel):
    """Kernel logistic regression, `min_f sum_i w_i loss(y_i, f(x_i)) + alpha/2 |f|^2`; columns are standardised.

    One function for two classes, one for each of more (softmax). On the centres and the preconditioner of `KernelRidge`
    with a quasi-Newton method: two or three dozen passes over the rows. Rows come as `KernelRidge` takes them.

    Args:
        alpha: the weight of the penalty, 1 / C of scikit-learn.
        tol: passes end when the loss decreases by less than tol^2 of itself.
        others: as in `KernelRidge`; `gamma="learn"` learns from indicators of the classes.

    The penalty draws probabilities towards the shares of the classes: with the default alpha they are right more often
    than they say. A weight counts as copies of its row; of more than 4,096 rows the centres are drawn by number.

    Attributes: `classes_`, `centers_`, `bandwidth_`, `gamma_`, `n_iter_` (passes over the rows).

    >>> import numpy as np
    >>> X = np.linspace(0, 1, 60)[:, None]
    >>> model = KernelClassifier().fit(X, X[:, 0] > 0.5)
    >>> model.predict([[0.1], [0.9]])
    array([False,  True])
    """

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> KernelClassifier:
        rows, alpha, tol, centers = self._begin(X, y, sample_weight, self._encoder)
        seed = draw_seed(check_random_state(self.random_state))
        self._set_kernel(self.gamma, rows, seed)
        share = np.clip(self.offset_, 1e-12, 1 - 1e-12)
        two = len(self.classes_) == 2
        self.offset_ = np.log(share / (1 - share) if two else share) if self.standardize else 0.0 * share
        basis = nystrom.make_basis(self.kernel, self.bandwidth_, rows, centers, alpha, len(self.offset_), seed)
        self._fit_logistic(rows, basis, alpha, tol)
        return self

    def _encoder(self, rows: Rows) -> Callable[[Any], np.ndarray]:
        self.classes_ = np.unique(np.concatenate(list(rows.each(_labels))))
        if len(self.classes_) < 2:
            raise BochnerError(
                f"{type(self).__name__}.fit needs at least two classes, got only one class, {self.classes_[0]}."
            )
        return partial(_indicators, self.classes_)

    def _fit_logistic(self, rows: Rows, basis: Basis, alpha: float, tol: float) -> None:
        """L-BFGS in the coordinates u = R' a, in which the Hessian at the start is about I."""
        cross, columns = basis.cross, len(self.offset_)
        lower = basis.preconditioner(alpha, 0.25 if columns == 1 else (1 - 1 / columns) / columns)
        seconds = 30 * len(rows) * len(cross) * (nystrom.PAIR + nystrom.COLUMN * (columns - 1))
        say, passes = speaker(nystrom.shown(seconds)), 0

        def inside(u: np.ndarray) -> Tensor:
            return torch.linalg.solve_triangular(lower.T, torch.from_numpy(u).reshape(columns, -1).T, upper=True)

        def objective(u: np.ndarray) -> tuple[float, np.ndarray]:
            nonlocal passes
            passes += 1
            a = inside(u)
            v = basis.coefficients(a.T).to(cross.dtype)
            loss, g = rows.total(nystrom.logistic, cross, v, self.offset_)
            gradient = basis.gradient(g).T + alpha * a
            loss += 0.5 * alpha * float(a.square().sum())
            say(f"pass {passes}: loss {loss / self._total_weight:.6f} a row")
            scaled = torch.linalg.solve_triangular(lower, gradient, upper=False)
            return loss / self._total_weight, (scaled.T / self._total_weight).numpy().ravel()

        ends = {"ftol": tol**2, "gtol": 1e-9} if len(rows) > nystrom.EXACT else {"ftol": 1e-15, "gtol": 1e-12}
        start = np.zeros(columns * len(cross))
        found = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": MAX_PASSES, **ends})
        self.n_iter_ = passes
        self._cross, self._coefficients = cross, basis.coefficients(inside(found.x).T)

    @blockwise(lambda model: (0 if len(model.classes_) == 2 else len(model.classes_), np.float64))
    def decision_function(self, X: Any) -> np.ndarray:
        """The log odds of two classes (n,), or the logits of more (n, c)."""
        scores = self._scores(X)
        return scores[:, 0] if len(self.classes_) == 2 else scores

    @blockwise(lambda model: (len(model.classes_), np.float64))
    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of every class, (n, c); of a Dask array, a Dask array."""
        scores = torch.from_numpy(self._scores(X))
        if scores.shape[1] == 1:
            scores = torch.cat([torch.zeros_like(scores), scores], 1)
        return torch.softmax(scores, 1).numpy()

    @blockwise(lambda model: (0, model.classes_.dtype))
    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row of X; of a Dask array, a Dask array."""
        scores = self._scores(X)
        return self.classes_[(scores[:, 0] > 0).astype(int) if scores.shape[1] == 1 else scores.argmax(1)]


def _indicators(classes: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Labels as targets: (b, 1) of 0 and 1 for two classes, (b, c) for more."""
    place = np.searchsorted(classes, y)
    return place[:, None].astype(np.float64) if len(classes) == 2 else np.eye(len(classes))[place]


def _as_columns(columns: tuple[int, ...], y: np.ndarray) -> np.ndarray:
    if y.dtype.kind not in "fiub" or y.shape[1:] != columns or not np.isfinite(y).all():
        wanted = ("b", *columns)
        raise BochnerError(f"The targets y must be finite numbers {wanted}; a block has {y.dtype} of shape {y.shape}.")
    return y.astype(np.float64).reshape(len(y), *(columns or (1,)))


def _labels(block: Any) -> np.ndarray:
    check_classification_targets(block.y)
    return np.unique(block.y)
