"""all-MiniLM-L6-v2 converted to a target: keep 98 % of its embeddings and be as fast as possible, untrained.

Claim: at its own 512 tokens the converted model is never slower than the original, since short inputs go the way they
went before; with its positions tiled to 4,096, windows with a kernel beside keep the target and the whole model is
faster.

The tiled model is no good reader of long texts (its positions repeat), but its attention costs what that of a long
encoder costs. Quality is that of its own embeddings at 1,024 tokens, times are of the whole model at up to 4,096.

    python experiments/minilm_target.py [--keep 0.98] [--long 4096] [--threads 1] [--json OUT]
"""

from __future__ import annotations

import argparse
import copy
import json
from functools import partial
from typing import Any

import torch
from torch import nn

from bochner import convert, data, revert
from bochner._timing import best_times
from bochner.demo import load_minilm
from bochner.hf import capture, plan_of, report_of
from bochner.hf.aim import target_data

READ = 1024  # tokens of the texts that the tiled model is judged on


def tile_positions(model: Any, length: int) -> None:
    """Give a BERT positions for `length` tokens by repeating those it has."""
    embeddings, had = model.embeddings, model.config.max_position_embeddings
    weight = embeddings.position_embeddings.weight.data.repeat(-(-length // had), 1)[:length]
    embeddings.position_embeddings = nn.Embedding.from_pretrained(weight)
    embeddings.position_ids = torch.arange(length)[None]
    embeddings.token_type_ids = torch.zeros(1, length, dtype=torch.long)
    model.config.max_position_embeddings = length


def forward_times(original: Any, model: Any, length: int) -> dict[str, float]:
    """Seconds of the whole model at a length, taking turns: a copy that was never converted, and the converted one."""
    g = torch.Generator().manual_seed(length)
    batch = {"input_ids": torch.randint(1000, 20_000, (1, length), generator=g)}
    runs = {"original": partial(capture.run, original, batch), "converted": partial(capture.run, model, batch)}
    return best_times(runs, repeats=7, budget=2.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=float, default=0.98)
    parser.add_argument("--long", type=int, default=4096, help="tokens of the tiled model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", default="", help="write the reports to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, tokenizer = load_minilm()
    result: dict[str, Any] = {}
    for name, length, read in (("its own", 512, 512), ("tiled", arguments.long, READ)):
        if length > 512:
            tile_positions(model, length)
        original = copy.deepcopy(model)
        texts = data.paragraphs("calibration", 48, words=110 * read // 256)
        batches = target_data(model, texts, tokenizer, read, 4)
        convert(model, calibration=batches, keep=arguments.keep, length=length, progress=True)
        report = report_of(model).target
        assert report is not None
        print(plan_of(model))
        lengths = [64, 128, 256, 512] if length == 512 else [512, 1024, 2048, length]
        seconds = {n: forward_times(original, model, n) for n in lengths}
        for n, times in seconds.items():
            told = ", ".join(f"{k} {1e3 * v:.1f} ms" for k, v in times.items())
            print(f"{name}, {n} tokens: {told}; ratio {times['converted'] / times['original']:.3f}", flush=True)
        result[name] = {"report": report.to_dict(), "seconds": seconds}
        if arguments.json:
            with open(arguments.json, "w", encoding="utf-8") as f:
                json.dump(result, f, indent=1)
        revert(model)
    ratios = [t["converted"] / t["original"] for t in result["its own"]["seconds"].values()]
    last = result["tiled"]["seconds"][arguments.long]
    holds = max(ratios) < 1.1 and result["tiled"]["report"]["met"] and last["converted"] < last["original"]
    print(f"claim {'holds' if holds else 'does not hold'}")
    return int(not holds)


if __name__ == "__main__":
    raise SystemExit(main())
