"""The quadratic oracles: exact attention for every kernel, and the attention matrix of a map."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bochner._checks import BochnerError, accumulation_dtype
from bochner.attention.core import check_mask, check_qkv, check_scale
from bochner.maps import feature_map
from bochner.maps.base import KERNELS, FeatureMap

Kernel = str | FeatureMap | Callable[[Tensor, Tensor], Tensor]


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: Kernel = "softmax",
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    normalize: bool = True,
    chunk: int = 512,
) -> Tensor:
    """Attention with every kernel value formed, `chunk` query rows at a time: O(L^2) time, O(chunk L) memory.

    `kernel`: `"softmax"`, `"gaussian"`, a function of scaled (x, y), or a feature map, for the kernel it *estimates*.
    `window` and `sinks` restrict nothing here: the exact kernel is the same everywhere. They are accepted so that a
    call of `linear_attention` can be compared without change.

    >>> q = torch.randn(1, 2, 5, 4)
    >>> torch.allclose(exact_attention(q, q, q), torch.nn.functional.scaled_dot_product_attention(q, q, q), atol=1e-6)
    True
    """
    check_qkv(q, k, v, "exact_attention")
    check_mask(key_padding_mask, k, "exact_attention")
    root = math.sqrt(check_scale(scale, q, "exact_attention"))
    x, y, u = _scaled(q, k, v, root)
    rows = []
    for start in range(0, q.shape[-2], chunk):
        part = x[..., start : start + chunk, :]
        hidden = _hidden(part.shape[-2], k.shape[-2], start, is_causal, key_padding_mask, x.device)
        if kernel in KERNELS:
            weights = _log_kernel(part, y, kernel).masked_fill(hidden, -torch.inf)
            if normalize:
                peak = weights.amax(-1, keepdim=True)
                weights = weights - torch.where(peak > -torch.inf, peak, 0)
            weights = weights.exp()
        else:
            weights = _kernel_function(kernel)(part, y).masked_fill(hidden, 0)
        rows.append((_normalized(weights) if normalize else weights) @ u)
    return torch.cat(rows, dim=-2).to(q.dtype)


def attention_matrix(
    q: Tensor,
    k: Tensor,
    phi: FeatureMap | str,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    normalize: bool = True,
) -> Tensor:
    """What a map attends to: the (b, h, n, s) weights that `linear_attention` applies without forming them.

    >>> q = torch.zeros(1, 1, 2, 4)
    >>> attention_matrix(q, q, "positive")
    tensor([[[[0.5000, 0.5000],
              [0.5000, 0.5000]]]])
    """
    phi = feature_map(phi, dim=q.shape[-1])
    check_qkv(q, k, k, "attention_matrix")
    check_mask(key_padding_mask, k, "attention_matrix")
    root = math.sqrt(check_scale(scale, q, "attention_matrix"))
    n, s, g = q.shape[-2], k.shape[-2], k.shape[1]
    # In float64: the terms of a weight can span more than float32 holds.
    fq = phi(q.double().reshape(q.shape[0], g, -1, q.shape[-1]) * root, "query")
    fk = phi(k.double() * root, "key")
    # One shift per query row (over its keys, causal or not, a row's weights are relative) keeps exponents finite.
    exponent = fk.log_scale.mT.unflatten(-2, (1, 1)) + fq.log_scale.unflatten(-2, (q.shape[1] // g, n))
    products = (fq.values @ fk.values.mT).unflatten(-2, (q.shape[1] // g, n))
    hidden = _hidden(n, s, 0, is_causal, key_padding_mask, q.device)[:, :, None]
    x, y, _ = _scaled(q.double(), k.double(), k.double(), root)
    exact = _log_kernel(x, y, "gaussian" if phi.kernel == "gaussian" else "softmax").view_as(products)
    near = _near(n, s, window, sinks, key_padding_mask, q.device)[:, :, None]
    exponent = torch.where(near, exact, exponent).masked_fill(hidden, -torch.inf)
    peak = exponent.amax(-1, keepdim=True)
    if not normalize:
        peak = torch.zeros_like(peak)
    weights = torch.where(near, 1.0, products) * (exponent - torch.where(peak > -torch.inf, peak, 0)).exp()
    weights = weights.reshape(q.shape[0], q.shape[1], n, s)
    return (_normalized(weights) if normalize else weights).to(q.dtype)


def _scaled(q: Tensor, k: Tensor, v: Tensor, root: float) -> tuple[Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(q.dtype)
    groups = q.shape[1] // k.shape[1]
    k, v = (t.to(dtype).repeat_interleave(groups, dim=1) for t in (k, v))
    return q.to(dtype) * root, k * root, v


def _log_kernel(x: Tensor, y: Tensor, kernel: str) -> Tensor:
    logits = x @ y.mT
    if kernel == "gaussian":
        logits = logits - 0.5 * (x.square().sum(-1, keepdim=True) + y.square().sum(-1, keepdim=True).mT)
    return logits


def _kernel_function(kernel: Kernel) -> Callable[[Tensor, Tensor], Tensor]:
    if isinstance(kernel, FeatureMap):
        return kernel.kernel_matrix
    if callable(kernel):
        return kernel
    raise BochnerError(
        f"The 'kernel' of exact_attention must be one of {KERNELS}, a function or a map, got {kernel!r}."
    )


def _hidden(n: int, s: int, start: int, is_causal: bool, mask: Tensor | None, device: torch.device) -> Tensor:
    """(b or 1, 1, n, s), True where a query may not look."""
    hidden = torch.zeros(1, 1, n, s, dtype=torch.bool, device=device)
    if is_causal:
        i = torch.arange(start, start + n, device=device)[:, None]
        hidden = hidden | (torch.arange(s, device=device)[None, :] > i)
    return hidden if mask is None else hidden | mask[:, None, None, :]


def _near(n: int, s: int, window: int | None, sinks: int, mask: Tensor | None, device: torch.device) -> Tensor:
    """(b or 1, 1, n, s), True where attention is exact."""
    i, j = torch.arange(n, device=device)[:, None], torch.arange(s, device=device)[None, :]
    near = ((i - j).abs() < (window or 0))[None, None]
    if sinks:
        valid = torch.ones(1, s, dtype=torch.bool, device=device) if mask is None else ~mask
        near = near | (valid & (valid.cumsum(1) <= sinks))[:, None, None, :]
    return near


def _normalized(weights: Tensor) -> Tensor:
    total = weights.sum(-1, keepdim=True)
    return torch.where(total != 0, weights / torch.where(total != 0, total, 1), 0)
