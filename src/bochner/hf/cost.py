"""What attention costs: seconds of layers and the length from which conversion is faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from bochner._checks import BochnerError, is_int
from bochner._timing import best_times
from bochner.hf.layer import Call, LinearAttention, exact
from bochner.hf.plan import LayerPlan, Plan

LENGTHS = (128, 256, 512, 1024, 2048, 4096)  # at which layers are timed to find where they cross
ROUNDS = 5


def random_call(plan: LayerPlan, length: int, dtype: torch.dtype = torch.float32) -> Call:
    """A call of one sequence of `length` tokens with the heads of a layer."""
    g = torch.Generator().manual_seed(length)
    heads = ((plan.num_heads, plan.head_dim), (plan.num_kv_heads, plan.head_dim), (plan.num_kv_heads, plan.value_dim))
    q, k, v = (torch.randn(1, h, length, d, generator=g).to(dtype) for h, d in heads)
    return Call(q, k, v, plan.is_causal, None, plan.head_dim**-0.5)


@torch.no_grad()
def layer_seconds(layers: Sequence[LinearAttention], length: int, rounds: int = ROUNDS) -> list[tuple[float, float]]:
    """Seconds of exact attention and of each layer's own at one length, taking turns on this machine."""
    runs: dict[str, Any] = {}
    for i, layer in enumerate(layers):
        call = random_call(layer.plan, length)
        runs |= {f"exact {i}": partial(exact, call), f"own {i}": partial(layer, call)}
    seconds = best_times(runs, repeats=rounds, budget=0.5)
    return [(seconds[f"exact {i}"], seconds[f"own {i}"]) for i in range(len(layers))]


def crossover(plan: Plan, lengths: Sequence[int] = LENGTHS) -> int:
    """The number of tokens from which the attention of all converted layers is faster than exact attention.

    Measured on random inputs at rising lengths until it is, and interpolated; beyond the last length by the growth of
    either, at most eight times as far. 0 if nothing is converted.
    """
    kinds: Counter[tuple[Any, ...]] = Counter()
    alike: dict[tuple[Any, ...], LinearAttention] = {}
    for layer in plan.converted:
        near = (layer.window, layer.window_kind, layer.sinks, layer.is_causal)
        key = (*sorted(Counter(layer.kinds).items()), *near, layer.feature_map, layer.num_features)
        kinds[key] += 1
        if key not in alike:
            alike[key] = LinearAttention(layer)
    common = [key for key, _ in kinds.most_common(3)]
    if not common:
        return 0
    before = (0, 0.0)
    for n in lengths:
        pairs = layer_seconds([alike[key] for key in common], n)
        plain, own = (sum(kinds[key] * pair[i] for key, pair in zip(common, pairs, strict=True)) for i in (0, 1))
        if own <= plain:
            last, excess = before
            gain = 1 - own / plain
            return n if not last else round(last + (n - last) * excess / (excess + gain))
        before = (n, own / plain - 1)
    return min(round(lengths[-1] * own / plain), 8 * lengths[-1])


def check_border(exact_below: Any, owner: str) -> int | None:
    """The number of tokens below which a model is as it was; None if that is to be measured."""
    if exact_below == "auto":
        return None
    if exact_below is not None and (not is_int(exact_below) or exact_below < 0):
        raise BochnerError(f"The 'exact_below' of {owner} must be an int >= 0 or 'auto', got {exact_below!r}.")
    return int(exact_below or 0)
