"""Kernel methods as scikit-learn estimators; they need the extra `bochner[sklearn]`."""

# ruff: noqa: E402
from bochner._checks import extra

extra("sklearn", "sklearn", "bochner.estimators")  # before anything here imports it
from bochner.estimators.features import RandomFeatures
from bochner.estimators.local import KernelDensity, NadarayaWatson
from bochner.estimators.nystrom import Centers
from bochner.estimators.pca import KernelPCA
from bochner.estimators.process import GaussianProcessRegressor
from bochner.estimators.ridge import KernelClassifier, KernelRidge, KernelRidgeCV

__all__ = [
    "Centers",
    "GaussianProcessRegressor",
    "KernelClassifier",
    "KernelDensity",
    "KernelPCA",
    "KernelRidge",
    "KernelRidgeCV",
    "NadarayaWatson",
    "RandomFeatures",
]
