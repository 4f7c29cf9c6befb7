"""Kernels, redraws and trigonometric features in training: figures 15 to 18 of paper 003, in small.

Claims: (15) redrawn positive features train as well as relu, and SMREG (`regularized`) no worse; trigonometric ones
train badly or not at all; without redraws an unlucky draw can cost accuracy. (16, 17) relu is among the best of the
functions f of generalised kernels, and some of the others end in NaN. (18) the Linear Transformer, elu(x) + 1,
explodes, above all when causal. Both with and without the normaliser: without it the sums of values alone are passed
on, as `linear_attention(..., normalize=False)` has them.

Hidden amino acids (`protein`), and the next one for (18): two layers of width 32, 16 sequences of 128 letters a step,
150 steps. One run at a time, each resumable; results/train_kernels.json keeps what was run, and `--seeds` how often.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from bochner import BochnerError, linear_attention, tasks
from bochner.hf import layer

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "train_kernels.json"
SIZES = {
    "length": 128,
    "layers": 2,
    "heads": 2,
    "width": 32,
    "feedforward": 64,
    "batch": 16,
    "steps": 150,
    "warmup": 15,
    "learning_rate": 4e-3,
    "features": 32,
    "test": 200,
}
REDRAW = 50
FUNCTIONS = ("relu", "sigmoid", "exp", "abs", "gelu", "cos", "tanh", "identity_kernel")
SOFTMAX = ("positive", "regularized", "trig")
RUNS = {
    "exact": ("protein", "exact", 0),
    **{f: ("protein", f, REDRAW) for f in (*FUNCTIONS, *SOFTMAX)},
    "positive, no redraw": ("protein", "positive", 0),
    "linear_elu": ("protein", "linear_elu", 0),
    "exact, causal": ("protein_causal", "exact", 0),
    "relu, causal": ("protein_causal", "relu", REDRAW),
    "linear_elu, causal": ("protein_causal", "linear_elu", 0),
}
BARE = "no normaliser"
RUNS |= {f"{name}, {BARE}": RUNS[name] for name in ("relu", "linear_elu", "relu, causal", "linear_elu, causal")}


@contextmanager
def normalised(wanted: bool) -> Iterator[None]:
    """Attention of converted models with its normaliser or without; no option of `train`, for it is of no other use."""
    attention = partial(linear_attention, normalize=wanted)
    with patch.object(layer, "linear_attention", attention):
        yield


def run(name: str, seed: int, folder: Path) -> dict:
    """Accuracy and loss on the test split, or where the run stopped."""
    task, attention, redraw = RUNS[name]
    output = folder / name.replace(", ", "-") / str(seed)
    options = {**SIZES, "redraw": redraw, "output": output, "seed": seed, "resume": True, "progress": False}
    try:
        with normalised(not name.endswith(BARE)):
            result = tasks.train(task, attention=attention, **options)
    except BochnerError as error:
        return {"stopped": str(error)}
    return {k: result["metrics"][k] for k in ("accuracy", "loss")} | {"baseline": result["baseline"]["accuracy"]}


def losses(found: dict, name: str) -> list[float]:
    """The test losses of a kind of run; infinite for one that stopped."""
    return [v.get("loss", float("inf")) for k, v in found.items() if k.rsplit("/", 1)[0] == name]


def show(found: dict) -> None:
    print("| kernel | accuracy (%) | loss | seeds | stopped |\n|---|---|---|---|---|")
    for name in RUNS:
        seen = [v for k, v in found.items() if k.rsplit("/", 1)[0] == name]
        ended = [v for v in seen if "loss" in v]
        figures = [statistics.mean(v[k] for v in ended) for k in ("accuracy", "loss")] if ended else [float("nan")] * 2
        print(f"| {name} | {100 * figures[0]:.1f} | {figures[1]:.3f} | {len(seen)} | {len(seen) - len(ended)} |")


def verdict(found: dict) -> None:
    """What the runs say of each claim; a difference counts when it exceeds the spread over seeds."""
    mean = {name: statistics.mean(losses(found, name)) for name in RUNS if losses(found, name)}
    if len(mean) < len(RUNS):
        print(f"not run yet: {sorted(set(RUNS) - set(mean))}")
        return
    seen = [x for name in RUNS for x in losses(found, name) if x < float("inf")]
    spread = max(
        (statistics.stdev(losses(found, n)) for n in ("relu", "positive") if len(losses(found, n)) > 1), default=0
    )
    print(f"spread over seeds {spread:.4f}, best loss {min(seen):.3f}")
    order = sorted(FUNCTIONS, key=lambda f: mean[f])
    stopped = [n for n in RUNS if float("inf") in losses(found, n)]
    print(
        f"15: positive - relu {mean['positive'] - mean['relu']:+.4f}, regularized - positive "
        f"{mean['regularized'] - mean['positive']:+.4f}, trig - positive {mean['trig'] - mean['positive']:+.4f}, "
        f"no redraw - redraw {mean['positive, no redraw'] - mean['positive']:+.4f}"
    )
    print(f"16, 17: best to worst f: {', '.join(order)}; stopped: {', '.join(stopped) or 'none'}")
    print(
        f"18: linear_elu - relu {mean['linear_elu'] - mean['relu']:+.4f}, causal "
        f"{mean['linear_elu, causal'] - mean['relu, causal']:+.4f}"
    )
    bare = {n: mean[n] - mean[n.removesuffix(f", {BARE}")] for n in RUNS if n.endswith(BARE)}
    print("without normaliser minus with it: " + ", ".join(f"{n} {x:+.4f}" for n, x in bare.items()))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "kernels", help="where runs are kept")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--status", action="store_true", help="only show what is known")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for seed in range(0 if options.status else options.seeds):
        for name in RUNS:
            if f"{name}/{seed}" not in found:
                found[f"{name}/{seed}"] = run(name, seed, options.runs)
                RESULTS.write_text(json.dumps(found, indent=1) + "\n")
                print(name, seed, found[f"{name}/{seed}"], flush=True)
    show(found)
    verdict(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
