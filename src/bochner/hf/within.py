"""The choice that keeps most within a share of the memory, where that is given and not the share of the quality.

One descent of gates (`bochner.hf.gates`) ranks all key heads by what their exactness is worth. What windows leave of
the memory goes to the first of them: for several layouts of windows, each run end to end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from bochner._checks import BochnerError
from bochner.hf.judge import Judge
from bochner.hf.plan import Plan
from bochner.hf.target import Option, Search
from bochner.hf.thin import LOOSER, Thinning

AMPLE = 1.5  # times the memory: so much the choice takes that gates are moved from
SHARE_OF_WINDOWS = 0.75  # of the memory, at most: windows that take more leave too little for exact heads


class Within:
    """The steps of one search; all that is tried is added to it."""

    def __init__(self, search: Search, judge: Judge) -> None:
        self.search, self.judge, self.thinning = search, judge, Thinning(search, judge)
        assert search.goal.memory is not None
        self.limit = search.goal.memory

    def run(self) -> None:
        """Try what fits: by sums, and by gates beside several layouts of windows."""
        began, search = time.monotonic(), self.search
        plan, damage = search.choose_within(self.limit)
        least = search.price_of(plan)
        if least > self.limit:
            raise BochnerError(
                f"The 'memory' of {search.goal.owner} must be at least {least:.3f} for this model at "
                f"{search.goal.length} tokens, got {self.limit!r}: windows and what stays as it is take so much."
            )
        search.run(plan, damage, self.judge)
        ample = search.choose_within(min(1.0, AMPLE * self.limit))[0]
        replaced = self.thinning.replaced(ample)
        if replaced:
            some = any(x.kv_heads_of("exact") for x in ample.layers if x.name in replaced)
            order = self.thinning.gates(ample if some else search.draft, replaced).order
            for layout in self._layouts(plan, damage):
                filled = self._filled(layout, order)
                if filled is not None:
                    search.run(filled, damage, self.judge)
        search.seconds["searching"] = time.monotonic() - began

    def _layouts(self, plan: Plan, damage: float) -> Iterator[dict[str, list[Option]]]:
        """What is not exact: as in the choice by sums, as where more damage is allowed, and one window everywhere."""
        for base in (plan, self.search.choose(LOOSER * damage)[0]):
            yield self.thinning.replaced(base)
        layers = {name: layer for name, layer in self.search.layers.items() if layer.made and not layer.whole}
        for window in sorted({o.window for layer in layers.values() for o in layer.made if o.window is not None}):
            found = {}
            for name, layer in layers.items():
                fitting = [o for o in layer.made if o.window == window]
                if fitting:
                    kinds = [
                        min(fitting, key=lambda o: layer.damage(o)[g].item()) for g in range(layer.plan.num_kv_heads)
                    ]
                    found[name] = kinds
            yield found

    def _filled(self, layout: dict[str, list[Option]], order: list[tuple[str, int]]) -> Plan | None:
        """A layout with as many exact key heads as fit, the worthiest first; None if hardly any do."""
        chosen: dict[str, list[int]] = {name: [] for name in layout}

        def plan() -> Plan:
            return self.thinning.exact_only(self.search.draft, layout, chosen)

        if self.search.price_of(plan()) > SHARE_OF_WINDOWS * self.limit:
            return None
        for name, g in order:
            if name in chosen:
                chosen[name].append(g)
                if self.search.price_of(plan()) > self.limit:
                    chosen[name].pop()
        return plan()
