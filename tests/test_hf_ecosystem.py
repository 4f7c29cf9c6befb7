"""Converted models inside Trainer, PEFT, sentence-transformers, and under torch.compile."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_models import GROUPED, TEXT, Labelled, build, inputs, texts_as_batches  # noqa: E402

from bochner import Conversion, Distillation, Recipe, convert, distill, revert  # noqa: E402
from bochner.hf import layers_of, trainable_maps_  # noqa: E402


def classifier() -> Any:
    model = build("bert", {**TEXT, "attention_probs_dropout_prob": 0.0}, head="AutoModelForSequenceClassification")
    return convert(model, Recipe("calibrated", 16, window=6), texts_as_batches()).model


def test_trainer_trains_the_learned_parts_and_decays_none_of_them(tmp_path: Path) -> None:
    model = classifier()
    trainable_maps_(model)
    layer = next(iter(layers_of(model).values())).map_norm["hybrid"].phi
    basis, weight = layer.basis_query.detach().clone(), layer.projection.weight.clone()
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=4, weight_decay=0.1, learning_rate=1e-2, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Labelled(8))
    decayed = trainer.get_decay_parameter_names(model)
    assert decayed
    assert not any("linear_attn" in n for n in decayed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    assert not torch.equal(layer.basis_query, basis)
    assert torch.equal(layer.projection.weight, weight)  # the random part stays
    trainer.save_model(str(tmp_path / "saved"))
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    x = {k: v[None] if isinstance(v, torch.Tensor) else torch.tensor([v]) for k, v in Labelled(8)[0].items()}
    with torch.no_grad():
        assert torch.equal(loaded(**x).logits, model.eval()(**x).logits)


def test_without_trainable_maps_nothing_of_the_conversion_has_gradients() -> None:
    model = classifier()
    assert not [n for n, p in model.named_parameters() if "linear_attn" in n]


def test_peft_trains_and_saves_the_maps(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = build("llama", GROUPED, head="AutoModelForCausalLM")
    convert(model, Recipe(num_features=16), texts_as_batches())
    trainable_maps_(model)
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["linear_attn"], r=2, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, config)
    trained = [n for n, p in adapted.named_parameters() if p.requires_grad]
    assert any("linear_attn.modules_to_save" in n for n in trained)
    x = texts_as_batches(1)[0]
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
    before = adapted(**x).logits.detach()
    loss = adapted(**x, labels=x["input_ids"]).loss
    loss.backward()
    optimizer.step()
    after = adapted(**x).logits.detach()
    assert not torch.allclose(before, after)
    grads = [p.grad for n, p in adapted.named_parameters() if "linear_attn.modules_to_save" in n]
    assert any(g is not None and g.abs().sum() > 0 for g in grads)
    adapted.save_pretrained(tmp_path)
    assert list(tmp_path.glob("*.safetensors"))


def test_distillation_trains_adapters_and_maps_through_the_outputs_of_the_model() -> None:
    peft = pytest.importorskip("peft")
    model = build("llama", GROUPED, head="AutoModelForCausalLM")
    convert(model, Recipe(num_features=16), texts_as_batches())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    report = distill(wrapped, texts_as_batches(6), Distillation(steps=2, end_to_end=30, rate=4e-3))
    assert report.end_to_end is not None
    assert report.end_to_end[1] < report.end_to_end[0]
    adapters = [p for n, p in model.named_parameters() if "lora_B" in n]
    assert all(p.abs().sum() > 0 for p in adapters)  # they begin at zero
    assert report.seconds > 0


def test_torch_compile_gives_the_same_numbers() -> None:
    model = build("bert", {**TEXT, "num_hidden_layers": 1})
    convert(model, Recipe(num_features=16), texts_as_batches())
    x = inputs(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = model(**x)[0]
        compiled = torch.compile(model, backend="aot_eager")(**x)[0]
    torch.testing.assert_close(compiled, eager, atol=1e-4, rtol=1e-3)


def decoder() -> Any:
    model = build("llama", {**GROUPED, "num_hidden_layers": 1}, head="AutoModelForCausalLM")
    recipe = {"num_features": 16, "window": 5, "sinks": 2, "exact_heads": [(0, 1)]}
    return convert(model, Recipe(**recipe), texts_as_batches()).model


def test_a_decoder_without_a_cache_is_one_graph() -> None:
    model = decoder()
    x = torch.randint(4, 50, (2, 20), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        eager = model(x, use_cache=False).logits
        compiled = torch.compile(model, backend="eager", fullgraph=True)(x, use_cache=False).logits
    torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_compiled_generation_is_the_same_and_makes_no_graph_per_token() -> None:
    """Graphs are made in the first steps, with and without sizes that are fixed; the cache itself is left out."""
    from torch._dynamo.utils import counters

    model = decoder()
    x = torch.randint(4, 50, (2, 12), generator=torch.Generator().manual_seed(3))
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(x)}
    eager = model.generate(x, max_new_tokens=20, **options)
    torch._dynamo.reset()
    counters.clear()  # they count over all tests
    model.forward = torch.compile(model.forward, backend="aot_eager")
    model.generate(x, cache_implementation="static", max_new_tokens=10, **options)
    made = counters["stats"]["unique_graphs"]
    assert torch.equal(model.generate(x, cache_implementation="static", max_new_tokens=20, **options), eager)
    assert 0 < made <= counters["stats"]["unique_graphs"] < 25
    assert counters["stats"]["unique_graphs"] - made < 5  # of ten more tokens


@pytest.mark.model
def test_a_sentence_transformer_is_converted_reverted_and_encodes() -> None:
    st = pytest.importorskip("sentence_transformers")
    from bochner import data

    try:
        path = data.fetch("minilm")
    except data.ArtefactUnavailable as error:
        pytest.skip(str(error))
    model = st.SentenceTransformer(str(path), device="cpu")
    texts = data.paragraphs("heldout", 3, source="python")
    before = torch.from_numpy(model.encode(texts))
    convert(model, Recipe("landmark", 16, window=16, sinks=1), data.paragraphs("calibration", 8, source="python"))
    after = torch.from_numpy(model.encode(texts))
    cosine = torch.nn.functional.cosine_similarity(before, after)
    assert cosine.min() > 0.8
    assert cosine.max() < 1 - 1e-4
    assert Conversion.of(model).plan.num_heads == 72
    revert(model)
    assert torch.allclose(torch.from_numpy(model.encode(texts)), before, atol=1e-5)
