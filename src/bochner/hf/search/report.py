"""What a search found, for people and for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from bochner.hf.evaluate import Quality
from bochner.hf.plan import Plan
from bochner.hf.search.texts import Goal
from bochner.hf.search.verify import Verdict, Verifier
from bochner.hf.selected_heads import Selected

APPLY = "bochner.convert(model, report.plan)"
MEASURED = {
    "seconds": "{:.3g} s a text",
    "prefill_seconds": "{:.3g} s to read a text",
    "step_seconds": "{:.3g} s a token",
    "cache_bytes": "a cache of {:,.0f} bytes",
}


@dataclass
class Point:
    """One choice that was measured, on the choice texts; a single one on those that verify it.

    `memory`: of decoding at the goal's length, as a share of the original's; `attention`: seconds of all attention
    there, as a share of the original's, None where memory is saved; `damage`: what the search predicted for it.
    """

    plan: Plan
    quality: Quality
    damage: float
    memory: float
    attention: float | None

    @property
    def heads(self) -> str:
        """How many key heads have each fate, and what those hold that select their keys."""
        every = [fate for layer in self.plan.layers for fate in layer.fates]
        shown = ", ".join(f"{n} {name}" for name, n in Counter(fate.name for fate in every).items())
        chosen = [fate for fate in every if isinstance(fate, Selected)]
        if not chosen:
            return shown
        mean = sum(fate.budget for fate in chosen) / len(chosen)
        stored = " and ".join(sorted({fate.precision for fate in chosen}, reverse=True))
        return f"{shown}: {stored}, last {chosen[0].window} and about {mean:.0f} older keys"

    def to_dict(self) -> dict[str, Any]:
        shown = {name: getattr(self, name) for name in ("damage", "memory", "attention", "heads")}
        return {**shown, "quality": self.quality.to_dict(), "lower_bound": self.quality.lower}


@dataclass
class SearchReport:
    """What a search for a target found. `plan` brings the maps that were verified: `convert(model, report.plan)`.

    `frontier`: the choices that were measured, the cheapest first; `chosen`: the place of the plan among them. `met`:
    whether the target is reached. `verified`: the plan on texts that the search never used; `further`: on longer ones;
    `trained`: after distillation, if there was any. `failed`: choices that failed verification before. `ablations`:
    the quality of parts of a plan that selects keys, on the texts of choices. `positions`: the most tokens the model
    has a table of positions for. `training`: the data that distillation may use.
    """

    goal: Goal
    plan: Plan
    frontier: list[Point]
    chosen: int
    met: bool
    verified: Verdict
    failed: list[Verdict] = field(default_factory=list)
    further: dict[int, Verdict] = field(default_factory=dict)
    trained: dict[int, Verdict] = field(default_factory=dict)
    ablations: dict[str, float] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    seconds: float = 0.0
    positions: int | None = None
    training: list[dict[str, Any]] = field(default_factory=list, repr=False)
    verifier: Verifier | None = field(default=None, repr=False, compare=False)

    @property
    def final(self) -> Verdict:
        """The last word on quality: after distillation if there was any."""
        return self.trained.get(self.verified.length, self.verified)

    @property
    def memory(self) -> float:
        """The plan's memory of decoding, as a share of the original's."""
        return self.frontier[self.chosen].memory

    @property
    def time_share(self) -> float:
        """The plan's time of attention at the goal's length, as a share of the original's; 1 where it was not timed."""
        share = self.frontier[self.chosen].attention
        return 1.0 if share is None else share

    @property
    def worthwhile(self) -> bool:
        """Whether the target is met by a model that is not the original."""
        return self.met and bool(self.plan.converted)

    @property
    def beyond(self) -> bool:
        """Whether the model has fewer positions than the goal's length: it cannot read that much."""
        return self.positions is not None and self.goal.length > self.positions

    def verify_again(self, model: Any) -> None:
        """After training, with the model converted: its quality now, on the same validation texts."""
        assert self.verifier is not None
        self.trained = {n: self.verifier.look(model, n) for n in [self.verified.length, *self.further]}
        retained = self.final.quality.retained
        self.met = self.goal.keep is None or retained >= self.goal.keep
        asked = "" if self.goal.keep is None else f", {self.goal.keep:.1%} was asked for"
        self.reasons.insert(0, f"After training the model retains {retained:.2%} of its quality{asked}.")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON and for reports."""
        plain = ("met", "chosen", "ablations", "reasons", "seconds", "positions")
        found: dict[str, Any] = {name: getattr(self, name) for name in plain}
        found |= {"goal": asdict(self.goal), "plan": self.plan.to_dict(), "verified": self.verified.to_dict()}
        found |= {name: [x.to_dict() for x in getattr(self, name)] for name in ("frontier", "failed")}
        for name in ("further", "trained"):
            found[name] = {str(n): verdict.to_dict() for n, verdict in getattr(self, name).items()}
        return found

    def __str__(self) -> str:
        timed = not self.goal.by_memory
        lines = [
            f"Search: {self.goal}",
            f"Choices measured ({'attention time' if timed else 'memory'} as a share of the "
            "original's; > is the plan):",
            f"    quality  lower bound  {'  time' if timed else 'memory'}  key heads",
        ]
        for i, point in enumerate(self.frontier):
            cost, found = point.attention if timed else point.memory, point.quality
            mark = ">" if i == self.chosen else " "
            lines.append(f"{mark}   {found.retained:7.2%}  {found.lower:11.2%}  {cost:6.1%}  {point.heads}")
        lines += [f"A choice failed verification: {verdict}." for verdict in self.failed]
        lines += [f"Verified: {self.verified}."] if self.plan.converted else []
        lines += [f"At {n:,} tokens: {verdict}." for n, verdict in self.further.items()]
        lines += [f"After training: {verdict}." for verdict in self.trained.values()]
        if self.ablations:
            parts = {"as converted": self.frontier[self.chosen].quality.retained, **self.ablations}
            told = ", ".join(f"{name} {share:.2%}" for name, share in parts.items())
            none = "" if "kernels alone" in parts else "; there is no kernel"
            lines.append(f"Ablations, quality retained on the same texts: {told}{none}.")
        for name, whole in self.verified.whole.items() if self.plan.converted else ():
            lines.append(f"{name.capitalize()} model: {', '.join(MEASURED[k].format(x) for k, x in whole.items())}.")
        lines += self.reasons
        lines.append(f"Search time: {self.seconds:.0f} s.")
        if self.plan.converted and not self.trained:
            lines.append(f"Apply it: {APPLY}")
        return "\n".join(lines)
