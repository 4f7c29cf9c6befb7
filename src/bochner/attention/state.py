"""The monoid behind attention: a state summarises keys and values, and states merge.

`kv = sum psi(k_j) v_j'` and `norm = sum psi(k_j)`, both relative to `exp(log_scale)`, a running maximum. `absorb` adds
keys, `merge` joins two states, `read` answers queries. Every path of attention adds keys by `key_sums` and joins sums
by `add`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bochner._checks import BochnerError
from bochner._products import in_place, may_look
from bochner.attention.features import BOUNDED_FLOOR, EMPTY, MASKED
from bochner.maps.base import FeatureMap, Features

SMALL = 0.1  # of its bound: the least normaliser of a signed map that is divided by


class Keys(NamedTuple):
    """Keys and values (b, g, s, .) by their places; which are padding and which sinks (b, s), None for none.

    `shift` (b, g, s, 1): what decay adds to the log weight of each key, None for nothing. It is in double precision:
    differences of large sums matter.
    """

    k: Tensor
    v: Tensor
    padded: Tensor | None = None
    sink: Tensor | None = None
    shift: Tensor | None = None

    @property
    def far_holes(self) -> Tensor | None:
        """Those that the kernel leaves out."""
        both = [t for t in (self.padded, self.sink) if t is not None]
        return both[0] | both[1] if len(both) == 2 else both[0] if both else None

    def each(self, f: Callable[[Tensor, int], Tensor]) -> Keys:
        """Every tensor there is through f, which is also told the dimension of its places."""
        return Keys(*(None if t is None else f(t, min(t.dim(), 3) - 1) for t in self))  # type: ignore[arg-type]

    def part(self, span: slice) -> Keys:
        return self.each(lambda t, dim: t[:, span] if dim == 1 else t[:, :, span])


def joined(*parts: Keys) -> Keys:
    """Keys one behind the other."""
    parts = tuple(p for p in parts if p.k.shape[2] or p.padded is not None or p.shift is not None) or parts[-1:]
    if len(parts) == 1:
        return parts[0]
    found: list[Tensor | None] = []
    for each in zip(*parts, strict=True):
        like = next((t for t in each if t is not None), None)
        if like is not None:
            dim, shape = min(like.dim(), 3) - 1, list(like.shape)
            for i, t in enumerate(each):
                if t is None:
                    shape[dim] = parts[i].k.shape[2]
                    each = (*each[:i], like.new_zeros(shape), *each[i + 1 :])
            like = torch.cat(each, dim=dim)
        found.append(like)
    return Keys(*found)  # type: ignore[arg-type]


class WindowState(NamedTuple):
    """The exact keys of windowed attention, the last and the first t unpadded ones, with shifts since they were seen.

    `sink_position` (b, t): places in the sequence, -1 for one not seen. `setting`: (window, sinks, kind). `start`
    (b,): where sequences begin, if that moves their blocks; what a sequence has left behind is padding to it.
    """

    held: Keys
    sinks: Keys
    sink_position: Tensor
    seen: int  # keys so far
    setting: tuple[int, int, str]
    start: Tensor | None = None
    complete: bool = False  # whether all sinks are known to be there

    @property
    def unpadded(self) -> bool:
        """Whether no key so far is known to be padding, so that the sinks are the first t keys."""
        return self.held.padded is None and self.start is None


class State(NamedTuple):
    """Everything attention needs to know of the keys seen.

    `sums` (b, h, m, v + 1): those of `psi(k) [v, 1]'` relative to `exp(log_scale)`; some maps sum others.
    `total` (b, h, v + 1): sum of the values and number of keys. `origin`: the map that made it.
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
        sizes: list[int] = []
        self.map(lambda t: sizes.append(t.numel() * t.element_size()))
        return sum(sizes)

    def map(self, f: Any) -> State:
        """Every tensor through f; all have the batch in front."""
        return _through(self, f)


