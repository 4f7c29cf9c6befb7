"""Complex exponential and hybrid maps: estimators that are accurate where the data are.

Two ideas of *Hybrid Random Features* (Choromanski et al. 2022). A complex exponential estimator has an invertible
matrix A of its own, and no variance where `A x + (A')^-1 y = 0`. A hybrid mixes several unbiased estimators with
coefficients that depend on x and y and are themselves estimated by features; the product of two linear forms is a
linear form in the outer product of the features (Lemma 2.3), so the mixture is again a pair of feature maps. All
arithmetic is real: the real part of a complex product is a product of real features of twice the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Generator, Tensor, nn

from bochner._checks import BochnerError, accumulation_dtype, make_generator, positive_float, positive_int
from bochner.maps.base import FeatureMap, Features, ProjectedFeatures, constant_scale, exponential, fourier
from bochner.projections import Projection, make_projection, some_seed
from bochner.theory import Moments, angular_moments, gaussian_moments, hybrid_split


class ComplexExponentialFeatures(ProjectedFeatures):
    """`phi(x) = exp(-(Ax).(Ax)/2) exp(w.Ax) / sqrt(m)`, keys with `B = (A')^-1` in place of A; no conjugates.

    Unbiased for every invertible A; the real part of the product is kept. Real A: m positive features. Complex A: 2 m
    signed features, `[Re, Im]` for queries and `[Re, -Im]` for keys. `A = 1` is `positive`, `A = 1j` is `trig`.
    With `u = Ax + By` and c the product of the two prefactors the MSE is
    `[(|c|^2 exp(2 |Re u|^2) + Re(c^2 exp(2 u.u)))/2 - K^2] / m` (`theory.mse_complex`), zero where u = 0. O(m d) per
    row, plus O(d^2) for a dense A. Choromanski et al. 2022, eq. (13)-(18).

    `A`: a number, a vector of d (diagonal) or a (d, d) matrix, real or complex; with `num_heads` also (h, d, d).

    >>> phi = ComplexExponentialFeatures(dim=2, num_features=8, A=[1.0, 2.0j], seed=0)
    >>> phi(torch.zeros(3, 2)).values.shape
    torch.Size([3, 16])
    """

    A_real: Tensor
    A_imag: Tensor | None

    def __init__(self, dim: int, num_features: int, *, A: Any = 1.0, **options: Any) -> None:
        super().__init__(dim, num_features, **options)
        a = _invertible(A, dim, self.num_heads, type(self).__name__)
        self.diagonal = a.ndim == (1 if self.num_heads is None else 2)
        self.register_buffer("A_real", a.real.float().contiguous())
        self.register_buffer("A_imag", a.imag.float().contiguous() if bool((a.imag != 0).any()) else None)
        if self.A_imag is None:
            self.positive = True
        else:
            self.feature_dim = 2 * num_features

    def prepare(self, role: str) -> Callable[[Tensor], Features]:
        # Here and not in the function below: a block recomputed in a backward pass must find nothing cached.
        real, imag = self._change(role)

        def features(x: Tensor) -> Features:
            x = x.to(accumulation_dtype(x.dtype))
            re, im = self._apply_change(real, x), None if imag is None else self._apply_change(imag, x)
            row = _row_factor(x, self.kernel) - 0.5 * math.log(self.num_features)
            row = row - 0.5 * re.square().sum(-1, keepdim=True)
            if im is None:
                return exponential(self.projection(re), row)
            size = exponential(self.projection(re), row + 0.5 * im.square().sum(-1, keepdim=True))
            phase = self.projection(im) - (re * im).sum(-1, keepdim=True)
            # [Re, Im] of queries, [Re, -Im] of keys: their inner product is the real part of the bilinear one.
            sine = phase.sin() if role == "query" else -phase.sin()
            return Features(torch.cat([size.values * phase.cos(), size.values * sine], dim=-1), size.log_scale)

        return features

    def _change(self, role: str) -> tuple[Tensor, Tensor | None]:
        """A for queries, its inverse transpose for keys: real and imaginary part."""
        A = self.A_real if self.A_imag is None else torch.complex(self.A_real, self.A_imag)
        if role == "key":
            A = 1 / A if self.diagonal else torch.linalg.inv(A).mT
        return (A, None) if self.A_imag is None else (A.real, A.imag)

    def _apply_change(self, a: Tensor, x: Tensor) -> Tensor:
        return x * self._spread(a, x) if self.diagonal else x @ a.to(x.dtype).mT


class Coefficient(NamedTuple):
    """A linearised coefficient `lam(x, y) = constant + weight * K(x, y)`, K the kernel of `features`."""

    features: FeatureMap
    constant: float = 0.0
    weight: float = 1.0


class HybridFeatures(FeatureMap):
    """The general hybrid, `sum_k lam_k K_k + (1 - sum_k lam_k) K_last`, of any base maps and coefficients.

    Each `K_k` is the estimate of a base map, each `lam_k = a_k + b_k xi_k(x).eta_k(y)` that of a `Coefficient`.
    Unbiased when the bases are, whatever the coefficients, provided these are drawn independently of the bases; signed.
    Bases may share a `Projection` instance. The last base takes the rest. With base features of length m_k and
    coefficient features of length n_k the features have length `sum_k m_k (n_k + [a_k != 0]) + m_last (1 + sum n_k)`;
    making them from the base and coefficient features costs as much. MSE: `theory.mse_mixture`, `theory.mse_hybrid`.
    Choromanski et al. 2022, eq. (8)-(11), Lemma 2.3.

    >>> from bochner.maps.exponential import PositiveFeatures
    >>> from bochner.maps.trig import TrigFeatures
    >>> bases = [PositiveFeatures(4, 8, seed=0), TrigFeatures(4, 8, seed=1)]
    >>> phi = HybridFeatures(bases, [Coefficient(SignFeatures(4, 3, seed=2), constant=0.5, weight=-0.5)])
    >>> phi.feature_dim
    96
    """

    def __init__(self, bases: Sequence[FeatureMap], coefficients: Sequence[Coefficient]) -> None:
        bases, coefficients = list(bases), [Coefficient(*c) for c in coefficients]
        if not bases or len(coefficients) != len(bases) - 1:
            raise BochnerError(
                f"HybridFeatures needs one coefficient fewer than bases (the last takes the rest), got "
                f"{len(bases)} bases and {len(coefficients)} coefficients."
            )
        first = bases[0]
        for part in [*bases, *(c.features for c in coefficients)]:
            if (part.dim, part.num_heads) != (first.dim, first.num_heads):
                raise BochnerError(
                    f"The parts of HybridFeatures must agree in (dim, num_heads), got {(part.dim, part.num_heads)} of "
                    f"{type(part).__name__} beside {(first.dim, first.num_heads)}."
                )
        for base in bases:
            if base.kernel != first.kernel:
                got = f"{base.kernel!r} beside {first.kernel!r}"
                raise BochnerError(f"The bases of HybridFeatures must estimate one kernel, got {got}.")
        super().__init__(first.dim, sum(b.num_features for b in bases), num_heads=first.num_heads, kernel=first.kernel)
        self.bases = nn.ModuleList(bases)
        self.coefficients = nn.ModuleList(c.features for c in coefficients)
        self.constants = [float(c.constant) for c in coefficients]
        self.weights = [float(c.weight) for c in coefficients]
        self._check_independent()
        lengths = [c.features.feature_dim for c in coefficients]
        sizes = [n + (a != 0) for n, a in zip(lengths, self.constants, strict=True)]
        sizes.append(sum(lengths) + (sum(self.constants) != 1))
        self.feature_dim = sum(b.feature_dim * n for b, n in zip(bases, sizes, strict=True))

    def prepare(self, role: str) -> Callable[[Tensor], Features]:
        bases = [b.prepare(role) for b in self.bases]  # type: ignore[operator]
        coefficients = [c.prepare(role) for c in self.coefficients]  # type: ignore[operator]

        def features(x: Tensor) -> Features:
            return compose([b(x) for b in bases], [c(x) for c in coefficients], self.constants, self.weights, role)

        return features

    def kernel_matrix(self, x: Tensor, y: Tensor) -> Tensor:
        return self.bases[0].kernel_matrix(x, y)  # type: ignore[operator]

    def _calibrate(self, q: Tensor, k: Tensor) -> None:
        for part in [*self.bases, *self.coefficients]:
            part._calibrate(q, k)

    def _check_independent(self) -> None:
        """Coefficients that reuse the randomness of a base make the product biased: refuse the two likely ways."""
        for base in _projections(self.bases):
            for coefficient in _projections(self.coefficients):
                a, b = (nn.functional.normalize(p.matrix()[..., 0, :], dim=-1) for p in (base, coefficient))
                if torch.allclose(a, b, atol=1e-5):
                    raise BochnerError(
                        "A coefficient of HybridFeatures has the random directions of a base, which biases the "
                        "product; give its map a 'seed' of its own."
                    )


def compose(
    bases: Sequence[Features],
    coefficients: Sequence[Features],
    constants: Sequence[float | Tensor],
    weights: Sequence[float | Tensor],
    role: str,
) -> Features:
    """Lemma 2.3: the features of `sum_k lam_k K_k + (1 - sum lam_k) K_last` from those of the parts, in one role.

    A negative constant or weight goes into the sign of the key's features. A constant that is the number 0 costs no
    feature.
    """
    rest = 1.0 - sum(constants)
    one = torch.ones_like(bases[0].log_scale)
    terms = []
    for base, xi, a, b in zip(bases, coefficients, constants, weights, strict=False):
        lam = concatenate([*_constant(a, one, role), _weighted(xi, b, role)])
        terms.append(outer(lam, base))
    minus = [_weighted(xi, -b, role) for xi, b in zip(coefficients, weights, strict=True)]
    terms.append(outer(concatenate([*_constant(rest, one, role), *minus]), bases[-1]))
    return concatenate(terms)


def concatenate(parts: Sequence[Features]) -> Features:
    """Features side by side, at the largest of their scales: the sum of the kernels."""
    if len(parts) == 1:
        return parts[0]
    top = torch.stack([p.log_scale.detach() for p in parts]).amax(0)
    return Features(torch.cat([p.values * (p.log_scale - top).exp() for p in parts], dim=-1), top)


def outer(f: Features, g: Features) -> Features:
    """The outer product of two feature vectors: the product of the kernels."""
    values = (f.values.unsqueeze(-1) * g.values.unsqueeze(-2)).flatten(-2)
    return Features(values, f.log_scale + g.log_scale)


def _weighted(f: Features, weight: float | Tensor, role: str) -> Features:
    return Features(f.values * _signed_root(weight, f.values, role), f.log_scale)


def _constant(value: float | Tensor, one: Tensor, role: str) -> list[Features]:
    if isinstance(value, float) and value == 0:
        return []
    return [Features(one * _signed_root(value, one, role), torch.zeros_like(one))]


def _signed_root(value: float | Tensor, like: Tensor, role: str) -> Tensor:
    v = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    return v.abs().sqrt() if role == "query" else v.sign() * v.abs().sqrt()


class SignFeatures(ProjectedFeatures):
    """`phi(x) = sgn(w.x) / sqrt(n)`: the angular kernel `1 - 2 theta / pi` (Goemans and Williamson).

    Unbiased, signed, constant along rays; variance `4 a (1 - a) / n` with `a = theta / pi`, so none at angle 0 and pi.
    O(n d) per row. Choromanski et al. 2022, eq. (19).
    """

    kernels = ("angular",)

    def _features(self, x: Tensor, role: str) -> Features:
        return _signs(self.projection(x), x)

    def kernel_matrix(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = (nn.functional.normalize(t, dim=-1) for t in (x, y))
        # The angle from half chords: acos loses half the digits at 0 and pi.
        x, y = x.unsqueeze(-2), y.unsqueeze(-3)
        return 1 - 4 / math.pi * torch.atan2((x - y).norm(dim=-1), (x + y).norm(dim=-1))


def _signs(t: Tensor, x: Tensor) -> Features:
    return Features(torch.where(t < 0, -1.0, 1.0).to(x.dtype), constant_scale(x, t.shape[-1]))


class BipolarFeatures(ProjectedFeatures):
    """`lam K_hyp + (1 - lam) K_trig`: hyperbolic features for small kernel values, trigonometric for large ones.

    A subclass says what lam is, and the moments of its estimate from n projections. `num_coefficients` (n): given,
    `num_features` is the m of the paper, the number of projections of each base, and the features have length
    `4 m (q n + 1)`, q features for each coefficient projection. None: `num_features` is a budget, and (m, n) is the
    split with the smallest worst relative error on the unit sphere (`theory.hybrid_split`) among those whose features
    are no longer than the `2 num_features` of `trig` and `hyperbolic`.
    `shared`: both bases on one set of projections, which is cheaper and never worse (Theorem 3.1). Cost
    O(n d + m d + m n) per row.
    """

    width: ClassVar[int]  # q

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        num_coefficients: int | None = None,
        shared: bool = True,
        projection: str | Projection = "orthogonal",
        seed: int | None = 0,
        generator: Generator | None = None,
        **options: Any,
    ) -> None:
        owner = type(self).__name__
        budget = positive_int(num_features, "num_features", owner)
        if num_coefficients is None:
            m, n = hybrid_split(self._moments, budget, self.width)
        else:
            m, n = budget, positive_int(num_coefficients, "num_coefficients", owner)
        g = make_generator(seed, generator)
        super().__init__(dim, m, projection=projection, seed=None, generator=g, **options)
        self.num_features, self.num_projections, self.num_coefficients, self.shared = budget, m, n, bool(shared)
        self.coefficient_projection = another_projection(self, projection, n, g)
        self.trig_projection = None if shared else another_projection(self, projection, m, g)
        self.feature_dim = 4 * m * (self.width * n + 1)

    def _features(self, x: Tensor, role: str) -> Features:
        t = self.projection(x)
        u = t if self.trig_projection is None else self.trig_projection(x)
        half = 0.5 * x.square().sum(-1, keepdim=True)
        row = _row_factor(x, self.kernel) - 0.5 * math.log(self.num_projections)
        trig = Features(torch.cat([u.sin(), u.cos()], dim=-1), row + half)
        hyp = exponential(torch.cat([t, -t], dim=-1), row - half - 0.5 * math.log(2))
        xi, constant, weight = self._coefficient(x)
        return compose([hyp, trig], [xi], [constant], [weight], role)

    def _coefficient(self, x: Tensor) -> tuple[Features, float | Tensor, float | Tensor]:
        """The features of the coefficient, its constant and its weight."""
        raise NotImplementedError

    def _moments(self, x: Tensor, y: Tensor, n: int) -> Moments:
        """Those of the coefficient, for unit vectors."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, m={self.num_projections}, n={self.num_coefficients}"


