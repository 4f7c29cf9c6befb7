"""The plan of a conversion: for every layer and key head, what computes its attention."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from bochner._checks import BochnerError, is_int, positive_int, spawn_seed
from bochner.hf.fates import EXACT, FATES, Fate, fate_from_dict
from bochner.hf.selected_heads import Selected

FORMAT = 4


@dataclass
class LayerPlan:
    """One attention module: its shape, and the fate of each key head.

    `reason`: why a layer stays as it was, where it must; `limit`: how many keys it holds if it has a window of its own.
    `trainable`: the learned parts of the maps are parameters that are to be trained. `scores`: how much each key head
    retrieves, where it was measured. `seen`: what the calibration data looked like (`bochner.hf.drift`).
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    fates: list[Fate]
    is_causal: bool = False
    is_cross: bool = False
    seed: int = 0
    trainable: bool = False
    reason: str = ""
    limit: int = 0
    scores: list[float] | None = None
    seen: dict[str, Any] | None = None

    def check(self) -> LayerPlan:
        owner = f"the plan of {self.name!r}"
        for name in ("num_heads", "num_kv_heads", "head_dim", "value_dim"):
            positive_int(getattr(self, name), name, owner)
        if len(self.fates) != self.num_kv_heads or not all(isinstance(fate, Fate) for fate in self.fates):
            raise BochnerError(f"The 'fates' of {owner} must be {self.num_kv_heads} fates, one for each key head.")
        if self.reason and not self.untouched:
            raise BochnerError(f"The heads of {self.name!r} must stay exact: {self.reason}.")
        for fate in self.fates:
            fate.check(self)
        return self

    @property
    def untouched(self) -> bool:
        """Whether nothing of the layer is converted."""
        return all(fate == EXACT for fate in self.fates)

    @property
    def has_map(self) -> bool:
        return any(fate.has_map for fate in self.fates)

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.num_heads // self.num_kv_heads

    def heads_of(self, name: str) -> list[int]:
        """The key heads with a fate of this name."""
        return [g for g, fate in enumerate(self.fates) if fate.name == name]

    def cache_bytes(self, length: int, *, element_size: int = 4, converted: bool = True) -> int:
        """Bytes that decoding holds for one sequence of `length` tokens.

        Encoders hold nothing, and cross-attention its keys whatever becomes of it.
        """
        if not self.is_causal and not self.is_cross:
            return 0
        fates = self.fates if converted and not self.is_cross else [EXACT] * self.num_kv_heads
        return sum(fate.cache_bytes(self, length, element_size) for fate in fates)

    def to_dict(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "fates"}
        kinds = list(dict.fromkeys(self.fates))
        return {**plain, "fates": [f.to_dict() for f in kinds], "heads": [kinds.index(f) for f in self.fates]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LayerPlan:
        data = dict(data)
        kinds = [fate_from_dict(x) for x in data.pop("fates")]
        return cls(fates=[kinds[i] for i in data.pop("heads")], **data)

    def __str__(self) -> str:
        if self.untouched:
            return "as it was" + (f": {self.reason}" if self.reason else "")
        chosen = [fate.budget for fate in self.fates if isinstance(fate, Selected)]
        words = dict.fromkeys(str(fate.shared()) for fate in self.fates if fate != EXACT)
        return "; ".join(words) + (f", older keys {' '.join(map(str, chosen))}" if chosen else "")


class Fitted(NamedTuple):
    """The maps of a layer, and the fates that they were fitted for."""

    fates: list[Fate]
    tensors: dict[str, Tensor]


@dataclass
class Plan:
    """What every attention module of a model becomes: print it, edit it, save it, pass it back to `convert`.

    `fit_length`: the tokens of the texts that a search has fitted maps to; `maps`: these maps, by the layer's name,
    which are not saved with the plan.

    >>> from bochner.hf import Hybrid
    >>> fates = [EXACT, Hybrid(8, 1, num_features=16)]
    >>> print(Plan([LayerPlan("layers.0.self_attn", 2, 2, 4, 4, fates)]))
    Plan: 1 layer, 2 key heads: 1 exact, 1 hybrid
      layers.0.self_attn  EH  block window 8, sinks 1, calibrated m=16
    """

    layers: list[LayerPlan]
    model_type: str = ""
    fit_length: int = 0
    maps: dict[str, Fitted] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.layers or not all(isinstance(layer, LayerPlan) for layer in self.layers):
            raise BochnerError(f"The 'layers' of a Plan must be LayerPlans, one at least, got {self.layers!r}.")
        for layer in self.layers:
            layer.check()

    @classmethod
    def of(
        cls, shapes: Mapping[str, Any], model_type: str, seed: int = 0, fate: Callable[[Any], Fate] | None = None
    ) -> Plan:
        """A plan for modules (`bochner.hf.observe.Shape`): all heads of one have the same fate, by default exact."""
        if not is_int(seed) or seed < 0:
            raise BochnerError(f"The 'seed' of convert must be an int >= 0, got {seed!r}.")
        layers = []
        for i, x in enumerate(shapes.values()):
            reason, limit = x.obstacle or ("", 0)
            fates = [EXACT if reason or fate is None else fate(x)] * x.num_kv_heads
            layer = LayerPlan(x.name, x.num_heads, x.num_kv_heads, x.head_dim, x.value_dim, fates, x.is_causal)
            layers.append(replace(layer, is_cross=x.is_cross, seed=spawn_seed(seed, i), reason=reason, limit=limit))
        return cls(layers, model_type)

    def __str__(self) -> str:
        counts = Counter(fate.name for layer in self.layers for fate in layer.fates)
        found = ", ".join(f"{counts[name]} {name}" for name in FATES if counts[name])
        s, width = "s" * (len(self.layers) != 1), max(len(layer.name) for layer in self.layers)
        lines = [f"Plan: {len(self.layers)} layer{s}, {sum(counts.values())} key heads: {found}"]
        for layer in self.layers:
            heads = "".join(fate.letter for fate in layer.fates)
            lines.append(f"  {layer.name.ljust(width)}  {heads}  {layer}" + (" (cross)" if layer.is_cross else ""))
        return "\n".join(lines)

    def count(self, name: str) -> int:
        """How many query heads have a fate of this name."""
        return sum(layer.group * len(layer.heads_of(name)) for layer in self.layers)

    @property
    def num_heads(self) -> int:
        return sum(layer.num_heads for layer in self.layers)

    @property
    def converted(self) -> list[LayerPlan]:
        """The layers of which something is converted."""
        return [layer for layer in self.layers if not layer.untouched]

    def cache_bytes(self, length: int, *, element_size: int = 4, converted: bool = True) -> int:
        """Bytes that decoding holds for one sequence of `length` tokens, converted or as before."""
        return sum(x.cache_bytes(length, element_size=element_size, converted=converted) for x in self.layers)

    def fitted(self, layer: LayerPlan) -> dict[str, Tensor] | None:
        """The maps that the plan brings for a layer, unless its fates were changed since."""
        known = self.maps.get(layer.name)
        return known.tensors if known is not None and known.fates == layer.fates else None

    def copy(self) -> Plan:
        return copy.deepcopy(self)

    def to_dict(self) -> dict[str, Any]:
        layers = [layer.to_dict() for layer in self.layers]
        return {"format": FORMAT, "model_type": self.model_type, "fit_length": self.fit_length, "layers": layers}

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        if not isinstance(data, dict) or "layers" not in data:
            raise BochnerError("This is not a plan: it has no 'layers'. Plans are made by convert and search.")
        if data.get("format") != FORMAT:
            raise BochnerError(
                f"The plan has format {data.get('format')!r}, this version reads format {FORMAT}; convert the original "
                "model again."
            )
        try:
            made = [LayerPlan.from_dict(layer) for layer in data["layers"]]
        except (KeyError, TypeError, IndexError) as error:
            raise BochnerError(f"The plan has unknown or missing fields: {error}.") from error
        return cls(made, data.get("model_type", ""), data.get("fit_length", 0))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, json.JSONDecodeError) as error:
            raise BochnerError(f"No plan could be read from {str(path)!r}: {error}.") from error
