"""Which functions of the library and of an experiment a run executed, and which of them have changed since.

A fingerprint of a function covers its code, the constants and class bodies that it names, and what these are computed
by; of a method, the bodies of its classes and of their bases as well. Docstrings, comments, annotations, layout and the
names of local variables do not count. What runs in other threads and processes is not seen: an experiment names such
modules as its `sources`, and these count as a whole.
"""

from __future__ import annotations

import ast
import copy
import cProfile
import hashlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

HERE = Path(__file__).resolve().parent
LIBRARY = Path(str(getattr(importlib.util.find_spec("bochner"), "origin", HERE))).resolve().parent
NO_SOURCE = ("_framework", "_pictures", "_sources", "run")  # of this folder; no figure depends on them
WHOLE = "*"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Place = tuple[str, str]  # a module, and a name in it such as `Class.method`


@dataclass
class Module:
    """What the places of a module are, and what its imports stand for."""

    places: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)

    def add(self, body: list[ast.stmt], prefix: str = "") -> None:
        for node in body:
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                self.places.setdefault(prefix + node.name, []).append(node)
                self.add(node.body if isinstance(node, ast.ClassDef) else [], f"{prefix}{node.name}.")
            elif isinstance(node, ast.If | ast.Try | ast.With | ast.For):
                for part in ("body", "orelse", "finalbody", "handlers"):
                    for inner in getattr(node, part, []):
                        self.add(inner.body if isinstance(inner, ast.ExceptHandler) else [inner], prefix)
            elif not prefix and isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for name in {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}:
                        self.places.setdefault(name, []).append(node)


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def path_of(module: str) -> Path:
    """The file of a module of the library or of this folder; it need not exist."""
    first, *rest = module.split(".")
    base = LIBRARY.joinpath(*rest) if first == "bochner" else HERE / Path(first, *rest)
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def module_of(path: Path) -> str:
    """The name of the module of a file; empty if its code is no source of figures."""
    if path.is_relative_to(LIBRARY):
        parts = path.relative_to(LIBRARY).with_suffix("").parts
        return ".".join(["bochner", *(p for p in parts if p != "__init__")])
    return path.stem if path.parent == HERE and path.stem not in NO_SOURCE else ""


@cache
def read(name: str) -> Module | None:
    path = path_of(name)
    if not path.exists() or name in NO_SOURCE:
        return None
    tree, module = ast.parse(text_of(path)), Module()
    module.add(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            module.imports |= {a.asname: a.name for a in node.names if a.asname}
            module.imports |= {(first := a.name.split(".")[0]): first for a in node.names if not a.asname}
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".")[: len(name.split(".")) + (path.name == "__init__.py") - node.level]
            source = ".".join([*(package if node.level else []), *filter(None, [node.module])])
            module.imports |= {a.asname or a.name: f"{source}.{a.name}" for a in node.names}
    return module


# What a place is made of.


class Bare(ast.NodeTransformer):
    """Code without docstrings and annotations of functions, its local variables numbered."""

    def __init__(self, local: dict[str, str]) -> None:
        self.local = local

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.local.get(node.id, node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, FUNCTIONS):
            node.returns = None
        return super().visit(node)


