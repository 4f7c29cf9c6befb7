"""The laws of the attention state: no future in the past, padding adds nothing, steps and splits change nothing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from naive import assert_same, draw, draw_qkv, gradients
from torch import Tensor

from bochner import BochnerError, Features, State, absorb, empty_state, feature_map, linear_attention, merge, read
from bochner.attention import attend
from bochner.attention.attend import step
from bochner.maps.base import FeatureMap

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5, "window_kind": "sliding"},
    "sinks": {"sinks": 3},
    "window and sinks": {"window": 70, "sinks": 2, "window_kind": "sliding"},
    "blocks": {"window": 5},
    "blocks and sinks": {"window": 32, "sinks": 2},
}
MAPS = ("positive", "calibrated", "relu", "trig")
out_of_range = pytest.mark.filterwarnings("ignore:.*got the mean of the values:bochner.BochnerWarning")


def make(name: str = "positive") -> FeatureMap:
    options: dict[str, Any] = {"kernel": "gaussian", "num_features": 64} if name == "trig" else {}
    phi = feature_map(name, dim=4, **{"num_features": 8, "seed": 2, **options})
    return phi.calibrate_(draw(60, 4, seed=11) + 0.2, draw(60, 4, seed=12))


def left_padding(b: int, s: int) -> Tensor:
    """Sequence i of the batch starts with 3 + 20 i keys to ignore."""
    return torch.arange(s)[None, :] < 3 + 20 * torch.arange(b)[:, None]


def scattered_padding(b: int, s: int) -> Tensor:
    return draw(b, s, seed=5) < -0.5


# The future.


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("g", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@out_of_range
def test_the_future_moves_the_past_by_exactly_nothing(variant: str, masked: bool, g: int, dtype: torch.dtype) -> None:
    phi = make()
    q, k, v = draw_qkv(300, h=4, g=g, dtype=dtype)
    mask = scattered_padding(2, 300) if masked else None
    options = VARIANTS[variant] | {"is_causal": True}
    out = linear_attention(q, k, v, phi, key_padding_mask=mask, **options)
    for cut in (1, 63, 128, 200, 299):
        for changed in ("q", "k", "v", "qkv", "mask"):
            new = {"q": q, "k": k, "v": v}
            for name in changed if changed != "mask" else "":
                new[name] = torch.cat([new[name][:, :, :cut], 1e3 * new[name][:, :, cut:]], dim=2)
            hole = mask
            if changed == "mask":
                hole = torch.zeros(2, 300, dtype=torch.bool) if mask is None else mask.clone()
                hole[:, cut:] = True
            other = linear_attention(**new, phi=phi, key_padding_mask=hole, **options)
            assert torch.equal(out[:, :, :cut], other[:, :, :cut])
            assert not torch.equal(out[:, :, cut:], other[:, :, cut:])


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("learns", [False, True])
@out_of_range
def test_large_future_keys_do_not_leak_through_any_map(name: str, variant: str, learns: bool) -> None:
    phi = make(name)
    q, k, v = (t.requires_grad_(learns) for t in draw_qkv(200, scale=0.3, dtype=torch.float32))
    out = linear_attention(q, k, v, phi, is_causal=True, **VARIANTS[variant])
    for cut in (50, 150):
        for size in (30.0, 1e3):
            # Large keys along the queries, the direction that attracts them.
            large = torch.cat([k[:, :, :cut], size * q[:, :, cut:]], dim=2).detach()
            other = linear_attention(q, large, v, phi, is_causal=True, **VARIANTS[variant])
            assert torch.equal(out[:, :, :cut], other[:, :, :cut])
    past = linear_attention(q[:, :, :50], k[:, :, :50], v[:, :, :50], phi, is_causal=True, **VARIANTS[variant])
    assert_same(past, out[:, :, :50], tol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_past_sends_no_gradient_to_the_future(variant: str) -> None:
    q, k, v = (t.requires_grad_() for t in draw_qkv(200))
    out = linear_attention(q, k, v, make(), is_causal=True, **VARIANTS[variant])
    for cut in (60, 128, 131):
        for grad in torch.autograd.grad(out[:, :, :cut].sum(), (q, k, v), retain_graph=True):
            assert (grad[:, :, cut:] == 0).all()
            assert (grad[:, :, :cut] != 0).any()


def test_gradients_reach_whatever_requires_them() -> None:
    """Also a buffer of the map, and the exact keys of a state alone."""
    q, k, v = draw_qkv(20)
    phi = feature_map("calibrated", dim=q.shape[-1], num_features=16).double()
    phi.a = torch.full_like(phi.a, -0.1).requires_grad_()
    (grad,) = torch.autograd.grad(linear_attention(q, k, v, phi).square().sum(), phi.a)
    assert (grad != 0).any()
    _, state = linear_attention(q, k, v, make(), is_causal=True, window=4, return_state=True)
    learned = state.window.held.k.clone().requires_grad_()
    state = state._replace(window=state.window._replace(held=state.window.held._replace(k=learned)))
    out = linear_attention(q, k, v, make(), is_causal=True, window=4, state=state)
    assert (torch.autograd.grad(out.square().sum(), learned)[0] != 0).any()


def test_a_state_holds_no_more_than_it_says() -> None:
    for n in (1, 128, 1000):
        _, state = linear_attention(*draw_qkv(n), make(), is_causal=True, return_state=True)
        assert sum(t.untyped_storage().nbytes() for t in state[:3]) == state.nbytes


# Padding.


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("extra", [1, 200])
def test_appended_padding_changes_valid_rows_by_rounding_only(variant: str, is_causal: bool, extra: int) -> None:
    phi = make()
    q, k, v = (t.requires_grad_() for t in draw_qkv(90))
    options = VARIANTS[variant] | {"is_causal": is_causal}
    want = linear_attention(q, k, v, phi, **options)
    longer = [torch.cat([t, 50 * draw(2, 2, extra, t.shape[-1], seed=21)], dim=2) for t in (q, k, v)]
    mask = torch.arange(90 + extra).expand(2, -1) >= 90
    got = linear_attention(*longer, phi, key_padding_mask=mask, **options)[:, :, :90]
    assert_same(got, want, tol=1e-12)
    assert_same(gradients(got, q, k, v), gradients(want, q, k, v), tol=1e-11)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_what_padding_holds_does_not_matter_not_even_nan(variant: str, is_causal: bool) -> None:
    phi = make()
    q, k, v = draw_qkv(200)
    mask = scattered_padding(2, 200)
    hole = mask[:, None, :, None].expand_as(k)
    poisoned = []
    for fill in (0.0, 1e6, torch.nan, torch.inf):
        a, b, c = (t.clone().requires_grad_() for t in (q, k.masked_fill(hole, fill), _fill(v, hole, fill)))
        out = linear_attention(a, b, c, phi, key_padding_mask=mask, is_causal=is_causal, **VARIANTS[variant])
        poisoned.append((out, *gradients(out, a, b, c)))
    want = poisoned[0]
    for got in poisoned[1:]:
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert (want[2][hole] == 0).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_left_padding_equals_the_sequence_without_it(variant: str, is_causal: bool) -> None:
    phi = make()
    q, k, v = draw_qkv(150)
    first = (3, 23)
    mask = left_padding(2, 150)
    got = linear_attention(q, k, v, phi, key_padding_mask=mask, is_causal=is_causal, **VARIANTS[variant])
    for i, start in enumerate(first):
        tail = (t[i : i + 1, :, start:] for t in (q, k, v))
        want = linear_attention(*tail, phi, is_causal=is_causal, **VARIANTS[variant])
        assert_same(got[i : i + 1, :, start:], want)


# Steps, splits, resumption.


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_step_by_step_equals_chunked(variant: str, masked: bool, name: str) -> None:
    phi = make(name)
    q, k, v = draw_qkv(140, h=2, g=1, scale=0.5)
    mask = left_padding(2, 140) if masked else None
    options: dict[str, Any] = VARIANTS[variant] | {"is_causal": True, "return_state": True}
    whole, after = linear_attention(q, k, v, phi, key_padding_mask=mask, **options)
    state, rows = None, []
    for i in range(140):
        hole = None if mask is None else mask[:, i : i + 1]
        token = (t[:, :, i : i + 1] for t in (q, k, v))
        row, state = linear_attention(*token, phi, key_padding_mask=hole, state=state, **options)
        rows.append(row)
    assert_same(torch.cat(rows, dim=2), whole)
    assert_same_state(state, after)


@torch.no_grad()
def test_a_step_keeps_the_rows_in_range_that_the_scan_keeps() -> None:
    """Rows whose largest features are not those of their keys: products of 1e-13, far from leaving the range."""
    phi = feature_map("positive", dim=4, num_features=4, seed=1)
    q, k, v = draw_qkv(8, dtype=torch.float32, scale=6.0, b=4)
    k = 0.3 * k - q  # warnings are errors
    how: dict[str, Any] = {"is_causal": True, "return_state": True}
    want, state, rows = linear_attention(q, k, v, phi, **how)[0], None, []
    for i in range(8):
        out, state = linear_attention(*(t[:, :, i : i + 1] for t in (q, k, v)), phi, state=state, **how)
        rows.append(out)
    torch.testing.assert_close(torch.cat(rows, dim=2), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cuts", [(1,), (64,), (128,), (2, 3, 77, 130, 199)])
@pytest.mark.parametrize("padding", [None, left_padding, scattered_padding])
def test_split_and_resumed_equals_whole_with_gradients(variant: str, cuts: tuple[int, ...], padding: Any) -> None:
    phi = make()
    inputs = tuple(t.requires_grad_() for t in draw_qkv(200))
    q, k, v = inputs
    mask = None if padding is None else padding(2, 200)
    options: dict[str, Any] = VARIANTS[variant] | {"is_causal": True, "return_state": True}
    whole, after = linear_attention(q, k, v, phi, key_padding_mask=mask, **options)
    state, rows = None, []
    for i, j in pairwise((0, *cuts, 200)):
        hole = None if mask is None else mask[:, i:j]
        shard = (t[:, :, i:j] for t in inputs)
        row, state = linear_attention(*shard, phi, key_padding_mask=hole, state=state, **options)
        rows.append(row)
    split = torch.cat(rows, dim=2)
    assert_same(split, whole)
    assert_same_state(state, after)
    assert_same(gradients(split, *inputs), gradients(whole, *inputs))


@pytest.mark.parametrize("variant", ["blocks", "blocks and sinks"])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("first", [(3, 23, 10), (0, 1, 140), (64, 0, 7)])
def test_sequences_that_begin_apart_are_decoded_as_each_alone(
    variant: str, name: str, first: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By single steps, which hold the keys of all sequences in one window, after a first piece of 70 places."""
    phi = make(name)
    q, k, v = draw_qkv(200, b=3, h=2, g=1, scale=0.5)
    mask = torch.arange(200)[None, :] < torch.tensor(first)[:, None]
    options: dict[str, Any] = VARIANTS[variant] | {"is_causal": True, "return_state": True}
    steps = []
    monkeypatch.setattr(attend, "step", lambda *args: steps.append(args[3].window.start) or step(*args))
    with torch.no_grad():
        out, state = linear_attention(*(t[:, :, :70] for t in (q, k, v)), phi, key_padding_mask=mask[:, :70], **options)
        rows = [out]
        for i in range(70, 200):
            token = (t[:, :, i : i + 1] for t in (q, k, v))
            out, state = linear_attention(*token, phi, key_padding_mask=mask[:, i : i + 1], state=state, **options)
            rows.append(out)
            assert state.window.held.k.shape[2] < 2 * VARIANTS[variant]["window"]
        whole, after = linear_attention(q, k, v, phi, key_padding_mask=mask, **options)
    got = torch.cat(rows, dim=2)
    assert_same(got, whole)
    assert_same_state(state, after)
    if phi.positive:
        assert sum(start is not None for start in steps) >= 50
    for i, start in enumerate(first):
        assert (got[i, :, :start] == 0).all()
        alone = (t[i : i + 1, :, start:] for t in (q, k, v))
        want = linear_attention(*alone, phi, **VARIANTS[variant], is_causal=True)
        assert_same(got[i : i + 1, :, start:], want)


