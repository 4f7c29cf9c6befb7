"""A target instead of a recipe: the search finds what is cheap and harmless, and says what it could not keep."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from bochner.hf.aim import is_language_model, split  # noqa: E402
from bochner.hf.capture import Shape, discover, run  # noqa: E402
from bochner.hf.judge import Language, Outputs, Quality, Text, compare_readings, language_quality, read  # noqa: E402
from bochner.hf.layer import LinearAttention  # noqa: E402
from bochner.hf.target import EXACT, Candidate, Goal, Layer, Option, Search  # noqa: E402
from bochner.hf.thin import Thinning  # noqa: E402
from bochner.hf.verify import Trial, whole_seconds  # noqa: E402
from hf_models import GROUPED, SEQ2SEQ, TEXT, build, texts_as_batches  # noqa: E402

from bochner import BochnerError, BochnerWarning, advise, convert, revert  # noqa: E402
from bochner.hf import plan_of, report_of, unregister  # noqa: E402


def ids(n: int, seed: int = 0) -> Tensor:
    return torch.randint(4, 50, (n,), generator=torch.Generator().manual_seed(seed))


def llama() -> Any:
    return build("llama", GROUPED, head="AutoModelForCausalLM")


def shape(heads: int = 4, kv: int = 2) -> Shape:
    return Shape("layer", heads, kv, 8, 8, True, False)


def searched(model: Any, goal: Goal, errors: dict[Option, Tensor], sensitivity: Tensor) -> Search:
    """A search of one layer with given measurements."""
    search = Search(model, {"layer": shape()}, goal, 16, 0, lambda text: None)
    layer = search.layers["layer"]
    for option in errors:
        layer.made[option] = LinearAttention(layer.planned([option] * 2))
    layer.errors = errors
    layer.sensitivity = dict.fromkeys(("window", "hybrid", "kernel"), sensitivity.double())
    layer.seconds = {EXACT: 1.0, **{option: 0.1 * (i + 1) for i, option in enumerate(errors)}}
    layer.tabulate(goal)
    return search


def test_the_choice_is_the_cheapest_of_all_within_its_budget() -> None:
    """Against all choices there are: a window, and for each of two key heads what it becomes."""
    options = {Option("window", 8): 0.5, Option("hybrid", 8): 0.2, Option("window", 32): 0.3, Option("hybrid", 32): 0.1}
    errors = {o: torch.tensor([e, e / 2, e / 4, e]) for o, e in options.items()}
    goal = Goal(0.9, "memory", 400, 400)
    search = searched(llama(), goal, errors, torch.tensor([1.0, 2.0, 0.1, 0.3]))
    layer: Layer = search.layers["layer"]
    every = []
    for window in (8, 32):
        kinds = [EXACT, Option("window", window), Option("hybrid", window)]
        for a in kinds:
            for b in kinds:
                damage = (layer.damage(a)[0] + layer.damage(b)[1]).item()
                every.append((damage, layer.planned([a, b]).cache_bytes(400)))
    for budget in (0.01, 0.03, 0.1, 0.3, 1.0):
        plan, damage = search.choose(budget)
        assert damage <= budget
        cost = plan.cache_bytes(400)
        # Prices reach the corners of the convex hull: nothing that harms as little costs less than the next corner.
        assert not any(d <= damage + 1e-12 and c < cost for d, c in every)
    assert search.choose(1e-9)[0].count("exact") == 4
    assert search.choose(1e9)[0].count("window") == 4


@pytest.mark.parametrize("split", [0.0, 0.05, 0.3, 5.0])
def test_a_target_of_time_has_one_option_beside_exact_heads(split: float) -> None:
    """Against all choices there are: an option, and which heads are exact beside it, which takes `split` more."""
    errors = {Option("window", 8): torch.tensor([0.1, 0.1, 0.9, 0.9]), Option("kernel"): torch.full((4,), 0.3)}
    search = searched(llama(), Goal(0.9, "time", 400, 400), errors, torch.ones(4))
    layer = search.layers["layer"]
    layer.split = split
    every = []
    for option in errors:
        for heads in ([EXACT, EXACT], [EXACT, option], [option, EXACT], [option, option]):
            damage = sum(layer.damage(o)[g].item() for g, o in enumerate(heads))
            every.append((damage, search.seconds_of(layer.planned(heads)), heads))
    for price in (0.01, 0.1, 0.5, 1.0, 4.0, 100.0):
        chosen, damage = layer.best(price)
        assert len({o for o in chosen if o != EXACT}) <= 1
        total = damage + price * search.seconds_of(layer.planned(chosen))
        assert total == pytest.approx(min(d + price * c for d, c, _ in every))
    kinds = {len(set(layer.best(2.0**e)[0])) for e in range(-10, 10)}
    assert kinds == ({1} if split == 5.0 else {1, 2})  # where it takes too much, layers stay whole


def test_the_quality_of_a_language_model_is_the_least_of_perplexity_and_recall() -> None:
    kept = language_quality(rise=0.01, gain=3.0, again=0.2, now=0.2)
    assert kept.kept == pytest.approx(math.exp(-0.01))
    lost = language_quality(rise=0.0, gain=3.0, again=0.2, now=0.5)
    assert lost.kept == pytest.approx(0.9)
    assert lost.figures["recall"] == pytest.approx(math.exp(0.5))
    never_had = language_quality(rise=0.0, gain=0.1, again=3.0, now=3.5)
    assert never_had.kept == 1.0


@pytest.mark.parametrize("whole", [0, 1024])
def test_the_original_loses_nothing_and_its_loss_is_zero(whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bochner.hf.judge.WHOLE", whole)
    model = llama()
    judge = Language(model, ids(900), 0.9, 600)
    assert judge.quality(lambda batch: run(model, batch)).kept == pytest.approx(1.0, abs=1e-5)
    for i, batch in enumerate(judge.batches):
        assert judge.loss(i, run(model, batch)).item() == pytest.approx(0.0, abs=1e-4)
    encoder = build("bert", TEXT)
    outputs = Outputs(encoder, texts_as_batches(4), 0.9)
    with torch.no_grad():
        assert outputs.quality(lambda batch: encoder(**batch)).kept == pytest.approx(1.0)
        other = build("bert", TEXT, std=0.3)
        assert outputs.quality(lambda batch: other(**batch)).kept < 0.9
        assert outputs.loss(0, other(**outputs.batches[0])) > 1


@pytest.mark.parametrize(("length", "count"), [(100, 1), (512, 1), (1024, 2), (4000, 4)])
def test_a_text_repeats_passages_from_all_over_it_at_its_end(length: int, count: int) -> None:
    tokens = torch.arange(length)
    text = Text(tokens)
    size = min(120, length // 4)
    assert text.ids.shape == (1, length)
    passages = text.again.view(count, size)
    assert all((p.diff() == 1).all() for p in passages)
    assert len(text.body) - passages[-1, -1] > length // 5  # the nearest lies a good part of the text back
    assert all(step > length // 5 for step in passages[:, 0].diff())
    losses = text.ids[0, 1:].float()  # as if the loss of a token were its number
    body, again = text.split(losses)
    assert torch.equal(body, tokens[1 : len(text.body)].float())
    assert torch.equal(again.view(count, -1), passages[:, text.lead :].float())
    assert text.first(losses) == pytest.approx(again.mean().item())
    others = [Text(tokens, turn).starts for turn in range(8)]
    every = sorted({start for starts in others for start in starts})
    assert len(every) == 4  # from all over the text, by turns where there is room for fewer
    assert others[:4] == others[4:]
    assert every[-1] + size <= len(text.body)
    with pytest.raises(BochnerError, match="Too little text"):
        Text(torch.arange(60))


def test_ordinary_text_counts_by_the_rise_where_that_is_less_than_the_divergence() -> None:
    """And by the divergence where the rise is more, or too uncertain."""
    model = llama()
    judge = Language(model, ids(3000), 0.9, 500)
    again = torch.zeros(10)

    def ratio(apart: float, rise: Tensor) -> float:
        return judge._figures([(torch.full((100,), apart), rise, again)]).figures["perplexity_ratio"]

    noise = torch.randn(100, generator=torch.Generator().manual_seed(0))
    noise = (noise - noise.mean()) / noise.std()
    assert ratio(0.05, 0.01 + 0.1 * noise) == pytest.approx(math.exp(0.02), rel=1e-5)  # 0.1 / sqrt(100) is its error
    assert ratio(0.05, 0.01 + 1.0 * noise) == pytest.approx(math.exp(0.05), rel=1e-5)
    assert ratio(0.05, 0.07 + 0.1 * noise) == pytest.approx(math.exp(0.05), rel=1e-5)


def test_a_choice_that_is_far_off_is_not_run_on_all_texts() -> None:
    model, other = llama(), build("llama", GROUPED, head="AutoModelForCausalLM", std=0.5)
    judge = Language(model, ids(3000), 0.99, 500)
    seen = {}
    for name, run_by in (("same", model), ("other", other)):
        asked: list[Any] = []
        quality = judge.quality(lambda batch, by=run_by, asked=asked: asked.append(1) or run(by, batch))  # type: ignore[misc]
        seen[name] = (len(asked), quality.kept)
    assert seen["same"][0] == 6
    assert seen["other"][0] == 2
    assert seen["other"][1] < 0.96


def test_short_texts_are_run_whole_and_several_of_them() -> None:
    """The loss of a choice is the divergence on the body, and what is lost of the gain on the repeats."""
    model, other = llama(), build("llama", GROUPED, head="AutoModelForCausalLM", std=0.3)
    judge = Language(model, ids(2500), 0.7, 500)
    assert [batch["input_ids"].shape for batch in judge.batches] == [(1, 500)] * 5
    assert [judge.turn(step) for step in range(6)] == [0, 1, 2, 3, 4, 0]
    judge.gain = 2.0
    text = judge.texts[2]
    with torch.no_grad():
        now, before = other(text.ids).logits[0, :-1].log_softmax(-1), model(text.ids).logits[0, :-1].log_softmax(-1)
        body, _ = text.split((before.exp() * (before - now)).sum(-1))
        _, again = text.split((before - now).gather(-1, text.ids[0, 1:, None])[:, 0])
        assert again.mean() > 0.01
        wanted = (body.mean() + again.mean() / 2.0) / -math.log(0.7)
        assert judge.loss(2, run(other, judge.batches[2])).item() == pytest.approx(wanted.item(), rel=1e-4)
    quality = judge.quality(lambda batch: run(other, batch))
    assert quality.figures["recall_original"] == pytest.approx(math.exp(judge.again))
    with torch.no_grad():
        true = [
            torch.nn.functional.cross_entropy(other(t.ids).logits[0, :-1], t.ids[0, 1:], reduction="none")
            for t in judge.texts
        ]
    recalled = torch.cat([t.split(losses)[1] for t, losses in zip(judge.texts, true, strict=True)])
    assert quality.figures["recall"] == pytest.approx(recalled.mean().exp().item(), rel=1e-3)


def test_probes_behind_a_cache_take_turns_with_the_one_that_has_repeats() -> None:
    judge = Language(llama(), ids(1500), 0.9, 1200)
    assert [judge.turn(step) for step in range(8)] == [3, 0, 3, 1, 3, 2, 3, 0]


def test_a_probe_is_the_end_of_the_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the cache the original predicts what it predicts in one pass, and a choice what it would on those keys."""
    monkeypatch.setattr("bochner.hf.judge.WHOLE", 0)
    model = llama()
    judge = Language(model, ids(900), 0.9, 600)
    assert len(judge.batches) == 4
    last = judge.batches[-1]
    size = last["input_ids"].shape[1]
    assert torch.equal(last["input_ids"][0], judge.texts[0].ids[0, -size:])
    before = last["past_key_values"].get_seq_length()
    assert before == 600 - size
    with torch.no_grad():
        whole = model(judge.texts[0].ids).logits[:, -size:]
    for _ in range(2):  # the cache of a probe stays as it is
        torch.testing.assert_close(run(model, last).logits, whole, atol=1e-4, rtol=1e-4)
        assert last["past_key_values"].get_seq_length() == before
    light = judge.light()
    assert light.loss(0, run(build("llama", GROUPED, head="AutoModelForCausalLM", std=0.5), light.batches[0])) > 1


