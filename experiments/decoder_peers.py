"""SmolLM2-135M with the caches that others offer, in one table with ours, nothing trained.

kvpress compresses a cache once, behind a text that was read whole; ours is kept small while it reads. So all caches
read the first PREFIX tokens of each text of `decoder_texts`, each in its own way, and what comes then is read behind
them: the tokens that follow, and passages from three places, each alone. Nothing of that is known when a cache is
compressed, except that the passages are of the text.

kvpress runs in an environment of its own, `build/peers-venv`, since it needs an older transformers. Delete
`build/peers` to search and to compress anew.

Bytes are those behind the PREFIX tokens, of the model's cache in bfloat16. `held`: what a method has to store; caches
rounded to 8 and 4 bits are counted, since they are only simulated, and windows and selected tokens of kvpress are taken
in bfloat16. `tensors`: what its tensors take. KVzip lets each head hold other tokens, and kvpress stores all of them.
Ours are the bytes of its tensors in both, its sinks and steps as they are.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache as once
from pathlib import Path
from typing import Any

import torch
from _framework import ROOT, Said, Store, experiment
from _peers import WHOLE, behind
from decoder_texts import GROUP, LEAD, LENGTH, ROUNDED, TEXTS, converted, passages, rounded, text

from bochner import Conversion, Recipe, Target, convert, data, revert
from bochner.demo import load_smollm2
from bochner.hf.cache import cache_bytes
from bochner.hf.evaluate import PIECE

PREFIX = 3600
BACK = (500, 2000, 3300)  # the farthest passages are the first of the text, behind its sinks
RATIOS = {"KVzip": (0.75, 0.88, 0.9), "SnapKV": (0.5, 0.76, 0.88), "Expected Attention": (0.5, 0.76, 0.88)}
WINDOWS = {f"window {window}, 4 sinks": window for window in (428, 860)}  # 12 and 24 % of bfloat16
OURS = {
    "selected keys, 6 % of float32": Target(memory=0.06, length=LENGTH),
    "selected keys, 12 % of float32": Target(memory=0.12, length=LENGTH),
}
CHECKED = 300  # tokens of another text on which causality is checked
EXACT = 1e-3
TWICE = 2.0  # caches of at most so many times the bytes are compared
PEERS, FOLDER, VERSION = ROOT / "build" / "peers-venv", ROOT / "build" / "peers", "0.5.5"


def compressed() -> list[str]:
    """The rows of kvpress."""
    return [f"{method} {ratio:g}" for method, ratios in RATIOS.items() for ratio in ratios]


# kvpress, in its own environment.


def environment() -> Path:
    """The interpreter of kvpress's environment, made unless it is there."""
    python, done = PEERS / "bin" / "python", PEERS / f"kvpress-{VERSION}"
    if not done.exists():
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        for command in (
            [sys.executable, "-m", "venv", str(PEERS)],
            [*pip, "torch", "-c", str(ROOT / "constraints.txt")],
            [*pip, f"kvpress=={VERSION}"],
        ):
            made = subprocess.run(command, check=False, capture_output=True, text=True)
            if made.returncode:
                said = (made.stderr.strip().splitlines() or ["nothing was said"])[-1]
                raise ImportError(f"kvpress {VERSION} cannot be installed in {PEERS.name}: {said}")
        done.touch()
    return python


def asked(tokenizer: Any, texts: dict[str, Any]) -> dict[str, Any]:
    """What kvpress is asked: texts as tokens, and ratios."""
    check = tokenizer(data.paragraphs("calibration", 1, words=CHECKED)[0]).input_ids[:CHECKED]
    return {"model": str(data.fetch("smollm2")), "check": check, "texts": texts, "ratios": RATIOS, "lead": LEAD}


def parts(ids: torch.Tensor) -> dict[str, Any]:
    """A text (1, n) as `behind` takes it."""
    first = ids[:, :PREFIX]
    again = {str(back): passages(first, back).tolist() for back in BACK}
    return {"prefix": first[0].tolist(), "tail": ids[0, PREFIX:].tolist(), "again": again}