def test_sequences_that_begin_apart_are_resumed_where_nothing_can_be_looked_at() -> None:
    phi, (q, k, v) = make(), draw_qkv(20)
    options: dict[str, Any] = VARIANTS["blocks"] | {"is_causal": True, "return_state": True}
    _, state = linear_attention(q, k, v, phi, key_padding_mask=left_padding(2, 20), **options)
    want, _ = linear_attention(q, k, v, phi, state=state, **options)
    got = torch.func.vmap(lambda x: linear_attention(x, k, v, phi, state=state, **options)[0])(q[None])
    assert_same(got[0], want)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_state_has_the_same_size_after_any_number_of_keys(variant: str) -> None:
    phi = make()
    options: dict[str, Any] = VARIANTS[variant] | {"is_causal": True, "return_state": True}
    window, sinks = VARIANTS[variant].get("window", 0), VARIANTS[variant].get("sinks", 0)
    own = 8 * 2 * 2 * (8 * (3 + 1) + 1 + (3 + 1))

    def most(keys: int) -> int:
        exact = 2 * (2 * 8 * (4 + 3) * (keys + sinks) + 8 * sinks)
        return own + (exact if window or sinks else 0)

    for n in (1, 10, 500, 503, 3000):
        _, state = linear_attention(*draw_qkv(n), phi, **options)
        if window and options.get("window_kind") != "sliding":  # the block before, and what there is of the present one
            assert state.nbytes <= most(2 * window - 1)
            assert n < 2 * window or state.nbytes >= most(window)
        else:
            assert state.nbytes == most(min(window, n)) or n < max(window, sinks)


