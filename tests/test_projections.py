"""Projections: the law of the rows, structure without a matrix, one seed one projection."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from stats import check_mean

from bochner import BochnerError, feature_map
from bochner.projections import (
    LONG,
    PROJECTIONS,
    Projection,
    haar,
    hadamard_transform,
    make_projection,
    simplex_vertices,
)

GAUSSIAN_ROWS = ["iid", "orthogonal", "simplex", "halton", "sobol", "fastfood"]
DIMS = [1, 2, 3, 7, 8]


def draws(name: str, d: int, m: int, count: int, **options) -> torch.Tensor:
    """`count` independent matrices, (count, m, d)."""
    return PROJECTIONS[name](d, m, num_heads=count, seed=1, **options).double().matrix()


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize("d", DIMS)
def test_applying_equals_multiplying_by_the_matrix(name, d):
    for m, heads in ((1, None), (5, None), (2 * d + 1, 3)):
        p = PROJECTIONS[name](d, m, num_heads=heads, seed=0).double()
        x = torch.randn(2, 3, 4, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        assert p.matrix().shape == ((m, d) if heads is None else (heads, m, d))
        torch.testing.assert_close(p(x), x @ p.matrix().mT)


@pytest.mark.parametrize("name", ["hadamard", "fastfood"])
@pytest.mark.parametrize("heads", [None, 2])
def test_long_vectors_are_transformed_without_the_matrix(name, heads, monkeypatch):
    p = PROJECTIONS[name](LONG + 1, LONG + 3, num_heads=heads, seed=0).double()
    x, w = torch.randn(2, heads or 1, 4, LONG + 1, dtype=torch.float64), p.matrix()
    monkeypatch.setattr(p, "_matrix", None)
    torch.testing.assert_close(p(x), x @ w.mT)


@pytest.mark.parametrize("name", GAUSSIAN_ROWS)
def test_every_row_is_marginally_gaussian(name):
    d = 5
    w = draws(name, d, 7, 2500)
    zero, eye = torch.zeros(7, d), torch.eye(d, dtype=torch.float64)
    check_mean(w, zero, scale=1.0, detect=0.3)
    check_mean(w[..., :, None] * w[..., None, :], eye.expand(7, d, d), scale=1.0, detect=0.4)
    # The fourth moment of a coordinate and of the length tell a Gaussian from a scaled sphere.
    check_mean(w.pow(4).mean(-1), torch.full((7,), 3.0), detect=0.4)
    check_mean(w.square().sum(-1).square(), torch.full((7,), float(d * (d + 2))), detect=0.35)


@pytest.mark.parametrize("name", ["orthogonal", "givens"])
def test_rows_of_a_block_are_orthogonal(name):
    for d in (2, 5, 8):
        w = PROJECTIONS[name](d, d, seed=3).double().matrix()
        gram = w @ w.mT
        assert (gram - gram.diagonal().diag()).abs().max() < 1e-5


def test_hadamard_rows_are_orthogonal_for_powers_of_two():
    w = PROJECTIONS["hadamard"](8, 16, seed=3).double().matrix()
    for block in (w[:8], w[8:]):
        gram = block @ block.mT
        assert (gram - gram.diagonal().diag()).abs().max() < 1e-5
    assert (w[:8] @ w[8:].mT).abs().max() > 0.1  # blocks are independent


def test_simplex_directions_have_equal_obtuse_angles():
    for d in (2, 3, 6):
        s = simplex_vertices(d)
        want = torch.full((d, d), -1 / (d - 1), dtype=torch.float64).fill_diagonal_(1)
        torch.testing.assert_close(s @ s.mT, want)
        w = PROJECTIONS["simplex"](d, d, seed=0).double().matrix()
        u = w / w.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(u @ u.mT, want, atol=1e-5, rtol=0)


def test_haar_has_no_preferred_sign():
    g = torch.Generator().manual_seed(0)
    q = torch.stack([haar(3, g) for _ in range(3000)])
    check_mean(q, torch.zeros(3, 3), scale=1.0, detect=0.2)
    # Plain QR fails this very check: its diagonal leans to one side.
    raw = torch.stack([torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=g)).Q for _ in range(3000)])
    with pytest.raises(AssertionError):
        check_mean(raw, torch.zeros(3, 3), scale=1.0, detect=0.2)


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize("d", [1, 5, 8])
def test_fixed_norms_are_the_root_of_d(name, d):
    w = PROJECTIONS[name](d, 11, norms="fixed", num_heads=2, seed=0).double().matrix()
    torch.testing.assert_close(w.norm(dim=-1), torch.full((2, 11), d**0.5, dtype=torch.float64), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_one_seed_gives_one_projection(name):
    a, b, c = (PROJECTIONS[name](6, 9, num_heads=2, seed=s).matrix() for s in (5, 5, 6))
    assert torch.equal(a, b)
    assert not torch.allclose(a, c)
    assert not torch.allclose(a[0], a[1])  # heads are independent
    p = PROJECTIONS[name](6, 9, num_heads=2, seed=6)
    assert torch.equal(p.redraw_(5).matrix(), a)
    fresh = PROJECTIONS[name](6, 9, num_heads=2, seed=0)
    fresh.load_state_dict(p.state_dict())
    assert torch.equal(fresh.matrix(), a)


def test_another_process_draws_the_same():
    code = (
        "import torch; torch.manual_seed(99); torch.set_default_dtype(torch.float64);"
        "from bochner.projections import PROJECTIONS;"
        "print([float(P(5, 7, seed=3).double().matrix().sum()) for P in PROJECTIONS.values()])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    here = [float(P(5, 7, seed=3).double().matrix().sum()) for P in PROJECTIONS.values()]
    assert eval(out) == pytest.approx(here, rel=1e-6)


def test_the_global_generator_is_not_touched():
    before = torch.random.get_rng_state()
    for P in PROJECTIONS.values():
        P(4, 6, seed=0).redraw_(1)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("name", PROJECTIONS)
def test_projections_are_real_inside_a_meta_device_context(name):
    with torch.device("meta"):
        p = PROJECTIONS[name](4, 6, seed=0)
    assert all(b.device.type == "cpu" for b in p.buffers())
    assert torch.equal(p.matrix(), PROJECTIONS[name](4, 6, seed=0).matrix())


def test_fast_transform_is_the_hadamard_matrix():
    h = torch.tensor([[1.0]], dtype=torch.float64)
    for _ in range(10):
        x = torch.randn(3, len(h), dtype=torch.float64)
        torch.testing.assert_close(hadamard_transform(x), x @ h)
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])


def test_bad_projections_are_refused_in_one_sentence():
    with pytest.raises(
        BochnerError, match=r"Unknown projection 'gaussian'; the valid names are \['fastfood', 'givens'"
    ):
        make_projection("gaussian", 4, 4)
    with pytest.raises(BochnerError, match=r"'num_features' of IIDProjection must be a positive int, got -3"):
        make_projection("iid", 4, -3)
    with pytest.raises(BochnerError, match=r"has num_features=4, but the feature map needs num_features=8; build it"):
        make_projection(make_projection("iid", 4, 4), 4, 8)
    with pytest.raises(BochnerError, match=r"'seed' must be a non-negative int or None, got -1"):
        make_projection("iid", 4, 4, seed=-1)
    with pytest.raises(BochnerError, match="not both"):
        make_projection("iid", 4, 4, seed=0, generator=torch.Generator())
    assert isinstance(make_projection("iid", 4, 4, seed=None), Projection)


def test_a_projection_with_norms_of_another_law_is_refused():
    """Regularised features on Gaussian lengths are positive features under a wrong name, and the other way round."""
    chi, fixed = (make_projection("iid", 4, 8, norms=norms) for norms in ("chi", "fixed"))
    with pytest.raises(BochnerError, match=r"norms='chi'.*needs norms='fixed'"):
        feature_map("regularized", 4, 8, projection=chi)
    with pytest.raises(BochnerError, match=r"norms='fixed'.*needs norms='chi'"):
        feature_map("positive", 4, 8, projection=fixed)
    assert feature_map("regularized", 4, 8, projection=fixed).projection is fixed
