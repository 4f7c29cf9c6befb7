"""Gates of key heads, moved together: heads that stand in for each other are not both kept."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from bochner.hf.choose import gate_gradient  # noqa: E402
from bochner.hf.layer import LinearAttention, exact  # noqa: E402
from hf_models import GROUPED, build  # noqa: E402

from bochner.hf import capture, gates  # noqa: E402
from bochner.hf.plan import LayerPlan  # noqa: E402


def layer(name: str, heads: int, kv: int, dim: int = 8) -> LinearAttention:
    kinds = ["window"] * heads
    return LinearAttention(LayerPlan(name, heads, kv, dim, dim, kinds, 3, 1, "sliding", is_causal=True))


class Asked:
    """A judge with three batches, the last of which alone has repeats, that notes which of them are asked."""

    batches = ({}, {}, {})

    def __init__(self) -> None:
        self.indices: list[int] = []

    def turn(self, step: int) -> int:
        return 2 if step % 2 == 0 else step // 2 % 2

    def loss(self, index: int, output: Any) -> Tensor:
        raise AssertionError("the gradient is given")


def test_projected_gates_are_the_nearest_within_the_budget() -> None:
    g = torch.Generator().manual_seed(0)
    for budget in (0.7, 1.0, 2.5):
        wanted, savings = torch.randn(6, generator=g).double() + 0.5, torch.rand(6, generator=g).double() + 0.2
        found = gates.project(wanted, savings, budget)
        assert found.min() >= 0
        assert found.max() <= 1
        assert found @ savings <= budget + 1e-9
        others = torch.rand(20_000, 6, generator=g).double() ** 2
        others = others[others @ savings <= budget]
        assert len(others)
        assert (others - wanted).norm(dim=-1).min() >= (found - wanted).norm() - 1e-9
    assert torch.equal(gates.project(torch.tensor([2.0, -1.0, 0.5]), torch.ones(3), 9.0), torch.tensor([1.0, 0.0, 0.5]))


def test_heads_that_stand_in_for_each_other_are_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads do the same; by damages that add up each of them comes before a third, together they do not."""
    judge = Asked()

    def loss(g: Tensor) -> Tensor:
        return 4.4 * (1 - g[0]) * (1 - g[1]) + 1.5 * (1 - g[2]) + 0.4 * (1 - g[3]) + 0.1 * (1 - g[1])

    def given(model: Any, layers: Any, at: Any, batch: Any, loss_of: Any) -> dict[str, Tensor]:
        judge.indices.append(loss_of.args[0])
        g = torch.cat([at["a"].view(2, 2).mean(-1), at["b"].view(2, 2).mean(-1)]).double().requires_grad_(True)
        (slope,) = torch.autograd.grad(loss(g), g)
        return {"a": slope[:2].repeat_interleave(2) / 2, "b": slope[2:].repeat_interleave(2) / 2}

    monkeypatch.setattr(gates, "gate_gradient", given)
    layers = {"a": layer("a", 4, 2), "b": layer("b", 4, 2)}
    start = {"a": torch.ones(2), "b": torch.ones(2)}
    found = gates.descend(None, layers, start, {"a": 5.0, "b": 5.0}, judge)
    assert len(found) == gates.STEPS - gates.WARM
    assert judge.indices[::2] == [2] * (gates.STEPS // 2)
    assert {0, 1} == set(judge.indices[1::2])
    counts = [len(x["a"]) + len(x["b"]) for x in found]
    assert counts[0] == 4
    assert counts[-1] == 1
    assert counts == sorted(counts, reverse=True)
    two = next(x for x, n in zip(found, counts, strict=True) if n == 2)
    best = min(combinations(range(4), 2), key=lambda s: loss(torch.zeros(4).index_fill(0, torch.tensor(s), 1.0)).item())
    assert two == {"a": [h for h in best if h < 2], "b": [h - 2 for h in best if h >= 2]}
    assert best == (1, 2)


def test_the_gradient_of_gates_is_that_of_the_mixture() -> None:
    """Against differences of the loss of a model whose attention is mixed by hand."""
    model = build("llama", GROUPED, head="AutoModelForCausalLM").double()
    ids = torch.randint(4, 50, (1, 24), generator=torch.Generator().manual_seed(0))
    name = "model.layers.1.self_attn"
    made = layer(name, 4, 2)
    at = torch.tensor([0.1, 0.9, 0.4, 0.0], dtype=torch.float64)

    def loss(output: Any) -> Tensor:
        return output.logits[0].square().mean()

    def mixed(g: Tensor) -> float:
        def look(n: str, call: Any) -> Tensor | None:
            if n != name:
                return None
            w = g[None, :, None, None]
            return w * exact(call) + (1 - w) * made(call)

        with capture.recording(model, look):
            return loss(capture.run(model, {"input_ids": ids})).item()

    found = gate_gradient(model, {name: made}, {name: at}, {"input_ids": ids}, loss)[name]
    for h in range(4):
        step = torch.zeros(4, dtype=torch.float64)
        step[h] = 1e-2
        assert found[h].item() == pytest.approx((mixed(at + step) - mixed(at - step)) / 2e-2, rel=2e-3)
    assert all(p.requires_grad for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())
