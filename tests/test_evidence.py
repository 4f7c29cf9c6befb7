"""Experiments on remarks and statements of the papers: what they compute is what they say."""

from __future__ import annotations

import copy
import importlib
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from stats import check_mean, check_mse

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return importlib.import_module


def figures(name: str) -> Any:
    return json.loads((EXPERIMENTS / "results" / f"{name}.json").read_text(encoding="utf-8"))["figures"]


# Iterated Bernstein operators.


def test_one_iteration_is_the_bernstein_operator_and_many_interpolate(load: Any) -> None:
    module = load("iterated_bernstein")
    plain = module.fit_polynomial("gelu", module.LOW, module.HIGH, 6, method="bernstein")
    assert torch.equal(module.iterated("gelu", 6, 1).coefficients, plain.coefficients)
    nodes = torch.linspace(module.LOW, module.HIGH, 7, dtype=torch.float64)[:, None]
    torch.testing.assert_close(
        module.iterated("gelu", 6, 20_000)(nodes)[:, 0], plain.coefficients[0], atol=1e-9, rtol=0
    )


def test_an_iterate_is_the_boolean_sum_of_operators(load: Any) -> None:
    """`I - (I - B)^k` at the steps, and straight lines are kept whatever k."""
    module = load("iterated_bernstein")
    n, k = 8, 5
    f = module.iterated("relu", n, 1).coefficients[0]
    B, one = module.operator(n), torch.eye(n + 1, dtype=torch.float64)
    torch.testing.assert_close(B.sum(-1), torch.ones(n + 1, dtype=torch.float64))
    wanted = (one - torch.linalg.matrix_power(one - B, k)) @ f
    nodes = torch.linspace(module.LOW, module.HIGH, n + 1, dtype=torch.float64)[:, None]
    torch.testing.assert_close(module.iterated("relu", n, k)(nodes)[:, 0], wanted)
    line = torch.linspace(-1, 1, n + 1, dtype=torch.float64)
    torch.testing.assert_close(B @ line, line)


def test_the_taylor_polynomial_is_that_of_gelu(load: Any) -> None:
    module = load("iterated_bernstein")
    t = torch.linspace(-1, 1, 9, dtype=torch.float64)
    torch.testing.assert_close(module.taylor(30)(t), torch.nn.functional.gelu(t), atol=1e-12, rtol=0)


def test_iterates_that_gain_no_order_for_relu_are_no_reproduction(load: Any) -> None:
    module, found = load("iterated_bernstein"), figures("iterated_bernstein")
    assert module.judge(found).verdict == "partly"
    fast = copy.deepcopy(found)
    fast["relu"]["bernstein x 10"] = {n: 1e-3 * int(n) ** -4.0 for n in fast["relu"]["bernstein x 10"]}
    assert module.judge(fast).verdict == "reproduced"
    found["relu"]["bernstein x 10"] = dict.fromkeys(found["relu"]["bernstein x 10"], 9.0)
    assert module.judge(found).verdict == "not"


# Masks of the queries.


def test_the_product_map_has_the_kernel_of_problem_4(load: Any) -> None:
    module = load("query_masks")
    q, delta, truth = module.queries(2)
    assert (truth > 0).double().mean() == pytest.approx(module.INSIDE, abs=0.01)
    both = module.with_positions(q, q)
    smooth = module.product(2, 4, delta, 0).kernel_matrix(both, both)
    inside, outside = truth > 0, truth == 0
    ratio = smooth / (q @ q.mT / math.sqrt(2)).exp()
    assert float(ratio[inside].mean()) > 0.7
    assert float(ratio[outside].mean()) < 0.1
    estimates = torch.stack(
        [module.kernel_estimate(module.product(2, 256, delta, s), both[:3], both[:3]) for s in range(600)]
    )
    check_mean(estimates, smooth[:3, :3], detect=0.5, scale=1.0)


