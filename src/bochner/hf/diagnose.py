"""Diagnosis before conversion: what each map does to one layer's queries, keys and values.

Errors are measured on other sequences than the maps were calibrated on, and predicted by `theory`; speed is measured on
this machine. The diagnosis says when conversion is not worth it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bochner import theory
from bochner._checks import BochnerError, positive_int
from bochner._timing import best_times
from bochner.attention.checks import check_qkv
from bochner.hf.attention import LinearAttention
from bochner.hf.calibrate import Far, Samples, attention_weights, error_on
from bochner.hf.calls import Call, exact
from bochner.hf.config import Recipe
from bochner.hf.fates import EXACT, Fate, Hybrid, Kernel, Window, fate_of
from bochner.hf.plan import LayerPlan
from bochner.maps.base import FeatureMap
from bochner.maps.exponential import CalibratedFeatures

GOOD = 0.5  # relative error of a head's output that is good enough
FLOOR_LENGTH = 384  # tokens of the attention matrices whose rank floor is computed
HOPELESS = 0.9  # a kernel with an error above this share of uniform averaging's has learned nothing of the head
PREDICTION_PAIRS = 256  # rows and keys of the pairs that predictions are averaged over


@dataclass
class HeadDiagnosis:
    """One head: its attention, the error of every candidate, and what to do with it.

    `rank_floor`: what no map of the largest size can be below outside window and sinks, see `theory.rank_floor`.
    """

    layer: str
    head: int
    query_norm: float
    key_norm: float
    largest_logit: float
    entropy: float
    outside: float  # attention mass outside window and sinks
    peak: float
    measured: dict[str, float]
    predicted: dict[str, float]
    rank_floor: float
    verdict: str = ""


@dataclass
class Diagnosis:
    """What to convert to, and whether; `recipe` is for `convert`."""

    heads: list[HeadDiagnosis]
    recipe: Recipe
    worthwhile: bool
    reasons: list[str]
    speed: dict[int, tuple[float, float]] = field(default_factory=dict)  # length: seconds exact, linear
    memory: dict[int, tuple[int, int]] = field(default_factory=dict)  # length: bytes of the cache, exact, linear
    crossover: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON and for reports."""
        return asdict(self)

    def __str__(self) -> str:
        names = list(self.heads[0].measured)
        layers = list(dict.fromkeys(h.layer for h in self.heads))
        width = max(len("mean of all"), *(len(x) for x in layers))
        columns = [max(len(n), 7) for n in names]
        head = f"{'layer'.ljust(width)}   norms    logit entropy outside  "
        lines = [head + "  ".join(n.rjust(c) for n, c in zip(names, columns, strict=True))]
        for layer in [*layers, None]:
            rows = [h for h in self.heads if layer is None or h.layer == layer]
            mean = {n: sum(h.measured[n] for h in rows) / len(rows) for n in names}
            q, k, logit, entropy, outside = (
                sum(getattr(h, n) for h in rows) / len(rows)
                for n in ("query_norm", "key_norm", "largest_logit", "entropy", "outside")
            )
            cells = "  ".join(f"{mean[n]:{c}.3f}" for n, c in zip(names, columns, strict=True))
            name = (layer or "mean of all").ljust(width)
            lines.append(f"{name}  {q:4.1f} {k:4.1f}  {logit:6.1f}  {entropy:5.2f}   {outside:5.2f}   {cells}")
        theory_means = [
            f"{n} {sum(h.predicted[n] for h in self.heads) / len(self.heads):.2f}" for n in self.heads[0].predicted
        ]
        lines.append("predicted by theory for iid projections (1 is hopeless): " + ", ".join(theory_means))
        floors = sorted(h.rank_floor for h in self.heads)
        lines.append(
            f"rank floor, which no map of {self.recipe.num_features} features is below: median "
            f"{floors[len(floors) // 2]:.3f}, largest {floors[-1]:.3f}"
        )
        counts: dict[str, int] = {}
        for h in self.heads:
            counts[h.verdict] = counts.get(h.verdict, 0) + 1
        lines.append("heads: " + ", ".join(f"{n} {v}" for v, n in sorted(counts.items())))
        for n, (a, b) in sorted(self.speed.items()):
            lines.append(f"attention of one layer at {n} tokens: exact {a * 1e3:.1f} ms, linear {b * 1e3:.1f} ms")
        for n, (x, y) in sorted(self.memory.items()):
            lines.append(f"decoding memory at {n} tokens: {x / 1e6:.2f} MB as it is, {y / 1e6:.2f} MB converted")
        lines += self.reasons
        lines.append(f"recommended: bochner.convert(model, bochner.{self.recipe!r}, texts)")
        return "\n".join(lines)


