"""The attention of a chosen head on a real text, exact and converted side by side."""

from __future__ import annotations

import base64
import html
import json
from dataclasses import dataclass

import torch
from torch import Tensor

from bochner.report.charts import error_map


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
