"""Certified attention: no row is ever farther from exact attention than its certificate says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bochner import BochnerError, certified_attention
from bochner.certified import make_blocks, mass_bounds, similar


def exact(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Attention in float64, by its definition."""
    logits = q.double() @ k.double().mT / q.shape[-1] ** 0.5
    if is_causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    return logits.softmax(-1) @ v.double()


def clusters(n: int, d: int, count: int, scale: float, g: torch.Generator) -> Tensor:
    """Points in tight clusters."""
    centres = scale * torch.randn(count, d, generator=g)
    return centres[torch.randint(count, (n,), generator=g)] + 0.02 * torch.randn(n, d, generator=g)


def case(seed: int) -> tuple[Tensor, Tensor, Tensor, float, bool]:
    """Random and hostile inputs: any scale, clusters, one dominant key, duplicates, zero queries, awkward lengths."""
    g = torch.Generator().manual_seed(seed)
    n = int(torch.randint(1, 1200 if seed % 10 == 0 else 200, (1,), generator=g))
    d = int(torch.randint(1, 33, (1,), generator=g))
    scale = float(10 ** (3 * torch.rand(1, generator=g) - 1.5))
    k = scale * torch.randn(n, d, generator=g) + 3 * torch.randn(1, d, generator=g)
    q = scale * torch.randn(n, d, generator=g)
    v = torch.randn(n, 3, generator=g) * 10 ** (4 * torch.rand(1, generator=g) - 2)
    hostile = seed % 6
    if hostile == 1:
        k = clusters(n, d, 5, scale, g)
        q = k.clone()
    elif hostile == 2:  # one key far from its block decides, and its value is the largest
        k[n // 2] = 5 * k[n // 2]
        v[n // 2] = 100 * v[n // 2]
    elif hostile == 3:
        k = k[:1].expand_as(k).clone()
    elif hostile == 4:
        q = torch.zeros_like(q)
    return q, k, v, (0.3, 0.03, 0.003)[seed % 3], seed % 2 == 0


def check(seed: int) -> float:
    q, k, v, error, is_causal = case(seed)
    out, bound, visited = certified_attention(q, k, v, error=error, is_causal=is_causal)
    apart = (out.double() - exact(q, k, v, is_causal)).norm(dim=-1)
    assert torch.isfinite(out).all()
    assert (apart <= bound).all(), (seed, (apart / bound).max())
    # Beyond the error that was asked for there is rounding alone.
    assert (bound <= (error + 1e-3 * (1 + q.norm(dim=-1).max() * k.norm(dim=-1).max())) * v.norm(dim=-1).max()).all()
    assert 0 < visited <= 1
    return visited


def test_no_row_is_beyond_its_certificate() -> None:
    visited = [check(seed) for seed in range(400)]
    assert sum(x < 0.9 for x in visited) > 20  # the certificates are not those of exact attention alone


@pytest.mark.slow
def test_no_row_is_beyond_its_certificate_in_ten_thousand_cases() -> None:
    for seed in range(400, 10_400):
        check(seed)


def test_masses_of_blocks_lie_between_their_bounds() -> None:
    g = torch.Generator().manual_seed(0)
    for scale in (0.001, 0.1, 1.0, 3.0):
        k, q = scale * torch.randn(300, 6, generator=g).double(), torch.randn(100, 6, generator=g).double()
        blocks = make_blocks(k, k)
        least, most = mass_bounds(q, blocks)
        logits = torch.einsum("td,bsd->tbs", q, blocks.k).masked_fill(~blocks.live, -torch.inf)
        assert (least <= logits.logsumexp(-1)).all()
        assert (logits.logsumexp(-1) <= most).all()


def test_an_upper_bound_that_is_too_small_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(q: Tensor, blocks: object) -> tuple[Tensor, Tensor]:
        least, most = mass_bounds(q, blocks)  # type: ignore[arg-type]
        return least, least + 0.1 * (most - least)

    monkeypatch.setattr("bochner.certified.mass_bounds", half)
    with pytest.raises(AssertionError):
        test_no_row_is_beyond_its_certificate()


def test_tight_clusters_are_skipped() -> None:
    g = torch.Generator().manual_seed(0)
    v = torch.randn(4096, 8, generator=g)
    for is_causal, count in ((False, 64), (True, 8)):
        k = clusters(4096, 16, count, 3.0, g)
        out, bound, visited = certified_attention(k, k, v, error=0.01, is_causal=is_causal)
        assert visited < 0.4
        assert ((out.double() - exact(k, k, v, is_causal)).norm(dim=-1) <= bound).all()


def test_groups_of_similar_rows_hold_every_row_once() -> None:
    x = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    groups = similar(x, 32)
    assert torch.cat(groups).sort().values.tolist() == list(range(1000))
    assert max(map(len, groups)) <= 32


def test_axes_in_front_are_kept_and_float64_stays() -> None:
    q = torch.randn(2, 3, 40, 8, generator=torch.Generator().manual_seed(0)).double()
    out, bound, _ = certified_attention(q, q, q, is_causal=True)
    assert out.dtype == torch.float64
    assert bound.shape == (2, 3, 40)
    assert ((out - exact(q, q, q, True)).norm(dim=-1) <= bound).all()


@pytest.mark.parametrize(
    ("q", "options", "words"),
    [
        (torch.zeros(4, 3), {"error": 0.0}, "error"),
        (torch.zeros(4, 3), {"error": 2.5}, "below 2"),
        (torch.zeros(4), {}, "rows, size"),
        (torch.zeros(4, 2), {}, "do not fit"),
        (torch.zeros(5, 3), {"is_causal": True}, "causal"),
        (torch.zeros(4, 3, dtype=torch.long), {}, "floating-point"),
    ],
)
def test_bad_input_gets_one_sentence(q: Tensor, options: dict[str, float], words: str) -> None:
    with pytest.raises(BochnerError, match=words):
        certified_attention(q, torch.zeros(4, 3), torch.zeros(4, 3), **options)  # type: ignore[arg-type]
