"""A self-contained HTML report: tables and line charts as inline SVG, no script, no network."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

COLOURS = ("#3366aa", "#cc4433", "#449944", "#886699", "#bb8822", "#229999")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { padding: .25rem .75rem; text-align: right; }
th { border-bottom: 2px solid #888; } th:first-child, td:first-child { text-align: left; }
tr:nth-child(even) td { background: #f4f4f4; } pre { background: #f4f4f4; padding: .75rem; overflow-x: auto; }
.note { color: #555; } svg text { font: 12px system-ui, sans-serif; fill: #333; }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd; } tr:nth-child(even) td, pre {
background: #262626; } svg text { fill: #ccc; } .note { color: #aaa; } }
"""


class Report:
    """A page built section by section.

    >>> page = Report("Title").text("Hello <world>").table(["a"], [[1.5]])
    >>> "&lt;world&gt;" in page.html() and "1.500" in page.html()
    True
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.parts: list[str] = [f"<h1>{html.escape(title)}</h1>"]

    def heading(self, text: str) -> Report:
        self.parts.append(f"<h2>{html.escape(text)}</h2>")
        return self

    def text(self, text: str, *, note: bool = False) -> Report:
        self.parts.append(f"<p{' class=note' if note else ''}>{html.escape(text)}</p>")
        return self

    def code(self, text: str) -> Report:
        self.parts.append(f"<pre>{html.escape(text)}</pre>")
        return self

    def table(self, head: Sequence[str], rows: Sequence[Sequence[object]]) -> Report:
        cells = "".join(f"<th>{html.escape(str(c))}</th>" for c in head)
        lines = [f"<tr>{''.join(f'<td>{html.escape(show(c))}</td>' for c in row)}</tr>" for row in rows]
        self.parts.append(f"<table><tr>{cells}</tr>{''.join(lines)}</table>")
        return self

    def chart(
        self,
        title: str,
        series: Mapping[str, Sequence[tuple[float, float]]],
        *,
        x_label: str = "",
        y_label: str = "",
        log: bool = False,
    ) -> Report:
        """Lines through points (x, y); `log` for both axes."""
        self.parts.append(line_chart(title, series, x_label=x_label, y_label=y_label, log=log))
        return self

    def html(self) -> str:
        return (
            f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(self.title)}</title>"
            f"<style>{STYLE}</style><body>{''.join(self.parts)}</body></html>"
        )

    def save(self, path: str | Path) -> Path:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.html(), encoding="utf-8")
        return target


def show(value: object) -> str:
    """A number with three decimals or digits, anything else as it is."""
    if isinstance(value, float):
        return f"{value:.3f}" if 1e-3 <= abs(value) < 1e3 or value == 0 else f"{value:.3g}"
    return str(value)


def line_chart(
    title: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x_label: str = "",
    y_label: str = "",
    log: bool = False,
) -> str:
    """One SVG with axes, ticks, lines, points and a legend."""
    height, left, bottom, top = 340, 70, 50, 30
    legend = 40 + 7 * max((len(name) for name in series), default=0)  # wide enough for the longest name
    width = 480 + legend
    points = [p for line in series.values() for p in line]
    if not points:
        return ""

    def scale(t: float) -> float:
        return math.log10(max(t, 1e-12)) if log else t

    xs, ys = [scale(x) for x, _ in points], [scale(y) for _, y in points]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    if not log:
        y0 = min(0.0, y0)
    x1, y1 = (x1 if x1 > x0 else x0 + 1), (y1 if y1 > y0 else y0 + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        u = left + (scale(x) - x0) / (x1 - x0) * (width - left - legend)
        return u, height - bottom - (scale(y) - y0) / (y1 - y0) * (height - bottom - top)

    parts = [f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">']
    parts.append(f'<text x="{left}" y="16" font-weight="bold">{html.escape(title)}</text>')
    places = sorted({x for x, _ in points})
    for x in places if len(places) <= 10 else places[:: len(places) // 5]:
        u, _ = place(x, points[0][1])
        parts.append(f'<text x="{u:.1f}" y="{height - bottom + 18}" text-anchor="middle">{tick(x)}</text>')
    for i in range(5):
        fy = y0 + (y1 - y0) * i / 4
        vy = 10**fy if log else fy
        _, w = place(points[0][0], vy)
        parts.append(f'<line x1="{left}" x2="{width - legend}" y1="{w:.1f}" y2="{w:.1f}" stroke="#8884"/>')
        parts.append(f'<text x="{left - 6}" y="{w + 4:.1f}" text-anchor="end">{tick(vy)}</text>')
    middle = (left + width - legend) / 2
    parts.append(f'<text x="{middle}" y="{height - 10}" text-anchor="middle">{html.escape(x_label)}</text>')
    parts.append(f'<text x="14" y="{height / 2}" transform="rotate(-90 14 {height / 2})">{html.escape(y_label)}</text>')
    for i, (name, line) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        placed = [place(x, y) for x, y in line]
        path = " ".join(f"{u:.1f},{w:.1f}" for u, w in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{u:.1f}" cy="{w:.1f}" r="3" fill="{colour}"/>' for u, w in placed]
        y = top + 16 * i + 8
        parts.append(f'<rect x="{width - legend + 10}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{width - legend + 25}" y="{y}">{html.escape(name)}</text>')
    return "".join(parts) + "</svg>"


def tick(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
