"""Beyond memory: queries in blocks of rows, keys and index shared.

Every block is multiplied by `operator.with_queries(block, seed=...)` with a seed of its number: a pure function of
the block, so that results depend on nothing but the block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..._checks import BochnerError, positive_int, spawn_seed
from ..._progress import track
from .operator import KernelOperator


def block_product(block: Any, operator: KernelOperator, x: Any, number: int) -> np.ndarray:
    """The rows of the product that belong to one block of queries, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = operator.with_queries(np.ascontiguousarray(block), seed=spawn_seed(operator.seed, number))
        return np.asarray(rows @ np.asarray(x))
    finally:
        torch.set_num_threads(threads)


def stream_product(
    operator: KernelOperator,
    queries: Any,
    x: Any,
    *,
    rows: int = 65536,
    out: Any = None,
    done: int = 0,
    progress: bool | Callable[[int, int], None] = False,
) -> Any:
    """`K(queries, keys) x` for queries that do not fit into memory: anything with `.shape` and row slices.

    Memory-mapped numpy files, zarr and HDF5 arrays are read `rows` at a time. `out`: where to write (the same
    kinds of array); None returns a numpy array. `progress`: True for a bar in the terminal, or a function of the rows
    done and their total, called after each block. `done`: go on after an interruption, with the `out` of then and the
    number of rows, whole blocks, that were done.

    Example:
        >>> import numpy as np
        >>> from bochner.matvec import KernelOperator, stream_product
        >>> K = KernelOperator(np.zeros((1, 2)), np.zeros((3, 2)), bandwidth=1.0)
        >>> stream_product(K, np.zeros((5, 2)), np.ones(3), rows=2)
        array([3., 3., 3., 3., 3.])
    """
    positive_int(rows, "rows", "stream_product")
    shape = tuple(getattr(queries, "shape", ()))
    if len(shape) != 2 or shape[1] != operator.keys.shape[1]:
        raise BochnerError(
            f"The 'queries' of stream_product must have shape (n, {operator.keys.shape[1]}), got {shape}."
        )
    if done and (out is None or done % rows or not 0 < done <= shape[0]):
        raise BochnerError(
            f"The 'done' of stream_product must be a multiple of rows={rows} up to {shape[0]}, with the 'out' that was "
            f"begun, got {done!r} with {'no out' if out is None else 'out'}."
        )
    values = np.asarray(x)
    if out is None:
        out = np.empty((shape[0], *values.shape[1:]), dtype=operator.dtype)
    starts = range(done, shape[0], rows)
    for lo in track(starts, len(starts), "blocks", progress is True):
        hi = min(lo + rows, shape[0])
        out[lo:hi] = block_product(queries[lo:hi], operator, values, lo // rows)
        if callable(progress):
            progress(hi, shape[0])
    return out
