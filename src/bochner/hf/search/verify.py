"""The quality of a converted model on some texts, as the whole model would be used: for choosing and for verifying."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bochner.hf.attention import LinearAttention
from bochner.hf.evaluate import INTERVAL, Measure, Outputs, Quality, Reading, Text, compare_readings, read
from bochner.hf.interface import attached
from bochner.hf.observe import evaluation_mode, run
from bochner.hf.plan import Plan
from bochner.hf.search.options import Say
from bochner.hf.search.texts import Goal, longest

TOKENS = 6144  # of a language model's text that verifies, at least one sequence of the goal's length; half choose
ROUNDS = 5  # of timing the whole model


@dataclass
class Verdict:
    """What some texts say of a plan. `whole`: seconds and bytes of the original and the converted model.

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

    def to_dict(self) -> dict[str, Any]:
        texts = {"texts": self.quality.texts, "length": self.length, "whole": self.whole}
        return {**self.quality.to_dict(self.confidence), **texts}

    def __str__(self) -> str:
        low, high = self.quality.bounds(self.confidence)
        texts = "one text" if self.quality.texts == 1 else f"{self.quality.texts} texts or stretches of text"
        found = f"quality retained {self.quality.retained:.2%}"
        if self.quality.texts > 1:
            found += f", {self.confidence:.0%} interval {low:.2%} to {high:.2%}"
        return f"{found}, on {texts} of {self.length:,} tokens that the search never used"


class Verifier:
    """Texts with the original's answers to them: tokens of a language model, batches of any other."""

    def __init__(self, model: Any, held: Any, goal: Goal, shapes: dict[str, Any], say: Say) -> None:
        self.model, self.held, self.goal, self.say, self.looks = model, held, goal, say, 0
        if goal.is_language:
            self.length, self.readings = min(goal.judged, len(held)), dict[int, list[tuple[Text, Reading]]]()
            self._read(self.length, TOKENS)
            self.batches = [{"input_ids": text.ids} for text, _ in self.readings[self.length]]
        else:
            self.length, self.outputs, self.batches = longest(held, shapes), Outputs(model, held), held

    def _read(self, length: int, tokens: int) -> None:
        """Have the original read texts of some length, as many as there are in so many tokens."""
        count = max(1, min(tokens, len(self.held)) // length)
        texts = [Text(piece, i) for i, piece in enumerate(self.held[: count * length].split(length))]
        self.readings[length] = list(zip(texts, self._answers(self.model, texts), strict=True))

    def _answers(self, model: Any, texts: Sequence[Text]) -> list[Reading]:
        """What a model makes of each text; a long one takes seconds, so that each is announced."""
        found = []
        for i, text in enumerate(texts, 1):
            if i > 1:
                self.say(f"reading text {i} of {len(texts)}")
            found.append(read(model, text.ids))
        return found

    def verify(self, plan: Plan, layers: dict[str, LinearAttention]) -> Verdict:
        """Look at a plan; the interval is that of as many looks as there have been."""
        self.looks += 1
        self.say(f"verifying at {self.length:,} tokens on validation texts")
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
        texts, before = zip(*self.readings[length], strict=True)
        after = self._answers(model, texts)
        whole = {"original": before[0].costs, "converted": after[0].costs}
        return Verdict(compare_readings(texts, before, after), length, whole=whole)

    def further(self, plan: Plan, layers: dict[str, LinearAttention]) -> dict[int, Verdict]:
        """What a plan that was judged by short texts does on one of the goal's length, or as long as there is text."""
        n = min(self.goal.length, len(self.held)) if self.goal.is_language else 0
        if not plan.converted or n <= self.length:
            return {}
        self.say(f"looking at {n:,} tokens")
        self._read(n, n)
        with attached(self.model, plan, layers):
            return {n: self.look(self.model, n)}

    def _times(self, plan: Plan, layers: dict[str, LinearAttention]) -> dict[str, dict[str, float]]:
        """The least seconds of a whole forward pass on one text, original and converted taking turns."""
        batch, times = {k: v[:1] for k, v in self.batches[0].items()}, list[tuple[float, float]]()
        with evaluation_mode(self.model):
            for _ in range(ROUNDS + 1):
                original = _seconds(self.model, batch)
                with attached(self.model, plan, layers):
                    times.append((original, _seconds(self.model, batch)))
        best = [min(seconds) for seconds in zip(*times[1:], strict=True)]  # the first warms up
        return {"original": {"seconds": best[0]}, "converted": {"seconds": best[1]}}


def _seconds(model: Any, batch: dict[str, Any]) -> float:
    began = time.perf_counter()
    run(model, batch)
    return time.perf_counter() - began
