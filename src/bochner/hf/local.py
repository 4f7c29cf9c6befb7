"""Heads of decoders without a kernel: softmax over a window and the first keys, by torch's fused attention.

A piece of the rows at a time sees the keys from the first that its first row sees to its own last one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SMALLEST, LARGEST = 128, 512  # rows of a piece


class Near(NamedTuple):
    """The window of a decoder's head: which of the keys before itself a row sees, places counted from the first."""

    window: int
    sinks: int
    is_block: bool

    def low(self, i: int) -> int:
        """The first place that the row at place i sees in its window."""
        return max(0, (i // self.window - 1) * self.window if self.is_block else i - self.window + 1)

    def lows(self, i: Tensor) -> Tensor:
        return ((i // self.window - 1) * self.window if self.is_block else i - self.window + 1).clamp_min(0)


def local_rows(
    q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor, sink_v: Tensor, near: Near, *, first: int, scale: float
) -> Tensor:
    """Rows (b, h, n, v) of q (b, h, n, d), which are the last of the keys k, v (b, g, s, .) at places from `first` on.

    `sink_k`, `sink_v`: the keys and values of places 0, 1, ..., seen by rows whose window does not hold them.
    """
    n, s = q.shape[-2], k.shape[-2]
    start, size = first + s - n, min(max(near.window // 2, SMALLEST), LARGEST)
    if near.low(start + n - 1) == 0:  # all keys
        size = n
    rows = []
    for a in range(start, start + n, size):
        b, low = min(a + size, start + n), near.low(a)
        i, j = torch.arange(a, b, device=q.device)[:, None], torch.arange(low, b, device=q.device)
        keys, values = (t[..., low - first : b - first, :] for t in (k, v))
        allowed = None if a == low == 0 and near.low(b - 1) == 0 else (j <= i) & (j >= near.lows(i))
        if near.low(b - 1) and sink_k.shape[-2]:
            place = torch.arange(sink_k.shape[-2], device=q.device)
            keys, values = torch.cat([sink_k, keys], dim=-2), torch.cat([sink_v, values], dim=-2)
            assert allowed is not None
            allowed = torch.cat([place < near.lows(i), allowed], dim=-1)
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
