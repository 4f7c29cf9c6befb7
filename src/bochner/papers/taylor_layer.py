"""The unbiased Taylor-composition estimator of a layer `f(W x + b)`: one random power at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bochner._checks import (
    BochnerError,
    accumulation_dtype,
    finite,
    floating,
    lookup,
    make_generator,
    positive_int,
)
from bochner.maps.polynomial import draw_count_sketches, tensor_sketch, unit_rows
from bochner.theory import gelu_taylor, mse_tensor_sketch_matrix, optimal_law

TERMS = 200  # the longest series considered
TAIL = 1e-9  # what may be cut off it

TAYLOR: dict[str, Callable[[int], Tensor]] = {
    "gelu": gelu_taylor,
    "exp": lambda n: torch.exp(-torch.lgamma(torch.arange(n, dtype=torch.float64) + 1)),
}


class TaylorComposition:
    """An unbiased estimate of `f(W x + b)`: `a_0 + a_1 t + mean_r a_K/p_K phi_K(w) . phi_K(x)` with K ~ p, t = w.x + b.

    phi_k is a TensorSketch of degree k of `[x, 1]` and `[w, b]` with m features; the first two terms need none. Each of
    R `draws` has its own K and sketch. Unbiased for the series cut where its tail over the calibration data is below
    1e-9. Variance: `variance(x)`, exactly (eq. 57 of Lucyszyn 2025, problem 3, divided by R, less the exact terms). It
    grows like `exp(|w|^2 |x|^2)` for GELU: useful for short vectors only. Cost O(R (K (d + m log m) + m o)) per row.

    `weight` (o, d), `bias` (o,) or None. `activation`: one of `TAYLOR`, or a sequence of Taylor coefficients (then a
    polynomial). `calibration` (N, d): rows that fix the tail and the law, the optimal one: `p_k` proportional to
    `|a_k| sqrt(second moment)`, on the powers k >= 2 that occur. The geometric and Poisson laws of the document have a
    larger variance; they are in `bochner.theory`.

    >>> layer = TaylorComposition(torch.eye(2) / 2, None, "gelu", torch.randn(10, 2), draws=4, num_features=8)
    >>> layer(torch.zeros(1, 2))
    tensor([[0., 0.]])
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | Sequence[float],
        calibration: Tensor,
        *,
        draws: int = 16,
        num_features: int = 64,
        seed: int = 0,
    ) -> None:
        owner = type(self).__name__
        self.draws = positive_int(draws, "draws", owner)
        self.num_features = positive_int(num_features, "num_features", owner)
        w = finite(floating(weight, "weight", owner), "weight", owner).detach().double()
        x = finite(floating(calibration, "calibration", owner), "calibration", owner).detach().double()
        if w.ndim != 2 or x.ndim != 2 or x.shape[1] != w.shape[1]:
            raise BochnerError(
                f"The 'weight' of {owner} must be (o, d) and 'calibration' (N, d), got {tuple(w.shape)} and "
                f"{tuple(x.shape)}."
            )
        if bias is not None:  # one more weight, of a coordinate that is always 1
            b = finite(floating(bias, "bias", owner), "bias", owner).detach().double()
            w = torch.cat([w, b[:, None]], -1)
        self.weight = w
        x = self._input(x)
        self.coefficients = series_for(activation, float((x @ self.weight.mT).abs().max()), owner)
        self.probabilities = self._law(x)
        self.redraw_(seed)

    def redraw_(self, seed: int | None = None) -> TaylorComposition:
        """New indices and sketches; the law stays."""
        generator, p = make_generator(seed), self.probabilities
        drawn = torch.multinomial(p, self.draws, replacement=True, generator=generator).tolist() if p.any() else []
        width = self.weight.shape[1]
        self.sketches = [(k, draw_count_sketches(k, width, self.num_features, generator)) for k in drawn]
        return self

    def __call__(self, x: Tensor) -> Tensor:
        """The estimate of f(W x + b), (..., o), for x (..., d)."""
        y = self._input(x.to(accumulation_dtype(x.dtype)))
        w, a, p = (part.to(y.dtype) for part in (self.weight, self.coefficients, self.probabilities))
        out = a[0] + a[1] * (y @ w.mT) if len(a) > 1 else a[0].expand(*y.shape[:-1], len(w))
        u, log_x = unit_rows(y)
        v, log_w = unit_rows(w)
        typical = log_w.mean()  # lengths are split between the two sides so that neither overflows
        for k, sketch in self.sketches:
            slot, sign = sketch["slot"], sketch["sign"].to(y.dtype)
            phi_x = tensor_sketch(u, slot, sign, self.num_features) * (k * (log_x + typical)).exp()
            phi_w = tensor_sketch(v, slot, sign, self.num_features) * (k * (log_w - typical)).exp()
            out = out + phi_x @ (phi_w * (a[k] / (p[k] * self.draws))).mT
        return out.to(x.dtype)

    def variance(self, x: Tensor) -> Tensor:
        """The exact variance of each output, (N, o), for x (N, d): `[sum a_k^2/p_k E[sketch_k^2] - rest^2] / R`."""
        x = self._input(x.double())
        t = x @ self.weight.mT
        second, rest = torch.zeros_like(t), torch.zeros_like(t)
        for k in self.probabilities.nonzero().flatten().tolist():
            a, power = self.coefficients[k], t**k
            sketched = power.square() + mse_tensor_sketch_matrix(x, self.weight, self.num_features, k)
            second += a**2 / self.probabilities[k] * sketched
            rest += a * power
        return (second - rest.square()) / self.draws

    def _input(self, x: Tensor) -> Tensor:
        return x if x.shape[-1] == self.weight.shape[1] else torch.cat([x, torch.ones_like(x[..., :1])], -1)

    def _law(self, x: Tensor) -> Tensor:
        """Of the index: least variance on these rows."""
        a, w = self.coefficients, self.weight
        used = a != 0
        used[:2] = False
        if not used.any():
            return torch.zeros_like(a)
        rows, moments = x[:: max(1, len(x) // 256)], torch.ones_like(a)
        for k in used.nonzero().flatten().tolist():
            variance = mse_tensor_sketch_matrix(rows, w, self.num_features, k)
            moments[k] = ((rows @ w.mT) ** (2 * k) + variance).mean()
        if not torch.isfinite(moments).all():
            longest = float(rows.norm(dim=-1).max() * w.norm(dim=-1).max())
            raise BochnerError(
                f"Taylor composition is useless for this layer: at |w||x| = {longest:.4g} the variance of its sketched "
                "powers overflows double precision; use LinearizedLayer, or keep the layer."
            )
        p = optimal_law(torch.where(used, a, 0.0), moments)
        return p / p.sum()


def series_for(activation: str | Sequence[float], reach: float, owner: str) -> Tensor:
    """The Taylor coefficients of an activation, cut where the tail on |t| <= reach is below 1e-9."""
    if not isinstance(activation, str):
        if callable(activation) or not isinstance(activation, Sequence):
            raise BochnerError(
                f"The 'activation' of {owner} must be one of {sorted(TAYLOR)} or a sequence of Taylor coefficients: "
                "those of an arbitrary function are not known."
            )
        return torch.tensor([float(v) for v in activation], dtype=torch.float64)
    a = lookup(TAYLOR, activation, "Taylor series")(TERMS)
    k = torch.arange(TERMS, dtype=torch.float64)
    size = a.abs() * torch.exp(k * math.log(max(reach, 1e-300)))
    tail = size.flip(0).cumsum(0).flip(0)
    if tail[-10:].sum() > TAIL:
        raise BochnerError(
            f"The Taylor series of {activation!r} needs more than {TERMS} terms at |w.x + b| = {reach:.4g}; use "
            "LinearizedLayer."
        )
    return a[: max(int((tail > TAIL).sum()), 2)]
