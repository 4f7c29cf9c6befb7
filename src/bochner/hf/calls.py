"""One attention call, and softmax attention of it: the exact part of every conversion.

Shapes: query (b, h, n, d), key (b, g, s, d), value (b, g, s, v); h / g query heads share a key head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from bochner.attention import linear_attention
from bochner.attention.layout import leading
from bochner.attention.state import State
from bochner.maps.base import FeatureMap


class Call(NamedTuple):
    """One attention call; `padding` (b, s) is True at padding.

    With fewer queries than keys in causal attention, the queries are the last ones. `sink_logits` (h,): the logit of a
    key without a value, which enters each row's normaliser and nothing else. `segments` (b, n): the sequence that each
    token of a packed batch belongs to. `hidden` (b, n, width): what entered the attention module, where it is known.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool
    padding: Tensor | None
    scale: float
    sink_logits: Tensor | None = None
    segments: Tensor | None = None
    hidden: Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.query.shape[1] // self.key.shape[1]

    def counts(self) -> Tensor:
        """How many unpadded keys each row may see, (b, n)."""
        n, s = self.query.shape[-2], self.key.shape[-2]
        keep = torch.ones(1, s, dtype=torch.long, device=self.key.device)
        if self.padding is not None:
            keep = (~self.padding).long()
        return keep.cumsum(-1)[:, s - n :] if self.is_causal else keep.sum(-1, keepdim=True).expand(-1, n)


def exact(call: Call, dropout: float = 0.0) -> Tensor:
    """Softmax attention of a call, (b, h, n, v)."""
    if call.segments is not None:
        return one_by_one(call, exact)
    if call.sink_logits is not None:
        return without_sink(exact(with_sink(call, {}), dropout), call.sink_logits)
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


def attend(call: Call, phi: FeatureMap, **near: Any) -> Tensor:
    """Linear attention of a call, (b, h, n, v); `near`: window and sinks."""
    if call.segments is not None:
        return one_by_one(call, lambda part: attend(part, phi, **near))
    if call.sink_logits is not None:
        return without_sink(attend(with_sink(call, near), phi, **one_more(near)), call.sink_logits)
    options: dict[str, Any] = {"is_causal": call.is_causal, "key_padding_mask": call.padding, "scale": call.scale}
    return linear_attention(call.query, call.key, call.value, phi, **options, **near)


def attend_from(call: Call, phi: FeatureMap, state: State | None, **near: Any) -> tuple[Tensor, State]:
    """Linear attention of new tokens behind a state, and the state after them; `padding` is that of the new keys."""
    new = call
    if call.sink_logits is not None:
        near = one_more(near)
        state = after_sink(call, phi, near) if state is None else state
        new = with_sink(call, None)
    out, state = linear_attention(
        new.query,
        new.key,
        new.value,
        phi,
        is_causal=True,
        key_padding_mask=new.padding,
        state=state,
        return_state=True,
        scale=new.scale,
        **near,
    )
    return (out if call.sink_logits is None else without_sink(out, call.sink_logits)), state


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


def with_sink(call: Call, near: dict[str, Any] | None) -> Call:
    """The call with a key 0 in front, whose value is 1 in a new column where all others are 0.

    Seen exactly its weight is exp(0) = 1, so that the new column of the output is 1 over the normaliser of a row. It
    lies one place before a sequence's first key, or one block, so that no block is moved by it. `near`: window and
    sinks, None if the key is in the cache already.
    """
    key, value, padding = call.key, pad(call.value, (0, 1)), call.padding
    if near is None:
        return call._replace(value=value, sink_logits=None)
    more = min(near["window"], key.shape[2]) if near.get("window_kind") == "block" and near.get("window") else 1
    key, value = pad(key, (0, 0, more, 0)), pad(value, (0, 0, more, 0))
    if padding is None and more > 1:
        padding = torch.zeros(key.shape[0], call.key.shape[2], dtype=torch.bool, device=key.device)
    first = 0 if padding is None else leading(padding)[:, None]
    here = (torch.arange(key.shape[2], device=key.device) == first).expand(key.shape[0], -1)
    padding = None if padding is None else pad(padding, (more, 0), value=True) & ~here
    here = here[:, None, :, None]
    ones = here.expand_as(value[..., :1]).to(value.dtype)
    value = torch.cat([value[..., :-1].masked_fill(here, 0), ones], dim=-1)
    return call._replace(key=key.masked_fill(here, 0), value=value, padding=padding, sink_logits=None)


def after_sink(call: Call, phi: FeatureMap, near: dict[str, Any]) -> State:
    """The state after the key of `with_sink` and before any token, from which blocks are counted."""
    key, value = (t[..., :0, :] for t in (call.key, call.value))
    alone = with_sink(call._replace(query=call.query[..., :1, :], key=key, value=value, padding=None), {})
    options: dict[str, Any] = {"is_causal": True, "scale": call.scale, "return_state": True}
    state: State = linear_attention(alone.query, alone.key, alone.value, phi, **options, **near)[1]
    if state.window is None or near.get("window_kind") != "block":
        return state
    start = torch.ones(key.shape[0], dtype=torch.int64, device=key.device)
    return state._replace(window=state.window._replace(start=start))


def without_sink(out: Tensor, sink_logits: Tensor) -> Tensor:
    """The output of `with_sink` with the weight exp(sink logit) in its normaliser in place of 1, the column dropped.

    With Z the sum of all other weights and p = 1 / (Z + 1), it is `(Z + 1) / (Z + e^s) = 1 / (1 + p (e^s - 1))` times
    what was computed.
    """
    share = out[..., -1:].float()
    raised = 1 + share * torch.expm1(sink_logits.float())[:, None, None]
    return (out[..., :-1].float() / raised).to(out.dtype)


def one_more(near: dict[str, Any]) -> dict[str, Any]:
    """Window and sinks with one sink more, the key of `with_sink`."""
    return {**near, "sinks": near.get("sinks", 0) + 1}
