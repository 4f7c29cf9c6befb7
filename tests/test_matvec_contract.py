"""The contract |Kx - y| <= eps |x| for every x that can be thought of, and statements that are never false."""

import numpy as np
import pytest
import torch
from kernel_sets import dense, hostile_sets, radial, real_set

from bochner._checks import BochnerError
from bochner.matvec import KernelOperator
from bochner.matvec.cells import entry_bounds

torch.set_num_threads(1)
N = 1200


SETS = hostile_sets(N)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", list(SETS))
def test_the_kernel_between_cells_is_below_its_bound(name, symmetric):
    points, bandwidth = SETS[name]
    q, k = points[:700].astype(np.float32), points[500:].astype(np.float32)
    K = KernelOperator(q, None if symmetric else k, bandwidth=20 * bandwidth, method="cells")
    queries, keys, near = K._engine.queries, K._engine.keys, K._engine.near
    bound = entry_bounds(K._engine.index, queries, keys).numpy()
    truth = dense(q, q if symmetric else k, 20 * bandwidth)
    largest = np.zeros_like(bound)
    np.maximum.at(largest, (queries.label.numpy()[:, None], keys.label.numpy()), truth)
    assert (bound >= largest * (1 - 1e-6)).all()
    # What is skipped sums to at most the limit, in every row and column.
    skipped = np.where(near.blocks.numpy()[queries.label][:, keys.label], 0.0, truth)
    assert np.sqrt(skipped.sum(0).max() * skipped.sum(1).max()) <= near.norm * (1 + 1e-6) <= 0.05 * (1 + 1e-6)


@pytest.mark.parametrize("sizes", [(900, 60), (60, 900)])
def test_rows_and_columns_are_counted_both_where_they_are_not_as_many(sizes):
    points, bandwidth = SETS["mixture"]
    q, k = points[: sizes[0]], points[-sizes[1] :]
    engine = KernelOperator(q, k, bandwidth=3 * bandwidth, eps=0.5, method="cells")._engine
    skipped = engine.near.skipped[engine.queries.label][:, engine.keys.label]
    most = skipped.sum(0).max() * skipped.sum(1).max()
    assert 0 < most**0.5 <= engine.near.norm <= 0.25 * (1 + 1e-6)


@pytest.mark.parametrize("method", ["exact", "cells"])
@pytest.mark.parametrize("bandwidth", [1e-10, 1e-30, 1e-120])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tiny_bandwidths_leave_the_duplicates(method, bandwidth, dtype):
    X = np.random.default_rng(0).normal(size=(300, 4)).astype(dtype)
    X = np.concatenate([X, X[:100]])
    x = np.random.default_rng(1).normal(size=400)
    expected = x + np.concatenate([x[300:], np.zeros(200), x[:100]])
    y = KernelOperator(X, bandwidth=bandwidth, method=method) @ x
    assert np.isfinite(y).all()
    np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_bandwidths_beyond_double_precision_are_refused():
    with pytest.raises(BochnerError, match=r"'bandwidth'.*between.*rescale"):
        KernelOperator(np.ones((3, 2)), bandwidth=1e-200)


@pytest.mark.parametrize("method", ["exact", "cells", "lowrank"])
def test_every_column_is_judged_by_its_own_scale(method):
    points, bandwidth = SETS["mixture"]
    X = points.astype(np.float32)
    x = np.random.default_rng(0).normal(size=(N, 4)) * [1e30, 1.0, 1e-30, 0.0]
    truth = dense(X, X, bandwidth) @ x
    y = np.asarray(KernelOperator(X.astype(np.float64), bandwidth=bandwidth, method=method, eps=0.1) @ x)
    error = np.linalg.norm(y - truth, axis=0)
    assert (error <= 0.1 * np.linalg.norm(x, axis=0)).all()


@pytest.mark.parametrize("kernel", ["gaussian", "matern32", "matern52", "student"])
def test_sums_of_one_sign_keep_the_contract_in_single_precision(kernel):
    """Rounding that a row shares does not cancel in K 1: it grows with the norm of K, here a thousand."""
    X = np.random.default_rng(0).normal(size=(1500, 3)).astype(np.float32)
    K = KernelOperator(X, bandwidth=5.0, eps=1e-4, kernel=kernel, method="exact")
    error = np.asarray(K @ np.ones(1500), dtype=np.float64) - radial(X, X, 5.0, kernel).sum(1)
    assert np.linalg.norm(error) <= 1e-4 * np.sqrt(1500)
    assert KernelOperator(X, bandwidth=5.0, eps=0.1, kernel=kernel, method="exact")._engine.dtype == torch.float32


KINDS = ["gaussian", "laplace", "matern32", "matern52", "student"]


