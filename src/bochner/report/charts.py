"""Charts as inline SVG: lines, points and maps, with round ticks and labels beside what they name.

Colours are classes of meaning (`c0` .. `c7`), defined for light and dark in the style sheet: the first is what
everything is compared with. Every chart is drawn twice, for a wide screen with names beside what they name and for a
phone with the names below; the style sheet shows one of them.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Points = Sequence[tuple[float, float]]
HEIGHT, BOTTOM, TOP = 380, 52, 34
ROW = 20  # height of a name below a narrow chart
LEAST_LOSS = 1e-4  # the smallest loss that is told apart
SHIFTS = (0, *(sign * d for d in range(8, 249, 8) for sign in (-1, 1)))  # by which a label may go up or down
LETTER = 7.2  # mean width of a letter of the labels, in units of the drawing


class Size(NamedTuple):
    """The width of a drawing, and the room for the ticks on its left."""

    width: int
    left: int

    @property
    def narrow(self) -> bool:
        return self.width < 600


WIDE, NARROW = Size(720, 78), Size(420, 60)


def both(draw: Callable[[Size], str]) -> str:
    """A drawing for wide screens and one for narrow ones."""
    return f'<div class="for-wide">{draw(WIDE)}</div><div class="for-narrow">{draw(NARROW)}</div>'


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


class Box(NamedTuple):
    """A rectangle of the drawing, such as that of a label."""

    left: float
    top: float
    right: float
    bottom: float

    def over(self, other: Box) -> float:
        """The area that two have in common."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return across * down if across > 0 and down > 0 else 0.0


def label_box(x: float, y: float, text: str, anchor: str) -> Box:
    """The room of a label whose base line begins, ends or is centred at (x, y)."""
    width = LETTER * len(text)
    left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
    return Box(left, y - 11, left + width, y + 4)


def freest(
    places: Sequence[tuple[float, float, str]], text: str, taken: Sequence[Box], frame: Box, labels: Sequence[Box] = ()
) -> int:
    """Which of the places (x, y, anchor) for a label overlaps least with what is drawn; earlier ones are better.

    Other `labels`, and the edge of the `frame`, weigh more than lines and points.

    >>> freest([(0, 20, "start"), (50, 20, "start")], "ab", [Box(0, 10, 20, 30)], Box(0, 0, 100, 100))
    1
    """
    found = []
    for i, (x, y, anchor) in enumerate(places):
        box = label_box(x, y, text, anchor)
        area = (box.right - box.left) * (box.bottom - box.top)
        worse = sum(box.over(other) for other in labels) + area - box.over(frame)
        found.append(round(sum(box.over(other) for other in taken) + 9 * worse + 6 * i, 3))
    return min(range(len(found)), key=found.__getitem__)


def along(path: Sequence[tuple[float, float]], step: float = 6.0) -> list[Box]:
    """A line as small boxes that a label is to keep off."""
    spots = list(path[:1])
    for (a, b), (c, d) in itertools.pairwise(path):
        count = max(1, math.ceil(math.dist((a, b), (c, d)) / step))
        spots += [(a + (c - a) * i / count, b + (d - b) * i / count) for i in range(1, count + 1)]
    return [Box(a - 4, b - 4, a + 4, b + 4) for a, b in spots]


