"""Attention transfer lowers the error of every layer, keeps the best state, stops, resumes, touches nothing else."""

from __future__ import annotations

import importlib
import itertools
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_models import GROUPED, TEXT, build, inputs, texts_as_batches  # noqa: E402

from bochner import BochnerError, Conversion, Distillation, Recipe, Target, convert, distill, revert  # noqa: E402
from bochner.hf import layers_of, trainable_maps_  # noqa: E402
from bochner.hf.fates import EXACT  # noqa: E402
from bochner.hf.observe import recording  # noqa: E402


def student(feature_map: str = "calibrated", family: str = "bert", **options: Any) -> Any:
    head = "AutoModel" if family == "bert" else "AutoModelForCausalLM"
    model = build(family, TEXT if family == "bert" else GROUPED, head=head)
    return convert(model, Recipe(feature_map, num_features=16, **options), texts_as_batches()).model


def mean_error(model: Any) -> float:
    return torch.stack(list(Conversion.of(model).errors(texts_as_batches(2, seed=7)).values())).mean().item()


@pytest.mark.parametrize("feature_map", ["calibrated", "hedgehog", "positive"])
def test_transfer_lowers_the_error_on_other_data(feature_map: str) -> None:
    model = student(feature_map)
    before = mean_error(model)
    report = distill(model, texts_as_batches(8), Distillation(steps=30, rate=2e-2))
    assert len(report.layers) == 2
    assert all(layer.after < 0.9 * layer.before for layer in report.layers)
    assert mean_error(model) < 0.9 * before
    assert "mean" in str(report)


def test_a_causal_windowed_model_is_distilled_too() -> None:
    model = student(family="llama", window=6, sinks=1)
    report = distill(model, texts_as_batches(6), Distillation(steps=20, rate=2e-2))
    assert all(layer.after < layer.before for layer in report.layers)


def test_only_the_maps_change_and_revert_gives_the_original_back() -> None:
    model = build("bert", TEXT)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    x = inputs(model)
    with torch.no_grad():
        before = model(**x)[0]
    convert(model, Recipe(num_features=16), texts_as_batches())
    distill(model, texts_as_batches(4), Distillation(steps=5, end_to_end=4))
    assert all(torch.equal(model.state_dict()[k], v) for k, v in weights.items())
    assert not any(p.requires_grad for layer in layers_of(model).values() for p in layer.parameters())
    assert all(p.requires_grad for k, p in model.named_parameters() if "linear_attn" not in k)
    revert(model)
    with torch.no_grad():
        assert torch.equal(model(**x)[0], before)


def test_a_step_too_far_keeps_the_best_state() -> None:
    model = student()
    report = distill(model, texts_as_batches(4), Distillation(steps=10, rate=10.0))
    assert all(layer.after <= layer.before for layer in report.layers)


def test_a_stage_without_progress_in_any_layer_stops_early() -> None:
    report = distill(student(), texts_as_batches(4), Distillation(steps=200, rate=10.0, end_to_end=0))
    assert report.steps < 200


def test_each_layer_is_trained_as_if_alone() -> None:
    how = Distillation(steps=20, rate=2e-2, end_to_end=0)
    both = Conversion.of(student())
    alone = both.plan
    alone.layers[1].fates = [EXACT] * alone.layers[1].num_kv_heads
    single = convert(build("bert", TEXT), alone)
    reports = [distill(x.model, texts_as_batches(8), how) for x in (both, single)]
    assert [len(r.layers) for r in reports] == [2, 1]
    assert reports[0].layers[0].after == pytest.approx(reports[1].layers[0].after, rel=1e-6)
    first, second = (next(iter(layers_of(x.model).values())).state_dict() for x in (both, single))
    for name, x in first.items():
        torch.testing.assert_close(x, second[name])


def test_each_layer_is_left_at_its_own_best_state(monkeypatch: pytest.MonkeyPatch) -> None:
    model, looks = student(), itertools.count(1)

    def told(model: Any, options: Any, data: Any) -> Any:
        """The first layer gets better with every look, the second worse, and their mean better."""
        turn = next(looks)
        errors = zip(options, (1 / turn, 1 + 0.1 * turn), strict=True)
        return {name: {"": SimpleNamespace(relative=lambda x=x: torch.tensor([x]))} for name, x in errors}

    monkeypatch.setattr(importlib.import_module("bochner.hf.distill"), "option_errors", told)
    before = [{k: x.clone() for k, x in layer.state_dict().items()} for layer in layers_of(model).values()]
    distill(model, texts_as_batches(4), Distillation(steps=5, end_to_end=0))
    same = [
        all(torch.equal(x, layer.state_dict()[k]) for k, x in old.items())
        for old, layer in zip(before, layers_of(model).values(), strict=True)
    ]
    assert same == [False, True]


def test_the_end_to_end_stage_brings_the_outputs_closer() -> None:
    for family in ("bert", "llama"):
        model = student(family=family)
        weights = {k: v.clone() for k, v in model.state_dict().items() if "linear_attn" not in k}
        report = distill(model, texts_as_batches(6), Distillation(steps=1, end_to_end=25, rate=2 * 1e-2))
        assert report.end_to_end is not None
        assert report.end_to_end[1] < 0.9 * report.end_to_end[0]
        assert all(torch.equal(model.state_dict()[k], v) for k, v in weights.items())


def test_a_time_limit_is_kept() -> None:
    report = distill(student(), texts_as_batches(4), Distillation(steps=10**6, seconds=0.5))
    assert report.seconds < 20