def test_reading_in_pieces_gives_the_losses_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bochner.hf.judge.PIECE", 16)
    model, text = llama(), Text(ids(150))
    reading = read(model, text.ids)
    with torch.no_grad():
        logits = model(text.ids, use_cache=False).logits[0, :-1]
    wanted = torch.nn.functional.cross_entropy(logits, text.ids[0, 1:], reduction="none")
    torch.testing.assert_close(reading.losses, wanted, atol=1e-4, rtol=1e-4)
    assert compare_readings([text], [reading], [reading]).kept == 1.0


def test_the_parts_of_the_data_have_nothing_in_common() -> None:
    data = texts_as_batches(10)
    parts = split(data, is_language=True)
    fit = torch.cat([b["input_ids"][0] for b in parts.fit])
    every = torch.cat([b["input_ids"].flatten() for b in data])
    assert torch.equal(torch.cat([fit, parts.choose, parts.held]), every)
    long = [{"input_ids": ids(30_000)[None]}]
    for most, size in ((None, 3000), (1024, 1024)):  # maps are fitted to texts as long as those that judge them
        parts = split(long, is_language=True, most=most, judged=3000)
        assert {b["input_ids"].shape[1] for b in parts.fit[:-1]} == {size}
        assert sum(b["input_ids"].shape[1] for b in parts.fit) == 6000
    parts = split(data, is_language=False)
    assert len(parts.fit) + len(parts.choose) + len(parts.held) == 10
    with pytest.raises(BochnerError, match="three texts"):
        split(data[:1], is_language=False)


