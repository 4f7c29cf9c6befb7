"""What `convert` attaches to an attention module: its maps, and attention by the plan's kinds of heads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bochner._checks import spawn_seed
from bochner._products import is_composed
from bochner.attention import linear_attention
from bochner.attention.features import EMPTY
from bochner.attention.layout import leading
from bochner.attention.state import State
from bochner.hf.local import local_rows
from bochner.hf.plan import LayerPlan
from bochner.maps import feature_map
from bochner.maps.base import FeatureMap, Features
from bochner.maps.exponential import CalibratedFeatures
from bochner.maps.landmark import LandmarkFeatures
from bochner.maps.landmark_fit import Near

if TYPE_CHECKING:
    from bochner.hf.cache import RecurrentLayer

CHILD = "linear_attn"  # the name under which an attention module holds its `LinearAttention`
LINEAR = ("window", "hybrid", "kernel")
WITH_MAP = ("hybrid", "kernel")
MAX_A = 0.12  # the dense A of a calibrated map stays below 1/8, where its variance ends
LEARNED = ("centre_query", "centre_key", "basis_query", "basis_key", "a")  # what of a calibrated map can be trained


class Call(NamedTuple):
    """One attention call: query (b, h, n, d), key (b, g, s, d), value (b, g, s, v); `padding` (b, s) True at padding.

    With fewer queries than keys in causal attention, the queries are the last ones. `sink_logits` (h,): the logit of a
    key without a value, which enters each row's normaliser and nothing else. `segments` (b, n): the sequence that each
    token of a packed batch belongs to.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool
    padding: Tensor | None
    scale: float
    sink_logits: Tensor | None = None
    segments: Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.query.shape[1] // self.key.shape[1]


class NoFeatures(FeatureMap):
    """The map of heads without a kernel term: its features are zero, relative to nothing."""

    positive = True
    unbiased = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim, 1)

    def _features(self, x: Tensor, role: str) -> Features:
        zero = torch.zeros_like(x[..., :1])
        return Features(zero, zero + EMPTY)


class Origin(NamedTuple):
    """A configuration above a `LinearAttention`, and the attention implementation that it had before."""

    config: Any
    implementation: str


