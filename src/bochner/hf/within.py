"""The choice that keeps most within a share of the memory, where that is given and not the share of the quality.

What windows leave of the memory goes to exact key heads, those first that would do most damage: for several layouts of
windows, each run end to end. Gates (`bochner.hf.gates`) are no help here: where little may be exact, few heads carry
all recall, and the slopes of the loss, on the way or at the choice, do not tell which.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from bochner._checks import BochnerError
from bochner.hf.judge import Judge
from bochner.hf.plan import Plan
from bochner.hf.target import EXACT, Option, Search
from bochner.hf.thin import LOOSER, Thinning

SHARE_OF_WINDOWS = 0.75  # of the memory, at most: windows that take more leave too little for exact heads
Unit = tuple[str, int]  # a key head: its module, its number
Layout = dict[str, list[Option]]  # what the key heads of each module are where they are not exact


class Within:
    """The steps of one search; all that is tried is added to it."""

    def __init__(self, search: Search, judge: Judge) -> None:
        self.search, self.judge, self.thinning = search, judge, Thinning(search, judge)
        assert search.goal.memory is not None
        self.limit = search.goal.memory

    def run(self) -> None:
        """Try what fits."""
        began, search = time.monotonic(), self.search
        plan, damage = search.choose_within(self.limit)
        least = search.price_of(plan)
        if least > self.limit:
            raise BochnerError(
                f"The 'memory' of {search.goal.owner} must be at least {least:.3f} for this model at "
                f"{search.goal.length} tokens, got {self.limit!r}: windows and what stays as it is take so much."
            )
        search.run(plan, damage, self.judge)
        for layout in self._layouts(plan, damage):
            if self._price(layout, []) <= SHARE_OF_WINDOWS * self.limit:
                search.run(self._filled(layout), damage, self.judge)
        search.seconds["searching"] = time.monotonic() - began

    def _layouts(self, plan: Plan, damage: float) -> Iterator[Layout]:
        """As in the choice by sums, as where more damage is allowed, and one window everywhere."""
        for base in (plan, self.search.choose(LOOSER * damage)[0]):
            yield self.thinning.replaced(base)
        layers = {name: layer for name, layer in self.search.layers.items() if layer.made and not layer.single}
        for window in sorted({o.window for layer in layers.values() for o in layer.made if o.window is not None}):
            found = {}
            for name, layer in layers.items():
                most = layer.cost(EXACT, self.search.goal)
                fitting = [o for o in layer.made if o.window == window and layer.cost(o, self.search.goal) < most]
                if fitting:
                    heads = range(layer.plan.num_kv_heads)
                    found[name] = [min(fitting, key=lambda o: layer.damage(o)[g].item()) for g in heads]
            yield found

    def _filled(self, layout: Layout) -> Plan:
        """A layout with as many exact key heads as fit, those first whose replacement does most damage for a byte."""
        goal, worth = self.search.goal, {}
        for name, options in layout.items():
            layer = self.search.layers[name]
            for g, option in enumerate(options):
                worth[name, g] = layer.damage(option)[g].item() / (layer.cost(EXACT, goal) - layer.cost(option, goal))
        exact: list[Unit] = []
        for unit in sorted(worth, key=lambda u: -worth[u]):
            if self._price(layout, [*exact, unit]) <= self.limit:
                exact.append(unit)
        return self._plan(layout, exact)

    def _price(self, layout: Layout, exact: Sequence[Unit]) -> float:
        return self.search.price_of(self._plan(layout, exact))

    def _plan(self, layout: Layout, exact: Sequence[Unit]) -> Plan:
        heads = {name: [g for n, g in exact if n == name] for name in layout}
        return self.thinning.exact_only(self.search.draft, layout, heads)
