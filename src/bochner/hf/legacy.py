"""The arguments that `convert`, `advise` and `distill` took before there were objects for them; for one version more.

Each old call warns with the new one, and returns what it returned before.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from bochner._checks import BochnerError, BochnerWarning, is_int
from bochner.hf.config import Calibration, Distillation, Recipe, Target
from bochner.hf.fates import Window
from bochner.maps import FEATURE_MAPS

RECIPE = ("num_features", "window", "sinks", "window_kind", "exact_heads", "train", "options")
TARGET = ("keep", "memory", "minimize", "length", "judge_length")
DATA = ("tokenizer", "max_length", "batch_size")
CONVERT = {*RECIPE, *TARGET, *DATA, "feature_map", "calibration", "plan", "distill", "exact_unit", "select"}
AUTO_EXACT = 0.1  # exact_heads="auto" took at most so many


def is_old_convert(spec: Any, data: Any, old: dict[str, Any]) -> bool:
    """Whether `convert` was called in the old way: by a map's name and keywords."""
    unknown = sorted(set(old) - CONVERT)
    if unknown:
        raise TypeError(f"convert() got an unexpected keyword argument {unknown[0]!r}")
    name = spec is None or (isinstance(spec, str) and (spec == "auto" or spec in FEATURE_MAPS))
    return bool(old) or name or is_int(data)


class OldCall(NamedTuple):
    """An old call of `convert` in the new words; `train`: the distillation that follows a recipe."""

    spec: Any
    data: Calibration | None
    rest: dict[str, Any]
    train: Distillation | None


def read_convert(model: Any, spec: Any, data: Any, old: dict[str, Any]) -> OldCall:
    """What an old call of `convert` asks for; it is warned of."""
    given = {k: v for k, v in old.items() if v is not None}
    if is_int(data):
        given["num_features"], data = data, None
    if not isinstance(spec, (Recipe, Target)):
        given.setdefault("feature_map", spec)
    rest: dict[str, Any] = {name: given[name] for name in ("parts", "unsupported", "seed", "progress") if name in given}
    border = given.get("exact_below", 0)
    rest["exact_below"] = 0 if border == "auto" else border
    made = _spec(model, given)
    calibration = _calibration(given, data)
    shown = [repr(made), *([] if calibration is None else ["data"])]
    defaults = {"parts": None, "unsupported": "keep", "seed": 0, "progress": None, "exact_below": 0}
    shown += [f"{k}={v!r}" for k, v in rest.items() if v != defaults[k]]
    _warn("convert", shown)
    if not isinstance(made, (Recipe, Target)):
        rest = {k: v for k, v in rest.items() if k in ("unsupported", "progress")}
    how = given.get("distill")
    train = _distillation(how if isinstance(how, dict) else {}) if how and not isinstance(made, Target) else None
    return OldCall(made, calibration, rest, train)


