"""A trained softmax model's weights in a Performer, then fine-tuned: figure 5 of paper 003, in small.

Task `lm`, preset `small`: books byte by byte, 2 layers. Exact attention is trained for the preset's 800 steps, its
weights are taken over (`start=`), measured, and trained for 200 more, beside a fresh Performer with as many steps and
exact attention with as many more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _framework import Said, Store, experiment
from _pictures import figure, save
from _training import folder, trained

from bochner import BochnerError, tasks

TASK, STEPS, WARMUP, RATE = "lm", 200, 20, 1e-3
REDRAW = 20
# Name: attention, changes of the preset, whether the weights are taken over.
RUNS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "exact": ("exact", {}, True),
    "positive": ("positive", {}, True),
    "positive, redrawn": ("positive", {"redraw": REDRAW}, True),
    "positive, m = 256": ("positive", {"features": 256}, True),
    "trig": ("trig", {}, True),
    "window+positive": ("window+positive", {}, True),
    "positive, fresh": ("positive", {"learning_rate": 3e-3}, False),
    "exact, fresh": ("exact", {"learning_rate": 3e-3}, False),
}


def at_once(attention: str, changes: dict[str, Any], parent: Path | None) -> dict[str, float]:
    """Figures of a model before it is trained any further: on the test split, and where it is looked at in training."""
    from bochner.tasks import training

    task = tasks.task(TASK)
    preset = tasks.preset_of(task, "small", **changes)
    kind = tasks.choose(task, attention, preset)
    model = tasks.build(task, preset, kind)
    if parent is not None:
        training.take_over_(model, parent)
    trainer = training.make_trainer(task, preset, kind, model, folder("transfer/untouched"))
    seen = trainer.evaluate()
    return {**trainer.test(), "glimpse": seen["eval_bits"]}


@experiment(
    claim="A Performer with the weights of a Transformer has some accuracy at once and recovers the rest in a small "
    "fraction of the original steps. Positive features match it if redrawn, trigonometric ones are unstable.",
    items=("003 Figure 5",),
    paper="a Transformer on LM1B and proteins, 36 layers",
    ours="books byte by byte, two layers, 800 steps and 200 more, one seed",
    quick="trains models",
    needs=("transformers", "accelerate"),
)
def measure(store: Store) -> None:
    from bochner.tasks.checkpoints import lines

    runs = store.table("runs")
    original = trained(TASK, "exact", "transfer/parent")["metrics"]
    parent = folder("transfer/parent")

    def fit(name: str) -> dict[str, Any]:
        """Bits per byte and accuracy before and after, and the curve of bits in between."""
        attention, changes, taken = RUNS[name]
        changes = {"steps": STEPS, "warmup": WARMUP, "learning_rate": RATE, **changes}
        start = parent if taken else None
        try:
            before = at_once(attention, changes, start)
            result = trained(TASK, attention, f"transfer/{name}", start=start, **changes)
        except BochnerError as error:
            return {"stopped": str(error)}
        seen = lines(folder(f"transfer/{name}") / "metrics.jsonl")
        curve = [(x["step"], x["eval_bits"]) for x in seen if "eval_bits" in x]
        after = {k: result["metrics"][k] for k in ("bits", "accuracy")}
        first = {k: before[k] for k in ("bits", "accuracy")}
        return {
            "before": first,
            "after": after,
            "curve": [(0, before["glimpse"]), *curve],
            "seconds": result["seconds"],
        }

    for name in RUNS:
        store.cell(name, lambda n=name: fit(n), runs)
    glimpse = runs["exact"]["curve"][0][1]
    store.figures["parent"] = {"bits": original["bits"], "accuracy": original["accuracy"], "glimpse": glimpse}


def judge(found: Any) -> Said:
    parent = found["parent"]
    goal = parent["bits"]
    ended = {n: r for n, r in found["runs"].items() if "after" in r}
    told = ", ".join(f"{n} {r['before']['bits']:.2f} and {r['after']['bits']:.2f}" for n, r in ended.items())
    fine, fresh, trig = ended["positive"], ended["positive, fresh"], ended.get("trig")
    closest = min(
        (n for n in ended if n.startswith("positive") and RUNS[n][2]), key=lambda n: ended[n]["after"]["bits"]
    )
    within = ended[closest]["after"]["bits"] <= 1.05 * goal
    quick = fine["before"]["bits"] > fine["after"]["bits"] and fine["after"]["bits"] < fresh["after"]["bits"]
    redrawn = ended["positive, redrawn"]["after"]["bits"] < fine["after"]["bits"]
    unstable = trig is None or trig["after"]["bits"] > fine["after"]["bits"]
    missed = [
        said
        for good, said in (
            (within, f"the closest ({closest}) is {ended[closest]['after']['bits'] / goal - 1:.0%} above the original"),
            (quick, "a fresh Performer is as good after the same steps"),
            (redrawn, "redrawing does not help in so few steps"),
            (unstable, "trigonometric features do as well"),
        )
        if not good
    ]
    accuracy = fine["before"]["accuracy"], fine["after"]["accuracy"], parent["accuracy"]
    return Said(
        f"exact attention {goal:.2f} bits per byte after 800 steps; with its weights, before and after {STEPS} further "
        f"steps: {told}. Accuracy of `positive` {100 * accuracy[0]:.0f} % at once, {100 * accuracy[1]:.0f} % "
        "after, of the "
        f"original {100 * accuracy[2]:.0f} %.",
        "reproduced" if not missed else "partly" if quick else "not",
        "; ".join(missed),
    )


def draw(found: Any) -> None:
    parent = found["parent"]
    fig, ax = figure(figsize=(6.4, 4.0))
    for name, r in found["runs"].items():
        if "curve" in r:
            ax.plot(*zip(*r["curve"], strict=True), "--" if not RUNS[name][2] else "-", label=name)
    ax.axhline(parent["glimpse"], color="grey", linewidth=0.8)
    led = {"arrowstyle": "-", "color": "grey", "linewidth": 0.8}
    at, text = (60, parent["glimpse"]), f"grey: exact attention after its 800 steps, {parent['glimpse']:.2f}"
    ax.annotate(text, at, (70, 2.62), fontsize=8, color="0.35", arrowprops=led)
    ax.set_xlabel("steps after the weights were taken over (dashed: none taken over)")
    ax.set_ylabel("bits per byte, validation")
    ax.set_ylim(2.5, 5.2)
    ax.legend(fontsize=8, ncols=2)
    save(fig, "train_transfer")
