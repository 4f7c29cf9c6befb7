"""Redraws on schedule: counted in training passes, the same after a stop, under checkpointing and on every process."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from naive import draw
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bochner
from bochner import BochnerError, feature_map, linear_attention
from bochner.maps import FEATURE_MAPS
from bochner.maps.redraw import in_backward
from bochner.nn import Attention, MultiheadAttention, Performer, maps_of, redraw_

X = draw(2, 9, 12, dtype=torch.float32)
RANDOM = ["positive", "relu", "trig", "gmm_prf", "fastfood_rks", "generative_prf", "tensor_sketch", "angular_hybrid"]


def make(name: str = "positive", every: int = 2, seed: int = 0, **options: Any) -> MultiheadAttention:
    torch.manual_seed(0)
    how = Attention(name, 8, map_options={"redraw_every": every, "seed": seed, **options})
    return MultiheadAttention(12, 3, batch_first=True, attention=how)


def draws(model: nn.Module) -> list[Tensor]:
    """The random parts of all maps, without what counts passes."""
    return [t.clone() for phi in maps_of(model) for n, t in phi.named_buffers() if "redraw_" not in n]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def train(model: nn.Module, steps: int) -> list[list[Tensor]]:
    """The draws that the passes were made with."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.01), []
    for _ in range(steps):
        loss = model(X, X, X)[0].square().sum()
        seen.append(draws(model))
        loss.backward()
        assert same(seen[-1], draws(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.filterwarnings("ignore:.*normaliser near or below zero")
def test_a_map_in_a_layer_is_redrawn_every_so_many_passes_and_not_between(name: str) -> None:
    seen = train(make(name, every=3), 8)
    groups = [seen[0:3], seen[3:6], seen[6:8]]
    assert all(same(group[0], other) for group in groups for other in group)
    assert not any(same(a[0], b[0]) for a, b in pairwise(groups))


def test_a_map_without_a_schedule_is_never_redrawn() -> None:
    module = MultiheadAttention(12, 3, batch_first=True, attention=Attention("gmm_prf", 8))
    seen = train(module, 5)
    assert same(seen[0], seen[-1])
    assert not [name for name in module.state_dict() if "redraw_" in name]


def test_a_trained_model_is_saved_and_tested_with_the_draw_it_was_trained_with() -> None:
    module = make(every=2)
    seen = train(module, 4)
    assert same(draws(module), seen[-1])
    module.eval()(X, X, X)
    assert same(draws(module), seen[-1])
    with torch.no_grad():
        module.train()(X, X, X)
    assert not same(draws(module), seen[-1])  # the next training pass


def test_forward_passes_that_nothing_is_learned_from_are_not_counted() -> None:
    module = make(every=1)
    first = draws(module)
    for _ in range(3):
        module(X, X, X)
        module.eval()(X, X, X)[0].sum().backward()
        module.train()
    assert same(draws(module), first)


def test_a_map_that_is_used_many_times_in_a_pass_is_counted_once() -> None:
    module = make(every=3)
    seen = []
    for _ in range(5):
        y = module(X, X, X)[0]
        loss = module(y, y, y)[0].sum() + module(X, X, X)[0].sum()
        seen.append(draws(module))
        loss.backward()
    assert [same(a, b) for a, b in pairwise(seen)] == [True, True, False, True]


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_resumed_run_draws_as_one_that_was_not_stopped(stop: int) -> None:
    whole, part, rest = make(), make(), make(seed=7)
    seen = train(whole, 6)
    assert all(same(a, b) for a, b in zip(train(part, stop), seen, strict=False))
    train(rest, 1)  # whatever it did before
    rest.load_state_dict(copy.deepcopy(part.state_dict()))
    assert all(same(a, b) for a, b in zip(train(rest, 6 - stop), seen[stop:], strict=True))
    assert all(torch.equal(t, rest.state_dict()[name]) for name, t in whole.state_dict().items())


def test_a_schedule_may_begin_or_end_between_saving_and_loading() -> None:
    with_one, without = make(every=2), MultiheadAttention(12, 3, batch_first=True, attention=Attention("positive", 8))
    train(with_one, 3)
    without.load_state_dict(with_one.state_dict())
    assert same(draws(without), draws(with_one))
    fresh = make(every=2, seed=5)
    fresh.load_state_dict(without.state_dict())
    assert int(fresh.feature_map.redraw_count) == 0


class Checkpointed(nn.Module):
    def __init__(self, module: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.module, self.use_reentrant = module, use_reentrant

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        q = q.clone().requires_grad_()
        run = lambda x: self.module(x, x, x)[0]  # noqa: E731
        return checkpoint(run, q, use_reentrant=self.use_reentrant), None


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["positive", "relu"])
def test_recomputation_sees_the_draw_of_the_forward_pass(name: str, use_reentrant: bool) -> None:
    plain, again = make(name, every=1), Checkpointed(make(name, every=1), use_reentrant)
    assert all(same(a, b) for a, b in zip(train(plain, 5), train(again, 5), strict=True))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(again.module.state_dict()[name], value)
    assert not in_backward()


@pytest.mark.parametrize("name", ["positive", "relu"])
def test_layers_that_share_a_map_recompute_with_one_draw(name: str) -> None:
    """The second layer's backward pass counts before the first one is computed again."""
    grads = []
    for again in (False, True):
        module, x = make(name, every=1), X.clone().requires_grad_()
        for _ in range(3):
            module.zero_grad()
            y = x
            for _ in range(2):
                layer = lambda t: module(t, t, t)[0]  # noqa: B023, E731
                y = checkpoint(layer, y, use_reentrant=False) if again else layer(y)
            y.square().sum().backward()
        grads.append([p.grad.clone() for p in module.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_two_passes_before_one_backward_pass_are_right() -> None:
    """No redraw may come between them."""
    module = make("relu", every=1)
    train(module, 2)
    a, b = module(X, X, X)[0], module(2 * X, X, X)[0]
    (a.sum() + b.sum()).backward()
    got = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    module.eval()
    (module(X, X, X)[0].sum() + module(2 * X, X, X)[0].sum()).backward()
    for p, g in zip(module.parameters(), got, strict=True):
        torch.testing.assert_close(g, p.grad)


def test_layers_of_a_performer_draw_from_seeds_of_their_own() -> None:
    model = Performer(10, 12, 3, encoder_layers=2, attention=Attention("positive", 8, map_options={"redraw_every": 1}))
    ids = torch.arange(10)[None]
    for _ in range(2):
        a, b = (phi.projection.weight.clone() for phi in maps_of(model))
        assert not torch.equal(a, b)
        model(ids).sum().backward()
    c, d = (phi.projection.weight.clone() for phi in maps_of(model))
    assert not torch.equal(a, c)
    assert not torch.equal(c, d)


def test_attention_by_a_map_alone_counts_as_well() -> None:
    phi = feature_map("positive", 4, 8, redraw_every=2)
    q = draw(1, 2, 6, 4).requires_grad_()
    seen = []
    for _ in range(4):
        out = linear_attention(q, q, q, phi)
        seen.append(phi.projection.weight.clone())
        out.sum().backward()
    assert [torch.equal(a, b) for a, b in pairwise(seen)] == [True, False, True]


def test_learned_directions_and_calibration_are_never_redrawn() -> None:
    phi = feature_map("calibrated", 4, 8, redraw_every=1).trainable_()
    before = {n: p.clone() for n, p in phi.named_parameters()}
    phi.redraw_(3)
    assert all(torch.equal(p, before[n]) for n, p in phi.named_parameters())
    landmark = feature_map("landmark", 4, 8).trainable_()
    before = {n: p.clone() for n, p in landmark.named_parameters()}
    landmark.redraw_(3)
    assert all(torch.equal(p, before[n]) for n, p in landmark.named_parameters())


def test_an_explicit_redraw_reaches_every_map_of_a_model_and_compiled_code() -> None:
    torch.compiler.reset()
    module = MultiheadAttention(12, 3, batch_first=True, attention=Attention("positive", 8))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    before = compiled(X, X, X)[0]
    assert redraw_(nn.ModuleList([module]), seed=3) == 1
    after = compiled(X, X, X)[0]
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, module(X, X, X)[0])
    pair = nn.ModuleList([make(), make()])
    redraw_(pair, seed=1)
    assert not torch.equal(*(phi.projection.weight for phi in maps_of(pair)))


@pytest.mark.parametrize("name", sorted(FEATURE_MAPS))
def test_every_map_takes_a_schedule(name: str) -> None:
    phi = feature_map(name, 4, 16, redraw_every=5, seed=3)
    assert phi.redraw_every == 5
    with pytest.raises(BochnerError, match=r"'redraw_every' of .* must be a positive int, got 0"):
        feature_map(name, 4, 16, redraw_every=0)


PROCESS = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from bochner.nn import Attention, MultiheadAttention, maps_of
dist.init_process_group("gloo")
torch.manual_seed(0)
how = Attention("relu", 8, map_options={"redraw_every": 2})
module = DistributedDataParallel(MultiheadAttention(12, 3, batch_first=True, attention=how))
torch.manual_seed(dist.get_rank())
for step in range(5):
    x = torch.randn(2, 9, 12)
    module(x, x, x)[0].square().sum().backward()
    weight = maps_of(module)[0].projection.weight
    every = [torch.zeros_like(weight) for _ in range(2)]
    dist.all_gather(every, weight)
    assert torch.equal(*every)
if dist.get_rank() == 0:
    print(int(maps_of(module)[0].redraw_count), flush=True)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # torch's own threads abort now and then while the interpreter ends
"""


def test_two_processes_draw_the_same(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(PROCESS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "run.py"]
    source = str(Path(bochner.__file__).parent.parent)
    where = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=where, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["5"]  # training passes
