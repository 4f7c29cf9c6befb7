"""The contract |Kx - y| <= eps |x| for every x that can be thought of, and statements that are never false."""

from collections import Counter

import numpy as np
import pytest
import torch
from kernel_sets import (
    REAL,
    adversaries,
    dense,
    from_samples,
    hostile_operator,
    hostile_sets,
    radial,
    random_operator,
    real_set,
)
from scipy.stats import binom

import bochner
from bochner._checks import BochnerError
from bochner.matvec import KernelOperator, certificate
from bochner.matvec.certificate import hold_out_generator, split_columns
from bochner.matvec.engines.exact import ExactEngine, Loss
from bochner.matvec.plan import Between, nearest_to_middle
from bochner.matvec.tiles import extent

torch.set_num_threads(1)
N = 1200


SETS = hostile_sets(N)


@pytest.mark.parametrize("eps", [0.1, pytest.param(0.01, marks=pytest.mark.slow), 0.001])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", list(SETS))
def test_no_vector_breaks_the_contract(name, dtype, eps):
    points, bandwidth = SETS[name]
    X = points.astype(dtype)
    truth = dense(X, X, bandwidth)
    linear = KernelOperator(X, bandwidth=bandwidth, eps=eps, method="cells", adaptive=False)
    error = truth - np.asarray(linear @ np.eye(N), dtype=np.float64)
    x = adversaries(error)
    K = KernelOperator(X, bandwidth=bandwidth, eps=eps, method="cells")
    missed = np.linalg.norm(K @ x - truth @ x, axis=0)
    assert missed.max() <= eps
    for column in x.T[::7]:
        estimate = K.matvec_with_certificate(column)
        assert np.linalg.norm(estimate.value - truth @ column) <= estimate.bound


def test_drawn_rows_find_what_a_spoiled_plan_leaves_out(monkeypatch):
    """Checks of some rows instead of all: misses stay as rare as 1 - confidence allows, alpha 0.001."""
    monkeypatch.setattr(certificate, "HOLD_OUT_ROWS", 512)
    beyond, false, drawn = [], [], 0
    for points, bandwidth in SETS.values():
        X = points.astype(np.float32)
        truth = dense(X, X, bandwidth)
        K = KernelOperator(X, bandwidth=bandwidth, eps=0.1, method="cells")
        near = from_samples(K).plan.near
        K.plan.near = near & (torch.rand(near.shape, generator=torch.Generator().manual_seed(1)) > 0.1)
        K.adaptive = False
        error = truth - np.asarray(K @ np.eye(N), dtype=np.float64)
        K.adaptive = True
        x = adversaries(error)
        assert (np.linalg.norm(error @ x, axis=0) > 0.1).sum() >= 10
        beyond += list(np.linalg.norm(K @ x - truth @ x, axis=0) > 0.1)
        for column in x.T[::7]:
            estimate = K.matvec_with_certificate(column)
            false.append(np.linalg.norm(estimate.value - truth @ column) > estimate.bound)
            drawn += 0 < estimate.hold_out_rows < N
    assert drawn >= 10
    for wrong in (beyond, false):
        assert sum(wrong) <= binom.ppf(0.999, len(wrong), 0.05)


