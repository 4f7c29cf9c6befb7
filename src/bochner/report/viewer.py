"""The attention of a chosen head on a real text, exact and converted side by side."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WIDTH, LEFT, TOP = 560, 64, 34  # of the map of errors: narrow enough for a phone, enlarged on a wide screen


@dataclass
class HeadPictures:
    """Weights of every head on one text: `exact`, `converted` (layers of (h, n, n)), `errors` (layers of h)."""

    tokens: list[str]
    joined: list[bool]  # whether a token is followed by its continuation, without a space
    exact: list[Tensor]
    converted: list[Tensor]
    errors: list[list[float]]
    caption: str = ""
    layers: list[int] | None = None  # their numbers in the model, if some are left out


def packed(weights: list[Tensor]) -> str:
    """Square roots of the weights as bytes, base64: a page of hundreds of heads stays small."""
    flat = torch.cat([w.reshape(-1) for w in weights]).clamp(0, 1).sqrt()
    return base64.b64encode((255 * flat).round().to(torch.uint8).numpy().tobytes()).decode()


def head_viewer(pictures: HeadPictures) -> str:
    """A map of the errors, a choice of the head, and its weights over text and as matrices."""
    flat = [e for row in pictures.errors for e in row]
    start = sorted(range(len(flat)), key=lambda i: flat[i])[len(flat) // 2]  # the median head is neither best nor worst
    data = {
        "tokens": pictures.tokens,
        "joined": pictures.joined,
        "layers": pictures.layers or list(range(len(pictures.errors))),
        "heads": [len(row) for row in pictures.errors],
        "errors": [round(e, 4) for e in flat],
        "exact": packed(pictures.exact),
        "converted": packed(pictures.converted),
        "start": start,
        "row": len(pictures.tokens) // 2,
    }
    canvas = '<canvas aria-label="attention matrix, {0}"></canvas>'
    panel = f'<div class="{{0}}"><h3>{{0}}</h3><div class="tokens"></div>{canvas}</div>'
    text = json.dumps(data).replace("</", "<\\/")
    caption = html.escape(pictures.caption)
    return (
        f'<section class="viewer">{error_map("error of every head", pictures.errors, rows=pictures.layers)}'
        '<p class="note">The stronger the colour, the larger the error. '
        f"Choose a head here or in the list, and a token in the text: shaded is what "
        f'<b class="asked-for"></b> attends to. {caption}</p>'
        f'<p><label>head <select></select></label></p><div class="pair">'
        f"{panel.format('exact')}{panel.format('converted')}</div>"
        f'<script type="application/json">{text}</script></section>'
    )


def error_map(title: str, errors: Sequence[Sequence[float]], *, rows: Sequence[int] | None = None) -> str:
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
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{html.escape(title, quote=True)}">',
        f'<text x="{LEFT}" y="16" font-weight="600">{html.escape(title)}</text>',
    ]
    place = 0
    for i, row in enumerate(errors):
        y = TOP + i * cell_height
        at = f'x="{LEFT - 6}" y="{y + 0.7 * cell_height:.1f}" text-anchor="end"'
        parts.append(f'<text class="quiet" {at}>layer {places[i]}</text>')
        for j, error in enumerate(row):
            x, share = LEFT + j * cell_width, error / top
            box = f'x="{x:.1f}" y="{y:.1f}" width="{cell_width:.1f}" height="{cell_height:.1f}"'
            style = f"fill:rgba(var(--hot),{0.04 + 0.9 * share:.3f})"
            name = f"<title>layer {places[i]}, head {j}: {error:.3f}</title>"
            parts.append(f'<rect class="cell" data-head="{place}" {box} style="{style}">{name}</rect>')
            if cell_width > 22:  # room for a number; the zero before its point is left out
                ink = "var(--paper)" if share > 0.65 else "var(--ink)"
                middle = f'x="{x + cell_width / 2:.1f}" y="{y + 0.68 * cell_height:.1f}" text-anchor="middle"'
                shown = f"{error:.2f}".removeprefix("0")
                parts.append(f'<text class="value" {middle} style="fill:{ink}">{shown}</text>')
            place += 1
    foot = f"head 0 .. {columns - 1}, left to right"
    parts.append(f'<text x="{LEFT}" y="{height - 14:.0f}" class="quiet">{foot}</text>')
    return "".join(parts) + "</svg>"
