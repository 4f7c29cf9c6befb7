"""How attention keeps features in range: exponentials, references, lost rows, buffers.

Maps say what they compute; here it is decided how it is kept. A feature of an exponential map is `exp(w.z + row)`.
Rows whose logits are known to be small (`|w| |z|` bounds them) are exponentiated as they are, all others relative to
their largest logit; either way the choice for a row depends on that row alone, so that no later row can move it even by
rounding. Sums that nevertheless leave the range show as normalisers below `floor`, or as non-finite ones: such rows are
*lost*, and computed again in the log domain (`bochner.attention.careful`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from bochner._products import is_composed, memory, product
from bochner.maps.base import Exponent, FeatureMap, Features, squared_norm

EMPTY = -1e30  # the log scale of nothing: finite, so that differences are never NaN
MASKED = -2e30  # below EMPTY, so that exp(MASKED - EMPTY) is 0
SMALL_NORMALIZER = 1e-4  # of its Cauchy-Schwarz bound; a signed map's normaliser below it is not used

FeatureFunction = Callable[[Tensor], Features]
Versions = tuple[tuple[int, int], ...]
_PREPARED: WeakKeyDictionary[FeatureMap, dict[tuple[str, float, torch.dtype], tuple[Versions, FeatureFunction]]]
_PREPARED = WeakKeyDictionary()


class Range(NamedTuple):
    """What a dtype holds, in powers of e.

    `calm`: logits up to here are exponentiated as they are; `peak`: where the largest logit of any other row is put.
    Twice either is below the largest exponent. `rise`: how far a key may exceed the reference of its chunk.
    `floor`: the least normaliser of exponential features from which no term that mattered has underflowed.
    """

    calm: float
    peak: float
    rise: float
    floor: float


RANGES = {torch.float32: Range(43.0, 30.0, 25.0, 6e-6), torch.float64: Range(340.0, 250.0, 100.0, 1e-80)}
BOUNDED_FLOOR = {torch.float32: 1e-30, torch.float64: 1e-200}  # the same for features that are at most 1


def floor_of(phi: FeatureMap, dtype: torch.dtype) -> float:
    """The normaliser of a positive map below which a row counts as lost."""
    return RANGES[dtype].floor if phi.is_exponential else BOUNDED_FLOOR[dtype]


def feature_function(phi: FeatureMap, role: str, root: float, dtype: torch.dtype) -> FeatureFunction:
    """The features of `root * x` in `dtype`, as attention wants them: x (..., n, d) to values and log scales.

    The values are valid until the next features of this role (`product`).
    What does not depend on x is kept with the map until its state changes, unless a gradient may need it or the map has
    parameters: fused optimizers change those without leaving a trace.
    """
    if is_composed() or torch.is_grad_enabled() or next(phi.parameters(), None) is not None:
        return _feature_function(phi, role, root, dtype)
    key, now = (role, root, dtype), versions(phi)
    known = _PREPARED.setdefault(phi, {})
    if key not in known or known[key][0] != now:
        known[key] = (now, _feature_function(phi, role, root, dtype))
    return known[key][1]


def versions(phi: FeatureMap) -> Versions:
    """What changes when a parameter or buffer is written in place or replaced."""
    return tuple((id(t), t._version) for t in (*phi.parameters(), *phi.buffers()))


def _feature_function(phi: FeatureMap, role: str, root: float, dtype: torch.dtype) -> FeatureFunction:
    exponent = phi.exponent(role)
    if exponent is None:
        return phi.prepare_scaled(role, root, dtype)
    limits, (weight, scale) = RANGES[dtype], scaled_weight(exponent, root, dtype)
    reach = torch.linalg.vector_norm(weight.detach(), dim=-1).amax(-1)[..., None, None]
    offset = None if exponent.offset is None else exponent.offset.to(dtype).unsqueeze(-2)
    lift = 0.0 if offset is None else offset.detach().abs().amax(-1, keepdim=True)

    def features(x: Tensor) -> Features:
        z, extra = changed(exponent, x.to(dtype), root)
        square = squared_norm(z)
        logits = product(role, z, weight.mT)
        if offset is not None:
            logits = logits + offset if logits.requires_grad else logits.add_(offset)
        row = exponent.constant + extra - (exponent.half * scale**2) * square
        if may_look(x) and bool((square.detach().amax().sqrt() * reach + lift).amax() <= limits.calm):
            return Features(logits.exp_(), row)
        bound = square.detach().sqrt() * reach + lift
        shift = torch.where(bound <= limits.calm, 0, logits.detach().amax(-1, keepdim=True) - limits.peak)
        return Features((logits - shift).exp_(), row + shift)

    return features


def scaled_weight(exponent: Exponent, root: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """The frequencies for what `changed` returns, and its scale: where nothing is changed, x need not be multiplied."""
    scale = root if exponent.change is None else 1.0
    return exponent.weight.to(dtype) * scale, scale


def changed(exponent: Exponent, x: Tensor, root: float) -> tuple[Tensor, Tensor | float]:
    """z of `root * x`, but for the scale, and its extra row term."""
    return (x, 0.0) if exponent.change is None else exponent.change(x * root)


def may_look(x: Tensor) -> bool:
    """Whether asking for a value is cheap and possible: not on other devices, not while tracing or transforming."""
    return x.device.type == "cpu" and not is_composed()


class Rows(NamedTuple):
    """Finished rows: their values, the factor that normalised each (0 for lost rows), and what was wrong with any.

    out (..., n, v), factor (..., n, 1). `live` (..., n, 1): where the normaliser was not replaced by a floor. `lost`
    and `small` (..., n, 1) or None: rows of a positive map to be computed again, rows of a signed map with a small
    normaliser.
    """

    out: Tensor
    factor: Tensor
    live: Tensor | None = None
    lost: Tensor | None = None
    small: Tensor | None = None


def finish(
    total: Tensor,
    log_ref: Tensor,
    bound: Tensor | None,
    beyond: Tensor | None,
    normalize: bool,
    policy: str,
    floor: float,
) -> Rows:
    """Divide the sums (..., n, v + 1), values then normaliser, relative to exp(log_ref).

    `bound` (..., n, 1): of a signed map's normaliser, None for positive ones. `beyond` (..., n, 1): rows known to be
    lost.
    """
    num, den = total[..., :-1], total[..., -1:]
    if not normalize:
        factor = log_ref.exp()
        return Rows(num * factor, factor, lost=beyond)
    if bound is not None:
        small = ((den < SMALL_NORMALIZER * bound) | (den == 0)) & (log_ref > 0.5 * EMPTY)
        den = torch.where(small, SMALL_NORMALIZER * bound, den)
        bad = den.abs() < torch.finfo(den.dtype).tiny  # nothing was attended to, or nothing is left to divide by
        lost = beyond
        gone = bad if policy != "zero" else bad | small
    else:
        small = None
        gone = bad = ~((den >= floor) & (den < torch.inf))
        lost = bad & (log_ref > 0.5 * EMPTY)
        if beyond is not None:
            lost = lost | beyond
    if beyond is not None:
        gone = gone | beyond
    factor = den.masked_fill(bad, 1).reciprocal().masked_fill(gone, 0)
    out = num * factor
    if is_composed() or beyond is not None:
        out = out.masked_fill(gone, 0)  # not zero times infinity
    return Rows(out, factor, None if small is None else ~small, lost, small)


class Joined:
    """Finished rows, joined along the rows part by part and cut to their number.

    Where no gradient needs a part, its values go into the whole at once: memory of a part is used again for the next.
    """

    def __init__(self, length: int) -> None:
        self.length, self.filled = length, 0
        self.parts: list[Rows] = []
        self.out: Tensor | None = None

    def add(self, rows: Rows) -> None:
        start, n = self.filled, rows.out.shape[-2]
        self.filled = start + n
        if torch.is_grad_enabled() or is_composed() or n >= self.length:
            self.parts.append(rows)
            return
        if self.out is None:
            self.out = rows.out.new_empty(*rows.out.shape[:-2], self.length, rows.out.shape[-1])
        stop = max(start, min(self.filled, self.length))  # whole parts may lie behind the last row
        self.out[..., start:stop, :] = rows.out[..., : stop - start, :]
        self.parts.append(rows._replace(out=rows.factor))

    def rows(self) -> Rows:
        found = Rows(*(self._joined(field) for field in zip(*self.parts, strict=True)))  # type: ignore[arg-type]
        return found if self.out is None else found._replace(out=self.out)

    def _joined(self, field: tuple[Tensor | None, ...]) -> Tensor | None:
        found = [t for t in field if t is not None]
        if not found:
            return None
        if len(found) < len(field):  # some parts had nothing to say
            pairs = zip(field, self.parts, strict=True)
            found = [torch.zeros_like(p.factor, dtype=torch.bool) if t is None else t for t, p in pairs]
        return (found[0] if len(found) == 1 else torch.cat(found, dim=-2))[..., : self.length, :]


def map_rows(rows: Rows, f: Callable[[Tensor], Tensor]) -> Rows:
    """Every tensor of finished rows through f."""
    return Rows(*(None if t is None else f(t) for t in rows))  # type: ignore[arg-type]


def flags(rows: Rows) -> tuple[Tensor, Tensor]:
    """Which rows are lost and which small, as tensors."""
    nothing = torch.zeros_like(rows.factor, dtype=torch.bool)
    return (nothing if rows.lost is None else rows.lost, nothing if rows.small is None else rows.small)


def topped_up(total: Tensor, last: Tensor, least: Tensor) -> Tensor:
    """Kernel sums (..., n, v + 1) with what their share lacks given to all keys alike.

    `last` (..., n, v + 1): the sums of a key feature that is 1, so values and number of keys; `least` times that number
    is the least share.
    """
    count = last[..., -1:]
    lack = least - total[..., -1:] / torch.where(count > 0, count, 1)
    return total + lack.clamp_min(0) * last


def top_up_rows(phi: Tensor, g: Tensor, den: Tensor, last: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of features (..., 2 n, m) and gradients (..., 2 n, v + 1) that stand for those of `topped_up` sums.

    With S the sums of the keys and e the last feature alone, a row is `phi S + lack e S`; so rows e are put behind the
    rows phi, and what lack, `least - den / count`, adds goes to both normalisers. phi (..., n, m); g (..., n, v + 1):
    the gradient of topped-up rows; den (..., n, 1): normalisers before that; last (..., n or 1, v + 1).
    """
    count = last[..., -1:]
    safe = torch.where(count > 0, count, 1)
    share = den / safe
    lack = least - share
    dlack = (g * last).sum(-1, keepdim=True) / safe * ((lack >= 0) & (count > 0))
    rows, others = g.clone(), g * lack.clamp_min(0)
    rows[..., -1:] -= dlack
    others[..., -1:] += dlack * share
    alone = torch.zeros_like(phi)
    alone[..., -1] = 1
    return torch.cat([phi, alone], dim=-2), torch.cat([rows, others], dim=-2)


