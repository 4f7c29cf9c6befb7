"""Rows that are read in blocks, as often as needed: arrays, memory-mapped files, iterators, Dask arrays.

A fit is a few sums over blocks of rows. `Rows.total(function, ...)` is one of them; with Dask the function travels to
the blocks and only its sums come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce, wraps
from typing import Any, NamedTuple

import numpy as np

from bochner._checks import BochnerError, extra

BLOCK = 8192  # rows of an array that are one block
FAN_IN = 8  # sums that Dask adds in one task


class Block(NamedTuple):
    """Some rows: X (b, d), the targets (b, c) or labels (b,), and the weights (b,), float64."""

    X: np.ndarray
    y: Any
    weight: np.ndarray

    def merged(self) -> Block:
        """In a canonical order, copies of a row as one of their whole weight, rows without weight left out."""
        counted = self.weight > 0
        table, place = np.unique(np.concatenate([self.X, self.y], 1)[counted], axis=0, return_inverse=True)
        X, y = np.split(table, [self.X.shape[1]], axis=1)
        return Block(X, y, np.bincount(place.ravel(), self.weight[counted]))


Sums = tuple[Any, ...]


@dataclass(frozen=True)
class Rows:
    """The blocks (X, y, weight) of an iterator that `start()` begins anew for every pass.

    `encode` turns the y of a block into targets (b, c). `lengths`: rows of each block, once they were counted. `held`:
    whether all rows are at hand as one array.
    """

    start: Callable[[], Iterator[tuple[Any, ...]]]
    encode: Callable[[Any], np.ndarray] | None = None
    lengths: tuple[int, ...] = ()
    held: bool = False

    def __len__(self) -> int:
        return sum(self.lengths)

    def head(self) -> Block:
        first: tuple[Any, ...] | None = next(self.start(), None)
        return finished(first or _none(), self.encode)

    def each(self, function: Callable[..., Any], *state: Any, shares: list[Any] | None = None) -> Iterable[Any]:
        """`function(block, *state)` of every block; `shares`: one more argument for each of them, None to leave out."""
        for i, part in enumerate(self.start()):
            if shares is None or shares[i] is not None:
                yield run(function, self.encode, part, *state, *([] if shares is None else [shares[i]]))

    def total(self, function: Callable[..., Sums], *state: Any) -> Sums:
        """The sum of `function(block, *state)` over the blocks, term by term."""
        return add_all(self.each(function, *state))

    def sample(self, count: int, rng: np.random.RandomState) -> Block:
        """`count` rows at random, without repetition; all if there are no more."""
        n, ends = len(self), np.cumsum(self.lengths)
        drawn = np.arange(n) if count >= n else np.sort(rng.choice(n, count, replace=False))
        parts = np.split(drawn, np.searchsorted(drawn, ends[:-1]))
        shares = [part - end + m if len(part) else None for part, end, m in zip(parts, ends, self.lengths, strict=True)]
        found = zip(*self.each(_take, shares=shares), strict=True)
        return Block._make(map(np.concatenate, found))


def finished(part: tuple[Any, ...], encode: Callable[[Any], np.ndarray] | None) -> Block:
    """One block with its targets; runs where the block is."""
    X, y, weight = part
    if y is None:
        raise BochnerError("A fit needs targets y as well as rows X, got no y.")
    X, y = np.asarray(X), np.asarray(y)
    if X.ndim != 2 or X.dtype.kind not in "fiub":
        raise BochnerError(f"A block of rows X must be a table of numbers, got {X.dtype} of shape {X.shape}.")
    weight = np.ones(len(X)) if weight is None else np.array(weight, dtype=np.float64)
    if not (weight >= 0).all() or not np.isfinite(weight).all():
        raise BochnerError("The weights of a block must be finite and not negative.")
    for name, values in (("y", y), ("sample_weight", weight)):
        if len(values) != len(X):
            raise BochnerError(f"A block has {len(X)} rows of X and {len(values)} of {name}; they must be as many.")
    return Block(X, y if encode is None else encode(y), weight)


def run(function: Callable[..., Any], encode: Any, part: tuple[Any, ...], *state: Any) -> Any:
    return function(finished(part, encode), *state)


def add_all(parts: Iterable[Sums]) -> Sums:
    parts = iter(parts)
    first = next(parts, None) or _none()
    return reduce(lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)), parts, first)


def _none() -> Any:
    raise BochnerError("There are no blocks of rows; the function must return a new iterator every time.")


def _take(block: Block, index: np.ndarray) -> Block:
    return Block._make(part[index] for part in block)


def _whole(block: Block) -> Block:
    return block


def array_rows(X: Any, y: Any = None, weight: Any = None) -> Rows:
    """Rows of arrays, in memory or memory-mapped."""

    def blocks() -> Iterator[tuple[Any, ...]]:
        for i in range(0, len(X), BLOCK):
            yield tuple(None if part is None else part[i : i + BLOCK] for part in (X, y, weight))

    return Rows(blocks, held=True)


def streamed_rows(start: Callable[[], Iterator[tuple[Any, ...]]]) -> Rows:
    """Rows of a function that returns an iterator of (X, y) or (X, y, weight), called once for every pass."""

    def blocks() -> Iterator[tuple[Any, ...]]:
        for part in iter(start()):
            if not isinstance(part, tuple) or not 2 <= len(part) <= 3:
                raise BochnerError("An iterator of blocks must yield (X, y) or (X, y, weight).")
            yield (*part, None)[:3]

    return Rows(blocks)


@dataclass(frozen=True)
class DaskRows(Rows):
    """Rows of Dask arrays: the function runs where a block is, and sums of few blocks are added on the way back."""

    parts: tuple[tuple[Any, Any, Any], ...] = ()

    def head(self) -> Block:
        return next(iter(replace(self, parts=self.parts[:1]).each(_whole)))

    def each(self, function: Callable[..., Any], *state: Any, shares: list[Any] | None = None) -> Iterable[Any]:
        return list(extra("dask", "dask", "a Dask array").compute(*self._tasks(function, state, shares)))

    def total(self, function: Callable[..., Sums], *state: Any) -> Sums:
        dask = extra("dask", "dask", "a Dask array")
        tasks, add = self._tasks(function, state, None), dask.delayed(add_all, pure=False)
        while len(tasks) > 1:
            tasks = [add(tasks[i : i + FAN_IN]) for i in range(0, len(tasks), FAN_IN)]
        return dask.compute(tasks[0])[0]

    def _tasks(self, function: Callable[..., Any], state: tuple[Any, ...], shares: list[Any] | None) -> list[Any]:
        delayed = extra("dask", "dask", "a Dask array").delayed
        call, constants = delayed(run, pure=False), [delayed(s, traverse=False) for s in state]
        if shares is None:
            return [call(function, self.encode, part, *constants) for part in self.parts]
        chosen = [(part, share) for part, share in zip(self.parts, shares, strict=True) if share is not None]
        return [call(function, self.encode, part, *constants, share) for part, share in chosen]


def is_dask(X: Any) -> bool:
    return type(X).__module__.startswith("dask.") and hasattr(X, "map_blocks")


def refuse_dask(owner: str, *arrays: Any) -> None:
    """For fits that hold all rows: nothing is brought into memory in silence."""
    if any(is_dask(array) for array in arrays):
        raise BochnerError(
            f"{owner}.fit holds all rows in memory; call .compute() on the Dask arrays to bring them in."
        )


def dask_rows(X: Any, y: Any, weight: Any, owner: str) -> DaskRows:
    """Blocks of whole rows; y and weight are cut where X is."""
    if X.ndim != 2:
        raise BochnerError(f"The 'X' of {owner} must have two dimensions, got {X.ndim}.")
    array = extra("dask.array", "dask", owner)

    def counted(values: Any) -> Any:
        values = values if is_dask(values) else array.from_array(np.asarray(values), chunks=-1)
        return values.copy().compute_chunk_sizes() if np.isnan(values.shape[0]) else values

    X = counted(X).rechunk({1: -1})

    def cut(values: Any) -> list[Any]:
        if values is None:
            return [None] * X.numblocks[0]
        values = counted(values)
        if values.shape[0] != X.shape[0]:
            raise BochnerError(f"{owner} has {X.shape[0]} rows of X and {values.shape[0]} of y or sample_weight.")
        return list(values.rechunk({0: X.chunks[0], **dict.fromkeys(range(1, values.ndim), -1)}).to_delayed().ravel())

    return DaskRows(lambda: iter(()), parts=tuple(zip(X.to_delayed().ravel(), cut(y), cut(weight), strict=True)))


def blockwise(result: Callable[[Any], tuple[int, Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For a method of one X: a Dask array in gives a Dask array out, block by block, and nothing is computed yet.

    `result(estimator)`: the columns of the result, 0 for one number a row, and its dtype, None for that of X.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, X: Any, *args: Any, **options: Any) -> Any:
            if not is_dask(X):
                return method(self, X, *args, **options)
            columns, dtype = result(self)
            X = X.rechunk({1: -1})
            how: dict[str, Any] = {"chunks": (X.chunks[0], (columns,))} if columns else {"drop_axis": 1}
            meta = np.empty((0, 0) if columns else (0,), dtype=dtype or X.dtype)
            return X.map_blocks(lambda part: method(self, part, *args, **options), meta=meta, **how)

        return call

    return decorate
