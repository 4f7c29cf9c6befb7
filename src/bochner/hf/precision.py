"""How keys and values are stored: whole, in bfloat16, or as integers of few bits.

A precision turns rows (..., d) into codes with a step, one of each per token, and back. A row never depends on its
neighbours: tokens can be added, moved and replaced one at a time, and a text read in pieces is stored as it is when
read whole.

A basis makes rows easier to round. Keys are stored as `(k - c) T`, and queries are multiplied by the inverse of T,
transposed. The centre c adds the same number to every logit of a row and cancels in softmax. Values are stored as
`v U`, and outputs are turned back. T and U come from second moments: of the rows C, and of what an error in a channel
does to the loss M. In the balanced basis `T' C T` and `T^-1 M T^-T` are the same diagonal matrix s: the damage of a
step of fixed relative size is least there, `(sum s)^2 / d`. A rotation then gives all channels of a part one size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from bochner._checks import ArgumentError, lookup

Parts = tuple[Tensor, ...]
WEAK_STEP = 1.1 * 0.9957  # the best for Gaussian numbers of size 1 in two bits, and a tenth to spare for tails


@dataclass(frozen=True)
class Floating:
    """Rows in a floating-point type; `dtype` None is that of the model. They are their own columns."""

    name: str
    dtype: torch.dtype | None = None

    def encode(self, x: Tensor) -> Parts:
        return (x.to(self.dtype or x.dtype),)

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        return parts[0].to(dtype)

    def columns(self, codes: Tensor, dtype: torch.dtype) -> Parts:
        return (codes.to(dtype),)

    def zeros(self, size: int) -> Tensor:
        return torch.zeros(size)


@dataclass(frozen=True)
class Integer:
    """Rows `x ~ step * n`: n integers of 8 bits with a sign, and one float16 step a row, in `d + 2` bytes."""

    name: str

    def encode(self, x: Tensor) -> Parts:
        """Codes (..., c) of rows (..., d), and the step (..., 1)."""
        x, step = _scaled(x, x, 127)
        return (x / step).round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8), step

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        exact = torch.promote_types(dtype, torch.float32)
        return (self.columns(parts[0], exact)[0] * parts[1]).to(dtype)

    def columns(self, codes: Tensor, dtype: torch.dtype) -> Parts:
        """Numbers n, one for each channel, in one part or two."""
        return (codes.view(torch.int8).to(dtype),)

    def zeros(self, size: int) -> Tensor:
        """What is taken from the numbers n of each channel before the step multiplies them."""
        return torch.zeros(size)


@dataclass(frozen=True)
class Pairs:
    """Rows `x ~ step * (n - zero)` of two halves, in `d / 2 + 2` bytes.

    A byte has `bits` for a channel of the first half, and the others for one of the second. Integers lie on both sides
    of zero and use all their values. `weak`: the step of the second half is 1. Keys in their basis are of this kind:
    the first half of the channels carries nearly all that queries ask for.
    """

    name: str
    bits: int
    weak: bool = False

    def encode(self, x: Tensor) -> Parts:
        if x.shape[-1] % 2:
            raise ArgumentError(f"Rows of {x.shape[-1]} channels have no halves; use precision='int8'.")
        x, step = _scaled(x, x.chunk(2, dim=-1)[0] if self.weak else x, self._zero(self.bits))
        first, second = x.chunk(2, dim=-1)
        low = self._rounded(first / step, self.bits)
        return low | (self._rounded(second if self.weak else second / step, 8 - self.bits) << self.bits), step

    def _rounded(self, x: Tensor, bits: int) -> Tensor:
        return (x + self._zero(bits)).round_().clamp_(0, 2**bits - 1).to(torch.uint8)

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        codes, step = parts
        exact = torch.promote_types(dtype, torch.float32)
        x = torch.cat(self.columns(codes, exact), dim=-1) - self.zeros(2 * codes.shape[-1]).to(codes.device, exact)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * step, second if self.weak else second * step], dim=-1).to(dtype)

    def columns(self, codes: Tensor, dtype: torch.dtype) -> Parts:
        return (codes & (2**self.bits - 1)).to(dtype), (codes >> self.bits).to(dtype)

    def zeros(self, size: int) -> Tensor:
        each = torch.tensor([self._zero(self.bits), self._zero(8 - self.bits)])
        return each.repeat_interleave(size // 2)

    def _zero(self, bits: int) -> float:
        return (2**bits - 1) / 2


def _scaled(x: Tensor, strong: Tensor, top: float) -> Parts:
    """Rows in at least float32, and their step: rounded first, so that what divides is what will multiply."""
    exact = torch.promote_types(x.dtype, torch.float32)
    step = (strong.to(exact).abs().amax(-1, keepdim=True) / top).clamp_(2.0**-24, 65504.0).half()
    return x.to(exact), step


Precision = Floating | Integer | Pairs


def halves(x: Tensor, border: int) -> tuple[Tensor, Tensor]:
    return x[..., :border], x[..., border:]


PRECISIONS: dict[str, Precision] = {
    "model": Floating("model"),
    "bfloat16": Floating("bfloat16", torch.bfloat16),
    "int8": Integer("int8"),
    "int4": Pairs("int4", 4),
}
KEYS: dict[str, Precision] = {**PRECISIONS, "split": Pairs("split", 6, weak=True)}


class Stored(NamedTuple):
    """How a head stores keys and values, those of its window and the older ones: by a name, "keys/values" of the older.

    One word is for both: "int8". Whole and half precision is for everything. The window has 8 bits where the older
    tokens have fewer: most of the attention is there, and so is most of what rounding costs.
    """

    window: tuple[Precision, Precision]
    older: tuple[Precision, Precision]
    scaled: bool  # whether rows have steps

    @classmethod
    def of(cls, name: str, dtype: torch.dtype | None = None) -> Stored:
        """`dtype`: that of the model, for what is stored whole."""
        first, _, second = name.partition("/")
        keys, values = lookup(KEYS, first, "precision"), lookup(PRECISIONS, second or first, "precision")
        floating = [isinstance(x, Floating) for x in (keys, values)]
        if any(floating) and keys is not values:
            raise ArgumentError(f"A precision of integers and one of floats do not go together, got {name!r}.")
        if all(floating):
            whole = Floating(name, dtype if name == "model" else torch.bfloat16)
            return cls((whole, whole), (whole, whole), False)
        return cls((PRECISIONS["int8"], PRECISIONS["int8"]), (keys, values), True)


def row_bytes(precision: Precision, size: int, dtype: torch.dtype) -> int:
    """Bytes of one stored row of `size` channels, counted from the tensors themselves."""
    return nbytes(precision.encode(torch.zeros(1, size, dtype=dtype)))


def nbytes(parts: Parts) -> int:
    return sum(t.numel() * t.element_size() for t in parts)


class Basis(NamedTuple):
    """How rows of each key head are turned before they are stored, by a centre (g, d) and matrices (g, d, d)."""

    centre: Tensor
    keys: Tensor
    values: Tensor

    def inverse(self) -> tuple[Tensor, Tensor]:
        """The matrices that turn stored keys and values back."""
        a, b = (torch.linalg.inv(x.to(torch.promote_types(x.dtype, torch.float32))) for x in self[1:])
        return a, b


def balance(rows: Tensor, damage: Tensor, parts: int = 1) -> tuple[Tensor, Tensor]:
    """The matrix (g, d, d) that balances rows with second moments (g, d, d) against the damage of errors in them.

    The strongest channels come first, in `parts` that are rotated each by itself. The size of all is such that the last
    part of Gaussian rows is rounded best with a step of 1 and 2 bits. Gives the damage of that, too: what 6 bits for
    the first part and 2 for the last do to the loss.
    """
    d = rows.shape[-1]
    (a, _), (b, inverse) = (_roots(x.double()) for x in (damage, rows))
    _, s, v = torch.linalg.svd(a @ b)
    s = s.clamp_min(1e-12 * s[..., :1] + 1e-30)
    sums = s.unflatten(-1, (parts, -1)).mean(-1)  # the size of channels after the rotation, squared
    turn = torch.block_diag(*[rotation(d // parts).double()] * parts)
    made = inverse @ v.mT * s.sqrt()[..., None, :] @ turn
    made = made / (WEAK_STEP * sums[..., -1].sqrt()[..., None, None])
    lost = (0.00104 * sums[..., 0] ** 2 + 0.1188 * sums[..., -1] ** 2) * d / 2  # of a Gaussian in 6 and in 2 bits
    return made.float(), lost


def _roots(x: Tensor) -> tuple[Tensor, Tensor]:
    """The square root of positive matrices, and its inverse where they are not nearly zero."""
    size, u = torch.linalg.eigh(x)
    size = size.clamp_min(1e-7 * size[..., -1:] + 1e-30).sqrt()[..., None, :]
    return u * size @ u.mT, u / size @ u.mT


@lru_cache(maxsize=16)
def rotation(size: int) -> Tensor:
    """An orthogonal matrix with entries of equal size: Hadamard's, of as many channels as powers of two allow."""
    turn = torch.ones(1, 1)
    while size % (2 * len(turn)) == 0:
        turn = torch.cat([torch.cat([turn, turn], 1), torch.cat([turn, -turn], 1)])
    return torch.kron(turn, torch.eye(size // len(turn))) / len(turn) ** 0.5
