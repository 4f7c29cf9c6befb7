"""MiniLM's feed-forward blocks linearised: error, memory and speed against features for each method, and a verdict.

    python benchmarks/feedforward.py [--quick] [--output FILE.json]

Calibrated on prose from one set of books, measured on rows from another. Errors are relative to the spread of the
exact output (1 is as bad as answering its mean); memory and speed relative to the exact block in the same run.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from _timing import arguments, best_times, machine, show, write
from torch import Tensor, nn

from bochner._checks import BochnerError
from bochner.papers.sketched_layer import LinearizedLayer, calibrate_layer, plan_layer
from bochner.papers.taylor_layer import TaylorComposition

METHODS = ("bernstein", "chebyshev", "least_squares")


def blocks() -> list[tuple[nn.Linear, nn.Linear]]:
    """The feed-forward blocks of all-MiniLM-L6-v2, from its safetensors."""
    from safetensors.torch import load_file

    from bochner.data import fetch

    state = {k.removeprefix("bert."): v for k, v in load_file(fetch("minilm") / "model.safetensors").items()}
    out = []
    while f"encoder.layer.{len(out)}.intermediate.dense.weight" in state:
        prefix = f"encoder.layer.{len(out)}"
        pair = []
        for name in ("intermediate", "output"):
            w, b = (state[f"{prefix}.{name}.dense.{part}"].float() for part in ("weight", "bias"))
            layer = nn.Linear(w.shape[1], w.shape[0])
            layer.weight.data, layer.bias.data = w, b
            pair.append(layer)
        out.append((pair[0], pair[1]))
    return out


def inputs(split: str, count: int) -> list[Tensor]:
    """The rows that reach each block when the model reads prose of a split: (tokens, 384) per layer."""
    from transformers import AutoModel, AutoTokenizer

    from bochner.data import fetch, paragraphs

    path = fetch("minilm")
    model, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    seen: list[list[Tensor]] = [[] for _ in model.encoder.layer]
    for layer, rows in zip(model.encoder.layer, seen, strict=True):
        layer.intermediate.register_forward_pre_hook(lambda _, a, rows=rows: rows.append(a[0].detach()[0]))
    with torch.no_grad():
        for text in paragraphs(split, count):
            model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=256))
    return [torch.cat(rows) for rows in seen]


@torch.no_grad()
def compare(block: LinearizedLayer, first: nn.Linear, second: nn.Linear, x: Tensor) -> dict[str, float]:
    """Error, numbers stored and rows a second against the block itself, on rows x (N, d)."""
    exact = second(nn.functional.gelu(first(x))).double()
    error = (block(x).double() - exact).square().sum() / (exact - exact.mean(0)).square().sum()
    sketches = sum(part.numel() for phi in block.maps for part in phi.buffers())
    ours = sketches + sum(part.numel() for part in (block.mean, block.basis, block.matrix, block.offset))
    theirs = sum(part.numel() for layer in (first, second) for part in layer.parameters())
    calls = {"exact": lambda: second(nn.functional.gelu(first(x))), "ours": lambda: block(x)}
    seconds = best_times(calls, repeats=5)
    return {"error": math.sqrt(float(error)), "memory": ours / theirs, "speed": seconds["exact"] / seconds["ours"]}


def measure(counts: list[int], layers: list[int], passages: int) -> list[dict[str, Any]]:
    calibration, heldout = inputs("calibration", passages), inputs("heldout", max(8, passages // 4))
    found = []
    for i, (first, second) in enumerate(blocks()):
        if i not in layers:
            continue
        data = calibrate_layer(first.weight, first.bias, calibration[i])
        for m in counts:
            for method in METHODS:
                block = LinearizedLayer(
                    data, "gelu", second=second, method=method, num_features=max(m, 1), degree=2 if m else 1
                )
                found.append({"layer": i, "features": m, "method": method, **compare(block, first, second, heldout[i])})
    return found


def targets(layer: int, passages: int) -> list[dict[str, Any]]:
    """What Algorithm 1 asks for at a relative squared error of the hidden layer, and what Taylor composition gives."""
    x = inputs("calibration", passages)[layer]
    first, _ = blocks()[layer]
    data = calibrate_layer(first.weight, first.bias, x)
    hidden = nn.functional.gelu(data.preactivation)
    spread = float((hidden - hidden.mean(0)).square().sum(-1).mean())
    found = []
    for share in (0.5, 0.1, 0.01):
        plan, _ = plan_layer(data, "gelu", eps=share * spread)
        found.append({"target": share, "method": "chebyshev", "degree": plan.degree, "features": plan.total})
    # The Taylor series of GELU needs |w.x + b| below about 12 in double precision; keep the units that stay there.
    reach = data.preactivation.abs().amax(0)
    units = (reach < 8).nonzero().flatten()[:64]
    try:
        taylor = TaylorComposition(first.weight[units], first.bias[units], "gelu", x[:256], draws=1, num_features=1024)
        ratio = float(taylor.variance(x[:64]).sum(-1).mean())
        ratio /= float((hidden - hidden.mean(0)).square()[:, units].sum(-1).mean())
    except BochnerError as error:
        print(error)
        ratio = math.inf
    found.append({"target": ratio, "method": "taylor, one draw", "degree": "any", "features": 1024})
    return found


def verdict(table: list[dict[str, Any]]) -> str:
    """One paragraph from the numbers."""
    useful = [r for r in table if r["speed"] > 1]
    best = min(useful, key=lambda r: r["error"]) if useful else None
    sketched = [r for r in useful if r["features"]]
    lines = []
    if best is not None:
        lines.append(
            f"Of {len(table)} linearised blocks the most accurate faster one is layer {best['layer']} by "
            f"{best['method']} with {best['features']} sketch features: error {best['error']:.2f}, "
            f"{best['speed']:.1f} times the speed."
        )
    if not any(r["error"] <= 0.1 for r in useful):
        lines.append("No block reaches an error of 0.1 while being faster: linearising these blocks does not pay.")
    if sketched:
        gain = min(r["error"] for r in sketched) / min(r["error"] for r in useful if not r["features"])
        lines.append(f"Sketched squares change the best error by a factor of {gain:.2f} against a plain linear map.")
    return " ".join(lines)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = arguments(__doc__, "one layer, two sizes", page=False).parse_args(argv)
    torch.set_num_threads(1)
    found = measure([0, 256], [3], 16) if options.quick else measure([0, 64, 256, 1024], [0, 3, 5], 32)
    plans = targets(3, 8 if options.quick else 24)
    show(found)
    print()
    show([{**r, "features": f"{r['features']:.3g}" if math.isfinite(r["features"]) else "inf"} for r in plans])
    print("\n" + verdict(found))
    results = {"machine": machine(1), "blocks": found, "targets": plans, "verdict": verdict(found)}
    write(results, options)
    return results


if __name__ == "__main__":
    main()
