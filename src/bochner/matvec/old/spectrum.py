"""The largest eigenvalues of a kernel operator."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.sparse.linalg import eigsh

from ..._checks import BochnerError, make_generator, one_of, positive_int
from .operator import KernelOperator


def top_eigenvalues(K: KernelOperator, k: int = 1, *, method: str = "eigsh", tol: float = 1e-3) -> np.ndarray:
    """The k largest eigenvalues of a symmetric kernel operator, descending, each within eps of the true ones.

    By Weyl's inequality an operator within eps of K in norm has eigenvalues within eps. "eigsh" is Lanczos,
    "power" the noisy power method (k = 1).
    """
    one_of(method, "method", "top_eigenvalues", ("eigsh", "power"))
    positive_int(k, "k", "top_eigenvalues")
    if K.shape[0] != K.shape[1] or not K.symmetric:
        raise BochnerError("The operator of top_eigenvalues must be symmetric: build it with keys=None.")
    if method == "power":
        if k != 1:
            raise BochnerError(f"The power method finds one eigenvalue; use method='eigsh' for k={k}.")
        return np.array([noisy_power_method(K, tol=tol)[0]])
    if k >= K.shape[0]:
        return np.sort(np.linalg.eigvalsh(K @ np.eye(K.shape[0], dtype=K.dtype)))[::-1][:k]
    start = np.ones(K.shape[0], dtype=K.dtype)
    return np.sort(eigsh(K.materialize(), k=k, return_eigenvectors=False, tol=tol, v0=start))[::-1]


def noisy_power_method(
    K: KernelOperator, *, iterations: int = 100, tol: float = 1e-3, seed: int = 0
) -> tuple[float, np.ndarray]:
    """Largest eigenvalue and eigenvector by power iteration on noisy products (Backurs et al. 2021, section 4).

    K has non-negative entries, so a positive start stays positive and overlaps the Perron vector. Each product
    may err by eps |x|; the best Rayleigh quotient seen is returned, so noise cannot undo progress.
    """
    x = torch.rand(K.shape[0], generator=make_generator(seed), dtype=torch.float64).numpy() + 0.1
    x /= np.linalg.norm(x)
    best, vector = -math.inf, x
    for _ in range(positive_int(iterations, "iterations", "noisy_power_method")):
        y = np.asarray(K @ x.astype(K.dtype), dtype=np.float64)
        quotient = float(x @ y)
        improved = quotient - best
        if quotient > best:
            best, vector = quotient, x
        if improved <= tol * abs(best):
            break
        x = y / np.linalg.norm(y)
    return best, vector
