"""Appendix A.6 of *Rethinking Attention with Performers*: Linformer with random, redrawn projections.

`softmax(q (E k)') F v` with `E = delta R`, `F = exp(-delta) R` and R normal with variance 1/k, which is what A.6 takes
over from Wang et al. (2020), at its delta of 1e-6 and at 1. Beside it stand the same form with E = F learned on other
texts, positive features of the same number, the mean of the values, and an answer of zero. On the heads of
all-MiniLM-L6. No causal version exists.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

import torch
from _framework import Said, Store, experiment, graded, named
from _models import Attention, Sequences, average, layers_of, mean_error, of_books
from _pictures import figure, log_ticks, save
from torch import Tensor

from bochner import exact_attention, feature_map, linear_attention
from bochner.demo import load_minilm

TOKENS, RANKS = 128, (16, 32, 75, 128)
DELTAS = {"random, delta = 1e-6": 1e-6, "random, delta = 1": 1.0}


def projected(E: Tensor, F: Tensor) -> Attention:
    return lambda q, k, v: exact_attention(q, E @ k, F @ v, scale=1.0)


def random(rank: int, delta: float, seed: int) -> Attention:
    R = torch.randn(rank, TOKENS, generator=torch.Generator().manual_seed(seed)) * rank**-0.5
    return projected(delta * R, torch.exp(torch.tensor(-delta)) * R)


def learned(rank: int, seen: Sequences, steps: int) -> Attention:
    """E = F of one layer, by Adam on the error of the output; it starts as a mean of neighbouring positions."""
    E = torch.nn.functional.interpolate(torch.eye(rank)[None], TOKENS, mode="linear")[0]
    E = (E / E.sum(-1, keepdim=True)).requires_grad_()
    texts = [tuple(t[None].float() for t in s) for s in seen]
    truths = [exact_attention(*t, scale=1.0) for t in texts]
    optimizer = torch.optim.Adam([E], lr=3e-3)
    for step in range(steps):
        text, truth = texts[step % len(texts)], truths[step % len(texts)]
        loss = (projected(E, E)(*text) - truth).square().sum() / truth.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return projected(E.detach(), E.detach())


def positive(rank: int, heads: Tensor, seed: int) -> Attention:
    phi = feature_map("positive", dim=heads.shape[-1], num_features=rank, num_heads=heads.shape[0], seed=seed)
    return lambda q, k, v: linear_attention(q, k, v, phi, scale=1.0, diagnostics=False)


def largest(attention: Attention, layers: list[Sequences]) -> float:
    """The largest entry of the error, over all layers and texts."""
    found = 0.0
    for sequences in layers:
        for q, k, v in ((t[None].float() for t in s) for s in sequences):
            found = max(found, float((attention(q, k, v) - exact_attention(q, k, v, scale=1.0)).abs().max()))
    return found


@experiment(
    claim="Linformer with random, redrawn projections approximates the output of exact attention within 0.02.",
    items=("003 Section A.6",),
    paper="rank 600 for sequences of 1,024 and more, models trained from scratch, delta = 1e-6",
    ours="72 heads of all-MiniLM-L6 at 128 tokens, ranks 16 to 128, 4 draws, 8 held-out texts",
    quick={"ranks": (75,), "draws": 1, "texts": (4, 2), "steps": 30},
    needs=("transformers",),
)
def measure(
    store: Store,
    ranks: tuple[int, ...] = RANKS,
    draws: int = 4,
    texts: tuple[int, int] = (16, 8),
    steps: int = 150,
) -> None:
    model, *inputs = of_books(load_minilm, 200, TOKENS, texts)()
    seen, unseen = (layers_of(model, some) for some in inputs)
    zero: Attention = lambda q, k, v: torch.zeros_like(v)  # noqa: E731
    with torch.no_grad():
        store.figures |= {
            "mean of the values": mean_error(repeat(average()), unseen),
            "zero": mean_error(repeat(zero), unseen),
            "largest entry, zero": largest(zero, unseen),
            "tokens": [len(s[1][0]) for s in unseen[0]],
        }

    def over_draws(make: Any) -> float:
        return sum(mean_error(make(seed), unseen) for seed in range(draws)) / draws

    for rank in ranks:
        for name, delta in DELTAS.items():
            make = lambda seed, r=rank, d=delta: repeat(random(r, d, seed))  # noqa: E731
            store.cell(str(rank), lambda m=make: over_draws(m), store.table(name))
            top = lambda r=rank, d=delta: largest(random(r, d, 0), unseen)  # noqa: E731
            store.cell(str(rank), lambda t=top: float(t()), store.table(f"largest entry, {name}"))
        fitted = lambda r=rank: [learned(r, s, steps) for s in seen]  # noqa: E731
        store.cell(str(rank), lambda f=fitted: mean_error(f(), unseen), store.table("learned"))
        maps = lambda seed, r=rank: [positive(r, s[0][1], seed) for s in unseen]  # noqa: E731
        store.cell(str(rank), lambda m=maps: over_draws(m), store.table("positive features"))


def judge(found: Any) -> Said:
    rank, key = "75", "largest entry, "
    entries = {n: found[key + n][rank] for n in DELTAS}
    errors = {n: found[n][rank] for n in (*DELTAS, "learned", "positive features")}
    errors |= {n: found[n] for n in ("mean of the values", "zero")}
    within = min(entries.values()) <= 0.02
    return Said(
        f"Relative error of the output at rank {rank}: {named(errors, '.2f')}; largest error of an entry: "
        + named(entries | {"zero": found[key + "zero"]}, ".2f"),
        graded(within and min(errors[n] for n in DELTAS) < errors["mean of the values"]),
        "random projections are worse than the mean of the values. With delta = 1e-6 the logits are all alike and "
        "the output is near zero, which is within 0.02 only where the exact output is",
    )


def draw(found: Any) -> None:
    fig, ax = figure(figsize=(6.4, 3.6))
    ranks = [int(r) for r in found["learned"]]
    for name in (*DELTAS, "learned", "positive features"):
        ax.plot(ranks, list(found[name].values()), "o-", ms=4, label=name)
    ax.axhline(found["mean of the values"], color="0.5", linestyle="--", linewidth=1, label="mean of the values")
    log_ticks(ax, ranks, base=2)
    ax.set(yscale="log", xlabel="rank, or features", ylabel="relative error of attention output")
    ax.legend(frameon=False, fontsize=8)
    save(fig, "linformer_random")
