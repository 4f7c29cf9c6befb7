"""SmolLM2-135M for the experiments that convert it: their arguments, and the model."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from bochner import data
from bochner.demo import load_smollm2


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that all of them have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--texts", type=int, default=8, help="held-out texts for each figure")
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--json", default="", help="write what was measured to this file")
    return made


def begin(made: argparse.ArgumentParser) -> tuple[argparse.Namespace, Any, Any]:
    """The arguments, the model and its tokenizer; ends the program, with the reason, where they cannot be had."""
    arguments = made.parse_args()
    torch.set_num_threads(arguments.threads)
    try:
        return arguments, *load_smollm2()
    except data.ArtefactUnavailable as error:
        print(f"skipped: {error}")
        raise SystemExit(0) from error
