"""Kept entries: what is dropped is counted, rows and columns lose no more than they may."""

import numpy as np
import pytest
import scipy.sparse
import torch
from kernel_sets import dense, radial
from scipy.sparse.linalg import eigsh

from bochner.matvec import KernelOperator
from bochner.matvec.sparse import Budget, CompressedRows, first_threshold

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
    assert (rows <= engine.lost.rows.numpy() * 1.02 + 1e-7).all()
    assert (columns <= engine.lost.columns.numpy() * 1.02 + 1e-7).all()
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


@pytest.mark.parametrize("vectorised", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_compressed_rows_multiply_like_the_dense_matrix(monkeypatch, dtype, vectorised):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: vectorised)
    table = scipy.sparse.random_array((70, 50), density=0.1, rng=np.random.default_rng(0), dtype=dtype).tocsr()
    rows = CompressedRows(table)
    for columns in (1, 3):
        x = torch.randn(50, columns, generator=torch.Generator().manual_seed(0)).to(torch.from_numpy(table.data).dtype)
        torch.testing.assert_close(rows @ x, torch.from_numpy(table.toarray()) @ x)
        torch.testing.assert_close(
            rows.transposed @ x[:0].new_ones(70, 1), torch.from_numpy(table.toarray().sum(0))[:, None]
        )
    dense_table = table.toarray() != 0
    assert rows.longest == max(dense_table.sum(0).max(), dense_table.sum(1).max())


@pytest.mark.parametrize("symmetric", [True, False])
def test_no_row_and_no_column_loses_more_than_its_budget(symmetric):
    """Tile by tile, what does not fit is kept, and what is lost is counted."""
    generator = torch.Generator().manual_seed(0)
    K = torch.rand(200, 200, generator=generator, dtype=torch.float64).pow(4)
    K = torch.maximum(K, K.T) if symmetric else K
    before = 0.5 * torch.rand(200, generator=generator, dtype=torch.float64)
    budget = Budget(before, before if symmetric else torch.zeros(200, dtype=torch.float64), 2.0, symmetric)
    gone = torch.zeros_like(K)
    for lo in range(0, 200, 40):
        begin = lo if symmetric else 0
        tile = K[lo : lo + 40, begin:].clone()
        tile = tile.triu(1) if symmetric else tile
        gone[lo : lo + 40, begin:] = budget.drop(tile, lo, torch.arange(begin, 200), 0.03)
    gone = gone + gone.T if symmetric else gone
    torch.testing.assert_close(budget.rows, before + gone.sum(1))
    assert float(budget.rows.max()) <= 2.0
    assert float(budget.columns.max()) <= 2.0
    assert float(budget.rows.mean()) > 0.5  # and the budget is used
    assert float(torch.linalg.matrix_norm(gone, 2)) <= budget.norm


def test_the_first_threshold_drops_what_an_ordinary_row_can_lose():
    rows = torch.linspace(0.0, 1.0, 101, dtype=torch.float64).expand(50, 101).clone()
    tau, kept = first_threshold([rows], 1.0)
    assert float(rows[0][rows[0] < tau].sum()) <= 0.8
    assert float(rows[0][rows[0] <= tau].sum()) > 0.8
    assert kept == pytest.approx(float((rows[0] >= tau).double().mean()))
    assert first_threshold([1e-6 * rows], 1.0)[1] == 0.0
