"""From a target to a plan: one part of the texts is searched on, another verifies the choice, and all is reported."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bochner import theory
from bochner._checks import BochnerError, BochnerWarning, one_of, positive_int
from bochner.hf import capture, inputs
from bochner.hf.judge import RANKED, Judge, Language, Outputs, Quality, Text
from bochner.hf.layer import Call, LinearAttention
from bochner.hf.measure import Far, attention_weights
from bochner.hf.original import Obstacle
from bochner.hf.plan import Fitted, Plan
from bochner.hf.target import EXACT, Candidate, Goal, Option, Say, Search
from bochner.hf.thin import Thinning
from bochner.hf.verify import Trial, length_of, longest, time_of_whole
from bochner.hf.within import Within

FIT_LENGTH = 640  # tokens of the pieces that maps are fitted to, at least
FIT_TOKENS = 4096  # of all pieces, but at least two of them
SHARES = (0.3, 0.6)  # where fitting ends, where choosing ends: the rest is held back
TRAIN_LENGTH = 512  # tokens of the texts that a language model is trained on, at most
UNIT = 0.99  # what is lost is counted in units of what this allows, where no share is asked for
FLOOR_LENGTH = 384  # tokens of the attention matrices whose rank floor is computed
PARTS = ("encoder", "decoder", "cross")


@dataclass
class HeadFigures:
    """One head: what it became, how much it matters, its relative error as each option, and what no map can be below.

    `rank_floor`: the error of the best approximation of rank m of its attention matrix outside the window of the first
    hybrid option, a bound for every feature map with m features; None if it was not asked for.
    """

    layer: str
    head: int
    kind: str
    sensitivity: dict[str, float]
    errors: dict[str, float]
    rank_floor: float | None = None


@dataclass
class TargetReport:
    """What a search for a target found: the frontier, the chosen point, and figures of the whole model.

    `keep`, `memory`: the shares that were asked for. `candidates`: points of the frontier, the cheapest first;
    `chosen`: its place among them. `verified`: figures on the texts held back, at `verified_length` tokens; `further`:
    on texts of more tokens than were judged, up to `length`. `trained`: all of these again after distillation, if there
    was any, and then `met` is by them.
    `whole`: of the original and the converted model, seconds and bytes. `exact_seconds`: of the original's attention at
    `length` tokens, to compare `attention_seconds` of a candidate with. `positions`: the most tokens that the model has
    a table of positions for, None if it has none.
    """

    keep: float | None
    memory: float | None
    minimize: str
    length: int
    plan: Plan
    candidates: list[Candidate]
    chosen: int
    met: bool
    verified: Quality
    verified_length: int
    further: dict[int, Quality]
    whole: dict[str, dict[str, float]]
    heads: list[HeadFigures]
    reasons: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    exact_seconds: float = 0.0
    positions: int | None = None
    trained: dict[int, Quality] = field(default_factory=dict)

    @property
    def beyond(self) -> bool:
        """Whether the model has fewer positions than `length`: it cannot read that much, whatever its attention."""
        return self.positions is not None and self.length > self.positions

    @property
    def final(self) -> Quality:
        """Figures on the texts held back at `verified_length` tokens, after distillation if there was any."""
        return self.trained.get(self.verified_length, self.verified)

    @property
    def goal(self) -> str:
        """What was asked for."""
        if self.memory is None:
            return f"keep {self.keep:g} of the quality at {self.length} tokens with the least {self.minimize}"
        share = "most" if self.keep is None else f"{self.keep:g}"
        return f"keep {share} of the quality with {self.memory:g} of the decoding memory at {self.length} tokens"

    @property
    def time_share(self) -> float:
        """The time of attention as chosen, as a share of the original's; 1 where nothing can be converted."""
        chosen = self.candidates[self.chosen].attention_seconds
        return chosen / self.exact_seconds if self.exact_seconds > 0 else 1.0

    @property
    def config(self) -> dict[str, Any]:
        """Keywords of `convert` that do what was found."""
        return {"plan": self.plan}

    @property
    def worthwhile(self) -> bool:
        """Whether the target is met by a model that is not the original."""
        return self.met and bool(self.plan.converted)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON and for reports."""
        return {
            "keep": self.keep,
            "memory": self.memory,
            "minimize": self.minimize,
            "length": self.length,
            "positions": self.positions,
            "met": self.met,
            "chosen": self.chosen,
            "candidates": [c.to_dict() for c in self.candidates],
            "exact_seconds": self.exact_seconds,
            "verified": {"kept": self.verified.kept, **self.verified.figures, "length": self.verified_length},
            "further": _plain(self.further),
            "trained": _plain(self.trained),
            "whole": self.whole,
            "heads": [asdict(h) for h in self.heads],
            "plan": self.plan.to_dict(),
            "reasons": self.reasons,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        names = list(self.candidates[-1].quality.figures)
        lines = [
            f"target: {self.goal}",
            "    kept  memory  attention s  exact window hybrid kernel  "
            + "  ".join(n.replace("_", " ") for n in names),
        ]
        for i, c in enumerate(self.candidates):
            heads = "  ".join(f"{c.plan.count(k):5d}" for k in ("exact", "window", "hybrid", "kernel"))
            figures = "  ".join(f"{c.quality.figures.get(n, 1.0):{len(n)}.3f}" for n in names)
            mark = ">" if i == self.chosen else " "
            cost = f"{c.memory:6.3f}  {c.attention_seconds:11.3f}"
            lines.append(f"{mark} {c.quality.kept:6.3f}  {cost}  {heads}   {figures}")
        for found, first in (
            ({self.verified_length: self.verified, **self.further}, "verified"),
            (self.trained, "trained"),
        ):
            for i, (n, quality) in enumerate(found.items()):
                told = ", ".join(f"{k.replace('_', ' ')} {x:.4g}" for k, x in quality.figures.items())
                mark = "the same" if i else first
                lines.append(f"{mark} at {n} tokens on texts held back: kept {quality.kept:.4f} ({told})")
        for name, whole in self.whole.items() if self.plan.converted else ():
            lines.append(f"{name}: " + ", ".join(f"{n.replace('_', ' ')} {x:.4g}" for n, x in whole.items()))
        floors = [h.rank_floor for h in self.heads if h.rank_floor is not None]
        if floors:
            over = sum(f > 0.5 for f in floors)
            lines.append(
                f"rank floor of the heads: median {sorted(floors)[len(floors) // 2]:.2f}; no map of this size can "
                f"bring {over} of {len(floors)} below 0.5"
            )
        lines += self.reasons
        if self.plan.converted and not self.trained:
            lines.append("recommended: bochner.convert(model, plan=report.plan)")
        return "\n".join(lines)


@dataclass
class Split:
    """The data in three parts: for fitting maps, for choosing, and held back."""

    fit: list[dict[str, Tensor]]
    choose: Any  # tokens (n,) of a language model, else batches
    held: Any
    is_language: bool
    seen: Any = None  # tokens (n,) of a language model before those held back

    def judge(self, model: Any, goal: Goal) -> Judge:
        if self.is_language:
            return Language(model, self.choose, goal.keep, goal.judged, hasty=goal.memory is None)
        return Outputs(model, self.choose, goal.keep)

    def training(self, judged: int) -> list[dict[str, Tensor]]:
        """What may be trained on: all but what is held back; of a language model texts in which passages come again."""
        if not self.is_language:
            return [*self.fit, *self.choose]
        pieces = self.seen.split(min(TRAIN_LENGTH, judged, len(self.seen) // 2))  # two at least: one tells when to stop
        whole = [piece for piece in pieces if len(piece) == len(pieces[0])]
        return [{"input_ids": Text(piece, i).ids} for i, piece in enumerate(whole)]


def split(
    data: Sequence[dict[str, Tensor]], is_language: bool, most: int | None = None, judged: int = FIT_LENGTH
) -> Split:
    """Split batches. Those of a language model are one stream of tokens.

    Its maps are fitted to pieces as long as the texts it is `judged` by, for those fitted to shorter ones are worse
    than none; `most` is how long they can be.
    """
    if is_language:
        if any("input_ids" not in b for b in data):
            raise BochnerError(
                "A language model is judged by the tokens that it predicts: give texts or 'input_ids' as "
                f"'calibration', got batches of {sorted(data[0])}."
            )
        rows = [row[mask.bool()] for b in data for row, mask in zip(b["input_ids"], _mask(b), strict=True)]
        tokens = torch.cat(rows)
        a, b = (int(share * len(tokens)) for share in SHARES)
        size = max(FIT_LENGTH, min(judged, a // 2))
        pieces = tokens[: min(a, max(FIT_TOKENS, 2 * size))].split(min(size, most or size))
        return Split([{"input_ids": piece[None]} for piece in pieces], tokens[a:b], tokens[b:], True, tokens[:b])
    if len(data) < 3:  # row by row
        data = [{name: t[i : i + 1] for name, t in b.items()} for b in data for i in range(len(next(iter(b.values()))))]
    if len(data) < 3:
        raise BochnerError(
            f"A target needs at least three texts of 'calibration', got {len(data)}: for fitting, for choosing and "
            "for verifying; give more."
        )
    a = max(1, int(SHARES[0] * len(data)))
    b = max(a + 1, int(SHARES[1] * len(data)))
    return Split(list(data[:a]), list(data[a:b]), list(data[b:]), False)


def _mask(batch: dict[str, Tensor]) -> Tensor:
    mask = batch.get("attention_mask")
    return torch.ones_like(batch["input_ids"]) if mask is None else mask


def is_language_model(model: Any, shapes: dict[str, capture.Shape]) -> bool:
    """Whether it predicts the next token and nothing else."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    causal = all(shape.is_causal and not shape.is_cross for shape in shapes.values())
    return head is not None and causal and not getattr(model.config, "is_encoder_decoder", False)


