"""Attention as a Gaussian kernel: softmax attention by kernel products, and a ratio that says if K is sparse.

Queries and keys become the kernel matrix K of lemma 4.1 (corrected). Its head is the n largest entries, its tail the
rest. Assumption A of the kernel product paper is that sum(tail) / sum(head) is bounded, whatever n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import BochnerError
from ..matvec import KernelOperator


def reduce_attention(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with one more column, so that `exp(q.k scale)` is a Gaussian kernel up to row factors.

    k' = (k, sqrt(max|k|^2 - |k|^2)), q' = (q, 0): then |q' - k'|^2 = |q|^2 + max|k|^2 - 2 q.k, and

        exp(q.k scale) = exp(|q|^2 scale/2) exp(max|k|^2 scale/2) exp(-|q' - k'|^2 scale/2)

    (lemma 4.1; the paper's exponents lack the factor scale/2). The bandwidth is scale^(-1/2), d^(1/4) by default.
    Input (..., n, d), output (..., n, d+1); the maximum is over the last n keys.

    Example:
        >>> import torch
        >>> q, k = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> a, b = reduce_attention(q, k)
        >>> K = torch.exp(-torch.cdist(a, b).square() / 4)
        >>> A = torch.exp(q @ k.T / 2)
        >>> torch.allclose(K / K.sum(1, keepdim=True), A / A.sum(1, keepdim=True))
        True
    """
    if q.ndim < 2 or k.ndim < 2 or q.shape[-1] != k.shape[-1]:
        raise BochnerError(
            f"The 'q' and 'k' of reduce_attention must be (..., n, d) with one d, got {tuple(q.shape)} and "
            f"{tuple(k.shape)}."
        )
    squared = k.square().sum(-1, keepdim=True)
    extra = (squared.amax(-2, keepdim=True) - squared).clamp_min(0.0).sqrt()
    return torch.cat([q, torch.zeros_like(q[..., :1])], -1), torch.cat([k, extra], -1)


def head_to_tail(kernel: Tensor) -> Tensor:
    """sum of all but the n largest entries / sum of the n largest, for (..., n, s) kernels: shape (...)."""
    flat = kernel.flatten(-2)
    head = flat.topk(min(kernel.shape[-2], flat.shape[-1]), -1, sorted=False).values.sum(-1)
    return (flat.sum(-1) - head) / head


def attention(q: Tensor, k: Tensor, v: Tensor, *, eps: float = 0.01, method: str = "auto", seed: int = 0) -> Tensor:
    """Softmax attention `D^-1 A V`, A = exp(Q K' / sqrt d), for one head by kernel products: q (n, d), k, v (s, .).

    The reduction (`reduce_attention`) makes A a Gaussian kernel up to a factor per row, which cancels in the
    quotient. Rows with kernel mass below 1 are computed exactly: their relative error would be eps / mass. With sharp
    attention that is every row, and this is exact attention; it pays when tokens attend to many keys near them.
    """
    if v.ndim != 2 or v.shape[0] != k.shape[0]:
        raise BochnerError(f"The 'v' of attention must have shape ({k.shape[0]}, v), got {tuple(v.shape)}.")
    a, b = reduce_attention(q, k)
    K = KernelOperator(a, b, bandwidth=q.shape[1] ** 0.25, eps=eps, method=method, seed=seed)
    values = v.double()
    product = (K @ torch.cat([torch.ones(len(v), 1, dtype=torch.float64), values], 1)).double()
    out = product[:, 1:] / product[:, :1].clamp_min(1e-300)
    for rows in (product[:, 0] < 1.0).nonzero()[:, 0].split(max(1, (1 << 22) // len(k))):
        out[rows] = torch.softmax(q[rows].double() @ k.double().T * q.shape[1] ** -0.5, 1) @ values
    return out.to(v.dtype)
