"""Attention as a Gaussian kernel: softmax attention by kernel products, and whether its kernel is sparse.

Sparsity is assumption A of the kernel product paper, measured by head-to-tail ratios.

A set of n queries and keys becomes the kernel matrix K of lemma 4.1 (corrected). Its head is the n largest entries,
its tail the rest; the assumption is that sum(tail) / sum(head) is bounded, whatever n. The paper reports at most 4.6
for BERT, 5.15 for GPT and 5.39 for RoBERTa, constant in the length of the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._checks import BochnerError, extra, positive_int
from ..matvec import KernelOperator

CLAIMS = {"BERT": 4.6, "GPT": 5.15, "RoBERTa": 5.39}


def reduce_attention(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with one more column, so that `exp(q.k scale)` is a Gaussian kernel up to row factors.

    k' = (k, sqrt(max|k|^2 - |k|^2)), q' = (q, 0): then |q' - k'|^2 = |q|^2 + max|k|^2 - 2 q.k, and

        exp(q.k scale) = exp(|q|^2 scale/2) exp(max|k|^2 scale/2) exp(-|q' - k'|^2 scale/2)

    (lemma 4.1; the paper's exponents lack the factor scale/2). The bandwidth is scale^(-1/2), d^(1/4) by default.
    Input (..., n, d), output (..., n, d+1); the maximum is over the last n keys.

    Example:
        >>> import torch
        >>> q, k = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> a, b = reduce_attention(q, k)
        >>> K = torch.exp(-torch.cdist(a, b).square() / 4)
        >>> A = torch.exp(q @ k.T / 2)
        >>> torch.allclose(K / K.sum(1, keepdim=True), A / A.sum(1, keepdim=True))
        True
    """
    if q.ndim < 2 or k.ndim < 2 or q.shape[-1] != k.shape[-1]:
        raise BochnerError(
            f"The 'q' and 'k' of reduce_attention must be (..., n, d) with one d, got {tuple(q.shape)} and "
            f"{tuple(k.shape)}."
        )
    squared = k.square().sum(-1, keepdim=True)
    extra = (squared.amax(-2, keepdim=True) - squared).clamp_min(0.0).sqrt()
    return torch.cat([q, torch.zeros_like(q[..., :1])], -1), torch.cat([k, extra], -1)


