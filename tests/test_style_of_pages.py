"""What people read is in plain English: short sentences, few figures in each, headings, one word for one thing.

That is the pages, the docstrings of public names, the help of the commands, and what errors, warnings and reports say.
Tables and code are left out. The gallery, which a script makes from what experiments say, may have more figures in a
sentence, and its tables count: claims and reasons stand in them.
"""

from __future__ import annotations

import ast
import inspect
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "bochner"
WRITTEN = [
    ROOT / "README.md",
    *sorted(p for p in (ROOT / "docs").glob("*.md") if not p.name.startswith("gallery")),
]
GALLERY = sorted((ROOT / "docs").glob("gallery*.md"))
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


def rows_of(text: str) -> list[list[str]]:
    """The rows of tables; code is one word."""
    rows = [line for line in text.splitlines() if line.strip().startswith("|")]
    return [re.sub(r"`[^`]*`", "code", row).strip().strip("|").split("|") for row in rows]


def cells_of(text: str) -> list[str]:
    return [cell for row in rows_of(text) for cell in row]


def clauses(text: str) -> list[str]:
    """The parts of what the code says: sentences, and in them what a colon or a semicolon separates.

    "The 'x' of f must be positive, got -1; call g." is a cause and a remedy; lists of arguments are written alike.
    """
    text = re.sub(r"(?m)^ *>>> .*(?:\n(?!\s*$).*)*", "", text)
    text = re.sub(r"\n\s+(?=\w+(?:, \w+)*: )", "\n\n", prose(text))
    return [part for sentence in sentences(text) for part in re.split(r"[;:]\s", sentence)]


def docstrings() -> Iterator[tuple[str, str]]:
    """Of every public function and class, their public methods included."""
    import bochner

    for package in (bochner, *(getattr(bochner, name) for name in PACKAGES)):
        for name in getattr(package, "__all__", ()):
            thing = getattr(package, name)
            if inspect.isroutine(thing) or inspect.isclass(thing):
                found = {name: thing}
                if inspect.isclass(thing):
                    found |= {f"{name}.{n}": m for n, m in vars(thing).items() if n[0] != "_" and inspect.isroutine(m)}
                own = {n: m.__doc__ for n, m in found.items() if not n.endswith("_request")}  # scikit-learn's
                yield from ((n, inspect.cleandoc(text)) for n, text in own.items() if text)


PACKAGES = (
    "attention",
    "data",
    "estimators",
    "hf",
    "maps",
    "matvec",
    "nn",
    "papers",
    "report",
    "sampling",
    "tasks",
    "theory",
)
SPEAKERS = {"warn", "say", "info", "Option", "Argument", "verdict", "steps", "heading", "text", "Number"}
SPEAKERS |= {"option", "target", "recipe", "training", "model", "of_run"}  # options of commands
COMMANDS = ("cli/information.py", "cli/models.py", "tasks/command.py")


def said(source: str) -> Iterator[tuple[int, str]]:
    """What code says to people: texts of errors, warnings, messages, help and reports; a value is one word."""

    def text_of(node: Any) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(text_of(v) if isinstance(v, ast.Constant) else "Value" for v in node.values)
        return text_of(node.left) + text_of(node.right) if isinstance(node, ast.BinOp) else ""

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in SPEAKERS or name.endswith(("Error", "Unavailable")):
                given = [*node.args, *(k.value for k in node.keywords if k.arg == "help")]
                yield from ((node.lineno, text_of(a)) for a in given if text_of(a))


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


@pytest.mark.parametrize("path", GALLERY, ids=lambda p: p.name)
def test_the_gallery_is_plain_english(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = all_sentences(path)
    told = [s for cell in cells_of(text) for s in sentences(prose(re.sub(r"<[^>]*>", "", cell)))]
    assert [s for s in (*found, *told) if len(s.split()) > LONGEST] == []
    assert statistics.mean(len(s.split()) for s in found) <= MEAN
    long = {head: len(body.split()) for head, body in sections(text)} if path.name != "gallery.md" else {}
    assert {head: words for head, words in long.items() if words > BETWEEN} == {}
    assert forbidden(prose(text)) == []
    assert [row for row in rows_of(text) if len(row) > COLUMNS] == []


@pytest.mark.parametrize("path", WRITTEN, ids=lambda p: p.name)
def test_tables_have_few_columns_and_no_blank_cells(path: Path) -> None:
    rows = rows_of(path.read_text(encoding="utf-8"))
    assert [row for row in rows if len(row) > COLUMNS] == []
    assert [row for row in rows if not all(cell.strip() for cell in row[1:])] == []


def test_docstrings_of_public_names_are_plain_english() -> None:
    found = dict(docstrings())
    assert len(found) > 290
    long = {name for name, text in found.items() for part in clauses(text) if len(part.split()) > LONGEST}
    assert sorted(long) == []
    words = {name: forbidden(prose(text)) for name, text in found.items()}
    assert {name: w for name, w in words.items() if w} == {}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: p.relative_to(SOURCE).as_posix())
def test_errors_warnings_help_and_reports_are_plain_english(path: Path) -> None:
    texts = list(said(path.read_text(encoding="utf-8")))
    if path.relative_to(SOURCE).as_posix() in COMMANDS:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                texts.append((node.lineno, ast.get_docstring(node) or ""))
    assert [(n, part) for n, text in texts for part in clauses(text) if len(part.split()) > LONGEST] == []
    assert [(n, word) for n, text in texts for word in forbidden(prose(text))] == []


def test_the_first_screen_of_the_readme_is_one_screen() -> None:
    first = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    lines = [line for line in first.splitlines() if line.strip() and not line.startswith("<!--")]
    assert len(lines) <= 25
    assert len(re.findall(r"\]\(docs/", first)) == 4
    assert "Not for you if" in first


def test_there_are_few_pages_with_few_words() -> None:
    """Written pages, and apart from them those that scripts make: the gallery, and the reference from docstrings."""
    # Rules and borders of tables are no words.
    pages = {p.stem: len(re.findall(r"\S*\w\S*", p.read_text(encoding="utf-8"))) for p in (ROOT / "docs").glob("*.md")}
    made = {name for name in pages if name.startswith(("gallery", "reference"))}
    assert len(pages) - len(made) <= 25
    assert sum(words for name, words in pages.items() if name not in made) <= 17_000
    assert sum(words for name, words in pages.items() if name in made) <= 11_500


def test_every_term_is_in_the_glossary() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert [term for term in TERMS if f"**{term}**" not in glossary] == []


def test_faults_in_what_the_code_says_are_seen() -> None:
    source = 'raise BochnerError(f"It is {1 + x} " "too long to be kept beside " + "it.")\nwarn("a")'
    assert list(said(source)) == [(1, "It is Value too long to be kept beside it."), (2, "a")]
    assert [len(part.split()) for part in clauses("Got -1; call it.\n\n    a: one two\n    b, c: three")] == [
        2,
        2,
        1,
        2,
        2,
        1,
    ]
    assert len(clauses("One.\n\n>>> f(1)\n2")) == 1
    assert max(len(part.split()) for part in clauses("A sentence of words " + "and words " * 12 + "ends.")) > LONGEST


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
