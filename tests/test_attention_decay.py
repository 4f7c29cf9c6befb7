"""Decay: every token makes the keys before it weigh less, fixed per head or computed, in every path of attention."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from naive import assert_same, draw, draw_qkv, gradients, naive_attention
from torch import Tensor

from bochner import BochnerError, attention_matrix, exact_attention, feature_map, linear_attention
from bochner.attention import PreparedMap

NEAR: dict[str, dict[str, Any]] = {
    "none": {},
    "sinks": {"sinks": 2},
    "block": {"window": 8},
    "block and sinks": {"window": 8, "sinks": 2},
    "sliding and sinks": {"window": 8, "sinks": 2, "window_kind": "sliding"},
}


def decays(kind: str, g: int, s: int, b: int = 2, size: float = 0.5) -> Tensor:
    shape = (g,) if kind == "fixed" else (b, g, s)
    return -size * draw(*shape, seed=7).abs()


def padding(kind: str, s: int, b: int = 2) -> Tensor | None:
    if kind == "left":
        return torch.arange(s) < torch.arange(b)[:, None] * (s // 3)
    return draw(b, s, seed=8) > 0.6 if kind == "scattered" else None


@pytest.mark.parametrize("near", NEAR.values(), ids=NEAR)
@pytest.mark.parametrize("kind", ["fixed", "computed"])
@pytest.mark.parametrize("padded", ["none", "left", "scattered"])
def test_rows_and_all_gradients_follow_the_definition(
    near: dict[str, Any], kind: str, padded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bochner.attention.scan.ELEMENTS", 1)  # several parts
    q, k, v = (t.requires_grad_() for t in draw_qkv(150, h=4, g=2))
    decay = decays(kind, 2, 150).requires_grad_()
    phi = feature_map("positive", dim=4, num_features=8).double()
    how = near | {"is_causal": True, "key_padding_mask": padding(padded, 150), "decay": decay}
    got, want = linear_attention(q, k, v, phi, **how), naive_attention(q, k, v, phi, **how)
    assert_same(got, want)
    assert_same(gradients(got, q, k, v, decay), gradients(want, q, k, v, decay), 1e-10)


@pytest.mark.parametrize("near", NEAR.values(), ids=NEAR)
@pytest.mark.parametrize("kind", ["fixed", "computed"])
@pytest.mark.parametrize("padded", ["none", "left"])
def test_a_resumed_state_goes_on_decaying(near: dict[str, Any], kind: str, padded: str) -> None:
    q, k, v = (t.requires_grad_() for t in draw_qkv(60, h=4, g=2))
    decay, mask = decays(kind, 2, 60).requires_grad_(), padding(padded, 60)
    phi = feature_map("positive", dim=4, num_features=8).double()
    want = naive_attention(q, k, v, phi, is_causal=True, decay=decay, key_padding_mask=mask, **near)
    for mode in (torch.enable_grad, torch.no_grad):
        rows, state = [], None
        with mode():
            for i, j in pairwise([0, 13, 29, *range(30, 45), 60]):
                part = decay if kind == "fixed" else decay[..., i:j]
                held = None if mask is None else mask[:, i:j]
                how = near | {"is_causal": True, "decay": part, "key_padding_mask": held, "return_state": True}
                out, state = linear_attention(*(t[:, :, i:j] for t in (q, k, v)), phi, state=state, **how)
                rows.append(out)
        assert_same(torch.cat(rows, dim=2), want)
        if mode is torch.enable_grad:
            found = gradients(torch.cat(rows, dim=2), q, k, v, decay)
            assert_same(found, gradients(want, q, k, v, decay), 1e-10)


@pytest.mark.parametrize("near", NEAR.values(), ids=NEAR)
def test_keys_before_the_first_query_decay(near: dict[str, Any]) -> None:
    q, k, v = draw_qkv(20, s=75)
    phi, how = feature_map("positive", dim=4, num_features=8).double(), near | {"is_causal": True}
    decay = decays("computed", 2, 75)
    assert_same(linear_attention(q, k, v, phi, decay=decay, **how), naive_attention(q, k, v, phi, decay=decay, **how))


@pytest.mark.parametrize("near", NEAR.values(), ids=NEAR)
def test_a_state_may_stop_decaying_and_begin_to(near: dict[str, Any]) -> None:
    q, k, v = draw_qkv(64)
    phi, how = feature_map("positive", dim=4, num_features=8).double(), near | {"is_causal": True}
    decay = decays("computed", 2, 64)
    decay[..., :20], decay[..., 40:] = 0, 0
    rows, state = [], None
    for i, j in pairwise([0, 20, 40, 41, 42, 64]):
        part = {"decay": decay[..., i:j]} if 20 <= i < 40 else {}
        given = [t[:, :, i:j] for t in (q, k, v)]
        with torch.no_grad():
            out, state = linear_attention(*given, phi, state=state, return_state=True, **how, **part)
        rows.append(out)
    assert_same(torch.cat(rows, dim=2), naive_attention(q, k, v, phi, decay=decay, **how))


@pytest.mark.parametrize("name", ["relu", "trig", "landmark", "moments", "gmm_prf", "sum_poly"])
def test_every_kind_of_map_decays(name: str) -> None:
    """Decay is a weight of the keys: heavier ones are the same as several equal ones."""
    q, k, v = draw_qkv(80, scale=0.5)
    options: dict[str, Any] = {"positive": False} if name == "landmark" else {}
    phi = feature_map(name, dim=4, num_features=16, **options).double()
    phi.calibrate_(*draw_qkv(60, b=4, seed=5)[:2])
    # Half the weight at token 50: every key before it is seen once, every later one twice.
    decay = torch.zeros(1, 1, 80, dtype=torch.float64)
    decay[..., 50] = -torch.tensor(2.0).log()
    order = torch.cat([torch.arange(50), torch.arange(50, 80).repeat_interleave(2)])
    got = linear_attention(q, k, v, phi, is_causal=True, decay=decay, diagnostics=False)[:, :, -1:]
    assert_same(got, linear_attention(q[:, :, -1:], k[:, :, order], v[:, :, order], phi, diagnostics=False), 1e-7)


@pytest.mark.parametrize("near", NEAR.values(), ids=NEAR)
def test_strong_decay_over_a_long_sequence_loses_no_digits(near: dict[str, Any]) -> None:
    """Sums of decays grow to thousands, and only their differences count."""
    q, k, v = draw_qkv(3000, b=1, h=1)
    decay = decays("computed", 1, 3000, 1, size=2.0)
    phi = feature_map("positive", dim=4, num_features=16)
    want = linear_attention(q, k, v, phi.double(), is_causal=True, decay=decay, **near)
    phi = feature_map("positive", dim=4, num_features=16)
    got, state = linear_attention(
        q.float(), k.float(), v.float(), phi, is_causal=True, decay=decay, return_state=True, **near
    )
    assert_same(got.double(), want, 2e-5)
    assert state.log_scale.dtype == torch.float32
    assert float(state.log_scale.abs().max()) < 100


@pytest.mark.parametrize("near", NEAR.values(), ids=NEAR)
def test_later_decays_do_not_move_an_earlier_row_by_a_bit(near: dict[str, Any]) -> None:
    q, k, v = draw_qkv(150, dtype=torch.float32)
    phi, decay = feature_map("positive", dim=4, num_features=8), decays("computed", 2, 150)
    other = decay.clone()
    other[..., 71:] *= 3
    first, second = (linear_attention(q, k, v, phi, is_causal=True, decay=d, **near) for d in (decay, other))
    assert torch.equal(first[:, :, :71], second[:, :, :71])
    assert not torch.equal(first[:, :, 71:], second[:, :, 71:])


@pytest.mark.parametrize("near", NEAR.values(), ids=NEAR)
def test_plain_operations_and_second_derivatives_agree(near: dict[str, Any]) -> None:
    q, k, v = draw_qkv(70, b=1)
    phi, decay = feature_map("positive", dim=4, num_features=6).double(), decays("computed", 2, 70, 1)

    def f(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        return linear_attention(q, k, v, phi, is_causal=True, decay=decay, recompute=False, **near)

    want = f(q, k, v, decay)
    assert_same(torch.func.vmap(f)(*(t.unsqueeze(0) for t in (q, k, v, decay)))[0], want)
    short = [t[:, :, :11].clone().requires_grad_() for t in (q, k, v)] + [decay[..., :11].clone().requires_grad_()]
    assert torch.autograd.gradgradcheck(f, short, atol=1e-6, fast_mode=True)


def test_the_matrix_and_the_exact_oracle_decay() -> None:
    q, k, v = draw_qkv(40, h=4, g=2)
    decay, mask = decays("computed", 2, 40), padding("scattered", 40)
    for name in ("positive", "trig"):
        phi = feature_map(
            name, dim=4, num_features=64, **({} if name == "positive" else {"kernel": "softmax"})
        ).double()
        how: dict[str, Any] = {"is_causal": True, "key_padding_mask": mask, "decay": decay, "window": 4, "sinks": 1}
        weights = attention_matrix(q, k, phi, **how)
        rows = weights @ v.repeat_interleave(2, dim=1)
        assert_same(rows, linear_attention(q, k, v, phi, diagnostics=False, **how), 1e-9)
    exact = exact_attention(q, k, v, is_causal=True, key_padding_mask=mask, decay=decay)
    near = naive_attention(q, k, v, phi, window=40, is_causal=True, key_padding_mask=mask, decay=decay)
    assert_same(exact, near, 1e-9)
    by_function = exact_attention(q, k, v, lambda x, y: (x @ y.mT).exp(), is_causal=True, decay=-0.1)
    assert_same(by_function, exact_attention(q, k, v, is_causal=True, decay=[-0.1, -0.1]), 1e-9)


def test_a_prepared_map_and_no_decay_change_nothing() -> None:
    q, k, v = draw_qkv(100, dtype=torch.float32)
    phi = feature_map("positive", dim=4, num_features=8)
    want = linear_attention(q, k, v, phi, is_causal=True)
    assert_same(linear_attention(q, k, v, phi, is_causal=True, decay=0.0), want, 1e-6)
    prepared = PreparedMap(phi, 0.5)
    both = [linear_attention(q, k, v, x, is_causal=True, decay=[-0.1, -0.2]) for x in (phi, prepared)]
    assert torch.equal(*both)


@pytest.mark.parametrize(
    ("decay", "said"),
    [
        (0.1, "logarithms of at most 0, got 0.1"),
        ([-0.1, float("nan")], "logarithms of at most 0, got nan"),
        (torch.full((2, 2, 9), -torch.inf), "logarithms of at most 0, got -inf"),
        ([-0.1] * 3, r"one for each key head \(2,\) or for each token \(2, 2, 9\), got shape \(3,\)"),
        (torch.zeros(2, 9), r"got shape \(2, 9\)"),
        ("slow", "got 'slow'"),
    ],
    ids=str,
)
def test_a_wrong_decay_is_refused_in_one_sentence(decay: Any, said: str) -> None:
    q, k, v = draw_qkv(9)
    for call in (linear_attention, lambda q, k, v, _, **how: exact_attention(q, k, v, **how)):
        with pytest.raises(BochnerError, match=said):
            call(q, k, v, "positive", is_causal=True, decay=decay)
    with pytest.raises(BochnerError, match="needs is_causal=True"):
        linear_attention(q, k, v, "positive", decay=-0.1)


def test_padding_may_hold_any_decay() -> None:
    q, k, v = draw_qkv(20)
    phi, decay, mask = (
        feature_map("positive", dim=4, num_features=8).double(),
        decays("computed", 2, 20),
        padding("left", 20),
    )
    assert mask is not None
    how: dict[str, Any] = {"is_causal": True, "key_padding_mask": mask}
    want = linear_attention(q, k, v, phi, decay=decay, **how)
    wild = decay.masked_fill(mask[:, None], torch.nan)
    assert torch.equal(linear_attention(q, k, v, phi, decay=wild, **how), want)


@pytest.mark.parametrize("length", [64, 68, 130])
def test_gradients_of_rows_that_decay_fast_are_those_of_double_precision(length: int) -> None:
    """Rows that fill up the last block once had an infinite factor, and every gradient was NaN."""
    g = torch.Generator().manual_seed(20)
    q, k, v = (3 * torch.randn(1, 1, length, d, generator=g, dtype=torch.float64) for d in (2, 2, 1))
    phi = feature_map("positive", 2, 2, seed=20)
    found = []
    for dtype in (torch.float64, torch.float32):
        keys = k.to(dtype).requires_grad_(True)
        decay = torch.tensor([-3.0], dtype=dtype)
        out = linear_attention(q.to(dtype), keys, v.to(dtype), phi, is_causal=True, decay=decay)
        found.append(torch.autograd.grad(out.sum(), keys)[0].double())
    torch.testing.assert_close(found[1], found[0], atol=1e-3 * float(found[0].abs().max()), rtol=1e-3)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_decay_of_all_keys_alike_has_no_gradient(recompute: bool) -> None:
    """That of the first token changes no row. Its gradient is a sum over all keys, which rounding kept from zero."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 4, generator=g) for n in (11, 200, 200))
    decay = torch.full((1, 1, 200), -0.1, requires_grad=True)
    phi = feature_map("trig", dim=4, num_features=16, kernel="softmax")
    how: dict[str, Any] = {"window": 8, "window_kind": "sliding", "on_small_normalizer": "zero"}
    out = linear_attention(q, k, v, phi, is_causal=True, decay=decay, recompute=recompute, diagnostics=False, **how)
    (found,) = torch.autograd.grad(out.square().sum(), decay)
    assert float(found[0, 0, 0].abs()) <= 1e-9 * float(found.abs().max())
