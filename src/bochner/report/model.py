"""Pages about a converted model: what a search for a target found, and what a recipe did."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bochner.hf import inputs
from bochner.hf.calibrate import Far, HeadErrors, attention_weights
from bochner.hf.calls import Call
from bochner.hf.config import Calibration, Target
from bochner.hf.distill import all_converted
from bochner.hf.evaluate import Quality
from bochner.hf.interface import layers_of
from bochner.hf.observe import discover, recording, run
from bochner.hf.plan import Plan
from bochner.hf.search import SearchReport
from bochner.hf.search.texts import batches_for, settle
from bochner.hf.search.verify import Verifier
from bochner.report import Number, Report
from bochner.report.charts import frontier_chart
from bochner.report.cost import Times, add_memory, add_speed, memory_number
from bochner.report.viewer import HeadPictures

MOST_TOKENS, MOST_HEADS = 96, 300  # of the text whose attention is shown; heads on one page
GOOD = 0.98  # what a recipe keeps of the quality to be called good


@torch.no_grad()
def head_pictures(
    model: Any, tokenizer: Any, text: str, max_tokens: int = MOST_TOKENS, most_heads: int = MOST_HEADS
) -> HeadPictures:
    """Weights of every head of a converted model on a text, exact and as converted, on the exact model's inputs.

    The weights of linear attention are its outputs for values that are unit vectors. Of a model with more than
    `most_heads` heads some layers are shown, spread evenly from the first to the last, and the caption says so.
    """
    layers = layers_of(model)
    shown = spread(list(layers), [layer.plan.num_heads for layer in layers.values()], most_heads)
    places = {name: i for i, name in enumerate(layers)}
    batch = inputs.batches([text], tokenizer, model=model, max_length=max_tokens)[0]
    numbers: list[int] = []
    found = HeadPictures([], [], [], [], [], layers=numbers)

    def look(name: str, call: Call) -> None:
        if name not in shown or call.query.shape[-2] != call.key.shape[-2]:
            return
        n, g = call.key.shape[-2], call.key.shape[1]
        units = torch.eye(n, dtype=call.value.dtype).expand(1, g, n, n)
        found.exact.append(attention_weights(call, Far.of(call).allowed)[0])
        found.converted.append(layers[name](call._replace(value=units))[0].float())
        found.errors.append(HeadErrors().add(call, layers[name](call)).relative().tolist())
        numbers.append(places[name])

    # The rows of a short text may stay exact, and would show the original twice.
    with all_converted(layers), recording(model, look):
        run(model, batch)
    ids = batch["input_ids"][0].tolist()
    pieces = tokenizer.convert_ids_to_tokens(ids)
    # WordPiece marks what continues a word, byte-level BPE and SentencePiece what begins one.
    starts = [p.startswith(("Ġ", "▁")) for p in pieces]
    marked = any(starts)
    continues = [(not s if marked else p.startswith("##")) for s, p in zip(starts, pieces, strict=True)]
    found.joined = [*continues[1:], False]
    found.tokens = [tokenizer.decode([i]).strip().removeprefix("##") or "·" for i in ids]
    found.caption = f"{len(ids)} tokens of text that was not calibrated on."
    if len(shown) < len(layers):
        heads = sum(layer.plan.num_heads for layer in layers.values())
        found.caption += (
            f" {len(shown)} of {len(layers)} layers are shown: all {heads:,} heads would make the page too large."
        )
    return found


def spread(names: Sequence[str], heads: Sequence[int], most: int) -> list[str]:
    """Names from the first to the last, evenly spread, with at most `most` heads together, at least one.

    >>> spread(["a", "b", "c", "d", "e"], [4] * 5, 12)
    ['a', 'c', 'e']
    """
    if sum(heads) <= most or len(names) < 2:
        return list(names)
    count = max(1, most * len(names) // sum(heads))
    return [names[round(i * (len(names) - 1) / max(1, count - 1))] for i in range(count)]


@dataclass(frozen=True)
class Place:
    """Where a model came from and went to, for the commands that a page offers.

    `name`: the directory or built-in name it was loaded by; `out`: where it was saved, "" if it was not; `text`: the
    file with the user's own text, "" for books; `loader`: the class of transformers that loads it.
    """

    name: str
    out: str = ""
    text: str = ""
    loader: str = "AutoModel"

    @property
    def saved(self) -> str:
        return self.out or f"{self.name.rstrip('/').rpartition('/')[2]}-linear"

    @property
    def options(self) -> str:
        """Options that give the command the same text again."""
        return f" --text {shlex.quote(self.text)}" if self.text else ""

    def convert(self, options: str) -> str:
        return f"bochner convert {shlex.quote(self.name)} {shlex.quote(self.saved)} {options}{self.options}"

    def load(self) -> tuple[str, str]:
        return (
            "Load it anywhere transformers runs.",
            "import transformers\nimport bochner\n\nbochner.hf.register()\n"
            f"model = transformers.{self.loader}.from_pretrained({self.saved!r})\n"
            f"tokenizer = transformers.AutoTokenizer.from_pretrained({self.saved!r})",
        )

    def distill(self) -> tuple[str, str]:
        """Goes on where `load` ends."""
        texts = 'texts = bochner.data.paragraphs("calibration", 48)'
        if self.text:
            texts = f'import pathlib\n\ntexts = pathlib.Path({self.text!r}).read_text(encoding="utf-8").split("\\n\\n")'
        return (
            "If a little more quality matters, distill it, and save it again.",
            f"{texts}\nbochner.distill(model, bochner.Calibration(texts, tokenizer, batch_size=4))\n"
            f"model.save_pretrained({self.saved!r})",
        )


def target_page(
    title: str,
    report: SearchReport,
    *,
    times: Times,
    place: Place,
    pictures: HeadPictures | None = None,
    source: str = "",
) -> Report:
    """What a search for a target found, as a page."""
    page = Report(title)
    plan, length, verdict = report.plan, report.goal.length, report.final
    quality = verdict.quality
    meant = f"of the quality at {verdict.length:,} tokens, {_figures(quality.figures)}"
    timed = f"the original's: the whole model at {verdict.length:,} tokens"
    numbers = [
        Number("kept", f"{quality.retained:.1%}", meant),
        memory_number(plan, length),
        Number("time", _times(verdict.time_share), timed),
    ]
    page.verdict(_target_verdict(report), numbers, good=report.worthwhile and not report.beyond)
    page.steps(_steps(report, place))
    if pictures is not None:
        page.heading("What the heads look at").heads(pictures)
    page.heading("Loss against cost")
    # Candidates may have as many heads of each kind as another: the number tells them apart.
    points = {f"{i}: {c.heads}": c for i, c in enumerate(report.frontier, 1)}
    chosen = list(points)[report.chosen]
    by_memory = any(layer.is_causal for layer in plan.layers)
    costs = (
        {f"memory of the cache at {length:,} tokens, share": [c.memory for c in report.frontier]} if by_memory else {}
    )
    if all(c.attention is not None for c in report.frontier):
        costs[f"time of all attention at {length:,} tokens, share"] = [c.attention or 0.0 for c in report.frontier]
    for label, cost in costs.items():
        lost = [1 - c.quality.retained for c in report.frontier]
        found = dict(zip(points, zip(cost, lost, strict=True), strict=True))
        page.figure(frontier_chart("what is lost, by cost", found, x_label=label, y_label="share lost", chosen=chosen))
    page.text(
        "Every point was measured on the choice texts; the chosen one again on texts that the search never used. They "
        "are numbered in the order of the table under All figures.",
        note=True,
    )
    add_speed(page, times, ["as chosen"], border=_border(plan), positions=report.positions)
    add_memory(page, plan)
    if source:
        page.text(f"Text: {source}.", note=True)
    for reason in report.reasons:
        page.text(reason, note=True)
    return page.code(str(plan), "The plan, head by head").code(str(report), "All figures")


def _target_verdict(report: SearchReport) -> str:
    if not report.worthwhile:
        return "Do not convert it as it is: " + (
            report.reasons[0] if report.reasons else "nothing cheaper keeps the target."
        )
    plan, goal, final = report.plan, report.goal, report.final
    linear = plan.num_heads - plan.count("exact")
    saves = f"its attention takes {report.time_share:.0%} of the time at {goal.length:,} tokens"
    if goal.by_memory:
        saves = f"decoding takes {report.memory:.0%} of the memory at {goal.length:,} tokens"
        if final.time_share > 1:
            saves += f", and {final.time_share:.2f} times the time"
    asked = "" if goal.keep is None else f" (asked: {goal.keep:.1%})"
    keeps = "keeps, trained," if report.trained else "keeps"
    found = (
        f"{linear} of {plan.num_heads} heads can be linear and the model {keeps} {final.quality.retained:.1%} of its "
        f"quality{asked}, verified{_alone(final.quality.figures)} on held-back texts of "
        f"{final.length:,} tokens; {saves}."
    )
    if report.beyond:
        return (
            f"Not at {goal.length:,} tokens as it is: the model has positions for {report.positions:,}. With more of "
            f"them, {found}"
        )
    return f"Convert it: {found}"


class Held:
    """Texts that are not calibrated on, with the original's answers: made before a conversion, asked after it."""

    def __init__(self, model: Any, tokenizer: Any, texts: Sequence[str]) -> None:
        self.count = len(texts)
        data = batches_for(model, Calibration(texts, tokenizer, batch_size=4), Target())
        shapes = discover(model, inputs.first_row(data[0]))
        goal = settle(Target(length=sum(batch["input_ids"].numel() for batch in data)), model, shapes, data)
        held = torch.cat([batch["input_ids"][0] for batch in data]) if goal.is_language else data
        self.verifier = Verifier(model, held, goal, shapes, lambda text: None)
        self.length = self.verifier.length

    def quality(self, model: Any) -> Quality:
        """What the converted model keeps, every row of it converted."""
        with all_converted(layers_of(model)):
            return self.verifier.look(model).quality

    def __str__(self) -> str:
        return f"{self.count} texts, up to {self.length:,} tokens at a time,"


