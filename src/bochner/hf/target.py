"""A target instead of a recipe: what each head may become, so that the model keeps a share of its quality.

1. Every layer's heads are tried as windows of several sizes, as windows with a kernel beside, and as kernels: the
   errors of their outputs are measured. 2. How much an error of a head matters is the gradient of a gate between the
   head and its exact attention, integrated from one to the other, of the divergence from the original's predictions.
3. The damage of a choice is then a sum, sensitivity times squared error, and so is its cost: for every budget of damage
   the cheapest choice is a minimisation head by head. 4. Budgets are tried end to end until the cheapest that keeps the
   target is found. 5. Sums know nothing of heads that stand in for each other: `bochner.hf.thin` goes on from there.
   6. `aim` verifies it on other texts. Where the memory is given, `bochner.hf.within` has the place of 4 and 5.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bochner._checks import BochnerError, one_of, positive_int, spawn_seed
from bochner.hf import capture
from bochner.hf.choose import gate_gradients, take_maps
from bochner.hf.cost import crossover, layer_seconds
from bochner.hf.familiar import note
from bochner.hf.judge import Judge, Quality
from bochner.hf.layer import Call, LinearAttention, exact
from bochner.hf.measure import HeadErrors, Samples
from bochner.hf.plan import LayerPlan, Plan

CAUSAL_WINDOWS, WINDOWS = (64, 128, 256, 512, 1024), (16, 32, 64, 128)
NUM_CAUSAL_WINDOWS = 4  # of them, the widest that are below half of the length
CAUSAL_SINKS, SINKS = 4, 1
CAUSAL_HYBRID = 128  # the window of decoders that is tried with a kernel beside
WEIGHED = 4  # batches that heads are weighed by
LEAST_ERROR = 0.02  # errors below this say nothing about a head's sensitivity
BUDGETS = (-5.0, 7.0)  # log2 of the damages that are tried, in units of what the target allows
REFINEMENTS = 2  # halvings of the last step between a budget that keeps the target and one that does not
RETREATS = 6  # choices that are verified before giving up
Say = Callable[[str], None]


@dataclass(frozen=True)
class Goal:
    """What to keep, what to save and at how many tokens; `judged`: the tokens of the texts that tell what is kept.

    `memory`: the share of it that a choice may take, None for the least that keeps the target; `demanded`: whether
    `keep` was asked for, and is not only the unit of what is lost; `trains`: what is trained afterwards, `"maps"` or
    `"weights"`, before it is told what is kept. `owner`: who was asked; `notes`: what the report says of the lengths.
    """

    keep: float
    minimize: str
    length: int
    judged: int
    memory: float | None = None
    demanded: bool = True
    trains: str = ""
    owner: str = "convert"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.keep, bool) or not isinstance(self.keep, (int, float)) or not 0.5 <= self.keep < 1:
            raise BochnerError(f"The 'keep' of {self.owner} must be a share in [0.5, 1), got {self.keep!r}.")
        share = self.memory
        if share is not None and (isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1):
            raise BochnerError(f"The 'memory' of {self.owner} must be a share in (0, 1), got {share!r}.")
        if share is not None and self.minimize != "memory":
            raise BochnerError(f"The 'memory' of {self.owner} is what may be taken of it: leave out 'minimize'.")
        one_of(self.minimize, "minimize", self.owner, ("memory", "time"))
        positive_int(self.length, "length", self.owner)
        positive_int(self.judged, "judge_length", self.owner)
        if self.judged > self.length:
            raise BochnerError(
                f"The 'judge_length' of {self.owner} must be at most the 'length', got {self.judged} and "
                f"{self.length}: what is saved is counted at the longest texts."
            )

    @property
    def with_kernels(self) -> bool:
        """Whether kernels are tried. Those of few heads are fitted to queries and keys that training would change."""
        return self.memory is None or self.trains != "weights"


class Option(NamedTuple):
    """What a key head may become."""

    kind: str
    window: int | None = None

    def __str__(self) -> str:
        return self.kind if self.window is None else f"{self.kind} {self.window}"


EXACT = Option("exact")


@dataclass
class Layer:
    """One attention module: what its heads may become, with errors (h,), costs per key head, and sensitivities (h,).

    `length`: how many keys it has where the longest of all modules has as many as the goal names. `single`: whether all
    heads that are not exact become the same: two kinds are two calls, and cost time. `split`: the seconds that exact
    heads beside others take more than their share.
    """

    plan: LayerPlan
    made: dict[Option, LinearAttention]
    single: bool
    length: int
    errors: dict[Option, Tensor] = field(default_factory=dict)
    seconds: dict[Option, float] = field(default_factory=dict)  # of the whole layer
    split: float = 0.0
    sensitivity: dict[str, Tensor] = field(default_factory=dict)  # by kind
    tables: list[tuple[list[Option], Tensor, Tensor]] = field(default_factory=list)

    def damage(self, option: Option) -> Tensor:
        """What each key head loses by becoming an option, (g,)."""
        if option == EXACT:
            return torch.zeros(self.plan.num_kv_heads, dtype=torch.float64)
        damages = self.sensitivity[option.kind] * self.errors[option].double().square()
        return damages.view(self.plan.num_kv_heads, -1).sum(-1)

    def cost(self, option: Option, goal: Goal) -> float:
        """Bytes or seconds of one key head."""
        if goal.minimize == "time":
            return self.seconds[option] / self.plan.num_kv_heads
        return self.planned([option] * self.plan.num_kv_heads).cache_bytes(goal.length) / self.plan.num_kv_heads

    def planned(self, options: Sequence[Option]) -> LayerPlan:
        """The plan in which each key head becomes what is given; all have one window."""
        windows = {option.window for option in options if option.window is not None}
        assert len(windows) <= 1
        kinds = [option.kind for option in options for _ in range(self.plan.group)]
        window = min(windows) if windows else None
        return replace(self.plan, kinds=kinds, window=window, sinks=self.plan.sinks if window else 0)

    def tabulate(self, goal: Goal) -> None:
        """For every window the options that go with it, their damages (options, g) and their costs (options,)."""
        self.tables = []
        windows = sorted({option.window or 0 for option in self.made})
        together = [[o for o in self.made if (o.window or 0) == window] for window in windows]
        for others in ([[o] for o in self.made] if self.single else together) or [[]]:
            tried = [EXACT, *others]
            damages = torch.stack([self.damage(o) for o in tried])
            self.tables.append((tried, damages, torch.tensor([self.cost(o, goal) for o in tried], dtype=torch.float64)))

    def best(self, price: float) -> tuple[list[Option], float]:
        """The options with the least damage + price x cost, one per key head, and their damage."""
        found: tuple[float, list[Option], float] | None = None
        for tried, damages, costs in self.tables:
            each = (damages + price * costs[:, None]).argmin(0)
            alike = [torch.full_like(each, i) for i in range(len(tried))] if self.split else []
            for chosen in (each, *alike):
                damage = damages.gather(0, chosen[None]).sum().item()
                total = damage + price * (costs[chosen].sum().item() + self.extra([tried[i] for i in chosen.tolist()]))
                if found is None or total < found[0]:
                    found = (total, [tried[i] for i in chosen.tolist()], damage)
        assert found is not None
        return found[1:]

    def extra(self, options: Sequence[Option]) -> float:
        """The seconds that a layer takes more than the shares of its key heads."""
        return self.split if 0 < options.count(EXACT) < len(options) else 0.0

    def build(self, plan: LayerPlan) -> LinearAttention:
        """The maps of a plan, taken from the layers that were tried."""
        layer = LinearAttention(plan)
        for kind in layer.map_norm:
            old = self.made[Option(kind, plan.window if kind == "hybrid" else None)]
            take_maps(layer, kind, old, list(range(plan.num_kv_heads)))
        return layer


@dataclass
class Candidate:
    """One point of the frontier: what is kept and what it costs, `predicted` its damage in units of the target's."""

    plan: Plan
    predicted: float
    quality: Quality
    memory: float  # of the cache at the goal's length, as a share of the original's
    attention_seconds: float  # of all attention layers at the goal's length
    verified: Quality | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        kinds = {kind: self.plan.count(kind) for kind in ("exact", "window", "hybrid", "kernel")}
        return {
            "kept": self.quality.kept,
            "figures": self.quality.figures,
            "memory": self.memory,
            "attention_seconds": self.attention_seconds,
            "predicted_damage": self.predicted,
            "heads": kinds,
            "verified": None if self.verified is None else {"kept": self.verified.kept, **self.verified.figures},
        }


