"""Adapters for training a converted model's weights: made by peft, merged at the end, and what they change noted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bochner._checks import BochnerError, extra, is_int
from bochner.hf import capture
from bochner.hf.familiar import note
from bochner.hf.io import layers_of
from bochner.hf.layer import CHILD, Call
from bochner.hf.measure import Samples

NOTED = 16  # batches whose queries and keys are noted again after weights were trained


def check_lora(lora: Any, part: str | None = None, end_to_end: int = 1, adapted: bool = False) -> None:
    """Refuse adapters that cannot be made or would not be trained."""
    if not is_int(lora) or lora < 0:
        raise BochnerError(f"The 'lora' of distill must be an int >= 0, the rank of the adapters, got {lora!r}.")
    if not lora:
        return
    if adapted or part is not None or not end_to_end:
        why = "the model has adapters already" if adapted else ("'part' is trained" if part else "'end_to_end' is 0")
        raise BochnerError(
            f"The 'lora' of distill makes adapters, which are trained end to end, and {why}: leave it out."
        )
    extra("peft", "train", "The 'lora' of bochner.distill")


@contextlib.contextmanager
def adapters(model: Any, rank: int) -> Iterator[None]:
    """Adapters of some rank beside the projections of all attention modules, at the end merged into the weights."""
    if not rank:
        yield
        return
    from transformers.pytorch_utils import Conv1D

    peft = extra("peft", "train", "The 'lora' of bochner.distill")
    names = [
        f"{name}.{inner}"
        for name in layers_of(model)
        for inner, module in model.get_submodule(name).named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and CHILD not in inner.split(".")
    ]
    if not names:
        raise BochnerError("The 'lora' of distill finds no projections in the attention modules: use 'part' instead.")
    wanted = {name: p.requires_grad for name, p in model.named_parameters()}
    transposed = all(isinstance(model.get_submodule(name), Conv1D) for name in names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=names, fan_in_fan_out=transposed)
        wrapped = peft.get_peft_model(model, config)
    wrapped.train(model.training)
    try:
        yield
    except BaseException:
        wrapped.unload()
        raise
    else:
        wrapped.merge_and_unload()
    finally:
        for name, p in model.named_parameters():  # peft has frozen them
            p.requires_grad_(wanted.get(name, p.requires_grad))


def note_again(model: Any, batches: Sequence[dict[str, Tensor]]) -> None:
    """What queries and keys look like that trained weights make, for the alarm; maps stay fitted to their lengths."""
    layers = {name: layer for name, layer in layers_of(model).items() if layer.plan.seen is not None}
    samples = {name: Samples() for name in layers}

    def look(name: str, call: Call) -> None:
        if name in samples:
            samples[name].add(call)

    with capture.recording(model, look):
        for batch in batches[:NOTED]:
            capture.run(model, batch)
    for name, layer in layers.items():
        before: dict[str, Any] = layer.plan.seen or {}
        note(layer.plan, samples[name].q, samples[name].k)
        if layer.plan.seen is not None:
            layer.plan.seen |= {"length": before["length"]} if "length" in before else {}
