"""Diagnosis before conversion: what each map does to one layer's queries, keys and values.

Errors are measured on other sequences than the maps were calibrated on, and predicted by `theory`; speed is measured on
this machine. The diagnosis says when conversion is not worth it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bochner import theory
from bochner._checks import BochnerError, positive_int
from bochner.attention.checks import check_qkv
from bochner.hf.attention import LinearAttention, layer_seconds
from bochner.hf.calibrate import Far, Samples, attention_weights, error_on
from bochner.hf.calls import Call
from bochner.hf.config import Recipe
from bochner.hf.fates import EXACT, Fate, Hybrid, Kernel, Window, fate_of
from bochner.hf.plan import LayerPlan
from bochner.maps.base import FeatureMap
from bochner.maps.exponential import CalibratedFeatures

GOOD = 0.5  # relative error of a head's output that is good enough
FLOOR_LENGTH = 384  # tokens of the attention matrices whose rank floor is computed
HOPELESS = 0.9  # a kernel with an error above this share of uniform averaging's has learned nothing of the head
PREDICTION_PAIRS = 256  # rows and keys of the pairs that predictions are averaged over
TIMED = (512, 2048)  # tokens at which attention is timed, beside the length that is asked for up to 8,192
STATISTICS = ("query_norm", "key_norm", "largest_logit", "entropy", "outside")


@dataclass
class HeadDiagnosis:
    """One head: its attention, the error of every candidate, and what to do with it.

    `outside`: the attention outside window and sinks. `rank_floor`: what no map of the largest size can be below there,
    see `theory.rank_floor`.
    """

    head: int
    query_norm: float
    key_norm: float
    largest_logit: float
    entropy: float
    outside: float
    measured: dict[str, float]
    predicted: dict[str, float]
    rank_floor: float
    verdict: str = ""


@dataclass
class Diagnosis:
    """What to convert to, and whether; `recipe` is for `convert`.

    By length: `speed`, seconds of exact and of linear attention; `memory`, bytes of the cache as it is and converted.
    """

    heads: list[HeadDiagnosis]
    recipe: Recipe
    worthwhile: bool
    reasons: list[str]
    speed: dict[int, tuple[float, float]]
    memory: dict[int, tuple[int, int]]
    crossover: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON and for reports."""
        return asdict(self)

    def __str__(self) -> str:
        names = list(self.heads[0].measured)
        lines = ["head   norms     logit  entropy  outside  " + "  ".join(f"{name:>7}" for name in names) + "  verdict"]
        for h in self.heads:
            cells = "  ".join(f"{h.measured[name]:{max(len(name), 7)}.3f}" for name in names)
            norms = f"{h.query_norm:4.1f} {h.key_norm:4.1f}"
            seen = f"{h.largest_logit:8.1f}  {h.entropy:7.2f}  {h.outside:7.2f}"
            lines.append(f"{h.head:4d}  {norms}  {seen}  {cells}  {h.verdict}")
        means = {n: sum(h.predicted[n] for h in self.heads) / len(self.heads) for n in self.heads[0].predicted}
        told = ", ".join(f"{name} {mean:.2f}" for name, mean in means.items())
        floors = sorted(h.rank_floor for h in self.heads)
        verdicts = Counter(h.verdict for h in self.heads)
        lines += [
            f"predicted by theory for iid projections (1 is hopeless): {told}",
            f"rank floor, which no map of {self.recipe.num_features} features is below: median "
            f"{floors[len(floors) // 2]:.3f}, largest {floors[-1]:.3f}",
            "heads: " + ", ".join(f"{n} {verdict}" for verdict, n in sorted(verdicts.items())),
        ]
        for n, (a, b) in sorted(self.speed.items()):
            lines.append(f"attention of the layer at {n} tokens: exact {a * 1e3:.1f} ms, linear {b * 1e3:.1f} ms")
        for n, (x, y) in sorted(self.memory.items()):
            lines.append(f"decoding memory at {n} tokens: {x / 1e6:.2f} MB as it is, {y / 1e6:.2f} MB converted")
        recommended = f"recommended: bochner.convert(model, bochner.{self.recipe!r}, texts)"
        return "\n".join([*lines, *self.reasons, recommended])


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
    if v is None and isinstance(k, Tensor):
        v = torch.randn(k.shape, generator=torch.Generator().manual_seed(0)).to(k)
    check_qkv(q, k, v, "diagnose")
    assert v is not None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    calls = [Call(q[i : i + 1], k[i : i + 1], v[i : i + 1], is_causal, None, scale) for i in range(len(q))]
    is_cross = q.shape[-2] != k.shape[-2]
    plan = LayerPlan("attention", q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], [EXACT] * k.shape[1], is_causal)
    plan.is_cross = is_cross
    heads = _examine(plan, calls, None if is_cross else near, sizes)
    return _recommend(heads, plan, None if is_cross else near, max(sizes), length, calls[0])


