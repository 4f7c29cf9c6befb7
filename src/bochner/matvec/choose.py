"""Which engine: the one asked for, or the one that takes the fewest seconds for the products to come; and why.

Seconds are predicted: the time of a tile is measured once on this machine, for each kernel, dimension and dtype; the
rest is counted. Two small trials say how a problem behaves: cells of a sample of the points, and a factor of a
sample. A trial that could cost more than a few per cent of the exact products is not made.
"""

from __future__ import annotations

import math
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from . import cells, lowrank
from .exact import ExactEngine, PlacedKeys
from .kernels import Problem
from .profiles import PROFILES
from .tiles import COLUMNS, ROWS, Tiles, left, make_frame, right

Engine = ExactEngine | lowrank.LowRankEngine
METHODS = ("auto", "exact", "cells", "lowrank")
SMALL = 1 << 23  # pairs, of all products together, that are not worth a thought
TRIAL_SHARE = 0.02  # of the exact products, for each trial at most
WORTHWHILE = 0.8  # of the exact products: predictions are not exact
SINGLE = 1e-3  # eps from which double precision points may be multiplied in single precision
CELL_CALLS = 40  # calls of torch for a query cell against COLUMNS keys; without them cells are taken at 1.26 of exact
TRIED = 10  # points of the sample for every cell
MARGIN = 6  # points of a sample for every column of its factor, at least: fewer say nothing about the rest


@dataclass(frozen=True)
class Option:
    """One way to multiply, and the seconds that it is predicted to take: once, and for every product."""

    method: str
    build: float
    product: float
    fact: str = ""

    def total(self, products: int) -> float:
        return self.build + products * self.product


@dataclass(frozen=True)
class Plan:
    """The method, why it was chosen, and what the others were predicted to take."""

    method: str
    reason: str
    products: int = 1
    options: tuple[Option, ...] = ()

    def __str__(self) -> str:
        many = "1 product" if self.products == 1 else f"{self.products} products"
        lines = [f"Method {self.method}: {self.reason}."]
        for option in self.options:
            fact = f" ({option.fact})" if option.fact else ""
            lines.append(f"Predicted for {many} by {option.method}: {option.total(self.products):.2g} s{fact}.")
        return "\n".join(lines)


def choose(problem: Problem, method: str, products: int, memory: int, placed: PlacedKeys) -> tuple[Engine, Plan]:
    """Build the engine that `method` asks for."""
    if method != "auto":
        return build(problem, method, memory, placed), Plan(method, "as asked", products)
    n, s = problem.shape
    if math.prod(problem.shape) * products <= SMALL:
        return build(problem, "exact", memory, placed), Plan("exact", f"{n} x {s} is small", products)
    exact = ExactEngine(problem, _single(problem), placed)
    first = _tile_option("exact", problem, exact.pairs, exact)
    options = [first]
    limit = TRIAL_SHARE * first.total(products)
    options += cells_trial(problem, limit, exact)
    options += factor_trial(problem, memory, 1.5 * limit)  # a hopeless one ends after its first columns
    best = min(options, key=lambda option: option.total(products))
    engine: Engine | None = exact
    if best is first or best.total(products) > WORTHWHILE * first.total(products):
        reason = "the other methods would not be faster" if len(options) > 1 else "trying others would cost too much"
    else:
        engine = _attempt(problem, best, first, products, memory, placed)
        reason = "predicted to be the fastest" if engine else f"{best.method} turned out slower than predicted"
    engine = engine or exact
    return engine, Plan(engine.name, reason, products, tuple(options))


def build(problem: Problem, method: str, memory: int, placed: PlacedKeys) -> Engine:
    if method == "exact":
        return ExactEngine(problem, problem.dtype == torch.float32, placed)
    if method == "lowrank":
        return lowrank.LowRankEngine(problem, most_rank(problem, memory))
    return cells.CellsEngine(problem, _single(problem), placed)


