"""Short inputs stay with the original attention, bit by bit; a decoder crosses the border and goes on from states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from hf_models import GROUPED, TEXT, build, texts_as_batches  # noqa: E402

from bochner import BochnerError, BochnerWarning, Conversion, Recipe, convert, revert  # noqa: E402
from bochner.hf import cache_bytes, layers_of  # noqa: E402
from bochner.hf.observe import recording  # noqa: E402
from bochner.hf.cost import crossover  # noqa: E402
from bochner.hf.calls import Call, exact  # noqa: E402

BORDER = 16
RECIPE: dict[str, Any] = {"feature_map": "positive", "num_features": 16, "window": 5, "sinks": 1, "select": False}


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(4, 50, (batch, length), generator=torch.Generator().manual_seed(3))


def decoder(border: int = BORDER) -> Any:
    model = build("llama", GROUPED, head="AutoModelForCausalLM")
    return convert(model, Recipe(exact_heads=[(0, 1)], **RECIPE), texts_as_batches(), exact_below=border).model


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_shorter_calls_are_those_of_the_original_bit_by_bit(family: str, implementation: str) -> None:
    model = build(family, TEXT if family == "bert" else GROUPED)
    model.set_attn_implementation(implementation)
    mask = torch.ones(2, BORDER - 1, dtype=torch.long)
    mask[0, :4] = 0
    with torch.no_grad():
        short = model(ids(2, BORDER - 1), attention_mask=mask)[0]
        plain = model(ids(2, BORDER - 1))[0]
        long = model(ids(2, BORDER))[0]
        convert(model, Recipe(**RECIPE), texts_as_batches(), exact_below=BORDER)
        assert torch.equal(model(ids(2, BORDER - 1), attention_mask=mask)[0], short)
        assert torch.equal(model(ids(2, BORDER - 1))[0], plain)
        assert (model(ids(2, BORDER))[0] - long).abs().max() > 1e-3
        revert(model)
        assert torch.equal(model(ids(2, BORDER))[0], long)


def test_generation_below_the_border_is_that_of_the_original() -> None:
    model = build("llama", GROUPED, head="AutoModelForCausalLM")
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"output_scores": True, "return_dict_in_generate": True}
    x = ids(2, 8)
    wanted = model.generate(x, attention_mask=torch.ones_like(x), **options)
    convert(model, Recipe(**RECIPE), texts_as_batches(), exact_below=BORDER)
    found = model.generate(x, attention_mask=torch.ones_like(x), **options)
    assert torch.equal(found.sequences, wanted.sequences)
    assert all(torch.equal(a, b) for a, b in zip(found.scores, wanted.scores, strict=True))


@pytest.mark.parametrize("pieces", [[(0, 10), *((i, i + 1) for i in range(10, 30))], [(0, 10), (10, 24), (24, 30)]])
def test_across_the_border_rows_before_it_are_exact_and_rows_after_it_follow_the_plan(pieces: list[Any]) -> None:
    """The keys that are absorbed are those of the exact rows: the border leaves no other trace."""
    model, x = decoder(), ids(2, 30)
    layers = layers_of(model)
    first = next(b for a, b in pieces if b >= BORDER)
    start = next(a for a, b in pieces if b == first)  # the first row that is computed by the plan

    def switched(name: str, call: Call) -> Tensor:
        rows = exact(call)
        rows[:, :, start:] = layers[name](call)[:, :, start:]
        return rows

    with torch.no_grad():
        cache = transformers.DynamicCache(config=model.config)
        found = torch.cat([model(x[:, a:b], past_key_values=cache).logits for a, b in pieces], dim=1)
        with recording(model, switched):
            wanted = model(x, use_cache=False).logits
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_left_padding_and_beams_cross_the_border() -> None:
    model, x = decoder(), ids(3, 12)
    mask = torch.ones_like(x)
    mask[1, :5] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    together = model.generate(x, attention_mask=mask, **options)
    alone = model.generate(x[:1], attention_mask=mask[:1], **options)
    assert torch.equal(alone[0], together[0])
    beams = model.generate(x, attention_mask=mask, num_beams=3, **options)
    assert beams.shape == (3, 24)


def test_after_the_border_memory_is_constant() -> None:
    model = decoder()
    cache = transformers.DynamicCache(config=model.config)
    sizes = []
    with torch.no_grad():
        for i in range(40):
            model(ids(1, 40)[:, i : i + 1], past_key_values=cache)
            sizes.append(sum(layer.nbytes for layer in cache.layers))
    assert sizes[BORDER - 2] == 0
    assert sizes[BORDER - 1] > 0
    assert sizes[BORDER + 8] == sizes[-1]
    plan = Conversion.of(model).plan
    for n in (BORDER - 1, 512):
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids(1, n), past_key_values=cache)
        assert cache_bytes(cache) == pytest.approx(plan.cache_bytes(n), rel=0.2)


def test_the_border_is_saved_and_loaded(tmp_path: Path) -> None:
    model = decoder()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert {layer.exact_below for layer in Conversion.of(again).plan.layers} == {BORDER}
    with torch.no_grad():
        for n in (BORDER - 1, BORDER + 9):
            assert torch.equal(again(ids(1, n)).logits, model(ids(1, n)).logits)


def test_every_call_is_converted_unless_a_border_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bochner.hf.convert.crossover", lambda plan: 23)
    model = convert(build("bert", TEXT), Recipe(**RECIPE), texts_as_batches()).model
    assert {layer.exact_below for layer in Conversion.of(model).plan.layers} == {0}
    model = convert(build("bert", TEXT), Recipe(**RECIPE), texts_as_batches(), exact_below="auto").model
    assert {layer.exact_below for layer in Conversion.of(model).plan.layers} == {23}
    assert "below 23 tokens" in str(Conversion.of(model).plan)
    trained = convert(build("bert", TEXT), Recipe("gmm_prf", 8, trainable=True)).model
    assert {layer.exact_below for layer in Conversion.of(trained).plan.layers} == {0}
    with pytest.raises(BochnerError, match="exact_below"):
        convert(build("bert", TEXT), Recipe("positive", 8), exact_below=-1)
    with pytest.warns(BochnerWarning, match="its conversion never acts"):
        convert(build("bert", TEXT), Recipe("positive", 8), exact_below=10**6)


def test_the_crossover_is_read_off_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact attention n^2, linear 300 n: they cross at 300, found between the lengths on either side."""
    plan = Conversion.of(convert(build("bert", TEXT), Recipe("positive", 8)).model).plan
    monkeypatch.setattr("bochner.hf.cost.layer_seconds", lambda layers, n: [(float(n * n), 300.0 * n)] * len(layers))
    assert 256 < crossover(plan) < 400
    monkeypatch.setattr("bochner.hf.cost.layer_seconds", lambda layers, n: [(float(n * n), 10_000.0 * n)] * len(layers))
    assert crossover(plan) == 10_000
    monkeypatch.setattr("bochner.hf.cost.layer_seconds", lambda layers, n: [(1.0, 0.5)] * len(layers))
    assert crossover(plan) == 128


def test_maps_that_are_being_trained_see_short_inputs() -> None:
    model = convert(build("bert", TEXT), Recipe(num_features=16), texts_as_batches(), exact_below=100).model
    with torch.no_grad():
        before = model(ids(1, 20))[0]
    for layer in layers_of(model).values():
        layer.open_()
    with torch.no_grad():
        assert (model(ids(1, 20))[0] - before).abs().max() > 1e-4
