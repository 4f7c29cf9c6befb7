"""Saving and loading converted models with transformers' own `save_pretrained` and `from_pretrained`.

The plan is a key of config.json, the maps are tensors of the safetensors file. config.json also asks for the attention
implementation by name, so that a process that does not know `bochner` raises instead of silently giving softmax back.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import nn

from bochner._checks import BochnerError
from bochner.hf.interface import NAME
from bochner.hf.layer import LinearAttention
from bochner.hf.plan import Plan

KEY = "bochner"
CHILD = "linear_attn"
MISFIT = (
    "The maps in this checkpoint are not those of the plan in its config.json: it was saved from another conversion, "
    "or edited. Convert the original model again with this plan."
)


def find_modules(model: nn.Module, plan: Plan) -> dict[str, nn.Module]:
    """The attention modules of a plan by the plan's names; a head on top or its absence does not matter."""
    modules = dict(model.named_modules())
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    found = {}
    for layer in plan.layers:
        names = (layer.name, prefix + layer.name, layer.name.removeprefix(prefix))
        name = next((n for n in names if n in modules), None)
        if name is None:
            raise BochnerError(
                f"The plan names an attention module {layer.name!r} that {type(model).__name__} does not have; it was "
                "made for another model."
            )
        found[layer.name] = modules[name]
    return found


def equip(model: nn.Module, plan: Plan, layers: dict[str, LinearAttention] | None = None) -> None:
    """Attach the maps of a plan and the decoding hooks, and switch the model's attention to `bochner`."""
    from bochner.hf.cache import install_hook

    found = find_modules(model, plan)
    for place, layer in enumerate(plan.layers):
        module = found[layer.name]
        if hasattr(module, CHILD):
            continue
        module.add_module(CHILD, LinearAttention(layer) if layers is None else layers[layer.name])
        if layer.is_causal and not layer.is_cross:
            index = getattr(module, "layer_idx", None)
            module._bochner_hook = install_hook(module, place if index is None else index)
    config: Any = model.config
    before = config._attn_implementation_internal
    model.__dict__.setdefault("_bochner_before", "sdpa" if before in (None, NAME) else before)
    config.bochner = plan.to_dict()
    config.attn_implementation = NAME
    for part in own_configs(model):
        part._attn_implementation_internal = NAME
    for module in model.modules():
        if hasattr(module, "_keep_in_fp32_modules_strict"):
            kept: Any = module._keep_in_fp32_modules_strict
            module.__dict__["_keep_in_fp32_modules_strict"] = {*(kept or ()), CHILD}


def strip(model: nn.Module) -> None:
    """Remove what `equip` attached."""
    for module in model.modules():
        if hasattr(module, CHILD):
            delattr(module, CHILD)
            hook = module.__dict__.pop("_bochner_hook", None)
            if hook is not None:
                hook.remove()
    for config in own_configs(model):
        for name in (KEY, "attn_implementation"):
            if name in config.__dict__:
                delattr(config, name)


def own_configs(model: nn.Module) -> list[Any]:
    """Every configuration of the model and its parts, once."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if config is None or id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            return
        found[id(config)] = config
        for name in getattr(config, "sub_configs", {}):
            add(getattr(config, name, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return list(found.values())


class _Building(threading.local):
    """The plan of the model that is being loaded."""

    plan: Plan | None = None


_building = _Building()


def equip_models_when_built(base: Any) -> None:
    """Make `from_pretrained` of a saved conversion build its maps before the weights are read."""
    if getattr(base, "_bochner_equips", False):
        return
    post_init = base.post_init

    def equipped_post_init(self: Any) -> None:
        post_init(self)
        saved = getattr(self.config, KEY, None)
        if saved is not None:
            plan = Plan.from_dict(saved)
            try:
                find_modules(self, plan)
            except BochnerError:
                return  # a part of the model that holds none of the plan's modules
            equip(self, plan)
            _building.plan = plan

    load = base.from_pretrained.__func__

    def from_pretrained(cls: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        _building.plan = None
        try:
            model, info = load(cls, *args, output_loading_info=True, **kwargs)
        except RuntimeError as error:
            if _building.plan is not None and "mismatched_sizes" in str(error):
                raise BochnerError(MISFIT) from error
            raise
        lost = [str(k) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for k in info.get(kind, ())]
        # A conversion read as what it is has all its maps; one read without its plan is refused by its name.
        if any(f".{CHILD}." in key for key in lost):
            raise BochnerError(MISFIT)
        return (model, info) if output_loading_info else model

    base.post_init = equipped_post_init
    base.from_pretrained = classmethod(from_pretrained)
    base._bochner_equips = True
