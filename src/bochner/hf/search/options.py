"""What each layer's heads may become, fitted, with what each option costs; and a choice of them as a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bochner.hf import drift
from bochner.hf.attention import LinearAttention, layer_seconds
from bochner.hf.calibrate import Samples, observe
from bochner.hf.fates import EXACT, FATES, Fate
from bochner.hf.plan import LayerPlan, Plan
from bochner.hf.search.knapsack import Choice
from bochner.hf.search.texts import Goal

Say = Callable[[str], None]


@dataclass
class Layer:
    """One attention module whose heads may change: `made` holds each option for all of its key heads, fitted.

    `length`: how many keys it has where the longest of all modules has as many as the goal names. `cost`: bytes or
    seconds of one key head as each option. `split`: the seconds that exact heads beside others add.
    """

    plan: LayerPlan
    length: int
    made: dict[Fate, LinearAttention] = field(default_factory=dict)
    cost: dict[Fate, float] = field(default_factory=lambda: {EXACT: 0.0})
    split: float = 0.0

    @property
    def fates(self) -> list[Fate]:
        return [EXACT, *self.made]


class Space:
    """All layers of a model with the options of their heads."""

    def __init__(self, model: Any, shapes: Mapping[str, Any], goal: Goal, seed: int = 0) -> None:
        self.model, self.goal = model, goal
        first = next(model.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.draft = Plan.of(shapes, getattr(model.config, "model_type", ""), seed)
        longest = max(shape.keys for shape in shapes.values()) or 1
        self.layers = {
            plan.name: Layer(plan, max(1, round(shapes[plan.name].keys / longest * goal.length)))
            for plan in self.draft.layers
            if not plan.reason and (not goal.by_memory or (plan.is_causal and not plan.is_cross))
        }

    @property
    def original_bytes(self) -> int:
        return self.draft.cache_bytes(self.goal.length, element_size=self.dtype.itemsize, converted=False)

    def bytes_of(self, plan: Plan) -> int:
        return plan.cache_bytes(self.goal.length, element_size=self.dtype.itemsize)

    def fit(self, data: Sequence[dict[str, Any]], say: Say) -> None:
        """Make and price every option, and fit the maps of those that cost less than exact attention."""
        samples = observe(self.model, self.layers, data, say)
        for name, layer in self.layers.items():
            drift.note(layer.plan, samples[name].q, samples[name].k)
            for fate in candidates(layer, samples[name], self.goal):
                plan = replace(layer.plan, fates=[fate] * layer.plan.num_kv_heads)
                layer.made[fate] = LinearAttention(plan).to(self.device)
            self.draft.fit_length = max(self.draft.fit_length, samples[name].length if layer.plan.is_causal else 0)
        self.price(say)
        for i, (name, layer) in enumerate(self.layers.items()):
            say(f"fitting maps, layer {i + 1} of {len(self.layers)}")
            layer.made = {fate: made for fate, made in layer.made.items() if layer.cost[fate] < layer.cost[EXACT]}
            found = samples.pop(name)
            for made in layer.made.values():
                made.fit(found)

    def price(self, say: Say) -> None:
        """What each option costs: bytes by their plans; seconds by measurement, layers that are alike once."""
        known: dict[Any, tuple[dict[Fate, float], float]] = {}
        for layer in self.layers.values():
            plan, size = layer.plan, self.dtype.itemsize
            if self.goal.by_memory:
                layer.cost = {fate: fate.cache_bytes(plan, layer.length, size) for fate in layer.fates}
                continue
            heads = (plan.num_heads, plan.num_kv_heads, plan.head_dim, plan.value_dim, plan.is_causal)
            alike = (*layer.fates, *heads, layer.length)
            if alike not in known:
                say(f"timing attention at {layer.length:,} tokens")
                known[alike] = self._seconds(layer)
            layer.cost, layer.split = known[alike]

    def _seconds(self, layer: Layer) -> tuple[dict[Fate, float], float]:
        """Seconds of one key head as each option, and what one exact key head beside the others takes more."""
        count, runs, middle = layer.plan.num_kv_heads, dict[Any, LinearAttention](layer.made), len(layer.fates) // 2
        other = layer.fates[middle]
        if layer.made and count > 1:
            runs["mixed"] = self.built(layer, replace(layer.plan, fates=[EXACT, *[other] * (count - 1)]))
        found = layer_seconds(runs, layer.plan, layer.length, self.device, self.dtype)
        cost = {fate: found["exact" if fate == EXACT else fate] / count for fate in layer.fates}
        extra = found["mixed"] - cost[EXACT] - (count - 1) * cost[other] if "mixed" in runs else 0.0
        return cost, max(0.0, extra)

    def plan_of(self, choice: Choice) -> Plan:
        """The plan of a choice, one option for each key head of each layer."""
        plans = {
            name: replace(layer.plan, fates=[layer.fates[o] for o in options])
            for (name, layer), options in zip(self.layers.items(), choice, strict=True)
        }
        return Plan([plans.get(x.name, x) for x in self.draft.layers], self.draft.model_type, self.draft.fit_length)

    def built(self, layer: Layer, plan: LayerPlan) -> LinearAttention:
        """A layer by its plan, with the maps that were fitted."""
        made = LinearAttention(plan).to(self.device)
        for part in made.parts.values():
            fate = plan.fates[part.heads[0]]
            if fate in layer.made:
                part.take_heads(next(iter(layer.made[fate].parts.values())))
        return made

    def build(self, plan: Plan) -> dict[str, LinearAttention]:
        """All layers of a plan, with their maps."""
        return {
            x.name: self.built(self.layers[x.name], x) if x.name in self.layers else LinearAttention(x).to(self.device)
            for x in plan.layers
        }


def candidates(layer: Layer, samples: Samples, goal: Goal) -> list[Fate]:
    """What the registered fates propose for a layer, without maps that its samples are too few or too short to fit.

    A window that covers half of the texts would hide what it loses, so that decoders are asked for the length that is
    judged, encoders for that of their texts. Maps of few heads are fitted to queries and keys that training would
    change. Rotary positions make far pairs unlike near ones: in sequences much longer than those it was fitted to, a
    decoder's kernel is worse than none.
    """
    plan, longest = layer.plan, samples.length
    length = max(1, layer.length * goal.judged // goal.length) if plan.is_causal else min(longest, layer.length)
    changes = goal.memory is not None and goal.trains_weights
    fits = not changes and (not plan.is_causal or 2 * longest >= layer.length)

    def can_be(fate: Fate) -> bool:
        rows, window = 2 * getattr(fate, "num_features", 0), 2 * (getattr(fate, "window", None) or 0)
        return not fate.has_map or (fits and samples.rows >= rows and longest >= window)

    return [fate for cls in FATES.values() for fate in cls.candidates(plan, length) if can_be(fate)]
