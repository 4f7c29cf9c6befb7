"""`convert`: plans to edit and pass back, exact round trips, a way back, and refusals that change nothing."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_models import GROUPED, REFUSED, SEQ2SEQ, TEXT, build, inputs, texts_as_batches  # noqa: E402

from bochner import BochnerError, Conversion, Recipe, Target, convert, feature_map, linear_attention, revert  # noqa: E402
from bochner.hf import LayerPlan, Plan, Selected, calibrate, discover, layers_of  # noqa: E402
from bochner.hf.attention import LinearAttention  # noqa: E402
from bochner.hf.calibrate import Far, attention_weights  # noqa: E402
from bochner.hf.calls import Call, exact  # noqa: E402
from bochner.hf.fates import Exact, Hybrid, Kernel, Window  # noqa: E402
from bochner.nn import redraw_  # noqa: E402

WINDOW_KINDS = ["sliding", *(["block"] if "window_kind" in inspect.signature(linear_attention).parameters else [])]


def bert() -> Any:
    return build("bert", TEXT)


def outputs(model: Any, x: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model(**(inputs(model) if x is None else x))[0]


def convert_bert(**options: Any) -> Any:
    data, rest = options.pop("data", texts_as_batches()), {k: options.pop(k) for k in ("seed",) if k in options}
    return convert(bert(), Recipe(**{"num_features": 16, **options}), data, **rest).model


def test_all_heads_exact_is_the_original_model() -> None:
    model = bert()
    before = outputs(model)
    convert(model, Recipe(num_features=16, exact_heads=1.0), texts_as_batches())
    keep = inputs(model)["attention_mask"].bool()
    torch.testing.assert_close(outputs(model)[keep], before[keep], atol=1e-5, rtol=1e-4)


def test_more_features_come_closer_to_the_original() -> None:
    errors = []
    for m in (8, 256):
        model = convert_bert(num_features=m)
        errors.append(torch.stack(list(Conversion.of(model).errors(texts_as_batches(2, seed=9)).values())).mean())
    assert errors[1] < 0.6 * errors[0]


def test_a_window_as_long_as_the_sequence_is_exact() -> None:
    model = bert()
    x = texts_as_batches(1)[0]
    before = outputs(model, x)
    convert(model, Recipe(num_features=8, window=64), texts_as_batches())
    torch.testing.assert_close(outputs(model, x), before, atol=1e-4, rtol=1e-3)


def test_revert_restores_the_model_bit_by_bit() -> None:
    model = bert()
    before, keys = outputs(model), set(model.state_dict())
    convert(model, Recipe(num_features=16, window=8, sinks=1), texts_as_batches())
    assert not torch.allclose(outputs(model), before)
    assert set(model.state_dict()) > keys
    revert(model)
    assert torch.equal(outputs(model), before)
    assert set(model.state_dict()) == keys
    assert not {"quantization_config", "attn_implementation"} & model.config.to_dict().keys()
    with pytest.raises(BochnerError, match="not converted"):
        revert(model)


def test_revert_gives_back_the_kind_of_softmax_there_was() -> None:
    model = bert()
    model.set_attn_implementation("eager")
    convert(model, Recipe(num_features=16), texts_as_batches())
    revert(model)
    assert model.config._attn_implementation == "eager"


def test_converting_twice_is_refused() -> None:
    model = convert_bert()
    for spec in (Recipe(), Target(), Conversion.of(model).plan):
        with pytest.raises(BochnerError, match="converted already"):
            convert(model, spec, texts_as_batches())


def test_one_seed_gives_one_model() -> None:
    a, b, c = convert_bert(seed=3), convert_bert(seed=3), convert_bert(seed=4)
    assert torch.equal(outputs(a), outputs(b))
    assert not torch.allclose(outputs(a), outputs(c))


def test_a_plan_is_printed_saved_edited_and_passed_back(tmp_path: Path) -> None:
    model = convert_bert(window=8, sinks=1, exact_heads=0.25)
    plan = Conversion.of(model).plan
    assert plan.count("exact") == 2
    assert "window 8, sinks 1" in str(plan)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    again = convert(bert(), loaded, texts_as_batches()).model
    assert torch.equal(outputs(again), outputs(model))
    loaded.layers[0].fates = [Exact()] * 4
    edited = convert(bert(), loaded, texts_as_batches()).model
    assert Conversion.of(edited).plan.layers[0].fates == [Exact()] * 4
    assert not torch.allclose(outputs(edited), outputs(model))


@pytest.mark.parametrize("heads", [("AutoModel", "AutoModelForMaskedLM"), ("AutoModelForMaskedLM", "AutoModel")])
def test_a_plan_and_a_saved_conversion_fit_with_and_without_a_head(heads: tuple[str, str], tmp_path: Path) -> None:
    first, second = (build("bert", TEXT, head=head) for head in heads)
    second.base_model.load_state_dict(first.base_model.state_dict(), strict=False)
    conversion = convert(first, Recipe("landmark", 16, window=4), texts_as_batches())
    conversion.save_pretrained(tmp_path)
    x = inputs(first)
    for spec in (conversion.plan, str(tmp_path)):
        made = convert(second, spec)
        assert set(made.plan.maps) == set(layers_of(second))
        assert torch.equal(outputs(second.base_model, x), outputs(first.base_model, x))
        made.revert()


def test_files_that_are_no_saved_conversion_are_refused(tmp_path: Path) -> None:
    model = bert()
    conversion = convert(model, Recipe("positive", 8))
    conversion.save_pretrained(tmp_path / "maps")
    model.save_pretrained(tmp_path / "whole")
    with pytest.raises(BochnerError, match="converted already"):
        Conversion.from_pretrained(model, tmp_path / "maps")
    revert(model)
    with pytest.raises(BochnerError, match=r"no plan.json.*its own from_pretrained"):
        convert(model, tmp_path / "whole")
    (tmp_path / "maps" / "maps.safetensors").write_bytes(b"123")
    with pytest.raises(BochnerError, match="No maps could be read"):
        convert(model, tmp_path / "maps")
    assert not [name for name in model.state_dict() if "linear_attn" in name]


def test_the_plan_of_another_model_is_refused() -> None:
    plan = Conversion.of(convert_bert()).plan
    model = build("llama", GROUPED)
    before = outputs(model)
    with pytest.raises(BochnerError, match="not an attention module"):
        convert(model, plan, texts_as_batches())
    assert torch.equal(outputs(model), before)


def test_a_broken_plan_is_refused(tmp_path: Path) -> None:
    layer = {"name": "a", "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "value_dim": 4}
    with pytest.raises(BochnerError, match="must be 1 fates"):
        Plan([LayerPlan(**layer, fates=[Kernel(), Kernel()])])
    with pytest.raises(BochnerError, match="neither 'window' nor 'sinks'"):
        Hybrid()
    with pytest.raises(BochnerError, match="must be 1 fates"):
        Plan([LayerPlan(**layer, fates=["kernel"])])
    (tmp_path / "p.json").write_text("[]")
    with pytest.raises(BochnerError, match="not a plan"):
        Plan.load(tmp_path / "p.json")
    (tmp_path / "p.json").write_text(json.dumps({"format": 99, "layers": []}))
    with pytest.raises(BochnerError, match="format 99"):
        Plan.load(tmp_path / "p.json")


def test_the_exact_heads_are_those_that_look_far_away() -> None:
    model = bert()
    with torch.no_grad():  # head 2 of layer 1 gets sharp, the others stay diffuse
        model.encoder.layer[1].attention.self.query.weight[16:24] *= 40
    convert(model, Recipe(num_features=16, window=4, exact_heads=0.125), texts_as_batches())
    peaks: list[tuple[float, int, int]] = []
    for i, layer in enumerate(Conversion.of(model).plan.layers):
        peaks += [(score, i, h) for h, score in enumerate(layer.scores or [])]
    assert max(peaks)[1:] == (1, 2)
    assert Conversion.of(model).plan.layers[1].fates[2] == Exact()
    assert Conversion.of(model).plan.count("exact") == 1


def test_the_scores_of_a_language_model_add_up_to_what_exactness_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    # The gradient integrated along the gates is the difference of the losses at its ends.
    monkeypatch.setattr(calibrate, "GATES", tuple((i + 0.5) / 12 for i in range(12)))
    model = build("llama", GROUPED, head="AutoModelForCausalLM", std=0.15)
    convert(model, Recipe(None, window=4, sinks=1, exact_heads=0.25), texts_as_batches())
    plan = Conversion.of(model).plan
    assert plan.count("exact") == 2
    revert(model)
    total = sum(score for layer in plan.layers for score in layer.scores or [])
    tokens = torch.cat([b["input_ids"].flatten() for b in texts_as_batches()])
    losses = []
    for exact_heads in (0.0, 1.0):
        convert(model, Recipe(None, window=4, sinks=1, exact_heads=exact_heads), texts_as_batches())
        found = []
        for i in range(3):
            a, b = tokens[240 * i : 240 * (i + 1)].split(120)
            ids = torch.cat([a, b, a])[None]
            with torch.no_grad():
                logits = model(ids, use_cache=False).logits[:, -120:-1]
            found.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, -119:]))
        losses.append(torch.stack(found).mean().item())
        revert(model)
    assert total == pytest.approx(losses[0] - losses[1], rel=0.05)
    best = max(range(4), key=lambda i: [s for x in plan.layers for s in x.scores or []][i])
    assert plan.layers[best // 2].fates[best % 2] == Exact()


def test_a_fraction_of_the_key_heads_stays_exact() -> None:
    settings = {**GROUPED, "num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 64}
    model = build("llama", settings, head="AutoModelForCausalLM", std=0.4)
    convert(model, Recipe(None, window=4, exact_heads=2 / 16), texts_as_batches())
    plan = Conversion.of(model).plan
    assert plan.count("exact") == 4  # query heads, of two key heads
    assert sum(len(layer.heads_of("exact")) for layer in plan.layers) == 2


def test_a_plan_that_brings_fitted_maps_needs_no_data() -> None:
    first, second = build("bert", TEXT), build("bert", TEXT)
    plan = convert(first, Recipe("landmark", 16, window=4), texts_as_batches()).plan
    convert(second, plan)
    assert torch.equal(outputs(second), outputs(first))
    plan.maps.clear()
    with pytest.raises(BochnerError, match="'landmark' needs 'data'"):
        convert(build("bert", TEXT), plan)


def test_a_plan_of_selected_keys_without_its_scores_is_refused() -> None:
    model = build("llama", GROUPED, head="AutoModelForCausalLM")
    plan = Plan.of(discover(model), "llama", fate=lambda shape: Selected(window=8, budget=8, width=32))
    for data in (None, texts_as_batches()):
        with pytest.raises(BochnerError, match=r"brings no maps .* fit_selected"):
            convert(model, plan, data)
    assert not [name for name in model.state_dict() if "linear_attn" in name]


def test_windows_alone_of_an_encoder_are_ranked_by_what_they_leave_out() -> None:
    model = build("bert", TEXT)
    convert(model, Recipe(None, window=4, exact_heads=2 / 8), texts_as_batches())
    plan = Conversion.of(model).plan
    scores = sorted((s, fate == Exact()) for x in plan.layers for s, fate in zip(x.scores, x.fates, strict=True))
    assert [exact for _, exact in scores] == [False] * 6 + [True] * 2


def test_redrawing_is_the_same_on_every_rank_and_keeps_calibration() -> None:
    a, b = (convert_bert(feature_map="calibrated") for _ in range(2))
    before = {n: x.map_norm["kernel"].phi.basis_query.clone() for n, x in layers_of(a).items()}
    first = outputs(a)
    redraw_(a, 7)
    assert not torch.allclose(outputs(a), first)
    redraw_(b, 3)
    redraw_(b, 7)
    assert torch.equal(outputs(a), outputs(b))
    for name, layer in layers_of(a).items():
        assert torch.equal(layer.map_norm["kernel"].phi.basis_query, before[name])
    weights = [x.map_norm["kernel"].phi.projection.weight for x in layers_of(a).values()]
    assert not torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("window_kind", WINDOW_KINDS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_far_pairs_are_those_that_a_window_head_does_not_see(window_kind: str, is_causal: bool) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 23, 8, generator=g) for _ in range(3))
    padding = torch.zeros(2, 23, dtype=torch.bool)
    padding[1, :3] = True
    call = Call(q, k, v, is_causal, padding, 0.5)
    near: dict[str, Any] = {"window": 4, "sinks": 2, "window_kind": window_kind}
    far = Far.of(call, **near)
    seen = attention_weights(call, far.allowed & ~far.far) @ v
    out = LinearAttention(LayerPlan("a", 2, 2, 8, 8, [Window(**near)] * 2))(call)
    rows = ~padding[:, None, :, None]
    torch.testing.assert_close(out * rows, seen * rows, atol=1e-5, rtol=1e-4)
    assert 0 < far.far.sum() < far.allowed.sum()
    some = Far.of(call, **near, rows=torch.tensor([0, 7, 22]))
    assert torch.equal(some.allowed, far.allowed[..., [0, 7, 22], :])
    assert torch.equal(some.far, far.far[..., [0, 7, 22], :])


def test_key_heads_of_different_fates_each_get_their_own() -> None:
    model = build("llama", GROUPED)
    x = texts_as_batches(1)[0]
    convert(model, Recipe(num_features=16, window=6, exact_heads=[(0, 0)]), texts_as_batches())
    layer = layers_of(model)["layers.0.self_attn"]
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 30, 8, generator=g) for h in (4, 2, 2))
    call = Call(q, k, v, True, None, 0.3)
    out, truth = layer(call), exact(call)
    torch.testing.assert_close(out[:, :2], truth[:, :2])
    assert not torch.allclose(out[:, 2:], truth[:, 2:], atol=1e-3)
    alone = layer.parts["hybrid"](call._replace(query=q[:, 2:], key=k[:, 1:], value=v[:, 1:]))
    torch.testing.assert_close(out[:, 2:], alone)
    assert outputs(model, x).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_maps_stay_in_full_precision(dtype: torch.dtype) -> None:
    model = convert_bert(window=8)
    model.to(dtype)
    for layer in layers_of(model).values():
        assert all(b.dtype == torch.float32 for b in layer.buffers() if b.is_floating_point())
    q, k, v = (torch.randn(1, 4, 20, 8).to(dtype) for _ in range(3))
    layer = next(iter(layers_of(model).values()))
    out = layer(Call(q, k, v, False, None, 0.3))
    full = layer(Call(q.float(), k.float(), v.float(), False, None, 0.3))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), full, atol=2e-2, rtol=2e-2)


SCRIPT = """
import sys, torch, transformers
folders = sys.argv[1:]
try:
    transformers.AutoModel.from_pretrained(folders[0])
