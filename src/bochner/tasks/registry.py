"""The tasks and their presets.

`paper`: table 4 of paper 004 (listops, text, retrieval, image), its table 6 (pretraining, sentiment, nli) and
appendix A of paper 003 (lm, protein, pixels); table 5 of paper 004 gives the features of learned maps. Where they
differ from the paper, they say so themselves: `print(preset_of(task("lm"), "paper"))`, or `bochner train lm --show`.
Where a paper has no figures (pathfinder, speech) the preset is ours.
`small`: the same tasks, shorter and with less data, for one core and some minutes.
`medium`: one to three hours on one core, with sizes between the two, and minutes for recall and copying. The rate was
not tuned on it: it is that of `small`, tuned for exact attention and used for all, lowered with the width.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace

from torch.utils.data import Dataset

from bochner._checks import (
    ArgumentError,
    BochnerError,
    is_int,
    lookup,
    non_negative,
    one_of,
    positive_float,
    positive_int,
)
from bochner.tasks import images, listops, pathfinder, protein, recall, speech, text
from bochner.tasks.base import Preset, Task

BYTES = 256
NO_DROPOUT = "attention dropout is 0: linear attention has no weights to drop"
SMALLER = "fewer layers, narrower, fewer steps and shorter sequences than the paper's"
BOOKS = "sixteen books for PG-19"
MANUAL_PAGES = "manual pages for the ACL anthology"
MEAN_ROW = "the mean row is classified, not the first"
OUR_SIZES = "the papers have no figures: the sizes are ours"
BYTES_OR_PAIRS = "bytes or 4,096 byte pairs for 32,768 unigrams"
TWENTY_THOUSAND = "20,000 sequences for TrEMBL"
OF_TABLE_6 = (
    NO_DROPOUT,
    "10 heads of 30, not of 64: transformers' BERT ties the head size to width / heads",
    "the classifier's hidden layer has the width of the model, 300, not 128",
)


def _table_5(*counts: int) -> dict[str, int]:
    """Features of the learned maps in the order of table 5 of paper 004."""
    names = ("gmm_rks", "fastfood_rks", "generative_rks", "gmm_prf", "fastfood_prf", "generative_prf")
    return dict(zip(names, counts, strict=True))


def _arena(rate: float, warmup: int) -> dict:
    """The schedule of the Long Range Arena, rate / sqrt(max(step, warmup)), as a peak of transformers' inverse_sqrt."""
    return {"learning_rate": rate / warmup**0.5, "warmup": warmup, "schedule": "inverse_sqrt", "weight_decay": 0.1}


# Of presets that are ours: linear attention drops nothing, and maps keep their draws.
OURS: dict = {"dropout": 0.0, "redraw": 0}
MEAN: dict = {**OURS, "pooling": "mean"}
LEARNED: dict = {**OURS, "positions": "learned"}
# fmt: off
# The numbers in front: length, layers, heads, width, feedforward, batch, steps, and of ours learning rate and warm-up.
LISTOPS = {
    "paper": Preset(2_000, 6, 8, 512, 2_048, 32, 10_000, **_arena(5e-3, 1_000), features=256, window=64,
        features_of=_table_5(256, 64, 256, 256, 64, 128), data={"low": 500, "high": 2_000}, departures=(NO_DROPOUT,)),
    "small": Preset(200, 2, 2, 64, 128, 32, 300, 2e-3, 30, **MEAN, positions="learned", features=32, window=16,
        train=40_000, test=2_000, data={"low": 50, "high": 200}),
}
TEXT = {
    "paper": Preset(4_000, 4, 4, 256, 1_024, 32, 20_000, **_arena(5e-2, 8_000), features=256, window=64,
        features_of=_table_5(128, 64, 256, 256, 64, 128), departures=(NO_DROPOUT,)),
    "small": Preset(1_024, 1, 2, 32, 64, 16, 600, 1e-2, 30, **MEAN, features=32, test=5_000),
}
RETRIEVAL = {
    "paper": Preset(4_000, 4, 4, 128, 512, 32, 5_000, **_arena(5e-2, 8_000), features=128, window=64,
        features_of=_table_5(64, 32, 128, 128, 32, 64), departures=(NO_DROPOUT, MANUAL_PAGES)),
    "medium": Preset(512, 2, 4, 64, 128, 32, 4_000, 2e-3, 200, **MEAN, test=2_000,
        departures=(NO_DROPOUT, MANUAL_PAGES, SMALLER, MEAN_ROW)),
    "small": Preset(256, 1, 2, 64, 128, 16, 500, 3e-3, 50, **MEAN, features=32, test=1_000),
}
IMAGE = {
    "paper": Preset(1_025, 1, 8, 128, 128, 256, 35_156, 5e-4, 175, dropout=0.3, positions="learned", features=128,
        features_of=_table_5(128, 8, 128, 128, 8, 8), data={"side": 32},  # 200 epochs of 45,000
        departures=(NO_DROPOUT, "8 heads of 16, not of 8: transformers' BERT ties the head size to width / heads")),
    "medium": Preset(1_025, 1, 4, 64, 128, 32, 4_000, 5e-3, 200, **MEAN, positions="learned", data={"side": 32},
        departures=(NO_DROPOUT, SMALLER, MEAN_ROW)),
    "small": Preset(257, 1, 2, 32, 64, 64, 600, 1e-2, 40, **MEAN, positions="learned", features=32, window=16,
        test=2_000, data={"side": 16, "levels": 16}),
}
FOLLOWED = Preset(145, 2, 4, 64, 128, 32, 3_000, 2e-3, 100, **{**MEAN, "positions": "grid"}, window=16, guess=0.2,
    features=32, train=48_000, test=2_000, data={"side": 12, "levels": 4, "dashes": 3, "distractors": 1, "short": 2})
