"""Which engine: the one asked for, or the cheapest that keeps the contract; and why."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..._checks import BochnerError
from .certificate import HOLD_OUT_ROWS, WORTHWHILE
from .engines.base import Engine
from .engines.cells import CellsEngine
from .engines.exact import ExactEngine, exact_engine
from .engines.features import FeaturesEngine
from .engines.lowrank import KEPT_SHARE, POWERS, LowRankEngine
from .engines.paper import Constants, PaperEngine
from .engines.sparse import SparseEngine, TooLarge
from .index import KeyIndex, build_index, reframe, sort_queries
from .inputs import OWNER
from .measured import measured_plan
from .plan import Plan, certain_plan, near_rounding
from .problem import Problem
from .tiles import TYPICAL, argument_error, extent, make_frame

METHODS = ("auto", "exact", "cells", "sparse", "lowrank", "lowrank+sparse", "paper", "features")
SMALL = 1 << 24  # pairs below which exact is simply fastest
GAUSSIAN_ONLY = ("paper", "features")
SEVERAL = 4  # products for which keeping the near entries pays
MANY = 20  # products for which a sharper bound on what a factor leaves pays
ROUNDING_SHARE = 0.4  # of eps, for the rounding of products by cells
FEW = 0.15  # of all pairs: a certain plan that costs no more is taken without looking for another


@dataclass(frozen=True)
class Options:
    """How to multiply, as far as the caller has said."""

    method: str = "auto"
    cells: int | None = None
    num_features: int = 1024
    constants: Constants = field(default_factory=Constants)
    products: int = 1
    memory: int = 1 << 31
    rank: int | None = None


@dataclass(frozen=True)
class Choice:
    """An engine, why it was chosen, and the index of the keys if one was built."""

    engine: Engine
    reason: str
    index: KeyIndex | None = None


def choose(problem: Problem, options: Options, index: KeyIndex | None = None) -> Choice:
    """Build the engine that `options.method` asks for; `index`: of the same keys, if there is one."""
    n, s = problem.shape
    method, reason = options.method, "as asked"
    if method in GAUSSIAN_ONLY and problem.kernel.name != "gaussian":
        raise BochnerError(
            f"The 'method' {method!r} of {OWNER} needs kernel='gaussian', got {problem.kernel.name!r}; use 'auto'."
        )
    if method == "auto" and n * s <= SMALL:
        method, reason = "exact", f"{n} x {s} is small: exact is fastest"
    if method == "exact":
        return Choice(exact_engine(problem), reason, index)
    if method == "lowrank":
        return Choice(LowRankEngine(problem, most_columns(problem, options)), reason, index)
    if method == "lowrank+sparse":
        return Choice(low_rank_sparse(problem, options), reason, index)
    if method == "paper":
        return Choice(PaperEngine(problem, options.constants), reason, index)
    if method == "features":
        return Choice(FeaturesEngine(problem, options.num_features), reason, index)
    engine = cells_engine(problem, index or make_index(problem, options))
    if method != "auto":
        engine = settled(problem, engine)
    if method == "sparse":
        sparse = sparse_engine(problem, options, engine)
        return Choice(sparse, reason, sparse.index)
    if method == "cells":
        return Choice(engine, reason, engine.index)
    choice = judged(problem, engine)
    return kept(problem, options, choice) if options.products >= SEVERAL else choice


def kept(problem: Problem, options: Options, choice: Choice) -> Choice:
    """For several products: keep the near entries, or the factor of a smooth kernel, if they fit into memory."""
    cells = choice.engine
    if isinstance(cells, ExactEngine):
        return low_rank(problem, options, choice)
    if not isinstance(cells, CellsEngine):
        return choice
    try:
        engine = sparse_engine(problem, options, cells)
    except TooLarge:
        return replace(choice, reason=f"{choice.reason}; too many near entries to keep in {options.memory >> 20} MB")
    return replace(choice, engine=engine, reason=f"{choice.reason}; entries kept for {options.products} products")


def most_columns(problem: Problem, options: Options) -> int:
    """The rank asked for, or the largest that fits into memory."""
    n, s = problem.shape
    rows = s if problem.symmetric else n + s
    return options.rank or max(1, min(s, options.memory // (16 * rows)))


def low_rank(problem: Problem, options: Options, choice: Choice) -> Choice:
    """A factor in place of exact tiles, if it meets eps."""
    if math.prod(problem.shape) <= SMALL:
        return choice
    engine = LowRankEngine(problem, worthwhile_rank(problem, options))
    said = "but smooth: a factor serves many products"
    if not engine.certain and engine.probe(problem.eps, POWERS if options.products >= MANY else 1) > problem.eps:
        # The remainder costs as much as this number of exact products.
        dear = engine.factor.rank / (0.5 * problem.keys.shape[1] + 12)
        if options.products < dear or not engine.keep_remainder(options.memory):
            left = f"rank {engine.factor.rank} leaves out {engine.bound:.2g} |x|"
            return replace(choice, reason=f"{choice.reason}; nor smooth enough: {left}")
        said = "but smooth: a factor and few entries of the rest serve many products"
    return replace(choice, engine=engine, reason=f"{choice.reason}, {said}")


def worthwhile_rank(problem: Problem, options: Options) -> int:
    """Products by a factor must be much cheaper than exact ones, and it must fit into memory."""
    return min(math.ceil(0.1 * min(problem.shape)), most_columns(problem, options))


def low_rank_sparse(problem: Problem, options: Options) -> LowRankEngine:
    """A factor and the larger entries of what it leaves, as asked."""
    engine = LowRankEngine(problem, options.rank or worthwhile_rank(problem, options))
    if not engine.certain and not engine.keep_remainder(options.memory):
        raise TooLarge(
            f"More than {KEPT_SHARE:.0%} of the entries that a factor of rank {engine.factor.rank} leaves would have "
            f"to be kept, or more than 'memory' allows; raise 'rank', 'eps' or 'memory', or use method='auto'."
        )
    return engine


def judged(problem: Problem, engine: CellsEngine) -> Choice:
    """Keep the cells if they meet eps for less than half the exact cost; else exact. Says why."""
    n, s = problem.shape
    exact_pairs = n * s / 2 if problem.symmetric else n * s
    sparse = engine.plan.met and product_pairs(engine.plan, engine.index) <= WORTHWHILE * exact_pairs
    if sparse:
        engine = settled(problem, engine)
    plan, index = engine.plan, engine.index
    facts = (
        f"a row sums to {plan.mean_row_sum:.3g} on average, {plan.fraction(index):.1%} of the pairs near give "
        f"{'an error of at most' if plan.certain else 'a predicted error of'} {plan.predicted:.2g} |x|"
    )
    if sparse:
        return Choice(engine, f"sparse enough: {facts}", index)
    return Choice(exact_engine(problem), f"not sparse enough at this bandwidth and eps: {facts}", index)


def product_pairs(plan: Plan, index: KeyIndex) -> int:
    """What a product costs in pairs, its check included."""
    n, s = plan.queries.rows.shape[0], index.keys.rows.shape[0]
    far = n * index.cells if plan.beta > 0 else 0
    return plan.pairs(index) + far + (0 if plan.certain else min(n, HOLD_OUT_ROWS) * s)


def make_index(problem: Problem, options: Options) -> KeyIndex:
    """Cells of the keys, in the cheapest arithmetic whose rounding within a cell stays far below eps."""
    kernel, keys, bandwidth = problem.kernel, problem.keys, problem.bandwidth
    frame = make_frame(kernel, keys, bandwidth, problem.arithmetic)
    reach = extent(frame, keys)
    if not reach < (1e15 if problem.single else 1e150):
        frame = frame._replace(arithmetic="difference")
    number = options.cells or max(1, math.ceil(2 * math.sqrt(keys.shape[0])))
    index = build_index(frame, keys, number, problem.generator())
    while index.frame.arithmetic != "difference":
        floor = math.sqrt(-2 * kernel.floor(torch.float32))
        span = 2 * float(index.keys.radius.max()) + min(floor, 2 * reach)
        lost = kernel.change(argument_error(span, keys.shape[1], index.frame) / TYPICAL)
        if lost <= problem.eps / 20:
            break
        index = reframe(index, "float64" if index.frame.arithmetic == "float32" else "difference")
    return index


def cells_engine(problem: Problem, index: KeyIndex) -> CellsEngine:
    """Cells with a certain plan where that is cheap; else with the cheaper of a certain and a measured one."""
    queries = None if problem.symmetric else sort_queries(index, problem.queries)
    plan = certain_plan(index, queries, problem.eps)
    if plan.fraction(index) > FEW:
        other = measured_plan(index, queries, problem.eps, problem.generator())
        if other.met and product_pairs(other, index) < product_pairs(plan, index):
            return CellsEngine(index, other)
        plan.mean_row_sum = other.mean_row_sum
    return CellsEngine(index, plan)


def settled(problem: Problem, engine: CellsEngine) -> CellsEngine:
    """The engine itself, or one in finer arithmetic: rounding must leave room for what is skipped.

    With a certain plan, not from any x. Products by a measured plan are checked one by one: there a guess will do.
    """
    arithmetic = engine.index.frame.arithmetic
    if engine.certain:
        fine = engine.settle(ROUNDING_SHARE * problem.eps)
    else:
        lost = float(engine.plan.rounding.max()) / TYPICAL + 16 * torch.finfo(engine.dtype).eps
        fine = lost * 4 * engine.plan.mean_row_sum <= ROUNDING_SHARE * problem.eps
    if fine or arithmetic == "difference":
        return engine
    return settled(problem, engine.refined("float64" if arithmetic == "float32" else "difference"))


def sparse_engine(problem: Problem, options: Options, engine: CellsEngine) -> SparseEngine:
    """The entries of these cells that matter; in double precision if single precision leaves little to drop."""
    plan = engine.plan
    if plan.certain and engine.dtype == torch.float32:
        lost = plan.rounded + plan.near_norm * torch.finfo(engine.dtype).eps * plan.terms(engine.index)
        if lost > ROUNDING_SHARE * problem.eps:
            engine = settled(problem, engine.refined("float64"))
    return SparseEngine(engine.index, engine.plan, problem.eps, options.memory)


def replanned(problem: Problem, index: KeyIndex, plan: Plan, filled: Tensor) -> CellsEngine:
    """A measured plan for the keys of `index`, whose cells are the `filled` ones of the plan's; nothing is measured."""
    queries = index.keys if problem.symmetric else sort_queries(index, problem.queries)
    near = plan.near[filled][:, filled]
    score = None if plan.score is None else plan.score[filled][:, filled]
    rounding = near_rounding(index, queries, near, index.distances())
    return CellsEngine(index, replace(plan, queries=queries, near=near, score=score, rounding=rounding))
