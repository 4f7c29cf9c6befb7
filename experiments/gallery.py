"""The gallery of the documentation, made from the stored results: an index by paper, then every experiment.

python experiments/gallery.py [--check]      (--check only says whether docs/gallery.md is up to date)
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from _gallery import RESULTS, ROOT
from _index import PAPERS, PICTURES, READERS, Item, Said
from run import names

PAGE = ROOT / "docs" / "gallery.md"
HEAD = """# Gallery

Every figure and table of the five papers: reproduced, partly, not, or the reason for which it was not tried. This page
is made from the stored results by `python experiments/gallery.py`; `make reproduce` computes them anew and goes on
where it was stopped, `make reproduce QUICK=1` takes the small forms in under 15 minutes and touches no stored result.
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


def row(item: Item) -> str:
    """One line of the index."""
    where = f"[more]({item.page})" if item.page else ""
    if not item.script:
        verdict = f"not tried: {item.reason}" if item.reason else "as tests and on its own page"
        return f"| {item.label} | {item.title} | {verdict} | {where} |"
    said = said_of(item.script, item.needs)
    verdict = f"**{said.verdict}**" if said else "not run yet"
    return f"| {item.label} | {item.title} | {verdict} | [{item.script}](#{item.script}) {where} |"


def section(script: str, labels: list[str]) -> str:
    """What one script found."""
    said = said_of(script)
    command = f"`python experiments/{script}.py`, result in `experiments/results/{script}.json`"
    lines = [f"### {script}", "", f"*{'; '.join(labels)}.* {command}."]
    if said is None:
        return "\n".join([*lines, "", "Not run yet.", ""])
    verdict = said.verdict + (f": {said.why}" if said.why else "")
    lines += ["", f"- Claim: {said.claim}", f"- Ours: {said.ours}", f"- Verdict: **{verdict}**.", ""]
    picture = PICTURES.get(script, f"images/gallery/{script}.png")
    if (ROOT / "docs" / picture).exists():
        lines += [f"![{script}]({picture})", ""]
    return "\n".join(lines)


def first_line(script: str) -> str:
    return (ROOT / "experiments" / f"{script}.py").read_text(encoding="utf-8").splitlines()[0].strip('"')


def page() -> str:
    parts = [HEAD]
    found: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    for paper in PAPERS:
        parts += [f"## {paper.key}: {paper.title}", "", "| item | what | verdict | where |", "|---|---|---|---|"]
        for item in paper.items:
            parts.append(row(item))
            said = said_of(item.script, item.needs) if item.script else None
            kind = said.verdict if said else "not run" if item.script else "reasoned"
            counts[kind] = counts.get(kind, 0) + 1
            if item.script:
                found.setdefault(item.script, []).append(f"{paper.key} {item.label}")
        parts.append("")
    parts.insert(1, "Of all entries: " + ", ".join(f"{n} {k}" for k, n in sorted(counts.items())) + ".\n")
    others = {s: first_line(s) for s in names() if s not in found}
    if others:
        parts += ["## Other experiments\n", *(f"- `experiments/{s}.py`: {what}" for s, what in others.items()), ""]
    parts.append("## The experiments\n")
    parts += [section(script, labels) for script, labels in found.items()]
    return "\n".join(parts).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = page()
    if options.check:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        print(
            "up to date" if current else "docs/gallery.md is not what the results say; run experiments/gallery.py",
            file=sys.stderr,
        )
        return 0 if current else 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
