"""What every task is made of: presets, token sequences, the collator, and the figures a run is judged by."""

from __future__ import annotations

import errno
import math
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from bochner import data
from bochner._checks import BochnerError, one_of

PAD, CLS, SEP, MASK = range(4)
SPECIAL = 4  # token ids of a task's own symbols start here
IGNORE = -100  # label of positions that do not count
SPLITS = ("train", "validation", "test")
_OF_TOKENS = ("accuracy", "loss", "perplexity", "bits")
METRICS = {"classify": ("accuracy", "loss"), "match": ("accuracy", "loss"), "ctc": ("error_rate",)}
METRICS |= {"masked": _OF_TOKENS, "causal": _OF_TOKENS}  # the figures of a kind, see `summary`


@dataclass(frozen=True)
class Preset:
    """Sizes of the model and of its training.

    `length`: tokens a sequence has at most, the leading CLS included. `positions`: `"sinusoidal"` (fixed), `"grid"`
    (fixed, by row and column of a square picture) or `"learned"`. `pooling`: what a classifier sees, the `"first"` row
    or the `"mean"`. `schedule`: a scheduler of transformers; `"inverse_sqrt"` with `learning_rate` the peak. `betas`,
    `eps`: of Adam. `features`: m, with `features_of` for single maps and peers. `redraw`: steps between redraws, 0 for
    none. `guess`: share of the symbols that a classifier is not shown in training and has to guess with the class.
    `train`, `test`: at most so many examples. `data`: what the task's own loader takes. `options`: keywords of the
    feature map. `start`: the output of a finished run whose encoder is taken over. `precision`: of the arithmetic,
    `"float32"` or `"bfloat16"`. `departures`: where it differs from the paper it is named after.
    """

    length: int
    layers: int
    heads: int
    width: int
    feedforward: int
    batch: int
    steps: int
    learning_rate: float
    warmup: int
    schedule: str = "cosine"
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    clip: float = 1.0
    dropout: float = 0.1
    positions: str = "sinusoidal"
    pooling: str = "first"
    features: int = 64
    features_of: Mapping[str, int] = field(default_factory=dict)
    window: int = 32
    redraw: int = 100
    guess: float = 0.0
    train: int | None = None
    test: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    start: str | Path | None = None
    precision: str = "float32"
    departures: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Every setting in a line of its own, then the departures."""
        shown = [f"{f.name:14s}{getattr(self, f.name)}" for f in fields(self) if f.name != "departures"]
        return "\n".join([*shown, *(f"departure: {text}" for text in self.departures)])


@dataclass(frozen=True)
class Task:
    """One task: how its examples are had, what the model must do with them and the figure that counts.

    `kind`: `"classify"`, `"match"` (two sequences that do not see each other), `"masked"`, `"causal"`, `"ctc"`, or
    `"own"`: the model of the task says its loss. `vocabulary`: symbols of its own; their ids begin at `SPECIAL`, 4.
    `load(preset, split)`: the data set of `"train"`, `"validation"` or `"test"`; an example is a dict with `input_ids`
    and `labels`. `presets`: one, or several by name.
    `metric`: the figure a run is judged by, or a function of logits and labels that returns one figure for each
    example; `larger`: whether more of it is better. `collate`: makes a batch of a list of examples. `model(preset)`: a
    configuration of transformers or a torch module, or such a thing itself, else BERT, GPT-2 or a Conformer by the
    kind. `sizes`: bytes that each symbol stands for, where bits are to be counted per byte and symbols are more.
    """

    name: str
    what: str
    kind: str
    vocabulary: int
    classes: int
    load: Callable[[Preset, str], Dataset]
    presets: Mapping[str, Preset]
    metric: str | Callable[[Tensor, Tensor], Tensor] = "accuracy"
    larger: bool = True
    artefacts: Sequence[str] = ()
    further: Sequence[str] = ()  # splits to test on besides "test"
    baseline: Callable[[Preset], dict[str, float]] | None = None
    sizes: Callable[[], np.ndarray] | None = None
    collate: Callable[[Sequence[Any]], dict[str, Tensor]] | None = None
    model: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.presets, Preset):
            object.__setattr__(self, "presets", {"small": self.presets})
        one_of(self.kind, "kind", "Task", (*METRICS, "own"))
        if not callable(self.load):
            raise BochnerError(f"The 'load' of the task {self.name!r} must be a function of a preset and a split.")
        if callable(self.metric) or self.metric in METRICS.get(self.kind, ()):
            return
        valid = list(METRICS.get(self.kind, ()))
        raise BochnerError(
            f"The task {self.name!r} has no metric: {self.metric!r} is not one of {valid} of its kind {self.kind!r}; "
            "give a function of logits and labels that returns one figure for each example."
        )

    @property
    def figure(self) -> str:
        """The name of the figure that counts."""
        return self.metric if isinstance(self.metric, str) else "score"

    @property
    def is_causal(self) -> bool:
        return self.kind == "causal"

    @property
    def symbols(self) -> int:
        """Size of the embedding table."""
        return self.vocabulary + SPECIAL


@dataclass(eq=False)
class Sequences(Dataset):
    """Token sequences of any length in one array, with a label each, or without: to be continued symbol by symbol.

    `tokens[offsets[i]:offsets[i + 1]]` is sequence i, in the task's own numbers from 0; items have `SPECIAL` added, CLS
    in front, and at most `length` tokens.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray | None
    length: int

    @classmethod
    def of(cls, parts: Sequence[np.ndarray], labels: Sequence[int] | np.ndarray | None, length: int) -> Sequences:
        tokens = np.concatenate(parts) if len(parts) else np.zeros(0, np.uint8)
        return cls(tokens, ends(parts), None if labels is None else np.asarray(labels), length)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def raw(self, i: int) -> np.ndarray:
        """The symbols of sequence i, without CLS and not cut."""
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    def ids(self, i: int) -> Tensor:
        ids = torch.from_numpy(self.raw(i)[: self.length - 1].astype(np.int64)) + SPECIAL
        return torch.cat([torch.tensor([CLS]), ids])

    def __getitem__(self, i: int) -> dict[str, Any]:
        ids = self.ids(i)
        return {"input_ids": ids, "labels": ids if self.labels is None else int(self.labels[i])}

    def take(self, which: np.ndarray) -> Sequences:
        labels = None if self.labels is None else self.labels[which]
        return Sequences.of([self.raw(int(i)) for i in which], labels, self.length)


