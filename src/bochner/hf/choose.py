"""What each head becomes: a draft from a recipe, the heads that stay exact, the heads whose kernel is worth having."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bochner._checks import BochnerError, one_of, positive_int, spawn_seed
from bochner.hf import capture, inputs
from bochner.hf.layer import Call, LinearAttention, exact
from bochner.hf.measure import Far, Statistics, attention_weights, head_errors, peaks
from bochner.hf.plan import WINDOW_KINDS, LayerPlan, Plan
from bochner.maps import named

AUTO_SHARE = 0.005  # exact_heads="auto": heads with at least this share of all scores
AUTO_FRACTION = 0.1  # and at most this fraction of all heads
PROBE, PROBES = 120, 3  # tokens of a passage, and number of probes, for finding heads that retrieve
GATES = (0.1, 0.5, 0.9)  # where the gradient of the heads' gates is taken
ExactHeads = float | str | Iterable[tuple[int, int]]


@dataclass(frozen=True)
class Recipe:
    """The keywords of `convert` that say what heads become; `convert` documents them."""

    feature_map: str | None = "calibrated"
    num_features: int = 128
    window: int | None = None
    sinks: int = 0
    window_kind: str | None = None
    exact_heads: Any = 0.0
    exact_unit: str = "head"
    select: bool | None = None
    train: bool = False
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positive_int(self.num_features, "num_features", "convert")
        if self.feature_map is not None:
            named(self.feature_map, "convert")
        if self.window is not None:
            positive_int(self.window, "window", "convert")
        if isinstance(self.sinks, bool) or not isinstance(self.sinks, int) or self.sinks < 0:
            raise BochnerError(f"The 'sinks' of convert must be an int >= 0, got {self.sinks!r}.")
        one_of(self.window_kind, "window_kind", "convert", (None, *WINDOW_KINDS))
        one_of(self.exact_unit, "exact_unit", "convert", ("head", "group"))
        if self.feature_map is None and not self.near:
            raise BochnerError(
                "With feature_map=None there must be a 'window' or 'sinks': nothing else would be attended to."
            )

    @property
    def near(self) -> bool:
        """Whether something is attended to exactly."""
        return self.window is not None or self.sinks > 0

    @property
    def ranks_heads(self) -> bool:
        """Whether the exact heads are to be chosen by their scores."""
        wanted = self.exact_heads
        return isinstance(wanted, str) or (isinstance(wanted, (int, float)) and wanted > 0)

    def draft(self, shapes: Mapping[str, capture.Shape], model_type: str) -> Plan:
        """The plan before any head is chosen: all heads of a layer alike."""
        layers = []
        for i, shape in enumerate(shapes.values()):
            local = self.near and not shape.is_cross
            kind = "kernel" if not local else ("window" if self.feature_map is None else "hybrid")
            if shape.obstacle is not None or (shape.is_cross and self.feature_map is None):
                kind = "exact"
            reason, limit = shape.obstacle or ("", 0)
            layers.append(
                LayerPlan(
                    name=shape.name,
                    num_heads=shape.num_heads,
                    num_kv_heads=shape.num_kv_heads,
                    head_dim=shape.head_dim,
                    value_dim=shape.value_dim,
                    kinds=[kind] * shape.num_heads,
                    window=self.window if local else None,
                    sinks=self.sinks if local else 0,
                    window_kind=self.window_kind or "block",
                    feature_map=self.feature_map or "calibrated",
                    num_features=self.num_features,
                    options=dict(self.options),
                    seed=spawn_seed(self.seed, i),
                    is_causal=shape.is_causal,
                    is_cross=shape.is_cross,
                    train=self.train,
                    reason=reason,
                    limit=limit,
                )
            )
        plan = Plan(layers, model_type)
        LinearAttention(layers[0])  # wrong options are refused here, before anything is measured
        return plan


def choose_exact(
    model: Any, plan: Plan, recipe: Recipe, statistics: Statistics | None, data: Sequence[dict[str, Tensor]]
) -> None:
    """Mark the heads that stay exact, and note every head's score in the plan."""
    if statistics is not None:
        scores = {layer.name: statistics.mean_peak(layer.name) for layer in plan.converted}
        if recipe.ranks_heads and _retrieves(model, plan, data):
            scores |= retrieval_scores(model, plan, data)
        for layer in plan.converted:
            layer.scores = [round(x, 6) for x in scores[layer.name].tolist()]
    for i, h in _exact_pairs(plan, recipe.exact_heads, recipe.exact_unit):
        plan.layers[i].kinds[h] = "exact"


