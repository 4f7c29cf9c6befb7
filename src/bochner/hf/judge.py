"""How much of a model is kept: its outputs on texts, before and after, with a loss that gates can be differentiated by.

A language model is judged by two figures: perplexity on ordinary text, as a ratio, and recall, which tells whether
passages are still used when they come again after everything else. Both depend on how much text there is: windows that
lose nothing at 500 tokens lose a quarter at 4,000. So they are measured at the length that is asked for, always against
the original on the same tokens. Other models are judged by their outputs: embeddings by their cosine and by the rank
correlation of all similarities, distributions by their divergence.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bochner._checks import BochnerError
from bochner.hf import capture
from bochner.hf.measure import compare_embeddings

PASSAGE, PASSAGES = 120, 4  # tokens of a passage that comes again, and how many do at most, from all over the text
REPEATED = 0.25  # the share of a text that they may take
LEAD = 8  # of these tokens only tell which passage it is
ORDINARY = 96  # tokens of ordinary text that a probe runs
PLACES = (0.25, 0.5, 0.75, 1.0)  # where in the text, as shares of its length
CHOSEN_TOKENS = 3072  # of text to judge by, at least one text
ROUGH, FAR_OFF = 2, 4.0  # texts after which a choice is given up that loses so many times what it may
WHOLE = 1024  # tokens: texts up to so many are run whole
PIECE = 512  # tokens that a long text is read at a time
LEAST_GAIN = 0.3  # nats on a repeated passage: models that gain less do not look it up
STEPS = 4  # tokens at its end that are read and timed one at a time
RANKED = 4  # texts: fewer have too few similarities to rank
Batches = Sequence[dict[str, Any]]


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

    def turn(self, step: int) -> int:
        """Which batch a step asks that asks one at a time; every other step one with repeats, if not all have them."""
        ...

    def light(self) -> Judge:
        """The same with one short batch, for losses that are asked for many times."""
        ...


class Probe(NamedTuple):
    """Tokens of a text, behind a cache of what the original has read before: `ordinary` ones, then passages of it.

    The first token is there to predict the second.
    """

    batch: dict[str, Any]
    ordinary: int
    text: Text

    @classmethod
    def whole(cls, text: Text) -> Probe:
        """All of a text."""
        return cls({"input_ids": text.ids}, len(text.body) - 1, text)

    @property
    def repeats(self) -> bool:
        """Whether passages come again in it."""
        return int(self.batch["input_ids"].shape[1]) > self.ordinary + 1

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What there is for each token but the first: of ordinary text, and of the repeats."""
        return rows[: self.ordinary], self.text.recalled(rows[self.ordinary :])


