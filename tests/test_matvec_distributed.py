"""Queries in blocks: streams larger than memory, and Dask with workers that die."""

import contextlib
import os
import signal
import sys
import time

import numpy as np
import pytest
import torch

from bochner._checks import BochnerError
from bochner.matvec import KernelOperator, dask_compute, dask_product, stream_product

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def keys():
    rng = np.random.default_rng(0)
    return (5 * rng.normal(size=(40, 6))[rng.integers(40, size=1500)] + rng.normal(size=(1500, 6))).astype(np.float32)


@pytest.fixture(scope="module")
def operator(keys):
    return KernelOperator(keys, bandwidth=1.0, eps=0.05, method="cells")


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(1).normal(size=1500).astype(np.float32)


def test_a_stream_from_a_memory_map_equals_the_whole_within_eps(tmp_path, keys, operator, x):
    stored = np.lib.format.open_memmap(tmp_path / "queries.npy", mode="w+", dtype=np.float32, shape=keys.shape)
    stored[:] = keys[::-1]
    out = np.lib.format.open_memmap(tmp_path / "y.npy", mode="w+", dtype=np.float32, shape=(1500,))
    seen = []
    stream_product(operator, stored, x, rows=400, out=out, progress=lambda done, total: seen.append((done, total)))
    truth = KernelOperator(keys.astype(float), bandwidth=1.0, method="exact") @ x.astype(float)
    assert np.linalg.norm(out[::-1] - truth) <= 0.1 * np.linalg.norm(x)
    assert seen == [(400, 1500), (800, 1500), (1200, 1500), (1500, 1500)]
    with pytest.raises(BochnerError, match=r"shape \(n, 6\)"):
        stream_product(operator, keys[:, :3], x)


def test_an_interrupted_stream_goes_on_where_it_stopped(keys, operator, x):
    def stop(done, total):
        if done == 800:
            raise KeyboardInterrupt

    whole = stream_product(operator, keys, x, rows=400)
    out = np.full(1500, np.nan, np.float32)
    with pytest.raises(KeyboardInterrupt):
        stream_product(operator, keys, x, rows=400, out=out, progress=stop)
    assert np.isnan(out[800:]).all()
    np.testing.assert_array_equal(stream_product(operator, keys, x, rows=400, out=out, done=800), whole)
    for wrong in ({"done": 300, "out": out}, {"done": 400}, {"done": 1600, "out": out}):
        with pytest.raises(BochnerError, match="'done'"):
            stream_product(operator, keys, x, rows=400, **wrong)


def test_progress_is_shown_in_the_terminal_only_when_asked_for(keys, operator, x, capsys, monkeypatch):
    quiet = stream_product(operator, keys, x, rows=400)
    exact = KernelOperator(keys, bandwidth=1.0, method="exact")
    exact @ x
    assert capsys.readouterr().err == ""
    np.testing.assert_array_equal(stream_product(operator, keys, x, rows=400, progress=True), quiet)
    assert "100%" in capsys.readouterr().err
    exact.progress = True
    exact @ x
    assert "exact product" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    exact @ x
    assert capsys.readouterr().err.splitlines()[-1] == "exact product: 100 %"


def test_a_stream_from_zarr(tmp_path, keys, operator, x):
    zarr = pytest.importorskip("zarr")
    stored = zarr.open(str(tmp_path / "queries.zarr"), mode="w", shape=keys.shape, chunks=(300, 6), dtype="f4")
    stored[:] = keys
    table = np.stack([x, -2 * x], 1)
    got = stream_product(operator, stored, table, rows=500)
    np.testing.assert_array_equal(got, stream_product(operator, keys, table, rows=500))
    np.testing.assert_allclose(got[:, 1], -2 * got[:, 0], atol=1e-4)


def test_dask_gives_the_same_with_any_scheduler(keys, operator, x):
    da = pytest.importorskip("dask.array")
    queries = da.from_array(keys, chunks=(400, 3))
    lazy = dask_product(operator, queries, x)
    assert lazy.chunks == ((400, 400, 400, 300),)
    expected = stream_product(operator, keys, x, rows=400)
    np.testing.assert_array_equal(lazy.compute(scheduler="synchronous"), expected)
    np.testing.assert_array_equal(lazy.compute(scheduler="threads", num_workers=2), expected)
    np.testing.assert_array_equal(dask_compute(lazy), expected)
    with pytest.raises(BochnerError, match="dask array"):
        dask_product(operator, keys, x)
    with pytest.raises(BochnerError, match="shape"):
        dask_product(operator, queries, x[:3])


@pytest.mark.distributed
@pytest.mark.slow
def test_a_killed_worker_loses_nothing(keys, operator, x, tmp_path):
    distributed = pytest.importorskip("distributed")
    da = pytest.importorskip("dask.array")
    gate = tmp_path / "killed"

    def held(block, block_info=None):
        """The later blocks are not there before a worker has been killed, however slow the machine."""
        while block_info[0]["chunk-location"][0] >= 20 and not gate.exists():
            time.sleep(0.02)
        return block

    queries = da.from_array(np.tile(keys, (14, 1)), chunks=(500, 6)).map_blocks(held, dtype=keys.dtype)
    expected = stream_product(operator, np.tile(keys, (14, 1)), x, rows=500)
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        client.wait_for_workers(2, timeout=120)  # one alone would take the operator with it
        lazy = dask_product(operator, queries, x, client=client)
        pids = list(client.run(os.getpid).values())
        futures = client.compute(lazy)
        deadline = time.monotonic() + 60
        while not any(len(v) > 2 for v in client.has_what().values()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not futures.done()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGKILL)
        gate.touch()
        np.testing.assert_array_equal(futures.result(timeout=400), expected)


@pytest.mark.distributed
def test_a_cluster_shows_its_progress_in_the_terminal(keys, operator, x, capsys):
    distributed = pytest.importorskip("distributed")
    da = pytest.importorskip("dask.array")
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    with distributed.Client(**options, silence_logs=50) as client:
        lazy = dask_product(operator, da.from_array(keys, chunks=(400, 6)), x, client=client)
        got = dask_compute(lazy, client=client)
    np.testing.assert_array_equal(got, stream_product(operator, keys, x, rows=400))
    assert "100%" in capsys.readouterr().err
