"""What a product says about its error holds: coverage on data with known truth, repairs, kinds of statement."""

import math

import numpy as np
import pytest
import torch
from kernel_sets import dense, real_set, statements
from scipy.stats import binom

from bochner.matvec import KernelOperator
from bochner.matvec.certificate import hold_out, probabilities
from bochner.matvec.engines.cells import CellsEngine
from bochner.matvec.measured import measured_plan

torch.set_num_threads(1)
N = 2100  # more than are all checked: hold-out rows are drawn


def data_sets():
    """Name, points, bandwidth: clustered, touching, curved, heavy-tailed, low- and high-dimensional data."""
    rng = np.random.default_rng(7)

    def mixture(d, centres, spread):
        middle = rng.normal(size=(centres, d)) * spread
        return middle[rng.integers(centres, size=N)] + rng.normal(size=(N, d))

    curve = rng.normal(size=(N, 3))
    walk = np.cumsum(rng.normal(size=(N, 20)), 0)
    return {
        "high-dimensional mixture": (mixture(64, 100, 4.0), 3.0),
        "separated clusters": (mixture(16, 60, 12.0), 1.0),
        "touching clusters": (mixture(16, 30, 1.5), 0.5),
        "a curved surface": (np.concatenate([curve, np.sin(2 * curve), np.cos(3 * curve)], 1), 0.06),
        "heavy tails": (rng.standard_t(2, size=(N, 8)), 0.12),
        "the unit square": (rng.random((N, 2)), 0.006),
        "a random walk": (walk, 2.0),
    }


SETS = data_sets()


def coverage(name, eps, operators):
    """Statements on one set, ten for each operator, every other one made to plan from samples."""
    points, bandwidth = SETS[name]
    X = points.astype(np.float32)
    truth = dense(X, X, bandwidth)
    made = [s for seed in range(operators) for s in statements(X, bandwidth, eps, seed, 10, truth, seed % 2 == 1)]
    assert all(error <= bound for kind, error, bound, _, _ in made if kind == "deterministic")
    return made


def too_many(misses, trials):
    """Whether statements that are true 95 times in 100 show so many misses less than once in a thousand times."""
    return misses > binom.ppf(0.999, trials, 0.05)


@pytest.mark.slow
def test_statements_hold_as_often_as_they_say_and_the_best_guess_alone_would_not():
    made = [s for name in SETS for s in coverage(name, 0.1, 4)]
    sampled = [s for s in made if s[0] != "deterministic"]
    assert len(sampled) >= 80
    assert not too_many(sum(error > bound for _, error, bound, _, _ in sampled), len(sampled))
    assert too_many(sum(error > guess for _, error, _, guess, _ in sampled), len(sampled))
    # Products are checked at the same confidence, and planned to be far better: almost none is beyond eps.
    assert sum(error > limit for _, error, _, _, limit in made) <= 0.01 * len(made)


@pytest.mark.slow
@pytest.mark.parametrize("eps", [0.1, 0.01])
@pytest.mark.parametrize("name", list(SETS))
def test_statements_labelled_95_percent_hold_in_95_percent_of_300_repetitions(name, eps):
    made = coverage(name, eps, 30)
    sampled = [s for s in made if s[0] != "deterministic"]
    assert not too_many(sum(error > bound for _, error, bound, _, _ in sampled), len(sampled))
    assert sum(error > limit for _, error, _, _, limit in made) <= 0.01 * len(made)


def test_exact_products_state_a_rounding_bound_that_holds():
    points, bandwidth = SETS["touching clusters"]
    x = torch.randn(N, generator=torch.Generator().manual_seed(0))
    estimate = KernelOperator(points.astype(np.float32), bandwidth=bandwidth, method="exact").matvec_with_certificate(x)
    truth = KernelOperator(points.astype(np.float32).astype(np.float64), bandwidth=bandwidth, method="exact")
    error = float((estimate.value.double() - truth @ x.double()).norm())
    assert estimate.kind == "deterministic"
    assert estimate.confidence == 1.0
    assert 0 < error <= estimate.bound <= 1e-2 * estimate.norm_x
    assert "deterministically" in estimate.statement


def test_separated_clusters_get_a_deterministic_bound():
    rng = np.random.default_rng(0)
    middle = rng.normal(size=(300, 6)) * 200
    X = (middle[rng.integers(300, size=N)] + 0.1 * rng.normal(size=(N, 6))).astype(np.float32)
    K = KernelOperator(X, bandwidth=0.3, method="cells", cells=1200)
    estimate = K.matvec_with_certificate(np.ones(N, np.float32))
    assert estimate.kind in ("deterministic", "guarantee")
    assert estimate.met


