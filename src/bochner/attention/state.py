"""The monoid behind attention: a state summarises keys and values, and states merge.

`State(kv, norm, log_scale)`: `kv = sum psi(k_j) v_j'` and `norm = sum psi(k_j)`, both relative to `exp(log_scale)`, a
running maximum. `absorb` adds keys, `merge` joins two states, `read` answers queries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bochner._checks import BochnerError
from bochner.attention.numerics import BOUNDED_FLOOR, EMPTY, MASKED, finish
from bochner.maps.base import Features


class WindowState(NamedTuple):
    """The exact keys of windowed attention: the last ones, and the first t unpadded ones.

    k, v (b, g, s, .); padded, sink (b, s) bool: of those keys, which are padding and which are sinks; sink_k, sink_v
    (b, g, t, .), sink_position (b, t), its place in the sequence or -1 for a sink not seen yet. `seen`: keys so far.
    `setting`: (window, sinks, kind). `start` (b,): where the sequences of a batch begin, if that moves their blocks; of
    the keys held, those that a sequence has left behind are padding to it.
    """

    k: Tensor
    v: Tensor
    padded: Tensor
    sink: Tensor
    sink_k: Tensor
    sink_v: Tensor
    sink_position: Tensor
    seen: int
    setting: tuple[int, int, str]
    start: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self if isinstance(t, Tensor))


class State(NamedTuple):
    """Everything attention needs to know of the keys seen: relative to `exp(log_scale)`.

    kv (b, h, m, v), norm (b, h, m), log_scale (b, h); `window` holds the exact keys of windowed attention; `origin`
    tells which map and scale made it.
    """

    kv: Tensor
    norm: Tensor
    log_scale: Tensor
    window: WindowState | None = None
    origin: tuple[Any, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held, independent of how many keys were absorbed."""
        own = sum(t.numel() * t.element_size() for t in (self.kv, self.norm, self.log_scale))
        return own + (0 if self.window is None else self.window.nbytes)

    def map(self, f: Any) -> State:
        """Every tensor through f; all have the batch in front."""
        window = self.window
        if window is not None:
            window = WindowState(*(f(t) if isinstance(t, Tensor) else t for t in window))  # type: ignore[arg-type]
        return State(f(self.kv), f(self.norm), f(self.log_scale), window, self.origin)


def empty_state(
    batch: tuple[int, ...], num_features: int, value_dim: int, *, dtype: torch.dtype, device: Any = None
) -> State:
    """The state of no keys, the unit of `merge`: batch is (b, h), `num_features` the map's `feature_dim`."""
    return State(
        torch.zeros(*batch, num_features, value_dim, dtype=dtype, device=device),
        torch.zeros(*batch, num_features, dtype=dtype, device=device),
        torch.full(batch, EMPTY, dtype=dtype, device=device),
    )


def absorb(state: State, features: Features, v: Tensor, key_padding_mask: Tensor | None = None) -> State:
    """Add keys (their features (..., s, m)) with values v (..., s, v) to a state; masked keys add nothing."""
    values, log_scale = features
    if key_padding_mask is not None:
        log_scale = log_scale.masked_fill(spread_mask(key_padding_mask), MASKED)
    ref = torch.maximum(state.log_scale, log_scale.detach().amax((-2, -1)))
    weight = (log_scale - ref[..., None, None]).exp()
    carry = (state.log_scale - ref).exp()
    return State(
        torch.addcmul(values.mT @ (v.to(values.dtype) * weight), state.kv, carry[..., None, None]),
        torch.addcmul((weight.mT @ values).squeeze(-2), state.norm, carry[..., None]),
        ref,
        state.window,
        state.origin,
    )


def merge(a: State, b: State) -> State:
    """The state of the keys of both; associative up to rounding, with `empty_state` as its unit."""
    if a.window is not None or b.window is not None:
        raise BochnerError("States with an exact window cannot be merged; merge states of plain linear attention.")
    if a.kv.shape != b.kv.shape:
        raise BochnerError(
            f"Only states of one map and batch merge, got kv of shapes {tuple(a.kv.shape)} and {tuple(b.kv.shape)}."
        )
    ref = torch.maximum(a.log_scale, b.log_scale)
    wa, wb = (a.log_scale - ref).exp(), (b.log_scale - ref).exp()
    return State(
        a.kv * wa[..., None, None] + b.kv * wb[..., None, None],
        a.norm * wa[..., None] + b.norm * wb[..., None],
        ref,
    )


def read(state: State, features: Features, *, positive: bool = True) -> Tensor:
    """Normalised attention of queries (their features (..., n, m)) over the keys of a state, (..., n, v).

    `positive=False` for signed maps: normalisers near or below zero are raised to a floor.
    """
    values = features.values
    total = values @ packed(state)
    bound = None if positive else cauchy_schwarz(values, state.norm.unsqueeze(-2))
    log_ref = state.log_scale[..., None, None].expand_as(total[..., :1])
    return finish(total, log_ref, bound, None, True, "clamp", BOUNDED_FLOOR[total.dtype]).out


def packed(state: State) -> Tensor:
    """kv and norm side by side, (b, h, m, v + 1): one product reads values and normaliser."""
    return torch.cat([state.kv, state.norm.unsqueeze(-1)], dim=-1)


def unpacked(sums: Tensor, log_scale: Tensor) -> State:
    """The inverse of `packed`."""
    return State(sums[..., :-1].contiguous(), sums[..., -1].contiguous(), log_scale)


def cauchy_schwarz(values: Tensor, norm: Tensor) -> Tensor:
    """A bound of every row's normaliser, (..., n, 1), that does not depend on how the keys were split up."""
    norms = [torch.linalg.vector_norm(t.detach(), dim=-1, keepdim=True) for t in (values, norm)]
    return norms[0] * norms[1]


def spread_mask(mask: Tensor) -> Tensor:
    """(b, s) to (b, 1, s, 1)."""
    return mask[:, None, :, None]


def unmasked(mask: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Keys and values (b, g, s, .) with zeros where masked: what they hold there must not matter, not even NaN."""
    return tensors if mask is None else tuple(t.masked_fill(spread_mask(mask), 0) for t in tensors)


def leading(mask: Tensor) -> Tensor:
    """How many keys at the front of each sequence are padding, (b,)."""
    return mask.long().cumprod(1).sum(1)
