"""The search on tiny transformers: planted redundant heads are found, and a plan is verified once on unused texts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
from hf_models import ENCODERS, GROUPED, build, texts_as_batches

from bochner import convert
from bochner._checks import BochnerError
from bochner.hf import fates
from bochner.hf.calls import Call
from bochner.hf.config import Distillation, Target
from bochner.hf.evaluate import Measure, Quality
from bochner.hf.fates import EXACT, Window
from bochner.hf.interface import attached
from bochner.hf.observe import discover
from bochner.hf.search import damage, options, refine, search, verify
from bochner.hf.search.options import Space
from bochner.hf.search.texts import batches_for, settle, split
from bochner.hf.search.verify import Verdict, Verifier


def ids(n: int, seed: int = 0) -> Tensor:
    return torch.randint(4, 50, (n,), generator=torch.Generator().manual_seed(seed))


def stream(n: int = 2400) -> list[dict[str, Tensor]]:
    return [{"input_ids": piece[None]} for piece in ids(n).split(400)]


def llama(**settings: Any) -> Any:
    return build("llama", {**GROUPED, **settings}, head="AutoModelForCausalLM")


def windows_only(monkeypatch: pytest.MonkeyPatch, *sizes: int) -> None:
    """No maps to fit: the search takes a second."""
    only = [Window(w, 1, "sliding") for w in sizes]
    monkeypatch.setattr(options, "FATES", {"window": fates.Window})
    monkeypatch.setattr(fates.Window, "candidates", classmethod(lambda cls, layer, length: only))


def whole_model_takes(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """The time of the whole converted model is told, not measured."""
    told = {"original": {"seconds": 1.0}, "converted": {"seconds": share}}
    monkeypatch.setattr(Verifier, "_times", lambda self, plan, layers: told)


def planted() -> tuple[Any, list[list[bool]]]:
    """A decoder with one key head in each layer that looks far back and matters; the other has next to nothing to say.

    Queries and keys are the same rotary vectors in every place, so attention falls slowly; the other head's values are
    a thousandth of the first one's, and its relative error is as large.
    """
    model = llama(num_hidden_layers=2)
    needed = [[True, False], [False, True]]
    with torch.no_grad():
        for layer, heads in zip(model.model.layers, needed, strict=True):
            attention = layer.self_attn
            size = attention.head_dim
            attention.q_proj.weight.mul_(0.05)  # diffuse attention: a window loses what lies beyond it
            attention.o_proj.weight.mul_(3)
            for g, matters in enumerate(heads):
                attention.v_proj.weight[g * size : (g + 1) * size] *= 3.0 if matters else 0.003
    return model, needed


def test_planted_redundant_heads_are_converted_and_needed_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all plans within the memory the best, by brute force, is the one that the search finds."""
    windows_only(monkeypatch, 8)
    model, needed = planted()
    space_plan = search(model, Target(memory=0.6, length=200), stream()).plan
    best = {
        name: [EXACT if matters else Window(8, 1, "sliding") for matters in heads]
        for name, heads in zip([x.name for x in space_plan.layers], needed, strict=True)
    }
    quality = {}
    for choice in _every_plan_within(space_plan, 0.6):
        quality[tuple(map(tuple, choice))] = _quality(model, space_plan, choice)
    assert max(quality, key=lambda c: quality[c]) == tuple(map(tuple, best.values()))
    assert [x.fates for x in space_plan.layers] == list(best.values())


def _every_plan_within(plan: Any, share: float) -> list[list[list[Any]]]:
    found = []
    for flat in itertools.product([EXACT, Window(8, 1, "sliding")], repeat=4):
        whole = 4 * EXACT.cache_bytes(plan.layers[0], 200, 4)
        if sum(f.cache_bytes(plan.layers[0], 200, 4) for f in flat) <= share * whole:
            found.append([list(flat[:2]), list(flat[2:])])
    return found


def _quality(model: Any, plan: Any, choice: list[list[Any]]) -> float:
    from bochner.hf.attention import LinearAttention
    from bochner.hf.observe import recording, run

    changed = plan.copy()
    for layer, chosen in zip(changed.layers, choice, strict=True):
        layer.fates = list(chosen)
    layers = {x.name: LinearAttention(x) for x in changed.layers}
    batch = {"input_ids": ids(1200, 5).view(6, 200)}
    truth = run(model, batch).logits.log_softmax(-1)
    with recording(model, lambda name, call: layers[name](call)):
        found = run(model, batch).logits.log_softmax(-1)
    return -(truth.exp() * (truth - found)).sum(-1).mean().item()


