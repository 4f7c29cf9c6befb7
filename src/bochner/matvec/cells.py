"""Cells: near pairs as dense tiles, far cells by their moments, both linear in x.

Keys are grouped into about 2 sqrt(s) cells by k-means and sorted by cell, queries by the nearest cell. A block is
one query cell against one key cell. Near blocks are evaluated pair by pair. Every other cell c, of weight
X_c = sum of x over the cell, mean m_c and variance v_c per axis, acts as one blurred point:

    beta X_c (1 + v_c/sigma^2)^(-d/2) exp(-|q - m_c|^2 / (2 (sigma^2 + v_c)))

the Gaussian kernel averaged over a Gaussian cell. Which blocks are near, and beta, are chosen once per operator
(`planning`), whatever x will be: the product is linear and repeatable.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .._progress import track
from .exact import FLOOR, LN2, ROWS, Frame, Tiles, left, move_right, right

NEAR_KEYS = 4096  # keys gathered at once for one query cell


def assign(points: Tensor, centres: Tensor) -> Tensor:
    """The index of the nearest centre of each point."""
    half = centres.square().sum(1).mul_(0.5)
    # numpy finds the smallest entry of a row ten times faster than torch does.
    distances = (torch.addmm(half, part, centres.T, alpha=-1) for part in points.split(2048))
    parts = [torch.from_numpy(part.numpy().argmin(1)) for part in distances]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)


def k_means(points: Tensor, cells: int, generator: torch.Generator, rounds: int = 4) -> Tensor:
    """Centres of about `cells` cells: Lloyd's iteration on a sample of 40 points per cell. Cost O(cells^2 d)."""
    sample = points[torch.randperm(points.shape[0], generator=generator)[: 40 * cells]]
    centres = sample[:cells].clone()
    for _ in range(rounds):
        label = assign(sample, centres)
        count = torch.bincount(label, minlength=centres.shape[0])
        total = torch.zeros_like(centres).index_add_(0, label, sample)
        filled = count > 0
        centres = total[filled] / count[filled, None]
    return centres


def segment_sum(values: Tensor, start: Tensor) -> Tensor:
    """Sums over consecutive non-empty groups of columns: (b, s) to (b, cells)."""
    return torch.from_numpy(np.add.reduceat(values.numpy(), start[:-1].numpy(), axis=1))


@dataclass
class KeyIndex:
    """The keys sorted by cell, and the moments of each cell. Nothing in it depends on queries or on x."""

    frame: Frame
    keys: Tensor  # (s, d+2) augmented, sorted by cell
    order: Tensor  # (s,) position in the caller's order of each sorted key
    start: Tensor  # (cells+1,) where each cell begins
    centres: Tensor  # (cells, d) the k-means centres: they define the cells and stay when keys come and go
    mean: Tensor  # (cells, d)
    spread: Tensor  # (cells,) mean squared distance from the mean
    radius: Tensor  # (cells,) largest distance from the mean

    @property
    def count(self) -> Tensor:
        return self.start.diff()

    @property
    def label(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(self.count.numel()), self.count)

    @property
    def caller_label(self) -> Tensor:
        """The cell of each key, in the caller's order."""
        label = torch.empty_like(self.order)
        label[self.order] = self.label
        return label

    def blurred(self, inflate: float = 1.0) -> Tensor:
        """(cells, d+2): the right factor whose product with a query row is log2 of the blurred kernel."""
        d = self.mean.shape[1]
        g = 1.0 / (1.0 + inflate * self.spread / d * LN2)
        last = -0.5 * g * self.mean.square().sum(1) + 0.5 * d * torch.log2(g)
        return torch.cat([g[:, None] * self.mean, g[:, None], last[:, None]], 1)

    def cell_sums(self, x: Tensor) -> Tensor:
        """Sums of sorted x (s, r) over cells: (cells, r)."""
        return x.new_zeros(self.count.numel(), x.shape[1]).index_add_(0, self.label, x)