PATHFINDER = {
    "paper": Preset(1_025, 4, 8, 128, 128, 256, 62_500, 1e-3, 1_000, positions="learned", features=128,
        departures=(OUR_SIZES,)),  # 100 epochs
    "medium": replace(FOLLOWED, length=257, steps=12_000, warmup=300, features=64, train=96_000, test=4_000,
        data={**FOLLOWED.data, "side": 16, "dashes": 4},
        departures=(OUR_SIZES, "hidden pixels are guessed beside the label")),
    "small": FOLLOWED,
}
# Appendix A.2 of paper 003: Adam (0.9, 0.98, 1e-9) at a fixed rate of 1e-3 from the first step on, decay 0.1, clipping
# at 0.5, dropout 0.1, m = 256, Linformer with k = 600.
PERFORMER = Preset(8_192, 6, 8, 512, 2_048, 8, 100_000, 1e-3, 0, schedule="constant", weight_decay=0.1, eps=1e-9,
    clip=0.5, positions="learned", features=256, features_of={"linformer": 600}, window=128, redraw=1_000)
LM = {
    "paper": replace(PERFORMER, departures=(NO_DROPOUT, BOOKS, BYTES_OR_PAIRS)),
    "medium": Preset(512, 4, 4, 128, 512, 16, 4_000, 2e-3, 200, **LEARNED, weight_decay=0.01, test=256,
        departures=(NO_DROPOUT, BOOKS, SMALLER, BYTES_OR_PAIRS)),
    "small": Preset(256, 2, 2, 64, 256, 16, 800, 3e-3, 80, **LEARNED, weight_decay=0.01, test=128),
}
PROTEIN = {
    "paper": replace(PERFORMER, length=1_024, layers=36, feedforward=1_024, batch=64,
        departures=(NO_DROPOUT, TWENTY_THOUSAND)),
    "medium": Preset(256, 4, 4, 128, 256, 32, 6_000, 1e-3, 400, **LEARNED, test=2_000, data={"source": "swissprot"},
        departures=(NO_DROPOUT, SMALLER, "Swiss-Prot, 435,000 sequences, for TrEMBL")),
    "small": Preset(256, 2, 2, 64, 128, 16, 600, 2e-3, 60, **LEARNED, features=32, test=500),
}
PIXELS = {
    "paper": replace(PERFORMER, length=3_072, data={"side": 32}, departures=(NO_DROPOUT, "CIFAR-10 for ImageNet64")),
    "small": Preset(768, 2, 2, 64, 256, 8, 1_000, 2e-3, 100, **LEARNED, features=32, test=100, data={"side": 16}),
}
TABLE_6 = Preset(512, 3, 10, 300, 512, 64, 25_000, 5e-4, 10_000, schedule="linear", weight_decay=0.01,
    betas=(0.9, 0.999), features=128,
    departures=(*OF_TABLE_6, "sixteen books for WikiText-103, Rotten Tomatoes and SNLI for GLUE"))
