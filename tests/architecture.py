"""The import graph of the package, read from its source: every import counts, relative and lazy ones too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "bochner"


class Import(NamedTuple):
    """One import statement: the module it stands in, the module it names, the name taken from there (or none)."""

    importer: str
    module: str
    name: str | None
    line: int


def module_name(path: Path, source: Path = SOURCE) -> str:
    """`src/bochner/maps/base.py` is `bochner.maps.base`, a package's `__init__.py` the package."""
    parts = path.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """The part of the package that a module lies in: `bochner.maps.base` lies in `maps`, the package itself in ``."""
    return module.partition(".")[2].partition(".")[0]


def modules(source: Path = SOURCE) -> dict[str, Path]:
    return {module_name(path, source): path for path in sorted(source.rglob("*.py"))}


def imports(source: Path = SOURCE) -> list[Import]:
    """Every import of one of our modules by another; `from package import module` names the module."""
    known = modules(source)
    return [found for name, path in known.items() for found in _imports_of(name, path, known)]


def _imports_of(importer: str, path: Path, known: Iterable[str]) -> Iterator[Import]:
    package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in known:
                    yield Import(importer, alias.name, None, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                if f"{base}.{alias.name}" in known:
                    yield Import(importer, f"{base}.{alias.name}", None, node.lineno)
                elif base in known:
                    yield Import(importer, base, alias.name, node.lineno)


def room_graph(found: Iterable[Import]) -> dict[str, set[str]]:
    """Which part imports which; the public names in the package's own `__init__` are left out."""
    graph: dict[str, set[str]] = {}
    for i in found:
        here, there = room(i.importer), room(i.module)
        if here:
            graph.setdefault(here, set())
            if there != here:
                graph[here].add(there or "bochner")
    return graph


def module_graph(found: Iterable[Import]) -> dict[str, set[str]]:
    """Which module imports which; a package's `__init__` counts as the package."""
    graph: dict[str, set[str]] = {}
    for i in found:
        graph.setdefault(i.importer, set())
        if i.module != i.importer:
            graph[i.importer].add(i.module)
    return graph


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """One cycle of a graph as a closed walk, or nothing."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for other in sorted(graph.get(node, ())):
            if closed := walk(other, [*path, node]):
                return closed
        done.add(node)
        return []

    return next((closed for node in sorted(graph) if (closed := walk(node, []))), [])


def private_across(found: Iterable[Import]) -> list[Import]:
    """Imports of a private name or module from another part; the private modules at the root serve all parts."""
    return [
        i
        for i in found
        if room(i.importer) != room(i.module)
        and (re.match(r"_(?!_)", i.name or "") or any(p.startswith("_") for p in i.module.split(".")[2:]))
    ]


def repeated(folders: Iterable[Path], lines: int = 6) -> list[tuple[str, str]]:
    """Runs of statements, `lines` or more, that stand in two places of function bodies to the letter.

    What must be written out each time does not count: signatures, docstrings, and constructors that store arguments.
    """
    seen: dict[str, str] = {}
    found: set[tuple[str, str]] = set()
    for path in sorted(p for folder in folders for p in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.For | ast.While | ast.If | ast.With | ast.Try):
                continue
            texts = [(s.lineno, ast.unparse(s)) for s in node.body if not isinstance(s, ast.Expr | ast.Import)]
            texts = [(line, text) for line, text in texts if not re.fullmatch(r"self\.(\w+) = \1", text)]
            for start in range(len(texts)):
                run = ""
                for _, text in texts[start:]:
                    run += text + "\n"
                    if run.count("\n") >= lines:
                        break
                if run.count("\n") >= lines:
                    place = f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}:{texts[start][0]}"
                    if place != seen.setdefault(run, place):
                        found.add((seen[run], place))
    return sorted(found)


def long_functions(folder: Path, lines: int = 60) -> list[str]:
    """Functions of more than so many lines without their docstring: the rule of the attention package is 60."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                text = node.body[0] if ast.get_docstring(node) is not None else None
                words = 0 if text is None else (text.end_lineno or 0) - text.lineno + 1
                count = (node.end_lineno or 0) - node.lineno + 1 - words
                if count > lines:
                    found.append(f"{path.name}:{node.name} ({count} lines)")
    return found
