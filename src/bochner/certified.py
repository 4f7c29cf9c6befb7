"""Softmax attention to a stated error, row by row: blocks of keys that provably do not matter are skipped.

Keys lie in blocks of similar ones. A block of n keys with mean c, radius r and largest variance t gives a query q the
mass sum_j exp(q . k_j). With R = |q| r, Jensen's inequality bounds it from below and Bennett's from above:

    n exp(q . c)  <=  mass  <=  n exp(q . c) (1 + (t / r^2) (exp(R) - 1 - R)).

A row skips blocks while the sum of their upper bounds is small against the lower bound of all mass. With skipped mass
at most s and visited mass m the row's output is off by at most `2 max|v| s / (s + m)`: that is its certificate.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bochner._checks import BochnerError, floating, positive_float

BLOCK = 32  # keys of a block
TILE = 64  # queries that decide together which blocks they visit
CHUNK = 512  # causal rows whose own chunk of keys is visited whole
ROUNDS = 4  # of k-means
DENSE = 0.7  # the share of the pairs beyond which a tile visits all of them: gathering costs more than it saves


class Certified(NamedTuple):
    """Attention with its certificate.

    `output` (..., n, v); `bound` (..., n): the Euclidean distance of each row from exact attention is at most this;
    `visited`: the share of the pairs of queries and keys that were evaluated.
    """

    output: Tensor
    bound: Tensor
    visited: float


class Blocks(NamedTuple):
    """Keys in blocks: `k`, `v` (blocks, size, .), `live` (blocks, size), and what bounds need, (blocks, .)."""

    k: Tensor
    v: Tensor
    live: Tensor
    centre: Tensor
    log_count: Tensor
    radius: Tensor
    spread: Tensor


def certified_attention(
    q: Tensor, k: Tensor, v: Tensor, *, error: float = 0.01, is_causal: bool = False, scale: float | None = None
) -> Certified:
    """Softmax attention in which every row is within `error` times the largest value's norm of the exact one.

    `q` (..., n, d), `k` (..., s, d), `v` (..., s, v), as in `torch.nn.functional.scaled_dot_product_attention`; heads
    are not grouped. Keys that provably carry too little mass are not visited. How many those are depends on the data:
    `visited` tells. It pays for keys in tight clusters. On heads of pretrained transformers it does not: |q| r is 8 to
    19 there, the bounds are that far above the true masses, and all pairs are visited. Not differentiable.

    >>> g = torch.Generator().manual_seed(0)
    >>> k = 8 * torch.randn(16, 8, generator=g).repeat(64, 1)  # few distinct keys
    >>> out, bound, visited = certified_attention(k, k, torch.randn(1024, 4, generator=g), error=0.01)
    >>> bool(visited < 0.9), bool((bound <= 0.01 * 5).all())
    (True, True)
    """
    _check(q, k, v, error, is_causal)
    lead, (n, d), s = q.shape[:-2], q.shape[-2:], k.shape[-2]
    root = (d**-0.5 if scale is None else positive_float(scale, "scale", "certified_attention")) ** 0.5
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    outs, bounds, visited = [], [], 0.0
    with torch.no_grad():
        rows = [t.to(dtype).reshape(-1, *t.shape[-2:]) for t in (q, k, v)]
        for x, y, values in zip(*rows, strict=True):
            attend = _causal if is_causal else _whole
            out, bound, count = attend(x * root, y * root, values, error)
            outs.append(out)
            bounds.append(bound)
            visited += count
    pairs = len(outs) * (n * (n + 1) / 2 if is_causal else n * s)
    out = torch.stack(outs).view(*lead, n, v.shape[-1]).to(q.dtype)
    return Certified(out, torch.stack(bounds).view(*lead, n), visited / pairs)


def _check(q: Tensor, k: Tensor, v: Tensor, error: float, is_causal: bool) -> None:
    owner = "certified_attention"
    for name, t in (("q", q), ("k", k), ("v", v)):
        if floating(t, name, owner).ndim < 2:
            raise BochnerError(f"The {name!r} of {owner} must be (..., rows, size), got shape {tuple(t.shape)}.")
    if q.shape[:-2] != k.shape[:-2] or k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise BochnerError(f"The shapes of q, k, v in {owner} do not fit: {shapes}; repeat grouped key heads.")
    if not k.shape[-2] or (is_causal and q.shape[-2] != k.shape[-2]):
        raise BochnerError(f"{owner} needs keys, and causal rows as many, got {q.shape[-2]} rows, {k.shape[-2]} keys.")
    if positive_float(error, "error", owner) >= 2:
        raise BochnerError(f"The 'error' of {owner} must be below 2, which any answer has, got {error!r}.")


def _whole(q: Tensor, k: Tensor, v: Tensor, error: float) -> tuple[Tensor, Tensor, float]:
    """Every row sees all keys."""
    blocks = make_blocks(k, v)
    out, bound, count = q.new_empty(len(q), v.shape[-1]), q.new_empty(len(q)), 0.0
    largest = float(v.norm(dim=-1).max())
    for rows in similar(q, TILE):
        out[rows], bound[rows], seen = _tile(q[rows], blocks, None, largest, error)
        count += seen
    return out, bound, count


def _causal(q: Tensor, k: Tensor, v: Tensor, error: float) -> tuple[Tensor, Tensor, float]:
    """Rows see the blocks of earlier chunks, and of their own chunk the keys up to their own."""
    out, bound, count = q.new_empty(len(q), v.shape[-1]), q.new_empty(len(q)), 0.0
    largest, past = v.norm(dim=-1).cummax(0).values, None
    for start in range(0, len(q), CHUNK):
        own = slice(start, start + CHUNK)
        keys, values = k[own], v[own]
        places = torch.arange(len(keys), device=k.device)
        for rows in similar(q[own], TILE):
            hidden = places > rows[:, None]
            near = (keys, values, hidden)
            at = start + rows
            out[at], bound[at], seen = _tile(q[at], past, near, float(largest[at.max()]), error)
            count += seen
        blocks = make_blocks(keys, values)
        past = blocks if past is None else Blocks(*(torch.cat(pair) for pair in zip(past, blocks, strict=True)))
    return out, bound, count


def _tile(
    q: Tensor, blocks: Blocks | None, near: tuple[Tensor, Tensor, Tensor] | None, largest: float, error: float
) -> tuple[Tensor, Tensor, float]:
    """Rows (t, v) of some queries, their bounds (t,), and how many pairs they visited.

    `near`: keys and values that are visited whole, and where they are hidden, (t, s).
    """
    logits, values, count = [], [], 0.0
    skipped = q.new_full((len(q),), -math.inf)
    if near is not None:
        keys, near_values, hidden = near
        logits.append((q @ keys.mT).masked_fill(hidden, -math.inf))
        values.append(near_values)
        count += float((~hidden).sum())
    if blocks is not None:
        least, most = mass_bounds(q, blocks)
        all_mass = least if not logits else torch.cat([least, logits[0]], dim=-1)
        visit, skipped = _choose(least, most, all_mass.logsumexp(-1), error)
        keys, far_values, live = (t[visit].flatten(0, 1) for t in (blocks.k, blocks.v, blocks.live))
        logits.append((q @ keys.mT).masked_fill(~live, -math.inf))
        values.append(far_values)
        count += len(q) * float(live.sum())
    logit = torch.cat(logits, dim=-1)
    seen = logit.logsumexp(-1)
    out = (logit - seen[:, None]).exp() @ torch.cat(values)
    return out, 2 * largest * torch.sigmoid(skipped - seen) + _rounding(q, logit, largest), count


def _choose(least: Tensor, most: Tensor, total: Tensor, error: float) -> tuple[Tensor, Tensor]:
    """The blocks that some row of a tile must visit, and the log of the mass that each row skips, at most.

    A row may skip the mass `total * error / 2`; of the blocks of a tile those go first whose mass matters least.
    """
    allowed = total + math.log(error / 2)
    weight = (most - allowed[:, None]).amax(0)  # of the row to which the block matters most
    order = weight.argsort()
    spent = (most - allowed[:, None]).exp().clamp_max(1e30)[:, order].cumsum(-1).amax(0)
    free = int((spent <= 1).sum())
    if free < (1 - DENSE) * len(order):
        free = 0
    skipped = most[:, order[:free]].logsumexp(-1) if free else most.new_full((len(most),), -math.inf)
    return order[free:].sort().values, skipped


def mass_bounds(q: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Logarithms of the least and of the most mass that each block can give to each query, (t, blocks)."""
    least = q @ blocks.centre.mT + blocks.log_count
    reach = q.norm(dim=-1)[:, None] * blocks.radius
    # log(1 + x (e^R - 1 - R)) for x in [0, 1], without overflow and not below its true value for small R.
    series = torch.where(reach < 1e-2, reach.square() * 0.51, torch.expm1(reach.clamp_max(60)) - reach)
    growth = torch.where(reach < 60, torch.log1p(blocks.spread * series), reach)
    slack = 1e-5 * (1 + least.abs() + reach)  # of float32 sums
    return least - slack, least + growth + slack


