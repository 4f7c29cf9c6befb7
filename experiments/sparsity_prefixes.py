"""Figures 1 to 4 of the paper on kernel products: assumption A on every prefix of hundreds of texts, in six models.

Claim: for every prefix K[:i, :i], i >= 50, of every head's kernel matrix the entries beyond the i largest sum to at
most 4.6 (BERT), 5.15 (GPT), 5.39 (RoBERTa) times the i largest, and the largest ratio does not grow with i. Here
all-MiniLM-L6 (72 heads) and SmolLM2-135M (270 heads) on prose, AntiBERTy and Sapiens on proteins, RXNMapper and rxnfp
on molecules, 50 to 100 texts each. The paper's own models are in no package registry; Sapiens has the form of RoBERTa
and is far smaller. `attention_sparsity.py` has the ratios of neighbouring entries. Sums over the largest entries come
from histograms of 2,048 values a head that are exact but for one bin.

    python experiments/sparsity_prefixes.py [--quick] [--texts 100] [--seconds 900]      (goes on where it stopped)
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _gallery import COLOURS, RESULTS, figure, finish, save
from further_models import MODELS

from bochner.data import paragraphs
from bochner.demo import load_minilm, load_smollm2, quietly
from bochner.hf.capture import recording, run
from bochner.hf.inputs import batches
from bochner.papers.attention_kernel import CLAIMS, kernel_of_attention

FIRST, BINS, LOWEST = 50, 2048, -60.0  # the smallest logarithm that has a bin of its own


def prefix_ratios(kernel: np.ndarray) -> np.ndarray:
    """(heads, prefixes from FIRST on): the sum beyond the i largest entries of K[:i, :i] over the sum of these."""
    heads, n, _ = kernel.shape
    with np.errstate(divide="ignore"):
        log = np.log(kernel)
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


def model_and_texts(name: str, count: int) -> tuple[Any, Iterator[dict[str, torch.Tensor]]]:
    """A model, and as many texts as are asked for, as batches of one."""
    if name in MODELS:
        with quietly():
            model, sequences = MODELS[name]()
        return model.eval(), (batch for batch, _ in zip(sequences, range(count), strict=False))
    model, tokenizer = load_minilm() if name == "minilm" else load_smollm2()
    prose = paragraphs("calibration", count=count, words=400)
    return model, (batches([text], tokenizer, max_length=512)[0] for text in prose)


def measure(name: str, texts: int, kept: dict[str, Any], path: Path, end: float) -> None:
    """Largest ratio of every head, and by length the largest over the heads, text by text."""
    entry = kept.setdefault(name, {"texts": 0, "largest": None, "by_length": {}})
    model, sequences = model_and_texts(name, texts)
    for number, batch in enumerate(sequences):
        if number < entry["texts"]:
            continue
        if time.monotonic() > end:
            return
        calls: list[tuple[torch.Tensor, torch.Tensor]] = []

        def look(_: str, call: Any, calls: list[Any] = calls) -> None:
            key = call.key.repeat_interleave(call.group, dim=1)
            calls.append((call.query[0], key[0]))

        with recording(model, look):
            run(model, batch)
        ratios = np.concatenate([prefix_ratios(kernel_of_attention(q, k).double().numpy()) for q, k in calls])
        largest = ratios.max(1)
        entry["largest"] = (largest if entry["largest"] is None else np.maximum(entry["largest"], largest)).tolist()
        for i in range(0, ratios.shape[1], FIRST):
            entry["by_length"].setdefault(str(FIRST + i), []).append(float(ratios[:, i].max()))
        entry["texts"] = number + 1
        path.write_text(json.dumps(kept))
        print(f"{name}: text {number + 1} of {texts}, largest ratio so far {max(entry['largest']):.1f}", flush=True)


def summary_of(entry: dict[str, Any], claim: float) -> dict[str, Any]:
    largest, by_length = np.array(entry["largest"]), entry["by_length"]
    lengths = np.array([int(n) for n in by_length])
    means = np.array([np.mean(v) for v in by_length.values()])
    return {
        "texts": entry["texts"],
        "largest": float(largest.max()),
        "within": float((largest <= claim).mean()),
        "growth": float(np.polyfit(np.log(lengths), np.log(means), 1)[0]),
        "lengths": lengths.tolist(),
        "means": means.tolist(),
        "heads": largest.tolist(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="report what there is after so many")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    torch.set_num_threads(1)
    texts = {"minilm": 3} if options.quick else dict.fromkeys(("minilm", *MODELS, "smollm2"), options.texts)
    done, path = RESULTS / "sparsity_prefixes.json", RESULTS / "sparsity_prefixes.partial.json"
    path.parent.mkdir(exist_ok=True)
    stored: dict[str, Any] = json.loads(done.read_text())["models"] if done.exists() else {}
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    claim = max(CLAIMS.values())
    summary = {}
    for name, count in texts.items():
        if stored.get(name, {}).get("texts", 0) >= count:  # of a run before
            summary[name] = stored[name]
            continue
        measure(name, count, kept, path, end)
        if kept[name]["texts"]:
            summary[name] = summary_of(kept[name], claim)
    draw(summary)
    if all(s["texts"] >= texts[name] for name, s in summary.items()):
        path.unlink(missing_ok=True)
    ours = "; ".join(
        f"{n} ({s['texts']} texts): largest ratio {s['largest']:.1f}, {s['within']:.0%} of {len(s['heads'])} heads "
        f"within {claim}, the mean of the largest grows as n^{s['growth']:.2f}"
        for n, s in summary.items()
    )
    holds = [n for n, s in summary.items() if s["largest"] <= claim]
    return finish(
        "sparsity_prefixes",
        {"models": summary},
        claim=f"The ratio is at most {claim} for every head, text and prefix, and does not grow with the length.",
        ours=ours + ".",
        verdict="reproduced" if len(holds) == len(summary) else "partly" if holds else "not",
        why="other models than the paper's, whose RoBERTa and GPT no package registry has: heads that attend broadly "
        "have a ratio that grows with the length" + (f"; {', '.join(holds)} alone within it" if holds else ""),
    )


def draw(summary: dict[str, Any]) -> None:
    fig, axes = figure(2)
    claim = max(CLAIMS.values())
    for i, (name, s) in enumerate(summary.items()):
        axes[0].plot(s["lengths"], s["means"], "o-", color=COLOURS[i])
        axes[0].text(s["lengths"][-1], s["means"][-1], f" {name}", color=COLOURS[i], fontsize=8)
        heads = np.sort(s["heads"])
        axes[1].plot(heads, np.linspace(0, 1, len(heads)), color=COLOURS[i])
        axes[1].text(heads[len(heads) // 2], 0.5, f" {name}", color=COLOURS[i], fontsize=8)
    axes[0].axhline(claim, color="grey", linestyle="--")
    axes[0].text(60, claim, "the paper's largest", va="bottom", fontsize=8)
    axes[0].set(xlabel="length of the prefix", ylabel="largest ratio over heads, mean over texts", yscale="log")
    axes[0].set_xlim(None, 600)
    axes[1].axvline(claim, color="grey", linestyle="--")
    axes[1].set(xscale="log", xlabel="largest ratio of a head", ylabel="share of the heads")
    save(fig, "sparsity_prefixes")


if __name__ == "__main__":
    raise SystemExit(main())
