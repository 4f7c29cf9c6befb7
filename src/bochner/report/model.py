"""Pages about a converted model: what a search for a target found, and what a recipe did."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from bochner._timing import best_times
from bochner.hf import capture, io
from bochner.hf.aim import TargetReport, all_converted, is_language_model, target_data
from bochner.hf.cost import random_call
from bochner.hf.judge import Judge, Language, Outputs, Quality
from bochner.hf.layer import Call, LinearAttention, exact
from bochner.hf.measure import Far, HeadErrors, attention_weights
from bochner.hf.plan import LayerPlan, Plan
from bochner.report import Number, Report
from bochner.report.charts import frontier_chart, line_chart
from bochner.report.viewer import HeadPictures

MOST_TOKENS, MOST_HEADS = 96, 300  # of the text whose attention is shown; heads on one page
GOOD = 0.98  # what a recipe keeps of the quality to be called good
MEMORY_LENGTH = 4096  # at which the memory of a recipe is stated
Times = dict[int, dict[str, float]]


@torch.no_grad()
def head_pictures(
    model: Any, tokenizer: Any, text: str, max_tokens: int = MOST_TOKENS, most_heads: int = MOST_HEADS
) -> HeadPictures:
    """Weights of every head of a converted model on a text, exact and as converted, on the exact model's inputs.

    The weights of linear attention are its outputs for values that are unit vectors. Of a model with more than
    `most_heads` heads some layers are shown, spread evenly from the first to the last, and the caption says so.
    """
    layers = io.layers_of(model)
    shown = spread(list(layers), [layer.plan.num_heads for layer in layers.values()], most_heads)
    places = {layer.name: i for i, layer in enumerate(io.plan_of(model).layers)}
    batch = capture.batches([text], tokenizer, max_length=max_tokens)[0]
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

    # A short text lies below the border from which a model is converted, and would show the original twice.
    with all_converted(layers), capture.recording(model, look):
        capture.run(model, batch)
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


@torch.no_grad()
def layer_times(layers: Mapping[str, LayerPlan], lengths: Sequence[int], rounds: int = 3) -> Times:
    """Seconds of one attention layer by exact attention and under each plan, taking turns, at some lengths."""
    made = {name: LinearAttention(plan) for name, plan in layers.items()}
    found: Times = {}
    for n in lengths:
        call = random_call(next(iter(layers.values())), n)
        runs: dict[str, Any] = {"exact": partial(exact, call)}
        runs |= {name: partial(layer, call) for name, layer in made.items()}
        found[n] = best_times(runs, repeats=rounds, budget=1.0, warm_up=False)
    return found


def crossing(times: Times, name: str) -> float | None:
    """The length from which `name` is faster than exact attention, between measured lengths; None if it never is.

    >>> crossing({100: {"exact": 1.0, "a": 2.0}, 200: {"exact": 4.0, "a": 2.0}}, "a")
    141.4213562373095
    >>> crossing({100: {"exact": 1.0, "a": 0.5}}, "a"), crossing({100: {"exact": 1.0, "a": 2.0}}, "a")
    (100.0, None)
    """
    lengths = sorted(times)
    ratios = [math.log(times[n][name] / times[n]["exact"]) for n in lengths]
    if ratios[-1] > 0:
        return None
    last = max((i for i, r in enumerate(ratios) if r > 0), default=-1)
    if last < 0:
        return float(lengths[0])
    share = ratios[last] / (ratios[last] - ratios[last + 1])
    return lengths[last] * (lengths[last + 1] / lengths[last]) ** share


def typical_layer(plan: Plan) -> LayerPlan:
    """The layer whose kinds of heads are the most common in a plan."""
    converted = plan.converted or plan.layers
    return max(converted, key=lambda layer: sum(sorted(layer.kinds) == sorted(other.kinds) for other in converted))


def add_speed(page: Report, times: Times, names: Sequence[str], what: str = "one attention layer") -> float | None:
    """The chart of times against length, with the crossing of the first name; returns the crossing."""
    where = crossing(times, names[0])
    colours = {"exact": 0, names[0]: 1} | {name: 2 + i for i, name in enumerate(names[1:])}
    series = {k: [(n, 1e3 * t[k]) for n, t in sorted(times.items())] for k in ("exact", *names)}
    marks = {} if where is None or where <= min(times) else {f"faster from about {round_length(where):,} tokens": where}
    chart = line_chart(
        f"time of {what}", series, x_label="tokens", y_label="milliseconds", log=True, colours=colours, marks=marks
    )
    page.heading("Speed against length").figure(chart, crossing_sentence(where, times, names[0]))
    return where


def crossing_sentence(where: float | None, times: Times, name: str) -> str:
    low, high = min(times), max(times)
    if where is None:
        return f"Exact attention is faster than {name} at every length measured, up to {high:,} tokens."
    if where <= low:
        return f"{name} is faster at every length measured, from {low:,} tokens on."
    return f"Below about {round_length(where):,} tokens exact attention is faster: keep it there ('exact_below')."


def round_length(value: float) -> int:
    """A length to two digits, as exact as a crossing of measured lines is."""
    step = 10 ** max(0, math.floor(math.log10(max(value, 1))) - 1)
    return int(round(value / step) * step)


def memory_number(plan: Plan, length: int) -> Number:
    """The memory of decoding, as a number of the verdict; encoders keep none."""
    if not any(layer.is_causal for layer in plan.layers):
        return Number("memory", "as before", "an encoder keeps nothing between calls")
    before, after = plan.cache_bytes(length, converted=False), plan.cache_bytes(length)
    return Number(
        "memory",
        f"{after / before:.0%}",
        f"of the cache at {length:,} tokens: {after / 1e6:.1f} of {before / 1e6:.1f} MB",
    )


def add_memory(page: Report, plan: Plan, lengths: Sequence[int] = (512, 1024, 2048, 4096, 8192, 16384, 32768)) -> None:
    """The cache against length, for decoders."""
    if not any(layer.is_causal for layer in plan.layers):
        return
    series = {
        "as it was": [(float(n), plan.cache_bytes(n, converted=False) / 1e6) for n in lengths],
        "converted": [(float(n), plan.cache_bytes(n) / 1e6) for n in lengths],
    }
    chart = line_chart("memory of decoding, one sequence", series, x_label="tokens", y_label="megabytes", log=True)
    page.heading("Memory against length").figure(chart, "All layers, float32, computed from the plan.")


def target_page(
    title: str,
    report: TargetReport,
    *,
    times: Times,
    pictures: HeadPictures | None = None,
    source: str = "",
    place: str = "",
) -> Report:
    """What `advise` and `convert(keep=...)` found, as a page."""
    page = Report(title)
    plan, length, kept = report.plan, report.length, report.verified.kept
    linear = plan.num_heads - plan.count("exact")
    if report.worthwhile:
        sentence = (
            f"Convert it: {linear} of {plan.num_heads} heads can be linear and the model keeps {kept:.1%} of its "
            f"quality "
            f"(asked: {report.keep:.1%}), verified on text that was held back."
        )
    else:
        sentence = "Do not convert it as it is: " + (
            report.reasons[0] if report.reasons else "nothing cheaper keeps the target."
        )
    numbers = [
        Number("kept", f"{kept:.1%}", f"of the quality, {_figures(report.verified.figures)}"),
        memory_number(plan, length),
        Number("time", _times(report.time_share), f"exact attention's, all layers at {length:,} tokens"),
    ]
    page.verdict(sentence, numbers, good=report.worthwhile)
    page.steps(_steps(report, place))
    if pictures is not None:
        page.heading("What the heads look at").heads(pictures)
    page.heading("Loss against cost")
    # Candidates may have as many linear heads as another, and differ in their kinds: the number tells them apart.
    points = {
        f"{i}: {c.plan.num_heads - c.plan.count('exact')} of {c.plan.num_heads} heads linear": c
        for i, c in enumerate(report.candidates, 1)
    }
    chosen = list(points)[report.chosen]
    by_memory = any(layer.is_causal for layer in plan.layers)
    for wanted, label, cost in (
        (by_memory, f"memory of the cache at {length:,} tokens, share", lambda c: c.memory),
        (True, f"seconds of all attention at {length:,} tokens", lambda c: c.attention_seconds),
    ):
        if wanted:
            found = {n: (cost(c), 1 - c.quality.kept) for n, c in points.items()}
            page.figure(
                frontier_chart("what is lost, by cost", found, x_label=label, y_label="share lost", chosen=chosen)
            )
    page.text(
        "Every point was measured on text for choosing; the chosen one again on text held back. They are numbered "
        "in the order of the table under All figures.",
        note=True,
    )
    add_speed(page, times, ["as chosen"])
    add_memory(page, plan)
    if source:
        page.text(f"Text: {source}.", note=True)
    for reason in report.reasons:
        page.text(reason, note=True)
    return page.code(str(plan), "The plan, head by head").code(str(report), "All figures")


class Held:
    """Texts that are not calibrated on, with the original's answers: made before a conversion, asked after it."""

    def __init__(self, model: Any, tokenizer: Any, texts: Sequence[str]) -> None:
        self.count = len(texts)
        data = target_data(model, texts, tokenizer, None, batch_size=4)
        shapes = capture.discover(model, capture.first_row(data[0]))
        self.judge: Judge
        if is_language_model(model, shapes):
            tokens = torch.cat([batch["input_ids"][0] for batch in data])
            self.judge = Language(model, tokens, GOOD, len(tokens))
        else:
            self.judge = Outputs(model, data, GOOD)

    def quality(self, model: Any) -> Quality:
        """What the converted model keeps, at every length."""
        with torch.no_grad(), all_converted(io.layers_of(model)):
            return self.judge.quality(lambda batch: capture.run(model, batch))


