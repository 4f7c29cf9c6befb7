"""What each part of the landmark fit is worth: MiniLM's heads, signed map, m = 32, every part changed on its own.

Errors on texts by other authors, and on modern film reviews for the shift of domain.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from _framework import Said, Store, experiment, kept, missed
from _models import Sequences, layers_of, tokenised
from _pictures import COLOURS, GREY, figure, save
from torch import Tensor

from bochner import data, demo
from bochner.maps import landmark_fit as fit


@contextlib.contextmanager
def changed(owner: Any, **parts: Any) -> Iterator[None]:
    """Some names of a module or class replaced for a while."""
    before = {name: getattr(owner, name) for name in parts}
    for name, part in parts.items():
        setattr(owner, name, part)
    try:
        yield
    finally:
        for name, part in before.items():
            setattr(owner, name, part)


def random_landmarks(rows: Tensor, metric: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    pick = torch.randperm(len(rows), generator=generator)[:count]
    return rows[pick], torch.full((count,), 1 / count)


def plain_landmarks(rows: Tensor, metric: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return LANDMARKS(rows, torch.eye(rows.shape[-1]), count, generator)


def without_caps(sequences: Any, count: int, near: fit.Near, generator: torch.Generator) -> Any:
    hidden, problem = POSE(sequences, count, near, generator)
    return hidden._replace(cap=torch.full_like(hidden.cap, 60.0)), problem


def one_normaliser(self: fit.Hidden, x: Tensor) -> tuple[Tensor, Tensor]:
    """One z for all queries: the same hidden features without a normaliser of their own."""
    logits = x @ self.c.mT + self.log_w
    return logits.clamp_max(30).exp(), torch.zeros_like(logits[:, :1])


def sampled_normaliser(self: fit.Hidden, x: Tensor) -> tuple[Tensor, Tensor]:
    """z from every second landmark: half as good an estimate of the row's normaliser."""
    logits = x @ self.c.mT + self.log_w
    z = logits[:, ::2].logsumexp(-1, keepdim=True) + math.log(2)
    return (logits - z).clamp_max(5).exp(), z


def with_outputs(weight: float) -> Callable[..., Any]:
    """The regression also fits outputs: `T V` of every sequence, V its normalised values and a one, as further keys."""

    def pose(sequences: list[fit.Rows], count: int, near: fit.Near, generator: torch.Generator) -> Any:
        hidden, problem = POSE(sequences, count, near, generator)
        x = torch.cat([s.x for s in sequences])
        x = x[torch.randperm(len(x), generator=generator)[: len(problem.f)]]
        y = torch.cat([s.y for s in sequences])
        y = y[torch.randperm(len(y), generator=generator)[: len(problem.g)]]
        f, z = hidden.query(x)
        length = sum(len(s.y) for s in sequences) / len(sequences)

        def target(y: Tensor) -> Tensor:
            return (x @ y.mT - z).clamp_max(math.log(length)).exp()

        def key(y: Tensor) -> Tensor:
            return torch.nn.functional.pad(hidden.key(y), (0, 1), value=1.0) / problem.g_scale

        targets, keys = [target(y)], [key(y)]
        for s in sequences:
            v = s.v / s.v.square().mean().sqrt() / math.sqrt(s.v.shape[-1])
            v = math.sqrt(weight) * torch.nn.functional.pad(v, (0, 1), value=1.0)
            targets.append(target(s.y) @ v)
            keys.append(v.mT @ key(s.y))
        return hidden, problem._replace(f=f / problem.f_scale, g=torch.cat(keys), target=torch.cat(targets, dim=1))

    return pose


LANDMARKS, POSE = fit.landmarks, fit._pose
BESIDE = fit.Near(window=32, sinks=1, window_kind="sliding")


class Variant(NamedTuple):
    """What is changed in the fit, the map's sizes, what it is fitted beside and used beside, calibration texts."""

    parts: dict[str, Any] | None = None
    m: int = 32
    M: int = 64
    positive: bool = False
    fitted: fit.Near = fit.Near()
    used: fit.Near = fit.Near()
    texts: int = 40


