"""Kernel matrix-vector products with a stated error: `KernelOperator` and what is built on it."""

from .certificate import Cost, Estimate
from .distributed import dask_compute, dask_product
from .engines.paper import Constants
from .operator import KernelOperator
from .quotient import attention
from .reduction import Sparsity, head_to_tail, kernel_of_attention, reduce_attention, sparsity
from .spectrum import noisy_power_method, top_eigenvalues
from .stream import stream_product

__all__ = [
    "Constants",
    "Cost",
    "Estimate",
    "KernelOperator",
    "Sparsity",
    "attention",
    "dask_compute",
    "dask_product",
    "head_to_tail",
    "kernel_of_attention",
    "noisy_power_method",
    "reduce_attention",
    "sparsity",
    "stream_product",
    "top_eigenvalues",
]