def _with(plan: LayerPlan, fates: list[Fate]) -> LayerPlan:
    """The layer with other fates of its key heads."""
    return LayerPlan(**{**plan.__dict__, "fates": fates})


def _examine(plan: LayerPlan, calls: list[Call], near: Window | None, sizes: Sequence[int]) -> list[HeadDiagnosis]:
    """Every candidate on every head of one layer; `near`: none for cross-attention."""
    half = len(calls) // 2
    calibration, held = calls[:half] or calls, calls[half:]  # one sequence alone has to serve for both
    samples, keywords, m = Samples(), {} if near is None else near.near, max(sizes)
    for call in calibration:
        samples.add(call)
    fates: dict[str, Fate] = {} if near is None else {"window": near}
    for size in sizes:
        fates |= {f"{name} {size}": Kernel(name, size) for name in ("positive", "calibrated")}
        if near is not None:
            fates[f"window+calibrated {size}"] = Hybrid(**keywords, num_features=size)
    if samples.rows >= m:  # a fit of every head takes a while: the largest size, beside the window if there is one
        mapped: dict[str, Any] = {"feature_map": "landmark", "num_features": m}
        fates |= {f"landmark {m}": Kernel(**mapped)} if near is None else {}
        fates |= {} if near is None else {f"window+landmark {m}": Hybrid(**keywords, **mapped)}
    measured, predicted = {"uniform": error_on(held, uniform)}, dict[str, Tensor]()
    for label, fate in fates.items():
        attention = LinearAttention(_with(plan, [fate] * plan.num_kv_heads))
        attention.fit(samples)
        measured[label] = error_on(held, attention)
        if isinstance(fate, Kernel) and fate.feature_map != "landmark":
            predicted[label] = _predict(attention.parts["kernel"].phi, held[0])  # type: ignore[arg-type]
    floors, statistics = _rank_floors(held[0], keywords, m), dict[str, Any](_statistics(calibration, keywords))
    return [
        HeadDiagnosis(
            head=i,
            **{name: values[i].item() for name, values in statistics.items()},
            measured={label: e[i].item() for label, e in measured.items()},
            predicted={label: e[i].item() for label, e in predicted.items()},
            rank_floor=floors[i].item(),
        )
        for i in range(plan.num_heads)
    ]