def test_a_decoder_meets_its_target_on_texts_that_had_no_part_in_the_search() -> None:
    model = llama()
    convert(model, calibration=texts_as_batches(16), keep=0.9, length=300, num_features=16, exact_below=0)
    report = report_of(model).target
    assert report is not None
    assert report.met
    assert report.verified.kept >= 0.9
    assert report.plan.to_dict()["layers"] == plan_of(model).to_dict()["layers"]
    chosen = report.candidates[report.chosen]
    assert chosen.memory < 0.6
    prices = [c.memory for c in report.candidates]
    assert prices == sorted(prices)
    assert report.whole["converted"]["cache_bytes"] < report.whole["original"]["cache_bytes"]
    told = json.loads(json.dumps(report_of(model).to_dict()))
    assert told["target"]["verified"]["kept"] == report.verified.kept
    assert len(told["target"]["heads"]) == 8
    assert "verified" in str(report)
    with torch.no_grad():
        model(ids(40)[None])
    revert(model)
    with pytest.raises(BochnerError, match="not converted"):
        report_of(model)


def test_what_is_judged_by_short_texts_is_shown_at_the_length_where_it_is_saved() -> None:
    model = llama()
    data = texts_as_batches(40)
    convert(model, calibration=data, keep=0.9, length=800, judge_length=200, num_features=16)
    report = report_of(model).target
    assert report is not None
    assert report.verified_length == 200
    assert set(report.further) == {400, 800}
    assert {layer.window for layer in report.plan.converted} <= {64, None}  # half of what is judged at most
    chosen = report.candidates[report.chosen]
    share = report.plan.cache_bytes(800) / report.plan.cache_bytes(800, converted=False)
    assert chosen.memory == pytest.approx(share)
    assert report.whole["original"]["cache_bytes"] == report.plan.cache_bytes(800, converted=False)
    assert "the same at 800 tokens" in str(report)
    assert report.to_dict()["further"]["800"]["kept"] == report.further[800].kept
    with pytest.raises(BochnerError, match="at most the 'length'"):
        convert(llama(), calibration=data, keep=0.9, length=200, judge_length=800)
    with pytest.raises(BochnerError, match="'keep'"):
        convert(llama(), calibration=data, judge_length=200)


