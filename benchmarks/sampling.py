"""Draws from the feature tree against a full softmax over up to a million classes, and how good the estimates are.

Times are of one core: a draw for each query of a batch, updates, and the softmax `exp(x . y) / Z` over all classes for
a batch of 16 queries (a larger one would not fit in memory). Quality on real vectors: GloVe words as classes, perturbed
ones as queries.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from _timing import arguments, best_times, kept, machine, table, write

from bochner import data
from bochner.sampling import ExactSampler, FeatureTree, UniformSampler

ALONE = 50  # queries drawn for one after another


def speed(n: int, d: int = 64, queries: int = 512) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    y, x = torch.randn(n, d, generator=g) / d**0.5, 2 * torch.randn(queries, d, generator=g) / d**0.5
    tree = FeatureTree(y)
    some = torch.randint(n, (1000,), generator=g)
    seconds = best_times(
        {
            "softmax": lambda: torch.softmax(x[:16] @ y.T, 1),
            "softmax, one query": lambda: torch.softmax(x[:1] @ y.T, 1),
            "draw": lambda: tree.draw(x, 1, generator=g),
            "draw, one query": lambda: [tree.draw(x[i : i + 1], 1, generator=g) for i in range(ALONE)],
            "40 draws": lambda: tree.draw(x[:64], 40, generator=g),
            "update of 1,000": lambda: tree.update_(some, y[some]),
        },
        repeats=10,
        budget=1.5,
    )
    per = {"softmax": 16, "draw": queries, "draw, one query": ALONE, "40 draws": 64, "update of 1,000": 1}
    row: dict[str, Any] = {"classes": n, "dim": d, "num_features": tree.phi.num_features}
    row["microseconds"] = {k: 1e6 * s / per.get(k, 1) for k, s in seconds.items()}
    row["softmax_over_draw"] = row["microseconds"]["softmax"] / row["microseconds"]["draw"]
    print(json.dumps(row), flush=True)
    return row


def quality(n: int, queries: int = 50, length: float = 1.0) -> dict[str, Any]:
    """On GloVe: relative variance of the estimate of Z by one draw."""
    y = torch.from_numpy(np.load(data.fetch("glove"))[:n].astype(np.float32))
    y = y - y.mean(0)
    g = torch.Generator().manual_seed(0)
    noise = torch.randn(queries + 2000, y.shape[1], generator=g) * y.std()
    x = torch.nn.functional.normalize(y[torch.randint(n, (queries + 2000,), generator=g)] + 0.5 * noise, dim=1) * length
    calibration, x = x[queries:], x[:queries]
    every = torch.arange(n).expand(queries, -1)
    truth = ExactSampler(y).log_prob(x, every).double()
    row: dict[str, Any] = {"classes": n, "query_length": length, "relative_variance": {}, "distance": {}}
    tree = FeatureTree(y).calibrate_(calibration)
    samplers = {"uniform": UniformSampler(n), "tree, not calibrated": FeatureTree(y), "tree": tree}
    samplers["tree, 256 features"] = FeatureTree(y, num_features=256).calibrate_(calibration)
    for name, sampler in samplers.items():
        q = sampler.log_prob(x, every).double()
        row["relative_variance"][name] = float(((2 * truth - q).exp().sum(1) - 1).median())
        row["distance"][name] = float(((truth.exp() - q.exp()).abs().sum(1) / 2).mean())
    print(json.dumps(row), flush=True)
    return row


def tables(results: dict[str, Any]) -> str:
    head = ["classes", "full softmax", "a draw (512 queries at once)", "faster", "40 draws", "one query alone: softmax"]
    head += ["a draw", "update of 1,000 classes"]
    rows = []
    for r in results.get("speed", []):
        t = r["microseconds"]
        cells = [f"{r['classes']:,}", f"{t['softmax']:.0f}", f"{t['draw']:.1f}", f"{r['softmax_over_draw']:.0f}x"]
        names = ("40 draws", "softmax, one query", "draw, one query", "update of 1,000")
        rows.append(cells + [f"{t[k]:.0f}" for k in names])
    text = "One core, d = 64, 64 features, microseconds for each query:\n\n" + table(head, rows)
    head = ["classes", "length", "uniform", "tree, not calibrated", "tree", "256 features"]
    rows = []
    for r in results.get("quality", []):
        v = r["relative_variance"]
        names = ("uniform", "tree, not calibrated", "tree", "tree, 256 features")
        rows.append([f"{r['classes']:,}", f"{r['query_length']:.0f}", *(f"{v[k]:.3g}" for k in names)])
    text += (
        "\n\nGloVe vectors as classes, perturbed ones of length 1 and 3 as queries: a flat softmax and a sharp one. "
        "The relative variance of Z estimated from one draw says how many draws are worth one of another sampler:\n\n"
    )
    return text + table(head, rows)


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, "small sizes; prints, writes nothing", parts=("speed", "quality"), page=False)
    parser.add_argument("--classes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="whose speed")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    results = kept(options.output)
    results["machine"] = machine(1)
    if "speed" in options.part:
        rows = {r["classes"]: r for r in results.get("speed", [])}
        rows |= {n: speed(n) for n in (options.classes[:1] if options.quick else options.classes)}
        results["speed"] = [rows[n] for n in sorted(rows)]
    if "quality" in options.part:
        results["quality"] = [quality(10_000, length=length) for length in (1.0, 3.0)]
    print(tables(results))
    write(results, options)


if __name__ == "__main__":
    main()
