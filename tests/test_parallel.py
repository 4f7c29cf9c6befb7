"""Sequences split over processes: results and gradients are those of one process, and only states cross the wire."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from naive import assert_same, draw, draw_qkv
from torch import Tensor, nn

from bochner import BochnerError, feature_map, linear_attention
from bochner.attention.parallel import sequence_parallel_attention
from bochner.maps.base import FeatureMap
from bochner.nn import Attention, MultiheadAttention

pytestmark = pytest.mark.distributed

SHARDS = {2: (1, 299), 4: (130, 1, 64, 105)}  # uneven on purpose; 300 rows in all
CASES: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "bidirectional padded": {"masked": True},
    "causal padded": {"is_causal": True, "masked": True},
    "grouped": {"is_causal": True, "g": 1},
    "scale": {"scale": 0.1},
    "large": {"is_causal": True, "size": 8.0},
    "per head": {"is_causal": True, "map": {"num_heads": 2}},
    "signed": {"is_causal": True, "size": 0.3, "map": {"name": "trig", "kernel": "gaussian", "num_features": 64}},
}


def case(name: str) -> tuple[FeatureMap, tuple[Tensor, ...], Tensor | None, dict[str, Any]]:
    """The map, the whole sequence, its mask and the options of a case, the same on every process."""
    options = dict(CASES[name])
    how = {"name": "positive", "num_features": 8, "seed": 1} | options.pop("map", {})
    phi = feature_map(how.pop("name"), dim=4, **how)
    inputs = draw_qkv(300, h=2, g=options.pop("g", 2), scale=options.pop("size", 1.0))
    mask = None
    if options.pop("masked", False):
        mask = draw(2, 300, seed=5) < -0.3
        mask[0, :140] = True  # a whole shard without keys
    return phi, inputs, mask, options


class Model(nn.Module):
    """Projections around attention over the sequence, split or whole."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        how = Attention(num_features=8)
        self.attention = MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64, attention=how)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention._heads(x, x, x)
        how: dict[str, Any] = {"phi": self.attention.feature_map, "is_causal": True}
        if self.group is None:
            out = linear_attention(q, k, v, **how)
        else:
            out = sequence_parallel_attention(q, k, v, group=self.group, **how)
        return self.attention.out_proj(out.transpose(1, 2).flatten(-2))


