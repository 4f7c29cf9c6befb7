"""Proteins: guess hidden amino acids, or the next one."""

from __future__ import annotations

import gzip
import hashlib
import math
import re

import numpy as np
from torch.utils.data import Dataset

from bochner import data
from bochner.tasks.base import IGNORE, MASK, SPECIAL, SPLITS, Masked, Preset, Sequences, shuffled, stored

LETTERS = "ACDEFGHIKLMNPQRSTVWYBJOUXZ"  # the 20 standard amino acids, then the rare and the unsure
NAMELESS = re.compile(r"uncharacterized|predicted|hypothetical|unknown")


def family(header: str) -> str:
    """The family of a sequence by its name, empty if it has none.

    >>> family(">tr|W0FSK4|W0FSK4_9FLAV Genome polyprotein (Fragment) OS=Dengue virus 3 PE=4")
    'genome polyprotein'
    """
    name = header.split(" ", 1)[-1].split(" OS=")[0].lower().replace("(fragment)", "").strip()
    return "" if NAMELESS.search(name) else name


def held_out(name: str) -> bool:
    """One family in twenty is never trained on; which, its name alone decides."""
    return bool(name) and hashlib.sha256(name.encode()).digest()[0] % 20 == 0


def sequences(preset: Preset, split: str) -> Sequences:
    """`"train"`, `"validation"`, `"test"` of the same families, and `"unseen"`: families that were held out.

    `data["source"]`: `"proteins"`, 20,000 sequences with the names of their families, or `"swissprot"`, 486,000
    without: there every twentieth sequence counts as a family of its own and is held out.
    """
    is_large = preset.data.get("source", "proteins") == "swissprot"
    arrays = stored("protein-swissprot-1", _read_large) if is_large else stored("protein-2", _read)
    every = Sequences(arrays["tokens"], arrays["offsets"], None, preset.length)
    unseen = np.flatnonzero(arrays["held_out"])
    known = np.flatnonzero(~arrays["held_out"])
    known = known[shuffled(len(known), 0)]
    tenth = len(known) // 20
    rows = {
        "unseen": unseen,
        "test": known[:tenth],
        "validation": known[tenth : 2 * tenth],
        "train": known[2 * tenth :],
    }[split]
    return every.take(rows[: preset.train if split == "train" else preset.test])


def _read() -> dict[str, np.ndarray]:
    number = np.full(256, LETTERS.index("X"), np.uint8)
    number[np.frombuffer(LETTERS.encode(), np.uint8)] = np.arange(len(LETTERS))
    rows: list[np.ndarray] = []
    out: list[bool] = []
    with gzip.open(data.fetch("proteins") / "DB.fasta.gz", "rt", encoding="ascii") as file:
        for record in re.split(r"^>", file.read(), flags=re.MULTILINE)[1:]:
            header, _, letters = record.partition("\n")
            rows.append(number[np.frombuffer(letters.replace("\n", "").encode(), np.uint8)])
            out.append(held_out(family(header)))
    return {
        "tokens": np.concatenate(rows),
        "offsets": np.cumsum([0, *map(len, rows)]),
        "held_out": np.array(out),
    }


BLAST = "-ABCDEFGHIKLMNPQRSTVWXYZU*OJ"  # the order of residues in BLAST databases


def _read_large() -> dict[str, np.ndarray]:
    """Swiss-Prot from its BLAST databases: one byte a residue, a zero between sequences."""
    number = np.array(
        [LETTERS.find(x) if x in LETTERS else LETTERS.index("X") for x in BLAST.ljust(256, "X")], np.uint8
    )
    found: dict[bytes, None] = {}
    for path in sorted(data.fetch("swissprot").rglob("*.psq")):
        found |= dict.fromkeys(part for part in path.read_bytes().split(b"\0") if part)
    rows = [number[np.frombuffer(part, np.uint8)] for part in found]
    return {
        "tokens": np.concatenate(rows),
        "offsets": np.cumsum([0, *map(len, rows)]),
        "held_out": np.array([hashlib.sha256(part).digest()[0] % 20 == 0 for part in found]),
    }


def masked(preset: Preset, split: str) -> Dataset:
    rows = sequences(preset, split)
    passes = 1 + preset.steps * preset.batch // len(rows) if split == "train" else 1
    return Masked(rows, 20, seed=(*SPLITS, "unseen").index(split), passes=passes)


class Continued(Dataset):
    """Sequences to be continued: CLS, then the letters."""

    def __init__(self, rows: Sequences) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict:
        ids = self.rows.ids(i)
        labels = ids.clone()
        labels[0] = IGNORE
        return {"input_ids": ids, "labels": labels}


def causal(preset: Preset, split: str) -> Dataset:
    return Continued(sequences(preset, split))


def baseline(preset: Preset) -> dict[str, float]:
    """The empirical baseline of paper 003: what the frequencies of letters alone are worth on the test split."""
    train, test = (np.bincount(sequences(preset, s).tokens, minlength=len(LETTERS)) for s in ("train", "test"))
    p = (train + 1) / (train + 1).sum()
    loss = float(-(test / test.sum()) @ np.log(p))
    return {"accuracy": float(test[train.argmax()] / test.sum()), "perplexity": math.exp(loss)}


def masked_baseline(preset: Preset) -> dict[str, float]:
    """`baseline`, and as `copying` the accuracy of reading off letters that are shown and guessing the commonest else.

    A tenth of the letters to be guessed is shown as it is, which the paper's baseline leaves out of account.
    """
    commonest = SPECIAL + int(np.bincount(sequences(preset, "train").tokens, minlength=len(LETTERS)).argmax())
    hits = total = 0
    test = masked(preset, "test")
    for i in range(len(test)):  # type: ignore[arg-type]
        item = test[i]
        asked = item["labels"] != IGNORE
        shown = item["input_ids"].masked_fill(item["input_ids"] == MASK, commonest)
        hits += int((shown == item["labels"])[asked].sum())
        total += int(asked.sum())
    return {**baseline(preset), "copying": hits / total}
