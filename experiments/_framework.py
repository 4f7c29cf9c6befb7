"""What an experiment is: a declaration, a function that measures, one that judges, one that draws, and one JSON file.

    @experiment(claim="...", items=("003 Figure 4",), paper="15 draws", ours="the same", quick={"samples": 5})
    def measure(store, samples=15):          # fills store.figures; its keyword arguments are the options
        store.figures["errors"] = ...

    def judge(found):                        # found: the figures as JSON has them
        return Said("what was found, with figures", graded(whole, part), "why, unless the claim is good")

    def draw(found): ...                     # optional: the picture, from the stored figures alone

`run.py NAME` calls them. A result file says what was claimed, found and judged, by which options, and which functions
were executed: when one of these changes, the result is reported as stale. It is never redrawn in silence.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from _sources import Recording, changed

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
OUT = Path(os.environ.get("BOCHNER_EXPERIMENTS_OUT", ROOT))  # where results and pictures go; else for small forms
RESULTS = OUT / "experiments" / "results"
OF_PAPERS, OF_OURS = ("reproduced", "partly", "not", "not tested"), ("holds", "fails")
GOOD = ("reproduced", "holds")


class Said(NamedTuple):
    """What is said of an experiment's figures; `why`: the reason, dropped if the claim is reproduced or holds."""

    ours: str  # sentences, and tables as Markdown has them
    verdict: str
    why: str = ""


@dataclass(frozen=True)
class Experiment:
    """A declaration; see the head of this file."""

    name: str
    measure: Callable[..., None]
    claim: str
    items: tuple[str, ...]  # figures, tables and statements of the papers; none: the claim is ours
    paper: str  # the sizes of the paper
    ours: str  # and ours
    quick: dict[str, Any] | str  # options of the small form, or the reason for which there is none
    sources: tuple[str, ...]  # modules that run in processes of their own, where no function is recorded
    needs: tuple[str, ...]  # packages beyond the library's own

    @property
    def module(self) -> Any:
        return sys.modules[self.measure.__module__]

    def judge(self, found: Any) -> Said:
        said: Said = self.module.judge(found)
        if said.verdict in GOOD:
            said = said._replace(why="")
        allowed = OF_PAPERS if self.items else OF_OURS
        if said.verdict not in allowed or not (said.why or said.verdict in GOOD):
            raise ValueError(
                f"{self.name}: the verdict must be one of {allowed}, with a reason unless good; got {said}."
            )
        return said


def experiment(**declared: Any) -> Callable[[Callable[..., None]], Experiment]:
    """Declare an experiment; it is named after its module."""
    usual = {"items": (), "paper": "", "ours": "", "sources": (), "needs": ()}

    def made(measure: Callable[..., None]) -> Experiment:
        name = Path(sys.modules[measure.__module__].__file__ or "").stem
        return Experiment(name=name, measure=measure, **{**usual, **declared})

    return made


def names(folder: Path = HERE) -> list[str]:
    return sorted(p.stem for p in folder.glob("[!_]*.py") if "@experiment(" in p.read_text(encoding="utf-8"))


def load(name: str) -> Experiment:
    """The experiment of a module; ImportError where a package is missing."""
    found = vars(importlib.import_module(name)).values()
    return next(x for x in found if isinstance(x, Experiment) and x.name == name)


def stale(name: str) -> list[str]:
    """The functions that have changed since a stored result was made."""
    return changed(stored(name)["made"]["sources"])


def graded(whole: Any, part: Any = False) -> str:
    """The verdict on a claim of a paper."""
    return "reproduced" if whole else "partly" if part else "not"


def kept(whole: Any) -> str:
    """The verdict on a claim of ours."""
    return "holds" if whole else "fails"


def missed(parts: dict[str, Any]) -> str:
    """Which parts of a claim fail."""
    return "; ".join(f"not: {part}" for part, holds in parts.items() if not holds)


def named(figures: dict[str, float], form: str, unit: str = "") -> str:
    """Named figures in a row, `a 1.0, b 2.0`: the gallery makes a column of a table of it."""
    return ", ".join(f"{name} {value:{form}}{unit}" for name, value in figures.items())