def _spec(model: Any, given: dict[str, Any]) -> Any:
    """The object that old keywords stand for."""
    wanted = {name: given[name] for name in TARGET if name in given}
    recipe = {name: given[name] for name in RECIPE if name in given}
    chosen = given.get("feature_map", "auto")
    if "plan" in given:
        extra = sorted({*wanted, *recipe} | ({"feature_map"} if chosen != "auto" else set()))
        if extra:
            raise BochnerError(f"A plan says it all, for every layer: leave out {extra[0]!r}.")
        return given["plan"]
    if "keep" in wanted or "memory" in wanted:
        if recipe or chosen != "auto":
            first = sorted(recipe)[0] if recipe else "feature_map"
            raise BochnerError(f"With a target what each head becomes is searched for: leave out {first!r}.")
        how = given.get("distill")
        train = _distillation(how if isinstance(how, dict) else {}) if how else None
        return Target(**wanted, train=train)
    if wanted:
        raise BochnerError(f"{sorted(wanted)[0]!r} belongs to a Target, as in bochner.Target(keep=0.99, length=4096).")
    recipe["trainable"] = recipe.pop("train", False)
    heads = recipe.get("exact_heads", 0.0)
    if isinstance(heads, str):
        recipe["exact_heads"] = AUTO_EXACT
    elif not isinstance(heads, (int, float)):
        recipe["exact_heads"] = sorted({(i, h // _group(model)) for i, h in heads})
    return Recipe(feature_map=chosen, **recipe)


def _group(model: Any) -> int:
    """Query heads per key head, as the configuration says."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads, keys = getattr(text, "num_attention_heads", 1), getattr(text, "num_key_value_heads", None)
    return heads // keys if keys else 1


def _calibration(given: dict[str, Any], data: Any = None) -> Calibration | None:
    """Old keywords for data as one object."""
    data = given.get("calibration", data)
    sizes = {name: given[name] for name in DATA if name in given}
    if data is None:
        if sizes:
            raise BochnerError(f"{sorted(sizes)[0]!r} belongs to calibration data, and there are none: leave it out.")
        return None
    return Calibration(data, **sizes)


def read_diagnosis(old: dict[str, Any]) -> dict[str, Any]:
    """Keywords of the old `advise(q, k, v)` for `diagnose`; it is warned of."""
    near = {name: old.pop(name) for name in ("window", "sinks", "window_kind") if name in old}
    if near:
        causal = bool(old.get("is_causal"))
        old["near"] = Window(**{"window": 128 if causal else 32, "sinks": 4 if causal else 1, **near})
    _known(old, {"is_causal", "scale", "near", "num_features", "length"}, "diagnose")
    _warn("diagnose", ["k", "v", *(f"{k}={v!r}" for k, v in old.items())], first="q")
    return old


def read_search(calibration: Any, old: dict[str, Any]) -> OldCall:
    """What the old `advise(model, texts)` asks of `search`; it is warned of."""
    given = {k: v for k, v in old.items() if v is not None}
    target = Target(**{name: given.pop(name) for name in TARGET if name in given})
    data = _calibration({**given, "calibration": calibration})
    rest = {k: v for k, v in given.items() if k not in DATA}
    _known(rest, {"parts", "unsupported", "seed", "progress"}, "search")
    _warn("search", [repr(target), "data", *(f"{k}={v!r}" for k, v in rest.items())])
    return OldCall(target, data, rest, None)


def distillation(how: Any, data: Any, old: dict[str, Any]) -> tuple[Distillation, Any]:
    """Old keywords of `distill` as a `Distillation`, and its data as a `Calibration`."""
    if how != Distillation():
        raise TypeError(f"distill() got an unexpected keyword argument {sorted(old)[0]!r}")
    sizes = {name: old[name] for name in DATA if old.get(name) is not None}
    made = _distillation({k: v for k, v in old.items() if k not in DATA})
    _warn("distill", ["data", repr(made)])
    return made, Calibration(data, **sizes) if sizes else data


def _distillation(old: dict[str, Any]) -> Distillation:
    names = {"lr": "rate"}
    gone = sorted({"projections", "layers", "patience", "end_to_end_lr"} & set(old))
    if gone:
        raise BochnerError(f"Distillation has no {gone[0]!r}: all layers are trained, and end to end at half the rate.")
    return Distillation.from_dict({names.get(k, k): v for k, v in old.items()})


def _known(given: dict[str, Any], valid: set[str], name: str) -> None:
    unknown = sorted(set(given) - valid)
    if unknown:
        raise BochnerError(f"advise has no {unknown[0]!r} any more; bochner.{name} has {sorted(valid)}.")


def _warn(name: str, arguments: list[str], first: str = "model") -> None:
    call = f"bochner.{name}({', '.join([first, *arguments])})"
    warnings.warn(f"This call is an old one; the new one is {call}.", BochnerWarning, stacklevel=4)


def upgrade(directory: str | Path) -> None:
    """Rewrite a model directory that an older version saved, in place, so that `from_pretrained` reads it again."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    from bochner.hf.interface import CONVERTED, NAME
    from bochner.hf.plan import Plan

    folder = Path(directory)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "bochner" not in config:
        raise BochnerError(f"There is no conversion of an older version in {str(directory)!r}.")
    plan = Plan.from_dict(config.pop("bochner"))
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        tensors = {_new_key(key): value for key, value in load_file(file).items()}
        save_file(tensors, file, metadata=metadata)
    config |= {"quantization_config": {"quant_method": NAME, "plan": plan.to_dict()}, "attn_implementation": CONVERTED}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _new_key(key: str) -> str:
    for kind in ("hybrid", "kernel"):
        key = key.replace(f".map_norm.{kind}.", f".map_norm.{kind}.phi.")
    return key
