"""SmolLM2-135M with 0.15 of its memory at 4,000 tokens, adapters and all: what training buys a decoder.

A window of 256 tokens with 8 of 90 key-value groups exact has 0.148 of the memory and loses recall over more than its
window. Adapters (LoRA, rank 16, on queries, keys, values and outputs) are trained for a few minutes on texts of 512
tokens in which passages come again. Stages:

- `distilled`: fitted to the original's own outputs, 60 steps on 32 texts;
- `trained`: by the model's own loss, the next token, 64 steps on 64 texts;
- `control`: the same training with all heads as they were, which tells what the texts alone teach;
- `target`: all of it by one call, `convert(keep=0.99, memory=0.15, distill=...)`, which finds heads and windows itself.

Claim: trained, by hand and by the target, the perplexity ratio is at most 1.01 and recall at most 1.35 on other
authors' texts of up to 450 tokens; by hand 0.99 is kept of both on theirs of 512 and of 4,000 tokens, and the target
keeps it at 4,000 tokens of the texts that it held back itself. A book of 6,500 tokens is read by each as well.

    python experiments/smollm_distilled.py [--stages distilled trained control target] [--threads 1]

Writes experiments/results/smollm_distilled.json; stages that are there are not run again.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import _smollm
import long_context
import torch
from smollm_recipes import figures, row_of

from bochner import convert, data, distill
from bochner.demo import load_smollm2
from bochner.hf import report_of
from bochner.hf.judge import Text, compare_readings, read

RESULTS = Path(__file__).parent / "results" / "smollm_distilled.json"
LENGTH = 512  # tokens of a text, the passages that come again included
HELD, FURTHER = 8, 2  # texts to judge by, of LENGTH tokens and of 4,000
BOOK = 6500  # tokens of a whole book
RECIPE = {"feature_map": None, "window": 256, "sinks": 4, "window_kind": "sliding", "exact_unit": "group"}


class Stage(NamedTuple):
    loss: str
    steps: int
    texts: int  # to train on; four more are held back
    recipe: dict[str, Any]


CONVERTED = {**RECIPE, "exact_heads": 8 / 90}
STAGES = {
    "distilled": Stage("outputs", 60, 32, CONVERTED),
    "trained": Stage("model", 64, 64, CONVERTED),
    "control": Stage("model", 64, 64, {**RECIPE, "window": BOOK + 1000}),  # all keys
}


def stream(tokenizer: Any, split: str, words: int) -> torch.Tensor:
    """Tokens of the books of one split."""
    text = " ".join(data.paragraphs(split, max(1, words // 3000), words=3000))
    return tokenizer(text, return_tensors="pt").input_ids[0]


TARGET: dict[str, Any] = {"keep": 0.99, "memory": 0.15, "length": 4000}
LORA = {"lora": 16, "loss": "model", "end_to_end": 64}


class Measure:
    """Figures of a model on texts held back, against those of the original."""

    def __init__(self, model: Any, tokenizer: Any, texts: int) -> None:
        unseen = stream(tokenizer, "heldout", 15_000)
        self.texts = {
            "512": [Text(unseen[i * LENGTH : (i + 1) * LENGTH], i) for i in range(HELD)],
            "4000": [Text(unseen[i * 4000 : (i + 1) * 4000], i) for i in range(FURTHER)],
        }
        self.book = long_context.text(tokenizer, BOOK)
        self.tokenizer, self.number = tokenizer, texts
        self.exact = figures(model, tokenizer, texts)()
        self.before = {n: [read(model, t.ids) for t in group] for n, group in self.texts.items()}

    def row(self, model: Any) -> dict[str, Any]:
        found = row_of(model, figures(model, self.tokenizer, self.number)(), self.exact, 0.0)
        for n, group in self.texts.items():
            kept = compare_readings(group, self.before[n], [read(model, t.ids) for t in group])
            found[n] = {"kept": kept.kept, **kept.figures}
        found["book"] = long_context.figures(model, self.book, BOOK)
        print(found, flush=True)
        return found


def trained(model: Any, tokenizer: Any, stage: Stage) -> Any:
    """Train adapters of a converted model; the report."""
    from peft import LoraConfig, get_peft_model

    seen = stream(tokenizer, "calibration", max(15_000, 500 * (stage.texts + 4)))
    texts = [Text(seen[i * LENGTH : (i + 1) * LENGTH], i) for i in range(stage.texts + 4)]
    lora = LoraConfig(r=16, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    torch.manual_seed(0)
    adapted = get_peft_model(model, lora).eval()
    batches = [{"input_ids": t.ids} for t in texts]
    report = distill(adapted, batches, end_to_end=stage.steps, end_to_end_lr=1e-3, loss=stage.loss, progress=True)
    print(report, flush=True)
    return report


def by_target(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Convert and train a model in one call; what it says of itself, and the processor time that it took."""
    texts = data.paragraphs("calibration", 13, words=3000)
    began = time.process_time()
    convert(model, calibration=texts, tokenizer=tokenizer, distill=LORA, exact_below=0, progress=True, **TARGET)
    return {"report": report_of(model).to_dict(), "convert_seconds": time.process_time() - began}


def main() -> int:
    parser = _smollm.parser(__doc__)
    parser.add_argument("--stages", nargs="*", choices=(*STAGES, "target"), default=[*STAGES, "target"])
    arguments, model, tokenizer = _smollm.begin(parser)
    try:
        import peft  # noqa: F401
    except ImportError:
        print("skipped: it needs peft")
        return 0
    path = Path(arguments.json or RESULTS)
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    calibration = data.paragraphs("calibration", 6, words=250)
    measure = None
    for name in arguments.stages:
        if name in result:
            continue
        model = load_smollm2()[0]  # adapters change it
        measure = measure or Measure(model, tokenizer, arguments.texts)
        result["exact"] = measure.exact
        if name == "target":
            told = by_target(model, tokenizer)
            result[name] = {**measure.row(model), **told}
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            continue
        stage = STAGES[name]
        convert(model, calibration=calibration, tokenizer=tokenizer, exact_below=0, **stage.recipe)
        if stage.recipe is CONVERTED and "converted" not in result:
            result["converted"] = measure.row(model)
        report = trained(model, tokenizer, stage)
        told = {"steps": stage.steps, "texts": stage.texts, "seconds": report.seconds, "loss": report.end_to_end}
        result[name] = {**measure.row(model), **told}
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    good = all(name in result and is_small_and_good(result[name]) for name in ("trained", "target"))
    good = good and min(result["trained"][n]["kept"] for n in ("512", "4000")) >= 0.99
    good = good and result["target"]["report"]["target"]["met"]
    print(f"claim {'holds' if good else 'does not hold'}")
    return int(not good)


def is_small_and_good(row: dict[str, Any]) -> bool:
    return row["memory"] <= 0.15 and max(row["ratio"], row["ratio_long"]) <= 1.01 and row["recall"] <= 1.35


if __name__ == "__main__":
    raise SystemExit(main())
