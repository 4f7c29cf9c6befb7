"""Samplers draw from the distribution they state, and the loss built on them estimates the softmax loss."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch.nn import functional as F

import bochner
from bochner import BochnerError, feature_map, kernel_estimate
from bochner.sampling import (
    ExactSampler,
    FeatureTree,
    LogUniformSampler,
    SampledSoftmaxLoss,
    UniformSampler,
)
from bochner.sampling.loss import PENDING

torch.set_num_threads(1)
ALPHA = 1e-6  # of every statistical test here
DIM = 8
SIZES = [1, 7, 16, 17, 129, 1000]


def problem(n=300, b=4, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    y, x = (torch.randn(k, DIM, generator=g, dtype=dtype) for k in (n, b))
    return y / 2, torch.randn(n, generator=g, dtype=dtype) / 2, x / 2


def samplers(y, b):
    return {
        "uniform": UniformSampler(len(y)),
        "log-uniform": LogUniformSampler(len(y)),
        "exact": ExactSampler(y, b),
        "tree": FeatureTree(y, b),
        "pure tree": FeatureTree(y, b, leaf_size=1, feature_map="positive"),
        "signed tree": FeatureTree(y, b, feature_map="trig", leaf_size=4),
        "normalised tree": FeatureTree(y, b, normalize=0.9),
    }


NAMES = list(samplers(*problem()[:2]))


def every_class(x, n):
    return torch.arange(n).expand(len(x), n)


def chi_square(ids, p):
    """The p-value of draws (k,) against probabilities (n,): neighbours are pooled until 10 draws are expected."""
    counts, expected = torch.bincount(ids, minlength=len(p)).double(), p.double() * len(ids)
    group = (expected.cumsum(0) / 10).floor().long().clamp_(max=max(1, int(expected.sum() / 10)) - 1)
    cells = int(group.max()) + 1
    observed, wanted = (torch.zeros(cells, dtype=torch.float64).index_add_(0, group, t) for t in (counts, expected))
    kept = wanted > 0
    assert not observed[~kept].any()
    return stats.chisquare(observed[kept], wanted[kept] * observed.sum() / wanted.sum()).pvalue


@pytest.mark.parametrize("name", NAMES)
def test_draws_have_the_stated_law(name):
    y, b, x = problem()
    sampler = samplers(y, b)[name]
    log_p = sampler.log_prob(x, every_class(x, len(y)))
    torch.testing.assert_close(log_p.exp().sum(1), torch.ones(len(x), dtype=log_p.dtype), rtol=1e-5, atol=0)
    ids, log_q = sampler.draw(x, 40_000, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(log_q, log_p.gather(1, ids), rtol=1e-4, atol=1e-5)
    for row, p in zip(ids, log_p.exp(), strict=True):
        assert chi_square(row, p) > ALPHA


@pytest.mark.parametrize("k", [1, 50])
@pytest.mark.parametrize("name", ["exact", "tree"])
def test_autocast_does_not_change_a_draw(name, k):
    y, b, x = problem(dtype=torch.float32)
    sampler = samplers(y, b)[name]
    wanted = sampler.draw(x[:2], k, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        found = sampler.draw(x[:2], k, generator=torch.Generator().manual_seed(0))
        stated = sampler.log_prob(x[:2], found.ids)
    assert torch.equal(found.ids, wanted.ids)
    torch.testing.assert_close(found.log_prob, wanted.log_prob)
    torch.testing.assert_close(found.log_prob, stated, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("k", [1, 50])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_classes_in_half_precision_can_be_drawn(dtype, k):
    y, b, x = problem()
    tree = FeatureTree(y.to(dtype), b.to(dtype))
    ids, log_prob = tree.draw(x[:2].to(dtype), k)
    torch.testing.assert_close(log_prob, tree.log_prob(x[:2].to(dtype), ids), atol=2e-2, rtol=1e-2)


def test_the_chi_square_test_rejects_another_law():
    y, b, x = problem()
    ids = FeatureTree(y, b).draw(x[:1], 40_000, generator=torch.Generator().manual_seed(1)).ids[0]
    other = ExactSampler(y, b * 0.9).log_prob(x[:1], every_class(x[:1], len(y)))[0].exp()
    assert chi_square(ids, other) < ALPHA


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("leaf_size", [1, 5, 16])
def test_the_tree_is_the_softmax_of_its_estimates(n, leaf_size):
    """The law by hand: leaves in proportion to the sum of their estimates, in a leaf the exact softmax."""
    y, b, x = problem(n)
    tree = FeatureTree(y, b, leaf_size=leaf_size, feature_map="positive", num_features=16, seed=3)
    phi = feature_map("positive", dim=DIM, num_features=16, seed=3)
    estimate = kernel_estimate(phi, x, y) * b.exp()
    exact = (x @ y.T + b).exp()
    expected = torch.empty_like(exact)
    for members in tree.order.split(leaf_size):
        share = estimate[:, members].sum(1) / estimate.sum(1)
        inside = exact[:, members] / exact[:, members].sum(1, keepdim=True)
        expected[:, members] = share[:, None] * inside
    torch.testing.assert_close(tree.log_prob(x, every_class(x, n)).exp(), expected, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(tree.log_partition(x), estimate.sum(1).log())


def test_calibration_brings_the_tree_closer_to_the_softmax():
    y, b, x = problem(500, 64)
    x, y = x + 1.0, y - 0.5
    truth = ExactSampler(y, b).log_prob(x, every_class(x, len(y))).exp()
    tree = FeatureTree(y, b)
    before = (tree.log_prob(x, every_class(x, len(y))).exp() - truth).abs().sum(1).mean()
    after = (tree.calibrate_(x).log_prob(x, every_class(x, len(y))).exp() - truth).abs().sum(1).mean()
    assert after < 0.7 * before


@pytest.mark.parametrize("name", ["exact", "tree", "pure tree", "signed tree", "normalised tree"])
@pytest.mark.parametrize("growth", [1.0, 30.0])
def test_updates_give_what_a_new_sampler_has(name, growth):
    y, b, x = problem(200)
    sampler, ids = samplers(y, b)[name], torch.tensor([0, 5, 17, 199, 100])
    fresh_y, fresh_b = y.clone(), b.clone()
    fresh_y[ids], fresh_b[ids] = growth * y[ids].flip(0), b[ids] + 1
    sampler.update_(ids, fresh_y[ids], fresh_b[ids])
    other = samplers(y, b)[name].update_(torch.arange(200), fresh_y, fresh_b)  # with the same grouping
    every = every_class(x, len(y))
    torch.testing.assert_close(sampler.log_prob(x, every), other.log_prob(x, every), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(sampler.log_prob(x, every), samplers(y, b)[name].log_prob(x, every))


@pytest.mark.parametrize("name", ["positive", "trig", "calibrated"])
def test_setting_all_classes_groups_them_as_a_new_tree_does(name):
    y, b, x = problem(200)
    fresh = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=y.dtype)
    tree = FeatureTree(y, b, feature_map=name).set_classes_(fresh)
    new = FeatureTree(fresh, b, feature_map=name)
    every = every_class(x, 200)
    assert torch.equal(tree.order, new.order)
    torch.testing.assert_close(tree.log_prob(x, every), new.log_prob(x, every))
    loss = SampledSoftmaxLoss(FeatureTree(y, b, feature_map=name), 5)
    loss.refresh_(fresh, b, all_classes=True)
    torch.testing.assert_close(loss.sampler.log_prob(x, every), new.log_prob(x, every))


def test_many_updates_leave_no_rounding_behind():
    y, b, x = problem(200, dtype=torch.float32)
    tree = FeatureTree(y, b)
    before = tree.log_prob(x, every_class(x, 200))
    for step in range(50):
        ids = torch.randperm(200, generator=torch.Generator().manual_seed(step))[:40]
        tree.update_(ids, y[ids] * 3, b[ids] + 2)
        tree.update_(ids, y[ids], b[ids])
    torch.testing.assert_close(tree.log_prob(x, every_class(x, 200)), before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["tree", "pure tree", "signed tree", "normalised tree"])
def test_the_partition_function_from_draws_is_unbiased(name):
    """A z-test over 400 repetitions at 5 standard errors."""
    y, b, x = problem()
    tree = samplers(y, b)[name]
    truth = (x @ y.T + b).logsumexp(1)
    g = torch.Generator().manual_seed(0)
    ratios = []
    for _ in range(400):
        ids, log_q = tree.draw(x, 100, generator=g)
        logits = (x[:, None] * y[ids]).sum(-1) + b[ids]
        ratios.append(((logits - log_q).logsumexp(1) - math.log(100) - truth).exp())
    ratio = torch.stack(ratios)
    assert ((ratio.mean(0) - 1).abs() < 5 * ratio.std(0) / 20).all()


@pytest.mark.parametrize("k", [1, 50])
def test_queries_that_overflow_the_precision_of_the_tree_are_refused(k):
    tree = FeatureTree(problem(dtype=torch.float32)[0])
    with pytest.raises(BochnerError, match="'x' of FeatureTree must be finite"):
        tree.draw(torch.full((1, DIM), 2e38, dtype=torch.float64) * 10, k)


@pytest.mark.parametrize("leaf_size", [1, 16])
def test_queries_without_any_mass_are_drawn_by_number(leaf_size):
    y = torch.full((50, DIM), 20.0)
    tree = FeatureTree(y, feature_map="trig", num_features=4, leaf_size=leaf_size)
    tree.uniform = 0.0
    tree._sums = [s.zero_() for s in tree._sums]
    p = tree.log_prob(torch.ones(1, DIM), torch.arange(50)[None]).exp()
    torch.testing.assert_close(p, torch.full((1, 50), 1 / 50))
    drawn = [tree.draw(torch.ones(1, DIM), 1, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    torch.testing.assert_close(torch.cat([d.log_prob for d in drawn]).exp(), torch.full((3, 1), 1 / 50))


def test_draws_leave_the_global_generator_alone_and_repeat_with_their_own():
    y, b, x = problem()
    for sampler in samplers(y, b).values():
        torch.manual_seed(0)
        before = torch.random.get_rng_state()
        first = sampler.draw(x, 5, generator=torch.Generator().manual_seed(1)).ids
        assert torch.equal(first, sampler.draw(x, 5, generator=torch.Generator().manual_seed(1)).ids)
        assert torch.equal(before, torch.random.get_rng_state())


# ---- the loss -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in NAMES if n != "normalised tree"])
def test_the_estimate_of_the_normaliser_is_unbiased(name):
    """`exp(loss + o_t)` is the estimate of Z: a z-test over 4,000 draws of 8 classes at 5 standard errors."""
    y, b, x = problem()
    target = torch.tensor([3])
    loss = SampledSoftmaxLoss(samplers(y, b)[name], 8, reduction="none")
    repeated = x[:1].expand(4000, -1)
    o = x[:1] @ y.T + b
    values = (loss(repeated, target.expand(4000), y, b) + o[0, 3]).exp() / o.exp().sum()
    assert abs(values.mean() - 1) < 5 * values.std() / math.sqrt(4000)
    assert values.std() > 0


@pytest.mark.parametrize("name", ["uniform", "exact", "tree", "signed tree"])
def test_gradients_approach_those_of_the_softmax(name):
    y, b, x = problem(50)
    target = torch.tensor([3, 0, 49, 7])
    inputs = [t.clone().requires_grad_() for t in (x, y, b)]
    loss = SampledSoftmaxLoss(samplers(y, b)[name], 20_000)
    got = torch.autograd.grad(loss(inputs[0], target, inputs[1], inputs[2]), inputs)
    exact = torch.autograd.grad(loss.eval()(inputs[0], target, inputs[1], inputs[2]), inputs)
    for g, e in zip(got, exact, strict=True):
        assert (g - e).norm() < 0.05 * e.norm()


def test_in_eval_the_loss_is_the_cross_entropy():
    y, b, x = problem(b=600)
    target = torch.arange(600) % len(y)
    target[5] = -100
    loss = SampledSoftmaxLoss(UniformSampler(len(y)), 4).eval()
    torch.testing.assert_close(loss(x, target, y, b), F.cross_entropy(x @ y.T + b, target))
    torch.testing.assert_close(loss(x, target, y), F.cross_entropy(x @ y.T, target))


def test_reductions_and_ignored_targets():
    y, b, x = problem()
    target = torch.tensor([[1, -100], [2, 3]])
    none, mean, total = (
        SampledSoftmaxLoss(UniformSampler(len(y)), 9, reduction=r)(x.view(2, 2, -1), target, y, b)
        for r in ("none", "mean", "sum")
    )
    assert none.shape == (2, 2)
    assert none[0, 1] == 0
    torch.testing.assert_close(mean, none.sum() / 3)
    torch.testing.assert_close(total, none.sum())


def test_sparse_gradients_are_the_dense_ones():
    y, _, x = problem()
    grads = []
    for sparse in (False, True):
        weight = y.clone().requires_grad_()
        SampledSoftmaxLoss(FeatureTree(y), 5, sparse=sparse)(x, torch.tensor([1, 1, 2, 3]), weight).backward()
        grads.append(weight.grad)
    assert grads[1].is_sparse
    torch.testing.assert_close(grads[0], grads[1].to_dense())


def test_refreshing_after_a_step_keeps_the_tree_true():
    y, b, x = problem()
    weight, bias = y.clone().requires_grad_(), b.clone().requires_grad_()
    loss = SampledSoftmaxLoss(FeatureTree(y, b), 20)
    optimizer = torch.optim.SGD([weight, bias], lr=5.0)
    for _ in range(3):
        optimizer.zero_grad()
        loss(x, torch.tensor([1, 5, 2, 3]), weight, bias).backward()
        optimizer.step()
        loss.refresh_(weight, bias)
    every = every_class(x, len(y))
    now = loss.sampler.log_prob(x, every)
    same = FeatureTree(y, b).update_(torch.arange(len(y)), weight, bias)
    torch.testing.assert_close(now, same.log_prob(x, every))
    assert not torch.allclose(now, FeatureTree(y, b).log_prob(x, every), atol=1e-3)
    with torch.no_grad():
        weight.mul_(0.5)
    loss.refresh_(weight, bias, all_classes=True)
    expected = FeatureTree(y, b).set_classes_(weight, bias).log_prob(x, every)
    torch.testing.assert_close(loss.sampler.log_prob(x, every), expected)


def test_mistakes_are_named():
    y, b, x = problem()
    with pytest.raises(BochnerError, match="'x' of FeatureTree must have shape"):
        FeatureTree(y).draw(x[:, :3], 2)
    with pytest.raises(BochnerError, match="'vectors' of FeatureTree must be finite"):
        FeatureTree(y / 0)
    with pytest.raises(BochnerError, match=r"'bias' of FeatureTree must have shape \(300,\)"):
        FeatureTree(y, b[:5])
    with pytest.raises(BochnerError, match="must estimate the softmax kernel"):
        FeatureTree(y, feature_map="relu")
    with pytest.raises(BochnerError, match=r"'vectors' of FeatureTree.*overflow.*'normalize'"):
        FeatureTree(y.float() * 1e20)
    for sampler in (FeatureTree(y), ExactSampler(y), UniformSampler(300), LogUniformSampler(300)):
        for ids, said in ((-1, r"in 0\.\.299, got -1"), (300, r"in 0\.\.299, got 300"), (0.5, "integers")):
            with pytest.raises(BochnerError, match=f"'ids' of log_prob must be {said}"):
                sampler.log_prob(x, torch.full((len(x), 2), ids))
        with pytest.raises(BochnerError, match=r"'ids' of log_prob must be integers of shape \("):
            sampler.log_prob(x, torch.zeros(len(x) + 1, 2, dtype=torch.long))
    with pytest.raises(BochnerError, match="'target' of SampledSoftmaxLoss must be integers"):
        SampledSoftmaxLoss(UniformSampler(300), 3)(x, torch.zeros(len(x)), y)
    with pytest.raises(BochnerError, match="'sampler'"):
        SampledSoftmaxLoss(None, 3)
    with pytest.raises(BochnerError, match="weight"):
        SampledSoftmaxLoss(UniformSampler(300), 3)(x, torch.zeros(4, dtype=torch.long), y[:5])


@pytest.mark.parametrize("name", ["uniform", "log-uniform", "exact", "tree"])
def test_queries_and_numbers_of_draws_that_cannot_be_are_named(name):
    y, x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)), torch.ones(3, 4)
    sampler = {
        "uniform": lambda: UniformSampler(50),
        "log-uniform": lambda: LogUniformSampler(50),
        "exact": lambda: ExactSampler(y),
        "tree": lambda: FeatureTree(y),
    }[name]()
    for k in (0, -1, 2.5):
        with pytest.raises(BochnerError, match=r"'num_samples'.*positive int"):
            sampler.draw(x, k)
    ids = torch.zeros(3, 1, dtype=torch.long)
    bad = [(x * math.nan, "'x'.*finite"), (x[0], r"'x'.*\(b, [4d]\)"), (x.long(), "'x'.*float")]
    if name in ("exact", "tree"):
        bad.append((x[:, :3], r"'x'.*\(b, 4\), got \(3, 3\)"))
    for queries, words in bad:
        with pytest.raises(BochnerError, match=words):
            sampler.draw(queries, 2)
        with pytest.raises(BochnerError, match=words):
            sampler.log_prob(queries, ids)
    for outside in (-1, 50):
        with pytest.raises(BochnerError, match=r"'ids'.*0\.\.49"):
            sampler.log_prob(x, ids + outside)


def test_the_partition_function_by_features_alone_needs_the_lengths():
    y, b, x = problem()
    tree = FeatureTree(y, b, normalize=1.0)
    with pytest.raises(BochnerError, match=r"normalize=1.*use draws"):
        tree.log_partition(x)


@pytest.mark.parametrize("name", ["uniform", "tree"])
def test_what_a_loss_remembers_is_bounded_by_the_classes(name):
    y = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    sampler = UniformSampler(500) if name == "uniform" else FeatureTree(y)
    loss = SampledSoftmaxLoss(sampler, 100)
    for i in range(40):  # 202,000 numbers, every class among them
        loss(torch.ones(50, 4), torch.arange(50) + 50 * (i % 10), y)
    kept = sum(map(len, loss._touched))
    assert kept == 0 if name == "uniform" else 500 <= kept <= 2 * 500 + PENDING
    if name == "tree":  # and all of them are refreshed
        loss.refresh_(2 * y)
        torch.testing.assert_close(sampler.vectors, 2 * y[sampler.order])


def test_sampling_is_reached_from_the_package():
    assert bochner.sampling.FeatureTree is FeatureTree


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", [FeatureTree, ExactSampler])
def test_an_update_that_is_refused_changes_nothing(kind):
    y, x = randn(60, 5), randn(4, 5, seed=1)
    sampler, ids = kind(y), torch.arange(60).expand(4, 60)
    before = sampler.log_prob(x, ids)
    bad = randn(2, 5, seed=2)
    bad[1, 3] = torch.nan
    refused = [
        (torch.tensor([3, 4]), bad, "finite"),
        (torch.tensor([3, 60]), bad.nan_to_num(), "got 60"),
        (torch.tensor([-1, 3]), bad.nan_to_num(), "got -1"),
        (torch.tensor([3, 4]), randn(2, 6), "shape"),
        (torch.tensor([3, 4]), randn(1, 5), "shape"),
        (torch.tensor([0.0, 1.0]), randn(2, 5), "integers"),
    ]
    for which, vectors, said in refused:
        with pytest.raises(BochnerError, match=said):
            sampler.update_(which, vectors)
    for vectors in (randn(61, 5), randn(1, 5), torch.full((60, 5), torch.inf)):
        with pytest.raises(BochnerError):
            sampler.set_classes_(vectors)
    with pytest.raises(BochnerError, match="'bias'"):
        sampler.update_(torch.tensor([1]), randn(1, 5), torch.zeros(2))
    sampler.update_(torch.empty(0, dtype=torch.long), randn(0, 5))
    assert torch.equal(sampler.log_prob(x, ids), before)


def test_a_map_that_is_read_from_a_file_makes_new_sums():
    y, x = randn(90, 6) + 1, randn(5, 6, seed=1)
    tree, other = (FeatureTree(y, num_features=16, seed=s) for s in (0, 1))
    tree.calibrate_(randn(50, 6, seed=2) - 1)
    ids = torch.arange(90).expand(5, 90)
    assert not torch.allclose(other.log_prob(x, ids), tree.log_prob(x, ids), atol=1e-3)
    SampledSoftmaxLoss(other, 3).load_state_dict(SampledSoftmaxLoss(tree, 3).state_dict())
    torch.testing.assert_close(other.log_prob(x, ids), tree.log_prob(x, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["tree", "exact", "uniform", "log-uniform"])
def test_a_batch_without_targets_has_no_loss_and_no_gradient(kind):
    y = randn(60, 5)
    samplers = {"tree": FeatureTree(y), "exact": ExactSampler(y)}
    sampler = samplers.get(kind) or {"uniform": UniformSampler, "log-uniform": LogUniformSampler}[kind](60)
    assert sampler.draw(randn(0, 5), 3).ids.shape == (0, 3)
    hidden, weight = randn(4, 5).requires_grad_(), y.clone().requires_grad_()
    for mode in (True, False):
        value = SampledSoftmaxLoss(sampler, 7).train(mode)(hidden, torch.full((4,), -100), weight)
        value.backward()
        assert value.item() == 0
    assert float(hidden.grad.abs().max()) == 0
    for target in (60, -1):
        with pytest.raises(BochnerError, match=r"'target' of SampledSoftmaxLoss must be in 0\.\.59"):
            SampledSoftmaxLoss(sampler, 7)(hidden, torch.full((4,), target), weight)
