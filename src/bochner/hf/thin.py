"""What is exact thinned out, from a choice by sums to one that knows which heads stand in for each other.

1. The gates of all key heads are moved together while the budget falls (`bochner.hf.gates`). 2. What is exact is left
out bit by bit, in the order of measured damage, while the target is kept. 3. Windows are narrowed, those first that
lose least for what they save; where time is to be saved any other option may take their place.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from bochner.hf.gates import descend
from bochner.hf.judge import Judge
from bochner.hf.plan import LayerPlan, Plan
from bochner.hf.target import EXACT, Candidate, Option, Search, options_of

UNITS = 12  # exact parts whose omission is measured, in each of
ROUNDS = 2  # rounds of leaving out
LOOSER = 2.0  # times the damage of the choice whose windows gates are moved with


class Thinning:
    """The steps of one search; all that is tried is added to it."""

    def __init__(self, search: Search, judge: Judge) -> None:
        self.search, self.judge = search, judge

    def run(self) -> None:
        """From the cheapest choice that keeps the target, if there is one."""
        kept = [c for c in self.search.tried if self.search.keeps(c)]
        if not kept:
            return
        best = min(kept, key=self.search.price)
        self.narrow(self.polish(self.descend(best)))

    def descend(self, candidate: Candidate) -> Candidate:
        """The cheapest choice that keeps the target on a descent of gates from one that does, if that is not itself."""
        began, best = time.monotonic(), candidate
        # Windows are taken from a choice that allows more damage: where less is exact, they are worth less memory, too.
        base = self.search.choose(LOOSER * candidate.predicted)[0]
        replaced = self.replaced(base)
        if not any(x.kv_heads_of("exact") for x in candidate.plan.layers if x.name in replaced):
            return candidate
        layers, goal = self.search.layers, self.search.goal
        made = {name: layers[name].build(layers[name].planned(options)) for name, options in replaced.items()}
        exact_now = {
            x.name: torch.tensor([o == EXACT for o in options_of(x)]) for x in candidate.plan.layers if x.name in made
        }
        savings = {
            name: layers[name].cost(EXACT, goal) - sum(layers[name].cost(o, goal) for o in options) / len(options)
            for name, options in replaced.items()
        }
        choices = descend(self.search.model, made, exact_now, savings, self.judge, self.search.say)
        path = self.search.path = [self.exact_only(base, replaced, choice) for choice in choices]
        low, high = -1, len(path)
        while high - low > 1:
            middle = (low + high) // 2
            tried = self.search.run(path[middle], candidate.predicted, self.judge)
            low, high = (middle, high) if self.search.keeps(tried) else (low, middle)
            best = self._cheaper(tried, best)
        self.search.seconds["moving gates"] = time.monotonic() - began
        return best

    def replaced(self, plan: Plan) -> dict[str, list[Option]]:
        """What the key heads of a plan are, and become if they are exact, in the layers where that saves something."""
        found = {}
        for x in plan.layers:
            layer = self.search.layers.get(x.name)
            if layer is None or not layer.made:
                continue
            instead = self._instead(x)
            if layer.cost(instead, self.search.goal) < layer.cost(EXACT, self.search.goal):
                found[x.name] = [instead if o == EXACT else o for o in options_of(x)]
        return found

    def exact_only(self, plan: Plan, replaced: dict[str, list[Option]], exact_heads: dict[str, list[int]]) -> Plan:
        """A plan in which only some key heads are exact, and the others what replaces them."""
        changed = plan.copy()
        for i, x in enumerate(plan.layers):
            if x.name in replaced:
                options = [EXACT if g in exact_heads[x.name] else o for g, o in enumerate(replaced[x.name])]
                changed.layers[i] = self.search.layers[x.name].planned(options)
        return changed

    def polish(self, candidate: Candidate) -> Candidate:
        """Leave out exact parts of a choice, those first whose omission is measured to harm least, while it keeps."""
        began, light = time.monotonic(), self.judge.light()
        for _ in range(ROUNDS):
            units = self._units(candidate.plan)
            if len(units) < 2:
                break
            rises = {}
            for i, unit in enumerate(units):
                self.search.say(f"leaving out exact heads, {i + 1} of {len(units)}")
                layers = self.search.build(self._without(candidate.plan, [unit]))
                with torch.no_grad():
                    rises[unit] = light.loss(0, self.search.output(layers, light.batches[0])).item()
            order = sorted(units, key=lambda unit: rises[unit])
            better, low, high = candidate, 0, len(units) + 1
            while high - low > 1:
                middle = (low + high) // 2
                tried = self.search.run(self._without(candidate.plan, order[:middle]), candidate.predicted, self.judge)
                low, high = (middle, high) if self.search.keeps(tried) else (low, middle)
                better = self._cheaper(tried, better)
            if better is candidate:
                break
            candidate = better
        self.search.seconds["leaving out"] = time.monotonic() - began
        return candidate

    def _cheaper(self, tried: Candidate, best: Candidate) -> Candidate:
        """What was tried, if it keeps the target for less."""
        return tried if self.search.keeps(tried) and self.search.price(tried) < self.search.price(best) else best

    def _units(self, plan: Plan) -> list[tuple[str, int]]:
        """Exact key heads that could be left out, (layer, key head): the least harmful."""
        found = []
        for x in plan.layers:
            layer = self.search.layers.get(x.name)
            if layer is None or not layer.made:
                continue
            option = self._instead(x)
            if layer.cost(option, self.search.goal) >= layer.cost(EXACT, self.search.goal):
                continue
            damages = layer.damage(option)
            found += [(damages[g].item(), x.name, g) for g in x.kv_heads_of("exact")]
        return [(name, g) for _, name, g in sorted(found)[:UNITS]]

    def _instead(self, plan: LayerPlan) -> Option:
        """What an exact part of a layer becomes: the least harmful that goes with the window of the rest."""
        layer, others = self.search.layers[plan.name], {o for o in options_of(plan) if o != EXACT}
        if layer.single and others:
            return others.pop()
        fitting = [o for o in layer.made if plan.window is None or o.window == plan.window]
        cheaper = [o for o in fitting if layer.cost(o, self.search.goal) < layer.cost(EXACT, self.search.goal)]
        return min(cheaper or fitting, key=lambda o: layer.damage(o).sum().item())

    def _without(self, plan: Plan, units: Sequence[tuple[str, int]]) -> Plan:
        changed = plan.copy()
        for i, x in enumerate(plan.layers):
            heads = [g for name, g in units if name == x.name]
            if heads:
                option, every = self._instead(x), options_of(x)
                options = [option if g in heads else o for g, o in enumerate(every)]
                changed.layers[i] = self.search.layers[x.name].planned(options)
        return changed

    def narrow(self, candidate: Candidate) -> Candidate:
        """Narrower windows, or to save time any cheaper option, in as many layers as the target allows."""
        began, moves = time.monotonic(), []
        for i, x in enumerate(candidate.plan.layers):
            layer = self.search.layers.get(x.name)
            if layer is None or x.untouched:
                continue
            found = [m for others in self._cheaper_options(x) if (m := self._narrowed(x, others))]
            if found:
                moves.append((*min(found, key=lambda move: move[0]), i))
        moves.sort(key=lambda move: move[0])
        best, low, high = candidate, 0, len(moves) + 1
        while high - low > 1:
            middle = (low + high) // 2
            plan = candidate.plan.copy()
            for _, layer_plan, i in moves[:middle]:
                plan.layers[i] = layer_plan
            tried = self.search.run(plan, candidate.predicted, self.judge)
            low, high = (middle, high) if self.search.keeps(tried) else (low, middle)
            best = self._cheaper(tried, best)
        self.search.seconds["narrowing"] = time.monotonic() - began
        return best

    def _cheaper_options(self, plan: LayerPlan) -> list[list[Option]]:
        """What the heads of a layer that are not exact might become instead: each of a list the best for it."""
        made = self.search.layers[plan.name].made
        if self.search.layers[plan.name].single:
            return [[o] for o in made]
        windows = {o.window for o in made if o.window and plan.window and o.window < plan.window}
        return [[o for o in made if o.window == window] for window in sorted(windows)]

    def _narrowed(self, plan: LayerPlan, others: Sequence[Option]) -> tuple[float, LayerPlan] | None:
        """A layer with other options, and the damage they add for what they save; None if they save nothing."""
        layer, before = self.search.layers[plan.name], options_of(plan)
        after = [
            o if o == EXACT else min(others, key=lambda o: layer.damage(o)[g].item()) for g, o in enumerate(before)
        ]
        damages = [sum(layer.damage(o)[g].item() for g, o in enumerate(options)) for options in (before, after)]
        costs = [sum(layer.cost(o, self.search.goal) for o in options) for options in (before, after)]
        if costs[1] >= costs[0]:
            return None
        return (damages[1] - damages[0]) / (costs[0] - costs[1]), layer.planned(after)