class Layer(NamedTuple):
    """The recorded calls of one layer: those that calibrate, and those that are measured."""

    name: str
    calibration: list[Call]
    held: list[Call]

    @property
    def shape(self) -> Call:
        return self.held[0]

    @property
    def is_cross(self) -> bool:
        return any(c.query.shape[-2] != c.key.shape[-2] for c in self.held)

    def plan(self, fate: Fate) -> LayerPlan:
        """A plan with one fate for all heads."""
        (_, h, _, d), (_, g, _, v) = self.shape.query.shape, self.shape.value.shape
        return LayerPlan(self.name, h, g, d, v, [fate] * g, self.shape.is_causal, self.is_cross)


def diagnose(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    near: Window | None = None,
    num_features: Sequence[int] = (64, 128),
    length: int | None = None,
) -> Diagnosis:
    """Measure one layer's attention and say what to convert it to, head by head; transformers is not needed.

    `q` (b, h, n, d), `k`, `v` (b, g, s, d): queries, keys and values before scaling; without v, random values stand in.
    Half of the sequences calibrate the maps, the other half measures them. Every head has its rank floor, below which
    no map of the largest size can be. `near`: the window and sinks to consider; default `Window(32, 1)`, for causal
    attention `Window(128, 4)`. `num_features`: the sizes of maps to try. `length`: the number of tokens you care about,
    for speed and memory.

    >>> q = torch.randn(4, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    >>> diagnose(q, q, num_features=(32,), length=64).recipe.num_features
    32
    """
    if length is not None:
        positive_int(length, "length", "diagnose")
    sizes = [positive_int(m, "num_features", "diagnose") for m in num_features]
    if not sizes:
        raise BochnerError("The 'num_features' of diagnose is empty; give at least one number of features.")
    near = near or (Window(128, 4) if is_causal else Window(32, 1))
    if not isinstance(near, Window):
        raise BochnerError(f"The 'near' of diagnose must be a bochner.hf.Window, got {near!r}.")
    layer = _layer_of_tensors(q, k, v, scale, is_causal)
    heads = _examine(layer, None if layer.is_cross else near, sizes)
    return _recommend(heads, layer, near, max(sizes), length)


def _layer_of_tensors(q: Any, k: Any, v: Tensor | None, scale: float | None, is_causal: bool) -> Layer:
    if v is None:
        shape = k.shape if isinstance(k, Tensor) else ()
        v = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(k) if len(shape) == 4 else k
    check_qkv(q, k, v, "diagnose")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rows = [slice(i, i + 1) for i in range(len(q))]
    calls = [Call(q[i], k[i], v[i], is_causal, None, scale) for i in rows]
    half = len(calls) // 2
    # One sequence alone has to serve for both.
    return Layer("attention", calls[:half] or calls, calls[half:])


def _examine(layer: Layer, near: Window | None, sizes: Sequence[int]) -> list[HeadDiagnosis]:
    """Every candidate on every head of one layer; `near`: none for cross-attention."""
    samples, keywords = Samples(), {} if near is None else near.near
    for call in layer.calibration:
        samples.add(call)
    # What computes the heads, by the candidate's name; and the maps that theory can say something of.
    candidates: dict[str, Callable[[Call], Tensor]] = {"uniform": uniform}
    maps: dict[str, FeatureMap] = {}
    fates: dict[str, Fate] = {} if near is None else {"window": near}
    for m in sizes:
        fates |= {f"{name} {m}": Kernel(name, m) for name in ("positive", "calibrated")}
        if near is not None:
            fates[f"window+calibrated {m}"] = Hybrid(**keywords, num_features=m)
    m = max(sizes)
    if samples.rows >= m:  # a fit of every head takes a while: the largest size, beside the window if there is one
        label = f"landmark {m}" if near is None else f"window+landmark {m}"
        mapped: dict[str, Any] = {"feature_map": "landmark", "num_features": m}
        fates[label] = Kernel(**mapped) if near is None else Hybrid(**keywords, **mapped)
    for label, fate in fates.items():
        candidates[label] = made = LinearAttention(layer.plan(fate))
        made.fit(samples)
        if isinstance(fate, Kernel) and fate.feature_map != "landmark":
            maps[label] = made.parts["kernel"].phi  # type: ignore[assignment]
    measured = {label: error_on(layer.held, attention) for label, attention in candidates.items()}
    predicted = {label: _predict(phi, layer.shape) for label, phi in maps.items()}
    floors = _rank_floors(layer.shape, keywords, m)
    statistics: dict[str, Any] = _statistics(layer.calibration, keywords)
    return [
        HeadDiagnosis(
            layer=layer.name,
            head=i,
            **{name: values[i].item() for name, values in statistics.items()},
            measured={label: e[i].item() for label, e in measured.items()},
            predicted={label: e[i].item() for label, e in predicted.items()},
            rank_floor=floors[i].item(),
        )
        for i in range(layer.shape.query.shape[1])
    ]


