"""Inputs unlike those that were calibrated on are noticed, once; others are not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_models import GROUPED, TEXT, build, texts_as_batches  # noqa: E402

from bochner import BochnerWarning, Conversion, Recipe, Target, convert  # noqa: E402
from bochner.hf import layers_of  # noqa: E402
from bochner.hf.calls import Call  # noqa: E402
from bochner.hf.drift import FAR, LONGER, Alarm, distance, note  # noqa: E402
from bochner.hf.fates import Kernel  # noqa: E402
from bochner.hf.observe import recording  # noqa: E402
from bochner.hf.plan import LayerPlan  # noqa: E402

STRANGE = torch.full((1, 64), 7)


HALVES = 0.5 ** torch.arange(15, -1, -1.0)[:, None]


def model(family: str = "bert", calibration: Any = None, **options: Any) -> Any:
    head = "AutoModel" if family == "bert" else "AutoModelForCausalLM"
    made = build(family, TEXT if family == "bert" else GROUPED, head=head)
    return convert(made, Recipe(num_features=16, **options), calibration or texts_as_batches(12)).model


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_one_warning_for_inputs_unlike_the_calibration(family: str) -> None:
    converted = model(family)
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for batch in texts_as_batches(4, seed=9):
            converted(**batch)
        assert not told
        converted(STRANGE)
        converted(STRANGE)
    assert [w.category for w in told] == [BochnerWarning]
    assert "unlike the calibration data" in str(told[0].message)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_one_calibration_sequence_is_enough(family: str) -> None:
    one = texts_as_batches(1, batch=1, length=400)
    converted = model(family, one)
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for batch in texts_as_batches(50, seed=9):
            converted(**batch)
        assert not told
        converted(STRANGE)
    assert [w.category for w in told] == [BochnerWarning]


@pytest.mark.parametrize("at_once", [True, False])
def test_one_warning_for_texts_longer_than_a_decoder_was_fitted_to(at_once: bool) -> None:
    converted = model("llama", feature_map="landmark", window=8)
    length = Conversion.of(converted).plan.layers[0].seen["length"]
    assert length == max(b["input_ids"].shape[1] for b in texts_as_batches(12))
    ids = texts_as_batches(1, batch=1, length=LONGER * length + 3, seed=9)[0]["input_ids"]
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cache = converted(ids[:, : LONGER * length], use_cache=True).past_key_values
        assert not told
        if at_once:
            converted(ids)
        else:
            for i in range(LONGER * length, ids.shape[1]):
                cache = converted(ids[:, i : i + 1], past_key_values=cache, use_cache=True).past_key_values
        converted(ids)
    assert [w.category for w in told] == [BochnerWarning]
    assert f"fitted to {length}" in str(told[0].message)


OTHERS: list[dict[str, Any]] = [
    {"family": "llama", "feature_map": "positive"},
    {"family": "llama", "feature_map": None, "window": 8},
    {"family": "bert", "feature_map": "landmark", "window": 8},
]


@pytest.mark.parametrize("options", OTHERS)
def test_no_warning_of_length_for_encoders_and_where_nothing_was_fitted(options: dict[str, Any]) -> None:
    converted = model(**options)
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        converted(texts_as_batches(1, batch=1, length=200, seed=9)[0]["input_ids"])
    assert not told


@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_alarm_of_few_sequences_knows_a_shift_from_chance(count: int) -> None:
    """Tokens with correlation 1/2 from one to the next, as real ones are; shifted by twice their spread."""
    g = torch.Generator().manual_seed(count)

    def rows(shift: float, size: int) -> torch.Tensor:
        noise = torch.randn(size, 2, 80, 16, generator=g)
        return 0.75**0.5 * torch.stack(
            [noise[..., i - 15 : i + 1, :].mul(HALVES).sum(-2) for i in range(15, 79)], -2
        ) + (shift * torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(1)))

    like, false, missed = 0, 0, 0
    for trial in range(60):
        plan = LayerPlan("a", 2, 2, 16, 16, [Kernel()] * 2, seed=trial)
        seen = rows(0.0, count)
        note(plan, list(seen), list(seen))
        near, far = (Call(x, x, x, True, None, 1.0) for x in (rows(0.0, 1), rows(2.0, 1)))
        like += (distance(plan, near) or 0.0) > 0
        false += (distance(plan, near) or 0.0) > FAR
        missed += (distance(plan, far) or 0.0) <= FAR
    assert (like, false) == (60, 0)
    assert missed <= 6


def test_the_mean_of_all_layers_tells_and_one_layer_alone_does_not() -> None:
    names = [f"layer {i}" for i in range(6)]
    alarm = Alarm(names)
    for name in [*names, *names[:3]]:  # the second pass is not complete
        alarm.hear(name, 3.0 if name == names[0] else 1.0)  # warnings are errors here
    assert not alarm.warned
    for name in names[:-1]:
        alarm.hear(name, 2.0)
    with pytest.warns(BochnerWarning, match=r"2\.0 spreads"):
        alarm.hear(names[-1], 2.0)
    assert alarm.warned
    with pytest.warns(BochnerWarning, match="unlike"):
        Alarm(names[:1]).hear(names[0], FAR + 0.1)
    Alarm(names[:1]).hear(names[0], FAR - 0.1)


def test_a_target_of_a_language_model_notes_what_it_saw() -> None:
    made = build("llama", GROUPED, head="AutoModelForCausalLM")
    convert(made, Target(keep=0.5, length=512), texts_as_batches(10, length=512, batch=1))
    assert all(layer.seen is not None for layer in Conversion.of(made).plan.converted)


def test_distances_of_like_sequences_are_about_one() -> None:
    converted = model()
    layers, found = layers_of(converted), []

    def look(name: str, call: Any) -> None:
        found.append(distance(layers[name].plan, call))

    with recording(converted, look), torch.no_grad():
        for batch in texts_as_batches(20, seed=9):
            converted(**batch)
    assert 0.7 < sum(found) / len(found) < 1.5
    assert max(found) < FAR


def test_what_was_seen_is_saved_and_loaded(tmp_path: Path) -> None:
    converted = model()
    converted.save_pretrained(tmp_path)
    again = type(converted).from_pretrained(tmp_path).eval()
    assert all(layer.seen is not None for layer in Conversion.of(again).plan.layers)
    with pytest.warns(BochnerWarning, match="unlike"), torch.no_grad():
        again(STRANGE)


def test_short_padded_and_recurrent_calls_are_left_alone() -> None:
    converted = model("llama")
    mask = torch.ones_like(STRANGE)
    mask[:, 0] = 0
    cache = transformers.DynamicCache(config=converted.config)
    with torch.no_grad():
        converted(STRANGE[:, :20])
        converted(STRANGE, attention_mask=mask)
        converted(texts_as_batches(1)[0]["input_ids"][:1], past_key_values=cache)
        converted(STRANGE, past_key_values=cache)  # warnings are errors here
        with pytest.warns(BochnerWarning, match="unlike"):
            converted(STRANGE)


def test_windows_without_maps_have_nothing_to_compare_with() -> None:
    converted = model("llama", feature_map=None, window=8)
    assert all(layer.seen is None for layer in Conversion.of(converted).plan.layers)
