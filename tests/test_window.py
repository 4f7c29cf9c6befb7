"""Exact softmax in a window and on the first keys, jointly normalised with the kernel elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from naive import assert_same, draw, draw_qkv, exact_places, gradients, naive_attention, naive_weights, said_of
from torch import Tensor

from bochner import attention_matrix, exact_attention, feature_map, linear_attention
from bochner.maps.base import FeatureMap


def make(name: str = "positive", **options: Any) -> FeatureMap:
    return feature_map(name, dim=4, **{"num_features": 8, "seed": 3, **options})


def padding(b: int, s: int) -> Tensor:
    mask = draw(b, s, seed=5) < -0.4
    mask[0, : s // 4] = True
    return mask


@pytest.mark.parametrize("n", [1, 63, 64, 65, 127, 129, 300])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (5, 2), (130, 4), (None, 1), (None, 3)])
@pytest.mark.parametrize("kind", ["block", "sliding"])
def test_output_and_gradients_are_those_of_the_quadratic_definition(
    n: int, is_causal: bool, window: int | None, sinks: int, kind: str
) -> None:
    phi = make()
    q, k, v = (t.requires_grad_() for t in draw_qkv(n))
    options: dict[str, Any] = {"is_causal": is_causal, "window": window, "sinks": sinks, "window_kind": kind}
    want = naive_attention(q, k, v, phi, **options)
    got = linear_attention(q, k, v, phi, **options)
    assert_same(got, want)
    assert_same(gradients(got, q, k, v), gradients(want, q, k, v))


@pytest.mark.parametrize("rows", [3, 5, 16, 100])
@pytest.mark.parametrize(("kind", "window"), [("block", 8), ("sliding", 8), ("sliding", 20)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["positive", "gmm_prf"])
def test_segments_and_cuts_do_not_show(
    rows: int, kind: str, window: int, is_causal: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many rows at a time that segments have less than, exactly or more than one block."""
    phi = make(name).double()
    parameters = [p for p in phi.parameters() if p.requires_grad]
    q, k, v = (t.requires_grad_() for t in draw_qkv(220, h=4, g=2))
    options: dict[str, Any] = {"is_causal": is_causal, "window": window, "window_kind": kind, "sinks": 2}
    options |= {"key_padding_mask": padding(2, 220)}
    want = naive_attention(q, k, v, phi, **options)
    monkeypatch.setattr("bochner.attention.scan.rows_at_once", lambda *_: rows)
    got = linear_attention(q, k, v, phi, **options)
    assert_same(got, want)
    assert_same(gradients(got, q, k, v, *parameters), gradients(want, q, k, v, *parameters))
    with torch.no_grad():
        assert_same(linear_attention(q, k, v, phi, **options), want)


