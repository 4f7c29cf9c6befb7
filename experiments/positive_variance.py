"""Figure 2 of *Rethinking Attention with Performers*: where positive features have the smaller error.

By the closed forms on angles up to pi and lengths up to 2, and by simulation on the slice of length 1.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from _angles import estimates, mean_square, pairs
from _framework import Said, Store, experiment, graded
from _pictures import COLOURS, figure, save

from bochner import feature_map, theory

DIM, M, HEADS = 8, 64, 500


def log_ratio(angles: torch.Tensor, length: float) -> torch.Tensor:
    """log10 of MSE(trig) / MSE(positive)."""
    x, y = pairs(angles, length, DIM)
    trig, positive = (theory.log_mse(x, y, M, map=name) for name in ("trig", "positive"))
    return (trig - positive) / math.log(10)


@experiment(
    claim="Positive features are arbitrarily more accurate than trigonometric ones where the kernel value is small.",
    items=("003 Figure 2",),
    paper="angles in [-pi, pi], lengths in [-2, 2]",
    ours="the same; simulation with d = 8, m = 64",
    quick={"draws": 2_000},
)
def measure(store: Store, draws: int = 20_000) -> None:
    angles = torch.linspace(0.02, math.pi - 1e-3, 60, dtype=torch.float64)
    near = math.pi - torch.logspace(0, -6, 7, dtype=torch.float64)
    fine = torch.linspace(0.01, math.pi - 0.01, 2000, dtype=torch.float64)
    x, y = pairs(torch.linspace(0.4, 2.7, 6, dtype=torch.float64), 1.0, DIM)
    off = 0.0
    for name in ("trig", "positive"):
        phi = feature_map(name, dim=DIM, num_features=M, num_heads=HEADS, projection="iid", seed=1)
        mean, error = mean_square(estimates(phi, x, y, draws), (x * y).sum(-1).exp())
        off = max(off, float(((mean - theory.log_mse(x, y, M, map=name).exp()).abs() / error).max()))
    store.figures |= {
        "angles": angles.tolist(),
        "log10_ratio": {round(r, 4): log_ratio(angles, r).tolist() for r in torch.linspace(0.05, 2, 40).tolist()},
        "near_pi": log_ratio(near, 1.0).tolist(),
        "crossing": float(fine[(log_ratio(fine, 1.0) > 0).nonzero()[0, 0]]),
        "off": off,
    }


def judge(found: Any) -> Said:
    near, off = found["near_pi"], found["off"]
    # 12 comparisons with a normal tail of 5 standard errors: alpha below 1e-5.
    holds = all(a < b for a, b in pairwise(near)) and off < 5
    return Said(
        f"at length 1 the ratio of the errors passes 1 at an angle of {found['crossing']:.2f}. It reaches "
        f"10^{near[-1]:.1f} at pi - 10^-6, still growing. Below that angle trigonometric features are better. "
        f"Simulation agrees with the closed forms within {off:.1f} standard errors.",
        graded(holds),
        "the ratio does not grow, or simulation and closed form differ",
    )


def draw(found: Any) -> None:
    fig, (left, right) = figure(2)
    lengths, angles = [float(r) for r in found["log10_ratio"]], found["angles"]
    table = torch.tensor(list(found["log10_ratio"].values()))
    image = left.pcolormesh(angles, lengths, table, cmap="RdBu", vmin=-6, vmax=6, shading="auto")
    left.set(xlabel="angle", ylabel="length", title="log10 of MSE(trig) / MSE(positive)")
    fig.colorbar(image, ax=left)
    right.plot(angles, log_ratio(torch.tensor(angles, dtype=torch.float64), 1.0), color=COLOURS[0])
    right.axhline(0, color="grey", linewidth=1)
    right.axvline(found["crossing"], color=COLOURS[1], linestyle="--")
    right.text(found["crossing"], -1.2, " positive is better from here", color=COLOURS[1], fontsize=8)
    right.set(xlabel="angle", ylabel="log10 ratio", title="slice at length 1")
    save(fig, "positive_variance")
