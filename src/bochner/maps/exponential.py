"""Softmax and Gaussian kernels: trigonometric features, and the positive maps, one family with different constants."""

from __future__ import annotations

import math
from functools import reduce
from operator import add
from typing import Any, ClassVar

import torch
from torch import Tensor

from bochner._checks import BochnerError
from bochner.maps.base import Exponent, Features, ProjectedFeatures, fourier, pooled, squared_norm
from bochner.moments import PairMoments, attended_pairs, balancing_basis, floored, optimal_a, second_moment_of_sum


class TrigFeatures(ProjectedFeatures):
    """`phi(x) = exp(|x|^2/2) [sin w.x, cos w.x] / sqrt(m)` (without the factor for the Gaussian kernel).

    Unbiased, signed: a normaliser can vanish. `feature_dim` is 2 m. MSE: `theory.mse_trig`.
    O(m d) per row. Rahimi and Recht 2007; Choromanski et al. 2021, eq. (4).

    >>> phi = TrigFeatures(dim=4, num_features=16, seed=0)
    >>> phi(torch.zeros(3, 4)).values.shape
    torch.Size([3, 32])
    """

    def __init__(self, dim: int, num_features: int, **options: Any) -> None:
        super().__init__(dim, num_features, **options)
        self.feature_dim = 2 * num_features

    def _features(self, x: Tensor, role: str) -> Features:
        values, log_scale = fourier(self.projection(x), x)
        return Features(values, log_scale + 0.5 * squared_norm(x) if self.kernel == "softmax" else log_scale)


class ExponentialFeatures(ProjectedFeatures):
    """The positive family, `phi(x) = exp(g(w) + w . C (x - c) - |P (x - c)|^2 / 2 + l . x + r) / sqrt(m)`.

    Every positive map of the theory is this one function with other constants: an importance weight `g(w)` for the
    proposal that the frequencies stand for, a linear change of variables, a centre, and a row factor. Subclasses say
    which. Unbiased, positive; MSE in `theory`. Cost O(m d) per row.
    """

    positive = True
    is_exponential = True
    antithetic: ClassVar[bool] = False

    def __init__(self, dim: int, num_features: int, **options: Any) -> None:
        super().__init__(dim, num_features, **options)
        if self.antithetic:
            self.feature_dim = 2 * num_features

    def exponent(self, role: str) -> Exponent:
        w = self._shape_w(self.projection.matrix())
        if self.antithetic:
            w = torch.cat([w, -w], dim=-2)
        constant, half = -0.5 * math.log(self.feature_dim), 0.5 if self.kernel == "softmax" else 1.0
        return Exponent(w, self._log_weight(), constant, half)

    def _log_weight(self) -> Tensor | None:
        """g(w) for every frequency (h?, m), or None when it is zero."""
        return None

    def _shape_w(self, w: Tensor) -> Tensor:
        """The linear map of the frequencies."""
        return w


class PositiveFeatures(ExponentialFeatures):
    """FAVOR+, `phi(x) = exp(w . x - |x|^2/2) / sqrt(m)`.

    Unbiased, positive. MSE: `theory.mse_positive`. O(m d) per row. Choromanski et al. 2021, Lemma 1, eq. (5).

    >>> phi = PositiveFeatures(dim=4, num_features=16, seed=0)
    >>> phi(torch.zeros(3, 4)).values.shape
    torch.Size([3, 16])
    """


class HyperbolicFeatures(ExponentialFeatures):
    """Positive features in antithetic pairs, `exp(-|x|^2/2) [exp(w.x), exp(-w.x)] / sqrt(2 m)`.

    Unbiased, positive, variance at most half of `positive` at twice the features. MSE: `theory.mse_hyperbolic`.
    `feature_dim` is 2 m. O(m d) per row. Choromanski et al. 2021, Lemma 1 (hyp+).

    >>> HyperbolicFeatures(dim=4, num_features=16, seed=0)(torch.zeros(3, 4)).values.shape
    torch.Size([3, 32])
    """

    antithetic = True


class RegularizedFeatures(ExponentialFeatures):
    """SMREG: `phi(x) = exp(w . x - |x|^2/2) / sqrt(m)` with every |w| = sqrt(d).

    Biased, by the factor `theory.regularized_ratio` in (0, 1], in exchange for bounded features. Positive. MSE:
    `theory.mse_regularized`. O(m d) per row. Choromanski et al. 2021, Theorem 1.

    >>> RegularizedFeatures(dim=4, num_features=16, seed=0).projection.matrix().norm(dim=-1).amax().round()
    tensor(2.)
    """

    unbiased = False
    norms = "fixed"


class OptimalFeatures(ExponentialFeatures):
    """OPRF (FAVOR++), `(1-4A)^(d/4) exp(A |w|^2 + sqrt(1-4A) w . x - |x|^2/2) / sqrt(m)` with one scalar A.

    Unbiased, positive. `A=0` is `positive`; `calibrate_` takes the A that minimises the variance at the mean of
    |x + y|^2 over the calibration pairs (per head). MSE: `theory.mse_optimal`. O(m d) per row.
    Likhosherstov et al. 2022.

    `A`: a number below 1/8, to fix it without data.

    >>> x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    >>> float(OptimalFeatures(dim=4, num_features=16).calibrate_(x, x).A) < 0
    True
    """

    A: Tensor

    def __init__(self, dim: int, num_features: int, *, A: float = 0.0, **options: Any) -> None:
        super().__init__(dim, num_features, **options)
        if not isinstance(A, (int, float)) or not -math.inf < A < 0.125:
            raise BochnerError(f"The 'A' of OptimalFeatures must be a number below 1/8, got {A!r}.")
        self._keep(A=torch.full(self._lead, float(A), device="cpu"))

    def _calibrate(self, q: Tensor, k: Tensor) -> None:
        psi = torch.diagonal(second_moment_of_sum(q, k), dim1=-2, dim2=-1).sum(-1)
        self._keep(A=optimal_a(psi / self.dim))

    def _log_weight(self) -> Tensor | None:
        norms = self.projection.matrix().square().sum(-1)
        A = self.A.unsqueeze(-1)
        return A * norms + 0.25 * self.dim * torch.log1p(-4 * A)

    def _shape_w(self, w: Tensor) -> Tensor:
        return w * (1 - 4 * self.A).sqrt()[..., None, None].to(w.dtype)