def test_a_loss_at_longer_texts_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from bochner.hf.judge import Quality

    from bochner.hf import verify

    true_compare = verify.Readings.compare

    def worse(self: Any) -> Any:
        quality, figures = true_compare(self)
        return (quality if len(self.texts[0].ids[0]) == 200 else Quality(0.7, quality.figures)), figures

    monkeypatch.setattr(verify.Readings, "compare", worse)
    report = advise(llama(), texts_as_batches(40), keep=0.9, length=800, judge_length=200, num_features=(16,))
    assert report.met
    assert any("at 400 it is 0.7000" in reason for reason in report.reasons)


class Prices:
    """A search whose plans are their prices: a budget of damage 2^e costs 0.5 - 0.05 e."""

    goal, path = Goal(0.99, "memory", 400, 400), list[Any]()

    def __init__(self, *tried: tuple[float, float]) -> None:
        self.tried = [self.candidate(price, kept) for price, kept in tried]

    def candidate(self, price: float, kept: float) -> Candidate:
        return Candidate(price, 0.0, Quality(kept), price, 0.0)  # type: ignore[arg-type]

    def price(self, candidate: Candidate) -> float:
        return candidate.memory

    def price_of(self, plan: float) -> float:
        return plan

    def keeps(self, candidate: Candidate) -> bool:
        return candidate.quality.kept >= 0.99

    def choose(self, budget: float) -> tuple[float, float]:
        return 0.5 - 0.05 * math.log2(budget), budget

    def run(self, plan: float, predicted: float, judge: Any) -> Candidate:
        return self.candidate(plan, 0.995)


