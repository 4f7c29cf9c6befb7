"""Time and memory of a training step against length, for every attention and the peers: figures 3 and 4 of 004.

Forward, backward and optimizer on one thread. Time is the best of interleaved rounds, one length after the other: call
it on an idle machine. Memory is what a fresh process adds to its resident set at its peak.
"""

from __future__ import annotations

import math
import multiprocessing
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from _framework import Said, Store, experiment
from _pictures import COLOURS, figure, log_ticks, save

from bochner import tasks

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FROM = 1024  # exponents are fitted from here
FIXED = ("positive", "relu", "elu", "linear_elu", "trig")
LEARNED = ("fastfood_prf", "gmm_prf", "generative_prf", "gmm_rks")
LINEAR = (*FIXED, *LEARNED, "window+positive", "window+calibrated")
PEERS = ("performer_pytorch", "linformer", "nystromformer", "longformer", "big_bird", "reformer", "fnet")
ATTENTIONS = ("exact", "identity", *LINEAR, *PEERS)
# The sizes of papers 003 (figure 20: heads, layers, feed-forward, width) and 004, each with 256 features.
PAPERS: dict[str, dict[str, Any]] = {
    "small": {"heads": 1, "layers": 6, "feedforward": 64, "width": 64, "lengths": (1024, 2048, 4096, 8192)},
    "regular": {"heads": 8, "layers": 6, "feedforward": 2048, "width": 512, "lengths": (1024, 2048, 4096)},
}
OF_PAPERS = ("exact", "identity", "positive", "relu", "gmm_prf", "fastfood_prf")
OURS = {"layers": 1, "width": 64, "heads": 2, "feedforward": 128, "features": 32}
LIMIT = {"exact": 8192}  # beyond it one step takes longer than everything else together
LINEAR_GROWTH, NEAR_LIMIT = 1.1, 1.25  # the largest exponent that counts as linear, and times "close" to the limit


class Step:
    """One training step of one attention at one length."""

    def __init__(self, attention: str, length: int, **sizes: Any) -> None:
        task = tasks.task("text")
        preset = tasks.preset_of(task, "small", length=length, **(sizes or OURS))
        chosen = tasks.choose(task, attention, preset)
        self.model = tasks.build(task, preset, chosen)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad])
        g = torch.Generator().manual_seed(0)
        self.batch = {"input_ids": torch.randint(4, 260, (1, length), generator=g), "labels": torch.tensor([1])}
        if chosen.peer.takes_mask:
            self.batch["attention_mask"] = torch.ones(1, length, dtype=torch.long)

    def __call__(self) -> float:
        start = time.perf_counter()
        self.model(**self.batch)["loss"].backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def within(length: int) -> list[str]:
    return [a for a in ATTENTIONS if length <= LIMIT.get(a, length)]


def seconds(length: int, rounds: int) -> dict[str, float]:
    """Best time of each attention at a length, over interleaved rounds; the first warms up."""
    steps = {a: Step(a, length) for a in within(length)}
    taken = [{a: step() for a, step in steps.items()} for _ in range(rounds + 1)]
    return {a: min(row[a] for row in taken[1:]) for a in steps}


def seconds_of_paper(kind: str, length: int, rounds: int) -> dict[str, float]:
    """Best times at a size of the papers: as above."""
    sizes = {k: v for k, v in PAPERS[kind].items() if k != "lengths"}
    steps = {a: Step(a, length, features=256, **sizes) for a in OF_PAPERS}
    taken = [{a: step() for a, step in steps.items()} for _ in range(rounds + 1)]
    return {a: min(row[a] for row in taken[1:]) for a in steps}


