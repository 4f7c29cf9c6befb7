"""Defects of the core of attention that was replaced: each of these failed there, or took too much."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from naive import assert_same, draw_qkv, gradients
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bochner import (
    BochnerError,
    BochnerWarning,
    FeatureMap,
    Features,
    State,
    attention_matrix,
    exact_attention,
    feature_map,
    linear_attention,
)
from bochner.attention import merge, read
from bochner.maps import to_features

CAUSAL: dict[str, Any] = {"is_causal": True}
WINDOWS: dict[str, dict[str, Any]] = {
    "kernel": {},
    "block": {"window": 8},
    "sliding": {"window": 8, "window_kind": "sliding"},
    "sinks": {"window": 8, "window_kind": "sliding", "sinks": 2},
    "block and sinks": {"window": 8, "sinks": 2},
}


class Operators(TorchDispatchMode):
    """Counts what reaches the dispatcher, but for views, which compute nothing."""

    VIEWS = ("view", "_unsafe_view", "t", "transpose", "slice", "select", "unsqueeze", "squeeze", "expand", "detach")

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in self.VIEWS:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


def operators(call: Any) -> int:
    call()
    with Operators() as mode:
        call()
    return sum(mode.count.values())


# Inference mode.


@pytest.mark.parametrize("exact", WINDOWS)
def test_inference_mode_before_and_after(exact: str) -> None:
    """What is made in inference mode stays there: neither the map nor memory that is used again remembers it."""
    q, k, v = draw_qkv(300, h=4, d=8, v=8, dtype=torch.float32)
    want = linear_attention(q, k, v, "positive", **CAUSAL, **WINDOWS[exact])
    with torch.inference_mode():
        assert_same(linear_attention(q, k, v, "positive", **CAUSAL, **WINDOWS[exact]), want, 1e-5)
    assert_same(linear_attention(q, k, v, "positive", **CAUSAL, **WINDOWS[exact]), want, 1e-5)
    phi = feature_map("positive", dim=8, num_features=16)
    with torch.inference_mode():
        linear_attention(q, k, v, phi, **CAUSAL, **WINDOWS[exact])
    phi = phi.double()
    q, k, v = (t.double() for t in (q, k, v))
    with torch.inference_mode():
        got = linear_attention(q, k, v, phi, **CAUSAL, **WINDOWS[exact])
    q.requires_grad_()
    out = linear_attention(q, k, v, phi, **CAUSAL, **WINDOWS[exact])
    assert_same(got, out.detach())
    out.sum().backward()
    assert q.grad is not None


def test_a_state_made_in_inference_mode_is_resumed_there() -> None:
    q, k, v = draw_qkv(40, dtype=torch.float32)
    whole = linear_attention(q, k, v, "positive", **CAUSAL)
    with torch.inference_mode():
        first, state = linear_attention(*(t[:, :, :30] for t in (q, k, v)), "positive", return_state=True, **CAUSAL)
        rows = [first]
        for i in range(30, 40):
            token = (t[:, :, i : i + 1] for t in (q, k, v))
            out, state = linear_attention(*token, "positive", state=state, return_state=True, **CAUSAL)
            rows.append(out)
        assert_same(torch.cat(rows, dim=2), whole, 1e-5)


# Maps are freed.


@pytest.mark.parametrize("name", ["positive", "trig", "relu", "calibrated", "clustered", "sum_poly"])
@pytest.mark.filterwarnings("ignore::bochner.BochnerWarning")
def test_a_map_that_attention_has_used_is_freed(name: str) -> None:
    q, k, v = (t.requires_grad_() for t in draw_qkv(80, dtype=torch.float32))
    phi = feature_map(name, dim=4, num_features=8)
    state = None
    for how in ({}, {"is_causal": True, "window": 8, "sinks": 1}, {"window": 8, "window_kind": "sliding"}):
        linear_attention(q, k, v, phi, **how).sum().backward()
    with torch.no_grad():
        _, state = linear_attention(q, k, v, phi, return_state=True, **CAUSAL)
    gone = weakref.ref(phi)
    del phi
    gc.collect()
    assert gone() is None
    assert isinstance(state, State)


def test_calls_by_name_do_not_leak() -> None:
    q, k, v = (t.requires_grad_() for t in draw_qkv(20, b=1, h=1, dtype=torch.float32))

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(x), FeatureMap) for x in gc.get_objects())

    before = alive()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BochnerWarning)
        for i in range(60):
            name = ("positive", "trig", "relu")[i % 3]
            linear_attention(q, k, v, name, is_causal=i % 2 == 0).sum().backward()
    assert alive() == before


# What a backward pass computes again is what the forward pass computed.


class Dropped(FeatureMap):
    """Random numbers in the middle of the features."""

    positive = True

    def __init__(self, dim: int, num_features: int) -> None:
        super().__init__(dim, num_features)
        self.weight = nn.Parameter(torch.linspace(-1, 1, dim * num_features).view(num_features, dim))
        self.dropout = nn.Dropout(0.3)

    def _features(self, x: Tensor, role: str) -> Features:
        return to_features(self.dropout((x @ self.weight.to(x.dtype).mT).exp()) + 0.1)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("exact", WINDOWS)
@pytest.mark.parametrize("small_parts", [False, True])
def test_dropout_in_a_map_is_the_same_when_it_is_computed_again(
    is_causal: bool, exact: str, small_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small_parts:
        monkeypatch.setattr("bochner.attention.scan.ELEMENTS", 1)
    phi, found = Dropped(4, 6).double().train(), []
    for recompute in (False, True):
        q, k, v = (t.requires_grad_() for t in draw_qkv(150))
        torch.manual_seed(5)
        out = linear_attention(q, k, v, phi, is_causal=is_causal, recompute=recompute, **WINDOWS[exact])
        torch.manual_seed(6)  # the backward pass must not depend on what was drawn since
        found.append((out, gradients(out, q, k, v, phi.weight)))
    assert_same(found[1][0], found[0][0])
    assert_same(found[1][1], found[0][1], 1e-10)
    torch.manual_seed(7)
    assert not torch.equal(linear_attention(*draw_qkv(150), phi, is_causal=is_causal, **WINDOWS[exact]), found[0][0])


class Fed(FeatureMap):
    """Weights that another network computes: a plain tensor that nobody registered."""

    positive = True
    w: Tensor

    def _features(self, x: Tensor, role: str) -> Features:
        return to_features((x @ self.w.to(x.dtype).mT).exp())


class FedBuffer(Fed):
    """Weights that another network computes, in a buffer."""

    def __init__(self, dim: int, num_features: int) -> None:
        super().__init__(dim, num_features)
        self.register_buffer("w", torch.zeros(num_features, dim))


@pytest.mark.parametrize("kind", [Fed, FedBuffer])
@pytest.mark.parametrize("wanted", [True, False], ids=["inputs too", "weights alone"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("exact", WINDOWS)
def test_gradients_reach_a_network_that_feeds_the_map(
    exact: str, is_causal: bool, wanted: bool, kind: type[Fed]
) -> None:
    net, z = nn.Linear(3, 4).double(), torch.ones(6, 3, dtype=torch.float64).cumsum(0) / 6
    phi = kind(4, 6)
    q, k, v = (t.requires_grad_(wanted) for t in draw_qkv(90))
    leaves = [*net.parameters(), *([q, k, v] if wanted else [])]
    found = []
    for recompute in (False, True):
        phi.w = net(z)
        out = linear_attention(q, k, v, phi, is_causal=is_causal, recompute=recompute, **WINDOWS[exact])
        found.append(gradients(out, *leaves))
    assert all(bool(g.any()) for g in found[0])
    assert_same(found[1], found[0], 1e-10)


@pytest.mark.parametrize("exact", WINDOWS)
def test_a_second_call_leaves_the_gradients_of_the_first_alone(exact: str) -> None:
    """Sizes at which products are written into memory that is used again."""
    phi = feature_map("positive", dim=16, num_features=64)
    how = CAUSAL | WINDOWS[exact]
    q, k, v = (t.requires_grad_() for t in draw_qkv(512, b=1, h=4, d=16, v=16, dtype=torch.float32))
    want = gradients(linear_attention(q, k, v, phi, recompute=False, **how), q, k, v)
    out = linear_attention(q, k, v, phi, **how)
    others = (t.requires_grad_() for t in draw_qkv(512, b=1, h=4, d=16, v=16, dtype=torch.float32, seed=5, scale=2.0))
    linear_attention(*others, phi, **how)
    assert_same(gradients(out, q, k, v), want, 1e-5)


@pytest.mark.parametrize("exact", WINDOWS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_call_in_parts_is_one_call_in_one_piece(
    exact: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    phi = feature_map("positive", dim=8, num_features=256)
    how = {"is_causal": is_causal} | WINDOWS[exact]
    q, k, v = draw_qkv(512, b=1, h=4, d=8, v=64, dtype=torch.float32)
    w = draw_qkv(512, b=1, h=4, d=64, dtype=torch.float32, seed=7)[0]

    def everything() -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        with torch.no_grad():
            out = linear_attention(q, k, v, phi, **how)
        return [out, *torch.autograd.grad(linear_attention(*leaves, phi, **how), leaves, w)]

    want = everything()
    monkeypatch.setattr("bochner.attention.scan.ELEMENTS", 1)
    assert_same(everything(), want, 2e-5)


# Nothing is remembered of the values of a map.


@pytest.mark.parametrize("exact", WINDOWS)
def test_what_is_written_past_autograd_counts(exact: str) -> None:
    q, k, v = draw_qkv(40)
    phi = feature_map("positive", dim=4, num_features=8).double()
    before = linear_attention(q, k, v, phi, **CAUSAL, **WINDOWS[exact])
    other = feature_map("positive", dim=4, num_features=8, seed=3).double()
    phi.projection.weight.data.copy_(other.projection.weight)
    after = linear_attention(q, k, v, phi, **CAUSAL, **WINDOWS[exact])
    assert not torch.allclose(after, before)
    assert_same(after, linear_attention(q, k, v, other, **CAUSAL, **WINDOWS[exact]))


@pytest.mark.parametrize("name", ["sum_poly", "positive", "trig", "gmm_prf"])
@pytest.mark.filterwarnings("ignore::bochner.BochnerWarning")
def test_a_state_of_an_earlier_draw_is_refused(name: str) -> None:
    q, k, v = draw_qkv(20)
    phi = feature_map(name, dim=4, num_features=8)
    _, state = linear_attention(q, k, v, phi, return_state=True, **CAUSAL)
    assert linear_attention(q, k, v, phi, state=state, **CAUSAL).isfinite().all()
    phi.redraw_(seed=7)
    with pytest.raises(BochnerError, match="redrawn"):
        linear_attention(q, k, v, phi, state=state, **CAUSAL)


@pytest.mark.parametrize("exact", WINDOWS)
def test_truncated_backpropagation_through_time_trains_a_map(exact: str) -> None:
    phi = feature_map("gmm_prf", dim=4, num_features=8).double()
    optimizer = torch.optim.SGD(phi.parameters(), lr=0.1)
    state = None
    for step in range(4):
        q, k, v = draw_qkv(28, seed=step)  # longer than what a row sees exactly
        out, state = linear_attention(q, k, v, phi, state=state, return_state=True, **CAUSAL, **WINDOWS[exact])
        state = state.map(Tensor.detach)
        optimizer.zero_grad()
        out.square().sum().backward()
        assert all(p.grad is not None and bool(p.grad.any()) for p in phi.parameters())
        optimizer.step()


# Cost, in operators.


@pytest.mark.parametrize("exact", WINDOWS)
@pytest.mark.parametrize("name", ["positive", "trig", "elu"])
def test_diagnostics_are_not_cheaper_than_none(name: str, exact: str) -> None:
    q, k, v = draw_qkv(40, dtype=torch.float32)
    phi, how = feature_map(name, dim=4, num_features=32), CAUSAL | WINDOWS[exact]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", BochnerWarning)
        _, state = linear_attention(*(t[:, :, :39] for t in (q, k, v)), phi, return_state=True, **how)

        def decode(diagnostics: bool) -> Any:
            token = (t[:, :, 39:] for t in (q, k, v))
            return linear_attention(*token, phi, state=state, return_state=True, diagnostics=diagnostics, **how)

        with_them, without = (operators(lambda d=d: decode(d)) for d in (True, False))
    assert without <= with_them


@pytest.mark.parametrize("learns", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["sliding", "block"])
def test_large_batches_take_no_more_operators_per_sequence(kind: str, is_causal: bool, learns: bool) -> None:
    phi = feature_map("positive", dim=16, num_features=64)
    counts = []
    for b in (8, 512):
        q, k, v = (t.requires_grad_(learns) for t in draw_qkv(64, b=b, h=4, d=16, v=16, dtype=torch.float32))

        def call(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
            out = linear_attention(q, k, v, phi, window=16, window_kind=kind, is_causal=is_causal)
            if learns:
                torch.autograd.grad(out.sum(), (q, k, v))

        counts.append(operators(call) / b)
    assert counts[1] <= counts[0]


# States.


def test_read_refuses_what_it_cannot_answer() -> None:
    q, k, v = draw_qkv(20)
    phi, other = (feature_map("positive", dim=4, num_features=m).double() for m in (8, 16))
    _, windowed = linear_attention(q, k, v, phi, window=4, return_state=True, **CAUSAL)
    _, state = linear_attention(q, k, v, phi, return_state=True, **CAUSAL)
    with pytest.raises(BochnerError, match="exact window"):
        read(windowed, phi(q))
    with pytest.raises(BochnerError, match="16 features, the state has 8"):
        read(state, other(q))
    assert_same(read(state, phi(q * 4**-0.25)), linear_attention(q, k, v, phi))


def test_merge_refuses_states_of_two_maps() -> None:
    q, k, v = draw_qkv(20)
    first, second = (feature_map("positive", dim=4, num_features=8, seed=s) for s in (0, 1))
    a, b = (linear_attention(q, k, v, phi, return_state=True, **CAUSAL)[1] for phi in (first, second))
    with pytest.raises(BochnerError, match="one map"):
        merge(a, b)
    _, scaled = linear_attention(q, k, v, first, scale=0.3, return_state=True, **CAUSAL)
    with pytest.raises(BochnerError, match="one map"):
        merge(a, scaled)
    assert int(merge(a, a).total[0, 0, -1]) == 40


# Signed maps.


@pytest.mark.parametrize("exact", WINDOWS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("name", ["trig", "gmm_rks", "sum_poly"])
def test_the_matrix_is_what_attention_applies_also_to_rows_without_a_normaliser(
    name: str, mask: bool, is_causal: bool, exact: str
) -> None:
    q, k, v = draw_qkv(40, h=4, g=2, scale=2.0)
    options = {"degree": 3} if name == "sum_poly" else {}
    phi = feature_map(name, dim=4, num_features=4, **options).double()
    how = {"is_causal": is_causal, **WINDOWS[exact]}
    if mask:
        how["key_padding_mask"] = torch.arange(40) < torch.tensor([[3], [0]])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = linear_attention(q, k, v, phi, **how)
        weights = attention_matrix(q, k, phi, **how)
    assert any("normaliser near or below zero" in str(w.message) for w in said) or exact != "kernel"
    assert_same(weights @ v.repeat_interleave(2, dim=1), got, 1e-9)


@pytest.mark.parametrize("name", ["trig", "angular_hybrid", "gmm_rks"])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.filterwarnings("ignore:.*attention rows have a normaliser:bochner.BochnerWarning")
def test_signed_maps_do_not_blow_up_on_unit_gaussians(name: str, seed: int) -> None:
    q, k, v = draw_qkv(512, b=1, h=4, d=64, v=64, dtype=torch.float32, seed=seed)
    phi = feature_map(name, dim=64, num_features=256, kernel="softmax", seed=seed)
    got, want = linear_attention(q, k, v, phi, **CAUSAL).detach(), exact_attention(q, k, v, is_causal=True)
    assert (
        float((got - want).norm() / want.norm()) < 1.5
    )  # uniform attention has 0.7; divided without a look it is 100 to 500