def _exact_pairs(plan: Plan, wanted: Any, unit: str) -> list[tuple[int, int]]:
    if isinstance(wanted, (int, float)) and not isinstance(wanted, bool):
        if not 0 <= wanted <= 1:
            raise BochnerError(f"The 'exact_heads' of convert must be a fraction in [0, 1], got {wanted!r}.")
        heads = sum(layer.num_heads for layer in plan.converted)
        return ranked(plan, unit)[: round(wanted * heads)] if wanted else []
    if isinstance(wanted, str):
        one_of(wanted, "exact_heads", "convert", ("auto",))
        pairs = ranked(plan, unit)[: int(AUTO_FRACTION * sum(x.num_heads for x in plan.converted))]
        least = AUTO_SHARE * sum(max(s, 0.0) for layer in plan.layers for s in layer.scores or [])
        return [(i, h) for i, h in pairs if (plan.layers[i].scores or [])[h] > least]
    try:
        pairs = [(int(i), int(h)) for i, h in wanted]
    except (TypeError, ValueError) as error:
        raise BochnerError(
            f"The 'exact_heads' of convert must be a fraction, 'auto' or pairs (layer, head), got {wanted!r}."
        ) from error
    for i, h in pairs:
        if not (0 <= i < len(plan.layers) and 0 <= h < plan.layers[i].num_heads):
            raise BochnerError(f"There is no head {(i, h)} among the {len(plan.layers)} attention layers.")
    return pairs


def ranked(plan: Plan, unit: str = "head") -> list[tuple[int, int]]:
    """All heads, the one with the highest score first; by whole groups, the one with the highest sum first."""
    scored = []
    for i, layer in enumerate(plan.layers):
        if layer.untouched:
            continue
        scores = layer.scores or [0.0] * layer.num_heads
        size = layer.group
        sums = [sum(scores[h - h % size : h - h % size + size]) for h in range(layer.num_heads)]
        scored += [(-(sums[h] if unit == "group" else scores[h]), i, h) for h in range(layer.num_heads)]
    return [(i, h) for _, i, h in sorted(scored)]


def _retrieves(model: Any, plan: Plan, data: Sequence[dict[str, Tensor]]) -> bool:
    """Whether probes with a repeated passage make sense: a causal model over tokens."""
    causal = all(layer.is_causal for layer in plan.converted)
    return causal and not getattr(model.config, "is_encoder_decoder", False) and "input_ids" in data[0]


