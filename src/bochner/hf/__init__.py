"""transformers: register linear attention, convert pretrained models, train new ones, decode in constant memory.

`bochner.convert`, `bochner.revert`, `bochner.advise` and `bochner.distill` are the functions most people want; here is
what they are made of. Nothing needs transformers before it is used.

>>> import bochner
>>> bochner.hf.register()  # then attn_implementation="bochner" in any model whose attention can be linear
"""

from bochner._lazy import lazy

# Names are imported when first asked for: some of their modules need transformers, `advise(q, k, v)` does not.
_LAZY = {
    "LayerPlan": "plan",
    "ConversionReport": "convert",
    "LinearAttention": "layer",
    "Plan": "plan",
    "RecurrentLayer": "cache",
    "RedrawCallback": "train",
    "TargetReport": "aim",
    "cache_bytes": "cache",
    "discover": "capture",
    "layers_of": "io",
    "parameter_groups": "train",
    "plan_of": "io",
    "recording": "capture",
    "redraw_": "train",
    "register": "patches",
    "relative_errors": "convert",
    "report_of": "convert",
    "revert": "convert",
    "supported": "capture",
    "trainable_maps_": "train",
    "unregister": "patches",
}
__all__ = sorted(_LAZY)


__getattr__, __dir__ = lazy(__name__, {name: f"bochner.hf.{module}:{name}" for name, module in _LAZY.items()})
