"""What is known about the error of one product, how surely, and what is done when it is too large.

Three kinds of statement about |Kx - y|_2, from strongest to weakest:

* `deterministic`: true without any randomness, rounding included;
* `guarantee`: holds with probability `confidence` over the hold-out rows, whatever the data: an empirical
  Bernstein bound (Maurer & Pontil 2009, theorem 4) whose range is the deterministic bound of each row; or, of a
  low-rank factor, over the random vectors from which the norm of what it leaves was bounded when it was built;
* `estimate`: the same formula with the largest drawn value as the range, and never below (eps/2) |x|, because m
  rows without a bad one leave a fraction 3/m of bad rows possible. Not a guarantee: rows far worse than all drawn
  ones can escape it. Coverage is tested on data with known truth.

Engines that are `certain` need no check. Of all others, products are checked: columns of K that carry much of x are
multiplied exactly (they are cheap, and the one row that matters to them is easily missed), the rest is compared with
hold-out rows drawn after y is fixed, and repaired if they say that eps is missed: more pairs first, exact at last.
Hold-out rows are drawn with replacement from a mixture: uniform, and in proportion to the squares of scores of what
each row did not evaluate. A few rows hold most of the squared error, and uniform rows rarely meet them. The draw
depends on x: two products see different rows, and the same product always the same.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._checks import spawn_seed
from .engines.base import Engine
from .engines.exact import precise_engine
from .problem import Problem
from .tiles import PRECISE, ExactRows, make_frame

HOLD_OUT_ROWS = 1024
ATTEMPTS = 8
WORTHWHILE = 0.5  # of the exact cost: above, approximating does not pay
RESOLUTION = 0.5  # of eps: m rows can miss a fraction 3/m of bad ones, so an estimate never claims less
MOST_EXACT_COLUMNS, FEWEST_EXACT_COLUMNS = 1024, 16


@dataclass(frozen=True)
class Cost:
    """What one product cost: kernel entries evaluated, entries of the full matrix, seconds, and repairs."""

    pairs: int
    pairs_exact: int
    seconds: float
    repairs: tuple[str, ...] = ()

    @property
    def fraction(self) -> float:
        """Kernel entries evaluated as a fraction of the full matrix."""
        return self.pairs / max(1, self.pairs_exact)


@dataclass(frozen=True)
class Estimate:
    """A product and a statement about its error: |Kx - value|_2 <= bound, of the given `kind`.

    `error` is the best guess of |Kx - value|_2 (0 if the product is exact up to rounding), `bound` the upper
    limit, both absolute; `relative` divides the bound by |x|_2, which is what `eps` limits.
    """

    value: Any
    error: float
    bound: float
    confidence: float
    kind: str
    cost: Cost
    method: str
    eps: float
    norm_x: float
    deterministic_bound: float
    hold_out_rows: int

    @property
    def relative(self) -> float:
        return self.bound / self.norm_x if self.norm_x > 0 else 0.0

    @property
    def met(self) -> bool:
        """Whether the stated bound is within eps |x|."""
        return self.bound <= self.eps * self.norm_x or self.norm_x == 0

    @property
    def statement(self) -> str:
        """The statement in words."""
        limit = f"|Kx - y| <= {self.bound:.3g} = {self.relative:.3g} |x|"
        if self.kind == "deterministic":
            return f"{limit}, deterministically (rounding included)."
        if self.kind == "guarantee":
            drawn = f"{self.hold_out_rows} hold-out rows" if self.hold_out_rows else "vectors drawn when it was built"
            return f"{limit} with probability at least {self.confidence:.0%} over {drawn}."
        return (
            f"{limit}, an estimate at the {self.confidence:.0%} level from {self.hold_out_rows} hold-out rows, "
            f"not a guarantee; the best guess is {self.error:.3g}."
        )

    def __str__(self) -> str:
        return f"{self.statement} {self.method}: {self.cost.fraction:.1%} of the pairs, {self.cost.seconds:.3g} s."


# ---- hold-out rows ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HoldOut:
    """Squared-error statistics from the drawn rows, one entry per column of x."""

    mean: Tensor  # estimated |e|^2
    bound: Tensor  # upper limit of |e|^2, estimate
    guarantee: Tensor  # upper limit of |e|^2, guarantee (inf without row bounds)
    rows: int


def probabilities(scores: list[Tensor], n: int) -> Tensor:
    """The sampling distribution over rows, float64: 0.4 uniform, the rest shared by the squared scores."""
    p = torch.full((n,), 1.0 / n, dtype=torch.float64)
    usable = [s for s in (score.double().square() for score in scores) if float(s.sum()) > 0]
    if usable:
        p *= 0.4
        for s in usable:
            p += (0.6 / len(usable)) * s / s.sum()
    return p


ROUNDING = 1e-12  # of a product in double precision, relative to its norm; generous


def hold_out(
    value: Tensor,
    truth: Callable[[Tensor], Tensor],
    scores: list[Tensor],
    count: int,
    confidence: float,
    generator: torch.Generator,
    row_bound: Tensor | None = None,
) -> HoldOut:
    """Compare y (n, r) with exact rows: `truth(ids)` gives (rows, r). Cost: at most 2 `count` exact rows."""
    n = value.shape[0]
    if 2 * count >= n:  # every row is checked: nothing is left to chance
        wide = value.double()
        total = (truth(torch.arange(n)) - wide).square().sum(0)
        most = (total.sqrt() + ROUNDING * wide.norm(dim=0)).square()
        return HoldOut(total, most, most, n)
    p = probabilities(scores, n)
    uniform = torch.rand(count, dtype=torch.float64, generator=generator)
    ids = torch.searchsorted(p.cumsum(0), uniform).clamp_max(n - 1)
    distinct, where = ids.unique(return_inverse=True)
    error = (truth(distinct) - value[distinct].double()).square()[where] / p[ids, None]
    mean, variance = error.mean(0), error.var(0)
    # Confidence is shared by the columns; log(2/delta) as in the empirical Bernstein inequality.
    log = math.log(2.0 * value.shape[1] / (1.0 - confidence))
    base = mean + (2.0 * variance * log / count).sqrt()
    tail = 7.0 * log / (3.0 * (count - 1))
    guarantee = torch.full_like(mean, math.inf)
    if row_bound is not None:
        guarantee = base + tail * float((row_bound.double().square() / p).max())
    return HoldOut(mean, base + tail * error.amax(0), guarantee, int(distinct.numel()))


# ---- products, checked -----------------------------------------------------------------------------------------------


@dataclass
class Checked:
    """A product (n, r), how it came about, and what the last check saw.

    `exact_by`: the engine that made it exactly and the x given to it, if nothing but rounding is missing.
    """

    value: Tensor
    pairs: int
    exact_by: tuple[Engine, Tensor] | None = None
    repairs: list[str] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    held: HoldOut | None = None


def hold_out_generator(problem: Problem, x: Tensor, attempt: int) -> torch.Generator:
    """Other rows for every x and attempt, the same rows for the same ones."""
    content = zlib.crc32(np.ascontiguousarray(x.numpy()).tobytes())
    return torch.Generator().manual_seed(spawn_seed(problem.seed, content, attempt))


def split_columns(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Positions of the entries that carry much of a column of x, and x without them.

    Heavy is more than 4/most of a column's energy, or anything in a column with at most `most` entries: then nothing of
    it is left.
    """
    most = min(most, x.shape[0])
    size = x.double().abs()
    top = size.topk(most, dim=0)
    few = (size > 0).sum(0) <= most
    heavy = (top.values.square() > 4.0 / most * size.square().sum(0)) | (few & (top.values > 0))
    ids = top.indices[heavy].unique()
    rest = x.clone()
    row, column = heavy.nonzero().unbind(1)
    rest[top.indices[row, column], column] = 0.0
    return ids, rest


