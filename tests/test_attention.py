"""Linear attention against the quadratic definition: outputs, states, gradients, every option."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from naive import assert_same, draw, draw_qkv, gradients, naive_attention
from torch import Tensor

from bochner import BochnerError, BochnerWarning, attention_matrix, exact_attention, feature_map, linear_attention
from bochner.attention import softmax
from bochner.maps.base import FeatureMap, Features

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 1000)
MAPS: dict[str, dict[str, Any]] = {
    "positive": {},
    "hyperbolic": {"kernel": "gaussian"},
    "regularized": {"projection": "hadamard"},
    "optimal": {"A": -0.1},
    "calibrated": {"num_heads": 2},
    "relu": {"num_heads": 2},
    "elu": {"num_features": None, "kernel_epsilon": 0.0},
    "exp": {},
    "sigmoid": {},
}


def make(name: str = "positive", d: int = 4, **options: Any) -> FeatureMap:
    phi = feature_map(name, dim=d, **{"num_features": 8, "seed": 1, **options})
    heads = () if phi.num_heads is None else (phi.num_heads,)
    return phi.calibrate_(draw(*heads, 50, d, seed=7) + 0.3, 0.5 * draw(*heads, 50, d, seed=8) - 0.2)


def padding(b: int, s: int, seed: int = 5) -> Tensor:
    """A third of the keys at random places; the first sequence loses its first keys too."""
    mask = draw(b, s, seed=seed) < -0.4
    mask[0, : s // 4] = True
    return mask


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_output_and_gradients_are_those_of_the_quadratic_definition(n: int, is_causal: bool) -> None:
    phi = make()
    inputs = tuple(t.requires_grad_() for t in draw_qkv(n))
    want = naive_attention(*inputs, phi, is_causal=is_causal)
    want_grads = gradients(want, *inputs)
    for recompute in (True, False):
        got = linear_attention(*inputs, phi, is_causal=is_causal, recompute=recompute)
        assert_same(got, want)
        assert_same(gradients(got, *inputs), want_grads)
    with torch.no_grad():
        assert_same(linear_attention(*inputs, phi, is_causal=is_causal), want)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_kind_of_map_gives_its_quadratic_attention(name: str, is_causal: bool) -> None:
    phi = make(name, **MAPS[name])
    q, k, v = (t.requires_grad_() for t in draw_qkv(150))
    mask = padding(2, 150)
    want = naive_attention(q, k, v, phi, is_causal=is_causal, key_padding_mask=mask)
    got = linear_attention(q, k, v, phi, is_causal=is_causal, key_padding_mask=mask)
    assert_same(got, want)
    assert_same(gradients(got, q, k, v), gradients(want, q, k, v))
    matrix = attention_matrix(q, k, phi, is_causal=is_causal, key_padding_mask=mask)
    assert_same(matrix @ v, want)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rows", [64, 128])
def test_many_row_blocks_give_the_same_as_one(is_causal: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    phi = make()
    inputs = tuple(t.requires_grad_() for t in draw_qkv(300, g=1))
    mask = padding(2, 300)
    want = naive_attention(*inputs, phi, is_causal=is_causal, key_padding_mask=mask)
    want_grads = gradients(want, *inputs)
    monkeypatch.setattr("bochner.attention.scan.rows_at_once", lambda *_: rows)
    for recompute in (True, False):
        got = linear_attention(*inputs, phi, is_causal=is_causal, key_padding_mask=mask, recompute=recompute)
        assert_same(got, want)
        assert_same(gradients(got, *inputs), want_grads)
    with torch.no_grad():
        assert_same(linear_attention(*inputs, phi, is_causal=is_causal, key_padding_mask=mask), want)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_reach_the_parameters_of_a_trainable_map(is_causal: bool) -> None:
    phi = make("optimal", A=-0.1).trainable_()
    parameters = tuple(phi.double().parameters())
    assert len(parameters) == 2
    q, k, v = draw_qkv(140)
    got = gradients(linear_attention(q, k, v, phi, is_causal=is_causal), *parameters)
    assert_same(got, gradients(naive_attention(q, k, v, phi, is_causal=is_causal), *parameters), tol=1e-9)
    assert all(float(t.abs().max()) > 1e-3 for t in got)


@pytest.mark.parametrize("g", [1, 2, 4])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_grouped_heads_equal_repeated_keys(g: int, is_causal: bool, per_head: bool) -> None:
    q, k, v = (t.requires_grad_() for t in draw_qkv(70, h=4, g=g))
    phi = make(num_heads=g if per_head else None)
    mask = padding(2, 70)
    got = linear_attention(q, k, v, phi, is_causal=is_causal, key_padding_mask=mask)
    want = naive_attention(q, k, v, phi, is_causal=is_causal, key_padding_mask=mask)
    assert_same(got, want)
    assert_same(gradients(got, q, k, v), gradients(want, q, k, v))
    if not per_head:
        repeated = (t.repeat_interleave(4 // g, dim=1) for t in (k, v))
        assert_same(got, linear_attention(q, *repeated, phi, is_causal=is_causal, key_padding_mask=mask))


@pytest.mark.parametrize(("n", "s"), [(1, 70), (70, 1), (65, 200)])
def test_cross_attention_takes_other_numbers_of_keys_than_queries(n: int, s: int) -> None:
    phi = make()
    q, k, v = (t.requires_grad_() for t in draw_qkv(n, s=s, h=4, g=2))
    mask = padding(2, s)
    got = linear_attention(q, k, v, phi, key_padding_mask=mask)
    want = naive_attention(q, k, v, phi, key_padding_mask=mask)
    assert_same(got, want)
    assert_same(gradients(got, q, k, v), gradients(want, q, k, v))


@pytest.mark.parametrize("scale", [0.01, 1.0, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_scale_multiplies_the_dot_product(scale: float, is_causal: bool) -> None:
    phi = make()
    q, k, v = draw_qkv(70, scale=0.5)
    got = linear_attention(q, k, v, phi, is_causal=is_causal, scale=scale)
    assert_same(got, naive_attention(q, k, v, phi, is_causal=is_causal, scale=scale))
    assert_same(got, attention_matrix(q, k, phi, is_causal=is_causal, scale=scale) @ v)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("exact", [{}, {"window": 4, "sinks": 1}])
def test_rows_with_nothing_to_attend_to_are_zero_and_send_no_gradient(
    is_causal: bool, recompute: bool, exact: dict[str, Any]
) -> None:
    phi = make()
    q, k, v = (t.requires_grad_() for t in draw_qkv(140))
    mask = torch.zeros(2, 140, dtype=torch.bool)
    mask[0] = True
    mask[1, :130] = True
    got = linear_attention(q, k, v, phi, is_causal=is_causal, key_padding_mask=mask, recompute=recompute, **exact)
    grads = gradients(got, q, k, v)
    assert (got[0] == 0).all()
    assert all(g.isfinite().all() and (g[0] == 0).all() and (g[1] != 0).any() for g in grads)
    if is_causal:
        assert (got[1, :, :130] == 0).all()
        assert (grads[0][1, :, :130] == 0).all()
    assert (got[1, :, 130:] != 0).all()
    assert_same(got, naive_attention(q, k, v, phi, is_causal=is_causal, key_padding_mask=mask, **exact))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_output_keeps_the_input_dtype_and_state_the_accumulation_dtype(dtype: torch.dtype) -> None:
    q, k, v = draw_qkv(10, dtype=dtype)
    out, state = linear_attention(q, k, v, make(), is_causal=True, return_state=True)
    assert out.dtype == dtype
    assert out.shape == (2, 2, 10, 3)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {state.kv.dtype, state.norm.dtype, state.log_scale.dtype} == {wide}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear_attention(q, k, v, make(), is_causal=True), out)


def test_map_by_name_is_the_default_map_of_the_head_size() -> None:
    q, k, v = draw_qkv(10)
    assert torch.equal(linear_attention(q, k, v, "positive"), linear_attention(q, k, v, feature_map("positive", dim=4)))


# The quadratic oracles themselves.


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("chunk", [7, 512])
def test_exact_attention_is_torchs_for_softmax(is_causal: bool, chunk: int) -> None:
    q, k, v = draw_qkv(33, h=4, g=2)
    k2, v2 = (t.repeat_interleave(2, dim=1) for t in (k, v))
    want = torch.nn.functional.scaled_dot_product_attention(q, k2, v2, is_causal=is_causal)
    assert_same(exact_attention(q, k, v, is_causal=is_causal, chunk=chunk), want)


def test_exact_attention_rounds_nothing_but_its_output_in_half_precision() -> None:
    q, k, v = (3 * t.bfloat16() for t in torch.randn(3, 1, 2, 64, 48, generator=torch.Generator().manual_seed(0)))
    wide = exact_attention(q.double(), k.double(), v.double())
    assert (exact_attention(q, k, v).double() - wide).norm() < 2**-8 * wide.norm()


@pytest.mark.parametrize("is_causal", [False, True])
def test_exact_attention_takes_gaussian_functions_and_maps(is_causal: bool) -> None:
    q, k, v = draw_qkv(20, d=4)
    mask = padding(2, 20)
    x, y = q / 4**0.25, k / 4**0.25
    squares = (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1)
    for kernel, weights in (
        ("gaussian", (-squares / 2).exp()),
        (feature_map("positive", dim=4, kernel="gaussian"), (-squares / 2).exp()),
        (lambda a, b: 1 / (1 + torch.cdist(a, b)), 1 / (1 + squares.sqrt())),
    ):
        weights = weights * ~mask[:, None, None, :]
        weights = weights.tril() if is_causal else weights
        total = weights.sum(-1, keepdim=True)
        want = weights / torch.where(total == 0, 1, total) @ v
        options: dict[str, Any] = {"is_causal": is_causal, "key_padding_mask": mask}
        assert_same(exact_attention(q, k, v, kernel, **options), want, tol=1e-7)


def test_attention_matrix_of_a_map_is_stochastic_and_lower_triangular() -> None:
    q, k, _ = draw_qkv(20)
    weights = attention_matrix(q, k, make(), is_causal=True)
    assert_same(weights.sum(-1), torch.ones(2, 2, 20, dtype=torch.float64))
    assert torch.equal(weights, weights.tril())
    assert (weights.tril() >= 0).all()


# Signed maps.


class Alternating(FeatureMap):
    """One feature, the first coordinate: normalisers have any sign, and can vanish exactly."""

    feature_dim = 1

    def __init__(self) -> None:
        super().__init__(2, 1)

    def _features(self, x: Tensor, role: str) -> Features:
        return Features(x[..., :1], torch.zeros_like(x[..., :1]))


def signed_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Rows 0 and 3 have a good normaliser, row 1 a negative one, row 2 exactly zero with a nonzero bound."""
    q = torch.ones(1, 1, 4, 2, dtype=torch.float64)
    k = torch.tensor([1.0, -2.0, 1.0, 3.0], dtype=torch.float64)[:, None].expand(1, 1, 4, 2)
    return q, k, draw(1, 1, 4, 3)


