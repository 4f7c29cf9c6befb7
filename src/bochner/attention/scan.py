"""The one scan: for every block of rows the pairs of its zone, and the sums of all blocks of keys outside it.

A row is `(sum_far + sum_zone + sum_sinks) / normaliser`. The far sums are read by the kernel from sums of blocks; pairs
of the zone are exact, or the kernel's, or some of both (`layout`). Every row has a reference of its own, the largest
log weight that it sees, so that one formula serves all scales and no statistic of a later key enters an earlier row's
arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bochner import _products
from bochner.attention.autograd import Known, Output, Scanned, random_state, recomputed
from bochner.attention.features import EMPTY, MASKED, PreparedMap
from bochner.attention.layout import Layout, Near, Part, by_head
from bochner.attention.softmax import attend_zones, exact_logits
from bochner.attention.state import Keys, State, Sums, add_key, add_keys, cauchy_schwarz, columns_of, finished, key_sums

ELEMENTS = 5 * 2**19  # features and logits of one part on the CPU: 10 MB in float32
# Short causal sequences of more than 2 d features are differentiated in four parts of at least so many: at 256 tokens
# (8 heads, d = 64, m = 256) that takes 5.5 times the memory of q, k and v instead of 12, and a tenth more time.
FEWEST = 3 * 2**16
ELSEWHERE = 64  # times as many on other devices
UNROLLED = 16  # parts of a compiled graph, at most: each takes time to compile
pad = torch.nn.functional.pad
# The C library keeps freed memory up to twice the largest block that it has seen freed, 32 MB at most. What is beyond
# goes back and comes again page by page: windows of 4,096 tokens take 1.4 to 1.7 times as long. This shows it one.
torch.empty(2**23 - 2**16, device="cpu")


class Call(NamedTuple):
    """How attention is computed.

    `groups`: query heads per key head, r. `goes_on`: whether the state is wanted. `composed`: whether everything must
    be plain differentiable operations. `looks`: whether asking for a value is cheap and possible.
    """

    near: Near
    map: PreparedMap
    groups: int
    composed: bool
    looks: bool
    recompute: bool = True
    goes_on: bool = False

    @classmethod
    def of(cls, near: Near, prepared: PreparedMap, q: Tensor, k: Tensor, *how: bool) -> Call:
        """For q (b, h, n, d) and k (b, g, s, d); then whether to recompute and to go on."""
        composed = _products.is_composed()
        looks = _products.LOOKS and not composed and q.device.type == "cpu"
        return cls(near, prepared, q.shape[1] // k.shape[1], composed, looks, *how)


class Result(NamedTuple):
    """Rows (b, g, r n, v), the state after the keys, and which rows (b, g, r n, 1) were given a mean; None for none."""

    out: Tensor
    state: State | None = None
    bad: Tensor | None = None


class Sinks(NamedTuple):
    """The first t unpadded keys; place relative to row 0, and whether there is one, (b, t) or (1, t) for all alike."""

    keys: Keys
    place: Tensor
    there: Tensor


def rows_at_once(call: Call, layout: Layout | None, like: Tensor) -> int | None:
    """How many rows of all sequences and heads make a part, or keys without a layout: what they need stays in cache.

    None for all of them, where there is one graph. A compiled graph of a known length has some parts one after another.
    """
    if call.composed and (layout is None or not _products.is_known(layout.rows * like.shape[0])):
        return None
    phi, r, width = call.map.phi, call.groups, 0 if layout is None else layout.width
    m = phi.feature_dim
    if layout is not None and layout.near.in_blocks:  # behind each part the keys are summed up once more
        row, share = r * (m + (width if torch.is_grad_enabled() or layout.near.is_causal else 0)), 1
    else:
        row = 2 * ((1 + r) * m + r * width) if width else (m if layout is None else r * m)
        # Most maps hold several temporaries as large as their features. But small parts of a sliding window compute
        # most features of keys more than once: `trig` takes 1.1 times as long at 1,024 tokens, `landmark` 1.4 times.
        share = 1 if phi.is_exponential or (layout is not None and layout.neighbours) else 4
    elements = ELEMENTS // share * (1 if like.device.type == "cpu" else ELSEWHERE)
    rows = max(64, elements // (like.shape[0] * like.shape[1] * row))
    learns = torch.is_grad_enabled() and not call.composed
    if learns and layout is not None and layout.is_triangle and not layout.near.window and m > 2 * like.shape[-1]:
        rows = min(rows, max(64, layout.rows // 4, FEWEST // (like.shape[0] * like.shape[1] * m)))
    return max(rows, -(-layout.rows // UNROLLED)) if call.composed and layout is not None else rows


def absorb_keys(call: Call, sums: Sums, keys: Keys) -> Sums:
    """Sums after more keys (b, g, s, .), of which padding and sinks add nothing: some at a time."""
    if keys.k.shape[2] == 1 and not (call.composed or torch.is_grad_enabled()):  # one that leaves the window of a step
        few = call.map.few_features("key", keys.k, keys.shift)
        columns = columns_of(call.map.reader, few, keys.v.to(call.map.dtype))
        return add_key(sums, few, columns, keys.far_holes, looks=call.looks)
    size = rows_at_once(call, None, keys.k) or keys.k.shape[2]
    again = call.recompute and torch.is_grad_enabled() and not call.composed
    # With gradients the map is made anew: what it holds may have been computed without.
    prepared = call.map.computed_from(call.map.tensors()) if again else call.map
    prepared.function("key")  # made before it is used: a recomputation would find it there

    def absorbed(value: Tensor, ref: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shift: Tensor | None) -> Sums:
        return add_keys(
            Sums(value, ref), prepared.features("key", k, shift), v.to(prepared.dtype), mask, prepared.reader
        )

    for i in range(0, keys.k.shape[2], size):
        k, v, _, _, shift = part = keys.part(slice(i, i + size))
        given = *sums, k, v, part.far_holes, shift
        # Features are not kept for the backward pass, but computed again, with the same random numbers.
        options: Any = {"use_reentrant": False, "preserve_rng_state": not prepared.phi.is_exponential}
        sums = checkpoint(absorbed, *given, **options) if again else absorbed(*given)
    return sums


def scan_rows(
    call: Call, q: Tensor, keys: Keys, sinks: Sinks | None, sums: Sums, layout: Layout
) -> tuple[Tensor, Tensor | None, Sums]:
    """Rows of q (b, g, r, n, d) laid out among keys, which are bad, and the sums after them."""
    parts = layout.parts(rows_at_once(call, layout, keys.k))
    first = keys.part(slice(0, 0)) if sinks is None else sinks.keys
    tensors: dict[str, Any] = {"q": q, "k": keys.k, "v": keys.v, "sink_k": first.k, "sink_v": first.v}
    tensors |= {"shift": keys.shift, "sink_shift": first.shift}
    if call.near.window and not call.near.is_causal and len(parts) > 1:
        # What lies behind the keys of each part, from the last to the first.
        bounds = [min(max(part.span.stop - layout.front, 0), layout.keys) for part in parts]
        found = [Sums(torch.zeros_like(sums.value), torch.full_like(sums.ref, EMPTY))]
        for i, j in reversed(list(pairwise(bounds))):
            found.append(absorb_keys(call, found[-1], keys.part(slice(i, j))))
        tensors["behind"], tensors["behind_ref"] = (torch.stack(t[::-1], dim=2) for t in zip(*found, strict=True))
    there = {name: t for name, t in tensors.items() if t is not None}
    scan = Scan(call, layout, parts, list(there), keys.padded, keys.far_holes, sinks)
    if torch.is_grad_enabled() and call.recompute and not call.composed:
        out, bad, *after = recomputed(scan, call.map, list(there.values()), sums)
    else:
        out, bad, *after = scan.forward(call.map, list(there.values()), sums)
    return out, bad, Sums(*after)


class Scan(NamedTuple):
    """Rows (b, g, r, n, v) over keys laid out around them, part by part.

    `take` finds in the tensors what a part needs, and `body` computes its rows from that and from the sums of all
    blocks before its zones, which are carried from part to part. `put` adds up the gradients of what was taken.

    Tensors by their `names`: q (b, g, r, n, d); k, v (b, g, s, .); those of sinks (b, g, t, .); shifts of both (.., 1);
    the sums behind each part of a bidirectional window (b, g, parts, m, c), and their references (b, g, parts).
    """

    call: Call
    layout: Layout
    parts: list[Part]
    names: list[str]
    padded: Tensor | None  # (b, s), keys that count for nothing
    far_holes: Tensor | None  # (b, s), those that the kernel leaves out
    sinks: Sinks | None

    def forward(
        self, prepared: PreparedMap, tensors: Sequence[Tensor], carry: Sums, before: list[Any] | None = None
    ) -> Scanned:
        """Rows, which are bad, and the sums after the last part; `before` gets each part's carry, random state and what
        is kept."""
        found = []
        for part in self.parts:
            random = None if before is None or prepared.phi.is_exponential else random_state(carry.value)
            found.append(self.body(prepared, part, self.take(part, tensors), carry))
            if before is not None:
                before.append((carry, random, found[-1].kept))
            carry = found[-1].carry
        rows, bad = self.join([out.rows for out in found]), None
        if any(out.bad is not None for out in found):
            bad = self.join([torch.zeros_like(o.rows[..., :1]).bool() if o.bad is None else o.bad for o in found])
        return rows, bad, *carry

    def take(self, part: Part, tensors: Sequence[Tensor]) -> list[Tensor]:
        found = dict(zip(self.names, tensors, strict=True)) | {"q": self.layout.take_rows(tensors[0], part)}
        for name, t in found.items():
            if name in ("k", "v", "shift"):
                found[name] = self.layout.take(t, part)
            elif name in ("behind", "behind_ref"):
                found[name] = t[:, :, part.number]
        return list(found.values())

    def put(self, part: Part, totals: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        for name, total, grad in zip(self.names, totals, grads, strict=True):
            if grad is None:
                continue
            if name == "q":
                self.layout.put_rows(total, part, grad)
            elif name in ("k", "v", "shift"):
                self.layout.put(total, part, grad)
            else:
                (total[:, :, part.number] if name == "behind" else total).add_(grad)

    def join(self, rows: Sequence[Tensor]) -> Tensor:
        """Parts (b, g, t, r c, .) as all rows, (b, g, r, n, .)."""
        heads = [by_head(t, self.call.groups) for t in rows]
        joined = heads[0] if len(heads) == 1 else torch.cat(heads, dim=3)
        return joined[:, :, :, self.layout.lead : self.layout.lead + self.layout.rows]

    def body(
        self, prepared: PreparedMap, part: Part, taken: Sequence[Tensor], carry: Sums, known: Known | None = None
    ) -> Output:
        """The rows of a part. Where they are known, the products that they are sums of are not computed again: a
        backward pass by that graph saves a fifth of forward and backward, with windows a third."""
        given = dict(zip(self.names, taken, strict=True))
        x, shift = given["q"].to(prepared.dtype), given.get("shift")
        near, r = self.call.near, self.call.groups
        # Decay counts from a key on. Exact terms and what they are compared with count from the first row of a block.
        base = None if shift is None else self.layout.own(shift, part)[..., :1, :].detach()
        # 1. The keys that the kernel sees of the zones, and the sums of all others.
        keys = self._kernel_keys(prepared, part, given)
        far, carry = self._far(part, keys, carry, given)
        phi, own = (t.unflatten(2, x.shape[2:4]) for t in prepared.features("query", x.flatten(2, 3)))

        def relative(log: Tensor) -> Tensor:
            """A log weight of the kernel as exact ones are counted; where all are the kernel's, factors cancel."""
            if not near.exact:
                return log
            return own + (log if base is None else (log - base).to(own.dtype))

        # 2. The pairs of each zone, by the kernel and exact.
        pairs = None if keys is None or not self.layout.has_kernel_pairs else self._pairs(keys, part, far, known)
        zones = self._exact_zones(part, given, base, x.dtype)
        if known is not None:
            (rows, den, ref), weight = known, None
            logs, terms = [far.ref[..., None, None]], []
            if pairs is not None:
                psi, columns, scale, top, weight = pairs
                logs, terms = [*logs, per_row(top, r)], [psi, columns, scale]
            for k, v, mask in zones:
                logits = exact_logits(x, k, prepared.scale, prepared.phi.kernel)
                terms += [(logits - ref if mask is None else logits + mask - ref).exp(), pad(v, (0, 1), value=1.0)]
            factors = [(relative(log).detach() - ref).to(x.dtype).exp() for log in logs]
            moves = own if near.exact else None
            return Output(carry, _Replayed.apply(rows, den, factors, weight, phi, moves, far.value, *terms))
        total, log_weight, bound = self._kernel(prepared, phi, far, pairs)
        # 3. All, with one normaliser.
        exact = [attend_zones(x, *zone, prepared.scale, prepared.phi.kernel) for zone in zones]
        looks, log_weight = self.call.looks, relative(log_weight)
        rows, bad, (den, ref) = finished(total, log_weight, bound, exact, prepared.floor, looks=looks)
        return Output(carry, rows, bad, None if prepared.reader else (den if exact else den.clone(), ref))

    # The kernel.

    def _kernel_keys(self, prepared: PreparedMap, part: Part, given: dict[str, Tensor]) -> list[Tensor] | None:
        """Features, log scales and columns of keys around a part that the kernel needs, in blocks (b, g, l, c, .)."""
        layout, k, v, shift = self.layout, given["k"], given["v"], given.get("shift")
        if layout.single and not layout.has_kernel_pairs:
            return None
        c = layout.width if layout.single else layout.block
        some = slice(part.kernel.start * c, part.kernel.stop * c)
        k, v = (t[:, :, some].to(prepared.dtype) for t in (k, v))
        features = prepared.features("key", k, None if shift is None else shift[:, :, some])
        psi, scale = features
        bias = layout.bias(self.far_holes, slice(part.span.start + some.start, part.span.start + some.stop), scale)
        scale = scale if bias is None else scale + bias
        return [t.unflatten(2, (-1, c)) for t in (psi, scale, columns_of(prepared.reader, features, v))]

    def _far(self, part: Part, keys: list[Tensor] | None, carry: Sums, given: dict[str, Tensor]) -> tuple[Sums, Sums]:
        """The sums outside the zone of each block of rows, (b, g, t, m, c), and those carried on."""
        layout, t = self.layout, part.blocks.stop - part.blocks.start
        if keys is None or layout.single:
            return Sums(carry.value.unsqueeze(2), carry.ref.unsqueeze(-1)), carry
        gone = max(0, min(layout.gone - part.blocks.start, t)) if part.rows.stop == layout.block else 0
        if part.is_last and not self.call.goes_on:
            gone = 0
        if self.call.near.is_causal:  # references that grow, so that no later key moves a row even by rounding
            psi, scale, columns = (x[:, :, :t] for x in keys)
            refs = torch.cat([carry.ref.unsqueeze(-1), scale.detach().amax((-2, -1))], dim=-1).cummax(-1).values
            sums = key_sums(psi, scale, columns, refs[..., 1:])
            found = Sums(prefix(sums, refs, carry.value, overwrites=not self._has_graph()), refs[..., :t])
            if gone == t:
                fade = (refs[..., -2] - refs[..., -1]).to(sums.dtype).exp()[..., None, None]
                last, before = (x.squeeze(2) if t == 1 else x[:, :, -1] for x in (sums, found.value))
                carry = Sums(torch.addcmul(last, before, fade), refs[..., -1].clone())
            elif gone:  # of all the memory, what is carried on alone
                carry = Sums(found.value[:, :, gone].clone(), refs[..., gone].clone())
            return found, carry
        ref = torch.maximum(keys[1].detach().amax((-3, -2, -1)), carry.ref)
        if "behind" in given:
            ref = torch.maximum(ref, given["behind_ref"])
        sums = key_sums(keys[0], keys[1], keys[2], ref.unsqueeze(-1))
        row = torch.arange(t, device=sums.device)[:, None]
        block = torch.arange(sums.shape[2], device=sums.device)[None, :] + part.kernel.start
        far = mixed((block < row) | (block > row + layout.neighbours), sums)
        if "behind" in given:
            before, behind = (
                value * (old - ref).exp()[..., None, None]
                for value, old in (carry, (given["behind"], given["behind_ref"]))
            )
            far = far + (before + behind).unsqueeze(2)
            if gone:
                carry = Sums(mixed(block < gone, sums).squeeze(2) + before, ref)
        return Sums(far, ref.unsqueeze(-1)), carry

    def _pairs(self, keys: list[Tensor], part: Part, far: Sums, known: Known | None) -> tuple[Tensor, ...]:
        """What the kernel sees of each zone pair by pair: features, columns (b, g, t, z, .) and log scales
        (b, g, t, 1, z) of keys; the reference of each row (b, g, t, c, 1); the weights relative to it (.., c, z)."""
        layout, ref, dtype = self.layout, far.ref[..., None, None], self.call.map.dtype
        if layout.is_triangle:
            keys = [x[:, :, : part.blocks.stop - part.blocks.start] for x in keys]
        elif not layout.single:
            keys = [layout.zones(x.flatten(2, 3)) for x in keys]
        psi, scale, columns = keys[0], keys[1].mT, keys[2]
        plain = known is None and self._has_graph()  # where rows are known the scales' gradient comes from the scores
        log = scale if plain else scale.detach()
        if not layout.is_triangle:
            log = log.masked_fill(layout.kernel_mask(part, scale.device), MASKED)
            top = torch.maximum(ref, log.detach().amax(-1, keepdim=True))
            return psi, columns, scale, top, (log - top).to(dtype).exp()
        top = torch.maximum(ref, log.detach().cummax(-1).values.mT[..., part.rows, :])
        weight = (log - top).to(dtype)  # the exponential may be infinite where it is cut off
        weight = weight.clamp_max(0).exp().tril(part.rows.start) if plain else weight.exp_().tril_(part.rows.start)
        return psi, columns, scale, top, weight

    def _kernel(
        self, prepared: PreparedMap, phi: Tensor, far: Sums, pairs: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Values and normaliser (b, g, t, r c, v + 1) by the kernel, relative to exp(log_weight), and their bound."""
        r, ref, total = self.call.groups, far.ref[..., None, None], phi @ far.value
        last = far.value[..., -1:, :] if prepared.reader else None
        norm = None if prepared.positive else far.value[..., -1].unsqueeze(-2)
        if pairs is not None:
            psi, columns, _, top, weight = pairs
            fade, ref = per_row((ref - top).to(phi.dtype).exp(), r), per_row(top, r)
            scores = weighted(phi @ psi.mT, weight, overwrites=not self._has_graph())
            total = torch.addcmul(scores @ columns, total, fade)
            if last is not None:
                last = last * fade + per_row((weight * psi[..., -1:].mT) @ columns, r)
            if norm is not None:
                norm = norm * fade + per_row(weight @ psi, r)
        bound = None if norm is None else cauchy_schwarz(phi, norm)
        if prepared.reader is not None:
            total, factor = prepared.reader.answer(total, last, phi)
            ref = ref if factor is None else ref + factor
        return total, ref, bound

    # The exact terms.

    def _exact_zones(
        self, part: Part, given: dict[str, Tensor], base: Tensor | None, dtype: torch.dtype
    ) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """What the rows of a part see exactly, the keys of their zone and the sinks that are not in it: keys and values
        (b, g, t, z, .), and what is added to the logits of their rows, (b, g, t, r c, z) or less."""
        layout, r = self.layout, self.call.groups
        found: list[Any] = []
        if self.call.near.window and layout.width:
            near = [None if (t := given.get(name)) is None else layout.zones(t) for name in ("k", "v", "shift")]
            bias = layout.bias(self.padded, part.span, given["k"].new_zeros((), dtype=dtype))
            bias = None if bias is None else layout.zones(bias).mT
            found.append((*near, plus(bias, layout.exact_mask(part, dtype, given["k"].device))))
        if self.sinks is not None:
            hidden = ~layout.sees_sinks(*self.sinks[1:], part)[:, None]
            names = ("sink_k", "sink_v", "sink_shift")
            first = [None if (t := given.get(name)) is None else t.unsqueeze(2) for name in names]
            found.append((*first, torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, MASKED)))
        zones = []
        for k, v, shift, mask in found:
            faded = None if shift is None or base is None else (shift.mT - base).to(dtype)
            zones.append((k.to(dtype), v.to(dtype), plus(faded, None if mask is None else per_row(mask, r))))
        return zones

    def _has_graph(self) -> bool:
        """Whether a gradient may need what is computed, so that none of it may be overwritten."""
        return self.call.composed or torch.is_grad_enabled()


class _Replayed(torch.autograd.Function):
    """Known rows as a sum of products, divided by its last column, den (..., n, 1).

    The products are `phi far`, with a `weight` the pairs of a zone, and those a b of exact terms (a, b). The kernel's
    count `factors` times, whose gradient reaches `own`, the log scale of phi. Rows that could not be divided are zero,
    and get no gradient. Autograd would hold the gradient of phi three times, for each product and for their sum.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, den: Tensor, factors: Sequence[Tensor], weight: Tensor | None, phi: Tensor, *rest: Any
    ) -> Tensor:
        ctx.factors = factors
        scores = None if weight is None else weighted(phi @ rest[2].mT, weight, overwrites=True)
        ctx.save_for_backward(rows, den, weight, scores, phi, *rest)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, den, weight, scores, phi, own, far, *terms = ctx.saved_tensors
        total = torch.cat([grad, -(grad * rows).sum(-1, keepdim=True)], dim=-1) / den
        g, *others = (total * factor for factor in ctx.factors)
        dphi, dfar = g @ far.mT, phi.mT @ g
        found: list[Any] = [dfar.sum(2, keepdim=True) if far.shape[2] == 1 < dfar.shape[2] else dfar]
        if weight is not None:
            psi, columns, scale, *terms = terms
            (g,) = others
            dscores = g @ columns.mT
            dscale = (dscores * scores).sum(-2, keepdim=True, dtype=scale.dtype)
            dscores = weighted(dscores, weight, overwrites=True)
            dphi.flatten(0, 2).baddbmm_(dscores.flatten(0, 2), psi.flatten(0, 2))
            found += [dscores.mT @ phi, scores.mT @ g, dscale]
        for a, b in zip(terms[::2], terms[1::2], strict=True):
            db = a.mT @ total
            found += [total @ b.mT, db.sum(2, keepdim=True) if b.shape[2] == 1 < db.shape[2] else db]
        down = None if own is None else (dphi * phi).sum(-1, keepdim=True)
        return None, None, None, None, dphi, down, *found


