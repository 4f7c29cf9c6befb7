"""Softmax attention to a stated error: blocks of keys that provably do not matter are skipped.

    python examples/certified_attention.py [KEYS]

It pays for keys in tight clusters, as here, and not on the heads of pretrained transformers.
"""

import sys

import torch

import bochner


def main(keys: int = 4096) -> float:
    generator = torch.Generator().manual_seed(0)
    centres = 12 * torch.randn(64, 8, generator=generator)
    k = centres.repeat(keys // 64, 1) + 0.05 * torch.randn(keys // 64 * 64, 8, generator=generator)
    v = torch.randn(len(k), 16, generator=generator)
    exact = torch.nn.functional.scaled_dot_product_attention(k[None], k[None], v[None])[0]
    for error in (0.1, 0.001):
        out, bound, visited = bochner.certified_attention(k, k, v, error=error)
        true = (out - exact).norm(dim=-1)
        print(f"error {error}: {visited:.0%} of the pairs")
        print(f"  true error {float(true.max()):.1e}, stated {float(bound.max()):.1e}")
        assert bool((true <= bound + 1e-5).all())
    return visited


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
