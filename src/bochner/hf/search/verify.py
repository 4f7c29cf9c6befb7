"""Verification: a choice on texts that had no part in it, once, by the whole model as it would be used."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from bochner.hf.attention import LinearAttention
from bochner.hf.evaluate import (
    INTERVAL,
    Measure,
    Outputs,
    Quality,
    Reading,
    Text,
    compare_readings,
    evaluation_mode,
    read,
)
from bochner.hf.interface import attached
from bochner.hf.observe import run
from bochner.hf.plan import Plan
from bochner.hf.search.options import Say
from bochner.hf.search.texts import Goal, longest

TOKENS = 6144  # of held-back text, at least one sequence of the goal's length
ROUNDS = 5  # of timing the whole model


@dataclass
class Verdict:
    """What the texts held back say of a plan. `whole`: seconds and bytes of the original and the converted model.

    `confidence`: of the interval; it is higher after other choices, since several were looked at.
    """

    quality: Quality
    length: int
    confidence: float = INTERVAL
    whole: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def time_share(self) -> float:
        """The whole converted model's time as a share of the original's: of a forward pass, or of reading a text."""
        seconds = {name: found.get("seconds", found.get("prefill_seconds", 1.0)) for name, found in self.whole.items()}
        return seconds["converted"] / max(seconds["original"], 1e-12) if seconds else 1.0

    def passes(self, keep: float) -> bool:
        """Whether so much of the quality is retained; after other looks by the bound that choices are made by."""
        return (self.quality.retained if self.confidence <= INTERVAL else self.quality.lower) >= keep

    def __str__(self) -> str:
        low, high = self.quality.bounds(self.confidence)
        texts = "one text" if self.quality.texts == 1 else f"{self.quality.texts} texts or stretches of text"
        found = f"quality retained {self.quality.retained:.2%}"
        if self.quality.texts > 1:
            found += f", {self.confidence:.0%} interval {low:.2%} to {high:.2%}"
        return f"{found}, on {texts} of {self.length:,} tokens that the search never used"


class Verifier:
    """The texts held back, as the original answers to them."""

    def __init__(self, model: Any, held: Any, goal: Goal, shapes: dict[str, Any], say: Say) -> None:
        self.model, self.held, self.goal, self.say, self.looks = model, held, goal, say, 0
        if goal.is_language:
            self.length = min(goal.judged, len(held))
            self.readings = {self.length: self._read(self.length, TOKENS)}
        else:
            self.length = longest(held, shapes)
            self.outputs = Outputs(model, held)

    def _read(self, length: int, tokens: int) -> list[tuple[Text, Reading]]:
        count = max(1, min(tokens, len(self.held)) // length)
        texts = [Text(piece, i) for i, piece in enumerate(self.held[: count * length].split(length))]
        return [(text, read(self.model, text.ids)) for text in texts]

    def verify(self, plan: Plan, layers: dict[str, LinearAttention]) -> Verdict:
        """Look at a plan; the interval is that of as many looks as there have been."""
        self.looks += 1
        self.say(f"verifying at {self.length:,} tokens on texts held back")
        with attached(self.model, plan, layers):
            found = self.look(self.model)
        if not self.goal.is_language:
            found.whole = self._times(plan, layers)
        found.confidence = 1 - (1 - INTERVAL) / self.looks
        return found

    def original(self) -> Verdict:
        """Of the model as it was: it loses nothing."""
        return Verdict(Quality({"unchanged": Measure(torch.zeros(1))}), self.length)

    def look(self, model: Any, length: int | None = None) -> Verdict:
        """The quality of a model that is converted, at one of the lengths that were read."""
        length = length or self.length
        if not self.goal.is_language:
            with evaluation_mode(model):
                return Verdict(self.outputs.quality(lambda batch: run(model, batch)), length)
        before = self.readings[length]
        after = [read(model, text.ids) for text, _ in before]
        quality = compare_readings([text for text, _ in before], [r for _, r in before], after)
        whole = {"original": _figures(before[0][1]), "converted": _figures(after[0])}
        return Verdict(quality, length, whole=whole)

    def further(self, plan: Plan, layers: dict[str, LinearAttention]) -> dict[int, Verdict]:
        """What a plan that was judged by short texts does on longer ones, up to the goal's length."""
        found = {}
        for n in (self.goal.length // 2, self.goal.length):
            if self.goal.is_language and plan.converted and self.length < n <= len(self.held):
                self.say(f"looking at {n:,} tokens")
                self.readings[n] = self._read(n, n)
                with attached(self.model, plan, layers):
                    found[n] = self.look(self.model, n)
        return found

    def _times(self, plan: Plan, layers: dict[str, LinearAttention]) -> dict[str, dict[str, float]]:
        """Seconds of a whole forward pass on one text, original and converted taking turns."""
        batch = {k: v[:1] for k, v in self.outputs.batches[0].items()}
        best = {"original": float("inf"), "converted": float("inf")}
        with evaluation_mode(self.model):
            for i in range(ROUNDS + 1):
                original = _seconds(self.model, batch)
                with attached(self.model, plan, layers):
                    converted = _seconds(self.model, batch)
                if i:  # the first warms up
                    best = {"original": min(best["original"], original), "converted": min(best["converted"], converted)}
        return {name: {"seconds": x} for name, x in best.items()}


def _seconds(model: Any, batch: dict[str, Any]) -> float:
    began = time.perf_counter()
    run(model, batch)
    return time.perf_counter() - began


def _figures(reading: Reading) -> dict[str, float]:
    return {
        "prefill_seconds": reading.prefill_seconds,
        "step_seconds": reading.step_seconds,
        "cache_bytes": float(reading.cache_bytes),
    }
