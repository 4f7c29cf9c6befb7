"""Causal attention: a scan over chunks of c rows. Earlier chunks are read from their state, the own one by scores.

No statistic of a later key enters an earlier row's arithmetic, so that the future cannot move the past even by
rounding: the values of a chunk are weighted relative to the largest key scale *before* it. A row that has met a key far
beyond that is lost, and computed again with care.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bochner.attention.call import Call, Result
from bochner.attention.numerics import (
    EMPTY,
    MASKED,
    RANGES,
    Joined,
    Rows,
    add_product,
    adjoint,
    finish,
    flags,
    is_composed,
    map_rows,
    may_look,
    mixed,
    product,
    scale_adjoint,
    top_up_rows,
    topped_up,
    weighted,
)
from bochner.attention.recompute import Traced, add_up, run_scan
from bochner.attention.state import State, packed, spread_mask, unpacked
from bochner.maps.base import Features

CHUNK = 64  # rows of one causal chunk
pad = torch.nn.functional.pad


def causal(call: Call, q: Tensor, k: Tensor, v: Tensor, hole: Tensor | None, state: State) -> Result:
    """Rows of q (b, g, r, n, d) over the keys before and at each, k and v (b, g, n, .), after those of `state`."""
    scan = CausalScan(call, hole)
    out, sums, lost, small, ref = run_scan(scan, q, k, v, packed(state), state.log_scale)
    return Result(out.flatten(2, 3), unpacked(sums, ref), lost.flatten(2, 3), small.flatten(2, 3))


class Keys(NamedTuple):
    """Features and values of the keys of t chunks of c, and the references of their scales.

    psi (b, g, t, c, m); log_scale (b, g, t, c, 1); values (b, g, t, c, v); refs (b, g, t + 1),
    the largest scale before each chunk and after the last.
    """

    psi: Tensor
    log_scale: Tensor
    values: Tensor
    refs: Tensor

    @classmethod
    def gather(cls, features: Features, v: Tensor, hole: Tensor | None, ref: Tensor, c: int) -> Keys:
        """From features (b, g, t c, m) and values (b, g, t c, v), after keys of the scale `ref` (b, g)."""
        psi, log_scale = features
        if hole is not None:
            log_scale = log_scale.masked_fill(spread_mask(hole), MASKED)
        log_scale = log_scale.unflatten(2, (-1, c))
        tops = log_scale.detach().amax((-2, -1))
        refs = torch.cat([ref.unsqueeze(-1), tops], dim=-1).cummax(-1).values
        return cls(psi.unflatten(2, (-1, c)), log_scale, v.to(psi.dtype).unflatten(2, (-1, c)), refs)

    def start(self) -> Tensor:
        """The reference of each chunk's rows, (b, g, t): past keys', else the first key's, which all of them see."""
        scale, before = self.log_scale.detach().squeeze(-1), self.refs[..., :-1]
        first = scale.gather(-1, (scale > EMPTY).to(torch.int8).argmax(-1, keepdim=True)).squeeze(-1)
        return torch.where(before > EMPTY, before, first.clamp_min(EMPTY))

    def peak(self) -> Tensor:
        """The largest scale up to each row, (b, g, t, c)."""
        scale = self.log_scale.detach().squeeze(-1)
        return torch.maximum(scale.cummax(-1).values, self.refs[..., :-1, None])

    def near(self, start: Tensor) -> Tensor:
        """Weights relative to the start of the chunk, (b, g, t, c, 1); rows beyond the clamp are lost."""
        return (self.log_scale - start[..., None, None]).clamp_max(RANGES[self.psi.dtype].rise).exp()

    def far(self) -> Tensor:
        """Weights relative to the end of the chunk, (b, g, t, c, 1)."""
        return (self.log_scale - self.refs[..., 1:, None, None]).exp()

    def states(self, first: Tensor) -> tuple[Tensor, Tensor]:
        """The packed state before each chunk, (b, g, t, m, v + 1), and after the last."""
        values = weighted(self.values, self.far(), name="weighted")
        return prefix(product("sums", self.psi.mT, values), self.refs, first)


