"""What is to be multiplied, as one frozen description: engines, checks and storage read it, nobody changes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels import Kernel


@dataclass(frozen=True)
class Problem:
    """The kernel matrix between `queries` (n, d) and `keys` (s, d), and how well it must be multiplied."""

    kernel: Kernel
    bandwidth: float
    queries: Tensor
    keys: Tensor
    symmetric: bool  # the queries are the keys
    eps: float
    confidence: float
    seed: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.queries.shape[0], self.keys.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of the points, and so of the answers."""
        return self.queries.dtype

    @property
    def single(self) -> bool:
        """Whether approximate methods may work in single precision: eps is far above its rounding."""
        return self.dtype == torch.float32 or self.eps >= 1e-3

    @property
    def arithmetic(self) -> str:
        return "float32" if self.single else "float64"

    def generator(self) -> torch.Generator:
        """A fresh generator: everything built from this description is a function of it."""
        return torch.Generator().manual_seed(self.seed)
