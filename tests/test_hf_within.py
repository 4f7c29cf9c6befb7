"""A target by memory, and training that makes up for what it costs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from bochner.hf.aim import split
from bochner.hf.capture import Shape
from bochner.hf.judge import Quality
from bochner.hf.layer import LinearAttention, all_converted
from bochner.hf.target import EXACT, Goal, Option, Search
from bochner.hf.within import Within
from hf_models import GROUPED, SUPPORTED, TEXT, build, texts_as_batches

from bochner import BochnerError, BochnerWarning, advise, convert, distill, revert
from bochner.hf import cache_bytes, layers_of, plan_of, report_of

LENGTHS = {"length": 800, "judge_length": 200}
SHORT = {"lora": 4, "loss": "model", "end_to_end": 8, "steps": 2}


def llama() -> Any:
    return build("llama", GROUPED, head="AutoModelForCausalLM")


def ids(n: int, seed: int = 0) -> Tensor:
    return torch.randint(4, 50, (n,), generator=torch.Generator().manual_seed(seed))


class Counted:
    """A judge of a made-up model: every exact key head is worth something, and so is every token of the window."""

    WORTH = (0.02, 0.5, 0.01, 0.3)

    def __init__(self) -> None:
        self.batches = [{"input_ids": ids(8)[None]}]

    def quality(self, outputs: Any) -> Quality:
        plan = outputs(self.batches[0])
        lost = sum(w for g, w in enumerate(self.WORTH) if g not in plan.kv_heads_of("exact"))
        return Quality(1 - lost - 0.05 * (plan.window == 8))


def search_of_four(memory: float, monkeypatch: pytest.MonkeyPatch) -> Search:
    """One layer of four key heads with two windows."""
    shapes = {"layer": Shape("layer", 4, 4, 8, 8, True, False)}
    goal = Goal(0.99, "memory", 400, 400, memory=memory, demanded=False)
    search = Search(llama(), shapes, goal, 16, 0, lambda text: None)
    layer = search.layers["layer"]
    for option in (Option("window", 8), Option("window", 32)):
        layer.made[option] = LinearAttention(layer.planned([option] * 4))
        layer.errors[option] = torch.full((4,), 1 / (option.window or 1))
    layer.sensitivity = {"window": torch.tensor(Counted.WORTH).double()}
    layer.seconds = dict.fromkeys([EXACT, *layer.made], 1.0)
    layer.tabulate(goal)
    monkeypatch.setattr(Search, "output", lambda self, layers, batch: layers["layer"].plan)
    return search


@pytest.mark.parametrize(("memory", "heads", "window"), [(0.6, [1, 3], 32), (0.53, [1, 3], 8), (0.3, [1], 8)])
def test_memory_goes_to_the_heads_that_are_worth_most(
    memory: float, heads: list[int], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = search_of_four(memory, monkeypatch)
    Within(search, Counted()).run()  # type: ignore[arg-type]
    best = max(filter(search.fits, search.tried), key=lambda c: c.quality.kept)
    assert best.memory <= memory
    assert best.plan.layers[0].kv_heads_of("exact") == heads
    assert best.plan.layers[0].window == window


def test_sums_within_a_share_take_no_more_and_harm_less_with_more(monkeypatch: pytest.MonkeyPatch) -> None:
    search = search_of_four(0.5, monkeypatch)
    damages = []
    for share in (0.05, 0.1, 0.4, 0.9, 1.0):
        plan, damage = search.choose_within(share)
        assert search.price_of(plan) <= share
        damages.append(damage)
    assert damages == sorted(damages, reverse=True)
    assert damages[-1] == 0.0
    with pytest.raises(BochnerError, match=r"'memory' of convert must be at least 0\.03.*got 0\.01"):
        Within(search_of_four(0.01, monkeypatch), Counted()).run()  # type: ignore[arg-type]


def test_a_model_within_half_of_its_memory() -> None:
    model = convert(llama(), calibration=texts_as_batches(40), memory=0.5, num_features=16, **LENGTHS)
    report = report_of(model).target
    assert report is not None
    assert report.met
    assert report.keep is None
    assert plan_of(model).cache_bytes(800) <= 0.5 * plan_of(model).cache_bytes(800, converted=False)
    assert report.plan.converted
    assert "keep most of the quality with 0.5 of the decoding memory at 800 tokens" in str(report)
    assert f"the model keeps {report.verified.kept:.4f} untrained" in report.reasons[0]
    advice = advise(llama(), texts_as_batches(40), memory=0.5, num_features=(16,), **LENGTHS)
    assert [layer.kinds for layer in advice.plan.layers] == [layer.kinds for layer in report.plan.layers]


def test_what_keeps_too_little_within_the_memory_is_left_alone_unless_it_is_trained() -> None:
    model, data = build("llama", GROUPED, head="AutoModelForCausalLM", std=0.5), texts_as_batches(40)
    goal: dict[str, Any] = {"keep": 0.999999, "memory": 0.2, "num_features": 16, **LENGTHS}
    with pytest.warns(BochnerWarning, match=r"With 0\.2 of the memory 0\.\d+ is the best"):
        convert(model, calibration=data, **goal)
    assert not plan_of(model).converted
    revert(model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.warns(BochnerWarning, match=r"Trained, it keeps 0\.\d+, 0\.999999 was asked for"):
        convert(model, calibration=data, distill=SHORT, exact_below=5000, **goal)
    report = report_of(model)
    assert report.target is not None
    assert report.distillation is not None
    assert plan_of(model).converted
    assert set(report.target.trained) == {200, 400, 800}
    assert {name.split()[0] for head in report.target.heads for name in head.errors} == {"window"}  # no kernels
    assert not report.target.met
    assert "trained" in str(report)
    after = dict(model.named_parameters())
    assert set(before) <= set(after)
    changed = {name.split(".")[-2] for name, p in before.items() if not torch.equal(p, after[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_what_is_told_after_training_is_of_the_converted_model() -> None:
    """Texts are shorter than the border: as the original reads them they would say nothing."""
    found = {}
    for border in (0, 5000):
        model = build("llama", GROUPED, head="AutoModelForCausalLM", std=0.5)
        data = texts_as_batches(40)
        convert(model, calibration=data, memory=0.2, num_features=16, distill=SHORT, exact_below=border, **LENGTHS)
        target = report_of(model).target
        assert target is not None
        found[border] = [target.trained[n].kept for n in (200, 400, 800)]
    assert found[0] == pytest.approx(found[5000], abs=1e-4)
    assert all(abs(kept - 1) > 1e-3 for kept in found[0])


def test_training_leaves_out_what_is_held_back() -> None:
    tokens = torch.arange(4000)
    parts = split([{"input_ids": tokens[None]}], True)
    trained = parts.training(512)
    assert [b["input_ids"].shape for b in trained] == [(1, 512)] * 4
    assert max(b["input_ids"].max().item() for b in trained) < parts.held.min().item()
    for batch in trained:
        row = batch["input_ids"][0]
        assert len(row.unique()) < len(row)  # a passage comes again
    assert len(split([{"input_ids": torch.arange(1400)[None]}], True).training(4000)) == 2  # of 840 tokens
    data = texts_as_batches(12, batch=1)
    parts = split(data, False)
    assert len(parts.training(64)) + len(parts.held) == len(data)


def test_adapters_are_trained_and_become_a_part_of_the_weights() -> None:
    model = convert(llama(), None, window=8, sinks=2, exact_below=0)
    original = copy.deepcopy(model.state_dict())
    asked = [p.requires_grad for p in model.parameters()]
    batches = [{"input_ids": ids(64, i)[None]} for i in range(8)]
    report = distill(model, batches, lora=4, end_to_end=20, end_to_end_lr=1e-2, loss="model")
    assert report.end_to_end is not None
    assert report.end_to_end[1] < report.end_to_end[0]
    now = model.state_dict()
    assert list(now) == list(original)
    assert [p.requires_grad for p in model.parameters()] == asked
    moved = {name.split(".")[-2] for name in now if not torch.equal(now[name], original[name])}
    assert moved == {"q_proj", "k_proj", "v_proj", "o_proj"}
    deltas = [now[n] - original[n] for n in now if "_proj" in n and "mlp" not in n]
    assert all(torch.linalg.matrix_rank(d.double(), rtol=1e-3) <= 4 for d in deltas)
    with torch.no_grad():
        after = sum(model(**b, labels=b["input_ids"]).loss.item() for b in batches[-1:])
    assert after == pytest.approx(report.end_to_end[1], rel=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "bert", "albert"])
def test_adapters_of_every_kind_of_projection(family: str, recwarn: pytest.WarningsRecorder) -> None:
    """Joint projections of GPT-2, which are transposed; an encoder; layers that share one module."""
    model = build(family, SUPPORTED[family])
    convert(model, None, window=8, sinks=1, exact_below=0)
    names, data = list(model.state_dict()), [{"input_ids": ids(48, i)[None]} for i in range(6)]
    report = distill(model, data, lora=2, end_to_end=12, end_to_end_lr=1e-2)
    assert report.end_to_end is not None
    assert report.end_to_end[1] < report.end_to_end[0]
    assert list(model.state_dict()) == names
    assert not [w for w in recwarn if "fan_in_fan_out" in str(w.message)]


def test_training_that_fails_leaves_no_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    model = convert(llama(), None, window=8, sinks=2, exact_below=0)
    original = copy.deepcopy(model.state_dict())

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("bochner.hf.distill._fit_model", stop)
    with pytest.raises(KeyboardInterrupt):
        distill(model, [{"input_ids": ids(64, i)[None]} for i in range(4)], lora=4, loss="model")
    now = model.state_dict()
    assert list(now) == list(original)
    assert all(torch.equal(now[n], original[n]) for n in now)
    assert any(p.requires_grad for p in model.parameters())


@pytest.mark.filterwarnings("ignore:The model has .* positions:bochner.BochnerWarning")
def test_figures_of_distillation_are_of_the_converted_model_below_the_border_too() -> None:
    model = convert(build("bert", TEXT), "positive", 8, exact_below=5000)
    report = distill(model, texts_as_batches(), steps=2, end_to_end=0)
    assert report.quality["relative_error"]["before"] > 1e-3
    assert all(layer.plan.exact_below == 5000 for layer in layers_of(model).values())


def test_a_border_that_is_changed_holds_for_decoding_too() -> None:
    from transformers import DynamicCache

    model = convert(llama(), None, window=8, sinks=2, exact_below=500)
    tokens = ids(60)[None]
    with torch.no_grad(), all_converted(layers_of(model)):
        whole = model(tokens).logits
        cache = DynamicCache(config=model.config)
        model(tokens[:, :50], past_key_values=cache, use_cache=True)
        rest = model(tokens[:, 50:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(rest, whole[:, 50:], atol=1e-4, rtol=1e-4)
    assert cache_bytes(cache) < plan_of(model).cache_bytes(60, converted=False) / 2
    with torch.no_grad():
        assert not torch.allclose(model(tokens).logits, whole, atol=1e-4)


def test_bad_shares_and_adapters() -> None:
    data = texts_as_batches()
    for bad in (0.0, 1.0, True, "half"):
        with pytest.raises(BochnerError, match=r"'memory' of convert must be a share in \(0, 1\)"):
            convert(llama(), calibration=data, memory=bad, **LENGTHS)
    with pytest.raises(BochnerError, match="leave out 'minimize'"):
        convert(llama(), calibration=data, memory=0.5, minimize="time", **LENGTHS)
    with pytest.raises(BochnerError, match=r"memory=0\.5 is the memory of decoding"):
        convert(build("bert", TEXT), calibration=data, memory=0.5)
    with pytest.raises(BochnerError, match="'keep', 'memory'"):
        convert(llama(), window=8, calibration=data, memory=0.5, **LENGTHS)
    model = convert(llama(), None, window=8, sinks=2, exact_below=0)
    with pytest.raises(BochnerError, match="'lora' of distill must be an int >= 0"):  # before the search
        convert(llama(), calibration=[], memory=0.5, distill={"lora": 1.5}, **LENGTHS)
    for options, told in (
        ({"lora": -1}, "'lora' of distill must be an int >= 0"),
        ({"lora": 4, "part": "lm_head"}, "'part' is trained"),
        ({"lora": 4, "end_to_end": 0}, "'end_to_end' is 0"),
    ):
        with pytest.raises(BochnerError, match=told):
            distill(model, data, **options)  # type: ignore[arg-type]


def test_trained_weights_are_no_strangers(recwarn: pytest.WarningsRecorder) -> None:
    """What queries and keys look like is noted again; the length that maps were fitted to stays."""
    data = [{"input_ids": ids(96, i)[None]} for i in range(8)]
    model = convert(llama(), "landmark", 8, window=8, sinks=2, exact_below=0, calibration=data)
    before = {name: dict(layer.plan.seen or {}) for name, layer in layers_of(model).items()}
    with torch.no_grad():  # as training far away would leave them
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.neg_()
            layer.self_attn.k_proj.weight.mul_(3.0)
    distill(model, [{"input_ids": ids(80, i)[None]} for i in range(8)], lora=2, steps=1, end_to_end=1)
    for name, layer in layers_of(model).items():
        assert layer.plan.seen is not None
        assert layer.plan.seen["mean"] != before[name]["mean"]
        assert layer.plan.seen["length"] == before[name]["length"] == 96
    recwarn.clear()
    with torch.no_grad():
        model(data[0]["input_ids"])
    assert not [w for w in recwarn if "unlike the calibration" in str(w.message)]


def test_windows_have_nothing_to_be_strange_to(recwarn: pytest.WarningsRecorder) -> None:
    data = [{"input_ids": ids(96, i)[None]} for i in range(8)]
    model = convert(llama(), None, window=8, sinks=2, exact_below=0, calibration=data)
    for layer in layers_of(model).values():
        layer.plan.seen = {"places": 64, "mean": [100.0] * 8, "spread": [1e-3] * 8, "length": 96}
    with torch.no_grad():
        model(torch.full((1, 96), 7))
    assert not [w for w in recwarn if "unlike the calibration" in str(w.message)]
