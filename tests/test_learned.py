"""Learned kernels: unbiased for their closed forms, right at the start, reproducible while they train."""

import math
import time

import pytest
import torch
from stats import check_mean, check_mse
from torch.func import functional_call

from bochner import BochnerError, kernel_estimate, linear_attention, theory
from bochner.maps.base import gaussian_kernel, softmax_kernel
from bochner.maps.exponential import PositiveFeatures
from bochner.maps.learned import (
    FastfoodPositiveFeatures,
    FastfoodSinkFeatures,
    GenerativePositiveFeatures,
    GenerativeSinkFeatures,
    GMMPositiveFeatures,
    GMMSinkFeatures,
    HedgehogFeatures,
)

X = torch.tensor([[0.3, -0.2, 0.3], [0.1, 0.4, -0.2]], dtype=torch.float64)
Y = torch.tensor([[-0.2, 0.3, 0.2], [0.3, 0.1, -0.3]], dtype=torch.float64)
MAPS = {
    "gmm_rks": GMMSinkFeatures,
    "gmm_prf": GMMPositiveFeatures,
    "fastfood_rks": FastfoodSinkFeatures,
    "fastfood_prf": FastfoodPositiveFeatures,
    "generative_rks": GenerativeSinkFeatures,
    "generative_prf": GenerativePositiveFeatures,
}
GMM = {name: MAPS[name] for name in ("gmm_rks", "gmm_prf")}
FASTFOOD = {name: MAPS[name] for name in ("fastfood_rks", "fastfood_prf")}
GENERATIVE = {name: MAPS[name] for name in ("generative_rks", "generative_prf")}
KERNELS = {"softmax": softmax_kernel, "gaussian": gaussian_kernel}


def pairs():
    return X[:, None].expand(-1, len(Y), -1), Y[None].expand(len(X), -1, -1)


@torch.no_grad()
def move_(phi, seed=0, size=0.15):
    """Parameters as training might leave them, the same in every head."""
    g = torch.Generator().manual_seed(seed)
    for p in phi.parameters():
        shape = p.shape if phi.num_heads is None else p.shape[1:]
        p += size * torch.randn(shape, generator=g)
    return phi


@torch.no_grad()
def draws(phi):
    """The estimates of all heads, which differ in their noise only: (heads, n, s)."""
    return kernel_estimate(phi.double(), X.expand(phi.num_heads, -1, -1), Y.expand(phi.num_heads, -1, -1))


def truth(phi):
    with torch.no_grad():
        return phi.double().kernel_matrix(X, Y)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_initial_kernel_is_softmax_or_gaussian(name, kernel):
    for projection in ("iid", "orthogonal"):
        options = {} if "fastfood" in name else {"projection": projection}
        phi = MAPS[name](3, 5, kernel=kernel, **options)
        torch.testing.assert_close(truth(phi), KERNELS[kernel](X, Y))
        check_mean(draws(MAPS[name](3, 5, kernel=kernel, num_heads=5_000, seed=1, **options)), KERNELS[kernel](X, Y))


def test_the_papers_exponent_starts_positive_features_at_the_gaussian_kernel():
    torch.testing.assert_close(truth(GMMPositiveFeatures(3, 4, g=1.0)), gaussian_kernel(X, Y))


def test_before_training_positive_features_of_a_mixture_are_those_of_favor():
    ours = GMMPositiveFeatures(3, 6, seed=4).double()
    plain = PositiveFeatures(3, 6, projection=ours.projection)
    torch.testing.assert_close(kernel_estimate(ours, X, Y), kernel_estimate(plain, X, Y))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", GMM)
def test_a_mixture_is_unbiased_with_the_mse_of_its_closed_form(name, shared):
    options = {"num_components": 2, "projection": "iid", "init_std": 0.3, "shared_noise": shared}
    M = 2 if shared else 4  # two noise vectors a component, the same ones or not
    single = move_(GMM[name](3, M, **options))
    phi = GMM[name](3, M, num_heads=50_000, **options)
    for p, q in zip(phi.parameters(), single.parameters(), strict=True):
        p.data.copy_(q.data.expand_as(p))
    means, L = single.mu.detach(), single.factor.detach()
    closed, error = (getattr(theory, f"{part}{name}") for part in ("", "mse_"))
    torch.testing.assert_close(truth(single), closed(*pairs(), means, L))
    samples = draws(phi)
    check_mean(samples, truth(single))
    check_mse(samples, truth(single), error(*pairs(), means, L, 2, shared_noise=shared), detect=0.3)