def scale_adjoint(phi: Tensor, dphi: Tensor, n: int) -> Tensor:
    """The gradient of the log scales of n rows, (..., n, 1); the features may be those of `top_up_rows`."""
    return (phi * dphi).sum(-1, keepdim=True).unflatten(-2, (-1, n)).sum(-3)


def adjoint(rows: Rows, grad: Tensor, normalize: bool) -> Tensor:
    """The gradient of the sums (..., n, v + 1) that `finish` divided, from that of its rows."""
    values = grad * rows.factor
    if not normalize:
        return torch.nn.functional.pad(values, (0, 1))
    den = -(grad * rows.out).sum(-1, keepdim=True) * rows.factor
    if rows.live is not None:
        den = den * rows.live
    return torch.cat([values, den], dim=-1)


def weighted(values: Tensor, weight: Tensor, *, name: str | None = None) -> Tensor:
    """Values (..., n, v) times weights (..., n, 1), with the weights beside: (..., n, v + 1).

    With a name it is valid until the next of that name, as a `product` is.
    """
    if torch.is_grad_enabled() or is_composed():
        return torch.cat([values * weight, weight.expand(*values.shape[:-1], 1)], dim=-1)
    shape = (*values.shape[:-1], values.shape[-1] + 1)
    kept = name is not None and values.device.type == "cpu"
    out = memory(str(name), shape, values.dtype) if kept else values.new_empty(shape)
    torch.mul(values, weight, out=out[..., :-1])
    out[..., -1:] = weight
    return out


def add_product(total: Tensor, a: Tensor, b: Tensor | float) -> Tensor:
    """`total + a b`, in place where no gradient may need it."""
    if torch.is_grad_enabled() or is_composed():
        return total + a * b
    return total.addcmul_(a, b) if isinstance(b, Tensor) else total.add_(a, alpha=b)


def mixed(name: str, weight: Tensor, sums: Tensor, more: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Weighted sums of blocks: `weight` (.., t + 1, l) times (b, g, l, m, v), as the first t and the last.

    `more`: sums (b, g, m, v) of other keys with their weights (b, g, t + 1). The first t, (b, g, t, m, v), are a
    `product` of this name; they lie together, as the products that read them want it.
    """
    flat = sums.flatten(3)
    rows = product(name, weight[..., :-1, :], flat).unflatten(-1, sums.shape[3:])
    last = (weight[..., -1:, :] @ flat).squeeze(2).unflatten(-1, sums.shape[3:])
    for total, factor in more:
        rows = add_product(rows, total.unsqueeze(2), factor[..., :-1, None, None])
        last = add_product(last, total, factor[..., -1:, None])
    return rows, last
