"""`bochner train`: the command line of `train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from bochner._checks import ArgumentError


def train(
    task: Annotated[str, typer.Argument(help="the task; without one, list tasks and attentions")] = "",
    attention: Annotated[str, typer.Option(help="any map, window+MAP, exact, identity, or a peer")] = "exact",
    preset: Annotated[str, typer.Option(help="small, and where there is one medium or paper")] = "small",
    features: Annotated[int | None, typer.Option(min=1, help="features per head; default by the preset")] = None,
    window: Annotated[int | None, typer.Option(min=1, help="block of window+MAP; default by the preset")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for the map, as in learnable=S; may be repeated")
    ] = None,
    rate: Annotated[float | None, typer.Option(min=0, help="learning rate; this and the next by the preset")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="sequences of a step")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="steps of the training")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="layers of the model")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="width of the model")] = None,
    precision: Annotated[str | None, typer.Option(help="float32, or bfloat16")] = None,
    redraw: Annotated[int | None, typer.Option(min=0, help="steps between redraws of the features, 0 for none")] = None,
    seed: Annotated[int, typer.Option(min=0, help="of the model, the maps and the order of the data")] = 0,
    output: Annotated[Path | None, typer.Option(help="default runs/TASK-ATTENTION-PRESET-SEED")] = None,
    resume: Annotated[bool, typer.Option(help="go on where the run was stopped")] = False,
    start: Annotated[Path | None, typer.Option(help="output of a run whose encoder is taken over")] = None,
    tensorboard: Annotated[bool, typer.Option(help="write event files for TensorBoard too")] = False,
    show: Annotated[bool, typer.Option("--show", help="print the preset and its departures from the paper")] = False,
    threads: Annotated[int, typer.Option(min=0, help="threads; 0 is torch's choice, slow if the cores are busy")] = 1,
) -> None:
    """Train a fresh model on a task and test it; the result is one JSON document.

    Example: `bochner train listops --attention fastfood_prf`, or `bochner train` for a list
    """
    import torch
    import transformers

    from bochner.tasks.models import attentions
    from bochner.tasks.registry import TASKS, preset_of
    from bochner.tasks.registry import task as task_of
    from bochner.tasks.training import is_first
    from bochner.tasks.training import train as run

    if not task:
        for name, entry in TASKS.items():
            typer.echo(f"{name:15s} {entry.what} ({entry.metric})")
        typer.echo("attentions: " + " ".join(a for a in attentions() if "+" not in a) + " window+MAP")
        return
    if threads:
        torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()  # of files being written; the bar of the training stays
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
