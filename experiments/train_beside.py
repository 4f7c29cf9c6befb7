"""Softmax beside the kernels on six more tasks: sentences, hidden words, proteins, pixels and books in byte pairs.

Exact attention, a model without attention and kernels get the same sizes, rates and seeds. Two tasks of sentences are
trained twice: from scratch, and from the encoder that `pretraining` made with the same attention, as table 6 of paper
004 does. Sizes were set before the first run so that a run takes about a minute; no kernel was looked at for them.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import numpy as np
from _framework import Said, Store, experiment, figures_of
from _training import Gate, by_frequency, folder, gate, spread, trained

from bochner import BochnerError, tasks

SEEDS = 3
ATTENTIONS = ("exact", "identity", "positive", "relu", "gmm_prf")
FIXED, LEARNED = ("positive", "relu"), ("gmm_prf",)
START = "pretraining"
# Row: the task and what is changed of its preset `small`.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "pretraining": ("pretraining", {"steps": 800}),
    "sentiment, pretrained": ("sentiment", {"steps": 400}),
    "nli, pretrained": ("nli", {"steps": 600}),
    "sentiment": ("sentiment", {"steps": 400}),
    "nli": ("nli", {"steps": 600}),
    "protein_causal": ("protein_causal", {"steps": 400}),
    "pixels": ("pixels", {"length": 192, "steps": 600, "data": {"side": 8}}),
    "lm_bpe": ("lm_bpe", {"length": 128, "steps": 400}),
}
UNITS = {"accuracy": (100.0, 1), "bits": (1.0, 3)}  # of the figure that counts: a factor and the digits shown
CHANCE = {"sentiment": 0.5, "nli": 1 / 3}
Figures = dict[str, Any]


def wanted() -> list[str]:
    """Every cell as row/attention/seed: all rows with one seed, then whether attention decides, then the rest."""
    cells = [(row, a, 0) for row in (START, *reversed(ROWS)) for a in ATTENTIONS]
    cells += [(row, a, s) for row in ROWS for s in range(SEEDS) for a in ATTENTIONS[:2]]
    cells += [(row, a, s) for s in range(SEEDS) for row in ROWS for a in ATTENTIONS]
    return list(dict.fromkeys("/".join(map(str, cell)) for cell in cells))


def where(row: str, attention: str, seed: str) -> str:
    return f"train_beside/{row}/{attention}/{seed}"


def fit(cell: str, steps: int | None) -> Figures:
    """The figures of one run on the test split, its sizes, and its seconds of processor time; or where it stopped."""
    row, attention, seed = cell.split("/")
    task, sizes = ROWS[row]
    sizes = sizes | ({"steps": steps} if steps else {})
    if row.endswith("pretrained"):
        sizes = sizes | {"start": folder(where(START, attention, seed))}
    began = time.process_time()
    try:
        run = trained(task, attention, where(row, attention, seed), seed=int(seed), **sizes)
    except BochnerError as error:
        return {"stopped": str(error)}
    kept = ("steps", "length", "width", "layers", "batch", "learning_rate", "features", "parameters")
    figures = {k: v for k, v in run["metrics"].items() if k in ("accuracy", "bits")}
    return {**figures, "seconds": round(time.process_time() - began, 1), **{k: run[k] for k in kept}}


def without_learning() -> dict[str, float]:
    """The best answer to each row without learning, in the figure that counts."""
    copied = figures_of("train_baselines")
    found = {row: CHANCE[task] for row, (task, _) in ROWS.items() if task in CHANCE}
    found |= {"pretraining": copied["pretraining"]["copying"], "protein_causal": copied["protein_causal"]["accuracy"]}
    for row in ("pixels", "lm_bpe"):
        task = tasks.task(ROWS[row][0])
        preset = tasks.preset_of(task, "small", **ROWS[row][1])
        train, test = (task.load(preset, split).tokens for split in ("train", "test"))  # type: ignore[attr-defined]
        if row == "lm_bpe":
            found[row] = by_frequency(train, test, task.vocabulary) / task.sizes()[test].mean()  # type: ignore[misc]
        else:  # a colour is like that of the pixel before
            train, test = (np.diff(x.reshape(-1, preset.length // 3, 3).astype(int), axis=1) for x in (train, test))
            found[row] = by_frequency(train.ravel() % 256, test.ravel() % 256, 256)
    return found


@experiment(
    claim="Exact attention and kernels share one table on six more tasks. Where attention decides, a learned kernel is "
    "worth no more than the best fixed one.",
    paper="BERT pretrained on WikiText-103 and fine-tuned on GLUE; proteins and ImageNet64 at full size",
    ours="two layers of width 64, 400 to 800 steps, one to three seeds",
    quick="trains models",
    needs=("transformers", "accelerate", "tokenizers"),
)
def measure(store: Store, only: str = "", minutes: float = float("inf"), steps: int | None = None) -> None:
    """`only`: cells that contain this; `minutes`: no run is started later; `steps`: in place of the preset's."""
    end = time.monotonic() + 60 * minutes
    store.cell("without learning", without_learning)
    for cell in wanted():
        if only in cell and time.monotonic() < end:
            store.cell(cell, lambda c=cell: fit(c, steps))


