"""Heads without a kernel: rows of softmax over window and sinks, all at once and piece by piece, as by a dense mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from bochner.hf import fates  # noqa: E402
from bochner.hf.attention import LinearAttention  # noqa: E402
from bochner.hf.cache import RecurrentLayer  # noqa: E402
from bochner.hf.calibrate import Far, attention_weights  # noqa: E402
from bochner.hf.calls import Call  # noqa: E402
from bochner.hf.plan import LayerPlan  # noqa: E402

KINDS = ["sliding", "block"]


def attention(window: int, sinks: int, kind: str) -> LinearAttention:
    near: dict[str, Any] = {"window": window, "sinks": sinks, "window_kind": kind}
    return LinearAttention(LayerPlan("a", 4, 2, 8, 8, [fates.Window(**near)] * 2, is_causal=True))


def inputs(n: int, *, gradient: bool = False) -> list[Tensor]:
    g = torch.Generator().manual_seed(n)
    return [torch.randn(2, h, n, 8, generator=g, dtype=torch.float64, requires_grad=gradient) for h in (4, 2, 2)]


def oracle(call: Call, own: LinearAttention) -> Tensor:
    far = Far.of(call, **own.plan.fates[0].near)
    return attention_weights(call, far.allowed & ~far.far).double() @ call.value.repeat_interleave(2, dim=1)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fates, "ROWS_AT_ONCE", (3, 7))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sinks", [0, 1, 3])
@pytest.mark.parametrize("window", [1, 2, 5, 16, 100])
@pytest.mark.parametrize("n", [2, 5, 16, 41])
def test_rows_are_those_of_a_dense_mask(n: int, window: int, sinks: int, kind: str) -> None:
    own, qkv = attention(window, sinks, kind), inputs(n)
    call = Call(*qkv, True, None, 0.4)
    assert own.parts["window"]._plain_window(call) is not None
    torch.testing.assert_close(own(call), oracle(call, own), atol=1e-6, rtol=1e-5)
    last = call._replace(query=call.query[..., -2:, :])  # the last of the keys
    torch.testing.assert_close(own(last), own(call)[..., -2:, :])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [[2, 3, 1, 20, 15], [41], [1, 1, 39], [30, 1, 10]])
def test_piece_by_piece_is_all_at_once(sizes: list[int], kind: str) -> None:
    own = attention(5, 2, kind)
    qkv = inputs(sum(sizes))
    whole, cache, rows = own(Call(*qkv, True, None, 0.4)), RecurrentLayer(), []
    for parts in zip(*(t.split(sizes, dim=-2) for t in qkv), strict=True):
        rows.append(own(Call(*parts, True, None, 0.4), cache))
    torch.testing.assert_close(torch.cat(rows, dim=-2), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_general_way(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, found = attention(5, 2, kind), []
    weight = torch.randn(2, 4, 23, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for short in (True, False):
        qkv = inputs(23, gradient=True)
        if not short:
            monkeypatch.setattr(fates.NearHeads, "_plain_window", lambda *_: None)
        (own(Call(*qkv, True, None, 0.4)) * weight).sum().backward()
        found.append([t.grad for t in qkv])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_padding_goes_the_general_way() -> None:
    own, qkv = attention(5, 2, "sliding"), inputs(12)
    call = Call(*qkv, True, None, 0.4)
    nothing, some = torch.zeros(2, 12, dtype=torch.bool), torch.arange(12).expand(2, 12) < 3
    assert own.parts["window"]._plain_window(call._replace(padding=nothing)) is not None
    assert own.parts["window"]._plain_window(call._replace(padding=some)) is None
    torch.testing.assert_close(own(call._replace(padding=nothing)), own(call))
