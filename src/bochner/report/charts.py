"""Charts as inline SVG: lines, points and maps, with round ticks and labels beside what they name.

Colours are classes of meaning (`c0` .. `c7`), defined for light and dark in the style sheet: the first is what
everything is compared with.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 380, 78, 52, 34
LEAST_LOSS = 1e-4  # the smallest loss that is told apart
LETTER = 7.2  # mean width of a letter of the labels, in units of the drawing


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
    """Powers of ten that lie in the range; with fewer than three of them 2 and 5 times too.

    >>> log_ticks(0.3, 40)
    [0.5, 1.0, 2.0, 5.0, 10.0, 20.0]
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 2, 5)):
        found = [f * 10.0**p for p in powers for f in factors if low * 0.999 <= f * 10.0**p <= high * 1.001]
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


def apart(places: Sequence[float], least: float = 16.0, low: float = TOP, high: float = HEIGHT - BOTTOM) -> list[float]:
    """Places moved as little as needed for every two to be `least` apart, in the same order, within the drawing.

    >>> apart([100.0, 104.0, 200.0])
    [100.0, 116.0, 200.0]
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    out = list(places)
    for before, i in zip([None, *order], order, strict=False):
        out[i] = max(out[i], low if before is None else out[before] + least)
    over = (max(out) - high) if out else 0.0
    if over > 0:  # push the pile at the lower end up again
        bound = high
        for i in reversed(order):
            out[i] = min(out[i], bound)
            bound = out[i] - least
    return out


def _frame(
    title: str, x: Axis, y: Axis, x_label: str, y_label: str, right: float, x_ticks: Sequence[float]
) -> list[str]:
    """Title, grid, ticks and names of the axes."""
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title, quote=True)}">']
    parts.append(f'<text x="{LEFT}" y="16" font-weight="600">{html.escape(title)}</text>')
    for t in y.ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>')
        parts.append(f'<text class="quiet" x="{LEFT - 8}" y="{y(t) + 4:.1f}" text-anchor="end">{number(t)}</text>')
    for t in x_ticks:
        parts.append(
            f'<line class="grid" x1="{x(t):.1f}" x2="{x(t):.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 5}"/>'
        )
        text = f'<text class="quiet" x="{x(t):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{number(t)}</text>'
        parts.append(text)
    middle, centre = (LEFT + right) / 2, (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{html.escape(x_label)}</text>')
    turned = f'transform="rotate(-90 16 {centre})" text-anchor="middle"'
    parts.append(f'<text x="16" y="{centre}" {turned}>{html.escape(y_label)}</text>')
    return parts


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
    """Lines with their names at their ends; `marks`: places on the x axis to be marked; `log` for both axes."""
    points = [p for line in series.values() for p in line]
    if not points:
        return ""
    right = WIDTH - 24 - LETTER * max(len(name) for name in series)
    xs = sorted({p[0] for p in points})
    x = Axis.over(xs, LEFT + 6, right, log=log)
    y = Axis.over([p[1] for p in points], HEIGHT - BOTTOM, TOP, log=log, zero=not log)
    parts = _frame(title, x, y, x_label, y_label, right, xs if len(xs) <= 7 else x.ticks)
    for text, place in (marks or {}).items():
        if x.low <= place <= x.high:
            parts.append(
                f'<line class="mark" x1="{x(place):.1f}" x2="{x(place):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            )
            low = HEIGHT - BOTTOM - 8
            right_side = x(place) < (LEFT + right) / 2
            side = f'x="{x(place) + (6 if right_side else -6):.1f}" text-anchor="{"start" if right_side else "end"}"'
            parts.append(f'<text class="quiet" {side} y="{low}">{html.escape(text)}</text>')
    ends = apart([y(line[-1][1]) for line in series.values()])
    for i, (name, line) in enumerate(series.items()):
        colour = f"var(--c{(colours or {}).get(name, i % 8)})"
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line)
        parts.append(f'<polyline points="{path}" fill="none" style="stroke:{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3.5" style="fill:{colour}"/>' for a, b in line]
        parts.append(f'<text x="{right + 10}" y="{ends[i] + 4:.1f}" style="fill:{colour}">{html.escape(name)}</text>')
    return "".join(parts) + "</svg>"


def frontier_chart(
    title: str, points: Mapping[str, tuple[float, float]], *, x_label: str = "", y_label: str = "", chosen: str = ""
) -> str:
    """Points (cost, share lost) with their names, less being better in both; those that none beats are joined.

    Both axes are logarithmic, so that small losses can be told apart; a loss below 0.0001 is drawn there.
    """
    if not points:
        return ""
    drawn = {name: (a, max(b, LEAST_LOSS)) for name, (a, b) in points.items()}
    x = Axis.over([p[0] for p in drawn.values()], LEFT + 14, WIDTH - 180, log=True)
    y = Axis.over([p[1] for p in drawn.values()], HEIGHT - BOTTOM, TOP + 10, log=True)
    parts = _frame(title, x, y, x_label, y_label, WIDTH - 20, x.ticks)
    best = [p for p in drawn.values() if not any(a <= p[0] and b <= p[1] and (a, b) != p for a, b in drawn.values())]
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in sorted(best))
    parts.append(f'<polyline class="mark" points="{path}" fill="none"/>')
    heights = apart([y(p[1]) for p in drawn.values()], 17)
    for (name, (a, b)), height in zip(drawn.items(), heights, strict=True):
        colour = "var(--c1)" if name == chosen else "var(--c0)" if (a, b) in best else "var(--c7)"
        size = 7 if name == chosen else 5
        parts.append(f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="{size}" style="fill:{colour}"/>')
        left = x(a) + 12 + LETTER * len(name) > WIDTH - 4
        side = f'x="{x(a) + (-12 if left else 12):.1f}" text-anchor="{"end" if left else "start"}"'
        parts.append(f'<text {side} y="{height + 4:.1f}" style="fill:{colour}">{html.escape(name)}</text>')
    return "".join(parts) + "</svg>"


def error_map(
    title: str, errors: Sequence[Sequence[float]], *, row_name: str = "layer", column_name: str = "head"
) -> str:
    """Errors by layer and head as shades, each with its number; the cells carry the head's number for the viewer."""
    rows, columns = len(errors), max((len(r) for r in errors), default=0)
    if not columns:
        return ""
    cell_width = min(52.0, (WIDTH - LEFT - 10) / columns)
    cell_height = min(28.0, max(15.0, 520 / rows))
    height = TOP + rows * cell_height + 44
    top = max(max(r) for r in errors if r) or 1.0
    parts = [f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{html.escape(title, quote=True)}">']
    parts.append(f'<text x="{LEFT}" y="16" font-weight="600">{html.escape(title)}</text>')
    place = 0
    for i, row in enumerate(errors):
        y = TOP + i * cell_height
        place_of_name = f'x="{LEFT - 8}" y="{y + 0.7 * cell_height:.1f}" text-anchor="end"'
        parts.append(f'<text class="quiet" {place_of_name}>{row_name} {i}</text>')
        for j, error in enumerate(row):
            x, share = LEFT + j * cell_width, error / top
            box = f'x="{x:.1f}" y="{y:.1f}" width="{cell_width:.1f}" height="{cell_height:.1f}"'
            style = f"fill:rgba(var(--hot),{0.04 + 0.9 * share:.3f})"
            name = f"<title>{row_name} {i}, {column_name} {j}: {error:.3f}</title>"
            parts.append(f'<rect class="cell" data-head="{place}" {box} style="{style}">{name}</rect>')
            if cell_width > 34:
                ink = "var(--paper)" if share > 0.65 else "var(--ink)"
                middle = f'x="{x + cell_width / 2:.1f}" y="{y + 0.68 * cell_height:.1f}" text-anchor="middle"'
                parts.append(f'<text class="value" {middle} style="fill:{ink}">{error:.2f}</text>')
            place += 1
    parts.append(
        f'<text x="{LEFT}" y="{height - 14:.0f}" class="quiet">{column_name} 0 .. {columns - 1}, left to right</text>'
    )
    return "".join(parts) + "</svg>"
