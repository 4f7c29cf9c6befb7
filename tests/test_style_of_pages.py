"""The pages are in plain English: short sentences, few figures in each, headings, one word for one thing.

Tables and code are left out, and so is the gallery, which a script writes.
"""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WRITTEN = [
    ROOT / "README.md",
    *sorted(p for p in (ROOT / "docs").glob("*.md") if not p.name.startswith("gallery")),
]
LONGEST, MEAN = 25, 15.0  # words of a sentence, and of the mean sentence of a page
FIGURES = 2  # in a sentence
BETWEEN = 150  # words from one heading to the next
COLUMNS = 6
# What the pages do not say, and what they say instead.
FORBIDDEN = {
    r"\b(what|which) is kept\b": "quality retained",
    r"\bheld back\b": "validation texts",
    r"\bheld-out text": "validation texts",
    r"\b0\.\d+ of (the|its) (cache|memory|time)\b": "percent, or x",
    r"\b(beside|too|on)\s*[.;:,!?](?!\w)": "no trailing word",
    r"\bbeside\b": "with",
    r"\bkept at\b": "quality retained",
    r"\bfamiliar\b": "unlike the calibration data",
    r"\b(the|its) border of\b": "exact_below",
    r"\bholes?\b": "padding",
    r"\bhonest": "nothing: say the caveat",
    r"\bsee above\b": "the place",
    r"\b(easy|easily|simply|just|obviously)\b": "nothing",
    r"\bissue \d+\b": "nothing",
}
TERMS = (
    "quality retained",
    "validation texts",
    "attention sinks",
    "crossover length",
    "quality target",
    "approximate head",
)


def prose(text: str) -> str:
    """A page without code, tables, pictures and comments; links are their words, formulas and code one word."""
    text = re.sub(r"(?ms)^[ ]*```.*?^[ ]*```\s*?$", "\n\n", text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"(?m)^\s*\|.*$", "", text)
    text = re.sub(r"(?m)^(:::|===).*$|^\s+options:.*$|</?div[^>]*>", "", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("<br>", ". ")
    text = re.sub(r"\$\$.*?\$\$|\$[^$\n]+\$", "Formula", text, flags=re.DOTALL)
    return re.sub(r"`[^`\n]+`", "Code", text)


def sections(text: str) -> list[tuple[str, str]]:
    """Headings of a page, each with the prose up to the next one."""
    parts = re.split(r"(?m)^(#+ .*)$", prose(text))
    return list(zip(parts[1::2], parts[2::2], strict=True))


def sentences(text: str) -> list[str]:
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=:  )", text):
        flat = re.sub(r"^(?:[-*:]|\d+\.)\s+", "", " ".join(block.split())).replace("**", "")
        found += [s.strip() for s in re.split(r"(?<=[.!?])\s+(?=[A-Z\"'(])", flat) if s.strip()]
    return found


def all_sentences(path: Path) -> list[str]:
    return [s for _, body in sections(path.read_text(encoding="utf-8")) for s in sentences(body)]


def figures(sentence: str) -> list[str]:
    return re.findall(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?", sentence)


def forbidden(text: str) -> list[str]:
    return [f"{found[0]!r}: say {instead}" for word, instead in FORBIDDEN.items() for found in re.finditer(word, text)]


@pytest.mark.parametrize("path", WRITTEN, ids=lambda p: p.name)
def test_a_page_is_plain_english(path: Path) -> None:
    found = all_sentences(path)
    lengths = [len(s.split()) for s in found]
    assert [s for s, n in zip(found, lengths, strict=True) if n > LONGEST] == []
    assert statistics.mean(lengths) <= MEAN, path.name
    assert [s for s in found if len(figures(s)) > FIGURES] == []
    long = {head: len(body.split()) for head, body in sections(path.read_text(encoding="utf-8"))}
    assert {head: words for head, words in long.items() if words > BETWEEN} == {}
    assert forbidden(prose(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("path", WRITTEN, ids=lambda p: p.name)
def test_tables_have_few_columns_and_no_empty_rows(path: Path) -> None:
    rows = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip().startswith("|")]
    cells = [re.sub(r"`[^`]*`", "code", row).strip().strip("|").split("|") for row in rows]
    assert [row for row, cell in zip(rows, cells, strict=True) if len(cell) > COLUMNS] == []
    assert [row for row, cell in zip(rows, cells, strict=True) if not any(c.strip() for c in cell[1:])] == []


def test_the_first_screen_of_the_readme_is_one_screen() -> None:
    first = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    lines = [line for line in first.splitlines() if line.strip() and not line.startswith("<!--")]
    assert len(lines) <= 25
    assert len(re.findall(r"\]\(docs/", first)) == 4
    assert "Not for you if" in first


def test_there_are_few_pages_with_few_words() -> None:
    # Rules and borders of tables are no words.
    words = {p.name: len(re.findall(r"\S*\w\S*", p.read_text(encoding="utf-8"))) for p in WRITTEN}
    assert len(words) <= 33
    assert sum(words.values()) <= 17_500


def test_every_term_is_in_the_glossary() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert [term for term in TERMS if f"**{term}**" not in glossary] == []


def test_faults_are_seen() -> None:
    """A long sentence, three figures, words that are not said, a long section."""
    assert len(sentences("One. Two is here, e.g. this. Three.")) == 3
    assert figures("It takes 0.29 of 4,000 tokens, m = 64, and float32.") == ["0.29", "4,000", "64"]
    assert len(forbidden("What was held back takes 0.29 of the cache, and a kernel beside.")) == 4
    assert forbidden("A window with a kernel takes 29 % of the cache, based on texts.") == []
    text = (
        "# A\n\nShort [link](x.md) with `code 1 2`.\n\n```python\nx = 1\n```\n\n| 1 | 2 |\n|---|---|\n\n## B\n\n"
        + "word " * 151
    )
    assert [(head, len(body.split())) for head, body in sections(text)] == [("# A", 4), ("## B", 151)]