def metric(row: str) -> str:
    return tasks.task(ROWS[row][0]).figure


def seeds_of(found: Figures, row: str, attention: str) -> list[float]:
    """The figure that counts, in percent or bits, of each seed; a run that stopped has none."""
    name = metric(row)
    cells = [found.get(f"{row}/{attention}/{s}", {}) for s in range(SEEDS)]
    return [UNITS[name][0] * c[name] for c in cells if name in c]


def gates(found: Figures) -> dict[str, Gate]:
    """Which rows need attention."""
    trivial = {row: UNITS[metric(row)][0] * x for row, x in found["without learning"].items()}
    return {
        row: gate(
            seeds_of(found, row, "exact"),
            seeds_of(found, row, "identity"),
            trivial.get(row),
            larger=tasks.task(ROWS[row][0]).larger,
        )
        for row in ROWS
    }


def say_gate(opened: Gate) -> str:
    if opened.is_open:
        return "decides"
    return "not judged: one seed" if math.isnan(opened.spread) else "not needed"


def learned_or_fixed(found: Figures, row: str) -> tuple[float, float] | None:
    """By how much the best learned kernel beats the best fixed one, and the larger spread; None with one seed."""
    larger = tasks.task(ROWS[row][0]).larger
    several = {a: s for a in (*FIXED, *LEARNED) if len(s := seeds_of(found, row, a)) > 1}
    best = []
    for names in (FIXED, LEARNED):
        known = [several[a] for a in names if a in several]
        if not known:
            return None
        best.append((max if larger else min)(known, key=statistics.mean))
    gap = statistics.mean(best[1]) - statistics.mean(best[0])
    return (gap if larger else -gap), max(map(statistics.stdev, best))


def judge(found: Any) -> Said:
    opened = gates(found)
    told, why = [], []
    for row in ROWS:
        digits = UNITS[metric(row)][1]
        means = {a: statistics.mean(s) for a in ATTENTIONS if (s := seeds_of(found, row, a))}
        if not means:
            continue
        worth = learned_or_fixed(found, row)
        gap = f"; learned - fixed {worth[0]:+.{digits}f}, spread {worth[1]:.{digits}f}" if worth else ""
        shown = ", ".join(f"{a} {x:.{digits}f}" for a, x in means.items())
        told.append(f"{row} ({say_gate(opened[row])}): {shown}{gap}")
        if opened[row].is_open and worth and worth[0] > worth[1]:
            why.append(f"a learned kernel beats the best fixed one in {row}")
    missing = len(set(wanted()) - set(found))
    blank = [row for row in ROWS if any(not seeds_of(found, row, a) for a in ATTENTIONS)]
    why += [f"cells are missing in {len(blank)} of {len(ROWS)} rows"] if blank else []
    why += [] if any(x.is_open for x in opened.values()) else ["attention decides none of the rows"]
    says = f"percent or bits; {'; '.join(told)}. {missing} cells were not run."
    return Said(says, "fails" if why else "holds", "; ".join(why))


def table(found: Figures) -> str:
    """What was measured in Markdown, best first, with the verdict of the gate; rows without a kernel are left out."""
    opened, trivial = gates(found), found["without learning"]
    lines = ["| task | without learning | best first | attention |", "|---|---|---|---|"]
    for row in ROWS:
        task, (factor, digits) = tasks.task(ROWS[row][0]), UNITS[metric(row)]
        seen = {a: s for a in ATTENTIONS if (s := seeds_of(found, row, a))}
        if len(seen) < 3:
            continue
        order = sorted(seen, key=lambda a: statistics.mean(seen[a]), reverse=task.larger)
        shown = ", ".join(f"`{a}` {spread(seen[a], digits)}" for a in order)
        unit = "%" if factor == 100 else "bits"
        lines.append(f"| {row} ({unit}) | {factor * trivial[row]:.{digits}f} | {shown} | {say_gate(opened[row])} |")
    return "\n".join(lines)