def exact_rows(problem: Problem, x: Tensor, adjoint: bool, rough: bool = False) -> ExactRows:
    """Exact rows of the product in double precision; `rough`: in single precision, for a mere check."""
    rows, others = (problem.keys, problem.queries) if adjoint else (problem.queries, problem.keys)
    frame = make_frame(problem.kernel, others, problem.bandwidth, "float32") if rough else None
    return ExactRows(problem.kernel, rows, others, problem.bandwidth, x, frame)


def multiply(problem: Problem, engine: Engine, x: Tensor, adjoint: bool, check: bool) -> Checked:
    """`K x` for x in float64, columns of about unit size; checked and repaired unless the engine is certain anyway."""
    if engine.certain or engine.linear or not check:
        applied = engine.apply(x.to(engine.dtype), adjoint)
        return Checked(applied.value, applied.pairs, (engine, x) if engine.exact else None)

    # 1. Columns of K that carry much of x, exactly.
    length = x.shape[0]
    heavy, rest = split_columns(x, max(FEWEST_EXACT_COLUMNS, min(MOST_EXACT_COLUMNS, math.isqrt(length))))
    out = Checked(torch.zeros(problem.shape[1 if adjoint else 0], x.shape[1], dtype=torch.float64), 0)
    if heavy.numel():
        points, others = (problem.keys, problem.queries) if adjoint else (problem.queries, problem.keys)
        few = precise_engine(replace(problem, queries=points, keys=others[heavy], symmetric=False))
        part = (x - rest)[heavy]
        applied = few.apply(part.to(few.dtype))
        out = Checked(applied.value.double(), applied.pairs, (few, part), ["exact columns"])
    busy = (rest != 0).any(0).nonzero()[:, 0]
    if busy.numel() == 0:
        return out

    # 2. The rest by the engine, judged by hold-out rows.
    applied = engine.apply(rest[:, busy].to(engine.dtype), adjoint)
    out.value[:, busy] += applied.value
    out.pairs, out.scores, out.exact_by = out.pairs + applied.pairs, applied.scores, None
    _judge(problem, engine, x, rest, applied.value, busy, adjoint, out)
    return out


