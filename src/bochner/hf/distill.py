"""Attention transfer: teach the feature maps of a converted model what its original attention computed.

First layer by layer: the model is run with exact attention, and each layer's maps are trained so that its linear
attention gives the same outputs on the same queries, keys and values. Layers do not depend on each other, so that this
can be stopped and resumed at any layer. Then end to end: the hidden states of the whole converted model are fitted to
those of the original, so that errors are weighed by what they do later. No labels are needed, only text. In place of
that the second stage can lower the model's own loss, of the maps and of the adapters of PEFT together. All of it is
done with every row converted, also those that stay exact otherwise (`exact_below`).
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bochner._checks import BochnerError, extra
from bochner._progress import speaker
from bochner.hf import legacy, observe
from bochner.hf.adapters import adapters, check_lora, note_again
from bochner.hf.attention import CHILD, LinearAttention
from bochner.hf.calibrate import HeadErrors, error_on
from bochner.hf.calls import Call
from bochner.hf.config import Calibration, Distillation
from bochner.hf.evaluate import is_language_model, kind_of, pooled, rows_of
from bochner.hf.interface import layers_of, unwrap
from bochner.maps.landmark import LandmarkFeatures

PATIENCE = 3  # checks of a layer without progress after which it is left
MAX_LENGTH = 256  # tokens that texts are cut to, unless their Calibration says otherwise
PLAIN = Distillation()
MEMORY = 2**31  # bytes of queries, keys and values held at a time


@dataclass
class LayerReport:
    """Relative error of one layer's attention output on validation data, mean over heads, before and after."""

    name: str
    before: float
    after: float
    steps: int
    seconds: float


@dataclass
class DistillReport:
    """What distillation did: per layer, the loss of the end-to-end stage if there was one, and what it bought.

    `quality`: figures of the whole model on the part of the data held back, `before` and `after`, and of the
    `original` where they are not distances from it: the `relative_error` of the outputs; of embeddings the `cosine`, of
    language models the `perplexity`, of other distributions their `divergence` in nats. `note`: why nothing was done.
    """

    layers: list[LayerReport] = field(default_factory=list)
    end_to_end: tuple[float, float] | None = None
    seconds: float = 0.0
    quality: dict[str, dict[str, float]] = field(default_factory=dict)
    note: str = ""

    def __str__(self) -> str:
        if self.note:
            return self.note
        width = max([5, *(len(layer.name) for layer in self.layers)])
        lines = [f"{'layer'.ljust(width)}  before   after  steps  seconds"]
        for x in self.layers:
            lines.append(f"{x.name.ljust(width)}  {x.before:6.3f}  {x.after:6.3f}  {x.steps:5d}  {x.seconds:7.1f}")
        if self.layers:
            mean = [sum(getattr(x, n) for x in self.layers) / len(self.layers) for n in ("before", "after")]
            lines.append(f"{'mean'.ljust(width)}  {mean[0]:6.3f}  {mean[1]:6.3f}")
        if self.end_to_end is not None:
            lines.append(f"end to end: loss {self.end_to_end[0]:.5f} before, {self.end_to_end[1]:.5f} after")
        for name, found in self.quality.items():
            told = ", ".join(f"{x:.4g} {when}" for when, x in found.items())
            lines.append(f"{name.replace('_', ' ')} on data held back: {told}")
        lines.append(f"{self.seconds:.1f} seconds in all")
        return "\n".join(lines)


def distill(model: Any, data: Any, how: Distillation = PLAIN, *, progress: bool | None = None, **old: Any) -> Any:
    """Train the maps of a converted model on unlabelled data, in place; returns what it did, layer by layer.

    `model`: a converted one, also inside a PeftModel. `data`: texts, batches or a `Calibration`; the last eighth is
    held back for validation, and each layer keeps the state that was best on it. `how`: a `Distillation`. With
    `loss="model"` the second stage lowers the model's own loss, by the `labels` of the batches or, in a causal language
    model without any, of the next tokens. What is trained besides the maps is not restored by `revert`.

    Maps stay what they are in every other respect: `save_pretrained`, decoding and `revert` work as before.
    """
    if old:
        how, data = legacy.distillation(how, data, old)
    if not isinstance(how, Distillation):
        raise BochnerError(f"The 'how' of distill must be a bochner.Distillation, got {type(how).__name__}.")
    return train(model, data, how, progress=progress)


