"""The one scan: for every block of rows the pairs of its zone, and the sums of all blocks of keys outside it.

A row is `(sum_far + sum_zone + sum_sinks) / normaliser`. The far sums are read by the kernel from sums of blocks; pairs
of the zone are exact, or the kernel's, or some of both (`layout`). Every row has a reference of its own, the largest
log weight that it sees, so that one formula serves all scales and no statistic of a later key enters an earlier row's
arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bochner import _products
from bochner.attention.autograd import Output, Scanned, random_state, recomputed
from bochner.attention.features import EMPTY, MASKED, PreparedMap, tied
from bochner.attention.layout import Layout, Near, Part, by_head
from bochner.attention.softmax import attend_zones, exact_logits
from bochner.attention.state import (
    Keys,
    State,
    Sums,
    add_keys,
    cauchy_schwarz,
    divided,
    key_sums,
    normaliser,
    ones_beside,
)

ELEMENTS = 5 * 2**20  # features and logits of one part on the CPU: 20 MB in float32
ELSEWHERE = 64  # times as many on other devices
OUTER = 64  # blocks whose sums are added up at a time, where all are
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
    normalize: bool = True
    recompute: bool = True
    goes_on: bool = False

    @classmethod
    def of(cls, near: Near, prepared: PreparedMap, q: Tensor, k: Tensor, *how: bool) -> Call:
        """For q (b, h, n, d) and k (b, g, s, d); then whether to normalise, to recompute and to go on."""
        composed = _products.is_composed()
        looks = _products.LOOKS and not composed and q.device.type == "cpu"
        return cls(near, prepared, q.shape[1] // k.shape[1], composed, looks, *how)


class Result(NamedTuple):
    """Rows (b, g, r n, v), the state after the keys, and which rows (b, g, r n, 1) were given a mean; None for none."""

    out: Tensor
    state: State | None = None
    bad: Tensor | None = None


class Sinks(NamedTuple):
    """The first t unpadded keys; place (b, t) relative to row 0, and whether there is one (b, t).

    Without places they are those of the first t rows.
    """

    keys: Keys
    place: Tensor | None = None
    there: Tensor | None = None

    def places(self) -> tuple[Tensor, Tensor]:
        if self.place is None or self.there is None:
            here = torch.arange(self.keys.k.shape[2], device=self.keys.k.device).expand(self.keys.k.shape[0], -1)
            return here, torch.ones_like(here, dtype=torch.bool)
        return self.place, self.there


def rows_at_once(call: Call, layout: Layout | None, like: Tensor) -> int | None:
    """How many rows of all sequences and heads make a part, or keys without a layout: what they need stays in cache.

    None for all of them, where there is one graph.
    """
    if call.composed:
        return None
    phi, r, width = call.map.phi, call.groups, 0 if layout is None else layout.width
    m = phi.feature_dim
    if layout is not None and layout.near.in_blocks:  # behind each part the keys are summed up once more
        row, share = r * (m + (width if torch.is_grad_enabled() or layout.near.is_causal else 0)), 1
    else:
        row = 2 * ((1 + r) * m + r * width) if width else (m if layout is None else r * m)
        # Most maps hold several temporaries as large as their features, the exponential ones none; so does a backward.
        share = (1 if phi.is_exponential else 4) * (2 if torch.is_grad_enabled() else 1)
    elements = ELEMENTS // share * (1 if like.device.type == "cpu" else ELSEWHERE)
    return max(64, elements // (like.shape[0] * like.shape[1] * row))


def absorb_keys(call: Call, sums: Sums, keys: Keys) -> Sums:
    """Sums after more keys (b, g, s, .), of which padding and sinks add nothing: some at a time."""
    k, v, mask, shift = keys.k, keys.v, keys.far_holes, keys.shift
    size, again = rows_at_once(call, None, k) or k.shape[2], call.recompute and torch.is_grad_enabled()
    again = again and not call.composed
    # With gradients the map is made anew: what it holds may have been computed without.
    prepared = call.map.computed_from(call.map.tensors()) if again else call.map
    prepared.function("key")  # made before it is used: a recomputation would find it there

    def absorbed(value: Tensor, ref: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shift: Tensor | None) -> Sums:
        return add_keys(Sums(value, ref), prepared.features("key", k, shift), v.to(prepared.dtype), mask, prepared)

    none = [None] * k.shape[2]
    holes, shifts = none if mask is None else mask.split(size, 1), none if shift is None else shift.split(size, 2)
    for part in zip(k.split(size, 2), v.split(size, 2), holes, shifts, strict=False):
        # Features are not kept for the backward pass, but computed again, with the same random numbers.
        options: Any = {"use_reentrant": False, "preserve_rng_state": not prepared.phi.is_exponential}
        sums = checkpoint(absorbed, *sums, *part, **options) if again else absorbed(*sums, *part)
    return sums


def scan_rows(
    call: Call,
    q: Tensor,
    keys: Keys,
    sinks: Sinks | None,
    sums: Sums,
    layout: Layout,
    *,
    fresh: bool,
    goes_on: bool = False,
) -> tuple[Tensor, Tensor | None, Sums]:
    """Rows of q (b, g, r, n, d) laid out among keys, which are bad, and the sums after them."""
    parts = layout.parts(rows_at_once(call, layout, keys.k))
    first = keys.part(slice(0, 0)) if sinks is None else sinks.keys
    tensors, holes, refs = [q, keys.k, keys.v, first.k, first.v], (keys.padded, keys.far_holes), None
    if call.near.window and not call.near.is_causal and len(parts) > 1:
        # What lies behind the keys of each part, from the last to the first.
        bounds = [min(max(part.span.stop - layout.front, 0), layout.keys) for part in parts]
        found = [Sums(torch.zeros_like(sums.value), torch.full_like(sums.ref, EMPTY))]
        for i, j in reversed(list(pairwise(bounds))):
            some = keys.part(slice(i, j))
            found.append(absorb_keys(call, found[-1], some) if j > i else found[-1])
        refs = torch.stack([s.ref for s in reversed(found)], dim=2)
        tensors.append(torch.stack([s.value for s in reversed(found)], dim=2))
    elif keys.shift is not None:
        assert first.shift is not None
        tensors += [keys.shift, first.shift]
    out, bad, *after = Scan(call, layout, parts, holes, sinks, fresh, goes_on, refs).run(tensors, sums)
    return out, bad, Sums(*after)


class Scan:
    """Rows (b, g, r, n, v) over keys laid out around them, part by part.

    `take` finds in the tensors what a part needs, and `body` computes its rows from that and from the sums of all
    blocks before its zones, which are carried from part to part. `replay` does the same with the graph of a backward
    pass, given the rows and what was kept of them. `put` adds the gradients of what was taken to those of the tensors.

    Tensors: q (b, g, r, n, d); k, v (b, g, s, .); keys and values of sinks (b, g, t, .); of bidirectional windows the
    sums behind each part (b, g, parts, m, c), whose references are `behind` (b, g, parts). `holes`, `far_holes` (b, s):
    keys that count for nothing, and those that the kernel leaves out, None for none. With decay instead of `behind` the
    shifts of keys (b, g, s, 1) and of sinks. `fresh`: whether no key comes
    before the first part. `goes_on`: whether the sums after the last part are wanted.
    """

    def __init__(
        self,
        call: Call,
        layout: Layout,
        parts: list[Part],
        holes: tuple[Tensor | None, Tensor | None],
        sinks: Sinks | None,
        fresh: bool,
        goes_on: bool,
        behind: Tensor | None = None,
    ) -> None:
        self.call, self.layout, self.parts, self.sinks, self.fresh = call, layout, parts, sinks, fresh
        (self.holes, self.far_holes), self.goes_on, self.behind = holes, goes_on, behind
        # Whether rows are sums of products of what they see, divided by their normaliser.
        self.can_replay = call.normalize and not call.map.has_constant

    def run(self, tensors: Sequence[Tensor], carry: Sums) -> Scanned:
        """Rows, which are bad, and the sums after the last part: differentiable in tensors, carry and map."""
        if torch.is_grad_enabled() and self.call.recompute and not self.call.composed:
            return recomputed(self, self.call.map, tensors, carry)
        return self.forward(self.call.map, tensors, carry)

    def forward(
        self, prepared: PreparedMap, tensors: Sequence[Tensor], carry: Sums, before: list[Any] | None = None
    ) -> Scanned:
        """The same by plain operations. `before` gets of each part the carry, the random state and what is kept."""
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
        layout, (q, k, v, *rest) = self.layout, tensors
        found = [layout.take_rows(q, part), layout.take(k, part.span), layout.take(v, part.span), *rest[:2]]
        if self.behind is not None:
            return [*found, rest[2][:, :, part.number]]
        return found if len(rest) == 2 else [*found, layout.take(rest[2], part.span), rest[3]]

    def put(self, part: Part, totals: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        for i, (total, grad) in enumerate(zip(totals, grads, strict=True)):
            if grad is None:
                continue
            if i == 0:
                self.layout.put_rows(total, part, grad)
            elif i == 5 and self.behind is not None:
                total[:, :, part.number] += grad
            elif i in (1, 2, 5):
                self.layout.put(total, part.span, grad)
            else:
                total += grad

    def join(self, rows: Sequence[Tensor]) -> Tensor:
        """Parts (b, g, t, r c, .) as all rows, (b, g, r, n, .)."""
        heads = [by_head(t, self.call.groups) for t in rows]
        joined = heads[0] if len(heads) == 1 else torch.cat(heads, dim=3)
        return joined[:, :, :, self.layout.lead : self.layout.lead + self.layout.rows]

    def body(self, prepared: PreparedMap, part: Part, taken: Sequence[Tensor], carry: Sums) -> Output:
        x, k, v, sink_k, sink_v, *more = taken
        x, k, v = (t.to(prepared.dtype) for t in (x, k, v))
        shifts, behind = self._shifts(part, more), None if self.behind is None else more[0]
        # 1. The keys that the kernel sees of the zones, and the sums of all others.
        keys = self._kernel_keys(prepared, part, k, v, shifts)
        far, carry = self._far(part, keys, carry, behind)
        # 2. What the kernel says of each row, relative to exp(log_weight).
        phi, own = (t.unflatten(2, x.shape[2:4]) for t in prepared.features("query", x.flatten(2, 3)))
        total, log_weight, bound = self._kernel(prepared, part, phi, far, keys)
        if not self.call.near.exact and self.call.normalize:
            den, bad = normaliser(total[..., -1:], bound, prepared.floor, looks=self.call.looks)
            rows = divided(total[..., :-1], den, bad)
            return Output(carry, rows, bad, (den.clone(),) * 2 if self.can_replay else None)
        # 3. The exact terms, and one reference for all that a row sees.
        log_weight = (log_weight if shifts is None else (log_weight - shifts.base).to(own.dtype)) + own
        ref, exact, weights, sums = log_weight.detach(), None, None, []
        if self.call.near.window and self.layout.width:
            zones, mask = self.layout.zones, self._exact_mask(part, k, shifts)
            zone, exact = attend_zones(x, zones(k), zones(v), mask, prepared.scale, prepared.phi.kernel)
            ref = torch.maximum(ref, exact.detach())
        if self.sinks is not None:
            weights = self._sink_logits(prepared, part, x, sink_k.to(x.dtype), shifts)
            ref = torch.maximum(ref, weights.detach().amax(-1, keepdim=True))
        ref = ref.clamp_min(EMPTY)
        # 4. One normaliser for all of them; exact terms are their own bound.
        share = (log_weight - ref).exp()
        if exact is not None:
            exact = (exact - ref).exp()
            sums.append(exact)
        if weights is not None:
            weights = (weights - ref).exp()
            sums.append(weights.sum(-1, keepdim=True))
        sum_exact = torch.zeros_like(ref) if not sums else sums[0] if len(sums) == 1 else sums[0] + sums[1]
        bound = None if bound is None else (bound * share + sum_exact).detach()
        den, bad = normaliser(
            torch.addcmul(sum_exact, total[..., -1:], share), bound, prepared.floor, looks=self.call.looks
        )
        # 5. The values. Rows are divided last: the gradient of 1 / den would underflow.
        num = total[..., :-1] if bad is None or not self.call.normalize else total[..., :-1].masked_fill(bad, 0)
        num = num * share
        if exact is not None:
            num = self._sum(num, zone, exact)
        if weights is not None:
            more = weights.flatten(2, 3) @ sink_v.to(num.dtype)
            num = self._sum(num, more.unflatten(2, num.shape[2:4]))
        if not self.call.normalize:  # in two steps: each alone may underflow
            half = (0.5 * (ref if shifts is None else ref + shifts.of_rows(part, self.call.groups).to(ref.dtype))).exp()
            return Output(carry, num * half * half)
        return Output(carry, divided(num, den, bad), bad, (den, ref) if self.can_replay else None)

    def replay(
        self,
        prepared: PreparedMap,
        part: Part,
        taken: Sequence[Tensor],
        carry: Sums,
        rows: Tensor,
        kept: tuple[Tensor, Tensor],
    ) -> Output:
        """The rows of `body` for a backward pass: the products that they are sums of are not computed again.

        Through the graph of `body` forward and backward would take 1.2 times as long, with windows up to 1.5 times.
        """
        x, k, v, sink_k, sink_v, *more = taken
        x, k, v = (t.to(prepared.dtype) for t in (x, k, v))
        shifts, behind = self._shifts(part, more), None if self.behind is None else more[0]
        layout, r, (den, ref) = self.layout, self.call.groups, kept
        keys = self._kernel_keys(prepared, part, k, v, shifts)
        far, carry = self._far(part, keys, carry, behind)
        phi, own = (t.unflatten(2, x.shape[2:4]) for t in tied(prepared.features("query", x.flatten(2, 3))))
        log_far, exact = far.ref[..., None, None], self.call.near.exact
        terms: list[tuple[Tensor, Tensor, Tensor | None]] = []
        if keys is not None and layout.has_kernel_pairs:
            psi, scale, columns = self._zone_keys(keys, part)
            top, decay = self._decay(scale.mT, part, log_far)
            scores = (phi @ psi.mT).unflatten(3, (r, -1)) * decay.unsqueeze(3)
            log_near = _per_row(top, r)
            if exact and shifts is not None:
                log_near = (log_near - shifts.base).to(own.dtype)
            terms.append((scores.flatten(3, 4), columns, (log_near + own - ref).exp() if exact else None))
            share = torch.ones_like(own) if exact else (log_far - log_near).to(own.dtype).exp()
        else:
            share = torch.ones_like(own)
        if exact:
            log_far = log_far if shifts is None else (log_far - shifts.base).to(own.dtype)
            share = (log_far + own - ref).exp()
        terms.append((phi, far.value, share))
        if self.call.near.window and layout.width:
            logits, mask = (
                exact_logits(x, layout.zones(k), prepared.scale, prepared.phi.kernel),
                self._exact_mask(part, k, shifts),
            )
            logits = logits if mask is None else logits + mask
            terms.append(((logits - ref).exp(), layout.zones(ones_beside(v)), None))
        if self.sinks is not None:
            weights = (self._sink_logits(prepared, part, x, sink_k.to(x.dtype), shifts) - ref).exp()
            terms.append((weights, ones_beside(sink_v.to(x.dtype)).unsqueeze(2), None))
        factors = [factor for _, _, factor in terms]
        return Output(carry, replayed(rows, den, factors, [t for a, b, _ in terms for t in (a, b)]))

    # The kernel.

    def _shifts(self, part: Part, more: Sequence[Tensor]) -> Shifts | None:
        if self.behind is not None or not more:
            return None
        own = self.layout.own(more[0], part)
        return Shifts(more[0], more[1], own, own[..., :1, :].detach())

    def _kernel_keys(
        self, prepared: PreparedMap, part: Part, k: Tensor, v: Tensor, shifts: Shifts | None
    ) -> KernelKeys | None:
        """Features of the keys laid out around a part that the kernel needs, by blocks (b, g, l, c, .), with values."""
        layout = self.layout
        if layout.single and (layout.near.in_blocks or not layout.width):
            return None
        c, (first, last) = layout.keys if layout.single else layout.block, (part.kernel.start, part.kernel.stop)
        shift = None if shifts is None else shifts.keys
        if (last - first) * c < k.shape[2]:
            some = slice(first * c, last * c)
            k, v, shift = k[:, :, some], v[:, :, some], None if shift is None else shift[:, :, some]
        start = part.span.start + first * c
        features = prepared.features("key", k, shift)
        psi, scale = features
        bias = layout.bias(self.far_holes, slice(start, start + k.shape[2]), scale)
        if bias is not None:
            scale = scale + bias
        columns = prepared.phi.columns(features, v) if prepared.has_constant else None
        return KernelKeys(psi, scale, v, columns).map(lambda t: t.unflatten(2, (-1, c)))

    def _far(self, part: Part, keys: KernelKeys | None, carry: Sums, behind: Tensor | None = None) -> tuple[Sums, Sums]:
        """The sums outside the zone of each block of rows, (b, g, t, m, c), and those carried on."""
        layout, t = self.layout, part.blocks.stop - part.blocks.start
        if keys is None or layout.single:
            return Sums(carry.value.unsqueeze(2), carry.ref.unsqueeze(-1)), carry
        gone = max(0, min(layout.gone - part.blocks.start, t)) if part.rows.stop == layout.block else 0
        if part.is_last and not self.goes_on:
            gone = 0
        if self.call.near.is_causal:  # references that grow, so that no later key moves a row even by rounding
            if t < keys.psi.shape[2]:
                keys = keys.map(lambda x: x[:, :, :t])
            tops = keys.scale.detach().amax((-2, -1))
            refs = torch.cat([carry.ref.unsqueeze(-1), tops], dim=-1).cummax(-1).values
            sums = key_sums(keys.psi, keys.scale, keys.v, refs[..., 1:], keys.columns)
            first = None if self.fresh and part.number == 0 else carry.value
            far, after = prefix(sums, refs, first, gone, has_graph=self._has_graph())
            return Sums(far, refs[..., :t]), carry if after is None else Sums(after, refs[..., gone].clone())
        ref = torch.maximum(keys.scale.detach().amax((-3, -2, -1)), carry.ref)
        if self.behind is not None:
            refs = self.behind[:, :, part.number]
            ref = torch.maximum(ref, refs)
        sums = key_sums(keys.psi, keys.scale, keys.v, ref.unsqueeze(-1).expand(keys.scale.shape[:3]), keys.columns)
        row = torch.arange(t, device=sums.device)[:, None]
        block = torch.arange(sums.shape[2], device=sums.device)[None, :] + part.kernel.start
        outside = (block < row) | (block >= row + 1 + layout.before + layout.after)
        far = mixed(outside.to(sums.dtype), sums)
        if behind is not None:
            before = carry.value * (carry.ref - ref).exp()[..., None, None]
            far = self._sum(far, (before + behind * (refs - ref).exp()[..., None, None]).unsqueeze(2))
            if gone:
                carry = Sums(mixed((block < gone).to(sums.dtype), sums).squeeze(2) + before, ref)
        return Sums(far, ref.unsqueeze(-1).expand(far.shape[:3])), carry

    def _kernel(
        self, prepared: PreparedMap, part: Part, phi: Tensor, far: Sums, keys: KernelKeys | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Values and normaliser (b, g, t, r c, v + 1) by the kernel, relative to exp(log_weight), and their bound."""
        layout, r = self.layout, self.call.groups
        total, ref = phi @ far.value, far.ref[..., None, None]
        last = far.value[..., -1:, :] if prepared.has_constant else None
        norm = None if prepared.positive else far.value[..., -1].unsqueeze(-2)
        if keys is not None and layout.has_kernel_pairs:
            psi, scale, columns = self._zone_keys(keys, part)
            top, decay = self._decay(scale.mT, part, ref)
            fade, scores = _per_row((ref - top).to(phi.dtype).exp(), r), (phi @ psi.mT).unflatten(3, (r, -1))
            scores = scores * decay.unsqueeze(3) if self._has_graph() else scores.mul_(decay.unsqueeze(3))
            total = torch.addcmul(scores.flatten(3, 4) @ columns, total, fade)
            if last is not None:
                last = last * fade + _per_row((decay * psi[..., -1:].mT) @ columns, r)
            if norm is not None:
                norm = norm * fade + _per_row(decay @ psi, r)
            ref = _per_row(top, r)
        bound = None if norm is None else cauchy_schwarz(phi, norm)
        if last is not None:
            total, factor = prepared.phi.answer(total, last, phi)
            ref = ref if factor is None else ref + factor
        return total, ref, bound

    def _zone_keys(self, keys: KernelKeys, part: Part) -> tuple[Tensor, Tensor, Tensor]:
        """Features, log scales and columns of what the kernel sees of each zone pair by pair, (b, g, t, z, .)."""
        t = part.blocks.stop - part.blocks.start
        if not (self.layout.single or self.layout.is_triangle):
            keys = keys.map(lambda x: self.layout.zones(x.flatten(2, 3)))
        elif t < keys.psi.shape[2]:
            keys = keys.map(lambda x: x[:, :, :t])
        return keys.psi, keys.scale, ones_beside(keys.v) if keys.columns is None else keys.columns

    def _decay(self, scale: Tensor, part: Part, ref: Tensor) -> tuple[Tensor, Tensor]:
        """The reference of each row (b, g, t, c, 1), and the weights of the keys that the kernel sees, (.., c, z).

        `scale` (b, g, t, 1, z): those of the keys; `ref` (b, g, t, 1, 1): that of the sums outside.
        """
        dtype = self.call.map.dtype
        if not self.layout.is_triangle:
            scale = scale.masked_fill(self.layout.kernel_mask(part, scale.device), MASKED)
            top = torch.maximum(ref, scale.detach().amax(-1, keepdim=True))
            return top, (scale - top).to(dtype).exp_()
        top = torch.maximum(ref, scale.detach().cummax(-1).values.mT[..., part.rows, :])
        weight = (scale - top).to(dtype)
        if self.call.composed or scale.requires_grad:
            return top, weight.clamp_max(0).exp().tril(part.rows.start)
        return top, weight.exp_().tril_(part.rows.start)  # infinite perhaps where it is cut off

    def _has_graph(self) -> bool:
        """Whether a gradient may need what is computed, so that none of it may be overwritten."""
        return self.call.composed or torch.is_grad_enabled()

    def _sum(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """`x + y weight`, in the memory of x where it may be."""
        out = None if self._has_graph() else x
        return torch.add(x, y, out=out) if weight is None else torch.addcmul(x, y, weight, out=out)

    # The exact terms.

    def _exact_mask(self, part: Part, k: Tensor, shifts: Shifts | None) -> Tensor | None:
        """What is added to the exact logits of zones, (b, g, t, r c or 1, z) or less; None for nothing."""
        exact, bias = self.layout.exact_mask(part, k), self.layout.bias(self.holes, part.span, k)
        if exact is not None and self.call.groups > 1:
            exact = exact.repeat(self.call.groups, 1)
        bias = None if bias is None else self.layout.zones(bias).mT
        if shifts is not None:
            decay = (self.layout.zones(shifts.keys).mT - shifts.base).to(k.dtype)
            bias = decay if bias is None else decay + bias
        return exact if bias is None else bias if exact is None else bias + exact

    def _sink_logits(self, prepared: PreparedMap, part: Part, x: Tensor, k: Tensor, shifts: Shifts | None) -> Tensor:
        """Exact logits (b, g, t, r c, s) of the sinks that a row sees beside its zone."""
        assert self.sinks is not None
        sees = self.layout.sees_sinks(self.sinks, part)
        sees = sees if sees.shape[2] == 1 else sees.repeat(1, 1, self.call.groups, 1)
        logits = exact_logits(x.flatten(2, 3), k, prepared.scale, prepared.phi.kernel).unflatten(2, x.shape[2:4])
        if shifts is not None:
            logits = logits + (shifts.sinks.unsqueeze(2).mT - shifts.base).to(logits.dtype)
        return logits.masked_fill(~sees.unsqueeze(1), MASKED)


class Shifts(NamedTuple):
    """What decay adds to log weights: of the keys around a part and of the sinks (b, g, s, 1), and of the keys at the
    places of its rows (b, g, t, c, 1). Exact terms and what they are compared with are relative to `base` (b, g, t, 1,
    1), the first of those."""

    keys: Tensor
    sinks: Tensor
    own: Tensor
    base: Tensor

    def of_rows(self, part: Part, r: int) -> Tensor:
        """The log of the factor that `base` stands for in each row, (b, g, t, r c, 1); 0 in rows beyond the last."""
        return _per_row((self.base - self.own[..., part.rows, :]).clamp_max(0), r)


class KernelKeys(NamedTuple):
    """Features, log scales, values and other columns of keys by blocks, (b, g, l, c, .)."""

    psi: Tensor
    scale: Tensor
    v: Tensor
    columns: Tensor | None

    def map(self, f: Callable[[Tensor], Tensor]) -> KernelKeys:
        return KernelKeys(f(self.psi), f(self.scale), f(self.v), None if self.columns is None else f(self.columns))


def replayed(rows: Tensor, den: Tensor, factors: Sequence[Tensor | None], terms: Sequence[Tensor]) -> Tensor:
    """Known rows as `sum_i factor_i a_i b_i` divided by its last column, for autograd: terms are a_1, b_1, a_2, b_2 ...

    den (..., n, 1): the last column; rows that could not be divided are zero, and get no gradient.
    """
    out: Tensor = _Replayed.apply(rows, den, factors, *terms)
    return out


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, den: Tensor, factors: Sequence[Tensor | None], *terms: Tensor) -> Tensor:
        ctx.factors = factors
        ctx.save_for_backward(rows, den, *terms)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, den, *terms = ctx.saved_tensors
        total = torch.cat([grad, -(grad * rows).sum(-1, keepdim=True)], dim=-1) / den
        found: list[Tensor] = []
        for a, b, factor in zip(terms[::2], terms[1::2], ctx.factors, strict=True):
            g = total if factor is None else total * factor
            db = a.mT @ g
            found += [g @ b.mT, db.sum(2, keepdim=True) if b.shape[2] == 1 < db.shape[2] else db]
        return None, None, None, *found