def make_blocks(k: Tensor, v: Tensor) -> Blocks:
    """Keys and values in blocks of similar keys."""
    groups = similar(k, BLOCK)
    places = k.new_full((len(groups), BLOCK), -1, dtype=torch.long)
    for row, group in zip(places, groups, strict=True):
        row[: len(group)] = group
    live = places >= 0
    places = places.clamp_min(0)
    keys, count = k[places], live.sum(-1, keepdim=True).to(k.dtype)
    weight = live.to(k.dtype)[..., None]
    centre = (keys * weight).sum(1) / count
    apart = (keys - centre[:, None]) * weight
    radius = apart.norm(dim=-1).amax(-1) * (1 + 1e-5) + 1e-12
    spread = torch.linalg.matrix_norm(apart.mT @ apart / count[..., None], ord=2) * (1 + 1e-4)
    return Blocks(keys, v[places], live, centre, count.squeeze(-1).log(), radius, (spread / radius**2).clamp(1e-9, 1))


def similar(x: Tensor, size: int) -> list[Tensor]:
    """The places of rows (n, d) in groups of at most `size` that are alike: k-means, a few rounds, and cut."""
    n = len(x)
    count = -(-n // size)
    centres = x[torch.linspace(0, n - 1, count, device=x.device).long()]
    for _ in range(ROUNDS):
        nearest = (x @ centres.mT - centres.square().sum(-1) / 2).argmax(-1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, x)
        members = torch.bincount(nearest, minlength=count).to(x.dtype)[:, None]
        centres = torch.where(members > 0, sums / members.clamp_min(1), centres)
    order = nearest.argsort(stable=True)
    return [
        piece for group in order.split(torch.bincount(nearest).tolist()) for piece in group.split(size) if len(piece)
    ]


def _rounding(q: Tensor, logit: Tensor, largest: float) -> Tensor:
    """What rounding may add to a row: of logits, exponentials and sums."""
    size = torch.where(logit.isfinite(), logit.abs(), 0.0).amax(-1)
    return 4 * torch.finfo(q.dtype).eps * (q.shape[-1] ** 0.5 * (1 + size) + math.log2(logit.shape[-1] + 1)) * largest
