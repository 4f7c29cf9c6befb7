"""Which stages and constants of the search pay, each alone, on three models.

Four damages are compared by what the choices that they lead to lose on texts that had no part in anything, at three
budgets; every constant by leaving it out or changing it. Costs are bytes, of encoders keys that are seen, so that they
are the same on every machine.
"""

from __future__ import annotations

from typing import Any

import torch
from _framework import Said, Store, experiment
from torch import Tensor

from bochner import Calibration, Target, data, demo
from bochner.hf import calibrate, evaluate
from bochner.hf.observe import discover
from bochner.hf.search import refine
from bochner.hf.search.damage import Damages, MeasuredProblem
from bochner.hf.search.knapsack import Choice, all_exact, frontier, totals
from bochner.hf.search.options import Space
from bochner.hf.search.texts import batches_for, settle, split

BUDGETS = (0.2, 0.35, 0.5, 0.7)  # of the original's cost
WEIGHED = (1, 3)  # batches with a backward pass, beside all
ROWS = (512, 1024, 2048, 4096, 8192)  # tokens that maps are fitted to
BATCH, LENGTH, VOCABULARY = 8, 192, 64  # of the small decoder's training
KEPT = "both"  # the damage that the search uses


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


def small(steps: int) -> tuple[Any, Calibration, Target]:
    """A Llama of three layers, trained until it looks passages up."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(hidden_size=64, intermediate_size=128, vocab_size=VOCABULARY, **heads)
    model, tokens = LlamaForCausalLM(config), words(100_000, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    for step in range(steps):
        starts = torch.randint(0, len(tokens) - LENGTH, (BATCH,)).tolist()
        ids = torch.stack([tokens[i : i + LENGTH] for i in starts])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1.0, (step + 1) / 50) * max(0.05, 1 - step / steps)
    texts = [{"input_ids": piece[None]} for piece in words(16_000, 7).split(500)]
    return model.eval(), Calibration(texts), Target(keep=0.97, length=480, minimize="memory")


def minilm(steps: int) -> tuple[Any, Calibration, Target]:
    model, tokenizer = demo.load_minilm()
    texts = data.paragraphs("calibration", 60, words=220)
    return model, Calibration(texts, tokenizer, batch_size=4), Target(keep=0.95, length=512)


def smollm(steps: int) -> tuple[Any, Calibration, Target]:
    model, tokenizer = demo.load_smollm2()
    texts = data.paragraphs("calibration", 14, words=750)
    return model, Calibration(texts, tokenizer), Target(keep=0.99, length=1000, judge_length=512, minimize="memory")


MODELS = {"small": small, "minilm": minilm, "smollm": smollm}


class Case:
    """A model with its options, costs and texts, as the search has them before it chooses."""

    def __init__(self, name: str, steps: int) -> None:
        self.model, calibration, self.target = MODELS[name](steps)
        batches = batches_for(self.model, calibration, self.target)
        self.shapes = discover(self.model, {k: v[:1] for k, v in batches[0].items()})
        self.goal = settle(self.target, self.model, self.shapes, batches)
        self.parts = split(batches, self.goal)
        self.model.requires_grad_(False)
        parts = (self.parts.choice, self.parts.held)
        self.choice, self.held = (evaluate.evaluator(self.model, part, self.goal.judged) for part in parts)
        self.space, self.seen = self.fitted(), dict[tuple[bool, Choice, float], tuple[evaluate.Quality, int]]()

    def fitted(self) -> Space:
        space = Space(self.model, self.shapes, self.goal)
        space.fit(self.parts.fit, lambda text: print(text, flush=True))
        if self.goal.by_memory:
            space.price(print)
            return space
        for layer in space.layers.values():
            seen = [3 * (getattr(f, "window", 0) or 0) + 1 + 2 * getattr(f, "num_features", 0) for f in layer.made]
            layer.cost = torch.tensor([layer.length, *seen], dtype=torch.float64)
            layer.split = 0.1 * layer.length
        return space

    def damages(self) -> dict[str, dict[str, Tensor]]:
        """The damages that are compared, each (options, key heads) by layer."""
        found, kinds = Damages(self.space), dict[str, dict[str, Tensor]]()
        for i, batch in enumerate(self.choice.batches):
            print(f"damages, batch {i + 1} of {len(self.choice.batches)}", flush=True)
            found.add(self.choice, batch, True)
            last = i + 1 == len(self.choice.batches)
            if not last and i + 1 not in WEIGHED:
                continue
            for name, layer in found.layers.items():
                error = torch.stack([e.squared().cpu() for e in found.errors[name]])
                of_layer = torch.stack([(e.error / e.size.sum()).cpu() for e in found.errors[name]])
                change = found.changes[name].clone()
                every = {f"both, {i + 1} weighed": (error * change).sqrt(), f"change, {i + 1} weighed": change}
                if last:
                    every = {"error": error, "share of the layer": of_layer, "change": change}
                    every["both"] = (error * change).sqrt()
                for kind, values in every.items():
                    by_head = values.view(len(values), layer.plan.num_kv_heads, -1).sum(-1)
                    kinds.setdefault(kind, {})[name] = by_head
        return kinds

    def quality(self, choice: Choice, held: bool, give_up: float = 0.0) -> tuple[evaluate.Quality, int]:
        """The quality of a choice on the choice texts or those held back, and the batches that were run for it."""
        key = (held, choice, give_up)
        if key not in self.seen:
            built, count = self.space.build(self.space.plan_of(choice)), 0
            layers = {name: layer for name, layer in built.items() if not layer.plan.untouched}

            def run(batch: dict[str, Any]) -> Any:
                nonlocal count
                count += 1
                return self.space.output(layers, batch)

            found = (self.held if held else self.choice).quality(run, give_up)
            self.seen[key] = (found, count)
        return self.seen[key]


class Remembered(MeasuredProblem):
    """A problem whose qualities are measured once for all damages."""

    def __init__(self, case: Case, damages: dict[str, Tensor], gives_up: bool = True) -> None:
        super().__init__(case.space, case.choice, damages, print)
        self.case, self.gives_up, self.batches = case, gives_up, 0

    def measure(self, choice: Choice, give_up: float = 0.0) -> evaluate.Quality:
        found, count = self.case.quality(choice, False, give_up if self.gives_up else 0.0)
        self.batches += count
        return found


def at_budgets(case: Case, damages: dict[str, Tensor]) -> dict[str, Any]:
    """What the choice of each budget loses on texts held back."""
    problem, found = Remembered(case, damages), {}
    for budget in BUDGETS:
        choices = [c for c in frontier(problem.tables) if totals(problem.tables, c)[1] <= budget * problem.whole]
        if choices:
            cost = totals(problem.tables, choices[-1])[1] / problem.whole
            lost = [1 - case.quality(choices[-1], held)[0].retained for held in (False, True)]
            found[str(budget)] = {"cost": cost, "choice": lost[0], "held_back": lost[1]}
    return found


def searched(case: Case, damages: dict[str, Tensor], gives_up: bool = True, **constants: float) -> dict[str, Any]:
    """A search with one of its constants changed, and its fallback."""
    homes: dict[str, Any] = {"CAUTION": evaluate, "STEP": refine, "DEARER": refine}
    before = {name: getattr(homes[name], name) for name in constants if hasattr(homes[name], name)}
    case.seen = {key: (evaluate.Quality(q.measures, q.figures), n) for key, (q, n) in case.seen.items()}  # bounds anew
    for name in before:
        setattr(homes[name], name, constants[name])
    try:
        problem = Remembered(case, damages, gives_up)
        trials, keep = refine.Trials(problem), case.target.keep
        assert keep is not None
        chosen = refine.cheapest_that_keeps(problem, keep, trials)
        second = refine.fallback(problem, chosen, keep, trials)
        found: dict[str, Any] = {"cost": chosen.cost / problem.whole, "runs": len(trials.tried)}
        found |= {"batches": problem.batches, "keep": keep, "held_back": case.quality(chosen.choice, True)[0].retained}
        if second is not None:
            found["second_cost"] = totals(problem.tables, second)[1] / problem.whole
            found["second_held_back"] = case.quality(second, True)[0].retained
        return found
    finally:
        for name, value in before.items():
            setattr(homes[name], name, value)
        case.seen = {key: (evaluate.Quality(q.measures, q.figures), n) for key, (q, n) in case.seen.items()}


def fit_error(case: Case, rows: int) -> dict[str, float]:
    """The mean relative error of all heads with maps that were fitted to so many tokens, on the choice texts."""
    before, calibrate.ROWS = calibrate.ROWS, rows
    try:
        space = case.fitted()
    finally:
        calibrate.ROWS = before
    options = {
        name: {fate: made for fate, made in layer.made.items() if fate.has_map} for name, layer in space.layers.items()
    }
    errors = calibrate.option_errors(case.model, {n: o for n, o in options.items() if o}, case.choice.batches)
    every = [e.relative().mean().item() for several in errors.values() for e in several.values()]
    return {"error": sum(every) / len(every)} if every else {}


@experiment(
    claim="Ours: the damage that the search uses leads to choices that lose no more on unseen texts than those of any "
    "other, and each of its constants pays.",
    ours="a small decoder, MiniLM at 512 tokens, SmolLM2-135M judged at 512 tokens",
    quick={"models": ("small",), "steps": 20, "rows": (512,)},
    sources=("bochner.hf.search", "bochner.hf.evaluate", "bochner.hf.calibrate"),
    needs=("transformers",),
)
def measure(
    store: Store,
    models: tuple[str, ...] = ("small", "minilm", "smollm"),
    steps: int = 400,
    rows: tuple[int, ...] = ROWS,
) -> None:
    for name in models:
        table = store.table(name)
        wanted = [*(f"{n} rows" for n in rows), "search", "mean", "no step", "coarse", "whole", "next"]
        if all(key in table for key in wanted):
            continue
        case = Case(name, steps)
        kinds = case.damages()
        for kind, damage in kinds.items():
            store.cell(kind, lambda d=damage: at_budgets(case, d), table)
        used = kinds[KEPT]
        store.cell("search", lambda: searched(case, used), table)
        store.cell("mean", lambda: searched(case, used, CAUTION=0.5), table)
        store.cell("no step", lambda: searched(case, used, STEP=0.0), table)
        store.cell("coarse", lambda: searched(case, used, STEP=0.1), table)
        store.cell("whole", lambda: searched(case, used, gives_up=False), table)
        store.cell("next", lambda: searched(case, used, DEARER=1.0), table)
        for n in rows:
            store.cell(f"{n} rows", lambda n=n: fit_error(case, n), table)


def lost(table: dict[str, Any], kind: str) -> float:
    """The mean loss on texts held back over the budgets that all damages reach."""
    kinds = [k for k in table if k in ("error", "share of the layer", "change", "both")]
    shared = set.intersection(*(set(table[k]) for k in kinds))
    return sum(table[kind][b]["held_back"] for b in shared) / max(len(shared), 1)


def judge(found: Any) -> Said:
    kinds = ("error", "share of the layer", "change", "both")
    told, worse = [], []
    for name, table in found.items():
        mean = {kind: lost(table, kind) for kind in kinds}
        told.append(f"{name} " + ", ".join(f"{kind} {x:.3f}" for kind, x in mean.items()))
        if mean[KEPT] > 1.1 * min(mean.values()) + 0.002:
            worse.append(f"{min(mean, key=lambda k: mean[k])} loses less on {name}")
    return Said(
        "lost of the quality on texts held back, mean of three budgets: " + "; ".join(told) + ".",
        "fails" if worse else "holds",
        "; ".join(worse),
    )
