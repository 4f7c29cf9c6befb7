"""Trigonometric features."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from bochner._checks import (
    one_of,
)
from bochner.maps.base import KERNELS, FeatureMap, Features, squared_norm
from bochner.projections import Projection, make_projection


class TrigFeatures(FeatureMap):
    """`phi(x) = exp(|x|^2/2) [sin w.x, cos w.x] / sqrt(m)` (without the factor for the Gaussian kernel).

    Unbiased, signed: a normaliser can vanish. `feature_dim` is 2 m. MSE: `theory.mse_trig`.
    Rahimi and Recht 2007; Choromanski et al. 2021, eq. (4).
    """

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        projection: str | Projection = "orthogonal",
        num_heads: int | None = None,
        kernel: str = "softmax",
        seed: int | None = 0,
        generator: Generator | None = None,
    ) -> None:
        super().__init__(dim, num_features, num_heads=num_heads, kernel=kernel)
        one_of(kernel, "kernel", type(self).__name__, KERNELS)
        self.projection = make_projection(
            projection, dim, num_features, num_heads=num_heads, seed=seed, generator=generator
        )
        self.feature_dim = 2 * num_features

    def _features(self, x: Tensor, role: str) -> Features:
        t = self.projection(x)
        log_scale = torch.full_like(x[..., :1], -0.5 * math.log(self.num_features))
        if self.kernel == "softmax":
            log_scale = log_scale + 0.5 * squared_norm(x)
        return Features(torch.cat([t.sin(), t.cos()], dim=-1), log_scale)
