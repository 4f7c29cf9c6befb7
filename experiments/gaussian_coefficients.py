"""Section 2.4 of *Hybrid Random Features*: Gaussian coefficients with general matrices M_k, eq. (20).

The hybrid `sum_k lam_k SM_k + (1 - sum_k lam_k) SM_last` has `lam_k = exp(-|x + M_k y|^2 / (2 tau^2))`, estimated by
cosines or by positive features of `x / tau` and `-M_k y / tau`. With `M_k = (A_k' A_k)^-1` the coefficient is 1
exactly where the complex exponential estimator of A_k has no variance. Its error has a closed form,
`theory.mse_mixture` with the coefficients' second moments. FAVOR+, eq. (3), takes the rest. It is also the baseline,
with as many projections and with features of the same length.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from _framework import Said, Store, experiment, graded, table
from _pictures import figure, save
from torch import Tensor

from bochner import theory

DIM, M, N = 4, 8, 8
TAU = {"cosines": 0.5, "positive": 1.5}  # positive features of a narrow Gaussian have no usable draws
LENGTH, DISTANCES = 0.6, (0.0, 0.1, 0.2, 0.4, 0.8)
KINDS, COUNTS = ("cosines", "positive"), (1, 2)
CASES = [(kind, count) for kind in KINDS for count in COUNTS]
# Features of FAVOR+ are 2 m, those of a real A m, those of a coefficient 2 n (cosines) or n; Lemma 2.3 adds the rest.
WIDTH = {"cosines": 2 * N, "positive": N}


def matrices(count: int) -> list[Tensor]:
    """Dense A_k, symmetric, with entries of 0.6 to 1.6 on rotated axes."""
    g = torch.Generator().manual_seed(0)
    sizes = torch.linspace(0.6, 1.6, DIM, dtype=torch.float64)
    turns = [torch.linalg.qr(torch.randn(DIM, DIM, generator=g, dtype=torch.float64)).Q for _ in range(count)]
    return [turn @ torch.diag(sizes) @ turn.mT for turn in turns]


def coupled(A: Tensor) -> Tensor:
    """M_k: `x + M_k y = 0` where `A_k x + (A_k')^-1 y = 0`."""
    return torch.linalg.inv(A.mT @ A)


def points() -> tuple[Tensor, Tensor]:
    """One query, and keys at growing distance from where the first estimator is exact."""
    g = torch.Generator().manual_seed(1)
    x, away = (torch.nn.functional.normalize(torch.randn(DIM, generator=g, dtype=torch.float64), dim=0) for _ in "xy")
    A = matrices(1)[0]
    centre = -(A.mT @ A) @ (LENGTH * x)
    return LENGTH * x, torch.stack([centre + t * away for t in DISTANCES])


def moments(x: Tensor, y: Tensor, M_k: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Mean and variance of the estimate of lam_k."""
    left, right = (x / TAU[kind]).expand_as(y), -(y @ M_k.mT) / TAU[kind]
    lam = (-(left - right).square().sum(-1) / 2).exp()
    mse = theory.mse_trig if kind == "cosines" else theory.mse_positive
    return lam, mse(left, right, N, kernel="gaussian")


def closed_form(kind: str, count: int) -> Tensor:
    """Mean squared error of the hybrid at every point."""
    x, y = points()
    lams = [moments(x, y, coupled(A), kind) for A in matrices(count)]
    rest = (1 - sum(lam for lam, _ in lams)).square() + sum(var for _, var in lams)
    squares = [lam.square() + var for lam, var in lams]
    errors = [theory.mse_complex(x.expand_as(y), y, M, A) for A in matrices(count)]
    return theory.mse_mixture([*squares, rest], [*errors, theory.mse_hyperbolic(x.expand_as(y), y, M)])


