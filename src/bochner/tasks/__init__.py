"""The papers' tasks on real data, and `train`: one call from a name to a tested model.

>>> from bochner import tasks
>>> sorted(tasks.TASKS)[:4]
['image', 'listops', 'lm', 'lm_pieces']
"""

from importlib import import_module
from typing import Any

from bochner.tasks.base import Collator, Preset, Task
from bochner.tasks.registry import TASKS, dataset, preset_of, task

# These need transformers and are imported when first asked for.
_LAZY = {"attentions": "models", "build": "models", "choose": "models", "train": "training"}
__all__ = [
    "TASKS",
    "Collator",
    "Preset",
    "Task",
    "attentions",
    "build",
    "choose",
    "dataset",
    "preset_of",
    "task",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'bochner.tasks' has no attribute {name!r}")
    value = getattr(import_module(f"bochner.tasks.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
