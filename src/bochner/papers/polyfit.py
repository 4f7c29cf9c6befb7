"""Polynomials in place of an activation: Bernstein, Chebyshev and least-squares fits, batched over intervals.

A fit is kept in the basis it was made in, in which it evaluates stably at any degree. Linearised layers need powers of
the pre-activation, hence monomial coefficients: those are computed in exact integer arithmetic, but a sum of large
terms of alternating sign still cancels when it is evaluated. `monomial_condition` measures by how much and
`usable_degree` says where it ends. On [-4, 4] at a tolerance of 1e-3, in powers of the centred variable in [-1, 1]:

| degree, float32 / float64 | bernstein | chebyshev | least_squares |
|---------------------------|-----------|-----------|---------------|
| GELU                      | > 100     | 50 / 74   | > 50 / > 74   |
| ReLU                      | 43 / >100 | 17 / 41   | 17 / 43       |

In powers of (t - a)/(b - a) in [0, 1] it ends at 25 / 65 and 9 / 29 for GELU: hence the centred variable.

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
from torch import Tensor, nn

from bochner._checks import BochnerError, lookup, one_of, positive_int

METHODS = ("bernstein", "chebyshev", "least_squares")
GRID = 513  # points at which a fit is compared with its function

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def activation_function(activation: str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A named activation, or any elementwise function or module."""
    if isinstance(activation, str):
        return lookup(ACTIVATIONS, activation, "activation")
    if not callable(activation):
        raise BochnerError(
            f"The 'activation' must be a name in {sorted(ACTIVATIONS)} or a function of a tensor, got {activation!r}."
        )
    if isinstance(activation, nn.GELU):
        return ACTIVATIONS["gelu" if activation.approximate == "none" else "gelu_tanh"]
    return activation


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
        theta = self.local(t)
        c = self.coefficients.to(t.dtype)
        return de_casteljau(c, theta) if self.method == "bernstein" else clenshaw(c, theta)

    def local(self, t: Tensor) -> Tensor:
        """t as theta in [-1, 1]."""
        low, high = self.lower.to(t.dtype), self.upper.to(t.dtype)
        return (2 * t - low - high) / (high - low)

    def monomials(self) -> Tensor:
        """alpha (u, n + 1) with `p_i = sum_k alpha_ik theta^k`, each correctly rounded from exact arithmetic."""
        return to_monomials(self.coefficients, self.method)

    def monomial_condition(self) -> Tensor:
        """`sum_k |alpha_ik| / max |p_i|`: the factor by which rounding errors grow in a sum of powers."""
        grid = torch.linspace(-1, 1, GRID, dtype=torch.float64)[:, None]
        c = self.coefficients
        value = de_casteljau(c, grid) if self.method == "bernstein" else clenshaw(c, grid)
        return self.monomials().abs().sum(-1) / value.abs().amax(0).clamp_min(torch.finfo(torch.float64).tiny)


