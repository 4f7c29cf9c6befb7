"""Which keys will matter: a linear score of the hidden state, fitted in closed form to what keys do to the loss.

A passage is read twice in a row. What rows beyond the window, and those of the second reading, take from a key says
what forgetting it would cost. A score is linear in `f(h) = [h, |h|, 1]`, with h the hidden state that enters the
attention module, divided by its root mean square. One weight vector per key head comes from ridge regression.

One threshold for all heads and layers turns scores into budgets: heads differ by orders of magnitude in how many keys
they need, and the same share for each of them fails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from bochner._checks import ArgumentError

RIDGE = 0.03  # of the mean diagonal of the features' second moments
ROWS = 256  # queries at a time


class Damages(NamedTuple):
    """What is done to the loss, squared: by letting each key go (g, n), and by an error in a key or a value.

    `keys`, `values` (g, d, d): an independent error e in each of them does `e' keys e` and `e' values e` in all.
    """

    dropped: Tensor
    keys: Tensor
    values: Tensor


@torch.no_grad()
def damages(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, scale: float, window: int, sinks: int = 0) -> Damages:
    """What losing or rounding the keys of a passage would do to the loss, of causal attention to it read twice.

    The square of the change, to first order, summed over the queries of a group, the rows of the first reading beyond
    the window and all of the second. q (h, 2n, d), k, v (g, 2n, .); `gradient` (h, 2n, v): of the loss by the outputs.
    The first `sinks` keys are never rounded.
    """
    g, length, _ = k.shape
    n = length // 2
    found = Damages(q.new_zeros(g, n), *(q.new_zeros(g, x.shape[-1], x.shape[-1]) for x in (k, v)))
    for start in range(0, length, ROWS):
        rows = torch.arange(start, min(start + ROWS, length), device=q.device)[:, None]
        columns = torch.arange(int(rows[-1]) + 1, device=q.device)
        # 1. The weights of the rows, (g, h / g, rows, columns).
        mine = q[:, start : start + ROWS].unflatten(0, (g, -1)) * scale
        weight = (mine @ k[:, None, : len(columns)].mT).masked_fill_(columns > rows, -math.inf).softmax(-1)
        # 2. Without key j row i changes by about `-a (v_j - o_i)`; its gradient says what that does to the loss.
        by_output = gradient[:, start : start + ROWS].unflatten(0, (g, -1))
        out = weight @ v[:, None, : len(columns)]
        keys, weight = columns[:n], weight[..., :n]
        change = by_output @ v[:, None, : len(keys)].mT
        change.sub_((by_output * out).sum(-1, keepdim=True)).mul_(weight)
        counts = (rows >= n) | (rows - keys >= window)
        found.dropped[:, : len(keys)] += change.square_().mul_(counts).sum((1, 2))
        # 3. An error e in key j changes its logit by `q_i e`, and one in its value the output by `a e`.
        weight = weight.square().mul_(counts)
        for x, size, total in ((mine, change, found.keys), (by_output, weight, found.values)):
            x = (x * size[..., sinks:].sum(-1, keepdim=True).sqrt()).flatten(1, 2)
            total += x.mT @ x
    return found


def logarithm(damage: Tensor) -> Tensor:
    """What scores are fitted to."""
    return 0.5 * damage.clamp(min=1e-30).log()


def features(h: Tensor) -> Tensor:
    """`[h, |h|, 1]` (..., 2 D + 1) of hidden states (..., D), divided by their root mean square, in float32."""
    h = h.float()
    h = h * (h.shape[-1] ** 0.5 / _size(h))
    return torch.cat([h, h.abs(), torch.ones_like(h[..., :1])], dim=-1)


def _size(h: Tensor) -> Tensor:
    return torch.linalg.vector_norm(h, dim=-1, keepdim=True).add_(1e-6)


def scores(h: Tensor, weights: Tensor) -> Tensor:
    """The score (b, g, n) of every token for every key head: hidden states (b, n, D), weights (g, 2 D + 1)."""
    h, weights = h.float(), weights.float()
    found = linear(torch.cat([h, h.abs()], dim=-1), weights[:, :-1])
    return torch.addcdiv(weights[:, -1], found, _size(h), value=h.shape[-1] ** 0.5).mT


class Ridge:
    """Sums from which the weights of linear scores follow, in float64.

    >>> fit = Ridge(3)
    >>> x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    >>> fit.add(x, x @ torch.tensor([[1.0], [2.0], [0.0]]))
    >>> fit.solve(ridge=1e-9).round().tolist()
    [[1.0, 2.0, 0.0]]
    """

    def __init__(self, size: int) -> None:
        self.second = torch.zeros(size, size, dtype=torch.float64)
        self.cross: Tensor | None = None

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add rows x (n, size) with their targets y (n, g)."""
        x, y = x.double(), y.double()
        self.second += x.mT @ x
        cross = x.mT @ y
        self.cross = cross if self.cross is None else self.cross + cross

    def solve(self, ridge: float = RIDGE) -> Tensor:
        """Weights (g, size) in float32."""
        if self.cross is None:
            raise ArgumentError("Scores were fitted to no passage; add at least one.")
        diagonal = torch.full((len(self.second),), ridge * float(self.second.diagonal().mean()), dtype=torch.float64)
        return torch.linalg.solve(self.second + torch.diag(diagonal), self.cross).mT.float()


def threshold(found: Sequence[Tensor], share: float) -> float:
    """The least score of the keys that are held, a share of those of all layers: `found` has scores (g, n) of each."""
    if not 0 < share < 1:
        raise ArgumentError(f"The 'share' of keys to hold must lie between 0 and 1, got {share!r}.")
    every = torch.cat([s.flatten().float() for s in found]).sort().values
    return float(every[min(len(every) - 1, round((1 - share) * len(every)))])


def budgets(found: Sequence[Tensor], share: float, length: int, window: int = 0) -> list[tuple[int, ...]]:
    """For each layer the older keys that each key head holds, from scores (g, n) of keys of calibration texts.

    One threshold for all of them gives each head its share; `length`: the tokens at which memory is counted.
    """
    border = threshold(found, share)
    older = max(0, length - window)
    return [tuple(round(float((row >= border).float().mean()) * older) for row in layer) for layer in found]
