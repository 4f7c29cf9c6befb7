"""Is attention sparse? Assumption A of the paper on kernel products, on every prefix of many texts, in six models.

The n largest entries of a head's kernel matrix are its head, the rest is its tail. Sums over the largest entries come
from histograms of 2,048 values a head, which are exact but for one bin. The ratio has no scale: the largest entry of
each matrix is set to 1 before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from _framework import Said, Store, experiment, graded, table
from _models import Heads, Inputs, heads_of, tokenised
from _pictures import COLOURS, figure, save

from bochner.data import paragraphs
from bochner.demo import load_minilm, load_smollm2, quietly

CLAIMS = {"BERT": 4.6, "GPT": 5.15, "RoBERTa": 5.39}  # the paper's largest ratios
CLAIM = max(CLAIMS.values())
FIRST, BINS, LOWEST = 50, 2048, -60.0  # of the logarithms: the smallest that has a bin of its own
TEXTS = {"minilm": 24, "smollm2": 16, "AntiBERTy": 20, "RXNMapper": 20, "rxnfp": 20, "Sapiens": 40}


def log_kernel(head: Heads) -> np.ndarray:
    """log K of lemma 4.1 for every query head, (h, n, n), up to a constant: scale (q.k - |q|^2 / 2)."""
    q, k = head.query.double(), head.key.double()
    k = k.repeat_interleave(len(q) // len(k), 0)
    log: np.ndarray = (head.scale * (q @ k.mT - q.square().sum(-1, keepdim=True) / 2)).numpy()
    return log


def prefix_ratios(log: np.ndarray) -> np.ndarray:
    """(heads, prefixes from FIRST on): the sum beyond the i largest entries of K[:i, :i] over the sum of these."""
    heads, n, _ = log.shape
    log = log - log.max((1, 2), keepdims=True)
    kernel = np.exp(log)
    bins = np.clip((log / LOWEST * (BINS - 1)).astype(np.int64), 0, BINS - 1)  # the largest entries come first
    bins += BINS * np.arange(heads)[:, None, None]
    counts, sums = np.zeros(heads * BINS), np.zeros(heads * BINS)
    found = []
    for i in range(n):
        for part in ((slice(None), i, slice(0, i + 1)), (slice(None), slice(0, i), i)):
            place = bins[part].ravel()
            counts += np.bincount(place, minlength=heads * BINS)
            sums += np.bincount(place, kernel[part].ravel(), minlength=heads * BINS)
        if i + 1 >= FIRST:
            c, s = counts.reshape(heads, BINS), sums.reshape(heads, BINS)
            before = np.cumsum(c, 1) - c
            share = np.clip((i + 1 - before) / np.maximum(c, 1), 0, 1)  # of each bin among the i largest
            top = (share * s).sum(1)
            found.append((s.sum(1) - top) / top)
    return np.stack(found, 1)


def neighbour_ratios(log: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of every head the n-th largest entry over the next, and over the 2n-th (the paper's experiment ii)."""
    n = log.shape[-1]
    flat = log.reshape(len(log), -1)
    top = -np.sort(-np.partition(flat, n * n - 2 * n, axis=1)[:, n * n - 2 * n :], axis=1)
    return np.exp(top[:, n - 1] - top[:, n]), np.exp(np.minimum(top[:, n - 1] - top[:, 2 * n - 1], 700))


def model_and_texts(name: str, count: int) -> tuple[Any, Iterator[Inputs]]:
    """A model, and as many texts as are asked for, one at a time."""
    if name in ("minilm", "smollm2"):
        model, tokenizer = load_minilm() if name == "minilm" else load_smollm2()
        return model, iter(tokenised(tokenizer, paragraphs("calibration", count=count, words=400), 512))
    from further_models import MODELS

    with quietly():
        model, sequences = MODELS[name]()
    return model.eval(), (batch for batch, _ in zip(sequences, range(count), strict=False))


def add_text(entry: dict[str, Any], model: Any, inputs: Inputs) -> None:
    logs = [log_kernel(head) for head in heads_of(model, inputs)]
    ratios = np.concatenate([prefix_ratios(log) for log in logs])
    largest = ratios.max(1)
    entry["heads"] = np.maximum(entry["heads"], largest).tolist() if entry["heads"] else largest.tolist()
    for i in range(0, ratios.shape[1], FIRST):
        entry["by_length"].setdefault(str(FIRST + i), []).append(float(ratios[:, i].max()))
    pairs = [neighbour_ratios(log) for log in logs]
    for key, place in (("next", 0), ("double", 1)):  # medians over the heads of a text
        entry[key].append(float(np.median(np.concatenate([p[place] for p in pairs]))))
    entry["texts"] += 1


