"""Kernel matrix-vector products with a stated error: `KernelOperator` and what it is made of."""

from .kernels import Gradients, Kernel
from .lowrank import Factor, Preconditioner, pivoted_cholesky
from .old import *  # noqa: F403
from .old.operator import KernelOperator
from .solve import LogDet, Solution, conjugate_gradients, logdet

__all__ = [
    "Factor",
    "Gradients",
    "Kernel",
    "KernelOperator",
    "LogDet",
    "Preconditioner",
    "Solution",
    "conjugate_gradients",
    "logdet",
    "pivoted_cholesky",
]
