"""Algorithms 1 to 3: hashing, density estimates, sampling, and the guarantee over seeds."""

import math

import numpy as np
import pytest
import torch
from stats import check_mean

from bochner._checks import BochnerError
from bochner.matvec import KernelOperator
from bochner.papers.kernel_product import (
    Constants,
    approximate_product,
    collision_probability,
    find_heavy,
    hash_shape,
    kernel_pairs,
    kernel_product,
    noisy_power_method,
)

torch.set_num_threads(1)


def groups(n, size=8, d=12, seed=0):
    """Clusters of a fixed size: the sum of K grows like n, as the assumption wants."""
    generator = torch.Generator().manual_seed(seed)
    middle = 4.0 * torch.randn(math.ceil(n / size), d, generator=generator)
    return middle.repeat_interleave(size, 0)[:n] + 0.35 * torch.randn(n, d, generator=generator)


def test_two_points_collide_as_often_as_the_formula_says():
    generator = torch.Generator().manual_seed(0)
    d, width, depth, draws = 5, 3.0, 2, 20000
    gap = torch.tensor([0.8, -0.3, 0.5, 0.2, 1.0], dtype=torch.float64)
    projection = torch.randn(draws, d, depth, generator=generator, dtype=torch.float64)
    shift = torch.rand(draws, depth, generator=generator, dtype=torch.float64)
    here = shift.floor()
    there = (torch.einsum("d,tdk->tk", gap, projection) / width + shift).floor()
    collided = (here == there).all(1).double()
    check_mean(collided, float(collision_probability(gap.norm(), width, depth)))


@pytest.mark.parametrize("n", [100, 10_000, 1_000_000])
def test_heavy_pairs_collide_with_probability_n_to_the_minus_alpha(n):
    alpha = 1 / 3
    width, depth = hash_shape(n, alpha)
    near = torch.tensor(math.sqrt(2 * alpha * math.log(n)), dtype=torch.float64)
    assert float(torch.exp(-near.square() / 2)) == pytest.approx(n**-alpha)
    assert float(collision_probability(near, width, depth)) >= n**-alpha


def test_with_the_constants_of_the_proof_all_heavy_keys_are_found():
    z = groups(300).double()
    heavy = find_heavy(z, z, Constants.proof(), torch.Generator().manual_seed(0))
    K = torch.exp(-0.5 * torch.cdist(z, z, compute_mode="donot_use_mm_for_euclid_dist").square())
    truth = (K >= 300 ** (-1 / 3)).flatten().nonzero()[:, 0]
    assert torch.equal(heavy.codes, truth)
    torch.testing.assert_close(heavy.values, K.flatten()[truth])


def test_the_density_estimate_of_the_light_keys_is_unbiased():
    generator = torch.Generator().manual_seed(3)
    z = 2.0 * torch.randn(60, 3, generator=generator, dtype=torch.float64)
    x = torch.rand(60, generator=generator, dtype=torch.float64)
    K = torch.exp(-0.5 * torch.cdist(z, z).square())
    light = K < 60 ** (-1 / 3)
    truth = (K.square() * light) @ x.square()
    constants = Constants(tables=40.0, density_tables=3000)
    heavy = find_heavy(z, z, constants, torch.Generator().manual_seed(1))
    draws = (heavy.weight * x.square()[heavy.sampled]).T
    assert draws.shape[0] > 600
    check_mean(draws.mean(1), float(truth.mean()), detect=0.25)


@pytest.mark.parametrize(("kind", "seeds"), [("gaussian", 100), ("ones", 20), ("one large entry", 20)])
def test_the_guarantee_holds_over_seeds(kind, seeds):
    n, eps = 500, 0.25
    z = groups(n).double()
    x = torch.randn(n, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    x = {"gaussian": x, "ones": torch.ones_like(x), "one large entry": x + 50.0 * torch.eye(n, 1).double()[:, 0]}[kind]
    truth = torch.exp(-0.5 * torch.cdist(z, z).square()) @ x
    failures = 0
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        heavy = find_heavy(z, z, Constants(), generator)
        y, _ = approximate_product(z, z, x, heavy, eps, Constants(), generator)
        failures += float((y - truth).norm()) > eps * float(x.norm())
    assert failures == 0


def test_the_cost_grows_slower_than_the_square():
    sizes, costs = [500, 1000, 2000, 4000], []
    for n in sizes:
        z = groups(n).double()
        heavy = find_heavy(z, z, Constants(), torch.Generator().manual_seed(0))
        x = torch.randn(n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        _, pairs = approximate_product(z, z, x, heavy, 0.5, Constants(), torch.Generator().manual_seed(2))
        costs.append(heavy.pairs + pairs)
    exponent = np.polyfit(np.log(sizes), np.log(costs), 1)[0]
    assert exponent < 1.8


def test_rows_that_ask_for_too_many_draws_are_summed_exactly():
    z = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)).double()
    heavy = find_heavy(z, z, Constants(), torch.Generator().manual_seed(0))
    x = torch.ones(200, dtype=torch.float64)
    y, pairs = approximate_product(z, z, x, heavy, 1e-6, Constants(), torch.Generator().manual_seed(0))
    torch.testing.assert_close(y, torch.exp(-0.5 * torch.cdist(z, z).square()) @ x)
    assert pairs == 200 * 200


def test_listed_pairs_are_the_kernel():
    z = torch.randn(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows, columns = torch.tensor([0, 3, 6]), torch.tensor([1, 3, 2])
    expected = torch.exp(-0.5 * (z[rows] - z[columns]).square().sum(1))
    torch.testing.assert_close(kernel_pairs(z, z, rows, columns), expected)


def test_the_product_of_points_is_within_eps_and_repeatable():
    X = groups(1500).numpy()
    x = np.random.default_rng(0).normal(size=1500)
    y = kernel_product(X, X, x, eps=0.3)
    truth = KernelOperator(X.astype(np.float64), method="exact") @ x
    assert np.linalg.norm(y - truth) <= 0.3 * np.linalg.norm(x)
    assert np.array_equal(y, kernel_product(X, X, x, eps=0.3))
    q = kernel_product(X[:200], X, x, eps=0.3)
    assert np.linalg.norm(q - truth[:200]) <= 0.3 * np.linalg.norm(x)


def test_points_too_many_bandwidths_apart_are_refused_rather_than_multiplied_to_nan():
    points, x = np.random.default_rng(0).normal(size=(300, 3)), np.ones(300)
    with pytest.raises(BochnerError, match="bandwidths apart"):
        kernel_product(points, points, x, 1e-30)
    np.testing.assert_allclose(kernel_product(points, points, x, 1e-10), x, atol=1e-6)
    with pytest.raises(BochnerError, match=r"'x'.*shape \(300,\), got \(5,\)"):
        kernel_product(points, points, np.ones(5))


def test_the_noisy_power_method_finds_the_largest_eigenvalue():
    X = groups(600).numpy().astype(np.float64)
    K = KernelOperator(X, eps=0.01, method="cells")
    truth = np.linalg.eigvalsh(K.to_dense())[-1]
    value, vector = noisy_power_method(K, iterations=300, tol=1e-6)
    assert 0.95 * truth <= value <= truth + 0.01
    assert np.linalg.norm(vector) == pytest.approx(1.0)
