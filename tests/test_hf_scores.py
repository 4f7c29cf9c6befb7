"""Scores of keys: targets against plain loops, fits that recover a planted rule, budgets that add up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bochner import BochnerError
from bochner.hf import scores
from bochner.hf.scores import Received, Ridge, budgets, features, received, target, threshold


def passage(n: int, *, g: int = 2, r: int = 3, d: int = 4, seed: int = 0) -> tuple[Tensor, ...]:
    made = torch.Generator().manual_seed(seed)
    shapes = ((g * r, d), (g, d), (g, d), (g * r, d))
    return tuple(3 * torch.randn(h, 2 * n, size, generator=made, dtype=torch.float64) for h, size in shapes)


def slowly(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, window: int) -> Received:
    """The definitions, entry by entry."""
    (g, length, _), r = k.shape, len(q) // len(k)
    n = length // 2
    future = torch.full((length, length), -torch.inf).triu(1)
    weight = torch.stack([(0.5 * q[h] @ k[h // r].T + future).softmax(-1) for h in range(len(q))])
    found = {name: torch.zeros(g, n, dtype=q.dtype) for name in ("again", "far", "mean", "total", "damage")}
    for head in range(g):
        for j in range(n):
            group = weight[head * r : (head + 1) * r, :, j]
            pooled = group.amax(0)
            found["again"][head, j] = pooled[n:].max()
            found["total"][head, j] = pooled[:n].sum()
            if j + window < n:
                found["far"][head, j] = pooled[j + window : n].max()
                found["mean"][head, j] = pooled[j + window : n].mean()
            for i in [*range(j + window, n), *range(n, length)]:
                for h in range(head * r, (head + 1) * r):
                    out = weight[h, i] @ v[head]
                    found["damage"][head, j] += (weight[h, i, j] * gradient[h, i] @ (v[head, j] - out)) ** 2
    return Received(rows=(n - window - torch.arange(n)).clamp(min=0), **found)


@pytest.mark.parametrize("rows", [7, 256])
def test_targets_are_their_definitions(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "ROWS", rows)
    q, k, v, gradient = passage(20)
    got = received(q, k, 0.5, 5, v=v, gradient=gradient)
    for have, want in zip(got, slowly(q, k, v, gradient, 5), strict=True):
        torch.testing.assert_close(have, want)


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
    r = received(*passage(8)[:2], 0.5, 2)
    with pytest.raises(BochnerError, match="'damage' needs"):
        target("damage", r)
    with pytest.raises(BochnerError, match="target of scores 'most'"):
        target("most", r)
    with pytest.raises(BochnerError, match="no passage"):
        Ridge(3).solve()
