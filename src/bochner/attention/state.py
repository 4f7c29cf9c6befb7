"""The monoid behind attention: a state summarises keys and values, and states merge.

`State(kv, norm, log_scale)`: `kv = sum psi(k_j) v_j'` and `norm = sum psi(k_j)`, both relative to `exp(log_scale)`, a
running maximum. `absorb` adds keys, `merge` joins two states, `read` answers queries.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bochner._checks import BochnerError
from bochner._scratch import Scratch
from bochner.maps.base import Features

EMPTY = -1e30  # the log scale of nothing: finite, so that differences are never NaN
MASKED = -2e30  # below EMPTY, so that exp(MASKED - EMPTY) is 0
FRESH = Scratch(reuse=False)
SMALL_NORMALIZER = 1e-4  # of its Cauchy-Schwarz bound; a signed map's normaliser below it is not used


class WindowState(NamedTuple):
    """The exact keys of windowed attention: the last w keys and the first t unpadded ones.

    k, v (b, g, w, .); padded, sink (b, w) bool: of those keys, which are padding and which are sinks; sink_k, sink_v
    (b, g, t, .), sink_position (b, t), its place in the sequence or -1 for a sink not seen yet; `seen`, keys so far.
    """

    k: Tensor
    v: Tensor
    padded: Tensor
    sink: Tensor
    sink_k: Tensor
    sink_v: Tensor
    sink_position: Tensor
    seen: int

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self if isinstance(t, Tensor))


class State(NamedTuple):
    """Everything attention needs to know of the keys seen: relative to `exp(log_scale)`.

    kv (b, h, m, v), norm (b, h, m), log_scale (b, h); `window` holds the exact keys of windowed attention.
    """

    kv: Tensor
    norm: Tensor
    log_scale: Tensor
    window: WindowState | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held, independent of how many keys were absorbed."""
        own = sum(t.numel() * t.element_size() for t in (self.kv, self.norm, self.log_scale))
        return own + (0 if self.window is None else self.window.nbytes)


class Partial(NamedTuple):
    """Unnormalised attention of some rows over some keys: `num`, `den`, relative to `exp(log_ref)`, and |den|'s bound.

    num (..., n, v); den, log_ref, bound (..., n, 1). `bound` is None for positive maps.
    """

    num: Tensor
    den: Tensor
    log_ref: Tensor
    bound: Tensor | None = None


def empty_state(
    batch: tuple[int, ...], num_features: int, value_dim: int, *, dtype: torch.dtype, device: Any = None
) -> State:
    """The state of no keys, the unit of `merge`: batch is (b, h), `num_features` the map's `feature_dim`."""
    return State(
        torch.zeros(*batch, num_features, value_dim, dtype=dtype, device=device),
        torch.zeros(*batch, num_features, dtype=dtype, device=device),
        torch.full(batch, EMPTY, dtype=dtype, device=device),
    )


