"""Heads that select their keys, in transformers: decoding, saving, refusals, the fit, and the search for memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")
from hf_models import DECODERS, ENCODERS, SEQ2SEQ, build, whole_and_pieces  # noqa: E402
from test_hf_selected import oracle  # noqa: E402

from bochner import BochnerError, Conversion, Distillation, Plan, Recipe, Target, convert, revert, search  # noqa: E402
from bochner.hf import Selected, cache_bytes, discover, fit_selected, selected_fit, selected_heads  # noqa: E402
from bochner.hf.calls import Call  # noqa: E402
from bochner.hf.fates import EXACT  # noqa: E402
from bochner.hf.interface import attached, layers_of  # noqa: E402
from bochner.hf.observe import frozen, recording  # noqa: E402
from bochner.hf.plan import Fitted, LayerPlan  # noqa: E402
from bochner.hf.search import options  # noqa: E402
from bochner.hf.search import selected as search_selected  # noqa: E402
from bochner.hf.selected import SelectedKeys, SelectedState  # noqa: E402
from bochner.hf.selected_fit import fit_scores, passages_of  # noqa: E402

FAMILIES = ["llama", "qwen2", "gpt_neox", "gpt2"]


def ids(n: int, batch: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(4, 50, (batch, n), generator=torch.Generator().manual_seed(seed))


def decoder(family: str = "llama") -> Any:
    return build(family, DECODERS[family], head="AutoModelForCausalLM")


def plan_for(model: Any, **settings: Any) -> Plan:
    return fit_selected(model, [{"input_ids": ids(400)}], **{"share": 0.3, "length": 80, "window": 8, **settings})


def converted(family: str = "llama", **settings: Any) -> Any:
    model = decoder(family)
    return convert(model, plan_for(model, **settings)).model


def make_heads(fates: list[Any], width: int = 12, d: int = 8) -> selected_heads.SelectedHeads:
    layer = LayerPlan("a", 3 * len(fates), len(fates), d, d, fates, is_causal=True)
    part = fates[0].build(layer.check(), range(len(fates)), 0)
    part.weights.copy_(torch.randn(part.weights.shape, generator=torch.Generator().manual_seed(1)))
    return part


def random_call(g: int = 2, n: int = 60, width: int = 12, d: int = 8) -> Call:
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, d, generator=made) for heads in (3 * g, g, g))
    return Call(q, k, v, True, None, 0.5, hidden=torch.randn(2, n, width, generator=made))


# The fate


def check_oracle() -> None:
    """The module's rows are those of the keys with the highest scores, replayed one by one."""
    part = make_heads([Selected(8, 4, budget, "int8", 12) for budget in (5, 20)])
    call = random_call()
    call = call._replace(query=call.query.double(), key=call.key.double(), value=call.value.double())
    h = call.hidden * call.hidden.square().mean(-1, keepdim=True).rsqrt()
    worth = torch.cat([h, h.abs(), torch.ones_like(h[..., :1])], -1) @ part.weights.T
    want = oracle(SelectedKeys(8, (5, 20), 4, "int8"), *call[:3], worth.mT, 0.5)
    torch.testing.assert_close(part(call), want)


def test_a_basis_that_changes_is_used_from_then_on() -> None:
    fates, call = [Selected(8, 4, 5, "int8", 12)] * 2, random_call()
    part, fresh = make_heads(fates), make_heads(fates)
    before = part(call)
    for x in (part, fresh):
        x.keys.copy_(torch.linalg.qr(torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(3))).Q)
    assert not torch.equal(part(call), before)
    assert torch.equal(part(call), fresh(call))


def check_budgets() -> None:
    """One threshold: the keys above it are as many as the share says, and give each head its own number."""
    model = decoder()
    names = list(discover(model))
    fitted = fit_scores(model, names, passages_of(model, ids(400)[0]), 8, say=lambda text: None)
    plan = fitted.plan(Plan.of(discover(model), "llama"), 0.25, "int8", 1008)
    every = torch.cat([fitted.layers[name].found for name in names])
    border = every.flatten().sort(descending=True).values[round(0.25 * every.numel()) - 1]
    want = [round((row >= border).float().mean().item() * 1000) for row in every]
    assert [fate.budget for layer in plan.layers for fate in layer.fates] == want
    assert len(set(want)) > 1


