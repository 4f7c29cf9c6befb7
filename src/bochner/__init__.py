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
    "cli": "bochner.cli",
    "estimators": "bochner.estimators",
    "sampling": "bochner.sampling",
    "papers": "bochner.papers",
    "feedforward": "bochner.feedforward",
    "report": "bochner.report",
    "tasks": "bochner.tasks",
    "convert": "bochner.hf.convert:convert",
    "revert": "bochner.hf.convert:revert",
    "advise": "bochner.hf.advise:advise",
    "distill": "bochner.hf.distill:distill",
    "sparsity": "bochner.papers.attention_kernel:sparsity",
}

__all__ = [
    "BochnerError",
    "BochnerWarning",
    "Estimate",
    "FeatureMap",
    "Features",
    "KernelOperator",
    "MissingExtraError",
    "PreparedMap",
    "State",
    "__version__",
    "absorb",
    "advise",
    "attention",
    "attention_matrix",
    "convert",
    "data",
    "distill",
    "empty_state",
    "estimators",
    "exact_attention",
    "feature_map",
    "feedforward",
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
    "sparsity",
    "tasks",
    "theory",
]


__getattr__, __dir__ = lazy(__name__, _LAZY)
