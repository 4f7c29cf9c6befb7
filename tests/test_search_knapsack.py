"""The search's logic on planted problems: against brute force, and with faults put in by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("transformers")
from bochner.hf import evaluate
from bochner.hf.evaluate import Measure, Quality
from bochner.hf.search import knapsack, refine
from bochner.hf.search.knapsack import Choice, Table, all_exact, at_price, frontier, totals
from bochner.hf.search.refine import Problem, best_within, cheapest_that_keeps, ladder

KEEP = 0.9


def table(heads: int, options: int, seed: int, shared: bool = False, split: float = 0.0) -> Table:
    g = torch.Generator().manual_seed(seed)
    damage = torch.rand(options, heads, generator=g, dtype=torch.float64)
    damage[0] = 0
    cost = torch.rand(options, 1, generator=g, dtype=torch.float64).sort(0, descending=True).values
    return Table(damage, (cost + 0.05).expand(options, heads).contiguous(), shared, split)


def every_choice(tables: list[Table]) -> Iterator[Choice]:
    """All choices that are allowed."""
    layers = []
    for t in tables:
        count, heads = t.damage.shape
        found = itertools.product(range(count), repeat=heads)
        layers.append([o for o in found if not t.shared or len(set(o) - {0}) <= 1])
    yield from itertools.product(*layers)


def problems(shared: bool) -> list[list[Table]]:
    return [
        [table(heads, options, 10 * seed + i, shared, 0.2 * shared) for i, (heads, options) in enumerate(sizes)]
        for seed, sizes in enumerate([[(2, 3), (3, 2)], [(1, 4), (2, 2), (2, 3)], [(4, 3)], [(3, 4)]])
    ]


@pytest.mark.parametrize("shared", [False, True], ids=["memory", "time"])
def test_the_frontier_is_the_hull_of_all_choices(shared: bool) -> None:
    """For every price the best of all choices is on the frontier, and the frontier holds nothing that is not best."""
    for tables in problems(shared):
        every = [totals(tables, c) for c in every_choice(tables)]
        corners = [totals(tables, c) for c in frontier(tables)]
        assert corners == sorted(corners, key=lambda x: x[1])
        for price in torch.logspace(-3, 3, 61).tolist():
            best = min(d + price * c for d, c in every)
            assert min(d + price * c for d, c in corners) == pytest.approx(best, rel=1e-12)
        for (d0, c0), (d1, c1) in itertools.pairwise(corners):
            price = (d0 - d1) / (c1 - c0)  # at this price both are best
            assert d0 + price * c0 == pytest.approx(min(d + price * c for d, c in every), rel=1e-9)


@pytest.mark.parametrize("shared", [False, True], ids=["memory", "time"])
def test_a_choice_within_a_budget_is_the_best_up_to_one_corner(shared: bool) -> None:
    """Brute force may do better between two corners of the hull, never than the next corner."""
    for tables in problems(shared):
        corners = [totals(tables, c) for c in frontier(tables)]
        every = [totals(tables, c) for c in every_choice(tables)]
        for (damage, cost), (better, _) in itertools.pairwise(corners):
            assert min(d for d, c in every if c <= cost + 1e-12) == pytest.approx(damage, rel=1e-9)
            assert better < damage


def test_the_first_choice_is_the_cheapest_and_the_last_does_no_damage() -> None:
    tables = problems(False)[1]
    choices = frontier(tables)
    assert totals(tables, choices[0])[1] == pytest.approx(min(totals(tables, c)[1] for c in every_choice(tables)))
    assert totals(tables, choices[-1])[0] == 0


def test_a_layer_of_one_option_has_one_choice() -> None:
    alone = Table(torch.zeros(1, 3), torch.ones(1, 3))
    assert frontier([alone]) == [((0, 0, 0),)]


def test_heads_that_share_an_option_never_have_two() -> None:
    for tables in problems(True):
        for price in torch.logspace(-3, 3, 31).tolist():
            assert all(len(set(options) - {0}) <= 1 for options in at_price(tables, price))


class Planted(Problem):
    """A problem with a known answer: what a choice loses on each text is the planted loss of its heads."""

    def __init__(
        self, tables: list[Table], loss: Callable[[Choice], float], noise: float = 0.0, texts: int = 8
    ) -> None:
        super().__init__(tables)
        self.loss = loss
        spread = torch.linspace(-1, 1, texts, dtype=torch.float64)
        self.noise = noise * spread
        self.runs: list[Choice] = []

    def measure(self, choice: Choice) -> Quality:
        self.runs.append(choice)
        noise = self.noise if any(map(any, choice)) else 0 * self.noise
        return Quality({"planted": Measure(self.loss(choice) + noise)})


def planted(shared: bool = False, noise: float = 0.0) -> Planted:
    """Two layers of three heads: the measured damage is the true one, and two of three heads are redundant."""
    tables = []
    for seed in range(2):
        t = table(3, 3, seed, shared, 0.05 * shared)
        damage = t.damage * 0.01
        damage[1:, 0] = torch.tensor([0.2, 0.3])  # this head is needed
        tables.append(t._replace(damage=damage))
    return Planted(tables, lambda choice: totals(tables, choice)[0], noise)


def best_by_brute_force(problem: Planted, keep: float) -> float:
    fitting = [c for c in every_choice(problem.tables) if problem.measure(c).lower >= keep]
    problem.runs.clear()
    return min(totals(problem.tables, c)[1] for c in fitting)


def corner_above(problem: Planted, keep: float) -> float:
    """The cost of the cheapest corner of the hull that keeps: the best a Lagrangian can do."""
    found = [totals(problem.tables, c)[1] for c in frontier(problem.tables) if 1 - problem.loss(c) >= keep]
    return min(found)


@pytest.mark.parametrize("shared", [False, True], ids=["memory", "time"])
@pytest.mark.parametrize("keep", [0.99, 0.97, KEEP, 0.5])
def test_the_search_finds_the_cheapest_corner_that_keeps(shared: bool, keep: float) -> None:
    problem = planted(shared)
    brute = best_by_brute_force(problem, keep)
    found = cheapest_that_keeps(problem, keep)
    assert problem.quality(found).lower >= keep
    cost = totals(problem.tables, found)[1]
    assert cost <= corner_above(problem, keep) + 1e-12
    assert brute <= cost <= 1.35 * brute  # room for the hull's gap on six heads
    assert len(problem.runs) <= 2 + math.ceil(math.log2(len(frontier(problem.tables))))


def test_redundant_heads_are_given_up_and_needed_ones_stay_exact() -> None:
    found = cheapest_that_keeps(planted(), KEEP)
    assert all(options[0] == 0 and options[1] != 0 and options[2] != 0 for options in found)


def test_the_original_is_all_that_keeps_where_everything_does_damage() -> None:
    problem = planted()
    problem.loss = lambda choice: 0.0 if choice == all_exact(problem.tables) else 0.5
    assert cheapest_that_keeps(problem, KEEP) == all_exact(problem.tables)


def test_noise_makes_the_search_cautious() -> None:
    """The same mean quality with a spread over texts costs more, because its lower bound has to keep."""
    calm, noisy = planted(), planted(noise=0.05)
    first, second = (cheapest_that_keeps(p, 0.97) for p in (calm, noisy))
    quality = noisy.quality(second)
    assert quality.retained > quality.lower >= 0.97
    assert totals(noisy.tables, second)[1] > totals(calm.tables, first)[1]


def test_a_choice_within_a_memory_takes_no_more_and_wastes_no_corner() -> None:
    problem = planted()
    whole = totals(problem.tables, all_exact(problem.tables))[1]
    for share in (0.6, 0.8, 0.95):
        found = best_within(problem.tables, share * whole)
        assert found is not None
        damage, cost = totals(problem.tables, found)
        assert cost <= share * whole
        dearer = [c for c in frontier(problem.tables) if totals(problem.tables, c)[0] < damage]
        assert all(totals(problem.tables, c)[1] > share * whole for c in dearer)
    assert best_within(problem.tables, 0.0) is None


def test_each_step_of_the_ladder_halves_the_damage_and_costs_more() -> None:
    """Every step is the cheapest corner that does so; the original is none of them."""
    problem = planted()
    chosen = cheapest_that_keeps(problem, 0.5)
    steps = [totals(problem.tables, c) for c in ladder(problem.tables, chosen)]
    assert steps[0] == totals(problem.tables, chosen)
    assert len(steps) > 2
    corners = [totals(problem.tables, c) for c in frontier(problem.tables)]
    for (damage, cost), (less, dearer) in itertools.pairwise(steps):
        assert 0 < less < damage
        assert dearer > cost
    for halvings in range(1, refine.STEPS + 1):
        below = [x for x in corners if 0 < x[0] <= steps[0][0] / 2**halvings]
        assert not below or min(below, key=lambda x: x[1]) in steps
    original = all_exact(problem.tables)
    assert ladder(problem.tables, original) == [original]


def test_a_choice_is_measured_once() -> None:
    problem = planted()
    cheapest_that_keeps(problem, KEEP)
    cheapest_that_keeps(problem, KEEP)
    assert problem.runs == list(problem.tried)


# Faults, put in by hand: each must be noticed by the test that is named.


def _wrong_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = knapsack.at_price
    flipped = lambda tables, price: plain([t._replace(damage=-t.damage) for t in tables], price)  # noqa: E731
    monkeypatch.setattr(knapsack, "at_price", flipped)


def _equal_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = knapsack.at_price
    equal = lambda tables, price: plain([t._replace(cost=torch.ones_like(t.cost)) for t in tables], price)  # noqa: E731
    monkeypatch.setattr(knapsack, "at_price", equal)


def _equal_damages(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = knapsack.at_price
    flat = lambda tables, price: plain(  # noqa: E731
        [t._replace(damage=(t.damage > 0).double() * 0.1) for t in tables], price
    )
    monkeypatch.setattr(knapsack, "at_price", flat)


def _one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refine, "frontier", lambda tables: [frontier(tables)[0], frontier(tables)[-1]])


def _mean_for_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "CAUTION", 0.5)


def _nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planted, "measure", lambda self, choice: Quality({"": Measure(torch.zeros(4))}))


def _split_for_free(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = knapsack.at_price
    monkeypatch.setattr(knapsack, "at_price", lambda ts, price: plain([t._replace(split=0.0) for t in ts], price))


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]]] = {
    "damage has the wrong sign": (
        _wrong_sign,
        lambda: test_the_search_finds_the_cheapest_corner_that_keeps(False, KEEP),
    ),
    "all costs are equal": (_equal_costs, lambda: test_the_search_finds_the_cheapest_corner_that_keeps(False, 0.97)),
    "all damages are equal": (_equal_damages, test_redundant_heads_are_given_up_and_needed_ones_stay_exact),
    "one budget only": (_one_budget, lambda: test_the_search_finds_the_cheapest_corner_that_keeps(False, KEEP)),
    "the mean in place of the bound": (_mean_for_bound, test_noise_makes_the_search_cautious),
    "quality is never measured": (_nothing_measured, test_the_original_is_all_that_keeps_where_everything_does_damage),
    "a split is for free": (_split_for_free, lambda: test_the_frontier_is_the_hull_of_all_choices(True)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, notices = FAULTS[fault]
    notices()  # green before
    plant(monkeypatch)
    with pytest.raises((AssertionError, ZeroDivisionError)):
        notices()
