"""From damages that add up to a choice whose quality was measured: pure functions of a problem."""

from __future__ import annotations

from collections.abc import Sequence

from bochner.hf.evaluate import Quality
from bochner.hf.search.knapsack import Choice, Table, frontier, totals

STEPS = 4  # choices that are looked at after a failure, at most: of 40 searches 4 needed the last
# (experiments/search_ablation.py)


class Problem:
    """All that a search knows of a model: the tables of its layers, and the quality of choices that were `tried`."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = list(tables)
        self.tried: dict[Choice, Quality] = {}

    def measure(self, choice: Choice) -> Quality:
        """The quality of a choice, run end to end."""
        raise NotImplementedError

    def quality(self, choice: Choice) -> Quality:
        """The same, measured once."""
        if choice not in self.tried:
            self.tried[choice] = self.measure(choice)
        return self.tried[choice]


def cheapest_that_keeps(problem: Problem, keep: float) -> Choice:
    """The cheapest choice of the frontier whose quality is at least `keep` by its lower confidence bound.

    Bisection: quality is taken to rise with cost along the frontier. The original, its last choice, retains everything.
    """
    path = frontier(problem.tables)
    low, high = -1, len(path) - 1
    while high - low > 1:
        middle = (low + high) // 2
        keeps = problem.quality(path[middle]).lower >= keep
        low, high = (low, middle) if keeps else (middle, high)
    return path[high]


def ladder(tables: Sequence[Table], chosen: Choice) -> list[Choice]:
    """The choice, and what is looked at in turn where it fails verification: half of its damage, a quarter, an eighth.

    Corners of the frontier, the dearer ones later; the original is not among them.
    """
    found, path, damage = [chosen], frontier(tables), totals(tables, chosen)[0]
    for step in range(1, STEPS + 1):
        below = [c for c in path if 0 < totals(tables, c)[0] <= damage / 2**step]
        found += [c for c in below[:1] if c not in found]
    return found


def best_within(tables: Sequence[Table], budget: float) -> Choice | None:
    """The choice of the frontier with the least damage that costs at most `budget`; None if all cost more."""
    fitting = [c for c in frontier(tables) if totals(tables, c)[1] <= budget]
    return fitting[-1] if fitting else None
