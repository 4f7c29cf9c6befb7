"""What the backward pass keeps, and derivatives of derivatives."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import pytest
import torch
from naive import assert_same, draw_qkv
from torch import Tensor

from bochner import BochnerError, attention_matrix, feature_map, linear_attention

SIGNED = {"name": "landmark", "positive": False}  # topped up


def saved_bytes(inputs: tuple[Tensor, ...], m: int, phi: dict[str, Any], **options: Any) -> int:
    """Bytes of distinct storages that autograd holds after the forward pass."""
    kept: dict[int, int] = {}
    holders = []

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        holders.append(t)
        return t

    made = feature_map(**phi, dim=inputs[0].shape[-1], num_features=m)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = linear_attention(*inputs, made, **options)
    out.sum().backward()
    return sum(kept.values())


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "window": 16, "sinks": 1}])
@pytest.mark.filterwarnings("ignore:These LandmarkFeatures were never fitted")  # what they estimate does not matter
@pytest.mark.parametrize("phi", [{"name": "positive"}, SIGNED], ids=["positive", "signed"])
def test_saved_memory_does_not_grow_with_features_times_length(phi: dict[str, Any], options: dict[str, Any]) -> None:
    def size(n: int, m: int, **more: Any) -> int:
        inputs = tuple(t.requires_grad_() for t in draw_qkv(n, b=1, d=8, v=8, dtype=torch.float32))
        return saved_bytes(inputs, m, phi, **options, **more)

    # What a length of 1024 costs above one of 512 must be the same for 16 and 64 features, but for the states between
    # chunks: (m (v + 1) + 1) floats per head and chunk. Keeping features would cost 512 m floats per head.
    growth = {m: size(1024, m) - size(512, m) for m in (16, 64)}
    chunks = 512 // 128
    states = 4 * 2 * chunks * (64 - 16) * (8 + 1)
    features = 4 * 2 * 512 * (64 - 16)
    assert growth[64] - growth[16] <= 3 * states < 0.7 * features
    if not options and phi is not SIGNED:  # two softmax attentions: there are no features to keep
        return
    kept = {m: size(1024, m, recompute=False) - size(512, m, recompute=False) for m in (16, 64)}
    assert kept[64] - kept[16] >= features


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "window": 16, "sinks": 1},
        {"is_causal": True, "window": 16, "window_kind": "block"},
        {"window": 16, "sinks": 1},
        {"window": 16, "window_kind": "block"},
    ],
    ids=str,
)
@pytest.mark.parametrize("backward", [False, True])
def test_nothing_waits_for_a_garbage_collection(options: dict[str, Any], backward: bool) -> None:
    inputs = [t.requires_grad_() for t in draw_qkv(64, b=1, d=8, v=8, dtype=torch.float32)]
    phi = feature_map("positive", dim=8, num_features=16)
    gc.disable()
    try:
        out = linear_attention(*inputs, phi, **options)
        if backward:
            out.sum().backward()
        gone = weakref.ref(inputs[0])
        del out, inputs
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("n", [256, 512])
@pytest.mark.parametrize("is_causal", [False, True])
def test_training_on_a_short_sequence_takes_at_most_six_times_its_inputs(is_causal: bool, n: int) -> None:
    inputs = [t.requires_grad_() for t in draw_qkv(n, b=1, h=8, d=64, v=64, dtype=torch.float32)]
    phi = feature_map("positive", dim=64, num_features=256)

    def call() -> None:
        torch.autograd.grad(linear_attention(*inputs, phi, is_causal=is_causal).sum(), inputs)

    call()
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = list(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
    assert max(held) <= 6 * sum(t.nbytes for t in inputs)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("exact", [{}, {"window": 3, "sinks": 1}])
def test_first_and_second_derivatives_are_right(is_causal: bool, exact: dict[str, Any]) -> None:
    phi = feature_map("positive", dim=3, num_features=4)
    inputs = tuple(t.requires_grad_() for t in draw_qkv(7, b=1, h=2, g=1, d=3, v=2))

    def attend(q: Tensor, k: Tensor, v: Tensor, recompute: bool = False) -> Tensor:
        return linear_attention(q, k, v, phi, is_causal=is_causal, recompute=recompute, **exact)

    assert torch.autograd.gradcheck(attend, inputs)
    assert torch.autograd.gradcheck(attend, (*inputs, True))
    assert torch.autograd.gradgradcheck(attend, inputs, fast_mode=True)
    with pytest.raises(BochnerError, match="Second derivatives of linear_attention need recompute=False"):
        torch.autograd.grad(attend(*inputs, True).sum(), inputs, create_graph=True)


EXACT = [{}, {"sinks": 2}, {"window": 4, "sinks": 1}, {"window": 4, "sinks": 1, "window_kind": "block"}]


@pytest.mark.parametrize("exact", EXACT, ids=["kernel", "sinks", "sliding", "block"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("phi", [{"name": "positive"}, {"name": "gmm_prf"}, SIGNED], ids=["positive", "gmm", "signed"])
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_both_derivatives_are_those_of_the_matrix(
    tied: bool, phi: dict[str, Any], is_causal: bool, exact: dict[str, Any]
) -> None:
    """Also where queries, keys and values are computed from one another: each path is counted once."""
    q, k, v = draw_qkv(13, b=1, d=3, v=3)
    made = feature_map(**phi, dim=3, num_features=4).double()
    if phi is SIGNED:
        made.calibrate_(q, k)
    inputs = [k.requires_grad_()] if tied else [t.requires_grad_() for t in (q, k, v)]
    inputs += list(made.parameters())
    how = {"is_causal": is_causal, **exact}
    ours: dict[str, Any] = how | {"recompute": False}

    def derivatives(attend: Callable[..., Tensor]) -> list[Tensor]:
        def loss() -> Tensor:
            return attend(*((2 * k, k, k.sin()) if tied else (q, k, v))).square().sum()

        plain = torch.autograd.grad(loss(), inputs)
        first = torch.autograd.grad(loss(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
        return [*plain, *first, *second]

    got = derivatives(lambda q, k, v: linear_attention(q, k, v, made, **ours))
    assert_same(got, derivatives(lambda q, k, v: attention_matrix(q, k, made, **how) @ v), 1e-9)


@pytest.mark.parametrize("r", [1, 2])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"is_causal": True},
        {"window": 8, "sinks": 2},
        {"window": 8, "window_kind": "block"},
        {"window": 5, "sinks": 1, "is_causal": True},
        {"window": 20, "is_causal": True},
        {"window": 8, "window_kind": "block", "sinks": 1, "is_causal": True},
    ],
)
def test_rows_that_were_topped_up_have_adjoints_by_hand(how: dict[str, Any], r: int) -> None:
    """Of signed landmark maps, with a top-up that meets some rows: in memory O(L d), not by a graph of all features."""
    q, k, v = draw_qkv(150, h=2 * r, g=2, d=3, v=3)
    phi = feature_map("landmark", dim=3, num_features=6, positive=False, num_heads=2).double().calibrate_(k, k)
    phi.trainable_()
    assert phi.top_up is not None
    phi.top_up.fill_(1.2)
    mask = torch.zeros(2, 150, dtype=torch.bool)
    mask[0, :9], mask[1, 120:] = True, True
    inputs = [t.requires_grad_() for t in (q, k, v)]
    inputs += phi.parameters()

    def slopes(again: bool) -> tuple[Tensor, ...]:
        out = linear_attention(q, k, v, phi, key_padding_mask=mask, recompute=again, **how)
        return torch.autograd.grad(out.square().sum(), inputs)

    want = slopes(False)
    assert_same(slopes(True), want, 1e-11)


@pytest.mark.parametrize("is_causal", [False, True])
def test_layers_that_share_a_learned_map_count_its_parameters_once(is_causal: bool) -> None:
    shared = feature_map("gmm_prf", dim=3, num_features=4).double()
    x, *_ = draw_qkv(9, b=1, d=3)

    def slopes(attend: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        loss = attend(attend(x)).square().sum()
        return torch.autograd.grad(loss, list(shared.parameters()))

    got = slopes(lambda y: linear_attention(y, y, y, shared, is_causal=is_causal))
    assert_same(got, slopes(lambda y: attention_matrix(y, y, shared, is_causal=is_causal) @ y), 1e-9)


def test_second_derivatives_cross_chunks() -> None:
    phi = feature_map("positive", dim=2, num_features=3)
    q, k, v = (t.requires_grad_() for t in draw_qkv(131, b=1, h=1, d=2, v=1))

    def penalty(x: Tensor) -> Tensor:
        out = linear_attention(q, x, v, phi, is_causal=True, recompute=False)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return slope.square().sum()

    (got,) = torch.autograd.grad(penalty(k), k)
    with torch.no_grad():
        direction = torch.ones_like(k)
    step = 1e-5
    with torch.enable_grad():
        ahead, behind = (penalty((k + s * direction).detach().requires_grad_()) for s in (step, -step))
    slope = (ahead - behind).item() / (2 * step)
    assert got.isfinite().all()
    assert float((got * direction).sum()) == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_gradients_flow_through_a_resumed_state() -> None:
    phi = feature_map("positive", dim=3, num_features=4)
    q, k, v = (t.requires_grad_() for t in draw_qkv(9, b=1, h=1, d=3, v=2))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first, state = linear_attention(q[:, :, :4], k[:, :, :4], v[:, :, :4], phi, is_causal=True, return_state=True)
        second = linear_attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], phi, is_causal=True, state=state)
        return torch.cat([first, second], dim=2)

    assert torch.autograd.gradcheck(attend, (q, k, v))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": 16, "window_kind": "block", "sinks": 1}])
def test_memory_that_is_used_again_never_shows(options: dict[str, Any]) -> None:
    """Large products go to memory that a thread keeps: results survive the next call, in inference mode or not."""
    phi = feature_map("relu", dim=16, num_features=64, seed=1)
    calls = [draw_qkv(600, b=1, h=4, d=16, v=16, seed=i, dtype=torch.float32) for i in range(4)]

    def run(i: int) -> Tensor:
        with torch.inference_mode() if i % 2 else torch.no_grad():
            return linear_attention(*calls[i], phi, **options)

    wanted = [linear_attention(*(t.requires_grad_() for t in c), phi, **options).detach() for c in calls]
    found = [run(i) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        threads = list(pool.map(run, [0, 1, 2, 3] * 4))
    for i in range(4):
        torch.testing.assert_close(found[i], wanted[i], atol=1e-5, rtol=1e-5)
        assert all(torch.equal(t, found[i]) for t in threads[i::4])
