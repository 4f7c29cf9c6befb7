"""The interactive chart of what is lost against what is saved: this hook of mkdocs fills `<!-- chart: frontier -->`.

The points are read from the stored results, and drawn by frontier.js, which needs no network.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results"
TEXTS = ("novel", "newspaper", "manual")
MARK = "<!-- chart: frontier -->"


def figures(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["figures"]


def charts() -> list[dict[str, Any]]:
    """Title, axes and points (name, x, y) of every chart; the best corner is the lower left one."""
    texts, speech = [figures("decoder_texts")[kind] for kind in TEXTS], figures("speech_encoder")
    whole = texts[0]["exact"]["bytes"] / 2  # of bfloat16
    found = []
    for kind, place, title in (
        ("perplexity", "2000-4000", "a decoder's cache: perplexity at 2,000 to 4,000 tokens, mean of three texts"),
        ("recall", "2000", "a decoder's cache: recall of passages 2,000 tokens back, mean of three texts"),
    ):
        points = []
        for n, row in texts[0].items():
            ratios = [text[n][kind][place] / text["exact"][kind][place] for text in texts]
            points.append([n, 100 * row["bytes"] / whole, sum(ratios) / len(ratios)])
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
