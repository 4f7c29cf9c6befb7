"""Beyond one machine: queries in blocks of rows, spread over the workers of Dask.

Blocks are those of `stream`: results depend neither on the number of workers nor on which of them survive.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..._checks import BochnerError, extra
from ..._progress import track
from .operator import KernelOperator
from .stream import block_product


def dask_product(operator: KernelOperator, queries: Any, x: Any, *, client: Any = None) -> Any:
    """`K(queries, keys) x` as a dask array chunked like the queries' rows; lazy, call `.compute()`.

    Args:
        operator: any operator with the right keys; its own queries do not matter.
        queries: a dask array (n, d), chunked by rows; columns are merged into one chunk.
        client: a `distributed.Client`. The operator and x are then sent to every worker once; without it dask's
            local schedulers are used. A worker that dies loses nothing: its blocks are computed elsewhere.

    Progress is on the client's dashboard; `dask_compute` shows it in the terminal.
    """
    dask, da = extra("dask", "dask", "dask_product"), extra("dask.array", "dask", "dask_product")
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