def prefix(sums: Tensor, refs: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """What precedes each of t blocks, (b, g, t, m, v), and all; the sums of block i are relative to refs[i + 1].

    One product with a triangle of weights: quadratic in t, with a small constant. Valid until the next one.
    """
    place = torch.arange(sums.shape[2] + 1, device=sums.device)
    weight = (refs[..., None, 1:] - refs[..., :, None]).clamp_max(0).exp() * (place[:, None] > place[None, :-1])
    return mixed("states", weight.to(sums.dtype), sums, [(first, (refs[..., :1] - refs).exp())])


def prefix_adjoint(grads: Tensor, refs: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of each block's sums and of `first`, from those of what precedes each block and of the whole."""
    fade = (refs[..., :-1] - refs[..., 1:]).exp()[..., None, None]
    out = torch.empty_like(grads)
    for i in reversed(range(grads.shape[2])):
        out[:, :, i] = last
        last = torch.addcmul(grads[:, :, i], last, fade[:, :, i])
    return out, last


@dataclass(frozen=True)
class CausalScan:
    """Rows (b, g, r, n, v) and the packed state after the last key; which rows are lost, which small; its scale."""

    call: Call
    hole: Tensor | None
    num_smooth: int = 2

    def run(self, *tensors: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        q, k, v, sums, ref = tensors
        query, key, n = self.call.features("query"), self.call.features("key"), q.shape[-2]
        q, k, v, hole = self._whole(q, k, v)
        joined, starts = Joined(n), []
        for part, c in self._blocks(q):
            starts.append((sums, ref))
            keys = Keys.gather(key(k[..., part, :]), v[..., part, :], None if hole is None else hole[:, part], ref, c)
            states, sums = keys.states(sums)
            rows = self._rows(query(by_chunk(q[..., part, :], c)), keys, states)
            joined.add(map_rows(rows, lambda t: by_head(t, self.call.groups)))
            ref = keys.refs[..., -1]
        rows = joined.rows()
        return (rows.out, sums, *flags(rows), ref.clone()), (starts, rows)

    def _rows(self, fq: Features, keys: Keys, states: Tensor) -> Rows:
        """Finished rows (b, g, t, r c, .): the states before their chunk, and the chunk up to them."""
        call, (_, _, t, c, _) = self.call, keys.psi.shape
        phi = fq.values.unflatten(2, (t, -1))
        far = product("far", phi, states)
        scores = product("scores", phi, keys.psi.mT).unflatten(3, (-1, c))
        beyond = None
        if is_composed():  # rows that are lost could not be computed again: a reference for every row
            ref = keys.peak()
            decay = (keys.log_scale.mT - ref.unsqueeze(-1)).clamp_max(0).exp().tril()
            carry = (keys.refs[..., :-1, None] - ref).exp().unsqueeze(-1)
            scores = (scores * decay.unsqueeze(3)).flatten(3, 4)
            values = pad(keys.values, (0, 1), value=1.0)
            total = scores @ values + far * self._per_row(carry)
            if call.top_up is not None:
                last = states[..., -1:, :] * carry + (decay * keys.psi[..., -1:].mT) @ values
                total = topped_up(total, self._per_row(last), call.top_up)
            seen = None if call.positive else decay @ keys.psi + states[..., -1].unsqueeze(-2) * carry
        else:
            start = keys.start()
            ref = start.unsqueeze(-1).expand(*start.shape, c)
            weight = keys.near(start)
            scores = (scores.tril() if scores.requires_grad else scores.tril_()).flatten(3, 4)
            values = weighted(keys.values, weight, name="weighted")
            total = add_product(far, product("near", scores, values), 1.0)
            if call.top_up is not None:
                last = states[..., -1:, :] + (values * keys.psi[..., -1:]).cumsum(-2)
                total = topped_up(total, self._per_row(last), call.top_up)
            seen = None if call.positive else (keys.psi * weight).cumsum(-2) + states[..., -1].unsqueeze(-2)
            peak = keys.peak()
            rise = peak - ref
            ref = ref.masked_fill(peak <= EMPTY, EMPTY)
            if not may_look(phi) or bool((rise > RANGES[call.dtype].rise).any()):
                beyond = self._per_row((rise > RANGES[call.dtype].rise).unsqueeze(-1))
        log_ref = self._per_row(ref.unsqueeze(-1))
        if call.row_scale_matters:
            log_ref = log_ref + fq.log_scale.unflatten(2, (t, -1))
        bound = None
        if seen is not None:
            size = torch.linalg.vector_norm(seen.detach(), dim=-1, keepdim=True)
            bound = self._per_row(size) * torch.linalg.vector_norm(phi.detach(), dim=-1, keepdim=True)
        return finish(total, log_ref, bound, beyond, call.normalize, call.policy, call.floor)

    def back(self, tensors: Sequence[Tensor], kept: Any, grads: Sequence[Tensor]) -> Sequence[Tensor | None]:
        (q, k, v, _, _), (starts, rows), call = tensors, kept, self.call
        query, key = call.traced_features("query"), call.traced_features("key")
        total = adjoint(rows, grads[0], call.normalize)
        dsums = grads[1]
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        dparams: list[Tensor | None] = [None] * len(call.parameters)
        for (part, c), (sums, ref) in reversed(list(zip(self._blocks(q), starts, strict=True))):
            fq = Traced(query, by_chunk(q[..., part, :], c), call.parameters)
            fk = Traced(key, k[..., part, :], call.parameters)
            hole = None if self.hole is None else self.hole[:, part]
            keys = Keys.gather(Features(fk.values, fk.log_scale), v[..., part, :], hole, ref, c)
            g = by_chunk(total[..., part, :], c).unflatten(2, (keys.psi.shape[2], -1))
            phi, rows = fq.values.unflatten(2, g.shape[2:4]), g.shape[2:4]
            if call.top_up is not None:
                phi, g = self._topped_up(phi, g, keys, sums)
            dphi, dpsi, dvalues, dsums = self._chunk_adjoint(phi, keys, sums, g, dsums)
            dscale = scale_adjoint(phi, dphi, rows[1]).flatten(2, 3) if call.row_scale_matters else None
            dx, more = fq.pull(dphi[..., : rows[1], :].flatten(2, 3), dscale)
            dpsi = dpsi.flatten(2, 3)
            dq[..., part, :] = by_head(dx.unflatten(2, rows), call.groups)
            dparams = add_up(dparams, more)
            dk[..., part, :], more = fk.pull(dpsi, (fk.values * dpsi).sum(-1, keepdim=True))
            dparams = add_up(dparams, more)
            dv[..., part, :] = dvalues.flatten(2, 3)
        return dq, dk, dv, dsums, None, *dparams

    def _chunk_adjoint(
        self, phi: Tensor, keys: Keys, sums: Tensor, g: Tensor, dsums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of phi, psi, values and the state before, from g (b, g, t, r c, v + 1) of the sums."""
        c, (states, _) = keys.psi.shape[-2], keys.states(sums)
        near, far = keys.near(keys.start()), keys.far()
        values = weighted(keys.values, near)
        # 1. The own chunk.
        scores = (phi @ keys.psi.mT).unflatten(3, (-1, c)).tril_().flatten(3, 4)
        back = (g @ values.mT).unflatten(3, (-1, c)).tril_().flatten(3, 4)
        dphi, dpsi, dvalues = back @ keys.psi, back.mT @ phi, (scores.mT @ g[..., :-1]) * near
        # 2. The chunks before it.
        dphi += g @ states.mT
        dstates, dsums = prefix_adjoint(phi.mT @ g, keys.refs, dsums)
        dpsi += weighted(keys.values, far) @ dstates.mT
        dvalues += (keys.psi @ dstates[..., :-1]) * far
        return dphi, dpsi, dvalues, dsums

    def _topped_up(self, phi: Tensor, g: Tensor, keys: Keys, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Features and gradients of rows (b, g, t, r c, .) that were topped up, see `top_up_rows`."""
        c, (states, _), weight = keys.psi.shape[-2], keys.states(sums), keys.near(keys.start())
        scores = (phi @ keys.psi.mT).unflatten(3, (-1, c)).tril_().flatten(3, 4)
        den = phi @ states[..., -1:] + scores @ weight
        last = states[..., -1:, :] + (weighted(keys.values, weight) * keys.psi[..., -1:]).cumsum(-2)
        assert self.call.top_up is not None
        return top_up_rows(phi, g, den, self._per_row(last), self.call.top_up)

    def _whole(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """While compiling, whole chunks only: the length may be symbolic."""
        hole, n = self.hole, q.shape[-2]
        if not torch.compiler.is_compiling():
            return q, k, v, hole
        extra = -n % CHUNK
        if hole is None:
            hole = torch.zeros(k.shape[0], n, dtype=torch.bool, device=k.device)
        q, k, v = (pad(t, (0, 0, 0, extra)) for t in (q, k, v))
        return q, k, v, pad(hole, (0, extra), value=True)

    def _blocks(self, q: Tensor) -> list[tuple[slice, int]]:
        """Row blocks of several chunks, for fewer and larger operations; the last chunk may be shorter, on its own."""
        n = q.shape[-2]
        if torch.compiler.is_compiling():
            return [(slice(0, n), CHUNK)]
        c = CHUNK
        m, r = self.call.phi.feature_dim, self.call.groups
        # A block holds features of keys and of r heads of queries, scores, and sums that are as large.
        share = (1 + r) * max(1.0, c / m) * (1 if self.call.learns else 2)
        chunks = max(1, int(self.call.rows(q.shape[0] * q.shape[1], q.device) / share) // c)
        whole = n - n % c
        found = [(slice(i, min(i + chunks * c, whole)), c) for i in range(0, whole, chunks * c)]
        return [*found, (slice(whole, n), n - whole)] if n > whole else found

    def _per_row(self, x: Tensor) -> Tensor:
        """(b, g, t, c, 1) to (b, g, t, r c, 1): what all query heads of a group share."""
        return x if self.call.groups == 1 else x.repeat(1, 1, 1, self.call.groups, 1)


def by_chunk(x: Tensor, c: int) -> Tensor:
    """(b, g, r, t c, d) to (b, g, t r c, d): the rows of a chunk, of all query heads of the group, together."""
    if x.shape[2] == 1:
        return x.squeeze(2)
    return x.unflatten(3, (-1, c)).transpose(2, 3).flatten(2, 4)


def by_head(x: Tensor, r: int) -> Tensor:
    """(b, g, t, r c, d) to (b, g, r, t c, d)."""
    if r == 1:
        return x.flatten(2, 3).unsqueeze(2)
    return x.unflatten(3, (r, -1)).transpose(2, 3).flatten(3, 4)
