"""Time of a training step against length, for every kind of attention and the peers: the speed of figure 3 of 004.

Claim: from 1,024 to 16,384 tokens the time of a step grows with an exponent of at most 1.1 for every linear attention,
and there is a length from which they beat exact attention. One encoder layer of width 64 with 2 heads and 32 features,
one sequence, one thread: forward, backward and optimizer. Best of interleaved rounds. Call it on an idle machine; it
says how long the rounds took. Writes results/train_speed.json and docs/images/train_speed.png. `--plot` only draws.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch

from bochner import tasks

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "train_speed.json"
LENGTHS = (1024, 2048, 4096, 8192, 16384)
LINEAR = ("positive", "relu", "elu", "fastfood_prf", "gmm_prf", "generative_prf", "gmm_rks", "window+positive")
PEERS = ("performer_pytorch", "linformer", "nystromformer", "longformer", "big_bird", "reformer", "fnet")
ATTENTIONS = ("exact", "identity", *LINEAR, *PEERS)
LIMIT = {"exact": 8192}  # beyond it one step takes longer than everything else together


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


def measure(attentions: list[str], rounds: int, budget: float) -> dict[str, dict[str, float]]:
    """Best time of each attention at each length; a round is left out once the budget of seconds is spent."""
    begin = time.perf_counter()
    steps = {(a, n): Step(a, n) for a in attentions for n in LENGTHS if n <= LIMIT.get(a, n)}
    best: dict[tuple[str, int], float] = {}
    done = 0
    for _ in range(rounds + 1):  # the first round warms up
        for cell, step in steps.items():
            seconds = step()
            if done:
                best[cell] = min(best.get(cell, math.inf), seconds)
        done += 1
        if time.perf_counter() - begin > budget and done > 1:
            break
    print(f"{done - 1} rounds of {len(steps)} steps in {time.perf_counter() - begin:.0f} s", flush=True)
    return {a: {str(n): best[a, n] for n in LENGTHS if (a, n) in best} for a in attentions}


def exponent(times: dict[str, float]) -> float:
    n, t = (np.log([float(x) for x in part]) for part in (times.keys(), times.values()))
    return float(np.polyfit(n, t, 1)[0])


def crossover(times: dict[str, float], exact: dict[str, float]) -> int | None:
    """The first length measured at which an attention is faster than exact attention."""
    return next((int(n) for n in exact if n in times and times[n] < exact[n]), None)


def plot(found: dict[str, dict[str, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4), dpi=150, sharey=True)
    for axes, names, title in ((left, LINEAR, "linear attentions"), (right, PEERS, "peers")):
        for i, name in enumerate(names):
            if name in found:
                lengths = [int(n) for n in found[name]]
                axes.plot(lengths, list(found[name].values()), marker="o", markersize=3, color=f"C{i}", label=name)
        for name, style in (("exact", "-"), ("identity", ":")):
            if name in found:
                lengths = [int(n) for n in found[name]]
                axes.plot(lengths, list(found[name].values()), style, color="0.2", linewidth=1.5, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
        axes.set_xlabel("tokens")
        axes.set_title(title, fontsize=9)
        axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("seconds per training step")
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "images" / "train_speed.png")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds after which no further round begins")
    parser.add_argument("--plot", action="store_true")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if not options.plot:
        RESULTS.write_text(json.dumps(measure(list(ATTENTIONS), options.rounds, options.budget), indent=1) + "\n")
    found = json.loads(RESULTS.read_text())
    for name, times in found.items():
        first = crossover(times, found["exact"]) if name != "exact" else None
        shown = " ".join(f"{1000 * t:8.1f}" for t in times.values())
        print(f"{name:18s} {shown} ms   exponent {exponent(times):.2f}   faster than exact from {first}")
    plot(found)
    worst = max((exponent(found[a]), a) for a in LINEAR)
    print(
        f"claim (exponent at most 1.1): {'holds' if worst[0] <= 1.1 else 'FAILS'}; largest {worst[0]:.2f}, {worst[1]}"
    )
    return 0 if worst[0] <= 1.1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
