"""Polynomial and dot-product kernels in linear time: `(x . y + c)^n` and `sum_k a_k (x . y)^k`.

The constant c enters as one more coordinate `sqrt(c)`. Rows are scaled to length one before anything is multiplied, and
the length goes into the log scale, so that no degree over- or underflows. Errors: `theory.polynomial`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import mul
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from bochner._checks import BochnerError, make_generator, non_negative, one_of, positive_int
from bochner.maps.base import FeatureMap, Features, to_features
from bochner.projections import rademacher
from bochner.theory import mse_maclaurin, mse_tensor_sketch_matrix


class PolynomialFeatures(FeatureMap):
    """Base of the sketches of `(x . y + c)^n`: `degree` n >= 1, `coef` c >= 0, `num_features` m.

    Random parts are buffers; a subclass says how one head's are drawn, `_draw(g)`.
    """

    estimates: ClassVar[str] = "polynomial"

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        degree: int = 2,
        coef: float = 0.0,
        num_heads: int | None = None,
        seed: int | None = 0,
        generator: Generator | None = None,
    ) -> None:
        owner = type(self).__name__
        self.degree, self.coef = positive_int(degree, "degree", owner), non_negative(coef, "coef", owner)
        super().__init__(dim, num_features, num_heads=num_heads, kernel=self.estimates)
        self._redraw(make_generator(seed, generator))

    @property
    def width(self) -> int:
        """d, plus one where the constant is a coordinate."""
        return self.dim + (self.coef > 0)

    def kernel_matrix(self, x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.mT + self.coef) ** self.degree

    def _units(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x with its constant coordinate, scaled to length one, and the log of the length (..., n, 1)."""
        return unit_rows(with_constant(x, self.coef))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, degree={self.degree}, coef={self.coef}"


class SumPolyFeatures(PolynomialFeatures):
    """Sum decomposition: `phi_j(x) = sqrt(d^n/m) x_{i_1} ... x_{i_n}` for m uniform tuples (i_1, ..., i_n).

    Unbiased, signed. MSE: `theory.mse_sum_poly`, with the factor d^n unless x and y are spread evenly over the
    coordinates. O(n m) per row. Lucyszyn 2025, problem 2, eq. (3); its (7) lacks the square on the second term.

    >>> phi = SumPolyFeatures(dim=4, num_features=16, degree=2)
    >>> phi(torch.ones(3, 4)).dense().square().sum(-1)
    tensor([16., 16., 16.])
    """

    index: Tensor

    def _draw(self, g: Generator) -> dict[str, Tensor]:
        size = (self.degree, self.num_features)
        return {"index": torch.randint(self.width, size, generator=g, device="cpu")}

    def _features(self, x: Tensor, role: str) -> Features:
        u, log_length = self._units(x)
        rows = (*u.shape[:-1], -1)
        index = (t.unsqueeze(-2) if self.num_heads else t for t in self.index.unbind(-2))
        values = reduce(mul, (torch.take_along_dim(u, i.expand(rows), dim=-1) for i in index))
        constant = 0.5 * (self.degree * math.log(self.width) - math.log(self.num_features))
        return rescaled(values, self.degree * log_length + constant)


class TensorSketchFeatures(PolynomialFeatures):
    """TensorSketch: the circular convolution of n count sketches, `phi(x) = IFFT(prod_t FFT(C_t x))`.

    `C_t x` adds `s_t(i) x_i` into slot `h_t(i)` of m, with independent uniform slots and signs. Unbiased, signed.
    MSE: `theory.mse_tensor_sketch`, exact; bound: `theory.tensor_sketch_bound`. O(n (d + m log m)) per row; any m
    works, a power of two is the fastest and an odd m has the smallest variance. Pham and Pagh 2013; Avron et al. 2014;
    Lucyszyn 2025, problem 2, eq. (19), whose bound (21) is false.

    >>> phi = TensorSketchFeatures(dim=4, num_features=16, degree=3, coef=1.0)
    >>> phi(torch.zeros(2, 4)).values.shape
    torch.Size([2, 16])
    """

    slot: Tensor
    sign: Tensor

    def _draw(self, g: Generator) -> dict[str, Tensor]:
        return draw_count_sketches(self.degree, self.width, self.num_features, g)

    def _features(self, x: Tensor, role: str) -> Features:
        u, log_length = self._units(x)
        values = tensor_sketch(u, self.slot, self.sign, self.num_features)
        return Features(values, self.degree * log_length)


