"""What `sequence_parallel_cost` predicts, against measured runs: attention over two processes of this machine.

One thread a process, gloo; the bandwidth and latency of the network are measured by reductions of two sizes, the
device's time by one shard of at most 4,096 tokens in a group of one process, by `shard_seconds`. Call it
on an idle machine.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _framework import Said, Store, experiment
from _pictures import figure, log_ticks, save

from bochner import feature_map

PROCESSES = 2
SHAPE: dict[str, Any] = {"heads": 4, "dim": 64, "num_features": 128}


def worker(rank: int, folder: str, lengths: list[int]) -> None:
    from bochner.attention.parallel import sequence_parallel_attention

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    found: dict[str, Any] = {
        "network": [(4 * n, timed(lambda n=n: dist.all_reduce(torch.ones(n)))) for n in (256, 1 << 22)]
    }
    phi = feature_map("positive", dim=SHAPE["dim"], num_features=SHAPE["num_features"], seed=0)
    for causal in (False, True):
        for n in lengths:
            g = torch.Generator().manual_seed(rank)
            shape = (1, SHAPE["heads"], n // PROCESSES, SHAPE["dim"])
            q, k, v = (torch.randn(shape, generator=g) for _ in range(3))
            with torch.no_grad():
                seconds = timed(lambda c=causal, t=(q, k, v): sequence_parallel_attention(*t, phi, is_causal=c))
            found[f"{'causal' if causal else 'bidirectional'}/{n}"] = seconds
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def timed(call: Any, repeats: int = 4) -> float:
    """The best of some, all processes beginning together."""
    best = float("inf")
    for _ in range(repeats):
        dist.barrier()
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


@experiment(
    claim="Ours: the predicted time of attention over a split sequence is within a factor of 1.5 of the measured one.",
    ours="two processes, 4,096 to 32,768 tokens, 4 heads of 64, 128 features",
    quick={"lengths": (2048, 4096), "limit": 5.0},  # no measurement: others may use the machine
    sources=("bochner.attention", "bochner.report.parallel"),
)
def measure(store: Store, lengths: tuple[int, ...] = (4096, 8192, 16384, 32768), limit: float = 1.5) -> None:
    from bochner.report.parallel import AttentionShape, Network, sequence_parallel_cost, shard_seconds

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (folder, list(lengths)), nprocs=PROCESSES)
        ranks = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(PROCESSES)]
    (small, latency), (large, seconds) = ranks[0]["network"]
    network = {"latency": latency, "bandwidth": (large - small) / max(seconds - latency, 1e-9)}
    rows = []
    for kind in ("bidirectional", "causal"):
        for n in lengths:
            causal = kind == "causal"
            layer = AttentionShape(is_causal=causal, element_size=4, **SHAPE)
            per_token = shard_seconds(layer, n // PROCESSES)
            cost = sequence_parallel_cost(n, PROCESSES, layer, Network(**network), seconds_per_token=per_token)
            measured = max(rank[f"{kind}/{n}"] for rank in ranks)
            rows.append({"kind": kind, "length": n, "predicted": cost.seconds, "measured": measured, "sent": cost.sent})
            print(rows[-1], flush=True)
    store.figures |= {"rows": rows, "network": network, "shape": SHAPE, "limit": limit}


def judge(found: Any) -> Said:
    rows, limit = found["rows"], found.get("limit", 1.5)
    ratios = [r["measured"] / r["predicted"] for r in rows]
    holds = all(1 / limit < r < limit for r in ratios)
    return Said(
        f"measured over predicted: {min(ratios):.2f} to {max(ratios):.2f} in {len(rows)} cases, two processes, "
        f"{rows[0]['length']:,} to {rows[-1]['length']:,} tokens.",
        "holds" if holds else "fails",
        "" if holds else "the two processes share caches and memory, which one shard alone does not",
    )


def draw(found: Any) -> None:
    fig, ax = figure()
    for kind in ("bidirectional", "causal"):
        mine = [r for r in found["rows"] if r["kind"] == kind]
        lengths = [r["length"] for r in mine]
        (line,) = ax.plot(lengths, [1e3 * r["measured"] for r in mine], "o-")
        ax.plot(lengths, [1e3 * r["predicted"] for r in mine], ":", color=line.get_color())
        ax.text(lengths[-1], 1e3 * mine[-1]["measured"], f" {kind}", color=line.get_color(), fontsize=8)
    ax.set(xlabel="tokens", ylabel="milliseconds (dotted: predicted)")
    times = [1e3 * r[k] for r in found["rows"] for k in ("measured", "predicted")]
    log_ticks(ax, [n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if min(times) <= n <= 1.1 * max(times)], "y")
    log_ticks(ax, lengths)
    ax.set_xlim(None, 2.5 * lengths[-1])
    save(fig, "parallel_plan")