VARIANTS: dict[str, Variant] = {
    "as it is": Variant(),
    "landmarks: random rows": Variant({"landmarks": random_landmarks}),
    "landmarks: k-means, no metric": Variant({"landmarks": plain_landmarks}),
    "normaliser: one for all queries": Variant({"query": one_normaliser}),
    "normaliser: from half of the landmarks": Variant({"query": sampled_normaliser}),
    "no caps": Variant({"_pose": without_caps}),
    **{f"ridge {r:g}": Variant({"RIDGES": (r,)}) for r in (1e-5, 1e-3, 1e-2, 1e-1, 1.0)},
    **{f"top-up {t:g}": Variant({"TOP_UPS": (t,)}) for t in (0.02, 0.1, 0.5)},
    **{f"output weight {w:g}": Variant({"_pose": with_outputs(w)}) for w in (0.3, 3.0)},
    **{f"m = {m}, M = {M}": Variant(m=m, M=M) for m in (16, 32, 64) for M in (32, 64, 128, 256) if m <= M},
    **{f"calibration: {texts} texts": Variant(texts=texts) for texts in (8, 16, 100, 350)},
    "positive": Variant(positive=True),
    "window": Variant(m=16, fitted=BESIDE, used=BESIDE),
    "window, fitted to all pairs": Variant(m=16, used=BESIDE),
    "window, filled in half as often": Variant({"FILLS": 2}, m=16, fitted=BESIDE, used=BESIDE),
}


