"""Randomly pivoted Cholesky: its bounds hold, it is chosen for smooth kernels, it preconditions."""

import pickle

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import LinearOperator, cg

from bochner._checks import BochnerError
from bochner.matvec import KernelOperator
from bochner.matvec.engines.lowrank import pivoted_cholesky

torch.set_num_threads(1)


def dense(q, k, bandwidth):
    return np.exp(-((q[:, None] - k[None]) ** 2).sum(-1) / (2 * bandwidth**2))


def smooth(n, d=4, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d))


def test_the_factor_leaves_a_positive_semidefinite_rest_with_the_stated_diagonal():
    X = smooth(500)
    K = KernelOperator(X, bandwidth=2.0, eps=1e-3, method="lowrank", rank=120)
    factor = K._engine.factor
    rest = dense(X, X, 2.0) - (factor.keys @ factor.keys.T).numpy()
    np.testing.assert_allclose(np.diag(rest), factor.left_keys.numpy(), atol=1e-10)
    values = np.linalg.eigvalsh(rest)
    assert values[0] >= -1e-9
    assert values[-1] <= factor.trace_bound
    assert factor.rank <= 120


def test_pivots_stop_when_the_trace_is_small_and_duplicates_do_no_harm():
    X = np.repeat(smooth(40), 20, 0)
    K = KernelOperator(X, bandwidth=1.0, eps=1e-6, method="lowrank")
    assert K._engine.factor.rank <= 60
    assert K.certain
    x = np.random.default_rng(0).normal(size=800)
    assert np.linalg.norm(K @ x - dense(X, X, 1.0) @ x) <= 1e-6 * np.linalg.norm(x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("symmetric", [True, False])
def test_statements_are_deterministic_and_true(symmetric, dtype):
    X, q = smooth(1500).astype(dtype), smooth(400, seed=1).astype(dtype)
    K = KernelOperator(X if symmetric else q, None if symmetric else X, bandwidth=3.0, method="lowrank", eps=0.05)
    assert K.certain
    truth = dense((X if symmetric else q).astype(float), X.astype(float), 3.0)
    for x in (np.ones(1500), np.eye(1500)[5], np.random.default_rng(0).normal(size=1500)):
        estimate = K.matvec_with_certificate(x)
        assert estimate.kind == "deterministic"
        assert np.linalg.norm(estimate.value - truth @ x) <= estimate.bound <= 0.05 * np.linalg.norm(x)
    z = np.ones(K.shape[0])
    assert np.linalg.norm(K.rmatvec(z) - truth.T @ z) <= 0.05 * np.linalg.norm(z)


def test_a_rank_too_small_is_never_called_certain_and_the_estimate_covers_its_error():
    X = smooth(1500)
    K = KernelOperator(X, bandwidth=0.7, method="lowrank", eps=0.05, rank=50)
    assert not K.certain
    x = np.ones(1500)
    estimate = K.matvec_with_certificate(x)
    error = np.linalg.norm(estimate.value - dense(X, X, 0.7) @ x)
    assert estimate.kind == "estimate"
    assert error <= estimate.bound
    assert not estimate.met
    assert estimate.deterministic_bound < np.inf
    assert estimate.deterministic_bound >= np.linalg.norm(dense(X, X, 0.7) - K @ np.eye(1500), 2) * np.linalg.norm(x)


def test_the_bound_from_gaussian_vectors_holds_and_is_sharper():
    X = smooth(1200, d=6)
    K = KernelOperator(X, bandwidth=1.0, method="lowrank", rank=200, eps=0.1)
    engine = K._engine
    before, once = engine.factor.trace_bound, engine.probe(0.0, powers=1)
    truth = np.linalg.norm(dense(X, X, 1.0) - K @ np.eye(1200), 2)
    assert truth <= once < 0.2 * before
    assert engine.confidence == pytest.approx(1 - 2.0**-10)


@pytest.mark.parametrize("symmetric", [True, False])
def test_applying_the_residual_again_sharpens_the_bound_which_still_holds(symmetric):
    X, Q = smooth(900, d=6), smooth(700, d=6)[::-1].copy()
    for seed in range(4):  # each bound fails with probability 2^-10
        keys, queries = (None, X) if symmetric else (X, Q)
        K = KernelOperator(queries, keys, bandwidth=1.0, method="lowrank", rank=150, eps=0.1, seed=seed)
        engine = K._engine
        truth = np.linalg.norm(dense(queries, X, 1.0) - K @ np.eye(900), 2)
        once = engine.probe(0.0, powers=3)  # a target that cannot be met: what one application says
        thrice = engine.probe(1.01 * truth, powers=3)
        assert truth <= thrice < 0.8 * once
        assert thrice < 2.2 * truth  # (2 sqrt(2/pi) 4)^(1/3): a component of w is rarely above 4
        assert engine.typical < truth


def test_products_of_a_factor_have_the_guarantee_of_its_norm():
    X = smooth(900, d=6)
    trace = KernelOperator(X, bandwidth=1.0, method="lowrank", rank=150, eps=0.01)._engine.factor.trace_bound
    K = KernelOperator(X, bandwidth=1.0, method="lowrank", rank=150, eps=0.3 * trace)
    x = np.random.default_rng(0).normal(size=900)
    assert K.matvec_with_certificate(x).hold_out_rows > 0
    bound = K._engine.probe(0.0)
    said = K.matvec_with_certificate(x)
    assert (said.kind, said.hold_out_rows) == ("guarantee", 0)
    assert "drawn when it was built" in said.statement
    error = np.linalg.norm(dense(X, X, 1.0) @ x - said.value)
    assert error <= said.bound <= 1.01 * bound * np.linalg.norm(x)
    assert 0.2 * error <= said.error <= 5 * error


def test_auto_takes_a_factor_for_several_products_with_a_smooth_kernel():
    X = smooth(4500)
    K = KernelOperator(X, bandwidth=3.0, products=20)
    assert K.method == "lowrank"
    assert "smooth" in K.reason
    assert KernelOperator(X, bandwidth=3.0).materialize().method == "lowrank"
    rough = KernelOperator(smooth(4500, d=20), bandwidth=2.5, products=20)
    assert rough.method == "exact"
    assert "nor smooth" in rough.reason


def test_the_factor_preconditions_conjugate_gradients():
    X = smooth(2000, d=3)
    K = KernelOperator(X, bandwidth=1.5, method="exact")
    A = LinearOperator(K.shape, matvec=lambda v: K @ v.reshape(-1) + 1e-4 * v.reshape(-1), dtype=np.float64)
    b = np.sin(X[:, 0])
    steps = {"without": 0, "with": 0}

    def count(name):
        def call(_):
            steps[name] += 1

        return call

    cg(A, b, rtol=1e-8, maxiter=400, callback=count("without"))
    solution, status = cg(A, b, rtol=1e-8, maxiter=400, M=K.preconditioner(1e-4, rank=300), callback=count("with"))
    assert status == 0
    assert steps["with"] <= 0.2 * steps["without"]
    assert np.linalg.norm(A @ solution - b) <= 1e-6 * np.linalg.norm(b)
    with pytest.raises(BochnerError, match="symmetric"):
        KernelOperator(X[:10], X, bandwidth=1.0).preconditioner(1.0)
    with pytest.raises(BochnerError, match="'ridge'"):
        K.preconditioner(0.0)


@pytest.mark.parametrize("kernel", ["laplace", "matern32", "matern52", "student"])
def test_other_kernels_have_factors(kernel):
    X = smooth(400, d=2)
    K = KernelOperator(X, bandwidth=3.0, kernel=kernel, method="exact")
    factor = pivoted_cholesky(K._problem, 400, 1e-6)
    np.testing.assert_allclose((factor.keys @ factor.keys.T).numpy(), K @ np.eye(400), atol=1e-5)


@pytest.mark.parametrize(("kernel", "bandwidth"), [("gaussian", 3.0), ("matern52", 20.0)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_what_a_factor_leaves_is_kept_where_it_is_large_and_bounded_elsewhere(symmetric, kernel, bandwidth):
    """A smooth core and outlying pairs: the factor is spent on the core, the pairs are entries of the rest."""
    rng = np.random.default_rng(0)
    pairs = np.repeat(rng.normal(size=(100, 4)) * 20 * bandwidth, 2, 0) + 0.5 * rng.normal(size=(200, 4))
    X = np.concatenate([rng.normal(size=(900, 4)), pairs])
    q = X if symmetric else np.concatenate([X[::3], pairs + 0.1])
    K = KernelOperator(
        q, None if symmetric else X, bandwidth=bandwidth, kernel=kernel, eps=0.05, method="lowrank+sparse", rank=128
    )
    assert K.method == "lowrank+sparse"
    engine = K._engine
    assert engine.factor.trace_bound > 0.05
    assert K.certain
    truth = KernelOperator(q, X.copy(), bandwidth=bandwidth, kernel=kernel, method="exact") @ np.eye(len(X))
    error = truth - K @ np.eye(len(X))
    assert 0 < np.linalg.norm(error, 2) <= engine.bound <= 0.05
    assert np.abs(error).sum(1).max() <= (engine.bound if symmetric else 0.05) + 1e-8
    assert engine.remainder.entries < 0.05 * truth.size
    x = rng.normal(size=len(X))
    assert K.matvec_with_certificate(x).kind == "deterministic"
    z = rng.normal(size=len(q))
    np.testing.assert_allclose(K.rmatvec(z), (truth - error).T @ z, atol=1e-8)
    again = pickle.loads(pickle.dumps(K))
    np.testing.assert_array_equal(again @ x, K @ x)


def test_a_remainder_that_is_not_sparse_is_refused():
    with pytest.raises(BochnerError, match=r"entries.*raise 'rank'"):
        KernelOperator(smooth(800, d=12), bandwidth=2.0, eps=0.01, method="lowrank+sparse", rank=20)
