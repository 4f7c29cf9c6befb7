"""Closed-form errors of the estimators that have one, and their inverses: how many features for a target error.

Pure functions of tensors of shape (..., d), computed in float64 in the log domain. ``x`` and ``y`` are already scaled.
Every formula is tested against Monte Carlo; where it departs from its paper, the errata in the documentation say why.
"""

# isort: off
from bochner.theory.hybrid import (
    Moments, angular_moments, gaussian_moments, hybrid_split, max_relative_error, max_relative_error_angular,
    max_relative_error_angular_bound, mse_angular_hybrid, mse_complex, mse_gaussian_hybrid, mse_hybrid, mse_mixture,
    relative_error_angular, relative_error_hybrid,
)  # fmt: skip
from bochner.theory.layers import (
    allocate_features, bernstein_bound, gelu_second_derivative, gelu_second_sup, gelu_taylor,
    geometric_law, optimal_law, poisson_law, variance_taylor,
)  # fmt: skip
from bochner.theory.learned import (
    gmm_prf, gmm_rks, mse_fourier, mse_gmm_prf, mse_gmm_rks, mse_local_gaussian, mse_local_laplace,
)  # fmt: skip
from bochner.theory.polynomial import (
    mse_maclaurin, mse_sum_poly, mse_tensor_sketch, mse_tensor_sketch_matrix, polynomial_features_needed,
    polynomial_tail_bound, tensor_sketch_bound,
)  # fmt: skip
from bochner.theory.rank import rank_floor
from bochner.theory.softmax import (
    Estimator, block_pairs, dense_a, features_needed, features_uniform, kernel_value, log_mse, mse_dense,
    mse_hyperbolic, mse_optimal, mse_positive, mse_regularized, mse_trig, optimal_A, orthogonal_gap,
    orthogonal_gap_bound, regularized_ratio, regularized_ratio_bound, regularized_tail_bound, relative_error,
)  # fmt: skip

__all__ = [
    "Estimator", "Moments", "allocate_features", "angular_moments", "bernstein_bound", "block_pairs", "dense_a",
    "features_needed", "features_uniform", "gaussian_moments", "gelu_second_derivative", "gelu_second_sup",
    "gelu_taylor", "geometric_law", "gmm_prf", "gmm_rks", "hybrid_split", "kernel_value", "log_mse",
    "max_relative_error", "max_relative_error_angular", "max_relative_error_angular_bound", "mse_angular_hybrid",
    "mse_complex", "mse_dense", "mse_fourier", "mse_gaussian_hybrid", "mse_gmm_prf", "mse_gmm_rks", "mse_hybrid",
    "mse_hyperbolic", "mse_local_gaussian", "mse_local_laplace", "mse_maclaurin", "mse_mixture", "mse_optimal",
    "mse_positive", "mse_regularized", "mse_sum_poly", "mse_tensor_sketch", "mse_tensor_sketch_matrix", "mse_trig",
    "optimal_A", "optimal_law", "orthogonal_gap", "orthogonal_gap_bound", "poisson_law", "polynomial_features_needed",
    "polynomial_tail_bound", "rank_floor", "regularized_ratio", "regularized_ratio_bound", "regularized_tail_bound",
    "relative_error", "relative_error_angular", "relative_error_hybrid", "tensor_sketch_bound", "variance_taylor",
]  # fmt: skip
