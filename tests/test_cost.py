"""The cost of a split sequence: its bytes are those that the collectives are given, its formulas those of its page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bochner import BochnerError, feature_map
from bochner.attention.parallel import sequence_parallel_attention
from bochner.report.parallel import AttentionShape, Network, sequence_parallel_cost


@pytest.fixture
def handed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A process group of one, and the bytes that it hands to each collective."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    sizes: list[int] = []
    for name, place in (("all_reduce", 0), ("all_gather", 1)):
        plain = getattr(dist, name)

        def counted(*args: Any, _plain: Any = plain, _place: int = place, **kwargs: Any) -> Any:
            sizes.append(args[_place].numel() * args[_place].element_size())
            return _plain(*args, **kwargs)

        monkeypatch.setattr(dist, name, counted)
    yield sizes
    dist.destroy_process_group()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("h", "g", "d", "m", "b"), [(4, 4, 8, 16, 1), (6, 2, 4, 10, 3)])
def test_bytes_are_those_handed_to_the_network(
    is_causal: bool, h: int, g: int, d: int, m: int, b: int, handed: list[int]
) -> None:
    q, k, v = (torch.randn(b, heads, 40, d) for heads in (h, g, g))
    phi = feature_map("positive", dim=d, num_features=m, seed=0)
    sequence_parallel_attention(q, k, v, phi, is_causal=is_causal)
    finite, states = min(handed), sum(handed) - min(handed)
    assert finite == 4
    shape = AttentionShape(h, g, d, m, b, is_causal)
    for devices in (2, 3, 64):
        cost = sequence_parallel_cost(6400, devices, shape, seconds_per_token=1e-6)
        moved = states * (devices - 1) if is_causal else 2 * states * (devices - 1) // devices
        assert cost.sent == moved + finite
    # One device sends nothing, and neither does the length matter.
    assert sequence_parallel_cost(640, 1, shape, seconds_per_token=1e-6).sent == 0
    longer = sequence_parallel_cost(10**8, 64, shape, seconds_per_token=1e-6)
    assert longer.sent == cost.sent
    assert longer.states == cost.states
    assert longer.ring_sent > 1000 * cost.ring_sent


def test_memory_and_time_add_up() -> None:
    layer = AttentionShape(heads=2, dim=8, num_features=16, element_size=4)
    cost = sequence_parallel_cost(1000, 4, layer, Network(1e6, 1e-3), seconds_per_token=1e-3)
    assert cost.tokens == 250
    assert cost.shard == 4 * 250 * 2 * 8 * 4  # q, k, v and the output
    assert cost.memory == cost.shard + cost.states
    assert cost.compute == pytest.approx(0.25)
    assert cost.communication == pytest.approx(cost.sent / 1e6 + 3e-3)
    assert cost.seconds == pytest.approx(cost.compute + cost.communication)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((0, 2), "'length' of sequence_parallel_cost must be a positive int, got 0"),
        ((4, 8), "must be at most the length 4, got 8"),
    ],
)
def test_mistakes_are_refused(arguments: tuple[int, int], sentence: str) -> None:
    with pytest.raises(BochnerError, match=sentence):
        sequence_parallel_cost(*arguments, seconds_per_token=1.0)
    with pytest.raises(BochnerError, match="multiple of 'kv_heads' 3, got 4"):
        AttentionShape(heads=4, kv_heads=3)
    with pytest.raises(BochnerError, match="'bandwidth' of Network must be"):
        Network(bandwidth=-1.0)
