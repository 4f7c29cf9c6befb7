"""Performers: causal = step by step, constant memory, mixed heads, chunks, and torch's own layers converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from naive import assert_same, draw, naive_attention
from torch import nn

import bochner
from bochner import BochnerError, BochnerWarning
from bochner.nn import Attention, LayerOptions, MultiheadAttention, Performer, PerformerLayer

IDS = torch.randint(20, (2, 23), generator=torch.Generator().manual_seed(0))
SOURCE = torch.randint(20, (2, 11), generator=torch.Generator().manual_seed(1))
MASK = torch.arange(11).expand(2, -1) >= torch.tensor([[11], [7]])


def make(**options: Any) -> Performer:
    torch.manual_seed(0)
    how = {"attention": Attention("positive", 16), "decoder_layers": 2, **options}
    model = Performer(20, 24, 4, **how).double().eval()
    with torch.no_grad():
        for p in model.parameters():  # biases and norms that matter
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    return model


KINDS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "learned positions": {"positions": 40},
    "head size": {"attention": Attention("relu", 16, head_dim=10)},
    "window": {"attention": Attention("positive", 16, window=3, sinks=1)},
    "local heads": {"options": LayerOptions(local_heads=2, local_window=3)},
    "local alone": {"options": LayerOptions(local_heads=4, local_window=3)},
    "chunks": {"options": LayerOptions(chunk=5, hidden=30)},
    "source": {"encoder_layers": 1},
    "source, learned positions": {"encoder_layers": 2, "positions": 40, "options": LayerOptions(local_heads=1)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_causal_pass_is_step_by_step(kind: str) -> None:
    model = make(**KINDS[kind])
    about: dict[str, Any] = {"source": SOURCE, "source_padding": MASK} if len(model.encoder) else {}
    with torch.no_grad():
        want = model(IDS, **about)
        for sizes in ([1] * 23, [9, 1, 13]):
            state, rows = model.start(**about), []
            for ids in IDS.split(sizes, dim=1):
                out, state = model.step(ids, state)
                rows.append(out)
            assert_same(torch.cat(rows, dim=1), want)
        assert state.position == 23
        other = IDS.clone()
        other[:, 12:] = (other[:, 12:] + 1) % 20
        assert torch.equal(model(other, **about)[:, :12], want[:, :12])
        assert not torch.allclose(model(other, **about)[:, 12:], want[:, 12:])


@pytest.mark.parametrize("kind", ["rotary", "source", "local heads", "window"])
def test_generation_holds_as_much_after_many_tokens_as_after_few(kind: str) -> None:
    model = make(**KINDS[kind])
    about: dict[str, Any] = {"source": SOURCE} if len(model.encoder) else {}
    state, held = model.start(**about), []
    with torch.no_grad():
        for ids in IDS.repeat(1, 4).split(1, dim=1):
            _, state = model.step(ids, state)
            held.append(state.nbytes)
    assert max(held[10:]) == max(held[40:])  # blocks of a window fill and start again
    assert min(held[10:]) == min(held[40:])
    assert held[-1] < 23 * 4 * 2 * 24 * 8 * 2 * 4 or kind == "window"  # far less than all keys and values


def test_greedy_generation_takes_the_likeliest_token_of_a_whole_pass() -> None:
    model, ids = make(), IDS[:, :5]
    found = model.generate(ids, 6)
    for _ in range(6):
        ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(found, ids)
    one, two = (model.generate(IDS, 9, temperature=1.0, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    assert torch.equal(one, model.generate(IDS, 9, temperature=1.0, generator=torch.Generator().manual_seed(1)))
    assert not torch.equal(one, two)


@pytest.mark.parametrize("is_causal", [False, True])
def test_mixed_heads_are_one_layer_with_the_heads_of_both(is_causal: bool) -> None:
    """Against attention written out head by head: three with the map, two with a sliding window alone."""
    torch.manual_seed(0)
    options = {"window_kind": "sliding"}
    how, mixed = Attention("relu", 16, head_dim=6, options=options), LayerOptions(local_heads=2, local_window=3)
    layer = PerformerLayer(24, 5, how, mixed, is_causal=is_causal).double()
    far, near = layer.attention
    assert (far.num_heads, near.num_heads) == (3, 2)
    x = draw(2, 17, 24)
    y = layer.norm(x)
    i = torch.arange(17)
    distance = i[:, None] - i
    allowed = (distance < 3) & (distance >= 0) if is_causal else distance.abs() < 3
    heads = [
        naive_attention(*far._heads(y, y, y), far.feature_map, is_causal=is_causal),
        nn.functional.scaled_dot_product_attention(*near._heads(y, y, y), attn_mask=allowed),
    ]
    weight = torch.cat([far.out_proj.weight, near.out_proj.weight], dim=1)
    bias = far.out_proj.bias + near.out_proj.bias
    attended = x + torch.cat(heads, dim=1).transpose(1, 2).flatten(-2) @ weight.T + bias
    want = attended + layer.feed(layer.feed_norm(attended))
    got = layer(x)
    assert_same(got, want)
    every = list(layer.parameters())
    assert_same(torch.autograd.grad(got.square().sum(), every), torch.autograd.grad(want.square().sum(), every))


@pytest.mark.parametrize("chunk", [1, 5, 23, 100])
def test_a_chunked_feed_forward_part_is_the_whole_one_with_its_gradients(chunk: int) -> None:
    whole, parts = make(), make(options=LayerOptions(chunk=chunk))
    assert whole.state_dict().keys() == parts.state_dict().keys()
    losses = [m(IDS).square().sum() for m in (whole, parts)]
    assert_same(losses[1], losses[0])
    grads = [torch.autograd.grad(loss, list(m.parameters())) for m, loss in zip((whole, parts), losses, strict=True)]
    assert_same(grads[1], grads[0])


def test_chunks_of_a_model_that_is_trained_with_dropout_have_right_gradients() -> None:
    layer = PerformerLayer(8, 2, Attention("relu", 8), LayerOptions(chunk=4, dropout=0.5)).double()
    x = draw(1, 10, 8).requires_grad_()
    torch.manual_seed(0)
    loss = layer(x).square().sum()
    grad = torch.autograd.grad(loss, x)[0]
    step = 1e-6 * draw(1, 10, 8, seed=3)
    values = []
    for sign in (1, -1):
        torch.manual_seed(0)
        values.append(layer(x.detach() + sign * step).square().sum())
    torch.testing.assert_close((values[0] - values[1]) / 2, (grad * step).sum(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["local heads", "head size", "source, learned positions"])
def test_a_saved_performer_is_the_same_when_loaded(kind: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model, other = make(**KINDS[kind]), make(**KINDS[kind])
    with torch.no_grad():
        for t in (*other.parameters(), *other.buffers()):
            t.zero_()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    about: dict[str, Any] = {"source": SOURCE} if len(model.encoder) else {}
    assert torch.equal(other(IDS, **about), model(IDS, **about))


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("options", [{}, {"options": LayerOptions(local_heads=2, local_window=4)}])
def test_an_encoder_is_compiled_as_one_graph(options: dict[str, Any]) -> None:
    torch.compiler.reset()
    model = make(encoder_layers=2, decoder_layers=0, **options)
    padding = torch.arange(23).expand(2, -1) >= torch.tensor([[23], [15]])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    every = list(model.parameters())
    assert_same(compiled(IDS, padding), model(IDS, padding))
    assert_same(*(torch.autograd.grad(f(IDS, padding).square().sum(), every) for f in (compiled, model)))


def test_padding_changes_nothing_that_is_not_padding() -> None:
    model = make(encoder_layers=2, decoder_layers=0)
    padding = torch.zeros(2, 23, dtype=torch.bool)
    padding[:, 15:] = True
    other = IDS.clone()
    other[:, 15:] = 3
    assert_same(model(IDS, padding)[:, :15], model(IDS[:, :15]))
    assert torch.equal(model(other, padding)[:, :15], model(IDS, padding)[:, :15])


def test_a_decoder_learns_to_repeat_what_it_read() -> None:
    torch.manual_seed(0)
    model = Performer(8, 32, 4, decoder_layers=2, attention=Attention("relu", 32), options=LayerOptions(hidden=64))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=5e-3), []
    for _ in range(120):
        first = torch.randint(8, (16, 8))
        logits = model(first.repeat(1, 2)[:, :-1])[:, 7:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), first.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Performer(20, 24, 4), "needs layers: give 'encoder_layers', 'decoder_layers' or both"),
        (lambda: Performer(20, 24, 4, decoder_layers=-1), "'decoder_layers' of Performer must be an int >= 0, got -1"),
        (lambda: Performer(0, 24, 4, decoder_layers=1), "'vocab_size' of Performer must be a positive int, got 0"),
        (lambda: Performer(20, 24, 5, decoder_layers=1), "cannot have 5 heads with 0 local ones"),
        (lambda: Performer(20, 24, 4, decoder_layers=1, positions="sine"), "'positions' of Performer .* got 'sine'"),
        (lambda: make(options=LayerOptions(local_heads=5)), "cannot have 4 heads with 5 local ones"),
        (lambda: LayerOptions(local_heads=-1), "'local_heads' of LayerOptions must be an int >= 0, got -1"),
        (lambda: LayerOptions(chunk=0), "'chunk' of LayerOptions must be a positive int, got 0"),
        (lambda: make(positions=22)(IDS), "23 tokens exceeds the 22 learned 'positions'"),
        (lambda: make(positions=25).generate(IDS, 9), "26 tokens exceeds the 25 learned 'positions'"),
        (lambda: make()(IDS, source=SOURCE), "takes no 'source'"),
        (lambda: make(encoder_layers=1)(IDS), "needs a 'source'"),
        (lambda: make(encoder_layers=1, decoder_layers=0).generate(IDS, 3), "has no decoder"),
        (lambda: make().encode(IDS), "has no encoder"),
        (lambda: make().generate(IDS, 0), "'num_tokens' of Performer.generate must be a positive int, got 0"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(call: Any, message: str) -> None:
    with pytest.raises(BochnerError, match=message):
        call()


def torch_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    options: dict[str, Any] = {"dim_feedforward": 8, "dropout": dropout, "batch_first": True, "dtype": torch.float64}
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, **options), 2)


def test_torchs_encoder_is_converted_in_place_and_keeps_its_weights() -> None:
    pytest.importorskip("transformers")
    model, x = torch_model().eval(), draw(2, 9, 12)
    mask = torch.arange(9).expand(2, -1) >= torch.tensor([[9], [6]])
    names, want = set(model.state_dict()), model(x, src_key_padding_mask=mask)
    done = bochner.convert(model, bochner.Recipe(None, window=99))  # exact: the same outputs
    assert done.model is model
    assert all(isinstance(layer.self_attn, MultiheadAttention) for layer in model.layers)
    assert names <= set(model.state_dict())
    assert_same(model(x, src_key_padding_mask=mask)[~mask], want[~mask])
    assert done.revert() is model
    assert_same(model(x, src_key_padding_mask=mask)[~mask], want[~mask])
    bochner.convert(model, bochner.Recipe("relu", 16))
    assert model.layers[0].self_attn.feature_map.num_features == 16
    with pytest.raises(BochnerError, match=r"no attention of torch.nn left to replace"):
        bochner.convert(model)


def test_torchs_decoder_keeps_its_cross_attention() -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    options: dict[str, Any] = {"dim_feedforward": 8, "dropout": 0.0, "batch_first": True, "dtype": torch.float64}
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(12, 3, **options), 2).eval()
    x, memory = draw(2, 9, 12), draw(2, 5, 12, seed=1)
    causal = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    want = model(x, memory, tgt_mask=causal)
    bochner.convert(model, Attention(window=99))
    assert_same(model(x, memory, tgt_mask=causal), want)
    assert type(model.layers[0].multihead_attn) is nn.MultiheadAttention


def test_converted_layers_are_fitted_to_data_and_come_closer() -> None:
    pytest.importorskip("transformers")
    x = draw(6, 60, 12, seed=5) + 1.5
    errors = []
    for data in (None, x, [x[:, :40], x]):
        model = torch_model()
        for layer in model.layers:
            nn.init.normal_(layer.self_attn.in_proj_weight, std=0.4)
        want = model.eval()(x).detach()
        training = model.training
        bochner.convert(model, bochner.Recipe("calibrated", 32, options={"num_heads": 2}), data)
        assert model.training == training
        errors.append(float((model(x) - want).detach().norm()))
    assert errors[1] < 0.9 * errors[0]
    assert errors[2] < 0.9 * errors[0]


def test_dropout_of_attention_weights_is_left_out_with_a_warning() -> None:
    pytest.importorskip("transformers")
    model = torch_model(dropout=0.2)
    with pytest.warns(BochnerWarning, match=r"dropout of attention weights, 0.2, is left out"):
        bochner.convert(model, "relu")
    assert model.layers[0].dropout.p == 0.2
    with pytest.raises(BochnerError, match="'exact_heads' of a Recipe are for transformers models"):
        bochner.convert(torch_model(), bochner.Recipe("relu", 8, exact_heads=0.5))
