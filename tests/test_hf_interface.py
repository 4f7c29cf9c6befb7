"""What is changed of transformers and taken back, and what no thread, part or configuration shares with another."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_models import DECODERS, GROUPED, SEQ2SEQ, SUPPORTED, TEXT, build, inputs, texts_as_batches  # noqa: E402

from bochner import BochnerError, Conversion, Recipe, convert, hf, revert  # noqa: E402
from bochner.hf import interface  # noqa: E402


def outputs(model: Any, x: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model(**(inputs(model) if x is None else x))[0]


def test_no_method_of_transformers_is_replaced() -> None:
    """What importing and converting add to transformers: names of attention functions, and a loader of maps."""
    script = """
import torch, transformers
from transformers import PreTrainedModel, masking_utils, quantizers
classes = [PreTrainedModel, transformers.PreTrainedConfig, transformers.cache_utils.Cache, transformers.Trainer]
classes += [transformers.BertModel, quantizers.HfQuantizer]
def methods():
    return [{k: v for k, v in vars(cls).items() if callable(getattr(cls, k, None))} for cls in classes]
before = methods()
known = {*transformers.AttentionInterface()}
import bochner
model = transformers.BertModel(transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
bochner.convert(model)
model(torch.arange(12)[None])
model.generation_config = None
bochner.revert(model)
assert methods() == before
from bochner.hf.interface import CONVERTED
assert {*transformers.AttentionInterface()} - known == {"bochner", CONVERTED, "bochner_recorder"}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_where_bochner_is_not_imported_a_saved_model_says_what_to_call(tmp_path: Path) -> None:
    model = build("bert", TEXT)
    convert(model, Recipe("positive", 16))
    model.save_pretrained(tmp_path)
    script = f"import transformers; transformers.AutoModel.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode != 0
    assert "call bochner.hf.register() before loading" in done.stderr


def test_a_model_loaded_by_name_has_one_map_in_every_layer_copy_and_thread() -> None:
    hf.register()
    models = [build("bert", TEXT) for _ in range(2)]
    for model in models:
        model.set_attn_implementation("bochner")
    first = outputs(models[0])
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(outputs(models[1])))
    thread.start()
    thread.join()
    hf.register()
    assert torch.equal(found[0], first)
    assert torch.equal(outputs(copy.deepcopy(models[0])), first)
    assert not any("linear_attn" in name for name in models[0].state_dict())


def test_a_family_that_ignores_the_interface_says_so() -> None:
    """`_can_set_attn_implementation`: DeBERTa would stay softmax in silence."""
    assert not hf.supported(build("deberta", TEXT))
    assert hf.supported(build("bert", TEXT))


def test_eager_attention_is_found_beside_the_class_of_a_module() -> None:
    """`eager_attention_forward`: it is registered under no name."""
    model = build("bert", TEXT)
    model.set_attn_implementation("eager")
    before = outputs(model)
    convert(model, Recipe("positive", 8, exact_heads=[(0, h) for h in range(4)]))
    assert hf.layers_of(model)["encoder.layer.0.attention.self"].original == "eager"
    first = model.encoder.layer[0].attention.self
    assert interface._function(first, "eager").__module__ == type(first).__module__
    assert torch.equal(outputs(revert(model)), before)


def test_a_conversion_is_no_quantization(tmp_path: Path) -> None:
    """`is_quantized` and the like: Trainer, PEFT and `.to` would refuse the model."""
    model = convert(build("bert", TEXT), Recipe("positive", 8)).model
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path).eval()
    for made in (model, loaded):
        assert not getattr(made, "is_quantized", False)
        assert getattr(made, "hf_quantizer", None) is None
        assert getattr(made, "quantization_method", None) is None
        assert not getattr(made.config, "_is_quantized", False)
        assert made.config.to_dict()["quantization_config"]["quant_method"] == "bochner"
        made.to(torch.bfloat16).half().float()
    loaded.save_pretrained(tmp_path / "again")
    again = transformers.AutoModel.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(outputs(again), outputs(loaded))


