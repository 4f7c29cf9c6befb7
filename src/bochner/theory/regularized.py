"""The regularised softmax kernel SMREG: its distance from softmax and its tails (Performers, Theorems 1 and 3)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from bochner._checks import BochnerError, one_of
from bochner.theory._common import Number, closed_form, logexpm1
from bochner.theory.softmax import PROJECTIONS, _log_ratio


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


def _sphere_rule(d: int, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the first coordinate of a uniform point of the unit sphere in R^d."""
    if d == 1:
        return torch.tensor([-1.0, 1.0], dtype=torch.float64), torch.full((2,), 0.5, dtype=torch.float64)
    from scipy.special import roots_jacobi

    nodes, weights = roots_jacobi(num_nodes, (d - 3) / 2, (d - 3) / 2)
    keep = weights > 0
    return torch.from_numpy(nodes[keep]), torch.from_numpy(weights[keep] / np.sum(weights))
