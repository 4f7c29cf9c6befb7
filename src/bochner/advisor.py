"""Diagnosis before conversion: what each head's attention looks like, what each map would do to it, and what to use.

Errors are measured on other sequences than the maps were calibrated on, and predicted by `theory`; speed is measured on
this machine. The advice says when conversion is not worth it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bochner import theory
from bochner._checks import BochnerError, positive_float, positive_int
from bochner.attention.core import check_qkv, linear_attention
from bochner.hf.calibration import Far, HeadStatistics, Samples, attention_weights, far_pairs
from bochner.hf.interface import Call
from bochner.hf.layer import LinearAttention, exact
from bochner.hf.plan import LayerPlan
from bochner.maps import feature_map
from bochner.maps.base import FeatureMap
from bochner.maps.exponential import CalibratedFeatures

HOPELESS = 0.9  # a kernel with an error above this share of uniform averaging's has learned nothing of the head
PREDICTION_PAIRS = 256  # rows and keys of the pairs that predictions are averaged over


@dataclass
class HeadAdvice:
    """One head: its attention, the error of every candidate, and what to do with it."""

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


def advise(
    first: Any,
    second: Any,
    values: Tensor | None = None,
    *,
    tokenizer: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    window: int | None = None,
    sinks: int | None = None,
    num_features: Sequence[int] = (64, 128),
    target: float = 0.5,
    length: int | None = None,
    max_length: int = 256,
    batch_size: int = 4,
    seed: int = 0,
) -> Advice:
    """Measure your attention and say which map, window and heads to use: `advise(model, texts)` or `advise(q, k, v)`.

    `advise(model, texts, tokenizer=...)`: all layers and heads of a transformers model. `advise(q, k, v)`: one layer's
    queries (b, h, n, d), keys and values before scaling; without v, random values stand in. Half of the sequences
    calibrate the maps, the other half measures them. `target`: the relative error of a head's output that is good
    enough. `length`: the number of tokens you care about, for speed and memory. `window`, `sinks`: those to consider;
    default 32 and 1, for causal attention 128 and 4.

    >>> q = torch.randn(4, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    >>> advise(q, q, num_features=(32,), length=64).config["num_features"]
    32
    """
    if window is not None:
        positive_int(window, "window", "advise")
    positive_float(target, "target", "advise")
    sizes = [positive_int(m, "num_features", "advise") for m in num_features]
    if not sizes:
        raise BochnerError("The 'num_features' of advise is empty; give at least one number of features.")
    if isinstance(first, nn.Module):
        calls = _calls_of_model(first, second, tokenizer, max_length, batch_size)
    else:
        calls = {"attention": _calls_of_tensors(first, second, values, scale, is_causal)}
    causal = all(c.is_causal for found in calls.values() for c in found[0])
    window = window or (128 if causal else 32)
    sinks = (4 if causal else 1) if sinks is None else sinks
    heads: list[HeadAdvice] = []
    for i, (name, found) in enumerate(calls.items()):
        heads += _examine(name, found, window, sinks, sizes, seed + 1000 * i)
    is_language_model = causal and getattr(first, "get_output_embeddings", lambda: None)() is not None
    return _recommend(heads, calls, window, sinks, sizes, target, length, is_language_model)


def _calls_of_tensors(
    q: Any, k: Any, v: Tensor | None, scale: float | None, is_causal: bool
) -> tuple[list[Call], list[Call]]:
    if v is None:
        shape = k.shape if isinstance(k, Tensor) else ()
        v = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(k) if len(shape) == 4 else k
    check_qkv(q, k, v, "advise")
    module = nn.Identity()
    calls = [Call(module, q[i : i + 1], k[i : i + 1], v[i : i + 1], None, scale, is_causal, {}) for i in range(len(q))]
    half = len(calls) // 2
    # One sequence alone has to serve for both.
    return (calls[:half], calls[half:]) if half else (calls, calls)


def _calls_of_model(
    model: Any, texts: Any, tokenizer: Any, max_length: int, batch_size: int
) -> dict[str, tuple[list[Call], list[Call]]]:
    from bochner.hf import capture
    from bochner.hf.convert import _tokenizer_of

    if hasattr(model, "tokenize") and hasattr(model, "encode"):
        from bochner.hf.convert import _inside

        model, tokenizer = _inside(model)
    tokenizer = tokenizer or _tokenizer_of(model, texts)
    batches = capture.batches(texts, tokenizer, max_length=max_length, batch_size=batch_size)
    if len(batches) < 2:
        raise BochnerError("advise needs at least two batches of text, one to calibrate on and one to measure on.")
    capture.discover(model, {k: v[:1] for k, v in batches[0].items()})
    found: dict[str, list[Call]] = {}

    def look(name: str, call: Call) -> None:
        found.setdefault(name, []).append(call)

    with capture.recording(model, look):
        for batch in batches:
            capture.run(model, batch)
    half = len(batches) // 2
    return {name: (calls[:half], calls[half:]) for name, calls in found.items()}


def _examine(
    name: str, calls: tuple[list[Call], list[Call]], window: int, sinks: int, sizes: Sequence[int], seed: int
) -> list[HeadAdvice]:
    """Every candidate on every head of one layer."""
    calibration, held = calls
    shape = held[0]
    h, g, d = shape.query.shape[1], shape.key.shape[1], shape.query.shape[-1]
    cross = any(c.query.shape[-2] != c.key.shape[-2] for c in held)
    statistics, samples = HeadStatistics(), Samples()
    moments: dict[bool, Any] = {}
    for call in calibration:
        samples.add(call)
        for near in (False, True):
            far = Far.of(call, window if near and not cross else None, sinks if near and not cross else 0)
            weights = attention_weights(call, far.allowed)
            new = far_pairs(call, weights, far)
            moments[near] = moments[near] + new if near in moments else new
            if near:
                statistics.add(call, weights, far)
    # Candidates: a name, and what computes the heads.
    candidates: dict[str, Any] = {"uniform": None}
    maps: dict[str, FeatureMap] = {}
    base: dict[str, Any] = {
        "name": name,
        "num_heads": h,
        "num_kv_heads": g,
        "head_dim": d,
        "value_dim": shape.value.shape[-1],
    }
    near_options: dict[str, Any] = {} if cross else {"window": window, "sinks": sinks}
    if not cross:
        candidates["window"] = LinearAttention(LayerPlan(**base, kinds=["window"] * h, **near_options))
    for m in sizes:
        for kind, map_name in (("kernel", "positive"), ("kernel", "calibrated"), ("hybrid", "calibrated")):
            if kind == "hybrid" and cross:
                continue
            options = near_options if kind == "hybrid" else {}
            plan = LayerPlan(
                **base, kinds=[kind] * h, feature_map=map_name, num_features=m, seed=seed, is_cross=cross, **options
            )
            layer = LinearAttention(plan).requires_grad_(False)
            phi = layer.map_of(kind)
            if isinstance(phi, CalibratedFeatures):
                phi.fit_(moments[kind == "hybrid"])
            label = f"{map_name} {m}" if kind == "kernel" else f"window+{map_name} {m}"
            candidates[label] = layer
            if kind == "kernel":
                maps[label] = phi
    measured = {label: _measure(layer, held) for label, layer in candidates.items()}
    predicted = {label: _predict(phi, held[0]) for label, phi in maps.items()}
    logits = statistics.mean("logit")
    return [
        HeadAdvice(
            layer=name,
            head=i,
            query_norm=statistics.mean("query_norm")[i].item(),
            key_norm=statistics.mean("key_norm")[i].item(),
            largest_logit=logits[i].item(),
            entropy=statistics.mean("entropy")[i].item(),
            outside=statistics.mean("mass")[i].item(),
            peak=statistics.mean("peak")[i].item(),
            measured={label: e[i].item() for label, e in measured.items()},
            predicted={label: e[i].item() for label, e in predicted.items()},
        )
        for i in range(h)
    ]


@torch.no_grad()
def _measure(layer: LinearAttention | None, calls: Sequence[Call]) -> Tensor:
    """Relative error of each head's output over some calls; without a layer, of averaging the values."""
    error = size = torch.zeros((), dtype=torch.float64)
    for c in calls:
        truth = exact(c.query, c.key, c.value, c.is_causal, c.padding, c.scale)
        if layer is None:
            allowed = Far.of(c, None, 0).allowed.to(c.value.dtype)
            mean = allowed / allowed.sum(-1, keepdim=True).clamp_min(1)
            out = mean @ c.value.repeat_interleave(c.query.shape[1] // c.key.shape[1], dim=1)
        else:
            out = layer(c.query, c.key, c.value, is_causal=c.is_causal, padding=c.padding, scale=c.scale)
        if c.padding is not None and c.padding.shape[1] == truth.shape[-2]:
            keep = ~c.padding[:, None, :, None]
            out, truth = out * keep, truth * keep
        error = error + (out - truth).double().square().sum((0, 2, 3))
        size = size + truth.double().square().sum((0, 2, 3))
    return (error / size.clamp_min(1e-30)).sqrt()


@torch.no_grad()
def _predict(phi: FeatureMap, call: Call) -> Tensor:
    """`mean_i min(1, sqrt(sum_j A_ij^2 r_ij^2))`: r the relative error of the kernel by `theory`, A the attention.

    The error of the numerator's weights, row by row, for iid projections; attention saturates where it exceeds one.
    """
    group, root = call.query.shape[1] // call.key.shape[1], call.scale**0.5
    rows = slice(0, PREDICTION_PAIRS)
    small = Call(
        call.module, call.query[:1, :, rows], call.key[:1, :, rows], call.value[:1, :, rows], None, call.scale, None, {}
    )
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
        row = (weights[g].double() * r.double().clamp_max(1e6)).square().sum(-1).sqrt().clamp_max(1.0)
        errors.append(row.mean(-1))
    return torch.cat(errors)


def _recommend(
    heads: list[HeadAdvice],
    calls: dict[str, tuple[list[Call], list[Call]]],
    window: int,
    sinks: int,
    sizes: Sequence[int],
    target: float,
    length: int | None,
    is_language_model: bool,
) -> Advice:
    """One configuration for all, the heads it leaves exact, and whether to do it at all.

    In a language model the error of a head's output does not say whether the head retrieves: there `convert` chooses
    the exact heads itself, by the loss on repeated text.
    """
    m = max(sizes)
    near = all("window" in h.measured for h in heads)
    best = f"window+calibrated {m}" if near else f"calibrated {m}"
    layers = list(calls)
    kept: list[tuple[int, int]] = []
    for h in heads:
        if h.measured[f"calibrated {m}"] <= target:
            h.verdict = "kernel is enough"
        elif near and h.measured["window"] <= target:
            h.verdict = "window is enough"
        elif h.measured[best] <= target:
            h.verdict = "window and kernel"
        else:
            hopeless = h.measured[f"calibrated {m}"] > HOPELESS * h.measured["uniform"]
            h.verdict = "hopeless for kernels, keep exact" if hopeless else "above target, keep exact"
            kept.append((layers.index(h.layer), h.head))
    alone = all(h.verdict == "kernel is enough" for h in heads)
    config: dict[str, Any] = {"feature_map": "calibrated", "num_features": m}
    if near and not alone:
        config |= {"window": window, "sinks": sinks}
    share = len(kept) / len(heads)
    if is_language_model:
        means = [sum(h.measured[n] for h in heads) / len(heads) for n in ("window", best)]
        config |= {"window": window, "sinks": sinks, "exact_heads": 0.1}
        if means[0] <= 1.1 * means[1]:  # an untrained kernel must lower the error clearly to be worth its noise
            config["feature_map"] = None
    elif kept:
        config["exact_heads"] = kept
    speed = _time(next(iter(calls.values()))[1][0], config, length)
    crossover = _crossover(speed)
    memory = {n: _memory(calls, config, n) for n in sorted({length or 4096, 4096})}
    reasons = []
    uniform = sum(h.measured["uniform"] for h in heads) / len(heads)
    ours = sum(h.measured[best] for h in heads) / len(heads)
    plain = sum(h.measured[f"positive {m}"] for h in heads) / len(heads)
    reasons.append(
        f"error of the attention output: uniform averaging {uniform:.2f}, plain FAVOR+ m={m} {plain:.2f}, "
        f"{best} {ours:.2f}."
    )
    worthwhile = True
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
        reasons.append(f"Linear attention is faster from about {crossover} tokens on, on this machine.")
    if length is not None and (crossover is None or length < crossover):
        worthwhile = False
        reasons.append(
            f"At your {length} tokens exact attention is faster: keep it, unless decoding memory is the matter."
        )
    return Advice(heads, config, worthwhile, reasons, speed, memory, crossover)


@torch.no_grad()
def _time(call: Call, config: dict[str, Any], length: int | None) -> dict[int, tuple[float, float]]:
    """Seconds of one layer's attention, exact and linear, at a few lengths on this machine; the best of three."""
    h, g, d, v = call.query.shape[1], call.key.shape[1], call.query.shape[-1], call.value.shape[-1]
    phi = feature_map("calibrated", dim=d, num_features=config["num_features"], num_heads=g)
    near = {k: config[k] for k in ("window", "sinks") if k in config}
    found = {}
    for n in sorted({512, 2048, *([length] if length is not None and length <= 8192 else [])}):
        generator = torch.Generator().manual_seed(n)
        q, k, u = (torch.randn(1, heads, n, e, generator=generator) for heads, e in ((h, d), (g, d), (g, v)))
        plain = lambda q=q, k=k, u=u: scaled_dot_product_attention(  # noqa: E731
            q, k, u, is_causal=call.is_causal, scale=call.scale, enable_gqa=h != g
        )
        linear = lambda q=q, k=k, u=u: linear_attention(  # noqa: E731
            q, k, u, phi, is_causal=call.is_causal, scale=call.scale, **near
        )
        times = []
        for run in (plain, linear):
            seconds = []
            for _ in range(3):
                start = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - start)
            times.append(min(seconds))
        found[n] = (times[0], times[1])
    return found


def _crossover(speed: dict[int, tuple[float, float]]) -> int | None:
    """Where a n^2 = b n, from the longest measurement; None when it is beyond eight times what was measured."""
    n = max(speed)
    plain, linear = speed[n]
    where = round(n * linear / plain)
    return where if where <= 8 * n else None


def _memory(calls: dict[str, tuple[list[Call], list[Call]]], config: dict[str, Any], length: int) -> tuple[int, int]:
    """Bytes of the decoding cache of all layers, as it is and converted."""
    before = after = 0
    kept = config.get("exact_heads", [])
    if isinstance(kept, float):  # spread evenly, for want of knowing which
        every = round(1 / kept)
        kept = [
            (i, j) for i, n in enumerate(calls) for j in range(calls[n][1][0].query.shape[1]) if (i + j) % every == 0
        ]
    for i, (name, (_, held)) in enumerate(calls.items()):
        c = held[0]
        h = c.query.shape[1]
        kind = "kernel" if "window" not in config else ("window" if config["feature_map"] is None else "hybrid")
        kinds = ["exact" if (i, j) in kept else kind for j in range(h)]
        plan = LayerPlan(
            name,
            h,
            c.key.shape[1],
            c.query.shape[-1],
            c.value.shape[-1],
            kinds,
            window=config.get("window"),
            sinks=config.get("sinks", 0),
            num_features=config["num_features"],
        )
        before += plan.cache_bytes(length, converted=False)
        after += plan.cache_bytes(length)
    return before, after


def _arguments(config: dict[str, Any]) -> str:
    shown = {k: f"[{len(v)} pairs]" if isinstance(v, list) and len(v) > 8 else repr(v) for k, v in config.items()}
    return ", ".join(f"{k}={v}" for k, v in shown.items())