def _through(x: Any, f: Any) -> Any:
    if isinstance(x, Keys | WindowState | State):
        return type(x)(*(_through(t, f) for t in x))
    return f(x) if isinstance(x, Tensor) else x


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
    """Add keys, features (..., s, m) and values (..., s, v), to a state; masked ones add nothing.

    `phi`: the map, needed where it sums keys in its own way.
    """
    _check_size(features.values, state, "absorb")
    v = v.to(features.values.dtype)
    if key_padding_mask is not None:
        v = v.masked_fill(spread_mask(key_padding_mask), 0)
    sums = add_keys(Sums(state.sums, state.log_scale), features, v, key_padding_mask, phi)
    return State(*sums, state.total + value_sums(v, key_padding_mask), state.window, state.origin)


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
    `phi`: the map, needed where it reads its sums in its own way.
    """
    if state.window is not None:
        raise BochnerError("read answers from the kernel's sums alone; resume a state with an exact window instead.")
    _check_size(features.values, state, "read")
    positive = positive if phi is None else phi.has_positive_sums
    rows, _, bound = read_sums(features.values, Sums(state.sums, state.log_scale), phi, positive=positive)
    floor, log_weight = BOUNDED_FLOOR[rows.dtype], state.log_scale[..., None, None]
    out, bad, _ = finished(rows, log_weight, bound, (), floor, looks=may_look(rows))
    return out if bad is None else with_means(out, bad, state.total.unsqueeze(-2))[0]


def _check_size(values: Tensor, state: State, owner: str) -> None:
    m, have = values.shape[-1], state.sums.shape[-2]
    if m != have:
        raise BochnerError(f"{owner} got {m} features, the state has {have}: it belongs to another map.")


# What every path of attention is made of.


def add_keys(sums: Sums, features: Features, v: Tensor, mask: Tensor | None, phi: FeatureMap | None) -> Sums:
    """Sums after more keys by their features, v (..., s, v); those of the mask (b, s) add nothing."""
    psi, log_scale = features
    if mask is not None:
        log_scale = log_scale.masked_fill(spread_mask(mask), MASKED)
    top = log_scale.detach().amax((-2, -1))
    return add(sums, Sums(key_sums(psi, log_scale, columns_of(phi, features, v), top), top))


def add_key(sums: Sums, features: Features, columns: Tensor, mask: Tensor | None, *, looks: bool) -> Sums:
    """The same for one key and its columns (..., 1, c), whose product is a plain one."""
    psi, log_scale = features
    if mask is not None:
        log_scale = log_scale.masked_fill(spread_mask(mask), MASKED)
    value, ref = sums.value, sums.ref.unsqueeze(-1).unsqueeze(-1)
    more = (log_scale - ref).to(value.dtype)
    if looks and more.amax().item() <= 0:  # most keys are no larger than all before them: nothing is rescaled
        return Sums(torch.addcmul(value, psi.mT, columns * more.exp()), sums.ref)
    new = torch.maximum(ref, log_scale)
    old, more = ((t - new).to(value.dtype).exp() for t in (ref, log_scale))
    return Sums(torch.addcmul(value * old, psi.mT, columns * more), new.squeeze(-1).squeeze(-1))


def read_sums(values: Tensor, sums: Sums, phi: FeatureMap | None, *, positive: bool) -> tuple[Tensor, Any, Any]:
    """Values and normaliser (..., n, v + 1) of rows by their features (..., n, m), relative to exp(ref); the log of a
    factor of each row, None for 1; a bound of the normaliser, None for positive maps."""
    rows, factor = values @ sums.value, None
    if phi is not None:
        rows, factor = phi.answer(rows, sums.value[..., -1:, :], values)
    return rows, factor, None if positive else cauchy_schwarz(values, sums.value[..., -1].unsqueeze(-2))


def columns_of(phi: FeatureMap | None, features: Features, v: Tensor) -> Tensor:
    """What is summed beside the features of keys, (..., s, c): their values and 1, unless the map has others."""
    found = None if phi is None else phi.columns(features, v)
    return torch.nn.functional.pad(v, (0, 1), value=1.0) if found is None else found


def key_sums(psi: Tensor, log_scale: Tensor, columns: Tensor, ref: Tensor) -> Tensor:
    """`sum_j psi_j columns_j' exp(log_scale_j - ref)`: (..., s, m), (..., s, 1), (..., s, c), (...) to (..., m, c)."""
    return psi.mT @ (columns * (log_scale - ref[..., None, None]).to(psi.dtype).exp())


def add(a: Sums, b: Sums) -> Sums:
    """The sums of the keys of both, relative to the larger of their references."""
    ref = torch.maximum(a.ref, b.ref)
    old, new = ((s.ref - ref).to(a.value.dtype).exp()[..., None, None] for s in (a, b))
    return Sums(torch.addcmul(b.value * new, a.value, old), ref)


def value_sums(v: Tensor, mask: Tensor | None) -> Tensor:
    """The sum of the values (b, g, s, v) and the number of keys that are not masked, (b, g, v + 1)."""
    count = v.shape[-2] if mask is None else (~mask).sum(-1).to(v.dtype)[:, None, None]
    total = v.sum(-2)
    return torch.cat([total, torch.zeros_like(total[..., :1]) + count], dim=-1)


def with_means(out: Tensor, bad: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (..., n, v) with the mean in place of bad ones, and which of those see any value.

    `seen` (..., n or 1, v + 1): the sum of the values, and their number.
    """
    count = seen[..., -1:]
    return torch.where(bad, seen[..., :-1] / count.clamp_min(1), out), bad & (count > 0)