class Looked:
    """Verifiers that find what they are told, and the plans that they look at; texts of choices are read as ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *retained: float) -> None:
        self.plans: list[Any] = []
        looked, verify_, look_ = self, Verifier.verify, Verifier.look

        def verify(self: Verifier, plan: Any, layers: Any) -> Verdict:
            looked.plans.append(plan)
            return verify_(self, plan, layers)

        def look(self: Verifier, model: Any, length: int | None = None) -> Verdict:
            if not self.looks:
                return look_(self, model, length)
            found = retained[min(len(looked.plans), len(retained)) - 1]
            return Verdict(Quality({"told": Measure(torch.full((3,), 1 - found))}), self.length)

        monkeypatch.setattr(Verifier, "verify", verify)
        monkeypatch.setattr(Verifier, "look", look)


def test_a_plan_that_passes_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    windows_only(monkeypatch, 64, 128)
    looked = Looked(monkeypatch, 0.99)
    report = search(llama(), Target(keep=0.9, length=300), stream())
    assert len(looked.plans) == 1
    assert report.met
    assert report.verified.quality.retained == pytest.approx(0.99)
    assert report.verified.confidence == pytest.approx(0.9)


def test_a_choice_that_fails_ends_in_a_smaller_conversion_that_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice texts promise everything: the search walks to less damage until what is held back agrees."""
    windows_only(monkeypatch, 16, 64, 128)
    monkeypatch.setattr(damage.MeasuredProblem, "measure", lambda self, choice: _unharmed())
    looked = Looked(monkeypatch, 0.5, 0.7, 0.99)
    report = search(llama(), Target(keep=0.9, length=300), stream())
    assert len(looked.plans) == 3
    sizes = [plan.cache_bytes(300) for plan in looked.plans]
    assert sizes == sorted(set(sizes))
    assert report.met
    assert report.plan.converted
    assert report.plan == looked.plans[-1]
    assert [round(verdict.quality.retained, 2) for verdict in report.failed] == [0.5, 0.7]
    assert report.verified.confidence == pytest.approx(1 - 0.1 / 3)
    assert any("2 of the choices failed" in reason for reason in report.reasons)


def test_a_plan_that_short_texts_judge_is_looked_at_on_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    windows_only(monkeypatch, 64)
    plain = Verifier.look

    def worse(self: Verifier, model: Any, length: int | None = None) -> Verdict:
        found = plain(self, model, length)
        assert length is None or max(len(text.ids[0]) for text, _ in self.readings[length]) == length
        return Verdict(Quality({"told": Measure(torch.full((3,), 0.5))}), length) if length else found

    monkeypatch.setattr(Verifier, "look", worse)
    report = search(llama(), Target(keep=0.9, length=600, judge_length=300), stream())
    assert (report.verified.length, list(report.further)) == (300, [600])
    assert any("at 600 it is 50.00%. Name a longer" in reason for reason in report.reasons)
    report = search(llama(), Target(keep=0.9, length=2000, judge_length=300), stream())
    assert report.verifier is not None
    (longest,) = report.further  # as much as there is
    assert longest == len(report.verifier.held) < 2000
    assert any(f"held back have {longest:,} tokens only" in reason for reason in report.reasons)
    assert not search(llama(), Target(keep=0.9, length=300), stream()).further


def _unharmed() -> Quality:
    return Quality({"told": Measure(torch.zeros(3))})


def test_after_a_failed_look_the_lower_bound_has_to_pass() -> None:
    spread = Quality({"told": Measure(torch.tensor([0.0, 0.05, 0.1]))})  # 95 % in the mean
    assert Verdict(spread, 300).passes(0.94)
    assert not Verdict(spread, 300, confidence=0.95).passes(0.94)
    assert Verdict(spread, 300, confidence=0.95).passes(spread.lower)


