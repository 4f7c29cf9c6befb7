"""Kept entries: the same products, known bounds for every row and column, strictly linear, within memory."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import LinearOperator, cg, eigsh

from bochner._checks import BochnerError
from bochner.matvec import KernelOperator
from bochner.matvec import panels as panels_module
from bochner.matvec.budget import Budget
from bochner.matvec.csr import RowWriter
from bochner.matvec.engines import sparse as sparse_module
from bochner.matvec.engines.cells import CellsEngine
from bochner.matvec.engines.sparse import SparseEngine
from bochner.matvec.measured import measured_plan
from bochner.matvec.panels import Panels

torch.set_num_threads(1)


def clusters(n, d=6, centres=30, spread=6.0, seed=0):
    rng = np.random.default_rng(seed)
    middle = np.random.default_rng(99).normal(size=(centres, d)) * spread
    return middle[rng.integers(centres, size=n)] + rng.normal(size=(n, d))


@pytest.fixture(params=["scattered", "in blocks"])
def layout(request, monkeypatch):
    """Entries by themselves, as few of them are; or in dense blocks, of several tiles and lines, where they pay."""
    in_blocks = request.param == "in blocks"
    monkeypatch.setattr(sparse_module, "SMALL", 0 if in_blocks else 1 << 62)
    if in_blocks:
        monkeypatch.setattr(sparse_module, "BLOCK_TIME", 0)
        monkeypatch.setattr(sparse_module, "ENTRIES", 1 << 10)
        monkeypatch.setattr(panels_module, "LINE", 16)
    return request.param


def dense(q, k, bandwidth):
    return np.exp(-((q[:, None] - k[None]) ** 2).sum(-1) / (2 * bandwidth**2))


@pytest.mark.parametrize("eps", [0.1, 0.01, 1e-4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_error_matrix_is_within_the_bounds_of_its_rows_and_columns(layout, symmetric, eps):
    q, k = clusters(700), clusters(1100, seed=1)
    K = KernelOperator(q, None if symmetric else k, bandwidth=1.2, eps=eps, method="sparse")
    assert K.certain
    engine, keys = K._engine, q if symmetric else k
    error = np.abs(dense(q, keys, 1.2) - K @ np.eye(len(keys)))
    assert engine.entries < 0.5 * error.size
    assert (engine.panels.entries > 0) == (layout == "in blocks")
    assert np.linalg.norm(error, 2) <= engine.norm_bound + 1e-6 <= eps
    rows, columns = engine.lost.rows.double(), engine.lost.columns.double()
    if symmetric:
        rows = columns = rows + columns
    allowed_rows = rows[engine.plan.queries.order.argsort()].numpy()
    allowed_columns = columns[engine.index.keys.order.argsort()].numpy()
    assert (error.sum(1) <= allowed_rows * (1 + 1e-3) + 1e-4 * eps + 2e-5).all()
    assert (error.sum(0) <= allowed_columns * (1 + 1e-3) + 1e-4 * eps + 2e-5).all()
    back = K.rmatvec(np.ones(len(q)))
    assert np.linalg.norm(back - dense(q, keys, 1.2).sum(0)) <= eps * len(q) ** 0.5


def test_products_are_strictly_linear_and_symmetric(layout):
    X = clusters(900)
    K = KernelOperator(X, bandwidth=1.2, method="sparse")
    x, z = np.random.default_rng(0).normal(size=(2, 900))
    np.testing.assert_allclose(K @ (2 * x - 3 * z), 2 * (K @ x) - 3 * (K @ z), atol=1e-4)
    M = K @ np.eye(900)
    np.testing.assert_array_equal(M, M.T)
    np.testing.assert_array_equal(np.diag(M), 1.0)
    np.testing.assert_allclose(K @ np.stack([x, z], 1), np.stack([K @ x, K @ z], 1), atol=1e-5)


@pytest.mark.parametrize("kernel", ["laplace", "matern32", "matern52", "student"])
def test_other_kernels_are_kept_too(kernel):
    X = clusters(600)
    x = np.random.default_rng(0).normal(size=600)
    truth = KernelOperator(X, bandwidth=0.3, kernel=kernel, method="exact") @ x
    y = KernelOperator(X, bandwidth=0.3, kernel=kernel, method="sparse", eps=0.02) @ x
    assert np.linalg.norm(y - truth) <= 0.02 * np.linalg.norm(x)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_measured_plan_keeps_its_far_cells(layout, symmetric):
    X, q = clusters(1500, d=3), clusters(800, d=3, seed=2)
    K = KernelOperator(X if symmetric else q, None if symmetric else X, bandwidth=1.0, method="cells", adaptive=False)
    index = K._engine.index
    side = None if symmetric else K.plan.queries
    plan = measured_plan(index, side, 0.1, torch.Generator().manual_seed(0))
    assert plan.beta > 0
    cells, kept = CellsEngine(index, plan), SparseEngine(index, plan, 0.1, 1 << 30)
    for adjoint in (False, True):
        x = torch.randn(K.shape[0 if adjoint else 1], 2, generator=torch.Generator().manual_seed(1))
        a, b = cells.apply(x.to(cells.dtype), adjoint).value, kept.apply(x.to(cells.dtype), adjoint).value
        assert float((a - b).norm(dim=0).max()) <= 0.06 * float(x.norm(dim=0).min())
    assert kept.far.entries > 0


def test_materialized_operators_solve_and_find_eigenvalues():
    X = clusters(5000, d=4)
    K = KernelOperator(X, bandwidth=0.5, eps=0.01)
    kept = K.materialize()
    assert (K.method, kept.method) == ("cells", "sparse")
    assert kept.materialize() is kept
    assert "kept" in kept.explain()
    np.testing.assert_allclose(
        eigsh(kept, k=3, return_eigenvectors=False), eigsh(K, k=3, return_eigenvectors=False), atol=0.02
    )
    b = np.sin(X[:, 0])
    shifted = LinearOperator(kept.shape, matvec=lambda v: kept @ v + v.reshape(-1), dtype=np.float64)
    solution, status = cg(shifted, b, rtol=1e-6)
    assert status == 0
    assert np.linalg.norm(K @ solution + solution - b) <= 0.02 * np.linalg.norm(b)


def test_auto_keeps_entries_when_several_products_are_expected_and_they_fit():
    X = clusters(5000, d=4)
    assert KernelOperator(X, bandwidth=0.5).method == "cells"
    several = KernelOperator(X, bandwidth=0.5, products=50)
    assert several.method == "sparse"
    assert "50 products" in several.reason
    small = KernelOperator(X, bandwidth=0.5, products=50, memory=10_000)
    assert small.method == "cells"
    assert "too many" in small.reason
    with pytest.raises(BochnerError, match=r"GB.*raise 'memory'"):
        KernelOperator(X, bandwidth=0.5, method="sparse", memory=10_000)


def test_statements_about_kept_products_are_true_and_deterministic(layout):
    X = clusters(1500)
    for dtype in (np.float32, np.float64):
        K = KernelOperator(X.astype(dtype), bandwidth=1.2, method="sparse", eps=0.05)
        for x in (np.ones(1500), np.eye(1500)[3], np.random.default_rng(0).normal(size=1500)):
            estimate = K.matvec_with_certificate(x)
            assert estimate.kind == "deterministic"
            exact = (dense(X.astype(dtype).astype(float), X.astype(dtype).astype(float), 1.2)) @ x
            assert np.linalg.norm(estimate.value - exact) <= estimate.bound <= 0.05 * np.linalg.norm(x)


@pytest.mark.parametrize("method", ["sparse", "cells"])
def test_rows_without_any_near_key_are_zero(layout, method):
    X = clusters(600)
    far = np.concatenate([X[:50], np.full((5, 6), 1e4)])
    y = KernelOperator(far, X, bandwidth=0.8, method=method) @ np.ones(600)
    assert np.isfinite(y).all()
    assert not y[50:].any() or np.abs(y[50:]).max() < 1e-20


@pytest.mark.parametrize("vectorised", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_written_tile_by_tile_multiply_like_the_dense_matrix(monkeypatch, dtype, vectorised):
    if not vectorised:
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    rng = np.random.default_rng(0)
    whole = np.where(rng.random((4000, 700)) < 0.3, rng.normal(size=(4000, 700)), 0.0).astype(dtype)
    whole[120:180] = 0.0
    writer = RowWriter(np.dtype(dtype), 5)  # grows several times
    shuffled = rng.permutation(700)
    for lo in range(0, 4000, 60):
        tile = np.ascontiguousarray(whole[lo : lo + 60][:, shuffled])
        if not tile.any():
            writer.skip(len(tile))
        else:
            writer.add(tile, tile != 0, shuffled.astype(np.int32))
    matrix = writer.matrix(whole.shape)
    assert matrix.entries == np.count_nonzero(whole)
    assert matrix.longest_row() == np.count_nonzero(whole, axis=1).max()
    for r in (1, 3):
        for kept, table in ((matrix, whole), (matrix.transposed(), whole.T)):
            x = rng.normal(size=(table.shape[1], r)).astype(dtype)
            y = kept @ torch.from_numpy(x)
            assert y.numpy().dtype == dtype
            np.testing.assert_allclose(y.numpy(), table @ x, atol=2e-3 if dtype == np.float32 else 1e-10)


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dense_strips_multiply_like_the_whole_matrix_forward_backward_and_both(dtype, columns):
    generator = torch.Generator().manual_seed(0)
    whole, strips = torch.zeros(400, 400, dtype=dtype), Panels(dtype)
    for lo, hi, size in ((0, 70, 30), (70, 71, 400), (150, 350, 9), (350, 360, 0)):  # rows between them have none
        position = torch.randperm(400, generator=generator)[:size].sort().values
        values = torch.randn(size, hi - lo, generator=generator, dtype=dtype)
        strips.add(lo, values, position)
        whole[lo:hi, position] = values.T
    assert strips.entries == 70 * 30 + 400 + 200 * 9
    assert strips.longest() == (400, int((whole != 0).sum(0).max()))
    x, y = torch.randn(2, 400, columns, generator=generator, dtype=dtype)
    for forward, backward in ((True, False), (False, True), (True, True)):
        expected = y + forward * (whole @ x) + backward * (whole.T @ x)
        result = y.clone()
        strips.multiply(x, result, forward, backward)
        torch.testing.assert_close(result, expected, atol=1e-4 if dtype == torch.float32 else 1e-12, rtol=0)


def test_a_matrix_without_dense_strips_adds_nothing():
    y = torch.ones(5, 1)
    Panels(torch.float32).multiply(torch.ones(5, 1), y, True, True)
    assert bool((y == 1).all())
    assert Panels(torch.float32).longest() == (0, 0)


@pytest.mark.parametrize("symmetric", [True, False])
def test_columns_that_go_entirely_are_counted_and_refused_when_a_row_would_lose_too_much(symmetric):
    lost = Budget(torch.zeros(6).double(), torch.zeros(6).double(), 1.0, symmetric)
    position = torch.tensor([1, 3, 5])
    most = lost.most_of_columns(0, 2, position, 0.3)
    assert most.tolist() == pytest.approx([-1.0 if symmetric else 0.3, 0.3, 0.3])
    assert lost.take_columns(0, position, torch.tensor([0.5, 0.1]).double(), torch.tensor([0.0, 0.35, 0.25]).double())
    assert not lost.take_columns(0, position, torch.tensor([0.6, 0.0]).double(), torch.tensor([0.0, 0.3, 0.3]).double())
    assert lost.rows.tolist() == pytest.approx([0.5, 0.1, 0, 0, 0, 0])
    assert lost.columns.tolist() == pytest.approx([0, 0, 0, 0.35, 0, 0.25])
    room = lost.most_of_columns(4, 5, position, 0.3)  # half of a symmetric limit is for what a row loses as a column
    assert room.tolist() == pytest.approx([0.3, 0.15 if symmetric else 0.3, 0.25 if symmetric else 0.3])


@pytest.mark.parametrize("symmetric", [True, False])
def test_what_is_lost_already_counts_for_its_row_and_column_alone(symmetric):
    """Row 1 has lost nearly everything it may lose; the others drop as if it were not there."""
    tile = torch.full((4, 4), 0.1).double()
    if symmetric:
        tile.triu_(1)
    already = torch.tensor([0.0, 0.95, 0.0, 0.0]).double()
    lost = Budget(already, torch.zeros(4).double() if symmetric else already, 1.0, symmetric)
    dropped = lost.drop(tile, 0, torch.arange(4), 0.2)
    expected = tile.clone()
    expected[1] = expected[:, 1] = 0
    assert torch.equal(dropped, expected)
    rows = lost.rows + lost.columns if symmetric else lost.rows
    sums = expected.sum(1) + (expected.sum(0) if symmetric else 0)
    assert rows.tolist() == pytest.approx((already + sums).tolist())


def test_rows_that_skip_nothing_drop_more_than_the_worst_row_leaves():
    """Far cells are skipped by few rows: the others keep fewer entries than if all had skipped as much."""
    X = clusters(1500)
    cells = KernelOperator(X, bandwidth=1.2, method="cells", eps=0.1)
    plan, index = cells.plan, cells._engine.index
    assert float(plan.rows.median()) < 0.5 * float(plan.rows.max())
    kept = SparseEngine(index, plan, 0.1, 1 << 30)
    worst = replace(plan, rows=torch.full_like(plan.rows, float(plan.rows.max())))
    assert kept.entries < SparseEngine(index, worst, 0.1, 1 << 30).entries
    assert kept.norm_bound <= 0.1


def test_strips_whose_rows_would_lose_too_much_keep_their_entries(monkeypatch, layout):
    """A threshold far too high: what each row and column loses stays within its budget nevertheless."""
    monkeypatch.setattr(sparse_module, "first_threshold", lambda rows, limit: (0.02, 0.5))
    X = clusters(900, spread=2.0)
    K = KernelOperator(X, bandwidth=1.2, method="sparse", eps=0.05)
    error = np.abs(dense(X, X, 1.2) - K @ np.eye(900))
    assert np.linalg.norm(error, 2) <= K._engine.norm_bound + 1e-6 <= 0.05
    assert K._engine.lost.norm > 0.01  # something was dropped
