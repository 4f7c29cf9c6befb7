"""Is attention sparse? Assumption A of the paper on kernel matrix-vector products, experiments (i), (ii) and A.1.3.

The paper's claim: in the kernel matrix of every head, the n largest entries outweigh the rest up to a factor of at most
5.4, constant in the length n. Ours: that does not hold for the least sparse heads of a pretrained encoder and decoder,
whose ratio is larger and grows almost in proportion to n, while most heads of the decoder keep to it.

    python experiments/attention_sparsity.py [--quick]      (--quick: the encoder on three texts)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from bochner.data import fetch, paragraphs
from bochner.papers.attention_kernel import CLAIMS, sparsity

HERE = Path(__file__).resolve().parent
TEXTS = 12


def main(argv: list[str] | None = None) -> int:
    from transformers import AutoModel, AutoTokenizer, logging

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the encoder on three texts")
    quick = parser.parse_args(argv).quick
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    prose = paragraphs("calibration", count=3 if quick else TEXTS, words=400)
    models: dict[str, tuple[str, dict[str, str]]] = {"minilm": (str(fetch("minilm")), {})}
    if not quick:
        decoder = Path(fetch("smollm2"))
        models["smollm2"] = (str(decoder.parent), {"gguf_file": decoder.name})
    result = {}
    for name, (path, options) in models.items():
        model = AutoModel.from_pretrained(path, **options).eval()
        measured = sparsity(model, prose, tokenizer=AutoTokenizer.from_pretrained(path, **options))
        print(f"{name}: {measured}", flush=True)
        measured.figure(str(HERE.parent / "docs" / "images" / f"sparsity_{name}.png"))
        result[name] = {
            "largest": float(measured.max_ratio.max()),
            "median_head": float(np.median(measured.max_ratio)),
            "heads_within_the_claim": float((measured.max_ratio <= max(CLAIMS.values())).mean()),
            "growth": measured.growth,
            "lengths": measured.lengths.tolist(),
            "by_length": measured.mean_by_length.tolist(),
            "median_next": float(np.median(measured.median_next)),
            "median_double": float(np.median(measured.median_double)),
        }
    (HERE / "results" / "attention_sparsity.json").write_text(json.dumps(result, indent=1) + "\n")
    refuted = all(r["largest"] > max(CLAIMS.values()) and r["growth"] > 0.5 for r in result.values())
    holds = refuted and (quick or result["smollm2"]["heads_within_the_claim"] > 0.5)
    print(f"claim: {'holds' if holds else 'FAILS'}")
    return 0 if holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
