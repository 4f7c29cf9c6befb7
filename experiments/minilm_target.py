"""all-MiniLM-L6-v2 converted to a target: keep 98 % of its embeddings and be as fast as possible, untrained.

Claim: at its own 512 tokens the converted model is never slower than the original, since short inputs go the way they
went before; with its positions tiled to 4,096, windows with a kernel beside keep the target and the whole model is
faster.

The tiled model is no good reader of long texts (its positions repeat), but its attention costs what that of a long
encoder costs. Quality is that of its own embeddings at 1,024 tokens, times are of the whole model at up to 4,096.

    python experiments/minilm_target.py [--keep 0.98] [--long 4096] [--threads 1]; then again with --times [tiled]

Searches that experiments/results/minilm_target.json holds are not made again.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bochner import convert, data, revert
from bochner.demo import load_minilm
from bochner.hf import Plan, capture, plan_of, report_of
from bochner.hf.aim import target_data

RESULTS = Path(__file__).parent / "results" / "minilm_target.json"
MODELS = ("its own", "tiled")
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
    g = torch.Generator().manual_seed(length)
    batch = {"input_ids": torch.randint(1000, 20_000, (1, length), generator=g)}
    found: dict[str, list[float]] = {name: [] for name in models}
    names, began = list(models), time.monotonic()
    while len(found[names[0]]) < 3 or (time.monotonic() - began < SECONDS and len(found[names[0]]) < 300):
        names = names[1:] + names[:1]
        for name in names:
            start = time.perf_counter()
            capture.run(models[name], batch)
            found[name].append(time.perf_counter() - start)
    return {name: sorted(times)[len(times) // 10] for name, times in found.items()}


def searched(model: Any, tokenizer: Any, keep: float, length: int, read: int) -> dict[str, Any]:
    """The report of a search; the model is as before."""
    texts = data.paragraphs("calibration", 48, words=110 * read // 256)
    batches = target_data(model, texts, tokenizer, read, 4)
    convert(model, calibration=batches, keep=keep, length=length, progress=True)
    report = report_of(model).target
    assert report is not None
    print(plan_of(model), flush=True)
    revert(model)
    return report.to_dict()


def timed(model: Any, tokenizer: Any, plan: dict[str, Any], lengths: list[int]) -> dict[str, dict[str, float]]:
    """Times of the whole model under a plan; that its maps are fitted to little text makes no difference."""
    models = {"original": twin(model), "the same": twin(model), "converted": model}
    texts = data.paragraphs("calibration", 4, words=200)
    convert(model, plan=Plan.from_dict(plan), calibration=texts, tokenizer=tokenizer)
    seconds = {str(n): forward_times(models, n) for n in lengths}
    revert(model)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=float, default=0.98)
    parser.add_argument("--long", type=int, default=4096, help="tokens of the tiled model")
    parser.add_argument(
        "--times", nargs="*", choices=MODELS, help="time the plans that were found, on a quiet machine; default both"
    )
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, tokenizer = load_minilm()
    result: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name, length, read in zip(MODELS, (512, arguments.long), (512, READ), strict=True):
        if length > 512:
            tile_positions(model, length)
        row = result.setdefault(name, {})
        if "report" not in row:
            row["report"] = searched(model, tokenizer, arguments.keep, length, read)
        if arguments.times is not None and name in (arguments.times or MODELS):
            lengths = [64, 128, 256, 512] if length == 512 else [1024, 2048, length]
            row["seconds"] = timed(model, tokenizer, row["report"]["plan"], lengths)
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        for n, times in row.get("seconds", {}).items():
            told = ", ".join(f"{k} {1e3 * v:.1f} ms" for k, v in times.items())
            print(f"{name}, {n} tokens: {told}; ratio {times['converted'] / times['original']:.3f}", flush=True)
    return int(not holds(result, arguments.long))


def holds(result: dict[str, Any], long: int) -> bool:
    good = bool(result["tiled"]["report"]["met"])  # at 512 tokens the original may be all there is
    if "seconds" in result["tiled"]:
        # The same model a second time tells what a ratio is good for.
        short = [t["converted"] / max(t["original"], t["the same"]) for t in result["its own"]["seconds"].values()]
        last = result["tiled"]["seconds"][str(long)]
        good = good and max(short) < 1.01 and last["converted"] < last["original"]
    print(f"claim {'holds' if good else 'does not hold'}")
    return good


if __name__ == "__main__":
    raise SystemExit(main())
