"""What can be had without learning, of the tasks where that is not a matter of chance.

Frequencies of symbols, differences of neighbouring pixels, and copying what is shown.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from _framework import Said, Store, experiment
from _training import by_frequency

from bochner import tasks
from bochner.tasks.base import IGNORE, MASK, SPECIAL


def copied(task: str) -> dict[str, float]:
    """Accuracy on hidden symbols of guessing the commonest, and of reading off what is shown beside that."""
    chosen = tasks.task(task)
    preset = tasks.preset_of(chosen, "small")
    train, test = (chosen.load(preset, split) for split in ("train", "test"))
    commonest = SPECIAL + int(np.bincount(train.sequences.tokens).argmax())
    items = [test[i] for i in range(len(test))]
    ids, labels = (torch.cat([x[k] for x in items]) for k in ("input_ids", "labels"))
    ids, labels = ids[labels != IGNORE], labels[labels != IGNORE]
    copying = (ids.masked_fill(ids == MASK, commonest) == labels).float().mean().item()
    return {"commonest": (labels == commonest).float().mean().item(), "copying": copying}


@experiment(
    claim="Ours: copying the letters that are shown beats the commonest letter on hidden proteins and books.",
    ours="the test splits of preset `small`",
    quick="loads every data set in full",
)
def measure(store: Store) -> None:
    presets = {t: tasks.preset_of(tasks.task(t), "small") for t in ("lm_bpe", "pixels", "protein_causal", "retrieval")}
    split = {t: [tasks.task(t).load(presets[t], s) for s in ("train", "test")] for t in ("lm_bpe", "pixels")}
    pairs = [x.tokens for x in split["lm_bpe"]]
    size = tasks.task("lm_bpe").sizes()[pairs[1]].mean()
    pixels = [x.tokens.reshape(len(x), -1, 3).astype(int) for x in split["pixels"]]
    steps = [np.diff(x, axis=1).ravel() % 256 for x in pixels]
    found = tasks.task("retrieval").load(presets["retrieval"], "test")
    read = presets["retrieval"].length - 1
    letters = np.stack([np.bincount(found.sequences.raw(i)[:read], minlength=256) for i in range(len(found.sequences))])
    letters = letters / np.linalg.norm(letters, axis=1, keepdims=True)
    alike = (letters[found.pairs[:, 0]] * letters[found.pairs[:, 1]]).sum(1)
    causal = tasks.task("protein_causal").baseline
    bits = {"frequencies": by_frequency(*(x.ravel() for x in pixels), 256), "difference": by_frequency(*steps, 256)}
    store.figures |= {
        "lm_bpe": {"frequencies": by_frequency(*pairs, tasks.task("lm_bpe").vocabulary) / size},
        "pixels": bits,
        "protein": copied("protein"),
        "protein_causal": causal(presets["protein_causal"]) if causal else {},
        "pretraining": {**copied("pretraining"), "bits": math.log2(tasks.task("pretraining").vocabulary)},
        "retrieval": {"letters": float(((alike > np.median(alike)) == found.labels).mean())},
    }


def judge(found: Any) -> Said:
    told = {t: found[t] for t in ("protein", "pretraining")}
    holds = all(x["copying"] > x["commonest"] for x in told.values())
    shown = "; ".join(f"{t}: commonest {x['commonest']:.1%}, copying {x['copying']:.1%}" for t, x in told.items())
    return Said(f"{shown}.", "holds" if holds else "fails", "" if holds else "copying is no better")
