"""The module shell: torch's signature, parameters and layers, with linear attention inside."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from naive import assert_same, draw, naive_attention
from torch import Tensor, nn

from bochner import BochnerError, BochnerWarning, feature_map
from bochner.nn import Attention, MultiheadAttention, parameter_groups, rotate

E, H, D = 12, 3, 4


MAP = ("projection", "seed", "num_heads", "redraw_every")
CALL = ("scale", "window_kind")
OURS = ("feature_map", "num_features", "window", "sinks", "rotary", "head_dim")


def settings(**options: Any) -> tuple[Attention, dict[str, Any]]:
    """Keywords as an `Attention`, and those that torch's module has."""
    ours = {name: options[name] for name in OURS if name in options}
    ours["map_options"] = {name: options[name] for name in MAP if name in options}
    ours["options"] = {name: options[name] for name in CALL if name in options}
    return Attention(**ours), {k: v for k, v in options.items() if k not in (*OURS, *MAP, *CALL)}


def make(**options: Any) -> MultiheadAttention:
    torch.manual_seed(0)
    how, rest = settings(**{"num_features": 16, **options})
    module = MultiheadAttention(E, H, **{"batch_first": True, "dtype": torch.float64, "attention": how, **rest})
    for p in (module.in_proj_bias, module.out_proj.bias):
        if p is not None:
            nn.init.normal_(p, std=0.1)
    return module


def torch_module(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(E, H, **{"batch_first": True, "dtype": torch.float64, **options})


def through_weights(module: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The module's output with the attention of `naive_attention`, written out with its parameters."""
    packed = module.in_proj_weight is not None
    w = module.in_proj_weight.split(E) if packed else (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    bias = (0, 0, 0) if module.in_proj_bias is None else module.in_proj_bias.split(E)
    heads = [
        (x @ m.T + b).view(x.shape[0], -1, H, D).transpose(1, 2) for x, m, b in zip((q, k, v), w, bias, strict=True)
    ]
    out = naive_attention(*heads, module.feature_map, **options)
    return module.out_proj(out.transpose(1, 2).reshape(q.shape[0], -1, E))


def test_signature_starts_with_that_of_torch() -> None:
    for method in ("__init__", "forward"):
        ours, theirs = (
            list(inspect.signature(getattr(c, method)).parameters) for c in (MultiheadAttention, nn.MultiheadAttention)
        )
        assert ours[: len(theirs)] == theirs


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 5, "vdim": 7}])
def test_a_torch_state_dict_loads_and_saves_under_its_own_names(options: dict[str, Any]) -> None:
    ours, theirs = make(**options), torch_module(**options)
    own_map = {name: t.clone() for name, t in ours.feature_map.state_dict().items()}
    assert ours.load_state_dict(theirs.state_dict(), strict=True).missing_keys == []
    assert all(torch.equal(t, ours.state_dict()[name]) for name, t in theirs.state_dict().items())
    assert all(torch.equal(t, ours.feature_map.state_dict()[name]) for name, t in own_map.items())
    extra = set(ours.state_dict()) - set(theirs.state_dict())
    assert extra == {f"feature_map.{name}" for name in own_map}
    other = make(**options, seed=5)
    other.load_state_dict(ours.state_dict())
    assert all(torch.equal(t, other.state_dict()[name]) for name, t in ours.state_dict().items())


def test_a_torch_state_dict_loads_inside_a_larger_model() -> None:
    ours, theirs = nn.Sequential(nn.Linear(2, 2), make()), nn.Sequential(nn.Linear(2, 2), torch_module())
    ours.load_state_dict(theirs.double().state_dict())
    assert torch.equal(ours[1].in_proj_weight, theirs[1].in_proj_weight)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"num_heads": H},
        {"window": 3, "sinks": 1},
        {"window": 3, "sinks": 1, "window_kind": "sliding"},
    ],
)
def test_output_is_the_quadratic_attention_of_its_heads(is_causal: bool, options: dict[str, Any]) -> None:
    module = make(**options)
    x = draw(2, 20, E)
    mask = torch.arange(20).expand(2, -1) >= torch.tensor([[20], [13]])
    exact = {name: options[name] for name in ("window", "sinks", "window_kind") if name in options}
    want = through_weights(module, x, x, x, is_causal=is_causal, key_padding_mask=mask, **exact)
    got, weights = module(x, x, x, key_padding_mask=mask, is_causal=is_causal)
    assert weights is None
    assert_same(got, want)
    causal = nn.Transformer.generate_square_subsequent_mask(20, dtype=torch.float64)
    if is_causal:
        for attn_mask in (causal, causal == -torch.inf):
            assert torch.equal(module(x, x, x, key_padding_mask=mask, attn_mask=attn_mask)[0], got)


