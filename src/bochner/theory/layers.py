"""Errors of linearised feed-forward layers ``f(W x)``: Bernstein bias, sketch variance, Taylor composition.

Reference: Lucyszyn, *Data mining problems*, 2025, problem 3 ("Problem 3"), with its constants corrected.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bochner._checks import BochnerError
from bochner.theory._common import Number, closed_form
from bochner.theory.polynomial import square_over


@closed_form
def gelu_second_derivative(t: Tensor) -> Tensor:
    """``GELU''(t) = (2 - t^2) exp(-t^2/2) / sqrt(2 pi)``: twice Problem 3's eq. 45."""
    return (2 - t.square()) * torch.exp(-t.square() / 2) / math.sqrt(2 * math.pi)


@closed_form
def gelu_second_sup(low: Number, high: Number) -> Tensor:
    """``max |GELU''|`` on [low, high], exactly: at an end, at 0 or at +-2, where the third derivative vanishes."""
    a, b = _interval(low, high, "gelu_second_sup")
    points = [a, b] + [torch.minimum(torch.maximum(torch.full_like(a, c), a), b) for c in (-2.0, 0.0, 2.0)]
    return gelu_second_derivative(torch.stack(points)).abs().amax(0)


@closed_form
def bernstein_bound(low: Number, high: Number, degree: Number, second_sup: Number) -> Tensor:
    """``(b - a)^2 sup|f''| / (8n)``: largest error of the Bernstein polynomial of degree n (Problem 3, eq. 42)."""
    a, b = _interval(low, high, "bernstein_bound")
    return (b - a).square() * second_sup / (8 * degree)


@closed_form
def allocate_features(variances: Tensor, target: Number) -> Tensor:
    """The counts ``m_k = sqrt(v_k) sum_j sqrt(v_j) / target`` of least sum with ``sum_k v_k / m_k <= target``.

    ``variances``: of one feature of each degree. For step 6 of Problem 3's Algorithm 1, which misses its target.
    """
    root = torch.sqrt(variances)
    return torch.ceil(root * root.sum() / target).clamp(min=1)


@closed_form
def gelu_taylor(terms: Number) -> Tensor:
    """Coefficients of GELU at zero (Problem 3, eq. 52).

    ``a_1 = 1/2``, ``a_{2j+2} = (-1)^j / (sqrt(2 pi) (2j+1) 2^j j!)``, the others zero.
    """
    a = torch.zeros(int(terms), dtype=torch.float64)
    if len(a) > 1:
        a[1] = 0.5
    for j in range((len(a) - 1) // 2):
        log_size = math.lgamma(j + 1) + j * math.log(2.0) + math.log(2 * j + 1) + math.log(2 * math.pi) / 2
        a[2 * j + 2] = (-1) ** j * math.exp(-log_size)
    return a


@closed_form
def geometric_law(rho: Number, terms: Number) -> Tensor:
    """``p_k = (1 - rho)^k rho``, k < terms; its mean over all k is ``1/rho - 1`` (Problem 3 says ``1/rho + 1``)."""
    if not float(rho) < 1:
        raise BochnerError(f"The 'rho' of geometric_law must lie strictly between 0 and 1, got {float(rho)}.")
    k = torch.arange(int(terms), dtype=torch.float64)
    return torch.exp(k * math.log1p(-float(rho))) * rho


@closed_form
def poisson_law(rate: Number, terms: Number) -> Tensor:
    """``p_k = exp(-rate) rate^k / k!``, k < terms."""
    k = torch.arange(int(terms), dtype=torch.float64)
    return torch.exp(k * torch.log(rate) - rate - torch.lgamma(k + 1))


@closed_form
def optimal_law(coefficients: Tensor, second_moments: Tensor) -> Tensor:
    """The index law of least variance: ``p_k`` proportional to ``|a_k| sqrt(E[(phi_k(w).phi_k(x))^2])``."""
    p = coefficients.abs() * torch.sqrt(second_moments)
    if not float(p.sum()) > 0:
        raise BochnerError("The 'coefficients' of optimal_law must not all vanish.")
    return p / p.sum()


@closed_form
def variance_taylor(
    t: Number, coefficients: Tensor, probabilities: Tensor, variances: Tensor | None = None, *, draws: Number = 1
) -> Tensor:
    """Variance of the Taylor-composition estimator ``a_K/p_K phi_K(w).phi_K(x)`` at ``t = w.x`` (Problem 3, eq. 57).

    ``[ sum_k a_k^2/p_k (t^(2k) + Var_k) - f(t)^2 ] / draws``. ``variances`` (n,): Var_k, of the features of each
    degree, zero if the powers are exact. A series cut short understates the variance.
    """
    a, t = coefficients, t[..., None]
    v = torch.zeros_like(a) if variances is None else variances
    k = torch.arange(a.shape[-1], dtype=torch.float64)
    second = (square_over(a, probabilities, "variance_taylor") * (t ** (2 * k) + v)).sum(-1)
    return (second - (a * t**k).sum(-1).square()) / draws


def _interval(a: Tensor, b: Tensor, owner: str) -> tuple[Tensor, Tensor]:
    if not (torch.isfinite(a).all() and torch.isfinite(b).all() and (a < b).all()):
        got = f"{a.tolist()} and {b.tolist()}"
        raise BochnerError(f"The interval of {owner} must have low < high, both finite, got {got}.")
    a, b = torch.broadcast_tensors(a, b)
    return a, b
