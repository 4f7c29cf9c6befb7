"""Generated tasks that cannot be done without attention: recall of pairs, copying, induction.

Every sequence has symbols of its own, so that nothing can be learned but to look things up. Recall and copying need one
layer. Induction needs two: the symbol before, then the match. Training sequences are easier than those of the tests,
down to a single pair: without them even exact attention stays at chance for a long time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from bochner._checks import BochnerError, positive_int
from bochner.tasks.base import IGNORE, PAD, SEP, SPECIAL, SPLITS, Preset

KEYS, VALUES = 64, 4  # of recall; a token is a key that is asked for, a value, or a pair of a key and a value
SYMBOLS = 64  # of copying and induction
PAIR_SYMBOLS = KEYS + VALUES + KEYS * VALUES
EASIER = 0.8  # share of the training sequences with fewer pairs than the tests have


class Rows(Dataset):
    """Sequences of one length, (rows, n), with a label at every position or `IGNORE`."""

    def __init__(self, ids: np.ndarray, labels: np.ndarray) -> None:
        self.ids, self.labels = torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(labels.astype(np.int64))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def source(preset: Preset, split: str) -> tuple[int, np.random.Generator]:
    """How many sequences a split has, and what it is drawn from."""
    count = (preset.train or preset.steps * preset.batch) if split == "train" else (preset.test or 512)
    return count, np.random.default_rng([29, SPLITS.index(split)])


def counts(rng: np.random.Generator, rows: int, most: int, least: int, split: str) -> np.ndarray:
    """How many things each sequence has to remember, (rows, 1): `most` in tests, down to `least` in training."""
    few = (least * (most / least) ** rng.random((rows, 1))).astype(np.int64)
    return np.where((split == "train") & (rng.random((rows, 1)) < EASIER), few, most)


def orders(rng: np.random.Generator, rows: int, symbols: int, count: int) -> np.ndarray:
    """`count` different symbols in random order, (rows, count)."""
    return rng.random((rows, symbols)).argsort(axis=1)[:, :count]


def check(preset: Preset, name: str, most: int, more: int) -> int:
    """`data[name]`, refused if there are fewer symbols or the sequence has no room for it."""
    n: Any = positive_int(preset.data.get(name), name, "the task's data")
    if not 2 <= n <= most or n + more > preset.length:
        raise BochnerError(
            f"The {name!r} of the task's data must be 2 to {most}, and the preset's 'length' at least {more} more; "
            f"got {n} {name} and a length of {preset.length}."
        )
    return int(n)


def recall(preset: Preset, split: str) -> Rows:
    """Pairs of a key and a value, then keys alone: the value of each (multi-query associative recall).

    `data["pairs"]`: n, the pairs of a test sequence. Their keys differ and come from 2 n, at most 64. The rest of the
    sequence asks for keys that were there. A pair is one token, so that one layer of attention is enough and nothing
    but its kernel is tested. Chance is 1 / 4.
    """
    n, length = check(preset, "pairs", KEYS, 1), preset.length
    rows, rng = source(preset, split)
    count = counts(rng, rows, n, 1, split)
    keys, values = orders(rng, rows, min(KEYS, 2 * n), n), rng.integers(VALUES, size=(rows, n))
    at = np.arange(length)
    is_pair, is_used = at < count, at < count + np.maximum(1, count * (length - n) // n)
    which = np.where(is_pair, np.minimum(at, n - 1), rng.integers(1 << 30, size=(rows, length)) % count)
    key, value = (np.take_along_axis(table, which, axis=1) for table in (keys, values))
    ids = SPECIAL + np.where(is_pair, KEYS + VALUES + key * VALUES + value, key)
    labels = np.where(is_used & ~is_pair, SPECIAL + KEYS + value, IGNORE)
    return Rows(np.where(is_used, ids, PAD), labels)


def recall_causal(preset: Preset, split: str) -> Rows:
    """`recall` for decoders: a position's label is what the position before it has to say."""
    found = recall(preset, split)
    found.labels = torch.cat([torch.full_like(found.labels[:, :1], IGNORE), found.labels[:, :-1]], dim=1)
    return found


def copying(preset: Preset, split: str) -> Rows:
    """Symbols, a separator, and the symbols again, which are to be said.

    `data["symbols"]`: how many, in test sequences.
    """
    n = check(preset, "symbols", preset.length, preset.data["symbols"] + 1)
    rows, rng = source(preset, split)
    count, at = counts(rng, rows, n, 2, split), np.arange(preset.length)
    symbols = SPECIAL + rng.integers(SYMBOLS, size=(rows, n))
    copied = np.take_along_axis(symbols, np.clip(np.where(at < count, at, at - count - 1), 0, n - 1), axis=1)
    ids = np.where(at == count, SEP, np.where(at <= 2 * count, copied, PAD))
    return Rows(ids, np.where((at > count) & (at <= 2 * count), ids, IGNORE))


def induction(preset: Preset, split: str) -> Rows:
    """Different symbols in random order, then some of them again: what came after each the first time.

    `data["symbols"]`: how many come first, in test sequences; the rest of the sequence asks.
    """
    n, length = check(preset, "symbols", SYMBOLS, 2), preset.length
    rows, rng = source(preset, split)
    count, at = counts(rng, rows, n, 2, split), np.arange(length)
    is_used = at < count + np.maximum(2, count * (length - n) // n)
    first = SPECIAL + orders(rng, rows, SYMBOLS, n)
    which = np.where(at < count, np.minimum(at, n - 1), rng.integers(1 << 30, size=(rows, length)) % (count - 1))
    ids, after = (np.take_along_axis(first, np.minimum(which + i, n - 1), axis=1) for i in (0, 1))
    answers = np.concatenate([np.full((rows, 1), IGNORE), after[:, :-1]], axis=1)
    return Rows(np.where(is_used, ids, PAD), np.where(is_used & (at > count), answers, IGNORE))
