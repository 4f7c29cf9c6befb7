"""Going down a tree of masses: all draws at once in torch, or a few one by one in numpy.

A step costs less in numpy than to call torch, so that few draws, each with some ten steps, are several times as fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

FEW = 4  # draws that are faster one by one
BELOW_ONE = 1 - 1e-6  # rounding must not carry u past the last entry with any mass


def choose(mass: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """One of the last axis in proportion to its mass, by inversion of u in [0, 1), and the log of its share."""
    total = mass.cumsum(-1)
    aim = (u * BELOW_ONE).unsqueeze(-1) * total[..., -1:]
    child = (total <= aim).sum(-1)
    return child, log_share(mass, child)


def log_share(mass: Tensor, child: Tensor) -> Tensor:
    """The log of the share that a child has of the masses on the last axis."""
    return (mass.gather(-1, child.unsqueeze(-1)).squeeze(-1) / mass.sum(-1)).log()


def choose_one(mass: np.ndarray, u: float) -> tuple[int, float]:
    """The same of one row of masses."""
    total = mass.cumsum()
    child = int(total.searchsorted(u * BELOW_ONE * total[-1], side="right"))
    return child, math.log(mass[child] / total[-1])


def one_by_one(
    steps: Sequence[tuple[int, Callable[[int, int], np.ndarray]]], u: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Places (b, k) and their log probabilities, by inversion of u (steps, b, k).

    For each step, from the root on, how many children a node has, and a function that gives their masses for a query,
    from the query's row and the node; the last node may have fewer.
    """
    places, logs = np.zeros(u.shape[1:], dtype=np.int64), np.zeros(u.shape[1:], dtype=u.dtype)
    for i, j in np.ndindex(*places.shape):
        node, log = 0, 0.0
        for step, (fan, masses) in enumerate(steps):
            child, share = choose_one(masses(i, node), u[step, i, j])
            node, log = fan * node + child, log + share
        places[i, j], logs[i, j] = node, log
    return places, logs
