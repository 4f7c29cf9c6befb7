"""Defects seen from outside: each of these failed once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from naive import assert_same, draw_qkv, gradients
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from bochner import BochnerError, BochnerWarning, feature_map, linear_attention
from bochner.nn import Attention, MultiheadAttention

KINDS: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "blocks": {"window": 8, "window_kind": "block"},
    "causal blocks": {"window": 8, "window_kind": "block", "is_causal": True, "sinks": 1},
    "sliding": {"window": 8, "sinks": 1},
}


def compiled(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    torch.compiler.reset()
    return torch.compile(f, fullgraph=True, backend="eager")


def mapped(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """f by vmap over the batch."""
    return torch.func.vmap(lambda *inputs: f(*(t.unsqueeze(0) for t in inputs)).squeeze(0))


def differentiated(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *inputs: torch.func.jvp(f, inputs, tuple(torch.zeros_like(t) for t in inputs))[0]


@pytest.mark.parametrize("window", [10**6, 10**9])
@pytest.mark.parametrize("kind", ["block", "sliding"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_window_beyond_the_sequence_costs_what_the_sequence_costs(window: int, kind: str, is_causal: bool) -> None:
    q, k, v = draw_qkv(50)
    how: dict[str, Any] = {"is_causal": is_causal, "window_kind": kind}
    phi = feature_map("positive", dim=4, num_features=8)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    assert_same(linear_attention(q, k, v, phi, window=window, sinks=10**9, **how), exact)


@pytest.mark.parametrize("name", ["calibrated", "generative_prf", "generative_rks", "gmm_prf", "optimal"])
def test_maps_work_in_double_precision_by_default_or_by_cast(name: str) -> None:
    q, k, v = draw_qkv(20)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        wide = feature_map(name, dim=4, num_features=16)
    finally:
        torch.set_default_dtype(before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BochnerWarning)
        for phi in (wide, feature_map(name, dim=4, num_features=16).double()):
            assert linear_attention(q, k, v, phi).dtype == torch.float64
            assert linear_attention(q.float(), k.float(), v.float(), phi, is_causal=True).dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_a_map_redrawn_before_the_backward_pass_gives_no_wrong_gradient(kind: str) -> None:
    """Of an exponential map what is needed was kept, of any other it is refused."""
    q, k, v = (t.requires_grad_() for t in draw_qkv(40))
    for name in ("positive", "relu"):
        phi = feature_map(name, dim=4, num_features=8)
        want = gradients(linear_attention(q, k, v, phi, **KINDS[kind]), q, k, v)
        out = linear_attention(q, k, v, phi, **KINDS[kind])
        phi.redraw_(seed=5)
        if name == "positive":
            assert_same(gradients(out, q, k, v), want)
            continue
        with pytest.raises(BochnerError, match="changed between the forward and the backward pass"):
            gradients(out, q, k, v)


def test_small_normalisers_do_not_depend_on_chunks() -> None:
    phi = feature_map("trig", dim=4, num_features=4)
    q, k, v = draw_qkv(300, scale=3.0)
    how: dict[str, Any] = {"phi": phi, "is_causal": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BochnerWarning)
        whole = linear_attention(q, k, v, **how)
        learned = linear_attention(q.clone().requires_grad_(), k, v, **how)
        first, state = linear_attention(*(t[:, :, :70] for t in (q, k, v)), **how, return_state=True)
        rest = linear_attention(*(t[:, :, 70:] for t in (q, k, v)), **how, state=state)
    assert_same(learned, whole, tol=1e-10)
    assert_same(torch.cat([first, rest], dim=2), whole, tol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_transformations_of_functions(kind: str) -> None:
    q, k, v = draw_qkv(40)
    phi = feature_map("positive", dim=4, num_features=8)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return linear_attention(x, k, v, phi, **KINDS[kind])

    assert_same(torch.func.vmap(attend)(torch.stack([q, 2 * q]))[1], attend(2 * q))
    x = q.clone().requires_grad_()
    (want,) = torch.autograd.grad(attend(x).sum(), x)
    assert_same(torch.func.grad(lambda t: attend(t).sum())(q), want)
    out, tangent = torch.func.jvp(attend, (q,), (torch.ones_like(q),))
    assert_same(out, attend(q))
    assert_same(tangent.sum(), want.sum(), tol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_without_data(kind: str) -> None:
    phi = feature_map("positive", dim=4, num_features=8)
    shapes = ((2, 4, 40, 4), (2, 2, 40, 4), (2, 2, 40, 3))
    q, k, v = (torch.empty(*shape, device="meta") for shape in shapes)
    assert linear_attention(q, k, v, feature_map("positive", dim=4, num_features=8), **KINDS[kind]).shape == (
        2,
        4,
        40,
        3,
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(*shape) for shape in shapes)
        assert linear_attention(q, k, v, phi, **KINDS[kind]).shape == (2, 4, 40, 3)


def test_a_state_is_resumed_only_by_what_made_it() -> None:
    q, k, v = draw_qkv(20)
    phi = feature_map("positive", dim=4, num_features=8)
    _, state = linear_attention(q, k, v, phi, is_causal=True, return_state=True)
    other = feature_map("positive", dim=4, num_features=8, seed=5)
    with pytest.raises(BochnerError, match="made by another map"):
        linear_attention(q, k, v, other, is_causal=True, state=state)
    with pytest.raises(BochnerError, match=r"made with scale=0\.5, this call has scale=0\.3"):
        linear_attention(q, k, v, phi, is_causal=True, state=state, scale=0.3)
    same = feature_map("positive", dim=4, num_features=8)
    assert linear_attention(q, k, v, same, is_causal=True, state=state).isfinite().all()


def test_flags_are_flags_and_numpy_integers_are_integers() -> None:
    q, k, v = draw_qkv(20)
    phi = feature_map("positive", dim=np.int64(4), num_features=np.int32(8))
    with pytest.raises(BochnerError, match="'is_causal' of linear_attention must be True or False, got 'no'"):
        linear_attention(q, k, v, phi, is_causal="no")
    assert linear_attention(q, k, v, phi, window=np.int64(4), sinks=np.int32(1)).shape == v.shape


def test_masks_of_the_module_have_the_size_of_its_inputs() -> None:
    module = MultiheadAttention(8, 2, batch_first=True, attention=Attention(num_features=8))
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    want = module(x, x, x, is_causal=True)[0]
    assert_same(module(x, x, x, attn_mask=causal)[0], want, tol=1e-6)
    assert_same(module(x, x, x, attn_mask=causal.expand(6, 5, 5))[0], want, tol=1e-6)
    with pytest.raises(BochnerError, match=r"'attn_mask' must have shape \(n, s\) = \(5, 5\)"):
        module(x, x, x, attn_mask=torch.ones(7, 7, dtype=torch.bool).triu(1))
    with pytest.raises(BochnerError, match=r"'attn_mask' must have shape \(n, s\) = \(5, 5\)"):
        module(x, x, x, attn_mask=torch.ones(7, 7, dtype=torch.bool).triu(1), is_causal=True)


@pytest.mark.parametrize("kind", ["causal", "causal blocks"])
@pytest.mark.parametrize(("n", "s"), [(1, 30), (5, 30), (30, 30), (64, 200)])
def test_queries_can_be_the_last_of_the_keys(kind: str, n: int, s: int) -> None:
    q, k, v = (t.requires_grad_() for t in draw_qkv(s))
    phi = feature_map("positive", dim=4, num_features=8)
    whole = linear_attention(q, k, v, phi, **KINDS[kind])[:, :, -n:]
    last = linear_attention(q[:, :, -n:], k, v, phi, **KINDS[kind])
    assert_same(last, whole)
    assert_same(gradients(last, q, k, v), gradients(whole, q, k, v), tol=1e-10)


@pytest.mark.parametrize("sigma", [8.0, 30.0])
@pytest.mark.parametrize("options", [{}, {"window": 4, "sinks": 1}, {"window": 4, "window_kind": "block"}])
def test_steps_are_finite_wherever_whole_sequences_are(sigma: float, options: dict[str, Any]) -> None:
    phi = feature_map("positive", dim=8, num_features=32)
    for seed in range(5):
        q, k, v = draw_qkv(20, d=8, scale=sigma, dtype=torch.float32, seed=seed)
        rows, state = [], None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BochnerWarning)
            whole = linear_attention(q, k, v, phi, is_causal=True, **options)
            for i in range(20):
                token = (t[:, :, i : i + 1] for t in (q, k, v))
                how: dict[str, Any] = {"is_causal": True, "return_state": True, "state": state, **options}
                out, state = linear_attention(*token, phi, **how)
                rows.append(out)
        assert whole.isfinite().all()
        assert torch.cat(rows, dim=2).isfinite().all()


@pytest.mark.parametrize("options", [{}, {"window": 4, "window_kind": "block"}])
def test_in_a_compiled_graph_a_later_nan_leaves_earlier_rows_alone(options: dict[str, Any]) -> None:
    phi = feature_map("positive", dim=4, num_features=8)
    q, k, v = draw_qkv(40, dtype=torch.float32)
    attend = torch.compile(lambda q, k, v: linear_attention(q, k, v, phi, is_causal=True, **options), fullgraph=True)
    bad = v.clone()
    bad[:, :, 30] = torch.nan
    out = attend(q, k, bad)
    assert out[:, :, 30:].isnan().all()
    assert_same(out[:, :, :30], linear_attention(q, k, v, phi, is_causal=True, **options)[:, :, :30], tol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_window_beyond_the_sequence_costs_no_more_beside_padding_on_the_left(is_causal: bool) -> None:
    q, k, v = draw_qkv(50)
    mask = torch.arange(50) < torch.tensor([[3], [7]])
    phi = feature_map("positive", dim=4, num_features=8)
    how: dict[str, Any] = {"is_causal": is_causal, "window": 10**9, "window_kind": "block", "key_padding_mask": mask}
    got = linear_attention(q, k, v, phi, **how)
    for i, start in enumerate((3, 7)):
        alone = (t[i : i + 1, :, start:] for t in (q, k, v))
        exact = torch.nn.functional.scaled_dot_product_attention(*alone, is_causal=is_causal)
        assert_same(got[i : i + 1, :, start:], exact)


@pytest.mark.parametrize("kind", KINDS)
def test_dual_numbers_carry_the_derivative(kind: str) -> None:
    q, k, v = draw_qkv(20)
    phi = feature_map("positive", dim=4, num_features=8)
    tangents = draw_qkv(20, seed=7)

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        return linear_attention(*inputs, phi, **KINDS[kind])

    with forward_ad.dual_level():
        out = attend(*(forward_ad.make_dual(x, t) for x, t in zip((q, k, v), tangents, strict=True)))
        value, tangent = forward_ad.unpack_dual(out)
    assert_same(value, attend(q, k, v))
    assert_same(tangent, torch.func.jvp(attend, (q, k, v), tangents)[1])


@pytest.mark.parametrize("kind", KINDS)
def test_maps_and_attention_have_shapes_without_values(kind: str) -> None:
    with FakeTensorMode():
        phi = feature_map("positive", dim=4, num_features=8)
        assert linear_attention(*(torch.randn(2, 2, 20, 4) for _ in range(3)), phi, **KINDS[kind]).shape == (
            2,
            2,
            20,
            4,
        )
        if KINDS[kind].get("is_causal"):
            how: dict[str, Any] = {"return_state": True, **KINDS[kind]}
            assert len(linear_attention(*(torch.randn(2, 2, 20, 4) for _ in range(3)), phi, **how)) == 2


BLIND = {"compiled": compiled, "vmap": mapped, "jvp": differentiated}


@pytest.mark.parametrize("way", BLIND)
@pytest.mark.parametrize("kind", [*KINDS, "causal sliding"])
@pytest.mark.parametrize("name", "qkv")
def test_where_nothing_can_be_refused_rows_that_see_nan_are_nan_and_no_others(name: str, kind: str, way: str) -> None:
    how = KINDS.get(kind, {"window": 8, "is_causal": True})
    phi = feature_map("positive", dim=4, num_features=8)
    inputs = dict(zip("qkv", draw_qkv(40, h=4, g=2, dtype=torch.float32), strict=True))
    want = linear_attention(*inputs.values(), phi, **how)
    inputs[name] = inputs[name].clone()
    inputs[name][1, 1, 30] = torch.nan
    out = BLIND[way](lambda q, k, v: linear_attention(q, k, v, phi, **how))(*inputs.values())
    sees, heads = torch.zeros(2, 4, 40, dtype=torch.bool), slice(1, 2) if name == "q" else slice(2, 4)
    sees[1, heads, slice(30, 31) if name == "q" else slice(30, None) if how.get("is_causal") else slice(None)] = True
    assert torch.equal(out.isnan().all(-1), sees)
    assert_same(out[~sees], want[~sees], tol=1e-5)


@pytest.mark.parametrize("sigma", [15.0, 30.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["positive", "relu"])
def test_under_torch_func_rows_out_of_range_are_what_they_are_elsewhere(name: str, kind: str, sigma: float) -> None:
    q, k, v = draw_qkv(128, d=16, dtype=torch.float32)
    q, k = q * sigma, k * sigma
    phi = feature_map(name, dim=16, num_features=64)

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        return linear_attention(*inputs, phi, **KINDS[kind])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BochnerWarning)
        want = attend(q, k, v)
    assert_same(mapped(attend)(q, k, v), want, tol=1e-3)
    grad = torch.func.grad(lambda q, k, v: attend(q, k, v).square().sum(), argnums=(0, 1, 2))
    assert all(g.isfinite().all() for g in grad(q, k, v))


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_rows_out_of_range_are_what_they_are_elsewhere(kind: str) -> None:
    q, k, v = draw_qkv(128, d=16, dtype=torch.float32)
    phi = feature_map("positive", dim=16, num_features=64)
    mask = torch.zeros(2, 128, dtype=torch.bool)
    mask[1] = True
    q, k = ((30 * t).requires_grad_() for t in (q, k))

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        return linear_attention(*inputs, phi, key_padding_mask=mask, **KINDS[kind])

    out = compiled(attend)(q, k, v)
    assert out[1].eq(0).all()  # nothing to see
    assert out[0].ne(0).any(-1).all()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", BochnerWarning)
        assert_same(out, attend(q, k, v), tol=1e-3)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k)))
