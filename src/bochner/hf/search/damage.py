"""The damage of an option to a head, and the problem that the search solves for a model.

The damage is the squared error of the head's output relative to exact attention, measured on the choice texts and
summed over its query heads. Errors were also weighed by gradients of the loss, or by the head's share of the layer's
output: neither chose better (experiments/search_ablation.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bochner.hf.calibrate import HeadErrors, option_errors
from bochner.hf.evaluate import Evaluator, Quality
from bochner.hf.search.knapsack import Choice, Table, all_exact, totals
from bochner.hf.search.options import Layer, Say, Space


def measure_damages(space: Space, data: Sequence[dict[str, Any]], say: Say) -> dict[str, Tensor]:
    """The damage of each option but exact to each key head, (options, g), by the layer's name."""
    options = {name: layer.made for name, layer in space.layers.items() if layer.made}
    found = option_errors(space.model, options, data, say)
    return {
        name: torch.stack([_by_key_head(errors[fate], space.layers[name]) for fate in space.layers[name].made])
        for name, errors in found.items()
    }


def _by_key_head(errors: HeadErrors, layer: Layer) -> Tensor:
    return errors.squared().cpu().view(layer.plan.num_kv_heads, -1).sum(-1)


def tables(space: Space, damages: dict[str, Tensor]) -> list[Table]:
    """The knapsack's tables, one for each layer that may change."""
    found = []
    for name, layer in space.layers.items():
        g = layer.plan.num_kv_heads
        damage = torch.zeros(len(layer.fates), g, dtype=torch.float64)
        if name in damages:
            damage[1:] = damages[name]
        cost = layer.cost[:, None].expand(-1, g).contiguous()
        found.append(Table(damage, cost, not space.goal.by_memory, layer.split))
    return found


class MeasuredProblem:
    """The search problem of a model: damages and costs from its options, quality by running a choice end to end."""

    def __init__(self, space: Space, evaluator: Evaluator, damages: dict[str, Tensor], say: Say) -> None:
        self.space, self.evaluator, self.say = space, evaluator, say
        self.tables = tables(space, damages)
        self.whole = totals(self.tables, all_exact(self.tables))[1]

    def measure(self, choice: Choice, give_up: float = 0.0) -> Quality:
        built = self.space.build(self.space.plan_of(choice))
        layers = {name: layer for name, layer in built.items() if not layer.plan.untouched}
        found = self.evaluator.quality(lambda batch: self.space.output(layers, batch), give_up)
        share = totals(self.tables, choice)[1] / max(self.whole, 1e-30)
        self.say(f"quality {found.retained:.2%} with {share:.1%} of the {self.space.goal.minimize}")
        return found
