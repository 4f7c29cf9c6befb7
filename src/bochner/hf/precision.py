"""How keys and values are stored: whole, in bfloat16, or as integers of 8, 6 or 4 bits.

A precision turns rows (..., d) into codes with a step, one of each per token, and back. A row never depends on its
neighbours: tokens can be added, moved and replaced one at a time, and a text read in pieces is stored as it is when
read whole.

A basis makes rows easier to round. Keys are stored as `(k - c) S R`, S diagonal and R a rotation, and queries are
multiplied by `S^-1 R`. The centre c adds the same number to every logit of a row and cancels in softmax. Values are
stored as `v R` and the output is turned back once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from bochner._checks import ArgumentError, lookup

Parts = tuple[Tensor, ...]


@dataclass(frozen=True)
class Floating:
    """Rows in a floating-point type; `dtype` None is that of the model. They are their own columns."""

    name: str
    dtype: torch.dtype | None = None
    zero = 0

    def encode(self, x: Tensor) -> Parts:
        return (x.to(self.dtype or x.dtype),)

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        return parts[0].to(dtype)

    def columns(self, codes: Tensor, dtype: torch.dtype) -> Parts:
        return (codes.to(dtype),)

    def unpacking(self, size: int) -> Tensor | None:
        return None


@dataclass(frozen=True)
class Integer:
    """Rows `x ~ step * n`: n signed integers of 8, 6 or 4 bits, and one float16 step a row.

    A row of d channels takes `d * bits / 8 + 2` bytes. A byte holds one integer of 6 bits, and 2 bits of every fourth
    one above it; or two integers of 4 bits. So a byte and the same byte without its lower bits are all that it takes to
    multiply rows, see `unpacking`.
    """

    name: str
    bits: int

    @property
    def zero(self) -> int:
        """The integer that stands for 0: packed ones are not negative."""
        return 0 if self.bits == 8 else 2 ** (self.bits - 1)

    def encode(self, x: Tensor) -> Parts:
        """Codes (..., c) of rows (..., d), and the step (..., 1)."""
        if self.bits < 8 and x.shape[-1] % 4:
            raise ArgumentError(
                f"Rows of {x.shape[-1]} channels cannot be stored in {self.bits} bits, four in a row; "
                "use precision='int8'."
            )
        top = 2 ** (self.bits - 1) - 1
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        # The step is rounded first, so that what is divided by is what will be multiplied by.
        step = (x.abs().amax(-1, keepdim=True) / top).clamp_(2.0**-24, 65504.0).half()
        whole = (x / step).round_().clamp_(-top, top)
        if self.bits == 8:
            return whole.to(torch.int8), step
        # Digits of the last channels lie above the integers of the others.
        shifted = (whole + self.zero).to(torch.uint8)
        upper = 8 - self.bits
        low, last = shifted.split([self._codes(x.shape[-1]), x.shape[-1] - self._codes(x.shape[-1])], dim=-1)
        places = torch.arange(0, self.bits, upper, dtype=torch.uint8, device=x.device)[:, None]
        digits = ((last.unsqueeze(-2) >> places) << self.bits).flatten(-2)  # what is above a digit falls off a byte
        return low | digits, step

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        exact = torch.promote_types(dtype, torch.float32)
        codes, step = parts
        if self.bits == 8:
            return (codes.to(exact) * step).to(dtype)
        upper, mask = 8 - self.bits, 2**self.bits - 1
        digits = (codes >> self.bits).unflatten(-1, (self.bits // upper, -1)).unbind(-2)
        last = digits[0]
        for i, digit in enumerate(digits[1:], start=1):
            last = last | (digit << upper * i)
        return (torch.cat([codes & mask, last], dim=-1).to(exact).sub_(self.zero) * step).to(dtype)

    def columns(self, codes: Tensor, dtype: torch.dtype) -> Parts:
        """Numbers, one for each code in each part, of which a row is `step (columns unpacking - zero)`."""
        whole = codes.to(dtype)
        return (whole,) if self.bits == 8 else (whole, (codes >> self.bits).to(dtype))

    def unpacking(self, size: int) -> Tensor | None:
        """The matrix (k, d) from columns, the parts side by side, to channels; None: they are the channels."""
        if self.bits == 8:
            return None
        c, upper = self._codes(size), 8 - self.bits
        whole, last = torch.eye(c, size), torch.zeros(c, size)
        for i in range(c):
            digit, channel = divmod(i, size - c)
            last[i, c + channel] = 2.0 ** (upper * digit)
        return torch.cat([whole, last - 2.0**self.bits * whole])

    def _codes(self, size: int) -> int:
        """Bytes of a row."""
        return size * self.bits // 8


Precision = Floating | Integer


def halves(x: Tensor, border: int) -> tuple[Tensor, Tensor]:
    return x[..., :border], x[..., border:]


PRECISIONS: dict[str, Precision] = {
    "model": Floating("model"),
    "bfloat16": Floating("bfloat16", torch.bfloat16),
    "int8": Integer("int8", 8),
    "int6": Integer("int6", 6),
    "int4": Integer("int4", 4),
}


def precision_of(name: str | Precision) -> Precision:
    """A precision by its name; an instance is taken as it is."""
    return lookup(PRECISIONS, name, "precision") if isinstance(name, str) else name


def row_bytes(precision: str | Precision, size: int, dtype: torch.dtype) -> int:
    """Bytes of one stored row of `size` channels, counted from the tensors themselves."""
    return nbytes(precision_of(precision).encode(torch.zeros(1, size, dtype=dtype)))


def nbytes(parts: Parts) -> int:
    return sum(t.numel() * t.element_size() for t in parts)


class Basis(NamedTuple):
    """How keys of each key head are turned before they are stored: a centre and scales (g, d), then a rotation."""

    centre: Tensor
    scale: Tensor

    def keys(self, k: Tensor) -> Tensor:
        """Keys (b, g, n, d) as they are stored."""
        k = (k - self.centre[:, None].to(k.dtype)) * self.scale[:, None].to(k.dtype)
        return k @ rotation(k.shape[-1]).to(k)

    def queries(self, q: Tensor) -> Tensor:
        """Queries (b, g, n, d) for stored keys: their products differ from the true ones by one number a row."""
        return (q / self.scale[:, None].to(q.dtype)) @ rotation(q.shape[-1]).to(q)


def balance(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The centre of keys k (g, s, d), and scales for them, (g, d) each, given the queries q (h, n, d) that they meet.

    Channels are scaled until keys and queries have the same size in each, so that no channel is rounded more finely
    than it is needed. The rotation spreads what is left of large channels.
    """
    g = k.shape[0]
    centre = k.float().mean(1)
    size_k = (k.float() - centre[:, None]).square().mean(1)
    size_q = q.float().unflatten(0, (g, -1)).flatten(1, 2).square().mean(1)
    return centre, ((size_q + 1e-12) / (size_k + 1e-12)) ** 0.25


@lru_cache(maxsize=16)
def rotation(size: int) -> Tensor:
    """An orthogonal matrix with entries of equal size: Hadamard's, of as many channels as powers of two allow."""
    turn = torch.ones(1, 1)
    while size % (2 * len(turn)) == 0:
        turn = torch.cat([torch.cat([turn, turn], 1), torch.cat([turn, -turn], 1)])
    return torch.kron(turn, torch.eye(size // len(turn))) / len(turn) ** 0.5
