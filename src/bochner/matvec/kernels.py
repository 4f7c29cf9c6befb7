"""`Kernel`: a radial kernel with its bandwidth; dense blocks, products in tiles, gradients. `Problem`: its matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .._checks import BochnerError, floating, lookup, positive_numbers
from .profiles import ALIASES, PROFILES, Profile
from .tiles import Frame, Tiles, left, make_frame, point_gradients, right

BANDWIDTHS = (1e-140, 1e140)  # squares of distances must neither vanish nor overflow in double precision


class Gradients(NamedTuple):
    """Of one number, to both sets of points and to the bandwidth of every feature (d,); `y` is None if X is Y."""

    x: Tensor
    y: Tensor | None
    bandwidth: Tensor


class Kernel:
    """A radial kernel, "gaussian" (or "rbf"), "laplace" ("matern12"), "matern32", "matern52" or "student".

    `bandwidth`: a number, or one for each feature. The Gaussian kernel is exp(-|x - y|^2 / (2 bandwidth^2)).

    Example:
        >>> import torch
        >>> X = torch.tensor([[0.0], [1.0]])
        >>> Kernel("laplace", 0.5).block(X)
        tensor([[1.0000, 0.1353],
                [0.1353, 1.0000]])
    """

    def __init__(self, name: str = "gaussian", bandwidth: Any = 1.0) -> None:
        self.profile: Profile = lookup(PROFILES, ALIASES.get(name, name), "kernel")
        self.bandwidth = _bandwidth(bandwidth)

    @property
    def name(self) -> str:
        return self.profile.name

    def __repr__(self) -> str:
        return f"Kernel({self.name!r}, {self.told_bandwidth})"

    @property
    def told_bandwidth(self) -> str:
        """The bandwidth in words: the number, or the range of several."""
        if isinstance(self.bandwidth, float):
            return f"{self.bandwidth:.6g}"
        return f"{float(self.bandwidth.min()):.4g} to {float(self.bandwidth.max()):.4g}"

    def frame(self, keys: Tensor, arithmetic: str) -> Frame:
        """Coordinates in which one bandwidth is one unit, centred on these points."""
        keys = _table(keys)
        if isinstance(self.bandwidth, Tensor) and self.bandwidth.numel() != keys.shape[1]:
            raise BochnerError(
                f"The 'bandwidth' must be one number or one for each of {keys.shape[1]} features, got "
                f"{self.bandwidth.numel()}."
            )
        return make_frame(self.profile, keys, self.bandwidth, arithmetic)

    @property
    def precise(self) -> str:
        """The arithmetic in which copies of a point have the kernel 1: a peak magnifies what matrix products round."""
        return "float64" if self.profile.convex else "difference"

    def _placed(self, X: Tensor, Y: Tensor | None, precise: str) -> tuple[Frame, Tensor, Tensor]:
        frame = self.frame(X if Y is None else Y, "float32" if _table(X).dtype == torch.float32 else precise)
        z = frame.place(X)
        return frame, z, z if Y is None else frame.place(Y)

    def block(self, X: Tensor, Y: Tensor | None = None) -> Tensor:
        """K(X, Y), (n, s), in the dtype of X; Y None: K(X, X) with ones on its diagonal."""
        frame, z, w = self._placed(X, Y, self.precise)
        block = Tiles(frame)(left(z), right(w))
        if Y is None:
            block.fill_diagonal_(1.0)
        return block

    def gradients(self, X: Tensor, Y: Tensor | None, G: Tensor | tuple[Tensor, Tensor]) -> Gradients:
        """Gradients of sum_ij G_ij K(x_i, y_j); G (n, s), or a pair A (n, r), B (s, r) that means A B'.

        Where one number is the bandwidth of all features, its gradient is the sum over them. Cost: about five products.
        """
        frame, z, w = self._placed(X, Y, "float64")
        weight = (lambda a, b: G[a, b]) if isinstance(G, Tensor) else (lambda a, b: G[0][a] @ G[1][b].T)
        for_z, for_w = point_gradients(Tiles(frame), z, w, weight)
        # z = (x - centre) scale: the bandwidth h scales z by 1/h, and moving the centre changes nothing.
        inward = (for_z * z).sum(0) + (for_w * w).sum(0)
        bandwidth = -inward / torch.as_tensor(self.bandwidth, dtype=torch.float64)
        if Y is None:
            return Gradients((for_z + for_w) * frame.scale, None, bandwidth)
        return Gradients(for_z * frame.scale, for_w * frame.scale, bandwidth)


def _table(points: Tensor) -> Tensor:
    if floating(points, "points", "Kernel").ndim != 2:
        raise BochnerError(f"The 'points' of Kernel must have shape (n, d), got {tuple(points.shape)}.")
    return points


def _bandwidth(value: Any) -> float | Tensor:
    """A positive number in range, or a float64 tensor (d,) of such."""
    found = positive_numbers(value, "bandwidth", "KernelOperator")
    if not (BANDWIDTHS[0] <= np.min(found) and np.max(found) <= BANDWIDTHS[1]):
        raise BochnerError(
            f"The 'bandwidth' must be between {BANDWIDTHS[0]:g} and {BANDWIDTHS[1]:g}, got {np.min(found):g}; "
            "rescale the points."
        )
    return found if isinstance(found, float) else torch.from_numpy(found)


@dataclass(frozen=True)
class Problem:
    """The kernel matrix between `queries` (n, d) and `keys` (s, d), and how well it must be multiplied."""

    kernel: Kernel
    queries: Tensor
    keys: Tensor
    symmetric: bool  # the queries are the keys
    eps: float
    seed: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.queries.shape[0], self.keys.shape[0]

    @property
    def points(self) -> int:
        """Keys, and queries where they are others."""
        return len(self.keys) + (0 if self.symmetric else len(self.queries))

    @property
    def dtype(self) -> torch.dtype:
        """Of the points, and so of the answers."""
        return self.queries.dtype


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
            if need and value is not None:
                value = value.sum() if like.numel() == 1 else value
                value = value.reshape(like.shape).to(like.dtype)
            out.append(value if need else None)
        return for_x, *out, None, None, None
