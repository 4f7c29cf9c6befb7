"""Models that mix kinds of layers: what cannot be linear stays as it was, the rest follows its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from bochner.hf.capture import recording  # noqa: E402
from bochner.hf.layer import Call, LinearAttention  # noqa: E402
from bochner.hf.measure import Far  # noqa: E402
from bochner.hf.original import as_before  # noqa: E402
from hf_models import GROUPED, REFUSED, SEQ2SEQ, TEXT, build, inputs, texts_as_batches  # noqa: E402

from bochner import BochnerError, BochnerWarning, convert, kernel_estimate, revert  # noqa: E402
from bochner.hf import RecurrentLayer, layers_of, plan_of  # noqa: E402

TYPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
MIXED: dict[str, dict[str, Any]] = {
    "gemma2": {**GROUPED, **TYPES, "head_dim": 8, "attn_logit_softcapping": None},
    "gemma3_text": {**GROUPED, **TYPES, "head_dim": 8},
    "cohere2": {**GROUPED, **TYPES},
    "olmo3": {**GROUPED, **TYPES},
    "gpt_oss": {**GROUPED, **TYPES, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    "llama4_text": {
        **GROUPED, "head_dim": 8, "attention_chunk_size": 6, "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0], "num_local_experts": 2, "moe_layers": [], "intermediate_size_mlp": 32,
    },
    "modernbert": {**TEXT, "layer_types": ["sliding_attention", "full_attention"], "local_attention": 6},
}  # fmt: skip
CAUSAL = sorted(set(MIXED) - {"modernbert"})
RECIPE: dict[str, Any] = {"feature_map": "positive", "num_features": 16, "window": 5, "sinks": 2, "select": False}


def mixed(family: str, **options: Any) -> Any:
    head = "AutoModel" if family == "modernbert" else "AutoModelForCausalLM"
    model = build(family, MIXED[family], head=head)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(5))
    return convert(model, calibration=texts_as_batches(), **{**RECIPE, "exact_heads": [(1, 1)], **options})


def ids(batch: int = 2, length: int = 24) -> Tensor:
    return torch.randint(4, 50, (batch, length), generator=torch.Generator().manual_seed(3))


def by_the_plan(layer: LinearAttention, call: Call) -> Tensor:
    """Attention of a layer's plan, quadratically."""
    b = call.query.shape[0]
    key, value = (t.repeat_interleave(call.group, 1) for t in (call.key, call.value))
    exact = ((call.query @ key.mT) * call.scale).exp()
    outs = []
    for head, kind in enumerate(layer.plan.kinds):
        far = Far.of(call, **({} if kind == "kernel" else layer.plan.near))
        weights = exact[:, head] * far.allowed[:, 0]
        if kind in ("hybrid", "kernel"):
            g = head // call.group
            place = layer.plan.kv_heads_of(kind).index(g)
            x, y = (t * call.scale**0.5 for t in (call.query[:, head], call.key[:, g]))
            every = len(layer.plan.kv_heads_of(kind))
            spread = [t[:, None].expand(b, every, *t.shape[1:]) for t in (x, y)]
            kernel = kernel_estimate(layer.map_of(kind), *spread)[:, place]
            weights = torch.where(far.far[:, 0], kernel, weights)
        elif kind == "window":
            weights = weights.masked_fill(far.far[:, 0], 0)
        total = weights.sum(-1, keepdim=True)
        if call.sink_logits is not None:
            total = total + call.sink_logits[head].exp()
        outs.append((weights / total.clamp_min(1e-30)) @ value[:, head])
    return torch.stack(outs, dim=1)


