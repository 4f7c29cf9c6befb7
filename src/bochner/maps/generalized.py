"""Generalised kernels of Performers: `E[f(w.x) f(w.y)]` for any function f, by name or given."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from bochner._checks import BochnerError, non_negative
from bochner.maps.base import Features, ProjectedFeatures, to_features

# Functions of torch that are never negative.
NON_NEGATIVE = ("relu", "relu6", "softplus", "sigmoid", "hardsigmoid", "exp", "abs", "square")


class GeneralizedFeatures(ProjectedFeatures):
    """`phi(x) = (f(w . x) + kernel_epsilon) / sqrt(m)`: the kernel `E[(f(w.x) + eps)(f(w.y) + eps)]`.

    Unbiased for that kernel (`kernel_matrix`), positive when f is. `num_features=None` applies f to x itself.
    Choromanski et al. 2021, section 2.2.
    """

    kernels = ("generalized",)
    of_inputs = True
    function: Any

    def __init__(self, dim: int, num_features: int | None, *, kernel_epsilon: float = 1e-3, **options: Any) -> None:
        super().__init__(dim, num_features, **options)
        self.kernel_epsilon = non_negative(kernel_epsilon, "kernel_epsilon", type(self).__name__)

    def _features(self, x: Tensor, role: str) -> Features:
        values, log_size = to_features(self.function(self.projection(x)) + self.kernel_epsilon)
        return Features(values, log_size - 0.5 * math.log(self.feature_dim))

    def kernel_matrix(self, x: Tensor, y: Tensor) -> Tensor:
        f, eps = self.function, self.kernel_epsilon
        if isinstance(self.projection, nn.Identity):
            return (f(x) + eps) @ (f(y) + eps).mT / self.feature_dim
        return expected_product(lambda t: f(t) + eps, x, y)


class ExpFeatures(GeneralizedFeatures):
    """`phi(x) = (exp(w . x) + kernel_epsilon) / sqrt(m)`: the kernel exp(|x + y|^2 / 2), kept in the log scale.

    Unbiased for that kernel and the terms of `kernel_epsilon`, positive. O(m d) per row. Choromanski et al. 2021,
    section 2.2.

    >>> ExpFeatures(4, 16, kernel_epsilon=0.0).kernel_matrix(torch.zeros(1, 4), torch.zeros(1, 4))
    tensor([[1.]])
    """

    positive = True
    function = staticmethod(torch.exp)

    def _features(self, x: Tensor, role: str) -> Features:
        t = self.projection(x)
        peak = t.detach().amax(-1, keepdim=True).clamp_min(0)
        return Features((t - peak).exp() + self.kernel_epsilon * (-peak).exp(), peak - 0.5 * math.log(self.feature_dim))

    def kernel_matrix(self, x: Tensor, y: Tensor) -> Tensor:
        if isinstance(self.projection, nn.Identity):
            return super().kernel_matrix(x, y)
        # In closed form: most of the mass lies near |w| = |x + y|, beyond the reach of any fixed quadrature.
        x2, y2 = x.square().sum(-1, keepdim=True), y.square().sum(-1, keepdim=True).mT
        eps = self.kernel_epsilon
        return (0.5 * (x2 + y2) + x @ y.mT).exp() + eps * ((0.5 * x2).exp() + (0.5 * y2).exp()) + eps**2


def _named(name: str, function: Callable[[Tensor], Tensor], *, positive: bool) -> type[GeneralizedFeatures]:
    doc = f"""`phi(x) = (f(w . x) + kernel_epsilon) / sqrt(m)` with f = {name}, {"positive" if positive else "signed"}.

    Unbiased for its own kernel, `kernel_matrix`. O(m d) per row. Choromanski et al. 2021, section 2.2.

    >>> {name.title()}Features(dim=4, num_features=16)(torch.zeros(3, 4)).values.shape
    torch.Size([3, 16])
    """
    own = {"function": staticmethod(function), "positive": positive, "__module__": __name__, "__doc__": doc}
    return type(f"{name.title()}Features", (GeneralizedFeatures,), own)


# The functions of the paper; relu is the default generalised attention of Performers.
ReluFeatures = _named("relu", F.relu, positive=True)
SigmoidFeatures = _named("sigmoid", torch.sigmoid, positive=True)
AbsFeatures = _named("abs", torch.abs, positive=True)
EluFeatures = _named("elu", lambda t: F.elu(t) + 1, positive=True)
GeluFeatures = _named("gelu", F.gelu, positive=False)
CosFeatures = _named("cos", torch.cos, positive=False)
TanhFeatures = _named("tanh", torch.tanh, positive=False)
IdentityFeatures = _named("identity", lambda t: t, positive=False)


class LinearEluFeatures(GeneralizedFeatures):
    """The linear transformer: `phi(x) = elu(x) + 1`, d features of x itself, nothing drawn and nothing added.

    Positive, unbiased for its own kernel: nothing is random. O(d) per row. `num_features` and `seed` mean nothing here.
    Its attention does not divide `q . k` by `sqrt(d)`: pass `scale=1`. Katharopoulos et al. 2020.

    >>> (LinearEluFeatures(2)(torch.tensor([[0.0, 1.0]])).dense() * 2**0.5).round(decimals=3)
    tensor([[1., 2.]])
    """

    positive = True
    function = staticmethod(lambda t: F.elu(t) + 1)

    def __init__(
        self,
        dim: int,
        num_features: int | None = None,
        *,
        num_heads: int | None = None,
        seed: int | None = 0,
        generator: Generator | None = None,
    ) -> None:
        super().__init__(dim, None, kernel_epsilon=0.0, num_heads=num_heads)


class FunctionFeatures(GeneralizedFeatures):
    """`phi(x) = (f(w . x) + kernel_epsilon) / sqrt(m)` for an f of your own, an `nn.Module` if it is to be learned.

    `f`: an elementwise function of a tensor, or its name in `torch.nn.functional` or torch. `positive`: whether f is
    never negative. Unbiased for `kernel_matrix`, a quadrature for f of polynomial growth. O(m d) per row.
    Choromanski et al. 2021, section 2.2.

    >>> phi = FunctionFeatures(2, 8, f="softplus")
    >>> phi(torch.zeros(3, 2)).values.shape
    torch.Size([3, 8])
    """

    def __init__(
        self,
        dim: int,
        num_features: int | None,
        *,
        f: Callable[[Tensor], Tensor] | str = F.relu,
        positive: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dim, num_features, **options)
        owner = type(self).__name__
        named: Any = getattr(F, f, None) or getattr(torch, f, None) if isinstance(f, str) else f
        probe = torch.linspace(-3, 3, 12, device="cpu").view(3, 4)
        try:
            with torch.no_grad():
                seen = named(probe)
        except (TypeError, RuntimeError) as error:
            raise BochnerError(
                f"The 'f' of {owner} must be a function of one tensor, or its name in torch.nn.functional or torch, "
                f"got {f!r}: {error}"
            ) from error
        if not isinstance(seen, Tensor) or seen.shape != probe.shape:
            raise BochnerError(f"The 'f' of {owner} must be elementwise and keep the shape of its tensor, got {f!r}.")
        if positive and bool((seen < 0).any()):
            raise BochnerError(f"The 'f' of {owner} is negative in places, so that 'positive' cannot be True.")
        self.positive = function_name(named) in NON_NEGATIVE if positive is None else bool(positive)
        self.function = named


def function_name(f: Any) -> str | None:
    """The name under which torch has a function, None for any other."""
    name = getattr(f, "__name__", "")
    return name if f is not None and any(getattr(home, name, None) is f for home in (F, torch)) else None


def expected_product(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, nodes: int = 400) -> Tensor:
    """`E[f(w.x) f(w.y)]`, w ~ N(0, I), (..., n, s), for f of polynomial growth: the rule ends at |w| = 10.

    In polar coordinates of the plane of x and y a kink of f at 0 is a ray, which lies between two nodes.
    """
    nx, ny = x.norm(dim=-1, keepdim=True), y.norm(dim=-1, keepdim=True)
    cos = (x @ y.mT) / (nx * ny.mT).clamp_min(torch.finfo(x.dtype).tiny)
    angle = cos.clamp(-1, 1).acos()
    radius = torch.linspace(0, 10, nodes, dtype=x.dtype, device=x.device)
    weight = radius * (-0.5 * radius.square()).exp() * (radius[1] - radius[0])
    total = torch.zeros_like(angle)
    thetas = (torch.arange(nodes, dtype=x.dtype, device=x.device) + 0.5) * (2 * math.pi / nodes)
    for theta in thetas:
        u = f(nx[..., None] * (radius * theta.cos()))  # (..., n, 1, r)
        v = f(ny.mT[..., None] * (radius * (theta - angle)[..., None].cos()))
        total = total + (u * v * weight).sum(-1)
    return total / nodes
