"""The demonstration: a real pretrained model with linear attention, and how good the result is."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bochner import data
from bochner._checks import BochnerWarning
from bochner._progress import quietly
from bochner.hf.cache import cache_bytes
from bochner.hf.config import Calibration, Distillation, Recipe, Target
from bochner.hf.conversion import Conversion, convert, revert
from bochner.hf.distill import distill
from bochner.hf.evaluate import compare_embeddings, embed
from bochner.hf.inputs import batches, positions
from bochner.hf.plan import Plan
from bochner.report import HeadPictures, Number, Report, show
from bochner.report.charts import frontier_chart
from bochner.report.cost import (
    Times,
    add_speed,
    crossing,
    crossing_sentence,
    layer_times,
    positions_sentence,
    typical_layer,
)
from bochner.report.model import head_pictures

Say = Callable[[str], None]
TOKENS, TOKENS_SHOWN = 150, 80  # of a held-out paragraph, of the text shown
CACHE = 0.1  # of a decoder's cache that is left
NEAR: dict[str, Any] = {"window": 32, "sinks": 1}
ENCODER_RECIPES = {
    "plain FAVOR+ m=256": Recipe("positive", 256),
    "calibrated m=128": Recipe("calibrated", 128),
    "landmark m=128": Recipe("landmark", 128),
    "window 32 + sink, no kernel": Recipe(None, **NEAR),
    "window 32 + sink + calibrated m=128": Recipe("calibrated", 128, **NEAR),
    "window 32 + sink + landmark m=64": Recipe("landmark", 64, **NEAR),
    # These two heads look for the same word elsewhere in the text, which no map of low rank can do.
    "the same, 2 of 72 heads exact": Recipe("landmark", 64, exact_heads=[(1, 1), (2, 9)], **NEAR),
}
PASSAGES = (
    "Calibrated on {} passages, measured on {} passages of about {} tokens by other authors; nothing measured was "
    "calibrated on. Error: relative, of the attention outputs, mean over all heads. Rank correlation: of all pairwise "
    "similarities. Same neighbour: how often the nearest other passage is the same. Seconds: to convert, or to distill."
)
IN_PYTHON = """import transformers
import bochner

