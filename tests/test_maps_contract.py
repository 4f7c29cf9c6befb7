"""What every map in the registry keeps: shapes, dtypes, seeds, state, gradients, bounded values, refusals."""

from __future__ import annotations

import inspect
import itertools
import re

import pytest
import torch
from naive import said_of, signed_attention

import bochner
from bochner import BochnerError, feature_map, kernel_estimate
from bochner.maps import FEATURE_MAPS, options_of, to_features
from bochner.maps.exponential import PositiveFeatures
from bochner.maps.local import LocalL1Features, ProductFeatures
from bochner.projections import PROJECTIONS, Projection

D, M = 4, 12
PROJECTED = [name for name, cls in FEATURE_MAPS.items() if "projection" in options_of(cls)]
# Every map as it comes, and maps whose options take them another way.
MAPS: dict[str, tuple[str, dict]] = {name: (name, {}) for name in FEATURE_MAPS} | {
    "complex_exponential dense": ("complex_exponential", {"A": (torch.eye(D) + 0.2j).tolist()}),
    "angular_hybrid with n": ("angular_hybrid", {"num_coefficients": 3}),
    "gaussian_hybrid with n": ("gaussian_hybrid", {"num_coefficients": 3}),
    "clustered real": ("clustered", {"diagonal": "real", "num_clusters": (2, 3)}),
    "gmm_prf shared": ("gmm_prf", {"shared_noise": True, "init_std": 0.2}),
    "generative_prf plain": ("generative_prf", {"residual": False}),
    "fastfood_rks S": ("fastfood_rks", {"learnable": "S"}),
    "landmark signed": ("landmark", {"positive": False}),
    "moments in groups": ("moments", {"num_groups": 2}),
    "relu of inputs": ("relu", {"num_features": None}),
    **{f"{name} n=4": (name, {"degree": 4, "coef": 0.4}) for name in ("sum_poly", "tensor_sketch", "nonnegative_poly")},
    "maclaurin n=4": ("maclaurin", {"series": "exp", "degree": 4}),
}
ALL = [*MAPS, "product"]
FIXED = ("hedgehog", "nonnegative_poly", "linear_elu", "relu of inputs", "moments", "moments in groups")
SOFTMAX_FAMILY = ["trig", "positive", "hyperbolic", "regularized", "optimal", "calibrated"]


def build(name: str, **options) -> bochner.FeatureMap:
    if name == "product":
        seed, heads = options.get("seed", 0), {"num_heads": options.get("num_heads")}
        return ProductFeatures(LocalL1Features(1, M, **heads), PositiveFeatures(D - 1, M, **heads), seed=seed).eval()
    name, own = MAPS[name]
    return feature_map(name, dim=D, **{"num_features": M, **own, **options}).eval()


def inputs(*shape: int, seed: int = 0) -> torch.Tensor:
    return 0.5 * torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("name", ALL)
def test_features_have_one_scale_per_row_and_bounded_values(name, heads):
    phi = build(name, num_heads=heads)
    for role in ("query", "key"):
        f = phi(inputs(2, 3, 5), role=role)
        assert f.values.shape == (2, 3, 5, phi.feature_dim)
        assert f.log_scale.shape == (2, 3, 5, 1)
        assert f.values.abs().max() < 10
        assert torch.isfinite(f.log_scale).all()
        if phi.positive:
            assert (f.values >= 0).all()


@pytest.mark.parametrize("name", ALL)
def test_no_rows_have_no_features(name):
    phi = build(name)
    assert phi(inputs(2, 0)).values.shape == (2, 0, phi.feature_dim)


@pytest.mark.parametrize("name", ALL)
def test_a_map_with_heads_is_the_maps_of_the_heads(name):
    phi, one, x = build(name, num_heads=3), build(name), inputs(2, 3, 5)
    for head in range(3):
        state, own = phi.state_dict(), one.state_dict()
        one.load_state_dict({n: t if t.shape == own[n].shape else t[head] for n, t in state.items()})
        for role in ("query", "key"):
            torch.testing.assert_close(one(x[:, head], role).dense(), phi(x, role).dense()[:, head])


