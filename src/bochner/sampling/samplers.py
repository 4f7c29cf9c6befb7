"""What a sampler of classes is, and the simple ones: uniform, log-uniform, exact."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from bochner._checks import BochnerError, finite, floating, positive_int

BLOCK = 1 << 22  # logits held at a time by the exact sampler


class Draws(NamedTuple):
    """Classes drawn for each query, ids (b, k), and the log probability of each under the sampler, (b, k)."""

    ids: Tensor
    log_prob: Tensor


class Sampler(nn.Module):
    """Draws classes for queries, with replacement, and knows the probability of every class.

    Draws are without gradient, and in the dtype of the class vectors also under autocast: a law in half precision is
    another. A sampler of your own gives `_draw` and `_log_prob` for checked arguments.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = positive_int(num_classes, "num_classes", type(self).__name__)

    def draw(self, x: Tensor, num_samples: int, *, generator: Generator | None = None) -> Draws:
        """`num_samples` classes for each row of x (b, d), independent and with replacement."""
        x = self._check(x)
        k = positive_int(num_samples, "num_samples", type(self).__name__)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            parts = [self._draw(block, k, generator) for block in x.split(self._rows(k))]
        return Draws(*(p[0] if len(p) == 1 else torch.cat(p) for p in zip(*parts, strict=True)))

    def log_prob(self, x: Tensor, ids: Tensor) -> Tensor:
        """The log probability with which each of ids (b, k) is drawn for the rows of x (b, d)."""
        x = self._check(x)
        check_ids(ids, self.num_classes, "log_prob", len(x))
        rows = self._rows(max(1, ids.shape[1]))
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            parts = zip(x.split(rows), ids.long().split(rows), strict=True)
            return torch.cat([self._log_prob(block, i) for block, i in parts])

    def _draw(self, x: Tensor, k: int, generator: Generator | None) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _log_prob(self, x: Tensor, ids: Tensor) -> Tensor:
        raise NotImplementedError

    def _rows(self, k: int) -> int:
        """Queries at a time, each with k classes."""
        return 1 << 20

    def set_classes_(self, vectors: Tensor, bias: Tensor | None = None) -> Sampler:
        """All class vectors (n, d) and their bias (n,) anew; nothing for samplers that do not look at them."""
        return self

    def update_(self, ids: Tensor, vectors: Tensor, bias: Tensor | None = None) -> Sampler:
        """New vectors (u, d) and bias (u,) of the classes ids (u,)."""
        return self

    def _check(self, x: Any) -> Tensor:
        """Queries (b, d), finite and detached."""
        owner, vectors = type(self).__name__, getattr(self, "vectors", None)
        width = None if vectors is None else vectors.shape[1]
        x = floating(x, "x", owner).detach()
        if x.ndim != 2 or (width is not None and x.shape[1] != width):
            raise BochnerError(f"The 'x' of {owner} must have shape (b, {width or 'd'}), got {tuple(x.shape)}.")
        return finite(x, "x", owner)