def test_a_model_whose_choices_fail_verification_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    windows_only(monkeypatch, 64, 128)
    looked = Looked(monkeypatch, 0.5, 0.6)
    report = search(llama(), Target(keep=0.9, length=300), stream())
    assert 2 <= len(looked.plans) <= 1 + refine.STEPS
    assert not report.met
    assert not report.plan.converted
    assert "stays as it was" in report.reasons[0]
    assert "60.00%" in report.reasons[0]


def _skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Verifier, "verify", lambda self, plan, layers: self.original())


def _first_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Verifier.verify

    def passes(self: Verifier, plan: Any, layers: Any) -> Verdict:
        plain(self, plan, layers)
        return self.original()

    monkeypatch.setattr(Verifier, "verify", passes)


def _all_count_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage relative to the head alone: sensitivities all 1."""
    plain = damage.option_errors

    def blind(*args: Any) -> Any:
        found = plain(*args)
        for error in (e for errors in found.values() for e in errors.values()):
            error.error, error.size = error.squared(), torch.ones_like(error.size)
        return found

    monkeypatch.setattr(damage, "option_errors", blind)


def test_sensitivities_that_are_all_1_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    _all_count_alike(monkeypatch)
    with pytest.raises(AssertionError):
        test_planted_redundant_heads_are_converted_and_needed_ones_are_not(monkeypatch)


@pytest.mark.parametrize("fault", [_skipped, _first_passes], ids=["verification skipped", "the first always passes"])
def test_a_fault_of_verification_is_noticed(fault: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Looked.__init__

    def planted_after(self: Looked, patch: pytest.MonkeyPatch, *retained: float) -> None:
        plain(self, patch, *retained)
        fault(patch)

    monkeypatch.setattr(Looked, "__init__", planted_after)
    with pytest.raises(AssertionError):
        test_a_model_whose_choices_fail_verification_stays_as_it_was(monkeypatch)


def test_verification_reads_texts_that_nothing_else_has_seen() -> None:
    model = llama()
    data, target = stream(), Target(keep=0.9, length=300)
    goal = settle(target, model, discover(model), data)
    parts = split(data, goal)
    tokens = torch.cat([b["input_ids"][0] for b in data])
    fit = torch.cat([b["input_ids"][0] for b in parts.fit])
    assert torch.equal(torch.cat([fit, parts.choice, parts.held]), tokens)
    assert torch.equal(torch.cat([fit, parts.choice]), parts.seen)
    assert min(len(fit), len(parts.choice), len(parts.held)) >= 300
    assert abs(len(parts.choice) - len(parts.held)) <= 1


def test_a_search_chooses_on_one_part_and_verifies_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    windows_only(monkeypatch, 64, 128)
    plain, read = Verifier.__init__, list[Tensor]()

    def noted(self: Verifier, model: Any, held: Tensor, *rest: Any) -> None:
        read.append(held)
        plain(self, model, held, *rest)

    monkeypatch.setattr(Verifier, "__init__", noted)
    model, data, target = llama(), stream(), Target(keep=0.9, length=300)
    parts = split(data, settle(target, model, discover(model), data))
    search(model, target, data)
    assert [torch.equal(a, b[: len(a)]) for a, b in zip(read, (parts.choice, parts.held), strict=True)] == [True, True]


def test_rows_of_batches_are_drawn_for_each_part_and_nothing_is_lost() -> None:
    """As many rows choose as verify, however large the batches are, and texts that come in order of kinds are mixed."""
    model, data = build("bert", ENCODERS["bert"]), texts_as_batches(6, 4, 32)
    for kind, batch in enumerate(data):
        batch["input_ids"][:, 0] = 10 + kind // 2
        batch["input_ids"][:, 1] = torch.arange(4 * kind, 4 * kind + 4)
    parts = split(data, settle(Target(), model, discover(model, data[0]), data))
    rows = [torch.cat([batch["input_ids"] for batch in part]) for part in (parts.fit, parts.choice, parts.held)]
    assert [len(x) for x in rows] == [7, 8, 9]
    every = torch.cat(rows)
    assert torch.equal(every[every[:, 1].argsort()], torch.cat([batch["input_ids"] for batch in data]))
    assert all(len(x[:, 0].unique()) == 3 for x in rows)


def test_a_plan_brings_the_maps_that_were_verified() -> None:
    model, data = llama(), stream()
    report = search(model, Target(memory=0.6, length=300), data)
    assert report.memory <= 0.6
    assert report.plan.has_map if hasattr(report.plan, "has_map") else report.plan.maps
    from bochner.hf.attention import LinearAttention

    layers = {x.name: LinearAttention(x) for x in report.plan.layers}
    for name, fitted in report.plan.maps.items():
        layers[name].load_state_dict(fitted.tensors)
    assert report.verifier is not None
    with attached(model, report.plan, layers):
        again = report.verifier.look(model)
    assert again.quality.retained == pytest.approx(report.verified.quality.retained, abs=1e-5)
    shown = str(report)
    assert "quality retained" in shown
    assert "interval" in shown


def test_the_report_is_saved_beside_the_maps(tmp_path: Path) -> None:
    conversion = convert(llama(), Target(memory=0.6, length=300), stream())
    conversion.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert said == json.loads(json.dumps(conversion.report.to_dict()))
    assert said["verified"]["retained"] == pytest.approx(conversion.report.verified.quality.retained)
    again = convert(llama(), tmp_path)
    assert again.report is None
    assert again.plan == conversion.plan


def test_memory_counts_the_bytes_of_the_models_own_precision() -> None:
    """A half-precision model holds half as much: sums of kernels stay in float32 and weigh double."""
    data, target = stream(), Target(keep=0.9, length=300)
    shares = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = llama().to(dtype)
        shapes = discover(model)
        space = Space(model, shapes, settle(target, model, shapes, data))
        layer = next(iter(space.layers.values()))
        layer.made = dict.fromkeys([Window(16, 1), fates.Hybrid(16, 1, feature_map="positive", num_features=64)])
        space.price(lambda text: None)
        shares[dtype] = [layer.cost[fate] / layer.cost[EXACT] for fate in layer.fates]
    assert shares[torch.bfloat16][1] == shares[torch.float32][1]
    assert shares[torch.bfloat16][2] > shares[torch.float32][2]


def test_too_little_memory_is_refused_with_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    windows_only(monkeypatch, 64)
    with pytest.raises(BochnerError, match=r"must be at least 0\.2"):
        search(llama(), Target(memory=0.05, length=300), stream())
    with pytest.raises(BochnerError, match="none of the attention"):
        search(build("bert", ENCODERS["bert"]), Target(memory=0.5), texts_as_batches(6, 2, 64))


def test_measured_seconds_are_those_of_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[Any, float] = {}

    def seconds(layers: Any, plan: Any, length: int, device: Any, dtype: Any) -> dict[Any, float]:
        told.update({"exact": 4.0, **{name: 1.0 + 0.1 * i for i, name in enumerate(layers)}, "mixed": 9.0})
        return dict(told)

    monkeypatch.setattr(options, "layer_seconds", seconds)
    monkeypatch.setattr(fates.NearHeads, "fit", lambda self, samples: None)
    model, data = build("bert", ENCODERS["bert"]), texts_as_batches(6, 2, 128)
    shapes = discover(model, data[0])
    space = Space(model, shapes, settle(Target(keep=0.9), model, shapes, data))
    space.fit(data, lambda text: None)
    for layer in space.layers.values():
        heads = layer.plan.num_kv_heads
        assert len(layer.made) > 2
        assert heads * layer.cost[EXACT] == pytest.approx(4.0)
        assert all(heads * layer.cost[fate] == pytest.approx(told[fate]) for fate in layer.made)
        beside = layer.fates[len(layer.fates) // 2]  # the mixture has one exact head among these
        assert layer.split == pytest.approx(9.0 - layer.cost[EXACT] - (heads - 1) * layer.cost[beside])


def test_a_choice_of_some_heads_has_the_maps_that_were_fitted_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(layers: Any, plan: Any, length: int, device: Any, dtype: Any) -> dict[Any, float]:
        return {"exact": 4.0, **dict.fromkeys(layers, 1.0)}

    monkeypatch.setattr(options, "layer_seconds", seconds)
    model, data = build("bert", ENCODERS["bert"]), texts_as_batches(6, 2, 128)
    shapes = discover(model, data[0])
    space = Space(model, shapes, settle(Target(keep=0.9), model, shapes, data))
    space.fit(data, lambda text: None)
    option = {name: next(i for i, f in enumerate(x.fates) if f.has_map) for name, x in space.layers.items()}
    choice = tuple((0, *[option[n]] * (x.plan.num_kv_heads - 1)) for n, x in space.layers.items())
    g = torch.Generator().manual_seed(0)
    for name, built in space.build(space.plan_of(choice)).items():
        layer = space.layers[name]
        q, k, v = (torch.randn(1, layer.plan.num_heads, 40, layer.plan.head_dim, generator=g) for _ in range(3))
        call = Call(q, k, v, False, None, 0.3)
        fitted = layer.made[layer.fates[option[name]]]
        torch.testing.assert_close(built(call)[:, 1:], fitted(call)[:, 1:])


def test_an_encoder_is_searched_by_measured_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an option is cheaper and keeps, it is taken; all heads of a layer that change share it."""
    told = {"exact": 4.0, "mixed": 4.0}

    def seconds(layers: Any, plan: Any, length: int, device: Any, dtype: Any) -> dict[str, float]:
        return {"exact": told["exact"], **{name: told.get(name, 1.0 + 0.1 * i) for i, name in enumerate(layers)}}

    monkeypatch.setattr(options, "layer_seconds", seconds)
    whole_model_takes(monkeypatch, 0.5)
    model = build("bert", ENCODERS["bert"], std=0.05)
    report = search(model, Target(keep=0.8), texts_as_batches(6, 2, 128))
    assert report.met
    assert report.plan.converted
    assert report.time_share < 1
    for layer in report.plan.converted:
        assert len(set(layer.fates) - {EXACT}) == 1


