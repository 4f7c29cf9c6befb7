"""Trigonometric features."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bochner.maps.base import Features, ProjectedFeatures, squared_norm


class TrigFeatures(ProjectedFeatures):
    """`phi(x) = exp(|x|^2/2) [sin w.x, cos w.x] / sqrt(m)` (without the factor for the Gaussian kernel).

    Unbiased, signed: a normaliser can vanish. `feature_dim` is 2 m. MSE: `theory.mse_trig`.
    Rahimi and Recht 2007; Choromanski et al. 2021, eq. (4).
    """

    def __init__(self, dim: int, num_features: int, **options: Any) -> None:
        super().__init__(dim, num_features, **options)
        self.feature_dim = 2 * num_features

    def _features(self, x: Tensor, role: str) -> Features:
        t = self.projection(x)
        log_scale = torch.full_like(x[..., :1], -0.5 * math.log(self.num_features))
        if self.kernel == "softmax":
            log_scale = log_scale + 0.5 * squared_norm(x)
        return Features(torch.cat([t.sin(), t.cos()], dim=-1), log_scale)