BRIEF = Preset(64, 2, 2, 64, 128, 32, 2_000, 2e-3, 200, **MEAN, weight_decay=0.01, features=32, window=16, test=2_000)
PRETRAINING = {"paper": TABLE_6, "small": BRIEF}
SENTIMENT = {"paper": replace(TABLE_6, steps=1_066, warmup=106), "small": replace(BRIEF, steps=600, warmup=60)}
INFERENCE = {"paper": replace(TABLE_6, steps=15_296, warmup=1_529), "small": BRIEF}
# The rate is the one at which exact attention learns surest, of 3e-3 to 1e-2.
ASKED = Preset(32, 1, 2, 64, 64, 32, 500, 5e-3, 50, **LEARNED, features=16, window=8, test=512, data={"pairs": 16})
RECALL = {"small": ASKED, "medium": replace(ASKED, length=128, steps=1_000, data={"pairs": 64})}
COPIED = replace(ASKED, length=65, steps=800, features=32, data={"symbols": 32})
COPYING = {"small": COPIED, "medium": replace(COPIED, length=129, steps=1_500, data={"symbols": 64},
    departures=(OUR_SIZES,))}
# Two layers find each other at a lower rate only: at 5e-3 exact attention had 14 % after 1,500 steps.
INDUCTION = {"small": replace(ASKED, length=48, layers=2, steps=3_000, learning_rate=2e-3, warmup=200, features=32,
    data={"symbols": 24})}
SPEECH = {
    "paper": Preset(256, 17, 8, 512, 2_048, 64, 20_000, 1e-3, 2_000, features=128,
        departures=("Mandarin syllables for LibriSpeech", "CTC for a transducer", "steps and rate are ours")),
    "small": Preset(160, 2, 2, 64, 128, 32, 1_500, 2e-3, 150, **OURS, features=32, window=8),
}

ACIDS, PIECES, BPE = (len(protein.LETTERS),) * 2, text.PIECES, (text.PAIRS,) * 2
PAIRS, SYMBOLS = (recall.PAIR_SYMBOLS,) * 2, (recall.SYMBOLS,) * 2
BITS: dict = {"metric": "bits", "larger": False}
PROTEINS: dict = {"artefacts": ("proteins",), "further": ("unseen",)}
# Name, what it is, kind, symbols, classes, examples, presets.
TASKS: dict[str, Task] = {t.name: t for t in (
    Task("listops", "nested lists and their value", "classify", len(listops.SYMBOLS), 10, listops.load, LISTOPS),
    Task("text", "film reviews as bytes", "classify", BYTES, 2, text.imdb, TEXT, artefacts=("imdb",)),
    Task("retrieval", "manual pages that refer to each other", "match", BYTES, 2, text.retrieval, RETRIEVAL,
        artefacts=text.MANUALS),
    Task("image", "CIFAR-10, grey pixels", "classify", BYTES, 10, images.grey, IMAGE, artefacts=("cifar10",)),
    Task("pathfinder", "two discs on one curve or on two", "classify", BYTES, 2, pathfinder.load, PATHFINDER),
    Task("lm", "books byte by byte", "causal", BYTES, BYTES, text.books_bytes, LM, **BITS, artefacts=("books",)),
    Task("lm_bpe", "books in byte pair encoding", "causal", *BPE, text.books_pairs, LM, **BITS, artefacts=("books",),
        sizes=text.pair_sizes),
    Task("protein", "hidden amino acids", "masked", *ACIDS, protein.masked, PROTEIN, **PROTEINS,
        baseline=protein.masked_baseline),
    Task("protein_causal", "the next amino acid", "causal", *ACIDS, protein.sequences, PROTEIN, **PROTEINS,
        baseline=protein.baseline),
    Task("pretraining", "books with hidden word pieces", "masked", PIECES, PIECES, text.pretraining, PRETRAINING,
        artefacts=("books",)),
    Task("sentiment", "sentences of film critics", "classify", PIECES, 2, text.sentiment, SENTIMENT,
        artefacts=("movie_reviews", "books")),
    Task("nli", "does one sentence follow from another", "classify", PIECES, 3, text.inference, INFERENCE,
        artefacts=("snli", "books")),
    Task("speech", "the symbols of spoken syllables", "ctc", 41, 41, speech.load, SPEECH, metric="error_rate",
        larger=False, artefacts=("syllables",), collate=speech.collate),
    Task("pixels", "CIFAR-10, colours one after the other", "causal", BYTES, BYTES, images.colour, PIXELS, **BITS,
        artefacts=("cifar10",)),
    Task("recall", "the value of a key, of many pairs", "masked", *PAIRS, recall.recall, RECALL),
    Task("recall_causal", "the same, for decoders", "causal", *PAIRS, recall.recall_causal, RECALL),
    Task("copying", "a sequence once more", "causal", *SYMBOLS, recall.copying, COPYING),
    Task("induction", "what came after a symbol before", "causal", *SYMBOLS, recall.induction, INDUCTION),
)}
# fmt: on


