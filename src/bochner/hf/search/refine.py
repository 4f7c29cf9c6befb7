"""From damages that add up to a choice whose quality was measured: pure functions over a small protocol.

`Problem` is all that the search knows of a model, so that its logic can be tested without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bochner.hf.evaluate import Quality
from bochner.hf.search.knapsack import Choice, Table, all_exact, frontier, thinned, totals

STEP = 0.02  # by which the costs of two choices that are measured differ at least


class Problem(Protocol):
    """What a search needs to know."""

    @property
    def tables(self) -> Sequence[Table]:
        """For every layer the damages and costs of its heads' options."""
        ...

    def measure(self, choice: Choice) -> Quality:
        """The quality of a choice, run end to end on the choice texts."""
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

    def run(self, choice: Choice) -> Candidate:
        """Measure a choice, unless that was done; its predicted damage is always that of the present tables."""
        damage, cost = totals(self.problem.tables, choice)
        if choice not in self.tried:
            self.tried[choice] = Candidate(choice, damage, cost, self.problem.measure(choice))
        self.tried[choice].damage = damage
        return self.tried[choice]

    def by_cost(self) -> list[Candidate]:
        """The cheapest first."""
        return sorted(self.tried.values(), key=lambda c: c.cost)


def cheapest_that_keeps(problem: Problem, keep: float, trials: Trials) -> Candidate:
    """The cheapest choice of the frontier whose quality is at least `keep` by its lower confidence bound.

    Bisection: quality is taken to rise with cost along the frontier. The original keeps everything, so that there
    always is one.
    """
    path = thinned(problem.tables, frontier(problem.tables), STEP)
    return bisect(path, lambda choice: trials.run(choice).quality.lower >= keep, trials)


def bisect(path: Sequence[Choice], keeps: Callable[[Choice], bool], trials: Trials) -> Candidate:
    """The first of some choices, by rising cost, that keeps; the last is taken to keep."""
    low, high = -1, len(path) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(path[middle]) else (middle, high)
    return trials.run(path[high])


def best_within(problem: Problem, budget: float, trials: Trials) -> Candidate | None:
    """The choice of the frontier with the least damage among those that cost at most `budget`; None if all cost more."""
    fitting = [c for c in frontier(problem.tables) if totals(problem.tables, c)[1] <= budget]
    return trials.run(fitting[-1]) if fitting else None


def original(problem: Problem, trials: Trials) -> Candidate:
    """The model as it is."""
    return trials.run(all_exact(problem.tables))
