"""SmolLM2-135M under every recipe: perplexity ratio and recall, with "window and sinks alone" beside.

Claim: ordinary perplexity hides what linear attention loses, recall shows it; a window with sinks and a tenth of the
heads exact, chosen by what their exactness does to the loss on repeated text, keeps both without training.
Expected (windows of 64 tokens, 4 sinks): a kernel alone destroys the model (ratio above 10), window and sinks alone
keep the perplexity (ratio about 1.03) and lose recall (above 30, exact about 1.3), 10 % exact heads bring it below 1.4.

    python experiments/smollm_recipes.py [--texts 8] [--threads 1] [--only NAME] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from bochner import convert, data, revert
from bochner.demo import load_smollm2
from bochner.hf import plan_of
from bochner.hf.measure import perplexity, recall

NEAR = {"window": 64, "sinks": 4}
RECIPES: dict[str, dict[str, Any]] = {
    "kernel only, positive m=128": {"feature_map": "positive", "num_features": 128},
    "kernel only, calibrated m=128": {"num_features": 128},
    "sinks + calibrated m=128": {"num_features": 128, "sinks": 4},
    "window 16 + sinks": {"feature_map": None, "window": 16, "sinks": 4},
    "window + sinks": {"feature_map": None, **NEAR},
    "window + sinks + positive m=128": {"feature_map": "positive", "num_features": 128, "select": False, **NEAR},
    "window + sinks + calibrated m=64": {"num_features": 64, "select": False, **NEAR},
    "window + sinks + calibrated m=64 where it helps": {"num_features": 64, "select": True, **NEAR},
    "window + sinks + landmark m=64": {"feature_map": "landmark", "num_features": 64, "select": False, **NEAR},
    "window + sinks, 5 % exact": {"feature_map": None, "exact_heads": 0.05, **NEAR},
    "window + sinks, 10 % exact": {"feature_map": None, "exact_heads": 0.1, **NEAR},
    "window + sinks, 10 % exact by groups": {
        "feature_map": None,
        "exact_heads": 0.1,
        "exact_unit": "group",
        **NEAR,
    },
    "window + sinks + calibrated m=64 where it helps, 10 % exact": {"num_features": 64, "exact_heads": 0.1, **NEAR},
    "window + sinks + calibrated m=64, 10 % exact, distilled": {
        "num_features": 64,
        "exact_heads": 0.1,
        "select": False,
        "distill": {"steps": 20},
        **NEAR,
    },
    "window + sinks + landmark m=64, 10 % exact": {
        "feature_map": "landmark",
        "num_features": 64,
        "exact_heads": 0.1,
        "select": False,
        **NEAR,
    },
    "window 128 + sinks, 10 % exact": {"feature_map": None, "exact_heads": 0.1, "window": 128, "sinks": 4},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=8, help="held-out texts for each figure")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="run recipes whose name contains this")
    parser.add_argument("--json", default="", help="write the rows to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    try:
        model, tokenizer = load_smollm2()
    except data.ArtefactUnavailable as error:
        print(f"skipped: {error}")
        return 0
    ordinary = data.paragraphs("heldout", arguments.texts)
    long = data.paragraphs("heldout", max(1, arguments.texts // 2), words=350)
    pairs = data.paragraphs("heldout", arguments.texts + 1, words=130)[1:]
    calibration = data.paragraphs("calibration", 6, words=250)

    def measure() -> tuple[float, float, float]:
        return (
            perplexity(model, tokenizer, ordinary, max_length=150),
            perplexity(model, tokenizer, long, max_length=450),
            recall(model, tokenizer, pairs),
        )

    exact = measure()
    head = f"{'recipe':60s} {'ratio':>7s} {'ratio at 450':>13s} {'recall':>8s} {'memory at 4000':>15s} {'exact':>6s}"
    print(f"exact: perplexity {exact[0]:.2f} (150 tokens), {exact[1]:.2f} (450 tokens), recall {exact[2]:.3f}\n{head}")
    rows = []
    for name, recipe in RECIPES.items():
        if arguments.only not in name:
            continue
        start = time.monotonic()
        recipe = {"feature_map": "calibrated", "exact_below": 0, **recipe}
        convert(model, calibration=calibration, tokenizer=tokenizer, max_length=320, batch_size=1, **recipe)
        seconds = time.monotonic() - start
        plan = plan_of(model)
        ordinary_ppl, long_ppl, again = measure()
        memory = plan.cache_bytes(4000) / plan.cache_bytes(4000, converted=False)
        share = plan.count("exact") / plan.num_heads
        row = {
            "recipe": name,
            "ratio": ordinary_ppl / exact[0],
            "ratio_long": long_ppl / exact[1],
            "recall": again,
            "memory": memory,
            "exact_heads": share,
            "kernel_heads": plan.count("hybrid") + plan.count("kernel"),
            "convert_seconds": seconds,
        }
        rows.append(row)
        print(
            f"{name:60s} {row['ratio']:7.3f} {row['ratio_long']:13.3f} {again:8.2f} {memory:15.3f} {share:6.2f}",
            flush=True,
        )
        revert(model)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as f:
            json.dump({"exact": exact, "rows": rows}, f, indent=1)
    found = {row["recipe"]: row for row in rows}
    bare, best = found.get("window + sinks"), found.get("window + sinks, 10 % exact")
    if bare is None or best is None:
        return 0
    holds = bare["recall"] > 10 and best["ratio"] <= 1.03 and best["recall"] <= 2.0 and best["memory"] <= 1 / 3
    print(f"claim {'holds' if holds else 'does not hold'}: ratio {best['ratio']:.3f}, recall {best['recall']:.2f}")
    return int(not holds)


if __name__ == "__main__":
    raise SystemExit(main())