def kernel_of_attention(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """The Gaussian kernel matrix of lemma 4.1, (..., n, s), in float64."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    a, b = reduce_attention(q.double(), k.double())
    return torch.exp(-0.5 * scale * torch.cdist(a, b).square())


def head_to_tail(kernel: Tensor) -> Tensor:
    """sum of all but the n largest entries / sum of the n largest, for (..., n, s) kernels: shape (...)."""
    flat = kernel.flatten(-2)
    head = flat.topk(min(kernel.shape[-2], flat.shape[-1]), -1, sorted=False).values.sum(-1)
    return (flat.sum(-1) - head) / head


def neighbour_ratios(kernel: Tensor) -> tuple[Tensor, Tensor]:
    """The n-th largest entry over the (n+1)-th and over the 2n-th: (...) twice (experiment ii)."""
    n = kernel.shape[-2]
    flat = kernel.flatten(-2)
    top = flat.topk(min(2 * n, flat.shape[-1]), -1).values
    return top[..., n - 1] / top[..., min(n, top.shape[-1] - 1)], top[..., n - 1] / top[..., -1]


@dataclass(frozen=True)
class Sparsity:
    """Measured ratios: per layer and head over all texts, and their growth with the length."""

    max_ratio: np.ndarray  # (layers, heads): experiment (i), the largest over texts and prefixes
    median_next: np.ndarray  # (layers, heads): n-th over (n+1)-th largest entry, median over texts
    median_double: np.ndarray  # (layers, heads): n-th over 2n-th largest entry, median over texts
    lengths: np.ndarray  # prefix lengths
    mean_by_length: np.ndarray  # A.1.3: the largest ratio over layers and heads, mean over texts
    std_by_length: np.ndarray
    texts: int

    @property
    def growth(self) -> float:
        """Exponent of the mean ratio in the length (0: constant, as the paper claims; 1: no sparsity at all)."""
        if len(self.lengths) < 2:
            return 0.0
        return float(np.polyfit(np.log(self.lengths), np.log(np.maximum(self.mean_by_length, 1e-12)), 1)[0])

    def __str__(self) -> str:
        claim = ", ".join(f"{name} {value}" for name, value in CLAIMS.items())
        return (
            f"{self.texts} texts, {self.max_ratio.shape[0]} layers, {self.max_ratio.shape[1]} heads.\n"
            f"Tail/head: largest {self.max_ratio.max():.3g}, median over heads {np.median(self.max_ratio):.3g} "
            f"(the paper's largest: {claim}).\n"
            f"By length {self.lengths[0]}..{self.lengths[-1]}: {self.mean_by_length[0]:.3g} to "
            f"{self.mean_by_length[-1]:.3g}, growing like n^{self.growth:.2f} (the paper: constant).\n"
            f"n-th over (n+1)-th largest entry: median {np.median(self.median_next):.3g} (the paper: about 1); over "
            f"2n-th: median {np.median(self.median_double):.3g} (the paper: about 20 or less)."
        )


def queries_and_keys(model: Any, **inputs: Any) -> list[tuple[Tensor, Tensor]]:
    """The queries and keys of every attention layer as they are multiplied (after rotations): [(b, h, n, d)] * 2.

    `model`: any transformers model whose attention is selectable; its implementation is put back afterwards.
    """
    extra("transformers", "hf", "Reading a model's queries and keys")
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    captured: list[tuple[Tensor, Tensor]] = []

    def capture(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **rest: Any) -> Any:
        repeat = query.shape[1] // key.shape[1]
        captured.append((query.detach(), key.detach().repeat_interleave(repeat, 1)))
        return sdpa_attention_forward(module, query, key, value, mask, **rest)

    before = model.config._attn_implementation
    AttentionInterface.register("sdpa_and_capture", capture)
    try:
        model.set_attn_implementation("sdpa_and_capture")
        with torch.no_grad():
            model(**inputs)
    finally:
        model.set_attn_implementation(before)
    if not captured:
        raise BochnerError(f"No attention layer of {type(model).__name__} could be read.")
    return captured


def sparsity(
    model_or_qk: Any,
    texts: Sequence[str] | None = None,
    *,
    tokenizer: Any = None,
    min_length: int = 50,
    stride: int = 50,
    max_length: int = 512,
) -> Sparsity:
    """Measure assumption A: experiments (i), (ii) and A.1.3 of the paper.

    Args:
        model_or_qk: a transformers model with `texts` and `tokenizer`, or a list of (q, k) pairs, one per text,
            each of shape (layers, heads, n, d) or (heads, n, d).
        min_length, stride: prefixes of min_length, min_length + stride, ... and the whole text are measured (the
            paper takes every prefix from 50 on for experiment (i), steps of 50 for A.1.3).
        max_length: longer texts are cut.
    """
    positive_int(min_length, "min_length", "sparsity")
    positive_int(stride, "stride", "sparsity")
    largest: list[Tensor] = []
    by_length: dict[int, list[float]] = {}
    following: list[Tensor] = []
    double: list[Tensor] = []
    for q, k in _pairs(model_or_qk, texts, tokenizer, max_length):
        n = q.shape[-2]
        if n < min_length:
            continue
        lengths = sorted({*range(min_length, n + 1, stride), n})
        per_prefix = []
        for i in lengths:
            layers = zip(q[..., :i, :], k[..., :i, :], strict=True)
            ratio = torch.stack([head_to_tail(kernel_of_attention(a, b)) for a, b in layers])
            per_prefix.append(ratio)
            if (i - min_length) % stride == 0:
                by_length.setdefault(i, []).append(float(ratio.max()))
        largest.append(torch.stack(per_prefix).amax(0))
        ratios = [neighbour_ratios(kernel_of_attention(a, b)) for a, b in zip(q, k, strict=True)]
        following.append(torch.stack([r[0] for r in ratios]))
        double.append(torch.stack([r[1] for r in ratios]))
    if not largest:
        raise BochnerError(f"No text of 'sparsity' has at least min_length={min_length} tokens.")
    lengths = sorted(by_length)
    return Sparsity(
        torch.stack(largest).amax(0).numpy(),
        torch.stack(following).median(0).values.numpy(),
        torch.stack(double).median(0).values.numpy(),
        np.array(lengths),
        np.array([np.mean(by_length[i]) for i in lengths]),
        np.array([np.std(by_length[i]) for i in lengths]),
        len(largest),
    )


def _pairs(
    source: Any, texts: Sequence[str] | None, tokenizer: Any, max_length: int
) -> Iterable[tuple[Tensor, Tensor]]:
    """(layers, heads, n, d) queries and keys of each text."""
    if texts is None:
        if isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], Tensor):
            source = [source]
        if not isinstance(source, (list, tuple)):
            raise BochnerError(
                "Give sparsity a transformers model with 'texts' and 'tokenizer', or a list of (q, k) tensors, got "
                f"{type(source).__name__} without texts."
            )
        for q, k in source:
            if q.ndim not in (3, 4) or q.shape != k.shape:
                raise BochnerError(
                    "The (q, k) of sparsity must both be (layers, heads, n, d) or (heads, n, d), got "
                    f"{tuple(q.shape)} and {tuple(k.shape)}."
                )
            q, k = (q[None], k[None]) if q.ndim == 3 else (q, k)
            yield q[..., :max_length, :], k[..., :max_length, :]
        return
    if tokenizer is None:
        raise BochnerError("The 'tokenizer' of sparsity is needed to read texts.")
    limit = min(max_length, int(getattr(source.config, "max_position_embeddings", max_length) or max_length))
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=limit)
        layers = queries_and_keys(source, **inputs)
        yield torch.cat([q for q, _ in layers]), torch.cat([k for _, k in layers])


def _quotient(K: KernelOperator, values: Tensor, exact_below: float) -> tuple[Tensor, Tensor]:
    """(K V) / (K 1) in float64 and the rows done exactly because their denominator is small."""
    queries, keys = K.queries.double(), K.keys.double()
    table = torch.cat([torch.ones(len(values), 1, dtype=torch.float64), values.double()], 1)
    product = (K @ table).double()
    denominator = product[:, :1]
    out = product[:, 1:] / denominator.clamp_min(1e-300)
    small = (denominator[:, 0] < exact_below).nonzero()[:, 0]
    for rows in small.split(max(1, (1 << 22) // max(1, len(keys)))):
        distance = torch.cdist(queries[rows], keys, compute_mode="donot_use_mm_for_euclid_dist")
        out[rows] = torch.softmax(-0.5 / float(K.bandwidth) ** 2 * distance.square(), 1) @ values.double()
    return out, small


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, eps: float = 0.01, exact_below: float = 1.0, method: str = "auto", seed: int = 0
) -> Tensor:
    """Softmax attention `D^-1 A V`, A = exp(Q K' / sqrt d), for one head by kernel products: q (n, d), k, v (s, .).

    The reduction (`reduce_attention`) makes A a Gaussian kernel up to a factor per row, which cancels in the
    quotient. Rows with kernel mass below `exact_below` are computed exactly: their relative error would be
    eps / mass. With sharp attention that is every row, and this is exact attention; it pays when tokens attend
    to many keys near them.
    """
    if v.ndim != 2 or v.shape[0] != k.shape[0]:
        raise BochnerError(f"The 'v' of attention must have shape ({k.shape[0]}, v), got {tuple(v.shape)}.")
    q_reduced, k_reduced = reduce_attention(q, k)
    K = KernelOperator(q_reduced, k_reduced, bandwidth=q.shape[1] ** 0.25, eps=eps, method=method, seed=seed)
    return _quotient(K, v, exact_below)[0].to(v.dtype)