class MaclaurinFeatures(PolynomialFeatures):
    """Random Maclaurin features of `sum_k a_k (x . y)^k`, all `a_k >= 0`: `sqrt(a_k/m_k) (s_1 . x) ... (s_k . x)`.

    Degree k has its own m_k of the m features, each a product of k random signed sums s . x. Unbiased, signed. MSE:
    the method `mse`. O(sum_k k m_k d) per row. Kar and Karnick 2012, Algorithm 1, which draws the degree of each
    feature; features dealt to the degrees beforehand have less variance.

    `series`: `"polynomial"` for `(x . y + coef)^degree`, `"exp"` for exp(x . y), a sequence of a_k or a function of k,
    cut after `degree` (2 for `"polynomial"`, else 12).

    >>> phi = MaclaurinFeatures(dim=4, num_features=32, series="exp")
    >>> phi.kernel_matrix(torch.zeros(1, 4), torch.zeros(1, 4))
    tensor([[1.]])
    """

    estimates = "maclaurin"
    signs: Tensor

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        series: str | Sequence[float] | Callable[[int], float] = "polynomial",
        degree: int | None = None,
        coef: float = 0.0,
        **options: Any,
    ) -> None:
        owner = type(self).__name__
        m = positive_int(num_features, "num_features", owner)
        degree = None if degree is None else positive_int(degree, "degree", owner)
        self.coefficients = dot_product_series(series, degree, non_negative(coef, "coef", owner), owner)
        self.counts = deal_features(self.coefficients, m, owner)
        # Features of degree above t all need a sum number t: `rows[t]` of them.
        self.rows = [sum(self.counts[t + 1 :]) for t in range(len(self.counts) - 1)]
        super().__init__(dim, m, degree=len(self.counts) - 1, coef=coef, **options)

    def kernel_matrix(self, x: Tensor, y: Tensor) -> Tensor:
        p = x @ y.mT
        return reduce(lambda total, a: total * p + a, reversed(self.coefficients), torch.zeros_like(p))

    def mse(self, x: Tensor, y: Tensor) -> Tensor:
        """The MSE for pairs (..., d): `theory.mse_maclaurin` degree by degree, each with its own m_k features."""
        only = torch.eye(self.degree + 1, dtype=torch.float64)
        dealt = [(k, a, m) for k, (a, m) in enumerate(zip(self.coefficients, self.counts, strict=True)) if m]
        return torch.stack([mse_maclaurin(x, y, m, a * only[k], only[k]) for k, a, m in dealt]).sum(0)

    def _draw(self, g: Generator) -> dict[str, Tensor]:
        return {"signs": rademacher(sum(self.rows), self.dim, g=g)}

    def _features(self, x: Tensor, role: str) -> Features:
        u, log_length = unit_rows(x)
        sums = (u @ self.signs.to(u.dtype).mT).split(self.rows, dim=-1)
        # 1. The size of degree k in this row, relative to the largest of them.
        kept = [k for k, count in enumerate(self.counts) if count]
        log_weight = {k: 0.5 * math.log(self.coefficients[k] / self.counts[k]) + k * log_length for k in kept}
        top = torch.cat(list(log_weight.values()), dim=-1).amax(-1, keepdim=True)
        # 2. Products of one more sum at each degree; a degree hands out its features and the rest goes on.
        parts, product = [], torch.ones_like(u[..., :1]).expand(*u.shape[:-1], self.num_features)
        for k, count in enumerate(self.counts):
            product = product if k == 0 else product * sums[k - 1]
            done, product = product.split([count, product.shape[-1] - count], dim=-1)
            if count:
                parts.append(done * (log_weight[k] - top).exp())
        return rescaled(torch.cat(parts, dim=-1), top)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, counts={self.counts}"


