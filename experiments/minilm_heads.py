"""How well feature maps approximate the attention of a real model: all-MiniLM-L6, 72 heads, d = 32.

Statistics come from one set of paragraphs, errors from another.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

from _framework import Said, Store, experiment, kept, table
from _models import NOTHING_EXACT, average, calibrated, layers_of, mean_error, of_books, through
from _pictures import COLOURS, figure, log_ticks, save

from bochner.demo import load_minilm

SIZES = (16, 32, 64, 128, 256, 512, 1024)
MAPS = {"positive": "positive (FAVOR+)", "optimal": "optimal (FAVOR++)", "calibrated": "calibrated"}


@experiment(
    claim="Ours: plain positive features hardly beat averaging the values on real heads; 64 calibrated features are "
    "closer than 1,024 plain ones.",
    ours="72 heads, 16 held-out paragraphs of up to 150 tokens, two seeds",
    quick={"sizes": (64, 1024), "seeds": 1, "texts": (24, 8)},
    needs=("transformers",),
)
def measure(store: Store, sizes: tuple[int, ...] = SIZES, seeds: int = 2, texts: tuple[int, int] = (24, 16)) -> None:
    model, *inputs = of_books(load_minilm, 110, 150, texts)()
    seen, unseen = (layers_of(model, some) for some in inputs)

    def error(name: str, m: int) -> float:
        found = []
        for seed in range(seeds):
            maps = [calibrated(name, m, s, NOTHING_EXACT, 100 * seed + i) for i, s in enumerate(seen)]
            found.append(mean_error(map(through, maps), unseen))
        return sum(found) / seeds

    store.figures["uniform"] = mean_error(repeat(average()), unseen)
    for name in MAPS:
        for m in sizes:
            store.cell(str(m), lambda n=name, m=m: error(n, m), store.table(name))


def judge(found: Any) -> Said:
    last = max(found["positive"], key=int)
    told = {n: {f"m = {m}": f"{found[n][m]:.2f}" for m in ("64", last)} for n in MAPS if n in found}
    return Said(
        f"Error of the output; averaging the values {found['uniform']:.2f}:" + table(told, "map"),
        kept(found["calibrated"]["64"] < found["positive"][last]),
        "calibrated features are not closer",
    )


def draw(found: Any) -> None:
    fig, ax = figure(figsize=(6.4, 3.6))
    sizes = [int(m) for m in found["positive"]]
    ax.axhline(found["uniform"], color="0.5", linestyle="--", linewidth=1)
    ax.text(
        sizes[-1], found["uniform"] + 0.012, "averaging the values", color="0.4", fontsize=8, va="bottom", ha="right"
    )
    styles = zip(MAPS.items(), (COLOURS[1], COLOURS[4], COLOURS[0]), "osD", strict=True)
    for (name, label), colour, marker in styles:
        ax.plot(sizes, list(found[name].values()), color=colour, marker=marker, markersize=4, label=label)
    log_ticks(ax, sizes, base=2)
    ax.set(ylim=(0, 1.2), xlabel="features per head, m", ylabel="relative error of attention output")
    ax.set_title("all-MiniLM-L6: mean over its 72 heads, held-out text", fontsize=9)
    ax.legend(frameon=False, fontsize=8)
    save(fig, "minilm_heads")
