"""What an experiment is: a declaration, a function that measures, one that judges, one that draws, and one JSON file.

    @experiment(claim="...", items=("003 Figure 4",), paper="15 draws", ours="the same", quick={"samples": 5},
                sources=("bochner.maps", "bochner.attention"))
    def measure(store, samples=15):          # fills store.figures; its keyword arguments are the options
        store.figures["errors"] = ...

    def judge(found):                        # found: the figures as JSON has them
        return Said("what was found, with figures", "reproduced")

    def draw(found): ...                     # optional: the picture, from the stored figures alone

`run.py NAME` calls them. A result file says what was claimed, found and judged, by which options, and by which sources
of the library: when one of these changes, the result is reported as stale. It is never redrawn in silence.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
OUT = Path(os.environ.get("BOCHNER_EXPERIMENTS_OUT", ROOT))  # where results and pictures go; else for small forms
RESULTS = OUT / "experiments" / "results"
OF_PAPERS, OF_OURS = ("reproduced", "partly", "not", "not tested"), ("holds", "fails")
GOOD = ("reproduced", "holds")
JUDGING = re.compile(r"judge|draw|say|picture|plot")  # functions of an experiment that no figure depends on


class Said(NamedTuple):
    """What is said of an experiment's figures; `why`: the reason, unless the claim is reproduced or holds."""

    ours: str
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
    sources: tuple[str, ...]
    needs: tuple[str, ...]  # packages beyond the library's own

    @property
    def module(self) -> Any:
        return sys.modules[self.measure.__module__]

    def judge(self, found: Any) -> Said:
        said: Said = self.module.judge(found)
        allowed = OF_PAPERS if self.items else OF_OURS
        if said.verdict not in allowed or not (said.why or said.verdict in GOOD):
            raise ValueError(
                f"{self.name}: the verdict must be one of {allowed}, with a reason unless good; got {said}."
            )
        return said


def experiment(**declared: Any) -> Callable[[Callable[..., None]], Experiment]:
    """Declare an experiment; it is named after its module."""
    usual = {"items": (), "paper": "", "ours": "", "needs": ()}

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


# Sources.


def code_of(text: str, leave_out: re.Pattern[str] | None = None) -> str:
    """Python without comments, docstrings and blank lines, and without some of its functions."""
    gone: set[int] = set()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and body:
            first = body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                gone.update(range(first.lineno, (first.end_lineno or 0) + 1))
    for node in tree.body:
        if leave_out and isinstance(node, ast.FunctionDef) and leave_out.match(node.name):
            gone.update(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = (line.strip() for i, line in enumerate(text.splitlines(), 1) if i not in gone)
    return "\n".join(line for line in lines if line and not line.startswith("#"))


def fingerprint(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def files_of(module: str, root: Path = ROOT) -> list[Path]:
    """The files of a module or package of the library."""
    path = root / "src" / Path(*module.split("."))
    return sorted(path.rglob("*.py")) if path.is_dir() else [p for p in [path.with_suffix(".py")] if p.exists()]


def own_files(name: str, folder: Path = HERE) -> list[Path]:
    """An experiment's file and those of this folder that it imports, but for this one and the drawing."""
    found, todo = [], [name]
    while todo:
        path = folder / f"{todo.pop()}.py"
        if path not in found and path.exists() and path.stem not in ("_framework", "_pictures"):
            found.append(path)
            todo += re.findall(r"^(?:from|import) (\w+)", path.read_text(encoding="utf-8"), re.M)
    return sorted(found)


def sources_of(declared: Experiment) -> dict[str, str]:
    """A fingerprint of every source that the figures depend on."""
    read: Callable[[Path], str] = lambda p: p.read_text(encoding="utf-8")  # noqa: E731
    found = {m: fingerprint(code_of(read(p)) for p in files_of(m)) for m in declared.sources}
    own = fingerprint(code_of(read(p), JUDGING) for p in own_files(declared.name))
    return {**found, "experiment": own}


def stale(declared: Experiment) -> list[str]:
    """The sources that have changed since a stored result was made."""
    recorded = stored(declared.name)["made"]["sources"]
    return [m for m, now in sources_of(declared).items() if recorded.get(m) != now]


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

    def __init__(self, name: str, made: dict[str, Any] | None = None) -> None:
        self.name, self.made = name, made or {}
        self.figures: dict[str, Any] = {}

    @property
    def part(self) -> Path:
        return RESULTS / f"{self.name}.part.json"

    def save(self) -> None:
        write(self.part, {"made": self.made, "figures": self.figures})

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

    A run that was stopped goes on if options and sources are the same. With `resume` it goes on whatever they are,
    and the figures of the last result are kept, too; they stay recorded with the sources that they were made by.
    """
    made = {"options": options, "sources": sources_of(declared)}
    store = Store(declared.name, made)
    before = [json.loads(p.read_text(encoding="utf-8")) for p in (store.part, path_of(declared.name)) if p.exists()]
    usable = [b for b in before if resume or (b is before[0] and store.part.exists() and b["made"] == made)]
    if usable:
        store.figures = usable[0]["figures"]
        store.made = {"options": options, "sources": usable[0]["made"]["sources"]}
    began = time.monotonic()
    declared.measure(store, **options)
    figures = json.loads(json.dumps(store.figures))
    said = conclude(declared, figures, {**store.made, "seconds": round(time.monotonic() - began, 1)})
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
