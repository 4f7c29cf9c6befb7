"""Block windows in few steps: the rows of the quadratic oracle, wherever they are taken at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bochner import attention_matrix, feature_map, linear_attention
from bochner.attention import blocks, core
from bochner.maps.base import FeatureMap

H, D, W = 2, 8, 4


def landmark(positive: bool) -> FeatureMap:
    g = torch.Generator().manual_seed(5)
    q, k = (torch.randn(6, H, 40, D, generator=g) * D**-0.25 for _ in range(2))
    phi = feature_map("landmark", dim=D, num_features=8, num_heads=H, positive=positive)
    return phi.calibrate_(q, k)  # type: ignore[operator, no-any-return]


MAPS = {
    "positive": lambda: feature_map("positive", dim=D, num_features=12),
    "by head": lambda: feature_map("positive", dim=D, num_features=12, num_heads=H),
    "relu": lambda: feature_map("relu", dim=D, num_features=12),
    "landmark": lambda: landmark(True),
    "signed landmark": lambda: landmark(False),
}


def inputs(n: int, b: int = 1, size: float = 1.0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(b, H, n, D, generator=g, dtype=torch.float64) for _ in range(3))
    return (q * size).to(dtype), (k * size).to(dtype), v.to(dtype)


def oracle(q: Tensor, k: Tensor, v: Tensor, phi: FeatureMap, **near: Any) -> Tensor:
    weights = attention_matrix(q.double(), k.double(), phi, window=W, window_kind="block", **near)
    return weights @ v.double()


@pytest.fixture
def only_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the short way."""

    def refuse(*_: Any) -> None:
        raise AssertionError("the general scan was called")

    monkeypatch.setattr(core, "windowed", refuse)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("sinks", [0, 1, 3])
# Below, at and above whole blocks; up to the most of them.
@pytest.mark.parametrize("n", [13, 16, 19, 127, 128, 133, 301, 512])
def test_the_rows_are_those_of_the_oracle(only_blocks: None, name: str, sinks: int, n: int) -> None:
    phi, (q, k, v) = MAPS[name](), inputs(n, dtype=torch.float64)
    with torch.no_grad():
        out = linear_attention(q, k, v, phi, window=W, sinks=sinks, window_kind="block")
    torch.testing.assert_close(out, oracle(q, k, v, phi, sinks=sinks), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("n", [61, 200])
def test_masked_keys_count_for_nothing(only_blocks: None, name: str, n: int) -> None:
    phi, (q, k, v) = MAPS[name](), inputs(n, b=3, dtype=torch.float64)
    mask = torch.arange(n) >= torch.tensor([n, n // 2, 3])[:, None]
    mask[0, 30:40] = True  # whole zones without a key
    expected = oracle(q, k, v, phi, sinks=1, key_padding_mask=mask)
    k, v = (t.masked_fill(mask[:, None, :, None], torch.nan) for t in (k, v))
    out = linear_attention(q, k, v, phi, window=W, sinks=1, window_kind="block", key_padding_mask=mask)
    torch.testing.assert_close(out, expected, atol=1e-9, rtol=1e-9)


def test_many_sequences_are_taken_some_at_a_time(only_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    phi, (q, k, v) = MAPS["positive"](), inputs(50, b=5, dtype=torch.float64)
    mask = torch.arange(50) >= torch.tensor([50, 44, 9, 30, 50])[:, None]
    taken: list[Any] = []
    fill = blocks._fill
    monkeypatch.setattr(blocks, "_fill", lambda call, out, *rest: taken.append(len(out)) or fill(call, out, *rest))
    monkeypatch.setattr(blocks, "LARGEST", 2 * H * 12 * 13 * (D + 1))
    out = linear_attention(q, k, v, phi, window=W, sinks=1, window_kind="block", key_padding_mask=mask)
    assert taken == [2, 2, 1]
    expected = oracle(q, k, v, phi, sinks=1, key_padding_mask=mask)
    torch.testing.assert_close(out, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_short_numbers_are_summed_in_float32(only_blocks: None, dtype: torch.dtype) -> None:
    phi, (q, k, v) = MAPS["positive"](), inputs(150, dtype=dtype)
    out = linear_attention(q, k, v, phi, window=W, sinks=1, window_kind="block")
    assert out.dtype == dtype
    expected = oracle(q, k, v, phi, sinks=1)
    torch.testing.assert_close(out.double(), expected, atol=4 * torch.finfo(dtype).eps, rtol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("size", [2.0, 40.0])
def test_terms_beyond_the_range_are_left_to_the_general_scan(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    phi, (q, k, v) = MAPS["positive"](), inputs(100, size=size)
    near = {"window": W, "sinks": 1, "window_kind": "block"}
    taken: list[Any] = []
    rows = blocks.block_rows
    monkeypatch.setattr(core, "block_rows", lambda *args: taken.append(rows(*args)) or taken[-1])
    out = linear_attention(q, k, v, phi, **near)
    torch.testing.assert_close(out.double(), oracle(q, k, v, phi, sinks=1), atol=2e-3, rtol=2e-3)
    assert (taken[0] is None) == (size == 40.0)


def test_more_blocks_are_left_to_the_general_scan() -> None:
    phi, (q, k, v) = MAPS["positive"](), inputs(blocks.MOST * W + 1, dtype=torch.float64)
    out = linear_attention(q, k, v, phi, window=W, sinks=1, window_kind="block")
    torch.testing.assert_close(out, oracle(q, k, v, phi, sinks=1), atol=1e-9, rtol=1e-9)


def test_a_gradient_takes_the_general_scan() -> None:
    phi, (q, k, v) = MAPS["positive"](), inputs(60)
    near = {"window": W, "sinks": 1, "window_kind": "block"}
    plain = linear_attention(q, k, v, phi, **near)
    q.requires_grad_()
    out = linear_attention(q, k, v, phi, **near)
    out.sum().backward()
    assert q.grad is not None
    torch.testing.assert_close(out.detach(), plain, atol=1e-5, rtol=1e-5)


def test_inference_mode_leaves_nothing_behind() -> None:
    phi, (q, k, v) = MAPS["landmark"](), inputs(64)
    near = {"window": W, "sinks": 1, "window_kind": "block"}
    for cached in (blocks._apart, blocks._edges):
        cached.cache_clear()
    with torch.inference_mode():
        first = linear_attention(q, k, v, phi, **near)
    second = linear_attention(q, k, v, phi, **near)
    assert torch.equal(first, second)
    assert not second.is_inference()


@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("role", ["query", "key"])
@pytest.mark.parametrize("num_heads", [H, None])
@pytest.mark.parametrize("m", [5, 8, 20])  # below, at and above the size of a head
def test_landmark_features_in_few_passes_are_the_same(positive: bool, role: str, num_heads: int | None, m: int) -> None:
    g = torch.Generator().manual_seed(m)
    x, q, k = (torch.randn(3, H, 30, D, generator=g) for _ in range(3))
    phi = feature_map("landmark", dim=D, num_features=m, num_heads=num_heads, positive=positive).calibrate_(q, k)
    want = phi(x * 0.7, role)
    with torch.no_grad():
        have = phi.prepare_scaled(role, 0.7, torch.float32)(x)
    torch.testing.assert_close(have.values, want.values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(have.log_scale, want.log_scale, atol=1e-5, rtol=1e-5)
