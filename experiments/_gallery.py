"""What every script of the gallery shares: its result as JSON with claim and verdict, and how its picture looks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
IMAGES = ROOT / "docs" / "images" / "gallery"
VERDICTS = ("reproduced", "partly", "not")
# Okabe and Ito's colours, which survive colour-blindness and print.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


def finish(name: str, result: dict[str, Any], *, claim: str, ours: str, verdict: str, why: str = "") -> int:
    """Write the result with what the gallery says of it; the exit code of the script: 0 if the claim is reproduced.

    `claim`: what the paper says; `ours`: what was found, with figures; `why`: the reason where the two differ.
    """
    if verdict not in VERDICTS or (verdict != "reproduced" and not why):
        raise ValueError(f"The verdict must be one of {VERDICTS}, with a reason unless reproduced; got {verdict!r}.")
    said = {"claim": claim, "ours": ours, "verdict": verdict, "why": why}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"gallery": said, **result}, indent=1) + "\n", encoding="utf-8")
    print(f"\nclaim: {claim}\nours: {ours}\nverdict: {verdict}" + (f" ({why})" if why else ""))
    return 0 if verdict == "reproduced" else 1


def figure(columns: int = 1, rows: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure of the gallery and its axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10, "figure.dpi": 110})
    plt.rcParams["axes.prop_cycle"] = plt.cycler(color=COLOURS)
    size = options.pop("figsize", (4.6 * columns, 3.4 * rows))
    return plt.subplots(rows, columns, figsize=size, layout="constrained", **options)


def save(fig: Any, name: str) -> None:
    """Write the picture of a script."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    fig.savefig(IMAGES / f"{name}.png", metadata={"Software": None})
