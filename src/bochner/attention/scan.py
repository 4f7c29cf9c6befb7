"""The one scan: for every block of rows the pairs of its zone, and the sums of all blocks of keys outside it.

A row is `(sum_far + sum_zone + sum_sinks) / normaliser`. The far sums are read by the kernel from sums of blocks; pairs
of the zone are exact, or the kernel's, or some of both (`layout`). Every row has a reference of its own, the largest
log weight that it sees, so that one formula serves all scales and no statistic of a later key enters an earlier row's
arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bochner._products import in_place, is_composed, is_exporting, memory, product
from bochner.attention.autograd import Output, Scan, run_scan
from bochner.attention.features import EMPTY, MASKED, PreparedMap, tied
from bochner.attention.layout import Layout, Near, Part, by_head
from bochner.attention.softmax import attend_zones, exact_logits
from bochner.attention.state import Sums, add, cauchy_schwarz, key_sums, normaliser, ones_beside, spread_mask

ELEMENTS = 5 * 2**20  # features and logits of one part on the CPU: 20 MB in float32
ELSEWHERE = 64  # times as many on other devices
OUTER = 64  # blocks whose sums are added up at a time, where all are
pad = torch.nn.functional.pad


@dataclass(frozen=True)
class Call:
    """What is asked of attention. `groups`: query heads per key head, r. `goes_on`: whether the state is wanted."""

    near: Near
    map: PreparedMap
    groups: int = 1
    normalize: bool = True
    recompute: bool = True
    goes_on: bool = False


class Sinks(NamedTuple):
    """The first t unpadded keys: k, v (b, g, t, .); place (b, t) relative to row 0, and whether there is one (b, t).

    Without places they are those of the first t rows.
    """

    k: Tensor
    v: Tensor
    place: Tensor | None
    there: Tensor | None

    def places(self) -> tuple[Tensor, Tensor]:
        if self.place is None or self.there is None:
            here = torch.arange(self.k.shape[2], device=self.k.device).expand(self.k.shape[0], -1)
            return here, torch.ones_like(here, dtype=torch.bool)
        return self.place, self.there


def rows_at_once(call: Call, layout: Layout | None, like: Tensor) -> int:
    """How many rows of all sequences and heads make a part, or keys without a layout: what they need stays in cache."""
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


@dataclass(frozen=True)
class KeyScan(Scan):
    """Adds keys to sums, some at a time: tensors k and v (b, g, s, .), `mask` (b, s) or None."""

    parts: list[slice]
    mask: Tensor | None

    def take(self, part: slice, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t[..., part, :] for t in tensors]

    def put(self, part: slice, totals: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        for total, grad in zip(totals, grads, strict=True):
            if grad is not None:
                total[..., part, :] += grad

    def body(self, prepared: PreparedMap, part: slice, taken: Sequence[Tensor], carry: Sums) -> Output:
        k, v = taken
        psi, scale = features = prepared.features("key", k)
        if self.mask is not None:
            scale = scale.masked_fill(spread_mask(self.mask[:, part]), MASKED)
        v, ref = v.to(psi.dtype), scale.detach().amax((-2, -1))
        sums = key_sums(psi, scale, v, ref, prepared.phi.columns(features, v))
        return Output(add(carry, Sums(sums, ref)))


def absorb_keys(call: Call, sums: Sums, k: Tensor, v: Tensor, mask: Tensor | None) -> Sums:
    """Sums after more keys k, v (b, g, s, .), of which those of the mask (b, s) add nothing."""
    s = k.shape[2]
    size = s if is_composed() else rows_at_once(call, None, k)
    parts = [slice(i, min(i + size, s)) for i in range(0, s, size)]
    _, _, *new = run_scan(KeyScan(parts, mask), call.map, (k, v), sums, recompute=call.recompute)
    return Sums(*new)


@dataclass(frozen=True)
class RowScan(Scan):
    """Rows (b, g, r, n, v) over keys laid out around them; carries the sums of all blocks before a part's zones.

    Tensors: q (b, g, r, n, d); k, v (b, g, s, .); keys and values of sinks (b, g, t, .); of bidirectional windows the
    sums behind each part and their reference (b, g, parts, m, c), (b, g, parts). `holes`, `far_holes` (b, s): keys that
    count for nothing, and those that the kernel leaves out, None for none.
    """

    call: Call
    layout: Layout
    parts: list[Part]
    holes: Tensor | None
    far_holes: Tensor | None
    sinks: Sinks | None
    fresh: bool  # whether no key comes before the first part
    goes_on: bool  # whether the sums after the last part are wanted
    behind: Tensor | None = None  # references

    def take(self, part: Part, tensors: Sequence[Tensor]) -> list[Tensor]:
        q, k, v, *rest = tensors
        span = self.layout.span(part.blocks)
        found = [self.layout.take_rows(q, part)]
        found += [self.layout.take(t, span, name=name) for t, name in ((k, "zone keys"), (v, "zone values"))]
        found += rest[:2]
        return found if self.behind is None else [*found, rest[2][:, :, self.parts.index(part)]]

    def put(self, part: Part, totals: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        span = self.layout.span(part.blocks)
        for i, (total, grad) in enumerate(zip(totals, grads, strict=True)):
            if grad is None:
                continue
            if i == 0:
                self.layout.put_rows(total, part, grad)
            elif i < 3:
                self.layout.put(total, span, grad)
            elif i < 5:
                total += grad
            else:
                total[:, :, self.parts.index(part)] += grad

    def join(self, rows: Sequence[Tensor]) -> Tensor:
        """Parts (b, g, t, r c, .) as all rows, (b, g, r, n, .)."""
        layout, heads = self.layout, [by_head(t, self.call.groups) for t in rows]
        joined = heads[0] if len(heads) == 1 else torch.cat(heads, dim=3)
        return joined[:, :, :, layout.lead : layout.lead + layout.rows]

    def pick(self, part: Part, rows: Tensor) -> Tensor:
        return self.layout.take_rows(rows, part)

    def body(self, prepared: PreparedMap, part: Part, taken: Sequence[Tensor], carry: Sums) -> Output:
        x, k, v, sink_k, sink_v, *behind = taken
        x, k, v = (t.to(prepared.dtype) for t in (x, k, v))
        # 1. The keys that the kernel sees of the zones, and the sums of all others.
        keys = self._kernel_keys(prepared, part, k, v)
        far, carry = self._far(prepared, part, keys, carry, *behind)
        # 2. What the kernel says of each row, relative to exp(log_weight).
        phi, own = (t.unflatten(2, x.shape[2:4]) for t in prepared.features("query", x.flatten(2, 3)))
        total, log_weight, bound = self._kernel(prepared, part, phi, far, keys)
        if not self.call.near.exact and self.call.normalize:
            den = normaliser(total[..., -1:], bound, prepared.floor)
            kept = (den.value.clone(),) * 2 if self._can_replay(prepared) else None  # it may lie in memory used again
            return Output(carry, den.divide(total[..., :-1]), den.bad, kept)
        log_weight = log_weight + own
        # 3. The exact terms, and one reference for all that a row sees.
        ref, zone, sinks = log_weight.detach(), None, None
        if self.call.near.window and self.layout.width:
            hidden = self._hidden(part, k)
            zones = self.layout.zones
            zone = attend_zones(x, zones(k), zones(v), hidden, prepared.scale, prepared.phi.kernel)
            ref = torch.maximum(ref, zone[1].detach())
        if self.sinks is not None:
            sinks = self._sink_logits(prepared, part, x, sink_k.to(x.dtype))
            ref = torch.maximum(ref, sinks.detach().amax(-1, keepdim=True))
        ref = ref.clamp_min(EMPTY)
        # 4. One normaliser for all of them.
        share, exact = (log_weight - ref).exp(), None if zone is None else (zone[1] - ref).exp()
        weights = None if sinks is None else (sinks - ref).exp()
        sums = [t if t.shape[-1] == 1 else t.sum(-1, keepdim=True) for t in (exact, weights) if t is not None]
        sum_exact = torch.zeros_like(ref) if not sums else sums[0] if len(sums) == 1 else sums[0] + sums[1]
        if bound is not None:  # exact terms are their own bound
            bound = (bound * share + sum_exact).detach()
        den = normaliser(torch.addcmul(sum_exact, total[..., -1:], share), bound, prepared.floor)
        # 5. The values. With a graph rows are divided last: the gradient of 1 / den would underflow.
        early = in_place(total) and self.call.normalize
        scale = den.value.reciprocal() if early else torch.ones_like(ref)
        values = total[..., :-1].masked_fill(den.bad, 0) if den.some and self.call.normalize else total[..., :-1]
        rows = values * (share * scale)
        if zone is not None and exact is not None:
            rows = _sum(rows, None, zone[0], exact * scale)
        if weights is not None:
            more = (weights * scale).flatten(2, 3)
            rows = _add_product(rows.flatten(2, 3), more, sink_v.to(rows.dtype)).view_as(rows)
        if not self.call.normalize:  # in two steps: each alone may underflow
            half = (0.5 * ref).exp()
            return Output(carry, rows * half * half, torch.zeros_like(den.bad))
        rows = rows if early else rows / den.value
        rows = rows.masked_fill(den.bad, 0) if den.some else rows
        return Output(carry, rows, den.bad, (den.value, ref) if self._can_replay(prepared) else None)

    def _can_replay(self, prepared: PreparedMap) -> bool:
        """Whether rows are sums of products of what they see, divided by their normaliser."""
        return self.call.normalize and not prepared.phi.has_constant

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
        x, k, v, sink_k, sink_v, *behind = taken
        x, k, v = (t.to(prepared.dtype) for t in (x, k, v))
        layout, r, (den, ref) = self.layout, self.call.groups, kept
        keys = self._kernel_keys(prepared, part, k, v)
        far, carry = self._far(prepared, part, keys, carry, *behind)
        phi, own = (t.unflatten(2, x.shape[2:4]) for t in tied(prepared.features("query", x.flatten(2, 3))))
        log_far, exact = far.ref[..., None, None], self.call.near.exact
        terms: list[tuple[Tensor, Tensor, Tensor | None]] = []
        if keys is not None and layout.has_kernel_pairs:
            psi, scale, columns = self._zone_keys(keys, part)
            top, decay = self._decay(scale.mT, part, log_far)
            scores = (phi @ psi.mT).unflatten(3, (r, -1)) * decay.unsqueeze(3)
            log_near = _per_row(top, r)
            terms.append((scores.flatten(3, 4), columns, (log_near + own - ref).exp() if exact else None))
            share = (log_far + own - ref if exact else log_far - log_near).exp()
        else:
            share = (log_far + own - ref).exp() if exact else torch.ones_like(own)
        terms.append((phi, far.value, share))
        if self.call.near.window and layout.width:
            logits, hidden = (
                exact_logits(x, layout.zones(k), prepared.scale, prepared.phi.kernel),
                self._hidden(part, k),
            )
            logits = logits if hidden is None else logits.masked_fill(hidden, MASKED)
            terms.append(((logits - ref).exp(), layout.zones(ones_beside(v, name="columns")), None))
        if self.sinks is not None:
            weights = (self._sink_logits(prepared, part, x, sink_k.to(x.dtype)) - ref).exp()
            terms.append((weights, ones_beside(sink_v.to(x.dtype), name="sinks").unsqueeze(2), None))
        factors = [factor for _, _, factor in terms]
        return Output(carry, replayed(rows, den, factors, [t for a, b, _ in terms for t in (a, b)]))

    # The kernel.

    def _kernel_keys(self, prepared: PreparedMap, part: Part, k: Tensor, v: Tensor) -> KernelKeys | None:
        """Features of the keys laid out around a part that the kernel needs, by blocks (b, g, l, c, .), with values."""
        layout = self.layout
        if layout.single and (layout.near.in_blocks or not layout.width):
            return None
        c, blocks = (layout.keys, slice(0, 1)) if layout.single else (layout.block, layout.kernel_blocks(part))
        start = layout.span(part.blocks).start + blocks.start * c
        size = (blocks.stop - blocks.start) * c
        if size < k.shape[2]:
            k, v = (t[:, :, blocks.start * c : blocks.start * c + size] for t in (k, v))
        features = prepared.features("key", k)
        mask, scale = layout.mask(self.far_holes, slice(start, start + size), k.shape[0], k.device), features.log_scale
        if mask is not None:
            scale = scale.masked_fill(spread_mask(mask), MASKED)
        keys = KernelKeys(features.values, scale, v, prepared.phi.columns(features, v))
        return keys.map(lambda t: t.unflatten(2, (-1, c)))

    def _far(
        self, prepared: PreparedMap, part: Part, keys: KernelKeys | None, carry: Sums, behind: Tensor | None = None
    ) -> tuple[Sums, Sums]:
        """The sums outside the zone of each block of rows, (b, g, t, m, c), and those carried on."""
        layout = self.layout
        if keys is None or layout.single:
            return Sums(carry.value.unsqueeze(2), carry.ref.unsqueeze(-1)), carry
        t = part.blocks.stop - part.blocks.start
        gone = max(0, min(layout.gone - part.blocks.start, t)) if part.rows.stop == layout.block else 0
        if part is self.parts[-1] and not self.goes_on:
            gone = 0
        if self.call.near.is_causal:  # references that grow, so that no later key moves a row even by rounding
            if t < keys.psi.shape[2]:
                keys = keys.map(lambda x: x[:, :, :t])
            tops = keys.scale.detach().amax((-2, -1))
            refs = torch.cat([carry.ref.unsqueeze(-1), tops], dim=-1).cummax(-1).values
            sums = key_sums(keys.psi, keys.scale, keys.v, refs[..., 1:], keys.columns)
            first = None if self.fresh and part is self.parts[0] else carry.value
            far, after = prefix(sums, refs, first, gone)
            return Sums(far, refs[..., :t]), carry if after is None else Sums(after, refs[..., gone].clone())
        ref = torch.maximum(keys.scale.detach().amax((-3, -2, -1)), carry.ref)
        if self.behind is not None:
            refs = self.behind[:, :, self.parts.index(part)]
            ref = torch.maximum(ref, refs)
        sums = key_sums(keys.psi, keys.scale, keys.v, ref.unsqueeze(-1).expand(keys.scale.shape[:3]), keys.columns)
        row = torch.arange(t, device=sums.device)[:, None]
        block = torch.arange(sums.shape[2], device=sums.device)[None, :] + layout.kernel_blocks(part).start
        outside = (block < row) | (block >= row + 1 + layout.before + layout.after)
        more = None
        if behind is not None:
            before = carry.value * (carry.ref - ref).exp()[..., None, None]
            more = (before + behind * (refs - ref).exp()[..., None, None]).unsqueeze(2)
            if gone:
                carry = Sums(mixed((block < gone).to(sums.dtype), sums).squeeze(2) + before, ref)
        far = mixed(outside.to(sums.dtype), sums)
        far = far if more is None else _sum(far, None, more)
        return Sums(far, ref.unsqueeze(-1).expand(far.shape[:3])), carry

    def _kernel(
        self, prepared: PreparedMap, part: Part, phi: Tensor, far: Sums, keys: KernelKeys | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Values and normaliser (b, g, t, r c, v + 1) by the kernel, relative to exp(log_weight), and their bound."""
        layout, r, constant = self.layout, self.call.groups, prepared.phi.has_constant
        total, ref = product("far", phi, far.value), far.ref[..., None, None]
        last = far.value[..., -1:, :] if constant else None
        norm = None if prepared.positive else far.value[..., -1].unsqueeze(-2)
        if keys is not None and layout.has_kernel_pairs:
            psi, scale, columns = self._zone_keys(keys, part)
            top, decay = self._decay(scale.mT, part, ref)
            fade = _per_row((ref - top).exp(), r)
            scores = product("scores", phi, psi.mT)
            scores = _times(scores.unflatten(3, (r, -1)), decay.unsqueeze(3)).flatten(3, 4)
            total = _sum(total, fade, product("near", scores, columns))
            if last is not None:
                last = last * fade + _per_row((decay * psi[..., -1:].mT) @ columns, r)
            if norm is not None:
                norm = norm * fade + _per_row(decay @ psi, r)
            ref = _per_row(top, r)
        bound = None if norm is None else cauchy_schwarz(phi, norm)
        total, factor = prepared.phi.answer(total, last, phi)
        return total, ref if factor is None else ref + factor, bound

    def _zone_keys(self, keys: KernelKeys, part: Part) -> tuple[Tensor, Tensor, Tensor]:
        """Features, log scales and columns of what the kernel sees of each zone pair by pair, (b, g, t, z, .)."""
        t = part.blocks.stop - part.blocks.start
        if not (self.layout.single or self.layout.is_triangle):
            keys = keys.map(lambda x: self.layout.zones(x.flatten(2, 3)))
        elif t < keys.psi.shape[2]:
            keys = keys.map(lambda x: x[:, :, :t])
        return keys.psi, keys.scale, ones_beside(keys.v, name="columns") if keys.columns is None else keys.columns

    def _decay(self, scale: Tensor, part: Part, ref: Tensor) -> tuple[Tensor, Tensor]:
        """The reference of each row (b, g, t, c, 1), and the weights of the keys that the kernel sees, (.., c, z).

        `scale` (b, g, t, 1, z): those of the keys; `ref` (b, g, t, 1, 1): that of the sums outside.
        """
        seen = self.layout.kernel_mask(scale.device)
        assert seen is not None
        if not self.layout.is_triangle:
            scale = scale.masked_fill(~seen[part.rows], MASKED)
            top = torch.maximum(ref, scale.detach().amax(-1, keepdim=True))
            return top, (scale - top).exp_()
        top = torch.maximum(ref, scale.detach().cummax(-1).values.mT[..., part.rows, :])
        if is_composed() or scale.requires_grad:
            return top, (scale - top).clamp_max(0).exp().tril(part.rows.start)
        shape = (*top.shape[:-1], scale.shape[-1])
        decay = torch.sub(scale, top, out=memory("decay", shape, scale.dtype) if in_place(scale) else None)
        return top, decay.exp_().tril_(part.rows.start)  # infinite perhaps where it is cut off

    # The exact terms.

    def _hidden(self, part: Part, k: Tensor) -> Tensor | None:
        """Which keys of its zone a row does not see exactly, (b, 1, t, r c or 1, z) or less; None for none."""
        span, exact = self.layout.span(part.blocks), self.layout.exact_mask(k.device)
        holes = self.layout.mask(self.holes, span, k.shape[0], k.device)
        hidden = None if exact is None else ~exact[part.rows].repeat(self.call.groups, 1)
        if holes is None:
            return hidden
        zones = self.layout.zones(spread_mask(holes)).mT
        return zones if hidden is None else zones | hidden

    def _sink_logits(self, prepared: PreparedMap, part: Part, x: Tensor, k: Tensor) -> Tensor:
        """Exact logits (b, g, t, r c, s) of the sinks that a row sees beside its zone."""
        assert self.sinks is not None
        sees = self.layout.sees_sinks(self.sinks, part)
        sees = sees if sees.shape[2] == 1 else sees.repeat(1, 1, self.call.groups, 1)
        logits = exact_logits(x.flatten(2, 3), k, prepared.scale, prepared.phi.kernel).unflatten(2, x.shape[2:4])
        return logits.masked_fill(~sees.unsqueeze(1), MASKED)


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
    return product("states", weight, sums.flatten(3)).unflatten(-1, sums.shape[3:])


