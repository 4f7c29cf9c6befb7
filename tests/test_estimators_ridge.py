"""Ridge regression and classification on centres: against dense algebra, scikit-learn, and each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from sklearn.exceptions import ConvergenceWarning
from sklearn.kernel_ridge import KernelRidge as TheirRidge
from sklearn.linear_model import LogisticRegression
from sklearn.metrics.pairwise import rbf_kernel

from bochner import BochnerError
from bochner.estimators import Centers, KernelClassifier, KernelRidge, KernelRidgeCV, nystrom, ridge
from bochner.estimators.nystrom import leave_one_out
from bochner.estimators.rows import Block, array_rows
from bochner.matvec import Kernel

torch.set_num_threads(1)
KERNELS = ["gaussian", "laplace", "matern32", "matern52", "student"]


def table(n, d=4, seed=0, outputs=None):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    y = np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.1 * rng.normal(size=n)
    return X, y if outputs is None else np.stack([y, X[:, 1] ** 2], 1)[:, :outputs]


@pytest.fixture
def few_exact(monkeypatch):
    """Large-table paths at small sizes."""
    monkeypatch.setattr(nystrom, "EXACT", 100)


@pytest.mark.parametrize("outputs", [None, 2])
@pytest.mark.parametrize("alpha", [1.0, 1e-3])
def test_ridge_regression_agrees_with_scikit_learn(alpha, outputs):
    X, y = table(500, outputs=outputs)
    Q, w = table(60, seed=2)[0], np.random.default_rng(0).random(500) * (np.arange(500) % 5 > 0)
    for weight in (None, w):
        ours = KernelRidge(alpha=alpha, gamma=0.3, standardize=False).fit(X, y, sample_weight=weight)
        theirs = TheirRidge(alpha=alpha, kernel="rbf", gamma=0.3).fit(X, y, sample_weight=weight)
        np.testing.assert_allclose(ours.predict(Q), theirs.predict(Q), atol=1e-8)
    assert ours.solver_ == "cholesky"


def test_standardised_columns_make_units_irrelevant():
    X, y = table(300)
    scale, shift = np.array([1e-3, 1.0, 50.0, 1e6]), np.array([0.0, 1e3, 5.0, 1e8])
    plain = KernelRidge(gamma=[0.1, 0.2, 0.3, 0.4]).fit(X, y)
    other = KernelRidge(gamma=[0.1, 0.2, 0.3, 0.4]).fit(X * scale + shift, 7 * y + 100)
    np.testing.assert_allclose(other.predict(X * scale + shift), 7 * plain.predict(X) + 100, rtol=1e-6)
    assert plain.score(X, y) > 0.9


def test_columns_of_any_units_are_fitted_by_default():
    """As in a table of houses: incomes, years, numbers of people, degrees; scikit-learn's default explains nothing."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(3000, 5))
    y = np.sin(2 * X[:, 0]) + 0.5 * X[:, 1] * X[:, 2] + 0.1 * rng.normal(size=3000)
    X = X * [1.9, 12.0, 1100.0, 2.1, 2.0] + [3.9, 28.0, 1400.0, 35.0, -119.0]
    ours, theirs = KernelRidge().fit(X[:2000], y[:2000]), TheirRidge(kernel="rbf").fit(X[:2000], y[:2000])
    assert ours.score(X[2000:], y[2000:]) > 0.9 > 0.2 > theirs.score(X[2000:], y[2000:])


def dense_fit(model, X, y, alpha, weight=None):
    """The same problem by dense algebra in double precision, on the centres of the model."""
    kernel = Kernel(model.kernel, model.bandwidth_)
    Z = torch.from_numpy(model.centers_)
    K, own = kernel.block(torch.from_numpy(X), Z), kernel.block(Z)
    w = torch.ones(len(X), 1, dtype=torch.float64) if weight is None else torch.from_numpy(weight)[:, None]
    target = torch.from_numpy((y - model.offset_).reshape(len(y), -1))
    return np.linalg.lstsq((K.T @ (w * K) + alpha * own).numpy(), (K.T @ (w * target)).numpy(), rcond=1e-13)[0], K


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rule", ["random", "pivoted", "leverage"])
def test_a_fit_on_centres_is_the_dense_one(few_exact, kernel, rule):
    X, y = table(900, outputs=2)
    w = np.random.default_rng(0).random(900) + 0.1
    model = KernelRidge(alpha=0.1, kernel=kernel, gamma=0.3, centers=Centers(80, rule), tol=1e-7)
    model.fit(X, y, sample_weight=w)
    assert (model.solver_, model.centers_.shape) == ("centers", (80, 4))
    np.testing.assert_allclose(model.offset_, np.average(y, axis=0, weights=w))
    c, K = dense_fit(model, X, y, 0.1, w)
    truth = K.numpy() @ c + model.offset_
    np.testing.assert_allclose(model.predict(X), truth, atol=1e-3 * y.std())
    assert np.abs(truth - y).std() > 0.05  # the fit is no interpolation that anything would pass


