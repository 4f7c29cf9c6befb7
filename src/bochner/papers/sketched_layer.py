"""Linearised feed-forward layers: `f(W x + b)` as one matrix times features of x, and two-layer blocks as one product.

1. The activation becomes a polynomial on the interval each unit's pre-activation takes on calibration data
   (`bochner.papers.polyfit`), in powers of `z = w.(x - mean)/r`, the centred and scaled pre-activation.
2. Degrees 0 and 1 are exact: a bias and a matrix. A degree k >= 2 is a TensorSketch of x with m_k features, whose
   products with the sketched weights estimate `z^k` without bias.
3. Everything that does not depend on x is one matrix. In a two-layer block it is multiplied by the second layer's
   weights beforehand, so that the hidden layer is never formed.

The variance of a sketched power is about `(|w||x|/r)^(2k)/m_k`, and on real layers |w||x| is ten to twenty times the
standard deviation of w.x: `benchmarks/feedforward.py` says whether it pays.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bochner._checks import (
    BochnerError,
    accumulation_dtype,
    finite,
    floating,
    make_generator,
    one_of,
    positive_float,
    positive_int,
)
from bochner.maps.polynomial import TensorSketchFeatures
from bochner.moments import balancing_basis, floored_moment
from bochner.papers.polyfit import (
    METHODS,
    Activation,
    PolynomialFit,
    activation_function,
    fit_polynomial,
    shift_monomials,
)
from bochner.theory import allocate_features, mse_tensor_sketch_matrix, tensor_sketch_bound

MAX_DEGREE = 64  # beyond it no sketch is affordable and powers stop being usable
TRIED_DEGREE = 8  # the largest that a plan for a budget tries


class Calibration(NamedTuple):
    """What calibration data fixes: centred, balanced rows and weights, and the interval of every unit.

    `z = weight . row` is the pre-activation, centred at its mean and divided by half the interval's width; the local
    variable of the interval is `theta = z + beta`.
    """

    mean: Tensor  # (d,)
    basis: Tensor  # (d, d), the M of x.w = (M x).(M^-1 w)
    rows: Tensor  # (N, d)
    weight: Tensor  # (o, d)
    lower: Tensor  # (o,)
    upper: Tensor
    beta: Tensor
    preactivation: Tensor  # (N, o)


class LayerPlan(NamedTuple):
    """Degree n, the counts m_2 ... m_n, and the error they are expected to have, summed over the units.

    `bias`: squared polynomial error. `variance`: of the sketches. In a plan for `eps` both are upper bounds over the
    calibration data, at most eps/2 each; in a plan for a budget both are means over it.
    """

    degree: int
    counts: tuple[int, ...]
    bias: float
    variance: float

    @property
    def total(self) -> int:
        return sum(self.counts)


def calibrate_layer(weight: Tensor, bias: Tensor | None, calibration: Tensor, *, balance: bool = True) -> Calibration:
    """Centre, balance and intervals from rows x (N, d).

    `w.x = (M^-1 w).(M x)` for any M; the balancing one equalises the second moments of rows and weights and makes the
    product of their lengths, which is what sketches pay for, as small as it gets.
    """
    owner = "calibrate_layer"
    w = finite(floating(weight, "weight", owner), "weight", owner).detach().double().cpu()
    x = finite(floating(calibration, "calibration", owner), "calibration", owner).detach().double().cpu()
    if w.ndim != 2 or x.shape[-1] != w.shape[1]:
        raise BochnerError(
            f"The 'weight' of {owner} must be (o, d) and 'calibration' (N, d), got {tuple(w.shape)} and "
            f"{tuple(x.shape)}."
        )
    x = x.reshape(-1, x.shape[-1])
    b = torch.zeros(len(w), dtype=torch.float64) if bias is None else bias.detach().double().cpu()
    t = x @ w.mT + b
    low, high = t.amin(0), t.amax(0)
    still = high - low <= 1e-9 * (1 + high.abs())
    if still.any():
        i = int(still.nonzero()[0])
        raise BochnerError(
            f"The interval of unit {i} has zero width: its pre-activation is {low[i].item():.6g} on all {len(x)} "
            "calibration rows; give rows that vary, or drop the unit."
        )
    middle, half = (low + high) / 2, (high - low) / 2
    mean = x.mean(0)
    rows, scaled = x - mean, w / half[:, None]
    basis = torch.eye(len(mean), dtype=torch.float64)
    if balance:
        m, inverse = balancing_basis(floored_moment(rows[None]), floored_moment(scaled[None]))
        basis, scaled = m[0], scaled @ inverse[0].mT
    return Calibration(mean, basis, rows @ basis.mT, scaled, low, high, (w @ mean + b - middle) / half, t)


def plan_layer(
    data: Calibration,
    activation: Activation,
    *,
    method: str = "chebyshev",
    degree: int | None = None,
    num_features: int | None = None,
    eps: float | None = None,
) -> tuple[LayerPlan, PolynomialFit]:
    """Degree and feature counts for a target `eps` or a budget `num_features`: Algorithm 1, its constants corrected.

    `eps`: half of it for the squared bias, by the measured error of the least degree that has it, and half for the
    variance, by Avron's bound, summed over the units, at every calibration row; the counts are the cheapest that reach
    it. The document's version spends eps on the bias alone, splits the variance evenly over the degrees and uses a
    bound that is false. The counts get very large: that is the finding, not a defect. `num_features`: the degree up to
    8 and the split of this many features with the least expected error. `degree` fixes the degree in both.
    """
    owner = "plan_layer"
    one_of(method, "method", owner, METHODS)
    if (eps is None) == (num_features is None):
        raise BochnerError(f"Give {owner} either a target 'eps' or a budget 'num_features', not both or neither.")
    budget = 0 if num_features is None else positive_int(num_features, "num_features", owner)
    target = math.nan if eps is None else positive_float(eps, "eps", owner)
    most = MAX_DEGREE if eps is not None else min(TRIED_DEGREE, budget + 1)
    degrees = range(1, most + 1) if degree is None else [positive_int(degree, "degree", owner)]
    if eps is None and degrees[0] - 1 > budget:
        raise BochnerError(f"The 'num_features' of {owner} must be at least degree - 1 = {degrees[0] - 1}.")
    # A guarantee is for the whole interval: a least-squares fit for a target weighs all of it, not the samples.
    samples = data.preactivation if method == "least_squares" and eps is None else None
    some = data.preactivation[:: max(1, len(data.preactivation) // 512)]
    plans = []
    for n in degrees:
        fit = fit_polynomial(activation, data.lower, data.upper, n, method=method, samples=samples)
        each = _variances(data, fit, bound=eps is not None)
        if eps is None:
            bias = float((fit(some) - activation_function(activation)(some)).square().mean(0).sum())
            counts = _split(each, budget)
        else:
            bias = float(fit.error.square().sum())
            if bias > target / 2:
                continue
            counts = [int(m) for m in allocate_features(torch.tensor(each), target / 2)] if each else []
        variance = sum(v / max(1, m) for v, m in zip(each, counts, strict=True))
        plans.append((LayerPlan(n, tuple(counts), bias, variance), fit))
        if eps is not None:
            break
    if not plans:
        raise BochnerError(
            f"eps={eps:g} is not reached: the squared error of the degree-{n} {method} fit is {bias:.3g} over all "
            f"units, above eps/2; use another method, a higher degree (at most {MAX_DEGREE}) or a larger eps."
        )
    return min(plans, key=lambda plan: plan[0].bias + plan[0].variance)


def _variances(data: Calibration, fit: PolynomialFit, *, bound: bool) -> list[float]:
    """For k = 2 ... n, the variance of one feature summed over units: mean over rows, or Avron's bound at every row."""
    alpha, w, m = shift_monomials(fit.monomials(), data.beta), data.weight, 1024
    rows = data.rows[:: max(1, len(data.rows) // 128)]
    longest = data.rows[data.rows.square().sum(-1).argmax()]
    each = []
    for k in range(2, fit.degree + 1):
        v = tensor_sketch_bound(w, longest, 1, k) if bound else m * mse_tensor_sketch_matrix(rows, w, m, k).mean(0)
        each.append(float((alpha[:, k].square() * v).sum()))
    return each


def _split(variances: list[float], budget: int) -> list[int]:
    """Counts proportional to the standard deviations, at least one each, `budget` in all."""
    root = [math.sqrt(v) for v in variances]
    counts = [max(1, math.floor(budget * r / (sum(root) or 1.0))) for r in root]
    if counts:
        counts[counts.index(max(counts))] += budget - sum(counts)
    return counts


class LinearizedLayer:
    """`f(W x + b)` as `A [x, psi(x)] + c`: a polynomial of the pre-activation with sketched powers psi.

    Its mean over the sketches is the polynomial (`polynomial(x)`), its variance `variance(x)`, exactly; the error is
    the polynomial's plus that. Lucyszyn 2025, problem 3, eqs. (36)-(38), with the first two degrees exact.

    `data`: of `calibrate_layer(weight, bias, rows)`. `second`: a linear layer that follows, multiplied into A and c, so
    that the hidden layer is never formed. `method`: of `fit_polynomial`. `num_features` (256 unless `eps` is given):
    the budget of sketch features; `eps`: a target for the total squared error instead; see `plan_layer`.

    >>> data = calibrate_layer(torch.eye(3), None, torch.randn(50, 3))
    >>> LinearizedLayer(data, "gelu", num_features=64)(torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        data: Calibration,
        activation: Activation,
        *,
        second: nn.Linear | None = None,
        method: str = "chebyshev",
        degree: int | None = None,
        num_features: int | None = None,
        eps: float | None = None,
        seed: int = 0,
    ) -> None:
        if second is not None and second.in_features != len(data.weight):
            raise BochnerError(
                f"The layers do not fit: the first has {len(data.weight)} outputs, the second {second.in_features} "
                "inputs."
            )
        budget = 256 if num_features is None and eps is None else num_features
        self.plan, self.fit = plan_layer(data, activation, method=method, degree=degree, num_features=budget, eps=eps)
        self.alpha = shift_monomials(self.fit.monomials(), data.beta)
        self.mean, self.basis, self.weight, self.second = data.mean, data.basis, data.weight, second
        self.redraw_(seed)

    @torch.no_grad()
    def redraw_(self, seed: int | None = None) -> LinearizedLayer:
        """New sketches; the polynomial stays."""
        generator, d = make_generator(seed), len(self.mean)
        self.maps = [
            TensorSketchFeatures(d, m, degree=k, seed=None, generator=generator)
            for k, m in enumerate(self.plan.counts, start=2)
        ]
        linear = self.alpha[:, 1, None] * (self.weight @ self.basis)
        powers = [
            self.alpha[:, k, None] * phi.prepare("key")(self.weight).dense() for k, phi in enumerate(self.maps, start=2)
        ]
        matrix, offset = torch.cat([linear, *powers], -1), self.alpha[:, 0] - linear @ self.mean
        if self.second is not None:
            w = self.second.weight.detach().double().cpu()
            b = 0.0 if self.second.bias is None else self.second.bias.detach().double().cpu()
            matrix, offset = w @ matrix, w @ offset + b
        self.matrix, self.offset = matrix, offset
        self._cast: dict[torch.dtype, list[Tensor]] = {}
        return self

    def __call__(self, x: Tensor) -> Tensor:
        """The estimate, (..., o), for x (..., d)."""
        dtype = accumulation_dtype(x.dtype)
        if dtype not in self._cast:
            self._cast[dtype] = [part.to(dtype) for part in (self.mean, self.basis, self.matrix, self.offset)]
        mean, basis, matrix, offset = self._cast[dtype]
        flat = x.to(dtype).reshape(-1, x.shape[-1])
        rows = (flat - mean) @ basis.mT
        features = torch.cat([flat, *(phi.prepare("query")(rows).dense() for phi in self.maps)], -1)
        return nn.functional.linear(features, matrix, offset).reshape(*x.shape[:-1], -1).to(x.dtype)

    def polynomial(self, x: Tensor) -> Tensor:
        """The mean of the estimate of the first layer over its sketches, (..., o), in float64."""
        z = (x.double() - self.mean) @ self.basis.mT @ self.weight.mT
        total = torch.zeros_like(z)
        for k in range(self.plan.degree, -1, -1):
            total = total * z + self.alpha[:, k]
        return total

    def variance(self, x: Tensor) -> Tensor:
        """The exact variance of each output of the first layer over its sketches, (N, o), for x (N, d)."""
        y = (x.double() - self.mean) @ self.basis.mT
        total = torch.zeros(len(y), len(self.weight), dtype=torch.float64)
        for k, m in enumerate(self.plan.counts, start=2):
            total += self.alpha[:, k].square() * mse_tensor_sketch_matrix(y, self.weight, m, k)
        return total
