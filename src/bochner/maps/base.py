"""Softmax, Gaussian and generalised feature maps.

A kernel estimate is a pair of feature maps, `K(x, y) ~ phi(x) . psi(y)`. A map returns `Features(values, log_scale)`:
the true feature is `values * exp(log_scale)`, with bounded `values` and one `log_scale` per row, so that nothing
over- or underflows in any dtype. Inputs are already scaled: the softmax kernel is `exp(x . y)`, the Gaussian kernel
`exp(-|x - y|^2 / 2)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Generator, Tensor, nn

from bochner._checks import (
    BochnerError,
    accumulation_dtype,
    finite,
    floating,
    make_generator,
    one_of,
    positive_int,
)
from bochner._products import is_composed
from bochner.projections import FullPrecisionModule, Projection

KERNELS = ("softmax", "gaussian")


ROLES = ("query", "key")


class Features(NamedTuple):
    """The true feature is `values * exp(log_scale)`: values (..., n, m) bounded, log_scale (..., n, 1)."""

    values: Tensor
    log_scale: Tensor

    def dense(self) -> Tensor:
        """The features themselves; may overflow where the scaled pair does not."""
        return self.values * self.log_scale.exp()


class Exponent(NamedTuple):
    """An exponential map of one role, as what it exponentiates: `phi_i(x) = exp(w_i . z + offset_i + row)`.

    `weight` (m, d) holds the w_i and `offset` (m,) their offsets, both with a leading axis of heads where the map has
    them; `row = constant + extra - half |z|^2`. `change` takes x (..., n, d) to z (..., n, d) and extra (..., n, 1);
    without it z is x itself and extra is 0.
    """

    weight: Tensor
    offset: Tensor | None = None
    constant: float = 0.0
    half: float = 0.5
    change: Callable[[Tensor], tuple[Tensor, Tensor | float]] | None = None

    def at(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """z (..., n, d) and the row term (..., n, 1)."""
        z, extra = (x, 0.0) if self.change is None else self.change(x)
        return z, self.constant + extra - self.half * squared_norm(z)

    def logits(self, z: Tensor) -> Tensor:
        """`w_i . z + offset_i`, (..., n, m)."""
        logits = z @ self.weight.to(z.dtype).mT
        return logits if self.offset is None else logits + self.offset.to(z.dtype).unsqueeze(-2)


def exponential(logits: Tensor, log_row: Tensor | float, *, antithetic: bool = False) -> Features:
    """`exp(logits)` with the largest logit of each row moved into the log scale."""
    if antithetic:
        logits = torch.cat([logits, -logits], dim=-1)
    peak = logits.detach().amax(-1, keepdim=True)
    return Features((logits - peak).exp(), log_row + peak)


class FeatureMap(FullPrecisionModule):
    """Base of all feature maps: validation, roles, seeds, calibration.

    A subclass sets `feature_dim`, the length of its features, states `positive` (features never negative) and
    `unbiased` (for projections whose rows are exactly Gaussian), and gives `_features(x, role)` on inputs in the
    accumulation dtype; one that is a single exponential says `is_exponential` and gives `exponent(role)` instead.
    `kernel_matrix` is what it estimates.

    `dim`: d, the head size. `num_features`: m, the number of projections. `num_heads`: h for a projection and
    statistics per head, with inputs (..., h, n, d); None for one map shared by all. `kernel`: `"softmax"` or
    `"gaussian"`. `projection`: a name or an instance.
    """

    positive: bool = False
    is_exponential: bool = False
    unbiased: ClassVar[bool] = True
    feature_dim: int

    def __init__(self, dim: int, num_features: int, *, num_heads: int | None = None, kernel: str = "softmax") -> None:
        super().__init__()
        owner = type(self).__name__
        self.dim = positive_int(dim, "dim", owner)
        self.num_features = positive_int(num_features, "num_features", owner)
        self.num_heads = None if num_heads is None else positive_int(num_heads, "num_heads", owner)
        self.kernel = kernel
        self.feature_dim = self.num_features

    def forward(self, x: Tensor, role: str = "query") -> Features:
        """The features of the rows of x (..., n, d); with `num_heads`, of (..., h, n, d)."""
        one_of(role, "role", type(self).__name__, ROLES)
        x = finite(self.check_input(x, "x"), "x", type(self).__name__)
        with torch.autocast(x.device.type, enabled=False):
            return self.prepare(role)(x)

    def prepare(self, role: str) -> Callable[[Tensor], Features]:
        """The map of one role as a plain function, with whatever does not depend on x computed once.

        It neither validates nor checks for finiteness.
        """
        exponent = self.exponent(role)
        if exponent is None:
            return lambda x: self._features(x.to(accumulation_dtype(x.dtype)), role)

        def features(x: Tensor) -> Features:
            z, row = exponent.at(x.to(accumulation_dtype(x.dtype)))
            return exponential(exponent.logits(z), row)

        return features

    def prepare_scaled(self, role: str, root: float, dtype: torch.dtype) -> Callable[[Tensor], Features]:
        """The same for `root * x` in `dtype`, as attention wants it; the values hold until it is called again."""
        plain = self.prepare(role)
        return lambda x: plain(x.to(dtype) * root)

    @property
    def top_up(self) -> Tensor | None:
        """Least share of the kernel in a row's normaliser per head, that of uniform attention being the number of keys.

        For maps whose last key feature is the constant 1: what is missing is given to all keys alike. None for others.
        """
        return None

    def exponent(self, role: str) -> Exponent | None:
        """What a map that is one exponential computes, for attention to keep in range; None for all others."""
        return None

    def redraw_(self, seed: int | None = None, *, generator: Generator | None = None) -> FeatureMap:
        """Draw new random parts in place; learned parameters and calibration stay."""
        g = make_generator(seed, generator)
        for module in self.modules():
            if isinstance(module, Projection):
                module.redraw_(generator=g)
        return self

    @torch.no_grad()
    def calibrate_(self, q: Tensor | Sequence[Tensor], k: Tensor | Sequence[Tensor]) -> FeatureMap:
        """Fix data statistics from scaled queries and keys; a map without any leaves itself as it is.

        q, k: (..., n, d), with `num_heads` (..., h, n, d), or lists of such tensors for sequences of different
        lengths; with fewer key heads than query heads the query heads of a group are pooled. Statistics of the
        sequence being processed would leak the future, so they are taken here, once, and fixed.
        """
        qs, ks = ([t] if isinstance(t, Tensor) else list(t) for t in (q, k))
        if len(qs) != len(ks) or not qs:
            raise BochnerError(f"calibrate_ needs as many 'k' as 'q', and at least one, got {len(ks)} and {len(qs)}.")
        pairs = [(self._sequences(x, "q"), self._sequences(y, "k")) for x, y in zip(qs, ks, strict=True)]
        pairs = [(x, y) for x, y in pairs if x.numel() and y.numel()]
        qs, ks = [x for x, _ in pairs], [y for _, y in pairs]
        for found, name in ((qs, "q"), (ks, "k")):
            if (rows := sum(t.shape[0] * t.shape[2] for t in found)) < 2:
                raise BochnerError(
                    f"calibrate_ needs at least 2 rows of {name!r} per head, got {rows}; give more samples."
                )
        self._calibrate_sequences(qs, ks)
        return self

    def kernel_matrix(self, x: Tensor, y: Tensor) -> Tensor:
        """The exact kernel that the map estimates, (..., n, s)."""
        return KERNEL_FUNCTIONS[self.kernel](x, y)

    def trainable_(self, names: Sequence[str] | None = None) -> FeatureMap:
        """Turn named buffers (default: all floating-point ones) into parameters, keeping their state_dict keys."""
        for module in self.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer is not None and buffer.is_floating_point() and (names is None or name in names):
                    delattr(module, name)
                    module.register_parameter(name, nn.Parameter(buffer.clone()))
        return self

    def check_input(self, x: Any, name: str) -> Tensor:
        """A floating tensor whose last axis is d and, with heads, whose head axis fits; else one sentence."""
        owner = type(self).__name__
        x = floating(x, name, owner)
        if x.ndim < 2 or x.shape[-1] != self.dim:
            raise BochnerError(
                f"The {name!r} of {owner} must have shape (..., n, {self.dim}), got {tuple(x.shape)}; "
                f"build the map with dim={x.shape[-1] if x.ndim else 0} or pass the right tensor."
            )
        if self.num_heads is not None and (x.ndim < 3 or x.shape[-3] % self.num_heads):
            raise BochnerError(
                f"The {name!r} of {owner} must have shape (..., {self.num_heads}, n, {self.dim}) for a map with "
                f"num_heads={self.num_heads}, got {tuple(x.shape)}."
            )
        if self.num_heads is not None and x.shape[-3] != self.num_heads and name == "x":
            raise BochnerError(
                f"The 'x' of {owner} has {x.shape[-3]} heads, the map num_heads={self.num_heads}; "
                f"group them as (..., {self.num_heads}, n, {self.dim})."
            )
        return x

    def _sequences(self, x: Tensor, name: str) -> Tensor:
        """Calibration rows as (b, h or 1, n, d) in float64; the query heads of a group one after another."""
        x = finite(self.check_input(x, name), name, type(self).__name__).detach().to(torch.float64)
        heads, r = self.num_heads or 1, self._group(x)
        return x.reshape(math.prod(x.shape[:-2]) // (heads * r), heads, r * x.shape[-2], self.dim)

    def _group(self, x: Tensor) -> int:
        return 1 if self.num_heads is None else x.shape[-3] // self.num_heads

    def _features(self, x: Tensor, role: str) -> Features:
        raise NotImplementedError

    def _calibrate_sequences(self, q: list[Tensor], k: list[Tensor]) -> None:
        """Statistics from batches of sequences (b, h or 1, n, d), float64; pooled unless overridden."""
        self._calibrate(*(torch.cat([pooled(t) for t in part], dim=1) for part in (q, k)))

    def _calibrate(self, q: Tensor, k: Tensor) -> None:
        """Statistics from rows q (h or 1, N, d) and k (h or 1, S, d), float64."""

    def _spread(self, b: Tensor, x: Tensor) -> Tensor:
        """A per-head buffer (h, ...) as it broadcasts against (..., h, n, ...), in x's dtype."""
        return b.to(x.dtype) if self.num_heads is None else b.to(x.dtype).unsqueeze(-2)

    def extra_repr(self) -> str:
        heads = "" if self.num_heads is None else f", num_heads={self.num_heads}"
        return f"dim={self.dim}, num_features={self.num_features}{heads}, kernel={self.kernel!r}"