class Language:
    """Probes of a causal language model in texts of `length` tokens.

    Short texts are run whole. A long one is read once by the original; a choice is run on the last tokens before
    several places only, behind the original's keys. That is a little kinder than to read all of it by the choice, and
    several times as fast. The loss is, on ordinary text, the divergence from the original's predictions, which is the
    expected rise of the loss if the original is right and far less noisy than the rise; on the repeats, where what
    comes is known and the original is not right, the rise itself. Each is relative to what `keep` allows of it. The
    figure for ordinary text is the rise and its standard error, where that is less than the divergence: the original
    is not right there either, and a little less context costs less than it changes. `hasty`: give up a choice that is
    far off after some of the texts.
    """

    def __init__(self, model: Any, tokens: Tensor, keep: float, length: int, hasty: bool = True) -> None:
        self.hasty = hasty
        size = min(length, len(tokens))
        count = max(1, min(CHOSEN_TOKENS, len(tokens)) // size)
        self.texts = [Text(piece, i) for i, piece in enumerate(tokens[: count * size].split(size))]
        self.budget = -math.log(keep)
        self.probes: list[Probe] = []
        self.truth: list[Tensor] = []
        first, again = [], []
        for text in self.texts:
            probes, body = ([Probe.whole(text)], None) if size <= WHOLE else _behind(model, text)
            with torch.no_grad():
                truth = [capture.run(model, p.batch).logits[0, :-1].float().log_softmax(-1) for p in probes]
            losses = _next_losses(truth[-1], probes[-1].batch["input_ids"])
            again.append(probes[-1].split(losses)[1].mean().item())
            first.append(text.first((losses if body is None else body).cpu()))
            self.probes, self.truth = [*self.probes, *probes], [*self.truth, *truth]
        self.again = sum(again) / len(again)
        self.gain = sum(first) / len(first) - self.again

    @property
    def batches(self) -> Batches:
        return [probe.batch for probe in self.probes]

    def turn(self, step: int) -> int:
        repeats = [i for i, probe in enumerate(self.probes) if probe.repeats]
        others = [i for i, probe in enumerate(self.probes) if not probe.repeats]
        asked = others if others and step % 2 else repeats
        return asked[(step // 2 if others else step) % len(asked)]

    def light(self) -> Language:
        """The last probe only."""
        one = copy.copy(self)
        one.texts, one.probes, one.truth = self.texts[-1:], self.probes[-1:], self.truth[-1:]
        return one

    def _losses(self, index: int, output: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Divergence from the original's predictions and rise of the loss on ordinary text, and the rise on repeats."""
        truth = self.truth[index].to(output.logits.device)
        now = output.logits[0, :-1].float().log_softmax(-1)
        apart, _ = self.probes[index].split((truth.exp() * (truth - now)).sum(-1))
        tokens = self.batches[index]["input_ids"][0, 1:, None].to(now.device)
        return apart, *self.probes[index].split((truth - now).gather(-1, tokens)[:, 0])

    def loss(self, index: int, output: Any) -> Tensor:
        text, _, again = self._losses(index, output)
        loss = text.mean() / self.budget
        if len(again) and self.gain >= LEAST_GAIN:  # one probe of a text has them, and counts once among its probes
            share = len(self.probes) / len(self.texts)
            loss = loss + share * again.mean().clamp_min(0) / (self.budget * self.gain)
        return loss

    @torch.no_grad()
    def quality(self, outputs: Callable[[dict[str, Any]], Any]) -> Quality:
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for i, batch in enumerate(self.batches):
            found.append(self._losses(i, outputs(batch)))
            if self.hasty and i + 1 == ROUGH and len(self.probes) == len(self.texts):
                rough = self._figures(found)
                if 1 - rough.kept > FAR_OFF * (1 - math.exp(-self.budget)):
                    return rough
        return self._figures(found)

    def _figures(self, found: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Quality:
        apart, rise, again = (torch.cat(parts) for parts in zip(*found, strict=True))
        error = rise.std().item() / math.sqrt(len(rise))
        text = min(apart.mean().item(), rise.mean().item() + error)
        return language_quality(text, self.gain, self.again, self.again + again.mean().item())


def _behind(model: Any, text: Text) -> tuple[list[Probe], Tensor]:
    """Probes before several places of a text, behind what the original has read; and its losses on the body."""
    n, ordinary = len(text.body), min(ORDINARY, len(text.body) // 8)
    ends = [round(share * n) for share in PLACES]
    stops = [end - ordinary - 1 for end in ends]
    contexts, losses = [], []
    for reading in pieces(model, text.body[None], stops):
        losses.append(reading.losses)
        if reading.read in stops:
            contexts.append(reading.snapshot())
    probes = []
    for start, end, context in zip(stops, ends, contexts, strict=True):
        ids = torch.cat([text.body[start:end], text.again if end == n else text.again[:0]])
        probes.append(Probe({"input_ids": ids[None], "past_key_values": context}, ordinary, text))
    return probes, torch.cat(losses)


class Text:
    """A text of n tokens: a body, and at the end passages from all over it again.

    Short texts have room for one or two of them: `turn`, the number of a text, says from where.
    """

    def __init__(self, tokens: Tensor, turn: int = 0) -> None:
        room = int(REPEATED * len(tokens))
        self.passage = min(PASSAGE, room)
        self.lead = min(LEAD, self.passage // 4)
        if self.passage < 2 * LEAD:
            raise BochnerError(f"Too little text to judge a language model by: {len(tokens)} tokens; give more texts.")
        count = min(PASSAGES, room // self.passage)
        self.body = tokens[: -self.passage * count]
        step = (len(self.body) - self.passage) / PASSAGES  # the last begins a quarter of the text before its end
        places = sorted((turn + i * (PASSAGES // count)) % PASSAGES for i in range(count))
        self.starts = [round(LEAD + place * step) for place in places]  # behind what may be sinks
        self.again = torch.cat([self.body[a : a + self.passage] for a in self.starts])

    @property
    def ids(self) -> Tensor:
        return torch.cat([self.body, self.again])[None]

    def recalled(self, again: Tensor) -> Tensor:
        """What there is for each token of the repeats, without those that only tell which passage it is."""
        return again.view(-1, self.passage)[:, self.lead :].flatten()

    def first(self, losses: Tensor) -> float:
        """The loss on the passages at first; `losses` are of tokens 1, 2, ..."""
        found = torch.stack([losses[a - 1 : a - 1 + self.passage] for a in self.starts])
        return self.recalled(found).mean().item()

    def split(self, losses: Tensor) -> tuple[Tensor, Tensor]:
        """Losses of the body, and of the repeats."""
        body = len(self.body) - 1
        return losses[:body], self.recalled(losses[body:])


def language_quality(rise: float, gain: float, again: float, now: float) -> Quality:
    """From the rise of the loss on ordinary text and the losses on the repeat, before and now.

    `gain`: what the original gains on the repeat; a model that gains nothing has no recall to lose.
    """
    figures = {"perplexity_ratio": math.exp(rise), "recall": math.exp(now), "recall_original": math.exp(again)}
    if gain < LEAST_GAIN:
        return Quality(math.exp(-rise), figures)
    figures["recall_kept"] = 1 - (now - again) / gain
    return Quality(min(math.exp(-rise), figures["recall_kept"]), figures)


def _next_losses(rows: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy of the tokens of ids (1, n) but the first, by rows (n - 1, vocabulary) of predictions."""
    return torch.nn.functional.cross_entropy(rows.float(), ids[0, 1:].to(rows.device), reduction="none")


class Outputs:
    """Batches of any other model: the loss and the figures are distances from the original's outputs."""

    def __init__(self, model: Any, data: Batches, keep: float) -> None:
        self.model, self.keep = model, keep
        self.batches, self.budget = list(data), 1 - keep
        with torch.no_grad():
            outputs = [capture.run(model, batch) for batch in self.batches]
        self.is_logits = gives_distributions(model, outputs[0])
        self.truth = [_main(output).float() for output in outputs]
        self.rows = [rows_of(model, batch, t) for batch, t in zip(self.batches, self.truth, strict=True)]

    def turn(self, step: int) -> int:
        return step % len(self.batches)

    def light(self) -> Outputs:
        return Outputs(self.model, self.batches[:1], self.keep)

    def loss(self, index: int, output: Any) -> Tensor:
        out, truth, rows = _main(output).float(), self.truth[index], self.rows[index]
        if self.is_logits:
            return _divergence(out, truth, rows) / self.budget
        a, b = (pooled(t, rows) for t in (out, truth))
        return (1 - torch.nn.functional.cosine_similarity(a, b, dim=-1)).mean() / self.budget

    @torch.no_grad()
    def quality(self, outputs: Callable[[dict[str, Tensor]], Any]) -> Quality:
        found = [_main(outputs(batch)).float() for batch in self.batches]
        if self.is_logits:
            triples = zip(found, self.truth, self.rows, strict=True)
            apart = sum(_divergence(*triple).item() for triple in triples) / len(found)
            return Quality(math.exp(-apart), {"divergence": apart})
        a, b = (
            torch.nn.functional.normalize(
                torch.cat([pooled(t, rows) for t, rows in zip(ts, self.rows, strict=True)]), dim=-1
            )
            for ts in (self.truth, found)
        )
        if len(a) < RANKED:
            cosine = (a * b).sum(-1).mean().item()
            return Quality(cosine, {"cosine": cosine})
        same = compare_embeddings(a, b)
        return Quality(min(same.cosine, same.rank_correlation), same._asdict())


def _main(output: Any) -> Tensor:
    return output.logits if getattr(output, "logits", None) is not None else output[0]


def gives_distributions(model: Any, output: Any) -> bool:
    """Whether an output is distributions, of tokens or of classes for each token or frame."""
    logits = getattr(output, "logits", None)
    vocabulary = getattr(model, "get_output_embeddings", lambda: None)() is not None
    return vocabulary or (logits is not None and logits.ndim == 3)


def rows_of(model: Any, batch: dict[str, Any], out: Tensor) -> Tensor | None:
    """Which rows of an output (b, n, ...) are not padding, (b, n) bool; None where nothing is known of them.

    A mask over samples of sound is taken to frames as the model itself does.
    """
    masks = [batch[name] for name in ("decoder_attention_mask", "attention_mask") if name in batch]
    found = next((mask for mask in masks if mask.shape == out.shape[:2]), None)
    frames = [m for m in model.modules() if hasattr(m, "_get_feature_vector_attention_mask")]
    if found is None and frames and out.ndim == 3 and "attention_mask" in batch:
        mask = batch["attention_mask"].to(out.device)
        found = frames[0]._get_feature_vector_attention_mask(out.shape[1], mask)
    return None if found is None or found.shape != out.shape[:2] else found.to(out.device).bool()


def pooled(out: Tensor, rows: Tensor | None) -> Tensor:
    """The mean over all tokens that are not padding, (b, hidden)."""
    if out.ndim == 2:
        return out
    if rows is None:
        return out.flatten(1, -2).mean(1)
    weight = rows.to(out).unsqueeze(-1)
    return (out * weight).sum(1) / weight.sum(1)


def _divergence(out: Tensor, truth: Tensor, rows: Tensor | None) -> Tensor:
    keep = ... if rows is None else rows
    p, q = truth[keep].log_softmax(-1), out[keep].log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


class Piece(NamedTuple):
    """A piece of a text that has been read: how many tokens there were by then, the losses of its tokens, the cache."""

    read: int
    losses: Tensor
    seconds: float
    cache: Any

    def snapshot(self) -> Any:
        """The cache as it is now; reading on leaves it alone."""
        return capture.snapshot(self.cache)


@torch.no_grad()
def pieces(model: Any, ids: Tensor, stops: Sequence[int] = ()) -> Iterator[Piece]:
    """Read ids (1, n) as generation would, piece by piece through a cache, with a pause at every stop."""
    from transformers import DynamicCache

    cache, last = DynamicCache(config=model.config), None
    ids = ids.to(next(model.parameters()).device)
    n = ids.shape[1]
    ends = sorted({*range(PIECE, n, PIECE), *(stop for stop in stops if 0 < stop < n), n})
    for start, end in zip([0, *ends], ends, strict=False):
        began = time.perf_counter()
        logits = model(ids[:, start:end], past_key_values=cache, use_cache=True).logits[0].float()
        seconds = time.perf_counter() - began
        rows = logits if last is None else torch.cat([last, logits])
        losses = _next_losses(rows[:-1], ids[:, max(start - 1, 0) : end])
        last = logits[-1:]
        yield Piece(end, losses.cpu(), seconds, cache)


@dataclass
class Reading:
    """One long text read in pieces: the loss of every next token, what it took, and what the cache held at the end."""

    losses: Tensor
    prefill_seconds: float
    step_seconds: float
    cache_bytes: int


@torch.no_grad()
def read(model: Any, ids: Tensor) -> Reading:
    """Read ids (1, n) piece by piece, the last tokens one at a time."""
    from bochner.hf.cache import cache_bytes

    n = ids.shape[1]
    found = list(pieces(model, ids, range(n - STEPS, n)))
    prefill, step = sum(p.seconds for p in found[:-STEPS]), min(p.seconds for p in found[-STEPS:])
    return Reading(torch.cat([p.losses for p in found]), prefill, step, cache_bytes(found[-1].cache))


def compare_readings(texts: Sequence[Text], before: Sequence[Reading], after: Sequence[Reading]) -> Quality:
    """Quality over whole texts, of their original and their converted reading."""
    parts = [[text.split(r.losses) for text, r in zip(texts, rs, strict=True)] for rs in (before, after)]
    (body, again), (new_body, new_again) = (map(torch.cat, zip(*part, strict=True)) for part in parts)
    first = sum(text.first(r.losses) for text, r in zip(texts, before, strict=True)) / len(texts)
    held = again.mean().item()
    rise = (new_body - body).mean().item()
    return language_quality(rise, first - held, held, new_again.mean().item())
