"""Attention transfer: teach the feature maps of a converted model what its original attention computed.

First each layer by itself: the model is run with exact attention, and the maps of all layers are trained so that their
linear attention gives the same outputs on the same queries, keys and values. Then end to end: the hidden states of the
whole converted model are fitted to those of the original, so that errors are weighed by what they do later. No labels
are needed, only text. In place of that the second stage can lower the model's own loss, of the maps and of the adapters
of PEFT together.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bochner._checks import BochnerError, extra
from bochner._progress import speaker
from bochner.hf import observe
from bochner.hf.attention import CHILD, LinearAttention
from bochner.hf.calibrate import HeadErrors, option_errors
from bochner.hf.calls import Call, exact
from bochner.hf.config import Calibration, Distillation
from bochner.hf.evaluate import Outputs, divergence, is_language_model, kind_of, pooled, rows_of
from bochner.hf.interface import layers_of, unwrap
from bochner.maps.landmark import LandmarkFeatures

PATIENCE = 3  # checks without progress in any layer after which the first stage ends
MAX_LENGTH = 256  # tokens that texts are cut to, unless their Calibration says otherwise
PLAIN = Distillation()
Batch = dict[str, Tensor]
Groups = dict[str, list[tuple[nn.Parameter, Tensor]]]  # parameters, and what their rates are relative to


@dataclass
class LayerReport:
    """Relative error of one layer's attention output on validation data, mean over heads, before and after."""

    name: str
    before: float
    after: float


@dataclass
class DistillReport:
    """What distillation did: per layer, the loss of the end-to-end stage if there was one, and what it bought.

    `steps`: of the first stage. `quality`: figures of the whole model on the data held back, `before` and `after`:
    perplexity of language models, also that of the `original`; else as in `bochner.hf.evaluate`. `note`: why nothing
    was done.
    """

    layers: list[LayerReport] = field(default_factory=list)
    steps: int = 0
    end_to_end: tuple[float, float] | None = None
    seconds: float = 0.0
    quality: dict[str, dict[str, float]] = field(default_factory=dict)
    note: str = ""

    def __str__(self) -> str:
        if self.note:
            return self.note
        count = max(len(self.layers), 1)
        mean = LayerReport("mean", *(sum(getattr(x, n) for x in self.layers) / count for n in ("before", "after")))
        rows = [*self.layers, mean] if self.layers else []
        width = max([5, *(len(x.name) for x in rows)])
        lines = [f"{'layer'.ljust(width)}  before   after"] if rows else []
        lines += [f"{x.name.ljust(width)}  {x.before:6.3f}  {x.after:6.3f}" for x in rows]
        if self.end_to_end is not None:
            lines.append(f"end to end: loss {self.end_to_end[0]:.5f} before, {self.end_to_end[1]:.5f} after")
        for name, found in self.quality.items():
            told = ", ".join(f"{x:.4g} {when}" for when, x in found.items())
            lines.append(f"{name.replace('_', ' ')} on data held back: {told}")
        lines.append(f"{self.seconds:.1f} seconds in all")
        return "\n".join(lines)


def distill(model: Any, data: Any, how: Distillation = PLAIN, *, progress: bool | None = None) -> DistillReport:
    """Train the maps of a converted model on unlabelled data, in place; returns what it did, layer by layer.

    `model`: a converted one; the adapters of a PeftModel are trained with its maps, and `revert` leaves them. `data`:
    texts, batches or a `Calibration`; the last eighth is for validation, and each layer keeps the state that was best
    on it. `how`: a `Distillation`. With `loss="model"` the second stage lowers the model's own loss, by the `labels` of
    the batches. A causal language model without any learns the next tokens.

    Maps stay what they are in every other respect: `save_pretrained`, decoding and `revert` work as before.
    """
    if not isinstance(how, Distillation):
        raise BochnerError(f"The 'how' of distill must be a bochner.Distillation, got {type(how).__name__}.")
    adapted = hasattr(model, "get_base_model")
    if how.lora and adapted:
        raise BochnerError("The model has adapters already: leave out the 'lora' of Distillation, which makes others.")
    model, tokenizer = unwrap(model)
    attached = layers_of(model)
    batches = Calibration.of(data, tokenizer).batches(model, MAX_LENGTH, labels=True)
    if len(batches) < 2:
        raise BochnerError("distill needs at least two batches, one of them for validation; give more texts.")
    run = _Run(model, batches, how, speaker(progress))
    with adapters(model, how.lora):
        own = (p for n, p in model.named_parameters() if f".{CHILD}." not in n and p.requires_grad)
        trained = list(own) if adapted or how.lora else []
        mapped = [name for name, layer in attached.items() if layer.plan.has_map]
        if not mapped and not (how.end_to_end and trained):
            return DistillReport(
                note="Nothing was distilled: no head of the model has a map, and nothing else is trained."
            )
        return run.both_stages(mapped, trained)


