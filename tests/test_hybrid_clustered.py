"""The clustered hybrid: unbiased before and after calibration, quiet near the centres."""

import pytest
import torch
from stats import check_mean, check_mse, check_paired_less

from bochner import BochnerError, kernel_estimate, theory
from bochner.maps.base import gaussian_kernel, softmax_kernel
from bochner.maps.clustered import ClusteredFeatures, kmeans
from bochner.maps.exponential import PositiveFeatures, TrigFeatures

KERNELS = {"softmax": softmax_kernel, "gaussian": gaussian_kernel}
CENTRES_X = torch.tensor([[0.5, -0.4, 0.25, 0.0], [-0.3, 0.5, 0.4, 0.1]], dtype=torch.float64)
CENTRES_Y = torch.tensor([[0.4, 0.3, -0.3, 0.2], [-0.5, -0.2, 0.3, 0.0]], dtype=torch.float64)


def cloud(centres, spread, count, seed):
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(centres), count, centres.shape[-1], generator=g, dtype=torch.float64)
    return (centres[:, None] + spread * noise).flatten(0, 1)


X, Y = cloud(CENTRES_X, 0.1, 200, 1), cloud(CENTRES_Y, 0.1, 200, 2)


def in_heads(single, count, **options):
    """The statistics of a calibrated map in `count` heads, each with projections of its own."""
    phi = ClusteredFeatures(single.dim, single.num_features, num_heads=count, **options)
    for name in ("centres_query", "centres_key", "modulus", "imaginary"):
        getattr(phi, name).copy_(getattr(single, name).expand_as(getattr(phi, name)))
    return phi.double()


def draws(count, x, y, **options):
    single = ClusteredFeatures(4, 4, **options).calibrate_(X, Y)
    phi = in_heads(single, count, **options)
    return kernel_estimate(phi, x.expand(count, -1, -1), y.expand(count, -1, -1)), single


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("diagonal", ["complex", "real"])
def test_calibrated_it_is_unbiased(diagonal, kernel):
    x, y = X[::150], Y[::150]
    samples, _ = draws(5_000, x, y, diagonal=diagonal, kernel=kernel, seed=3)
    check_mean(samples, KERNELS[kernel](x, y))


@pytest.mark.parametrize("diagonal", ["complex", "real"])
def test_each_pair_of_clusters_has_the_mse_of_its_matrix(diagonal):
    x, y = 0.6 * CENTRES_X + 0.05, 0.6 * CENTRES_Y - 0.03  # off the centres, on their side
    samples, phi = draws(50_000, x, y, diagonal=diagonal, projection="iid", seed=5)
    A = torch.where(phi.imaginary > 0, 1j, 1.0) * phi.modulus
    i, j = (torch.cdist(a, b.double()).argmin(-1) for a, b in ((x, phi.centres_query), (y, phi.centres_key)))
    mse = [[theory.mse_complex(x[a], y[b], 4, A[i[a], j[b]]) for b in range(2)] for a in range(2)]
    check_mse(samples, softmax_kernel(x, y), torch.tensor(mse), detect=0.3)


def test_without_calibration_it_is_the_positive_map():
    ours = kernel_estimate(ClusteredFeatures(4, 6, seed=2), X, Y)
    torch.testing.assert_close(ours, kernel_estimate(PositiveFeatures(4, 6, seed=2), X, Y))


def test_tight_clusters_have_no_variance_at_their_centres():
    x, y = CENTRES_X[:, :3], CENTRES_Y[:, :3]
    phi = ClusteredFeatures(3, 4).double().calibrate_(x.repeat(2, 1), y.repeat(2, 1))
    for seed in range(5):
        # The floor of the second moments is 1e-6 of their mean, and the error its square root.
        torch.testing.assert_close(kernel_estimate(phi.redraw_(seed), x, y), softmax_kernel(x, y), rtol=1e-4, atol=0)


def test_the_matrices_minimise_the_mean_square_of_the_sum_they_make():
    phi = ClusteredFeatures(4, 4).double().calibrate_(X, Y)

    def mean_square(i, j, modulus, imaginary):
        x = X[200 * i : 200 * (i + 1)]
        y = Y[200 * j : 200 * (j + 1)]
        a = modulus * torch.where(imaginary > 0, 1j, 1.0)
        return ((a * x)[:, None] + (y / a)[None]).abs().square().mean((0, 1))

    order = [int((phi.centres_query - c).norm(dim=-1).argmin()) for c in CENTRES_X]
    order_y = [int((phi.centres_key - c).norm(dim=-1).argmin()) for c in CENTRES_Y]
    for i in range(2):
        for j in range(2):
            a, im = phi.modulus[order[i], order_y[j]], phi.imaginary[order[i], order_y[j]]
            best = mean_square(i, j, a, im)
            for other in (1.1 * a, 0.9 * a):
                assert (mean_square(i, j, other, im) > best).all()
            assert (mean_square(i, j, a, 1 - im) >= best - 1e-3).all()