def _statistics(calls: Sequence[Call], near: dict[str, Any]) -> dict[str, Tensor]:
    """What the attention of each head looks like, (h,): means over rows and calls; of logits the largest."""
    found: dict[str, list[Tensor]] = {name: [] for name in STATISTICS}
    for call in calls:
        far, root = Far.of(call, **near), call.scale**0.5
        weights, key = attention_weights(call, far.allowed), call.key.float().repeat_interleave(call.group, dim=1)
        logits = (call.query.float() @ key.mT * call.scale).masked_fill(~far.allowed, -torch.inf)
        rows = (
            call.query.float().norm(dim=-1) * root,
            key.norm(dim=-1) * root,
            logits.amax((-1, -2))[..., None],
            torch.special.entr(weights).sum(-1),
            (weights * far.far).sum(-1),
        )
        for name, values in zip(STATISTICS, rows, strict=True):
            found[name].append(values.double().mean((0, 2)))
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
    laws: list[str | theory.Estimator] = ["positive"] * len(y)
    if isinstance(phi, CalibratedFeatures):
        a, b = phi.centre_query[:, None, None], phi.centre_key[:, None]
        x, y = (x - a) @ phi.basis_query.mT[:, None], (y - b) @ phi.basis_key.mT
        laws = [theory.Estimator("dense", a=a) for a in phi.a]
    allowed = torch.ones(x.shape[-2], y.shape[-2], dtype=torch.bool)
    weights = attention_weights(small, allowed.tril() if call.is_causal else allowed)[0].unflatten(0, (-1, group))
    errors = []
    for g, law in enumerate(laws):
        r = theory.relative_error(x[g].unsqueeze(-2), y[g][None, None], phi.num_features, law)
        share = weights[g].double().square()
        square = (share * r.double().clamp_max(1e6).square()).sum(-1) / share.sum(-1)
        errors.append(square.sqrt().clamp_max(1.0).mean(-1))
    return torch.cat(errors)


def _recommend(
    heads: list[HeadDiagnosis], plan: LayerPlan, near: Window | None, m: int, length: int | None, call: Call
) -> Diagnosis:
    """One recipe for all heads, those it leaves exact, and whether to do it at all."""

    def mean(name: str) -> float:
        return sum(h.measured[name] for h in heads) / len(heads)

    names = [f"{'' if near is None else 'window+'}{name} {m}" for name in ("landmark", "calibrated")]
    best = min((n for n in names if n in heads[0].measured), key=mean)
    for h in heads:
        h.verdict = _verdict(h.measured, f"calibrated {m}", best)
    # A key head stays exact if one of its query heads should. Beside a window the landmark map was not measured alone.
    exact_heads = sorted({(0, h.head // plan.group) for h in heads if "keep exact" in h.verdict})
    alone = near is not None and all(h.verdict == "kernel is enough" for h in heads)
    beside = {} if near is None or alone else near.near
    name = "landmark" if "landmark" in best and not alone else "calibrated"
    recipe = Recipe(name, m, exact_heads=exact_heads or 0.0, **beside)
    fates = [EXACT if (0, g) in exact_heads else fate_of(recipe, plan.is_cross) for g in range(plan.num_kv_heads)]
    planned = _with(plan, fates)
    linear = {"linear": LinearAttention(planned).to(call.key.device)}
    timed = sorted({*TIMED, *([length] if length is not None and length <= 8192 else [])})
    times = {n: layer_seconds(linear, planned, n, call.key.device, call.key.dtype) for n in timed}
    speed = {n: (found["exact"], found["linear"]) for n, found in times.items()}
    crossover = _crossover(speed)
    share = sum("keep exact" in h.verdict for h in heads) / len(heads)
    slower = length is not None and (crossover is None or length < crossover)
    reasons = [
        f"error of the attention output: uniform averaging {mean('uniform'):.2f}, plain FAVOR+ m={m} "
        f"{mean(f'positive {m}'):.2f}, {best} {mean(best):.2f}."
    ]
    if share > 0.5:
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
    if slower:
        reasons.append(
            f"At your {length} tokens exact attention is faster: keep it, unless decoding memory is the matter."
        )
    lengths = sorted({length or 4096, 4096})
    memory = {n: (planned.cache_bytes(n, converted=False), planned.cache_bytes(n)) for n in lengths}
    return Diagnosis(heads, recipe, share <= 0.5 and not slower, reasons, speed, memory, crossover)


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


def _crossover(speed: dict[int, tuple[float, float]]) -> int | None:
    """Where a n^2 = b n, from the longest measurement; None when it is beyond eight times what was measured."""
    n = max(speed)
    plain, linear = speed[n]
    where = round(n * linear / plain)
    return where if where <= 8 * n else None
