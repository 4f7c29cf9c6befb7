"""Figure 10 of *Hybrid Random Features* (appendix I): an LSTM trained with a sampled softmax, and exactly.

Samplers "as the paper" have features of vectors brought to length 1 and go to the last class; FAVOR+ is the paper's
eq. (3). Beside them our own tree (calibrated map, exact leaves, vectors as they are). Measured: exact held-out cross
entropy, its distance to that of exact training with the same seed, and the divergence of the two models' predictions.

`--set size=paper steps=5200 seeds=1` has the paper's features and draws, for an epoch of the Brown corpus, and is
stored beside the smaller runs; `--set path=FILE` takes another text, such as Penn Treebank.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from _framework import Said, Store, experiment, graded, named
from _language import CLASSES, DIM, Model, corpus, hidden_states, train, validation_loss
from _pictures import COLOURS, GREY, by_name, dots, figure, save
from torch import Tensor

from bochner import feature_map
from bochner.maps.hybrid import AngularHybridFeatures, BipolarFeatures, GaussianHybridFeatures
from bochner.sampling import ExactSampler, FeatureTree, LogUniformSampler, SampledSoftmaxLoss, UniformSampler

IID: dict[str, Any] = {"projection": "iid"}
# Features of plain maps, projections and coefficients of hybrids, draws a word.
SIZES = {"small": (64, 8, 8, 20), "paper": (1024, 128, 8, 40)}
TABLES = {"small": "runs", "paper": "runs at the paper's sizes"}


class AllClasses(ExactSampler):
    """The law of a tree whose features go to the last class, from the values of all classes.

    10,000 classes with 1,024 features are faster at once than down a tree, and the value of a hybrid is put together
    from those of its parts, without their outer product. Values of signed maps below zero count as none, and a tenth
    of the draws is uniform, as in `FeatureTree`.
    """

    def __init__(self, y: Tensor, b: Tensor, phi: Any) -> None:
        super().__init__(y, b)
        self.phi = phi
        self.uniform = 0.0 if phi.positive else 0.1
        self.bases = [phi]
        if isinstance(phi, BipolarFeatures):
            shared = {"projection": phi.projection}
            self.bases = [feature_map(n, phi.dim, phi.num_projections, **shared) for n in ("hyperbolic", "trig")]
        self.set_classes_(y, b)

    def parts(self, x: Tensor, role: str) -> list[Tensor]:
        """The features of the bases, then those of the coefficient of a hybrid."""
        found = [base(x, role=role) for base in self.bases]
        found += [self.phi._coefficient(x)[0]] if len(self.bases) == 2 else []
        return [f.values * f.log_scale.exp() for f in found]

    def values(self, x: Tensor) -> Tensor:
        """The estimate of `exp(x . y)` for every class, times `exp(b)`."""
        first, *rest = (f @ g.T for f, g in zip(self.parts(unit(x), "query"), self.keys, strict=True))
        if rest:
            trig, coefficient = rest
            _, constant, weight = self.phi._coefficient(x[:1])
            first = first.sub_(trig).mul_(coefficient.mul_(weight).add_(constant)).add_(trig)
        return first.mul_(self.bias.exp())

    @torch.no_grad()
    def set_classes_(self, vectors: Tensor, bias: Tensor | None = None) -> AllClasses:
        super().set_classes_(vectors, bias)
        self.keys = self.parts(unit(self.vectors), "key")
        return self

    def update_(self, ids: Tensor, vectors: Tensor, bias: Tensor | None = None) -> AllClasses:
        return self  # all classes follow every few steps

    def _log_softmax(self, x: Tensor) -> Tensor:
        law = self.values(x).clamp_min_(0)
        law.div_(law.sum(1, keepdim=True).clamp_min(1e-30))
        return law.mul_(1 - self.uniform).add_(self.uniform / self.num_classes).clamp_min_(1e-30).log_()


def unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def samplers(y: Tensor, b: Tensor, size: str = "small") -> dict[str, Any]:
    """By name, what makes each sampler."""
    features, m, n, _ = SIZES[size]

    def tree(phi: Any, count: int = 0) -> FeatureTree | AllClasses:
        phi = feature_map(phi, DIM, count, **IID) if count else phi
        if size == "paper":
            return AllClasses(y, b, phi)
        return FeatureTree(y, b, feature_map=phi, normalize=1.0, leaf_size=1)

    gaussian = {"num_coefficients": n, "radius": 1.0, **IID}
    return {
        "uniform": lambda: UniformSampler(CLASSES),
        "tree": lambda: FeatureTree(y, b),
        "log-uniform": lambda: LogUniformSampler(CLASSES),
        "softmax itself": lambda: ExactSampler(y, b),
        "FAVOR+, as the paper": lambda: tree("hyperbolic", features // 2),
        "positive, as the paper": lambda: tree("positive", features),
        "trig, as the paper": lambda: tree("trig", features),
        "angular hybrid, as the paper": lambda: tree(AngularHybridFeatures(DIM, m, num_coefficients=n, **IID)),
        "gaussian hybrid, as the paper": lambda: tree(GaussianHybridFeatures(DIM, m, **gaussian)),
    }


def fit(name: str, seed: int, steps: int, words: Tensor, held: Tensor, size: str) -> tuple[Model, list[float]]:
    model = Model(seed)
    weight, bias = model.embedding.weight, model.bias
    measured: dict[str, Any] = {"every": 100, "measure": lambda: validation_loss(model, held, 5000)}
    if name == "exact":
        entropy = torch.nn.functional.cross_entropy
        return model, train(model, words, steps, lambda h, t: entropy(model.logits(h), t), **measured)
    loss = SampledSoftmaxLoss(samplers(weight, bias, size)[name](), SIZES[size][3], seed=seed)

    def after_step(step: int, hidden: Tensor) -> None:
        # Adam moves the other rows too; a law that is some steps old is still the one that the loss corrects for.
        loss.refresh_(weight, bias, all_classes=step % (5 if size == "paper" else 25) == 0)
        if name == "tree" and (step in (20, 50, 100) or step % 200 == 0):
            assert isinstance(loss.sampler, FeatureTree)
            loss.sampler.calibrate_(hidden)

    return model, train(model, words, steps, lambda h, t: loss(h, t, weight, bias), after_step, **measured)


@torch.no_grad()
def divergence(one: Model, other: Model, held: Tensor, count: int = 2000) -> float:
    """The mean Kullback-Leibler divergence of the predictions of `other` from those of `one`."""
    logs = [torch.log_softmax(m.logits(hidden_states(m, held, count)[0]), 1) for m in (one, other)]
    return float((logs[0].exp() * (logs[0] - logs[1])).sum(1).mean())


@experiment(
    claim="Training with sampled classes comes close to exact training; feature samplers lie near each other and below "
    "uniform sampling.",
    items=("001 Figure 10",),
    paper="Penn Treebank, LSTM of width 200, 1,024 features, hybrids 128 x 8, 40 draws, 80 epochs, 25 runs",
    ours="Brown corpus, keys of 64. One run of one epoch has 1,024 features, hybrids 128 x 8 and 40 draws. Three runs "
    "of 0.1 epoch have 64 features, hybrids 8 x 8 and 20 draws",
    quick={"steps": 100, "seeds": 1, "names": ("uniform", "tree", "FAVOR+, as the paper")},
)
def measure(
    store: Store, steps: int = 500, seeds: int = 3, names: tuple[str, ...] = (), size: str = "small", path: str = ""
) -> None:
    words, held = corpus(path)
    runs = store.table(TABLES[size])
    store.table("sizes")[size] = {"steps": steps, "draws": SIZES[size][3]}
    exact: dict[int, Model] = {}

    def cell(name: str, seed: int) -> dict[str, Any]:
        model, curve = fit(name, seed, steps, words, held, size)
        if name == "exact":
            exact[seed] = model
        return {
            "curve": curve,
            "loss": validation_loss(model, held),
            "divergence": divergence(exact[seed], model, held),
        }

    for name in names or tuple(samplers(torch.zeros(2, DIM), torch.zeros(2))):
        for seed in range(seeds):
            if f"{name}/{seed}" not in runs:
                if seed not in exact:
                    runs[f"exact/{seed}"] = cell("exact", seed)
                store.cell(f"{name}/{seed}", lambda n=name, s=seed: cell(n, s), runs)


def judge(found: Any) -> Said:
    told = []
    for size, runs in TABLES.items():
        if runs in found:
            means = {k: statistics.mean(v) for k, v in by_name(found[runs], "loss").items()}
            told.append(
                f"Held-out cross entropy, {runs}, {found['sizes'][size]['steps']:,} steps: {named(means, '.2f')}"
            )
    # By the last table: that of the paper's sizes, if it was made.
    paper = [v for k, v in means.items() if k.endswith("as the paper") and not k.startswith("positive")]
    below, close = max(paper) < means["uniform"], max(paper) < means["exact"] + 0.1
    return Said(
        "; ".join(told),
        graded(below and close, below or close),
        f"samplers on vectors of length 1 end {min(paper) - means['exact']:.2f} or more above exact training",
    )


def draw(found: Any) -> None:
    fig, (left, right) = figure(2, figsize=(11, 4))
    runs = [found[table] for table in TABLES.values() if table in found][-1]
    curves: dict[str, list[list[float]]] = {}
    for key, run in runs.items():
        curves.setdefault(key.rpartition("/")[0], []).append(run["curve"])
    means = {n: [statistics.mean(x) for x in zip(*c, strict=True)] for n, c in curves.items()}
    shown = {"exact": COLOURS[6], "tree": COLOURS[2], "uniform": COLOURS[1]}
    for name in sorted(means, key=lambda n: n in shown):
        if name in shown or "paper" in name:
            colour = shown.get(name, GREY)
            left.plot(range(100, 100 * len(means[name]) + 1, 100), means[name], "o-", markersize=3, color=colour)
            if name in shown and means[name]:
                place = {"xytext": (6, 4 if name == "tree" else -6), "textcoords": "offset points"}
                left.annotate(name, (100 * len(means[name]), means[name][-1]), color=colour, **place)
    left.set(xlabel="steps", ylabel="held-out cross entropy", title="while training; grey: samplers of the paper")
    left.margins(x=0.15)
    losses = by_name(runs, "loss")
    gaps = {n: [run - end for run, end in zip(x, losses["exact"], strict=False)] for n, x in losses.items()}
    dots(right, {n: x for n, x in gaps.items() if n != "exact"})
    if min(min(x) for n, x in gaps.items() if n != "exact") < 1:
        right.set_xscale("symlog", linthresh=0.1)
        right.set_xticks([-0.1, 0, 0.1, 1, 4], ["-0.1", "0", "0.1", "1", "4"])
        right.set_xlim(-0.15, 6)
    right.set(xlabel="above exact training with the same seed", title="at the end")
    save(fig, "sampled_softmax")
