"""Table 1 of *Hybrid Random Features*: softmax estimators on the rows of the wine and Boston tables, 512 projections.

Claim: the angular hybrid, with orthogonal or independent projections and as many FLOPs, has a smaller mean squared
error than plain features on orthogonal, Hadamard or Halton directions. The paper's figures (in thousandths): wine 0.70
and 0.85 against 1.00, 1.10, 4.02; Boston 0.72 and 0.79 against 1.05, 1.14, 2.53. It does not say how the tables were
scaled, nor which features stand on the directions. Here columns are standardised, rows have length 0.5 or 1, and the
verdict is given against trigonometric, positive and hyperbolic features separately.

    python experiments/quasi_random_table.py [--draws 100]
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
from typing import Any

import torch
from _gallery import COLOURS, figure, finish, save
from sklearn.datasets import load_wine

from bochner import data, feature_map, kernel_estimate
from bochner.maps.hybrid import AngularHybridFeatures

M, PAIRS, COEFFICIENTS = 512, 100, (1, 2, 4, 8)
PROJECTIONS = ("iid", "orthogonal", "hadamard", "halton")
BASES, LENGTHS = ("trig", "positive", "hyperbolic"), (0.5, 1.0)


def rows(name: str) -> torch.Tensor:
    if name == "wine":
        table = torch.from_numpy(load_wine().data)
    else:
        with data.fetch("boston", quiet=True).open() as file:
            table = torch.tensor([[float(v) for v in r[:-1]] for r in list(csv.reader(file))[1:]], dtype=torch.float64)
    table = (table - table.mean(0)) / table.std(0)
    return torch.nn.functional.normalize(table, dim=1)


def equal_flops(d: int, n: int) -> int:
    """The m at which an angular hybrid costs what 512 projections with sine and cosine cost."""
    budget = M * d + 2 * M
    return max(m for m in range(1, M) if (m + n) * d + 4 * m * (n + 1) <= budget)


def error(phi: Any, x: torch.Tensor, y: torch.Tensor, draws: int) -> tuple[float, float]:
    """Mean squared error over pairs and draws, and its standard error over the draws."""
    truth = (x * y).sum(1).exp()
    means = []
    for seed in range(draws):
        estimate = kernel_estimate(phi.redraw_(seed), x[:, None], y[:, None])[:, 0, 0]
        means.append(float((estimate - truth).square().mean()))
    return statistics.mean(means), statistics.stdev(means) / draws**0.5


def compare(table: torch.Tensor, draws: int) -> dict[str, tuple[float, float]]:
    g = torch.Generator().manual_seed(0)
    x, y = (table[torch.randint(len(table), (PAIRS,), generator=g)] for _ in range(2))
    d = table.shape[1]
    found: dict[str, tuple[float, float]] = {}
    for projection, n in itertools.product(("orthogonal", "iid"), COEFFICIENTS):
        phi: Any = AngularHybridFeatures(d, equal_flops(d, n), num_coefficients=n, projection=projection)
        found[f"angular hybrid, n = {n}, {projection}"] = error(phi.double(), x, y, draws)
    for base, projection in itertools.product(BASES, PROJECTIONS):
        phi = feature_map(base, dim=d, num_features=M, projection=projection)
        found[f"{base}, {projection}"] = error(phi.double(), x, y, draws)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"draws": options.draws, "unit": 1e-3, "mse": {}}
    verdicts = {}
    for name, length in itertools.product(("wine", "boston"), LENGTHS):
        found = compare(length * rows(name), options.draws)
        print(
            f"\n{name}, rows of length {length}: mean squared error in thousandths\n\n| estimator | error |\n|---|---|"
        )
        for label, (mean, spread) in sorted(found.items(), key=lambda item: item[1]):
            print(f"| {label} | {1e3 * mean:.4f} +- {1e3 * spread:.4f} |")
        result["mse"][f"{name}, {length}"] = {label: [1e3 * v for v in pair] for label, pair in found.items()}
        for base, projection in itertools.product(BASES, ("orthogonal", "iid")):
            hybrid = min(found[f"angular hybrid, n = {n}, {projection}"][0] for n in COEFFICIENTS)
            plain = min(found[f"{base}, {p}"][0] for p in PROJECTIONS)
            verdicts[f"{name}, length {length}: {projection} hybrid below {base} features"] = hybrid < plain
    print()
    for key, holds in verdicts.items():
        print(f"claim, {key}: {'holds' if holds else 'FAILS'}")
    wins = {base: sum(v for k, v in verdicts.items() if k.endswith(f"below {base} features")) for base in BASES}
    each = len(verdicts) // len(BASES)
    draw(result["mse"])
    holds = all(verdicts.values())
    return finish(
        "quasi_random_table",
        {**result, "verdicts": verdicts},
        claim="At equal FLOPs the angular hybrid has a smaller error on rows of the wine and Boston tables than plain "
        "features on orthogonal, Hadamard or Halton directions.",
        ours=", ".join(f"below {base} features in {n} of {each} cases" for base, n in wins.items())
        + " (two tables, rows of length 0.5 and 1, orthogonal and independent hybrids).",
        verdict="reproduced" if holds else "partly",
        why=""
        if holds
        else "the paper does not say which features stand on the directions nor how rows were scaled; "
        "against the best plain map of each kind the hybrid wins only in some cases",
    )


def draw(tables: dict[str, dict[str, list[float]]]) -> None:
    fig, axes = figure(len(tables), figsize=(15, 4.2))
    for ax, (title, rows) in zip(axes, tables.items(), strict=True):
        best = {"hybrid, orthogonal": "n = 4, orthogonal", "hybrid, iid": "n = 4, iid"}
        shown = {label: rows[f"angular hybrid, {key}"] for label, key in best.items()}
        shown |= {label: value for label, value in rows.items() if not label.startswith("angular")}
        order = sorted(shown, key=lambda k: shown[k][0], reverse=True)
        colours = [COLOURS[1] if k.startswith("hybrid") else COLOURS[0] for k in order]
        ax.barh(order, [shown[k][0] for k in order], xerr=[shown[k][1] for k in order], color=colours)
        ax.set(xscale="log", title=title, xlabel="MSE, thousandths")
        ax.tick_params(axis="y", labelsize=7)
        low, high = ax.get_xlim()
        for factors in ((1,), (1, 2, 5)):
            ticks = [f * 10.0**p for p in range(-3, 4) for f in factors if low <= f * 10.0**p <= high]
            if len(ticks) > 1:
                break
        ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
        ax.minorticks_off()
    save(fig, "quasi_random_table")


if __name__ == "__main__":
    raise SystemExit(main())