@pytest.mark.parametrize(("kind", "window"), [("block", 8), ("sliding", 8), ("sliding", 20)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_signed_maps_follow_the_definition(kind: str, window: int, is_causal: bool) -> None:
    q, k, v = (t.requires_grad_() for t in draw_qkv(150, h=4, g=2, scale=0.3))
    how: dict[str, Any] = {"is_causal": is_causal, "window": window, "window_kind": kind, "sinks": 1}
    want = naive_attention(q, k, v, make("trig", num_features=256), **how)
    got = linear_attention(q, k, v, make("trig", num_features=256), **how)
    assert_same(got, want)
    assert_same(gradients(got, q, k, v), gradients(want, q, k, v))
    phi = feature_map("landmark", dim=4, num_features=8, num_heads=2, positive=False).double()  # topped up
    phi.calibrate_(*(draw(8, 2, 60, 4, seed=i) for i in range(2)), is_causal=is_causal, window=window, window_kind=kind)
    want = attention_matrix(q, k, phi, **how) @ v.repeat_interleave(2, dim=1)
    assert_same(linear_attention(q, k, v, phi, **how), want)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("g", [1, 2, 4])
def test_masks_and_grouped_heads_follow_the_definition(is_causal: bool, window: int | None, g: int) -> None:
    phi = make(num_heads=g)
    q, k, v = (t.requires_grad_() for t in draw_qkv(140, h=4, g=g))
    options: dict[str, Any] = {"is_causal": is_causal, "window": window, "sinks": 2}
    options |= {"key_padding_mask": padding(2, 140)}
    want = naive_attention(q, k, v, phi, **options)
    got = linear_attention(q, k, v, phi, **options)
    assert_same(got, want)
    assert_same(gradients(got, q, k, v), gradients(want, q, k, v))
    assert_same(attention_matrix(q, k, phi, **options) @ v.repeat_interleave(4 // g, dim=1), want)


@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
@pytest.mark.parametrize("name", ["positive", "calibrated", "trig"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_window_holds_the_maps_own_exact_kernel(kernel: str, name: str, is_causal: bool) -> None:
    phi = make(name, kernel=kernel, num_features=64).calibrate_(draw(50, 4) + 0.3, draw(50, 4, seed=1))
    q, k, v = draw_qkv(80, scale=0.4)
    options: dict[str, Any] = {"is_causal": is_causal, "window": 7, "sinks": 1}
    assert_same(linear_attention(q, k, v, phi, **options), naive_attention(q, k, v, phi, **options))


@pytest.mark.parametrize("n", [1, 50, 200])
@pytest.mark.parametrize("exact", [{"window": 200}, {"sinks": 200}, {"window": 10_000}])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_window_over_everything_is_softmax_attention(n: int, exact: dict[str, Any], is_causal: bool) -> None:
    q, k, v = draw_qkv(n, scale=3.0)
    want = exact_attention(q, k, v, is_causal=is_causal)
    got = linear_attention(q, k, v, make(), is_causal=is_causal, **exact)
    assert_same(got, want)


def error(q: Tensor, k: Tensor, v: Tensor, **exact: Any) -> float:
    """Distance from softmax attention, for a map of 64 features."""
    want = exact_attention(q, k, v, is_causal=True)
    return float((linear_attention(q, k, v, make(num_features=64), is_causal=True, **exact) - want).norm())


@pytest.mark.parametrize("seed", range(3))
def test_a_sink_cures_a_first_key_that_draws_all_attention(seed: int) -> None:
    q, k, v = draw_qkv(256, seed=seed)
    q = q + 2
    k[:, :, 0] = 3
    assert error(q, k, v, sinks=1) < 0.2 * error(q, k, v)


@pytest.mark.parametrize("seed", range(3))
def test_a_window_cures_attention_that_stays_near(seed: int) -> None:
    q, _, v = draw_qkv(256, seed=seed)
    walk = q.cumsum(2) / 4
    assert error(walk, walk, v, window=32) < 0.7 * error(walk, walk, v)


@pytest.mark.parametrize("n", [1, 30, 90])
@pytest.mark.parametrize("padded", [False, True])
def test_sinks_take_part_in_cross_attention(n: int, padded: bool) -> None:
    q, k, v = (t.requires_grad_() for t in draw_qkv(n, s=70))
    mask = padding(2, 70) if padded else None
    want = naive_attention(q, k, v, make(), sinks=3, key_padding_mask=mask)
    got = linear_attention(q, k, v, make(), sinks=3, key_padding_mask=mask)
    assert_same(got, want)
    assert_same(gradients(got, q, k, v), gradients(want, q, k, v))


@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
@pytest.mark.parametrize("is_causal", [False, True])
def test_large_inputs_stay_finite_with_gradients(scale: float, is_causal: bool) -> None:
    q, k, v = (t.requires_grad_() for t in draw_qkv(200, scale=scale, dtype=torch.float32))
    out = linear_attention(q, k, v, make(), is_causal=is_causal, window=5, sinks=1)
    assert out.isfinite().all()
    assert (out != 0).any(-1).all()
    assert all(t.isfinite().all() for t in gradients(out, q, k, v))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sinks", [0, 2])
def test_exact_terms_count_in_the_bound_of_a_small_normaliser(is_causal: bool, sinks: int) -> None:
    """Of a signed map: a tenth of `|phi| |sum of far psi|` plus the exact terms; below it rows get the mean."""
    phi, root, n = make("trig", num_features=8), 4**-0.25, 200
    q, k, v = draw_qkv(n, b=1, h=4)
    how: dict[str, Any] = {"is_causal": is_causal, "window": 16, "sinks": sinks}
    weights = naive_weights(q, k, phi, **how)
    near = exact_places(1, n, n, None, 16, "block", sinks)[:, None]
    seen = torch.ones(n, n, dtype=torch.float64).tril() if is_causal else torch.ones(n, n, dtype=torch.float64)
    fx, fy = phi(q * root, "query").dense(), phi(k * root, "key").dense()
    bound = 0.1 * fx.norm(dim=-1) * ((seen * ~near) @ fy).norm(dim=-1)
    exact, total = (weights * near).sum(-1), weights.sum(-1)
    small = (total < bound + 0.1 * exact)[..., None]
    assert bool((small[..., 0] & (total >= bound)).any())  # the exact terms decide
    want = torch.where(small, (seen @ v) / seen.sum(-1, keepdim=True), (weights @ v) / total[..., None])
    with said_of(small):
        got = linear_attention(q, k, v, phi, **how)
    assert_same(got, want, 1e-9)


@pytest.mark.parametrize("kind", ["block", "sliding"])
@pytest.mark.parametrize("padding", [None, [0, 5], [1, 2, 6]], ids=str)
def test_steps_without_a_graph_follow_the_whole_from_the_first_sinks_on(kind: str, padding: list[int] | None) -> None:
    """While the window still holds sinks, and when they leave it one by one."""
    q, k, v = draw_qkv(40, b=2)
    phi = feature_map("positive", dim=q.shape[-1], num_features=16).double()
    mask = None if padding is None else torch.zeros(2, 40, dtype=torch.bool)
    if mask is not None:
        mask[0, padding] = True
    how = {"is_causal": True, "window": 8, "sinks": 3, "window_kind": kind}
    with torch.no_grad():
        want = linear_attention(q, k, v, phi, key_padding_mask=mask, **how)
        state, rows = None, []
        for i in range(40):
            x, y, u = (t[:, :, i : i + 1] for t in (q, k, v))
            hole = None if mask is None else mask[:, i : i + 1]
            out, state = linear_attention(x, y, u, phi, key_padding_mask=hole, state=state, return_state=True, **how)
            rows.append(out)
    assert_same(torch.cat(rows, dim=2), want, 1e-9)


@pytest.mark.parametrize("window", [None, 2, 8])
@pytest.mark.parametrize("kind", ["block", "sliding"])
def test_padding_that_has_left_is_not_forgotten_by_steps_without_a_mask(window: int | None, kind: str) -> None:
    q, k, v = draw_qkv(30, b=2)
    phi = feature_map("positive", dim=q.shape[-1], num_features=16).double()
    mask = (torch.arange(30) < 4).expand(2, 30)
    how = {"is_causal": True, "window": window, "sinks": 3, "window_kind": kind}
    with torch.no_grad():
        want = linear_attention(q, k, v, phi, key_padding_mask=mask, **how)
        first = [t[:, :, :4] for t in (q, k, v)]
        _, state = linear_attention(*first, phi, key_padding_mask=mask[:, :4], return_state=True, **how)
        for i in range(4, 30):
            token = [t[:, :, i : i + 1] for t in (q, k, v)]
            out, state = linear_attention(*token, phi, state=state, return_state=True, **how)
            assert_same(out, want[:, :, i : i + 1], 1e-9)


@pytest.mark.parametrize("kind", ["block", "sliding"])
@pytest.mark.parametrize("sinks", [0, 3, 9])
def test_single_tokens_without_gradients_see_what_the_whole_sequence_sees(kind: str, sinks: int) -> None:
    """A key that leaves a sliding window is no longer exact; sinks that the window holds are seen once."""
    q, k, v = (torch.randn(1, 2, 24, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(3))
    phi = feature_map("positive", dim=4, num_features=8).double()
    how: dict[str, Any] = {"is_causal": True, "window": 5, "window_kind": kind, "sinks": sinks}
    want = linear_attention(q, k, v, phi, **how)
    with torch.no_grad():
        out, state = linear_attention(q[:, :, :2], k[:, :, :2], v[:, :, :2], phi, return_state=True, **how)
        rows = [out]
        for i in range(2, 24):
            token = (t[:, :, i : i + 1] for t in (q, k, v))
            out, state = linear_attention(*token, phi, state=state, return_state=True, **how)
            rows.append(out)
    torch.testing.assert_close(torch.cat(rows, dim=2), want, atol=1e-12, rtol=1e-12)
