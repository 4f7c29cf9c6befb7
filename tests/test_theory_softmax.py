"""Closed forms of the softmax and Gaussian estimators against few-line Monte Carlo estimators."""

from __future__ import annotations

import math

import pytest
import torch
from stats import check_mean, check_mse, check_mse_at_most

from bochner import feature_map, kernel_estimate, theory
from bochner._checks import BochnerError
from bochner.moments import second_moment_of_sum

X = torch.tensor([[0.3, -0.2, 0.4, 0.1], [0.1, 0.5, -0.3, 0.2], [0.4, 0.0, 0.2, -0.3]], dtype=torch.float64)
Y = torch.tensor([[0.2, 0.1, -0.1, 0.3], [0.2, 0.3, 0.1, 0.0], [-0.3, 0.4, 0.1, 0.2]], dtype=torch.float64)
D = X.shape[-1]
M = 4
SM = torch.exp((X * Y).sum(-1))
GAUSS = torch.exp(-(X - Y).square().sum(-1) / 2)
LAMBDA = torch.exp(-(X.square().sum(-1) + Y.square().sum(-1)) / 2)
KERNELS = {"softmax": SM, "gaussian": GAUSS}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal(draws: int, m: int, seed: int = 0) -> torch.Tensor:
    """Blocks of Haar rows with chi norms."""
    blocks = -(-m // D)
    q, r = torch.linalg.qr(normal(draws, blocks, D, D, seed=seed))
    q = q * torch.diagonal(r, dim1=-2, dim2=-1).sign()[..., None, :]
    w = q.mT * normal(draws, blocks, D, D, seed=seed + 1).norm(dim=-1, keepdim=True)
    return w.reshape(draws, blocks * D, D)[:, :m]


def draw(projection: str, draws: int = 200_000, m: int = M, seed: int = 0) -> torch.Tensor:
    return orthogonal(draws, m, seed) if projection == "orthogonal" else normal(draws, m, D, seed=seed)


def trig(w: torch.Tensor) -> torch.Tensor:
    return torch.cos(w @ (X - Y).T).mean(-2) / LAMBDA


def positive(w: torch.Tensor) -> torch.Tensor:
    return torch.exp(w @ (X + Y).T).mean(-2) * LAMBDA


def hyperbolic(w: torch.Tensor) -> torch.Tensor:
    return torch.cosh(w @ (X + Y).T).mean(-2) * LAMBDA


def regularized(w: torch.Tensor) -> torch.Tensor:
    return positive(w / w.norm(dim=-1, keepdim=True) * math.sqrt(D))


def dense(w: torch.Tensor, a: torch.Tensor, U: torch.Tensor) -> torch.Tensor:
    weight = torch.prod(1 - 4 * a).sqrt() * torch.exp(2 * (w.square() * a).sum(-1))
    return (weight[..., None] * torch.exp((w * (1 - 4 * a).sqrt()) @ U.T @ (X + Y).T)).mean(-2) * LAMBDA


@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
@pytest.mark.parametrize("projection", ["iid", "orthogonal"])
@pytest.mark.parametrize("name", ["trig", "positive", "hyperbolic"])
def test_errors_equal_their_closed_form(name: str, projection: str, kernel: str) -> None:
    truth = KERNELS[kernel]
    samples = {"trig": trig, "positive": positive, "hyperbolic": hyperbolic}[name](draw(projection)) * truth / SM
    mse = getattr(theory, f"mse_{name}")(X, Y, M, kernel=kernel, projection=projection)
    check_mean(samples, truth, detect=0.05)
    check_mse(samples, truth, mse, detect=0.2)


@pytest.mark.parametrize("m", [1, 3, 6, 8])
def test_orthogonal_blocks_and_remainders_are_counted(m: int) -> None:
    w = draw("orthogonal", m=m)
    check_mse(positive(w), SM, theory.mse_positive(X, Y, m, projection="orthogonal"), detect=0.2)
    check_mse(trig(w), SM, theory.mse_trig(X, Y, m, projection="orthogonal"), detect=0.2)


@pytest.mark.parametrize("scale", [2.0, 5.0])
def test_orthogonal_trig_error_holds_far_apart(scale: float) -> None:
    # Beyond |x - y| = 1 the closed form leaves its series for Kummer's transformation.
    samples = torch.cos(draw("orthogonal") @ (scale * (X - Y)).T).mean(-2)
    truth = torch.exp(-(scale * (X - Y)).square().sum(-1) / 2)
    mse = theory.mse_trig(scale * X, scale * Y, M, kernel="gaussian", projection="orthogonal")
    check_mse(samples, truth, mse, detect=0.1)


@pytest.mark.parametrize("projection", ["iid", "orthogonal"])
def test_optimal_features_have_their_error(projection: str) -> None:
    w, A = draw(projection), -0.08
    a = torch.full((D,), A, dtype=torch.float64)
    samples = dense(w, a, torch.eye(D, dtype=torch.float64))
    check_mean(samples, SM)
    check_mse(samples, SM, theory.mse_optimal(X, Y, M, A, projection=projection), detect=0.1)


def test_dense_features_have_their_error() -> None:
    a, U = theory.dense_a(second_moment_of_sum(X, Y))
    samples = dense(draw("iid"), a, U)
    check_mean(samples, SM)
    check_mse(samples, SM, theory.mse_dense(X, Y, M, a, U), detect=0.1)


@pytest.mark.parametrize("projection", ["iid", "orthogonal"])
def test_regularized_features_have_their_mean_and_error(projection: str) -> None:
    samples = regularized(draw(projection))
    mean = SM * theory.regularized_ratio(X, Y)
    check_mean(samples, mean, detect=0.02)
    variance, error = (theory.mse_regularized(X, Y, M, projection=projection, about=a) for a in ("mean", "kernel"))
    check_mse(samples, mean, variance, detect=0.1)
    check_mse(samples, SM, error, detect=0.1)
    torch.testing.assert_close(error, variance + (mean - SM).square())


def test_orthogonal_gap_is_the_difference_of_the_errors() -> None:
    gap = theory.mse_positive(X, Y, M) - theory.mse_positive(X, Y, M, projection="orthogonal")
    assert torch.allclose(gap, theory.orthogonal_gap(X, Y, M))
    for scale in [1e-3, 0.1, 1.0, 3.0]:
        x, y = scale * X, scale * Y
        assert (theory.orthogonal_gap_bound(x, y, M) <= theory.orthogonal_gap(x, y, M) * (1 + 1e-9)).all()
        assert (theory.orthogonal_gap(x, y, M) <= theory.mse_positive(x, y, M)).all()


def test_orthogonal_gap_agrees_with_kummers_function() -> None:
    from scipy.special import hyp1f1

    lam = (X + Y).square().sum(-1).numpy()
    product = LAMBDA.numpy() ** 2 * hyp1f1(D, D / 2, lam / 2)
    gap = (1 - 1 / M) * (SM.numpy() ** 2 - product)
    assert torch.allclose(theory.orthogonal_gap(X, Y, M), torch.from_numpy(gap), rtol=1e-10)


def test_orthogonal_bound_is_respected_by_samples() -> None:
    bound = theory.mse_positive(X, Y, M) - theory.orthogonal_gap_bound(X, Y, M)
    check_mse_at_most(positive(draw("orthogonal")), SM, bound, detect=0.2)


@pytest.mark.parametrize("d", [1, 2, 16, 256])
def test_regularized_ratio_lies_between_its_bounds_and_one(d: int) -> None:
    x = normal(20, d, seed=d)
    x = x / x.norm(dim=-1, keepdim=True) * torch.linspace(0, 3, 20, dtype=torch.float64)[:, None]
    ratio = theory.regularized_ratio(x, x)
    assert (ratio <= 1).all()
    assert (ratio > 0).all()
    for method in ["jensen", "theorem1"]:
        assert (theory.regularized_ratio_bound(x, x, method=method) <= ratio * (1 + 1e-12)).all()


def test_regularized_ratio_is_the_series_of_the_paper() -> None:
    x = torch.tensor([0.9, -0.4, 0.3], dtype=torch.float64)
    u, d = 2 * float(x @ x), 3
    total, term = 0.0, math.exp(-u)
    for k in range(60):
        total += term
        term *= u / (k + 1) * d / (d + 2 * k)
    assert theory.regularized_ratio(x, x).item() == pytest.approx(total, rel=1e-13)


@pytest.mark.parametrize("projection", ["iid", "orthogonal"])
def test_tail_bound_holds_and_is_not_trivial(projection: str) -> None:
    samples = regularized(draw(projection, draws=100_000))
    threshold = 1.5 * SM * theory.regularized_ratio(X, Y)
    bound = theory.regularized_tail_bound(X, Y, threshold, M, projection=projection)
    # P[exceed] is the mean square of an indicator about zero.
    check_mse_at_most((samples > threshold).double(), 0.0, bound)
    assert (bound < 0.9).all()


def test_orthogonal_tail_bound_is_below_the_iid_one() -> None:
    threshold = 1.6 * SM
    iid = theory.regularized_tail_bound(X, Y, threshold, M)
    assert (theory.regularized_tail_bound(X, Y, threshold, M, projection="orthogonal") < iid).all()


def test_one_orthogonal_projection_is_one_independent_projection() -> None:
    threshold = 1.4 * SM
    one = [theory.regularized_tail_bound(X, Y, threshold, 1, projection=p) for p in ["iid", "orthogonal"]]
    assert torch.allclose(*one, rtol=1e-9)


def test_tail_bound_is_zero_above_the_largest_value() -> None:
    x = X[0]
    top = torch.exp(math.sqrt(D) * (2 * x).norm() - x @ x)
    assert theory.regularized_tail_bound(x, x, 1.01 * top, M).item() == 0.0
    assert theory.regularized_tail_bound(x, x, 0.9 * top, M).item() > 0.0


@pytest.mark.parametrize("name", ["trig", "positive", "hyperbolic", "optimal", "dense"])
@pytest.mark.parametrize("projection", ["iid", "orthogonal"])
def test_features_needed_is_the_least_count(name: str, projection: str) -> None:
    if (name, projection) == ("dense", "orthogonal"):
        with pytest.raises(BochnerError, match="no closed form"):
            theory.features_needed(X, Y, 0.1, map=theory.Estimator("dense", a=torch.zeros(D)), projection="orthogonal")
        return
    options: dict = {"map": name, "projection": projection}
    if name == "optimal":
        options["map"] = theory.Estimator(name, A=-0.05)
    if name == "dense":
        options["map"] = theory.Estimator(name, a=torch.full((D,), -0.05))
    for target in [2.0, 0.3, 0.01]:
        m = theory.features_needed(X, Y, target, **options)
        assert (theory.relative_error(X, Y, m, **options) <= target * (1 + 1e-12)).all()
        fewer = m > 1
        assert (theory.relative_error(X, Y, (m - 1).clamp(min=1), **options)[fewer] > target).all()


def test_features_needed_in_absolute_terms() -> None:
    m = theory.features_needed(X, Y, 0.05, relative=False, kernel="gaussian")
    assert (theory.mse_positive(X, Y, m, kernel="gaussian") <= 0.05**2).all()
    assert (theory.mse_positive(X, Y, m - 1, kernel="gaussian") > 0.05**2).all()


def test_features_needed_is_infinite_below_a_bias() -> None:
    assert torch.isinf(theory.features_needed(X[0], X[0], 1e-4, map="regularized"))


@pytest.mark.parametrize(("d", "radius", "eps"), [(4, 0.8, 0.3), (8, 1.2, 0.25), (8, 0.6, 0.2)])
def test_the_uniform_planner_is_enough_at_any_length(d: int, radius: float, eps: float) -> None:
    """Theorem 4 of Performers, simulated: the largest error over all pairs of 50 and of 400 rows stays below eps."""
    m = theory.features_uniform(d, radius, eps)
    g = torch.Generator().manual_seed(d)
    worst = {}
    for rows in (50, 400):
        rows_of = torch.nn.functional.normalize(torch.randn(2, rows, d, generator=g, dtype=torch.float64), dim=-1)
        x, y = radius * d**-0.25 * rows_of  # the norm is that before scaling
        phi = feature_map("trig", dim=d, num_features=m, projection="orthogonal", seed=rows).double()
        worst[rows] = max(
            float((kernel_estimate(phi.redraw_(seed), x, y) - (x @ y.mT).exp()).abs().max()) for seed in range(5)
        )
        assert worst[rows] <= eps
    # The law is not tight: a tenth of the features is enough as well, a five-hundredth is not.
    for share, enough in ((10, True), (500, False)):
        phi = feature_map("trig", dim=d, num_features=max(1, m // share), projection="orthogonal", seed=0).double()
        found = float((kernel_estimate(phi, x, y) - (x @ y.mT).exp()).abs().max())
        assert (found <= eps) == enough, (share, found)


def test_the_uniform_planner_scales_as_theorem_4_says() -> None:
    one, two = (theory.features_uniform(16, 2.0, eps) for eps in (0.3, 0.15))
    assert 4 < two / one < 5.5  # 1 / eps^2, and a logarithm
    assert 0.49 < theory.features_uniform(16, 2.0, 0.3, constant=0.5) / one < 0.51
    assert theory.features_uniform(16, 3.0, 0.3) / one == pytest.approx(math.exp(2 * (9 - 4) / 4), rel=0.5)


def test_optimal_A_minimises_the_error() -> None:
    x = 1.5 * X[0]
    best = theory.optimal_A(4 * (x @ x), D)
    e = theory.log_mse(x, x, M, map=theory.Estimator("optimal", A=best))
    for step in [-1e-3, 1e-3]:
        assert theory.log_mse(x, x, M, map=theory.Estimator("optimal", A=best + step)) > e
    assert best < 0
    assert theory.optimal_A(1e-12, 1).item() == pytest.approx(-5e-13, rel=1e-6)


def test_dense_a_minimises_the_mean_log_second_moment_in_each_direction() -> None:
    x, y = 2 * normal(50, D, seed=3) @ torch.diag(torch.tensor([1.5, 1.0, 0.3, 0.1]).double()), normal(40, D, seed=4)
    C = second_moment_of_sum(x, y)
    z = (x[:, None] + y).reshape(-1, D)
    assert torch.allclose(C, z.T @ z / len(z))
    a, U = theory.dense_a(C)

    def objective(t: torch.Tensor) -> torch.Tensor:
        return (torch.log(1 - 4 * t) - torch.log(1 - 8 * t) / 2 + (z @ U).square().mean(0) / (1 - 8 * t)).sum()

    t = a.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(objective(t), t)
    assert gradient.abs().max() < 1e-9


@pytest.mark.parametrize("name", ["trig", "positive", "hyperbolic", "optimal", "regularized"])
@pytest.mark.parametrize("projection", ["iid", "orthogonal"])
@pytest.mark.parametrize("norm", [0.0, 1e-6, 1e-3, 1.0, 1e3])
def test_logarithms_are_finite_at_every_norm(name: str, projection: str, norm: float) -> None:
    for y in [Y, X, -X]:
        value = theory.log_mse(norm * X, norm * y, 64, map=theory.Estimator(name, A=-0.1), projection=projection)
        assert not torch.isnan(value).any()
        assert (value < math.inf).all()
        if norm == 1e-6 and y is Y and name == "positive":
            lam = (norm * (X + Y)).square().sum(-1)
            assert torch.allclose(value.exp() * 64, lam, rtol=1e-6)


def test_small_errors_keep_their_digits() -> None:
    x, y = 1e-5 * X, 1e-5 * Y
    delta = (x - y).square().sum(-1)
    assert torch.allclose(theory.mse_trig(x, y, 1), delta**2 / 2, rtol=1e-6)
    lam = (x + y).square().sum(-1)
    expected = lam**2 / 2 * (1 / M - (1 - 1 / M) / (D + 2))
    assert torch.allclose(theory.mse_hyperbolic(x, y, M, projection="orthogonal"), expected, rtol=1e-6)


def test_batches_broadcast_and_gradients_flow() -> None:
    out = theory.mse_positive(X[:, None], Y[None], 8)
    assert out.shape == (3, 3)
    assert torch.allclose(out.diagonal(), theory.mse_positive(X, Y, 8))
    assert theory.mse_positive(X.float(), Y.float(), 8).dtype == torch.float64
    x = X.clone().requires_grad_()
    for name in ["trig", "positive", "hyperbolic", "regularized"]:
        for projection in ["iid", "orthogonal"]:
            assert torch.autograd.gradcheck(
                lambda t, n=name, p=projection: theory.log_mse(t, Y, 4, map=n, projection=p), (x,)
            )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theory.mse_positive(X, Y[:, :3], 4), "last dimension"),
        (lambda: theory.mse_positive(X, Y, 0), "num_features"),
        (lambda: theory.mse_positive(X, Y, 2.5), "whole"),
        (lambda: theory.mse_positive(X.long(), Y, 4), "floating-point"),
        (lambda: theory.mse_positive(X / 0, Y, 4), "finite"),
        (lambda: theory.mse_positive(X, Y, 4, kernel="rbf"), "softmax"),
        (lambda: theory.log_mse(X, Y, 4, map="relu"), "trig"),
        (lambda: theory.log_mse(X, Y, 4, projection="sobol"), "orthogonal"),
        (lambda: theory.mse_optimal(X, Y, 4, 0.2), "1/8"),
        (lambda: theory.log_mse(X, Y, 4, map="dense"), "'a'"),
        (lambda: theory.features_needed(X, Y, 0.0), "target"),
        (lambda: theory.regularized_tail_bound(X, Y, 2.0, 5, projection="orthogonal"), "at most d = 4"),
        (lambda: theory.optimal_A(-1.0, 3), "negative"),
        (lambda: theory.dense_a(X), "d, d"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, words: str) -> None:
    with pytest.raises(BochnerError, match=words) as error:
        call()
    assert "\n" not in str(error.value)
