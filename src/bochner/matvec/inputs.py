"""Reading what callers pass: points, bandwidths, vectors. One sentence per mistake."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._checks import BochnerError, finite

OWNER = "KernelOperator"
EXACT = 2**53  # the largest range of whole numbers that double precision holds


def as_real(x: Any, name: str) -> Tensor:
    """A real tensor from numpy or torch, shared where it can be, or one sentence saying what is wrong."""
    if hasattr(x, "__dask_graph__"):  # never read into memory in silence
        raise BochnerError(
            f"The {name!r} of {OWNER} is a Dask array; multiply block by block: "
            f"Q.map_blocks(lambda q: {OWNER}(q, keys, bandwidth=1.0) @ x, drop_axis=1, dtype=x.dtype)."
        )
    values: Any = x
    if isinstance(x, Tensor):
        if x.device.type != "cpu":
            raise BochnerError(
                f"The {name!r} of {OWNER} must be on the CPU, where products are computed, got {x.device}; call .cpu()."
            )
        kind, values = "c" if x.is_complex() else "f" if x.is_floating_point() else "i", x.detach()
    else:
        if np.ma.is_masked(x):
            raise BochnerError(
                f"The {name!r} of {OWNER} have masked entries, which a kernel cannot use; fill or drop them."
            )
        try:
            values = np.asarray(x)
        except ValueError as error:
            raise BochnerError(f"The {name!r} of {OWNER} must be an array, got rows of unequal length.") from error
        kind = values.dtype.kind
    if kind not in "fiub":
        given = type(x).__name__ if kind in "OUS" else f"dtype {values.dtype}"
        raise BochnerError(f"The {name!r} of {OWNER} must be a real numpy array or a tensor, got {given}.")
    if kind in "iu" and values.itemsize == 8 and math.prod(values.shape):
        largest = max(-int(values.min()), int(values.max()))
        if largest > EXACT:
            raise BochnerError(
                f"The {name!r} of {OWNER} has whole numbers up to {largest}, beyond 2^53, which double precision would "
                "round; subtract an offset first, or convert to float64 yourself."
            )
    if isinstance(values, Tensor):
        return values if kind == "f" else values.double()
    kept = values.dtype.newbyteorder("=") if kind == "f" and values.itemsize <= 8 else np.float64
    return torch.from_numpy(np.require(values, kept, ["C", "W"]))


def as_points(points: Any, name: str) -> Tensor:
    """A finite (n, d) float32 or float64 tensor."""
    tensor = as_real(points, name)
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.float()
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise BochnerError(f"The {name!r} of {OWNER} must have shape (n, d) with n, d >= 1, got {tuple(tensor.shape)}.")
    return finite(tensor, name, OWNER)


def as_values(x: Any, length: int, columns: bool, dtype: torch.dtype) -> tuple[Tensor, Callable[[Tensor], Any], Tensor]:
    """x as a (length, r) float64 tensor, the function that gives the answer its form, and the scale of each column.

    Every column is divided by a power of two near its largest entry: neither tiny nor huge columns must meet the ends
    of single precision, nor may a large one hide a small one.
    """
    tensor = as_real(x, "x")
    shape = tuple(tensor.shape)
    valid = tensor.ndim == 2 if columns else tensor.ndim == 1 or (tensor.ndim == 2 and shape[1] == 1)
    if not valid or shape[0] != length:
        wanted = f"({length}, r)" if columns else f"({length},)"
        raise BochnerError(f"The 'x' of {OWNER} must have shape {wanted}, got {shape}.")
    table = tensor.reshape(length, math.prod(shape[1:])).double()
    largest = table.abs().amax(0)
    if not bool(torch.isfinite(largest).all()):
        where = tuple((~torch.isfinite(tensor)).nonzero()[0].tolist())
        raise BochnerError(f"The 'x' of {OWNER} must be finite, got {tensor[where].item()} at index {where}.")
    scale = torch.exp2(torch.frexp(largest).exponent.double() - 1)
    table = table / scale

    def restore(value: Tensor) -> Any:
        out = (value.double() * scale).reshape(value.shape[0], *shape[1:]).to(dtype)
        if not bool(out.isfinite().all()):
            raise BochnerError(
                f"The product does not fit into {dtype}: x has entries as large as {float(largest.max()):.3g}; "
                "scale it down" + (", or pass float64 points." if dtype == torch.float32 else ".")
            )
        return out if isinstance(x, Tensor) else out.numpy()

    return table, restore, scale
