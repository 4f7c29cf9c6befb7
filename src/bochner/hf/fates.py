"""What may become of a key head: the fates, small settings each with the module that computes them, and their registry.

A fate says what a head attends to and how: `Exact` softmax; `Window`, softmax over near keys and the first ones;
`Hybrid`, the same with a kernel for all other keys; `Kernel` alone. Query heads share the fate of their key head. To
add one of your own, write a subclass of `Fate` and of `FateModule`, and call `register_fate`: plans, searches, decoding
and files then know it.

>>> Window(64, 4)
Window(window=64, sinks=4, window_kind='block')
>>> fate_from_dict(Window(64, 4).to_dict()) == Window(64, 4)
True
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bochner._checks import BochnerError, lookup, positive_int
from bochner._products import is_composed
from bochner.attention import PreparedMap
from bochner.hf.calls import Call, attend, attend_from, exact
from bochner.hf.config import Recipe, check_near
from bochner.maps import feature_map, named
from bochner.maps.base import FeatureMap, NoFeatures
from bochner.maps.exponential import CalibratedFeatures
from bochner.maps.generalized import function_name
from bochner.maps.landmark import LandmarkFeatures
from bochner.maps.landmark_fit import Near

GROWTH = 256  # tokens by which the keys of exact heads grow at a time
MAX_A = 0.12  # the dense A of a calibrated map stays below 1/8, where its variance ends
LEARNED = ("centre_query", "centre_key", "basis_query", "basis_key", "a")  # what of a calibrated map can be trained
ROWS_AT_ONCE = (128, 512)  # rows of a decoder's window that are computed at a time, at least and at most
CAUSAL_WINDOWS, WINDOWS = (64, 128, 256, 512, 1024), (16, 32, 64, 128)  # that a search tries
CAUSAL_SINKS, SINKS = 4, 1
SEARCHED_MAP, SEARCHED_FEATURES = "landmark", 64  # the kernel that a search tries
Layer = Any  # a `LayerPlan`, whose module imports this one


@dataclass(frozen=True)
class Fate:
    """What becomes of a key head; plain, hashable settings.

    `name`: in files and in `FATES`. `letter`: in printed plans. `has_map`: whether it has a feature map to be fitted.
    """

    name: ClassVar[str] = ""
    letter: ClassVar[str] = "?"
    has_map: ClassVar[bool] = False

    def check(self, layer: Layer) -> None:
        """Refuse, in one sentence, what this layer cannot have."""

    def shared(self) -> Fate:
        """Key heads of a layer that agree in this are computed by one module, in one call."""
        return self

    def cache_bytes(self, layer: Layer, length: int, element_size: int) -> int:
        """Bytes that decoding holds for one key head after `length` tokens."""
        raise NotImplementedError

    def build(self, layer: Layer, heads: Sequence[int], seed: int) -> FateModule:
        """The module that computes some key heads of a layer."""
        raise NotImplementedError

    @classmethod
    def candidates(cls, layer: Layer, length: int) -> list[Fate]:
        """What a search tries for the heads of a layer in texts of `length` tokens."""
        return []

    def to_dict(self) -> dict[str, Any]:
        return {"fate": self.name, **asdict(self)}


class FateModule(nn.Module):
    """Attention of some key heads of a layer; every call holds these heads alone."""

    def __init__(self, layer: Layer, heads: Sequence[int]) -> None:
        super().__init__()
        self.heads, self.is_causal, self.group = list(heads), layer.is_causal, layer.group

    def forward(self, call: Call) -> Tensor:
        """(b, h, n, v) of a whole sequence; of a causal one what decoding from nothing gives."""
        return self.decode(call, None)[0]

    def decode(self, call: Call, state: Any) -> tuple[Tensor, Any]:
        """The rows of new tokens behind a state, None at first, and the state after them.

        Key and value are new, `padding` is that of all keys so far. A state has `nbytes`, and `map(f)` applies f to
        its tensors, whose first axis is the batch.
        """
        raise NotImplementedError

    def fit(self, samples: Any) -> None:
        """Calibrate what can be, on the layer's queries, keys and values (`bochner.hf.calibrate.Samples`)."""

    def learned(self, projections: bool = False) -> list[nn.Parameter]:
        """Make what can be learned parameters that require gradients; returns them."""
        return []

    def take_heads(self, other: FateModule) -> None:
        """Take over from a module of the same fate what it has for these key heads."""
        rows = [other.heads.index(g) for g in self.heads]
        shared = len(other.heads)
        own = {k: v[rows] if v.ndim and len(v) == shared else v for k, v in other.state_dict().items()}
        self.load_state_dict(own)