def test_one_decoding_step_does_the_same_work_at_any_position() -> None:
    phi = make()
    token = draw_qkv(1, seed=3)
    work = []
    for n in (10, 3002):
        _, state = linear_attention(*draw_qkv(n), phi, is_causal=True, return_state=True, window=4, sinks=1)
        with torch.profiler.profile(record_shapes=True) as profile:
            linear_attention(*token, phi, is_causal=True, state=state, return_state=True, window=4, sinks=1)
        work.append([(e.name, str(e.input_shapes)) for e in profile.events() if e.name.startswith("aten::")])
    assert len(work[0]) > 20
    assert work[0] == work[1]


# The monoid.


def summary(n: int, seed: int, scale: float = 1.0) -> State:
    phi = make()
    _, k, v = draw_qkv(n, seed=seed, scale=scale)
    return absorb(empty_state((2, 2), 8, 3, dtype=torch.float64), phi(k, "key"), v)


def test_merge_is_associative_and_commutative_with_the_empty_state_as_unit() -> None:
    a, b, c = summary(5, 1), summary(1, 2, scale=20.0), summary(40, 3, scale=3.0)
    unit = empty_state((2, 2), 8, 3, dtype=torch.float64)
    assert_same_state(merge(merge(a, b), c), merge(a, merge(b, c)), tol=1e-14)
    assert_same_state(merge(a, b), merge(b, a), tol=1e-15)
    for x in (a, b, unit):
        for y in (merge(x, unit), merge(unit, x)):
            assert all(torch.equal(s, t) for s, t in zip(x[:3], y[:3], strict=True))


