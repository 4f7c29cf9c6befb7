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
    preset: Annotated[str, typer.Option(help="small, or paper")] = "small",
    features: Annotated[int | None, typer.Option(min=1, help="features per head; default by the preset")] = None,
    window: Annotated[int | None, typer.Option(min=1, help="block of window+MAP; default by the preset")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for the map, as in learnable=S; may be repeated")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="of the model, the maps and the order of the data")] = 0,
    output: Annotated[Path | None, typer.Option(help="default runs/TASK-ATTENTION-PRESET-SEED")] = None,
    resume: Annotated[bool, typer.Option(help="go on where the run was stopped")] = False,
    start: Annotated[Path | None, typer.Option(help="output of a run whose encoder is taken over")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="default by the preset")] = None,
    tensorboard: Annotated[bool, typer.Option(help="write event files for TensorBoard too")] = False,
    threads: Annotated[int, typer.Option(min=0, help="threads; 0 is torch's choice")] = 1,
) -> None:
    """Train a fresh model on one of the papers' tasks and test it; the result is one JSON document.

    Example: `bochner train listops --attention fastfood_prf`, or `bochner train` for a list
    """
    import torch
    import transformers

    from bochner.tasks.models import attentions
    from bochner.tasks.registry import TASKS
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
    changes: dict[str, Any] = {} if steps is None else {"steps": steps}
    result = run(
        task,
        attention=attention,
        preset=preset,
        features=features,
        window=window,
        options=dict(parsed(text) for text in option or ()),
        seed=seed,
        output=output,
        resume=resume,
        start=start,
        tensorboard=tensorboard,
        **changes,
    )
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
