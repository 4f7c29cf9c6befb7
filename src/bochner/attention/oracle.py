"""The quadratic oracles: exact attention for every kernel, and the attention matrix of a map."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bochner._checks import BochnerError, accumulation_dtype, positive_int
from bochner.attention.api import linear_attention
from bochner.attention.checks import Options, check_decay, check_qkv, refuse_values
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
    check_qkv(q, k, v, owner, key_padding_mask)
    chunk, asked = positive_int(chunk, "chunk", owner), Options(is_causal, scale, window, sinks, window_kind)
    asked = asked.checked(q, k, owner)
    if not (kernel in KERNELS or callable(kernel)):
        raise BochnerError(f"The 'kernel' of {owner} must be one of {KERNELS}, a function or a map, got {kernel!r}.")
    function = kernel.kernel_matrix if isinstance(kernel, FeatureMap) else kernel
    n, (b, _, s, _), groups, dtype = q.shape[2], k.shape, q.shape[1] // k.shape[1], accumulation_dtype(q.dtype)
    padded = torch.zeros(b, s, dtype=torch.bool, device=q.device) if key_padding_mask is None else key_padding_mask
    k, v = unmasked(padded, k, v)
    faded = check_decay(decay, k, owner, is_causal=asked.is_causal)
    faded = None if faded is None else faded.expand(k.shape[:3]).masked_fill(padded[:, None], 0)
    refuse_values(owner, q, k, v, faded)
    y, u = (t.to(dtype).repeat_interleave(groups, dim=1) for t in (k, v))
    root = math.sqrt(asked.scale)
    x, y = q.to(dtype) * root, y * root  # cast first: a product in half precision would be rounded
    lost, rows = torch.zeros((), dtype=dtype, device=q.device), []
    for row in torch.arange(n, device=q.device).split(chunk):
        part, place = x[..., row, :], row + (s - n if asked.is_causal else 0)
        hidden = ~_seen(place, padded, asked)
        if faded is not None:  # the log decay from each key to the queries, (b, h, n, s); 0 for later keys
            total = faded.cumsum(-1).repeat_interleave(groups, dim=1)
            lost = (total[..., place, None] - total.unsqueeze(-2)).clamp_max(0).to(dtype)
        if callable(function):
            weights = function(part, y).masked_fill(hidden, 0) * lost.exp()
        else:
            logits = (exact_logits(part, y, 1.0, function) + lost).masked_fill(hidden, -torch.inf)
            peak = logits.amax(-1, keepdim=True).clamp_min(torch.finfo(dtype).min)
            weights = (logits - peak).exp()
        total = weights.sum(-1, keepdim=True)
        rows.append(torch.where(total != 0, weights / torch.where(total != 0, total, 1), 0) @ u)
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
) -> Tensor:
    """What a map attends to: the (b, h, n, s) weights that `linear_attention` applies without forming them.

    Rows of a signed map whose normaliser is below a tenth of its bound attend to all keys alike, as they do there.

    >>> q = torch.randn(1, 1, 3, 4)
    >>> attention_matrix(q, q, "positive").sum(-1)
    tensor([[[1., 1., 1.]]])
    """
    owner = "attention_matrix"
    check_qkv(q, k, k, owner, key_padding_mask)
    asked = Options(is_causal, scale, window, sinks, window_kind, recompute=False, diagnostics=False).checked(
        q, k, owner
    )
    # What attention does to values that are 1 for one key. In float64: terms can span more than other dtypes hold.
    ones = torch.eye(k.shape[-2], dtype=torch.float64, device=q.device).expand(*k.shape[:-1], -1)
    how: Any = asked._asdict() | {"key_padding_mask": key_padding_mask, "decay": decay}
    refuse_values(owner, q, *unmasked(key_padding_mask, k, k))
    return linear_attention(q.double(), k.double(), ones, phi, **how).to(q.dtype)


def _seen(i: Tensor, padded: Tensor, asked: Options) -> Tensor:
    """Which keys the rows at the places i (n,) see, (b, 1, n, s)."""
    i, j, w = i[:, None], torch.arange(padded.shape[1], device=i.device), asked.window
    seen, near = ~padded[:, None], torch.zeros_like(padded[:, None])  # (b, 1, s)
    if asked.is_causal:
        seen = seen & (j <= i)
    if asked.sinks:
        near = (~padded & ((~padded).cumsum(1) <= asked.sinks))[:, None]
    if w and asked.window_kind == "block":  # counted from the first unpadded key
        lead = leading(padded)[:, None, None]
        near = near | (((i - lead) // w - (j - lead) // w).abs() <= 1)
    elif w:
        near = near | ((i - j).abs() < w)
    return (seen & near if w or asked.sinks else seen).unsqueeze(1)