def recipe_page(
    title: str,
    plan: Plan,
    quality: Quality,
    *,
    held: Held,
    times: Times,
    place: Place,
    positions: int | None = None,
    pictures: HeadPictures | None = None,
    source: str = "",
) -> Report:
    """What a conversion by a recipe did to a model, as a page: `quality` was measured on the texts `held` back.

    Speed is stated at the longest of the `times` that the model has `positions` for.
    """
    page = Report(title)
    linear, kept = plan.num_heads - plan.count("exact"), max(0.0, quality.retained)
    length = max((n for n in times if positions is None or n <= positions), default=min(times))
    ratio, border = times[length]["as converted"] / times[length]["exact"], _border(plan)
    speed = f"one layer of attention takes {ratio:.2f} of the time of exact attention at {length:,} tokens"
    if positions is not None and length == positions:
        speed += ", the most it has positions for"
    page.verdict(
        f"{linear} of {plan.num_heads} heads are linear, and the model keeps {kept:.1%} of its quality"
        f"{_alone(quality.figures)} on {held} that it was not calibrated on; {speed}.",
        [
            Number("kept", f"{kept:.1%}", f"of the quality up to {held.length:,} tokens, {_figures(quality.figures)}"),
            memory_number(plan, length),
            Number("time", _times(ratio), f"exact attention's, one layer at {length:,} tokens"),
        ],
        good=quality.retained >= GOOD and bool(linear) and ratio < 1,
    )
    steps = [place.load(), place.distill()]
    if quality.retained < GOOD or not linear:
        steps.insert(0, ("Let a search find what keeps more, head by head.", place.convert("--keep 0.99")))
    page.steps(steps)
    if pictures is not None:
        page.heading("What the heads look at").heads(pictures)
    add_speed(page, times, ["as converted"], border=border, positions=positions)
    add_memory(page, plan)
    if source:
        page.text(f"Calibrated on {source}.", note=True)
    return page.code(str(plan), "The plan, head by head")


