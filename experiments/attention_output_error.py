"""Figure 4 of *Rethinking Attention with Performers*: the error of the attention output against m.

Medians over draws of Gaussian queries, keys and values. The paper says "appropriately normalized" and no more: here
scaled queries and keys of mean square length 1 and 4.
"""

from __future__ import annotations

import itertools
import statistics
import warnings
from typing import Any

import torch
from _framework import Said, Store, experiment, graded, table
from _pictures import figure, log_ticks, name_lines, save

from bochner import exact_attention, feature_map, linear_attention

DIM, SIZES, NORMS = 16, (16, 32, 64, 128, 256), {"1": 0.5, "4": 1.0}
KINDS = tuple(itertools.product(("positive", "trig"), ("orthogonal", "iid")))
Errors = dict[str, dict[str, list[float]]]


def errors(length: int, samples: int, norm: float) -> Errors:
    found: Errors = {f"{p}, {n}": {str(m): [] for m in SIZES} for n, p in KINDS}
    for seed in range(samples):
        g = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, 1, length, DIM, generator=g) for _ in range(3))
        q, k = norm * q, norm * k
        truth = exact_attention(q, k, v)
        for (name, projection), m in itertools.product(KINDS, SIZES):
            phi = feature_map(name, dim=DIM, num_features=m, projection=projection, seed=seed)
            out = linear_attention(q, k, v, phi)
            found[f"{projection}, {name}"][str(m)].append(float((out - truth).square().mean()))
        print(f"norm {norm}: sample {seed + 1} of {samples}", flush=True)
    return found


@experiment(
    claim="Orthogonal features have a lower output error than independent ones, positive ones a lower error than "
    "trigonometric ones.",
    items=("003 Figure 4",),
    paper="L = 4,096, d = 16, 15 draws, norms not given",
    ours="the same, with two norms",
    quick={"length": 1024, "samples": 5},
)
def measure(store: Store, length: int = 4096, samples: int = 15) -> None:
    warnings.simplefilter("ignore")  # normalisers near zero of trigonometric features are part of what is measured
    found = {square: errors(length, samples, norm) for square, norm in NORMS.items()}
    store.figures |= {"length": length, "samples": samples, "errors": found}


def judge(found: Any) -> Said:
    rows, holds, cells, sizes = {}, True, 2 * len(SIZES), [str(m) for m in SIZES]
    for square, errors in found["errors"].items():
        # Medians: trigonometric features have draws with an error of any size.
        t = {name: {m: statistics.median(e) for m, e in row.items()} for name, row in errors.items()}
        positive = sum(t[f"{p}, positive"][m] < t[f"{p}, trig"][m] for p in ("orthogonal", "iid") for m in sizes)
        orthogonal = sum(t[f"orthogonal, {n}"][m] < t[f"iid, {n}"][m] for n in ("positive", "trig") for m in sizes)
        ratio = statistics.median(t["orthogonal, trig"][m] / t["orthogonal, positive"][m] for m in sizes)
        holds &= positive == orthogonal == cells
        rows[str(square)] = {
            "positive below trig": f"{positive} of {cells}",
            "error of trig over positive": f"{ratio:.2g}",
            "orthogonal below independent": f"{orthogonal} of {cells}",
        }
    return Said(
        f"Cases by mean square length, m = 16 to 256, medians of {found['samples']} draws:"
        + table(rows, "mean square length"),
        graded(holds, True),
        "the order depends on the norm, which the paper does not give. For short vectors no kernel value is small and "
        "trigonometric features are better. For long ones tails swamp the gain of orthogonality",
    )


def draw(found: Any) -> None:
    fig, axes = figure(2, figsize=(11, 3.8))
    for ax, (square, errors) in zip(axes, found["errors"].items(), strict=True):
        ends = {}
        for name, row in errors.items():
            ordered = [sorted(row[str(m)]) for m in SIZES]
            middle = [statistics.median(e) for e in ordered]
            (line,) = ax.plot(SIZES, middle, "o-")
            tenth = [(e[len(e) // 10], e[-1 - len(e) // 10]) for e in ordered]
            ax.fill_between(SIZES, *zip(*tenth, strict=True), alpha=0.15, color=line.get_color())
            ends[name] = (middle[-1], line.get_color())
        ax.set(yscale="log", xlabel="features m", ylabel="MSE of the attention output")
        ax.set_title(f"mean square length {square}")
        log_ticks(ax, SIZES)
        name_lines(ax, ends)
    save(fig, "attention_output_error")
