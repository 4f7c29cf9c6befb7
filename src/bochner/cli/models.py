"""`bochner demo`, `bochner advise`, `bochner convert`: pretrained models."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from bochner._checks import BochnerError, lookup
from bochner.cli.common import (
    KNOWN,
    Json,
    Threads,
    check_tokenizer,
    console,
    load,
    print_json,
    say,
    show,
    texts,
    use_threads,
)

Model = Annotated[str, typer.Argument(help="a directory with a transformers model, or minilm, smollm2")]


def demo(
    model: Annotated[str, typer.Option(help="minilm (an encoder) or smollm2 (a decoder)")] = "minilm",
    out: Annotated[Path, typer.Option(help="where to write the report")] = Path("bochner-demo.html"),
    quick: Annotated[bool, typer.Option(help="less text and fewer steps")] = False,
    threads: Threads = 1,
    as_json: Json = False,
) -> None:
    """Convert a real pretrained model and report how good the result is.

    Example: `bochner demo --quick --out report.html`
    """
    from bochner import demo as demonstration

    if model not in KNOWN:
        raise BochnerError(f"The --model must be 'minilm' or 'smollm2', got {model!r}.")
    use_threads(threads)
    head, rows, path = demonstration.run(say, out, model=model, quick=quick)
    if as_json:
        print_json({"model": model, "table": [dict(zip(head, row, strict=True)) for row in rows], "report": str(path)})
        return
    show(head, rows)
    console.print(f"report: {path}", highlight=False)


def advise(
    model: Model,
    text: Annotated[Path | None, typer.Option(help="text of the kind the model will see; default: books")] = None,
    passages: Annotated[int, typer.Option(min=2, help="how many passages to look at")] = 16,
    length: Annotated[int, typer.Option(min=1, help="the number of tokens you care about")] = 4096,
    window: Annotated[int | None, typer.Option(min=1, help="the window to consider; default by the model")] = None,
    sinks: Annotated[int | None, typer.Option(min=0, help="the sinks to consider; default by the model")] = None,
    threads: Threads = 1,
    as_json: Json = False,
) -> None:
    """Say what linear attention would do to a model, and whether to convert it.

    Example: `bochner advise my-model --text sample.txt --length 8192`
    """
    from bochner.hf.advise import advise as diagnose

    use_threads(threads)
    passages_found, _ = texts(text, passages)
    loaded, tokenizer = load(model)
    check_tokenizer(loaded, tokenizer, passages_found)
    advice = diagnose(
        loaded,
        passages_found,
        tokenizer=tokenizer,
        length=length,
        window=window,
        sinks=sinks,
        batch_size=max(1, min(4, len(passages_found) // 2)),
        progress=not as_json,
    )
    if as_json:
        print_json(advice.to_dict())
    else:
        print(advice)


def convert(
    model: Model,
    out: Annotated[Path, typer.Argument(help="where to save the converted model")],
    num_features: Annotated[
        int, typer.Option("--num-features", "--features", min=0, help="features per head; 0 is no kernel")
    ] = 64,
    feature_map: Annotated[str, typer.Option("--feature-map", "--map", help="the feature map")] = "auto",
    window: Annotated[int, typer.Option(min=0, help="exact local window; 0 is none")] = 0,
    sinks: Annotated[int, typer.Option(min=0, help="first tokens kept exact")] = 0,
    exact_heads: Annotated[str, typer.Option(help="a fraction of the heads, or auto")] = "0",
    text: Annotated[Path | None, typer.Option(help="calibration text, one passage a paragraph; default: books")] = None,
    passages: Annotated[int, typer.Option(min=1, help="how many passages to calibrate on")] = 48,
    steps: Annotated[int, typer.Option(min=0, help="distillation steps per layer; 0 is none")] = 0,
    threads: Threads = 1,
    as_json: Json = False,
) -> None:
    """Convert a model, print its plan and save it.

    Example: `bochner convert my-model my-linear-model --features 64 --window 32 --sinks 1`
    """
    from bochner.hf.convert import convert as to_linear
    from bochner.hf.io import plan_of
    from bochner.maps import FEATURE_MAPS

    use_threads(threads)
    # What can be refused is refused before anything is loaded or measured.
    if num_features and feature_map != "auto":
        lookup(FEATURE_MAPS, feature_map, "feature map")
    fraction = heads_of(exact_heads)
    if out.is_file():
        raise BochnerError(f"The place to save to, {str(out)!r}, is a file; give a directory.")
    found, source = texts(text, passages)
    loaded, tokenizer = load(model)
    check_tokenizer(loaded, tokenizer, found)
    to_linear(
        loaded,
        feature_map if num_features else None,
        num_features or None,
        window=window or None,
        sinks=sinks,
        exact_heads=fraction,
        calibration=found,
        tokenizer=tokenizer,
        distill={"steps": steps} if steps else None,
        progress=not as_json,
    )
    plan = plan_of(loaded)
    save(loaded, tokenizer, out)
    if as_json:
        print_json({"plan": plan.to_dict(), "calibration": source, "saved": str(out)})
        return
    console.print(str(plan), highlight=False)
    console.print(f"calibrated on {len(found)} passages of {source}", highlight=False)
    console.print(f"saved to {out}; call bochner.hf.register() before from_pretrained", highlight=False)


def heads_of(text: str) -> float | str:
    """The value of --exact-heads: a fraction, or auto."""
    if text == "auto":
        return text
    try:
        fraction = float(text)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        raise BochnerError(f"The --exact-heads must be a fraction between 0 and 1, or auto, got {text!r}.")
    return fraction


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """Write beside and move into place at the end: what is stopped half way leaves nothing half written."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as tmp:
        model.save_pretrained(tmp)
        tokenizer.save_pretrained(tmp)
        out.mkdir(exist_ok=True)
        for file in sorted(Path(tmp).iterdir()):
            os.replace(file, out / file.name)