def draws_of(kind: str, count: int, draws: int, seed: int = 0) -> Tensor:
    """(draws, points) estimates, every part with normal directions of its own."""
    g = torch.Generator().manual_seed(seed)
    x, y = points()

    def normal(rows: int) -> Tensor:
        return torch.randn(draws, rows, DIM, generator=g, dtype=torch.float64)

    def exponential(w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Mean over the rows of `exp(w.(a + b) - |a|^2/2 - |b|^2/2)`."""
        return (w @ (a + b).mT - (a.square().sum(-1) + b.square().sum(-1)) / 2).exp().mean(1)

    total, left = torch.zeros(draws, len(y), dtype=torch.float64), torch.ones(draws, len(y), dtype=torch.float64)
    for A in matrices(count):
        u, v = (x / TAU[kind]).expand_as(y), -(y @ coupled(A).mT) / TAU[kind]
        if kind == "cosines":
            lam = (normal(N) @ (u - v).mT).cos().mean(1)
        else:
            lam = exponential(normal(N), u, v) * (-(u.square() + v.square()).sum(-1) / 2).exp()
        total += lam * exponential(normal(M), (x @ A.mT).expand_as(y), y @ torch.linalg.inv(A))
        left -= lam
    w = normal(M)
    return total + left * (exponential(w, x.expand_as(y), y) + exponential(-w, x.expand_as(y), y)) / 2


def named(kind: str, count: int) -> str:
    return f"{kind}, p = {count}"


def length_of(kind: str, count: int) -> int:
    """Features of the hybrid (Lemma 2.3)."""
    return count * M * WIDTH[kind] + 2 * M * (1 + count * WIDTH[kind])


@experiment(
    claim="Hybrids with Gaussian coefficients of general M_k are unbiased, and accurate where a coefficient is near 1.",
    items=("001 Section 2.4, M_k",),
    paper="a statement",
    ours="one and two dense real A, d = 4, m = n = 8, tau = 0.5 (cosines) and 1.5 (positive features), 200,000 draws",
    quick={"draws": 20_000},
)
def measure(store: Store, draws: int = 200_000) -> None:
    x, y = points()
    truth = (y @ x).exp()
    for kind, count in CASES:
        samples = draws_of(kind, count, draws)
        squares, mse = (samples - truth).square(), closed_form(kind, count)
        spread, wide = samples.std(0) / math.sqrt(draws), squares.std(0) / math.sqrt(draws)
        length = length_of(kind, count)
        row = {
            "mse": (mse / truth.square()).tolist(),
            "bias off": ((samples.mean(0) - truth).abs() / spread.clamp_min(1e-9)).tolist(),
            "mse off": ((squares.mean(0) - mse).abs() / wide.clamp_min(1e-9)).tolist(),
            "lam": moments(x, y, coupled(matrices(1)[0]), kind)[0].tolist(),
            "length": length,
        }
        for label, m in (("same projections", M), ("same length", length // 2)):
            row[f"FAVOR+, {label}"] = (theory.mse_hyperbolic(x.expand_as(y), y, m) / truth.square()).tolist()
        store.figures[named(kind, count)] = row
    store.figures |= {"distances": list(DISTANCES), "draws": draws}


def judge(found: Any) -> Said:
    rows = {named(*case): found[named(*case)] for case in CASES}
    off = max(max(row[key]) for row in rows.values() for key in ("bias off", "mse off"))
    worth = [name for name, row in rows.items() if row["mse"][0] < row["FAVOR+, same length"][0]]
    told = {
        name: {"hybrid": f"{row['mse'][0]:.1e}", "length": f"{row['length']}"}
        | {f"FAVOR+, {same}": f"{row[f'FAVOR+, {same}'][0]:.1e}" for same in ("same projections", "same length")}
        for name, row in rows.items()
    }
    return Said(
        f"{found['draws']:,} draws lie within {off:.1f} standard errors of the mean and of the closed form. Relative "
        "squared error where the first coefficient is 1:" + table(told),
        graded(off <= 5 and len(worth) == len(rows), off <= 5 and worth),
        f"unbiased with its closed form. At equal length it is better than FAVOR+ in {len(worth)} of {len(rows)} cases "
        f"({', '.join(worth)}). The variance of a coefficient that is not 1 brings in the error of its estimator"
        if off <= 5 and worth
        else "simulation differs from the closed form, or the hybrid is nowhere better",
    )


def draw(found: Any) -> None:
    fig, axes = figure(2, figsize=(10, 3.6), sharey=True)
    for ax, kind in zip(axes, KINDS, strict=True):
        for count in COUNTS:
            row = found[named(kind, count)]
            shown = [max(e, 1e-6) for e in row["mse"]]
            (line,) = ax.plot(found["distances"], shown, "o-", ms=3, label=f"hybrid, {count} matrices")
            ax.plot(
                found["distances"], row["FAVOR+, same length"], ":", color=line.get_color(), label="FAVOR+, as long"
            )
        ax.set(yscale="log", xlabel="distance of y from where SM_1 is exact", title=f"coefficients by {kind}")
    axes[0].set_ylabel("relative squared error")
    axes[0].legend(fontsize=7, frameon=False)
    save(fig, "gaussian_coefficients")
