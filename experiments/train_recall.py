"""Recall of pairs and copying by `bochner train`: transformers' BERT and GPT-2 with every kind of attention.

`recall` asks many readers of one layer at once, in a model of its own. Here each run is a fresh model of the trainer,
with the preset named in `TASKS` and 16 features a head. Steps and rate are those at which exact attention learns the
task; no kernel was looked at to choose them. Cells are ordered by what they tell, and those that were not run are not
guessed.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from _framework import Said, Store, experiment
from _training import gate, ranked, trained

from bochner import BochnerError

FEATURES, SEEDS = 16, 3
# Task, and what it is called beside another size: preset and changes of it. Long runs come after all others.
TASKS: dict[str, dict[str, Any]] = {
    "recall": {"preset": "medium"},
    "recall_causal": {"preset": "medium", "length": 64, "data": {"pairs": 32}},
    "copying": {"preset": "small"},
}
LAST: dict[str, dict[str, Any]] = {
    "copying, medium": {"preset": "medium"},
    "recall_causal, medium": {"preset": "medium"},
    "induction": {"preset": "small"},
}
CHANCE = {task: 1 / 4 if task.startswith("recall") else 1 / 64 for task in (*TASKS, *LAST)}
FIXED = ("positive", "relu", "hyperbolic", "angular_hybrid")
LEARNED = ("gmm_prf", "hedgehog")
NEAR = ("window", "window+positive")
PEERS = ("linformer", "performer_pytorch", "nystromformer", "fnet", "reformer")
CAUSAL_PEERS = ("performer_pytorch", "reformer")  # no other one is causal
MAIN = ("positive", "gmm_prf", "hyperbolic", "relu", "window+positive", "angular_hybrid", *PEERS[:3], "reformer")
DECAY = ("decay+relu", "decay+positive")  # of the causal tasks
ATTENTIONS = ("exact", "identity", *FIXED, *LEARNED, *NEAR, *DECAY, *PEERS)
Figures = dict[str, Any]


def wanted() -> list[str]:
    """Every cell as task/attention/seed: first whether attention decides, then the shorter tasks."""
    levels = [(task, a, s) for task in TASKS for s in range(SEEDS) for a in ("exact", "identity")]
    short = [(task, a, s) for task in ("copying", "recall_causal") for a in MAIN for s in range(SEEDS)]
    rest = [(task, a, s) for names in (MAIN, ATTENTIONS[2:]) for a in names for task in TASKS for s in range(SEEDS)]
    rest = [cell for cell in (*short, *rest) if can(*cell[:2])]
    last = [(task, a, s) for a in ATTENTIONS for task in LAST if can(task, a) for s in range(SEEDS)]
    return list(dict.fromkeys("/".join(map(str, cell)) for cell in (*levels, *rest, *last)))


def can(task: str, attention: str) -> bool:
    """Whether a comparison makes sense; Reformer is left to the causal tasks, which have few peers."""
    if task == "recall":
        return attention not in ("reformer", *DECAY)
    return attention not in PEERS or attention in CAUSAL_PEERS


def fit(cell: str, steps: int | None) -> Figures:
    """Accuracy of one run on the test split, its sizes, and its seconds of processor time; or where it stopped."""
    task, attention, seed = cell.split("/")
    sizes = {**TASKS, **LAST}[task] | {"features": FEATURES} | ({"steps": steps} if steps else {})
    began = time.process_time()
    try:
        run = trained(task.partition(",")[0], attention, f"train_recall/{cell}", seed=int(seed), **sizes)
    except BochnerError as error:
        return {"stopped": str(error)}
    kept = ("steps", "length", "width", "layers", "batch", "learning_rate", "features", "window", "parameters")
    seconds = round(time.process_time() - began, 1)
    return {
        "accuracy": run["metrics"]["accuracy"],
        "data": run["data"],
        "seconds": seconds,
        **{k: run[k] for k in kept},
    }


@experiment(
    claim="Where only attention can know the answer, exact attention finds it and a model without attention does not. "
    "A learned kernel is worth no more there than the best fixed one.",
    ours="one layer of width 64, two heads of size 32 with 16 features, 64 to 128 tokens, three seeds",
    quick="trains models",
    needs=("transformers", "accelerate"),
)
def measure(store: Store, only: str = "", minutes: float = float("inf"), steps: int | None = None) -> None:
    """`only`: cells that contain this; `minutes`: no run is started later; `steps`: in place of the preset's."""
    end = time.monotonic() + 60 * minutes
    for cell in wanted():
        if only in cell and time.monotonic() < end:
            store.cell(cell, lambda c=cell: fit(c, steps))


