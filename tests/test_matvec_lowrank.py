"""One factor: pivots, its trace, products by it, solving and determinants with it."""

import numpy as np
import pytest
import torch
from kernel_sets import radial
from scipy.sparse.linalg import cg

from bochner._checks import BochnerError
from bochner.matvec import (
    Kernel,
    KernelOperator,
    Preconditioner,
    conjugate_gradients,
    logdet,
    pivoted_cholesky,
)

torch.set_num_threads(1)
X = torch.randn(700, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(200, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
KINDS = ["gaussian", "laplace", "matern32", "matern52", "student"]


@pytest.mark.parametrize("bandwidth", [1.0, [0.5, 2.0, 1.0]])
@pytest.mark.parametrize("kernel", KINDS)
def test_the_factor_leaves_a_positive_semidefinite_rest_with_the_stated_diagonal(kernel, bandwidth):
    k = Kernel(kernel, bandwidth)
    factor, K = pivoted_cholesky(k, X, 150), k.block(X)
    rest = K - factor.rows @ factor.rows.T
    torch.testing.assert_close(rest.diagonal(), factor.remaining, atol=1e-10, rtol=0)
    assert float(torch.linalg.eigvalsh(rest)[0]) > -1e-9
    assert float(torch.linalg.matrix_norm(rest, 2)) <= factor.trace + 1e-9
    # It is the Nystroem approximation from its pivots, and extends to other points.
    P = factor.pivots
    nystroem = K[:, P] @ torch.linalg.solve(K[P][:, P], K[P])
    torch.testing.assert_close(factor.rows @ factor.rows.T, nystroem, atol=1e-7, rtol=0)
    between = k.block(Y, X[P]) @ torch.linalg.solve(K[P][:, P], K[P])
    torch.testing.assert_close(factor.extend(Y) @ factor.rows.T, between, atol=1e-7, rtol=0)


def test_pivots_stop_when_the_trace_is_small_when_told_to_and_at_duplicates():
    k = Kernel("gaussian", 3.0)
    assert pivoted_cholesky(k, X, 700, tolerance=1e-3).trace <= 1e-3
    few = pivoted_cholesky(k, X, 700, tolerance=1e-3, stop=lambda trace, r: r >= 20)
    assert few.rank < 160
    doubled = pivoted_cholesky(k, torch.cat([X[:40], X[:40]]), 80, tolerance=1e-9)
    assert doubled.rank <= 40
    assert len(set(doubled.pivots.tolist())) == doubled.rank


def test_pivots_are_drawn_in_proportion_to_what_is_left():
    """The second of two pivots, of three points of which two are nearly one: the law of drawing one by one."""
    points = torch.tensor([[0.0], [0.1], [9.0]], dtype=torch.float64)
    k, counts = Kernel("gaussian", 1.0), np.zeros(3)
    for seed in range(600):
        pivots = pivoted_cholesky(k, points, 2, seed=seed).pivots
        counts[int(pivots[0])] += 1
    assert abs(counts / 600 - 1 / 3).max() < 0.1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kernel", KINDS)
def test_products_by_a_factor_are_within_their_bounds_or_say_so(kernel, symmetric, dtype):
    q, k = X.numpy().astype(dtype), Y.numpy().astype(dtype)
    K = KernelOperator(q, None if symmetric else k, bandwidth=4.0, kernel=kernel, method="lowrank", eps=0.01)
    truth = radial(q, q if symmetric else k, 4.0, kernel)
    for x in (np.ones(K.shape[1]), np.random.default_rng(0).normal(size=K.shape[1])):
        said = K.matvec_with_certificate(x)
        assert (np.abs(said.value - truth @ x) <= said.row_bounds).all()
    assert K.certain
    K.memory = 20 * 16 * sum(K.shape)  # a rank of about 20 fits
    small = K.with_queries(q)
    assert not small.certain or kernel in ("gaussian", "matern52", "student")
    said = small.matvec_with_certificate(np.ones(K.shape[1]))
    assert np.linalg.norm(said.value - radial(q, q if symmetric else k, 4.0, kernel).sum(1)) <= said.bound
    assert said.met or not small.certain


def test_the_preconditioner_is_the_inverse_and_speeds_up_conjugate_gradients():
    k, alpha = Kernel("gaussian", 1.5), 0.01
    K = k.block(X) + alpha * torch.eye(700, dtype=torch.float64)
    factor = pivoted_cholesky(k, X, 200)
    P = Preconditioner(factor.rows, alpha)
    approximate = factor.rows @ factor.rows.T + alpha * torch.eye(700, dtype=torch.float64)
    y = torch.randn(700, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(P(approximate @ y), y)
    assert P.logdet == pytest.approx(float(torch.logdet(approximate)))
    fast = conjugate_gradients(lambda v: K @ v, y, P, tol=1e-8)
    slow = conjugate_gradients(lambda v: K @ v, y, tol=1e-8, max_iter=fast.steps)
    torch.testing.assert_close(fast.value, torch.linalg.solve(K, y), rtol=1e-5, atol=1e-5)
    assert fast.residual <= 1e-8 < slow.residual
    warm = conjugate_gradients(lambda v: K @ v, y, P, tol=1e-8, start=fast.value)
    assert warm.steps == 0
    solution, status = cg(K.numpy(), y[:, 0].numpy(), M=P, rtol=1e-8, maxiter=fast.steps + 5)
    assert status == 0
    np.testing.assert_allclose(solution, fast.value[:, 0], rtol=1e-4, atol=1e-4)
    drawn = P.draw(20_000, torch.Generator().manual_seed(0))
    assert float((drawn @ drawn.T / 20_000 - approximate).abs().max()) < 0.08
    with pytest.raises(BochnerError, match="raise 'alpha'"):
        Preconditioner(torch.ones(4, 2, dtype=torch.float64), 1e-30)


@pytest.mark.parametrize("rank", [60, 5])
def test_the_error_of_a_determinant_is_that_of_its_draws(rank):
    k = Kernel("matern32", 1.0)
    K = k.block(X) + 0.1 * torch.eye(700, dtype=torch.float64)
    P = Preconditioner(pivoted_cholesky(k, X, rank).rows, 0.1)
    truth = float(torch.logdet(K))
    found = [logdet(lambda v: K @ v, 700, P, seed=seed, steps=40) for seed in range(20)]
    misses = sum(abs(one.value - truth) > one.error for one in found)
    assert misses <= 5  # nominally one in twenty
    mean = np.mean([one.value for one in found])
    assert abs(mean - truth) <= 3 * np.mean([one.error for one in found]) / 2 / 20**0.5


@pytest.mark.parametrize("n", [900, 2600])
def test_operators_solve_and_have_determinants(n):
    """By factorisation and, beyond 2,048 rows, by conjugate gradients and Lanczos."""
    points = torch.randn(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A = KernelOperator(points, bandwidth=1.0, eps=1e-5).shifted(0.1)
    y = np.random.default_rng(0).normal(size=(n, 2))
    truth = A.to_dense()
    np.testing.assert_allclose(truth @ A.solve(y), y, atol=1e-4)
    np.testing.assert_allclose(truth @ A.solve(y[:, 0]), y[:, 0], atol=1e-4)
    found = A.logdet()
    assert abs(found.value - np.linalg.slogdet(truth)[1]) <= 2 * found.error + 1e-6
    assert (found.error == 0) == (n <= 2048)
    _, status = cg(A, y[:, 0], M=A.preconditioner(), rtol=1e-6)
    assert status == 0


def test_solving_refuses_what_cannot_be_solved():
    A = KernelOperator(X.repeat(4, 1), eps=0.5).shifted(0.1)
    with pytest.raises(BochnerError, match=r"eps below the shift.*eps=0.01"):
        A.solve(np.ones(2800))
    B = KernelOperator(X.repeat(4, 1), eps=1e-3).shifted(0.1)
    with pytest.raises(BochnerError, match="stopped after 1 steps"):
        B.solve(np.random.default_rng(0).normal(size=2800), max_iter=1, tol=1e-12)
