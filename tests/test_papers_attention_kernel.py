"""Attention as a kernel: by kernel products, and how sparse it is."""

import subprocess
import sys

import pytest
import torch

from bochner.papers.attention_kernel import (
    attention,
    head_to_tail,
    reduce_attention,
)

torch.set_num_threads(1)


def test_importing_bochner_imports_no_extra():
    code = (
        "import sys, bochner.matvec as m; print([e for e in ('dask', 'sklearn', 'transformers') if e in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_reduction_turns_attention_into_a_gaussian_kernel():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 30, 8, generator=generator, dtype=torch.float64)
    x = torch.randn(30, generator=generator, dtype=torch.float64)
    root = 8**0.5
    left = torch.exp(q @ k.T / root) @ x
    factor = torch.exp(q.square().sum(1) / (2 * root)) * torch.exp(k.square().sum(1).max() / (2 * root))
    a, b = reduce_attention(q, k)
    torch.testing.assert_close(left, factor * (torch.exp(-torch.cdist(a, b).square() / (2 * root)) @ x))
    torch.testing.assert_close(b.square().sum(1), k.square().sum(1).max().expand(30))
    assert not a[:, -1].any()


@pytest.mark.parametrize("scale", [0.3, 1.0, 6.0])
def test_attention_by_kernel_products_is_softmax_attention(scale):
    generator = torch.Generator().manual_seed(1)
    q, k = scale * torch.randn(2, 700, 16, generator=generator, dtype=torch.float64)
    v = torch.randn(700, 5, generator=generator, dtype=torch.float64)
    truth = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
    got = attention(q, k, v, eps=0.01, method="cells")
    assert float((got - truth).norm() / truth.norm()) <= 0.05


def test_head_to_tail_ratios_of_known_matrices():
    assert float(head_to_tail(torch.eye(10))) == 0.0
    assert float(head_to_tail(torch.ones(10, 10))) == 9.0
