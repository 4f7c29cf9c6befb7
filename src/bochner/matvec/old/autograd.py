"""Kernel products inside a model: gradients with respect to x and to the bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Product = Callable[[Tensor], Tensor]


class KernelProduct(Function):
    """y = K x: the gradient of x is K' g, that of the bandwidth g . (dK/dbandwidth x) = g . slope(x)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bandwidth: Tensor | None, forward: Product, back: Product, slope: Product
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bandwidth, ctx.back, ctx.slope = bandwidth, back, slope
        return forward(x.detach()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        for_x = ctx.back(gradient).to(x.dtype) if ctx.needs_input_grad[0] else None
        for_bandwidth = None
        if ctx.needs_input_grad[1]:
            total = (gradient.double() * ctx.slope(x).double()).sum()
            for_bandwidth = total.to(ctx.bandwidth.dtype).reshape(ctx.bandwidth.shape)
        return for_x, for_bandwidth, None, None, None
