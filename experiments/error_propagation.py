"""Figure 14 of *Rethinking Attention with Performers*: the error of a Performer grows through the layers.

Relative error of the hidden states of all-MiniLM-L6 (6 layers, 12 heads) after each layer, when the attention of all
layers up to there is FAVOR+ with orthogonal features, and what one replaced layer alone does.
"""

from __future__ import annotations

from typing import Any

import torch
from _framework import Said, Store, experiment, graded
from _models import tokenised
from _pictures import figure, save
from torch import Tensor

from bochner import feature_map, linear_attention
from bochner.data import paragraphs
from bochner.demo import load_minilm


@torch.no_grad()
def states(model: Any, inputs: list[dict[str, Tensor]], maps: dict[int, Any]) -> list[Tensor]:
    """Hidden states after every layer; layers with a map have linear attention by it."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **rest: Any) -> Any:
        layer = order.index(module)
        if layer not in maps:
            return sdpa_attention_forward(module, query, key, value, mask, **rest)
        return linear_attention(query, key, value, maps[layer]).transpose(1, 2).contiguous(), None

    order = [layer.attention.self for layer in model.encoder.layer]
    before = model.config._attn_implementation
    AttentionInterface.register("some_layers_linear", attend)
    model.set_attn_implementation("some_layers_linear")
    try:
        runs = [model(input_ids=b["input_ids"], output_hidden_states=True).hidden_states[1:] for b in inputs]
    finally:
        model.set_attn_implementation(before)
    return [torch.cat([h[layer][0] for h in runs]) for layer in range(len(order))]


def relative(a: list[Tensor], b: list[Tensor]) -> list[float]:
    return [float((x - y).norm() / y.norm()) for x, y in zip(a, b, strict=True)]


@experiment(
    claim="The error of FAVOR+ in a pretrained transformer grows with the number of layers; the weights cannot be used "
    "as they are.",
    items=("003 Figure 14",),
    paper="a Transformer of up to 12 layers on LM1B, orthogonal features",
    ours="all-MiniLM-L6, 6 layers, m = 64 to 1,024, 16 texts of up to 128 tokens",
    quick={"sizes": (64, 256), "texts": 4},
    needs=("transformers",),
)
def measure(store: Store, sizes: tuple[int, ...] = (64, 256, 1024), texts: int = 16) -> None:
    model, tokenizer = load_minilm()
    inputs = tokenised(tokenizer, paragraphs("heldout", texts), 128)
    heads = model.config.num_attention_heads
    dim, layers = model.config.hidden_size // heads, range(model.config.num_hidden_layers)
    truth = states(model, inputs, {})
    for m in sizes:
        options: dict[str, Any] = {"dim": dim, "num_features": m, "num_heads": heads}
        maps = {i: feature_map("positive", seed=i, **options) for i in layers}
        store.table("all_layers")[str(m)] = relative(states(model, inputs, maps), truth)
        alone = [relative(states(model, inputs, {i: maps[i]}), truth)[i] for i in layers]
        store.table("one_layer")[str(m)] = alone
        print(f"m = {m}: all layers {store.figures['all_layers'][str(m)][-1]:.2f}", flush=True)


def judge(found: Any) -> Said:
    every, alone = found["all_layers"], found["one_layer"]
    m = max(every, key=int)
    holds = all(row[-1] > row[0] and row[-1] > max(alone[k]) for k, row in every.items())
    return Said(
        f"with {m} features the hidden states are off by {every[m][0]:.2f} after one layer. They are off by "
        f"{every[m][-1]:.2f} after six; no single replaced layer does more than {max(alone[m]):.2f}.",
        graded(holds, True),
        "the error does not grow with every number of features",
    )


def draw(found: Any) -> None:
    fig, ax = figure()
    for m, row in found["all_layers"].items():
        places = range(1, len(row) + 1)
        (line,) = ax.plot(places, row, "o-")
        ax.plot(places, found["one_layer"][m], "o:", color=line.get_color(), alpha=0.7)
        ax.text(places[-1] + 0.1, row[-1], f"m = {m}", color=line.get_color(), va="center", fontsize=8)
    ax.set(xlabel="layer", ylabel="relative error of the hidden states", ylim=(0, None), xlim=(0.8, places[-1] + 1))
    ax.set_title("all layers up to here replaced; dotted: this one alone", fontsize=9)
    save(fig, "error_propagation")
