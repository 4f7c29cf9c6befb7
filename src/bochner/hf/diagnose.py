"""Diagnosis before conversion: what each map does to one layer's queries, keys and values.

Errors are measured on other sequences than the maps were calibrated on, and predicted by `theory`; speed is measured on
this machine. The diagnosis says when conversion is not worth it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bochner import theory
from bochner._checks import BochnerError, positive_int
from bochner.attention.checks import check_qkv
from bochner.hf.attention import LinearAttention, layer_seconds
from bochner.hf.calibrate import Far, HeadErrors, Samples, attention_weights
from bochner.hf.calls import Call
from bochner.hf.config import Recipe
from bochner.hf.fates import EXACT, Hybrid, Kernel, Window, fate_of
from bochner.hf.plan import LayerPlan
from bochner.maps.base import FeatureMap
from bochner.maps.exponential import CalibratedFeatures

GOOD = 0.5  # relative error of a head's output that is good enough
FLOOR_LENGTH = 384  # tokens of the attention matrices whose rank floor is computed
HOPELESS = 0.9  # a kernel with an error above this share of uniform averaging's has learned nothing of the head
PREDICTION_PAIRS = 256  # rows and keys of the pairs that predictions are averaged over
TIMED = (2048, 8192)  # tokens at which attention is timed where no length is named, and at most


@dataclass
class HeadDiagnosis:
    """One head: its attention, the measured and the predicted error of every map, and what to do with it.

    `entropy`: of its weights, in nats; `outside`: their sum outside window and sinks; means over rows. `rank_floor`:
    what no map can be below there, see `theory.rank_floor`.
    """

    head: int
    entropy: float
    outside: float
    rank_floor: float
    measured: dict[str, float]
    predicted: dict[str, float]
    verdict: str = ""


@dataclass
class Diagnosis:
    """What to convert to, and whether; `recipe` is for `convert`."""

    heads: list[HeadDiagnosis]
    recipe: Recipe
    worthwhile: bool
    reasons: list[str]

    def __str__(self) -> str:
        names = list(self.heads[0].measured)
        lines = ["head  entropy  outside  floor  " + "  ".join(f"{name:>7}" for name in names) + "  verdict"]
        for h in self.heads:
            cells = "  ".join(f"{h.measured[name]:{max(len(name), 7)}.3f}" for name in names)
            lines.append(f"{h.head:4d}  {h.entropy:7.2f}  {h.outside:7.2f}  {h.rank_floor:5.3f}  {cells}  {h.verdict}")
        told = (f"{n} {sum(h.predicted[n] for h in self.heads) / len(self.heads):.2f}" for n in self.heads[0].predicted)
        floors = sorted(h.rank_floor for h in self.heads)
        return "\n".join(
            [
                *lines,
                f"predicted by theory for iid projections (1 is hopeless): {', '.join(told)}",
                f"rank floor, which no map of {self.recipe.num_features} features is below: median "
                f"{floors[len(floors) // 2]:.3f}, largest {floors[-1]:.3f}",
                *self.reasons,
                f"recommended: bochner.convert(model, bochner.{self.recipe!r}, texts)",
            ]
        )


def diagnose(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    near: Window | None = None,
    num_features: int = 128,
    length: int | None = None,
) -> Diagnosis:
    """Measure one layer's attention and say what to convert it to, head by head; transformers is not needed.

    `q` (b, h, n, d), `k`, `v` (b, g, s, d): queries, keys and values before scaling; without v, random values stand in.
    Half of the sequences calibrate the maps, the other half measures them. `near`: the window and sinks to consider;
    default `Window(32, 1)`, for causal attention `Window(128, 4)`. `num_features`: the size of the maps to try.
    `length`: the number of tokens you care about, for speed.

    >>> q = torch.randn(4, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    >>> diagnose(q, q, num_features=32, length=64).recipe.num_features
    32
    """
    m = positive_int(num_features, "num_features", "diagnose")
    if length is not None:
        positive_int(length, "length", "diagnose")
    near = near or (Window(128, 4) if is_causal else Window(32, 1))
    if not isinstance(near, Window):
        raise BochnerError(f"The 'near' of diagnose must be a bochner.hf.Window, got {near!r}.")
    if v is None and isinstance(k, Tensor):
        v = torch.randn(k.shape, generator=torch.Generator().manual_seed(0)).to(k)
    check_qkv(q, k, v, "diagnose")
    assert v is not None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    calls = [Call(q[i : i + 1], k[i : i + 1], v[i : i + 1], is_causal, None, scale) for i in range(len(q))]
    plan = LayerPlan("attention", q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], [EXACT] * k.shape[1], is_causal)
    plan.is_cross = q.shape[-2] != k.shape[-2]  # which has no window
    local = None if plan.is_cross else near
    return _recommend(_examine(plan, calls, local, m), plan, local, m, length, calls[0])


def _examine(plan: LayerPlan, calls: list[Call], near: Window | None, m: int) -> list[HeadDiagnosis]:
    """Every map on every head of one layer, and the window if there is one."""
    half = len(calls) // 2
    samples, held = Samples(), calls[half:]
    for call in calls[:half] or calls:  # one sequence alone has to serve for both
        samples.add(call)
    fates: dict[str, Any] = {name: Kernel(name, m) for name in ("positive", "calibrated")}
    fitted = ["calibrated", *["landmark"] * (samples.rows >= m)]  # landmarks need enough to be fitted to
    if near is None:
        fates |= {name: Kernel(name, m) for name in fitted}
    else:
        hybrids = {name: Hybrid(**near.near, feature_map=name, num_features=m) for name in fitted}
        fates |= {"window": near, **{f"window+{name}": fate for name, fate in hybrids.items()}}
    measured, predicted = {"uniform": _errors(held, uniform)}, dict[str, Tensor]()
    for name, fate in fates.items():
        attention = LinearAttention(replace(plan, fates=[fate] * plan.num_kv_heads))
        attention.fit(samples)
        measured[name] = _errors(held, attention)
        if name in ("positive", "calibrated"):
            predicted[name] = _predict(attention.parts["kernel"].phi, held[0])  # type: ignore[arg-type]
    seen = _statistics(held[0], {} if near is None else near.near, m)
    errors = [[{name: e[i].item() for name, e in x.items()} for x in (measured, predicted)] for i in range(len(seen))]
    return [HeadDiagnosis(i, *row, *errors[i]) for i, row in enumerate(seen.tolist())]


@torch.no_grad()
def _errors(calls: list[Call], attention: Callable[[Call], Tensor]) -> Tensor:
    """Relative error of each head of `attention` over some calls, (h,)."""
    found = HeadErrors()
    for call in calls:
        found.add(call, attention(call))
    return found.relative()


def _statistics(call: Call, near: dict[str, Any], m: int) -> Tensor:
    """Entropy, weight outside and rank floor of each head on one sequence, (h, 3).

    Rank floors are those of the first tokens, or of the last ones where queries belong to the last keys.
    """
    far = Far.of(call, **near)
    weights = attention_weights(call, far.allowed)[0]
    few = slice(-FLOOR_LENGTH, None) if call.is_causal else slice(FLOOR_LENGTH)
    part = call._replace(query=call.query[:, :, few], key=call.key[:, :, few], value=call.value[:, :, few])
    square = Far.of(part, **near)
    squares = attention_weights(part, square.allowed)[0]
    entropy, outside = torch.special.entr(weights).sum(-1).mean(-1), (weights * far.far[0]).sum(-1).mean(-1)
    return torch.stack(
        [entropy, outside, torch.stack([theory.rank_floor(w, m, square.far[0, 0]) for w in squares])], -1
    )


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

    names = [f"{'' if near is None else 'window+'}{name}" for name in ("landmark", "calibrated")]
    best = min((n for n in names if n in heads[0].measured), key=mean)
    for h in heads:
        h.verdict = _verdict(h.measured, best)
    # A key head stays exact if one of its query heads should. Beside a window the landmark map was not measured alone.
    exact_heads = sorted({(0, h.head // plan.group) for h in heads if "keep exact" in h.verdict})
    alone = near is not None and all(h.verdict == "kernel is enough" for h in heads)
    beside = {} if near is None or alone else near.near
    name = "landmark" if "landmark" in best and not alone else "calibrated"
    recipe = Recipe(name, m, exact_heads=exact_heads or 0.0, **beside)
    fates = [EXACT if (0, g) in exact_heads else fate_of(recipe, plan.is_cross) for g in range(plan.num_kv_heads)]
    planned = replace(plan, fates=fates)
    n = min(length or TIMED[0], TIMED[1])
    layer = LinearAttention(planned).to(call.key.device)
    times = layer_seconds({"linear": layer}, planned, n, call.key.device, call.key.dtype)
    crossover = round(n * times["linear"] / times["exact"])  # where a n^2 = b n
    slower = length is not None and length < crossover
    share = sum("keep exact" in h.verdict for h in heads) / len(heads)
    reasons = [
        f"error of the attention output with m={m}: uniform averaging {mean('uniform'):.2f}, plain FAVOR+ "
        f"{mean('positive'):.2f}, {best} {mean(best):.2f}.",
        f"attention of the layer at {n:,} tokens: exact {times['exact'] * 1e3:.1f} ms, linear "
        f"{times['linear'] * 1e3:.1f} ms; linear attention is faster from about {crossover:,} tokens on.",
    ]
    if share > 0.5:
        reasons.append(
            f"{share:.0%} of the heads would have to stay exact: converting is not worth it as it is; distill."
        )
    if slower:
        reasons.append(
            f"At your {length} tokens exact attention is faster: keep it, unless decoding memory is the matter."
        )
    return Diagnosis(heads, recipe, share <= 0.5 and not slower, reasons)


def _verdict(measured: dict[str, float], best: str) -> str:
    """What to do with a head, by its measured errors."""
    if measured["calibrated"] <= GOOD:
        return "kernel is enough"
    if measured.get("window", math.inf) <= GOOD:
        return "window is enough"
    if measured[best] <= GOOD:
        return "window and kernel"
    hopeless = measured["calibrated"] > HOPELESS * measured["uniform"]
    return "hopeless for kernels, keep exact" if hopeless else "above target, keep exact"
