"""Attention by the definition: dense features, every weight formed, one query head at a time, float64 recommended."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from bochner import BochnerWarning
from bochner.maps.base import FeatureMap


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def draw_qkv(
    n: int, *, b: int = 2, h: int = 2, g: int | None = None, s: int | None = None, d: int = 4, v: int = 3, **how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (b, h, n, d), keys (b, g, s, d) and values (b, g, s, v)."""
    g, s = h if g is None else g, n if s is None else s
    seed = how.pop("seed", 0)
    shapes = ((b, h, n, d), (b, g, s, d), (b, g, s, v))
    q, k, u = (draw(*shape, seed=3 * seed + i, **how) for i, shape in enumerate(shapes))
    return q, k, u


def naive_weights(
    q: Tensor,
    k: Tensor,
    phi: FeatureMap,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    window_kind: str = "block",
    sinks: int = 0,
    decay: Tensor | None = None,
) -> Tensor:
    """Unnormalised weights (b, h, n, s), entry by entry from their definition."""
    b, h, n, d = q.shape
    g, s = k.shape[1], k.shape[2]
    root = (d**-0.5 if scale is None else scale) ** 0.5
    rows = []
    for head in range(h):
        owner = head // (h // g)
        x, y = q[:, head] * root, k[:, owner] * root
        if phi.num_heads is None:
            fx, fy = phi(x, "query").dense(), phi(y, "key").dense()
        else:  # the map of one head: all heads see x, and one is kept
            fx = phi(x[:, None].expand(b, g, n, d), "query").dense()[:, owner]
            fy = phi(y[:, None].expand(b, g, s, d), "key").dense()[:, owner]
        kernel = torch.einsum("bim,bjm->bij", fx, fy)
        exact = torch.einsum("bid,bjd->bij", x, y)
        if phi.kernel == "gaussian":
            exact = -0.5 * (x[:, :, None] - y[:, None, :]).square().sum(-1)
        rows.append(
            torch.where(exact_places(b, n, s, key_padding_mask, window, window_kind, sinks), exact.exp(), kernel)
        )
    weights = torch.stack(rows, dim=1)
    if is_causal:
        weights = weights * torch.ones(n, s, dtype=q.dtype).tril(s - n)
    if key_padding_mask is not None:
        weights = weights * (~key_padding_mask)[:, None, None, :]
    if decay is not None:  # token by token
        each = (decay.reshape(1, -1, 1) if decay.ndim < 2 else decay).expand(b, g, s)
        for t in range(s):
            factor = (
                each[..., t].exp()
                if key_padding_mask is None
                else each[..., t].exp().masked_fill(key_padding_mask[:, t, None], 1)
            )
            factor = factor.repeat_interleave(h // g, dim=1)[..., None, None]
            between = (torch.arange(s - n, s)[:, None] >= t) & (torch.arange(s)[None] < t)
            weights = torch.where(between, weights * factor, weights)
    return weights


def naive_attention(q: Tensor, k: Tensor, v: Tensor, phi: FeatureMap, **how: Any) -> Tensor:
    weights = naive_weights(q, k, phi, **how)
    total = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(total == 0, 1.0, total)
    return weights @ v.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def signed_attention(
    x: Tensor, y: Tensor, v: Tensor, phi: FeatureMap, *, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention of scaled x and y by a signed map, and which rows (b, h, n, 1) have too small a normaliser.

    Those, below a tenth of `|phi(x)| |sum psi(y)|`, get the mean of the values that they see.
    """
    fx, fy, ones = phi(x, "query").dense(), phi(y, "key").dense(), torch.ones(x.shape[-2], y.shape[-2], dtype=v.dtype)
    seen = ones.tril() if is_causal else ones
    weights = (fx @ fy.mT) * seen
    total, bound = weights.sum(-1, keepdim=True), fx.norm(dim=-1, keepdim=True) * (seen @ fy).norm(dim=-1, keepdim=True)
    small = (total < 0.1 * bound) & (not phi.has_positive_sums)
    weights = torch.where(small, seen / seen.sum(-1, keepdim=True), weights / total)
    return weights @ v, small


def said_of(small: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Expect the warning that counts these rows, or none where there is no such row."""
    if not bool(small.any()):
        return contextlib.nullcontext()
    rows = f"{int(small.sum())} of {small.numel()} attention rows have a normaliser near or below zero"
    return pytest.warns(BochnerWarning, match=rows)


def exact_places(b: int, n: int, s: int, mask: Tensor | None, window: int | None, kind: str, sinks: int) -> Tensor:
    """(b, n, s): inside the window, or one of the first unpadded keys; the queries are the last n."""
    near = torch.zeros(b, n, s, dtype=torch.bool)
    for sequence in range(b):
        unpadded = [j for j in range(s) if mask is None or not mask[sequence, j]]
        near[sequence, :, unpadded[:sinks]] = True
    if window is not None:
        i, j = torch.arange(s - n, s)[:, None], torch.arange(s)[None, :]
        for sequence in range(b):  # blocks are counted from the first unpadded key
            first = 0 if mask is None else next((x for x in range(s) if not mask[sequence, x]), s)
            a, c = i - first, j - first
            near[sequence] |= (a // window - c // window).abs() <= 1 if kind == "block" else (i - j).abs() < window
    return near


def gradients(out: Tensor, *inputs: Tensor, seed: int = 99) -> tuple[Tensor, ...]:
    """Gradients of a fixed random linear functional of `out`."""
    return torch.autograd.grad(out, inputs, draw(*out.shape, seed=seed, dtype=out.dtype))


def assert_same(got: Any, want: Any, tol: float = 1e-11) -> None:
    """Equal up to rounding, on the scale of `want`."""
    if isinstance(got, Tensor):
        got, want = [got], [want]
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert a.isfinite().all()
        size = max(1.0, float(b.detach().abs().max()))
        torch.testing.assert_close(a, b, rtol=0, atol=tol * size)
