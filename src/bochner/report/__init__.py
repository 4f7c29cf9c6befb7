"""A self-contained HTML report: the verdict and its numbers first, then what to do, then tables and heads; no network.

`Report` is a page built section by section; `viewer` shows the attention of a chosen head.
"""

from __future__ import annotations

import datetime
import html
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from bochner.report.machine import facts
from bochner.report.viewer import HeadPictures, error_map, head_viewer

__all__ = [
    "HeadPictures",
    "Number",
    "Report",
    "error_map",
    "facts",
    "head_viewer",
    "show",
]


class Number(NamedTuple):
    """One of the three numbers at the top: what it is, its value, and what it means."""

    name: str
    value: str
    meaning: str


class Report:
    """A page built section by section.

    >>> page = Report("Title").text("Hello <world>").table(["a"], [[1.5]])
    >>> "&lt;world&gt;" in page.html() and "1.500" in page.html()
    True
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.parts: list[str] = [f"<h1>{html.escape(title)}</h1>"]
        self.scripts = False

    def verdict(self, sentence: str, numbers: Sequence[Number] = (), *, good: bool = True) -> Report:
        """What somebody who reads no further should know."""
        boxes = "".join(
            f'<div class="number">{html.escape(n.name)}<b>{html.escape(n.value)}</b>'
            f"<small>{html.escape(n.meaning)}</small></div>"
            for n in numbers
        )
        self.parts.append(f'<p class="verdict{"" if good else " no"}">{html.escape(sentence)}</p>')
        self.parts.append(f'<div class="numbers">{boxes}</div>' if boxes else "")
        return self

    def steps(self, steps: Sequence[tuple[str, str]]) -> Report:
        """What to do next: sentences, each with a command or code, or none."""
        items = (f"<li>{html.escape(t)}{f'<pre>{html.escape(c)}</pre>' if c else ''}</li>" for t, c in steps)
        self.parts.append(f'<h2>What to do next</h2><ol class="steps">{"".join(items)}</ol>')
        return self

    def heading(self, text: str) -> Report:
        self.parts.append(f"<h2>{html.escape(text)}</h2>")
        return self

    def text(self, text: str, *, note: bool = False) -> Report:
        self.parts.append(f"<p{' class=note' if note else ''}>{html.escape(text)}</p>")
        return self

    def code(self, text: str, summary: str = "") -> Report:
        """Preformatted text; with a summary it can be opened."""
        block = f"<pre>{html.escape(text)}</pre>"
        folded = f"<details><summary>{html.escape(summary)}</summary>{block}</details>"
        self.parts.append(folded if summary else block)
        return self

    def table(self, head: Sequence[str], rows: Sequence[Sequence[object]], chosen: str = "") -> Report:
        """Rows under a head; the row that begins with `chosen` stands out."""
        cells = "".join(f"<th>{html.escape(str(c))}</th>" for c in head)
        lines = [
            f"<tr{' class=chosen' if chosen and row[0] == chosen else ''}>"
            f"{''.join(f'<td>{html.escape(show(c))}</td>' for c in row)}</tr>"
            for row in rows
        ]
        self.parts.append(f'<div class="wide"><table><tr>{cells}</tr>{"".join(lines)}</table></div>')
        return self

    def heads(self, pictures: HeadPictures) -> Report:
        """The attention of a head that the reader chooses, exact and converted."""
        self.parts.append(head_viewer(pictures))
        self.scripts = True
        return self

    def html(self) -> str:
        files = resources.files("bochner.report")
        style = (files / "style.css").read_text(encoding="utf-8")
        script = f"<script>{(files / 'viewer.js').read_text(encoding='utf-8')}</script>" if self.scripts else ""
        known = facts()
        versions = ", ".join(f"{k} {known['packages'][k]}" for k in ("torch", "transformers") if known["packages"][k])
        made = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        foot = (
            f"Made by bochner {known['bochner']} on {made}: Python {known['python']}, {versions}; {known['platform']}, "
            f"{known['processor']}, {known['cores']} cores, {known['threads']} "
            f"thread{'s' if known['threads'] > 1 else ''}."
        )
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{html.escape(self.title)}</title><style>{style}</style></head>"
            f"<body>{''.join(self.parts)}<footer>{html.escape(foot)}</footer>{script}</body></html>"
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
