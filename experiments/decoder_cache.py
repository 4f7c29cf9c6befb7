"""What SmolLM2-135M loses with a smaller key-value cache, over a book of a held-out author, nothing trained.

Selected keys come from one call, `convert(model, Target(memory=..., length=LENGTH), texts)`, fitted to other authors.
Beside them: the whole cache rounded to 8 and 4 bits in groups of 32, and a window with sinks. Bytes are those of the
tensors in the cache at the end; rounded caches are counted, since they are only simulated here.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from _framework import Said, Store, experiment
from _pictures import COLOURS, figure, save
from torch import Tensor

from bochner import Calibration, Recipe, Target, convert, data, revert
from bochner.demo import load_smollm2

BACK = (500, 2000, 3500)
PASSAGE, LEAD = 96, 8  # tokens of a repeat, of which the first only tell what is repeated
BOUNDS = (0, 500, 1000, 2000, 4000)
GROUP = 32
LENGTH = 4000
ROUNDED = {"int8, groups of 32": 8, "int4, groups of 32": 4}
SPECS: dict[str, Recipe | Target] = {
    "window 128, 4 sinks": Recipe(None, window=128, sinks=4, window_kind="sliding"),
    "selected keys, 6 % of float32": Target(memory=0.06, length=LENGTH),
    "selected keys, 12 % of float32": Target(memory=0.12, length=LENGTH),
}


def text(tokenizer: Any, length: int) -> Tensor:
    """Tokens (1, n): a book's first `length`, and passages of it again."""
    words = " ".join(data.paragraphs("heldout", 1, words=length))
    book = tokenizer(words, return_tensors="pt").input_ids[0, :length]
    return torch.cat([book, *(book[length - back : length - back + PASSAGE] for back in BACK if back <= length)])[None]


def figures(losses: Tensor, length: int) -> dict[str, Any]:
    """Perplexity by position and recall by distance, from the losses of tokens 1, 2, ..."""
    by_place = {
        f"{a}-{min(b, length)}": math.exp(losses[max(a - 1, 0) : min(b, length) - 1].mean().item())
        for a, b in pairwise(BOUNDS)
        if a < length
    }
    starts = {back: length + i * PASSAGE - 1 for i, back in enumerate(b for b in BACK if b <= length)}
    recall = {str(b): math.exp(losses[s + LEAD : s + PASSAGE].mean().item()) for b, s in starts.items()}
    return {"perplexity": by_place, "recall": recall}


def rounded(x: Tensor, bits: int) -> Tensor:
    """Rounding between the least and the largest of each group of channels."""
    parts = x.unflatten(-1, (-1, GROUP))
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(1e-12)
    return (((parts - low) / step).round() * step + low).flatten(-2)


def read_rounded(model: Any, ids: Tensor, bits: int) -> Tensor:
    """Losses with all keys and values rounded."""
    from _models import token_losses

    from bochner.hf.calls import Call, exact
    from bochner.hf.observe import recording

    def look(name: str, call: Call) -> Tensor:
        return exact(call._replace(key=rounded(call.key, bits), value=rounded(call.value, bits)))

    with recording(model, look), torch.no_grad():
        return token_losses(model, ids)[0]


def converted(model: Any, tokenizer: Any, spec: Recipe | Target, ids: Tensor, length: int) -> dict[str, Any]:
    """Figures of a conversion, with what its search says."""
    from bochner.hf.evaluate import read

    texts = data.paragraphs("calibration", 6, words=3000)
    done = convert(model, spec, Calibration(texts, tokenizer), progress=True)
    reading = read(model, ids)
    row = {**figures(reading.losses, length), "bytes": reading.cache_bytes}
    row |= {"prefill_seconds": reading.prefill_seconds, "step_seconds": reading.step_seconds}
    if done.report is not None:
        row |= {"search": done.report.to_dict()["verified"], "search_seconds": done.report.seconds["in all"]}
    revert(model)
    return row


@experiment(
    claim="Ours: with 12 % of the bfloat16 cache at 4,000 tokens, by one call and without training, perplexity (tokens "
    "2,000 to 4,000) is at most 1.01 of the original's, and recall at 500, 2,000 and 3,500 tokens is within 3 %.",
    ours="SmolLM2-135M, one book of a held-out author, 4,000 tokens, recall of 88 tokens at each distance",
    quick="reads 4,000 tokens with a decoder of 135 million parameters and searches for minutes",
    sources=("bochner.hf",),
    needs=("transformers",),
)
def measure(store: Store, length: int = LENGTH) -> None:
    from bochner.hf.evaluate import read

    model, tokenizer = load_smollm2()
    ids = text(tokenizer, length)

    def original() -> dict[str, Any]:
        reading = read(model, ids)
        return {
            **figures(reading.losses, length),
            "bytes": reading.cache_bytes,
            "prefill_seconds": reading.prefill_seconds,
            "step_seconds": reading.step_seconds,
        }

    whole = store.cell("exact", original)
    for name, bits in ROUNDED.items():
        held = whole["bytes"] * (bits + 32 / GROUP) / 32  # step and offset of each group have 16 bits
        store.cell(name, lambda b=bits, n=held: {**figures(read_rounded(model, ids, b), length), "bytes": n})
    for name, spec in SPECS.items():
        store.cell(name, lambda s=spec: converted(model, tokenizer, s, ids, length))


def share(found: Any, name: str) -> float:
    """Of the whole cache in bfloat16 at `LENGTH` tokens; the model is in float32, and the repeats were read as well."""
    read = 1.0 if name == "exact" or name in ROUNDED else LENGTH / (LENGTH + len(BACK) * PASSAGE)
    return float(2 * found[name]["bytes"] / (read * found["exact"]["bytes"]))


def judge(found: Any) -> Said:
    name, whole = "selected keys, 6 % of float32", found["exact"]
    row, last = found[name], list(whole["perplexity"])[-1]
    ratio = row["perplexity"][last] / whole["perplexity"][last]
    recalls = {back: row["recall"][back] / whole["recall"][back] for back in whole["recall"]}
    told = ", ".join(f"{100 * (r - 1):+.1f} % at {int(back):,}" for back, r in recalls.items())
    holds = share(found, name) <= 0.1205 and ratio <= 1.01 and max(recalls.values()) <= 1.03
    said = f"{100 * share(found, name):.1f} % of the bfloat16 cache: perplexity {ratio:.4f} of exact; recall {told}."
    return Said(said, "holds" if holds else "fails", "" if holds else "perplexity or recall is beyond the claim")


def draw(found: Any) -> None:
    fig, axes = figure(2, figsize=(10, 3.4))
    names = [name for name in found if isinstance(found[name], dict) and "bytes" in found[name]]
    last = list(found["exact"]["perplexity"])[-1]
    far = list(found["exact"]["recall"])[-1]
    for i, name in enumerate(names):
        row, x = found[name], 100 * share(found, name)
        axes[0].plot(x, row["perplexity"][last] / found["exact"]["perplexity"][last], "o", color=COLOURS[i], label=name)
        axes[1].plot(x, row["recall"][far], "o", color=COLOURS[i])
    axes[0].set(ylabel="perplexity ratio, tokens 2,000 to 4,000")
    axes[1].set(ylabel="perplexity of a passage 3,500 back", yscale="log")
    for ax in axes:
        ax.set(xlabel="% of the bfloat16 cache", xscale="log")
        ax.grid(color="0.9")
    axes[0].legend(fontsize=7)
    save(fig, "decoder_cache")
