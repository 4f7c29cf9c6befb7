"""Table 4 and figure 3 of *Hybrid Random Features*: the softmax of an LSTM language model estimated by random features.

Claim: the angular and Gaussian hybrids are closer to the true distribution over classes than trigonometric and
positive features of equal FLOPs (d = 64 .. 512), in Wasserstein and Kolmogorov-Smirnov distance, and have fewer
negative estimates than trigonometric ones. Here: the two-layer LSTM of `_language.py` trained exactly on the Brown
corpus, 10,000 classes; classes are points 0 .. 9,999 on a line, in the order of frequency, and estimates are cut at
zero and normalised. Beside them the calibrated map of this library.

    python experiments/softmax_metrics.py [--steps 500] [--runs 10]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from _language import DIM, hidden_states, trained, validation_loss
from torch import Tensor

from bochner import feature_map, kernel_estimate
from bochner.maps.hybrid import AngularHybridFeatures, GaussianHybridFeatures

RESULT = Path(__file__).parent / "results" / "softmax_metrics.json"
SIZES = {
    64: 8,
    128: 16,
    256: 32,
    512: 64,
}  # features of the plain maps: projections of a hybrid's bases, with 8 coefficients
QUERIES = 100


def makers(m: int, radius: float) -> dict[str, Any]:
    n = SIZES[m]
    iid: dict[str, Any] = {"projection": "iid"}
    return {
        "positive": lambda: feature_map("positive", dim=DIM, num_features=m, **iid),
        "trig": lambda: feature_map("trig", dim=DIM, num_features=m // 2, **iid),
        "gaussian hybrid": lambda: GaussianHybridFeatures(DIM, n, num_coefficients=8, radius=radius, **iid),
        "angular hybrid": lambda: AngularHybridFeatures(DIM, n, num_coefficients=8, **iid),
        "calibrated (ours)": lambda: feature_map("calibrated", dim=DIM, num_features=m),
    }


def metrics(estimate: Tensor, truth: Tensor) -> dict[str, float]:
    """Distances between distributions over the line of classes, means over the queries."""
    negative = float((estimate < 0).double().mean())
    p = estimate.clamp_min(0)
    gap = (p / p.sum(1, keepdim=True).clamp_min(1e-300) - truth).cumsum(1).abs()
    return {"wasserstein": float(gap.sum(1).mean()), "ks": float(gap.amax(1).mean()), "negative": negative}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, words, held = trained(options.steps)
    weight, bias = model.embedding.weight, model.bias
    loss = validation_loss(model, held)
    y = weight.detach().double()
    calibration = hidden_states(model, words, 2000)[0].double()
    x = hidden_states(model, held, 20 * QUERIES)[0][::20].double()
    # The model has a bias; estimates are of exp(x . y) and the same factor exp(b) stands on both sides.
    factor = bias.detach().double().exp()
    truth = torch.softmax(x @ y.T + bias.detach().double(), 1)
    lengths = {"queries": float(x.norm(dim=1).mean()), "classes": float(y.norm(dim=1).mean())}
    print(f"held-out cross entropy {loss:.3f}; mean lengths {lengths}")
    radius = max(lengths.values())
    found: dict[str, Any] = {}
    print("\n| features | map | 1d-Wasserstein | Kolmogorov-Smirnov | negative |\n|---|---|---|---|---|")
    for m in SIZES:
        for name, make in makers(m, radius).items():
            phi = make().double()
            runs = []
            for seed in range(options.runs):
                phi.redraw_(seed)
                if name.startswith("calibrated"):
                    phi.calibrate_(calibration, y[:: len(y) // 2000])
                runs.append(metrics(kernel_estimate(phi, x, y) * factor, truth))
            mean = {k: statistics.mean(r[k] for r in runs) for k in runs[0]}
            spread = {k: statistics.stdev(r[k] for r in runs) for k in runs[0]}
            found[f"{m}/{name}"] = {"mean": mean, "deviation": spread}
            cells = (f"{mean[k]:.4g} +- {spread[k]:.2g}" for k in mean)
            print(f"| {m} | {name} | " + " | ".join(cells) + " |", flush=True)
    verdict: dict[str, str] = {}
    for key in ("wasserstein", "ks"):
        plain = [min(found[f"{m}/{n}"]["mean"][key] for n in ("positive", "trig")) for m in SIZES]
        for hybrid in ("gaussian hybrid", "angular hybrid"):
            wins = sum(found[f"{m}/{hybrid}"]["mean"][key] < p for m, p in zip(SIZES, plain, strict=True))
            verdict[f"{hybrid} below positive and trig in {key}"] = f"at {wins} of {len(SIZES)} sizes"
    for hybrid in ("gaussian hybrid", "angular hybrid"):
        wins = sum(found[f"{m}/{hybrid}"]["mean"]["negative"] < found[f"{m}/trig"]["mean"]["negative"] for m in SIZES)
        verdict[f"{hybrid} fewer negative estimates than trig"] = f"at {wins} of {len(SIZES)} sizes"
    holds = all(v.startswith(f"at {len(SIZES)}") for v in verdict.values())
    for k, v in verdict.items():
        print(f"claim, {k}: {v}")
    print(f"claim as a whole: {'holds' if holds else 'FAILS'}")
    result = {"cross_entropy": loss, "lengths": lengths, "runs": options.runs, "metrics": found, "verdict": verdict}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
