"""Which option each head takes when damages and costs add up: the exact frontier of a knapsack, as pure functions.

A layer is a table of damages and costs, one row per option and one column per key head; row 0 is exact attention, which
does no damage. For a price p of a unit of cost the best choice minimises

    damage + p x cost,

head by head, so no combination is ever enumerated. The choices for all prices are the corners of the lower convex hull
of (cost, damage): `frontier` finds every one of them. A choice off the hull can be better at one budget, by less than
the step between two corners.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Choice = tuple[tuple[int, ...], ...]  # for every layer, the option of every key head
EXACT = 0


class Table(NamedTuple):
    """The options of one layer: `damage` and `cost` (options, key heads); option 0 is exact attention.

    `shared`: all heads that are not exact take the same option, because two kinds of heads are two calls and cost time.
    `split`: what a layer costs more when some of its heads are exact and others are not.
    """

    damage: Tensor
    cost: Tensor
    shared: bool = False
    split: float = 0.0


def totals(tables: Sequence[Table], choice: Choice) -> tuple[float, float]:
    """The damage and the cost of a choice."""
    damage = cost = 0.0
    for table, options in zip(tables, choice, strict=True):
        rows, heads = torch.tensor(options), torch.arange(len(options))
        damage += table.damage[rows, heads].sum().item()
        cost += table.cost[rows, heads].sum().item()
        cost += table.split if 0 < options.count(EXACT) < len(options) else 0.0
    return damage, cost


def all_exact(tables: Sequence[Table]) -> Choice:
    """The original: every head stays exact."""
    return tuple((EXACT,) * table.damage.shape[1] for table in tables)


def at_price(tables: Sequence[Table], price: float) -> Choice:
    """The choice with the least damage + price x cost; the cheaper one where two are equal.

    >>> table = Table(torch.tensor([[0.0, 0.0], [1.0, 5.0]]), torch.tensor([[9.0, 9.0], [1.0, 1.0]]))
    >>> at_price([table], 0.2)
    ((1, 0),)
    """
    return tuple(_layer_at(table, price) for table in tables)


def _layer_at(table: Table, price: float) -> tuple[int, ...]:
    total = table.damage + price * table.cost
    if not table.shared:
        return _least(total, table.cost)
    count, heads = total.shape
    choices = [(EXACT,) * heads]
    for option in range(1, count):
        rows = torch.tensor([EXACT, option])
        choices += [(option,) * heads, tuple(option * i for i in _least(total[rows], table.cost[rows]))]

    def value(options: tuple[int, ...]) -> tuple[float, float]:
        damage, cost = totals([table], (options,))
        return damage + price * cost, cost

    return min(choices, key=value)


def _least(total: Tensor, cost: Tensor) -> tuple[int, ...]:
    """The option with the least total of each head; the cheapest of those that are equal."""
    tied = total <= total.amin(0)
    return tuple(torch.where(tied, cost, torch.inf).argmin(0).tolist())


def frontier(tables: Sequence[Table]) -> list[Choice]:
    """Every corner of the hull of (cost, damage), the cheapest first; the last one does no damage."""
    costs = torch.cat([t.cost.flatten() for t in tables])
    damages = torch.cat([t.damage.flatten() for t in tables])
    scale = max(damages.max().item(), 1e-30) / max(costs.max().item(), 1e-30)
    cheapest, harmless = at_price(tables, 1e12 * scale), at_price(tables, 1e-15 * scale)
    found = {cheapest: totals(tables, cheapest), harmless: totals(tables, harmless)}
    waiting = [(cheapest, harmless)]
    while waiting:
        a, b = waiting.pop()
        (damage_a, cost_a), (damage_b, cost_b) = found[a], found[b]
        if cost_b <= cost_a or damage_a <= damage_b:
            continue
        price = (damage_a - damage_b) / (cost_b - cost_a)
        middle = at_price(tables, price)
        damage, cost = totals(tables, middle)
        below = damage + price * cost < (damage_a + price * cost_a) * (1 - 1e-12)
        if middle not in found and below:
            found[middle] = (damage, cost)
            waiting += [(a, middle), (middle, b)]
    return sorted(found, key=lambda choice: (found[choice][1], found[choice][0]))
