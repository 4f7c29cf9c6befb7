"""How often statements about kernel products are true, on real and hostile data, for three values of eps.

    python benchmarks/coverage.py [--quick] [--output benchmarks/results/coverage.json]

Operators take turns: `cells`, `cells` made to plan from samples, `auto`, `exact`, on float64 and on float32 points; so
statements of every kind are made, and every tenth is by a new operator. Truth is the dense matrix in double precision.
Deterministic statements must all be true; of the others at most so many may be false as chance allows at their
confidence of 95 % (binomial, alpha 0.001 for each set). Adversaries: vectors x chosen by someone who knows the error of
the plan (unit vectors of its worst columns, its top singular vectors, sparse, alternating, heavy-tailed ones,
indicators of clusters). Few queries: one and twenty of them against all points, x the error of a row. Large: sets of
9,000 rows or more, where `auto` does not simply multiply exactly. Smooth kernels: what a
factor leaves is bounded with probability 1 - 2^-10 for all x at once; the bound is compared with the true norm, and
statements are made about the x that it suits least. What is done is kept in the file with a digest of the code that it
depends on: an interrupted run goes on, and what has changed is measured again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _timing import table, write_page
from scipy.stats import binom

import bochner.matvec
from bochner.matvec import KernelOperator
from bochner.matvec.engines.lowrank import POWERS, PROBES, LowRankEngine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from kernel_sets import (
    REAL,
    adversaries,
    dense,
    from_samples,
    hostile_operator,
    hostile_sets,
    indicators,
    real_set,
    some_x,
    statements,
)

RESULT = Path(__file__).parent / "results" / "coverage.json"
N, EACH, ALPHA = 2500, 10, 1e-3  # more rows than are all checked
SMOOTH_ROWS = 500
TURNS = [("cells", False), ("cells", True), ("auto", False), ("exact", False)]  # and whether planned from samples
LARGE, LARGE_SETS = 9000, ["words", "proteins", "patches", "a far cluster"]


class Sizes(NamedTuple):
    """How much is measured: repetitions for each eps, hostile operators, factors of each set, real and large sets."""

    repetitions: dict[float, int]
    operators: int
    factors: int
    real: list[str]
    large: list[str]


FULL = Sizes({0.1: 300, 0.01: 300, 0.001: 300}, 500, 20, REAL, LARGE_SETS)
QUICK = Sizes({0.1: 40}, 25, 2, ["digits"], ["a far cluster"])  # nothing to download


# Modules that have no say in what `cells` does and states: other engines, and shells.
OTHER_ENGINES = ("budget", "csr", "panels", "sparse", "lowrank", "features", "paper")
SHELLS = ("autograd", "distributed", "inputs", "operator", "reduction", "spectrum", "storage", "stream")


def digest(unused: tuple[str, ...] = ()) -> str:
    """Of the modules of `bochner.matvec`."""
    folder = Path(bochner.matvec.__file__).parent
    texts = [path.read_bytes() for path in sorted(folder.rglob("*.py")) if path.stem not in unused]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:12]


class Counts:
    """Statements and false ones by kind, products beyond eps."""

    def __init__(self) -> None:
        self.made: Counter[str] = Counter()
        self.false: Counter[str] = Counter()
        self.vectors = self.beyond = 0

    def state(self, kind: str, error: float, bound: float) -> None:
        self.made[kind] += 1
        self.false[kind] += error > bound * (1 + 1e-12)

    def ask(self, K: KernelOperator, x: np.ndarray, truth: np.ndarray) -> None:
        """Products with all columns of x at once, and a statement about each."""
        beyond = np.linalg.norm(np.asarray(K @ x, dtype=np.float64) - truth, axis=0) > K.eps * np.linalg.norm(x, axis=0)
        self.vectors, self.beyond = self.vectors + x.shape[1], self.beyond + int(beyond.sum())
        for column, product in zip(x.T, truth.T, strict=True):
            said = K.matvec_with_certificate(column)
            self.state(said.kind, float(np.linalg.norm(said.value - product)), said.bound)

    def result(self) -> dict[str, Any]:
        wrong = {k: v for k, v in self.false.items() if v}
        return {"vectors": self.vectors, "statements": dict(self.made), "false": wrong, "beyond_eps": self.beyond}


def measure(X: np.ndarray, bandwidth: float, eps: float, repetitions: int) -> dict[str, Any]:
    """All repetitions: random x and indicators of clusters, by operators of every turn and dtype."""
    counts = Counts()
    for dtype, first in ((np.float64, 0), (np.float32, 1)):
        points = X.astype(dtype)
        truth = dense(points, points, bandwidth)
        for number in range(first, -(-repetitions // EACH), 2):
            method, samples = TURNS[number // 2 % len(TURNS)]
            for kind, error, bound, _, limit in statements(
                points, bandwidth, eps, number, EACH, truth, samples, method
            ):
                counts.state(kind, error, bound)
                counts.vectors, counts.beyond = counts.vectors + 1, counts.beyond + (error > limit)
    return counts.result()


def adversarial(X: np.ndarray, bandwidth: float, eps: float) -> dict[str, Any]:
    """Products and statements about the x that suit an operator least: by cells of both kinds, and exact."""
    counts = Counts()
    for dtype in (np.float64, np.float32):
        points = X.astype(dtype)
        truth = dense(points, points, bandwidth)
        turns = TURNS[:2] if dtype == np.float64 else [TURNS[0], TURNS[3]]  # `auto` is `exact` at this size
        for method, samples in turns:
            K = KernelOperator(points, bandwidth=bandwidth, eps=eps, method=method)
            if samples and K.certain:
                from_samples(K)
            K.adaptive = False
            x = adversaries(truth - np.asarray(K @ np.eye(len(X)), dtype=np.float64), keys=points)
            K.adaptive = True
            counts.ask(K, x, truth @ x)
    return counts.result()


def few_queries(X: np.ndarray, bandwidth: float, eps: float) -> dict[str, Any]:
    """One query, and twenty, against all points: x along the error of a row, its signs, ones, and clusters."""
    counts, keys, rng = Counts(), X.astype(np.float32), np.random.default_rng(0)
    for n in (1, 20):
        rows = rng.integers(len(keys), size=n)
        queries = keys[rows]
        truth = dense(queries, keys, bandwidth)
        for method in ("auto", "exact", "cells"):
            K = KernelOperator(queries, keys, bandwidth=bandwidth, eps=eps, method=method)
            error = np.asarray(K.rmatmat(np.eye(n)), dtype=np.float64) - truth.T
            x = np.concatenate([error, np.sign(error), np.ones((len(keys), 1)), indicators(keys, rows[:3], 300)], 1)
            x = x[:, np.linalg.norm(x, axis=0) > 0]
            x /= np.linalg.norm(x, axis=0)
            counts.ask(K, x, truth @ x)
    return counts.result()


def large(name: str, eps: float) -> dict[str, Any]:
    """Sets of at least 9,000 rows, float32, by `auto`, `exact` and `cells`: clusters, and x of every kind."""
    X, bandwidth = far_cluster(LARGE) if name == "a far cluster" else real_set(name, LARGE)
    X, rng, counts = X.astype(np.float32), np.random.default_rng(0), Counts()
    rows = np.concatenate([rng.integers(len(X), size=4), [1]])
    x = [some_x(kind, len(X), rng) for kind in range(5)]
    x = np.concatenate([np.stack(x, 1), indicators(X, rows, 100), indicators(X, rows, 600)], 1)
    truth = np.concatenate([dense(X[i : i + 500], X, bandwidth) @ x for i in range(0, len(X), 500)])
    for method in ("auto", "exact", "cells"):
        counts.ask(KernelOperator(X, bandwidth=bandwidth, eps=eps, method=method), x, truth)
    return counts.result()


def far_cluster(n: int) -> tuple[np.ndarray, float]:
    """Normal points, but for 600 that lie together and far away."""
    rng = np.random.default_rng(0)
    X = 3.0 * rng.normal(size=(n, 8))
    X[1:601] = 20.0 / 8**0.5 + 0.2 * rng.normal(size=(600, 8))
    return X, 1.0


def hostile_statements(operators: int) -> dict[str, int]:
    """Deterministic statements on points of any scale and place, and how many of them are false."""
    stated = false = 0
    for seed in range(operators):
        K, truth, xs = hostile_operator(seed)
        for x in xs:
            estimate = K.matvec_with_certificate(x)
            if estimate.kind == "deterministic":
                stated += 1
                false += bool(np.linalg.norm(estimate.value - truth @ x) > estimate.bound * (1 + 1e-12))
    return {"statements": stated, "false": false}


def smooth_bounds(X: np.ndarray, factors: int) -> dict[str, Any]:
    """Bounds on what factors of any rank leave out: how many, false, and how tight; statements by kind, and false ones.

    Bandwidths from a third of the median distance to three times as much; each factor sees other points.
    """
    made: Counter[str] = Counter()
    false: Counter[str] = Counter()
    slack = []
    for seed in range(factors):
        rng = np.random.default_rng(seed)
        points = X[rng.permutation(len(X))[:SMOOTH_ROWS]].astype(np.float64)
        apart = np.linalg.norm(points[::2][:200, None] - points[1::2][None, :200], axis=-1)
        bandwidth = float(np.median(apart) * 3.0 ** rng.uniform(-1, 1))
        rank, eps = int(rng.integers(5, 120)), float(10.0 ** rng.uniform(-2, 1))
        K = KernelOperator(points, bandwidth=bandwidth, eps=eps, seed=seed, method="lowrank", rank=rank)
        truth, engine = dense(points, points, bandwidth), K._engine
        assert isinstance(engine, LowRankEngine)
        bound, one = engine.probe(0.0, 1 + seed % POWERS), torch.eye(len(points), 1, dtype=torch.float64)
        # Of a vector of length one, rounding included.
        stated = float(engine.error_bound(one)[0]) if engine.confidence == 1.0 else engine.likely(one).bound
        left = truth - engine.apply(torch.eye(len(points), dtype=torch.float64)).value.numpy()
        norm = float(np.linalg.norm(left, 2))
        made["bounds"] += 1
        false["bounds"] += norm > stated
        slack.append(bound / norm if norm > 1e-9 else 1.0)
        for x in (np.linalg.eigh(left)[1][:, [0, -1]].T, rng.normal(size=(2, len(points)))):
            for one in x:
                estimate = K.matvec_with_certificate(one)
                error = float(np.linalg.norm(estimate.value - truth @ one))
                made[estimate.kind] += 1
                false[estimate.kind] += error > estimate.bound * (1 + 1e-12)
    tight = {"least": min(slack), "median": float(np.median(slack))}
    wrong = {k: v for k, v in false.items() if v}
    return {"statements": dict(made), "false": wrong, "bound over norm": tight}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one eps, few statements, small sets; writes nothing")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--page", type=Path, default=None, help="write the counts into this page")
    parser.add_argument("--stored", action="store_true", help="measure nothing more: write what is there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes, output = (QUICK, None) if options.quick else (FULL, options.output)
    done: dict[str, Any] = json.loads(output.read_text()) if output is not None and output.exists() else {}
    if done.get("rows") != N:
        done = {"rows": N}
    if options.stored:
        if options.page:
            write_page(options.page, "coverage", counted(done))
        return 0
    code = {"sets": digest(OTHER_ENGINES + SHELLS), "hostile": digest(), "smooth": digest()}
    code |= dict.fromkeys(("adversaries", "few queries", "large"), code["sets"])
    done = {k: v for k, v in done.items() if k not in code or done.get("code", {}).get(k) == code[k]} | {"code": code}

    def keep() -> None:
        if output is not None:
            output.write_text(json.dumps(done, indent=1) + "\n")

    def once(part: str, key: str, make: Callable[[], dict[str, Any]]) -> None:
        if key not in done.setdefault(part, {}):
            done[part][key] = make()
            print(part, key, done[part][key], flush=True)
            keep()

    sets = {**hostile_sets(N), **{name: real_set(name, N) for name in sizes.real}}
    for eps, repetitions in sizes.repetitions.items():
        for name in sizes.large:
            once("large", f"{name}, eps {eps:g}", partial(large, name, eps))
        for name, (X, bandwidth) in sets.items():
            key = f"{name}, eps {eps:g}"
            once("few queries", key, partial(few_queries, X, bandwidth, eps))
            once("adversaries", key, partial(adversarial, X, bandwidth, eps))
            once("sets", key, partial(measure, X, bandwidth, eps, repetitions))
    if "hostile" not in done:
        done["hostile"] = hostile_statements(sizes.operators)
        keep()
    for name, (X, _) in sets.items():
        once("smooth", name, partial(smooth_bounds, X, sizes.factors))
    if options.page:
        write_page(options.page, "coverage", counted(done))
    return 0 if report(done) else 1


def counted(done: dict[str, Any]) -> str:
    """What was counted, for the page."""
    parts = ("sets", "adversaries", "few queries", "large")
    rows = [r for part in parts for r in done.get(part, {}).values()]
    sets = {key.rpartition(", eps")[0] for key in done.get("sets", {})}
    limits = {key.rpartition(" ")[2] for key in done.get("sets", {})}
    size = {part: sum(r["vectors"] for r in done.get(part, {}).values()) for part in parts}
    made, false = (Counter[str](), Counter[str]())
    for r in rows:
        made.update(r["statements"])
        false.update(r["false"])
    beyond = sum(r["beyond_eps"] for r in rows)
    return (
        f"`python benchmarks/coverage.py` counts, on {len(sets)} hostile and real data sets at eps "
        f"{', '.join(sorted(limits, key=float, reverse=True))}, by `cells`, `auto` and `exact`, in float32 and "
        f"float64: {size['sets']:,} products with x of every kind, {size['adversaries']:,} with an x chosen by someone "
        "who knows the error matrix (unit vectors of its worst columns, its top singular vectors, clusters), "
        f"{size['few queries']:,} of one or twenty queries, {size['large']:,} with 9,000 rows. Beyond eps: {beyond}. "
        f"Of {sum(made.values()):,} statements about them, {made['deterministic']:,} of them deterministic, "
        f"{sum(false.values())} are false ({false['deterministic']} deterministic)."
    )


def report(done: dict[str, Any]) -> bool:
    holds, rows = done["hostile"]["false"] == 0, []
    for name, r in done["sets"].items():
        made, false = Counter(r["statements"]), Counter(r["false"])
        sampled = sum(made.values()) - made["deterministic"]
        missed = sum(false.values()) - false["deterministic"]
        holds &= false["deterministic"] == 0 and missed <= binom.ppf(1 - ALPHA, sampled, 0.05)
        cells = [f"{false[k]} of {made[k]}" for k in ("deterministic", "guarantee", "estimate")]
        rows.append([name, *cells, str(r["beyond_eps"])])
    head = ["data", "deterministic, false", "guarantee, false", "estimate, false", "products beyond eps"]
    print(table(head, rows))
    print(f"{sum(r['vectors'] for r in done['sets'].values())} products in all")
    for part in ("adversaries", "few queries", "large"):
        kinds, untold = Counter[str](), Counter[str]()
        for r in done[part].values():
            kinds.update(r["statements"])
            untold.update(r["false"])
        beyond, vectors = (sum(r[k] for r in done[part].values()) for k in ("beyond_eps", "vectors"))
        drawn = sum(kinds.values()) - kinds["deterministic"]
        holds &= untold["deterministic"] == 0 and sum(untold.values()) <= binom.ppf(1 - ALPHA, drawn, 0.05)
        holds &= beyond <= binom.ppf(1 - ALPHA, vectors, 0.05)
        print(
            f"{part}: {vectors} vectors, {beyond} products beyond eps; {sum(kinds.values())} statements "
            f"({kinds['deterministic']} deterministic), {sum(untold.values())} false"
        )
    smooth = done["smooth"].values()
    bounds = sum(r["statements"]["bounds"] for r in smooth)
    wrong = sum(r["false"].get("bounds", 0) for r in smooth)
    holds &= wrong <= binom.ppf(1 - ALPHA, bounds, 2.0**-PROBES)
    others = sum(sum(r["statements"].values()) for r in smooth) - bounds
    untrue = sum(sum(r["false"].values()) for r in smooth) - wrong
    holds &= untrue <= binom.ppf(1 - ALPHA, others, 0.05) and not any(r["false"].get("deterministic") for r in smooth)
    print(f"{bounds} bounds on what factors leave, {wrong} false; {others} statements about them, {untrue} false")
    print(
        f"{done['hostile']['statements']} deterministic statements on hostile points, {done['hostile']['false']} false"
    )
    print("claim, statements hold as often as they say:", "holds" if holds else "FAILS")
    return holds


if __name__ == "__main__":
    raise SystemExit(main())
