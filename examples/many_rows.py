"""Kernel ridge regression on 200,000 rows, without the kernel matrix, which would take 320 GB.

python examples/many_rows.py [ROWS]
"""

import sys
import time

import numpy as np

from bochner.estimators import KernelRidge


def table(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Eight columns, of which three matter."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, 8)).astype("float32")
    y = np.sin(2 * X[:, 0]) * X[:, 1] + 0.5 * X[:, 2] ** 2 + 0.1 * rng.normal(size=rows)
    return X, y


def main(rows: int = 200_000, centers: int = 1000) -> float:
    X, y = table(rows)
    new, truth = table(2000, seed=1)
    print(f"fitting {rows:,} rows of {X.shape[1]} columns", flush=True)
    began = time.perf_counter()
    model = KernelRidge(alpha=0.1, gamma="learn", centers=centers).fit(X, y)
    took = time.perf_counter() - began
    print(f"{rows:,} rows, {len(model.centers_):,} centres, {model.n_iter_} passes: {took:.1f} s")
    print("bandwidth of each column:", np.round(model.bandwidth_, 1))
    score = model.score(new, truth)
    print(f"R2 on new rows: {score:.3f}")
    return score


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
