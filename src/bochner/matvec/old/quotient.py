"""Softmax attention as a quotient of two kernel products."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._checks import BochnerError
from .operator import KernelOperator
from .reduction import reduce_attention


def _quotient(K: KernelOperator, values: Tensor, exact_below: float) -> tuple[Tensor, Tensor]:
    """(K V) / (K 1) in float64 and the rows done exactly because their denominator is small."""
    queries, keys = K.queries.double(), K.keys.double()
    table = torch.cat([torch.ones(len(values), 1, dtype=torch.float64), values.double()], 1)
    product = (K @ table).double()
    denominator = product[:, :1]
    out = product[:, 1:] / denominator.clamp_min(1e-300)
    small = (denominator[:, 0] < exact_below).nonzero()[:, 0]
    for rows in small.split(max(1, (1 << 22) // max(1, len(keys)))):
        distance = torch.cdist(queries[rows], keys, compute_mode="donot_use_mm_for_euclid_dist")
        out[rows] = torch.softmax(-K.gamma * distance.square(), 1) @ values.double()
    return out, small


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, eps: float = 0.01, exact_below: float = 1.0, method: str = "auto", seed: int = 0
) -> Tensor:
    """Softmax attention `D^-1 A V`, A = exp(Q K' / sqrt d), for one head by kernel products: q (n, d), k, v (s, .).

    The reduction (`reduce_attention`) makes A a Gaussian kernel up to a factor per row, which cancels in the
    quotient. Rows with kernel mass below `exact_below` are computed exactly: their relative error would be
    eps / mass. With sharp attention that is every row, and this is exact attention; it pays when tokens attend
    to many keys near them.
    """
    if v.ndim != 2 or v.shape[0] != k.shape[0]:
        raise BochnerError(f"The 'v' of attention must have shape ({k.shape[0]}, v), got {tuple(v.shape)}.")
    q_reduced, k_reduced = reduce_attention(q, k)
    K = KernelOperator(q_reduced, k_reduced, bandwidth=q.shape[1] ** 0.25, eps=eps, method=method, seed=seed)
    return _quotient(K, v, exact_below)[0].to(v.dtype)
