"""A feature map of your own, from its class to the gradient of a layer: exp(x . y) by the first terms of its series."""

import math

import torch
from torch import Tensor, nn

import bochner
from bochner.maps import Features, to_features


class SeriesFeatures(bochner.FeatureMap):
    """`phi(x) . phi(y) = a + b x.y + c (x.y)^2 / 2`, with learned a, b and c that start at 1."""

    def __init__(self, dim: int, num_features: int, *, num_heads: int | None = None) -> None:
        super().__init__(dim, num_features, num_heads=num_heads, kernel="softmax")
        self.feature_dim = 1 + dim + dim**2  # whatever `num_features` says
        self.log_weights = nn.Parameter(torch.zeros(3))

    def _features(self, x: Tensor, role: str) -> Features:
        a, b, c = (self.log_weights.to(x.dtype) / 2).exp()
        squares = (x[..., :, None] * x[..., None, :]).flatten(-2) / math.sqrt(2)
        return to_features(torch.cat([a * torch.ones_like(x[..., :1]), b * x, c * squares], dim=-1))


if __name__ == "__main__":
    bochner.register_map("series", SeriesFeatures)
    q, k, v = torch.randn(3, 1, 4, 500, 8, generator=torch.Generator().manual_seed(0))
    print("relative error of attention     series  positive (m = 73)")
    for size in (0.25, 0.5, 1.0):
        truth, found = bochner.exact_attention(size * q, size * k, v), []
        for phi in ("series", bochner.feature_map("positive", dim=8, num_features=73)):
            found.append((bochner.linear_attention(size * q, size * k, v, phi) - truth).norm() / truth.norm())
        print(f"queries and keys of size {size:4}    {found[0]:6.4f}  {found[1]:.4f}")
    torch.manual_seed(0)
    layer = bochner.nn.MultiheadAttention(16, 2, attention="series", batch_first=True)
    x = 0.5 * q.reshape(4, 250, 16)
    layer(x, x, x, is_causal=True)[0].square().mean().backward()
    print("training: log_weights has a gradient,", layer.feature_map.log_weights.grad is not None)
