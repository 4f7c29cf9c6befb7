"""transformers: convert pretrained models, train new ones, decode in constant memory.

`bochner.convert`, `bochner.search`, `bochner.distill` and their settings are what most people want; here is what they
are made of. Nothing needs transformers before it is used.

>>> import bochner
>>> bochner.hf.register()  # then attn_implementation="bochner" in any model whose attention can be linear
"""

from bochner._lazy import lazy

# Names are imported when first asked for: some of their modules need transformers, `diagnose(q, k, v)` does not.
_LAZY = {
    "Calibration": "config",
    "Call": "calls",
    "Conversion": "conversion",
    "Distillation": "config",
    "Exact": "fates",
    "Fate": "fates",
    "FateModule": "fates",
    "Hybrid": "fates",
    "Kernel": "fates",
    "LayerPlan": "plan",
    "LinearAttention": "attention",
    "Plan": "plan",
    "Recipe": "config",
    "RecurrentLayer": "cache",
    "SearchReport": "search",
    "Selected": "selected_heads",
    "Target": "config",
    "Window": "fates",
    "cache_bytes": "cache",
    "discover": "observe",
    "fit_selected": "selected_fit",
    "layers_of": "interface",
    "recording": "observe",
    "register": "interface",
    "register_fate": "fates",
    "revert": "conversion",
    "supported": "interface",
    "trainable_maps_": "interface",
}
_PLACES = {name: f"bochner.hf.{module}:{name}" for name, module in _LAZY.items()}
_PLACES["parameter_groups"] = "bochner.nn:parameter_groups"
__all__ = sorted(_PLACES)

__getattr__, __dir__ = lazy(__name__, _PLACES)
