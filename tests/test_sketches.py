"""Polynomial maps: unbiased, with their closed-form errors, in every shape and dtype."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from naive import said_of, signed_attention
from sklearn.kernel_approximation import PolynomialCountSketch
from stats import check_mean, check_mse, check_mse_at_most
from torch import Tensor

from bochner._checks import BochnerError
from bochner.attention import linear_attention
from bochner.maps.base import FeatureMap, kernel_estimate
from bochner.maps.polynomial import (
    MaclaurinFeatures,
    NonnegativePolyFeatures,
    SumPolyFeatures,
    TensorSketchFeatures,
    tensor_sketch,
    tensor_sketch_real,
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


def test_the_documents_sum_decomposition_error_is_rejected() -> None:
    samples, _ = draws(SumPolyFeatures, 2 * X, 2 * Y, 40_000, 8)
    x, y = 2 * X, 2 * Y
    kernel = (x @ y) ** 2
    printed = (16 * (x.square() @ y.square()) ** 2 - kernel) / 8  # (7): the kernel is not squared
    with pytest.raises(AssertionError, match="claimed"):
        check_mse(samples, kernel.item(), printed.item(), detect=0.3)


@pytest.mark.parametrize("m", [7, 8])
@pytest.mark.parametrize(("degree", "coef"), [(1, 0.0), (2, 0.0), (2, 0.5), (3, 0.0)])
def test_tensor_sketch_is_unbiased_with_its_exact_mse(degree: int, coef: float, m: int) -> None:
    samples, _ = draws(TensorSketchFeatures, X, Y, 40_000, m, degree=degree, coef=coef)
    truth = float((X @ Y + coef) ** degree)
    check_mean(samples, truth)
    check_mse(
        samples, truth, mse_tensor_sketch(with_constant(X, coef), with_constant(Y, coef), m, degree).item(), detect=0.2
    )


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_the_documents_tensor_sketch_bound_is_false_and_avrons_holds(degree: int) -> None:
    m, x = 64, torch.full((8,), 8**-0.5, dtype=torch.float64)
    samples, _ = draws(TensorSketchFeatures, x, x, 20_000, m, degree=degree)
    check_mse_at_most(samples, 1.0, tensor_sketch_bound(x, x, m, degree).item(), detect=0.15)
    assert mse_tensor_sketch(x, x, m, degree) <= tensor_sketch_bound(x, x, m, degree)
    with pytest.raises(AssertionError, match="exceeds the document's bound"):
        check_mse_at_most(samples, 1.0, (1.0 + 1.0) / m, what="document's bound")  # (21): (x.y)^2n + |x|^2n |y|^2n = 2


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


def test_tensor_sketch_has_the_error_of_scikit_learn() -> None:
    x, m = torch.cat([X[None], Y[None]]), 16
    kernel = float(X @ Y) ** 2
    samples = []
    for seed in range(5000):
        f = PolynomialCountSketch(degree=2, n_components=m, random_state=seed).fit_transform(x.numpy())
        samples.append(float(f[0] @ f[1]))
    check_mse(samples, kernel, mse_tensor_sketch(X, Y, m, 2).item(), detect=0.4)


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


@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize(("degree", "m"), [(2, 8), (3, 7), (4, 1), (2, 2)])
def test_real_arithmetic_gives_the_same_sketch(degree: int, m: int, heads: int | None) -> None:
    phi = TensorSketchFeatures(5, m, degree=degree, num_heads=heads)
    x = rows(3, 2, 4, 5)
    plain = tensor_sketch(x, phi.slot, phi.sign, m)
    torch.testing.assert_close(tensor_sketch_real(x, phi.slot, phi.sign, m), plain)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_polynomial_attention_in_linear_time_is_the_quadratic_one(name: str, is_causal: bool) -> None:
    phi = MAPS[name](6, 21, degree=4, coef=1.0)
    q, k, v = (rows(2, 2, 30, 6, seed=s) / 2 for s in range(3))
    expected, small = signed_attention(q * 6**-0.25, k * 6**-0.25, v, phi, is_causal=is_causal)
    with said_of(small):
        out = linear_attention(q, k, v, phi, is_causal=is_causal)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("name", MAPS)
def test_heads_are_independent_maps(name: str) -> None:
    phi = MAPS[name](6, 21, num_heads=3, degree=2, coef=0.4)
    x = rows(2, 3, 5, 6)
    f = phi(x)
    assert f.values.shape == (2, 3, 5, phi.feature_dim)
    assert f.log_scale.shape == (2, 3, 5, 1)
    one = MAPS[name](6, 21, degree=2, coef=0.4)
    for head in range(3):
        for key, value in one.state_dict().items():
            value.copy_(phi.state_dict()[key][head])
        torch.testing.assert_close(one(x[:, head]).dense(), f.dense()[:, head])


@pytest.mark.parametrize("name", MAPS)
def test_seed_state_and_redraw(name: str) -> None:
    x = rows(4, 5)
    options = {"degree": 2, "coef": 0.3}
    a, b, c = (MAPS[name](5, 15 if name != "nonnegative_poly" else 10, seed=s, **options) for s in (1, 1, 2))
    assert torch.equal(a(x).dense(), b(x).dense())
    assert not torch.equal(a(x).dense(), c(x).dense())
    c.load_state_dict(a.state_dict())
    assert torch.equal(a(x).dense(), c(x).dense())
    c.redraw_(seed=5)
    assert not torch.equal(a(x).dense(), c(x).dense())
    assert torch.equal(c(x).dense(), b.redraw_(seed=5)(x).dense())


@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("name", MAPS)
def test_gradients(name: str, heads: int | None) -> None:
    phi = MAPS[name](3, 7, num_heads=heads, degree=2, coef=0.4).double()
    shape = (3, 3) if heads is None else (2, 3, 3)
    x, y = (rows(*shape, seed=s).requires_grad_() for s in (0, 1))
    assert torch.autograd.gradcheck(lambda a, b: kernel_estimate(phi, a, b), (x, y))


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