@pytest.mark.parametrize("is_causal", [False, True])
def test_signed_maps_give_quadratic_attention_where_the_normaliser_is_sound(is_causal: bool) -> None:
    phi = make("trig", kernel="gaussian", num_features=64)
    q, k, v = (t.requires_grad_() for t in draw_qkv(140, scale=0.3))
    got, want = (f(q, k, v, phi, is_causal=is_causal) for f in (linear_attention, naive_attention))
    assert_same(got, want)
    assert_same(gradients(got, q, k, v), gradients(want, q, k, v))


@pytest.mark.parametrize("policy", ["mean", "zero"])
def test_small_normalisers_are_counted_and_never_give_infinity(policy: str) -> None:
    q, k, v = (t.requires_grad_() for t in signed_inputs())
    with pytest.warns(BochnerWarning, match=re.escape("2 of 4 attention rows have a normaliser near or below zero")):
        out = linear_attention(q, k, v, Alternating(), is_causal=True, scale=1.0, on_small_normalizer=policy)
    good = naive_attention(q, k, v, Alternating(), is_causal=True, scale=1.0)
    assert_same(out[:, :, [0, 3]], good[:, :, [0, 3]])
    assert out.isfinite().all()
    assert all(t.isfinite().all() for t in gradients(out, q, k, v))
    means = (v.cumsum(2) / torch.arange(1, 5)[:, None])[:, :, [1, 2]]
    assert_same(out[:, :, [1, 2]], means if policy == "mean" else torch.zeros_like(means))


