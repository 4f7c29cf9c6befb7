"""The papers' tasks, tasks that need attention, your own, and `train`: one call from a task to a tested model.

>>> from bochner import tasks
>>> sorted(tasks.TASKS)[:4]
['copying', 'image', 'induction', 'listops']
"""

from bochner._lazy import lazy
from bochner.tasks.base import SPECIAL, Collator, Preset, Task
from bochner.tasks.registry import TASKS, dataset, preset_of, task

# These need transformers and are imported when first asked for.
_LAZY = {"attentions": "models", "build": "models", "choose": "models", "load": "training", "train": "training"}
__all__ = [
    "SPECIAL",
    "TASKS",
    "Collator",
    "Preset",
    "Task",
    "attentions",
    "build",
    "choose",
    "dataset",
    "load",
    "preset_of",
    "ruler",
    "task",
    "train",
]


__getattr__, __dir__ = lazy(
    __name__,
    {**{name: f"bochner.tasks.{module}:{name}" for name, module in _LAZY.items()}, "ruler": "bochner.tasks.ruler"},
)