@pytest.mark.parametrize("method", ["exact", "cells", "features"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", list(SETS))
def test_deterministic_statements_are_true(name, dtype, method):
    points, bandwidth = SETS[name]
    X = points[:900].astype(dtype)
    truth = dense(X, X, bandwidth)
    K = KernelOperator(X, bandwidth=bandwidth, eps=0.2, method=method, num_features=64)
    rng = np.random.default_rng(3)
    for x in [rng.normal(size=900), np.ones(900), np.eye(900)[7], 1e25 * rng.standard_t(1, size=900)]:
        estimate = K.matvec_with_certificate(x)
        if estimate.kind == "deterministic":
            assert np.linalg.norm(estimate.value - truth @ x) <= estimate.bound


def test_bounds_of_what_is_skipped_hold_for_every_row_and_column():
    points, bandwidth = SETS["heavy tails"]
    q, k = points[:500].astype(np.float32), points[500:].astype(np.float32)
    K = KernelOperator(q, k, bandwidth=bandwidth, method="cells", adaptive=False)
    assert K.certain
    error = np.abs(dense(q, k, bandwidth) - K @ np.eye(K.shape[1]))
    rounding = 1e-5 * dense(q, k, bandwidth)
    plan, index = K.plan, K._engine.index
    assert (np.maximum(error - rounding, 0).sum(1)[plan.queries.order] <= plan.rows.numpy() + 1e-30).all()
    assert (np.maximum(error - rounding, 0).sum(0)[index.keys.order] <= plan.columns.numpy() + 1e-30).all()
    assert plan.skipped_norm <= 0.05
    assert np.linalg.norm(error, 2) <= 0.1


@pytest.mark.parametrize("name", list(SETS))
def test_the_kernel_between_cells_is_below_its_bound(name):
    points, bandwidth = SETS[name]
    K = KernelOperator(points.astype(np.float32), bandwidth=20 * bandwidth, method="cells", adaptive=False)
    index = K._engine.index
    distances = index.distances()
    opposite = nearest_to_middle(index, index.keys, distances)
    truth = dense(points.astype(np.float32), points.astype(np.float32), 20 * bandwidth)
    truth = truth[index.keys.order][:, index.keys.order]
    largest = np.maximum.reduceat(truth, index.keys.start[:-1].numpy(), axis=1)
    for a, (lo, hi) in enumerate(index.keys.ranges()):
        between = Between(a, None, distances[a], opposite[:, a], index.keys.radius, float(index.keys.radius[a]))
        bound = between.kernel_bound(index, index.keys.rows[lo:hi])
        assert (bound.numpy() >= largest[lo:hi] * (1 - 1e-6)).all()


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


@pytest.mark.parametrize("method", ["exact", "cells", "features", "paper"])
def test_every_column_is_judged_by_its_own_scale(method):
    points, bandwidth = SETS["mixture"]
    X = points.astype(np.float32)
    x = np.random.default_rng(0).normal(size=(N, 4)) * [1e30, 1.0, 1e-30, 0.0]
    truth = dense(X, X, bandwidth) @ x
    y = np.asarray(KernelOperator(X.astype(np.float64), bandwidth=bandwidth, method=method, eps=0.1) @ x)
    error = np.linalg.norm(y - truth, axis=0)
    assert (error <= 0.1 * np.linalg.norm(x, axis=0)).all()
    assert not y[:, 3].any()


def test_concentrated_columns_are_split_off_and_spread_ones_are_not():
    x = torch.zeros(1000, 4, dtype=torch.float64)
    x[:, 0] = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[5, 1] = 1.0
    x[:, 2] = 1e-3
    x[17, 2] = 1.0
    x[3:9, 3] = torch.arange(6.0)
    ids, rest = split_columns(x, 32)
    assert ids.tolist() == [4, 5, 6, 7, 8, 17]
    assert torch.equal(rest[:, 0], x[:, 0])
    assert not rest[:, [1, 3]].any()
    assert rest[17, 2] == 0
    assert rest[16, 2] == 1e-3


def test_hold_out_rows_differ_from_product_to_product_and_repeat():
    K = KernelOperator(SETS["mixture"][0], bandwidth=1.0)
    x, z = torch.randn(2, N, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = [torch.rand(5, generator=hold_out_generator(K._problem, v, t)) for v, t in [(x, 0), (x, 0), (z, 0), (x, 1)]]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[3])


def test_other_devices_are_refused():
    X = torch.ones(4, 2)
    with pytest.raises(BochnerError, match=r"'queries'.*on the CPU.*meta.*\.cpu\(\)"):
        KernelOperator(X.to("meta"), bandwidth=1.0)
    with pytest.raises(BochnerError, match=r"'x'.*on the CPU.*meta"):
        KernelOperator(X, bandwidth=1.0) @ torch.ones(4, device="meta")


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("eps", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("name", REAL)
def test_no_vector_breaks_the_contract_on_real_data(name, eps):
    try:
        X, bandwidth = real_set(name, 3000)
    except bochner.data.ArtefactUnavailable as reason:
        pytest.skip(str(reason))
    truth = dense(X, X, bandwidth)
    linear = KernelOperator(X, bandwidth=bandwidth, eps=eps, method="cells", adaptive=False)
    x = adversaries(truth - np.asarray(linear @ np.eye(len(X)), dtype=np.float64))
    K = KernelOperator(X, bandwidth=bandwidth, eps=eps, method="cells")
    assert np.linalg.norm(K @ x - truth @ x, axis=0).max() <= eps
    for column in x.T:
        estimate = K.matvec_with_certificate(column)
        assert np.linalg.norm(estimate.value - truth @ column) <= estimate.bound


@pytest.mark.parametrize("seeds", [range(120), pytest.param(range(120, 2500), marks=pytest.mark.slow)])
def test_statements_of_random_operators_are_true(seeds):
    """Every kernel, method, dtype, place and scale; deterministic ones always, others at their confidence (alpha 1e-3).

    Where a linear method states more than eps, it says so; products that are checked are within eps.
    """
    made, false = Counter(), Counter()
    for seed in seeds:
        drawn = random_operator(seed)
        if drawn is None:
            continue
        K, truth, xs = drawn
        products = np.asarray(K @ np.stack(xs, 1), dtype=np.float64)
        for x, product in zip(xs, products.T, strict=True):
            estimate = K.matvec_with_certificate(x)
            made[estimate.kind] += 1
            false[estimate.kind] += np.linalg.norm(estimate.value - truth @ x) > estimate.bound * (1 + 1e-12)
            if K.certain or not K._engine.linear:
                assert np.linalg.norm(product - truth @ x) <= K.eps * np.linalg.norm(x) * (1 + 1e-9), (seed, K)
        if K.certain:
            x = np.random.default_rng(seed).normal(size=K.shape[0])
            assert np.linalg.norm(K.rmatvec(x) - truth.T @ x) <= K.eps * np.linalg.norm(x) * (1 + 1e-9), (seed, K)
    assert made["deterministic"] > 3 * len(seeds)
    assert false["deterministic"] == 0
    for kind in ("guarantee", "estimate"):
        assert made[kind] > len(seeds) // 10
        assert false[kind] <= binom.ppf(0.999, made[kind], 0.05)


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
@pytest.mark.parametrize("method", ["auto", "exact", "cells", "sparse", "lowrank"])
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
def test_what_single_precision_takes_is_below_its_bound(kernel, symmetric):
    X = far_cluster(900, 100, 30.0, d=5)
    others = X if symmetric else X[::3] + np.float32(0.1)
    K = KernelOperator(X, None if symmetric else others, bandwidth=2.0, eps=1.0, kernel=kernel, method="exact")
    engine = ExactEngine(K._engine.frame._replace(arithmetic="float32"), K.queries, K.keys, symmetric)
    reach = extent(engine.frame, K.queries) + extent(engine.frame, K.keys)
    loss = Loss(engine, reach)
    error = engine.apply(torch.eye(len(others))).value.numpy() - radial(X, others, 2.0, kernel)
    norm = np.linalg.norm(error, 2)
    everywhere = loss.norm([loss.everywhere(side) for side in loss.sides], True)
    assert norm <= everywhere <= loss.norm([loss.most(side) for side in loss.sides], True)
    assert loss.norm([loss.some(side) for side in loss.sides], True) <= everywhere
    cells = KernelOperator(X, None if symmetric else others, bandwidth=2.0, eps=1.0, kernel=kernel, method="cells")
    if cells.certain and cells._engine.dtype == torch.float32:
        error = np.asarray(cells @ np.eye(len(others)), dtype=np.float64) - radial(X, others, 2.0, kernel)
        assert np.linalg.norm(error, 2) <= cells.plan.skipped_norm + cells.plan.rounded


def test_standardised_tables_stay_in_single_precision():
    for name in ("digits", "cancer", "diabetes"):
        X = real_set(name, 2000)[0].astype(np.float32)
        bandwidth = float(np.sqrt(2.0 * X.shape[1]))
        for eps in (0.1, 0.03):
            assert KernelOperator(X, bandwidth=bandwidth, eps=eps)._engine.dtype == torch.float32


def test_statements_allow_for_the_rounding_of_the_answer():
    """All rows were looked at: the bound is the error itself, and the answer is rounded afterwards."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(208, 9)).astype(np.float32), rng.normal(size=(110, 9)).astype(np.float32)
    K = KernelOperator(q, k, bandwidth=4.0, eps=1e-4, method="lowrank", rank=3)
    for x in rng.normal(size=(60, 110)):
        estimate = K.matvec_with_certificate(x)
        assert estimate.kind == "estimate"
        assert np.linalg.norm(estimate.value - dense(q, k, 4.0) @ x) <= estimate.bound < 1.001 * estimate.error


@pytest.mark.slow
def test_ten_thousand_deterministic_statements_are_all_true():
    stated = 0
    for seed in range(500):
        K, truth, xs = hostile_operator(seed)
        for x in xs:
            estimate = K.matvec_with_certificate(x)
            if estimate.kind == "deterministic":
                stated += 1
                assert np.linalg.norm(estimate.value - truth @ x) <= estimate.bound * (1 + 1e-12), (seed, K.method)
    assert stated >= 10_000