class CalibratedFeatures(ExponentialFeatures):
    """Centring, balanced basis and dense A: the positive map for real attention.

    Three exact moves, fixed by `calibrate_(q, k)`, per head. Moments are taken over the pairs of each calibration
    sequence q[i], k[i], weighted half by their attention and half uniformly: errors where nobody looks matter less.

    1. centring, `exp(x.y) = exp((x-a).(y-b)) exp(a.y) exp((x-a).b)` with the means a, b;
    2. the balanced basis, `x.y = (M x).(M^-1 y)`, with M equalising the two second moments;
    3. SDERF's dense A, `det(I-4A)^(1/4) exp(w'Aw + w'(I-4A)^(1/2) U'x - |x|^2/2)`, in the eigenbasis U of the
       second moment of x + y.

    Unbiased and positive whatever the statistics; without `calibrate_` it is `positive`. MSE: `theory.mse_dense`.
    For the Gaussian kernel centring moves both by the same vector and M is the identity: only these leave
    |x - y| alone. O(m d + d^2) per row. Likhosherstov et al. 2023 (FAVOR#) for the third move.

    >>> x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    >>> phi = CalibratedFeatures(dim=4, num_features=16).calibrate_(x + 1, x)
    >>> bool((phi.centre_query > phi.centre_key).all())
    True
    """

    centre_query: Tensor
    centre_key: Tensor
    basis_query: Tensor
    basis_key: Tensor
    a: Tensor

    def __init__(self, dim: int, num_features: int, **options: Any) -> None:
        super().__init__(dim, num_features, **options)
        zero = torch.zeros(*self._lead, dim, device="cpu")
        eye = torch.eye(dim, device="cpu").expand(*self._lead, dim, dim)
        # The bases are U'M, so that a changed query is U'M (x - a), and U'M^-1.
        self._keep(centre_query=zero, centre_key=zero, basis_query=eye, basis_key=eye, a=zero)

    def _calibrate_sequences(self, q: list[Tensor], k: list[Tensor]) -> None:
        # Of different sequences any query may meet any key.
        pairs = [
            (x, y) if x.shape[0] == y.shape[0] else (pooled(x)[None], pooled(y)[None])
            for x, y in zip(q, k, strict=True)
        ]
        self.fit_(reduce(add, (attended_pairs(x, y, self.kernel) for x, y in pairs)))

    def _calibrate(self, q: Tensor, k: Tensor) -> None:
        self._calibrate_sequences([q[None]], [k[None]])

    @torch.no_grad()
    def fit_(self, moments: PairMoments) -> CalibratedFeatures:
        """Fix the three moves from the moments of (query, key) pairs; `calibrate_` does it from sequences."""
        # 1. Centres.
        mean = moments.mean()
        a, b = mean.x, mean.y
        if self.kernel == "gaussian":
            a = b = (a + b) / 2
        m = moments.centred(a, b)
        # 2. The balanced basis, from second moments floored so that no direction is blown up by lack of data.
        eye = torch.eye(self.dim, dtype=a.dtype, device=a.device).expand_as(m.xx)
        basis, inverse = eye, eye
        if self.kernel == "softmax":
            basis, inverse = balancing_basis(floored(m.xx, m.rows), floored(m.yy, m.rows))
        # 3. The eigenbasis of z = x + y and its optimal a.
        cross = basis @ m.xy @ inverse.mT
        z = basis @ m.xx @ basis.mT + inverse @ m.yy @ inverse.mT + cross + cross.mT
        eigenvalues, u = torch.linalg.eigh((z + z.mT) / 2)
        alpha = optimal_a(eigenvalues.clamp_min(0))
        self._keep(centre_query=a, centre_key=b, basis_query=u.mT @ basis, basis_key=u.mT @ inverse, a=alpha)
        return self

    def exponent(self, role: str) -> Exponent:
        plain, is_query = super().exponent(role), role == "query"
        centre, other = (self.centre_query, self.centre_key)[:: 1 if is_query else -1]
        basis, constant, tilt = self.basis_query if is_query else self.basis_key, plain.constant, None
        # exp((x-a).b) belongs to the row of the query, exp(a.y) = exp(a.(y-b)) exp(a.b) to that of the key.
        if self.kernel == "softmax":
            tilt = other
            if not is_query:
                constant = constant + (centre.double() * other.double()).sum(-1)[..., None, None]
        return plain._replace(centre=centre, basis=basis, constant=constant, tilt=tilt)

    def _log_weight(self) -> Tensor | None:
        w2 = self.projection.matrix().to(self.a.dtype).square()
        weight = (w2 @ self.a.unsqueeze(-1)).squeeze(-1)
        return weight + 0.25 * torch.log1p(-4 * self.a).sum(-1, keepdim=True)

    def _shape_w(self, w: Tensor) -> Tensor:
        return w * (1 - 4 * self.a).sqrt().unsqueeze(-2).to(w.dtype)