def test_a_sabotaged_plan_is_detected_and_repaired():
    points, bandwidth = SETS["touching clusters"]
    X = points.astype(np.float32)
    K = KernelOperator(X, bandwidth=bandwidth, method="cells", eps=0.05)
    index = K._engine.index
    K._engine = CellsEngine(index, measured_plan(index, None, 0.05, torch.Generator().manual_seed(0)))
    assert not K.certain
    plan = K.plan
    plan.near = torch.zeros_like(plan.near)
    plan.beta = 0.0
    x = torch.randn(N, generator=torch.Generator().manual_seed(1))
    truth = KernelOperator(X.astype(np.float64), bandwidth=bandwidth, method="exact") @ x.double()
    assert float((K._engine.apply(x[:, None]).value[:, 0] - truth).norm() / x.norm()) > 0.5
    estimate = K.matvec_with_certificate(x)
    assert estimate.cost.repairs
    assert estimate.met
    assert 0 < estimate.hold_out_rows < N
    assert float((estimate.value - truth).norm() / x.norm()) <= 0.05
    assert float(((K @ x) - truth).norm() / x.norm()) <= 0.05


def test_a_miss_that_no_probe_repairs_ends_in_exact_arithmetic():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(1500, 10)).astype(np.float32)
    K = KernelOperator(X, bandwidth=3.0, method="features", num_features=16, eps=0.01)
    x = np.ones(1500, np.float32)
    estimate = K.matvec_with_certificate(x)
    assert estimate.cost.repairs == ("exact",)
    truth = KernelOperator(X.astype(np.float64), bandwidth=3.0, method="exact") @ x.astype(np.float64)
    assert np.linalg.norm(estimate.value - truth) <= estimate.bound <= 0.01 * np.linalg.norm(x)


def test_the_hold_out_estimate_of_the_squared_error_is_unbiased():
    n = 500
    generator = torch.Generator().manual_seed(0)
    error = torch.randn(n, 1, generator=generator, dtype=torch.float64) ** 3
    scores = [error[:, 0].abs() * torch.rand(n, generator=generator, dtype=torch.float64)]
    means = torch.stack(
        [
            hold_out(error, lambda ids: torch.zeros(ids.numel(), 1).double(), scores, 64, 0.95, generator).mean[0]
            for _ in range(800)
        ]
    )
    truth = float(error.square().sum())
    t = (float(means.mean()) - truth) / (float(means.std()) / math.sqrt(len(means)))
    assert abs(t) < 5.0
    assert float(probabilities(scores, n).sum()) == pytest.approx(1.0)


def test_few_rows_are_all_checked_and_no_product_is_beyond_eps():
    """Nearly equal digits in cells that samples call far: one pair, met by one large entry of x, breaks eps alone."""
    X, bandwidth = real_set("digits", 2000)
    truth = dense(X, X, bandwidth)
    for seed in (1, 3, 5, 7):
        K = KernelOperator(X, bandwidth=bandwidth, eps=0.001, seed=seed, method="cells")
        plan = measured_plan(K._engine.index, None, 0.001, torch.Generator().manual_seed(seed))
        K._engine = CellsEngine(K._engine.index, plan)
        rng = np.random.default_rng(1000 + seed)
        for _ in range(5):
            x = rng.standard_t(1.0, size=len(X))
            said = K.matvec_with_certificate(x)
            assert np.linalg.norm(said.value - truth @ x) <= said.bound <= 0.001 * np.linalg.norm(x)
            assert np.linalg.norm(K @ x - truth @ x) <= 0.001 * np.linalg.norm(x)


def test_all_rows_checked_leave_nothing_to_chance():
    error = torch.arange(5.0, dtype=torch.float64)[:, None]
    held = hold_out(error, lambda ids: torch.zeros(ids.numel(), 1).double(), [], 10, 0.95, torch.Generator())
    assert float(held.mean) == 30.0
    assert 30.0 < float(held.guarantee) == float(held.bound) < 30.0 * (1 + 1e-11)  # but for rounding


def test_estimates_say_what_they_cost():
    points, bandwidth = SETS["separated clusters"]
    K = KernelOperator(points.astype(np.float32), bandwidth=bandwidth, method="cells")
    estimate = K.matvec_with_certificate(np.ones(N, np.float32))
    assert 0 < estimate.cost.pairs < estimate.cost.pairs_exact == N * N
    assert estimate.cost.seconds > 0
    assert f"{estimate.confidence:.0%}" in str(estimate) or estimate.kind == "deterministic"
