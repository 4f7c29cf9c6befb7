"""A Conformer with each estimator of paper 001 as its attention: table 2 of that paper, in small.

LibriSpeech and the transducer are out of reach: a Conformer of two layers spells Mandarin syllables that it never
heard. All maps have features of about the same length. FAVOR+ is the paper's eq. (3), the hyperbolic form. Clusters are
found after a third of the steps and frozen, as in the paper. `exact` and `identity`, attention that returns the values,
say whether attention decides the outcome at all.
"""

from __future__ import annotations

import statistics
from typing import Any

import transformers
from _framework import Said, Store, experiment
from _pictures import figure, save
from _training import folder

from bochner import tasks
from bochner.hf.calibrate import observe
from bochner.hf.interface import layers_of
from bochner.tasks import models, training

TASK, STEPS, CLUSTERS_AFTER, SEEDS = "speech", 1500, 500, 3
# Name in the table: attention, projections and options. Features of length 64 to 72.
ROWS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "exact": ("exact", 64, {}),
    "identity": ("identity", 64, {}),
    "clustered, 3 x 3": ("clustered", 4, {"num_clusters": 3}),
    "clustered, 2 x 2": ("clustered", 8, {"num_clusters": 2}),
    "angular hybrid": ("angular_hybrid", 32, {}),
    "FAVOR+": ("hyperbolic", 32, {}),
    "positive": ("positive", 64, {}),
    "trig": ("trig", 32, {}),
}
HYBRIDS, PLAIN = ("clustered, 3 x 3", "clustered, 2 x 2", "angular hybrid"), ("FAVOR+", "trig")
Rates = dict[str, list[float]]


class Clusters(transformers.TrainerCallback):
    """Fits the maps of a model to what its attention sees, once."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step != CLUSTERS_AFTER:
            return
        layers = layers_of(model)
        batches = [batch for batch, _ in zip(self.trainer.get_train_dataloader(), range(8), strict=False)]
        inputs = [{k: v for k, v in batch.items() if k != "labels"} for batch in batches]
        samples = observe(model, layers, inputs)
        for name, layer in layers.items():
            layer.fit(samples[name])


def error_rate(name: str, seed: int, steps: int) -> float:
    """The error rate of one run on syllables that were never heard."""
    attention, m, options = ROWS[name]
    task = tasks.task(TASK)
    sizes = {} if attention in ("exact", "identity") else {"features": m}
    preset = tasks.preset_of(task, "small", steps=steps, options=options or {}, **sizes)
    chosen = models.choose(task, attention, preset)
    model = models.build(task, preset, chosen, seed=seed)
    trainer = training.make_trainer(task, preset, chosen, model, folder(f"conformer/{name}/{seed}"), seed=seed)
    if attention == "clustered":
        trainer.add_callback(Clusters(trainer))
    trainer.train()
    return float(trainer.test()["error_rate"])


@experiment(
    claim="In a Conformer hybrid features give a smaller error rate than FAVOR+ and trigonometric ones, and of the "
    "hybrids those with clusters the smallest.",
    items=("001 Table 2",),
    paper="17 layers of width 512, LibriSpeech, up to 432 features, clusters after 1,000 steps",
    ours="2 layers of width 64, 2,358 Mandarin syllables, features of length 64 to 72, clusters after 500 of 1,500 "
    "steps, three seeds",
    quick="trains models",
    needs=("transformers", "accelerate", "soundfile"),
)
def measure(store: Store, steps: int = STEPS, seeds: int = SEEDS) -> None:
    runs = store.table("runs")
    for seed in range(seeds):
        for name in ROWS:
            store.cell(f"{name}/{seed}", lambda n=name, s=seed: error_rate(n, s, steps), runs)


def rates(found: Any) -> Rates:
    """Error rates in percent, one for each seed."""
    seeds = 1 + max(int(key.rsplit("/", 1)[1]) for key in found["runs"])
    return {n: [100 * found["runs"][f"{n}/{s}"] for s in range(seeds) if f"{n}/{s}" in found["runs"]] for n in ROWS}


def below(seen: Rates, a: str, b: str, deviations: float = 1.0) -> bool:
    """Whether the error rate of a is below that of b by more than so many deviations of the seeds."""
    spread = max(statistics.stdev(seen[a]), statistics.stdev(seen[b]))
    return statistics.mean(seen[b]) - statistics.mean(seen[a]) > deviations * spread


def judge(found: Any) -> Said:
    seen = rates(found)
    told = ", ".join(f"{n} {statistics.mean(x):.1f} ± {statistics.stdev(x):.1f}" for n, x in seen.items())
    ours = f"error rate in percent, mean and deviation of {min(map(len, seen.values()))} seeds: {told}."
    if not below(seen, "exact", "identity", 3.0):
        return Said(ours, "not tested", "attention is not needed here: exact attention does no better than none")
    wins = [h for h in HYBRIDS if all(below(seen, h, p) for p in PLAIN)]
    if len(wins) == len(HYBRIDS) and all(below(seen, c, "angular hybrid") for c in HYBRIDS[:2]):
        return Said(ours, "partly", "the order is the paper's, with a small model and another language")
    if wins:
        return Said(
            ours, "partly", f"below FAVOR+ and trigonometric features by more than the spread: {', '.join(wins)}"
        )
    return Said(ours, "not", "no hybrid is below both FAVOR+ and trigonometric features by more than the spread")


def draw(found: Any) -> None:
    seen = rates(found)
    fig, ax = figure(1, figsize=(6.0, 3.2))
    for i, values in enumerate(seen.values()):
        ax.plot(values, [i] * len(values), "o", alpha=0.6)
        ax.plot([statistics.mean(values)] * 2, [i - 0.25, i + 0.25], color="black")
    ax.set_yticks(range(len(seen)), list(seen))
    ax.invert_yaxis()
    ax.set_xlabel("error rate on syllables never heard (%)")
    save(fig, "train_conformer")
