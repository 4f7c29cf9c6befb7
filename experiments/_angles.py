"""Pairs of vectors of one length at given angles, and estimates of their kernel over many draws."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from bochner import FeatureMap, kernel_estimate


def pairs(angles: Tensor, length: float, dim: int) -> tuple[Tensor, Tensor]:
    """x (n, dim), the same in every row, and y (n, dim) at these angles to it; at pi exactly -x."""
    x, y = torch.zeros(2, len(angles), dim, dtype=torch.float64)
    x[:, 0] = length
    y[:, 0], y[:, 1] = length * angles.cos(), length * angles.sin()
    y[(angles - math.pi).abs() < 1e-12] = -x[0]  # the errors of long vectors magnify a rounding of pi
    return x, y


def equal_flops(projections: int, dim: int, width: int, n: int) -> int:
    """The m at which making a bipolar hybrid costs as many multiplications as sines and cosines of some projections."""
    budget = projections * (dim + 2)
    return max(m for m in range(1, projections) if (m + n) * dim + 4 * m * (width * n + 1) <= budget)


def estimates(phi: FeatureMap, x: Tensor, y: Tensor, draws: int) -> Tensor:
    """(draws, n) estimates of the kernel of every pair; the heads of a map are draws."""

    def parts() -> Iterator[Tensor]:
        heads = phi.num_heads or 1
        for seed in range(-(-draws // heads)):
            phi.redraw_(seed)
            yield kernel_estimate(phi, x[:1].expand(heads, -1, -1), y.expand(heads, -1, -1))[:, 0]

    phi.double()
    return torch.cat(list(parts()))


def mean_square(samples: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """The mean squared error of every pair and its standard error."""
    squares = (samples - truth).square()
    return squares.mean(0), squares.std(0) / len(squares) ** 0.5
