"""How much of a model is kept: its outputs on texts, before and after, with a loss that gates can be differentiated by.

A language model is judged by two figures: perplexity on ordinary text, as a ratio, and recall, which tells whether a
passage is still used when it comes again after everything else. Other models are judged by their outputs: embeddings by
their cosine and by the rank correlation of all similarities, distributions by their divergence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from bochner._checks import BochnerError
from bochner.hf import capture
from bochner.hf.measure import compare_embeddings

PASSAGE = 128  # tokens of the passage that is repeated
PROBE, PROBES = 768, 2  # tokens of a probe during the search, and how many
PIECE = 512  # tokens that a long text is read at a time
LIGHT = 384  # tokens of the probe that single heads are tried on
LEAST_GAIN = 0.3  # nats on a repeated passage: models that gain less do not look it up
STEPS = 4  # single tokens that are timed behind it
Batches = Sequence[dict[str, Tensor]]


@dataclass
class Quality:
    """Figures of a converted model, and `kept`, the least of them as a share of the original's: 1 is all."""

    kept: float
    figures: dict[str, float] = field(default_factory=dict)


class Judge(Protocol):
    """Texts for choosing, with the original's answers to them."""

    @property
    def batches(self) -> Batches: ...

    def loss(self, index: int, output: Any) -> Tensor:
        """How far an output for a batch is from the original's; 1 is about what may be lost."""
        ...

    def quality(self, outputs: Callable[[dict[str, Tensor]], Any]) -> Quality:
        """Figures over all batches; `outputs` runs the changed model."""
        ...

    def light(self) -> Judge:
        """The same with one short batch, for losses that are asked for many times."""
        ...


