"""Which keys will matter: a linear score of the hidden state, fitted in closed form to the attention keys receive.

A passage is read twice in a row. What its keys receive from rows beyond the window, and from the second reading, says
what forgetting them would cost. A score is linear in `f(h) = [h, |h|, 1]`, with h the hidden state that enters the
attention module, divided by its root mean square. One weight vector per key head comes from ridge regression.

One threshold for all heads and layers turns scores into budgets: heads differ by orders of magnitude in how many keys
they need, and the same share for each of them fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from bochner._checks import ArgumentError, lookup

FLOOR = -12.0  # the least logarithm of attention that is told apart
RIDGE = 0.03  # of the mean diagonal of the features' second moments
ROWS = 256  # queries at a time


class Received(NamedTuple):
    """What the n keys of a passage receive when it is read twice; each (g, n), queries of a group pooled by maximum.

    `again`: the most from the second reading. `far`, `mean`: the most, and the mean, from rows of the first reading
    beyond the window; `rows` (n,): how many those are. `total`: the sum over the first reading. `damage`: the square of
    what letting the key go would do to the loss, to first order, summed over the queries of the group and the rows of
    `far` and `again`; None without gradients.
    """

    again: Tensor
    far: Tensor
    mean: Tensor
    rows: Tensor
    total: Tensor
    damage: Tensor | None = None


@torch.no_grad()
def received(
    q: Tensor, k: Tensor, scale: float, window: int, *, v: Tensor | None = None, gradient: Tensor | None = None
) -> Received:
    """What keys receive from causal attention over a passage read twice: q (h, 2n, d), k (g, 2n, d).

    `v` (g, 2n, v), `gradient` (h, 2n, v): values, and the gradient of the loss by the output of each head.
    """
    g, length, _ = k.shape
    n = length // 2
    again, far, mean, total, damage = (q.new_zeros(g, n) for _ in range(5))
    for start in range(0, length, ROWS):
        rows = torch.arange(start, min(start + ROWS, length), device=q.device)[:, None]
        columns = torch.arange(int(rows[-1]) + 1, device=q.device)
        # 1. The weights of the rows, (g, h / g, rows, columns).
        mine = q[:, start : start + ROWS].unflatten(0, (g, -1)) * scale
        weight = (mine @ k[:, None, : len(columns)].mT).masked_fill_(columns > rows, -math.inf).softmax(-1)
        # 2. The rows that count: all of the second reading, those beyond the window in the first.
        keys = columns[:n]
        here, second, beyond = slice(0, len(keys)), rows >= n, (rows < n) & (rows - keys >= window)
        pooled = weight[..., :n].amax(1)
        torch.maximum(far[:, here], (pooled * beyond).amax(1), out=far[:, here])
        torch.maximum(again[:, here], (pooled * second).amax(1), out=again[:, here])
        mean[:, here] += (pooled * beyond).sum(1)
        total[:, here] += (pooled * ~second).sum(1)
        # 3. Without key j row i changes by about `-a (v_j - o_i)`; its gradient says what that does to the loss.
        if v is not None and gradient is not None:
            by_output = gradient[:, start : start + ROWS].unflatten(0, (g, -1))
            worth = by_output @ v[:, None, : len(columns)].mT
            change = weight * (worth - (weight * worth).sum(-1, keepdim=True))
            squares = change[..., :n].square().sum(1)
            damage[:, here] += (squares * (beyond | second)).sum(1)
    count = (n - window - torch.arange(n, device=q.device)).clamp(min=0)
    return Received(again, far, mean / count.clamp(min=1), count, total, None if gradient is None else damage)


def logarithm(x: Tensor) -> Tensor:
    return x.clamp(min=math.exp(FLOOR)).log()


def both(r: Received) -> Tensor:
    return logarithm(torch.maximum(r.again, r.far))


def combined(r: Received) -> Tensor:
    return 0.5 * (logarithm(r.again) + logarithm(r.mean))


def damage(r: Received) -> Tensor:
    if r.damage is None:
        raise ArgumentError("The target 'damage' needs the gradients of a loss; pass them, or use target='sum'.")
    return 0.5 * r.damage.clamp(min=1e-30).log()


TARGETS: dict[str, Callable[[Received], Tensor]] = {
    "again": lambda r: logarithm(r.again),
    "far": lambda r: logarithm(r.far),
    "mean": lambda r: logarithm(r.mean),
    "both": both,
    "sum": combined,
    "damage": damage,
    "accumulated": lambda r: logarithm(r.total),
}


def target(name: str, r: Received) -> Tensor:
    """What the scores of the keys of a passage should be, (g, n)."""
    return lookup(TARGETS, name, "target of scores")(r)


def features(h: Tensor) -> Tensor:
    """`[h, |h|, 1]` (..., 2 D + 1) of hidden states (..., D), divided by their root mean square, in float32."""
    h = without_size(h)
    return torch.cat([h, h.abs(), torch.ones_like(h[..., :1])], dim=-1)


def without_size(h: Tensor) -> Tensor:
    """Hidden states divided by their root mean square, in float32."""
    h = h.float()
    return h * (h.shape[-1] ** 0.5 / (torch.linalg.vector_norm(h, dim=-1, keepdim=True) + 1e-6))


def scores(h: Tensor, weights: Tensor) -> Tensor:
    """The score (b, g, n) of every token for every key head: hidden states (b, n, D), weights (g, 2 D + 1)."""
    h = without_size(h)
    return linear(torch.cat([h, h.abs()], dim=-1), weights[:, :-1].float(), weights[:, -1].float()).mT


def key_norms(k: Tensor) -> Tensor:
    """A score that needs no fit, (b, g, n): keys of small norm receive more attention."""
    return -k.float().norm(dim=-1)


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