def test_a_dozen_passes_suffice(few_exact):
    X, y = table(3000)
    model = KernelRidge(alpha=1e-2, gamma=0.3, centers=100).fit(X, y)
    assert model.n_iter_ <= 15
    c, K = dense_fit(model, X, y[:, None], 1e-2)
    assert np.abs(K.numpy() @ c[:, 0] + model.offset_ - model.predict(X)).mean() < 0.01 * y.std()


def test_too_few_passes_are_told(few_exact, monkeypatch):
    X, y = table(900)
    monkeypatch.setattr(ridge, "MAX_PASSES", 1)
    with pytest.warns(ConvergenceWarning, match=r"after 1 steps at a residual of .*raise alpha"):
        KernelRidge(alpha=1e-6, gamma=0.3, centers=90, tol=1e-8).fit(X, y)


def test_all_rows_as_centres_are_the_exact_solution(few_exact):
    X, y = table(400)
    w = np.random.default_rng(0).random(400) + 0.1
    model = KernelRidge(alpha=0.1, gamma=0.3, centers="all", tol=1e-8).fit(X, y, sample_weight=w)
    assert model.solver_ == "all"
    # Their columns are weighted means apart: gamma of each column says the same.
    z = (X / model.bandwidth_) / np.sqrt(2)
    K = rbf_kernel(z, gamma=1.0)
    c = np.linalg.solve(K + np.diag(0.1 / w), y - model.offset_)
    np.testing.assert_allclose(model.predict(X), K @ c + model.offset_, atol=1e-4)


def test_centres_can_be_given():
    X, y = table(300)
    model = KernelRidge(centers=X[:20]).fit(X, y)
    np.testing.assert_array_equal(model.centers_, X[:20])
    with pytest.raises(BochnerError, match="an array"):
        KernelRidge(centers=X[0]).fit(X, y)


def test_a_warm_start_takes_fewer_passes_to_the_same_answer(few_exact):
    X, y = table(2000)
    model = KernelRidge(alpha=1e-2, gamma=0.3, centers=100, warm_start=True, tol=1e-4).fit(X, y)
    first, cold = model.n_iter_, model.predict(X)
    np.testing.assert_allclose(model.fit(X, y).predict(X), cold, atol=1e-2)
    assert model.n_iter_ <= 1 < first
    model.alpha = 2e-2
    again = model.fit(X, y)
    fresh = KernelRidge(alpha=2e-2, gamma=0.3, centers=100, tol=1e-4).fit(X, y)
    assert again.n_iter_ < fresh.n_iter_
    np.testing.assert_allclose(again.predict(X), fresh.predict(X), atol=2e-2)


def test_an_interrupted_fit_goes_on_where_it_was(few_exact):
    X, y = table(2000)
    passes = iter(range(1000))

    def blocks(stop: int | None = None):
        if next(passes) == stop:
            raise KeyboardInterrupt
        yield X[:1000], y[:1000]
        yield X[1000:], y[1000:]

    whole = KernelRidge(alpha=1e-4, gamma=0.3, centers=100, tol=1e-6).fit(blocks)
    read = next(passes)
    model = KernelRidge(alpha=1e-4, gamma=0.3, centers=100, tol=1e-6, warm_start=True)
    with pytest.raises(KeyboardInterrupt):
        model.fit(lambda: blocks(2 * read - 1))  # at the pass before the last
    model.fit(blocks)
    assert model.n_iter_ < whole.n_iter_ / 2
    np.testing.assert_allclose(model.predict(X), whole.predict(X), atol=1e-3)


def test_the_number_of_centres_keeps_to_the_seconds():
    counts = [Centers(seconds=s).number(1_000_000, 1) for s in (5, 30, 1000)]
    assert counts[0] < counts[1] < counts[2] == nystrom.EXACT
    assert Centers(seconds=30).number(1_000_000, 10) < counts[1]
    assert Centers().number(500, 1) == 500
    assert Centers(70).number(500, 1) == 70


def test_a_sample_of_the_rows_is_even_and_without_repetition():
    X = np.arange(30_000.0)[:, None]
    rows = replace(array_rows(X, X), lengths=(8192, 8192, 8192, 30_000 - 3 * 8192))
    drawn = rows.sample(3000, np.random.RandomState(0)).X[:, 0]
    assert len(np.unique(drawn)) == 3000
    assert abs(drawn.mean() - 15_000) < 5 * 30_000 / np.sqrt(12 * 3000)
    np.testing.assert_array_equal(rows.sample(10**6, np.random.RandomState(0)).X, X)


