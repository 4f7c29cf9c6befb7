"""The clustered hybrid: one complex exponential estimator for every pair of a query and a key cluster."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bochner._checks import BochnerError, one_of, positive_int
from bochner.maps.base import Features, ProjectedFeatures, exponential
from bochner.maps.hybrid import row_factor
from bochner.maps.moments import nearest

LARGEST = 10.0  # of the entries of A and of their inverses: beyond, one bad coordinate would rule the variance


class ClusteredFeatures(ProjectedFeatures):
    """A hybrid of complex exponential estimators, one for each pair of clusters, each quiet near its centres.

    `calibrate_(q, k)` runs k-means on queries and keys (per head) and gives pair (i, j) a diagonal `A_ij`. With
    `u = A_ij x + A_ij^-1 y` the relative second moment of the estimator is `exp(|u|^2)`, so each entry minimises
    `E|u_k|^2` over the two clusters: modulus `(E[y_k^2]/E[x_k^2])^(1/4)`, real where the centres differ in sign,
    imaginary where they agree; for tight clusters the paper's `sqrt(-r_jk/r_ik)`. A row fills the features of its
    cluster's pairs alone. Unbiased, signed; before `calibrate_` it is `positive`. MSE of a pair: `theory.mse_complex`.
    Features of length `2 I J m`, O(J m d) per query. Choromanski et al. 2022, section 2.4, Definition H.2.

    `num_clusters`: (I, J), or one number for both. `diagonal`: `"complex"`, or `"real"` for positive features of half
    the length.

    >>> x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0)) * 0.1 + torch.tensor([1.0, 0, 0, -1])
    >>> phi = ClusteredFeatures(dim=4, num_features=8, num_clusters=2, seed=0).calibrate_(x, -x)
    >>> phi(x).values.shape
    torch.Size([100, 64])
    """

    centres_query: Tensor
    centres_key: Tensor
    modulus: Tensor
    imaginary: Tensor

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        num_clusters: int | tuple[int, int] = 2,
        diagonal: str = "complex",
        **options: Any,
    ) -> None:
        super().__init__(dim, num_features, **options)
        owner = type(self).__name__
        pair = num_clusters if isinstance(num_clusters, (tuple, list)) else (num_clusters,) * 2
        if len(pair) != 2:
            raise BochnerError(f"The 'num_clusters' of {owner} must be one number or a pair, got {num_clusters!r}.")
        I, J = (positive_int(c, "num_clusters", owner) for c in pair)
        self.num_clusters = (I, J)
        self.diagonal = one_of(diagonal, "diagonal", owner, ("complex", "real"))
        self.positive = diagonal == "real"
        self.feature_dim = I * J * num_features * (1 if self.positive else 2)
        one = torch.ones(*self._lead, I, J, dim, device="cpu")
        self._keep(centres_query=0 * one[..., 0, :], centres_key=0 * one[..., 0, :, :])
        self._keep(modulus=one, imaginary=0 * one)  # 1 where the entry of A is imaginary

    def _calibrate(self, q: Tensor, k: Tensor) -> None:
        I, J = self.num_clusters
        (rq, mq), (rk, mk) = (_clusters(t, c, n) for t, c, n in ((q, I, "q"), (k, J, "k")))
        rq, mq, rk, mk = rq.unsqueeze(2), mq.unsqueeze(2), rk.unsqueeze(1), mk.unsqueeze(1)
        modulus = (mk / mq).pow(0.25).clamp(1 / LARGEST, LARGEST)
        same = torch.zeros_like(modulus) if self.positive else (rq * rk > 0).to(q.dtype)
        self._keep(centres_query=rq, centres_key=rk, modulus=modulus, imaginary=same)

    def _features(self, x: Tensor, role: str) -> Features:
        # 1. The cluster of each row, as a one-hot vector.
        centres = (self.centres_query if role == "query" else self.centres_key).to(x.dtype)
        hot = one_hot(nearest(x, centres), centres.shape[-2]).to(x.dtype)
        # 2. The matrices of the pairs it belongs to, (..., n, other, d): keys have the inverses.
        modulus, imaginary = self.modulus.to(x.dtype), self.imaginary.to(x.dtype)
        if role == "key":
            modulus, imaginary = 1 / modulus.transpose(-3, -2), imaginary.transpose(-3, -2)
        other = modulus.shape[-2]
        modulus, imaginary = ((hot @ t.flatten(-2)).unflatten(-1, (other, -1)) for t in (modulus, imaginary))
        # 3. Its features in those pairs, at one scale. Each coordinate of t = A x is real or imaginary, so t.t is real.
        t = x.unsqueeze(-2) * modulus
        square = (t.square() * (1 - 2 * imaginary)).sum(-1, keepdim=True)
        logits = self._project(t * (1 - imaginary)) - 0.5 * square
        size = exponential(logits.flatten(-2), row_factor(x, self.kernel) - 0.5 * math.log(self.num_features))
        values = size.values.unflatten(-1, (other, -1))
        if not self.positive:
            # [Re, Im] of a query and [Re, -Im] of a key, whose phase is minus this one, 1/i being -i: one formula.
            phase = self._project(t * imaginary)
            values = torch.cat([values * phase.cos(), values * phase.sin()], dim=-1)
        # 4. Zeros in all other pairs.
        hot = hot[..., :, None] if role == "query" else hot[..., None, :]
        values = hot.unsqueeze(-1) * values.unsqueeze(-3 if role == "query" else -2)
        return Features(values.flatten(-3), size.log_scale)

    def _project(self, t: Tensor) -> Tensor:
        """(..., n, pairs, d) through the projection, which takes (..., n, d)."""
        out: Tensor = self.projection(t.flatten(-3, -2))
        return out.unflatten(-2, t.shape[-3:-1])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}spread", None)  # maps saved by earlier versions have it
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_clusters={self.num_clusters}"


def _clusters(x: Tensor, count: int, name: str) -> tuple[Tensor, Tensor]:
    """Centres (h, c, d) and floored second moments of the coordinates in the clusters (h, c, d)."""
    centres = kmeans(x, count, name)
    hot = one_hot(nearest(x, centres), count).to(x.dtype)
    moments = hot.mT @ x.square() / hot.sum(1).clamp_min(1).unsqueeze(-1)
    return centres, moments + 1e-6 * x.square().mean((1, 2))[:, None, None] + 1e-30


def kmeans(x: Tensor, count: int, name: str = "x") -> Tensor:
    """Lloyd's algorithm (scipy's) from k-means++ starts, the best of four: x (h, N, d) to centres (h, c, d)."""
    from scipy.cluster.vq import kmeans2, vq

    rng, found = np.random.default_rng(0), []
    for rows in x.cpu().numpy():
        if (distinct := len(np.unique(rows, axis=0))) < count:
            raise BochnerError(
                f"The {name!r} of calibrate_ has only {distinct} distinct rows for {count} clusters; give more data "
                "or a smaller 'num_clusters'."
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a cluster that lost all its rows: another start may do better
            starts = [kmeans2(rows, count, iter=50, minit="++", seed=rng)[0] for _ in range(4)]
        runs = [(np.square(vq(rows, centres)[1]).sum(), centres) for centres in starts]
        found.append(min(runs, key=lambda run: run[0])[1])
    return torch.from_numpy(np.stack(found)).to(x)
