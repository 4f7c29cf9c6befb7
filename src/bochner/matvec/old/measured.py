"""Plans from samples: blocks ranked by a model and by measured rows, cut where other measured rows meet eps.

Errors come in blocks: a dense patch hidden in a wide cell spoils every row near it. So rows are measured in every
query cell: one exact kernel row per cell for the ranking, another one for the cut. The cut is measured, not
derived: for any set of near blocks, exact rows give the error of the product with a random x, with x = 1 and with x
along the dense regions (where the top eigenvectors live). The cheapest set of blocks that keeps all of them below
their share of eps comes first. Then the rows and columns that a model calls worst are measured too, and blocks are
added until none of them, nor any of a fresh sample, can break eps alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .index import KeyIndex, Side
from .plan import NearTiles, Plan, near_rounding, nearest_to_middle
from .tiles import ROWS, TYPICAL, Frame, Tiles, argument_error, extent, left, right, swapped

RANDOM_SHARE, COHERENT_SHARE = 0.1, 0.15  # of eps, for the average row
WORST_SHARE = 0.7  # of eps, for what one row or column leaves out
MOST_JUDGES = 3  # fresh samples of rows to judge by
ROUNDS = 6  # of looking for the worst rows and columns
CLOSE_SHARE, CLOSE_PAIRS = 0.2, 0.03  # of eps, what one skipped block may hold; of all pairs, to look for more
SUSPECTS = 256  # rows looked at in each round, per score
EVERY = 4  # at least: one row in so many stands for its cell in the model
JUDGED_ROWS = 512  # at least; one per query cell
FRACTIONS = [0.0, *(2.0 ** (-k / 2) for k in range(16, 0, -1))]  # of all pairs, tried as near pairs


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


@dataclass
class Sample:
    """Exact kernel rows of some sorted positions, summed over cells."""

    ids: Tensor  # (b,) sorted positions
    cell: Tensor  # (b,)
    mass: Tensor  # (b, cells)
    squared: Tensor  # (b, cells)
    guess: Tensor  # (b, cells): mass according to the far field


class Sampler:
    """Measures rows of one side against the cells of the other."""

    def __init__(self, index: KeyIndex, side: Side, other: Side) -> None:
        self.index, self.side, self.other = index, side, other
        frame = index.frame
        wide = extent(frame, side.points) + extent(frame, other.points)
        d = side.points.shape[1]
        for arithmetic in ("float32", "float64", "difference"):  # a plan can live with a tenth per entry
            self.frame: Frame = frame._replace(arithmetic=arithmetic)
            lost = argument_error(wide, d, self.frame) if wide < 1e15 or arithmetic != "float32" else math.inf
            self.lost = frame.kernel.change(lost / TYPICAL)
            if self.lost <= 0.05:
                break
        self.tiles = Tiles(self.frame)

    def _groups(self) -> list[tuple[int, int]]:
        """Cells taken together so that about 8,192 points are placed at once: (first cell, end cell)."""
        start, groups, first = self.other.start.tolist(), [], 0
        for c in range(1, len(start)):
            if start[c] - start[first] >= 8192 or c == len(start) - 1:
                groups.append((first, c))
                first = c
        return groups

    def __call__(self, ids: Tensor, guess: bool = True) -> Sample:
        ids = ids.sort().values
        cell = torch.searchsorted(self.side.start, ids, right=True) - 1
        dtype, cells = self.side.rows.dtype, self.index.cells
        mass, squared = torch.zeros(ids.numel(), cells, dtype=dtype), torch.zeros(ids.numel(), cells, dtype=dtype)
        z = left(self.frame.place(self.side.points[self.side.order[ids]]))
        for first, end in self._groups():
            lo, hi = int(self.other.start[first]), int(self.other.start[end])
            if lo == hi:
                continue
            w = right(self.frame.place(self.other.points[self.other.order[lo:hi]]))
            filled = first + (self.other.count[first:end] > 0).nonzero()[:, 0]
            begin = (self.other.start[filled] - lo).numpy()
            for i in range(0, ids.numel(), 128):
                tile = self.tiles(z[i : i + 128], w)
                mass[i : i + 128, filled] = torch.from_numpy(np.add.reduceat(tile.numpy(), begin, axis=1)).to(dtype)
                sums = np.add.reduceat(tile.square_().numpy(), begin, axis=1)
                squared[i : i + 128, filled] = torch.from_numpy(sums).to(dtype)
        return Sample(ids, cell, mass, squared, self.guess(ids, cell) if guess else torch.zeros(0))

    def guess(self, ids: Tensor, cell: Tensor) -> Tensor:
        """(b, cells): blurred kernel times the number of keys."""
        out = torch.empty(ids.numel(), self.index.cells, dtype=self.side.rows.dtype)
        distinct, counts = cell.unique_consecutive(return_counts=True)
        at = 0
        for a, number in zip(distinct.tolist(), counts.tolist(), strict=True):
            out[at : at + number] = self.index.far(swapped(self.side.rows[ids[at : at + number]]), a)
            at += number
        return out * self.index.count


def rows_of_every_cell(start: Tensor, rounds: int, generator: torch.Generator) -> Tensor:
    """`rounds` random positions in every non-empty cell."""
    count = start.diff()
    cell = (count > 0).nonzero()[:, 0].repeat(rounds)
    offset = (torch.rand(cell.numel(), generator=generator) * count[cell]).long()
    return start[cell] + torch.minimum(offset, count[cell] - 1)


def rankings(index: KeyIndex, side: Side, measured: Tensor, distances: Tensor) -> list[Tensor]:
    """Scores of the blocks: the blurred or measured squared kernel, the measured one and then distance, distance.

    The model is right for cells that look Gaussian, distances for thin or curved ones, measuring for the rest;
    calibration picks. `measured` (cells, cells) is the squared kernel per pair seen from one row of each query
    cell. A cell's own block always comes first.
    """
    squared = torch.zeros_like(distances)
    for a, (lo, hi) in enumerate(side.ranges()):
        if lo < hi:
            rows = swapped(side.rows[lo : hi : max(EVERY, (hi - lo) // ROWS)])
            squared[a] = index.far(rows, a).square_().mean(0)
    nearness = 1.0 / (1e-6 + distances)
    squared, measured = torch.maximum(squared, squared.T), torch.maximum(measured, measured.T)
    diagonal = torch.full((index.cells,), torch.inf, dtype=squared.dtype)
    candidates = [torch.maximum(squared, measured), measured + 1e-12 * nearness, nearness]
    return [score.diagonal_scatter(diagonal) for score in candidates]


def measured_plan(index: KeyIndex, queries: Side | None, eps: float, generator: torch.Generator) -> Plan:
    """Choose the near blocks by measuring; None: the queries are the keys."""
    symmetric = queries is None
    side = index.keys if queries is None else queries
    sampler = Sampler(index, side, index.keys)
    distances, n = index.distances(), side.rows.shape[0]
    cost = side.count.double()[:, None] * index.count.double()
    total = float(cost.sum())
    filled = int((side.count > 0).sum())
    rounds = math.ceil(JUDGED_ROWS / filled)

    # 1. Exact rows: kernel mass and squared mass per cell, and the far field's guess of the mass.
    seen = sampler(rows_of_every_cell(side.start, 1, generator), guess=False)
    measured = torch.zeros_like(distances).index_copy_(0, seen.cell, seen.squared / index.count)
    best: tuple[bool, float, Plan] | None = None
    before = math.inf
    for _ in range(MOST_JUDGES):
        judge = sampler(rows_of_every_cell(side.start, rounds, generator))
        errors = Errors(index, judge, side, rounds, n)
        # 2. For each ranking, the smallest fraction whose measured errors meet their shares of eps. They need not fall
        # with the fraction, so it is searched from below.
        for score in rankings(index, side, measured, distances):
            ranking = Ranking(score, cost)
            for fraction in FRACTIONS:
                near = ranking.near(fraction)
                if symmetric:  # equal scores may straddle the cut
                    near = near | near.T
                spent = float(cost[near].sum()) / total
                if best is not None and best[0] and spent >= best[1]:
                    break
                skipped = ~near[judge.cell]
                beta = fit_beta(judge, skipped)
                random, coherent = errors(beta, skipped)
                met = random <= RANDOM_SHARE * eps and coherent <= COHERENT_SHARE * eps
                if met or fraction == FRACTIONS[-1]:
                    if best is None or (met, -spent) > (best[0], -best[1]):
                        plan = Plan(side, near, beta, symmetric, torch.zeros(0), score=score)
                        plan.predicted, plan.met, plan.mean_row_sum = max(random, coherent), met, errors.row_sum
                        best = (met, spent, plan)
                    break
        # No more judges where they would cost as much as they can save, or where the last one did not help.
        if best is None or best[1] * n <= 10 * judge.ids.numel() or best[1] > 0.5 * before:
            break
        before = best[1]
        # 3. Costly, often because of a few judged rows whose like the ranking had not seen. Now it has: judge anew.
        measured = measured.scatter_reduce(
            0, judge.cell[:, None].expand_as(judge.squared), judge.squared / index.count, "amax"
        )
    assert best is not None
    plan = best[2]
    plan.rough = sampler.frame.arithmetic == "float32" and sampler.lost * plan.mean_row_sum <= eps / 20
    if plan.met:
        admit_close(index, plan, eps, distances)
        admit_worst(index, plan, eps, sampler, generator)
    plan.rounding = near_rounding(index, side, plan.near, distances)
    return plan


class Errors:
    """Upper estimates, relative to |x|, of the error for a random x and for coherent x, from judged rows."""

    def __init__(self, index: KeyIndex, judge: Sample, side: Side, rounds: int, n: int) -> None:
        self.count, self.judge, self.n, self.s = index.count, judge, n, index.keys.rows.shape[0]
        filled = int((side.count > 0).sum())
        self.weight = side.count[judge.cell].to(judge.mass.dtype) * (filled / n)  # one on average
        density = torch.zeros_like(judge.mass[0]).index_add_(0, judge.cell, judge.mass.sum(1) / rounds)
        directions = torch.stack([torch.ones_like(density), density, density.square()], 1)
        self.directions = directions / (directions.square() * self.count[:, None]).sum(0).sqrt().clamp_min(1e-30)
        self.row_sum = float((self.weight * judge.mass.sum(1)).mean())
        # Sums of many terms of one sign also carry rounding, about 8 units in the last place of the sum.
        whole = _upper_norm((judge.mass @ self.directions).square() * self.weight[:, None] * n)
        self.rounding = 8 * torch.finfo(judge.mass.dtype).eps * whole

    def __call__(self, beta: float, skipped: Tensor) -> tuple[float, float]:
        guess = self.judge.guess * beta
        rows = (residual(self.judge, guess, self.count) * skipped).sum(1) * self.weight
        coherent = ((self.judge.mass - guess) * skipped) @ self.directions
        return (
            _upper_norm(rows[:, None] * (self.n / self.s)),
            _upper_norm(coherent.square() * self.weight[:, None] * self.n) + self.rounding,
        )


def residual(sample: Sample, guess: Tensor, count: Tensor) -> Tensor:
    """(b, cells): sum of squares of K_ij - guess/count over each cell."""
    return (sample.squared - 2 * guess * sample.mass / count + guess.square() / count).clamp_min(0.0)


def fit_beta(sample: Sample, skipped: Tensor) -> float:
    """Least-squares factor between the true mass of skipped cells and the blurred guess, within [0, 4]."""
    g = sample.guess * skipped
    top = float((g * sample.mass).sum())
    return min(4.0, top / max(float((g * g).sum()), 1e-30)) if top > 0 else 0.0


def _upper_norm(rows: Tensor) -> float:
    """Square root of the mean over sampled rows plus two standard errors; the worst column."""
    spread = rows.std(0) / rows.shape[0] ** 0.5 if rows.shape[0] > 1 else torch.zeros_like(rows[0])
    return float((rows.mean(0) + 2 * spread).clamp_min(0).sqrt().max())


def suspects(index: KeyIndex, side: Side, near: Tensor) -> tuple[Tensor, Tensor]:
    """For every row, two scores of what its skipped cells weigh: the far field's guess, and a flatter one."""
    scores = side.rows.new_zeros(side.rows.shape[0], 2)
    count = index.count.to(side.rows.dtype)
    for a, (lo, hi) in enumerate(side.ranges()):
        weight = torch.where(near[a], 0.0, count)
        for i in range(lo, hi, ROWS):
            far = index.far(swapped(side.rows[i : min(i + ROWS, hi)]), a)
            scores[i : i + far.shape[0], 0] = far @ weight
            scores[i : i + far.shape[0], 1] = far.sqrt_().sqrt_() @ weight
    return scores[:, 0], scores[:, 1]


