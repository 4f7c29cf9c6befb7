"""How much of a model's quality a changed one retains: their outputs on the same texts, with a confidence interval.

| outputs | measures |
|---|---|
| a language model's | original / converted perplexity; the surviving share of its gain on passages that come again |
| embeddings | cosine; rank correlation of all similarities |
| predicted distributions | divergence |
| scores of rerankers and regressions | rank correlation; squared error |

Quality retained is the least of a model's measures. A language model's depend on the length of the texts: windows that
lose nothing at 500 tokens lose a quarter at 4,000. The model is in evaluation mode meanwhile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from bochner._checks import BochnerError
from bochner.hf import observe
from bochner.hf.observe import evaluation_mode

INTERVAL = 0.9  # the confidence of the intervals that are reported, two-sided
# One-sided confidence of the bound that choices are made by. In 40 searches each by 8 texts the mean fails verification
# in a third of the first choices of MiniLM, this bound in a fifth. What they end with loses half as much, and costs two
# fifths more. With a small decoder nothing is gained (experiments/search_ablation.py).
CAUTION = 0.8
PASSAGE, PASSAGES = 120, 4  # tokens of a passage that comes again, and how many do, from all over the text
REPEATED = 0.25  # the share of a text that they may take
LEAD = 8  # of these tokens only tell which passage it is
STRETCH = 256  # tokens of ordinary text whose mean loss counts as one text
PIECE = 512  # tokens that a long text is read at a time
LEAST_GAIN = 0.3  # nats on a repeated passage: models that gain less do not look it up
STEPS = 4  # tokens at its end that are read and timed one at a time
RANKED, BLOCKS = 4, 32  # texts: fewer have too few similarities to rank; blocks of them that are left out in turn
Batch = dict[str, Any]
Run = Callable[[Batch], Any]


class Measure(NamedTuple):
    """What each text lost by one measure; `is_log`: in nats, else as a share."""

    losses: Tensor
    is_log: bool = False

    def bounds(self, confidence: float) -> tuple[float, float]:
        """Quality at both ends of the two-sided t-interval of the mean loss; equal where there is one text."""
        losses = self.losses.double().nan_to_num(1.0, posinf=1e30)
        mean, n = losses.mean().item(), len(losses)
        half = 0.0
        if n > 1:
            from scipy.stats import t  # here, because it takes longer to import than torch

            half = float(t.ppf((1 + confidence) / 2, n - 1)) * losses.std().item() / math.sqrt(n)
        low, high = (math.exp(-x) if self.is_log else 1 - x for x in (mean + half, mean - half))
        return max(low, 0.0), high


@dataclass
class Quality:
    """The quality that a changed model retains: the least of some measures. `figures`: the same as people know them."""

    measures: dict[str, Measure]
    figures: dict[str, float] = field(default_factory=dict)

    @cached_property
    def retained(self) -> float:
        """1 is all, 0 is nothing."""
        return min(m.bounds(0.0)[0] for m in self.measures.values())

    @cached_property
    def lower(self) -> float:
        """The bound that choices are made by."""
        return self.bounds(2 * CAUTION - 1)[0]

    def bounds(self, confidence: float = INTERVAL) -> tuple[float, float]:
        """The two-sided interval of the quality retained; that of the least measure."""
        ends = [m.bounds(confidence) for m in self.measures.values()]
        return min(low for low, _ in ends), min(high for _, high in ends)

    @property
    def texts(self) -> int:
        """How many texts, or stretches of long ones, tell."""
        return min(len(m.losses) for m in self.measures.values())

    def to_dict(self, confidence: float = INTERVAL) -> dict[str, Any]:
        low, high = self.bounds(confidence)
        found = {"retained": self.retained, "low": low, "high": high, "confidence": confidence}
        measures = {name: {"losses": m.losses.tolist(), "is_log": m.is_log} for name, m in self.measures.items()}
        return {**found, "figures": self.figures, "measures": measures}


def is_language_model(model: Any, shapes: dict[str, Any]) -> bool:
    """Whether it predicts the next token and nothing else."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    causal = all(shape.is_causal and not shape.is_cross for shape in shapes.values())
    return head is not None and causal and not getattr(model.config, "is_encoder_decoder", False)


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
        """The mean over each passage that comes again, without the tokens that only tell which one it is."""
        return again.view(-1, self.passage)[:, self.lead :].mean(-1)

    def first(self, losses: Tensor) -> Tensor:
        """The loss on each passage at first; `losses` are of tokens 1, 2, ..."""
        found = torch.stack([losses[a - 1 : a - 1 + self.passage] for a in self.starts])
        return self.recalled(found.flatten())

    def split(self, losses: Tensor) -> tuple[Tensor, Tensor]:
        """Mean losses of equal stretches of the body, and of the passages that come again."""
        body, again = losses.tensor_split([len(self.body) - 1])
        count = max(1, round(len(body) / STRETCH))
        return torch.stack([part.mean() for part in body.tensor_split(count)]), self.recalled(again)


