"""Estimators against scikit-learn on real tables: random features, and ridge regression on 20,000 and 100,000 rows.

`features`: `RandomFeatures` and `RBFSampler` at equal `n_components`, error of the kernel, and of a ridge regression
after them; on two tables, and on a third that no default was chosen by. `times`: of their `transform`. `ridge`:
`KernelRidge` and `Nystroem(2000)` before `Ridge`, the same gamma and alpha (chosen by cross validation on 3,000 rows):
time of `fit` on 20,000 rows, or all where they are hardly more, and the error on 4,000 rows held back. `--data` renews
one table of a part alone; lengths that have too few seeds are measured again. `large`: `KernelRidge` on 100,000 rows,
whose kernel matrix would take 80 GB in scikit-learn: memory, steps and error.
"""

from __future__ import annotations

import csv
import io
import json
import resource
import tarfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _timing import arguments, best_times, kept, machine, table, write
from sklearn.datasets import load_sample_images
from sklearn.kernel_approximation import Nystroem, RBFSampler
from sklearn.linear_model import Ridge
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline

from bochner import data
from bochner.estimators import KernelRidge, RandomFeatures

Data = tuple[np.ndarray, np.ndarray]
SEEDS = {100: 120, 500: 60, 1000: 60}  # of each length: standard errors well below the differences that matter
OURS, THEIRS = "ours", "scikit-learn"


def california() -> Data:
    """Median house values of 20,433 districts, from 8 columns as scikit-learn's own copy has them."""
    with tarfile.open(data.fetch("california")) as archive:
        file = archive.extractfile("housing.csv")
        assert file is not None
        rows = [r for r in csv.DictReader(io.TextIOWrapper(file)) if r["total_bedrooms"]]
    raw = {k: np.array([float(r[k]) for r in rows]) for k in rows[0] if k != "ocean_proximity"}
    homes = raw["households"]
    columns = [raw["median_income"], raw["housing_median_age"], raw["total_rooms"] / homes]
    columns += [raw["total_bedrooms"] / homes, raw["population"], raw["population"] / homes]
    return np.stack([*columns, raw["latitude"], raw["longitude"]], 1), raw["median_house_value"] / 1e5


def casp() -> Data:
    """Deviation of 45,730 predicted protein structures, from 9 columns."""
    values = np.genfromtxt(data.fetch("casp"), delimiter=",", skip_header=1)
    return values[:, 1:], values[:, 0]


def patches() -> Data:
    """The middle pixel of 5 x 5 patches of two photographs, from the 16 pixels of their rim, 110,000 rows."""
    rng = np.random.default_rng(0)
    rows = []
    for image in load_sample_images().images:
        windows = np.lib.stride_tricks.sliding_window_view(image.mean(-1) / 255, (5, 5)).reshape(-1, 25)
        rows.append(windows[rng.choice(len(windows), 55_000, replace=False)])
    pixels = np.concatenate(rows)
    inner = [6, 7, 8, 11, 12, 13, 16, 17, 18]
    return np.delete(pixels, inner, 1), pixels[:, 12]


TABLES: dict[str, Callable[[], Data]] = {"california": california, "casp": casp}
CHECK = "patches"  # the third table


def prepared(raw: Data) -> Data:
    """Shuffled, columns of mean 0 and variance 1, y of mean 0."""
    X, y = raw
    order = np.random.default_rng(0).permutation(len(X))
    return ((X - X.mean(0)) / X.std(0))[order], (y - y.mean())[order]


def rmse(model: Any, X: np.ndarray, y: np.ndarray) -> float:
    return float(np.sqrt(np.mean((model.predict(X) - y) ** 2)))


MAKERS: dict[str, Callable[[int, int], Any]] = {
    OURS: lambda m, s: RandomFeatures(m, random_state=s),
    THEIRS: lambda m, s: RBFSampler(gamma="scale", n_components=m, random_state=s),
}


def feature_data(name: str) -> Data:
    if name != CHECK:
        return prepared(TABLES[name]())
    X, y = prepared(patches())
    return X[:20_000], y[:20_000]