def seeds_of(found: Figures, task: str, attention: str) -> list[float]:
    """Accuracies in percent, one for each seed; a run that stopped has that of chance."""
    cells = [found[k] for s in range(SEEDS) if (k := f"{task}/{attention}/{s}") in found]
    return [100 * c.get("accuracy", CHANCE[task]) for c in cells]


def opened(found: Figures, task: str) -> bool:
    return gate(seeds_of(found, task, "exact"), seeds_of(found, task, "identity"), 100 * CHANCE[task]).is_open


def best(found: Figures, task: str, names: tuple[str, ...]) -> str | None:
    """The attention with the largest mean, of those with all seeds."""
    complete = {a: statistics.mean(x) for a in names if len(x := seeds_of(found, task, a)) == SEEDS}
    return max(complete, key=lambda a: complete[a], default=None)


def learned_or_fixed(found: Figures, task: str) -> tuple[float, float] | None:
    """By how many points the best learned kernel beats the best fixed one, and the larger spread of the two."""
    names = [best(found, task, kind) for kind in (LEARNED, FIXED)]
    if None in names:
        return None
    learned, fixed = (seeds_of(found, task, str(name)) for name in names)
    return statistics.mean(learned) - statistics.mean(fixed), max(map(statistics.stdev, (learned, fixed)))


def judge(found: Any) -> Said:
    told, beaten, closed, open_, unjudged = [], [], [], [], []
    for task in (*TASKS, *LAST):
        row = {a: statistics.mean(s) for a in ATTENTIONS if (s := seeds_of(found, task, a))}
        if not row:
            continue
        if not all(len(seeds_of(found, task, a)) > 1 for a in ("exact", "identity")):
            unjudged.append(task)
            continue
        if not opened(found, task):
            closed.append(task)
        worth = learned_or_fixed(found, task)
        if worth is None:
            open_.append(task)
        elif worth[0] > worth[1]:
            beaten.append(task)
        text = ", ".join(f"{a} {row[a]:.1f} %" for a in sorted(row, key=lambda a: -row[a]))
        told.append(f"{task}: {text}" + (f"; learned - fixed {worth[0]:+.1f}, spread {worth[1]:.1f}" if worth else ""))
    missing = len(set(wanted()) - set(found))
    says = f"{len(found)} runs: " + "; ".join(told) + f". {missing} cells were not run."
    why = [f"attention does not decide {' and '.join(closed)}"] if closed else []
    why += [f"not judged: {' and '.join(unjudged)}"] if unjudged else []
    why += [f"a learned kernel beats the best fixed one in {' and '.join(beaten)}"] if beaten else []
    why += [f"learned kernels have not run with all seeds in {' and '.join(open_)}"] if open_ else []
    return Said(says, "fails" if why else "holds", "; ".join(why))


def table(found: Figures) -> str:
    """A table in Markdown for each task that attention decides, of attentions that were run with several seeds."""
    parts = []
    for task in (t for t in (*TASKS, *LAST) if opened(found, t)):
        seen = {a: seeds_of(found, task, a) for a in ATTENTIONS}
        parts.append(ranked(task, "accuracy, %", {a: s for a, s in seen.items() if len(s) > 1}))
    return "\n\n".join(parts)
