"""A product with a kernel matrix, and a bound on its error that holds.

python examples/certified_product.py [POINTS]
"""

import sys

import numpy as np

import bochner


def main(points: int = 20_000) -> float:
    rng = np.random.default_rng(0)
    centres = 5 * rng.normal(size=(200, 16))
    X = centres[rng.integers(200, size=points)] + rng.normal(size=(points, 16))
    x = rng.normal(size=points)  # signed weights

    K = bochner.KernelOperator(X, bandwidth=1.0, eps=0.01)
    print(K.plan)
    answer = K.matvec_with_certificate(x)
    print(answer)

    rows = rng.integers(points, size=50)  # the truth, in a few rows
    pairs = np.square(X[rows, None] - X[None]).sum(-1)
    error = np.abs(np.exp(-pairs / 2) @ x - np.asarray(answer.value)[rows])
    bounds = np.asarray(answer.row_bounds)[rows]
    print(f"largest error in {len(rows)} rows: {error.max():.2e}, its bound: {bounds.max():.2e}")
    assert (error <= bounds).all()
    return float(error.max())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
