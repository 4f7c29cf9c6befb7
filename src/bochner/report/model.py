"""Pages about a converted model: what a search for a target found, and what a recipe did."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bochner.hf import inputs
from bochner.hf.calibrate import Far, HeadErrors, attention_weights
from bochner.hf.calls import Call
from bochner.hf.config import Calibration, Target
from bochner.hf.evaluate import Quality
from bochner.hf.interface import layers_of
from bochner.hf.observe import discover, recording, run
from bochner.hf.plan import Plan
from bochner.hf.search import SearchReport
from bochner.hf.search.texts import batches_for, settle
from bochner.hf.search.verify import Verifier
from bochner.report import Number, Report
from bochner.report.cost import Times, add_costs, memory_number
from bochner.report.viewer import HeadPictures

MOST_TOKENS, MOST_HEADS = 96, 300  # of the text whose attention is shown; heads on one page
GOOD = 0.98  # of the quality: what a recipe must retain to be called good
DISTILL = ("If a little more quality matters, convert with --steps 60, which distills the maps.", "")


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

    with recording(model, look):
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
    plan, length, verdict = report.plan, report.goal.length, report.final
    timed = f"of the original's, the whole model at {verdict.length:,} tokens"
    numbers = [
        _quality_number(verdict.quality, verdict.length),
        memory_number(plan, length),
        Number("time", f"{verdict.time_share:.0%}", timed),
    ]
    page = Report(title).verdict(_target_verdict(report), numbers, good=report.worthwhile and not report.beyond)
    page.steps(_steps(report, place))
    if pictures is not None:
        page.heading("What the heads look at").heads(pictures)
    # Candidates may have as many heads of each kind as another: the number tells them apart.
    names = [f"{i}: {c.heads}" for i, c in enumerate(report.frontier, 1)]
    costs: dict[str, list[float]] = {"quality lost": [1 - c.quality.retained for c in report.frontier]}
    if any(layer.is_causal for layer in plan.layers):
        costs["cache"] = [c.memory for c in report.frontier]
    if all(c.attention is not None for c in report.frontier):
        costs["time of all attention"] = [c.attention or 0.0 for c in report.frontier]
    rows = [[name, *(f"{column[i]:.1%}" for column in costs.values())] for i, name in enumerate(names)]
    page.heading("What was measured").table(["choice", *costs], rows, chosen=names[report.chosen])
    page.text(
        f"Costs are shares of the original's at {length:,} tokens. Every choice was measured on one set of texts. The "
        "one that was taken was measured again on validation texts, which the search never used.",
        note=True,
    )
    add_costs(page, plan, times, positions=report.positions, source=source)
    for reason in report.reasons:
        page.text(reason, note=True)
    return page.code(str(plan), "The plan, head by head").code(str(report), "All figures")


def _target_verdict(report: SearchReport) -> str:
    if not report.worthwhile:
        return "Leave it as it is. " + (
            report.reasons[0] if report.reasons else "No cheaper choice reaches the quality target."
        )
    plan, goal, final = report.plan, report.goal, report.final
    saves = f"attention takes {report.time_share:.0%} of the original's time at {goal.length:,} tokens"
    if goal.by_memory:
        saves = f"decoding takes {report.memory:.0%} of the memory at {goal.length:,} tokens"
        if final.time_share > 1:
            saves += f", and {final.time_share:.2f}x the time"
    asked = "" if goal.keep is None else f" (asked: {goal.keep:.1%})"
    found = (
        f"{plan.num_heads - plan.count('exact')} of {plan.num_heads} heads are approximate. "
        f"{'Trained, the' if report.trained else 'The'} model retains {final.quality.retained:.1%} of its quality"
        f"{asked}{_alone(final.quality)} on validation texts of {final.length:,} tokens, and {saves}."
    )
    if report.beyond:
        few = f"the model has positions for {report.positions:,}"
        return f"Not at {goal.length:,} tokens as it is: {few}. With more of them: {found}"
    return f"Convert it. {found}"


class Held:
    """Validation texts of a recipe, with the original's answers: made before a conversion, asked after it."""

    def __init__(self, model: Any, tokenizer: Any, texts: Sequence[str]) -> None:
        data = batches_for(model, Calibration(texts, tokenizer, batch_size=4), Target())
        shapes = discover(model, inputs.first_row(data[0]))
        goal = settle(Target(length=sum(batch["input_ids"].numel() for batch in data)), model, shapes, data)
        held = torch.cat([batch["input_ids"][0] for batch in data]) if goal.is_language else data
        self.count, self.verifier = len(texts), Verifier(model, held, goal, shapes, lambda text: None)

    def quality(self, model: Any) -> Quality:
        """The quality that the converted model retains."""
        return self.verifier.look(model).quality

    def __str__(self) -> str:
        return f"{self.count} validation texts of up to {self.verifier.length:,} tokens"


