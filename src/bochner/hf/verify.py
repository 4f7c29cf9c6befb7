"""Verification: what a choice keeps and costs on texts that had no part in it, of the whole model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from bochner._timing import best_times
from bochner.hf import capture, inputs, io
from bochner.hf.judge import Judge, Outputs, Quality, Reading, Text, compare_readings, read
from bochner.hf.layer import LinearAttention, all_converted
from bochner.hf.plan import Plan
from bochner.hf.target import BUDGETS, RETREATS, Candidate, Search

DEARER = (1.05, 1.2)  # how much more a choice costs that is tried after one that failed, of gates and of sums
ANY_DEARER = (1 + 1e-9, 1.05)  # the same where no choice costs so much more
FINER = 0.25  # steps of log2 of the damage between them
NOISE = 0.05  # by which measured times may be off
VERIFIED_TOKENS = 6144  # of held-back text, at least one sequence of the goal's length
ALWAYS = 2**31  # an 'exact_below' that every call is below of


class Trial:
    """Verification: the original and the converted model on the texts held back, whole and at the length judged at."""

    def __init__(self, model: Any, search: Search, held: Any, is_language: bool, exact_below: int | None) -> None:
        self.model, self.search, self.exact_below = model, search, exact_below
        self.whole: dict[str, dict[str, float]] = {}
        self.length = search.goal.judged
        self.further: dict[int, Quality] = {}
        self.further_readings: dict[int, Readings] = {}
        self.held, self.is_language = held, is_language  # tokens (n,) of a language model, else batches
        if is_language:
            self.length = min(self.length, len(held))
            self.readings = Readings(model, held, self.length, VERIFIED_TOKENS)
        else:
            self.length = longest(held, search.shapes)
            self.outputs = Outputs(model, held, search.goal.keep)
        self.figures: dict[int, dict[str, dict[str, float]]] = {}  # of the whole model, by the candidate's id
        self.missed = self.slower = ""  # why the original stays although something was chosen

    def settle(self, judge: Judge) -> tuple[Candidate, dict[str, LinearAttention]]:
        """The cheapest choice that keeps the target on the texts held back, else the original; with its layers."""
        search = self.search
        if search.goal.memory is not None:
            return self._settle_within(judge)
        kept = sorted((c for c in search.tried if search.keeps(c)), key=search.price)
        waiting = kept[:1] or [max(search.tried, key=lambda c: c.quality.kept)]
        runs: list[tuple[Candidate, Quality, dict[str, LinearAttention]]] = []
        while waiting and len(runs) < RETREATS:
            candidate = waiting.pop()
            layers = self.verify(candidate)
            assert candidate.verified is not None
            runs.append((candidate, candidate.verified, layers))
            if candidate.verified.kept >= search.goal.keep:
                break
            search.say(f"kept {candidate.verified.kept:.4f} on the texts held back: a costlier choice is tried")
            waiting = self._next(candidate, judge, len(runs))
        candidate, quality, layers = runs[-1]
        if candidate.plan.converted and (quality.kept < search.goal.keep or self._is_slower(candidate)):
            candidate = search.run(search.draft.copy(), 0.0, judge)
            layers = self.verify(candidate)
        if not candidate.plan.converted and not self.slower:
            self._note_what_was_missed(search.price(candidate))
        self.whole = self.figures[id(candidate)]
        return candidate, layers

    def _settle_within(self, judge: Judge) -> tuple[Candidate, dict[str, LinearAttention]]:
        """What keeps most of all that fits the memory; the original if it keeps less than asked and is not trained."""
        search, goal = self.search, self.search.goal
        candidate = max(filter(search.fits, search.tried), key=lambda c: c.quality.kept)
        layers = self.verify(candidate)
        assert candidate.verified is not None
        kept = candidate.verified.kept
        if goal.demanded and not goal.trains and kept < goal.keep:
            self.missed = (
                f"With {goal.memory:g} of the memory {kept:.4f} is the best that was found, {goal.keep:g} was asked "
                "for, and the model stays as it was: allow more, ask for less, or train it too ('distill')."
            )
            candidate = search.run(search.draft.copy(), 0.0, judge)
            layers = self.verify(candidate)
        self.whole = self.figures[id(candidate)]
        return candidate, layers

    def _is_slower(self, candidate: Candidate) -> bool:
        """Whether the whole model gains no time by a choice, where time is to be saved and could be measured."""
        goal, share = self.search.goal, time_of_whole(self.figures[id(candidate)])
        if goal.minimize == "time" and self.length >= goal.length and share >= 1:
            self.slower = (
                f"Nothing is converted: attention would be faster at {goal.length} tokens, but the whole model takes "
                f"{share:.2f} of the original's time."
            )
        return bool(self.slower)

    def _note_what_was_missed(self, price: float) -> None:
        """Say what the best kept that costs surely less than the original, if there was anything."""
        search = self.search
        cheaper = [c for c in search.tried if c.plan.converted and search.price(c) < (1 - NOISE) * price]
        if cheaper:
            best = max((c.verified or c.quality).kept for c in cheaper)
            self.missed = (
                f"The target cannot be met with less {search.goal.minimize} than the original's, and the model stays "
                f"as it was: {best:.4f} is the best that was found, {search.goal.keep:g} was asked for; ask for less, "
                "or distill the plan of a candidate."
            )
            search.say(self.missed)

    def _next(self, failed: Candidate, judge: Judge, tries: int = 1) -> list[Candidate]:
        """A choice that costs more than one that failed, if there is one: the more, the more have failed.

        Where there is none that costs so much more, any that costs more.
        """
        factors = (DEARER[0] ** tries, DEARER[1] ** tries)
        return self._dearer(failed, judge, factors) or self._dearer(failed, judge, ANY_DEARER)

    def _dearer(self, failed: Candidate, judge: Judge, factors: tuple[float, float]) -> list[Candidate]:
        """What was tried and costs little more, else one by sums between; where nothing is known, gates, then sums."""
        search = self.search
        least, most = (factor * search.price(failed) for factor in factors)
        better = [c for c in search.tried if search.price(c) >= least and c.quality.kept > failed.quality.kept]
        known = min(better, key=search.price) if better and search.keeps(failed) else None
        if known is not None and search.price(known) <= most:
            return [known]
        for plan in sorted(search.path, key=search.price_of) if known is None else []:
            if search.price_of(plan) >= least:
                return [search.run(plan, failed.predicted, judge)]
        exponent, least = BUDGETS[1], most if known is None else least
        while exponent > BUDGETS[0] - 4:
            plan, predicted = search.choose(2.0**exponent)
            if known is not None and search.price_of(plan) >= search.price(known):
                return [known]
            if search.price_of(plan) >= least:
                return [search.run(plan, predicted, judge)]
            exponent -= FINER
        return [] if known is None else [known]

    def verify(self, candidate: Candidate) -> dict[str, LinearAttention]:
        """Run a choice as in long texts; notes its quality and the figures of the whole model, returns its layers."""
        plan, search = candidate.plan, self.search
        search.say(f"verifying at {self.length} tokens on texts held back")
        border = search.border(plan) if self.exact_below is None else self.exact_below
        layers = search.build(plan)
        with installed(self.model, plan, layers), all_converted(layers):
            if self.is_language:
                candidate.verified, self.figures[id(candidate)] = self.readings.compare()
            else:
                candidate.verified = self.outputs.quality(lambda batch: capture.run(self.model, batch))
                seconds = whole_seconds(self.model, layers, inputs.first_row(self.outputs.batches[0]))
                self.figures[id(candidate)] = {name: {"seconds": x} for name, x in seconds.items()}
        for layer in plan.converted:
            layer.exact_below = border
        return layers

    def look_further(self, chosen: Candidate, layers: dict[str, LinearAttention]) -> None:
        """What a choice that was judged by short texts does on longer ones, up to the goal's length."""
        goal = self.search.goal
        if not self.is_language or not chosen.plan.converted:
            return
        for n in (goal.length // 2, goal.length):
            if self.length < n <= len(self.held):
                self.search.say(f"looking further, at {n} tokens")
                self.further_readings[n] = readings = Readings(self.model, self.held, n, n)
                with installed(self.model, chosen.plan, layers), all_converted(layers):
                    self.further[n], self.whole = readings.compare()

    def again(self, layers: dict[str, LinearAttention]) -> dict[int, Quality]:
        """What the model keeps that is converted and was trained since, by the number of tokens."""
        self.search.say("verifying what was trained on texts held back")
        with all_converted(layers):
            if not self.is_language:
                return {self.length: self.outputs.quality(lambda batch: capture.run(self.model, batch))}
            readings = {self.length: self.readings, **self.further_readings}
            return {n: readings[n].compare()[0] for n in readings}


class Readings:
    """Texts of some length out of a stream of tokens, as the original has read them."""

    def __init__(self, model: Any, tokens: Tensor, length: int, most: int) -> None:
        count = max(1, min(most, len(tokens)) // length)
        self.model = model
        self.texts = [Text(piece, i) for i, piece in enumerate(tokens[: count * length].split(length))]
        self.before = [read(model, text.ids) for text in self.texts]

    def compare(self) -> tuple[Quality, dict[str, dict[str, float]]]:
        """The quality of the model as it is now, and figures of either for the first text."""
        after = [read(self.model, text.ids) for text in self.texts]
        figures = {"original": _figures(self.before[0]), "converted": _figures(after[0])}
        return compare_readings(self.texts, self.before, after), figures


def whole_seconds(model: Any, layers: dict[str, LinearAttention], batch: dict[str, Tensor]) -> dict[str, float]:
    """Seconds of a whole forward pass, with the attention it had before and with the present one, taking turns."""

    def run(border: int) -> None:
        for layer in layers.values():
            layer.plan.exact_below = border
        capture.run(model, batch)

    borders = {name: layer.plan.exact_below for name, layer in layers.items()}
    try:
        return best_times({"original": lambda: run(ALWAYS), "converted": lambda: run(0)}, repeats=5, budget=2.0)
    finally:
        for name, layer in layers.items():
            layer.plan.exact_below = borders[name]


@contextlib.contextmanager
def installed(model: Any, plan: Plan, layers: dict[str, LinearAttention]) -> Iterator[None]:
    """The model converted for a while."""
    io.equip(model, plan, layers)
    try:
        yield
    finally:
        io.strip(model)


def length_of(batch: dict[str, Tensor]) -> int:
    main = batch.get("input_ids", next(iter(batch.values())))
    return int(main.shape[1]) if main.ndim == 2 else int(main.shape[-1])


def longest(data: Sequence[dict[str, Tensor]], shapes: dict[str, capture.Shape]) -> int:
    """Of the sequences that are attended to: frames of sound and pixels are more than that."""
    if "input_ids" in data[0]:
        return max(length_of(batch) for batch in data)
    return max(shape.keys for shape in shapes.values())


def time_of_whole(figures: dict[str, dict[str, float]]) -> float:
    """The time of the whole converted model as a share of the original's: of a forward pass, or of reading a text."""
    seconds = {name: found.get("seconds", found.get("prefill_seconds", 1.0)) for name, found in figures.items()}
    return seconds["converted"] / max(seconds["original"], 1e-12)


def _figures(reading: Reading) -> dict[str, float]:
    return {
        "prefill_seconds": reading.prefill_seconds,
        "step_seconds": reading.step_seconds,
        "cache_bytes": float(reading.cache_bytes),
    }
