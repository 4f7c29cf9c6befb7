"""A trained softmax model's weights in a Performer, then fine-tuned: figure 5 of paper 003, in small.

Claims: the weights of a Transformer give a Performer some accuracy at once, and little of the original training gives
back the rest (left of the figure); positive features get there, redrawn ones closer than fixed ones, trigonometric ones
are unstable (right of the figure).

Task `lm`, preset `small`: books byte by byte, 2 layers. Exact attention is trained for the preset's 800 steps, its
weights are taken over (`start=`), measured, and trained for 200 more, beside a fresh Performer with as many steps and
exact attention with as many more. Resumable; results/train_transfer.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from _gallery import ROOT, figure, finish, save

from bochner import BochnerError, tasks
from bochner.tasks import training
from bochner.tasks.checkpoints import lines

NAME = "train_transfer"
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


def at_once(attention: str, changes: dict[str, Any], parent: Path | None, folder: Path) -> dict[str, float]:
    """Figures of a model before it is trained any further: on the test split, and where it is looked at in training."""
    task = tasks.task(TASK)
    preset = tasks.preset_of(task, "small", **changes)
    kind = tasks.choose(task, attention, preset)
    model = tasks.build(task, preset, kind)
    if parent is not None:
        training.take_over_(model, parent)
    trainer = training.make_trainer(task, preset, kind, model, folder / "untouched")
    seen = trainer.evaluate()
    return {**trainer.test(), "glimpse": seen["eval_bits"]}


def run(name: str, parent: Path, folder: Path) -> dict[str, Any]:
    """Bits per byte and accuracy before and after, and the curve of bits in between."""
    attention, changes, taken = RUNS[name]
    changes = {"steps": STEPS, "warmup": WARMUP, "learning_rate": RATE, **changes}
    start = parent if taken else None
    output = folder / name.replace(", ", "-").replace(" ", "")
    try:
        before = at_once(attention, changes, start, folder)
        result = tasks.train(
            TASK, attention=attention, output=output, start=start, resume=True, progress=False, **changes
        )
    except BochnerError as error:
        return {"stopped": str(error)}
    curve = [(x["step"], x["eval_bits"]) for x in lines(output / "metrics.jsonl") if "eval_bits" in x]
    kept = ("bits", "accuracy")
    return {
        "before": {k: before[k] for k in kept},
        "after": {k: result["metrics"][k] for k in kept},
        "curve": [(0, before["glimpse"]), *curve],
        "seconds": result["seconds"],
    }


def conclude(parent: dict[str, float], found: dict[str, Any]) -> int:
    goal = parent["bits"]
    ended = {n: r for n, r in found.items() if "after" in r}
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
    return finish(
        NAME,
        {"parent": parent, "runs": found, "steps": STEPS},
        claim="A Performer with the weights of a Transformer has some accuracy at once and recovers the rest in a "
        "small fraction of the original steps; positive features match it if redrawn, trigonometric ones are unstable.",
        ours=f"exact attention {goal:.2f} bits per byte after 800 steps; with its weights, before and after {STEPS} "
        f"further steps: {told}. Accuracy of `positive` {100 * accuracy[0]:.0f} % at once, {100 * accuracy[1]:.0f} % "
        f"after, of the original {100 * accuracy[2]:.0f} %.",
        verdict="reproduced" if not missed else "partly" if quick else "not",
        why="; ".join(missed),
    )


def draw(parent: dict[str, float], found: dict[str, Any]) -> None:
    fig, ax = figure(figsize=(6.4, 4.0))
    for name, r in found.items():
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
    save(fig, NAME)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "transfer", help="where runs are kept")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    store = options.runs / "found.json"
    found: dict[str, Any] = json.loads(store.read_text()) if store.exists() else {}
    origin = options.runs / "parent"
    trained = tasks.train(TASK, attention="exact", output=origin, resume=True, progress=False)["metrics"]
    for name in RUNS:
        if name not in found:
            found[name] = run(name, origin, options.runs)
            store.write_text(json.dumps(found))
            print(name, found[name], flush=True)
    parent = {"bits": trained["bits"], "accuracy": trained["accuracy"], "glimpse": found["exact"]["curve"][0][1]}
    draw(parent, found)
    return conclude(parent, found)


if __name__ == "__main__":
    raise SystemExit(main())
