"""The gallery of the documentation, made from the stored results: an index, and for every paper its experiments.

python experiments/gallery.py [--check]      (--check only says whether the pages are up to date)
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from _gallery import RESULTS, ROOT
from _index import NO_PICTURE, PAPERS, PICTURES, READERS, Item, Said
from run import names

DOCS = ROOT / "docs"
OURS = ("Beyond the paper", "A published Performer")  # labels of items that are in no paper
BEYOND = "gallery-beyond.md"
HEAD = """# Gallery

Every figure and table of the five papers: reproduced, partly, not, or the reason for which it was not tried. These
pages are made from the stored results by `python experiments/gallery.py`; `make reproduce` computes them anew and goes
on where it was stopped, `make reproduce QUICK=1` takes the small forms in under 15 minutes and changes no result.
The papers: 000 is the problem set on kernel attention and linear layers, 001 *Hybrid Random Features*, 002 the kernel
products under sparsity, 003 *Rethinking Attention with Performers*, 004 *On Learning the Transformer Kernel*. What is
wrong in them is on the page of [errata](errata.md).
"""


def said_of(script: str, needs: str = "") -> Said | None:
    """Claim, finding and verdict of a script from its stored JSON; None if it, or the run needed, is missing."""
    path = RESULTS / f"{script}.json"
    if not path.exists():
        return None
    result: Any = json.loads(path.read_text(encoding="utf-8"))
    if needs and not any(needs in key for key in result):
        return None
    if isinstance(result, dict) and "gallery" in result:
        return Said(**result["gallery"])
    try:
        return READERS[script](result) if script in READERS else None
    except (KeyError, TypeError, ValueError, AttributeError):  # a run that has not got far enough
        return None


def verdict_of(item: Item) -> str:
    """The verdict on an item: that of its script, but no more than part where the script covers part of it."""
    said = said_of(item.script, item.needs)
    if said is None:
        return "not run"
    return "partly" if item.limits and said.verdict == "reproduced" else said.verdict


def row(item: Item, homes: dict[str, str]) -> str:
    """One line of the index; `homes`: the page of each script."""
    where = f"[more]({item.page})" if item.page else ""
    if not item.script:
        verdict = f"**{item.verdict}**: {item.reason}" if item.verdict else f"not tried: {item.reason}"
        return f"| {item.label} | {item.title} | {verdict} | {where} |"
    link = f"[result]({homes[item.script]}#{item.script})"
    return f"| {item.label} | {item.title} | {told(item)} | {link} {where} |"


def told(item: Item) -> str:
    """The verdict on an item, with what its script leaves out of it."""
    found = verdict_of(item)
    return "not run yet" if found == "not run" else f"**{found}**" + (f": {item.limits}" if item.limits else "")


def section(script: str, items: list[tuple[str, Item]]) -> str:
    """What one script found; where the items it serves are told apart, the verdict on each."""
    said = said_of(script)
    title = items[0][1].title
    labels = "; ".join(f"{key} {item.label}" for key, item in items)
    command = f"`python experiments/{script}.py`, result in `experiments/results/{script}.json`"
    lines = [f'<a id="{script}"></a>', "", f"## {title[0].upper()}{title[1:]}", "", f"*{labels}.* {command}."]
    if said is None:
        return "\n".join([*lines, "", "Not run yet.", ""])
    verdict = said.verdict + (f": {said.why}" if said.why else "")
    lines += ["", f"- Claim: {said.claim}", f"- Ours: {said.ours}", f"- Verdict: **{verdict}**."]
    if any(item.limits or verdict_of(item) != said.verdict for _, item in items):
        lines += [f"- Verdict on {key} {item.label}, {item.title}: {told(item)}." for key, item in items]
    lines.append("")
    for picture in pictures(script):
        lines += [f"![{title}]({picture})", ""]
    if script in NO_PICTURE:
        lines += [f"No picture: {NO_PICTURE[script]}.", ""]
    return "\n".join(lines)


def pictures(script: str) -> list[str]:
    """The pictures of a script that exist, as paths below docs/."""
    return [p for p in PICTURES.get(script, (f"images/gallery/{script}.png",)) if (DOCS / p).exists()]


def first_line(script: str) -> str:
    return (ROOT / "experiments" / f"{script}.py").read_text(encoding="utf-8").splitlines()[0].strip('"')


def pages() -> dict[str, str]:
    """The text of every page, by its name: a script is shown with the first paper that it serves."""
    homes: dict[str, str] = {}
    served: dict[str, list[tuple[str, Item]]] = {}
    for paper in PAPERS:
        for item in paper.items:
            if item.script:
                homes.setdefault(item.script, BEYOND if item.label in OURS else f"gallery-{paper.key}.md")
                served.setdefault(item.script, []).append((paper.key, item))
    found = {"gallery.md": index(homes)}
    for paper in PAPERS:
        name = f"gallery-{paper.key}.md"
        sections = [section(script, served[script]) for script, home in homes.items() if home == name]
        if sections:
            head = f"# {paper.title}\n\nThe experiments of paper {paper.key}. All papers: [gallery](gallery.md).\n"
            found[name] = "\n".join([head, *sections]).rstrip() + "\n"
    head = "# Beyond the papers\n\nExperiments of our own. Those of the papers: [gallery](gallery.md).\n"
    sections = [section(script, served[script]) for script, home in homes.items() if home == BEYOND]
    found[BEYOND] = "\n".join([head, *sections]).rstrip() + "\n"
    return found


def index(homes: dict[str, str]) -> str:
    parts = [HEAD]
    counts: dict[str, int] = {}
    for paper in PAPERS:
        parts += [f"## {paper.key}: {paper.title}", "", "| item | what | verdict | where |", "|---|---|---|---|"]
        for item in paper.items:
            parts.append(row(item, homes))
            kind = "ours" if item.label in OURS else verdict_of(item) if item.script else item.verdict or "reason"
            counts[kind] = counts.get(kind, 0) + 1
        parts.append("")
    parts.insert(1, summary(counts))
    others = {s: first_line(s) for s in names() if s not in homes}
    if others:
        parts += ["## Other experiments\n", *(f"- `experiments/{s}.py`: {what}" for s, what in others.items()), ""]
    return "\n".join(parts).rstrip() + "\n"


def summary(counts: dict[str, int]) -> str:
    """The verdicts counted, in a sentence; what goes beyond the papers is counted apart."""
    of = {k: counts.get(k, 0) for k in ("reproduced", "partly", "not", "reason", "not run")}
    text = (
        f"Of the {sum(of.values())} figures, tables and statements of the papers {of['reproduced']} are reproduced, "
        f"{of['partly']} in part and {of['not']} not; {of['reason']} were not tried, each for the reason given."
    )
    waiting = f" {of['not run']} have not been run yet." if of["not run"] else ""
    return f"{text}{waiting} {counts.get('ours', 0)} experiments go beyond the papers.\n"


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