def test_maps_of_a_model_read_in_low_precision_are_read_in_full(tmp_path: Path) -> None:
    """`_keep_in_fp32_modules_strict`: else maps are rounded with the weights."""
    model = convert(build("bert", TEXT), Recipe("calibrated", 8), texts_as_batches()).model
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.embeddings.word_embeddings.weight.dtype == torch.bfloat16
    tensors = [t for layer in hf.layers_of(loaded).values() for t in layer.state_dict().values()]
    assert {t.dtype for t in tensors if t.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
def test_a_cache_of_transformers_gets_the_layers_of_converted_modules(kind: str) -> None:
    """`cache.layers`, `cache.layer_class_to_replicate`: a new cache makes its layers, a fixed one has them all."""
    model = decoder(0)
    options = {} if kind == "DynamicCache" else {"max_cache_len": 16}
    cache = getattr(transformers, kind)(config=model.config, **options)
    lazy = transformers.DynamicCache()
    for one in (cache, lazy):
        model(torch.arange(9)[None], past_key_values=one, use_cache=True)
        assert [type(layer) for layer in one.layers] == [hf.RecurrentLayer] * len(hf.layers_of(model))
        assert one.get_seq_length() == 9


def test_configurations_are_the_models_own() -> None:
    """`_attn_implementation_internal`: of two models with one configuration, one is converted."""
    one = build("bert", TEXT)
    other = type(one)(one.config).eval()
    before = outputs(other)
    config = one.config
    convert(one, Recipe("positive", 8))
    assert other.config is config
    assert config._attn_implementation == "sdpa"
    assert one.config is not config
    assert len({id(m.config) for m in one.modules() if hasattr(m, "config")}) == 1  # shared as before
    assert torch.equal(outputs(other), before)


def test_a_mask_survives_generation_with_a_static_cache() -> None:
    """A mask with `ndim` 4: `generate` makes it before the model does, and takes it for a tensor."""
    model = decoder(0)
    x = torch.randint(4, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 8}
    plain = model.generate(x, attention_mask=torch.ones_like(x), **options)
    static = model.generate(x, attention_mask=torch.ones_like(x), cache_implementation="static", **options)
    assert torch.equal(plain, static)


def decoder(seed: int) -> Any:
    model = build("llama", GROUPED, head="AutoModelForCausalLM")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.05)
    return convert(model, Recipe("calibrated", 16, window=5, sinks=2, exact_heads=[(0, 1)]), texts_as_batches()).model


def write(model: Any, rows: int) -> torch.Tensor:
    x = torch.randint(4, 50, (rows, 12), generator=torch.Generator().manual_seed(rows))
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=40, **options)


@pytest.mark.parametrize("shared", [False, True])
def test_threads_that_decode_at_once_write_what_they_write_alone(shared: bool) -> None:
    """Two models, or one model with a cache per thread."""
    first = decoder(0)
    models = [first, first if shared else decoder(1)]
    alone = [write(model, rows) for model, rows in zip(models, (1, 3), strict=True)]
    together: list[list[torch.Tensor]] = [[], []]
    start = threading.Barrier(2)

    def run(i: int) -> None:
        start.wait()
        for _ in range(3):
            together[i].append(write(models[i], (1, 3)[i]))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # change threads within a step, not once in a while
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for want, got in zip(alone, together, strict=True):
        assert len(got) == 3
        assert all(torch.equal(want, other) for other in got)


def test_keys_that_a_model_changes_after_the_cache_are_not_lost_silently() -> None:
    from bochner.hf.cache import RecurrentLayer, layer_of

    layer, key = RecurrentLayer(), torch.randn(1, 1, 3, 4)
    handed, _ = layer.update(key, key)
    assert layer_of(handed.clone()) is None
    with pytest.raises(BochnerError, match="did not reach"):
        layer.update(key, key)
    layer.reset()
    handed, _ = layer.update(key, key)
    assert layer_of(handed) is layer
    assert layer_of(handed) is None  # once only


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_converting_a_part_leaves_the_others_as_they_were(part: str, tmp_path: Path) -> None:
    model = build("bart", SEQ2SEQ, head="AutoModelForSeq2SeqLM")
    x = inputs(model)
    before = outputs(model, x)
    batches = [
        {**b, "input_ids": b["input_ids"][:, :40], "attention_mask": b["attention_mask"][:, :40]}
        for b in texts_as_batches()
    ]
    convert(model, Recipe("calibrated", 8), batches, parts=[f"model.{part}"])
    changed = outputs(model, x)
    assert not torch.allclose(changed, before, atol=1e-3)
    names = {layer.name for layer in Conversion.of(model).plan.converted}
    assert names
    assert all(f".{part}." in f".{name}" for name in names)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert torch.equal(outputs(loaded, x), changed)
    assert Conversion.of(loaded).plan == Conversion.of(model).plan
    assert torch.equal(outputs(revert(loaded), x), before)
    options = {"max_new_tokens": 8, "num_beams": 1, "do_sample": False, "forced_eos_token_id": None}
    ids = x["input_ids"]
    cached = model.generate(ids, attention_mask=x["attention_mask"], **options)
    plain = model.generate(ids, attention_mask=x["attention_mask"], use_cache=False, **options)
    assert torch.equal(cached, plain)


