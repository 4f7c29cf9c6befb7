"""The quadratic oracles: exact attention for every kernel, and the attention matrix of a map."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bochner._checks import BochnerError, accumulation_dtype, positive_int
from bochner.attention.api import linear_attention
from bochner.attention.checks import Options, check_decay, check_finite, check_map, check_mask, check_qkv, refuse_values
from bochner.attention.layout import leading
from bochner.attention.state import SMALL, unmasked
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
    check_finite(owner, q=q, k=k, v=v)
    x, y, u = _scaled(q, k, v, root)
    n, s, rows = q.shape[-2], k.shape[-2], []
    for start in range(0, n, chunk):
        part = x[..., start : start + chunk, :]
        i = torch.arange(start, start + part.shape[-2], device=x.device) + (s - n if is_causal else 0)
        hidden = _hidden(i, s, is_causal, key_padding_mask)
        if window or sinks:
            hidden = hidden | ~_near(i, s, window, sinks, window_kind, key_padding_mask)
        lost = 0.0 if faded is None else _log_decay(faded, i).to(x.dtype)
        if kernel in KERNELS:
            weights = (_log_kernel(part, y, kernel) + lost).masked_fill(hidden, -torch.inf)
            if normalize:
                peak = weights.amax(-1, keepdim=True)
                weights = weights - torch.where(peak > -torch.inf, peak, 0)
            weights = weights.exp()
        else:
            weights = _kernel_function(kernel)(part, y).masked_fill(hidden, 0)
            weights = weights if faded is None else weights * torch.as_tensor(lost).exp()
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
    phi = feature_map(phi, dim=q.shape[-1])
    check_map(phi, q, k)
    check_mask(key_padding_mask, k, owner)
    asked = Options(is_causal, scale, window, sinks, window_kind, normalize).checked(q, k, owner)
    is_causal, scale, window, sinks, *_ = asked
    root = math.sqrt(scale)
    (k,) = unmasked(key_padding_mask, k)
    check_finite(owner, q=q, k=k)
    faded = _faded(decay, k, owner, is_causal, key_padding_mask, q.shape[1])
    n, s = q.shape[-2], k.shape[-2]
    if phi.num_columns(1) != 2:  # no weight of one pair alone: what it does to values that are 1 for one key
        ones = torch.eye(s, dtype=q.dtype, device=q.device).expand(*k.shape[:2], s, s)
        how: Any = asked._asdict()
        return linear_attention(q, k, ones, phi, key_padding_mask=key_padding_mask, decay=decay, **how)
    # In float64, and as logarithms with their signs: the terms of a weight can span more than a dtype holds.
    x, y, _ = _scaled(q.double(), k.double(), k.double(), root)
    grouped = (q.double() * root).reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    i = torch.arange(s - n, s, device=q.device) if is_causal else torch.arange(n, device=q.device)
    near, hidden = _near(i, s, window, sinks, window_kind, key_padding_mask), _hidden(i, s, is_causal, key_padding_mask)
    lost = torch.zeros_like(x[..., :1]) if faded is None else _log_decay(faded, i)
    far = (~(near | hidden)).to(x.dtype) * lost.exp()  # (b, h, n, s)
    far = far.reshape(*grouped.shape[:-1], s)
    sign, log_weights = (t.view(*q.shape[:-1], s) for t in _signed_logs(phi, grouped, k.double() * root, far))
    exact = _log_kernel(x, y, "gaussian" if phi.kernel == "gaussian" else "softmax")
    log_weights = torch.where(near, exact, log_weights) + lost
    log_weights = log_weights.masked_fill(hidden, -torch.inf)
    peak = log_weights.amax(-1, keepdim=True) if normalize else torch.zeros_like(log_weights[..., :1])
    weights = torch.where(near, 1.0, sign) * (log_weights - torch.where(peak > -torch.inf, peak, 0)).exp()
    if not normalize:
        return weights.to(q.dtype)
    seen = (~hidden).to(weights.dtype).expand_as(weights)
    weights = torch.where(_is_small(phi, grouped, k.double() * root, weights, near, far, peak), seen, weights)
    return _normalized(weights).to(q.dtype)


def _is_small(
    phi: FeatureMap, x: Tensor, y: Tensor, weights: Tensor, near: Tensor, far: Tensor, peak: Tensor
) -> Tensor:
    """Which rows (b, h, n, 1) of a signed map have a normaliser that is not divided by; weights relative to peak."""
    if phi.has_positive_sums:
        return torch.zeros_like(weights[..., :1], dtype=torch.bool)
    fq, fk = phi(x, "query"), phi(y, "key")
    top = fk.log_scale.amax((-2, -1), keepdim=True)
    norm = far @ (fk.values * (fk.log_scale - top).exp())
    bound = (norm.norm(dim=-1, keepdim=True) * fq.values.norm(dim=-1, keepdim=True)).log() + top + fq.log_scale
    exact = (weights * near).sum(-1, keepdim=True)
    total = weights.sum(-1, keepdim=True)
    return total < SMALL * ((bound.view_as(total) - torch.where(peak > -torch.inf, peak, 0)).exp() + exact)


def _signed_logs(phi: FeatureMap, x: Tensor, y: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
    """Sign and logarithm of the estimated kernel, (b, g, N, s), of which pairs are used by their weights `far`."""
    query, key = phi.exponent("query"), phi.exponent("key")
    if query is None or key is None:
        fq, fk = phi(x, "query"), phi(y, "key")
        products = fq.values @ fk.values.mT
        if phi.top_up is not None:  # what the share of these keys lacks is given to all of them alike
            count = far.sum(-1, keepdim=True)
            share = (products * far).sum(-1, keepdim=True) / torch.where(count > 0, count, 1)
            products = products + (phi.top_up.to(x.dtype).reshape(-1, 1, 1) - share).clamp_min(0)
        return products.sign(), products.abs().log() + fq.log_scale + fk.log_scale.mT
    (z, a), (w, b) = query.at(x), key.at(y)
    left, right = query.logits(z) + a, key.logits(w) + b
    logs = [(left[..., i, None, :] + right).logsumexp(-1) for i in range(x.shape[-2])]
    return torch.ones((), dtype=x.dtype, device=x.device).expand(*x.shape[:-1], y.shape[-2]), torch.stack(logs, dim=-2)


def _faded(decay: Any, k: Tensor, owner: str, is_causal: bool, mask: Tensor | None, heads: int) -> Tensor | None:
    """The running sums of log decays, (b, h, s); None without."""
    found = check_decay(decay, k, owner, is_causal=is_causal)
    if found is None:
        return None
    found = found.expand(k.shape[:3]) if mask is None else found.expand(k.shape[:3]).masked_fill(mask[:, None], 0)
    refuse_values(owner, k, k, k, found)
    return found.cumsum(-1).repeat_interleave(heads // k.shape[1], dim=1)


def _log_decay(faded: Tensor, i: Tensor) -> Tensor:
    """The log decay from each key to the queries at places i (n,), (b, h, n, s); 0 for later keys."""
    return (faded[..., i, None] - faded.unsqueeze(-2)).clamp_max(0)


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


def _hidden(i: Tensor, s: int, is_causal: bool, mask: Tensor | None) -> Tensor:
    """(b or 1, 1, n, s), True where the queries at places i (n,) may not look."""
    hidden = torch.zeros(1, 1, i.shape[0], s, dtype=torch.bool, device=i.device)
    if is_causal:
        hidden = hidden | (torch.arange(s, device=i.device)[None, :] > i[:, None])
    return hidden if mask is None else hidden | mask[:, None, None, :]


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


def _normalized(weights: Tensor) -> Tensor:
    total = weights.sum(-1, keepdim=True)
    return torch.where(total != 0, weights / torch.where(total != 0, total, 1), 0)