@experiment(
    claim="The entries beyond the n largest of a head's kernel matrix sum to at most 5.39 times the n largest. That "
    "holds for every head, text and prefix, and the ratio does not grow with the length. The n-th largest entry is "
    "about as large as the next, and at most about 20 times the 2n-th.",
    items=("002 Figure 1", "002 Figure 2", "002 Figure 3", "002 Figure 4"),
    paper="BERT, GPT and RoBERTa, 1,000 texts of up to 512 tokens",
    ours="six other models, 16 to 40 texts of up to 512 tokens",
    quick={"texts": 2, "models": ("minilm",)},
    needs=("transformers",),
)
def measure(store: Store, texts: int = 0, models: tuple[str, ...] = tuple(TEXTS)) -> None:
    """`texts`: of each model; 0 takes `TEXTS`."""
    table = store.table("models")
    for name in models:
        entry = table.setdefault(name, {"texts": 0, "heads": [], "by_length": {}, "next": [], "double": []})
        count = texts or TEXTS[name]
        if entry["texts"] >= count:
            continue
        model, sequences = model_and_texts(name, count)
        for number, inputs in enumerate(sequences):
            if number >= entry["texts"]:
                add_text(entry, model, inputs)
                store.save()
                print(f"{name}: text {number + 1} of {count}, largest ratio {max(entry['heads']):.1f}", flush=True)


def growth(entry: dict[str, Any]) -> float:
    """The exponent with which the largest ratio over the heads, mean over the texts, grows with the length."""
    means = [np.mean(v) for v in entry["by_length"].values()]
    return float(np.polyfit(np.log([int(n) for n in entry["by_length"]]), np.log(means), 1)[0])


def judge(found: Any) -> Said:
    rows = {
        name: {
            "largest ratio": f"{max(e['heads']):.1f}",
            "median head": f"{np.median(e['heads']):.2g}",
            f"heads within {CLAIM}": f"{np.mean([h <= CLAIM for h in e['heads']]):.0%} of {len(e['heads'])}",
            "growth": f"n^{growth(e):.2f}",
            "n-th entry over the next; over the 2n-th": f"{np.median(e['next']):.3f}; {np.median(e['double']):.1f}",
        }
        for name, e in found["models"].items()
    }
    texts = ", ".join(f"{e['texts']} of {name}" for name, e in found["models"].items())
    return Said(
        f"Texts: {texts}.{table(rows, 'model')}",
        graded(False, any(max(e["heads"]) <= CLAIM for e in found["models"].values())),
        "not tried on the paper's models, which no package registry has. It fails on these "
        f"{len(found['models'])}: heads that attend broadly have a ratio that grows with the length",
    )


def draw(found: Any) -> None:
    fig, axes = figure(2)
    for i, (name, e) in enumerate(found["models"].items()):
        lengths, means = [int(n) for n in e["by_length"]], [np.mean(v) for v in e["by_length"].values()]
        axes[0].plot(lengths, means, "o-", color=COLOURS[i])
        axes[0].text(lengths[-1], means[-1], f" {name}", color=COLOURS[i], fontsize=8)
        heads = np.sort(e["heads"])
        axes[1].plot(heads, np.linspace(0, 1, len(heads)), color=COLOURS[i])
        axes[1].text(heads[len(heads) // 2], 0.5, f" {name}", color=COLOURS[i], fontsize=8)
    axes[0].axhline(CLAIM, color="grey", linestyle="--")
    axes[0].text(60, CLAIM, "the paper's largest", va="bottom", fontsize=8)
    axes[0].set(xlabel="length of the prefix", ylabel="largest ratio over heads, mean over texts", yscale="log")
    axes[0].set_xlim(None, 600)
    axes[1].axvline(CLAIM, color="grey", linestyle="--")
    axes[1].set(xscale="log", xlabel="largest ratio of a head", ylabel="share of the heads")
    save(fig, "sparsity_prefixes")
