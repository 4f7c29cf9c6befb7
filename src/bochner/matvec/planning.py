"""Which blocks are near: ranked by a model and by measured rows, cut where other measured rows meet eps.

Errors come in blocks: a dense patch hidden in a wide cell spoils every row near it. So rows are measured in every
query cell: one exact kernel row per cell for the ranking, another one for the cut. The cut is measured, not
derived: for any set of near blocks, exact rows give the error of the product with a random x, with x = 1 and with x
along the dense regions (where the top eigenvectors live). The cheapest set of blocks that keeps all of them below
their share of eps is the plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .cells import KeyIndex, Plan, segment_sum, sort_queries
from .exact import FLOOR, ROWS, Tiles, left, right, rounding_error

RANDOM_SHARE, COHERENT_SHARE = 0.1, 0.15  # of eps; a random x at eps/10 leaves room for the worst single column
MOST_JUDGES = 3  # fresh samples of rows to judge by
EVERY = 4  # at least: one row in so many stands for its cell in the model
JUDGED_ROWS = 512  # at least; one per query cell
FRACTIONS = [0.0, *(2.0 ** (-k / 2) for k in range(16, 0, -1))]  # of all pairs, tried as near pairs


@dataclass
class Planned:
    """A plan, the blocks' ranking it was cut from, what it is predicted to achieve and what it costs."""

    plan: Plan
    score: Tensor  # (cells, cells): larger means more kernel mass per pair
    predicted: float  # largest of the measured errors, relative to |x|
    met: bool  # whether the sample of rows meets its share of eps
    fraction: float  # of all pairs evaluated near
    mean_row_sum: float
    pairs: int  # spent on planning


class Ranking:
    """Blocks from most to least kernel mass per pair; `near(fraction)` cuts the ranking."""

    def __init__(self, score: Tensor, cost: Tensor) -> None:
        self.score = score
        self.order = torch.from_numpy(np.argsort(-score.flatten().numpy()))  # several times faster than torch's
        self.spent = cost.flatten()[self.order].cumsum(0)

    def near(self, fraction: float) -> Tensor:
        """The best-ranked blocks worth `fraction` of all pairs, and every block with an infinite score."""
        chosen = self.order[self.spent <= fraction * float(self.spent[-1])]
        near = torch.zeros(self.score.numel(), dtype=torch.bool)
        near[chosen] = True
        return near.view_as(self.score) | torch.isinf(self.score)


