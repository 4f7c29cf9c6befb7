"""Linearised feed-forward layers: `f(W x + b)` as one matrix times features of x, and two-layer blocks as one product.

1. The activation becomes a polynomial on the interval each unit's pre-activation takes on calibration data
   (`bochner.papers.polyfit`), in powers of `z = w.(x - mean)/r`, the centred and scaled pre-activation.
2. Degrees 0 and 1 are exact: a bias and a matrix. A degree k >= 2 is a TensorSketch of x with m_k features, whose
   products with the sketched weights estimate `z^k` without bias.
3. Everything that does not depend on x is one matrix. In a two-layer block it is multiplied by the second layer's
   weights beforehand, so that the hidden layer is never formed.

The variance of a sketched power is about `(|w||x|/r)^(2k)/m_k`, and on real layers |w||x| is ten to twenty times the
standard deviation of w.x: `LinearizedMLP.report` says whether it pays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

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
from bochner._timing import best_times
from bochner.maps.polynomial import TensorSketchFeatures
from bochner.moments import balancing_basis, floored_moment
from bochner.papers.polyfit import (
    METHODS,
    Activation,
    PolynomialFit,
    activation_function,
    fit_polynomial,
    second_derivative_sup,
    shift_monomials,
)
from bochner.projections import FullPrecisionModule
from bochner.theory import allocate_features, bernstein_bound, mse_tensor_sketch_matrix, tensor_sketch_bound

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


def calibrate_layer(
    weight: Tensor, bias: Tensor | None, calibration: Tensor, *, balance: bool = True, margin: float = 0.0
) -> Calibration:
    """Centre, balance and intervals from rows x (N, d), widened by `margin` times their width on both sides.

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
    low, high = low - margin * (high - low), high + margin * (high - low)
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

    `eps`: half of it for the squared bias and half for the variance, by Avron's bound, summed over the units, at every
    calibration row; the counts are the cheapest that reach it. The document's version spends eps on the bias alone,
    splits the variance evenly over the degrees and uses a bound that is false. The counts get very large: that is
    the finding, not a defect. `num_features`: the degree up to 8 and the split of this many features with the least
    expected error. `degree` fixes the degree in both.
    """
    owner = "plan_layer"
    one_of(method, "method", owner, METHODS)
    if (eps is None) == (num_features is None):
        raise BochnerError(f"Give {owner} either a target 'eps' or a budget 'num_features', not both or neither.")
    if degree is not None:
        positive_int(degree, "degree", owner)
    if eps is not None:
        return _plan_for_target(data, activation, method, degree, positive_float(eps, "eps", owner))
    budget = positive_int(num_features, "num_features", owner)
    some = data.preactivation[:: max(1, len(data.preactivation) // 512)]
    target = activation_function(activation)(some)
    samples = data.preactivation if method == "least_squares" else None
    plans = []
    for n in range(1, min(TRIED_DEGREE, budget + 1) + 1) if degree is None else [degree]:
        fit = fit_polynomial(activation, data.lower, data.upper, n, method=method, samples=samples)
        each = _variances(data, fit)
        counts = _split(each, budget)
        variance = sum(v / max(1, m) for v, m in zip(each, counts, strict=True))
        bias = float((fit(some) - target).square().mean(0).sum())
        plans.append((LayerPlan(n, tuple(counts), bias, variance), fit))
    if degree is not None and degree - 1 > budget:
        raise BochnerError(f"The 'num_features' of {owner} must be at least degree - 1 = {degree - 1}.")
    return min(plans, key=lambda plan: plan[0].bias + plan[0].variance)


def _plan_for_target(
    data: Calibration, activation: Activation, method: str, degree: int | None, eps: float
) -> tuple[LayerPlan, PolynomialFit]:
    # 1. The degree at which the squared polynomial error, summed over the units, is at most eps / 2.
    if degree is None and method == "bernstein":
        second = second_derivative_sup(activation, data.lower, data.upper)
        total = float(bernstein_bound(data.lower, data.upper, 1, second).square().sum())
        degree = max(1, math.ceil(math.sqrt(2 * total / eps)))
        if degree > MAX_DEGREE:
            raise BochnerError(
                f"eps={eps:g} needs a Bernstein polynomial of degree {degree}, more than {MAX_DEGREE}; use "
                "method='chebyshev', which needs far fewer, or a larger eps."
            )
    for n in range(1, MAX_DEGREE + 1) if degree is None else [degree]:
        # The guarantee is for the whole interval: a least-squares fit weighs all of it, not the samples.
        fit = fit_polynomial(activation, data.lower, data.upper, n, method=method)
        bias = float(fit.error.square().sum())
        if bias <= eps / 2:
            break
    else:
        raise BochnerError(
            f"eps={eps:g} is not reached: the squared error of the degree-{n} {method} fit is {bias:.3g} over all "
            f"units, above eps/2; use a higher degree (at most {MAX_DEGREE}) or a larger eps."
        )
    # 2. The counts of least sum with a variance of at most eps / 2 on every row.
    each = _variances(data, fit, bound=True)
    counts = [int(m) for m in allocate_features(torch.tensor(each), eps / 2)] if each else []
    return LayerPlan(n, tuple(counts), bias, sum(v / m for v, m in zip(each, counts, strict=True))), fit


def _variances(data: Calibration, fit: PolynomialFit, *, bound: bool = False) -> list[float]:
    """For k = 2 ... n, the variance of one feature summed over units: mean over rows, or Avron's bound at every row."""
    alpha, w, m = shift_monomials(fit.monomials(), data.beta), data.weight, 1024
    rows = data.rows[:: max(1, len(data.rows) // 128)]
    longest = data.rows[data.rows.square().sum(-1).argmax()]
    each = []
    for k in range(2, fit.degree + 1):
        v = tensor_sketch_bound(w, longest, 1, k) if bound else m * mse_tensor_sketch_matrix(rows, w, m, k).mean(0)
        each.append(float((alpha[:, k].square() * v).sum()))
    return each


def _split(variances: Sequence[float], budget: int) -> list[int]:
    """Counts proportional to the standard deviations, at least one each, `budget` in all."""
    root = [math.sqrt(v) for v in variances]
    counts = [max(1, math.floor(budget * r / (sum(root) or 1.0))) for r in root]
    if counts:
        counts[counts.index(max(counts))] += budget - sum(counts)
    return counts


class LinearizedLayer(FullPrecisionModule):
    """`f(W x + b)` as `L x + c + Phi psi(x)`: a polynomial of the pre-activation with sketched powers.

    Its mean over the sketches is the polynomial (`polynomial(x)`), its variance `variance(x)`, exactly; the error is
    the polynomial's plus that. Lucyszyn 2025, problem 3, eqs. (36)-(38), with the first two degrees exact.

    `data`: of `calibrate_layer(weight, bias, rows)`. `method`: of `fit_polynomial`. `num_features` (256 unless `eps` is
    given): the budget of sketch features; `eps`: a target for the total squared error instead; see `plan_layer`.

    >>> data = calibrate_layer(torch.eye(3), None, torch.randn(50, 3))
    >>> LinearizedLayer(data, "gelu", num_features=64)(torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """

    mean: Tensor
    basis: Tensor
    linear: Tensor
    offset: Tensor
    matrix: Tensor
    weight: Tensor
    alpha: Tensor

    def __init__(
        self,
        data: Calibration,
        activation: Activation,
        *,
        method: str = "chebyshev",
        degree: int | None = None,
        num_features: int | None = None,
        eps: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        budget = 256 if num_features is None and eps is None else num_features
        self.plan, self.fit = plan_layer(data, activation, method=method, degree=degree, num_features=budget, eps=eps)
        alpha, generator = shift_monomials(self.fit.monomials(), data.beta), make_generator(seed)
        self.maps = nn.ModuleList(
            TensorSketchFeatures(len(data.mean), m, degree=k, seed=None, generator=generator)
            for k, m in enumerate(self.plan.counts, start=2)
        )
        linear = alpha[:, 1, None] * (data.weight @ data.basis)
        parts = {"mean": data.mean, "basis": data.basis, "linear": linear, "offset": alpha[:, 0] - linear @ data.mean}
        parts |= {"matrix": self._matrix(data.weight, alpha), "weight": data.weight, "alpha": alpha}
        for name, value in parts.items():
            self.register_buffer(name, value.float())

    def forward(self, x: Tensor) -> Tensor:
        """The estimate of f(W x + b), (..., o), for x (..., d)."""
        y = x.to(accumulation_dtype(x.dtype))
        out = y @ self.linear.to(y.dtype).mT + self.offset.to(y.dtype)
        return (out + self.sketches(y) @ self.matrix.to(y.dtype).mT).to(x.dtype)

    def sketches(self, x: Tensor) -> Tensor:
        """Features (..., sum m_k) of x (..., d): rows centred and balanced, then one TensorSketch for each degree."""
        y = self._rows(x)
        flat = y.reshape(-1, y.shape[-1])
        parts = [phi.prepare("query")(flat).dense() for phi in self.maps]  # type: ignore[operator]
        return torch.cat([flat[:, :0], *parts], dim=-1).reshape(*y.shape[:-1], -1 if parts else 0)

    @torch.no_grad()
    def polynomial(self, x: Tensor) -> Tensor:
        """The mean of the estimate over its sketches, (..., o), in float64."""
        z = self._rows(x.double()) @ self.weight.double().mT
        total = torch.zeros_like(z)
        for k in range(self.plan.degree, -1, -1):
            total = total * z + self.alpha[:, k].double()
        return total

    @torch.no_grad()
    def variance(self, x: Tensor) -> Tensor:
        """The exact variance of each output over its sketches, (N, o), for x (N, d)."""
        y, w = self._rows(x.double()), self.weight.double()
        total = torch.zeros(len(y), len(w), dtype=torch.float64, device=y.device)
        for k, m in enumerate(self.plan.counts, start=2):
            total += self.alpha[:, k].double().square() * mse_tensor_sketch_matrix(y, w, m, k)
        return total

    @torch.no_grad()
    def redraw_(self, seed: int | None = None) -> LinearizedLayer:
        """New sketches in place; the polynomial stays."""
        generator = make_generator(seed)
        for phi in self.maps:
            phi.redraw_(generator=generator)  # type: ignore[operator]
        self.matrix.copy_(self._matrix(self.weight.double(), self.alpha.double()))
        return self

    def _matrix(self, weight: Tensor, alpha: Tensor) -> Tensor:
        """`[alpha_2 phi_2(w), ..., alpha_n phi_n(w)]`, (o, sum m_k), in float64."""
        parts = [
            alpha[:, k, None] * phi.prepare("key")(weight).dense()  # type: ignore[operator]
            for k, phi in enumerate(self.maps, start=2)
        ]
        return torch.cat([weight[:, :0], *parts], dim=-1)

    def _rows(self, x: Tensor) -> Tensor:
        return (x - self.mean.to(x.dtype)) @ self.basis.to(x.dtype).mT


class MLPReport(NamedTuple):
    """What a linearised block costs and how far off it is, on rows it was not fitted to.

    `error`: root of the squared error over the variance of the exact output: 1 is as bad as its mean. `memory`: numbers
    stored, over the block's. `speed`: rows per second, over the block's, measured in one run.
    """

    error: float
    memory: float
    speed: float


class LinearizedMLP(FullPrecisionModule):
    """A two-layer block `W2 f(W1 x + b1) + b2` as one product `A [x, psi(x)] + c`; the hidden layer is never formed.

    W2 is multiplied into the linearised first layer; `method`, `degree` and `num_features` are those of it.

    >>> first, second = nn.Linear(4, 16), nn.Linear(16, 4)
    >>> block = LinearizedMLP(first, "gelu", second, torch.randn(200, 4), num_features=32)
    >>> block(torch.zeros(3, 4)).shape
    torch.Size([3, 4])
    """

    matrix: Tensor
    offset: Tensor

    def __init__(
        self,
        first: nn.Linear,
        activation: Activation,
        second: nn.Linear,
        calibration: Tensor,
        *,
        method: str = "chebyshev",
        degree: int | None = None,
        num_features: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check_block(first, second, type(self).__name__)
        data = calibrate_layer(first.weight, first.bias, calibration)
        hidden = LinearizedLayer(data, activation, method=method, degree=degree, num_features=num_features, seed=seed)
        self.plan, self.hidden = hidden.plan, hidden
        w2 = second.weight.detach().double().cpu()
        matrix = w2 @ torch.cat([hidden.linear, hidden.matrix], dim=-1).double()
        offset = w2 @ hidden.offset.double()
        offset += 0 if second.bias is None else second.bias.detach().double().cpu()
        for name in ("linear", "offset", "matrix", "weight", "alpha"):  # the block needs the sketches alone
            setattr(hidden, name, None)
        self.register_buffer("matrix", matrix.float())
        self.register_buffer("offset", offset.float())

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) to (..., v)."""
        y = x.to(accumulation_dtype(x.dtype))
        y = torch.cat([y, self.hidden.sketches(y)], dim=-1)
        return nn.functional.linear(y, self.matrix.to(y.dtype), self.offset.to(y.dtype)).to(x.dtype)

    @torch.no_grad()
    def report(self, first: nn.Linear, activation: Activation, second: nn.Linear, x: Tensor) -> MLPReport:
        """Error, memory and speed against the block itself, on rows x (N, d)."""
        f = activation_function(activation)
        x = x.detach().reshape(-1, first.in_features)
        exact = block_output(first, activation, second, x)
        rows = x.to(first.weight.dtype)
        error = (self(rows).double() - exact).square().sum() / (exact - exact.mean(0)).square().sum()
        ours = sum(b.numel() for b in self.buffers())
        theirs = sum(p.numel() for layer in (first, second) for p in layer.parameters())
        seconds = best_times({"exact": lambda: second(f(first(rows))), "ours": lambda: self(rows)}, repeats=5)
        return MLPReport(math.sqrt(float(error)), ours / theirs, seconds["exact"] / seconds["ours"])


@torch.no_grad()
def block_output(first: nn.Linear, activation: Activation, second: nn.Linear, x: Tensor) -> Tensor:
    """`W2 f(W1 x + b1) + b2` in float64."""
    f, linear = activation_function(activation), nn.functional.linear
    weights = [(m.weight.double(), None if m.bias is None else m.bias.double()) for m in (first, second)]
    return linear(f(linear(x.double(), *weights[0])), *weights[1])


def _check_block(first: Any, second: Any, owner: str) -> None:
    for layer, name in ((first, "first"), (second, "second")):
        if not isinstance(layer, nn.Linear):
            raise BochnerError(f"The {name!r} layer of {owner} must be an nn.Linear, got {type(layer).__name__}.")
    if first.out_features != second.in_features:
        raise BochnerError(
            f"The layers of {owner} do not fit: the first has {first.out_features} outputs, the second "
            f"{second.in_features} inputs."
        )
