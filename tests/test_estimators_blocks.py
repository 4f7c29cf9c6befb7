"""Rows in blocks: files, iterators and Dask arrays give what arrays in memory give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from bochner import BochnerError
from bochner.estimators import (
    GaussianProcessRegressor,
    KernelClassifier,
    KernelDensity,
    KernelPCA,
    KernelRidge,
    NadarayaWatson,
    RandomFeatures,
    nystrom,
)

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def few_exact(monkeypatch):
    monkeypatch.setattr(nystrom, "EXACT", 100)


def table(n=1200, d=3, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d)) * [1.0, 10.0, 0.1] + [0.0, 5.0, 100.0]
    return X, np.sin(2 * X[:, 0]) + X[:, 1] / 10 + 0.1 * rng.normal(size=n), rng.random(n) + 0.1


MODELS = [KernelRidge(centers=80, tol=1e-6), KernelClassifier(centers=80, tol=1e-4)]
IDS = ["ridge", "classifier"]


def target(model, y):
    return y if isinstance(model, KernelRidge) else np.where(y > 0, "up", "down")


@pytest.mark.parametrize("model", MODELS, ids=IDS)
def test_a_file_is_read_in_place(model, tmp_path):
    X, y, w = table()
    stored = np.memmap(tmp_path / "rows", dtype=np.float64, mode="w+", shape=X.shape)
    stored[:] = X
    stored.flush()
    mapped = np.memmap(tmp_path / "rows", dtype=np.float64, mode="r", shape=X.shape)
    expected = model.fit(X, target(model, y), sample_weight=w).predict(X)
    np.testing.assert_array_equal(model.fit(mapped, target(model, y), sample_weight=w).predict(mapped), expected)


@pytest.mark.parametrize("model", MODELS, ids=IDS)
def test_an_iterator_of_blocks_gives_what_the_array_gives(model):
    X, y, w = table()
    t = target(model, y)

    def blocks():
        for i in range(0, 1200, 250):
            yield X[i : i + 250], t[i : i + 250], w[i : i + 250]

    whole = model.fit(X, t, sample_weight=w)
    expected = whole.decision_function(X) if hasattr(whole, "decision_function") else whole.predict(X)
    streamed = model.fit(blocks)
    got = streamed.decision_function(X) if hasattr(streamed, "decision_function") else streamed.predict(X)
    np.testing.assert_allclose(got, expected, atol=2e-3 * np.abs(expected).max())


def test_what_cannot_be_read_twice_is_refused():
    X, y, _ = table()
    with pytest.raises(BochnerError, match="a function that returns a new iterator"):
        KernelRidge().fit(iter([(X, y)]))
    with pytest.raises(BochnerError, match=r"must yield \(X, y\)"):
        KernelRidge().fit(lambda: iter([X]))
    with pytest.raises(BochnerError, match="no blocks"):
        KernelRidge().fit(lambda: iter([]))
    with pytest.raises(BochnerError, match="1200 rows of X and 5 of y"):
        KernelRidge().fit(lambda: iter([(X, y[:5])]))
    bad = X.copy()
    bad[7, 1] = np.nan
    with pytest.raises(BochnerError, match="must be finite"):
        KernelRidge().fit(lambda: iter([(bad, y)]))


def test_blocks_that_cannot_be_are_named():
    X, y, w = table(60)
    first = (X[:30], y[:30], w[:30])
    for second, words in (
        ((X[30:, :1], y[30:]), "1 columns, another 3"),
        ((X[None, 30:], y[30:]), r"a table of numbers, got float64 of shape \(1, 30, 3\)"),
        ((X[30:].astype(str), y[30:]), "a table of numbers, got <U"),
        ((X[30:], X[30:]), r"targets y must be finite numbers \('b',\).*\(30, 3\)"),
        ((X[30:], np.full(30, np.nan)), "targets y must be finite"),
        ((X[30:], None), "no"),
        ((X[30:], y[30:], -w[30:]), "weights of a block must be finite and not negative"),
        ((X[30:], y[30:], np.full(30, np.inf)), "weights of a block must be finite"),
        ((X[30:], y[30:], w[:3]), "30 rows of X and 3 of sample_weight"),
    ):
        with pytest.raises(BochnerError, match=words):
            KernelRidge().fit(lambda: iter([first, second]))  # noqa: B023
    once = iter([(X, y)])
    with pytest.raises(BochnerError, match="a new iterator every time"):
        KernelRidge().fit(lambda: once)


def test_blocks_without_rows_are_passed_over():
    X, y, _ = table(60)
    whole = KernelRidge().fit(X, y)
    blocks = [(X[:0], y[:0]), (X[:30], y[:30]), (X[:0], y[:0]), (X[30:], y[30:])]
    np.testing.assert_allclose(KernelRidge().fit(lambda: iter(blocks)).predict(X), whole.predict(X), atol=1e-9)
    with pytest.raises(BochnerError, match="got no rows"):
        KernelRidge().fit(lambda: iter(blocks[:1]))


@pytest.mark.parametrize("model", MODELS, ids=IDS)
def test_a_dask_array_gives_what_the_array_gives(model):
    da = pytest.importorskip("dask.array")
    X, y, w = table()
    t = target(model, y)
    expected = model.fit(X, t, sample_weight=w).predict(X)
    lazy = [da.from_array(part, chunks=chunks) for part, chunks in ((X, (250, 2)), (t, 333), (w, 1200))]
    predicted = model.fit(lazy[0], lazy[1], sample_weight=lazy[2]).predict(lazy[0])
    assert isinstance(predicted, da.Array)
    assert predicted.chunks[0] == lazy[0].chunks[0]
    if isinstance(model, KernelRidge):
        np.testing.assert_allclose(predicted.compute(), expected, atol=2e-3 * np.abs(expected).max())
    else:
        assert (predicted.compute() == expected).mean() > 0.995
        assert model.predict_proba(lazy[0]).compute().shape == (1200, 2)
    assert model.predict(X[:5]).shape == (5,)


def test_rows_of_a_dask_array_need_not_be_counted():
    da = pytest.importorskip("dask.array")
    X, y, _ = table()
    lazy = da.from_array(X, chunks=(250, 3))
    some = lazy[lazy[:, 0] > 0]
    model = KernelRidge(centers=50).fit(some, da.from_array(y, chunks=300)[lazy[:, 0] > 0])
    direct = KernelRidge(centers=50).fit(X[X[:, 0] > 0], y[X[:, 0] > 0])
    np.testing.assert_allclose(model.predict(X), direct.predict(X), atol=0.05)


def test_no_dask_array_is_brought_into_memory_in_silence():
    da = pytest.importorskip("dask.array")
    X, y, _ = table(200)
    lazy = da.from_array(X, chunks=(50, 3))
    models = [GaussianProcessRegressor(), NadarayaWatson(), KernelDensity(), KernelPCA(), RandomFeatures(16)]
    for model in models:
        with pytest.raises(BochnerError, match=r"call \.compute\(\)"):
            model.fit(lazy, y)
    with pytest.raises(BochnerError, match=r"call \.compute\(\)"):
        KernelRidge().fit(X, da.from_array(y))
    with pytest.raises(BochnerError, match="would hold all 200 rows"):
        KernelRidge(centers="all").fit(lazy, y)
    for model, name in zip(models, ("predict", "predict", "score_samples", "transform", "transform"), strict=True):
        method = getattr(model.fit(X, y), name)
        out = method(lazy)
        assert isinstance(out, da.Array)
        np.testing.assert_allclose(out.compute(), method(X), rtol=1e-6, atol=1e-6)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_killed_worker_loses_nothing():
    """One of two workers dies in the middle of a fit; the answer is that of an undisturbed one."""
    distributed = pytest.importorskip("distributed")
    da = pytest.importorskip("dask.array")
    import os
    import signal
    import threading

    X, y, _ = table(40_000)
    model = KernelRidge(alpha=1e-4, centers=400, tol=1e-6)
    cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    with cluster, distributed.Client(cluster) as client:
        lazy, targets = da.from_array(X, chunks=(4000, 3)), da.from_array(y, chunks=4000)
        victim = next(iter(client.run(os.getpid).values()))
        killer = threading.Timer(2.0, os.kill, (victim, signal.SIGKILL))
        killer.start()
        disturbed = model.fit(lazy, targets).predict(X[:100])
        killer.join()
        assert victim not in client.run(os.getpid).values()
        calm = model.fit(lazy, targets).predict(X[:100])
    np.testing.assert_allclose(disturbed, calm, atol=1e-6)


def test_blocks_of_several_threads_do_not_meet():
    from concurrent.futures import ThreadPoolExecutor

    import torch

    from bochner.estimators.nystrom import CrossKernel

    rng = np.random.default_rng(0)
    cross = CrossKernel("gaussian", 1.0, torch.from_numpy(rng.normal(size=(300, 4))), "float64")
    blocks = [rng.normal(size=(400, 4)) for _ in range(64)]
    v = torch.ones(1, 300, dtype=torch.float64)
    alone = [cross.predict(block, v) for block in blocks]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            together = list(pool.map(lambda block: cross.predict(block, v), blocks))
            assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))
