"""How keys and values are stored: whole, in bfloat16, or as integers of 8, 6 or 4 bits.

A precision turns rows (..., d) into a tuple of tensors, one row of each per token, and back. A row never depends on
its neighbours: tokens can be added, moved and replaced one at a time, and a text read in pieces is stored as it is
when read whole.

A basis makes rows easier to round. Keys are stored as `(k - c) A` and queries are multiplied by the inverse of A'. The
centre c adds the same number to every logit of a row and cancels in softmax. Values are stored as `(v - c) A` and the
output is turned back once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bochner._checks import ArgumentError, lookup

Parts = tuple[Tensor, ...]


class Precision(Protocol):
    """Rows (..., d) to tensors (..., .) with the same leading dimensions, and back."""

    @property
    def name(self) -> str: ...

    def encode(self, x: Tensor) -> Parts: ...

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor: ...

    def products(self, q: Tensor, parts: Parts) -> Tensor:
        """`q x'` (..., h, m) for queries q (..., h, d) and stored rows x (..., m, d)."""
        ...

    def mixture(self, weight: Tensor, parts: Parts) -> Tensor:
        """`weight x` (..., h, d) for weights (..., h, m) and stored rows x (..., m, d)."""
        ...


@dataclass(frozen=True)
class Floating:
    """Rows in a floating-point type; `dtype` None is that of the model."""

    name: str
    dtype: torch.dtype | None = None

    def encode(self, x: Tensor) -> Parts:
        return (x.to(self.dtype or x.dtype),)

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        return parts[0].to(dtype)

    def products(self, q: Tensor, parts: Parts) -> Tensor:
        return q @ parts[0].to(q.dtype).mT

    def mixture(self, weight: Tensor, parts: Parts) -> Tensor:
        return weight @ parts[0].to(weight.dtype)


@dataclass(frozen=True)
class Integer:
    """Rows in groups of channels, `x ~ step * n`: n a signed integer of 8, 6 or 4 bits, one float16 step a group.

    A row of d channels takes `d * bits / 8` bytes and 2 bytes for each group. Integers of 4 bits are stored two in a
    byte; those of 6 bits as their lower 4 bits, and four times their upper 2 bits in another byte.
    """

    name: str
    bits: int
    group: int = 64

    def groups(self, size: int) -> int:
        """Groups in a row: of `group` channels where that divides the row, else one."""
        return size // self.group if size % self.group == 0 else 1

    def encode(self, x: Tensor) -> Parts:
        if self.bits < 8 and x.shape[-1] % 4:
            raise ArgumentError(
                f"Rows of {x.shape[-1]} channels cannot be stored in {self.bits} bits, four in a row; "
                "use precision='int8'."
            )
        top = 2 ** (self.bits - 1) - 1
        grouped = x.float().unflatten(-1, (self.groups(x.shape[-1]), -1))
        # The step is rounded first, so that what is divided by is what will be multiplied by.
        step = (grouped.abs().amax(-1) / top).clamp(min=2.0**-24, max=65504.0).half()
        whole = (grouped / step.float().unsqueeze(-1)).round_().clamp_(-top, top).flatten(-2)
        if self.bits == 8:
            return whole.to(torch.int8), step
        shifted = (whole + self._zero).to(torch.uint8)
        lower = pack(shifted & 15, 4)
        return (lower, step) if self.bits == 4 else (lower, pack(shifted >> 4, 2), step)

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        exact = torch.promote_types(dtype, torch.float32)
        rows, step = self._integers(parts, exact) - self._zero, parts[-1].to(exact)
        return (rows.unflatten(-1, (step.shape[-1], -1)) * step.unsqueeze(-1)).flatten(-2).to(dtype)

    def products(self, q: Tensor, parts: Parts) -> Tensor:
        step = parts[-1]
        if step.shape[-1] > 1:
            return q @ self.decode(parts, q.dtype).mT
        # With one step a row the integers are multiplied as they are, and only the products are scaled.
        raw = q @ self._integers(parts, q.dtype).mT
        return (raw - self._zero * q.sum(-1, keepdim=True)) * step.to(q.dtype).mT

    def mixture(self, weight: Tensor, parts: Parts) -> Tensor:
        step = parts[-1]
        if step.shape[-1] > 1:
            return weight @ self.decode(parts, weight.dtype)
        scaled = weight * step.to(weight.dtype).mT
        return scaled @ self._integers(parts, weight.dtype) - self._zero * scaled.sum(-1, keepdim=True)

    @property
    def _zero(self) -> int:
        """The integer that stands for 0: packed ones are not negative."""
        return 0 if self.bits == 8 else 2 ** (self.bits - 1)

    def _integers(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        if self.bits == 8:
            return parts[0].to(dtype)
        whole = unpack(parts[0], 4)
        if self.bits == 6:
            for part, shift in zip(whole.chunk(4, dim=-1), (4, 2, 0, -2), strict=True):  # the upper two bits in place
                part |= (parts[1] << shift if shift >= 0 else parts[1] >> -shift) & 48
        return whole.to(dtype)


def pack(x: Tensor, bits: int) -> Tensor:
    """Integers (..., d) of so many bits as bytes (..., d * bits / 8): stretches of channels on top of each other."""
    stretches = x.unflatten(-1, (8 // bits, -1)).unbind(-2)
    out = stretches[0].clone()
    for i, stretch in enumerate(stretches[1:], start=1):
        out |= stretch << (bits * i)
    return out


def unpack(x: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`."""
    return torch.cat([(x >> (bits * i)) & (2**bits - 1) for i in range(8 // bits)], dim=-1)


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
    """A centre (g, d) and a matrix (g, d, d) with its inverse for the rows of each key head."""

    centre: Tensor
    matrix: Tensor
    inverse: Tensor

    def into(self, x: Tensor) -> Tensor:
        """Rows (b, g, n, d) as they are stored."""
        return (x - self.centre[:, None].to(x.dtype)) @ self.matrix.to(x.dtype)

    def back(self, x: Tensor) -> Tensor:
        """Rows (b, g, n, d) of outputs, from stored values."""
        return x @ self.inverse.to(x.dtype) + self.centre[:, None].to(x.dtype)

    def queries(self, q: Tensor) -> Tensor:
        """Queries (b, g, n, d) for stored keys: their products differ from the true ones by one number a row."""
        return q @ self.inverse.mT.to(q.dtype)


def key_basis(q: Tensor, k: Tensor) -> Basis:
    """The basis for keys k (g, s, d) that queries q (h, n, d) meet: centred, balanced with them, rotated."""
    return balanced(*balance(q, k))


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


def balanced(centre: Tensor, scale: Tensor) -> Basis:
    """The basis of a centre and the scales of channels, (g, d) each, rotated."""
    turn = rotation(scale.shape[-1]).to(scale.device)
    return Basis(centre, scale.unsqueeze(-1) * turn, turn.mT / scale.unsqueeze(1))


def value_basis(g: int, d: int, device: torch.device | str = "cpu") -> Basis:
    """The basis for values of g heads: rotated only. The values of attention sinks are near zero and must stay so."""
    turn = rotation(d).to(device).expand(g, d, d)
    return Basis(torch.zeros(g, d, device=device), turn, turn.mT)


def rotation(size: int) -> Tensor:
    """An orthogonal matrix with entries of equal size: Hadamard's, of as many channels as powers of two allow."""
    turn = torch.ones(1, 1)
    while size % (2 * len(turn)) == 0:
        turn = torch.cat([torch.cat([turn, turn], 1), torch.cat([turn, -turn], 1)])
    return torch.kron(turn, torch.eye(size // len(turn))) / len(turn) ** 0.5