@pytest.mark.parametrize("name", GMM)
def test_components_of_unequal_size_still_make_a_uniform_mixture(name):
    options = {"num_components": 3, "init_std": 0.5, "projection": "iid"}
    single = GMM[name](3, 5, **options)
    phi = GMM[name](3, 5, num_heads=20_000, **options)
    assert [len(t) for t in single.frequencies().split(single.sizes)] == [2, 2, 1]
    phi.mu.data.copy_(single.mu.data.expand_as(phi.mu))
    check_mean(draws(phi), truth(single))


@pytest.mark.parametrize("name", GMM)
def test_shared_noise_is_transformed_by_every_component(name):
    C, M = 3, 2
    phi = move_(GMM[name](3, M, num_components=C, shared_noise=True, init_std=0.4)).double()
    noise = phi.projection.matrix()
    assert noise.shape == (M, 3)
    factor = phi.factor if phi.sinks else phi.factor.diag_embed()
    wanted = [factor[c] @ noise[i] + phi.mu[c] for c in range(C) for i in range(M)]
    torch.testing.assert_close(phi.frequencies(), torch.stack(wanted))
    with torch.no_grad():
        t = X @ torch.stack(wanted).mT
        size = (-phi.g * X.square().sum(-1, keepdim=True)).exp() / math.sqrt(C * M)
        plain = torch.cat([t.cos(), t.sin()], -1) if phi.sinks else t.exp()
        assert phi.feature_dim == plain.shape[-1]
        torch.testing.assert_close(phi(X).dense(), plain * size)


@pytest.mark.parametrize("learnable", ["SGB", "S", None])
@pytest.mark.parametrize("name", FASTFOOD)
def test_fastfood_is_unbiased_for_the_kernel_of_its_learned_diagonals(name, learnable):
    single = move_(FASTFOOD[name](3, 6, learnable=learnable))
    phi = FASTFOOD[name](3, 6, learnable=learnable, num_heads=20_000)
    for (key, p), q in zip(phi.named_parameters(), single.parameters(), strict=True):
        assert key in (learnable or "")
        p.data.copy_(q.data.expand_as(p))
    for fixed in ("signs", "order"):
        getattr(phi, fixed).copy_(getattr(single, fixed).expand_as(getattr(phi, fixed)))
    check_mean(draws(phi), truth(single))


@pytest.mark.parametrize("name", FASTFOOD)
def test_one_fastfood_row_has_the_mse_of_one_gaussian_frequency(name):
    samples = draws(FASTFOOD[name](3, 1, num_heads=60_000))
    if name == "fastfood_rks":
        mse = theory.mse_fourier(gaussian_kernel(X, Y), gaussian_kernel(2 * X, 2 * Y), 1)
        check_mse(samples, gaussian_kernel(X, Y), mse, detect=0.3)
    else:
        check_mse(samples, softmax_kernel(X, Y), theory.mse_positive(*pairs(), 1), detect=0.35)


def test_fastfood_frequencies_are_the_matrix_product_of_the_paper():
    d, p, M = 3, 4, 7
    phi = move_(FastfoodSinkFeatures(d, M)).double()
    H = torch.tensor([[1.0]], dtype=torch.float64)
    while len(H) < p:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    rows = []
    with torch.no_grad():
        for b in range(2):
            P = torch.eye(p, dtype=torch.float64)[phi.order[b]]
            G, B = torch.diag(phi.direction[b] * phi.G[b]), torch.diag(phi.signs[b] * phi.B[b])
            rows.append(H @ G @ P @ H @ B / math.sqrt(p))
        V = torch.cat(rows)[:M, :d] * (phi.lengths * phi.S)[:, None]
        torch.testing.assert_close(phi.frequencies(), V)
        t = X @ V.mT
        torch.testing.assert_close(phi(X).dense(), torch.cat([t.cos(), t.sin()], -1) / math.sqrt(M))


@pytest.mark.parametrize(("dim", "size"), [(1, 1), (5, 3), (6, 20), (8, 8), (12, 33)])
@pytest.mark.parametrize("name", FASTFOOD)
def test_fastfood_takes_sizes_that_are_no_powers_of_two(name, dim, size):
    phi = FASTFOOD[name](dim, size)
    assert phi.frequencies().shape == (size, dim)
    x = 0.1 * torch.ones(2, dim)
    assert phi(x).values.shape[-1] == phi.feature_dim
    assert torch.isfinite(phi(x).values).all()


