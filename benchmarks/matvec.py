"""Kernel products by `auto` against exact products: nine data sets, six bandwidths each; build included.

    python benchmarks/matvec.py --quick                            n = 5,000, three data sets
    python benchmarks/matvec.py --part scan                        the 54 cases, n = 20,000, 10 minutes on a quiet core
    python benchmarks/matvec.py --part patches many                some parts
    python benchmarks/matvec.py --output results.json              all that is not in the file yet

The baseline is `method="exact"`: tiles of one matrix product and `exp2` each, every pair once where queries are keys.
Both operators are built and multiply one x (or as many as `products` says), in turns, on one thread; the best of six
rounds counts. `cells` is built and multiplied too: it tells whether `auto` missed anything. Beside every row stands
|Kx - x| / |x|: where it is small, K is nearly the identity and nothing is gained that `x` itself would not give. Before
a time is reported, the error must be within eps. `large`: a million points; the exact product is timed on some of the
queries. `keops`: exact products of KeOps beside ours, where `pykeops` is installed.
"""

from __future__ import annotations

import json
import sys
import tarfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _timing import arguments, best_times, kept, machine, table, write

from bochner.data import fetch
from bochner.matvec import KernelOperator

EPS = 0.1
SHARES = (2.0, 1.0, 0.5, 0.2, 0.08)  # of the median distance; and Scott's rule


def standard(table: np.ndarray) -> np.ndarray:
    return (table - table.mean(0)) / (table.std(0) + 1e-12)


def chosen(table: np.ndarray, n: int) -> np.ndarray:
    order = np.random.default_rng(0).permutation(len(table))
    return np.ascontiguousarray(table[order[:n]], dtype=np.float32)


def windows(size: int) -> np.ndarray:
    """Grey square patches of scikit-learn's sample photographs."""
    from sklearn.datasets import load_sample_images

    images = [image.astype(np.float32).mean(-1) / 255 for image in load_sample_images().images]
    parts = [np.lib.stride_tricks.sliding_window_view(grey, (size, size)).reshape(-1, size**2) for grey in images]
    rng = np.random.default_rng(0)
    return np.concatenate([part[rng.choice(len(part), 60_000, replace=False)] for part in parts])


def patches() -> np.ndarray:
    return windows(8)


def rims() -> np.ndarray:
    """The 16 pixels around the inner 3 x 3 of 5 x 5 patches."""
    return np.delete(windows(5), [6, 7, 8, 11, 12, 13, 16, 17, 18], 1)


def colours() -> np.ndarray:
    from sklearn.datasets import load_sample_images

    return standard(np.concatenate([image.reshape(-1, 3) for image in load_sample_images().images]).astype(np.float32))


def casp() -> np.ndarray:
    return standard(np.genfromtxt(fetch("casp"), delimiter=",", skip_header=1)[:, 1:])


def california() -> np.ndarray:
    with tarfile.open(fetch("california")) as archive:
        name = next(member for member in archive.getnames() if member.endswith(".csv"))
        file = archive.extractfile(name)
        assert file is not None
        rows = [line.decode().strip().split(",")[:8] for line in file.readlines()[1:]]
    return standard(np.array([[float(value or "nan") for value in row] for row in rows if all(row)]))


def words() -> np.ndarray:
    """Word vectors of 50 dimensions."""
    return np.load(fetch("glove"))


def covers() -> np.ndarray:
    """Made like a forest survey: ten correlated numbers, and four groups of ten indicators."""
    rng = np.random.default_rng(3)
    numbers = rng.normal(size=(120_000, 4)) @ rng.normal(size=(4, 10)) + 0.3 * rng.normal(size=(120_000, 10))
    kinds = np.eye(10)[(np.abs(numbers[:, :4]) * 3).astype(int).clip(0, 9)].reshape(-1, 40)
    return np.concatenate([standard(numbers), kinds], 1)


def mixture() -> np.ndarray:
    rng = np.random.default_rng(0)
    centres = 4.0 * rng.normal(size=(300, 64))
    return centres[rng.integers(300, size=120_000)] + rng.normal(size=(120_000, 64))


