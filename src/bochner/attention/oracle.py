"""The quadratic oracles: exact attention for every kernel, and the attention matrix of a map."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bochner._checks import BochnerError, accumulation_dtype, positive_int
from bochner.attention.api import linear_attention
from bochner.attention.checks import Options, check_decay, check_finite, check_mask, check_qkv, refuse_values
from bochner.attention.layout import leading
from bochner.attention.softmax import exact_logits
from bochner.attention.state import unmasked
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
    window_kind: str = "block",
    decay: Tensor | float | Sequence[float] | None = None,
    normalize: bool = True,
    chunk: int = 512,
) -> Tensor:
    """Attention with every kernel value formed, `chunk` query rows at a time: O(L^2) time, O(chunk L) memory.

    `kernel`: `"softmax"`, `"gaussian"`, a function of scaled (x, y), or a feature map, for the kernel it *estimates*.
    With `window` or `sinks` a row sees only its window and the sinks: what `linear_attention` would be without its
    kernel term.

    >>> q = torch.randn(1, 2, 5, 4)
    >>> torch.allclose(exact_attention(q, q, q), torch.nn.functional.scaled_dot_product_attention(q, q, q), atol=1e-6)
    True
    """
    owner = "exact_attention"
    check_qkv(q, k, v, owner)
    check_mask(key_padding_mask, k, owner)
    chunk, asked = positive_int(chunk, "chunk", owner), Options(is_causal, scale, window, sinks, window_kind, normalize)
    is_causal, scale, window, sinks, *_ = asked.checked(q, k, owner)
    root = math.sqrt(scale)
    k, v = unmasked(key_padding_mask, k, v)
    faded = _faded(decay, k, owner, is_causal, key_padding_mask, q.shape[1])
    check_finite(owner, q, k, v)
    dtype, groups = accumulation_dtype(q.dtype), q.shape[1] // k.shape[1]
    y, u = (t.to(dtype).repeat_interleave(groups, dim=1) for t in (k, v))
    x, y = q.to(dtype) * root, y * root  # cast first: a product in half precision would be rounded
    n, s, rows = q.shape[-2], k.shape[-2], []
    for start in range(0, n, chunk):
        part = x[..., start : start + chunk, :]
        i = torch.arange(start, start + part.shape[-2], device=x.device) + (s - n if is_causal else 0)
        hidden = (torch.arange(s, device=x.device) > i[:, None]) & is_causal  # (.., n, s)
        if key_padding_mask is not None:
            hidden = hidden | key_padding_mask[:, None, None, :]
        if window or sinks:
            hidden = hidden | ~_near(i, s, window, sinks, window_kind, key_padding_mask)
        # The log decay from each key to the queries, (b, h, n, s); 0 for later keys.
        lost = 0.0 if faded is None else (faded[..., i, None] - faded.unsqueeze(-2)).clamp_max(0).to(x.dtype)
        if kernel in KERNELS:
            weights = (exact_logits(part, y, 1.0, kernel) + lost).masked_fill(hidden, -torch.inf)
            if normalize:
                peak = weights.amax(-1, keepdim=True)
                weights = weights - torch.where(peak > -torch.inf, peak, 0)
            weights = weights.exp()
        else:
            weights = _kernel_function(kernel)(part, y).masked_fill(hidden, 0)
            weights = weights if faded is None else weights * torch.as_tensor(lost).exp()
        if normalize:
            total = weights.sum(-1, keepdim=True)
            weights = torch.where(total != 0, weights / torch.where(total != 0, total, 1), 0)
        rows.append(weights @ u)
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
    window_kind: str = "block",
    decay: Tensor | float | Sequence[float] | None = None,
    normalize: bool = True,
) -> Tensor:
    """What a map attends to: the (b, h, n, s) weights that `linear_attention` applies without forming them.

    Rows of a signed map whose normaliser is below a tenth of its bound attend to all keys alike, as they do there.

    >>> q = torch.randn(1, 1, 3, 4)
    >>> attention_matrix(q, q, "positive").sum(-1)
    tensor([[[1., 1., 1.]]])
    """
    owner = "attention_matrix"
    check_qkv(q, k, k, owner)
    asked = Options(is_causal, scale, window, sinks, window_kind, normalize, diagnostics=False).checked(q, k, owner)
    # What attention does to values that are 1 for one key. In float64: terms can span more than other dtypes hold.
    ones = torch.eye(k.shape[-2], dtype=torch.float64, device=q.device).expand(*k.shape[:-1], -1)
    how: Any = asked._asdict() | {"key_padding_mask": key_padding_mask, "decay": decay}
    check_mask(key_padding_mask, k, owner)
    check_finite(owner, q, *unmasked(key_padding_mask, k, k))
    return linear_attention(q.double(), k.double(), ones, phi, **how).to(q.dtype)


def _faded(decay: Any, k: Tensor, owner: str, is_causal: bool, mask: Tensor | None, heads: int) -> Tensor | None:
    """The running sums of log decays, (b, h, s); None without."""
    found = check_decay(decay, k, owner, is_causal=is_causal)
    if found is None:
        return None
    found = found.expand(k.shape[:3]) if mask is None else found.expand(k.shape[:3]).masked_fill(mask[:, None], 0)
    refuse_values(owner, k, k, k, found)
    return found.cumsum(-1).repeat_interleave(heads // k.shape[1], dim=1)


def _kernel_function(kernel: Kernel) -> Callable[[Tensor, Tensor], Tensor]:
    if isinstance(kernel, FeatureMap):
        return kernel.kernel_matrix
    if callable(kernel):
        return kernel
    raise BochnerError(
        f"The 'kernel' of exact_attention must be one of {KERNELS}, a function or a map, got {kernel!r}."
    )


def _near(i: Tensor, s: int, window: int | None, sinks: int, kind: str, mask: Tensor | None) -> Tensor:
    """(b or 1, 1, n, s), True where attention is exact."""
    i, j = i[:, None], torch.arange(s, device=i.device)[None, :]
    near = torch.zeros(1, 1, i.shape[0], s, dtype=torch.bool, device=i.device)
    if window and kind == "block":  # counted from the first unpadded key
        lead = 0 if mask is None else leading(mask)[:, None, None, None]
        near = near | (((i - lead) // window - (j - lead) // window).abs() <= 1)
    elif window:
        near = near | ((i - j).abs() < window)
    if sinks:
        valid = torch.ones(1, s, dtype=torch.bool, device=i.device) if mask is None else ~mask
        near = near | (valid & (valid.cumsum(1) <= sinks))[:, None, None, :]
    return near
