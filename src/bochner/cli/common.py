"""What the commands share: where they speak, tables and JSON, and models and texts from the user's disk."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bochner._checks import BochnerError
from bochner._progress import quietly

KNOWN = ("minilm", "smollm2")
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model", "*.spm", "*.bpe")
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json")
UNKNOWN_SHARE = 0.5  # a tokenizer that knows fewer of the tokens than this belongs to another model

console = Console()
log = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="print one JSON document instead of text")]
Threads = Annotated[int, typer.Option(min=0, help="number of threads; 0 lets torch choose")]


def say(text: str) -> None:
    log.print(f"[dim]bochner:[/] {escape(text)}", highlight=False, soft_wrap=True)


def show(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    table = Table(title=title or None)
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_json(value: Any) -> None:
    """One document on the standard output; NaN has no place in JSON and becomes null."""
    print(json.dumps(_plain(value), indent=1, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def use_threads(threads: int) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)


def one_line(error: BaseException) -> str:
    """The first sentence or so of another library's message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 240 else text[:237] + "..."


def load(name: str) -> tuple[Any, Any]:
    """A model of text and its tokenizer from a directory or a GGUF file, or one of the known ones."""
    from bochner import data, demo

    if name in KNOWN:
        return demo.load_minilm() if name == "minilm" else demo.load_smollm2()
    path = Path(name)
    if path.suffix == ".gguf" and path.is_file():
        path = data.from_gguf(path)
    if not (path / "config.json").is_file():
        hub = re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) and not path.exists()
        how = f" A model of a hub is downloaded first, as by: hf download {name} --local-dir {path.name}" if hub else ""
        like = difflib.get_close_matches(name, KNOWN)
        how = f" Did you mean {like[0]}?" if like else how
        raise BochnerError(
            f"There is no model in {name!r}: give a directory with config.json, a GGUF file, or "
            f"{' or '.join(KNOWN)}.{how}"
        )
    try:
        json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise BochnerError(f"The config.json in {name!r} cannot be read: {one_line(error)}.") from error
    if not any(list(path.glob(pattern)) for pattern in WEIGHT_FILES):
        raise BochnerError(f"There are no weights in {name!r}: neither *.safetensors nor pytorch_model.bin.")
    import transformers

    from bochner.hf.interface import CHILD  # importing it makes converted models known, to be refused with a sentence

    try:
        with quietly():
            config = transformers.AutoConfig.from_pretrained(path)
            architecture = (config.architectures or ["AutoModel"])[0]
            cls = getattr(transformers, architecture, transformers.AutoModel)
            model = cls.from_pretrained(path).eval()
    except BochnerError:
        raise
    except Exception as error:  # transformers raises whatever its model code raises
        raise BochnerError(f"transformers cannot load the model in {name!r}: {one_line(error)}") from error
    if model.main_input_name != "input_ids":
        raise BochnerError(
            f"The model in {name!r} takes {model.main_input_name}, not text; the command line has text only. In "
            "Python: bochner.convert(model, bochner.Recipe(), batches)."
        )
    if any(hasattr(module, CHILD) for module in model.modules()):
        raise BochnerError(f"The model in {name!r} is converted already; give the directory that it was made from.")
    return model, _tokenizer(path, name)


def _tokenizer(path: Path, name: str) -> Any:
    """The tokenizer saved with a model: transformers makes an empty one up where the files are missing."""
    import transformers

    if not any(list(path.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise BochnerError(
            f"There is no tokenizer in {name!r}; save it with the model: tokenizer.save_pretrained({name!r})."
        )
    try:
        return transformers.AutoTokenizer.from_pretrained(path)
    except Exception as error:
        raise BochnerError(f"transformers cannot load the tokenizer in {name!r}: {one_line(error)}") from error


def check_tokenizer(model: Any, tokenizer: Any, passages: Sequence[str]) -> None:
    """Refuse a tokenizer that does not know the text, or has more tokens than the model."""
    ids = [i for text in passages[:8] for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    if not ids:
        raise BochnerError("The tokenizer makes no tokens of the text; it belongs to another model, or is empty.")
    unknown = sum(i == tokenizer.unk_token_id for i in ids) / len(ids)
    if unknown > UNKNOWN_SHARE:
        raise BochnerError(
            f"The tokenizer knows {1 - unknown:.0%} of the tokens of the text; it belongs to another model, or the "
            "text is in another language."
        )
    size = model.get_input_embeddings().num_embeddings
    if max(ids) >= size:
        raise BochnerError(
            f"The tokenizer makes token {max(ids)} of the text and the model knows {size}: they do not belong together."
        )


def check_place(path: Path | None, option: str) -> None:
    """Refuse, before the work, a file that could not be written after it."""
    if path is None:
        return
    if path.is_dir():
        raise BochnerError(f"The {option} {str(path)!r} is a directory; give a file.")
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    if there != path and not there.is_dir():
        raise BochnerError(f"The {option} {str(path)!r} cannot be written: {str(there)!r} is a file, not a directory.")
    if not os.access(there, os.W_OK):
        raise BochnerError(f"The {option} {str(path)!r} cannot be written: {str(there)!r} does not permit it.")


def books(split: str, count: int) -> tuple[list[str], str]:
    """Passages of the books, for calibration or validation; and what they are."""
    from bochner import data

    try:
        return data.paragraphs(split, count, source="books"), "public-domain books"
    except data.ArtefactUnavailable as reason:
        say(f"the books cannot be had, Python's language reference stands in for them ({reason})")
        return data.paragraphs(split, count, source="python"), "Python's language reference, for want of books"


def texts(path: Path | None, count: int) -> tuple[list[str], str]:
    """Passages of a text file, or of the books; and what they are."""
    if path is None:
        return books("calibration", count)
    if not path.is_file():
        raise BochnerError(f"There is no text file {str(path)!r}.")
    try:
        whole = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BochnerError(f"The text file {str(path)!r} is not UTF-8: {one_line(error)}.") from error
    found = [p.strip() for p in whole.split("\n\n") if p.strip()]
    if not found:
        raise BochnerError(f"The text file {str(path)!r} is empty.")
    return found[:count], path.name