def test_after_a_choice_that_failed_comes_one_that_costs_little_more() -> None:
    def after(*tried: tuple[float, float], path: list[float] | None = None, tries: int = 1) -> list[float]:
        trial = Trial.__new__(Trial)
        trial.search = Prices(*tried)  # type: ignore[assignment]
        trial.search.path = path or []  # type: ignore[assignment]
        return [c.memory for c in trial._next(trial.search.tried[0], None, tries)]  # type: ignore[arg-type]

    assert after((0.20, 0.991), (0.205, 0.992), (0.22, 0.993)) == [0.22]  # at least 1.05 times
    (between,) = after((0.20, 0.991), (0.30, 0.993))
    assert 0.21 <= between < 0.23
    assert after((0.20, 0.991), (0.30, 0.990)) != [0.30]  # keeps less than the one that failed
    assert after((0.20, 0.97), path=[0.25, 0.205, 0.215]) == [0.215]
    (by_sums,) = after((0.20, 0.97))
    assert 0.24 <= by_sums < 0.26
    assert after((0.94, 0.991), (1.0, 0.999)) == [1.0]
    assert after((0.96, 0.991)) == []
    assert after((0.97, 0.991), (1.0, 0.999)) == [1.0]  # where nothing costs 1.05 times as much
    (later,) = after((0.20, 0.97), tries=3)
    assert 0.34 <= later < 0.36


def test_where_the_original_is_fastest_nothing_is_converted(tmp_path: Path) -> None:
    """At 64 tokens no window pays; the model stays what it was, and calls its own attention without a detour."""
    model = build("bert", TEXT)
    x, own = ids(64)[None], model.config._attn_implementation
    with torch.no_grad():
        before = model(x)[0]
        convert(model, calibration=texts_as_batches(8), keep=0.98, num_features=16)
        assert torch.equal(model(x)[0], before)
    report = report_of(model).target
    assert report is not None
    assert not report.worthwhile
    assert any("Nothing is converted" in reason for reason in report.reasons)
    assert model.config._attn_implementation == own
    model.save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert again.config._attn_implementation == own
    assert plan_of(again).to_dict() == plan_of(model).to_dict()
    with torch.no_grad():
        assert torch.equal(again(x)[0], before)
    assert revert(model).config._attn_implementation == own


def test_a_model_of_which_nothing_can_be_converted_says_why() -> None:
    settings = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 60}
    data = [{"input_ids": ids(80, i)[None], "decoder_input_ids": ids(9, i)[None]} for i in range(4)]
    with pytest.warns(BochnerWarning, match="Nothing of this"):
        report = advise(build("t5", settings, head="AutoModelForSeq2SeqLM"), data, keep=0.9)
    assert not report.worthwhile
    assert "position_bias" in report.reasons[0]