def test_the_cost_of_a_mask_is_counted(load: Any) -> None:
    module = load("query_masks")
    few, many = (module.multiplications(2, m) for m in (64, 128))
    assert few["exact"] == many["exact"] == module.LENGTH**2 * (2 + module.VALUES + 1)
    assert many["features"] == 2 * few["features"]
    v = torch.randn(5, 2, dtype=torch.float64)
    weights = torch.tensor([[1.0, -1.0, 0, 0, 0], [1.0, 0, 0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(module.attended(weights, v), torch.stack([v.mean(0), v[0]]))


# The limits of the angular hybrid.


def test_a_wrong_limit_of_the_angular_hybrid_is_seen(load: Any) -> None:
    module, found = load("angular_limits"), figures("angular_limits")
    assert module.judge(found).verdict == "reproduced"
    for row in found["rows"]:
        row["over limit"] *= math.sqrt(2)  # a missing 2 under the root
    assert module.judge(found).verdict == "not"


def test_the_largest_error_has_its_limits_in_radius_and_coefficients(load: Any) -> None:
    module = load("angular_limits")
    deviations = [abs(module.largest(r, 1)["measured"] / module.largest(r, 1)["large r"] - 1) for r in (2.0, 4.0, 8.0)]
    assert deviations == sorted(deviations, reverse=True)
    assert deviations[-1] < 0.01
    many = module.largest(8.0, module.MANY)
    assert many["measured"] == pytest.approx(many["large n"], rel=0.01)


# Gaussian coefficients and massive pairs.


def test_a_coupled_coefficient_is_one_where_its_estimator_is_exact(load: Any) -> None:
    module = load("gaussian_coefficients")
    x, y = module.points()
    A = module.matrices(1)[0]
    lam, variance = module.moments(x, y, module.coupled(A), "cosines")
    assert float(lam[0]) == pytest.approx(1.0)
    assert float(variance[0]) == pytest.approx(0.0, abs=1e-12)
    assert float(module.theory.mse_complex(x, y[0], 4, A)) == pytest.approx(0.0, abs=1e-12)
    assert list(lam) == sorted(lam, reverse=True)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", ["cosines", "positive"])
def test_hybrids_of_general_matrices_are_unbiased_with_their_closed_form(load: Any, kind: str, count: int) -> None:
    module = load("gaussian_coefficients")
    x, y = module.points()
    truth, samples = (y @ x).exp()[1:3], module.draws_of(kind, count, 60_000)[:, 1:3]
    check_mean(samples, truth)
    check_mse(samples, truth, module.closed_form(kind, count)[1:3], detect=0.5)


def test_massive_pairs_end_at_favor_and_at_the_hybrid_of_all(load: Any) -> None:
    module = load("massive_pairs")
    q, k = module.data(0.3)
    assert [len(x) for x in q] == [round(m * module.ROWS) for m in module.MASSES]
    rows = module.rows_of(q, k, "real")
    assert rows[0]["error"] == pytest.approx(rows[0]["FAVOR+, same projections"])
    assert rows[0]["length"] == 2 * module.M
    assert rows[-1]["mass"] == pytest.approx(1.0)
    assert rows[-1]["length"] == 16 * module.M
    masses = [round(b["mass"] - a["mass"], 9) for a, b in pairwise(rows)]
    assert masses == sorted(masses, reverse=True)
    assert module.default_rank([(0, 0)]) == 2


def test_massive_pairs_are_judged_at_equal_length(load: Any) -> None:
    module, found = load("massive_pairs"), figures("massive_pairs")
    assert module.judge(found).verdict == "not"
    for rows in found["rows"].values():
        rows[1]["error"] *= 0.05
    assert module.judge(found).verdict == "reproduced"


# The complexity table.


def test_operations_and_bytes_are_counted(load: Any) -> None:
    module = load("kernel_complexity")
    a = torch.ones(100, 100)
    with module.Alive() as alive:
        b = a + 1  # one new matrix of 40,000 bytes
        b = b * 2  # two for a moment, then one
        c = b.mT  # a view: nothing
        b += 1  # in place: written, no new bytes
    assert alive.peak == 80_000
    assert alive.bytes == 40_000
    assert alive.written == 30_000
    assert c.shape == b.shape


def test_growth_beyond_the_table_is_seen(load: Any) -> None:
    module, found = load("kernel_complexity"), figures("kernel_complexity")
    assert module.judge(found).verdict == "reproduced"
    found["kernels"]["gmm_prf"]["d"]["time"] = 4.0
    assert "gmm_prf, time in d" in module.judge(found).why


# Linformer.


def test_linformer_with_the_identity_is_exact_and_a_tiny_delta_sees_no_query(load: Any) -> None:
    pytest.importorskip("transformers")
    module = load("linformer_random")
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, module.TOKENS, 8, generator=g) for _ in range(3))
    eye = torch.eye(module.TOKENS)
    torch.testing.assert_close(module.projected(eye, eye)(q, k, v), module.exact_attention(q, k, v, scale=1.0))
    out = module.random(32, 1e-6, 0)(q, k, v)
    torch.testing.assert_close(out, out[..., :1, :].expand_as(out), atol=1e-4, rtol=0)
    fitted = module.learned(32, [(q[0], k[0], v[0])], 20)
    exact = module.exact_attention(q, k, v, scale=1.0)
    errors = [float((f(q, k, v) - exact).norm()) for f in (fitted, module.random(32, 1.0, 0))]
    assert errors[0] < errors[1]
