"""all-MiniLM-L6-v2 converted to a target: keep 98 % of its embeddings and be as fast as possible, untrained.

At its own 512 tokens, and with its positions tiled to 4,096. The tiled model is no good reader of long texts (its
positions repeat), but its attention costs what that of a long encoder costs. Quality is that of its own embeddings at
1,024 tokens, times are of the whole model at up to 4,096. Call it on an idle machine.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from _framework import Said, Store, experiment, kept
from _searches import retained
from torch import nn

from bochner import Calibration, Plan, Target, convert, data, search
from bochner.demo import load_minilm

LENGTHS = {"its own": (64, 128, 256, 512), "tiled": (1024, 2048, 4096)}
READ = 1024  # tokens of the texts that the tiled model is judged on
SECONDS = 4.0  # that a length is timed


def tile_positions(model: Any, length: int) -> None:
    """Give a BERT positions for `length` tokens by repeating those it has."""
    embeddings, had = model.embeddings, model.config.max_position_embeddings
    weight = embeddings.position_embeddings.weight.data.repeat(-(-length // had), 1)[:length]
    embeddings.position_embeddings = nn.Embedding.from_pretrained(weight)
    embeddings.position_ids = torch.arange(length)[None]
    embeddings.token_type_ids = torch.zeros(1, length, dtype=torch.long)
    model.config.max_position_embeddings = length


def twin(model: Any) -> Any:
    """A copy with the very same weights in memory: those of another copy may lie better or worse."""
    other = copy.deepcopy(model)
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        a.data = b.data
    return other


def forward_times(models: dict[str, Any], length: int) -> dict[str, float]:
    """Seconds of whole models at a length, taking turns in changing order: the least tenth of many calls."""
    from bochner.hf.observe import run

    g = torch.Generator().manual_seed(length)
    batch = {"input_ids": torch.randint(1000, 20_000, (1, length), generator=g)}
    found: dict[str, list[float]] = {name: [] for name in models}
    names, began = list(models), time.monotonic()
    while len(found[names[0]]) < 3 or (time.monotonic() - began < SECONDS and len(found[names[0]]) < 300):
        names = names[1:] + names[:1]
        for name in names:
            start = time.perf_counter()
            run(models[name], batch)
            found[name].append(time.perf_counter() - start)
    return {name: sorted(times)[len(times) // 10] for name, times in found.items()}


def searched(model: Any, tokenizer: Any, keep: float, length: int, read: int) -> dict[str, Any]:
    """The report of a search; the model is as before."""
    texts = data.paragraphs("calibration", 48, words=110 * read // 256)
    calibration = Calibration(texts, tokenizer, max_length=read, batch_size=4)
    began = time.process_time()
    report = search(model, Target(keep=keep, length=length), calibration, progress=True)
    print(report.plan, flush=True)
    return {**report.to_dict(), "processor_seconds": time.process_time() - began}


def timed(model: Any, tokenizer: Any, plan: dict[str, Any], lengths: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Times of the whole model under a plan; that its maps are fitted to little text makes no difference."""
    models = {"original": twin(model), "the same": twin(model), "converted": model}
    texts = data.paragraphs("calibration", 4, words=200)
    conversion = convert(model, Plan.from_dict(plan), Calibration(texts, tokenizer))
    seconds = {str(n): forward_times(models, n) for n in lengths}
    conversion.revert()
    return seconds


@experiment(
    claim="Ours: all-MiniLM-L6 converted to keep 98 % is never slower at its own 512 tokens, and faster with its "
    "positions tiled to 4,096.",
    ours="the whole model, one thread, up to 4,096 tokens",
    quick="two searches, and what they find depends on the time they are given",
    needs=("transformers",),
)
def measure(store: Store, keep: float = 0.98) -> None:
    model, tokenizer = load_minilm()
    for name, lengths in LENGTHS.items():
        last, row = lengths[-1], store.table(name)
        if last > 512:
            tile_positions(model, last)
        read = min(last, READ)
        store.cell("report", lambda n=last, r=read: searched(model, tokenizer, keep, n, r), row)
        store.cell("seconds", lambda r=row, n=lengths: timed(model, tokenizer, r["report"]["plan"], n), row)


def judge(found: Any) -> Said:
    # The same model a second time tells what a ratio is good for.
    short = [t["converted"] / max(t["original"], t["the same"]) for t in found["its own"]["seconds"].values()]
    times = {n: t["converted"] / t["original"] for n, t in found["tiled"]["seconds"].items()}
    verified, longest = found["tiled"]["report"]["verified"], max(times, key=int)
    good = found["tiled"]["report"]["met"] and max(short) < 1.01 and times[longest] < 1
    return Said(
        f"time over the original's, whole model: at most {max(short):.3f} up to 512 tokens; tiled, "
        + ", ".join(f"{int(n):,} tokens {x:.2f}" for n, x in times.items())
        + f"; kept {retained(verified):.3f} at {verified['length']:,} tokens.",
        kept(good),
        "slower at a length, or the target is missed",
    )