class LinearAttention(nn.Module):
    """Attention of one module by its plan: each kind of head runs on its own key heads, then the heads are put back.

    Key heads whose query heads differ in kind run under each of them; memory is saved by whole key heads. With
    `plan.train` the learned parts of the maps are parameters that require gradients, else nothing does.
    """

    # All there are, so that one conversion can tell whether another one needs a configuration they share.
    everywhere: ClassVar[WeakSet[LinearAttention]] = WeakSet()

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__()
        self.everywhere.add(self)
        self.plan = plan.check()
        self.alarm: Any = None  # a `familiar.Alarm`, that of the model it is attached to
        self.origins: tuple[Origin, ...] = ()  # the first is that of its own module
        maps: dict[str, FeatureMap] = {}
        for i, kind in enumerate(WITH_MAP):
            heads = plan.kv_heads_of(kind)
            if heads:
                made = feature_map(
                    plan.feature_map,
                    dim=plan.head_dim,
                    num_features=plan.num_features,
                    num_heads=len(heads),
                    seed=spawn_seed(plan.seed, i),
                    **plan.options,
                )
                if isinstance(made, LandmarkFeatures):
                    made.warns = False  # fitted by `convert`, or only to be timed
                maps[kind] = made
        # Trainers leave parameters under a name ending in "_norm" out of weight decay, where learned maps belong.
        self.map_norm = nn.ModuleDict(maps)
        self._nothing = NoFeatures(plan.head_dim)
        # Key heads of each kind, and for each query head its place in the concatenated results.
        self.parts = [(kind, plan.kv_heads_of(kind)) for kind in ("exact", *LINEAR) if plan.kv_heads_of(kind)]
        place: dict[tuple[str, int], int] = {}
        for kind, heads in self.parts:
            for g in heads:
                for i in range(plan.group):
                    place[kind, g * plan.group + i] = len(place)
        self.order = [place[kind, head] for head, kind in enumerate(plan.kinds)]
        self._indices: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
        self.in_order = self.order == list(range(plan.num_heads)) and len(place) == plan.num_heads
        self.close_()
        if plan.train:
            self.open_()

    def __setstate__(self, state: dict[str, Any]) -> None:  # of deep copies
        super().__setstate__(state)
        self.everywhere.add(self)

    def map_of(self, kind: str) -> FeatureMap:
        return self._nothing if kind == "window" else self.map_norm[kind]  # type: ignore[return-value]

    def open_(self, *, projections: bool = False) -> list[nn.Parameter]:
        """Make the learned parts of the maps parameters that require gradients; returns them.

        A calibrated map's centres, bases and A are learned parts, and all of a landmark map but its caps; with
        `projections` random frequencies are too.
        """
        self.trained = True
        found = []
        for kind in self.map_norm:
            phi = self.map_of(kind)
            if isinstance(phi, CalibratedFeatures):
                phi.trainable_([*LEARNED, "weight"] if projections else LEARNED)
            elif isinstance(phi, LandmarkFeatures) or (projections and not list(phi.parameters())):
                phi.trainable_()
            phi.requires_grad_(True)
            found += list(phi.parameters())
        return found

    def close_(self) -> None:
        """Back to what the plan says of training."""
        self.trained = self.plan.train
        self.requires_grad_(self.plan.train)

    @torch.no_grad()
    def hold_(self) -> None:
        """Keep what is trained where the maps are defined; every forward pass of trained maps begins with it."""
        for kind in self.map_norm:
            phi = self.map_of(kind)
            if isinstance(phi, CalibratedFeatures) and bool((phi.a > MAX_A).any()):
                phi.a.clamp_(max=MAX_A)

    def leaves(self, keys: int) -> bool:
        """Whether a call with so many keys is left to the attention that the module had before."""
        return (keys < self.plan.exact_below and not self.trained) or self.plan.untouched

    def forward(self, call: Call, cache: RecurrentLayer | None = None) -> Tensor:
        """(b, h, n, v). With a cache, key and value are those it has not seen and `padding` is that of all keys."""
        if self.trained:
            self.hold_()
        if call.segments is not None:
            return one_by_one(call, self)
        outs = []
        for kind, heads in self.parts:
            part = call._replace(
                query=self._pick(call.query, heads, self.plan.group),
                key=self._pick(call.key, heads, 1),
                value=self._pick(call.value, heads, 1),
            )
            if call.sink_logits is not None:
                part = part._replace(sink_logits=self._pick(call.sink_logits[None], heads, self.plan.group)[0])
            if kind != "exact":
                outs.append(self._linear(kind, part) if cache is None else self._recurrent(kind, part, cache))
                continue
            if cache is not None:
                key, value = cache.append(part.key, part.value)
                part = part._replace(key=key, value=value)
            outs.append(exact(part))
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        return out if self.in_order else out.index_select(1, self._index(tuple(self.order), out.device))

    def _linear(self, kind: str, call: Call) -> Tensor:
        near = self._local(kind, call)
        if near is None:
            return attend(call, self.map_of(kind), **self._near(kind))
        (q, k, v), first = call[:3], slice(0, near.sinks)
        return local_rows(q, k, v, k[..., first, :], v[..., first, :], near, first=0, scale=call.scale)

    def _local(self, kind: str, call: Call) -> Near | None:
        """The window of a decoder's heads that have no kernel, where several rows can take the short way."""
        plan = self.plan
        if kind != "window" or not plan.is_causal or plan.window is None or call.query.shape[-2] == 1:
            return None
        if call.sink_logits is not None or is_composed() or (call.padding is not None and bool(call.padding.any())):
            return None
        return Near(True, plan.window, plan.sinks, plan.window_kind)

    def _near(self, kind: str) -> dict[str, Any]:
        return {} if kind == "kernel" else self.plan.near

    def _recurrent(self, kind: str, call: Call, cache: RecurrentLayer) -> Tensor:
        local = self._local(kind, call)
        if local is not None:
            return self._go_on_locally(call, local, cache)
        held, near, new = cache.states.get(kind), self._near(kind), call
        if call.padding is not None:
            new = call._replace(padding=call.padding[:, -call.key.shape[-2] :])
        if call.sink_logits is not None:
            near = one_more(near)
            held = after_sink(new, self.map_of(kind), near) if held is None else held
            new = with_sink(new, None)
        out, cache.states[kind] = linear_attention(
            new.query,
            new.key,
            new.value,
            self.map_of(kind),
            is_causal=True,
            key_padding_mask=new.padding,
            state=held,
            return_state=True,
            scale=new.scale,
            **near,
        )
        return out if call.sink_logits is None else without_sink(out, call.sink_logits)

    def _go_on_locally(self, call: Call, near: Near, cache: RecurrentLayer) -> Tensor:
        """Rows by the short way; the state takes their keys in beside the last row alone."""
        (q, k, v), held = call[:3], cache.states.get("window")
        _, after = linear_attention(
            q[..., -1:, :],
            k,
            v,
            self._nothing,
            is_causal=True,
            state=held,
            return_state=True,
            scale=call.scale,
            **self.plan.near,
        )
        cache.states["window"], first = after, 0
        past = None if held is None else held.window
        if past is not None:
            k, v = torch.cat([past.k, k], dim=-2), torch.cat([past.v, v], dim=-2)
            first = past.seen - past.k.shape[-2]
        return local_rows(q, k, v, after.window.sink_k, after.window.sink_v, near, first=first, scale=call.scale)

    def _pick(self, t: Tensor, heads: list[int], group: int) -> Tensor:
        if len(heads) * group == t.shape[1]:
            return t
        return t.index_select(1, self._index(tuple(g * group + i for g in heads for i in range(group)), t.device))

    def _index(self, places: tuple[int, ...], device: torch.device) -> Tensor:
        # Not buffers: models built on the meta device would leave those that are not saved without values.
        key = (places, device)
        if key not in self._indices:
            self._indices[key] = torch.tensor(places, device=device)
        return self._indices[key]


