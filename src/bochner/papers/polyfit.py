"""Polynomials in place of an activation: Bernstein, Chebyshev and least-squares fits, batched over intervals.

A fit is kept in the basis it was made in, in which it evaluates stably at any degree. Linearised layers need powers of
the pre-activation, hence monomial coefficients: those are computed in exact integer arithmetic, but a sum of large
terms of alternating sign still cancels when it is evaluated, from degree 17 on for ReLU in single precision.
Bernstein polynomials converge like 1/n, the two others geometrically for an analytic activation: take those.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bochner._checks import BochnerError, lookup, one_of, positive_int

METHODS = ("bernstein", "chebyshev", "least_squares")
GRID = 513  # points at which a fit is compared with its function
SCALE = 200  # bits: a float64 that matters is an integer over 2^200

Activation = str | Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def activation_function(activation: Activation) -> Callable[[Tensor], Tensor]:
    """A named activation, or any elementwise function or module."""
    return activation if callable(activation) else lookup(ACTIVATIONS, activation, "activation")


class PolynomialFit(NamedTuple):
    """Polynomials of degree n on the intervals [lower_i, upper_i]; `coefficients` (u, n + 1) in the basis of `method`.

    `bernstein`: the values at n + 1 equal steps. Others: Chebyshev coefficients. `error` (u,): the largest deviation
    from the function on the interval, measured on a grid.
    """

    method: str
    lower: Tensor
    upper: Tensor
    coefficients: Tensor
    error: Tensor

    @property
    def degree(self) -> int:
        return self.coefficients.shape[-1] - 1

    def __call__(self, t: Tensor) -> Tensor:
        """The polynomials at t (..., u), evaluated stably in their own basis."""
        theta, c = self.local(t), self.coefficients.to(t.dtype)
        if self.method == "bernstein":  # de Casteljau: repeated averages, nothing cancels
            x = (1 + theta) / 2
            levels = [c[:, k].expand_as(x) for k in range(c.shape[-1])]
            while len(levels) > 1:
                levels = [a + x * (b - a) for a, b in pairwise(levels)]
            return levels[0]
        one, two = torch.zeros_like(theta), torch.zeros_like(theta)
        for k in range(self.degree, 0, -1):  # Clenshaw
            one, two = c[:, k] + 2 * theta * one - two, one
        return c[:, 0] + theta * one - two

    def local(self, t: Tensor) -> Tensor:
        """t as theta in [-1, 1]."""
        low, high = self.lower.to(t.dtype), self.upper.to(t.dtype)
        return (2 * t - low - high) / (high - low)

    def monomials(self) -> Tensor:
        """alpha (u, n + 1) with `p_i = sum_k alpha_ik theta^k`, each correctly rounded from exact arithmetic."""
        shift = self.degree if self.method == "bernstein" else 0
        whole = np.frompyfunc(lambda v: int(math.ldexp(v, SCALE)), 1, 1)(self.coefficients.double().cpu().numpy())
        exact = whole @ _basis_powers(self.method, self.degree)
        return torch.from_numpy(np.frompyfunc(lambda v: v / (1 << (SCALE + shift)), 1, 1)(exact).astype(np.float64))


def fit_polynomial(
    activation: Activation,
    lower: Any,
    upper: Any,
    degree: int,
    *,
    method: str = "chebyshev",
    samples: Tensor | None = None,
) -> PolynomialFit:
    """Polynomials of one degree for an activation on intervals [lower_i, upper_i] (numbers or (u,)).

    `method`: `"bernstein"` (eq. 31 of Lucyszyn 2025, problem 3), `"chebyshev"` (interpolation at Chebyshev points,
    within a small factor of the best uniform fit) or `"least_squares"` (least mean square over `samples` (N, u) of the
    pre-activation, or over the interval). All in float64.

    >>> fit = fit_polynomial("gelu", -3.0, 3.0, 8)
    >>> bool(fit.error < 0.01)
    True
    """
    f, n = activation_function(activation), positive_int(degree, "degree", "fit_polynomial")
    one_of(method, "method", "fit_polynomial", METHODS)
    low, high = _intervals(lower, upper)
    middle, half = (low + high)[:, None] / 2, (high - low)[:, None] / 2
    grid = torch.linspace(-1, 1, max(GRID, 8 * n), dtype=torch.float64)
    if method == "bernstein":
        c = _values(f, middle + half * torch.linspace(-1, 1, n + 1, dtype=torch.float64))
    elif method == "chebyshev":
        k = torch.arange(n + 1, dtype=torch.float64)
        angle = math.pi * (k + 0.5) / (n + 1)
        c = _values(f, middle + half * angle.cos()) @ torch.cos(angle[:, None] * k) * (2 / (n + 1))
        c[:, 0] /= 2
    else:
        t = middle + half * grid if samples is None else samples.to(torch.float64).mT
        if t.shape[0] != len(low) or t.shape[1] < n + 1:
            raise BochnerError(
                f"The 'samples' of fit_polynomial must have shape (N, {len(low)}) with N > degree = {n}, got "
                f"{tuple(t.mT.shape)}."
            )
        columns = [torch.ones_like(t), ((t - middle) / half).clamp(-1, 1)]
        for _ in range(n - 1):
            columns.append(2 * columns[1] * columns[-1] - columns[-2])
        # By SVD: samples may repeat.
        c = torch.linalg.lstsq(torch.stack(columns, -1), _values(f, t)[..., None], driver="gelsd").solution[..., 0]
    fit = PolynomialFit(method, low, high, c, torch.empty(0))
    points = (middle + half * grid).mT
    return fit._replace(error=(fit(points) - _values(f, points)).abs().amax(0))


def shift_monomials(alpha: Tensor, beta: Tensor) -> Tensor:
    """Coefficients of `z -> p_i(z + beta_i)`, from alpha (u, n + 1) and beta (u,)."""
    out = torch.zeros_like(alpha)
    for k in range(alpha.shape[-1] - 1, -1, -1):  # Horner: out <- out (z + beta) + alpha_k
        out = F.pad(out[:, :-1], (1, 0)) + beta[:, None] * out
        out[:, 0] += alpha[:, k]
    return out


def _intervals(lower: Any, upper: Any) -> tuple[Tensor, Tensor]:
    low, high = (torch.as_tensor(v, dtype=torch.float64).detach().cpu().reshape(-1) for v in (lower, upper))
    low, high = torch.broadcast_tensors(low, high)
    bad = ~(torch.isfinite(low) & torch.isfinite(high) & (low < high))
    if bad.any():
        i = int(bad.nonzero()[0])
        raise BochnerError(
            f"The interval of fit_polynomial must have lower < upper, both finite, got [{low[i].item()}, "
            f"{high[i].item()}] for unit {i}; calibrate on data that varies, or widen it."
        )
    return low.contiguous(), high.contiguous()


def _values(f: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    with torch.no_grad():
        y = f(t)
    if not isinstance(y, Tensor) or y.shape != t.shape or not torch.isfinite(y).all():
        raise BochnerError(
            "The 'activation' must map a tensor to a finite tensor of the same shape on the whole interval; it does "
            "not for the one given."
        )
    return y.to(torch.float64)


def _basis_powers(method: str, n: int) -> np.ndarray:
    """Row k: the k-th basis polynomial in powers of theta, whole numbers; Bernstein's over 2^n."""
    if method == "bernstein":  # C(n, k) (1 + theta)^k (1 - theta)^(n - k)
        ones = [[math.comb(k, i) for i in range(k + 1)] for k in range(n + 1)]
        signed = [[(-1) ** i * value for i, value in enumerate(row)] for row in ones]
        products = [np.convolve(np.array(ones[k], dtype=object), signed[n - k]) for k in range(n + 1)]
        return np.array([math.comb(n, k) * row for k, row in enumerate(products)], dtype=object)
    rows = [[1] + [0] * n, [0, 1] + [0] * (n - 1)]
    for _ in range(n - 1):  # T_(k+1) = 2 theta T_k - T_(k-1)
        rows.append([2 * a - b for a, b in zip([0, *rows[-1][:-1]], rows[-2], strict=True)])
    return np.array(rows, dtype=object)
