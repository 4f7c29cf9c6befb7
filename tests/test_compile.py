"""`torch.compile(fullgraph=True)` and `torch.export` on modules that use linear attention."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from naive import assert_same, draw
from torch import Tensor, nn

from bochner import feature_map, linear_attention
from bochner.nn import Attention, MultiheadAttention

CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "bidirectional": ({}, False),
    "causal": ({}, True),
    "window": ({"window": 8, "sinks": 1}, True),
    "window both ways": ({"window": 8, "sinks": 1}, False),
    "calibrated": ({"feature_map": "calibrated", "map_options": {"num_heads": 2}}, True),
    "signed": ({"feature_map": "trig"}, False),
    "structured": ({"map_options": {"projection": "hadamard"}}, False),
}
# torch's own tracing warns about its internals, which is no concern of ours.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


class Block(nn.Module):
    def __init__(self, is_causal: bool, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = MultiheadAttention(8, 2, batch_first=True, attention=Attention(num_features=8, **options))
        self.is_causal = is_causal

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.attention(x, x, x, key_padding_mask=mask, is_causal=self.is_causal)[0]


def make(name: str) -> tuple[Block, Tensor, Tensor]:
    options, is_causal = CASES[name]
    mask = torch.zeros(2, 140, dtype=torch.bool)
    mask[1, 120:] = True
    return Block(is_causal, **options), draw(2, 140, 8, dtype=torch.float32, scale=0.5), mask


def check(compiled: Any, block: Block, x: Tensor, mask: Tensor) -> None:
    """The same outputs and gradients."""
    results = []
    for f in (compiled, block):
        out = f(x, mask)
        results.append((out, *torch.autograd.grad(out.square().sum(), tuple(block.attention.out_proj.parameters()))))
        results[-1] += torch.autograd.grad(f(x, mask).square().sum(), (block.attention.in_proj_weight,))
    assert_same(results[0], results[1], tol=1e-5)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_whole_call_is_one_graph_with_the_same_gradients(
    name: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    if parts > 1:
        monkeypatch.setattr("bochner.attention.scan.ELEMENTS", 1)  # 64 rows at a time
    block, x, mask = make(name)
    check(torch.compile(block, fullgraph=True, backend="aot_eager"), block, x, mask)


def test_a_structured_projection_is_exported_too() -> None:
    block, x, mask = make("structured")
    program = torch.export.export(block, (x, mask))
    assert_same(program.module()(x, mask), block(x, mask), tol=1e-6)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's inductor needs a C++ compiler")
@pytest.mark.parametrize(
    "name", ["bidirectional", *(pytest.param(name, marks=pytest.mark.slow) for name in ("causal", "window"))]
)
def test_the_default_compiler_generates_right_code(name: str) -> None:
    torch.compiler.reset()
    block, x, mask = make(name)
    check(torch.compile(block, fullgraph=True), block, x, mask)


@pytest.mark.parametrize("name", ["bidirectional", "causal", "window", "signed"])
def test_an_exported_program_is_the_module_for_any_batch(name: str) -> None:
    block, x, mask = make(name)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(block, (x, mask), dynamic_shapes={"x": {0: batch}, "mask": {0: batch}})
    with torch.no_grad():
        for size in (2, 5):
            y = draw(size, 140, 8, seed=size, dtype=torch.float32, scale=0.5)
            hole = mask[:1].expand(size, -1).clone()
            assert_same(program.module()(y, hole), block(y, hole), tol=1e-6)


class Attend(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.phi, self.how = feature_map("positive", dim=4, num_features=8), how

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(q, k, v, self.phi, **self.how)


KINDS: dict[str, tuple[dict[str, Any], int]] = {  # and what a length must be a multiple of to be exported as a symbol
    "bidirectional": ({}, 1),
    "causal": ({"is_causal": True}, 64),
    "block": ({"window": 8, "window_kind": "block", "sinks": 1}, 8),
    "causal block": ({"window": 8, "window_kind": "block", "sinks": 1, "is_causal": True}, 8),
    "sliding": ({"window": 8}, 64),
    "causal sliding": ({"window": 8, "sinks": 1, "is_causal": True}, 16),
}


def assert_same_at(program: Any, attend: Attend, n: int) -> None:
    qkv = [draw(1, 2, n, 4, seed=n + i, dtype=torch.float32) for i in range(3)]
    assert_same(program(*qkv), attend(*qkv), tol=1e-5)


@pytest.mark.parametrize(
    "name",
    [name if name in ("bidirectional", "causal") else pytest.param(name, marks=pytest.mark.slow) for name in KINDS],
)
def test_many_lengths_are_few_graphs(name: str) -> None:
    torch.compiler.reset()
    attend = Attend(**KINDS[name][0])
    graphs = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(attend, fullgraph=True, backend=count)  # gives up at the ninth graph
    lengths = (100, 101, 120, 33, 64, 65, 200, 256, 300, 17, 150)
    for n in lengths:
        assert_same_at(compiled, attend, n)
    assert 0 < len(graphs) < 9 < len(lengths)


def test_a_graph_of_a_known_length_takes_its_rows_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what a part needs stays in cache; never in more than `UNROLLED`."""
    monkeypatch.setattr("bochner.attention.scan.ELEMENTS", 1)  # 64 rows at a time
    reads = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        reads.append(sum("addcmul" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    attend = Attend(is_causal=True)
    for n in (64, 256, 64 * 32, 64 * 48):  # a part of one block needs no sums within it
        torch.compiler.reset()
        with torch.no_grad():
            assert_same_at(torch.compile(attend, fullgraph=True, backend=count), attend, n)
    one, four, most, still = reads
    assert four >= 3 * one
    assert most >= 3 * four
    assert still == most


@pytest.mark.parametrize("name", KINDS)
def test_a_length_can_be_exported_as_a_symbol(name: str) -> None:
    how, unit = KINDS[name]
    attend, blocks = Attend(**how), torch.export.Dim("blocks", min=2, max=4096 // unit)
    length = blocks if unit == 1 else unit * blocks
    qkv = tuple(draw(1, 2, 5 * unit, 4, seed=i, dtype=torch.float32) for i in range(3))
    program = torch.export.export(attend, qkv, dynamic_shapes=({2: length},) * 3).module()
    for count in (2, 3, 20):
        assert_same_at(program, attend, count * unit)
