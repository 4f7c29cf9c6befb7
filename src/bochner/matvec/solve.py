"""Solving with K and its determinant: conjugate gradients in lockstep, stochastic Lanczos quadrature."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import finite, floating
from .._progress import track
from .lowrank import Preconditioner

Product = Callable[[Tensor], Tensor]
Left = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x, r, r'M^-1 r): what is left to do for each column, (r,)


class Solution(NamedTuple):
    """x, the steps taken, and the largest of what is left over the columns: |r| / |y|, or as the caller counts it."""

    value: Tensor
    steps: int
    residual: float


def conjugate_gradients(
    product: Product,
    y: Tensor,
    precondition: Product | None = None,
    *,
    tol: float = 1e-6,
    max_iter: int = 1000,
    start: Tensor | None = None,
    left: Left | None = None,
    progress: bool = False,
) -> Solution:
    """`A x = y` for every column of y (n, r) at once: one product with A serves them all.

    The columns are independent runs of preconditioned conjugate gradients; one that has at most `tol` left stands
    still. `left(x, r, r'M^-1 r)` says how much that is, |r| / |y| by default. `start`: a first x.
    """
    y = finite(floating(y, "y", "conjugate_gradients"), "y", "conjugate_gradients")
    x = torch.zeros_like(y) if start is None else start.clone()
    r = y.clone() if start is None else y - product(x)
    norm = y.norm(dim=0).clamp_min(1e-300)
    left = left or (lambda x, r, rz: r.norm(dim=0) / norm)
    z = r if precondition is None else precondition(r)
    p = z.clone()
    rz = (r * z).sum(0)
    steps = 0
    for steps in track(range(1, max_iter + 1), max_iter, "conjugate gradients", progress):
        going = left(x, r, rz) > tol
        if not bool(going.any()):
            steps -= 1
            break
        q = product(p)
        step = torch.where(going, rz / (p * q).sum(0).clamp_min(1e-300), 0.0)
        x += step * p
        r -= step * q
        z = r if precondition is None else precondition(r)
        fresh = (r * z).sum(0)
        p = z + torch.where(going, fresh / rz.clamp_min(1e-300), 0.0) * p
        rz = fresh
    return Solution(x, steps, float(left(x, r, rz).max()))


class LogDet(NamedTuple):
    """An estimate of log det A, and two standard errors of it over the random vectors."""

    value: float
    error: float


def logdet(
    product: Product,
    n: int,
    precondition: Preconditioner,
    *,
    probes: int = 16,
    steps: int = 50,
    seed: int = 0,
) -> LogDet:
    """log det A by stochastic Lanczos quadrature (Ubaru, Chen and Saad 2017), A (n, n) positive definite.

    log det A = log det M + tr log(M^-1/2 A M^-1/2): the closer the preconditioner M is to A, the less is left to
    chance. Lanczos runs on M^-1 A in the inner product of M (Gardner et al. 2018), all probes in lockstep.
    """
    # Lanczos on the pencil (A, M): vectors v with v' M v = 1, and u = M v.
    u = precondition.draw(probes, torch.Generator().manual_seed(seed))
    v = precondition(u)
    size = (u * v).sum(0).clamp_min(1e-300)
    u, v = u / size.sqrt(), v / size.sqrt()
    before, beta = torch.zeros_like(u), torch.zeros(probes, dtype=torch.float64)
    alphas, betas, basis_u, basis_v = [], [], [u], [v]
    for _ in range(min(steps, n)):
        w = product(v) - beta * before
        alpha = (v * w).sum(0)
        alphas.append(alpha)
        w = w - alpha * u
        for old_u, old_v in zip(basis_u, basis_v, strict=True):  # against the loss of orthogonality
            w -= old_u * (old_v * w).sum(0)
        s = precondition(w)
        beta = (w * s).sum(0).clamp_min(0.0).sqrt()
        betas.append(beta)
        if float(beta.max()) < 1e-10:
            break
        before, u, v = u, w / beta.clamp_min(1e-300), s / beta.clamp_min(1e-300)
        basis_u.append(u)
        basis_v.append(v)
    values = torch.stack([_log_moment(torch.stack(alphas)[:, c], torch.stack(betas)[:-1, c]) for c in range(probes)])
    sample = n * values  # of directions: the lengths of the random vectors would only add noise
    spread = float(sample.std()) / math.sqrt(probes) if probes > 1 else math.inf
    return LogDet(precondition.logdet + float(sample.mean()), 2.0 * spread)


def _log_moment(alpha: Tensor, beta: Tensor) -> Tensor:
    """e1' log(T) e1 of the tridiagonal matrix T; cut where a column has come to its end."""
    ended = (beta < 1e-10).nonzero()[:, 0]
    if ended.numel():
        alpha, beta = alpha[: int(ended[0]) + 1], beta[: int(ended[0])]
    values, vectors = torch.linalg.eigh(torch.diag(alpha) + torch.diag(beta, 1) + torch.diag(beta, -1))
    return (vectors[0].square() * values.clamp_min(1e-300).log()).sum()