def test_cross_attention_takes_other_sizes_and_lengths() -> None:
    module = make(kdim=5, vdim=7)
    q, k, v = draw(2, 6, E), draw(2, 9, 5, seed=1), draw(2, 9, 7, seed=2)
    assert_same(module(q, k, v)[0], through_weights(module, q, k, v))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_with_a_window_over_everything_it_is_torchs_module(batch_first: bool, is_causal: bool) -> None:
    """Axes, unbatched input, returned weights: exact attention shows every departure."""
    ours, theirs = make(batch_first=batch_first, window=50), torch_module(batch_first=batch_first)
    ours.load_state_dict(theirs.state_dict())
    causal = nn.Transformer.generate_square_subsequent_mask(10, dtype=torch.float64) if is_causal else None
    for x in (draw(10, E), draw(2, 10, E) if batch_first else draw(10, 2, E)):
        for average in (False, True):
            got, want = (
                m(x, x, x, need_weights=True, average_attn_weights=average, attn_mask=causal) for m in (ours, theirs)
            )
            assert_same(got, want)


@pytest.mark.parametrize("batch_first", [False, True])
def test_an_input_without_a_batch_is_a_batch_of_one(batch_first: bool) -> None:
    module, x, mask = make(batch_first=batch_first), draw(10, E), torch.arange(10) >= 7
    whole = x.unsqueeze(0 if batch_first else 1)
    got, weights = module(x, x, x, key_padding_mask=mask, need_weights=True)
    want, same = module(whole, whole, whole, key_padding_mask=mask[None], need_weights=True)
    assert torch.equal(got, want.squeeze(0 if batch_first else 1))
    assert torch.equal(weights, same[0])
    assert not torch.allclose(got, module(x, x, x)[0], atol=1e-3)


