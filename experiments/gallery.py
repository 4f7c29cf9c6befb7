"""The gallery of the documentation, made from the stored results: an index, and for every paper items and experiments.

python experiments/gallery.py [--check]      (--check only says whether the pages are up to date)
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from typing import Any

from _framework import ROOT, path_of, stored
from _index import BEYOND, PAPERS, PICTURES, Item, Paper

DOCS = ROOT / "docs"
OWN = "gallery-beyond.md"
FIGURE = r"[-+]?\d[\d.,]*(?:e[-+]\d+)?(?: ?(?:%|ms|MB|points))?"
# A list such as "exact 934 ms, positive 44 ms".
NAMED = re.compile(rf"(?P<name>.+?) (?P<figure>{FIGURE}(?: (?:and|±) {FIGURE})?)(?:, |$)")
NO_NAME = re.compile(r"\b(?:at|of|by|to|from)$|[-+]?\d+\.\d+|\d ?%")  # "recall -0.3 % at" is half a sentence
ORDER = ("reproduced", "partly", "not", "not tested", "not tried")
HEAD = """# Gallery

Every figure, table and numbered statement of the five papers, with a verdict. `python experiments/gallery.py` makes
these pages from the stored results. `make reproduce` measures what is missing or stale. `make reproduce QUICK=1` takes
small forms in 15 minutes, in the folder `.quick`. Stop either, call it again, and it goes on where it was. One
experiment: `python experiments/run.py NAME`.

| verdict | the claim |
|---|---|
| reproduced | holds at the paper's sizes, against the paper's own baseline |
| partly | holds with a correction, in part, or at smaller sizes |
| not | fails here |
| not tested | was run on a task in which the method under test does nothing |
| not tried | was not run, for the reason given |

A result is stale if a function that made it has changed since, or if it is older than the record of its functions. Its
figures may then differ in small ways from those of today's code. `python experiments/run.py --status` says which
results are stale, and by which functions.

The [errata](errata.md) say what is wrong in the papers.
"""


def result_of(name: str) -> dict[str, Any] | None:
    return stored(name) if path_of(name).exists() else None


def verdict_of(item: Item) -> tuple[str, str]:
    """The verdict on an item and its reason: its own, or that of its experiment, no more than part if it is limited."""
    if item.verdict:
        return item.verdict, item.why
    result = result_of(item.experiment)
    if result is None:
        return "not tried", "the experiment has not been run"
    verdict, why = result["said"]["verdict"], result["said"]["why"]
    if item.limits:
        verdict = "partly" if verdict == "reproduced" else verdict
        why = f"{item.limits}; {why}" if why else item.limits
    return verdict, why


def sizes_of(item: Item) -> tuple[str, str]:
    """The paper's sizes and ours."""
    result = result_of(item.experiment) if item.experiment else None
    declared = (result["paper"], result["ours"]) if result else ("", "")
    return item.paper or declared[0], item.ours or declared[1]


def where(item: Item, homes: dict[str, str]) -> str:
    found = [f"[result]({homes[item.experiment]}#{item.experiment})"] if item.experiment else []
    found += [f"[more]({item.page})"] if item.page else []
    found += [f"{len(item.tests)} test{'s' * (len(item.tests) > 1)}"] if item.tests else []
    return ", ".join(found)


def row(item: Item, homes: dict[str, str]) -> str:
    """One line of the table of items; `homes`: the page of each experiment."""
    verdict = verdict_of(item)[0]
    # The reason of an experiment stands with its result; here that of the item itself.
    reason = item.why or item.limits
    told = badge(verdict) + (f" {reason}" if reason else "")
    cells = (item.label, item.title, told, item.baseline, where(item, homes))
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def section(name: str, title: str, items: list[tuple[str, Item]], page: str = "") -> str:
    """What one experiment found: the verdict, a table of claim and sizes, the findings and the pictures.

    `page`: of the documentation, that says more.
    """
    labels = f": {'; '.join(f'{key} {item.label}' for key, item in items)}" if items else ""
    lines = [f'<a id="{name}"></a>', "", f"## {title[0].upper()}{title[1:]}", ""]
    result = result_of(name)
    if result is None:
        return "\n".join([*lines, "Not run yet.", ""])
    said = result["said"]
    rows = [("experiment", f"`{name}`{labels}" + (f", [more]({page})" if page else ""))]
    rows += [("claim", result["claim"].removeprefix("Ours: "))]
    rows += [("paper", result["paper"])] if result["paper"] else []
    rows += [("here", result["ours"])]
    rows += [("but", said["why"])] if said["why"] else []
    told = (f"| {head} | {text[0].upper() + text[1:] if head == 'claim' else text} |" for head, text in rows)
    lines += [f"| | {badge(said['verdict'])} |", "|---|---|", *told]
    lines += ["", *findings(said["ours"]), ""]
    for picture in pictures(name):
        lines += [f"![{title}](images/gallery/{picture}.png)", ""]
    return "\n".join(lines)


def findings(text: str) -> list[str]:
    """What was found: tables as they are, of the rest a list."""
    parts = [part.strip() for part in text.split("\n\n") if part.strip()]
    return [line for p in parts for line in (["", p, ""] if p.startswith("|") else clauses(p))]


