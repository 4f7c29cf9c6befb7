"""Kernel matrix-vector products with a stated error: `KernelOperator` and what it is made of."""

from .choose import Plan
from .kernels import Gradients, Kernel
from .lowrank import Factor, Preconditioner, pivoted_cholesky, ridge_factor
from .operator import Estimate, KernelOperator
from .solve import LogDet, Solution, conjugate_gradients, logdet

__all__ = [
    "Estimate",
    "Factor",
    "Gradients",
    "Kernel",
    "KernelOperator",
    "LogDet",
    "Plan",
    "Preconditioner",
    "Solution",
    "conjugate_gradients",
    "logdet",
    "pivoted_cholesky",
    "ridge_factor",
]
