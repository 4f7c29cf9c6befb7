"""Maps that are fitted against moments, which are not: error of the attention output against time, on real heads.

Maps are fitted on some authors and measured on others (in domain) and on Python's language reference (out of domain).
In a decoder several groups need anchors, which are fitted as well. Times are of 2,048 tokens on one thread, over those
of exact attention in the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from _framework import Said, Store, experiment, kept, table
from _models import Sequences, calibrated, exact_within, layers_of, mean_error, of_books, through, tokenised
from _pictures import COLOURS, figure, save
from torch import Tensor

from bochner import FeatureMap, data, demo, feature_map
from bochner._timing import best_times
from bochner.maps.landmark_fit import Near

LENGTH = 2048  # of the sequences that are timed
NOTHING, EXACT = "nothing", "exact"
DOMAINS = ("in domain", "out of domain")


class Method(NamedTuple):
    """A map of one size: its name, the size, and the options that say it."""

    kind: str
    size: int
    options: dict[str, Any]


METHODS = {
    "FAVOR+ 256": Method("positive", 256, {}),
    "calibrated 128": Method("calibrated", 128, {}),
    **{f"landmark {m}": Method("landmark", m, {}) for m in (16, 64)},
    **{f"moments {g}": Method("moments", g, {"num_groups": g}) for g in (1, 4, 16)},
}


class Model(NamedTuple):
    """How it is loaded, words of a text that are enough for the tokens, and how many texts maps are fitted on."""

    load: Callable[[], tuple[Any, Any]]
    words: int
    tokens: int
    fitted_on: int


MINILM = Model(demo.load_minilm, 450, 500, 16)
SMOLLM2 = Model(demo.load_smollm2, 380, 450, 12)
# The model, what is exact, and a title.
CASES = {
    "minilm": (MINILM, Near(), "MiniLM, no window"),
    "minilm, window": (MINILM, Near(window=32, sinks=1), "MiniLM, blocks of 32, 1 sink"),
    "smollm2": (SMOLLM2, Near(is_causal=True), "SmolLM2, no window"),
    "smollm2, window": (SMOLLM2, Near(is_causal=True, window=64, sinks=4), "SmolLM2, blocks of 64, 4 sinks"),
}


class Heads(NamedTuple):
    """Queries, keys and values of some layers: those that maps are fitted on, and those of each domain."""

    seen: list[Sequences]
    unseen: dict[str, list[Sequences]]


def read(model: Model, layers: int, texts: int) -> Heads:
    loaded = model.load()
    network, seen, books = of_books(lambda: loaded, model.words, model.tokens, (model.fitted_on, texts))()
    reference = data.paragraphs("heldout", texts, words=model.words, source="python")
    sets = (seen, books, tokenised(loaded[1], reference, model.tokens))
    fitted_on, *unseen = (layers_of(network, some, layers) for some in sets)
    return Heads(fitted_on, dict(zip(DOMAINS, unseen, strict=True)))


def fitted(method: Method, seen: Sequences, near: Near, seed: int) -> FeatureMap:
    """The map of one layer; moments of a sequence that is seen as a whole are fitted to nothing."""
    if method.kind != "moments" or (near.is_causal and method.size > 1):
        return calibrated(method.kind, method.size, seen, near, seed, **method.options)
    g, _, d = seen[0][1].shape
    return feature_map("moments", dim=d, num_heads=g, seed=seed, **method.options)


@torch.no_grad()
def times(maps: dict[str, FeatureMap], sequences: Sequences, near: Near) -> dict[str, float]:
    """Seconds of one call by each map, of the window alone and of exact attention, for the heads of a layer."""
    q, k, v = (torch.cat([s[i] for s in sequences], dim=1)[None].float() for i in range(3))
    more = -(-LENGTH // q.shape[-2])
    q, k, v = (t.repeat(1, 1, more, 1)[..., :LENGTH, :].contiguous() for t in (q, k, v))

    def exact() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, scale=1.0, is_causal=near.is_causal, enable_gqa=True
        )

    calls: dict[str, Callable[[], Tensor]] = {EXACT: exact}
    if near.window is not None:
        calls[NOTHING] = partial(exact_within(near), q, k, v)
    return best_times(calls | {name: partial(through(phi, near), q, k, v) for name, phi in maps.items()})


@experiment(
    claim="Ours: in an encoder with a window and out of domain, moments of 4 groups, fitted to nothing, are closer "
    "than 128 calibrated features. They are closer than 64 landmark features or within 10 % of them.",
    ours="MiniLM and SmolLM2, three layers each, 6 texts of each domain",
    quick={"cases": ("minilm, window",), "layers": 1, "texts": 2},
    needs=("transformers",),
)
def measure(store: Store, cases: tuple[str, ...] = tuple(CASES), layers: int = 3, texts: int = 6) -> None:
    last: tuple[Model, Heads] | None = None
    for name in cases:
        model, near, _ = CASES[name]
        if last is None or last[0] != model:
            last = (model, read(model, layers, texts))
        measure_case(store, name, last[1], near)


def measure_case(store: Store, case: str, heads: Heads, near: Near) -> None:
    table, middle = store.table(case), len(heads.seen) // 2
    maps: dict[str, FeatureMap] = {}

    def errors(attentions: Any) -> None:
        made = list(attentions)
        for domain in DOMAINS:
            table.setdefault(domain, {})[name] = mean_error(made, heads.unseen[domain], near.is_causal)
        print(f"{case}, {name}: " + ", ".join(f"{d} {table[d][name]:.3f}" for d in DOMAINS), flush=True)
        store.save()

    for name in (*([NOTHING] if near.window is not None else []), *METHODS):
        if name in table.get(DOMAINS[1], {}) and "seconds" in table:
            continue
        if name == NOTHING:
            errors([a for a, _ in zip(repeat(exact_within(near)), heads.seen, strict=False)])
            continue
        of_layers = [fitted(METHODS[name], seen, near, layer) for layer, seen in enumerate(heads.seen)]
        maps[name] = of_layers[middle]
        errors(through(phi, near) for phi in of_layers)
    if "seconds" not in table:
        table["seconds"] = times(maps, heads.unseen[DOMAINS[0]][middle], near)
        store.save()


def judge(found: Any) -> Said:
    errors, seconds = (found["minilm, window"][key] for key in ("out of domain", "seconds"))
    names = ("moments 1", "moments 4", "calibrated 128", "landmark 64")
    told = {n: {"error": f"{errors[n]:.3f}", "time": f"{seconds[n] / seconds[EXACT]:.2f}"} for n in names}
    _, moments, known, landmarks = (errors[name] for name in names)
    return Said(
        "MiniLM with a window, out of domain; time at 2,048 tokens over exact attention:" + table(told),
        kept(moments < known and moments <= 1.1 * landmarks),
        "features that are fitted are closer",
    )


def draw(found: Any) -> None:
    shown = [name for name in CASES if "seconds" in found.get(name, {})]
    fig, axes = figure(len(shown), figsize=(3.6 * len(shown), 3.9), squeeze=False)
    families = ("FAVOR+", "calibrated", "landmark", "moments", NOTHING)
    styles = dict(zip(families, zip((*COLOURS[1:2], *COLOURS[0:1], *COLOURS[2:5]), "oDs^X", strict=True), strict=True))
    for ax, case in zip(axes[0], shown, strict=True):
        seconds = found[case]["seconds"]
        time = {name: s / seconds[EXACT] for name, s in seconds.items() if name != EXACT}
        for family, (colour, marker) in styles.items():
            names = [n for n in time if n.split()[0] == family]
            for domain in DOMAINS:
                face, line = (colour, "-") if domain == DOMAINS[0] else ("white", ":")
                label = f"{family}, {domain}" if case == shown[0] and names else None
                values = [found[case][domain][n] for n in names]
                ax.plot(
                    [time[n] for n in names], values, line, color=colour, marker=marker, mfc=face, ms=5.5, label=label
                )
        ax.axvline(1, color="0.8", linewidth=1, zorder=0)
        ax.set_xscale("log")
        ax.set_xticks([0.1, 0.2, 0.5, 1, 2, 5], ["0.1", "0.2", "0.5", "1", "2", "5"])
        ax.minorticks_off()
        ax.set_ylim(bottom=0)
        ax.set_title(CASES[case][2], fontsize=9)
        ax.set_xlabel("time over exact attention, 2,048 tokens", fontsize=8)
    axes[0][0].set_ylabel("relative error of attention output")
    fig.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=7)
    save(fig, "moments_frontier")
