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
from _index import BEYOND, NO_PICTURE, PAPERS, PICTURES, Item, Paper

DOCS = ROOT / "docs"
OWN = "gallery-beyond.md"
FIGURE = r"[-+]?\d[\d.,]*(?:e[-+]\d+)?(?: ?(?:%|ms|MB|points))?"
# A list such as "exact 934 ms, positive 44 ms".
NAMED = re.compile(rf"(?P<name>.+?) (?P<figure>{FIGURE}(?: (?:and|±) {FIGURE})?)(?:, |$)")
ORDER = ("reproduced", "partly", "not", "not tested", "not tried")
HEAD = """# Gallery

Every figure, table and numbered statement of the five papers, with a verdict. These pages are made from the stored
results by `python experiments/gallery.py`. `make reproduce` measures what is missing or older than the functions it
depends on; `make reproduce QUICK=1` takes the small forms in under 15 minutes and changes no result.
`python experiments/run.py --status` says which results are older, and by which functions: a result records those that
were executed, so that an edit elsewhere leaves it fresh.

A verdict means:

- **reproduced**: the claim holds at the paper's sizes, against the paper's own baseline;
- **partly**: it holds with a correction, in part, or at sizes that fall short of the paper's;
- **not**: it fails here;
- **not tested**: we ran it, but on a task in which the method under test does nothing;
- **not tried**: for the reason given.

What is wrong in the papers is on the page of [errata](errata.md).
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


def section(name: str, title: str, items: list[tuple[str, Item]]) -> str:
    """What one experiment found, and the verdict on each item that it serves."""
    labels = "; ".join(f"{key} {item.label}" for key, item in items)
    head = [f'<a id="{name}"></a>', "", f"## {title[0].upper()}{title[1:]}", ""]
    result = result_of(name)
    command = f"`python experiments/run.py {name}`, result in `experiments/results/{name}.json`."
    lines = [*head, f"*{labels}.* {command}" if labels else command, ""]
    if result is None:
        return "\n".join([*lines, "Not run yet.", ""])
    said = result["said"]
    verdict = badge(said["verdict"]) + (f" {said['why']}" if said["why"] else "")
    lines += [f"- Claim: {result['claim']}"]
    lines += [f"- Sizes of the paper: {result['paper']}."] if result["paper"] else []
    lines += [f"- Our sizes: {result['ours']}.", f"- Verdict: {verdict}."]
    for key, item in items:
        if verdict_of(item)[0] != said["verdict"] or item.limits or item.why:
            why = item.why or item.limits
            lines.append(f"- Verdict on {key} {item.label}, {item.title}: {badge(verdict_of(item)[0])} {why}.")
    lines += ["", *findings(said["ours"]), ""]
    for picture in pictures(name):
        lines += [f"![{title}](images/gallery/{picture}.png)", ""]
    return "\n".join(lines)


def findings(text: str) -> list[str]:
    """What was found, a line for every clause; clauses of at least three named figures are columns of a table."""
    lines = ["Found:", ""]
    names: list[str] = []
    columns: list[tuple[str, list[str]]] = []

    def end_of_table() -> None:
        if columns:
            rows = [["", *(head for head, _ in columns)], ["---"] * (len(columns) + 1)]
            rows += [[name, *(column[i] for _, column in columns)] for i, name in enumerate(names)]
            if lines[-1]:
                lines.append("")
            lines.extend([*(f"| {' | '.join(cells)} |" for cells in rows), ""])
            columns.clear()

    for clause in re.split(r"; |\. (?=[A-Za-z`])", text.strip().rstrip(".")):
        head, _, rest = clause.rpartition(": ")
        found = [(m["name"], m["figure"]) for m in NAMED.finditer(rest)]
        if not head or len(found) < 3 or ", ".join(" ".join(pair) for pair in found) != rest:
            end_of_table()
            lines.append(f"- {clause[0].upper() if clause[1].islower() else clause[0]}{clause[1:]}.")
            continue
        if [name for name, _ in found] != names or len(columns) == 4:
            end_of_table()
        names = [name for name, _ in found]
        columns.append((head, [figure for _, figure in found]))
    end_of_table()
    return lines


def pictures(name: str) -> list[str]:
    """The pictures of an experiment that exist."""
    wanted = () if name in NO_PICTURE else PICTURES.get(name, (name,))
    return [p for p in wanted if (DOCS / "images" / "gallery" / f"{p}.png").exists()]


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
    found[OWN] = "\n".join([head, *(section(e, title, []) for e, (title, _) in BEYOND.items())]).rstrip() + "\n"
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
    parts += ["## Beyond the papers", "", "| experiment | verdict | where |", "|---|---|---|"]
    for name, (title, page) in BEYOND.items():
        result = result_of(name)
        verdict = result["said"]["verdict"] if result else "not run"
        parts.append(f"| {title} | {badge(verdict)} | [result]({OWN}#{name}) [more]({page}) |")
    parts += ["", *thumbnails(OWN, {name: title for name, (title, _) in BEYOND.items()})]
    return "\n".join([HEAD, summary(total), *table, "", *parts]).rstrip() + "\n"


def badge(verdict: str) -> str:
    """A verdict that the style sheet colours."""
    return f'<span class="verdict {verdict.replace(" ", "-")}">{verdict}</span>'


def thumbnails(page: str, titles: dict[str, str]) -> list[str]:
    """The first picture of each experiment of a page, small, with a link to its result."""
    cards = [
        f"[![](images/gallery/{shown[0]}.png){{ loading=lazy }}{title}]({page}#{name})\n"
        for name, title in titles.items()
        if (shown := pictures(name))
    ]
    return ['<div class="thumbnails" markdown>\n', *cards, "</div>\n"] if cards else []


def items(paper: Paper, homes: dict[str, str]) -> list[str]:
    """Every item of a paper with the reason of its verdict, its baseline and its evidence."""
    table = ["| item | what | verdict | baseline | evidence |", "|---|---|---|---|---|"]
    lines = [*table, *(row(item, homes) for item in paper.items), ""]
    tested = [f"- {item.label}: {', '.join(f'`{t}`' for t in item.tests)}" for item in paper.items if item.tests]
    if tested:
        head = "Statements are simulated or enumerated in few dimensions, against the printed formula."
        lines += [
            "<details markdown><summary>Tests of the statements</summary>",
            "",
            head,
            "",
            *tested,
            "",
            "</details>",
        ]
        lines += [""]
    return lines


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
