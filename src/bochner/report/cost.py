"""What attention costs against length, on a page: seconds, memory, and where it begins to pay."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from bochner.hf.attention import LinearAttention, layer_seconds
from bochner.hf.plan import LayerPlan, Plan
from bochner.report import Number, Report

Times = dict[int, dict[str, float]]


def layer_times(plan: LayerPlan, lengths: Sequence[int]) -> Times:
    """Seconds of one attention layer, "exact" and by its "plan", taking turns, at some lengths."""
    layers = {"plan": LinearAttention(plan)}
    return {n: layer_seconds(layers, plan, n, "cpu", torch.float32) for n in lengths}


def crossing(times: Times) -> float | None:
    """The length from which the plan is faster than exact attention, between measured lengths; None if it never is.

    >>> crossing({100: {"exact": 1.0, "plan": 2.0}, 200: {"exact": 4.0, "plan": 2.0}})
    141.4213562373095
    >>> crossing({100: {"exact": 1.0, "plan": 0.5}}), crossing({100: {"exact": 1.0, "plan": 2.0}})
    (100.0, None)
    """
    lengths = sorted(times)
    ratios = [math.log(times[n]["plan"] / times[n]["exact"]) for n in lengths]
    if ratios[-1] > 0:
        return None
    last = max((i for i, r in enumerate(ratios) if r > 0), default=-1)
    if last < 0:
        return float(lengths[0])
    share = ratios[last] / (ratios[last] - ratios[last + 1])
    return lengths[last] * (lengths[last + 1] / lengths[last]) ** share


def typical_layer(plan: Plan) -> LayerPlan:
    """The layer whose fates are the most common in a plan."""
    layers = plan.converted or plan.layers
    counts = [Counter(layer.fates) for layer in layers]
    return layers[max(range(len(layers)), key=lambda i: counts.count(counts[i]))]


def add_costs(page: Report, plan: Plan, times: Times, *, positions: int | None = None, source: str = "") -> None:
    """Time and memory by length, and where the text came from.

    `positions`: what the model has, named where times go beyond them.
    """
    head, decodes = ["tokens", "exact (ms)", "converted (ms)"], any(layer.is_causal for layer in plan.layers)
    rows: list[list[object]] = [[f"{n:,}", 1e3 * times[n]["exact"], 1e3 * times[n]["plan"]] for n in sorted(times)]
    if decodes:
        head += ["cache as it was (MB)", "cache converted (MB)"]
        for row, n in zip(rows, sorted(times), strict=True):
            row += [plan.cache_bytes(n, converted=done) / 1e6 for done in (False, True)]
    page.heading("What it costs, by length").table(head, rows)
    told = "Times are those of one attention layer. " + crossing_sentence(crossing(times), times)
    if positions is not None and positions < max(times):
        told += f" The model has positions for {positions:,} tokens: beyond them its attention alone was timed."
    if decodes:
        told += " The cache is that of all layers in float32, computed from the plan."
    page.text(told, note=True)
    if source:
        page.text(f"Text: {source}.", note=True)


def crossing_sentence(where: float | None, times: Times) -> str:
    low, high = min(times), max(times)
    if where is None:
        return f"Exact attention is faster at every length measured, up to {high:,} tokens."
    if where <= low:
        return f"The converted layer is faster at every length measured, from {low:,} tokens on."
    return f"Below about {round_length(where):,} tokens exact attention is faster."


def round_length(value: float) -> int:
    """A length to two digits, as exact as a crossing of measured lines is."""
    step = 10 ** max(0, math.floor(math.log10(max(value, 1))) - 1)
    return int(round(value / step) * step)


def memory_number(plan: Plan, length: int) -> Number:
    """The memory of decoding, as a number of the verdict; encoders keep none."""
    if not any(layer.is_causal for layer in plan.layers):
        return Number("memory", "as before", "an encoder keeps nothing between calls")
    before, after = plan.cache_bytes(length, converted=False), plan.cache_bytes(length)
    return Number(
        "memory",
        f"{after / before:.0%}",
        f"of the cache at {length:,} tokens: {after / 1e6:.1f} of {before / 1e6:.1f} MB",
    )
