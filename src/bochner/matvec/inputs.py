"""Reading what callers pass: points, bandwidths, vectors. One sentence per mistake."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._checks import BochnerError, finite, positive_float

OWNER = "KernelOperator"


def real_dtype(x: Any) -> Any:
    """The floating dtype numpy input is read as: float32 and float64 stay, integers become float64."""
    dtype = np.asarray(x).dtype
    if np.issubdtype(dtype, np.complexfloating):
        raise BochnerError(f"The 'x' of {OWNER} must be real, got {dtype}.")
    return dtype if dtype in (np.float32, np.float64) else np.float64


def as_points(points: Any, name: str) -> Tensor:
    """A finite (n, d) float32 or float64 tensor from numpy or torch, or one sentence saying what is wrong."""
    if isinstance(points, Tensor):
        tensor = points.detach().cpu()
        if not tensor.is_floating_point():
            tensor = tensor.double()
    elif isinstance(points, np.ndarray) or hasattr(points, "__array__") or isinstance(points, (list, tuple)):
        array = np.asarray(points)
        if array.dtype.kind not in "fiub":
            raise BochnerError(f"The {name!r} of {OWNER} must be a real array, got dtype {array.dtype}.")
        tensor = torch.from_numpy(np.ascontiguousarray(array if array.dtype.kind == "f" else array.astype(float)))
    else:
        raise BochnerError(f"The {name!r} of {OWNER} must be a numpy array or a tensor, got {type(points).__name__}.")
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.float()
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise BochnerError(f"The {name!r} of {OWNER} must have shape (n, d) with n, d >= 1, got {tuple(tensor.shape)}.")
    return finite(tensor, name, OWNER)


def resolve_bandwidth(bandwidth: float | None, gamma: float | None) -> float:
    """sigma from exactly one of the two conventions."""
    if (bandwidth is None) == (gamma is None):
        raise BochnerError(
            f"Give {OWNER} exactly one of 'bandwidth' (sigma, in exp(-|q-k|^2 / (2 sigma^2))) and 'gamma' "
            f"(in exp(-gamma |q-k|^2)), got bandwidth={bandwidth!r} and gamma={gamma!r}."
        )
    if bandwidth is not None:
        return positive_float(_scalar(bandwidth), "bandwidth", OWNER)
    return 1.0 / math.sqrt(2.0 * positive_float(_scalar(gamma), "gamma", OWNER))


def _scalar(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