def table(rows: dict[str, dict[str, str]], head: str = "") -> str:
    """A table of what was found, a column for every key of its rows."""
    columns = list(next(iter(rows.values())))
    lines = [[head, *columns], ["---"] * (len(columns) + 1)]
    lines += [[name, *(row[c] for c in columns)] for name, row in rows.items()]
    return "\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n\n"


# Results.


def path_of(name: str) -> Path:
    return RESULTS / f"{name}.json"


def stored(name: str) -> dict[str, Any]:
    """The whole of a result file; a small form takes what it has not measured itself from the stored results."""
    path = path_of(name) if path_of(name).exists() else HERE / "results" / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def figures_of(name: str) -> Any:
    """The figures of a result file."""
    return stored(name)["figures"]


def write(path: Path, content: Any) -> None:
    """At once or not at all: a stopped run leaves no half file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".writing")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


class Store:
    """The figures of a run, kept while it goes on."""

    def __init__(self, name: str, made: Callable[[], dict[str, Any]] = dict) -> None:
        self.name, self.made = name, made
        self.figures: dict[str, Any] = {}

    @property
    def part(self) -> Path:
        return RESULTS / f"{self.name}.part.json"

    def save(self) -> None:
        write(self.part, {"made": self.made(), "figures": self.figures})

    def cell(self, key: str, make: Callable[[], Any], within: dict[str, Any] | None = None) -> Any:
        """One figure: measured, kept and shown unless it is there already."""
        table = self.figures if within is None else within
        if key not in table:
            table[key] = make()
            self.save()
            text = str(table[key])
            print(f"{key}: {text if len(text) < 400 else text[:400] + ' ...'}", flush=True)
        return table[key]

    def table(self, key: str) -> dict[str, Any]:
        """A dictionary among the figures."""
        found: dict[str, Any] = self.figures.setdefault(key, {})
        return found


def run(declared: Experiment, options: dict[str, Any], *, resume: bool = False) -> Said:
    """Measure, judge, store and draw.

    A run that was stopped goes on if the options and what it executed are the same. With `resume` it goes on whatever
    they are, and the figures of the last result are kept, too; they stay recorded with the sources they were made by.
    """
    store = Store(declared.name)
    before = [json.loads(p.read_text(encoding="utf-8")) for p in (store.part, path_of(declared.name)) if p.exists()]
    earlier: dict[str, Any] = before[0]["made"] if before else {"sources": {}}
    fresh = not changed(earlier["sources"])
    if before and (resume or (store.part.exists() and fresh and earlier["options"] == options)):
        store.figures = before[0]["figures"]
    else:
        earlier, fresh = {"sources": {}}, True
    began = time.monotonic() - earlier.get("seconds", 0)
    with Recording(earlier["sources"] if fresh else {}, declared.sources) as recording:
        store.made = lambda: {
            "options": options,
            "sources": recording.sources() | ({} if fresh else earlier["sources"]),
            "seconds": round(time.monotonic() - began, 1),
        }
        declared.measure(store, **options)
        made = store.made()
    said = conclude(declared, json.loads(json.dumps(store.figures)), made)
    store.part.unlink(missing_ok=True)
    return said


def conclude(declared: Experiment, figures: Any, made: dict[str, Any]) -> Said:
    """Judge figures, write the result file and draw."""
    said = declared.judge(figures)
    head = {k: getattr(declared, k) for k in ("claim", "paper", "ours")}
    write(
        path_of(declared.name),
        {"experiment": declared.name, **head, "said": said._asdict(), "made": made, "figures": figures},
    )
    print(
        f"\nclaim: {declared.claim}\nours: {said.ours}\nverdict: {said.verdict}"
        + (f" ({said.why})" if said.why else "")
    )
    draw(declared)
    return said


def judge_again(declared: Experiment) -> Said:
    """What is said of stored figures, anew."""
    before = stored(declared.name)
    return conclude(declared, before["figures"], before["made"])


def draw(declared: Experiment) -> None:
    """The pictures of an experiment from its stored figures, if it has any."""
    if hasattr(declared.module, "draw"):
        from _pictures import drawing

        with drawing(declared.name):
            declared.module.draw(figures_of(declared.name))