def ends(parts: Sequence[Any]) -> np.ndarray:
    """Where each part begins when all stand in one array, and where the last one ends."""
    return np.cumsum([0, *map(len, parts)])


@dataclass(eq=False)
class Masked(Dataset):
    """Sequences with 15 % of their symbols to be guessed: of these 80 % masked, 10 % replaced, 10 % left.

    What is hidden depends on seed, sequence and pass only, so that a resumed run meets the same masks. `passes`: how
    often the data set is gone through before it counts as one epoch, each time with other masks.
    """

    sequences: Sequences
    symbols: int
    seed: int = 0
    passes: int = 1

    def __len__(self) -> int:
        return len(self.sequences) * self.passes

    def __getitem__(self, i: int) -> dict[str, Any]:
        rng = np.random.default_rng([self.seed, i])
        ids = self.sequences.ids(i % len(self.sequences))
        where, how = torch.from_numpy(rng.random((2, len(ids))))
        hidden = (where < 0.15) & (ids >= SPECIAL)
        if not hidden.any():  # a short sequence: one symbol at least
            candidates = (ids >= SPECIAL).nonzero().flatten()
            hidden[candidates[int(rng.integers(len(candidates)))]] = True
        labels = ids.masked_fill(~hidden, IGNORE)
        other = torch.from_numpy(rng.integers(SPECIAL, SPECIAL + self.symbols, len(ids)))
        ids = torch.where(hidden & (how < 0.8), torch.full_like(ids, MASK), ids)
        ids = torch.where(hidden & (how >= 0.8) & (how < 0.9), other, ids)
        return {"input_ids": ids, "labels": labels}


@dataclass(eq=False)
class Guessed(Dataset):
    """Labelled sequences with a share of their symbols masked, to be guessed beside the label.

    What is masked depends on the sequence's number only, so that a resumed run meets the same masks.
    """

    sequences: Sequences
    share: float

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, i: int) -> dict[str, Any]:
        item = self.sequences[i]
        ids = item["input_ids"]
        hidden = torch.from_numpy(np.random.default_rng(i).random(len(ids)) < self.share) & (ids >= SPECIAL)
        return {**item, "input_ids": ids.masked_fill(hidden, MASK), "hidden": ids.masked_fill(~hidden, IGNORE)}


@dataclass(eq=False)
class Blocks(Dataset):
    """A long text in consecutive blocks, each to be continued symbol by symbol."""

    tokens: np.ndarray
    length: int

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, i: int) -> dict[str, Any]:
        ids = torch.from_numpy(self.tokens[i * self.length : (i + 1) * self.length].astype(np.int64)) + SPECIAL
        return {"input_ids": ids, "labels": ids}


@dataclass(eq=False)
class Pairs(Dataset):
    """Two sequences and whether they belong together."""

    sequences: Sequences
    pairs: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, i: int) -> dict[str, Any]:
        first, second = (self.sequences.ids(int(j)) for j in self.pairs[i])
        return {"input_ids": first, "other_ids": second, "labels": int(self.labels[i])}


