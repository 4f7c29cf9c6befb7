"""How good a conversion is, on other data than it was calibrated on: embeddings, perplexity and recall."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bochner._checks import BochnerError
from bochner.hf.capture import batches


@torch.no_grad()
def embed(model: Any, tokenizer: Any, texts: Sequence[str], *, max_length: int = 256, batch_size: int = 8) -> Tensor:
    """Mean-pooled, normalised embeddings (texts, hidden)."""
    found = []
    for batch in batches(list(texts), tokenizer, max_length=max_length, batch_size=batch_size):
        batch = {k: v.to(model.device) for k, v in batch.items()}
        hidden = model(**batch).last_hidden_state.float()
        weight = batch["attention_mask"].unsqueeze(-1).float()
        found.append(torch.nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1))
    return torch.cat(found)


class EmbeddingQuality(NamedTuple):
    """Converted against original embeddings of the same texts."""

    cosine: float  # mean cosine of each text with itself
    rank_correlation: float  # Spearman correlation of all pairwise similarities
    retrieval: float  # how often the nearest other text is the same


def compare_embeddings(original: Tensor, converted: Tensor) -> EmbeddingQuality:
    """The three figures that say whether the converted encoder can replace the original one."""
    if original.shape != converted.shape or len(original) < 3:
        raise BochnerError(
            f"Compare embeddings of the same texts, at least 3, got {tuple(original.shape)}, {tuple(converted.shape)}."
        )
    a, b = original @ original.mT, converted @ converted.mT
    i, j = torch.triu_indices(len(a), len(a), offset=1)
    x, y = (t[i, j].argsort().argsort().double() for t in (a, b))
    rank = torch.corrcoef(torch.stack([x, y]))[0, 1].item()
    eye = torch.eye(len(a), dtype=torch.bool)
    nearest = [t.masked_fill(eye, -2).argmax(-1) for t in (a, b)]
    agree = (nearest[0] == nearest[1]).float().mean().item()
    return EmbeddingQuality((original * converted).sum(-1).mean().item(), rank, agree)


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any, texts: Sequence[str], *, max_length: int = 512) -> float:
    """exp of the mean loss per predicted token, each text on its own."""
    total, count = 0.0, 0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=max_length).input_ids.to(model.device)
        loss = token_losses(model, ids)
        total, count = total + loss.sum().item(), count + loss.numel()
    return math.exp(total / count)


@torch.no_grad()
def recall(model: Any, tokenizer: Any, texts: Sequence[str], *, tokens: int = 120) -> float:
    """Perplexity on the repeat of a passage: the first text, another one, the first again.

    Low only if attention can still reach back over the passage in between; exact attention of a good model is near 1.
    Texts are taken in pairs; each must have at least `tokens` tokens.
    """
    ids = [tokenizer(t, return_tensors="pt").input_ids[:, :tokens] for t in texts]
    if len(ids) < 2 or any(x.shape[1] < tokens for x in ids):
        raise BochnerError(f"recall needs at least two texts of {tokens} tokens; give longer ones.")
    total, count = 0.0, 0
    for a, b in zip(ids[::2], ids[1::2], strict=False):
        loss = token_losses(model, torch.cat([a, b, a], dim=1).to(model.device))[:, -(tokens - 1) :]
        total, count = total + loss.sum().item(), count + loss.numel()
    return math.exp(total / count)


def token_losses(model: Any, ids: Tensor) -> Tensor:
    """Cross-entropy of every next token, (b, n - 1)."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