def _frame(
    size: Size, title: str, x: Axis, y: Axis, labels: tuple[str, str], x_ticks: Sequence[float], names: int
) -> list[str]:
    """Title, grid, ticks and names of the axes, with room for `names` lines below."""
    left, right, height = size.left, x.end, HEIGHT + ROW * names
    parts = [f'<svg viewBox="0 0 {size.width} {height}" role="img" aria-label="{html.escape(title, quote=True)}">']
    parts.append(f'<text x="{left}" y="16" font-weight="600">{html.escape(title)}</text>')
    for t in y.ticks:
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>')
        parts.append(f'<text class="quiet" x="{left - 8}" y="{y(t) + 4:.1f}" text-anchor="end">{number(t)}</text>')
    for t in x_ticks:
        parts.append(
            f'<line class="grid" x1="{x(t):.1f}" x2="{x(t):.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 5}"/>'
        )
        text = f'<text class="quiet" x="{x(t):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{number(t)}</text>'
        parts.append(text)
    middle, centre = (left + right) / 2, (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{html.escape(labels[0])}</text>')
    turned = f'transform="rotate(-90 14 {centre})" text-anchor="middle"'
    parts.append(f'<text x="14" y="{centre}" {turned}>{html.escape(labels[1])}</text>')
    return parts


def _below(place: int, name: str, colour: str, sign: str) -> str:
    """The name of a line or point below a narrow chart, behind its sign."""
    y = HEIGHT + ROW * place + 13
    return (
        f'<text x="4" y="{y}" style="fill:{colour}"><tspan font-weight="700">{sign}</tspan> {html.escape(name)}</text>'
    )


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
    if not any(series.values()):
        return ""
    shades = {name: f"var(--c{(colours or {}).get(name, i % 8)})" for i, name in enumerate(series)}
    return both(lambda size: _lines(size, title, series, (x_label, y_label), log, shades, marks or {}))


def _lines(
    size: Size,
    title: str,
    series: Mapping[str, Points],
    labels: tuple[str, str],
    log: bool,
    colours: Mapping[str, str],
    marks: Mapping[str, float],
) -> str:
    points = [p for line in series.values() for p in line]
    right = size.width - (24 if size.narrow else 24 + LETTER * max(len(name) for name in series))
    xs = sorted({p[0] for p in points})
    x = Axis.over(xs, size.left + 6, right, log=log)
    y = Axis.over([p[1] for p in points], HEIGHT - BOTTOM, TOP, log=log, zero=not log)
    ticks = xs if len(xs) <= (5 if size.narrow else 7) else x.ticks
    parts = _frame(size, title, x, y, labels, ticks, len(series) if size.narrow else 0)
    taken = [box for line in series.values() for box in along([(x(a), y(b)) for a, b in line])]
    places = {text: x(place) for text, place in marks.items() if x.low <= place <= x.high}
    taken += [box for place in places.values() for box in along([(place, TOP), (place, HEIGHT - BOTTOM)])]
    for text, place in places.items():
        parts += _mark(size, text, place, right, taken)
    ends = apart([y(line[-1][1]) for line in series.values()])
    for i, (name, line) in enumerate(series.items()):
        colour = colours[name]
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line)
        parts.append(f'<polyline points="{path}" fill="none" style="stroke:{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3.5" style="fill:{colour}"/>' for a, b in line]
        beside = f'<text x="{right + 10}" y="{ends[i] + 4:.1f}" style="fill:{colour}">{html.escape(name)}</text>'
        parts.append(_below(i, name, colour, "\u25cf") if size.narrow else beside)
    return "".join(parts) + "</svg>"


def _mark(size: Size, text: str, x: float, right: float, taken: list[Box]) -> list[str]:
    """A dashed line with its text beside it, where no line runs; its room is added to what is `taken`."""
    line = f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
    heights = [*range(TOP + 12, HEIGHT - BOTTOM - 4, 18)]
    heights = [heights[0], heights[-1], *heights[1:-1]]
    sides = [(place, h, anchor) for h in heights for place, anchor in ((x + 7, "start"), (x - 7, "end"))]
    at, y, anchor = sides[freest(sides, text, taken, Box(size.left, TOP - 4, right, HEIGHT - BOTTOM))]
    taken.append(label_box(at, y, text, anchor))
    return [line, f'<text class="quiet over" x="{at:.1f}" y="{y}" text-anchor="{anchor}">{html.escape(text)}</text>']


def frontier_chart(
    title: str, points: Mapping[str, tuple[float, float]], *, x_label: str = "", y_label: str = "", chosen: str = ""
) -> str:
    """Points (cost, share lost) with their names, less being better in both; those that none beats are joined.

    Both axes are logarithmic, so that small losses can be told apart; a loss below 0.0001 is drawn there.
    """
    if not points:
        return ""
    drawn = {name: (a, max(b, LEAST_LOSS)) for name, (a, b) in points.items()}
    return both(lambda size: _frontier(size, title, drawn, (x_label, y_label), chosen))


