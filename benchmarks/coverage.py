"""How often statements about kernel products are true, on real and hostile data, for three values of eps.

    python benchmarks/coverage.py [--quick] [--output benchmarks/results/coverage.json]

Half of the operators plan as they see fit, the other half is made to plan from samples, so that statements of every
kind are made; every tenth statement is by a new operator. Truth is the dense matrix in double precision. Deterministic
statements must all be true; of the others at most so many may be false as chance allows at their confidence of 95 %
(binomial, alpha 0.001 for each set). Adversaries: vectors x chosen by someone who knows the error of the plan (unit
vectors of its worst columns, its top singular vectors, sparse, alternating, heavy-tailed ones). Smooth kernels: what a
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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _timing import table
from scipy.stats import binom

import bochner.matvec
from bochner.matvec import KernelOperator
from bochner.matvec.engines.lowrank import POWERS, PROBES, LowRankEngine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from kernel_sets import REAL, adversaries, dense, from_samples, hostile_operator, hostile_sets, real_set, statements

RESULT = Path(__file__).parent / "results" / "coverage.json"
N, EACH, ALPHA = 2500, 10, 1e-3  # more rows than are all checked
SMOOTH_ROWS = 500


class Sizes(NamedTuple):
    """How much is measured: repetitions for each eps, hostile operators, factors of each set, and real sets."""

    repetitions: dict[float, int]
    operators: int
    factors: int
    real: list[str]


FULL = Sizes({0.1: 300, 0.01: 100, 0.001: 100}, 500, 20, REAL)
QUICK = Sizes({0.1: 20}, 25, 2, ["digits"])  # nothing to download


# Modules that have no say in what `cells` does and states: other engines, and shells.
OTHER_ENGINES = ("budget", "csr", "panels", "sparse", "lowrank", "features", "paper")
SHELLS = ("autograd", "distributed", "inputs", "operator", "reduction", "spectrum", "storage", "stream")


def digest(unused: tuple[str, ...] = ()) -> str:
    """Of the modules of `bochner.matvec`."""
    folder = Path(bochner.matvec.__file__).parent
    texts = [path.read_bytes() for path in sorted(folder.rglob("*.py")) if path.stem not in unused]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:12]


def measure(X: np.ndarray, bandwidth: float, eps: float, repetitions: int) -> dict[str, Any]:
    """Counts over all repetitions: statements and false ones by kind, products beyond eps."""
    truth = dense(X, X, bandwidth)
    made: Counter[str] = Counter()
    false: Counter[str] = Counter()
    beyond = 0
    for seed in range(-(-repetitions // EACH)):
        for kind, error, bound, _, limit in statements(X, bandwidth, eps, seed, EACH, truth, seed % 2 == 1):
            made[kind] += 1
            false[kind] += error > bound * (1 + 1e-12)
            beyond += error > limit
    return {"statements": dict(made), "false": {k: v for k, v in false.items() if v}, "beyond_eps": beyond}


def adversarial(X: np.ndarray, bandwidth: float, eps: float) -> dict[str, Any]:
    """Products and statements about the x that suit a plan least: the operator's own, and one made from samples."""
    truth = dense(X, X, bandwidth)
    made: Counter[str] = Counter()
    false: Counter[str] = Counter()
    vectors = beyond = 0
    for samples in (False, True):
        K = KernelOperator(X, bandwidth=bandwidth, eps=eps, method="cells")
        if samples and K.certain:
            from_samples(K)
        K.adaptive = False
        x = adversaries(truth - np.asarray(K @ np.eye(len(X)), dtype=np.float64))
        K.adaptive = True
        vectors += x.shape[1]
        beyond += int((np.linalg.norm(K @ x - truth @ x, axis=0) > eps).sum())
        for column in x.T:
            estimate = K.matvec_with_certificate(column)
            made[estimate.kind] += 1
            error = float(np.linalg.norm(estimate.value - truth @ column))
            false[estimate.kind] += error > estimate.bound * (1 + 1e-12)
    wrong = {k: v for k, v in false.items() if v}
    return {"vectors": vectors, "statements": dict(made), "false": wrong, "beyond_eps": beyond}


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
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes, output = (QUICK, None) if options.quick else (FULL, options.output)
    done: dict[str, Any] = json.loads(output.read_text()) if output is not None and output.exists() else {}
    if done.get("rows") != N:
        done = {"rows": N}
    code = {"sets": digest(OTHER_ENGINES + SHELLS), "hostile": digest(), "smooth": digest()}
    code["adversaries"] = code["sets"]
    done = {k: v for k, v in done.items() if k not in code or done.get("code", {}).get(k) == code[k]} | {"code": code}

    def keep() -> None:
        if output is not None:
            output.write_text(json.dumps(done, indent=1) + "\n")

    done.setdefault("sets", {})
    sets = {**hostile_sets(N), **{name: real_set(name, N) for name in sizes.real}}
    for eps, repetitions in sizes.repetitions.items():
        for name, (X, bandwidth) in sets.items():
            if f"{name}, eps {eps:g}" not in done["sets"]:
                done["sets"][f"{name}, eps {eps:g}"] = measure(X, bandwidth, eps, repetitions)
                print(name, eps, done["sets"][f"{name}, eps {eps:g}"], flush=True)
                keep()
            if f"{name}, eps {eps:g}" not in done.setdefault("adversaries", {}):
                done["adversaries"][f"{name}, eps {eps:g}"] = adversarial(X, bandwidth, eps)
                print("adversaries", name, eps, done["adversaries"][f"{name}, eps {eps:g}"], flush=True)
                keep()
    if "hostile" not in done:
        done["hostile"] = hostile_statements(sizes.operators)
        keep()
    for name, (X, _) in sets.items():
        if name not in done.setdefault("smooth", {}):
            done["smooth"][name] = smooth_bounds(X, sizes.factors)
            print("smooth", name, done["smooth"][name], flush=True)
            keep()
    return 0 if report(done) else 1


def report(done: dict[str, Any]) -> bool:
    holds, rows = done["hostile"]["false"] == 0, []
    for name, r in done["sets"].items():
        made, false = Counter(r["statements"]), Counter(r["false"])
        sampled = sum(made.values()) - made["deterministic"]
        missed = sum(false.values()) - false["deterministic"]
        holds &= false["deterministic"] == 0 and missed <= binom.ppf(1 - ALPHA, sampled, 0.05)
        cells = [f"{false[k]} of {made[k]}" for k in ("deterministic", "guarantee", "estimate")]
        rows.append([name, *cells, str(r["beyond_eps"])])
    hard = done["adversaries"].values()
    kinds, untold = Counter[str](), Counter[str]()
    for r in hard:
        kinds.update(r["statements"])
        untold.update(r["false"])
    beyond, vectors = sum(r["beyond_eps"] for r in hard), sum(r["vectors"] for r in hard)
    drawn = sum(kinds.values()) - kinds["deterministic"]
    holds &= untold["deterministic"] == 0 and sum(untold.values()) <= binom.ppf(1 - ALPHA, drawn, 0.05)
    holds &= beyond <= binom.ppf(1 - ALPHA, vectors, 0.05)
    head = ["data", "deterministic, false", "guarantee, false", "estimate, false", "products beyond eps"]
    print(table(head, rows))
    print(
        f"{vectors} vectors by adversaries, {beyond} products beyond eps; {sum(kinds.values())} statements "
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
