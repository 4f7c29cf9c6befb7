"""Attaching maps to a model, and saving and loading it with transformers' own `save_pretrained` and `from_pretrained`.

Every attention module holds its own plan in its `LinearAttention`. In a saved model the plans are a key of config.json
and the maps are tensors of the safetensors file; config.json also asks for the attention implementation by name, so
that a process that does not know it raises instead of silently giving softmax back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from bochner._checks import BochnerError
from bochner.hf import capture
from bochner.hf.familiar import Alarm
from bochner.hf.layer import CHILD, LinearAttention, Origin
from bochner.hf.plan import Plan

NAME = "bochner"  # the attention implementation of models that `convert` has not seen
CONVERTED = "bochner_converted"  # that of converted models: modules with maps use them, others stay softmax
KEY = "bochner"  # of the plan in config.json
MISFIT = (
    "The maps in this checkpoint are not those of the plan in its config.json: it was saved from another conversion, "
    "or edited. Convert the original model again with this plan."
)


def attached_to(model: Any) -> dict[str, LinearAttention]:
    """The attached modules of a model, by the name of their attention module; empty if it is not converted."""
    found = {}
    for name, module in getattr(model, "named_modules", dict)():
        child = _unwrapped(module._modules.get(CHILD))
        if isinstance(child, LinearAttention):
            found[name] = child
    return found


def _unwrapped(child: Any) -> Any:
    """The module that a name stands for: with PEFT's `modules_to_save`, the copy of the adapter in use."""
    copies, active = getattr(child, "modules_to_save", None), getattr(child, "active_adapters", None)
    return copies[active[0]] if copies and active and active[0] in copies else child


def layers_of(model: Any) -> dict[str, LinearAttention]:
    """The attached modules of a converted model, by the name of their attention module."""
    found = attached_to(model)
    if not found:
        raise BochnerError(f"This {type(model).__name__} is not converted; call bochner.convert first.")
    return found


def plan_of(model: Any) -> Plan:
    """The plan of a converted model, a copy."""
    layers = [replace(layer.plan, name=name) for name, layer in layers_of(model).items()]
    return Plan(layers, getattr(getattr(model, "config", None), "model_type", "")).copy()


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
    """Attach maps and decoding hooks, and switch the configurations above them to `CONVERTED` if anything is converted.

    `layers`: what to attach, by the plan's names; None makes it from the plan, for a model that is being loaded.
    """
    from bochner.hf.cache import install_hook

    loaded = layers is None
    for place, (layer, module) in enumerate(zip(plan.layers, find_modules(model, plan).values(), strict=True)):
        child = LinearAttention(layer) if layers is None else layers[layer.name]
        module.add_module(CHILD, child)
        if layer.is_causal and not layer.is_cross and not layer.untouched:
            index = getattr(module, "layer_idx", None)
            module._bochner_hook = install_hook(module, place if index is None else index, child.plan)
    switched = _configs_above_maps(model)
    origins = [Origin(config, _softmax_of(model, config, loaded)) for config in switched]
    alarm = Alarm()
    for module in find_modules(model, plan).values():
        getattr(module, CHILD).alarm = alarm
        own = getattr(module, "config", None) or model.config
        getattr(module, CHILD).origins = tuple(sorted(origins, key=lambda origin: origin.config is not own))
    for config in capture.configs_of(model):
        if plan.converted and any(config is c for c in switched):
            config._attn_implementation_internal = CONVERTED
        elif loaded:  # a part of which nothing is converted: only the name in config.json has switched it
            config._attn_implementation_internal = _softmax_of(model, config, loaded)
    for module in model.modules():
        if hasattr(module, "_keep_in_fp32_modules_strict"):
            kept: Any = module._keep_in_fp32_modules_strict
            module.__dict__["_keep_in_fp32_modules_strict"] = {*(kept or ()), CHILD}


def strip(model: nn.Module) -> None:
    """Remove what `equip` attached and give the configurations their implementations back.

    A configuration that is shared with modules elsewhere that keep their maps stays as it is.
    """
    before = next(iter(layers_of(model).values())).origins
    switched = _configs_above_maps(model)
    for module in model.modules():
        if CHILD in module._modules:
            for child in getattr(module, CHILD).modules():
                if isinstance(child, LinearAttention):  # one, unless somebody has wrapped it
                    child.origins = ()
            delattr(module, CHILD)
            hook = module.__dict__.pop("_bochner_hook", None)
            if hook is not None:
                hook.remove()
    needed = [origin.config for child in LinearAttention.everywhere for origin in child.origins]
    for config in switched:
        if before and not any(config is c for c in needed):
            origin = next((o for o in before if o.config is config), before[0])
            config._attn_implementation_internal = origin.implementation


@contextlib.contextmanager
def plan_in_config(model: Any) -> Iterator[None]:
    """While a converted model is being saved, its configuration holds its plan."""
    if not attached_to(model):
        yield
        return
    config = model.config
    config.bochner, config.attn_implementation = plan_of(model).to_dict(), CONVERTED
    try:
        yield
    finally:
        del config.bochner, config.attn_implementation


def equip_as_saved(model: Any) -> None:
    """Build the maps of a model whose configuration comes from a saved conversion, before its weights are read."""
    saved = getattr(model.config, KEY, None)
    if saved is None:
        return
    plan = Plan.from_dict(saved)
    try:
        find_modules(model, plan)
    except BochnerError:
        return  # a part of the model that holds none of the plan's modules
    equip(model, plan)
    for name in (KEY, "attn_implementation"):
        model.config.__dict__.pop(name, None)


def _configs_above_maps(model: nn.Module) -> list[Any]:
    """The configurations of the modules that hold an attached one."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal") and any(CHILD in m._modules for m in module.modules()):
            found[id(config)] = config
    return list(found.values())


def _softmax_of(model: Any, config: Any, loaded: bool) -> str:
    """The implementation to go back to: the present one, unless that is ours."""
    present = config._attn_implementation_internal
    if present == CONVERTED and not loaded:  # another part of the model was converted before
        origins = [origin for child in LinearAttention.everywhere for origin in child.origins]
        present = next((origin.implementation for origin in origins if origin.config is config), None)
    if present in (None, NAME, CONVERTED):
        return "sdpa" if getattr(model, "_supports_sdpa", True) else "eager"
    return str(present)