def fit_polynomial(
    activation: str | Callable[[Tensor], Tensor],
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
    owner = "fit_polynomial"
    f = activation_function(activation)
    n = positive_int(degree, "degree", owner)
    one_of(method, "method", owner, METHODS)
    low, high = check_intervals(lower, upper, owner)
    middle, half = (low + high)[:, None] / 2, (high - low)[:, None] / 2
    if method == "bernstein":
        theta = torch.linspace(-1, 1, n + 1, dtype=torch.float64)
        c = _values(f, middle + half * theta)
    elif method == "chebyshev" or samples is None:
        count = n + 1 if method == "chebyshev" else max(GRID, 8 * n)
        angle = math.pi * (torch.arange(count, dtype=torch.float64) + 0.5) / count
        y = _values(f, middle + half * angle.cos())
        k = torch.arange(n + 1, dtype=torch.float64)[:, None]
        table = torch.cos(k * angle) * torch.where(k == 0, 1.0, 2.0) / count
        if method == "chebyshev":
            c = y @ table.mT
        else:
            # Uniform weight on the interval: the density of Chebyshev points times |sin|.
            c = _weighted_fit(torch.cos(k * angle).mT.expand(len(low), -1, -1), y, angle.sin().expand_as(y))
    else:
        t = samples.to(torch.float64).mT
        if t.shape[0] != len(low) or t.shape[1] < n + 1:
            raise BochnerError(
                f"The 'samples' of {owner} must have shape (N, {len(low)}) with N > degree = {n}, got "
                f"{tuple(samples.shape)}."
            )
        theta = ((t - middle) / half).clamp(-1, 1)
        c = _weighted_fit(chebyshev_table(theta, n), _values(f, t), torch.ones_like(t))
    fit = PolynomialFit(method, low, high, c, torch.empty(0))
    grid = torch.linspace(-1, 1, GRID, dtype=torch.float64)
    points = (middle + half * grid).mT
    return fit._replace(error=(fit(points) - _values(f, points)).abs().amax(0))


def check_intervals(lower: Any, upper: Any, owner: str) -> tuple[Tensor, Tensor]:
    """Intervals as two float64 vectors; refuses an empty or zero-width one."""
    low, high = (torch.as_tensor(v, dtype=torch.float64).detach().cpu().reshape(-1) for v in (lower, upper))
    low, high = torch.broadcast_tensors(low, high)
    bad = ~(torch.isfinite(low) & torch.isfinite(high) & (low < high))
    if bad.any():
        i = int(bad.nonzero()[0])
        raise BochnerError(
            f"The interval of {owner} must have lower < upper, both finite, got [{low[i].item()}, {high[i].item()}] "
            f"for unit {i}; calibrate on data that varies, or widen it."
        )
    return low.contiguous(), high.contiguous()


def second_derivative_sup(activation: str | Callable[[Tensor], Tensor], lower: Any, upper: Any) -> Tensor:
    """`max |f''|` on each interval, by second differences; refuses a function that has none, such as ReLU at its kink.

    >>> round(second_derivative_sup("gelu", -1.0, 1.0).item(), 4)
    0.7979
    """
    f = activation_function(activation)
    low, high = check_intervals(lower, upper, "second_derivative_sup")

    def differences(steps: int) -> Tensor:
        theta = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
        h = ((high - low) / steps)[:, None]
        t = low[:, None] + (high - low)[:, None] * theta
        return ((_values(f, t - h) - 2 * _values(f, t) + _values(f, t + h)).abs() / h**2).amax(-1)

    coarse, fine = differences(1024), differences(4096)
    # At a kink the quotient grows like 1/h, fourfold here; where there is a second derivative it settles.
    rough = fine > 2 * coarse + 1e-3
    if rough.any():
        i = int(rough.nonzero()[0])
        raise BochnerError(
            f"The activation has no second derivative on [{low[i].item():.4g}, {high[i].item():.4g}], so Bernstein's "
            "error bound does not apply; use method='chebyshev' or 'least_squares', or fix the degree."
        )
    return fine


def usable_degree(
    activation: str | Callable[[Tensor], Tensor],
    lower: float,
    upper: float,
    *,
    method: str = "chebyshev",
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-3,
    limit: int = 100,
) -> int:
    """The last degree at which a sum of powers keeps `tolerance` of the largest value, in `dtype`; at most `limit`.

    >>> usable_degree("gelu", -4.0, 4.0, method="chebyshev") < usable_degree("gelu", -4.0, 4.0, method="bernstein")
    True
    """
    eps = torch.finfo(dtype).eps
    for n in range(2, limit + 1):
        fit = fit_polynomial(activation, lower, upper, n, method=method)
        if float(fit.monomial_condition().max()) * eps > tolerance:
            return n - 1
    return limit


def to_monomials(coefficients: Tensor, method: str) -> Tensor:
    """Coefficients (u, n + 1) in a fit's basis as powers of theta in [-1, 1], without rounding on the way."""
    n = coefficients.shape[-1] - 1
    table, shift = _bernstein_powers(n) if method == "bernstein" else _chebyshev_powers(n)
    # A float64 is an integer times a power of two: 2^1074 of them would hold every one, 2^200 all that matters.
    whole = np.frompyfunc(lambda v: int(math.ldexp(v, 200)), 1, 1)(coefficients.double().cpu().numpy())
    exact = whole @ table
    return torch.from_numpy(np.frompyfunc(lambda v: v / (1 << (200 + shift)), 1, 1)(exact).astype(np.float64))


def clenshaw(c: Tensor, theta: Tensor) -> Tensor:
    """Chebyshev series c (u, n + 1) at theta (..., u)."""
    one, two = torch.zeros_like(theta), torch.zeros_like(theta)
    for k in range(c.shape[-1] - 1, 0, -1):
        one, two = c[:, k] + 2 * theta * one - two, one
    return c[:, 0] + theta * one - two


def de_casteljau(c: Tensor, theta: Tensor) -> Tensor:
    """Bernstein form c (u, n + 1) at theta (..., u): repeated averages, nothing cancels."""
    x = (1 + theta) / 2
    levels = [c[:, k].expand(torch.broadcast_shapes(theta.shape, c[:, k].shape)) for k in range(c.shape[-1])]
    while len(levels) > 1:
        levels = [a + x * (b - a) for a, b in pairwise(levels)]
    return levels[0]


def chebyshev_table(theta: Tensor, degree: int) -> Tensor:
    """T_0 ... T_n at theta, (..., n + 1)."""
    columns = [torch.ones_like(theta), theta]
    for _ in range(degree - 1):
        columns.append(2 * theta * columns[-1] - columns[-2])
    return torch.stack(columns[: degree + 1], dim=-1)


def shift_monomials(alpha: Tensor, beta: Tensor) -> Tensor:
    """Coefficients of `z -> p_i(z + beta_i)`, from alpha (u, n + 1) and beta (u,)."""
    out = torch.zeros_like(alpha)
    for k in range(alpha.shape[-1] - 1, -1, -1):  # Horner: out <- out (z + beta) + alpha_k
        moved = torch.cat([torch.zeros_like(out[:, :1]), out[:, :-1]], dim=-1)
        out = moved + beta[:, None] * out
        out[:, 0] += alpha[:, k]
    return out


def _weighted_fit(table: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Least squares of y (u, N) on table (u, N, n + 1), by QR; by SVD where samples repeat too much for that."""
    root = weight.sqrt().unsqueeze(-1)
    a, b = table * root, y.unsqueeze(-1) * root
    c = torch.linalg.lstsq(a, b, driver="gels").solution.squeeze(-1)
    if torch.isfinite(c).all() and c.abs().amax() <= 1e6 * (1 + y.abs().amax()):
        return c
    return torch.linalg.lstsq(a, b, driver="gelsd").solution.squeeze(-1)


def _values(f: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    with torch.no_grad():
        y = f(t)
    if not isinstance(y, Tensor) or y.shape != t.shape or not torch.isfinite(y).all():
        raise BochnerError(
            "The 'activation' must map a tensor to a finite tensor of the same shape on the whole interval; it does "
            "not for the one given."
        )
    return y.to(torch.float64)


def _chebyshev_powers(n: int) -> tuple[np.ndarray, int]:
    """T_k in powers of theta as rows of integers; the denominator is 2^0."""
    rows = [[1] + [0] * n, [0, 1] + [0] * (n - 1)]
    for _ in range(n - 1):
        rows.append([2 * a - b for a, b in zip([0, *rows[-1][:-1]], rows[-2], strict=True)])
    return np.array(rows[: n + 1], dtype=object), 0


def _bernstein_powers(n: int) -> tuple[np.ndarray, int]:
    """`C(n,k) (1 + theta)^k (1 - theta)^(n-k)` in powers of theta; the denominator is 2^n."""
    rows = []
    for k in range(n + 1):
        row = [0] * (n + 1)
        for i in range(k + 1):
            for j in range(n - k + 1):
                row[i + j] += math.comb(k, i) * math.comb(n - k, j) * (-1) ** j
        rows.append([math.comb(n, k) * v for v in row])
    return np.array(rows, dtype=object), n
