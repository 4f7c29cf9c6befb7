"""Rows that left the range, computed again: slower, in the log domain, right at any scale.

For an exponential map the sums of some keys are kept per feature, as `log norm_i` and the mean value `kv_i / norm_i`.
To a row they are m more keys with logits `log phi_i + log norm_i`, and its attention is one softmax over all of: exact
keys, sinks, kernel keys of its zone, and those. Other maps have bounded features, and float64 holds them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from bochner.attention.call import Call
from bochner.attention.geometry import Geometry
from bochner.attention.numerics import EMPTY
from bochner.attention.recompute import run_scan
from bochner.attention.state import State, packed, spread_mask
from bochner.attention.zone import ZoneScan
from bochner.maps.base import Exponent

UNDERFLOW = {torch.float32: 1e-30, torch.float64: 1e-290}  # a relative norm below this may have lost terms
NEGLIGIBLE = 12.0  # powers of e below a normaliser


class Summary(NamedTuple):
    """Keys summed up per feature: log_norm (b, g, m) and their mean value (b, g, m, v)."""

    log_norm: Tensor
    mean: Tensor

    def add(self, log_psi: Tensor, v: Tensor) -> Summary:
        """With more keys: log features (b, g, s, m) and values (b, g, s, v)."""
        log_norm = torch.logaddexp(self.log_norm, log_psi.logsumexp(-2))
        mean = self.mean * (self.log_norm - log_norm).exp().unsqueeze(-1)
        return Summary(log_norm, mean + (log_psi - log_norm.unsqueeze(-2)).exp().mT @ v)


def careful_rows(scan: ZoneScan, tensors: tuple[Tensor, ...], lost: Tensor) -> tuple[Tensor, Tensor]:
    """The rows (b, g, r, n, v) of a scan, and which of them are still doubtful (b, g, r, n, 1).

    Blocks without a row in `lost` (b, g, r, n, 1) are left zero.
    """
    q, k, v, sink_k, sink_v, sums, ref = tensors
    call, place = scan.call, scan.place
    query, key = call.phi.exponent("query"), call.phi.exponent("key")
    if query is None or key is None:
        wide = replace(scan, call=replace(call, dtype=torch.float64))
        out, _, still, _, _ = run_scan(wide, *(t.double() for t in tensors))
        return out.to(call.dtype), still
    q, k, v = place.all_rows(q), place.take(k, place.everything), place.take(v, place.everything)
    far_holes = place.take_mask(scan.far_holes, place.everything)
    log_psi = _log_features(key, k.to(call.dtype) * call.root).masked_fill(spread_mask(far_holes), EMPTY)
    values, norm = v.to(call.dtype), sums[..., -1]
    safe = torch.where(norm > 0, norm, 1)
    log_norm = torch.where(norm > 0, safe.log() + ref.unsqueeze(-1), EMPTY)
    before = Summary(log_norm, sums[..., :-1] / safe.unsqueeze(-1))
    # Features of the state that may have underflowed are known only to be below this.
    gone = torch.where(norm < UNDERFLOW[call.dtype], ref.unsqueeze(-1) + math.log(UNDERFLOW[call.dtype]), EMPTY)
    wanted = place.all_rows(lost).unflatten(3, (place.blocks, -1)).any(-1).any(-1).flatten(0, 2).any(0).tolist()
    outs: list[Tensor] = []
    doubts: list[Tensor] = []
    for i in range(place.blocks):
        blocks = slice(i, i + 1)
        if wanted[i]:
            beyond = before if call.is_causal else _all_but(log_psi, values, place.span(blocks))
            rows, doubt = _block(scan, query, q, k, values, log_psi, sink_k, sink_v, beyond, gone, blocks)
        else:
            rows = values.new_zeros(*q.shape[:3], place.block, v.shape[-1])
            doubt = torch.zeros_like(rows[..., :1], dtype=torch.bool)
        outs.append(rows)
        doubts.append(doubt)
        if call.is_causal and not place.single:
            leaves = slice(i * place.block, (i + 1) * place.block)
            before = before.add(log_psi[..., leaves, :], values[..., leaves, :])
    own = slice(place.lead, place.lead + place.rows)
    return torch.cat(outs, dim=3)[..., own, :], torch.cat(doubts, dim=3)[..., own, :]


def careful_causal(
    call: Call, q: Tensor, k: Tensor, v: Tensor, hole: Tensor | None, state: State, lost: Tensor
) -> tuple[Tensor, Tensor]:
    """Plain causal rows (b, g, r n, v) of q (b, g, r, n, d), where `lost` (b, g, r n, 1): a window of no width."""
    place = Geometry.of(call, q.shape[-2], 0, 0, k.shape[-2])
    hole = torch.zeros(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device) if hole is None else hole
    scan = ZoneScan(call, place, hole, hole, hole[:, :0].long(), None)
    tensors = (q, k, v, k[..., :0, :], v[..., :0, :], packed(state), state.log_scale)
    rows, doubtful = careful_rows(scan, tensors, lost.unflatten(2, (call.groups, -1)))
    return rows.flatten(2, 3), doubtful.flatten(2, 3)


def _block(
    scan: ZoneScan,
    query: Exponent,
    q: Tensor,
    k: Tensor,
    values: Tensor,
    log_psi: Tensor,
    sink_k: Tensor,
    sink_v: Tensor,
    beyond: Summary,
    gone: Tensor,
    blocks: slice,
) -> tuple[Tensor, Tensor]:
    call, place, span = scan.call, scan.place, scan.place.span(blocks)
    x = q.unflatten(3, (-1, place.block))[:, :, :, blocks.start].to(call.dtype) * call.root  # (b, g, r, c, d)
    log_phi = _log_features(query, x.flatten(2, 3)).unflatten(2, x.shape[2:4])
    y, sink_y = (t.to(call.dtype).unsqueeze(2) * call.root for t in (k[..., span, :], sink_k))
    holes = torch.zeros_like(scan.far_holes) if scan.holes is None else scan.holes
    holes = place.take_mask(holes, span)[:, None, None, None, :]
    nowhere = torch.zeros((), dtype=torch.bool, device=q.device)
    exact, kernel = place.exact(q.device), place.by_kernel(q.device)
    logits = [_exact(call.phi.kernel, x, y).masked_fill(holes | (nowhere if exact is None else ~exact), EMPTY)]
    parts = [values[..., span, :]]
    if sink_k.shape[-2]:
        sees = place.sees_sinks(scan.sink_position, blocks)[:, 0]
        logits.append(_exact(call.phi.kernel, x, sink_y).masked_fill(~sees[:, None, None], EMPTY))
        parts.append(sink_v.to(call.dtype))
    if kernel is not None:
        near = log_psi[..., span, :]
        pairs = [(log_phi[..., i, None, :] + near.unsqueeze(2)).logsumexp(-1) for i in range(place.block)]
        logits.append(torch.stack(pairs, dim=3).masked_fill(~kernel, EMPTY))
        parts.append(values[..., span, :])
    logits.append(log_phi + beyond.log_norm[:, :, None, None])
    parts.append(beyond.mean)
    joined = torch.cat(logits, dim=-1)
    top = joined.detach().amax(-1, keepdim=True)
    weights = (joined - top).exp() * (joined > 0.5 * EMPTY)
    den = weights.sum(-1, keepdim=True)
    rows = (weights.flatten(2, 3) @ torch.cat(parts, dim=2)).unflatten(2, x.shape[2:4])
    unknown = (log_phi.detach() + gone[:, :, None, None]).amax(-1, keepdim=True)
    doubtful = unknown > top + den.detach().log() - NEGLIGIBLE
    if not call.normalize:
        return rows * top.exp(), doubtful
    return rows / torch.where(den > 0, den, 1), doubtful


def _log_features(exponent: Exponent, x: Tensor) -> Tensor:
    z, row = exponent.at(x)
    return exponent.logits(z) + row


def _exact(kernel: str, x: Tensor, y: Tensor) -> Tensor:
    logits = x @ y.mT
    if kernel == "gaussian":
        logits = logits - 0.5 * (x.square().sum(-1, keepdim=True) + y.square().sum(-1, keepdim=True).mT)
    return logits


def _all_but(log_psi: Tensor, values: Tensor, span: slice) -> Summary:
    """All keys outside a span."""
    outside = torch.ones(log_psi.shape[-2], dtype=torch.bool, device=log_psi.device)
    outside[span] = False
    empty = torch.full_like(log_psi[..., 0, :], EMPTY)
    nothing = Summary(empty, torch.zeros(*empty.shape, values.shape[-1], dtype=values.dtype, device=values.device))
    return nothing.add(log_psi[..., outside, :], values[..., outside, :])
