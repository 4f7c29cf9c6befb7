"""Moments of queries and keys, and the optimal constants that follow from them: what `calibrate_` needs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

ATTENDED = 0.5  # the share of attention itself in the weights of pairs; the rest is uniform
FLOOR = 1e-2  # eigenvalues of a second moment are at least this much of their mean
MAX_PAIRS = 2**24  # of one sequence and head; longer ones are thinned evenly


class PairMoments(NamedTuple):
    """Sums over weighted pairs (x, y) per head: weight (h,), x and y (h, d), xx, yy and xy (h, d, d); rows seen."""

    weight: Tensor
    x: Tensor
    y: Tensor
    xx: Tensor
    yy: Tensor
    xy: Tensor
    rows: int

    def __add__(self, other: PairMoments) -> PairMoments:  # type: ignore[override]
        return PairMoments(*(a + b for a, b in zip(self, other, strict=True)))  # type: ignore[operator]

    @classmethod
    def of(cls, x: Tensor, y: Tensor, w: Tensor) -> PairMoments:
        """The moments of x (h, n, d) and y (h, s, d) with pair weights w (h, n, s)."""
        row, column = w.sum(-1, keepdim=True), w.sum(-2).unsqueeze(-1)
        first = row.sum((-2, -1)), (row * x).sum(-2), (column * y).sum(-2)
        return cls(*first, (row * x).mT @ x, (column * y).mT @ y, x.mT @ (w @ y), x.shape[-2])

    def mean(self) -> PairMoments:
        """The moments for a total weight of one."""
        total = self.weight.clamp_min(1e-300)
        sums = (self.x, self.y, self.xx, self.yy, self.xy)
        x, y, xx, yy, xy = (t / total.view(-1, *[1] * (t.dim() - 1)) for t in sums)
        return PairMoments(torch.ones_like(total), x, y, xx, yy, xy, self.rows)

    def centred(self, a: Tensor, b: Tensor) -> PairMoments:
        """The mean moments of (x - a, y - b)."""
        m = self.mean()

        def about(second: Tensor, x: Tensor, a: Tensor, y: Tensor, b: Tensor) -> Tensor:
            return second - outer(x, b) - outer(a, y) + outer(a, b)

        seconds = about(m.xx, m.x, a, m.x, a), about(m.yy, m.y, b, m.y, b), about(m.xy, m.x, a, m.y, b)
        return PairMoments(m.weight, m.x - a, m.y - b, *seconds, m.rows)


def attended_pairs(q: Tensor, k: Tensor, kernel: str = "softmax") -> PairMoments:
    """Moments of pairs within each sequence, half by their attention and half uniform: q (b, h, n, d), k (b, h, s, d).

    The error of attention is `sum_j A_ij^2 relvar(x_i + y_j)`: pairs that are attended to count most, yet a pair that
    is not must not be given a wild estimate either.
    """
    _, h, n, _ = q.shape
    s = k.shape[-2]

    def parts() -> Iterator[PairMoments]:
        for x, y in zip(q[..., :: max(1, n * s // MAX_PAIRS), :], k, strict=True):
            row = 0.5 * y.square().sum(-1).unsqueeze(-2) if kernel == "gaussian" else 0.0
            for rows in x.split(max(1, 2**22 // (h * s)), dim=-2):
                attention = (rows @ y.mT - row).softmax(-1)
                yield PairMoments.of(rows, y, ATTENDED * attention + (1 - ATTENDED) / s)

    return reduce(add, parts())


def optimal_a(l: Tensor) -> Tensor:
    """The a <= 0 that minimises the variance of a coordinate with mean z^2 = l (Chefs' random tables).

    `(1 - u)/8`, u the larger root of `u^2 - (1 + 2l) u - 2l`, written without the cancellation at l = 0:
    `u - 1 = [2l - 1 + sqrt((1 + 2l)^2 + 8l)]/2`.
    """
    root = torch.sqrt((1 + 2 * l).square() + 8 * l)
    return -(l + (4 * l.square() + 12 * l) / (2 * (root + 1))) / 8


def second_moment_of_sum(x: Tensor, y: Tensor) -> Tensor:
    """`mean (x_i + y_j)(x_i + y_j)'` over all pairs of rows of x (..., n, d) and y (..., s, d), from their moments."""
    cross = outer(x.mean(-2), y.mean(-2))
    return x.mT @ x / x.shape[-2] + y.mT @ y / y.shape[-2] + cross + cross.mT


def floored(c: Tensor, rows: int) -> Tensor:
    """A second moment (h, d, d), shrunk by sample size and with eigenvalues at least `FLOOR` of their mean."""
    d = c.shape[-1]
    mean = torch.diagonal(c, dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp_min(1e-12)
    rho = d / (rows + d)  # fewer samples than dimensions: mostly the isotropic guess
    eye = torch.eye(d, dtype=c.dtype, device=c.device)
    values, vectors = torch.linalg.eigh((1 - rho) * (c + c.mT) / 2 + rho * mean * eye)
    values = torch.maximum(values, FLOOR * mean[..., 0])
    return (vectors * values.unsqueeze(-2)) @ vectors.mT


def floored_moment(x: Tensor) -> Tensor:
    """The floored second moment of rows x (h, n, d)."""
    return floored(x.mT @ x / x.shape[-2], x.shape[-2])


def balancing_basis(cx: Tensor, cy: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric M with `M Cx M = M^-1 Cy M^-1`, and its inverse: `M^2 = Cx^-1/2 (Cx^1/2 Cy Cx^1/2)^1/2 Cx^-1/2`."""
    root, inverse = matrix_power(cx, 0.5), matrix_power(cx, -0.5)
    m2 = inverse @ matrix_power(root @ cy @ root, 0.5) @ inverse
    return matrix_power(m2, 0.5), matrix_power(m2, -0.5)


def matrix_power(c: Tensor, power: float) -> Tensor:
    """A real power of a symmetric positive-definite matrix."""
    values, vectors = torch.linalg.eigh((c + c.mT) / 2)
    values = values.clamp_min(values.amax(-1, keepdim=True) * 1e-15)
    return (vectors * values.pow(power).unsqueeze(-2)) @ vectors.mT


def outer(x: Tensor, y: Tensor) -> Tensor:
    return x.unsqueeze(-1) * y.unsqueeze(-2)
