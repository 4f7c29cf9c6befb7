"""Bochner: linear-time attention and kernel methods for PyTorch, with their error stated."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bochner import attention, data, feedforward, maps, nn, theory
from bochner._checks import BochnerError, BochnerWarning, MissingExtraError
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


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'bochner' has no attribute {name!r}")
    module, _, member = _LAZY[name].partition(":")
    try:
        found = import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name and missing.name.startswith("bochner"):
            raise
        raise MissingExtraError(
            f"bochner.{name} needs the package {missing.name!r}; install the extra it belongs to, for example: "
            "pip install 'bochner[hf,sklearn,cli,report]'"
        ) from missing
    value = getattr(found, member) if member else found
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