def test_small_normalisers_are_refused_on_request() -> None:
    with pytest.raises(BochnerError, match="2 of 4 attention rows"):
        linear_attention(*signed_inputs(), Alternating(), is_causal=True, scale=1.0, on_small_normalizer="raise")


@pytest.mark.parametrize("name", ["trig", "tanh", "cos", "identity"])
@pytest.mark.parametrize("exact", [{}, {"window": 8, "sinks": 1}])
@pytest.mark.parametrize("is_causal", [False, True])
def test_noisy_signed_maps_stay_finite(name: str, exact: dict[str, Any], is_causal: bool) -> None:
    phi = feature_map(name, dim=4, num_features=4)
    q, k, v = (t.requires_grad_() for t in draw_qkv(200, scale=10.0, dtype=torch.float32))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = linear_attention(q, k, v, phi, is_causal=is_causal, **exact)
    assert all(issubclass(w.category, BochnerWarning) for w in caught)
    assert out.isfinite().all()
    assert all(t.isfinite().all() for t in gradients(out, q, k, v))


def _without(options: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}


@pytest.mark.parametrize("size", [3, 6, 9])
@pytest.mark.parametrize(("n", "s"), [(20, 27), (5, 27), (20, 5)])
def test_softmax_attention_in_blocks_has_the_gradients_of_the_whole(
    n: int, s: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks of rows and of keys, values narrower and wider than keys; both outputs have a gradient."""
    monkeypatch.setattr(softmax, "BLOCK", 8)
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 3, n, 6), (2, 3, s, 6), (2, 3, s, size), (2, 3, 1, s))
    inputs = [torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes]
    grads = [torch.randn(2, 3, n, d, generator=g, dtype=torch.float64) for d in (size, 1)]
    q, k, v, bias = inputs
    logits = q @ k.mT + bias
    found, expected = softmax.softmax(*inputs), (logits.softmax(-1) @ v, logits.logsumexp(-1, keepdim=True))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, grads), torch.autograd.grad(expected, inputs, grads), atol=1e-10, rtol=1e-8
    )