def _border(plan: Plan) -> int:
    return max((layer.exact_below for layer in plan.converted), default=0)


def _times(share: float) -> str:
    """Two digits at least.

    >>> _times(0.0263), _times(1.5)
    ('0.026 x', '1.50 x')
    """
    return f"{share:.2f} x" if share >= 0.1 else f"{share:.2g} x"


def _figures(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in figures.items())


def _alone(figures: Mapping[str, float]) -> str:
    return " by cosine alone" if set(figures) == {"cosine"} else ""


def _steps(report: SearchReport, place: Place) -> list[tuple[str, str]]:
    again = f"bochner search {shlex.quote(place.name)} {{}} --length {{}}{place.options}"
    shares, length = {"keep": report.goal.keep, "memory": report.goal.memory}, report.goal.length
    asked = " ".join(f"--{name} {share:g}" for name, share in shares.items() if share is not None)
    if report.beyond:
        ask = ("Ask at a length that the model has positions for.", again.format(asked, report.positions))
        longer = ("Or extend its positions first, by training it on longer texts.", "")
        return [ask, longer]
    if not report.worthwhile:
        less = again.format(f"--keep {max(0.5, (report.goal.keep or 1) - 0.02):.2f}", length)
        return [("Ask for less, or for shorter sequences.", less)]
    done = [place.load(), place.distill()]
    goal = f"{asked} --length {length}"
    return done if place.out else [("Convert it and save it.", place.convert(goal)), *done]