def squared_norm(x: Tensor) -> Tensor:
    """|x|^2 of each row, (..., n, 1)."""
    if is_composed():
        return x.square().sum(-1, keepdim=True)
    result: Tensor = _SquaredNorm.apply(x)
    return result


class _SquaredNorm(torch.autograd.Function):
    """In one pass each way, without the squares in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x * (2 * grad)


def pooled(x: Tensor) -> Tensor:
    """Sequences (b, h, n, d) as one pool of rows per head, (h, b n, d)."""
    return x.transpose(0, 1).flatten(1, 2)


def kernel_estimate(phi: FeatureMap, x: Tensor, y: Tensor) -> Tensor:
    """The estimated kernel matrix `phi(x) . psi(y)` with the log scales put back, (..., n, s); quadratic, for study.

    >>> from bochner.maps import feature_map
    >>> phi = feature_map("positive", dim=2, num_features=8, seed=0)
    >>> kernel_estimate(phi, torch.zeros(1, 2), torch.zeros(1, 2))
    tensor([[1.]])
    """
    if not isinstance(phi, FeatureMap):
        raise BochnerError(
            f"The 'phi' of kernel_estimate must be a feature map, got {phi!r}; make one by bochner.feature_map."
        )
    q, k = phi(x, "query"), phi(y, "key")
    return (q.values @ k.values.mT) * (q.log_scale + k.log_scale.mT).exp()


def softmax_kernel(x: Tensor, y: Tensor) -> Tensor:
    """`exp(x . y)`, (..., n, s)."""
    return (x @ y.mT).exp()


def gaussian_kernel(x: Tensor, y: Tensor) -> Tensor:
    """`exp(-|x - y|^2 / 2)`, (..., n, s)."""
    d2 = x.square().sum(-1, keepdim=True) + y.square().sum(-1, keepdim=True).mT - 2 * x @ y.mT
    return (-0.5 * d2.clamp_min(0)).exp()


KERNEL_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": softmax_kernel,
    "gaussian": gaussian_kernel,
}
