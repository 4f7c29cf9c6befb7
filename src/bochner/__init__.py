"""Bochner: linear-time attention and kernel methods for PyTorch, with their error stated."""

from bochner._checks import BochnerError, BochnerWarning
from bochner.features import FeatureMap, Features, kernel_estimate
from bochner.maps import feature_map

__version__ = "0.1.0.dev0"

__all__ = [
    "BochnerError",
    "BochnerWarning",
    "FeatureMap",
    "Features",
    "feature_map",
    "kernel_estimate",
]
