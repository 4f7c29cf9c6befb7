"""Linearised layers and blocks: the mean and variance they claim, the targets they reach, the refusals they owe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stats import check_mean, check_mse, check_mse_at_most
from torch import Tensor, nn

from bochner._checks import BochnerError
from bochner.papers.polyfit import ACTIVATIONS
from bochner.papers.sketched_layer import (
    LinearizedLayer,
    calibrate_layer,
    plan_layer,
)
from bochner.papers.taylor_layer import TAYLOR, TaylorComposition, series_for
from bochner.theory import geometric_law, mse_tensor_sketch, poisson_law, variance_taylor


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


W, B, CALIBRATION = rows(3, 2, seed=1) / 2, rows(3, seed=2) / 4, rows(100, 2, seed=3) / 2
DATA = calibrate_layer(W, B, CALIBRATION)
POINTS = torch.tensor([[0.4, -0.3], [0.1, 0.6]], dtype=torch.float64)


def redraws(layer: Any, x: Tensor, count: int) -> Tensor:
    with torch.no_grad():
        return torch.stack([layer.redraw_(seed)(x) for seed in range(count)])


@pytest.mark.parametrize("method", ["bernstein", pytest.param("chebyshev", marks=pytest.mark.slow), "least_squares"])
def test_layer_has_its_polynomial_as_mean_and_its_variance(method: str) -> None:
    layer = LinearizedLayer(DATA, "gelu", method=method, degree=3, num_features=24)
    mean = layer.polynomial(POINTS)
    t = POINTS @ W.mT + B
    torch.testing.assert_close(mean, layer.fit(t), rtol=1e-5, atol=1e-5)
    # One estimator for all methods, which only choose its coefficients: only one of them needs power for the variance.
    count, detect = (9000, 0.45) if method == "chebyshev" else (1000, None)
    samples = redraws(layer, POINTS, count)
    check_mean(samples, mean, scale=0.3, detect=0.02)
    if detect is not None:
        check_mse(samples, mean, layer.variance(POINTS), detect=detect)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, torch.sin, nn.GELU(), nn.SiLU()])
def test_any_activation_is_followed_closely_by_enough_features(activation: Any) -> None:
    layer = LinearizedLayer(DATA, activation, degree=4, num_features=20_001)
    exact = activation(POINTS @ W.mT + B) if callable(activation) else ACTIVATIONS[activation](POINTS @ W.mT + B)
    assert (layer(POINTS) - exact).abs().max() < (0.1 if activation == "relu" else 0.05)


def test_balancing_lowers_the_variance() -> None:
    w, x = rows(6, 4) * torch.tensor([4.0, 1.0, 0.2, 0.1]), rows(300, 4, seed=1) * torch.tensor([0.1, 0.3, 1.0, 4.0])
    plans = [
        plan_layer(calibrate_layer(w, None, x, balance=balance), "gelu", degree=3, num_features=64)[0]
        for balance in (True, False)
    ]
    assert plans[0].variance < plans[1].variance / 3
    assert plans[0].bias == pytest.approx(plans[1].bias)


def test_plan_for_a_target_reaches_it() -> None:
    x, eps = CALIBRATION / 2, 0.05
    layer = LinearizedLayer(calibrate_layer(W, B, x), "gelu", eps=eps)
    plan = layer.plan
    assert plan.bias <= eps / 2
    assert plan.variance <= eps / 2
    exact = nn.functional.gelu(x @ W.mT + B)
    assert ((layer.polynomial(x) - exact).square().sum(-1) <= plan.bias * (1 + 1e-4) + 1e-9).all()
    assert (layer.variance(x).sum(-1) <= plan.variance * (1 + 1e-6)).all()
    samples = redraws(layer, x[:2], 200)
    check_mse_at_most((samples - exact[:2]).norm(dim=-1), 0.0, eps, detect=0.05)


def test_bernstein_needs_a_much_higher_degree_than_chebyshev_for_the_same_target() -> None:
    data = calibrate_layer(6 * W, B, CALIBRATION)
    degree = [plan_layer(data, "gelu", method=m, eps=0.05)[0].degree for m in ("bernstein", "chebyshev")]
    assert degree[0] >= 4 * degree[1]


def test_budget_is_spent_exactly_and_more_of_it_never_hurts() -> None:
    errors = []
    for budget in (1, 7, 100, 1000, 10_000):
        plan, _ = plan_layer(DATA, "gelu", num_features=budget)
        assert plan.total in (0, budget)
        assert len(plan.counts) == plan.degree - 1
        errors.append(plan.bias + plan.variance)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 5


def test_linear_activation_needs_no_features_and_is_exact() -> None:
    layer = LinearizedLayer(DATA, lambda t: 2 * t - 1, num_features=64)
    assert layer.plan.total == 0
    torch.testing.assert_close(layer(POINTS), 2 * (POINTS @ W.mT + B) - 1, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["layer", "taylor"])
def test_gradients_seeds_and_redraw(kind: str) -> None:
    def build(seed: int) -> Any:
        if kind == "taylor":
            return TaylorComposition(W, B, "gelu", CALIBRATION, draws=3, num_features=8, seed=seed)
        return LinearizedLayer(DATA, "gelu", degree=3, num_features=9, seed=seed)

    a, b = build(1), build(2)
    x = POINTS.clone().requires_grad_()
    assert torch.autograd.gradcheck(a, (x,))
    assert not torch.equal(a(x), b(x))
    assert torch.equal(build(1)(x), a(x))
    assert not torch.equal(b.redraw_(seed=5)(x), a(x))
    assert torch.equal(a.redraw_(seed=5)(x), b(x))


def test_shapes_and_dtypes_follow_the_input() -> None:
    layer = LinearizedLayer(calibrate_layer(W, None, CALIBRATION), "silu", degree=2, num_features=16)
    x = rows(2, 5, 2).bfloat16() / 2
    assert layer(x).shape == (2, 5, 3)
    assert layer(x).dtype == torch.bfloat16
    torch.testing.assert_close(layer(x).double(), layer(x.double()), rtol=1e-2, atol=1e-2)


def block(d: int, hidden: int, scale: float, bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    first, second = nn.Linear(d, hidden, bias=bias), nn.Linear(hidden, d, bias=bias)
    with torch.no_grad():
        first.weight.copy_(rows(hidden, d, seed=4) * scale)
        second.weight.copy_(rows(d, hidden, seed=5) / hidden**0.5)
    return first, second


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("method", ["bernstein", "chebyshev", "least_squares"])
def test_block_is_the_second_layer_after_the_linearised_first(method: str, bias: bool) -> None:
    first, second = block(3, 10, 0.3, bias)
    x = rows(200, 3)
    options: dict[str, Any] = {"method": method, "degree": 3, "num_features": 40, "seed": 3}
    data = calibrate_layer(first.weight, first.bias, x)
    mlp, hidden = (LinearizedLayer(data, "gelu", second=layer, **options) for layer in (second, None))
    with torch.no_grad():
        torch.testing.assert_close(mlp(x.float()), second(hidden(x.float())), rtol=1e-4, atol=1e-4)


def test_squares_earn_their_place_in_a_wide_block_of_short_inputs() -> None:
    first, second = block(16, 4096, 0.1)
    x = rows(2500, 16).float()
    data = calibrate_layer(first.weight, first.bias, x)
    with torch.no_grad():
        exact = second(nn.functional.gelu(first(x)))
        errors = [
            float((LinearizedLayer(data, "gelu", second=second, method="least_squares", **size)(x) - exact).norm())
            for size in ({"degree": 1, "num_features": 1}, {"degree": 2, "num_features": 256})
        ]
    assert errors[1] < errors[0] < 0.5 * float((exact - exact.mean(0)).norm())


def test_taylor_composition_of_gelu_is_unbiased_with_its_variance() -> None:
    layer = TaylorComposition(W, B, "gelu", CALIBRATION, draws=8, num_features=16)
    exact = nn.functional.gelu(POINTS @ W.mT + B)
    samples = redraws(layer, POINTS, 2500)
    check_mean(samples, exact, scale=0.2, detect=0.05)
    check_mse(samples, exact, layer.variance(POINTS), detect=0.48)


def test_taylor_variance_is_the_one_of_the_theory() -> None:
    layer = TaylorComposition(W, None, [0.0, 0.0, 1.0, -0.5, 0.2], CALIBRATION, draws=4, num_features=8)
    for x in POINTS:
        for w, ours in zip(layer.weight.double(), layer.variance(x[None])[0], strict=True):
            each = [torch.zeros(())] * 2 + [mse_tensor_sketch(w, x, 8, k) for k in (2, 3, 4)]
            variances = torch.stack([v.double() for v in each])
            theory = variance_taylor(float(w @ x), layer.coefficients, layer.probabilities, variances, draws=4)
            torch.testing.assert_close(ours, theory)


def test_the_optimal_law_has_the_least_variance_and_averaging_divides_it() -> None:
    layer = TaylorComposition(W, B, "gelu", CALIBRATION, draws=1, num_features=16)
    own, size = layer.probabilities, len(layer.probabilities)
    variance = float(layer.variance(CALIBRATION).mean())
    for law in (geometric_law(0.5, size), poisson_law(2.0, size)):
        p = torch.where(own > 0, law, 0.0)
        layer.probabilities = p / p.sum()
        assert variance < float(layer.variance(CALIBRATION).mean())
    many = TaylorComposition(W, B, "gelu", CALIBRATION, draws=10, num_features=16)
    assert float(many.variance(CALIBRATION).mean()) == pytest.approx(variance / 10)


def test_geometric_index_has_mean_one_over_rho_less_one() -> None:
    p = geometric_law(0.3, 400)
    assert float((p * torch.arange(400)).sum()) == pytest.approx(1 / 0.3 - 1)  # the document says 1/rho + 1


@pytest.mark.parametrize("name", TAYLOR)
def test_taylor_series_sum_to_their_function(name: str) -> None:
    t = torch.linspace(-1, 1, 11, dtype=torch.float64)
    a = series_for(name, 1.0, "test")
    function = torch.exp if name == "exp" else ACTIVATIONS[name]
    torch.testing.assert_close((a * t[:, None] ** torch.arange(len(a))).sum(-1), function(t), rtol=0, atol=1e-8)


def test_bad_arguments_are_one_sentence() -> None:
    with pytest.raises(BochnerError, match="Taylor series"):
        TaylorComposition(W, B, "relu", CALIBRATION)
    with pytest.raises(BochnerError, match="those of an arbitrary function are not known"):
        TaylorComposition(W, B, torch.sin, CALIBRATION)  # type: ignore[arg-type]
    with pytest.raises(BochnerError, match="needs more than 200 terms"):
        TaylorComposition(40 * W, B, "gelu", CALIBRATION)
    with pytest.raises(BochnerError, match=r"useless for this layer: at \|w\|\|x\| ="):
        TaylorComposition(torch.tensor([[1e9, 0.1]]), None, "gelu", torch.tensor([[0.0, 10.0], [0.0, -5.0]]))
    with pytest.raises(BochnerError, match="interval of unit 1 has zero width"):
        calibrate_layer(W * torch.tensor([[1.0], [0.0], [1.0]]), B, CALIBRATION)
    with pytest.raises(BochnerError, match=r"'degree' of plan_layer must be a positive int, got 0"):
        LinearizedLayer(DATA, "gelu", degree=0)
    with pytest.raises(BochnerError, match="use another method"):
        LinearizedLayer(DATA, "gelu", method="bernstein", eps=1e-6)
    with pytest.raises(BochnerError, match="is not reached"):
        LinearizedLayer(DATA, "relu", eps=1e-8)
    with pytest.raises(BochnerError, match="either a target 'eps' or a budget"):
        LinearizedLayer(DATA, "gelu", eps=0.1, num_features=8)
    with pytest.raises(BochnerError, match=r"'weight' .* must be \(o, d\)"):
        calibrate_layer(W, B, rows(10, 5))
    first, _ = block(3, 8, 1.0)
    with pytest.raises(BochnerError, match="do not fit"):
        LinearizedLayer(calibrate_layer(first.weight, None, rows(20, 3)), "gelu", second=first)
