"""Section 1.3 of the problem set: the time of polynomial attention, exact, by sum decomposition and by TensorSketch.

The text forms the L x L matrix in all three cases: O(L^2 d log n) exact, O(L m n + L^2 m) and O(L n (d + m log m) +
L^2 m) by features, and concludes that features save time when m is far below d. Measured: forming the matrix in the
three ways, and what features are for, attention without the matrix, O(L m d). Degree n = 3, d = 64, m = 32 (far below
d) and 256; best of interleaved rounds. Call it on an idle machine.

    python experiments/polynomial_timings.py [--quick]
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from _gallery import figure, finish, name_lines, save
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


@torch.no_grad()
def measure(lengths: list[int], repeats: int) -> dict[str, dict[str, dict[int, float]]]:
    found: dict[str, dict[str, dict[int, float]]] = {"matrix": {}, "attention": {}}
    for length in lengths:
        g = torch.Generator().manual_seed(0)
        # Non-negative inputs keep the normaliser of an odd power away from zero; times do not depend on it.
        q, k, v = (torch.rand(1, 1, length, DIM, generator=g) for _ in range(3))
        matrices, attentions = {"exact": partial(matrix, q, k)}, {"exact": partial(exact, q, k, v)}
        for label, name in MAPS.items():
            for m in SIZES:
                phi = feature_map(name, dim=DIM, num_features=m, degree=DEGREE)
                matrices[f"{label}, m = {m}"] = partial(by_features, phi, q, k)
                attentions[f"{label}, m = {m}"] = partial(linear_attention, q, k, v, phi, scale=1.0)
        for what, calls in (("matrix", matrices), ("attention", attentions)):
            for label, seconds in best_times(calls, repeats=repeats, budget=1.0).items():
                found[what].setdefault(label, {})[length] = seconds
        print(
            length,
            {w: {n: f"{t[length] * 1e3:.1f} ms" for n, t in rows.items()} for w, rows in found.items()},
            flush=True,
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lengths = [256, 1024, 2048] if options.quick else [512, 1024, 2048, 4096, 8192]
    found = measure(lengths, 3 if options.quick else 5)
    draw(found)
    last = lengths[-1]
    matrices, attentions = ({n: t[last] for n, t in found[w].items()} for w in ("matrix", "attention"))
    small = {n: matrices["exact"] / t for n, t in matrices.items() if n.endswith("m = 32")}
    linear = {n: attentions["exact"] / t for n, t in attentions.items() if n != "exact"}
    saves = all(s > 1 for s in small.values())
    shown = ", ".join(f"{n} {s:.2f}" for n, s in small.items())
    fast = ", ".join(f"{n} {s:.1f}" for n, s in linear.items())
    return finish(
        "polynomial_timings",
        {"seconds": found, "dim": DIM, "degree": DEGREE},
        claim="With m far below d, forming the attention matrix from features saves much time against the exact "
        "kernel.",
        ours=f"at L = {last:,} forming the matrix is faster than exact by {shown}; without forming it, attention by "
        f"features is "
        f"faster than exact attention by {fast}.",
        verdict="partly" if all(s > 1 for s in linear.values()) else "not",
        why=("the saving in the matrix is there but small" if saves else "the matrix itself is no faster from features")
        + ", for it costs L^2 numbers either way: the point is never to form it",
    )


def draw(found: dict[str, dict[str, dict[int, float]]]) -> None:
    fig, axes = figure(2, figsize=(11, 3.8))
    for ax, (what, rows) in zip(axes, found.items(), strict=True):
        ends = {}
        for label, times in rows.items():
            (line,) = ax.plot(list(times), [1e3 * t for t in times.values()], "o-")
            ends[label] = (1e3 * list(times.values())[-1], line.get_color())
        ax.set(xscale="log", yscale="log", xlabel="length L", ylabel="milliseconds", title=what)
        ax.set_xticks(list(times), [f"{n:,}" for n in times])
        ax.minorticks_off()
        name_lines(ax, ends)
    save(fig, "polynomial_timings")


if __name__ == "__main__":
    raise SystemExit(main())
