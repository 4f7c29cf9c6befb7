"""Figure 10 of *Hybrid Random Features* (appendix I): an LSTM trained with a sampled softmax, and exactly.

Claim of the paper: training with sampled classes comes close to exact training, the feature estimators lie near each
other and below uniform sampling. Here: a two-layer LSTM on the Brown corpus, 10,000 classes, 20 draws for each word,
three seeds; features on vectors brought to length 1 and sampled to the last class as in the paper, and our own tree
(calibrated map, exact leaves, vectors as they are). Measured: exact held-out cross entropy, its distance to that of
exact training with the same seed, and the divergence of the two models' predictions.

    python experiments/sampled_softmax.py [--steps 500] [--seeds 3]      (goes on where it stopped)
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from _language import CLASSES, DIM, Model, corpus, hidden_states, train, validation_loss
from torch import Tensor

from bochner.maps import FeatureMap
from bochner.maps.hybrid import AngularHybridFeatures, GaussianHybridFeatures
from bochner.sampling import ExactSampler, FeatureTree, LogUniformSampler, SampledSoftmaxLoss, UniformSampler

RESULT = Path(__file__).parent / "results" / "sampled_softmax.json"
DRAWS = 20
IID: dict[str, Any] = {"projection": "iid"}
PAPER: dict[str, Any] = {"normalize": 1.0, "leaf_size": 1, "num_features": 64, **IID}
SAMPLERS: dict[str, Any] = {
    "uniform": lambda y, b: UniformSampler(CLASSES),
    "tree": lambda y, b: FeatureTree(y, b),
    "log-uniform": lambda y, b: LogUniformSampler(CLASSES),
    "softmax itself": lambda y, b: ExactSampler(y, b),
    "positive, as the paper": lambda y, b: FeatureTree(y, b, feature_map="positive", **PAPER),
    "trig, as the paper": lambda y, b: FeatureTree(y, b, feature_map="trig", **PAPER),
    # 8 projections of each base and 8 coefficients cost about as much as 64 plain features.
    "angular hybrid, as the paper": lambda y, b: hybrid(y, b, AngularHybridFeatures(DIM, 8, num_coefficients=8, **IID)),
    "gaussian hybrid, as the paper": lambda y, b: hybrid(
        y, b, GaussianHybridFeatures(DIM, 8, num_coefficients=8, radius=1.0, **IID)
    ),
}


def hybrid(y: Tensor, b: Tensor, phi: FeatureMap) -> FeatureTree:
    return FeatureTree(y, b, feature_map=phi, normalize=1.0, leaf_size=1)


def fit(name: str, seed: int, steps: int, words: Tensor, held: Tensor) -> tuple[Model, list[float]]:
    model = Model(seed)
    weight, bias = model.embedding.weight, model.bias

    def measure() -> float:
        return validation_loss(model, held, 5000)

    if name == "exact":
        cross_entropy = torch.nn.functional.cross_entropy
        curve = train(
            model,
            words,
            steps,
            lambda h, t: cross_entropy(torch.addmm(bias, h, weight.T), t),
            every=100,
            measure=measure,
        )
        return model, curve
    loss = SampledSoftmaxLoss(SAMPLERS[name](weight, bias), DRAWS, seed=seed)

    def after_step(step: int, hidden: Tensor) -> None:
        loss.refresh_(weight, bias, all_classes=step % 25 == 0)  # Adam moves the other rows too
        if name == "tree" and (step in (20, 50, 100) or step % 200 == 0):
            assert isinstance(loss.sampler, FeatureTree)
            loss.sampler.calibrate_(hidden)

    curve = train(model, words, steps, lambda h, t: loss(h, t, weight, bias), after_step, every=100, measure=measure)
    return model, curve


@torch.no_grad()
def divergence(one: Model, other: Model, held: Tensor, count: int = 2000) -> float:
    """The mean Kullback-Leibler divergence of the predictions of `other` from those of `one`."""
    logs = []
    for model in (one, other):
        h, _ = hidden_states(model, held, count)
        logs.append(torch.log_softmax(h @ model.embedding.weight.T + model.bias, 1))
    return float((logs[0].exp() * (logs[0] - logs[1])).sum(1).mean())


def run(steps: int, seeds: int, path: Path) -> dict[str, Any]:
    done: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if done.get("steps") != steps:
        done = {"steps": steps, "draws": DRAWS, "runs": {}}
    words, held = corpus()
    # The comparison that decides comes first; the rest follows as time allows.
    order = [(m, s) for s in range(seeds) for m in ("uniform", "tree")]
    order += [(m, s) for s in range(seeds) for m in SAMPLERS if m not in ("uniform", "tree")]
    exact: dict[int, Model] = {}
    for name, seed in order:
        if f"{name}/{seed}" in done["runs"]:
            continue
        if seed not in exact:
            exact[seed], curve = fit("exact", seed, steps, words, held)
            done["runs"][f"exact/{seed}"] = {
                "curve": curve,
                "loss": validation_loss(exact[seed], held),
                "divergence": 0.0,
            }
        began = time.perf_counter()
        model, curve = fit(name, seed, steps, words, held)
        done["runs"][f"{name}/{seed}"] = {
            "curve": curve,
            "loss": validation_loss(model, held),
            "divergence": divergence(exact[seed], model, held),
        }
        print(f"{name}, seed {seed}: {curve[-1]:.3f}, {time.perf_counter() - began:.0f} s", flush=True)
        path.write_text(json.dumps(done, indent=1) + "\n")
    return done


def report(done: dict[str, Any]) -> bool:
    runs = done["runs"]
    names = ["exact", *(n for n in SAMPLERS if any(k.startswith(f"{n}/") for k in runs))]
    print(f"\nHeld-out cross entropy after {done['steps']} steps, {done['draws']} draws a word.\n")
    print("| classes drawn from | cross entropy, each seed | above exact training | divergence from it |")
    print("|---|---|---|---|")
    closer = True
    for name in names:
        mine = {k.rpartition("/")[2]: r for k, r in runs.items() if k.rpartition("/")[0] == name}
        gap = statistics.mean(r["loss"] - runs[f"exact/{s}"]["loss"] for s, r in mine.items())
        apart = statistics.mean(r["divergence"] for r in mine.values())
        losses = ", ".join(f"{r['loss']:.3f}" for r in mine.values())
        print(f"| {name} | {losses} | {gap:+.3f} | {apart:.3f} |")
    for seed in {k.rpartition("/")[2] for k in runs if k.startswith("tree/")}:
        tree, uniform, exact = (runs[f"{n}/{seed}"] for n in ("tree", "uniform", "exact"))
        closer &= abs(tree["loss"] - exact["loss"]) < abs(uniform["loss"] - exact["loss"])
        closer &= tree["divergence"] < uniform["divergence"]
    print("\nclaim, the tree ends closer to exact training than uniform draws, for every seed:", end=" ")
    print("holds" if closer else "FAILS")
    return closer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    return 0 if report(run(options.steps, options.seeds, options.json)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