@pytest.mark.parametrize("name", GENERATIVE)
def test_the_generator_starts_with_normal_noise_and_then_moves_it(name):
    phi = GENERATIVE[name](3, 16).double()
    assert torch.equal(phi.frequencies(), phi.projection.matrix())
    move_(phi, size=0.5)
    shift = (phi.frequencies() - phi.projection.matrix()).abs()
    assert 0.01 < shift.max() <= 1
    # Trained, the kernel is an average over fresh noise: batch norm ties the rows of one draw, and the mean stays.
    single = move_(GENERATIVE[name](3, 16, projection="iid"), size=0.3)
    many = GENERATIVE[name](3, 16, projection="iid", num_heads=3_000)
    for p, q in zip(many.parameters(), single.parameters(), strict=True):
        p.data.copy_(q.data.expand_as(p))
    torch.testing.assert_close(draws(many).mean(0), truth(single), rtol=0.05, atol=0)


def test_the_generator_has_four_normalised_layers_and_one_bounded_one():
    phi = GenerativeSinkFeatures(4, 32)
    assert [tuple(w.shape) for w in phi.layers] == [(4, 4)] * 4
    assert tuple(phi.last.shape) == (4, 4)
    # Batch norm: scaling the weights of a layer changes nothing.
    move_(phi)
    before = phi.frequencies()
    phi.layers[1].data.mul_(7.0)
    torch.testing.assert_close(phi.frequencies(), before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", GENERATIVE)
def test_the_generator_without_residual_is_the_network_of_the_paper(name):
    phi = move_(GENERATIVE[name](3, 16, residual=False, projection="iid")).double()
    layers = []
    for weight, gain, shift in zip(phi.layers, phi.gains, phi.shifts, strict=True):
        linear, norm = torch.nn.Linear(*weight.shape[::-1], bias=False), torch.nn.BatchNorm1d(len(weight))
        linear.weight, norm.weight, norm.bias = (torch.nn.Parameter(t.data.squeeze()) for t in (weight, gain, shift))
        layers += [linear, norm, torch.nn.LeakyReLU(0.2)]
    last = torch.nn.Linear(3, 3)
    last.weight, last.bias = (torch.nn.Parameter(t.data.squeeze()) for t in (phi.last, phi.last_bias))
    network = torch.nn.Sequential(*layers, last, torch.nn.Tanh()).double().train()
    torch.testing.assert_close(phi.frequencies(), network(phi.projection.matrix()))
    single = GENERATIVE[name](3, 16, residual=False, projection="iid")
    assert single.last.any(), "all frequencies would be zero"
    many = GENERATIVE[name](3, 16, residual=False, projection="iid", num_heads=3_000)
    for p, q in zip(many.parameters(), single.parameters(), strict=True):
        p.data.copy_(q.data.expand_as(p))
    torch.testing.assert_close(draws(many).mean(0), truth(single), rtol=0.02, atol=0)
    assert (truth(single) / KERNELS[single.kernel](X, Y) - 1).abs().max() > 0.03, "it starts at no known kernel"


LEARNED = {
    **{name: (cls, {}) for name, cls in MAPS.items()},
    "gmm_prf shared": (GMMPositiveFeatures, {"shared_noise": True}),
    "generative_prf without residual": (GenerativePositiveFeatures, {"residual": False}),
    "fastfood_rks S": (FastfoodSinkFeatures, {"learnable": "S"}),
    "hedgehog": (HedgehogFeatures, {}),
}


@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("name", LEARNED)
def test_gradients_of_all_learned_parameters_are_those_of_finite_differences(name, heads):
    cls, options = LEARNED[name]
    phi = move_(cls(3, 4, num_heads=heads, **options)).double()
    names = [n for n, _ in phi.named_parameters()]
    x, y = (X, Y) if heads is None else (X.expand(heads, -1, -1), Y.expand(heads, -1, -1))

    def f(x, y, *values):
        new = dict(zip(names, values, strict=True))
        q, k = (functional_call(phi, new, (t, role)) for t, role in ((x, "query"), (y, "key")))
        return q.values @ k.values.mT * (q.log_scale + k.log_scale.mT).exp()

    inputs = [t.detach().clone().requires_grad_() for t in (x, y, *phi.parameters())]
    assert torch.autograd.gradcheck(f, inputs)
    loss = f(*inputs).square().sum()
    assert all(grad.abs().max() > 0 for grad in torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize("name", MAPS)
def test_a_redraw_keeps_what_was_learned_and_reproduces_the_seed(name):
    phi = MAPS[name](3, 6, seed=0)
    fresh = kernel_estimate(MAPS[name](3, 6, seed=5), X, Y)
    torch.testing.assert_close(kernel_estimate(phi.redraw_(5), X, Y), fresh)
    move_(phi)
    parameters = [p.clone() for p in phi.parameters()]
    kernel = phi.kernel_matrix(X, Y)
    before = kernel_estimate(phi, X, Y)
    assert not torch.equal(kernel_estimate(phi.redraw_(6), X, Y), before)
    assert all(torch.equal(p, q) for p, q in zip(phi.parameters(), parameters, strict=True))
    assert torch.equal(phi.kernel_matrix(X, Y), kernel)


def test_learning_moves_the_kernel_towards_a_target():
    target = gaussian_kernel(2 * X, 2 * Y)
    for cls in (GMMSinkFeatures, FastfoodSinkFeatures, GenerativeSinkFeatures):
        phi = cls(3, 64, seed=0).double()
        start = (truth(phi) - target).square().mean()
        optimiser = torch.optim.Adam(phi.parameters(), lr=0.03)
        for step in range(60):
            optimiser.zero_grad()
            (kernel_estimate(phi, X, Y) - target).square().mean().backward()
            optimiser.step()
            if step % 10 == 9:
                phi.redraw_(step)
        assert (truth(phi) - target).square().mean() < 0.2 * start


def test_hedgehog_starts_as_a_softmax_of_the_coordinates_and_their_negation():
    phi = HedgehogFeatures(3, 5)
    x = torch.cat([X, X[:, :2]], -1)
    torch.testing.assert_close(phi(X).dense().detach(), torch.cat([x, -x], -1).softmax(-1))
    torch.testing.assert_close(phi(X, "key").dense(), phi(X, "query").dense())
    assert phi.positive
    assert not phi.unbiased
    torch.testing.assert_close(kernel_estimate(phi, X, Y), phi.kernel_matrix(X, Y))
    torch.testing.assert_close(phi(X).values.sum(-1).detach(), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: GMMSinkFeatures(3, 2, num_components=3), "at least its 'num_components'"),
        (lambda: GMMSinkFeatures(3, 2, num_components=0), "num_components"),
        (lambda: GMMPositiveFeatures(3, 4, g=math.inf), "'g'"),
        (lambda: GMMPositiveFeatures(3, 4, init_std=-1.0), "init_std"),
        (lambda: GMMPositiveFeatures(3, 4, kernel="laplace"), "kernel"),
        (lambda: FastfoodSinkFeatures(3, 4, learnable="G"), "learnable"),
        (lambda: GenerativeSinkFeatures(3, 1), "at least 2"),
        (lambda: HedgehogFeatures(3, 0), "num_features"),
    ],
)
def test_bad_input_is_one_sentence(call, match):
    with pytest.raises(BochnerError, match=match):
        call()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [*MAPS, "hedgehog"])
