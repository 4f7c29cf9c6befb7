"""The rank floor: attained by singular vectors, below every map, and zero exactly where the rank is small."""

from __future__ import annotations

import pytest
import torch

from bochner import BochnerError, feature_map
from bochner.theory import rank_floor


def weights(n: int = 40, d: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    q, k = (1.2 * torch.randn(n, d, generator=g).double() for _ in range(2))
    return q, k, (q @ k.mT).softmax(-1)


@pytest.mark.parametrize("m", [1, 5, 39])
def test_without_a_mask_the_floor_is_attained_by_the_singular_vectors(m):
    a = torch.stack([weights(seed=s)[2] for s in range(3)])
    u, s, vh = torch.linalg.svd(a)
    best = (u[..., :m] * s[..., None, :m]) @ vh[..., :m, :]
    error = (best - a).flatten(1).norm(dim=-1) / a.flatten(1).norm(dim=-1)
    torch.testing.assert_close(rank_floor(a, m), error)
    assert (rank_floor(a, 40) == 0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["positive", "calibrated", "landmark", "relu"])
def test_no_map_is_below_the_floor(name, causal):
    q, k, _ = weights(64)
    mask = torch.ones(64, 64, dtype=torch.bool).tril() if causal else torch.ones(64, 64, dtype=torch.bool)
    a = (q @ k.mT).masked_fill(~mask, -torch.inf).softmax(-1)
    for m in (8, 16):
        phi = feature_map(name, dim=6, num_features=m).calibrate_(q, k)
        x, y = phi(q, "query"), phi(k, "key")
        guess = (x.values @ y.values.mT) * (y.log_scale.mT - y.log_scale.max()).exp() * mask
        guess = guess / guess.sum(-1, keepdim=True)
        floor = rank_floor(a, m, mask)
        assert 0 < float(floor) < float((guess - a).norm() / a.norm())


def test_under_a_mask_the_floor_sees_only_what_is_left_to_the_map():
    g = torch.Generator().manual_seed(0)
    i = torch.arange(64)
    far = i[None, :] <= i[:, None] - 8
    low = torch.rand(64, 4, generator=g) @ torch.rand(4, 64, generator=g)
    near = torch.rand(64, 64, generator=g)  # of full rank, but exact
    assert float(rank_floor(torch.where(far, low, near), 4, far)) < 1e-6
    assert float(rank_floor(torch.where(far, low, near), 3, far)) > 1e-3
    assert float(rank_floor(torch.where(far, low, near), 4)) > 0.05
    # Two halves of the sequence meet in one square, whose tail alone is a bound.
    tail = torch.linalg.svdvals(near[32:, :32].double())[4:].square().sum().sqrt() / near.double().norm()
    assert float(rank_floor(near, 4, torch.ones(64, 64, dtype=torch.bool).tril())) > float(tail)


def test_bad_input_gets_one_clear_sentence():
    a = weights()[2]
    for call, message in [
        (lambda: rank_floor(a, 0), "'num_features' of rank_floor must be a positive int"),
        (lambda: rank_floor(a * torch.nan, 2), "'weights' of rank_floor must be finite"),
        (lambda: rank_floor(a, 2, torch.ones(3, 3, dtype=torch.bool)), "'far' None or a bool tensor"),
        (lambda: rank_floor(a, 2, [[True]]), r"'far' None or a bool tensor \(n, s\), got \(40, 40\) and list"),
        (lambda: rank_floor(a[0], 2), "'weights' of rank_floor must be"),
    ]:
        with pytest.raises(BochnerError, match=message):
            call()