def attend(call: Call, phi: FeatureMap, **near: Any) -> Tensor:
    """Linear attention of a call, (b, h, n, v); `near`: window and sinks."""
    if call.segments is not None:
        return one_by_one(call, lambda part: attend(part, phi, **near))
    if call.sink_logits is not None:
        return without_sink(attend(with_sink(call, near), phi, **one_more(near)), call.sink_logits)
    options: dict[str, Any] = {"is_causal": call.is_causal, "key_padding_mask": call.padding, "scale": call.scale}
    return linear_attention(call.query, call.key, call.value, phi, **options, **near)


def one_by_one(call: Call, attention: Callable[[Call], Tensor]) -> Tensor:
    """The sequences of a packed batch, each by itself."""
    assert call.segments is not None
    rows = []
    for b, segments in enumerate(call.segments):
        lengths = segments.unique_consecutive(return_counts=True)[1].tolist()
        parts = zip(*(t[b : b + 1].split(lengths, dim=-2) for t in call[:3]), strict=True)
        alone = call._replace(padding=None, segments=None)
        rows.append(torch.cat([attention(alone._replace(query=q, key=k, value=v)) for q, k, v in parts], dim=-2))
    return torch.cat(rows)


def with_sink(call: Call, near: dict[str, Any] | None) -> Call:
    """The call with a key 0 in front, whose value is 1 in a new column where all others are 0.

    Seen exactly its weight is exp(0) = 1, so that the new column of the output is 1 over the normaliser of a row. It
    lies one place before a sequence's first key, or one block, so that no block is moved by it. `near`: window and
    sinks, None if the key is in the cache already.
    """
    pad = torch.nn.functional.pad
    key, value, padding = call.key, pad(call.value, (0, 1)), call.padding
    if near is None:
        return call._replace(value=value, sink_logits=None)
    more = min(near["window"], key.shape[2]) if near.get("window_kind") == "block" and near.get("window") else 1
    key, value = pad(key, (0, 0, more, 0)), pad(value, (0, 0, more, 0))
    if padding is None and more > 1:
        padding = torch.zeros(key.shape[0], call.key.shape[2], dtype=torch.bool, device=key.device)
    first = 0 if padding is None else leading(padding)[:, None]
    here = (torch.arange(key.shape[2], device=key.device) == first).expand(key.shape[0], -1)
    padding = None if padding is None else pad(padding, (more, 0), value=True) & ~here
    here = here[:, None, :, None]
    ones = here.expand_as(value[..., :1]).to(value.dtype)
    value = torch.cat([value[..., :-1].masked_fill(here, 0), ones], dim=-1)
    return call._replace(key=key.masked_fill(here, 0), value=value, padding=padding, sink_logits=None)


