"""What performer-pytorch trained gives the same outputs with our attention inside."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from bochner import BochnerError, data, migrate

performer_pytorch = pytest.importorskip("performer_pytorch")


def inputs(n: int = 70, d: int = 16) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, n, d, generator=g) for _ in range(3)]


@pytest.mark.parametrize("function", [None, nn.ReLU(), nn.GELU(), nn.Sigmoid(), nn.Tanh()])
def test_bidirectional_attention_is_the_same(function: nn.Module | None) -> None:
    options = {} if function is None else {"generalized_attention": True, "kernel_fn": function}
    torch.manual_seed(0)
    source = performer_pytorch.FastAttention(16, 80, **options)
    q, k, v = inputs()
    if isinstance(function, (nn.Tanh, nn.GELU)):  # signed features: keep the normaliser away from zero
        q, k = q.abs() * source.projection_matrix.mean(0).sign(), k.abs() * source.projection_matrix.mean(0).sign()
    ours = migrate.PerformerAttention(source)(q, k, v)
    torch.testing.assert_close(ours, source(q, k, v), rtol=1e-4, atol=1e-5)
    other = performer_pytorch.FastAttention(16, 80, **options)  # another draw: the comparison can fail
    assert (ours - other(q, k, v)).abs().max() > 1e-3


def test_causal_generalised_attention_is_the_same(capsys: pytest.CaptureFixture) -> None:
    source = performer_pytorch.FastAttention(16, 32, causal=True, generalized_attention=True)
    q, k, v = inputs(40)
    torch.testing.assert_close(migrate.PerformerAttention(source)(q, k, v), source(q, k, v), rtol=1e-4, atol=1e-5)


def test_without_epsilon_the_softmax_kernel_is_our_positive_map() -> None:
    from bochner import linear_attention

    source = performer_pytorch.FastAttention(16, 64)
    q, k, v = inputs()
    ours = migrate.PerformerAttention(source, epsilon=0.0)
    torch.testing.assert_close(ours(q, k, v), linear_attention(q, k, v, ours.feature_map))
    assert torch.equal(ours.feature_map.get_submodule("projection").get_buffer("weight"), source.projection_matrix)
    assert (ours(q, k, v) - source(q, k, v)).abs().max() > 1e-4  # the epsilon is not nothing


def test_a_whole_performer_is_replaced_and_keeps_its_projections() -> None:
    torch.manual_seed(0)
    model = performer_pytorch.Performer(dim=32, depth=2, heads=4, dim_head=8, local_attn_heads=2, local_window_size=16)
    model.eval()
    x = torch.randn(2, 64, 32)
    with torch.no_grad():
        before = model(x)
        migrate.performer_(model)
        after = model(x)
    assert not [m for m in model.modules() if type(m).__name__ == "FastAttention"]
    assert len([m for m in model.modules() if isinstance(m, migrate.PerformerAttention)]) == 2
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    model.train()
    model(x)  # would redraw
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)


def test_what_is_not_a_performer_is_refused() -> None:
    with pytest.raises(BochnerError, match="no FastAttention"):
        migrate.performer_(nn.Linear(3, 3))
    with pytest.raises(BochnerError, match="Linear has no 'projection_matrix'"):
        migrate.PerformerAttention(nn.Linear(3, 3))
    with pytest.raises(BochnerError, match="'no_projection'"):
        migrate.PerformerAttention(performer_pytorch.FastAttention(8, 16, no_projection=True))
    source = performer_pytorch.FastAttention(8, 16, generalized_attention=True, kernel_fn=nn.Softplus())
    with pytest.raises(BochnerError, match="'Softplus' has no counterpart"):
        migrate.PerformerAttention(source)


@pytest.mark.model
def test_a_published_performer_is_reproduced(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        folder = data.fetch("tis", quiet=True) / "tt_models"
    except data.ArtefactUnavailable as reason:
        pytest.skip(str(reason))
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "experiments"))
    monkeypatch.delitem(sys.modules, "train_tis", raising=False)
    import train_tis

    found = train_tis.compare(sorted(folder.glob("Homo*.ckpt"))[0])
    assert found["layers"] == 8
    assert found["probability"] < 1e-4
    assert found["logit"] < 1e-4 * found["logit_size"]
    assert found["without_epsilon"] > 1e-3  # a map without it would be noticed
