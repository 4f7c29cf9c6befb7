"""Theorem 3.5 of *Hybrid Random Features*: the limits of the angular hybrid's relative error, and its largest value.

The theorem states two limits in the angle, the same at 0 and pi: the relative error over the root of the angle tends to
`W(r) / sqrt(2 pi m n)`, `W(r) = 2 sinh(2 r^2)`. Its text adds how the largest error over all angles grows with r,
which has limits of its own: over `W(r) / sqrt(2 m)` it is `sqrt(exp(-1/2) / (sqrt(2) pi n r))` for large r and fixed
n, and `exp(-1/2) / (pi r)` if n grows first. All are compared with the closed form of the error, and that with draws.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from _angles import estimates, mean_square, pairs
from _framework import Said, Store, experiment, graded, named
from _pictures import figure, log_ticks, save

from bochner import theory
from bochner.maps.hybrid import AngularHybridFeatures

RADII = (1.0, 1.5, 2.0, 4.0, 8.0, 12.0)
SPLITS = ((1, 1), (8, 1), (8, 4), (64, 16))
ANGLES = (1e-2, 1e-4, 1e-6)
COUNTS = (1, 4, 16, 256)
MANY = 10**8  # coefficients: the limit in n
DIM, DRAWN, LENGTH = 4, (0.02, 0.1, 0.3), 0.5  # angles and length of the drawn estimates, where their tails allow it


def limit(r: float, m: int, n: int) -> float:
    """Of the relative error over the root of the angle."""
    return 2 * math.sinh(2 * r * r) / math.sqrt(2 * math.pi * m * n)


def over_root(angle: float, r: float, m: int, n: int, end: str) -> float:
    """The relative error at this distance from an end of [0, pi], over its root."""
    t = torch.tensor(angle if end == "0" else math.pi - angle, dtype=torch.float64)
    exactly = angle if end == "0" else math.pi - float(t)  # pi and the subtraction are rounded
    return float(theory.relative_error_angular(t, r, m, n)) / math.sqrt(exactly)


def largest(r: float, n: int) -> dict[str, float]:
    """The largest relative error over `W(r) / sqrt(2 m)`, the largest of trigonometric features."""
    plain = float(theory.max_relative_error(r, 8))
    return {
        "measured": theory.max_relative_error_angular(r, 8, n) / plain,
        "proof": float(theory.max_relative_error_angular_bound(r, 8, n)) / plain,
        "large r": math.sqrt(math.exp(-0.5) / (math.sqrt(2) * math.pi * n * r)),
        "large n": math.exp(-0.5) / (math.pi * r),
    }


def drawn(m: int, n: int, draws: int) -> float:
    """Standard errors between drawn squared errors near angle 0 and pi and their closed form, at most."""
    angles = torch.tensor([*DRAWN, *(math.pi - a for a in DRAWN)], dtype=torch.float64)
    x, y = pairs(angles, LENGTH, DIM)
    phi = AngularHybridFeatures(DIM, m, num_coefficients=n, projection="iid", num_heads=1000)
    mean, error = mean_square(estimates(phi, x, y, draws), (x * y).sum(-1).exp())
    return float(((mean - theory.mse_angular_hybrid(x, y, m, n)).abs() / error).max())


@experiment(
    claim="The relative error of the angular hybrid tends to W(r) sqrt(angle / (2 pi m n)) at both ends. Those of "
    "trigonometric and hyperbolic features vanish at one end. Its largest value grows more slowly with r than theirs.",
    items=("001 Theorem 3.5, limits",),
    paper="a statement for r of at least 1",
    ours="r = 1 to 12, four splits (m, n), angles down to 1e-6; draws at r = 0.5, d = 4",
    quick={"draws": 20_000},
)
def measure(store: Store, draws: int = 200_000) -> None:
    rows = [
        {"r": r, "m": m, "n": n, "angle": a, "end": end, "over limit": over_root(a, r, m, n, end) / limit(r, m, n)}
        for r in RADII
        for m, n in SPLITS
        for a in ANGLES
        for end in ("0", "pi")
    ]
    sizes = [{"r": r, "n": n, **largest(r, n)} for r in RADII for n in (*COUNTS, MANY)]
    off = {f"{m}, {n}": drawn(m, n, draws) for m, n in ((2, 1), (4, 2))}
    store.figures |= {"rows": rows, "largest": sizes, "standard_errors_off": off, "draws": draws}


def judge(found: Any) -> Said:
    apart = {a: max(abs(r["over limit"] - 1) for r in found["rows"] if r["angle"] == a) for a in ANGLES}
    far = {s["n"]: s for s in found["largest"] if s["r"] == RADII[-1]}
    one, many = far[1], far[MANY]
    ratios = one["measured"] / one["large r"], many["measured"] / many["large n"]
    below = all(s["measured"] < 1 and s["measured"] <= s["proof"] for s in found["largest"])
    off = max(found["standard_errors_off"].values())
    holds = apart[ANGLES[-1]] < 2e-3 and below and off < 5 and all(abs(x - 1) < 0.05 for x in ratios)
    return Said(
        "Largest deviation of the error from its limit at both ends: "
        + named({f"angle {a:.0e}": x for a, x in apart.items()}, ".0e")
        + f". The largest error over all angles, as a share of that of trigonometric and hyperbolic features: "
        f"{one['measured']:.3f} at r = {RADII[-1]:g} and n = 1. It is {ratios[0]:.2f} times its limit for large r, and "
        f"{ratios[1]:.2f} times that for large n. Draws lie within {off:.1f} standard errors of the closed form",
        graded(holds),
        "a limit or a bound fails, or simulation differs from the closed form",
    )


def draw(found: Any) -> None:
    fig, (left, right) = figure(2, figsize=(10, 3.6))
    theta = torch.logspace(-6, math.log10(math.pi / 2), 200, dtype=torch.float64)
    for m, n in SPLITS:
        error = theory.relative_error_angular(theta, 1.5, m, n)
        (line,) = left.loglog(theta, error, label=f"m = {m}, n = {n}")
        left.loglog(theta, limit(1.5, m, n) * theta.sqrt(), ":", color=line.get_color())
    left.set(xlabel="angle (dotted: the limit)", ylabel="relative error", title="r = 1.5")
    left.legend(fontsize=7, frameon=False)
    for n in COUNTS:
        mine = [s for s in found["largest"] if s["n"] == n]
        (line,) = right.plot([s["r"] for s in mine], [s["measured"] for s in mine], "o-", ms=3, label=f"n = {n}")
        right.plot([s["r"] for s in mine], [s["large r"] for s in mine], ":", color=line.get_color())
    log_ticks(right, (1, 2, 4, 8, 12))
    right.set(yscale="log", xlabel="r (dotted: the limit for large r)", ylabel="largest error, trig = 1")
    right.legend(fontsize=7, frameon=False)
    save(fig, "angular_limits")
