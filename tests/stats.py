"""The statistical bench: t-tests that a wrong estimator fails and a right one does not.

Every helper takes ``samples`` of shape ``(draws, ...)``: one estimate per independent projection, as a torch
tensor or a numpy array. The trailing entries may depend on each other; the draws may not. Work is in float64.

How the level is kept. ``alpha`` (1e-6) is the probability that a suite of ``SUITE_TESTS`` calls rejects any
true claim: each entry is tested at ``alpha / (SUITE_TESTS * entries)`` with Student's t. Kernel estimates are
skewed, so the critical value is widened by the second term of the Cornish-Fisher expansion of the t
statistic, ``|skew| (2 t^2 + 1) / (6 sqrt(draws))``.

How the power is kept. A test that could not have seen a relative deviation of ``detect`` fails as vacuous and
says how many draws it needs; one that sees a variance of zero demands equality up to rounding. ``detect`` is at
most ``LEAST_POWER``: a test that misses a factor of two in either direction is no test.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats as _scipy_stats

ALPHA = 1e-6
SUITE_TESTS = 2000
ROUNDING = 1e-9
LEAST_POWER = 0.5
_POWER_QUANTILE = 2.33  # a deviation of `detect` is rejected with probability 0.99


class Report(NamedTuple):
    """What a passed check measured: the largest |t|, its critical value, and the detectable deviation."""

    t: float
    critical: float
    detectable: float
    draws: int


def check_mean(
    samples: Any,
    truth: Any,
    *,
    alpha: float = ALPHA,
    detect: float = 0.1,
    scale: Any = None,
    what: str = "mean",
) -> Report:
    """Fail unless the mean of ``samples`` over the draws is ``truth`` in every entry (two-sided t-test).

    A deviation of ``detect * scale`` must be detectable; ``scale`` is ``|truth|`` unless given (give it where
    the truth is zero). Entries without variance must equal the truth up to rounding.
    """
    x = _draws(samples)
    mu = np.broadcast_to(_array(truth), x.shape[1:]).reshape(-1)
    size = np.abs(mu) if scale is None else np.broadcast_to(_array(scale), x.shape[1:]).reshape(-1)
    m = _moments(x, alpha, sides=2)
    exact = m.se * math.sqrt(m.draws) <= ROUNDING * np.maximum(np.maximum(np.abs(mu), np.abs(m.mean)), size)
    _require_equal(m.mean, mu, np.maximum(size, np.abs(mu)), exact, x.shape[1:], what)
    return _two_sided(m, mu, size, exact, detect, x.shape[1:], what)


def check_mse(
    samples: Any,
    truth: Any,
    mse: Any,
    *,
    alpha: float = ALPHA,
    detect: float = 0.1,
    what: str = "mean squared error",
) -> Report:
    """Fail unless the mean squared error of ``samples`` about ``truth`` is ``mse`` everywhere (two-sided).

    Where ``mse`` is zero every sample must equal the truth up to rounding.
    """
    x, t = _draws(samples), _array(truth)
    t = np.broadcast_to(t, x.shape[1:])
    e = np.broadcast_to(_array(mse), x.shape[1:])
    if not (np.isfinite(e).all() and (e >= 0).all()):
        raise AssertionError(f"The claimed mse must be finite and not negative, got {e}.")
    zero = e <= (ROUNDING * np.abs(t)) ** 2
    worst = np.abs(x - t).max(axis=0)
    bad = zero & (worst > ROUNDING * np.maximum(np.abs(t), 1e-300))
    if bad.any():
        i = tuple(np.argwhere(bad)[0])
        raise AssertionError(
            f"The {what} at entry {i} was claimed to be zero, but a sample deviates by {worst[i]:.3g} "
            f"from the truth {t[i]:.6g}."
        )
    if zero.all():
        return Report(0.0, math.inf, 0.0, len(x))
    keep = ~zero
    return check_mean((x - t)[:, keep] ** 2, e[keep], alpha=alpha, detect=detect, what=what)


def check_mse_at_most(
    samples: Any,
    truth: Any,
    bound: Any,
    *,
    alpha: float = ALPHA,
    detect: float = 0.1,
    what: str = "upper bound",
) -> Report:
    """Fail if the mean squared error of ``samples`` about ``truth`` exceeds ``bound`` anywhere (one-sided).

    An excess of ``detect * bound`` must be detectable.
    """
    x = _draws(samples)
    squares = (x - np.broadcast_to(_array(truth), x.shape[1:])) ** 2
    b = np.broadcast_to(_array(bound), x.shape[1:]).reshape(-1)
    m = _moments(squares, alpha, sides=1)
    over = m.mean - b
    slack = m.critical * m.se + ROUNDING * b
    if (over > slack).any():
        i = int(np.argmax(over - slack))
        raise AssertionError(
            f"The mean squared error {m.mean[i]:.6g} at entry {_index(i, x.shape[1:])} exceeds the {what} "
            f"{b[i]:.6g}: t = {_ratio(over[i], m.se[i]):.2f}, critical {m.critical[i]:.2f}, {m.draws} draws."
        )
    detectable = _require_power(m, b, np.zeros(len(b), bool), detect, x.shape[1:], what)
    return Report(float(np.max(_ratio(over, m.se))), float(m.critical.max()), detectable, m.draws)


def check_paired_less(
    a: Any,
    b: Any,
    *,
    alpha: float = ALPHA,
    strict: bool = True,
    detect: float = 0.1,
    what: str = "first sample",
) -> Report:
    """Fail unless the mean of ``a`` is below the mean of ``b`` in every entry (one-sided paired t-test).

    ``a[i]`` and ``b[i]`` may share their randomness or be independent. ``strict``: the difference must be
    significant. Otherwise it must not be significantly positive, and unless it is significantly negative an
    excess of ``detect * mean(b)`` must be detectable.
    """
    x, y = _draws(a), _draws(b)
    if x.shape != y.shape:
        raise AssertionError(f"Paired samples must have one shape, got {x.shape} and {y.shape}.")
    m = _moments(x - y, alpha, sides=1)
    means = f"means {x.mean(axis=0).reshape(-1)} against {y.mean(axis=0).reshape(-1)}"
    t = _ratio(m.mean, m.se)
    if strict:
        if not (t < -m.critical).all():
            i = int(np.argmax(t + m.critical))
            raise AssertionError(
                f"The {what} is not significantly smaller at entry {_index(i, x.shape[1:])}: t = {t[i]:.2f}, "
                f"needed below {-m.critical[i]:.2f}, {m.draws} draws; {means}."
            )
        return Report(float(t.max()), float(m.critical.max()), 0.0, m.draws)
    if (t > m.critical).any():
        i = int(np.argmax(t - m.critical))
        raise AssertionError(
            f"The {what} is significantly larger at entry {_index(i, x.shape[1:])}: t = {t[i]:.2f}, "
            f"critical {m.critical[i]:.2f}, {m.draws} draws; {means}."
        )
    size = np.abs(y.mean(axis=0)).reshape(-1)
    detectable = _require_power(m, size, t < -m.critical, detect, x.shape[1:], what)
    return Report(float(t.max()), float(m.critical.max()), detectable, m.draws)


class _Moments(NamedTuple):
    mean: np.ndarray
    se: np.ndarray
    critical: np.ndarray
    draws: int


def _moments(x: np.ndarray, alpha: float, sides: int) -> _Moments:
    """Mean, standard error and skew-widened critical value of each entry."""
    draws = len(x)
    x = x.reshape(draws, -1)
    mean = x.mean(axis=0)
    centred = x - mean
    var = np.mean(centred**2, axis=0) * (draws / (draws - 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        skew = np.nan_to_num(np.mean((centred / np.sqrt(var)) ** 3, axis=0), posinf=0.0, neginf=0.0)
    level = alpha / (SUITE_TESTS * x.shape[1] * sides)
    t = float(_scipy_stats.t.isf(level, draws - 1))
    critical = t + np.abs(skew) * (2 * t**2 + 1) / (6 * math.sqrt(draws))
    return _Moments(mean, np.sqrt(var / draws), critical, draws)


def _two_sided(
    m: _Moments,
    mu: np.ndarray,
    size: np.ndarray,
    exact: np.ndarray,
    detect: float,
    shape: tuple[int, ...],
    what: str,
) -> Report:
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(exact, 0.0, (m.mean - mu) / m.se)
    if (np.abs(t) > m.critical).any():
        i = int(np.argmax(np.abs(t) - m.critical))
        raise AssertionError(
            f"The {what} at entry {_index(i, shape)} is {m.mean[i]:.6g}, claimed {mu[i]:.6g}: "
            f"z = {t[i]:.2f}, critical {m.critical[i]:.2f}, {m.draws} draws, "
            f"{int((np.abs(t) > m.critical).sum())} of {len(t)} entries rejected."
        )
    detectable = _require_power(m, size, exact, detect, shape, what)
    return Report(float(np.abs(t).max()), float(m.critical.max()), detectable, m.draws)


def _require_equal(
    mean: np.ndarray, mu: np.ndarray, size: np.ndarray, exact: np.ndarray, shape: tuple[int, ...], what: str
) -> None:
    bad = exact & (np.abs(mean - mu) > ROUNDING * size)
    if bad.any():
        i = int(np.argmax(bad))
        raise AssertionError(
            f"The {what} at entry {_index(i, shape)} has no variance over the draws and is {mean[i]:.12g}, "
            f"claimed {mu[i]:.12g} (z is infinite)."
        )


def _require_power(
    m: _Moments, size: np.ndarray, exact: np.ndarray, detect: float, shape: tuple[int, ...], what: str
) -> float:
    """The smallest relative deviation seen with probability 0.99; fail when it exceeds ``detect``."""
    if not 0 < detect <= LEAST_POWER:
        raise AssertionError(
            f"The 'detect' of a test must lie in (0, {LEAST_POWER}], got {detect}: a claim wrong by a factor of "
            "two must be seen; draw more samples or use inputs of smaller norm."
        )
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(exact | (m.se == 0), 0.0, (m.critical + _POWER_QUANTILE) * m.se / size)
    if not (relative <= detect).all():
        i = int(np.argmax(np.nan_to_num(relative, nan=math.inf)))
        hint = "give `scale`, for the truth is zero" if size[i] == 0 else "draw about {} samples"
        needed = math.ceil(m.draws * (relative[i] / detect) ** 2) if np.isfinite(relative[i]) else m.draws
        raise AssertionError(
            f"This test of the {what} is vacuous: at entry {_index(i, shape)} it would miss a relative "
            f"deviation of {relative[i]:.3g}, and must see {detect:.3g} with {m.draws} draws; "
            f"{hint.format(needed)} or use inputs of smaller norm."
        )
    return float(relative.max())


def _draws(samples: Any) -> np.ndarray:
    x = _array(samples)
    if x.ndim == 0 or len(x) < 30:
        raise AssertionError(f"Samples must be (draws, ...) with at least 30 draws, got shape {x.shape}.")
    if x.size == 0 or not np.isfinite(x).all():
        raise AssertionError(f"Samples must be finite and not empty, got {int((~np.isfinite(x)).sum())} bad entries.")
    return x


def _array(x: Any) -> np.ndarray:
    x = x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
    if np.iscomplexobj(x):
        raise AssertionError("Test the real and the imaginary part of a complex estimator separately.")
    return x.astype(np.float64)


def _ratio(a: Any, b: Any) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(np.divide(a, b), nan=0.0, posinf=math.inf, neginf=-math.inf)


def _index(i: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(j) for j in np.unravel_index(i, shape)) if shape else ()
