"""Landmark features: the fit against naive solutions, what the map promises, and how it takes awkward data."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bochner import BochnerError, BochnerWarning, feature_map
from bochner.maps import landmark_fit
from bochner.maps.landmark import LandmarkFeatures
from bochner.maps.landmark_fit import (
    FLOOR,
    SHARES,
    Near,
    Problem,
    Rows,
    divided,
    fit_head,
    landmarks,
    low_rank,
    measure,
    nonnegative,
    relative_error,
)

D = 8
EVERY = Near()


def heads(*shape: int, seed: int = 0, law: int = 0, d: int = D) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values around a few centres each, as real heads have them: (*shape, d); `law` fixes centres."""
    places, g = torch.Generator().manual_seed(100 + law), torch.Generator().manual_seed(1000 * seed + law)
    found = []
    for _ in range(2):
        centres = 1.2 * torch.randn(12, d, generator=places)
        label = torch.randint(12, shape, generator=g)
        found.append(centres[label] + 0.25 * torch.randn(*shape, d, generator=g))
    values = found[1] @ torch.randn(d, d, generator=places) + torch.randn(*shape, d, generator=g)
    return found[0], found[1], values


def attention_error(phi, q, k, v, near: Near = EVERY) -> float:
    """Relative error of attention through the map, by dense matrices; q, k, v (b, n, d)."""
    i = torch.arange(q.shape[-2])
    far, allowed = near.far(i, i), near.allowed(i, i)
    logits = q @ k.mT
    exact = logits.masked_fill(~allowed, -torch.inf).softmax(-1) @ v
    a, b = phi(q, "query"), phi(k, "key")
    kernel = (a.values @ b.values.mT) * far
    if phi.top_up is not None:
        lack = (phi.top_up * far.sum(-1, keepdim=True) - kernel.sum(-1, keepdim=True)).clamp_min(0)
        kernel = kernel + lack * far / far.sum(-1, keepdim=True).clamp_min(1)
    weights = kernel + (logits - a.log_scale).exp() * (allowed & ~far)
    out = weights @ v / weights.sum(-1, keepdim=True)
    return float((out - exact).norm() / exact.norm())


def test_the_fit_beats_calibrated_features_many_times_its_number():
    q, k, v = heads(12, 60)
    fresh = heads(12, 60, seed=1)
    calibrated = feature_map("calibrated", dim=D, num_features=256).calibrate_(q, k)
    for positive, m in ((True, 32), (False, 32)):
        phi = LandmarkFeatures(D, m, positive=positive).calibrate_(q, k, v)
        assert attention_error(phi, *fresh) < 0.5 * attention_error_of_kernel(calibrated, *fresh)


def attention_error_of_kernel(phi, q, k, v) -> float:
    exact = (q @ k.mT).softmax(-1) @ v
    a, b = phi(q, "query"), phi(k, "key")
    weights = (a.values @ b.values.mT) * (b.log_scale.mT - b.log_scale.max()).exp()
    return float((weights @ v / weights.sum(-1, keepdim=True) - exact).norm() / exact.norm())


def problem(n: int = 60, s: int = 80, size: int = 9, seed: int = 0, missing: float = 0.0) -> Problem:
    g = torch.Generator().manual_seed(seed)
    f, y = torch.rand(n, size, generator=g), torch.rand(s, size, generator=g)
    y = torch.cat([y, torch.ones(s, 1)], dim=-1)
    target = f @ torch.randn(size, size + 1, generator=g) @ y.mT + 0.1 * torch.randn(n, s, generator=g)
    hole = torch.rand(n, s, generator=g) < missing if missing else None
    one = torch.ones(())
    return Problem(f, y, target, hole, one, one)


def loss(x: Problem, p, r) -> float:
    gap = x.target - (x.f @ p) @ (x.g @ r).mT
    return float((gap if x.missing is None else gap * ~x.missing).square().mean())


