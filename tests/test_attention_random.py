"""Calls drawn at random follow the quadratic definition: values, gradients, the future, and a cut with a state."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from naive import assert_same, draw_qkv, gradients, naive_attention
from torch import Tensor

from bochner import feature_map, linear_attention

MAPS = ["positive", "hyperbolic", "calibrated", "relu", "elu", "gmm_prf", "fastfood_prf"]


def drawn(seed: int) -> tuple[Any, tuple[Tensor, ...], dict[str, Any]]:
    """A map, queries, keys and values, and the options of a call that is allowed."""
    r = random.Random(seed)
    n, d, g, b = r.choice([1, 2, r.randint(3, 40), r.randint(40, 200)]), r.choice([1, 4, 8]), r.choice([1, 2, 3]), 2
    is_causal, name = r.random() < 0.5, r.choice(MAPS)
    s = n if r.random() < 0.6 else r.randint(n if is_causal else 1, n + 90)
    how: dict[str, Any] = {
        "is_causal": is_causal,
        "window": r.choice([None, 1, 5, 8, 32, 1000]) if is_causal or n == s else None,
        "window_kind": r.choice(["block", "sliding"]),
        "sinks": r.choice([0, 0, 1, 4, 30]),
        "scale": r.choice([None, 0.3]),
    }
    places, lengths = torch.arange(s), torch.tensor([[r.randint(0, s)], [s]])
    how["key_padding_mask"] = r.choice([None, places < s - lengths, places >= lengths, (places + lengths) % 3 == 0])
    phi = feature_map(name, dim=d, num_features=8, seed=seed).double()
    qkv = draw_qkv(n, s=s, b=b, h=g * r.choice([1, 2]), g=g, d=d, v=r.choice([d, 5]), seed=seed)
    return phi, qkv, how


@pytest.mark.parametrize("seed", range(120))
def test_a_random_call_follows_the_definition(seed: int) -> None:
    phi, qkv, how = drawn(seed)
    q, k, v = (t.requires_grad_() for t in qkv)
    want, got = (attend(q, k, v, phi, **how) for attend in (naive_attention, linear_attention))
    assert_same(got, want, 1e-9)
    assert_same(gradients(got, q, k, v), gradients(want, q, k, v), 1e-7)
    with torch.no_grad():
        assert_same(linear_attention(q, k, v, phi, **how), want, 1e-9)


@pytest.mark.parametrize("seed", range(120, 180))
def test_a_random_causal_call_can_be_cut_and_does_not_see_the_future(seed: int) -> None:
    phi, (q, k, v), how = drawn(seed)
    mask, how["is_causal"] = how.pop("key_padding_mask"), True
    k, v, mask = k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1), None if mask is None else mask.repeat(1, 2)
    n = k.shape[2]
    q = q.repeat(1, 1, n, 1)[..., :n, :]
    whole = linear_attention(q, k, v, phi, key_padding_mask=mask, **how)
    i = random.Random(seed).randint(1, n - 1)
    state, rows = None, []
    for part in (slice(0, i), slice(i, n)):
        hole = None if mask is None else mask[:, part]
        x = (t[..., part, :] for t in (q, k, v))
        out, state = linear_attention(*x, phi, key_padding_mask=hole, state=state, return_state=True, **how)
        rows.append(out)
    assert_same(torch.cat(rows, dim=2), whole, 1e-9)
    k[..., i:, :] += 1
    v[..., i:, :] -= 1
    assert torch.equal(linear_attention(q, k, v, phi, key_padding_mask=mask, **how)[..., :i, :], whole[..., :i, :])
