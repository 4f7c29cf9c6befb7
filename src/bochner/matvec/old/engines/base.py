"""The interface of an engine: one way to multiply, holding everything drawn or measured in advance."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass
class Applied:
    """A product (n, r), the pairs it evaluated, and scores (n,) from which hold-out rows are drawn."""

    value: Tensor
    pairs: int
    scores: list[Tensor] = field(default_factory=list)
    far: Tensor | None = None  # the part of `value` that comes from far cells


class Likely(NamedTuple):
    """A bound on |Kx - y|_2 of one column, its likely size, and the probability of the bound: of what was drawn when
    the engine was built, and for every x at once."""

    bound: float = math.inf
    error: float = 0.0
    confidence: float = 0.0


class Engine:
    """`apply` multiplies x (s, r), or the adjoint x (n, r), in `dtype`.

    `certain`: the error of every product is bounded before x is known, so nothing needs checking.
    `exact`: it is nothing but rounding.
    """

    name = ""
    exact = False
    certain = False
    progress = False
    linear = False  # strictly, on purpose: products are never split or repaired
    rough = False  # whether single precision is good enough to check its products
    dtype: torch.dtype = torch.float32

    def apply(self, x: Tensor, adjoint: bool = False) -> Applied:
        raise NotImplementedError

    def slope(self, x: Tensor) -> Tensor | None:
        """bandwidth * dK/dbandwidth x, or None: an engine that cannot."""
        return None

    def error_bound(self, x: Tensor, adjoint: bool = False) -> tuple[Tensor, int]:
        """A bound on |Kx - y|_2 per column that needs no luck, rounding included, and the pairs it cost; else inf."""
        return torch.full((x.shape[1],), torch.inf, dtype=torch.float64), 0

    def likely(self, x: Tensor) -> Likely:
        """What is known with some probability about the product with one column (s, 1)."""
        return Likely()

    def row_bound(self, x: Tensor) -> Tensor | None:
        """The same for each row of one column (n,), where the engine can say more than its `error_bound`."""
        return None

    def repair(self, x: Tensor, fraction: float) -> Applied | None:
        """A better product for this x, spending about `fraction` of all pairs, or None: go exact."""
        return None

    def precise(self) -> Engine | None:
        """The same approximation in double precision, or None."""
        return None

    def describe(self) -> str:
        """One line on what a product costs and what is known about its error; may be empty."""
        return ""
