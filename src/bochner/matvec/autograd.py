"""Kernel products inside a model: gradients to x, to the points and to the bandwidths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .kernels import Problem


class KernelProduct(Function):
    """y = K x, or K' x. The gradient of x is K' g; those of points and bandwidth follow from G = g x'."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        queries: Tensor | None,
        keys: Tensor | None,
        bandwidth: Tensor | None,
        product: Callable[[Tensor, bool], Tensor],
        problem: Problem,
        adjoint: bool,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.like = queries, keys, bandwidth
        ctx.product, ctx.problem, ctx.adjoint = product, problem, adjoint
        return product(x.detach(), adjoint).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        needs, problem = ctx.needs_input_grad, ctx.problem
        for_x = ctx.product(gradient, not ctx.adjoint).to(x.dtype) if needs[0] else None
        if not any(needs[1:4]):
            return for_x, *[None] * 6
        pair = [t.detach().double().reshape(len(t), -1) for t in (gradient, x)]
        queries, keys = problem.queries.double(), None if problem.symmetric else problem.keys.double()
        found = problem.kernel.gradients(queries, keys, (pair[1], pair[0]) if ctx.adjoint else (pair[0], pair[1]))
        out: list[Tensor | None] = []
        for need, like, value in zip(needs[1:4], ctx.like, found, strict=True):
            if not need or value is None:
                out.append(None)
                continue
            value = value.sum() if like.numel() == 1 and value.numel() > 1 else value
            out.append(value.reshape(like.shape).to(like.dtype))
        return for_x, *out, None, None, None