def task(name: str) -> Task:
    """The task of that name.

    >>> task("listops").what
    'nested lists and their value'
    """
    return lookup(TASKS, name, "task")


def preset_of(chosen: Task, name: str | Preset, **changes: object) -> Preset:
    """A preset of a task, or one that was given, with single values changed."""
    found = name if isinstance(name, Preset) else lookup(chosen.presets, name, f"preset of {chosen.name}")
    known = [f.name for f in fields(Preset)]
    unknown = sorted(set(changes) - set(known))
    if unknown:
        raise ArgumentError(f"A preset has no {unknown[0]!r}; it has {sorted(known)}.")
    if "features" in changes:
        changes = {"features_of": {}, **changes}  # asked for, whatever the map
    changed = replace(found, **changes)  # type: ignore[arg-type]
    check(changed)
    if changed.guess and (chosen.kind != "classify" or changed.pooling != "mean"):
        raise BochnerError(
            "Symbols to 'guess' are for classifiers that see mean rows; "
            f"{chosen.name!r} has pooling {changed.pooling!r}."
        )
    return changed


WORDS = {
    "precision": ("float32", "bfloat16"),
    "pooling": ("first", "mean"),
    "positions": ("sinusoidal", "grid", "learned"),
    "schedule": ("cosine", "linear", "constant", "constant_with_warmup", "inverse_sqrt"),
}
COUNTS = ("length", "layers", "heads", "width", "feedforward", "batch", "steps", "features", "window")


def check(preset: Preset) -> None:
    """Refuse sizes with which no model can be made or trained."""
    for name in COUNTS:
        positive_int(getattr(preset, name), name, "train")
    for name in ("learning_rate", "eps", "clip"):
        positive_float(getattr(preset, name), name, "train")
    for name in ("warmup", "redraw"):
        if not is_int(steps := getattr(preset, name)) or steps < 0:
            raise BochnerError(f"The {name!r} of train must be a number of steps, 0 for none, got {steps!r}.")
    for name in ("weight_decay", "guess", "dropout"):
        if non_negative(share := getattr(preset, name), name, "train") >= 1 and name != "weight_decay":
            raise BochnerError(f"The {name!r} of train must be a share from 0 to 1, 1 excluded, got {share!r}.")
    for name, valid in WORDS.items():
        one_of(getattr(preset, name), name, "train", valid)
    if preset.positions == "grid" and (math.isqrt(preset.length - 1) ** 2 != preset.length - 1 or preset.width % 4):
        raise BochnerError(
            "Positions on a 'grid' need a 'length' of a square and one and a 'width' that is a multiple of 4, "
            f"got {preset.length} and {preset.width}."
        )
    if preset.width % preset.heads:
        raise BochnerError(
            f"The 'width' of train must be a multiple of its 'heads', got {preset.width} and {preset.heads}."
        )


def dataset(name: str, split: str = "train", preset: str = "small") -> Dataset:
    """The examples of a task, as a torch data set of token ids and labels; fetched or made on first use."""
    chosen = task(name)
    return chosen.load(preset_of(chosen, preset), split)
