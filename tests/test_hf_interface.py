"""What is changed of transformers and taken back, and what no thread, part or configuration shares with another."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_models import GROUPED, SEQ2SEQ, TEXT, build, inputs, texts_as_batches  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import bochner  # noqa: E402
from bochner import BochnerError, Conversion, Recipe, convert, hf, revert  # noqa: E402
from bochner.hf import interface  # noqa: E402

METHODS = [
    "_check_and_adjust_attn_implementation",
    "set_attn_implementation",
    "post_init",
    "save_pretrained",
    "from_pretrained",
]


def methods() -> dict[str, Any]:
    return {name: transformers.PreTrainedModel.__dict__[name] for name in METHODS}


def known() -> set[str]:
    return {*transformers.AttentionInterface(), *transformers.masking_utils.AttentionMaskInterface()}


def outputs(model: Any, x: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model(**(inputs(model) if x is None else x))[0]


def test_unregister_leaves_transformers_as_it_was() -> None:
    hf.unregister()
    before, names = methods(), known()
    everything = dict(transformers.PreTrainedModel.__dict__)
    hf.register("positive", 8)
    hf.register("positive", 16)  # twice is as once
    convert(build("bert", TEXT), Recipe("positive", 8))
    changed = {k for k, v in transformers.PreTrainedModel.__dict__.items() if everything.get(k) is not v}
    assert changed == set(METHODS)
    assert "bochner" in known()
    hf.unregister()
    assert methods() == before
    assert known() == names
    model = build("bert", TEXT)
    with pytest.raises(ValueError, match="bochner"):
        model.set_attn_implementation("bochner")
    hf.unregister()  # and once more is harmless
    assert convert(model, Recipe("positive", 8)).model is model  # convert registers again by itself
    assert known() > names


def test_the_settings_of_register_hold_in_every_thread() -> None:
    hf.register("positive", 24)
    model = build("bert", TEXT)
    model.set_attn_implementation("bochner")
    thread = threading.Thread(target=outputs, args=(model,))
    thread.start()
    thread.join()
    found = [phi.num_features for m in model.modules() if (phi := interface._default_maps.get(m)) is not None]
    assert found == [24, 24]


def test_layers_get_different_maps_and_models_the_same() -> None:
    hf.register("positive", 8)
    weights = []
    for _ in range(2):
        model = build("bert", TEXT)  # its attention modules do not know their places
        model.set_attn_implementation("bochner")
        outputs(model)
        weights.append([interface._default_maps[x.attention.self].projection.weight for x in model.encoder.layer])
    assert not torch.equal(weights[0][0], weights[0][1])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_learned_map_is_said_to_be_frozen() -> None:
    with pytest.warns(bochner.BochnerWarning, match=r"frozen.*train=True"):
        hf.register("gmm_prf", 8)
    hf.register("positive", 8)  # nothing to say


@pytest.mark.parametrize("feature_map", ["hedgehog", "elu", "gmm_prf", "calibrated"])
def test_any_map_can_be_registered(feature_map: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hf.register(feature_map, 8)
    model = build("bert", TEXT)
    model.set_attn_implementation("bochner")
    assert outputs(model).isfinite().all()
    hf.register("positive", 8)


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
    piece = getattr(model.model, part)
    batches: Any = texts_as_batches()
    if part == "decoder":
        hidden = torch.randn(2, 50, 32, generator=torch.Generator().manual_seed(0))
        batches = [{"input_ids": b["input_ids"][:, :40], "encoder_hidden_states": hidden} for b in batches]
    # As exact as before, so that only the other part's attention could be wrong.
    convert(piece, Recipe("calibrated", 8, window=60, exact_heads=1.0), batches)
    assert model.config is piece.config
    torch.testing.assert_close(outputs(model, x), before, atol=1e-5, rtol=1e-4)
    revert(piece)
    assert torch.equal(outputs(model, x), before)
    convert(piece, Recipe("calibrated", 8), batches)
    changed = outputs(model, x)
    assert not torch.allclose(changed, before, atol=1e-3)
    names = {layer.name for layer in Conversion.of(model).plan.layers}
    assert names
    assert all(f".{part}." in f".{name}" for name in names)
    # The whole model is saved with the plan of its part, under the names of the whole.
    model.save_pretrained(tmp_path)
    assert not hasattr(model.config, "bochner")
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert torch.equal(outputs(loaded, x), changed)
    assert Conversion.of(loaded).plan == Conversion.of(model).plan
    revert(loaded)
    assert torch.equal(outputs(loaded, x), before)
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
    convert(model.vision_model, Recipe("positive", 16))
    after = outputs(model, x)
    assert not torch.allclose(after, before, atol=1e-3)
    assert model.text_model.config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path)
    loaded = transformers.CLIPModel.from_pretrained(tmp_path).eval()
    assert torch.equal(outputs(loaded, x), after)
    assert loaded.text_model.config._attn_implementation == "sdpa"
    assert torch.equal(outputs(revert(loaded), x), before)
    revert(model)
    with pytest.raises(BochnerError, match=r"made-up inputs.*calibration"):
        convert(model, Recipe("positive", 16))
    assert torch.equal(outputs(model, x), before)


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


def test_a_plan_that_found_no_modules_is_not_silently_softmax() -> None:
    hf.register()
    model = build("bert", TEXT)
    model.config.bochner = {"format": 2, "layers": []}
    model.set_attn_implementation("bochner_converted")
    with pytest.raises(BochnerError, match="has no maps"):
        outputs(model)


def test_switching_by_name_keeps_a_conversion_a_conversion() -> None:
    model = convert(build("bert", TEXT), Recipe("calibrated", 8), texts_as_batches()).model
    linear = outputs(model)
    model.set_attn_implementation("sdpa")
    assert not torch.allclose(outputs(model), linear, atol=1e-3)
    model.set_attn_implementation("bochner")
    assert torch.equal(outputs(model), linear)


def test_a_conversion_saved_in_the_first_format_loads() -> None:
    folder = Path(__file__).parent / "data" / "conversion_format_1"
    hf.register()
    loaded = transformers.AutoModel.from_pretrained(folder).eval()
    (layer,) = Conversion.of(loaded).plan.layers
    assert (layer.window_kind, layer.kinds, layer.train) == ("sliding", ["hybrid", "exact"], False)
    want = load_file(folder / "expected.safetensors")
    out = outputs(loaded, {k: want[k] for k in ("input_ids", "attention_mask")})
    keep = want["attention_mask"].bool()
    torch.testing.assert_close(out[keep], want["output"][keep], atol=1e-5, rtol=1e-4)


WITHOUT = """
import sys
sys.modules["transformers"] = None
import torch, bochner
q = torch.randn(4, 2, 40, 8, generator=torch.Generator().manual_seed(0))
assert bochner.advise(q, q, num_features=(16,), length=64).heads
for use in (
    lambda: bochner.convert(torch.nn.Linear(2, 2)),
    lambda: bochner.advise(torch.nn.Linear(2, 2), ["a text"]),
    lambda: bochner.hf.register(),
    lambda: bochner.hf.RecurrentLayer,
    lambda: bochner.hf.RedrawCallback,
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