def resident(kind: str) -> float:
    """Megabytes of this process: `RSS` now, `HWM` at most since it was last cleared."""
    found = re.search(rf"Vm{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise OSError("/proc/self/status has no memory figures: memory is measured on Linux only")
    return int(found[1]) / 1024


def _memory(attention: str, length: int, out: Any) -> None:
    torch.set_num_threads(1)
    step = Step(attention, length)
    before = resident("RSS")
    Path("/proc/self/clear_refs").write_text("5")
    step()
    out.put(resident("HWM") - before)


def megabytes(length: int) -> dict[str, float]:
    """Peak memory that a step adds to a process of its own."""
    context = multiprocessing.get_context("fork")
    found = {}
    for attention in within(length):
        Step(attention, 128)()  # what a first step loads is not the length's doing
        out = context.SimpleQueue()
        process = context.Process(target=_memory, args=(attention, length, out))
        process.start()
        found[attention] = out.get()
        process.join()
    return found


@experiment(
    claim="Time and memory of a training step are linear in the length, and close to those of attention that only "
    "returns the values.",
    items=(
        *("003 Figure 3", "003 Figure 20", "004 Figure 1", "004 Figure 3, memory and speed"),
        *("004 Figure 4", "004 Figure 5"),
    ),
    paper="4 to 6 layers of width 64 to 512 with 256 features, up to 32,768 tokens, on accelerators",
    ours="the sizes of 003: 256 features, 6 layers of width 64 to 8,192 tokens, of width 512 to 4,096. One layer of "
    "width 64 with 32 features up to 16,384 tokens. One sequence, one thread",
    quick="its claim is about lengths that take minutes, on an idle machine",
    needs=("transformers",),
)
def measure(store: Store, rounds: int = 5, lengths: tuple[int, ...] = LENGTHS) -> None:
    # Memory first: what larger steps leave to the allocator would hide it.
    for kind in ("memory", "time"):
        table = store.table(kind)
        for n in lengths:
            small = kind == "memory" and n < FROM  # less than what an allocator keeps in stock
            if small or all(str(n) in table.get(a, {}) for a in within(n)):
                continue
            for attention, found in (seconds(n, rounds) if kind == "time" else megabytes(n)).items():
                row = {**table.get(attention, {}), str(n): found}
                table[attention] = dict(sorted(row.items(), key=lambda item: int(item[0])))
            store.save()
            print(f"{kind} at {n} tokens", flush=True)
    for kind, sizes in PAPERS.items():
        for n in sizes["lengths"]:
            table = store.table("papers").setdefault(kind, {})
            store.cell(str(n), lambda k=kind, n=n: seconds_of_paper(k, n, 2), table)


def exponent(figures: dict[str, float]) -> float:
    """The slope in logarithms from `FROM` tokens on."""
    points = [(math.log(int(n)), math.log(x)) for n, x in figures.items() if int(n) >= FROM]
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def crossover(figures: dict[str, float], exact: dict[str, float]) -> int | None:
    """The first measured length from which an attention stays below exact attention; None if there is none."""
    common = sorted(int(n) for n in exact if n in figures)
    worse = [n for n in common if figures[str(n)] >= exact[str(n)]]
    return next((n for n in common if not worse or n > worse[-1]), None)


def at_papers_sizes(found: Any) -> str:
    """By how much a step is faster than with exact attention, and how far the values alone would bring it."""
    said = []
    for kind, rows in found.get("papers", {}).items():
        n = max(rows, key=int)
        gains = {a: rows[n]["exact"] / rows[n][a] for a in OF_PAPERS if a != "exact"}
        said.append(
            f"times faster than with exact attention, the paper's {kind} size at {int(n):,} tokens: "
            + ", ".join(f"{a} {x:.1f}" for a, x in gains.items())
        )
    return "; ".join(said)


def judge(found: Any) -> Said:
    times, memory = found["time"], found["memory"]
    n = str(max(int(x) for x in times["exact"]))
    shown = ("exact", "identity", "positive", "relu", "gmm_prf", "fastfood_prf", "window+calibrated")
    names = [k for k in shown if n in times.get(k, {})]
    linear = [k for k in times if k in LINEAR]
    steepest = max(exponent(table[k]) for table in (times, memory) for k in linear)
    slower = {k: times[k][n] / times["identity"][n] for k in linear}
    larger = max(memory[k][n] / memory["identity"][n] for k in linear)
    (first, least), (last, most) = (f(slower.items(), key=lambda x: x[1]) for f in (min, max))
    reasons = {
        f"the steepest grows with an exponent of {steepest:.2f}": steepest > LINEAR_GROWTH,
        f"a step takes {least:.1f} ({first}) to {most:.1f} times ({last}) as long as with values alone": most
        > NEAR_LIMIT,
        f"memory is up to {larger:.1f} times as much": larger > NEAR_LIMIT,
        "exact attention, which torch computes without its matrix, needs hardly more memory": memory["exact"][n]
        < 1.5 * memory["positive"][n],
    }
    missed = [f"{reason[0].upper()}{reason[1:]}" for reason, so in reasons.items() if so]
    from_exact = crossover(times["positive"], times["exact"])
    return Said(
        f"a training step at {int(n):,} tokens: "
        + ", ".join(f"{k} {1e3 * times[k][n]:.0f} ms" for k in names)
        + "; peak memory: "
        + ", ".join(f"{k} {memory[k][n]:.0f} MB" for k in names if n in memory.get(k, {}))
        + f"; {at_papers_sizes(found)}; largest exponent from 1,024 tokens on {steepest:.2f}; "
        f"`positive` is faster than exact from {from_exact} tokens, "
        f"{times['exact'][n] / times['positive'][n]:.1f} times at {int(n):,}.",
        "not" if steepest > LINEAR_GROWTH else "partly" if missed else "reproduced",
        ". ".join(missed),
    )


def draw(found: Any) -> None:
    for kind, unit in (("time", "seconds"), ("memory", "megabytes")):
        table = found[kind]
        fig, (left, right) = figure(2, figsize=(12, 4.4), sharey=True)
        for ax, names, title in ((left, LINEAR, "linear attentions"), (right, PEERS, "peers")):
            lines = [
                (n, {"marker": "o", "markersize": 3, "color": COLOURS[i % 7], "linestyle": "-" if i < 7 else "--"})
                for i, n in enumerate(names)
            ]
            lines += [("exact", {"color": "0.2"}), ("identity", {"color": "0.2", "linestyle": ":"})]
            for name, style in lines:
                if name in table:
                    ax.plot([int(n) for n in table[name]], list(table[name].values()), label=name, **style)
            log_ticks(ax, LENGTHS, base=2)
            ax.set(yscale="log", xlabel="tokens")
            ax.set_title(title, fontsize=9)
            ax.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
        left.set_ylabel(f"{unit} per training step")
        save(fig, f"train_{'speed' if kind == 'time' else kind}")
    draw_papers(found.get("papers", {}))


def draw_papers(papers: Any) -> None:
    """Seconds a step against length at the papers' sizes; dotted, the values alone: nothing can be faster."""
    fig, axes = figure(2, figsize=(11, 4))
    for ax, (kind, rows) in zip(axes, papers.items(), strict=True):
        for i, attention in enumerate(OF_PAPERS):
            style = {"exact": {"color": "0.2"}, "identity": {"color": "0.2", "linestyle": ":"}}.get(
                attention, {"color": COLOURS[i % 7]}
            )
            ax.plot(
                [int(n) for n in rows], [row[attention] for row in rows.values()], marker="o", label=attention, **style
            )
        log_ticks(ax, [int(n) for n in rows], base=2)
        heads, layers, inner, width = (PAPERS[kind][k] for k in ("heads", "layers", "feedforward", "width"))
        ax.set(yscale="log", xlabel="tokens", ylabel="seconds per training step")
        ax.set_title(f"{kind}: heads {heads}, layers {layers}, feed-forward {inner}, width {width}", fontsize=9)
    axes[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(fig, "train_speed_papers")
