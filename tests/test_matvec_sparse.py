"""Kept entries: what is dropped is counted, rows and columns lose no more than they may."""

import numpy as np
import pytest
import torch
from kernel_sets import dense, radial
from scipy.sparse.linalg import eigsh

from bochner.matvec import KernelOperator
from bochner.matvec.sparse import SparseEngine

torch.set_num_threads(1)


def points(n, d=3, seed=0):
    rng = np.random.default_rng(seed)
    return 6.0 * rng.normal(size=(30, d))[rng.integers(30, size=n)] + rng.normal(size=(n, d))


@pytest.mark.parametrize("eps", [0.1, 0.01, 1e-4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_error_matrix_is_within_the_bounds_of_its_rows_and_columns(symmetric, eps, dtype):
    q, k = points(900).astype(dtype), points(700, seed=1).astype(dtype)
    K = KernelOperator(q, None if symmetric else k, bandwidth=0.4, eps=eps, method="sparse")
    truth = dense(q, q if symmetric else k, 0.4)
    kept = np.asarray(K @ np.eye(K.shape[1]), dtype=np.float64)
    error, engine = np.abs(truth - kept), K._engine
    rounding = engine.relative * truth
    rows = np.maximum(error - rounding, 0).sum(1)[engine.cells.queries.order]
    columns = np.maximum(error - rounding, 0).sum(0)[engine.cells.index.keys.order]
    assert (rows <= engine.rows.numpy() * 1.02 + 1e-7).all()
    assert (columns <= engine.columns.numpy() * 1.02 + 1e-7).all()
    assert np.linalg.norm(error, 2) <= engine.norm <= eps
    assert (kept == 0).mean() > 0.3
    if symmetric:
        np.testing.assert_array_equal(kept, kept.T)


@pytest.mark.parametrize("kernel", ["laplace", "matern32", "matern52", "student"])
def test_other_kernels_are_kept_too(kernel):
    X = points(600)
    K = KernelOperator(X, bandwidth=0.1, kernel=kernel, eps=0.05, method="sparse")
    assert np.linalg.norm(radial(X, X, 0.1, kernel) - K @ np.eye(600), 2) <= 0.05


def test_kept_operators_find_eigenvalues():
    X = points(1500)
    K = KernelOperator(X, bandwidth=0.5, eps=0.01, method="sparse")
    truth = np.linalg.eigvalsh(dense(X, X, 0.5))[-4:]
    np.testing.assert_allclose(eigsh(K, k=4, return_eigenvectors=False, tol=1e-6), truth, atol=0.01)


@pytest.mark.parametrize("method", ["sparse", "cells"])
def test_rows_without_any_near_key_are_zero(method):
    q = np.concatenate([points(50), np.full((3, 3), 1e4)])
    K = KernelOperator(q, points(400, seed=2), bandwidth=0.3, method=method)
    assert np.abs((K @ np.ones(400))[-3:]).max() < 1e-25
    assert np.abs(K.T @ np.eye(53)[-1]).max() < 1e-25


def test_a_threshold_that_a_row_cannot_afford_is_lowered(monkeypatch):
    """The rows that are probed are sparse, others are not: what those lose is counted, and less is dropped."""
    X = np.concatenate([points(600), 0.7 * points(900, seed=1) / 6])
    monkeypatch.setattr(SparseEngine, "_threshold", lambda self, limit: 0.2)
    K = KernelOperator(X, bandwidth=0.4, eps=0.05, method="sparse")
    assert np.linalg.norm(dense(X, X, 0.4) - K @ np.eye(1500), 2) <= K._engine.norm <= 0.05
