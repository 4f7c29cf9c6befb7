"""Shared pieces of the closed forms: input checks and stable special functions, all in float64."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from bochner._checks import BochnerError, finite, floating

Number = Any  # int | float | Tensor: a scalar, or a tensor that broadcasts against the batch shape of the vectors
Formula = TypeVar("Formula", bound=Callable[..., Any])

_BLOCK = 1 << 20  # entries of a series table held at once


def closed_form(formula: Formula) -> Formula:
    """Check the arguments of a formula by their names; it gets tensors in float64. A default None stays."""
    signature, owner = inspect.signature(formula), formula.__name__

    @wraps(formula)
    def checked(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options)
        given.apply_defaults()
        for name, value in given.arguments.items():
            if value is None and signature.parameters[name].default is not None:
                raise BochnerError(f"The {name!r} of {owner} is missing, got None.")
            if name in CHECKS and value is not None:
                given.arguments[name] = CHECKS[name](value, name, owner)
        x, y = (given.arguments.get(name) for name in ("x", "y"))
        if x is not None and y is not None and x.shape[-1] != y.shape[-1]:
            raise BochnerError(
                f"The 'x' and 'y' of {owner} must have the same last dimension, got {x.shape[-1]} and {y.shape[-1]}."
            )
        try:
            return formula(*given.args, **given.kwargs)
        except BochnerError:
            raise
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise BochnerError(f"The arguments of {owner} do not fit together: {error}; check their shapes.") from error

    return checked  # type: ignore[return-value]


def vector(x: Any, name: str, owner: str) -> Tensor:
    """A finite floating-point tensor of shape (..., d), in float64."""
    x = floating(x, name, owner)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise BochnerError(f"The {name!r} of {owner} must have shape (..., d) with d >= 1, got {tuple(x.shape)}.")
    return finite(x, name, owner).double()


def number(value: Any, name: str, owner: str) -> Tensor:
    """Any number or tensor, in float64."""
    try:
        return torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BochnerError(f"The {name!r} of {owner} must be a number or a tensor, got {value!r}.") from error


def positive(value: Any, name: str, owner: str) -> Tensor:
    t = number(value, name, owner)
    if not (torch.isfinite(t).all() and (t > 0).all()):
        raise BochnerError(f"The {name!r} of {owner} must be positive and finite, got {value!r}.")
    return t


def non_negative(value: Any, name: str, owner: str) -> Tensor:
    t = number(value, name, owner)
    if not (torch.isfinite(t).all() and (t >= 0).all()):
        raise BochnerError(f"The {name!r} of {owner} must be finite and not negative, got {t.tolist()}.")
    return t


def whole(value: Any, name: str, owner: str) -> Tensor:
    t = positive(value, name, owner)
    if not (t == t.round()).all():
        raise BochnerError(f"The {name!r} of {owner} must be whole, got {value!r}.")
    return t


CHECKS: dict[str, Callable[[Any, str, str], Tensor]] = {
    **dict.fromkeys(("x", "y", "means", "factors", "coefficients", "second_moment", "second_moments"), vector),
    **dict.fromkeys(("variances", "probabilities", "mean_square", "second_sup"), non_negative),
    **dict.fromkeys(("num_features", "num_coefficients", "dim", "degree", "terms", "draws"), whole),
    **dict.fromkeys(
        ("target", "radius", "bandwidth", "delta", "eps", "failure", "constant", "rate", "rho", "threshold"), positive
    ),
    **dict.fromkeys(("theta", "t", "value", "doubled", "low", "high"), number),
}


def log1mexp(t: Tensor) -> Tensor:
    """``log(1 - exp(-t))`` for t >= 0, without cancellation; -inf at 0."""
    small = t < math.log(2.0)
    a = torch.log(-torch.expm1(-torch.where(small, t, 1.0)))
    b = torch.log1p(-torch.exp(-torch.where(small, 1.0, t)))
    return torch.where(small, a, b)


def logexpm1(t: Tensor) -> Tensor:
    """``log(exp(t) - 1)`` for t >= 0, finite wherever t is; -inf at 0."""
    return t + log1mexp(t)


def log_subtract(a: Tensor, b: Tensor) -> Tensor:
    """``log(exp(a) - b)`` for ``0 <= b <= exp(a)`` up to rounding."""
    some = a > -math.inf
    return a + torch.log1p(torch.where(some, (-b * torch.exp(-torch.where(some, a, 0.0))).clamp(min=-1.0), 0.0))


def in_blocks(f: Callable[[Tensor], Tensor], t: Tensor, width: int) -> Tensor:
    """Apply ``f`` (which makes a table of ``width`` columns per entry) without holding the whole table."""
    flat = t.reshape(-1)
    rows = max(1, _BLOCK // width)
    return torch.cat([f(part) for part in flat.split(rows)]).reshape(t.shape)


def poisson_mean(values: Callable[[int], Tensor], rate: Tensor) -> Tensor:
    """``E[v_N]`` for N ~ Poisson(rate), where ``values(k)`` tables the bounded v_0 .. v_{k-1}."""
    top = float(rate.detach().max()) if rate.numel() else 0.0
    count = int(top + 12 * math.sqrt(top) + 60)
    table, k = values(count), torch.arange(count, dtype=torch.float64)
    log_factorial = torch.lgamma(k + 1)

    def mean(r: Tensor) -> Tensor:
        r = r[:, None]
        return (torch.exp(torch.special.xlogy(k, r) - r - log_factorial) * table).sum(-1)

    return in_blocks(mean, rate, count)


def log_hyp0f1(b: float, q: Tensor) -> Tensor:
    """``log 0F1(; b; q) = log sum_k q^k / (k! (b)_k)`` for q >= 0, by a window around the largest term."""
    peak = (torch.sqrt((b - 1) ** 2 + 4 * q) - (b - 1)) / 2
    reach = int(12 * math.sqrt(max(float(peak.detach().max()) if q.numel() else 0.0, 0.0)) + 60)
    offsets = torch.arange(-reach, reach + 1, dtype=torch.float64)

    def series(s: Tensor) -> Tensor:
        s = s[:, None]
        centre = torch.floor((torch.sqrt((b - 1) ** 2 + 4 * s.detach()) - (b - 1)) / 2)
        k = centre + offsets
        valid = k >= 1
        k = k.clamp(min=1)
        log_pochhammer = torch.lgamma(b + k) - math.lgamma(b)
        terms = torch.special.xlogy(k, s) - torch.lgamma(k + 1) - log_pochhammer
        tail = torch.logsumexp(torch.where(valid, terms, -math.inf), -1)
        return torch.logaddexp(torch.zeros_like(tail), tail)

    return in_blocks(series, q, 2 * reach + 1)


def angle(x: Tensor, y: Tensor) -> Tensor:
    """The angle between x and y in [0, pi], accurate at both ends (Kahan)."""
    nx, ny = x.norm(dim=-1, keepdim=True), y.norm(dim=-1, keepdim=True)
    if not ((nx > 0).all() and (ny > 0).all()):
        raise BochnerError("The angle between 'x' and 'y' needs vectors that are not zero.")
    p, q = x / nx, y / ny
    return 2 * torch.atan2((p - q).norm(dim=-1), (p + q).norm(dim=-1))