def _judge(
    problem: Problem,
    engine: Engine,
    x: Tensor,
    rest: Tensor,
    parts: Tensor,
    busy: Tensor,
    adjoint: bool,
    out: Checked,
) -> None:
    """Hold-out rows for the `busy` columns; columns whose upper estimate exceeds eps |x| are repaired, in place.

    The confidence of the k-th attempt is halved each time, so that stopping at the first success keeps it.
    """
    limit = (problem.eps * x[:, busy].norm(dim=0)).square()
    truth = exact_rows(problem, x[:, busy], adjoint, engine.rough)
    parts = parts.double()
    fraction = 0.0
    for attempt in range(ATTEMPTS):
        confidence = 1 - (1 - problem.confidence) * 0.5 ** (attempt + 1)
        generator = hold_out_generator(problem, x, attempt)
        out.held = hold_out(out.value[:, busy], truth, out.scores, HOLD_OUT_ROWS, confidence, generator)
        bad = (out.held.bound > limit).nonzero()[:, 0]
        if bad.numel() == 0:
            return
        if attempt == 0:
            continue  # one draw can look worse than it is: draw again before spending more
        columns = busy[bad]
        fraction = max(0.01, 4 * fraction)
        better = (
            None if fraction > WORTHWHILE or adjoint else engine.repair(rest[:, columns].to(engine.dtype), fraction)
        )
        if better is None:
            exact = precise_engine(problem)
            applied = exact.apply(x[:, columns].to(exact.dtype), adjoint)
            out.value[:, columns] = applied.value.double()
            out.pairs += applied.pairs
            out.repairs.append("exact")
            if bad.numel() == busy.numel() == x.shape[1]:
                out.exact_by = (exact, x)
            return
        out.value[:, columns] += better.value.double() - parts[:, bad]
        parts[:, bad] = better.value.double()
        out.pairs += better.pairs
        out.scores = better.scores
        out.repairs.append(f"near {fraction:.1%}")


