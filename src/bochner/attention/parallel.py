"""Sequences split over the ranks of `torch.distributed`: only states cross the wire, whatever the length.

Every rank holds a contiguous shard of the sequence, of any length (shards may differ). Bidirectional attention is one
reduction of the states, causal attention an exclusive scan. Gradients flow through the communication: if every rank
calls backward on its own part of the loss, each gets the gradient of the sum. Parameters used on all ranks then hold
partial gradients; DistributedDataParallel (over all ranks) or one all-reduce adds them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bochner._checks import BochnerError, accumulation_dtype, floating
from bochner.attention.api import linear_attention, report
from bochner.attention.attend import nothing_seen
from bochner.attention.checks import Options, check_finite, check_map, check_mask, check_qkv
from bochner.attention.features import EMPTY, PreparedMap
from bochner.attention.layout import Layout, Near
from bochner.attention.scan import Call, Result, absorb_keys, scan_rows
from bochner.attention.state import Keys, State, Sums, mean_of, merge, unmasked, value_sums
from bochner.maps import feature_map
from bochner.maps.base import FeatureMap

OWNER = "sequence_parallel_attention"


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
    on_small_normalizer: str = "mean",
) -> Tensor:
    """`linear_attention` over a sequence whose shards lie on the ranks of `group`, in rank order.

    q, k, v and `key_padding_mask` are this rank's shards, as in `linear_attention`; so is the result. `phi` must be the
    same map on every rank (same seed and statistics). Bytes sent per rank: one state, O(b h m v), independent of the
    length.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise BochnerError("sequence_parallel_attention needs torch.distributed; call init_process_group first.")
    with _together(q, group):
        phi = feature_map(phi, dim=floating(q, "q", OWNER).shape[-1])
        check_qkv(q, k, v, OWNER)
        options = Options(is_causal, scale, on_small_normalizer=on_small_normalizer).checked(q, k, OWNER)
        check_map(phi, q, k)
        check_mask(key_padding_mask, k, OWNER)
        k, v = unmasked(key_padding_mask, k, v)
        check_finite(OWNER, q, k, v)
    phi.begin_pass_()
    prepared = PreparedMap(phi, options.scale, accumulation_dtype(q.dtype))
    call = Call.of(Near(is_causal=False), prepared, q, k)
    with torch.autocast(q.device.type, enabled=False):
        empty = nothing_seen(prepared, k, v)
        sums = absorb_keys(call, Sums(empty.sums, empty.log_scale), Keys(k, v, key_padding_mask))
        local = State(*sums, value_sums(v.to(prepared.dtype), key_padding_mask))
        if options.is_causal:
            how: Any = {"is_causal": True, "key_padding_mask": key_padding_mask, "scale": options.scale}
            how["on_small_normalizer"] = on_small_normalizer
            return linear_attention(q, k, v, phi, state=exclusive_scan(local, group), **how)
        total = all_reduce(local, group)
        rows = q.reshape(*k.shape[:2], call.groups, *q.shape[-2:])
        none, layout = Keys(k[:, :, :0], v[:, :, :0]), Layout.of(call.near, q.shape[-2], 0, 0, 0)
        out, bad, _ = scan_rows(call, rows, none, None, Sums(total.sums, total.log_scale), layout)
        if bad is not None:
            seen = total.total[:, :, None, None]
            report(prepared, Result(out, None, bad & (seen[..., -1:] > 0)), int(bad.sum()), on_small_normalizer, 2)
            out = out.masked_fill(bad, 0) if on_small_normalizer == "zero" else torch.where(bad, mean_of(seen), out)
    return phi.end_pass(out.reshape(*q.shape[:-1], v.shape[-1]).to(q.dtype))


@contextmanager
def _together(q: Any, group: Any) -> Iterator[None]:
    """Refuse on all ranks what is refused on any: else the others would wait, or go on with NaN."""
    problem: BochnerError | None = None
    try:
        yield
    except BochnerError as error:
        problem = error
    device = q.device if isinstance(q, Tensor) else "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    bad = torch.tensor(float(problem is not None), device=device)
    dist.all_reduce(bad, op=dist.ReduceOp.MAX, group=group)
    if bool(bad):
        raise problem or BochnerError(f"The arguments of {OWNER} were refused on another rank, whose error says why.")


def all_reduce(state: State, group: Any = None) -> State:
    """The merge of all ranks' states, on every rank: one maximum and one sum."""
    ref = state.log_scale.detach().clone()
    dist.all_reduce(ref, op=dist.ReduceOp.MAX, group=group)
    sums = state.sums * (state.log_scale - ref).exp()[..., None, None]
    return _unpacked(_Across.apply(_packed(state._replace(sums=sums)), group, False), ref, state)


def exclusive_scan(state: State, group: Any = None) -> State:
    """The merge of the states of all lower ranks; empty on rank 0."""
    gathered = _Across.apply(_packed(state), group, True)
    scales = [torch.empty_like(state.log_scale) for _ in range(dist.get_world_size(group))]
    dist.all_gather(scales, state.log_scale.detach().contiguous(), group=group)
    # Every rank touches the whole gathered tensor, so that all of them take part in its backward.
    before = _unpacked(gathered[0] * 0, torch.full_like(state.log_scale, EMPTY), state)
    for i in range(dist.get_rank(group)):
        before = merge(before, _unpacked(gathered[i], scales[i], state))
    return before


def _packed(state: State) -> Tensor:
    """What a state sums, in one message (b, h, m c + v + 1)."""
    return torch.cat([state.sums.flatten(2), state.total], dim=-1)


def _unpacked(x: Tensor, log_scale: Tensor, like: State) -> State:
    sums, total = x.split([like.sums[0, 0].numel(), like.total.shape[-1]], dim=-1)
    return State(sums.unflatten(-1, like.sums.shape[2:]), log_scale, total)


class _Across(torch.autograd.Function):
    """All ranks' tensors, added up or stacked; the adjoint adds up what all ranks say of this rank's tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, stacks: bool) -> Tensor:
        ctx.group, ctx.stacks = group, stacks
        x = x.contiguous().clone()
        if not stacks:
            dist.all_reduce(x, group=group)
            return x
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x, group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)] if ctx.stacks else grad, None, None
