"""How many draws is a draw worth: the variance of the partition function of a language model, by sampler.

Claim (ours): on the hidden states of a trained LSTM the calibrated tree estimates Z with a variance at least 100 times
smaller than uniform and log-uniform draws, and 10 times smaller than the feature samplers of *Hybrid Random Features*
(vectors of length 1, features to the last class). The relative variance of Z from one draw is `sum_j p_j^2 / q_j - 1`,
exactly, over all 10,000 classes; the number of draws for a given error is proportional to it.

    python experiments/sampler_variance.py [--steps 500]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from _language import CLASSES, hidden_states, trained
from sampled_softmax import SAMPLERS

from bochner.sampling import ExactSampler, FeatureTree, LogUniformSampler, UniformSampler

RESULT = Path(__file__).parent / "results" / "sampler_variance.json"
QUERIES = 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, words, held = trained(options.steps)
    weight, bias = model.embedding.weight, model.bias
    y, b = weight.detach(), bias.detach()
    calibration = hidden_states(model, words, 2000)[0]
    x = hidden_states(model, held, 20 * QUERIES)[0][::20]
    samplers: dict[str, Any] = {
        "uniform": UniformSampler(CLASSES),
        "log-uniform": LogUniformSampler(CLASSES),
        "tree": FeatureTree(y, b).calibrate_(calibration),
        "tree, 256 features": FeatureTree(y, b, num_features=256).calibrate_(calibration),
        "tree, features to the last class": FeatureTree(y, b, leaf_size=1).calibrate_(calibration),
        "tree, not calibrated": FeatureTree(y, b),
        **{name: make(y, b) for name, make in SAMPLERS.items() if name.endswith("as the paper")},
    }
    every = torch.arange(CLASSES).expand(len(x), -1)
    p = ExactSampler(y, b).log_prob(x, every).double()
    found = {}
    print(
        "| classes drawn from | relative variance of Z from one draw, median | mean | total variation to the softmax |"
    )
    print("|---|---|---|---|")
    for name, sampler in samplers.items():
        q = sampler.log_prob(x, every).double()
        variance, distance = (2 * p - q).exp().sum(1) - 1, (p.exp() - q.exp()).abs().sum(1) / 2
        found[name] = [float(variance.median()), float(variance.mean()), float(distance.mean())]
        print(f"| {name} | " + " | ".join(f"{v:.3g}" for v in found[name]) + " |", flush=True)
    verdict = judge(found)
    for claim, holds in verdict.items():
        print(f"claim, {claim}: {'holds' if holds else 'FAILS'}")
    named = {claim: "holds" if holds else "fails" for claim, holds in verdict.items()}
    RESULT.write_text(json.dumps({"variance": found, "verdict": named}, indent=1) + "\n")
    return 0 if all(verdict.values()) else 1


def judge(found: dict[str, list[float]]) -> dict[str, bool]:
    """Each part of the claim, on the medians."""
    tree = found["tree"][0]
    paper = min(v[0] for k, v in found.items() if k.endswith("paper"))
    return {
        "100 times below uniform draws": 100 * tree < found["uniform"][0],
        "100 times below log-uniform draws": 100 * tree < found["log-uniform"][0],
        "10 times below the samplers of the paper": 10 * tree < paper,
    }


if __name__ == "__main__":
    raise SystemExit(main())