def admit_close(index: KeyIndex, plan: Plan, eps: float, distances: Tensor) -> None:
    """Evaluate skipped blocks whose closest points may be close, and make near those in which they are.

    A pair of neighbours in different cells is one entry in one row: samples of rows miss it, and it can break eps by
    itself. Bounds on the distance between two cells leave few blocks in which there may be one, or many: then those
    with the closest points are looked at, as long as that costs `CLOSE_PAIRS` of all pairs.
    """
    side, count, kernel = plan.queries, index.count.double(), index.frame.kernel
    keys = nearest_to_middle(index, index.keys, distances)
    others = keys if plan.symmetric else nearest_to_middle(index, side, distances)
    ball = distances - side.radius[:, None] - index.keys.radius
    gap = torch.maximum(others + keys.T, ball).clamp_min_(0.0)
    largest = kernel.at_distance(torch.where(torch.isfinite(gap), gap, 1e15))
    largest = torch.where(plan.near | (distances == 0), 0.0, largest)
    if plan.symmetric:
        largest = largest.triu(1)
    cost = (side.count.double()[:, None] * count).flatten()
    order = torch.from_numpy(np.argsort(-largest.flatten().numpy()))
    affordable = cost[order].cumsum(0) <= CLOSE_PAIRS * float(cost.sum())
    order = order[affordable & (largest.flatten()[order] > CLOSE_SHARE * eps)]
    looked = torch.zeros(largest.numel(), dtype=torch.bool).index_fill_(0, order, True).view_as(largest)
    near = NearTiles(index, replace(plan, near=looked))
    for a in looked.any(1).nonzero()[:, 0].tolist():
        cells = looked[a].nonzero()[:, 0]
        begin = (index.count[cells].cumsum(0) - index.count[cells]).numpy()
        worst = torch.zeros(cells.numel(), dtype=largest.dtype)
        for _, w in near.keys(a, 1 << 62):
            for lo in range(int(side.start[a]), int(side.start[a + 1]), ROWS):
                tile = near(near.rows(lo, min(lo + ROWS, int(side.start[a + 1]))), w).numpy()
                worst = torch.maximum(worst, torch.from_numpy(np.add.reduceat(tile, begin, axis=1).max(0)))
                columns = torch.from_numpy(np.maximum.reduceat(tile.sum(0), begin))
                worst = torch.maximum(worst, columns)
        plan.near[a, cells[worst > CLOSE_SHARE * eps]] = True
    if plan.symmetric:
        plan.near |= plan.near.T.clone()


