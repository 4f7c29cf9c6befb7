"""What a search is asked for in figures, and its texts in three parts: for fitting, for choosing and for verifying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from bochner._checks import BochnerError
from bochner.hf import inputs
from bochner.hf.calibrate import ROWS
from bochner.hf.config import Calibration, Target
from bochner.hf.evaluate import Text, is_language_model
from bochner.hf.inputs import stream
from bochner.hf.observe import discover

PIECE = 640  # tokens that a language model's texts are fitted to at a time, at least
FIT_SHARE = 0.3  # of the texts, at most; half of the others choose, half verify
TRAIN_LENGTH = 512  # tokens of the texts that a language model is trained on, at most
Batches = list[dict[str, Any]]


@dataclass(frozen=True)
class Goal:
    """A target with every figure settled. `judged`: the tokens of the texts that measure quality; `notes`: remarks."""

    keep: float | None
    memory: float | None
    minimize: str
    length: int
    judged: int
    is_language: bool
    trains: bool = False
    trains_weights: bool = False
    notes: tuple[str, ...] = ()

    @property
    def by_memory(self) -> bool:
        return self.minimize == "memory"

    def __str__(self) -> str:
        at = f"at {self.length:,} tokens"
        if self.memory is None:
            return f"retain {self.keep:.1%} of the quality with the least {self.minimize} {at}"
        least = "the most" if self.keep is None else f"{self.keep:.1%} of the"
        return f"retain {least} quality with at most {self.memory:.1%} of the decoding memory {at}"


def settle(target: Target, model: Any, shapes: dict[str, Any], data: Batches) -> Goal:
    """The goal of a target, with defaults that fit the model; lengths of language models are at most its positions."""
    language = is_language_model(model, shapes)
    length = (4096 if language else longest(data, shapes)) if target.length is None else target.length
    judged = min(length, target.judge_length or length)
    most, trained = inputs.positions(model).get("input_ids"), inputs.trained_positions(model)
    notes = []
    if language and most is not None and length > most:
        notes.append(f"The model has positions for {most:,} tokens: everything is counted there, not at {length:,}.")
        length, judged = most, min(judged, most)
    elif "input_ids" in data[0] and most is None and trained is not None and length > trained:
        notes.append(f"The model was made for {trained:,} tokens: beyond them it may be worse, converted or not.")
    elif most is not None and length > most:
        notes.append(f"The model has positions for {most:,} tokens: at {length:,} its attention alone was timed.")
    can_change = [shape for shape in shapes.values() if shape.obstacle is None]
    asks_memory = target.minimize == "memory" or target.memory is not None
    if asks_memory and can_change and not any(s.is_causal and not s.is_cross for s in can_change):
        asked = "minimize='memory'" if target.memory is None else f"memory={target.memory!r}"
        raise BochnerError(
            f"{asked} is the memory of decoding, and none of the attention that is to be converted decodes: "
            "use 'keep' with minimize='time'."
        )
    minimize = "memory" if asks_memory or (language and target.minimize is None) else "time"
    trains = target.train is not None
    weights = target.train is not None and target.train.lora > 0
    return Goal(target.keep, target.memory, minimize, length, judged, language, trains, weights, tuple(notes))


def length_of(batch: dict[str, Any]) -> int:
    main = batch.get("input_ids", next(iter(batch.values())))
    return int(main.shape[1]) if main.ndim == 2 else int(main.shape[-1])


def longest(data: Sequence[dict[str, Any]], shapes: dict[str, Any]) -> int:
    """Of the sequences that are attended to: frames of sound and pixels are more than that."""
    if "input_ids" in data[0]:
        return max(length_of(batch) for batch in data)
    return max(int(shape.keys) for shape in shapes.values())


def batches_for(model: Any, calibration: Calibration, target: Target) -> Batches:
    """Calibration data for a target: batches as they are; texts one after another, or joined.

    Models that do not predict the next token get texts of the target's length, as far as they have positions.
    """
    if not calibration.is_texts:
        return calibration.batches(model, 256)
    data, tokenizer = calibration.data, calibration.tokenizer
    texts = [data] if isinstance(data, str) else data
    most = calibration.max_length or inputs.positions(model).get("input_ids", 2**20)
    each = inputs.tokenized(texts, tokenizer, model, 2**20, 1)
    start = {k: v[:1, :16] for k, v in each[0].items()}
    if is_language_model(model, discover(model, start)):
        stream = torch.cat([batch["input_ids"][0] for batch in each])
        return [{"input_ids": piece[None]} for piece in stream.split(min(PIECE, most))]
    sizes = [length_of(batch) for batch in each]
    wanted = min(target.length or max(sizes), most)
    joined, size = [""], 0
    for text, more in zip(texts, sizes, strict=True):
        if size >= wanted:
            joined, size = [*joined, ""], 0
        joined[-1] = f"{joined[-1]} {text}".strip()
        size += more
    rows = max(1, min(calibration.batch_size, len(joined) // 6))
    return inputs.batches(joined, tokenizer, model=model, max_length=wanted, batch_size=rows)


@dataclass
class Split:
    """The data in three parts; `choice` and `held` are tokens (n,) of a language model, else batches."""

    fit: Batches
    choice: Any
    held: Any
    seen: Tensor | None = None  # the tokens of a language model before those held back

    def training(self, judged: int) -> Batches:
        """What may be trained on: all but what is held back; of a language model texts in which passages come again."""
        if self.seen is None:
            return [*self.fit, *self.choice]
        pieces = self.seen.split(min(TRAIN_LENGTH, judged, len(self.seen) // 2))  # two at least: one tells when to stop
        whole = [piece for piece in pieces if len(piece) == len(pieces[0])]
        return [{"input_ids": Text(piece, i).ids} for i, piece in enumerate(whole)]


def split(data: Batches, goal: Goal, most: int | None = None) -> Split:
    """Split the data: as much as fits the maps, then two halves, so that what one promises the other can keep.

    Batches of a language model are one stream of tokens. Its maps are fitted to pieces as long as the texts that
    measure quality, for those fitted to shorter ones are worse than none; `most` is how long they can be. Rows of
    other models are drawn: bounds suppose that the parts are of one kind, and neighbours are often alike.
    """
    if goal.is_language:
        tokens = stream(data)
        size = min(max(PIECE, min(goal.judged, int(FIT_SHARE * len(tokens)))), most or goal.judged)
        first, second = _borders(len(tokens), max(ROWS, size))
        pieces = [{"input_ids": piece[None]} for piece in tokens[:first].split(size)]
        return Split(pieces, tokens[first:second], tokens[second:], tokens[:second])
    every = [(b, i) for b, batch in enumerate(data) for i in range(len(next(iter(batch.values()))))]
    if len(every) < 3:
        raise BochnerError(
            f"A target needs at least three texts, got {len(every)}: for fitting, for choosing and for verifying; give "
            "more."
        )
    each = length_of(data[0]) if "input_ids" in data[0] else goal.judged  # tokens of a text
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0))
    parts = []
    for chosen in order.tensor_split(_borders(len(every), -(-ROWS // each))):
        rows = [(b, [i for _, i in mine]) for b, mine in groupby(sorted(every[j] for j in chosen), itemgetter(0))]
        parts.append([{k: x[mine] for k, x in data[b].items()} for b, mine in rows])
    fit, choice, held = parts
    return Split(fit, choice, held)


def _borders(count: int, fit: int) -> tuple[int, int]:
    """Where the second and third part of some texts begin; `fit`: as many as maps are fitted to."""
    first = max(1, min(int(FIT_SHARE * count), fit))
    return first, first + max(1, (count - first) // 2)
