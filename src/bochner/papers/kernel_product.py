"""The sub-quadratic algorithm under the sparsity assumption: Algorithms 1 to 3 of the kernel product paper.

For |x|^2 = n: entries with x_j^2 >= n^gamma are summed exactly, entries with x_j^2 <= n^-4 dropped; for each row
the heavy keys, K_ij >= n^-alpha, are found by locality-sensitive hashing (Algorithm 1) and summed exactly; the
light rest is sampled uniformly, each row with as many repetitions as an estimate of its variance
s_i >= sum_light x_j^2 K_ij^2 asks for, and the median of several averages is taken (Algorithm 2).

Three departures, none of which changes the guarantee on the error. The hash functions are concatenated Gaussian
projections with a random shift (p-stable hashing) in place of ball carving, which nobody runs: they find the heavy
keys with the same probability, but far pairs collide more often than in the paper's analysis, so its exponent of the
running time is not claimed here. The density estimate of the squared kernel samples the hash buckets (a hashing-based
estimator, unbiased for the light keys directly, so nothing has to be subtracted and x need not be rounded to powers).
A row that asks for more draws than there are keys is summed exactly.

Points z (queries) and w (keys) are in units of the bandwidth. In practice `KernelOperator` is faster everywhere and
bounds its error. This is here to be studied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._checks import BochnerError, make_generator, positive_float, positive_int
from ..matvec import KernelOperator
from ..matvec.inputs import as_points

PAIRS_AT_ONCE = 1 << 17
WIDEST = 1e15  # bandwidths, of the points: their hashes still fit 64 bits


@dataclass(frozen=True)
class Constants:
    """The constants of the analysis; `Constants.proof()` are the paper's, the defaults meet eps in practice."""

    gamma: float = 0.109
    alpha: float = 1.0 / 3.0
    tables: float = 0.5  # number of hash tables is tables * n^alpha * log n; 10 in the paper
    samples: float = 1.0  # repetitions per average: samples * n * s_i / eps^2; 10 in the paper
    medians: float = 0.3  # averages per median: medians * log n, at least 3; 10 in the paper
    density_tables: int = 64  # hash tables used for the density estimate

    @classmethod
    def proof(cls) -> Constants:
        return cls(tables=10.0, samples=10.0, medians=10.0)


@dataclass
class Heavy:
    """What does not depend on x: the heavy pairs of every row and the bucket samples for the density estimate."""

    codes: Tensor  # (h,) sorted i * s + j
    values: Tensor  # (h,) K_ij
    sampled: Tensor  # (n, tables) a key from the query's bucket in each table
    weight: Tensor  # (n, tables) K_ij^2 / probability of drawing it; 0 for heavy keys and empty buckets
    pairs: int


def collision_probability(distance: Tensor, width: float, depth: int) -> Tensor:
    """Probability that two points this far apart share a bucket (Datar et al. 2004, equation 1), to the `depth`."""
    c = width / distance.clamp_min(1e-12)
    tail = torch.special.erfc(c / math.sqrt(2.0))
    one = 1.0 - tail - math.sqrt(2.0 / math.pi) / c * (1.0 - torch.exp(-0.5 * c * c))
    return one.clamp_min(0.0).pow(depth)


def hash_shape(n: int, alpha: float) -> tuple[float, int]:
    """Width and number of projections with P[collision] >= n^-alpha where K = n^-alpha (lemma 2.1, item 1)."""
    near = math.sqrt(2.0 * alpha * math.log(max(n, 2)))  # exp(-near^2/2) = n^-alpha
    width = 4.0 * near
    one = float(collision_probability(torch.tensor(near, dtype=torch.float64), width, 1))
    return width, max(1, int(alpha * math.log(max(n, 2)) / -math.log(one)))


