"""The viewer of heads on the home page: `python docs/extensions/heads.py` writes images/heads.html of MiniLM."""

import sys
from pathlib import Path

import bochner
from bochner import demo
from bochner.report import Report
from bochner.report.model import head_pictures

TARGET = Path(__file__).resolve().parents[1] / "images" / "heads.html"
TEXT = "Attention compares every word of a sentence with every other word, and most of these comparisons hardly count."


def main() -> int:
    model, tokenizer = demo.load_minilm()
    bochner.convert(model, bochner.Recipe(window=8, sinks=1))  # without data: moments
    page = Report("Every head of MiniLM, exact and converted")
    page.text(
        "Each head has a window of 8 tokens, one attention sink, and moments of all other keys. Nothing was fitted."
    )
    page.heads(head_pictures(model, tokenizer, TEXT)).save(TARGET)
    print(f"wrote {TARGET.relative_to(Path.cwd())}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
