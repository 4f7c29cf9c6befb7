"""Figure 14 of *Rethinking Attention with Performers*: the error of a Performer grows through the layers.

Claim: replacing attention in a pretrained transformer by FAVOR+ with orthogonal features gives an error that grows
with the number of layers, so that weights cannot be taken over as they are. Measured on all-MiniLM-L6 (6 layers, 12
heads): relative error of the hidden states after each layer, when all layers up to there are replaced, for several
numbers of features; and what one replaced layer alone does.

    python experiments/error_propagation.py [--quick]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _gallery import figure, finish, save

import bochner
from bochner.data import paragraphs
from bochner.demo import load_minilm
from bochner.hf.inputs import batches
from bochner.hf.plan import Plan

SIZES = (64, 256, 1024)


@torch.no_grad()
def states(model: Any, data: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Hidden states of all real tokens after the embedding and after every layer."""
    runs = [(model(**b, output_hidden_states=True).hidden_states, b["attention_mask"].bool()) for b in data]
    return [torch.cat([h[layer][keep] for h, keep in runs]) for layer in range(len(runs[0][0]))]


def relative(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[float]:
    return [float((x - y).norm() / y.norm()) for x, y in zip(a, b, strict=True)][1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_minilm()
    data = batches(paragraphs("heldout", 4 if options.quick else 16), tokenizer, max_length=128, batch_size=4)
    truth = states(model, data)
    all_layers, one_layer = {}, {}
    for m in SIZES[:2] if options.quick else SIZES:
        bochner.convert(model, "positive", m, exact_below=0)
        plan = bochner.hf.plan_of(model)
        all_layers[m] = relative(states(model, data), truth)
        bochner.revert(model)
        alone = []
        for i in range(len(plan.layers)):
            bochner.convert(model, plan=only(plan, i), exact_below=0)
            alone.append(relative(states(model, data), truth)[i])
            bochner.revert(model)
        one_layer[m] = alone
        print(
            m, "all layers", [round(e, 3) for e in all_layers[m]], "one alone", [round(e, 3) for e in alone], flush=True
        )
    draw(all_layers, one_layer)
    m = max(all_layers)
    total, alone = all_layers[m][-1], max(one_layer[m])
    holds = all(row[-1] > row[0] and row[-1] > max(one_layer[k]) for k, row in all_layers.items())
    return finish(
        "error_propagation",
        {"all_layers": all_layers, "one_layer": one_layer},
        claim="The error of FAVOR+ in a pretrained transformer grows with the number of layers; the weights cannot "
        "be used as they are.",
        ours=f"with {m} features the hidden states are off by {all_layers[m][0]:.2f} after one layer and "
        f"{total:.2f} after six; "
        f"no single replaced layer does more than {alone:.2f}.",
        verdict="reproduced" if holds else "partly",
        why="" if holds else "the error does not grow with every number of features",
    )


def only(plan: Plan, layer: int) -> Plan:
    """The plan with one layer replaced."""
    copy = plan.copy()
    for i, entry in enumerate(copy.layers):
        if i != layer:
            entry.kinds = ["exact"] * entry.num_heads
    return copy


def draw(all_layers: dict[int, list[float]], one_layer: dict[int, list[float]]) -> None:
    fig, ax = figure()
    places = range(1, len(next(iter(all_layers.values()))) + 1)
    for m, row in all_layers.items():
        (line,) = ax.plot(places, row, "o-")
        ax.plot(places, one_layer[m], "o:", color=line.get_color(), alpha=0.7)
        ax.text(places[-1] + 0.1, row[-1], f"m = {m}", color=line.get_color(), va="center", fontsize=8)
    ax.set(xlabel="layer", ylabel="relative error of the hidden states", ylim=(0, None), xlim=(0.8, places[-1] + 1))
    ax.set_title("all layers up to here replaced; dotted: this one alone", fontsize=9)
    save(fig, "error_propagation")


if __name__ == "__main__":
    raise SystemExit(main())