def _statistics(calls: Sequence[Call], near: dict[str, Any]) -> dict[str, Tensor]:
    """What the attention of each head looks like, (h,): means over rows and calls; of logits the largest."""
    found: dict[str, list[Tensor]] = {}
    for call in calls:
        far, root = Far.of(call, **near), call.scale**0.5
        weights, key = attention_weights(call, far.allowed), call.key.float().repeat_interleave(call.group, dim=1)
        outside = weights * far.far
        logits = (call.query.float() @ key.mT * call.scale).masked_fill(~far.allowed, -torch.inf)
        rows = {
            "query_norm": call.query.float().norm(dim=-1) * root,
            "key_norm": key.norm(dim=-1) * root,
            "largest_logit": logits.amax((-1, -2))[..., None],
            "entropy": torch.special.entr(weights).sum(-1),
            "outside": outside.sum(-1),
            "peak": outside.amax(-1),
        }
        for name, values in rows.items():
            found.setdefault(name, []).append(values.double().mean((0, 2)))
    means = {name: torch.stack(values).mean(0) for name, values in found.items()}
    return {**means, "largest_logit": torch.stack(found["largest_logit"]).amax(0)}


def _rank_floors(call: Call, near: dict[str, Any], m: int) -> Tensor:
    """Of every head, (h,), on the first tokens of one sequence; the last ones where queries belong to the last keys."""
    few = slice(-FLOOR_LENGTH, None) if call.is_causal else slice(FLOOR_LENGTH)
    part = call._replace(query=call.query[:1, :, few], key=call.key[:1, :, few], value=call.value[:1, :, few])
    far = Far.of(part, **near)
    weights = attention_weights(part, far.allowed)[0]
    return torch.stack([theory.rank_floor(w, m, far.far[0, 0]) for w in weights])


def uniform(call: Call) -> Tensor:
    """The mean of the values that each query may attend to: what attention is without queries and keys."""
    allowed = Far.of(call).allowed.to(call.value.dtype)
    mean = allowed / allowed.sum(-1, keepdim=True).clamp_min(1)
    return mean @ call.value.repeat_interleave(call.group, dim=1)


@torch.no_grad()
def _predict(phi: FeatureMap, call: Call) -> Tensor:
    """`mean_i min(1, sqrt(sum_j A_ij^2 r_ij^2 / sum_j A_ij^2))`: r the error of the kernel, A attention.

    The error of the numerator over its size, for values without structure and iid projections: somewhat more than is
    measured, for the normaliser takes the common part of a row's errors away. Attention saturates where it exceeds one.
    """
    group, root = call.group, call.scale**0.5
    small = call._replace(query=call.query[:1, :, :PREDICTION_PAIRS], key=call.key[:1, :, :PREDICTION_PAIRS])
    x = (small.query.float() * root).unflatten(1, (-1, group))[0]
    y = (small.key.float() * root)[0]
    law: str | theory.Estimator = "positive"
    if isinstance(phi, CalibratedFeatures):
        a, b = phi.centre_query[:, None, None], phi.centre_key[:, None]
        x, y = (x - a) @ phi.basis_query.mT[:, None], (y - b) @ phi.basis_key.mT
    allowed = torch.ones(x.shape[-2], y.shape[-2], dtype=torch.bool)
    if call.is_causal:
        allowed = allowed.tril()
    weights = attention_weights(small, allowed)[0].unflatten(0, (-1, group))
    errors = []
    for g in range(y.shape[0]):
        if isinstance(phi, CalibratedFeatures):
            law = theory.Estimator("dense", a=phi.a[g])
        r = theory.relative_error(x[g].unsqueeze(-2), y[g][None, None], phi.num_features, law)
        share = weights[g].double().square()
        square = (share * r.double().clamp_max(1e6).square()).sum(-1) / share.sum(-1)
        errors.append(square.sqrt().clamp_max(1.0).mean(-1))
    return torch.cat(errors)