def mixed(weight: Tensor, sums: Tensor) -> Tensor:
    """Weighted sums of blocks: weight (..., t, l) times (b, g, l, m, c)."""
    return (weight.to(sums.dtype) @ sums.flatten(3)).unflatten(-1, sums.shape[3:])


def prefix(
    sums: Tensor, refs: Tensor, first: Tensor | None, gone: int, *, has_graph: bool
) -> tuple[Tensor, Tensor | None]:
    """What precedes each of t blocks, (b, g, t, m, c), and what precedes block `gone`, None if that is the first.

    The sums of block i are relative to refs[i + 1], `first` to refs[0]. One product with a triangle of weights:
    quadratic in t, with a small constant; while compiling, when all blocks are taken at once, in two levels.
    """
    t = sums.shape[2]
    if torch.compiler.is_compiling() and (_products.is_exporting() or t > OUTER):
        states = _nested_prefix(sums, refs, torch.zeros_like(sums[:, :, 0]) if first is None else first)
        return states[:, :, :t], states[:, :, gone]
    count = t + 1 if gone == t else t  # of prefixes that are wanted
    states = mixed(_fading(refs)[..., :count, :], sums)
    if first is not None:
        fade = (refs[..., :1] - refs[..., :count]).to(sums.dtype).exp()[..., None, None]
        states = torch.addcmul(states, first.unsqueeze(2), fade, out=None if has_graph else states)
    if not gone:
        return states, None
    after = states[:, :, gone]
    return states[:, :, :t], after if has_graph else after.clone()  # of all the memory, what is carried on alone


