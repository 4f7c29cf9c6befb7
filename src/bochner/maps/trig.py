"""Trigonometric features."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bochner.maps.base import Features, ProjectedFeatures, fourier, squared_norm


class TrigFeatures(ProjectedFeatures):
    """`phi(x) = exp(|x|^2/2) [sin w.x, cos w.x] / sqrt(m)` (without the factor for the Gaussian kernel).

    Unbiased, signed: a normaliser can vanish. `feature_dim` is 2 m. MSE: `theory.mse_trig`.
    O(m d) per row. Rahimi and Recht 2007; Choromanski et al. 2021, eq. (4).

    >>> import torch
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