def train(model: Any, data: Any, how: Distillation, *, progress: bool | None = None) -> DistillReport:
    """The same, behind the checks of old arguments."""
    first = _Training(how.steps, how.rate, PATIENCE, _Clock(how.seconds), speaker(progress))
    adapted = hasattr(model, "get_base_model")
    check_lora(how.lora, adapted)
    model, tokenizer = unwrap(model)
    attached = layers_of(model)
    batches = Calibration.of(data, tokenizer).batches(model, MAX_LENGTH, labels=True)
    if len(batches) < 2:
        raise BochnerError("distill needs at least two batches, one of them for validation; give more texts.")
    labels = [batch.pop("labels", None) for batch in batches]
    own = _OwnLoss(model, batches, labels) if how.loss == "model" and how.end_to_end else None
    second = None
    if how.end_to_end:
        second = replace(first, steps=how.end_to_end, lr=how.rate / 2, patience=how.end_to_end)
    with all_converted(attached), adapters(model, how.lora):
        trained = _trained(model, how.part, adapted or how.lora > 0)
        mapped = [name for name, layer in attached.items() if layer.plan.has_map]
        if not mapped and not (second and trained):
            return DistillReport(
                note="Nothing was distilled: no head of the model has a map, and nothing else is trained."
            )
        store = _Checkpoint(how.checkpoint, attached)
        return _both_stages(model, mapped, batches, own, trained, store, first, second)


@contextlib.contextmanager
def all_converted(layers: Mapping[str, LinearAttention]) -> Iterator[None]:
    """No row stays exact for a while: short texts would train nothing."""
    borders = {name: layer.plan.exact_below for name, layer in layers.items()}
    for layer in layers.values():
        layer.plan.exact_below = 0
    try:
        yield
    finally:
        for name, layer in layers.items():
            layer.plan.exact_below = borders[name]


