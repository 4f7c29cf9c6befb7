"""The import graph of the package, read from its source: every import counts, relative and lazy ones too.

`python tests/architecture.py` writes the generated parts of docs/architecture.md and its drawing anew.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
COLUMN = 84  # letters in a column of the site
SOURCE = ROOT / "src" / "bochner"
PAGE = ROOT / "docs" / "architecture.md"
DRAWING = ROOT / "docs" / "images" / "architecture.svg"


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


def summary(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", text)[0].rstrip(".")


def tree(source: Path = SOURCE) -> str:
    """The modules as a tree, each with the first sentence of its docstring; a package has that of its `__init__`."""
    lines = [f"{source.name}/"]

    def walk(folder: Path, depth: int) -> None:
        entries = [p for p in folder.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
        for entry in sorted(entries, key=lambda p: (p.is_file(), p.name)):
            if entry.name == "__init__.py":
                continue
            name = "  " * depth + entry.name + ("/" if entry.is_dir() else "")
            said = summary(entry / "__init__.py" if entry.is_dir() else entry)
            first, *more = textwrap.wrap(said, COLUMN - 25, break_long_words=False)
            lines.extend([f"{name:<24} {first}", *(f"{'':24} {line}" for line in more)])
            if entry.is_dir():
                walk(entry, depth + 1)

    walk(source, 1)
    return "```text\n" + "\n".join(lines) + "\n```"


def levels(graph: dict[str, set[str]]) -> list[list[str]]:
    """The parts in rows: a part stands one row above the highest of those it imports. The graph has no cycle."""
    height: dict[str, int] = {}

    def measure(node: str) -> int:
        if node not in height:
            height[node] = 1 + max((measure(other) for other in graph.get(node, ())), default=-1)
        return height[node]

    nodes = sorted(set(graph) | {other for others in graph.values() for other in others})
    rows: list[list[str]] = [[] for _ in range(1 + max(map(measure, nodes)))]
    for node in nodes:
        rows[height[node]].append(node)
    return rows


def picture(graph: dict[str, set[str]]) -> str:
    """The import graph as a table, the highest parts first; each row imports from lower rows only."""
    lines = ["| row | part | imports |", "|---|---|---|"]
    for number, row in reversed(list(enumerate(levels(graph)))):
        for part in row:
            lines.append(f"| {number} | `{part}` | {', '.join(f'`{p}`' for p in sorted(graph.get(part, ()))) or '-'} |")
    return "\n".join(lines)


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph without the private helpers and without the edges that follow from others."""
    shown = {part: {o for o in others if not o.startswith("_")} for part, others in graph.items() if part[0] != "_"}

    def reach(part: str) -> set[str]:
        below = shown.get(part, set())
        return below.union(*(reach(other) for other in below))

    return {p: {o for o in below if not any(o in reach(x) for x in below - {o})} for p, below in shown.items()}


def drawing(graph: dict[str, set[str]]) -> str:
    """The reduced graph as SVG, the highest parts on top; every line leads downwards."""
    edges, width, height, step = reduced(graph), 104, 30, 62
    rows = levels(edges)[::-1]
    wide = (width + 60) * max(map(len, rows))
    place = {
        part: (wide * (i + 0.5) / len(row), 25 + step * depth)
        for depth, row in enumerate(rows)
        for i, part in enumerate(row)
    }
    lines = [
        f'<path d="M{x:.0f} {y + height / 2:.0f} L{u:.0f} {v - height / 2:.0f}" marker-end="url(#tip)"/>'
        for part in sorted(edges)
        for (x, y), (u, v) in [(place[part], place[other]) for other in sorted(edges[part])]
    ]
    boxes = [
        f'<rect x="{x - width / 2:.0f}" y="{y - height / 2:.0f}" width="{width}" height="{height}" rx="4"/>'
        f'<text x="{x:.0f}" y="{y + 5:.0f}">{part}</text>'
        for part, (x, y) in sorted(place.items())
    ]
    style = (
        "rect{fill:#eef3f8;stroke:#33658a}text{font:14px sans-serif;text-anchor:middle;fill:#1b2a38}"
        "path{stroke:#7a8793;stroke-width:1.3;fill:none}marker path{fill:#7a8793}"
    )
    tip = (
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L10 5 L0 10 z"/></marker></defs>'
    )
    size = f'width="{wide}" height="{50 + step * (len(rows) - 1)}"'
    back = '<path d="M0 0 H10000 V10000 H0 z" style="fill:white;stroke:none"/>'
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{style}</style>", tip, back]
    return "\n".join([*head, *lines, *boxes, "</svg>", ""])


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


def generated(source: Path = SOURCE) -> dict[str, str]:
    """The generated parts of the page, by the names of their markers."""
    graph = room_graph(imports(source))
    return {"tree": tree(source), "imports": picture(graph)}


def with_generated(page: str, parts: dict[str, str]) -> str:
    """A page with everything between its markers replaced."""
    for name, text in parts.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, _, rest = page.partition(begin)
        after = rest.partition(end)[2]
        if not rest:
            raise ValueError(f"the page has no marker {begin}")
        page = f"{before}{begin}\n\n{text}\n\n{end}{after}"
    return page


def defined(name: str, source: Path = SOURCE) -> bool:
    """Whether a dotted name such as `maps.base.FeatureMap.prepare` is a module, or defined in one, with its members."""
    known = modules(source)
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        module = ".".join([source.name, *parts[:cut]])
        if module in known:
            body: list[ast.stmt] = ast.parse(known[module].read_text()).body
            for part in parts[cut:]:
                found = [
                    node
                    for node in body
                    if (isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part)
                    or (isinstance(node, ast.AnnAssign) and getattr(node.target, "id", None) == part)
                    or (isinstance(node, ast.Assign) and any(getattr(t, "id", None) == part for t in node.targets))
                ]
                if not found:
                    return False
                body = getattr(found[0], "body", [])
            return True
    return False


if __name__ == "__main__":
    PAGE.write_text(with_generated(PAGE.read_text(), generated()))
    DRAWING.write_text(drawing(room_graph(imports())))