def test_merge_of_parts_reads_as_the_whole() -> None:
    phi = make()
    q, k, v = draw_qkv(90, scale=3.0)
    unit = empty_state((2, 2), 8, 3, dtype=torch.float64)
    parts = [absorb(unit, phi(k[:, :, i:j] / 2**0.5, "key"), v[:, :, i:j]) for i, j in pairwise((0, 1, 30, 90))]
    stream = unit
    for i, j in pairwise((0, 50, 51, 90)):
        stream = absorb(stream, phi(k[:, :, i:j] / 2**0.5, "key"), v[:, :, i:j])
    fq = phi(q / 2**0.5, "query")
    want = linear_attention(q, k, v, phi)
    assert_same(read(merge(merge(parts[0], parts[1]), parts[2]), fq), want)
    assert_same(read(stream, fq), want)


def test_absorbing_masked_keys_is_absorbing_the_others() -> None:
    phi = make()
    _, k, v = draw_qkv(40)
    mask = torch.zeros(2, 40, dtype=torch.bool)
    mask[:, 10:] = True
    unit = empty_state((2, 2), 8, 3, dtype=torch.float64)
    features = phi(k, "key")
    got = absorb(unit, features, v, key_padding_mask=mask)
    want = absorb(unit, Features(features.values[:, :, :10], features.log_scale[:, :, :10]), v[:, :, :10])
    assert_same_state(got, want)
    nothing = absorb(unit, features, v, key_padding_mask=torch.ones_like(mask))
    assert all(torch.equal(s, t) for s, t in zip(nothing[:3], unit[:3], strict=True))
    assert (read(nothing, features) == 0).all()


def test_only_states_of_one_map_without_windows_merge() -> None:
    a, b = (empty_state((2, 2), m, 3, dtype=torch.float64) for m in (8, 9))
    with pytest.raises(BochnerError, match="Only states of one map"):
        merge(a, b)
    _, windowed = linear_attention(*draw_qkv(5), make(), is_causal=True, return_state=True, window=2)
    with pytest.raises(BochnerError, match="exact window cannot be merged"):
        merge(a, windowed)


def assert_same_state(a: State, b: State, tol: float = 1e-11) -> None:
    """The same sums; a state's reference is free, so both are taken to the larger one."""
    ref = torch.maximum(a.log_scale, b.log_scale)
    for x, y in ((a.kv, b.kv), (a.norm.unsqueeze(-1), b.norm.unsqueeze(-1))):
        wa, wb = ((s.log_scale - ref).exp()[..., None, None] for s in (a, b))
        assert_same(x * wa, y * wb, tol)
    assert (a.window is None) == (b.window is None)
    if a.window is not None and b.window is not None:
        assert a.window.seen == b.window.seen
        for one, other in ((a.window.held, b.window.held), (a.window.sinks, b.window.sinks)):
            hole = torch.zeros_like(one.k[..., :1]).bool() if one.padded is None else one.padded[:, None, :, None]
            if one is a.window.sinks:
                hole = (a.window.sink_position < 0)[:, None, :, None]
            for x, y in ((one.k, other.k), (one.v, other.v)):
                assert torch.equal(x.masked_fill(hole, 0), y.masked_fill(hole, 0))
            for x, y in zip(one[2:4], other[2:4], strict=True):
                none = torch.zeros(one.k.shape[::2], dtype=torch.bool)
                assert torch.equal(none if x is None else x, none if y is None else y)
        assert torch.equal(a.window.sink_position, b.window.sink_position)


def _fill(v: Tensor, hole: Tensor, fill: float) -> Tensor:
    return v.masked_fill(hole[..., :1], fill)
