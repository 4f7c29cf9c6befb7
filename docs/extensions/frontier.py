"""The interactive chart of what is lost against what is saved: this hook of mkdocs fills `<!-- chart: frontier -->`.

The points are read from the stored results, and drawn by frontier.js, which needs no network.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results"
MARK = "<!-- chart: frontier -->"


def figures(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["figures"]


def charts() -> list[dict[str, Any]]:
    """Title, axes and points (name, x, y) of every chart; the best corner is the lower left one."""
    caches, speech = figures("decoder_cache"), figures("speech_encoder")
    exact, whole = caches["exact"], caches["exact"]["bytes"] / 2  # of bfloat16
    found = []
    for kind, place, title in (
        ("perplexity", "2000-4000", "a decoder's cache: perplexity at 2,000 to 4,000 tokens"),
        ("recall", "2000", "a decoder's cache: recall of a passage 2,000 tokens back"),
    ):
        points = [[n, 100 * row["bytes"] / whole, row[kind][place] / exact[kind][place]] for n, row in caches.items()]
        found.append(
            {"title": title, "x": "% of the bfloat16 cache", "y": "relative to the original", "points": points}
        )
    points = [["original", 100, 0], *([n, 100 * row["time"], 1 - row["cosine"]] for n, row in speech.items())]
    axes = {"x": "% of the original's time", "y": "1 - cosine to the original's output"}
    found.append({"title": "a speech encoder: Whisper tiny, 1,500 frames", **axes, "points": points})
    return found


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    if MARK not in markdown:
        return markdown
    data = json.dumps(charts()).replace("</", "<\\/")
    script = f'<script src="{"../" * page.url.count("/")}frontier.js" defer></script>'
    chart = f'<div class="frontier"><script type="application/json">{data}</script></div>{script}'
    return markdown.replace(MARK, chart)