@pytest.mark.parametrize("name", ALL)
def test_long_inputs_neither_overflow_nor_vanish(name):
    for role in ("query", "key"):
        values, log_scale = build(name)(40 * inputs(5), role)
        assert torch.isfinite(log_scale).all()
        assert torch.isfinite(values).all()
        assert values.detach().abs().max() < 100
        assert values.detach().abs().amax(-1).max() > 1e-3


@pytest.mark.parametrize(("name", "projection"), list(itertools.product(PROJECTED, PROJECTIONS)))
def test_every_map_takes_every_projection(name, projection):
    try:
        phi = build(name, projection=projection, num_heads=2)
    except BochnerError as refusal:
        pytest.fail(f"{name} refused {projection}: {refusal}")
    estimate = kernel_estimate(phi, inputs(1, 2, 3), inputs(1, 2, 4, seed=1))
    assert estimate.shape == (1, 2, 3, 4)
    assert torch.isfinite(estimate).all()


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_a_docstring_says_what_a_stranger_asks(name):
    """The cost of a row, whether the estimate is biased, the sign of the features, and an example that runs."""
    doc = inspect.getdoc(FEATURE_MAPS[name]) or ""
    for what in (r"O\(", "(?i)biased|estimates no kernel", "(?i)positive|signed", ">>> "):
        assert re.search(what, doc), what


@pytest.mark.parametrize("name", ALL)
def test_one_seed_gives_one_map_and_redraw_another(name):
    x = inputs(5)

    def values(phi):
        return phi(x, "query").dense()

    a, b = (build(name, seed=4) for _ in range(2))
    torch.testing.assert_close(values(a), values(b), rtol=0, atol=0)
    # Hedgehog is learned from a fixed start; the square of so short a sketch is exact: nothing random to redraw.
    if name in FIXED:
        return
    before = values(a)
    a.redraw_(5)
    assert not torch.allclose(values(a), before)
    b.redraw_(5)
    torch.testing.assert_close(values(a), values(b), rtol=0, atol=0)


@pytest.mark.parametrize("name", ALL)
def test_state_dict_round_trip_is_exact(name):
    q, k = inputs(2, 2, 40), inputs(2, 2, 40, seed=1) + 0.3
    phi = build(name, num_heads=2, seed=1).calibrate_(q, k)
    other = build(name, num_heads=2, seed=2)
    other.load_state_dict(phi.state_dict())
    for role in ("query", "key"):
        assert torch.equal(phi(q, role).dense(), other(q, role).dense())


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_half_precision_casts_leave_the_frequencies_in_float32(name):
    phi = build(name)
    before = {n: t.clone() for n, t in phi.state_dict().items()}
    phi.to(torch.bfloat16).half()
    for n, t in phi.state_dict().items():
        assert torch.equal(t, before[n]), n
    f = phi(inputs(3).bfloat16())
    assert f.values.dtype == torch.float32
    phi.double()
    assert phi(inputs(3).double()).values.dtype == torch.float64


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_a_map_moves_with_its_model(name):
    """The meta device stands for any other: every tensor of the map must follow."""
    model = torch.nn.Sequential(build(name))
    model.to("meta")
    assert all(t.device.type == "meta" for t in model.state_dict().values())


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_estimates_agree_across_dtypes_up_to_rounding(name):
    x, y = inputs(4), inputs(5, seed=1)
    one = kernel_estimate(build(name, seed=3), x, y)
    two = kernel_estimate(build(name, seed=3).double(), x.double(), y.double())
    torch.testing.assert_close(one.double(), two, rtol=2e-4, atol=2e-4 * float(two.detach().abs().max()))


# Functions with kinks or jumps at the drawn points are excluded: sign features are piecewise constant.
KINKED = ("angular_hybrid", "clustered", "relu", "abs", "generalized")
SMOOTH = [name for name in ALL if name.split()[0] not in KINKED]


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_of_the_estimate_are_right(name):
    phi = build(name, seed=2).double()
    x, y = (inputs(n, seed=n).double().requires_grad_() for n in (2, 3))
    assert torch.autograd.gradcheck(lambda a, b: kernel_estimate(phi, a, b), (x, y), atol=1e-6)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_features_are_the_same_where_gradients_are_needed(name):
    phi, x = build(name, num_heads=2, seed=2), inputs(2, 2, 5)
    for role in ("query", "key"):
        plain, tracked = phi(x, role), phi(x.clone().requires_grad_(), role)
        torch.testing.assert_close(plain.dense(), tracked.dense(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith("moments")])  # no sum over pairs
