"""Measurements: what attention looks like, how far linear attention is from it, and how good a whole model still is.

The error of linear attention is a sum over pairs of (attention weight)^2 times the relative variance of their kernel
estimate, so the statistics that `calibrated` is fitted to weigh pairs by the attention they get: half of the weight is
the softmax, half is uniform. With an exact window only pairs outside it count. All statistics are streamed: one pass
over the data, nothing stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bochner._checks import BochnerError
from bochner.attention.layout import leading
from bochner.hf import capture, inputs
from bochner.hf.familiar import note
from bochner.hf.layer import Call, LinearAttention, exact
from bochner.hf.plan import LayerPlan, Plan
from bochner.maps.base import FeatureMap
from bochner.maps.exponential import CalibratedFeatures
from bochner.maps.landmark import LandmarkFeatures
from bochner.moments import PairMoments

ROWS = 4096  # keys kept of each head for maps that calibrate on samples
LOOKED = 1024  # queries of a call that are looked at, from all over it: what they attend to is (queries, keys)


class HeadErrors:
    """The one measure of error: |out - exact| / |exact| of each head's output, over all rows that are not padding.

    >>> q, k, v = (torch.ones(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), torch.tensor([[[[1.0], [3.0]]]]))
    >>> call = Call(q, k, v, False, None, 1.0)  # every query gets the mean of the values, 2
    >>> HeadErrors().add(call, torch.full((1, 1, 2, 1), 3.0)).relative()
    tensor([0.5000], dtype=torch.float64)
    """

    def __init__(self) -> None:
        self.error: Any = 0.0
        self.size: Any = 0.0

    def add(self, call: Call, out: Tensor, truth: Tensor | None = None) -> HeadErrors:
        """Count the output (b, h, n, v) of one call; `truth` if it is known already."""
        truth = exact(call) if truth is None else truth
        error, size = (out - truth).double(), truth.double()
        if call.padding is not None and call.padding.shape[1] == truth.shape[-2]:
            keep = ~call.padding[:, None, :, None]
            error, size = error * keep, size * keep
        self.error = self.error + error.square().sum((0, 2, 3))
        self.size = self.size + size.square().sum((0, 2, 3))
        return self

    def squared(self) -> Tensor:
        """Squares of the relative errors, (h,); what distillation minimises."""
        return self.error / self.size.clamp_min(1e-30)

    def relative(self) -> Tensor:
        """Relative errors, (h,)."""
        return self.squared().sqrt()


@torch.no_grad()
def error_on(calls: Iterable[Call], attention: Callable[[Call], Tensor]) -> Tensor:
    """Relative error of each head of `attention` over some calls, (h,)."""
    found = HeadErrors()
    for call in calls:
        found.add(call, attention(call))
    return found.relative()


def head_errors(
    model: Any, layers: Mapping[str, LinearAttention], data: Sequence[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Relative error of each head of some modules under their plans, on the inputs that exact attention sees."""
    found = {name: HeadErrors() for name in layers}

    def look(name: str, call: Call) -> Tensor | None:
        if name not in layers:
            return None
        truth = exact(call)
        found[name].add(call, layers[name](call), truth)
        return truth

    with capture.recording(model, look):
        for batch in data:
            capture.run(model, batch)
    return {name: errors.relative() for name, errors in found.items() if isinstance(errors.error, Tensor)}


