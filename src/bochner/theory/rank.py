"""What no map can do: attention through m features has rank m wherever it is the map's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bochner._checks import BochnerError, finite, floating, positive_int


def rank_floor(weights: Tensor, num_features: int, far: Tensor | None = None) -> Tensor:
    """A lower bound on the relative error |A' - A| / |A| (Frobenius) of attention weights through m features.

    Over any rectangle of pairs that are left to the map, A' has rank at most m. There, by Eckart and Young, it misses A
    by at least the root of `sum_{i > m} sigma_i^2`. Under a mask the squares of disjoint rectangles add up.

    `weights`: A, exact attention weights (..., n, s), one sequence each. `num_features`: m. `far`: (n, s) bool, the
    pairs that are left to the map, all of them by default.

    >>> rank_floor(torch.eye(4), 3)
    tensor(0.5000, dtype=torch.float64)
    """
    owner = "rank_floor"
    a = finite(floating(weights, "weights", owner), "weights", owner).double()
    m = positive_int(num_features, "num_features", owner)
    whole = torch.ones(a.shape[-2:], dtype=torch.bool) if far is None else far
    if a.ndim < 2 or not isinstance(whole, Tensor) or whole.dtype != torch.bool or whole.shape != a.shape[-2:]:
        got = tuple(far.shape) if isinstance(far, Tensor) else type(far).__name__
        raise BochnerError(
            f"The 'weights' of {owner} must be (..., n, s) and 'far' None or a bool tensor (n, s), got "
            f"{tuple(a.shape)} and {got}."
        )
    left = a.new_zeros(a.shape[:-2])
    for rows, columns in _rectangles(whole, m):
        left = left + torch.linalg.svdvals(a[..., rows, columns])[..., m:].square().sum(-1)
    return (left / a.square().sum((-2, -1)).clamp_min(1e-300)).sqrt()


def _rectangles(allowed: Tensor, m: int, top: int = 0, left: int = 0) -> Iterator[tuple[slice, slice]]:
    """Disjoint rectangles of a mask (n, s) with True throughout, larger than m both ways, by halving."""
    n, s = allowed.shape
    if min(n, s) <= m or not bool(allowed.any()):
        return
    if bool(allowed.all()):
        yield slice(top, top + n), slice(left, left + s)
        return
    for i, j in ((i, j) for i in (0, n // 2) for j in (0, s // 2)):
        part = allowed[i : n // 2 if i == 0 else n, j : s // 2 if j == 0 else s]
        yield from _rectangles(part, m, top + i, left + j)
