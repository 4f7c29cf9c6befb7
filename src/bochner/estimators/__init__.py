"""Kernel methods as scikit-learn estimators: regression, classification, densities, components, random features.

They take part in pipelines, `clone`, `GridSearchCV` and pickling like scikit-learn's own, and need the extra
`bochner[sklearn]`.
"""

from bochner.estimators.nystrom import Centers
from bochner.estimators.process import GaussianProcessRegressor
from bochner.estimators.ridge import KernelClassifier, KernelRidge

__all__ = [
    "Centers",
    "GaussianProcessRegressor",
    "KernelClassifier",
    "KernelRidge",
]
