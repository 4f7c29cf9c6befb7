"""Figure 1 of *Hybrid Random Features*: errors of three softmax estimators by length and angle.

By the closed forms on a grid of lengths up to 5, and by simulation where its tails allow it, at length 0.5.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from _angles import estimates, mean_square, pairs
from _framework import Said, Store, experiment, graded
from _pictures import figure, save

from bochner import FeatureMap, feature_map, theory
from bochner.maps.hybrid import AngularHybridFeatures

M, N, DIM = 10, 1, 8
LENGTHS = [0.5, 1.0, 2.0, 3.0, 4.0, 5.0]
ANGLES = torch.linspace(0, math.pi, 33, dtype=torch.float64)
# Whether the error vanishes at angle 0, and at pi.
VANISHES = {"trig": (True, False), "hyperbolic": (False, True), "angular hybrid": (True, True)}


def closed_forms(r: float) -> dict[str, torch.Tensor]:
    x, y = pairs(ANGLES, r, DIM)
    hybrid = theory.mse_angular_hybrid(x, y, M, N, shared=True)
    return {"trig": theory.mse_trig(x, y, M), "hyperbolic": theory.mse_hyperbolic(x, y, M), "angular hybrid": hybrid}


@experiment(
    claim="The error of trigonometric features vanishes at angle 0, that of hyperbolic ones at pi, and only that of "
    "the angular hybrid at both.",
    items=("001 Figure 1",),
    paper="m = 10, n = 1, lengths up to 5",
    ours="the same; simulation with d = 8",
    quick={"draws": 4_000},
)
def measure(store: Store, draws: int = 40_000) -> None:
    options: dict[str, Any] = {"projection": "iid", "num_heads": 1000}
    maps: dict[str, FeatureMap] = {
        n: feature_map(n, dim=DIM, num_features=M, **options) for n in ("trig", "hyperbolic")
    }
    maps["angular hybrid"] = AngularHybridFeatures(DIM, M, num_coefficients=N, **options)
    x, y = pairs(ANGLES, LENGTHS[0], DIM)
    off = 0.0
    for name, phi in maps.items():
        mean, error = mean_square(estimates(phi, x, y, draws), (x * y).sum(-1).exp())
        apart = (mean - closed_forms(LENGTHS[0])[name]).abs() / error.clamp_min(1e-12)
        off = max(off, float(apart[error > 1e-12].max()))
    mse = {str(r): {k: v.tolist() for k, v in closed_forms(r).items()} for r in LENGTHS}
    store.figures |= {"m": M, "n": N, "angles": ANGLES.tolist(), "mse": mse, "standard_errors_off": off, "draws": draws}


def judge(found: Any) -> Said:
    holds = True
    for r, errors in found["mse"].items():
        for name, mse in errors.items():
            e = [x / math.exp(2 * float(r) ** 2 * math.cos(a)) for x, a in zip(mse, found["angles"], strict=True)]
            holds &= (e[0] < 1e-9 * max(e), e[-1] < 1e-9 * max(e)) == VANISHES[name]
    off = found["standard_errors_off"]
    return Said(
        f"so it is at all {len(found['mse'])} lengths up to 5 by the closed forms; {found.get('draws', 40_000):,} "
        f"draws at length 0.5 lie within {off:.1f} standard errors of them.",
        graded(holds and off < 5),
        "an error does not vanish where it should, or simulation differs",
    )


def draw(found: Any) -> None:
    fig, axes = figure(3, figsize=(12, 3.4), sharey=True)
    for ax, name in zip(axes, VANISHES, strict=True):
        for r, errors in found["mse"].items():
            ax.semilogy(found["angles"], [max(e, 1e-12) for e in errors[name]], label=f"length {float(r):g}")
        ax.set(title=name, xlabel="angle")
        ax.set_xticks([0, math.pi / 2, math.pi], ["0", "π/2", "π"])
    axes[0].set_ylabel("mean squared error")
    axes[-1].legend(fontsize=7, frameon=False)
    save(fig, "hybrid_surface")
