"""scikit-learn's own contract for every estimator, and what each of them promises beyond it."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from scipy import sparse
from sklearn.kernel_approximation import Nystroem, RBFSampler
from sklearn.linear_model import Ridge
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KernelDensity as TheirDensity
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import (
    _regression_dataset,
    check_estimator,
    check_sample_weight_equivalence_on_dense_data,
    parametrize_with_checks,
)

import bochner
from bochner import BochnerError
from bochner.estimators import (
    Centers,
    GaussianProcessRegressor,
    KernelClassifier,
    KernelDensity,
    KernelPCA,
    KernelRidge,
    KernelRidgeCV,
    NadarayaWatson,
    RandomFeatures,
)
from bochner.estimators._checks import resolve_bandwidth
from bochner.maps import FEATURE_MAPS

torch.set_num_threads(1)
SMOOTHERS = [KernelDensity, NadarayaWatson, KernelPCA]
ALL = [RandomFeatures, KernelRidge, KernelRidgeCV, KernelClassifier, *SMOOTHERS, GaussianProcessRegressor]
MAPS = ["trig", "positive", "hyperbolic", "optimal", "calibrated", "angular_hybrid", "clustered"]


def clusters(n, d=4, centres=20, seed=0):
    rng = np.random.default_rng(seed)
    return 5 * rng.normal(size=(centres, d))[rng.integers(centres, size=n)] + rng.normal(size=(n, d))


BEYOND_DEFAULTS = [
    RandomFeatures(feature_map="calibrated"),
    RandomFeatures(16, kernel="softmax"),
    RandomFeatures(16, feature_map="exp"),
    RandomFeatures(16, feature_map="gelu"),
    RandomFeatures(1, feature_map="gmm_prf"),
    NadarayaWatson(bandwidth="silverman"),
    KernelRidge(kernel="matern32"),
    KernelRidge(standardize=False),
    KernelClassifier(kernel="matern52"),
]


@parametrize_with_checks([make() for make in ALL] + BEYOND_DEFAULTS)
def test_scikit_learns_contract(estimator, check):
    check(estimator)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["gaussian", "softmax"])
@pytest.mark.parametrize("name", sorted(FEATURE_MAPS))
def test_scikit_learns_contract_for_every_map(name, kernel):
    model = RandomFeatures(16, feature_map=name, kernel=kernel, random_state=0)
    try:
        model.fit(np.random.default_rng(0).normal(size=(50, 4)))
    except BochnerError as reason:
        pytest.skip(str(reason))  # has one kernel only
    failed = [r for r in check_estimator(model, on_fail=None, on_skip=None) if r["status"] == "failed"]
    assert not failed, [(r["check_name"], r["exception"]) for r in failed]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        RandomFeatures(16, feature_map="tensor_sketch", map_params={"degree": 2}),
        KernelDensity(bandwidth="scott"),
        NadarayaWatson(bandwidth="scott"),
        KernelRidge(gamma="learn"),
        KernelRidge(centers=30),
        KernelClassifier(centers=5),
    ],
)
def test_scikit_learns_contract_for_other_settings(model):
    failed = [r for r in check_estimator(model, on_fail=None, on_skip=None) if r["status"] == "failed"]
    assert not failed, [(r["check_name"], r["exception"]) for r in failed]


@pytest.mark.parametrize("model", [KernelRidge, KernelRidgeCV, KernelClassifier])
@pytest.mark.parametrize("rule", ["random", "pivoted", "leverage"])
def test_a_weight_counts_as_copies_where_centres_are_chosen(model, rule):
    check_sample_weight_equivalence_on_dense_data(model.__name__, model(centers=Centers(5, rule)))


@pytest.mark.parametrize("kernel", ["gaussian", "laplace", "matern32", "matern52", "student"])
@pytest.mark.parametrize("model", [KernelRidge, KernelRidgeCV, KernelClassifier])
def test_a_weight_counts_as_copies_for_every_kernel(model, kernel):
    check_sample_weight_equivalence_on_dense_data(model.__name__, model(kernel=kernel))


def test_five_centres_fail_no_check_but_the_one_that_asks_for_a_good_fit():
    """scikit-learn asks for R2 > 0.5 on ten columns; five functions cannot, neither its own nor ours."""
    failed = [r for r in check_estimator(KernelRidge(centers=5), on_fail=None, on_skip=None) if r["status"] == "failed"]
    assert {r["check_name"] for r in failed} == {"check_regressors_train"}
    X, y = _regression_dataset()
    theirs = make_pipeline(Nystroem(n_components=5, gamma=2 / X.shape[1], random_state=0), Ridge(alpha=0.1))
    ours = KernelRidge(centers=5).fit(X, y).score(X, y)
    assert max(ours, theirs.fit(X, y).score(X, y)) < 0.5
    assert KernelRidge(centers=30).fit(X, y).score(X, y) > 0.5


@pytest.mark.parametrize(("name", "rounding"), [("trig", 5e-7), ("gelu", 1e-12), ("positive", 1e-12)])
def test_features_of_a_row_do_not_depend_on_its_neighbours(name, rounding):
    X = np.random.default_rng(0).normal(size=(100, 5))
    model = RandomFeatures(64, feature_map=name, gamma=0.5, random_state=0).fit(X)
    far = np.concatenate([X, 1000.0 * X[:1] / np.linalg.norm(X[:1])]) if name != "positive" else X
    alone = np.concatenate([model.transform(far[i : i + 1]) for i in range(100)])
    np.testing.assert_allclose(model.transform(far)[:100], alone, rtol=0, atol=rounding)


def test_softmax_features_of_points_far_from_zero_are_finite():
    """The softmax kernel sees where X is: its scale is the mean square, not the variance."""
    X = np.random.default_rng(0).normal(loc=100.0, size=(100, 3))
    model = RandomFeatures(16, kernel="softmax", random_state=0).fit(X)
    assert model.gamma_ == pytest.approx(1 / (3 * np.square(X).mean()))
    assert np.isfinite(model.transform(X)).all()
    assert model.fit(sparse.csr_matrix(X)).gamma_ == pytest.approx(1 / (3 * np.square(X).mean()))
    assert RandomFeatures(16).fit(X).gamma_ == pytest.approx(1 / (3 * X.var()))


@pytest.mark.parametrize("name", ["gmm_prf", "gmm_rks", "generative_prf", "generative_rks", "landmark"])
def test_one_component_is_raised_to_the_least_of_the_map(name):
    X = np.random.default_rng(0).normal(size=(50, 4))
    kernel = "softmax" if name == "landmark" else "gaussian"
    assert RandomFeatures(1, feature_map=name, kernel=kernel).fit(X).n_components_ >= 2


def test_weights_count_as_repeated_rows_for_the_bandwidth():
    X = clusters(60)
    w = np.arange(60) % 4
    for bandwidth in ("scott", "silverman"):
        weighted = KernelDensity(bandwidth=bandwidth).fit(X, sample_weight=w)
        assert weighted.bandwidth_ == pytest.approx(KernelDensity(bandwidth=bandwidth).fit(X.repeat(w, 0)).bandwidth_)


def test_the_scale_of_weights_that_are_no_counts_means_nothing():
    rng = np.random.default_rng(0)
    shape, weight = (50, 3), rng.uniform(0.1, 1.0, 50)
    for rule in ("scott", "silverman"):
        found = [resolve_bandwidth(rule, shape, w, "KernelDensity") for w in (weight, weight / weight.sum())]
        assert found[0] == pytest.approx(found[1], rel=1e-12)
        assert found[0] > resolve_bandwidth(rule, shape, np.ones(50), "KernelDensity")  # fewer rows count
        twice = resolve_bandwidth(rule, shape, np.full(50, 2.0), "KernelDensity")
        assert twice == resolve_bandwidth(rule, (100, 3), np.ones(100), "KernelDensity")


def test_the_estimators_are_reached_from_the_package():
    assert bochner.estimators.KernelRidge is KernelRidge


@pytest.mark.parametrize("make", ALL)
def test_a_pickled_estimator_gives_the_same_answers(make):
    X = clusters(200)
    model = make().fit(X, X[:, 0] > 0 if make is KernelClassifier else X[:, 0])
    again = pickle.loads(pickle.dumps(model))
    name = next(n for n in ("predict", "transform", "score_samples") if hasattr(model, n))
    np.testing.assert_array_equal(getattr(again, name)(X[:20]), getattr(model, name)(X[:20]))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (KernelRidge(alpha=-1.0), "'alpha'.*-1"),
        (KernelRidge(gamma="best"), "'gamma'.*'best'"),
        (NadarayaWatson(bandwidth="best"), "'bandwidth'.*'best'"),
        (RandomFeatures(0), "'n_components'.*0"),
        (RandomFeatures(feature_map="best"), "Unknown feature map 'best'"),
        (RandomFeatures(feature_map="tensor_sketch", kernel="softmax"), "'tensor_sketch' has no kernel 'softmax'"),
        (RandomFeatures("auto"), "'n_components'.*'auto'"),
        (RandomFeatures(map_params=3), "'map_params'.*dict.*3"),
        (RandomFeatures(feature_map="landmark"), "'landmark' estimates the kernel 'softmax' here.*kernel='softmax'"),
        (KernelRidge(tol=float("nan")), "'tol'.*nan"),
        (KernelRidge(tol=-1.0), "'tol'.*-1"),
        (KernelPCA(tol=float("nan")), "'tol'.*nan"),
        (KernelPCA(tol=-1.0), "'tol'.*-1"),
        (KernelPCA(0), "'n_components'.*0"),
        (KernelRidge(kernel="best"), "'kernel'.*'best'"),
        (KernelRidge(centers=0), "'centers'.*0"),
        (KernelRidge(centers="some"), "'centers' of KernelRidge.*'some'"),
        (KernelRidge(gamma=[1.0, 2.0]), "'gamma' of KernelRidge must be one positive number, or 4"),
        (KernelRidge(gamma=[1.0, np.inf, 1.0, 1.0]), "'gamma' of KernelRidge must be one positive number, or 4"),
        (KernelRidge(gamma=list("abcd")), "'gamma' of KernelRidge must be one positive number, or 4"),
        (KernelRidge(centers=np.ones((5, 2))), r"'centers' of KernelRidge.*\(M, 4\).*got one of shape \(5, 2\)"),
        (GaussianProcessRegressor(centers=np.ones((5, 2))), r"'centers' of Gaussian.*got one of shape \(5, 2\)"),
        (KernelRidgeCV(alphas=[]), "a list of 'alphas'"),
        (KernelRidgeCV(gammas=[]), "and one of 'gammas'"),
        (KernelRidgeCV(gammas=0.5), "and one of 'gammas'"),
        (KernelRidge(warm_start="yes"), "'warm_start'.*'yes'"),
        (KernelRidge(standardize="yes"), "'standardize'.*'yes'"),
        (KernelRidgeCV(alphas=[1.0, -1.0]), "'alphas'.*-1"),
        (GaussianProcessRegressor(amplitude=0.0), "'amplitude'.*0"),
        (GaussianProcessRegressor(alpha=-1.0), "'alpha'.*-1"),
        (
            GaussianProcessRegressor(gamma=[1.0]),
            "'gamma' of GaussianProcessRegressor must be one positive number, or 4",
        ),
        (GaussianProcessRegressor(kernel="best"), "'kernel'.*'best'"),
    ],
)
def test_a_bad_parameter_is_named(model, message):
    X = clusters(30)
    with pytest.raises(BochnerError, match=message):
        model.fit(X, X[:, 0])


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_rows_whose_variance_is_out_of_range_are_refused(size):
    X = clusters(30) * size
    for model in (RandomFeatures(8), KernelRidge(standardize=False), KernelPCA()):
        with pytest.raises(BochnerError, match=r"variance.*rescale X"):
            model.fit(X, np.ones(30))
    few = np.array([[1.0], [1.0], [3.0]])
    model = KernelRidge(gamma="scale").fit(few, np.ones(3), sample_weight=[1, 1, 0])
    assert model.gamma_ == 1  # what does not count does not vary


def test_centres_that_cannot_be_are_named():
    with pytest.raises(BochnerError, match=r"'count' of Centers.*0"):
        Centers(0)
    with pytest.raises(BochnerError, match=r"'rule' of Centers.*'best'"):
        Centers(rule="best")


@pytest.mark.parametrize(
    "model", [KernelRidge(), GaussianProcessRegressor(), NadarayaWatson(), KernelDensity(), KernelPCA()]
)
def test_frozen_arrays_are_read_without_a_warning(model):
    """torch warns of them once in a process: here every time."""
    X = clusters(60)
    X.setflags(write=False)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        model.fit(X, X[:, 0])
        getattr(model, next(n for n in ("predict", "transform", "density") if hasattr(model, n)))(X)
    finally:
        torch.set_warn_always(always)


def test_weights_and_alphas_that_cannot_be_are_named():
    X = np.repeat(clusters(30), 3, axis=0)
    with pytest.raises(BochnerError, match="zero everywhere"):
        KernelDensity().fit(X, sample_weight=np.zeros(90))
    with pytest.raises(BochnerError, match="not negative"):
        KernelRidge().fit(X, X[:, 0], sample_weight=-np.ones(90))
    with pytest.raises(BochnerError, match="shape"):
        NadarayaWatson().fit(X, X[:, 0], sample_weight=np.ones(5))
    with pytest.raises(BochnerError, match="raise 'alpha'"):
        KernelRidge(alpha=1e-18, gamma=1e-3).fit(X, X[:, 0])
    with pytest.raises(BochnerError, match="at least two classes"):
        KernelClassifier().fit(X, np.ones(90))


def test_densities_and_averages_of_many_rows_are_those_of_few_in_double_precision():
    """The operator may take single precision: the same answers, far from the origin too."""
    X = clusters(2500) + 1e4
    y = X[:, 0]
    Q = X[:50] + 0.1
    K = rbf_kernel(Q, X, gamma=0.5)
    np.testing.assert_allclose(NadarayaWatson().fit(X, y).predict(Q), K @ y / K.sum(1), atol=1e-3)
    density = K.sum(1) / 2500 / (2 * np.pi) ** 2
    np.testing.assert_allclose(KernelDensity().fit(X).density(Q), density, rtol=1e-4)


# ---- random features ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("kernel", ["gaussian", "softmax"])
def test_features_estimate_their_kernel(name, kernel):
    """The mean over 40 draws is within 5 standard errors of the kernel."""
    X = np.random.default_rng(0).normal(size=(12, 3))
    gamma = 0.15
    truth = rbf_kernel(X, gamma=gamma) if kernel == "gaussian" else np.exp(2 * gamma * X @ X.T)
    draws = []
    for seed in range(40):
        model = RandomFeatures(256, feature_map=name, kernel=kernel, gamma=gamma, random_state=seed).fit(X)
        assert model.n_components_ <= 256
        draws.append(model.transform(X) @ model.transform(X, role="key").T)
    mean, error = np.mean(draws, 0), np.std(draws, 0) / np.sqrt(len(draws))
    assert (np.abs(mean - truth) <= 5 * error + 1e-5).all()
    assert error.mean() < 0.05 * truth.mean()


@pytest.mark.parametrize("name", ["gmm_prf", "fastfood_prf", "generative_prf", "gmm_rks"])
@pytest.mark.parametrize("kernel", ["gaussian", "softmax"])
def test_learned_maps_start_at_the_kernel_that_was_asked_for(name, kernel):
    X = 0.5 * np.random.default_rng(0).normal(size=(40, 6)) + 0.3
    model = RandomFeatures(8192, feature_map=name, kernel=kernel, gamma=0.2, random_state=0).fit(X)
    truth, other = rbf_kernel(X, gamma=0.2), np.exp(0.4 * X @ X.T)
    if kernel == "softmax":
        truth, other = other, truth
    estimate = model.transform(X) @ model.transform(X, role="key").T
    assert np.linalg.norm(estimate - truth) < 0.15 * np.linalg.norm(truth) < 0.4 * np.linalg.norm(other - truth)


def test_landmarks_estimate_the_softmax_kernel():
    X = np.random.default_rng(0).normal(size=(400, 6))
    model = RandomFeatures(64, feature_map="landmark", kernel="softmax", random_state=0).fit(X)
    truth = np.exp(2 * model.gamma_ * X @ X.T)
    estimate = model.transform(X) @ model.transform(X, role="key").T
    assert np.linalg.norm(estimate - truth) < 0.5 * np.linalg.norm(truth)
    # They are fitted to rows as attention weighs them: half as far as rows that are all alike.
    rows, fitted = (k / k.sum(1, keepdims=True) for k in (truth, estimate))
    assert np.linalg.norm(fitted - rows) < 0.5 * np.linalg.norm(1 / 400 - rows)


def test_the_error_is_below_that_of_the_sampler_of_scikit_learn():
    X = clusters(300, centres=3)
    gamma = 0.02
    truth = rbf_kernel(X, gamma=gamma)

    def error(make):
        squares = [((lambda Z: Z @ Z.T)(make(s).fit_transform(X)) - truth) ** 2 for s in range(10)]
        return np.mean(squares)

    ours = error(lambda s: RandomFeatures(64, gamma=gamma, random_state=s))
    theirs = error(lambda s: RBFSampler(n_components=64, gamma=gamma, random_state=s))
    assert ours < 0.8 * theirs


def test_sparse_rows_have_the_features_of_dense_ones():
    X = sparse.random(60, 8, density=0.3, random_state=0, format="csr")
    model = RandomFeatures(32, random_state=0, gamma=0.5).fit(X)
    np.testing.assert_allclose(model.transform(X), model.transform(X.toarray()), atol=1e-6)
    auto = RandomFeatures(32, random_state=0).fit(X)
    assert auto.gamma_ == pytest.approx(1 / (8 * X.toarray().var()))


def test_features_far_from_the_origin_are_those_near_it():
    X = clusters(100, centres=3)
    near, far = (RandomFeatures(64, gamma=0.02, random_state=0).fit_transform(X + shift) for shift in (0.0, 1e6))
    np.testing.assert_allclose(near @ near.T, far @ far.T, atol=1e-4)


def test_huge_features_are_refused_with_a_remedy():
    X = 100 * clusters(20)
    with pytest.raises(BochnerError, match="overflow"):
        RandomFeatures(kernel="softmax", feature_map="trig", gamma=1.0).fit(X).transform(X)


def test_features_serve_pipelines_and_searches():
    X = clusters(300, centres=4)
    y = np.sin(X[:, 0])
    pipeline = make_pipeline(RandomFeatures(random_state=0), Ridge(alpha=1e-3))
    search = GridSearchCV(pipeline, {"randomfeatures__gamma": [1e-4, 0.05], "randomfeatures__n_components": [16, 128]})
    best = search.fit(X, y).best_params_
    assert best == {"randomfeatures__gamma": 0.05, "randomfeatures__n_components": 128}
    names = RandomFeatures(8, random_state=0).fit(X).get_feature_names_out()
    assert list(names[:2]) == ["randomfeatures0", "randomfeatures1"]
    assert len(names) == 8


def test_one_seed_gives_one_transformer_and_two_give_two():
    X = clusters(50)
    a, b, c = (RandomFeatures(16, random_state=s).fit_transform(X) for s in (0, 0, 1))
    np.testing.assert_array_equal(a, b)
    assert np.abs(a - c).max() > 0.01


# ---- densities and local averages -----------------------------------------------------------------------------


def test_the_density_agrees_with_scikit_learn():
    X, Q, w = clusters(500), clusters(50, seed=1), np.random.default_rng(0).random(500)
    Q = np.concatenate([Q, np.full((1, 4), 400.0)])
    for bandwidth in (0.8, "scott", "silverman"):
        weight = w if bandwidth == 0.8 else None
        ours = KernelDensity(bandwidth=bandwidth).fit(X, sample_weight=weight)
        # One leaf: pruned trees of scikit-learn are off by 0.1 in the log at some of these points.
        theirs = TheirDensity(bandwidth=bandwidth, leaf_size=1000).fit(X, sample_weight=weight)
        np.testing.assert_allclose(ours.score_samples(Q), theirs.score_samples(Q), rtol=1e-9)
        assert ours.score(X) == pytest.approx(theirs.score(X))


def test_signed_weights_give_differences_of_densities():
    X = clusters(400)
    w = np.where(np.arange(400) < 200, 1.0, -1.0)
    model = KernelDensity(bandwidth=0.8).fit(X, sample_weight=w)
    halves = [KernelDensity(bandwidth=0.8).fit(part).density(X[:20]) for part in (X[:200], X[200:])]
    np.testing.assert_allclose(model.density(X[:20]), (halves[0] - halves[1]) / 2, atol=1e-12)
    with pytest.raises(BochnerError, match="non-negative weights"):
        model.score_samples(X)
    with pytest.raises(BochnerError, match="cannot be sampled"):
        model.sample(3)


def test_samples_of_a_density_have_its_mean_and_variance():
    """Two-sided z-tests of the mean and the variance of 20,000 draws at 5 standard errors."""
    X, w = np.array([[0.0], [10.0]]), np.array([3.0, 1.0])
    drawn = KernelDensity(bandwidth=2.0).fit(X, sample_weight=w).sample(20_000, random_state=0)[:, 0]
    variance = 10.0**2 * 3 / 16 + 4
    assert abs(drawn.mean() - 2.5) < 5 * np.sqrt(variance / 20_000)
    fourth = np.mean((drawn - 2.5) ** 4)
    assert abs(((drawn - 2.5) ** 2).mean() - variance) < 5 * np.sqrt((fourth - variance**2) / 20_000)


def test_kernel_regression_is_the_weighted_mean_even_far_away():
    X = clusters(600)
    y, w = X[:, :2] + 1e3, np.random.default_rng(0).random(600)
    Q = np.concatenate([X[:40] + 0.1, np.full((1, 4), 500.0)])
    got = NadarayaWatson(bandwidth=0.8).fit(X, y, sample_weight=w).predict(Q)
    K = rbf_kernel(Q[:40], X, gamma=0.5 / 0.8**2) * w
    np.testing.assert_allclose(got[:40], (K @ y) / K.sum(1, keepdims=True), atol=1e-6)
    nearest = np.argmin(((X - 500.0) ** 2).sum(1))
    np.testing.assert_allclose(got[40], y[nearest], atol=1e-6)


# ---- principal components -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["auto", "exact", "cells"])
@pytest.mark.parametrize("n", [100, 700])
def test_principal_components_are_those_of_scikit_learn(method, n):
    from sklearn.decomposition import KernelPCA as TheirPCA

    X, Q = clusters(n, centres=4), clusters(30, centres=4, seed=3)
    ours = KernelPCA(4, gamma=0.05, method=method, eps=1e-6).fit(X)
    theirs = TheirPCA(4, kernel="rbf", gamma=0.05, eigen_solver="dense").fit(X)
    np.testing.assert_allclose(ours.eigenvalues_, theirs.eigenvalues_, rtol=1e-5)
    for points in (X, Q):
        a, b = ours.transform(points), theirs.transform(points)
        np.testing.assert_allclose(np.abs(a), np.abs(b), atol=1e-4 * np.abs(b).max())
    np.testing.assert_allclose(ours.fit_transform(X), ours.transform(X), atol=1e-4)


@pytest.mark.parametrize("feature_map", ["trig", "positive", "tensor_sketch"])
def test_features_do_not_depend_on_whether_the_rows_are_stored_as_sparse(feature_map):
    """The mean of the training rows is taken off both."""
    X = np.random.default_rng(0).normal(size=(80, 5)) + 3.0
    dense, stored = (
        RandomFeatures(32, feature_map=feature_map, random_state=0).fit(x) for x in (X, sparse.csr_matrix(X))
    )
    np.testing.assert_allclose(stored.transform(sparse.csr_matrix(X)), dense.transform(X), atol=1e-6)
    np.testing.assert_allclose(stored.transform(X[:3]), dense.transform(sparse.csr_matrix(X[:3])), atol=1e-6)
