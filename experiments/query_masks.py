"""Problem 4 of *Data Mining Problems* as it is stated: keys are the queries, and the mask is a ball around each query.

`A_ij = exp(q_i.q_j / sqrt(d))` where `|q_i - q_j|_1 <= delta`, else 0, estimated by eq. (81), (82): the features of the
softmax kernel times those of the mask, frequency by frequency. The mask is mollified, without which no density of its
frequencies exists (errata). Measured: the error of A and of the attention it gives, what of it is the mollifier's, the
features that an error of 10 % needs, and the multiplications of both ways.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from _framework import Said, Store, experiment, graded, table
from _pictures import figure, log_ticks, save
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bochner import feature_map, kernel_estimate
from bochner.maps.local import LocalL1Features, ProductFeatures, with_positions

LENGTH, VALUES = 96, 16
DIMS, SIZES = (1, 2, 4, 8), (256, 1024, 4096)
INSIDE = 0.25  # share of the pairs within delta
WANTED = 0.1  # relative error of the kernel matrix


def queries(d: int) -> tuple[Tensor, float, Tensor]:
    """Queries, uniform in a cube, delta, and the matrix A of eq. (64); after scaling no query is longer than 1."""
    g = torch.Generator().manual_seed(d)
    q = d**-0.25 * (2 * torch.rand(LENGTH, d, generator=g, dtype=torch.float64) - 1)
    apart = torch.cdist(q, q, p=1)
    delta = float(torch.quantile(apart.flatten(), INSIDE))
    return q, delta, (q @ q.mT / math.sqrt(d)).exp() * (apart <= delta)


def product(d: int, m: int, delta: float, seed: int) -> ProductFeatures:
    """Eq. (81), (82): m frequencies of the mask paired with m of the softmax kernel."""
    softmax = feature_map("positive", dim=d, num_features=m, projection="iid")
    return ProductFeatures(LocalL1Features(d, m, delta=delta), softmax, seed=seed).double()


def attended(weights: Tensor, v: Tensor) -> Tensor:
    """Rows over their sums; where these are near zero, as a signed estimate's may be, the mean of the values."""
    sums = weights.sum(-1, keepdim=True)
    bad = sums <= 0.1 * weights.abs().sum(-1, keepdim=True)
    return torch.where(bad, v.mean(0), weights @ v / torch.where(bad, 1.0, sums))


