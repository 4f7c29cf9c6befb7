"""Bochner: linear-time attention and kernel methods for PyTorch, with their error stated."""

from typing import TYPE_CHECKING

from bochner import attention, data, maps, nn, theory
from bochner._checks import BochnerError, BochnerWarning, MissingExtraError
from bochner._lazy import lazy
from bochner._version import __version__
from bochner.attention import (
    PreparedMap,
    State,
    absorb,
    attention_matrix,
    empty_state,
    exact_attention,
    linear_attention,
    merge,
    read,
)
from bochner.certified import Certified, certified_attention
from bochner.maps import FeatureMap, Features, feature_map, kernel_estimate, register_map

if TYPE_CHECKING:
    from bochner import matvec
    from bochner.matvec import Estimate, KernelOperator

# Imported when first asked for: they need an extra (transformers, scikit-learn, typer ...) or the larger half of scipy.
_LAZY = {
    "matvec": "bochner.matvec",
    "KernelOperator": "bochner.matvec:KernelOperator",
    "Estimate": "bochner.matvec:Estimate",
    "hf": "bochner.hf",
    "migrate": "bochner.migrate",
    "cli": "bochner.cli",
    "estimators": "bochner.estimators",
    "sampling": "bochner.sampling",
    "papers": "bochner.papers",
    "report": "bochner.report",
    "tasks": "bochner.tasks",
    "Calibration": "bochner.hf.config:Calibration",
    "Conversion": "bochner.hf.conversion:Conversion",
    "Distillation": "bochner.hf.config:Distillation",
    "Plan": "bochner.hf.plan:Plan",
    "Recipe": "bochner.hf.config:Recipe",
    "Target": "bochner.hf.config:Target",
    "convert": "bochner.hf.conversion:convert",
    "diagnose": "bochner.hf.diagnose:diagnose",
    "distill": "bochner.hf.distill:distill",
    "revert": "bochner.hf.conversion:revert",
    "search": "bochner.hf.search:search",
    "train": "bochner.tasks.training:train",
}

__all__ = [
    "BochnerError",
    "BochnerWarning",
    "Calibration",
    "Certified",
    "Conversion",
    "Distillation",
    "Estimate",
    "FeatureMap",
    "Features",
    "KernelOperator",
    "MissingExtraError",
    "Plan",
    "PreparedMap",
    "Recipe",
    "State",
    "Target",
    "__version__",
    "absorb",
    "attention",
    "attention_matrix",
    "certified_attention",
    "convert",
    "data",
    "diagnose",
    "distill",
    "empty_state",
    "estimators",
    "exact_attention",
    "feature_map",
    "hf",
    "kernel_estimate",
    "linear_attention",
    "maps",
    "matvec",
    "merge",
    "nn",
    "read",
    "register_map",
    "revert",
    "sampling",
    "search",
    "tasks",
    "theory",
    "train",
]


__getattr__, __dir__ = lazy(__name__, _LAZY)
