"""The damage of an option to a head, and the problem that the search solves for a model.

With e the error of a head's output and o the outputs of all heads of its layer, the damage is

    sum |e|^2 / sum |o|^2,

over the rows of the choice texts: how much of what the layer says the option changes. A head that says little does
little damage, whatever becomes of it; what the output projection drops is not seen. One pass over the texts measures
all options. What an error does to the model's output to first order was measured as well, by a backward pass. Its
choices lose more on unseen texts for MiniLM and SmolLM2, and less for a small decoder (experiments/search_ablation.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bochner.hf.calibrate import option_errors
from bochner.hf.evaluate import Quality
from bochner.hf.interface import attached
from bochner.hf.search.knapsack import Choice, Table, all_exact, totals
from bochner.hf.search.options import Say, Space
from bochner.hf.search.refine import Problem
from bochner.hf.search.verify import Verifier


def measure_damages(space: Space, texts: Verifier, say: Say) -> dict[str, Tensor]:
    """The damage of each option but exact to each key head, (options, g), by the layer's name."""
    options = {name: layer.made for name, layer in space.layers.items() if layer.made}
    found = {}
    for name, errors in option_errors(space.model, options, texts.batches if options else [], say).items():
        shares = torch.stack([(e.error / e.size.sum().clamp_min(1e-30)).cpu() for e in errors.values()])
        found[name] = shares.view(len(shares), space.layers[name].plan.num_kv_heads, -1).sum(-1)
    return found


def tables(space: Space, damages: dict[str, Tensor]) -> list[Table]:
    """The knapsack's tables, one for each layer that may change."""
    found = []
    for name, layer in space.layers.items():
        damage = torch.zeros(len(layer.fates), layer.plan.num_kv_heads, dtype=torch.float64)
        if name in damages:
            damage[1:] = damages[name]
        cost = torch.tensor([layer.cost[fate] for fate in layer.fates], dtype=torch.float64)
        found.append(Table(damage, cost[:, None].expand_as(damage), not space.goal.by_memory, layer.split))
    return found


class MeasuredProblem(Problem):
    """The search problem of a model: damages and costs in tables, quality by running a choice end to end."""

    def __init__(self, space: Space, texts: Verifier, tables: list[Table], say: Say) -> None:
        super().__init__(tables)
        self.space, self.texts, self.say = space, texts, say
        self.whole = totals(tables, all_exact(tables))[1]

    def share(self, choice: Choice) -> float:
        """The cost of a choice as a share of the original's, of all layers that may change."""
        return totals(self.tables, choice)[1] / max(self.whole, 1e-30)

    def measure(self, choice: Choice) -> Quality:
        plan = self.space.plan_of(choice)
        if not plan.converted:
            return self.texts.original().quality
        with attached(self.space.model, plan, self.space.build(plan)):
            found = self.texts.look(self.space.model).quality
        self.say(f"quality {found.retained:.2%} with {self.share(choice):.1%} of the {self.space.goal.minimize}")
        return found