class AngularHybridFeatures(BipolarFeatures):
    """The angular hybrid: `lam = theta / pi`, estimated by n signs, `(1 - mean_i sgn(t_i.x) sgn(t_i.y)) / 2`.

    Unbiased, signed. With `a = theta/pi` the MSE is `E[lam^2] MSE(hyp) + E[(1-lam)^2] MSE(trig)`,
    `E[lam^2] = a (a - a/n + 1/n)` (the same in 1 - a for the other), less
    `(2/m) K^2 (1 - cos(|x|^2 - |y|^2)) E[lam (1 - lam)]` with shared projections: zero at angle 0 and pi for vectors of
    equal length (`theory.mse_angular_hybrid`). Features of length 4 m (n + 1), O(n d + m d + m n) per row.
    Choromanski et al. 2022, eq. (12), (19), Theorem 3.1, D.1 and 3.5.

    >>> phi = AngularHybridFeatures(dim=64, num_features=256, seed=0)
    >>> phi.num_projections, phi.num_coefficients, phi.feature_dim
    (42, 2, 504)
    >>> AngularHybridFeatures(dim=64, num_features=16, num_coefficients=8).feature_dim  # m = 16, n = 8
    576
    """

    width = 1

    def _moments(self, x: Tensor, y: Tensor, n: int) -> Moments:
        return angular_moments(x, y, n)

    def _coefficient(self, x: Tensor) -> tuple[Features, float | Tensor, float | Tensor]:
        return _signs(self.coefficient_projection(x), x), 0.5, -0.5