def test_attention_through_every_map_is_its_own_matrix(name):
    phi = build(name, num_heads=2).double()
    q, k, v = (inputs(1, 2, 70, seed=s).double() for s in range(3))
    if name.startswith("landmark"):  # it says so when it was never fitted
        phi.calibrate_(q * D**-0.25, k * D**-0.25)
    for causal in (False, True):
        want, small = signed_attention(q * D**-0.25, k * D**-0.25, v, phi, is_causal=causal)
        with said_of(small):
            out = bochner.linear_attention(q, k, v, phi, is_causal=causal)
        torch.testing.assert_close(out, want, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*SOFTMAX_FAMILY, "relu", "elu", "exp"])
def test_norms_from_1e_minus_6_to_1e3_stay_finite_with_their_gradients(name, dtype):
    for kernel in ("softmax", "gaussian") if name in SOFTMAX_FAMILY else (None,):
        phi = build(name, **({} if kernel is None else {"kernel": kernel}))
        for norm in (1e-6, 1e-3, 1.0, 30.0, 1e3):
            x = inputs(6)
            x = (norm * x / x.norm(dim=-1, keepdim=True)).to(dtype).requires_grad_()
            for role in ("query", "key"):
                f = phi(x, role)
                assert torch.isfinite(f.values).all()
                assert torch.isfinite(f.log_scale).all()
                assert f.values.abs().max() <= 1.0 + 1e-3
                (g,) = torch.autograd.grad(f.values.sum() + f.log_scale.sum(), x)
                assert torch.isfinite(g).all()


@pytest.mark.parametrize("heads", [None, 2])
def test_calibration_survives_singular_moments_and_few_samples(heads):
    d = 6
    flat = torch.zeros(1, 2, 3, d)
    flat[..., 0] = torch.tensor([1.0, 2.0, 3.0])
    for q, k in ((flat, flat), (flat[..., :2, :], flat * 1e-20), (torch.ones(1, 2, 50, d), torch.ones(1, 2, 50, d))):
        phi = feature_map("calibrated", dim=d, num_features=8, num_heads=heads).calibrate_(q, k)
        assert all(torch.isfinite(b).all() for b in phi.buffers())
        out = kernel_estimate(phi, q, k)
        assert torch.isfinite(out).all()


def test_calibration_pools_the_query_heads_of_a_group():
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 30, D, generator=g), torch.randn(1, 2, 30, D, generator=g)
    grouped = feature_map("calibrated", dim=D, num_features=8, num_heads=2).calibrate_(q, k)
    first = feature_map("calibrated", dim=D, num_features=8).calibrate_(q[:, :2].reshape(1, 60, D), k[:, 0])
    torch.testing.assert_close(grouped.centre_query[0], first.centre_query)
    torch.testing.assert_close(grouped.a[0], first.a, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["positive", "calibrated", "trig"])
def test_maps_compile_in_one_graph(name):
    phi = build(name, seed=0)
    x = inputs(3, 5)
    compiled = torch.compile(lambda t: tuple(phi(t, "key")), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), tuple(phi(x, "key")))


def test_trainable_statistics_keep_their_keys():
    phi = build("calibrated")
    keys = set(phi.state_dict())
    phi.trainable_(["a", "centre_key"])
    assert {n for n, _ in phi.named_parameters()} == {"a", "centre_key"}
    assert set(phi.state_dict()) == keys