def _single(problem: Problem) -> bool:
    """Whether single precision may be tried: of float64 points only if eps is far above its rounding."""
    return problem.dtype == torch.float32 or problem.eps >= SINGLE


def most_rank(problem: Problem, memory: int) -> int:
    """The largest rank that fits into memory."""
    return max(1, min(problem.points, memory // (16 * problem.points)))


def _attempt(
    problem: Problem, best: Option, exact: Option, products: int, memory: int, placed: PlacedKeys
) -> Engine | None:
    """The engine of an option; None if building shows that it is slower than exact products after all."""
    whole = exact.total(products)
    if best.method == "cells":
        engine = cells.CellsEngine(problem, _single(problem), placed)
        return engine if products * _cells_option(problem, engine.near.pairs, engine).product < whole else None
    # Waiting for the machine is not counted.
    begun, allowed = time.thread_time(), min(2.0 * best.build + 0.1 * whole, 0.7 * whole)
    rank = most_rank(problem, memory)
    factor = lowrank.LowRankEngine(problem, rank, stop=lambda trace, r: time.thread_time() - begun > allowed)
    return factor if factor.certain else None


@lru_cache(maxsize=256)
def pair_seconds(name: str, d: int, dtype: torch.dtype) -> tuple[float, float]:
    """Of one pair: to evaluate its entry, and to multiply it once; by tiles of the usual size."""
    generator = torch.Generator().manual_seed(0)
    z, w = (torch.randn(m, d, generator=generator).to(dtype) for m in (ROWS, COLUMNS))
    frame = make_frame(PROFILES[name], w, math.sqrt(d), "float32" if dtype == torch.float32 else "float64")
    a, b, x, tiles = left(frame.place(z)), right(frame.place(w)), torch.ones(COLUMNS, 1, dtype=dtype), Tiles(frame)
    tile = tiles(a, b).clone()
    pairs = ROWS * COLUMNS
    return _fastest(lambda: tiles(a, b)) / pairs, _fastest(lambda: tile @ x) / pairs


def _tile_option(method: str, problem: Problem, pairs: float, exact: ExactEngine) -> Option:
    """Seconds of evaluating so many pairs in every product; the first product also forms sums of rows and columns."""
    entry, times = pair_seconds(problem.kernel.name, problem.keys.shape[1], exact.dtype)
    times *= 3 if exact.wide else 1  # by a copy in double precision
    first = 0.0 if exact.settled else pairs * times * 2
    return Option(method, first, pairs * (entry + (2 if problem.symmetric else 1) * times))


@lru_cache(maxsize=1)
def call_seconds() -> float:
    """Of a call of torch that has next to nothing to do."""
    tiny = torch.ones(8, 8)
    return _fastest(lambda: [torch.mm(tiny, tiny) for _ in range(50)]) / 50


@lru_cache(maxsize=1)
def flop_seconds() -> float:
    """Of a multiplication and an addition in a matrix product in double precision."""
    a, b = torch.ones(2048, 128, dtype=torch.float64), torch.ones(128, 128, dtype=torch.float64)
    return _fastest(lambda: a @ b) / (2048 * 128 * 128)


def _fastest(call: Callable[[], object]) -> float:
    return min(timeit.repeat(call, number=1, repeat=5))


def cells_trial(problem: Problem, limit: float, exact: ExactEngine) -> list[Option]:
    """Cells of a sample of the points: which share of the pairs would be near. Empty if that takes beyond `limit`."""
    (n, s), d = problem.shape, problem.keys.shape[1]
    count = cells.number_of_cells(n, s)
    most = TRIED * count
    entry, _ = pair_seconds(problem.kernel.name, d, torch.float32)
    if most * count * ((cells.ROUNDS + 1) * entry + 5e-9) * (1 if problem.symmetric else 2) > limit:
        return []
    generator, placed = torch.Generator().manual_seed(problem.seed), exact.placed

    def drawn(points: Tensor) -> Tensor:
        return points[torch.randint(len(points), (most,), generator=generator)]

    # Cells are tighter around the points that made them: others are looked at.
    index = cells.Index(placed.frame, placed.extent, drawn(problem.keys), count, problem.seed)
    keys = index.sort(drawn(problem.keys))
    queries = keys if problem.symmetric else index.sort(drawn(problem.queries))
    # The largest of m deviations grows like sqrt(log m).
    key_count, query_count = keys.sizes.double() * s / most, queries.sizes.double() * n / most
    more = math.sqrt(math.log(2 + s / count) / math.log(2 + most / count))
    near = cells.needed(
        cells.entry_bounds(index, queries, keys, more),
        key_count if problem.symmetric else query_count,
        key_count,
        cells.SKIP_SHARE * problem.eps,
    )
    pairs = float((near.double() * query_count[:, None] * key_count).sum())
    return [_cells_option(problem, pairs, exact)]


def _cells_option(problem: Problem, near: float, exact: ExactEngine) -> Option:
    """Seconds of cells with so many near pairs, in the arithmetic of exact products."""
    (n, s), d = problem.shape, problem.keys.shape[1]
    count, sides, call = cells.number_of_cells(n, s), 1 if problem.symmetric else 2, call_seconds()
    entry, _ = pair_seconds(problem.kernel.name, d, torch.float32)
    clustering = 0.0 if exact.placed.cells else (s * count + cells.ROUNDS * cells.SAMPLED * count**2) * entry
    setup = clustering + (n + s) / 2 * sides * (count * entry + 1e-8 * d)
    pairs = near / (3 - sides)
    tiles = _tile_option("cells", problem, pairs, exact)
    overhead = (count + pairs * count / n / COLUMNS) * CELL_CALLS * call
    fact = f"about {near / (n * s):.0%} of the pairs are near"
    return Option("cells", setup + tiles.build, tiles.product + overhead, fact)


def factor_trial(problem: Problem, memory: int, limit: float) -> list[Option]:
    """The rank that a sample of the points needs, if a factor of it can tell."""
    s, total, flop = len(problem.keys), problem.points, flop_seconds()
    # A factor of rank r of 6 r points takes about 6 r^3 multiplications, and each block of columns some calls.
    most = int((limit / (5 * MARGIN * flop)) ** (1 / 3))
    most = min(most, most_rank(problem, memory), total // MARGIN)
    if most < 32:
        return []
    generator = torch.Generator().manual_seed(problem.seed)

    def drawn() -> Tensor:
        ids = torch.randint(total, (MARGIN * most,), generator=generator)
        return torch.cat([problem.keys[ids[ids < s]], problem.queries[ids[ids >= s] - s]])

    chosen = drawn()
    share = lowrank.SHARE * problem.eps * (1 if problem.symmetric else 2) / total  # of the trace, for each point
    enough = share * len(chosen)

    def hopeless(trace: float, r: int) -> bool:
        """Whether the trace falls too slowly, like a power of ten for each block, to come down in time."""
        return math.log(trace / enough) > 1.5 * math.log(len(chosen) / trace) * (most - r) / r

    factor = lowrank.pivoted_cholesky(problem.kernel, chosen, most, tolerance=enough, stop=hopeless)
    if factor.trace > enough:
        return []
    # Other points say what the factor of a sample leaves of all: smooth parts fall as fast as before, lone points not.
    rest = (1.0 - factor.extend(drawn()).square().sum(1)).clamp_min_(0.0)
    smooth = max(0.0, math.log(float(rest.mean()) / share + 1e-300) / math.log(1.0 / share))
    alone = float((rest > 0.05).double().mean()) * total
    rank = factor.rank * (1.1 + smooth) + alone
    entry, _ = pair_seconds(problem.kernel.name, problem.keys.shape[1], torch.float64)
    setup = total * rank * (2.5 * rank * flop + 1.5 * entry)
    return [Option("lowrank", setup, total * rank * 1.2e-9 * (2 if problem.symmetric else 1), f"rank about {rank:.0f}")]