def _both_stages(
    model: Any,
    names: Sequence[str],
    batches: Sequence[dict[str, Tensor]],
    own: _OwnLoss | None,
    trained: Sequence[nn.Parameter],
    store: _Checkpoint,
    first: _Training,
    second: _Training | None,
) -> DistillReport:
    """Layer by layer, and end to end if there is a second stage; with figures before and after."""
    held, report = max(1, len(batches) // 8), DistillReport()
    # The teacher's outputs, before anything changes: of all data only if they are to be fitted.
    unasked = 0 if second is not None and own is None else len(batches) - held
    targets = [None] * unasked + [_outputs(model, b, original=True) for b in batches[unasked:]]
    pairs = list(zip(batches, targets, strict=True))
    before = _quality(model, pairs[-held:])
    wanted = {id(p): p.requires_grad for p in model.parameters()}
    try:
        for done in _fit_layers(model, names, batches, held, store, first, 1.0 if second is None else 0.5):
            report.layers.append(done)
        if second is not None and not second.clock.over():
            objective = own or _Distance(model, pairs)
            report.end_to_end = _fit_model(model, objective, len(pairs), held, trained, second)
    finally:
        for p in model.parameters():
            p.requires_grad_(wanted.get(id(p), p.requires_grad))
    if trained:
        note_again(model, batches)
    after = _quality(model, pairs[-held:])
    original = _quality(model, pairs[-held:], original=True)
    for name in before:
        report.quality[name] = {"before": before[name], "after": after[name]}
        if name == "perplexity":
            report.quality[name]["original"] = original[name]
    report.seconds = first.clock.elapsed()
    return report


def _fit_layers(
    model: Any,
    names: Sequence[str],
    batches: Sequence[dict[str, Tensor]],
    held: int,
    store: _Checkpoint,
    training: _Training,
    share: float,
) -> Iterator[LayerReport]:
    """Fit layer by layer, those of a checkpoint as they are there, until a share of the time is over."""
    attached = layers_of(model)
    for group in _groups(names, model, batches):
        restored = {name: store.restore(name) for name in group}
        yield from (done for done in restored.values() if done is not None)
        pending = [name for name, done in restored.items() if done is None]
        if not pending or training.clock.over(share):
            continue
        records = _records(model, pending, batches)
        for name in pending:
            if training.clock.over(share):
                break
            done = _fit_layer(name, attached[name], records[name][:-held], records[name][-held:], training)
            store.keep(done)
            training.say(f"distilled {name}: error {done.before:.3f} to {done.after:.3f} in {done.seconds:.0f} s")
            yield done


def _trained(model: Any, part: str | None, adapted: bool) -> list[nn.Parameter]:
    """The parameters beside those of the maps that the second stage trains."""
    own = {n: p for n, p in model.named_parameters() if f".{CHILD}." not in n}
    if part is None:
        return [p for p in own.values() if p.requires_grad] if adapted else []
    if part == "maps":
        return []
    found = [p for n, p in own.items() if re.search(part, n)]
    if not found:
        raise BochnerError(f"The 'part' of Distillation, {part!r}, matches no parameter of the model.")
    return found


@dataclass(frozen=True)
class _Training:
    """How to descend: Adam with a falling rate, the best state kept, an end when nothing improves or time is over."""

    steps: int
    lr: float
    patience: int
    clock: _Clock
    say: Callable[[str], None]

    def descend(
        self,
        parameters: Sequence[Tensor],
        units: Sequence[Tensor],
        loss: Callable[[int], Tensor],
        measure: Callable[[], float],
    ) -> tuple[float, float, int]:
        """Minimise `loss(step)`; the measure before and at its best, where the parameters are left, and the steps.

        `units`: what the rate of each parameter is relative to; Adam itself takes steps of one size.
        """
        if not parameters:  # maps of which nothing can be trained
            return (now := measure()), now, 0
        optimizer = torch.optim.Adam(parameters, lr=self.lr, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps, eta_min=self.lr / 10)
        before = best = measure()
        kept, waited, step = [p.detach().clone() for p in parameters], 0, 0
        try:
            while step < self.steps and waited < self.patience and not self.clock.over():
                optimizer.zero_grad()
                loss(step).backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                last = [p.detach().clone() for p in parameters]
                optimizer.step()
                schedule.step()
                with torch.no_grad():
                    for p, old, unit in zip(parameters, last, units, strict=True):
                        p.copy_(torch.lerp(old, p, unit.expand_as(p)))
                step += 1
                if step % max(5, self.steps // 10) == 0 or step == self.steps:
                    now = measure()
                    waited = 0 if now < best else waited + 1
                    if now < best:
                        best, kept = now, [p.detach().clone() for p in parameters]
        finally:
            with torch.no_grad():
                for p, value in zip(parameters, kept, strict=True):
                    p.copy_(value)
        return before, best, step


def _fit_layer(
    name: str, layer: LinearAttention, train: Sequence[Call], validation: Sequence[Call], training: _Training
) -> LayerReport:
    start = time.monotonic()

    def loss(step: int) -> Tensor:
        call = train[step % len(train)]
        return HeadErrors().add(call, layer(call)).squared().mean()

    def measure() -> float:
        return error_on(validation, layer).mean().item()

    parameters = layer.unfreeze_(projections=True)
    try:
        before, after, steps = training.descend(parameters, _units(layer, parameters), loss, measure)
    finally:
        layer.freeze_()
    return LayerReport(name, before, after, steps, time.monotonic() - start)


def _units(layer: LinearAttention, parameters: Sequence[Tensor]) -> list[Tensor]:
    """What the rates of a layer's parameters are relative to: in landmark maps the size of each row, elsewhere 1.

    Coefficients of landmarks that few rows are near are larger than others by orders of magnitude.
    """
    maps = [m for m in layer.modules() if isinstance(m, LandmarkFeatures)]
    landmarks = {id(p) for phi in maps for p in phi.parameters()}
    return [row_sizes(p) if id(p) in landmarks else torch.ones_like(p) for p in parameters]


def row_sizes(p: Tensor) -> Tensor:
    """The root mean square of each row, (..., 1), and 1 for a row of zeros."""
    size = p.detach().square().mean(-1, keepdim=True).sqrt()
    return torch.where(size > 0, size, 1.0)


def _records(model: Any, names: Iterable[str], batches: Sequence[dict[str, Tensor]]) -> dict[str, list[Call]]:
    """Every call of some modules under exact attention."""
    found: dict[str, list[Call]] = {name: [] for name in names}

    def look(name: str, call: Call) -> None:
        if name in found:
            found[name].append(call)

    with observe.recording(model, look):
        for batch in batches:
            observe.run(model, batch)
    return found


def _groups(names: Sequence[str], model: Any, batches: Sequence[dict[str, Tensor]]) -> list[list[str]]:
    """Modules whose recorded calls fit into memory together."""
    layers = layers_of(model)
    tokens = sum(next(iter(b.values())).shape[:2].numel() for b in batches)
    groups: list[list[str]] = []
    used = MEMORY + 1
    for name in names:
        plan = layers[name].plan
        need = 4 * tokens * plan.head_dim * (plan.num_heads + 2 * plan.num_kv_heads)
        if used + need > MEMORY:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += need
    return groups


class _Outputs(NamedTuple):
    """What a model computes: its final output, hidden states or logits, and the hidden states after every layer.

    `seen` (b, n): which rows of the final output are not padding.
    """

    final: Tensor
    hidden: tuple[Tensor, ...]
    seen: Tensor
    is_logits: bool


def _outputs(model: Any, batch: dict[str, Tensor], *, original: bool = False) -> _Outputs:
    """The outputs of a converted model; with `original`, those of exact attention."""
    watch = observe.recording(model, lambda name, call: None) if original else contextlib.nullcontext()
    asked: dict[str, Any] = {**batch, "output_hidden_states": True}
    with watch:
        out = observe.run(model, asked, gradient=torch.is_grad_enabled() and not original)
    names = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
    hidden = tuple(h for name in names for h in (getattr(out, name, None) or ())[1:])
    rows = rows_of(model, batch, out[0])
    seen = torch.ones(out[0].shape[:2], dtype=torch.bool, device=out[0].device) if rows is None else rows
    return _Outputs(out[0], hidden, seen, kind_of(model, out) == "distributions")


def _loss(out: _Outputs, target: _Outputs, batch: dict[str, Tensor]) -> Tensor:
    """Squared relative distances of the hidden states of all layers, and of the final output.

    Of token distributions the KL divergence; of hidden states the cosine of the mean over the text, as embeddings are.
    """
    mask = batch.get("attention_mask")

    def keep(t: Tensor) -> Tensor:
        masks = [m for m in (mask, target.seen) if m is not None and m.shape == t.shape[:2]]
        return (masks[0] if masks else torch.ones(t.shape[:2])).to(t.device).bool()

    def distance(a: Tensor, b: Tensor) -> Tensor:
        weight = keep(b).unsqueeze(-1).to(b.dtype)
        return ((a - b) * weight).square().sum() / (b * weight).square().sum()

    pairs = list(zip(out.hidden, target.hidden, strict=True)) or [(out.final, target.final)]
    layers = torch.stack([distance(a, b) for a, b in pairs]).sum()
    seen = target.seen
    if target.is_logits:
        p, q = (t.final[seen].float().log_softmax(-1) for t in (target, out))
        return layers + torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
    a, b = (pooled(t.final, seen) for t in (out, target))
    return layers + (1 - torch.nn.functional.cosine_similarity(a, b, dim=-1)).mean()


class _Distance:
    """How far the outputs for a batch are from the original's."""

    def __init__(self, model: Any, pairs: Sequence[tuple[dict[str, Tensor], Any]]) -> None:
        self.model, self.pairs = model, pairs

    def __call__(self, index: int) -> Tensor:
        batch, target = self.pairs[index]
        return _loss(_outputs(self.model, batch), target, batch)


class _OwnLoss:
    """The loss that the model itself gives for a batch and its labels."""

    def __init__(self, model: Any, batches: Sequence[dict[str, Tensor]], labels: Sequence[Tensor | None]) -> None:
        self.model = model
        causal = _predicts_next_tokens(model)
        if not causal and any(x is None for x in labels):
            raise BochnerError(
                f"The 'loss' of Distillation is the model's, and {type(model).__name__} needs 'labels' for it: put "
                "them into the batches of 'data', or take loss='outputs'."
            )
        own = [_next_labels(b) if x is None else x for b, x in zip(batches, labels, strict=True)]
        self.batches = [{**b, "labels": x} for b, x in zip(batches, own, strict=True)]

    def __call__(self, index: int) -> Tensor:
        loss: Tensor = observe.run(self.model, self.batches[index], gradient=torch.is_grad_enabled()).loss
        return loss


def _predicts_next_tokens(model: Any) -> bool:
    return is_language_model(model, {name: layer.plan for name, layer in layers_of(model).items()})


def _next_labels(batch: dict[str, Tensor]) -> Tensor:
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    return ids if mask is None else ids.masked_fill(mask == 0, -100)


@torch.no_grad()
def _quality(model: Any, pairs: Sequence[tuple[dict[str, Tensor], Any]], *, original: bool = False) -> dict[str, float]:
    """Figures of the whole model as it is now, or as it was, against the original's outputs; means over the batches."""
    found: dict[str, list[float]] = {}
    for batch, target in pairs:
        out = target.final if original else _outputs(model, batch).final
        seen = target.seen
        a, b = (t[seen].float() for t in (out, target.final))
        figures = {"relative_error": ((a - b).norm() / b.norm().clamp_min(1e-30)).item()}
        if not target.is_logits:
            x, y = (pooled(t.float(), seen) for t in (out, target.final))
            figures["cosine"] = torch.nn.functional.cosine_similarity(x, y, dim=-1).mean().item()
        elif _predicts_next_tokens(model):
            labels = _next_labels(batch)[:, 1:].to(out.device)
            figures["loss"] = torch.nn.functional.cross_entropy(out[:, :-1].float().mT, labels).item()
        else:
            p, q = b.log_softmax(-1), a.log_softmax(-1)
            figures["divergence"] = (p.exp() * (p - q)).sum(-1).mean().item()
        for name, figure in figures.items():
            found.setdefault(name, []).append(figure)
    means = {name: sum(x) / len(x) for name, x in found.items()}
    if "loss" in means:
        means["perplexity"] = math.exp(means.pop("loss"))
    return means


def _fit_model(
    model: Any,
    objective: Callable[[int], Tensor],
    count: int,
    held: int,
    trained: Sequence[nn.Parameter],
    training: _Training,
) -> tuple[float, float]:
    """Lower an objective of `count` batches by the maps and other parameters; its value on the last `held`, twice."""
    parameters = list(trained)
    units = [row_sizes(p) for p in parameters]
    for layer in layers_of(model).values():
        own = layer.unfreeze_(projections=True)
        parameters += own
        units += _units(layer, own)
    open_ids = {id(p) for p in parameters}

    @torch.no_grad()
    def measure() -> float:
        losses = [objective(i).item() for i in range(count - held, count)]
        training.say(f"end to end: loss {sum(losses) / held:.5f}")
        return sum(losses) / held

    was_training = model.training
    model.eval()
    try:
        for p in model.parameters():
            p.requires_grad_(id(p) in open_ids)
        return training.descend(parameters, units, lambda step: objective(step % (count - held)), measure)[:2]
    finally:
        for layer in layers_of(model).values():
            layer.freeze_()
        model.train(was_training)


class _Clock:
    def __init__(self, limit: float | None) -> None:
        self.start, self.limit = time.monotonic(), limit

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def over(self, share: float = 1.0) -> bool:
        return self.limit is not None and self.elapsed() > share * self.limit


class _Checkpoint:
    """Finished layers in a directory: tensors as safetensors, figures as JSON."""

    def __init__(self, path: str | Path | None, layers: dict[str, LinearAttention]) -> None:
        self.path, self.layers = None if path is None else Path(path), layers
        if self.path is not None:
            self.path.mkdir(parents=True, exist_ok=True)

    def keep(self, done: LayerReport) -> None:
        if self.path is None:
            return
        tensors = {k: v.contiguous() for k, v in self.layers[done.name].state_dict().items()}
        _safetensors().save_file(tensors, self.path / f"{done.name}.safetensors")
        (self.path / f"{done.name}.json").write_text(json.dumps(done.__dict__), encoding="utf-8")

    def restore(self, name: str) -> LayerReport | None:
        if self.path is None or not (self.path / f"{name}.json").exists():
            return None
        done = LayerReport(**json.loads((self.path / f"{name}.json").read_text(encoding="utf-8")))
        tensors = _safetensors().load_file(self.path / f"{name}.safetensors")
        own = self.layers[name].state_dict()
        if {k: v.shape for k, v in own.items()} != {k: v.shape for k, v in tensors.items()}:
            raise BochnerError(
                f"The checkpoint of {name!r} in {str(self.path)!r} belongs to other maps; use another directory."
            )
        self.layers[name].load_state_dict(tensors)
        return done


def _safetensors() -> Any:
    return extra("safetensors.torch", "hf", "A checkpoint of bochner.distill")
