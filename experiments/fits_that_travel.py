"""Maps that are fitted to books alone, or to books, newspaper reports and manuals, on texts of these and other kinds.

MiniLM with blocks of 32 tokens and one sink exact, passages of about 220 words. Every fit takes as many passages. The
Python reference and film reviews are of no kind that anything is fitted to. The drift is the alarm's distance between a
passage and the calibration passages, in spreads, the mean of the six layers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import torch
from _framework import Said, Store, experiment, kept, named, table
from _models import embed

from bochner import Calibration, Conversion, Recipe, convert, data, revert
from bochner.demo import load_minilm
from bochner.hf import drift
from bochner.hf.calls import Call
from bochner.hf.evaluate import embedding_quality
from bochner.hf.observe import recording

BOOKS, SEVERAL = "books", "books, newspaper, manual"
FITS = {BOOKS: ("books",), SEVERAL: ("books", "newspaper", "manual")}
MAPS: dict[str, tuple[str | None, int | None, dict[str, Any]]] = {
    "landmark 64": ("landmark", 64, {}),
    "landmark 16": ("landmark", 16, {}),
    "calibrated 128": ("calibrated", 128, {}),
}
UNFITTED = {"no kernel": (None, None, {}), "moments": ("moments", None, {})}
UNFITTED["moments of 4 groups"] = ("moments", None, {"num_groups": 4})
DRAWN = ("positive", 16, {})  # for the drift, which does not depend on the map
SEEN = ("books, other authors", "newspaper, other reports", "manual, other pages")
UNSEEN = ("Python reference", "film reviews")
TOKENS = (256, 512, 1024, 2048, 4096, 8192)  # that landmark maps are fitted to, of books
WORDS = 220


def cut(texts: list[str], count: int) -> list[str]:
    """Passages of WORDS words from all over some texts, as many of each as of the others."""
    share = -(-count // len(texts))
    found = []
    for text in texts:
        words = text.split()
        pieces = [" ".join(words[i : i + WORDS]) for i in range(0, len(words) - WORDS, WORDS)]
        found.append(pieces[:: max(1, len(pieces) // share)][:share])
    return [p[i] for i in range(share) for p in found if i < len(p)][:count]


def reports(numbers: range) -> list[str]:
    """Newspaper reports of the Brown corpus without their tags."""
    texts = [(data.fetch("brown", quiet=True) / f"ca{i:02}").read_text(encoding="utf-8") for i in numbers]
    return [re.sub(r"\s+", " ", re.sub(r"/[^\s/]+(?=\s|$)", "", text)) for text in texts]


def manuals(odd: bool) -> list[str]:
    """Every other page of Perl's manual, the long ones."""
    pages = sorted(data.fetch("manpages_perl", quiet=True).parent.rglob("perl*.pod"))
    return [page.read_text(encoding="utf-8", errors="replace") for page in pages[odd::2]][:24]