class NonnegativePolyFeatures(PolynomialFeatures):
    """A polynomial kernel of even degree as a square, `(psi(x) . psi(y))^2`: the estimate is never negative.

    `psi` is a TensorSketch of degree n/2 with r slots, or x itself when n = 2 and r holds it: then the map is exact.
    The features are the r (r + 1)/2 <= `num_features` entries of `psi psi'`, off-diagonal ones times sqrt 2: signed,
    but a normaliser is a sum of squares. Biased upwards by the variance of psi: the mean is `mean_matrix`.
    O((n/2)(d + r log r) + m) per row.

    >>> phi = NonnegativePolyFeatures(dim=4, num_features=10, degree=2)
    >>> x = torch.tensor([[1.0, 2.0, 0.0, 1.0]])
    >>> phi(x).dense().square().sum()
    tensor(36.)
    """

    unbiased = False
    slot: Tensor
    sign: Tensor

    def __init__(self, dim: int, num_features: int, **options: Any) -> None:
        super().__init__(dim, num_features, **options)
        if self.degree % 2:
            owner = type(self).__name__
            raise BochnerError(f"The 'degree' of {owner} must be even, got {self.degree}; or take 'tensor_sketch'.")
        self.feature_dim = self.rank * (self.rank + 1) // 2

    @property
    def rank(self) -> int:
        """r, the slots of psi, or the coordinates of x where they fit: then the map is exact."""
        r = (math.isqrt(8 * self.num_features + 1) - 1) // 2
        return min(r, self.width) if self.degree == 2 else r

    @property
    def exact(self) -> bool:
        return self.degree == 2 and self.rank == self.width

    def _draw(self, g: Generator) -> dict[str, Tensor]:
        return {} if self.exact else draw_count_sketches(self.degree // 2, self.width, self.rank, g)

    def mean_matrix(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean of the estimate, (..., n, s): the kernel plus the variance of psi(x) . psi(y)."""
        if self.exact:
            return self.kernel_matrix(x, y)
        x, y = with_constant(x, self.coef), with_constant(y, self.coef)
        return (x @ y.mT) ** self.degree + mse_tensor_sketch_matrix(x, y, self.rank, self.degree // 2).to(x.dtype)

    def _features(self, x: Tensor, role: str) -> Features:
        u, log_length = self._units(x)
        if not self.exact:
            u = tensor_sketch(u, self.slot, self.sign, self.rank)
        row, column = torch.triu_indices(self.rank, self.rank, device=u.device).unbind()
        weight = (1 + (row != column).to(u.dtype)).sqrt()
        values = u.index_select(-1, row) * u.index_select(-1, column) * weight
        return rescaled(values, self.degree * log_length)


def with_constant(x: Tensor, coef: float) -> Tensor:
    """Rows with the coordinate sqrt(c) appended, so that their products are `x . y + c`; c = 0 leaves them alone."""
    return torch.cat([x, torch.full_like(x[..., :1], math.sqrt(coef))], dim=-1) if coef > 0 else x


def unit_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of length one (a zero row stays zero) and the log of the length.

    A homogeneous feature at `x / c` times `c^n` is the same for any c: the length may count as a constant.
    """
    # Twice, so that the square of a very long or very short row neither over- nor underflows.
    size = x.detach().abs().amax(-1, keepdim=True)
    size = torch.where(size > 0, size, torch.ones_like(size))
    length = size * (x.detach() / size).square().sum(-1, keepdim=True).sqrt()
    length = torch.where(length > 0, length, torch.ones_like(length))
    return x / length, length.log()


def rescaled(values: Tensor, log_scale: Tensor) -> Features:
    """Values of largest size one, the factor moved to the log scale."""
    values, log_size = to_features(values)
    return Features(values, log_scale + log_size)


def draw_count_sketches(degree: int, width: int, m: int, g: Generator) -> dict[str, Tensor]:
    """n independent slots and signs for every coordinate, (n, d) each."""
    return {
        "slot": torch.randint(m, (degree, width), generator=g, device="cpu"),
        "sign": rademacher(degree, width, g=g),
    }


def count_sketch(x: Tensor, slot: Tensor, sign: Tensor, m: int) -> Tensor:
    """`sum of sign_i x_i over slot_i = j`, (..., h?, n, d) to (..., h?, n, m), by slots and signs (h?, d)."""
    if slot.ndim > 1:  # heads side by side, each with slots of its own: one scatter for all
        own = slot + m * torch.arange(len(slot), device=slot.device).unsqueeze(-1)
        out = count_sketch(x.transpose(-3, -2).flatten(-2), own.flatten(), sign.flatten(), m * len(slot))
        return out.unflatten(-1, (-1, m)).transpose(-3, -2)
    rows = (x * sign.to(x.dtype)).reshape(-1, x.shape[-1])
    return rows.new_zeros(len(rows), m).index_add(1, slot, rows).view(*x.shape[:-1], m)


def tensor_sketch(x: Tensor, slot: Tensor, sign: Tensor, m: int) -> Tensor:
    """The TensorSketch of x^(tensor n), (..., n, m), from slots and signs (h?, n, d)."""
    if not x.numel():
        return x.new_zeros(*x.shape[:-1], m)
    sketches = [count_sketch(x, *pair, m) for pair in zip(slot.unbind(-2), sign.unbind(-2), strict=True)]
    return sketches[0] if len(sketches) == 1 else torch.fft.irfft(reduce(mul, map(torch.fft.rfft, sketches)), n=m)


def dot_product_series(
    series: str | Sequence[float] | Callable[[int], float], degree: int | None, coef: float, owner: str
) -> list[float]:
    """a_0, ..., a_n of a dot-product kernel, checked: finite, not negative, not all zero."""
    n = degree or (2 if series == "polynomial" else 12)
    if isinstance(series, str):
        name = one_of(series, "series", owner, ("polynomial", "exp"))
        a = [math.comb(n, k) * coef ** (n - k) if name == "polynomial" else 1 / math.factorial(k) for k in range(n + 1)]
    elif callable(series):
        a = [float(series(k)) for k in range(n + 1)]
    else:
        a = [float(v) for v in series][: None if degree is None else degree + 1]
    bad = [k for k, v in enumerate(a) if not 0 <= v < math.inf]
    if bad or not any(a[1:]):
        what = f"coefficient {a[bad[0]]} at degree {bad[0]}" if bad else "no positive coefficient above degree 0"
        raise BochnerError(f"The 'series' of {owner} needs finite coefficients >= 0, not all of degree 0, got {what}.")
    while not a[-1]:
        a.pop()
    return a


def deal_features(a: Sequence[float], m: int, owner: str) -> list[int]:
    """m features over the degrees with a_k > 0: one for degree 0, the rest as a_k, at least one each.

    The standard deviation of one feature of degree k is about a_k for unit rows: the best split is proportional to it.
    """
    least = sum(v > 0 for v in a)
    if m < least:
        raise BochnerError(
            f"The 'num_features' of {owner} must be at least {least}, got {m}; raise it or lower 'degree'."
        )
    free = m - least
    exact = [0.0, *(free * v / sum(a[1:]) for v in a[1:])]
    whole = [math.floor(e) for e in exact]
    last = sorted(range(len(a)), key=lambda k: whole[k] - exact[k])[: free - sum(whole)]
    return [(v > 0) + whole[k] + (k in last) for k, v in enumerate(a)]
