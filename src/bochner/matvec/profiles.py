"""Radial kernels `K(q, k) = value(t)`, t = -|z - w|^2 / 2, z and w the points in units of the bandwidth.

What bounds need of a kernel is here too: how much a value can change when t is off by rounding, and where it is as
good as zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


@dataclass(frozen=True)
class Profile:
    """One radial function of t."""

    name: str
    unit: float  # length of one bandwidth in the frame: `exp2` wants log2 e folded into the coordinates
    rate: float  # how fast errors of t grow, see `change`
    floors: tuple[float, float]  # of t, in float32 and float64: denormal numbers are 3 to 30 times slower than others
    value: Callable[[Tensor], Tensor]  # in place
    derivative: Callable[[Tensor], Tensor]  # dK/dt, and 0 where a kernel with a peak has none
    convex: bool = True  # `change`: half the error of t does at most half the harm; not of a kernel with a peak

    def __reduce__(self) -> tuple[Callable[[str], Profile], tuple[str]]:
        return _named, (self.name,)

    def change(self, delta: float) -> float:
        """Bound on |K(t')/K(t) - 1| for |t' - t| <= delta."""
        x = self.rate * (delta if self.convex else math.sqrt(2.0 * delta))
        return math.expm1(x) if x < 700 else math.inf

    def floor(self, dtype: torch.dtype) -> float:
        return self.floors[0] if dtype == torch.float32 else self.floors[1]

    def floor_value(self, dtype: torch.dtype) -> float:
        """The kernel at the floor: an absolute error of every entry beyond it."""
        return float(self.value(torch.tensor([self.floor(dtype)], dtype=torch.float64)))

    def at_distance(self, distance: Tensor) -> Tensor:
        """The kernel at distances in the frame, in place."""
        floor = self.floor(distance.dtype)
        return self.value(distance.square_().mul_(-0.5).clamp_min_(floor))


def _named(name: str) -> Profile:
    return PROFILES[name]


def _length(t: Tensor) -> Tensor:
    """|z - w|, in place."""
    return t.mul_(-2.0).sqrt_()


def _matern32(t: Tensor) -> Tensor:
    decay = torch.exp(-_length(t))
    return t.add_(1.0).mul_(decay)


def _matern52(t: Tensor) -> Tensor:
    decay = torch.exp(-_length(t))
    return t.add_(t.square() / 3.0).add_(1.0).mul_(decay)


def _student(t: Tensor) -> Tensor:
    return t.mul_(-2.0).add_(1.0).reciprocal_()


def _laplace_derivative(t: Tensor) -> Tensor:
    a = _length(t.clone())
    return torch.where(a > 0, LN2 * torch.exp2(-a) / a, 0.0)


TABLE = (
    # exp(-|q-k|^2 / (2 sigma^2))
    Profile("gaussian", math.sqrt(LOG2E), LN2, (-1e2, -1e3), torch.Tensor.exp2_, lambda t: torch.exp2(t).mul_(LN2)),
    # exp(-|q-k| / sigma)
    Profile(
        "laplace", LOG2E, LN2, (-5e3, -5e5), lambda t: _length(t).neg_().exp2_(), _laplace_derivative, convex=False
    ),
    # (1 + a) exp(-a), a = sqrt(3) |q-k| / sigma
    Profile("matern32", 3.0**0.5, 1.0, (-2.4e3, -2.4e5), _matern32, lambda t: torch.exp(-_length(t.clone()))),
    # (1 + a + a^2/3) exp(-a), a = sqrt(5) |q-k| / sigma
    Profile("matern52", 5.0**0.5, 1 / 3, (-2.4e3, -2.4e5), _matern52, lambda t: _matern32(t.clone()).div_(3.0)),
    # 1 / (1 + |q-k|^2 / sigma^2)
    Profile("student", 1.0, 2.0, (-1e30, -1e290), _student, lambda t: _student(t.clone()).square_().mul_(2.0)),
)
PROFILES = {profile.name: profile for profile in TABLE}
ALIASES = {"rbf": "gaussian", "matern12": "laplace"}
