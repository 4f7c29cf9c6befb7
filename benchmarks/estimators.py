"""Estimators against scikit-learn and GPyTorch on real tables, from 2,000 to 1,000,000 rows.

    python benchmarks/estimators.py --part tables --data "patches 1,000,000" --model KernelRidge
    python benchmarks/estimators.py --part process --data california casp --peer
    python benchmarks/estimators.py --part features serving --output results.json

Without `--output` nothing stored is read; with it, rows in the file are kept, and `--again` measures them again.

`features`: `RandomFeatures` and `RBFSampler` at equal `n_components`, error of the kernel, and of a ridge regression
after them; on two tables, and on a third that no default was chosen by. `times`: of their `transform`. `tables`:
regression and classification, each model on each table in a process of its own, so that its memory can be told.
`process`: Gaussian processes from up to 2,000 rows; the recipe was chosen on two of the tables, the others confirm it.
`serving`: one row against 15,000 keys, and densities at 1,000 points. Seconds of `tables` and `process` are those of
the processor, on one thread.
"""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import resource
import sys
import tarfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _timing import arguments, best_times, kept, machine, table, write
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.datasets import load_diabetes, load_sample_images
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.kernel_approximation import Nystroem, RBFSampler
from sklearn.kernel_ridge import KernelRidge as TheirRidge
from sklearn.linear_model import LogisticRegression, Ridge, SGDClassifier
from sklearn.metrics import log_loss
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.neighbors import KernelDensity as TheirDensity
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bochner import data
from bochner.estimators import (
    GaussianProcessRegressor,
    KernelClassifier,
    KernelDensity,
    KernelRidge,
    KernelRidgeCV,
    RandomFeatures,
)

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


def collected(path: str, separator: str = ",", skip: int = 0, columns: slice = slice(None)) -> Data:
    """A table of the collection that CASP is of: the last of `columns` is the target; copies of rows are left out.

    A fifth of the wines are copies, which a process that learns no noise would find again among the rows held back.
    """
    values = np.genfromtxt(
        Path(data.fetch("casp")).parents[1] / path, delimiter=separator, skip_header=skip, comments="@"
    )[:, columns]
    values = values[np.sort(np.unique(values, axis=0, return_index=True)[1])]
    return values[:, :-1], values[:, -1]


CONFIRMING: dict[str, Callable[[], Data]] = {
    "airfoil": partial(collected, "airfoil/airfoil_self_noise.dat.txt", "\t"),
    "wine": partial(collected, "winequality_white/winequality-white.csv", ";", 1),
    "puma": partial(collected, "puma32h/puma32h.dat"),
    "grid": partial(collected, "electrical_grid_stability/Data_for_UCI_named.csv", skip=1, columns=slice(0, 13)),
    "computers": partial(collected, "compactiv/compactiv.dat"),
    "diabetes": partial(load_diabetes, return_X_y=True),
}


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


PATCH_ROWS = {"patches 200,000": 200_000, "patches 1,000,000": 1_000_000}
CLASS_ROWS = {"contrast 200,000": 200_000, "contrast 1,000,000": 1_000_000}
WORDS = "words 396,000"
CLASS_TABLES = (*CLASS_ROWS, WORDS)
CASP = "CASP 41,730"
HELD = 4000


def windows(n: int) -> np.ndarray:
    """5 x 5 windows of the colours of two photographs, float32."""
    parts = []
    for image in load_sample_images().images:
        for colour in range(3):
            view = np.lib.stride_tricks.sliding_window_view(image[:, :, colour].astype(np.float32) / 255, (5, 5))
            parts.append(view.reshape(-1, 25))
    pixels = np.concatenate(parts)
    return pixels[np.random.default_rng(0).permutation(len(pixels))[:n]]