def test_a_target_that_cannot_be_met_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bochner.hf.target.Search.keeps", lambda self, candidate: False)
    monkeypatch.setattr("bochner.hf.target.Search.choose", lambda self, budget: always(self))
    monkeypatch.setattr("bochner.hf.target.layer_seconds", lambda made, length, rounds: [(1.0, 0.5)] * len(made))

    def always(search: Search) -> Any:
        layers = [search.layers[x.name].planned([Option("kernel")] * x.num_kv_heads) for x in search.draft.layers]
        return type(search.draft)(layers, ""), 9.0

    model = build("bert", TEXT, std=0.4)
    with pytest.warns(BochnerWarning, match="cannot be met"):  # texts below the border are verified as if above it
        convert(model, calibration=texts_as_batches(8), keep=0.999, num_features=8, exact_below=10_000)
    report = report_of(model).target
    assert report is not None
    assert not report.met
    assert not report.plan.converted  # the original keeps what was asked for
    assert report.verified.kept >= 0.999
    best = max(c.verified.kept for c in report.candidates if c.plan.converted and c.verified is not None)
    assert best < 0.999
    assert f"{best:.4f} is the best" in report.reasons[0]


def test_a_target_and_a_recipe_exclude_each_other() -> None:
    data = texts_as_batches(6)
    with pytest.raises(BochnerError, match="leave out"):
        convert(build("bert", TEXT), calibration=data, keep=0.9, window=8)
    with pytest.raises(BochnerError, match="'keep'"):
        convert(build("bert", TEXT), calibration=data, length=128)
    with pytest.raises(BochnerError, match=r"\[0.5, 1\)"):
        convert(build("bert", TEXT), calibration=data, keep=1.5)
    with pytest.raises(BochnerError, match="memory"):
        convert(build("bert", TEXT), calibration=data, keep=0.9, minimize="money")
    with pytest.raises(BochnerError, match="calibration"):
        convert(build("bert", TEXT), keep=0.9)


def test_a_language_model_is_told_from_others() -> None:
    model = llama()
    assert is_language_model(model, discover(model))
    for other in (build("bert", TEXT, head="AutoModelForMaskedLM"), build("llama", GROUPED)):
        assert not is_language_model(other, discover(other))


def test_timing_the_whole_model_leaves_its_border_alone() -> None:
    model = convert(build("bert", TEXT), "positive", 8, exact_below=7)
    from bochner.hf import layers_of

    seconds = whole_seconds(model, layers_of(model), {"input_ids": ids(20)[None]})
    assert set(seconds) == {"original", "converted"}
    assert {layer.exact_below for layer in plan_of(model).layers} == {7}


def test_distillation_reports_through_convert() -> None:
    model = convert(
        build("bert", TEXT), calibration=texts_as_batches(), num_features=16, distill={"steps": 5}, exact_below=0
    )
    report = report_of(model).distillation
    assert report is not None
    assert len(report.layers) == 2
    assert json.dumps(report_of(model).to_dict())


class Counted:
    """A judge of a made-up model, of which every exact key head keeps its share."""

    WORTH = (0.5, 0.3, 0.004, 0.002)

    def __init__(self) -> None:
        self.batches = [{"input_ids": ids(8)[None]}]

    def light(self) -> Counted:
        return self

    def loss(self, index: int, output: Any) -> Tensor:
        return torch.tensor(1 - self._kept(output))

    def quality(self, outputs: Any) -> Any:
        from bochner.hf.judge import Quality

        return Quality(self._kept(outputs(self.batches[0])))

    def _kept(self, exact: list[int]) -> float:
        return 1 - sum(w for g, w in enumerate(self.WORTH) if g not in exact)


