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


def refuse_dask(x: Any, name: str) -> None:
    """A Dask array is never read into memory in silence."""
    if hasattr(x, "__dask_graph__"):
        raise BochnerError(
            f"The {name!r} of {OWNER} is a Dask array; multiply block by block: "
            f"Q.map_blocks(lambda q: {OWNER}(q, keys, bandwidth=1.0) @ x, drop_axis=1, dtype=x.dtype)."
        )


def _whole(x: Any, name: str) -> Any:
    """Whole numbers, tensor or array, that double precision holds exactly."""
    if math.prod(x.shape) and not -EXACT <= int(x.min()) <= int(x.max()) <= EXACT:
        largest = max(-int(x.min()), int(x.max()))
        raise BochnerError(
            f"The {name!r} of {OWNER} has whole numbers up to {largest}, beyond 2^53, which double precision would "
            "round; subtract an offset first, or convert to float64 yourself."
        )
    return x


def on_the_cpu(x: Tensor, name: str) -> Tensor:
    if x.device.type != "cpu":
        raise BochnerError(
            f"The {name!r} of {OWNER} must be on the CPU, where products are computed, got {x.device}; call .cpu()."
        )
    return x.detach()


def as_points(points: Any, name: str) -> Tensor:
    """A finite (n, d) float32 or float64 tensor from numpy or torch, or one sentence saying what is wrong."""
    refuse_dask(points, name)
    if isinstance(points, Tensor):
        tensor = on_the_cpu(points, name)
        if tensor.is_complex():
            raise BochnerError(f"The {name!r} of {OWNER} must be real, got {tensor.dtype}.")
        if not tensor.is_floating_point():
            tensor = _whole(tensor, name).double()
    elif isinstance(points, np.ndarray) or hasattr(points, "__array__") or isinstance(points, (list, tuple)):
        tensor = torch.from_numpy(_real(points, name))
    else:
        raise BochnerError(f"The {name!r} of {OWNER} must be a numpy array or a tensor, got {type(points).__name__}.")
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.float()
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise BochnerError(f"The {name!r} of {OWNER} must have shape (n, d) with n, d >= 1, got {tuple(tensor.shape)}.")
    return finite(tensor, name, OWNER)


def _real(points: Any, name: str) -> np.ndarray:
    """A contiguous array of native floats that torch can share: a copy only where that is needed."""
    if np.ma.is_masked(points):
        raise BochnerError(
            f"The {name!r} of {OWNER} have masked entries, which a kernel cannot use; fill or drop them."
        )
    try:
        array = np.asarray(points)
    except ValueError as error:
        raise BochnerError(f"The {name!r} of {OWNER} must be an array (n, d), got rows of unequal length.") from error
    if array.dtype.kind not in "fiub":
        raise BochnerError(f"The {name!r} of {OWNER} must be a real array, got dtype {array.dtype}.")
    if array.dtype.kind in "iu" and array.itemsize == 8:
        _whole(array, name)
    kept = array.dtype.newbyteorder("=") if array.dtype.kind == "f" and array.itemsize <= 8 else np.float64
    return np.require(array, kept, ["C", "W"])


def as_values(x: Any, length: int, columns: bool, dtype: torch.dtype) -> tuple[Tensor, Callable[[Tensor], Any], Tensor]:
    """x as a (length, r) float64 tensor, the function that gives the answer its form, and the scale of each column.

    Every column is divided by a power of two near its largest entry: neither tiny nor huge columns must meet the ends
    of single precision, nor may a large one hide a small one.
    """
    refuse_dask(x, "x")
    if isinstance(x, Tensor):
        tensor = on_the_cpu(x, "x")
        if tensor.is_complex():
            raise BochnerError(f"The 'x' of {OWNER} must be real, got {tensor.dtype}.")
        if tensor.dtype == torch.int64:
            _whole(tensor, "x")
    else:
        array = np.asarray(x)
        if array.dtype.kind in "iu" and array.itemsize == 8:
            _whole(array, "x")
        if np.issubdtype(array.dtype, np.complexfloating):
            raise BochnerError(f"The 'x' of {OWNER} must be real, got {array.dtype}.")
        try:
            tensor = torch.from_numpy(np.require(array, np.float64, ["C", "W"]))
        except (TypeError, ValueError) as error:
            raise BochnerError(f"The 'x' of {OWNER} must be an array of numbers, got {type(x).__name__}.") from error
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
