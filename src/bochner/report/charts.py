"""Charts as inline SVG with round ticks: lines, points and maps. Their names stand in a list below, which wraps.

Colours are classes of meaning (`c0` .. `c7`), defined for light and dark in the style sheet: the first is what
everything is compared with. The drawings are narrow enough for a phone and are enlarged on a wide screen.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 560, 360, 64, 52, 34
RIGHT = WIDTH - 24
LEAST_LOSS = 1e-4  # the smallest loss that is told apart
LINE, DASHED = "\u25cf", "\u2506"  # signs of a line and of a marked place in the list of names


def number(value: float) -> str:
    """A number of a tick or label: 0.25, 3, 4,096, 1.5e-07.

    >>> number(0.25), number(4096.0), number(0), number(1.5e-7)
    ('0.25', '4,096', '0', '1.5e-07')
    """
    if value == 0:
        return "0"
    if abs(value) >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.3g}"


def round_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` multiples of 1, 2, 2.5 or 5 times a power of ten that cover the range.

    >>> round_ticks(0, 1.06)
    [0.0, 0.25, 0.5, 0.75, 1.0, 1.25]
    """
    span = (high - low) or abs(high) or 1.0
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten that lie in the range; with fewer than three of them 2 and 5 times too, or more.

    >>> log_ticks(0.3, 40)
    [0.5, 1.0, 2.0, 5.0, 10.0, 20.0]
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 2, 5), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 8)):
        found = [round(f * 10.0**p, 14) for p in powers for f in factors if low * 0.999 <= f * 10.0**p <= high * 1.001]
        if len(found) >= 3:
            break
    return found or [low, high]


