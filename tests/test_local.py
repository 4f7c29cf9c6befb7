"""Local masks: unbiased for the mask they name, with their error, alone and times any attention map."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import mpmath
import pytest
import torch
from stats import check_mean, check_mse, check_mse_at_most
from torch import Tensor

from bochner._checks import BochnerError
from bochner.attention import linear_attention
from bochner.maps.base import FeatureMap
from bochner.maps.exponential import CalibratedFeatures, HyperbolicFeatures, PositiveFeatures, TrigFeatures
from bochner.maps.local import (
    L1BallProjection,
    LocalGaussianFeatures,
    LocalL1Features,
    LocalLaplaceFeatures,
    ProductFeatures,
    l1_ball_spectrum,
    mollified_l1_ball,
    with_positions,
)
from bochner.maps.polynomial import SumPolyFeatures, TensorSketchFeatures
from bochner.theory import mse_local_gaussian, mse_local_laplace

MAPS: dict[str, Any] = {
    "local_l1": LocalL1Features,
    "local_laplace": LocalLaplaceFeatures,
    "local_gaussian": LocalGaussianFeatures,
}


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def offsets(d: int) -> Tensor:
    """Position differences inside, near the edge of and outside the unit ball."""
    direction = torch.linspace(1, 2, d, dtype=torch.float64)
    return torch.tensor([0.0, 0.4, 0.9, 1.5], dtype=torch.float64)[:, None] * direction / direction.sum()


def single_draws(phi: FeatureMap, x: Tensor, y: Tensor) -> Tensor:
    """The estimates of K(x_i, y_i) by each of the m frequencies alone, iid ones: (m, pairs)."""
    q, k, m = phi(x), phi(y, "key"), phi.num_features
    each = (q.values * k.values).unflatten(-1, (-1, m)).sum(-2)
    return (m * each * (q.log_scale + k.log_scale).exp()).mT


def residues(w: Iterable[Any], dps: int) -> float:
    """The spectrum by residues, a divided difference, in `dps` digits."""
    with mpmath.workdps(dps):
        x = [mpmath.mpf(v) for v in w]
        total = mpmath.mpf(0)
        for k, a in enumerate(x):
            s = mpmath.mpc(0, a)
            others = mpmath.fprod(s**2 + b**2 for j, b in enumerate(x) if j != k)
            total += 2 * mpmath.re((2 * s) ** len(x) * mpmath.exp(s) / (2 * s**2 * others))
        return float(total)


@pytest.mark.parametrize("d", [1, 2, 3, 4, 6])
def test_spectrum_is_the_sum_of_residues(d: int) -> None:
    w = 10 * rows(20, d)
    exact = torch.tensor([residues(row.tolist(), 60) for row in w], dtype=torch.float64)
    torch.testing.assert_close(l1_ball_spectrum(w), exact, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("gap", [0.0, 1e-12, 1e-8, 1e-5])
def test_spectrum_is_stable_where_frequencies_coincide(gap: float) -> None:
    w = torch.tensor([3.0, 3.0 + gap, -3.0 + gap, 5.0], dtype=torch.float64)
    with mpmath.workdps(120):  # the residues need distinct frequencies
        apart = [mpmath.mpf(v) + e for v, e in zip(w.tolist(), (0, 1e-30, 2e-30, 0), strict=True)]
    exact = residues(apart, 120)
    assert abs(l1_ball_spectrum(w).item() - exact) < 1e-12 * (2**4 / math.factorial(4))
    if gap > 0:
        assert (
            abs(residues(w.tolist(), 15) - exact) > 1e-7 or gap == 1e-5
        )  # the plain formula in double precision is not


def test_spectrum_at_zero_is_the_volume() -> None:
    for d in (1, 2, 4, 7):
        assert l1_ball_spectrum(torch.zeros(d)).item() == pytest.approx(2**d / math.factorial(d), rel=1e-12)


@pytest.mark.parametrize("d", [1, 2, 3, 4])
def test_mollified_ball_is_the_probability_of_staying_inside(d: int) -> None:
    r, s = offsets(d), 0.15
    noise = s * rows(200_000, d)
    inside = ((r[:, None] + noise).abs().sum(-1) <= 1).double().mT
    check_mean(inside, mollified_l1_ball(3 * r, 3.0, 3 * s), scale=0.2)


@pytest.mark.parametrize("d", [1, 2, 4])
def test_l1_mask_is_unbiased_for_the_mollified_mask(d: int) -> None:
    r = 2 * offsets(d)
    phi = LocalL1Features(d, 200_000, delta=2.0)
    x, y = r + 0.5, torch.full_like(r, 0.5)
    truth = torch.diagonal(phi.kernel_matrix(x, y))
    samples = single_draws(phi, x, y)
    check_mean(samples, truth, scale=1.0, detect=0.15)
    check_mse_at_most(samples, truth, phi.num_features * phi.error_bound() ** 2)


def test_l1_mask_needs_many_times_more_features_in_four_dimensions() -> None:
    second = [L1BallProjection(d, 20_000, smooth=1 / (2 * d + 2)).importance.square().mean().item() for d in (1, 2, 4)]
    # Features for a root mean squared error of 0.1: a hundred times these, about 180, 370 and 2,300.
    assert second[0] < 2.5 < second[1] < 6 < 15 < second[2] < 35


def test_the_discontinuous_mask_has_no_finite_variance() -> None:
    second = [L1BallProjection(2, 4000, smooth=s).importance.square().mean().item() for s in (0.1, 0.03, 0.01)]
    assert second[0] < second[1] / 1.5 < second[2] / 2.5  # grows without bound as the mollifier goes


@pytest.mark.parametrize("d", [1, 2, 4])
def test_laplace_mask_is_unbiased_with_its_mse(d: int) -> None:
    x, y = offsets(d)[1:] + 3.0, torch.full((3, d), 3.0, dtype=torch.float64)
    phi = LocalLaplaceFeatures(d, 100_000, delta=1.5)
    truth = torch.diagonal(phi.kernel_matrix(x, y))
    samples = single_draws(phi, x, y)
    check_mean(samples, truth)
    check_mse(samples, truth, mse_local_laplace(x, y, 1, delta=1.5))


@pytest.mark.parametrize("d", [1, 2, 4])
def test_gaussian_mask_is_unbiased_with_its_mse(d: int) -> None:
    x, y = 2 * offsets(d)[1:], torch.zeros(3, d, dtype=torch.float64)
    phi = LocalGaussianFeatures(d, 200_000, delta=1.5, projection="iid")
    truth = torch.diagonal(phi.kernel_matrix(x, y))
    samples = single_draws(phi, x, y)
    check_mean(samples, truth, detect=0.15)
    check_mse(samples, truth, mse_local_gaussian(x, y, 1, delta=1.5), detect=0.2)


PAIR = (
    torch.tensor([[0.4, 0.3, 5.0], [0.2, 0.4, 5.6]], dtype=torch.float64),
    torch.tensor([[0.3, 0.4, 5.2], [0.3, 0.1, 5.0]], dtype=torch.float64),
)


@pytest.mark.parametrize("mask", MAPS)
@pytest.mark.parametrize("attention", [PositiveFeatures, HyperbolicFeatures, TrigFeatures, SumPolyFeatures])
def test_paired_product_of_a_mask_and_an_attention_map_is_unbiased(mask: str, attention: Any) -> None:
    m, iid = 150_000, {"projection": "iid"}
    phi = ProductFeatures(
        MAPS[mask](1, m, **(iid if mask == "local_gaussian" else {})),
        attention(2, m, **({} if attention is SumPolyFeatures else iid)),
    )
    check_mean(single_draws(phi, *PAIR), torch.diagonal(phi.kernel_matrix(*PAIR)), scale=0.6)


def test_a_product_of_maps_that_share_their_draws_would_be_biased() -> None:
    mask, attention = (cls(2, 50_000, projection="iid") for cls in (LocalGaussianFeatures, TrigFeatures))
    x, y = torch.tensor([[0.9, 0.3, 0.9, 0.3]], dtype=torch.float64), torch.zeros(1, 4, dtype=torch.float64)
    shared = ProductFeatures(mask, attention)
    attention.projection.weight.copy_(mask.projection.weight)
    with pytest.raises(AssertionError, match="claimed"):
        check_mean(single_draws(shared, x, y), shared.kernel_matrix(x, y).flatten())
    redrawn = ProductFeatures(mask, attention)
    check_mean(single_draws(redrawn, x, y), redrawn.kernel_matrix(x, y).flatten())


def test_masked_attention_approaches_exact_masked_attention() -> None:
    q, k, v = (rows(1, 1, 64, 4, seed=s) / 2 for s in range(3))
    p = torch.arange(64, dtype=torch.float64)
    errors = []
    for m in (256, 16_384):
        phi = ProductFeatures(LocalLaplaceFeatures(1, m, delta=32.0), PositiveFeatures(4, m))
        qp, kp = with_positions(q, p), with_positions(k, p)
        a = phi.kernel_matrix(qp, kp)
        expected = (a / a.sum(-1, keepdim=True)) @ v
        out = linear_attention(qp, kp, v, phi, scale=1.0)
        errors.append(((out - expected).norm() / expected.norm()).item())
    assert errors[1] < errors[0] / 3
    assert errors[1] < 0.1


def test_product_calibrates_its_attention_map() -> None:
    q, k = rows(2, 30, 3, seed=1) + 1.0, rows(2, 30, 3, seed=2) - 0.5
    phi = ProductFeatures(LocalGaussianFeatures(1, 8), CalibratedFeatures(3, 8, num_heads=2))
    alone = CalibratedFeatures(3, 8, num_heads=2)
    alone.calibrate_(q, k)
    p = torch.arange(30, dtype=torch.float64)
    phi.calibrate_(with_positions(q, p, scale=1.0), with_positions(k, p, scale=1.0))
    assert isinstance(phi.attention, CalibratedFeatures)
    torch.testing.assert_close(phi.attention.a, alone.a)
    assert phi.num_heads == 2


def test_bad_arguments_are_one_sentence() -> None:
    with pytest.raises(BochnerError, match=r"'delta' .* positive finite number, got 0"):
        LocalLaplaceFeatures(1, 8, delta=0)
    with pytest.raises(BochnerError, match=r"'smooth' .* positive finite number, got -1"):
        LocalL1Features(1, 8, smooth=-1.0)
    with pytest.raises(BochnerError, match=r"cannot pair the features of TensorSketchFeatures"):
        ProductFeatures(LocalGaussianFeatures(1, 8), TensorSketchFeatures(2, 8))
    with pytest.raises(BochnerError, match="8 for the mask and 9 for attention"):
        ProductFeatures(LocalGaussianFeatures(1, 8), PositiveFeatures(2, 9))
    with pytest.raises(BochnerError, match="'mask' of ProductFeatures must be a FeatureMap, got str"):
        ProductFeatures("local_l1", PositiveFeatures(2, 9))  # type: ignore[arg-type]
    with pytest.raises(BochnerError, match="same num_heads"):
        ProductFeatures(LocalGaussianFeatures(1, 8, num_heads=2), PositiveFeatures(2, 8, num_heads=3))
    with pytest.raises(BochnerError, match=r"'positions' .* n = 3, got \(4, 1\)"):
        with_positions(torch.ones(3, 2), torch.arange(4.0))
