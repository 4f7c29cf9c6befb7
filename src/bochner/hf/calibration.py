"""Statistics of real attention, streamed: what the maps, the plan and the advisor need, in one pass without storing it.

The error of linear attention is a sum over pairs of (attention weight)^2 times the relative variance of their kernel
estimate, so the statistics that `calibrated` is fitted to weigh pairs by the attention they get: half of the weight is
the softmax, half is uniform. With an exact window only pairs outside it count.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bochner.features import CalibratedFeatures, FeatureMap, balancing_basis, optimal_a
from bochner.hf.interface import Call

FLOOR = 1e-2  # smallest eigenvalue of a second moment, relative to their mean
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


@dataclass
class PairMoments:
    """Weighted first and second moments of (query, key) pairs of each key head, summed over calls."""

    weight: Any = 0.0
    q: Any = 0.0
    k: Any = 0.0
    qq: Any = 0.0
    kk: Any = 0.0
    qk: Any = 0.0
    rows: int = 0

    def add(self, call: Call, weights: Tensor, far: Far) -> None:
        """Half attention, half uniform, over the pairs outside the window; the two parts weigh the same."""
        b, h, n, d = call.query.shape
        g = call.key.shape[1]
        root = call.scale**0.5
        q = (call.query.float() * root).reshape(b, g, -1, d)  # the query heads of a group, one after another
        k = call.key.float() * root
        uniform = far.far.expand(b, h, n, -1)
        attended = weights * uniform
        share = attended.sum((0, 2, 3), keepdim=True) / uniform.sum((0, 2, 3), keepdim=True).clamp_min(1)
        w = (attended + share * uniform).reshape(b, g, -1, k.shape[-2])  # (b, g, h/g n, s)
        row, column = w.sum(-1, keepdim=True), w.sum(-2).unsqueeze(-1)
        sums = {
            "weight": row.sum((0, 2)),  # (g, 1)
            "q": (row * q).sum((0, 2)),
            "k": (column * k).sum((0, 2)),
            "qq": ((row * q).mT @ q).sum(0),
            "kk": ((column * k).mT @ k).sum(0),
            "qk": (q.mT @ (w @ k)).sum(0),
        }
        for name, value in sums.items():
            setattr(self, name, getattr(self, name) + value.double())
        self.rows += int(far.allowed.any(-1).sum())


def fit(phi: CalibratedFeatures, moments: PairMoments, heads: list[int]) -> None:
    """Centres, balanced basis and dense A of a calibrated map from pair moments, for some of the key heads."""
    total = moments.weight[heads].clamp_min(1e-30)
    a, b = moments.q[heads] / total, moments.k[heads] / total
    total = total.unsqueeze(-1)
    cq, ck, cross = moments.qq[heads] / total, moments.kk[heads] / total, moments.qk[heads] / total
    cq, ck = cq - outer(a, a), ck - outer(b, b)
    cross = cross - outer(a, b)
    m, m_inv = balancing_basis(floored(cq), floored(ck))
    mixed = m @ cross @ m_inv.mT
    second = m @ cq @ m.mT + m_inv @ ck @ m_inv.mT + mixed + mixed.mT  # of z = x + y, the cross moment included
    values, u = torch.linalg.eigh((second + second.mT) / 2)
    for name, value in {
        "centre_query": a,
        "centre_key": b,
        "basis_query": u.mT @ m,
        "basis_key": u.mT @ m_inv,
        "a": optimal_a(values.clamp_min(0)),
    }.items():
        buffer = getattr(phi, name)
        buffer.data.copy_(value.reshape(buffer.shape))


def outer(x: Tensor, y: Tensor) -> Tensor:
    return x.unsqueeze(-1) * y.unsqueeze(-2)


def floored(c: Tensor) -> Tensor:
    """A second moment whose eigenvalues are at least `FLOOR` of their mean (and not zero for a constant head)."""
    c = (c + c.mT) / 2
    mean = torch.diagonal(c, dim1=-2, dim2=-1).mean(-1)[..., None].clamp_min(1e-8)
    values, vectors = torch.linalg.eigh(c)
    return (vectors * torch.maximum(values, FLOOR * mean).unsqueeze(-2)) @ vectors.mT


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
