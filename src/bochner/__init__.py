"""Bochner: linear-time attention and kernel methods for PyTorch, with their error stated."""

import sys
from typing import TYPE_CHECKING

from bochner import attention, data, feedforward, maps, nn, theory
from bochner._checks import BochnerError, BochnerWarning, MissingExtraError
from bochner._lazy import lazy
from bochner._version import __version__
from bochner.attention import (
    State,
    absorb,
    attention_matrix,
    empty_state,
    exact_attention,
    linear_attention,
    merge,
    parallel,
    read,
)
from bochner.feedforward import polyfit, taylor
from bochner.maps import (
    FeatureMap,
    Features,
    clustered,
    feature_map,
    generalized,
    hybrid,
    kernel_estimate,
    learned,
    local,
)
from bochner.maps import polynomial as sketches

if TYPE_CHECKING:
    from bochner import matvec
    from bochner.matvec import Estimate, KernelOperator

# Modules of a package that also have a short name: `from bochner.parallel import ...` works as `bochner.parallel` does.
for _module in (clustered, generalized, hybrid, learned, local, parallel, polyfit, taylor):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
sys.modules[f"{__name__}.sketches"] = sketches

# Imported when first asked for: they need an extra (transformers, scikit-learn, typer ...) or the larger half of scipy.
_LAZY = {
    "matvec": "bochner.matvec",
    "KernelOperator": "bochner.matvec:KernelOperator",
    "Estimate": "bochner.matvec:Estimate",
    "hf": "bochner.hf",
    "cli": "bochner.cli",
    "estimators": "bochner.estimators",
    "sampling": "bochner.sampling",
    "report": "bochner.report",
    "tasks": "bochner.tasks",
    "convert": "bochner.hf.convert:convert",
    "revert": "bochner.hf.convert:revert",
    "advise": "bochner.hf.advise:advise",
    "distill": "bochner.hf.distill:distill",
    "sparsity": "bochner.matvec.reduction:sparsity",
}

__all__ = [
    "BochnerError",
    "BochnerWarning",
    "Estimate",
    "FeatureMap",
    "Features",
    "KernelOperator",
    "MissingExtraError",
    "State",
    "__version__",
    "absorb",
    "advise",
    "attention",
    "attention_matrix",
    "clustered",
    "convert",
    "data",
    "distill",
    "empty_state",
    "estimators",
    "exact_attention",
    "feature_map",
    "feedforward",
    "generalized",
    "hf",
    "hybrid",
    "kernel_estimate",
    "learned",
    "linear_attention",
    "local",
    "maps",
    "matvec",
    "merge",
    "nn",
    "parallel",
    "polyfit",
    "read",
    "revert",
    "sampling",
    "sketches",
    "sparsity",
    "tasks",
    "taylor",
    "theory",
]


__getattr__, __dir__ = lazy(__name__, _LAZY)