@contextlib.contextmanager
def adapters(model: Any, rank: int) -> Iterator[None]:
    """PEFT's adapters of some rank beside the projections of all attention modules, at the end merged into them."""
    if not rank:
        yield
        return
    from transformers.pytorch_utils import Conv1D

    peft = extra("peft", "train", "The 'lora' of bochner.Distillation")
    names = [
        f"{name}.{inner}"
        for name in layers_of(model)
        for inner, module in model.get_submodule(name).named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and CHILD not in inner.split(".")
    ]
    if not names:
        raise BochnerError(
            "The 'lora' of Distillation finds no projections in the attention modules: make adapters by peft instead."
        )
    transposed = all(isinstance(model.get_submodule(name), Conv1D) for name in names)
    with observe.frozen(model):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=names, fan_in_fan_out=transposed)
            wrapped = peft.get_peft_model(model, config)
        wrapped.train(model.training)
        try:
            yield
        except BaseException:
            wrapped.unload()
            raise
        wrapped.merge_and_unload()


class _Run:
    """One distillation: the model, its data, the last `held` batches of which validate, and the time it has.

    `labels`: of each batch for the model's own loss, None where there are none.
    """

    def __init__(self, model: Any, batches: list[Batch], how: Distillation, say: Callable[[str], None]) -> None:
        self.model, self.batches, self.how, self.say = model, batches, how, say
        self.held, self.began = max(1, len(batches) // 8), time.monotonic()
        self.predicts = is_language_model(model, {name: layer.plan for name, layer in layers_of(model).items()})
        self.labels = [batch.pop("labels", None) for batch in batches]
        self.by_labels = how.loss == "model" and how.end_to_end > 0
        if self.by_labels and not self.predicts and any(x is None for x in self.labels):
            raise BochnerError(
                f"The 'loss' of Distillation is the model's, and {type(model).__name__} needs 'labels' for it: put "
                "them into the batches of 'data', or take loss='outputs'."
            )

    def both_stages(self, names: Sequence[str], trained: Sequence[nn.Parameter]) -> DistillReport:
        """Each layer by itself, and end to end if there is a second stage; with figures before and after."""
        model, report = self.model, DistillReport()
        with observe.softmax(model), torch.no_grad():  # the teacher, before anything changes
            fits = self.how.end_to_end and not self.by_labels
            targets = [_outputs(model, batch) for batch in self.batches] if fits else []
            truth = None if self.predicts else Outputs(model, self.batches[-self.held :])
            original = self._figures(truth)
        before = self._figures(truth)

        def objective(i: int) -> Tensor:
            if self.by_labels:
                return self._own_loss(i, self.labels[i])
            return _distance(_outputs(model, self.batches[i]), targets[i], self.batches[i])

        with observe.frozen(model), observe.evaluation_mode(model):
            try:
                if names:
                    self._fit_layers(names, report)
                if self.how.end_to_end and not self._is_over(1.0):
                    self._fit_model(objective, trained, report)
            finally:
                for layer in layers_of(model).values():
                    layer.freeze_()
        for layer in layers_of(model).values() if trained else ():
            layer.plan.seen = None  # other weights make other queries and keys
        for name, after in self._figures(truth).items():
            report.quality[name] = {"before": before[name], "after": after}
            if truth is None:
                report.quality[name]["original"] = original[name]
        report.seconds = time.monotonic() - self.began
        return report

    def _is_over(self, share: float) -> bool:
        return self.how.seconds is not None and time.monotonic() - self.began > share * self.how.seconds

    def _own_loss(self, i: int, labels: Tensor | None) -> Tensor:
        """The model's own loss on a batch, by labels or else of the next tokens."""
        batch = self.batches[i]
        if labels is None:
            padding = batch.get("attention_mask", torch.ones_like(batch["input_ids"])) == 0
            labels = batch["input_ids"].masked_fill(padding, -100)
        found: Tensor = observe.run(self.model, {**batch, "labels": labels}, gradient=torch.is_grad_enabled()).loss
        return found

    @torch.no_grad()
    def _figures(self, truth: Outputs | None) -> dict[str, float]:
        """Of the whole model as it is now, on the batches held back; `truth`: the original's outputs."""
        with observe.evaluation_mode(self.model):
            if truth is not None:
                return truth.quality(lambda batch: observe.run(self.model, batch)).figures
            return {"perplexity": math.exp(self._mean(lambda i: self._own_loss(i, None)))}

    def _mean(self, objective: Callable[[int], Tensor]) -> float:
        """Of the batches held back."""
        count = len(self.batches)
        return sum(objective(i).item() for i in range(count - self.held, count)) / self.held

    def _fit_layers(self, names: Sequence[str], report: DistillReport) -> None:
        """Train the maps of all layers at once, each on what its exact attention does in the exact model."""
        layers = {name: layers_of(self.model)[name] for name in names}

        def measure() -> dict[str, float]:
            options = {name: {"": layer} for name, layer in layers.items()}
            errors = option_errors(self.model, options, self.batches[-self.held :])
            found = {name: e[""].relative().mean().item() for name, e in errors.items()}
            self.say(f"layer by layer: mean error {sum(found.values()) / max(len(found), 1):.4f}")
            return found

        @torch.enable_grad()
        def look(name: str, call: Call) -> Tensor | None:
            if name not in layers:
                return None
            truth = exact(call)
            loss = HeadErrors().add(call, layers[name](call), truth).squared().mean()
            if loss.requires_grad:
                loss.backward()
            return truth

        def gradients(i: int) -> None:
            with observe.recording(self.model, look):
                observe.run(self.model, self.batches[i])

        groups = {name: _trained(layer) for name, layer in layers.items()}
        stage = _Stage(self.how.steps, self.how.rate, PATIENCE, 0.5 if self.how.end_to_end else 1.0)
        before, after, report.steps = self._descend(groups, gradients, measure, stage)
        report.layers = [LayerReport(name, x, after[name]) for name, x in before.items()]

    def _fit_model(
        self, objective: Callable[[int], Tensor], trained: Sequence[nn.Parameter], report: DistillReport
    ) -> None:
        """Lower an objective of each batch by the maps and other parameters."""
        self.model.requires_grad_(False)
        for p in trained:
            p.requires_grad_()
        group = [(p, row_sizes(p)) for p in trained]
        group += [pair for layer in layers_of(self.model).values() for pair in _trained(layer)]

        @torch.no_grad()
        def measure() -> dict[str, float]:
            mean = self._mean(objective)
            self.say(f"end to end: loss {mean:.5f}")
            return {"": mean}

        stage = _Stage(self.how.end_to_end, self.how.rate / 2, self.how.end_to_end, 1.0)
        before, after, _ = self._descend({"": group}, lambda i: objective(i).backward(), measure, stage)
        report.end_to_end = before[""], after[""]

    def _descend(
        self, groups: Groups, gradients: Callable[[int], None], measure: Callable[[], dict[str, float]], stage: _Stage
    ) -> tuple[dict[str, float], dict[str, float], int]:
        """Adam with a falling rate: the measures before and at their best, and the steps.

        `gradients(i)` adds those of one batch. Each group of parameters is left where its own `measure` was least, and
        its gradient has at most the norm 1. The rate of each parameter is relative to its unit.
        """
        pairs, best = [pair for group in groups.values() for pair in group], measure()
        before, step, waited = dict(best), 0, 0
        if not pairs:  # maps of which nothing can be trained
            return before, best, step
        optimizer = torch.optim.Adam([p for p, _ in pairs], lr=stage.rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, stage.steps, eta_min=stage.rate / 10)
        kept = {name: [p.detach().clone() for p, _ in group] for name, group in groups.items()}
        try:
            while step < stage.steps and waited < stage.patience and not self._is_over(stage.share):
                optimizer.zero_grad()
                gradients(step % (len(self.batches) - self.held))
                for group in groups.values():
                    nn.utils.clip_grad_norm_([p for p, _ in group], 1.0)
                last = [p.detach().clone() for p, _ in pairs]
                optimizer.step()
                schedule.step()
                with torch.no_grad():
                    for (p, unit), old in zip(pairs, last, strict=True):
                        p.copy_(torch.lerp(old, p, unit.expand_as(p)))
                step += 1
                if step % max(5, stage.steps // 10) == 0 or step == stage.steps:
                    better = {name: x for name, x in measure().items() if x < best[name]}
                    waited = 0 if better else waited + 1
                    best |= better
                    kept |= {name: [p.detach().clone() for p, _ in groups[name]] for name in better}
        finally:
            with torch.no_grad():
                for name, group in groups.items():
                    for (p, _), value in zip(group, kept[name], strict=True):
                        p.copy_(value)
        return before, best, step


class _Stage(NamedTuple):
    """Steps, their rate, checks without progress that end it, and the share of the time after which it ends."""

    steps: int
    rate: float
    patience: int
    share: float


def _trained(layer: LinearAttention) -> list[tuple[nn.Parameter, Tensor]]:
    """What of a layer's maps is trained, with its units: in landmark maps the size of each row, elsewhere 1.

    Coefficients of landmarks that few rows are near are larger than others by orders of magnitude.
    """
    parameters = layer.unfreeze_(projections=True)
    landmarks = {id(p) for m in layer.modules() if isinstance(m, LandmarkFeatures) for p in m.parameters()}
    return [(p, row_sizes(p) if id(p) in landmarks else torch.ones_like(p)) for p in parameters]


def row_sizes(p: Tensor) -> Tensor:
    """The root mean square of each row, (..., 1), and 1 for a row of zeros."""
    size = p.detach().square().mean(-1, keepdim=True).sqrt()
    return torch.where(size > 0, size, 1.0)


class _Outputs(NamedTuple):
    """What a model computes: its final output, hidden states or logits, and the hidden states after every layer.

    `seen` (b, n): which rows of the final output are not padding.
    """

    final: Tensor
    hidden: tuple[Tensor, ...]
    seen: Tensor
    is_logits: bool


def _outputs(model: Any, batch: Batch) -> _Outputs:
    """The outputs of a model as it is."""
    out = observe.run(model, {**batch, "output_hidden_states": True}, gradient=torch.is_grad_enabled())
    names = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
    hidden = tuple(h for name in names for h in (getattr(out, name, None) or ())[1:])
    rows = rows_of(model, batch, out[0])
    seen = torch.ones(out[0].shape[:2], dtype=torch.bool, device=out[0].device) if rows is None else rows
    return _Outputs(out[0], hidden, seen, kind_of(model, out) == "distributions")


def _distance(out: _Outputs, target: _Outputs, batch: Batch) -> Tensor:
    """Squared relative distances of the hidden states of all layers, and of the final output.

    Of token distributions the KL divergence; of hidden states the cosine of the mean over the text, as embeddings are.
    """

    def squared(a: Tensor, b: Tensor) -> Tensor:
        masks = [m for m in (batch.get("attention_mask"), target.seen) if m is not None and m.shape == b.shape[:2]]
        weight = (masks[0] if masks else torch.ones(b.shape[:2])).to(b).unsqueeze(-1)
        return ((a - b) * weight).square().sum() / (b * weight).square().sum()

    pairs = list(zip(out.hidden, target.hidden, strict=True)) or [(out.final, target.final)]
    layers = torch.stack([squared(a, b) for a, b in pairs]).sum()
    if target.is_logits:
        a, b = (t.final[target.seen].float() for t in (out, target))
        return layers + divergence(a, b, None).mean()
    a, b = (pooled(t.final, target.seen) for t in (out, target))
    return layers + (1 - F.cosine_similarity(a, b, dim=-1)).mean()
