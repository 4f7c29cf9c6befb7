"""`bochner reproduce` and `bochner bench`: the scripts of a checkout of the project."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from bochner._checks import BochnerError

Quick = Annotated[bool, typer.Option(help="smaller sizes")]


def script(folder: str) -> Path:
    """`run.py` in a folder of the checkout that this package is installed from, or of the present directory."""
    places = [Path.cwd(), Path(__file__).resolve().parents[3]]
    found = next((p / folder / "run.py" for p in places if (p / folder / "run.py").is_file()), None)
    if found is None:
        raise BochnerError(
            f"The {folder} are in the project's source and not in the installed package; run this in a checkout."
        )
    return found


def run(folder: str, arguments: list[str]) -> None:
    raise typer.Exit(subprocess.run([sys.executable, str(script(folder)), *arguments], check=False).returncode)


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(help="experiments; all that are not done yet unless given")
    ] = None,
    quick: Quick = False,
    again: Annotated[bool, typer.Option(help="also those whose results exist already")] = False,
    listed: Annotated[bool, typer.Option("--list", help="list the figures and tables, run nothing")] = False,
) -> None:
    """The figures and tables of the five papers, each with its verdict.

    Example: `bochner reproduce --quick`, or one of them: `bochner reproduce positive_variance`
    """
    flags = [f"--{n}" for n, v in (("quick", quick), ("again", again), ("list", listed)) if v]
    run("experiments", [*(names or []), *flags])


def bench(
    names: Annotated[list[str] | None, typer.Argument(help="benchmarks; all of them unless given")] = None,
    quick: Quick = False,
) -> None:
    """Ratios against other packages and against the floor, on this machine.

    Example: `bochner bench attention --quick`
    """
    run("benchmarks", [*(names or []), *(["--quick"] if quick else [])])