class Language:
    """Probes of a causal language model: a passage, other text, the passage again.

    The loss is the divergence from the original's predictions, on ordinary text and on the repeat, each relative to
    what `keep` allows of it.
    """

    def __init__(self, model: Any, tokens: Tensor, keep: float, length: int = PROBE) -> None:
        self.model, self.tokens, self.keep = model, tokens, keep
        length = min(length, len(tokens) // 2)
        self.passage = min(PASSAGE, length // 4)
        if self.passage < 8:
            raise BochnerError(f"Too little text to judge a language model by: {len(tokens)} tokens; give more texts.")
        step = max(1, (len(tokens) - length) // PROBES)
        starts = list(range(0, len(tokens) - length + 1, step))[: 1 if length == LIGHT else PROBES]
        self.batches = [{"input_ids": repeated(tokens[i : i + length], self.passage)} for i in starts]
        self.budget = -math.log(keep)
        self.truth: list[Tensor] = []
        self.losses: list[Tensor] = []
        with torch.no_grad():
            for batch in self.batches:
                logits = capture.run(model, batch).logits
                self.losses.append(_next_losses(logits, batch["input_ids"])[0])
                self.truth.append(self._rows(logits).log_softmax(-1))
        self.first, self.again = (_mean(self.losses, self._part(name)) for name in ("first", "again"))
        self.gain = self.first - self.again

    def light(self) -> Language:
        start = max(0, len(self.tokens) - 2 * LIGHT)
        return Language(self.model, self.tokens[start : start + 2 * LIGHT], self.keep, LIGHT)

    def _part(self, name: str) -> slice:
        """Places of predictions: of the passage at first, of ordinary text, and of the passage again."""
        p = self.passage
        return {"first": slice(0, p - 1), "text": slice(p, -p), "again": slice(-p + 1, None)}[name]

    def _rows(self, logits: Tensor) -> Tensor:
        """The predictions that the loss compares: every fourth of the text, and the repeat."""
        rows = logits[0, :-1]
        return torch.cat([rows[self._part("text")][::4], rows[self._part("again")]]).float()

    def loss(self, index: int, output: Any) -> Tensor:
        truth = self.truth[index].to(output.logits.device)
        apart = (truth.exp() * (truth - self._rows(output.logits).log_softmax(-1))).sum(-1)
        text, again = apart[: -self.passage + 1].mean(), apart[-self.passage + 1 :].mean()
        return text / self.budget + again / (self.budget * max(self.gain, LEAST_GAIN))

    @torch.no_grad()
    def quality(self, outputs: Callable[[dict[str, Tensor]], Any]) -> Quality:
        found = [_next_losses(outputs(batch).logits, batch["input_ids"])[0] for batch in self.batches]
        before, after = (_mean(losses, self._part("text")) for losses in (self.losses, found))
        return language_quality(after - before, self.gain, self.again, _mean(found, self._part("again")))


def language_quality(rise: float, gain: float, again: float, now: float) -> Quality:
    """From the rise of the loss on ordinary text and the losses on the repeat, before and now.

    `gain`: what the original gains on the repeat; a model that gains nothing has no recall to lose.
    """
    figures = {"perplexity_ratio": math.exp(rise), "recall": math.exp(now), "recall_original": math.exp(again)}
    if gain < LEAST_GAIN:
        return Quality(math.exp(-rise), figures)
    figures["recall_kept"] = 1 - (now - again) / gain
    return Quality(min(math.exp(-rise), figures["recall_kept"]), figures)


def repeated(tokens: Tensor, passage: int) -> Tensor:
    """Tokens (n,) with the first `passage` of them in place of the last, (1, n)."""
    return torch.cat([tokens[:-passage], tokens[:passage]])[None]


def _next_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy of every next token, (b, n - 1)."""
    target = ids[:, 1:].to(logits.device)
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().transpose(1, 2), target, reduction="none")


def _mean(losses: Sequence[Tensor], part: slice) -> float:
    return torch.cat([x[part] for x in losses]).mean().item()


class Outputs:
    """Batches of any other model: the loss and the figures are distances from the original's outputs."""

    def __init__(self, model: Any, data: Batches, keep: float) -> None:
        self.model, self.keep = model, keep
        self.batches, self.budget = list(data), 1 - keep
        self.is_logits = getattr(model, "get_output_embeddings", lambda: None)() is not None
        with torch.no_grad():
            self.truth = [_main(capture.run(model, batch)).float() for batch in self.batches]

    def light(self) -> Outputs:
        return Outputs(self.model, self.batches[:1], self.keep)

    def loss(self, index: int, output: Any) -> Tensor:
        out, truth, batch = _main(output).float(), self.truth[index], self.batches[index]
        if self.is_logits:
            return _divergence(out, truth, batch) / self.budget
        a, b = (pooled(t, batch) for t in (out, truth))
        return (1 - torch.nn.functional.cosine_similarity(a, b, dim=-1)).mean() / self.budget

    @torch.no_grad()
    def quality(self, outputs: Callable[[dict[str, Tensor]], Any]) -> Quality:
        found = [_main(outputs(batch)).float() for batch in self.batches]
        if self.is_logits:
            triples = zip(found, self.truth, self.batches, strict=True)
            apart = sum(_divergence(*triple).item() for triple in triples) / len(found)
            return Quality(math.exp(-apart), {"divergence": apart})
        a, b = (
            torch.nn.functional.normalize(
                torch.cat([pooled(t, batch) for t, batch in zip(ts, self.batches, strict=True)]), dim=-1
            )
            for ts in (self.truth, found)
        )
        if len(a) < 4:
            cosine = (a * b).sum(-1).mean().item()
            return Quality(cosine, {"cosine": cosine})
        same = compare_embeddings(a, b)
        return Quality(min(same.cosine, same.rank_correlation), same._asdict())


def _main(output: Any) -> Tensor:
    return output.logits if getattr(output, "logits", None) is not None else output[0]


def pooled(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The mean over all tokens that are not padding, (b, hidden)."""
    if out.ndim == 2:
        return out
    mask = batch.get("attention_mask")
    if mask is None or mask.shape != out.shape[:2]:
        return out.flatten(1, -2).mean(1)
    weight = mask.to(out).unsqueeze(-1)
    return (out * weight).sum(1) / weight.sum(1)


def _divergence(out: Tensor, truth: Tensor, batch: dict[str, Tensor]) -> Tensor:
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    keep = mask.bool() if mask is not None and mask.shape == out.shape[:-1] else ...
    p, q = truth[keep].log_softmax(-1), out[keep].log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


@dataclass
class Reading:
    """One long text read in pieces: the loss of every next token, what it took, and what the cache held at the end."""

    losses: Tensor
    prefill_seconds: float
    step_seconds: float
    cache_bytes: int


@torch.no_grad()
def read(model: Any, ids: Tensor) -> Reading:
    """Read ids (1, n) as generation would, piece by piece through a cache; then time single tokens behind it."""
    from transformers import DynamicCache

    from bochner.hf.cache import cache_bytes

    cache, losses, last = DynamicCache(config=model.config), [], None
    ids = ids.to(next(model.parameters()).device)
    began, spent = time.perf_counter(), 0.0
    for start in range(0, ids.shape[1], PIECE):
        piece = ids[:, start : start + PIECE]
        logits = model(piece, past_key_values=cache, use_cache=True).logits[0].float()
        pause = time.perf_counter()
        rows = logits if last is None else torch.cat([last, logits])
        target = ids[0, max(start, 1) : start + piece.shape[1]]
        losses.append(torch.nn.functional.cross_entropy(rows[: len(target)], target, reduction="none"))
        last = logits[-1:]
        spent += time.perf_counter() - pause
    prefill = time.perf_counter() - began - spent
    steps, size = [], cache_bytes(cache)
    for i in range(STEPS):
        began = time.perf_counter()
        model(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
        steps.append(time.perf_counter() - began)
    return Reading(torch.cat(losses), prefill, min(steps), size)


def compare_readings(before: Sequence[Reading], after: Sequence[Reading], passage: int) -> Quality:
    """Quality over long texts whose first `passage` tokens come again at their end."""
    text, again = slice(passage, -passage), slice(-passage + 1, None)
    losses = [[r.losses for r in readings] for readings in (before, after)]
    first = _mean(losses[0], slice(0, passage - 1))
    rise = _mean(losses[1], text) - _mean(losses[0], text)
    held = _mean(losses[0], again)
    return language_quality(rise, first - held, held, _mean(losses[1], again))
