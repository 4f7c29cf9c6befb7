"""Every attention on seven tasks, trained from scratch with preset `small`: table 2 of paper 004, in small.

Beating means by more than the spread over seeds. One run at a time, each resumable; `--resume` adds missing cells,
which are never guessed.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from _framework import Said, Store, experiment, figures_of
from _pictures import COLOURS, by_name, dots, figure, save
from _training import SAME, Gate, gate, of_preset, ranked, trained

FLOOR = {"listops": 0.17, "text": 0.60, "image": 0.30}  # what must be beaten; protein has a baseline of its own
CHANCE = {"pathfinder": 0.5, "retrieval": 0.5}
COLUMNS = dict.fromkeys((*FLOOR, *CHANCE, "protein"), "accuracy") | {"lm": "bits"}
FIXED = ("positive", "relu", "linear_elu", "trig", "hyperbolic", "angular_hybrid")
LEARNED = ("fastfood_prf", "gmm_prf", "generative_prf", "gmm_rks", "fastfood_rks", "generative_rks", "hedgehog")
AS_PAPER = ("paper+gmm_prf", "paper+fastfood_prf", "paper+generative_prf")  # with the settings of paper 004
NEAR = ("window", "window+calibrated", "window+positive")
PEERS = ("linformer", "performer_pytorch", "fnet", "nystromformer", "big_bird", "longformer", "reformer")
ATTENTIONS = ("exact", *FIXED, *LEARNED, *AS_PAPER, *NEAR, "identity", *PEERS)
BRIEF = ("fastfood_prf", "positive", "relu", "exact", "window+calibrated")  # several seeds, and all tasks
SEVERAL = (
    *("window+calibrated", "positive", "relu", "gmm_prf", "hyperbolic", "angular_hybrid", "fastfood_prf"),
    *("generative_prf", "window+positive", "window", "paper+gmm_prf", "hedgehog"),
)
KEPT = ("accuracy", "loss", "bits", "perplexity", "error_rate", "unseen_accuracy")
NOT_NEEDED = "attention is not needed here"
Runs = dict[str, dict[str, Any]]


def wanted() -> list[str]:
    """Every cell as task/attention/seed, the most telling first."""
    gating = [
        (task, a, s)
        for task in ("image", "retrieval", "lm", "pathfinder")
        for a in ("identity", "exact")
        for s in range(3)
    ]
    # Where attention decides, three seeds of every kind of kernel.
    decided = [(task, a, s) for a in SEVERAL for task in ("lm", "image") for s in range(3)]
    decided += [("lm", "reformer", s) for s in range(3)]  # the only peer that is causal in bearable time
    goals = [("protein", "fastfood_prf", 0), ("lm", "exact", 0), ("lm", "window+calibrated", 0)]
    names = (*BRIEF, *PEERS[:3], "gmm_prf", "linear_elu", "identity")
    first = [(task, a, 0) for a in names for task in FLOOR]
    more = [(task, a, seed) for seed in (1, 2) for a in BRIEF for task in FLOOR]
    rest = [(task, a, 0) for a in ATTENTIONS for task in COLUMNS if task in FLOOR or a in BRIEF]
    pairs = [("retrieval", a, 0) for a in (*names, *ATTENTIONS)]
    slow = [("pathfinder", a, 0) for a in names]
    several = ("exact", "window+calibrated", "relu", "fastfood_prf")
    seeds = [(task, a, seed) for seed in (1, 2) for a in several for task in CHANCE]
    every = [*gating, *decided, *goals, *first, *more, *rest, *pairs, *slow, *seeds]
    return list(dict.fromkeys("/".join(map(str, cell)) for cell in every))


def known() -> Runs:
    """Stored runs of the presets as they are now."""
    try:
        found: Runs = figures_of("train_table")
    except OSError:
        return {}
    return {k: v for k, v in found.items() if of_preset(k.split("/")[0], v)}


@experiment(
    claim="Learned kernels are on par with softmax attention and better on some tasks.",
    items=("003 Table 2", "003 Figure 19", "004 Table 2", "004 Figure 6"),
    paper="Long Range Arena and TrEMBL at full size, 4 to 36 layers",
    ours="one or two layers of width 32 to 64, hundreds of steps, 1 to 3 seeds",
    quick="trains models",
    needs=("transformers", "accelerate"),
)
def measure(store: Store, only: str = "", minutes: float = float("inf")) -> None:
    """`only`: cells that contain this, as text/positive/0; `minutes`: no run is started later."""
    end = time.monotonic() + 60 * minutes
    store.figures = {k: v for k, v in store.figures.items() if of_preset(k.split("/")[0], v)}

    def run(cell: str) -> dict[str, Any]:
        task, attention, seed = cell.split("/")
        result = trained(task, attention, cell, seed=int(seed))
        kept = {k: v for k, v in result["metrics"].items() if k in KEPT}
        if "baseline" in result:
            kept["baseline"] = result["baseline"]["accuracy"]
        return kept | {k: result[k] for k in (*SAME, "features", "window", "parameters", "seconds", "resumed")}

    for cell in wanted():
        if only in cell and time.monotonic() < end:
            store.cell(cell, lambda c=cell: run(c))


def seeds_of(found: Runs, task: str, attention: str) -> list[float]:
    """Accuracies in percent, or bits, one for each seed that was run."""
    cells = [found[k] for s in range(3) if (k := f"{task}/{attention}/{s}") in found]
    return [c["bits"] if COLUMNS[task] == "bits" else 100 * c["accuracy"] for c in cells]


def trivial(task: str) -> float | None:
    """The best answer without learning, in the units of `seeds_of`; chance where nothing better was counted."""
    known = figures_of("train_baselines").get(task, {})
    counted = [v for k, v in known.items() if k in ("letters", "copying", "commonest")]
    best = max([*counted, FLOOR.get(task, 0.0), CHANCE.get(task, 0.0)])
    return 100 * best if best else None


def gates(found: Runs) -> dict[str, Gate]:
    """Which tasks need attention."""
    return {
        task: gate(
            seeds_of(found, task, "exact"), seeds_of(found, task, "identity"), trivial(task), larger=kind != "bits"
        )
        for task, kind in COLUMNS.items()
    }


def say_gate(found: Runs, task: str) -> str:
    """What the table says of a task."""
    opened = gates(found)[task]
    if opened.is_open:
        return "attention decides"
    if opened.margin != opened.margin or opened.spread != opened.spread:
        return "not judged: too few seeds of `exact`, or none of `identity`"
    return NOT_NEEDED


def learned_or_fixed(found: Runs, task: str) -> tuple[float, float] | None:
    """By how much the best learned kernel beats the best fixed one, of those run with several seeds, and the spread.

    The spread is the larger standard deviation of the two over seeds; None until there are two seeds of each kind.
    """
    best = []
    for names in (FIXED, (*LEARNED, *AS_PAPER)):
        several = [s for a in names if len(s := seeds_of(found, task, a)) > 1]
        if not several:
            return None
        best.append(max(several, key=lambda s: sign(task) * statistics.mean(s)))
    gap = statistics.mean(best[1]) - statistics.mean(best[0])
    return sign(task) * gap, max(statistics.stdev(s) for s in best)


def sign(task: str) -> int:
    """1 where more is better; fewer bits are."""
    return -1 if COLUMNS[task] == "bits" else 1


def judge(found: Any) -> Said:
    told = []
    for task, metric in COLUMNS.items():
        if say_gate(found, task) != "attention decides":
            told.append(f"{task}: {say_gate(found, task)}")
            continue
        row = {a: statistics.mean(s) for a in ATTENTIONS if (s := seeds_of(found, task, a))}
        best = sorted(row, key=lambda a: -sign(task) * row[a])[:5]
        gap, digits, unit = learned_or_fixed(found, task), *((2, "bits") if metric == "bits" else (1, "%"))
        beside = f"; best learned over best fixed {gap[0]:+.{digits}f}, spread {gap[1]:.{digits}f}" if gap else ""
        told.append(f"{task}: " + ", ".join(f"{a} {row[a]:.{digits}f} {unit}" for a in best) + beside)
    par = on_par(found)
    missing = len(set(wanted()) - set(found))
    return Said(
        f"{len(found)} runs of small presets: " + "; ".join(told) + ".",
        "partly" if any(par.values()) else "not" if par else "not tested",
        "small models and few steps. Of the tasks that attention decides, learned kernels are level with exact "
        f"attention on {' and '.join(t for t, x in par.items() if x) or 'none'}, behind it on "
        f"{' and '.join(t for t, x in par.items() if not x) or 'none'}. The {missing} "
        "cells that were not trained are not guessed",
    )


def on_par(found: Runs) -> dict[str, bool]:
    """Of the tasks that attention decides, where the best learned kernel is within the gate's spread of exact."""
    level = {}
    for task, opened in gates(found).items():
        learned = [sign(task) * statistics.mean(s) for a in (*LEARNED, *AS_PAPER) if (s := seeds_of(found, task, a))]
        if opened.is_open and learned:
            exact = sign(task) * statistics.mean(seeds_of(found, task, "exact"))
            level[task] = exact - max(learned) <= opened.spread
    return level


