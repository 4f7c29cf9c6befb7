"""Inputs unlike those that were calibrated on are noticed, once; others are not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_models import GROUPED, TEXT, build, texts_as_batches  # noqa: E402

from bochner import BochnerWarning, convert  # noqa: E402
from bochner.hf import layers_of, plan_of  # noqa: E402
from bochner.hf.capture import recording  # noqa: E402
from bochner.hf.familiar import FAR, distance  # noqa: E402

STRANGE = torch.full((1, 64), 7)


def model(family: str = "bert", **options: Any) -> Any:
    head = "AutoModel" if family == "bert" else "AutoModelForCausalLM"
    made = build(family, TEXT if family == "bert" else GROUPED, head=head)
    return convert(made, calibration=texts_as_batches(12), num_features=16, exact_below=0, **options)


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
    assert all(layer.seen is not None for layer in plan_of(again).layers)
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
    assert all(layer.seen is None for layer in plan_of(converted).layers)
