"""The monoid behind attention: a state summarises keys and values, and states merge.

`kv = sum psi(k_j) v_j'` and `norm = sum psi(k_j)`, both relative to `exp(log_scale)`, a running maximum. `absorb` adds
keys, `merge` joins two states, `read` answers queries. Every path of attention adds keys by `key_sums` and joins sums
by `add`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bochner._checks import BochnerError
from bochner._products import in_place, may_look, memory, product
from bochner.attention.features import BOUNDED_FLOOR, EMPTY, MASKED
from bochner.maps.base import FeatureMap, Features

SMALL = 0.1  # of its bound: the least normaliser of a signed map that is divided by


class WindowState(NamedTuple):
    """The exact keys of windowed attention: the last ones, and the first t unpadded ones.

    k, v (b, g, s, .); padded, sink (b, s) bool: of those keys, which are padding and which are sinks; sink_k, sink_v
    (b, g, t, .), sink_position (b, t), its place in the sequence or -1 for a sink not seen yet. `seen`: keys so far.
    `setting`: (window, sinks, kind). `start` (b,): where the sequences of a batch begin, if that moves their blocks; of
    the keys held, those that a sequence has left behind are padding to it. `complete`: whether all sinks are known to
    be there.
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
    complete: bool = False


class State(NamedTuple):
    """Everything attention needs to know of the keys seen.

    `sums` (b, h, m, v + 1): the sums of `psi(k) [v, 1]'` relative to `exp(log_scale)`, log_scale (b, h); maps of their
    own kind sum other columns. `total` (b, h, v + 1): the sum of the values, and the number of keys. `window` holds the
    exact keys of windowed attention; `origin` tells which map and scale made it.
    """

    sums: Tensor
    log_scale: Tensor
    total: Tensor
    window: WindowState | None = None
    origin: tuple[Any, ...] | None = None

    @property
    def kv(self) -> Tensor:
        """The sum of `psi(k) v'`, (b, h, m, v)."""
        return self.sums[..., :-1]

    @property
    def norm(self) -> Tensor:
        """The sum of `psi(k)`, (b, h, m)."""
        return self.sums[..., -1]

    @property
    def nbytes(self) -> int:
        """Bytes held, independent of how many keys were absorbed."""
        tensors = [t for t in (*self, *(self.window or ())) if isinstance(t, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)

    def map(self, f: Any) -> State:
        """Every tensor through f; all have the batch in front."""
        window = self.window
        if window is not None:
            window = WindowState(*(f(t) if isinstance(t, Tensor) else t for t in window))  # type: ignore[arg-type]
        return State(f(self.sums), f(self.log_scale), f(self.total), window, self.origin)


class Sums(NamedTuple):
    """Sums of keys, (..., m, columns), relative to exp(ref), ref (...)."""

    value: Tensor
    ref: Tensor


def empty_state(
    batch: tuple[int, ...], num_features: int, value_dim: int, *, dtype: torch.dtype, device: Any = None
) -> State:
    """The state of no keys, the unit of `merge`: batch is (b, h), `num_features` the map's `feature_dim`."""
    return State(
        torch.zeros(*batch, num_features, value_dim + 1, dtype=dtype, device=device),
        torch.full(batch, EMPTY, dtype=dtype, device=device),
        torch.zeros(*batch, value_dim + 1, dtype=dtype, device=device),
    )


def absorb(
    state: State,
    features: Features,
    v: Tensor,
    key_padding_mask: Tensor | None = None,
    *,
    phi: FeatureMap | None = None,
) -> State:
    """Add keys (their features (..., s, m)) with values v (..., s, v) to a state; masked keys add nothing.

    `phi`: the map of the features, needed where it sums keys in its own way.
    """
    values, log_scale = features
    if values.shape[-1] != state.sums.shape[-2]:
        raise BochnerError(
            f"absorb got {values.shape[-1]} features, the state has {state.sums.shape[-2]}: it belongs to another map."
        )
    if key_padding_mask is not None:
        hole = spread_mask(key_padding_mask)
        log_scale, v = log_scale.masked_fill(hole, MASKED), v.masked_fill(hole, 0)
    v = v.to(values.dtype)
    columns = None if phi is None else phi.columns(features, v)
    ref = log_scale.detach().amax((-2, -1))
    new = add(Sums(state.sums, state.log_scale), Sums(key_sums(values, log_scale, v, ref, columns), ref))
    return State(*new, state.total + value_sums(v, key_padding_mask), state.window, state.origin)


def merge(a: State, b: State) -> State:
    """The state of the keys of both; associative up to rounding, with `empty_state` as its unit."""
    if a.window is not None or b.window is not None:
        raise BochnerError("States with an exact window cannot be merged; merge states of plain linear attention.")
    if a.sums.shape != b.sums.shape:
        raise BochnerError(
            f"Only states of one map and batch merge, got kv of shapes {tuple(a.kv.shape)} and {tuple(b.kv.shape)}."
        )
    if None not in (a.origin, b.origin) and a.origin != b.origin:
        raise BochnerError("Only states of one map and scale merge, these were made by two; absorb with the same map.")
    joined = add(Sums(a.sums, a.log_scale), Sums(b.sums, b.log_scale))
    return State(*joined, a.total + b.total, None, a.origin or b.origin)


def read(state: State, features: Features, *, positive: bool = True, phi: FeatureMap | None = None) -> Tensor:
    """Normalised attention of queries (their features (..., n, m)) over the keys of a state, (..., n, v).

    `positive=False` for signed maps: a row whose normaliser is below a tenth of its bound gets the mean of all values.
    `phi`: the map of the features, needed where it reads its sums in its own way.
    """
    if state.window is not None:
        raise BochnerError(
            "read answers from the kernel's sums alone, this state has an exact window; resume it instead."
        )
    values = features.values
    if values.shape[-1] != state.sums.shape[-2]:
        raise BochnerError(
            f"read got {values.shape[-1]} features, the state has {state.sums.shape[-2]}: it belongs to another map."
        )
    total = values @ state.sums
    if phi is not None:
        positive = phi.has_positive_sums
        total, _ = phi.answer(total, state.sums[..., -1:, :], values)
    bound = None if positive else cauchy_schwarz(values, state.norm.unsqueeze(-2))
    den = normaliser(total[..., -1:], bound, BOUNDED_FLOOR[total.dtype])
    return torch.where(den.bad, mean_of(state.total).unsqueeze(-2), den.divide(total[..., :-1]))


# What every path of attention is made of.


def key_sums(psi: Tensor, log_scale: Tensor, v: Tensor, ref: Tensor, columns: Tensor | None = None) -> Tensor:
    """`sum_j psi_j columns_j' exp(log_scale_j - ref)`: (..., s, m), (..., s, 1), (..., s, c), (...) to (..., m, c).

    Without columns they are `[v, 1]`, v (..., s, v).
    """
    weight = (log_scale - ref[..., None, None]).exp()
    weighted = ones_beside(v, weight, name="weighted") if columns is None else columns * weight
    return product("sums", psi.mT, weighted)


def add(a: Sums, b: Sums) -> Sums:
    """The sums of the keys of both, relative to the larger of their references."""
    ref = torch.maximum(a.ref, b.ref)
    old, new = ((s.ref - ref).exp()[..., None, None] for s in (a, b))
    return Sums(torch.addcmul(b.value * new, a.value, old), ref)


def value_sums(v: Tensor, mask: Tensor | None) -> Tensor:
    """The sum of the values (b, g, s, v) and the number of keys that are not masked, (b, g, v + 1)."""
    count = v.shape[-2] if mask is None else (~mask).sum(-1).to(v.dtype)[:, None, None]
    total = v.sum(-2)
    return torch.cat([total, torch.zeros_like(total[..., :1]) + count], dim=-1)


def mean_of(total: Tensor) -> Tensor:
    """The mean of values from their sum and number, (..., v + 1) to (..., v); 0 of none."""
    return total[..., :-1] / total[..., -1:].clamp_min(1)


class Normaliser(NamedTuple):
    """What rows are divided by, and which cannot be, (..., n, 1): those by 1. `some`: whether there may be any."""

    value: Tensor
    bad: Tensor
    some: bool

    def divide(self, num: Tensor) -> Tensor:
        """Rows (..., n, v), zero where they cannot be divided."""
        # Masked before the division: not infinity times zero, which would send NaN to the gradients.
        return (num.masked_fill(self.bad, 0) if self.some else num) / self.value


def normaliser(den: Tensor, bound: Tensor | None, floor: float) -> Normaliser:
    """Normalisers (..., n, 1) to divide by: of a positive map at least `floor`, of a signed one `SMALL` of its bound.

    `bound` (..., n, 1): of a signed map's normaliser, None for positive ones.
    """
    if bound is None:
        bad = ~((den >= floor) & (den < torch.inf))
    else:
        bad = ~((den >= SMALL * bound) & (den < torch.inf)) | (den == 0)
    if may_look(den) and not bool(bad.any()):
        return Normaliser(den, bad, False)
    return Normaliser(den.masked_fill(bad, 1), bad, True)


def cauchy_schwarz(values: Tensor, norm: Tensor) -> Tensor:
    """A bound of every row's normaliser, (..., n, 1), that does not depend on how the keys were split up."""
    norms = [torch.linalg.vector_norm(t.detach(), dim=-1, keepdim=True) for t in (values, norm)]
    return norms[0] * norms[1]


def ones_beside(v: Tensor, weight: Tensor | float = 1.0, *, name: str) -> Tensor:
    """Values (..., s, v) with a column of ones, both times a weight (..., s, 1): (..., s, v + 1).

    Where no gradient may need it, valid until the next of this name, as a `product` is.
    """
    if not in_place(v):
        if not isinstance(weight, Tensor):
            return torch.nn.functional.pad(v, (0, 1), value=weight)
        return torch.cat([v * weight, weight], dim=-1)
    out = memory(name, (*v.shape[:-1], v.shape[-1] + 1), v.dtype)
    torch.mul(v, weight, out=out[..., :-1])
    out[..., -1:] = weight
    return out


def spread_mask(mask: Tensor) -> Tensor:
    """(b, s) to (b, 1, s, 1)."""
    return mask[:, None, :, None]


def unmasked(mask: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Keys and values (b, g, s, .) with zeros where masked: what they hold there must not matter, not even NaN."""
    return tensors if mask is None else tuple(t.masked_fill(spread_mask(mask), 0) for t in tensors)
