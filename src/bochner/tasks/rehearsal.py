"""What can be known to go wrong is said before the first step: of the examples, the batches, the model, the metric."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bochner._checks import BochnerError
from bochner.tasks.base import IGNORE, Preset, Task, figures

MISTAKES = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)  # those of a user's code


def splits(task: Task, preset: Preset, collate: Callable[..., dict[str, Tensor]]) -> dict[str, Any]:
    """The data sets of a task by split; refused if one is empty, or cannot be made batches that a model could take."""
    found = {}
    for split in ("train", "validation", "test", *task.further):
        found[split] = data = task.load(preset, split)
        if not hasattr(data, "__len__") or not len(data):
            raise BochnerError(
                f"The task {task.name!r} has no examples in its split {split!r}; its 'load' must return a data set "
                "with a length for 'train', 'validation' and 'test'."
            )
        try:
            batch = collate([data[i] for i in range(min(2, len(data)))])
        except MISTAKES as error:
            raise BochnerError(
                f"The examples of the task {task.name!r} cannot be made a batch: {error!r}; each must be a dict with "
                "'input_ids' and 'labels', or the task needs a 'collate' of its own."
            ) from error
        check_batch(task, batch)
    return found


def check_batch(task: Task, batch: dict[str, Tensor]) -> None:
    """Refuse a batch that the model could not take."""
    rows = {k: len(v) for k, v in batch.items() if isinstance(v, Tensor) and v.ndim}
    needed = {"labels"} | ({"own": set(), "ctc": {"input_features"}}.get(task.kind, {"input_ids"}))
    if len(set(rows.values())) != 1 or needed - set(rows):
        raise BochnerError(
            f"A batch of the task {task.name!r} must have {' and '.join(map(repr, sorted(needed)))}, and as many rows "
            f"of all, got {rows}."
        )
    if task.kind in ("own", "ctc"):
        return
    ids, labels = batch["input_ids"], batch["labels"]
    wanted = (1,) if task.kind in ("classify", "match") else (2,)
    if ids.ndim != 2 or labels.ndim not in wanted or (labels.ndim == 2 and labels.shape != ids.shape):
        raise BochnerError(
            f"A batch of the {task.kind} task {task.name!r} needs 'input_ids' (b, n) and 'labels' "
            f"{'(b,)' if wanted == (1,) else '(b, n)'}, got {tuple(ids.shape)} and {tuple(labels.shape)}."
        )
    if ids.is_floating_point() or labels.is_floating_point():
        raise BochnerError(
            f"The 'input_ids' and 'labels' of the {task.kind} task {task.name!r} must be ints, got {ids.dtype} and "
            f"{labels.dtype}."
        )
    top = task.classes if labels.ndim == 1 else task.symbols
    wrong = labels[(labels != IGNORE) & ((labels < 0) | (labels >= top))]
    if int(ids.max()) >= task.symbols or int(ids.min()) < 0 or len(wrong):
        raise BochnerError(
            f"The examples of the task {task.name!r} have ids up to {int(ids.max())} and labels up to "
            f"{int(labels.max())}; with its 'vocabulary' of {task.vocabulary} and 4 special tokens before it ids end "
            f"at {task.symbols - 1}, and labels at {top - 1}."
        )


def rehearse(task: Task, model: nn.Module, trainer: Any) -> float:
    """Seconds of a training step: two of them, and a look by the metric, by a copy that leaves no trace."""
    data, size = trainer.train_dataset, trainer.args.per_device_train_batch_size
    batch = trainer.data_collator([data[i % len(data)] for i in range(size)])
    batch = {k: v.to(trainer.args.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    took = []
    with torch.random.fork_rng(devices=[]):
        trial = copy.deepcopy(model).to(trainer.args.device).train()
        try:
            for _ in range(2):
                begin = time.perf_counter()
                part(trial(**batch), "loss").backward()
                took.append(time.perf_counter() - begin)
            with torch.no_grad():
                logits = part(trial.eval()(**batch), "logits")
        except BochnerError:
            raise
        except MISTAKES as error:
            shapes = ", ".join(f"{k} {tuple(v.shape)}" for k, v in batch.items() if isinstance(v, Tensor))
            raise BochnerError(
                f"The model of the task {task.name!r} cannot be trained on a batch of {shapes}: {error!r}; it must "
                "take these and return a scalar 'loss' and 'logits'."
            ) from error
        if callable(task.metric):
            scored(task, logits, batch["labels"])
    return min(took)


def part(out: Any, name: str) -> Any:
    """The loss or the logits of what a model returned."""
    return out[name] if isinstance(out, dict) else getattr(out, name)


def first(logits: Any) -> Tensor:
    found: Tensor = logits[0] if isinstance(logits, tuple) else logits
    return found


def scored(task: Task, logits: Any, labels: Tensor) -> Tensor:
    """What `judged` needs of a batch: the figures of its kind, or the task's own, one for each example."""
    logits = first(logits)
    if isinstance(task.metric, str):
        return figures(task, logits, labels)
    own = torch.as_tensor(task.metric(logits, labels))
    if own.shape != (len(logits),):
        raise BochnerError(
            f"The metric of the task {task.name!r} must return one figure for each of the {len(logits)} examples of a "
            f"batch, got shape {tuple(own.shape)}."
        )
    return own.float()
