"""Block windows against sliding ones of the same length, on real models: an encoder and a decoder, untrained.

Claim: the exact keys of a block window contain those of the sliding window, so quality can only gain: the cosine of
MiniLM's embeddings is not below the sliding kind's for any map, and the perplexity ratio of SmolLM2 not above.

    python experiments/window_kinds.py [--texts 16] [--threads 1]

Resumable: rows that the result file holds are not measured again. Writes experiments/results/window_kinds.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from bochner import convert, data, revert
from bochner.demo import load_minilm, load_smollm2
from bochner.hf.measure import compare_embeddings, embed, perplexity, recall

RESULTS = Path(__file__).parent / "results" / "window_kinds.json"
KINDS = ("sliding", "block")
ENCODER = {"alone": None, "calibrated m=64": ("calibrated", 64), "landmark m=16": ("landmark", 16)}
ENCODER |= {"landmark m=64": ("landmark", 64)}
DECODER = {"alone": (None, 0.0), "landmark m=64": (("landmark", 64), 0.0), "alone, 10 % exact heads": (None, 0.1)}
DECODER |= {"landmark m=64, 10 % exact heads": (("landmark", 64), 0.1)}


def options(chosen: tuple[str, int] | None) -> dict[str, Any]:
    return {"feature_map": None} if chosen is None else {"feature_map": chosen[0], "num_features": chosen[1]}


def encoder(texts: int, row: Callable[..., None], names: Iterable[str] = ENCODER) -> None:
    """Window 32, one sink; texts of 150 to 256 tokens."""
    model, tokenizer = load_minilm()
    seen, unseen = (data.paragraphs(split, texts, words=220) for split in ("calibration", "heldout"))
    exact = embed(model, tokenizer, unseen)
    for name in names:
        chosen = ENCODER[name]
        for kind in KINDS:

            def measure(chosen: Any = chosen, kind: str = kind) -> dict[str, float]:
                near = {"window": 32, "sinks": 1, "window_kind": kind, "exact_below": 0, "select": False}
                convert(model, calibration=seen, tokenizer=tokenizer, **options(chosen), **near)
                quality = compare_embeddings(exact, embed(model, tokenizer, unseen))
                revert(model)
                return {"cosine": float(quality.cosine), "rank_correlation": float(quality.rank_correlation)}

            row("all-MiniLM-L6", name, kind, measure)


def decoder(texts: int, row: Callable[..., None]) -> None:
    """Window 64, four sinks; texts of 450 tokens."""
    model, tokenizer = load_smollm2()
    seen = data.paragraphs("calibration", 6, words=250)
    unseen = data.paragraphs("heldout", max(2, texts // 4), words=350)
    pairs = data.paragraphs("heldout", max(2, texts // 4) + 1, words=130)[1:]
    exact = perplexity(model, tokenizer, unseen, max_length=450)
    for name, (chosen, share) in DECODER.items():
        for kind in KINDS:

            def measure(chosen: Any = chosen, share: float = share, kind: str = kind) -> dict[str, float]:
                near = {"window": 64, "sinks": 4, "window_kind": kind, "exact_below": 0, "select": False}
                how = {"max_length": 320, "batch_size": 1, "exact_heads": share}
                convert(model, calibration=seen, tokenizer=tokenizer, **options(chosen), **near, **how)
                ratio = perplexity(model, tokenizer, unseen, max_length=450) / exact
                found = {"perplexity_ratio": ratio, "recall": recall(model, tokenizer, pairs)}
                revert(model)
                return found

            row("SmolLM2-135M", name, kind, measure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="the encoder, two rows, four texts")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []

    def row(model: str, name: str, kind: str, measure: Callable[[], dict[str, float]]) -> None:
        if any((r["model"], r["beside"], r["kind"]) == (model, name, kind) for r in rows):
            return
        rows.append({"model": model, "beside": name, "kind": kind, **measure()})
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        print(rows[-1], flush=True)

    try:
        if arguments.quick:
            encoder(4, row, ("alone", "landmark m=16"))
        else:
            encoder(arguments.texts, row)
            decoder(arguments.texts, row)
    except data.ArtefactUnavailable as error:
        print(f"skipped: {error}")
        return 0
    worse = [r for r in rows if r["kind"] == "block" and not _gains(r, rows)]
    print("claim holds" if not worse else f"claim does not hold: {[(r['model'], r['beside']) for r in worse]}")
    return int(bool(worse))


def _gains(block: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Whether a row is no worse than its sliding twin."""
    twin = next(r for r in rows if r["kind"] == "sliding" and all(r[key] == block[key] for key in ("model", "beside")))
    if "cosine" in block:
        return block["cosine"] >= twin["cosine"]
    return block["perplexity_ratio"] <= twin["perplexity_ratio"]


if __name__ == "__main__":
    raise SystemExit(main())