def table(found: Runs) -> str:
    """A table in Markdown for each task that needs attention: peers, and of the others what ran twice."""
    parts = []
    for task in (t for t in COLUMNS if say_gate(found, t) == "attention decides"):
        seen = {a: seeds_of(found, task, a) for a in ATTENTIONS}
        shown = {a: s for a, s in seen.items() if len(s) > (a not in (*PEERS, "identity"))}
        bits = COLUMNS[task] == "bits"
        unit = "bits per byte" if bits else "accuracy, %"
        parts.append(ranked(task, unit, shown, digits=3 if bits else 1, larger=not bits))
    return "\n\n".join(parts)


def draw(found: Any) -> None:
    rows: dict[str, dict[str, list[float]]] = {}
    for key, values in by_name(found, "accuracy").items():
        task, _, attention = key.partition("/")
        rows.setdefault(task, {})[attention] = values
    shown = [t for t in COLUMNS if t in rows]
    heights = [max(len(rows[t]) for t in shown[i : i + 3]) for i in range(0, len(shown), 3)]
    size = (13, 0.22 * sum(heights) + 1.3 * len(heights))
    fig, axes = figure(3, len(heights), figsize=size, squeeze=False, gridspec_kw={"height_ratios": heights})
    for ax in axes.flat[len(shown) :]:
        ax.set_axis_off()
    for ax, task in zip(axes.flat, shown, strict=False):
        dots(ax, rows[task], scale=100)
        low, high = ax.get_xlim()
        middle = 100 * statistics.median(x for values in rows[task].values() for x in values)
        if high - low < 2:  # less than the seeds differ by elsewhere: no difference is to be read from it
            ax.set_xlim(middle - 1, middle + 1)
        ax.margins(y=0.1)
        ax.set_title(f"{task}: accuracy, %" if task != "lm" else "lm: accuracy of the next byte, %", fontsize=10)
    save(fig, "train_table")
    draw_listops(rows["listops"])


def draw_listops(accuracy: dict[str, list[float]]) -> None:
    """Figure 6 of 004: memory of a training step at 2,048 tokens beside accuracy on ListOps."""
    memory = {a: m["2048"] for a, m in figures_of("train_speed")["memory"].items() if "2048" in m and a in accuracy}
    order = sorted(memory, key=memory.__getitem__, reverse=True)
    fig, (left, right) = figure(2, figsize=(10, 0.22 * len(order) + 1), sharey=True)
    colours = [COLOURS[a in PEERS] for a in order]
    left.barh(order, [memory[a] for a in order], color=colours)
    left.set(xlabel="memory of a training step at 2,048 tokens, MB", title="blue: this library; orange: peers")
    right.scatter([100 * statistics.mean(accuracy[a]) for a in order], range(len(order)), c=colours)
    right.set_xlabel("accuracy on ListOps, %")
    left.tick_params(axis="y", labelsize=8)
    save(fig, "listops_memory")