def admit_worst(index: KeyIndex, plan: Plan, eps: float, sampler: Sampler, generator: torch.Generator) -> None:
    """Measure suspicious rows, and columns, and make near what lets one of them leave out more than its share of eps.

    |E|_2 is at least the norm of every row and column of the error matrix and at most their largest absolute sum: rows
    whose sum is below eps are harmless, whatever x is.
    """
    sides = [(plan.queries, sampler, False)]
    if not plan.symmetric:
        sides.append((index.keys, Sampler(index, index.keys, plan.queries), True))
    for side, sample_rows, transposed in sides:
        orders = [
            score.topk(min(ROUNDS * SUSPECTS, score.numel())).indices
            for score in suspects(index, side, plan.near.T if transposed else plan.near)
        ]
        for k in range(ROUNDS):
            near = plan.near.T if transposed else plan.near
            chosen = [order[k * SUSPECTS : (k + 1) * SUSPECTS] for order in orders]
            ids = torch.cat([*chosen, rows_of_every_cell(side.start, 1, generator)]).unique()
            sample = sample_rows(ids, guess=not transposed)
            if transposed:
                left_out = sample.mass
            else:
                guess = sample.guess * plan.beta
                spread = (residual(sample, guess, index.count) * index.count).sqrt()
                left_out = torch.minimum(sample.mass + guess, spread)
            left_out = torch.where(near[sample.cell], 0.0, left_out)
            bad = (left_out.sum(1) > WORST_SHARE * eps).nonzero()[:, 0]
            if bad.numel() == 0:
                break
            ordered = left_out[bad].sort(1)
            kept = ordered.values.cumsum(1) <= 0.25 * eps  # the least blocks may stay out
            row, place = (~kept).nonzero().unbind(1)
            a, b = sample.cell[bad][row], ordered.indices[row, place]
            near = near.clone()
            near[a, b] = True
            plan.near = near.T if transposed else near
            if plan.symmetric:
                plan.near = plan.near | plan.near.T