# ---- choosing alpha and gamma -----------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_leave_one_out_errors_are_those_of_leaving_rows_out(weighted):
    X, y = table(60, outputs=2)
    w = np.random.default_rng(0).random(60) + 0.2 if weighted else np.ones(60)
    y = y - np.average(y, axis=0, weights=w)
    alphas, K = np.array([0.01, 1.0]), rbf_kernel(X, gamma=0.5)
    found = leave_one_out(Kernel("gaussian", 1.0), Block(X, y, w), 60, alphas, 0)
    for alpha, error in zip(alphas, found, strict=True):
        total = 0.0
        for i in range(60):
            rest = np.arange(60) != i
            c = np.linalg.solve(K[np.ix_(rest, rest)] + np.diag(alpha / w[rest]), y[rest])
            total += w[i] * np.square(y[i] - K[i, rest] @ c).sum()
        assert error == pytest.approx(total / (2 * w.sum()), rel=1e-6)


def test_the_chosen_pair_is_the_best_of_those_compared():
    X, y = table(300)
    grid = [0.01, 0.1, 1.0]
    model = KernelRidgeCV([0.01, 1.0], gammas=grid).fit(X, y)
    assert [g for g, _ in model.errors_] == grid
    errors = np.stack([e for _, e in model.errors_])
    i, j = np.unravel_index(errors.argmin(), errors.shape)
    assert (model.gamma_, model.alpha_) == (grid[i], [0.01, 1.0][j])
    same = KernelRidge(alpha=model.alpha_, gamma=model.gamma_).fit(X, y)
    np.testing.assert_allclose(model.predict(X), same.predict(X))


def test_bandwidths_are_learned_where_columns_differ():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(1200, 6))
    y = np.sin(4 * X[:, 0]) + 0.1 * rng.normal(size=1200)  # the others are noise
    train, test = slice(0, 600), slice(600, None)
    plain, chosen = (m.fit(X[train], y[train]) for m in (KernelRidge(), KernelRidgeCV()))
    assert chosen.score(X[test], y[test]) > 0.95 > 0.7 > plain.score(X[test], y[test])
    assert chosen.gamma_[0] > 20 * chosen.gamma_[1:].max()
    learned = KernelRidge(gamma="learn").fit(X[train], y[train])
    assert learned.score(X[test], y[test]) > 0.9


# ---- classification ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3])
def test_the_classifier_is_logistic_regression_on_the_features_of_the_kernel(classes):
    X, f = table(150)
    y = np.digitize(f, np.quantile(f, np.arange(1, classes) / classes))
    w = np.random.default_rng(0).random(150) + 0.2
    ours = KernelClassifier(alpha=0.5, gamma=0.3, standardize=False).fit(X, y, sample_weight=w)
    own = rbf_kernel(X, gamma=0.3)
    phi = np.linalg.cholesky(own + 1e-10 * np.eye(150))
    theirs = LogisticRegression(C=2.0, fit_intercept=False, tol=1e-10, max_iter=10_000).fit(phi, y, sample_weight=w)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(phi), atol=1e-4)
    np.testing.assert_array_equal(ours.predict(X), theirs.predict(phi))


@pytest.mark.parametrize("labels", [["no", "yes"], [3, 5, 9]])
def test_many_rows_are_classified_as_few_are(few_exact, labels):
    X, f = table(1500)
    y = np.array(labels)[np.digitize(f, np.quantile(f, np.arange(1, len(labels)) / len(labels)))]
    Z = X[:90]
    large = KernelClassifier(gamma=0.3, centers=Z).fit(X, y)
    few = KernelClassifier(gamma=0.3, centers=Z, tol=1e-7).fit(X, y)
    np.testing.assert_allclose(large.predict_proba(X), few.predict_proba(X), atol=0.05)
    assert large.score(X, y) > 0.85
    assert large.n_iter_ < 40
    probability = large.predict_proba(X)
    assert probability.shape == (1500, len(labels))
    np.testing.assert_allclose(probability.sum(1), 1.0)


@pytest.mark.parametrize("classes", [2, 3])
def test_probabilities_of_new_rows_are_as_often_right_as_they_say(few_exact, classes):
    """The default alpha draws them towards the shares of the classes; a lower one does not."""
    X, f = table(6000)
    y = np.digitize(f, np.quantile(f, np.arange(1, classes) / classes))
    apart = {}
    for alpha in (0.1, 0.01):
        model = KernelClassifier(alpha, gamma=0.3, centers=X[:90]).fit(X[:1500], y[:1500])
        right = model.predict(X[1500:]) == y[1500:]
        apart[alpha] = right.mean() - model.predict_proba(X[1500:]).max(1).mean()
    assert abs(apart[0.01]) < 0.03 < apart[0.1] < 0.12
