"""Complex exponential and hybrid maps: estimators that are accurate where the data are.

Two ideas of *Hybrid Random Features* (Choromanski et al. 2022). A complex exponential estimator has an invertible
matrix A of its own, and no variance where `A x + (A')^-1 y = 0`. A hybrid mixes unbiased estimators with coefficients
that are themselves estimated by features: again a pair of feature maps (Lemma 2.3). All arithmetic is real: the real
part of a complex product is a product of real features of twice the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from bochner._checks import BochnerError, accumulation_dtype, make_generator, positive_float, positive_int
from bochner.maps.base import Features, ProjectedFeatures, constant_scale, exponential, fourier
from bochner.projections import Projection, make_projection, some_seed
from bochner.theory import Moments, angular_moments, gaussian_moments, hybrid_split


class ComplexExponentialFeatures(ProjectedFeatures):
    """`phi(x) = exp(-(Ax).(Ax)/2) exp(w.Ax) / sqrt(m)`, keys with `B = (A')^-1` in place of A; no conjugates.

    Unbiased for every invertible A. Real A: m positive features. Complex A: 2 m signed ones, `[Re, Im]` for queries and
    `[Re, -Im]` for keys. `A = 1` is `positive`, `A = 1j` is `trig`. MSE: `theory.mse_complex`, zero where Ax + By = 0.
    O(m d) per row, plus O(d^2) for a dense A. Choromanski et al. 2022, eq. (13)-(18).

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
            row = row_factor(x, self.kernel) - 0.5 * math.log(self.num_features)
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
        return x * self._spread(a, x.dtype) if self.diagonal else x @ a.to(x.dtype).mT


def compose(
    bases: Sequence[Features],
    coefficients: Sequence[Features],
    constants: Sequence[float],
    weights: Sequence[float],
    role: str,
) -> Features:
    """Lemma 2.3: the features of `sum_k lam_k K_k + (1 - sum_k lam_k) K_last` from those of the parts, in one role.

    `K_k` is the estimate of a base and `lam_k = a_k + b_k xi_k(x).eta_k(y)`, with constants a_k, weights b_k and the
    features of a coefficient. Unbiased when the bases are, if the coefficients are drawn independently of them. A
    negative constant or weight goes into the sign of the key's features; the constant 0 costs no feature.
    """
    one = torch.ones_like(bases[0].log_scale)

    def linear(constant: float, parts: Sequence[tuple[Features, float]]) -> Features:
        """The features of `constant + sum_k weight_k xi_k.eta_k`."""
        terms = [*([(Features(one, torch.zeros_like(one)), constant)] if constant else []), *parts]
        roots = [(f, math.sqrt(abs(w)) * (1 if role == "query" or w > 0 else -1)) for f, w in terms]
        return concatenate([Features(f.values * root, f.log_scale) for f, root in roots])

    first = zip(bases[:-1], coefficients, constants, weights, strict=True)
    terms = [outer(linear(a, [(xi, b)]), base) for base, xi, a, b in first]
    minus = [(xi, -b) for xi, b in zip(coefficients, weights, strict=True)]
    return concatenate([*terms, outer(linear(1.0 - sum(constants), minus), bases[-1])])


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


