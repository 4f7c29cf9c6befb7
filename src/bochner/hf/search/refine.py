"""From damages that add up to a choice whose quality was measured: pure functions over a small protocol.

`Problem` is all that the search knows of a model, so that its logic can be tested without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bochner.hf.evaluate import Quality
from bochner.hf.search.knapsack import Choice, Table, frontier, totals

STEPS = 4  # choices that are looked at after a failure, at most; experiments/search_ablation.py needed one


class Problem(Protocol):
    """What a search needs to know."""

    @property
    def tables(self) -> Sequence[Table]:
        """For every layer the damages and costs of its heads' options."""
        ...

    def measure(self, choice: Choice) -> Quality:
        """The quality of a choice, run end to end."""
        ...


@dataclass
class Candidate:
    """One choice that was measured. `damage`: what the tables predict for it; `cost`: bytes or seconds."""

    choice: Choice
    damage: float
    cost: float
    quality: Quality


class Trials:
    """All choices that were measured, each once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tried: dict[Choice, Candidate] = {}

    def run(self, choice: Choice, quality: Quality | None = None) -> Candidate:
        """Measure a choice, unless that was done or its quality is known."""
        if choice not in self.tried:
            damage, cost = totals(self.problem.tables, choice)
            self.tried[choice] = Candidate(choice, damage, cost, quality or self.problem.measure(choice))
        return self.tried[choice]

    def by_cost(self) -> list[Candidate]:
        """The cheapest first."""
        return sorted(self.tried.values(), key=lambda c: c.cost)


def cheapest_that_keeps(problem: Problem, keep: float, trials: Trials) -> Candidate:
    """The cheapest choice of the frontier whose quality is at least `keep` by its lower confidence bound.

    Bisection: quality is taken to rise with cost along the frontier. The original, its last choice, retains everything.
    """
    path = frontier(problem.tables)
    low, high = -1, len(path) - 1
    while high - low > 1:
        middle = (low + high) // 2
        keeps = trials.run(path[middle]).quality.lower >= keep
        low, high = (low, middle) if keeps else (middle, high)
    return trials.run(path[high])


def ladder(problem: Problem, chosen: Candidate) -> list[Choice]:
    """The choice, and what is looked at in turn where it fails verification: half of its damage, a quarter, an eighth.

    Corners of the frontier, the dearer ones later; the original is not among them.
    """
    found, path = [chosen.choice], frontier(problem.tables)
    for step in range(1, STEPS + 1):
        below = [c for c in path if 0 < totals(problem.tables, c)[0] <= chosen.damage / 2**step]
        found += [c for c in below[:1] if c not in found]
    return found


def best_within(problem: Problem, budget: float, trials: Trials) -> Candidate | None:
    """The choice of the frontier with the least damage that costs at most `budget`; None if all cost more."""
    fitting = [c for c in frontier(problem.tables) if totals(problem.tables, c)[1] <= budget]
    return trials.run(fitting[-1]) if fitting else None
