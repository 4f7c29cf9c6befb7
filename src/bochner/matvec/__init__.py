"""Kernel matrix-vector products with a stated error: `KernelOperator` and what is built on it."""

from .certificate import Cost, Estimate
from .operator import KernelOperator
from .paper import Constants

__all__ = ["Constants", "Cost", "Estimate", "KernelOperator"]