class BipolarFeatures(ProjectedFeatures):
    """`lam K_hyp + (1 - lam) K_trig`: hyperbolic features for small kernel values, trigonometric for large ones.

    Both bases have the same projections, which is cheaper than two sets and never worse (Theorem 3.1). A subclass says
    what lam is, and the moments of its estimate from n projections of q features each. Features of length
    `4 m (q n + 1)`, O(n d + m d + m n) per row. `num_coefficients`: n, and then `num_features` is m. None: the best
    (m, n) whose features are no longer than the `2 num_features` of `trig`, by `theory.hybrid_split`.
    """

    width: ClassVar[int]  # q

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        num_coefficients: int | None = None,
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
        self.num_features, self.num_projections, self.num_coefficients = budget, m, n
        # A seed of its own: independent also of a ready-made projection that was drawn from the map's seed.
        law = "orthogonal" if isinstance(projection, Projection) else projection
        self.coefficient_projection = make_projection(law, dim, n, num_heads=self.num_heads, seed=some_seed(g))
        self.feature_dim = 4 * m * (self.width * n + 1)

    def _features(self, x: Tensor, role: str) -> Features:
        t, half = self.projection(x), 0.5 * x.square().sum(-1, keepdim=True)
        row = row_factor(x, self.kernel) - 0.5 * math.log(self.num_projections)
        trig = Features(torch.cat([t.sin(), t.cos()], dim=-1), row + half)
        hyp = exponential(torch.cat([t, -t], dim=-1), row - half - 0.5 * math.log(2))
        xi, constant, weight = self._coefficient(x)
        return compose([hyp, trig], [xi], [constant], [weight], role)

    def _coefficient(self, x: Tensor) -> tuple[Features, float, float]:
        """The features of the coefficient, its constant and its weight."""
        raise NotImplementedError

    def _moments(self, x: Tensor, y: Tensor, n: int) -> Moments:
        """Those of the coefficient, for unit vectors."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, m={self.num_projections}, n={self.num_coefficients}"


class AngularHybridFeatures(BipolarFeatures):
    """The angular hybrid: `lam = theta / pi`, estimated by n signs, `(1 - mean_i sgn(t_i.x) sgn(t_i.y)) / 2`.

    Unbiased, signed. MSE: `theory.mse_angular_hybrid`, zero at angle 0 and pi for vectors of equal length. Features of
    length 4 m (n + 1), O(n d + m d + m n) per row. Choromanski et al. 2022, eq. (12), (19), Theorem 3.1, D.1 and 3.5.

    >>> phi = AngularHybridFeatures(dim=64, num_features=256, seed=0)
    >>> phi.num_projections, phi.num_coefficients, phi.feature_dim
    (42, 2, 504)
    """

    width = 1

    def _moments(self, x: Tensor, y: Tensor, n: int) -> Moments:
        return angular_moments(x, y, n)

    def _coefficient(self, x: Tensor) -> tuple[Features, float, float]:
        t = self.coefficient_projection(x)
        return Features(torch.where(t < 0, -1.0, 1.0).to(x.dtype), constant_scale(x, t.shape[-1])), 0.5, -0.5


class GaussianHybridFeatures(BipolarFeatures):
    """The Gaussian hybrid: `lam = (1 - exp(-s^2 |x - y|^2 / 2)) / rho`, `rho = 1 - exp(-2 s^2 r^2)`, by n cosines.

    Unbiased, signed; for vectors of length r lam is 0 at angle 0 and 1 at angle pi. MSE: `theory.mse_gaussian_hybrid`,
    zero at angle 0. Features of length 4 m (2 n + 1), O(n d + m d + m n) per row. Choromanski et al. 2022, eq.
    (67)-(75), F.1.

    `radius`: r; `calibrate_` takes the root mean square length of queries and keys (per head). `smoothness`: s r.

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

    def _coefficient(self, x: Tensor) -> tuple[Features, float, float]:
        s = self.smoothness / self.radius.to(x.dtype)[..., None, None]
        inverse_rho = -1 / math.expm1(-2 * self.smoothness**2)
        return fourier(self.coefficient_projection(x * s), x), inverse_rho, -inverse_rho

    def _calibrate(self, q: Tensor, k: Tensor) -> None:
        r2 = (q.square().sum(-1).mean(-1) + k.square().sum(-1).mean(-1)) / 2
        self._keep(radius=r2.sqrt().clamp_min(1e-6))


def row_factor(x: Tensor, kernel: str) -> Tensor:
    """What turns softmax features into those of `kernel`, as a logarithm (..., n, 1)."""
    if kernel == "softmax":
        return torch.zeros_like(x[..., :1])
    return -0.5 * x.square().sum(-1, keepdim=True)


def _invertible(A: Any, dim: int, num_heads: int | None, owner: str) -> Tensor:
    """A as complex128, (d) or (d, d), with a leading head axis where there are heads; singular matrices are refused."""
    try:
        a = torch.as_tensor(A, device="cpu").detach().to(torch.complex128)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BochnerError(f"The 'A' of {owner} must be a number, a vector or a matrix, got {A!r}.") from error
    a = a.expand(dim) if a.ndim == 0 else a
    shapes = [(dim,), (dim, dim)] + ([] if num_heads is None else [(num_heads, dim, dim)])
    if tuple(a.shape) not in shapes or not torch.isfinite(torch.view_as_real(a)).all():
        raise BochnerError(
            f"The 'A' of {owner} must be finite, a number or have one of the shapes {shapes}, got {tuple(a.shape)}."
        )
    singular = a.abs() if a.ndim == 1 else torch.linalg.svdvals(a)
    if bool((singular.amin(-1) <= 1e-6 * singular.amax(-1)).any()):
        raise BochnerError(
            f"The 'A' of {owner} must be invertible, but its singular values go down to {singular.min():.3g}; add a "
            "multiple of the identity."
        )
    if num_heads is not None and a.ndim < 3:
        a = a.expand(num_heads, *a.shape)
    return a.clone()
