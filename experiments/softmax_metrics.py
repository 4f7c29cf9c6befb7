"""The softmax of an LSTM language model estimated by random features: tables 4, 5, figures 3, 7, 8, 9 of paper 001.

Classes are points 0 .. 9,999 on a line, in the order of frequency; estimates are cut at zero and normalised. FAVOR+ is
the paper's eq. (3), the hyperbolic form. Beside them plain positive features and the calibrated map of this library.
`regularised` is the model of the paper's eq. (105), whose queries and keys have lengths near 1, in place of WikiText-2.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from _framework import Said, Store, experiment, graded, table
from _language import DIM, hidden_states, trained, validation_loss
from _pictures import COLOURS, figure, log_ticks, save
from torch import Tensor

from bochner import feature_map, kernel_estimate
from bochner.maps.hybrid import AngularHybridFeatures, GaussianHybridFeatures
from bochner.theory import mse_hyperbolic, mse_trig

# Features of the plain maps: projections of a hybrid's bases, with 8 coefficients.
SIZES = {64: 8, 128: 16, 256: 32, 512: 64}
QUERIES, QUANTILES = 100, (0.01, 0.1, 0.5, 0.9, 0.99)
PLAIN, HYBRIDS = ("FAVOR+", "trig"), ("gaussian hybrid", "angular hybrid")


def makers(m: int, radius: float) -> dict[str, Any]:
    n = SIZES[m]
    iid: dict[str, Any] = {"projection": "iid"}
    return {
        "FAVOR+": lambda: feature_map("hyperbolic", dim=DIM, num_features=m // 2, **iid),
        "positive": lambda: feature_map("positive", dim=DIM, num_features=m, **iid),
        "trig": lambda: feature_map("trig", dim=DIM, num_features=m // 2, **iid),
        "gaussian hybrid": lambda: GaussianHybridFeatures(DIM, n, num_coefficients=8, radius=radius, **iid),
        "angular hybrid": lambda: AngularHybridFeatures(DIM, n, num_coefficients=8, **iid),
        "calibrated (ours)": lambda: feature_map("calibrated", dim=DIM, num_features=m),
    }


def distances(estimate: Tensor, truth: Tensor) -> dict[str, float]:
    """Distances between distributions over the line of classes, means over the queries."""
    p = estimate.clamp_min(0)
    gap = (p / p.sum(1, keepdim=True).clamp_min(1e-300) - truth).cumsum(1).abs()
    negative = float((estimate < 0).double().mean())
    return {"wasserstein": float(gap.sum(1).mean()), "ks": float(gap.amax(1).mean()), "negative": negative}


def described(lengths: Tensor) -> dict[str, Any]:
    """Quantiles and a histogram of 40 bins."""
    counts, edges = torch.histogram(lengths.float(), 40)
    found = lengths.quantile(torch.tensor(QUANTILES, dtype=lengths.dtype))
    shares = (counts / counts.sum()).tolist()
    return {
        "quantiles": dict(zip(map(str, QUANTILES), found.tolist(), strict=True)),
        "edges": edges.tolist(),
        "share": shares,
    }


def model_figures(steps: int, runs: int, corpus: str, regularised: bool) -> dict[str, Any]:
    model, words, held = trained(steps, corpus, regularised)
    t = model.temperature**0.5  # half of it to the queries, half to the keys
    y, bias = t * model.embedding.weight.detach().double(), model.bias.detach().double()
    calibration = t * hidden_states(model, words, 2000)[0].double()
    many = t * hidden_states(model, held, 20 * QUERIES)[0].double()
    x = many[::20]
    # The model has a bias; estimates are of exp(x . y) and the same factor exp(b) stands on both sides.
    truth, factor = torch.softmax(x @ y.T + bias, 1), bias.exp()
    lengths = {"queries": float(x.norm(dim=1).mean()), "classes": float(y.norm(dim=1).mean())}
    pick = y[torch.randint(len(y), (len(many),), generator=torch.Generator().manual_seed(0))]
    value = (many * pick).sum(-1).exp()
    off = {
        n: float((f(many, pick, 64).sqrt() / value).median())
        for n, f in (("FAVOR+", mse_hyperbolic), ("trig", mse_trig))
    }
    found: dict[str, Any] = {}
    for m in SIZES:
        for name, make in makers(m, max(lengths.values())).items():
            phi, seen = make().double(), []
            for seed in range(runs):
                phi.redraw_(seed)
                if name.startswith("calibrated"):
                    phi.calibrate_(calibration, y[:: len(y) // 2000])
                seen.append(distances(kernel_estimate(phi, x, y) * factor, truth))
            mean, spread = ({k: f(r[k] for r in seen) for k in seen[0]} for f in (statistics.mean, statistics.stdev))
            found[f"{m}/{name}"] = {"mean": mean, "deviation": spread}
            print(f"{m}/{name}: {mean}", flush=True)
    histograms = {"queries": described(many.norm(dim=1)), "keys": described(y.norm(dim=1))}
    head = {"cross_entropy": validation_loss(model, held), "lengths": lengths, "histograms": histograms}
    return {**head, "relative_error": off, "runs": runs, "metrics": found}


@experiment(
    claim="At equal FLOPs hybrids are closer to the softmax of a language model than FAVOR+ and trigonometric "
    "features. That is so in Wasserstein and Kolmogorov-Smirnov distance. They have fewer negative estimates than "
    "trigonometric ones.",
    items=("001 Figure 3", "001 Table 4", "001 Figure 7", "001 Figure 8", "001 Table 5", "001 Figure 9"),
    paper="LSTM of width 200 (650), Penn Treebank (WikiText-2), trained to its end, 10 runs",
    ours="LSTM of width 128, keys of 64, Brown corpus, 500 steps, 10 runs",
    quick={"steps": 60, "runs": 2, "regularised": False},
)
def measure(store: Store, steps: int = 500, runs: int = 10, corpus: str = "", regularised: bool = True) -> None:
    """`corpus`: a text file in place of the Brown corpus, the Penn Treebank for one."""
    if "metrics" not in store.figures:
        store.figures |= model_figures(steps, runs, corpus, False)
        store.save()
    if regularised:
        store.cell("regularised", lambda: model_figures(steps, runs, corpus, True))


def wins(found: Any) -> dict[str, int]:
    """At how many sizes each part of the claim holds."""
    table, out = found["metrics"], {}
    for hybrid in HYBRIDS:
        for key in ("wasserstein", "ks"):
            better = [
                table[f"{m}/{hybrid}"]["mean"][key] < min(table[f"{m}/{p}"]["mean"][key] for p in PLAIN) for m in SIZES
            ]
            out[f"{hybrid} below FAVOR+ and trig in {key}"] = sum(better)
        fewer = [table[f"{m}/{hybrid}"]["mean"]["negative"] < table[f"{m}/trig"]["mean"]["negative"] for m in SIZES]
        out[f"{hybrid} fewer negative estimates than trig"] = sum(fewer)
    return out


def judge(found: Any) -> Said:
    told, parts = {}, []
    for name, case in (("as trained", found), ("regularised", found.get("regularised"))):
        if case is not None:
            won = wins(case)
            parts += won.items()
            told[name] = {f"mean length of {k}": f"{v:.1f}" for k, v in case["lengths"].items()}
            told[name] |= {"cross entropy": f"{case['cross_entropy']:.2f}"}
            told[name] |= {f"{k}, of {len(SIZES)} sizes": f"{n}" for k, n in won.items()}
    whole = all(n == len(SIZES) for _, n in parts)
    return Said(
        "The model, and the sizes at which a claim holds:"
        + table({what: {name: row[what] for name, row in told.items()} for what in told["as trained"]}),
        graded(whole, any(n for k, n in parts if "below" in k)),
        "another corpus and a smaller model. Where its vectors are long, positive features are closer, and "
        "fitted ones by far",
    )


def draw(found: Any) -> None:
    cases = (
        {"as trained": found, "eq. (105)": found["regularised"]} if "regularised" in found else {"as trained": found}
    )
    titles = {"wasserstein": "1d-Wasserstein", "ks": "Kolmogorov-Smirnov", "negative": "share of negative estimates"}
    fig, axes = figure(3, len(cases), figsize=(12, 3.6 * len(cases)), squeeze=False)
    for row, (case, content) in zip(axes, cases.items(), strict=True):
        for ax, (metric, title) in zip(row, titles.items(), strict=True):
            for name, colour in zip(makers(64, 1.0), COLOURS, strict=False):
                cells = [content["metrics"][f"{m}/{name}"] for m in SIZES]
                style = {"marker": "o", "markersize": 4, "capsize": 2, "color": colour, "label": name}
                ax.errorbar(
                    list(SIZES), [c["mean"][metric] for c in cells], [c["deviation"][metric] for c in cells], **style
                )
            log_ticks(ax, SIZES, base=2)
            ax.set(title=f"{title}, {case}", xlabel="features")
            ax.set_ylim(bottom=0)
    axes[0][0].legend(fontsize=8, loc="center left", bbox_to_anchor=(0, 0.55))
    save(fig, "softmax_metrics")
    fig, axes = figure(len(cases), figsize=(6 * len(cases), 3.2), squeeze=False)
    for ax, (case, content) in zip(axes[0], cases.items(), strict=True):
        for (name, histogram), colour in zip(content["histograms"].items(), COLOURS, strict=False):
            ax.stairs(histogram["share"], histogram["edges"], fill=True, alpha=0.45, color=colour, label=name)
            ax.axvline(histogram["quantiles"]["0.5"], color=colour, linewidth=1)
        ax.set(xlabel="length", ylabel="share of the vectors", xlim=(0, None), title=case)
        ax.legend()
    save(fig, "softmax_lengths")
