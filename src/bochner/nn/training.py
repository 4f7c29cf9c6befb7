"""What a training loop needs of a model's maps: groups for the optimizer, and a redraw by hand."""

from __future__ import annotations

from typing import Any

from torch import nn

from bochner._checks import spawn_seed
from bochner.maps.base import FeatureMap


def redraw_(model: nn.Module, seed: int) -> int:
    """Redraw the random parts of all maps of a model now, each from `seed` and its place; returns how many there are.

    For loops under `torch.compile`, where `redraw_every` of a map counts nothing. Learned parts and calibration stay.
    """
    maps = maps_of(model)
    for i, phi in enumerate(maps):
        phi.redraw_(spawn_seed(seed, i))
    return len(maps)


def parameter_groups(
    model: nn.Module, lr: float, *, map_lr: float | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer: matrices, which decay; vectors, which do not; maps, which do not either.

    `map_lr`: the learning rate of the maps, default `lr`. Only what requires gradients is listed, and each parameter
    once: `torch.optim.AdamW(parameter_groups(model, 1e-4, map_lr=1e-3, weight_decay=0.01))`.
    """
    maps = {id(p) for phi in maps_of(model) for p in phi.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if id(p) not in maps and p.ndim > 1], "lr": lr, "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) not in maps and p.ndim <= 1], "lr": lr, "weight_decay": 0.0},
        {
            "params": [p for p in trained if id(p) in maps],
            "lr": lr if map_lr is None else map_lr,
            "weight_decay": 0.0,
        },
    ]
    return [group for group in groups if group["params"]]


def maps_of(model: nn.Module) -> list[FeatureMap]:
    """The feature maps of a model, in its order; not those that are parts of another."""
    found: list[FeatureMap] = []
    inner: set[int] = set()
    for module in model.modules():
        if isinstance(module, FeatureMap) and id(module) not in inner:
            found.append(module)
            inner.update(id(m) for m in module.modules())
    return found
