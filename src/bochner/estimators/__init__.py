"""Kernel methods as scikit-learn estimators: random features, regression, densities, principal components.

They take part in pipelines, `clone`, `GridSearchCV` and pickling like scikit-learn's own, and need the extra
`bochner[sklearn]`. The kernel is Gaussian, `exp(-gamma |x - y|^2)`, unless a feature map says otherwise.
"""

from bochner.estimators.density import KernelDensity
from bochner.estimators.features import RandomFeatures, components_needed
from bochner.estimators.pca import KernelPCA
from bochner.estimators.regression import GaussianProcessRegressor, KernelRidge, NadarayaWatson

__all__ = [
    "GaussianProcessRegressor",
    "KernelDensity",
    "KernelPCA",
    "KernelRidge",
    "NadarayaWatson",
    "RandomFeatures",
    "components_needed",
]
