"""How many features for a target error: the inverses of the closed forms of :mod:`bochner.theory.softmax`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bochner.theory._common import Number, closed_form
from bochner.theory.softmax import Estimator, log_mse


@closed_form
def features_needed(
    x: Tensor,
    y: Tensor,
    target: Number,
    *,
    map: str | Estimator = "positive",
    relative: bool = True,
    kernel: str = "softmax",
    projection: str = "iid",
) -> Tensor:
    """The least number of projections whose root mean squared error is at most ``target``, for every pair.

    ``relative``: the error is measured against the kernel value. The inverse of :func:`log_mse`; whole
    numbers in float64 (infinite where even 2^1000 would not do, as for the biased ``regularized`` map beyond
    its bias).

    >>> x, y = torch.tensor([0.3, -0.1]), torch.tensor([0.2, 0.4])
    >>> from bochner.theory import relative_error
    >>> m = features_needed(x, y, 0.1)
    >>> bool(relative_error(x, y, m) <= 0.1 < relative_error(x, y, m - 1))
    True
    """
    x, y = torch.broadcast_tensors(x, y)
    goal = 2 * torch.log(target)

    def short(m: Tensor) -> Tensor:
        return log_mse(x, y, m, map, kernel=kernel, projection=projection, relative=relative) > goal

    # Double until it is enough, then bisect: the error falls with m for every map and projection here.
    high = torch.ones(x.shape[:-1], dtype=torch.float64)
    todo = short(high)
    while todo.any() and bool((high[todo] < 2.0**1000).any()):
        high = torch.where(todo, 2 * high, high)
        todo = short(high)
    low = torch.where(high > 1, high / 2, torch.zeros_like(high))
    while bool(((high - low > 1) & (high - low > high * 2.0**-51)).any()):
        mid = torch.floor((low + high) / 2).clamp(min=1)
        bad = short(mid)
        low, high = torch.where(bad, mid, low), torch.where(bad, high, torch.minimum(high, mid))
    return torch.where(todo, math.inf, high)


@closed_form
def features_uniform(dim: Number, radius: Number, eps: Number, *, constant: Number = 1.0) -> int:
    """Projections for ``max_ij |A_hat - A| <= eps`` with orthogonal trig features (Performers, Theorem 4).

    ``constant * d / delta^2 * log(4 d^(3/4) R / delta)`` with ``delta = eps exp(-R^2 / sqrt d)``; ``radius``
    R bounds the norms of the queries and keys before scaling. The theorem leaves the constant open: this is
    the scaling law, and :func:`features_pairs` the bound with a stated probability. Independent of the
    sequence length.

    >>> features_uniform(4, 1.0, 0.5) > features_uniform(4, 1.0, 1.0)
    True
    """
    d, R = float(dim), float(radius)
    log_delta = math.log(eps) - R * R / math.sqrt(d)
    log_term = math.log(4 * d**0.75 * R) - log_delta
    return max(1, math.ceil(float(constant) * d * math.exp(-2 * log_delta) * max(log_term, 0.0)))


@closed_form
def features_pairs(num_pairs: Number, radius: Number, eps: Number, *, failure: Number = 0.01) -> int:
    """Projections with which iid trig features have ``|A_hat - A| <= eps`` on all pairs, except with ``failure``.

    Hoeffding's inequality and a union bound: ``2 / delta^2 * log(2 N / p)``, ``delta = eps exp(-r^2)``, for
    inputs already scaled and of norm at most ``radius`` r. A proof with constants where Theorem 4 of
    Performers has none.

    >>> features_pairs(100, 0.5, 0.5)
    131
    """
    N, r, e, p = float(num_pairs), float(radius), float(eps), float(failure)
    return max(1, math.ceil(2 * math.exp(2 * r * r) / e**2 * math.log(2 * N / p)))