@pytest.mark.parametrize("m", [2, 4, 9])
def test_the_low_rank_fit_is_as_good_as_alternating_least_squares(m):
    """The oracle: both factors free, the last key feature held at 1, solved in turn until nothing moves."""
    x = problem()
    x = Problem(*(t if t is None else t.double() for t in x))
    p, r, _ = low_rank(x, m, 1e-9, 1)
    g = torch.Generator().manual_seed(1)
    b = torch.cat([torch.randn(10, m - 1, generator=g).double(), torch.eye(10)[:, -1:].double()], dim=-1)
    for _ in range(1000):
        a = torch.linalg.lstsq(x.f, x.target @ torch.linalg.pinv(x.g @ b).mT).solution
        phi = x.f @ a
        rest = x.target - phi[:, -1:]  # what the constant does not explain
        b[:, :-1] = torch.linalg.lstsq(x.g, rest.mT @ torch.linalg.pinv(phi[:, :-1]).mT).solution
    assert loss(x, p, r) <= loss(x, a, b) * (1 + 1e-4)
    torch.testing.assert_close((x.g @ r)[:, -1], torch.ones(80).double(), atol=1e-6, rtol=0)


def test_what_missing_pairs_hold_does_not_matter():
    x = problem(missing=0.3)
    first = x._replace(target=x.target.masked_fill(x.missing, 0.0))
    other = x._replace(target=x.target.masked_fill(x.missing, 50.0))
    fits = [low_rank(t, 9, 1e-6, 300)[:2] for t in (first, other)]
    torch.testing.assert_close(*(p @ r.mT for p, r in fits), atol=2e-2, rtol=2e-2)
    ignored = low_rank(first._replace(missing=None), 9, 1e-6, 1)[:2]
    assert loss(x, *fits[0]) < 0.1 * loss(x, *ignored)


def test_the_nonnegative_fit_lowers_the_error_of_rectifying_the_signed_one():
    x = problem()
    x = x._replace(target=(x.f @ torch.rand(9, 3)) @ (x.g @ torch.rand(10, 3)).mT)
    p, r, _ = low_rank(x, 6, 1e-4, 1)

    def error(p, r):
        return float((x.target - (x.f @ p).clamp_min(0) @ (x.g @ r).clamp_min(0).mT).norm() / x.target.norm())

    assert error(*nonnegative(x, p, r, 1e-4)) < 0.5 * error(p, r)


def test_landmarks_are_means_of_their_nearest_rows_in_the_metric():
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(400, 3, generator=g) * torch.tensor([1.0, 1.0, 20.0])
    metric = torch.diag(torch.tensor([4.0, 1.0, 0.01]))
    centres, share = landmarks(rows, metric, 8, g)
    assert float(share.sum()) == pytest.approx(1)
    root = (metric.diagonal() + 4e-4).sqrt()

    def cost(c):
        return float(torch.cdist(rows * root, c * root).amin(-1).square().mean())

    random = sum(cost(rows[torch.randperm(400, generator=g)[:8]]) for _ in range(20)) / 20
    plain, _ = landmarks(rows, torch.eye(3), 8, g)
    assert cost(centres) < 0.8 * random
    assert cost(centres) < 0.9 * cost(plain)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("window", "kind"), [(None, "block"), (4, "block"), (4, "sliding")])
def test_far_pairs_are_those_outside_window_and_sinks(causal, window, kind):
    near = Near(causal, window, 2, kind)
    i = torch.arange(17)
    far = near.far(i, i)
    for a in range(17):
        for b in range(17):
            seen = b <= a or not causal
            if window is None:
                inside = False
            elif kind == "sliding":
                inside = abs(a - b) < window
            else:
                inside = a // 4 == b // 4 or abs(a // 4 - b // 4) == 1
            assert bool(far[a, b]) == (seen and not inside and b >= 2)


