"""How pictures of the gallery look, and what each was drawn from."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from _framework import OUT, figures_of

IMAGES = OUT / "docs" / "images" / "gallery"
# Okabe and Ito's colours, which survive colour-blindness and print.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
GREY = "0.55"
_drawn: list[str] = []


def digest(results: list[str]) -> str:
    """What tells whether figures are those that a picture was drawn from."""
    return hashlib.sha256(json.dumps([figures_of(r) for r in results], sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def drawing(name: str) -> Iterator[None]:
    """Keep beside the pictures what those made inside were drawn from: a test notices the ones that are older."""
    _drawn.clear()
    yield
    path = IMAGES / "drawn.json"
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known |= {picture: {"results": [name], "sha256": digest([name])} for picture in _drawn}
    path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")


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
    """Write a picture."""
    import matplotlib.pyplot as plt

    IMAGES.mkdir(parents=True, exist_ok=True)
    fig.savefig(IMAGES / f"{name}.png", metadata={"Software": None})
    _drawn.append(name)
    plt.close(fig)


def log_ticks(ax: Any, ticks: Any, axis: str = "x", base: float = 10) -> None:
    """A logarithmic axis with these ticks and no others."""
    getattr(ax, f"set_{axis}scale")("log", base=base)
    getattr(ax, f"set_{axis}ticks")(list(ticks), [f"{t:,}" for t in ticks])
    ax.minorticks_off()


def by_name(found: dict[str, Any], figure_of: str) -> dict[str, list[float]]:
    """The figure of each kind of run over its seeds; the keys of a result are `kind/seed`."""
    kinds: dict[str, list[float]] = {}
    for key, run in found.items():
        if figure_of in run:
            kinds.setdefault(key.rpartition("/")[0], []).append(run[figure_of])
    return kinds


def dots(ax: Any, rows: dict[str, list[float]], *, ordered: bool = True, scale: float = 1.0) -> None:
    """One line a name: a small dot for each seed, a bar through their mean; the largest mean on top."""
    names = sorted(rows, key=lambda n: statistics.mean(rows[n])) if ordered else list(rows)[::-1]
    for y, name in enumerate(names):
        values = [scale * x for x in rows[name]]
        ax.plot(values, [y] * len(values), "o", color=COLOURS[0], markersize=4, alpha=0.7)
        ax.plot(statistics.mean(values), y, "|", color="black", markersize=11)
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.grid(axis="x", color="0.9")
    ax.set_axisbelow(True)


def name_lines(ax: Any, ends: dict[str, tuple[float, Any]], fontsize: int = 8, gap: float = 0.055) -> None:
    """Names right of the axes at the heights where their lines end, moved apart; `ends`: last value and colour."""
    ax.figure.canvas.draw()
    x = ax.get_xlim()[1]
    heights = {n: ax.transAxes.inverted().transform(ax.transData.transform((x, y)))[1] for n, (y, _) in ends.items()}
    low = -1.0
    for name in sorted(heights, key=heights.__getitem__):
        low = max(heights[name], low + gap)
        ax.text(1.02, low, name, color=ends[name][1], fontsize=fontsize, va="center", transform=ax.transAxes)