def test_exact_heads_that_do_not_matter_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum thinks all four alike; measured one by one, two of them can go and two cannot."""
    search = Search(llama(), {"layer": shape(4, 4)}, Goal(0.99, "memory", 400, 400), 16, 0, lambda text: None)
    layer = search.layers["layer"]
    option = Option("window", 8)
    layer.made[option] = LinearAttention(layer.planned([option] * 4))
    layer.errors, layer.sensitivity = {option: torch.ones(4)}, {"window": torch.ones(4).double()}
    layer.seconds = {EXACT: 1.0, option: 0.5}
    layer.tabulate(search.goal)
    monkeypatch.setattr(Search, "output", lambda self, layers, batch: layers["layer"].plan.kv_heads_of("exact"))
    judge = Counted()
    start = search.run(search.draft, 0.0, judge)
    assert start.quality.kept == 1.0
    end = Thinning(search, judge).polish(start)
    assert end.plan.layers[0].kv_heads_of("exact") == [0, 1]
    assert end.memory < start.memory


def test_a_descent_of_gates_gives_the_cheapest_choice_that_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(llama(), {"layer": shape(4, 4)}, Goal(0.99, "memory", 400, 400), 16, 0, lambda text: None)
    layer = search.layers["layer"]
    for option in (Option("window", 8), Option("window", 32)):
        layer.made[option] = LinearAttention(layer.planned([option] * 4))
        layer.errors[option] = torch.full((4,), 1 / (option.window or 1))
    layer.sensitivity = {"window": torch.ones(4).double()}
    layer.seconds = dict.fromkeys([EXACT, *layer.made], 1.0)
    layer.tabulate(search.goal)
    monkeypatch.setattr(Search, "output", lambda self, layers, batch: layers["layer"].plan.kv_heads_of("exact"))
    calls: list[dict[str, Any]] = []

    def descend(model: Any, layers: Any, start: Any, savings: Any, judge: Any, say: Any) -> list[dict[str, list[int]]]:
        plan = layers["layer"].plan
        calls.append({"start": start["layer"].tolist(), "kinds": plan.kinds, "savings": savings["layer"]})
        return [{"layer": heads} for heads in ([0, 1, 2, 3], [0, 1, 3], [0, 1], [1, 2], [2], [])]

    monkeypatch.setattr("bochner.hf.thin.descend", descend)
    judge = Counted()
    start = search.run(search.draft, 0.0, judge)
    best = Thinning(search, judge).descend(start)
    assert best.plan.layers[0].kv_heads_of("exact") == [0, 1]
    (given,) = calls
    assert given["start"] == [True] * 4
    assert given["kinds"] == ["window"] * 4
    exact_bytes, window_bytes = (
        search.layers["layer"].planned([o] * 4).cache_bytes(400) for o in (EXACT, Option("window", 32))
    )
    assert given["savings"] == pytest.approx((exact_bytes - window_bytes) / 4)


class Widths:
    """A judge of a made-up model of three layers, which loses something by each window that is narrowed."""

    LOSS = (0.004, 0.5, 0.003)

    def __init__(self) -> None:
        self.batches = [{"input_ids": ids(8)[None]}]

    def quality(self, outputs: Any) -> Any:
        from bochner.hf.judge import Quality

        return Quality(1 - sum(x for x, w in zip(self.LOSS, outputs(self.batches[0]), strict=True) if w == 8))


def test_windows_are_narrowed_where_that_loses_least(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {f"layer{i}": shape()._replace(name=f"layer{i}") for i in range(3)}
    search = Search(llama(), shapes, Goal(0.99, "memory", 400, 400), 16, 0, lambda text: None)
    wide, narrow = Option("window", 32), Option("window", 8)
    for i, layer in enumerate(search.layers.values()):
        for option, error in ((narrow, (0.2, 0.9, 0.1)[i]), (wide, 0.05)):
            layer.made[option] = LinearAttention(layer.planned([option] * 2))
            layer.errors[option] = torch.full((4,), error)
        layer.sensitivity = {"window": torch.ones(4).double()}
        layer.seconds = dict.fromkeys([EXACT, *layer.made], 1.0)
        layer.tabulate(search.goal)
    monkeypatch.setattr(Search, "output", lambda self, layers, batch: [x.plan.window for x in layers.values()])
    judge = Widths()
    plan = search.draft.copy()
    plan.layers = [search.layers[x.name].planned([EXACT, wide]) for x in plan.layers]
    start = search.run(plan, 0.0, judge)  # type: ignore[arg-type]
    end = Thinning(search, judge).narrow(start)  # type: ignore[arg-type]
    assert [x.window for x in end.plan.layers] == [8, 32, 8]
    assert all(x.kinds == ["exact", "exact", "window", "window"] for x in end.plan.layers)
    assert end.memory < start.memory


def test_the_encoder_of_a_speech_model_is_advised_alone_at_its_own_length() -> None:
    """Frames are halved before they are attended to, and the decoder's few tokens say nothing of the encoder's."""
    settings = {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 200, "max_target_positions": 20}
    model = build("whisper", settings, head="AutoModelForSpeechSeq2Seq")
    g = torch.Generator().manual_seed(0)
    data = [
        {"input_features": torch.randn(1, 8, 400, generator=g), "decoder_input_ids": ids(7, i)[None]} for i in range(6)
    ]
    unregister()  # advice may be the first thing that is asked for
    report = advise(model, data, num_features=(16,), keep=0.9, parts=["encoder"])
    assert report.length == report.verified_length == 200
    assert {h.layer.split(".")[1] for h in report.heads} == {"encoder"}
    assert {"window 16", "window 32", "hybrid 32", "kernel"} <= set(report.heads[0].errors)
    for layer in report.plan.layers:
        assert bool(layer.reason) == ("decoder" in layer.name)
    search = Search(model, discover(model, data[0]), Goal(0.9, "time", 200, 200), 16, 0, lambda text: None)
    assert {name.split(".")[-1]: layer.length for name, layer in search.layers.items() if "decoder" in name} == {
        "self_attn": 7,
        "encoder_attn": 200,
    }


def test_verification_by_cosine_alone_is_said() -> None:
    for count, alone in ((7, True), (12, False)):
        model = build("bert", TEXT)
        convert(model, calibration=texts_as_batches(count, batch=1), keep=0.5, exact_below=0)
        report = report_of(model).target
        assert report is not None
        assert ("rank_correlation" in report.verified.figures) != alone
        assert ("cosine alone" in str(report)) == alone


def test_encoders_have_no_decoding_memory_to_save() -> None:
    with pytest.raises(BochnerError, match="minimize='time'"):
        convert(build("bert", TEXT), calibration=texts_as_batches(), keep=0.9, minimize="memory")
    bart = build("bart", SEQ2SEQ, head="AutoModelForSeq2SeqLM")
    data = [{**batch, "decoder_input_ids": batch["input_ids"][:, :40]} for batch in texts_as_batches(8)]
    with pytest.raises(BochnerError, match="minimize='time'"):
        convert(bart, calibration=data, keep=0.9, minimize="memory", parts=["encoder"])
    convert(bart, "positive", 8, exact_below=0)
    sizes = {layer.name.split(".")[1]: layer.cache_bytes(1000) for layer in plan_of(bart).layers if not layer.is_cross}
    assert sizes["encoder"] == 0 < sizes["decoder"]
    cross = next(layer for layer in plan_of(bart).layers if layer.is_cross)
    assert cross.cache_bytes(1000) == cross.cache_bytes(1000, converted=False) > 0


class Misjudged:
    """A judge of a made-up model that a kernel destroys, although each of its heads seemed to lose little by it."""

    def __init__(self) -> None:
        self.batches = [{"input_ids": ids(8)[None]}]

    def quality(self, outputs: Any) -> Quality:
        kinds = outputs(self.batches[0])
        return Quality(math.exp(-2.0 * kinds.count("kernel") - 0.001 * kinds.count("window")))


def test_where_sums_are_far_off_an_option_everywhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums prefer kernels, of which any number is too much, for every budget but the least."""
    window, kernel = Option("window", 8), Option("kernel")
    errors = {kernel: torch.full((4,), 1e-3), window: torch.full((4,), 0.5)}
    search = searched(llama(), Goal(0.9, "time", 400, 400), errors, torch.ones(4))
    assert all(search.choose(2.0**e)[0].count("window") == 0 for e in range(-5, 8))
    monkeypatch.setattr(Search, "output", lambda self, layers, batch: layers["layer"].plan.kinds)
    found = search.frontier(Misjudged())  # type: ignore[arg-type]
    kept = [c for c in found if search.keeps(c)]
    assert [c.plan.layers[0].kinds for c in kept] == [["window"] * 4]
