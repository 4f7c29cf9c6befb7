"""Kernels, redraws and trigonometric features in training: figures 15 to 18 of paper 003, in small.

Claims: (15) redrawn positive features train as well as relu, and SMREG (`regularized`) no worse; trigonometric ones
train badly or not at all; without redraws an unlucky draw can cost accuracy. (16, 17) relu is among the best of the
functions f of generalised kernels, and some of the others end in NaN. (18) the Linear Transformer, elu(x) + 1,
explodes, above all when causal. Both with and without the normaliser.

A task tests them only if attention helps on it: a model must beat what copying the shown letters gives. On proteins,
with two layers of width 32, 16 sequences of 128 letters a step and 150 steps, none does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from statistics import mean
from typing import Any
from unittest.mock import patch

from _framework import Said, Store, experiment, figures_of
from _pictures import GREY, by_name, dots, figure, save
from _training import trained
from torch import Tensor

from bochner import BochnerError, kernel_estimate
from bochner.maps.base import FeatureMap

SIZES = {"length": 128, "layers": 2, "heads": 2, "width": 32, "feedforward": 64, "batch": 16, "steps": 150}
SIZES |= {"warmup": 15, "learning_rate": 4e-3, "features": 32, "test": 200}
REDRAW = 50
FUNCTIONS = ("relu", "sigmoid", "exp", "abs", "gelu", "cos", "tanh", "identity_kernel")
SOFTMAX = ("positive", "regularized", "trig")
BARE = "no normaliser"
# Name: whether causal, the attention, steps between redraws.
RUNS = {
    "exact": (False, "exact", 0),
    **{f: (False, f, REDRAW) for f in (*FUNCTIONS, *SOFTMAX)},
    "positive, no redraw": (False, "positive", 0),
    "linear_elu": (False, "linear_elu", 0),
    "exact, causal": (True, "exact", 0),
    "relu, causal": (True, "relu", REDRAW),
    "linear_elu, causal": (True, "linear_elu", 0),
}
RUNS |= {f"{name}, {BARE}": RUNS[name] for name in ("relu", "linear_elu", "relu, causal", "linear_elu, causal")}


@contextmanager
def normalised(wanted: bool) -> Iterator[None]:
    """Attention of converted models with its normaliser or without; no option of `train`, for it is of no other use."""
    from bochner.hf import calls

    def numerators(q: Tensor, k: Tensor, v: Tensor, phi: FeatureMap, **how: Any) -> Tensor:
        """Attention without its normaliser, quadratic: the sequences are short."""
        if phi.redraw_every is not None:
            phi.begin_pass_()
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        root = (how.get("scale") or q.shape[-1] ** -0.5) ** 0.5
        weights = kernel_estimate(phi, q * root, k * root)
        if (padding := how.get("key_padding_mask")) is not None:
            weights = weights.masked_fill(padding[:, None, None], 0)
        out = (weights.tril() if how["is_causal"] else weights).to(v.dtype) @ v
        return out if phi.redraw_every is None else phi.end_pass(out)

    with nullcontext() if wanted else patch.object(calls, "linear_attention", numerators):
        yield


def fit(name: str, seed: int, task: str) -> dict[str, Any]:
    """Accuracy and loss on the test split, or where the run stopped."""
    causal, attention, redraw = RUNS[name]
    try:
        with normalised(not name.endswith(BARE)):
            where = f"kernels/{task}/{name}/{seed}"
            result = trained(f"{task}_causal" if causal else task, attention, where, redraw=redraw, seed=seed, **SIZES)
    except BochnerError as error:
        return {"stopped": str(error)}
    return {k: result["metrics"][k] for k in ("accuracy", "loss")} | {"baseline": result["baseline"]["accuracy"]}


@experiment(
    claim="Redrawn positive features train as well as ReLU ones, trigonometric ones badly; some kernels and the Linear "
    "Transformer explode.",
    items=("003 Figure 15", "003 Figure 16", "003 Figure 17", "003 Figure 18"),
    paper="36 layers on TrEMBL, 16 x 16 TPU-v2, 10^5 steps and more",
    ours="two layers of width 32 on 128 letters, 150 steps, two seeds",
    quick="trains models",
    needs=("transformers", "accelerate"),
)
def measure(store: Store, seeds: int = 2, task: str = "protein") -> None:
    for seed in range(seeds):
        for name in RUNS:
            store.cell(f"{name}/{seed}", lambda n=name, s=seed: fit(n, s, task))


def judge(found: Any) -> Said:
    accuracy = {k: mean(v) for k, v in by_name(found, "accuracy").items()}
    shown = ", ".join(f"{k} {100 * x:.1f}" for k, x in sorted(accuracy.items(), key=lambda x: -x[1]))
    stopped = sorted(k for k, run in found.items() if "stopped" in run)
    copying = figures_of("train_baselines")["protein"]["copying"]
    best = max(run.get("accuracy", 0.0) for run in found.values())
    return Said(
        f"accuracy in percent on proteins, {len(found)} runs: {shown}; stopped: {', '.join(stopped) or 'none'}.",
        "partly" if best > copying else "not tested",
        f"copying the letters that are shown gives {100 * copying:.1f} %, the best run {100 * best:.1f} %. "
        + ("A small model" if best > copying else "Attention does nothing yet, so no kernel was put to the test"),
    )


def draw(found: Any) -> None:
    accuracy = by_name(found, "accuracy")
    panels = {
        "figure 15: estimates of softmax": ("exact", "positive", "positive, no redraw", "regularized", "trig", "relu"),
        "figures 16, 17: functions of a generalised kernel": FUNCTIONS,
        "figures 17, 18: Linear Transformer": [n for n in RUNS if n.split(",")[0] in ("exact", "relu", "linear_elu")],
    }
    fig, axes = figure(3, figsize=(13, 3.6), sharex=True)
    copying = 100 * figures_of("train_baselines")["protein"]["copying"]
    for ax, (title, names) in zip(axes, panels.items(), strict=True):
        dots(ax, {n: accuracy[n] for n in names if n in accuracy}, ordered=False, scale=100)
        ax.axvline(copying, color=GREY, linestyle="--", linewidth=1)
        ax.margins(y=0.12)
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("accuracy on unseen proteins, % (dashed: copying)", fontsize=8)
    save(fig, "train_kernels")