def clauses(text: str) -> list[str]:
    """A line for every clause; clauses of at least three named figures are columns of a table."""
    lines: list[str] = []
    names: list[str] = []
    columns: list[tuple[str, list[str]]] = []

    def end_of_table() -> None:
        if columns:
            rows = [["", *(head for head, _ in columns)], ["---"] * (len(columns) + 1)]
            rows += [[name, *(column[i] for _, column in columns)] for i, name in enumerate(names)]
            if lines and lines[-1]:
                lines.append("")
            lines.extend([*(f"| {' | '.join(cells)} |" for cells in rows), ""])
            columns.clear()

    for clause in re.split(r"; |\. (?=[A-Za-z`])", text.strip().rstrip(".")):
        head, _, rest = clause.rpartition(": ")
        found = [(m["name"], m["figure"]) for m in NAMED.finditer(rest)]
        whole = ", ".join(" ".join(pair) for pair in found) == rest
        if not head or len(found) < 3 or not whole or any(NO_NAME.search(name) for name, _ in found):
            end_of_table()
            end = "" if clause.endswith(":") else "."
            lines.append(f"- {clause[0].upper() if clause[1].islower() else clause[0]}{clause[1:]}{end}")
            continue
        if [name for name, _ in found] != names or len(columns) == 4:
            end_of_table()
        names = [name for name, _ in found]
        columns.append((head, [figure for _, figure in found]))
    end_of_table()
    return lines


def pictures(name: str) -> list[str]:
    """The pictures of an experiment that exist."""
    return [p for p in PICTURES.get(name, (name,)) if (DOCS / "images" / "gallery" / f"{p}.png").exists()]


def pages() -> dict[str, str]:
    """The text of every page, by its name: an experiment is shown with the first paper that it serves."""
    homes: dict[str, str] = {}
    served: dict[str, list[tuple[str, Item]]] = {}
    for paper in PAPERS:
        for item in paper.items:
            if item.experiment:
                homes.setdefault(item.experiment, f"gallery-{paper.key}.md")
                served.setdefault(item.experiment, []).append((paper.key, item))
    found = {"gallery.md": index(homes)}
    for paper in PAPERS:
        name = f"gallery-{paper.key}.md"
        sections = [section(e, served[e][0][1].title, served[e]) for e, home in homes.items() if home == name]
        head = f"# {paper.title}\n\nEvery item of paper {paper.key}, then its experiments. [All papers](gallery.md).\n"
        found[name] = "\n".join([head, *items(paper, homes), *sections]).rstrip() + "\n"
    head = "# Beyond the papers\n\nClaims of our own, which hold or fail. Those of the papers: [gallery](gallery.md).\n"
    found[OWN] = (
        "\n".join([head, *(section(e, title, [], page) for e, (title, page) in BEYOND.items())]).rstrip() + "\n"
    )
    return found


def index(homes: dict[str, str]) -> str:
    """How many verdicts of each kind a paper has, and the pictures."""
    total: Counter[str] = Counter()
    table = [f"| paper | {' | '.join(ORDER)} |", "|---" * (len(ORDER) + 1) + "|"]
    parts = []
    for paper in PAPERS:
        page = f"gallery-{paper.key}.md"
        counts = Counter(verdict_of(item)[0] for item in paper.items)
        total += counts
        table.append(f"| [{paper.key}: {paper.title}]({page}) | {' | '.join(str(counts[v]) for v in ORDER)} |")
        here = {i.experiment: i.title for i in paper.items if homes.get(i.experiment) == page}
        parts += [f"## {paper.key}: {paper.title}", "", *thumbnails(page, here)]
    parts += ["## Beyond the papers", "", *thumbnails(OWN, {name: title for name, (title, _) in BEYOND.items()})]
    return "\n".join([HEAD, summary(total), *table, "", *parts]).rstrip() + "\n"


def badge(verdict: str) -> str:
    """A verdict that the style sheet colours."""
    return f'<span class="verdict {verdict.replace(" ", "-")}">{verdict}</span>'


def thumbnails(page: str, titles: dict[str, str]) -> list[str]:
    """A card for each experiment of a page: its first picture, small, its title and its verdict."""
    cards = []
    for name, title in titles.items():
        result, shown = result_of(name), pictures(name)
        image = f"![](images/gallery/{shown[0]}.png){{ loading=lazy }}" if shown else ""
        verdict = badge(result["said"]["verdict"]) if result else "not run"
        cards.append(f"[{image}{title} {verdict}]({page}#{name})\n")
    return ['<div class="thumbnails" markdown>\n', *cards, "</div>\n"] if cards else []


def items(paper: Paper, homes: dict[str, str]) -> list[str]:
    """Every item of a paper with the reason of its verdict, its baseline and its evidence."""
    head = "Statements are simulated or enumerated in few dimensions; `experiments/_index.py` names their tests."
    table = ["| item | what | verdict | baseline | evidence |", "|---|---|---|---|---|"]
    return [head, "", *table, *(row(item, homes) for item in paper.items), ""]


def summary(counts: Counter[str]) -> str:
    """The verdicts counted, in a sentence."""
    told = ", ".join(f"{counts[v]} {v}" for v in ORDER)
    return f"Of {sum(counts.values())} items of the papers: {told}. {len(BEYOND)} experiments go beyond the papers.\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    texts = pages()
    stale = [n for n, t in texts.items() if not (DOCS / n).exists() or (DOCS / n).read_text(encoding="utf-8") != t]
    if options.check:
        said = f"{', '.join(stale)}: not what the results say; run experiments/gallery.py" if stale else "up to date"
        print(said, file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        (DOCS / name).write_text(texts[name], encoding="utf-8")
        print(f"wrote docs/{name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
