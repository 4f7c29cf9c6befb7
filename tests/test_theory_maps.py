"""Closed forms of hybrid, learned, polynomial and linearised-layer estimators against Monte Carlo."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from stats import check_mean, check_mse, check_mse_at_most

from bochner import feature_map, kernel_estimate, theory
from bochner._checks import BochnerError

X = torch.tensor([[0.3, -0.2, 0.4, 0.1], [0.1, 0.5, -0.3, 0.2], [0.6, 0.0, 0.2, -0.3]], dtype=torch.float64)
Y = torch.tensor([[0.2, 0.1, -0.1, 0.3], [0.2, 0.3, 0.1, 0.0], [-0.3, 0.4, 0.1, 0.2]], dtype=torch.float64)
D = X.shape[-1]
SM = torch.exp((X * Y).sum(-1))
LAMBDA = torch.exp(-(X.square().sum(-1) + Y.square().sum(-1)) / 2)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trig(w: torch.Tensor) -> torch.Tensor:
    return torch.cos(w @ (X - Y).T).mean(-2) / LAMBDA


def hyperbolic(w: torch.Tensor) -> torch.Tensor:
    return torch.cosh(w @ (X + Y).T).mean(-2) * LAMBDA


def angular(t: torch.Tensor) -> torch.Tensor:
    return (1 - (torch.sign(t @ X.T) * torch.sign(t @ Y.T)).mean(-2)) / 2


# Complex exponential estimators


def _matrix(seed: int, complex_: bool) -> torch.Tensor:
    A = torch.eye(D, dtype=torch.float64) + 0.3 * normal(D, D, seed=seed)
    return A + 0.3j * normal(D, D, seed=seed + 1) if complex_ else A


CHOICES = {
    "scalar": torch.tensor(0.8 + 0.3j),
    "diagonal": torch.tensor([1.0, 0.7 + 0.5j, 1.3, 0.9 - 0.2j], dtype=torch.complex128),
    "real": _matrix(1, False),
    "dense": _matrix(3, True),
}


@pytest.mark.parametrize("name", CHOICES)
def test_complex_estimators_have_their_error(name: str) -> None:
    A, m = CHOICES[name], 4
    full = A.to(torch.complex128) * torch.eye(D) if A.ndim < 2 else A.to(torch.complex128)
    p, q = X.to(full.dtype) @ full.T, Y.to(full.dtype) @ torch.linalg.inv(full)
    c = torch.exp(-(p * p + q * q).sum(-1) / 2)
    w = normal(300_000, m, D)
    samples = (c * torch.exp(w.to(full.dtype) @ (p + q).T)).real.mean(-2)
    check_mean(samples, SM)
    check_mse(samples, SM, theory.mse_complex(X, Y, m, A), detect=0.2)


def test_complex_estimators_are_exact_at_their_centres() -> None:
    A = torch.sqrt((-Y[0] / X[0]).to(torch.complex128))
    assert theory.mse_complex(X[0], Y[0], 3, A).item() < 1e-28
    assert theory.mse_complex(X[1], Y[1], 3, A).item() > 1e-3


def test_complex_error_reduces_to_trig_and_positive_at_every_size() -> None:
    for scale in [1e-5, 1.0, 4.0, 10.0]:
        x, y = scale * X, scale * Y
        one, i = torch.tensor(1.0), torch.tensor(1j)
        assert torch.allclose(theory.mse_complex(x, y, 2, one), theory.mse_positive(x, y, 2), rtol=1e-9, atol=0)
        assert torch.allclose(theory.mse_complex(x, y, 2, i), theory.mse_trig(x, y, 2), rtol=1e-9, atol=0)


# Hybrids


@pytest.mark.parametrize("n", [1, 5])
def test_angular_coefficient_has_its_moments(n: int) -> None:
    lam = angular(normal(100_000, n, D, seed=7))
    moments = theory.angular_moments(X, Y, n)
    check_mean(lam, moments.mean)
    check_mean(lam.square(), moments.square)
    check_mean((1 - lam).square(), moments.complement)
    check_mean(lam * (1 - lam), moments.cross, scale=torch.ones(3))


@pytest.mark.parametrize("n", [1, 5])
def test_gaussian_coefficient_has_its_moments(n: int) -> None:
    s, r = 1.3, 0.7
    rho = 1 - math.exp(-2 * s**2 * r**2)
    lam = (1 - torch.cos(s * normal(100_000, n, D, seed=8) @ (X - Y).T).mean(-2)) / rho
    moments = theory.gaussian_moments(X, Y, n, radius=r, bandwidth=s)
    check_mean(lam, moments.mean)
    check_mean(lam.square(), moments.square)
    check_mean((1 - lam).square(), moments.complement)
    check_mean(lam * (1 - lam), moments.cross, scale=torch.ones(3))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("coefficient", ["angular", "gaussian"])
def test_hybrids_have_their_error(coefficient: str, shared: bool) -> None:
    m, n, draws = 3, 2, 300_000
    w = normal(draws, m, D, seed=1)
    v = w if shared else normal(draws, m, D, seed=2)
    t = normal(draws, n, D, seed=3)
    if coefficient == "angular":
        lam = angular(t)
        mse = theory.mse_angular_hybrid(X, Y, m, n, shared=shared)
    else:
        lam = (1 - torch.cos(t @ (X - Y).T).mean(-2)) / (1 - math.exp(-2 * 0.7**2))
        mse = theory.mse_gaussian_hybrid(X, Y, m, n, radius=0.7, shared=shared)
    samples = lam * hyperbolic(w) + (1 - lam) * trig(v)
    check_mean(samples, SM)
    check_mse(samples, SM, mse, detect=0.2)


def test_shared_projections_reduce_the_error_of_inputs_of_unequal_norm() -> None:
    # Large unequal norms make the correction visible: |x|^2 - |y|^2 = pi.
    x = torch.tensor([math.sqrt(math.pi + 0.04), 0.0], dtype=torch.float64)
    y = torch.tensor([0.0, 0.2], dtype=torch.float64)
    args = (x, y, 4, theory.angular_moments(x, y, 3))
    gap = theory.mse_hybrid(*args) - theory.mse_hybrid(*args, shared=True)
    assert gap.item() == pytest.approx(2 / 4 * 2 * float(args[3].cross))
    assert gap > 0


def test_shared_projections_have_the_covariance_of_theorem_3_1() -> None:
    # A fixed coefficient of 1/2 and |x|^2 - |y|^2 about 1: the correction of eq. 23 is more than half of the error.
    x, y = torch.tensor([1.05, 0.0]).double(), torch.tensor([0.0, 0.3]).double()
    half = theory.Moments(*(torch.tensor(v).double() for v in (0.5, 0.25, 0.25, 0.25)))
    m, scale = 3, torch.exp(-(x @ x + y @ y) / 2)
    w = normal(200_000, m, 2)
    samples = (torch.cosh(w @ (x + y)) * scale + torch.cos(w @ (x - y)) / scale).mean(-1) / 2
    mse = theory.mse_hybrid(x, y, m, half, shared=True)
    assert mse < 0.5 * theory.mse_hybrid(x, y, m, half)
    check_mean(samples, 1.0)
    check_mse(samples, 1.0, mse, detect=0.3)


def test_hybrid_in_gaussian_units_is_the_rescaled_softmax_one() -> None:
    soft = theory.mse_angular_hybrid(X, Y, 4, 3, shared=True)
    gauss = theory.mse_angular_hybrid(X, Y, 4, 3, shared=True, kernel="gaussian")
    assert torch.allclose(gauss, soft * LAMBDA**2)


def test_mixture_of_independent_estimators_has_its_error() -> None:
    w = normal(200_000, 3, 3, D)
    parts = torch.stack([trig(w[:, 0]), hyperbolic(w[:, 1]), hyperbolic(w[:, 2])])
    u = torch.rand(200_000, 1, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    lam = torch.stack([u, u.square(), 1 - u - u.square()])
    trig_mse, hyp_mse = theory.mse_trig(X, Y, 3), theory.mse_hyperbolic(X, Y, 3)
    squares = [1 / 3, 1 / 5, 1 + 1 / 3 + 1 / 5 - 1 - 2 / 3 + 1 / 2]
    mse = theory.mse_mixture(squares, [trig_mse, hyp_mse, hyp_mse])
    check_mse((lam * parts).sum(0), SM, mse, detect=0.2)


def test_angular_hybrid_vanishes_at_both_ends_and_trig_and_hyperbolic_do_not() -> None:
    x = torch.tensor([0.6, 0.8], dtype=torch.float64)
    assert theory.mse_angular_hybrid(x, x, 4, 4).item() == 0
    assert theory.mse_angular_hybrid(x, -x, 4, 4).item() == 0
    assert theory.mse_hyperbolic(x, x, 4) > 0.1
    assert theory.mse_trig(x, -x, 4) > 0.1


@pytest.mark.parametrize("r", [0.3, 1.0, 1.5])
def test_sphere_errors_are_the_maxima_over_angles(r: float) -> None:
    m, n = 6, 4
    theta = torch.linspace(0, math.pi, 4001, dtype=torch.float64)
    x = torch.tensor([r, 0.0], dtype=torch.float64).expand(4001, 2)
    y = r * torch.stack([torch.cos(theta), torch.sin(theta)], -1)
    for name in ["trig", "hyperbolic"]:
        largest = theory.relative_error(x, y, m, map=name).max()
        assert largest.item() == pytest.approx(theory.max_relative_error(r, m).item(), rel=1e-9)
    hybrid = torch.sqrt(theory.mse_angular_hybrid(x, y, m, n)) / torch.exp((x * y).sum(-1))
    assert torch.allclose(hybrid, theory.relative_error_angular(theta, r, m, n), atol=1e-7)
    assert hybrid.max().item() == pytest.approx(theory.max_relative_error_angular(r, m, n), rel=1e-5)


def test_theorem_3_5_bounds_the_angular_hybrid() -> None:
    for r in [0.1, 0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0]:
        for n in [1, 2, 4, 16, 256]:
            exact = theory.max_relative_error_angular(r, 8, n)
            assert exact <= theory.max_relative_error_angular_bound(r, 8, n).item()


def test_angular_error_has_the_limits_of_theorem_3_5() -> None:
    r, m, n = 1.2, 5, 3
    limit = 2 * math.sinh(2 * r**2) / math.sqrt(2 * math.pi * m * n)
    for t in [1e-6, math.pi - 1e-6]:
        value = theory.relative_error_angular(torch.tensor(t, dtype=torch.float64), r, m, n).item()
        assert value / math.sqrt(min(t, math.pi - t)) == pytest.approx(limit, rel=1e-3)


# Learned kernels

MEANS = torch.tensor([[0.4, -0.3, 0.2, 0.0], [-0.5, 0.2, 0.3, 0.1]], dtype=torch.float64)
FACTORS = {
    "dense": 0.7 * torch.eye(D, dtype=torch.float64) + 0.25 * normal(2, D, D, seed=11),
    "diagonal": 0.6 + 0.3 * torch.rand(2, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
}


def frequencies(kind: str, shared: bool, draws: int, m: int) -> torch.Tensor:
    noise = normal(draws, 1 if shared else 2, m, D, seed=12).expand(draws, 2, m, D)
    L = FACTORS[kind]
    w = noise * L[:, None] if L.ndim == 2 else torch.einsum("kij,bkmj->bkmi", L, noise)
    return w + MEANS[:, None]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", FACTORS)
def test_mixture_kernels_and_their_errors(kind: str, shared: bool) -> None:
    m, L = 3, FACTORS[kind]
    w = frequencies(kind, shared, 200_000, m)
    rks = torch.cos(w @ (X - Y).T).mean((1, 2))
    truth = theory.gmm_rks(X, Y, MEANS, L)
    check_mean(rks, truth, detect=0.05)
    check_mse(rks, truth, theory.mse_gmm_rks(X, Y, MEANS, L, m, shared_noise=shared))
    for g in [0.5, 1.0]:
        prf = torch.exp(w @ (X + Y).T).mean((1, 2)) * LAMBDA ** (2 * g)
        truth = theory.gmm_prf(X, Y, MEANS, L, g=g)
        check_mean(prf, truth, detect=0.05)
        check_mse(prf, truth, theory.mse_gmm_prf(X, Y, MEANS, L, m, g=g, shared_noise=shared), detect=0.25)


def test_initial_mixture_kernels_are_softmax_and_gaussian() -> None:
    zero, one = torch.zeros(3, D), torch.ones(3, D)
    assert torch.allclose(theory.gmm_prf(X, Y, zero, one), SM)
    assert torch.allclose(theory.gmm_rks(X, Y, zero, one), theory.kernel_value(X, Y, kernel="gaussian"))


def test_fourier_error_covers_the_laplace_mask() -> None:
    m, delta = 4, 0.8
    u = torch.rand(150_000, m, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    w = torch.tan(math.pi * (u - 0.5)) / delta
    samples = torch.cos(w @ (X - Y).T).mean(-2)
    size = (X - Y).abs().sum(-1) / delta
    check_mean(samples, torch.exp(-size))
    check_mse(samples, torch.exp(-size), theory.mse_fourier(torch.exp(-size), torch.exp(-2 * size), m))


# Polynomial kernels


def sum_poly(x: torch.Tensor, y: torch.Tensor, n: int, m: int, draws: int, seed: int = 4) -> torch.Tensor:
    index = torch.randint(D, (draws, m, n), generator=torch.Generator().manual_seed(seed))
    return D**n * (x * y)[index].prod(-1).mean(-1)


def tensor_sketch(x: torch.Tensor, y: torch.Tensor, n: int, m: int, draws: int, seed: int = 0) -> torch.Tensor:
    """Fully independent hashes and signs; circular convolution by FFT, in batches."""
    g = torch.Generator().manual_seed(seed)
    d = x.shape[-1]
    h = torch.randint(m, (draws, n, d), generator=g)
    sign = 2.0 * torch.randint(2, (draws, n, d), generator=g) - 1
    out = []
    for v in (x, y):
        sketch = torch.zeros(draws, n, m, dtype=torch.float64).scatter_add_(-1, h, sign * v)
        out.append(torch.fft.ifft(torch.fft.fft(sketch).prod(1)).real)
    return (out[0] * out[1]).sum(-1)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_sum_decomposition_has_its_error(n: int) -> None:
    x, y = torch.tensor([0.9, -0.6, 0.8, 0.5]).double(), torch.tensor([0.8, 0.2, 0.9, 0.4]).double()
    samples = sum_poly(x, y, n, 3, 200_000)
    check_mean(samples, (x @ y) ** n, detect=0.05)
    check_mse(samples, (x @ y) ** n, theory.mse_sum_poly(x, y, 3, n))


@pytest.mark.parametrize("m", [1, 2, 7, 8])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_tensor_sketch_has_its_exact_error(n: int, m: int) -> None:
    x, y = torch.tensor([0.9, -0.6, 0.8, 0.5]).double(), torch.tensor([0.8, 0.5, 0.9, 0.4]).double()
    x, y = x / x.norm(), y / y.norm()
    samples = tensor_sketch(x, y, n, m, 150_000)
    check_mean(samples, (x @ y) ** n, scale=1.0)
    check_mse(samples, (x @ y) ** n, theory.mse_tensor_sketch(x, y, m, n), detect=0.3)


def test_avrons_bound_holds_everywhere_tried() -> None:
    for d in [1, 2, 8, 64]:
        x, y = normal(500, d, seed=d), normal(500, d, seed=d + 1)
        x[:100] = 1.0
        y[:100] = x[:100]
        for n in [1, 2, 3, 6]:
            for m in [1, 2, 3, 64, 1001]:
                bound = theory.tensor_sketch_bound(x, y, m, n)
                assert (theory.mse_tensor_sketch(x, y, m, n) <= bound).all()


def test_polynomial_features_needed_suffice() -> None:
    x, y = X[0], X[0] + Y[0]
    for n in [1, 2, 3]:
        value = float(x @ y) ** n
        m = theory.polynomial_features_needed(x, y, 0.2, n)
        for count in [m, m + 1]:
            assert theory.mse_tensor_sketch(x, y, count, n) <= (0.2 * value) ** 2
        assert theory.mse_tensor_sketch(x, y, (0.8 * m).floor(), n) > (0.2 * value) ** 2
        m = theory.polynomial_features_needed(x, y, 0.2, n, map="sum_poly")
        assert theory.mse_sum_poly(x, y, m, n) <= (0.2 * value) ** 2 < theory.mse_sum_poly(x, y, m - 1, n)


def polynomial_estimates(name: str, x: torch.Tensor, y: torch.Tensor, m: int, degree: int, draws: int) -> torch.Tensor:
    phi = feature_map(name, dim=len(x), num_features=m, degree=degree, num_heads=draws).double()
    a, b = (t.expand(draws, 1, -1) for t in (x, y))
    return kernel_estimate(phi, a, b).flatten()


@pytest.mark.parametrize("name", ["sum_poly", "tensor_sketch"])
def test_chebyshev_bounds_the_tails_of_polynomial_features(name: str) -> None:
    """Results 3, 4, 6 and 7 of the problem set: means of absolute errors, and how often they exceed a target."""
    x, y, m, n, draws = X[0], X[0] + Y[0], 16, 2, 20_000
    truth = float(x @ y) ** n
    off = (polynomial_estimates(name, x, y, m, n, draws) - truth).abs()
    mse = (theory.mse_sum_poly if name == "sum_poly" else theory.mse_tensor_sketch)(x, y, m, n)
    assert off.mean() <= mse.sqrt()  # Jensen: Results 3 and 6
    for share in (0.5, 1.0, 2.0):
        bound = float(theory.polynomial_tail_bound(x, y, m, share, n, map=name))
        assert bound == pytest.approx(min(1.0, float(mse) / (share * truth) ** 2))
        assert (off >= share * truth).double().mean() <= bound + 5 * (bound / draws) ** 0.5
    wide = theory.polynomial_tail_bound(x, y, m, 3 * truth, n, map=name, relative=False)
    assert wide == pytest.approx(min(1.0, float(mse) / (3 * truth) ** 2))


@pytest.mark.parametrize("name", ["sum_poly", "tensor_sketch"])
def test_features_for_a_tail_keep_it(name: str) -> None:
    x, y, n, target, failure = X[0], X[0] + Y[0], 2, 0.5, 0.2
    m = int(theory.polynomial_features_needed(x, y, target, n, map=name, failure=failure))
    assert m > theory.polynomial_features_needed(x, y, target, n, map=name)
    assert theory.polynomial_tail_bound(x, y, m, target, n, map=name) <= failure
    assert theory.polynomial_tail_bound(x, y, m // 2, target, n, map=name) > failure
    truth = float(x @ y) ** n
    off = (polynomial_estimates(name, x, y, m, n, 2_000) - truth).abs()
    assert (off > target * truth).double().mean() <= failure
    with pytest.raises(BochnerError, match="map"):
        theory.polynomial_tail_bound(x, y, 4, 0.5, 2, map="maclaurin")


def test_maclaurin_features_have_their_error() -> None:
    a = torch.tensor([1.0, 1.0, 0.5, 1 / 6]).double()
    p = torch.tensor([0.4, 0.3, 0.2, 0.1]).double()
    x, y, m, draws = X[1], Y[1], 3, 300_000
    g = torch.Generator().manual_seed(6)
    degree = torch.multinomial(p, draws * m, replacement=True, generator=g).reshape(draws, m)
    signs = 2.0 * torch.randint(2, (draws, m, 3, D), generator=g).double() - 1
    factors = (signs @ x) * (signs @ y)
    used = torch.arange(3) < degree[..., None]
    samples = (a[degree] / p[degree] * torch.where(used, factors, 1.0).prod(-1)).mean(-1)
    truth = (a * (x @ y) ** torch.arange(4)).sum()
    check_mean(samples, truth)
    check_mse(samples, truth, theory.mse_maclaurin(x, y, m, a, p))


# Linearised layers


def test_gelu_second_derivative_and_its_maximum() -> None:
    t = torch.linspace(-6, 6, 2401, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(torch.nn.functional.gelu(t).sum(), t, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), t)
    t = t.detach()
    assert torch.allclose(theory.gelu_second_derivative(t), second, atol=1e-12)
    for a, b in [(-1.0, 1.0), (0.5, 3.0), (1.5, 2.5), (-3.0, -1.75), (3.0, 5.0)]:
        inside = second[(t >= a - 1e-9) & (t <= b + 1e-9)].abs().max()
        assert theory.gelu_second_sup(a, b).item() == pytest.approx(inside.item(), rel=1e-4)


def bernstein(t: torch.Tensor, a: float, b: float, n: int) -> torch.Tensor:
    from scipy.stats import binom

    k = np.arange(n + 1)
    basis = torch.from_numpy(binom.pmf(k, n, ((t.numpy() - a) / (b - a))[:, None]))
    return basis @ torch.nn.functional.gelu(torch.from_numpy(a + k / n * (b - a)))


@pytest.mark.parametrize(("a", "b"), [(-3.0, 3.0), (-1.0, 4.0), (0.5, 1.5)])
def test_bernstein_error_stays_below_its_bound_and_reaches_half_of_it(a: float, b: float) -> None:
    t = torch.linspace(a, b, 501, dtype=torch.float64)
    for n in [2, 8, 32, 128]:
        error = (bernstein(t, a, b, n) - torch.nn.functional.gelu(t)).abs().max()
        bound = theory.bernstein_bound(a, b, n, theory.gelu_second_sup(a, b))
        assert error <= bound
        if n == 128:
            assert error > bound / 2


@pytest.mark.parametrize("map", ["tensor_sketch", "sum_poly"])
def test_variances_of_the_degrees_of_a_linearised_layer_add_up(map: str) -> None:
    W = torch.tensor([[0.5, -0.4, 0.3, 0.6], [0.2, 0.7, -0.1, 0.3]], dtype=torch.float64)
    x = torch.tensor([0.6, 0.5, 0.4, 0.3], dtype=torch.float64)
    alpha = torch.tensor([[0.2, 0.5, 0.4, -0.3], [0.1, 0.6, 0.2, 0.1]], dtype=torch.float64)
    m, draws = [4, 6, 8], 100_000
    estimate = {"tensor_sketch": tensor_sketch, "sum_poly": sum_poly}[map]
    rows = []
    for i in range(2):
        total = alpha[i, 0].expand(draws).clone()
        for k in range(1, 4):
            total += alpha[i, k] * estimate(W[i], x, k, m[k - 1], draws, seed=100 * k)
        rows.append(total)
    samples = torch.stack(rows, -1)
    truth = (alpha * (W @ x)[:, None] ** torch.arange(4)).sum(-1)
    squares = (samples - truth).square().sum(-1)
    mse = {"tensor_sketch": theory.mse_tensor_sketch, "sum_poly": theory.mse_sum_poly}[map]
    each = [alpha[:, k].square() * mse(W, x, m[k - 1], k) for k in range(1, 4)]
    check_mean(squares, torch.stack(each).sum())


def test_allocation_meets_its_target_with_fewer_features_than_an_equal_split() -> None:
    v = torch.tensor([0.01, 0.3, 5.0, 40.0]).double()
    m = theory.allocate_features(v, 0.1)
    assert (v / m).sum() <= 0.1
    equal = torch.ceil(v.sum() / 0.1)
    assert m.sum() < 4 * equal
    assert m.sum() < torch.ceil(4 * v / 0.1).sum()


def test_gelu_series_is_gelu() -> None:
    a = theory.gelu_taylor(60)
    t = torch.linspace(-2, 2, 41, dtype=torch.float64)
    series = (a * t[:, None] ** torch.arange(60)).sum(-1)
    assert torch.allclose(series, torch.nn.functional.gelu(t), atol=1e-12)


@pytest.mark.parametrize("law", ["geometric", "poisson", "optimal"])
def test_taylor_composition_is_unbiased_with_its_variance(law: str) -> None:
    terms, m, draws = 16, 8, 400_000
    a = theory.gelu_taylor(terms)
    w = torch.tensor([0.5, -0.4, 0.3, 0.6], dtype=torch.float64)
    x = torch.tensor([0.6, 0.2, 0.5, 0.7], dtype=torch.float64)
    t = float(w @ x)
    v = torch.stack([theory.mse_tensor_sketch(w, x, m, k) if k else torch.tensor(0.0).double() for k in range(terms)])
    p = {
        "geometric": theory.geometric_law(0.4, terms),
        "poisson": theory.poisson_law(1.5, terms),
        "optimal": theory.optimal_law(a, t ** (2 * torch.arange(terms)) + v),
    }[law]
    law_p = p / p.sum()
    K = torch.multinomial(law_p, draws, replacement=True, generator=torch.Generator().manual_seed(2))
    samples = torch.zeros(draws, dtype=torch.float64)
    for k in K.unique().tolist():
        if a[k] == 0:
            continue
        where = k == K
        sketch = tensor_sketch(w, x, k, m, int(where.sum()), seed=k)
        samples[where] = a[k] / law_p[k] * sketch
    truth = torch.nn.functional.gelu(torch.tensor(t).double())
    check_mean(samples, truth)
    check_mse(samples, truth, theory.variance_taylor(t, a, law_p, v), detect=0.2)
    averaged = samples.reshape(-1, 4).mean(-1)
    check_mse(averaged, truth, theory.variance_taylor(t, a, law_p, v, draws=4), detect=0.3)


def test_optimal_index_law_beats_the_others() -> None:
    a, t = theory.gelu_taylor(20), 0.7
    second = t ** (2 * torch.arange(20, dtype=torch.float64))
    best = theory.variance_taylor(t, a, theory.optimal_law(a, second))
    for p in [theory.geometric_law(r, 20) for r in (0.2, 0.4, 0.6)] + [theory.poisson_law(1.5, 20)]:
        assert best < theory.variance_taylor(t, a, p)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theory.mse_complex(X, Y, 4, torch.zeros(D)), "invertible"),
        (lambda: theory.mse_complex(X, Y, 4, torch.zeros(D, D)), "invertible"),
        (lambda: theory.mse_complex(X, Y, 4, torch.ones(3)), "4 entries"),
        (lambda: theory.angular_moments(0 * X, Y, 4), "not zero"),
        (lambda: theory.angular_moments(X, Y, 0), "num_coefficients"),
        (lambda: theory.gaussian_moments(X, Y, 4, radius=0.0), "radius"),
        (lambda: theory.mse_mixture([1.0], [1.0, 2.0]), "as many"),
        (lambda: theory.gmm_rks(X, Y, torch.zeros(2, 3), torch.ones(2, 4)), "means"),
        (lambda: theory.gmm_prf(X, Y, torch.zeros(2, 4), torch.ones(3, 4)), "factors"),
        (lambda: theory.mse_sum_poly(X, Y, 4, 0), "degree"),
        (lambda: theory.mse_sum_poly(X, None, 4, 2), "'y' of mse_sum_poly is missing"),
        (lambda: theory.mse_sum_poly(X, Y, "four", 2), "'num_features' of mse_sum_poly must be a number or a tensor"),
        (lambda: theory.mse_sum_poly(X, Y[:2], 4, 2), "arguments of mse_sum_poly do not fit together"),
        (lambda: theory.mse_hybrid(X, Y, 4, 0.5), "arguments of mse_hybrid do not fit together"),
        (lambda: theory.bernstein_bound(0.0, 1.0, 4, -1.0), "second_sup"),
        (lambda: theory.hybrid_split(theory.angular_moments, -3, 1), "'num_features' of hybrid_split"),
        (lambda: theory.mse_tensor_sketch(X, Y, 4, -1), "degree"),
        (lambda: theory.bernstein_bound(1.0, 1.0, 4, 1.0), "low < high"),
        (lambda: theory.geometric_law(1.0, 3), "between 0 and 1"),
        (lambda: theory.variance_taylor(0.5, torch.ones(2), torch.tensor([1.0, 0.0])), "positive wherever"),
        (lambda: theory.variance_taylor(0.5, torch.ones(2), torch.ones(2)), "sum"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, words: str) -> None:
    with pytest.raises(BochnerError, match=words) as error:
        call()
    assert "\n" not in str(error.value)


def test_avrons_bound_is_respected_by_samples() -> None:
    x = torch.full((8,), 8**-0.5, dtype=torch.float64)
    for n in [2, 3]:
        samples = tensor_sketch(x, x, n, 64, 50_000)
        check_mse_at_most(samples, 1.0, theory.tensor_sketch_bound(x, x, 64, n))
