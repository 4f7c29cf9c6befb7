"""Random Fourier features of the Gaussian kernel: a low-rank product for smooth kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ....projections import gaussian_blocks
from ..kernels import LN2
from ..problem import Problem
from ..tiles import make_frame
from .base import Applied, Engine


class FeaturesEngine(Engine):
    """Products by m random Fourier features; Gaussian kernels only. No bound: products are checked."""

    name = "features"

    def __init__(self, problem: Problem, num_features: int) -> None:
        frame = make_frame(problem.kernel, problem.keys, problem.bandwidth, problem.arithmetic)
        self.dtype = frame.dtype
        self.z = frame.place(problem.queries)
        self.w = self.z if problem.symmetric else frame.place(problem.keys)
        self.omega = frequencies(problem.keys.shape[1], num_features, problem.generator())

    def apply(self, x: Tensor, adjoint: bool = False) -> Applied:
        z, w = (self.w, self.z) if adjoint else (self.z, self.w)
        # No kernel entry is evaluated; a feature pair costs about as much as one.
        return Applied(feature_product(z, w, x, self.omega), math.ceil((z.shape[0] + w.shape[0]) * self.omega.shape[1]))


def frequencies(d: int, m: int, generator: torch.Generator) -> Tensor:
    """(d, m) orthogonal blocks of Gaussian frequencies, float64 (Yu et al. 2016); unit bandwidth in the frame."""
    # In the frame K = exp(-ln2 |z - w|^2 / 2): frequencies of variance ln 2.
    return gaussian_blocks(m, d, g=generator).mT * math.sqrt(LN2)


def fourier_features(z: Tensor, omega: Tensor) -> Tensor:
    """[cos, sin] / sqrt(m): E[phi(z) . phi(w)] = K(z, w), unbiased, signed, |phi| = 1. Cost O(n d m)."""
    angle = z @ omega.to(z.dtype)
    return torch.cat([angle.cos(), angle.sin()], 1) / math.sqrt(omega.shape[1])


def feature_product(z: Tensor, w: Tensor, x: Tensor, omega: Tensor, rows: int = 4096) -> Tensor:
    """`phi(z) (phi(w)' x)`: linear in x, O((n + s) d m), in row blocks."""
    total = x.new_zeros(2 * omega.shape[1], x.shape[1])
    for part, values in zip(w.split(rows), x.split(rows), strict=True):
        total.addmm_(fourier_features(part, omega).T, values)
    return torch.cat([fourier_features(part, omega) @ total for part in z.split(rows)])