def kernel_pairs(z: Tensor, w: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """K between listed pairs, by differences."""
    parts = zip(rows.split(PAIRS_AT_ONCE), columns.split(PAIRS_AT_ONCE), strict=True)
    return torch.cat([(z[i] - w[j]).square().sum(1).mul_(-0.5).exp_() for i, j in parts])


def find_heavy(z: Tensor, w: Tensor, constants: Constants, generator: torch.Generator) -> Heavy:
    """Algorithm 1: hash keys and queries `tables * n^alpha log n` times, keep colliding pairs with K >= n^-alpha.

    Cost: n tables hashes and as many pairs as collide; the paper bounds them by about n^(1 + 2 alpha) for ball carving.
    """
    (n, d), s = z.shape, w.shape[0]
    size = max(n, s, 2)
    threshold = size**-constants.alpha
    tables = max(1, math.ceil(constants.tables * size**constants.alpha * math.log(size)))
    width, depth = hash_shape(size, constants.alpha)
    found: list[Tensor] = []
    values: list[Tensor] = []
    sampled = torch.zeros(n, min(tables, constants.density_tables), dtype=torch.long)
    weight = z.new_zeros(sampled.shape)
    pairs = 0
    for t in range(tables):
        # 1. One table: `depth` shifted projections, mixed into one 64-bit key.
        projection = torch.randn(d, depth, generator=generator, dtype=torch.float64)
        shift = torch.rand(depth, generator=generator, dtype=torch.float64)
        mixer = torch.randint(-(2**62), 2**62, (depth,), generator=generator)
        key_hash, query_hash = (((p @ projection / width + shift).floor().long() * mixer).sum(1) for p in (w, z))
        key_hash, order = key_hash.sort()
        first = torch.searchsorted(key_hash, query_hash)
        count = torch.searchsorted(key_hash, query_hash, right=True) - first
        # 2. Every key in the query's bucket is a candidate.
        for rows in torch.arange(n).split(max(1, int(n * 8 * PAIRS_AT_ONCE / max(1, int(count.sum()))))):
            i = torch.repeat_interleave(rows, count[rows])
            within = torch.arange(i.numel()) - torch.repeat_interleave(count[rows].cumsum(0) - count[rows], count[rows])
            j = order[first[i] + within]
            k = kernel_pairs(z, w, i, j)
            pairs += i.numel()
            keep = k >= threshold
            found.append(i[keep] * s + j[keep])
            values.append(k[keep])
        # 3. One uniform key of the bucket for the density estimate, weighted by its probability.
        if t < sampled.shape[1]:
            pick = (torch.rand(n, generator=generator, dtype=torch.float64) * count).long()
            j = order[(first + pick).clamp_max(s - 1)]
            distance = (z - w[j]).norm(dim=1)
            k = distance.square().mul(-0.5).exp()
            p = collision_probability(distance, width, depth).clamp_min(1e-30)
            sampled[:, t] = j
            weight[:, t] = torch.where((count > 0) & (k < threshold), k.square() * count / p, 0.0)
            pairs += n
    codes, inverse = torch.cat(found).unique(return_inverse=True)
    value = z.new_zeros(codes.numel())
    value[inverse] = torch.cat(values)
    return Heavy(codes, value, sampled, weight, pairs)


def approximate_product(
    z: Tensor, w: Tensor, x: Tensor, heavy: Heavy, eps: float, constants: Constants, generator: torch.Generator
) -> tuple[Tensor, int]:
    """Algorithm 3, with Algorithm 2 for the light keys: `y` with |Kx - y| <= eps |x|, and the pairs evaluated.

    Not linear in x: what is sampled depends on it. The same x and seed give the same y.
    """
    n, s = len(z), len(w)
    norm, size = float(x.norm()), max(n, s, 2)
    y = z.new_zeros(n)
    if norm == 0.0:
        return y, 0
    x = x * (math.sqrt(n) / norm)

    # 1. Definition 3.1: large entries exactly, tiny ones dropped, x_t the rest.
    large = x.square() >= size**constants.gamma
    kept = ~large & (x.square() > float(size) ** -4)
    pairs = n * int(large.sum())
    if pairs:
        y += KernelOperator(z, w[large], eps=1e-4, method="exact") @ x[large]
    x_t = torch.where(kept, x, 0.0)

    # 2. Heavy keys of every row, exactly.
    y.index_add_(0, heavy.codes // s, heavy.values * x_t[heavy.codes % s])

    # 3. s_i: an over-estimate of the light variance: mean over tables, its own noise and the paper's slack added.
    draws = heavy.weight * x_t.square()[heavy.sampled]
    variance = draws.mean(1) * (1.0 + size**-0.218)
    if draws.shape[1] > 1:
        variance = variance + 2.0 * draws.std(1) / draws.shape[1] ** 0.5
    variance = variance.clamp_min(float(variance.mean()))  # an empty bucket is no evidence of an empty tail
    groups = max(3, math.ceil(constants.medians * math.log(size))) | 1
    repetitions = (constants.samples * s * variance / eps**2).ceil().clamp_min(1.0)

    # 4. Rows that ask for more draws than keys are summed exactly.
    full = repetitions * groups >= s
    if full.any():
        y[full] = KernelOperator(z[full], w, eps=1e-4, method="exact") @ torch.where(large | kept, x, 0.0)
        pairs += int(full.sum()) * s

    # 5. The others: each repetition keeps every key with probability 1/s; medians of averages.
    for part in (~full).nonzero()[:, 0].split(max(1, PAIRS_AT_ONCE // groups)):
        repeat = repetitions[part].repeat_interleave(groups)
        drawn = torch.poisson(repeat.float(), generator=generator).long()
        owner = torch.repeat_interleave(torch.arange(drawn.numel()), drawn)
        i, j = part[owner // groups], torch.randint(0, s, (owner.numel(),), generator=generator)
        term = kernel_pairs(z, w, i, j) * x_t[j] * ~torch.isin(i * s + j, heavy.codes)
        pairs += owner.numel()
        sums = z.new_zeros(drawn.numel()).index_add_(0, owner, term)
        y[part] += (sums * s / repeat).view(-1, groups).median(1).values
    return y * (norm / math.sqrt(n)), pairs


def kernel_product(
    queries: Any,
    keys: Any,
    x: Any,
    bandwidth: float = 1.0,
    eps: float = 0.1,
    *,
    constants: Constants | None = None,
    seed: int = 0,
) -> np.ndarray:
    """`y` with |Kx - y| <= eps |x| for the Gaussian kernel, with high probability over the seed.

    >>> points = np.random.default_rng(0).normal(size=(50, 2))
    >>> y = kernel_product(points, points, np.ones(50), eps=0.5)
    >>> bool(np.linalg.norm(y - KernelOperator(points) @ np.ones(50)) <= 0.5 * 50**0.5)
    True
    """
    q, k = (as_points(points, name).double() for points, name in ((queries, "queries"), (keys, "keys")))
    sigma, centre = positive_float(bandwidth, "bandwidth", "kernel_product"), k.mean(0)
    z, w = ((points - centre) / sigma for points in (q, k))
    wide = max(float(z.norm(dim=1).max()), float(w.norm(dim=1).max()))
    if not wide < WIDEST:
        raise BochnerError(
            f"The points of kernel_product lie up to {wide:.2g} bandwidths apart, more than its hashes can tell "
            f"({WIDEST:g}); use KernelOperator."
        )
    vector = torch.as_tensor(np.asarray(x, dtype=np.float64))
    if vector.shape != (len(k),):
        raise BochnerError(f"The 'x' of kernel_product must have shape ({len(k)},), got {tuple(vector.shape)}.")
    constants, generator = constants or Constants(), make_generator(seed)
    heavy = find_heavy(z, w, constants, generator)
    return approximate_product(z, w, vector, heavy, eps, constants, generator)[0].numpy()


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