def absorb(
    state: State,
    features: Features,
    v: Tensor,
    key_padding_mask: Tensor | None = None,
    *,
    scratch: Scratch | None = None,
) -> State:
    """Add keys (their features (..., s, m)) with values v (..., s, v) to a state; masked keys add nothing."""
    values, log_scale = features
    if key_padding_mask is not None:
        log_scale = log_scale.masked_fill(spread_mask(key_padding_mask), MASKED)
    ref = torch.maximum(state.log_scale, log_scale.detach().amax((-2, -1)))
    weight = (log_scale - ref[..., None, None]).exp()
    carry = (state.log_scale - ref).exp()
    weighted = (scratch or FRESH).mul(v.to(values.dtype), weight)
    return State(
        torch.addcmul(values.mT @ weighted, state.kv, carry[..., None, None]),
        torch.addcmul((weight.mT @ values).squeeze(-2), state.norm, carry[..., None]),
        ref,
        state.window,
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
    partial = read_partial(state, features, positive=positive)
    quotient, _ = normalize_partial(partial, "clamp", lost_below(partial.den.dtype))
    return quotient.num / quotient.den


def read_partial(state: State, features: Features, *, positive: bool, scratch: Scratch | None = None) -> Partial:
    """Unnormalised attention of queries over the keys of a state."""
    values, log_scale = features
    num = (scratch or FRESH).matmul(values, state.kv)
    den = (state.norm.unsqueeze(-2) @ values.mT).mT
    bound = None
    if not positive:
        bound = values.detach().norm(dim=-1, keepdim=True) * state.norm.detach().norm(dim=-1)[..., None, None]
    return Partial(num, den, state.log_scale[..., None, None] + log_scale, bound)


def cat_rows(parts: list[Any]) -> Any:
    """Blocks of output rows, or of partial results, joined along the rows."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, dim=-2)
    fields = zip(*parts, strict=True)
    return Partial(*(None if field[0] is None else torch.cat(field, dim=-2) for field in fields))  # type: ignore[arg-type]


def flatten_groups(rows: Any) -> Any:
    """(b, g, r, n, .) to (b, g, r n, .), for output rows or a partial result."""
    if isinstance(rows, Tensor):
        return rows.flatten(2, 3)
    return Partial(*(None if t is None else t.flatten(2, 3) for t in rows))  # type: ignore[arg-type]


def chunks_to_heads(partial: Partial, shape: tuple[int, int, int]) -> Partial:
    """Rows in the order of t chunks, r heads, c rows, as (b, g, r, t c, .)."""
    return Partial(*(None if x is None else x.unflatten(2, shape).transpose(2, 3).flatten(3, 4) for x in partial))  # type: ignore[arg-type]


class Quotient(NamedTuple):
    """Attention not yet divided: num (..., n, v) by a safe den (..., n, 1)."""

    num: Tensor
    den: Tensor


def normalize_partial(partial: Partial, policy: str, floor: float) -> tuple[Quotient, Tensor | None]:
    """A safe num and den, giving zeros where nothing was attended to; and which normalisers of signed maps were small.

    Positive maps give zeros also where the normaliser is lost: below `floor`, see `lost_below`.
    """
    num, den, _, bound = partial
    if bound is None:
        return Quotient(num, den.masked_fill(den < floor, torch.inf)), None
    small = (den < SMALL_NORMALIZER * bound) & (bound > 0)
    if policy == "zero":
        num = num.masked_fill(small, 0)
    den = torch.where(small, (SMALL_NORMALIZER * bound).clamp_min(torch.finfo(den.dtype).tiny), den)
    # Where the normaliser is exactly zero, so is the numerator: nothing was attended to.
    return Quotient(num, den.masked_fill(den == 0, 1)), small


def lost_below(dtype: torch.dtype, headroom: float = 0.0) -> float:
    """The normaliser of a positive map below which terms of it may have underflowed and its gradient may overflow.

    `headroom`: the logarithm of the largest feature. In float32 a normaliser then spans 70 of the 88 + 103 powers of e
    from the largest product down; the rest is for the number of terms, their rounding, and the backward pass.
    """
    return math.exp(2 * headroom - 70) if dtype == torch.float32 else 1e-200


def is_lost(den: Tensor, log_ref: Tensor, floor: float) -> Tensor:
    """Which rows have keys to attend to and yet, for a positive map, a normaliser that underflowed."""
    return (den < floor) & (log_ref > 0.5 * EMPTY)


def widen(state: State) -> State:
    """A state in float64."""
    window = state.window
    if window is not None:
        parts = (t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in window)
        window = WindowState(*parts)  # type: ignore[arg-type]
    return State(state.kv.double(), state.norm.double(), state.log_scale.double(), window)


def spread_mask(mask: Tensor) -> Tensor:
    """(b, s) to (b, 1, s, 1)."""
    return mask[:, None, :, None]
