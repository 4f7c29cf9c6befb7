"""How often statements about kernel products are true, on real and hostile data, for three values of eps.

    python benchmarks/coverage.py [--output benchmarks/results/coverage.json]

Half of the operators plan as they see fit, the other half is made to plan from samples, so that statements of every
kind are made; every tenth statement is by a new operator. Truth is the dense matrix in double precision. Deterministic
statements must all be true; of the others at most so many may be false as chance allows at their confidence of 95 %
(binomial, alpha 0.001 for each set). What is done is kept in the file: an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _timing import table
from scipy.stats import binom

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from kernel_sets import REAL, dense, hostile_operator, hostile_sets, real_set, statements

RESULT = Path(__file__).parent / "results" / "coverage.json"
REPETITIONS = {0.1: 300, 0.01: 100, 0.001: 100}
N, EACH, ALPHA = 2000, 10, 1e-3


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    done: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    if done.get("rows") != N:
        done = {"rows": N, "sets": {}}
    sets = {**hostile_sets(N), **{name: real_set(name, N) for name in REAL}}
    for eps, repetitions in REPETITIONS.items():
        for name, (X, bandwidth) in sets.items():
            if f"{name}, eps {eps:g}" not in done["sets"]:
                done["sets"][f"{name}, eps {eps:g}"] = measure(X, bandwidth, eps, repetitions)
                print(name, eps, done["sets"][f"{name}, eps {eps:g}"], flush=True)
                options.output.write_text(json.dumps(done, indent=1) + "\n")
    if "hostile" not in done:
        done["hostile"] = hostile_statements(500)
        options.output.write_text(json.dumps(done, indent=1) + "\n")
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
    head = ["data", "deterministic, false", "guarantee, false", "estimate, false", "products beyond eps"]
    print(table(head, rows))
    print(
        f"{done['hostile']['statements']} deterministic statements on hostile points, {done['hostile']['false']} false"
    )
    print("claim, statements hold as often as they say:", "holds" if holds else "FAILS")
    return holds


if __name__ == "__main__":
    raise SystemExit(main())
