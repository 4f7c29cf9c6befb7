"""Accuracy against length: film reviews cut off after 256 to 2,048 bytes; the third axis of figures 1 and 3 of 004.

Preset `small` of the task `text` with another `length` and nothing else changed: one layer of width 32, 600 steps of
16 reviews, one seed. Runs with 1,024 bytes are those of `train_table`. Beside them what the counts of bytes alone
tell, by a logistic regression on the same bytes. "Level" is within two standard errors of a difference of two shares
of the tests.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import train_table
from _framework import Said, Store, experiment, table
from _pictures import figure, log_ticks, save
from _training import trained

from bochner import tasks

LENGTHS = (256, 512, 1024, 2048)
LEARNED = ("fastfood_prf",)
ATTENTIONS = ("exact", "positive", *LEARNED, "window+calibrated", "fnet", "identity")
LAST = ("exact/2048",)  # takes longer than all others together


def wanted() -> list[str]:
    """Every cell as attention/length, short sequences first."""
    return sorted((f"{a}/{n}" for n in LENGTHS for a in ATTENTIONS), key=LAST.__contains__)


def of_table() -> dict[str, float]:
    """The cells that the table has, at its own length."""
    length = tasks.task("text").presets["small"].length
    runs = {tuple(k.split("/")): run["accuracy"] for k, run in train_table.known().items()}
    return {f"{a}/{length}": x for (t, a, s), x in runs.items() if (t, s) == ("text", "0") and a in ATTENTIONS}


def counts_alone(length: int) -> float:
    """Test accuracy of a logistic regression on how often each byte occurs in the first `length - 1` bytes."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    preset = tasks.preset_of(tasks.task("text"), "small", length=length)
    rows = {}
    for split in ("train", "test"):
        found = tasks.task("text").load(preset, split)
        shares = [np.bincount(found.raw(i)[: length - 1], minlength=256) / length for i in range(len(found))]
        rows[split] = np.stack(shares), found.labels
    scale = StandardScaler().fit(rows["train"][0])
    model = LogisticRegression(max_iter=1000).fit(scale.transform(rows["train"][0]), rows["train"][1])
    return float(model.score(scale.transform(rows["test"][0]), rows["test"][1]))


@experiment(
    claim="Learned kernels keep the accuracy of softmax attention, for less time and memory.",
    items=("004 Figure 3, accuracy",),
    paper="Text and Retrieval of the Long Range Arena, 4,000 bytes, 4 layers",
    ours="film reviews of up to 2,048 bytes, one layer, one seed",
    quick="trains models",
    needs=("transformers", "accelerate", "sklearn"),
)
def measure(store: Store, only: str = "") -> None:
    accuracy, counts = store.table("accuracy"), store.table("counts")
    accuracy |= of_table()

    def fit(cell: str) -> float:
        attention, length = cell.split("/")
        return float(trained("text", attention, f"length/{cell}", length=int(length))["metrics"]["accuracy"])

    for cell in wanted():
        if only in cell:
            store.cell(cell, lambda c=cell: fit(c), accuracy)
    for n in LENGTHS:
        store.cell(str(n), lambda n=n: counts_alone(n), counts)


def noise(share: float, count: int) -> float:
    """Standard error of the difference of two shares near this one."""
    return math.sqrt(2 * share * (1 - share) / count)


def behind(accuracy: dict[str, float], count: int) -> dict[str, float]:
    """By how much the best learned kernel is behind exact attention, where that is more than two standard errors."""
    out = {}
    for n in LENGTHS:
        learned = [accuracy[f"{a}/{n}"] for a in LEARNED if f"{a}/{n}" in accuracy]
        exact = accuracy.get(f"exact/{n}")
        if exact is not None and learned and exact - max(learned) > 2 * noise(exact, count):
            out[str(n)] = exact - max(learned)
    return out


def needed(accuracy: dict[str, float]) -> bool:
    """Whether exact attention beats a model without any somewhere."""
    both = [(accuracy.get(f"exact/{n}"), accuracy.get(f"identity/{n}")) for n in LENGTHS]
    return any(exact > none for exact, none in both if exact is not None and none is not None)


def judge(found: Any) -> Said:
    accuracy = found["accuracy"]
    lost = behind(accuracy, tasks.task("text").presets["small"].test or 1)
    shown = {a: [accuracy.get(f"{a}/{n}") for n in LENGTHS] for a in ATTENTIONS}
    cells = {a: ["not run" if x is None else f"{100 * x:.1f} %" for x in row] for a, row in shown.items()}
    heads = [f"{n:,} bytes" for n in LENGTHS]
    told = table({a: dict(zip(heads, row, strict=True)) for a, row in cells.items()}, "accuracy")
    missing = [c for c in wanted() if c not in accuracy]
    return Said(
        f"{told}Learned behind exact by more than two standard errors at: {', '.join(lost) or 'no length'}.",
        "not" if lost else "partly" if needed(accuracy) else "not tested",
        "one task, one small layer and one seed"
        + ("" if needed(accuracy) else ". A model without attention does as well at every length")
        + (f". Not run: {', '.join(missing)}" if missing else ""),
    )


def draw(found: Any) -> None:
    fig, ax = figure(figsize=(6.4, 3.8))
    for name in ATTENTIONS:
        seen = [(n, 100 * found["accuracy"][f"{name}/{n}"]) for n in LENGTHS if f"{name}/{n}" in found["accuracy"]]
        ax.plot(*zip(*seen, strict=True), marker="o", lw=2.4 if name == "exact" else 1.4, label=name)
    alone = {int(n): 100 * x for n, x in found["counts"].items()}
    ax.plot(list(alone), list(alone.values()), "--", color="0.5", label="counts of bytes")
    log_ticks(ax, LENGTHS, base=2)
    ax.set(xlabel="bytes of a review", ylabel="accuracy (%)")
    ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(fig, "train_length")