def reviews(count: int, words: int) -> list[str]:
    """Modern prose: the beginnings of film reviews, spread over the set."""
    found = json.loads(data.fetch("imdb").read_text(encoding="utf-8"))
    texts = (r["t"].replace("<br />", " ").split() for r in found[:: len(found) // (3 * count)])
    return [" ".join(t[:words]) for t in texts if len(t) >= words][:count]


def rows_of(sequences: Sequences, head: int) -> list[fit.Rows]:
    found = []
    for parts in sequences:
        q, k, v = (t[head].float() for t in parts)
        found.append(fit.Rows(q, k, v, torch.arange(len(q)), torch.arange(len(k))))
    return found


@torch.no_grad()
def run(variant: Variant, calibration: list[Sequences], sets: dict[str, list[Sequences]]) -> dict[str, float]:
    """Mean errors over heads: stated by the fit, and on every set."""
    errors: dict[str, list[float]] = {name: [] for name in ("stated", *sets)}
    of_hidden = {name: part for name, part in (variant.parts or {}).items() if name == "query"}
    of_fit = {name: part for name, part in (variant.parts or {}).items() if name not in of_hidden}
    with changed(fit, **of_fit), changed(fit.Hidden, **of_hidden):
        for layer, seen in enumerate(calibration):
            seen = seen[:: max(1, len(seen) // variant.texts)][: variant.texts]
            for h in range(seen[0][0].shape[0]):
                g = torch.Generator().manual_seed(h)
                head = fit.fit_head(
                    rows_of(seen, h), variant.m, variant.M, variant.fitted, positive=variant.positive, generator=g
                )
                errors["stated"].append(head.error)
                for name, found in sets.items():
                    wrong, total = fit.measure(head, rows_of(found[layer], h), variant.used, (head.top_up,))
                    errors[name].append(fit.relative_error(wrong[0], total)[0])
    return {name: sum(e) / len(e) for name, e in errors.items()}


@torch.no_grad()
def coverage(variant: Variant, calibration: list[Sequences], sets: dict[str, list[Sequences]]) -> dict[str, float]:
    """The share of texts whose error lies in the interval that the fit states, mean over heads; 0.95 is promised.

    "same books": passages of the calibration books that were not calibrated on.
    """
    step = max(1, len(calibration[0]) // variant.texts)
    sets = {"same books": [seen[step // 2 :: step] for seen in calibration], **sets}
    rates: dict[str, list[float]] = {name: [] for name in sets}
    for layer, seen in enumerate(calibration):
        for h in range(seen[0][0].shape[0]):
            g = torch.Generator().manual_seed(h)
            rows = rows_of(seen[::step][: variant.texts], h)
            head = fit.fit_head(rows, variant.m, variant.M, variant.fitted, positive=variant.positive, generator=g)
            for name, found in sets.items():
                wrong, total = fit.measure(head, rows_of(found[layer], h), variant.used, (head.top_up,))
                own = (wrong[0] / total).sqrt()
                rates[name].append(float(((own >= head.interval[0]) & (own <= head.interval[1])).double().mean()))
    return {name: sum(r) / len(r) for name, r in rates.items()}


@experiment(
    claim="Ours: landmarks must lie at the data, and count more than features. With a window the far pairs must be "
    "fitted alone. A strong ridge hurts. The metric of k-means and a weight on outputs are not worth much. 2,000 "
    "tokens do what 50,000 do.",
    ours="two layers of MiniLM, 40 texts to fit, 16 to measure",
    quick="fits maps to hundreds of texts, for each of its parts anew",
    needs=("transformers",),
)
def measure(store: Store, layers: int = 2, only: str = "") -> None:
    """`only`: variants whose name contains this."""
    model, tokenizer = demo.load_minilm()
    texts = {"other authors": data.paragraphs("heldout", 16), "modern": reviews(16, 110)}
    seen = data.paragraphs("calibration", 350)
    calibration, *others = (
        layers_of(model, tokenised(tokenizer, some, 150), layers) for some in (seen, *texts.values())
    )
    sets = dict(zip(texts, others, strict=True))
    for name, variant in VARIANTS.items():
        if only in name:
            store.cell(name, lambda v=variant: run(v, calibration, sets))
    for name in ("as it is", "positive", "window"):
        if only in name:
            covered = store.table("in the stated interval")
            store.cell(name, lambda n=name: coverage(VARIANTS[n], calibration, sets), covered)


def judge(found: Any) -> Said:
    error = {name: row["other authors"] for name, row in found.items() if "other authors" in row}
    usual, random = error["as it is"], error["landmarks: random rows"]
    little = min(error["landmarks: k-means, no metric"], error["output weight 0.3"])
    failed = missed(
        {
            "random landmarks and a strong ridge hurt": min(random, error["ridge 1"]) > 1.1 * usual,
            "far pairs fitted alone": error["window, fitted to all pairs"] > 1.2 * error["window"],
            "landmarks count more than features": error["m = 16, M = 128"] < error["m = 32, M = 32"],
            "metric and output weight are worth little": little > 0.97 * usual,
            "few tokens are enough": error["calibration: 16 texts"] < 1.05 * error["calibration: 350 texts"],
        }
    )
    return Said(
        f"error {usual:.2f} as it is, {random:.2f} with random rows; {len(error)} variants.", kept(not failed), failed
    )


def draw(found: Any) -> None:
    rows = {k: v for k, v in found.items() if "other authors" in v}
    names = list(rows)[::-1]
    fig, ax = figure(figsize=(8, 0.2 * len(names) + 1.2))
    for where, colour, marker in (("other authors", COLOURS[0], "o"), ("modern", COLOURS[1], "s")):
        places = [i for i, n in enumerate(names) if where in rows[n]]
        ax.plot([rows[names[i]][where] for i in places], places, marker, markersize=4, color=colour, label=where)
    ax.axvline(rows["as it is"]["other authors"], color=GREY, linestyle="--", linewidth=1)
    ax.set_yticks(range(len(names)), names, fontsize=7)
    ax.margins(y=0.02)
    ax.grid(axis="y", color="0.94")
    ax.set_xlabel("error of the attention output on held-out texts")
    ax.legend(fontsize=8, loc="lower right")
    save(fig, "landmark_ablations")
