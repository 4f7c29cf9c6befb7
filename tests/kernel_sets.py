"""Points that have broken, or could break, a kernel product; real tables; and the oracle."""

import numpy as np

from bochner import BochnerError, data
from bochner.matvec import KernelOperator

REAL = ["words", "proteins", "patches", "digits", "cancer", "diabetes"]


def dense(queries, keys, bandwidth):
    """The kernel by differences in float64: the oracle."""
    q, k = np.asarray(queries, dtype=np.float64), np.asarray(keys, dtype=np.float64)
    squared = np.zeros((len(q), len(k)))
    for column in range(q.shape[1]):
        squared += ((q[:, column, None] - k[None, :, column]) / bandwidth) ** 2
    return np.exp(-squared / 2)


def hostile_sets(n):
    """Name, points, bandwidth: what has broken, or could break, a product."""
    rng = np.random.default_rng(11)
    normal = rng.normal(size=(n, 2))
    middle = 4 * rng.normal(size=(40, 20))
    curve = rng.normal(size=(n, 3))
    duplicates = np.repeat(rng.normal(size=(n // 10, 5)), 10, 0)
    return {
        "scales from 1e-3 to 1e3": (normal * 10.0 ** rng.integers(-3, 4, size=(n, 1)), 0.0852),
        "heavy tails": (rng.standard_t(2, size=(n, 8)), 0.12),
        "mixture": (middle[rng.integers(40, size=n)] + rng.normal(size=(n, 20)), 1.5),
        "a curved surface": (np.concatenate([curve, np.sin(2 * curve), np.cos(3 * curve)], 1), 0.06),
        "no clusters, many dimensions": (rng.normal(size=(n, 40)), 1.5),
        "two clouds a million apart": (normal * 0.3 + 1e6 * np.sign(normal[:, :1]), 0.1),
        "duplicates": (duplicates, 0.2),
        "a dense patch in a wide cell": (np.concatenate([5 * normal[:-60], 0.01 * normal[-60:] + 3.0]), 0.02),
    }


def real_set(name, n):
    """At most n rows of a real table, word vectors or patches; and a bandwidth at which they are sparse."""
    from sklearn import datasets

    rng = np.random.default_rng(0)
    if name == "words":
        table = np.load(data.fetch("glove", quiet=True), mmap_mode="r")
        return np.array(table[np.sort(rng.choice(len(table), n, replace=False))], dtype=np.float32), 0.8
    if name == "patches":
        grey = datasets.load_sample_images().images[0].astype(np.float32).mean(-1) / 255
        window = np.lib.stride_tricks.sliding_window_view(grey, (8, 8))
        rows, columns = rng.integers(0, window.shape[0], n), rng.integers(0, window.shape[1], n)
        return window[rows, columns].reshape(n, 64), 0.04
    if name == "proteins":
        table = np.genfromtxt(data.fetch("casp", quiet=True), delimiter=",", skip_header=1)[:, 1:]
    else:
        load = {"digits": "load_digits", "cancer": "load_breast_cancer", "diabetes": "load_diabetes"}[name]
        table = getattr(datasets, load)().data
    table = (table - table.mean(0)) / (table.std(0) + 1e-12)
    chosen = rng.permutation(len(table))[:n]
    return table[chosen], {"proteins": 0.1, "digits": 2.0, "cancer": 0.8, "diabetes": 0.5}[name]


def radial(queries, keys, bandwidth, kernel):
    """Any of the kernels by differences in float64; one bandwidth or one for each feature."""
    sigma = np.broadcast_to(bandwidth, np.shape(queries)[1:])
    q, k = np.asarray(queries, dtype=np.float64), np.asarray(keys, dtype=np.float64)
    squared = np.zeros((len(q), len(k)))
    for column in range(q.shape[1]):
        squared += ((q[:, column, None] - k[None, :, column]) / sigma[column]) ** 2
    a = np.sqrt(squared)
    return {
        "gaussian": lambda: np.exp(-squared / 2),
        "laplace": lambda: np.exp(-a),
        "matern32": lambda: (1 + 3**0.5 * a) * np.exp(-(3**0.5) * a),
        "matern52": lambda: (1 + 5**0.5 * a + 5 / 3 * squared) * np.exp(-(5**0.5) * a),
        "student": lambda: 1 / (1 + squared),
    }[kernel]()


def random_operator(seed):
    """An operator with arguments of every kind, most of them unkind; the matrix; vectors x. None: it was refused."""
    rng = np.random.default_rng(seed)
    d, dtype = int(rng.integers(1, 24)), [np.float32, np.float64][seed % 2]
    shift = rng.choice([0.0, 0.0, 1e3, 1e6, 1e9]) * rng.normal(size=(1, d))

    def cloud():
        n, kind = int(rng.integers(1, 260)), rng.integers(6)
        x = rng.standard_t(1.2, size=(n, d)) if kind == 0 else rng.normal(size=(n, d))
        scales = 10.0 ** rng.integers(-3, 4, size=(n, 1)), 10.0 ** rng.uniform(-3, 3, size=(1, d))
        x *= [1.0, 1.0, *scales, 0.3, 1.0][kind]
        x += 8.0 * rng.integers(3, size=(n, 1)) if kind == 4 else 0.0
        return (x[rng.integers(n, size=n)] if kind == 5 else x) + shift

    queries = cloud().astype(dtype)
    keys = None if rng.random() < 0.5 else cloud().astype(dtype)
    kernel = str(rng.choice(["gaussian", "gaussian", "laplace", "matern32", "matern52", "student"]))
    bandwidth = float(10.0 ** (rng.uniform(-12, 12) if rng.random() < 0.15 else rng.uniform(-2, 2)))
    if rng.random() < 0.3:
        bandwidth = bandwidth * 10.0 ** rng.uniform(-1, 1, size=d)
    how = {
        "method": str(rng.choice(["auto", "exact", "cells", "lowrank"])),
        "eps": float(rng.choice([0.2, 0.1, 0.01, 1e-3, 1e-4])),
        "products": int(rng.choice([1, 1, 20])),
    }
    try:
        K = KernelOperator(queries, keys, bandwidth, kernel=kernel, seed=seed, **how)
    except BochnerError:
        return None
    s = K.shape[1]
    xs = [some_x(kind, s, rng) * 10.0 ** rng.integers(-20, 20) for kind in range(5)]
    xs.append(np.where(rng.random(s) < 0.1, rng.normal(size=s), 0.0))
    truth = radial(queries, queries if keys is None else keys, bandwidth, kernel)
    if truth.shape[0] * s < 10_000:  # and x chosen by an enemy who knows the error matrix
        error = truth - np.asarray(K @ np.eye(s), dtype=np.float64)
        if s > 31 and 1e-100 < np.abs(error).max() < np.inf:
            xs += list(adversaries(error, seed).T[::6])
    return K, truth, xs


def indicators(X, rows, count):
    """One column for each of these rows: one at its `count` nearest points, itself among them, and zero elsewhere."""
    X = np.asarray(X, dtype=np.float64)
    out = np.zeros((len(X), len(rows)))
    for column, row in enumerate(rows):
        squared = np.square(X - X[row]).sum(1)
        out[np.argpartition(squared, min(count, len(X)) - 1)[:count], column] = 1.0
    return out


def adversaries(error, seed=0, keys=None):
    """Vectors an enemy would choose who knows the error matrix (n, s): columns (s, r) of norm one.

    With the keys also indicators of clusters of them, around the worst columns.
    """
    rng = np.random.default_rng(seed)
    s = error.shape[1]
    error = error / (np.abs(error).max() or 1.0)  # squares of tiny numbers would vanish
    eye = np.eye(s)
    worst = np.argsort(-np.linalg.norm(error, axis=0))[:10]
    right = np.linalg.svd(error[np.argsort(-np.linalg.norm(error, axis=1))[:200]], full_matrices=False)[2][:3].T
    v = rng.normal(size=s)
    for _ in range(30):
        v = error.T @ (error @ v) + 1e-300
        v /= np.linalg.norm(v)
    sparse = np.zeros((s, 2))
    sparse[worst[:5], 0] = 1.0
    sparse[rng.choice(s, 30, replace=False), 1] = rng.normal(size=30)
    dense_kinds = [v, np.ones(s), 1.0 - 2.0 * (np.arange(s) % 2), rng.normal(size=s), rng.standard_t(1.1, size=s)]
    x = np.concatenate([eye[:, worst], eye[:, rng.choice(s, 10)], right, sparse, np.stack(dense_kinds, 1)], 1)
    if keys is not None:
        around = np.concatenate([worst[:3], np.argsort(-np.abs(error.sum(0)))[:2]])
        x = np.concatenate([x, np.sign(v)[:, None], indicators(keys, around, 40), indicators(keys, around, 300)], 1)
    return x / np.linalg.norm(x, axis=0)


def some_x(kind, n, rng):
    """Gaussian, ones, one-hot, signs, heavy-tailed."""
    if kind == 0:
        return rng.normal(size=n)
    if kind == 1:
        return np.ones(n)
    if kind == 2:
        return np.eye(1, n, int(rng.integers(n)))[0]
    return rng.choice([-1.0, 1.0], size=n) if kind == 3 else rng.standard_t(1.0, size=n)
