"""Errors of linearised feed-forward layers ``f(W x)``: Bernstein bias, sketch variance, Taylor composition.

Reference: Lucyszyn, *Data mining problems*, 2025, problem 3 ("Problem 3"), with its constants corrected.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bochner._checks import BochnerError, one_of
from bochner.theory._common import Number, pair, positive, vector, whole
from bochner.theory.polynomial import mse_sum_poly, mse_tensor_sketch, square_over, tensor_sketch_bound

VARIANCES = {"tensor_sketch": mse_tensor_sketch, "sum_poly": mse_sum_poly, "bound": tensor_sketch_bound}


def gelu_second_derivative(t: Tensor) -> Tensor:
    """``GELU''(t) = (2 - t^2) exp(-t^2/2) / sqrt(2 pi)``: twice Problem 3's eq. 45.

    >>> round(gelu_second_derivative(torch.tensor(0.0)).item(), 6)
    0.797885
    """
    t = torch.as_tensor(t, dtype=torch.float64)
    return (2 - t.square()) * torch.exp(-t.square() / 2) / math.sqrt(2 * math.pi)


def gelu_second_sup(low: Number, high: Number) -> Tensor:
    """``max |GELU''|`` on [low, high], exactly: at an end, at 0 or at +-2, where the third derivative vanishes.

    >>> gelu_second_sup(-1.0, 1.0).item() == gelu_second_derivative(0.0).item()
    True
    """
    a, b = _interval(low, high, "gelu_second_sup")
    points = [a, b] + [torch.minimum(torch.maximum(torch.full_like(a, c), a), b) for c in (-2.0, 0.0, 2.0)]
    return gelu_second_derivative(torch.stack(points)).abs().amax(0)


def bernstein_bound(low: Number, high: Number, degree: Number, second_sup: Number) -> Tensor:
    """``(b - a)^2 sup|f''| / (8n)``: largest error of the Bernstein polynomial of degree n (Problem 3, eq. 42).

    >>> bernstein_bound(0.0, 2.0, 4, 1.0).item()
    0.125
    """
    a, b = _interval(low, high, "bernstein_bound")
    n = whole(degree, "degree", "bernstein_bound")
    return (b - a).square() * torch.as_tensor(second_sup, dtype=torch.float64) / (8 * n)


def bernstein_degree(low: Number, high: Number, target: Number, second_sup: Number) -> Tensor:
    """The degree at which :func:`bernstein_bound` is at most ``target``: its inverse.

    >>> bernstein_degree(0.0, 2.0, 0.125, 1.0).item()
    4.0
    """
    t = positive(target, "target", "bernstein_degree")
    return torch.ceil(bernstein_bound(low, high, 1, second_sup) / t).clamp(min=1)


def layer_variance(
    W: Tensor, x: Tensor, coefficients: Tensor, num_features: Tensor, *, map: str = "tensor_sketch"
) -> Tensor:
    """Variance of a layer linearised degree by degree: ``sum_i sum_k alpha_ik^2 Var_k(w_i, x)`` (Problem 3, Result 10).

    ``W`` (o, d), ``x`` (..., d), ``coefficients`` (o, n+1) or (n+1,) in the monomial basis, ``num_features``
    (n,) for the degrees 1..n, drawn independently of one another. ``map``: exact variances of
    ``tensor_sketch`` or ``sum_poly``, or ``bound`` for Avron's. Add the squared polynomial error for the
    whole mean squared error (eq. 46, whose variance term rests on the false eq. 21).

    >>> W, x = torch.eye(2), torch.tensor([0.6, 0.8])
    >>> layer_variance(W, x, torch.tensor([1.0, 0.5]), torch.tensor([4])).item() > 0
    True
    """
    owner = "layer_variance"
    W, x = pair(W, x, owner)
    variance = VARIANCES[one_of(map, "map", owner, VARIANCES)]
    alpha, m = _layer_coefficients(W, coefficients, owner), whole(num_features, "num_features", owner)
    if m.ndim != 1 or m.shape[0] != alpha.shape[-1] - 1:
        raise BochnerError(
            f"The 'num_features' of {owner} must hold one count for each degree 1..{alpha.shape[-1] - 1}, "
            f"got shape {tuple(m.shape)}."
        )
    each = [
        (alpha[:, k].square() * variance(W, x[..., None, :], m[k - 1], k)).sum(-1) for k in range(1, alpha.shape[-1])
    ]
    return torch.stack(each).sum(0) if each else torch.zeros(x.shape[:-1], dtype=torch.float64)


def layer_mse_bound(
    W: Tensor,
    x: Tensor,
    coefficients: Tensor,
    num_features: Tensor,
    polynomial_error: Number,
    *,
    map: str = "tensor_sketch",
) -> Tensor:
    """Upper bound of ``E |estimate - f(W x)|^2``: squared polynomial error plus :func:`layer_variance`.

    ``polynomial_error`` (o,) or a number bounds ``|p_i - f|`` on the interval of row i, for instance
    :func:`bernstein_bound`: Problem 3, Result 10, corrected.

    >>> W, x = torch.eye(2), torch.tensor([0.6, 0.8])
    >>> round(layer_mse_bound(W, x, torch.tensor([1.0, 0.0]), torch.tensor([4]), 0.1).item(), 6)
    0.02
    """
    rows = vector(W, "W", "layer_mse_bound").shape[-2]
    bias = torch.as_tensor(polynomial_error, dtype=torch.float64).square()
    return bias.expand(rows).sum() + layer_variance(W, x, coefficients, num_features, map=map)


def allocate_features(variances: Tensor, target: Number) -> Tensor:
    """The counts ``m_k`` of least sum with ``sum_k v_k / m_k <= target``, rounded up.

    ``m_k = sqrt(v_k) sum_j sqrt(v_j) / target``. ``variances`` (n,) holds the variance of one feature for
    each degree, summed over the rows. Replaces step 6 of Problem 3's Algorithm 1, whose equal split reaches
    three times its target.

    >>> allocate_features(torch.tensor([1.0, 4.0]), 0.5).tolist()
    [6.0, 12.0]
    """
    v = vector(variances, "variances", "allocate_features")
    if (v < 0).any():
        raise BochnerError(f"The 'variances' of allocate_features must not be negative, got {v.min().item():.6g}.")
    root = torch.sqrt(v)
    return torch.ceil(root * root.sum() / positive(target, "target", "allocate_features")).clamp(min=1)


def gelu_taylor(terms: int) -> Tensor:
    """Coefficients ``a_0 .. a_{terms-1}`` of GELU at zero (Problem 3, eq. 52).

    ``a_1 = 1/2``, ``a_{2j+2} = (-1)^j / (sqrt(2 pi) (2j+1) 2^j j!)``, the others zero.

    >>> gelu_taylor(3).tolist()[:2]
    [0.0, 0.5]
    """
    a = torch.zeros(int(whole(terms, "terms", "gelu_taylor")), dtype=torch.float64)
    if len(a) > 1:
        a[1] = 0.5
    for j in range((len(a) - 1) // 2):
        log_size = math.lgamma(j + 1) + j * math.log(2.0) + math.log(2 * j + 1) + math.log(2 * math.pi) / 2
        a[2 * j + 2] = (-1) ** j * math.exp(-log_size)
    return a


def geometric_law(rho: float, terms: int) -> Tensor:
    """``p_k = (1 - rho)^k rho``, k < terms; its mean over all k is ``1/rho - 1`` (Problem 3 says ``1/rho + 1``).

    >>> geometric_law(0.5, 3).tolist()
    [0.5, 0.25, 0.125]
    """
    if not 0 < rho < 1:
        raise BochnerError(f"The 'rho' of geometric_law must lie strictly between 0 and 1, got {rho!r}.")
    k = torch.arange(int(whole(terms, "terms", "geometric_law")), dtype=torch.float64)
    return torch.exp(k * math.log1p(-rho)) * rho


def poisson_law(rate: float, terms: int) -> Tensor:
    """``p_k = exp(-rate) rate^k / k!``, k < terms.

    >>> round(poisson_law(1.0, 2).tolist()[1], 6)
    0.367879
    """
    r = float(positive(rate, "rate", "poisson_law"))
    k = torch.arange(int(whole(terms, "terms", "poisson_law")), dtype=torch.float64)
    return torch.exp(k * math.log(r) - r - torch.lgamma(k + 1))


def optimal_law(coefficients: Tensor, second_moments: Tensor) -> Tensor:
    """The index law of least variance: ``p_k`` proportional to ``|a_k| sqrt(E[(phi_k(w).phi_k(x))^2])``.

    >>> optimal_law(torch.tensor([1.0, -3.0]), torch.tensor([1.0, 1.0])).tolist()
    [0.25, 0.75]
    """
    a = vector(coefficients, "coefficients", "optimal_law")
    s = vector(second_moments, "second_moments", "optimal_law")
    p = a.abs() * torch.sqrt(s)
    if not float(p.sum()) > 0:
        raise BochnerError("The 'coefficients' of optimal_law must not all vanish.")
    return p / p.sum()


def variance_taylor(
    t: Number, coefficients: Tensor, probabilities: Tensor, variances: Tensor | None = None, *, draws: Number = 1
) -> Tensor:
    """Variance of the Taylor-composition estimator ``a_K/p_K phi_K(w).phi_K(x)`` at ``t = w.x`` (Problem 3, eq. 57).

    ``[ sum_k a_k^2/p_k (t^(2k) + Var_k) - f(t)^2 ] / draws``. ``variances`` (n,): those of the features of
    each degree (zero if the powers are exact), for instance from :func:`~bochner.theory.mse_tensor_sketch`.
    The terms given must be all that matter: a series cut short understates the variance.

    >>> one = torch.tensor([0.0, 1.0])
    >>> variance_taylor(0.5, one, one).item()
    0.0
    """
    owner = "variance_taylor"
    a, p = vector(coefficients, "coefficients", owner), vector(probabilities, "probabilities", owner)
    v = torch.zeros_like(a) if variances is None else vector(variances, "variances", owner)
    point = torch.as_tensor(t, dtype=torch.float64)[..., None]
    k = torch.arange(a.shape[-1], dtype=torch.float64)
    second = (square_over(a, p, owner) * (point ** (2 * k) + v)).sum(-1)
    return (second - (a * point**k).sum(-1).square()) / whole(draws, "draws", owner)


def _interval(low: Number, high: Number, owner: str) -> tuple[Tensor, Tensor]:
    a, b = torch.as_tensor(low, dtype=torch.float64), torch.as_tensor(high, dtype=torch.float64)
    if not (torch.isfinite(a).all() and torch.isfinite(b).all() and (a < b).all()):
        raise BochnerError(f"The interval of {owner} must have low < high, both finite, got {low!r} and {high!r}.")
    a, b = torch.broadcast_tensors(a, b)
    return a, b


def _layer_coefficients(W: Tensor, coefficients: Tensor, owner: str) -> Tensor:
    alpha = vector(coefficients, "coefficients", owner)
    if alpha.ndim == 1:
        alpha = alpha.expand(W.shape[-2], -1)
    if alpha.shape[0] != W.shape[-2]:
        raise BochnerError(f"The 'coefficients' of {owner} must have one row for each of {W.shape[-2]} outputs.")
    return alpha