def _recommend(heads: list[HeadDiagnosis], layer: Layer, near: Window, m: int, length: int | None) -> Diagnosis:
    """One recipe for all heads, those it leaves exact, and whether to do it at all."""
    windows = all("window" in h.measured for h in heads)
    kernel, beside = f"calibrated {m}", "window+" if windows else ""

    def mean(name: str) -> float:
        return sum(h.measured[name] for h in heads) / len(heads)

    names = [f"{beside}{name} {m}" for name in ("landmark", "calibrated")]
    best = min((n for n in names if all(n in h.measured for h in heads)), key=mean)
    for h in heads:
        h.verdict = _verdict(h.measured, kernel, best)
    recipe = _recipe(heads, layer, near if windows else None, m, best)
    plan = _planned(layer, recipe)
    speed = _time(layer, plan, length)
    crossover = _crossover(speed)
    lengths = sorted({length or 4096, 4096})
    memory = {n: (plan.cache_bytes(n, converted=False), plan.cache_bytes(n)) for n in lengths}
    errors = {n: mean(n) for n in ("uniform", f"positive {m}", best)}
    reasons = [
        f"error of the attention output: uniform averaging {errors['uniform']:.2f}, plain FAVOR+ m={m} "
        f"{errors[f'positive {m}']:.2f}, {best} {errors[best]:.2f}."
    ]
    worthwhile = True
    share = sum("keep exact" in h.verdict for h in heads) / len(heads)
    if share > 0.5:
        worthwhile = False
        reasons.append(
            f"{share:.0%} of the heads would have to stay exact: converting is not worth it as it is; distill."
        )
    if crossover is None:
        reasons.append(
            "Exact attention was faster at every length measured: convert for memory in decoding, not for speed."
        )
    else:
        threads = torch.get_num_threads()
        reasons.append(
            f"Linear attention is faster from about {crossover} tokens on, on this machine with {threads} "
            f"thread{'s' if threads > 1 else ''}; times on busy cores depend on their number."
        )
    if length is not None and (crossover is None or length < crossover):
        worthwhile = False
        reasons.append(
            f"At your {length} tokens exact attention is faster: keep it, unless decoding memory is the matter."
        )
    return Diagnosis(heads, recipe, worthwhile, reasons, speed, memory, crossover)


def _verdict(measured: dict[str, float], kernel: str, best: str) -> str:
    """What to do with a head, by its measured errors."""
    if measured[kernel] <= GOOD:
        return "kernel is enough"
    if measured.get("window", math.inf) <= GOOD:
        return "window is enough"
    if measured[best] <= GOOD:
        return "window and kernel"
    hopeless = measured[kernel] > HOPELESS * measured["uniform"]
    return "hopeless for kernels, keep exact" if hopeless else "above target, keep exact"


def _recipe(heads: list[HeadDiagnosis], layer: Layer, near: Window | None, m: int, best: str) -> Recipe:
    """The recipe for `convert`; a key head stays exact if one of its query heads should."""
    alone = near is None or all(h.verdict == "kernel is enough" for h in heads)
    fitted = "landmark" in best and not (near is not None and alone)  # beside a window it was not measured alone
    kept = sorted({(0, h.head // layer.shape.group) for h in heads if "keep exact" in h.verdict})
    options: dict[str, Any] = {} if near is None or alone else near.near
    return Recipe("landmark" if fitted else "calibrated", m, exact_heads=kept or 0.0, **options)


def _planned(layer: Layer, recipe: Recipe) -> LayerPlan:
    """The plan of the layer under a recipe."""
    plan = layer.plan(fate_of(recipe, layer.is_cross))
    for _, g in recipe.exact_heads or ():
        plan.fates[g] = EXACT
    return plan


@torch.no_grad()
def _time(layer: Layer, plan: LayerPlan, length: int | None) -> dict[int, tuple[float, float]]:
    """Seconds of the layer's attention, exact and as planned, at a few lengths on this machine."""
    call = layer.shape
    linear = LinearAttention(plan).to(call.key.device)
    found = {}
    for n in sorted({512, 2048, *([length] if length is not None and length <= 8192 else [])}):
        g = torch.Generator().manual_seed(n)
        q, k, v = (torch.randn(1, t.shape[1], n, t.shape[-1], generator=g).to(t) for t in call[:3])
        made = call._replace(query=q, key=k, value=v, padding=None)
        seconds = best_times({"exact": partial(exact, made), "linear": partial(linear, made)}, repeats=3, warm_up=False)
        found[n] = (seconds["exact"], seconds["linear"])
    return found


def _crossover(speed: dict[int, tuple[float, float]]) -> int | None:
    """Where a n^2 = b n, from the longest measurement; None when it is beyond eight times what was measured."""
    n = max(speed)
    plain, linear = speed[n]
    where = round(n * linear / plain)
    return where if where <= 8 * n else None
