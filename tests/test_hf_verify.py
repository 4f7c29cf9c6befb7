"""What is converted is what was verified, is judged by what users read off it, and is not slower than the original."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from bochner.hf.judge import Outputs, pooled, rows_of  # noqa: E402
from bochner.hf.verify import longest  # noqa: E402
from hf_models import AUDIO, GROUPED, IMAGE, TEXT, build, texts_as_batches  # noqa: E402

from bochner import BochnerError, advise, convert  # noqa: E402
from bochner.hf import Plan, plan_of, report_of  # noqa: E402


def price(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Seconds of a layer of one kind of heads, exact attention taking one."""
    monkeypatch.setattr(
        "bochner.hf.target.layer_seconds",
        lambda made, length, rounds=3: [(1.0, seconds[m.plan.kinds[-1]]) for m in made],
    )


def whole(monkeypatch: pytest.MonkeyPatch, converted: float) -> None:
    monkeypatch.setattr("bochner.hf.verify.whole_seconds", lambda *a: {"original": 1.0, "converted": converted})


def test_what_was_advised_is_what_is_converted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Maps come with the plan: no calibration is needed, and none is made of texts that are cut shorter."""
    price(monkeypatch, window=0.9, hybrid=0.6, kernel=0.2)
    whole(monkeypatch, 0.5)
    data = texts_as_batches(9, length=96)
    target = {"keep": 0.6, "num_features": 16, "exact_below": 0}
    report = advise(build("bert", TEXT, std=0.25), data, **{**target, "num_features": (16,)})
    assert report.plan.count("kernel") == 8
    assert report.plan.fit_length == 96
    models = [convert(build("bert", TEXT, std=0.25), plan=report.plan, exact_below=0)]
    models.append(convert(build("bert", TEXT, std=0.25), plan=report.plan, calibration=data[:4], exact_below=0))
    models.append(convert(build("bert", TEXT, std=0.25), calibration=data, **target))
    with torch.no_grad():
        first, *others = (model(**data[0])[0] for model in models)
    assert all(torch.equal(first, other) for other in others)

    report.plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.fit_length == 96
    with pytest.raises(BochnerError, match="needs 'calibration'"):
        convert(build("bert", TEXT), plan=loaded)
    edited = report.plan.copy()
    edited.layers[0].num_features = 8
    with pytest.raises(BochnerError, match="needs 'calibration'"):
        convert(build("bert", TEXT), plan=edited)
    model = convert(build("bert", TEXT, std=0.25), plan=edited, calibration=data, exact_below=0)
    assert [layer.num_features for layer in plan_of(model).layers] == [8, 16]


def test_a_loaded_plan_is_fitted_to_texts_of_the_length_it_was_made_by(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        "bochner.hf.convert.inputs.batches",
        lambda texts, tokenizer, model, max_length, batch_size: seen.append(max_length) or texts,
    )
    plan = plan_of(convert(build("bert", TEXT), "positive", 8, exact_below=0))
    for length, given, used in ((0, None, 256), (600, None, 600), (600, 100, 100)):
        plan.fit_length = length
        convert(build("bert", TEXT), plan=plan, calibration=texts_as_batches(4), max_length=given)
        assert seen.pop() == used


@pytest.mark.parametrize(("share", "converted"), [(0.8, True), (0.98, True), (1.02, False), (1.2, False)])
def test_a_model_that_is_slower_as_a_whole_stays_as_it_was(
    share: float, converted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    price(monkeypatch, window=0.5, hybrid=0.6, kernel=0.7)
    whole(monkeypatch, share)
    model = build("bert", TEXT)
    convert(model, calibration=texts_as_batches(8), keep=0.6, num_features=8, exact_below=0)
    report = report_of(model).target
    assert report is not None
    assert bool(report.plan.converted) == report.worthwhile == converted
    told = f"takes {share:.2f} of the original's time"
    assert any(told in reason for reason in report.reasons)
    assert report.met
    assert ("recommended: " in str(report)) == ("converted: seconds" in str(report)) == converted


def test_the_length_of_a_batch_is_that_of_its_tokens_whatever_comes_first() -> None:
    batch = {"pixel_values": torch.zeros(1, 3, 16, 16), "input_ids": torch.zeros(1, 60)}
    assert longest([batch], {}) == 60


def test_texts_that_are_too_short_say_nothing_of_the_time_at_the_length_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    price(monkeypatch, window=0.5, hybrid=0.6, kernel=0.7)
    whole(monkeypatch, 1.5)
    report = advise(build("bert", TEXT), texts_as_batches(8), keep=0.6, num_features=(8,), length=500, exact_below=0)
    assert report.worthwhile
    assert "64 tokens only" in report.reasons[0]
    assert any("takes 1.50 of the original's time at 64 tokens" in reason for reason in report.reasons)


def test_layers_without_influence_do_not_matter() -> None:
    """LLaVA reads the last layer but one of its vision tower."""
    config = transformers.AutoConfig.for_model(
        "llava",
        text_config={**GROUPED, "model_type": "llama"},
        vision_config={**IMAGE, "model_type": "clip_vision_model"},
        image_token_index=50,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    ids = torch.randint(4, 48, (1, 60))
    ids[:, 5:21] = 50
    data = [{"input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16)} for _ in range(4)]
    report = advise(model, data, keep=0.9, num_features=(8,))
    assert len(report.heads) == 16


def frames() -> tuple[Any, dict[str, Tensor]]:
    model = build("wav2vec2", {**AUDIO, "feat_extract_norm": "layer"}, head="AutoModelForCTC", std=0.3)
    g = torch.Generator().manual_seed(0)
    mask = torch.ones(2, 1200, dtype=torch.long)
    mask[1, 600:] = 0
    return model, {"input_values": torch.randn(2, 1200, generator=g) * mask, "attention_mask": mask}


def test_classes_of_frames_are_judged_frame_by_frame() -> None:
    """The same frames in another order have the same mean, and say something else."""
    model, batch = frames()
    judge = Outputs(model, [batch], 0.9)
    assert judge.is_logits
    with torch.no_grad():
        output = model(**batch)
        truth = output.logits.clone()
        rows = rows_of(model, batch, truth)
        assert rows is not None
        assert rows.sum(1).tolist() == [truth.shape[1], model._get_feat_extract_output_lengths(torch.tensor(600))]
        output.logits = truth.clone()
        output.logits[0] = truth[0].flip(0)
        assert judge.quality(lambda b: output).kept < 0.95
        assert judge.loss(0, output) > 0.5
        torch.testing.assert_close(pooled(output.logits, rows), pooled(truth, rows))
        output.logits = truth.clone()
        output.logits[1, rows[1].sum() :] += torch.randn(60)  # padding
        assert judge.quality(lambda b: output).kept == pytest.approx(1.0)
    p = truth[0].log_softmax(-1)
    q = p.flip(0)
    output.logits = torch.cat([truth[:1].flip(1), truth[1:]])
    wanted = (p.exp() * (p - q)).sum() / rows.sum()
    assert judge.quality(lambda b: output).kept == pytest.approx(math.exp(-wanted.item()), rel=1e-4)


def test_classes_of_tokens_are_distilled_as_distributions() -> None:
    model = build("bert", TEXT, head="AutoModelForTokenClassification")
    options = {"steps": 1, "end_to_end": 1}
    convert(model, "calibrated", 8, calibration=texts_as_batches(4), exact_below=0, distill=options)
    report = report_of(model).distillation
    assert report is not None
    assert set(report.quality) == {"relative_error", "divergence"}