@pytest.mark.parametrize("family", sorted(MIXED))
def test_a_mixed_model_equals_the_quadratic_oracle_of_its_plan(family: str) -> None:
    model = mixed(family)
    plan = plan_of(model)
    assert [layer.untouched for layer in plan.layers] == [True, False]
    assert "linear already" in plan.layers[0].reason
    assert plan.layers[0].limit in (4, 6)
    assert plan.layers[0].reason in str(plan)
    layers = layers_of(model)
    x = {"input_ids": ids(), "attention_mask": torch.ones(2, 24, dtype=torch.long)}
    x["attention_mask"][1, -5:] = 0
    with torch.no_grad():
        found = model(**x)[0]
        with recording(model, lambda name, call: by_the_plan(layers[name], call)):
            wanted = model(**x)[0]
        original = revert(model)(**x)[0]
    keep = x["attention_mask"].bool()
    torch.testing.assert_close(found[keep], wanted[keep], atol=2e-4, rtol=1e-3)
    assert (found - original)[keep].abs().max() > 1e-3


@pytest.mark.parametrize("family", CAUSAL)
def test_a_mixed_model_decodes_as_it_computes(family: str) -> None:
    model = mixed(family)
    x = ids()
    with torch.no_grad():
        whole = model(x, use_cache=False).logits
        cache = transformers.DynamicCache(config=model.config)
        pieces = [(0, 9), (9, 10), (10, 11), (11, 20), (20, 24)]
        parts = [model(x[:, a:b], past_key_values=cache).logits for a, b in pieces]
    assert [isinstance(layer, RecurrentLayer) for layer in cache.layers] == [False, True]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", CAUSAL)
def test_a_mixed_model_reads_and_decodes_sequences_padded_on_the_left_as_each_alone(family: str) -> None:
    model = mixed(family)
    x, first = ids(), (5, 2)
    mask = (torch.arange(24)[None, :] >= torch.tensor(first)[:, None]).long()
    places = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        cache, parts = transformers.DynamicCache(config=model.config), []
        for a, b in [(0, 9), *((i, i + 1) for i in range(9, 20)), (20, 24)]:
            how = {"attention_mask": mask[:, :b], "position_ids": places[:, a:b]}
            parts.append(model(x[:, a:b], past_key_values=cache, **how).logits)
        for i, start in enumerate(first):
            alone = model(x[i : i + 1, start:], use_cache=False).logits
            torch.testing.assert_close(torch.cat(parts, dim=1)[i : i + 1, start:], alone, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", sorted(MIXED))
def test_a_mixed_model_is_saved_and_loaded(family: str, tmp_path: Path) -> None:
    model = mixed(family)
    with torch.no_grad():
        before = model(ids())[0]
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path).eval()
        assert torch.equal(again(ids())[0], before)
    assert plan_of(again).to_dict() == plan_of(model).to_dict()


@pytest.mark.parametrize("family", sorted(MIXED))
def test_layers_left_as_they_were_are_so_bit_by_bit(family: str) -> None:
    """The first layer with the second converted; the whole model with the second exact, too."""
    head = "AutoModel" if family == "modernbert" else "AutoModelForCausalLM"
    model = build(family, MIXED[family], head=head)
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():
        x = {"input_ids": ids(), "attention_mask": mask, "output_hidden_states": True}
        before = model(**x)
        convert(model, calibration=texts_as_batches(), exact_below=0, **RECIPE)
        after = model(**x)
        assert torch.equal(after.hidden_states[1], before.hidden_states[1])
        assert (after[0] - before[0]).abs().max() > 1e-3
        convert(revert(model), calibration=texts_as_batches(), **{**RECIPE, "exact_heads": 1.0})
        assert torch.equal(model(**x)[0], before[0])


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text"])
@pytest.mark.parametrize("kind", ["kernel", "window", "hybrid"])
def test_sink_logits_enter_every_kind_of_head(family: str, kind: str) -> None:
    options: dict[str, Any] = {"exact_heads": 0.0}
    if kind == "kernel":
        options |= {"window": None, "sinks": 0}
    elif kind == "window":
        options |= {"feature_map": None}
    model = mixed(family, **options)
    layers = layers_of(model)
    assert plan_of(model).layers[1].kinds == [kind] * 4
    with torch.no_grad():
        found = model(ids())[0]
        with recording(model, lambda name, call: by_the_plan(layers[name], call)):
            wanted = model(ids())[0]
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("pieces", [(1, 2, 4, 9, 10, 11, 20), (6, 7, 20), (2, 12, 13, 20), (20,)])
@pytest.mark.parametrize("window", [2, 5, 40])
def test_sink_logits_beside_pieces_of_padding(window: int, pieces: tuple[int, ...]) -> None:
    """Sequences that begin in a later piece than the first go on as each would alone."""
    layer = mixed("gpt_oss", exact_heads=0.0, window=window).model.layers[1].self_attn.linear_attn.double()
    plan, first = layer.plan, (0, 5, 8)
    draw = torch.Generator().manual_seed(8)
    heads = (plan.num_heads, plan.num_kv_heads, plan.num_kv_heads)
    q, k, v = (torch.randn(3, h, 20, plan.head_dim, generator=draw, dtype=torch.float64) for h in heads)
    sinks = torch.randn(plan.num_heads, generator=draw, dtype=torch.float64)
    padding, cache, rows, i = torch.arange(20) < torch.tensor(first)[:, None], RecurrentLayer(), [], 0
    with torch.no_grad():
        for j in pieces:
            part = (t[:, :, i:j] for t in (q, k, v))
            rows.append(layer(Call(*part, True, padding[:, :j], 0.4, sinks), cache))
            i = j
        for b, start in enumerate(first):
            alone = layer(Call(*(t[b : b + 1, :, start:] for t in (q, k, v)), True, None, 0.4, sinks))
            torch.testing.assert_close(torch.cat(rows, dim=2)[b : b + 1, :, start:], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["t5", "gemma2", "mistral"])