def retrieval_scores(model: Any, plan: Plan, data: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Which heads look something up, on probes made of the calibration tokens: a passage, another, the first again.

    With a language-model head: how much the loss on the repeat falls as a head goes from window and sinks to exact
    attention, by the gradient of a gate on every head, averaged on the way from none exact to all exact. Without one:
    how much higher a head's attention peaks on the repeat than before it. Peaks on plain text tell nothing: the highest
    are those of heads that rest on some punctuation mark.
    """
    stream = [row[mask.bool()] for b in data for row, mask in zip(b["input_ids"], _mask_of(b), strict=True)]
    tokens = torch.cat(stream)
    near = {layer.name: layer.near for layer in plan.converted if not layer.is_cross}
    length = max(PROBE, *(layer.reach // 2 + 32 for layer in plan.converted))
    length = min(length, len(tokens) // 2, inputs.positions(model).get("input_ids", 2**31) // 3)
    pieces = [tokens[start : start + 2 * length].split(length) for start in range(0, len(tokens), 2 * length)]
    probes = [torch.cat([p[0], p[1], p[0]])[None] for p in pieces[:PROBES] if len(p) == 2 and len(p[1]) == length]
    if getattr(model, "get_output_embeddings", lambda: None)() is not None:
        return _gate_gradients(model, plan, probes, length)
    found: dict[str, Tensor] = {}

    def look(name: str, call: Call) -> None:
        if name in near:
            far = Far.of(call, **near[name])
            peak = peaks(call, attention_weights(call, far.allowed), far).double()
            rise = peak[..., 2 * length :].mean((0, 2)) - peak[..., length : 2 * length].mean((0, 2))
            found[name] = found.get(name, 0) + rise / len(probes)

    with capture.recording(model, look):
        for ids in probes:
            capture.run(model, {"input_ids": ids})
    return found


def _gate_gradients(model: Any, plan: Plan, probes: Sequence[Tensor], length: int) -> dict[str, Tensor]:
    """Fall of the loss on the last `length` tokens per head as it goes from window and sinks to exact attention."""
    bare = plan.copy()
    for layer in bare.converted:
        kind = "window" if layer.window is not None or layer.sinks else "kernel"
        layer.kinds = [kind] * layer.num_heads
    windows = {x.name: LinearAttention(x) for x in bare.converted if not x.is_cross}

    def loss(index: int, output: Any) -> Tensor:
        target = probes[index][:, -length + 1 :].to(output.logits.device)
        return nn.functional.cross_entropy(output.logits[:, -length:-1].float().transpose(1, 2), target)

    return gate_gradients(model, windows, [{"input_ids": ids} for ids in probes], loss)


def gate_gradients(
    model: Any,
    layers: Mapping[str, LinearAttention],
    batches: Sequence[dict[str, Tensor]],
    loss: Callable[[int, Any], Tensor],
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Tensor]:
    """How much a loss falls per head, integrated along gates from 0 (the head of `layers`) to 1 (exact).

    `loss(index, output)`: of the model's output for one of the batches; the mean over them counts.
    """
    device = next(model.parameters()).device
    total: dict[str, Tensor] = {}
    for i, level in enumerate(GATES):
        gates = {n: torch.full((m.plan.num_heads,), level, device=device) for n, m in layers.items()}
        for j, batch in enumerate(batches):
            say(f"weighing heads, pass {i * len(batches) + j + 1} of {len(GATES) * len(batches)}")
            for name, g in gate_gradient(model, layers, gates, batch, partial(loss, j)).items():
                total[name] = total.get(name, 0) - g / (len(GATES) * len(batches))
    return total


def gate_gradient(
    model: Any,
    layers: Mapping[str, LinearAttention],
    gates: Mapping[str, Tensor],
    batch: dict[str, Tensor],
    loss: Callable[[Any], Tensor],
) -> dict[str, Tensor]:
    """The gradient of a loss of the model's output at gates (h,) from 0, the head of `layers`, to 1, exact attention.

    Layers whose gates have no influence are left out.
    """
    device = next(model.parameters()).device
    for module in layers.values():
        module.to(device)
    frozen = [p for p in model.parameters() if p.requires_grad]
    leaves = {name: g.detach().to(device).clone().requires_grad_(True) for name, g in gates.items()}

    def look(name: str, call: Call) -> Tensor | None:
        if name not in layers:
            return None
        near = layers[name](call)
        g = leaves[name][None, :, None, None].to(near.dtype)
        return g * exact(call) + (1 - g) * near

    for p in frozen:
        p.requires_grad_(False)
    try:
        with capture.recording(model, look):
            output = capture.run(model, batch, gradient=True)
            with torch.enable_grad():
                loss(output).backward()
    finally:
        for p in frozen:
            p.requires_grad_(True)
    return {name: g.grad.double().cpu() for name, g in leaves.items() if g.grad is not None}


def _mask_of(batch: dict[str, Tensor]) -> Tensor:
    mask = batch.get("attention_mask")
    return torch.ones_like(batch["input_ids"]) if mask is None else mask


def drop_useless_kernels(
    model: Any, plan: Plan, layers: dict[str, LinearAttention], data: Sequence[dict[str, Tensor]]
) -> dict[str, LinearAttention]:
    """Turn hybrid key heads whose kernel term does not lower their error into window heads; returns the new layers."""
    bare = plan.copy()
    for layer in bare.layers:
        layer.kinds = ["window" if kind == "hybrid" else kind for kind in layer.kinds]
    sample = list(data)[: max(1, len(data) // 2)]
    with_kernel = head_errors(model, layers, sample)
    without = head_errors(model, {x.name: LinearAttention(x) for x in bare.layers}, sample)
    chosen = {}
    for layer in plan.layers:
        if layer.untouched:
            chosen[layer.name] = layers[layer.name]
            continue
        gains = (without[layer.name] ** 2 - with_kernel[layer.name] ** 2).view(layer.num_kv_heads, -1).sum(-1)
        old = layers[layer.name]
        before = layer.kv_heads_of("hybrid")
        layer.kinds = [
            "window" if kind == "hybrid" and gains[h // layer.group] <= 0 else kind
            for h, kind in enumerate(layer.kinds)
        ]
        chosen[layer.name] = _keep_maps(LinearAttention(layer), old, before)
    return chosen


def _keep_maps(new: LinearAttention, old: LinearAttention, before: list[int]) -> LinearAttention:
    """Copy the maps of the key heads that stay hybrid."""
    if "hybrid" in new.map_norm:
        take_maps(new, "hybrid", old, before)
    return new


def take_maps(new: LinearAttention, kind: str, old: LinearAttention, before: list[int]) -> None:
    """Give a layer's key heads of one kind the maps that `old` has for them; `before`: the key heads of that map."""
    rows = [before.index(g) for g in new.plan.kv_heads_of(kind)]
    source = old.map_norm[kind].state_dict()
    new.map_norm[kind].load_state_dict({k: v[rows] if v.ndim else v for k, v in source.items()})
