"""One sequence over two processes: each holds half of the tokens, and only states cross the wire.

python examples/two_processes.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import bochner
from bochner.attention.parallel import sequence_parallel_attention

TOKENS, RANKS = 1000, 2


def inputs() -> torch.Tensor:
    return 0.5 * torch.randn(3, 1, 2, TOKENS, 16, generator=torch.Generator().manual_seed(0))


def work(rank: int, store: str, results) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    phi = bochner.feature_map("positive", dim=16, num_features=64, seed=0)  # the same on every rank
    q, k, v = (t.chunk(RANKS, dim=-2)[rank] for t in inputs())
    out = sequence_parallel_attention(q, k, v, phi, is_causal=True)
    results[rank] = out.numpy()
    dist.destroy_process_group()


def main() -> float:
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(work, (f"{folder}/store", results), nprocs=RANKS)
        parts = [torch.from_numpy(results[rank]) for rank in range(RANKS)]
    phi = bochner.feature_map("positive", dim=16, num_features=64, seed=0)
    whole = bochner.linear_attention(*inputs(), phi, is_causal=True)
    difference = float((torch.cat(parts, dim=-2) - whole).abs().max())
    print(f"{RANKS} processes and one differ by {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
