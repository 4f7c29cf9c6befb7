"""Softmax attention that also says its normaliser: the one primitive of positive exponential features.

`attend(q, k, v)` returns `softmax(q k') v` and the logarithm of every row's normaliser, with gradients of both, in
memory O(L d). On the CPU it is torch's fused kernel; elsewhere, and where a second derivative or a transformation is
asked for, plain operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bochner.attention.numerics import is_composed
from bochner.attention.recompute import differentiate

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`softmax(q k') v` (b, h, n, v) and `logsumexp(q k')` (b, h, n, 1); no scale, no mask.

    The last column of v must be zero: the fused backward pass carries the gradient of the normaliser there.
    """
    if q.device.type != "cpu" or is_composed():
        return composed(q, k, v)
    return _Attend.apply(q, k, v)


def composed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same by plain operations, in O(n s) memory."""
    logits = q @ k.mT
    log_norm = logits.logsumexp(-1, keepdim=True)
    return (logits - log_norm).exp() @ v, log_norm


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        x, y, u = _widened(q, k, v)
        out, log_norm = FORWARD(x, y, u, 0.0, False, scale=1.0)
        ctx.save_for_backward(q, k, v, out, log_norm)
        return out[..., : v.shape[-1]], log_norm.unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_norm = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative will be wanted
            return tuple(differentiate(composed(q, k, v), (q, k, v), grads))
        x, y, u = _widened(q, k, v)
        width = u.shape[-1]
        # The kernel's gradient of a logit is p (g.v - g.out). With v = 0, out = 1 and g = -d in the last column this
        # becomes p (g.v - g.out + d), which is what a gradient d of the normaliser adds.
        g = torch.nn.functional.pad(grads[0], (0, width - grads[0].shape[-1]))
        g[..., -1:] = -grads[1]
        out = out.clone()
        out[..., -1] = 1
        dq, dk, dv = BACKWARD(g, x, y, u, out, log_norm, 0.0, False, scale=1.0)
        dv = dv[..., : v.shape[-1]].clone()
        dv[..., -1] = 0 if v.shape[-1] == width else dv[..., -1]
        return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv


def _widened(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros appended to the shorter rows: the kernel wants one size for all."""
    width = max(q.shape[-1], v.shape[-1])
    x, y, u = (torch.nn.functional.pad(t, (0, width - t.shape[-1])) for t in (q, k, v))
    return x, y, u
