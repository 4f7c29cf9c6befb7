"""Bochner: linear-time attention and kernel methods for PyTorch, with their error stated."""

from bochner import nn, parallel, theory
from bochner._checks import BochnerError, BochnerWarning
from bochner.attention import State, absorb, empty_state, linear_attention, merge, read
from bochner.features import FeatureMap, Features, kernel_estimate
from bochner.maps import feature_map
from bochner.oracle import attention_matrix, exact_attention

__version__ = "0.1.0.dev0"

__all__ = [
    "BochnerError",
    "BochnerWarning",
    "FeatureMap",
    "Features",
    "State",
    "absorb",
    "attention_matrix",
    "empty_state",
    "exact_attention",
    "feature_map",
    "kernel_estimate",
    "linear_attention",
    "merge",
    "nn",
    "parallel",
    "read",
    "theory",
]
