"""How well feature maps approximate the attention of a real model: all-MiniLM-L6, 72 heads, d = 32.

Claim: plain positive features hardly beat averaging the values; calibrated ones do with m = 64 what plain ones do with
m = 1024. Statistics come from one set of paragraphs, errors from another. Writes docs/images/minilm_heads.png.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from bochner import data, feature_map, linear_attention

ROOT = Path(__file__).parent.parent
SIZES = (16, 32, 64, 128, 256, 512, 1024)
MAPS = {"positive": "positive (FAVOR+)", "optimal": "optimal (FAVOR++)", "calibrated": "calibrated"}


def capture(split: str, count: int) -> list[list[tuple[Tensor, Tensor, Tensor]]]:
    """Scaled q, k and v of each layer, one entry per paragraph."""
    import transformers

    transformers.logging.set_verbosity_error()
    path = data.fetch("minilm")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    found: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in model.encoder.layer]

    def hook(i: int):
        def note(module: torch.nn.Module, args: tuple) -> None:
            x, size = args[0], module.attention_head_size
            shape = (*x.shape[:-1], module.num_attention_heads, size)
            q, k, v = (f(x).view(shape).transpose(1, 2) for f in (module.query, module.key, module.value))
            found[i].append((q * size**-0.25, k * size**-0.25, v))

        return note

    for i, layer in enumerate(model.encoder.layer):
        layer.attention.self.register_forward_pre_hook(hook(i))
    for text in data.paragraphs(split, count):
        model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=150))
    return found


def mean_error(calibration: list, heldout: list, name: str, m: int, seeds: int = 2) -> float:
    """Relative error of the attention output, averaged over heads and seeds."""
    errors = []
    for seed in range(seeds if name != "uniform" else 1):
        for layer, (seen, unseen) in enumerate(zip(calibration, heldout, strict=True)):
            wrong, total = torch.zeros(12), torch.zeros(12)
            phi = None
            if name != "uniform":
                phi = feature_map(name, dim=32, num_features=m, num_heads=12, seed=100 * seed + layer)
                phi.calibrate_(*([t[i] for t in seen] for i in range(2)))
            for q, k, v in unseen:
                exact = (q @ k.mT).softmax(-1) @ v
                uniform = v.mean(-2, keepdim=True).expand_as(exact)
                out = uniform if phi is None else linear_attention(q, k, v, phi, scale=1.0)
                wrong += (out - exact).square().sum((0, 2, 3))
                total += exact.square().sum((0, 2, 3))
            errors.append((wrong / total).sqrt())
    return torch.stack(errors).mean().item()


def plot(result: dict) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6), dpi=150)
    axes.axhline(result["uniform"], color="0.5", linestyle="--", linewidth=1)
    axes.text(
        SIZES[-1], result["uniform"] + 0.012, "averaging the values", color="0.4", fontsize=8, va="bottom", ha="right"
    )
    styles = {"positive": ("#b2182b", "o"), "optimal": ("#ef8a62", "s"), "calibrated": ("#2166ac", "D")}
    for name, label in MAPS.items():
        colour, marker = styles[name]
        axes.plot(SIZES, [result[name][str(m)] for m in SIZES], color=colour, marker=marker, markersize=4, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(SIZES, [str(m) for m in SIZES])
    axes.set_ylim(0, 1.2)
    axes.set_xlabel("features per head, m")
    axes.set_ylabel("relative error of attention output")
    axes.set_title("all-MiniLM-L6: mean over its 72 heads, held-out text", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    out = ROOT / "docs" / "images" / "minilm_heads.png"
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few texts, one seed, no picture")
    quick = parser.parse_args(argv).quick
    sizes, seeds = ((64, 1024), 1) if quick else (SIZES, 2)
    torch.set_num_threads(1)
    with torch.no_grad():
        calibration, heldout = capture("calibration", 8 if quick else 24), capture("heldout", 4 if quick else 16)
        result: dict = {"uniform": mean_error(calibration, heldout, "uniform", 0)}
        print(f"uniform averaging {result['uniform']:.3f}")
        for name in MAPS:
            result[name] = {str(m): mean_error(calibration, heldout, name, m, seeds) for m in sizes}
            print(f"{name:11s}", {m: round(e, 3) for m, e in result[name].items()}, flush=True)
    path = Path(__file__).parent / "results" / "minilm_heads.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    if not quick:
        print(f"figure: {plot(result).relative_to(ROOT)}")
    holds = result["calibrated"]["64"] < result["positive"]["1024"]
    print(f"claim (calibrated m = 64 below positive m = 1024): {'holds' if holds else 'FAILS'}")
    return 0 if holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
