"""SmolLM2-135M converted to a target: keep 99 % of perplexity and of recall with the least memory at 4,000 tokens.

Claim: no recipe is needed. The search finds which key heads must stay exact and which windows the others need, and
keeps the target on texts that had no part in it. How much must stay exact depends on how long the texts are that tell
what is kept: each length is a search of its own, and what a choice by short texts loses at 2,000 and 4,000 tokens is in
its report. The last line says whether one of them also has at most 0.15 of the key-value memory, with a perplexity
ratio of at most 1.01 and a recall of at most 1.35 (exact about 1.28) on other authors' texts; the best choice on the
frontier with so little memory, if it keeps less, is measured on them, too.

    python experiments/smollm_target.py [--keep 0.99] [--judge 512 1000 4000] [--threads 1] [--save DIRECTORY]

Writes experiments/results/smollm_target.json, an entry for each length that was judged at; those that are there are not
searched again.
"""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

import _smollm
from smollm_recipes import figures, row_of

from bochner import BochnerWarning, convert, data, revert
from bochner.hf import layers_of, plan_of, report_of

RESULTS = Path(__file__).parent / "results" / "smollm_target.json"
LENGTH = 4000  # tokens at which memory counts
WORDS = 15_000  # of text to search on and to verify on
SMALL = 0.15  # of the memory


def search(model: Any, tokenizer: Any, keep: float, judged: int, save: str) -> tuple[Any, float]:
    """Convert to the target; the report, and the seconds of processor time that it took."""
    words = 3 * judged // 4  # about so many tokens
    texts = data.paragraphs("calibration", max(5, WORDS // words), words=words)
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BochnerWarning)  # a target that is missed is in the report
        goal = {"keep": keep, "minimize": "memory", "length": LENGTH, "judge_length": judged}
        convert(model, calibration=texts, tokenizer=tokenizer, progress=True, **goal)
    spent = time.process_time() - began
    if save:
        model.save_pretrained(f"{save}/{judged}")
    for layer in layers_of(model).values():  # short texts would be exact
        layer.plan.exact_below = 0
    return report_of(model).target, spent


def small(model: Any, report: Any, measure: Any, exact: list[float]) -> dict[str, Any] | None:
    """Figures of the choice that keeps most with little memory, on the texts it was chosen by and on others'.

    Choices with kernels are left out: only the one that was taken brings their maps.
    """
    within = [c for c in report.candidates if c.memory <= SMALL and not c.plan.count("hybrid")]
    if not within:
        return None
    best = max(within, key=lambda c: c.quality.kept)
    convert(model, plan=best.plan, exact_below=0)
    row = row_of(model, measure(), exact, 0.0)
    revert(model)
    return {"kept": best.quality.kept, **row}


def main() -> int:
    parser = _smollm.parser(__doc__)
    parser.add_argument("--keep", type=float, default=0.99)
    parser.add_argument("--judge", type=int, nargs="*", default=[512, 1000, 4000], help="tokens of the texts")
    parser.add_argument("--save", default="", help="save the converted models under this directory")
    arguments, model, tokenizer = _smollm.begin(parser)
    path = Path(arguments.json or RESULTS)
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    measure = figures(model, tokenizer, arguments.texts)
    for judged in arguments.judge:
        if str(judged) in result:
            continue
        if "exact" not in result:
            result["exact"] = measure()
        report, spent = search(model, tokenizer, arguments.keep, judged, arguments.save)
        print(plan_of(model))
        row = row_of(model, measure(), result["exact"], spent)
        revert(model)
        result[str(judged)] = {"row": row, "small": None, "report": report.to_dict()}
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        result[str(judged)]["small"] = less = small(model, report, measure, result["exact"])
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(
            f"judged at {judged} tokens; other authors: perplexity ratio {row['ratio']:.4f} (150 tokens), "
            f"{row['ratio_long']:.4f} (450 tokens), recall {row['recall']:.3f} (exact {result['exact'][2]:.3f}), "
            f"memory at 4,000 tokens {row['memory']:.3f}; {spent:.0f} s of processor time",
            flush=True,
        )
        if less is not None:
            print(
                f"with {less['memory']:.3f} of the memory, kept {less['kept']:.3f}: {less['ratio']:.4f}, "
                f"{less['ratio_long']:.4f}, recall {less['recall']:.3f}",
                flush=True,
            )
    rows = [result[str(n)]["row"] for n in arguments.judge]
    good = [max(row["ratio"], row["ratio_long"]) <= 1.01 and row["recall"] <= 1.35 for row in rows]
    holds = all(good) and min(row["memory"] for row in rows) <= SMALL
    print(f"at most 0.15 of the memory: {'yes' if holds else 'no'}")
    return int(not holds)


if __name__ == "__main__":
    raise SystemExit(main())