def bare(node: ast.stmt) -> ast.stmt:
    """A function; or a class without its methods; or a statement: as its fingerprint takes it."""
    node, local = copy.copy(node), dict[str, str]()  # what is inside may change: it is read here alone
    if isinstance(node, ast.ClassDef):
        node.body = [n for n in node.body if not isinstance(n, (*FUNCTIONS, ast.ClassDef))] or [ast.Pass()]
    if isinstance(node, FUNCTIONS):
        # What an experiment says of itself is no source of its figures.
        node.decorator_list = [d for d in node.decorator_list if not ast.unparse(d).startswith("experiment(")]
        stored = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        taken = {x for n in ast.walk(node) if isinstance(n, ast.Global | ast.Nonlocal) for x in n.names}
        taken |= {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
        local = {name: f"v{i}" for i, name in enumerate(dict.fromkeys(stored)) if name not in taken}
    made: ast.stmt = Bare(local).visit(node)
    return made


def names_in(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """The dotted names that some code reads, and what it does with them: "calls", "derives" or "reads"."""
    done = {id(n.func): "calls" for n in ast.walk(node) if isinstance(n, ast.Call)}
    done |= {id(base): "derives" for base in getattr(node, "bases", [])}
    for inner in ast.walk(node):
        parts, part = list[str](), inner
        while isinstance(part, ast.Attribute):
            parts, part = [part.attr, *parts], part.value
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
            yield ".".join([part.id, *parts]), done.get(id(inner), "reads")


@cache
def resolved(name: str, dotted: str) -> Place | None:
    """The place that a name of a module stands for, where that is the library's or this folder's."""
    module, (first, *rest) = read(name), dotted.split(".")
    if module is None:
        return None
    if first in module.places:
        return name, first
    whole = [*module.imports[first].split("."), *rest] if first in module.imports else []
    for end in range(len(whole) - 1, 0, -1):
        source = ".".join(whole[:end])
        if source != name and read(source) is not None:
            return resolved(source, whole[end])
    return None


@cache
def pieces(place: Place, recorded: bool) -> tuple[str, tuple[Place, ...]]:
    """The code of a place, and the other places that figures depend on through it.

    The calls of a recorded function were recorded themselves; those of constants and of class bodies were made when
    their module was imported, so that these are followed.
    """
    (name, inside), found, texts = place, list[Place](), list[str]()
    for node in (read(name) or Module()).places.get(inside, []):
        code = bare(node)
        texts.append(ast.unparse(code))
        for dotted, use in names_in(code):
            other = resolved(name, dotted)
            if other is None:
                continue
            places = (read(other[0]) or Module()).places
            first = places[other[1]][0]
            if isinstance(first, (*FUNCTIONS, ast.ClassDef)):
                if not (isinstance(first, ast.ClassDef) if recorded else use != "reads"):
                    continue
                makers = [f"{other[1]}.{x}" for x in ("__new__", "__init__", "__post_init__")]
                found += [(other[0], x) for x in makers if x in places and use == "calls" and not recorded]
            found.append(other)
    owner = inside.rpartition(".")[0]
    return "\n".join(texts), tuple(dict.fromkeys([*found, *([(name, owner)] if owner else [])]))


@cache
def fingerprint(name: str, inside: str) -> str:
    """Of a place and of all that it depends on; `WHOLE`: of the code of a module or package."""
    if inside == WHOLE:
        path = path_of(name)
        files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
        texts = {(name, module_of(f)): ast.unparse(Bare({}).visit(ast.parse(text_of(f)))) for f in files}
    else:
        texts, todo = dict[Place, str](), [(name, inside)]
        while todo:
            place = todo.pop()
            if place not in texts:
                texts[place], more = pieces(place, place == (name, inside))
                todo += more
        if not texts[name, inside]:
            return "gone"
    return hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:6]


def changed(recorded: dict[str, str]) -> list[str]:
    """What has changed of the recorded sources; all, where they were recorded without their functions."""
    if not recorded or not all(":" in text for text in recorded.values()):
        return ["made before functions were recorded"]
    each = ((name, *one.split(":")) for name, text in recorded.items() for one in text.split())
    return [f"{name}.{inside}" for name, inside, before in each if fingerprint(name, inside) != before]


# What is executed.


def place_at(name: str, line: int) -> str:
    """The function that a line of a module belongs to, the outermost of nested ones; empty if none."""
    module = read(name)
    for inside, nodes in module.places.items() if module else ():
        for node in nodes:
            if isinstance(node, FUNCTIONS):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                if first <= line <= (node.end_lineno or first):
                    return inside
    return ""


class Recording:
    """The functions that are executed within, by Python's profiler; `before`: sources recorded by an earlier part."""

    def __init__(self, before: dict[str, str] | None = None, whole: tuple[str, ...] = ()) -> None:
        self.places = {(m, one.partition(":")[0]) for m, text in (before or {}).items() for one in text.split()}
        self.places |= {(module, WHOLE) for module in whole}
        self.profile = cProfile.Profile(subcalls=False, builtins=False)
        for path in (*LIBRARY.rglob("*.py"), *HERE.glob("*.py")):
            text_of(path)  # as it is now: it may be edited while this runs

    def __enter__(self) -> Recording:
        self.profile.enable()
        return self

    def __exit__(self, *_: object) -> None:
        self.profile.disable()

    def sources(self) -> dict[str, str]:
        """The functions executed until now, with their fingerprints, by module."""
        self.profile.disable()  # counts those that have not returned
        for entry in self.profile.getstats():
            if isinstance(entry.code, CodeType) and entry.code.co_name != "<module>":
                name = module_of(Path(entry.code.co_filename).resolve())
                self.places.add((name, place_at(name, entry.code.co_firstlineno) if name else ""))
        found: dict[str, list[str]] = {}
        for name, inside in sorted(p for p in self.places if all(p)):
            found.setdefault(name, []).append(f"{inside}:{fingerprint(name, inside)}")
        self.profile.enable()
        return {name: " ".join(texts) for name, texts in found.items()}
