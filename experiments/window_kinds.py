"""Block windows against sliding ones of the same length, on real models: an encoder and a decoder, untrained.

The exact keys of a block window contain those of the sliding window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from _framework import Said, Store, experiment, kept
from _models import embed
from _pictures import COLOURS, figure, save

from bochner import Calibration, Recipe, convert, data
from bochner.demo import load_minilm, load_smollm2

KINDS = ("sliding", "block")
ENCODER = {"alone": None, "calibrated m=64": ("calibrated", 64), "landmark m=16": ("landmark", 16)}
ENCODER |= {"landmark m=64": ("landmark", 64)}
DECODER = {"alone": (None, 0.0), "landmark m=64": (("landmark", 64), 0.0), "alone, 10 % exact heads": (None, 0.1)}
DECODER |= {"landmark m=64, 10 % exact heads": (("landmark", 64), 0.1)}


def recipe(chosen: tuple[str, int] | None, **near: Any) -> Recipe:
    return Recipe(*(chosen or (None,)), **near)


def encoder(texts: int, row: Callable[..., None], names: Iterable[str] = ENCODER) -> None:
    """Window 32, one sink; texts of 150 to 256 tokens."""
    from bochner.hf.evaluate import embedding_quality

    model, tokenizer = load_minilm()
    seen, unseen = (data.paragraphs(split, texts, words=220) for split in ("calibration", "heldout"))
    exact = embed(model, tokenizer, unseen)
    for name in names:
        chosen = ENCODER[name]
        for kind in KINDS:

            def measure(chosen: Any = chosen, kind: str = kind) -> dict[str, float]:
                chosen_recipe = recipe(chosen, window=32, sinks=1, window_kind=kind)
                conversion = convert(model, chosen_recipe, Calibration(seen, tokenizer))
                quality = embedding_quality(exact, embed(model, tokenizer, unseen))
                conversion.revert()
                return quality.figures

            row("all-MiniLM-L6", name, kind, measure)


def decoder(texts: int, row: Callable[..., None]) -> None:
    """Window 64, four sinks; texts of 450 tokens."""
    from _models import perplexity, recall

    model, tokenizer = load_smollm2()
    seen = data.paragraphs("calibration", 6, words=250)
    calibration = Calibration(seen, tokenizer, max_length=320, batch_size=1)
    unseen = data.paragraphs("heldout", max(2, texts // 4), words=350)
    pairs = data.paragraphs("heldout", max(2, texts // 4) + 1, words=130)[1:]
    exact = perplexity(model, tokenizer, unseen, max_length=450)
    for name, (chosen, share) in DECODER.items():
        for kind in KINDS:

            def measure(chosen: Any = chosen, share: float = share, kind: str = kind) -> dict[str, float]:
                chosen_recipe = recipe(chosen, window=64, sinks=4, window_kind=kind, exact_heads=share)
                conversion = convert(model, chosen_recipe, calibration)
                ratio = perplexity(model, tokenizer, unseen, max_length=450) / exact
                found = {"perplexity_ratio": ratio, "recall": recall(model, tokenizer, pairs)}
                conversion.revert()
                return found

            row("SmolLM2-135M", name, kind, measure)


@experiment(
    claim="Ours: block windows keep at least as much as sliding ones of the same length. The cosine of MiniLM's "
    "embeddings is not lower for any map, the perplexity ratio of SmolLM2 not higher.",
    ours="16 texts; windows of 32 and 64",
    quick={"texts": 4, "names": ("alone", "landmark m=16"), "models": ("encoder",)},
    needs=("transformers",),
)
def measure(
    store: Store,
    texts: int = 16,
    names: tuple[str, ...] = tuple(ENCODER),
    models: tuple[str, ...] = ("encoder", "decoder"),
) -> None:
    rows: list[dict[str, Any]] = store.figures.setdefault("rows", [])

    def row(model: str, name: str, kind: str, measured: Callable[[], dict[str, float]]) -> None:
        if any((r["model"], r["beside"], r["kind"]) == (model, name, kind) for r in rows):
            return
        rows.append({"model": model, "beside": name, "kind": kind, **measured()})
        store.save()
        print(rows[-1], flush=True)

    if "encoder" in models:
        encoder(texts, row, names)
    if "decoder" in models:
        decoder(texts, row)


def judge(found: Any) -> Said:
    pairs: dict[tuple[str, str], dict[str, float]] = {}
    for r in found["rows"]:
        score = r["cosine"] if "cosine" in r else -r["perplexity_ratio"]
        pairs.setdefault((r["model"], r["beside"]), {})[r["kind"]] = score
    whole = {k: v for k, v in pairs.items() if len(v) == 2}
    worse = [f"{model}, {other}" for (model, other), v in whole.items() if v["block"] < v["sliding"]]
    return Said(
        f"blocks are no worse in {len(whole) - len(worse)} of {len(whole)} cases.",
        kept(not worse),
        f"worse: {'; '.join(worse)}",
    )


def draw(found: Any) -> None:
    rows_of = found["rows"]
    fig, axes = figure(2, figsize=(11, 3.2))
    panels = (("cosine", "all-MiniLM-L6: cosine to the original"), ("perplexity_ratio", "SmolLM2: perplexity ratio"))
    for ax, (key, title) in zip(axes, panels, strict=True):
        besides = list(dict.fromkeys(r["beside"] for r in rows_of if key in r))[::-1]
        for kind, colour, marker in (("sliding", COLOURS[1], "o"), ("block", COLOURS[0], "s")):
            rows = [r for r in rows_of if key in r and r["kind"] == kind]
            places = [besides.index(r["beside"]) for r in rows]
            ax.plot([r[key] for r in rows], places, marker, color=colour, label=f"{kind} window")
        ax.set_yticks(range(len(besides)), besides, fontsize=8)
        ax.set_ylim(-0.5, len(besides) - 0.5)
        ax.set_title(title, fontsize=10)
        ax.grid(axis="x", color="0.9")
    axes[0].legend(fontsize=8)
    save(fig, "window_kinds")