def build_index(frame: Frame, w: Tensor, cells: int, generator: torch.Generator) -> KeyIndex:
    """Cells of the placed keys `w`. Cost: O(s cells d), about 1 % of an exact product at s = 1e5."""
    centres = k_means(w, min(cells, w.shape[0]), generator)
    return index_from_labels(frame, w, assign(w, centres), centres)[0]


def index_from_labels(frame: Frame, w: Tensor, label: Tensor, centres: Tensor) -> tuple[KeyIndex, Tensor]:
    """Sort keys into given cells and take their moments; also which cells are filled (the others are dropped)."""
    filled = torch.bincount(label, minlength=centres.shape[0]) > 0
    label = (filled.cumsum(0) - 1)[label]
    centres = centres[filled]
    order = label.argsort(stable=True)
    w, label = w[order], label[order]
    count = torch.bincount(label, minlength=centres.shape[0])
    mean = torch.zeros_like(centres).index_add_(0, label, w) / count[:, None]
    distance2 = (w - mean[label]).square().sum(1)
    spread = torch.zeros_like(centres[:, 0]).index_add_(0, label, distance2) / count
    radius = torch.zeros_like(spread).scatter_reduce_(0, label, distance2, "amax").sqrt_()
    start = torch.cat([count.new_zeros(1), count.cumsum(0)])
    return KeyIndex(frame, right(w), order, start, centres, mean, spread, radius), filled


@dataclass
class Plan:
    """Queries sorted by cell, and which blocks are near. `symmetric`: the queries are the keys."""

    queries: Tensor  # (n, d+2) augmented, sorted by cell
    order: Tensor  # (n,) position in the caller's order of each sorted query
    start: Tensor  # (cells+1,)
    near: Tensor  # (cells, cells) bool: query cell x key cell
    beta: float  # multiplies the far field
    local: bool  # recentre each near tile: single precision for clouds many bandwidths wide
    rounding: float  # relative error of a near entry, measured
    symmetric: bool

    def pairs(self, index: KeyIndex) -> int:
        """Near pairs evaluated by one product (a symmetric block is evaluated once for both sides)."""
        near = self.near.triu() if self.symmetric else self.near
        count = self.start.diff().double()
        return int((near.double() * count[:, None] * index.count.double()).sum())