def check_quality() -> None:
    """Fitted scores lose less than scores that are the other way round."""
    model = decoder()
    x = ids(80, 3, seed=5)
    with torch.no_grad():
        before = model(x).logits
        found = []
        for sign in (1, -1):
            plan = plan_for(model, precision="int8")
            for fitted in plan.maps.values():
                for name, tensor in fitted.tensors.items():
                    if name.endswith("weights"):
                        tensor *= sign
            convert(model, plan)
            found.append((model(x, use_cache=False).logits - before).square().mean().item())
            revert(model)
    assert found[0] < 0.9 * found[1]


def check_precisions() -> None:
    """A layer that holds most of what coarse keys cost has keys of 8 bits."""
    model = decoder()
    names = list(discover(model))
    fitted = fit_scores(model, names, passages_of(model, ids(400)[0]), 8, say=lambda text: None)
    costs = dict(zip(names, (90.0, *[1.0] * len(names)), strict=False))
    fitted.layers = {name: x._replace(lost=costs[name] / len(names)) for name, x in fitted.layers.items()}
    fitted.layers |= {f"other {i}": fitted.layers[names[-1]] for i in range(3)}
    plan = fitted.plan(Plan.of(discover(model), "llama"), 0.25, "int4", 1008)
    stored = [fate.precision for layer in plan.layers for fate in layer.fates]
    assert stored == ["int8"] * 2 + ["int4"] * (len(stored) - 2)


@pytest.mark.parametrize(("family", "length", "starts"), [("llama", 400, [0, 86, 172, 258]), ("gpt2", 400, [0] * 4)])
def test_passages_lie_at_places_from_all_over_the_length_where_positions_rotate(
    family: str, length: int, starts: list[int]
) -> None:
    """Rotated keys far from the places that a basis was fitted to would be rounded badly."""
    model = decoder(family)
    found = []

    def look(_: Any, args: Any, given: dict[str, Any]) -> None:
        place = given.get("position_ids")
        assert place is None or torch.equal(place[0] - place[0, 0], torch.arange(given["input_ids"].shape[1]))
        found.append(0 if place is None else int(place[0, 0]))

    hook = model.base_model.register_forward_pre_hook(look, with_kwargs=True)
    names, passages = list(discover(model)), list(ids(284).view(4, 1, 71))
    found.clear()
    far = fit_scores(model, names, passages, 8, length=length, say=lambda text: None)
    hook.remove()
    assert found == starts
    near = fit_scores(model, names, passages, 8, say=lambda text: None)
    moved = [not torch.allclose(far.layers[n].basis.centre, near.layers[n].basis.centre, atol=1e-4) for n in names]
    same = [torch.allclose(far.layers[n].found, near.layers[n].found, atol=1e-2) for n in names]
    assert all(moved) == (family == "llama")
    assert all(same), "attention sees distances alone, so the scores are the same"


CHECKS = {"oracle": check_oracle, "budgets": check_budgets, "quality": check_quality, "precisions": check_precisions}


@pytest.mark.parametrize("name", CHECKS)
def test_what_is_held_is_what_the_scores_say(name: str) -> None:
    CHECKS[name]()


def reverse_scores(patch: Any) -> None:
    real = selected_heads.scores
    patch.setattr(selected_heads, "scores", lambda h, w: -real(h, w))


def store_all_layers_alike(patch: Any) -> None:
    patch.setattr(selected_fit, "MUCH", float("inf"))


def ignore_the_threshold(patch: Any) -> None:
    def alike(found: Any, share: float, length: int, window: int) -> Any:
        return [(round(share * (length - window)),) * len(layer) for layer in found]

    patch.setattr(selected_fit, "budgets", alike)


def drop_sinks(patch: Any) -> None:
    patch.setattr(SelectedState, "_add_sinks", lambda self, rows, position: None)


