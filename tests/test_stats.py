"""The bench accepts what is right over a hundred seeds and rejects what is planted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from stats import check_mean, check_mse, check_mse_at_most, check_paired_less

D, M = 4, 8
X = torch.tensor([0.3, -0.2, 0.1, 0.2], dtype=torch.float64)
Y = torch.tensor([0.2, 0.1, -0.1, 0.3], dtype=torch.float64)
SM = math.exp(float(X @ Y))


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal(draws: int, d: int, seed: int = 0, haar: bool = True) -> torch.Tensor:
    """d orthogonal rows with chi norms; without Haar's signs, what the best-known Performer packages draw."""
    q, r = torch.linalg.qr(gaussian(draws, d, d, seed=seed))
    if haar:
        q = q * torch.diagonal(r, dim1=-2, dim2=-1).sign()[:, None, :]
    return q.mT * gaussian(draws, d, d, seed=seed + 10_000).norm(dim=-1, keepdim=True)


def positive(w: torch.Tensor, x: torch.Tensor = X, y: torch.Tensor = Y) -> torch.Tensor:
    return torch.exp(w @ (x + y) - (x @ x + y @ y) / 2).mean(-1)


def mse_positive(x: torch.Tensor, y: torch.Tensor, m: int) -> float:
    z2 = float((x + y) @ (x + y))
    return math.exp(z2 + 2 * float(x @ y)) * -math.expm1(-z2) / m


def hyperbolic(w: torch.Tensor) -> torch.Tensor:
    return (torch.cosh(w @ (X + Y)) * math.exp(-float(X @ X + Y @ Y) / 2)).mean(-1)


@pytest.mark.parametrize("block", range(4))
def test_right_estimators_pass_for_every_seed(block: int) -> None:
    for seed in range(25 * block, 25 * block + 25):
        samples = positive(gaussian(20_000, M, D, seed=seed))
        check_mean(samples, SM)
        check_mse(samples, SM, mse_positive(X, Y, M), detect=0.25)
        check_mse_at_most(samples, SM, mse_positive(X, Y, M), detect=0.25)


def test_haar_orthogonal_features_are_unbiased() -> None:
    check_mean(positive(orthogonal(20_000, D)), SM)


def test_unsigned_qr_is_rejected() -> None:
    x = torch.tensor([0.6, 0.0, 0.0, 0.0], dtype=torch.float64)
    samples = positive(orthogonal(20_000, D, haar=False), x, x)
    with pytest.raises(AssertionError, match="z = -"):
        check_mean(samples, math.exp(float(x @ x)))


@pytest.mark.parametrize("wrong", [M + 1, M - 1])
def test_one_projection_too_many_or_too_few_is_rejected(wrong: int) -> None:
    samples = positive(gaussian(400_000, M, D))
    check_mse(samples, SM, mse_positive(X, Y, M), detect=0.08)
    with pytest.raises(AssertionError, match="z = "):
        check_mse(samples, SM, mse_positive(X, Y, wrong), detect=0.08)


def test_missing_half_is_rejected() -> None:
    z2 = float((X + Y) @ (X + Y))
    mse = math.exp(z2) * SM**2 * (1 - math.exp(-z2)) ** 2 / (2 * M)
    samples = hyperbolic(gaussian(100_000, M, D))
    check_mse(samples, SM, mse, detect=0.3)
    with pytest.raises(AssertionError, match="z = "):
        check_mse(samples, SM, 2 * mse, detect=0.3)


def test_dropped_centring_factor_is_rejected() -> None:
    # exp(x.y) = exp((x-a).(y-b)) exp(a.y) exp((x-a).b)
    a, b = X * 0.4, Y * 0.8
    centred = positive(gaussian(20_000, M, D), X - a, Y - b)
    check_mean(centred * torch.exp(a @ Y + (X - a) @ b), SM, detect=0.02)
    with pytest.raises(AssertionError, match="z = "):
        check_mean(centred * torch.exp(a @ Y), SM, detect=0.02)
    with pytest.raises(AssertionError, match="z = "):
        check_mean(centred * torch.exp((X - a) @ b), SM, detect=0.02)


def test_too_large_a_bound_passes_and_too_small_a_bound_fails() -> None:
    samples = positive(gaussian(100_000, M, D))
    check_mse_at_most(samples, SM, 2 * mse_positive(X, Y, M))
    with pytest.raises(AssertionError, match="exceeds"):
        check_mse_at_most(samples, SM, 0.8 * mse_positive(X, Y, M))


