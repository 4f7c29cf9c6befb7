"""What every script of the gallery shares: its result as JSON with claim and verdict, and how its picture looks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
IMAGES = ROOT / "docs" / "images" / "gallery"
VERDICTS = ("reproduced", "partly", "not")
# Okabe and Ito's colours, which survive colour-blindness and print.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


DRAWN: set[str] = set()  # pictures that this process has drawn


def digest(results: Sequence[str]) -> str:
    """What tells whether results are those that a picture was drawn from; the words of the gallery do not count."""
    found = [json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in results]
    figures = [{k: v for k, v in r.items() if k != "gallery"} if isinstance(r, dict) else r for r in found]
    return hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()[:16]


def note_drawn(picture: str, results: Sequence[str]) -> None:
    """Keep beside the pictures what one of them was drawn from: a test notices those older than their results."""
    path = IMAGES / "drawn.json"
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known[picture] = {"results": list(results), "sha256": digest(results)}
    path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")


def finish(name: str, result: dict[str, Any], *, claim: str, ours: str, verdict: str, why: str = "") -> int:
    """Write the result with what the gallery says of it; the exit code of the script: 0 if the claim is reproduced.

    `claim`: what the paper says; `ours`: what was found, with figures; `why`: the reason where the two differ.
    """
    if verdict not in VERDICTS or (verdict != "reproduced" and not why):
        raise ValueError(f"The verdict must be one of {VERDICTS}, with a reason unless reproduced; got {verdict!r}.")
    said = {"claim": claim, "ours": ours, "verdict": verdict, "why": why}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"gallery": said, **result}, indent=1) + "\n", encoding="utf-8")
    if name in DRAWN:
        note_drawn(name, [name])
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
    DRAWN.add(name)
