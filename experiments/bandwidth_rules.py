"""Rules for the bandwidth of a kernel, beside what regression and densities want: California houses, 8 columns.

`scale`: gamma = 1 / (d var), as in scikit-learn; `auto`: twice that; `scott`: n^(-1/(d+4)) for columns of unit
variance; `median`: the median distance between rows.
"""

from __future__ import annotations

import csv
import io
import tarfile
from typing import Any

import numpy as np
from _framework import Said, Store, experiment, kept, named
from _pictures import COLOURS, figure, save

from bochner import data

SIGMAS = tuple(float(s) for s in np.geomspace(0.1, 10.0, 13))


def houses(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and values of districts, shuffled; raw columns."""
    with tarfile.open(data.fetch("california")) as archive:
        file = archive.extractfile("housing.csv")
        assert file is not None
        found = [r for r in csv.DictReader(io.TextIOWrapper(file)) if r["total_bedrooms"]]
    names = [k for k in found[0] if k not in ("ocean_proximity", "median_house_value")]
    X = np.array([[float(r[k]) for k in names] for r in found])
    y = np.array([float(r["median_house_value"]) for r in found]) / 1e5
    order = np.random.default_rng(0).permutation(len(X))[:rows]
    return X[order], y[order]


@experiment(
    claim="Ours: regression wants the bandwidth of `auto`, densities that of `scott`. The median distance is far too "
    "wide for a density. Raw columns need no scaling by hand.",
    ours="2,000 rows of California houses to fit, 2,000 others to measure",
    quick={"rows": 600, "sigmas": (0.5, 1.5, 4.0)},
    needs=("sklearn",),
)
def measure(store: Store, rows: int = 4000, sigmas: tuple[float, ...] = SIGMAS) -> None:
    from sklearn.kernel_ridge import KernelRidge as TheirRidge

    from bochner.estimators import KernelDensity, KernelRidge

    X, y = houses(rows)
    half = rows // 2
    Z = (X - X[:half].mean(0)) / X[:half].std(0)
    n, d = half, X.shape[1]
    some = Z[:500]
    median = float(np.median(np.linalg.norm(some[:250, None] - some[None, 250:], axis=-1)))
    store.figures["rules"] = {
        "scale": (d / 2) ** 0.5,
        "auto": (d / 4) ** 0.5,
        "scott": n ** (-1 / (d + 4)),
        "median": median,
    }

    def score(model: Any) -> float:
        return float(model.fit(X[:half], y[:half]).score(X[half:], y[half:]))

    def density(sigma: float) -> float:
        return float(KernelDensity(sigma).fit(Z[:half]).score_samples(Z[half:]).mean())

    for sigma in sigmas:
        key = f"{sigma:.3g}"
        store.cell(key, lambda s=sigma: score(KernelRidge(gamma=0.5 / s**2)), store.table("regression"))
        store.cell(key, lambda s=sigma: density(s), store.table("density"))
    store.cell("raw, KernelRidge()", lambda: score(KernelRidge()))
    store.cell("raw, scikit-learn", lambda: score(TheirRidge(kernel="rbf")))


def judge(found: Any) -> Said:
    best = {name: float(max(found[name], key=found[name].get)) for name in ("regression", "density")}
    rules = found["rules"]
    near = abs(np.log(best["regression"] / rules["auto"])) < 1 and abs(np.log(best["density"] / rules["scott"])) < 1
    ours, theirs = found["raw, KernelRidge()"], found["raw, scikit-learn"]
    return Said(
        f"in standard deviations: {named(rules, '.2f')}; regression is best at {best['regression']:.2f}, the density "
        f"at {best['density']:.2f}. Raw columns: R2 {ours:.2f}, scikit-learn's KernelRidge {theirs:.2f}.",
        kept(near and ours > 0.6),
        "a rule is far from the best bandwidth, or raw columns fail",
    )


def draw(found: Any) -> None:
    fig, axes = figure(1, 2, figsize=(8.4, 5.6))
    labels = {"regression": "R2 of KernelRidge", "density": "mean log density"}
    for ax, (name, label) in zip(axes, labels.items(), strict=True):
        sigmas, values = [float(s) for s in found[name]], list(found[name].values())
        ax.plot(sigmas, values, color=COLOURS[0], marker="o", markersize=3)
        low = min(values) if name == "regression" else max(values) - 12
        ax.set(
            xscale="log", xlabel="bandwidth, in standard deviations", ylabel=label, ylim=(max(low, min(values)), None)
        )
        for (rule, sigma), colour in zip(found["rules"].items(), COLOURS[1:5], strict=True):
            ax.axvline(sigma, color=colour, linestyle="--", linewidth=1, label=rule)
    axes[0].legend(frameon=False, fontsize=8)
    save(fig, "bandwidth_rules")