def theirs(given: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """The figures of kvpress. What is known, or was found before by the same question and code, is not asked again."""
    python, script, question = environment(), Path(__file__).with_name("_peers.py"), json.dumps(given)
    name = hashlib.sha256((question + script.read_text(encoding="utf-8")).encode()).hexdigest()[:12]
    FOLDER.mkdir(parents=True, exist_ok=True)
    path, answer = FOLDER / f"{name}.asked.json", FOLDER / f"{name}.json"
    path.write_text(question, encoding="utf-8")
    if not answer.exists():
        answer.write_text(json.dumps(known), encoding="utf-8")
    subprocess.run([python, script, path, answer], check=True)
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found


# Ours, and what needs no other package.


@torch.no_grad()
def read(model: Any, given: dict[str, Any]) -> Any:
    """The cache behind the first tokens of a text, read piece by piece."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for piece in torch.tensor([given["prefix"]]).split(PIECE, dim=1):
        model(piece, past_key_values=cache, logits_to_keep=1)
    return cache


def with_bits(cache: Any, bits: int) -> Any:
    """A copy of a cache whose keys and values are rounded."""
    copied = copy.deepcopy(cache)
    for layer in copied.layers:
        layer.keys, layer.values = rounded(layer.keys, bits), rounded(layer.values, bits)
    return copied


def prepared(model: Any, tokenizer: Any, name: str, store: Store) -> None:
    """Convert a model: as was saved, or by a search that is saved."""
    folder = FOLDER / re.sub(r"\W+", "-", name)
    if not folder.exists():
        converted(model, tokenizer, OURS[name], store, name)
        Conversion.of(model).save_pretrained(folder)
        revert(model)
    Conversion.from_pretrained(model, folder)


@experiment(
    claim="Ours: at 12 % and 24 % of bfloat16, selected keys lose less perplexity and recall than any "
    "other cache of at most twice the bytes. The others are KVzip, SnapKV, Expected Attention, 8 bits, 4 bits and "
    "windows. Losses are geometric means over three texts, of recall at the worst of three distances.",
    ours="SmolLM2-135M; a novel, newspaper reports, a manual. 3,600 tokens of each in the cache, settings for 4,000. "
    "Perplexity of the next 400, recall of 528 tokens at each of three distances",
    quick="reads 3,600 tokens with a decoder of 135 million parameters many times, searches for minutes, and needs an "
    "environment of its own",
    sources=("_peers",),
    needs=("transformers",),
)
def measure(store: Store, texts: tuple[str, ...] = TEXTS) -> None:
    model, tokenizer = load_smollm2()
    asks = {name: parts(text(tokenizer, name, LENGTH)) for name in texts}

    def row(name: str, kind: str, held: float, cache: Callable[[], Any]) -> None:
        """`held`: 1 for tensors that would be in bfloat16, 2 for those that stay as they are, else by the bits."""

        def found() -> dict[str, Any]:
            made = cache()
            return {"bytes": cache_bytes(made), **behind(model, made, asks[kind], LEAD)}

        own = store.cell(name, found, within=store.table(kind))
        own["held"] = own["tensors"] = held * own["bytes"] / store.table(kind)["exact"]["bytes"]

    for kind, given in asks.items():
        whole = once(lambda given=given: read(model, given))
        row("exact", kind, 1, lambda whole=whole: copy.deepcopy(whole()))
        for name, bits in ROUNDED.items():
            row(name, kind, (bits + 32 / GROUP) / 16, lambda whole=whole, bits=bits: with_bits(whole(), bits))
    for name in (*OURS, *WINDOWS):
        if all(name in store.table(kind) for kind in texts):
            continue
        if name in OURS:
            prepared(model, tokenizer, name, store)
        else:
            convert(model, Recipe(None, window=WINDOWS[name], sinks=4, window_kind="sliding"), progress=False)
        for kind, given in asks.items():
            row(name, kind, 2 if name in OURS else 1, lambda given=given: read(model, given))
        revert(model)
    known = {kind: {n: row for n, row in store.table(kind).items() if n in (WHOLE, *compressed())} for kind in texts}
    found = theirs(asked(tokenizer, asks), known)
    checks = store.figures["checks"] = found.pop("checks")
    for kind, made in found.items():
        store.table(kind).update(made)
        both = [row["perplexity"] for row in (made[WHOLE], store.table(kind)["exact"])]
        checks[f"original here and there, {kind}"] = abs(math.log(both[0] / both[1]))


def check(found: Any) -> None:
    """Refuse figures of kvpress that fail a check."""
    wrong = {name: x for name, x in found["checks"].items() if x > EXACT and not name.endswith("compresses")}
    if wrong:
        raise ValueError(f"kvpress was not read as it should be: {wrong}.")


def ratios(found: Any, kind: str, name: str) -> tuple[float, float]:
    """Perplexity, and recall at the worst distance, each over the original's."""
    made, whole = found[kind][name], found[kind]["exact"]
    worst = max(made["recall"][back] / whole["recall"][back] for back in whole["recall"])
    return made["perplexity"] / whole["perplexity"], worst


def means(found: Any, name: str) -> tuple[float, float]:
    """Both, as geometric means over the texts."""
    logs = [[math.log(x) for x in ratios(found, kind, name)] for kind in TEXTS]
    perplexity, recall = (math.exp(sum(column) / len(TEXTS)) for column in zip(*logs, strict=True))
    return perplexity, recall


def held(found: Any, name: str) -> float:
    """Of the whole cache in bfloat16, on average over the texts."""
    return sum(found[kind][name]["held"] for kind in TEXTS) / len(TEXTS)


def rivals(found: Any, name: str) -> list[str]:
    """The other caches of at most TWICE the bytes."""
    most = TWICE * held(found, name)
    others = (other for other in found[TEXTS[0]] if other not in OURS and other not in ("exact", WHOLE))
    measured = (other for other in others if all(other in found[kind] for kind in TEXTS))
    return [other for other in measured if held(found, other) <= most]


def judge(found: Any) -> Said:
    check(found)
    said, beaten_by = [], []
    missing = [name for name in (*ROUNDED, *WINDOWS, *compressed()) if any(name not in found[kind] for kind in TEXTS)]
    for name in OURS:
        own, against = means(found, name), rivals(found, name)
        best = [min(against, key=lambda other: means(found, other)[i]) for i in (0, 1)]
        told = " and ".join(f"{means(found, b)[i]:.3f} ({b}, {held(found, b):.0%})" for i, b in enumerate(best))
        said.append(
            f"at {held(found, name):.1%} perplexity and recall {own[0]:.3f} and {own[1]:.3f} of the original's, the "
            f"best of {len(against)} others {told}"
        )
        for i, what in enumerate(("perplexity", "recall")):
            better = [b for b in against if means(found, b)[i] <= own[i]]
            beaten_by += [f"{what} at {held(found, name):.0%}: {', '.join(better)}"] if better else []
    why = ["not lower than others in " + "; ".join(beaten_by)] if beaten_by else []
    why += ["not measured on every text: " + ", ".join(missing)] if missing else []
    return Said("; ".join(said) + ".", "fails" if why else "holds", "; ".join(why))
