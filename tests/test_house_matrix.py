"""Converted models of many families in everything that people do with a model: one matrix."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_models import DECODERS, ENCODERS, OTHERS, Labelled, build, inputs  # noqa: E402

from bochner import Conversion, Recipe, convert, revert  # noqa: E402
from bochner.hf import layers_of  # noqa: E402

TEXT_ENCODERS = ["bert", "roberta", "distilbert", "electra", "esm"]
LANGUAGE = ["llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "opt", "phi3"]
TEXT = [*TEXT_ENCODERS, *LANGUAGE]
REST = ["vit", "dinov2", "bart", "whisper", "wav2vec2"]
WRITERS = {
    **dict.fromkeys([*LANGUAGE, "mistral", "gemma", "granite", "stablelm"], "AutoModelForCausalLM"),
    "bart": "AutoModelForSeq2SeqLM",
    "whisper": "AutoModelForSpeechSeq2Seq",
}
FAMILIES = [*TEXT, *REST]
ALL = {**ENCODERS, **DECODERS, **OTHERS}
RECIPE = Recipe("positive", 8, window=4, sinks=1)
NO_DROPOUT = ("dropout", "attention_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob", "attn_pdrop")


def settings_of(family: str) -> dict[str, Any]:
    known = transformers.AutoConfig.for_model(family).to_dict()
    return {**ALL[family], **{name: 0.0 for name in NO_DROPOUT if name in known}}


def converted(family: str, head: str = "AutoModel") -> Any:
    return convert(build(family, settings_of(family), head=head), RECIPE).model


@torch.no_grad()
def outputs(model: Any, x: dict[str, Any]) -> torch.Tensor:
    return model(**x)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_save_and_load(family: str, tmp_path: Path) -> None:
    model = converted(family)
    x = inputs(model)
    out = outputs(model, x)
    model.save_pretrained(tmp_path / "whole")
    assert torch.equal(outputs(type(model).from_pretrained(tmp_path / "whole").eval(), x), out)
    Conversion.of(model).save_pretrained(tmp_path / "maps")
    again = build(family, settings_of(family))
    assert torch.equal(outputs(convert(again, str(tmp_path / "maps")).model, x), out)


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_and_pickles(family: str) -> None:
    model = converted(family)
    x = inputs(model)
    out = outputs(model, x)
    if family != "wav2vec2":  # torch itself refuses to pickle its parametrised convolution
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        assert torch.equal(outputs(torch.load(file, weights_only=False), x), out)
    made = copy.deepcopy(model)
    assert torch.equal(outputs(made, x), out)
    revert(model)
    assert torch.equal(outputs(made, x), out)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16(family: str) -> None:
    model = converted(family)
    x = inputs(model)
    out = outputs(model, x)
    model.to(torch.bfloat16)
    assert all(
        p.dtype == torch.float32 for x in layers_of(model).values() for p in x.buffers() if p.is_floating_point()
    )
    low = outputs(model, {k: v.bfloat16() if v.is_floating_point() else v for k, v in x.items()})
    assert low.dtype == torch.bfloat16
    assert (low.float() - out).norm() < 0.1 * out.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_compile(family: str) -> None:
    torch._dynamo.reset()
    model = converted(family)
    x = inputs(model)
    if model.config.is_encoder_decoder:
        x["use_cache"] = False  # its decoder would fill a cache that nobody reads, in many graphs
    out = outputs(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = outputs(torch.compile(model, backend="eager"), x)
    torch.testing.assert_close(compiled, out, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", WRITERS)
def test_generate(family: str) -> None:
    model = converted(family, WRITERS[family])
    x = inputs(model)
    x.pop("decoder_input_ids", None)
    if "attention_mask" in x:
        x["attention_mask"] = torch.ones_like(x["input_ids"])
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(model.generate(**x, **options), model.generate(**x, use_cache=False, **options))


def words() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{i}": i for i in range(4, 60)}}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


@pytest.mark.parametrize("family", TEXT)
def test_pipeline(family: str) -> None:
    task = "feature-extraction" if family in TEXT_ENCODERS else "text-generation"
    model = converted(family, "AutoModel" if family in TEXT_ENCODERS else "AutoModelForCausalLM")
    made = transformers.pipeline(task, model=model, tokenizer=words(), device="cpu")
    text = "w5 w9 w11 w7 w20 w21 w33"
    if task == "feature-extraction":
        found = torch.tensor(made(text))
        ids = words()(text, return_tensors="pt")["input_ids"]
        torch.testing.assert_close(found, outputs(model, {"input_ids": ids}), atol=1e-5, rtol=1e-4)
    else:
        (found,) = made(text, max_new_tokens=4, do_sample=False)
        assert len(found["generated_text"]) > len(text)


@pytest.mark.parametrize("family", TEXT)
def test_trainer(family: str, tmp_path: Path) -> None:
    settings = {**settings_of(family), "pad_token_id": 0}
    model = build(family, settings, head="AutoModelForSequenceClassification")
    convert(model, Recipe("gmm_prf", 8, trainable=True))
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no", logging_strategy="no", learning_rate=1e-2,
    )  # fmt: skip
    before = {n: p.detach().clone() for n, p in model.named_parameters() if "linear_attn" in n}
    assert before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = transformers.Trainer(model, arguments, train_dataset=Labelled(8))
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
    found = dict(model.named_parameters())
    assert all(not torch.equal(found[n], p) for n, p in before.items())
    loaded = type(model).from_pretrained(tmp_path / "saved").eval()
    x = inputs(model)
    assert torch.equal(outputs(loaded, x), outputs(model.eval(), x))


PROJECTIONS = {"gpt2": ["c_attn"], "gpt_neox": ["query_key_value"], "phi3": ["qkv_proj"], "distilbert": ["q_lin"]}


@pytest.mark.parametrize("family", TEXT)
def test_peft(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = converted(family)
    usual = ["query"] if family in TEXT_ENCODERS else ["q_proj"]
    config = peft.LoraConfig(target_modules=PROJECTIONS.get(family, usual), r=2, init_lora_weights=False)
    x = inputs(model)
    plain = outputs(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, config)
        out = outputs(adapted, x)
        assert not torch.allclose(out, plain)
        assert Conversion.of(adapted).plan == Conversion.of(model).plan
        adapted(**x)[0].square().mean().backward()
        adapted.save_pretrained(tmp_path)
        other = peft.PeftModel.from_pretrained(converted(family), tmp_path).eval()
        torch.testing.assert_close(outputs(other, x), out)
        torch.testing.assert_close(outputs(adapted.merge_and_unload(), x), out, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", TEXT)
def test_sentence_transformers(family: str, tmp_path: Path) -> None:
    package = pytest.importorskip("sentence_transformers")
    build(family, settings_of(family)).save_pretrained(tmp_path)
    words().save_pretrained(tmp_path)
    model = package.SentenceTransformer(str(tmp_path), device="cpu")
    model[0].processor = words()  # transformers takes Qwen2's own tokenizer for its models, whatever was saved
    texts = ["w5 w9 w11 w7 w20 w21 w33 w8 w9 w40 w41 w50", "w30 w31 w9"]
    before = torch.from_numpy(model.encode(texts))
    convert(model, RECIPE)
    after = torch.from_numpy(model.encode(texts))
    assert not torch.allclose(after, before, atol=1e-4)
    model.save(str(tmp_path / "saved"))
    loaded = package.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    loaded[0].processor = words()
    assert torch.equal(torch.from_numpy(loaded.encode(texts)), after)
    assert torch.allclose(torch.from_numpy(revert(model).encode(texts)), before, atol=1e-6)


def test_every_use_is_seen_with_at_least_twelve_families() -> None:
    uses = [test for name, test in globals().items() if name.startswith("test_") and hasattr(test, "pytestmark")]
    counts = {test.__name__: len(list(test.pytestmark[0].args[1])) for test in uses}
    assert len(counts) == 9, counts  # copies and pickles are one test
    assert min(counts.values()) >= 12, counts
