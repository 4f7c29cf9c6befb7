"""Results that were wrong without saying so; each test failed before its cause was mended."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_models import GROUPED, TEXT, build, inputs, texts_as_batches  # noqa: E402

import bochner  # noqa: E402
from bochner import BochnerError, Calibration, Conversion, Distillation, Recipe, Target  # noqa: E402
from bochner.hf import cache_bytes, layers_of, masks  # noqa: E402

RECIPE = Recipe("positive", 16, window=5, sinks=1, exact_heads=[(0, 1)])


def decoder(**settings: Any) -> Any:
    model = build("llama", {**GROUPED, **settings}, head="AutoModelForCausalLM")
    return bochner.convert(model, RECIPE).model


def ids(rows: int, length: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(4, 50, (rows, length), generator=torch.Generator().manual_seed(seed))


def packed() -> tuple[torch.Tensor, torch.Tensor]:
    """Three sequences in one row, and their positions."""
    lengths = [7, 12, 5]
    return ids(1, sum(lengths)), torch.cat([torch.arange(n) for n in lengths])[None]


def test_a_compiled_model_does_not_attend_across_packed_sequences_in_silence() -> None:
    model = decoder(num_hidden_layers=1)
    x, positions = packed()
    with torch.no_grad():
        eager = model(x, position_ids=positions, use_cache=False).logits
        parts = [model(p, use_cache=False).logits for p in x.split([7, 12, 5], dim=1)]
        torch.testing.assert_close(eager, torch.cat(parts, dim=1), atol=1e-4, rtol=1e-4)
        compiled = torch.compile(model, backend="eager")
        whole = model(x, use_cache=False).logits
        torch.testing.assert_close(compiled(x, use_cache=False).logits, whole, atol=1e-5, rtol=1e-4)
        with pytest.raises(RuntimeError, match="packs several sequences into a row"):
            compiled(x, position_ids=positions, use_cache=False)


def test_masks_are_read_by_what_they_hide() -> None:
    from transformers import masking_utils as m

    def read(function: Any, n: int = 9, **more: Any) -> masks.Mask:
        return masks.make_mask(batch_size=2, q_length=n, kv_length=n, mask_function=function, **more)

    parts = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 1, 1, 1]])
    found = read(m.and_masks(m.causal_mask_function, m.packed_sequence_mask_function(parts)))
    assert found.obstacle is None
    assert torch.equal(found.segments, parts)
    assert read(m.causal_mask_function).is_causal
    assert not read(m.bidirectional_mask_function).is_causal
    sliding = m.sliding_window_causal_mask_function(4)
    assert read(sliding, local_size=4).obstacle == masks.Obstacle(
        "its own window or chunks, of 4 tokens, are linear already", 4
    )
    for other in (sliding, m.or_masks(m.causal_mask_function, m.blockwise_overlay(parts))):
        assert "more than causal" in read(other).obstacle.reason


def test_what_a_text_gives_does_not_depend_on_padding_or_pieces() -> None:
    model = build("bert", TEXT)
    bochner.convert(model)
    text, mask = ids(1, 20), (torch.arange(50) < 20).long()[None]
    padded = torch.cat([text, torch.full((1, 30), 7)], dim=1)
    with torch.no_grad():
        alone, beside = model(text)[0], model(padded, attention_mask=mask)[0][:, :20]
    torch.testing.assert_close(beside, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_memory_of_a_model_is_counted_in_its_own_precision(dtype: torch.dtype) -> None:
    model = build("llama", GROUPED, head="AutoModelForCausalLM").to(dtype)
    plan = bochner.convert(model, Recipe(None, window=16, sinks=2, exact_heads=[(0, 1)])).plan
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids(1, 512), past_key_values=cache)
    size = torch.finfo(dtype).bits // 8
    assert cache_bytes(cache) == pytest.approx(plan.cache_bytes(512, element_size=size), rel=0.1)


def test_a_model_loaded_by_name_is_the_same_in_every_copy() -> None:
    bochner.hf.register()
    model = build("bert", TEXT)
    model.set_attn_implementation("bochner")
    x = inputs(model)
    with torch.no_grad():
        out = model(**x)[0]
        assert torch.equal(copy.deepcopy(model)(**x)[0], out)
        bochner.hf.register()
        assert torch.equal(model(**x)[0], out)


def test_a_copy_or_pickle_of_a_decoder_decodes_by_its_own_plan() -> None:
    model = decoder()
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 12}
    x = ids(1, 20)
    wanted = model.generate(x, **options)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for made in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(made.generate(x, **options), wanted)
        layers = layers_of(made)
        assert all(layer is not layers_of(model)[name] for name, layer in layers.items())
        bochner.revert(made)  # the original keeps its plan, and its hooks
        assert torch.equal(model.generate(x, **options), wanted)
    again = copy.deepcopy(model)
    bochner.revert(model)
    assert torch.equal(again.generate(x, **options), wanted)


def test_nothing_is_ignored_in_silence(tmp_path: Path) -> None:
    model, data = build("bert", TEXT), texts_as_batches(4)
    conversion = bochner.convert(model, Recipe("positive", 8), data)
    plan = conversion.plan
    conversion.save_pretrained(tmp_path)
    conversion.revert()
    for spec in (plan, str(tmp_path)):
        for more in ({"seed": 1}, {"parts": ["encoder"]}):
            with pytest.raises(BochnerError, match=f"leave out '{next(iter(more))}'"):
                bochner.convert(model, spec, **more)
    with pytest.raises(BochnerError, match="leave out 'data'"):
        bochner.convert(model, str(tmp_path), data)
    with pytest.raises(BochnerError, match=r"There is no directory 'landmark' .* bochner.Recipe"):
        bochner.convert(model, "landmark", data)
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        bochner.convert(model, Recipe(), data, colour=1)
    with pytest.raises(BochnerError, match="'lora' of Distillation"):
        Distillation(lora=4, end_to_end=0)
    with pytest.raises(BochnerError, match="must be a Recipe, a Target, a Plan"):
        bochner.convert(model, 3.5)
    cut = bochner.Calibration(data, max_length=8)
    for use in (lambda: bochner.convert(model, Recipe(), cut), lambda: bochner.search(model, Target(), cut)):
        with pytest.raises(BochnerError, match="leave out max_length=8"):
            use()


def test_labels_that_a_search_would_leave_out_are_refused() -> None:
    model = build("bert", TEXT, head="AutoModelForSequenceClassification")
    labelled = [{**b, "labels": b["input_ids"][:, 3] % 2} for b in texts_as_batches(6)]
    target = Target(keep=0.9, train=Distillation(loss="model"))
    with pytest.raises(BochnerError, match=r"'labels'.*bochner.distill"):
        bochner.convert(model, target, labelled)


@pytest.mark.parametrize("wrapper", ["peft", "sentence_transformers"])
def test_the_plan_of_a_wrapped_model_names_what_convert_takes(wrapper: str, tmp_path: Path) -> None:
    package = pytest.importorskip(wrapper)
    model = build("bert", TEXT)

    def wrapped(inner: Any) -> Any:
        if wrapper == "peft":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return package.get_peft_model(inner, package.LoraConfig(target_modules=["query"], r=2))
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(55))]
        (tmp_path / "vocab.txt").write_text("\n".join(words))
        inner.save_pretrained(tmp_path)
        transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
        return package.SentenceTransformer(str(tmp_path), device="cpu")

    first, second = wrapped(model), wrapped(copy.deepcopy(model))
    bochner.convert(first, Recipe("positive", 8), Calibration(texts_as_batches(4)))
    plan = Conversion.of(first).plan
    assert plan.layers[0].name == "encoder.layer.0.attention.self"
    assert bochner.convert(second, plan).plan == plan


def test_masks_and_maps_are_made_where_the_model_is() -> None:
    """No second device is at hand: what is made from indices is made on the device that the mask function is told."""
    from transformers import masking_utils as m

    parts = torch.zeros(2, 9, dtype=torch.long, device="meta")
    function = m.and_masks(m.causal_mask_function, m.packed_sequence_mask_function(parts))
    seen = []

    def watched(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        seen.append({t.device.type for t in (b, h, q, k)})
        return function(b, h, q, k)

    with pytest.raises((NotImplementedError, RuntimeError)):  # values on the meta device cannot be compared
        masks.make_mask(batch_size=2, q_length=9, kv_length=9, mask_function=watched, device=torch.device("meta"))
    assert seen
    assert all(devices == {"meta"} for devices in seen)
    x = torch.ones(1, 2, 4, 8, device="meta")
    from bochner.hf.interface import _default_map

    assert all(b.device.type == "meta" for b in _default_map(x).buffers())