def test_the_tower_of_a_composite_model_is_converted_alone(tmp_path: Path) -> None:
    image = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    config = transformers.CLIPConfig(
        text_config=TEXT, vision_config={**image, "image_size": 16, "patch_size": 4}, projection_dim=16
    )
    torch.manual_seed(0)
    model: Any = transformers.CLIPModel(config).eval()
    g = torch.Generator().manual_seed(0)
    x = {"pixel_values": torch.randn(2, 3, 16, 16, generator=g), "input_ids": torch.randint(4, 50, (2, 10))}
    before = outputs(model, x)
    with pytest.raises(BochnerError, match=r"made-up inputs.*'data'"):
        convert(model, Recipe("positive", 16))
    convert(model, Recipe("positive", 16), [x] * 4, parts=["vision_model"])
    after = outputs(model, x)
    assert not torch.allclose(after, before, atol=1e-3)
    model.save_pretrained(tmp_path)
    loaded = transformers.CLIPModel.from_pretrained(tmp_path).eval()
    assert torch.equal(outputs(loaded, x), after)
    assert torch.equal(outputs(revert(loaded), x), before)
    assert torch.equal(outputs(revert(model), x), before)
    convert(model.vision_model, Recipe("positive", 16))  # or the tower by itself
    assert model.text_model.config._attn_implementation == "sdpa"
    assert not torch.allclose(outputs(model, x), before, atol=1e-3)


def test_a_tower_converted_alone_is_saved_and_loaded(tmp_path: Path) -> None:
    model = build("bart", SEQ2SEQ, head="AutoModelForSeq2SeqLM")
    tower, x = model.get_encoder(), {"input_ids": torch.arange(4, 24)[None]}
    convert(tower, Recipe("positive", 16))
    after = tower(**x).last_hidden_state
    tower.save_pretrained(tmp_path / "tower")
    assert torch.equal(type(tower).from_pretrained(tmp_path / "tower")(**x).last_hidden_state, after)
    before = revert(tower)(**x).last_hidden_state
    assert not torch.equal(before, after)


@pytest.mark.parametrize("family", ["bert", "bart"])
def test_a_whole_model_that_is_saved_around_a_converted_part_is_refused_when_it_is_loaded(
    family: str, tmp_path: Path
) -> None:
    """`config.attn_implementation` of the whole: the maps are not in its plan, and would be left out."""
    head = {"bert": "AutoModelForSequenceClassification", "bart": "AutoModelForSeq2SeqLM"}[family]
    model = build(family, SUPPORTED[family], head=head)
    x = inputs(model)
    before = outputs(model, x)
    part = model.bert if family == "bert" else model.get_encoder()
    convert(part, Recipe("positive", 16, window=4))
    model.save_pretrained(tmp_path / "around")
    with pytest.raises(ValueError, match="convert the whole model with 'parts' before saving it"):
        type(model).from_pretrained(tmp_path / "around")
    loaded = type(model).from_pretrained(tmp_path / "around", attn_implementation="sdpa").eval()
    torch.testing.assert_close(outputs(loaded, x), before, atol=1e-6, rtol=1e-5)
    revert(part)
    model.save_pretrained(tmp_path / "reverted")
    assert torch.equal(outputs(type(model).from_pretrained(tmp_path / "reverted").eval(), x), before)