def features(name: str, m: int) -> dict[str, Any]:
    """Errors of the kernel and of a ridge regression, means over seeds, and their differences."""
    X, y = feature_data(name)
    half = len(X) // 2
    train, test, sample = X[:half], X[half:], X[:1000]
    truth = rbf_kernel(sample, gamma=1 / (train.shape[1] * train.var()))  # "scale"
    losses: dict[str, list[float]] = {OURS: [], THEIRS: []}
    errors: dict[str, list[float]] = {OURS: [], THEIRS: []}
    for s in range(SEEDS[m]):
        for k, make in MAKERS.items():
            model = make(m, s).fit(train)
            z = model.transform(sample)
            errors[k].append(float(np.sqrt(np.mean((z @ z.T - truth) ** 2))))
            fitted = Ridge(alpha=1.0).fit(model.transform(train), y[:half])
            losses[k].append(rmse(fitted, model.transform(test), y[half:]))
    apart = np.subtract(losses[OURS], losses[THEIRS])
    row: dict[str, Any] = {"data": name, "rows": len(X), "n_components": m, "seeds": SEEDS[m]}
    row["kernel_error"] = {k: float(np.mean(v)) for k, v in errors.items()}
    row["rmse"] = {k: float(np.mean(v)) for k, v in losses.items()}
    deviation = float(apart.std(ddof=1) / len(apart) ** 0.5)
    row["difference"] = {"mean": float(apart.mean()), "standard_error": deviation}
    print(json.dumps(row), flush=True)
    return row


def times(name: str, lengths: list[int]) -> dict[str, dict[str, float]]:
    """Seconds of `transform`, by `n_components`."""
    X, _ = feature_data(name)
    out = {}
    for m in lengths:
        fitted = {k: make(m, 0).fit(X) for k, make in MAKERS.items()}
        out[str(m)] = best_times({k: lambda f=f: f.transform(X) for k, f in fitted.items()}, repeats=5, budget=2)
    print(name, json.dumps(out), flush=True)
    return out


def ridge(name: str, n: int = 20_000) -> dict[str, Any]:
    X, y = prepared(TABLES[name]())
    fitted = n if len(X) >= n + 4000 else len(X)  # timed on all rows where they are hardly more
    n = min(n, len(X) - 4000)
    train, test = (X[:n], y[:n]), (X[n : n + 4000], y[n : n + 4000])
    grid = {"gamma": [0.03, 0.1, 0.3, 1.0, 3.0], "alpha": [0.03, 0.1, 0.3, 1.0]}
    best = GridSearchCV(KernelRidge(), grid, cv=3).fit(X[:3000], y[:3000]).best_params_
    models = {
        "KernelRidge": KernelRidge(**best),
        "Nystroem(2000) + Ridge": make_pipeline(
            Nystroem(gamma=best["gamma"], n_components=2000, random_state=0), Ridge(alpha=best["alpha"])
        ),
    }
    row: dict[str, Any] = {"data": name, "rows": fitted, "rows_of_error": n, **best, "seconds": {}, "rmse": {}}
    for _ in range(2):
        for k, model in models.items():
            began = time.perf_counter()
            model.fit(X[:fitted], y[:fitted])
            seconds = time.perf_counter() - began
            row["seconds"][k] = min(seconds, row["seconds"].get(k, seconds))
    row["steps"] = models["KernelRidge"].n_iter_
    row["rmse"] = {k: rmse(model if n == fitted else model.fit(*train), *test) for k, model in models.items()}
    print(json.dumps(row), flush=True)
    return row


def large(n: int = 100_000) -> dict[str, Any]:
    X, y = prepared(patches())
    gamma, alpha = 0.1, 0.1
    began = time.perf_counter()
    model = KernelRidge(alpha=alpha, gamma=gamma).fit(X[:n], y[:n])
    seconds = time.perf_counter() - began
    small = KernelRidge(alpha=alpha, gamma=gamma).fit(X[:10_000], y[:10_000])
    row = {
        "rows": n,
        "gamma": gamma,
        "alpha": alpha,
        "steps": model.n_iter_,
        "seconds": seconds,
        "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "matrix_gb": 8e-9 * n * n,
        "rmse": rmse(model, X[n:], y[n:]),
        "rmse_of_10000_rows": rmse(small, X[n:], y[n:]),
        "deviation_of_y": float(y.std()),
    }
    print(json.dumps(row), flush=True)
    return row


