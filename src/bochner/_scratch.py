"""Results of large operations in buffers that are used again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Scratch:
    """Products whose result lives until the next one of the same kind, unless a gradient may need it.

    A fresh tensor of several megabytes costs as much in page faults as the product that fills it.
    """

    def __init__(self, reuse: bool = True) -> None:
        self.reuse = reuse
        self.buffers: dict[Callable[..., Tensor], Tensor] = {}

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """`a @ b`, b broadcasting against a."""
        return self._run(torch.matmul, a, b, (*a.shape[:-1], b.shape[-1]))

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """`a * b`, b broadcasting against a."""
        return self._run(torch.mul, a, b, a.shape)

    def _run(self, operation: Callable[..., Tensor], a: Tensor, b: Tensor, shape: tuple[int, ...]) -> Tensor:
        if not self.reuse or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return operation(a, b)
        buffer = self.buffers.get(operation)
        if buffer is None or buffer.shape != shape or buffer.dtype != a.dtype:
            buffer = self.buffers[operation] = a.new_empty(shape)
        return operation(a, b, out=buffer)