def test_a_model_of_which_nothing_can_be_linear_stays_as_it_was_or_is_refused(family: str) -> None:
    settings, reason = REFUSED[family]
    model = build(family, settings)
    x = inputs(model)
    with torch.no_grad():
        before = model(**x)[0]
        with pytest.raises(BochnerError, match=reason):
            convert(model, "positive", 16, unsupported="raise")
        assert torch.equal(model(**x)[0], before)
        with pytest.warns(BochnerWarning, match=reason):
            convert(model, "positive", 16)
        assert torch.equal(model(**x)[0], before)
    assert all(reason in layer.reason for layer in plan_of(model).layers)


def test_a_plan_cannot_convert_what_must_stay() -> None:
    model = build("cohere2", MIXED["cohere2"])
    plan = plan_of(convert(model, "positive", 8))
    revert(model)
    plan.layers[0].kinds = ["kernel"] * 4
    plan.layers[0].reason = ""
    with pytest.raises(BochnerError, match="linear already"):
        convert(model, plan=plan)


@pytest.mark.parametrize("batch", [1, 2])
def test_packed_sequences_do_not_see_each_other(batch: int) -> None:
    model = build("llama", GROUPED, head="AutoModelForCausalLM")
    convert(model, calibration=texts_as_batches(), exact_heads=[(0, 1)], **RECIPE)
    x = ids(batch, 20)
    positions = torch.cat([torch.arange(8), torch.arange(12)]).expand(batch, -1)
    bounds = torch.tensor([0, 8, 20], dtype=torch.int32)
    with torch.no_grad():
        packed = model(x, position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(x[:, :8], use_cache=False).logits, model(x[:, 8:], use_cache=False).logits], dim=1)
        together = model(x, use_cache=False).logits
        if batch == 1:  # as flash-attention is told
            again = model(x, position_ids=positions, use_cache=False, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds).logits
            assert torch.equal(again, packed)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-4)
    assert (together - alone).abs().max() > 1e-2


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("exact_below", [0, 1000])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.filterwarnings("ignore:The model has .* positions:bochner.BochnerWarning")
def test_bounds_hold_below_the_border_and_in_kept_layers(family: str, exact_below: int, implementation: str) -> None:
    model = build(family, {"llama": GROUPED, **MIXED}[family], head="AutoModelForCausalLM")
    model.set_attn_implementation(implementation)
    recipe = {**RECIPE, "exact_below": exact_below}
    convert(model, calibration=texts_as_batches(), **recipe)
    x = ids(1, 20)
    other = torch.cat([x[:, :8].flip(-1), x[:, 8:]], dim=1)
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    bounds = torch.tensor([0, 8, 20], dtype=torch.int32)
    with torch.no_grad():
        first, second = (model(t, use_cache=False, cu_seq_lens_q=bounds).logits[:, 8:] for t in (x, other))
        both = model(x, position_ids=positions, use_cache=False, cu_seq_lens_q=bounds).logits
        by_positions = model(x, position_ids=positions, use_cache=False).logits
        unpacked = [model(t, use_cache=False).logits[:, 8:] for t in (x, other)]
    assert torch.equal(first, second)
    assert torch.equal(both, by_positions)
    assert (unpacked[0] - unpacked[1]).abs().max() > 1e-2


