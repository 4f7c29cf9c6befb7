"""Gaussian processes: the evidence and its gradient, posteriors against scikit-learn, intervals that cover."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from sklearn.gaussian_process import GaussianProcessRegressor as TheirProcess
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel

from bochner import BochnerError
from bochner.estimators import Centers, GaussianProcessRegressor
from bochner.estimators.evidence import Hyper, evidence, learn, left_out

torch.set_num_threads(1)


def wave(n, seed=0, noise=0.2):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-3, 3, size=(n, 2)) * [1.0, 100.0]
    return X, 50 + 10 * (np.sin(2 * X[:, 0]) + noise * rng.normal(size=n))


@pytest.mark.parametrize("kernel", ["gaussian", "matern32", "laplace"])
def test_the_evidence_is_that_of_scikit_learn_and_so_is_its_gradient(kernel):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(50, 3)), rng.normal(size=(50, 2))
    hyper = Hyper(np.array([0.7, 1.5, 3.0]), 1.7, 0.3)
    value, gradient = evidence(kernel, torch.from_numpy(X), torch.from_numpy(y), hyper)
    theirs = {"gaussian": RBF(hyper.bandwidth), "matern32": Matern(hyper.bandwidth, nu=1.5)}
    base = theirs.get(kernel, Matern(hyper.bandwidth, nu=0.5))
    model = TheirProcess(ConstantKernel(1.7) * base + WhiteKernel(0.3), optimizer=None, alpha=0.0).fit(X, y)
    expected, slope = model.log_marginal_likelihood(model.kernel_.theta, eval_gradient=True)
    assert value == pytest.approx(-expected, rel=1e-8)
    np.testing.assert_allclose(gradient, -np.r_[slope[1:4], slope[0], slope[4]], rtol=1e-5, atol=1e-7)


def test_learning_finds_what_the_data_were_drawn_from():
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, size=(500, 2))
    y = np.sin(2 * X[:, :1]) + 0.2 * rng.normal(size=(500, 1))
    y = (y - y.mean()) / y.std()
    found = learn("gaussian", X, y)
    assert found.bandwidth[1] > 20 * found.bandwidth[0]
    assert found.noise == pytest.approx(0.04 / 0.54, rel=0.3)
    held = learn("gaussian", X, y, Hyper(np.full(2, np.nan), math.nan, 0.5))
    assert held.noise == pytest.approx(0.5)


def test_the_density_of_rows_left_out_is_that_of_scikit_learns_predictions():
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(30, 3)), rng.normal(size=(30, 1))
    hyper = Hyper(np.array([0.7, 1.5, 3.0]), 1.7, 0.3)
    kernel, losses = ConstantKernel(1.7) * RBF(hyper.bandwidth) + WhiteKernel(0.3), []
    for i in range(30):
        others = np.arange(30) != i
        model = TheirProcess(kernel, optimizer=None, alpha=0.0).fit(X[others], y[others])
        mean, std = model.predict(X[i : i + 1], return_std=True)
        losses.append(np.log(std[0]) + np.square((y[i, 0] - mean.ravel()[0]) / std[0]) / 2)
    assert left_out("gaussian", torch.from_numpy(X), torch.from_numpy(y), hyper) == pytest.approx(np.mean(losses))


def test_of_two_explanations_the_one_that_predicts_better_is_learned(monkeypatch):
    """Both starts are searched from; with the search taken away, the better start itself comes back."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, size=(900, 2))
    for noise, expected in ((0.05, 0.1), (1.0, 0.5)):
        y = np.sin(X[:, :1]) + noise * rng.normal(size=(900, 1))
        monkeypatch.setattr("bochner.estimators.evidence.minimize", lambda f, p, **rest: SimpleNamespace(x=p))
        assert learn("gaussian", X, (y - y.mean()) / y.std()).noise == pytest.approx(expected)


def test_given_hyperparameters_give_the_posterior_of_scikit_learn():
    X, y = wave(200)
    Q = np.concatenate([X[:30], [[500.0, 9e4]]])
    x = (X - X.mean(0)) / X.std(0)
    ours = GaussianProcessRegressor(alpha=0.05, amplitude=2.0, gamma=0.5, kernel="gaussian").fit(X, y)
    theirs = TheirProcess(ConstantKernel(2.0) * RBF(1.0), alpha=0.05, optimizer=None, normalize_y=True).fit(x, y)
    q = (Q - X.mean(0)) / X.std(0)
    mean, cov = theirs.predict(q, return_cov=True)
    np.testing.assert_allclose(ours.predict(Q), mean, atol=1e-6)
    np.testing.assert_allclose(ours.predict(Q, return_cov=True, noise=False)[1], cov, atol=1e-6)
    np.testing.assert_allclose(ours.predict(Q, return_std=True, noise=False)[1], np.sqrt(np.diag(cov)), atol=1e-6)
    with_noise = ours.predict(Q, return_cov=True)[1]
    np.testing.assert_allclose(with_noise, cov + 0.05 * y.var() * np.eye(31), atol=1e-6)
    np.testing.assert_allclose(ours.predict(Q, return_std=True)[1] ** 2, np.diag(with_noise), rtol=1e-9)