class Collator:
    """Pads token sequences to one fixed length.

    `multiple`: for attentions that work in blocks. `masks`: whether the model takes any.
    """

    def __init__(self, length: int, multiple: int = 1, *, masks: bool = True) -> None:
        self.length, self.masks = -(-length // multiple) * multiple, masks

    def __call__(self, items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = {}
        for name, mask in (("input_ids", "attention_mask"), ("other_ids", "other_mask")):
            if name in items[0]:
                batch[name] = self._pad([x[name] for x in items], PAD)
                if self.masks:
                    batch[mask] = (batch[name] != PAD).long()
        if "hidden" in items[0]:
            batch["hidden"] = self._pad([x["hidden"] for x in items], IGNORE)
        labels = [x["labels"] for x in items]
        batch["labels"] = self._pad(labels, IGNORE) if np.ndim(labels[0]) else torch.tensor(labels)
        return batch

    def _pad(self, rows: Sequence[Tensor], value: int) -> Tensor:
        out = torch.full((len(rows), self.length), value, dtype=torch.int64)
        for i, row in enumerate(rows):
            out[i, : len(row)] = torch.as_tensor(row)[: self.length]
        return out


def figures(task: Task, logits: Tensor, labels: Tensor) -> Tensor:
    """Sums over the positions of each example that count, (b, 4): positions, loss, hits, and what bits are counted by.

    That is a symbol, or the bytes it stands for. For `"ctc"` (b, 2): edits and symbols.
    """
    if task.kind == "ctc":
        return _edits(logits, labels)
    if logits.ndim == 2:
        logits, labels = logits[:, None], labels[:, None]
    if task.is_causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    counts = labels != IGNORE
    loss = torch.nn.functional.cross_entropy(logits.float().mT, labels, reduction="none", ignore_index=IGNORE)
    hit = logits.argmax(-1) == labels  # no symbol is called IGNORE
    size = counts.double()
    if task.sizes is not None:
        size = size * torch.as_tensor(task.sizes(), device=labels.device)[(labels - SPECIAL).clamp(min=0)]
    return torch.stack([counts, loss, hit, size], dim=-1).double().sum(1)


def _edits(logits: Tensor, labels: Tensor) -> Tensor:
    """Edit distance between the greedy reading of CTC logits and the labels, and the number of labels."""
    rows = []
    for path, wanted in zip(logits.argmax(-1).tolist(), labels.tolist(), strict=True):
        read = [x for i, x in enumerate(path) if x != PAD and (i == 0 or x != path[i - 1])]
        wanted = [x for x in wanted if x >= 0]
        rows.append((edit_distance(read, wanted), len(wanted)))
    return torch.tensor(rows, dtype=torch.float64)


def edit_distance(a: Sequence[int], b: Sequence[int]) -> int:
    """Insertions, deletions and substitutions that turn a into b.

    >>> edit_distance([1, 2, 3], [2, 3, 4])
    2
    """
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


def summary(kind: str, found: np.ndarray) -> dict[str, float]:
    """Figures of a data set from the `figures` of its batches: loss, accuracy, perplexity, bits; error rate for CTC."""
    sums = found.sum(0).tolist() if found.any() else [math.nan] * found.shape[1]  # not one position counts
    if kind == "ctc":
        return {"error_rate": sums[0] / sums[1]}
    count, loss, hits, size = sums
    out = {"loss": loss / count, "accuracy": hits / count}
    if kind in ("causal", "masked"):
        out |= {"perplexity": math.exp(min(loss / count, 700.0)), "bits": loss / math.log(2) / size}
    return out


def stored(name: str, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Arrays that take long to make, kept beside the artefacts; `name` must say everything they depend on.

    A file that cannot be read is made again.
    """
    path = data.cache_dir() / "tasks" / f"{name}.npz"
    if path.exists():
        try:
            with path.open("rb") as raw, np.load(raw) as file:  # opened here: numpy leaves a damaged one open
                return dict(file)
        except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError) as error:
            print(f"bochner: {path.name} in the cache is damaged ({error}) and made again", file=sys.stderr)
    path.parent.mkdir(parents=True, exist_ok=True)
    made = make()
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            whole = Path(folder) / path.name
            np.savez(whole, **made)  # type: ignore[arg-type]
            whole.replace(path)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise BochnerError(
            f"The examples {name!r} could not be kept: the disk of {path.parent} is full; free some space, or set "
            "BOCHNER_CACHE to another place."
        ) from error
    return made


def shuffled(count: int, seed: int) -> np.ndarray:
    """A fixed order of `count` examples."""
    return np.random.default_rng(seed).permutation(count)


def cut(order: np.ndarray, split: str, held: int) -> np.ndarray:
    """Of a fixed order the first `held` to test on, as many to validate on, and the rest to train on."""
    return {"test": order[:held], "validation": order[held : 2 * held], "train": order[2 * held :]}[split]


def part(rows: Sequence[Any] | np.ndarray, preset: Preset, split: str, held: int) -> Any:
    """Of rows to test on the first; of those to train on the last `held` to validate; as many as the preset wants."""
    if split == "test":
        return rows[: preset.test]
    return rows[-held:] if split == "validation" else rows[:-held][: preset.train]
