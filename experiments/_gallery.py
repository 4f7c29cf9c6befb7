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


def name_lines(ax: Any, ends: dict[str, tuple[float, Any]], fontsize: int = 8, gap: float = 0.055) -> None:
    """Names right of the axes at the heights where their lines end, moved apart; `ends`: last value and colour."""
    ax.figure.canvas.draw()
    x = ax.get_xlim()[1]
    heights = {n: ax.transAxes.inverted().transform(ax.transData.transform((x, y)))[1] for n, (y, _) in ends.items()}
    low = -1.0
    for name in sorted(heights, key=heights.__getitem__):
        low = max(heights[name], low + gap)
        ax.text(1.02, low, name, color=ends[name][1], fontsize=fontsize, va="center", transform=ax.transAxes)


def name_points(ax: Any, points: dict[str, tuple[float, float]], fontsize: int = 8) -> None:
    """Names beside points, where nothing else is written; what had to go some way is led to by a line."""
    from bochner.report.charts import Box, freest, label_box

    ax.figure.canvas.draw()
    size = ax.figure.bbox
    spots = {n: ax.transData.transform(p) for n, p in points.items()}
    spots = {n: (x, size.height - y) for n, (x, y) in spots.items()}  # downwards, as the boxes of labels
    taken = [Box(x - 6, y - 6, x + 6, y + 6) for x, y in spots.values()]
    frame = ax.get_window_extent()
    room = Box(frame.x0, size.height - frame.y1, frame.x1 + 60, size.height - frame.y0)
    labels: list[Box] = []
    for name, (x, y) in spots.items():
        shifts = (0, *(sign * d for d in range(6, 80, 6) for sign in (-1, 1)))
        places = [(x + dx, y + 4 + dy, anchor) for dy in shifts for dx, anchor in ((9, "start"), (-9, "end"))]
        at, height, anchor = places[freest(places, name, taken, room, labels)]
        labels.append(label_box(at, height, name, anchor))
        moved = (at - x) * 72 / ax.figure.dpi, (y - height + 4) * 72 / ax.figure.dpi
        line = {"arrowstyle": "-", "color": "0.7", "linewidth": 0.6} if abs(height - 4 - y) > 10 else None
        place = {"ha": "left" if anchor == "start" else "right", "va": "center", "fontsize": fontsize}
        ax.annotate(name, points[name], xytext=moved, textcoords="offset points", arrowprops=line, **place)


def save(fig: Any, name: str) -> None:
    """Write the picture of a script."""
    import matplotlib.pyplot as plt

    IMAGES.mkdir(parents=True, exist_ok=True)
    fig.savefig(IMAGES / f"{name}.png", metadata={"Software": None})
    DRAWN.add(name)
    plt.close(fig)
