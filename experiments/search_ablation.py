"""Which damage of a head chooses best, and which constants of the search pay, on three models.

Damages are compared by what the choices that they lead to lose on texts that had no part in anything, at some budgets.
Costs are bytes, of encoders keys that are seen, so that they are the same on every machine. For SmolLM2 the budget is
the share of key heads that stay exact beside windows of 64 keys, and what `exact_heads` ranks heads by is a fifth one.
"share of the layer" is the search's own. "error" is relative to the head alone, "change" the first-order change of the
output by a backward pass, "both" the geometric mean of these two.

"caution" is the confidence of the lower bound that choices are made by. Many searches are made, each by a few texts
that are drawn for choosing and as many for verifying. What they end with is judged by all texts. Newspaper reports
and the small decoder's texts have no part in any other result. SmolLM2's choices are how many keys it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from _framework import Said, Store, experiment
from torch import Tensor

from bochner import Calibration, Plan, Target, data, demo
from bochner.hf import calibrate, evaluate
from bochner.hf.attention import LinearAttention
from bochner.hf.calibrate import HeadErrors
from bochner.hf.calls import Call, exact
from bochner.hf.conversion import make_exact
from bochner.hf.fates import EXACT, Window
from bochner.hf.interface import attached
from bochner.hf.observe import discover, recording, run
from bochner.hf.search import refine, selected
from bochner.hf.search.damage import MeasuredProblem, tables
from bochner.hf.search.knapsack import Choice, Table, all_exact, frontier, totals
from bochner.hf.search.options import Space
from bochner.hf.search.texts import batches_for, settle, split
from bochner.hf.search.verify import Verifier

BUDGETS = (0.2, 0.35, 0.5, 0.7)  # of the original's cost
EXACT_SHARES = (0.1, 0.2)  # of SmolLM2's key heads
KINDS = ("share of the layer", "error", "change", "both")
ROWS = (512, 1024, 2048, 4096, 8192)  # tokens that maps are fitted to
BATCH, LENGTH, VOCABULARY = 8, 192, 64  # of the small decoder's training
KEPT = "share of the layer"  # the damage that the search uses
CAUTIONS = (0.5, 0.8, 0.9, 0.95)  # the confidence of the lower bound that choices are made by; 0.5 is the mean
DRAWS, DRAWN = 40, 8  # searches, and the texts that are drawn for each of their two parts


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


def smollm2(steps: int) -> tuple[Any, Calibration, Target]:
    model, tokenizer = demo.load_smollm2()
    texts = data.paragraphs("calibration", 39, words=384)
    return model, Calibration(texts, tokenizer), Target(keep=0.99, minimize="memory", length=4000, judge_length=512)


def newspaper(steps: int) -> tuple[Any, Calibration, Target]:
    from fits_that_travel import cut, reports

    model, tokenizer = demo.load_minilm()
    return model, Calibration(cut(reports(range(1, 45)), 60), tokenizer, batch_size=4), Target(keep=0.95, length=512)


MODELS = {"small": small, "minilm": minilm, "newspaper": newspaper, "smollm": smollm2}


class Priced(Space):
    """Options of an encoder cost the keys that they see, on every machine."""

    def price(self, say: Any) -> None:
        if self.goal.by_memory:
            super().price(say)
            return
        for layer in self.layers.values():
            seen = {f: 3 * (getattr(f, "window", 0) or 0) + 1 + 2 * getattr(f, "num_features", 0) for f in layer.made}
            layer.cost = {EXACT: layer.length, **seen}
            layer.split = 0.1 * layer.length


class Texts(Verifier):
    """Texts of a search of which some can be asked for."""

    @property
    def count(self) -> int:
        return len(self.readings[self.length]) if self.goal.is_language else sum(len(t) for t in self.outputs.truth)

    def answers(self, model: Any) -> list[Any]:
        """Of each text: what a quality is made of."""
        if self.goal.is_language:
            return [(*pair, evaluate.read(model, pair[0].ids)) for pair in self.readings[self.length]]
        found = [run(model, batch)[0].float() for batch in self.batches]
        both = zip(self.outputs.truth, found, self.outputs.rows, strict=True)
        return [pair for t, x, rows in both for pair in zip(*(evaluate.pooled(y, rows) for y in (t, x)), strict=True)]


class Answers:
    """What a converted model makes of every text."""

    def __init__(self, model: Any, *parts: Texts) -> None:
        self.is_language = parts[0].goal.is_language
        self.every = [answer for part in parts for answer in part.answers(model)]

    def quality(self, rows: Sequence[int]) -> evaluate.Quality:
        columns = zip(*(self.every[i] for i in rows), strict=True)
        if self.is_language:
            return evaluate.compare_readings(*columns)
        return evaluate.embedding_quality(*(torch.stack(column) for column in columns))


class Case:
    """A model with its options, costs and texts, as the search has them before it chooses."""

    def __init__(self, name: str, steps: int) -> None:
        self.model, calibration, self.target = MODELS[name](steps)
        batches = batches_for(self.model, calibration, self.target)
        self.shapes = discover(self.model, {k: v[:1] for k, v in batches[0].items()})
        self.goal = settle(self.target, self.model, self.shapes, batches)
        self.parts = self.split(batches)
        self.model.requires_grad_(False)
        parts = (self.parts.choice, self.parts.held)
        self.choice, self.held = (Texts(self.model, part, self.goal, self.shapes, print) for part in parts)
        self.space, self.seen = self.fitted(), dict[Choice, Answers]()
        self.rows = [range(self.choice.count), range(self.choice.count, self.choice.count + self.held.count)]

    def split(self, batches: Any) -> Any:
        return split(batches, self.goal)

    def fitted(self) -> Space:
        space = Priced(self.model, self.shapes, self.goal)
        space.fit(self.parts.fit, lambda text: print(text, flush=True))
        return space

    def tables(self, damages: dict[str, Tensor]) -> list[Table]:
        return tables(self.space, damages)

    def damages(self) -> dict[str, dict[str, Tensor]]:
        """The damages that are compared, each (options, key heads) by layer."""
        options = {name: list(layer.made.values()) for name, layer in self.space.layers.items() if layer.made}
        return compared(self.model, options, self.choice.batches)

    def quality(self, choice: Choice, rows: Sequence[int]) -> evaluate.Quality:
        """The quality of a choice on some of the texts, those of the choice first and those held back behind them."""
        plan = self.space.plan_of(choice)
        if not plan.converted:
            return self.held.original().quality
        if choice not in self.seen:
            with attached(self.model, plan, self.space.build(plan)):
                self.seen[choice] = Answers(self.model, self.choice, self.held)
        return self.seen[choice].quality(rows)


class Rungs(Case):
    """How many keys a decoder holds, which is what its search chooses."""

    def split(self, batches: Any) -> Any:
        return selected.split_for(self.model, batches, self.goal)

    def fitted(self) -> Space:
        space = selected.SelectedSpace(self.model, self.shapes, self.goal)
        space.fit(self.parts.fit, lambda text: print(text, flush=True))
        return space

    def tables(self, damages: dict[str, Tensor]) -> list[Table]:
        assert isinstance(self.space, selected.SelectedSpace)
        return selected.tables(self.space)


class Remembered(MeasuredProblem):
    """A problem whose qualities are those of some texts, run once for all damages and draws."""

    def __init__(self, case: Case, damages: dict[str, Tensor], rows: Sequence[int]) -> None:
        super().__init__(case.space, case.choice, case.tables(damages), print)
        self.case, self.rows = case, rows

    def measure(self, choice: Choice) -> evaluate.Quality:
        return self.case.quality(choice, self.rows)


def compared(model: Any, options: dict[str, list[LinearAttention]], batches: Any) -> dict[str, dict[str, Tensor]]:
    """The damages of some options of every layer on some batches."""
    errors = {name: [HeadErrors() for _ in several] for name, several in options.items()}
    change = {name: torch.zeros(len(x), x[0].plan.num_heads, dtype=torch.float64) for name, x in options.items()}
    generator = torch.Generator().manual_seed(0)
    for i, batch in enumerate(batches):
        print(f"damages, batch {i + 1} of {len(batches)}", flush=True)
        kept: dict[str, tuple[Tensor, list[Tensor]]] = {}

        def look(name: str, call: Call, kept: Any = kept) -> Tensor | None:
            if name not in options:
                return None
            out = exact(call)
            with torch.no_grad():
                others = [made(call) for made in options[name]]
                for e, other in zip(errors[name], others, strict=True):
                    e.add(call, other, out)
            out = out if out.requires_grad else out.requires_grad_()
            out.retain_grad()
            kept[name] = (out, [other - out.detach() for other in others])
            return out

        with recording(model, look):
            output = run(model, batch, gradient=True)
            with torch.enable_grad():
                direction(output, generator).backward()
        for name, (out, several) in kept.items():
            assert out.grad is not None
            squares = [(out.grad * e).sum(-1).double().square().sum((0, 2)) for e in several]
            change[name] += torch.stack(squares)
    found: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    for name, several in options.items():
        error = torch.stack([e.squared() for e in errors[name]])
        share = torch.stack([e.error / e.size.sum() for e in errors[name]])
        every = {"error": error, "share of the layer": share, "change": change[name]}
        every["both"] = (error * change[name]).sqrt()
        for kind, values in every.items():
            found[kind][name] = values.view(len(values), several[0].plan.num_kv_heads, -1).sum(-1)
    return found


def direction(output: Any, generator: torch.Generator) -> Tensor:
    """A random scalar of an output: the log-likelihood of labels drawn from predictions, or a combination."""
    if getattr(output, "logits", None) is None:
        out = torch.nn.functional.normalize(output[0].mean(1), dim=-1)
        return (out * torch.randn(out.shape, generator=generator)).sum()
    rows = output.logits.float().flatten(0, -2).log_softmax(-1)
    return rows.gather(-1, torch.multinomial(rows.detach().exp(), 1, generator=generator)).sum()


def at_budgets(case: Case, damages: dict[str, Tensor]) -> dict[str, Any]:
    """What the choice of each budget loses on texts held back."""
    problem, found = Remembered(case, damages, case.rows[0]), {}
    for budget in BUDGETS:
        choices = [c for c in frontier(problem.tables) if totals(problem.tables, c)[1] <= budget * problem.whole]
        if choices:
            cost = totals(problem.tables, choices[-1])[1] / problem.whole
            lost = [1 - case.quality(choices[-1], rows).retained for rows in case.rows]
            found[str(budget)] = {"cost": cost, "choice": lost[0], "held_back": lost[1]}
    return found


def searched(case: Case, damages: dict[str, Tensor], caution: float) -> dict[str, Any]:
    """Many searches that choose by a lower bound of some confidence, each by texts of its own; means over them.

    `cost`: of what they end with; `lost`: what that loses on all texts; `below`: how often that is too much;
    `failed`: the share of the first choices that fail on the texts that verify; `steps`: what is looked at in turn
    after them, how often each is what a search ends with; the last is the original.
    """
    before, evaluate.CAUTION = evaluate.CAUTION, caution
    every, keep = [*case.rows[0], *case.rows[1]], case.target.keep
    ends, costs, lost = [0] * (refine.STEPS + 2), list[float](), list[float]()
    assert keep is not None
    try:
        for draw in range(DRAWS):
            order = torch.randperm(len(every), generator=torch.Generator().manual_seed(draw)).tolist()
            problem = Remembered(case, damages, order[:DRAWN])
            steps = refine.ladder(problem.tables, refine.cheapest_that_keeps(problem, keep))
            found = [case.quality(c, order[DRAWN : 2 * DRAWN]) for c in steps]
            passes = [(q.lower if i else q.retained) >= keep for i, q in enumerate(found)]
            end = passes.index(True) if any(passes) else len(steps)
            choice = [*steps, all_exact(problem.tables)][end]
            ends[end if end < len(steps) else -1] += 1
            costs.append(problem.share(choice))
            lost.append(1 - case.quality(choice, every).retained)
    finally:
        evaluate.CAUTION = before
    found = {"cost": sum(costs) / DRAWS, "lost": sum(lost) / DRAWS, "below": sum(x > 1 - keep for x in lost) / DRAWS}
    return found | {"failed": 1 - ends[0] / DRAWS, "steps": ends, "keep": keep}


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


def smollm(store: Store, table: dict[str, Any]) -> None:
    """SmolLM2 with windows of 64 keys and some heads exact, chosen by each damage."""
    model, tokenizer = demo.load_smollm2()
    model.requires_grad_(False)
    every = [tokenizer(t, return_tensors="pt").input_ids[0] for t in data.paragraphs("calibration", 16, words=400)]
    tokens, unseen = torch.cat(every[:8]), torch.cat(every[8:])
    fate = Window(64, 4, "sliding")
    shapes = discover(model, {"input_ids": tokens[None, :16]})
    layers = {plan.name: LinearAttention(plan) for plan in Plan.of(shapes, "llama", fate=lambda shape: fate).layers}
    batches = [{"input_ids": piece[None]} for piece in tokens[:3072].split(512)]
    scores = calibrate.retrieval_scores(model, layers, batches)
    kinds = {"exact_heads": {name: x.view(layers[name].plan.num_kv_heads, -1).sum(-1) for name, x in scores.items()}}
    goal = settle(Target(length=512), model, shapes, batches)
    texts, held = (Verifier(model, some, goal, shapes, print) for some in (tokens, unseen))
    found = compared(model, {name: [layer] for name, layer in layers.items()}, texts.batches)
    kinds |= {kind: {name: x[0] for name, x in by_layer.items()} for kind, by_layer in found.items()}

    def losses(kind: str) -> dict[str, Any]:
        rows = {}
        for share in EXACT_SHARES:
            plan = Plan.of(shapes, "llama", fate=lambda shape: fate)
            for layer in plan.layers:
                layer.scores = kinds[kind][layer.name].tolist()
            make_exact(plan, share)
            with attached(model, plan, {x.name: LinearAttention(x) for x in plan.layers}):
                quality = held.look(model).quality
            rows[str(share)] = {"held_back": 1 - quality.retained, **quality.figures}
        return rows

    for kind in kinds:
        store.cell(kind, lambda k=kind: losses(k), table)


@experiment(
    claim="Ours: the share of a layer's output that an option changes leads to choices that lose less on unseen texts. "
    "It beats the error of the head alone and first-order changes of the model's output, in the mean of three models.",
    ours="a small decoder, MiniLM at 512 tokens, SmolLM2-135M at 512 tokens",
    quick="the claim is about the mean of three models, two of them pretrained",
    needs=("transformers",),
)
def measure(
    store: Store,
    models: tuple[str, ...] = ("small", "minilm", "newspaper", "smollm"),
    steps: int = 400,
    rows: tuple[int, ...] = ROWS,
) -> None:
    for name in models:
        table = store.table(name)
        if name == "smollm":
            smollm(store, table)
            cautions(store, table, Rungs(name, steps), {})
            continue
        case = Case(name, steps)
        kinds = case.damages()
        cautions(store, table, case, kinds[KEPT])
        if name == "newspaper":
            continue
        for kind, damage in kinds.items():
            store.cell(kind, lambda c=case, d=damage: at_budgets(c, d), table)
        for n in rows:
            store.cell(f"{n} rows", lambda c=case, n=n: fit_error(c, n), table)


def cautions(store: Store, table: dict[str, Any], case: Case, damages: dict[str, Tensor]) -> None:
    for caution in CAUTIONS:
        store.cell(f"caution {caution}", lambda c=caution: searched(case, damages, c), table)


def lost(table: dict[str, Any], kind: str) -> float:
    """The mean loss on texts held back over the budgets that all damages reach."""
    shared = set.intersection(*(set(table[k]) for k in KINDS))
    return sum(table[kind][b]["held_back"] for b in shared) / max(len(shared), 1)


def judge(found: Any) -> Said:
    told, means = [], dict.fromkeys(KINDS, 0.0)
    for name, table in found.items():
        if KEPT not in table:
            continue
        mean = {kind: lost(table, kind) for kind in KINDS}
        told.append(f"{name} " + ", ".join(f"{kind} {x:.3f}" for kind, x in mean.items()))
        means = {kind: means[kind] + x for kind, x in mean.items()}
    best = min(means, key=lambda kind: means[kind])
    return Said(
        "lost of the quality on validation texts, mean of the budgets: " + "; ".join(told) + ".",
        "holds" if best == KEPT else "fails",
        "" if best == KEPT else f"{best} loses less",
    )
