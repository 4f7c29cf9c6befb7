"""Shared set-up: the helpers beside the tests can be imported, and one thread per worker."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
