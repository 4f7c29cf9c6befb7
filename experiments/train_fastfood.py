"""What a Fastfood kernel has to learn: nothing, S, or S, G and B; table 7 of paper 004, in small.

GLUE after pre-training is out of reach here; the variants are compared on tasks of `bochner train` with preset `small`,
sentences of film critics among them, which are the source of SST-2. "Close" is within the spread: the larger standard
deviation of the two over seeds. Where no variant differs from another by more than that the claim holds whatever the
order is: that is reproduced in part only. Runs with SGB are those of `train_table`.
"""

from __future__ import annotations

import statistics
from typing import Any

import train_table
from _framework import Said, Store, experiment
from _pictures import figure, save
from _training import SAME, of_preset, trained

VARIANTS = {"FastFood": None, "FastFood-S": "S", "FastFood-SGB": "SGB"}
TASKS = ("listops", "image", "text", "sentiment", "nli")
SEEDS = 3
Scores = dict[str, list[float]]


@experiment(
    claim="FastFood-SGB (all diagonals learned) is the best variant or close to it, except on WNLI and CoLA.",
    items=("004 Table 7",),
    paper="GLUE after pre-training on WikiText-103",
    ours="five tasks of preset `small`, three seeds",
    quick="trains models",
    needs=("transformers", "accelerate"),
)
def measure(store: Store, only: str = "") -> None:
    runs = store.table("runs")
    for key in [k for k, v in runs.items() if not of_preset(k.split("/")[0], v)]:
        del runs[key]
    for key, run in train_table.known().items():
        task, attention, seed = key.split("/")
        if attention == "fastfood_prf" and task in TASKS:
            runs[f"{task}/FastFood-SGB/{seed}"] = {k: run[k] for k in ("accuracy", *SAME)}

    def fit(key: str) -> dict[str, Any]:
        task, variant, seed = key.split("/")
        options = {"options": {"learnable": VARIANTS[variant]}, "seed": int(seed)}
        result = trained(task, "fastfood_prf", f"fastfood/{key}", **options)
        return {"accuracy": result["metrics"]["accuracy"], **{k: result[k] for k in (*SAME, "parameters", "seconds")}}

    for task in (t for t in TASKS if only in t):
        for seed in range(SEEDS):
            for variant in VARIANTS:
                key = f"{task}/{variant}/{seed}"
                store.cell(key, lambda k=key: fit(k), runs)


def scores(found: dict[str, Any], task: str) -> Scores:
    """Accuracy in percent of every variant that was run, one for each seed."""
    keys = {v: [k for s in range(SEEDS) if (k := f"{task}/{v}/{s}") in found] for v in VARIANTS}
    return {v: [100 * found[k]["accuracy"] for k in ks] for v, ks in keys.items() if ks}


def close(seen: Scores) -> tuple[float, float]:
    """How far SGB is behind the best variant, and the spread of the two over seeds."""
    best = max(seen, key=lambda v: statistics.mean(seen[v]))
    behind = statistics.mean(seen[best]) - statistics.mean(seen["FastFood-SGB"])
    return behind, max(statistics.stdev(seen[v]) for v in (best, "FastFood-SGB"))


def differ(seen: Scores) -> bool:
    """Whether the best and the worst variant are further apart than the spread of either."""
    order = sorted(seen.values(), key=statistics.mean)
    return statistics.mean(order[-1]) - statistics.mean(order[0]) > max(map(statistics.stdev, (order[0], order[-1])))


def whole_tasks(found: Any) -> dict[str, Scores]:
    """Tasks run with all variants and seeds."""
    rows = {t: scores(found["runs"], t) for t in TASKS}
    return {t: s for t, s in rows.items() if len(s) == len(VARIANTS) and min(map(len, s.values())) == SEEDS}


def judge_tasks(whole: dict[str, Scores]) -> tuple[str, str]:
    """The verdict on tasks run with all seeds, and why it is no better."""
    against = [t for t, (behind, spread) in ((t, close(s)) for t, s in whole.items()) if behind > spread]
    missing = [t for t in TASKS if t not in whole]
    told = [f"behind by more than the spread on {', '.join(against)}"] if against else []
    if not any(map(differ, whole.values())):
        told.append("no variant differs from another by more than the spread, so that any would be close to the best")
    told += [f"not all seeds run on {', '.join(missing)}"] if missing else []
    verdict = "not" if not whole or len(against) > len(whole) / 2 else "partly" if told else "reproduced"
    return verdict, "; ".join(told)


def judge(found: Any) -> Said:
    whole = whole_tasks(found)
    shown = []
    for task, seen in whole.items():
        cells = ", ".join(f"{v} {statistics.mean(x):.1f} ± {statistics.stdev(x):.1f}" for v, x in seen.items())
        shown.append(f"{task}: {cells}")
    apart = [t for t, s in whole.items() if differ(s)]
    shown.append(f"variants differ by more than the spread on {', '.join(apart) or 'no task'}")
    return Said("accuracy in percent over three seeds; " + "; ".join(shown) + ".", *judge_tasks(whole))


def draw(found: Any) -> None:
    whole = whole_tasks(found)
    fig, axes = figure(max(1, len(whole)), figsize=(2.1 * max(1, len(whole)) + 0.5, 3.0), squeeze=False)
    for ax, (task, seen) in zip(axes[0], whole.items(), strict=False):
        for i, values in enumerate(seen.values()):
            ax.plot([i] * len(values), values, "o", alpha=0.6)
            ax.plot([i - 0.25, i + 0.25], [statistics.mean(values)] * 2, color="black")
        ax.set_xticks(range(len(seen)), ["none", "S", "SGB"][: len(seen)])
        ax.set_title(task)
    axes[0][0].set_ylabel("accuracy (%)")
    fig.supxlabel("learned diagonals of Fastfood")
    save(fig, "train_fastfood")
