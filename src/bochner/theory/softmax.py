"""Errors of the trigonometric and positive estimators of the softmax and Gaussian kernels.

Throughout, ``x`` and ``y`` are already scaled, ``z = x + y``, ``D = x - y``, and ``m`` is the number of projections.
References: Choromanski et al., *Rethinking attention with Performers*, 2021 ("Performers"); Likhosherstov et al.,
*Chefs' random tables*, 2022 (OPRF), and *FAVOR#*, 2023 (dense A).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bochner._checks import BochnerError, one_of
from bochner.moments import optimal_a
from bochner.theory._common import (
    Number,
    closed_form,
    log1mexp,
    log_hyp0f1,
    log_subtract,
    logexpm1,
    poisson_mean,
    vector,
)

KERNELS = ("softmax", "gaussian")
MAPS = ("trig", "positive", "hyperbolic", "regularized", "optimal", "dense")
PROJECTIONS = ("iid", "orthogonal")


@dataclass(frozen=True)
class Estimator:
    """A feature map by name, and what some have: ``A`` of ``optimal``, ``a`` and ``U`` of ``dense``, ``about``."""

    name: str
    A: Number = 0.0
    a: Tensor | None = None
    U: Tensor | None = None
    about: str = "kernel"


@closed_form
def kernel_value(x: Tensor, y: Tensor, *, kernel: str = "softmax") -> Tensor:
    """The kernel itself: ``exp(x.y)`` or ``exp(-|x - y|^2 / 2)``."""
    return _log_kernel(x, y, kernel).exp()


# Each is `log_mse` of one map, and takes its `kernel` and `projection`.


def mse_trig(x: Tensor, y: Tensor, num_features: Number, **how: Any) -> Tensor:
    """Mean squared error of the trigonometric estimator.

    ``exp(|x|^2 + |y|^2) (1 - exp(-|D|^2))^2 / (2m)`` (Performers, Lemma 2, eq. 8). With orthogonal projections the
    pairs of one block contribute ``1F1(d; d/2; -|D|^2/2)`` in place of ``exp(-|D|^2)``, exactly.
    """
    return log_mse(x, y, num_features, "trig", **how).exp()


def mse_positive(x: Tensor, y: Tensor, num_features: Number, **how: Any) -> Tensor:
    """Mean squared error of positive features (FAVOR+).

    ``exp(|z|^2) SM^2 (1 - exp(-|z|^2)) / m`` (Performers, Lemma 2, eq. 8); it vanishes at ``y = -x``.
    Orthogonal projections: exact, see :func:`orthogonal_gap`.

    >>> x, y = torch.tensor([0.3, -0.1]), torch.tensor([0.2, 0.4])
    >>> bool(mse_positive(x, y, 2, projection="orthogonal") < mse_positive(x, y, 2))
    True
    """
    return log_mse(x, y, num_features, "positive", **how).exp()


def mse_hyperbolic(x: Tensor, y: Tensor, num_features: Number, **how: Any) -> Tensor:
    """Mean squared error of hyperbolic features: ``exp(|z|^2) SM^2 (1 - exp(-|z|^2))^2 / (2m)`` (Lemma 2, eq. 8)."""
    return log_mse(x, y, num_features, "hyperbolic", **how).exp()


def mse_optimal(x: Tensor, y: Tensor, num_features: Number, A: Number, **how: Any) -> Tensor:
    """Mean squared error of OPRF (FAVOR++) with parameter ``A < 1/8``; ``A = 0`` is positive features.

    ``SM^2 [ (1-4A)^d (1-8A)^(-d/2) exp(|z|^2 / (1-8A)) - 1 ] / m`` (Chefs' random tables).
    """
    return log_mse(x, y, num_features, Estimator("optimal", A=A), **how).exp()


def mse_dense(
    x: Tensor, y: Tensor, num_features: Number, a: Tensor, U: Tensor | None = None, *, kernel: str = "softmax"
) -> Tensor:
    """Mean squared error of dense-A features (SDERF, FAVOR#) with ``A = U diag(a) U'``, every ``a_i < 1/8``.

    ``SM^2 [ prod_i (1-4a_i)(1-8a_i)^(-1/2) exp((U'z)_i^2 / (1-8a_i)) - 1 ] / m``; none for orthogonal projections.
    """
    return log_mse(x, y, num_features, Estimator("dense", a=a, U=U), kernel=kernel).exp()


def mse_regularized(x: Tensor, y: Tensor, num_features: Number, *, about: str = "kernel", **how: Any) -> Tensor:
    """Mean squared error of regularised features, whose frequencies lie on the sphere of radius sqrt(d).

    ``about="kernel"``: with the squared bias; ``"mean"``: the variance about the mean, ``SMREG``. With
    ``F(q) = 0F1(; d/2; q)`` one projection has relative second moment ``exp(-|z|^2) F(d |z|^2)``, an orthogonal pair
    ``exp(-|z|^2) F(d |z|^2 / 2)``.
    """
    return log_mse(x, y, num_features, Estimator("regularized", about=about), **how).exp()


@closed_form
def log_mse(
    x: Tensor,
    y: Tensor,
    num_features: Number,
    map: str | Estimator = "positive",
    *,
    kernel: str = "softmax",
    projection: str = "iid",
    relative: bool = False,
) -> Tensor:
    """Logarithm of the mean squared error, or of that over K^2: finite where the error itself overflows."""
    law, m, d = map if isinstance(map, Estimator) else Estimator(map), num_features, x.shape[-1]
    one_of(law.name, "map", "log_mse", MAPS)
    orthogonal = one_of(projection, "projection", "log_mse", PROJECTIONS) == "orthogonal"
    log_k = _log_kernel(x, y, kernel)
    if law.name == "trig":
        # In units of the Gaussian kernel, where everything is at most 1.
        delta = (x - y).square().sum(-1)
        out = 2 * log1mexp(delta) - math.log(2.0)
        if orthogonal:
            out = log_subtract(out, block_pairs(m, d) / m * _trig_gap(delta, d))
        return out - torch.log(m) + (delta if relative else 2 * log_k + delta)
    if law.name == "regularized":
        out = _log_relative_regularized(x, y, m, orthogonal, law.about)
    else:
        out = _log_relative_positive(law, x + y) - torch.log(m)
        if orthogonal and law.name == "dense":
            raise BochnerError(
                "The 'dense' map has no closed form for projection='orthogonal'; use 'iid' as an upper estimate."
            )
        if orthogonal:
            gap = _positive_gap((x + y).square().sum(-1), d)
            out = log_subtract(out, block_pairs(m, d) / m.square() * gap)
    return out if relative else out + 2 * log_k


def relative_error(
    x: Tensor, y: Tensor, num_features: Number, map: str | Estimator = "positive", *, projection: str = "iid"
) -> Tensor:
    """``sqrt(MSE) / K``, the same for both kernels (Definition 3.3 of Hybrid random features)."""
    return torch.exp(log_mse(x, y, num_features, map, projection=projection, relative=True) / 2)


@closed_form
def features_needed(
    x: Tensor,
    y: Tensor,
    target: Number,
    *,
    map: str | Estimator = "positive",
    relative: bool = True,
    kernel: str = "softmax",
    projection: str = "iid",
) -> Tensor:
    """The least number of projections whose root mean squared error is at most ``target``, for every pair.

    ``relative``: the error over the kernel. Infinite where no number will do, as below the bias of ``regularized``.

    >>> x, y = torch.tensor([0.3, -0.1]), torch.tensor([0.2, 0.4])
    >>> m = features_needed(x, y, 0.1)
    >>> bool(relative_error(x, y, m) <= 0.1 < relative_error(x, y, m - 1))
    True
    """
    x, y = torch.broadcast_tensors(x, y)
    goal = 2 * torch.log(target)

    def short(m: Tensor) -> Tensor:
        return log_mse(x, y, m, map, kernel=kernel, projection=projection, relative=relative) > goal

    # Double until it is enough, then bisect: the error falls with m for every map and projection here.
    high = torch.ones(x.shape[:-1], dtype=torch.float64)
    todo = short(high)
    while todo.any() and bool((high[todo] < 2.0**1000).any()):
        high = torch.where(todo, 2 * high, high)
        todo = short(high)
    low = torch.where(high > 1, high / 2, torch.zeros_like(high))
    while bool(((high - low > 1) & (high - low > high * 2.0**-51)).any()):
        mid = torch.floor((low + high) / 2).clamp(min=1)
        bad = short(mid)
        low, high = torch.where(bad, mid, low), torch.where(bad, high, torch.minimum(high, mid))
    return torch.where(todo, math.inf, high)


@closed_form
def features_uniform(dim: Number, radius: Number, eps: Number, *, constant: Number = 1.0) -> int:
    """Projections for ``max_ij |A_hat - A| <= eps`` with orthogonal trig features (Performers, Theorem 4).

    ``constant * d / delta^2 * log(4 d^(3/4) R / delta)`` with ``delta = eps exp(-R^2 / sqrt d)``, whatever the length;
    ``radius`` R bounds queries and keys before scaling. The theorem leaves the constant open.
    """
    d, R = float(dim), float(radius)
    log_delta = math.log(eps) - R * R / math.sqrt(d)
    log_term = math.log(4 * d**0.75 * R) - log_delta
    return max(1, math.ceil(float(constant) * d * math.exp(-2 * log_delta) * max(log_term, 0.0)))


@closed_form
def block_pairs(num_features: Number, dim: Number) -> Tensor:
    """Ordered pairs of projections in one orthogonal block: ``sum_blocks b (b - 1)``, blocks of ``dim`` rows."""
    full, rest = torch.floor(num_features / dim), num_features % dim
    return full * dim * (dim - 1) + rest * (rest - 1)


@closed_form
def orthogonal_gap(x: Tensor, y: Tensor, num_features: Number, *, kernel: str = "softmax") -> Tensor:
    """What orthogonality takes off the mean squared error of positive, hyperbolic and OPRF features, exactly.

    ``(1 - 1/m) K^2 E[1 - r_N]`` for m <= d, ``N ~ Poisson(|z|^2)``, ``r_n = prod_{j<n} (d+j)/(d+2j)``; for m > d the
    factor counts the pairs inside blocks. The product of two orthogonal exponentials has mean
    ``exp(-|x|^2-|y|^2) 1F1(d; d/2; |z|^2/2)`` (eq. 54-63 of Performers, summed by Vandermonde).
    """
    m = num_features
    gap = _positive_gap((x + y).square().sum(-1), x.shape[-1])
    return block_pairs(m, x.shape[-1]) / m.square() * gap * torch.exp(2 * _log_kernel(x, y, kernel))


@closed_form
def orthogonal_gap_bound(x: Tensor, y: Tensor, num_features: Number, *, kernel: str = "softmax") -> Tensor:
    """A lower bound of :func:`orthogonal_gap`: ``(1 - 1/m) 2/(d+2) (K - K_0)^2`` for m <= d.

    ``K_0 = exp(-(|x|^2+|y|^2)/2)`` for softmax: Theorem 2 of Performers (eq. 10) with its proof repaired. The printed
    bound, with ``SM^2`` for ``(SM - K_0)^2``, exceeds the whole error near ``y = -x``.
    """
    m, d = num_features, x.shape[-1]
    share = -torch.expm1(-(x + y).square().sum(-1) / 2)  # (K - K_0) / K
    scale = torch.exp(2 * _log_kernel(x, y, kernel))
    return block_pairs(m, d) / m.square() * 2 / (d + 2) * share.square() * scale


@closed_form
def optimal_A(mean_square: Number, dim: Number) -> Tensor:
    """OPRF's best ``A <= 0`` for ``mean_square = mean |x + y|^2`` over the pairs (Chefs' random tables).

    ``A = (1 - u)/8``, ``u = [(1 + 2l) + sqrt((1 + 2l)^2 + 8l)]/2``, ``l = mean_square / dim``.
    """
    return optimal_a(mean_square / dim)


@closed_form
def dense_a(second_moment: Tensor) -> tuple[Tensor, Tensor]:
    """SDERF's best ``a`` and basis ``U`` for the second moment ``mean z z'`` (FAVOR#): OPRF along each eigenvector."""
    C = second_moment
    if C.ndim < 2 or C.shape[-1] != C.shape[-2]:
        raise BochnerError(f"The 'second_moment' of dense_a must have shape (..., d, d), got {tuple(C.shape)}.")
    l, U = torch.linalg.eigh((C + C.mT) / 2)
    return optimal_a(l.clamp(min=0)), U


@closed_form
def regularized_ratio(x: Tensor, y: Tensor) -> Tensor:
    """``SMREG / SM``: the mean of regularised features over the kernel (Performers, eq. 30).

    ``exp(-u) sum_k u^k/k! prod_{j<k} d/(d+2j)``, ``u = |z|^2/2``; in (0, 1].
    """
    return _log_ratio((x + y).square().sum(-1), x.shape[-1]).exp()


@closed_form
def regularized_ratio_bound(x: Tensor, y: Tensor, *, method: str = "jensen") -> Tensor:
    """A lower bound of :func:`regularized_ratio`.

    ``"jensen"``: ``exp(-|z|^4 / (4d))``, from Jensen's inequality applied to eq. 30 of Performers.
    ``"theorem1"``: the last exact step of its proof of Theorem 1 (eq. 32), ``f(l, d) P[Poisson(|z|^2/2) <= l]`` with
    ``l = floor(d^(1/3))``; it tends to ``1 - 2 d^(-1/3)`` and is the weaker of the two unless |z| is large.
    """
    u, d = (x + y).square().sum(-1) / 2, x.shape[-1]
    if one_of(method, "method", "regularized_ratio_bound", ["jensen", "theorem1"]) == "jensen":
        return torch.exp(-u.square() / d)
    l = math.floor(round(d ** (1 / 3), 9))
    log_f = -sum(math.log1p(2 * j / d) for j in range(l))
    return math.exp(log_f) * torch.special.gammaincc(torch.full_like(u, l + 1.0), u)


@closed_form
def regularized_tail_bound(
    x: Tensor, y: Tensor, threshold: Number, num_features: Number, *, projection: str = "iid", num_nodes: int = 256
) -> Tensor:
    """An upper bound of ``P[SMREG_m(x, y) > threshold]`` for ``threshold > SMREG(x, y)`` (Performers, Theorem 3).

    iid: Chernoff's ``exp(-m L(a))`` with the Legendre transform of one projection. Orthogonal, m <= d: the printed
    factor ``d/(d+2)`` fails for some thresholds; the repaired bound is
    ``min_t exp(-t m a) [ d M^m + 2 (b^m + m b^(m-1) (M - b)) ] / (d+2)``, with ``M = E exp(t X)`` and
    ``b = exp(t X_0)``, ``X_0 = exp(-(|x|^2+|y|^2)/2)``. Expectations by Gauss-Gegenbauer quadrature.
    """
    owner, d, m = "regularized_tail_bound", x.shape[-1], float(num_features)
    if one_of(projection, "projection", owner, PROJECTIONS) == "orthogonal" and m > d:
        raise BochnerError(f"The 'num_features' of {owner} must be at most d = {d} when orthogonal, got {int(m)}.")
    log_x0 = -(x.square().sum(-1) + y.square().sum(-1)) / 2
    nodes, weights = _sphere_rule(d, num_nodes)
    # Work with X / X_0 >= 0: values exp(s t_i), threshold a / X_0.
    s = math.sqrt(d) * (x + y).norm(dim=-1)
    a = threshold * torch.exp(-log_x0)
    s, a = torch.broadcast_tensors(s, a)
    values = torch.exp(s[..., None] * nodes)
    log_w = torch.log(weights)

    def log_bound(t: Tensor) -> Tensor:
        log_m = torch.logsumexp(t[..., None] * values + log_w, -1)
        if projection == "iid":
            return m * (log_m - t * a)
        log_excess = t + logexpm1((log_m - t).clamp(min=0))  # log(M - b), b = exp(t)
        inner = torch.stack(
            [math.log(d) + m * log_m, math.log(2.0) + m * t, math.log(2.0 * m) + (m - 1) * t + log_excess]
        )
        return torch.logsumexp(inner, 0) - math.log(d + 2) - m * t * a

    # The exponent is convex in t for iid; both are unimodal in log t. Golden section on log t.
    low, high = torch.full_like(a, -30.0), torch.log(1000.0 / values.amax(-1).clamp(max=1e300)).clamp(min=-29.0)
    ratio = (math.sqrt(5.0) - 1) / 2
    for _ in range(120):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        worse = log_bound(left.exp()) > log_bound(right.exp())
        low, high = torch.where(worse, left, low), torch.where(worse, high, right)
    best = log_bound(((low + high) / 2).exp())
    return torch.where(a >= torch.exp(s), 0.0, torch.exp(best.clamp(max=0.0)))


def _log_kernel(x: Tensor, y: Tensor, kernel: str) -> Tensor:
    if one_of(kernel, "kernel", "theory", KERNELS) == "softmax":
        return (x * y).sum(-1)
    return -(x - y).square().sum(-1) / 2


def _log_relative_positive(law: Estimator, z: Tensor) -> Tensor:
    """log of m MSE / K^2 for the exponential family: a second moment exp(e), minus one."""
    if law.name == "hyperbolic":
        lam = z.square().sum(-1)
        return lam + 2 * log1mexp(lam) - math.log(2.0)
    t = torch.zeros(1, dtype=torch.float64)
    if law.name == "optimal":
        t = _below_eighth(torch.as_tensor(law.A, dtype=torch.float64), "A")[..., None]
    elif law.name == "dense":
        if law.a is None:
            raise BochnerError("The 'dense' map needs its 'a' (d,) and, unless it is diagonal, its basis 'U' (d, d).")
        t = _below_eighth(vector(law.a, "a", "theory"), "a")
        z = z if law.U is None else (vector(law.U, "U", "theory").mT @ z[..., None]).squeeze(-1)
    log_weight = torch.log1p(16 * t.square() / (1 - 8 * t)) / 2  # (1-4t)^2 / (1-8t) = 1 + 16 t^2 / (1-8t)
    return logexpm1((log_weight + z.square() / (1 - 8 * t)).sum(-1).clamp(min=0))


def _below_eighth(t: Tensor, name: str) -> Tensor:
    if not (torch.isfinite(t).all() and (t < 0.125).all()):
        raise BochnerError(f"The {name!r} must be below 1/8, where the second moment exists, got {t.max().item()!r}.")
    return t


def _log_relative_regularized(x: Tensor, y: Tensor, m: Tensor, orthogonal: bool, about: str) -> Tensor:
    one_of(about, "about", "mse_regularized", ["kernel", "mean"])
    lam, d = (x + y).square().sum(-1), x.shape[-1]
    log_r = _log_ratio(lam, d)
    log_second = log_hyp0f1(d / 2, d * lam) - lam
    out = 2 * log_r + logexpm1((log_second - 2 * log_r).clamp(min=0)) - torch.log(m)
    if orthogonal:
        log_pair = log_hyp0f1(d / 2, d * lam / 2) - lam
        log_gap = 2 * log_r + log1mexp((2 * log_r - log_pair).clamp(min=0)) + torch.log(block_pairs(m, d) / m.square())
        some = log_gap > -math.inf
        out = torch.where(some, out + log1mexp(torch.where(some, out - log_gap, 1.0).clamp(min=0)), out)
    if about == "kernel":
        out = torch.logaddexp(out, 2 * torch.log(-torch.expm1(log_r)))
    return out


def _log_ratio(lam: Tensor, d: int) -> Tensor:
    """log SMREG/SM at |z|^2 = lam: ``-lam/2 + log 0F1(; d/2; d lam / 4)``."""
    return (log_hyp0f1(d / 2, d * lam / 4) - lam / 2).clamp(max=0.0)


def _one_minus_r(count: int, d: int) -> Tensor:
    """``1 - prod_{j<n} (d+j)/(d+2j)`` for n = 0 .. count-1."""
    j = torch.arange(count - 1, dtype=torch.float64)
    logs = torch.cumsum(torch.log1p(-j / (d + 2 * j)), 0)
    return -torch.expm1(torch.cat([logs.new_zeros(1), logs]))


def _positive_gap(lam: Tensor, d: int) -> Tensor:
    """``1 - exp(-lam) 1F1(d; d/2; lam/2) = E[1 - r_N]``, N ~ Poisson(lam); it is 1 in float64 beyond the clamp."""
    return poisson_mean(lambda count: _one_minus_r(count, d), lam.clamp(max=100 + 40 * math.sqrt(d)))


def _trig_gap(delta: Tensor, d: int) -> Tensor:
    """``exp(-delta) - 1F1(d; d/2; -delta/2)``, of either sign: a series near zero, else Kummer's transformation."""
    n = torch.arange(40, dtype=torch.float64)
    small = delta.clamp(max=1.0)[..., None]
    terms = torch.exp(torch.special.xlogy(n, small) - torch.lgamma(n + 1)) * _one_minus_r(40, d)
    series = (terms * (1 - 2 * (n % 2))).sum(-1)

    def values(count: int) -> Tensor:
        j = torch.arange(count - 1, dtype=torch.float64)
        return torch.cat([j.new_ones(1), torch.cumprod((j - d / 2) / (j + d / 2), 0)])

    direct = torch.exp(-delta) - poisson_mean(values, (delta / 2).clamp(max=1e4))
    return torch.where(delta <= 1, series, direct)


def _sphere_rule(d: int, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the first coordinate of a uniform point of the unit sphere in R^d."""
    if d == 1:
        return torch.tensor([-1.0, 1.0], dtype=torch.float64), torch.full((2,), 0.5, dtype=torch.float64)
    from scipy.special import roots_jacobi

    nodes, weights = roots_jacobi(num_nodes, (d - 3) / 2, (d - 3) / 2)
    keep = weights > 0
    return torch.from_numpy(nodes[keep]), torch.from_numpy(weights[keep] / np.sum(weights))