def target_data(
    model: Any, calibration: Any, tokenizer: Any, length: int | None, batch_size: int
) -> list[dict[str, Tensor]]:
    """Calibration for a target: batches as they are; texts whole, for language models one after another, else joined.

    Models that do not predict the next token get texts of `length` tokens, as far as they have positions.
    """
    texts = [calibration] if isinstance(calibration, str) else calibration
    positive_int(batch_size, "batch_size", "calibration")
    if not (isinstance(texts, Sequence) and texts and all(isinstance(t, str) for t in texts)):
        return inputs.batches(calibration, tokenizer, model=model)
    most = inputs.positions(model).get("input_ids", 2**20)
    one_by_one = inputs.tokenized(texts, tokenizer, model, 2**20, 1)
    start = {k: v[:1, :16] for k, v in one_by_one[0].items()}
    if is_language_model(model, capture.discover(model, start)):
        stream = torch.cat([batch["input_ids"][0] for batch in one_by_one])
        return [{"input_ids": piece[None]} for piece in stream.split(min(FIT_LENGTH, most))]
    sizes = [length_of(batch) for batch in one_by_one]
    wanted = min(length or max(sizes), most)
    joined, open_size = [""], 0
    for text, size in zip(texts, sizes, strict=True):
        if open_size >= wanted:
            joined, open_size = [*joined, ""], 0
        joined[-1] = f"{joined[-1]} {text}".strip()
        open_size += size
    size = max(1, min(batch_size, len(joined) // 6))
    return inputs.batches(joined, tokenizer, model=model, max_length=wanted, batch_size=size)


def positions_of(model: Any) -> int | None:
    """The most tokens that a model has a table of positions for; None if it has none, as with rotary ones."""
    return inputs.positions(model).get("input_ids")


def shapes_of(
    model: Any,
    data: Sequence[dict[str, Tensor]],
    unsupported: str = "keep",
    parts: Sequence[str] | None = None,
    owner: str = "convert",
) -> dict[str, capture.Shape]:
    """The attention modules of the model, with an obstacle where they are to stay as they are."""
    one_of(unsupported, "unsupported", owner, ("keep", "raise"))
    shapes = capture.discover(model, inputs.first_row(data[0]) if data else None, unsupported)
    if parts is not None:
        wanted = {one_of(part, "parts", owner, PARTS) for part in ([parts] if isinstance(parts, str) else parts)}
        found = {shape.part for shape in shapes.values()}
        if not wanted & found:
            raise BochnerError(f"The model has no attention among 'parts' {sorted(wanted)}: it has {sorted(found)}.")
        for name, shape in shapes.items():
            if shape.part not in wanted and shape.obstacle is None:
                shapes[name] = shape._replace(obstacle=Obstacle(f"'parts' leaves out {shape.part}"))
    reasons = [shape.obstacle.reason for shape in shapes.values() if shape.obstacle is not None]
    if len(reasons) == len(shapes):
        warnings.warn(
            f"Nothing of this {type(model).__name__} can be converted, it stays as it was: {reasons[0]}.",
            BochnerWarning,
            stacklevel=3,
        )
    return shapes


def goal_of(
    model: Any,
    shapes: dict[str, capture.Shape],
    data: Sequence[dict[str, Tensor]],
    keep: float | None,
    minimize: str | None,
    length: int | None,
    judge_length: int | None = None,
    memory: float | None = None,
    trains: str = "",
    owner: str = "convert",
) -> Goal:
    """The goal, with the defaults that fit the model; a language model's lengths are at most its positions."""
    language = is_language_model(model, shapes)
    asked = (4096 if language else longest(data, shapes)) if length is None else length
    length = positive_int(asked, "length", owner)
    most, trained = inputs.positions(model).get("input_ids"), inputs.trained_positions(model)
    judged = length if judge_length is None else positive_int(judge_length, "judge_length", owner)
    notes = []
    if language and most is not None and length > most:
        length, judged = most, min(judged, most)
        notes.append(f"The model has positions for {most} tokens: all is counted there, not at {asked}.")
    elif "input_ids" in data[0] and most is None and trained is not None and length > trained:
        notes.append(f"The model was made for {trained} tokens: beyond them it may be worse, converted or not.")
    open_shapes = [shape for shape in shapes.values() if shape.obstacle is None]
    by_memory = minimize == "memory" or memory is not None
    if by_memory and open_shapes and not any(s.is_causal and not s.is_cross for s in open_shapes):
        asked_for = "minimize='memory'" if memory is None else f"memory={memory!r}"
        raise BochnerError(
            f"{asked_for} is the memory of decoding, and none of the attention that is to be converted decodes: "
            "use 'keep' with minimize='time'."
        )
    minimize = minimize or ("memory" if language or memory is not None else "time")
    unit = UNIT if keep is None else keep
    return Goal(unit, minimize, length, judged, memory, keep is not None, trains, owner, tuple(notes))


class Found(NamedTuple):
    """What `aim` found: the report, the layers of the chosen plan, and for training what may be trained on."""

    report: TargetReport
    layers: dict[str, LinearAttention]
    trial: Trial
    training: list[dict[str, Tensor]]

    def verify_again(self) -> None:
        """After training, with the model converted: what is kept now, on the same texts held back."""
        report = self.report
        report.trained = self.trial.again(self.layers)
        kept = report.final.kept
        report.met = report.keep is None or kept >= report.keep
        told = f"Trained, it keeps {kept:.4f}"
        if report.keep is not None:
            told += f", {report.keep:g} was asked for"
        report.reasons.insert(0, f"{told}.")


def aim(
    model: Any,
    shapes: dict[str, capture.Shape],
    goal: Goal,
    data: Sequence[dict[str, Tensor]],
    *,
    num_features: int = 64,
    exact_below: int | None = None,
    floors: bool = False,
    seed: int = 0,
    say: Say = lambda text: None,
    **near: Any,
) -> Found:
    """Search, verify and report; the model is as before.

    `floors`: compute the rank floor of every head. `near`: `window`, `sinks`, `window_kind` if they are given.
    """
    began = time.monotonic()
    most = inputs.positions(model).get("input_ids")
    parts = split(data, is_language_model(model, shapes), most, goal.judged)
    search = Search(model, shapes, goal, num_features, seed, say, **near)
    judge = parts.judge(model, goal)
    search.prepare(parts.fit, judge)
    if goal.memory is None:
        search.frontier(judge)
        Thinning(search, judge).run()
    else:
        Within(search, judge).run()
    trial = Trial(model, search, parts.held, parts.is_language, exact_below)
    chosen, layers = trial.settle(judge)
    trial.look_further(chosen, layers)
    candidates = sorted(search.tried, key=search.price)
    assert chosen.verified is not None
    for candidate in candidates:
        candidate.plan.fit_length = length_of(parts.fit[0]) if "input_ids" in parts.fit[0] else 0
    chosen.plan.maps = {name: _fitted(layer) for name, layer in layers.items() if len(layer.map_norm)}
    search.seconds["in all"] = time.monotonic() - began
    report = TargetReport(
        goal.keep if goal.demanded else None, goal.memory, goal.minimize, goal.length,
        chosen.plan, candidates, candidates.index(chosen), not trial.missed,
        chosen.verified, trial.length, trial.further, trial.whole,
        _heads(search, chosen, parts.fit[0] if floors else None), [], search.seconds,
        sum(layer.seconds[EXACT] for layer in search.layers.values()), positions_of(model),
    )  # fmt: skip
    report.reasons = _reasons(report, trial)
    return Found(report, layers, trial, parts.training(goal.judged) if goal.trains else [])


def _plain(found: dict[int, Quality]) -> dict[str, dict[str, float]]:
    return {str(n): {"kept": quality.kept, **quality.figures} for n, quality in found.items()}


def _fitted(layer: LinearAttention) -> Fitted:
    """The maps of a layer as they are now."""
    return Fitted(copy.deepcopy(layer.plan), {k: v.detach().cpu().clone() for k, v in layer.state_dict().items()})


def _heads(search: Search, chosen: Candidate, batch: dict[str, Tensor] | None) -> list[HeadFigures]:
    floors = {} if batch is None else rank_floors(search, batch)
    found = []
    for plan in chosen.plan.layers:
        layer = search.layers.get(plan.name)
        if layer is None or not layer.made:
            continue
        for h in range(plan.num_heads):
            errors = {str(option): e[h].item() for option, e in layer.errors.items()}
            floor = floors[plan.name][h].item() if plan.name in floors else None
            sensitivity = {kind: x[h].item() for kind, x in layer.sensitivity.items()}
            found.append(HeadFigures(plan.name, h, plan.kinds[h], sensitivity, errors, floor))
    return found


def rank_floors(search: Search, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rank floor of every head, (h,), on the first tokens of the first row of a batch."""
    found: dict[str, Tensor] = {}

    def look(name: str, call: Call) -> None:
        layer = search.layers.get(name)
        if layer is None or name in found:
            return
        n = FLOOR_LENGTH
        q, k, v = (t[:1, :, :n] for t in call[:3])
        part = call._replace(query=q, key=k, value=v, padding=None, segments=None)
        window = next((option.window for option in layer.made if option.kind == "hybrid"), None)
        near = {} if window is None else layer.planned([Option("hybrid", window)] * layer.plan.num_kv_heads).near
        far = Far.of(part, **near)
        weights = attention_weights(part, far.allowed)[0]
        m = layer.plan.num_features
        found[name] = torch.stack([theory.rank_floor(w, m, far.far[0, 0]) for w in weights])

    search.say("computing rank floors")
    with capture.recording(search.model, look):
        capture.run(search.model, inputs.first_row(batch))
    return found


def _reasons(report: TargetReport, trial: Trial) -> list[str]:
    """Sentences for people."""
    found = []
    if all(layer.reason for layer in report.plan.layers):
        found.append(f"Nothing can be converted: {report.plan.layers[0].reason}.")
    elif trial.missed or trial.slower:
        found.append(trial.missed or trial.slower)
    elif not report.plan.converted:
        found.append(f"Nothing is converted: at {report.length} tokens the original has the least {report.minimize}.")
    elif report.memory is not None:
        kept, memory = report.verified.kept, report.candidates[report.chosen].memory
        found.append(f"With {memory:.3f} of the decoding memory the model keeps {kept:.4f} untrained.")
    elif report.minimize == "memory":
        found.append(f"The target is met with {report.candidates[report.chosen].memory:.3f} of the decoding memory.")
    else:
        share, whole = f"{report.time_share:.3f} of the time of attention", time_of_whole(report.whole)
        found.append(f"The target is met with {share} at {report.length} tokens.")
        if max(layer.exact_below for layer in report.plan.converted) <= trial.length:  # else it is the original there
            found.append(f"The whole model takes {whole:.2f} of the original's time at {trial.length} tokens.")
    if not trial.is_language and set(report.verified.figures) == {"cosine"}:
        found.append(
            f"Verified by cosine alone: fewer than {RANKED} sequences were held back, too few for rank correlation; "
            "give more texts."
        )
    longest = max([trial.length, *report.further])
    if report.beyond:
        found.append(
            f"The model has positions for {report.positions} tokens: at {report.length} its attention alone was timed."
        )
    readable = min(report.length, report.positions or report.length)
    if longest < readable:
        told = f"The texts held back have {longest} tokens only: give more of them to verify at {readable}."
        found.insert(0 if report.worthwhile else len(found), told)
    worst = min(report.further.items(), key=lambda item: item[1].kept, default=None)
    if worst is not None and worst[1].kept < (report.verified.kept if report.keep is None else report.keep):
        found.append(
            f"What is kept was judged at {trial.length} tokens: at {worst[0]} it is {worst[1].kept:.4f}; name a longer "
            "'judge_length' if your texts are longer."
        )
    found += trial.search.goal.notes
    borders = {layer.exact_below for layer in report.plan.converted} - {0}
    if borders:
        found.append(f"Below {max(borders)} tokens the model is the original, bit by bit.")
    return found
