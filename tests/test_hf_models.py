"""Real pretrained models, calibrated on some authors and measured on others."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent.parent / "experiments"))

from _models import embed, perplexity, recall  # noqa: E402

from bochner import BochnerWarning, Calibration, Conversion, Distillation, Recipe, convert, data, distill, revert  # noqa: E402
from bochner.demo import load_minilm, load_smollm2, write  # noqa: E402
from bochner.hf import RecurrentLayer, cache_bytes  # noqa: E402
from bochner.hf.evaluate import embedding_quality  # noqa: E402

pytestmark = pytest.mark.model


def loaded(load: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    try:
        return load()
    except data.ArtefactUnavailable as error:
        pytest.skip(str(error))


def decoding_cost(
    model: Any,
    length: int,
    *,
    steps: int = 8,
    prefill: int = 512,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, int]:
    """Seconds per token (the best of some) after `length` tokens of context, and the bytes of the cache."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(10, model.config.vocab_size - 10, (1, length + steps), generator=g)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", BochnerWarning)  # random tokens are unlike any text
        for start in range(0, length, prefill):
            model(ids[:, start : min(start + prefill, length)], past_key_values=cache, logits_to_keep=1)
        seconds = []
        for i in range(steps):
            before = clock()
            model(ids[:, length + i : length + i + 1], past_key_values=cache)
            seconds.append(clock() - before)
    return min(seconds), cache_bytes(cache)


def figures(original: Any, found: Any) -> Any:
    return SimpleNamespace(**embedding_quality(original, found).figures)


def minilm_quality(model: Any, tokenizer: Any, texts: int = 16, **recipe: Any) -> Any:
    held = data.paragraphs("heldout", texts)
    original = embed(model, tokenizer, held, max_length=150)
    taught = recipe.pop("taught", 0)
    calibration = data.paragraphs("calibration", 64 if taught else 24)
    convert(model, Recipe(**recipe), Calibration(calibration[:48], tokenizer=tokenizer, max_length=150))
    before = figures(original, embed(model, tokenizer, held, max_length=150))
    if not taught:
        revert(model)
        return before
    texts_again = Calibration(calibration, tokenizer, max_length=150, batch_size=4)
    distill(model, texts_again, Distillation(steps=taught, seconds=600))
    return before, figures(original, embed(model, tokenizer, held, max_length=150))


def test_minilm_keeps_its_embeddings_without_any_training() -> None:
    """A window with a fitted kernel beside it, against the window alone."""
    model, tokenizer = loaded(load_minilm)
    alone = minilm_quality(model, tokenizer, feature_map=None, window=32, sinks=1)
    near = minilm_quality(model, tokenizer, feature_map="landmark", num_features=16, window=32, sinks=1)
    assert 1 - near.cosine < 0.5 * (1 - alone.cosine)
    assert near.cosine >= 0.985
    assert near.rank_correlation > alone.rank_correlation


@pytest.mark.slow
def test_a_fitted_kernel_alone_is_better_than_random_features_and_worse_than_beside_a_window() -> None:
    model, tokenizer = loaded(load_minilm)
    plain = minilm_quality(model, tokenizer, feature_map="positive", num_features=128)
    kernel = minilm_quality(model, tokenizer, feature_map="landmark", num_features=16)
    near = minilm_quality(model, tokenizer, feature_map="landmark", num_features=16, window=32, sinks=1)
    assert 1 - kernel.cosine < 0.4 * (1 - plain.cosine)
    assert 1 - near.cosine < 0.5 * (1 - kernel.cosine)
    assert near.rank_correlation > kernel.rank_correlation


@pytest.mark.slow
def test_minilm_distilled_is_nearly_the_original() -> None:
    """With the two heads exact that look for the same word, which no map of low rank can do."""
    model, tokenizer = loaded(load_minilm)
    recipe: dict[str, Any] = {"feature_map": "landmark", "num_features": 64, "window": 32, "sinks": 1, "taught": 30}
    before, after = minilm_quality(model, tokenizer, 32, exact_heads=[(1, 1), (2, 9)], **recipe)
    assert after.cosine >= 0.995
    assert 1 - after.cosine < 0.9 * (1 - before.cosine)