class Search:
    """The workspace of one search: layers with their options, the judge, and what was tried."""

    def __init__(
        self,
        model: Any,
        shapes: dict[str, capture.Shape],
        goal: Goal,
        num_features: int,
        seed: int,
        say: Say,
        window: int | None = None,
        sinks: int | None = None,
        window_kind: str | None = None,
    ) -> None:
        self.model, self.goal, self.say, self.windows = model, goal, say, None if window is None else (window,)
        self.shapes = shapes
        self.layers: dict[str, Layer] = {}
        longest = max(shape.keys for shape in shapes.values())
        self.draft = Plan(
            [_as_it_is(shape, num_features, spawn_seed(seed, i)) for i, shape in enumerate(shapes.values())],
            getattr(model.config, "model_type", ""),
        )
        for plan in self.draft.layers:
            if not plan.reason:
                plan.sinks = plan.sinks if sinks is None or plan.is_cross else sinks
                plan.window_kind = window_kind or plan.window_kind
                share = shapes[plan.name].keys / longest if longest else 1.0
                single = not plan.is_causal or goal.minimize == "time"
                self.layers[plan.name] = Layer(plan, {}, single, max(1, round(share * goal.length)))
        self.tried: list[Candidate] = []
        self.path: list[Plan] = []  # choices of a descent of gates
        self.seconds: dict[str, float] = {}

    @property
    def original_bytes(self) -> int:
        return self.draft.cache_bytes(self.goal.length, converted=False)

    def prepare(self, data: Sequence[dict[str, Tensor]], judge: Judge) -> None:
        """Fit the maps of all options, measure their errors, their times and the heads' sensitivities."""
        self._fit(data)
        self._measure_errors(judge)
        self._measure_times()
        self._measure_sensitivities(judge)
        for layer in self.layers.values():
            layer.tabulate(self.goal)

    def _fit(self, data: Sequence[dict[str, Tensor]]) -> None:
        began = time.monotonic()
        samples = {name: Samples() for name in self.layers}

        def look(name: str, call: Call) -> None:
            if name in samples:
                samples[name].add(call)

        self.say(f"observing attention on {len(data)} batches")
        with capture.recording(self.model, look):
            for batch in data:
                capture.run(self.model, batch)
        longest = max((s.k[0].shape[1] for s in samples.values() if s.k), default=0)
        for i, (name, layer) in enumerate(self.layers.items()):
            self.say(f"fitting maps, layer {i + 1} of {len(self.layers)}")
            note(layer.plan, samples[name].q, samples[name].k)
            length = layer.length if layer.plan.is_causal else min(longest, layer.length)
            # A window that covers half of the texts hides what it loses.
            judged = max(1, length * self.goal.judged // self.goal.length) if layer.plan.is_causal else length
            for option in _options(layer.plan, judged, self.windows, self.goal.with_kernels):
                plan = layer.planned([option] * layer.plan.num_kv_heads)
                if option.kind != "window" and not _fits(option, plan, samples[name].rows, longest, length):
                    continue
                made = LinearAttention(plan)
                if option.kind != "window":
                    samples[name].calibrate(made.map_of(option.kind), plan, option.kind)
                layer.made[option] = made.to(next(self.model.parameters()).device)
            del samples[name]
        self.seconds["fitting maps"] = time.monotonic() - began

    def _measure_errors(self, judge: Judge) -> None:
        began = time.monotonic()
        found = {name: {option: HeadErrors() for option in layer.made} for name, layer in self.layers.items()}

        @torch.no_grad()
        def look(name: str, call: Call) -> Tensor | None:
            if name not in found:
                return None
            truth = exact(call)
            for option, made in self.layers[name].made.items():
                found[name][option].add(call, made(call), truth)
            return truth

        with capture.recording(self.model, look):
            for i, batch in enumerate(judge.batches):
                self.say(f"measuring errors, batch {i + 1} of {len(judge.batches)}")
                capture.run(self.model, batch)
        for name, layer in self.layers.items():
            layer.errors = {option: errors.relative().cpu() for option, errors in found[name].items()}
        self.seconds["measuring errors"] = time.monotonic() - began

    def _measure_times(self) -> None:
        """Layers that are alike are timed once."""
        began, known, splits = time.monotonic(), dict[Any, dict[Option, float]](), dict[Any, float]()
        for layer in self.layers.values():
            plan = layer.plan
            heads = (plan.num_heads, plan.num_kv_heads, plan.head_dim, plan.value_dim)
            alike = (*layer.made, *heads, plan.is_causal, layer.length)
            if alike not in known:
                self.say(f"timing attention at {layer.length} tokens")
                pairs = layer_seconds(list(layer.made.values()), layer.length, rounds=3)
                known[alike] = {option: own for option, (_, own) in zip(layer.made, pairs, strict=True)}
                known[alike][EXACT] = min((plain for plain, _ in pairs), default=0.0)
                splits[alike] = self._split(layer, known[alike])
            layer.seconds, layer.split = known[alike], splits[alike]
        self.seconds["timing"] = time.monotonic() - began

    def _split(self, layer: Layer, seconds: dict[Option, float]) -> float:
        """What one exact key head beside the others takes more than its share, where time is to be saved."""
        option = _reference(layer, "hybrid") or _reference(layer, "kernel")
        if self.goal.minimize != "time" or option is None or layer.plan.num_kv_heads < 2:
            return 0.0
        mixed = layer.planned([EXACT, *[option] * (layer.plan.num_kv_heads - 1)])
        ((_, own),) = layer_seconds([layer.build(mixed)], layer.length, rounds=3)
        share = 1 / layer.plan.num_kv_heads
        return max(0.0, own - share * seconds[EXACT] - (1 - share) * seconds[option])

    def _measure_sensitivities(self, judge: Judge) -> None:
        """By kind: an error of a kernel does not do what an error of a window does."""
        began = time.monotonic()
        for kind in ("window", "hybrid", "kernel"):
            reference = {name: o for name, layer in self.layers.items() if (o := _reference(layer, kind)) is not None}
            if not reference:
                continue
            layers = {name: self.layers[name].made[option] for name, option in reference.items()}
            asked = judge if kind == "window" else judge.light()
            falls = gate_gradients(self.model, layers, asked.batches[:WEIGHED], asked.loss, self.say)
            found = {}
            for name, option in reference.items():
                error = self.layers[name].errors[option].double().clamp_min(LEAST_ERROR)
                found[name] = falls.get(name, torch.zeros_like(error)).cpu() / error.square()  # none: no influence
            # Gradients are noisy: no head is taken to be wholly indifferent.
            least = 0.1 * torch.cat(list(found.values())).clamp_min(0).median().item()
            for name, sensitivity in found.items():
                self.layers[name].sensitivity[kind] = sensitivity.clamp_min(least)
        self.seconds["weighing heads"] = time.monotonic() - began

    def _try_everywhere(self, judge: Judge) -> None:
        """Run each option in all layers that have it: where sums are far off, one of these may be all that keeps.

        A speech encoder loses little by the kernels of single heads, and nearly all by those of several; windows with a
        kernel beside in all of its layers keep it.
        """
        for option in dict.fromkeys(option for layer in self.layers.values() for option in layer.made):
            having = {name: layer for name, layer in self.layers.items() if option in layer.made}
            plans = {name: layer.planned([option] * layer.plan.num_kv_heads) for name, layer in having.items()}
            predicted = sum(layer.damage(option).sum().item() for layer in having.values())
            self.run(Plan([plans.get(x.name, x) for x in self.draft.layers], self.draft.model_type), predicted, judge)

    def choose(self, budget: float) -> tuple[Plan, float]:
        """The cheapest plan whose predicted damage is at most `budget`, and that damage."""
        low, high = 0.0, 1e-6

        def total(price: float) -> float:
            return sum(layer.best(price)[1] for layer in self.layers.values())

        while total(high) < budget and high < 1e30:
            low, high = high, high * 8
        for _ in range(40):
            middle = (low * high) ** 0.5 if low else high / 8
            low, high = (middle, high) if total(middle) <= budget else (low, middle)
            if low and high / low < 1.001:
                break
        return self._at(low)

    def choose_within(self, share: float) -> tuple[Plan, float]:
        """The plan with the least predicted damage that takes at most a share of the memory, and that damage.

        The cheapest there is where none takes so little.
        """
        low, high = -80.0, 80.0  # log2 of the price of a byte
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if self.costs(self._at(2.0**middle)[0])[0] <= share else (middle, high)
        return self._at(2.0**high)

    def _at(self, price: float) -> tuple[Plan, float]:
        """The plan with the least damage + price x cost, and its damage."""
        chosen = {name: layer.best(price) for name, layer in self.layers.items()}
        plans = {name: self.layers[name].planned(options) for name, (options, _) in chosen.items()}
        plan = Plan([plans.get(layer.name, layer) for layer in self.draft.layers], self.draft.model_type)
        return plan, sum(damage for _, damage in chosen.values())

    def build(self, plan: Plan) -> dict[str, LinearAttention]:
        """The layers of a plan, with their maps."""
        device = next(self.model.parameters()).device
        found = {}
        for layer in plan.layers:
            made = self.layers[layer.name].build(layer) if layer.name in self.layers else LinearAttention(layer)
            found[layer.name] = made.to(device)
        return found

    def evaluate(self, budget: float, judge: Judge) -> Candidate:
        """Choose for a budget and run the result end to end."""
        return self.run(*self.choose(budget), judge)

    def run(self, plan: Plan, predicted: float, judge: Judge) -> Candidate:
        """Run a choice end to end, unless that was done."""
        for candidate in self.tried:
            if candidate.plan.to_dict() == plan.to_dict():
                return candidate
        layers = self.build(plan)

        def outputs(batch: dict[str, Tensor]) -> Any:
            return self.output(layers, batch)

        memory, seconds = self.costs(plan)
        candidate = Candidate(plan, predicted, judge.quality(outputs), memory, seconds)
        self.tried.append(candidate)
        cost = f"{memory:.3f} of the memory" if self.goal.minimize == "memory" else f"{seconds:.3f} s of attention"
        self.say(f"kept {candidate.quality.kept:.4f} with {cost}")
        return candidate

    def output(self, layers: dict[str, LinearAttention], batch: dict[str, Tensor]) -> Any:
        """The model's output with some layers in place of its own."""

        def replaced(name: str, call: Call) -> Tensor | None:
            return layers[name](call) if name in layers and not layers[name].plan.untouched else None

        with capture.recording(self.model, replaced):
            return capture.run(self.model, batch)

    def seconds_of(self, plan: LayerPlan) -> float:
        """Of the attention of one layer at the goal's length."""
        if plan.name not in self.layers:
            return 0.0
        layer, options = self.layers[plan.name], options_of(plan)
        return sum(layer.seconds[option] for option in options) / len(options) + layer.extra(options)

    def frontier(self, judge: Judge) -> list[Candidate]:
        """Candidates around the cheapest that keeps the target, cheapest first."""
        began = time.monotonic()
        if self.goal.minimize == "time":
            self._try_everywhere(judge)
        low, high = BUDGETS
        middle: float
        if self.keeps(self.evaluate(2.0**high, judge)):
            low = high
        while high - low > 1:
            middle = round((low + high) / 2)
            low, high = (middle, high) if self.keeps(self.evaluate(2.0**middle, judge)) else (low, middle)
        for _ in range(REFINEMENTS if high > low else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if self.keeps(self.evaluate(2.0**middle, judge)) else (low, middle)
        if not any(map(self.keeps, self.tried)):
            self.evaluate(2.0 ** BUDGETS[0], judge)
        self.seconds["searching"] = time.monotonic() - began
        return sorted(self.tried, key=self.price)

    def keeps(self, candidate: Candidate) -> bool:
        return candidate.quality.kept >= self.goal.keep

    def fits(self, candidate: Candidate) -> bool:
        """Whether it takes no more than the memory that it may take."""
        return self.goal.memory is None or candidate.memory <= self.goal.memory

    def price(self, candidate: Candidate) -> float:
        return candidate.memory if self.goal.minimize == "memory" else candidate.attention_seconds

    def price_of(self, plan: Plan) -> float:
        return self.costs(plan)[0 if self.goal.minimize == "memory" else 1]

    def costs(self, plan: Plan) -> tuple[float, float]:
        """The memory of a plan as a share of the original's, and the seconds of its attention."""
        memory = plan.cache_bytes(self.goal.length) / self.original_bytes if self.original_bytes else 1.0
        return memory, sum(self.seconds_of(layer) for layer in plan.layers)

    def border(self, plan: Plan) -> int:
        """The default of `exact_below`: where the plan is faster; to save memory, where its memory is reached."""
        limit = self.goal.length
        if self.goal.minimize == "memory":
            limit = int(limit * plan.cache_bytes(limit) / max(self.original_bytes, 1))
        return min(crossover(plan), limit)


def _as_it_is(shape: capture.Shape, num_features: int, seed: int) -> LayerPlan:
    reason, limit = shape.obstacle or ("", 0)
    return LayerPlan(
        name=shape.name,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        kinds=["exact"] * shape.num_heads,
        sinks=0 if shape.is_cross else (CAUSAL_SINKS if shape.is_causal else SINKS),
        window_kind="sliding" if shape.is_causal else "block",  # as much memory of a decoder sees more when sliding
        feature_map="landmark",
        num_features=num_features,
        seed=seed,
        is_causal=shape.is_causal,
        is_cross=shape.is_cross,
        reason=reason,
        limit=limit,
    )


def _options(
    plan: LayerPlan, length: int, windows: Sequence[int] | None = None, with_kernels: bool = True
) -> list[Option]:
    """What the heads of a layer may become in sequences of some length, but exact."""
    if plan.is_cross:
        return [Option("kernel")]
    if windows is None:
        sizes = CAUSAL_WINDOWS if plan.is_causal else WINDOWS
        reach = 1 if plan.is_causal else 3  # blocks see their neighbours on both sides
        windows = [w for w in sizes if reach * w <= length // 2] or [sizes[0]]
        windows = windows[-NUM_CAUSAL_WINDOWS:] if plan.is_causal else windows
    found = [Option("window", w) for w in windows]
    if not with_kernels:
        return found
    if plan.is_causal and CAUSAL_HYBRID in windows:
        return [*found, Option("hybrid", CAUSAL_HYBRID)]
    found += [Option("hybrid", w) for w in windows[::-1][::2][::-1]]  # each is a fit: every other is enough
    return found if plan.is_causal else [*found, Option("kernel")]


def _fits(option: Option, plan: LayerPlan, rows: int, longest: int, length: int) -> bool:
    """Whether a map can be fitted to so many rows in sequences of at most `longest` tokens, for some of `length`.

    Rotary positions make far pairs unlike near ones: in sequences much longer than those it was fitted to, a decoder's
    kernel is worse than none.
    """
    far = plan.is_cross or not plan.is_causal or 2 * longest >= length
    return far and rows >= 2 * plan.num_features and longest >= 2 * (option.window or 0)


def options_of(plan: LayerPlan) -> list[Option]:
    """What each key head of a plan is."""
    kinds = plan.kinds[:: plan.group]
    return [Option(kind, plan.window if kind in ("window", "hybrid") else None) for kind in kinds]


def _reference(layer: Layer, kind: str) -> Option | None:
    """The option of a kind along which sensitivities are measured: the second window, or what there is."""
    found = [option for option in layer.made if option.kind == kind]
    return found[min(1, len(found) - 1)] if found else None
