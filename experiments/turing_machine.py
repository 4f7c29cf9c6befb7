"""Theorem 1 of *On Learning the Transformer Kernel*: a transformer with Gaussian attention can be any Turing machine.

The construction of the proof, run: a machine's table becomes the weights of one encoder and two decoder layers, and
the decoder's outputs are compared with the machine step by step. The proof uses hard attention; here the same weights
also run with the Gaussian kernel itself, at the precision that the number of steps needs, and with random Fourier
features, which is what the paper's models compute.

    python experiments/turing_machine.py [--quick]
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

from _gallery import COLOURS, figure, finish, save
from _turing import BALANCED, MACHINES, Attention, Machine, Transformer, features, gaussian, hard, simulate

PRECISIONS = [10.0**e for e in range(0, 12)]
FEATURES = (256, 16384)


def correct_steps(machine: Machine, word: str, attention: Attention, limit: int = 5000) -> tuple[int, int]:
    """Steps before the first that differs from the machine, and the steps the machine makes."""
    truth = list(simulate(machine, word, limit))
    agreed = 0
    for said, real in zip(Transformer(machine, attention).run(word, len(truth)), truth, strict=False):
        if said != real:
            break
        agreed += 1
    return agreed, len(truth)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    sizes = (2, 4, 6) if options.quick else (2, 4, 6, 8, 10, 12)
    words = {f"a^{n} b^{n}": (BALANCED, "<" + "a" * n + "b" * n) for n in sizes} | MACHINES
    hard_steps = {name: correct_steps(machine, word, hard) for name, (machine, word) in words.items()}
    for name, (agreed, total) in hard_steps.items():
        print(f"hard attention, {name}: {agreed} of {total} steps")
    machine, word = words[f"a^{sizes[-1]} b^{sizes[-1]}"]
    kernel = {p: correct_steps(machine, word, gaussian(p))[0] for p in PRECISIONS}
    total = hard_steps[f"a^{sizes[-1]} b^{sizes[-1]}"][1]
    print(f"Gaussian kernel, correct steps of {total} by precision: {kernel}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that normalisers are near zero is what is measured
        tries = [(p, seed) for p in (1.0, 10.0, 100.0) for seed in range(3)]
        random = {m: max(correct_steps(machine, word, features(p, m, seed))[0] for p, seed in tries) for m in FEATURES}
    print(f"random features, the most correct steps: {random}")
    draw(kernel, random, total)
    result: dict[str, Any] = {"hard": hard_steps, "kernel": kernel, "features": random, "total": total}
    exact = all(a == t for a, t in hard_steps.values())
    enough = min((p for p, s in kernel.items() if s == total), default=None)
    ours = (
        f"hard attention follows {len(hard_steps)} runs of two machines exactly, {total} steps in the longest; the "
        f"Gaussian kernel follows it from a precision of {enough:.0e} on; random features with up to {max(FEATURES):,} "
        f"frequencies follow {max(random.values())} steps."
        if exact and enough
        else f"hard attention: {hard_steps}; kernel: {kernel}."
    )
    return finish(
        "turing_machine",
        result,
        claim="Transformers with Gaussian (GMM-RKS) attention and positional embeddings are Turing complete.",
        ours=ours,
        verdict="partly" if exact and enough else "not",
        why="the proof is about hard attention: a kernel of fixed precision follows a bounded number of steps, for the "
        "gap between visits falls with the cube of time, and random features do not even copy the input",
    )


def draw(kernel: dict[float, int], random: dict[int, int], total: int) -> None:
    fig, ax = figure(figsize=(6.4, 3.6))
    ax.plot(list(kernel), list(kernel.values()), "o-", label="Gaussian kernel")
    ax.axhline(total, color=COLOURS[2], linestyle="--")
    ax.text(1, total, "hard attention: all steps", va="bottom", color=COLOURS[2])
    ax.axhline(max(random.values()), color=COLOURS[1])
    last = list(kernel)[-1]
    ax.text(last, max(random.values()) + 12, f"features, up to {max(random):,}", ha="right", color=COLOURS[1])
    ax.text(3 * list(kernel)[-5], total / 2, " Gaussian kernel", color=COLOURS[0])
    ax.set(xscale="log", xlabel="precision of the kernel", ylabel="steps followed", ylim=(0, 1.15 * total))
    save(fig, "turing_machine")


if __name__ == "__main__":
    raise SystemExit(main())
