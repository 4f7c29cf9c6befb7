"""Recall of pairs: accuracy against the number of features for every kind of map, beside what theory predicts.

One layer with two heads reads n pairs of a key and one of four values, then answers for every key that is asked for.
Exact attention does it without error and a model without attention not at all, so that all that lies between is the
kernel's. Two predictions stand beside the measurement. The one by rank is for the best features of that number;
the one by variance is for random features that the model has not adapted to its draw.

Runs are ordered by what they tell: all maps with 8 features, then other numbers of features, then other numbers
of pairs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from _framework import Said, Store, experiment
from _pictures import COLOURS, GREY, figure, log_ticks, name_lines, save
from _training import gate, trained
from torch import Tensor, nn

from bochner import BochnerError, feature_map, linear_attention, tasks, theory
from bochner.tasks import recall as data
from bochner.tasks.base import IGNORE, PAD, SPECIAL

PAIRS, VALUES, HEADS, SIZE = 16, data.VALUES, 2, 16
FEATURES = (2, 4, 8, 16, 32)
SEEDS, STEPS, BATCH, RATE, WARMUP = 3, 300, 32, 5e-3, 50


class Run(NamedTuple):
    """What a line of the figure is: an attention, the options of its map, steps between redraws, a decay per head."""

    attention: str
    options: Mapping[str, Any] = MappingProxyType({})
    redraw: int = 0
    decay: str = ""  # "none", "fixed" or "computed" where attention is causal


FIXED = ("positive", "hyperbolic", "angular_hybrid", "relu", "elu", "linear_elu", "sum_poly", "moments")
LEARNED = ("gmm_prf", "fastfood_prf", "generative_prf", "hedgehog")
SIGNED = ("trig", "gmm_rks", "fastfood_rks", "generative_rks")
REPLACED = ("linformer", "performer_pytorch")
LINES: dict[str, Run] = {
    **{name: Run(name) for name in (*FIXED, *LEARNED, *SIGNED, "window+positive", *REPLACED)},
    "positive, redrawn": Run("positive", redraw=25),
    "gmm_prf, paper": Run("gmm_prf", {"g": 1.0, "shared_noise": True}, 100),
    "fastfood_prf, paper": Run("fastfood_prf", {"g": 1.0}, 100),
    "generative_prf, paper": Run("generative_prf", {"g": 1.0, "residual": False}, 100),
}
CAUSAL = {
    "relu, causal": Run("relu", decay="none"),
    "relu, causal, fixed decay": Run("relu", decay="fixed"),
    "relu, causal, computed decay": Run("relu", decay="computed"),
}
OF_TRANSFORMERS = ("nystromformer", "fnet", "longformer")  # models of their own, by the trainer
LEVELS = ("exact", "identity", *OF_TRANSFORMERS)  # have no features
OTHER_PAIRS, OF_PAIRS = (4, 8, 32, 64), ("exact", "identity", "positive", "relu", "hedgehog", "gmm_prf")
FIRST = ("exact", "identity", "positive", "relu", "hyperbolic", "trig", "gmm_prf", "hedgehog", "linformer")


def wanted() -> list[str]:
    """Every cell as line/features/pairs, the most telling first; lines without features have 0 of them."""
    names = ["exact", "identity", *LINES]
    first, rest = ([n for n in names if (n in FIRST) == early] for early in (True, False))
    cells: list[tuple[str, int, int]] = []
    for some, ms in (
        (first, (8,)),
        (first[2:], (4, 16)),
        (rest, (8,)),
        (CAUSAL, (8,)),
        (rest, (4, 16)),
        (LINES, (2, 32)),
    ):
        cells += [(n, 0 if n in LEVELS else m, PAIRS) for n in some for m in ms]
    cells += [(n, 0 if n in LEVELS else 8, p) for p in OTHER_PAIRS for n in OF_PAIRS]
    cells += [(n, 0, PAIRS) for n in OF_TRANSFORMERS]
    return list(dict.fromkeys("/".join(map(str, cell)) for cell in cells))


class Reader(nn.Module):
    """Pre-norm transformer layers, one for each seed, that read pairs and say a value at every position.

    The layers learn at once and apart: seeds are further heads to the attention, and a leading axis elsewhere. There
    are no positions. `bochner train recall` has transformers' BERT instead, with positions and norms behind each part:
    exact attention is as good there, and kernels are worse.
    """

    def __init__(self, run: Run, features: int, length: int) -> None:
        super().__init__()
        width = HEADS * SIZE
        g = torch.Generator().manual_seed(0)
        normal = lambda *shape: nn.Parameter(torch.randn(SEEDS, *shape, generator=g) * width**-0.5)  # noqa: E731
        self.embed = normal(SPECIAL + data.PAIR_SYMBOLS, width)
        self.qkv, self.out, self.up, self.down = (normal(width, w) for w in (3 * width, width, width, width))
        self.say = normal(width, VALUES)
        self.bias, self.shift, self.end = (nn.Parameter(torch.zeros(SEEDS, 1, w)) for w in (3 * width, width, VALUES))
        self.run = run
        name = run.attention.removeprefix("window+")
        self.near = {"window": 8} if name != run.attention else {}
        self.phi, self.peers = None, nn.ModuleList()
        if name in REPLACED:
            from bochner.tasks import peers

            make = {"linformer": lambda: peers.Linformer(length, features)}
            make["performer_pytorch"] = lambda: peers.Favor(SIZE, features, False)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                self.peers.extend(make[name]() for _ in range(SEEDS))
        elif name not in LEVELS:
            self.phi = feature_map(name, SIZE, features, num_heads=SEEDS * HEADS, seed=0, **run.options)
        if run.decay == "fixed":  # learned from weights that fall to a half in 14 and 100 tokens
            self.fade = nn.Parameter(torch.tensor([-3.0, -5.0]).repeat(SEEDS))
        elif run.decay == "computed":
            self.fade_of = normal(width, HEADS)

    def attend(self, x: Tensor, padding: Tensor) -> Tensor:
        """Attention of x (seeds, b, n, width)."""
        s, b, n, _ = x.shape
        split = (x.flatten(1, 2) @ self.qkv + self.bias).view(s, b, n, 3, HEADS, SIZE).permute(3, 1, 0, 4, 2, 5)
        q, k, v = split.flatten(2, 3)  # (b, seeds x heads, n, d)
        if self.run.attention == "identity":
            out = v
        elif self.run.attention == "exact":
            out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=~padding[:, None, None, :])
        elif self.peers:
            of_seeds = zip(self.peers, *(t.split(HEADS, dim=1) for t in (q, k, v)), strict=True)
            out = torch.cat([peer(*parts, padding, SIZE**-0.5) for peer, *parts in of_seeds], dim=1)
        else:
            further: dict[str, Any] = {**self.near, "is_causal": bool(self.run.decay)}
            if self.run.decay == "fixed":
                further["decay"] = -nn.functional.softplus(self.fade)
            elif self.run.decay == "computed":
                rate = (x.flatten(1, 2) @ self.fade_of).view(s, b, n, HEADS).permute(1, 0, 3, 2).flatten(1, 2)
                further["decay"] = -nn.functional.softplus(rate - 4)
            out = linear_attention(q, k, v, self.phi, key_padding_mask=padding, diagnostics=False, **further)
        out = out.unflatten(1, (s, HEADS)).permute(1, 0, 3, 2, 4).reshape(s, b * n, HEADS * SIZE)
        return (out @ self.out).view(s, b, n, -1)

    def forward(self, ids: Tensor) -> Tensor:
        """The scores of the values, (seeds, b, n, values)."""
        norm = lambda x: nn.functional.layer_norm(x, x.shape[-1:])  # noqa: E731
        x = norm(self.embed[:, ids])
        shape = x.shape
        x = x + self.attend(norm(x), ids == PAD)
        x = x.flatten(1, 2)
        x = x + nn.functional.gelu(norm(x) @ self.up + self.shift) @ self.down
        return (norm(x) @ self.say + self.end).view(*shape[:3], -1)


def train(run: Run, features: int, pairs: int, steps: int) -> list[float]:
    """The accuracies of fresh readers, one for each seed, on test sequences."""
    preset = tasks.preset_of(tasks.task("recall"), "small", length=2 * pairs, data={"pairs": pairs}, steps=steps)
    train, test = (data.recall(preset, split) for split in ("train", "test"))
    model = Reader(run, features, 2 * pairs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
    for step, rows in enumerate(torch.arange(steps * BATCH).split(BATCH), 1):
        fall = 0.5 + 0.5 * math.cos(math.pi * max(0, step - WARMUP) / (steps - WARMUP))
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(step / WARMUP, fall)
        if run.redraw and step % run.redraw == 0 and step + run.redraw <= steps and model.phi is not None:
            model.phi.redraw_(seed=step)
        labels = train.labels[rows]
        where = labels != IGNORE
        wanted = (labels[where] - SPECIAL - data.KEYS).expand(SEEDS, -1)
        losses = nn.functional.cross_entropy(model(train.ids[rows])[:, where].mT, wanted, reduction="none").mean(1)
        optimizer.zero_grad()
        losses.sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), SEEDS**0.5, error_if_nonfinite=True)
        optimizer.step()
    where = test.labels != IGNORE
    with torch.no_grad():
        said = model.eval()(test.ids).argmax(-1)
    right = said[:, where] == test.labels[where] - SPECIAL - data.KEYS
    return [float(x) for x in right.float().mean(1)]


def rank_accuracy(pairs: int, features: float) -> float:
    """The accuracy of the best features of this number, read linearly.

    With N keys of which n are there, features are N vectors in M dimensions, M = heads x m. The mean of their squared
    products is at least (N - M) / (M (N - 1)) for N > M, and 0 is possible for N <= M (Welch 1974, eq. 4 with k = 1). A
    key reads its own value with weight 1, and the sum of the n - 1 others as noise, shared out among V values: its
    variance in each value's score is s^2 = (n - 1) (N - M) / (M (N - 1) V).
    """
    keys, m = min(64, 2 * pairs), HEADS * features
    noise = max(0.0, (pairs - 1) * (keys - m) / (m * (keys - 1) * VALUES))
    return right(1.0, 0.0, math.sqrt(noise))


def variance_accuracy(kind: str, pairs: int, features: float) -> float:
    """The accuracy of random features of softmax attention that nothing has adapted to their draw.

    Orthogonal keys of length r: the kernel is exp(r^2) for the key that is asked for and 1 for the n - 1 others, whose
    scores are shared out among V values. Errors of the estimates are those of `bochner.theory` for M = heads x m
    features; r is the best one.
    """
    best = 1 / VALUES
    for r in torch.linspace(0.2, 3.0, 29, dtype=torch.float64).tolist():
        x, y = torch.zeros(2, SIZE, dtype=torch.float64)
        x[0], y[1] = r, r
        mse = getattr(theory, f"mse_{kind}")
        own, other = (float(mse(x, z, HEADS * features)) for z in (x, y))
        noise = math.sqrt((pairs - 1) / VALUES * (other + 1 - 1 / VALUES))
        best = max(best, right(math.exp(r * r), math.sqrt(own), noise))
    return best


def right(signal: float, spread: float, noise: float) -> float:
    """How often a score of mean `signal` is the largest of V whose noise is normal."""
    if noise == 0:
        return 1.0
    z = torch.linspace(-8, 8, 2001, dtype=torch.float64)
    ahead = (signal + math.hypot(spread, noise) * z) / noise
    log_share = (VALUES - 1) * torch.special.log_ndtr(ahead) - z.square() / 2
    return float(log_share.exp().sum() * (z[1] - z[0]) / math.sqrt(2 * math.pi))


def fit(cell: str, steps: int) -> dict[str, Any]:
    """Accuracies on the test split, one for each seed, or where the runs stopped."""
    name, m, pairs = cell.rsplit("/", 2)
    run = {**LINES, **CAUSAL}.get(name, Run(name))
    began = time.process_time()
    try:
        if name in OF_TRANSFORMERS:
            runs = [trained("recall", name, f"recall/{steps}/{cell}/{s}", seed=s, steps=steps) for s in range(SEEDS)]
            accuracy = [r["metrics"]["accuracy"] for r in runs]
        else:
            accuracy = train(run, int(m), int(pairs), steps)
    except (BochnerError, RuntimeError) as error:
        return {"stopped": str(error)}
    return {"accuracy": accuracy, "seconds": round(time.process_time() - began, 1)}


@experiment(
    claim="Kernels differ in how many pairs they can tell apart, as rank and variance predict. Features of attention "
    "are the limit: exact attention makes no error.",
    ours="16 pairs, 2 to 32 features a head, one layer of width 32, 300 steps, three seeds",
    quick={"cells": "quick"},
    needs=("transformers", "accelerate"),
)
def measure(store: Store, cells: str = "all", steps: int = STEPS) -> None:
    """`cells`: "all", or "quick" for the most telling lines, with 8 features."""
    runs = store.table("runs")
    for cell in wanted() if cells == "all" else wanted()[: len(FIRST)]:
        store.cell(cell, lambda c=cell: fit(c, steps), within=runs)
    store.figures["rank"] = {str(m): rank_accuracy(PAIRS, m) for m in FEATURES}
    kinds = ("positive", "hyperbolic", "trig")
    store.figures["variance"] = {k: {str(m): variance_accuracy(k, PAIRS, m) for m in FEATURES} for k in kinds}
    store.figures["rank of pairs"] = {str(p): rank_accuracy(p, 8) for p in (*OTHER_PAIRS, PAIRS)}


def accuracies(found: Any, name: str, m: int, pairs: int = PAIRS) -> list[float]:
    """One accuracy for each seed; runs that stopped have that of chance."""
    run = found["runs"].get(f"{name}/{m}/{pairs}")
    return [] if run is None else run.get("accuracy", [1 / VALUES] * SEEDS)


def sayings(found: Any, m: int = 8) -> dict[str, list[float]]:
    lines = {n: accuracies(found, n, m) for n in LINES} | {n: accuracies(found, n, 0) for n in LEVELS}
    return {n: v for n, v in lines.items() if v}


def say_learned(found: Any, m: int = 8) -> str:
    """What a learned kernel is worth: the best of them against the best fixed one, with the spread of seeds."""
    seen = sayings(found, m)
    several = {n: v for n, v in seen.items() if len(v) > 1}
    learned, fixed = ([n for n in names if n in several] for names in (LEARNED, FIXED))
    if not learned or not fixed:
        return "too few seeds to compare learned kernels with fixed ones"
    best = [max(names, key=lambda n: statistics.mean(several[n])) for names in (learned, fixed)]
    gap = 100 * (statistics.mean(several[best[0]]) - statistics.mean(several[best[1]]))
    spread = 100 * max(statistics.stdev(several[n]) for n in best)
    verb = "beats" if gap > spread else ("ties with" if gap > -spread else "loses to")
    return (
        f"with {m} features the best learned kernel, {best[0]}, {verb} the best fixed one, {best[1]}, "
        f"by {gap:+.1f} points; the spread of seeds is {spread:.1f}"
    )


def judge(found: Any) -> Said:
    seen = {n: statistics.mean(v) for n, v in sayings(found).items()}
    shown = ", ".join(f"{n} {100 * x:.0f} %" for n, x in sorted(seen.items(), key=lambda pair: -pair[1]))
    learned = say_learned(found)
    says = f"{len(found['runs'])} cells of three seeds; with m = 8: {shown}. By rank {100 * found['rank']['8']:.0f} %, "
    says += f"by the variance of positive features {100 * found['variance']['positive']['8']:.0f} %. "
    says += learned[:1].upper() + learned[1:] + "."
    if not gate(accuracies(found, "exact", 0), accuracies(found, "identity", 0), 1 / VALUES).is_open:
        return Said(says, "fails", "the task does not separate attention from none")
    over = sorted(k for k in found["runs"] if judge_excess(found, k) > 0.03)
    if over:
        return Said(says, "fails", f"more than 3 points above what rank predicts: {', '.join(over[:5])}")
    return Said(says, "holds")


def judge_excess(found: Any, cell: str) -> float:
    """By how much the accuracy of a cell is above what the rank of its features predicts."""
    name, m, pairs = cell.rsplit("/", 2)
    if m == "0" or "accuracy" not in found["runs"][cell] or name.startswith("window") or name in REPLACED:
        return 0.0
    phi = feature_map({**LINES, **CAUSAL}[name].attention, SIZE, int(m))
    width = phi.feature_dim * (SIZE if phi.num_columns(1) != 2 else 1)  # a map that sums more than values
    return statistics.mean(found["runs"][cell]["accuracy"]) - rank_accuracy(int(pairs), width)


PANELS = {
    "fixed kernels": (
        "positive",
        "positive, redrawn",
        "hyperbolic",
        "angular_hybrid",
        "relu",
        "elu",
        "linear_elu",
        "sum_poly",
    ),
    "learned kernels": (*LEARNED, "gmm_prf, paper", "fastfood_prf, paper", "generative_prf, paper"),
    "signed, fitted, near, and peers": (
        *SIGNED,
        "landmark",
        "moments",
        "window+positive",
        "linformer",
        "performer_pytorch",
    ),
}


def draw(found: Any) -> None:
    fig, axes = figure(3, figsize=(15, 4.4), sharey=True)
    for ax, (title, names) in zip(axes, PANELS.items(), strict=True):
        rank = [100 * found["rank"][str(m)] for m in FEATURES]
        ax.plot(FEATURES, rank, color="black", linestyle=":", label="prediction by rank")
        law = [100 * found["variance"]["positive"][str(m)] for m in FEATURES]
        ax.plot(FEATURES, law, color="black", linestyle="--", linewidth=1, label="by variance, positive")
        for level in ("exact", "identity"):
            values = accuracies(found, level, 0)
            if values:
                ax.axhline(100 * statistics.mean(values), color=GREY, linewidth=1)
        ends = {}
        colours = (*COLOURS[:6], "#7f3c8d", "#a0a000", "#888888")
        for name, colour in zip(
            [n for n in names if any(accuracies(found, n, m) for m in FEATURES)], colours, strict=False
        ):
            at = [m for m in FEATURES if accuracies(found, name, m)]
            values = [[100 * x for x in accuracies(found, name, m)] for m in at]
            means = [statistics.mean(v) for v in values]
            ax.plot(at, means, "-o", color=colour, markersize=3)
            ax.vlines(at, [min(v) for v in values], [max(v) for v in values], color=colour, linewidth=1)
            ends[name] = (means[-1], colour)
        log_ticks(ax, FEATURES, base=2)
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("features of a head, m")
        name_lines(ax, ends)
    axes[0].set_ylabel(f"accuracy, %, {PAIRS} pairs; grey: exact, identity")
    axes[1].legend(fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 0.1))
    save(fig, "recall")
