"""The scan behind windows: for every block of rows its zone exactly, the sums of all farther blocks by the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bochner.attention.beyond import Beyond, Outside, Sums
from bochner.attention.call import Call
from bochner.attention.causal import by_head
from bochner.attention.flash import attend_zones
from bochner.attention.geometry import Geometry
from bochner.attention.numerics import (
    EMPTY,
    MASKED,
    Joined,
    Rows,
    add_product,
    adjoint,
    finish,
    flags,
    is_composed,
    map_rows,
    may_look,
    product,
    scale_adjoint,
    top_up_rows,
    topped_up,
    weighted,
)
from bochner.attention.recompute import Traced, add_up
from bochner.attention.sliding import Band, Stairs
from bochner.attention.state import cauchy_schwarz, spread_mask
from bochner.maps.base import Features, squared_norm

ZONE_ELEMENTS = 2**22  # exact logits and features of one segment on the CPU: 16 MB in float32
pad = torch.nn.functional.pad
Part = tuple[slice, slice]  # some blocks, and some rows of each


class Zone(NamedTuple):
    """What some rows see: all (b, g, t, ...).

    x (r c, d): queries; y (z, d), u (z, v): keys and values of the zone, views of what zones share; far
    (m, v + 1): sums of the blocks beyond, relative to exp(ref), ().
    """

    x: Tensor
    y: Tensor
    u: Tensor
    far: Tensor
    ref: Tensor


class Segment(NamedTuple):
    """Some row blocks: keys and values of their zones, features of those keys that are needed, and what lies beyond."""

    keys: Tensor
    values: Tensor
    features: Features | None
    outside: Outside


class Sinks(NamedTuple):
    """Logits (b, g, t, r c, s) of sinks that a row sees beside its zone; their keys, values with ones (b, g, s, .)."""

    logits: Tensor
    k: Tensor
    u: Tensor


class _Gradients:
    """Gradients of queries, keys, values, keys and values of sinks, and of the parameters, to be added to."""

    def __init__(self, place: Geometry, call: Call, tensors: Sequence[Tensor]) -> None:
        self.place = place
        self.inputs = [torch.zeros_like(t, dtype=call.dtype) for t in tensors[:5]]
        self.parameters: list[Tensor | None] = [None] * len(call.parameters)

    def add(self, start: int, dk: Tensor | None, dv: Tensor | None, params: Sequence[Tensor | None] = ()) -> None:
        """Of laid-out keys and values from a place on."""
        for total, more in ((self.inputs[1], dk), (self.inputs[2], dv)):
            if more is not None:
                self.place.put(total, slice(start, start + more.shape[2]), more)
        if params:
            self.parameters = add_up(self.parameters, params)

    def add_sinks(self, dk: Tensor, dv: Tensor) -> None:
        self.inputs[3] += dk
        self.inputs[4] += dv


@dataclass(frozen=True)
class ZoneScan:
    """Rows (b, g, r, n, v); the packed state of all blocks before the last zone; lost and small rows; its scale.

    `holes`, `far_holes` (b, keys): keys that count for nothing, None for none, and those that the kernel leaves out.
    `sees_any` (b, 1, r, n, 1): rows with any key to look at, None for all.
    """

    call: Call
    place: Geometry
    holes: Tensor | None
    far_holes: Tensor
    sink_position: Tensor
    sees_any: Tensor | None
    num_smooth: int = 2

    def run(self, *tensors: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        q, k, v, sink_k, sink_v, sums, ref = tensors
        segments, before = self._segments(q), Sums(sums, ref)
        query, key, first = self.call.features("query"), self.call.features("key"), self.place.lead
        joined, kept = Joined(first + q.shape[-2]), []
        for blocks, behind in zip(segments, self._beyond.behind(k, v, segments), strict=True):
            start, keys, values = before, *self._keys(k, v, blocks)
            fk = key(keys[..., self._used(blocks), :]) if self._needs_features else None
            outside, before = self._outside(fk, values, blocks, before, behind)
            segment, log_refs = Segment(keys, values, fk, outside), []
            for rows in self._cuts(q):
                part = (blocks, rows)
                zone = self._zone(q, segment, part)
                near = self._near(segment, zone, part)
                sinks = self._sinks(zone.x, sink_k, sink_v, part)
                done, log_ref = self._rows(zone, sinks, query(zone.x.flatten(2, 3)), near, part)
                log_refs.append(log_ref)
                joined.add(map_rows(done, lambda t: by_head(t, self.call.groups)))
            kept.append((start, behind, log_refs))
        done = map_rows(joined.rows(), lambda t: t[..., first:, :])
        state, scale = outside.far[:, :, -1].clone(), outside.refs[..., -1].clone()
        return (done.out, state, *flags(done), scale), (kept, done)

    def back(self, tensors: Sequence[Tensor], kept: Any, grads: Sequence[Tensor]) -> Sequence[Tensor | None]:
        (_, k, v, _, _, sums, _), (kept, done), call = tensors, kept, self.call
        segments, beyond, total = self._segments(tensors[0]), self._beyond, adjoint(done, grads[0], call.normalize)
        found, key = _Gradients(self.place, call, tensors), call.traced_features("key")
        dbefore, dstate, dbehind = torch.zeros_like(sums), grads[1:2], []
        for blocks, (before, behind, log_refs) in reversed(list(zip(segments, kept, strict=True))):
            keys, values = self._keys(k, v, blocks)
            trace = Traced(key, keys[..., self._used(blocks), :], call.parameters) if self._needs_features else None
            fk = None if trace is None else Features(trace.values, trace.log_scale)
            outside, _ = self._outside(fk, values, blocks, before, behind)
            dfar, dpsi = torch.zeros_like(outside.far), None if fk is None else torch.zeros_like(fk.values)
            segment = Segment(keys, values, fk, outside)
            for rows, log_ref in zip(self._cuts(tensors[0]), log_refs, strict=True):
                self._part_adjoint(tensors, total, segment, (blocks, rows), log_ref, dfar, dpsi, found)
            for more in dstate:  # of the last segment alone
                dfar[:, :, -1] += more
            dstate = ()
            if self.place.single:
                dbefore = dfar[:, :, 0]
            elif fk is not None and dpsi is not None:
                more, du, dbefore, later = beyond.outside_adjoint(fk, values, blocks, before, behind, dfar, dbefore)
                dpsi[..., : more.shape[2], :] += more
                found.add(beyond.span(blocks).start, None, du)
                dbehind.append(later)
            if trace is not None and dpsi is not None:
                more, params = trace.pull(dpsi, (trace.values * dpsi).sum(-1, keepdim=True))
                found.add(self.place.span(blocks).start, more, None, params)
        for span, more, du, params in beyond.behind_adjoint(k, v, segments, [b for _, b, _ in kept], dbehind[::-1]):
            found.add(span.start, more, du, params)
        own = [d.to(t.dtype) for d, t in zip(found.inputs, tensors, strict=False)]
        return *own, dbefore, None, *found.parameters

    def _part_adjoint(
        self,
        tensors: Sequence[Tensor],
        total: Tensor,
        segment: Segment,
        part: Part,
        log_ref: Tensor,
        dfar: Tensor,
        dpsi: Tensor | None,
        found: _Gradients,
    ) -> None:
        """Adds the gradients of the sums beyond, of key features, and of all else, from those of the rows' sums."""
        q, _, _, sink_k, sink_v, _, _ = tensors
        start = self.place.span(part[0]).start
        zone = self._zone(q, segment, part)
        fq = Traced(self.call.traced_features("query"), zone.x.flatten(2, 3), self.call.parameters)
        g = self._pick(total, part)
        phi, own = (t.unflatten(2, g.shape[2:4]) for t in (fq.values, fq.log_scale))
        # 1. Exact terms.
        dx, dy, du = self._exact_adjoint(zone, log_ref, g, part)
        found.add(start, self.place.zones_adjoint(dy), self.place.zones_adjoint(du))
        sinks = self._sinks(zone.x, sink_k, sink_v, part)
        if sinks is not None:
            more, dsk, dsv = self._sinks_adjoint(sinks, zone.x, log_ref, g)
            dx = dx + more
            found.add_sinks(dsk, dsv)
        # 2. The sums beyond.
        near, c = self._near(segment, zone, part), g.shape[3]
        if self.call.top_up is not None:
            phi, g = self._topped_up(zone, near, phi, own, log_ref, g)
            own, log_ref = (t.repeat(1, 1, 1, 2, 1) for t in (own, log_ref))
            near = None if near is None else near.twice()
        scaled = g * (zone.ref[..., None, None] + own - log_ref).exp()
        dphi = scaled @ zone.far.mT
        dfar += phi.mT @ scaled
        # 3. The kernel in the zone.
        if near is not None and dpsi is not None:
            more, dnear, du = near.adjoint(phi, own, log_ref, g)
            dphi += more
            dpsi[..., : dnear.shape[2], :] += dnear
            found.add(start, None, du)
        more, params = fq.pull(dphi[..., :c, :].flatten(2, 3), scale_adjoint(phi, dphi, c).flatten(2, 3))
        found.add(start, None, None, params)
        self._put(found.inputs[0], part, dx + more.view_as(dx))

    def _topped_up(
        self, zone: Zone, near: Band | Stairs | None, phi: Tensor, own: Tensor, log_ref: Tensor, g: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Features and gradients of rows (b, g, t, r c, .) that were topped up, see `top_up_rows`."""
        kernel, last, norm = phi @ zone.far, zone.far[..., -1:, :], zone.far[..., -1].unsqueeze(-2)
        if near is not None:
            carry = (zone.ref[..., None, None] + own - log_ref).exp()
            kernel, last, _ = near.add(phi, own, log_ref, kernel * carry, last * carry, norm * carry)
        assert self.call.top_up is not None
        return top_up_rows(phi, g, kernel[..., -1:], last, self.call.top_up)

    @property
    def _beyond(self) -> Beyond:
        return Beyond(self.call, self.place, self.far_holes)

    def _outside(
        self, f: Features | None, v: Tensor, blocks: slice, before: Sums, behind: Sums | None
    ) -> tuple[Outside, Sums]:
        """What lies beyond the zones of a segment, and before the next."""
        if f is None or self.place.single:
            return Outside(before.total.unsqueeze(2), before.ref.unsqueeze(-1)), before
        return self._beyond.outside(f, v, blocks, before, behind)

    @property
    def _is_mixed(self) -> bool:
        """Whether a zone has both exact and kernel terms."""
        return self.place.width > 0 and not self.place.aligned

    @property
    def _needs_features(self) -> bool:
        """Whether features of the keys given are needed."""
        return self._is_mixed or not self.place.single

    def _keys(self, k: Tensor, v: Tensor, blocks: slice) -> tuple[Tensor, Tensor]:
        """Keys and values of the zones of a segment."""
        span, dtype = self.place.span(blocks), self.call.dtype
        keys, values = self.place.take(k, span, name="zone keys"), self.place.take(v, span, name="zone values")
        return keys.to(dtype), values.to(dtype)

    def _used(self, blocks: slice) -> slice:
        """Those of them whose features a segment needs."""
        span = self.place.span(blocks) if self._is_mixed else self._beyond.span(blocks)
        return slice(0, span.stop - span.start)

    def _segments(self, q: Tensor) -> list[slice]:
        """Blocks of rows whose features, zones and sums stay in cache."""
        t, c = self.place.blocks, self.place.block
        if is_composed():
            return [slice(0, t)]
        size = max(1, self._rows_in_cache(q) // c)
        return [slice(i, min(i + size, t)) for i in range(0, t, size)]

    def _cuts(self, q: Tensor) -> list[slice]:
        """All rows of a block; of very large blocks some at a time."""
        c = self.place.block
        size = c if is_composed() else self._rows_in_cache(q)
        return [slice(i, min(i + size, c)) for i in range(0, c, size)]

    def _rows_in_cache(self, q: Tensor) -> int:
        row = self.call.groups * (self.place.width + self.call.phi.feature_dim)
        if self._is_mixed and not self.place.is_stairs:  # several weights for every pair of a zone
            row *= 4
        return max(1, ZONE_ELEMENTS // (q.shape[0] * q.shape[1] * row))

    def _pick(self, x: Tensor, part: Part) -> Tensor:
        """Rows (b, g, r, n, d) of a part, (b, g, t, r c, d)."""
        return self.place.take_rows(x, part[0])[..., part[1], :].transpose(2, 3).flatten(3, 4)

    def _put(self, total: Tensor, part: Part, rows: Tensor) -> None:
        """The inverse: add rows (b, g, t, r c, d) of a part to all."""
        blocks, cut = part
        rows = rows.unflatten(3, (self.call.groups, -1)).transpose(2, 3)
        self.place.put_rows(total, blocks, pad(rows, (0, 0, cut.start, self.place.block - cut.stop)).flatten(3, 4))

    def _zone(self, q: Tensor, segment: Segment, part: Part) -> Zone:
        x, zones = self._pick(q, part).to(self.call.dtype), self.place.zones
        return Zone(x, zones(segment.keys), zones(segment.values), *segment.outside)

    def _sinks(self, x: Tensor, k: Tensor, v: Tensor, part: Part) -> Sinks | None:
        if not k.shape[2]:
            return None
        k, v = k.to(self.call.dtype), v.to(self.call.dtype)
        sees = self.place.sees_sinks(self.sink_position, part[0])[:, :, part[1]].repeat(1, 1, self.call.groups, 1)
        logits = self._logits(x.flatten(2, 3), k).unflatten(2, x.shape[2:4])
        return Sinks(logits.masked_fill(~sees.unsqueeze(1), MASKED), k, pad(v, (0, 1), value=1.0))

    def _near(self, segment: Segment, zone: Zone, part: Part) -> Band | Stairs | None:
        """What the kernel sees of the zones of a sliding window, None where they are exact."""
        place, (blocks, rows), f = self.place, part, segment.features
        if f is None or not self._is_mixed:
            return None
        if place.is_stairs:
            span = slice(blocks.start * place.block, blocks.stop * place.block)
            psi, scale, v = self._beyond.by_blocks(f, segment.values, span)
            ref = torch.maximum(zone.ref, scale.detach().amax((-2, -1)))
            weight = (scale - ref[..., None, None]).exp()
            return Stairs(self.call, psi, weight, weighted(v, weight), ref, rows.start)
        holes = place.take_mask(self.far_holes, place.span(blocks))
        scale = place.zones(f.log_scale.masked_fill(spread_mask(holes), MASKED)).mT
        seen = place.by_kernel(scale.device)
        assert seen is not None
        seen = seen[rows].repeat(self.call.groups, 1)
        return Band(place, place.zones(f.values), scale.masked_fill(~seen, MASKED), zone.u)

    def _hidden(self, part: Part) -> Tensor | None:
        """Which keys of its zone a row does not see exactly, (b, 1, t, r c or 1, z) or less, None for none."""
        span, exact = self.place.span(part[0]), self.place.exact(self.far_holes.device)
        hidden = None if exact is None else ~exact[part[1]].repeat(self.call.groups, 1)
        holes = self.holes
        if holes is None and (torch.compiler.is_compiling() or self.place.has_gaps(span)):
            holes = torch.zeros_like(self.far_holes)
        if holes is None:
            return hidden
        holes = self.place.take_mask(holes, span)
        if may_look(holes) and not bool(holes.any()):
            return hidden
        zones = self.place.zones(holes[:, None, :, None]).mT
        return zones if hidden is None else zones | hidden

    def _logits(self, x: Tensor, y: Tensor) -> Tensor:
        """Exact logits of rows x (..., n, d) and keys y (..., z, d)."""
        scale = self.call.root**2
        logits = x @ (y * scale).mT if y.shape[-2] < x.shape[-2] else (x * scale) @ y.mT
        if self.call.phi.kernel == "gaussian":
            logits = logits - 0.5 * scale * (squared_norm(x) + squared_norm(y).mT)
        return logits

    def _zone_logits(self, zone: Zone, part: Part) -> Tensor:
        logits, hidden = self._logits(zone.x, zone.y), self._hidden(part)
        return logits if hidden is None else logits.masked_fill(hidden, MASKED)

    def _exact(self, zone: Zone, part: Part) -> tuple[Tensor, Tensor]:
        """Softmax attention to the zone alone, (b, g, t, r c, v), and its log normaliser (b, g, t, r c, 1)."""
        if self.call.phi.kernel == "softmax" and may_look(zone.x) and not torch.is_grad_enabled():
            return attend_zones(zone.x, zone.y, zone.u, self._hidden(part), self.call.root**2)
        logits = self._zone_logits(zone, part)
        log_norm = logits.logsumexp(-1, keepdim=True)
        return (logits - log_norm).exp() @ zone.u, log_norm

    def _rows(
        self, zone: Zone, sinks: Sinks | None, fq: Features, near: Band | Stairs | None, part: Part
    ) -> tuple[Rows, Tensor]:
        """Finished rows (b, g, t, r c, .), and what their weights are relative to."""
        call = self.call
        phi, own = (t.unflatten(2, zone.x.shape[2:4]) for t in fq)
        # 1. Every row's reference: the largest of all that it sees.
        beyond = zone.ref[..., None, None] + own
        mean, log_norm = self._exact(zone, part) if self.place.width else (zone.x[..., :0], beyond)
        log_ref = torch.maximum(beyond, log_norm).detach()
        if sinks is not None:
            log_ref = torch.maximum(log_ref, sinks.logits.detach().amax(-1, keepdim=True))
        if near is not None:
            log_ref = torch.maximum(log_ref, (near.top() + own).detach())
        log_ref = log_ref.clamp_min(EMPTY)
        # 2. The kernel, relative to exp(log_ref - carry).
        carry = (beyond - log_ref).exp()
        kernel = product("far", phi, zone.far)
        last, norm = zone.far[..., -1:, :], zone.far[..., -1].unsqueeze(-2)
        if near is not None:
            kernel, last, norm = near.add(phi, own, log_ref, kernel * carry, last * carry, norm * carry)
            carry = torch.ones_like(carry)
        if call.top_up is not None:
            kernel = topped_up(kernel, last, call.top_up)
        # 3. The normaliser; exact terms are their own bound.
        exact = [(log_norm - log_ref).exp()] if self.place.width else []
        if sinks is not None:
            exact.append((sinks.logits - log_ref).exp())
        sum_exact = torch.cat(exact, dim=-1).sum(-1, keepdim=True)
        bound = None if call.positive else cauchy_schwarz(phi, norm * carry) + sum_exact.detach()
        seen = log_ref
        if self.sees_any is not None:
            seen = torch.where(self._pick(self.sees_any, part), log_ref, EMPTY)
        rows = finish(kernel[..., -1:] * carry + sum_exact, seen, bound, None, call.normalize, call.policy, call.floor)
        # 4. The values.
        out = kernel[..., :-1] * (carry * rows.factor)
        if self.place.width:
            out = add_product(out, mean, exact[0] * rows.factor)
        if sinks is not None:
            more = product("sinks", (exact[-1] * rows.factor).flatten(2, 3), sinks.u[..., :-1])
            out = add_product(out, more.view_as(out), 1.0)
        if is_composed():
            out = torch.where(rows.factor == 0, 0, out)  # not zero times infinity
        return Rows(out, *rows[1:]), log_ref

    def _exact_adjoint(self, zone: Zone, log_ref: Tensor, g: Tensor, part: Part) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the queries, keys and values of zones, from g of the sums relative to log_ref."""
        weights = (self._zone_logits(zone, part) - log_ref).exp()
        dlogits = weights * (g[..., :-1] @ zone.u.mT + g[..., -1:])
        return *self._logits_adjoint(dlogits, zone.x, zone.y), weights.mT @ g[..., :-1]

    def _sinks_adjoint(self, sinks: Sinks, x: Tensor, log_ref: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the queries, and of the keys and values of sinks."""
        rows, y, weights = (t.flatten(2, 3) for t in (g, x, (sinks.logits - log_ref).exp()))
        dx, dk = self._logits_adjoint(weights * (rows @ sinks.u.mT), y, sinks.k)
        return dx.view_as(x), dk, weights.mT @ rows[..., :-1]

    def _logits_adjoint(self, dlogits: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of rows and keys from those of their exact logits."""
        scale = self.call.root**2
        dx, dy = dlogits @ y, dlogits.mT @ x
        if self.call.phi.kernel == "gaussian":
            dx = dx - x * dlogits.sum(-1, keepdim=True)
            dy = dy - y * dlogits.sum(-2).unsqueeze(-1)
        return dx * scale, dy * scale
