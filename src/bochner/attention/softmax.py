"""Softmax attention that also says its normaliser: the one primitive of positive exponential features.

`softmax(q, k, v, bias)` returns `softmax(q k' + bias) v` and the logarithm of every row's normaliser, with gradients of
both, in memory O(L d), by torch's fused kernel of the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bochner._products import in_place
from bochner.attention.autograd import refuse_second
from bochner.maps.base import squared_norm

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
BLOCK = 2048  # rows or keys at a time in a backward pass: 1.2 times as fast at 16,384 tokens
pad = torch.nn.functional.pad


def softmax(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, plain: bool = False) -> tuple[Tensor, Tensor]:
    """`softmax(q k' + bias) v` (b, h, n, v) and `logsumexp(q k' + bias)` (b, h, n, 1); bias (b, h, 1, s), no scale.

    `plain`: by plain operations, in O(n s) memory.
    """
    out, log_norm = _softmax(q @ k.mT, v, bias) if plain else _Attend.apply(q, k, v, bias)
    return out, log_norm


def _softmax(logits: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    logits = logits if bias is None else logits + bias
    log_norm = logits.logsumexp(-1, keepdim=True)
    return (logits - log_norm).exp() @ v, log_norm


def _fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The same by torch's kernel, which wants one size for all rows, and the numbers of each side by side."""
    width = max(q.shape[-1], v.shape[-1])
    x, y, u = (pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t for t in (q, k, v))
    x, y, u = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, y, u))
    mask = None if bias is None else bias.expand(*q.shape[:-1], k.shape[-2])
    out, log_norm = FORWARD(x, y, u, 0.0, False, attn_mask=mask, scale=scale)
    return out[..., : v.shape[-1]], log_norm.unsqueeze(-1)


def exact_logits(x: Tensor, y: Tensor, scale: float, kernel: str) -> Tensor:
    """The logarithm of the exact kernel of rows x (..., n, d) and keys y (..., s, d)."""
    logits = (x * scale) @ y.mT if x.shape[-2] < y.shape[-2] else x @ (y * scale).mT
    if kernel == "gaussian":
        logits = logits - 0.5 * scale * (squared_norm(x) + squared_norm(y).mT)
    return logits


def attend_zones(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, kernel: str
) -> tuple[Tensor, Tensor]:
    """Rows of q (b, g, t, n, d) over k, v (b, g, t or 1, z, .), exact, and the logarithm of their normalisers.

    `mask` (b, g, t, n, z) or less is added to the logits. A row that sees nothing has at most EMPTY. All may be without
    t: one zone.
    """
    if k.dim() == 4 and kernel != "gaussian" and in_place(q):
        return _fused(q, k, v, mask, scale)
    if kernel == "gaussian" or k.shape[2] < q.shape[2] or not in_place(q):  # a few keys for all rows: nothing to fuse
        return _softmax(exact_logits(q, k, scale, kernel), v, mask)
    mask = None if mask is None else mask.expand(*q.shape[:4], k.shape[3]).flatten(0, 1)
    out, log_norm = _fused(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask, scale)
    return out.unflatten(0, q.shape[:2]), log_norm.unflatten(0, q.shape[:2])


class _Attend(torch.autograd.Function):
    """With gradients. In the backward pass the bias is one more coordinate of the keys, so that the fused kernel yields
    its gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        out, log_norm = _fused(q, k, v, bias.contiguous(), 1.0)
        ctx.save_for_backward(q, k, v, bias, out, log_norm)
        return out, log_norm

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second()
        q, k, v, bias, out, log_norm = ctx.saved_tensors
        (n, d), s, size = q.shape[-2:], k.shape[-2], v.shape[-1]
        width, one = max(d, size) + 1, q.new_ones(())
        dq, dk, dv, dbias = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v, bias.mT))
        for i in range(0, n, BLOCK):
            # The kernel's gradient of a logit is p (g.v - g.out). With v = 0, out = 1 and g = -d in the last column
            # this becomes p (g.v - g.out + d), which is what a gradient d of the normaliser adds.
            x, g, o, log_norms, e = (t[..., i : i + BLOCK, :] for t in (q, grads[0], out, log_norm, grads[1]))
            x, g, o = _beside(x, one, width), _beside(g, -e, width), _beside(o, one, width)
            for j in range(0, s, BLOCK):
                y, u, row = (t[..., j : j + BLOCK, :] for t in (k, v, bias.mT))
                y, u = _beside(y, row, width), _beside(u, 0 * one, width)
                dx, dy, du = BACKWARD(g, x, y, u, o, log_norms.squeeze(-1).contiguous(), 0.0, False, scale=1.0)
                dq[..., i : i + BLOCK, :] += dx[..., :d]
                for total, more in ((dk, dy[..., :d]), (dv, du[..., :size]), (dbias, dy[..., -1:])):
                    total[..., j : j + BLOCK, :] += more
        return dq, dk, dv, dbias.mT


def _beside(t: Tensor, column: Tensor, width: int) -> Tensor:
    """Rows of t (..., n, d) with zeros up to the width and a last column (..., n, 1), in one pass."""
    gap = t.new_zeros(()).expand(*t.shape[:-1], width - 1 - t.shape[-1])
    return torch.cat([t, gap, column.expand(*t.shape[:-1], 1)], dim=-1)