def test_the_measured_error_is_that_of_dense_attention():
    near = Near(True, 4, 1, "sliding")
    q, k, v = heads(8, 30)
    i = torch.arange(30)
    sequences = [Rows(*rows, i, i) for rows in zip(q, k, v, strict=True)]
    head = fit_head(sequences, 8, 16, near, positive=False, generator=torch.Generator().manual_seed(0))
    phi = LandmarkFeatures(D, 8, positive=False, num_landmarks=16)
    phi._take([head])
    wrong, total = measure(head, sequences, near, (head.top_up,))
    for b in range(8):
        error = attention_error(phi, q[b : b + 1], k[b : b + 1], v[b : b + 1], near)
        assert math.sqrt(float(wrong[0, b] / total[b])) == pytest.approx(error, rel=1e-3)


def test_the_interval_holds_a_new_sequence_at_its_rate():
    """Eight sequences with log-normal errors and a ninth, 2,000 times: 95 % +- 4.9 standard deviations (alpha 1e-6)."""
    g = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(2000):
        total = 1 + torch.rand(9, generator=g, dtype=torch.float64)
        own = 0.3 * (0.25 * torch.randn(9, generator=g, dtype=torch.float64)).exp()
        wrong = own.square() * total
        error, (low, high) = relative_error(wrong[:8], total[:8])
        assert error == pytest.approx(float((wrong[:8].sum() / total[:8].sum()).sqrt()))
        hits += low <= float(own[8]) <= high
    assert 1852 <= hits <= 1948


def test_sequences_that_leave_nothing_to_the_map_say_nothing():
    wrong, total = torch.tensor([0.04, 0.09, 1e-18, 0.0]), torch.tensor([1.0, 1.0, 1.0, 1.0])
    assert relative_error(wrong, total)[1] == relative_error(wrong[:2], total[:2])[1]
    assert relative_error(wrong[2:], total[2:])[1] == (0, math.inf)


@pytest.mark.parametrize("positive", [True, False])
def test_the_stated_error_holds_on_fresh_sequences(positive):
    """Twelve heads, fifteen held-back sequences and sixty fresh ones each; a t-test over heads, alpha 1e-3."""
    laws = 12
    data = [torch.stack(t, dim=1) for t in zip(*(heads(60, 50, law=i) for i in range(laws)), strict=True)]
    phi = LandmarkFeatures(D, 16, positive=positive, num_heads=laws).calibrate_(*data)
    assert ((phi.error_interval[:, 0] < phi.error) & (phi.error < phi.error_interval[:, 1])).all()
    covered, ratio = [], []
    for i in range(laws):
        one = LandmarkFeatures(D, 16, positive=positive)
        one.load_state_dict({n: t if n == "rows_seen" else t[i] for n, t in phi.state_dict().items()})
        low, high = one.error_interval
        q, k, v = heads(60, 50, seed=7, law=i)
        own = torch.tensor([attention_error(one, q[b : b + 1], k[b : b + 1], v[b : b + 1]) for b in range(60)])
        covered.append(float(((low <= own) & (own <= high)).double().mean()))
        ratio.append(attention_error(one, q, k, v) / float(one.error))
    rate = torch.tensor(covered)
    assert float(rate.mean()) > 0.95 - 4.0 * float(rate.std()) / laws**0.5
    assert 0.85 < float(rate.mean()) < 0.999  # neither missed nor so wide that it says nothing
    assert 0.8 < float(torch.tensor(ratio).median()) < 1.25


def test_the_default_dtype_does_not_matter():
    q, k, _ = heads(8, 40)
    maps = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            maps.append(LandmarkFeatures(D, 8).calibrate_(q, k, window=8, window_kind="block"))
        finally:
            torch.set_default_dtype(torch.float32)
    assert maps[1].error.dtype == torch.float64
    assert float(maps[1].error) == pytest.approx(float(maps[0].error), rel=1e-4)


@pytest.mark.parametrize("positive", [True, False])
def test_attention_over_other_lengths_is_as_good(positive):
    phi = LandmarkFeatures(D, 24, positive=positive).calibrate_(*heads(20, 50))
    here = attention_error(phi, *heads(20, 50, seed=1))
    assert attention_error(phi, *heads(5, 400, seed=2)) < 1.2 * here
    # In a short sequence the keys that a query wants may all be missing: what is left are the tails of the kernel.
    assert attention_error(phi, *heads(40, 25, seed=2)) < 2.5 * here


