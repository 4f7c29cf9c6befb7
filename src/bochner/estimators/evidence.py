"""Bandwidths, amplitude and noise of a Gaussian process by its marginal likelihood, with gradients."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from bochner.matvec import Kernel

FEW, SOME = 400, 1000  # rows of the first and of the second, cheap search
BOUNDS = {"bandwidth": (0.02, 1e4), "amplitude": (1e-3, 1e4), "noise": (1e-6, 1e2)}


class Hyper(NamedTuple):
    """`amplitude K(x / bandwidth)` plus `noise` on the diagonal, for columns and targets of unit variance."""

    bandwidth: np.ndarray  # (d,)
    amplitude: float
    noise: float

    def pack(self) -> np.ndarray:
        return np.log([*self.bandwidth, self.amplitude, self.noise])

    @staticmethod
    def unpack(theta: np.ndarray) -> Hyper:
        values = np.exp(theta)
        return Hyper(values[:-2], float(values[-2]), float(values[-1]))


def evidence(name: str, X: Tensor, y: Tensor, hyper: Hyper) -> tuple[float, np.ndarray]:
    """The negative log marginal likelihood of the columns of y (n, c), and its gradient to `hyper.pack()`.

    With `A = amplitude K + noise I` and `b = A^-1 y` the gradient to A is (c A^-1 - b b') / 2. O(n^3). Infinite where
    rounding makes A indefinite.
    """
    n, columns = y.shape
    kernel, K, lower = _factored(name, X, hyper)
    if lower is None:
        return math.inf, np.zeros(len(hyper.bandwidth) + 2)
    b = torch.cholesky_solve(y, lower)
    value = 0.5 * float((y * b).sum()) + columns * float(lower.diagonal().log().sum())
    value += 0.5 * n * columns * math.log(2 * math.pi)
    G = torch.cholesky_inverse(lower).mul_(columns).addmm_(b, b.T, alpha=-1).mul_(0.5)
    for_bandwidth = kernel.gradients(X, None, G).bandwidth.numpy() * hyper.bandwidth * hyper.amplitude
    return value, np.array([*for_bandwidth, hyper.amplitude * float((G * K).sum()), hyper.noise * float(G.trace())])


def left_out(name: str, X: Tensor, y: Tensor, hyper: Hyper) -> float:
    """The mean negative log density of every row, predicted from the others: their variance is 1 / (A^-1)_ii."""
    lower = _factored(name, X, hyper)[2]
    if lower is None:
        return math.inf
    precision = torch.cholesky_inverse(lower).diagonal()[:, None]
    return float((torch.cholesky_solve(y, lower).square() / precision - precision.log()).mean()) / 2


def _factored(name: str, X: Tensor, hyper: Hyper) -> tuple[Kernel, Tensor, Tensor | None]:
    """The kernel, K, and the Cholesky factor of `A = amplitude K + noise I`; None where A is indefinite by rounding."""
    kernel = Kernel(name, hyper.bandwidth)
    K = kernel.block(X)
    A = hyper.amplitude * K
    A.diagonal().add_(hyper.noise)
    lower, failed = torch.linalg.cholesky_ex(A)
    return kernel, K, None if int(failed) else lower


def learn(name: str, X: np.ndarray, y: Any, given: Hyper | None = None, seed: int = 0) -> Hyper:
    """The most likely hyperparameters of rows X with columns of unit variance and targets y (n, c).

    The likelihood has several maxima: little noise and short bandwidths explain a table as much noise and long ones
    do. Two searches on 400 and then 1,000 rows start at either. The one with which rows are predicted better from all
    the others goes on, with all rows. `given`: those that are not NaN stay.
    """
    d = X.shape[1]
    x, t = torch.from_numpy(np.array(X, dtype=np.float64)), torch.as_tensor(y)
    held = (given or Hyper(np.full(d, np.nan), math.nan, math.nan)).pack()
    free = np.isnan(held)
    if not free.any():
        return Hyper.unpack(held)
    low, high = (np.log([*[BOUNDS["bandwidth"][k]] * d, BOUNDS["amplitude"][k], BOUNDS["noise"][k]]) for k in (0, 1))

    def search(start: np.ndarray, rows: Tensor, steps: int) -> np.ndarray:
        x_part, t_part = x[rows], t[rows]

        def objective(p: np.ndarray) -> tuple[float, np.ndarray]:
            theta = start.copy()
            theta[free] += p
            value, gradient = evidence(name, x_part, t_part, Hyper.unpack(np.clip(theta, low, high)))
            inside = (theta > low) & (theta < high)
            return value / len(x_part), np.where(inside, gradient, 0.0)[free] / len(x_part)

        options = {"maxiter": steps, "ftol": 1e-8}
        found = minimize(objective, np.zeros(free.sum()), jac=True, method="L-BFGS-B", options=options)
        end = start.copy()
        end[free] += found.x
        return np.clip(end, low, high)

    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    starts = [Hyper(np.full(d, math.sqrt(d)), 1.0, 0.1), Hyper(np.ones(d), 1.0, 0.5)]
    found = [search(np.where(free, start.pack(), held), order[:FEW], 60) for start in starts]
    if len(x) > FEW:
        found = [search(theta, order[:SOME], 20 if len(x) > SOME else 60) for theta in found]
    best = min(found, key=lambda theta: left_out(name, x, t, Hyper.unpack(theta)))
    return Hyper.unpack(search(best, order, 60) if len(x) > SOME else best)