# ---- statements ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statement:
    """What can be said of one product: |Kx - y|_2 <= bound."""

    kind: str
    bound: float
    error: float
    deterministic: float
    rows: int = 0


def state(problem: Problem, engine: Engine, x: Tensor, checked: Checked) -> Statement:
    """The strongest statement about the product of one column that is within eps |x|; else the estimate.

    May replace `checked.value` by a product in double precision, where single precision is too coarse for a bound.
    """
    limit = problem.eps * float(x.norm())
    unit = torch.finfo(problem.dtype).eps / 2  # the answer is rounded to the dtype of the points
    deterministic = math.inf
    if checked.exact_by is not None or engine.certain or engine.linear:
        maker, argument = checked.exact_by or (engine, x)
        bound, pairs = maker.error_bound(argument.to(maker.dtype))
        checked.pairs += pairs
        deterministic = float(bound) + unit * float(checked.value.double().norm())
        if deterministic > limit and maker.exact and maker.dtype == torch.float32:
            exact = precise_engine(problem)
            checked.value = exact.apply(x.to(exact.dtype)).value
            checked.repairs.append("float64")
            bound, pairs = exact.error_bound(x.to(exact.dtype))
            checked.pairs += pairs
            deterministic = float(bound) + unit * float(checked.value.norm())
        finer = None if deterministic <= limit or maker.exact else maker.precise()
        if finer is not None:
            applied = finer.apply(x)
            bound, pairs = finer.error_bound(x)
            if float(bound) + unit * float(applied.value.norm()) < deterministic:
                deterministic = float(bound) + unit * float(applied.value.norm())
                checked.value, checked.pairs = applied.value, checked.pairs + applied.pairs + pairs
                checked.repairs.append("float64")
        if deterministic <= limit or maker.exact:
            return Statement("deterministic", deterministic, 0.0, deterministic)
        likely = engine.likely(x)
        lost = unit * float(checked.value.double().norm())
        if likely.confidence >= problem.confidence and likely.bound + lost <= limit:
            return Statement("guarantee", likely.bound + lost, likely.error, deterministic)
    repaired = any(repair.startswith("near") for repair in checked.repairs)  # then by another plan than the engine's
    rows = None if repaired else engine.row_bound(x.to(engine.dtype))
    if rows is not None:
        rows = rows + unit * checked.value.double().abs()[:, 0] + PRECISE * float(x.abs().sum())
        deterministic = min(deterministic, float(rows.norm()))
        if deterministic <= limit:
            return Statement("deterministic", deterministic, 0.0, deterministic)
    truth = exact_rows(problem, x, False)
    half = 1 - (1 - problem.confidence) / 2
    scores = checked.scores if rows is None else [*checked.scores, rows]
    held = checked.held
    # Hold-out rows are exact up to PRECISE, and the answer is rounded after it was compared with them.
    lost = unit * float(checked.value.double().norm())
    lost += PRECISE * float(x.abs().sum()) * math.sqrt(checked.value.shape[0])
    if rows is not None or held is None:
        generator = hold_out_generator(problem, x, ATTEMPTS + len(checked.repairs))
        again = hold_out(checked.value, truth, scores, HOLD_OUT_ROWS, half, generator, rows)
        checked.pairs += again.rows * problem.shape[1]
        guarantee = math.sqrt(float(again.guarantee)) + lost
        if guarantee <= limit:
            return Statement("guarantee", guarantee, math.sqrt(float(again.mean)), deterministic, again.rows)
        held = again if held is None or float(again.bound) > float(held.bound) else held
    upper = max(math.sqrt(float(held.bound)) + lost, RESOLUTION * limit)
    return Statement("estimate", upper, math.sqrt(float(held.mean)), deterministic, held.rows)
