"""Every softmax, Gaussian and generalised map against its kernel and its closed-form error."""

from __future__ import annotations

import math

import pytest
import torch
from stats import check_mean, check_mse, check_paired_less

from bochner import BochnerError, feature_map, kernel_estimate, theory

EXACT = ["iid", "orthogonal", "simplex", "halton", "sobol", "fastfood"]
NEAR = ["hadamard", "givens"]
FAMILY = ["trig", "positive", "hyperbolic", "optimal", "calibrated"]
D = 6


def points(d: int = D, norm: float = 0.35) -> tuple[torch.Tensor, torch.Tensor]:
    """Asymmetric inputs (symmetry hides unsigned QR) with |x + y| <= 0.7."""
    g = torch.Generator().manual_seed(7)
    x, y = (torch.rand(n, d, dtype=torch.float64, generator=g) ** 3 + 0.1 for n in (2, 3))
    y[1] = -y[1]
    return tuple(norm * t / t.norm(dim=-1, keepdim=True) for t in (x, y))  # type: ignore[return-value]


def estimates(name: str, count: int, m: int = 5, d: int = D, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` independent estimates of the kernel matrix, and the kernel: the heads are the draws."""
    x, y = points(d)
    phi = feature_map(name, dim=d, num_features=m, num_heads=count, seed=11, **options).double()
    if name in ("calibrated", "optimal"):
        g = torch.Generator().manual_seed(3)
        q, k = (0.3 * torch.randn(1, 40, d, dtype=torch.float64, generator=g) + s for s in (0.1, 0.05))
        phi.calibrate_(q.expand(count, -1, -1), k.expand(count, -1, -1))
    samples = kernel_estimate(phi, x.expand(count, -1, -1), y.expand(count, -1, -1))
    return samples, phi.kernel_matrix(x, y)


@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
@pytest.mark.parametrize("projection", EXACT)
@pytest.mark.parametrize("name", FAMILY)
def test_the_mean_estimate_is_the_kernel(name, projection, kernel):
    samples, truth = estimates(name, 1500, m=12, projection=projection, kernel=kernel)
    check_mean(samples, truth, detect=0.15)


@pytest.mark.parametrize("projection", NEAR)
def test_hadamard_and_givens_are_nearly_unbiased(projection):
    samples, truth = estimates("positive", 20000, projection=projection)
    bias = (samples.mean(0) / truth - 1).abs().max()
    assert bias < 0.02, f"{projection}: relative bias {bias:.4f}"


def test_more_rounds_of_rotations_leave_no_bias_to_see():
    """Products of true rotations are nearly Haar; at 20,000 draws the t-test itself finds nothing at d = 6."""
    samples, truth = estimates("positive", 20000, projection="givens")
    check_mean(samples, truth, detect=0.03)


@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
@pytest.mark.parametrize("projection", ["iid", "orthogonal"])
@pytest.mark.parametrize("name", ["trig", "positive", "hyperbolic"])
def test_the_error_is_the_closed_form(name, projection, kernel):
    m = 2 if projection == "iid" else 9  # one block and a part of another
    samples, truth = estimates(name, 20000, m=m, projection=projection, kernel=kernel)
    x, y = points()
    claim = getattr(theory, f"mse_{name}")(x[:, None], y[None], m, kernel=kernel, projection=projection)
    check_mse(samples, truth, claim, detect=0.4)


@pytest.mark.parametrize(("kernel", "projection"), [("softmax", "iid"), ("gaussian", "iid"), ("softmax", "orthogonal")])
def test_the_error_of_an_optimal_map_is_the_closed_form(kernel, projection):
    A, m, count = -0.04, 2, 20000
    x, y = points()
    options = {"num_heads": count, "projection": projection, "kernel": kernel}
    phi = feature_map("optimal", dim=D, num_features=m, A=A, **options).double()
    phi.A.fill_(A)
    samples = kernel_estimate(phi, x.expand(count, -1, -1), y.expand(count, -1, -1))
    claim = theory.mse_optimal(x[:, None], y[None], m, A, kernel=kernel, projection=projection)
    check_mse(samples, phi.kernel_matrix(x, y), claim, detect=0.3)


def test_the_error_of_the_dense_map_is_the_closed_form():
    m, count = 2, 20000
    x, y = points()
    phi = feature_map("calibrated", dim=D, num_features=m, num_heads=count, projection="iid").double()
    a = torch.linspace(-0.2, 0.05, D, dtype=torch.float64)
    u = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    phi.a.copy_(a)
    phi.basis_query.copy_(u.mT)
    phi.basis_key.copy_(u.mT)
    samples = kernel_estimate(phi, x.expand(count, -1, -1), y.expand(count, -1, -1))
    check_mse(samples, phi.kernel_matrix(x, y), theory.mse_dense(x[:, None], y[None], m, a, u), detect=0.3)


def test_the_regularized_map_has_the_mean_of_theory():
    samples, truth = estimates("regularized", 20000, m=12)
    x, y = points()
    ratio = theory.regularized_ratio(x[:, None], y[None])
    check_mean(samples, truth * ratio, detect=0.02)


def test_the_regularized_map_is_not_softmax_at_large_norms():
    count, x = 4000, torch.full((1, D), 0.6, dtype=torch.float64)
    phi = feature_map("regularized", dim=D, num_features=24, num_heads=count, seed=0).double()
    samples = kernel_estimate(phi, x.expand(count, 1, D), x.expand(count, 1, D))
    check_mean(samples, phi.kernel_matrix(x, x) * theory.regularized_ratio(x, x), detect=0.1)
    with pytest.raises(AssertionError, match="critical"):
        check_mean(samples, phi.kernel_matrix(x, x), detect=0.1)


def pair_covariance(projection: str, count: int = 20000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One draw each of the mean covariance of two rows of a block: what a coupling adds to the error of iid rows."""
    d = 4
    x, y = (torch.full((1, d), s, dtype=torch.float64) for s in (0.3, 0.2))
    phi = feature_map("positive", dim=d, num_features=d, num_heads=count, projection=projection, seed=2).double()
    f, g = (phi(t.expand(count, 1, d), role).dense() for t, role in ((x, "query"), (y, "key")))
    rows = d * f * g - phi.kernel_matrix(x, y)  # m single-row estimates, less the truth
    return (rows.sum(-1).square() - rows.square().sum(-1)) / d**2, x, y


def test_theorem_2_orthogonal_beats_iid_by_the_gap_of_theory_and_simplex_beats_orthogonal():
    zero = torch.zeros(20000, 1, dtype=torch.float64)
    orthogonal, x, y = pair_covariance("orthogonal")
    simplex, _, _ = pair_covariance("simplex")
    check_paired_less(orthogonal, zero)
    check_paired_less(simplex, orthogonal)
    check_mean(orthogonal, -theory.orthogonal_gap(x, y, 4), detect=0.5)


@pytest.mark.parametrize("name", ["relu", "exp", "sigmoid", "abs", "gelu", "cos", "tanh", "identity", "elu"])
def test_generalised_maps_estimate_their_kernel(name):
    samples, truth = estimates(name, 3000, m=16, kernel_epsilon=0.05)
    # Odd functions have kernels near zero: the scale is what the product of two features is worth.
    x, _ = points()
    scale = (feature_map(name, dim=D, num_features=16).kernel_matrix(x, x).diagonal().abs().max()).clamp_min(0.05)
    check_mean(samples, truth, scale=scale, detect=0.2)


def test_a_function_of_ones_own_makes_an_unbiased_map():
    """softplus is in no list: the estimate is right for `E[f(w.x) f(w.y)]`, and wrong for that of a nearby f."""
    options = {"f": torch.nn.functional.softplus, "positive": True}
    samples, truth = estimates("generalized", 3000, m=16, kernel_epsilon=0.05, **options)
    check_mean(samples, truth, detect=0.2)
    x, y = points()
    w = torch.randn(200_000, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fx, fy = (torch.nn.functional.softplus(t @ w.mT) + 0.05 for t in (x.double(), y.double()))
    torch.testing.assert_close(truth.double(), fx @ fy.mT / len(w), rtol=0.01, atol=0)
    relu, _ = estimates("relu", 3000, m=16, kernel_epsilon=0.05)
    assert not torch.allclose(relu.double().mean(0), truth.double(), rtol=0.1)


def test_the_linear_transformer_needs_no_settings():
    x, y = (t.float() for t in points())
    phi = feature_map("linear_elu", dim=D)
    elu = [torch.where(t > 0, t + 1, t.exp()) for t in (x, y)]
    assert phi.feature_dim == D
    torch.testing.assert_close(kernel_estimate(phi, x, y), elu[0] @ elu[1].mT / D)
    torch.testing.assert_close(phi.kernel_matrix(x, y), elu[0] @ elu[1].mT / D)


def test_a_function_can_be_learned_and_must_keep_shapes():
    phi = feature_map("generalized", dim=D, num_features=8, f=torch.nn.PReLU())
    x, _ = points()
    phi(x.float()).dense().sum().backward()
    assert [n for n, p in phi.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0] == [
        "function.weight"
    ]
    assert not phi.positive
    for f, said in ((3, "must be a function"), (lambda t: t.sum(-1), "must be elementwise")):
        with pytest.raises(BochnerError, match=said):
            feature_map("generalized", dim=D, f=f)
    with pytest.raises(BochnerError, match="negative in places"):
        feature_map("generalized", dim=D, f=torch.sin, positive=True)


def test_generalised_kernels_agree_with_their_closed_forms():
    x, y = points()
    dot, nx, ny = x @ y.mT, x.norm(dim=-1)[:, None], y.norm(dim=-1)[None]
    angle = (dot / (nx * ny)).clamp(-1, 1).acos()
    relu = nx * ny * (angle.sin() + (math.pi - angle) * angle.cos()) / (2 * math.pi)
    closed = {
        "identity": dot,
        "relu": relu,
        "abs": 2 * nx * ny * (angle.sin() + (math.pi / 2 - angle) * angle.cos()) / math.pi,
        "exp": (0.5 * (nx**2 + ny**2) + dot).exp(),
        "cos": (-0.5 * (nx**2 + ny**2)).exp() * dot.cosh(),
    }
    for name, want in closed.items():
        got = feature_map(name, dim=D, num_features=4, kernel_epsilon=0.0).kernel_matrix(x, y)
        torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)


def test_calibration_is_exact_whatever_the_statistics():
    """Centring and basis change only the variance: even absurd statistics leave the kernel where it was."""
    count = 4000
    x, y = points()
    phi = feature_map("calibrated", dim=D, num_features=8, num_heads=count, seed=0).double()
    g = torch.Generator().manual_seed(5)
    m = 0.2 * torch.randn(D, D, dtype=torch.float64, generator=g) + torch.eye(D, dtype=torch.float64)
    phi.centre_query.copy_(0.3 * torch.randn(D, generator=g))
    phi.centre_key.copy_(0.3 * torch.randn(D, generator=g))
    phi.basis_query.copy_(m)
    phi.basis_key.copy_(torch.linalg.inv(m).mT)
    phi.a.copy_(-0.1 * torch.rand(D, generator=g))
    samples = kernel_estimate(phi, x.expand(count, -1, -1), y.expand(count, -1, -1))
    check_mean(samples, phi.kernel_matrix(x, y), detect=0.2)
    phi.centre_key.mul_(1.3)  # a row factor that no longer matches the centre
    centre = phi.centre_key.clone()
    wrong = samples * (0.3 * (x @ centre[0])[:, None]).exp()
    with pytest.raises(AssertionError):
        check_mean(wrong, phi.kernel_matrix(x, y), detect=0.2)


def test_calibration_lowers_the_error_of_attention_on_shifted_anisotropic_data():
    g = torch.Generator().manual_seed(0)
    d = 16
    spread = torch.linspace(1.0, 0.1, d, dtype=torch.float64)

    def draw(n):
        q = torch.randn(1, 1, n, d, dtype=torch.float64, generator=g) * spread * 0.5 + 0.5
        k = torch.randn(1, 1, n, d, dtype=torch.float64, generator=g) * spread.flip(0) - 0.4
        return q, k

    q, k = draw(400)
    x, y = draw(200)
    v = torch.randn(1, 1, 200, 8, dtype=torch.float64, generator=g)
    exact = (x @ y.mT).softmax(-1) @ v
    error = {}
    for name in ("positive", "optimal", "calibrated"):
        runs = []
        for seed in range(8):
            phi = feature_map(name, dim=d, num_features=64, seed=seed).double().calibrate_(q, k)
            w = kernel_estimate(phi, x, y)
            runs.append(((w / w.sum(-1, keepdim=True)) @ v - exact).norm() / exact.norm())
        error[name] = torch.stack(runs).mean()
    assert error["calibrated"] < 0.5 * error["positive"]
    assert error["calibrated"] < error["optimal"]


@pytest.mark.parametrize("size", [0.5, 5.0, 6.0, 9.0])
def test_the_kernel_of_exponentials_is_exact_at_every_length(size):
    """E[(e^(w.x) + eps)(e^(w.y) + eps)], the mass of which lies near |w| = |x + y|: far from the origin at size 9."""
    x = torch.tensor([[size, 0.0], [0.0, size]], dtype=torch.float64)
    eps = 0.5
    sums = (x[:, None] + x[None]).square().sum(-1)
    expected = torch.exp(sums / 2) + 2 * eps * math.exp(size**2 / 2) + eps**2
    found = feature_map("exp", 2, 4, kernel_epsilon=eps).double().kernel_matrix(x, x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
    # On the diagonal it is an integral over a line.
    w = torch.linspace(-12, 2 * size + 12, 4001, dtype=torch.float64)
    density = torch.exp(-0.5 * w.square()) / math.sqrt(2 * math.pi)
    integral = torch.trapezoid(((size * w).exp() + eps).square() * density, w)
    torch.testing.assert_close(found[0, 0], integral, rtol=1e-10, atol=0.0)