class Recorder(MultiheadAttention):
    """Counts its calls, so that a layer that goes past the module is seen."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("no_grad", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_it_replaces_self_attention_in_torchs_encoder(training: bool, no_grad: bool, padded: bool) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"dim_feedforward": 8, "dropout": 0.0, "batch_first": True, "dtype": torch.float64}
    layer = nn.TransformerEncoderLayer(E, H, **options)
    # A window over everything makes it exact attention: the whole layer must then be torch's.
    module = Recorder(E, H, batch_first=True, dtype=torch.float64, attention=Attention(window=99))
    module.load_state_dict(layer.self_attn.state_dict())
    ours = nn.TransformerEncoderLayer(E, H, **options)
    ours.load_state_dict(layer.state_dict())
    ours.self_attn = module
    x = draw(2, 9, E)
    mask = torch.arange(9).expand(2, -1) >= torch.tensor([[9], [6]]) if padded else None
    causal = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    with torch.set_grad_enabled(not no_grad):
        for attn_mask in (None, causal, causal == -torch.inf):
            hole = mask
            if mask is not None and attn_mask is not None and attn_mask.is_floating_point():
                hole = torch.zeros(2, 9, dtype=torch.float64).masked_fill(mask, -torch.inf)  # torch wants one dtype
            call: dict[str, Any] = {"src_mask": attn_mask, "src_key_padding_mask": hole}
            call |= {"is_causal": attn_mask is not None}
            got, want = (m.train(training)(x, **call) for m in (ours, layer))
            valid = slice(None) if mask is None else ~mask
            assert_same(got[valid], want[valid])
    assert module.calls == 3


def test_a_whole_encoder_and_decoder_run_with_it() -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"dim_feedforward": 8, "dropout": 0.0, "batch_first": True, "dtype": torch.float64}
    exact: dict[str, Any] = {"batch_first": True, "dtype": torch.float64}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, **options), 2, enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, **options), 2)
    x, y = draw(2, 9, E), draw(2, 7, E, seed=1)
    causal = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    mask = torch.arange(9).expand(2, -1) >= torch.tensor([[9], [6]])

    def run() -> Tensor:
        memory = encoder.eval()(x, src_key_padding_mask=mask)
        return decoder.eval()(y, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=mask)

    with torch.no_grad():
        want = run()
        for layer in (*encoder.layers, *decoder.layers):
            for name, reach in (("self_attn", {"window": 99}), ("multihead_attn", {"sinks": 99})):
                if hasattr(layer, name):
                    module = MultiheadAttention(E, H, **exact, attention=Attention(**reach))
                    module.load_state_dict(getattr(layer, name).state_dict())
                    setattr(layer, name, module)
        assert_same(run(), want)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rotary": True},
        {"window": 3, "sinks": 1, "rotary": True},
        {"window": 3, "sinks": 1, "window_kind": "sliding", "rotary": True},
    ],
)
def test_decoding_steps_equal_one_causal_pass(options: dict[str, Any]) -> None:
    module = make(**options)
    x = draw(2, 20, E)
    want = module(x, x, x, is_causal=True)[0]
    for sizes in ([1] * 20, [7, 1, 12]):
        state, rows, held = None, [], []
        for part in x.split(sizes, dim=1):
            out, state = module.step(part, state)
            rows.append(out)
            held.append(state.attention.nbytes)
        assert_same(torch.cat(rows, dim=1), want)
        assert state.position == 20
        # A sliding window of 3 is full by then and the sink has left it; blocks of 3 fill and start again.
        period = 3 if options.get("window") and "window_kind" not in options else 1
        assert held[6 + period :] == held[6:-period]


def test_rotated_products_depend_on_the_difference_of_positions_only() -> None:
    q, k = draw(1, 6, seed=1), draw(1, 6, seed=2)
    products = torch.stack([rotate(q.float(), i) @ rotate(k.float(), i + 5).mT for i in (0, 1, 100, 4000)])
    assert_same(products, products[:1].expand_as(products), tol=1e-3)
    assert float((rotate(q, 0) @ rotate(k, 3).mT - rotate(q, 0) @ rotate(k, 5).mT).abs().max()) > 1e-2
    x = draw(3, 8, 6)
    assert_same(rotate(x).norm(dim=-1), x.norm(dim=-1), tol=1e-6)
    assert torch.equal(rotate(x[:, :1]), x[:, :1])
    assert torch.equal(rotate(x)[:, 3:], rotate(x[:, 3:], 3))


def test_rotary_attention_does_not_see_a_common_shift() -> None:
    module = make(rotary=True, window=50)  # exact attention: the map itself is not rotation invariant
    x = draw(1, 10, E)
    out = module(x, x, x)[0]
    q, k, v = module._heads(x, x, x)
    shifted = naive_attention(rotate(q, 17), rotate(k, 17), v, module.feature_map, window=50)
    assert_same(module.out_proj(shifted.transpose(1, 2).flatten(-2)), out, tol=1e-5)
    plain = make(window=50)
    assert float((plain(x, x, x)[0] - out).detach().abs().max()) > 1e-3


def test_calibration_from_module_inputs_changes_the_map_and_lowers_the_error() -> None:
    x = draw(8, 100, E) + 1.5
    exact = make(window=1000)
    plain, calibrated = (make(feature_map="calibrated", num_heads=H, num_features=32) for _ in range(2))
    assert calibrated.calibrate_(x) is calibrated
    want = exact(x, x, x)[0]
    errors = [float((m(x, x, x)[0] - want).detach().norm()) for m in (plain, calibrated)]
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize("is_causal", [False, True])
def test_scale_reaches_output_weights_and_steps(is_causal: bool) -> None:
    module, x = make(scale=0.2, feature_map="positive"), draw(2, 9, E)
    out, weights = module(x, x, x, is_causal=is_causal, need_weights=True, average_attn_weights=False)
    assert_same(out, through_weights(module, x, x, x, scale=0.2, is_causal=is_causal))
    assert not torch.allclose(out, make()(x, x, x, is_causal=is_causal)[0], atol=1e-4)
    values = (x @ module.in_proj_weight[2 * E :].T + module.in_proj_bias[2 * E :]).view(2, 9, H, D).transpose(1, 2)
    assert_same(module.out_proj((weights @ values).transpose(1, 2).flatten(-2)), out)
    if is_causal:
        assert_same(module.step(x)[0], out)
    with pytest.raises(BochnerError, match="'scale'"):
        make(scale=-1.0)(x, x, x)


def test_calibration_follows_the_scale() -> None:
    x = draw(4, 50, E) + 1
    one, other = (make(feature_map="calibrated", num_heads=H, scale=s).calibrate_(x) for s in (None, 1.0))
    same = make(feature_map="calibrated", num_heads=H, scale=D**-0.5).calibrate_(x)
    assert all(torch.equal(a, b) for a, b in zip(one.buffers(), same.buffers(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=True))


def test_learned_maps_train_in_a_group_of_their_own() -> None:
    module, x, target = make(feature_map="gmm_prf"), draw(2, 9, E), draw(2, 9, E, seed=1)
    learned = {id(p) for p in module.feature_map.parameters()}
    groups = parameter_groups(module, 1e-2, map_lr=1e-1, weight_decay=0.1)
    assert {id(p) for p in groups[-1]["params"]} == learned
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(id(p) for p in module.parameters())
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(1e-2, 0.1), (1e-2, 0.0), (1e-1, 0.0)]
    optimizer, losses = torch.optim.AdamW(groups), []
    before = [p.detach().clone() for p in module.feature_map.parameters()]
    for _ in range(20):
        loss = (module(x, x, x)[0] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert all(not torch.equal(a, b) for a, b in zip(before, module.feature_map.parameters(), strict=True))


def test_a_map_of_ones_own_is_taken() -> None:
    phi = feature_map("relu", dim=D, num_features=8)
    assert make(feature_map=phi).feature_map is phi


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ({"dropout": 0.1}, "'dropout' of MultiheadAttention must be 0, got 0.1"),
        ({"embed_dim": 13}, "'embed_dim' of MultiheadAttention must be a multiple of 'num_heads', got 13 and 3"),
        ({"num_heads": 0}, "'num_heads' of MultiheadAttention must be a positive int, got 0"),
        ({"embed_dim": "12"}, "'embed_dim' of MultiheadAttention must be a positive int, got '12'"),
        ({"embed_dim": 12.0}, "'embed_dim' of MultiheadAttention must be a positive int, got 12.0"),
        ({"window": 0}, "'window' of MultiheadAttention must be a positive int or None, got 0"),
        ({"window": 2.5}, "'window' of MultiheadAttention must be a positive int or None, got 2.5"),
        ({"window_kind": "x"}, "'window_kind' of MultiheadAttention must be one of .* got 'x'"),
        ({"sinks": -1}, "'sinks' of MultiheadAttention must be an int >= 0, got -1"),
        ({"scale": -1}, "'scale' of MultiheadAttention must be a positive finite number, got -1"),
        ({"feature_map": "nope"}, "Unknown feature map 'nope'"),
        ({"feature_map": None}, "without a map needs a 'window' or 'sinks'"),
        ({"head_dim": 0}, "'head_dim' of MultiheadAttention must be a positive int, got 0"),
        ({"rotary": -1.0}, "'rotary' of MultiheadAttention must be a positive finite number"),
        ({"add_bias_kv": True}, "'add_bias_kv' and 'add_zero_attn' of MultiheadAttention must be False"),
        ({"num_features": 0}, "'num_features' of MultiheadAttention must be a positive int, got 0"),
        ({"feature_map": feature_map("positive", dim=5)}, "has dim=5, but embed_dim / num_heads is 4"),
    ],
)
def test_what_cannot_be_built_is_refused(build: dict[str, Any], message: str) -> None:
    def built() -> MultiheadAttention:
        sizes = {name: build.get(name, size) for name, size in (("embed_dim", E), ("num_heads", H))}
        how, rest = settings(**{name: value for name, value in build.items() if name not in sizes})
        return MultiheadAttention(**sizes, attention=how, **rest)

    with pytest.raises(BochnerError, match=message):
        built()


def test_what_cannot_be_honoured_is_refused() -> None:
    module, x = make(), draw(2, 5, E)
    band = torch.ones(5, 5, dtype=torch.bool).triu(2)
    bias = draw(5, 5, seed=3)
    for mask in (band, bias, bias.expand(6, 5, 5), torch.ones(5, 5, dtype=torch.bool)):
        with pytest.raises(BochnerError, match="neither causal nor empty"):
            module(x, x, x, attn_mask=mask)
    for empty in (torch.zeros(5, 5), torch.zeros(5, 5, dtype=torch.bool)):
        assert torch.equal(module(x, x, x, attn_mask=empty)[0], module(x, x, x)[0])
    with pytest.raises(BochnerError, match="may hold only 0 and -inf"):
        module(x, x, x, key_padding_mask=draw(2, 5))
    with pytest.raises(BochnerError, match="'query' of MultiheadAttention must be a floating-point tensor"):
        module(x.long(), x, x)
    with pytest.raises(BochnerError, match="even head size, got 3"):
        MultiheadAttention(9, 3, attention=Attention(rotary=True))(
            torch.randn(5, 2, 9), torch.randn(5, 2, 9), torch.randn(5, 2, 9)
        )
    nested = torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
    with pytest.raises(BochnerError, match="nested tensor"):
        module(nested, nested, nested)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_module_keeps_its_frequencies_in_full_precision(dtype: torch.dtype) -> None:
    module = make().to(dtype)
    x = draw(2, 8, E, dtype=dtype)
    out = module(x, x, x)[0]
    assert out.dtype == dtype
    assert all(b.dtype == torch.float32 for b in module.feature_map.buffers() if b.is_floating_point())


X = draw(2, 5, E, dtype=torch.float32)
HIDDEN = torch.ones(5, 5, dtype=torch.bool).triu(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"attn_mask": HIDDEN.expand(5, 5, 5)}, r"\(b h, n, s\) = \(6, 5, 5\), got \(5, 5, 5\)"),
        ({"attn_mask": HIDDEN.expand(5, 5, 5), "is_causal": True}, r"\(b h, n, s\) = \(6, 5, 5\), got \(5, 5, 5\)"),
        ({"attn_mask": HIDDEN.tolist()}, "'attn_mask' of MultiheadAttention must be a bool or floating-point tensor"),
        ({"attn_mask": HIDDEN.long()}, "'attn_mask' .* tensor, got torch.int64"),
        ({"key_padding_mask": [[False] * 5] * 2}, "'key_padding_mask' of MultiheadAttention must be a bool or"),
        (
            {"query": X[..., :5]},
            r"'query' of MultiheadAttention must have 2 axes .* the last of 12, got shape \(2, 5, 5\)",
        ),
        ({"key": X[..., :5]}, "'key' of MultiheadAttention must have 2 axes"),
        ({"query": X[0, 0]}, r"'query' of MultiheadAttention must have 2 axes .* got shape \(12,\)"),
        ({"key": X[0]}, r"'key' of MultiheadAttention must have 2 axes .* got shape \(5, 12\)"),
        ({"value": X.double()}, "'value' of MultiheadAttention is torch.float64, its weights are torch.float32; cast"),
        ({"is_causal": "no"}, "'is_causal' of MultiheadAttention must be True or False, got 'no'"),
    ],
)
def test_wrong_inputs_are_answered_by_one_sentence(call: dict[str, Any], message: str) -> None:
    module = MultiheadAttention(E, H, batch_first=True, attention=Attention(num_features=8))
    with pytest.raises(BochnerError, match=message):
        module(**{"query": X, "key": X, "value": X} | call)


def test_wrong_steps_are_answered_by_one_sentence() -> None:
    module = MultiheadAttention(E, H, attention=Attention(num_features=8))
    with pytest.raises(BochnerError, match=r"'state' of MultiheadAttention.step must be what the last step returned"):
        module.step(X, state=3)  # type: ignore[arg-type]
    with pytest.raises(BochnerError, match=r"'x' of MultiheadAttention.step must have 3 axes"):
        module.step(X[0])
    with pytest.raises(BochnerError, match=r"'x' of MultiheadAttention is torch.float64"):
        module.step(X.double())


def test_autocast_may_mix_dtypes() -> None:
    module = MultiheadAttention(E, H, batch_first=True, attention=Attention(num_features=8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(X.bfloat16(), X, X)[0].isfinite().all()


def test_settings_given_one_by_one_make_the_same_module() -> None:
    x = draw(2, 9, E)
    single: dict[str, Any] = {"feature_map": "relu", "num_features": 8, "num_heads": H, "projection": "iid", "seed": 3}
    single |= {"window": 2, "sinks": 1, "window_kind": "sliding", "scale": 0.3, "rotary": 500.0}
    of_map = {"num_heads": H, "projection": "iid", "seed": 3}
    near: dict[str, Any] = {"window": 2, "sinks": 1, "rotary": 500.0}
    whole = Attention("relu", 8, **near, map_options=of_map, options={"window_kind": "sliding", "scale": 0.3})
    assert Attention.of("positive", **single) == whole
    del single["num_heads"]  # the module's own argument
    modules = []
    for how in (single, {"attention": Attention.of("relu", **single)}):
        torch.manual_seed(0)
        modules.append(MultiheadAttention(E, H, batch_first=True, dtype=torch.float64, **how))
    assert torch.equal(modules[0](x, x, x)[0], modules[1](x, x, x)[0])
    assert MultiheadAttention(E, H, feature_map="relu").attention == Attention("relu")
    with pytest.raises((TypeError, BochnerError), match="nope"):
        MultiheadAttention(E, H, nope=1)
    with pytest.raises(BochnerError, match="put 'window' into it"):
        MultiheadAttention(E, H, attention=Attention(), window=3)
    with pytest.raises(BochnerError, match="'options' of Attention go to linear_attention"):
        Attention(options={"seed": 1})


@pytest.mark.parametrize("cross", [False, True])
def test_heads_of_any_size_are_the_quadratic_attention_of_their_weights(cross: bool) -> None:
    how = {"kdim": 5, "vdim": 7} if cross else {}
    module = make(head_dim=6, **how)
    q, k, v = (draw(2, 9, size, seed=i) for i, size in enumerate((E, 5, 7) if cross else (E, E, E)))
    k, v = (k, v) if cross else (q, q)
    bias = module.in_proj_bias.chunk(3)
    heads = [
        (x @ w.T + b).view(2, -1, H, 6).transpose(1, 2)
        for x, w, b in zip(
            (q, k, v), (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight), bias, strict=True
        )
    ]
    want = naive_attention(*heads, module.feature_map).transpose(1, 2).flatten(-2) @ module.out_proj.weight.T
    assert_same(module(q, k, v)[0], want + module.out_proj.bias)
    other = make(head_dim=6, seed=1, **how)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(q, k, v)[0], module(q, k, v)[0])


def test_without_a_map_a_row_attends_to_its_window_and_to_nothing_else() -> None:
    module, x = make(feature_map=None, window=3, window_kind="sliding"), draw(2, 10, E)
    q, k, v = module._heads(x, x, x)
    i = torch.arange(10)
    for is_causal in (False, True):
        distance = i[:, None] - i
        allowed = (distance < 3) & (distance >= 0) if is_causal else distance.abs() < 3
        want = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        assert_same(module(x, x, x, is_causal=is_causal)[0], module.out_proj(want.transpose(1, 2).flatten(-2)))


@pytest.mark.parametrize("name", ["positive", "relu", "trig", "moments"])
def test_what_is_remembered_of_a_memory_answers_as_the_memory_does(name: str) -> None:
    module, x, memory = make(feature_map=name), draw(2, 4, E), draw(2, 11, E, seed=1)
    mask = torch.arange(11).expand(2, -1) >= torch.tensor([[11], [6]])
    state = module.remember(memory, mask)
    assert_same(module.recall(x, state), module(x, memory, memory, key_padding_mask=mask)[0])
    with pytest.raises(BochnerError, match="sums keys up in the kernel alone"):
        make(window=3).remember(memory)


@pytest.mark.filterwarnings("ignore:.*normaliser near or below zero")
def test_rows_of_a_signed_map_that_cannot_be_divided_are_recalled_as_the_mean() -> None:
    module, x, memory = make(feature_map="trig", num_features=4), 12 * draw(2, 30, E), 12 * draw(2, 11, E, seed=1)
    with pytest.warns(BochnerWarning, match="normaliser near or below zero"):
        want = module(x, memory, memory)[0]
    assert_same(module.recall(x, module.remember(memory)), want)
