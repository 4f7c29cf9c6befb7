"""Sequences split over the ranks of `torch.distributed`: only states cross the wire, whatever the length.

Every rank holds a contiguous shard of the sequence, of any length (shards may differ). Bidirectional attention is one
reduction of the states, causal attention an exclusive scan. Gradients flow through the communication: if every rank
calls backward on its own part of the loss, each gets the gradient of the sum. Parameters used on all ranks then hold
partial gradients; DistributedDataParallel (over all ranks) or one all-reduce adds them up.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bochner._checks import BochnerError, BochnerWarning
from bochner.attention.core import _Call, _check, check_scale, linear_attention
from bochner.attention.state import EMPTY, State, merge, spread_mask
from bochner.maps import feature_map
from bochner.maps.base import FeatureMap


def sequence_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi: FeatureMap | str,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    group: Any = None,
    on_small_normalizer: str = "clamp",
) -> Tensor:
    """`linear_attention` over a sequence whose shards lie on the ranks of `group`, in rank order.

    q, k, v and `key_padding_mask` are this rank's shards, as in `linear_attention`; so is the result. `phi` must be the
    same map on every rank (same seed and statistics). Bytes sent per rank: one state, O(b h m v), independent of the
    length.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise BochnerError("sequence_parallel_attention needs torch.distributed; call init_process_group first.")
    phi = feature_map(phi, dim=q.shape[-1])
    _check(q, k, v, phi, is_causal, key_padding_mask, None, 0, None, on_small_normalizer, None)
    scale = check_scale(scale, q, "sequence_parallel_attention")
    options: dict[str, Any] = {"scale": scale, "on_small_normalizer": on_small_normalizer}
    local = summarize(q, k, v, phi, key_padding_mask=key_padding_mask, scale=scale)
    if is_causal:
        before = exclusive_scan(local, group)
        return linear_attention(
            q, k, v, phi, is_causal=True, key_padding_mask=key_padding_mask, state=before, **options
        )
    with torch.autocast(q.device.type, enabled=False):
        call = _Call(phi, q, k, v, math.sqrt(scale), True, True, on_small_normalizer, False)
        out = call.read_all(q, all_reduce(local, group), k.shape[1], call.finish)
        lost = call.report(q, k, v)
        if lost is not None:
            warnings.warn(
                f"{int(lost.sum())} of {lost.numel()} attention rows are zero: their terms span more than {call.dtype} "
                "holds; pass float64.",
                BochnerWarning,
                stacklevel=2,
            )
    return out.reshape(*q.shape[:-1], v.shape[-1])


def summarize(
    q: Tensor, k: Tensor, v: Tensor, phi: FeatureMap, *, key_padding_mask: Tensor | None, scale: float
) -> State:
    """The state of a shard's keys; q gives only dtype and heads."""
    with torch.autocast(q.device.type, enabled=False):
        if key_padding_mask is not None:
            hole = spread_mask(key_padding_mask)
            k, v = k.masked_fill(hole, 0), v.masked_fill(hole, 0)
        call = _Call(phi, q, k, v, math.sqrt(scale), True, True, "clamp", False)
        return call.absorb_all(k, v, key_padding_mask)


def all_reduce(state: State, group: Any = None) -> State:
    """The merge of all ranks' states, on every rank: one maximum and one sum."""
    ref = state.log_scale.detach().clone()
    dist.all_reduce(ref, op=dist.ReduceOp.MAX, group=group)
    weight = (state.log_scale - ref).exp()
    packed = torch.cat([state.kv, state.norm.unsqueeze(-1)], dim=-1) * weight[..., None, None]
    total = _Sum.apply(packed, group)
    return State(total[..., :-1], total[..., -1], ref)


def exclusive_scan(state: State, group: Any = None) -> State:
    """The merge of the states of all lower ranks; empty on rank 0."""
    rank = dist.get_rank(group)
    packed = torch.cat([state.kv, state.norm.unsqueeze(-1)], dim=-1)
    gathered = _Gather.apply(packed, group)
    scales = [torch.empty_like(state.log_scale) for _ in range(dist.get_world_size(group))]
    dist.all_gather(scales, state.log_scale.detach().contiguous(), group=group)
    # Every rank touches the whole gathered tensor, so that all of them take part in its backward.
    before = State(gathered[0, ..., :-1] * 0, gathered[0, ..., -1] * 0, torch.full_like(state.log_scale, EMPTY))
    for i in range(rank):
        before = merge(before, State(gathered[i, ..., :-1], gathered[i, ..., -1], scales[i]))
    return before


class _Sum(torch.autograd.Function):
    """Sum over ranks; its adjoint is the same sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Gather(torch.autograd.Function):
    """All ranks' tensors stacked; its adjoint sums what every rank says of this rank's tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x, group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)], None
