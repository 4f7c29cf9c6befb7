"""Quality of SmolLM2-135M over a whole book: perplexity by position, and recall of passages 500 to 6,000 tokens back.

Claim: what a conversion loses is far away, and shows in long texts only. Windows alone recall nothing beyond them and
lose perplexity the longer the text is; exact key-value groups bring both back; a kernel beside the window is no
substitute for them: fitted to short texts it destroys long ones, fitted to long ones it gains a little at their end.

The text is a book of a held-out author, read piece by piece as generation would, followed by three passages of it
again, those that began 500, 2,000 and 6,000 tokens before its end. Every recipe is measured once and kept in
experiments/results/long_context.json: a run that was stopped goes on where it was.

    python experiments/long_context.py [--length 6500] [--only RECIPE ...] [--threads 1]
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import _smollm
import torch

from bochner import convert, data, revert
from bochner.hf import Plan, plan_of
from bochner.hf.judge import read

RESULTS = Path(__file__).parent / "results" / "long_context.json"
TARGETS = RESULTS.with_name("smollm_target.json")
BACK = (500, 2000, 6000)
PASSAGE, LEAD = 96, 8  # tokens of a repeat, of which the first only tell what is repeated
BOUNDS = (0, 500, 1000, 2000, 4000, 8000)
NEAR = {"window": 128, "sinks": 4, "window_kind": "sliding"}
GROUPS = {"feature_map": None, "exact_unit": "group", **NEAR}
RECIPES: dict[str, dict[str, Any] | None] = {
    "exact": None,
    "window 128": {"feature_map": None, **NEAR},
    "window 512": {"feature_map": None, **NEAR, "window": 512},
    "window 128, 10 of 90 groups exact": {"exact_heads": 1 / 9, **GROUPS},
    "window 128, 30 of 90 groups exact": {"exact_heads": 1 / 3, **GROUPS},
    "window 128 + landmark m=64": {"num_features": 64, "select": False, **NEAR},
    "window 128 + landmark m=64, 30 of 90 groups exact": {
        **GROUPS,
        "feature_map": "landmark",
        "num_features": 64,
        "exact_heads": 1 / 3,
        "select": False,
    },
    "window 128 + landmark m=64 fitted to 4,000 tokens": {
        "num_features": 64,
        "select": False,
        "max_length": 4000,
        **NEAR,
    },
    "keep 0.99, judged at 512 tokens": {"plan": "512"},
    "keep 0.99 at 1,000 tokens": {"plan": "1000"},
    "keep 0.99 at 4,000 tokens": {"plan": "4000"},
}


def text(tokenizer: Any, length: int) -> torch.Tensor:
    """Tokens (1, n): a book's first `length`, and the passages again."""
    words = " ".join(data.paragraphs("heldout", 1, words=length))
    book = tokenizer(words, return_tensors="pt").input_ids[0, :length]
    again = [book[length - back : length - back + PASSAGE] for back in BACK]
    return torch.cat([book, *again])[None]


def figures(model: Any, ids: torch.Tensor, length: int) -> dict[str, Any]:
    """Perplexity by position, recall by distance, and what reading took."""
    reading = read(model, ids)
    losses = reading.losses  # of tokens 1, 2, ...
    by_place = {
        f"{a}-{min(b, length)}": math.exp(losses[max(a - 1, 0) : min(b, length) - 1].mean().item())
        for a, b in pairwise(BOUNDS)
        if a < length
    }
    starts = [length + i * PASSAGE - 1 for i in range(len(BACK))]
    recalled = {
        str(back): math.exp(losses[start + LEAD : start + PASSAGE].mean().item())
        for back, start in zip(BACK, starts, strict=True)
    }
    return {
        "perplexity": by_place,
        "recall": recalled,
        "prefill_seconds": reading.prefill_seconds,
        "step_seconds": reading.step_seconds,
        "cache_bytes": reading.cache_bytes,
    }


def converted(model: Any, tokenizer: Any, recipe: dict[str, Any]) -> bool:
    """Convert by a recipe, or by a plan that smollm_target.py found; False if it has not."""
    recipe = {"max_length": 320, "batch_size": 1, "exact_below": 0, **recipe}
    if "plan" in recipe:
        found = json.loads(TARGETS.read_text(encoding="utf-8")) if TARGETS.exists() else {}
        if recipe["plan"] not in found:
            return False
        plan = Plan.from_dict(found[recipe["plan"]]["report"]["plan"])
        recipe |= {"plan": plan, "max_length": max(320, plan.fit_length)}
    texts = data.paragraphs("calibration", 6, words=max(250, 3 * recipe["max_length"] // 4))
    convert(model, calibration=texts, tokenizer=tokenizer, progress=True, **recipe)
    return True


def main() -> int:
    parser = _smollm.parser(__doc__)
    parser.add_argument("--length", type=int, default=6500, help="tokens of the book; the model has 8,192 positions")
    parser.add_argument("--only", nargs="*", default=list(RECIPES), choices=list(RECIPES), metavar="RECIPE")
    arguments, model, tokenizer = _smollm.begin(parser)
    path = Path(arguments.json or RESULTS)
    rows: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    ids = text(tokenizer, arguments.length)
    for name in arguments.only:
        recipe = RECIPES[name]
        if name in rows or (recipe is not None and not converted(model, tokenizer, recipe)):
            continue
        row = figures(model, ids, arguments.length)
        row["memory"] = 1.0
        if recipe is not None:
            plan = plan_of(model)
            row["memory"] = plan.cache_bytes(4000) / plan.cache_bytes(4000, converted=False)
            revert(model)
        rows[name] = row
        show(name, row)
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(not holds(rows))


def show(name: str, row: dict[str, Any], out: Callable[[str], None] = print) -> None:
    places = "  ".join(f"{a} {p:.2f}" for a, p in row["perplexity"].items())
    recalled = "  ".join(f"{b} back {p:.2f}" for b, p in row["recall"].items())
    out(f"{name}: perplexity {places}; recall {recalled}; memory at 4,000 {row['memory']:.3f}")


def holds(rows: dict[str, Any]) -> bool:
    exact, window, some = (rows.get(n) for n in ("exact", "window 128", "window 128, 30 of 90 groups exact"))
    if exact is None or window is None or some is None:
        return True
    first, *_, last = exact["perplexity"]
    grows = (
        window["perplexity"][last] / exact["perplexity"][last]
        > window["perplexity"][first] / exact["perplexity"][first]
    )
    return grows and window["recall"]["2000"] > 3 * some["recall"]["2000"]


if __name__ == "__main__":
    raise SystemExit(main())
