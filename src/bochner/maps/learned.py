"""Learned kernels: spectral laws with parameters, trained end to end.

*On Learning the Transformer Kernel* (Chowdhury et al. 2022) writes a kernel as an expectation over frequencies w and
learns the law of w, in three ways (a Gaussian mixture, a Fastfood product with learned diagonals, a generator network),
each with two kinds of features: random kitchen sinks (`_rks`, cosines and sines, signed) and positive random features
(`_prf`). All start at the softmax or the Gaussian kernel.

What is learned is a parameter, what is random a buffer. The paper redraws the noise every 100 training steps:
`feature_map("gmm_prf", ..., redraw_every=100)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from bochner._checks import (
    BochnerError,
    accumulation_dtype,
    make_generator,
    non_negative,
    one_of,
    positive_int,
    spawn_seed,
)
from bochner.maps.base import KERNELS, ROLES, Exponent, FeatureMap, Features
from bochner.projections import (
    Projection,
    chi,
    gaussian,
    hadamard_transform,
    in_blocks,
    make_projection,
    mixed,
    padded_dim,
    permutations,
    rademacher,
    some_seed,
)


class SpectralFeatures(FeatureMap):
    """Base of the learned kernels: frequencies from noise and parameters, two kinds of features.

    Random kitchen sinks: `phi(x) = exp(-g |x|^2) [cos w.x, sin w.x] / sqrt(M)`, the kernel
    `E cos(w.(x - y)) exp(-g (|x|^2 + |y|^2))`. Positive features: `phi(x) = exp(w.x - g |x|^2) / sqrt(M)`, the kernel
    `E exp(w.(x + y)) exp(-g (|x|^2 + |y|^2))`. A subclass says how w comes about.

    `num_features`: M. `kernel`: the kernel before training; it sets g: 1/2 makes positive features start at the softmax
    kernel, 1 (the paper's eq. 8 and 9) at the Gaussian; for kitchen sinks these are -1/2 and 0. `g`: any other value.
    """

    positive = True
    sinks: ClassVar[bool] = False
    weights: Tensor | None  # of the features, (M,), where they are not all 1

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        num_heads: int | None = None,
        kernel: str | None = None,
        g: float | None = None,
        seed: int | None = 0,
        generator: Generator | None = None,
    ) -> None:
        owner = type(self).__name__
        kernel = one_of(kernel or ("gaussian" if self.sinks else "softmax"), "kernel", owner, KERNELS)
        super().__init__(dim, num_features, num_heads=num_heads, kernel=kernel)
        if g is None:
            g = (0.5 if kernel == "softmax" else 1.0) - (1.0 if self.sinks else 0.0)
        if isinstance(g, bool) or not isinstance(g, (int, float)) or not math.isfinite(g):
            raise BochnerError(f"The 'g' of {owner} must be a finite number, got {g!r}.")
        self.g, self.num_frequencies = float(g), num_features
        self.is_exponential = not self.sinks
        self.feature_dim = (2 if self.sinks else 1) * num_features
        self.noise_seed = some_seed(make_generator(seed, generator))
        self.register_buffer("weights", None, persistent=False)

    def _redraw(self, g: Generator) -> None:
        """New noise, as a map of another seed would have it; learned parameters stay."""
        self.noise_seed = some_seed(g)
        super()._redraw(self._noise_generator())

    def exponent(self, role: str) -> Exponent | None:
        if self.sinks:
            return None
        offset = None if self.weights is None else self.weights.log()
        return Exponent(self.frequencies(), offset, -0.5 * math.log(self.num_frequencies), self.g)

    def prepare(self, role: str) -> Callable[[Tensor], Features]:
        if not self.sinks:
            return super().prepare(role)
        # Here and not in the function below: a block recomputed in a backward pass must find nothing cached.
        project, weights = self._projector(), self.weights

        def features(x: Tensor) -> Features:
            x = x.to(accumulation_dtype(x.dtype))
            t = project(x)
            parts = torch.cat([t.cos(), t.sin()], dim=-1)
            if weights is not None:
                parts = parts * torch.cat([weights, weights]).to(x.dtype)
            row = -0.5 * math.log(self.num_frequencies) - self.g * x.square().sum(-1, keepdim=True)
            return Features(parts, row)

        return features

    def kernel_matrix(self, x: Tensor, y: Tensor) -> Tensor:
        """The kernel of the present parameters, the expectation over the noise: (..., n, s)."""
        x2, y2 = (t.square().sum(-1, keepdim=True) for t in (x, y))
        return self._expectation(x, y) * (-self.g * (x2 + y2.mT)).exp()

    def _projector(self) -> Callable[[Tensor], Tensor]:
        """x to w.x, (..., n, M), with whatever does not depend on x computed once."""
        omega = self.frequencies().mT
        return lambda x: x @ omega.to(x.dtype)

    def frequencies(self) -> Tensor:
        """The present frequencies w, (M, d) or (h, M, d)."""
        raise NotImplementedError

    def _expectation(self, x: Tensor, y: Tensor) -> Tensor:
        """`E cos(w.(x - y))` or `E exp(w.(x + y))`."""
        raise NotImplementedError

    def _noise_generator(self, stream: int = 0) -> Generator:
        """The stream of the noise, or another one of the same seed."""
        return make_generator(spawn_seed(self.noise_seed, 0, stream))

    def _noise(self, law: str | Projection) -> Projection:
        """Noise vectors, one for each of the M features."""
        m, g = self.num_features, self._noise_generator()
        return make_projection(law, self.dim, m, num_heads=self.num_heads, seed=None, generator=g)

    def _half_square(self, px: Tensor, py: Tensor) -> Tensor:
        """`-|px - py|^2 / 2` for kitchen sinks, `|px + py|^2 / 2` for positive features, (..., n, s)."""
        sums = px.square().sum(-1, keepdim=True) + py.square().sum(-1, keepdim=True).mT
        sign = -1.0 if self.sinks else 1.0
        return 0.5 * sign * (sums + 2 * sign * (px @ py.mT)).clamp_min(0)


class GMMFeatures(SpectralFeatures):
    """Frequencies from a mixture of C Gaussians, `w = L_c n + mu_c`, with learned factors `L_c` and means `mu_c`.

    As in the paper the factors are full matrices for kitchen sinks and diagonal for positive features.

    `num_components`: C; each has M/C of the M features (give or take one, weighted so that the mixture is uniform).
    `shared_noise`: as eq. (5) of the paper has it, M noise vectors that every component transforms, C M frequencies;
    off by default, because C M independent ones cost the same and their errors do not add up across components.
    `init_std`: spread of the initial means; 0 makes the initial kernel exact, a little more tells the components apart
    from the first step. `projection`: the law of n.
    """

    mu: Tensor
    factor: Tensor

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        num_components: int = 2,
        shared_noise: bool = False,
        init_std: float = 0.0,
        projection: str | Projection = "orthogonal",
        **options: Any,
    ) -> None:
        super().__init__(dim, num_features, **options)
        owner = type(self).__name__
        C = self.num_components = positive_int(num_components, "num_components", owner)
        self.shared_noise = bool(shared_noise)
        if num_features < C and not self.shared_noise:
            raise BochnerError(
                f"The 'num_features' of {owner} must be at least its 'num_components', got {num_features} features for "
                f"{C} components; give every component a feature, or use shared_noise=True."
            )
        self.projection = self._noise(projection)
        if self.shared_noise:
            self.num_frequencies = C * num_features
            self.feature_dim *= C
        self.sizes = [self.num_frequencies // C + (c < self.num_frequencies % C) for c in range(C)]
        one = torch.eye(dim, device="cpu") if self.sinks else torch.ones(dim, device="cpu")
        self.factor = nn.Parameter(one.expand(*self._lead, C, *one.shape).clone())
        init_std = non_negative(init_std, "init_std", owner)
        self.mu = nn.Parameter(init_std * gaussian(*self._lead, C, dim, g=self._noise_generator(1)).float())
        if len(set(self.sizes)) > 1:  # a component with fewer features has heavier ones
            share = [self.num_frequencies / (C * size) for size in self.sizes for _ in range(size)]
            self.weights = torch.tensor(share, device="cpu").sqrt()

    def frequencies(self) -> Tensor:
        noise = self.projection.matrix().to(self.factor.dtype)
        own = [noise] * self.num_components if self.shared_noise else noise.split(self.sizes, dim=-2)
        return torch.cat([self._turned(n, c) + self.mu[..., c, None, :] for c, n in enumerate(own)], dim=-2)

    def _turned(self, t: Tensor, c: int, *, transposed: bool = False) -> Tensor:
        """`L_c t` or `L_c' t` of rows t (..., n, d)."""
        L = self.factor.to(t.dtype).select(len(self._lead), c)
        return t @ (L if transposed else L.mT) if self.sinks else t * L.unsqueeze(-2)

    def _expectation(self, x: Tensor, y: Tensor) -> Tensor:
        total = x.new_zeros(())
        for c in range(self.num_components):
            mx, my = (t @ self.mu[..., c, :, None].to(t.dtype) for t in (x, y))
            half = self._half_square(*(self._turned(t, c, transposed=True) for t in (x, y)))
            total = total + (half.exp() * (mx - my.mT).cos() if self.sinks else (half + mx + my.mT).exp())
        return total / self.num_components


class GMMSinkFeatures(GMMFeatures):
    """GMM-RKS: the kernel `mean_c cos(mu_c.(x-y)) exp(-|L_c'(x-y)|^2 / 2)`.

    Unbiased for that kernel, signed; MSE: `theory.mse_gmm_rks` with M/C noise vectors a component, or M and
    `shared_noise=True`. O(M d) per row and O(M d^2) once per call. Chowdhury et al. 2022, eq. (4)-(5), where Sigma_c
    is the factor L_c.

    >>> phi = GMMSinkFeatures(dim=4, num_features=8, num_components=2, seed=0)
    >>> phi(torch.zeros(3, 4)).values.shape
    torch.Size([3, 16])
    """

    sinks = True
    positive = False


class GMMPositiveFeatures(GMMFeatures):
    """GMM-PRF: the kernel `mean_c exp(mu_c.z + |L_c'z|^2 / 2 - g (|x|^2+|y|^2))`, `z = x + y`.

    Unbiased for that kernel, positive; MSE: `theory.mse_gmm_prf`, as for `gmm_rks`. O(M d) per row.
    Chowdhury et al. 2022, eq. (8)-(10).

    >>> phi = GMMPositiveFeatures(dim=4, num_features=8, num_components=2, seed=0)
    >>> phi(torch.zeros(3, 4)).values.shape
    torch.Size([3, 8])
    """


class FastfoodFeatures(SpectralFeatures):
    """Frequencies `V = S H G P H B / sqrt p` with learned diagonals: O(M log d) per row, O(M) parameters.

    H is the Walsh-Hadamard matrix of size p, the power of two that holds d; M is reached by blocks, the last cut off.
    Here S, G and B are products of a random part and a learned factor that starts at 1: the lengths of the rows, a
    Gaussian direction, signs. A length times the direction is a Gaussian vector, so with `U = G P H B / sqrt p`
    in learned factors and signs alone, row i is `N(0, S_i^2 U'U)` and the kernel is the mean over the rows of
    `exp(-S_i^2 |U (x - y)|^2 / 2)` (kitchen sinks) or `exp(S_i^2 |U (x + y)|^2 / 2)`, in closed form at every moment of
    training. Signs and permutation are fixed once for all; directions and lengths are the noise that is redrawn.

    `learnable`: `"SGB"` (the paper's main variant), `"S"`, or None.
    """

    signs: Tensor
    order: Tensor
    direction: Tensor
    lengths: Tensor
    S: Tensor
    G: Tensor
    B: Tensor

    def __init__(self, dim: int, num_features: int, *, learnable: str | None = "SGB", **options: Any) -> None:
        super().__init__(dim, num_features, **options)
        self.learnable = one_of(learnable, "learnable", type(self).__name__, ("SGB", "S", None))
        self.padded = p = padded_dim(dim)
        self.blocks = blocks = -(-num_features // p)
        g = make_generator(0)  # any signs and any permutation will do: one choice for all seeds, kept by redraws
        order = permutations(math.prod(self._lead) * blocks, p, g).view(*self._lead, blocks, p)
        self._keep(order=order, signs=rademacher(*self._lead, blocks, p, g=g).float())
        FeatureMap._redraw(self, self._noise_generator())
        for name, shape in (("S", (num_features,)), ("G", (blocks, p)), ("B", (blocks, p))):
            one = torch.ones(*self._lead, *shape, device="cpu")
            if name in (self.learnable or ""):
                self.register_parameter(name, nn.Parameter(one))
            else:
                self.register_buffer(name, one)

    def frequencies(self) -> Tensor:
        eye = torch.eye(self.dim, dtype=self.S.dtype, device=self.S.device)
        return self._projector()(eye.expand(*self._lead, -1, -1)).mT

    def _projector(self) -> Callable[[Tensor], Tensor]:
        transform = self._transform(self.direction * self.G)
        s = self._rows(self.lengths * self.S / math.sqrt(self.padded))
        return lambda x: hadamard_transform(transform(x)).flatten(-2)[..., : self.num_features] * s.to(x.dtype)

    def _transform(self, g: Tensor) -> Callable[[Tensor], Tensor]:
        """`g P H B x` of rows x, in blocks: (..., n, d) to (..., n, blocks, p)."""
        b, g, order = (self._rows(t) for t in (self.signs * self.B, g, self.order))
        return lambda x: mixed(in_blocks(x, self.blocks, self.padded), b.to(x.dtype), order) * g.to(x.dtype)

    def _expectation(self, x: Tensor, y: Tensor) -> Tensor:
        transform = self._transform(self.G / math.sqrt(self.padded))
        px, py = transform(x), transform(y)
        total = x.new_zeros(())
        for i, s in enumerate(self.S.to(x.dtype).split(self.padded, dim=-1)):
            half = self._half_square(px[..., i, :], py[..., i, :]).unsqueeze(-3)
            total = total + (s.square()[..., None, None] * half).exp().sum(-3)
        return total / self.num_features

    def _rows(self, t: Tensor) -> Tensor:
        """A part (h?, ...) as it broadcasts against (..., h?, n, ...)."""
        return t if self.num_heads is None else t.unsqueeze(1)

    def _draw_heads(self, g: Generator) -> dict[str, Tensor]:
        direction = gaussian(*self._lead, self.blocks, self.padded, g=g)
        lengths = chi(math.prod(self._lead) * self.num_features, dof=self.padded, g=g).view(*self._lead, -1)
        return {"direction": direction / direction.norm(dim=-1, keepdim=True), "lengths": lengths}


class FastfoodSinkFeatures(FastfoodFeatures):
    """Fastfood-RKS: learned Fastfood frequencies in cosines and sines.

    Unbiased for `kernel_matrix`, signed. Rows of a block share one Gaussian direction, so the MSE has the closed form
    `theory.mse_fourier` for M = 1 only. O(M log d) per row. Chowdhury et al. 2022, eq. (6) and appendix C.

    >>> phi = FastfoodSinkFeatures(dim=6, num_features=10, seed=0)
    >>> phi(torch.zeros(3, 6)).values.shape
    torch.Size([3, 20])
    """

    sinks = True
    positive = False


class FastfoodPositiveFeatures(FastfoodFeatures):
    """Fastfood-PRF: learned Fastfood frequencies in exponentials.

    Unbiased for `kernel_matrix`, positive. O(M log d) per row. Chowdhury et al. 2022, eq. (12) and appendix C.

    >>> phi = FastfoodPositiveFeatures(dim=6, num_features=10, learnable="S", seed=0)
    >>> phi(torch.zeros(3, 6)).values.shape
    torch.Size([3, 10])
    """


class GenerativeFeatures(SpectralFeatures):
    """Frequencies from a generator network, `w = n + tanh(W_5 f(n))`, f four layers with batch norm.

    Each of the four is fully connected, batch norm, LeakyReLU. The paper has `w = tanh(W_5 f(n))`, which is
    `residual=False`; here the network moves the noise instead of replacing it, and `W_5` starts at zero, so that the
    initial frequencies are exactly normal and the initial kernel is the softmax or the Gaussian. Without the residual
    `W_5` starts at random, no kernel is aimed at, and frequencies stay within 1 in every coordinate. Batch norm
    is over the M noise vectors of a head, in training and in evaluation: a running average would change with the number
    of forward passes.

    The layers have width d. `residual`: add the noise itself. `projection`: the law of n.
    """

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        residual: bool = True,
        projection: str | Projection = "orthogonal",
        **options: Any,
    ) -> None:
        super().__init__(dim, num_features, **options)
        self.residual = bool(residual)
        if num_features < 2:
            raise BochnerError(
                f"The 'num_features' of {type(self).__name__} must be at least 2 (batch norm is over the noise "
                f"vectors), got {num_features}."
            )
        self.projection = self._noise(projection)
        g, zeros = self._noise_generator(1), torch.zeros(*self._lead, 1, dim, dtype=torch.float32, device="cpu")

        def square(scale: float) -> nn.Parameter:
            return nn.Parameter((gaussian(*self._lead, dim, dim, g=g) * scale).float())

        self.layers = nn.ParameterList(square(math.sqrt(2 / dim)) for _ in range(4))
        self.gains = nn.ParameterList(nn.Parameter(zeros + 1) for _ in range(4))
        self.shifts = nn.ParameterList(nn.Parameter(zeros.clone()) for _ in range(4))
        self.last = square(0.0 if self.residual else dim**-0.5)
        self.last_bias = nn.Parameter(zeros.clone())

    def frequencies(self) -> Tensor:
        return self._generate(self.projection.matrix().to(self.last.dtype))

    def _generate(self, n: Tensor) -> Tensor:
        t = n
        for weight, gain, shift in zip(self.layers, self.gains, self.shifts, strict=True):
            t = t @ weight.mT
            t = (t - t.mean(-2, keepdim=True)) / (t.var(-2, keepdim=True, unbiased=False) + 1e-5).sqrt()
            t = nn.functional.leaky_relu(t * gain + shift, 0.2)
        moved = torch.tanh(t @ self.last.mT + self.last_bias)
        return n + moved if self.residual else moved

    def _expectation(self, x: Tensor, y: Tensor, draws: int = 256) -> Tensor:
        # A network that does not move the noise yet has a closed form.
        if self.residual and not bool(self.last.any()) and not bool(self.last_bias.any()):
            return self._half_square(x, y).exp()
        # The implicit law has none: the mean over fresh noise, the same at every call.
        g = make_generator(0)
        total = x.new_zeros(())
        for _ in range(draws):
            n = gaussian(*self._lead, self.num_features, self.dim, g=g).to(self.last)
            w = self._generate(n).to(x.dtype)
            tx, ty = x @ w.mT, y @ w.mT
            if self.sinks:
                total = total + tx.cos() @ ty.cos().mT + tx.sin() @ ty.sin().mT
            else:
                total = total + tx.exp() @ ty.exp().mT
        return total / (draws * self.num_features)


class GenerativeSinkFeatures(GenerativeFeatures):
    """Generative-RKS: frequencies from a generator network, in cosines and sines.

    Unbiased for the kernel of the network's law, signed; `kernel_matrix` is exact before training and an average over
    256 redraws after. O(M d) per row and O(M d^2) once per call. Chowdhury et al. 2022, eq. (7).

    >>> phi = GenerativeSinkFeatures(dim=4, num_features=8, seed=0)
    >>> phi(torch.zeros(3, 4)).values.shape
    torch.Size([3, 16])
    """

    sinks = True
    positive = False


class GenerativePositiveFeatures(GenerativeFeatures):
    """Generative-PRF: frequencies from a generator network, in exponentials.

    Unbiased for the kernel of the network's law, positive; `kernel_matrix` as for `generative_rks`. O(M d) per row and
    O(M d^2) once per call. Chowdhury et al. 2022, eq. (11).

    >>> phi = GenerativePositiveFeatures(dim=4, num_features=8, seed=0)
    >>> phi(torch.zeros(3, 4)).values.shape
    torch.Size([3, 8])
    """


class HedgehogFeatures(FeatureMap):
    """`phi(x) = softmax([W x + b, -W x - b])`: a learned positive map with one W for queries and one for keys.

    Deterministic and positive; it estimates no kernel but has its own, `phi(x).psi(y)`, trained (usually distilled) to
    resemble a softmax. `W` starts at the identity, repeated or cut to `num_features` (m) rows. `feature_dim` is 2 m.
    O(m d) per row. Zhang et al. 2024, *The Hedgehog & the Porcupine*.

    >>> phi = HedgehogFeatures(dim=4, num_features=4)
    >>> phi(torch.zeros(1, 4)).values.detach()
    tensor([[0.1250, 0.1250, 0.1250, 0.1250, 0.1250, 0.1250, 0.1250, 0.1250]])
    """

    positive = True
    unbiased = False

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        num_heads: int | None = None,
        seed: int | None = 0,
        generator: Generator | None = None,
    ) -> None:
        super().__init__(dim, num_features, num_heads=num_heads, kernel="hedgehog")
        self.feature_dim = 2 * num_features
        rows = torch.eye(dim, device="cpu").repeat(-(-num_features // dim), 1)[:num_features]
        for role in ROLES:
            self.register_parameter(f"weight_{role}", nn.Parameter(rows.expand(*self._lead, -1, -1).clone()))
            self.register_parameter(f"bias_{role}", nn.Parameter(torch.zeros(*self._lead, num_features, device="cpu")))

    def _features(self, x: Tensor, role: str) -> Features:
        weight, bias = getattr(self, f"weight_{role}"), getattr(self, f"bias_{role}")
        t = x @ weight.to(x.dtype).mT + self._spread(bias, x.dtype)
        return Features(torch.cat([t, -t], dim=-1).softmax(-1), torch.zeros_like(x[..., :1]))

    def kernel_matrix(self, x: Tensor, y: Tensor) -> Tensor:
        return self(x, "query").values @ self(y, "key").values.mT
