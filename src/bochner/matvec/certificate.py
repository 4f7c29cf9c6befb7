"""What is known about the error of one product, and how surely.

Three kinds of statement about |Kx - y|_2, from strongest to weakest:

* `deterministic`: true without any randomness (up to the rounding stated in `rounding`);
* `guarantee`: holds with probability `confidence` over the hold-out rows, whatever the data: an empirical
  Bernstein bound (Maurer & Pontil 2009, theorem 4) whose range is the deterministic bound of each row;
* `estimate`: the same formula with the largest drawn value as the range, and never below (eps/2) |x|, because m
  rows without a bad one leave a fraction 3/m of bad rows possible. Not a guarantee: rows far worse than all drawn
  ones can escape it. Coverage is tested on data with known truth.

Hold-out rows are drawn after y is fixed, with replacement, from a mixture: uniform, and in proportion to the
squares of two scores of what each row did not evaluate. A few rows hold most of the squared error, and uniform
rows rarely meet them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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

    `stderr` is the best guess of |Kx - value|_2 (0 if the product is exact up to rounding), `bound` the upper
    limit, both absolute; `relative` divides the bound by |x|_2, which is what `eps` limits.
    """

    value: Any
    stderr: float
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
            return f"{limit}, deterministically (up to rounding)."
        if self.kind == "guarantee":
            return f"{limit} with probability at least {self.confidence:.0%} over {self.hold_out_rows} hold-out rows."
        return (
            f"{limit}, an estimate at the {self.confidence:.0%} level from {self.hold_out_rows} hold-out rows, "
            f"not a guarantee; the best guess is {self.stderr:.3g}."
        )

    def __str__(self) -> str:
        return f"{self.statement} {self.method}: {self.cost.fraction:.1%} of the pairs, {self.cost.seconds:.3g} s."


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


def hold_out(
    value: Tensor,
    truth: Callable[[Tensor], Tensor],
    scores: list[Tensor],
    count: int,
    confidence: float,
    generator: torch.Generator,
    row_bound: Tensor | None = None,
) -> HoldOut:
    """Compare y (n, r) with exact rows: `truth(ids)` gives (rows, r). Cost: `count` exact rows."""
    n = value.shape[0]
    if count >= n:  # every row is checked: nothing is left to chance
        total = (truth(torch.arange(n)) - value.double()).square().sum(0)
        return HoldOut(total, total, total, n)
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
