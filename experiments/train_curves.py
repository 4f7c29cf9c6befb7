"""How fast each attention learns to read: bits per byte of held-out books against steps.

Preset `small` of the task `lm`, one seed; every attention sees the same batches in the same order. Beside them the
limit that no attention can be worse than, the frequencies of the bytes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from _framework import Said, Store, experiment
from _pictures import figure, save
from _training import folder, trained

from bochner import tasks

ATTENTIONS = ("exact", "window+calibrated", "window+positive", "fastfood_prf", "relu", "positive", "identity")
CLOSE = 1.05


def curve(attention: str) -> dict[str, Any]:
    """Validation bits against steps, and those of the test books."""
    from bochner.tasks.checkpoints import lines

    where = f"curves/{attention}"
    result = trained("lm", attention, where)
    seen = [x for x in lines(folder(where) / "metrics.jsonl") if "eval_bits" in x]
    bits = {"steps": [x["step"] for x in seen], "bits": [x["eval_bits"] for x in seen]}
    return {**bits, "test": result["metrics"]["bits"], "parameters": result["parameters"]}


def frequencies() -> float:
    """Bits per byte of the validation books by how often each byte occurs in the training books."""
    task = tasks.task("lm")
    preset = tasks.preset_of(task, "small")
    train, held = (task.load(preset, split).tokens for split in ("train", "validation"))
    share = (np.bincount(train, minlength=256) + 1) / (len(train) + 256)
    return float(-np.log(share[held]).mean() / math.log(2))


@experiment(
    claim="Ours: at the same steps a linear attention reads books within 5 % of exact attention's bits per byte.",
    ours="books byte by byte, two layers, 800 steps, one seed",
    quick="trains models",
    needs=("transformers", "accelerate"),
)
def measure(store: Store) -> None:
    for attention in ATTENTIONS:
        store.cell(attention, lambda a=attention: curve(a), store.table("runs"))
    store.figures["frequencies"] = frequencies()


def judge(found: Any) -> Said:
    runs = found["runs"]
    within = [a for a in runs if a != "exact" and runs[a]["test"] <= CLOSE * runs["exact"]["test"]]
    told = ", ".join(f"{a} {runs[a]['test']:.2f}" for a in runs)
    return Said(
        f"bits per byte of the test books: {told}; within 5 %: {', '.join(within) or 'none'}.",
        "holds" if within else "fails",
        "" if within else "none is within 5 % after 800 steps",
    )


def draw(found: Any) -> None:
    runs, base = found["runs"], found["frequencies"]
    fig, ax = figure(figsize=(6.8, 4.2))
    low = math.inf
    for bits, name in sorted((run["bits"][-1], name) for name, run in runs.items())[::-1]:
        (line,) = ax.plot(runs[name]["steps"], runs[name]["bits"], lw=2.4 if name == "exact" else 1.4)
        low = min(bits, low - 0.05)  # labels that do not touch
        ax.text(runs[name]["steps"][-1] + 10, low, f"{name}  {bits:.2f}", color=line.get_color(), va="center")
    ax.set(xlabel="steps", ylabel="bits per byte, validation books", title=f"frequencies of bytes alone: {base:.2f}")
    ax.set_xlim(0, 1.32 * max(max(run["steps"]) for run in runs.values()))
    ax.set_xticks(range(0, 801, 200))
    ax.set_ylim(bottom=low - 0.1)
    save(fig, "train_curves")
