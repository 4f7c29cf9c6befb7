"""What the estimators check alike: seeds, numbers, bandwidths, weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from bochner._checks import BochnerError, positive_float


def draw_seed(rng: np.random.RandomState) -> int:
    return int(rng.randint(np.iinfo(np.int32).max))


def scale_gamma(variance: float, d: int, owner: str) -> float:
    """The rule `"scale"`: 1 / (d variance); one where nothing varies."""
    if not np.isfinite(variance) or not np.isfinite(1.0 / variance if variance > 0 else 1.0):
        raise BochnerError(f"The variance of the X of {owner}, for gamma='scale', is out of range; rescale X.")
    return float(1.0 / (d * variance)) if variance > 0 else 1.0


def resolve_gamma(gamma: Any, X: Any, owner: str, *, centred: bool = True) -> float:
    """A number, or `"scale"`: 1 / (d var(X)); not `centred`, for kernels that see where X is: 1 / (d mean(X^2))."""
    if not isinstance(gamma, str):
        return positive_float(gamma.item() if isinstance(gamma, np.generic) else gamma, "gamma", owner)
    if gamma != "scale":
        raise BochnerError(f"The 'gamma' of {owner} must be a positive number or 'scale', got {gamma!r}.")
    with np.errstate(over="ignore"):
        middle = X.mean(dtype=np.float64) if centred else 0.0
        squares = X.multiply(X).mean() - middle**2 if sparse.issparse(X) else np.square(X - middle).mean()
    lost = squares == 0 and X.min() < X.max()  # too small for a number
    return scale_gamma(np.nan if lost else squares, X.shape[1], owner)


def resolve_bandwidth(bandwidth: Any, shape: tuple[int, int], weight: np.ndarray, owner: str) -> float:
    """A number, or the rule of Scott or Silverman for columns of unit variance.

    Whole weights count as repeated rows, others, whose scale means nothing, as their effective number.
    """
    if not isinstance(bandwidth, str):
        plain = bandwidth.item() if isinstance(bandwidth, np.generic) else bandwidth
        return positive_float(plain, "bandwidth", owner)
    d = shape[1]
    rows = float(np.abs(weight).sum())
    if not np.array_equal(weight, np.rint(weight)):
        rows = float(rows**2 / np.square(weight).sum())
    if bandwidth == "scott":
        return rows ** (-1 / (d + 4))
    if bandwidth == "silverman":
        return (rows * (d + 2) / 4) ** (-1 / (d + 4))
    raise BochnerError(
        f"The 'bandwidth' of {owner} must be a positive number, 'scott' or 'silverman', got {bandwidth!r}."
    )


def check_weight(weight: Any, n: int, owner: str, *, signed: bool = False) -> np.ndarray:
    """Weights of the rows (n,), float64: ones if there are none, one number for all; finite and not all zero."""
    w = np.ones(n) if weight is None else np.asarray(weight, dtype=np.float64)
    w = np.full(n, float(w)) if w.ndim == 0 else w
    if w.shape != (n,):
        raise BochnerError(f"The 'sample_weight' of {owner} must have shape ({n},), got {w.shape}.")
    if not np.isfinite(w).all() or not (signed or (w >= 0).all()):
        wanted = "finite" if signed else "finite and not negative"
        raise BochnerError(f"The 'sample_weight' of {owner} must be {wanted}, got {w.min()} to {w.max()}.")
    if not w.any():
        raise BochnerError(f"The 'sample_weight' of {owner} is zero everywhere.")
    return w