def recipe_page(
    title: str, plan: Plan, quality: Quality, held: Held, times: Times, place: Place, **shown: Any
) -> Report:
    """What a recipe did to a model, as a page: `quality` was measured on the texts `held`.

    Speed is stated at the longest of the `times` that the model has positions for. `shown`: `positions`, `pictures`
    and `source`, as for `target_page`.
    """
    positions, pictures = shown.get("positions"), shown.get("pictures")
    approximate = plan.num_heads - plan.count("exact")
    length = max((n for n in times if positions is None or n <= positions), default=min(times))
    ratio = times[length]["plan"] / times[length]["exact"]
    page = Report(title).verdict(
        f"{approximate} of {plan.num_heads} heads are approximate. The model retains {quality.retained:.1%} of its "
        f"quality{_alone(quality)} on {held}. One layer of attention takes {ratio:.0%} of the exact time at "
        f"{length:,} tokens.",
        [
            _quality_number(quality, held.verifier.length),
            memory_number(plan, length),
            Number("time", f"{ratio:.0%}", f"of exact attention's, one layer at {length:,} tokens"),
        ],
        good=quality.retained >= GOOD and bool(approximate) and ratio < 1,
    )
    steps = [place.load(), DISTILL] if plan.count("kernel") else [place.load()]  # without a kernel nothing can learn
    if quality.retained < GOOD or not approximate:
        steps.insert(0, ("Let a search choose for every head.", place.convert("--keep 0.99")))
    page.steps(steps)
    if pictures is not None:
        page.heading("What the heads look at").heads(pictures)
    add_costs(page, plan, times, positions=positions, source=shown.get("source", ""))
    return page.code(str(plan), "The plan, head by head")


def _quality_number(quality: Quality, length: int) -> Number:
    figures = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in quality.figures.items())
    told = f"on validation texts of {length:,} tokens: {figures}"
    return Number("quality retained", f"{max(0.0, quality.retained):.1%}", told)


def _alone(quality: Quality) -> str:
    return " by cosine alone" if set(quality.figures) == {"cosine"} else ""


def _steps(report: SearchReport, place: Place) -> list[tuple[str, str]]:
    goal = report.goal
    again = f"bochner search {shlex.quote(place.name)} {{}} --length {{}}{place.options}"
    shares = {"keep": goal.keep, "memory": goal.memory}
    asked = " ".join(f"--{name} {share:g}" for name, share in shares.items() if share is not None)
    if report.beyond:
        ask = ("Ask at a length that the model has positions for.", again.format(asked, report.positions))
        return [ask, ("Or extend its positions first, by training it on longer texts.", "")]
    if not report.worthwhile:
        if goal.keep is None:
            more = f"--memory {min(0.9, 2 * (goal.memory or 0.1)):.2g}"
            return [("Allow more memory.", again.format(more, goal.length))]
        less = again.format(f"--keep {max(0.5, goal.keep - 0.02):.2f}", goal.length)
        return [
            ("Ask for a lower quality.", less),
            ("Or ask for longer sequences, where approximate heads save more.", again.format(asked, 2 * goal.length)),
        ]
    done = [place.load(), DISTILL]
    return done if place.out else [("Convert it and save it.", place.convert(f"{asked} --length {goal.length}")), *done]
