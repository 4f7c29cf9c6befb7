"""Training with maps: their parameters in groups of their own."""

from __future__ import annotations

from typing import Any

from torch import nn

from bochner._checks import BochnerError
from bochner.hf.interface import layers_of
from bochner.nn import parameter_groups as parameter_groups


def trainable_maps_(model: Any, *, projections: bool = False) -> list[nn.Parameter]:
    """Make the learned parts of a converted model's maps parameters that require gradients; returns them.

    Random frequencies stay buffers unless `projections`. All are named under `linear_attn.map_norm`, which trainers
    leave out of weight decay and PEFT can be told to train by `modules_to_save=["linear_attn"]`. A model converted with
    `trainable=True` has this done already, and is saved and loaded that way.
    """
    found = []
    for layer in layers_of(model).values():
        found += layer.unfreeze_(projections=projections)
    if not found:
        raise BochnerError(
            "The maps of this model have nothing to learn; convert it with 'calibrated' or a learned map."
        )
    return found
