"""The clustered hybrid: one complex exponential estimator for every pair of a query and a key cluster."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from bochner._checks import BochnerError, make_generator, one_of, positive_int
from bochner.maps.base import Features, ProjectedFeatures, constant_scale, exponential
from bochner.maps.hybrid import _row_factor, another_projection, compose
from bochner.projections import Projection

_LARGEST = 10.0  # of the entries of A and of their inverses: beyond, one bad coordinate would rule the variance


class ClusteredFeatures(ProjectedFeatures):
    """A hybrid of complex exponential estimators, one for each pair of clusters, each quiet near its centres.

    `calibrate_(q, k)` runs k-means on queries and keys (per head) and gives pair (i, j) a diagonal `A_ij`. With
    `u = A_ij x + A_ij^-1 y` the relative second moment of the estimator is `exp(|u|^2)`, so each entry minimises
    `E|u_k|^2` over the two clusters: modulus `(E[y_k^2]/E[x_k^2])^(1/4)`, real where the centres differ in sign,
    imaginary where they agree. For tight clusters this is the paper's `sqrt(-r_jk/r_ik)`, which makes u = 0 at the
    centres, and a centre with a zero coordinate needs no special case. Unbiased with or without `calibrate_` (without,
    it is `positive`). MSE of a pair: `theory.mse_complex`. Choromanski et al. 2022, section 2.4, H.2.

    `coefficients`: `"indicator"` (Definition H.2): x and y pick their clusters and so their estimator; features of
    length `I J m` (complex: twice), of which a row fills `J m` or `I m`; O(J m d) per query. `"gaussian"` (Definition
    H.1): `lam_ij = exp(-|u|^2/(2 t^2))`, smooth in x and y, estimated by n cosines, the rest taken by `positive`.
    `diagonal`: `"complex"`, or `"real"` for half the length and, with indicators, positive features.
    `num_clusters`: I and J, or one number for both. `num_coefficients`: n, for `"gaussian"` only, with t the root of
    the clusters' own mean `|u|^2`.

    >>> x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0)) * 0.1 + torch.tensor([1.0, 0, 0, -1])
    >>> phi = ClusteredFeatures(dim=4, num_features=8, num_clusters=2, seed=0).calibrate_(x, -x)
    >>> phi(x).values.shape
    torch.Size([100, 64])
    """

    centres_query: Tensor
    centres_key: Tensor
    modulus: Tensor
    imaginary: Tensor
    spread: Tensor

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        num_clusters: int | tuple[int, int] = 2,
        coefficients: str = "indicator",
        diagonal: str = "complex",
        num_coefficients: int = 8,
        projection: str | Projection = "orthogonal",
        seed: int | None = 0,
        generator: Generator | None = None,
        **options: Any,
    ) -> None:
        g = make_generator(seed, generator)
        super().__init__(dim, num_features, projection=projection, seed=None, generator=g, **options)
        owner = type(self).__name__
        pair = num_clusters if isinstance(num_clusters, (tuple, list)) else (num_clusters,) * 2
        if len(pair) != 2:
            raise BochnerError(f"The 'num_clusters' of {owner} must be one number or a pair, got {num_clusters!r}.")
        I, J = (positive_int(c, "num_clusters", owner) for c in pair)
        self.num_clusters = (I, J)
        self.coefficients = one_of(coefficients, "coefficients", owner, ("indicator", "gaussian"))
        self.diagonal = one_of(diagonal, "diagonal", owner, ("complex", "real"))
        self.num_coefficients = positive_int(num_coefficients, "num_coefficients", owner)
        one = torch.ones(*self._lead, I, J, dim, device="cpu")
        self._keep(centres_query=0 * one[..., 0, :], centres_key=0 * one[..., 0, :, :])
        # 1 where the entry of A is imaginary; the mean |u|^2 of the pair.
        self._keep(modulus=one, imaginary=0 * one, spread=one[..., 0])
        length = num_features * (2 if self.diagonal == "complex" else 1)
        if self.coefficients == "indicator":
            self.feature_dim = I * J * length
            self.positive = self.diagonal == "real"
        else:
            n = self.num_coefficients
            self.coefficient_projection = another_projection(self, projection, n, g)
            self.feature_dim = (2 * I * J * 2 * n + 1) * length

    def _calibrate(self, q: Tensor, k: Tensor) -> None:
        I, J = self.num_clusters
        # 1. Centres, and the second moment of each coordinate in each cluster, floored against the mean of all.
        (rq, mq), (rk, mk) = (_clusters(t, c, n) for t, c, n in ((q, I, "q"), (k, J, "k")))
        # 2. A for every pair, and the mean |u|^2 it leaves.
        rq, mq, rk, mk = rq.unsqueeze(2), mq.unsqueeze(2), rk.unsqueeze(1), mk.unsqueeze(1)
        modulus = (mk / mq).pow(0.25).clamp(1 / _LARGEST, _LARGEST)
        same = (rq * rk > 0).to(q.dtype) if self.diagonal == "complex" else torch.zeros_like(modulus)
        spread = modulus.square() * mq + mk / modulus.square() + 2 * rq * rk * (1 - 2 * same)
        spread = spread.sum(-1).clamp_min(1e-6)
        self._keep(centres_query=rq, centres_key=rk, modulus=modulus, imaginary=same, spread=spread)

    def _features(self, x: Tensor, role: str) -> Features:
        return (self._indicator if self.coefficients == "indicator" else self._mixture)(x, role)

    def _indicator(self, x: Tensor, role: str) -> Features:
        # 1. The cluster of each row, as a one-hot vector.
        centres = (self.centres_query if role == "query" else self.centres_key).to(x.dtype)
        score = x @ centres.mT - 0.5 * centres.square().sum(-1).unsqueeze(-2)
        hot = torch.nn.functional.one_hot(score.argmax(-1), centres.shape[-2]).to(x.dtype)
        # 2. The matrices of the pairs it belongs to: (..., n, other, d).
        modulus, imaginary = self._matrices(role, x.dtype)
        other = modulus.shape[-2]
        modulus, imaginary = (torch.matmul(hot, t.flatten(-2)).unflatten(-1, (other, -1)) for t in (modulus, imaginary))
        # 3. Its features in those pairs, at one scale.
        logits, phase = self._exponents(x.unsqueeze(-2) * modulus, imaginary)
        log_norm = 0.5 * math.log(self.num_features)
        size = exponential(logits.flatten(-2), _row_factor(x, self.kernel) - log_norm)
        values = _real_parts(size.values.unflatten(-1, (other, -1)), phase)
        # 4. Zeros in all other pairs.
        if role == "query":
            values = hot[..., :, None, None] * values[..., None, :, :]
        else:
            values = hot[..., None, :, None] * values[..., :, None, :]
        return Features(values.flatten(-3), size.log_scale)

    def _mixture(self, x: Tensor, role: str) -> Features:
        # 1. All pairs, and after them the identity for the base that takes the rest.
        changed, imaginary = self._all_pairs(x, role)
        every = torch.cat([changed, x.unsqueeze(-2)], dim=-2)
        mask = torch.cat([imaginary, torch.zeros_like(imaginary[..., :1, :])], dim=-2)
        # 2. The base features of each.
        logits, phase = self._exponents(every, mask)
        row = _row_factor(x, self.kernel) - 0.5 * math.log(self.num_features)
        bases = []
        for p in range(logits.shape[-2]):
            size = exponential(logits[..., p, :].clone(), row)
            values = _real_parts(size.values, None if phase is None else phase[..., p, :])
            bases.append(Features(values, size.log_scale))
        # 3. Their coefficients.
        xi = self._coefficient_features(x, role)
        return compose(bases, xi, [0.0] * len(xi), [1.0] * len(xi), role)

    def _coefficient_features(self, x: Tensor, role: str) -> list[Features]:
        """`lam = exp(-|u|^2 / (2 t^2))` of each pair: a Gaussian kernel of the moduli's x and minus (plus) y.

        |u| is the length of the complex vector. The paper's eq. (93) has the bilinear square, which is negative along
        imaginary entries (lam would grow without bound), and SM(x/t, y/t) where its expansion gives SM(x/t, -y/t).
        """
        changed, imaginary = self._all_pairs(x, role)
        t = self._rows(self.spread.to(x.dtype).flatten(-2).sqrt().unsqueeze(-1))
        sign = 1.0 if role == "query" else 2 * imaginary - 1
        angle = self._project(self.coefficient_projection, changed * sign / t)
        scale = constant_scale(x, self.num_coefficients)
        return [Features(torch.cat([a.cos(), a.sin()], dim=-1), scale) for a in angle.unbind(-2)]

    def _all_pairs(self, x: Tensor, role: str) -> tuple[Tensor, Tensor]:
        """x times the moduli of all pairs, (..., n, I J, d), and the imaginary masks that broadcast against it."""
        modulus, imaginary = (self._rows(t.flatten(-3, -2)) for t in self._matrices("query", x.dtype))
        return x.unsqueeze(-2) * (modulus if role == "query" else 1 / modulus), imaginary

    def _matrices(self, role: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Moduli and imaginary masks, (h?, own, other, d); keys have the inverses and their own clusters first."""
        modulus, imaginary = self.modulus.to(dtype), self.imaginary.to(dtype)
        if role == "query":
            return modulus, imaginary
        return 1 / modulus.transpose(-3, -2), imaginary.transpose(-3, -2)

    def _rows(self, t: Tensor) -> Tensor:
        """(h?, pairs, d) as it broadcasts against (..., n, pairs, d)."""
        return t if self.num_heads is None else t.unsqueeze(-3)

    def _exponents(self, changed: Tensor, imaginary: Tensor) -> tuple[Tensor, Tensor | None]:
        """`Re(w.t - t.t/2)` and `Im(w.t)`, (..., n, pairs, m), for t = changed where real, i changed elsewhere.

        Each coordinate is real or imaginary, so t.t is real. The imaginary part of a key's 1/(i a) is negative: the
        sign is left to `_real_parts`, where it meets that of the key's feature.
        """
        re = changed * (1 - imaginary)
        square = (changed.square() * (1 - 2 * imaginary)).sum(-1, keepdim=True)
        logits = self._project(self.projection, re) - 0.5 * square
        if self.diagonal == "real":
            return logits, None
        return logits, self._project(self.projection, changed * imaginary)

    def _project(self, projection: Projection, t: Tensor) -> Tensor:
        """(..., n, pairs, d) through a projection that takes (..., n, d)."""
        return projection(t.flatten(-3, -2)).unflatten(-2, t.shape[-3:-1])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_clusters={self.num_clusters}, coefficients={self.coefficients!r}"


