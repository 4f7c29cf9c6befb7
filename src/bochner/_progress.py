"""Progress of long work, on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def track(items: Iterable[T], total: int, what: str, shown: bool = True) -> Iterator[T]:
    """The items, with a bar on the standard error stream: rich's if it is installed, else a line per tenth."""
    if not shown:
        yield from items
        return
    try:
        from rich.console import Console
        from rich.progress import track as bar
    except ImportError:
        for i, item in enumerate(items):
            yield item
            if (i + 1) * 10 // total > i * 10 // total:
                print(f"{what}: {(i + 1) * 100 // total} %", file=sys.stderr, flush=True)
        return
    yield from bar(items, description=what, total=total, console=Console(stderr=True))


def speaker(shown: bool | None = True) -> Callable[[str], None]:
    """A function that says what is being done, on the standard error stream, or nothing; None: if it is a terminal."""
    shown = sys.stderr.isatty() if shown is None else shown

    def say(text: str) -> None:
        if shown:
            print(f"bochner: {text}", file=sys.stderr, flush=True)

    return say
