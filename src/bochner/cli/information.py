"""`bochner info` and `bochner fetch`: what is here, and what can be had."""

from __future__ import annotations

from typing import Annotated

import typer

from bochner.cli.common import Json, print_json, show


def info(as_json: Json = False) -> None:
    """Show versions, machine, extras and cache, as a bug report needs them.

    Example: `bochner info --json`
    """
    from bochner.report.machine import PACKAGES, facts

    found = facts()
    if as_json:
        print_json(found)
        return
    packages = found.pop("packages")
    found["cached"] = ", ".join(found["cached"]) or "nothing"
    for name, value in found.items():
        print(f"{name:12s} {value if value is not None else 'none'}")
    for name, version in packages.items():
        what = version or f"not installed: pip install 'bochner[{PACKAGES[name]}]'"
        print(f"  {name:18s} {what}")


def fetch(
    name: Annotated[str, typer.Argument(help="name of a model or data set; leave it out for a list")] = "",
    as_json: Json = False,
) -> None:
    """Fetch a pinned model or data set into the cache, and print its path.

    Example: `bochner fetch minilm`
    """
    from bochner import data

    if name:
        path = data.fetch(name)
        print_json({"name": name, "path": str(path)}) if as_json else print(path)
        return
    if as_json:
        print_json({n: a._asdict() for n, a in data.ARTEFACTS.items()})
        return
    rows = [[n, a.tool, f"{a.package} {a.version}", str(a.megabytes), a.what] for n, a in data.ARTEFACTS.items()]
    show(["name", "from", "package", "MB", "what"], rows)
