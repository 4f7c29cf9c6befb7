"""The plan of a conversion: for every layer and head, what computes its attention."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from bochner._checks import BochnerError, one_of, positive_int
from bochner.maps import named

FORMAT = 3
KINDS = ("exact", "window", "hybrid", "kernel")
WINDOW_KINDS = ("block", "sliding")
LETTERS = dict(zip(KINDS, "EWHK", strict=True))


@dataclass
class LayerPlan:
    """One attention module: its shape, what each query head becomes, and the map of its linear heads.

    `kinds`, one per query head: `"exact"` softmax; `"window"`, exact in the window and on the sinks and nothing else;
    `"hybrid"`, the same with the kernel elsewhere; `"kernel"` alone. `window_kind`: as in `linear_attention`.
    `scores`: how high each head's attention peaks outside window and sinks (decoders: how much higher on repeated
    text), where it was measured. `train`: the learned parts of the maps are parameters that are to be trained.
    `exact_below`: calls with fewer keys are left to the attention that the module had before. A layer with exact heads
    only is left to it altogether; `reason` says why, and `limit` how many keys it keeps if it has a window of its own.
    `seen`: what the calibration data looked like (`bochner.hf.familiar`).
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    kinds: list[str]
    window: int | None = None
    sinks: int = 0
    window_kind: str = "block"
    feature_map: str = "calibrated"
    num_features: int = 128
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    is_causal: bool = False
    is_cross: bool = False
    scores: list[float] | None = None
    train: bool = False
    exact_below: int = 0
    reason: str = ""
    limit: int = 0
    seen: dict[str, Any] | None = None

    def check(self) -> LayerPlan:
        owner = f"the plan of {self.name!r}"
        for name in ("num_heads", "num_kv_heads", "head_dim", "value_dim", "num_features"):
            positive_int(getattr(self, name), name, owner)
        if len(self.kinds) != self.num_heads:
            raise BochnerError(f"The 'kinds' of {owner} must name {self.num_heads} heads, got {len(self.kinds)}.")
        for kind in self.kinds:
            one_of(kind, "kinds", owner, KINDS)
        if self.window is not None:
            positive_int(self.window, "window", owner)
        one_of(self.window_kind, "window_kind", owner, WINDOW_KINDS)
        if not self.untouched:
            named(self.feature_map, owner)
        functions = [name for name, value in self.options.items() if callable(value)]
        if functions:
            raise BochnerError(
                f"The option {functions[0]!r} of {owner} is a function, which no config.json can hold; give the name "
                "of one of torch.nn.functional, or use the map in bochner.nn."
            )
        if self.exact_below < 0:
            raise BochnerError(f"The 'exact_below' of {owner} must be at least 0, got {self.exact_below}.")
        if self.reason and not self.untouched:
            raise BochnerError(f"{owner} must have exact heads only: {self.reason}.")
        if self.sinks < 0:
            raise BochnerError(f"The 'sinks' of {owner} must be at least 0, got {self.sinks}.")
        near = self.window is not None or self.sinks > 0
        if not near and {"window", "hybrid"} & set(self.kinds):
            raise BochnerError(f"{owner} has heads with a window but neither 'window' nor 'sinks'; set one of them.")
        if self.is_cross and self.window is not None and {"window", "hybrid"} & set(self.kinds):
            raise BochnerError(f"{owner} is cross-attention, which has no local window; use kind 'kernel' or 'exact'.")
        return self

    @property
    def untouched(self) -> bool:
        """Whether nothing of the layer is converted."""
        return all(kind == "exact" for kind in self.kinds)

    @property
    def near(self) -> dict[str, Any]:
        """The keywords of `linear_attention` that say what is attended to exactly."""
        return {"window": self.window, "sinks": self.sinks, "window_kind": self.window_kind}

    @property
    def reach(self) -> int:
        """How many keys a window holds at most: blocks hold the one before the present one, too."""
        return (self.window or 0) * (2 if self.window_kind == "block" else 1)

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def kv_heads_of(self, kind: str) -> list[int]:
        """The key heads that have a query head of this kind."""
        return sorted({h // self.group for h, k in enumerate(self.kinds) if k == kind})

    def cache_bytes(self, length: int, *, element_size: int = 4, converted: bool = True) -> int:
        """Bytes that decoding keeps for one sequence of `length` tokens.

        Encoders keep nothing, and cross-attention its keys whatever becomes of it.
        """
        per_token = (self.head_dim + self.value_dim) * element_size
        if not self.is_causal and not self.is_cross:
            return 0
        if not converted or self.is_cross or self.untouched or length < self.exact_below:
            return self.num_kv_heads * per_token * (min(length, self.limit) if self.limit else length)
        total = len(self.kv_heads_of("exact")) * per_token * length
        for kind in ("window", "hybrid", "kernel"):
            heads = len(self.kv_heads_of(kind))
            if kind != "kernel":
                total += heads * per_token * (self.reach + self.sinks)
            if kind != "window":
                total += heads * self.sums * 4
        return total

    @property
    def sums(self) -> int:
        """Numbers in the kernel's state of one key head."""
        if self.feature_map == "moments":
            return (self.head_dim + 1) * self.options.get("num_groups", 1) * (self.value_dim + 1 + self.head_dim)
        return self.num_features * (self.value_dim + 1)


class Fitted(NamedTuple):
    """The maps of a layer, and the plan of it that they were fitted for."""

    layer: LayerPlan
    tensors: dict[str, Tensor]


@dataclass
class Plan:
    """What every attention module of a model becomes: print it, edit it, save it, pass it back to `convert`.

    `fit_length`: the tokens of the texts that a search has fitted maps to; `maps`: these maps, by the layer's name,
    which are not saved with the plan.

    >>> layer = LayerPlan("layers.0.self_attn", 2, 1, 4, 4, ["exact", "hybrid"], window=8, sinks=1, num_features=16)
    >>> print(Plan([layer]))
    Plan: 1 layers, 2 heads: 1 exact, 1 hybrid
      layers.0.self_attn  EH  block window 8, sinks 1, calibrated m=16
    """

    layers: list[LayerPlan]
    model_type: str = ""
    fit_length: int = 0
    maps: dict[str, Fitted] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.layers:
            raise BochnerError("A plan needs at least one layer.")
        for layer in self.layers:
            layer.check()

    def __str__(self) -> str:
        counts = {k: sum(layer.kinds.count(k) for layer in self.layers) for k in KINDS}
        total = sum(counts.values())
        found = ", ".join(f"{n} {k}" for k, n in counts.items() if n)
        lines = [f"Plan: {len(self.layers)} layers, {total} heads: {found}"]
        width = max(len(layer.name) for layer in self.layers)
        for layer in self.layers:
            heads = "".join(LETTERS[k] for k in layer.kinds)
            block = "block " if layer.window_kind == "block" and layer.window else ""
            near = f"{block}window {layer.window}, sinks {layer.sinks}, " if layer.window or layer.sinks else ""
            what = "as it was" + f": {layer.reason}" * bool(layer.reason)
            if not layer.untouched:
                mapped = {"hybrid", "kernel"} & set(layer.kinds)
                what = near + (f"{layer.feature_map} m={layer.num_features}" if mapped else "no kernel")
            lines.append(f"  {layer.name.ljust(width)}  {heads}  {what}" + (" (cross)" if layer.is_cross else ""))
        lengths = sorted({layer.exact_below for layer in self.layers if not layer.untouched} - {0})
        if lengths:
            lines.append(f"  as it was below {' or '.join(map(str, lengths))} tokens")
        return "\n".join(lines)

    def count(self, kind: str) -> int:
        """How many query heads are of this kind."""
        return sum(layer.kinds.count(one_of(kind, "kind", "Plan.count", KINDS)) for layer in self.layers)

    @property
    def num_heads(self) -> int:
        return sum(layer.num_heads for layer in self.layers)

    @property
    def converted(self) -> list[LayerPlan]:
        """The layers of which something is converted."""
        return [layer for layer in self.layers if not layer.untouched]

    def cache_bytes(self, length: int, *, element_size: int = 4, converted: bool = True) -> int:
        """Bytes that decoding keeps for one sequence of `length` tokens, converted or as before."""
        return sum(x.cache_bytes(length, element_size=element_size, converted=converted) for x in self.layers)

    def fitted(self, layer: LayerPlan) -> dict[str, Tensor] | None:
        """The maps that the plan brings for a layer, unless that was changed since."""
        known = self.maps.get(layer.name)
        same = known is not None and replace(known.layer, exact_below=0) == replace(layer, exact_below=0)
        return known.tensors if known is not None and same else None

    def copy(self) -> Plan:
        return copy.deepcopy(self)

    def to_dict(self) -> dict[str, Any]:
        fitted = {"fit_length": self.fit_length} if self.fit_length else {}
        layers = [asdict(layer) for layer in self.layers]
        return {"format": FORMAT, "model_type": self.model_type, **fitted, "layers": layers}

    @classmethod
    def from_dict(cls, d: Any) -> Plan:
        if not isinstance(d, dict) or "layers" not in d:
            raise BochnerError(
                "This is not a plan: it has no 'layers'. Plans are made by convert and saved by Plan.save."
            )
        if d.get("format") not in (1, 2, FORMAT):
            raise BochnerError(
                f"The plan has format {d.get('format')!r}, this version reads formats 1 to {FORMAT}; convert the "
                "original model again."
            )
        # Format 2 knew no 'exact_below', which is 0 where it is missing; format 1 knew sliding windows only.
        old = {"window_kind": "sliding"} if d["format"] == 1 else {}
        try:
            layers = [LayerPlan(**{**old, **layer}) for layer in d["layers"]]
        except TypeError as error:
            raise BochnerError(f"The plan has unknown or missing fields: {error}.") from error
        return cls(layers, d.get("model_type", ""), d.get("fit_length", 0))

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
