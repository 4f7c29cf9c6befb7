"""Quality of SmolLM2-135M over a whole book: perplexity by position, and recall of passages 500 to 6,000 tokens back.

The text is a book of a held-out author, read piece by piece as generation would, followed by three passages of it
again, those that began 500, 2,000 and 6,000 tokens before its end.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from _framework import Said, Store, experiment, figures_of, table
from _pictures import COLOURS, figure, save
from smollm_target import LENGTH, WORDS

from bochner import Calibration, Plan, Recipe, convert, data
from bochner.demo import load_smollm2
from bochner.hf import Selected, fit_selected

BACK = (500, 2000, 6000)
PASSAGE, LEAD = 96, 8  # tokens of a repeat, of which the first only tell what is repeated
BOUNDS = (0, 500, 1000, 2000, 4000, 8000)
NEAR: dict[str, Any] = {"window": 128, "sinks": 4, "window_kind": "sliding"}
FIT_LENGTH = 320  # tokens of calibration texts
FITTED = {"window 128 + landmark m=64 fitted to 4,000 tokens": 4000}
# Groups are key heads with their query heads. A name in place of a recipe: the plan that `smollm_target` found.
RECIPES: dict[str, Recipe | str | None] = {
    "exact": None,
    "window 128": Recipe(None, **NEAR),
    "window 512": Recipe(None, **{**NEAR, "window": 512}),
    "window 128, 10 of 90 groups exact": Recipe(None, exact_heads=1 / 9, **NEAR),
    "window 128, 30 of 90 groups exact": Recipe(None, exact_heads=1 / 3, **NEAR),
    "window 128 + landmark m=64": Recipe("landmark", 64, **NEAR),
    "window 128 + landmark m=64, 30 of 90 groups exact": Recipe("landmark", 64, exact_heads=1 / 3, **NEAR),
    "window 128 + landmark m=64 fitted to 4,000 tokens": Recipe("landmark", 64, **NEAR),
    "keep 0.99, judged at 512 tokens": "512",
    "keep 0.99 at 1,000 tokens": "1000",
    "keep 0.99 at 4,000 tokens": "4000",
}


def text(tokenizer: Any, length: int) -> torch.Tensor:
    """Tokens (1, n): a book's first `length`, and the passages again."""
    words = " ".join(data.paragraphs("heldout", 1, words=length))
    book = tokenizer(words, return_tensors="pt").input_ids[0, :length]
    again = [book[length - back : length - back + PASSAGE] for back in BACK]
    return torch.cat([book, *again])[None]


def figures(model: Any, ids: torch.Tensor, length: int) -> dict[str, Any]:
    """Perplexity by position, recall by distance, and what reading took."""
    from bochner.hf.evaluate import read

    reading = read(model, ids)
    losses = reading.losses  # of tokens 1, 2, ...
    by_place = {
        f"{a}-{min(b, length)}": math.exp(losses[max(a - 1, 0) : min(b, length) - 1].mean().item())
        for a, b in pairwise(BOUNDS)
        if a < length
    }
    starts = [length + i * PASSAGE - 1 for i in range(len(BACK))]
    recalled = {
        str(back): math.exp(losses[start + LEAD : start + PASSAGE].mean().item())
        for back, start in zip(BACK, starts, strict=True)
    }
    return {
        "perplexity": by_place,
        "recall": recalled,
        **reading.costs,
    }