def test_fitting_far_pairs_alone_helps_beside_a_window():
    """Near pairs have keys of their own kind here, which a map for far pairs need not fit."""
    near = Near(False, 8, 0, "block")

    def data(seed):
        q, k, v = heads(16, 64, seed=seed)
        place = torch.arange(64)
        turn = torch.stack([(place * 2 * math.pi / 64).cos(), (place * 2 * math.pi / 64).sin()], -1) * 2.2
        q, k = q * 0.6, k * 0.6
        return torch.cat([q, turn.expand(16, -1, -1)], -1), torch.cat([k, turn.expand(16, -1, -1)], -1), v

    seen, fresh = data(0), data(1)
    far = LandmarkFeatures(D + 2, 8, positive=False).calibrate_(*seen, window=8, window_kind="block")
    every = LandmarkFeatures(D + 2, 8, positive=False).calibrate_(*seen)
    assert attention_error(far, *fresh, near) < 0.9 * attention_error(every, *fresh, near)


@pytest.mark.parametrize("positive", [True, False])
def test_a_head_that_looks_nearby_alone_is_not_spoilt_by_the_map(positive, monkeypatch):
    """Queries that find keys at like places: hardly anything lies beyond the window, and a fit that must give it
    something gives too much."""
    angle = torch.arange(160)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    place = 3.5 * torch.cat([angle.cos(), angle.sin()], dim=-1)
    g = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 3, 12, 160, D, generator=g)
    seen, fresh = ((place + 0.5 * q, place + 0.5 * k, v) for q, k, v in noise)
    how = {"is_causal": True, "window": 16, "sinks": 1}
    near, i = Near(**how), torch.arange(160)
    logits = (fresh[0] @ fresh[1].mT).masked_fill(~near.allowed(i, i), -torch.inf)
    exact, alone = logits.softmax(-1), logits.masked_fill(near.far(i, i), -torch.inf).softmax(-1)
    window = float(((alone - exact) @ fresh[2]).norm() / (exact @ fresh[2]).norm())
    error = {}
    for shares in ((), SHARES):
        monkeypatch.setattr(landmark_fit, "SHARES", shares)
        phi = LandmarkFeatures(D, 8, positive=positive, num_landmarks=64).calibrate_(*seen, **how)
        error[shares] = attention_error(phi, *fresh, near)
    assert error[()] > 1.5 * window
    assert error[SHARES] < 1.2 * window


@pytest.mark.parametrize("positive", [True, False])
def test_the_last_key_feature_stays_one_in_training(positive):
    q, k, v = heads(6, 40)
    phi = LandmarkFeatures(D, 8, positive=positive).calibrate_(q, k, v).trainable_()
    target = (q @ k.mT).softmax(-1) @ v

    def error():
        weights = phi(q, "query").values @ phi(k, "key").values.mT
        lack = (0.5 * 40 - weights.sum(-1, keepdim=True)).clamp_min(0) / 40
        weights = weights + lack
        return (weights @ v / weights.sum(-1, keepdim=True) - target).square().mean()

    optimizer = torch.optim.Adam(phi.parameters(), lr=3e-4)
    before = error().item()
    for _ in range(30):
        optimizer.zero_grad()
        error().backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in phi.parameters())
        optimizer.step()
    assert error().item() < before
    assert (phi(k, "key").values[..., -1] == 1).all()
    assert {n for n, _ in phi.named_parameters()}.isdisjoint({"error", "error_interval", "least", "caps"})


def test_positive_features_are_not_negative_and_no_row_is_lost():
    q, k, v = heads(8, 50)
    phi = LandmarkFeatures(D, 16).calibrate_(q, k, v)
    strange = 30 * torch.randn(50, D, generator=torch.Generator().manual_seed(3))
    for x in (q, strange):
        for role in ("query", "key"):
            f = phi(x, role)
            assert (f.values >= 0).all()
            assert torch.isfinite(f.values).all()
            assert torch.isfinite(f.log_scale).all()
        assert (phi(x, "query").values @ phi(k[0], "key").values.sum(0) >= FLOOR * 50).all()
    assert phi.top_up is None


