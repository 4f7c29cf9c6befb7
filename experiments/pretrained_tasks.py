"""Pre-training on books, then two tasks about sentences: table 3 of *On Learning the Transformer Kernel*, in small.

Every attention is trained for itself to guess hidden word pieces of sixteen books; its encoder is then fine-tuned on
`sentiment` and on `nli`. `identity`, attention that returns the values, says whether attention is needed at all.
"""

from __future__ import annotations

import statistics
from typing import Any

from _framework import Said, Store, experiment, graded, table
from _pictures import by_name, dots, figure, save
from _training import folder, gate, trained

FIRST, THEN = "pretraining", ("sentiment", "nli")
LEARNED, FIXED = ("gmm_prf", "fastfood_prf"), "positive"
RUNS = (("exact", 0), ("identity", 0), ("gmm_prf", 0), ("fastfood_prf", 0), ("positive", 0), ("exact", 1))


@experiment(
    claim="After pre-training, attention with a learned kernel comes close to softmax attention on tasks about "
    "sentences.",
    items=("004 Table 3",),
    paper="eight tasks of GLUE after WikiText-103; three layers of width 300, 25,000 steps",
    ours="two tasks after sixteen books; two layers of width 64, m = 32, 2,000 steps, then 600 and 2,000; two seeds of "
    "exact attention, one of the others",
    quick="trains models",
    needs=("transformers", "accelerate"),
)
def measure(store: Store) -> None:
    for name, seed in RUNS:
        where = f"pretrained_tasks/{name}/{seed}"
        store.cell(f"{name}/{seed}", lambda n=name, s=seed, w=where: run(FIRST, n, s, w), store.table(FIRST))
        for task in THEN:
            store.cell(
                f"{name}/{seed}", lambda t=task, n=name, s=seed, w=where: run(t, n, s, w, start=True), store.table(task)
            )


def run(task: str, attention: str, seed: int, where: str, *, start: bool = False) -> dict[str, Any]:
    """Accuracy on the test split; `start`: with the encoder of the run that was pre-trained."""
    further = {"start": folder(f"{where}/{FIRST}")} if start else {}
    result = trained(task, attention, f"{where}/{task}", seed=seed, **further)
    return {"accuracy": result["metrics"]["accuracy"], "seconds": result["seconds"]}


def judge(found: Any) -> Said:
    seen = {task: by_name(found[task], "accuracy") for task in (FIRST, *THEN)}
    mean = {task: {n: statistics.mean(x) for n, x in row.items()} for task, row in seen.items()}
    gates = {task: gate(seen[task]["exact"], seen[task]["identity"]) for task in THEN}
    rows = {n: {task: f"{mean[task][n]:.1%}" for task in mean} for n in mean[FIRST]}
    rows["exact above identity, points"] = {
        task: f"{100 * (mean[task]['exact'] - mean[task]['identity']):.1f}" for task in mean
    }
    ours = "Accuracy on hidden word pieces, then on the two tasks:" + table(rows)
    needed = [task for task in THEN if gates[task].is_open]
    if not needed:
        return Said(ours, "not tested", "neither task needs attention at this size")
    close = {
        task: max((mean[task][n] - mean[task]["identity"]) / gates[task].margin for n in LEARNED) for task in needed
    }
    shares = ", ".join(f"{task} {share:.0%}" for task, share in close.items())
    why = f"of what attention is worth, the best learned kernel has: {shares}. One seed of small models"
    return Said(ours, graded(False, min(close.values()) >= 0.5), why)


def draw(found: Any) -> None:
    fig, axes = figure(len(THEN), figsize=(8.4, 2.8))
    for ax, task in zip(axes, THEN, strict=True):
        dots(ax, by_name(found[task], "accuracy"), ordered=False, scale=100)
        ax.set(title=task, xlabel="accuracy, % (dots: seeds)")
    save(fig, "pretrained_tasks")