def test_on_all_rows_as_centres_the_posterior_is_exact():
    X, y = wave(150)
    Q = np.concatenate([X[:20] + 0.1, [[50.0, 900.0]]])
    given = {"alpha": 0.05, "amplitude": 2.0, "gamma": 0.5}
    exact = GaussianProcessRegressor(**given).fit(X, y)
    model = GaussianProcessRegressor(centers=X, **given).fit(X, y)
    for a, b in zip(model.predict(Q, return_cov=True), exact.predict(Q, return_cov=True), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)
    np.testing.assert_allclose(model.predict(Q, return_std=True)[1], exact.predict(Q, return_std=True)[1], rtol=1e-4)


@pytest.mark.parametrize("centers", ["auto", 60])
def test_intervals_cover_what_they_say(centers):
    """Of 4,000 new observations: 95 % within 3 %, 50 % within 5 %."""
    X, y = wave(800)
    Q, t = wave(4000, seed=1)
    model = GaussianProcessRegressor(centers=centers).fit(X, y)
    for level, slack in ((0.95, 0.03), (0.5, 0.05)):
        low, high = model.interval(Q, level)
        assert abs(((low < t) & (t < high)).mean() - level) < slack
    assert model.score(Q, t) > 0.9
    std = model.predict(np.array([[0.0, 0.0], [90.0, 9e3]]), return_std=True)[1]
    assert std[1] > 2 * std[0]  # far away, nothing is known
    with pytest.raises(BochnerError, match=r"'level'.*1.5"):
        model.interval(Q, 1.5)


def test_centres_follow_the_rule_that_was_asked_for():
    X, y = wave(200)
    given = {"alpha": 0.1, "amplitude": 1.0, "gamma": 0.5}
    random, pivoted = (
        GaussianProcessRegressor(centers=Centers(12, rule), **given).fit(X, y).centers_
        for rule in ("random", "pivoted")
    )
    assert random.shape == pivoted.shape == (12, 2)
    assert not np.isin(random[:, 0], pivoted[:, 0]).all()
    nearest = [np.sort(np.linalg.norm((c[:, None] - c) / X.std(0), axis=-1), 1)[:, 1].min() for c in (random, pivoted)]
    assert nearest[0] < nearest[1]  # pivots keep apart


def test_noise_is_learned_again_from_all_rows():
    """The likeliest ratio, against brute force over the dense matrix of the same centres."""
    X, y = wave(300)
    model = GaussianProcessRegressor(centers=30, kernel="gaussian").fit(X, y)
    x, z = ((v - X.mean(0)) / X.std(0) for v in (X, model.centers_))
    from bochner.matvec import Kernel

    kernel = Kernel("gaussian", model.bandwidth_ / X.std(0))
    cross, own = (kernel.block(torch.from_numpy(a), torch.from_numpy(z)).numpy() for a in (x, z))
    Q = cross @ np.linalg.solve(own + 1e-9 * np.eye(len(own)), cross.T)
    t = (y - y.mean()) / y.std()

    def bound(amplitude, noise):
        A = amplitude * Q + noise * np.eye(300)
        missing = amplitude * (300 - np.trace(Q)) / noise
        return np.linalg.slogdet(A)[1] + t @ np.linalg.solve(A, t) + missing

    best = bound(model.amplitude_, model.noise_)
    others = [bound(model.amplitude_ * a, model.noise_ * b) for a in (0.7, 1, 1.4) for b in (0.7, 1, 1.4)]
    assert best <= min(others) * (1 + 1e-3) + 5.0
    assert best < min(bound(model.amplitude_, model.noise_ * b) for b in (0.5, 2.0))


def test_drawn_functions_have_the_mean_and_covariance_of_the_posterior():
    X, y = wave(100)
    Q = X[:5] + 0.3
    model = GaussianProcessRegressor(alpha=0.1, amplitude=1.0, gamma=0.5).fit(X, y)
    mean, cov = model.predict(Q, return_cov=True, noise=False)
    drawn = model.sample_y(Q, 20_000, random_state=0)
    assert drawn.shape == (5, 20_000)
    deviation = np.sqrt(np.diag(cov))
    assert (np.abs(drawn.mean(1) - mean) < 5 * deviation / np.sqrt(20_000)).all()
    assert (np.abs(np.cov(drawn) - cov) < 5 * np.outer(deviation, deviation) * np.sqrt(2 / 20_000)).all()


def test_several_outputs_share_bandwidths():
    X, y = wave(150)
    both = np.stack([y, 3 * y - 7], 1)
    model = GaussianProcessRegressor().fit(X, both)
    mean, std = model.predict(X[:9], return_std=True)
    np.testing.assert_allclose(mean[:, 1], 3 * mean[:, 0] - 7)
    np.testing.assert_allclose(std[:, 1], 3 * std[:, 0])
    assert model.sample_y(X[:9], 4).shape == (9, 2, 4)
    assert model.predict(X[:9], return_cov=True)[1].shape == (9, 9, 2)
