"""The diagnosis measures on other data than it calibrates on, predicts, and says when conversion is not worth it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from hf_models import GROUPED, TEXT, build, texts_as_batches

from bochner import BochnerError, Recipe, Target, convert, diagnose, search
from bochner.hf import Window


def normal(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size


def test_small_queries_need_no_more_than_a_kernel() -> None:
    q, k, v = (normal(6, 2, 60, 8, seed=i, size=0.5) for i in range(3))
    diagnosis = diagnose(q, k, v, num_features=64)
    assert {h.verdict for h in diagnosis.heads} == {"kernel is enough"}
    assert diagnosis.recipe == Recipe("calibrated", 64)
    for h in diagnosis.heads:
        assert h.measured["calibrated"] < h.measured["uniform"]


def test_sharp_far_attention_is_hopeless_and_stays_exact() -> None:
    q = normal(6, 2, 80, 8, seed=0, size=6.0)
    k, v = q.flip(-2), normal(6, 2, 80, 8, seed=2)  # each query finds its key at the other end of the sequence
    diagnosis = diagnose(q, k, v, num_features=32, near=Window(4, 1))
    assert all("keep exact" in h.verdict for h in diagnosis.heads)
    assert diagnosis.recipe.exact_heads == [(0, 0), (0, 1)]
    assert not diagnosis.worthwhile
    assert any("not worth it" in r for r in diagnosis.reasons)


def test_the_rank_floor_of_tensors_tells_what_no_map_can_do() -> None:
    """A permutation has full rank, half of it in each of two squares beside the window; flat weights have rank one."""
    q = torch.eye(64)[None, None].repeat(2, 2, 1, 1) * 30.0
    q[:, 1] = 0.0
    v = normal(2, 2, 64, 8)
    k = q.flip(-2)  # each query finds its key at the other end
    kernel = diagnose(q, k, v, num_features=16, near=Window(1, 0, "sliding"))
    assert [h.rank_floor for h in kernel.heads] == pytest.approx([(1 - 16 / 32) ** 0.5, 0.0], abs=0.02)
    assert "no map of 16 features is below: median" in str(kernel)
    causal = diagnose(q, q, v, is_causal=True, num_features=8, near=Window(4, 4))
    assert [h.rank_floor for h in causal.heads] == pytest.approx([0.0, 0.0], abs=1e-6)  # the diagonal is exact


def test_local_attention_is_given_a_window() -> None:
    place = torch.arange(100.0)
    angle = place[:, None] / torch.tensor([2.0, 5.0, 11.0, 23.0])
    q = 3.5 * torch.cat([angle.sin(), angle.cos()], dim=-1).expand(4, 1, 100, 8)
    v = normal(4, 1, 100, 8)
    (head,) = diagnose(q, q, v, num_features=16, near=Window(16, 1)).heads
    assert head.verdict == "window is enough"
    assert head.outside < 0.1


def test_predictions_follow_the_measurements() -> None:
    """For iid projections and without the normaliser: above what is measured, and by no more than two and a half."""
    errors = []
    for size in (0.3, 0.5, 0.8):
        q, k, v = (normal(4, 1, 80, 8, seed=i, size=size) for i in range(3))
        (head,) = diagnose(q, k, v, num_features=64).heads
        errors.append((head.predicted["positive"], head.measured["positive"]))
        assert head.predicted["calibrated"] <= head.predicted["positive"] + 1e-6
        for name in ("positive", "calibrated"):
            assert 0.4 < head.measured[name] / head.predicted[name] < 1.1, f"{name} at size {size}"
    assert errors == sorted(errors)


def test_uniform_attention_has_full_entropy_and_no_uniform_error() -> None:
    q, k, v = torch.zeros(2, 1, 50, 4), normal(2, 1, 50, 4), normal(2, 1, 50, 4)
    (head,) = diagnose(q, k, v, num_features=8).heads
    assert head.entropy == pytest.approx(torch.tensor(50.0).log().item(), rel=1e-4)
    assert head.measured["uniform"] < 1e-5


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_what_a_search_finds_for_a_model_is_accepted_by_convert(family: str) -> None:
    head = "AutoModel" if family == "bert" else "AutoModelForCausalLM"
    model: Any = build(family, TEXT if family == "bert" else GROUPED, head=head)
    before, config = {k: v.clone() for k, v in model.state_dict().items()}, model.config
    report = search(model, Target(keep=0.8, length=128), texts_as_batches(12))
    assert model.config is config
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
    # A decoder's memory always gains; whether so small an encoder gains time is the machine's to say.
    assert report.plan.converted or family == "bert"
    assert ("bochner.convert(model, report.plan)" in str(report)) == bool(report.plan.converted)
    assert ("Original model: " in str(report)) == bool(report.plan.converted)
    assert convert(model, report.plan).plan == report.plan


def test_it_says_when_exact_attention_is_faster() -> None:
    q = normal(2, 1, 40, 8)
    diagnosis = diagnose(q, q, num_features=256, length=16)
    assert not diagnosis.worthwhile
    assert any("exact attention is faster" in r for r in diagnosis.reasons)


def test_what_it_recommends_can_be_converted_to() -> None:
    q, k, v = (normal(6, 4, 60, 8, seed=i) for i in range(3))
    recipe = diagnose(q, k, v, num_features=16, near=Window(8, 1)).recipe
    plan = convert(build("bert", {**TEXT, "num_hidden_layers": 1}), recipe, texts_as_batches()).plan
    assert plan.layers[0].num_kv_heads == 4
    assert f"bochner.{recipe!r}" in str(diagnose(q, k, v, num_features=16, near=Window(8, 1)))


def test_bad_input_is_refused() -> None:
    q = normal(2, 1, 10, 4)
    with pytest.raises(BochnerError, match="num_features"):
        diagnose(q, q, num_features=0)
    with pytest.raises(BochnerError, match=r"'near' of diagnose must be a bochner.hf.Window"):
        diagnose(q, q, near=4)  # type: ignore[arg-type]
    with pytest.raises(BochnerError, match="4 axes"):
        diagnose(q[0], q[0], q[0])