path = bochner.data.fetch("minilm")  # or the directory of a model of yours
model = transformers.AutoModel.from_pretrained(path)
tokenizer = transformers.AutoTokenizer.from_pretrained(path)
texts = bochner.data.paragraphs("calibration", 16)  # or text of yours
recipe = bochner.Recipe("landmark", 64, window=32, sinks=1)
bochner.convert(model, recipe, bochner.Calibration(texts, tokenizer))
model.save_pretrained("minilm-linear")"""
FIRST_LOOK = "What the heads look at: exactly, and by a window of 32 tokens with moments of the rest"
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
    plans: dict[str, Plan] = {}

    def measure(name: str, seconds: float) -> None:
        quality = compare_embeddings(original, embed(model, tokenizer, held, max_length=TOKENS))
        errors = [e.mean().item() for e in Conversion.of(model).errors(check).values()]
        error = sum(errors) / len(errors)
        rows.append([name, error, quality.cosine, quality.rank_correlation, quality.retrieval, seconds])
        plans[name] = Conversion.of(model).plan
        say(f"{name}: error {error:.3f}, cosine {quality.cosine:.3f}, rank {quality.rank_correlation:.3f}")

    last = list(ENCODER_RECIPES)[-1]
    for name, recipe in ENCODER_RECIPES.items():
        say(f"converting: {name}")
        start = time.monotonic()
        convert(model, recipe, Calibration(calibration[:48], tokenizer, max_length=TOKENS))
        measure(name, time.monotonic() - start)
        if name != last:
            revert(model)
    say("distilling, layer by layer and then end to end")
    start = time.monotonic()
    how = Distillation(steps=5 if quick else steps, end_to_end=5 if quick else 2 * steps, seconds=120)
    texts_again = Calibration(calibration, tokenizer, max_length=TOKENS, batch_size=4)
    transfer = distill(model, texts_again, how, progress=False)
    measure(f"{last}, distilled", time.monotonic() - start)
    say("timing attention against length")
    plain = next(iter(ENCODER_RECIPES))
    typical = {name: typical_layer(plan) for name, plan in plans.items()}
    times = layer_times(typical, [256, 512, 1024] if quick else [512, 1024, 2048, 4096, 8192])
    pictures = head_pictures(model, tokenizer, held[1], TOKENS_SHOWN)
    page = encoder_page(rows, times, plans, pictures, plain, positions(model).get("input_ids"))
    page.text(PASSAGES.format(len(calibration), len(held), TOKENS), note=True)
    page.code(str(Conversion.of(model).plan), "The plan, head by head").code(
        str(transfer), "Distillation, layer by layer"
    )
    return rows, page


def encoder_page(
    rows: list[list[Any]],
    times: Times,
    plans: dict[str, Plan],
    pictures: HeadPictures,
    plain: str,
    positions: int | None = None,
) -> Report:
    """The report: the best recipe's verdict, what to do, pictures, the table."""
    best = max(rows, key=lambda row: row[2])
    name, length = best[0], max(times)
    where, ratio = crossing(times, name), times[length][name] / times[length]["exact"]
    linear = plans[name].num_heads - plans[name].count("exact")
    speed = f"one layer of attention takes {ratio:.2f} of the time of exact attention at {length:,} tokens"
    beyond = positions is not None and positions < length
    page = Report("all-MiniLM-L6-v2 with linear attention")
    page.verdict(
        f"{linear} of {plans[name].num_heads} heads of a real sentence encoder are linear, the embeddings of texts of "
        f"{TOKENS} tokens keep {best[2]:.1%} of their direction, and {speed}. {crossing_sentence(where, times, name)}"
        + (f" {positions_sentence(positions)} A longer encoder would gain it." if beyond and positions else ""),
        [
            Number(
                "kept",
                f"{best[2]:.1%}",
                f"cosine to the original embeddings; nearest neighbour the same in {best[4]:.0%}",
            ),
            Number("memory", "as before", "an encoder keeps nothing between calls"),
            Number(
                "time",
                f"{ratio:.2f} x",
                f"exact attention's, one layer at {length:,} tokens" + (", beyond its positions" if beyond else ""),
            ),
        ],
        good=ratio < 1,
    )
    page.steps(
        [
            (
                "Ask whether a model of yours is worth converting.",
                "bochner search DIRECTORY --text sample.txt --length 8192",
            ),
            ("Convert it to a target.", "bochner convert DIRECTORY OUT --keep 0.99 --length 8192"),
            ("Or in Python, with a recipe.", IN_PYTHON),
        ]
    )
    page.heading(f"What the heads look at: {name.removeprefix('the same, ')}").heads(pictures)
    page.heading("Loss against time")
    points = {row[0]: (1e3 * times[length][row[0]], 1 - row[2]) for row in rows}
    chart = frontier_chart(
        "what is lost of the embeddings, by time",
        points,
        x_label=f"milliseconds of one layer at {length:,} tokens",
        y_label="1 - cosine",
        chosen=name,
    )
    exact_time = 1e3 * times[length]["exact"]
    page.figure(
        chart, f"Exact attention keeps all of it and takes {exact_time:.1f} ms. Joined points are beaten by none."
    )
    add_speed(page, times, [name, plain], positions=positions)
    page.heading("All recipes")
    page.table(
        ["recipe", "error of attention", "cosine", "rank correlation", "same neighbour", "seconds"], rows, chosen=name
    )
    return page


