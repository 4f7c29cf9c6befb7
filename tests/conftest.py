"""Shared set-up: the helpers beside the tests can be imported, and one thread per worker."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
collect_ignore = ["smoke.py"]  # run by `make release`, outside the source


@pytest.fixture(autouse=True)
def every_call_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny inputs lie below every measured crossover: here `convert` takes `exact_below=0` unless it is given."""
    if "transformers" in sys.modules:
        monkeypatch.setattr("bochner.hf.convert.crossover", lambda plan: 0)
