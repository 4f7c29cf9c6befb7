"""Runs of `bochner train` as experiments make them, told apart by their sizes; and which tasks tell anything."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _framework import ROOT

from bochner import tasks

RUNS = ROOT / "runs"
SAME = ("steps", "length", "width", "layers", "batch", "learning_rate")  # a run with other sizes is another run


def trained(task: str, attention: str, where: str, **options: Any) -> dict[str, Any]:
    """The result of a run, which goes on where it was stopped."""
    result: dict[str, Any] = tasks.train(task, attention, output=folder(where), resume=True, report=None, **options)
    return result


def folder(where: str) -> Path:
    return RUNS / where.replace(", ", "-").replace(" ", "")


def of_preset(task: str, run: dict[str, Any]) -> bool:
    """Whether a stored run has the sizes of the preset as it is now."""
    preset = tasks.task(task).presets["small"]
    return all(run.get(x) == getattr(preset, x) for x in SAME)


class Gate(NamedTuple):
    """Whether attention decides a task: `margin`, what exact attention has over the best without, and the `spread`."""

    is_open: bool
    margin: float
    spread: float


def gate(exact: Sequence[float], none: Sequence[float], trivial: float | None = None, *, larger: bool = True) -> Gate:
    """Exact attention must beat a model without attention, and the best trivial answer, by over 3 deviations of seeds.

    `exact`, `none`: figures of the seeds; the spread is the larger of the two. A single seed of exact attention never
    opens the gate: its spread is not known.

    >>> gate([0.99, 1.0, 1.0], [0.25, 0.26], 0.25).is_open, gate([33.2, 34.1], [32.0, 32.1], 17.0).is_open
    (True, False)
    """
    sign = 1.0 if larger else -1.0
    if not exact or not none:
        return Gate(False, math.nan, math.nan)
    others = [sign * statistics.mean(none), *([] if trivial is None else [sign * trivial])]
    margin = sign * statistics.mean(exact) - max(others)
    if len(exact) < 2:
        return Gate(False, margin, math.nan)
    spread = max(statistics.stdev(x) for x in (exact, none) if len(x) > 1)
    return Gate(margin > 3 * spread, margin, spread)