def rankings(index: KeyIndex, queries: Tensor, start: Tensor, measured: Tensor) -> list[Tensor]:
    """Scores of the blocks: the blurred or measured squared kernel, the measured one and then distance, distance.

    The model is right for cells that look Gaussian, distances for thin or curved ones, measuring for the rest;
    calibration picks. `measured` (cells, cells) is the squared kernel per pair seen from one row of each query
    cell. A cell's own block always comes first.
    """
    cells = index.count.numel()
    squared = queries.new_zeros(cells, cells)
    blurred = index.blurred()
    for a, (lo, hi) in enumerate(zip(start[:-1].tolist(), start[1:].tolist(), strict=True)):
        if lo < hi:
            rows = torch.mm(queries[lo : hi : max(EVERY, (hi - lo) // ROWS)], blurred.T)
            squared[a] = rows.clamp_min_(FLOOR / 2).exp2_().square_().mean(0)
    distance = torch.cdist(index.centres, index.mean)
    nearness = 1.0 / (1e-6 + torch.minimum(distance, distance.T))
    squared, measured = torch.maximum(squared, squared.T), torch.maximum(measured, measured.T)
    diagonal = torch.full((cells,), torch.inf, dtype=squared.dtype)
    candidates = [torch.maximum(squared, measured), measured + 1e-12 * nearness, nearness]
    return [score.diagonal_scatter(diagonal) for score in candidates]


def rows_of_every_cell(start: Tensor, rounds: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`rounds` random positions in every non-empty cell, round after round, and their cells."""
    count = start.diff()
    cell = (count > 0).nonzero()[:, 0].repeat(rounds)
    offset = (torch.rand(cell.numel(), generator=generator) * count[cell]).long()
    return start[cell] + torch.minimum(offset, count[cell] - 1), cell


def make_plan(
    index: KeyIndex,
    z: Tensor | None,
    eps: float,
    generator: torch.Generator,
    reuse: tuple[Tensor, float] | None = None,
) -> Planned:
    """Sort the placed queries `z` and choose the near blocks; None: the queries are the keys.

    `reuse`: (near, beta) of a plan over the same key cells, for queries of the same kind (blocks of a long array,
    keys that come and go): no measuring.
    """
    keys = index.keys[:, :-2]
    symmetric, rounding, dtype = z is None, rounding_error(keys), keys.dtype
    if z is None:  # sorted already
        queries, order, start = left(keys), index.order, index.start
    else:
        queries, order, start = sort_queries(index, z)
        rounding = max(rounding, rounding_error(z))
    local = rounding > min(eps / 20, 1e-3)
    coarse = rounding > 0.1  # planning itself can live with that much per entry of the outermost points
    if local:
        rounding = 4 * rounding_error(keys - index.mean[index.label])
    cost = start.diff().double()[:, None] * index.count.double()
    total = float(cost.sum())
    if reuse is not None:
        near, beta = reuse
        plan = Plan(queries, order, start, near, beta, local, rounding, symmetric)
        return Planned(plan, near.to(dtype), float("nan"), True, float(cost[near].sum()) / total, float("nan"), 0)

    # 1. Exact rows: kernel mass and squared mass per cell, and the far field's guess of the mass.
    n, s = queries.shape[0], keys.shape[0]
    tiles = Tiles(index.frame)
    to_rank, ranked = rows_of_every_cell(start, 1, generator)
    rounds = math.ceil(JUDGED_ROWS / ranked.numel())
    _, seen = sampled_rows(index, queries[to_rank], coarse, tiles)
    measured = torch.zeros_like(cost, dtype=dtype).index_copy_(0, ranked, seen / index.count)
    best: Planned | None = None
    before = math.inf
    for _ in range(MOST_JUDGES):
        to_judge, cell = rows_of_every_cell(start, rounds, generator)
        mass, squared = sampled_rows(index, queries[to_judge], coarse, tiles)
        weight = start.diff()[cell].to(dtype) * (ranked.numel() / n)  # one on average
        guess = torch.mm(queries[to_judge], index.blurred().T).clamp_min_(FLOOR).exp2_() * index.count
        density = torch.zeros_like(measured[0]).index_add_(0, cell, mass.sum(1) / rounds)
        directions = torch.stack([torch.ones_like(density), density, density.square()], 1)
        directions /= (directions.square() * index.count[:, None]).sum(0).sqrt().clamp_min(1e-30)
        row_sum, pairs = float((weight * mass.sum(1)).mean()), tiles.pairs + n * cost.shape[0]

        # 2. For each ranking, the smallest fraction whose measured errors meet their shares of eps. They need not fall
        # with the fraction, so it is searched from below.
        for score in rankings(index, queries, start, measured):
            ranking = Ranking(score, cost)
            for fraction in FRACTIONS:
                near = ranking.near(fraction)
                if symmetric:  # equal scores may straddle the cut
                    near = near | near.T
                spent = float(cost[near].sum()) / total
                if best is not None and best.met and spent >= best.fraction:
                    break
                skipped = ~near[cell]
                beta = fit_beta(mass, guess, skipped)
                random, coherent = measured_errors(
                    index, mass, squared, guess * beta, skipped, directions, weight, n, s
                )
                met = random <= RANDOM_SHARE * eps and coherent <= COHERENT_SHARE * eps
                if met or fraction == FRACTIONS[-1]:
                    plan = Plan(queries, order, start, near, beta, local, rounding, symmetric)
                    found = Planned(plan, score, max(random, coherent), met, spent, row_sum, pairs)
                    if best is None or (found.met, -found.fraction) > (best.met, -best.fraction):
                        best = found
                    break
        # No more judges where they would cost as much as they can save, or where the last one did not help.
        if best is None or best.fraction * n <= 10 * to_judge.numel() or best.fraction > 0.5 * before:
            break
        before = best.fraction
        # 3. Costly, often because of a few judged rows whose like the ranking had not seen. Now it has: judge anew.
        seen = squared / index.count
        measured = measured.scatter_reduce(0, cell[:, None].expand_as(seen), seen, "amax")
    assert best is not None
    return best


def sampled_rows(index: KeyIndex, queries: Tensor, coarse: bool, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Exact kernel mass and squared mass of each query in each cell, (b, cells) twice."""
    if coarse:  # a sample of rows spans the whole cloud: double precision instead of one origin per cell
        tiles = Tiles(index.frame._replace(arithmetic="float64"))
        queries, keys = left(queries[:, :-2].double()), right(index.keys[:, :-2].double())
    else:
        keys = index.keys
    parts = []
    for rows in queries.split(32):
        tile = tiles(rows, keys)
        mass = segment_sum(tile, index.start)
        parts.append((mass, segment_sum(tile.square_(), index.start)))
    dtype = index.keys.dtype
    return torch.cat([p[0] for p in parts]).to(dtype), torch.cat([p[1] for p in parts]).to(dtype)


def fit_beta(mass: Tensor, guess: Tensor, skipped: Tensor) -> float:
    """Least-squares factor between the true mass of skipped cells and the blurred guess, within [0, 4]."""
    g = guess * skipped
    top = float((g * mass).sum())
    return min(4.0, top / max(float((g * g).sum()), 1e-30)) if top > 0 else 0.0


def measured_errors(
    index: KeyIndex,
    mass: Tensor,
    squared: Tensor,
    guess: Tensor,
    skipped: Tensor,
    directions: Tensor,
    weight: Tensor,
    n: int,
    s: int,
) -> tuple[float, float]:
    """Upper estimates, relative to |x|, of the error for a random x and for coherent x."""
    residual = (squared - 2 * guess * mass / index.count + guess.square() / index.count) * skipped
    rows = residual.sum(1).clamp_min(0.0) * weight
    coherent = ((mass - guess) * skipped) @ directions
    # Sums of many terms of one sign also carry rounding, about 8 units in the last place of the sum.
    whole = _upper_norm((mass @ directions).square() * weight[:, None] * n)
    rounding = 8 * torch.finfo(mass.dtype).eps * whole
    return _upper_norm(rows[:, None] * (n / s)), _upper_norm(coherent.square() * weight[:, None] * n) + rounding


def _upper_norm(rows: Tensor) -> float:
    """Square root of the mean over sampled rows plus two standard errors; the worst column."""
    spread = rows.std(0) / rows.shape[0] ** 0.5 if rows.shape[0] > 1 else torch.zeros_like(rows[0])
    return float((rows.mean(0) + 2 * spread).clamp_min(0).sqrt().max())
