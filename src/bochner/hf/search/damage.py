"""The damage of an option to a head, and the problem that the search solves for a model.

With e the error of the head's output relative to exact attention, the damage is the geometric mean of two figures. The
first, |e|^2 / |exact|^2, is the squared relative error: it knows nothing of what comes behind the head. The second is
what the error does to the model's output to first order,

    E (g . e)^2,   g = the gradient of a random direction of the output by the head's output,

summed over rows. For predictions the direction is the log-likelihood of labels drawn from them, and the figure is twice
the second-order divergence (its Fisher information); it is 0 for a head that nothing listens to. But it is local: where
the original is sure of itself, as on a passage that comes again, it is small for the heads that look the passage up.
One pass over the choice texts gives both, with a backward pass for some of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bochner.hf.calibrate import HeadErrors
from bochner.hf.calls import Call, exact
from bochner.hf.evaluate import Evaluator, Quality
from bochner.hf.observe import recording, run
from bochner.hf.search.knapsack import Choice, Table, all_exact, totals
from bochner.hf.search.options import Say, Space

WEIGHED = 3  # batches of the choice texts that have a backward pass


class Damages:
    """The damages of all options but exact as they are measured: `errors`, and `changes` (options, query heads)."""

    def __init__(self, space: Space, seed: int = 0) -> None:
        self.space, self.generator = space, torch.Generator().manual_seed(seed)
        self.layers = {name: layer for name, layer in space.layers.items() if layer.made}
        self.errors = {name: [HeadErrors() for _ in layer.made] for name, layer in self.layers.items()}
        self.changes = {
            name: torch.zeros(len(layer.made), layer.plan.num_heads, dtype=torch.float64)
            for name, layer in self.layers.items()
        }

    def add(self, evaluator: Evaluator, batch: dict[str, Any], with_gradient: bool) -> None:
        """Measure on one batch of the choice texts."""
        kept: dict[str, tuple[Tensor, list[Tensor]]] = {}

        def look(name: str, call: Call) -> Tensor | None:
            if name not in self.layers:
                return None
            out = exact(call)
            with torch.no_grad():
                others = [made(call) for made in self.layers[name].made.values()]
                for errors, other in zip(self.errors[name], others, strict=True):
                    errors.add(call, other, out)
            if with_gradient:
                out = out if out.requires_grad else out.requires_grad_()
                out.retain_grad()
                kept[name] = (out, [other - out.detach() for other in others])
            return out

        with recording(self.space.model, look):
            output = run(self.space.model, batch, gradient=with_gradient)
            if with_gradient and kept:
                with torch.enable_grad():
                    evaluator.direction(output, self.generator).backward()
        for name, (out, errors) in kept.items():
            if out.grad is not None:
                change = [(out.grad * e).sum(-1).double().square().sum((0, 2)) for e in errors]
                self.changes[name] += torch.stack(change).cpu()

    def by_key_head(self) -> dict[str, Tensor]:
        """The damage to each key head, the sum over its query heads, (options, g)."""
        found = {}
        for name, layer in self.layers.items():
            if all(isinstance(e.error, Tensor) for e in self.errors[name]):
                errors = torch.stack([e.squared().cpu() for e in self.errors[name]])
                damage = (errors * self.changes[name]).sqrt()
                found[name] = damage.view(len(damage), layer.plan.num_kv_heads, -1).sum(-1)
        return found


def measure_damages(space: Space, evaluator: Evaluator, say: Say) -> dict[str, Tensor]:
    """The damage of each option but exact to each key head, (options, g), by the layer's name."""
    found, model = Damages(space), space.model
    frozen = [p for p in model.parameters() if p.requires_grad]
    for p in frozen:
        p.requires_grad_(False)
    try:
        for i, batch in enumerate(evaluator.batches):
            say(f"measuring damages, batch {i + 1} of {len(evaluator.batches)}")
            found.add(evaluator, batch, i < WEIGHED)
    finally:
        for p in frozen:
            p.requires_grad_(True)
    return found.by_key_head()


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