def test_signed_features_say_how_far_to_top_up():
    phi = LandmarkFeatures(D, 16, positive=False, num_heads=2).calibrate_(
        *(t.unflatten(0, (4, 2)) for t in heads(8, 50))
    )
    assert phi.top_up.shape == (2,)
    assert ((phi.top_up >= 0.05) & (phi.top_up <= 0.5)).all()


def test_calibration_is_deterministic_given_its_seed():
    q, k, v = heads(8, 50)
    a, b, c = (LandmarkFeatures(D, 8, num_landmarks=16, seed=s).calibrate_(q, k, v) for s in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in zip(a.buffers(), b.buffers(), strict=True))
    assert not torch.equal(a.key_landmarks, c.key_landmarks)
    before = a.state_dict()["mix_query"].clone()
    a.redraw_(5)  # what was calibrated stays
    assert torch.equal(a.mix_query, before)
    a.calibrate_(q, k, v)
    assert not torch.equal(a.mix_query, before)


def test_query_heads_of_a_group_share_one_fit():
    q, k, v = heads(6, 4, 30)
    q = q[:, :, :30]
    grouped = LandmarkFeatures(D, 8, num_heads=2, seed=3).calibrate_(q, k[:, :2], v[:, :2], is_causal=True)
    assert grouped.mix_query.shape == (2, 16, 8)
    assert (grouped.error < 1).all()
    one = LandmarkFeatures(D, 8, num_heads=1, seed=3).calibrate_(q[:, :2], k[:, :1], v[:, :1], is_causal=True)
    torch.testing.assert_close(grouped.key_landmarks[0], one.key_landmarks[0])
    torch.testing.assert_close(grouped.error[0], one.error[0])


def test_sequences_of_different_lengths_and_other_dtypes():
    parts = [heads(n, seed=n) for n in (20, 33, 47, 51, 64, 70)]
    q, k, v = ([p[i] for p in parts] for i in range(3))
    phi = LandmarkFeatures(D, 8).calibrate_(q, k, v)
    for dtype in (torch.float16, torch.bfloat16):
        half = LandmarkFeatures(D, 8).calibrate_(*([t.to(dtype) for t in x] for x in (q, k, v)))
        assert float(half.error) == pytest.approx(float(phi.error), rel=0.1)
        f = phi(q[0].to(dtype), "query")
        assert f.values.dtype == torch.float32
        torch.testing.assert_close(f.values, phi(q[0], "query").values, atol=0.1, rtol=0.1)


def test_awkward_data_gives_a_finite_map_and_few_rows_a_warning():
    flat = torch.zeros(4, 40, D)
    outlier = heads(4, 40)[0].clone()
    outlier[0, 0] = 1e3
    for positive in (True, False):
        for q, k in ((flat, flat), (flat + 1, flat + 1), (outlier, outlier), (outlier, flat), (flat * 1e-20, outlier)):
            phi = LandmarkFeatures(D, 8, positive=positive).calibrate_(q, k)
            assert all(torch.isfinite(b).all() for n, b in phi.named_buffers() if n != "error_interval"), positive
        with pytest.warns(BochnerWarning, match="given 6 keys per head for 8 features, .* better 2,000"):
            phi = LandmarkFeatures(D, 8, positive=positive).calibrate_(outlier[:1, :6], outlier[:1, :6])
        assert phi.error_interval.tolist() == [0, math.inf]  # nothing could be held back


