"""Attention over all keys: one absorb, one read.

For an exponential map both are softmax attention. With the frequencies w_i as queries the keys are summed up,
`kv_i / norm_i = softmax_j(w_i . y_j + row_j) v_j`; with the w_i as keys they are read,
`out = softmax_i(w_i . x + log norm_i) kv_i / norm_i`. Both are stable at any scale. Any other map sums its features
block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bochner.attention.call import Call, Result
from bochner.attention.flash import attend
from bochner.attention.numerics import (
    EMPTY,
    MASKED,
    Joined,
    adjoint,
    changed,
    finish,
    flags,
    is_composed,
    product,
    scale_adjoint,
    scaled_weight,
    top_up_rows,
    topped_up,
)
from bochner.attention.recompute import Traced, add_up, run_scan
from bochner.attention.state import State, cauchy_schwarz, packed, spread_mask, unpacked
from bochner.maps.base import squared_norm

pad = torch.nn.functional.pad


def bidirectional(call: Call, q: Tensor, k: Tensor, v: Tensor, hole: Tensor | None) -> Result:
    """Rows of q (b, g, N, d), the query heads of a group one after another, over all keys k, v (b, g, s, .)."""
    if call.phi.is_exponential and call.normalize and (q.device.type == "cpu" or is_composed()):
        return Result(_exponential(call, q, k, v, hole))
    result = read_rows(call, q, *key_sums(call, k, v, hole))
    if call.positive and call.may_look(q) and result.lost is not None and bool(result.lost.any()):
        wide = replace(call, dtype=torch.float64)
        again = read_rows(wide, q.double(), *key_sums(wide, k.double(), v.double(), hole))
        return again._replace(out=again.out.to(call.dtype))
    return result


def _exponential(call: Call, q: Tensor, k: Tensor, v: Tensor, hole: Tensor | None) -> Tensor:
    query, key, dtype = call.phi.exponent("query"), call.phi.exponent("key"), call.dtype
    assert query is not None
    assert key is not None
    # 1. Keys, summed up for each frequency.
    w, scale = scaled_weight(key, call.root, dtype)
    y, extra = changed(key, k.to(dtype), call.root)
    row = key.constant + extra - (key.half * scale**2) * squared_norm(y)
    if hole is not None:
        row = row.masked_fill(spread_mask(hole), MASKED)
    kv, log_norm = attend(w.expand(*k.shape[:2], -1, -1), y, v.to(dtype), row.mT)
    # 2. Queries, over the frequencies.
    for offset in (key.offset, query.offset):
        if offset is not None:
            log_norm = log_norm + offset.to(dtype).unsqueeze(-1)
    w, _ = scaled_weight(query, call.root, dtype)
    x, _ = changed(query, q.to(dtype), call.root)
    return attend(x, w.expand(*k.shape[:2], -1, -1), kv, log_norm.mT)[0]


def key_sums(call: Call, k: Tensor, v: Tensor, hole: Tensor | None) -> tuple[Tensor, Tensor]:
    """The packed state of all keys, (b, g, m, v + 1), and its log scale (b, g)."""
    sums, ref = run_scan(SumScan(call, hole), k, v)
    return sums, ref


def read_rows(call: Call, q: Tensor, sums: Tensor, ref: Tensor) -> Result:
    """Rows of q (b, g, N, d) over the keys of a packed state."""
    out, lost, small = run_scan(ReadScan(call, ref), q, sums)
    return Result(out, None, lost, small)


def absorb_keys(call: Call, state: State, k: Tensor, v: Tensor, hole: Tensor | None) -> State:
    """A state after more keys k, v (b, g, s, .), block by block."""
    sums, ref = key_sums(call, k, v, hole)
    top = torch.maximum(state.log_scale, ref)
    old, new = ((x - top).exp()[..., None, None] for x in (state.log_scale, ref))
    return unpacked(packed(state) * old + sums * new, top)


def blocks(call: Call, length: int, lead: int, device: torch.device) -> list[slice]:
    """Row blocks that stay in cache; one block while everything must be plain operations."""
    rows = length if is_composed() else call.rows(lead, device)
    return [slice(i, min(i + rows, length)) for i in range(0, length, rows)]


@dataclass(frozen=True)
class SumScan:
    """The packed state of keys, and its scale."""

    call: Call
    hole: Tensor | None
    num_smooth: int = 1

    def run(self, *tensors: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        call, (k, v) = self.call, tensors
        b, g, s, _ = k.shape
        features = call.features("key")
        sums = torch.zeros(b, g, call.phi.feature_dim, v.shape[-1] + 1, dtype=call.dtype, device=k.device)
        ref = torch.full((b, g), EMPTY, dtype=call.dtype, device=k.device)
        for part in blocks(call, s, b * g, k.device):
            f = features(k[..., part, :])
            scale = self._masked(f.log_scale, part)
            new = torch.maximum(ref, scale.detach().amax((-2, -1)))
            weighted = pad(v[..., part, :].to(call.dtype), (0, 1), value=1.0) * (scale - new[..., None, None]).exp()
            more = product("sums", f.values.mT, weighted)
            sums = torch.addcmul(more, sums, (ref - new).exp()[..., None, None])
            ref = new
        return (sums, ref), ref

    def back(self, tensors: Sequence[Tensor], kept: Any, grads: Sequence[Tensor]) -> Sequence[Tensor | None]:
        call, (k, v), dsums = self.call, tensors, grads[0]
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        dparams: list[Tensor | None] = [None] * len(call.parameters)
        features = call.traced_features("key")
        for part in blocks(call, k.shape[-2], k.shape[0] * k.shape[1], k.device):
            f = Traced(features, k[..., part, :], call.parameters)
            weight = (self._masked(f.log_scale, part) - kept[..., None, None]).exp()
            dpsi = (pad(v[..., part, :].to(call.dtype), (0, 1), value=1.0) * weight) @ dsums.mT
            dv[..., part, :] = (f.values @ dsums[..., :-1]) * weight
            dk[..., part, :], more = f.pull(dpsi, (f.values * dpsi).sum(-1, keepdim=True))
            dparams = add_up(dparams, more)
        return dk, dv, *dparams

    def _masked(self, log_scale: Tensor, part: slice) -> Tensor:
        return log_scale if self.hole is None else log_scale.masked_fill(spread_mask(self.hole[:, part]), MASKED)


@dataclass(frozen=True)
class ReadScan:
    """Rows (b, g, N, v) over a packed state of the scale `ref`; which are lost and which small, (b, g, N, 1)."""

    call: Call
    ref: Tensor
    num_smooth: int = 1

    def run(self, *tensors: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        call, (q, sums) = self.call, tensors
        features, joined = call.features("query"), Joined(q.shape[-2])
        for part in blocks(call, q.shape[-2], q.shape[0] * q.shape[1], q.device):
            f = features(q[..., part, :])
            bound = None if call.positive else cauchy_schwarz(f.values, sums[..., -1].unsqueeze(-2))
            own = f.log_scale if call.row_scale_matters else torch.zeros_like(f.log_scale)
            total = product("read", f.values, sums)
            if call.top_up is not None:
                total = topped_up(total, sums[..., -1:, :], call.top_up.squeeze(-1))
            log_ref = self.ref[..., None, None] + own
            joined.add(finish(total, log_ref, bound, None, call.normalize, call.policy, call.floor))
        rows = joined.rows()
        return (rows.out, *flags(rows)), rows

    def back(self, tensors: Sequence[Tensor], kept: Any, grads: Sequence[Tensor]) -> Sequence[Tensor | None]:
        call, (q, sums) = self.call, tensors
        total = adjoint(kept, grads[0], call.normalize)
        dq, dsums = torch.empty_like(q), torch.zeros_like(sums)
        dparams: list[Tensor | None] = [None] * len(call.parameters)
        features = call.traced_features("query")
        for part in blocks(call, q.shape[-2], q.shape[0] * q.shape[1], q.device):
            f, g = Traced(features, q[..., part, :], call.parameters), total[..., part, :]
            phi, n = f.values, g.shape[-2]
            if call.top_up is not None:
                den, last = phi @ sums[..., -1:], sums[..., -1:, :]
                phi, g = top_up_rows(phi, g, den, last, call.top_up.squeeze(-1))
            dsums += phi.mT @ g
            dphi = g @ sums.mT
            dscale = scale_adjoint(phi, dphi, n) if call.row_scale_matters else None
            dq[..., part, :], more = f.pull(dphi[..., :n, :], dscale)
            dparams = add_up(dparams, more)
        return dq, dsums, *dparams
