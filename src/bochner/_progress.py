"""What long work says while it runs: messages of the logger "bochner", on the error stream unless told otherwise."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class _Stderr(logging.StreamHandler[Any]):
    """Writes to the standard error stream of the moment, which a test or a notebook may replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("bochner: %(message)s"))

    @property
    def stream(self) -> Any:
        return sys.stderr


logger = logging.getLogger("bochner")
if not logger.handlers:  # else the user's own
    logger.addHandler(_Stderr())
    logger.propagate = False
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)


def track(items: Iterable[T], total: int, what: str, shown: bool = True) -> Iterator[T]:
    """The items, with a message after every tenth of them."""
    for i, item in enumerate(items):
        yield item
        if shown and (i + 1) * 10 // total > i * 10 // total:
            logger.info("%s: %d %%", what, (i + 1) * 100 // total)


def speaker(shown: bool | None = True) -> Callable[[str], None]:
    """A function that logs what is being done, or does nothing; None: whether the error stream is a terminal."""
    shown = sys.stderr.isatty() if shown is None else shown
    return logger.info if shown else lambda text: None


class quietly:
    """Silence transformers' progress bars and advice for a while."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self.level = logging.get_verbosity()
        self.bars = logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __exit__(self, *exc: object) -> None:
        from transformers.utils import logging

        logging.set_verbosity(self.level)
        if self.bars:
            logging.enable_progress_bar()