def test_bounds_that_cannot_be_honoured_are_refused() -> None:
    q, bounds = torch.zeros(1, 2, 8, 4), torch.tensor([0, 3, 8])
    with pytest.raises(BochnerError, match="position_ids"):  # a model that makes no mask
        as_before(torch.nn.Identity(), "sdpa", q, q, q, None, {"cu_seq_lens_q": bounds})


@pytest.mark.parametrize("exact_below", [24, 1000])
@pytest.mark.parametrize("family", ["llama", *CAUSAL])
@pytest.mark.filterwarnings("ignore:The model has .* positions:bochner.BochnerWarning")
def test_a_static_cache_holds_keys_below_the_border(family: str, exact_below: int) -> None:
    model = build(family, {"llama": GROUPED, **MIXED}[family], head="AutoModelForCausalLM")
    model.set_attn_implementation("eager")
    options: dict[str, Any] = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    x = ids(2, 12)
    mask = torch.ones_like(x)
    mask[0, :3] = 0
    original = model.generate(x, attention_mask=mask, **options)
    recipe = {**RECIPE, "exact_below": exact_below}
    convert(model, calibration=texts_as_batches(), **recipe)
    static = model.generate(x, attention_mask=mask, cache_implementation="static", **options)
    assert torch.equal(static, model.generate(x, attention_mask=mask, **options))
    assert exact_below < 1000 or torch.equal(static, original)


def test_a_static_cache_becomes_states() -> None:
    model = build("llama", GROUPED, head="AutoModelForCausalLM")
    convert(model, calibration=texts_as_batches(), exact_heads=[(0, 1)], **RECIPE)
    x = ids(2, 14)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(x)
    dynamic = model.generate(x, attention_mask=mask, **options)
    assert torch.equal(model.generate(x, attention_mask=mask, cache_implementation="static", **options), dynamic)
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    with torch.no_grad():
        parts = [model(x[:, a:b], past_key_values=cache).logits for a, b in ((0, 9), (9, 10), (10, 14))]
        whole = model(x, use_cache=False).logits
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("parts", [["encoder"], ["decoder"], ["cross"], ["encoder", "cross"]])
def test_the_parts_of_an_encoder_decoder_are_converted_separately(parts: list[str]) -> None:
    model = build("bart", SEQ2SEQ, head="AutoModelForSeq2SeqLM")
    data = [{**b, "decoder_input_ids": b["input_ids"][:, :30]} for b in texts_as_batches()]
    convert(model, calibration=data, num_features=16, feature_map="positive", parts=parts)
    for layer in plan_of(model).layers:
        part = "cross" if layer.is_cross else ("decoder" if layer.is_causal else "encoder")
        assert layer.untouched == (part not in parts), layer.name
    x = ids(2, 12)
    options = {"max_new_tokens": 8, "num_beams": 1, "do_sample": False, "forced_eos_token_id": None}
    cached = model.generate(x, attention_mask=torch.ones_like(x), **options)
    plain = model.generate(x, attention_mask=torch.ones_like(x), use_cache=False, **options)
    assert torch.equal(cached, plain)
    revert(model)
    with pytest.raises(BochnerError, match="parts"):
        convert(model, "positive", 8, parts=["middle"])
    with pytest.raises(BochnerError, match="no attention among"):
        convert(build("bert", TEXT), "positive", 8, parts=["decoder"])
