"""Which stage of the search pays: damages and the caution of a choice, each alone, on three models.

Claim: the damage that the search uses, the geometric mean of relative error and first-order change of the output,
needs no more memory or time than any simpler one at the same quality on texts that had no part in the choice. Costs of
encoders are counted in keys that are seen, so that they are the same on every machine.

    python experiments/search_ablation.py [--models small minilm smollm] [--threads 1]

Writes experiments/results/search_ablation.json, an entry for each model, damage and caution; those that are there are
not measured again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bochner import data, demo
from bochner.hf import evaluate
from bochner.hf.config import Calibration, Target
from bochner.hf.observe import discover
from bochner.hf.search import knapsack
from bochner.hf.search.damage import WEIGHED, Damages, MeasuredProblem
from bochner.hf.search.options import Space
from bochner.hf.search.refine import Trials, cheapest_that_keeps
from bochner.hf.search.texts import batches_for, settle, split

RESULTS = Path(__file__).parent / "results" / "search_ablation.json"
MODELS = ("small", "minilm", "smollm")
STEPS, BATCH, LENGTH, VOCABULARY = 400, 8, 192, 64  # of the small decoder's training


def words(count: int, seed: int) -> Tensor:
    """A stream of tokens that follow each other by a fixed table, with passages that come again."""
    table = torch.randint(0, VOCABULARY, (2 * VOCABULARY, 4), generator=torch.Generator().manual_seed(1))
    g, found = torch.Generator().manual_seed(seed), [1, 2]
    while len(found) < count:
        if len(found) > 60 and torch.rand((), generator=g) < 0.03:
            start = int(torch.randint(0, len(found) - 40, (), generator=g))
            found += found[start : start + int(torch.randint(16, 40, (), generator=g))]
        else:
            row = table[(2 * found[-1] + found[-2] % 2) % len(table)]
            found.append(int(row[int(torch.randint(0, 4, (), generator=g))]))
    return torch.tensor(found[:count])


def small() -> tuple[Any, Any, Target]:
    """A Llama of three layers, trained for some minutes until it looks passages up."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(hidden_size=64, intermediate_size=128, vocab_size=VOCABULARY, **heads)
    model, tokens = LlamaForCausalLM(config), words(100_000, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    for step in range(STEPS):
        starts = torch.randint(0, len(tokens) - LENGTH, (BATCH,)).tolist()
        ids = torch.stack([tokens[i : i + LENGTH] for i in starts])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1.0, (step + 1) / 50) * max(0.05, 1 - step / STEPS)
    texts = [{"input_ids": piece[None]} for piece in words(16_000, 7).split(500)]
    return model.eval(), Calibration(texts), Target(keep=0.97, length=480, minimize="memory")


def minilm() -> tuple[Any, Any, Target]:
    model, tokenizer = demo.load_minilm()
    texts = data.paragraphs("calibration", 48, words=220)
    return model, Calibration(texts, tokenizer, batch_size=4), Target(keep=0.98, length=512)


def smollm() -> tuple[Any, Any, Target]:
    model, tokenizer = demo.load_smollm2()
    texts = data.paragraphs("calibration", 20, words=750)
    return model, Calibration(texts, tokenizer), Target(keep=0.99, length=4000, judge_length=1000)


def damages(found: Damages) -> dict[str, dict[str, Tensor]]:
    """The damages that are compared, each (options, key heads) by layer."""
    kinds: dict[str, dict[str, Tensor]] = {}
    for name, layer in found.layers.items():
        error = torch.stack([e.squared().cpu() for e in found.errors[name]])
        size = torch.stack([(e.error / e.size.sum()).cpu() for e in found.errors[name]])
        change = found.changes[name]
        every = {"error": error, "share of the layer": size, "change": change, "both": (error * change).sqrt()}
        for kind, values in every.items():
            by_head = values.view(len(values), layer.plan.num_kv_heads, -1).sum(-1)
            kinds.setdefault(kind, {})[name] = by_head
    return kinds


def prepared(model: Any, calibration: Any, target: Target) -> tuple[Space, Any, Any, Damages]:
    """The search up to its damages; the evaluators of the choice texts and of those held back."""
    batches = batches_for(model, calibration, target)
    shapes = discover(model, {k: v[:1] for k, v in batches[0].items()})
    goal = settle(target, model, shapes, batches)
    parts = split(batches, goal)
    space = Space(model, shapes, goal)
    space.fit(parts.fit, print)
    if goal.by_memory:
        space.price(print)
    for layer in () if goal.by_memory else space.layers.values():
        seen = [3 * (getattr(f, "window", 0) or 0) + 1 + 2 * getattr(f, "num_features", 0) for f in layer.made]
        layer.cost = torch.tensor([layer.length, *seen], dtype=torch.float64)
        layer.split = 0.1 * layer.length
    choice, held = (evaluate.evaluator(model, part, goal.judged) for part in (parts.choice, parts.held))
    found = Damages(space)
    for p in model.parameters():
        p.requires_grad_(False)
    for i, batch in enumerate(choice.batches):
        found.add(choice, batch, i < WEIGHED)
    return space, choice, held, found


def measured(name: str, result: dict[str, Any], save: Callable[[], None]) -> None:
    """All cells of one model."""
    model, calibration, target = {"small": small, "minilm": minilm, "smollm": smollm}[name]()
    space, choice, held, found = prepared(model, calibration, target)
    assert target.keep is not None
    plain = evaluate.CAUTION
    for kind, damage in damages(found).items():
        for caution in (plain, 0.5) if kind == "both" else (plain,):
            key = f"{name}, {kind}" + ("" if caution == plain else ", by the mean")
            if key in result:
                continue
            evaluate.CAUTION = caution
            problem = MeasuredProblem(space, choice, damage, print)
            trials = Trials(problem)
            chosen = cheapest_that_keeps(problem, target.keep, trials)
            problem.evaluator = held
            unseen = problem.measure(chosen.choice)
            evaluate.CAUTION = plain
            share = chosen.cost / knapsack.totals(problem.tables, knapsack.all_exact(problem.tables))[1]
            quality = {"choice": chosen.quality.retained, "held_back": unseen.retained}
            result[key] = {"cost": share, **quality, "keep": target.keep, "runs": len(trials.tried)}
            print(key, result[key], flush=True)
            save()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=MODELS)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}

    def save() -> None:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    for name in arguments.models:
        measured(name, result, save)
    others = [key for key in result if not key.endswith(("both", "by the mean"))]
    best = all(result[f"{key.split(',')[0]}, both"]["cost"] <= 1.05 * result[key]["cost"] for key in others)
    print(f"claim {'holds' if best else 'does not hold'}")
    return int(not best)


if __name__ == "__main__":
    raise SystemExit(main())