def far_cluster(n, c, distance, d=8, spread=0.1):
    """Standard normal points but for c of them, rows 1 to c, close together and far away."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, d))
    X[1 : c + 1] = distance / d**0.5 + spread * rng.normal(size=(c, d))
    return X.astype(np.float32)


@pytest.mark.parametrize("kernel", KINDS)
@pytest.mark.parametrize("method", ["auto", "exact", "cells", "lowrank"])
@pytest.mark.parametrize(("distance", "eps"), [(60.0, 3e-3), (20.0, 1e-3), (400.0, 0.1)])
def test_indicators_of_far_clusters_keep_the_contract(distance, eps, method, kernel):
    """Rounding that the rows of a cluster share does not cancel in the sum over the cluster."""
    X = far_cluster(5000 if method == "auto" else 1500, 150, distance)
    K = KernelOperator(X, bandwidth=1.0, eps=eps, method=method, kernel=kernel)
    x = np.zeros((len(X), 3))
    x[1:151, 0] = 1.0
    x[1:151, 1] = np.random.default_rng(1).choice([-1.0, 1.0], 150)
    x[0, 2] = x[151:200, 2] = 1.0
    error = np.asarray(K @ x, dtype=np.float64) - radial(X, X[:200], 1.0, kernel) @ x[:200]
    assert (np.linalg.norm(error, axis=0) <= eps * np.linalg.norm(x, axis=0)).all() or not K.certain
    assert K.certain or method != "exact"


def test_the_arithmetic_is_chosen_by_the_points_furthest_out_on_either_side():
    near, far = np.random.default_rng(0).normal(size=(2, 50, 3)) * [[[1.0]], [[3000.0]]]
    for q, k in ((near, far), (far, near), (far, None)):
        assert KernelOperator(q, k, method="exact", eps=1e-6)._engine.frame.arithmetic == "difference"
    assert KernelOperator(near, method="exact", eps=1e-6)._engine.frame.arithmetic == "float64"


def test_a_cluster_among_many_points_keeps_the_contract():
    X = 3.0 * far_cluster(20_000, 600, 20.0 / 3.0, spread=0.2 / 3.0)
    x = np.zeros(20_000)
    x[1:601] = 1.0
    truth = radial(X, X[1:601], 1.0, "gaussian").sum(1)
    for method in ("auto", "exact"):
        K = KernelOperator(X, bandwidth=1.0, eps=1e-3, method=method)
        assert K.certain
        assert np.linalg.norm(K @ x - truth) <= 1e-3 * np.linalg.norm(x)


@pytest.mark.parametrize("kernel", KINDS)
@pytest.mark.parametrize(("d", "distance", "eps"), [(2, 60.0, 0.01), (8, 20.0, 1e-3)])
def test_one_query_and_the_x_that_its_rounding_suits_least(d, distance, eps, kernel):
    rng, s = np.random.default_rng(0), 60_000
    q = np.full((1, d), distance / d**0.5, dtype=np.float32)
    sides = np.where(np.arange(s)[:, None] < s // 2, 1.0, -1.0) * distance
    k = ((sides + 0.3 * rng.normal(size=(s, d))) / d**0.5).astype(np.float32)
    truth = radial(q, k, 1.0, kernel)[0]
    for method in ("exact", "cells"):
        K = KernelOperator(q, k, bandwidth=1.0, eps=eps, method=method, kernel=kernel)
        error = np.asarray(K.rmatvec(np.ones(1)), dtype=np.float64) - truth
        for x in (error, np.sign(error), (np.arange(s) < s // 2).astype(float)):
            assert abs(float((K @ x)[0]) - truth @ x) <= eps * np.linalg.norm(x) or not K.certain


def test_distances_that_single_precision_cannot_tell_from_zero():
    """The Laplace kernel falls like the distance itself, whose square is lost."""
    rng = np.random.default_rng(0)
    X = (rng.normal(size=(200, 500)) * 10.0 ** rng.integers(-3, 4, size=(200, 1))).astype(np.float32)
    K = KernelOperator(X, bandwidth=1e9, eps=1e-4, kernel="laplace")
    error = np.asarray(K @ np.ones(200), dtype=np.float64) - radial(X, X, 1e9, "laplace").sum(1)
    assert np.linalg.norm(error) <= 1e-4 * np.sqrt(200)


@pytest.mark.parametrize("kernel", KINDS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("method", ["exact", "cells"])
def test_what_single_precision_takes_is_below_its_bound(kernel, symmetric, method):
    X = far_cluster(900, 100, 30.0, d=5)
    others = X if symmetric else X[::3] + np.float32(0.1)
    K = KernelOperator(X, None if symmetric else others, bandwidth=2.0, eps=1.0, kernel=kernel, method=method)
    truth = radial(X, others, 2.0, kernel)
    error = np.asarray(K @ np.eye(len(others)), dtype=np.float64) - truth
    assert K._engine.settled
    # What was computed in double precision is returned in single precision; the certificate of a product counts that.
    returned = 0.5 * np.finfo(K.dtype).eps * np.linalg.norm(truth) if K._engine.dtype == torch.float64 else 0.0
    assert np.linalg.norm(error, 2) <= K._engine.norm + returned


@pytest.mark.parametrize("method", ["exact", "cells"])
def test_arithmetic_becomes_finer_when_the_first_product_shows_that_it_must(method, monkeypatch):
    """A dense cluster that no sampled row belongs to: sums are large where nobody looked."""
    X = np.random.default_rng(0).normal(size=(3000, 3)).astype(np.float32) * 30
    X[1000:2500] = X[7] + 1e-3 * X[1000:2500]
    monkeypatch.setattr("bochner.matvec.exact.LOOKED_AT", 1)
    K = KernelOperator(X, bandwidth=0.5, eps=2e-3, method=method)
    truth, ones = dense(X, X, 0.5), np.ones(3000)
    before = K._engine.lost
    assert np.linalg.norm(K @ ones - truth @ ones) <= 2e-3 * 3000**0.5
    assert before > K._engine.lost
    assert K._engine.dtype == torch.float64 or K._engine.wide


def test_standardised_tables_stay_in_single_precision():
    for name in ("cancer", "diabetes"):
        X = real_set(name, 2000)[0].astype(np.float32)
        assert KernelOperator(X, bandwidth=float(np.sqrt(2.0 * X.shape[1])), eps=0.1)._engine.dtype == torch.float32


def test_other_devices_are_refused():
    X = torch.ones(4, 2)
    with pytest.raises(BochnerError, match=r"'queries'.*on the CPU.*meta.*\.cpu\(\)"):
        KernelOperator(X.to("meta"), bandwidth=1.0)
    with pytest.raises(BochnerError, match=r"'x'.*on the CPU.*meta"):
        KernelOperator(X, bandwidth=1.0) @ torch.ones(4, device="meta")
