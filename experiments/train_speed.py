"""Time and memory of a training step against length, for every attention and the peers: figures 3 and 4 of 004.

Claims: from 1,024 to 16,384 tokens the time of a step grows with an exponent of at most 1.1 for every linear attention,
and so does its memory; there is a length from which a linear attention beats the exact one. One encoder layer of width
64 with 2 heads and 32 features, one sequence, one thread: forward, backward and optimizer. Time is the best of
interleaved rounds, one length after the other (call it on an idle machine); memory is what a fresh process adds to its
resident set at its peak. Writes results/train_speed.json after every length, docs/images/train_speed.png and
docs/images/train_memory.png; what is known is not measured again unless asked for (`--again time --lengths 128 256`).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import re
import time
from pathlib import Path

import numpy as np
import torch
from _gallery import COLOURS

from bochner import tasks

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "train_speed.json"
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FROM = 1024  # exponents are fitted from here
FIXED = ("positive", "relu", "elu", "linear_elu", "trig")
LEARNED = ("fastfood_prf", "gmm_prf", "generative_prf", "gmm_rks")
LINEAR = (*FIXED, *LEARNED, "window+positive", "window+calibrated")
PEERS = ("performer_pytorch", "linformer", "nystromformer", "longformer", "big_bird", "reformer", "fnet")
ATTENTIONS = ("exact", "identity", *LINEAR, *PEERS)
LIMIT = {"exact": 8192}  # beyond it one step takes longer than everything else together

Table = dict[str, dict[str, float]]  # attention, length, figure


class Step:
    """One training step of one attention at one length."""

    def __init__(self, attention: str, length: int) -> None:
        task = tasks.task("text")
        sizes = {"length": length, "layers": 1, "width": 64, "heads": 2, "feedforward": 128, "features": 32}
        preset = tasks.preset_of(task, "small", **sizes)
        chosen = tasks.choose(task, attention, preset)
        self.model = tasks.build(task, preset, chosen)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad])
        g = torch.Generator().manual_seed(0)
        self.batch = {"input_ids": torch.randint(4, 260, (1, length), generator=g), "labels": torch.tensor([1])}
        if chosen.takes_mask:
            self.batch["attention_mask"] = torch.ones(1, length, dtype=torch.long)

    def __call__(self) -> float:
        start = time.perf_counter()
        self.model(**self.batch)["loss"].backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def seconds(length: int, rounds: int) -> dict[str, float]:
    """Best time of each attention at a length, over interleaved rounds."""
    steps = {a: Step(a, length) for a in ATTENTIONS if length <= LIMIT.get(a, length)}
    best = dict.fromkeys(steps, math.inf)
    for i in range(rounds + 1):  # the first round warms up
        for attention, step in steps.items():
            taken = step()
            if i:
                best[attention] = min(best[attention], taken)
    return best


def resident(kind: str) -> float:
    """Megabytes of this process: `RSS` now, `HWM` at most since it was last cleared."""
    found = re.search(rf"Vm{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise OSError("/proc/self/status has no memory figures: memory is measured on Linux only")
    return int(found[1]) / 1024


def _memory(attention: str, length: int, out: multiprocessing.SimpleQueue) -> None:
    torch.set_num_threads(1)
    step = Step(attention, length)
    before = resident("RSS")
    Path("/proc/self/clear_refs").write_text("5")
    step()
    out.put(resident("HWM") - before)


def megabytes(length: int) -> dict[str, float]:
    """Peak memory that a step adds to a process of its own."""
    context = multiprocessing.get_context("fork")
    for attention in ATTENTIONS:
        Step(attention, 128)()  # what a first step loads is not the length's doing
    found = {}
    for attention in ATTENTIONS:
        if length <= LIMIT.get(attention, length):
            out = context.SimpleQueue()
            process = context.Process(target=_memory, args=(attention, length, out))
            process.start()
            found[attention] = out.get()
            process.join()
    return found


def exponent(figures: dict[str, float]) -> float:
    """The slope in logarithms from `FROM` tokens on."""
    points = np.log([(float(n), x) for n, x in figures.items() if int(n) >= FROM])
    return float(np.polyfit(points[:, 0], points[:, 1], 1)[0])


def crossover(figures: dict[str, float], exact: dict[str, float]) -> int | None:
    """The first measured length from which an attention stays below exact attention; None if there is none."""
    common = sorted(int(n) for n in exact if n in figures)
    worse = [n for n in common if figures[str(n)] >= exact[str(n)]]
    return next((n for n in common if not worse or n > worse[-1]), None)


def plot(found: Table, unit: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.4), dpi=150, sharey=True)
    for axes, names, title in ((left, LINEAR, "linear attentions"), (right, PEERS, "peers")):
        dash = ["-" if i < 7 else "--" for i in range(len(names))]
        lines = [
            (name, {"marker": "o", "markersize": 3, "color": COLOURS[i % 7], "linestyle": dash[i]})
            for i, name in enumerate(names)
        ]
        lines += [("exact", {"color": "0.2"}), ("identity", {"color": "0.2", "linestyle": ":"})]
        for name, style in lines:
            if name in found:
                axes.plot([int(n) for n in found[name]], list(found[name].values()), label=name, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
        axes.set_xlabel("tokens")
        axes.set_title(title, fontsize=9)
        axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylabel(f"{unit} per training step")
    figure.tight_layout()
    figure.savefig(path)


def report(found: dict[str, Table]) -> bool:
    """Print every figure, exponent and crossover; whether the claims hold."""
    holds = True
    for kind, table in found.items():
        if not table:
            continue
        print(f"\n{kind} of a step")
        for name, figures in table.items():
            first = crossover(figures, table["exact"]) if name != "exact" else None
            shown = " ".join(f"{1000 * x if kind == 'time' else x:8.1f}" for x in figures.values())
            print(f"{name:18s} {shown}   exponent {exponent(figures):.2f}   below exact from {first}")
        worst = max((exponent(table[a]), a) for a in LINEAR if a in table)
        holds &= worst[0] <= 1.1
        print(f"claim (exponent at most 1.1): {'holds' if worst[0] <= 1.1 else 'FAILS'}; {worst[0]:.2f}, {worst[1]}")
    return holds


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--again", choices=("time", "memory"), help="measure this again, even where it is known")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--plot", action="store_true")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    found: dict[str, Table] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for kind in ("time", "memory"):
        table = found.setdefault(kind, {})
        for n in () if options.plot else options.lengths:
            known = all(str(n) in table.get(a, {}) for a in ATTENTIONS if n <= LIMIT.get(a, n))
            small = kind == "memory" and n < FROM  # less than what an allocator keeps in stock
            if small or (options.again != kind if options.again else known):
                continue
            for attention, figure in (seconds(n, options.rounds) if kind == "time" else megabytes(n)).items():
                row = {**table.get(attention, {}), str(n): figure}
                table[attention] = dict(sorted(row.items(), key=lambda item: int(item[0])))
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    holds = report(found)
    plot(found["time"], "seconds", ROOT / "docs" / "images" / "train_speed.png")
    plot(found["memory"], "megabytes", ROOT / "docs" / "images" / "train_memory.png")
    return 0 if holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
