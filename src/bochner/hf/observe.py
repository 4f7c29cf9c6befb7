"""Passes over the exact model: statistics of its attention, the heads that retrieve, and the error of linear heads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bochner.hf import capture
from bochner.hf.calibration import Far, HeadStatistics, Samples, attention_weights, far_pairs, peaks
from bochner.hf.interface import Call
from bochner.hf.layer import LinearAttention, exact
from bochner.hf.plan import Plan
from bochner.moments import PairMoments

PROBE, PROBES = 120, 3  # tokens of a passage, and number of probes, for finding heads that retrieve
GATES = (0.1, 0.5, 0.9)  # where the gradient of the heads' gates is taken


class Statistics:
    """What one pass over the calibration data found, by attention module."""

    def __init__(self, names: Iterable[str]) -> None:
        names = list(names)
        self.moments: dict[str, PairMoments] = {}
        self.heads = {n: HeadStatistics() for n in names}
        self.samples = {n: Samples() for n in names}
        self.retrieval: dict[str, Tensor] = {}


def observe(model: Any, plan: Plan, data: Sequence[dict[str, Tensor]], say: Any = None) -> Statistics:
    """Run the exact model over the data and gather the statistics of every module of the plan."""
    found = Statistics(layer.name for layer in plan.layers)
    near = {layer.name: (layer.window, layer.sinks) for layer in plan.layers}
    mapped = {layer.name for layer in plan.layers if {"hybrid", "kernel"} & set(layer.kinds)}

    def look(name: str, call: Call) -> None:
        if name in near:
            far = Far.of(call, *near[name])
            weights = attention_weights(call, far.allowed)
            if name in mapped:
                moments = far_pairs(call, weights, far)
                found.moments[name] = found.moments[name] + moments if name in found.moments else moments
                found.samples[name].add(call)
            found.heads[name].add(call, weights, far)

    with capture.recording(model, look):
        for i, batch in enumerate(data):
            if say:
                say(f"calibrating, batch {i + 1} of {len(data)}")
            capture.run(model, batch)
    return found


def observe_retrieval(
    model: Any, plan: Plan, data: Sequence[dict[str, Tensor]], found: Statistics, score: str = "gradient"
) -> None:
    """Which heads look something up, on probes made of the calibration tokens: a passage, another, the first again.

    `"gradient"`: how much the loss on the repeat falls as a head goes from window and sinks to exact attention, by the
    gradient of a gate on every head, averaged on the way from none exact to all exact. `"peak"`: how much higher a
    head's attention peaks on the repeat than before it; no gradient and no language-model head needed. Peaks on plain
    text tell nothing: the highest are those of heads that rest on some punctuation mark.
    """
    stream = [row[mask.bool()] for b in data for row, mask in zip(b["input_ids"], _mask_of(b), strict=True)]
    tokens = torch.cat(stream)
    near = {layer.name: (layer.window, layer.sinks) for layer in plan.layers if not layer.is_cross}
    length = max(PROBE, *((w or 0) // 2 + 32 for w, _ in near.values()))
    length = min(length, len(tokens) // 2)
    pieces = [tokens[start : start + 2 * length].split(length) for start in range(0, len(tokens), 2 * length)]
    probes = [torch.cat([p[0], p[1], p[0]])[None] for p in pieces[:PROBES] if len(p) == 2 and len(p[1]) == length]
    if score == "gradient":
        found.retrieval.update(_gate_gradients(model, plan, probes, length))
        return

    def look(name: str, call: Call) -> None:
        if name in near:
            far = Far.of(call, *near[name])
            peak = peaks(call, attention_weights(call, far.allowed), far).double()
            rise = peak[..., 2 * length :].mean((0, 2)) - peak[..., length : 2 * length].mean((0, 2))
            found.retrieval[name] = found.retrieval.get(name, 0) + rise / len(probes)

    with capture.recording(model, look):
        for ids in probes:
            capture.run(model, {"input_ids": ids})


def _gate_gradients(model: Any, plan: Plan, probes: Sequence[Tensor], length: int) -> dict[str, Tensor]:
    """Fall of the loss on the last `length` tokens per head, integrated along gates from 0 (window) to 1 (exact)."""
    bare = plan.copy()
    for layer in bare.layers:
        kind = "window" if layer.window is not None or layer.sinks else "kernel"
        layer.kinds = [kind] * layer.num_heads
    windows = {x.name: LinearAttention(x) for x in bare.layers if not x.is_cross}
    device = next(model.parameters()).device
    for module in windows.values():
        module.to(device)
    frozen = [p for p in model.parameters() if p.requires_grad]
    gates: dict[str, Tensor] = {}
    total: dict[str, Tensor] = {}

    def look(name: str, call: Call) -> Tensor | None:
        if name not in windows:
            return None
        far = windows[name](
            call.query, call.key, call.value, is_causal=call.is_causal, padding=call.padding, scale=call.scale
        )
        g = gates[name][None, :, None, None].to(far.dtype)
        return g * exact(call.query, call.key, call.value, call.is_causal, call.padding, call.scale) + (1 - g) * far

    for p in frozen:
        p.requires_grad_(False)
    try:
        for level in GATES:
            gates = {n: torch.full((m.plan.num_heads,), level, device=device) for n, m in windows.items()}
            for g in gates.values():
                g.requires_grad_(True)
            for ids in probes:
                with capture.recording(model, look), torch.enable_grad():
                    logits = model(input_ids=ids.to(device), use_cache=False).logits[:, -length:-1].float()
                    loss = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, -length + 1 :].to(device))
                    loss.backward()
            for name, g in gates.items():
                assert g.grad is not None
                total[name] = total.get(name, 0) - g.grad.double().cpu() / (len(GATES) * len(probes))
    finally:
        for p in frozen:
            p.requires_grad_(True)
    return total


def _mask_of(batch: dict[str, Tensor]) -> Tensor:
    mask = batch.get("attention_mask")
    return torch.ones_like(batch["input_ids"]) if mask is None else mask


def head_errors(model: Any, layers: dict[str, LinearAttention], data: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Relative error of each head's output under its plan, |out - exact| / |exact| over the data, on exact inputs."""
    sums: dict[str, list[Tensor]] = {}

    def look(name: str, call: Call) -> Tensor | None:
        if name not in layers:
            return None
        truth = exact(call.query, call.key, call.value, call.is_causal, call.padding, call.scale)
        out = layers[name](
            call.query, call.key, call.value, is_causal=call.is_causal, padding=call.padding, scale=call.scale
        )
        error, size = (out - truth).double(), truth.double()
        if call.padding is not None and call.padding.shape[1] == truth.shape[-2]:
            keep = ~call.padding[:, None, :, None]
            error, size = error * keep, size * keep
        pair = [t.square().sum((0, 2, 3)) for t in (error, size)]
        sums[name] = pair if name not in sums else [x + y for x, y in zip(sums[name], pair, strict=True)]
        return truth

    with capture.recording(model, look):
        for batch in data:
            capture.run(model, batch)
    return {name: (e / s.clamp_min(1e-30)).sqrt() for name, (e, s) in sums.items()}
