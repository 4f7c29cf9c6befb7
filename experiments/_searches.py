"""Reports of searches as results hold them: those of this version, and those that were stored by the one before.

Before, a share that is retained was called "kept", what was measured "candidates", and a report that came with training
was an entry "target" beside that of the training.
"""

from __future__ import annotations

from typing import Any


def search_of(report: dict[str, Any]) -> dict[str, Any]:
    """The part of a report that is of the search."""
    found: dict[str, Any] = report.get("target", report)
    return found


def retained(quality: dict[str, Any]) -> float:
    """The share of its quality that a model retains."""
    return float(quality["retained"] if "retained" in quality else quality["kept"])


def tried(report: dict[str, Any]) -> list[tuple[float, float]]:
    """Memory and quality retained of every choice that was measured; `report["chosen"]` is a place among them."""
    if "frontier" in report:
        return [(c["memory"], retained(c["quality"])) for c in report["frontier"]]
    return [(c["memory"], retained(c)) for c in report["candidates"]]