def decoder(say: Say, *, quick: bool = False, out: str | Path | None = None) -> tuple[list[list[Any]], Report]:
    """SmolLM2 with a cache of `CACHE` of its bytes: quality on texts never used, bytes, rates, and what it writes.

    `out`: where a first picture is saved before the search begins.
    """
    say("loading SmolLM2-135M-Instruct (the first time its weights are unpacked, about a minute)")
    model, tokenizer = load_smollm2()
    length = 1000 if quick else 2000
    pictures = first_look(model, tokenizer)
    if out is not None:
        page = Report("SmolLM2-135M-Instruct: a first look").heading(FIRST_LOOK).heads(pictures)
        say(f"a first picture is in {page.save(out)}; the report will replace it")
    texts = data.paragraphs("calibration", 4 if quick else 6, words=3000)
    written = [("as it is", write(model, tokenizer))]
    say(f"decoding behind {length:,} tokens as it is")
    before = decoding_cost(model, length)
    say(f"{before[1] / 1e6:.1f} MB of keys and values; now a cache of {CACHE:.0%} of that is searched for")
    target = Target(memory=CACHE, length=length)
    start = time.monotonic()
    conversion = convert(model, target, Calibration(texts, tokenizer), progress=True)
    seconds = time.monotonic() - start
    after = decoding_cost(model, length)
    written.append(("converted", write(model, tokenizer)))
    quality = conversion.report.final.quality
    rows: list[list[Any]] = [
        ["as it is", 1.0, before[1] / 1e6, 1 / before[0], 0.0],
        ["converted", quality.retained, after[1] / 1e6, 1 / after[0], seconds],
    ]
    page = decoder_page(conversion, rows, written, length)
    page.heading(FIRST_LOOK).heads(pictures)
    return rows, page


def first_look(model: Any, tokenizer: Any) -> HeadPictures:
    """What the heads look at, exactly and by a simple recipe that needs no text; the model stays as it is."""
    convert(model, Recipe("moments", **NEAR), progress=False)
    pictures = head_pictures(model, tokenizer, data.paragraphs("heldout", 1)[0], TOKENS_SHOWN, most_heads=45)
    revert(model)
    return pictures


def decoder_page(conversion: Conversion, rows: list[list[Any]], written: list[tuple[str, str]], length: int) -> Report:
    """The report: what was gained and lost, what to do next, what the model writes, and the search."""
    (_, _, megabytes, rate, _), (_, retained, left, new_rate, _) = rows
    low, high = conversion.report.final.quality.bounds()
    page = Report("SmolLM2-135M-Instruct with a small cache")
    page.verdict(
        f"The cache of a real language model behind {length:,} tokens takes {left:.1f} MB in place of "
        f"{megabytes:.1f} MB. Nothing was trained. The model retains {retained:.1%} of its quality on texts that the "
        "search never used.",
        [
            Number("quality", f"{retained:.1%}", f"retained; the 90 % interval is {low:.1%} to {high:.1%}"),
            Number("memory", f"{left / megabytes:.1%}", f"of the cache at {length:,} tokens, measured"),
            Number("rate", f"{new_rate:.1f}", f"tokens a second; {rate:.1f} as it is"),
        ],
        good=conversion.report.met,
    )
    page.steps(
        [
            ("See what a model of yours would lose.", "bochner search DIRECTORY --memory 0.1 --length 8192"),
            ("Convert it.", "bochner convert DIRECTORY OUT --memory 0.1 --length 8192"),
        ]
    )
    page.heading(f"What it writes after: {PROMPT.strip()}")
    for name, text in written:
        page.text(name, note=True).text(text)
    page.heading("What the search says").code(str(conversion.report))
    page.code(str(conversion.plan), "The plan, head by head")
    return page


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
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", BochnerWarning)  # random tokens are unlike any text
        for start in range(0, length, prefill):
            model(ids[:, start : min(start + prefill, length)], past_key_values=cache, logits_to_keep=1)
        seconds = []
        for i in range(steps):
            before = clock()
            model(ids[:, length + i : length + i + 1], past_key_values=cache)
            seconds.append(clock() - before)
    return min(seconds), cache_bytes(cache)


def run(
    say: Say, out: str | Path, *, model: str = "smollm2", quick: bool = False
) -> tuple[list[str], list[list[Any]], Path]:
    """Run one demonstration and write its report; returns the table and the path."""
    if model == "minilm":
        rows, page = encoder(say, quick=quick)
        head = ["recipe", "error", "cosine", "rank correlation", "same neighbour", "seconds"]
    else:
        rows, page = decoder(say, quick=quick, out=out)
        head = ["model", "quality retained", "cache, MB", "tokens a second", "seconds"]
    return head, [[show(c) for c in row] for row in rows], page.save(out)


def load_minilm() -> tuple[Any, Any]:
    """all-MiniLM-L6-v2, a sentence-embedding BERT, and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    path = data.fetch("minilm")
    with quietly():
        return AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)


def load_smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct, a Llama-type decoder, in float32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = data.fetch("smollm2")
    with quietly():
        return AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
