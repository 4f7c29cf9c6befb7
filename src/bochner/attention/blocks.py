"""Block windows of bidirectional attention without gradients, in few steps: the call that converted encoders make.

The same rows as `zone` computes for every other case: all keys are summed up by blocks at once, and the sums outside
each zone are one product with a matrix of zeros and ones. Where terms span more than the dtype holds there is no
result, and the general scan takes over.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from bochner._products import LARGEST, product
from bochner.attention.call import Call
from bochner.attention.flash import FORWARD
from bochner.attention.geometry import cut
from bochner.attention.numerics import EMPTY, MASKED, may_look, topped_up, weighted
from bochner.attention.state import spread_mask

MOST = 128  # blocks, for the work grows with their square
pad = torch.nn.functional.pad


def suits(call: Call, q: Tensor, k: Tensor, v: Tensor, hole: Tensor | None) -> bool:
    """Whether `block_rows` may try: q (b, h, n, d), k and v (b, g, n, .)."""
    w, n, phi = call.window, k.shape[2], call.phi
    if call.is_causal or call.learns or call.groups > 1 or not (w and call.window_kind == "block" and call.normalize):
        return False
    if not (may_look(q) and phi.kernel != "gaussian" and call.positive and v.shape[-1] == q.shape[-1]):
        return False
    if not 3 * w < n <= MOST * w or call.sinks > w or k.shape[1] * _largest(call, n, v.shape[-1]) > LARGEST:
        return False
    return hole is None or not call.sinks or not bool(hole[:, : call.sinks].any())


def _largest(call: Call, n: int, size: int) -> int:
    """Elements of the largest intermediate result of one head: features, or sums of blocks."""
    return call.phi.feature_dim * max(n, -(-n // call.window) * (size + 1))


@torch.no_grad()
def block_rows(call: Call, q: Tensor, k: Tensor, v: Tensor, hole: Tensor | None) -> Tensor | None:
    """Rows (b, g, n, v), None where they must be computed otherwise; some sequences at a time."""
    b, g, n, size = v.shape
    q, k, v = (x.to(call.dtype) for x in (q, k, v))
    out = v.new_empty(b, g, -(-n // call.window) * call.window, size)
    step = max(1, LARGEST // (g * _largest(call, n, size)))
    for i in range(0, b, step):
        some = slice(i, i + step)
        if not _fill(call, out[some], q[some], k[some], v[some], None if hole is None else hole[some]):
            return None
    return out[..., :n, :]


def _fill(call: Call, out: Tensor, q: Tensor, k: Tensor, v: Tensor, hole: Tensor | None) -> bool:
    """Write rows `out` (b, g, t c, v) of queries, keys and values (b, g, n, .); whether they came out."""
    c, (b, g, n, _), s = call.window, k.shape, call.sinks
    t = out.shape[2] // c
    keys, values = (cut(x, 2, -c, (t + 1) * c, name=f"zone {name}") for x, name in ((k, "keys"), (v, "values")))
    sink_keys, sink_values = k[..., :s, :] * call.root**2, v[..., :s, :]
    if n < t * c:  # whole blocks
        q, k, v = pad(q, (0, 0, 0, t * c - n)), keys[..., c:-c, :], values[..., c:-c, :]
    sums, top = _sums(call, k, v, n, hole)
    zone_keys, zone_values = (x.flatten(0, 1).unfold(1, 3 * c, c).mT for x in (keys, values))
    hidden = _edges(t, c, n, call.dtype) if hole is None else _hidden(hole, g, t, c, call.dtype)
    # 1. The kernel, relative to exp(beyond).
    far = product("outside", _apart(t, call.dtype), sums.flatten(3)).view(sums.shape)
    phi, own = call.features("query")(q)
    kernel, beyond = product("far", phi.unflatten(2, (-1, c)), far), own + top
    if call.top_up is not None:
        kernel = topped_up(kernel, far[..., -1:, :], call.top_up)
    kernel = kernel.flatten(2, 3)
    # 2. The zone.
    rows, mask = q.flatten(0, 1).unflatten(1, (-1, c)), hidden.expand(b * g, -1, c, -1)
    mean, log_norm = FORWARD(rows, zone_keys, zone_values, 0.0, False, attn_mask=mask, scale=call.root**2)
    log_norm = log_norm.reshape(b, g, -1, 1)
    # 3. One normaliser for both, and for the sinks where the zone does not hold them.
    log_ref = torch.maximum(beyond, log_norm).clamp_min_(EMPTY)
    carry, exact = (beyond - log_ref).exp_(), (log_norm - log_ref).exp_()
    total = torch.addcmul(exact, kernel[..., -1:], carry)
    if s:
        weights = (q @ sink_keys.mT).sub_(log_ref).exp_()
        weights[..., : 2 * c, :] = 0
        total += weights.sum(-1, keepdim=True)
    least, most = torch.aminmax(total)
    if not (float(least) >= call.floor and float(most) < torch.inf):
        return False
    # 4. The values.
    torch.mul(kernel[..., :-1], carry.div_(total), out=out)
    out.unflatten(2, (-1, c)).addcmul_(mean.unflatten(0, (b, g)), exact.div_(total).unflatten(2, (-1, c)))
    if s:
        out += product("sinks", weights.div_(total), sink_values)
    return True


def _sums(call: Call, k: Tensor, v: Tensor, n: int, hole: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums of the blocks of keys that the kernel sees, (b, g, t, m, v + 1), relative to exp(top), (b, g, 1, 1)."""
    c, s = call.window, call.sinks
    psi, scale = call.features("key")(k)
    top = scale.amax(-2, keepdim=True)
    weight = (scale - top).exp_()
    weight[..., :s, :] = 0
    weight[..., n:, :] = 0
    if hole is not None:
        weight[..., :n, :].masked_fill_(spread_mask(hole), 0)
    values = weighted(v, weight, name="weighted").unflatten(2, (-1, c))
    return product("sums", psi.unflatten(2, (-1, c)).mT, values), top


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _apart(t: int, dtype: torch.dtype) -> Tensor:
    """1 where a block of keys is beyond the zone of a block of rows, (t, t)."""
    i = torch.arange(t, device="cpu")
    return ((i[:, None] - i).abs() > 1).to(dtype)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _edges(t: int, c: int, n: int, dtype: torch.dtype) -> Tensor:
    """What is added to the logits of zones, (1, t, 1, 3 c): places without a key see nothing."""
    return _hidden(torch.zeros(1, n, dtype=torch.bool, device="cpu"), 1, t, c, dtype)


def _hidden(hole: Tensor, g: int, t: int, c: int, dtype: torch.dtype) -> Tensor:
    """The same for keys that are masked, (b g, t, 1, 3 c)."""
    empty = pad(hole, (c, (t + 1) * c - hole.shape[1]), value=True)
    bias = torch.zeros(empty.shape, dtype=dtype, device=hole.device).masked_fill_(empty, MASKED)
    return bias.unfold(1, 3 * c, c).unsqueeze(2).repeat_interleave(g, 0)