class UniformSampler(Sampler):
    """Every class alike.

    >>> UniformSampler(4).log_prob(torch.zeros(1, 2), torch.tensor([[0, 3]])).exp()
    tensor([[0.2500, 0.2500]])
    """

    def _draw(self, x: Tensor, k: int, generator: Generator | None) -> tuple[Tensor, Tensor]:
        ids = torch.randint(self.num_classes, (len(x), k), generator=generator).to(x.device)
        return ids, self._log_prob(x, ids)

    def _log_prob(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.full(ids.shape, -math.log(self.num_classes), device=x.device)


class LogUniformSampler(Sampler):
    """`p(j) = log((j + 2) / (j + 1)) / log(n + 1)`: Zipf's law for classes numbered by descending frequency.

    >>> p = LogUniformSampler(3).log_prob(torch.zeros(1, 2), torch.arange(3)[None]).exp()
    >>> round(p.sum().item(), 6), bool(p[0, 0] > p[0, 1] > p[0, 2])
    (1.0, True)
    """

    def _draw(self, x: Tensor, k: int, generator: Generator | None) -> tuple[Tensor, Tensor]:
        u = torch.rand(len(x), k, generator=generator, dtype=torch.float64)
        ids = (torch.expm1(u * math.log1p(self.num_classes))).long().clamp_(max=self.num_classes - 1).to(x.device)
        return ids, self._log_prob(x, ids)

    def _log_prob(self, x: Tensor, ids: Tensor) -> Tensor:
        share = torch.log1p(1 / (ids.double() + 1)) / math.log1p(self.num_classes)
        return share.log().to(x.device, torch.float32)


class ExactSampler(Sampler):
    """The softmax itself, `p(j | x) = exp(x . y_j + b_j) / Z(x)`: O(n d) a query, the yardstick of the others."""

    vectors: Tensor
    bias: Tensor

    def __init__(self, vectors: Tensor, bias: Tensor | None = None) -> None:
        vectors, bias = check_classes(vectors, bias, type(self).__name__)
        super().__init__(len(vectors))
        self.register_buffer("vectors", vectors, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def _draw(self, x: Tensor, k: int, generator: Generator | None) -> tuple[Tensor, Tensor]:
        logs = self._log_softmax(x)
        # Inversion in float64: torch.multinomial is limited to 2^24 classes and slower.
        u = torch.rand(len(x), k, generator=generator, dtype=torch.float64).to(x.device)
        ids = torch.searchsorted(logs.double().exp().cumsum_(1), u).clamp_(max=self.num_classes - 1)
        return ids, logs.gather(1, ids)

    def _log_prob(self, x: Tensor, ids: Tensor) -> Tensor:
        return self._log_softmax(x).gather(1, ids)

    def set_classes_(self, vectors: Tensor, bias: Tensor | None = None) -> ExactSampler:
        return self.update_(torch.arange(self.num_classes, device=self.vectors.device), vectors, bias)

    @torch.no_grad()
    def update_(self, ids: Tensor, vectors: Tensor, bias: Tensor | None = None) -> ExactSampler:
        check_ids(ids, self.num_classes, "update_")
        vectors, bias = check_rows(vectors, bias, (len(ids), self.vectors.shape[1]), "update_")
        self.vectors[ids] = vectors.to(self.vectors.dtype)
        if bias is not None:
            self.bias[ids] = bias.to(self.bias.dtype)
        return self

    def _rows(self, k: int) -> int:
        return max(1, BLOCK // self.num_classes)

    def _log_softmax(self, x: Tensor) -> Tensor:
        return torch.log_softmax(torch.addmm(self.bias, x.to(self.vectors.dtype), self.vectors.T), 1)


def check_classes(vectors: Tensor, bias: Tensor | None, owner: str) -> tuple[Tensor, Tensor]:
    """Copies of the class vectors (n, d) and of their bias (n,), zeros if there is none; detached."""
    if floating(vectors, "vectors", owner).ndim != 2 or 0 in vectors.shape:
        raise BochnerError(f"The 'vectors' of {owner} must have shape (n, d), got {tuple(vectors.shape)}.")
    vectors, bias = check_rows(vectors, bias, tuple(vectors.shape), owner)
    return vectors.clone(), vectors.new_zeros(len(vectors)) if bias is None else bias.to(vectors.dtype, copy=True)


def check_ids(ids: Tensor, num_classes: int, owner: str, queries: int | None = None) -> None:
    """Class numbers, (u,), or with the number of queries b (b, k)."""
    fits = ids.ndim == 1 if queries is None else ids.ndim == 2 and len(ids) == queries
    if not fits or ids.dtype not in (torch.int64, torch.int32):
        wanted = "(u,)" if queries is None else f"({queries}, k)"
        raise BochnerError(
            f"The 'ids' of {owner} must be integers of shape {wanted}, got {ids.dtype}, {tuple(ids.shape)}."
        )
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_classes:
        outside = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise BochnerError(f"The 'ids' of {owner} must be in 0..{num_classes - 1}, got {outside}.")


def check_rows(
    vectors: Tensor, bias: Tensor | None, shape: tuple[int, ...], owner: str
) -> tuple[Tensor, Tensor | None]:
    """New vectors of this shape and their bias, finite and detached; nothing is written before this has passed."""
    for value, name, wanted in ((vectors, "vectors", shape), (bias, "bias", shape[:1])):
        if value is not None and tuple(value.shape) != wanted:
            raise BochnerError(f"The {name!r} of {owner} must have shape {wanted}, got {tuple(value.shape)}.")
    vectors = finite(floating(vectors, "vectors", owner).detach(), "vectors", owner)
    return vectors, None if bias is None else finite(floating(bias, "bias", owner).detach(), "bias", owner)
