"""Section 1.3 of the problem set: the time of polynomial attention, exact, by sum decomposition and by TensorSketch.

The text forms the L x L matrix in all three cases and concludes that features save time when m is far below d.
Measured: forming the matrix in the three ways, and what features are for, attention without the matrix, O(L m d).
Degree 3, d = 64; best of interleaved rounds. Call it on an idle machine.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from _framework import Said, Store, experiment, graded, table
from _pictures import figure, log_ticks, name_lines, save
from torch import Tensor

from bochner import feature_map, linear_attention
from bochner._timing import best_times

DIM, DEGREE, SIZES = 64, 3, (32, 256)
MAPS = {"sum decomposition": "sum_poly", "TensorSketch": "tensor_sketch"}


def matrix(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT) ** DEGREE


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = matrix(q, k)
    return (weights @ v) / weights.sum(-1, keepdim=True).clamp_min(1e-6)


def by_features(phi: Any, q: Tensor, k: Tensor) -> Tensor:
    return phi(q, role="query").values @ phi(k, role="key").values.mT


@experiment(
    claim="With m far below d, forming the attention matrix from features saves much time against the exact kernel.",
    items=("000 Section 1.3",),
    paper="orders of growth only",
    ours="d = 64, degree 3, m = 32 and 256, L up to 8,192, one thread",
    quick={"lengths": (256, 1024, 2048), "repeats": 3},
)
def measure(store: Store, lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192), repeats: int = 5) -> None:
    found: dict[str, dict[str, dict[str, float]]] = {"matrix": {}, "attention": {}}
    for length in lengths:
        g = torch.Generator().manual_seed(0)
        # Non-negative inputs keep the normaliser of an odd power away from zero; times do not depend on it.
        q, k, v = (torch.rand(1, 1, length, DIM, generator=g) for _ in range(3))
        calls: dict[str, Any] = {
            "matrix": {"exact": partial(matrix, q, k)},
            "attention": {"exact": partial(exact, q, k, v)},
        }
        for label, name in MAPS.items():
            for m in SIZES:
                phi = feature_map(name, dim=DIM, num_features=m, degree=DEGREE)
                calls["matrix"][f"{label}, m = {m}"] = partial(by_features, phi, q, k)
                calls["attention"][f"{label}, m = {m}"] = partial(linear_attention, q, k, v, phi, scale=1.0)
        with torch.no_grad():
            for what, group in calls.items():
                for label, seconds in best_times(group, repeats=repeats, budget=1.0).items():
                    found[what].setdefault(label, {})[str(length)] = seconds
        print(f"L = {length} of {lengths[-1]}", flush=True)
    store.figures |= {"seconds": found, "dim": DIM, "degree": DEGREE}


def judge(found: Any) -> Said:
    last = list(found["seconds"]["matrix"]["exact"])[-1]
    faster = {
        what: {n: t["exact"][last] / s[last] for n, s in t.items() if n != "exact"}
        for what, t in found["seconds"].items()
    }
    saves = all(s > 1 for n, s in faster["matrix"].items() if n.endswith("m = 32"))
    linear = all(s > 1 for s in faster["attention"].values())
    told = {
        n: {"the matrix is formed": f"{x:.2f}x", "attention without it": f"{faster['attention'][n]:.1f}x"}
        for n, x in faster["matrix"].items()
    }
    return Said(
        f"Times faster than exact at L = {int(last):,}:" + table(told),
        graded(False, linear),
        ("the saving in the matrix is there but small" if saves else "the matrix itself is no faster from features")
        + ", for it costs L^2 numbers either way: the point is never to form it",
    )


def draw(found: Any) -> None:
    fig, axes = figure(2, figsize=(11, 3.8))
    for ax, (what, rows) in zip(axes, found["seconds"].items(), strict=True):
        ends = {}
        for label, times in rows.items():
            (line,) = ax.plot([int(n) for n in times], [1e3 * t for t in times.values()], "o-")
            ends[label] = (1e3 * list(times.values())[-1], line.get_color())
        ax.set(yscale="log", xlabel="length L", ylabel="milliseconds", title=what)
        log_ticks(ax, [int(n) for n in times])
        name_lines(ax, ends)
    save(fig, "polynomial_timings")