def weighted(scores: Tensor, weight: Tensor, *, overwrites: bool) -> Tensor:
    """Scores (b, g, t, r c, z) times what each key weighs in a row, (b, g, t, c, z)."""
    each = scores.unflatten(3, (-1, weight.shape[3]))
    return (each.mul_(weight.unsqueeze(3)) if overwrites else each * weight.unsqueeze(3)).flatten(3, 4)


def mixed(weight: Tensor, sums: Tensor) -> Tensor:
    """Weighted sums of blocks: weight (..., t, l) times (b, g, l, m, c)."""
    return (weight.to(sums.dtype) @ sums.flatten(3)).unflatten(-1, sums.shape[3:])


def prefix(sums: Tensor, refs: Tensor, first: Tensor, *, overwrites: bool) -> Tensor:
    """What precedes each of t blocks, (b, g, t, m, c).

    The sums of block i are relative to refs[i + 1], `first` to refs[0]. One product with a triangle of weights:
    quadratic in t, with a small constant.
    """
    if sums.shape[2] == 1:
        return first.unsqueeze(2)
    # What a sum relative to refs[j + 1] weighs relative to refs[i].
    weight = (refs[..., None, 1:] - refs[..., :-1, None]).clamp_max(0).exp().tril(-1)
    states = mixed(weight, sums)
    if first.stride(-1) == 0:  # the zero before all keys
        return states
    fade = (refs[..., :1] - refs[..., :-1]).to(sums.dtype).exp()[..., None, None]
    return torch.addcmul(states, first.unsqueeze(2), fade, out=states if overwrites else None)


def per_row(x: Tensor, r: int) -> Tensor:
    """(b, g, t, c, d) to (b, g, t, r c, d): what all query heads of a group share; (.., 1, d) stays."""
    return x if r == 1 or x.shape[3] == 1 else x.repeat(1, 1, 1, r, 1)


def plus(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """x + y, where None stands for 0."""
    return y if x is None else x if y is None else x + y
