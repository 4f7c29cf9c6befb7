"""No public function or method takes more than eight arguments; what mirrors torch or scipy is named here."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import bochner

MOST = 8
TORCH_SHAPED = {
    "linear_attention",
    "exact_attention",
    "attention_matrix",
    "MultiheadAttention",
}


def public() -> Iterator[tuple[str, Any]]:
    pytest.importorskip("transformers")
    for name in bochner.__all__:
        yield name, getattr(bochner, name)
    for package in ("hf", "nn"):
        home = getattr(bochner, package)
        for name in home.__all__:
            yield f"{package}.{name}", getattr(home, name)


def arguments(function: Any) -> int:
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 0
    return sum(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "self" for p in found)


def test_no_public_signature_is_wider_than_eight_arguments() -> None:
    wide = {}
    for name, thing in public():
        if name.rpartition(".")[2] in TORCH_SHAPED or not callable(thing):
            continue
        fields = hasattr(thing, "__dataclass_fields__") or hasattr(thing, "_fields")  # records that are made for people
        if not (inspect.isclass(thing) and fields) and arguments(thing) > MOST:
            wide[name] = arguments(thing)
        for part, method in vars(thing).items() if inspect.isclass(thing) else ():
            if not part.startswith("_") and callable(method) and arguments(method) > MOST:
                wide[f"{name}.{part}"] = arguments(method)
    assert not wide
    theirs, ours = (
        list(inspect.signature(c).parameters) for c in (torch.nn.MultiheadAttention, bochner.nn.MultiheadAttention)
    )
    assert ours[:-2] == theirs  # then one of our own, or its fields one by one
    assert ours[-2:] == ["attention", "settings"]
    assert all(arguments(c) <= MOST for c in (bochner.nn.Attention, bochner.nn.Performer, bochner.nn.LayerOptions))
    assert arguments(bochner.convert) == 6
    assert max(map(arguments, (bochner.Recipe, bochner.Target, bochner.Distillation, bochner.Calibration))) <= MOST