def after_sink(call: Call, phi: FeatureMap, near: dict[str, Any]) -> State:
    """The state after the key of `with_sink` and before any token, from which blocks are counted."""
    key, value = (t[..., :0, :] for t in (call.key, call.value))
    alone = with_sink(call._replace(query=call.query[..., :1, :], key=key, value=value, padding=None), {})
    options: dict[str, Any] = {"is_causal": True, "scale": call.scale, "return_state": True}
    state: State = linear_attention(alone.query, alone.key, alone.value, phi, **options, **near)[1]
    if state.window is None or near.get("window_kind") != "block":
        return state
    start = torch.ones(key.shape[0], dtype=torch.int64, device=key.device)
    return state._replace(window=state.window._replace(start=start))


def without_sink(out: Tensor, sink_logits: Tensor) -> Tensor:
    """The output of `with_sink` with the weight exp(sink logit) in its normaliser in place of 1, the column dropped.

    With Z the sum of all other weights and p = 1 / (Z + 1), it is `(Z + 1) / (Z + e^s) = 1 / (1 + p (e^s - 1))` times
    what was computed.
    """
    share = out[..., -1:].float()
    raised = 1 + share * torch.expm1(sink_logits.float())[:, None, None]
    return (out[..., :-1].float() / raised).to(out.dtype)


def one_more(near: dict[str, Any]) -> dict[str, Any]:
    """Window and sinks with one sink more, the key of `with_sink`."""
    return {**near, "sinks": near.get("sinks", 0) + 1}


def exact(call: Call, dropout: float = 0.0) -> Tensor:
    """Softmax attention of a call, (b, h, n, v)."""
    if call.segments is not None:
        return one_by_one(call, exact)
    if call.sink_logits is not None:
        return without_sink(exact(with_sink(call, {}), dropout), call.sink_logits)
    n, s = call.query.shape[-2], call.key.shape[-2]
    causal = call.is_causal and n > 1
    allowed = None
    if call.padding is not None or (causal and n < s):
        allowed = torch.ones(n, s, dtype=torch.bool, device=call.query.device)
        if causal:
            allowed = allowed.tril(s - n)
        if call.padding is not None:
            allowed = allowed & ~call.padding[:, None, None, :]
            allowed = allowed | ~allowed.any(-1, keepdim=True)  # rows of padding: any finite value will do
    return scaled_dot_product_attention(
        call.query,
        call.key,
        call.value,
        attn_mask=allowed,
        dropout_p=dropout,
        is_causal=causal and allowed is None,
        scale=call.scale,
        enable_gqa=call.group != 1,
    )


@contextlib.contextmanager
def all_converted(layers: Mapping[str, LinearAttention]) -> Iterator[None]:
    """No border for a while: texts below it would say nothing of the choice."""
    borders = {name: layer.plan.exact_below for name, layer in layers.items()}
    for layer in layers.values():
        layer.plan.exact_below = 0
    try:
        yield
    finally:
        for name, layer in layers.items():
            layer.plan.exact_below = borders[name]