def million() -> np.ndarray:
    """A mixture of 3,000 Gaussians, a million points."""
    rng = np.random.default_rng(0)
    centres = 4.0 * rng.normal(size=(3000, 32)).astype(np.float32)
    return centres[rng.integers(3000, size=1_000_000)] + rng.normal(size=(1_000_000, 32)).astype(np.float32)


def normal() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(120_000, 8))


SCANNED = (patches, casp, california, colours, covers, rims, words, normal, mixture)
DATA: dict[str, Callable[[], np.ndarray]] = {f.__name__: f for f in (*SCANNED, million)}


def bandwidths(points: np.ndarray) -> dict[str, float]:
    some = points[:1500].astype(np.float64)
    median = float(np.median(np.linalg.norm(some[:750, None] - some[None, 750:], axis=-1)))
    scott = len(points) ** (-1 / (points.shape[1] + 4)) * float(points.std(0).mean())
    return {**{f"{share:g} medians": share * median for share in SHARES}, "scott": scott}


def truth(queries: np.ndarray, keys: np.ndarray, bandwidth: float, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Rows of K x in double precision, by differences."""
    out = []
    for row in rows:
        squared = np.square((keys - queries[row]).astype(np.float64) / bandwidth).sum(1)
        out.append(np.exp(-squared / 2) @ x)
    return np.array(out)


def compare(
    name: str, label: str, queries: np.ndarray, keys: np.ndarray | None, bandwidth: float, products: int = 1
) -> dict[str, Any]:
    """Build and multiply by both methods, in turns."""
    rng = np.random.default_rng(1)
    others = queries if keys is None else keys
    x = rng.normal(size=len(others)).astype(np.float32)
    best = {"exact": np.inf, "auto": np.inf}
    operators = {}
    for turn in range(6 if products == 1 else 2):
        for method in sorted(best, reverse=turn % 2 == 1):
            begun = time.perf_counter()
            K = KernelOperator(queries, keys, bandwidth, EPS, method=method, products=products)
            K.progress = False
            for _ in range(products):
                y = K @ x
            best[method] = min(best[method], time.perf_counter() - begun)
            operators[method] = K
    begun = time.perf_counter()
    if products == 1 and keys is None:
        KernelOperator(queries, None, bandwidth, EPS, method="cells") @ x
    cells_s = time.perf_counter() - begun if products == 1 and keys is None else None
    K = operators["auto"]
    rows = rng.choice(len(queries), 200, replace=False)
    y = np.asarray(K @ x, dtype=np.float64)
    error = np.linalg.norm(y[rows] - truth(queries, others, bandwidth, x, rows))
    error *= np.sqrt(len(queries) / len(rows)) / np.linalg.norm(x)
    if error > EPS:
        sys.exit(f"refused: on {name}, {label}, the error {error:.3g} |x| exceeds eps = {EPS}; no time is reported.")
    change = np.linalg.norm(y - x) / np.linalg.norm(x) if keys is None else float("nan")
    row = {
        "data": name,
        "d": queries.shape[1],
        "n": len(queries),
        "keys": len(others),
        "bandwidth": label,
        "sigma": bandwidth,
        "products": products,
        "change": None if np.isnan(change) else float(change),
        "exact_s": best["exact"],
        "auto_s": best["auto"],
        "ratio": best["auto"] / best["exact"],
        "cells_s": cells_s,
        "method": K.method,
        "exact_dtype": str(operators["exact"]._engine.dtype).removeprefix("torch."),
        "error": float(error),
        "bound": K.matvec_with_certificate(x).relative,
        "plan": str(K.plan),
    }
    told = "" if keys is not None else f"  |Kx - x|/|x| {change:8.3g}"
    print(
        f"{name:10s} {label:13s} {len(queries)} x {len(others)}, {products}: exact {best['exact']:.3f} s, auto "
        f"{best['auto']:.3f} s ({K.method}), ratio {row['ratio']:.2f}{told}  error {error:.1g}",
        flush=True,
    )
    return row


def scan(name: str, n: int) -> list[dict[str, Any]]:
    points = chosen(DATA[name](), n)
    KernelOperator(points[:4000], bandwidth=1.0) @ points[:4000, 0]  # libraries warm up
    return [compare(name, label, points, None, sigma) for label, sigma in bandwidths(points).items()]


def rectangles(n: int, s: int) -> list[dict[str, Any]]:
    """Few queries, many keys."""
    rows = []
    for name in ("patches", "words", "normal"):
        table = chosen(DATA[name](), n + s)
        scale = bandwidths(table)
        rows += [compare(name, label, table[:n], table[n:], scale[label]) for label in ("0.5 medians", "0.08 medians")]
    return rows


def density(s: int) -> list[dict[str, Any]]:
    """Colours of pixels at Scott's bandwidth, as a density estimate multiplies."""
    table = chosen(DATA["colours"](), s + 1000)
    return [compare("colours", "scott", table[:1000], table[1000:], bandwidths(table)["scott"])]


def plane(n: int) -> list[dict[str, Any]]:
    """Places on a map: normal points in two dimensions, at a twentieth and a fiftieth of their median distance."""
    points = np.random.default_rng(0).normal(size=(n, 2)).astype(np.float32)
    median = bandwidths(points)["1 medians"]
    return [compare("plane", f"{share} medians", points, None, share * median) for share in (0.05, 0.02)]


def many(n: int, products: int) -> list[dict[str, Any]]:
    """Several products with one K, as solvers make them."""
    rows = []
    for name, label in (
        ("patches", "0.2 medians"),
        ("casp", "1 medians"),
        ("california", "0.08 medians"),
        ("colours", "scott"),
        ("words", "0.2 medians"),
        ("covers", "scott"),
        ("mixture", "0.08 medians"),
    ):
        points = chosen(DATA[name](), n)
        rows.append(compare(name, label, points, None, bandwidths(points)[label], products))
    return rows


def large(name: str, n: int, sigma: float) -> list[dict[str, Any]]:
    """So many points: the exact product is timed on 1,000 queries and scaled to all pairs, each evaluated once."""
    points = DATA[name]()[:n].astype(np.float32)
    x = np.random.default_rng(1).normal(size=len(points)).astype(np.float32)
    part = KernelOperator(points[:1000], points, sigma, EPS, method="exact")
    part.progress = False
    begun = time.perf_counter()
    some = part @ x
    exact = (time.perf_counter() - begun) * len(points) / 1000 / 2
    begun = time.perf_counter()
    K = KernelOperator(points, None, sigma, EPS)
    build = time.perf_counter() - begun
    row: dict[str, Any] = {"data": name, "d": points.shape[1], "n": len(points), "sigma": sigma, "exact_s": exact}
    row |= {"method": K.method, "build_s": build, "product_s": exact, "change": None, "error": None}
    if K.method != "exact":
        begun = time.perf_counter()
        y = K @ x
        row["product_s"] = time.perf_counter() - begun
        row["change"] = float(np.linalg.norm(y - x) / np.linalg.norm(x))
        row["error"] = float(np.linalg.norm(y[:1000] - some) / np.linalg.norm(x[:1000]))
    else:
        row["change"] = float(np.linalg.norm(some - x[:1000]) / np.linalg.norm(x[:1000]))
    row["ratio"] = (build + row["product_s"]) / exact
    print(json.dumps(row), flush=True)
    return [row]


def keops(name: str, n: int) -> dict[str, Any]:
    """Exact products by KeOps, beside our exact ones without symmetry and with it."""
    from pykeops.numpy import LazyTensor

    points = chosen(DATA[name](), n)
    sigma = bandwidths(points)["1 medians"]
    x = np.random.default_rng(1).normal(size=(n, 1)).astype(np.float32)
    scaled = np.ascontiguousarray(points / (sigma * np.sqrt(2)), dtype=np.float32)
    theirs = (-((LazyTensor(scaled[:, None]) - LazyTensor(scaled[None])) ** 2).sum(-1)).exp()
    calls = {
        "KeOps": lambda: theirs @ x,
        "ours, all pairs": lambda: KernelOperator(points, points.copy(), sigma, EPS, method="exact") @ x[:, 0],
        "ours": lambda: KernelOperator(points, None, sigma, EPS, method="exact") @ x[:, 0],
    }
    row = {"data": name, "d": points.shape[1], "n": n, "seconds": best_times(calls, repeats=3, budget=5)}
    print(json.dumps(row), flush=True)
    return row


def parts(quick: bool) -> dict[str, Callable[[], list[dict[str, Any]]]]:
    """Everything there is to measure, by name."""
    n = 5_000 if quick else 20_000
    names = [f.__name__ for f in SCANNED[: 3 if quick else None]]
    out: dict[str, Callable[[], list[dict[str, Any]]]] = {name: lambda name=name: scan(name, n) for name in names}
    out["rectangles"] = lambda: rectangles(500 if quick else 2_000, 20_000 if quick else 100_000)
    out["density"] = lambda: density(50_000 if quick else 300_000)
    if quick:
        return out
    return {
        **out,
        "plane": lambda: plane(60_000),
        "many": lambda: many(n, 20),
        "million": lambda: large("million", 1_000_000, 2.0),
        "words400k": lambda: large("words", 400_000, 0.5),
        "keops": lambda: [keops(name, n) for name in ("patches", "casp")],
    }


HEAD = [
    "data",
    "bandwidth",
    "norm(Kx - x) / norm(x)",
    "exact, s",
    "auto, s",
    "auto / exact",
    "method",
    "error / norm(x)",
    "bound / norm(x)",
]


def cells(row: dict[str, Any]) -> list[str]:
    change = row["change"]
    return [
        f"{row['data']}, d = {row['d']}",
        f"{row['bandwidth']} ({row['sigma']:.2g})",
        "" if change is None else f"{change:.2g}",
        f"{row['exact_s']:.2f}",
        f"{row['auto_s']:.2f}",
        f"{row['ratio']:.2f}",
        row["method"],
        f"{row['error']:.0e}",
        f"{row['bound']:.0e}",
    ]


def tables(results: dict[str, Any]) -> str:
    """The report as Markdown."""
    found = results["parts"]
    rows = [row for f in SCANNED for row in found.get(f.__name__, [])]
    ratios = np.array([row["ratio"] for row in rows] or [np.nan])
    lines = [
        f"One thread ({results['machine']['processor']}, torch {results['machine']['torch']}), eps = {results['eps']}; "
        f"n = {rows[0]['n'] if rows else 0:,}, queries are keys, one product, build included. `auto` is faster in "
        f"{int((ratios < 0.95).sum())} of {len(rows)} cases, within 5 % in {int((np.abs(ratios - 1) <= 0.05).sum())}; "
        f"the largest ratio is {ratios.max():.2f}.",
        "",
        table(HEAD, [cells(row) for row in rows]),
    ]
    for name, title in (
        ("rectangles", "Few queries, many keys: 2,000 x 100,000, one product."),
        ("density", "A density at 1,000 points from 300,000."),
        ("plane", "60,000 points in the plane, one product."),
        ("many", "20 products with one K."),
    ):
        if name in found:
            lines += ["", title, "", table(HEAD, [cells(row) for row in found[name]])]
    sizes = [row for name in ("million", "words400k") for row in found.get(name, [])]
    if sizes:
        head = ["points", "d", "norm(Kx - x) / norm(x)", "exact, s", "build, s", "product, s", "auto / exact", "method"]
        cells_of = [
            [f"{r['n']:,}", str(r["d"]), f"{r['change']:.2g}"]
            + [f"{r[k]:.0f}" for k in ("exact_s", "build_s", "product_s")]
            + [f"{r['ratio']:.2f}", r["method"]]
            for r in sizes
        ]
        lines += [
            "",
            "Many points, one product; the exact time is scaled from 1,000 queries.",
            "",
            table(head, cells_of),
        ]
    for row in found.get("keops", []):
        told = ", ".join(f"{k} {v:.2f} s" for k, v in row["seconds"].items())
        lines += ["", f"Exact products of {row['n']:,} points of {row['data']}, d = {row['d']}: {told}."]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = arguments(__doc__, "n = 5,000, three data sets", page=False)
    choices = ("scan", *parts(False))
    parser.add_argument("--part", nargs="+", choices=choices, help="only these, again; others in the file stay")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    results: dict[str, Any] = {"eps": EPS, "machine": machine(1), "parts": kept(options.output).get("parts", {})}
    available = parts(options.quick)
    scanned = [f.__name__ for f in SCANNED]
    asked = [n for part in options.part or () for n in (scanned if part == "scan" else [part])]
    for name in [n for n in available if n in asked or (not asked and n not in results["parts"])]:
        results["parts"][name] = available[name]()
        write(results, options)
    print(tables(results))
    return results


if __name__ == "__main__":
    main()