@dataclass(frozen=True)
class Exact(Fate):
    """Softmax attention over all keys."""

    name = "exact"
    letter = "E"

    def cache_bytes(self, layer: Layer, length: int, element_size: int) -> int:
        held = min(length, layer.limit) if layer.limit else length
        return (layer.head_dim + layer.value_dim) * element_size * held

    def build(self, layer: Layer, heads: Sequence[int], seed: int) -> FateModule:
        return ExactHeads(layer, heads)


class Keys(NamedTuple):
    """The keys and values of exact heads, with room for more; `filled` of them are there."""

    k: Tensor
    v: Tensor
    filled: int

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self[:2])

    def map(self, f: Any) -> Keys:
        return Keys(f(self.k), f(self.v), self.filled)

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        return self.k[..., : self.filled, :], self.v[..., : self.filled, :]


def with_keys(state: Keys | None, key: Tensor, value: Tensor) -> Keys:
    """More keys behind those that there are."""
    n = key.shape[-2]
    k, v, filled = state if state is not None else (key[..., :0, :], value[..., :0, :], 0)
    if filled + n > k.shape[-2]:
        room = -(-(filled + n) // GROWTH) * GROWTH - filled
        k, v = (
            torch.cat([old[..., :filled, :], old.new_zeros(*old.shape[:2], room, old.shape[-1])], dim=-2)
            for old in (k, v)
        )
    k[..., filled : filled + n, :] = key
    v[..., filled : filled + n, :] = value
    return Keys(k, v, filled + n)


class ExactHeads(FateModule):
    """Softmax over all keys."""

    def forward(self, call: Call) -> Tensor:
        return exact(call)

    def decode(self, call: Call, state: Keys | None) -> tuple[Tensor, Keys]:
        state = with_keys(state, call.key, call.value)
        key, value = state.held
        return exact(call._replace(key=key, value=value)), state


@dataclass(frozen=True)
class Window(Fate):
    """Softmax over near keys and the first ones (`sinks`), as in `linear_attention`, and nothing else."""

    window: int | None = None
    sinks: int = 0
    window_kind: str = "block"

    name = "window"
    letter = "W"

    def __post_init__(self) -> None:
        check_near(self.window, self.sinks, self.window_kind, f"the fate {self.name!r}")
        if self.window is None and not self.sinks:
            raise BochnerError(f"The fate {self.name!r} has neither 'window' nor 'sinks'; set one of them.")

    def check(self, layer: Layer) -> None:
        if layer.is_cross:
            raise BochnerError(
                f"The plan of {layer.name!r} is cross-attention, which has no local window; use 'kernel' or 'exact'."
            )

    @property
    def near(self) -> dict[str, Any]:
        """The keywords of `linear_attention` that say what is attended to exactly."""
        return {"window": self.window, "sinks": self.sinks, "window_kind": self.window_kind}

    @property
    def reach(self) -> int:
        """How many keys a window holds at most: blocks hold the one before the present one as well."""
        return (self.window or 0) * (2 if self.window_kind == "block" else 1)

    def cache_bytes(self, layer: Layer, length: int, element_size: int) -> int:
        return (layer.head_dim + layer.value_dim) * element_size * min(length, self.reach + self.sinks)

    def __str__(self) -> str:
        return f"{self._near_in_words()}, no kernel"

    def _near_in_words(self) -> str:
        return (f"{self.window_kind} window {self.window}, " if self.window else "") + f"sinks {self.sinks}"

    def build(self, layer: Layer, heads: Sequence[int], seed: int) -> FateModule:
        return NearHeads(layer, heads, NoFeatures(layer.head_dim), self)

    @classmethod
    def candidates(cls, layer: Layer, length: int) -> list[Fate]:
        return [cls(**near) for near in searched_windows(layer, length)]


def searched_windows(layer: Layer, length: int) -> list[dict[str, Any]]:
    """Windows that leave out something of texts of `length` tokens; as much memory sees more when a window slides."""
    if layer.is_cross:
        return []
    if layer.is_causal:
        sizes = [w for w in CAUSAL_WINDOWS if w <= length // 2] or [CAUSAL_WINDOWS[0]]
        return [{"window": w, "sinks": CAUSAL_SINKS, "window_kind": "sliding"} for w in sizes[-4:]]
    sizes = [w for w in WINDOWS if 3 * w <= length // 2] or [WINDOWS[0]]
    return [{"window": w, "sinks": SINKS, "window_kind": "block"} for w in sizes]


@dataclass(frozen=True)
class Mapped(Fate):
    """What fates with a feature map share; `options`: of the map, plain and hashable."""

    feature_map: str = "calibrated"
    num_features: int = 128
    options: tuple[tuple[str, Any], ...] = ()

    has_map = True

    def __post_init__(self) -> None:
        owner = f"the fate {self.name!r}"
        named(self.feature_map, owner)
        positive_int(self.num_features, "num_features", owner)
        items = self.options.items() if isinstance(self.options, dict) else self.options
        plain = tuple(sorted((str(key), function_name(value) or value) for key, value in items))
        functions = [key for key, value in plain if callable(value)]
        if functions:
            raise BochnerError(
                f"The option {functions[0]!r} of {owner} is a function, which no file can hold; give the name of one "
                "of torch.nn.functional, or use the map in bochner.nn."
            )
        object.__setattr__(self, "options", plain)

    def __str__(self) -> str:
        near = f"{self._near_in_words()}, " if isinstance(self, Window) else ""
        return f"{near}{self.feature_map} m={self.num_features}"

    def cache_bytes(self, layer: Layer, length: int, element_size: int) -> int:
        """Of the kernel's state, in float32."""
        if self.feature_map == "moments":
            groups = dict(self.options).get("num_groups", 1)
            return int((layer.head_dim + 1) * groups * (layer.value_dim + 1 + layer.head_dim)) * 4
        return self.num_features * (layer.value_dim + 1) * 4

    def build(self, layer: Layer, heads: Sequence[int], seed: int) -> FateModule:
        sizes = {"dim": layer.head_dim, "num_features": self.num_features, "num_heads": len(heads)}
        made = feature_map(self.feature_map, **sizes, seed=seed, **dict(self.options))
        if isinstance(made, LandmarkFeatures):
            made.warns = False  # it is going to be fitted, or only timed
        return NearHeads(layer, heads, made, self if isinstance(self, Window) else None)


@dataclass(frozen=True)
class Kernel(Mapped):
    """Linear attention by a feature map over all keys."""

    name = "kernel"
    letter = "K"

    @classmethod
    def candidates(cls, layer: Layer, length: int) -> list[Fate]:
        return [cls(SEARCHED_MAP, SEARCHED_FEATURES)] if layer.is_cross or not layer.is_causal else []


@dataclass(frozen=True)
class Hybrid(Mapped, Window):
    """A window and sinks as in `Window`, and a kernel for all other keys, with one normaliser."""

    name = "hybrid"
    letter = "H"

    def __post_init__(self) -> None:
        Window.__post_init__(self)
        Mapped.__post_init__(self)

    def cache_bytes(self, layer: Layer, length: int, element_size: int) -> int:
        near = Window.cache_bytes(self, layer, length, element_size)
        return near + Mapped.cache_bytes(self, layer, length, element_size)

    @classmethod
    def candidates(cls, layer: Layer, length: int) -> list[Fate]:
        """Each is a fit: of an encoder's windows every other one, of a decoder's the second."""
        near = searched_windows(layer, length)
        tried = near[1:2] or near[:1] if layer.is_causal else near[::-1][::2][::-1]
        return [cls(**x, feature_map=SEARCHED_MAP, num_features=SEARCHED_FEATURES) for x in tried]


def fate_of(recipe: Recipe, is_cross: bool) -> Fate:
    """What a recipe without `"auto"` makes of the heads of a layer; cross-attention has no window."""
    near: dict[str, Any] = {"window": recipe.window, "sinks": recipe.sinks, "window_kind": recipe.window_kind}
    local = (recipe.window is not None or recipe.sinks > 0) and not is_cross
    if recipe.feature_map is None:
        return Window(**near) if local else EXACT
    mapped: dict[str, Any] = {"feature_map": recipe.feature_map, "num_features": recipe.num_features}
    mapped["options"] = dict(recipe.options)
    return Hybrid(**near, **mapped) if local else Kernel(**mapped)


class NearHeads(FateModule):
    """Heads with a map `phi`, which may be none, and a window, which may be none."""

    def __init__(self, layer: Layer, heads: Sequence[int], phi: FeatureMap, near: Window | None) -> None:
        super().__init__(layer, heads)
        self.phi, self.near = phi, near
        self._held: tuple[Any, PreparedMap] | None = None

    @property
    def _keywords(self) -> dict[str, Any]:
        return {} if self.near is None else self.near.near

    def forward(self, call: Call) -> Tensor:
        self._stay_defined()
        near = self._plain_window(call)
        if near is None:
            return attend(call, self.phi, **self._keywords)
        (q, k, v), first = call[:3], slice(0, near.sinks)
        return window_rows(q, k, v, (k[..., first, :], v[..., first, :]), near, 0, call.scale)

    def decode(self, call: Call, state: Any) -> tuple[Tensor, Any]:
        if call.padding is not None:
            call = call._replace(padding=call.padding[:, -call.key.shape[-2] :])
        near = self._plain_window(call)
        if near is None:
            return attend_from(call, self._prepared(call), state, **self._keywords)
        # The fused rows, and beside them a state that takes their keys in.
        (q, k, v), past = call[:3], None if state is None else state.window
        _, after = attend_from(call._replace(query=q[..., -1:, :]), self.phi, state, **self._keywords)
        first = 0
        if past is not None:
            k, v = torch.cat([past.held.k, k], dim=-2), torch.cat([past.held.v, v], dim=-2)
            first = past.seen - past.held.k.shape[-2]
        assert after.window is not None
        sinks = (after.window.sinks.k, after.window.sinks.v)
        return window_rows(q, k, v, sinks, near, first, call.scale), after

    def _prepared(self, call: Call) -> Any:
        """The map with all that no token changes computed before, until its numbers change: a third of a step."""
        tensors = [*self.phi.parameters(), *self.phi.buffers()]
        dtype = torch.promote_types(call.query.dtype, torch.float32)
        if call.query.shape[-2] > 1 or any(t.requires_grad or t.is_inference() for t in tensors):
            return self.phi
        made_for = (call.scale, dtype, *((t.data_ptr(), t._version) for t in tensors))
        if self._held is None or self._held[0] != made_for:
            self._held = made_for, PreparedMap(self.phi, call.scale, dtype)
        return self._held[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}  # copies and files make their own

    def _plain_window(self, call: Call) -> Near | None:
        """The window of a decoder's heads without a kernel, where several rows can take torch's fused attention."""
        near = self.near
        if near is None or near.has_map or near.window is None or not self.is_causal or call.query.shape[-2] == 1:
            return None
        if is_composed() or (call.padding is not None and bool(call.padding.any())):
            return None
        return Near(True, near.window, near.sinks, near.window_kind)

    def fit(self, samples: Any) -> None:
        if isinstance(self.phi, NoFeatures) or not samples.q:
            return
        rows = [g * self.group + i for g in self.heads for i in range(self.group)]
        q, k, v = [t[rows] for t in samples.q], [t[self.heads] for t in samples.k], [t[self.heads] for t in samples.v]
        if isinstance(self.phi, LandmarkFeatures):
            self.phi.calibrate_(q, k, v, is_causal=self.is_causal, **self._keywords)
        elif type(self.phi) is CalibratedFeatures:
            self.phi.fit_(samples.moments_of(self.heads, is_causal=self.is_causal, **self._keywords))
        else:
            self.phi.calibrate_(torch.cat(q, dim=1), torch.cat(k, dim=1))

    def learned(self, projections: bool = False) -> list[nn.Parameter]:
        phi = self.phi
        if isinstance(phi, CalibratedFeatures):
            phi.trainable_([*LEARNED, "weight"] if projections and hasattr(phi.projection, "weight") else LEARNED)
        elif isinstance(phi, LandmarkFeatures) or (projections and not list(phi.parameters())):
            phi.trainable_()
        phi.requires_grad_(True)
        return list(phi.parameters())

    @torch.no_grad()
    def _stay_defined(self) -> None:
        """Keep a trained map where it is defined."""
        a = getattr(self.phi, "a", None)
        if isinstance(a, nn.Parameter) and a.requires_grad and bool((a > MAX_A).any()):
            a.clamp_(max=MAX_A)


def window_rows(
    q: Tensor, k: Tensor, v: Tensor, sinks: tuple[Tensor, Tensor], near: Near, first: int, scale: float
) -> Tensor:
    """Rows (b, h, n, v) of q (b, h, n, d), which are the last of the keys k, v (b, g, s, .) at places from `first` on.

    `sinks`: the keys and values of places 0, 1, ..., for rows whose window begins behind them. A piece of the rows at a
    time sees the keys from the first that its first row sees to its own last one.
    """
    n, s, w = q.shape[-2], k.shape[-2], near.window
    assert w is not None
    start, size = first + s - n, min(max(w // 2, ROWS_AT_ONCE[0]), ROWS_AT_ONCE[1])
    if _first_seen(near, start + n - 1) == 0:  # all keys
        size = n
    rows = []
    for a in range(start, start + n, size):
        b, low = min(a + size, start + n), _first_seen(near, a)
        keys, values = (t[..., low - first : b - first, :] for t in (k, v))
        count = min(low, sinks[0].shape[-2])  # sinks that are not among the keys
        if count:
            keys, values = (
                torch.cat([x[..., :count, :], y], dim=-2) for x, y in zip(sinks, (keys, values), strict=True)
            )
        allowed = None
        if a > 0 or _first_seen(near, b - 1) > 0:
            i, j = torch.arange(a, b, device=q.device), torch.arange(low, b, device=q.device)
            j = torch.cat([torch.arange(count, device=q.device), j])
            allowed = near.allowed(i, j) & ~near.far(i, j)
        piece = q[..., a - start : b - start, :]
        options: dict[str, Any] = {"attn_mask": allowed, "is_causal": allowed is None, "scale": scale}
        rows.append(scaled_dot_product_attention(piece, keys, values, **options, enable_gqa=q.shape[1] != k.shape[1]))
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-2)


def _first_seen(near: Near, i: int) -> int:
    """The first place that the row at place i sees in its window."""
    w = near.window or 0
    return max(0, (i // w - 1) * w if near.window_kind == "block" else i - w + 1)


def fate_from_dict(data: dict[str, Any]) -> Fate:
    """A fate from plain data, as `to_dict` makes it."""
    if not isinstance(data, dict) or "fate" not in data:
        raise BochnerError(f"This is not a fate of a head: {data!r}.")
    cls = lookup(FATES, data["fate"], "fate of a head")
    known = {f.name for f in fields(cls)}
    values = {k: v for k, v in data.items() if k != "fate"}
    if set(values) - known:
        raise BochnerError(f"The fate {data['fate']!r} has no setting {sorted(set(values) - known)[0]!r}.")
    if isinstance(values.get("options"), list):
        values["options"] = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in values["options"])
    return cls(**values)


def register_fate(cls: type[Fate]) -> type[Fate]:
    """Make a fate of your own known under its `name`; returns the class, so that it can be a decorator."""
    if not (isinstance(cls, type) and issubclass(cls, Fate) and cls.name):
        raise BochnerError(f"register_fate takes a subclass of Fate with a 'name', got {cls!r}.")
    if cls.name in FATES and FATES[cls.name] is not cls:
        raise BochnerError(f"There is a fate {cls.name!r} already; give yours another 'name'.")
    FATES[cls.name] = cls
    return cls


FATES: dict[str, type[Fate]] = {cls.name: cls for cls in (Exact, Window, Hybrid, Kernel)}
EXACT = Exact()
