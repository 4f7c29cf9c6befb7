"""What `convert` and `search` refuse before anything is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from bochner._checks import BochnerError, is_int, one_of
from bochner.hf.config import Recipe, Target
from bochner.hf.interface import unwrap
from bochner.hf.plan import Plan


def check_arguments(spec: Any, parts: Any, unsupported: Any, exact_below: Any, seed: Any) -> None:
    """Refuse what cannot be, and what does not go with the spec."""
    if not isinstance(spec, (Recipe, Target, Plan, str, Path)):
        raise BochnerError(
            f"The 'spec' of convert must be a Recipe, a Target, a Plan or the directory of a saved conversion, got "
            f"{type(spec).__name__}."
        )
    one_of(unsupported, "unsupported", "convert", ("keep", "raise"))
    if not is_int(exact_below) or exact_below < 0:
        raise BochnerError(f"The 'exact_below' of convert must be an int >= 0, got {exact_below!r}.")
    if not is_int(seed) or seed < 0:
        raise BochnerError(f"The 'seed' of convert must be an int >= 0, got {seed!r}.")
    if isinstance(spec, (Recipe, Target)):
        return
    given = {"parts": parts is not None, "exact_below": exact_below != 0, "seed": seed != 0}
    for name, value in given.items():
        if value:
            what = "A plan" if isinstance(spec, Plan) else "A saved conversion"
            raise BochnerError(f"{what} says it all, for every layer: leave out {name!r}, or edit the plan.")


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise BochnerError(f"The 'model' of convert must be a transformers model, got {type(model).__name__}.")
    parameter = next(iter(model.parameters()), None)
    if parameter is None:
        raise BochnerError("The 'model' of convert has no parameters.")
    quantized = getattr(getattr(model, "config", None), "quantization_config", None) is not None
    if (quantized and settings_of(model) is None) or not parameter.is_floating_point():
        raise BochnerError(
            f"The 'model' of convert must have floating-point weights, got {parameter.dtype}"
            f"{' and a quantization config' if quantized else ''}; load it dequantized."
        )
    if parameter.device == torch.device("meta"):
        raise BochnerError("The 'model' of convert is on the meta device, without weights; load them first.")


def settings_of(model: Any) -> Any:
    """What a converted model's configuration says of the conversion; None if nothing."""
    settings = getattr(getattr(unwrap(model)[0], "config", None), "quantization_config", None)
    return settings if getattr(settings, "quant_method", None) == "bochner" else None
