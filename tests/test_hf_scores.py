"""Scores of keys: damages against plain loops, fits that recover a planted rule, budgets that add up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bochner import BochnerError
from bochner.hf import scores
from bochner.hf.scores import Ridge, budgets, damages, features, threshold


def passage(n: int, *, g: int = 2, r: int = 3, d: int = 4, seed: int = 0) -> tuple[Tensor, ...]:
    made = torch.Generator().manual_seed(seed)
    shapes = ((g * r, d), (g, d), (g, d), (g * r, d))
    return tuple(3 * torch.randn(h, 2 * n, size, generator=made, dtype=torch.float64) for h, size in shapes)


def slowly(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, window: int) -> Tensor:
    """The definition, entry by entry."""
    (g, length, _), r = k.shape, len(q) // len(k)
    n = length // 2
    future = torch.full((length, length), -torch.inf).triu(1)
    weight = torch.stack([(0.5 * q[h] @ k[h // r].T + future).softmax(-1) for h in range(len(q))])
    found = torch.zeros(g, n, dtype=q.dtype)
    for head in range(g):
        for j in range(n):
            for i in [*range(j + window, n), *range(n, length)]:
                for h in range(head * r, (head + 1) * r):
                    out = weight[h, i] @ v[head]
                    found[head, j] += (weight[h, i, j] * gradient[h, i] @ (v[head, j] - out)) ** 2
    return found


@pytest.mark.parametrize("rows", [7, 256])
def test_damages_are_their_definition(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "ROWS", rows)
    q, k, v, gradient = passage(20)
    torch.testing.assert_close(damages(q, k, v, gradient, 0.5, 5).dropped, slowly(q, k, v, gradient, 5))


@pytest.mark.parametrize("rows", [7, 256])
def test_damages_of_rounding_are_their_definition(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "ROWS", rows)
    q, k, v, gradient = passage(12)
    found = damages(q, k, v, gradient, 0.5, 5, 2)
    want_k, want_v = torch.zeros_like(found.keys), torch.zeros_like(found.values)
    future = torch.full((24, 24), -torch.inf).triu(1)
    for h in range(len(q)):
        g = h // 3
        weight = (0.5 * q[h] @ k[g].T + future).softmax(-1)
        for j in range(2, 12):
            for i in [*range(j + 5, 12), *range(12, 24)]:
                by_logit = weight[i, j] * gradient[h, i] @ (v[g, j] - weight[i] @ v[g]) * 0.5 * q[h, i]
                by_value = weight[i, j] * gradient[h, i]
                want_k[g] += by_logit[:, None] * by_logit
                want_v[g] += by_value[:, None] * by_value
    torch.testing.assert_close(found.keys, want_k)
    torch.testing.assert_close(found.values, want_v)


def test_a_planted_score_is_recovered() -> None:
    made = torch.Generator().manual_seed(0)
    h = torch.randn(2000, 6, generator=made) * 5
    planted = torch.randn(2, 13, generator=made)
    fit = Ridge(13)
    for part in h.split(500):
        fit.add(features(part), features(part) @ planted.T)
    torch.testing.assert_close(fit.solve(1e-8), planted, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(scores.scores(h[None], planted)[0], (features(h) @ planted.T).T)


def test_scores_do_not_depend_on_the_size_of_hidden_states() -> None:
    h = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(features(h * 100), features(h))


def test_one_threshold_gives_each_head_its_own_budget() -> None:
    found = [torch.arange(100.0).expand(2, -1) + torch.tensor([[0.0], [50.0]]), torch.zeros(2, 100)]
    made = budgets(found, 0.25, 1100, 100)
    assert made == [(250, 750), (0, 0)]
    assert sum(map(sum, made)) == 0.25 * 4 * 1000
    assert threshold(found, 0.25) == 75.0


def test_mistakes_get_a_sentence() -> None:
    with pytest.raises(BochnerError, match="'share'"):
        budgets([torch.zeros(1, 3)], 1.5, 100)
    with pytest.raises(BochnerError, match="no passage"):
        Ridge(3).solve()
