"""Errors of the complex exponential and the hybrid estimators; notation as in :mod:`bochner.theory.softmax`.

Reference: Choromanski et al., *Hybrid random features*, 2022 ("HRF").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bochner._checks import BochnerError, positive_int
from bochner.theory._common import Number, angle, closed_form
from bochner.theory.softmax import _log_kernel, log_mse


class Moments(NamedTuple):
    """Moments of a random hybrid coefficient: ``E l``, ``E l^2``, ``E (1-l)^2``, ``E l(1-l)``."""

    mean: Tensor
    square: Tensor
    complement: Tensor
    cross: Tensor


@closed_form
def mse_complex(x: Tensor, y: Tensor, num_features: Number, A: Tensor, *, kernel: str = "softmax") -> Tensor:
    """Mean squared error of the real part of the complex exponential estimator (HRF, eq. 16) for an invertible A.

    With ``u = A x + (A')^-1 y = p + iq``, bilinear products throughout,
    ``K^2 [ (exp(|u|^2) + exp(|p|^2 - |q|^2) cos(2 p.q)) / 2 - 1 ] / m``: zero exactly where ``u = 0`` (eq. 17).
    ``A``: a real or complex scalar, a diagonal (d,), or a matrix (d, d); 1 is positive, i is trig.

    >>> from bochner.theory import mse_trig
    >>> x, y = torch.tensor([0.3, -0.1]), torch.tensor([0.2, 0.4])
    >>> torch.allclose(mse_complex(x, y, 4, torch.tensor(1j)), mse_trig(x, y, 4))
    True
    """
    u = _complex_sum(x, y, A)
    alpha, beta, q = u.real.square().sum(-1), u.imag.square().sum(-1), 2 * (u.real * u.imag).sum(-1)
    total = alpha + beta
    # Small |u|: every difference written out. Large |u|: the leading exponential taken out of the logarithm.
    small = total < 20
    a, b = torch.where(small, alpha, 0.0), torch.where(small, beta, 0.0)
    near = torch.expm1(a) * torch.cosh(b) + 2 * torch.sinh(b / 2).square()
    near = near - torch.exp(a - b) * torch.sin(q / 2).square()
    far = total + torch.log((1 + torch.exp(-2 * beta) * torch.cos(q)) / 2 - torch.exp(-total))
    log_rel = torch.where(small, torch.log(near.clamp(min=0.0)), far)
    return torch.exp(log_rel - torch.log(num_features) + 2 * _log_kernel(x, y, kernel))


@closed_form
def angular_moments(x: Tensor, y: Tensor, num_coefficients: Number) -> Moments:
    """Moments of the angular coefficient estimated by n signs (HRF, Lemma 3.2): with ``a = theta/pi``,
    ``E l = a``, ``E l^2 = a (a - a/n + 1/n)``.
    """
    # The complement is an angle too: 1 - a would cancel.
    return _angular(angle(x, y) / math.pi, angle(x, -y) / math.pi, num_coefficients)


@closed_form
def gaussian_moments(
    x: Tensor, y: Tensor, num_coefficients: Number, *, radius: Number, bandwidth: Number = 1.0
) -> Moments:
    """Moments of the normalised Gaussian coefficient estimated by n cosines (HRF, Theorem F.1, eq. 67-75).

    ``l = (1 - e)/rho`` of variance ``(1 - e^2)^2 / (2 n rho^2)``, ``e = exp(-s^2 |x-y|^2 / 2)``,
    ``rho = 1 - exp(-2 s^2 r^2)``; ``bandwidth``: s, ``radius``: r.
    """
    s2, r2 = bandwidth.square(), radius.square()
    t = s2 * (x - y).square().sum(-1) / 2
    rho = -torch.expm1(-2 * s2 * r2)
    lam = -torch.expm1(-t) / rho
    rest = torch.exp(-t) * -torch.expm1(t - 2 * s2 * r2) / rho  # 1 - lam
    var = torch.expm1(-2 * t).square() / (2 * num_coefficients * rho.square())
    return Moments(lam, lam.square() + var, rest.square() + var, lam * rest - var)


@closed_form
def mse_hybrid(
    x: Tensor, y: Tensor, num_features: Number, moments: Moments, *, shared: bool = False, kernel: str = "softmax"
) -> Tensor:
    """Mean squared error of the bipolar hybrid ``l hyp+ + (1 - l) trig`` (HRF, Theorem 3.1).

    ``E[l^2] MSE(hyp+) + E[(1-l)^2] MSE(trig)``, l being independent of both (eq. 22). ``shared`` projections
    subtract ``(2/m) K^2 (1 - cos(|x|^2 - |y|^2)) E[l(1-l)]`` (eq. 23).
    """
    out = moments.square * log_mse(x, y, num_features, map="hyperbolic", kernel=kernel).exp()
    out = out + moments.complement * log_mse(x, y, num_features, map="trig", kernel=kernel).exp()
    if shared:
        half = (x.square().sum(-1) - y.square().sum(-1)) / 2
        scale = torch.exp(2 * _log_kernel(x, y, kernel))
        out = out - 4 / num_features * scale * torch.sin(half).square() * moments.cross
    return out


# `how` of the next two: `shared` and `kernel` of `mse_hybrid`.


def mse_angular_hybrid(x: Tensor, y: Tensor, num_features: Number, num_coefficients: Number, **how: Any) -> Tensor:
    """Mean squared error of the angular hybrid (HRF, Theorem D.1): zero at angles 0 and pi for equal norms."""
    return mse_hybrid(x, y, num_features, angular_moments(x, y, num_coefficients), **how)


def mse_gaussian_hybrid(
    x: Tensor,
    y: Tensor,
    num_features: Number,
    num_coefficients: Number,
    *,
    radius: Number,
    bandwidth: Number = 1.0,
    **how: Any,
) -> Tensor:
    """Mean squared error of the normalised Gaussian hybrid (HRF, Theorems F.1 and F.2); ``how`` as there."""
    moments = gaussian_moments(x, y, num_coefficients, radius=radius, bandwidth=bandwidth)
    return mse_hybrid(x, y, num_features, moments, **how)


def mse_mixture(squares: Sequence[Number], mses: Sequence[Number]) -> Tensor:
    """``sum_k E[l_k^2] MSE_k``: independent unbiased estimators, coefficients that sum to one without them (eq. 8)."""
    if len(squares) != len(mses) or not squares:
        raise BochnerError(f"The 'squares' and 'mses' of mse_mixture must be as many, got {len(squares)}, {len(mses)}.")
    terms = [torch.as_tensor(s, dtype=torch.float64) * e for s, e in zip(squares, mses, strict=True)]
    return torch.stack(torch.broadcast_tensors(*terms)).sum(0)


@closed_form
def max_relative_error(radius: Number, num_features: Number) -> Tensor:
    """Largest relative error on the sphere of trig and of hyperbolic features (HRF, Lemma 3.4, eq. 26).

    ``exp(2 r^2) (1 - exp(-4 r^2)) / sqrt(2m) = 2 sinh(2 r^2) / sqrt(2m)``, at angle pi (trig) and 0 (hyp+).
    """
    return 2 * torch.sinh(2 * radius.square()) / torch.sqrt(2 * num_features)


@closed_form
def relative_error_angular(theta: Tensor, radius: Number, num_features: Number, num_coefficients: Number) -> Tensor:
    """Relative error of the angular hybrid for two inputs of norm r at angle ``theta`` (HRF, eq. 47)."""
    a = theta / math.pi
    return relative_error_hybrid(theta, radius, num_features, _angular(a, 1 - a, num_coefficients))


@closed_form
def relative_error_hybrid(theta: Tensor, radius: Number, num_features: Number, moments: Moments) -> Tensor:
    """Relative error of any bipolar hybrid there (HRF, Theorem 3.1), where shared projections change nothing.

    ``sqrt( 2/m [ E[l^2] sinh^2(2 r^2 cos^2(theta/2)) + E[(1-l)^2] sinh^2(2 r^2 sin^2(theta/2)) ] )``.
    """
    plus, minus = (2 * radius.square() * f(theta / 2).square() for f in (torch.cos, torch.sin))
    square = moments.square * torch.sinh(plus).square() + moments.complement * torch.sinh(minus).square()
    return torch.sqrt(2 * square / num_features)


def hybrid_split(moments: Callable[[Tensor, Tensor, int], Moments], num_features: int, width: int) -> tuple[int, int]:
    """The best split (m, n) of a budget: projections of each base, and of the coefficient.

    ``4 m (width n + 1) <= 2 num_features`` and the smallest worst relative error on the unit sphere. ``moments(x, y,
    n)`` are those of the coefficient, ``width`` its features for each projection.

    >>> hybrid_split(angular_moments, 256, 1)
    (42, 2)
    """
    num_features, width = (
        positive_int(n, s, "hybrid_split") for n, s in ((num_features, "num_features"), (width, "width"))
    )
    candidates = [(num_features // (2 * (width * n + 1)), n) for n in range(1, 65)]
    candidates = [(m, n) for m, n in candidates if m > 0] or [(1, 1)]
    with torch.device("cpu"):  # a plan is a pair of numbers, also for a map that is built on no device
        theta = torch.linspace(0, math.pi, 513, dtype=torch.float64)
        c, s = torch.cos(theta / 2), torch.sin(theta / 2)
        x, y = torch.stack([c, s], -1), torch.stack([c, -s], -1)
        worst = [float(relative_error_hybrid(theta, 1.0, m, moments(x, y, n)).max()) for m, n in candidates]
    return candidates[worst.index(min(worst))]


def max_relative_error_angular(radius: float, num_features: int, num_coefficients: int) -> float:
    """Largest relative error of the angular hybrid on the sphere, by maximising eq. 47 of HRF over the angle."""
    low, high = 0.0, math.pi / 2  # it is symmetric about pi/2
    for _ in range(3):  # a fine grid, and two refinements
        grid = torch.linspace(low, high, 2001, dtype=torch.float64)
        errors = relative_error_angular(grid, radius, num_features, num_coefficients)
        i = int(errors.argmax())
        low, high = float(grid[max(i - 1, 0)]), float(grid[min(i + 1, 2000)])
    return float(errors.max())


@closed_form
def max_relative_error_angular_bound(radius: Number, num_features: Number, num_coefficients: Number) -> Tensor:
    """An upper bound of it, ``2 sinh(2 r^2) / sqrt(2m) * sqrt( (1 - 1/n)/(pi r^2) + 1/(n sqrt(pi) r) )``.

    HRF, Theorem 3.5 as its proof gives it (eq. 63-65); the statement takes ``1/r`` out of both terms, which is too
    small once r exceeds about 4 at n = 1.
    """
    r, n = radius, num_coefficients
    share = (1 - 1 / n) / (math.pi * r.square()) + 1 / (n * math.sqrt(math.pi) * r)
    return max_relative_error(r, num_features) * torch.sqrt(share)


def _angular(a: Tensor, c: Tensor, n: Tensor) -> Moments:
    """Moments of a mean of n signs that are equal with probability c = 1 - a."""
    return Moments(a, a * (a * (1 - 1 / n) + 1 / n), c * (c * (1 - 1 / n) + 1 / n), a * c * (1 - 1 / n))


def _complex_sum(x: Tensor, y: Tensor, A: Tensor) -> Tensor:
    """``A x + (A')^-1 y`` for a scalar, a diagonal or a matrix."""
    A, d = torch.as_tensor(A).to(torch.complex128), x.shape[-1]
    if A.shape not in ((), (d,), (d, d)):
        raise BochnerError(f"The 'A' of mse_complex must be a number, {d} entries or ({d}, {d}), got {tuple(A.shape)}.")
    A = A if A.ndim == 2 else A.expand(d).diag()
    inverse, info = torch.linalg.inv_ex(A)
    if (info != 0).any() or not torch.isfinite(inverse.abs()).all():
        raise BochnerError("The 'A' of mse_complex must be invertible, got a singular matrix or a zero entry.")
    return x.to(A.dtype) @ A.mT + y.to(A.dtype) @ inverse
