"""Sequences split over the ranks of `torch.distributed`: only states cross the wire, whatever the length.

Every rank attends to the keys of its own shard after the merged states of the others, of the lower ones if causal.
Every rank calls backward on its own part of the loss and gets the gradient of the sum; those of parameters are partial:
DistributedDataParallel over all ranks or one all-reduce adds them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bochner._checks import BochnerError, accumulation_dtype, floating
from bochner.attention.api import checked_attention
from bochner.attention.attend import after_keys, nothing_seen
from bochner.attention.checks import Options, check_qkv, refuse_values
from bochner.attention.features import EMPTY, PreparedMap
from bochner.attention.layout import Near
from bochner.attention.scan import Call
from bochner.attention.state import Keys, State, merge, unmasked
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
        check_qkv(q, k, v, OWNER, key_padding_mask, phi)
        options = Options(is_causal, scale, on_small_normalizer=on_small_normalizer).checked(q, k, OWNER)
        k, v = unmasked(key_padding_mask, k, v)
        refuse_values(OWNER, q, k, v)
    phi.begin_pass_()
    prepared = PreparedMap(phi, options.scale, accumulation_dtype(q.dtype))
    keys = Keys(k, v, key_padding_mask)
    with torch.autocast(q.device.type, enabled=False):
        local = after_keys(Call.of(Near(is_causal=False), prepared, q, k), keys, nothing_seen(prepared, k, v))
        others = of_others(local, group, only_before=options.is_causal)
    out: Tensor = checked_attention(prepared, q, keys, others, None, options)
    return out


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


def of_others(state: State, group: Any, *, only_before: bool) -> State:
    """The merge of the states of all other ranks, or of the lower ones alone."""
    message = torch.cat([state.sums.flatten(2), state.total], dim=-1)
    gathered = _Gathered.apply(message, group)
    scales = [torch.empty_like(state.log_scale) for _ in gathered]
    dist.all_gather(scales, state.log_scale.detach().contiguous(), group=group)

    def unpacked(x: Tensor, log_scale: Tensor) -> State:
        sums, total = x.split([message.shape[-1] - state.total.shape[-1], state.total.shape[-1]], dim=-1)
        return State(sums.unflatten(-1, state.sums.shape[2:]), log_scale, total)

    # Every rank touches the whole gathered tensor, so that all of them take part in its backward.
    found, rank = unpacked(gathered[0] * 0, torch.full_like(state.log_scale, EMPTY)), dist.get_rank(group)
    for i, scale in enumerate(scales):
        if i < rank or (i > rank and not only_before):
            found = merge(found, unpacked(gathered[i], scale))
    return found


class _Gathered(torch.autograd.Function):
    """All ranks' tensors; the adjoint adds up what all ranks say of this rank's. Torch's own wants the whole world."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, x = group, x.contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x, group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)], None
