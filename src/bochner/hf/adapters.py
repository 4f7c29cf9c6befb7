"""Adapters for training a converted model's weights: made by peft, merged at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from bochner._checks import BochnerError, extra
from bochner.hf.attention import CHILD
from bochner.hf.interface import layers_of


def check_lora(lora: int, adapted: bool) -> None:
    """Refuse adapters beside those that a model has."""
    if lora and adapted:
        raise BochnerError("The model has adapters already: leave out the 'lora' of Distillation, which makes others.")
    if lora:
        extra("peft", "train", "The 'lora' of bochner.Distillation")


@contextlib.contextmanager
def adapters(model: Any, rank: int) -> Iterator[None]:
    """Adapters of some rank beside the projections of all attention modules, at the end merged into the weights."""
    if not rank:
        yield
        return
    from transformers.pytorch_utils import Conv1D

    peft = extra("peft", "train", "The 'lora' of bochner.Distillation")
    names = [
        f"{name}.{inner}"
        for name in layers_of(model)
        for inner, module in model.get_submodule(name).named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and CHILD not in inner.split(".")
    ]
    if not names:
        raise BochnerError(
            "The 'lora' of Distillation finds no projections in the attention modules: make adapters by peft instead."
        )
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
