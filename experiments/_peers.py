"""Caches compressed by kvpress, on the texts of `decoder_peers`, in an environment of its own: JSON in, JSON out.

    python _peers.py ASKED.json FOUND.json     goes on where it was stopped

kvpress compresses a cache once, when a text has been read. What it chooses does not change what is computed while the
text is read, so all methods and ratios share one reading: their hooks are called on what the layers were called with.
KVzip evicts other tokens from each head. kvpress then writes keys into the cache that one query takes for none, which
fails for many queries at once; here these tokens are masked, which is what the keys stand for. `checks` compares all of
this with kvpress's own way and with the plain model, and asks whether later tokens change earlier losses.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

SCORED, ZIPPED = {"SnapKV": "SnapKVPress", "Expected Attention": "ExpectedAttentionPress"}, "KVzip"
WHOLE = "whole cache there"


@torch.no_grad()
def next_losses(model: Any, cache: Any, ids: Tensor, seen: int) -> Tensor:
    """Losses of the second and later tokens of ids (b, n), behind a cache that has read so many tokens."""
    positions = torch.arange(seen, seen + ids.shape[1])[None]  # a compressed cache no longer knows them
    logits = model(ids, past_key_values=cache, position_ids=positions).logits[:, :-1].float()
    return F.cross_entropy(logits.mT, ids[:, 1:], reduction="none")


def behind(model: Any, cache: Any, text: dict[str, Any], lead: int) -> dict[str, Any]:
    """Perplexity of the tokens that follow a text, and of passages of it that come again, each alone.

    The first `lead` tokens of a passage only tell which it is. The cache is changed.
    """
    seen, row = len(text["prefix"]), dict[str, Any](recall={})
    for back, passages in text["again"].items():
        again, copied = torch.tensor(passages), copy.deepcopy(cache)
        copied.batch_repeat_interleave(len(again))
        row["recall"][back] = next_losses(model, copied, again, seen)[:, lead - 1 :].mean().exp().item()
    row["perplexity"] = next_losses(model, cache, torch.tensor([text["tail"]]), seen).mean().exp().item()
    return row


def elements(cache: Any) -> int:
    return sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)


# Eviction by head.


def masking(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Attention that does not see the tokens (key heads, n) which `module.evicted` names."""

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any) -> Any:
        evicted = getattr(module, "evicted", None)
        if evicted is not None:
            if attention_mask is None and query.shape[2] > 1:
                raise ValueError("Without a mask later tokens would be seen.")
            seen = F.pad(~evicted, (0, key.shape[2] - evicted.shape[1]), value=True)
            seen = seen.repeat_interleave(query.shape[1] // key.shape[1], 0)[None, :, None]
            attention_mask = seen if attention_mask is None else attention_mask & seen
        return attend(module, query, key, value, attention_mask, **more)

    return attention


@contextmanager
def evicting(model: Any, evicted: Sequence[Tensor]) -> Iterator[None]:
    layers = [layer.self_attn for layer in model.model.layers]
    try:
        for layer, mask in zip(layers, evicted, strict=True):
            layer.evicted = mask
        yield
    finally:
        for layer in layers:
            layer.evicted = None


# Reading and compressing.


def patched() -> Any:
    """kvpress, its attention able to mask by head."""
    import kvpress
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if "masking" not in ALL_ATTENTION_FUNCTIONS["sdpa"].__qualname__:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = masking(ALL_ATTENTION_FUNCTIONS["sdpa"])
    return kvpress


def without_template(model: Any, directory: str, folder: Path) -> None:
    """Let KVzip read its tokenizer without a chat template: it would take the start of a plain text for one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    model.config.name_or_path = str(folder)


@torch.no_grad()
def read(model: Any, ids: Tensor, ratios: Sequence[float]) -> tuple[Any, list[Any], dict[float, list[Tensor]]]:
    """The whole cache behind ids (1, n), what its layers were called with, and what KVzip evicts at each ratio."""
    from transformers import DynamicCache

    class Zip(patched().KVzipPress):  # type: ignore[misc]
        def compress_post(self, model: Any) -> None:
            shape = self.score_val.shape[-2:]
            for ratio in ratios:
                self.compression_ratio = ratio
                super().compress_post(model)
                evicted[ratio] = []
                for layer in (layer.self_attn for layer in model.model.layers):
                    mask = torch.zeros(shape, dtype=torch.bool)
                    mask[layer.masked_key_indices[1], layer.masked_key_indices[2]] = True
                    evicted[ratio].append(mask)
                    layer.masked_key_indices = None  # masked by `evicting`

    def note(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        calls.append((module, kwargs, output))

    cache, calls, evicted = DynamicCache(config=model.config), list[Any](), dict[float, list[Tensor]]()
    with Zip(compression_ratio=max(ratios, default=0.0))(model):
        hooks = [layer.self_attn.register_forward_hook(note, with_kwargs=True) for layer in model.model.layers]
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        for hook in hooks:
            hook.remove()
    return cache, calls, evicted


@torch.no_grad()
def compressed(model: Any, cache: Any, calls: list[Any], method: str, ratio: float) -> Any:
    """A copy of the cache as a method that scores tokens leaves it."""
    press = getattr(patched(), SCORED[method])(compression_ratio=ratio)
    press.post_init_from_model(model)
    copied = copy.deepcopy(cache)
    for module, kwargs, output in calls:
        module.rotary_emb = model.model.rotary_emb
        press.forward_hook(module, [], {**kwargs, "past_key_values": copied}, output)
    return copied


def rows(
    model: Any, text: dict[str, Any], asked: dict[str, Any], found: dict[str, Any], keep: Callable[[], None]
) -> None:
    """Fill the figures of one text: one row for each method and ratio, and one for the whole cache."""
    wanted = {f"{method} {ratio:g}": (method, ratio) for method, ratios in asked["ratios"].items() for ratio in ratios}
    missing = {name: pair for name, pair in {WHOLE: ("", 0.0), **wanted}.items() if name not in found}
    if not missing:
        return
    zips = [ratio for method, ratio in missing.values() if method == ZIPPED]
    cache, calls, evicted = read(model, torch.tensor([text["prefix"]]), zips)
    total = elements(cache)
    for name, (method, ratio) in missing.items():
        held = compressed(model, cache, calls, method, ratio) if method in SCORED else copy.deepcopy(cache)
        masks = evicted[ratio] if method == ZIPPED else [None] * len(calls)
        tensors = elements(held) / total
        kept = 1 - torch.stack(masks).float().mean().item() if method == ZIPPED else tensors
        with evicting(model, masks):
            found[name] = {**behind(model, held, text, asked["lead"]), "held": kept, "tensors": tensors}
        keep()


# Checks.


def apart(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@torch.no_grad()
def checks(model: Any, ids: Tensor, split: int) -> dict[str, float]:
    """Largest differences that must vanish, on ids (1, n) of which the first `split` are compressed; and one that not.

    Each loss without compression is the plain model's; tokens changed behind the middle of the rest change no loss
    before them, with half of the cache; the shared reading gives the caches that kvpress's own gives; and KVzip's
    masks give the next token what its made-up keys give.
    """
    from transformers import DynamicCache

    kvpress, prefix, tail = patched(), ids[:, :split], ids[:, split:]
    plain = F.cross_entropy(model(ids).logits[:, :-1].float().mT, ids[:, 1:], reduction="none")[:, split:]
    middle, other = tail.shape[1] // 2, tail.clone()
    other[:, middle:] = (other[:, middle:] + 7) % model.config.vocab_size
    cache, calls, evicted = read(model, prefix, [0.5])
    found = {"without compression": 0.0, "later tokens": 0.0, "kvpress's caches": 0.0}

    def losses(method: str, ratio: float, tokens: Tensor) -> Tensor:
        held = compressed(model, cache, calls, method, ratio) if method in SCORED else copy.deepcopy(cache)
        masks = evicted[0.5] if method == ZIPPED and ratio else [torch.zeros(1, split, dtype=torch.bool)] * len(calls)
        if method == ZIPPED and not ratio:
            masks = [torch.zeros_like(mask) for mask in evicted[0.5]]
        with evicting(model, masks if method == ZIPPED else [None] * len(calls)):
            return next_losses(model, held, tokens, split)

    for method in (*SCORED, ZIPPED):
        half = losses(method, 0.5, tail)
        found["without compression"] = max(found["without compression"], apart(losses(method, 0.0, tail), plain))
        later = apart(losses(method, 0.5, other)[:, : middle - 1], half[:, : middle - 1])
        found["later tokens"] = max(found["later tokens"], later)
        found[f"{method} compresses"] = apart(half, plain)
    for method, press in SCORED.items():
        theirs = DynamicCache(config=model.config)
        with getattr(kvpress, press)(compression_ratio=0.5)(model):
            model(input_ids=prefix, past_key_values=theirs)
        ours = compressed(model, cache, calls, method, 0.5)
        pairs = zip(ours.layers, theirs.layers, strict=True)
        found["kvpress's caches"] = max(found["kvpress's caches"], *(apart(a.keys, b.keys) for a, b in pairs))
    theirs, positions = DynamicCache(config=model.config), torch.tensor([[split]])
    with kvpress.KVzipPress(compression_ratio=0.5)(model):
        model(input_ids=prefix, past_key_values=theirs)
    made_up = model(tail[:, :1], past_key_values=theirs, position_ids=positions).logits
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    with evicting(model, evicted[0.5]):
        masked = model(tail[:, :1], past_key_values=copy.deepcopy(cache), position_ids=positions).logits
    found["made-up keys"] = apart(made_up.log_softmax(-1), masked.log_softmax(-1))
    return found


def main(asked_path: str, found_path: str) -> None:
    from transformers import AutoModelForCausalLM

    asked, path = json.loads(Path(asked_path).read_text(encoding="utf-8")), Path(found_path)
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def keep() -> None:
        part = path.with_suffix(".writing")
        part.write_text(json.dumps(found, indent=1), encoding="utf-8")
        os.replace(part, path)

    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as folder:
        without_template(model, asked["model"], Path(folder))
        if "checks" not in found:
            found["checks"] = checks(model, torch.tensor([asked["check"]]), 2 * len(asked["check"]) // 3)
            keep()
        for name, text in asked["texts"].items():
            rows(model, text, asked, found.setdefault(name, {}), keep)


if __name__ == "__main__":
    main(*sys.argv[1:])
