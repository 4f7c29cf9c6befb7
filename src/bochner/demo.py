"""The demonstration: a real pretrained model with linear attention, and how good the result is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bochner import data
from bochner._progress import quietly
from bochner.hf.config import Calibration, Recipe, Target
from bochner.hf.conversion import Conversion, convert, revert
from bochner.report import HeadPictures, Number, Report
from bochner.report.model import head_pictures

Say = Callable[[str], None]
TOKENS_SHOWN = 80  # of the text whose attention is shown
CACHE, LENGTH = 0.1, 2000  # the share of a decoder's cache that is left, and the tokens of a text
FIRST_LOOK = "What the heads look at: exactly, and by a window of 32 tokens with moments of the rest"
HEAD = ["model", "cache, MB", "quality retained, %", "tokens a second"]
PROMPT = "Write three sentences about the sea.\n"


def run(say: Say, out: str | Path, *, quick: bool = False) -> tuple[list[list[Any]], Path]:
    """SmolLM2 with a cache of `CACHE` of its bytes: quality on texts never used, bytes, rates, and what it writes.

    Returns the rows of the table under `HEAD`, and the path of the report. A first picture is saved there before the
    search begins.
    """
    say("loading SmolLM2-135M-Instruct (the first time it is fetched and unpacked, about half a minute)")
    model, tokenizer = load_smollm2()
    pictures = first_look(model, tokenizer)
    page = Report("SmolLM2-135M-Instruct: a first look").heading(FIRST_LOOK).heads(pictures)
    say(f"a first picture is in {page.save(out)}; the report will replace it")
    texts = data.paragraphs("calibration", 3, words=1300 if quick else 1500)
    written = [("as it is", write(model, tokenizer))]
    say(f"searching for a cache of {CACHE:.0%} of its bytes at {LENGTH:,} tokens, two to three minutes")
    target = Target(memory=CACHE, length=LENGTH)
    conversion = convert(model, target, Calibration(texts, tokenizer), progress=True)
    written.append(("converted", write(model, tokenizer)))
    final = conversion.report.final
    rows: list[list[Any]] = [
        [name, final.whole[key]["cache_bytes"] / 1e6, 100 * quality, 1 / final.whole[key]["step_seconds"]]
        for name, key, quality in (("as it is", "original", 1.0), ("converted", "converted", final.quality.retained))
    ]
    page = report_page(conversion, rows, written).heading(FIRST_LOOK).heads(pictures)
    return rows, page.save(out)


def first_look(model: Any, tokenizer: Any) -> HeadPictures:
    """What the heads look at, exactly and by a simple recipe that needs no text; the model stays as it is."""
    convert(model, Recipe("moments", window=32, sinks=1), progress=False)
    pictures = head_pictures(model, tokenizer, data.paragraphs("heldout", 1)[0], TOKENS_SHOWN, most_heads=45)
    revert(model)
    return pictures


def report_page(conversion: Conversion, rows: list[list[Any]], written: list[tuple[str, str]]) -> Report:
    """The report: what was gained and lost, what to do next, what the model writes, and the search."""
    (_, megabytes, _, rate), (_, left, retained, new_rate) = rows
    low, high = conversion.report.final.quality.bounds()
    page = Report("SmolLM2-135M-Instruct with a small cache")
    speed = f"It decodes {new_rate / rate:.2f}x as many tokens a second."
    if new_rate < rate:
        speed += " Speed is gained only on longer texts."
    page.verdict(
        f"The cache of a real language model takes {left:.1f} MB in place of {megabytes:.1f} MB after {LENGTH:,} "
        f"tokens. Nothing was trained. The model retains {retained:.1f}% of its quality on validation texts, which the "
        f"search never used. {speed}",
        [
            Number("memory", f"{left / megabytes:.1%}", f"of the cache at {LENGTH:,} tokens, measured"),
            Number("quality retained", f"{retained:.1f}%", f"the 90% interval is {low:.1%} to {high:.1%}"),
            Number("speed", f"{new_rate / rate:.2f}x", f"{new_rate:.1f} tokens a second, {rate:.1f} as it is"),
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


def load_minilm() -> tuple[Any, Any]:
    """all-MiniLM-L6-v2, a sentence-embedding BERT, and its tokenizer."""
    return _loaded("minilm", "AutoModel")


def load_smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct, a Llama-type decoder, in float32, and its tokenizer."""
    return _loaded("smollm2", "AutoModelForCausalLM")


def _loaded(name: str, kind: str) -> tuple[Any, Any]:
    import transformers

    path = data.fetch(name)
    with quietly():
        model = getattr(transformers, kind).from_pretrained(path).eval()
        return model, transformers.AutoTokenizer.from_pretrained(path)
