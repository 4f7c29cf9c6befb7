"""How the error of approximate attention grows through the layers of a trained model: figure 14 of paper 003.

Claim: even where attention is approximated well, errors propagate through the layers, so that the weights of a trained
transformer cannot simply be taken over. all-MiniLM-L6 (6 layers, 12 heads, d = 32) on paragraphs it was not calibrated
on: error of the hidden states after every layer, relative to their distance from their mean, with all attention
replaced by orthogonal positive features (FAVOR+) or, for comparison, by fitted landmark features. Means over draws.
Writes results/train_layers.json and docs/images/train_layers.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from torch import Tensor

import bochner
from bochner import data

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "train_layers.json"
RECIPES = [("positive", 64), ("positive", 256), ("positive", 1024), ("landmark", 64)]
PARAGRAPHS, DRAWS = 6, 3


def hidden(model: torch.nn.Module, batches: list) -> list[list[Tensor]]:
    """Hidden states after every layer, for every text."""
    with torch.no_grad():
        return [[h[0] for h in model(**b, output_hidden_states=True).hidden_states[1:]] for b in batches]


def error(found: list[list[Tensor]], exact: list[list[Tensor]]) -> list[float]:
    """Per layer, |found - exact| / |exact - mean of exact|, averaged over texts."""
    rows = [
        [float((a - b).norm() / (b - b.mean(0)).norm()) for a, b in zip(one, two, strict=True)]
        for one, two in zip(found, exact, strict=True)
    ]
    return [statistics.mean(layer) for layer in zip(*rows, strict=True)]


def plot(found: dict[str, list[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), dpi=150)
    for name, errors in found.items():
        axes.plot(range(1, len(errors) + 1), errors, marker="o", markersize=4, label=name)
    axes.set_xlabel("layer")
    axes.set_ylabel("relative error of the hidden states")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "images" / "train_layers.png")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args(argv)
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    path = data.fetch("minilm")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path).eval()
    texts = data.paragraphs("heldout", PARAGRAPHS)
    batches = [tokenizer(t, return_tensors="pt", truncation=True, max_length=150) for t in texts]
    exact = hidden(model, batches)
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, m in RECIPES:
        key = f"{name}, m = {m}"
        if key in found:
            continue
        draws = []
        for seed in range(DRAWS):
            calibration = data.paragraphs("calibration", 24)
            bochner.convert(model, name, m, calibration=calibration, tokenizer=tokenizer, seed=seed, window=0)
            draws.append(error(hidden(model, batches), exact))
            bochner.revert(model)
        found[key] = [statistics.mean(layer) for layer in zip(*draws, strict=True)]
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{key:20s} " + " ".join(f"{x:.3f}" for x in found[key]), flush=True)
    plot(found)
    grows = all(errors[-1] > errors[0] for key, errors in found.items() if key.startswith("positive"))
    print(f"claim (errors grow through the layers of positive features): {'holds' if grows else 'FAILS'}")
    return 0 if grows else 1


if __name__ == "__main__":
    raise SystemExit(main())