def test_a_test_that_could_not_fail_fails() -> None:
    samples = positive(gaussian(100, M, D))
    with pytest.raises(AssertionError, match=r"vacuous.*draw about \d+ samples"):
        check_mean(samples, SM, detect=0.02)
    with pytest.raises(AssertionError, match="vacuous"):
        check_mse(samples, SM, mse_positive(X, Y, M))
    with pytest.raises(AssertionError, match="vacuous"):
        check_mse_at_most(samples, SM, mse_positive(X, Y, M))
    with pytest.raises(AssertionError, match="scale"):
        check_mean(gaussian(100, 2), 0.0)
    check_mean(gaussian(20_000, 2), 0.0, scale=1.0)


def test_samples_without_variance_must_equal_the_truth() -> None:
    check_mean(np.full((100, 3), 2.0), 2.0)
    check_mse(np.full((100, 3), 2.0), 2.0, 0.0)
    check_mse(np.array([1.0, 3.0] * 50), 2.0, 1.0)
    with pytest.raises(AssertionError, match="no variance"):
        check_mean(np.full((100, 3), 2.0), [2.0, 2.0, 2.001])
    with pytest.raises(AssertionError, match="claimed to be zero"):
        check_mse(np.full((100, 3), 2.001), 2.0, 0.0)
    with pytest.raises(AssertionError, match="no variance"):
        check_mse(np.full((100, 3), 2.0), 2.0, 1.0)


def test_one_wrong_entry_among_many_is_found() -> None:
    truth = torch.full((10, 10), 1.0, dtype=torch.float64)
    samples = truth + 0.3 * gaussian(5_000, 10, 10)
    check_mean(samples, truth)
    samples[:, 3, 7] += 0.1
    with pytest.raises(AssertionError, match=r"\(3, 7\).*1 of 100"):
        check_mean(samples, truth)


def test_paired_comparison_needs_significance() -> None:
    w = gaussian(20_000, M, D)
    a = (hyperbolic(w) - SM) ** 2
    b = (positive(w) - SM) ** 2
    check_paired_less(a, b)
    check_paired_less(a, b, strict=False)
    check_paired_less(b, b, strict=False)
    for bad in [(b, a), (b, b)]:
        with pytest.raises(AssertionError, match="not significantly smaller"):
            check_paired_less(*bad)
    with pytest.raises(AssertionError, match="significantly larger"):
        check_paired_less(b, a, strict=False)


def test_malformed_samples_are_refused() -> None:
    with pytest.raises(AssertionError, match="finite"):
        check_mean(np.full(100, np.nan), 1.0)
    with pytest.raises(AssertionError, match="30 draws"):
        check_mean(np.ones(5), 1.0)
    with pytest.raises(AssertionError, match="complex"):
        check_mean(np.ones(50) * 1j, 1.0)
    with pytest.raises(AssertionError, match="one shape"):
        check_paired_less(np.ones((50, 2)), np.ones((50, 3)))


def test_a_test_that_would_miss_a_factor_of_two_is_refused() -> None:
    samples = positive(gaussian(20_000, M, D))
    mse = mse_positive(X, Y, M)
    for call in (
        lambda detect: check_mean(samples, SM, detect=detect),
        lambda detect: check_mse(samples, SM, mse, detect=detect),
        lambda detect: check_mse_at_most(samples, SM, mse, detect=detect),
        lambda detect: check_paired_less(samples, samples, strict=False, detect=detect),
    ):
        call(0.5)
        for detect in (0.0, 0.51, 2.0, math.nan):
            with pytest.raises(AssertionError, match="factor of two"):
                call(detect)


def test_a_deviation_as_large_as_the_one_called_detectable_is_detected() -> None:
    """The power that a passed check reports is there: planted deviations of that size are rejected, nearly always."""
    helpers = {
        "mean": lambda s, size: check_mean(s, SM * (1 + size)),
        "mse": lambda s, size: check_mse(s, SM, mse_positive(X, Y, M) * (1 + size), detect=0.5),
        "bound": lambda s, size: check_mse_at_most(s, SM, mse_positive(X, Y, M) * (1 - size), detect=0.5),
        "order": lambda s, size: check_paired_less(s * (1 + size), s.flip(0), strict=False),
    }
    for name, helper in helpers.items():
        rejected = 0
        for seed in range(40):
            samples = positive(gaussian(20_000, M, D, seed=seed))
            size = helper(samples, 0.0).detectable
            try:
                helper(samples, size)
            except AssertionError as verdict:
                rejected += "vacuous" not in str(verdict)
        # Promised with probability 0.99, approximately; a helper without power would reject none.
        assert rejected >= 35, f"{name}: {rejected} of 40"