def worker(process: int, folder: str) -> None:
    """All four processes, then a group of two of them that are neither first nor neighbours."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=process, world_size=4)
    sent: list[int] = []
    _count_bytes(sent)
    for members in ([0, 1, 2, 3], [1, 3]):
        group = dist.new_group(members)
        if process in members:
            rank = dist.get_rank(group)
            torch.save(run(rank, len(members), group, sent), f"{folder}/{len(members)}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run(rank: int, world: int, group: Any, sent: list[int]) -> dict[str, Any]:
    rows = slice(sum(SHARDS[world][:rank]), sum(SHARDS[world][: rank + 1]))
    results: dict[str, Any] = {}
    for name in CASES:
        phi, inputs, mask, options = case(name)
        shard = tuple(t[:, :, rows].clone().requires_grad_() for t in inputs)
        hole = None if mask is None else mask[:, rows]
        sent.clear()
        out = sequence_parallel_attention(*shard, phi, key_padding_mask=hole, group=group, **options)
        results[f"{name} sent"] = sum(sent)
        weight = draw(2, 2, 300, 3, seed=9)[:, :, rows]
        results[name] = (out.detach(), *torch.autograd.grad(out, shard, weight))
    for dtype in (torch.float32, torch.bfloat16):
        shard = tuple(t[:, :, rows].to(dtype) for t in case("causal")[1])
        results[str(dtype)] = sequence_parallel_attention(*shard, case("causal")[0], is_causal=True, group=group)
    # Every rank holds part of the sequence; DDP averages the gradients of the parameters, so the loss is world * sum.
    model = nn.parallel.DistributedDataParallel(Model(group), process_group=group)
    x = draw(2, 300, 8, seed=4)[:, rows]
    (world * (model(x) * draw(2, 300, 8, seed=6)[:, rows]).sum()).backward()
    results["refused"] = refusals(rank, shard, group)
    results["ddp"] = {n: p.grad for n, p in model.module.named_parameters() if p.grad is not None}
    return results


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "is_causal": ({"is_causal": "no"}, "'is_causal' of sequence_parallel_attention must be True or False, got 'no'."),
    "no queries": ({"q": None}, "'q' of sequence_parallel_attention must be a torch.Tensor, got NoneType."),
    "no map": ({"phi": "performer"}, "Unknown feature map 'performer'"),
    "few keys": ({"k": draw(2, 2, 0, 4)}, "sequence_parallel_attention"),
}


def refusals(rank: int, shard: tuple[Tensor, ...], group: Any) -> dict[str, str]:
    """What each rank says to a mistake on rank 0 alone."""
    found = {}
    for name, (change, _) in MISTAKES.items():
        arguments: dict[str, Any] = dict(zip("qkv", shard, strict=True)) | {"phi": case("causal")[0]}
        try:
            sequence_parallel_attention(**arguments | (change if rank == 0 else {}), group=group)
        except BochnerError as error:
            found[name] = str(error)
    return found


def _count_bytes(sent: list[int]) -> None:
    """Note the bytes that this rank hands to each collective."""
    for name in ("all_reduce", "all_gather"):
        plain = getattr(dist, name)

        def counted(*args: Any, _plain: Any = plain, _name: str = name, **kwargs: Any) -> Any:
            t = args[0] if _name == "all_reduce" else args[1]
            sent.append(t.numel() * t.element_size())
            return _plain(*args, **kwargs)

        setattr(dist, name, counted)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(worker, (str(folder),), nprocs=4)
    return folder


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    world = request.param
    return [torch.load(folder / f"{world}-{rank}.pt", weights_only=True) for rank in range(world)]


@pytest.mark.parametrize("name", CASES)
def test_shards_give_outputs_and_gradients_of_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    phi, inputs, mask, options = case(name)
    inputs = tuple(t.requires_grad_() for t in inputs)
    out = linear_attention(*inputs, phi, key_padding_mask=mask, **options)
    want = (out, *torch.autograd.grad(out, inputs, draw(2, 2, 300, 3, seed=9)))
    got = tuple(torch.cat([rank[name][i] for rank in ranks], dim=2) for i in range(4))
    assert_same(got, want, tol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_of_lower_precision_differ_by_rounding(dtype: torch.dtype, ranks: list[dict[str, Any]]) -> None:
    phi, inputs, _, _ = case("causal")
    rounded = tuple(t.to(dtype) for t in inputs)
    truth = linear_attention(*(t.double() for t in rounded), phi, is_causal=True)
    whole = linear_attention(*rounded, phi, is_causal=True)
    got = torch.cat([rank[str(dtype)] for rank in ranks], dim=2)
    assert got.dtype == dtype
    assert float((got - truth).norm()) <= 2 * float((whole - truth).norm())


def test_only_states_cross_the_wire(ranks: list[dict[str, Any]]) -> None:
    # float64, 2 sequences, 2 heads, m = 8, v = 3, a column of norms; a scale; the sum of the values and their number
    state = 8 * 2 * 2 * (8 * (3 + 1) + 1 + (3 + 1))
    for name in ("bidirectional", "causal"):
        assert {rank[f"{name} sent"] for rank in ranks} == {state + 4}  # and whether all inputs are finite


def test_it_composes_with_distributed_data_parallel(ranks: list[dict[str, Any]]) -> None:
    model = Model()
    (model(draw(2, 300, 8, seed=4)) * draw(2, 300, 8, seed=6)).sum().backward()
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert len(want) == 4
    for rank in ranks:
        assert rank["ddp"].keys() == want.keys()
        for name, grad in want.items():
            assert_same(rank["ddp"][name], grad, tol=1e-10)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_on_one_rank_is_refused_on_all(name: str, ranks: list[dict[str, Any]]) -> None:
    assert MISTAKES[name][1] in ranks[0]["refused"][name]
    assert {rank["refused"][name] for rank in ranks[1:]} == {
        "The arguments of sequence_parallel_attention were refused on another rank, whose error says why."
    }


def test_without_a_process_group_it_says_what_to_do() -> None:
    with pytest.raises(BochnerError, match="call init_process_group first"):
        sequence_parallel_attention(*draw_qkv(5), "positive")


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
def test_a_device_hands_over_one_state_of_the_size_that_the_page_says(
    is_causal: bool, h: int, g: int, d: int, m: int, b: int, handed: list[int]
) -> None:
    page = (Path(__file__).parents[1] / "docs" / "several-machines.md").read_text(encoding="utf-8")
    formula = re.search(r"\$S = (.+?)\$ bytes", page)
    assert formula is not None
    assert formula[1] == "4 b g ((m + 1)(v + 1) + 1)"
    q, k, v = (torch.randn(b, heads, 40, d) for heads in (h, g, g))
    sequence_parallel_attention(q, k, v, feature_map("positive", dim=d, num_features=m, seed=0), is_causal=is_causal)
    assert min(handed) == 4  # whether all inputs are finite
    assert sum(handed) - 4 == 4 * b * g * ((m + 1) * (d + 1) + 1)
