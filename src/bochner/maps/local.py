"""Local masks as features of positions, and their product with any attention map.

A mask is a kernel `k(p - q)` of positions in R^d (a token's index, a pixel's row and column, or the queries
themselves), estimated from frequencies w as `mean c(w) cos(w . (p - q))`: the features of a query are
`sqrt|c| [cos w.p, sin w.p]`, those of a key the same times the sign of c. The Hadamard rule multiplies features:
`ProductFeatures(mask, attention)` estimates `k(p - q) K(x, y)`, still in linear time.

| name             | mask                                  | frequencies             | m MSE                          |
|------------------|---------------------------------------|-------------------------|--------------------------------|
| `local_l1`       | `P(|r + s g|_1 <= delta)`, g ~ N(0,I) | importance-sampled      | at most E[c^2], grows fast in d |
| `local_laplace`  | `exp(-|r|_1 / delta)`                 | Cauchy / delta, exactly | `(1 - k^2) / 2`                |
| `local_gaussian` | `exp(-|r|^2 / (2 delta^2))`           | normal / delta, exactly | `(1 - k^2)^2 / 2` (iid)        |

The indicator of an L1 ball is discontinuous, its spectrum is not integrable and no density is proportional to it;
`local_l1` therefore estimates the mollified indicator. Lucyszyn 2025, problem 4, with its (69)-(74) corrected.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Generator, Tensor

from bochner._checks import BochnerError, floating, positive_float
from bochner.maps.base import FeatureMap, Features, constant_scale
from bochner.maps.exponential import ExponentialFeatures, TrigFeatures
from bochner.maps.generalized import GeneralizedFeatures
from bochner.maps.polynomial import SumPolyFeatures
from bochner.projections import DenseProjection, Projection, gaussian, make_projection

gauss_legendre = lru_cache(np.polynomial.legendre.leggauss)
SCALES = 8  # Gaussians in the proposal of the L1 ball


class CauchyProjection(DenseProjection):
    """Independent standard Cauchy entries: the spectral law of `exp(-|r|_1)`."""

    def _rows(self, g: Generator) -> Tensor:
        u = torch.rand(self.num_features, self.dim, dtype=torch.float64, generator=g, device="cpu")
        return torch.tan(math.pi * (u - 0.5))


class L1BallProjection(DenseProjection):
    """Frequencies for the mollified unit L1 ball and their signed importance `c(w) = k_hat_s(w) / ((2 pi)^d p(w))`.

    The proposal p is a mixture of isotropic Gaussians, with scales in geometric progression from the width of the
    spectrum's core, about (d + 1)/2, to 1/s, where the mollifier ends it: for 1/s up to ten E[c^2] is at most twice its
    least value.
    """

    importance: Tensor

    def __init__(self, dim: int, num_features: int, *, smooth: float, **options: Any) -> None:
        self.smooth = smooth  # the draw, in the base class's constructor, needs it
        super().__init__(dim, num_features, **options)

    def _draw(self, g: Generator) -> dict[str, Tensor]:
        m, d = self.num_features, self.dim
        top = 1 / self.smooth
        sigma = torch.logspace(math.log(min((d + 1) / 2, top)), math.log(top), SCALES, base=math.e, dtype=torch.float64)
        which = torch.randint(SCALES, (m,), generator=g, device="cpu")
        # The stored float32 frequency is the one that gets its weight.
        w = (gaussian(m, d, g=g) * sigma[which, None]).float().double()
        square = w.square().sum(-1, keepdim=True)
        log_p = -0.5 * square / sigma**2 - d * sigma.log() - 0.5 * d * math.log(2 * math.pi)
        log_p = log_p.logsumexp(-1) - math.log(SCALES)
        decay = -0.5 * self.smooth**2 * square[:, 0] - d * math.log(2 * math.pi) - log_p
        return {"weight": w, "importance": l1_ball_spectrum(w) * decay.exp()}


class LocalFeatures(FeatureMap):
    """Base of the local masks: `[cos w.p, sin w.p] sqrt(|c| / m)`, signed; `feature_dim` is 2 m.

    `dim`: d, the number of position coordinates. `delta`: the radius, in units of position.
    """

    mask: ClassVar[str]
    projection: Any

    def __init__(
        self,
        dim: int,
        num_features: int,
        law: Callable[..., Projection],
        *,
        delta: float = 1.0,
        num_heads: int | None = None,
        seed: int | None = 0,
        generator: Generator | None = None,
    ) -> None:
        super().__init__(dim, num_features, num_heads=num_heads, kernel=self.mask)
        self.delta = positive_float(delta, "delta", type(self).__name__)
        self.feature_dim = 2 * num_features
        self.projection = law(dim, num_features, num_heads=num_heads, seed=seed, generator=generator)

    def _features(self, x: Tensor, role: str) -> Features:
        t = self.projection(x / self.delta)
        return Features(torch.cat([t.cos(), t.sin()], dim=-1), constant_scale(x, self.num_features))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, delta={self.delta}"


class LocalLaplaceFeatures(LocalFeatures):
    """The mask `exp(-|p - q|_1 / delta)`, from Cauchy frequencies.

    Unbiased, signed. MSE `(1 - k^2) / (2 m)`: `theory.mse_local_laplace`. O(m d) per row. Rahimi and Recht 2007.

    >>> phi = LocalLaplaceFeatures(dim=1, num_features=8, delta=4.0)
    >>> phi.kernel_matrix(torch.zeros(1, 1), torch.tensor([[4.0]]))
    tensor([[0.3679]])
    """

    mask = "local_laplace"

    def __init__(self, dim: int, num_features: int, **options: Any) -> None:
        super().__init__(dim, num_features, CauchyProjection, **options)

    def kernel_matrix(self, x: Tensor, y: Tensor) -> Tensor:
        return (-_differences(x, y).abs().sum(-1) / self.delta).exp()


class LocalGaussianFeatures(LocalFeatures):
    """The mask `exp(-|p - q|^2 / (2 delta^2))`, from normal frequencies of any projection.

    Unbiased, signed. MSE with iid frequencies `(1 - k^2)^2 / (2 m)`: `theory.mse_local_gaussian`; orthogonal ones, the
    default, are below it. O(m d) per row. Rahimi and Recht 2007.

    >>> phi = LocalGaussianFeatures(dim=2, num_features=8, delta=2.0)
    >>> phi.kernel_matrix(torch.zeros(1, 2), torch.tensor([[2.0, 2.0]]))
    tensor([[0.3679]])
    """

    mask = "local_gaussian"

    def __init__(
        self, dim: int, num_features: int, *, projection: str | Projection = "orthogonal", **options: Any
    ) -> None:
        super().__init__(dim, num_features, partial(make_projection, projection), **options)

    def kernel_matrix(self, x: Tensor, y: Tensor) -> Tensor:
        return (-_differences(x, y).square().sum(-1) / (2 * self.delta**2)).exp()


class LocalL1Features(LocalFeatures):
    """The mollified L1-ball mask `k(r) = P(|r + s g|_1 <= delta)`, g ~ N(0, I): a step of width s.

    Unbiased for this mask, signed. MSE at most `E[c^2] / m` (`error_bound`), which grows with delta / s and fast with
    d. O(m d) per row; the draw costs one (2d + 1)-dimensional matrix exponential per frequency. Lucyszyn 2025,
    problem 4, eqs. (69)-(74), corrected. `smooth`: s, by default delta / (2 d + 2), at which k(0) is about 1.

    >>> phi = LocalL1Features(dim=1, num_features=8, delta=4.0, smooth=0.5)
    >>> phi.kernel_matrix(torch.zeros(1, 1), torch.tensor([[0.0], [4.0]]))
    tensor([[1.0000, 0.5000]])
    """

    mask = "local_l1"

    def __init__(
        self, dim: int, num_features: int, *, delta: float = 1.0, smooth: float | None = None, **options: Any
    ) -> None:
        width = positive_float(delta, "delta", type(self).__name__) / (2 * dim + 2)
        self.smooth = width if smooth is None else positive_float(smooth, "smooth", type(self).__name__)
        law = partial(L1BallProjection, smooth=self.smooth / delta)
        super().__init__(dim, num_features, law, delta=delta, **options)

    def _features(self, x: Tensor, role: str) -> Features:
        t = self.projection(x / self.delta)
        c = self.projection.importance
        size = c.detach().abs().amax().sqrt()
        amplitude = self._spread(c.abs().sqrt() / size * (c.sign() if role == "key" else 1), x.dtype)
        log_scale = constant_scale(x, self.num_features) + size.log().to(x.dtype)
        return Features(torch.cat([t.cos() * amplitude, t.sin() * amplitude], dim=-1), log_scale)

    def error_bound(self) -> float:
        """An upper bound of the root mean squared error at any pair, `sqrt(E[c^2] / m)`."""
        return float(self.projection.importance.square().mean().sqrt()) * self.num_features**-0.5

    def kernel_matrix(self, x: Tensor, y: Tensor) -> Tensor:
        return mollified_l1_ball(_differences(x, y), self.delta, self.smooth)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, smooth={self.smooth}"


class ProductFeatures(FeatureMap):
    """The Hadamard rule: a map for `k(p, q) K(x, y)` from a `mask` of positions and an `attention` map of vectors.

    The input is the row `[x, p]`: `with_positions(q, p)` scales and joins them; then call
    `linear_attention(..., scale=1.0)`, since a default scale would shrink the positions.

    Features are multiplied one by one, `sqrt(m) phi_k(x) chi_k(p)`, which needs maps whose every feature is an estimate
    by itself: softmax, trigonometric, generalised, `sum_poly` and local maps. Both are redrawn from one `seed`, so that
    they are independent. Unbiased and positive when both maps are. Lucyszyn 2025, problem 4, eqs. (79)-(82).

    >>> mask = LocalGaussianFeatures(dim=1, num_features=16, delta=8.0)
    >>> phi = ProductFeatures(mask, TrigFeatures(dim=4, num_features=16))
    >>> phi.dim, phi.feature_dim
    (5, 64)
    """

    def __init__(
        self, mask: FeatureMap, attention: FeatureMap, *, seed: int | None = 0, generator: Generator | None = None
    ) -> None:
        owner = type(self).__name__
        for value, name in ((mask, "mask"), (attention, "attention")):
            if not isinstance(value, FeatureMap):
                got = type(value).__name__
                raise BochnerError(f"The {name!r} of {owner} must be a FeatureMap, got {got}; see bochner.feature_map.")
            if not isinstance(value, SINGLE) or value.feature_dim % value.num_features:
                raise BochnerError(
                    f"{owner} cannot pair the features of {type(value).__name__}, which estimate the kernel only "
                    "together; take a softmax, trigonometric, generalised, sum_poly or local map."
                )
        heads = {m.num_heads for m in (mask, attention)} - {None}
        m, n = mask.num_features, attention.num_features
        if len(heads) > 1 or m != n:
            raise BochnerError(
                f"The maps of {owner} must have the same num_heads and num_features, got {sorted(heads, key=str)} "
                f"heads, {m} for the mask and {n} for attention."
            )
        super().__init__(attention.dim + mask.dim, m, num_heads=heads.pop() if heads else None, kernel="product")
        self.mask, self.attention = mask, attention
        self.unbiased = mask.unbiased and attention.unbiased  # type: ignore[misc]
        self.positive = mask.positive and attention.positive
        self.feature_dim = mask.feature_dim * attention.feature_dim // m
        self.redraw_(seed, generator=generator)

    def _redraw(self, g: Generator) -> None:
        self.mask.redraw_(generator=g)
        self.attention.redraw_(generator=g)

    def prepare(self, role: str) -> Callable[[Tensor], Features]:
        attend, mask = self.attention.prepare(role), self.mask.prepare(role)
        d, m = self.attention.dim, self.num_features

        def features(x: Tensor) -> Features:
            a, p = attend(x[..., :d]), mask(x[..., d:])
            # A map's features are blocks of m (cosines, then sines): every block with every block, index by index.
            left = p.values.unflatten(-1, (-1, 1, m))
            right = a.values.unflatten(-1, (1, -1, m))
            return Features((left * right).flatten(-3), a.log_scale + p.log_scale + 0.5 * math.log(m))

        return features

    def kernel_matrix(self, x: Tensor, y: Tensor) -> Tensor:
        d = self.attention.dim
        mask = self.mask.kernel_matrix(x[..., d:], y[..., d:])
        return mask * self.attention.kernel_matrix(x[..., :d], y[..., :d])

    def _calibrate(self, q: Tensor, k: Tensor) -> None:
        d = self.attention.dim
        for part, x, y in ((self.attention, q[..., :d], k[..., :d]), (self.mask, q[..., d:], k[..., d:])):
            if part.num_heads is None:
                x, y = x.flatten(0, 1).unsqueeze(0), y.flatten(0, 1).unsqueeze(0)
            part._calibrate(x, y)


# Maps whose features are blocks of m, each feature of a block being an estimate, or half of one, by itself.
SINGLE = (ExponentialFeatures, TrigFeatures, GeneralizedFeatures, SumPolyFeatures, LocalFeatures)


def with_positions(x: Tensor, positions: Tensor, *, scale: float | None = None) -> Tensor:
    """Rows `[x scale^(1/2), p]` for `ProductFeatures`; x (..., n, d), positions (n,) or (..., n, d_p).

    `scale`: of the dot products, d^-1/2 unless given, as in attention.
    """
    x, positions = floating(x, "x", "with_positions"), floating(positions, "positions", "with_positions")
    if positions.ndim == 1:
        positions = positions.unsqueeze(-1)
    if positions.ndim > x.ndim or positions.shape[-2] != x.shape[-2]:
        raise BochnerError(
            f"The 'positions' of with_positions must have shape (n,) or (..., n, d_p) with n = {x.shape[-2]}, got "
            f"{tuple(positions.shape)}."
        )
    scale = x.shape[-1] ** -0.5 if scale is None else positive_float(scale, "scale", "with_positions")
    positions = positions.to(x.dtype).expand(*x.shape[:-1], positions.shape[-1])
    return torch.cat([x * math.sqrt(scale), positions], dim=-1)


def l1_ball_spectrum(w: Tensor) -> Tensor:
    """`k_hat(w)`, the integral of exp(-i w.r) over |r|_1 <= 1, for w (..., d) in float64: (...).

    It is the inverse Laplace transform at 1 of `(1/s) prod_j 2s/(s^2 + w_j^2)`, read off the chain of oscillators with
    that transfer function, `u_j' = 2 u_(j-1) - w_j v_j`, `v_j' = w_j u_j`, driven by a constant: one matrix
    exponential, in which coinciding frequencies are nothing special.
    """
    w = w.to(torch.float64)
    d = w.shape[-1]
    a = torch.zeros(*w.shape[:-1], 2 * d + 1, 2 * d + 1, dtype=torch.float64, device=w.device)
    for j in range(d):
        u = 2 * j + 1
        a[..., u, max(u - 2, 0)] = 2
        a[..., u, u + 1] = -w[..., j]
        a[..., u + 1, u] = w[..., j]
    return torch.linalg.matrix_exp(a)[..., 2 * d - 1, 0]


def mollified_l1_ball(r: Tensor, delta: float, smooth: float) -> Tensor:
    """`P(|r + s g|_1 <= delta)` for r (..., d), by repeated convolution of folded normals; float64 inside.

    `F_j(t) = int_0^t f_j(t - u) F_(j-1)(u) du`, Gauss-Legendre in u and Chebyshev interpolation in t: to rounding for
    s of at least delta / 50.
    """
    dtype, shape, d = r.dtype, r.shape[:-1], r.shape[-1]
    s = smooth / delta
    size = min(300, max(32, math.ceil(6 / s)))
    rows = max(1, 2**22 // size**2)
    out = [_l1_probability(block, s, size) for block in (r.to(torch.float64) / delta).reshape(-1, d).split(rows)]
    return torch.cat(out).reshape(shape).to(dtype) if out else r.new_zeros(shape)


def _l1_probability(r: Tensor, s: float, size: int) -> Tensor:
    """P(|r + s g|_1 <= 1) for r (p, d)."""
    d, chebyshev = r.shape[-1], np.polynomial.chebyshev.chebvander
    nodes = np.cos(np.pi * np.arange(size)[::-1] / (size - 1))  # of t in [0, 1]; the last one, 1, is asked for
    every, x = torch.from_numpy((nodes + 1) / 2).to(r.device), r.unsqueeze(-1)
    for j in range(d):
        t = every if j < d - 1 else every[-1:]
        if j == 0:
            f = torch.special.ndtr((t - x[:, 0]) / s) - torch.special.ndtr((-t - x[:, 0]) / s)
            continue
        xi, omega = ((torch.from_numpy(a) / 2).to(r.device) for a in gauss_legendre(size))
        u = t[:, None] * (xi + 0.5)
        between = chebyshev(2 * u.cpu().numpy() - 1, size - 1) @ np.linalg.inv(chebyshev(nodes, size - 1))
        inner = torch.einsum("tqn,pn->ptq", torch.from_numpy(between).to(r.device), f)
        v, centre = t[:, None] - u, x[:, j, :, None]
        folded = (-0.5 * ((v - centre) / s) ** 2).exp() + (-0.5 * ((v + centre) / s) ** 2).exp()
        f = (folded * inner * omega).sum(-1) * t / (s * math.sqrt(2 * math.pi))
    return f[:, -1].clamp(0, 1)


def _differences(x: Tensor, y: Tensor) -> Tensor:
    return x.unsqueeze(-2) - y.unsqueeze(-3)
