"""ListOps: nested lists of digits under MIN, MAX, MED and SM, and the digit they come to (Nangia & Bowman 2018).

With the sizes of the Long Range Arena: a node above depth 10 is an operator with probability 1/4, else a digit; two to
ten arguments. `[MAX 2 [MIN 3 9 ] 1 ]` is 3. MED is the median rounded down, SM the sum modulo 10.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from bochner._checks import BochnerError
from bochner._progress import track
from bochner.tasks.base import SPLITS, Preset, Sequences, ends, stored

OPERATORS = ("MIN", "MAX", "MED", "SM")
SYMBOLS = (*"0123456789", *(f"[{name}" for name in OPERATORS), "]")
CLOSE = len(SYMBOLS) - 1
DEPTH, ARGUMENTS, BRANCH = 10, 10, 0.25


class _TooLong(Exception):
    pass


def expressions(seed: int, low: int, high: int) -> Iterator[tuple[bytes, int]]:
    """Endless different expressions of more than `low` and fewer than `high` symbols, each with its value."""
    rng = random.Random(seed)
    seen: set[bytes] = set()
    while True:
        symbols: list[int] = []
        try:
            value = _grow(rng, symbols, 1, high)
        except _TooLong:
            continue
        text = bytes(symbols)
        if low < len(text) and text not in seen:
            seen.add(text)
            yield text, value


def _grow(rng: random.Random, symbols: list[int], depth: int, high: int) -> int:
    """Append a random expression; its value. The root is an operator: a lone digit would be too short anyway."""
    if len(symbols) >= high - 1:
        raise _TooLong
    if depth > 1 and (depth >= DEPTH or rng.random() >= BRANCH):
        digit = rng.randrange(10)
        symbols.append(digit)
        return digit
    which = rng.randrange(len(OPERATORS))
    symbols.append(10 + which)
    values = [_grow(rng, symbols, depth + 1, high) for _ in range(rng.randint(2, ARGUMENTS))]
    symbols.append(CLOSE)
    if len(symbols) >= high:
        raise _TooLong
    return APPLY[OPERATORS[which]](values)


def _median(values: list[int]) -> int:
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) // 2


APPLY: dict[str, Callable[[list[int]], int]] = {
    "MIN": min,
    "MAX": max,
    "MED": _median,
    "SM": lambda values: sum(values) % 10,
}


def show(symbols: bytes | np.ndarray) -> str:
    """An expression as text.

    >>> show(bytes([11, 2, 10, 3, 9, 14, 1, 14]))
    '[MAX 2 [MIN 3 9 ] 1 ]'
    """
    return " ".join(SYMBOLS[s] for s in symbols)


def load(preset: Preset, split: str) -> Sequences:
    """Expressions of `data["low"]` to `data["high"]` symbols: `train` of them, and `test` each to validate and test."""
    low, high = preset.data["low"], preset.data["high"]
    train, test = preset.train or 96_000, preset.test or 2_000
    if not 0 < low < high - 2:
        raise BochnerError(f"The 'low' of listops must be positive and below 'high' - 2, got {low} and {high}.")

    def make() -> dict[str, np.ndarray]:
        stream = expressions(0, low, high)
        total = train + 2 * test
        rows = list(track(islice(stream, total), total, "making listops, once"))
        texts, values = zip(*rows, strict=True)
        tokens = np.frombuffer(b"".join(texts), np.uint8)
        return {"tokens": tokens, "offsets": ends(texts), "labels": np.array(values, np.int8)}

    arrays = stored(f"listops-1-{low}-{high}-{train}-{test}", make)
    everything = Sequences(arrays["tokens"], arrays["offsets"], arrays["labels"], preset.length)
    bounds = (0, train, train + test, train + 2 * test)
    i = SPLITS.index(split)
    return everything.take(np.arange(bounds[i], bounds[i + 1]))
