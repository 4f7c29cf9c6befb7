"""Theorem 1 of *On Learning the Transformer Kernel*: a transformer with Gaussian attention can be any Turing machine.

The construction of the proof, run: a machine's table becomes the weights of one encoder and two decoder layers, and
the decoder's outputs are compared with the machine step by step. The proof uses hard attention; here the same weights
also run with the Gaussian kernel itself, at the precision that the number of steps needs, and with random Fourier
features, which is what the paper's models compute.
"""

from __future__ import annotations

import warnings
from typing import Any

from _framework import Said, Store, experiment, graded
from _pictures import COLOURS, figure, save
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


@experiment(
    claim="Transformers with Gaussian (GMM-RKS) attention and positional embeddings are Turing complete.",
    items=("004 Theorem 1",),
    paper="a proof",
    ours="its construction run on two machines, up to some hundred steps",
    quick={"sizes": (2, 4, 6)},
)
def measure(store: Store, sizes: tuple[int, ...] = (2, 4, 6, 8, 10, 12)) -> None:
    words = {f"a^{n} b^{n}": (BALANCED, "<" + "a" * n + "b" * n) for n in sizes} | MACHINES
    found = store.figures
    found["hard"] = {name: correct_steps(machine, word, hard) for name, (machine, word) in words.items()}
    machine, word = words[f"a^{sizes[-1]} b^{sizes[-1]}"]
    found["total"] = found["hard"][f"a^{sizes[-1]} b^{sizes[-1]}"][1]
    found["kernel"] = {p: correct_steps(machine, word, gaussian(p))[0] for p in PRECISIONS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that normalisers are near zero is what is measured
        tries = [(p, seed) for p in (1.0, 10.0, 100.0) for seed in range(3)]
        found["features"] = {
            m: max(correct_steps(machine, word, features(p, m, seed))[0] for p, seed in tries) for m in FEATURES
        }


def judge(found: Any) -> Said:
    exact = all(a == t for a, t in found["hard"].values())
    enough = min((float(p) for p, s in found["kernel"].items() if s == found["total"]), default=None)
    good = exact and enough is not None
    return Said(
        f"hard attention follows {len(found['hard'])} runs of two machines exactly, {found['total']} steps in the "
        f"longest; the Gaussian kernel follows it from a precision of {enough:.0e}; random features with up to "
        f"{max(map(int, found['features'])):,} frequencies follow {max(found['features'].values())} steps."
        if good
        else f"hard attention: {found['hard']}; kernel: {found['kernel']}.",
        graded(False, good),
        "the proof is about hard attention. A kernel of fixed precision follows a bounded number of steps, for the gap "
        "between visits falls with the cube of time. Random features do not even copy the input",
    )


def draw(found: Any) -> None:
    fig, ax = figure(figsize=(6.4, 3.6))
    precisions, total = [float(p) for p in found["kernel"]], found["total"]
    best = max(found["features"].values())
    ax.plot(precisions, list(found["kernel"].values()), "o-", label="Gaussian kernel")
    ax.axhline(total, color=COLOURS[2], linestyle="--")
    ax.text(1, total, "hard attention: all steps", va="bottom", color=COLOURS[2])
    ax.axhline(best, color=COLOURS[1])
    told = f"features, up to {max(map(int, found['features'])):,}"
    ax.text(precisions[-1], best + 12, told, ha="right", color=COLOURS[1])
    ax.text(3 * precisions[-5], total / 2, " Gaussian kernel", color=COLOURS[0])
    ax.set(xscale="log", xlabel="precision of the kernel", ylabel="steps followed", ylim=(0, 1.15 * total))
    save(fig, "turing_machine")
