"""Low precision: finite on large inputs, and no worse than plain code in the same precision."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from naive import draw, draw_qkv, gradients
from torch import Tensor

from bochner import attention_matrix, feature_map, linear_attention
from bochner.maps.base import FeatureMap

HALF = (torch.float16, torch.bfloat16)
# Rows out of range get a mean, and that is said: here it is looked at, `in_range`.
pytestmark = pytest.mark.filterwarnings("ignore:.*got the mean of the values:bochner.BochnerWarning")
Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def inputs(dtype: torch.dtype, sigma: float, d: int = 16, n: int = 300) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of `sigma`, values of one, rounded to `dtype`."""
    q, k, _ = draw_qkv(n, b=1, d=d, dtype=dtype, scale=sigma)
    return q, k, draw(1, 2, n, d, seed=9, dtype=dtype)


def product(a: Tensor, b: Tensor) -> Tensor:
    """A matrix product that accumulates in float32 and rounds its result, as hardware does in half precision."""
    return (a.float() @ b.float()).to(a.dtype)


def plain_map_attention(phi: FeatureMap) -> Attention:
    """The same estimator as a textbook writes it, every step in the input's dtype, stabilised by row maxima."""

    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        w = phi.projection.matrix().to(q.dtype)
        x, y = q * q.shape[-1] ** -0.25, k * k.shape[-1] ** -0.25
        queries = product(x, w.mT)
        keys = product(y, w.mT) - 0.5 * y.square().sum(-1, keepdim=True)
        queries = (queries - queries.amax(-1, keepdim=True)).exp()
        keys = (keys - keys.amax((-2, -1), keepdim=True)).exp()
        weights = product(queries, keys.mT)
        weights = weights.tril() if is_causal else weights
        total = weights.sum(-1, keepdim=True)
        return product(weights, v) / torch.where(total == 0, torch.ones_like(total), total)

    return attend


def plain_softmax_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Softmax attention, every step in the input's dtype."""
    logits = product(q * q.shape[-1] ** -0.5, k.mT)
    if is_causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    return product(logits.softmax(-1), v)


def error(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth).norm() / truth.norm())


