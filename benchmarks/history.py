"""The benchmark results of a version, kept in one file, and what changed between two of them.

    python benchmarks/history.py keep            (benchmarks/history/VERSION.json from benchmarks/results)
    python benchmarks/history.py compare 0.1.0 0.2.0 [--least 1.2] [--only matvec]

Only figures of runs on like machines can be compared; what is printed are ratios of the second to the first that are at
least `--least`, or at most its inverse, the largest changes first. Names that end in `_s` or `ms` are times.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
HISTORY = HERE / "history"


def version() -> str:
    text = (HERE.parent / "src" / "bochner" / "_version.py").read_text(encoding="utf-8")
    return text.partition('__version__ = "')[2].partition('"')[0]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a result by its path; rows of a table are named by what tells them apart.

    >>> dict(leaves({"a": [{"kind": "x", "length": 8, "b": 1.5}, {"kind": "y", "length": 8, "b": 2.5}]}))
    {'a/x/length': 8.0, 'a/x/b': 1.5, 'a/y/length': 8.0, 'a/y/b': 2.5}
    """
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, (int, float)):
        yield path, float(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}/{key}" if path else str(key))
    elif isinstance(value, list):
        for name, inner in zip(row_names(value), value, strict=True):
            yield from leaves(inner, f"{path}/{name}")


def row_names(rows: list[Any]) -> list[str]:
    """Names of the rows of a table that stay when others are added: words first, then whole numbers, as few as needed.

    Rows that these do not tell apart, and plain lists, are numbered.

    >>> row_names([{"m": 8, "s": 0.1}, {"m": 16, "s": 0.1}]), row_names([0.5, 0.6])
    (['m=8', 'm=16'], ['0', '1'])
    """
    names = [""] * len(rows)
    if rows and all(isinstance(row, dict) for row in rows):
        keys = [k for k in rows[0] if all(isinstance(row.get(k), (str, int)) for row in rows)]
        keys.sort(key=lambda k: not isinstance(rows[0][k], (str, bool)))
        for key in keys:
            if len(set(names)) == len(names):
                break
            if len({row[key] for row in rows}) > 1:
                words = [row[key] if isinstance(row[key], str) else f"{key}={row[key]}" for row in rows]
                names = [f"{name}, {word}".removeprefix(", ") for name, word in zip(names, words, strict=True)]
    return names if all(names) and len(set(names)) == len(names) else [str(i) for i in range(len(rows))]


def keep() -> Path:
    """Write all results of the present version into one file."""
    found = {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in sorted((HERE / "results").glob("*.json"))}
    HISTORY.mkdir(exist_ok=True)
    target = HISTORY / f"{version()}.json"
    target.write_text(json.dumps({"version": version(), "results": found}, indent=1) + "\n", encoding="utf-8")
    return target


def read(name: str) -> dict[str, float]:
    path = HISTORY / f"{name}.json"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in HISTORY.glob("*.json"))) or "none"
        sys.exit(f"There are no results of version {name!r}; there are {known}.")
    return dict(leaves(json.loads(path.read_text(encoding="utf-8"))["results"]))


def changes(before: dict[str, float], after: dict[str, float], least: float) -> list[tuple[float, str]]:
    """Ratios of figures that both have and that changed by the factor, largest first."""
    found = []
    for name in before.keys() & after.keys():
        a, b = before[name], after[name]
        if a > 0 and b > 0 and abs(math.log(b / a)) >= math.log(least):
            found.append((b / a, name))
    return sorted(found, key=lambda pair: -abs(math.log(pair[0])))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("keep", help="keep the present results under the present version")
    compare = commands.add_parser("compare", help="what changed from one version to another")
    compare.add_argument("before")
    compare.add_argument("after")
    compare.add_argument("--least", type=float, default=1.2, help="the smallest factor that is printed")
    compare.add_argument("--only", default="", help="figures whose name contains this")
    options = parser.parse_args(arguments)
    if options.command == "keep":
        print(f"wrote {keep()}")
        return 0
    before, after = read(options.before), read(options.after)
    shown = [(r, n) for r, n in changes(before, after, options.least) if options.only in n]
    for ratio, name in shown:
        print(f"{ratio:8.2f}  {before[name]:12.4g} -> {after[name]:12.4g}  {name}")
    gone, new = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
    print(f"{len(shown)} figures changed by {options.least} or more; {len(gone)} are gone, {len(new)} are new")
    return 0


if __name__ == "__main__":
    sys.exit(main())