def test_bad_arguments_get_one_clear_sentence():
    q, k, v = heads(4, 40)
    phi = LandmarkFeatures(D, 8)
    for call, message in [
        (lambda: LandmarkFeatures(D, 1), "'num_features' of LandmarkFeatures must be at least 2"),
        (lambda: LandmarkFeatures(D, 8, num_landmarks=0), "'num_landmarks' of LandmarkFeatures must be a positive int"),
        (lambda: phi.calibrate_(q, [k, k]), "as many 'q' as 'k', and at least one, got 1 and 2"),
        (lambda: phi.calibrate_(q, k, v[:, :3]), "must have the shape of 'k' up to its last axis"),
        (lambda: phi.calibrate_(q, k, v * math.nan), "'v' of calibrate_ must be finite"),
        (lambda: phi.calibrate_(q, k, window=0), "'window' of calibrate_ must be a positive int"),
        (lambda: phi.calibrate_(q, k, sinks=-1), "'sinks' of calibrate_ must be an int >= 0"),
        (lambda: phi.calibrate_(q, k, window_kind="round"), "'window_kind' of calibrate_ must be one of"),
        (lambda: phi.calibrate_(q, k, sinks=True), "'sinks' of calibrate_ must be an int >= 0, got True"),
        (lambda: phi.calibrate_(q, k, is_causal="no"), "'is_causal' of calibrate_ must be True or False, got 'no'"),
        (lambda: LandmarkFeatures(D, 8, positive="no"), "'positive' of LandmarkFeatures must be True or False, got 'n"),
        (lambda: phi.calibrate_(q[:, :30], k, is_causal=True), "as many queries as keys in every sequence, got 30 and"),
        (lambda: phi.calibrate_(q, k[:, :20], is_causal=True), "as many queries as keys in every sequence, got 40 and"),
        (lambda: phi.calibrate_(q, k[:, :20], window=4), "as many queries as keys in every sequence, got 40 and 20"),
        (lambda: phi.calibrate_(q, k[:2]), "as many sequences of 'q' as of 'k'"),
        (lambda: phi.calibrate_(q[:, :0], k[:, :0]), "at least one sequence with a query and 2 keys"),
        (lambda: phi.calibrate_(q[:, :1], k[:, :1]), "at least one sequence with a query and 2 keys"),
        (lambda: phi.calibrate_(1e18 * q, k), "'q' of calibrate_ must have entries of at most 1e.08, got .*e.18"),
        (lambda: phi.trainable_(["foo"]), r"'names' of trainable_ must be one of \['key_landmarks', .*\], got 'foo'"),
        (lambda: phi.trainable_(["mix_key", "error"]), "got 'error'"),
        (lambda: phi.trainable_("mix"), "got 'mix'"),
    ]:
        with pytest.raises(BochnerError, match=message):
            call()


def test_grouped_query_heads_need_the_length_of_their_keys_each():
    """Two heads of 15 queries are as many rows as 30 keys have, but not their positions."""
    q, k, v = heads(6, 4, 15), heads(6, 2, 30)[1], heads(6, 2, 30)[2]
    phi = LandmarkFeatures(D, 8, num_heads=2)
    with pytest.raises(BochnerError, match="as many queries as keys in every sequence, got 15 and 30"):
        phi.calibrate_(q[0], k, v, is_causal=True)
    assert (phi.calibrate_(q[0], k, v).error < 1).all()  # without positions other lengths are fine


def test_flags_and_counts_of_numpy_are_taken():
    q, k, v = heads(8, 40)
    plain, other = (
        LandmarkFeatures(D, 8, positive=one(False)).calibrate_(q, k, v, is_causal=one(True), window=w, sinks=s)
        for one, w, s in ((bool, 4, 1), (np.bool_, np.int64(4), np.int32(1)))
    )
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), other.buffers(), strict=True))


def test_names_of_what_is_trained():
    phi = LandmarkFeatures(D, 8)
    assert [n for n, _ in phi.trainable_("mix_key").named_parameters()] == ["mix_key"]
    assert {n for n, _ in phi.trainable_(["mix_key", "caps"]).named_parameters()} == {"mix_key", "caps"}