def large_table(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Shuffled rows and targets; the last 4,000 are held back."""
    if name == CASP:
        X, y = casp()
        order = np.random.default_rng(0).permutation(len(X))
        return X[order].astype(np.float32), y[order]
    if name == WORDS:  # vectors of words, in 50 columns: are they common, less common or rare?
        X = np.load(data.fetch("glove"))
        order = np.random.default_rng(0).permutation(len(X))
        return X[order].astype(np.float32), order * 3 // len(X)
    pixels = windows((PATCH_ROWS | CLASS_ROWS)[name] + HELD)
    rim, middle = np.delete(pixels, [6, 7, 8, 11, 12, 13, 16, 17, 18], 1), pixels[:, 12]
    if name in PATCH_ROWS:
        return rim, middle
    # Darker, like or brighter than the rim is on average: terciles of the difference.
    contrast = middle - rim.mean(1)
    return rim, np.digitize(contrast, np.quantile(contrast, [1 / 3, 2 / 3]))


class Falkon(RegressorMixin, BaseEstimator):
    """Kernel ridge on random centres by preconditioned conjugate gradients, written from Rudi, Carratino and Rosasco
    (2017), Algorithm 1; the package of that name needs a compiler and does not install here."""

    def __init__(self, centers: int = 2000, gamma: float = 1.0, alpha: float = 0.1, steps: int = 20) -> None:
        self.centers, self.gamma, self.alpha, self.steps = centers, gamma, alpha, steps

    def _kernel(self, rows: np.ndarray) -> torch.Tensor:
        return torch.cdist(torch.as_tensor(rows, dtype=torch.float32), self.centers_).square_().mul_(-self.gamma).exp_()

    def fit(self, X: np.ndarray, y: np.ndarray) -> Falkon:
        n, penalty = len(X), self.alpha / len(X)
        chosen = np.random.default_rng(0).choice(n, self.centers, replace=False)
        self.centers_, self.mean_ = torch.as_tensor(X[chosen], dtype=torch.float32), float(np.mean(y))
        blocks = [slice(i, i + 4096) for i in range(0, n, 4096)]
        target = torch.as_tensor(y - self.mean_, dtype=torch.float32)[:, None]
        # 1. The preconditioner: K_MM = T'T, and A'A = TT'/M + penalty.
        one = torch.eye(self.centers, dtype=torch.float64)
        c = self.centers_.double()
        t = torch.linalg.cholesky((-self.gamma * torch.cdist(c, c).square()).exp() + 1e-6 * one, upper=True)
        a = torch.linalg.cholesky(t @ t.T / self.centers + penalty * one, upper=True)
        solve = partial(torch.linalg.solve_triangular, upper=True)

        def inner(x: torch.Tensor) -> torch.Tensor:
            return solve(t, solve(a, x))

        def outer(x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.solve_triangular(a.T, x, upper=False)

        def product(x: torch.Tensor) -> torch.Tensor:
            w = inner(x)
            found = sum((k.T @ (k @ w.float())).double() for k in (self._kernel(X[b]) for b in blocks))
            return outer(torch.linalg.solve_triangular(t.T, found / n, upper=False) + penalty * (t @ w))

        # 2. Conjugate gradients from zero.
        right = sum((self._kernel(X[b]).T @ target[b]).double() for b in blocks)
        residual = outer(torch.linalg.solve_triangular(t.T, right / n, upper=False))
        x, direction, size = torch.zeros_like(residual), residual.clone(), residual.square().sum()
        for _ in range(self.steps):
            image = product(direction)
            step = size / (direction * image).sum()
            x, residual = x + step * direction, residual - step * image
            before, size = size, residual.square().sum()
            direction = residual + size / before * direction
        self.weights_ = inner(x).float()
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        return np.asarray((self._kernel(X) @ self.weights_)[:, 0]) + self.mean_


def scaled(*steps: Any) -> Any:
    return make_pipeline(StandardScaler(), *steps)


NYSTROEM = {"n_components": 1000, "random_state": 0}
REGRESSORS: dict[str, Callable[[int], Any]] = {
    "KernelRidge": lambda d: KernelRidge(),
    "KernelRidge(centers=2000)": lambda d: KernelRidge(centers=2000),
    "KernelRidgeCV": lambda d: KernelRidgeCV(),
    "Nystroem(1000) + Ridge": lambda d: scaled(Nystroem(gamma=2 / d, **NYSTROEM), Ridge(alpha=0.1)),
    "Falkon, 2,000 centres": lambda d: scaled(Falkon(gamma=2 / d)),
    "HistGradientBoosting": lambda d: HistGradientBoostingRegressor(random_state=0),
}
CLASSIFIERS: dict[str, Callable[[int], Any]] = {
    "KernelClassifier": lambda d: KernelClassifier(),
    "KernelClassifier(centers=1000)": lambda d: KernelClassifier(centers=1000),
    "Nystroem(1000) + LogisticRegression": lambda d: scaled(
        Nystroem(gamma=2 / d, **NYSTROEM), LogisticRegression(C=10.0)
    ),
    "Nystroem(1000) + SGDClassifier": lambda d: scaled(
        Nystroem(gamma=2 / d, **NYSTROEM), SGDClassifier("log_loss", alpha=1e-6, random_state=0)
    ),
    "HistGradientBoosting": lambda d: HistGradientBoostingClassifier(random_state=0),
}
MODELS = [*REGRESSORS, *CLASSIFIERS]


def one_table(name: str, model: str) -> dict[str, Any]:
    """One fit: seconds, accuracy on rows held back, and the memory of the process."""
    X, y = large_table(name)
    train, test = slice(0, len(X) - HELD), slice(len(X) - HELD, None)
    made = (CLASSIFIERS if name in CLASS_TABLES else REGRESSORS)[model](X.shape[1])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps that did not suffice to LogisticRegression
        made.fit(X[train], y[train])
    row: dict[str, Any] = {"data": name, "model": model, "rows": len(X) - HELD, "columns": X.shape[1]}
    row["seconds"] = time.process_time() - began
    row["memory_gb"], row["data_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, before
    row["score"] = float(made.score(X[test], y[test]))
    if name in CLASS_TABLES:
        row["log_loss"] = float(log_loss(y[test], made.predict_proba(X[test])))
    else:
        row["rmse"] = rmse(made, X[test], y[test])
    row["passes"], row["centers"] = getattr(made, "n_iter_", None), len(getattr(made, "centers_", [])) or None
    if isinstance(row["passes"], np.ndarray):
        row["passes"] = int(row["passes"].max())
    print(json.dumps(row), flush=True)
    return row


def apart(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """The result of a function that runs in a new process, on one thread, whose memory is its own."""
    print(f"{time.strftime('%H:%M:%S')} {', '.join(str(arg) for arg in args[:2])} ...", file=sys.stderr, flush=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # read when the process starts
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def process(name: str, kernel: str, peer: bool) -> dict[str, Any]:
    """Fit up to 2,000 rows, or two thirds; predict up to 4,000 others with deviations; accuracy and coverage."""
    X, y = (TABLES | CONFIRMING)[name]()
    order = np.random.default_rng(0).permutation(len(X))
    n = min(2000, 2 * len(X) // 3)
    held = min(HELD, len(X) - n)
    X, y = X[order], y[order]
    began = time.process_time()
    if peer:
        mean, std, fitted = gpytorch_process(X[:n], y[:n], X[-held:], kernel)
    else:
        model = GaussianProcessRegressor(kernel=kernel).fit(X[:n], y[:n])
        fitted = time.process_time()
        mean, std = model.predict(X[-held:], return_std=True)
    ended, error = time.process_time(), y[-held:] - mean
    row: dict[str, Any] = {"data": name, "kernel": kernel, "model": "GPyTorch" if peer else "ours"}
    row |= {"rows": n, "held": held, "columns": X.shape[1]}
    row |= {"fit": fitted - began, "predict": ended - fitted, "r2": float(1 - np.mean(error**2) / y[-held:].var())}
    row["nll"] = float(np.mean(0.5 * np.log(2 * np.pi * std**2) + 0.5 * np.square(error / std)))
    row["coverage"] = float(np.mean(np.abs(error) < 1.96 * std))
    print(json.dumps(row), flush=True)
    return row


def gpytorch_process(X: np.ndarray, y: np.ndarray, Q: np.ndarray, kernel: str) -> tuple[np.ndarray, np.ndarray, float]:
    """An exact process of GPyTorch with a bandwidth for each column: 100 steps of Adam at 0.1."""
    import gpytorch

    mean, scale, middle, spread = X.mean(0), X.std(0), y.mean(), y.std()
    x, q = (torch.from_numpy((v - mean) / scale).float() for v in (X, Q))
    t = torch.from_numpy((y - middle) / spread).float()
    base = gpytorch.kernels.RBFKernel if kernel == "gaussian" else partial(gpytorch.kernels.MaternKernel, nu=1.5)

    class Model(gpytorch.models.ExactGP):  # type: ignore[name-defined, misc]
        def __init__(self, likelihood: Any) -> None:
            super().__init__(x, t, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(base(ard_num_dims=x.shape[1]))

        def forward(self, rows: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(rows), self.covar_module(rows))

    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Model(likelihood)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    likelihood_of = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    with gpytorch.settings.max_cholesky_size(5000):
        for _ in range(100):
            optimizer.zero_grad()
            (-likelihood_of(model(x), t)).backward()
            optimizer.step()
        fitted = time.process_time()
        model.eval()
        with torch.no_grad():
            found = likelihood(model(q))
            return found.mean.numpy() * spread + middle, found.stddev.numpy() * spread, fitted


def serving() -> dict[str, Any]:
    """Milliseconds of one prediction from 15,000 keys; seconds of 1,000 densities from 300,000 rows."""
    rng = np.random.default_rng(0)
    X, keys, queries = rng.normal(size=(15_000, 10)), rng.normal(size=(300_000, 3)), rng.normal(size=(1000, 3))
    ours = KernelRidge(centers="all", gamma=0.1, standardize=False, tol=0.5).fit(X, X[:, 0])
    theirs = TheirRidge(kernel="rbf", gamma=0.1)
    theirs.X_fit_, theirs.dual_coef_, theirs.n_features_in_ = X, ours.dual_coef_, 10
    rows = {OURS: lambda: ours.predict(X[:1]), THEIRS: lambda: theirs.predict(X[:1])}
    density = {
        "auto": KernelDensity(bandwidth="scott").fit(keys),
        "exact": KernelDensity(bandwidth="scott", method="exact").fit(keys),
    }
    out = {
        "row_ms": {k: 1e3 * v for k, v in best_times(rows, repeats=30, budget=2).items()},
        "density_s": best_times(
            {k: lambda m=m: m.score_samples(queries) for k, m in density.items()}, repeats=3, budget=10
        ),
    }
    peer = TheirDensity(bandwidth="scott").fit(keys)
    began = time.perf_counter()
    peer.score_samples(queries)
    out["density_s"][THEIRS] = time.perf_counter() - began
    print(json.dumps(out), flush=True)
    return out


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
    sections = [
        (
            '`RandomFeatures` and `RBFSampler`, gamma = "scale", means over seeds; differences with standard errors:',
            [*head, "difference", "time, of theirs"],
            rows,
        )
    ]
    rows = []
    for r in results.get("tables", []):
        cells = [r["data"], f"`{r['model']}`", f"{r['seconds']:.0f} s", f"{r['memory_gb']:.2f} GB", f"{r['score']:.4f}"]
        rows.append([*cells, f"RMSE {r['rmse']:.4f}" if "rmse" in r else f"log loss {r['log_loss']:.4f}"])
    title = "Large tables, one core, `score` on 4,000 rows held back (R2, or the share of right classes):"
    sections.append((title, ["table", "model", "fit", "memory", "score", "error"], rows))
    rows = []
    for r in results.get("process", []):
        cells = [r["data"], r["kernel"], r["model"], f"{r['fit']:.0f} s", f"{r['predict']:.1f} s"]
        rows.append([*cells, f"{r['r2']:.3f}", f"{r['nll']:.3f}", f"{100 * r['coverage']:.1f} %"])
    title = "Gaussian processes from 2,000 rows, a bandwidth for each column, 4,000 rows held back:"
    sections.append((title, ["table", "kernel", "model", "fit", "predict", "R2", "NLL", "coverage of 95 %"], rows))
    text = "\n\n".join(f"{title}\n\n{table(head, rows)}" for title, head, rows in sections if rows)
    if "serving" in results:
        ms, s = results["serving"]["row_ms"], results["serving"]["density_s"]
        text += (
            f"\n\nOne row predicted from 15,000 keys: {ms[OURS]:.2f} ms, scikit-learn {ms[THEIRS]:.2f} ms. Densities "
            f'at 1,000 points from 300,000 rows: {s["auto"]:.1f} s, with `method="exact"` {s["exact"]:.1f} s, '
            f"scikit-learn {s[THEIRS]:.1f} s."
        )
    return text


def main(argv: list[str] | None = None) -> None:
    parts = ("features", "times", "tables", "process", "serving")
    names = (*TABLES, CHECK, *CONFIRMING, CASP, *PATCH_ROWS, *CLASS_TABLES)
    parser = arguments(__doc__, "small sizes; prints, writes nothing", parts=parts, page=False)
    parser.add_argument("--data", nargs="+", choices=names, default=names, help="tables to renew")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MODELS, help="models of `tables` to renew")
    parser.add_argument("--again", action="store_true", help="measure rows of `tables` and `process` that are stored")
    parser.add_argument("--peer", action="store_true", help="GPyTorch in `process`, too")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    results = kept(options.output)
    results["machine"] = machine(1)
    lengths = [100] if options.quick else [100, 500, 1000]
    small = [name for name in (*TABLES, CHECK) if name in options.data]
    if "features" in options.part:
        rows = {(r["data"], r["n_components"]): r for r in results.get("features", [])}
        for name in small:
            for m in lengths:
                if rows.get((name, m), {}).get("seeds", 0) < SEEDS[m]:  # an interrupted run goes on
                    rows[name, m] = features(name, m)
                    results["features"] = list(rows.values())
                    write(results, options)
    if "times" in options.part:
        results["times"] = results.get("times", {}) | {name: times(name, lengths) for name in small}
    if "tables" in options.part:
        found = {(r["data"], r["model"]): r for r in results.get("tables", [])}
        order = {key: i for i, key in enumerate([CASP, *PATCH_ROWS, *CLASS_TABLES, *MODELS])}
        for name in (CASP,) if options.quick else (CASP, *PATCH_ROWS, *CLASS_TABLES):
            for model in CLASSIFIERS if name in CLASS_TABLES else REGRESSORS:
                if name in options.data and model in options.model and ((name, model) not in found or options.again):
                    found[name, model] = apart(one_table, name, model)
                    results["tables"] = sorted(found.values(), key=lambda r: (order[r["data"]], order[r["model"]]))
                    write(results, options)
    if "process" in options.part:
        done = {(r["data"], r["kernel"], r["model"]): r for r in results.get("process", [])}
        for name in (n for n in (*TABLES, *CONFIRMING) if n in options.data):
            for kernel in ("gaussian", "matern32"):
                for peer in (False, True) if options.peer else (False,):
                    key = (name, kernel, "GPyTorch" if peer else OURS)
                    if key not in done or options.again:
                        done[key] = apart(process, name, kernel, peer)
                        results["process"] = [done[k] for k in sorted(done)]
                        write(results, options)
    if "serving" in options.part:
        results["serving"] = serving()
    print(tables(results))
    write(results, options)


if __name__ == "__main__":
    main()
