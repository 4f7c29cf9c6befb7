"""Times that can be compared on a machine that is not quiet."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any


def best_times(
    calls: Mapping[Any, Callable[[], Any]], *, repeats: int = 20, budget: float = 3.0, warm_up: bool = True
) -> dict[Any, float]:
    """Seconds of each call: the best of several rounds in which the calls take turns, and see the same disturbances.

    A call takes part in at least two rounds, at most `repeats`, and in none after its `budget` of seconds.
    """
    if warm_up:
        for call in calls.values():
            call()
    best = dict.fromkeys(calls, float("inf"))
    spent = dict.fromkeys(calls, 0.0)
    for turn in range(repeats):
        for name, call in calls.items():
            if turn < 2 or spent[name] < budget:
                began = time.perf_counter()
                call()
                spent[name] += (seconds := time.perf_counter() - began)
                best[name] = min(best[name], seconds)
    return best
