"""Other radial kernels through the same machinery, small eps, several vectors, and gradients."""

import numpy as np
import pytest
import torch

from bochner._checks import BochnerError
from bochner.matvec import KernelOperator
from bochner.matvec.kernels import KERNELS

torch.set_num_threads(1)

FORMULAS = {
    "gaussian": lambda r: np.exp(-(r**2) / 2),
    "laplace": lambda r: np.exp(-r),
    "matern12": lambda r: np.exp(-r),
    "matern32": lambda r: (1 + 3**0.5 * r) * np.exp(-(3**0.5) * r),
    "matern52": lambda r: (1 + 5**0.5 * r + 5 * r**2 / 3) * np.exp(-(5**0.5) * r),
    "student": lambda r: 1 / (1 + r**2),
}


def clusters(n, d=4, seed=0):
    rng = np.random.default_rng(seed)
    return 8 * np.random.default_rng(5).normal(size=(25, d))[rng.integers(25, size=n)] + rng.normal(size=(n, d))


def dense(q, k, bandwidth, kernel):
    return FORMULAS[kernel](np.sqrt(((q[:, None] - k[None]) ** 2).sum(-1)) / bandwidth)


@pytest.mark.parametrize("eps", [0.1, 1e-4])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("method", ["exact", "cells", "sparse"])
@pytest.mark.parametrize("kernel", list(FORMULAS))
def test_products_are_those_of_the_formula(kernel, method, dtype, eps):
    q, k = clusters(300).astype(dtype), clusters(500, seed=1).astype(dtype)
    K = KernelOperator(q, k, bandwidth=0.6, kernel=kernel, method=method, eps=eps)
    x = np.random.default_rng(2).normal(size=(500, 3)) * [1.0, 1e8, 1e-8]
    truth = dense(q.astype(float), k.astype(float), 0.6, kernel) @ x
    assert (np.linalg.norm(K @ x - truth, axis=0) <= eps * np.linalg.norm(x, axis=0)).all()
    estimate = K.matvec_with_certificate(x[:, 1])
    assert np.linalg.norm(estimate.value - truth[:, 1]) <= estimate.bound
    assert K.kernel == {"matern12": "laplace"}.get(kernel, kernel)


@pytest.mark.parametrize("kernel", list(KERNELS))
def test_a_changed_argument_changes_the_kernel_by_less_than_its_bound(kernel):
    entry = KERNELS[kernel]
    t = -torch.logspace(-8, 2, 60, dtype=torch.float64)
    for delta in (1e-9, 1e-4, 0.3):
        for moved in (t - delta, (t + delta).clamp_max(0.0)):
            ratio = entry.profile(moved.clone()) / entry.profile(t.clone())
            assert float((ratio - 1).abs().max()) <= entry.change(delta) * (1 + 1e-9) + 1e-13


def test_a_relative_error_far_out_changes_a_heavy_tail_no_more_than_its_bound():
    entry = KERNELS["student"]
    t = -torch.logspace(-8, 200, 300, dtype=torch.float64)
    for relative in (1e-12, 1e-4, 0.3):
        for moved in (t * (1 + relative), t * (1 - relative)):
            ratio = entry.profile(moved.clone()) / entry.profile(t.clone())
            assert float((ratio - 1).abs().max()) <= entry.change(relative * entry.heavy) * (1 + 1e-9) + 1e-13


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kernel", list(KERNELS))
def test_one_point_far_away_leaves_a_statement_of_use(kernel, dtype):
    points = np.append(np.linspace(0, 1, 299), 1e8).astype(dtype)[:, None]
    said = KernelOperator(points, bandwidth=0.003, kernel=kernel, eps=1e-3).matvec_with_certificate(np.ones(300))
    exact = points.astype(float)
    assert np.linalg.norm(said.value - dense(exact, exact, 0.003, kernel) @ np.ones(300)) <= said.bound
    assert said.kind == "deterministic"
    assert said.met


def test_unknown_kernels_list_the_known_ones():
    with pytest.raises(BochnerError, match=r"'polynomial'.*'gaussian'.*'student'"):
        KernelOperator(np.ones((3, 2)), bandwidth=1.0, kernel="polynomial")
    with pytest.raises(BochnerError, match="needs kernel='gaussian'"):
        KernelOperator(np.ones((3, 2)), bandwidth=1.0, kernel="laplace", method="features")