class GaussianHybridFeatures(BipolarFeatures):
    """The Gaussian hybrid: `lam = (1 - exp(-s^2 |x - y|^2 / 2)) / rho`, `rho = 1 - exp(-2 s^2 r^2)`, by n cosines.

    Unbiased whatever the lengths of the inputs, signed; lam is 0 at angle 0 and 1 at angle pi for vectors of length r,
    and the variance vanishes at angle 0. With `e = exp(-s^2 |x - y|^2 / 2)` the MSE is that of `angular_hybrid` with
    `E[lam^2] = [(1-e)^2 + (1-e^2)^2/(2n)] / rho^2` and `E[(1-lam)^2] = [(rho-1+e)^2 + (1-e^2)^2/(2n)] / rho^2`.
    See `theory.mse_gaussian_hybrid`. Features of length 4 m (2 n + 1), O(n d + m d + m n) per row.
    Choromanski et al. 2022, eq. (67)-(75), F.1.

    `radius`: r; `calibrate_` takes the root mean square length of queries and keys (per head). `smoothness`: s r, the
    sharpness of the coefficient relative to the radius.

    >>> GaussianHybridFeatures(dim=64, num_features=16, num_coefficients=8).feature_dim  # m = 16, n = 8
    1088
    """

    width = 2
    radius: Tensor

    def __init__(
        self, dim: int, num_features: int, *, radius: float = 1.0, smoothness: float = 1.0, **options: Any
    ) -> None:
        owner = type(self).__name__
        self.smoothness = positive_float(smoothness, "smoothness", owner)
        super().__init__(dim, num_features, **options)
        self._keep(radius=torch.full(self._lead, positive_float(radius, "radius", owner), device="cpu"))

    def _moments(self, x: Tensor, y: Tensor, n: int) -> Moments:
        return gaussian_moments(x, y, n, radius=1.0, bandwidth=self.smoothness)

    def _coefficient(self, x: Tensor) -> tuple[Features, float | Tensor, float | Tensor]:
        s = self.smoothness / self.radius.to(x.dtype)[..., None, None]
        inverse_rho = -1 / math.expm1(-2 * self.smoothness**2)
        return fourier(self.coefficient_projection(x * s), x), inverse_rho, -inverse_rho

    def _calibrate(self, q: Tensor, k: Tensor) -> None:
        r2 = (q.square().sum(-1).mean(-1) + k.square().sum(-1).mean(-1)) / 2
        self._keep(radius=r2.sqrt().clamp_min(1e-6))