def prefix(sums: Tensor, refs: Tensor, first: Tensor | None, gone: int) -> tuple[Tensor, Tensor | None]:
    """What precedes each of t blocks, (b, g, t, m, c), and what precedes block `gone`, None if that is the first.

    The sums of block i are relative to refs[i + 1], `first` to refs[0]. One product with a triangle of weights:
    quadratic in t, with a small constant; while compiling, when all blocks are taken at once, in two levels.
    """
    t, after = sums.shape[2], None
    if torch.compiler.is_compiling() and (is_exporting() or t > OUTER):
        states = _nested_prefix(sums, refs, torch.zeros_like(sums[:, :, 0]) if first is None else first)
        return states[:, :, :t], states[:, :, gone]
    place = torch.arange(t + 1, device=sums.device)
    weight = (refs[..., None, 1:] - refs[..., :, None]).clamp_max_(0).exp_() * (place[:, None] > place[None, :-1])
    fade = (refs[..., :1] - refs).exp()[..., None, None]
    if gone and not in_place(sums):
        after = mixed(weight[..., gone : gone + 1, :], sums).squeeze(2)
        after = after if first is None else after + first * fade[:, :, gone]
    far = mixed(weight[..., :-1, :], sums)
    if first is not None:
        far = _sum(far, None, first.unsqueeze(2), fade[:, :, :-1])
    if gone and after is None:  # without another product
        last = gone == t
        after = far[:, :, gone - last].clone()
        if last:
            after.mul_((refs[..., t - 1] - refs[..., t]).exp()[..., None, None]).add_(sums[:, :, -1])
    return far, after