class Axis(NamedTuple):
    """From data to drawing: ticks, and whether logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool
    ticks: list[float]

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, *, log: bool, zero: bool = False) -> Axis:
        low, high = min(values), max(values)
        if log:
            low, high = max(low, 1e-12), max(high, 1e-12)
            if high / low < 1.5:
                low, high = low / 1.5, high * 1.5
            return cls(low, high, start, end, True, log_ticks(low, high))
        ticks = round_ticks(min(0.0, low) if zero else low, high if high > low or zero else low + 1)
        return cls(ticks[0], ticks[-1], start, end, False, ticks)

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(max(value, 1e-12) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def opening(title: str, height: float) -> list[str]:
    """The beginning of a drawing: its frame and its title."""
    return [
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{html.escape(title, quote=True)}">',
        f'<text x="{LEFT}" y="16" font-weight="600">{html.escape(title)}</text>',
    ]


def axes(x: Axis, y: Axis, labels: tuple[str, str], x_ticks: Sequence[float]) -> list[str]:
    """Grid, ticks and names of the axes."""
    parts, foot = [], HEIGHT - BOTTOM
    for t in y.ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>')
        parts.append(f'<text class="quiet" x="{LEFT - 8}" y="{y(t) + 4:.1f}" text-anchor="end">{number(t)}</text>')
    for t in x_ticks:
        parts.append(f'<line class="grid" x1="{x(t):.1f}" x2="{x(t):.1f}" y1="{foot}" y2="{foot + 5}"/>')
        parts.append(f'<text class="quiet" x="{x(t):.1f}" y="{foot + 20}" text-anchor="middle">{number(t)}</text>')
    middle, centre = (LEFT + RIGHT) / 2, (TOP + foot) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{html.escape(labels[0])}</text>')
    turned = f'transform="rotate(-90 14 {centre})" text-anchor="middle"'
    parts.append(f'<text x="14" y="{centre}" {turned}>{html.escape(labels[1])}</text>')
    return parts


def named(parts: Sequence[str], names: Sequence[tuple[str, str, str]]) -> str:
    """A finished drawing with a list of names below it, each (sign, colour, name)."""
    items = (f'<li style="color:{colour}"><b>{sign}</b> {html.escape(name)}</li>' for sign, colour, name in names)
    return f'{"".join(parts)}</svg><ul class="names">{"".join(items)}</ul>'


def line_chart(
    title: str,
    series: Mapping[str, Points],
    *,
    x_label: str = "",
    y_label: str = "",
    log: bool = False,
    colours: Mapping[str, int] | None = None,
    marks: Mapping[str, float] | None = None,
) -> str:
    """Lines with their names; `marks`: places on the x axis to be marked; `log` for both axes."""
    points = [p for line in series.values() for p in line]
    if not points:
        return ""
    xs = sorted({p[0] for p in points})
    x = Axis.over(xs, LEFT + 6, RIGHT, log=log)
    y = Axis.over([p[1] for p in points], HEIGHT - BOTTOM, TOP, log=log, zero=not log)
    parts = opening(title, HEIGHT) + axes(x, y, (x_label, y_label), xs if len(xs) <= 6 else x.ticks)
    names = []
    for i, (name, line) in enumerate(series.items()):
        colour = f"var(--c{(colours or {}).get(name, i % 8)})"
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line)
        parts.append(f'<polyline points="{path}" fill="none" style="stroke:{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3.5" style="fill:{colour}"/>' for a, b in line]
        names.append((LINE, colour, name))
    for name, place in (marks or {}).items():
        if x.low <= place <= x.high:
            at = f'x1="{x(place):.1f}" x2="{x(place):.1f}"'
            parts.append(f'<line class="mark" {at} y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
            names.append((DASHED, "var(--quiet)", name))
    return named(parts, names)


def frontier_chart(
    title: str, points: Mapping[str, tuple[float, float]], *, x_label: str = "", y_label: str = "", chosen: str = ""
) -> str:
    """Points (cost, share lost), each a letter of the list of names, less being better in both.

    Points that none beats are joined. Both axes are logarithmic, so that small losses can be told apart; a loss below
    0.0001 is drawn there.
    """
    if not points:
        return ""
    drawn = {name: (a, max(b, LEAST_LOSS)) for name, (a, b) in points.items()}
    x = Axis.over([p[0] for p in drawn.values()], LEFT + 14, RIGHT - 10, log=True)
    y = Axis.over([p[1] for p in drawn.values()], HEIGHT - BOTTOM, TOP + 10, log=True)
    parts = opening(title, HEIGHT) + axes(x, y, (x_label, y_label), x.ticks)
    best = [p for p in drawn.values() if not any(a <= p[0] and b <= p[1] and (a, b) != p for a, b in drawn.values())]
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in sorted(best))
    parts.append(f'<polyline class="mark" points="{path}" fill="none"/>')
    names = []
    for i, (name, value) in enumerate(drawn.items()):
        colour = "var(--c1)" if name == chosen else "var(--c0)" if value in best else "var(--c7)"
        letter, at = chr(ord("a") + i % 26), f'x="{x(value[0]):.1f}" y="{y(value[1]) + 4:.1f}" text-anchor="middle"'
        radius = 11 if name == chosen else 9
        parts.append(f'<circle cx="{x(value[0]):.1f}" cy="{y(value[1]):.1f}" r="{radius}" style="fill:{colour}"/>')
        parts.append(f'<text {at} style="fill:var(--paper)">{letter}</text>')
        names.append((letter, colour, name))
    return named(parts, names)


def error_map(
    title: str,
    errors: Sequence[Sequence[float]],
    *,
    rows: Sequence[int] | None = None,
    row_name: str = "layer",
    column_name: str = "head",
) -> str:
    """Errors by layer and head as shades, each with its number; the cells carry the head's number for the viewer.

    `rows`: the numbers of the layers, if some are left out.
    """
    columns = max((len(r) for r in errors), default=0)
    if not columns:
        return ""
    places = list(range(len(errors))) if rows is None else list(rows)
    cell_width = min(52.0, (WIDTH - LEFT - 4) / columns)
    cell_height = min(28.0, max(15.0, 520 / len(places)))
    height = TOP + len(places) * cell_height + 44
    top = max(max(r) for r in errors if r) or 1.0
    parts, place = opening(title, height), 0
    for i, row in enumerate(errors):
        y = TOP + i * cell_height
        at = f'x="{LEFT - 6}" y="{y + 0.7 * cell_height:.1f}" text-anchor="end"'
        parts.append(f'<text class="quiet" {at}>{row_name} {places[i]}</text>')
        for j, error in enumerate(row):
            x, share = LEFT + j * cell_width, error / top
            box = f'x="{x:.1f}" y="{y:.1f}" width="{cell_width:.1f}" height="{cell_height:.1f}"'
            style = f"fill:rgba(var(--hot),{0.04 + 0.9 * share:.3f})"
            name = f"<title>{row_name} {places[i]}, {column_name} {j}: {error:.3f}</title>"
            parts.append(f'<rect class="cell" data-head="{place}" {box} style="{style}">{name}</rect>')
            if cell_width > 22:  # room for a number; the zero before its point is left out
                ink = "var(--paper)" if share > 0.65 else "var(--ink)"
                middle = f'x="{x + cell_width / 2:.1f}" y="{y + 0.68 * cell_height:.1f}" text-anchor="middle"'
                shown = f"{error:.2f}".removeprefix("0")
                parts.append(f'<text class="value" {middle} style="fill:{ink}">{shown}</text>')
            place += 1
    foot = f"{column_name} 0 .. {columns - 1}, left to right"
    parts.append(f'<text x="{LEFT}" y="{height - 14:.0f}" class="quiet">{foot}</text>')
    return "".join(parts) + "</svg>"
