"""What a user brings to `train`, looked at before anything is written: an attention, a task, its examples."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from bochner._checks import ArgumentError, BochnerError
from bochner.maps import FEATURE_MAPS, FeatureMap, register_map
from bochner.tasks.base import IGNORE, Preset, Task


def map_name(attention: Any) -> str:
    """The name of an attention; a map's class, or an instance that every layer gets a copy of, is registered first."""
    if isinstance(attention, str):
        return attention
    if isinstance(attention, FeatureMap):
        name = f"{type(attention).__name__}Copy"
        FEATURE_MAPS[name] = copies_of(attention)
        return name
    if not (isinstance(attention, type) and issubclass(attention, FeatureMap)):
        raise ArgumentError(
            "The 'attention' of train must be a name, a subclass of bochner.FeatureMap or an instance of one, got "
            f"{type(attention).__name__}."
        )
    for name, known in FEATURE_MAPS.items():
        if known is attention:
            return name
    FEATURE_MAPS.pop(attention.__name__, None)  # the same class defined anew, as in a notebook
    register_map(attention.__name__, attention)
    return attention.__name__


def copies_of(phi: FeatureMap) -> type[FeatureMap]:
    """A class whose instances are copies of a map, whatever number of features they are asked for."""

    class Copy(type(phi)):  # type: ignore[misc]
        copied_dim = phi.dim

        def __init__(self, dim: int, num_features: int, *, num_heads: int | None = None) -> None:
            torch.nn.Module.__init__(self)
            self.__dict__.update(copy.deepcopy(phi.__dict__))

    Copy.__name__ = f"{type(phi).__name__}Copy"
    return Copy


def check_map(task: Task, name: str, preset: Preset, options: Any, features: int) -> None:
    """Refuse a map of another head size, and one that must see later keys for a task that must not."""
    cls = FEATURE_MAPS.get(name)
    size = preset.width // preset.heads
    made_for = getattr(cls, "copied_dim", size)
    if made_for != size:
        raise BochnerError(
            f"The map given to train has 'dim' {made_for} and the heads of the model have size {size}; make it with "
            f"dim={size}, or change 'width' or 'heads'."
        )
    if not task.is_causal or cls is None or cls.check_causal is FeatureMap.check_causal:
        return
    from bochner.maps import feature_map

    try:
        feature_map(name, size, features, **options).check_causal()
    except BochnerError as error:
        raise BochnerError(f"The task {task.name!r} is causal, and {name!r} cannot be: {error}") from error


def check_examples(task: Task, preset: Preset, data: Any, collate: Any) -> None:
    """Refuse a first batch that the model could not take, in one sentence."""
    if not hasattr(data, "__len__") or not len(data):
        raise BochnerError(f"The task {task.name!r} has no examples to train on; its 'load' must return a data set.")
    try:
        batch = collate([data[i] for i in range(min(2, len(data)))])
    except (KeyError, TypeError, IndexError, RuntimeError, ValueError) as error:
        raise BochnerError(
            f"The examples of the task {task.name!r} cannot be made a batch: {error!r}; each must be a dict with "
            "'input_ids' and 'labels', or the task needs a 'collate' of its own."
        ) from error
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
    top = task.classes if labels.ndim == 1 else task.symbols
    wrong = labels[(labels != IGNORE) & ((labels < 0) | (labels >= top))]
    if int(ids.max()) >= task.symbols or int(ids.min()) < 0 or len(wrong):
        raise BochnerError(
            f"The examples of the task {task.name!r} have ids up to {int(ids.max())} and labels up to "
            f"{int(labels.max())}; with its 'vocabulary' of {task.vocabulary} and 4 special tokens before it ids end "
            f"at {task.symbols - 1}, and labels at {top - 1}."
        )
