"""RULER's needles on SmolLM2-135M: what it finds with a smaller cache, nothing trained.

The original's score comes first: a cache can lose only what the model finds. Prompts are noise with a few lines that
matter, as in RULER, with words of our own; scores are fitted to novels, so that nothing here was calibrated on.
"""

from __future__ import annotations

from typing import Any

from _framework import Said, Store, experiment, kept, table
from _pictures import COLOURS, figure, save
from decoder_texts import ROUNDED, converted, rounding

from bochner import Target, revert
from bochner.demo import load_smollm2
from bochner.tasks import ruler

TASKS = ("needle", "multikey", "multivalue")  # of chains of variables the original follows none
LENGTHS = (1000, 2000)
NOTHING_LOST = 0.05  # of what the original finds
# Shares of float32; of bfloat16 they are twice as much.
SPECS = {
    "selected keys, 12 % of float32": Target(memory=0.12, length=LENGTHS[-1]),
    "selected keys, 6 % of float32": Target(memory=0.06, length=LENGTHS[-1]),
}


@experiment(
    claim="Ours: with 24 % of the bfloat16 cache, by one call and without training, at most one needle in twenty that "
    "the original finds is lost.",
    ours="SmolLM2-135M; needle, multikey, multivalue at 1,000 and 2,000 tokens, eight samples each",
    quick="writes answers behind 2,000 tokens with a decoder of 135 million parameters, and searches for minutes",
    needs=("transformers",),
)
def measure(store: Store, samples: int = 8, lengths: tuple[int, ...] = LENGTHS) -> None:
    model, tokenizer = load_smollm2()
    asked = {f"{task}/{n}": ruler.ruler(task, tokenizer, n, samples) for task in TASKS for n in lengths}

    def row(name: str) -> None:
        for key, made in asked.items():
            store.cell(key, lambda made=made: ruler.evaluate(model, tokenizer, made), within=store.table(name))

    row("exact")
    for name, spec in SPECS.items():
        if len(store.table(name)) < len(asked):
            converted(model, tokenizer, spec, store, name)
            row(name)
            revert(model)
    for name, bits in ROUNDED.items():
        with rounding(model, bits):
            row(name)


def caches(found: Any) -> list[str]:
    """The caches that were run; a cell that was not is never guessed."""
    return [name for name, cells in found.items() if name not in ("exact", "search_seconds") and cells]


def scores(found: Any, name: str) -> dict[str, float]:
    """The mean score of each task, over lengths and samples."""
    means = {}
    for task in TASKS:
        rows = [x for key, row in found[name].items() if key.startswith(f"{task}/") for x in row]
        means[task] = sum(rows) / max(1, len(rows))
    return means


def lost(found: Any, name: str) -> float:
    """The share of what the original finds that is not found."""
    pairs = [
        (whole, part) for key, row in found["exact"].items() for whole, part in zip(row, found[name][key], strict=True)
    ]
    return sum(max(0.0, whole - part) for whole, part in pairs) / sum(whole for whole, _ in pairs)


def judge(found: Any) -> Said:
    chosen = next(iter(SPECS))
    shares = {name: lost(found, name) for name in caches(found)}
    said = ", ".join(f"{task} {score:.0%}" for task, score in scores(found, "exact").items())
    good = shares[chosen] <= NOTHING_LOST
    return Said(
        f"the original scores {said}."
        + table({name: {"lost of what it finds": f"{share:.0%}"} for name, share in shares.items()}, "cache"),
        kept(good),
        f"{shares[chosen]:.0%} of what the original finds is lost with {chosen}",
    )


def draw(found: Any) -> None:
    fig, ax = figure(figsize=(8, 3.8))
    names = ["exact", *caches(found)]
    for i, name in enumerate(names):
        means = scores(found, name)
        places = [t + 0.8 * i / len(names) for t in range(len(TASKS))]
        ax.bar(places, [100 * means[t] for t in TASKS], 0.8 / len(names), color=COLOURS[i % 7], label=name)
    ax.set_xticks([t + 0.35 for t in range(len(TASKS))], TASKS)
    ax.set_ylabel("score (%)")
    ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(fig, "needles")
