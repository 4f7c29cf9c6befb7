"""The bias of positive features under every projection, and what fixing the sign of QR is worth.

Relative bias of the estimate of exp(x.y) at |x + y| = 1, asymmetric x and y, m = d. Rows that are exactly Gaussian give
no bias; QR without its signs fixed gives a large one.
"""

from __future__ import annotations

from typing import Any

import torch
from _framework import Said, Store, experiment, graded
from _pictures import COLOURS, GREY, figure, save

from bochner import feature_map, kernel_estimate
from bochner.projections import PROJECTIONS

DIMS = (3, 4, 8, 16, 32)
UNSIGNED = "QR, signs not fixed"
NEARLY = ("hadamard", "givens", UNSIGNED)  # rows that are not exactly Gaussian


def inputs(d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Unequal entries and directions: symmetric inputs hide the bias of unsigned QR."""
    x, y = torch.linspace(1, 0.2, d, dtype=torch.float64), torch.linspace(0.1, 0.6, d, dtype=torch.float64).square()
    scale = (x + y).norm()
    return (x / scale)[None], (y / scale)[None]


def samples(projection: str, d: int, draws: int) -> torch.Tensor:
    x, y = inputs(d)
    if projection == UNSIGNED:
        g = torch.Generator().manual_seed(0)
        rows = torch.linalg.qr(torch.randn(draws, d, d, dtype=torch.float64, generator=g)).Q.mT
        rows = rows * torch.randn(draws, d, d, dtype=torch.float64, generator=g).norm(dim=-1, keepdim=True)
        return (rows @ (x + y).mT - 0.5 * (x.square().sum() + y.square().sum())).exp().mean((1, 2))
    total = []
    for seed in range(4):  # in parts: the heads are the draws
        count = draws // 4 if projection not in ("halton", "sobol") else draws // 40
        phi = feature_map("positive", dim=d, num_features=d, num_heads=count, projection=projection, seed=seed).double()
        total.append(kernel_estimate(phi, x.expand(count, 1, d), y.expand(count, 1, d)).flatten())
    return torch.cat(total)


def bias(projection: str, d: int, draws: int) -> tuple[float, float]:
    """Relative bias and its standard error."""
    x, y = inputs(d)
    r = samples(projection, d, draws) / float((x @ y.mT).exp()) - 1
    return r.mean().item(), (r.std() / len(r) ** 0.5).item()


@experiment(
    claim="Orthogonal features are unbiased.",
    items=("003 Algorithm 1",),
    paper="no figure; m <= d",
    ours="d = 3 to 32, m = d, 20,000 draws",
    quick={"draws": 2_000},
)
def measure(store: Store, draws: int = 20_000) -> None:
    for name in [*PROJECTIONS, UNSIGNED]:
        store.figures[name] = {str(d): bias(name, d, draws) for d in DIMS}


def judge(found: Any) -> Said:
    unsigned, fixed = found[UNSIGNED]["8"][0], found["orthogonal"]["8"]
    most = max(abs(b) / e for name, row in found.items() if name not in NEARLY for b, e in row.values())
    return Said(
        f"with the signs of QR fixed the relative bias at d = 8 is {fixed[0]:+.4f} +- {fixed[1]:.4f}; without, "
        f"{unsigned:+.3f}. No projection with Gaussian rows is more than {most:.1f} standard errors off.",
        graded(most < 5 and abs(unsigned) > 0.05),
        "a projection is biased",
    )


def draw(found: Any) -> None:
    fig, ax = figure(figsize=(7.5, 3.8))
    styles = {"iid": (COLOURS[0], "s"), "orthogonal": (COLOURS[2], "D")}
    for i, (name, row) in enumerate(found.items()):
        wrong = name == UNSIGNED
        colour, marker = (COLOURS[1], "o") if wrong else styles.get(name, (GREY, "o"))
        label = name if wrong or name in styles else "the six others" if name == "hadamard" else None
        x = [place + 0.07 * (i - (len(found) - 1) / 2) for place in range(len(row))]
        middle, error = zip(*row.values(), strict=True)
        style = {"markersize": 4, "capsize": 2, "linestyle": "-" if wrong else "", "linewidth": 1, "label": label}
        ax.errorbar(x, middle, [2 * e for e in error], marker=marker, color=colour, **style)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set_xticks(range(len(row)), list(row))
    ax.set(xlabel="d", ylabel="relative bias")
    ax.legend(fontsize=8, loc="center right", bbox_to_anchor=(1, 0.62))
    save(fig, "projection_bias")
