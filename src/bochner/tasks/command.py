"""`bochner train`: the command line of `train`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from bochner._checks import ArgumentError


def model(help: str, *names: str, panel: str = "Changes of the preset", **limits: Any) -> Any:
    """An option in a panel of the help."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **limits)


of_run = partial(model, panel="The run")


def train(
    task: Annotated[str, typer.Argument(help="name of the task; leave it out for a list")] = "",
    attention: Annotated[
        str, typer.Option(help="MAP, window+MAP, decay+MAP, paper+MAP, exact, identity, or a peer")
    ] = "exact",
    preset: Annotated[str, typer.Option(help="sizes and settings: small, medium or paper")] = "small",
    show: Annotated[bool, typer.Option("--show", help="print the preset and leave")] = False,
    features: Annotated[int | None, model("features of every head", min=1)] = None,
    window: Annotated[int | None, model("block of window+MAP", min=1)] = None,
    option: Annotated[list[str] | None, model("NAME=VALUE for the map, such as learnable=S; may be repeated")] = None,
    layers: Annotated[int | None, model("layers", min=1)] = None,
    width: Annotated[int | None, model("width of the layers", min=1)] = None,
    rate: Annotated[float | None, model("learning rate", min=0)] = None,
    batch: Annotated[int | None, model("sequences in a step", min=1)] = None,
    steps: Annotated[int | None, model("training steps", min=1)] = None,
    redraw: Annotated[int | None, model("steps between redraws of the features; 0 for none", min=0)] = None,
    precision: Annotated[str | None, model("float32 or bfloat16")] = None,
    start: Annotated[Path | None, model("a finished run whose encoder to start from")] = None,
    seed: Annotated[int, of_run("seed of the weights, the maps and the order of the data", min=0)] = 0,
    output: Annotated[Path | None, of_run("directory; default runs/TASK-ATTENTION-PRESET-SEED")] = None,
    resume: Annotated[bool, of_run("continue a run that was stopped", "--resume")] = False,
    tensorboard: Annotated[bool, of_run("also write event files for TensorBoard", "--tensorboard")] = False,
    threads: Annotated[int, of_run("number of threads; 0 lets torch choose", min=0)] = 1,
) -> None:
    """Train a fresh model on a task, test it, and print the result as JSON.

    Example: `bochner train listops --attention fastfood_prf`
    """
    import torch

    from bochner.tasks.models import attentions
    from bochner.tasks.registry import TASKS, preset_of
    from bochner.tasks.registry import task as task_of
    from bochner.tasks.training import is_first
    from bochner.tasks.training import train as run

    if not task:
        for name, entry in TASKS.items():
            typer.echo(f"{name:15s} {entry.what} ({entry.metric})")
        typer.echo(
            "attentions: " + " ".join(a for a in attentions() if "+" not in a) + " window+MAP decay+MAP paper+MAP"
        )
        return
    if threads:
        torch.set_num_threads(threads)
    given: dict[str, Any] = {"features": features, "window": window, "learning_rate": rate, "batch": batch}
    given |= {"steps": steps, "layers": layers, "width": width, "precision": precision, "redraw": redraw}
    given |= {"start": None if start is None else str(start), "options": dict(parsed(text) for text in option or ())}
    changes: dict[str, Any] = {k: v for k, v in given.items() if v not in (None, {})}
    if show:
        typer.echo(str(preset_of(task_of(task), preset, **changes)))
        return
    report = "tensorboard" if tensorboard else "bar"
    result = run(task, attention, preset, seed=seed, output=output, resume=resume, report=report, **changes)
    if not is_first():
        return
    shown = {k: result[k] for k in ("task", "attention", "seed", "metrics", "baseline", "seconds") if k in result}
    typer.echo(json.dumps(shown, indent=1))


def parsed(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as JSON if it is any, else as a string.

    >>> parsed("learnable=S"), parsed("shared_noise=true"), parsed("learnable=null")
    (('learnable', 'S'), ('shared_noise', True), ('learnable', None))
    """
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ArgumentError(f"An --option is NAME=VALUE, as in learnable=S; got {text!r}.")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
