"""Other radial kernels through the same machinery, small eps, several vectors, and gradients."""

import math

import numpy as np
import pytest
import torch

from bochner._checks import BochnerError
from bochner.matvec import Kernel, KernelOperator
from bochner.matvec.profiles import PROFILES

torch.set_num_threads(1)

FORMULAS = {
    "gaussian": lambda r: np.exp(-(r**2) / 2),
    "laplace": lambda r: np.exp(-r),
    "matern12": lambda r: np.exp(-r),
    "matern32": lambda r: (1 + 3**0.5 * r) * np.exp(-(3**0.5) * r),
    "matern52": lambda r: (1 + 5**0.5 * r + 5 * r**2 / 3) * np.exp(-(5**0.5) * r),
    "student": lambda r: 1 / (1 + r**2),
}
TORCH = {
    "gaussian": lambda r: torch.exp(-(r**2) / 2),
    "laplace": lambda r: torch.exp(-r),
    "matern32": lambda r: (1 + 3**0.5 * r) * torch.exp(-(3**0.5) * r),
    "matern52": lambda r: (1 + 5**0.5 * r + 5 * r**2 / 3) * torch.exp(-(5**0.5) * r),
    "student": lambda r: 1 / (1 + r**2),
}


def clusters(n, d=4, seed=0):
    rng = np.random.default_rng(seed)
    return 8 * np.random.default_rng(5).normal(size=(25, d))[rng.integers(25, size=n)] + rng.normal(size=(n, d))


def dense(q, k, bandwidth, kernel):
    return FORMULAS[kernel](np.sqrt(((q[:, None] - k[None]) ** 2).sum(-1)) / bandwidth)


@pytest.mark.parametrize("eps", [0.1, 1e-4])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("method", ["exact", "cells"])
@pytest.mark.parametrize("kernel", list(FORMULAS))
def test_products_are_those_of_the_formula(kernel, method, dtype, eps):
    q, k = clusters(300).astype(dtype), clusters(500, seed=1).astype(dtype)
    K = KernelOperator(q, k, bandwidth=0.6, kernel=kernel, method=method, eps=eps)
    x = np.random.default_rng(2).normal(size=(500, 3)) * [1.0, 1e8, 1e-8]
    truth = dense(q.astype(float), k.astype(float), 0.6, kernel) @ x
    assert (np.linalg.norm(K @ x - truth, axis=0) <= eps * np.linalg.norm(x, axis=0)).all()
    estimate = K.matvec_with_certificate(x[:, 1])
    assert np.linalg.norm(estimate.value - truth[:, 1]) <= estimate.bound
    assert K.kernel.name == {"matern12": "laplace"}.get(kernel, kernel)


@pytest.mark.parametrize("kernel", list(PROFILES))
def test_a_changed_argument_changes_the_kernel_by_less_than_its_bound(kernel):
    entry = PROFILES[kernel]
    t = -torch.logspace(-8, 2, 60, dtype=torch.float64)
    for delta in (1e-9, 1e-4, 0.3):
        for moved in (t - delta, (t + delta).clamp_max(0.0)):
            ratio = entry.value(moved.clone()) / entry.value(t.clone())
            assert float((ratio - 1).abs().max()) <= entry.change(delta) * (1 + 1e-9) + 1e-13


@pytest.mark.parametrize("kernel", list(PROFILES))
def test_a_relative_error_of_the_argument_changes_the_kernel_no_more_than_is_said(kernel):
    entry = PROFILES[kernel]
    t = -torch.logspace(-8, math.log10(-entry.floors[1]), 300, dtype=torch.float64)
    value = entry.value(t.clone())
    for relative in (1e-6, 1e-3):
        for moved in (t * (1 + relative), t * (1 - relative)):
            assert float((entry.value(moved) - value).abs().max()) <= 0.51 * relative


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kernel", list(PROFILES))
def test_one_point_far_away_leaves_a_statement_of_use(kernel, dtype):
    points = np.append(np.linspace(0, 1, 299), 1e8).astype(dtype)[:, None]
    said = KernelOperator(points, bandwidth=0.003, kernel=kernel, eps=1e-3).matvec_with_certificate(np.ones(300))
    exact = points.astype(float)
    assert np.linalg.norm(said.value - dense(exact, exact, 0.003, kernel) @ np.ones(300)) <= said.bound
    assert said.met


