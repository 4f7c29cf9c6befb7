"""One token of decoding, in as few operations as it takes: the same numbers as `linear_attention` with a state.

`linear_attention` handles any number of new tokens, padding and sinks that are still to come; a step knows that there
is one new token, that it is not padding, and that the sinks are there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bochner.attention.state import State, WindowState, absorb, read_partial
from bochner.maps.base import FeatureMap


def can_step(phi: FeatureMap, state: State | None, padding: Tensor | None) -> bool:
    """Whether `step` applies to the next token."""
    if state is None or not phi.positive or phi.kernel == "gaussian":
        return False
    if padding is not None and bool(padding[:, -1].any()):
        return False
    window = state.window
    return window is None or window.sink_position.shape[1] == 0 or bool((window.sink_position >= 0).all())


def step(phi: FeatureMap | None, q: Tensor, k: Tensor, v: Tensor, state: State, scale: float) -> tuple[Tensor, State]:
    """Attention of one query (b, h, 1, d) after one more key and value (b, g, 1, .); `phi=None` has no kernel term."""
    b, g, _, d = k.shape
    dtype, root = state.kv.dtype, scale**0.5
    x = q.to(dtype).reshape(b, g, -1, d) * root
    past = state.window
    if past is None:
        assert phi is not None
        state = absorb(state, phi.prepare("key")(k.to(dtype) * root), v)
        partial = read_partial(state, phi.prepare("query")(x), positive=True)
        return _shape(partial.num / partial.den, q), state
    # 1. The key that leaves the window enters the kernel's state, unless it is a sink or padding.
    keys, values = torch.cat([past.k, k], dim=2), torch.cat([past.v, v], dim=2)
    new = torch.zeros(b, 1, dtype=torch.bool, device=k.device)
    holes, sinks = torch.cat([past.padded, new], dim=1), torch.cat([past.sink, new], dim=1)
    width = past.k.shape[2]
    # 2. Exact attention on the window and on the sinks outside it.
    near_k = torch.cat([past.sink_k, keys[:, :, 1:]], dim=2) if width else past.sink_k
    near_v = torch.cat([past.sink_v, values[:, :, 1:]], dim=2) if width else past.sink_v
    hidden = past.sink_position > past.seen - width
    hidden = torch.cat([hidden, holes[:, 1:]], dim=1) if width else hidden
    logits = (x @ near_k.to(dtype).mT * root).masked_fill(hidden[:, None, None], -torch.inf)
    if phi is None:
        out = logits.softmax(-1) @ near_v.to(dtype)
    else:
        first = keys[:, :, :1].to(dtype) * root
        state = absorb(state, phi.prepare("key")(first), values[:, :, :1], holes[:, :1] | sinks[:, :1])
        partial = read_partial(state, phi.prepare("query")(x), positive=True)
        ref = torch.maximum(logits.amax(-1, keepdim=True), partial.log_ref)
        weights, share = (logits - ref).exp(), (partial.log_ref - ref).exp()
        den = weights.sum(-1, keepdim=True) + partial.den * share
        out = (weights @ near_v.to(dtype) + partial.num * share) / den
    recent = slice(1, 1 + width)
    kept = WindowState(
        keys[:, :, recent] if width else past.k,
        values[:, :, recent] if width else past.v,
        holes[:, recent] if width else past.padded,
        sinks[:, recent] if width else past.sink,
        past.sink_k,
        past.sink_v,
        past.sink_position,
        past.seen + 1,
    )
    return _shape(out, q), state._replace(window=kept)


def _shape(out: Tensor, q: Tensor) -> Tensor:
    return out.reshape(*q.shape[:-1], out.shape[-1]).to(q.dtype)