def test_bad_input_gets_one_clear_sentence():
    phi = build("positive")
    cases = [
        (lambda: phi(torch.ones(3, D + 1)), r"'x' of PositiveFeatures must have shape \(..., n, 4\), got \(3, 5\)"),
        (lambda: phi(torch.ones(3, D, dtype=torch.long)), r"floating-point tensor, got torch.int64; call .float\(\)"),
        (lambda: phi([1.0]), r"must be a torch.Tensor, got list"),
        (lambda: phi(torch.tensor([[0.0, 1, torch.nan, 2]])), r"must be finite, got nan at index \(0, 2\)"),
        (lambda: phi(torch.tensor([[0.0, 1, torch.inf, 2]])), r"must be finite, got inf at index \(0, 2\)"),
        (lambda: phi(torch.ones(3, D), role="value"), r"must be one of \['query', 'key'\], got 'value'"),
        (
            lambda: feature_map("positive", dim=D, num_features=0),
            r"'num_features' of PositiveFeatures must be a positive",
        ),
        (lambda: feature_map("positive", dim=0), r"'dim' of PositiveFeatures must be a positive int, got 0"),
        (
            lambda: feature_map("favor", dim=D),
            r"Unknown feature map 'favor'; the valid names are \['abs', 'angular_hybrid'",
        ),
        (lambda: feature_map("positive", dim=D, colour=1), r"'positive' does not take the options \['colour'\]; it"),
        (lambda: feature_map("optimal", dim=D, colour=1), r"it takes \['A', 'generator', 'kernel', 'num_heads', 'proj"),
        (lambda: feature_map("positive", dim=D, kernel="laplace"), r"must be one of \['softmax', 'gaussian'\]"),
        (lambda: feature_map("hedgehog", dim=D, projection="iid"), r"has no 'projection', got 'iid'"),
        (lambda: feature_map("positive"), r"'dim' of feature map 'positive' is missing"),
        (lambda: build("calibrated").calibrate_(torch.ones(1, D), torch.ones(1, D)), r"at least 2 rows of 'q'"),
        (lambda: build("calibrated").calibrate_(torch.ones(0, D), torch.ones(0, D)), r"at least 2 rows of 'q' .*got 0"),
        (lambda: build("calibrated").calibrate_(torch.ones(5, D), torch.ones(5, 3)), r"'k' of CalibratedFeatures must"),
        (lambda: build("positive", num_heads=3)(torch.ones(1, 2, 5, D)), r"num_heads=3"),
        (
            lambda: build("calibrated").calibrate_(None, None),
            r"'q' of CalibratedFeatures must be a torch.Tensor, got N",
        ),
        (
            lambda: build("calibrated").trainable_(["b"]),
            r"'names' of CalibratedFeatures.trainable_ must be one of \['a'",
        ),
        (lambda: kernel_estimate(phi, torch.ones(2, 3, D), torch.ones(5, 3, D)), r"agree in all axes but the last two"),
        (lambda: to_features([1.0]), r"'t' of to_features must be a torch.Tensor, got list"),
        (lambda: to_features(torch.ones(3, 0)), r"shape \(..., n, m\) with m >= 1, got \(3, 0\)"),
        (lambda: feature_map("optimal", dim=D, A=0.2), r"'A' of OptimalFeatures must be a number below 1/8, got 0.2"),
        (
            lambda: feature_map("relu", dim=D, kernel_epsilon=-1),
            r"'kernel_epsilon' of ReluFeatures must be a number >= 0",
        ),
    ]
    for call, message in cases:
        with pytest.raises(BochnerError, match=message):
            call()


def test_an_error_inside_a_constructor_is_not_taken_for_a_wrong_option():
    def series(k: int) -> float:
        return "one" / k  # type: ignore[operator]

    with pytest.raises(TypeError, match="unsupported operand"):
        feature_map("maclaurin", dim=D, series=series)


def test_a_projection_instance_can_be_given():
    p = PROJECTIONS["iid"](D, M, seed=9)
    phi = feature_map("positive", dim=D, num_features=M, projection=p)
    assert isinstance(phi.projection, Projection)
    assert phi.projection is p
    assert feature_map(phi) is phi


def test_calibrated_features_are_exact_where_queries_and_keys_hardly_vary():
    """Centred by their own means, not by each other's, the vectors are near zero and so is the error."""
    q, k = (0.01 * inputs(1, 40, seed=s).double() + shift for s, shift in ((0, 1.5), (1, -0.5)))
    phi = build("calibrated").double().calibrate_(q, k)
    torch.testing.assert_close(kernel_estimate(phi, q, k), (q @ k.mT).exp(), rtol=1e-2, atol=0)


def test_a_redraw_leaves_a_fitted_landmark_map_alone():
    q, k = inputs(4, 40), inputs(4, 40, seed=1)
    phi = build("landmark", seed=1).calibrate_(q, k)
    before, sample = {n: t.clone() for n, t in phi.state_dict().items()}, phi.seed
    phi.redraw_(5)
    assert phi.seed != sample
    for n, t in phi.state_dict().items():
        assert torch.equal(t, before[n]), n
