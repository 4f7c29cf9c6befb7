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

from bochner._checks import BochnerError, accumulation_dtype, finite, floating, lookup, one_of, positive_int
from bochner._products import is_composed
from bochner.maps.redraw import RedrawnModule
from bochner.projections import Projection, make_projection

KERNELS = ("softmax", "gaussian")
ROLES = ("query", "key")
NOTHING = -1e30  # the log scale of nothing


class Features(NamedTuple):
    """The true feature is `values * exp(log_scale)`: values (..., n, m) bounded, log_scale (..., n, 1)."""

    values: Tensor
    log_scale: Tensor

    def dense(self) -> Tensor:
        """The features themselves; may overflow where the scaled pair does not."""
        return self.values * self.log_scale.exp()


class Exponent(NamedTuple):
    """An exponential map of one role, as the tensors that it exponentiates: `phi_i(x) = exp(w_i . z + offset_i + row)`.

    With `t = x - centre`: `z = basis t` and `row = constant + tilt . t - half |z|^2`; what is None is left out.
    `weight` (m, d) holds the w_i, `offset` (m,) their offsets; centre and tilt (d,), basis (d, d). All have an axis of
    heads in front where the map has them; a `constant` per head is (h, 1, 1).
    """

    weight: Tensor
    offset: Tensor | None = None
    constant: float | Tensor = 0.0
    half: float = 0.5
    centre: Tensor | None = None
    basis: Tensor | None = None
    tilt: Tensor | None = None

    def scaled(self, root: float, dtype: torch.dtype) -> Exponent:
        """The same map of `root * x`, in `dtype`: the factor goes into the tensors, no pass over x is needed."""
        parts: list[Any] = [t.to(dtype) if isinstance(t, Tensor) else t for t in self]
        weight, offset, constant, half, centre, basis, tilt = parts
        if root != 1.0:
            centre = None if centre is None else centre / root
            tilt = None if tilt is None else tilt * root
            if basis is None:
                weight, half = weight * root, half * root**2
            else:
                basis = basis * root
        return Exponent(weight, offset, constant, half, centre, basis, tilt)

    def at(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """z (..., n, d) and the row term (..., n, 1)."""
        z, row, _ = self.parts(x)
        return z, row

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z (..., n, d), the row term and |z|^2 (..., n, 1)."""
        z = self.inner(x)
        square = squared_norm(z)
        constant = self.constant.to(x.dtype) if isinstance(self.constant, Tensor) else self.constant
        row = torch.rsub(square, constant, alpha=self.half)
        if self.tilt is not None:
            t = x if self.centre is None else x - self.centre.to(x.dtype).unsqueeze(-2)
            row = row + t @ self.tilt.to(x.dtype).unsqueeze(-1)
        return z, row, square

    def inner(self, x: Tensor) -> Tensor:
        """z (..., n, d)."""
        t = x if self.centre is None else x - self.centre.to(x.dtype).unsqueeze(-2)
        return t if self.basis is None else t @ self.basis.to(x.dtype).mT

    def logits(self, z: Tensor) -> Tensor:
        """`w_i . z + offset_i`, (..., n, m)."""
        logits = z @ self.weight.to(z.dtype).mT
        return logits if self.offset is None else logits + self.offset.to(z.dtype).unsqueeze(-2)


def exponential(logits: Tensor, log_row: Tensor | float) -> Features:
    """`exp(logits)` with the largest logit of each row moved into the log scale."""
    peak = logits.detach().amax(-1, keepdim=True)
    return Features((logits - peak).exp(), log_row + peak)


def fourier(t: Tensor, x: Tensor) -> Features:
    """`[sin t, cos t] / sqrt(n)` of n products t with rows x: the features of a mean of n cosines."""
    return Features(torch.cat([t.sin(), t.cos()], dim=-1), constant_scale(x, t.shape[-1]))


def constant_scale(x: Tensor, n: int) -> Tensor:
    """The log of 1 / sqrt(n) for each row, (..., 1)."""
    return torch.full_like(x[..., :1], -0.5 * math.log(n))


def to_features(t: Tensor) -> Features:
    """Plain features (..., n, m) as `Features`, with the size of each row moved into the log scale.

    >>> to_features(torch.tensor([[1.0, 4.0]])).values
    tensor([[0.2500, 1.0000]])
    """
    if not floating(t, "t", "to_features").ndim or not t.shape[-1]:
        raise BochnerError(f"The 't' of to_features must have shape (..., n, m) with m >= 1, got {tuple(t.shape)}.")
    size = t.detach().abs().amax(-1, keepdim=True)
    size = torch.where(size > 0, size, torch.ones_like(size))  # a row of zeros keeps the scale 1
    return Features(t / size, size.log())


class FeatureMap(RedrawnModule):
    """Base of all feature maps: validation, roles, seeds, calibration.

    A subclass sets `feature_dim`, the length of its features. It states `positive` (features never negative) and
    `unbiased` (for projections whose rows are exactly Gaussian). It gives `_features(x, role)` on inputs in the
    accumulation dtype; one that is a single exponential says `is_exponential` and gives `exponent(role)` instead.
    `kernel_matrix` is what it estimates.

    `dim`: d, the head size. `num_features`: m. `num_heads`: h for random parts and statistics per head, with inputs
    (..., h, n, d); None for one map shared by all. `kernel`: the name of what it estimates.
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
        self._fingerprint: int | None = None

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

    # What the keys are summed up to. Most maps sum `psi(k) [v, 1]'`, and a row is `phi(q)` times that. A map whose last
    # key feature is the constant 1 says so by `has_constant`, and may sum other columns and read them in its own way.

    @property
    def has_constant(self) -> bool:
        """Whether the last key feature is the constant 1, so that its sums are those of the columns themselves."""
        return self.top_up is not None

    @property
    def has_positive_sums(self) -> bool:
        """Whether normalisers are positive by themselves."""
        return self.positive or self.top_up is not None

    def fitted_to(self, k: Tensor, mask: Tensor | None) -> FeatureMap:
        """The map for the scaled keys k (b, g, s, d) of one bidirectional call; most maps do not look at them."""
        return self

    def check_causal(self) -> None:
        """Refuse causal attention where the map cannot have it."""

    def num_columns(self, value_dim: int) -> int:
        """The number of columns that are summed for values of this size."""
        return value_dim + 1

    def columns(self, features: Features, v: Tensor) -> Tensor | None:
        """What is summed with the features of a key, (..., s, columns); None for its value and 1."""
        return None

    def answer(self, total: Tensor, last: Tensor | None, query: Tensor) -> tuple[Tensor, Tensor | None]:
        """Values and normaliser (..., n, v + 1) of rows, and the log of their common factor, None for 1.

        `total` (..., n, columns): `phi(q)` times the sums. `last`: the sums of the constant feature, if there is one.
        `query` (..., n, m): phi(q).
        """
        least = self.top_up
        if least is None or last is None:
            return total, None
        count = last[..., -1:]
        least = least.to(total.dtype).reshape(-1, *[1] * (total.dim() - 2))
        lack = least - total[..., -1:] / torch.where(count > 0, count, 1)
        return total + lack.clamp_min(0) * last, None

    def exponent(self, role: str) -> Exponent | None:
        """What a map that is one exponential computes, for attention to keep in range; None for all others."""
        return None

    def redraw_(self, seed: int | None = None, *, generator: Generator | None = None) -> FeatureMap:
        """Draw new random parts in place; learned parameters and calibration stay."""
        self._fingerprint = None
        super().redraw_(seed, generator=generator)
        return self

    def fingerprint(self) -> int:
        """A number that tells draws and calibrations of a map apart; training its parameters does not change it."""
        if self._fingerprint is None:
            own = [t for name, t in self.named_buffers() if not (t.requires_grad or t.is_meta or "redraw_" in name)]
            self._fingerprint = hash(tuple(float(t.double().sum()) for t in own))
        return self._fingerprint

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        self._fingerprint = None
        super()._load_from_state_dict(*args, **options)

    @torch.no_grad()
    def calibrate_(self, q: Tensor | Sequence[Tensor], k: Tensor | Sequence[Tensor]) -> FeatureMap:
        """Fix data statistics from scaled queries and keys; a map without any leaves itself as it is.

        q, k: (..., n, d), with `num_heads` (..., h, n, d), or lists of such tensors for sequences of different
        lengths; with fewer key heads than query heads the query heads of a group are pooled. Statistics of the
        sequence being processed would leak the future, so they are taken here, once, and fixed.
        """
        pairs = [(self._sequences(x, "q"), self._sequences(y, "k")) for x, y in in_turn(q=q, k=k)]
        found = {name: [p[i] for p in pairs if p[0].numel() and p[1].numel()] for i, name in enumerate("qk")}
        for name, parts in found.items():
            if (rows := sum(t.shape[0] * t.shape[2] for t in parts)) < 2:
                raise BochnerError(
                    f"calibrate_ needs at least 2 rows of {name!r} per head, got {rows}; give more samples."
                )
        self._calibrate_sequences(found["q"], found["k"])
        self._fingerprint = None
        return self

    def kernel_matrix(self, x: Tensor, y: Tensor) -> Tensor:
        """The exact kernel that the map estimates, (..., n, s)."""
        return lookup(KERNEL_FUNCTIONS, self.kernel, f"kernel of {type(self).__name__}")(x, y)

    def trainable_(self, names: Sequence[str] | None = None) -> FeatureMap:
        """Turn named buffers (default: all floating-point ones) into parameters, keeping their state_dict keys."""
        names = [names] if isinstance(names, str) else names
        every = {name.rpartition(".")[2] for name, _ in (*self.named_buffers(), *self.named_parameters())}
        for name in names or ():
            one_of(name, "names", f"{type(self).__name__}.trainable_", sorted(every))
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
        h = self.num_heads
        # Query heads of a group share a head of the map, but only attention and calibration know the groups.
        if h is not None and (x.ndim < 3 or x.shape[-3] % h or (name == "x" and x.shape[-3] != h)):
            raise BochnerError(
                f"The {name!r} of {owner} must have shape (..., {h}, n, {self.dim}) for a map with num_heads={h}, got "
                f"{tuple(x.shape)}; group the heads so."
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

    @property
    def _lead(self) -> tuple[int, ...]:
        """The axis of heads, if there is one."""
        return () if self.num_heads is None else (self.num_heads,)

    def _keep(self, **values: Tensor) -> None:
        """Register buffers, or fill those there are, whatever the axis of heads."""
        for name, value in values.items():
            if name in self._buffers or name in self._parameters:
                own = getattr(self, name)
                own.copy_(value.reshape(own.shape))
            else:
                dtype = torch.get_default_dtype() if value.is_floating_point() else value.dtype
                self.register_buffer(name, value.to(dtype).clone(memory_format=torch.contiguous_format))

    def _spread(self, b: Tensor, dtype: torch.dtype) -> Tensor:
        """A vector, of each head if there are several, as it broadcasts against rows (..., h?, n, .)."""
        return b.to(dtype) if self.num_heads is None else b.to(dtype).unsqueeze(-2)

    def extra_repr(self) -> str:
        heads = "" if self.num_heads is None else f", num_heads={self.num_heads}"
        return f"dim={self.dim}, num_features={self.num_features}{heads}, kernel={self.kernel!r}"


class ProjectedFeatures(FeatureMap):
    """Base of the maps of `projection(x)`, the products w . x with random directions w.

    A subclass may say which `kernels` it estimates, the default first, and what `norms` its directions have.
    `of_inputs`: whether `num_features=None` stands for x itself in place of products.

    `projection`: the law of the directions, a name or an instance. `num_features`: m, their number. `kernel`: one of
    `kernels`. `seed` or `generator`: of the draw.
    """

    kernels: ClassVar[Sequence[str]] = KERNELS
    norms: ClassVar[str] = "chi"
    of_inputs: ClassVar[bool] = False
    projection: Any

    def __init__(
        self,
        dim: int,
        num_features: int | None,
        *,
        projection: str | Projection = "orthogonal",
        num_heads: int | None = None,
        kernel: str | None = None,
        seed: int | None = 0,
        generator: Generator | None = None,
    ) -> None:
        kernel = self.kernels[0] if kernel is None else one_of(kernel, "kernel", type(self).__name__, self.kernels)
        bare = num_features is None and self.of_inputs
        m: Any = dim if bare else num_features
        super().__init__(dim, m, num_heads=num_heads, kernel=kernel)
        how: Any = {"num_heads": num_heads, "norms": self.norms, "seed": seed, "generator": generator}
        self.projection = nn.Identity() if bare else make_projection(projection, dim, m, **how)


class NoFeatures(FeatureMap):
    """The map of heads without a kernel: its features are zero, relative to nothing."""

    positive = True
    unbiased = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim, 1)

    def _features(self, x: Tensor, role: str) -> Features:
        zero = torch.zeros_like(x[..., :1])
        return Features(zero, zero + NOTHING)


def squared_norm(x: Tensor) -> Tensor:
    """|x|^2 of each row, (..., n, 1): the same bits whether a gradient is needed or not."""
    if not x.requires_grad:
        return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square()
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


def in_turn(**given: Tensor | Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Tensors, or lists of as many tensors each, one of each at a time."""
    lists = {name: list(t) if isinstance(t, (list, tuple)) else [t] for name, t in given.items()}
    counts = [len(parts) for parts in lists.values()]
    if len(set(counts)) > 1 or not counts[0]:
        names = " as ".join(map(repr, lists))
        raise BochnerError(f"calibrate_ needs as many {names}, and at least one, got {' and '.join(map(str, counts))}.")
    return list(zip(*lists.values(), strict=True))


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
    if any(n != s and 1 not in (n, s) for n, s in zip(x.shape[-3::-1], y.shape[-3::-1], strict=False)):
        raise BochnerError(
            f"The 'x' and 'y' of kernel_estimate must agree in all axes but the last two, got {tuple(x.shape)} and "
            f"{tuple(y.shape)}."
        )
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