@pytest.mark.parametrize("positive", [True, False])
def test_a_fit_is_not_loaded_into_a_map_of_the_other_sign(positive):
    fitted = LandmarkFeatures(D, 8, positive=positive).calibrate_(*heads(8, 40))
    other = torch.nn.ModuleDict({"phi": LandmarkFeatures(D, 8, positive=not positive)})
    with pytest.raises(BochnerError, match=f"fitted with positive={positive}, the map has positive={not positive}"):
        other.load_state_dict({f"phi.{n}": t for n, t in fitted.state_dict().items()})
    same = LandmarkFeatures(D, 8, positive=positive, seed=5)
    same.load_state_dict(fitted.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(fitted.buffers(), same.buffers(), strict=True))
    same.load_state_dict(LandmarkFeatures(D, 8, positive=not positive).state_dict())  # not fitted: neither sign


def test_sequences_of_one_key_are_left_out():
    parts = [heads(n, seed=n) for n in (20, 33, 47, 51, 64, 70)]
    tiny = [heads(n, seed=n) for n in (1, 0)]
    plain = LandmarkFeatures(D, 8).calibrate_(*([p[i] for p in parts] for i in range(3)), is_causal=True)
    mixed = [parts[0], tiny[0], *parts[1:], tiny[1], tiny[0]]
    other = LandmarkFeatures(D, 8).calibrate_(*([p[i] for p in mixed] for i in range(3)), is_causal=True)
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), other.buffers(), strict=True))
    assert other.rows_seen == 20 + 33 + 47 + 51 + 64 + 70


def test_the_error_of_a_single_sequence_is_of_queries_that_were_held_back():
    """Pure noise: what was fitted looks good, what was not is as bad as on fresh noise."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (1.3 * torch.randn(80, D, generator=g) for _ in range(3))
    phi = LandmarkFeatures(D, 32, positive=False).calibrate_(q, k, v)
    late, early = ((q @ k.mT).softmax(-1) @ v)[60:], slice(0, 60)
    a, b = phi(q, "query").values, phi(k, "key").values
    weights = a @ b.mT
    lack = (phi.top_up * 80 - weights.sum(-1, keepdim=True)).clamp_min(0) / 80
    out = (weights + lack) @ v / (weights + lack).sum(-1, keepdim=True)
    assert float(phi.error) == pytest.approx(float((out[60:] - late).norm() / late.norm()), rel=1e-3)
    seen = (q[early] @ k[early].mT).softmax(-1) @ v[early]
    inside = (weights + lack)[early, early]
    inside = inside @ v[early] / inside.sum(-1, keepdim=True)
    assert float(phi.error) > 1.3 * float((inside - seen).norm() / seen.norm())
    assert phi.error_interval.tolist() == [0, math.inf]


def test_a_divided_sequence_keeps_positions_and_holds_back_a_quarter_of_each_query_head():
    i, j = torch.arange(8).repeat(2), torch.arange(8)
    first, last = divided(Rows(i[:, None].float(), j[:, None].float(), j[:, None].float(), i, j))
    assert first.i.tolist() == [0, 1, 2, 3, 4, 5] * 2
    assert first.j.tolist() == [0, 1, 2, 3, 4, 5]
    assert last.i.tolist() == [6, 7] * 2
    assert last.j.tolist() == list(range(8))
    for rows in (first, last):
        assert torch.equal(rows.x[:, 0], rows.i.float())
        assert torch.equal(rows.y[:, 0], rows.j.float())
    assert len(divided(Rows(i[:2, None], j[:2, None], j[:2, None], i[:2], j[:2]))) == 1


@pytest.mark.parametrize(("count", "known"), [(1, False), (5, False), (6, True), (7, True), (8, True)])
def test_an_interval_is_stated_from_six_sequences_on(count, known):
    phi = LandmarkFeatures(D, 8).calibrate_(*heads(count, 40))
    assert math.isfinite(float(phi.error))
    assert math.isfinite(float(phi.error_interval[1])) == known


def test_two_keys_leave_nothing_to_hold_back():
    q, k, v = heads(2)
    with pytest.warns(BochnerWarning, match="given 2 keys per head for 4 features"):
        assert LandmarkFeatures(D, 4).calibrate_(q, k, v).error == math.inf
