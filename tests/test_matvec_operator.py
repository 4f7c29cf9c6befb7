"""The kernel operator as users meet it: forms in and out, linear algebra, bad input, saving."""

import pickle

import numpy as np
import pytest
import scipy.sparse
import torch
from scipy.sparse.linalg import LinearOperator, cg, eigsh, lsqr

from bochner._checks import BochnerError
from bochner.matvec import Kernel, KernelOperator, conjugate_gradients, pivoted_cholesky

torch.set_num_threads(1)


def clusters(n, d=8, centres=40, spread=6.0, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    middle = rng.normal(size=(centres, d)) * spread
    return (middle[rng.integers(centres, size=n)] + rng.normal(size=(n, d))).astype(dtype)


def dense(queries, keys, bandwidth):
    q, k = np.asarray(queries, dtype=np.float64), np.asarray(keys, dtype=np.float64)
    squared = ((q[:, None] - k[None]) ** 2).sum(-1)
    return np.exp(-squared / (2 * bandwidth**2))


@pytest.fixture(scope="module")
def points():
    return clusters(900)


@pytest.mark.parametrize("method", ["exact", "cells", "lowrank"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_answer_has_the_form_and_dtype_of_the_question(points, method, dtype):
    q, k = points[:300].astype(dtype), points[300:].astype(dtype)
    K = KernelOperator(q, k, bandwidth=1.0, method=method, eps=0.5)
    assert isinstance(K, LinearOperator)
    assert K.shape == (300, 600)
    assert K.dtype == dtype
    x = np.ones(600, dtype)
    y = K @ x
    assert isinstance(y, np.ndarray)
    assert y.dtype == dtype
    assert y.shape == (300,)
    t = K @ torch.from_numpy(x)
    assert isinstance(t, torch.Tensor)
    np.testing.assert_array_equal(t.numpy(), y)
    assert (K @ x[:, None]).shape == (300, 1)
    assert (K @ np.ones((600, 3), dtype)).shape == (300, 3)
    assert K.rmatvec(np.ones(300, dtype)).shape == (600,)
    assert (K.T @ np.ones((300, 2), dtype)).shape == (600, 2)


@pytest.mark.parametrize("method", ["exact", "cells", "lowrank"])
def test_products_agree_with_the_dense_matrix(points, method):
    q, k = points[:350], points[300:]
    truth = dense(q, k, 1.3)
    K = KernelOperator(q, k, bandwidth=1.3, method=method, eps=0.01)
    rng = np.random.default_rng(1)
    x, z = rng.normal(size=(600, 4)), rng.normal(size=(350, 4))
    allowed = 1e-4 if method == "exact" else 0.01
    for got, want, size in [(K @ x, truth @ x, x), (K.rmatmat(z), truth.T @ z, z)]:
        error = np.linalg.norm(got - want, axis=0) / np.linalg.norm(size, axis=0)
        assert error.max() <= allowed


@pytest.mark.parametrize("method", ["exact", "cells", "lowrank"])
def test_products_are_linear_and_repeatable(points, method):
    K = KernelOperator(points, bandwidth=1.0, method=method)
    rng = np.random.default_rng(0)
    x, z = rng.normal(size=(2, 900)).astype(np.float32)
    np.testing.assert_array_equal(K @ x, K @ x)
    np.testing.assert_allclose(K @ (2 * x - 3 * z), 2 * (K @ x) - 3 * (K @ z), atol=2e-4)
    again = KernelOperator(points, bandwidth=1.0, method=method)
    np.testing.assert_array_equal(K @ x, again @ x)


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_adjoint_is_the_adjoint(symmetric):
    q, k = clusters(400, seed=1), clusters(700, seed=1)
    K = KernelOperator(q, None if symmetric else k, bandwidth=1.5, method="cells")
    rng = np.random.default_rng(2)
    x, z = rng.normal(size=K.shape[1]), rng.normal(size=K.shape[0])
    assert z @ (K @ x) == pytest.approx(x @ K.rmatvec(z), rel=1e-4)
    if symmetric:
        np.testing.assert_allclose(K @ z, K.rmatvec(z), atol=1e-5)


def test_eigenvalues_agree_with_the_dense_ones_within_eps():
    X = clusters(1500, d=6, centres=30, dtype=np.float64)
    K = KernelOperator(X, bandwidth=1.0, eps=0.05, method="cells")
    truth = np.linalg.eigvalsh(dense(X, X, 1.0))[-5:]
    np.testing.assert_allclose(eigsh(K, k=5, return_eigenvectors=False, tol=1e-4), truth, atol=0.05)


def test_conjugate_gradients_and_lsqr_converge():
    X = clusters(1200, d=6, centres=30, dtype=np.float64)
    K = KernelOperator(X, bandwidth=0.7, eps=0.01, method="cells")
    b = np.sin(X[:, 0])
    shifted = LinearOperator(K.shape, matvec=lambda v: K @ v + 0.5 * v.reshape(-1), dtype=np.float64)
    solution, status = cg(shifted, b, rtol=1e-5, maxiter=500)
    assert status == 0
    truth = np.linalg.solve(dense(X, X, 0.7) + 0.5 * np.eye(1200), b)
    assert np.linalg.norm(solution - truth) <= 0.05 * np.linalg.norm(truth)
    rect = KernelOperator(X[:800], X[800:], bandwidth=0.7, method="exact")
    v = np.random.default_rng(0).normal(size=400)
    found = lsqr(rect, rect @ v, damp=1e-6, iter_lim=400)[0]
    assert np.linalg.norm(rect @ found - rect @ v) <= 1e-3 * np.linalg.norm(rect @ v)


X2 = np.zeros((5, 2), np.float32)
T2 = torch.zeros(5, 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: KernelOperator(np.array([[np.nan, 1.0]]), bandwidth=1.0), "'queries'.*finite.*index \\(0, 0\\)"),
        (lambda: KernelOperator(X2, np.array([[0.0, np.inf]]), bandwidth=1.0), "'keys'.*finite"),
        (lambda: KernelOperator(X2, bandwidth=0.0), "'bandwidth'.*positive.*0.0"),
        (lambda: KernelOperator(X2, bandwidth=-1.0), "'bandwidth'.*positive"),
        (lambda: KernelOperator(X2, bandwidth=1.0, eps=1e-8), "'eps'.*float32.*float64"),
        (lambda: KernelOperator(X2, bandwidth=1.0, eps=0.0), "'eps'.*positive"),
        (lambda: KernelOperator(X2, np.zeros((4, 3)), bandwidth=1.0), "same number of columns.*2 and 3"),
        (lambda: KernelOperator(np.zeros(5), bandwidth=1.0), r"shape \(n, d\)"),
        (lambda: KernelOperator(np.zeros((0, 2)), bandwidth=1.0), r"n, d >= 1"),
        (lambda: KernelOperator("points", bandwidth=1.0), "numpy array or a tensor, got str"),
        (lambda: KernelOperator(X2.astype(complex), bandwidth=1.0), "real numpy array"),
        (lambda: KernelOperator(X2, bandwidth=1.0, method="magic"), "'method'.*'auto'.*'magic'"),
        (lambda: KernelOperator(X2, bandwidth=1.0, seed=-1), "'seed'"),
        (lambda: Kernel().block(X2), "'points' of Kernel must be a torch.Tensor, got ndarray"),
        (lambda: Kernel().block(T2[0], T2), r"'points' of Kernel must have shape \(n, d\)"),
        (lambda: pivoted_cholesky(Kernel(), T2 * np.nan, 2), "'X' of pivoted_cholesky must be finite"),
        (lambda: pivoted_cholesky(Kernel(), T2, -1), "'rank' of pivoted_cholesky must be a positive int"),
        (lambda: conjugate_gradients(lambda v: v, T2 * np.nan), "'y' of conjugate_gradients must be finite"),
        (lambda: KernelOperator(T2).shifted(0.1).solve(T2[:, 0], tol="low"), "'tol' of KernelOperator.solve must be"),
        (lambda: KernelOperator(T2).shifted(0.1).solve(T2[:, 0], max_iter=0), "'max_iter' of KernelOperator.solve"),
        (lambda: KernelOperator(T2).shifted(0.1).logdet(probes=0), "'probes' of KernelOperator.logdet must be"),
        (
            lambda: KernelOperator(X2, bandwidth=[1.0, 0.0]),
            r"'bandwidth'.*positive number, or one for each column, got \[",
        ),
        (lambda: KernelOperator(X2, bandwidth=[1.0, 1.0, 1.0]), "each of 2 features, got 3"),
        (lambda: KernelOperator(X2, bandwidth=np.ones((2, 2))), r"'bandwidth'.*shape \(2, 2\)"),
        (lambda: KernelOperator(X2, products=0), "'products'.*positive int"),
        (lambda: KernelOperator(np.full((3, 2), 2**53 + 1)), "'queries'.*9007199254740993.*2\\^53"),
        (lambda: KernelOperator(torch.full((3, 2), -(2**60))), "'queries'.*beyond 2\\^53"),
        (lambda: KernelOperator(X2) @ np.full(5, 2**62), "'x'.*beyond 2\\^53"),
        (lambda: KernelOperator(X2) @ torch.full((5,), 2**62), "'x'.*beyond 2\\^53"),
        (lambda: KernelOperator(X2) @ np.ones((5, 2, 1)), r"shape \(5,\) or \(5, r\), got \(5, 2, 1\)"),
        (lambda: KernelOperator(X2) @ torch.ones(5, 2, 1), r"shape \(5,\) or \(5, r\), got \(5, 2, 1\)"),
        (lambda: KernelOperator(X2) @ 3.0, "needs an array x"),
        (lambda: KernelOperator(X2, X2).shifted(0.1), "symmetric.*keys=None"),
        (lambda: KernelOperator(X2).shifted(-1.0), "'alpha'.*positive"),
        (lambda: KernelOperator(X2).solve(np.ones(5)), r"call shifted\(alpha\) first"),
        (lambda: KernelOperator(X2).logdet(), r"call shifted\(alpha\) first"),
        (lambda: KernelOperator(X2).preconditioner(), r"call shifted\(alpha\) first"),
        (lambda: KernelOperator(X2).shifted(1e-20).solve(np.ones(5)), "singular to double precision"),
        (lambda: KernelOperator(X2, bandwidth=1.0) @ np.ones(4), r"shape \(5,\), got \(4,\)"),
        (lambda: KernelOperator(X2, bandwidth=1.0) @ torch.ones(4, 2), r"shape \(5, r\), got \(4, 2\)"),
        (lambda: KernelOperator(X2, bandwidth=1.0).matvec(np.full(5, np.nan)), "'x'.*finite"),
        (lambda: KernelOperator(X2, bandwidth=1.0).matvec(np.ones(5) * 1j), "'x'.*real"),
        (lambda: KernelOperator([[1.0, 2.0], [3.0]], bandwidth=1.0), "'queries'.*unequal length"),
        (lambda: KernelOperator(np.ma.masked_equal(X2, 0), bandwidth=1.0), "'queries'.*masked.*fill or drop"),
        (lambda: KernelOperator(X2, bandwidth=1.0) @ scipy.sparse.csr_array(np.ones((5, 1))), "'x'.*got csr_array"),
        (lambda: KernelOperator(X2, bandwidth=1.0) @ np.full(5, 1e300), "does not fit.*1e.300.*float64 points"),
        (lambda: KernelOperator(X2.astype(float), bandwidth=1.0) @ np.full(5, 1.7e308), "does not fit.*scale it down"),
        (lambda: KernelOperator(X2, bandwidth=1.0).with_queries(np.ones((2, 3))), "2 columns"),
    ],
)
def test_bad_input_gets_one_clear_sentence(call, words):
    with pytest.raises(BochnerError, match=words):
        call()


def test_points_may_come_in_any_form_of_real_numbers():
    X = np.random.default_rng(0).normal(size=(40, 3)).round(1)
    kept = X.copy()
    kept.setflags(write=False)
    x = np.cos(np.arange(40))
    want = dense(X, X, 1.0) @ x
    for points in (
        X.astype(">f8"),
        X.astype(np.longdouble),
        X[::-1][::-1],
        kept,
        X.tolist(),
        torch.from_numpy(X).t().t(),
    ):
        np.testing.assert_allclose(KernelOperator(points, bandwidth=1.0) @ x, want, atol=1e-10)
    assert KernelOperator(X.astype(">f4"), bandwidth=1.0).dtype == np.float32
    frozen = x.copy()
    frozen.setflags(write=False)
    np.testing.assert_array_equal(KernelOperator(X, bandwidth=1.0) @ frozen, KernelOperator(X, bandwidth=1.0) @ x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_statements_hold_for_numbers_at_the_end_of_their_dtype(dtype):
    X = np.random.default_rng(0).normal(size=(60, 3)).astype(dtype)
    K, x = KernelOperator(X, bandwidth=1.0), np.cos(np.arange(60))
    for size in (np.finfo(dtype).smallest_subnormal, 64 * np.finfo(dtype).smallest_subnormal, np.finfo(dtype).max / 64):
        small = x * float(size)
        said = K.matvec_with_certificate(small)
        # Both sides are scaled to unit size, without loss, before they are squared.
        error = np.linalg.norm(said.value.astype(float) / float(size) - dense(X, X, 1.0) @ (small / float(size)))
        assert error <= said.bound / float(size)
    assert K.matvec_with_certificate(0 * x).bound == 0


@pytest.mark.parametrize("method", ["exact", "cells", "lowrank"])
@pytest.mark.parametrize(
    "X",
    [
        np.ones((1, 3)),
        np.ones((50, 3)),
        np.repeat(np.arange(20.0)[:, None], 3, 0),
        np.linspace(0, 1, 40)[:, None],
        np.zeros((30, 2)) + 1e6,
    ],
    ids=["one point", "all equal", "duplicates", "d = 1", "far from the origin"],
)
def test_degenerate_points_give_right_answers(X, method):
    K = KernelOperator(X, bandwidth=0.5, method=method, eps=0.1)
    x = np.cos(np.arange(len(X)))
    error = np.linalg.norm(K @ x - dense(X, X, 0.5) @ x)
    assert error <= 0.1 * np.linalg.norm(x)


def test_clouds_many_bandwidths_wide_keep_their_accuracy():
    X = clusters(800, d=3, centres=100, spread=5e4, dtype=np.float64)
    x = np.random.default_rng(0).normal(size=800)
    for dtype in (np.float32, np.float64):
        Y = X.astype(dtype)
        K = KernelOperator(Y, bandwidth=1.0, method="exact")
        error = np.linalg.norm(K @ x.astype(dtype) - dense(Y, Y, 1.0) @ x.astype(dtype)) / np.linalg.norm(x)
        assert error <= 1e-4


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_scale_of_x_does_not_matter(points, scale):
    K = KernelOperator(points, bandwidth=1.0, method="cells")
    x = np.random.default_rng(0).normal(size=900).astype(np.float32)
    np.testing.assert_allclose((K @ (x * np.float32(scale))) / np.float32(scale), K @ x, rtol=1e-4, atol=1e-5)
    assert not np.any(K @ (0 * x))


@pytest.mark.parametrize("method", ["exact", "cells", "lowrank"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_pickled_operators_multiply_the_same(points, method, symmetric):
    bandwidth = np.linspace(0.8, 1.2, 8)
    K = KernelOperator(points[:400], None if symmetric else points, bandwidth=bandwidth, method=method)
    K = K.shifted(0.25) if symmetric else K
    x = np.random.default_rng(0).normal(size=K.shape[1]).astype(np.float32)
    copy = pickle.loads(pickle.dumps(K))
    assert repr(copy) == repr(K)
    np.testing.assert_array_equal(copy @ x, K @ x)


def test_other_queries_share_the_index_of_the_keys(points):
    K = KernelOperator(points, bandwidth=1.0, method="cells", eps=0.05)
    q = clusters(200, seed=0)
    other = K.with_queries(q)
    assert other._engine.index is K._engine.index
    x = np.random.default_rng(0).normal(size=900).astype(np.float32)
    error = np.linalg.norm(other @ x - dense(q, points, 1.0) @ x) / np.linalg.norm(x)
    assert error <= 0.05


def test_rows_without_any_near_key_are_zero(points):
    K = KernelOperator(np.concatenate([points[:50], np.full((3, 8), 1e4, np.float32)]), points, method="cells")
    assert np.abs((K @ np.ones(900))[-3:]).max() < 1e-25
    assert np.abs(K.T @ np.eye(53)[-1]).max() < 1e-25


def test_the_global_random_state_is_left_alone(points):
    before, numpy_before = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    for method in ("cells", "lowrank"):
        KernelOperator(points, bandwidth=1.0, method=method).matvec_with_certificate(np.ones(900))
    assert torch.equal(before, torch.random.get_rng_state())
    assert np.array_equal(numpy_before, np.random.get_state()[1])  # noqa: NPY002


@pytest.mark.parametrize("method", ["exact", "cells", "lowrank"])
def test_a_matrix_without_columns_has_a_product_without_columns(method):
    q, k = np.random.default_rng(0).normal(size=(2, 60, 3))
    K = KernelOperator(q[:40], k, bandwidth=1.0, method=method)
    assert (K @ np.zeros((60, 0))).shape == (40, 0)
    assert (K.T @ torch.zeros(40, 0)).shape == (60, 0)


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_matrix_and_its_diagonal_are_those_of_the_kernel(points, symmetric):
    q, k = points[:200].astype(np.float64), points[50:400].astype(np.float64)
    K = KernelOperator(q, None if symmetric else k, bandwidth=2.0)
    truth = dense(q, q if symmetric else k, 2.0)
    np.testing.assert_allclose(K.to_dense(), truth, atol=1e-12)
    np.testing.assert_allclose(K.diagonal(), np.diagonal(truth), atol=1e-12)
    if symmetric:
        A = K.shifted(0.5).shifted(0.25)
        np.testing.assert_allclose(A.to_dense(), truth + 0.75 * np.eye(200), atol=1e-12)
        np.testing.assert_allclose(A.diagonal(), 1.75)
        np.testing.assert_allclose(A @ q, truth @ q + 0.75 * q, atol=1e-10)
        said = A.matvec_with_certificate(q[:, 0])
        assert (np.abs(said.value - (truth @ q + 0.75 * q)[:, 0]) <= said.row_bounds).all()


def test_dask_arrays_are_refused_with_the_line_that_works(points):
    da = pytest.importorskip("dask.array")
    q, x = points[:300], np.ones(900, np.float32)
    Q = da.from_array(q, chunks=(100, 8))
    with pytest.raises(BochnerError, match=r"'queries'.*Dask.*Q\.map_blocks\(lambda q: KernelOperator\(q, keys"):
        KernelOperator(Q, points)
    with pytest.raises(BochnerError, match=r"'x'.*Dask"):
        KernelOperator(points) @ da.ones(900)
    keys = points
    y = Q.map_blocks(lambda q: KernelOperator(q, keys, bandwidth=1.0) @ x, drop_axis=1, dtype=x.dtype).compute()
    np.testing.assert_allclose(y, KernelOperator(q, keys, bandwidth=1.0) @ x, rtol=1e-5)


def test_progress_is_shown_when_asked_for_or_when_a_product_takes_long(points, capsys, monkeypatch):
    K = KernelOperator(points, method="cells")
    K @ np.ones(900)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("bochner.matvec.operator.LONG", 1e-9)
    K @ np.ones(900)
    assert "near cells" in capsys.readouterr().err
    K.progress = False
    K @ np.ones(900)
    assert capsys.readouterr().err == ""