def fit_to_the_wrong_end(patch: Any) -> None:
    real = selected_fit.logarithm
    patch.setattr(selected_fit, "logarithm", lambda damage: -real(damage))


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (reverse_scores, check_oracle),
        (drop_sinks, check_oracle),
        (ignore_the_threshold, check_budgets),
        (store_all_layers_alike, check_precisions),
        (fit_to_the_wrong_end, check_quality),
    ],
)
def test_a_planted_fault_is_noticed(fault: Callable[[Any], None], check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counted_bytes_are_those_of_the_tensors(precision: str, dtype: torch.dtype) -> None:
    model = converted(precision=precision).to(dtype)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids(50), past_key_values=cache)
    counted = Conversion.of(model).plan.cache_bytes(80, element_size=dtype.itemsize)
    assert 0 <= counted - cache_bytes(cache) <= 4 * 18  # those of a layer are counted for each of four heads


# In models


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_give_what_the_whole_text_gives(family: str) -> None:
    model = converted(family).double()  # in float32 a step next to the border of two float16 numbers falls either way
    cache = transformers.DynamicCache(config=model.config)
    whole, parts = whole_and_pieces(model, ids(60, 2, seed=3), [17, 18, 19, 40], cache)
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)
    assert not torch.equal(revert(model)(ids(60, 2, seed=3)).logits, whole)


def test_a_cache_goes_from_one_mode_to_another() -> None:
    model, x = converted().double(), ids(60, 2, seed=3)
    want = model(x, use_cache=False).logits.detach()
    modes = (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.enable_grad)
    cache, at = transformers.DynamicCache(config=model.config), 0
    for n, mode in zip((20, 1, 1, 30), modes, strict=True):
        with mode():
            got = model(x[:, at : at + n], past_key_values=cache).logits
        torch.testing.assert_close(got.detach(), want[:, at : at + n], atol=1e-4, rtol=1e-4)
        cache, at = copy.deepcopy(cache), at + n
        cache.reorder_cache(torch.tensor([0, 1]))


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_greedy_generation_is_recomputation(precision: str) -> None:
    model = converted(precision=precision)
    prompt = ids(40, 2, seed=4)
    got = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)
    want = prompt
    with torch.no_grad():
        for _ in range(12):
            best = model(want, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            want = torch.cat([want, best], dim=1)
    assert torch.equal(got, want)


def test_padding_in_front_and_beams_change_nothing() -> None:
    model = converted()
    prompt = ids(40, 2, seed=4)
    padded = torch.cat([torch.zeros(2, 9, dtype=torch.long), prompt], dim=1)
    padded[0] = torch.cat([ids(9, seed=8)[0], prompt[0]])
    mask = (padded != 0).long()
    for how in ({}, {"num_beams": 3}):
        asked = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, **how}
        together = model.generate(padded, attention_mask=mask, **asked)
        assert torch.equal(together[1:, 49:], model.generate(prompt[1:], **asked)[:, 40:])
        assert torch.equal(together[:1], model.generate(padded[:1], **asked))


@pytest.mark.parametrize("by_transformers", [False, True])
def test_saved_and_loaded_to_the_bit(by_transformers: bool, tmp_path: Path) -> None:
    model = converted()
    x = ids(60, 2, seed=3)
    with torch.no_grad():
        want = model(x).logits
    if by_transformers:
        model.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    else:
        Conversion.of(model).save_pretrained(tmp_path)
        loaded = Conversion.from_pretrained(decoder(), tmp_path).model
    with torch.no_grad():
        assert torch.equal(loaded(x).logits, want)


def test_heads_beside_exact_ones_select_as_before() -> None:
    model = decoder()
    plan = plan_for(model)
    want = plan.layers[0].fates[1]
    plan.layers[0].fates = [EXACT, want]
    tensors = plan.maps[plan.layers[0].name].tensors
    plan.maps[plan.layers[0].name] = Fitted([EXACT, want], {name: x[1:] for name, x in tensors.items()})
    made = convert(model, plan).plan
    assert str(made).splitlines()[1].endswith(f"ES  window 8, sinks 4, int4, older keys {want.budget}")
    assert Plan.from_dict(made.to_dict()) == made
    cache = transformers.DynamicCache(config=model.config)
    whole, parts = whole_and_pieces(model, ids(60, 2, seed=3), [17, 18, 40], cache)
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)


