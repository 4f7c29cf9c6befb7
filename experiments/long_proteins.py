"""Proteins that stand one after another: figure 7 (right) of *Rethinking Attention with Performers*, in small.

The sequences are Swiss-Prot's, of which 119,706 have at least three relatives: proteins with the same least hash of
their substrings of eight letters. A family stands together, families follow in any order, and a model guesses the next
letter. What it can guess is in the relatives before, hundreds of letters back: no window of a few letters reaches them.

The model is GPT-2 of two layers, behind a convolution over five letters. `none` is the same model without attention.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import transformers
from _framework import Said, Store, experiment, graded, table
from _pictures import COLOURS, by_name, figure, save
from _training import folder, gate, trained
from torch import Tensor, nn

from bochner.tasks import Preset, Task
from bochner.tasks.base import SPECIAL, Blocks, stored
from bochner.tasks.checkpoints import lines
from bochner.tasks.protein import LETTERS, _read_large

SUBSTRING, RELATIVES, REACH = 8, 3, 5
END = len(LETTERS)  # the letter between two proteins
SIZES = Preset(1_024, 2, 2, 128, 256, 4, 1_400, 2e-3, 100, dropout=0.0, positions="learned", redraw=0)
TESTED, WATCHED = 200, 24  # blocks of letters
# Attention and seed in the order of their runs; exact attention and none say whether attention is needed here.
RUNS = (("exact", 0), ("none", 0), ("positive", 0), ("relu", 0), ("exact", 1))


def letters(split: str) -> np.ndarray:
    """The text of a split, each with families of its own; the last tenth of all is to test and to watch."""
    text = stored("protein-families-1", lambda: {"letters": families(**stored("protein-swissprot-1", _read_large))})
    bounds = {"train": (0.0, 0.9), "validation": (0.9, 0.95), "test": (0.95, 1.0)}[split]
    begin, end = (int(share * len(text["letters"])) for share in bounds)
    return text["letters"][begin:end]


def families(tokens: np.ndarray, offsets: np.ndarray, **_: Any) -> np.ndarray:
    """The proteins that have relatives, family after family."""
    _, family, count = np.unique(least_hashes(tokens, offsets), return_inverse=True, return_counts=True)
    known = np.flatnonzero(count[family] > RELATIVES)
    order = known[np.argsort(family[known], kind="stable")]
    parts = np.split(order, np.flatnonzero(np.diff(family[order])) + 1)
    mixed = np.concatenate([parts[i] for i in np.random.default_rng(0).permutation(len(parts))])
    return np.concatenate([np.append(tokens[offsets[i] : offsets[i + 1]], np.uint8(END)) for i in mixed])


def least_hashes(tokens: np.ndarray, offsets: np.ndarray, chunk: int = 20_000) -> np.ndarray:
    """The least hash of the substrings of each protein, which relatives share with the share of substrings."""
    found = []
    for begin in range(0, len(offsets) - 1, chunk):
        ends = offsets[begin : begin + chunk + 1]
        text, ends = tokens[ends[0] : ends[-1]].astype(np.uint64), ends - ends[0]
        code = np.zeros_like(text)
        for j in range(SUBSTRING):
            code = code * np.uint64(END) + np.pad(text, (0, SUBSTRING))[j : j + len(text)]
        for factor, shift in ((0x9E3779B97F4A7C15, 29), (0xBF58476D1CE4E5B9, 32)):
            code = code * np.uint64(factor)
            code ^= code >> np.uint64(shift)
        for j in range(1, SUBSTRING):  # those that reach over the end of a protein
            last = ends[1:] - j
            code[last[last >= ends[:-1]]] = np.uint64(2**64 - 1)
        found.append(np.minimum.reduceat(code, ends[:-1]))
    return np.concatenate(found)


def load(preset: Preset, split: str) -> Blocks:
    """Blocks of letters; of those to watch and to test some, spread over the split."""
    text, n = letters(split), preset.length
    if split == "train":
        order = np.random.default_rng(0).permutation(len(text) // n)
        return Blocks(text[: len(order) * n].reshape(-1, n)[order].reshape(-1), n)
    chosen = np.linspace(0, len(text) - n, TESTED if split == "test" else WATCHED).astype(int)
    return Blocks(np.concatenate([text[i : i + n] for i in chosen]), n)


class Shifted(nn.Module):
    """Embeddings of the last few letters, by a convolution that does not look ahead."""

    def __init__(self, symbols: int, width: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(symbols, width)
        self.mix = nn.Conv1d(width, width, REACH, padding=REACH - 1)
        nn.init.normal_(self.letters.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        mixed: Tensor = self.mix(self.letters(ids).mT)[..., : ids.shape[1]].mT
        return mixed


class Nothing(nn.Module):
    """In the place of attention."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return x.new_zeros(x.shape), None