def _real_parts(size: Tensor, phase: Tensor | None) -> Tensor:
    """`[Re, Im]` of a query, `[Re, -Im]` of a key, whose phase is minus the one given: one formula for both."""
    return size if phase is None else torch.cat([size * phase.cos(), size * phase.sin()], dim=-1)


def _clusters(x: Tensor, count: int, name: str) -> tuple[Tensor, Tensor]:
    """Centres (h, c, d) and second moments of the coordinates in the clusters (h, c, d)."""
    centres = kmeans(x, count, name=name)
    hot = torch.nn.functional.one_hot(torch.cdist(x, centres).argmin(-1), count).to(x.dtype)
    moments = hot.mT @ x.square() / hot.sum(1).clamp_min(1).unsqueeze(-1)
    floor = 1e-6 * x.square().mean((1, 2))[:, None, None] + 1e-30
    return centres, moments + floor


def kmeans(x: Tensor, count: int, *, restarts: int = 4, iterations: int = 50, seed: int = 0, name: str = "x") -> Tensor:
    """Lloyd's algorithm (scipy's) from k-means++ starts, the best of several: x (h, N, d) to centres (h, c, d)."""
    from scipy.cluster.vq import kmeans2, vq

    rng = np.random.default_rng(seed)
    found = []
    for rows in x.cpu().numpy():
        distinct = len(np.unique(rows, axis=0))
        if distinct < count:
            raise BochnerError(
                f"The {name!r} of calibrate_ has only {distinct} distinct rows for {count} clusters; give more data "
                "or a smaller 'num_clusters'."
            )
        runs = []
        for _ in range(restarts):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a cluster that lost all its rows: another start may do better
                centres, _ = kmeans2(rows, count, iter=iterations, minit="++", seed=rng)
            runs.append((np.square(vq(rows, centres)[1]).sum(), centres))
        found.append(min(runs, key=lambda run: run[0])[1])
    return torch.from_numpy(np.stack(found)).to(x)
