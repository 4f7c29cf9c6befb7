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

    def unpacking(self, size: int) -> Tensor:
        return torch.cat([torch.eye(size), torch.zeros(1, size)])


@dataclass(frozen=True)
class Integer:
    """Rows `x ~ step * (n - zero)`: n integers of 8, 6 or 4 bits, and one float16 step a row.

    A row of d channels takes `d * bits / 8 + 2` bytes. A byte holds one integer of 6 bits, and 2 bits of every fourth
    one above it; or two integers of 4 bits. So a byte and its upper bits are all that it takes to multiply rows, see
    `unpacking`.
    """

    name: str
    bits: int

    @property
    def zero(self) -> float:
        """What stands for 0: packed integers lie on both sides of it and use all their values."""
        return 0.0 if self.bits == 8 else (2**self.bits - 1) / 2

    def encode(self, x: Tensor) -> Parts:
        """Codes (..., c) of rows (..., d), and the step (..., 1)."""
        if self.bits < 8 and x.shape[-1] % 4:
            raise ArgumentError(
                f"Rows of {x.shape[-1]} channels cannot be stored in {self.bits} bits, four in a row; "
                "use precision='int8'."
            )
        top = 127.0 if self.bits == 8 else self.zero
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        # The step is rounded first, so that what is divided by is what will be multiplied by.
        step = (x.abs().amax(-1, keepdim=True) / top).clamp_(2.0**-24, 65504.0).half()
        whole = (x / step + self.zero).round_().clamp_(self.zero - top, self.zero + top)
        if self.bits == 8:
            return whole.to(torch.int8).view(torch.uint8), step
        # Digits of the last channels lie above the integers of the others.
        whole, upper, c = whole.to(torch.uint8), 8 - self.bits, self._codes(x.shape[-1])
        places = torch.arange(0, self.bits, upper, dtype=torch.uint8, device=x.device)[:, None]
        digits = ((whole[..., c:].unsqueeze(-2) >> places) << self.bits).flatten(-2)  # above a digit: falls off a byte
        return whole[..., :c] | digits, step

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        exact = torch.promote_types(dtype, torch.float32)
        codes, step = parts
        if self.bits == 8:
            return (codes.view(torch.int8).to(exact) * step).to(dtype)
        upper, mask = 8 - self.bits, 2**self.bits - 1
        digits = (codes >> self.bits).unflatten(-1, (self.bits // upper, -1)).unbind(-2)
        last = digits[0]
        for i, digit in enumerate(digits[1:], start=1):
            last = last | (digit << upper * i)
        return (torch.cat([codes & mask, last], dim=-1).to(exact).sub_(self.zero) * step).to(dtype)

    def columns(self, codes: Tensor, dtype: torch.dtype) -> Parts:
        """Numbers, one for each code in each part, of which a row is `step ([columns, 1] unpacking)`."""
        if self.bits == 8:
            return (codes.view(torch.int8).to(dtype),)
        return codes.to(dtype), (codes >> self.bits).to(dtype)

    def unpacking(self, size: int) -> Tensor:
        """The matrix (k + 1, d) from columns, the parts side by side, and a one, to channels."""
        if self.bits == 8:
            return torch.cat([torch.eye(size), torch.zeros(1, size)])
        c, upper = self._codes(size), 8 - self.bits
        whole, last = torch.eye(c, size), torch.zeros(c, size)
        for i in range(c):
            digit, channel = divmod(i, size - c)
            last[i, c + channel] = 2.0 ** (upper * digit)
        return torch.cat([whole, last - 2.0**self.bits * whole, torch.full((1, size), -self.zero)])

    def _codes(self, size: int) -> int:
        """Bytes of a row."""
        return size * self.bits // 8


@dataclass(frozen=True)
class Split:
    """Rows of two halves: 6 bits for the strong channels, times a step a row, and 2 for the weak, whose step is 1.

    Keys in their basis are of this kind: the first half of the channels carries nearly all that queries ask for. A byte
    holds a strong channel and a weak one above it. A row of d channels takes `d / 2 + 2` bytes.
    """

    name: str

    def encode(self, x: Tensor) -> Parts:
        if x.shape[-1] % 2:
            raise ArgumentError(f"Rows of {x.shape[-1]} channels have no halves; use precision='int8'.")
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        strong, weak = x.chunk(2, dim=-1)
        step = (strong.abs().amax(-1, keepdim=True) / 31.5).clamp_(2.0**-24, 65504.0).half()
        low = (strong / step + 31.5).round_().clamp_(0, 63).to(torch.uint8)
        return low | ((weak + 1.5).round_().clamp_(0, 3).to(torch.uint8) << 6), step

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        exact = torch.promote_types(dtype, torch.float32)
        low, high = (x.to(exact) for x in self._fields(parts[0]))
        return torch.cat([(low - 31.5) * parts[1], high - 1.5], dim=-1).to(dtype)

    def columns(self, codes: Tensor, dtype: torch.dtype) -> Parts:
        """The numbers of the strong channels, and those of the weak."""
        low, high = self._fields(codes)
        return low.to(dtype), high.to(dtype)

    def unpacking(self, size: int) -> Tensor:
        """As that of integers, but for the step, which only the first of the columns take."""
        return torch.cat([torch.eye(size), torch.tensor([[-31.5, -1.5]]).repeat_interleave(size // 2, 1)])

    def _fields(self, codes: Tensor) -> Parts:
        return codes & 63, codes >> 6


Precision = Floating | Integer | Split


def halves(x: Tensor, border: int) -> tuple[Tensor, Tensor]:
    return x[..., :border], x[..., border:]


PRECISIONS: dict[str, Precision] = {
    "model": Floating("model"),
    "bfloat16": Floating("bfloat16", torch.bfloat16),
    "int8": Integer("int8", 8),
    "int6": Integer("int6", 6),
    "int4": Integer("int4", 4),
}
KEYS: dict[str, Precision] = {**PRECISIONS, "split": Split("split")}


class Stored(NamedTuple):
    """How a head stores its older keys, its older values, and both in its window: by a name, "keys/values".

    One word is for both: "int6". Whole and half precision is for everything. The window has 8 bits where the older
    tokens have fewer: most of the attention is there, and so is most of what rounding costs.
    """

    keys: Precision
    values: Precision
    near: Precision

    @classmethod
    def of(cls, name: str) -> Stored:
        first, _, second = name.partition("/")
        keys, values = lookup(KEYS, first, "precision"), lookup(PRECISIONS, second or first, "precision")
        if isinstance(keys, Floating) or isinstance(values, Floating):
            if keys is not values:
                raise ArgumentError(f"A precision of integers and one of floats do not go together, got {name!r}.")
            return cls(keys, values, keys)
        return cls(keys, values, PRECISIONS["int8"])

    @property
    def scaled(self) -> bool:
        """Whether rows have steps."""
        return not isinstance(self.keys, Floating)


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
