"""Old calls are warned of with the new one, and give what they gave."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import GROUPED, TEXT, build, inputs, texts_as_batches

import bochner
from bochner import BochnerError, BochnerWarning, Conversion, Recipe, Target, convert


def test_an_old_conversion_is_the_new_one_and_returns_the_model() -> None:
    new = convert(build("bert", TEXT), Recipe("positive", 8, window=4, sinks=1), texts_as_batches(), seed=2).model
    old = build("bert", TEXT)
    call = (
        r"bochner.convert\(model, Recipe\(feature_map='positive', num_features=8, window=4, sinks=1\), data, seed=2\)"
    )
    options = {"window": 4, "sinks": 1, "calibration": texts_as_batches(), "seed": 2, "select": False}
    with pytest.warns(BochnerWarning, match=call):
        assert convert(old, "positive", 8, **options) is old
    x = inputs(new)
    with torch.no_grad():
        assert torch.equal(old(**x)[0], new(**x)[0])


def test_old_pairs_of_query_heads_become_key_heads() -> None:
    model = build("llama", GROUPED, head="AutoModelForCausalLM")
    with pytest.warns(BochnerWarning, match="exact_heads"):
        convert(model, None, window=4, exact_heads=[(0, 3), (1, 0)])
    fates = [[fate.name for fate in layer.fates] for layer in Conversion.of(model).plan.layers]
    assert fates == [["window", "exact"], ["exact", "window"]]


def test_old_keywords_that_do_not_go_together_are_refused() -> None:
    for options, sentence in (
        ({"keep": 0.9, "window": 8}, "leave out 'window'"),
        ({"length": 100}, "'length' belongs to a Target"),
        ({"max_length": 100, "window": 8}, "'max_length' belongs to calibration data"),
    ):
        with pytest.raises(BochnerError, match=sentence):
            convert(build("bert", TEXT), **options)
    with pytest.raises(BochnerError, match="Distillation has no 'layers'"):
        bochner.distill(build("bert", TEXT), texts_as_batches(), layers=["x"])


def test_old_advice_is_a_search_or_a_diagnosis() -> None:
    q = torch.randn(4, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    with pytest.warns(BochnerWarning, match=r"bochner.diagnose\(q, k, v, num_features="):
        assert bochner.advise(q, q, num_features=(8,), window=4).recipe.num_features == 8
    model = build("llama", GROUPED, head="AutoModelForCausalLM")
    with pytest.warns(BochnerWarning, match=r"bochner.search\(model, Target\(keep=0.8, length=128\), data\)"):
        report = bochner.advise(model, texts_as_batches(12), keep=0.8, length=128)
    assert report.plan == bochner.search(model, Target(keep=0.8, length=128), texts_as_batches(12)).plan


def test_old_distillation_is_the_new_one() -> None:
    model = convert(build("bert", TEXT), Recipe("calibrated", 8), texts_as_batches()).model
    with pytest.warns(BochnerWarning, match=r"bochner.distill\(model, data, Distillation\(steps=2, rate=0.01\)\)"):
        assert bochner.distill(model, texts_as_batches(4), steps=2, lr=1e-2).layers
