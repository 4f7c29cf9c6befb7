"""Maps of one's own: by name, class, instance or function they do the same, and each mistake gets one sentence."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bochner
from bochner import (
    BochnerError,
    Conversion,
    FeatureMap,
    Features,
    feature_map,
    kernel_estimate,
    linear_attention,
    register_map,
)
from bochner.maps import FEATURE_MAPS, FunctionMap, ProjectedFeatures, named, options_of, to_features
from bochner.maps.own import build, check_contract

pytestmark = pytest.mark.usefixtures("own_maps")
D, M = 4, 6


class Softplus(ProjectedFeatures):
    """Random directions: everything but the features is inherited."""

    positive = True
    kernels = ("softplus",)

    def _features(self, x: Tensor, role: str) -> Features:
        return to_features(nn.functional.softplus(self.projection(x)))


class Learned(FeatureMap):
    """A matrix that is learned, and a constructor of the least length."""

    positive = True

    def __init__(self, dim: int, num_features: int) -> None:
        super().__init__(dim, num_features)
        self.weight = nn.Parameter(torch.linspace(-1, 1, dim * num_features).view(num_features, dim))

    def _features(self, x: Tensor, role: str) -> Features:
        return to_features((x @ self.weight.to(x.dtype).mT).exp())


def both_signs(x: Tensor, role: str) -> Tensor:
    return torch.cat([x.exp(), (-x).exp()], dim=-1)


class BothSigns(FeatureMap):
    positive = True

    def __init__(self, dim: int, num_features: int, **options: Any) -> None:
        super().__init__(dim, num_features, **options)
        self.feature_dim = 2 * dim

    def _features(self, x: Tensor, role: str) -> Features:
        return to_features(both_signs(x, role))


def qkv(*lead: int, n: int = 20, d: int = D) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(*lead, n, d, generator=g, dtype=torch.float64) for _ in range(3)]


def weights_of(x: Tensor, y: Tensor) -> Tensor:
    return both_signs(x, "query") @ both_signs(y, "key").mT


@pytest.mark.parametrize("is_causal", [False, True])
def test_name_class_instance_and_function_give_the_same(is_causal: bool) -> None:
    register_map("both_signs", BothSigns)
    q, k, v = qkv(2, 3)
    x, y = q * D**-0.25, k * D**-0.25
    weights = weights_of(x, y).tril() if is_causal else weights_of(x, y)
    want = weights @ v / weights.sum(-1, keepdim=True)
    for phi in ("both_signs", BothSigns, BothSigns(D, 1), both_signs, feature_map(both_signs, dim=D, positive=True)):
        torch.testing.assert_close(linear_attention(q, k, v, phi, is_causal=is_causal), want)
        if not isinstance(phi, FeatureMap):
            torch.testing.assert_close(kernel_estimate(feature_map(phi, dim=D), x, y), weights_of(x, y))


def test_a_name_and_a_class_draw_the_same_from_one_seed() -> None:
    register_map("softplus", Softplus)
    how: dict[str, Any] = {"dim": D, "num_features": M, "projection": "iid", "seed": 5, "num_heads": 2}
    named_map, made = feature_map("softplus", **how), feature_map(Softplus, **how)
    assert isinstance(named_map, Softplus)
    assert torch.equal(named_map.projection.weight, made.projection.weight)
    assert not torch.equal(made.projection.weight, feature_map(Softplus, **{**how, "seed": 6}).projection.weight)
    before = made.projection.weight.clone()
    assert not torch.equal(made.redraw_(seed=7).get_submodule("projection").weight, before)


def test_a_function_says_its_length_and_its_sign() -> None:
    phi = feature_map(both_signs, dim=5)
    assert isinstance(phi, FunctionMap)
    assert (phi.feature_dim, phi.num_features, phi.positive) == (10, 10, False)
    assert feature_map(both_signs, dim=5, positive=True).positive
    scaled = feature_map(lambda x, role: Features(torch.ones_like(x), x[..., :1]), dim=5, positive=True)
    x = torch.randn(3, 5)
    assert torch.equal(scaled(x).log_scale, x[:, :1])
    assert feature_map(phi) is phi
    # Features beyond the range of their products: the scale of a row is kept apart.
    large = feature_map(lambda x, role: 1e30 * x.square(), dim=5, positive=True)
    q, k, v = (t.float() for t in qkv(1, 2, d=5))
    torch.testing.assert_close(linear_attention(q, k, v, large), linear_attention(q, k, v, lambda x, role: x.square()))


@pytest.mark.parametrize("given", ["softplus", Softplus, "learned", Learned, both_signs])
def test_a_layer_takes_it_and_trains(given: Any) -> None:
    register_map("softplus", Softplus)
    register_map("learned", Learned)
    torch.manual_seed(0)
    layer, other = (
        bochner.nn.MultiheadAttention(
            8, 2, batch_first=True, attention=bochner.nn.Attention(given, M, map_options={"seed": seed})
        )
        for seed in (3, 4)
    )
    x = torch.randn(2, 15, 8)
    layer(x, x, x, is_causal=True)[0].square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    assert all(bool(p.grad.any()) for p in layer.feature_map.parameters() if p.grad is not None)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x, x, x)[0], layer(x, x, x)[0])


@pytest.mark.parametrize("cls", [Softplus, Learned])
def test_a_registered_map_survives_its_state(cls: type[FeatureMap]) -> None:
    register_map("mine", cls)
    first, second = (feature_map("mine", dim=D, num_features=M, seed=s) for s in (1, 2))
    with torch.no_grad():
        for t in first.state_dict().values():
            t += 0.1
    x = torch.randn(7, D)
    assert not torch.equal(first(x).values, second(x).values)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x).values, second(x).values)
    assert torch.equal(copy.deepcopy(first)(x).values, first(x).values)


@pytest.mark.parametrize("name", [*FEATURE_MAPS, "softplus", "learned"])
def test_what_is_written_into_a_map_counts_at_once(name: str) -> None:
    """Nothing is kept of the values of parameters and buffers, whatever way they are changed."""
    register_map("softplus", Softplus)
    register_map("learned", Learned)
    phi, x = feature_map(name, dim=D, num_features=12), torch.randn(9, D)

    def seen() -> list[Tensor]:
        return [phi(x, role).dense().detach() for role in ("query", "key")]

    seen()
    other = feature_map(name, dim=D, num_features=12, seed=9)
    with torch.no_grad():
        for t in other.parameters():
            t.mul_(1.25)
    for mine, its in zip(phi.state_dict().values(), other.state_dict().values(), strict=True):
        mine.data.copy_(its)
    after, phi = seen(), other
    assert all(torch.equal(a, b) for a, b in zip(after, seen(), strict=True))


class NoFeatures(FeatureMap):
    pass


class PlainTensor(FeatureMap):
    def _features(self, x: Tensor, role: str) -> Features:
        return x.square()  # type: ignore[return-value]


class WrongLength(FeatureMap):
    def _features(self, x: Tensor, role: str) -> Features:
        return to_features(x)


class ShortKeys(FeatureMap):
    def _features(self, x: Tensor, role: str) -> Features:
        return to_features(torch.cat([x, x], dim=-1) if role == "query" else x)


class ScalePerMap(FeatureMap):
    def _features(self, x: Tensor, role: str) -> Features:
        return Features(torch.cat([x, x], dim=-1), torch.zeros(()))


class FlatScale(FeatureMap):
    def _features(self, x: Tensor, role: str) -> Features:
        return Features(torch.cat([x, x], dim=-1), x.sum(-1))


class NotPositive(FeatureMap):
    positive = True

    def _features(self, x: Tensor, role: str) -> Features:
        return to_features(torch.cat([x.exp(), x.exp() if role == "query" else x], dim=-1))


class OtherDtype(FeatureMap):
    def _features(self, x: Tensor, role: str) -> Features:
        return Features(torch.cat([x, x], dim=-1), x[..., :1].double())


class Infinite(FeatureMap):
    def _features(self, x: Tensor, role: str) -> Features:
        return Features(torch.cat([x, x / 0], dim=-1), torch.zeros_like(x[..., :1]))


class Swapped(FeatureMap):
    def __init__(self, num_features: int, *, dim: int) -> None:
        super().__init__(dim, num_features)


class Needy(ProjectedFeatures):
    def __init__(self, dim: int, num_features: int, *, width: float) -> None:
        super().__init__(dim, num_features)


class Fragile(FeatureMap):
    def __init__(self, dim: int, num_features: int) -> None:
        raise ZeroDivisionError("no way")


class Unprepared(FeatureMap):
    def __init__(self, dim: int, num_features: int) -> None:
        nn.Module.__init__(self)


class OneRole(FeatureMap):
    def _features(self, x: Tensor) -> Features:  # type: ignore[override]
        return to_features(x)


MISTAKES: dict[str, tuple[Any, str]] = {
    "no features": (NoFeatures, r"NoFeatures has no features; define _features\(self, x, role\)"),
    "a tensor": (PlainTensor, r"query features of PlainTensor must be Features.*got Tensor; return bochner.maps.to_"),
    "length": (WrongLength, r"of WrongLength have shape \(2, 7, 4\).*feature_dim is 8; give .*set self.feature_dim"),
    "length of keys": (ShortKeys, r"The key features of ShortKeys have shape \(2, 7, 4\) .* feature_dim is 8; give"),
    "one scale": (ScalePerMap, r"log_scale of the query .* ScalePerMap must have shape \(2, 7, 1\).*got \(\); keep"),
    "flat scale": (FlatScale, r"of FlatScale must have shape \(2, 7, 1\), one number a row, got \(2, 7\); keep the"),
    "sign": (NotPositive, r"key features of NotPositive go down to -\d.* positive=True; make .* say positive=False"),
    "dtype": (OtherDtype, r"of OtherDtype have dtypes torch.float32 and torch.float64 for x of torch.float32; cast"),
    "infinite": (Infinite, "The query features of Infinite are not finite; move what is large into log_scale"),
    "other constructor": (Swapped, r"constructor of Swapped does not take \(dim, num_features\) alone: too many.*make"),
    "more arguments": (Needy, r"constructor of Needy does not take .* alone: .*'width'; make .* all others a default"),
    "failing constructor": (Fragile, r"Fragile\(4, 8\) cannot be built: ZeroDivisionError: no way; repair its const"),
    "base not called": (Unprepared, r"Unprepared\(4, 8\) cannot be built: its constructor does not call super\(\)"),
    "no role": (OneRole, r"of OneRole cannot be computed for x of shape \(2, 7, 4\): TypeError: .*; repair"),
    "another class": (nn.Linear, "needs a subclass of FeatureMap, got the class Linear; derive a class from bochner"),
    "an instance": (Learned(2, 3), "needs a subclass of FeatureMap, got an instance of Learned; give its class"),
    "a function": (both_signs, "needs a subclass of FeatureMap, got an instance of function; derive a class from"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_map_that_breaks_the_contract_is_refused_in_one_sentence(kind: str) -> None:
    cls, sentence = MISTAKES[kind]
    before = dict(FEATURE_MAPS)
    with pytest.raises(BochnerError, match=f"(?s){sentence}") as refusal:
        register_map("mine", cls)
    assert before == FEATURE_MAPS
    assert str(refusal.value).endswith(".")
    assert "\n" not in str(refusal.value)


FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "a list": (lambda x, role: [1.0], {}, r"The query features of the function '<lambda>' must be Features.*got list"),
    "sign": (lambda x, role: x, {"positive": True}, r"function '<lambda>' go down to -\d.*say positive=False"),
    "lengths": (lambda x, role: x if role == "query" else x[..., :2], {}, r"key features of the function .*is 4; give"),
    "rows lost": (lambda x, role: x.flatten(), {}, r"have shape \(56,\) for x of shape \(2, 7, 4\)"),
    "no role": (lambda x: x, {}, r"cannot be computed for x of shape \(2, 7, 4\): TypeError"),
    "options": (both_signs, {"colour": 1}, r"feature map both_signs does not take the options \['colour'\]"),
    "heads": (both_signs, {"num_heads": 2}, r"does not take the options \['num_heads'\]"),
    "projection": (both_signs, {"projection": "iid"}, "both_signs has no 'projection', got 'iid'; leave it out"),
    "no size": (both_signs, {"dim": None}, "The 'dim' of feature map both_signs is missing"),
    "a class": (nn.Linear, {}, "feature_map needs a subclass of FeatureMap, got the class Linear"),
    "a wrong class": (WrongLength, {"num_features": 8}, "features of WrongLength have shape"),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_function_or_class_that_cannot_be_a_map_is_refused_in_one_sentence(kind: str) -> None:
    function, options, sentence = FUNCTIONS[kind]
    with pytest.raises(BochnerError, match=sentence):
        feature_map(function, **{"dim": D, **options})


def test_a_module_with_parameters_is_a_function_that_is_trained() -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(D, M)

        def forward(self, x: Tensor, role: str) -> Tensor:
            return self.inner(x).exp()

    phi = feature_map(Linear(), dim=D, positive=True)
    q, k, v = (t.float() for t in qkv(1, 2))
    linear_attention(q, k, v, phi).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in phi.parameters())
    assert set(phi.state_dict()) == {"function.inner.weight", "function.inner.bias"}
    weight = torch.rand(M, D, requires_grad=True)
    linear_attention(q.requires_grad_(), k, v, lambda x, role: (x @ weight.mT).exp()).square().sum().backward()
    assert weight.grad is not None
    assert bool(weight.grad.any())


def test_a_name_belongs_to_one_class() -> None:
    register_map("mine", Softplus)
    register_map("mine", Softplus)
    assert FEATURE_MAPS["mine"] is Softplus
    with pytest.raises(BochnerError, match="name 'mine' is taken by Softplus; register Learned under another name, or"):
        register_map("mine", Learned)
    with pytest.raises(BochnerError, match="'positive' is taken by PositiveFeatures"):
        register_map("positive", Softplus)
    register_map("positive", FEATURE_MAPS["positive"])
    for name in ("", "window+mine", "two words", 3, None):
        with pytest.raises(BochnerError, match="'name' of register_map must be letters, digits and underscores, got"):
            register_map(name, Softplus)  # type: ignore[arg-type]
    with pytest.raises(BochnerError, match=r"Unknown feature map 'other'.*register one of your own by bochner"):
        feature_map("other", dim=D)


def test_a_class_is_tried_once_and_leaves_the_global_generator_alone() -> None:
    calls = []

    class Counted(FeatureMap):
        def __init__(self, dim: int, num_features: int) -> None:
            super().__init__(dim, num_features)
            self.w = nn.Parameter(torch.randn(num_features, dim))

        def _features(self, x: Tensor, role: str) -> Features:
            calls.append(role)
            torch.randn(3)
            return to_features(x @ self.w.mT)

    state = torch.get_rng_state()
    register_map("counted", Counted)
    assert torch.equal(torch.get_rng_state(), state)
    assert sorted(calls) == ["key", "query"]
    register_map("counted", Counted)
    feature_map("counted", dim=D)
    assert len(calls) == 2


def test_a_class_that_needs_more_room_is_tried_at_a_larger_size() -> None:
    class Wide(Softplus):
        def __init__(self, dim: int, num_features: int, **options: Any) -> None:
            if dim < 10:
                raise ValueError("too narrow")
            super().__init__(dim, num_features, **options)

    register_map("wide", Wide)
    assert feature_map("wide", dim=12, num_features=M).feature_dim == M


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_every_map_of_ours_keeps_the_contract(name: str) -> None:
    check_contract(build(FEATURE_MAPS[name]), name)
    for heads in (None, 2):
        check_contract(feature_map(name, dim=D, num_features=12, num_heads=heads), name)


def test_options_are_read_from_constructors_however_they_are_written() -> None:
    class Plain(Learned):
        def __init__(self, dim: int, num_features: int, width: float = 1.0, *, num_heads: None = None) -> None:
            super().__init__(dim, num_features)
            self.width = width

    assert options_of(Learned) == set()
    assert options_of(Plain) == {"width", "num_heads"}
    assert options_of(Softplus) == {"projection", "num_heads", "seed", "generator"}
    assert options_of(BothSigns) == {"num_heads", "kernel"}
    assert feature_map(Plain, dim=D, width=2.0, seed=1, num_heads=None).width == 2.0
    with pytest.raises(BochnerError, match=r"feature map Learned does not take the options .'num_heads'.; it takes"):
        feature_map(Learned, dim=D, num_heads=2)
    with pytest.raises(BochnerError, match=r"'kernel' of Softplus must be one of .'softplus'., got 'softmax'"):
        Softplus(D, M, kernel="softmax")
    with pytest.raises(BochnerError, match="Unknown kernel of Softplus 'softplus'; the valid names are"):
        Softplus(D, M).kernel_matrix(torch.ones(1, D), torch.ones(1, D))


def test_where_names_are_kept_a_class_has_to_be_registered() -> None:
    register_map("softplus", Softplus)
    assert named("softplus", "convert") is Softplus
    for given in (Softplus, Softplus(D, M), both_signs):
        with pytest.raises(BochnerError, match=r"'feature_map' of convert must be a name, got .*register_map"):
            named(given, "convert")


def test_a_registered_name_converts_a_model_and_comes_back_from_disk(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    register_map("softplus", Softplus)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BertModel(transformers.BertConfig(**small, vocab_size=50)).eval()
    ids = torch.arange(40).view(2, 20)
    for wrong in (Softplus, Softplus(8, M)):
        with pytest.raises(BochnerError, match="'feature_map' of Recipe must be a name, got Softplus"):
            bochner.convert(model, bochner.Recipe(wrong, M), [{"input_ids": ids}])
    bochner.convert(model, bochner.Recipe("softplus", M), [{"input_ids": ids}])
    plan = Conversion.of(model).plan
    assert [layer.fates[0].feature_map for layer in plan.layers] == ["softplus"]
    want = model(ids).last_hidden_state
    model.save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert torch.equal(again(ids).last_hidden_state, want)
    with pytest.raises(BochnerError, match="'feature_map' of the fate 'kernel' must be a name, got Softplus"):
        bochner.hf.Kernel(Softplus)  # type: ignore[arg-type]
    FEATURE_MAPS.pop("softplus")
    with pytest.raises(BochnerError, match=r"Unknown feature map 'softplus'.*register one of your own"):
        transformers.AutoModel.from_pretrained(tmp_path)


def test_a_registered_name_is_an_attention_of_the_tasks_and_a_map_of_the_estimators() -> None:
    register_map("softplus", Softplus)
    sklearn_like = pytest.importorskip("bochner.estimators").RandomFeatures(feature_map="softplus", n_components=10)
    assert sklearn_like.fit_transform(torch.randn(20, 3).numpy()).shape == (20, 10)
    pytest.importorskip("transformers")
    from bochner.tasks.models import Attention, attentions

    assert {"softplus", "window+softplus"} <= set(attentions())
    assert Attention("window+softplus").feature_map == "softplus"
    # A task's own names stay what they are.
    register_map("linformer", Softplus)
    assert [Attention(name).feature_map for name in ("linformer", "exact", "window", "identity")] == [None] * 4


def test_the_example_runs_and_says_what_it_found() -> None:
    script = Path(__file__).parent.parent / "examples" / "own_map.py"
    assert len(script.read_text().splitlines()) < 40
    done = subprocess.run([sys.executable, "-W", "error", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [[float(x) for x in re.findall(r"\d\.\d+", line)] for line in done.stdout.splitlines()[1:]]
    assert all(series < positive for _, series, positive in rows[:3])
    assert "log_weights has a gradient, True" in done.stdout


def test_modules_have_one_place() -> None:
    short = {"clustered", "generalized", "hybrid", "learned", "local", "parallel", "polyfit", "sketches", "taylor"}
    assert not short & {*bochner.__all__, *dir(bochner)}
    assert not {f"bochner.{name}" for name in short} & set(sys.modules)


class Drawn(FeatureMap):
    """Random parts by name: what the page on maps of one's own describes."""

    def __init__(self, dim: int, num_features: int, *, seed: int = 0, **options: Any) -> None:
        super().__init__(dim, num_features, **options)
        self._redraw(torch.Generator().manual_seed(seed))

    def _draw(self, g: torch.Generator) -> dict[str, Tensor]:
        return {"w": torch.randn(self.num_features, self.dim, generator=g)}

    def _features(self, x: Tensor, role: str) -> Features:
        return to_features((x @ self.w.to(x.dtype).mT).cos())


def test_drawn_parts_are_buffers_of_each_head_and_drawn_again() -> None:
    phi, other = (feature_map(Drawn, dim=D, num_features=M, num_heads=2, seed=seed) for seed in (0, 1))
    assert [*phi.state_dict()] == ["w"]
    assert phi.w.shape == (2, M, D)
    assert not torch.equal(phi.w[0], phi.w[1])
    before = phi.w.clone()
    assert not torch.equal(phi.redraw_(3).w, before)
    assert torch.equal(other.redraw_(3).w, phi.w)
    phi.trainable_()
    learned = phi.w.clone()
    assert torch.equal(phi.redraw_(4).w, learned)
