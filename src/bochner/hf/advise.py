"""Diagnosis before conversion: for a model the search for a target; for one layer's tensors what each map does to them.

Errors are measured on other sequences than the maps were calibrated on, and predicted by `theory`; speed is measured on
this machine. The advice says when conversion is not worth it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bochner import theory
from bochner._checks import BochnerError, is_int, one_of, positive_float, positive_int, spawn_seed
from bochner._progress import speaker
from bochner._timing import best_times
from bochner.attention.checks import check_qkv
from bochner.hf import capture
from bochner.hf.aim import FLOOR_LENGTH, aim, goal_of, shapes_of, target_data
from bochner.hf.cost import check_border
from bochner.hf.layer import Call, LinearAttention, exact
from bochner.hf.measure import Far, HeadStatistics, Samples, attention_weights, error_on, far_pairs
from bochner.hf.patches import register_once
from bochner.hf.plan import WINDOW_KINDS, LayerPlan
from bochner.maps.base import FeatureMap
from bochner.maps.exponential import CalibratedFeatures

NEAR = ("window", "sinks", "window_kind")
HOPELESS = 0.9  # a kernel with an error above this share of uniform averaging's has learned nothing of the head
PREDICTION_PAIRS = 256  # rows and keys of the pairs that predictions are averaged over


@dataclass
class HeadAdvice:
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
class Advice:
    """What to convert to, and whether. `config` are keywords of `convert`."""

    heads: list[HeadAdvice]
    config: dict[str, Any]
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
            f"rank floor, which no map of {self.config['num_features']} features is below: median "
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
        lines.append(f"recommended: bochner.convert(model, {_arguments(self.config)}, calibration=texts)")
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

    def plan(self, kind: str, **options: Any) -> LayerPlan:
        """A plan with all heads of one kind."""
        (_, h, _, d), (_, g, _, v) = self.shape.query.shape, self.shape.value.shape
        options |= {"is_causal": self.shape.is_causal, "is_cross": self.is_cross}
        return LayerPlan(self.name, h, g, d, v, [kind] * h, **options)


def advise(
    model: Any,
    calibration: Any,
    values: Tensor | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    num_features: Sequence[int] = (64, 128),
    window: int | None = None,
    sinks: int | None = None,
    window_kind: str | None = None,
    target: float = 0.5,
    length: int | None = None,
    judge_length: int | None = None,
    keep: float | None = None,
    memory: float | None = None,
    minimize: str | None = None,
    parts: Sequence[str] | None = None,
    unsupported: str = "keep",
    exact_below: int | str | None = None,
    tokenizer: Any = None,
    batch_size: int = 8,
    seed: int = 0,
    progress: bool | None = None,
) -> Any:
    """Measure your attention and say what to use: `advise(model, texts)` or `advise(q, k, v)`.

    `advise(model, calibration, tokenizer=..., keep=0.99, length=n)`: the search of `convert(..., keep=...)` or
    `convert(..., memory=...)` without the change, and the rank floor of every head; returns a
    `bochner.hf.TargetReport`, whose `config` are keywords of `convert`. Without either 0.99 is to be kept. The first of
    `num_features` is taken; `window`, `sinks` and `window_kind` are chosen unless given; `parts`, `unsupported`,
    `exact_below`, `judge_length`, `calibration`, `progress`: as in `convert`.
    `advise(q, k, v)`: one layer's queries (b, h, n, d), keys and values before scaling, with `scale` and `is_causal`;
    without v, random values stand in; transformers is not needed. Half of the sequences calibrate the maps, the other
    half measures them, and every head has its rank floor; returns an `Advice`. `target`: the relative error of a
    head's output that is good enough. `length`: the number of tokens you care about, for speed and memory. `window`,
    `sinks`, `window_kind`: those to consider; default 32 and 1, for causal attention 128 and 4.

    >>> q = torch.randn(4, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    >>> advise(q, q, num_features=(32,), length=64).config["num_features"]
    32
    """
    if window is not None:
        positive_int(window, "window", "advise")
    if length is not None:
        positive_int(length, "length", "advise")
    positive_float(target, "target", "advise")
    sizes = [positive_int(m, "num_features", "advise") for m in num_features]
    if not sizes:
        raise BochnerError("The 'num_features' of advise is empty; give at least one number of features.")
    one_of(window_kind, "window_kind", "advise", (None, *WINDOW_KINDS))
    if not is_int(seed) or seed < 0:
        raise BochnerError(f"The 'seed' of advise must be an int >= 0, got {seed!r}.")
    border = check_border(exact_below, "advise")
    if isinstance(model, nn.Module):
        register_once()
        near: dict[str, Any] = {"window": window, "sinks": sinks, "window_kind": window_kind}
        model, tokenizer = capture.unwrap(model, tokenizer)
        data = target_data(model, calibration, tokenizer, judge_length or length, batch_size)
        shapes = shapes_of(model, data, unsupported, parts, owner="advise")
        keep = 0.99 if keep is None and memory is None else keep
        goal = goal_of(model, shapes, data, keep, minimize, length, judge_length, memory, owner="advise")
        say = speaker(sys.stderr.isatty() if progress is None else progress)
        options: dict[str, Any] = {"num_features": sizes[0], "exact_below": border, "floors": True, "seed": seed}
        options["say"] = say
        return aim(model, shapes, goal, data, **options, **near).report
    layer = _layer_of_tensors(model, calibration, values, scale, is_causal)
    near = {
        "window_kind": window_kind or "block",
        "window": window or (128 if is_causal else 32),
        "sinks": (4 if is_causal else 1) if sinks is None else sinks,
    }
    heads = _examine(layer, {} if layer.is_cross else near, sizes, spawn_seed(seed, 0))
    return _recommend(heads, [layer], near, max(sizes), target, length)


def _layer_of_tensors(q: Any, k: Any, v: Tensor | None, scale: float | None, is_causal: bool) -> Layer:
    if v is None:
        shape = k.shape if isinstance(k, Tensor) else ()
        v = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(k) if len(shape) == 4 else k
    check_qkv(q, k, v, "advise")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rows = [slice(i, i + 1) for i in range(len(q))]
    calls = [Call(q[i], k[i], v[i], is_causal, None, scale) for i in rows]
    half = len(calls) // 2
    # One sequence alone has to serve for both.
    return Layer("attention", calls[:half] or calls, calls[half:])


def _examine(layer: Layer, near: dict[str, Any], sizes: Sequence[int], seed: int) -> list[HeadAdvice]:
    """Every candidate on every head of one layer; `near`: window and sinks, empty for cross-attention."""
    statistics, samples = HeadStatistics(), Samples()
    moments: dict[str, Any] = {}
    for call in layer.calibration:
        for kind, options in (("kernel", {}), ("hybrid", near)):
            far = Far.of(call, **options)
            weights = attention_weights(call, far.allowed)
            new = far_pairs(call, weights, far)
            moments[kind] = moments[kind] + new if kind in moments else new
        statistics.add(call, weights, far)
        samples.add(call)
    # What computes the heads, by the candidate's name; and the maps that theory can say something of.
    candidates: dict[str, Callable[[Call], Tensor]] = {"uniform": uniform}
    maps: dict[str, FeatureMap] = {}
    if near:
        candidates["window"] = LinearAttention(layer.plan("window", **near))
    for m in sizes:
        for kind, map_name in (("kernel", "positive"), ("kernel", "calibrated"), ("hybrid", "calibrated")):
            if kind == "hybrid" and not near:
                continue
            options = near if kind == "hybrid" else {}
            made = LinearAttention(layer.plan(kind, feature_map=map_name, num_features=m, seed=seed, **options))
            phi = made.map_of(kind)
            if isinstance(phi, CalibratedFeatures):
                phi.fit_(moments[kind])
            label = f"{map_name} {m}" if kind == "kernel" else f"window+{map_name} {m}"
            candidates[label] = made
            if kind == "kernel":
                maps[label] = phi
    # A fit of every head takes a while: the largest size only, and beside the window if there is one.
    kind, m = "hybrid" if near else "kernel", max(sizes)
    if samples.rows >= m:
        made = LinearAttention(layer.plan(kind, feature_map="landmark", num_features=m, seed=seed, **near))
        samples.calibrate(made.map_of(kind), made.plan, kind)
        candidates[f"window+landmark {m}" if near else f"landmark {m}"] = made
    measured = {label: error_on(layer.held, attention) for label, attention in candidates.items()}
    predicted = {label: _predict(phi, layer.shape) for label, phi in maps.items()}
    floors = _rank_floors(layer.shape, near, m)
    means = {name: statistics.mean(name) for name in ("query_norm", "key_norm", "logit", "entropy", "mass", "peak")}
    return [
        HeadAdvice(
            layer=layer.name,
            head=i,
            query_norm=means["query_norm"][i].item(),
            key_norm=means["key_norm"][i].item(),
            largest_logit=means["logit"][i].item(),
            entropy=means["entropy"][i].item(),
            outside=means["mass"][i].item(),
            peak=means["peak"][i].item(),
            measured={label: e[i].item() for label, e in measured.items()},
            predicted={label: e[i].item() for label, e in predicted.items()},
            rank_floor=floors[i].item(),
        )
        for i in range(layer.shape.query.shape[1])
    ]


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
    options: dict[str, Any] = {"map": "positive"}
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
            options = {"map": "dense", "a": phi.a[g]}
        r = theory.relative_error(x[g].unsqueeze(-2), y[g][None, None], phi.num_features, **options)
        share = weights[g].double().square()
        square = (share * r.double().clamp_max(1e6).square()).sum(-1) / share.sum(-1)
        errors.append(square.sqrt().clamp_max(1.0).mean(-1))
    return torch.cat(errors)


def _recommend(
    heads: list[HeadAdvice],
    layers: list[Layer],
    near: dict[str, Any],
    m: int,
    target: float,
    length: int | None,
) -> Advice:
    """One configuration for all, the heads it leaves exact, and whether to do it at all."""
    windows = all("window" in h.measured for h in heads)
    kernel, beside = f"calibrated {m}", "window+" if windows else ""

    def mean(name: str) -> float:
        return sum(h.measured[name] for h in heads) / len(heads)

    names = [f"{beside}{name} {m}" for name in ("landmark", "calibrated")]
    best = min((n for n in names if all(n in h.measured for h in heads)), key=mean)
    for h in heads:
        h.verdict = _verdict(h.measured, kernel, best, target)
    config = _configuration(heads, layers, near if windows else {}, m, best)
    speed = _time(layers[0], config, length)
    crossover = _crossover(speed)
    memory = {n: _memory(layers, config, n) for n in sorted({length or 4096, 4096})}
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
    return Advice(heads, config, worthwhile, reasons, speed, memory, crossover)


def _verdict(measured: dict[str, float], kernel: str, best: str, target: float) -> str:
    """What to do with a head, by its measured errors."""
    if measured[kernel] <= target:
        return "kernel is enough"
    if measured.get("window", math.inf) <= target:
        return "window is enough"
    if measured[best] <= target:
        return "window and kernel"
    hopeless = measured[kernel] > HOPELESS * measured["uniform"]
    return "hopeless for kernels, keep exact" if hopeless else "above target, keep exact"


def _configuration(
    heads: list[HeadAdvice], layers: list[Layer], near: dict[str, Any], m: int, best: str
) -> dict[str, Any]:
    """The keywords of `convert`."""
    alone = not near or all(h.verdict == "kernel is enough" for h in heads)
    fitted = "landmark" in best and not (near and alone)  # beside a window it was not measured alone
    config: dict[str, Any] = {"feature_map": "landmark" if fitted else "calibrated", "num_features": m}
    if not alone:
        config |= near
    places = {layer.name: i for i, layer in enumerate(layers)}
    kept = [(places[h.layer], h.head) for h in heads if "keep exact" in h.verdict]
    if kept:
        config["exact_heads"] = kept
    return config


def _recommended(layer: Layer, config: dict[str, Any]) -> LayerPlan:
    """The plan of a layer under the configuration, before any head stays exact."""
    kind = "kernel" if "window" not in config else ("window" if config["feature_map"] is None else "hybrid")
    near = {k: config[k] for k in NEAR if k in config and not layer.is_cross}
    kind = "kernel" if layer.is_cross else kind
    map_name = config["feature_map"] or "calibrated"
    return layer.plan(kind, feature_map=map_name, num_features=config["num_features"], **near)


@torch.no_grad()
def _time(layer: Layer, config: dict[str, Any], length: int | None) -> dict[int, tuple[float, float]]:
    """Seconds of one layer's attention, exact and as recommended, at a few lengths on this machine."""
    linear, call = LinearAttention(_recommended(layer, config)), layer.shape
    found = {}
    for n in sorted({512, 2048, *([length] if length is not None and length <= 8192 else [])}):
        g = torch.Generator().manual_seed(n)
        q, k, v = (torch.randn(1, t.shape[1], n, t.shape[-1], generator=g) for t in call[:3])
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


def _memory(layers: list[Layer], config: dict[str, Any], length: int) -> tuple[int, int]:
    """Bytes of the decoding cache of all layers, as it is and converted."""
    kept = config.get("exact_heads", [])
    before = after = 0
    for i, layer in enumerate(layers):
        plan = _recommended(layer, config)
        for h in range(plan.num_heads):
            if (i, h) in kept:
                plan.kinds[h] = "exact"
        before += plan.cache_bytes(length, converted=False)
        after += plan.cache_bytes(length)
    return before, after


def _arguments(config: dict[str, Any]) -> str:
    shown = {k: f"[{len(v)} pairs]" if isinstance(v, list) and len(v) > 8 else repr(v) for k, v in config.items()}
    return ", ".join(f"{k}={v}" for k, v in shown.items())
