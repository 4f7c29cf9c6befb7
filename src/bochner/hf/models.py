"""The two pretrained models of the demonstrations, from package registries: an encoder and a decoder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from bochner import data


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
        if not (copy / "model.safetensors").exists():
            _dequantize(source, copy)
        return AutoModelForCausalLM.from_pretrained(copy).eval(), AutoTokenizer.from_pretrained(copy)


def _dequantize(source: Path, copy: Path) -> None:
    import torch
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