def test_the_expansion_of_a_gaussian_coefficient_has_the_softmax_kernel_of_minus_y():
    # Eq. (93) of the paper prints SM(x/t, y/t) and is off by the square of that factor.
    a, t = torch.tensor([0.7, 1.3, 0.9, 1.1], dtype=torch.float64), 1.4
    x, y = X[:5], Y[:5]
    ax, by = (v.square().sum(-1) / (2 * t**2) for v in (a * x, y / a))
    lam = torch.exp(-(a * x + y / a).square().sum(-1) / (2 * t**2))
    torch.testing.assert_close(lam, torch.exp(-ax - by) * torch.exp(-(x * y).sum(-1) / t**2))
    assert not torch.allclose(lam, torch.exp(-ax - by) * torch.exp((x * y).sum(-1) / t**2), rtol=0.01)


@pytest.mark.parametrize("diagonal", ["complex", "real"])
@pytest.mark.parametrize("m", [20, 50, 100, 200])
def test_on_clustered_data_it_is_below_positive_and_trig_at_every_size(m, diagonal):
    # Section H.3 of the paper: two clusters of each, d = 50, opposite signs in most coordinates, unit length.
    d, count = 50, 400
    g = torch.Generator().manual_seed(0)
    signs = torch.where(torch.rand(d, generator=g) < 0.5, -1.0, 1.0)
    centres = [torch.randn(2, d, generator=g).abs() * s for s in (signs, -signs)]
    q, k = (torch.nn.functional.normalize(cloud(c.double(), 0.3, 100, 7 + i), dim=-1) for i, c in enumerate(centres))
    x, y = q[::25], k[::25]

    def errors(phi):
        return (kernel_estimate(phi, x.expand(count, -1, -1), y.expand(count, -1, -1)) - softmax_kernel(x, y)).square()

    options = {"projection": "iid", "seed": m}
    single = ClusteredFeatures(d, m, diagonal=diagonal, **options).calibrate_(q, k)
    ours = errors(in_heads(single, count, diagonal=diagonal, **options)).mean((1, 2))
    for peer in (PositiveFeatures, TrigFeatures):
        check_paired_less(ours, errors(peer(d, m, num_heads=count, **options)).mean((1, 2)))


def test_real_matrices_give_positive_features_of_half_the_length():
    phi, twice = (
        ClusteredFeatures(4, 5, num_clusters=(2, 3), diagonal=t).calibrate_(X, Y) for t in ("real", "complex")
    )
    assert (phi.feature_dim, twice.feature_dim) == (30, 60)
    assert phi.positive
    assert not twice.positive
    for role, x in (("query", X), ("key", Y)):
        assert (phi(x, role).values >= 0).all()
        assert phi(x, role).values.shape[-1] == 30


def test_heads_have_clusters_of_their_own():
    phi = ClusteredFeatures(4, 6, num_heads=2).calibrate_(torch.stack([X, -Y]), torch.stack([Y, -X]))
    for h, (x, y) in enumerate(((X, Y), (-Y, -X))):
        one = ClusteredFeatures(4, 6).calibrate_(x, y)
        one.projection.weight.copy_(phi.projection.weight[h])
        both = kernel_estimate(phi, torch.stack([X, -Y]), torch.stack([Y, -X]))[h]
        torch.testing.assert_close(both, kernel_estimate(one, x, y), rtol=1e-5, atol=1e-6)


def test_the_state_of_earlier_versions_loads():
    phi, other = ClusteredFeatures(4, 6, seed=0).calibrate_(X, Y), ClusteredFeatures(4, 6, seed=1)
    other.load_state_dict({**phi.state_dict(), "spread": torch.ones(2, 2)})
    assert torch.equal(kernel_estimate(other, X, Y), kernel_estimate(phi, X, Y))


def test_gradients_of_both_roles_are_those_of_finite_differences():
    phi = ClusteredFeatures(4, 2).double().calibrate_(X, Y)
    x, y = X[::130].clone().requires_grad_(), Y[::130].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: kernel_estimate(phi, a, b), (x, y))


def test_clusters_at_zero_and_coordinates_without_data_leave_it_finite_and_right():
    x = torch.cat([torch.zeros(50, 4, dtype=torch.float64), X[:50]])
    x[:, 3] = 0
    phi = ClusteredFeatures(4, 4000, projection="iid").double().calibrate_(x, Y)
    assert torch.isfinite(phi.modulus).all()
    torch.testing.assert_close(kernel_estimate(phi, x[::9], Y[::9]), softmax_kernel(x[::9], Y[::9]), rtol=0.15, atol=0)


def test_kmeans_finds_separated_clusters_and_does_not_depend_on_the_global_seed():
    centres = torch.tensor([[5.0, 0], [-5, 0], [0, 5]], dtype=torch.float64)
    x = cloud(centres, 0.1, 50, 0)[None]
    found = kmeans(x, 3)[0]
    assert torch.cdist(centres, found).min(-1).values.max() < 0.1
    torch.manual_seed(1)
    assert torch.equal(kmeans(x, 3)[0], found)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: ClusteredFeatures(4, 8, num_clusters=0), "num_clusters"),
        (lambda: ClusteredFeatures(4, 8, num_clusters=(2, 0)), "num_clusters"),
        (lambda: ClusteredFeatures(4, 8, num_clusters=(2, 2, 2)), "pair"),
        (lambda: ClusteredFeatures(4, 8, diagonal="dense"), "diagonal"),
        (lambda: ClusteredFeatures(4, 8, num_clusters=3).calibrate_(torch.ones(5, 4), torch.ones(5, 4)), "distinct"),
    ],
)
def test_bad_input_is_one_sentence(call, match):
    with pytest.raises(BochnerError, match=match):
        call()