def relative(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def of_dimension(d: int, sizes: tuple[int, ...], draws: int) -> dict[str, Any]:
    q, delta, truth = queries(d)
    v = torch.randn(LENGTH, VALUES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    both = with_positions(q, q)
    smooth = product(d, 2, delta, 0).kernel_matrix(both, both)
    found: dict[str, Any] = {
        "delta": delta,
        "mollifier": relative(smooth, truth),
        "mollifier, attention": relative(attended(smooth, v), attended(truth, v)),
        "mean of the values": relative(v.mean(0).expand_as(v), attended(truth, v)),
    }
    for m in sizes:
        estimates = [kernel_estimate(product(d, m, delta, seed), both, both) for seed in range(draws)]
        errors = [relative(e, smooth) for e in estimates]
        mean = torch.stack(estimates).mean(0)
        found[str(m)] = {
            "error": statistics.mean(errors),
            "attention": statistics.mean(relative(attended(e, v), attended(truth, v)) for e in estimates),
            # An unbiased estimate's mean over the draws errs by its error over their root.
            "of the mean": relative(mean, smooth) / math.sqrt(statistics.mean(e * e for e in errors) / draws),
        }
    last = found[str(sizes[-1])]["error"]
    found["features needed"] = sizes[-1] * (last / WANTED) ** 2
    return found


def multiplications(d: int, m: int) -> dict[str, int]:
    """Counted by torch: attention through features, and exact masked attention."""
    q, delta, _ = queries(d)
    v = torch.zeros(LENGTH, VALUES, dtype=torch.float64)
    phi, both = product(d, m, delta, 0), with_positions(q, q)
    counts = {}
    with FlopCounterMode(display=False) as counter:
        left, right = phi(both, role="query").values, phi(both, role="key").values
        left @ (right.mT @ torch.cat([v, v[:, :1]], -1))
    counts["features"] = counter.get_total_flops() // 2
    with FlopCounterMode(display=False) as counter:
        (q @ q.mT) @ torch.cat([v, v[:, :1]], -1)
    counts["exact"] = counter.get_total_flops() // 2
    return counts


@experiment(
    claim="Masks of the queries themselves are estimated without bias by products of features, in time linear in the "
    "length.",
    items=("000 Problem 4",),
    paper="a statement, any d and L",
    ours="96 uniform queries of length at most 1, a quarter of the pairs in the ball, d = 1 to 8, up to 4,096 features",
    quick={"dims": (1, 4), "sizes": (256, 1024), "draws": 4},
)
def measure(store: Store, dims: tuple[int, ...] = DIMS, sizes: tuple[int, ...] = SIZES, draws: int = 8) -> None:
    store.figures |= {"length": LENGTH, "sizes": list(sizes), "draws": draws}
    for d in dims:
        store.cell(str(d), lambda d=d: of_dimension(d, sizes, draws), store.table("errors"))
        store.cell(str(d), lambda d=d: multiplications(d, sizes[-1]), store.table("multiplications"))


def crossover(found: Any, d: str) -> float:
    """Length from which features that reach the wanted error take fewer multiplications than exact attention.

    Both counts are proportional: those of features to their number and the length, exact ones to its square.
    """
    counts, n = found["multiplications"][d], found["length"]
    features = counts["features"] / n * found["errors"][d]["features needed"] / found["sizes"][-1]
    return features / (counts["exact"] / n**2)


def judge(found: Any) -> Said:
    last, errors = str(found["sizes"][-1]), found["errors"]
    apart = [e[str(m)]["of the mean"] for e in errors.values() for m in found["sizes"]]
    unbiased = max(apart) < 1.5
    told = {
        f"{d}": {
            "A": f"{e[last]['error']:.2f}",
            "attention": f"{e[last]['attention']:.2f}",
            "mollifier; mean of the values": f"{e['mollifier, attention']:.2f}; {e['mean of the values']:.2f}",
            "features for 10 %": f"{e['features needed']:,.0f}",
            "pays from, tokens": f"{crossover(found, d):,.0f}",
        }
        for d, e in errors.items()
    }
    useless = [d for d, e in errors.items() if e[last]["attention"] > e["mean of the values"]]
    return Said(
        f"Relative errors with {int(last):,} features; of the mollifier and of the mean of the values, in attention:"
        + table(told, "d")
        + f"The mean of the draws errs by {min(apart):.2f} to {max(apart):.2f} of what an unbiased estimate would.",
        graded(False, unbiased),
        "unbiased for a mollified mask only. "
        + (f"At d = {', '.join(useless)} the attention is worse than the mean of the values. " if useless else "")
        + "The features needed make it slower than exact attention below the lengths given"
        if unbiased
        else "biased for the mollified mask",
    )


def draw(found: Any) -> None:
    fig, (left, right) = figure(2, figsize=(10, 3.6))
    for d, row in found["errors"].items():
        for ax, key in ((left, "error"), (right, "attention")):
            (line,) = ax.plot(found["sizes"], [row[str(m)][key] for m in found["sizes"]], "o-", ms=3, label=f"d = {d}")
            if ax is right:
                ax.axhline(row["mean of the values"], color=line.get_color(), linestyle=":", linewidth=1)
    for ax, title in ((left, "kernel matrix"), (right, "attention; dotted: mean of the values")):
        log_ticks(ax, found["sizes"], base=2)
        ax.set(yscale="log", xlabel="features", title=title)
    left.set_ylabel("relative error")
    left.legend(fontsize=7, frameon=False)
    save(fig, "query_masks")
