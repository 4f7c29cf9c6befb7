"""Softmax attention that also says its normaliser: the one primitive of positive exponential features.

`attend(q, k, v, bias)` returns `softmax(q k' + bias) v` and the logarithm of every row's normaliser, with gradients of
both, in memory O(L d). On the CPU it is torch's fused kernel; elsewhere, and where a second derivative or a
transformation is asked for, plain operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bochner._products import in_place, is_composed
from bochner.attention.autograd import differentiate
from bochner.maps.base import squared_norm

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
BLOCK = 2048  # rows or keys at a time
pad = torch.nn.functional.pad


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """`softmax(q k' + bias) v` (b, h, n, v) and `logsumexp(q k' + bias)` (b, h, n, 1); bias (b, h, 1, s), no scale."""
    if q.device.type != "cpu" or is_composed():
        return composed(q, k, v, bias)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, bias)):
        return _Attend.apply(q, k, v, bias)
    return _blocked(q, k, v, bias)


def composed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The same by plain operations, in O(n s) memory."""
    logits = q @ k.mT + bias
    log_norm = logits.logsumexp(-1, keepdim=True)
    return (logits - log_norm).exp() @ v, log_norm


def _blocked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Without gradients: many keys in blocks that stay in cache, joined by their normalisers."""
    d = v.shape[-1]
    parts = []
    for i in range(0, k.shape[-2], BLOCK):
        span = slice(i, i + BLOCK)
        x, y, u = _widened(q, k[..., span, :], v[..., span, :])
        mask = bias[..., span].contiguous().expand(*q.shape[:-1], y.shape[-2])
        out, log_norm = FORWARD(x, y, u, 0.0, False, attn_mask=mask, scale=1.0)
        parts.append((out[..., :d], log_norm.unsqueeze(-1)))
    if len(parts) == 1:
        return parts[0]
    log_norms = torch.cat([log_norm for _, log_norm in parts], dim=-1)
    total = log_norms.logsumexp(-1, keepdim=True)
    shares = (log_norms - total).exp()
    out = sum(part * shares[..., i : i + 1] for i, (part, _) in enumerate(parts))
    assert isinstance(out, Tensor)
    return out, total


def exact_logits(x: Tensor, y: Tensor, scale: float, kernel: str) -> Tensor:
    """The logarithm of the exact kernel of rows x (..., n, d) and keys y (..., s, d)."""
    logits = (x * scale) @ y.mT if x.shape[-2] < y.shape[-2] else x @ (y * scale).mT
    if kernel == "gaussian":
        logits = logits - 0.5 * scale * (squared_norm(x) + squared_norm(y).mT)
    return logits


def attend_zones(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, kernel: str
) -> tuple[Tensor, Tensor]:
    """Attention by the exact kernel to many small pieces: rows q (b, g, t, n, d) over k, v (b, g, t, z, .).

    k and v may be overlapping views. `mask` (b, g, t, n, z) or less is added to the logits. Returns the rows and the
    logarithm of their normalisers (b, g, t, n, 1); that of a row that sees nothing is at most EMPTY.
    """
    if kernel == "gaussian" or not in_place(q):
        logits = exact_logits(q, k, scale, kernel)
        logits = logits if mask is None else logits + mask
        log_norm = logits.logsumexp(-1, keepdim=True)
        return (logits - log_norm).exp() @ v, log_norm
    d = v.shape[-1]
    x, y, u = _widened(*(t.flatten(0, 1) for t in (q, k, v)))
    mask = None if mask is None else mask.expand(*q.shape[:4], y.shape[2]).flatten(0, 1)
    out, log_norm = FORWARD(x, y, u, 0.0, False, attn_mask=mask, scale=scale)
    return out[..., :d].unflatten(0, q.shape[:2]), log_norm.unflatten(0, q.shape[:2]).unsqueeze(-1)


class _Attend(torch.autograd.Function):
    """With gradients. In the backward pass the bias is one more coordinate of the keys, so that the fused kernel yields
    its gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        out, log_norm = _blocked(q, k, v, bias)
        ctx.save_for_backward(q, k, v, bias, out, log_norm)
        return out, log_norm

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out, log_norm = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative will be wanted
            return tuple(differentiate(composed, (q, k, v, bias), grads))
        (n, d), s, size = q.shape[-2:], k.shape[-2], v.shape[-1]
        width = max(d, size) + 1
        dq, dk, dv, dbias = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v, bias))
        for i in range(0, n, BLOCK):
            rows = slice(i, i + BLOCK)
            # The kernel's gradient of a logit is p (g.v - g.out). With v = 0, out = 1 and g = -d in the last column
            # this becomes p (g.v - g.out + d), which is what a gradient d of the normaliser adds.
            x, g, o = q[..., rows, :], grads[0][..., rows, :], out[..., rows, :]
            x, g, o = (
                _beside(x, _ones(x), width),
                _beside(g, -grads[1][..., rows, :], width),
                _beside(o, _ones(o), width),
            )
            log_norms = log_norm[..., rows, 0].contiguous()
            for j in range(0, s, BLOCK):
                keys = slice(j, j + BLOCK)
                y, u = k[..., keys, :], v[..., keys, :]
                y, u = _beside(y, bias[..., keys].mT, width), _beside(u, u.new_zeros(()), width)
                dx, dy, du = BACKWARD(g, x, y, u, o, log_norms, 0.0, False, scale=1.0)
                _add(dq[..., rows, :], dx[..., :d], j == 0)
                _add(dk[..., keys, :], dy[..., :d], i == 0)
                _add(dv[..., keys, :], du[..., :size], i == 0)
                _add(dbias[..., keys], dy[..., -1:].mT, i == 0)
        return dq, dk, dv, dbias


def _add(total: Tensor, more: Tensor, first: bool) -> None:
    """Add to a sum; the first term is written."""
    if first:
        total.copy_(more)
    else:
        total.add_(more)


def _ones(t: Tensor) -> Tensor:
    return t.new_ones(()).expand(*t.shape[:-1], 1)


def _beside(t: Tensor, column: Tensor, width: int) -> Tensor:
    """Rows of t (..., n, d) with zeros up to the width and a last column (..., n, 1), in one pass."""
    gap = t.new_zeros(()).expand(*t.shape[:-1], width - 1 - t.shape[-1])
    return torch.cat([t, gap, column.expand(*t.shape[:-1], 1)], dim=-1)


def _widened(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros appended to the shorter rows: the kernel wants one size for all, and numbers of a row side by side."""
    width = max(q.shape[-1], v.shape[-1])
    x, y, u = (pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t for t in (q, k, v))
    x, y, u = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, y, u))
    return x, y, u
