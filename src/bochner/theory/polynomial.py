"""Variances of the random features of polynomial kernels ``(x.y)^n``.

References: Lucyszyn, *Data mining problems*, 2025, problem 2 ("Problem 2"); Pham and Pagh, *Fast and scalable
polynomial kernels*, 2013; Avron, Nguyen and Woodruff, *Subspace embeddings for the polynomial kernel*, 2014.
For ``(x.y + c)^n`` append ``sqrt(c)`` to both vectors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bochner._checks import BochnerError, one_of
from bochner.theory._common import Number, closed_form

SKETCHES = ("sum_poly", "tensor_sketch")


@closed_form
def mse_sum_poly(x: Tensor, y: Tensor, num_features: Number, degree: Number) -> Tensor:
    """Mean squared error of sum decomposition (m uniform index tuples) for ``(x.y)^n``.

    ``[ d^n (sum_i x_i^2 y_i^2)^n - (x.y)^(2n) ] / m``: Problem 2, eq. 7, with the square its second term lacks.
    """
    p = x * y
    first, second = x.shape[-1] * p.square().sum(-1), p.sum(-1).square()
    return (first**degree - torch.minimum(first, second) ** degree) / num_features


@closed_form
def mse_tensor_sketch(x: Tensor, y: Tensor, num_features: Number, degree: Number) -> Tensor:
    """Mean squared error of TensorSketch with m buckets for ``(x.y)^n``, exactly.

    With ``q = (x.y)^2``, ``s = sum_i x_i^2 y_i^2``, ``b = |x|^2 |y|^2 - s``, ``c = q - s``:
    ``[ (q+b)^n + (q+c)^n - 2 q^n ] / m + gcd(2, m) [ (q+b+c)^n - (q+b)^n - (q+c)^n + q^n ] / m^2``, for bucket
    hashes pairwise and signs 4-wise independent. Problem 2's eq. 21 is below it for n >= 2.

    >>> x = torch.full((8,), 8 ** -0.5)
    >>> bool(256 * mse_tensor_sketch(x, x, 256, 3) > 2)      # what eq. 21 allows
    True
    """
    return _sketch_mse(_pairs(x, y), num_features, degree)


@closed_form
def mse_tensor_sketch_matrix(x: Tensor, y: Tensor, num_features: Number, degree: Number) -> Tensor:
    """:func:`mse_tensor_sketch` for all pairs of rows of x (..., n, d) and y (..., s, d), by products: (..., n, s)."""
    x2, y2 = x.square(), y.square()
    lengths = x2.sum(-1, keepdim=True) * y2.sum(-1, keepdim=True).mT
    return _sketch_mse(_Products((x @ y.mT).square(), x2 @ y2.mT, lengths), num_features, degree)


@closed_form
def tensor_sketch_bound(x: Tensor, y: Tensor, num_features: Number, degree: Number) -> Tensor:
    """``(2 + 3^n) |x|^(2n) |y|^(2n) / m``: Avron et al. 2014; in place of Problem 2, eq. 21."""
    return (2 + 3**degree) * (x.square().sum(-1) * y.square().sum(-1)) ** degree / num_features


@closed_form
def polynomial_tail_bound(
    x: Tensor,
    y: Tensor,
    num_features: Number,
    target: Number,
    degree: Number,
    *,
    map: str = "tensor_sketch",
    relative: bool = True,
) -> Tensor:
    """At most this is ``P(|error| >= target)`` of ``sum_poly`` or ``tensor_sketch``, by Chebyshev's inequality.

    ``MSE / target^2``, no more than 1; ``relative``: the error is measured against ``|x.y|^n``. Problem 2,
    Results 4 and 7, with the exact mean squared errors in place of eq. 7 and 21.
    """
    one_of(map, "map", "polynomial_tail_bound", SKETCHES)
    mse = (mse_sum_poly if map == "sum_poly" else mse_tensor_sketch)(x, y, num_features, degree)
    return (mse / _goal(x, y, target, degree, relative)).clamp(max=1.0)


@closed_form
def polynomial_features_needed(
    x: Tensor,
    y: Tensor,
    target: Number,
    degree: Number,
    *,
    map: str = "tensor_sketch",
    relative: bool = True,
    failure: Number | None = None,
) -> Tensor:
    """Features with which ``sum_poly`` or ``tensor_sketch`` has root mean squared error at most ``target``.

    ``relative``: against ``|x.y|^n``, infinite where x.y = 0. ``failure``: features with which the error exceeds
    ``target`` with at most this probability (:func:`polynomial_tail_bound`). The count is safe for either parity.

    >>> x = torch.tensor([0.6, 0.8])
    >>> m = polynomial_features_needed(x, x, 0.1, 2)
    >>> bool(mse_tensor_sketch(x, x, m, 2) <= 0.01)
    True
    """
    goal = _goal(x, y, target, degree, relative) * (1.0 if failure is None else failure)
    if one_of(map, "map", "polynomial_features_needed", SKETCHES) == "sum_poly":
        return torch.ceil(mse_sum_poly(x, y, 1, degree) / goal).clamp(min=1)
    # first / m + 2 second / m^2 <= goal: a quadratic, with the larger (even) second term.
    first, second = _sketch_terms(_pairs(x, y), degree)
    root = torch.sqrt(first.square() + 8 * goal * second.clamp(min=0))
    return torch.ceil((first + root) / (2 * goal)).clamp(min=1)


@closed_form
def mse_maclaurin(x: Tensor, y: Tensor, num_features: Number, coefficients: Tensor, probabilities: Tensor) -> Tensor:
    """Mean squared error of random Maclaurin features (Kar and Karnick 2012) for ``sum_k a_k (x.y)^k``.

    ``[ sum_k a_k^2/p_k (|x|^2 |y|^2 + 2 (x.y)^2 - 2 sum_i x_i^2 y_i^2)^k - K^2 ] / m``; p_k: of drawing degree k.
    """
    q, s, lengths = _pairs(x, y)
    k = torch.arange(coefficients.shape[-1], dtype=torch.float64)
    weights = square_over(coefficients, probabilities, "mse_maclaurin")
    second = (weights * (lengths + 2 * q - 2 * s)[..., None] ** k).sum(-1)
    return (second - (coefficients * (x * y).sum(-1, keepdim=True) ** k).sum(-1).square()) / num_features


def _goal(x: Tensor, y: Tensor, target: Tensor, degree: Tensor, relative: bool) -> Tensor:
    return target.square() * ((x * y).sum(-1).square() ** degree if relative else 1.0)


def square_over(a: Tensor, p: Tensor, owner: str) -> Tensor:
    """``a_k^2 / p_k`` with ``0 / 0 = 0``; refuses a term that is never drawn and a p that is no law."""
    if a.shape != p.shape:
        raise BochnerError(f"The coefficients and probabilities of {owner} must be as many, got {a.shape}, {p.shape}.")
    if float(p.sum()) > 1 + 1e-6:
        raise BochnerError(f"The 'probabilities' of {owner} must have a sum <= 1, got {p.sum().item():.6g}.")
    if ((p == 0) & (a != 0)).any():
        raise BochnerError(f"The 'probabilities' of {owner} must be positive wherever a coefficient is not zero.")
    return torch.where(a == 0, 0.0, a.square() / torch.where(p > 0, p, 1.0))


class _Products(NamedTuple):
    """What the variance of a sketch depends on: ``(x.y)^2``, ``sum_i x_i^2 y_i^2`` and ``|x|^2 |y|^2``."""

    dot: Tensor
    same: Tensor
    lengths: Tensor


def _pairs(x: Tensor, y: Tensor) -> _Products:
    p = x * y
    return _Products(p.sum(-1).square(), p.square().sum(-1), x.square().sum(-1) * y.square().sum(-1))


def _sketch_mse(products: _Products, m: Tensor, n: Tensor) -> Tensor:
    first, second = _sketch_terms(products, n)
    twice = torch.where(m % 2 == 0, 2.0, 1.0)
    return (first / m + twice * second / m.square()).clamp(min=0)


def _sketch_terms(products: _Products, n: Tensor) -> tuple[Tensor, Tensor]:
    """The 1/m and the 1/m^2 coefficient of TensorSketch's variance."""
    q, s, lengths = products
    b, c = (lengths - s).clamp(min=0), q - s
    first = (q + b) ** n + (q + c) ** n - 2 * q**n
    return first, (q + b + c) ** n - (q + b) ** n - (q + c) ** n + q**n
