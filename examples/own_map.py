"""A feature map of your own, from its class to training: exp(x . y) by the first terms of its series."""

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


@torch.no_grad()
def error(phi: str | bochner.FeatureMap, size: float) -> float:
    """The relative error of attention on random queries and keys with entries of a given size."""
    q, k, v = torch.randn(3, 1, 4, 500, 8, generator=torch.Generator().manual_seed(0))
    exact = bochner.exact_attention(size * q, size * k, v)
    return float((bochner.linear_attention(size * q, size * k, v, phi) - exact).norm() / exact.norm())


def train(name: str, steps: int = 40) -> list[float]:
    """Teach a layer to output the mean of the tokens so far; its losses."""
    torch.manual_seed(0)
    layer, losses = bochner.nn.MultiheadAttention(16, 2, attention=name, batch_first=True), []
    optimizer, x = torch.optim.Adam(layer.parameters(), lr=1e-2), torch.randn(8, 60, 16) / 2
    for _ in range(steps):
        optimizer.zero_grad()
        out, _ = layer(x, x, x, is_causal=True)
        loss = (out - x.cumsum(1) / torch.arange(1, 61)[:, None]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    bochner.register_map("series", SeriesFeatures)
    print("relative error of attention     series  positive (m = 73)")
    for size in (0.25, 0.5, 1.0):
        positive = bochner.feature_map("positive", dim=8, num_features=73)
        print(f"queries and keys of size {size:4}    {error('series', size):6.4f}  {error(positive, size):.4f}")
    losses = train("series")
    print(f"training: the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
