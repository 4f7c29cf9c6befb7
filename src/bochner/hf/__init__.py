"""transformers: register linear attention, convert pretrained models, decode in constant memory.

>>> import bochner
>>> bochner.hf.register()  # then attn_implementation="bochner" in any model whose attention can be linear
"""

try:
    import transformers as _  # noqa: F401
except ImportError as error:
    raise ImportError("bochner.hf needs transformers; install bochner[hf].") from error

from bochner.hf.cache import RecurrentLayer, cache_bytes
from bochner.hf.capture import discover, recording
from bochner.hf.convert import convert, layers_of, plan_of, redraw_, relative_errors, revert
from bochner.hf.interface import register, supported
from bochner.hf.layer import LinearAttention
from bochner.hf.plan import LayerPlan, Plan

__all__ = [
    "LayerPlan",
    "LinearAttention",
    "Plan",
    "RecurrentLayer",
    "cache_bytes",
    "convert",
    "discover",
    "layers_of",
    "plan_of",
    "recording",
    "redraw_",
    "register",
    "relative_errors",
    "revert",
    "supported",
]
