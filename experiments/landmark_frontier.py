"""The frontier of every map: error of the attention output against the number of features, on the heads of real models.

Beside the maps: averaging the values, and the best approximation of rank m of each attention matrix by itself, which
needs the matrix. Maps are calibrated on some authors and measured on others (AntiBERTy: on some proteins and others).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice, repeat
from typing import Any, NamedTuple

import torch
from _framework import Said, Store, experiment, kept
from _models import Inputs, Sequences, average, calibrated, exact_within, layers_of, mean_error, of_books, through
from _pictures import COLOURS, figure, log_ticks, save
from torch import Tensor

from bochner import demo
from bochner.maps.landmark_fit import Near
from bochner.theory import rank_floor

SIZES = (8, 16, 32, 64, 128, 256)
MAPS: dict[str, tuple[str, dict[str, Any]]] = {
    "FAVOR+": ("positive", {}),
    "calibrated": ("calibrated", {}),
    "landmark": ("landmark", {}),
    "landmark, signed": ("landmark", {"positive": False}),
}


class Case(NamedTuple):
    """A model under one kind of attention: the model with inputs to calibrate and to measure on, and what is exact."""

    load: Callable[[], tuple[Any, list[Inputs], list[Inputs]]]
    near: Near
    title: str


def of_proteins() -> tuple[Any, list[Inputs], list[Inputs]]:
    from further_models import antibodies

    model, batches = antibodies()
    found = list(islice(batches, 20))
    return model, found[:14], found[14:]


MINILM = of_books(demo.load_minilm, 110, 150, (24, 8))
SMOLLM2 = of_books(demo.load_smollm2, 380, 450, (12, 4))
BLOCKS = Near(window=32, sinks=1, window_kind="block")
SLIDING = Near(is_causal=True, window=64, sinks=4, window_kind="sliding")
CASES = {
    "minilm": Case(MINILM, Near(), "MiniLM, 150 tokens"),
    "minilm, window": Case(MINILM, BLOCKS, "MiniLM, blocks of 32, 1 sink"),
    "smollm2": Case(SMOLLM2, Near(is_causal=True), "SmolLM2, 450 tokens"),
    "smollm2, window": Case(SMOLLM2, SLIDING, "SmolLM2, window 64, 4 sinks"),
    "antiberty, window": Case(of_proteins, BLOCKS, "AntiBERTy, blocks of 32, 1 sink"),
}


def best_rank(m: int) -> Any:
    """Attention by the leading singular vectors of its own matrix (bidirectional only)."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        u, s, vh = torch.linalg.svd((q @ k.mT).softmax(-1))
        return (u[..., :m] * s[..., None, :m]) @ vh[..., :m, :] @ v

    return attend