@dataclass
class Far:
    """Which pairs of a call are allowed, and which of those lie outside window and sinks: (b, 1, n, s) bool."""

    allowed: Tensor
    far: Tensor

    @classmethod
    def of(
        cls,
        call: Call,
        window: int | None = None,
        sinks: int = 0,
        window_kind: str = "block",
        rows: Tensor | None = None,
    ) -> Far:
        """Of all queries of a call, or of some `rows` of them."""
        n, s = call.query.shape[-2], call.key.shape[-2]
        rows = torch.arange(n, device=call.key.device) if rows is None else rows
        i = (s - n + rows)[:, None]
        j = torch.arange(s, device=call.key.device)[None, :]
        allowed = (j <= i if call.is_causal else torch.ones_like(j <= i))[None, None]
        if call.padding is not None:
            keep = ~call.padding[:, None, None, :]
            live = keep.mT[..., rows, :] if n == s else torch.ones_like(keep[..., :1])
            allowed = allowed & keep & live
        allowed = allowed.expand(call.query.shape[0], 1, len(rows), s)
        far = allowed
        if window is not None and window_kind == "block":  # counted from the first unpadded key
            lead = 0 if call.padding is None else leading(call.padding)[:, None, None, None]
            far = far & (((i - lead) // window - (j - lead) // window).abs() > 1)
        elif window is not None:
            far = far & ((i - j).abs() >= window)
        if sinks:
            first = (allowed.any(-2, keepdim=True).cumsum(-1) <= sinks) & allowed.any(-2, keepdim=True)
            far = far & ~first
        return cls(allowed, far)


def attention_weights(call: Call, allowed: Tensor) -> Tensor:
    """The softmax weights (b, h, n, s) in float32; rows that see nothing are zero."""
    key = call.key.repeat_interleave(call.group, dim=1)
    logits = ((call.query.float() @ key.float().mT) * call.scale).masked_fill(~allowed, -torch.inf)
    if call.sink_logits is not None:
        sink = call.sink_logits.float()[:, None, None].expand(*logits.shape[:-1], 1)
        return torch.cat([logits, sink], dim=-1).softmax(-1)[..., :-1]
    return logits.softmax(-1).nan_to_num(0.0)


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
        seen = far.allowed.any(-2)
        norms = call.key.float().norm(dim=-1) * seen * root
        share = live.sum() / seen.sum()
        self.key_norm = self.key_norm + (norms.double().sum((0, 2)) * share).repeat_interleave(call.group)
        key = call.key.repeat_interleave(call.group, dim=1)
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
    """Sequences of queries, keys and values of each head, for maps that calibrate on them; the first `ROWS` keys."""

    q: list[Tensor] = field(default_factory=list)
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    rows: int = 0

    def add(self, call: Call) -> None:
        if self.rows >= ROWS:
            return
        root = call.scale**0.5
        for b in range(call.query.shape[0]):
            q, k, v = call.query[b], call.key[b], call.value[b]
            if call.padding is not None:
                keep = ~call.padding[b]
                k, v = k[:, keep], v[:, keep]
                q = q[:, keep] if q.shape[1] == keep.shape[0] else q
            self.q.append(q.float() * root)
            self.k.append(k.float() * root)
            self.v.append(v.float())
            self.rows += k.shape[1]

    def calibrate(self, phi: FeatureMap, plan: LayerPlan, kind: str) -> None:
        """Calibrate the map of one kind of heads."""
        if not self.q:
            return
        heads = plan.kv_heads_of(kind)
        rows = [g * plan.group + i for g in heads for i in range(plan.group)]
        q, k, v = [t[rows] for t in self.q], [t[heads] for t in self.k], [t[heads] for t in self.v]
        if isinstance(phi, LandmarkFeatures):
            phi.calibrate_(q, k, v, is_causal=plan.is_causal, **(plan.near if kind == "hybrid" else {}))
        else:
            phi.calibrate_(torch.cat(q, dim=1), torch.cat(k, dim=1))


class Statistics:
    """What one pass over the calibration data found, by attention module."""

    def __init__(self, names: Iterable[str]) -> None:
        names = list(names)
        self.moments: dict[str, PairMoments] = {}
        self.rows = dict.fromkeys(names, 0)
        self.peaks: dict[str, Any] = dict.fromkeys(names, 0.0)  # sums over rows, (h,)
        self.samples = {n: Samples() for n in names}

    def mean_peak(self, name: str) -> Tensor:
        """The largest weight outside window and sinks of each head of a module, averaged over rows, (h,)."""
        return self.peaks[name] / max(self.rows[name], 1)

    def calibrate(self, name: str, layer: LinearAttention) -> None:
        """Fit the maps of one module to what was found of it."""
        if len(layer.map_norm):
            note(layer.plan, self.samples[name].q, self.samples[name].k)
        for kind in layer.map_norm:
            phi = layer.map_of(kind)
            if type(phi) is CalibratedFeatures:
                phi.fit_(of_heads(self.moments[name], layer.plan.kv_heads_of(kind)))
            else:
                self.samples[name].calibrate(phi, layer.plan, kind)


def observe(model: Any, plan: Plan, data: Sequence[dict[str, Tensor]], say: Any = None) -> Statistics:
    """Run the exact model over the data and gather the statistics of every module of the plan."""
    found = Statistics(layer.name for layer in plan.converted)
    near = {layer.name: layer.near for layer in plan.converted}
    mapped = {layer.name: layer.feature_map for layer in plan.layers if {"hybrid", "kernel"} & set(layer.kinds)}

    def look(name: str, call: Call) -> None:
        if name in near:
            if name in mapped:
                found.samples[name].add(call)
            n = call.query.shape[-2]
            rows = torch.linspace(0, n - 1, min(n, LOOKED), device=call.query.device).round().long()
            far, call = Far.of(call, **near[name], rows=rows), call._replace(query=call.query[..., rows, :])
            weights = attention_weights(call, far.allowed)
            if mapped.get(name) == "calibrated":
                moments = far_pairs(call, weights, far)
                found.moments[name] = found.moments[name] + moments if name in found.moments else moments
            found.rows[name] += int(far.allowed.any(-1).sum())
            found.peaks[name] = found.peaks[name] + peaks(call, weights, far).double().sum((0, 2))

    with capture.recording(model, look):
        for i, batch in enumerate(data):
            if say:
                say(f"calibrating, batch {i + 1} of {len(data)}")
            capture.run(model, batch)
    return found


@torch.no_grad()
def embed(model: Any, tokenizer: Any, texts: Sequence[str], *, max_length: int = 256, batch_size: int = 8) -> Tensor:
    """Mean-pooled, normalised embeddings (texts, hidden)."""
    found = []
    for batch in inputs.batches(list(texts), tokenizer, model=model, max_length=max_length, batch_size=batch_size):
        batch = {k: v.to(model.device) for k, v in batch.items()}
        hidden = model(**batch).last_hidden_state.float()
        weight = batch["attention_mask"].unsqueeze(-1).float()
        found.append(torch.nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1))
    return torch.cat(found)


class EmbeddingQuality(NamedTuple):
    """Converted against original embeddings of the same texts."""

    cosine: float  # mean cosine of each text with itself
    rank_correlation: float  # Spearman correlation of all pairwise similarities
    retrieval: float  # how often the nearest other text is the same


def compare_embeddings(original: Tensor, converted: Tensor) -> EmbeddingQuality:
    """The three figures that say whether the converted encoder can replace the original one."""
    if original.shape != converted.shape or len(original) < 3:
        raise BochnerError(
            f"Compare embeddings of the same texts, at least 3, got {tuple(original.shape)}, {tuple(converted.shape)}."
        )
    a, b = original @ original.mT, converted @ converted.mT
    i, j = torch.triu_indices(len(a), len(a), offset=1)
    from scipy.stats import spearmanr  # here, because it takes longer to import than torch

    rank = float(spearmanr(a[i, j].cpu().numpy(), b[i, j].cpu().numpy()).statistic)
    eye = torch.eye(len(a), dtype=torch.bool)
    nearest = [t.masked_fill(eye, -2).argmax(-1) for t in (a, b)]
    agree = (nearest[0] == nearest[1]).float().mean().item()
    return EmbeddingQuality((original * converted).sum(-1).mean().item(), rank, agree)


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any, texts: Sequence[str], *, max_length: int = 512) -> float:
    """exp of the mean loss per predicted token, each text on its own."""
    total, count = 0.0, 0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=max_length).input_ids.to(model.device)
        loss = token_losses(model, ids)
        total, count = total + loss.sum().item(), count + loss.numel()
    return math.exp(total / count)


@torch.no_grad()
def recall(model: Any, tokenizer: Any, texts: Sequence[str], *, tokens: int = 120) -> float:
    """Perplexity on the repeat of a passage: the first text, another one, the first again.

    Low only if attention can still reach back over the passage in between; exact attention of a good model is near 1.
    Texts are taken in pairs; each must have at least `tokens` tokens.
    """
    ids = [tokenizer(t, return_tensors="pt").input_ids[:, :tokens] for t in texts]
    if len(ids) < 2 or any(x.shape[1] < tokens for x in ids):
        raise BochnerError(f"recall needs at least two texts of {tokens} tokens; give longer ones.")
    total, count = 0.0, 0
    for a, b in zip(ids[::2], ids[1::2], strict=False):
        loss = token_losses(model, torch.cat([a, b, a], dim=1).to(model.device))[:, -(tokens - 1) :]
        total, count = total + loss.sum().item(), count + loss.numel()
    return math.exp(total / count)


def token_losses(model: Any, ids: Tensor) -> Tensor:
    """Cross-entropy of every next token, (b, n - 1)."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
