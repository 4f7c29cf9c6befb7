"""Decoding in constant memory equals recomputation: token by token, in pieces, in batches, under beam search."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_models import DECODERS, GROUPED, SEQ2SEQ, build, texts_as_batches, whole_and_pieces  # noqa: E402

from bochner import BochnerError, Conversion, Recipe, convert, linear_attention, revert  # noqa: E402
from bochner.hf import LinearAttention, RecurrentLayer, cache_bytes  # noqa: E402

WINDOW_KINDS = ["sliding", *(["block"] if "window_kind" in inspect.signature(linear_attention).parameters else [])]
MIXED = {"num_features": 16, "window": 5, "sinks": 2, "exact_heads": [(0, 1), (1, 0)]}


def converted(family: str = "llama", settings: dict[str, Any] | None = None, **options: Any) -> Any:
    model = build(family, settings or GROUPED, head="AutoModelForCausalLM")
    return convert(model, Recipe(**{**MIXED, **options}), texts_as_batches()).model


def ids(batch: int = 2, length: int = 40) -> torch.Tensor:
    return torch.randint(4, 50, (batch, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", sorted(DECODERS))
def test_recurrent_and_full_sequence_logits_agree(family: str) -> None:
    model = converted(family, DECODERS[family])
    x = ids()
    cache = transformers.DynamicCache(config=model.config)
    whole, parts = whole_and_pieces(model, x, [17, 18, 19, 30], cache)
    assert all(isinstance(layer, RecurrentLayer) for layer in cache.layers)
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window_kind", WINDOW_KINDS)
@pytest.mark.parametrize("kind", ["hybrid", "kernel", "window", "exact"])
def test_each_kind_of_head_decodes_as_it_computes(kind: str, window_kind: str) -> None:
    options: dict[str, Any] = {"exact_heads": 0.0, "window_kind": window_kind}
    if kind == "kernel":
        options |= {"window": None, "sinks": 0}
    elif kind == "window":
        options |= {"feature_map": None}
    elif kind == "exact":
        options |= {"exact_heads": 1.0}
    model = converted(**options)
    assert Conversion.of(model).plan.count(kind) == Conversion.of(model).plan.num_heads
    x = ids()
    cache = transformers.DynamicCache(config=model.config)
    whole, parts = whole_and_pieces(model, x, list(range(1, x.shape[1])), cache)
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:A text of")  # longer than calibrated on: its memory is looked at
def test_only_exact_heads_keep_keys_and_values() -> None:
    model = converted()
    cache = transformers.DynamicCache(config=model.config)
    sizes, states = [], []
    with torch.no_grad():
        for start in range(0, 400, 100):
            model(ids(1, 400)[:, start : start + 100], past_key_values=cache)
            sizes.append(cache_bytes(cache))
            states.append(sum(layer.states["hybrid"].nbytes for layer in cache.layers))
    assert len(set(states)) == 1  # linear heads hold what they held after the first piece
    assert sizes[-1] > sizes[0]  # exact heads grow


@pytest.mark.filterwarnings("ignore:A text of")
@pytest.mark.parametrize("window_kind", WINDOW_KINDS)
def test_linear_heads_hold_what_their_plan_says(window_kind: str) -> None:
    model = converted(exact_heads=0.0, window_kind=window_kind)
    cache = transformers.DynamicCache(config=model.config)
    sizes = []
    with torch.no_grad():
        for length in (50, 400, *[1] * 10):
            model(ids(1, length), past_key_values=cache)
            sizes.append(cache_bytes(cache))
    assert sizes[-6] == sizes[-1]  # blocks of 5 fill and start again, sliding windows are always full
    assert len(set(sizes)) == (1 if window_kind == "sliding" else 5)
    assert max(sizes) == pytest.approx(Conversion.of(model).plan.cache_bytes(460), rel=0.1)


def greedy_by_recomputation(model: Any, x: torch.Tensor, mask: torch.Tensor, steps: int) -> torch.Tensor:
    for _ in range(steps):
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        with torch.no_grad():
            logits = model(x, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]
        x = torch.cat([x, logits.argmax(-1, keepdim=True)], dim=1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return x


def test_greedy_generation_with_left_padding_equals_recomputation_and_each_row_alone() -> None:
    model = converted()
    x = ids(3, 20)
    mask = torch.ones_like(x)
    mask[1, :6], mask[2, :13] = 0, 0
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    together = model.generate(x, attention_mask=mask, **options)
    assert torch.equal(together, greedy_by_recomputation(model, x, mask, 12))
    for row, start in ((0, 0), (1, 6), (2, 13)):
        alone = model.generate(x[row : row + 1, start:], attention_mask=mask[row : row + 1, start:], **options)
        assert torch.equal(alone[0, -12:], together[row, -12:])


def test_beam_search_equals_beam_search_without_a_cache() -> None:
    model = converted()
    x = ids(2, 15)
    options = {"max_new_tokens": 10, "num_beams": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(x)
    cached = model.generate(x, attention_mask=mask, **options)
    plain = model.generate(x, attention_mask=mask, use_cache=False, **options)
    assert torch.equal(cached, plain)


def test_sampling_with_several_returns_runs_in_batches() -> None:
    model = converted()
    x = ids(2, 10)
    torch.manual_seed(0)
    out = model.generate(
        x,
        attention_mask=torch.ones_like(x),
        max_new_tokens=6,
        do_sample=True,
        num_return_sequences=3,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert out.shape == (6, 16)


def test_an_encoder_decoder_generates_with_its_states() -> None:
    model = build("bart", SEQ2SEQ, head="AutoModelForSeq2SeqLM")
    batches = [{**b, "decoder_input_ids": b["input_ids"][:, :30]} for b in texts_as_batches()]
    convert(model, Recipe(num_features=16), batches)
    x = ids(2, 12)
    options = {"max_new_tokens": 8, "num_beams": 1, "do_sample": False, "forced_eos_token_id": None}
    cached = model.generate(x, attention_mask=torch.ones_like(x), **options)
    plain = model.generate(x, attention_mask=torch.ones_like(x), use_cache=False, **options)
    assert torch.equal(cached, plain)


def test_caches_that_cannot_hold_a_state_are_refused() -> None:
    model = converted()
    sliding = transformers.DynamicCache(config=model.config)
    sliding.layers = [transformers.cache_utils.DynamicSlidingWindowLayer(sliding_window=8) for _ in range(2)]
    with pytest.raises(BochnerError, match="DynamicSlidingWindowLayer"):
        model(ids(1, 5), past_key_values=sliding)
    cache = transformers.DynamicCache(config=model.config)
    model(ids(1, 5), past_key_values=cache)
    with pytest.raises(BochnerError, match="cannot forget"):
        cache.crop(-1)
    plain = revert(model)
    filled = transformers.DynamicCache(config=plain.config)
    plain(ids(1, 5), past_key_values=filled)
    again = converted()
    with pytest.raises(BochnerError, match="empty cache"):
        again(ids(1, 5), past_key_values=filled)


def test_a_step_follows_a_map_whose_numbers_change() -> None:
    """What is held between steps is made anew after a change in place, after a move, and in a copy."""
    from bochner.hf.calls import Call, attend_from
    from bochner.hf.fates import Kernel
    from bochner.hf.plan import LayerPlan

    part: Any = next(iter(LinearAttention(LayerPlan("x", 2, 1, 8, 8, [Kernel("positive", 16)], True)).parts.values()))
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 1, 8, generator=g) for h in (2, 1, 1))
    call = Call(q, k, v, True, None, 0.3)
    first = part.decode(call._replace(key=2 * k, value=-v), None)[1]
    held = part.decode(call, first)[0]
    assert part._held is not None
    copied = copy.deepcopy(part)
    assert copied._held is None
    weight = next(b for b in part.phi.buffers() if b.is_floating_point() and b.ndim > 1)
    weight.mul_(1.5)
    start = part.decode(call._replace(key=2 * k, value=-v), None)[1]
    torch.testing.assert_close(part.decode(call, start)[0], attend_from(call, part.phi, start)[0])
    torch.testing.assert_close(copied.decode(call, first)[0], held)
    assert not torch.allclose(part.decode(call, start)[0], held)
