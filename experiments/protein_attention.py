"""What a protein Performer attends to: figures 10 to 13 of *Rethinking Attention with Performers*, in small.

Claims: (10 to 12) many heads are diagonal, each letter attending to its neighbours, and some are vertical, all letters
attending to the same few positions; (13) letters that attention treats alike are similar amino acids, (D, E) and (F, Y)
above all, as in BLOSUM62.

The model is our own: task `protein`, FAVOR+ (`positive`), four layers of eight heads, trained here; 500,000 steps of 36
layers are out of reach. What is seen in it is measured beside the same model before training.

- diagonal: the share of the attention that goes to letters at most three away, over what equal attention would give;
  a head counts from 2.
- vertical: the share of the variance of the attention that the mean over the rows explains; a head counts from 1/2,
  if the twentieth of the letters that is attended to most gets at least twice its share.
- similarity of letters a and b, as in Vig et al. (2020): the correlation over heads of the shares of attention that
  go to a and to b. Agreement with BLOSUM62 is the correlation over the 190 pairs, its p-value that of permuted letters
  (Mantel's test).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from _framework import Said, Store, experiment, graded, missed, table
from _pictures import figure, save
from _training import folder, trained
from torch import Tensor

import bochner
from bochner import data, tasks
from bochner.tasks.base import CLS, SPECIAL, Collator
from bochner.tasks.protein import LETTERS, masked_baseline, sequences

SIZES: dict[str, Any] = {
    "length": 128,
    "layers": 4,
    "heads": 8,
    "width": 128,
    "feedforward": 256,
    "batch": 32,
    "steps": 3_000,
    "warmup": 200,
    "learning_rate": 1e-3,
    "positions": "sinusoidal",
    "features": 64,
}
AMINO = LETTERS[:20]
# Pancreatic trypsin inhibitor of cattle with its signal, BPT1_BOVIN (UniProt P00974): the protein of figure 10.
BOVIN = "MKMSRLCLSVALLVLLGTLAASTPGCDTSNQAKAQRPDFCLEPPYTGPCKARIIRYFYNAKAGLCQTFVYGGCRAKRNNFKSAEDCMRTCGGAIGPWENL"
NEAR, TOP = 3, 0.05
PAIRS = ("DE", "FY")
LEARNED = 0.05  # above copying, from which on a model has learned something that its attention could show
KINDS = {"heads": "shares over heads", "mutual": "mutual attention", "embeddings": "embeddings"}
PERMUTATIONS = 20_000


def attention(model: Any, ids: Tensor, mask: Tensor, *, by_values: bool = False) -> list[Tensor]:
    """The attention matrices of every layer, (b, h, n, n).

    `by_values`: as the paper has them, the output of linear attention for values that are indicators of positions;
    else by `attention_matrix`, in float64. The same up to rounding.
    """
    found: list[Tensor] = []

    def look(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = (*args, *kwargs.values())[0]
        q, k, phi = call.query, call.key, layer.parts["kernel"].phi
        options = {"key_padding_mask": call.padding, "scale": call.scale}
        if by_values:
            positions = torch.eye(k.shape[-2]).expand(*k.shape[:-1], -1)
            found.append(bochner.linear_attention(q, k, positions, phi, **options))
        else:
            found.append(bochner.attention_matrix(q, k, phi, **options))

    from bochner.hf import LinearAttention

    layers = [m for m in model.modules() if isinstance(m, LinearAttention)]
    handles = [m.register_forward_pre_hook(look, with_kwargs=True) for m in layers]
    try:
        with torch.no_grad():
            model.eval()(input_ids=ids, attention_mask=mask)
    finally:
        for handle in handles:
            handle.remove()
    return found


def diagonal(a: Tensor) -> Tensor:
    """The share of attention to letters at most `NEAR` away over that of equal attention, for a (..., n, n)."""
    n = a.shape[-1]
    i = torch.arange(n)
    near = ((i[:, None] - i).abs() <= NEAR).to(a)
    return (a * near).sum((-2, -1)) / a.sum((-2, -1)) / near.mean()


def vertical(a: Tensor) -> tuple[Tensor, Tensor]:
    """What of the variance of a (..., n, n) its columns explain, and what the most attended get over their share."""
    columns = a.mean(-2)
    explained = columns.var(-1, unbiased=False) / a.flatten(-2).var(-1, unbiased=False)
    top = max(1, round(TOP * a.shape[-1]))
    return explained, columns.topk(top, dim=-1).values.sum(-1) / columns.sum(-1) / (top / a.shape[-1])


def inspect(model: Any, rows: list[Tensor], batch: int = 16) -> dict[str, np.ndarray]:
    """Of every head: diagonal and vertical statistics, the shares of attention by letter, and the attention from letter
    to letter; letters only, without CLS and padding, the mean over proteins."""
    collate = Collator(SIZES["length"])
    totals: dict[str, Any] = {"diagonal": 0.0, "explained": 0.0, "top": 0.0, "pairs": 0.0}
    count = torch.zeros(len(AMINO), len(AMINO))
    for start in range(0, len(rows), batch):
        items = [{"input_ids": r, "labels": 0} for r in rows[start : start + batch]]
        one = collate(items)
        # (b, l, h, n, n)
        layers = torch.stack(attention(model, one["input_ids"], one["attention_mask"], by_values=True), 1)
        for a, row in zip(layers.flatten(1, 2), rows[start : start + batch], strict=True):
            a = a[:, 1 : len(row), 1 : len(row)]
            totals["diagonal"] = totals["diagonal"] + diagonal(a)
            explained, top = vertical(a)
            totals["explained"], totals["top"] = totals["explained"] + explained, totals["top"] + top
            letters = row[1:] - SPECIAL
            is_letter = torch.nn.functional.one_hot(letters, len(LETTERS))[:, : len(AMINO)].to(a)
            totals["pairs"] = totals["pairs"] + is_letter.mT @ a @ is_letter
            # Equal attention would give these: what a letter gets for being frequent.
            count += is_letter.sum(0)[:, None] * is_letter.sum(0) / len(row)
    out = {k: (v / len(rows)).numpy() for k, v in totals.items() if k != "pairs"}
    pairs = totals["pairs"]
    out["shares"] = (pairs.sum(1) / pairs.sum((1, 2))[:, None]).numpy()  # (heads, 20)
    out["lift"] = (pairs / count).numpy()  # (heads, 20, 20)
    return out


def blosum() -> np.ndarray:
    """BLOSUM62 in half bits, in the order of `AMINO`, as the package of the proteins has it."""
    lines = (data.fetch("proteins") / "blosum62.out").read_text(encoding="ascii").splitlines()
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    order = lines[0].split()
    table = {row[0]: dict(zip(order, map(float, row[1:]), strict=True)) for row in map(str.split, lines[1:])}
    return np.array([[table[a][b] for b in AMINO] for a in AMINO])


def mantel(x: np.ndarray, y: np.ndarray, permutations: int = PERMUTATIONS, seed: int = 0) -> tuple[float, float]:
    """Correlation of two symmetric matrices off their diagonals, and the share of permuted letters that reach it."""
    i, j = np.triu_indices(len(x), 1)
    r = float(np.corrcoef(x[i, j], y[i, j])[0, 1])
    rng = np.random.default_rng(seed)
    reached = 0
    for _ in range(permutations):
        p = rng.permutation(len(x))
        reached += np.corrcoef(x[p[i], p[j]], y[i, j])[0, 1] >= r
    return r, (reached + 1) / (permutations + 1)


def similarities(seen: dict[str, np.ndarray], model: Any) -> dict[str, np.ndarray]:
    """Similarity of the 20 letters: over heads, by mutual attention, and by the angle of their embeddings."""
    lift = np.log(seen["lift"].mean(0))
    table = model.get_input_embeddings().weight[SPECIAL : SPECIAL + len(AMINO)].detach()
    table = table - table.mean(0)
    unit = (table / table.norm(dim=-1, keepdim=True)).numpy()
    return {"heads": np.corrcoef(seen["shares"].T), "mutual": (lift + lift.T) / 2, "embeddings": unit @ unit.T}


def rank_of(pair: str, similarity: np.ndarray) -> int:
    """The place of a pair among the 190, 1 for the most similar."""
    upper = similarity[np.triu_indices(len(AMINO), 1)]
    return int((upper > similarity[AMINO.index(pair[0]), AMINO.index(pair[1])]).sum()) + 1


def measured(model: Any, rows: list[Tensor]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    seen = inspect(model, rows)
    found = similarities(seen, model)
    is_vertical = (seen["explained"] >= 0.5) & (seen["top"] >= 2)
    out: dict[str, Any] = {
        "diagonal heads": int((seen["diagonal"] >= 2).sum()),
        "vertical heads": int(is_vertical.sum()),
        **{k: [round(float(x), 3) for x in seen[k]] for k in ("diagonal", "explained", "top")},
    }
    for kind, matrix in found.items():
        r, p = mantel(matrix, blosum())
        ranks = {pair: rank_of(pair, matrix) for pair in PAIRS}
        out[kind] = {"correlation": round(r, 3), "p": p, "ranks": ranks}
    return out, {**seen, **found}


@experiment(
    claim="Heads of a trained protein Performer are diagonal or vertical, and similar amino acids are attended to "
    "alike: (D, E), (F, Y), as in BLOSUM62.",
    items=("003 Figure 10", "003 Figure 11", "003 Figure 12", "003 Figure 13"),
    paper="36 layers, 500,000 steps on TrEMBL",
    ours="four layers of eight heads, 3,000 steps on 20,000 proteins",
    quick="looks at a model that is trained first",
    needs=("transformers", "accelerate"),
)
def measure(store: Store, proteins: int = 800) -> None:
    result = trained("protein", "positive", "protein_attention", **SIZES)
    task = tasks.task("protein")
    preset = tasks.preset_of(task, "small", **{**SIZES, "test": None})
    held = sequences(preset, "test")
    rows = [held.ids(i) for i in range(len(held)) if len(held.raw(i)) >= 50][:proteins]
    fresh = tasks.build(task, preset, tasks.choose(task, "positive", preset))
    model = tasks.load(folder("protein_attention"))
    before, _ = measured(fresh, rows)
    after, found = measured(model, rows)
    # What is drawn needs the model: it is drawn when it is measured.
    after["two ways apart"] = draw_heads(model, found, SIZES)
    draw_similarity(found)
    baseline = masked_baseline(tasks.preset_of(task, "small", **SIZES))
    store.figures |= {"sizes": {**SIZES, "proteins": len(rows)}, "metrics": result["metrics"], "baseline": baseline}
    store.figures |= {"before": before, "after": after}


def judge(found: Any) -> Said:
    sizes, metrics, baseline, before, after = (found[k] for k in ("sizes", "metrics", "baseline", "before", "after"))
    heads = sizes["layers"] * sizes["heads"]
    patterns = after["diagonal heads"] > before["diagonal heads"] and after["vertical heads"] > before["vertical heads"]
    similar = after["heads"]["correlation"] > before["heads"]["correlation"] and after["heads"]["p"] < 0.01
    top = all(after["heads"]["ranks"][pair] <= 19 for pair in PAIRS)  # in the first tenth
    rows = {
        f"{kind} of {heads}": {"before": f"{before[kind]}", "after": f"{after[kind]}"}
        for kind in ("diagonal heads", "vertical heads")
    }
    rows |= {
        f"correlation with BLOSUM62, {what}": {
            when: f"{seen[k]['correlation']:.2f} (p = {seen[k]['p']:.1g})"
            for when, seen in (("before", before), ("after", after))
        }
        for k, what in KINDS.items()
    }
    ours = (
        f"Before and after {sizes['steps']:,} steps:"
        + table(rows)
        + f"It finds {100 * metrics['accuracy']:.1f} % of hidden letters, copying those that are shown "
        f"{100 * baseline['copying']:.1f} %. Place among the 190 pairs by shares over heads: "
        + ", ".join(f"({p[0]}, {p[1]}) {after['heads']['ranks'][p]}" for p in PAIRS)
        + "."
    )
    failed = missed(
        {
            "both patterns are learned": patterns,
            "similarity by attention follows BLOSUM62 beyond chance": similar,
            "both pairs are in the first tenth": top,
        }
    )
    learned = metrics["accuracy"] - baseline["copying"]
    if failed and learned < LEARNED:
        said = f"the model is {100 * learned:.1f} points above copying the letters shown: it has nothing to show yet"
        return Said(ours, "not tested", f"{said}. {failed[0].upper()}{failed[1:]}")
    return Said(ours, graded(not failed, patterns or similar), failed)


def draw_heads(model: Any, seen: dict[str, np.ndarray], sizes: dict[str, Any]) -> float:
    """Figures 10 to 12 for BPT1_BOVIN: every head, two of them larger, and their first 25 letters.

    Returns the largest difference between the two ways to an attention matrix.
    """
    ids = torch.tensor([[CLS, *(SPECIAL + LETTERS.index(c) for c in BOVIN)]])
    layers = attention(model, ids, torch.ones_like(ids))
    again = attention(model, ids, torch.ones_like(ids), by_values=True)
    apart = max(float((a - b).abs().max()) for a, b in zip(layers, again, strict=True))
    rows, columns = sizes["layers"], sizes["heads"]
    fig, axes = figure(columns, rows, figsize=(1.25 * columns, 1.35 * rows))
    for i, a in enumerate(layers):
        for j, ax in enumerate(axes[i]):
            ax.imshow(a[0, j].sqrt(), cmap="magma", interpolation="nearest")
            ax.set_xticks([])
            ax.set_yticks([])
            ax.set_title(f"{i}-{j}", fontsize=8)
    fig.suptitle("BPT1_BOVIN, attention of every head (square root)")
    save(fig, "protein_heads")
    strength = np.where(seen["explained"] >= 0.5, seen["top"], 0.0)
    two = (int(seen["diagonal"].argmax()), int(strength.argmax()))
    fig, axes = figure(2, 2, figsize=(8.0, 7.6))
    for column, (head, kind) in enumerate(zip(two, ("most diagonal", "most vertical"), strict=True)):
        a = layers[head // columns][0, head % columns]
        axes[0, column].imshow(a.sqrt(), cmap="magma")
        axes[0, column].set_title(f"head {head // columns}-{head % columns}, the {kind}")
        axes[1, column].imshow(a[1:26, 1:26].sqrt(), cmap="magma")
        axes[1, column].set_xticks(range(25), BOVIN[:25], fontsize=7)
        axes[1, column].set_yticks(range(25), BOVIN[:25], fontsize=7)
    save(fig, "protein_two_heads")
    return apart


def draw_similarity(found: dict[str, np.ndarray]) -> None:
    """Figure 13: BLOSUM62 beside the similarity by attention, letters in groups of like ones."""
    groups = "CSTAGPDEQNHRKMILVWYF"
    order = [AMINO.index(c) for c in groups]
    shown = {"BLOSUM62": blosum(), "attention, over heads": found["heads"], "embeddings": found["embeddings"]}
    fig, axes = figure(len(shown), figsize=(4.0 * len(shown), 4.1))
    for ax, (title, matrix) in zip(axes, shown.items(), strict=True):
        matrix = matrix[np.ix_(order, order)].copy()
        np.fill_diagonal(matrix, np.nan)
        ax.imshow(matrix, cmap="viridis")
        ax.set_xticks(range(20), groups, fontsize=8)
        ax.set_yticks(range(20), groups, fontsize=8)
        ax.set_title(title)
    save(fig, "protein_attention")
