"""`attn_implementation="bochner"` equals the quadratic oracle of the same map, or refuses with its reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from hf_models import REFUSED, SUPPORTED, TEXT, build, inputs, whole_and_pieces  # noqa: E402
from transformers.masking_utils import eager_mask  # noqa: E402

from bochner import BochnerError, Recipe, convert, hf, kernel_estimate  # noqa: E402
from bochner.hf import interface  # noqa: E402


def oracle(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: Any = None, **kw: Any) -> Any:
    """The same map, quadratically, under transformers' own 4-D mask."""
    b, h, n, d = q.shape
    group, root = h // k.shape[1], (d**-0.5 if scaling is None else scaling) ** 0.5
    phi = interface._default_map(k)
    e = kernel_estimate(phi, (q * root).reshape(b, -1, group * n, d), k * root).view(b, h, n, -1)
    if mask is not None:
        e = e * (mask > -1)
    elif kw.get("is_causal", getattr(module, "is_causal", False)) and n > 1:
        e = e.tril()
    out = (e / e.sum(-1, keepdim=True).clamp_min(1e-30)) @ v.repeat_interleave(group, 1)
    return out.transpose(1, 2).contiguous(), None


@pytest.fixture(autouse=True)
def registered() -> None:
    hf.register()
    transformers.AttentionInterface.register("oracle", oracle)
    transformers.masking_utils.AttentionMaskInterface.register("oracle", eager_mask)


@pytest.mark.parametrize("family", sorted(SUPPORTED))
def test_a_family_equals_the_quadratic_oracle_of_the_same_map(family: str) -> None:
    model = build(family, SUPPORTED[family])
    x = inputs(model)
    with torch.no_grad():
        exact = model(**x)[0]
        model.set_attn_implementation("bochner")
        linear = model(**x)[0]
        model.set_attn_implementation("oracle")
        quadratic = model(**x)[0]
        model.set_attn_implementation("eager")
        again = model(**x)[0]
    keep = x["attention_mask"].bool() if "attention_mask" in x and "decoder_input_ids" not in x else ...
    torch.testing.assert_close(linear[keep], quadratic[keep], atol=5e-5, rtol=1e-4)
    assert (linear[keep] - exact[keep]).abs().max() > 1e-2  # it is not softmax
    torch.testing.assert_close(again, exact, atol=1e-5, rtol=1e-4)  # and the way back is open


def test_at_least_twenty_families_are_supported() -> None:
    assert len(SUPPORTED) >= 20


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_what_cannot_be_honoured_is_refused_with_its_reason(family: str) -> None:
    """Families whose attention ignores the interface are refused by `convert`; by name they would stay softmax."""
    settings, reason = REFUSED[family]
    model = build(family, settings)
    x = inputs(model)

    def use() -> None:
        if reason == "interface":
            convert(model, Recipe("positive", 8))
        model.set_attn_implementation("bochner")
        model(**x)

    with pytest.raises(BochnerError, match=reason):
        use()


def test_soft_caps_and_windows_are_refused() -> None:
    q = torch.randn(1, 2, 4, 8)
    module = torch.nn.Identity()
    for name in ("softcap", "position_bias", "sliding_window", "cache"):
        with pytest.raises(BochnerError, match=name):
            interface.attention_forward(module, q, q, q, None, **{name: 3.0})


def test_a_four_dimensional_mask_is_refused() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(BochnerError, match="padding masks"):
        interface.attention_forward(torch.nn.Identity(), q, q, q, torch.zeros(1, 1, 4, 4))


@pytest.mark.parametrize("shape", [(2, 12, 12), (2, 1, 12, 12)])
def test_a_mask_of_pairs_is_refused_by_a_converted_model(shape: tuple[int, ...]) -> None:
    model = convert(build("bert", TEXT), Recipe("positive", 8, window=4)).model
    with pytest.raises(BochnerError, match="only padding masks"):
        model(torch.ones(2, 12, dtype=torch.long), attention_mask=torch.ones(shape))


def test_padding_does_not_move_valid_outputs() -> None:
    model = build("bert", TEXT)
    model.set_attn_implementation("bochner")
    ids = torch.randint(4, 50, (1, 8), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([ids, torch.full((1, 5), 7)], dim=1)
    mask = torch.tensor([[1] * 8 + [0] * 5])
    with torch.no_grad():
        alone = model(input_ids=ids)[0]
        beside = model(input_ids=padded, attention_mask=mask)[0]
    torch.testing.assert_close(beside[:, :8], alone, atol=1e-5, rtol=1e-4)


def test_a_growing_cache_gives_what_the_whole_sequence_gives() -> None:
    model = build("llama", {**TEXT, "num_key_value_heads": 2}, head="AutoModelForCausalLM")
    model.set_attn_implementation("bochner")
    ids = torch.randint(4, 50, (2, 14), generator=torch.Generator().manual_seed(0))
    whole, parts = whole_and_pieces(model, ids, [6, 9, 10], transformers.DynamicCache(config=model.config))
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-3)


def test_a_static_cache_ignores_its_empty_slots() -> None:
    model = build("llama", {**TEXT, "num_key_value_heads": 2}, head="AutoModelForCausalLM")
    model.set_attn_implementation("bochner")
    ids = torch.randint(4, 50, (1, 9), generator=torch.Generator().manual_seed(0))
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    whole, parts = whole_and_pieces(model, ids, [7, 8], cache)
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-3)


def test_training_passes_gradients_to_the_projections() -> None:
    model = build("bert", TEXT)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.set_attn_implementation("bochner")
    model.train()
    model(**inputs(model))[0].square().mean().backward()
    query = model.encoder.layer[0].attention.self.query
    assert query.weight.grad is not None
    assert query.weight.grad.abs().sum() > 0


def test_attention_dropout_is_not_silently_ignored() -> None:
    model = build("bert", TEXT)
    model.set_attn_implementation("bochner")
    model.train()
    with pytest.warns(UserWarning, match="dropout"):
        model(**inputs(model))
