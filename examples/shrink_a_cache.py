"""Shrink the cache of a decoder to a tenth: what the search says, the bytes, and a continued text.

    python examples/shrink_a_cache.py [DIRECTORY]

DIRECTORY holds a decoder that transformers can load; without one a small random model shows what is printed.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import bochner


def load(directory: str | None):
    if directory is not None:
        return AutoModelForCausalLM.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(bochner.data.fetch("minilm"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(tokenizer))).eval(), tokenizer


def main(directory: str | None = None) -> float:
    model, tokenizer = load(directory)
    texts = bochner.data.paragraphs("calibration", 4, words=1500)  # better: texts of the kind that you will read
    target = bochner.Target(memory=0.1, length=1000)  # the length that your texts have
    conversion = bochner.convert(model, target, bochner.Calibration(texts, tokenizer), progress=True)

    for length in (1000, 4000, 16000):  # beyond the target's length the cache grows no more
        before = conversion.plan.cache_bytes(length, converted=False)
        after = conversion.plan.cache_bytes(length)
        print(f"{length:6,} tokens: {before / 1e6:7.1f} MB before, {after / 1e6:7.1f} MB after ({after / before:.0%})")

    inputs = tokenizer(texts[0], return_tensors="pt", truncation=True, max_length=200)
    inputs.pop("token_type_ids", None)
    tokens = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    print("continued:", tokenizer.decode(tokens[0, -20:]))
    return after / before


if __name__ == "__main__":
    main(*sys.argv[1:2])
