"""Rates of SmolLM2-135M: tokens per second of prefill at 4,000 tokens and of decoding at 4,000 and 8,000, converted.

Caches are filled with random keys and values: nothing here depends on what they are. Prefill is read in pieces of 512
tokens, whose time grows linearly with what stands before them: it is measured behind 0, 2,000 and 3,488 tokens. Plans
are a window of 128 with 10 key heads exact, and selected keys: the three key heads of each layer hold very different
numbers of them, as in plans that a search finds. One has the memory that the search for `keep=0.99` chose at 4,000
tokens (`smollm_target`). Call it on an idle machine.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from _framework import Said, Store, experiment, figures_of
from _pictures import COLOURS, figure, save

from bochner import Plan, convert
from bochner._timing import best_times
from bochner.demo import load_smollm2

PIECE, PREFILL, LENGTHS = 512, 4000, (4000, 8000)
PLACES = (0, 2000, PREFILL - PIECE)  # behind which a piece is read
WANTED = {"prefill": 1.0, "decoding at 4000": 1.2, "decoding at 8000": 1.5}  # of the rate of the original
WHOLE = 30 * 3 * 2 * 64 * 4  # bytes of a token in float32
SPREAD = (0.2, 0.7, 2.1)  # keys of the key heads of a layer, over their mean
NAMED = "window 128, 10 of 90 groups exact"


def groups_exact(count: int, window: int) -> Any:
    """Key heads spread over the layers: which they are makes no difference to the time."""
    from bochner.hf import Exact, LayerPlan, Window

    layers = []
    for i in range(30):
        exact = {g for g in range(3) if (3 * i + g) * count // 90 != (3 * i + g + 1) * count // 90}
        fates = [Exact() if g in exact else Window(window, 4, "sliding") for g in range(3)]
        name = f"model.layers.{i}.self_attn"
        layers.append(LayerPlan(name, 9, 3, 64, 64, fates, is_causal=True))
    return Plan(layers, "llama")


@torch.no_grad()
def filled(model: Any, length: int) -> Any:
    """A cache as it would be after `length` tokens."""
    from transformers import DynamicCache

    from bochner.hf import Call, RecurrentLayer, layers_of

    g = torch.Generator().manual_seed(length)
    cache = DynamicCache(config=model.config)
    if not length:
        return cache
    own = layers_of(model) if hasattr(model.model.layers[0].self_attn, "linear_attn") else {}
    for i in range(len(model.model.layers)):
        q, k, v = (torch.randn(1, h, length, 64, generator=g) for h in (9, 3, 3))
        layer = own.get(f"model.layers.{i}.self_attn")
        if layer is None or layer.plan.untouched:
            cache.update(k, v, i)
            continue
        held = cache.layers[i] = RecurrentLayer()
        held.seen = length
        if any(fate.name == "selected" for fate in layer.plan.fates):
            q, k, v = (x[:, :3, :PREFILL] for x in (q, k, v))  # all slots are full by then; one query a key head does
        else:
            q = q[..., -1:, :]  # the others need no row to hold their keys
        hidden = torch.randn(1, k.shape[-2], 576, generator=g)
        layer(Call(q, k, v, True, None, 0.125, hidden=hidden), held)
    return cache


@torch.no_grad()
def behind(models: dict[str, Any], length: int, tokens: int, rounds: int) -> dict[str, float]:
    """Seconds of some tokens at once, behind `length` others."""
    ids = torch.arange(1000, 1000 + tokens)[None]
    caches = {name: filled(model, length) for name, model in models.items()}

    def step(name: str) -> Any:
        # Copying the cache would be most of a single step, and a few steps on make no difference.
        cache = caches[name] if tokens == 1 else copy.deepcopy(caches[name])
        return models[name](ids, past_key_values=cache, logits_to_keep=1)

    return best_times({name: lambda n=name: step(n) for name in models}, repeats=rounds, budget=60.0, warm_up=False)


def selects(memory: float, precision: str, length: int = PREFILL) -> Any:
    """Selected keys that fill a share of the float32 cache at a length."""
    from bochner.hf import LayerPlan, Selected
    from bochner.hf.attention import LinearAttention
    from bochner.hf.plan import Fitted

    def layers(mean: int) -> list[LayerPlan]:
        fates = [Selected(128, 4, round(mean * part), precision, 576) for part in SPREAD]
        return [LayerPlan(f"model.layers.{i}.self_attn", 9, 3, 64, 64, list(fates), is_causal=True) for i in range(30)]

    least, more = (Plan(layers(n)).cache_bytes(length) for n in (0, 1000))
    mean = int(1000 * (memory * WHOLE * length - least) / (more - least))
    plan, g = Plan(layers(mean), "llama"), torch.Generator().manual_seed(0)
    for layer in plan.layers:
        state = LinearAttention(layer).state_dict()
        for name in [name for name in state if name.endswith("weights")]:
            state[name] = torch.randn(state[name].shape, generator=g)
        plan.maps[layer.name] = Fitted(list(layer.fates), state)
    return plan


def converted_models() -> dict[str, Any]:
    """The model and its conversions, which share its weights."""
    model, _ = load_smollm2()
    share = figures_of("smollm_target")["4000"]["row"]["memory"]
    plans = {
        NAMED: groups_exact(10, 128),
        "selected, 12 % of bfloat16": selects(0.06, "int4"),
        "selected, 12 %, 8 bits": selects(0.06, "int8"),
        f"selected, {200 * share:.0f} %, as `keep=0.99` chooses": selects(share, "int4"),
    }
    models = {"original": model}
    for name, plan in plans.items():
        other = copy.deepcopy(model)
        for a, b in zip(other.parameters(), model.parameters(), strict=True):
            a.data = b.data
        models[name] = convert(other, plan).model
    return models


@experiment(
    claim="Ours: SmolLM2 with 12 % of the bfloat16 cache decodes at least 1.2 times as fast behind 4,000 tokens. "
    "Behind 8,000 it decodes 1.5 times as fast. It reads 4,000 tokens no slower.",
    ours="one sequence, one thread",
    quick="times a decoder of 135 million parameters behind 8,000 tokens",
    needs=("transformers",),
)
def measure(store: Store, rounds: int = 3) -> None:
    models = converted_models()
    for length in LENGTHS:
        store.cell(f"decoding at {length}", lambda n=length: rates(behind(models, n, 1, 4 * rounds), 1))
    places = [store.cell(f"reading behind {n}", lambda n=n: behind(models, n, PIECE, 2)) for n in PLACES]
    mean = {name: sum(place[name] for place in places) / len(places) for name in models}
    store.cell("prefill", lambda: rates(mean, PIECE))


def rates(seconds: dict[str, float], tokens: int) -> dict[str, float]:
    """Tokens per second."""
    return {name: tokens / x for name, x in seconds.items()}


def judge(found: Any) -> Said:
    chosen, *_, leaner = (name for name in found["prefill"] if name.startswith("selected"))
    ratios, lean = (
        {where: found[where][name] / found[where]["original"] for where in WANTED} for name in (chosen, leaner)
    )
    slow = [where for where, least in WANTED.items() if ratios[where] < least]
    return Said(
        "tokens per second over those of the original: "
        + ", ".join(f"{n} {x:.2f}" for n, x in ratios.items())
        + "; with the memory that `keep=0.99` chooses: "
        + ", ".join(f"{n} {x:.2f}" for n, x in lean.items())
        + ".",
        "fails" if slow else "holds",
        "too slow: " + ", ".join(slow) if slow else "",
    )


def draw(found: Any) -> None:
    found = {where: found[where] for where in WANTED}
    names = list(next(iter(found.values())))
    fig, ax = figure(figsize=(7, 3.4))
    for i, name in enumerate(names):
        ratios = [row[name] / row["original"] for row in found.values()]
        bars = ax.bar([x + 0.17 * (i - 2) for x in range(len(found))], ratios, 0.16, label=name, color=COLOURS[i])
        ax.bar_label(bars, [f"{row[name]:.0f}" for row in found.values()], fontsize=6)
    ax.set_xticks(range(len(found)), list(found))
    ax.set(ylabel="rate over that of the original", title="above the bars: tokens a second, one thread")
    ax.set_ylim(0, 2.4)
    ax.legend(fontsize=7, loc="upper left", ncols=2)
    save(fig, "smollm_rates")
