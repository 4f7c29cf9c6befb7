"""Closed forms of kernels from their spectrum: Gaussian mixtures of frequencies, and local masks.

Reference: Chowdhury et al., *On learning the Transformer kernel*, 2022 ("Learned kernels"). A frequency of component c
is ``w = L_c n + mu_c`` with ``n ~ N(0, I)``: ``L_c`` is a factor of the covariance ``L_c L_c'``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bochner._checks import BochnerError
from bochner.theory._common import Number, closed_form


@closed_form
def gmm_rks(x: Tensor, y: Tensor, means: Tensor, factors: Tensor) -> Tensor:
    """The kernel of GMM-RKS: ``mean_c cos(mu_c.D) exp(-|L_c'D|^2 / 2)``, ``D = x - y`` (Learned kernels, eq. 4).

    ``means`` (C, d); ``factors`` (C, d, d), or (C, d) for diagonal ones.
    """
    mu, proj = _project(x - y, means, factors, "gmm_rks")
    return (torch.cos(mu) * torch.exp(-proj.square().sum(-1) / 2)).mean(-1)


@closed_form
def gmm_prf(x: Tensor, y: Tensor, means: Tensor, factors: Tensor, *, g: float = 0.5) -> Tensor:
    """The kernel of GMM-PRF: ``mean_c exp(mu_c.z + |L_c'z|^2 / 2 - g (|x|^2 + |y|^2))``, ``z = x + y``.

    Learned kernels, eq. 8-10, print ``g = 1``; at ``L = I, mu = 0`` the softmax kernel needs ``g = 1/2``.
    """
    mu, proj = _project(x + y, means, factors, "gmm_prf")
    norms = (x.square().sum(-1) + y.square().sum(-1))[..., None]
    return torch.exp(mu + proj.square().sum(-1) / 2 - g * norms).mean(-1)


@closed_form
def mse_gmm_rks(
    x: Tensor, y: Tensor, means: Tensor, factors: Tensor, num_features: Number, *, shared_noise: bool = True
) -> Tensor:
    """Mean squared error of GMM-RKS with ``num_features`` noise vectors a component.

    ``shared_noise``: all components transform the same noise (Learned kernels, eq. 5), so that covariances count.
    """
    mu, proj = _project(x - y, means, factors, "mse_gmm_rks")
    k = torch.cos(mu) * torch.exp(-proj.square().sum(-1) / 2)

    def half(sign: int) -> Tensor:
        shift = mu[..., :, None] + sign * mu[..., None, :]
        width = (proj[..., :, None, :] + sign * proj[..., None, :, :]).square().sum(-1)
        return torch.cos(shift) * torch.exp(-width / 2)

    cov = (half(1) + half(-1)) / 2 - k[..., :, None] * k[..., None, :]
    return _average(cov, num_features, shared_noise)


@closed_form
def mse_gmm_prf(
    x: Tensor,
    y: Tensor,
    means: Tensor,
    factors: Tensor,
    num_features: Number,
    *,
    g: float = 0.5,
    shared_noise: bool = True,
) -> Tensor:
    """Mean squared error of GMM-PRF with ``num_features`` noise vectors a component; see :func:`mse_gmm_rks`.

    >>> from bochner.theory import mse_positive
    >>> x, y = torch.tensor([0.3, -0.1]), torch.tensor([0.2, 0.4])
    >>> e = mse_gmm_prf(x, y, torch.zeros(1, 2), torch.ones(1, 2), 8)
    >>> torch.allclose(e, mse_positive(x, y, 8))
    True
    """
    mu, proj = _project(x + y, means, factors, "mse_gmm_prf")
    norms = (x.square().sum(-1) + y.square().sum(-1))[..., None]
    log_k = mu + proj.square().sum(-1) / 2 - g * norms
    inner = (proj[..., :, None, :] * proj[..., None, :, :]).sum(-1)
    cov = torch.exp(log_k[..., :, None] + log_k[..., None, :]) * torch.expm1(inner)
    return _average(cov, num_features, shared_noise)


@closed_form
def mse_fourier(value: Number, doubled: Number, num_features: Number) -> Tensor:
    """Mean squared error of m cosines of any spectrum: ``[ (1 + k(2r))/2 - k(r)^2 ] / m``.

    ``value``: k(r), ``doubled``: k(2r).
    """
    return ((1 + doubled) / 2 - value.square()) / num_features


@closed_form
def mse_local_laplace(x: Tensor, y: Tensor, num_features: Number, *, delta: Number = 1.0) -> Tensor:
    """Mean squared error of the Laplace mask ``k = exp(-|x - y|_1 / delta)``: ``(1 - k^2) / (2m)``."""
    return -torch.expm1(-2 * (x - y).abs().sum(-1) / delta) / (2 * num_features)


@closed_form
def mse_local_gaussian(x: Tensor, y: Tensor, num_features: Number, *, delta: Number = 1.0) -> Tensor:
    """Mean squared error of the Gaussian mask ``k = exp(-|x - y|^2 / (2 delta^2))``, iid: ``(1 - k^2)^2 / (2m)``."""
    return torch.expm1(-(x - y).square().sum(-1) / delta.square()).square() / (2 * num_features)


def _project(v: Tensor, mu: Tensor, L: Tensor, owner: str) -> tuple[Tensor, Tensor]:
    """``mu_c.v`` (..., C) and ``L_c'v`` (..., C, d)."""
    d = v.shape[-1]
    if mu.ndim != 2 or mu.shape[1] != d or L.shape not in ((len(mu), d), (len(mu), d, d)):
        raise BochnerError(
            f"The 'means' and 'factors' of {owner} must have shapes (C, {d}) and (C, {d}) or (C, {d}, {d}), got "
            f"{tuple(mu.shape)} and {tuple(L.shape)}."
        )
    proj = L * v[..., None, :] if L.ndim == 2 else torch.einsum("cij,...i->...cj", L, v)
    return (mu * v[..., None, :]).sum(-1), proj


def _average(cov: Tensor, m: Tensor, shared: bool) -> Tensor:
    total = cov.sum((-1, -2)) if shared else cov.diagonal(dim1=-2, dim2=-1).sum(-1)
    return total / (m * cov.shape[-1] ** 2)