def language_quality(rise: Tensor, again: Tensor, gain: float, again_before: float) -> Quality:
    """From the rises of the loss on stretches of ordinary text, and on the passages that come again.

    `gain`: what the original gains on these; a model that gains nothing has no recall to lose. `again_before`: its loss
    on them.
    """
    measures = {"perplexity": Measure(rise, True)}
    figures = {"perplexity_ratio": math.exp(min(rise.mean().item(), 700.0))}
    if gain >= LEAST_GAIN and len(again):
        measures["recall"] = Measure(again / gain)
        figures["recall_retained"] = 1 - again.mean().item() / gain
        figures["recall_perplexity"] = math.exp(min(again_before + again.mean().item(), 700.0))
        figures["recall_perplexity_original"] = math.exp(again_before)
    return Quality(measures, figures)


class Outputs:
    """Batches of any other model: the original's outputs, and how far others are from them."""

    def __init__(self, model: Any, batches: Sequence[Batch]) -> None:
        self.batches = list(batches)
        with torch.no_grad(), evaluation_mode(model):
            outputs = [observe.run(model, batch) for batch in self.batches]
        self.kind = kind_of(model, outputs[0])
        self.truth = [main_output(output).float() for output in outputs]
        self.rows = [rows_of(model, batch, t) for batch, t in zip(self.batches, self.truth, strict=True)]

    @torch.no_grad()
    def quality(self, run: Run) -> Quality:
        found = [main_output(run(batch)).float() for batch in self.batches]
        if self.kind == "distributions":
            apart = torch.cat([divergence(*x) for x in zip(found, self.truth, self.rows, strict=True)]).cpu()
            return Quality({"divergence": Measure(apart, True)}, {"divergence": apart.mean().item()})
        a, b = (torch.cat([pooled(*x) for x in zip(ts, self.rows, strict=True)]).cpu() for ts in (self.truth, found))
        return score_quality(a, b) if self.kind == "scores" else embedding_quality(a, b)


def score_quality(truth: Tensor, found: Tensor) -> Quality:
    """Scores (texts, columns) of rerankers and regressions: rank correlation, and error as a share of variance."""
    truth, found = (t.double().nan_to_num(0.0) for t in (truth, found))
    spread = truth.var(0, keepdim=True).clamp_min(1e-12) if len(truth) > 1 else truth.square().clamp_min(1e-12)
    error = Measure(((found - truth).square() / spread).mean(-1))
    columns = list(zip(truth.mT, found.mT, strict=True))

    def order(keep: Tensor) -> float:
        return sum(rank_correlation(x[keep], y[keep]) for x, y in columns) / len(columns)

    return _quality({"error": error} | _ranked(order, len(truth)))


def embedding_quality(truth: Tensor, found: Tensor) -> Quality:
    """Embeddings (texts, hidden): the cosine of each text with itself, and the ranks of all pairwise similarities."""
    a, b = (F.normalize(t, dim=-1) for t in (truth, found))
    cosine = Measure(1 - (a * b).sum(-1))
    return _quality({"cosine": cosine} | _ranked(lambda keep: rank_of_similarities(a[keep], b[keep]), len(a)))


def _ranked(statistic: Callable[[Tensor], float], count: int) -> dict[str, Measure]:
    return {"rank_correlation": Measure(1 - jackknife(statistic, count))} if count >= RANKED else {}


def _quality(measures: dict[str, Measure]) -> Quality:
    """With the means of all measures as its figures: errors as such, the others as what is left."""
    means = {name: m.losses.mean().item() for name, m in measures.items()}
    return Quality(measures, {name: x if name == "error" else 1 - x for name, x in means.items()})


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's; of numbers that are all equal it is 1 to themselves and 0 to anything else."""
    if torch.equal(a, b):
        return 1.0
    if (a == a[0]).all() or (b == b[0]).all():
        return 0.0
    from scipy.stats import spearmanr  # here, because it takes longer to import than torch

    return float(spearmanr(a.numpy(), b.numpy()).statistic)


def rank_of_similarities(a: Tensor, b: Tensor) -> float:
    """The rank correlation of all pairwise similarities of two sets of normalised embeddings."""
    i, j = torch.triu_indices(len(a), len(a), offset=1)
    return rank_correlation((a @ a.mT)[i, j], (b @ b.mT)[i, j])


