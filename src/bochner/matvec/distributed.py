"""Beyond one machine and beyond memory: queries in blocks of rows, keys and index shared.

Every block is multiplied by `operator.with_queries(block, seed=operator.seed + block number)`: a pure function of
the block, so that results depend neither on the number of workers nor on which of them survive.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .._checks import BochnerError, positive_int
from .._progress import track
from .operator import KernelOperator


def block_product(block: Any, operator: KernelOperator, x: Any, number: int) -> np.ndarray:
    """The rows of the product that belong to one block of queries, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = operator.with_queries(np.ascontiguousarray(block), seed=operator.seed + number)
        return np.asarray(rows @ np.asarray(x))
    finally:
        torch.set_num_threads(threads)


def dask_product(operator: KernelOperator, queries: Any, x: Any, *, client: Any = None) -> Any:
    """`K(queries, keys) x` as a dask array chunked like the queries' rows; lazy, call `.compute()`.

    Args:
        operator: any operator with the right keys; its own queries do not matter.
        queries: a dask array (n, d), chunked by rows; columns are merged into one chunk.
        client: a `distributed.Client`. The operator and x are then sent to every worker once; without it dask's
            local schedulers are used. A worker that dies loses nothing: its blocks are computed elsewhere.

    Progress is on the client's dashboard; `dask_compute` shows it in the terminal.
    """
    try:
        import dask
        import dask.array as da
    except ImportError as error:
        raise BochnerError("dask_product needs dask; install bochner[dask].") from error
    if not isinstance(queries, da.Array) or queries.ndim != 2:
        raise BochnerError(f"The 'queries' of dask_product must be a dask array (n, d), got {type(queries).__name__}.")
    values = np.asarray(x)
    if values.ndim not in (1, 2) or values.shape[0] != operator.shape[1]:
        raise BochnerError(
            f"The 'x' of dask_product must have shape ({operator.shape[1]},) or ({operator.shape[1]}, r), "
            f"got {values.shape}."
        )
    operator.share_index()
    queries = queries.rechunk({1: -1})
    if client is None:
        shared, vector = dask.delayed(operator, traverse=False), dask.delayed(values, traverse=False)
    else:
        shared, vector = client.scatter([operator, values], broadcast=True)
    task = dask.delayed(block_product, pure=True)
    parts = []
    for number, (block, rows) in enumerate(zip(queries.to_delayed().ravel(), queries.chunks[0], strict=True)):
        part = task(block, shared, vector, number)
        parts.append(da.from_delayed(part, shape=(rows, *values.shape[1:]), dtype=operator.dtype))
    return da.concatenate(parts)


def dask_compute(product: Any, *, client: Any = None) -> np.ndarray:
    """Compute a `dask_product` with a progress bar in the terminal; `client` as given to it."""
    if client is None:
        from dask.diagnostics import ProgressBar

        with ProgressBar(out=sys.stderr):
            return np.asarray(product.compute())
    from distributed import as_completed

    parts = client.compute(list(product.to_delayed().ravel()))
    for _ in track(as_completed(parts), len(parts), "blocks"):
        pass
    return np.concatenate(client.gather(parts))


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
    if len(shape) != 2 or shape[1] != operator._keys.shape[1]:
        raise BochnerError(
            f"The 'queries' of stream_product must have shape (n, {operator._keys.shape[1]}), got {shape}."
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
