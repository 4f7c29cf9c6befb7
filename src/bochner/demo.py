"""The demonstration: a real pretrained model with linear attention, and how good the result is."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from bochner import data
from bochner._timing import best_times
from bochner.attention import linear_attention
from bochner.hf.cache import cache_bytes
from bochner.hf.capture import batches
from bochner.hf.convert import convert, relative_errors, revert
from bochner.hf.distill import distill
from bochner.hf.io import plan_of
from bochner.hf.measure import compare_embeddings, embed, perplexity, recall
from bochner.maps import feature_map
from bochner.report import Report, show

Say = Callable[[str], None]
TOKENS = 150  # of a held-out paragraph
NEAR: dict[str, Any] = {"window": 32, "sinks": 1}
ENCODER_RECIPES: dict[str, dict[str, Any]] = {
    "plain FAVOR+ m=256": {"feature_map": "positive", "num_features": 256},
    "calibrated m=128": {"feature_map": "calibrated", "num_features": 128},
    "landmark m=128": {"feature_map": "landmark", "num_features": 128},
    "window 32 + sink, no kernel": {"feature_map": None, **NEAR},
    "window 32 + sink + calibrated m=128": {"feature_map": "calibrated", "num_features": 128, **NEAR},
    "window 32 + sink + landmark m=64": {"feature_map": "landmark", "num_features": 64, **NEAR},
    # These two heads look for the same word elsewhere in the text, which no map of low rank can do.
    "the same, 2 of 72 heads exact": {
        "feature_map": "landmark",
        "num_features": 64,
        "exact_heads": [(1, 1), (2, 9)],
        **NEAR,
    },
}
DECODER_RECIPES: dict[str, dict[str, Any]] = {
    "plain FAVOR+ m=128": {"feature_map": "positive", "num_features": 128},
    "window 64 + 4 sinks, no exact head": {"feature_map": None, "window": 64, "sinks": 4},
    "window 64 + 4 sinks, 10 % exact heads": {"feature_map": None, "window": 64, "sinks": 4, "exact_heads": 0.1},
    "window 128 + 4 sinks, 10 % exact heads": {"feature_map": None, "window": 128, "sinks": 4, "exact_heads": 0.1},
}
PROMPT = "Write three sentences about the sea.\n"


def encoder(say: Say, *, texts: int = 32, steps: int = 30, quick: bool = False) -> tuple[list[list[Any]], Report]:
    """MiniLM under some recipes and after distillation: the rows of the table, and the report."""
    say("loading all-MiniLM-L6-v2")
    model, tokenizer = load_minilm()
    calibration = data.paragraphs("calibration", 16 if quick else 64)
    held = data.paragraphs("heldout", 8 if quick else texts)
    check = batches(held[:8], tokenizer, max_length=TOKENS, batch_size=4)
    original = embed(model, tokenizer, held, max_length=TOKENS)
    rows: list[list[Any]] = []
    layers: dict[str, list[float]] = {}

    def measure(name: str, seconds: float) -> None:
        quality = compare_embeddings(original, embed(model, tokenizer, held, max_length=TOKENS))
        layers[name] = [e.mean().item() for e in relative_errors(model, check).values()]
        error = sum(layers[name]) / len(layers[name])
        rows.append([name, error, quality.cosine, quality.rank_correlation, quality.retrieval, seconds])
        say(f"{name}: error {error:.3f}, cosine {quality.cosine:.3f}, rank {quality.rank_correlation:.3f}")

    last = list(ENCODER_RECIPES)[-1]
    for name, recipe in ENCODER_RECIPES.items():
        say(f"converting: {name}")
        start = time.monotonic()
        recipe = {"calibration": calibration[:48], "max_length": TOKENS, "select": False, "exact_below": 0, **recipe}
        convert(model, tokenizer=tokenizer, **recipe)
        measure(name, time.monotonic() - start)
        if name != last:
            revert(model)
    say("distilling, layer by layer and then end to end")
    start = time.monotonic()
    transfer = distill(
        model,
        calibration,
        tokenizer=tokenizer,
        max_length=TOKENS,
        steps=5 if quick else steps,
        end_to_end=5 if quick else 2 * steps,
        batch_size=4,
        seconds=120,
        progress=False,
    )
    measure("the same, distilled", time.monotonic() - start)
    plan = plan_of(model)
    say("timing attention against length")
    times = attention_times(12, 32, [256, 512, 1024] if quick else [512, 1024, 2048, 4096])
    page = Report("all-MiniLM-L6-v2 with linear attention")
    page.text(
        f"Every attention layer replaced, calibrated on {len(calibration)} passages, measured on {len(held)} passages "
        f"of about {TOKENS} tokens by other authors. Nothing measured was calibrated on."
    )
    page.table(["recipe", "error of attention", "cosine", "rank correlation", "same neighbour", "seconds"], rows)
    page.text(
        "Error: relative, of the attention outputs, mean over 72 heads. Cosine: of each embedding with the original "
        "one. Rank correlation: of all pairwise similarities. Same neighbour: how often the nearest other passage is "
        "the same. Seconds: to convert, or to distill.",
        note=True,
    )
    page.heading("Error, layer by layer")
    page.chart(
        "relative error of the attention output",
        {name: list(enumerate(values)) for name, values in layers.items()},
        x_label="layer",
    )
    page.heading("Speed against length")
    page.chart(
        "one attention layer, seconds",
        {k: [(n, t[k]) for n, t in times.items()] for k in next(iter(times.values()))},
        x_label="tokens",
        y_label="seconds",
        log=True,
    )
    page.table(["tokens", *next(iter(times.values()))], [[n, *t.values()] for n, t in times.items()])
    page.text("Exact attention is faster below the crossing of the lines: use it there.", note=True)
    page.heading("Memory against length")
    lengths = [512, 4096, 32768]
    page.table(
        ["tokens", "keys and values, MB", "converted, MB"],
        [[n, plan.cache_bytes(n, converted=False) / 1e6, plan.cache_bytes(n) / 1e6] for n in lengths],
    )
    page.text("What a state would hold for one sequence, all layers; computed from the plan.", note=True)
    page.heading("Distillation").code(str(transfer)).heading("The plan").code(str(plan))
    return rows, page


@torch.no_grad()
def attention_times(heads: int, dim: int, lengths: list[int]) -> dict[int, dict[str, float]]:
    """Seconds of one attention layer at each length, the best of three interleaved runs."""
    g = torch.Generator().manual_seed(0)
    phi = feature_map("calibrated", dim=dim, num_features=128, num_heads=heads)
    found = {}
    for n in lengths:
        q, k, v = (torch.randn(1, heads, n, dim, generator=g) for _ in range(3))
        runs = {
            "exact": partial(scaled_dot_product_attention, q, k, v),
            "calibrated": partial(linear_attention, q, k, v, phi),
            "window + calibrated": partial(linear_attention, q, k, v, phi, **NEAR),
        }
        found[n] = best_times(runs, repeats=3, warm_up=False)
    return found


def decoder(say: Say, *, texts: int = 6, quick: bool = False) -> tuple[list[list[Any]], Report]:
    """SmolLM2 under three recipes: perplexity, recall, memory, and what it writes."""
    say("loading SmolLM2-135M-Instruct (the first time its weights are unpacked, about a minute)")
    model, tokenizer = load_smollm2()
    texts = 2 if quick else texts
    ordinary = data.paragraphs("heldout", texts)
    pairs = data.paragraphs("heldout", texts + 1, words=130)[1:]
    calibration = data.paragraphs("calibration", 4 if quick else 6, words=250)
    exact = perplexity(model, tokenizer, ordinary, max_length=TOKENS), recall(model, tokenizer, pairs)
    rows: list[list[Any]] = [["as it is", 1.0, exact[1], 1.0, 0.0]]
    say(f"as it is: perplexity {exact[0]:.1f}, recall {exact[1]:.2f}")
    page = Report("SmolLM2-135M-Instruct with linear attention")
    written = [("as it is", write(model, tokenizer))]
    for name, recipe in DECODER_RECIPES.items():
        say(f"converting: {name}")
        start = time.monotonic()
        recipe = {"calibration": calibration, "max_length": 320, "batch_size": 1, "exact_below": 0, **recipe}
        convert(model, tokenizer=tokenizer, **recipe)
        seconds = time.monotonic() - start
        plan = plan_of(model)
        ratio = perplexity(model, tokenizer, ordinary, max_length=TOKENS) / exact[0]
        memory = plan.cache_bytes(4000) / plan.cache_bytes(4000, converted=False)
        rows.append([name, ratio, recall(model, tokenizer, pairs), memory, seconds])
        say(f"{name}: perplexity ratio {ratio:.3f}, recall {rows[-1][2]:.2f}, memory at 4,000 tokens {memory:.3f}")
        written.append((name, write(model, tokenizer)))
        revert(model)
    page.text(f"Perplexity as it is: {exact[0]:.2f} on held-out passages of about {TOKENS} tokens.")
    page.table(["recipe", "perplexity ratio", "recall", "memory at 4,000 tokens", "seconds"], rows)
    page.text(
        "Recall: perplexity on the repeat of a passage after another one; it shows what ordinary perplexity hides.",
        note=True,
    )
    page.heading(f"What it writes after: {PROMPT.strip()}")
    for name, text in written:
        page.text(name, note=True).code(text)
    return rows, page


def write(model: Any, tokenizer: Any, tokens: int = 40) -> str:
    """A greedy continuation of the prompt, as a chat answer."""
    prompt = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    out = model.generate(**ids, max_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(out[0, ids.input_ids.shape[1] :], skip_special_tokens=True))


def decoding_cost(
    model: Any,
    length: int,
    *,
    steps: int = 8,
    prefill: int = 512,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, int]:
    """Seconds per token (the best of some) after `length` tokens of context, and the bytes of the cache."""
    from transformers import DynamicCache

    g = torch.Generator().manual_seed(0)
    ids = torch.randint(10, model.config.vocab_size - 10, (1, length + steps), generator=g)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for start in range(0, length, prefill):
            model(ids[:, start : min(start + prefill, length)], past_key_values=cache, logits_to_keep=1)
        seconds = []
        for i in range(steps):
            before = clock()
            model(ids[:, length + i : length + i + 1], past_key_values=cache)
            seconds.append(clock() - before)
    return min(seconds), cache_bytes(cache)


def run(
    say: Say, out: str | Path, *, model: str = "minilm", quick: bool = False
) -> tuple[list[str], list[list[Any]], Path]:
    """Run one demonstration and write its report; returns the table and the path."""
    if model == "minilm":
        rows, page = encoder(say, quick=quick)
        head = ["recipe", "error", "cosine", "rank correlation", "same neighbour", "seconds"]
    else:
        rows, page = decoder(say, quick=quick)
        head = ["recipe", "perplexity ratio", "recall", "memory at 4,000", "seconds"]
    return head, [[show(c) for c in row] for row in rows], page.save(out)


def load_minilm() -> tuple[Any, Any]:
    """all-MiniLM-L6-v2, a sentence-embedding BERT, and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    path = data.fetch("minilm")
    with quietly():
        return AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)


def load_smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct, a Llama-type decoder, dequantized to float32, and its tokenizer.

    The first call reads the GGUF file (about a minute) and keeps a safetensors copy beside it in the cache.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = data.fetch("smollm2")
    copy = source.parents[1] / "safetensors"
    with quietly():
        if data.damage(copy):
            _dequantize(source, copy)
        return AutoModelForCausalLM.from_pretrained(copy).eval(), AutoTokenizer.from_pretrained(copy)


def _dequantize(source: Path, copy: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    with tempfile.TemporaryDirectory(dir=copy.parent) as tmp:
        model.save_pretrained(tmp)
        tokenizer.save_pretrained(tmp)
        data.seal(Path(tmp))
        shutil.rmtree(copy, ignore_errors=True)
        os.replace(tmp, copy)
        os.mkdir(tmp)  # for the context manager to remove


class quietly:
    """Silence transformers' progress bars and advice for a while."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self.level = logging.get_verbosity()
        self.bars = logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __exit__(self, *exc: object) -> None:
        from transformers.utils import logging

        logging.set_verbosity(self.level)
        if self.bars:
            logging.enable_progress_bar()