def test_linear_attention_and_its_recomputed_gradients_are_those_of_the_quadratic_product(name, causal):
    g = torch.Generator().manual_seed(0)
    q, k, v = (0.5 * torch.randn(1, 2, 130, 4, generator=g, dtype=torch.float64) for _ in range(3))
    cls = HedgehogFeatures if name == "hedgehog" else MAPS[name]
    phi = cls(4, 256, num_heads=2).double()
    move_(phi, size=0.05)
    K = kernel_estimate(phi, q * 4**-0.25, k * 4**-0.25)
    K = K.tril() if causal else K
    expected = K @ v / K.sum(-1, keepdim=True)
    out = linear_attention(q, k, v, phi, is_causal=causal)
    torch.testing.assert_close(out, expected)
    ours, theirs = (torch.autograd.grad(t.square().sum(), list(phi.parameters())) for t in (out, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["gmm_prf", "fastfood_rks"])
def test_attention_through_a_learned_map_is_linear_in_the_length(name):
    phi = MAPS[name](16, 32)
    lengths = (4096, 32768)
    best = dict.fromkeys(lengths, math.inf)
    for _ in range(5):
        for length in lengths:
            q, k, v = 0.3 * torch.ones(3, 1, 1, length, 16)
            start = time.process_time()
            with torch.no_grad():
                linear_attention(q, k, v, phi)
            best[length] = min(best[length], time.process_time() - start)
    assert math.log(best[32768] / best[4096]) / math.log(8) < 1.3  # 2 for quadratic; caches and other load add some
