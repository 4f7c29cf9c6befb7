"""Proteins: guess hidden amino acids, or the next one."""

from __future__ import annotations

import gzip
import hashlib
import math
import re
from collections.abc import Sequence

import numpy as np

from bochner import data
from bochner._checks import BochnerError
from bochner.tasks.base import IGNORE, MASK, SPECIAL, SPLITS, Masked, Preset, Sequences, cut, ends, shuffled, stored

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

    `data["source"]`: `"proteins"`, 20,000 sequences with the names of their families, or `"swissprot"`, 435,000
    without: there every twentieth sequence counts as a family of its own and is held out.
    """
    is_large = preset.data.get("source", "proteins") == "swissprot"
    arrays = stored("protein-swissprot-1", _read_large) if is_large else stored("protein-2", _read)
    every = Sequences(arrays["tokens"], arrays["offsets"], None, preset.length)
    known = np.flatnonzero(~arrays["held_out"])
    known = known[shuffled(len(known), 0)]
    rows = np.flatnonzero(arrays["held_out"]) if split == "unseen" else cut(known, split, len(known) // 20)
    return every.take(rows[: preset.train if split == "train" else preset.test])


def _read() -> dict[str, np.ndarray]:
    with gzip.open(data.fetch("proteins") / "DB.fasta.gz", "rt", encoding="ascii") as file:
        records = [r.partition("\n") for r in re.split(r"^>", file.read(), flags=re.MULTILINE)[1:]]
    written = "".join(chr(i) for i in range(256))
    return _packed(
        [r.replace("\n", "").encode() for _, _, r in records], written, [held_out(family(h)) for h, _, _ in records]
    )


def _packed(sequences: Sequence[bytes], written: str, out: Sequence[bool]) -> dict[str, np.ndarray]:
    """Sequences, and which of them are held out; `written`: the letter that each byte stands for."""
    number = np.array([LETTERS.index(x if x in LETTERS else "X") for x in written.ljust(256, "X")], np.uint8)
    tokens = number[np.frombuffer(b"".join(sequences), np.uint8)]
    return {"tokens": tokens, "offsets": ends(sequences), "held_out": np.array(out)}


BLAST = "-ABCDEFGHIKLMNPQRSTVWXYZU*OJ"  # the order of residues in BLAST databases


def _read_large() -> dict[str, np.ndarray]:
    """Swiss-Prot from its BLAST databases: one byte a residue, a zero between sequences."""
    found: dict[bytes, None] = {}
    for path in sorted(data.fetch("swissprot").rglob("*.psq")):
        found |= dict.fromkeys(part for part in path.read_bytes().split(b"\0") if part)
    if not found:
        raise BochnerError("Swiss-Prot has no sequences: its BLAST databases were not unpacked as expected.")
    return _packed([*found], BLAST, [hashlib.sha256(part).digest()[0] % 20 == 0 for part in found])


def masked(preset: Preset, split: str) -> Masked:
    rows = sequences(preset, split)
    passes = 1 + preset.steps * preset.batch // len(rows) if split == "train" else 1
    return Masked(rows, 20, seed=(*SPLITS, "unseen").index(split), passes=passes)


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
    for i in range(len(test)):
        item = test[i]
        asked = item["labels"] != IGNORE
        shown = item["input_ids"].masked_fill(item["input_ids"] == MASK, commonest)
        hits += int((shown == item["labels"])[asked].sum())
        total += int(asked.sum())
    return {**baseline(preset), "copying": hits / total}