def _fading(refs: Tensor) -> Tensor:
    """What a sum relative to refs[j + 1] weighs relative to refs[i], (..., t + 1, t); 0 for i <= j."""
    return (refs[..., None, 1:] - refs[..., :, None]).clamp_max(0).exp().tril(-1)


def _nested_prefix(sums: Tensor, refs: Tensor, first: Tensor) -> Tensor:
    """The same in two levels: within groups of `OUTER` blocks, and over the sums of the groups."""
    t = sums.shape[2]
    extra = 2 * OUTER + -t % OUTER  # so many groups that none is a special case to the compiler
    sums, last = pad(sums, (0, 0, 0, 0, 0, extra)), refs[..., -1:]
    ends = torch.cat([refs[..., 1:], last.expand(*last.shape[:-1], extra)], dim=-1).unflatten(-1, (-1, OUTER))
    starts = torch.cat([refs[..., :1], ends[..., :-1, -1]], dim=-1)  # before each group
    refs = torch.cat([starts.unsqueeze(-1), ends], dim=-1)  # (b, g, groups, OUTER + 1)
    inside = _fading(refs).to(sums.dtype) @ sums.flatten(3).unflatten(2, (-1, OUTER))  # (b, g, groups, OUTER + 1, m c)
    outer = torch.cat([starts, refs[..., -1, -1:]], dim=-1)
    fade = (outer[..., :1] - outer).to(sums.dtype).exp().unsqueeze(-1)
    before = _fading(outer).to(sums.dtype) @ inside[..., -1, :] + fade * first.flatten(2)[:, :, None]
    states = inside + before[..., :-1, None, :] * (refs[..., :1] - refs).to(sums.dtype).exp().unsqueeze(-1)
    ends = torch.cat([states[..., :-1, :].flatten(2, 3), states[:, :, -1, -1:]], dim=2)[:, :, : t + 1]
    return ends.unflatten(-1, sums.shape[3:])


def _per_row(x: Tensor, r: int) -> Tensor:
    """(b, g, t, c, d) to (b, g, t, r c, d): what all query heads of a group share."""
    return x if r == 1 else x.repeat(1, 1, 1, r, 1)
