"""How keys and values are stored: side by side, as integers of few bits with one step a row.

A row never depends on its neighbours: tokens can be added, moved and replaced one at a time, and a text read in pieces
is stored as it is when read whole.

A basis makes rows easier to round. Keys are stored as `(k - c) T`, and queries are multiplied by the inverse of T,
transposed. The centre c adds the same number to every logit of a row and cancels in softmax. Values are stored as
`v U`, and outputs are turned back. T and U come from second moments: of the rows C, and of what an error in a channel
does to the loss M. In the balanced basis `T' C T` and `T^-1 M T^-T` are the same diagonal matrix s: the damage of a
step of fixed relative size is least there, `(sum s)^2 / d`. A rotation then gives all channels of a part one size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bochner._checks import ArgumentError

Parts = tuple[Tensor, ...]
WEAK_STEP = 1.1 * 0.9957  # the best for Gaussian numbers of size 1 in two bits, and a tenth to spare for tails


class Rows(NamedTuple):
    """Tokens as stored: `codes` (b, 2, ..., .) of keys and values, and the float16 `steps` (b, 2, ...) of both."""

    codes: Tensor
    steps: Tensor

    def then(self, others: Rows) -> Rows:
        return Rows(*(torch.cat([x, y], dim=2) for x, y in zip(self, others, strict=True)))


class Int8:
    """8 bits with a sign for a channel, `x ~ step * n`: `d + 2` bytes a row."""

    zero = ((0.0,), (0.0,))  # of the parts of keys and of values: what is taken from n before the step multiplies it

    def encode(self, x: Tensor) -> Rows:
        """Rows (b, 2, ..., d) of keys and values as they are stored."""
        step = _step(x, 127)
        return Rows((x / step).round_().clamp_(-127, 127).to(torch.int8), step.squeeze(-1))

    def columns(self, codes: Tensor, side: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """The numbers n of keys (side 0) or values (1), part by part; each part is made when it is asked for."""
        yield codes.to(dtype)

    def decode(self, rows: Rows, dtype: torch.dtype) -> Tensor:
        """Rows (b, 2, ..., d) in their basis."""
        return rows.codes.to(dtype) * rows.steps.unsqueeze(-1)


class Int4:
    """Two halves of a row in `d / 2 + 2` bytes: keys have 6 and 2 bits a channel, values 4.

    Integers lie on both sides of zero and use all their values, `x ~ step * (n - zero)`. In their basis the first half
    of the keys' channels carries nearly all that queries ask for; the step of the second half is 1.
    """

    bits = ((6, 2), (4, 4))
    zero = tuple(tuple((2**n - 1) / 2 for n in each) for each in bits)

    def encode(self, x: Tensor) -> Rows:
        if x.shape[-1] % 2:
            raise ArgumentError(f"Rows of {x.shape[-1]} channels have no halves; use precision='int8'.")
        strong, values = x[:, 0].chunk(2, dim=-1)[0], x[:, 1]
        steps = [_step(y, zero[0]) for y, zero in zip((strong, values), self.zero, strict=True)]
        codes = []
        for y, step, bits, zeros in zip(x.unbind(1), steps, self.bits, self.zero, strict=True):
            first, second = y.chunk(2, dim=-1)
            second = second if bits[1] == 2 else second / step
            low, high = (
                (z + zero).round_().clamp_(0, 2 * zero).to(torch.uint8)
                for z, zero in zip((first / step, second), zeros, strict=True)
            )
            codes.append(low | (high << bits[0]))
        return Rows(torch.stack(codes, dim=1), torch.stack(steps, dim=1).squeeze(-1))

    def columns(self, codes: Tensor, side: int, dtype: torch.dtype) -> Iterator[Tensor]:
        bits = self.bits[side][0]
        yield (codes & (2**bits - 1)).to(dtype)
        yield (codes >> bits).to(dtype)

    def decode(self, rows: Rows, dtype: torch.dtype) -> Tensor:
        found = []
        for side, zero in enumerate(self.zero):
            steps = rows.steps[:, side, ..., None]
            parts = zip(self.columns(rows.codes[:, side], side, dtype), zero, strict=True)
            first, second = (n.sub_(zero) for n, zero in parts)
            found.append(torch.cat([first * steps, second * steps if side else second], dim=-1))
        return torch.stack(found, dim=1)


def _step(x: Tensor, top: float) -> Tensor:
    """The steps (..., 1) of rows: rounded first, so that what divides is what will multiply."""
    return (x.abs().amax(-1, keepdim=True) / top).clamp_(2.0**-24, 65504.0).half()


Precision = Int8 | Int4
INT8 = Int8()
PRECISIONS: dict[str, Precision] = {"int8": INT8, "int4": Int4()}


def row_bytes(precision: Precision, size: int) -> int:
    """Bytes of the stored key and value of a token, with `size` channels each, counted from the tensors themselves."""
    return nbytes(precision.encode(torch.zeros(1, 2, size)))


def nbytes(parts: Parts) -> int:
    return sum(t.numel() * t.element_size() for t in parts)


class Basis(NamedTuple):
    """How rows of each key head are turned before they are stored, by a centre (g, d) and matrices (g, d, d)."""

    centre: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def plain(cls, heads: int, key_size: int, value_size: int, device: Any = None) -> Basis:
        """That of rows as they are."""
        turns = (torch.eye(size, device=device).repeat(heads, 1, 1) for size in (key_size, value_size))
        return cls(torch.zeros(heads, key_size, device=device), *turns)


class Turns(NamedTuple):
    """What a basis and the stored numbers of older tokens make of rows, queries and outputs.

    Keys and values are stored with d channels, as many as the wider of them has. `into`, `back` (2, g, d, d), `start`
    (2 g, 1, d): rows x are stored as `x into + start`, and turned `back`. `ask` (g, key size, d + parts): what queries
    are multiplied by to meet stored keys, and what the zero of each part takes away. `tell` (g, d + 1, value size):
    from sums of stored values, and of the weights of older ones, to outputs.
    """

    into: Tensor
    start: Tensor
    back: Tensor
    ask: Tensor
    tell: Tensor

    @classmethod
    def of(cls, basis: Basis, precision: Precision, dtype: torch.dtype) -> Turns:
        centre, keys, values = (x.to(dtype) for x in basis)
        d = max(keys.shape[-1], values.shape[-1])
        into = torch.stack([_widened(x, d) for x in (keys, values)])
        back = torch.linalg.inv(into)
        start = torch.zeros_like(into[..., :1, :])
        start[0] = -pad(centre, (0, d - centre.shape[-1]))[:, None] @ into[0]
        ask, tell = back[0].mT[:, : keys.shape[-1]], back[1][..., : values.shape[-1]]
        less, more = (
            [x.sum(i, keepdim=True) * -zero for x, zero in zip(y.chunk(len(z), i), z, strict=True)]
            for y, i, z in zip((ask, tell), (-1, -2), precision.zero, strict=True)
        )
        return cls(into, start, back, torch.cat([ask, *less], dim=-1), torch.cat([tell, sum(more)], dim=-2))


def _widened(x: Tensor, d: int) -> Tensor:
    """Matrices (g, n, n) with further channels that stay as they are."""
    more = d - x.shape[-1]
    x = pad(x, (0, more, 0, more))
    x.diagonal(dim1=-2, dim2=-1)[:, d - more :] = 1
    return x


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