def test_bfloat16_is_near_float32() -> None:
    model = converted()
    x = ids(60, 2, seed=3)
    with torch.no_grad():
        want = model(x).logits
        got = model.to(torch.bfloat16)(x).logits.float()
    assert (got - want).norm() < 0.05 * want.norm()


# Refusals


def test_training_is_refused_in_one_sentence() -> None:
    model = converted()
    with pytest.raises(BochnerError, match=r"for inference and have no gradient"):
        model(ids(30), labels=ids(30)).loss.backward()
    plan = plan_for(decoder())
    with pytest.raises(BochnerError, match="is to be trained"):
        replace(plan.layers[0], trainable=True).check()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"is_causal": False}, "self-attention of a decoder"),
        ({"is_cross": True}, "self-attention of a decoder"),
        ({"head_dim": 7, "value_dim": 7}, "use precision='int8'"),
        ({"fates": [Selected(8)] * 2}, "no 'width'"),
    ],
)
def test_layers_that_cannot_select_are_refused(changed: dict[str, Any], words: str) -> None:
    layer = LayerPlan("a", 4, 2, 8, 8, [Selected(8, width=12)] * 2, is_causal=True).check()
    with pytest.raises(BochnerError, match=words):
        replace(layer, **changed).check()


@pytest.mark.parametrize("model", ["bert", "bart"])
def test_models_that_are_no_decoders_are_refused(model: str) -> None:
    made = build(model, ENCODERS["bert"] if model == "bert" else SEQ2SEQ)
    with pytest.raises(BochnerError, match="no decoder"):
        fit_selected(made, [{"input_ids": ids(48)}])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"window": 0}, "'window'"),
        ({"budget": -1}, "'budget'"),
        ({"precision": "int3"}, "precision 'int3'"),
    ],
)
def test_mistakes_get_a_sentence(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(BochnerError, match=words):
        Selected(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"share": "a quarter"}, "'share'"),
        ({"share": 1.5}, "'share'"),
        ({"length": -5}, "'length'"),
        ({"length": 3.5}, "'length'"),
        ({"window": 0}, "'window'"),
        ({"sinks": 1000}, "'sinks' must be at most 25"),
        ({"precision": "int3"}, "precision 'int3'"),
    ],
)
def test_mistakes_in_a_fit_are_told_before_it(
    settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selected_fit, "fit_scores", None)
    with pytest.raises(BochnerError, match=words):
        plan_for(decoder(), **settings)


# The fit


def test_gradients_are_taken_half_way_to_sinks_and_windows_alone() -> None:
    n, window, sinks = 150, 8, 2  # more rows than windows take at once
    model, x = decoder().double(), ids(n)
    row, column = torch.arange(n)[:, None], torch.arange(n)
    outputs: dict[str, Tensor] = {}

    def halfway(name: str, call: Call) -> Tensor:
        k, v = (t.repeat_interleave(call.group, 1) for t in (call.key, call.value))
        logits = (call.query @ k.mT * call.scale).masked_fill(column > row, -torch.inf)
        near = logits.masked_fill((row - column >= window) & (column >= sinks), -torch.inf)
        out = (0.5 * logits.softmax(-1) + 0.5 * near.softmax(-1)) @ v
        outputs[name] = out if out.requires_grad else out.requires_grad_()
        out.retain_grad()
        return out

    with frozen(model), recording(model, halfway):
        logits = model(x, use_cache=False).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits, x[0, 1:], reduction="sum").backward()
    with frozen(model):
        for name, (_, gradient) in selected_fit._calls(model, list(outputs), x, 0, window, sinks):
            torch.testing.assert_close(gradient, outputs[name].grad, atol=1e-6, rtol=1e-4)


# The search


def texts() -> list[dict[str, Tensor]]:
    return [{"input_ids": piece[None]} for piece in ids(2400)[0].split(400)]


