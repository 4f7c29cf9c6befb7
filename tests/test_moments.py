"""Moments of keys: the second kind of state. Against the definition, row by row, in every kind of call."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from naive import assert_same, draw, draw_qkv, exact_places, gradients
from torch import Tensor

from bochner import BochnerError, absorb, attention_matrix, exact_attention, feature_map, linear_attention, merge, read
from bochner.attention.attend import nothing_seen
from bochner.attention.features import PreparedMap
from bochner.maps.moments import CLAMP, MomentsFeatures, nearest

NEAR: dict[str, dict[str, Any]] = {
    "kernel": {},
    "sinks": {"sinks": 2},
    "block": {"window": 8, "sinks": 1},
    "sliding": {"window": 8, "sinks": 1, "window_kind": "sliding"},
}


def make(groups: int, num_heads: int | None = None) -> MomentsFeatures:
    phi = feature_map("moments", dim=4, num_groups=groups, num_heads=num_heads).double()
    heads = () if num_heads is None else (num_heads,)
    return phi.calibrate_(draw(*heads, 90, 4, seed=3), 1.3 * draw(*heads, 90, 4, seed=4))  # type: ignore[return-value]


def by_definition(q: Tensor, k: Tensor, v: Tensor, phi: MomentsFeatures, **how: Any) -> Tensor:
    """One row at a time: moments of the keys that it sees by the kernel, group by group, and exact terms."""
    b, h, n, d = q.shape
    s, r, mask = k.shape[2], h // k.shape[1], how.get("key_padding_mask")
    near = exact_places(b, n, s, mask, how.get("window"), how.get("window_kind", "block"), how.get("sinks", 0))
    out = torch.zeros(b, h, n, v.shape[-1], dtype=q.dtype)
    for i, j, t in [(i, j, t) for i in range(b) for j in range(h) for t in range(n)]:
        x, y, u = q[i, j, t] * d**-0.25, k[i, j // r] * d**-0.25, v[i, j // r]
        seen = torch.ones(s, dtype=torch.bool) if mask is None else ~mask[i]
        if how.get("is_causal"):
            seen = seen & (torch.arange(s) <= t + s - n)
        anchors = phi.anchors if phi.num_heads is None else phi.anchors[j // r]
        group = nearest(y, anchors) if phi.num_groups > 1 else torch.zeros(s, dtype=torch.long)
        weights, values = [(y[seen & near[i, t]] @ x).exp()], [u[seen & near[i, t]]]
        for g in range(phi.num_groups):
            some = seen & ~near[i, t] & (group == g)
            if not some.any():
                continue
            along, mean = y[some] @ x, u[some].mean(0)
            half = along.var(correction=0) / 2
            tilt = ((along - along.mean())[:, None] * u[some]).mean(0)
            weights.append((along.mean() + half.clamp_max(CLAMP)).exp()[None] * some.sum())
            values.append((mean + tilt * (CLAMP / half.clamp_min(CLAMP)))[None])
        w = torch.cat(weights)
        out[i, j, t] = w @ torch.cat(values) / w.sum() if len(w) else 0
    return out


@pytest.mark.parametrize("near", NEAR)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("groups", [1, 3, 12])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_and_gradients_are_those_of_the_definition(near: str, is_causal: bool, groups: int, masked: bool) -> None:
    q, k, v = (t.requires_grad_() for t in draw_qkv(40, h=2, g=1, scale=1.5))
    how = NEAR[near] | {"is_causal": is_causal}
    if masked:
        how["key_padding_mask"] = (draw(2, 40, seed=5) < -0.5) | (torch.arange(40) < torch.tensor([[0], [11]]))
    phi = make(groups)
    want, got = by_definition(q, k, v, phi, **how), linear_attention(q, k, v, phi, **how)
    assert_same(got, want, 1e-9)
    assert_same(gradients(got, q, k, v), gradients(want, q, k, v), 1e-8)
    with torch.no_grad():
        assert_same(linear_attention(q, k, v, phi, **how), want, 1e-9)
    assert_same(attention_matrix(q, k, phi, **how) @ v.repeat_interleave(2, dim=1), want, 1e-9)


@pytest.mark.parametrize("near", NEAR)
@pytest.mark.parametrize("groups", [1, 4])
def test_cut_into_pieces_and_steps_it_is_the_whole(near: str, groups: int) -> None:
    q, k, v = draw_qkv(150, h=4, g=2)
    phi, how = make(groups, num_heads=2), NEAR[near] | {"is_causal": True}
    with torch.no_grad():
        whole, state, rows = linear_attention(q, k, v, phi, **how), None, []
        for i, j in pairwise((0, 70, *range(71, 90), 150)):
            part = (t[:, :, i:j] for t in (q, k, v))
            out, state = linear_attention(*part, phi, state=state, return_state=True, **how)
            rows.append(out)
    assert_same(torch.cat(rows, dim=2), whole, 1e-9)


def test_long_sequences_and_the_future() -> None:
    q, k, v = draw_qkv(700, b=1, dtype=torch.float32)
    phi = make(2).float()
    for how in NEAR.values():
        out = linear_attention(q, k, v, phi, is_causal=True, **how)
        later = torch.cat([k[:, :, :300], 50 * k[:, :, 300:]], dim=2)
        assert torch.equal(linear_attention(q, later, v, phi, is_causal=True, **how)[:, :, :300], out[:, :, :300])


def test_states_merge_and_are_read() -> None:
    q, k, v = draw_qkv(60)
    phi = make(3)
    unit = nothing_seen(PreparedMap(phi, 0.5, torch.float64), k, v)
    parts = [absorb(unit, phi(k[:, :, i:j] / 2**0.5, "key"), v[:, :, i:j], phi=phi) for i, j in ((0, 20), (20, 60))]
    got = read(merge(*parts), phi(q / 2**0.5, "query"), phi=phi)
    assert_same(got, linear_attention(q, k, v, phi), 1e-10)


def test_gaussian_keys_are_weighed_exactly_and_groups_help_where_keys_are_not() -> None:
    """The values are the keys: of Gaussian ones the mean that a query sees is linear in it."""
    q, k, _ = draw_qkv(4000, b=1, h=1, d=4, v=2, scale=0.7)
    apart = k + 3 * (torch.arange(4000) % 3 - 1)[:, None]

    def error(k: Tensor, **options: Any) -> float:
        want = exact_attention(q[:, :, :50], k, k)
        return float(
            (linear_attention(q[:, :, :50], k, k, feature_map("moments", dim=4, **options)) - want).norm() / want.norm()
        )

    assert error(k) < 0.06
    assert error(apart, num_groups=3) < 0.3 * error(apart)


def test_groups_of_the_sequence_itself_are_not_for_causal_attention() -> None:
    q, k, v = draw_qkv(20)
    with pytest.raises(BochnerError, match=r"num_groups=2 takes its groups from the whole sequence"):
        linear_attention(q, k, v, feature_map("moments", dim=4, num_groups=2), is_causal=True)
