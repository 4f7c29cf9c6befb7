"""Training with maps: their parameters in groups of their own, and new random frequencies on schedule."""

from __future__ import annotations

from typing import Any

from torch import nn

from bochner._checks import BochnerError, extra, positive_int, spawn_seed
from bochner.hf.interface import layers_of
from bochner.maps.base import FeatureMap
from bochner.nn import parameter_groups as parameter_groups

extra("transformers", "hf", "bochner.hf")
from transformers import TrainerCallback  # noqa: E402


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


def redraw_(model: Any, step: int, *, seed: int = 0) -> Any:
    """New random frequencies for every map, from the training step, the layer and the seed alone: ranks and resumed
    runs agree.

    Calibration and learned parts stay; frequencies that were made trainable are learned parts and stay too.
    """
    for i, layer in enumerate(layers_of(model).values()):
        maps = [
            phi for phi in (getattr(part, "phi", None) for part in layer.parts.values()) if isinstance(phi, FeatureMap)
        ]
        for j, phi in enumerate(maps):
            if not any(p.requires_grad for n, p in phi.named_parameters() if "projection" in n):
                phi.redraw_(seed=spawn_seed(seed, step, i, j))
    return model


class RedrawCallback(TrainerCallback):
    """Redraw the random parts of a converted model's maps every `every` optimizer steps of transformers' Trainer.

    The draw is a function of the global step, the layer and `seed`. Between redraws it is part of the model's state, so
    that a run resumed from a checkpoint continues as if it had not been stopped, and a saved model evaluates as it did.
    """

    def __init__(self, every: int = 100, *, seed: int = 0) -> None:
        self.every, self.seed = positive_int(every, "every", "RedrawCallback"), seed

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Called by the trainer after each optimizer step."""
        if state.global_step % self.every == 0:
            redraw_(model, state.global_step, seed=self.seed)