def _nested_prefix(sums: Tensor, refs: Tensor, first: Tensor) -> Tensor:
    """The same in two levels: within groups of `OUTER` blocks, and over the sums of the groups."""
    t = sums.shape[2]
    extra = 2 * OUTER + -t % OUTER  # so many groups that none is a special case to the compiler
    sums, last = pad(sums, (0, 0, 0, 0, 0, extra)), refs[..., -1:]
    ends = torch.cat([refs[..., 1:], last.expand(*last.shape[:-1], extra)], dim=-1).unflatten(-1, (-1, OUTER))
    starts = torch.cat([refs[..., :1], ends[..., :-1, -1]], dim=-1)  # before each group
    refs = torch.cat([starts.unsqueeze(-1), ends], dim=-1)  # (b, g, groups, OUTER + 1)
    place = torch.arange(OUTER + 1, device=sums.device)
    inner = (refs[..., None, 1:] - refs[..., :, None]).clamp_max(0).exp() * (place[:, None] > place[None, :-1])
    inside = inner @ sums.flatten(3).unflatten(2, (-1, OUTER))  # (b, g, groups, OUTER + 1, m c)
    outer = torch.cat([starts, refs[..., -1, -1:]], dim=-1)
    groups = torch.arange(outer.shape[-1], device=sums.device)
    weight = (outer[..., None, 1:] - outer[..., :, None]).clamp_max(0).exp() * (groups[:, None] > groups[None, :-1])
    before = weight @ inside[..., -1, :] + (outer[..., :1] - outer).exp().unsqueeze(-1) * first.flatten(2).unsqueeze(2)
    fade = (refs[..., :1] - refs).exp().unsqueeze(-1)
    states = inside + before[..., :-1, None, :] * fade
    ends = torch.cat([states[..., :-1, :].flatten(2, 3), states[:, :, -1, -1:]], dim=2)[:, :, : t + 1]
    return ends.unflatten(-1, sums.shape[3:])


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """`x weight`, in the memory of x where no gradient needs it."""
    return x.mul_(weight) if in_place(x) else x * weight


def _sum(x: Tensor, factor: Tensor | None, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """`x factor + y weight`, in the memory of x where no gradient needs it."""
    if not in_place(x):
        return (x if factor is None else x * factor) + (y if weight is None else y * weight)
    if factor is not None:
        return torch.addcmul(y, x, factor, out=x)
    return x.add_(y) if weight is None else x.addcmul_(y, weight)


def _add_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`x + a b`, x (b, g, n, v), in its memory where no gradient needs it."""
    if not in_place(x):
        return x + a @ b
    torch.baddbmm(x.flatten(0, 1), a.flatten(0, 1), b.flatten(0, 1), out=x.flatten(0, 1))
    return x


def _per_row(x: Tensor, r: int) -> Tensor:
    """(b, g, t, c, d) to (b, g, t, r c, d): what all query heads of a group share."""
    return x if r == 1 else x.repeat(1, 1, 1, r, 1)