def recipe_page(
    title: str,
    plan: Plan,
    quality: Quality,
    *,
    held: int,
    times: Times,
    pictures: HeadPictures | None = None,
    source: str = "",
    place: str = "",
) -> Report:
    """What a conversion by a recipe did to a model, as a page; `held`: how many texts `quality` was measured on."""
    page = Report(title)
    linear = plan.num_heads - plan.count("exact")
    good = quality.kept >= GOOD and bool(linear)
    length = max(times)
    ratio = times[length]["as converted"] / times[length]["exact"]
    page.verdict(
        f"{linear} of {plan.num_heads} heads are linear, and the model keeps {max(0.0, quality.kept):.1%} of its "
        f"quality on {held} texts that it was not calibrated on.",
        [
            Number("kept", f"{max(0.0, quality.kept):.1%}", f"of the quality, {_figures(quality.figures)}"),
            memory_number(plan, MEMORY_LENGTH),
            Number("time", _times(ratio), f"exact attention's, one layer at {length:,} tokens"),
        ],
        good=good,
    )
    steps = [
        (
            "Load it anywhere transformers runs.",
            "import bochner\nbochner.hf.register()\nmodel = AutoModel.from_pretrained('OUT')",
        )
    ]
    if not good:
        steps.insert(
            0,
            (
                "Let a search find what keeps more, head by head.",
                f"bochner convert {place or 'MODEL'} OUT --keep 0.99",
            ),
        )
    page.steps([*steps, ("If a little more quality matters, distill it.", "bochner.distill(model, texts)")])
    if pictures is not None:
        page.heading("What the heads look at").heads(pictures)
    add_speed(page, times, ["as converted"])
    add_memory(page, plan)
    if source:
        page.text(f"Calibrated on {source}.", note=True)
    borders = {layer.exact_below for layer in plan.converted if layer.exact_below}
    if borders:
        page.text(
            f"Below {max(borders):,} tokens the model is the original, bit by bit; what is kept was measured without "
            "that border.",
            note=True,
        )
    return page.code(str(plan), "The plan, head by head")


def _times(share: float) -> str:
    """Two digits at least.

    >>> _times(0.0263), _times(1.5)
    ('0.026 x', '1.50 x')
    """
    return f"{share:.2f} x" if share >= 0.1 else f"{share:.2g} x"


def _figures(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in figures.items())


def _steps(report: TargetReport, place: str) -> list[tuple[str, str]]:
    if not report.worthwhile:
        return [
            (
                "Ask for less, or for shorter sequences.",
                f"bochner advise {place or 'MODEL'} --keep {report.keep - 0.02:.2f}",
            ),
            ("Or distill: a few minutes of training recover much of what is lost.", "bochner.distill(model, texts)"),
        ]
    return [
        (
            "Convert it and save it.",
            f"bochner convert {place or 'MODEL'} OUT --keep {report.keep:g} --length {report.length}",
        ),
        (
            "Load it anywhere transformers runs.",
            "import bochner\nbochner.hf.register()\nmodel = AutoModel.from_pretrained('OUT')",
        ),
        ("If a little more quality matters, distill it.", "bochner.distill(model, texts)"),
    ]
