"""`exact_below`: rows that see few keys stay exact, whatever the padding, the pieces and the batch."""

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
from bochner.hf.attention import LinearAttention  # noqa: E402
from bochner.hf.calls import Call, exact  # noqa: E402
from bochner.hf.observe import recording  # noqa: E402

BORDER = 16
RECIPE = Recipe("positive", 16, window=5, sinks=1)
EXACT_TOO = Recipe("positive", 16, window=5, sinks=1, exact_heads=[(0, 1)])


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(4, 50, (batch, length), generator=torch.Generator().manual_seed(3))


def decoder(border: int = BORDER) -> Any:
    model = build("llama", GROUPED, head="AutoModelForCausalLM")
    return convert(model, EXACT_TOO, texts_as_batches(), exact_below=border).model


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_shorter_sequences_are_those_of_the_original(family: str, implementation: str) -> None:
    model = build(family, TEXT if family == "bert" else GROUPED)
    model.set_attn_implementation(implementation)
    mask = torch.ones(2, BORDER - 1, dtype=torch.long)
    mask[0, :4] = 0
    keep = mask.bool()
    with torch.no_grad():
        short = model(ids(2, BORDER - 1), attention_mask=mask)[0]
        plain = model(ids(2, BORDER - 1))[0]
        long = model(ids(2, BORDER + 9))[0]
        convert(model, RECIPE, texts_as_batches(), exact_below=BORDER)
        torch.testing.assert_close(model(ids(2, BORDER - 1), attention_mask=mask)[0][keep], short[keep])
        torch.testing.assert_close(model(ids(2, BORDER - 1))[0], plain)
        assert (model(ids(2, BORDER + 9))[0] - long).abs().max() > 1e-3
        revert(model)
        assert torch.equal(model(ids(2, BORDER + 9))[0], long)


def test_an_encoder_gives_a_text_alone_what_it_gives_it_beside_padding() -> None:
    model = convert(build("bert", TEXT), RECIPE, texts_as_batches(), exact_below=BORDER).model
    for length in (BORDER - 3, BORDER - 1, BORDER, BORDER + 5):
        text = ids(1, length)
        padded = torch.cat([text, torch.full((1, 20), 7)], dim=1)
        mask = (torch.arange(length + 20) < length).long()[None]
        with torch.no_grad():
            alone = model(text)[0]
            beside = model(padded, attention_mask=mask)[0]
        torch.testing.assert_close(beside[:, :length], alone, atol=1e-5, rtol=1e-4)


PIECES = [
    [(0, 10), *((i, i + 1) for i in range(10, 30))],
    [(0, 10), (10, 24), (24, 30)],
    [(0, 30)],
    [(0, 16), (16, 30)],
]


@pytest.mark.parametrize("pieces", PIECES)
def test_whole_in_pieces_and_step_by_step_agree_and_few_keys_are_exact(pieces: list[Any]) -> None:
    model, x = decoder(), ids(2, 30)
    layers = layers_of(model)

    def by_row(name: str, call: Call) -> Tensor:
        rows = exact(call)
        border, layers[name].plan.exact_below = layers[name].plan.exact_below, 0
        rows[:, :, BORDER - 1 :] = layers[name](call)[:, :, BORDER - 1 :]
        layers[name].plan.exact_below = border
        return rows

    with torch.no_grad():
        cache = transformers.DynamicCache(config=model.config)
        found = torch.cat([model(x[:, a:b], past_key_values=cache).logits for a, b in pieces], dim=1)
        whole = model(x, use_cache=False).logits
        with recording(model, by_row):
            wanted = model(x, use_cache=False).logits
    torch.testing.assert_close(whole, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_left_padding_and_beams_cross_the_border() -> None:
    model, x = decoder(), ids(3, 12)
    mask = torch.ones_like(x)
    mask[1, :5] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    together = model.generate(x, attention_mask=mask, **options)
    for row, start in ((0, 0), (1, 5), (2, 0)):
        alone = model.generate(x[row : row + 1, start:], attention_mask=mask[row : row + 1, start:], **options)
        assert torch.equal(alone[0, -12:], together[row, -12:])
    beams = model.generate(x, attention_mask=mask, num_beams=3, **options)
    plain = model.generate(x, attention_mask=mask, num_beams=3, use_cache=False, **options)
    assert torch.equal(beams, plain)


def test_after_the_border_memory_is_constant() -> None:
    model = decoder()
    cache = transformers.DynamicCache(config=model.config)
    sizes = []
    with torch.no_grad():
        for i in range(40):
            model(ids(1, 40)[:, i : i + 1], past_key_values=cache)
            sizes.append([layer.states["hybrid"].nbytes if "hybrid" in layer.states else 0 for layer in cache.layers])
    assert sum(sizes[BORDER - 3]) == 0
    assert sum(sizes[BORDER]) > 0
    assert max(map(sum, sizes[BORDER + 8 :])) <= max(map(sum, sizes[BORDER : BORDER + 8])) * 1.5
    plan = Conversion.of(model).plan
    for n in (BORDER - 2, 512):
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids(1, n), past_key_values=cache)
        assert n < BORDER or cache_bytes(cache) == pytest.approx(plan.cache_bytes(n), rel=0.2)


def test_the_border_is_saved_and_loaded(tmp_path: Path) -> None:
    model = decoder()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert {layer.exact_below for layer in Conversion.of(again).plan.layers} == {BORDER}
    with torch.no_grad():
        for n in (BORDER - 1, BORDER + 9):
            assert torch.equal(again(ids(1, n)).logits, model(ids(1, n)).logits)


def test_every_row_is_converted_unless_a_border_is_asked_for() -> None:
    model = convert(build("bert", TEXT), RECIPE, texts_as_batches()).model
    assert {layer.exact_below for layer in Conversion.of(model).plan.layers} == {0}
    model = convert(build("bert", TEXT), RECIPE, texts_as_batches(), exact_below=23).model
    assert {layer.exact_below for layer in Conversion.of(model).plan.layers} == {23}
    assert "fewer than 23 keys stay exact" in str(Conversion.of(model).plan)
    for wrong in (-1, "auto", 1.5):
        with pytest.raises(BochnerError, match="exact_below"):
            convert(build("bert", TEXT), Recipe("positive", 8), exact_below=wrong)  # type: ignore[arg-type]
    with pytest.warns(BochnerWarning, match="512 positions .* its conversion never acts"):
        convert(build("bert", TEXT), Recipe("positive", 8), exact_below=10**6)


def test_maps_that_are_being_trained_see_short_inputs() -> None:
    model = convert(build("bert", TEXT), Recipe(num_features=16), texts_as_batches(), exact_below=100).model
    with torch.no_grad():
        before = model(ids(1, 20))[0]
    layer: LinearAttention
    for layer in layers_of(model).values():
        layer.unfreeze_()
    with torch.no_grad():
        assert (model(ids(1, 20))[0] - before).abs().max() > 1e-4
