"""The scan behind windows: for every block of rows its zone exactly, the sums of all farther blocks by the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bochner.attention.call import Call
from bochner.attention.causal import by_head, prefix, prefix_adjoint
from bochner.attention.geometry import Geometry, around, around_adjoint
from bochner.attention.numerics import (
    EMPTY,
    MASKED,
    Buffers,
    Rows,
    adjoint,
    finish,
    flags,
    is_composed,
    join_rows,
    map_rows,
    may_look,
    product,
    topped_up,
)
from bochner.attention.recompute import Traced, add_up
from bochner.attention.state import cauchy_schwarz, spread_mask
from bochner.maps.base import Features

ZONE_ELEMENTS = 2**21  # exact logits and features of one part on the CPU: 8 MB in float32
pad = torch.nn.functional.pad
Part = tuple[slice, slice]  # some blocks, and some rows of each


class Zone(NamedTuple):
    """What some rows see: all (b, g, t, ...).

    x (r c, d): queries times the scale; y (s + z, d), u (s + z, v + 1): the sinks and the keys of the zone, values with
    ones; far (m, v + 1): sums of the blocks beyond, relative to exp(ref), ().
    """

    x: Tensor
    y: Tensor
    u: Tensor
    far: Tensor
    ref: Tensor


class Near(NamedTuple):
    """The kernel in the zones of a sliding window: psi (b, g, t, z, m), log_scale (b, g, t, r c, z) of what is seen."""

    psi: Tensor
    log_scale: Tensor


class Weights(NamedTuple):
    """Exponentials relative to every row's log_ref (b, g, t, r c, 1): of sinks and zone, of the sums beyond, and of the
    kernel in the zone of a sliding window (else None)."""

    log_ref: Tensor
    zone: Tensor
    far: Tensor
    decay: Tensor | None


@dataclass(frozen=True)
class ZoneScan:
    """Rows (b, g, r, t c, v); the packed state of all blocks before the last zone; lost and small rows; its scale.

    `holes`, `far_holes` (b, keys): keys that count for nothing, and those that the kernel leaves out. `sees_any`
    (b, 1, r t c or 1, 1): rows with any key to look at, None for all.
    """

    call: Call
    place: Geometry
    holes: Tensor
    far_holes: Tensor
    sink_position: Tensor
    sees_any: Tensor | None
    buffers: Buffers
    num_smooth: int = 2

    def run(self, *tensors: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        q, k, v, sink_k, sink_v, sums, ref = tensors
        far, refs, ends = self._beyond(k, v, sums, ref)
        query, key, parts = self.call.features("query"), self.call.features("key"), []
        for part in self._parts(q):
            zone = self._zone(q, k, v, sink_k, sink_v, far, refs, part)
            near = self._near(key(k[..., self.place.span(part[0]), :]), part) if self._is_mixed else None
            fq = query(self._pick(q, part).flatten(2, 3))
            weights = self._weights(zone, fq.log_scale, near, part)
            rows = self._rows(zone, weights, fq.values, near, part)
            parts.append(map_rows(rows, lambda t: by_head(t, self.call.groups)))
        rows = join_rows(parts, q.shape[-2])
        return (rows.out, far[:, :, -1].clone(), *flags(rows), refs[..., -1].clone()), (far, refs, ends, rows)

    def back(self, tensors: Sequence[Tensor], kept: Any, grads: Sequence[Tensor]) -> Sequence[Tensor | None]:
        (q, k, v, sink_k, sink_v, _, _), (far, refs, ends, rows), call = tensors, kept, self.call
        total = adjoint(rows, grads[0], call.normalize)
        dfar = torch.zeros_like(far)
        dfar[:, :, -1] = grads[1]
        dq, dk, dv, dsk, dsv = (torch.zeros_like(t, dtype=call.dtype) for t in (q, k, v, sink_k, sink_v))
        dparams: list[Tensor | None] = [None] * len(call.parameters)
        query, key = call.traced_features("query"), call.traced_features("key")
        for part in self._parts(q):
            span = self.place.span(part[0])
            zone = self._zone(q, k, v, sink_k, sink_v, far, refs, part)
            fq = Traced(query, self._pick(q, part).flatten(2, 3), call.parameters)
            fk = Traced(key, k[..., span, :], call.parameters) if self._is_mixed else None
            near = None if fk is None else self._near(Features(fk.values, fk.log_scale), part)
            weights = self._weights(zone, fq.log_scale, near, part)
            g, phi = self._pick(total, part), fq.values.unflatten(2, zone.x.shape[2:4])
            dx, dy, du = self._exact_adjoint(zone, weights.zone, g)
            count = sink_k.shape[2]
            dsk, dsv = dsk + dy[..., :count, :].sum(2), dsv + du[..., :count, :-1].sum(2)
            dy, du, u = dy[..., count:, :], du[..., count:, :], zone.u[..., count:, :]
            scaled = g * weights.far
            dphi = scaled @ zone.far.mT
            dfar[:, :, part[0]] += phi.mT @ scaled
            if fk is not None and near is not None and weights.decay is not None:
                back = (g @ u.mT) * weights.decay
                dphi += back @ near.psi
                du = du + ((phi @ near.psi.mT) * weights.decay).mT @ g
                dpsi = self.place.zones_adjoint(back.mT @ phi)
                more, params = fk.pull(dpsi, (fk.values * dpsi).sum(-1, keepdim=True))
                dk[..., span, :] += more
                dparams = add_up(dparams, params)
            dk[..., span, :] += self.place.zones_adjoint(dy)
            dv[..., span, :] += self.place.zones_adjoint(du[..., :-1])
            more, params = fq.pull(dphi.flatten(2, 3), (phi * dphi).sum(-1, keepdim=True).flatten(2, 3))
            self._pick(dq, part, view=True).copy_(self._split_heads(dx + more.view_as(dx)))
            dparams = add_up(dparams, params)
        dsums, params = self._beyond_adjoint(k, v, dfar, ends, dk, dv)
        found = [d.to(t.dtype) for d, t in zip((dq, dk, dv, dsk, dsv), tensors, strict=False)]
        return *found, dsums, None, *add_up(dparams, params)

    # What lies beyond the zones.

    def _beyond(self, k: Tensor, v: Tensor, sums: Tensor, ref: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums beyond each zone (b, g, t, m, v + 1), their references (b, g, t), and those of the blocks."""
        place = self.place
        if place.single:
            return sums.unsqueeze(2), ref.unsqueeze(-1), ref.unsqueeze(-1)
        count = place.blocks - 1 if self.call.is_causal else place.blocks + place.before + place.after
        features, parts, refs = self.call.features("key"), [], [ref.unsqueeze(-1)]
        for span in self._spans(k, count):
            psi, scale, values = self._keys(features(k[..., span, :]), v, span)
            tops = scale.detach().amax((-2, -1))
            refs.append(torch.cat([refs[-1][..., -1:], tops], dim=-1).cummax(-1).values[..., 1:])
            parts.append(psi.mT @ (values * (scale - refs[-1][..., None, None]).exp()))
        ends = torch.cat(refs, dim=-1)
        if not parts:
            return sums.unsqueeze(2), ref.unsqueeze(-1), ends
        blocks = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
        if self.call.is_causal:
            return prefix(blocks, ends, sums), ends, ends
        top = ends[..., -1:]
        width = 1 + place.before + place.after
        return around(blocks, (ends[..., 1:] - top).exp(), width), top.expand(*top.shape[:2], place.blocks), ends

    def _beyond_adjoint(
        self, k: Tensor, v: Tensor, dfar: Tensor, ends: Tensor, dk: Tensor, dv: Tensor
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Adds to the gradients of keys and values; returns those of the first sums and of the parameters."""
        call, place = self.call, self.place
        dparams: list[Tensor | None] = [None] * len(call.parameters)
        if place.single or ends.shape[-1] == 1:
            return dfar[:, :, 0], dparams
        if call.is_causal:
            dblocks, dsums = prefix_adjoint(dfar[:, :, :-1], ends, dfar[:, :, -1])
        else:
            width = 1 + place.before + place.after
            dblocks = around_adjoint(dfar, (ends[..., 1:] - ends[..., -1:]).exp(), width)
            dsums = torch.zeros_like(dfar[:, :, 0])
        features, done = call.traced_features("key"), 0
        for span in self._spans(k, dblocks.shape[2]):
            f = Traced(features, k[..., span, :], call.parameters)
            psi, scale, values = self._keys(Features(f.values, f.log_scale), v, span)
            size = psi.shape[2]
            grad = dblocks[:, :, done : done + size]
            weight = (scale - ends[..., 1 + done : 1 + done + size, None, None]).exp()
            dpsi = ((values * weight) @ grad.mT).flatten(2, 3)
            dv[..., span, :] += ((psi @ grad[..., :-1]) * weight).flatten(2, 3)
            dx, more = f.pull(dpsi, (f.values * dpsi).sum(-1, keepdim=True))
            dk[..., span, :] += dx
            dparams, done = add_up(dparams, more), done + size
        return dsums, dparams

    def _keys(self, f: Features, v: Tensor, span: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Features, log scales and values with ones of some keys, by blocks (b, g, t, c, .)."""
        c = self.place.block
        scale = f.log_scale.masked_fill(spread_mask(self.far_holes[:, span]), MASKED).unflatten(2, (-1, c))
        values = pad(v[..., span, :].to(self.call.dtype), (0, 1), value=1.0)
        return f.values.unflatten(2, (-1, c)), scale, values.unflatten(2, (-1, c))

    # The rows.

    @property
    def _is_mixed(self) -> bool:
        """Whether a zone has both exact and kernel terms."""
        return self.place.width > 0 and self.place.by_kernel(self.holes.device) is not None

    def _parts(self, q: Tensor) -> list[Part]:
        """Blocks of rows whose exact logits stay in cache; of very large blocks some rows at a time."""
        place, t = self.place, self.place.blocks
        if is_composed():
            return [(slice(0, t), slice(0, place.block))]
        row = q.shape[0] * q.shape[1] * self.call.groups * (place.width + self.call.phi.feature_dim)
        rows = max(1, ZONE_ELEMENTS // row)
        if rows >= place.block:
            size = rows // place.block
            return [(slice(i, min(i + size, t)), slice(0, place.block)) for i in range(0, t, size)]
        cuts = [slice(i, min(i + rows, place.block)) for i in range(0, place.block, rows)]
        return [(slice(i, i + 1), cut) for i in range(t) for cut in cuts]

    def _spans(self, k: Tensor, count: int) -> list[slice]:
        """Spans of laid-out keys, whole blocks, of the first `count` blocks."""
        c = self.place.block
        rows = self.call.rows(k.shape[0] * k.shape[1], k.device)
        size = count if is_composed() else max(1, rows // c)
        return [slice(i * c, min(i + size, count) * c) for i in range(0, count, size)] if size else []

    def _pick(self, x: Tensor, part: Part, view: bool = False) -> Tensor:
        """Rows (b, g, r, t c, d) of a part, (b, g, t, r c, d); or as they lie, (b, g, r, t, c, d)."""
        x = x.unflatten(3, (-1, self.place.block))[:, :, :, part[0], part[1]]
        return x if view else x.transpose(2, 3).flatten(3, 4)

    def _split_heads(self, x: Tensor) -> Tensor:
        """(b, g, t, r c, d) to (b, g, r, t, c, d)."""
        return x.unflatten(3, (self.call.groups, -1)).transpose(2, 3)

    def _zone(
        self, q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor, sink_v: Tensor, far: Tensor, refs: Tensor, part: Part
    ) -> Zone:
        call, place, span = self.call, self.place, self.place.span(part[0])
        x = self._pick(q, part).to(call.dtype) * call.root**2
        y = place.zones(k[..., span, :], sink_k).to(call.dtype)
        ones = [pad(t.to(call.dtype), (0, 1), value=1.0) for t in (v[..., span, :], sink_v)]
        return Zone(x, y, place.zones(*ones), far[:, :, part[0]], refs[..., part[0]])

    def _near(self, f: Features, part: Part) -> Near:
        """The kernel in the zones of a sliding window."""
        holes = self.far_holes[:, self.place.span(part[0])]
        scale = self.place.zones(f.log_scale.masked_fill(spread_mask(holes), MASKED)).mT
        seen = self.place.by_kernel(scale.device)
        assert seen is not None
        seen = seen[part[1]].repeat(self.call.groups, 1)
        return Near(self.place.zones(f.values), scale.masked_fill(~seen, MASKED))

    def _hide(self, logits: Tensor, part: Part) -> Tensor:
        """Logits (b, g, t, r c, s + z) with -inf where a row does not see a sink or a key of its zone exactly."""
        count = self.sink_position.shape[1]
        parts = list(logits.split([count, logits.shape[-1] - count], dim=-1))
        masks: list[Tensor | None] = [None, self._hidden(part)]
        if count:
            sees = self.place.sees_sinks(self.sink_position, part[0])[:, :, part[1]]
            masks[0] = ~sees.repeat(1, 1, self.call.groups, 1).unsqueeze(1)
        if logits.requires_grad or is_composed():
            hidden = [t if m is None else t.masked_fill(m, -torch.inf) for t, m in zip(parts, masks, strict=True)]
            return torch.cat(hidden, dim=-1)
        for t, m in zip(parts, masks, strict=True):
            if m is not None and t.shape[-1]:
                t.masked_fill_(m, -torch.inf)
        return logits

    def _hidden(self, part: Part) -> Tensor | None:
        """Which keys of its zone a row does not see exactly, (b, 1, t, r c, z) or less, None for none."""
        holes, exact = self.holes[:, self.place.span(part[0])], self.place.exact(self.holes.device)
        hidden = None if exact is None else ~exact[part[1]].repeat(self.call.groups, 1)
        if may_look(holes) and not bool(holes.any()):
            return hidden
        zones = self.place.zones(holes[:, None, :, None]).mT
        return zones if hidden is None else zones | hidden

    def _weights(self, zone: Zone, log_scale: Tensor, near: Near | None, part: Part) -> Weights:
        own = log_scale.unflatten(2, zone.x.shape[2:4])
        # 1. Exact logits.
        logits = product(self.buffers, "zone", zone.x, zone.y.mT)
        if self.call.phi.kernel == "gaussian":
            scale = self.call.root**2
            square = zone.x.square().sum(-1, keepdim=True) / scale + scale * zone.y.square().sum(-1, keepdim=True).mT
            logits = logits - 0.5 * square
        logits = self._hide(logits, part)
        # 2. Every row's reference: the largest of all that it sees.
        beyond = zone.ref[..., None, None] + own
        ref = beyond.detach()
        if logits.shape[-1]:
            ref = torch.maximum(ref, logits.detach().amax(-1, keepdim=True))
        if near is not None:
            ref = torch.maximum(ref, (near.log_scale.amax(-1, keepdim=True) + own).detach())
        ref = ref.clamp_min(EMPTY)
        # 3. Relative to it.
        decay = None if near is None else (near.log_scale + (own - ref)).exp()
        kept = logits.requires_grad or is_composed()
        weights = (logits - ref).exp() if kept else logits.sub_(ref).exp_()
        return Weights(ref, weights, (beyond - ref).exp(), decay)

    def _rows(self, zone: Zone, weights: Weights, phi: Tensor, near: Near | None, part: Part) -> Rows:
        call, phi = self.call, phi.unflatten(2, zone.x.shape[2:4])
        u = zone.u[..., self.sink_position.shape[1] :, :]
        total = product(self.buffers, "exact", weights.zone, zone.u)
        bound = None if call.positive else total[..., -1:].detach()
        kernel = product(self.buffers, "far", phi, zone.far) * weights.far
        if near is not None and weights.decay is not None:
            kernel = kernel + ((phi @ near.psi.mT) * weights.decay) @ u
        if call.top_up is not None:
            last = zone.far[..., -1:, :] * weights.far
            if near is not None and weights.decay is not None:
                last = last + (weights.decay * near.psi[..., -1:].mT) @ u
            kernel = topped_up(kernel, last, call.top_up)
        if bound is not None:  # exact terms are their own bound
            norm = zone.far[..., -1].unsqueeze(-2) * weights.far
            norm = norm if near is None or weights.decay is None else norm + weights.decay @ near.psi
            bound = bound + cauchy_schwarz(phi, norm)
        log_ref = weights.log_ref
        if self.sees_any is not None:
            log_ref = torch.where(self._pick(self.sees_any, part), log_ref, EMPTY)
        return finish(total + kernel, log_ref, bound, None, call.normalize, call.policy, call.floor)

    def _exact_adjoint(self, zone: Zone, weights: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, of keys and of values with ones, from g of the sums."""
        scale = self.call.root**2
        dlogits = weights * (g @ zone.u.mT)
        dx, dy = (dlogits @ zone.y) * scale, dlogits.mT @ zone.x
        if self.call.phi.kernel == "gaussian":
            dx = dx - zone.x * dlogits.sum(-1, keepdim=True)
            dy = dy - scale * zone.y * dlogits.sum(-2).unsqueeze(-1)
        return dx, dy, weights.mT @ g