def floor(sequences: Sequences, near: Near, m: int) -> float:
    """Root mean square over heads and texts of the rank floor of the weights."""
    found = []
    for q, k, _ in ((t.float() for t in s) for s in sequences):
        i = torch.arange(k.shape[-2])
        logits = q @ k.repeat_interleave(q.shape[0] // k.shape[0], 0).mT
        found.append(rank_floor(logits.masked_fill(~near.allowed(i, i), -torch.inf).softmax(-1), m, near.far(i, i)))
    return float(torch.cat(found).square().mean().sqrt())


@experiment(
    claim="Ours: on real heads 32 landmark features, fitted without a gradient step, are closer than 256 calibrated "
    "ones. With a window 16 of them leave less than half of the error of the window alone.",
    ours="MiniLM, SmolLM2 and AntiBERTy, six layers each, 4 to 8 held-out texts",
    quick={"cases": ("minilm",), "layers": 1, "sizes": (32, 256)},
    needs=("transformers",),
)
def measure(
    store: Store, cases: tuple[str, ...] = tuple(CASES), layers: int = 6, sizes: tuple[int, ...] = SIZES
) -> None:
    for name in cases:
        measure_case(store, name, layers, sizes)


def measure_case(store: Store, name: str, layers: int, sizes: tuple[int, ...]) -> None:
    case, table = CASES[name], store.table(name)
    model, *inputs = case.load()
    seen, unseen = (layers_of(model, some, layers) for some in inputs)
    near = case.near

    def mean(attentions: Any) -> float:
        return mean_error(attentions, unseen, near.is_causal)

    def note(label: str, m: int | str, error: Callable[[], float]) -> None:
        store.cell(str(m), error, table.setdefault(label, {}))

    def of_map(kind: str, options: dict[str, Any], m: int) -> float:
        return mean(through(calibrated(kind, m, s, near, i, **options), near) for i, s in enumerate(seen))

    note("uniform", "all", lambda: mean(repeat(average(near.is_causal))))
    if near.window is not None:
        note("window alone", "all", lambda: mean(repeat(exact_within(near))))
    for m in sizes:
        for label, (kind, options) in MAPS.items():
            note(label, m, lambda k=kind, o=options, m=m: of_map(k, o, m))
        if near == Near():
            note("best of rank m", m, lambda m=m: mean(repeat(best_rank(m))))
        note("rank floor of the weights", m, lambda m=m: sum(floor(u[:2], near, m) for u in unseen) / len(unseen))


def judge(found: Any) -> Said:
    plain, near = found["minilm"], found.get("minilm, window")
    fitted, known = plain["landmark"]["32"], plain["calibrated"]["256"]
    told, holds = f"landmark m = 32 {fitted:.2f}, calibrated m = 256 {known:.2f}", fitted < known
    if near is not None:
        both, alone = near["landmark, signed"]["16"], near["window alone"]["all"]
        told += f"; with a window, signed landmark m = 16 {both:.3f}, the window alone {alone:.3f}"
        holds = holds and both < 0.5 * alone
    return Said(f"{told}.", kept(holds), "the order is reversed")


def draw(found: Any) -> None:
    shown = [name for name in CASES if name in found]
    fig, axes = figure(len(shown), figsize=(3.3 * len(shown), 3.4), squeeze=False)
    styles = dict(zip(MAPS, zip((COLOURS[1], COLOURS[0], COLOURS[2], COLOURS[3]), "oDs^", strict=True), strict=True))
    for ax, name in zip(axes[0], shown, strict=True):
        for label, (colour, marker) in {**styles, "best of rank m": ("0.35", None)}.items():
            row = {int(m): min(x, 1.15) for m, x in found[name].get(label, {}).items()}
            ax.plot(
                list(row),
                list(row.values()),
                ":" if marker is None else "-",
                color=colour,
                marker=marker,
                ms=3.5,
                label=label,
            )
        for label in ("uniform", "window alone"):
            if label in found[name] and found[name][label]["all"] < 1.2:
                ax.axhline(found[name][label]["all"], color="0.6", linestyle="--", linewidth=1)
                ax.text(SIZES[0], found[name][label]["all"], f" {label}", color="0.4", fontsize=7, va="bottom")
        log_ticks(ax, SIZES, base=2)
        ax.set_ylim(bottom=0)
        ax.set_title(CASES[name].title, fontsize=9)
        ax.set_xlabel("features per head, m")
    axes[0][0].set_ylabel("relative error of attention output")
    axes[0][0].legend(frameon=False, fontsize=7)
    save(fig, "landmark_frontier")
    if "smollm2, window" in found:
        draw_home(found)


def draw_home(found: Any) -> None:
    """The picture of the README and of the home page, in large type."""
    fig, axes = figure(2, figsize=(9, 4.4))
    names = {"FAVOR+": COLOURS[1], "calibrated": COLOURS[4], "landmark": COLOURS[0]}
    panels = {"minilm": "a kernel alone, sentence encoder", "smollm2, window": "with a window, decoder"}
    for ax, (case, title) in zip(axes, panels.items(), strict=True):
        rows = found[case]
        for name, colour in names.items():
            row = {int(m): x for m, x in rows[name].items()}
            ax.plot(list(row), list(row.values()), "o-", color=colour, linewidth=2.5, markersize=7)
        ax.axhline(rows["window alone" if "window alone" in rows else "uniform"]["all"], color="0.55", linestyle="--")
        log_ticks(ax, row, base=2)
        ax.tick_params(labelsize=14)
        ax.set_ylim(0, 1.2 if case == "minilm" else 0.4)
        ax.set_title(title, fontsize=15)
        ax.set_xlabel("features per head", fontsize=15)
    axes[0].set_ylabel("error of attention", fontsize=15)
    labels = (
        (0, 14, 1.09, "FAVOR+", COLOURS[1]),
        (0, 70, 0.74, "calibrated", COLOURS[4]),
        (0, 32, 0.26, "landmark", COLOURS[0]),
        (0, 8, 0.76, "averaging", "0.4"),
        (1, 16, 0.315, "calibrated", COLOURS[4]),
        (1, 16, 0.245, "FAVOR+ or no kernel", COLOURS[1]),
        (1, 16, 0.14, "landmark", COLOURS[0]),
    )
    for place, x, y, text, colour in labels:
        axes[place].text(x, y, text, color=colour, fontsize=15, weight="bold")
    save(fig, "frontier")
