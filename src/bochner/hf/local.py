"""Heads of decoders without a kernel: softmax over a window and the first keys, by torch's fused attention.

A piece of the rows at a time sees the keys from the first that its first row sees to its own last one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bochner.maps.landmark_fit import Near

SMALLEST, LARGEST = 128, 512  # rows of a piece


def local_rows(
    q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor, sink_v: Tensor, near: Near, *, first: int, scale: float
) -> Tensor:
    """Rows (b, h, n, v) of q (b, h, n, d), which are the last of the keys k, v (b, g, s, .) at places from `first` on.

    `sink_k`, `sink_v`: the keys and values of places 0, 1, ..., for rows whose window begins behind them.
    """
    n, s, w = q.shape[-2], k.shape[-2], near.window
    assert w is not None
    start, size = first + s - n, min(max(w // 2, SMALLEST), LARGEST)
    if _low(near, start + n - 1) == 0:  # all keys
        size = n
    rows = []
    for a in range(start, start + n, size):
        b, low = min(a + size, start + n), _low(near, a)
        keys, values = (t[..., low - first : b - first, :] for t in (k, v))
        sinks = min(low, sink_k.shape[-2])  # those that are not among the keys
        if sinks:
            keys = torch.cat([sink_k[..., :sinks, :], keys], dim=-2)
            values = torch.cat([sink_v[..., :sinks, :], values], dim=-2)
        allowed = None
        if a > 0 or _low(near, b - 1) > 0:
            i, j = torch.arange(a, b, device=q.device), torch.arange(low, b, device=q.device)
            j = torch.cat([j.new_tensor(range(sinks)), j])
            allowed = near.allowed(i, j) & ~near.far(i, j)
        rows.append(
            scaled_dot_product_attention(
                q[..., a - start : b - start, :],
                keys,
                values,
                attn_mask=allowed,
                is_causal=allowed is None,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-2)


def _low(near: Near, i: int) -> int:
    """The first place that the row at place i sees in its window."""
    w = near.window or 0
    return max(0, (i // w - 1) * w if near.window_kind == "block" else i - w + 1)
