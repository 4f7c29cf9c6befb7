"""One attention call, and softmax attention of it: the exact part of every conversion.

Shapes: query (b, h, n, d), key (b, g, s, d), value (b, g, s, v); h / g query heads share a key head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bochner.attention import linear_attention
from bochner.attention.state import State
from bochner.maps.base import FeatureMap


class Call(NamedTuple):
    """One attention call; `padding` (b, s) is True at padding.

    With fewer queries than keys in causal attention, the queries are the last ones. `segments` (b, n): the sequence
    that each token of a packed batch belongs to. `hidden` (b, n, width): what entered the attention module, where it is
    known.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool
    padding: Tensor | None
    scale: float
    segments: Tensor | None = None
    hidden: Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.query.shape[1] // self.key.shape[1]


def exact(call: Call, dropout: float = 0.0) -> Tensor:
    """Softmax attention of a call, (b, h, n, v)."""
    if call.segments is not None:
        return one_by_one(call, exact)
    n, s = call.query.shape[-2], call.key.shape[-2]
    causal = call.is_causal and n > 1
    allowed = None
    if call.padding is not None or (causal and n < s):
        allowed = torch.ones(n, s, dtype=torch.bool, device=call.query.device)
        if causal:
            allowed = allowed.tril(s - n)
        if call.padding is not None:
            allowed = allowed & ~call.padding[:, None, None, :]
            allowed = allowed | ~allowed.any(-1, keepdim=True)  # rows of padding: any finite value will do
    return scaled_dot_product_attention(
        call.query,
        call.key,
        call.value,
        attn_mask=allowed,
        dropout_p=dropout,
        is_causal=causal and allowed is None,
        scale=call.scale,
        enable_gqa=call.group != 1,
    )


def attend(call: Call, phi: FeatureMap, **more: Any) -> Any:
    """Linear attention of a call, (b, h, n, v); `more`: window and sinks, and what else `linear_attention` takes."""
    if call.segments is not None:
        return one_by_one(call, lambda part: attend(part, phi, **more))
    options: dict[str, Any] = {"is_causal": call.is_causal, "key_padding_mask": call.padding, "scale": call.scale}
    return linear_attention(call.query, call.key, call.value, phi, **options, **more)


def attend_from(call: Call, phi: FeatureMap, state: State | None, **near: Any) -> tuple[Tensor, State]:
    """Linear attention of new tokens behind a state, and the state after them; `padding` is that of the new keys."""
    found: tuple[Tensor, State] = attend(call, phi, **near, state=state, return_state=True)
    return found


def one_by_one(call: Call, attention: Callable[[Call], Tensor]) -> Tensor:
    """The sequences of a packed batch, each by itself."""
    assert call.segments is not None
    rows = []
    for b, segments in enumerate(call.segments):
        lengths = segments.unique_consecutive(return_counts=True)[1].tolist()
        names = [name for name in ("query", "key", "value", "hidden") if getattr(call, name) is not None]
        parts = zip(*(getattr(call, name)[b : b + 1].split(lengths, dim=-2) for name in names), strict=True)
        alone = call._replace(padding=None, segments=None)
        rows.append(torch.cat([attention(alone._replace(**dict(zip(names, x, strict=True)))) for x in parts], dim=-2))
    return torch.cat(rows)
