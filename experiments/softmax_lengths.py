"""Figure 7 of *Hybrid Random Features*: how long the queries and keys of a language model's softmax are.

The estimators of the paper are judged by the lengths of the vectors they meet: the error of every one grows with them.
Here: hidden states on held-out text (queries) and class vectors (keys) of the LSTM of `_language.py`, trained exactly
on the Brown corpus, and beside them what the closed forms say of m = 128 features at those lengths.

    python experiments/softmax_lengths.py [--steps 500] [--quick]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _gallery import COLOURS, figure, finish, save
from _language import hidden_states, trained
from torch import Tensor

from bochner.theory import mse_positive, mse_trig

COUNT, FEATURES = 5000, 128
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


def described(lengths: Tensor) -> dict[str, Any]:
    """Quantiles and a histogram of 40 bins."""
    counts, edges = torch.histogram(lengths.float(), 40)
    found = lengths.quantile(torch.tensor(QUANTILES, dtype=lengths.dtype))
    return {
        "quantiles": dict(zip(map(str, QUANTILES), found.tolist(), strict=True)),
        "edges": edges.tolist(),
        "share": (counts / counts.sum()).tolist(),
    }


def relative_errors(x: Tensor, y: Tensor) -> dict[str, float]:
    """Median over the pairs of the relative deviation sqrt(MSE) / exp(x . y) of m features."""
    truth = (x * y).sum(-1).exp()
    kinds = {"positive": mse_positive, "trig": mse_trig}
    return {name: float((mse(x, y, FEATURES).sqrt() / truth).median()) for name, mse in kinds.items()}


def plot(found: dict[str, Any]) -> None:
    fig, ax = figure(figsize=(7, 3.4))
    for (name, row), colour in zip(found["lengths"].items(), COLOURS, strict=False):
        ax.stairs(row["share"], row["edges"], fill=True, alpha=0.45, color=colour, label=name)
        median = row["quantiles"]["0.5"]
        ax.axvline(median, color=colour, linewidth=1)
        ax.annotate(f"{median:.1f}", (median, max(row["share"])), xytext=(4, 0), textcoords="offset points")
    ax.set(xlabel="length", ylabel="share of the vectors", xlim=(0, None))
    ax.legend()
    save(fig, "softmax_lengths")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--quick", action="store_true", help="20 steps")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model, _, held = trained(20 if options.quick else options.steps)
    x = hidden_states(model, held, COUNT)[0].double()
    y = model.embedding.weight.detach().double()
    pick = torch.randint(len(y), (len(x),), generator=torch.Generator().manual_seed(0))
    lengths = {"queries": described(x.norm(dim=1)), "keys": described(y.norm(dim=1))}
    errors = relative_errors(x, y[pick])
    result = {"steps": options.steps, "lengths": lengths, "relative_error": errors, "features": FEATURES}
    plot(result)
    told = "; ".join(
        f"{name}: median {row['quantiles']['0.5']:.1f}, 1 % below {row['quantiles']['0.01']:.1f}, "
        f"1 % above {row['quantiles']['0.99']:.1f}"
        for name, row in lengths.items()
    )
    return finish(
        "softmax_lengths",
        result,
        claim="Histograms of the lengths of keys and queries of a trained language model; no figure is claimed.",
        ours=f"{told}. At the median pair {FEATURES} positive features have a relative deviation of "
        f"{errors['positive']:.2g}, trigonometric ones of {errors['trig']:.2g}.",
        verdict="partly",
        why="the Brown corpus and a smaller model instead of the Penn Treebank",
    )


if __name__ == "__main__":
    raise SystemExit(main())
