"""Figures 2 and 5 of *Hybrid Random Features*: relative error against the angle, at three lengths.

"Equal FLOPs" is for making the features, as in the paper. Beyond it: equal feature length, which is what attention
pays.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from _angles import equal_flops, estimates, pairs
from _framework import Said, Store, experiment, graded, table
from _pictures import figure, save

from bochner import FeatureMap, feature_map, theory
from bochner.maps.hybrid import AngularHybridFeatures, GaussianHybridFeatures

DIM, M, RADII = 64, 128, (1.0, 1.25, 1.5)
HYBRID, PLAIN = "angular, equal FLOPs", ("trig", "hyperbolic")


def maps(radius: float) -> dict[str, FeatureMap]:
    options: dict[str, Any] = {"projection": "iid", "num_heads": 250}
    gaussian = {"num_coefficients": 4, "radius": radius, **options}
    return {
        **{name: feature_map(name, dim=DIM, num_features=M, **options) for name in PLAIN},
        HYBRID: AngularHybridFeatures(DIM, equal_flops(M, DIM, 1, 8), num_coefficients=8, **options),
        "gaussian, equal FLOPs": GaussianHybridFeatures(DIM, equal_flops(M, DIM, 2, 4), **gaussian),
        "angular, equal length": AngularHybridFeatures(DIM, M, **options),
    }


def expected(name: str, phi: Any, x: torch.Tensor, y: torch.Tensor, radius: float) -> torch.Tensor:
    """The relative error by the closed forms."""
    if name in PLAIN:
        mse = (theory.mse_trig if name == "trig" else theory.mse_hyperbolic)(x, y, M)
    elif isinstance(phi, AngularHybridFeatures):
        mse = theory.mse_angular_hybrid(x, y, phi.num_projections, phi.num_coefficients, shared=True)
    else:
        sizes = {"radius": radius, "bandwidth": 1 / radius, "shared": True}
        mse = theory.mse_gaussian_hybrid(x, y, phi.num_projections, phi.num_coefficients, **sizes)
    return mse.sqrt() / (x * y).sum(-1).exp()


def row(name: str, phi: Any, radius: float, angles: torch.Tensor, count: int) -> dict[str, Any]:
    x, y = pairs(angles, radius, DIM)
    truth = (x * y).sum(-1).exp()
    values = estimates(phi, x, y, count)
    error, theoretical = (values - truth).square().mean(0).sqrt() / truth, expected(name, phi, x, y, radius)
    return {
        "radius": radius,
        "map": name,
        "m": getattr(phi, "num_projections", M),
        "n": getattr(phi, "num_coefficients", 0),
        "length": phi.feature_dim,
        "angles": angles.tolist(),
        "truth": truth.tolist(),
        "relative_error": error.tolist(),
        "theory": theoretical.tolist(),
        "q05": values.quantile(0.05, dim=0).tolist(),
        "q95": values.quantile(0.95, dim=0).tolist(),
        "worst": float(error.max()),
        "worst_theory": float(theoretical.max()),
    }


@experiment(
    claim="At equal FLOPs the angular hybrid has the smallest worst relative error over the angles.",
    items=("001 Figure 2", "001 Figure 5"),
    paper="d = 64, m = 128, lengths 1, 1.25 and 1.5, 10,000 estimates",
    ours="the same",
    quick={"count": 300},
)
def measure(store: Store, count: int = 10_000) -> None:
    angles = torch.linspace(0, math.pi, 17, dtype=torch.float64)
    rows = [row(name, phi, r, angles, count) for r in RADII for name, phi in maps(r).items()]
    store.figures |= {"estimates": count, "rows": rows}


def judge(found: Any) -> Said:
    shown, holds = {}, True
    named_as = {HYBRID: "angular hybrid", "angular, equal length": "the same, at the plain maps' feature length"}
    named_as |= {"trig": "trig", "hyperbolic": "FAVOR+, hyperbolic", "gaussian, equal FLOPs": "Gaussian hybrid"}
    for radius in RADII:
        rows = {r["map"]: r for r in found["rows"] if r["radius"] == radius}
        holds &= all(rows[HYBRID][k] < min(rows[p][k] for p in PLAIN) for k in ("worst", "worst_theory"))
        shown[f"length {radius}"] = {told: f"{rows[name]['worst']:.2f}" for name, told in named_as.items()}
    return Said(
        "Worst relative error over the angles:" + table(shown),
        graded(holds, True),
        "a plain map has a smaller worst error at one of the lengths",
    )


def draw(found: Any) -> None:
    names = list(dict.fromkeys(r["map"] for r in found["rows"]))
    fig, axes = figure(len(RADII), figsize=(12, 3.6), sharex=True)
    for ax, radius in zip(axes, RADII, strict=True):
        for name in names:
            r = next(r for r in found["rows"] if (r["radius"], r["map"]) == (radius, name))
            (line,) = ax.plot(r["angles"], r["relative_error"], label=name)
            ax.plot(r["angles"], r["theory"], ":", color=line.get_color())
        ax.set(title=f"length {radius}", xlabel="angle")
        ax.set_xticks([0, math.pi / 2, math.pi], ["0", "π/2", "π"])
    axes[0].set_ylabel("relative error (dotted: closed form)")
    axes[0].legend(fontsize=7, frameon=False)
    save(fig, "hybrid_angles")
