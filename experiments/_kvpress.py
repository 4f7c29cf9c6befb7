"""The same three texts with kvpress, which needs an older transformers and so an environment of its own.

    python experiments/_kvpress.py texts.pt MODEL      (texts.pt: `{name: tokens (1, 4400)}`, saved by torch)

A press compresses once, behind a text of 4,000 tokens. What it loses is measured on the next 400 tokens, and on
passages that come again as in `decoder_texts.py`. Bytes are those of the tensors in the cache, as bfloat16. Presses
that leave each head another number of keys free nothing: they hide keys in place, and `keys_used` says how many stay.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from kvpress import ExpectedAttentionPress, KVzipPress, SnapKVPress
from transformers import AutoModelForCausalLM, DynamicCache

LENGTH, NEXT, PASSAGE, LEAD, PASSAGES, BACK = 4000, 400, 96, 8, 6, (500, 2000, 3500)
OUT = Path(__file__).with_suffix(".json")
PRESSES: dict[str, Any] = {
    "exact": None,
    "SnapKV": lambda: SnapKVPress(compression_ratio=0.88),
    "Expected Attention": lambda: ExpectedAttentionPress(compression_ratio=0.88),
    "KVzip": lambda: KVzipPress(compression_ratio=0.88),
}


def behind(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Losses of tokens behind a copy of a cache, but for the first."""
    place = torch.arange(LENGTH, LENGTH + ids.shape[1])
    copied = copy.deepcopy(cache)
    logits = model(ids, past_key_values=copied, position_ids=place[None], cache_position=place).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits.float(), ids[0, 1:], reduction="none")


@torch.no_grad()
def figures(model: Any, press: Any, ids: torch.Tensor) -> dict[str, Any]:
    layers = [module for module in model.modules() if hasattr(module, "masked_key_indices")]
    for layer in layers:
        layer.masked_key_indices = None
    cache = DynamicCache()
    if press is None:
        model.model(input_ids=ids[:, :LENGTH], past_key_values=cache)
    else:
        with press()(model):
            model.model(input_ids=ids[:, :LENGTH], past_key_values=cache)
    layers = [module for module in model.modules() if getattr(module, "masked_key_indices", None) is not None]
    hidden = sum(len(layer.masked_key_indices[0]) for layer in layers)
    keys = sum(math.prod(layer.keys.shape[:3]) for layer in cache.layers)
    row: dict[str, Any] = {
        "bytes_bfloat16": 2 * sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers),
        "keys_used": 1 - hidden / keys,
        "next": behind(model, cache, ids[:, LENGTH : LENGTH + NEXT]).mean().item(),
        "recall": {},
    }
    for back in BACK:
        start = LENGTH - back - PASSAGES // 2 * PASSAGE
        passages = ids[:, start : start + PASSAGES * PASSAGE].split(PASSAGE, dim=1)
        losses = torch.cat([behind(model, cache, passage)[LEAD - 1 :] for passage in passages])
        row["recall"][str(back)] = math.exp(losses.mean().item())
    return row


if __name__ == "__main__":
    texts, path = torch.load(sys.argv[1]), sys.argv[2]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    rows: dict[str, Any] = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
    for name, press in PRESSES.items():
        for kind, ids in texts.items():
            if name not in rows.setdefault(kind, {}):
                rows[kind][name] = figures(model, press, ids)
                print(name, kind, rows[kind][name], flush=True)
                OUT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