def tables(results: dict[str, Any]) -> str:
    head = ["data", "rows", "n_components", "seeds", "kernel error, ours", THEIRS, "ridge error, ours", THEIRS]
    rows = []
    for r in results.get("features", []):
        e, l, d = r["kernel_error"], r["rmse"], r["difference"]
        cells = [r["data"], f"{r['rows']:,}", str(r["n_components"]), str(r["seeds"])]
        cells += [f"{e[k]:.4f}" for k in (OURS, THEIRS)] + [f"{l[k]:.4f}" for k in (OURS, THEIRS)]
        s = results.get("times", {}).get(r["data"], {}).get(str(r["n_components"]))
        cells += [f"{d['mean']:+.4f} ± {d['standard_error']:.4f}", f"{s[OURS] / s[THEIRS]:.2f}" if s else ""]
        rows.append(cells)
    text = (
        '`RandomFeatures` and `RBFSampler`, gamma = "scale", means over seeds; differences with their standard errors:'
    )
    text += "\n\n" + table([*head, "difference", "time, of theirs"], rows)
    ours, theirs = "KernelRidge", "Nystroem(2000) + Ridge"
    head = ["data", "rows", "fit of `KernelRidge`", "of `Nystroem(2000)` and `Ridge`", "error (from rows)", "theirs"]
    rows = []
    for r in results.get("ridge", []):
        cells = [r["data"], f"{r['rows']:,}", *(f"{r['seconds'][k]:.1f} s" for k in (ours, theirs))]
        error = f"{r['rmse'][ours]:.4f} ({r.get('rows_of_error', r['rows']):,})"
        rows.append([*cells, error, f"{r['rmse'][theirs]:.4f}"])
    text += "\n\nRidge regression with the same gamma and alpha:\n\n" + table(head, rows)
    if "large" in results:
        r = results["large"]
        text += (
            f"\n\n{r['rows']:,} rows of image patches: {r['steps']} steps, {r['seconds']:.0f} s, "
            f"{r['memory_gb']:.1f} GB at most, where the kernel matrix alone would take {r['matrix_gb']:.0f} GB. "
            f"Held-out error {r['rmse']:.4f} (from 10,000 of the rows {r['rmse_of_10000_rows']:.4f}; deviation of y "
            f"{r['deviation_of_y']:.3f})."
        )
    return text


def main(argv: list[str] | None = None) -> None:
    parts = ("features", "times", "ridge", "large")
    parser = arguments(__doc__, "small sizes; prints, writes nothing", parts=parts)
    parser.add_argument("--data", nargs="+", choices=(*TABLES, CHECK), default=(*TABLES, CHECK), help="tables to renew")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    results = kept(options.output)
    results["machine"] = machine(1)
    lengths = [100] if options.quick else [100, 500, 1000]
    if "features" in options.part:
        rows = {(r["data"], r["n_components"]): r for r in results.get("features", [])}
        for name in options.data:
            for m in lengths:
                if rows.get((name, m), {}).get("seeds", 0) < SEEDS[m]:  # an interrupted run goes on
                    rows[name, m] = features(name, m)
                    results["features"] = list(rows.values())
                    write(results, options, "estimators", tables(results))
    if "times" in options.part:
        results["times"] = results.get("times", {}) | {name: times(name, lengths) for name in options.data}
    if "ridge" in options.part:
        found = {r["data"]: r for r in results.get("ridge", [])}
        found |= {name: ridge(name, 4000 if options.quick else 20_000) for name in TABLES if name in options.data}
        results["ridge"] = list(found.values())
    if "large" in options.part:
        results["large"] = large(6000 if options.quick else 100_000)
    write(results, options, "estimators", tables(results))


if __name__ == "__main__":
    main()