def reviews() -> list[str]:
    """The film reviews that are long enough, of all over the set."""
    found = json.loads(data.fetch("imdb", quiet=True).read_text(encoding="utf-8"))
    texts = [x["t"].replace("<br />", " ") for x in found[:: len(found) // 200]]
    return [text for text in texts if len(text.split()) > WORDS]


def calibration(kind: str, count: int) -> list[str]:
    if kind == "books":
        return data.paragraphs("calibration", count, words=WORDS, source="books")
    return cut(reports(range(1, 23)) if kind == "newspaper" else manuals(False), count)


def heldout(kind: str, count: int) -> list[str]:
    makers: dict[str, Callable[[], list[str]]] = {
        SEEN[0]: lambda: data.paragraphs("heldout", count, words=WORDS, source="books"),
        SEEN[1]: lambda: cut(reports(range(23, 45)), count),
        SEEN[2]: lambda: cut(manuals(True), count),
        UNSEEN[0]: lambda: data.paragraphs("heldout", count, words=WORDS, source="python"),
        UNSEEN[1]: lambda: cut(reviews(), count),
    }
    return makers[kind]()


def measured(model: Any, tokenizer: Any, kinds: dict[str, tuple[list[str], Any]]) -> dict[str, dict[str, float]]:
    """The converted model on each kind of text: what its embeddings lose, and the mean error of its heads."""
    found, conversion = {}, Conversion.of(model)
    for kind, (texts, original) in kinds.items():
        quality = embedding_quality(original, embed(model, tokenizer, texts)).figures
        errors = [e.mean().item() for e in conversion.errors(Calibration(texts[:8], tokenizer)).values()]
        row = {"lost": 1 - quality["cosine"], "rank_correlation": quality["rank_correlation"]}
        found[kind] = {**row, "error": sum(errors) / len(errors)}
    return found


def drifted(model: Any, tokenizer: Any, kinds: dict[str, tuple[list[str], Any]]) -> dict[str, dict[str, float]]:
    """How far each kind of text lies from the calibration passages: the mean over the layers, and who is warned of."""
    found, plans = {}, {layer.name: layer for layer in Conversion.of(model).plan.layers}
    for kind, (texts, _) in kinds.items():
        distances: list[float] = []

        def look(name: str, call: Call, distances: list[float] = distances) -> None:
            far = drift.distance(plans[name], call)
            distances += [] if far is None else [far]

        with recording(model, look):
            embed(model, tokenizer, texts, batch_size=1)
        mean = torch.tensor(distances).view(-1, len(plans)).mean(1)
        found[kind] = {"distance": mean.mean().item(), "warned": (mean > drift.FAR_TOGETHER).float().mean().item()}
    return found


@experiment(
    claim="Ours: landmark maps that are fitted to three kinds of text lose less on kinds that they have not seen than "
    "maps fitted to books. Both are fitted to as many passages. Moments, which are fitted to nothing, lose more.",
    ours="all-MiniLM-L6, window 32 and a sink, 48 calibration passages, 16 passages of each of five kinds",
    quick="the claim is about a pretrained model",
    needs=("transformers",),
)
def measure(store: Store, passages: int = 48, texts: int = 16) -> None:
    model, tokenizer = load_minilm()
    kinds = {kind: heldout(kind, texts) for kind in (*SEEN, *UNSEEN)}
    every = {kind: (found, embed(model, tokenizer, found)) for kind, found in kinds.items()}

    def converted(chosen: Any, calibrated: list[str], look: Callable[..., Any] = measured) -> dict[str, Any]:
        name, m, options = chosen
        recipe = Recipe(name, m, window=32, sinks=1, options=options)
        convert(model, recipe, Calibration(calibrated, tokenizer) if calibrated else None)
        try:
            found: dict[str, Any] = look(model, tokenizer, every)
            return found
        finally:
            revert(model)

    for name, chosen in UNFITTED.items():
        store.cell(name, lambda c=chosen: converted(c, []), store.table("nothing"))
    for fit, sources in FITS.items():
        own = [calibration(kind, passages // len(sources)) for kind in sources]
        mixed = [text for several in zip(*own, strict=True) for text in several]
        for name, chosen in MAPS.items():
            store.cell(name, lambda c=chosen, t=mixed: converted(c, t), store.table(fit))
        store.cell(fit, lambda t=mixed: converted(DRAWN, t, drifted), store.table("drift"))
    books = calibration("books", 4 * passages)
    for tokens in TOKENS:
        few = books[: max(1, tokens // 256)]
        store.cell(str(tokens), lambda f=few: converted(MAPS["landmark 64"], f), store.table("tokens"))


def mean(found: Any, fit: str, name: str, kinds: tuple[str, ...], what: str = "lost") -> float:
    return sum(float(found[fit][name][kind][what]) for kind in kinds) / len(kinds)


def judge(found: Any) -> Said:
    one, four = (mean(found, "nothing", name, UNSEEN) for name in ("moments", "moments of 4 groups"))
    few, many = (mean(found, "tokens", str(n), (*SEEN, *UNSEEN)) for n in (2048, max(TOKENS)))
    lost = {
        f"landmark 64 fitted to {told}": (
            mean(found, fit, "landmark 64", UNSEEN),
            found[fit]["landmark 64"][SEEN[2]]["lost"],
        )
        for fit, told in ((BOOKS, "books"), (SEVERAL, "three kinds"))
    }
    books, several = (unseen for unseen, _ in lost.values())
    rows = {name: {"unseen kinds": f"{x:.4f}", "manuals": f"{y:.4f}"} for name, (x, y) in lost.items()}
    rows |= {"moments": {"unseen kinds": f"{one:.4f}", "manuals": "not shown"}}
    rows |= {"moments of 4 groups": {"unseen kinds": f"{four:.4f}", "manuals": "not shown"}}
    warned = {kind: 100 * row["warned"] for kind, row in found["drift"][BOOKS].items()}
    return Said(
        "Lost of the cosine:"
        + table(rows)
        + f"All kinds, fitted to books: 2,048 tokens {few:.4f}, {max(TOKENS):,} tokens {many:.4f}. "
        f"Warned of, fitted to books: {named(warned, '.0f', '%')}",
        kept(several < min(books, one)),
        "one kind is enough, or moments lose less",
    )
