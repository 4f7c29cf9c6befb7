"""Landmark features on the CPU where no gradient is needed, in few passes over their rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bochner._products import memory
from bochner.maps.base import Features


def query_features(
    landmarks: Tensor, log_weights: Tensor, mix: Tensor, least: Tensor | None, root: float
) -> Callable[[Tensor], Features]:
    """Features of `root * x`, x (b, h, n, d).

    landmarks (h, M, d), log_weights (h, 1, M), mix (h, M, m), or 1 for h; least (m,): of each feature, if any.
    """
    weights = [(landmarks * root).mT, log_weights, mix]

    def features(x: Tensor) -> Features:
        x = x.to(mix.dtype)
        (b, g, n, _), (M, m) = x.shape, mix.shape[-2:]
        w, start, mixed = (t.expand(b, g, -1, -1).flatten(0, 1) for t in weights)
        hidden = torch.bmm(x.flatten(0, 1), w, out=memory("landmarks", (b * g, n, M), x.dtype)).add_(start)
        peak = hidden.amax(-1, keepdim=True)
        total = hidden.sub_(peak).exp_().sum(-1, keepdim=True)
        out = torch.bmm(hidden, mixed, out=memory("query", (b * g, n, m), x.dtype)).div_(total)
        if least is not None:
            torch.maximum(out, least, out=out)
        return Features(out.view(b, g, n, m), total.log_().add_(peak).view(b, g, n, 1))

    return features


def key_features(
    landmarks: Tensor, offsets: Tensor, caps: Tensor, mix: Tensor, bias: Tensor, positive: bool, root: float
) -> Callable[[Tensor], Features]:
    """Features of `root * x`, x (b, h, n, d): the scale is folded into the landmarks.

    landmarks (h, M, d), offsets and caps (h, 1, M), mix (h, M, m), bias (h, 1, m), or 1 for h.
    """
    weights = [(landmarks * root).mT, -offsets, caps, mix, bias]

    def features(x: Tensor) -> Features:
        x = x.to(mix.dtype)
        (b, g, n, _), (M, m) = x.shape, mix.shape[-2:]
        w, start, caps, mixed, end = (t.expand(b, g, -1, -1).flatten(0, 1) for t in weights)
        hidden = torch.bmm(x.flatten(0, 1), w, out=memory("landmarks", (b * g, n, M), x.dtype))
        hidden.add_(start).clamp_(max=caps).exp_()
        out = torch.bmm(hidden, mixed, out=memory("key", (b * g, n, m), x.dtype)).add_(end)
        if positive:
            out.clamp_min_(0)
        return Features(out.view(b, g, n, m), x.new_zeros(b, g, n, 1))

    return features
