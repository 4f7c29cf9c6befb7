"""Which key heads stay exact when only some can: a gate on each, moved together while the budget falls.

Damages that add up head by head know nothing of heads that stand in for each other. Here every key head has a gate g
between what replaces it (0) and exact attention (1), and the judge's loss is minimised over all of them at once,

    min loss(g)   subject to   sum_u saving_u g_u <= B,   0 <= g <= 1,

by projected gradient steps while B falls; a concave term drives the gates towards 0 and 1. One descent gives a choice
for every budget on its way, each step for the price of one forward and one backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bochner.hf.choose import gate_gradient
from bochner.hf.judge import Judge
from bochner.hf.layer import LinearAttention

STEPS, WARM = 24, 8  # and how many of them come before the budget falls
SHARES = (1.1, 0.25)  # of what the start spends, at first and at last: narrower windows leave room for more
RATE = 0.1  # by which the gates with the steepest slopes move in a step
MEMORY, MEMORY_OF_SQUARES = 0.8, 0.9  # of earlier gradients
CONCAVE = 1.0  # how strongly gates are driven apart, as a share of the rate
LEAST_SLOPE = 0.1  # of the steepest: below it slopes are taken for noise


def project(gates: Tensor, savings: Tensor, budget: float) -> Tensor:
    """The nearest gates in [0, 1] with `sum savings gates <= budget`.

    >>> project(torch.tensor([0.9, 0.5, -0.2]), torch.ones(3), 1.0)
    tensor([0.7000, 0.3000, 0.0000])
    """
    inside = gates.clamp(0, 1)
    if inside @ savings <= budget:
        return inside
    low, high = 0.0, (gates / savings).max().item()
    for _ in range(60):
        middle = (low + high) / 2
        over = (gates - middle * savings).clamp(0, 1) @ savings > budget
        low, high = (middle, high) if over else (low, middle)
    return (gates - high * savings).clamp(0, 1)


def rounded(gates: Tensor, savings: Tensor, budget: float) -> Tensor:
    """Which have the highest gates and fit into the budget, to the nearest of them; (units,) bool.

    >>> rounded(torch.tensor([0.3, 0.9, 0.6]), torch.ones(3), 1.8)
    tensor([False,  True,  True])
    """
    order = gates.argsort(descending=True, stable=True)
    spent = savings[order].cumsum(0) - savings[order] / 2
    return torch.zeros(len(gates), dtype=torch.bool).scatter(0, order, spent <= budget)


def descend(
    model: Any,
    layers: Mapping[str, LinearAttention],
    start: Mapping[str, Tensor],
    savings: Mapping[str, float],
    judge: Judge,
    say: Callable[[str], None] = lambda text: None,
) -> list[dict[str, list[int]]]:
    """The exact key heads of each module for falling budgets, in shares of what `start` spends; each within the last.

    `layers`: what replaces exact attention, one per attention module; `start`: gates (g,) of each module's key heads, 1
    where they are exact; `savings`: what a key head of the module saves when it is replaced. A step asks one
    batch of the judge.
    """
    names = list(layers)
    sizes = [layers[name].plan.num_kv_heads for name in names]
    unit = torch.cat([torch.full((n,), savings[x], dtype=torch.float64) for x, n in zip(names, sizes, strict=True)])
    unit = unit / unit.mean()
    first = torch.cat([start[name].double() for name in names])
    full = (first @ unit).item()
    gates = 0.25 + 0.5 * first  # half way: what stands in for each other has no slope where all is exact
    slope, square = torch.zeros_like(gates), torch.zeros_like(gates)
    stayed, budgets = torch.zeros_like(gates), list[float]()
    for step in range(STEPS):
        say(f"moving gates, step {step + 1} of {STEPS}")
        index = judge.turn(step)
        heads = {
            name: part.repeat_interleave(layers[name].plan.group).float()
            for name, part in zip(names, gates.split(sizes), strict=True)
        }
        gradient = gate_gradient(model, layers, heads, judge.batches[index], partial(judge.loss, index))
        now = torch.cat([_by_key_head(gradient.get(name), n) for name, n in zip(names, sizes, strict=True)])
        slope = MEMORY * slope + (1 - MEMORY) * now
        square = MEMORY_OF_SQUARES * square + (1 - MEMORY_OF_SQUARES) * now.square()
        mean, root = slope / (1 - MEMORY ** (step + 1)), (square / (1 - MEMORY_OF_SQUARES ** (step + 1))).sqrt()
        move = mean / (root + LEAST_SLOPE * now.abs().max()).clamp_min(1e-30) + CONCAVE * (0.5 - gates)
        done = max(0, step - WARM) / (STEPS - 1 - WARM)
        budget = full * SHARES[0] ** (1 - done) * SHARES[1] ** done
        gates = project(gates - RATE * move, unit, budget)
        if step >= WARM:
            stayed, budgets = stayed + gates, [*budgets, budget]
    # Gates need the whole way to settle: a budget gets those that stayed longest, not those of its step.
    chosen = [rounded(stayed, unit, budget).split(sizes) for budget in budgets]
    return [{n: part.nonzero()[:, 0].tolist() for n, part in zip(names, parts, strict=True)} for parts in chosen]


def _by_key_head(gradient: Tensor | None, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float64) if gradient is None else gradient.view(count, -1).sum(-1)