def in_range(got: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Which rows (b, h, n) were computed: all but those that got the mean of the values they see, but for the first."""
    mean = v.double().cumsum(-2) / torch.arange(1, v.shape[-2] + 1)[:, None]
    if not is_causal:
        mean = mean[..., -1:, :]
    tolerance = 4 * torch.finfo(got.dtype).eps * v.double().abs().amax()
    rows = ((got.double() - mean).abs() > tolerance).any(-1)
    rows[..., 0] |= is_causal
    return rows


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("sigma", [1.0, 3.0, 30.0])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("d", [16, 64])
def test_error_is_at_most_twice_that_of_plain_code_for_the_same_map(
    dtype: torch.dtype, sigma: float, is_causal: bool, d: int
) -> None:
    q, k, v = inputs(dtype, sigma, d)
    phi = feature_map("positive", dim=d, num_features=4 * d)
    truth = attention_matrix(q.double(), k.double(), phi, is_causal=is_causal) @ v.double()
    got = linear_attention(q, k, v, phi, is_causal=is_causal)
    assert got.dtype == dtype
    assert got.isfinite().all()
    plain, rows = plain_map_attention(phi)(q, k, v, is_causal).nan_to_num(0), in_range(got, v, is_causal)
    assert rows.float().mean() > (0.5 if sigma < 10 else 0.05)
    assert error(got[rows], truth[rows]) <= 2 * error(plain[rows], truth[rows])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("sigma", [1.0, 3.0, 10.0, 30.0])
@pytest.mark.parametrize("is_causal", [False, True])
def test_error_is_at_most_twice_that_of_plain_softmax_attention(
    dtype: torch.dtype, sigma: float, is_causal: bool
) -> None:
    q, k, v = inputs(dtype, sigma)
    wide = tuple(t.double() for t in (q, k, v))
    phi = feature_map("positive", dim=16, num_features=64)
    got = linear_attention(q, k, v, phi, is_causal=is_causal)
    truth = attention_matrix(*wide[:2], phi, is_causal=is_causal)
    rows = in_range(got, v, is_causal)
    own = error(got[rows], (truth @ wide[2])[rows])
    plain = error(plain_softmax_attention(q, k, v, is_causal), plain_softmax_attention(*wide, is_causal))
    assert own <= 2 * plain


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("sigma", [3.0, 30.0])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_only_error_in_half_precision_is_that_of_rounding_the_output(
    dtype: torch.dtype, sigma: float, is_causal: bool
) -> None:
    q, k, v = inputs(dtype, sigma, d=64)
    phi = feature_map("positive", dim=64, num_features=256)
    truth = attention_matrix(q.double(), k.double(), phi, is_causal=is_causal) @ v.double()
    got = linear_attention(q, k, v, phi, is_causal=is_causal)
    rows = in_range(got, v, is_causal)
    assert error(got[rows], truth[rows]) <= 1.1 * error(truth[rows].to(dtype), truth[rows])


@pytest.mark.parametrize("sigma", [1.0, 3.0, 10.0, 30.0])
@pytest.mark.parametrize("is_causal", [False, True])
def test_single_precision_is_accurate_to_its_rounding(sigma: float, is_causal: bool) -> None:
    """Logits grow as sigma^2, and so does what one rounding of them does to a weight."""
    q, k, v = inputs(torch.float32, sigma, d=64)
    phi = feature_map("positive", dim=64, num_features=256)
    truth = attention_matrix(q.double(), k.double(), phi, is_causal=is_causal) @ v.double()
    rounding = 2.0**-24 * max(100, 10 * sigma**2)
    matrix = attention_matrix(q, k, phi, is_causal=is_causal)
    for got in (linear_attention(q, k, v, phi, is_causal=is_causal), matrix @ v):
        rows = in_range(got, v, is_causal)
        assert rows.all() or (is_causal and sigma >= 10)
        assert error(got[rows], truth[rows]) < rounding
        assert (got != 0).any(-1).all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("exact", [{}, {"window": 4, "sinks": 1}])
def test_gradients_of_large_rows_are_right(is_causal: bool, exact: dict[str, Any]) -> None:
    q, k, v = inputs(torch.float32, 30.0 if exact or not is_causal else 5.0, d=64)
    phi = feature_map("positive", dim=64, num_features=256)
    single = tuple(t.clone().requires_grad_() for t in (q, k, v))
    double = tuple(t.double().requires_grad_() for t in (q, k, v))
    for a, b in zip(
        gradients(linear_attention(*single, phi, is_causal=is_causal, **exact), *single),
        gradients(linear_attention(*double, phi, is_causal=is_causal, **exact), *double),
        strict=True,
    ):
        assert error(a, b) < 1e-3


@pytest.mark.parametrize("size", [1.0, 3.0, 30.0])
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_whose_largest_feature_is_far_above_the_others_are_kept(size: float, is_causal: bool) -> None:
    """Queries and keys along frequencies."""
    phi = feature_map("positive", dim=16, num_features=64)
    w = torch.nn.functional.normalize(phi.projection.matrix(), dim=-1)
    q, k, v = inputs(torch.float32, 0.3 * size)
    q, k = (t + 4 * size * w[torch.arange(300) % 64] for t in (q, k))
    truth = attention_matrix(q.double(), k.double(), phi, is_causal=is_causal) @ v.double()
    for x in (q, q.clone().requires_grad_()):
        got = linear_attention(x, k, v, phi, is_causal=is_causal).detach()
        rows = in_range(got, v, is_causal)
        assert rows.all() or (is_causal and size > 3)
        assert error(got[rows], truth[rows]) < 1e-5 * size**2


@pytest.mark.parametrize("is_causal", [False, True])
def test_features_that_are_all_small_are_raised(is_causal: bool) -> None:
    """An importance weight of exp(-33) on every feature: nothing is lost to it."""
    phi = feature_map("optimal", dim=64, num_features=128)
    w = phi.projection.matrix()
    w.mul_(8 / w.norm(dim=-1, keepdim=True))
    phi.A.fill_(-0.9)
    q, k, v = inputs(torch.float32, 0.1, d=64)
    truth = attention_matrix(q.double(), k.double(), phi, is_causal=is_causal) @ v.double()
    assert error(linear_attention(q, k, v, phi, is_causal=is_causal), truth) < 1e-5


@pytest.mark.parametrize("name", ["positive", "calibrated"])
@pytest.mark.parametrize("sigma", [8.0, 20.0, 60.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exact", [{}, {"window": 8}, {"window": 8, "sinks": 1, "window_kind": "sliding"}])
@pytest.mark.parametrize("is_causal", [False, True])
def test_large_rows_are_those_of_the_log_domain(
    name: str, sigma: float, dtype: torch.dtype, exact: dict[str, Any], is_causal: bool
) -> None:
    q, k, v = inputs(torch.float32, sigma, d=16, n=128)
    phi = feature_map(name, dim=16, num_features=256)
    phi.calibrate_(0.5 * draw(400, 16, seed=21) + 0.2, 0.5 * draw(400, 16, seed=22))
    truth = log_domain_attention(q.double(), k.double(), v.double(), phi, is_causal, **exact)
    got = linear_attention(*(t.to(dtype) for t in (q, k, v)), phi, is_causal=is_causal, **exact)
    assert (got != 0).any(-1).all()
    rows = in_range(got, v, is_causal)
    assert rows.all() or (is_causal and not exact and dtype == torch.float32 and sigma > 8)
    # One rounding of a logit, which grows as sigma^2.
    assert error(got[rows], truth[rows]) < torch.finfo(dtype).eps * 100 * sigma**2 * (1 if name == "positive" else 10)
    matrix = attention_matrix(q, k, phi, is_causal=is_causal, **exact)
    assert error(matrix.double() @ v.double(), truth) < 1e-3


def log_domain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi: FeatureMap,
    is_causal: bool,
    window: int | None = None,
    window_kind: str = "block",
    sinks: int = 0,
) -> Tensor:
    """Every weight from the logarithms of its terms."""
    root = q.shape[-1] ** -0.25
    fq, fk = phi.exponent("query"), phi.exponent("key")
    assert fq is not None
    assert fk is not None
    (x, a), (y, b) = fq.at(q * root), fk.at(k * root)
    terms = (fq.logits(x) + a).unsqueeze(-2) + (fk.logits(y) + b).unsqueeze(-3)
    logits = terms.logsumexp(-1)
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None, :]
    near = j < sinks
    if window:
        near = near | ((i // window - j // window).abs() <= 1 if window_kind == "block" else (i - j).abs() < window)
    logits = torch.where(near, q @ k.mT * root**2, logits)
    return (logits.masked_fill(j > i, -torch.inf) if is_causal else logits).softmax(-1) @ v


def test_lost_later_rows_do_not_touch_earlier_rows_that_cancel_to_zero() -> None:
    phi = feature_map("positive", dim=4, num_features=16)
    axis = torch.eye(4)
    k = (-300 * axis[0]).expand(1, 1, 6, 4).clone()
    k[0, 0, 1, 1] = 1e-9
    v = torch.tensor([1.0, -1, 1, -1, 1, -1]).view(1, 1, 6, 1)
    q = draw(1, 1, 6, 4, dtype=torch.float32) - axis[0]
    later = q.clone()
    later[:, :, 4:] = 300 * axis[0]
    out, other = (linear_attention(x, k, v, phi, is_causal=True) for x in (q, later))
    assert out[:, :, 1].abs().max() < 1e-6
    assert torch.equal(out[:, :, :4], other[:, :, :4])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("exact", [{}, {"window": 8, "window_kind": "block"}])
def test_values_that_overflow_single_precision_on_the_way_come_out_right(
    is_causal: bool, exact: dict[str, Any]
) -> None:
    q, k, v = inputs(torch.float32, 2.0, d=64)
    phi = feature_map("relu", dim=64, num_features=128)
    how: dict[str, Any] = {"is_causal": is_causal, **exact}
    small = linear_attention(q.double(), k.double(), v.double(), phi, **how)
    large = tuple(t.clone().requires_grad_() for t in (q, k, v * 1e37))
    out = linear_attention(*large, phi, **how)
    assert error(out.detach() / 1e37, small) < 1e-4
    learned = tuple(t.double().requires_grad_() for t in (q, k, v))
    want = gradients(linear_attention(*learned, phi, **how), *learned)
    for a, b in zip(gradients(out / 1e37, *large), want, strict=True):
        assert error(a * (1e37 if a.abs().max() < 1e-30 else 1), b) < 1e-3


def test_rows_beyond_single_precision_leave_the_others_and_the_past_alone() -> None:
    q, k, v = inputs(torch.float32, 30.0, d=64)
    phi = feature_map("positive", dim=64, num_features=256)
    out = linear_attention(q, k, v, phi, is_causal=True)
    for cut in (40, 200):
        calm = (torch.cat([t[:, :, :cut], 0.01 * t[:, :, cut:]], dim=2) for t in (q, k))
        assert torch.equal(linear_attention(*calm, v, phi, is_causal=True)[:, :, :cut], out[:, :, :cut])
        assert torch.equal(
            linear_attention(q[:, :, :cut], k[:, :, :cut], v[:, :, :cut], phi, is_causal=True)[:, :, :40],
            out[:, :, :40],
        )


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("sigma", [3.0, 30.0, 300.0])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["positive", "hyperbolic", "calibrated", "relu", "exp"])
def test_outputs_and_gradients_stay_finite(dtype: torch.dtype, sigma: float, is_causal: bool, name: str) -> None:
    q, k, v = (t.requires_grad_() for t in inputs(dtype, sigma, n=150))
    phi = feature_map(name, dim=16, num_features=32)
    for exact in ({}, {"window": 4, "sinks": 1}, {"window": 4, "window_kind": "block"}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = linear_attention(q, k, v, phi, is_causal=is_causal, **exact)
        assert all("got the mean of the values they see" in str(w.message) for w in caught)
        assert not caught or sigma >= 30.0
        assert out.isfinite().all()
        assert float(out.detach().abs().max()) <= 1.01 * float(v.detach().abs().max())
        assert all(t.isfinite().all() for t in gradients(out, q, k, v))


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_rounding_does_not_build_up_over_a_long_stream(dtype: torch.dtype) -> None:
    """20,000 tokens in chunks: the error of the last rows is that of the first."""
    q, k, v = draw_qkv(20_000, b=1, h=1, d=8, v=8, dtype=dtype)
    phi = feature_map("positive", dim=8, num_features=16)
    got = linear_attention(q, k, v + 1, phi, is_causal=True)
    truth = linear_attention(q.double(), k.double(), (v + 1).double(), phi, is_causal=True)
    first, last = (error(got[:, :, rows], truth[:, :, rows]) for rows in (slice(100, 1100), slice(-1000, None)))
    assert last <= 3 * first
