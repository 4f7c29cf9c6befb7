"""How many draws is a draw worth: the variance of the partition function of a language model, by sampler.

On the hidden states of a trained LSTM. The relative variance of Z from one draw is `sum_j p_j^2 / q_j - 1`, exactly,
over all 10,000 classes; the number of draws for a given error is proportional to it.
"""

from __future__ import annotations

from typing import Any

import torch
from _framework import Said, Store, experiment, kept, missed, named
from _language import CLASSES, hidden_states, trained
from _pictures import dots, figure, save
from sampled_softmax import samplers

from bochner.sampling import ExactSampler, FeatureTree

QUERIES = 50


@experiment(
    claim="Ours: the partition function from draws of the calibrated tree has a variance 100 times below that of "
    "uniform and log-uniform draws. It is 10 times below the samplers of *Hybrid Random Features*.",
    ours="LSTM on the Brown corpus, 500 steps, 10,000 classes, 50 hidden states",
    quick={"steps": 60, "names": ("uniform", "log-uniform", "tree", "FAVOR+, as the paper")},
)
def measure(store: Store, steps: int = 500, names: tuple[str, ...] = ()) -> None:
    model, words, held = trained(steps)
    y, b = model.embedding.weight.detach(), model.bias.detach()
    calibration = hidden_states(model, words, 2000)[0]
    x = hidden_states(model, held, 20 * QUERIES)[0][::20]
    makers = samplers(y, b) | {
        "tree": lambda: FeatureTree(y, b).calibrate_(calibration),
        "tree, 256 features": lambda: FeatureTree(y, b, num_features=256).calibrate_(calibration),
        "tree, features to the last class": lambda: FeatureTree(y, b, leaf_size=1).calibrate_(calibration),
        "tree, not calibrated": lambda: FeatureTree(y, b),
    }
    every = torch.arange(CLASSES).expand(len(x), -1)
    p = ExactSampler(y, b).log_prob(x, every).double()
    for name in names or [name for name in makers if name != "softmax itself"]:
        q = makers[name]().log_prob(x, every).double()
        variance, distance = (2 * p - q).exp().sum(1) - 1, (p.exp() - q.exp()).abs().sum(1) / 2
        # Median and mean of the variance, total variation to the softmax.
        store.table("variance")[name] = [float(variance.median()), float(variance.mean()), float(distance.mean())]


def judge(found: Any) -> Said:
    v = {k: row[0] for k, row in found["variance"].items()}
    failed = missed(
        {
            "100 times below uniform draws": 100 * v["tree"] < v["uniform"],
            "100 times below log-uniform draws": 100 * v["tree"] < v["log-uniform"],
            "10 times below the samplers of the paper": 10 * v["tree"] < min(v[k] for k in v if k.endswith("paper")),
        }
    )
    return Said(
        f"relative variance of the partition function from one draw: {named(v, '.3g')}.", kept(not failed), failed
    )


def draw(found: Any) -> None:
    fig, ax = figure(figsize=(7, 3.4))
    dots(ax, {name: row[:1] for name, row in found["variance"].items()})
    ax.set_xscale("log")
    ax.set(xlabel="relative variance of the partition function from one draw")
    save(fig, "sampler_variance")
