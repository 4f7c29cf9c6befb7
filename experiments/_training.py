"""Runs of `bochner train` as experiments make them: kept in a folder, resumed, and told apart by their sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