@pytest.mark.parametrize("method", ["exact", "cells", "sparse", "lowrank"])
@pytest.mark.parametrize("kernel", list(KERNELS))
def test_gradients_of_x_and_bandwidth_are_right(kernel, method):
    q, k = clusters(40), clusters(60, seed=1)
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    bandwidth = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(40, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(product):
        return (product * weight).sum()

    got = torch.autograd.grad(
        loss(KernelOperator(q, k, bandwidth=bandwidth, kernel=kernel, method=method, eps=1e-9) @ x), (x, bandwidth)
    )
    distance = torch.from_numpy(np.sqrt(((q[:, None] - k[None]) ** 2).sum(-1))) / bandwidth
    formula = {
        "gaussian": lambda r: torch.exp(-(r**2) / 2),
        "laplace": lambda r: torch.exp(-r),
        "matern32": lambda r: (1 + 3**0.5 * r) * torch.exp(-(3**0.5) * r),
        "matern52": lambda r: (1 + 5**0.5 * r + 5 * r**2 / 3) * torch.exp(-(5**0.5) * r),
        "student": lambda r: 1 / (1 + r**2),
    }[kernel]
    expected = torch.autograd.grad(loss(formula(distance) @ x), (x, bandwidth))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_adjoint_has_gradients_too_and_a_vector_keeps_its_shape():
    q, k = clusters(40), clusters(60, seed=1)
    bandwidth = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    K = KernelOperator(q, k, bandwidth=bandwidth)
    x = torch.ones(40, dtype=torch.float64, requires_grad=True)
    y = K.rmatvec(x)
    assert y.shape == (60,)
    y.square().sum().backward()
    M = torch.from_numpy(dense(q, k, 1.5, "gaussian"))
    torch.testing.assert_close(x.grad, 2 * M @ (M.T @ torch.ones(40, dtype=torch.float64)))
    step = 1e-5
    change = [KernelOperator(q, k, bandwidth=1.5 + h).rmatvec(np.ones(40)).__pow__(2).sum() for h in (-step, step)]
    assert float(bandwidth.grad) == pytest.approx((change[1] - change[0]) / (2 * step), rel=1e-6)
    with torch.no_grad():
        assert not (K.rmatvec(x)).requires_grad


def test_a_bandwidth_that_has_moved_is_refused_and_the_gradient_is_that_of_the_product():
    q = clusters(40)
    bandwidth = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    K = KernelOperator(q, bandwidth=bandwidth)
    y = K @ torch.ones(40, dtype=torch.float64)
    optimizer = torch.optim.SGD([bandwidth], lr=1.0)
    bandwidth.grad = torch.tensor(-1.0, dtype=torch.float64)
    optimizer.step()
    for product in (K.matvec, K.rmatvec, K.with_queries(q[:5]).matvec, K.matvec_with_certificate):
        with pytest.raises(BochnerError, match=r"was 1 when it was built.*now 2; build a new KernelOperator"):
            product(torch.ones(40, dtype=torch.float64))
    # The product that was made before the step still has its own gradient.
    bandwidth.grad = None
    y.sum().backward()
    squared = ((q[:, None] - q[None]) ** 2).sum(-1)
    assert float(bandwidth.grad) == pytest.approx(float((np.exp(-squared / 2) * squared).sum()), rel=1e-9)
    with torch.no_grad():
        bandwidth.data.fill_(1.0)
    K @ np.ones(40)


def test_a_gamma_that_learns_goes_through_the_bandwidth():
    q, x = clusters(40), torch.ones(40, dtype=torch.float64)
    gamma = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(BochnerError, match=r"'gamma'.*requires a gradient.*bandwidth=\(2 \* gamma\) \*\* -0.5"):
        KernelOperator(q, gamma=gamma)
    (KernelOperator(q, bandwidth=(2 * gamma) ** -0.5) @ x).sum().backward()
    squared = ((q[:, None] - q[None]) ** 2).sum(-1)
    assert float(gamma.grad) == pytest.approx(-float((np.exp(-0.4 * squared) * squared).sum()), rel=1e-9)
    with torch.no_grad():
        assert KernelOperator(q, gamma=gamma).gamma == pytest.approx(0.4)


@pytest.mark.parametrize("symmetric", [True, False])
def test_long_sums_of_one_sign_do_not_drown_in_single_precision(symmetric):
    X = np.random.default_rng(0).normal(size=(20_000, 2)).astype(np.float32)
    rows = np.arange(0, 20_000, 100)
    y = KernelOperator(X, None if symmetric else X.copy(), bandwidth=4.0, method="exact") @ np.ones(20_000)
    squared = ((X[rows, None].astype(np.float64) - X[None]) ** 2).sum(-1)
    truth = np.exp(-squared / 32.0).sum(1)
    assert truth.min() > 1000
    assert np.sqrt(np.mean((y[rows] - truth) ** 2)) < 0.01  # per row; float32 sums are off by 0.05
