"""Polynomial maps: unbiased, with their closed-form errors, in every shape and dtype."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from sklearn.kernel_approximation import PolynomialCountSketch
from stats import check_mean, check_mse
from torch import Tensor

from bochner._checks import BochnerError
from bochner.maps.base import FeatureMap, kernel_estimate
from bochner.maps.polynomial import (
    MaclaurinFeatures,
    NonnegativePolyFeatures,
    SumPolyFeatures,
    TensorSketchFeatures,
    with_constant,
)
from bochner.theory import mse_sum_poly, mse_tensor_sketch, mse_tensor_sketch_matrix, tensor_sketch_bound

X = torch.tensor([0.6, 0.5, -0.3, 0.4], dtype=torch.float64)
Y = torch.tensor([0.5, 0.4, -0.2, 0.7], dtype=torch.float64)
MAPS: dict[str, Any] = {
    "sum_poly": SumPolyFeatures,
    "tensor_sketch": TensorSketchFeatures,
    "maclaurin": MaclaurinFeatures,
    "nonnegative_poly": NonnegativePolyFeatures,
}


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def draws(cls: type[FeatureMap], x: Tensor, y: Tensor, count: int, m: int, **options: Any) -> tuple[Tensor, FeatureMap]:
    """Independent estimates of K(x, y): a map with one head per draw."""
    phi = cls(x.shape[-1], m, num_heads=count, **options)
    q, k = (t.expand(count, 1, -1) for t in (x, y))
    return kernel_estimate(phi, q, k).flatten(), phi


@pytest.mark.parametrize(("degree", "coef"), [(1, 0.0), (2, 0.0), (2, 0.7), (3, 0.0)])
def test_sum_decomposition_is_unbiased_with_its_mse(degree: int, coef: float) -> None:
    samples, _ = draws(SumPolyFeatures, X, Y, 40_000, 8, degree=degree, coef=coef)
    truth = float((X @ Y + coef) ** degree)
    check_mean(samples, truth)
    check_mse(
        samples, truth, mse_sum_poly(with_constant(X, coef), with_constant(Y, coef), 8, degree).item(), detect=0.2
    )


@pytest.mark.parametrize("m", [7, 8])
@pytest.mark.parametrize(("degree", "coef"), [(1, 0.0), (2, 0.0), (2, 0.5), (3, 0.0)])
def test_tensor_sketch_is_unbiased_with_its_exact_mse(degree: int, coef: float, m: int) -> None:
    samples, _ = draws(TensorSketchFeatures, X, Y, 40_000, m, degree=degree, coef=coef)
    truth = float((X @ Y + coef) ** degree)
    check_mean(samples, truth)
    check_mse(
        samples, truth, mse_tensor_sketch(with_constant(X, coef), with_constant(Y, coef), m, degree).item(), detect=0.2
    )


def test_variance_of_all_pairs_is_that_of_each() -> None:
    x, y = rows(5, 6, seed=1), rows(7, 6, seed=2)
    for m in (2, 9):
        for degree in (1, 2, 5):
            each = mse_tensor_sketch(x[:, None], y, m, degree)
            torch.testing.assert_close(mse_tensor_sketch_matrix(x, y, m, degree), each)
            assert (each <= tensor_sketch_bound(x[:, None], y, m, degree)).all()


@pytest.mark.parametrize(
    "options", [{"degree": 2, "coef": 0.5}, {"series": "exp", "degree": 5}, {"series": [0.0, 0.5, 0.0, 2.0]}]
)
def test_maclaurin_is_unbiased_with_its_mse(options: dict[str, Any]) -> None:
    samples, phi = draws(MaclaurinFeatures, X, Y, 40_000, 12, **options)
    assert isinstance(phi, MaclaurinFeatures)
    truth = phi.kernel_matrix(X[None], Y[None]).item()
    check_mean(samples, truth)
    check_mse(samples, truth, phi.mse(X, Y).item(), detect=0.2)


def test_maclaurin_series_are_the_kernels_they_name() -> None:
    x, y = rows(5, 3) / 4, rows(6, 3, seed=1) / 4
    poly = MaclaurinFeatures(3, 8, degree=3, coef=0.4)
    torch.testing.assert_close(poly.kernel_matrix(x, y), (x @ y.mT + 0.4) ** 3)
    torch.testing.assert_close(MaclaurinFeatures(3, 64, series="exp").kernel_matrix(x, y), (x @ y.mT).exp())
    twice = MaclaurinFeatures(3, 8, series=lambda k: 2.0**-k, degree=4)
    torch.testing.assert_close(twice.kernel_matrix(x, y), sum(((x @ y.mT) / 2) ** k for k in range(5)))


@pytest.mark.parametrize("degree", [2, 4])
def test_nonnegative_estimate_has_the_second_moment_of_its_sketch_as_mean(degree: int) -> None:
    samples, phi = draws(NonnegativePolyFeatures, X, Y, 40_000, 8, degree=degree)
    assert isinstance(phi, NonnegativePolyFeatures)
    check_mean(samples, phi.mean_matrix(X[None], Y[None]).item(), detect=0.2)
    assert phi.feature_dim == 6
    assert (samples >= -1e-12).all()


def test_nonnegative_map_is_exact_where_the_features_hold_the_square() -> None:
    x, y = rows(5, 4), rows(6, 4, seed=1)
    phi = NonnegativePolyFeatures(4, 15, degree=2, coef=0.5)
    assert phi.feature_dim == 15
    torch.testing.assert_close(kernel_estimate(phi, x, y), (x @ y.mT + 0.5) ** 2)
    torch.testing.assert_close(phi.mean_matrix(x, y), phi.kernel_matrix(x, y))


def test_normaliser_of_the_nonnegative_map_never_vanishes_where_the_signed_one_does() -> None:
    q, k = rows(200, 8), rows(40, 8, seed=1)
    signed = kernel_estimate(TensorSketchFeatures(8, 28, degree=4), q, k).sum(-1)
    squared = kernel_estimate(NonnegativePolyFeatures(8, 28, degree=4), q, k)
    assert (signed < 0).any()
    assert (squared >= -1e-12 * squared.abs().amax()).all()
    assert (squared.sum(-1) > 0).all()


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_tensor_sketch_is_scikit_learns_on_the_same_hashes(degree: int) -> None:
    x = rows(20, 5)
    phi = TensorSketchFeatures(5, 12, degree=degree, coef=0.5)
    peer = PolynomialCountSketch(degree=degree, coef0=0.5, n_components=12).fit(x.numpy())
    peer.indexHash_, peer.bitHash_ = phi.slot.numpy(), phi.sign.double().numpy()
    torch.testing.assert_close(phi(x).dense(), torch.from_numpy(peer.transform(x.numpy())))


@pytest.mark.parametrize(("n", "d", "m", "degree"), [(1000, 64, 256, 2), (500, 384, 1000, 3), (2000, 16, 250, 4)])
def test_tensor_sketch_is_at_least_as_fast_as_scikit_learn(n: int, d: int, m: int, degree: int) -> None:
    x = rows(n, d, dtype=torch.float32)
    phi = TensorSketchFeatures(d, m, degree=degree)
    peer = PolynomialCountSketch(degree=degree, n_components=m, random_state=0).fit(x.numpy())
    best = {"ours": math.inf, "theirs": math.inf}
    for _ in range(7):  # interleaved, best of several
        for name, run in (("ours", lambda: phi(x)), ("theirs", lambda: peer.transform(x.numpy()))):
            start = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - start)
    assert best["ours"] <= best["theirs"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", MAPS)
def test_no_row_over_or_underflows(name: str, dtype: torch.dtype) -> None:
    phi = MAPS[name](4, 36, degree=6, coef=0.0)
    x = rows(3, 4).to(dtype)
    x[1] *= 1e3
    x[2] = 0
    f = phi.to(torch.bfloat16)(x)
    assert torch.isfinite(f.values).all()
    assert torch.isfinite(f.log_scale).all()
    assert f.values.abs().max() <= 64
    assert (f.values[2] == 0).all()
    large = f.log_scale[1] + f.values[1].double().norm().log()
    direct = phi(x[1:2].double() / 1e3)
    torch.testing.assert_close(
        large.item(), (direct.dense().norm().log() + 6 * math.log(1e3)).item(), rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("m", [6, 33, 100])
def test_sizes_need_not_be_powers_of_two(name: str, m: int) -> None:
    phi = MAPS[name](5, m, degree=4, coef=1.0)
    assert phi(rows(2, 5)).values.shape == (2, phi.feature_dim)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("degree", [0, -2, 1.5, True])
def test_bad_degree_is_one_sentence(name: str, degree: Any) -> None:
    with pytest.raises(BochnerError, match=r"'degree' .* must be a positive int"):
        MAPS[name](4, 8, degree=degree)


def test_bad_arguments_are_one_sentence() -> None:
    with pytest.raises(BochnerError, match=r"'coef' .* >= 0, got -1"):
        TensorSketchFeatures(4, 8, coef=-1)
    with pytest.raises(BochnerError, match="must be even, got 3"):
        NonnegativePolyFeatures(4, 8, degree=3)
    with pytest.raises(BochnerError, match=r"coefficient -1\.0 at degree 1"):
        MaclaurinFeatures(4, 8, series=[1.0, -1.0])
    with pytest.raises(BochnerError, match="no positive coefficient above degree 0"):
        MaclaurinFeatures(4, 8, series=[1.0])
    with pytest.raises(BochnerError, match="at least 13"):
        MaclaurinFeatures(4, 8, series="exp")
    with pytest.raises(BochnerError, match="'series' of MaclaurinFeatures"):
        MaclaurinFeatures(4, 8, series="cosh")


def test_a_square_with_room_for_every_product_is_exact():
    phi = NonnegativePolyFeatures(4, 30, degree=2)  # ten products are all there are
    x, y = (torch.randn(5, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(2))
    assert phi.feature_dim == 10
    torch.testing.assert_close(kernel_estimate(phi.double(), x, y), (x @ y.mT) ** 2)