def test_a_model_with_the_configuration_of_a_converted_one_is_saved_and_loaded(tmp_path: Path) -> None:
    model = build("bert", TEXT, head="AutoModelForMaskedLM")
    other = type(model)(model.config).eval()
    convert(model, Recipe("positive", 16))
    other.save_pretrained(tmp_path)
    assert torch.equal(outputs(type(model).from_pretrained(tmp_path).eval()), outputs(other))


def test_sequences_packed_by_bounds_alone_are_refused() -> None:
    model = build("llama", DECODERS["llama"])
    convert(model, Recipe("positive", 16, exact_heads=[(0, 0), (0, 1)]))  # one layer stays as it was
    ids, bounds = torch.arange(4, 24)[None], torch.tensor([0, 8, 20], dtype=torch.int32)
    packed = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 12, "max_length_k": 12}
    with pytest.raises(BochnerError, match=r"'cu_seq_lens_q'; pack by 'position_ids'"):
        model(ids, **packed)
    places = torch.cat([torch.arange(8), torch.arange(12)])[None]
    out = model(ids, position_ids=places, use_cache=False, **packed)[0]
    torch.testing.assert_close(out[:, 8:], model(ids[:, 8:])[0], atol=1e-5, rtol=1e-4)


def test_parts_that_share_a_configuration_are_converted_and_reverted_in_any_order() -> None:
    model = build("bart", SEQ2SEQ)
    x = inputs(model)
    before = outputs(model, x)
    hidden = torch.randn(2, 50, 32, generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": b["input_ids"][:, :40], "encoder_hidden_states": hidden} for b in texts_as_batches()]
    convert(model.encoder, Recipe("calibrated", 8, window=4), texts_as_batches())
    encoder = outputs(model, x)
    convert(model.decoder, Recipe("calibrated", 8), batches)
    both = outputs(model, x)
    copied = copy.deepcopy(model)
    revert(model.decoder)
    torch.testing.assert_close(outputs(model, x), encoder, atol=1e-5, rtol=1e-4)
    revert(model.encoder)
    assert torch.equal(outputs(model, x), before)
    # The copy is a conversion of its own, and the other order is as good.
    assert torch.equal(outputs(copied, x), both)
    revert(copied.encoder)
    assert not torch.allclose(outputs(copied, x), before, atol=1e-3)
    revert(copied.decoder)
    assert torch.equal(outputs(copied, x), before)


def test_switching_by_name_keeps_a_conversion_a_conversion() -> None:
    model = convert(build("bert", TEXT), Recipe("calibrated", 8), texts_as_batches()).model
    linear = outputs(model)
    model.set_attn_implementation("sdpa")
    assert not torch.allclose(outputs(model), linear, atol=1e-3)
    model.set_attn_implementation("bochner")
    assert torch.equal(outputs(model), linear)


def test_a_saved_conversion_is_loaded_as_softmax_where_that_is_asked_for(tmp_path: Path) -> None:
    model = build("bert", TEXT)
    before = outputs(model)
    linear = outputs(convert(model, Recipe("calibrated", 8), texts_as_batches()).model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(outputs(loaded), before, atol=1e-5, rtol=1e-4)
    loaded.set_attn_implementation("bochner")
    assert torch.equal(outputs(loaded), linear)


WITHOUT = """
import sys
sys.modules["transformers"] = None
import torch, bochner
q = torch.randn(4, 2, 40, 8, generator=torch.Generator().manual_seed(0))
assert bochner.diagnose(q, q, num_features=16, length=64).heads
assert bochner.Recipe("landmark").num_features is None
for use in (
    lambda: bochner.convert(torch.nn.Linear(2, 2)),
    lambda: bochner.search(torch.nn.Linear(2, 2), bochner.Target(), ["a text"]),
    lambda: bochner.hf.register(),
    lambda: bochner.hf.RecurrentLayer,
    lambda: bochner.distill(torch.nn.Linear(2, 2), ["a text"]),
):
    try:
        use()
    except bochner.MissingExtraError as error:
        assert isinstance(error, ImportError) and isinstance(error, bochner.BochnerError)
        assert "pip install 'bochner[hf]'" in str(error), error
    except bochner.BochnerError as error:
        assert "not converted" in str(error), error
    else:
        raise SystemExit("nothing was raised")
"""


def test_tensors_need_no_transformers_and_models_say_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