@pytest.mark.slow
def test_a_landmark_map_beside_the_window_helps_an_untrained_decoder() -> None:
    model, tokenizer = loaded(load_smollm2)
    texts, held = data.paragraphs("calibration", 6, words=250), data.paragraphs("heldout", 4, words=350)
    found = {}
    for name, features in ((None, 64), ("landmark", 64)):
        recipe = Recipe(name, features, window=64, sinks=4)
        convert(model, recipe, Calibration(texts, tokenizer, max_length=320, batch_size=1))
        found[name] = perplexity(model, tokenizer, held, max_length=450)
        revert(model)
    exact = perplexity(model, tokenizer, held, max_length=450)
    assert found["landmark"] - exact < 0.8 * (found[None] - exact)


@pytest.mark.slow
def test_smollm2_keeps_perplexity_and_recall_with_a_tenth_of_its_heads_exact() -> None:
    model, tokenizer = loaded(load_smollm2)
    ordinary = data.paragraphs("heldout", 6)
    pairs = data.paragraphs("heldout", 7, words=130)[1:]
    exact = perplexity(model, tokenizer, ordinary, max_length=150), recall(model, tokenizer, pairs)
    assert exact[1] < 1.4
    before = write(model, tokenizer, 20)
    recipe: dict[str, Any] = {"feature_map": None, "window": 64, "sinks": 4}
    texts = data.paragraphs("calibration", 6, words=250)
    how: dict[str, Any] = {"max_length": 320, "batch_size": 1}
    convert(model, Recipe(exact_heads=0.1, **recipe), Calibration(texts, tokenizer, **how))
    plan = Conversion.of(model).plan
    assert plan.count("exact") <= 0.1 * plan.num_heads
    assert plan.cache_bytes(4000) < plan.cache_bytes(4000, converted=False) / 3
    assert perplexity(model, tokenizer, ordinary, max_length=150) / exact[0] <= 1.03
    assert recall(model, tokenizer, pairs) <= 2.0
    assert write(model, tokenizer, 20)[:30] == before[:30]
    revert(model)
    convert(model, Recipe(**recipe), Calibration(texts[:2], tokenizer, **how))
    assert recall(model, tokenizer, pairs) > 10  # without them, recall is gone


@pytest.mark.slow
def test_smollm2_decodes_in_less_memory_and_time_than_its_cache() -> None:
    model, _ = loaded(load_smollm2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # processor time of one thread: what else runs on the machine matters less
    try:
        exact, size = decoding_cost(model, 4000, steps=16, clock=time.process_time)
        convert(model, Recipe(None, window=64, sinks=4, exact_heads=[(i, 3 * (i % 3)) for i in range(27)]))
        linear, small = decoding_cost(model, 4000, steps=16, clock=time.process_time)
    finally:
        torch.set_num_threads(threads)
    assert small < size / 3
    assert linear < exact


@pytest.mark.slow
def test_smollm2_recurrent_and_full_logits_agree() -> None:
    model, tokenizer = loaded(load_smollm2)
    texts = data.paragraphs("calibration", 2, words=150)
    convert(model, Recipe(num_features=64, window=64, sinks=4), Calibration(texts, tokenizer=tokenizer, max_length=200))
    ids = tokenizer(data.paragraphs("heldout", 1, words=150)[0], return_tensors="pt").input_ids[:, :150]
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        parts = [model(ids[:, :100], past_key_values=cache).logits]
        held = cache_bytes(cache)
        parts += [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(100, 150)]
    assert all(isinstance(layer, RecurrentLayer) for layer in cache.layers)
    assert cache_bytes(cache) == held
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-4, rtol=0)