def test_maps_that_take_longer_than_exact_attention_are_not_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = []

    def seconds(layers: Any, plan: Any, length: int, device: Any, dtype: Any) -> dict[str, float]:
        return {"exact": 4.0, **{name: 5.0 if repr(name).startswith("Hybrid") else 1.0 for name in layers}}

    monkeypatch.setattr(options, "layer_seconds", seconds)
    monkeypatch.setattr(fates.NearHeads, "fit", lambda self, samples: fitted.append(type(self.phi).__name__))
    whole_model_takes(monkeypatch, 0.5)
    report = search(build("bert", ENCODERS["bert"], std=0.05), Target(keep=0.8), texts_as_batches(6, 2, 128))
    assert {*fitted} == {"NoFeatures", "LandmarkFeatures"}
    assert fitted.count("LandmarkFeatures") == 2  # the kernel alone of each layer, and no hybrid
    assert all(x.name in ("exact", "window", "kernel") for layer in report.plan.layers for x in layer.fates)


def test_a_model_that_is_slower_as_a_whole_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(layers: Any, plan: Any, length: int, device: Any, dtype: Any) -> dict[str, float]:
        return {"exact": 4.0, **dict.fromkeys(layers, 1.0)}

    monkeypatch.setattr(options, "layer_seconds", seconds)
    whole_model_takes(monkeypatch, 1.5)
    report = search(build("bert", ENCODERS["bert"], std=0.05), Target(keep=0.8), texts_as_batches(6, 2, 128))
    assert not report.plan.converted
    assert any("whole model takes 150%" in reason for reason in report.reasons)
    assert report.verifier is not None
    assert report.verifier.looks == 1  # what is nearer to the original is no faster


def test_after_training_the_same_texts_tell_what_was_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    windows_only(monkeypatch, 64)
    model, target = llama(), Target(memory=0.6, keep=0.95, length=300, train=Distillation(steps=1))
    report = search(model, target, stream())
    assert report.training
    layers = {x.name: verify.LinearAttention(x) for x in report.plan.layers}
    with attached(model, report.plan, layers):
        report.verify_again(model)
    assert report.final.quality.retained == pytest.approx(report.verified.quality.retained, abs=1e-5)
    assert report.reasons[0].startswith("After training")


def test_texts_of_encoders_are_joined_to_the_length_asked_for() -> None:
    data = texts_as_batches(2, 2, 32)
    model = build("bert", ENCODERS["bert"])
    from bochner.hf.config import Calibration

    assert len(batches_for(model, Calibration(data), Target())) == 2
    goal = settle(Target(), model, discover(model, data[0]), data)
    assert (goal.minimize, goal.length) == ("time", 32)
    assert len(split(data, goal).fit) == 1  # row by row
    with pytest.raises(BochnerError, match="at least three"):
        split(data[:1], goal)
