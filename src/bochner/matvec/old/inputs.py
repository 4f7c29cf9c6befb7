"""Reading what callers pass: points, bandwidths, vectors. One sentence per mistake."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._checks import BochnerError, finite, positive_float

OWNER = "KernelOperator"
BANDWIDTHS = (1e-140, 1e140)  # squares of distances must neither vanish nor overflow in double precision


def on_the_cpu(x: Tensor, name: str) -> Tensor:
    if x.device.type != "cpu":
        raise BochnerError(
            f"The {name!r} of {OWNER} must be on the CPU, where products are computed, got {x.device}; call .cpu()."
        )
    return x.detach()


def as_points(points: Any, name: str) -> Tensor:
    """A finite (n, d) float32 or float64 tensor from numpy or torch, or one sentence saying what is wrong."""
    if isinstance(points, Tensor):
        if points.requires_grad and torch.is_grad_enabled():
            raise BochnerError(
                f"The {name!r} of {OWNER} require a gradient, which products have with respect to x and bandwidth "
                "only; call .detach()."
            )
        tensor = on_the_cpu(points, name)
        if not tensor.is_floating_point():
            tensor = tensor.double()
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
    kept = array.dtype.newbyteorder("=") if array.dtype.kind == "f" and array.itemsize <= 8 else np.float64
    return np.require(array, kept, ["C", "W"])


def as_values(x: Any, length: int, columns: bool, dtype: torch.dtype) -> tuple[Tensor, Callable[[Tensor], Any], Tensor]:
    """x as a (length, r) float64 tensor, the function that gives the answer its form, and the scale of each column.

    Every column is divided by a power of two near its largest entry: neither tiny nor huge columns must meet the ends
    of single precision, nor may a large one hide a small one.
    """
    if isinstance(x, Tensor):
        tensor = on_the_cpu(x, "x")
    else:
        array = np.asarray(x)
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


def resolve_bandwidth(bandwidth: float | Tensor | None, gamma: float | None) -> float:
    """sigma from exactly one of the two conventions."""
    if (bandwidth is None) == (gamma is None):
        raise BochnerError(
            f"Give {OWNER} exactly one of 'bandwidth' (sigma, in exp(-|q-k|^2 / (2 sigma^2))) and 'gamma' "
            f"(in exp(-gamma |q-k|^2)), got bandwidth={bandwidth!r} and gamma={gamma!r}."
        )
    if isinstance(gamma, Tensor) and gamma.requires_grad and torch.is_grad_enabled():
        raise BochnerError(
            f"The 'gamma' of {OWNER} requires a gradient, which products have with respect to x and bandwidth only; "
            "give bandwidth=(2 * gamma) ** -0.5, or call .detach()."
        )
    if bandwidth is None:
        sigma = 1.0 / math.sqrt(2.0 * positive_float(_scalar(gamma), "gamma", OWNER))
    else:
        sigma = positive_float(_scalar(bandwidth), "bandwidth", OWNER)
    if not BANDWIDTHS[0] <= sigma <= BANDWIDTHS[1]:
        raise BochnerError(
            f"The 'bandwidth' of {OWNER} must be between {BANDWIDTHS[0]:g} and {BANDWIDTHS[1]:g}, got {sigma:g}; "
            "rescale the points."
        )
    return sigma


def _scalar(value: Any) -> Any:
    one = isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1)
    return value.item() if one else value