def sort_queries(index: KeyIndex, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Placed queries sorted by nearest cell, augmented; their order; where each cell begins."""
    label = assign(z, index.centres)
    order = label.argsort(stable=True)
    count = torch.bincount(label, minlength=index.centres.shape[0])
    return left(z[order]), order, torch.cat([count.new_zeros(1), count.cumsum(0)])


@dataclass
class Product:
    """One product in sorted order: y, its far part, and two scores per row of what was not evaluated."""

    value: Tensor  # (n, r)
    far: Tensor  # (n, r)
    missed: Tensor  # (n, 2)
    pairs: int


def product(index: KeyIndex, plan: Plan, x: Tensor, adjoint: bool = False, progress: bool = False) -> Product:
    """`K x` (or `K' x`) with near tiles and the far field; x (s, r) sorted by cell.

    Cost: `plan.pairs` near pairs and n cells far pairs. Linear in x up to rounding; exactly symmetric when the
    plan is. The far field F of a symmetric plan is (F + F')/2.
    """
    tiles = Tiles(index.frame)
    n, s, r = plan.queries.shape[0], index.keys.shape[0], x.shape[1]
    share = 0.5 if plan.symmetric else 1.0
    forward = not adjoint or plan.symmetric
    backward = adjoint or plan.symmetric
    y = x.new_zeros(s if adjoint else n, r)
    missed = x.new_zeros(n, 2)
    blurred = index.blurred()
    weights = index.cell_sums(torch.cat([x, x.abs().amax(1, True)], 1)) if forward else None
    collected = x.new_zeros(blurred.shape[0], r)
    for a, (lo, hi) in enumerate(zip(plan.start[:-1].tolist(), plan.start[1:].tolist(), strict=True)):
        near = plan.near[a].nonzero()[:, 0]
        for i in range(lo, hi, ROWS):
            j = min(i + ROWS, hi)
            far = torch.mm(plan.queries[i:j], blurred.T).clamp_min_(FLOOR).exp2_()
            far[:, near] = 0.0
            if backward:
                collected.addmm_(far.T, x[i:j])
            if weights is not None:
                both = far @ weights
                y[i:j] = both[:, :r]
                missed[i:j, 0] = both[:, r]
                missed[i:j, 1] = far.sqrt_().sqrt_() @ weights[:, r]  # a flatter score: the model may be too sure
    if backward:
        y += collected[index.label]
    y *= share * plan.beta
    far_part = y.clone()
    blocks = range(plan.start.numel() - 1)
    for a in track(blocks, len(blocks), "near cells", progress):
        _near_blocks(index, plan, tiles, x, y, a, adjoint)
    return Product(y, far_part, missed, tiles.pairs + n * blurred.shape[0])


def _near_blocks(index: KeyIndex, plan: Plan, tiles: Tiles, x: Tensor, y: Tensor, a: int, adjoint: bool) -> None:
    """Add the near blocks of query cell `a`; a symmetric block serves its mirror image too."""
    lo, hi = int(plan.start[a]), int(plan.start[a + 1])
    if lo == hi:
        return
    near = plan.near[a].nonzero()[:, 0]
    if plan.symmetric:
        near = near[near >= a]
    begin, count = index.start[near], index.count[near]
    keys = torch.arange(int(count.sum())) + torch.repeat_interleave(begin - count.cumsum(0) + count, count)
    origin = index.mean[a] if plan.local else None
    rows = [(i, min(i + ROWS, hi)) for i in range(lo, hi, ROWS)]
    queries = [plan.queries[i:j] if origin is None else left(plan.queries[i:j, :-2] - origin) for i, j in rows]
    for part in keys.split(NEAR_KEYS):
        w = index.keys.index_select(0, part)
        if origin is not None:
            move_right(w, origin)
        for (i, j), z in zip(rows, queries, strict=True):
            tile = tiles(z, w)
            if adjoint and not plan.symmetric:
                y.index_add_(0, part, tile.T @ x[i:j])
                continue
            y[i:j].addmm_(tile, x.index_select(0, part))
            if plan.symmetric:
                inside = int((part < hi).sum())  # keys of cell a itself come first: their block is its own mirror
                if inside < part.numel():
                    y.index_add_(0, part[inside:], tile[:, inside:].T @ x[i:j])


def deterministic_bound(index: KeyIndex, plan: Plan, x: Tensor, far: Tensor) -> Tensor:
    """A bound on each row's error that needs no luck, (n,): for sorted x (s,) and the far part (n,) of y,

        sum over skipped cells of |x_c|_1 exp(-max(0, |q - m_c| - r_c)^2 / (2 sigma^2))  +  |far part of y|

    r_c the radius of the cell. Tight for well-separated clusters, useless where cells touch. Cost n cells pairs.
    """
    absolute = index.cell_sums(x.abs()[:, None])[:, 0].double()
    mean, radius = index.mean.double(), index.radius.double()
    bound = x.new_empty(plan.queries.shape[0])
    for a, (lo, hi) in enumerate(zip(plan.start[:-1].tolist(), plan.start[1:].tolist(), strict=True)):
        near = plan.near[a]
        for i in range(lo, hi, ROWS):
            j = min(i + ROWS, hi)
            z = plan.queries[i:j, :-2].double()
            distance = torch.cdist(z, mean)
            slack = 2.0**-24 * (z.norm(dim=1).max() + mean.norm(dim=1).max())  # what rounding can hide
            gap = distance.sub_(radius + slack).clamp_min_(0.0)
            closest = gap.square_().mul_(-0.5).clamp_min_(FLOOR).exp2_()
            closest[:, near] = 0.0
            bound[i:j] = (closest @ absolute).to(bound.dtype)
    return bound + far.abs()