def normaliser(den: Tensor, bound: Tensor | None, floor: float, *, looks: bool) -> tuple[Tensor, Tensor | None]:
    """Normalisers (..., n, 1) to divide by, 1 for those that cannot be, and which those are; None where all can be.

    A positive map's must be at least `floor`; one with a `bound` (..., n, 1) at least `SMALL` of that.
    """
    least = floor if bound is None else (SMALL * bound).clamp_min(torch.finfo(den.dtype).tiny)
    if looks and bound is None:  # the usual case, in one pass
        low, high = den.detach().aminmax()
        if low.item() >= floor and high.item() < torch.inf:
            return den, None
    bad = ~((den >= least) & (den < torch.inf))
    return (den, None) if looks and not bool(bad.any()) else (den.masked_fill(bad, 1), bad)


def finished(
    total: Tensor, log_weight: Tensor, bound: Tensor | None, exact: Sequence[Any], floor: float, *, looks: bool
) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor]]:
    """Rows (..., n, v) of the kernel's sums (..., n, v + 1), relative to exp(log_weight), and of exact rows (..., n, v)
    with the logarithms of their normalisers; which cannot be divided and are zero; the normaliser and its reference."""
    num, den, ref = total[..., :-1], total[..., -1:], log_weight.detach()
    if exact:
        for _, log in exact:
            ref = torch.maximum(ref, log.detach())
        ref = ref.clamp_min(EMPTY)
        share, weights = (log_weight - ref).exp(), [(log - ref).exp() for _, log in exact]
        near = sum(weights[1:], weights[0])
        den = torch.addcmul(near, den, share)
        bound = None if bound is None else torch.addcmul(near, bound, share).detach()  # exact terms are their own
    den, bad = normaliser(den, bound, floor, looks=looks)
    num = num if bad is None else num.masked_fill(bad, 0)  # not infinity times zero, NaN in the gradients
    if exact:
        num, overwrites = num * share, in_place(num)
        for (rows, _), weight in zip(exact, weights, strict=True):
            num = torch.addcmul(num, rows, weight, out=num if overwrites else None)
    out = num / den
    return out if bad is None else out.masked_fill(bad, 0), bad, (den, ref)


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
