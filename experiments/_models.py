"""Pretrained models as experiments look at them: texts as inputs, and the queries, keys and values of every layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bochner import FeatureMap, data, exact_attention, feature_map, linear_attention
from bochner.maps.landmark import LandmarkFeatures
from bochner.maps.landmark_fit import Near

Inputs = dict[str, Tensor]
NOTHING_EXACT = Near()


class Heads(NamedTuple):
    """One layer on one text: queries (h, n, d), keys and values (g, n, d), and the factor of their products."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float


def tokenised(tokenizer: Any, texts: list[str], tokens: int) -> list[Inputs]:
    """The first tokens of each text, as a model takes them."""
    return [dict(tokenizer(text, return_tensors="pt", truncation=True, max_length=tokens)) for text in texts]


@torch.no_grad()
def embed(model: Any, tokenizer: Any, texts: list[str], *, max_length: int = 256, batch_size: int = 8) -> Tensor:
    """Mean-pooled, normalised embeddings (texts, hidden)."""
    from bochner.hf.evaluate import pooled
    from bochner.hf.inputs import batches

    found = []
    for batch in batches(list(texts), tokenizer, model=model, max_length=max_length, batch_size=batch_size):
        batch = {k: v.to(model.device) for k, v in batch.items()}
        hidden = model(**batch).last_hidden_state.float()
        found.append(torch.nn.functional.normalize(pooled(hidden, batch["attention_mask"].bool()), dim=-1))
    return torch.cat(found)


def heads_of(model: Any, inputs: Inputs) -> list[Heads]:
    """What every attention layer of a transformers model multiplies on one text, after rotations and norms."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    found: list[Heads] = []

    def look(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **rest: Any) -> Any:
        scale = rest.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        found.append(Heads(query[0], key[0], value[0], scale))
        return sdpa_attention_forward(module, query, key, value, mask, **rest)

    before = model.config._attn_implementation
    AttentionInterface.register("sdpa_and_look", look)
    try:
        model.set_attn_implementation("sdpa_and_look")
        with torch.no_grad():
            model(**inputs)
    finally:
        model.set_attn_implementation(before)
    return found


# The heads of a model as maps are fitted to and measured on: for every layer, scaled q, k and v of every text.
Sequences = list[tuple[Tensor, Tensor, Tensor]]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def layers_of(model: Any, inputs: list[Inputs], layers: int = 0) -> list[Sequences]:
    """Of some layers, spread evenly, or of all: queries and keys with the scale in them, and values, as
    half-precision tensors."""
    found: list[Sequences] = []
    for one in inputs:
        for i, (q, k, v, scale) in enumerate(heads_of(model, one)):
            if i == len(found):
                found.append([])
            found[i].append((*((t * scale**0.5).half() for t in (q, k)), v.half()))
    step = max(1, len(found) // layers) if layers else 1
    return found[step // 2 :: step][: layers or len(found)]


def of_books(load: Callable[[], tuple[Any, Any]], words: int, tokens: int, texts: tuple[int, int]) -> Any:
    """A model with texts of some authors to calibrate on and of others to measure on."""

    def read() -> tuple[Any, list[Inputs], list[Inputs]]:
        model, tokenizer = load()
        splits = zip(("calibration", "heldout"), texts, strict=True)
        seen, unseen = (tokenised(tokenizer, data.paragraphs(s, n, words=words), tokens) for s, n in splits)
        return model, seen, unseen

    return read


def calibrated(name: str, m: int, seen: Sequences, near: Near, seed: int, **options: Any) -> FeatureMap:
    """A map of one layer, fitted to some texts and to what it stands beside."""
    g, _, d = seen[0][1].shape
    phi = feature_map(name, dim=d, num_features=m, num_heads=g, seed=seed, **options)
    q, k, v = ([s[i].float() for s in seen] for i in range(3))
    fits_pairs = isinstance(phi, LandmarkFeatures)
    fitted: FeatureMap = phi.calibrate_(q, k, v, **near._asdict()) if fits_pairs else phi.calibrate_(q, k)
    return fitted


def through(phi: FeatureMap, near: Near = NOTHING_EXACT) -> Attention:
    return lambda q, k, v: linear_attention(q, k, v, phi, scale=1.0, diagnostics=False, **near._asdict())


def exact_within(near: Near) -> Attention:
    """A window and sinks with nothing beside them."""
    return lambda q, k, v: exact_attention(q, k, v, scale=1.0, **near._asdict())


def average(is_causal: bool = False) -> Attention:
    """The mean of the values that a row sees."""
    return lambda q, k, v: exact_attention(0 * q, k, v, scale=1.0, is_causal=is_causal)


@torch.no_grad()
def head_errors(attention: Attention, sequences: Sequences, is_causal: bool = False) -> Tensor:
    """Relative error of the attention output of each query head, over all texts."""
    wrong, size = torch.zeros(()), torch.zeros(())
    for q, k, v in ((t[None].float() for t in s) for s in sequences):
        exact = exact_attention(q, k, v, scale=1.0, is_causal=is_causal)[0]
        wrong = wrong + (attention(q, k, v)[0] - exact).square().sum((1, 2))
        size = size + exact.square().sum((1, 2))
    return (wrong / size).sqrt()


def mean_error(attentions: Iterable[Attention], layers: list[Sequences], is_causal: bool = False) -> float:
    """The mean over the heads of all layers, each with its own attention."""
    each = zip(attentions, layers, strict=False)
    return float(torch.cat([head_errors(a, unseen, is_causal) for a, unseen in each]).mean())


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any, texts: list[str], *, max_length: int = 512) -> float:
    """exp of the mean loss per predicted token, each text on its own."""
    total, count = 0.0, 0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=max_length).input_ids.to(model.device)
        loss = token_losses(model, ids)
        total, count = total + loss.sum().item(), count + loss.numel()
    return math.exp(total / count)


@torch.no_grad()
def recall(model: Any, tokenizer: Any, texts: list[str], *, tokens: int = 120) -> float:
    """Perplexity on the repeat of a passage: the first text, another one, the first again.

    Low only if attention can still reach back over the passage in between; exact attention of a good model is near 1.
    Texts are taken in pairs; each must have at least `tokens` tokens.
    """
    ids = [tokenizer(t, return_tensors="pt").input_ids[:, :tokens] for t in texts]
    total, count = 0.0, 0
    for a, b in zip(ids[::2], ids[1::2], strict=False):
        loss = token_losses(model, torch.cat([a, b, a], dim=1).to(model.device))[:, -(tokens - 1) :]
        total, count = total + loss.sum().item(), count + loss.numel()
    return math.exp(total / count)


def token_losses(model: Any, ids: Tensor) -> Tensor:
    """Cross-entropy of every next token, (b, n - 1)."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