def converted(model: Any, tokenizer: Any, recipe: Recipe | str, length: int) -> Any:
    """The conversion by a recipe, fitted to texts of some tokens, or by a plan that `smollm_target` found.

    The scores of selected keys are no part of a plan: they are fitted anew, by the texts of that search.
    """
    if isinstance(recipe, Recipe):
        texts = data.paragraphs("calibration", 6, words=max(250, 3 * length // 4))
        return convert(model, recipe, Calibration(texts, tokenizer, max_length=length, batch_size=1), progress=True)
    stored = figures_of("smollm_target")[recipe]["report"]["plan"]
    for layer in stored["layers"]:
        layer.pop("exact_below", None)  # of an older version
    plan = Plan.from_dict(stored)
    words = 3 * int(recipe) // 4
    texts = Calibration(data.paragraphs("calibration", max(5, WORDS // words), words=words), tokenizer)
    fates = [fate for layer in plan.layers for fate in layer.fates if isinstance(fate, Selected)]
    fitted = fit_selected(model, texts, length=LENGTH, window=fates[0].window).maps
    plan.maps = {layer.name: fitted[layer.name]._replace(fates=list(layer.fates)) for layer in plan.layers}
    return convert(model, plan)


@experiment(
    claim="Ours: what windows lose is far away; whole books show it, short texts do not.",
    ours="one book of 6,500 tokens, eleven recipes",
    quick="reads a book with a decoder of 135 million parameters, several times",
    needs=("transformers",),
)
def measure(store: Store, length: int = 6500, only: str = "") -> None:
    """`length`: tokens of the book; the model has 8,192 positions. `only`: recipes whose name contains this."""
    model, tokenizer = load_smollm2()
    ids = text(tokenizer, length)

    def one(name: str) -> dict[str, Any]:
        recipe = RECIPES[name]
        if recipe is None:
            return {**figures(model, ids, length), "memory": 1.0}
        conversion = converted(model, tokenizer, recipe, FITTED.get(name, FIT_LENGTH))
        plan = conversion.plan
        row = {
            **figures(model, ids, length),
            "memory": plan.cache_bytes(4000) / plan.cache_bytes(4000, converted=False),
        }
        conversion.revert()
        return row

    for name in RECIPES:
        if only in name:
            store.cell(name, lambda n=name: one(n))


def judge(found: Any) -> Said:
    exact, window = found["exact"], found["window 128"]
    *_, last = exact["perplexity"]
    ratios = {n: row["perplexity"][last] / exact["perplexity"][last] for n, row in found.items() if n != "exact"}
    told = table({n: {"perplexity ratio": f"{x:.3f}"} for n, x in ratios.items()}, "cache")
    grows = ratios["window 128"] > 1.05 and window["recall"]["2000"] > 3 * exact["recall"]["2000"]
    return Said(
        f"SmolLM2 at positions {last} of a book:{told}",
        "holds" if grows else "fails",
        "" if grows else "the window alone loses less than 5 %",
    )


def draw(found: Any) -> None:
    """Perplexity over a whole book by position, and recall by distance, relative to exact attention."""
    stages = figures_of("smollm_distilled")
    found["window 256, 8 of 90 groups exact"] = stages["converted"]["book"]
    found["window 256, 8 of 90 groups exact, trained"] = stages["trained"]["book"]
    found["keep=0.99, memory=0.15, trained"] = stages["target"]["book"]
    fig, (left, right) = figure(2, figsize=(11, 3.8))
    exact = found["exact"]
    for i, (name, row) in enumerate(found.items()):
        colours = (*COLOURS[6:], *COLOURS[:6])
        style = {"color": colours[i % len(colours)], "linestyle": "-" if i < len(colours) else "--"}
        places = list(row["perplexity"])
        ratios = [row["perplexity"][p] / exact["perplexity"][p] for p in places]
        left.plot(range(len(places)), ratios, marker="o", markersize=3, label=name, **style)
        left.set_xticks(range(len(places)), places, fontsize=8)
        far = list(row["recall"])
        right.plot(range(len(far)), list(row["recall"].values()), marker="o", markersize=3, **style)
        right.set_xticks(range(len(far)), [f"{int(n):,}" for n in far])
    left.set_yscale("log")
    left.set_yticks([1, 1.5, 2, 5, 10, 50], ["1", "1.5", "2", "5", "10", "50"])
    left.minorticks_off()
    left.set(xlabel="positions in the book", ylabel="perplexity over that of exact attention")
    right.set_yscale("log")
    right.set_yticks([2, 5, 10, 50, 1000], ["2", "5", "10", "50", "1,000"])
    right.minorticks_off()
    right.set(xlabel="tokens between a passage and its repetition", ylabel="perplexity of the repetition")
    left.legend(fontsize=6, handlelength=3.5)
    save(fig, "long_context")
