"""Table 1 of *On Learning the Transformer Kernel*: time and space of self-attention with every kernel.

Counted, not timed: one forward pass of attention, bidirectional, one head. Operations are 2 for every product in a
matrix product and 1 for every element any other operator writes; space is the largest number of bytes alive at a
time, inputs and parameters included. The paper's orders, with all constants 1, give the factor by which each count
may grow when a size is doubled. An order holds if no count grows by more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from _framework import Said, Store, experiment, graded, table
from _pictures import figure, save
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from bochner import feature_map

BASE = {"L": 2048, "M": 128, "d": 64, "C": 2}
SLACK = 1.1
Sizes = dict[str, int]
# Space and time as the table prints them.
STATED: dict[str, tuple[Callable[..., float], Callable[..., float]]] = {
    "softmax": (lambda L, M, d, C: L * L + L * d, lambda L, M, d, C: L * L * d),
    "positive": (lambda L, M, d, C: L * (d + M) + M * d, lambda L, M, d, C: L * M * d),
    "linear_elu": (lambda L, M, d, C: L * d + d * d, lambda L, M, d, C: L * d * d),
    "gmm_rks": (
        lambda L, M, d, C: L * d + C * (d * d + M * d + L * M),
        lambda L, M, d, C: M * C * (d * d + L * d),
    ),
    "gmm_prf": (lambda L, M, d, C: L * d + C * M * d + L * C * M, lambda L, M, d, C: L * C * M * d),
    "fastfood_rks": (lambda L, M, d, C: L * (d + M) + M * d, lambda L, M, d, C: L * M * d),
    "fastfood_prf": (lambda L, M, d, C: L * (d + M) + M * d, lambda L, M, d, C: L * M * d),
    "generative_rks": (lambda L, M, d, C: L * (d + M) + d * d + M * d, lambda L, M, d, C: M * (d * d + L * d)),
    "generative_prf": (lambda L, M, d, C: L * (d + M) + d * d + M * d, lambda L, M, d, C: M * (d * d + L * d)),
}


class Alive(TorchDispatchMode):
    """Elements written by operators, and the largest number of bytes alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.written = self.bytes = self.peak = 0
        self.known: set[int] = set()

    def hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.known:
            self.known.add(key)
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self.release, key, storage.nbytes())

    def release(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.bytes -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.written += 0 if func.is_view else tensor.numel()
                self.hold(tensor)
        return out


def attention(name: str, sizes: Sizes) -> Callable[[], torch.Tensor]:
    """One pass, as the paper writes it: the matrix for softmax, features otherwise."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (0.1 * torch.randn(sizes["L"], sizes["d"], generator=g) for _ in range(3))
    if name == "softmax":
        return lambda: (q @ k.mT / sizes["d"] ** 0.5).softmax(-1) @ v
    options: dict[str, Any] = {"num_components": sizes["C"], "shared_noise": True} if "gmm" in name else {}
    phi = feature_map(name, dim=sizes["d"], num_features=sizes["M"], **options).eval()

    def through() -> torch.Tensor:
        left, right = phi(q, role="query").values, phi(k, role="key").values
        return (left @ (right.mT @ v)) / (left @ right.sum(0))[:, None]

    return through


@torch.no_grad()
def counts(name: str, sizes: Sizes) -> dict[str, int]:
    run = attention(name, sizes)
    run()
    with Alive() as alive, FlopCounterMode(display=False) as counter:
        run()
    inputs = 3 * sizes["L"] * sizes["d"] * 4
    return {"time": counter.get_total_flops() + alive.written, "space": alive.peak + inputs}


def doubled(name: str) -> dict[str, Any]:
    """The factor of each count, and the one that the table allows, when one size is doubled."""
    space, time = STATED[name]
    base = counts(name, BASE)
    found: dict[str, Any] = {"base": base}
    for size in BASE:
        sizes = {**BASE, size: 2 * BASE[size]}
        now = counts(name, sizes)
        found[size] = {
            "time": now["time"] / base["time"],
            "stated time": time(**sizes) / time(**BASE),
            "space": now["space"] / base["space"],
            "stated space": space(**sizes) / space(**BASE),
        }
    return found


@experiment(
    claim="Time and space of attention grow with the length, the features, the head size and the components as the "
    "table says.",
    items=("004 Table 1",),
    paper="orders of growth",
    ours="one head, L = 2,048, M = 128, d = 64, C = 2, each doubled; operations and bytes counted",
    quick={"names": ("softmax", "positive", "gmm_rks")},
)
def measure(store: Store, names: tuple[str, ...] = tuple(STATED)) -> None:
    for name in names:
        store.cell(name, lambda n=name: doubled(n), store.table("kernels"))


def factors(found: Any, chosen: Callable[[float], bool]) -> list[str]:
    """Counts whose growth, as a share of what the table says, is one that is chosen."""
    return [
        f"{name}, {kind} in {size}: {row[size][kind]:.2f} for {row[size][f'stated {kind}']:.2f}"
        for name, row in found["kernels"].items()
        for size in BASE
        for kind in ("time", "space")
        if chosen(row[size][kind] / row[size][f"stated {kind}"])
    ]


def judge(found: Any) -> Said:
    over = factors(found, lambda growth: growth > SLACK)
    under = factors(found, lambda growth: growth < 0.8)  # orders that are not tight here
    cells = 2 * len(BASE) * len(found["kernels"])
    bases = {name: row["base"] for name, row in found["kernels"].items()}
    soft = bases["softmax"]
    told = {
        name: {what: f"{base[key] / soft[key]:.2f}" for what, key in (("operations", "time"), ("bytes", "space"))}
        for name, base in bases.items()
    }
    return Said(
        f"{cells - len(over)} of {cells} counts grow by no more than the table says. Softmax = 1:"
        + table(told, "kernel")
        + f"Smaller than stated: {'; '.join(under) or 'none'}.",
        graded(not over, len(over) < cells / 2),
        "faster than stated: " + "; ".join(over),
    )


def draw(found: Any) -> None:
    fig, axes = figure(2, figsize=(11, 3.8), sharey=True)
    for ax, kind in zip(axes, ("time", "space"), strict=True):
        for i, size in enumerate(BASE):
            rows = list(found["kernels"].values())
            at = [y + 0.18 * (i - 1.5) for y in range(len(rows))]
            (line,) = ax.plot([r[size][kind] for r in rows], at, "o", ms=4, label=f"{size} doubled")
            ax.plot([r[size][f"stated {kind}"] for r in rows], at, "|", ms=9, color=line.get_color())
        ax.set(xlabel="factor (bars: as stated)", title=kind)
    axes[0].set_yticks(range(len(rows)), list(found["kernels"]), fontsize=8)
    axes[1].legend(fontsize=7, frameon=False)
    save(fig, "kernel_complexity")
