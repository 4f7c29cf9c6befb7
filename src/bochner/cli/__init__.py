"""The command line: `bochner demo`, `search`, `convert`, `train`, `plan`, `fetch`, `info`.

Results go to the standard output, as text or with `--json` as one JSON document; what is being done goes to the
standard error stream. Exit codes: 0 done, 1 refused or failed with one sentence (a model, a file), 2 wrong usage (a
command, an option or its value), 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import sys
from typing import Annotated

from bochner._checks import ArgumentError, BochnerError, extra

for package in ("typer", "rich"):
    extra(package, "cli", "The command line")
import typer  # noqa: E402
from rich.markup import escape  # noqa: E402

from bochner._version import __version__  # noqa: E402
from bochner.cli import information, models  # noqa: E402
from bochner.cli.common import log  # noqa: E402
from bochner.tasks.command import train  # noqa: E402

HELP = """Linear-time attention and kernel methods, with their error stated.

Begin with `bochner demo`, which converts a real pretrained model and writes a report. Then `bochner search DIRECTORY`
says whether a model of yours is worth converting, and `bochner convert DIRECTORY OUT` does it.
"""
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help=HELP,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def version(wanted: bool) -> None:
    if wanted:
        print(f"bochner {__version__}")
        raise typer.Exit


@app.callback()
def root(
    wanted: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="print the version and leave")
    ] = False,
) -> None:
    pass


app.command()(models.demo)
app.command()(models.search)
app.command()(models.convert)
app.command("train")(train)
app.add_typer(information.plan, name="plan")
app.command()(information.fetch)
app.command()(information.info)


def main() -> None:
    """Entry point: errors of the library are one line, not a traceback."""
    try:
        app()
    except BochnerError as error:
        log.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise SystemExit(2 if isinstance(error, ArgumentError) else 1) from None
    except BrokenPipeError:  # the reader of a pipe has left
        sys.stderr.close()
        raise SystemExit(1) from None
    except OSError as error:  # a full disk, a file that may not be read or written
        where = f" ({error.filename})" if error.filename else ""
        log.print(
            f"[bold red]error:[/] {escape(f'{error.strerror or error}{where}')}.", highlight=False, soft_wrap=True
        )
        raise SystemExit(1) from None