def _row_factor(x: Tensor, kernel: str) -> Tensor:
    """What turns softmax features into those of `kernel`, as a logarithm (..., n, 1)."""
    if kernel == "softmax":
        return torch.zeros_like(x[..., :1])
    return -0.5 * x.square().sum(-1, keepdim=True)


def another_projection(phi: FeatureMap, like: str | Projection, m: int, g: Generator) -> Projection:
    """m more directions of the same law, or orthogonal ones beside a ready-made projection, independent of the first.

    Their seed is their own, so that a ready-made projection drawn from the map's seed is independent of them as well.
    """
    law = "orthogonal" if isinstance(like, Projection) else like
    return make_projection(law, phi.dim, m, num_heads=phi.num_heads, seed=some_seed(g))


def _projections(parts: nn.ModuleList) -> list[Projection]:
    return [module for part in parts for module in part.modules() if isinstance(module, Projection)]


def _invertible(A: Any, dim: int, num_heads: int | None, owner: str) -> Tensor:
    """A as complex128, (d) or (d, d), with a leading head axis where there are heads; singular matrices are refused."""
    try:
        a = torch.as_tensor(A, device="cpu").detach().to(torch.complex128)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BochnerError(f"The 'A' of {owner} must be a number, a vector or a matrix, got {A!r}.") from error
    if a.ndim == 0:
        a = a.expand(dim)
    shapes = [(dim,), (dim, dim)] + ([] if num_heads is None else [(num_heads, dim, dim)])
    if tuple(a.shape) not in shapes:
        raise BochnerError(
            f"The 'A' of {owner} must be a number or have one of the shapes {shapes}, got {tuple(a.shape)}."
        )
    if not torch.isfinite(torch.view_as_real(a)).all():
        raise BochnerError(f"The 'A' of {owner} must be finite.")
    singular = a.abs() if a.ndim == 1 else torch.linalg.svdvals(a)
    smallest, largest = singular.amin(-1), singular.amax(-1)
    if bool((smallest <= 1e-6 * largest).any()):
        raise BochnerError(
            f"The 'A' of {owner} must be invertible, but its smallest singular value is {smallest.min():.3g} and its "
            f"largest {largest.max():.3g}; add a multiple of the identity."
        )
    if num_heads is not None and a.ndim < 3:
        a = a.expand(num_heads, *a.shape)
    return a.clone()
