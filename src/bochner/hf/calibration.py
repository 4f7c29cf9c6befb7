"""Statistics of real attention, streamed: what the maps, the plan and the advisor need, in one pass without storing it.

The error of linear attention is a sum over pairs of (attention weight)^2 times the relative variance of their kernel
estimate, so the statistics that `calibrated` is fitted to weigh pairs by the attention they get: half of the weight is
the softmax, half is uniform. With an exact window only pairs outside it count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bochner.hf.interface import Call
from bochner.maps.base import FeatureMap
from bochner.moments import PairMoments

ROWS = 4096  # rows kept of each head for maps that calibrate on samples


@dataclass
class Far:
    """Which pairs of a call are allowed, and which of those lie outside window and sinks: (b, 1, n, s) bool."""

    allowed: Tensor
    far: Tensor

    @classmethod
    def of(cls, call: Call, window: int | None, sinks: int) -> Far:
        n, s = call.query.shape[-2], call.key.shape[-2]
        i = torch.arange(s - n, s, device=call.key.device)[:, None]
        j = torch.arange(s, device=call.key.device)[None, :]
        allowed = (j <= i if call.is_causal else torch.ones_like(j <= i))[None, None]
        if call.padding is not None:
            keep = ~call.padding[:, None, None, :]
            rows = keep.mT if n == s else torch.ones_like(keep[..., :1])
            allowed = allowed & keep & rows
        allowed = allowed.expand(call.query.shape[0], 1, n, s)
        far = allowed
        if window is not None:
            far = far & ((i - j).abs() >= window)
        if sinks:
            first = (allowed.any(-2, keepdim=True).cumsum(-1) <= sinks) & allowed.any(-2, keepdim=True)
            far = far & ~first
        return cls(allowed, far)


def attention_weights(call: Call, allowed: Tensor) -> Tensor:
    """The softmax weights (b, h, n, s) in float32; rows that see nothing are zero."""
    group = call.query.shape[1] // call.key.shape[1]
    key = call.key.repeat_interleave(group, dim=1)
    logits = (call.query.float() @ key.float().mT) * call.scale
    return logits.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)


def far_pairs(call: Call, weights: Tensor, far: Far) -> PairMoments:
    """Moments of the pairs outside the window, half by attention and half uniform, per key head.

    As in `CalibratedFeatures.calibrate_`, but under the call's own masks.
    """
    b, h, n, d = call.query.shape
    g, root = call.key.shape[1], call.scale**0.5
    q = (call.query.float() * root).reshape(b, g, -1, d)  # the query heads of a group, one after another
    k = call.key.float() * root
    uniform = far.far.expand(b, h, n, -1)
    attended = weights * uniform
    share = attended.sum((0, 2, 3), keepdim=True) / uniform.sum((0, 2, 3), keepdim=True).clamp_min(1)
    w = (attended + share * uniform).reshape(b, g, -1, k.shape[-2])  # (b, g, h/g n, s)
    sums = [PairMoments.of(x, y, u) for x, y, u in zip(q, k, w, strict=True)]
    first = sums[0]
    for other in sums[1:]:
        first = first + other
    return _each(first, lambda t: t.double())._replace(rows=int(far.allowed.any(-1).sum()))


def of_heads(moments: PairMoments, heads: list[int]) -> PairMoments:
    """The moments of some of the key heads."""
    return _each(moments, lambda t: t[heads])


def _each(m: PairMoments, f: Callable[[Tensor], Tensor]) -> PairMoments:
    return PairMoments(f(m.weight), f(m.x), f(m.y), f(m.xx), f(m.yy), f(m.xy), m.rows)


@dataclass
class HeadStatistics:
    """Per query head, averaged over rows: what its attention looks like."""

    rows: Any = 0.0
    peak: Any = 0.0
    mass: Any = 0.0
    entropy: Any = 0.0
    query_norm: Any = 0.0
    key_norm: Any = 0.0
    logit: Any = 0.0

    def add(self, call: Call, weights: Tensor, far: Far) -> None:
        outside = weights * far.far
        root = call.scale**0.5
        self.rows += far.allowed.any(-1).sum().item()
        self.peak = self.peak + outside.amax(-1).double().sum((0, 2))
        self.mass = self.mass + outside.sum(-1).double().sum((0, 2))
        self.entropy = self.entropy + torch.special.entr(weights).sum(-1).double().sum((0, 2))
        live = far.allowed.any(-1, keepdim=True)
        norms = call.query.float().norm(dim=-1) * live.squeeze(-1) * root
        self.query_norm = self.query_norm + norms.double().sum((0, 2))
        group = call.query.shape[1] // call.key.shape[1]
        seen = far.allowed.any(-2)
        norms = call.key.float().norm(dim=-1) * seen * root
        share = live.sum() / seen.sum()
        self.key_norm = self.key_norm + (norms.double().sum((0, 2)) * share).repeat_interleave(group)
        key = call.key.repeat_interleave(group, dim=1)
        logits = (call.query.float() @ key.float().mT * call.scale).masked_fill(~far.allowed, -torch.inf)
        peak = logits.amax((0, 2, 3)).double()
        self.logit = peak if isinstance(self.logit, float) else torch.maximum(self.logit, peak)

    def mean(self, name: str) -> Tensor:
        value = getattr(self, name)
        return value if name == "logit" else value / max(self.rows, 1)


def peaks(call: Call, weights: Tensor, far: Far) -> Tensor:
    """The largest weight of each row outside window and sinks, (b, h, n)."""
    return (weights * far.far).amax(-1)


@dataclass
class Samples:
    """Rows of queries and keys of each head, for maps that calibrate on samples; the first `ROWS` seen."""

    q: list[Tensor] = field(default_factory=list)
    k: list[Tensor] = field(default_factory=list)
    rows: int = 0

    def add(self, call: Call) -> None:
        if self.rows >= ROWS:
            return
        root = call.scale**0.5
        for b in range(call.query.shape[0]):
            q, k = call.query[b], call.key[b]
            if call.padding is not None:
                keep = ~call.padding[b]
                k = k[:, keep]
                q = q[:, keep] if q.shape[1] == keep.shape[0] else q
            self.q.append(q.float() * root)
            self.k.append(k.float() * root)
            self.rows += k.shape[1]

    def calibrate(self, phi: FeatureMap, heads: list[int], group: int) -> None:
        if not self.q:
            return
        rows = [g * group + i for g in heads for i in range(group)]
        phi.calibrate_(torch.cat(self.q, dim=1)[rows], torch.cat(self.k, dim=1)[heads])
