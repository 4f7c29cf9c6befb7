"""Runs of `bochner train` as experiments make them, told apart by their sizes; and which tasks tell anything."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
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


def spread(seen: Sequence[float], digits: int) -> str:
    """The mean of some seeds, and their deviation where there are several; empty without a run."""
    deviation = f" ± {statistics.stdev(seen):.{digits}f}" if len(seen) > 1 else ""
    return f"{statistics.mean(seen):.{digits}f}{deviation}" if seen else ""


def ranked(task: str, unit: str, rows: Mapping[str, Sequence[float]], *, digits: int = 1, larger: bool = True) -> str:
    """A table of one task in Markdown, best first; attentions without a run are left out.

    >>> print(ranked("copying", "%", {"relu": [50.0, 52.0], "exact": [99.0], "fnet": []}))
    | copying | % | seeds |
    |---|---|---|
    | `exact` | 99.0 | 1 |
    | `relu` | 51.0 ± 1.4 | 2 |
    """
    known = sorted((a for a in rows if rows[a]), key=lambda a: statistics.mean(rows[a]), reverse=larger)
    lines = [f"| `{a}` | {spread(rows[a], digits)} | {len(rows[a])} |" for a in known]
    return "\n".join([f"| {task} | {unit} | seeds |", "|---|---|---|", *lines])


def by_frequency(train: np.ndarray, test: np.ndarray, symbols: int) -> float:
    """Bits per symbol of the test split by how often each occurs in the training split."""
    share = (np.bincount(train, minlength=symbols) + 1) / (len(train) + symbols)
    return float(-np.log2(share[test]).mean())
