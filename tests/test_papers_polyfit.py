"""Polynomials in place of activations: their error, their stability, and where their powers stop being usable."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from bochner._checks import BochnerError
from bochner.papers.polyfit import (
    ACTIVATIONS,
    METHODS,
    fit_polynomial,
    shift_monomials,
)
from bochner.theory import bernstein_bound, gelu_second_sup


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("method", METHODS)
def test_fits_evaluate_as_their_powers_and_report_their_error(activation: str, method: str) -> None:
    low, high = torch.tensor([-3.0, -1.0, 0.5]), torch.tensor([2.0, 4.0, 1.0])
    fit = fit_polynomial(activation, low, high, 9, method=method)
    t = low + (high - low) * torch.rand(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    powers = fit.local(t)[..., None] ** torch.arange(10)
    torch.testing.assert_close((powers * fit.monomials()).sum(-1), fit(t))
    error = (fit(t) - ACTIVATIONS[activation](t)).abs().amax(0)
    assert (error <= 1.05 * fit.error).all()


@pytest.mark.parametrize("n", [1, 4, 16, 64])
def test_bernstein_error_is_below_its_bound_and_above_the_documents(n: int) -> None:
    error = fit_polynomial("gelu", -0.5, 0.5, n, method="bernstein").error.item()
    bound = bernstein_bound(-0.5, 0.5, n, gelu_second_sup(-0.5, 0.5)).item()
    assert error <= bound
    assert error > bound / 2  # (43) and (45) of the document halve the second derivative


def test_chebyshev_and_least_squares_are_far_better_than_bernstein_at_equal_degree() -> None:
    for n, factor in ((4, 4), (8, 20), (16, 1000)):
        bernstein, chebyshev, squares = (fit_polynomial("gelu", -4, 4, n, method=m).error.item() for m in METHODS)
        assert bernstein > factor * max(chebyshev, squares)


def test_least_squares_weighs_what_the_samples_weigh() -> None:
    samples = 0.5 + 0.2 * torch.randn(2000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = fit_polynomial("relu", -4, 4, 3, method="least_squares", samples=samples)
    uniform = fit_polynomial("relu", -4, 4, 3, method="least_squares")
    loss = [float((p(samples) - samples.relu()).square().mean()) for p in (data, uniform)]
    assert loss[0] < loss[1] / 10


@pytest.mark.parametrize("method", METHODS)
def test_monomials_are_correctly_rounded_at_a_degree_where_floats_fail(method: str) -> None:
    n = 40
    fit = fit_polynomial("relu", -1.0, 1.0, n, method=method)
    alpha = [Fraction(v) for v in fit.monomials()[0].tolist()]
    at = Fraction(1, 3)
    exact = sum(a * at**k for k, a in enumerate(alpha))
    # The stable evaluation agrees with the exact sum of the powers to the rounding of the coefficients alone.
    size = float(sum(abs(a) * at**k for k, a in enumerate(alpha)))
    assert abs(fit(torch.tensor([[1 / 3]], dtype=torch.float64)).item() - float(exact)) < 1e-15 * size + 1e-14


def test_in_single_precision_a_sum_of_powers_loses_what_the_fit_keeps() -> None:
    fit = fit_polynomial("relu", -4.0, 4.0, 40, method="chebyshev")
    t = torch.linspace(-4, 4, 101)[:, None]
    powers = ((fit.local(t)[..., None] ** torch.arange(41)) * fit.monomials().float()).sum(-1)
    assert (powers - fit(t.double())).abs().max() > 1.0
    assert (fit(t) - fit(t.double())).abs().max() < 1e-5


def test_shifted_powers_are_the_polynomial_at_a_shifted_point() -> None:
    g = torch.Generator().manual_seed(0)
    alpha, beta = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((3, 6), (3,)))
    z = torch.randn(3, generator=g, dtype=torch.float64)
    k = torch.arange(6)
    expected = (alpha * (z + beta)[:, None] ** k).sum(-1)
    torch.testing.assert_close((shift_monomials(alpha, beta) * z[:, None] ** k).sum(-1), expected)


def test_bad_arguments_are_one_sentence() -> None:
    for degree in (0, -1, 2.0):
        with pytest.raises(BochnerError, match=r"'degree' .* must be a positive int"):
            fit_polynomial("gelu", -1, 1, degree)  # type: ignore[arg-type]
    with pytest.raises(BochnerError, match=r"lower < upper, both finite, got \[1\.0, 1\.0\] for unit 1"):
        fit_polynomial("gelu", [-1.0, 1.0], [1.0, 1.0], 3)
    with pytest.raises(BochnerError, match="Unknown activation 'swish'"):
        fit_polynomial("swish", -1, 1, 3)
    with pytest.raises(BochnerError, match="finite tensor of the same shape"):
        fit_polynomial(torch.log, -1, 1, 3)
    with pytest.raises(BochnerError, match="'samples' of fit_polynomial"):
        fit_polynomial("gelu", -1, 1, 3, method="least_squares", samples=torch.zeros(2, 1))
