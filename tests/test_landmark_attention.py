"""Landmark maps at work: attention keeps its laws with them, converted models decode, save, load and learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bochner import BochnerWarning, Recipe, linear_attention
from bochner.maps.landmark import LandmarkFeatures

D = 8


def sequences(n: int, seed: int = 0, heads: int = 2) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, heads, n, D, generator=g) for _ in range(3))


@pytest.fixture(scope="module", params=[True, False], ids=["positive", "signed"])
def phi(request: pytest.FixtureRequest) -> LandmarkFeatures:
    q, k, v = sequences(60, seed=5)
    root = D**-0.25
    made = LandmarkFeatures(D, 12, positive=request.param, num_heads=2, seed=1)
    return made.calibrate_(q * root, k * root, v, is_causal=True)


def topped_up(phi: LandmarkFeatures, kernel: torch.Tensor, far: torch.Tensor) -> torch.Tensor:
    """Weights of far pairs (b, h, n, s) in units of exp(z), with what is missing given to all of them alike."""
    kernel = kernel * far
    if phi.top_up is None:
        return kernel
    count = far.sum(-1, keepdim=True)
    lack = phi.top_up[:, None, None].to(kernel.dtype) * count - kernel.sum(-1, keepdim=True)
    return kernel + lack.clamp_min(0) * far / count.clamp_min(1)


def test_a_map_that_was_never_fitted_says_so_once() -> None:
    q, k, v = sequences(20)
    phi = LandmarkFeatures(D, 12, num_heads=2)
    with pytest.warns(BochnerWarning, match="never fitted.*calibrate_"):
        linear_attention(q, k, v, phi)
    linear_attention(q, k, v, phi, is_causal=True)  # warnings are errors
    again = LandmarkFeatures(D, 12, num_heads=2)
    again.load_state_dict(LandmarkFeatures(D, 12, num_heads=2).calibrate_(q, k).state_dict())
    linear_attention(q, k, v, again)
    linear_attention(q, k, v, LandmarkFeatures(D, 12, num_heads=2).trainable_())  # what is trained need not be fitted


@pytest.mark.parametrize("near", [{}, {"window": 6, "sinks": 2}])
def test_attention_is_its_own_matrix(phi: LandmarkFeatures, near: dict[str, Any]) -> None:
    q, k, v = sequences(40)
    root = D**-0.25
    a, b = phi(q * root, "query"), phi(k * root, "key")
    i = torch.arange(40)
    allowed = i[None, :] <= i[:, None]
    exact = (i[None, :] < near.get("sinks", 0)).expand(40, 40)
    if near:
        block = i // near["window"]
        exact = exact | (block[:, None] - block[None, :] <= 1)
    kernel = topped_up(phi, (a.values @ b.values.mT).double(), allowed & ~exact)
    shown = (q @ k.mT * D**-0.5 - a.log_scale).double().exp() * (allowed & exact)
    weights = kernel + shown
    assert phi.positive or bool((weights.sum(-1) > (a.values @ b.values.mT * allowed).sum(-1) + 1e-3).any() or near)
    want = weights @ v.double() / weights.sum(-1, keepdim=True)
    out = linear_attention(q, k, v, phi, is_causal=True, **near)
    torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=2e-5)


def test_the_future_moves_nothing_and_pieces_make_the_whole(phi: LandmarkFeatures) -> None:
    q, k, v = sequences(50)
    out = linear_attention(q, k, v, phi, is_causal=True)
    other = [
        torch.cat([t[..., :30, :], 9 * u[..., 30:, :]], dim=-2)
        for t, u in zip((q, k, v), sequences(50, 1), strict=True)
    ]
    assert torch.equal(linear_attention(*other, phi, is_causal=True)[..., :30, :], out[..., :30, :])
    parts, state = [], None
    for piece in (slice(0, 17), slice(17, 18), slice(18, 50)):
        part, state = linear_attention(
            *(t[..., piece, :] for t in (q, k, v)), phi, is_causal=True, state=state, return_state=True
        )
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=-2), out, atol=1e-5, rtol=1e-5)


def test_padding_changes_nothing(phi: LandmarkFeatures) -> None:
    q, k, v = sequences(30)
    padded = [torch.cat([t, torch.full_like(t[..., :5, :], 7.0)], dim=-2) for t in (q, k, v)]
    mask = torch.zeros(2, 35, dtype=torch.bool)
    mask[:, 30:] = True
    out = linear_attention(*padded, phi, key_padding_mask=mask)[..., :30, :]
    torch.testing.assert_close(out, linear_attention(q, k, v, phi), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_lose_no_more_than_their_own_rounding(phi: LandmarkFeatures, dtype: torch.dtype) -> None:
    q, k, v = sequences(40)
    exact = linear_attention(*(t.double() for t in (q, k, v)), phi, is_causal=True)
    rounded = [t.to(dtype) for t in (q, k, v)]
    plain = linear_attention(*(t.double() for t in rounded), phi, is_causal=True)
    out = linear_attention(*rounded, phi, is_causal=True)
    assert out.dtype == dtype
    best = (plain.to(dtype).double() - exact).norm()  # rounding of inputs and output alone
    assert (out.double() - exact).norm() <= 2 * best


def test_gradients_are_those_of_plain_operations(phi: LandmarkFeatures) -> None:
    q, k, v = (t[:1, :, :20].double().requires_grad_() for t in sequences(20))
    wide = LandmarkFeatures(D, 12, positive=phi.positive, num_heads=2)
    wide.load_state_dict(phi.state_dict())
    wide.double().trainable_()
    root = D**-0.25

    def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        far = torch.ones(20, 20, dtype=torch.bool).tril()
        weights = topped_up(wide, wide(q * root, "query").values @ wide(k * root, "key").values.mT, far)
        return weights @ v / weights.sum(-1, keepdim=True)

    grads = []
    for f in (naive, lambda q, k, v: linear_attention(q, k, v, wide, is_causal=True)):
        out = f(q, k, v)
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        grads.append(torch.autograd.grad((out * weight).sum(), [q, k, v, *wide.parameters()]))
    for want, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, atol=1e-8, rtol=1e-6)


class TestConverted:
    """Tiny random models with landmark maps."""

    @pytest.fixture(autouse=True)
    def _needs_transformers(self) -> None:
        pytest.importorskip("transformers")

    def converted(self, family: str, **options: Any) -> Any:
        from hf_models import GROUPED, TEXT, build, texts_as_batches

        from bochner import convert

        causal = family == "llama"
        head = "AutoModelForCausalLM" if causal else "AutoModel"
        model = build(family, GROUPED if causal else TEXT, head=head)
        recipe = {"num_features": 12, "window": 5, "sinks": 1}
        return convert(model, Recipe("landmark", **recipe), options.get("data", texts_as_batches())).model

    def test_a_decoder_decodes_as_it_computes(self) -> None:
        import transformers
        from hf_models import whole_and_pieces

        model = self.converted("llama")
        x = torch.randint(4, 50, (2, 40), generator=torch.Generator().manual_seed(3))
        whole, parts = whole_and_pieces(model, x, [17, 18, 19], transformers.DynamicCache(config=model.config))
        torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)

    def test_maps_are_fitted_to_what_is_left_to_them(self) -> None:
        from bochner.hf import layers_of

        for layer in layers_of(self.converted("bert")).values():
            assert int(layer.parts["hybrid"].phi.rows_seen) == 6 * 2 * 64
            assert (layer.parts["hybrid"].phi.error < 1).all()

    def test_saved_and_loaded_it_is_the_same(self, tmp_path: Path) -> None:
        import transformers

        model = self.converted("bert")
        model.save_pretrained(tmp_path)
        loaded = transformers.AutoModel.from_pretrained(tmp_path).eval()
        x = torch.randint(4, 50, (2, 30), generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            assert torch.equal(loaded(x).last_hidden_state, model(x).last_hidden_state)

    def test_distillation_starts_from_the_fit_and_lowers_its_error(self) -> None:
        from hf_models import texts_as_batches

        from bochner import Distillation, distill

        report = distill(self.converted("bert"), texts_as_batches(8), Distillation(steps=20, rate=1e-3))
        assert all(layer.after <= layer.before for layer in report.layers)
        assert sum(layer.after for layer in report.layers) < 0.98 * sum(layer.before for layer in report.layers)

    def test_without_data_it_is_refused_in_one_sentence(self) -> None:
        from bochner import BochnerError

        with pytest.raises(BochnerError, match="The feature map 'landmark' needs 'data'"):
            self.converted("bert", data=None)