def test_the_search_fills_the_memory_that_is_given() -> None:
    model = decoder()
    conversion = convert(model, Target(memory=0.3, length=200), texts())
    report = conversion.report
    assert report.frontier[report.chosen].quality is report.verified.quality, "one choice is measured once"
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids(200), past_key_values=cache)
    share = cache_bytes(cache) / (200 * 2 * 4 * 8 * 4)
    assert 0.28 < share <= 0.3
    text = str(conversion.report)
    assert "in bfloat16" in text
    assert "4 selected: int4" in text
    parts = conversion.report.ablations
    assert list(parts) == ["windows alone", "no attention"]
    assert f"windows alone {parts['windows alone']:.2%}, no attention {parts['no attention']:.2%}" in text
    found = {layer.fates[0].precision for point in conversion.report.frontier for layer in point.plan.layers}
    assert found <= {"int4", "int8"}


def test_ablations_are_the_model_without_older_keys_and_without_attention() -> None:
    model, x = decoder(), ids(60)
    names = list(discover(model))
    fitted = fit_scores(model, names, passages_of(model, ids(400)[0]), 8, say=lambda text: None)
    plan = fitted.plan(Plan.of(discover(model), "llama"), 0.25, "int4", 200)

    def look(changed: Any) -> Any:
        with torch.no_grad():
            return SimpleNamespace(quality=SimpleNamespace(retained=changed(x, use_cache=False).logits))

    space = SimpleNamespace(model=model, build=fitted.build)
    problem = SimpleNamespace(space=space, texts=SimpleNamespace(look=look), say=lambda text: None)
    found = search_selected.ablations(problem, plan, fitted.build(plan))
    small = fitted.plan(Plan.of(discover(model), "llama"), 0.25, "int4", 8)
    assert all(fate.budget == 0 for layer in small.layers for fate in layer.fates)
    with attached(model, small, fitted.build(small)):
        torch.testing.assert_close(found["windows alone"], look(model).quality.retained)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    torch.testing.assert_close(found["no attention"], look(model).quality.retained)


def test_windows_and_kernels_alone_are_what_their_recipes_make() -> None:
    model, x = decoder(), ids(60)
    near: dict[str, Any] = {"window": 8, "sinks": 2, "window_kind": "sliding"}

    def look(changed: Any) -> Any:
        with torch.no_grad():
            return SimpleNamespace(quality=SimpleNamespace(retained=changed(x, use_cache=False).logits))

    def converted_by(recipe: Recipe, maps: dict[str, Any] | None = None) -> tuple[Any, Plan, dict[str, Any]]:
        plan, layers = convert(model, recipe).plan, layers_of(model)
        for name, layer in (maps or {}).items():
            layers[name].parts["kernel"].phi = layer.parts["hybrid"].phi
        logits = look(model).quality.retained
        revert(model)
        return logits, plan, layers

    _, plan, layers = converted_by(Recipe("positive", 16, **near))
    problem = SimpleNamespace(
        space=SimpleNamespace(model=model), texts=SimpleNamespace(look=look), say=lambda text: None
    )
    found = search_selected.ablations(problem, plan, layers)
    assert list(found) == ["windows alone", "kernels alone", "no attention"]
    torch.testing.assert_close(found["windows alone"], converted_by(Recipe(None, **near))[0])
    torch.testing.assert_close(found["kernels alone"], converted_by(Recipe("positive", 16), layers)[0])


def test_the_search_finds_the_least_memory_that_keeps() -> None:
    found = search(decoder(), Target(keep=0.9, length=200), texts())
    assert found.met
    assert found.memory < 0.3
    assert found.plan.count("selected") == found.plan.num_heads
    bounds = [point.quality.lower >= 0.9 for point in found.frontier]
    assert bounds[found.chosen]
    assert not any(bounds[: found.chosen])


def test_too_little_memory_is_refused_with_the_least() -> None:
    with pytest.raises(BochnerError, match=r"'memory' of Target must be at least 0\.\d+ .* got 0\.001"):
        search(decoder(), Target(memory=0.001, length=200), texts())


@pytest.mark.parametrize(
    "target", [Target(minimize="time", length=200), Target(train=Distillation(steps=1), length=200)]
)
def test_time_and_training_are_searched_head_by_head(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*args: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(options.Space, "price", reached)
    with pytest.raises(InterruptedError):
        search(decoder(), target, texts())