def model(preset: Preset) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=SPECIAL + END + 1,
        n_positions=preset.length,
        n_embd=preset.width,
        n_layer=preset.layers,
        n_head=preset.heads,
        n_inner=preset.feedforward,
        tie_word_embeddings=False,
        use_cache=False,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    made = transformers.GPT2LMHeadModel(config)
    made.transformer.wte = Shifted(config.vocab_size, preset.width)
    if not preset.data.get("attention", True):
        for block in made.transformer.h:
            block.attn = Nothing()
    return made


TASK = Task(
    "protein_families", "the next letter of a protein behind its relatives", "causal", END + 1, END + 1, load, SIZES,
    model=model,
)  # fmt: skip


@experiment(
    claim="On proteins that stand one after another a Performer goes on learning where attention over less context "
    "stops.",
    items=("003 Figure 7",),
    paper="8,192 letters of TrEMBL; a Performer of six layers of width 512 against Transformers of one to three layers",
    ours="1,024 letters of 119,706 proteins of Swiss-Prot, two layers of width 128 behind a convolution, m = 64, 1,400 "
    "steps of 4,096 letters",
    quick="trains models",
    needs=("transformers", "accelerate"),
)
def measure(store: Store, steps: int = SIZES.steps) -> None:
    runs = store.table("runs")
    for name, seed in RUNS:
        store.cell(f"{name}/{seed}", lambda n=name, s=seed: run(n, s, steps), runs)


def run(name: str, seed: int, steps: int) -> dict[str, Any]:
    """Accuracy and perplexity on families that were not trained on, and the accuracy on others in the meantime."""
    where = f"long_proteins/{name}/{seed}/{steps}"
    attention, used = ("exact", False) if name == "none" else (name, True)
    result = trained(TASK, attention, where, seed=seed, steps=steps, data={"attention": used})
    seen = [(x["step"], x["eval_accuracy"]) for x in lines(folder(where) / "metrics.jsonl") if "eval_accuracy" in x]
    kept = {k: result["metrics"][k] for k in ("accuracy", "perplexity")}
    return {**kept, "curve": seen, "seconds": result["seconds"]}


def judge(found: Any) -> Said:
    seen, perplexity = (by_name(found["runs"], figure) for figure in ("accuracy", "perplexity"))
    mean = {n: statistics.mean(x) for n, x in seen.items()}
    rows = {
        n: {"accuracy": f"{mean[n]:.1%}", "perplexity": f"{statistics.mean(perplexity[n]):.1f}", "seeds": f"{len(x)}"}
        for n, x in seen.items()
    }
    seeds = gate(seen["exact"], seen["none"])
    ours = f"Families that were not trained on; exact attention is {100 * seeds.margin:.0f} points above none:"
    ours += table(rows)
    if not seeds.is_open:
        why = "exact attention has one seed yet" if len(seen["exact"]) < 2 else "its seeds lie too far apart"
        return Said(ours, "not tested", f"the gate that asks whether attention is needed stays shut: {why}")
    shares = {n: (mean[n] - mean["none"]) / seeds.margin for n in mean if n not in ("exact", "none")}
    told = ", ".join(f"`{n}` {share:.0%}" for n, share in shares.items())
    why = f"of what attention is worth here, with the same steps: {told}. At this length exact attention is affordable"
    return Said(ours, graded(False, max(shares.values()) > 0.9), why)


def draw(found: Any) -> None:
    fig, ax = figure(figsize=(6.4, 3.6))
    colours = dict(zip(dict.fromkeys(name for name, _ in RUNS), COLOURS, strict=False))
    for key, seen in found["runs"].items():
        name, seed = key.split("/")
        steps, accuracy = zip(*seen["curve"], strict=True)
        ax.plot(steps, [100 * x for x in accuracy], color=colours[name], label=name if seed == "0" else None)
    ax.set(xlabel="steps", ylabel="accuracy of the next letter, %")
    ax.legend(frameon=False, fontsize=8)
    save(fig, "long_proteins")
