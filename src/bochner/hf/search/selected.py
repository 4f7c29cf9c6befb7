"""The search for the memory of a decoder's cache: how many keys are held, and in how many bits.

Heads are not chosen one by one. The damage of letting a key go has the same unit in every head, so that one threshold
over all keys of all heads is the best choice for a number of keys, and each head gets what it needs; choices of whole
heads need three times the memory for the same quality. What remains is a ladder: thresholds, each a share of the older
keys, and the precision. It is climbed by measured quality, with the same bounds, texts and verification as the search
over heads: a rung is an option of one table, whose predicted damage is that of the keys let go.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bochner._checks import BochnerError
from bochner.hf.attention import LinearAttention
from bochner.hf.calls import Call
from bochner.hf.fates import FateModule, Keys, Mapped, NearHeads
from bochner.hf.interface import attached
from bochner.hf.observe import Shape, recording
from bochner.hf.plan import Plan
from bochner.hf.search import options
from bochner.hf.search.damage import MeasuredProblem
from bochner.hf.search.knapsack import Choice, Table
from bochner.hf.search.options import Say, Space
from bochner.hf.search.texts import Batches, Goal, Split, stream
from bochner.hf.search.verify import TOKENS
from bochner.hf.selected_fit import COARSE, FINE, FittedScores, can_select, fit_scores, passages_of, window_for
from bochner.hf.selected_heads import SelectedHeads
from bochner.maps.base import NoFeatures

SHARES = (0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.27, 0.35, 0.45, 0.6, 0.8)  # of the older keys, the ladder
LEAST, MOST = 0.002, 0.95  # shares
PRECISIONS = (COARSE, FINE)  # the coarsest first
PACKED = 2  # channels in a byte


class Rung(NamedTuple):
    """The share of older keys that are held, and how."""

    share: float
    precision: str


def applies(model: Any, goal: Goal, shapes: dict[str, Shape], data: Batches) -> bool:
    """Whether keys can be selected: decoders whose memory counts, without training."""
    if not (goal.is_language and goal.by_memory) or goal.trains or "selected" not in options.FATES:
        return False
    return "input_ids" in data[0] and can_select(model, shapes, data[0]["input_ids"][:1, :16])


def split_for(model: Any, data: Batches, goal: Goal) -> Split:
    """Tokens for verifying and for choosing, as many as are read; passages from all over the others fit the scores."""
    tokens = stream(data)
    held = min(int(0.4 * len(tokens)), max(goal.length, TOKENS))
    choice = min(int(0.3 * len(tokens)), max(goal.judged, TOKENS // 2))
    first = len(tokens) - held - choice
    passages = [{"input_ids": ids} for ids in passages_of(model, tokens[:first])]
    return Split(passages, tokens[first : first + choice], tokens[first + choice :])


class SelectedSpace(Space):
    """The rungs of a model; option 0 is the original."""

    scores: FittedScores

    def fit(self, data: Sequence[dict[str, Any]], say: Say) -> None:
        passages = [batch["input_ids"] for batch in data]
        self.scores = fit_scores(
            self.model, list(self.layers), passages, window_for(self.goal.judged), length=self.goal.length, say=say
        )
        self.scores.note(self.draft)
        sizes = [size for layer in self.layers.values() for size in (layer.plan.head_dim, layer.plan.value_dim)]
        self.precisions = PRECISIONS if all(size % PACKED == 0 for size in sizes) else PRECISIONS[1:]
        self.rungs = self._ladder()

    def _ladder(self) -> list[Rung]:
        if self.goal.memory is None:
            return [Rung(share, self.precisions[0]) for share in SHARES]
        full = [found for name in self.precisions if (found := self._within(self.goal.memory, name)) is not None]
        if not full:
            least = self.bytes_of(self.plan(Rung(LEAST, self.precisions[0]))) / self.original_bytes
            raise BochnerError(
                f"The 'memory' of Target must be at least {least:.3f} for this model at {self.goal.length:,} tokens, "
                f"got {self.goal.memory!r}: windows and sinks alone take so much."
            )
        # The coarsest holds the most keys. Where it holds all of them, a finer one has room.
        return [full[sum(rung.share >= MOST for rung in full[:-1])]]

    def _within(self, memory: float, precision: str) -> Rung | None:
        """The rung with the most keys within a share of the memory; None if the least are too many."""
        low, high = LEAST, MOST

        def fits(share: float) -> bool:
            return self.bytes_of(self.plan(Rung(share, precision))) <= memory * self.original_bytes

        if not fits(low) or fits(high):
            return Rung(high, precision) if fits(low) else None
        for _ in range(12):
            middle = (low + high) / 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return Rung(low, precision)

    def plan(self, rung: Rung) -> Plan:
        return self.scores.plan(self.draft, rung.share, rung.precision, self.goal.length)

    def plan_of(self, choice: Choice) -> Plan:
        option = choice[0][0]
        return self.plan(self.rungs[option - 1]) if option else self.draft.copy()

    def build(self, plan: Plan) -> dict[str, Any]:
        return dict(self.scores.build(plan, self.device))


def tables(space: SelectedSpace) -> list[Table]:
    """One table of one head: its options are the original and the rungs."""
    damage = [0.0, *(space.scores.damage(rung.share) for rung in space.rungs)]
    size = space.dtype.itemsize
    original = sum(x.plan.cache_bytes(space.goal.length, element_size=size) for x in space.layers.values())
    fixed = space.original_bytes - original
    cost = [float(original), *(float(space.bytes_of(space.plan(rung)) - fixed) for rung in space.rungs)]
    columns = torch.tensor([damage, cost], dtype=torch.float64).unsqueeze(-1)
    return [Table(columns[0], columns[1])]


def nothing(call: Call) -> Tensor:
    return call.query.new_zeros(*call.query.shape[:-1], call.value.shape[-1])


class Silent(FateModule):
    """Heads that attend to nothing."""

    def decode(self, call: Call, state: Any) -> tuple[Tensor, Any]:
        return nothing(call), Keys(call.key, call.value, 0)


def _alone(layer: LinearAttention, kernels: bool) -> LinearAttention:
    """A layer whose heads have their kernels alone, or sinks and windows alone; exact heads stay."""
    made = copy.deepcopy(layer)
    for name, part in made.parts.items():
        if isinstance(part, SelectedHeads):
            part.kept = replace(part.kept, budgets=(0,) * len(part.heads))
        missing = kernels and isinstance(part, SelectedHeads)
        if isinstance(part, NearHeads):
            missing = isinstance(part.phi, NoFeatures) if kernels else part.near is None
            part.phi, part.near = (part.phi, None) if kernels else (NoFeatures(layer.plan.head_dim), part.near)
        if missing:
            made.map_norm[name] = Silent(layer.plan, part.heads)
    return made


def ablations(problem: MeasuredProblem, plan: Plan, layers: dict[str, LinearAttention]) -> dict[str, float]:
    """The quality that a decoder retains on the texts of the choices by parts of the conversion alone."""
    space, texts = problem.space, problem.texts
    has_kernels = any(isinstance(fate, Mapped) for layer in plan.layers for fate in layer.fates)
    found = {}
    for name, kernels in {"windows alone": False, **({"kernels alone": True} if has_kernels else {})}.items():
        problem.say(f"ablation: {name}")
        with attached(space.model, plan, {key: _alone(layer, kernels) for key, layer in layers.items()}):
            found[name] = texts.look(space.model).quality.retained
    problem.say("ablation: no attention")
    with recording(space.model, lambda _, call: nothing(call)):
        found["no attention"] = texts.look(space.model).quality.retained
    return found
