"""Table 1 and figure 9 of *Rethinking Attention with Performers*: the proteins, on Swiss-Prot instead of TrEMBL.

Swiss-Prot is the curated part of the same database: 435,000 distinct sequences against 106 million.
"""

from __future__ import annotations

import collections
import gzip
import math
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from _framework import Said, Store, experiment, graded, named
from _pictures import COLOURS, figure, save

from bochner.data import fetch

AMINO = "ACDEFGHIKLMNPQRSTVWY"
CLASSES = {"aliphatic": "AGILV", "sulphur": "CM", "aromatic": "FWY", "hydroxyl": "ST", "acidic": "DE"}
CLASSES |= {"basic": "HKR", "amide": "NQ", "cyclic": "P"}
STANDARD = "-ABCDEFGHIKLMNPQRSTVWXYZU*OJ"  # the order of residues in BLAST databases
CROP = 1024


def sequences(folder: Path) -> Iterator[str]:
    """Every distinct sequence of the BLAST databases or FASTA files in a folder."""
    seen: set[int] = set()
    letters = bytes.maketrans(bytes(range(len(STANDARD))), STANDARD.encode())
    for file in sorted(p for p in folder.rglob("*") if p.suffix == ".psq" or p.name.endswith(".fasta.gz")):
        if file.suffix == ".psq":  # one byte a residue, a zero between sequences
            found: Iterable[str] = (part.translate(letters).decode() for part in file.read_bytes().split(b"\0"))
        else:
            records = gzip.decompress(file.read_bytes()).decode("latin-1").split(">")[1:]
            found = ("".join(record.splitlines()[1:]).upper() for record in records)
        for sequence in found:
            if sequence and hash(sequence) not in seen:
                seen.add(hash(sequence))
                yield sequence


@experiment(
    claim="Sequences of mean length 353 and median 289; leucine is the most frequent amino acid; the empirical "
    "baseline has 9.92 % accuracy and perplexity 17.80.",
    items=("003 Table 1", "003 Figure 9"),
    paper="TrEMBL, 106 million sequences",
    ours="Swiss-Prot, 435,059 sequences",
    quick={"source": "proteins"},
)
def measure(store: Store, source: str = "swissprot") -> None:
    lengths: list[int] = []
    counts: collections.Counter[str] = collections.Counter()
    for sequence in sequences(fetch(source)):
        lengths.append(len(sequence))
        counts.update(sequence[:CROP])
    total = sum(counts[a] for a in AMINO)
    shares = {a: counts[a] / total for a in AMINO}
    store.figures |= {
        "sequences": len(lengths),
        "mean": statistics.mean(lengths),
        "deviation": statistics.pstdev(lengths),
        "median": statistics.median(lengths),
        "shares": shares,
        "baseline_accuracy": max(shares.values()),
        "baseline_perplexity": math.exp(-sum(p * math.log(p) for p in shares.values())),
    }


def judge(found: Any) -> Said:
    most = max(found["shares"], key=found["shares"].__getitem__)
    near = abs(found["baseline_perplexity"] - 17.8) < 0.6 and abs(found["baseline_accuracy"] - 0.099) < 0.01
    close = most == "L" and near
    lengths = {name: found[name] for name in ("mean", "deviation", "median")}
    return Said(
        f"Lengths of {found['sequences']:,} distinct sequences: {named(lengths, '.0f')}. {most} is the most frequent, "
        f"{found['baseline_accuracy']:.2%}; perplexity of the frequencies {found['baseline_perplexity']:.2f}.",
        graded(False, close),
        "Swiss-Prot instead of TrEMBL, whose 106 million sequences are shorter: "
        + ("the frequencies agree, the lengths do not" if close else "the frequencies differ"),
    )


def draw(found: Any) -> None:
    fig, ax = figure(figsize=(7, 3.2))
    shares = found["shares"]
    kind = {a: name for name, letters in CLASSES.items() for a in letters}
    colours = dict(zip(CLASSES, (*COLOURS, "#999999"), strict=True))
    order = sorted(shares, key=shares.__getitem__, reverse=True)
    bars = ax.bar(order, [100 * shares[a] for a in order], color=[colours[kind[a]] for a in order])
    handles = {kind[a]: bar for a, bar in zip(order, bars, strict=True)}
    ax.legend(handles.values(), handles.keys(), fontsize=7, frameon=False, ncols=2)
    ax.set(ylabel="share, %", xlabel="amino acid")
    save(fig, "protein_statistics")