def test_a_distilled_model_is_saved_and_loaded(tmp_path: Path) -> None:
    model = student()
    distill(model, texts_as_batches(4), Distillation(steps=5))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path).eval()
    x = inputs(model)
    with torch.no_grad():
        assert torch.equal(loaded(**x)[0], model(**x)[0])


def test_bad_input_is_refused() -> None:
    with pytest.raises(BochnerError, match="not converted"):
        distill(build("bert", TEXT), texts_as_batches(4))
    model = student()
    with pytest.raises(BochnerError, match="two batches"):
        distill(model, texts_as_batches(1))
    with pytest.raises(BochnerError, match="steps"):
        Distillation(steps=0)
    with pytest.raises(BochnerError, match=r"must be a bochner.Distillation, got dict"):
        distill(model, texts_as_batches(2), {"steps": 3})  # type: ignore[arg-type]


def test_trainable_maps_leave_random_frequencies_alone() -> None:
    model = student()
    found = trainable_maps_(model)
    names = {n for n, p in model.named_parameters() if any(p is q for q in found)}
    assert all("linear_attn.map_norm" in n for n in names)
    assert not any("projection" in n for n in names)
    with pytest.raises(BochnerError, match="nothing to learn"):
        trainable_maps_(student("positive"))


def adapted(**options: Any) -> tuple[Any, Any]:
    peft = pytest.importorskip("peft")
    model = student(family="llama", window=6, sinks=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, task_type="CAUSAL_LM", **options)
        return model, peft.get_peft_model(model, config)


@pytest.mark.parametrize("saved", [None, ["linear_attn"]])
def test_adapters_and_maps_of_a_peft_model_are_trained_together(saved: list[str] | None) -> None:
    _, wrapped = adapted(modules_to_save=saved)
    before = {n: p.detach().clone() for n, p in wrapped.named_parameters()}
    wanted = {n: p.requires_grad for n, p in wrapped.named_parameters()}
    data = texts_as_batches(4)
    report = distill(wrapped, data, Distillation(steps=2, end_to_end=10, rate=2 * 2e-2, loss="model"))
    assert report.end_to_end is not None
    assert report.end_to_end[1] < report.end_to_end[0]
    moved = {n for n, p in wrapped.named_parameters() if n in before and not torch.equal(p, before[n])}
    assert any("lora_" in n for n in moved)
    assert all("lora_" in n or "linear_attn" in n for n in moved)
    assert {n: p.requires_grad for n, p in wrapped.named_parameters() if n in wanted} == wanted
    figures = report.quality["perplexity"]
    assert figures["after"] < figures["before"]
    assert math.log(figures["after"]) == pytest.approx(report.end_to_end[1], rel=1e-4)
    assert "perplexity on data held back" in str(report)
    assert "seconds in all" in str(report)


def test_adapters_made_for_the_training_end_in_the_weights() -> None:
    pytest.importorskip("peft")
    model = student(family="llama", window=6, sinks=1)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    wanted = {n: p.requires_grad for n, p in model.named_parameters()}
    how = Distillation(steps=1, end_to_end=10, rate=4e-2, lora=2, loss="model")
    report = distill(model, texts_as_batches(4), how)
    assert report.quality["perplexity"]["after"] < report.quality["perplexity"]["before"]
    assert {n: p.requires_grad for n, p in model.named_parameters() if n in wanted} == wanted
    moved = {n for n, p in model.named_parameters() if n in before and not torch.equal(p, before[n])}
    assert len(moved) == 8  # queries, keys, values and outputs of two layers
    assert all(n.endswith("_proj.weight") for n in moved)


def test_the_loss_of_the_model_uses_labels_and_asks_for_them() -> None:
    model = build("bert", TEXT, head="AutoModelForSequenceClassification")
    convert(model, Recipe(num_features=16), texts_as_batches())
    data = texts_as_batches(6)
    with pytest.raises(BochnerError, match="'labels'"):
        distill(model, data, Distillation(loss="model"))
    labelled = [{**batch, "labels": batch["input_ids"][:, 3] % 2} for batch in data]
    report = distill(model, labelled, Distillation(steps=2, end_to_end=10, loss="model"))
    with torch.no_grad():
        now = model(**labelled[-1]).loss.item()
    assert report.end_to_end is not None
    assert now == pytest.approx(report.end_to_end[1], rel=1e-4)
    with pytest.raises(BochnerError, match="'loss' of Distillation"):
        Distillation(loss="labels")


def test_the_report_says_what_was_bought_on_data_held_back() -> None:
    model, data = student(), texts_as_batches(8)

    def read() -> torch.Tensor:
        with torch.no_grad():
            return model(**data[-1])[0].mean(1)

    with recording(model, lambda name, call: None):
        truth = read()
    report = distill(model, data, Distillation(steps=20, rate=2e-2, end_to_end=20))
    found = report.quality
    apart = 1 - torch.cosine_similarity(read(), truth, dim=-1).mean().item()
    assert 1 - found["cosine"]["after"] == pytest.approx(apart, rel=0.05, abs=3e-7)
    assert found["cosine"]["before"] < found["cosine"]["after"] <= 1 + 1e-6


def test_where_nothing_has_a_map_nothing_is_distilled_and_it_is_said() -> None:
    model = build("bert", TEXT)
    convert(model, Recipe(None, window=8), texts_as_batches(6, length=32))
    report = distill(model, texts_as_batches(6, length=32))
    assert not report.layers
    assert "Nothing was distilled: no" in str(report)
    conversion = convert(
        build("bert", TEXT), Target(keep=0.9, train=Distillation(steps=2)), texts_as_batches(12, length=32)
    )
    assert conversion.distillation is not None
    assert bool(conversion.distillation.layers) == any(x.has_map for x in conversion.plan.layers)