except ValueError as error:
    assert "bochner" in str(error)
else:
    raise SystemExit("a conversion was loaded as softmax")
import bochner.hf.interface
for folder, head in zip(folders, (transformers.AutoModel, transformers.AutoModelForCausalLM)):
    model = head.from_pretrained(folder).eval()
    with torch.no_grad():
        out = model(**torch.load(folder + "/inputs.pt", weights_only=True))[0]
    torch.save(out, folder + "/outputs.pt")
"""


def test_saved_in_one_process_and_loaded_in_another_is_bit_identical(tmp_path: Path) -> None:
    """And a process that does not know bochner raises instead of silently giving softmax."""
    want = {}
    for family, settings, head in (("bert", TEXT, "AutoModel"), ("llama", GROUPED, "AutoModelForCausalLM")):
        model = build(family, settings, head=head)
        convert(model, Recipe(num_features=16, window=6, sinks=1, exact_heads=0.25), texts_as_batches())
        folder = tmp_path / family
        want[folder] = outputs(model, inputs(model))
        model.save_pretrained(folder)
        assert list(folder.glob("*.safetensors"))
        assert not list(folder.glob("*.bin"))
        torch.save(inputs(model), folder / "inputs.pt")
    done = subprocess.run([sys.executable, "-c", SCRIPT, *map(str, want)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for folder, out in want.items():
        assert torch.equal(torch.load(folder / "outputs.pt", weights_only=True), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loading_in_any_precision_keeps_the_maps(tmp_path: Path, dtype: torch.dtype) -> None:
    model = convert_bert(window=6)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path, dtype=dtype).eval()
    want, got = layers_of(model), layers_of(loaded)
    for name, layer in want.items():
        for key, value in layer.state_dict().items():
            assert torch.equal(got[name].state_dict()[key], value), key


def test_a_saved_base_model_loads_under_a_head(tmp_path: Path) -> None:
    model = convert_bert()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    x = inputs(model)
    with torch.no_grad():
        hidden = loaded.bert(**x)[0]
    assert torch.equal(hidden, outputs(model, x))


@pytest.mark.parametrize("change", [{"num_features": 8}, {"feature_map": "optimal"}])
def test_a_checkpoint_of_another_map_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    convert_bert(window=6).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for layer in config["quantization_config"]["plan"]["layers"]:
        layer["fates"][0].update(change)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BochnerError, match="not those of the plan"):
        transformers.AutoModel.from_pretrained(tmp_path)


def test_a_model_that_was_not_converted_loads_as_before(tmp_path: Path) -> None:
    model = bert()
    model.save_pretrained(tmp_path)
    loaded, info = transformers.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(outputs(loaded.eval()), outputs(model))


def test_an_encoder_decoder_is_saved_and_loaded(tmp_path: Path) -> None:
    model = build("bart", SEQ2SEQ)
    batches = [{**b, "decoder_input_ids": b["input_ids"][:, :30]} for b in texts_as_batches()]
    convert(model, Recipe(num_features=16, window=6), batches)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert torch.equal(outputs(loaded), outputs(model))


def test_an_encoder_decoder_converts_its_cross_attention() -> None:
    model = build("bart", SEQ2SEQ)
    batches = [{**b, "decoder_input_ids": b["input_ids"][:, :30]} for b in texts_as_batches()]
    convert(model, Recipe(num_features=16, window=6, sinks=1), batches)
    plan = Conversion.of(model).plan
    kinds = {layer.is_cross: {fate.name for fate in layer.fates} for layer in plan.layers}
    assert kinds == {False: {"hybrid"}, True: {"kernel"}}
    assert outputs(model).isfinite().all()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no calibration": ({"data": None, "feature_map": "landmark"}, "needs 'data'"),
    "empty calibration": ({"data": []}, "empty"),
    "little calibration": ({"data": texts_as_batches(1, 1, 8)}, "Too little calibration"),
    "texts without tokenizer": ({"data": ["a text"]}, "tokenizer"),
    "numbers": ({"data": [1, 2]}, "got a list of int: name them"),
    "unknown map": ({"feature_map": "wrong"}, "Unknown feature map"),
    "map instance": ({"feature_map": feature_map("positive", dim=8)}, "must be a name"),
    "features": ({"num_features": 0}, "num_features"),
    "window": ({"window": -1}, "window"),
    "sinks": ({"sinks": -1}, "sinks"),
    "fraction": ({"exact_heads": 1.5}, "fraction"),
    "word": ({"exact_heads": "some"}, "fraction"),
    "head": ({"exact_heads": [(9, 9)]}, "no key head"),
    "nothing": ({"feature_map": None}, "nothing else"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_input_is_one_clear_sentence_and_leaves_the_model_untouched(case: str) -> None:
    options, message = BAD[case]
    data = options.get("data", texts_as_batches())
    options = {k: v for k, v in options.items() if k != "data"}
    model = bert()
    before, keys = outputs(model), set(model.state_dict())
    with pytest.raises(BochnerError, match=message):
        convert(model, Recipe(**{"num_features": 16, **options}), data)
    assert torch.equal(outputs(model), before)
    assert set(model.state_dict()) == keys


@pytest.mark.parametrize("family", ["deberta", "bloom"])
def test_a_model_that_cannot_be_converted_is_refused_and_untouched(family: str) -> None:
    settings, reason = REFUSED[family]
    model = build(family, settings)
    x = inputs(model)
    before = outputs(model, x)
    with pytest.raises(BochnerError, match=reason):
        convert(model, Recipe("positive", 16))
    assert torch.equal(outputs(model, x), before)


def test_things_that_are_no_models_are_refused() -> None:
    with pytest.raises(BochnerError, match="transformers model"):
        convert("bert")
    with pytest.raises(BochnerError, match="transformers model"):
        convert(torch.nn.Linear(2, 2), Recipe("positive"))
    with torch.device("meta"):
        model = transformers.BertModel(transformers.BertConfig(**TEXT))
    with pytest.raises(BochnerError, match="meta"):
        convert(model, Recipe("positive", 16))


def test_heads_of_alternating_fates_come_out_in_the_order_of_the_model() -> None:
    layer = LinearAttention(LayerPlan("a", 8, 4, 8, 8, [Kernel("positive", 16), Exact()] * 2))
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 12, 8, generator=g) for h in (8, 4, 4))
    call = Call(q, k, v, False, None, 0.3)
    same = (layer(call) - exact(call)).abs().amax((0, 2, 3)) < 1e-5
    assert same.tolist() == [False, False, True, True] * 2