def test_unknown_kernels_list_the_known_ones():
    with pytest.raises(BochnerError, match=r"'polynomial'.*'gaussian'.*'student'"):
        KernelOperator(np.ones((3, 2)), bandwidth=1.0, kernel="polynomial")


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("method", ["exact", "cells", "lowrank"])
@pytest.mark.parametrize("kernel", list(PROFILES))
def test_gradients_of_x_points_and_bandwidths_are_right(kernel, method, separate):
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    weight = torch.randn(40, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    q, k = (torch.from_numpy(clusters(n, seed=n)).requires_grad_() for n in (40, 60))
    bandwidth = torch.tensor([1.5, 2.0, 1.0, 0.7] if separate else 1.5, dtype=torch.float64, requires_grad=True)
    inputs = (x, q, k, bandwidth)
    K = KernelOperator(q, k, bandwidth=bandwidth, kernel=kernel, method=method, eps=1e-9)
    got = torch.autograd.grad(((K @ x) * weight).sum(), inputs)
    distance = ((q[:, None] - k) / bandwidth).square().sum(-1).sqrt()
    expected = torch.autograd.grad(((TORCH[kernel](distance) @ x) * weight).sum(), inputs)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", list(PROFILES))
def test_points_that_are_both_queries_and_keys_get_both_gradients(kernel):
    points = torch.from_numpy(clusters(50)).requires_grad_()
    x = torch.linspace(-1, 1, 50, dtype=torch.float64)
    (got,) = torch.autograd.grad((KernelOperator(points, kernel=kernel) @ x).square().sum(), points)
    distance = (points[:, None] - points).square().sum(-1).add(1e-30).sqrt()
    (expected,) = torch.autograd.grad((TORCH[kernel](distance) @ x).square().sum(), points)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)


def test_points_that_have_moved_are_refused():
    points = torch.from_numpy(clusters(40)).requires_grad_()
    K = KernelOperator(points)
    with torch.no_grad():
        points.data.add_(1.0)
    with pytest.raises(BochnerError, match=r"'queries'.*changed since.*build a new KernelOperator"):
        K @ torch.ones(40)


@pytest.mark.parametrize("kernel", list(PROFILES))
@pytest.mark.parametrize("bandwidth", [0.9, [0.5, 1.0, 2.0, 1.0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_products_and_gradients_of_a_kernel_agree_with_its_formula(kernel, bandwidth, dtype):
    X, Y = (torch.from_numpy(clusters(n, seed=n)).to(dtype) for n in (700, 900))
    V = torch.randn(900, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    k, sigma = Kernel(kernel, bandwidth), np.asarray(bandwidth)
    truth = torch.from_numpy(dense(X.double().numpy() / sigma, Y.double().numpy() / sigma, 1.0, kernel))
    atol = 2e-4 if dtype == torch.float32 else 1e-10
    atol *= 500 if kernel == "laplace" and dtype == torch.float32 else 1
    torch.testing.assert_close(k.block(X, Y).double(), truth, rtol=0, atol=atol)
    assert bool((k.block(X).diagonal() == 1).all())
    A, B = V[:700], torch.ones(900, 3, dtype=torch.float64)
    for a, b in zip(k.gradients(X, Y, (A, B)), k.gradients(X, Y, A @ B.T), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


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
        with pytest.raises(BochnerError, match=r"'bandwidth'.*changed since.*build a new KernelOperator"):
            product(torch.ones(40, dtype=torch.float64))
    # The product that was made before the step still has its own gradient.
    bandwidth.grad = None
    y.sum().backward()
    squared = ((q[:, None] - q[None]) ** 2).sum(-1)
    assert float(bandwidth.grad) == pytest.approx(float((np.exp(-squared / 2) * squared).sum()), rel=1e-9)
    with torch.no_grad():
        bandwidth.data.fill_(1.0)
    K @ np.ones(40)


@pytest.mark.parametrize("symmetric", [True, False])
def test_long_sums_of_one_sign_do_not_drown_in_single_precision(symmetric):
    X = np.random.default_rng(0).normal(size=(20_000, 2)).astype(np.float32)
    rows = np.arange(0, 20_000, 100)
    y = KernelOperator(X, None if symmetric else X.copy(), bandwidth=4.0, method="exact") @ np.ones(20_000)
    squared = ((X[rows, None].astype(np.float64) - X[None]) ** 2).sum(-1)
    truth = np.exp(-squared / 32.0).sum(1)
    assert truth.min() > 1000
    assert np.sqrt(np.mean((y[rows] - truth) ** 2)) < 0.01  # per row; float32 sums are off by 0.05


@pytest.mark.parametrize("name", list(PROFILES))
@pytest.mark.parametrize("delta", [1e-6, 1e-3, 0.1])
def test_a_profile_changes_by_no_more_than_its_bound_and_by_half_of_it_somewhere(name, delta):
    profile = PROFILES[name]
    t = -torch.cat([torch.logspace(-8, 0, 400, dtype=torch.float64), torch.tensor([0.0, delta])])
    moved = [(t + step).clamp_max(0.0) for step in (delta, -delta)]
    change = max(float((profile.value(other) / profile.value(t.clone()) - 1).abs().max()) for other in moved)
    assert 0.5 * profile.change(delta) <= change <= profile.change(delta) * (1 + 1e-9)