def jackknife(statistic: Callable[[Tensor], float], count: int) -> Tensor:
    """Numbers whose mean is a statistic of `count` texts and whose spread is that of the statistic, (blocks,).

    `statistic(keep)`: of the texts with these numbers. Blocks of texts are left out in turn. The mean is not corrected
    for bias: that of rank correlations is towards less, and a bound around the corrected one held in half of the cases
    where it should in four fifths (MiniLM, 8 of 24 texts against 12 others).
    """
    blocks = torch.arange(count).tensor_split(min(count, BLOCKS))
    without = [statistic(torch.cat([b for b in blocks if b is not block])) for block in blocks]
    left = torch.tensor(without, dtype=torch.float64)
    return statistic(torch.arange(count)) + (len(blocks) - 1) * (left.mean() - left)


def main_output(output: Any) -> Tensor:
    found: Tensor = output.logits if getattr(output, "logits", None) is not None else output[0]
    return found


def kind_of(model: Any, output: Any) -> str:
    """What an output is: "distributions" of tokens or classes, "scores" of texts, or "embeddings"."""
    logits = getattr(output, "logits", None)
    if getattr(model, "get_output_embeddings", lambda: None)() is not None:
        return "distributions"
    if logits is None:
        return "embeddings"
    regression = getattr(model.config, "problem_type", None) == "regression" or logits.ndim == 1
    return "scores" if regression or (logits.ndim == 2 and logits.shape[-1] == 1) else "distributions"


def rows_of(model: Any, batch: Batch, out: Tensor) -> Tensor | None:
    """Which rows of an output (b, n, ...) are not padding, (b, n) bool; None where nothing is known of them.

    A mask over samples of sound is taken to frames as the model itself does.
    """
    if out.ndim < 3:
        return None
    masks = [batch[name] for name in ("decoder_attention_mask", "attention_mask") if name in batch]
    found = next((mask for mask in masks if mask.shape == out.shape[:2]), None)
    frames = [m for m in model.modules() if hasattr(m, "_get_feature_vector_attention_mask")]
    if found is None and frames and out.ndim == 3 and "attention_mask" in batch:
        mask = batch["attention_mask"].to(out.device)
        found = frames[0]._get_feature_vector_attention_mask(out.shape[1], mask)
    return None if found is None or found.shape != out.shape[:2] else found.to(out.device).bool()


def pooled(out: Tensor, rows: Tensor | None) -> Tensor:
    """The mean over all tokens that are not padding, (b, hidden)."""
    if out.ndim <= 2:
        return out.reshape(len(out), -1)
    if rows is None:
        return out.flatten(1, -2).mean(1)
    weight = rows.to(out).unsqueeze(-1)
    return (out * weight).sum(1) / weight.sum(1)


def divergence(out: Tensor, truth: Tensor, rows: Tensor | None) -> Tensor:
    """Of the predictions (b, ..., classes) from the original's, the mean over the rows of each text, (b,)."""
    p, q = truth.log_softmax(-1), out.log_softmax(-1)
    apart = (p.exp() * (p - q)).sum(-1)
    if rows is not None:
        return (apart * rows).sum(-1) / rows.sum(-1).clamp_min(1)
    return apart.flatten(1).mean(-1) if apart.ndim > 1 else apart


@torch.no_grad()
def pieces(model: Any, ids: Tensor, stops: Sequence[int] = ()) -> Iterator[tuple[Tensor, float, Any]]:
    """Read ids (1, n) as generation would, piece by piece through a cache, with a pause at every stop.

    Of each piece: the losses of its tokens, its seconds, and the cache behind it.
    """
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
        truth = ids[0, max(start, 1) : end].to(rows.device)
        last = logits[-1:]
        yield F.cross_entropy(rows[:-1], truth, reduction="none").cpu(), seconds, cache


@dataclass
class Reading:
    """One long text read in pieces: the loss of every next token; seconds, and the bytes of the cache at the end."""

    losses: Tensor
    costs: dict[str, float]


def read(model: Any, ids: Tensor) -> Reading:
    """Read ids (1, n) piece by piece, the last tokens one at a time."""
    from bochner.hf.cache import cache_bytes

    n = ids.shape[1]
    with evaluation_mode(model):
        losses, seconds, caches = zip(*pieces(model, ids, range(n - STEPS, n)), strict=True)
    costs = {"prefill_seconds": sum(seconds[:-STEPS]), "step_seconds": min(seconds[-STEPS:])}
    return Reading(torch.cat(losses), costs | {"cache_bytes": cache_bytes(caches[-1])})


def compare_readings(texts: Sequence[Text], before: Sequence[Reading], after: Sequence[Reading]) -> Quality:
    """The quality over whole texts, of their original and their converted reading."""
    triples = zip(texts, before, after, strict=True)
    parts = [(*t.split(b.losses - a.losses), t.split(a.losses)[1], t.first(a.losses)) for t, a, b in triples]
    rise, again, repeated, first = (torch.cat(several) for several in zip(*parts, strict=True))
    loss = repeated.mean().item()
    return language_quality(rise, again, first.mean().item() - loss, loss)