def _frontier(
    size: Size, title: str, drawn: Mapping[str, tuple[float, float]], labels: tuple[str, str], chosen: str
) -> str:
    room = LETTER * max(len(name) for name in drawn) + 28
    end = size.width - (24 if size.narrow else min(room, 0.45 * size.width))
    x = Axis.over([p[0] for p in drawn.values()], size.left + 14, end, log=True)
    y = Axis.over([p[1] for p in drawn.values()], HEIGHT - BOTTOM, TOP + 10, log=True)
    parts = _frame(size, title, x, y, labels, x.ticks, len(drawn) if size.narrow else 0)
    best = [p for p in drawn.values() if not any(a <= p[0] and b <= p[1] and (a, b) != p for a, b in drawn.values())]
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in sorted(best))
    parts.append(f'<polyline class="mark" points="{path}" fill="none"/>')
    spots = [(x(a), y(b)) for a, b in drawn.values()]
    taken = [Box(a - 8, b - 8, a + 8, b + 8) for a, b in spots] + along([(x(a), y(b)) for a, b in sorted(best)])
    frame, labels_placed = Box(size.left, TOP - 10, size.width - 2, HEIGHT - BOTTOM), list[Box]()
    for i, ((name, value), (cx, cy)) in enumerate(zip(drawn.items(), spots, strict=True)):
        colour = "var(--c1)" if name == chosen else "var(--c0)" if value in best else "var(--c7)"
        parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="{7 if name == chosen else 5}" style="fill:{colour}"/>')
        text = chr(ord("a") + i % 26) if size.narrow else name
        places = [(cx + dx, cy + 4 + dy, anchor) for dy in SHIFTS for dx, anchor in ((12, "start"), (-12, "end"))]
        at, height, anchor = places[freest(places, text, taken, frame, labels_placed)]
        labels_placed.append(label_box(at, height, text, anchor))
        if abs(height - cy) > 20:  # a label that had to go some way is led to
            parts.append(f'<line class="grid" x1="{cx:.1f}" y1="{cy:.1f}" x2="{at:.1f}" y2="{height - 4:.1f}"/>')
        label = f'<text class="over" x="{at:.1f}" y="{height:.1f}" text-anchor="{anchor}" style="fill:{colour}">'
        parts.append(f"{label}{html.escape(text)}</text>")
        if size.narrow:
            parts.append(_below(i, name, colour, text))
    return "".join(parts) + "</svg>"


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
    if not max((len(r) for r in errors), default=0):
        return ""
    places = list(range(len(errors))) if rows is None else list(rows)
    return both(lambda size: _map(size, title, errors, places, row_name, column_name))


def _map(
    size: Size, title: str, errors: Sequence[Sequence[float]], rows: list[int], row_name: str, column_name: str
) -> str:
    columns = max(len(r) for r in errors)
    cell_width = min(52.0, (size.width - size.left - 4) / columns)
    cell_height = min(28.0, max(15.0, 520 / len(rows)))
    height = TOP + len(rows) * cell_height + 44
    top = max(max(r) for r in errors if r) or 1.0
    parts = [f'<svg viewBox="0 0 {size.width} {height:.0f}" role="img" aria-label="{html.escape(title, quote=True)}">']
    parts.append(f'<text x="{size.left}" y="16" font-weight="600">{html.escape(title)}</text>')
    place = 0
    for i, row in enumerate(errors):
        y = TOP + i * cell_height
        place_of_name = f'x="{size.left - 6}" y="{y + 0.7 * cell_height:.1f}" text-anchor="end"'
        parts.append(f'<text class="quiet" {place_of_name}>{row_name} {rows[i]}</text>')
        for j, error in enumerate(row):
            x, share = size.left + j * cell_width, error / top
            box = f'x="{x:.1f}" y="{y:.1f}" width="{cell_width:.1f}" height="{cell_height:.1f}"'
            style = f"fill:rgba(var(--hot),{0.04 + 0.9 * share:.3f})"
            name = f"<title>{row_name} {rows[i]}, {column_name} {j}: {error:.3f}</title>"
            parts.append(f'<rect class="cell" data-head="{place}" {box} style="{style}">{name}</rect>')
            # Narrow cells go without the zero before the point.
            shown = f"{error:.2f}" if cell_width > 27 else f"{error:.2f}".removeprefix("0")
            if cell_width > 20:
                ink = "var(--paper)" if share > 0.65 else "var(--ink)"
                middle = f'x="{x + cell_width / 2:.1f}" y="{y + 0.68 * cell_height:.1f}" text-anchor="middle"'
                parts.append(f'<text class="value" {middle} style="fill:{ink}">{shown}</text>')
            place += 1
    foot = f"{column_name} 0 .. {columns - 1}, left to right"
    parts.append(f'<text x="{size.left}" y="{height - 14:.0f}" class="quiet">{foot}</text>')
    return "".join(parts) + "</svg>"
