"""`MultiheadAttention`, torch's layer with linear attention inside, and `Attention`, the settings of such a layer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bochner._checks import (
    ArgumentError,
    BochnerError,
    flag,
    floating,
    positive_float,
    positive_int,
)
from bochner.attention.api import linear_attention
from bochner.attention.checks import check_scale, check_window
from bochner.attention.oracle import attention_matrix
from bochner.attention.state import State, read
from bochner.maps import MapLike
from bochner.maps import feature_map as make_feature_map
from bochner.maps.base import FeatureMap, NoFeatures

OWNER = "MultiheadAttention"
SET_BY_LAYER = {"is_causal", "key_padding_mask", "window", "sinks", "state", "return_state"}
CALL_OPTIONS = {
    p.name for p in inspect.signature(linear_attention).parameters.values() if p.kind is p.KEYWORD_ONLY
} - SET_BY_LAYER
WEIGHT_OPTIONS = set(inspect.signature(attention_matrix).parameters)
ROTARY_BASE = 10_000.0


@dataclass(frozen=True, repr=False)
class Attention:
    """How a layer attends: its map, what is exact, its heads.

    - `feature_map`: a name, a class, a function `f(x, role)` or an instance. None is no kernel: each row attends
      exactly to its window and to the sinks, and to nothing else.
    - `num_features`: m.
    - `window`, `sinks`: exact softmax on near keys and on the first ones, see `linear_attention`.
    - `head_dim`: the size of a head, default embed_dim / num_heads.
    - `rotary`: rotate queries and keys by their positions, Su et al. 2021. A number is the base, True is 10,000.
    - `map_options`: keywords of `bochner.feature_map`, such as `projection`, `seed`, `num_heads` for a map of its own
      in every head, and `redraw_every`.
    - `options`: further keywords of `linear_attention`, such as `scale` and `window_kind`.

    >>> Attention("relu", 64, window=32, map_options={"redraw_every": 100})
    Attention('relu', 64, window=32, map_options={'redraw_every': 100})
    """

    feature_map: MapLike | None = "positive"
    num_features: int = 256
    window: int | None = None
    sinks: int = 0
    head_dim: int | None = None
    rotary: bool | float = False
    map_options: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positive_int(self.num_features, "num_features", OWNER)
        check_window(self.window, self.sinks, self.options.get("window_kind", "block"), OWNER)
        if self.head_dim is not None:
            positive_int(self.head_dim, "head_dim", OWNER)
        if not isinstance(self.rotary, bool):
            positive_float(self.rotary, "rotary", OWNER)
        unknown = sorted(set(self.options) - CALL_OPTIONS)
        if unknown:
            raise ArgumentError(
                f"The 'options' of Attention go to linear_attention, which takes {sorted(CALL_OPTIONS)} here, got "
                f"{unknown[0]!r}; keywords of the map are 'map_options'."
            )
        if self.options.get("scale") is not None:
            positive_float(self.options["scale"], "scale", OWNER)
        if self.feature_map is None and self.window is None and not self.sinks:
            raise BochnerError(
                "Attention without a map needs a 'window' or 'sinks': nothing else would be attended to."
            )
        if isinstance(self.feature_map, FeatureMap) and self.map_options:
            raise BochnerError("The 'map_options' of Attention make a map, but 'feature_map' is one; leave them out.")

    @classmethod
    def of(cls, given: Attention | MapLike | None, **settings: Any) -> Attention:
        """Settings as they are, or a map with single settings; those of the map or of the call go where they belong."""
        if isinstance(given, Attention):
            if settings:
                raise BochnerError(f"'attention' says it all; put {sorted(settings)[0]!r} into it.")
            return given
        own = {f.name: settings.pop(f.name) for f in fields(cls) if f.name in settings}
        for name in sorted(CALL_OPTIONS & set(settings)):
            own["options"] = {**own.get("options", {}), name: settings.pop(name)}
        return cls(**{"feature_map": given, **own, "map_options": {**own.get("map_options", {}), **settings}})

    def make_map(self, dim: int) -> FeatureMap:
        """The feature map of heads of size `dim`."""
        if self.feature_map is None:
            return NoFeatures(dim)
        phi = make_feature_map(self.feature_map, dim, self.num_features, **self.map_options)
        if phi.dim != dim:
            raise BochnerError(f"The 'feature_map' has dim={phi.dim}, but embed_dim / num_heads is {dim}.")
        return phi

    def __repr__(self) -> str:
        plain = Attention()
        names = [f.name for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)]
        order = ["feature_map", "num_features"] if "num_features" in names else ["feature_map"]
        shown = [repr(getattr(self, n)) for n in order if names]
        shown += [f"{n}={getattr(self, n)!r}" for n in names if n not in order]
        return f"Attention({', '.join(shown)})"


class DecodingState(NamedTuple):
    """What `MultiheadAttention.step` carries from token to token: the attention state and the position."""

    attention: State | None
    position: int


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with linear attention inside: same signature, parameters and state_dict keys.

    A torch state_dict loads (the feature map keeps its own state), and the module can take the place of `self_attn` in
    `torch.nn.TransformerEncoderLayer` and `TransformerDecoderLayer`. What linear attention cannot honour is refused in
    one sentence: dropout of attention weights, extra keys, and any `attn_mask` that is not causal. One departure:
    `need_weights` is False unless asked for, since the weights are quadratic.

    `attention`: an `Attention`, or a map by name, class, function `f(x, role)` or instance. Its fields may also be
    given one by one, as in `feature_map="relu", num_features=64`.

    >>> attention = MultiheadAttention(16, 4, batch_first=True, attention=Attention("positive", 32, window=4))
    >>> x = torch.randn(2, 10, 16)
    >>> out, _ = attention(x, x, x, is_causal=True)
    >>> out.shape
    torch.Size([2, 10, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        attention: Attention | MapLike = "positive",
        **settings: Any,
    ) -> None:
        if dropout:
            raise BochnerError(
                f"The 'dropout' of MultiheadAttention must be 0, got {dropout!r}: linear attention never forms the "
                "weights to be dropped; put dropout after the module."
            )
        if add_bias_kv or add_zero_attn:
            raise BochnerError(f"The 'add_bias_kv' and 'add_zero_attn' of {OWNER} must be False; leave them out.")
        embed_dim, num_heads = (
            positive_int(x, n, OWNER) for x, n in ((embed_dim, "embed_dim"), (num_heads, "num_heads"))
        )
        how = Attention.of(attention, **settings)
        if how.head_dim is None and embed_dim % num_heads:
            raise BochnerError(
                f"The 'embed_dim' of {OWNER} must be a multiple of 'num_heads', got {embed_dim!r} and {num_heads!r}."
            )
        inner = embed_dim if how.head_dim is None else how.head_dim * num_heads
        kdim, vdim = embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim
        super().__init__(inner, num_heads, 0.0, bias, False, False, kdim, vdim, batch_first, device, dtype)
        self.embed_dim, self.attention = embed_dim, how
        if inner != embed_dim:
            self._other_head_size(inner)
        self.feature_map = how.make_map(self.head_dim)
        if device is not None:
            self.feature_map.to(device)
        self.register_load_state_dict_pre_hook(_keep_own_map)
        self._built = True

    # In evaluation mode torch's TransformerEncoderLayer would hand in_proj_weight to its own fused softmax kernel, past
    # this module, if this flag were true. After construction it reads False, and the layer calls us.
    @property
    def _qkv_same_embed_dim(self) -> bool:
        return self._packed and not getattr(self, "_built", False)

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, value: bool) -> None:
        self._packed = value

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `torch.nn.MultiheadAttention.forward`; returns (output, weights or None)."""
        self._check_inputs(query=query, key=key, value=value)
        batched, padding = query.ndim == 3, _bool_padding(key_padding_mask)
        if not batched:
            query, key, value = (t.unsqueeze(0) for t in (query, key, value))
            padding = None if padding is None else padding.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        shape = (self.num_heads * query.shape[0], query.shape[1], key.shape[1])
        is_causal = _is_causal_mask(attn_mask, shape, flag(is_causal, "is_causal", OWNER))
        q, k, v = self._heads(query, key, value)
        q, k = self._rotated(q), self._rotated(k)
        options = self._options() | {"is_causal": is_causal, "key_padding_mask": padding}
        if self.attention.feature_map is None and padding is not None:
            options["diagnostics"] = False  # padding may see nothing but padding in its window: no reason for a warning
        out = linear_attention(q, k, v, self.feature_map, **options)
        out = self.out_proj(out.transpose(1, 2).flatten(-2))
        weights = None
        if need_weights:
            known = {name: value for name, value in options.items() if name in WEIGHT_OPTIONS}
            weights = attention_matrix(q, k, self.feature_map, **known)
            weights = weights.mean(1) if average_attn_weights else weights
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def step(self, x: Tensor, state: DecodingState | None = None) -> tuple[Tensor, DecodingState]:
        """Causal self-attention of the next tokens x (b, n, e), n usually 1; memory does not grow with the position.

        `x` is (b, n, embed_dim) whatever `batch_first` is. Pass the returned state to the next call.
        """
        held = DecodingState(None, 0) if state is None else state
        if not isinstance(held, DecodingState):
            raise BochnerError(
                f"The 'state' of {OWNER}.step must be what the last step returned, or None, got {type(state).__name__}."
            )
        self._check_inputs(x=x)
        if x.ndim != 3:
            raise BochnerError(f"The 'x' of {OWNER}.step must have 3 axes (b, n, e), got shape {tuple(x.shape)}.")
        q, k, v = self._heads(x, x, x)
        q, k = (self._rotated(t, held.position) for t in (q, k))
        options = self._options() | {"is_causal": True, "state": held.attention, "return_state": True}
        out, attention = linear_attention(q, k, v, self.feature_map, **options)
        return self.out_proj(out.transpose(1, 2).flatten(-2)), DecodingState(attention, held.position + x.shape[1])

    @torch.no_grad()
    def calibrate_(
        self, query: Tensor | Sequence[Tensor], key: Tensor | Sequence[Tensor] | None = None
    ) -> MultiheadAttention:
        """Fix the map's statistics from module inputs (b, n, embed_dim), as `FeatureMap.calibrate_` does from heads.

        Lists hold sequences of different lengths.
        """
        heads: tuple[list[Tensor], list[Tensor]] = ([], [])
        for which, (given, name) in enumerate(((query, "query"), (query if key is None else key, "key"))):
            for x in [given] if isinstance(given, Tensor) else given:
                self._check_inputs(**{name: x})
                head = self._head(x, which)
                heads[which].append(self._rotated(head) * self._root(head))
        self.feature_map.calibrate_(*heads)
        return self

    def remember(self, memory: Tensor, key_padding_mask: Tensor | None = None) -> State:
        """All keys and values of `memory` (b, s, e) as a state of constant size, for `recall`."""
        self._check_plain("remember")
        k, v = self._head(memory, 1), self._head(memory, 2)
        how: Any = {"is_causal": True, "return_state": True, "key_padding_mask": key_padding_mask}
        state: State = linear_attention(k[:, :, -1:], k, v, self.feature_map, **how, **self._options())[1]
        return state

    def recall(self, query: Tensor, state: State) -> Tensor:
        """Cross-attention of query (b, n, e) to what `remember` returned, (b, n, e)."""
        self._check_plain("recall")
        q, phi = self._head(query, 0), self.feature_map
        out = read(state, phi(q * self._root(q), "query"), phi=phi).to(q.dtype)
        return self.out_proj(out.transpose(1, 2).flatten(-2))

    def _check_plain(self, method: str) -> None:
        a = self.attention
        if a.window is not None or a.sinks or a.rotary:
            raise BochnerError(
                f"{OWNER}.{method} sums keys up in the kernel alone; build the module without a window, sinks and "
                "rotary positions."
            )

    def _root(self, q: Tensor) -> float:
        return check_scale(self.attention.options.get("scale"), q, OWNER) ** 0.5

    def _rotated(self, x: Tensor, position: int = 0) -> Tensor:
        rotary = self.attention.rotary
        return rotate(x, position, ROTARY_BASE if rotary is True else rotary) if rotary else x

    def _other_head_size(self, inner: int) -> None:
        """Projections to heads whose sizes do not add up to `embed_dim`."""
        like: Any = {"device": self.out_proj.weight.device, "dtype": self.out_proj.weight.dtype}
        self._packed = False
        self.register_parameter("in_proj_weight", None)
        for name, size in (("q", self.embed_dim), ("k", self.kdim), ("v", self.vdim)):
            weight = nn.Parameter(torch.empty(inner, size, **like))
            self.register_parameter(f"{name}_proj_weight", weight)
            nn.init.xavier_uniform_(weight)
        bias = self.out_proj.bias is not None
        self.out_proj = type(self.out_proj)(inner, self.embed_dim, bias=bias, **like)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def _check_inputs(self, **inputs: Any) -> None:
        """Refuse inputs that the projections cannot take."""
        axes = None
        for name, x in inputs.items():
            size = {"key": self.kdim, "value": self.vdim}.get(name, self.embed_dim)
            floating(x, name, OWNER)
            if x.is_nested:
                raise BochnerError(
                    f"The {name!r} is a nested tensor; build TransformerEncoder with enable_nested_tensor=False."
                )
            axes = x.ndim if axes is None else axes
            if x.ndim not in (2, 3) or x.ndim != axes or x.shape[-1] != size:
                where = "(n, e), or 3 with a batch, the same for all" if axes in (2, 3) else "(n, e), or 3 with a batch"
                raise BochnerError(
                    f"The {name!r} of {OWNER} must have 2 axes {where}, the last of {size}, got shape {tuple(x.shape)}."
                )
            dtype = self.out_proj.weight.dtype
            if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
                raise BochnerError(
                    f"The {name!r} of {OWNER} is {x.dtype}, its weights are {dtype}; cast one, for example "
                    f"{name}.to({dtype})."
                )

    def _options(self) -> dict[str, Any]:
        """What every call of `linear_attention` is told."""
        return {"window": self.attention.window, "sinks": self.attention.sinks, **self.attention.options}

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projected inputs (b, n, e) as heads (b, h, n, d)."""
        return self._head(query, 0), self._head(key, 1), self._head(value, 2)

    def _head(self, x: Tensor, which: int) -> Tensor:
        """The queries (0), keys (1) or values (2) of x."""
        if self._packed:
            weight = self.in_proj_weight.chunk(3)[which]
        else:
            weight = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)[which]
        bias = None if self.in_proj_bias is None else self.in_proj_bias.chunk(3)[which]
        return nn.functional.linear(x, weight, bias).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)


def rotate(x: Tensor, position: int = 0, base: float = 10_000.0) -> Tensor:
    """Rotary positions: coordinate pairs (i, i + d/2) of x (..., n, d) turned by `(position + row) * base^(-2i/d)`.

    Dot products of rotated queries and keys depend on positions only through their difference.
    """
    n, d = x.shape[-2:]
    if d % 2:
        raise BochnerError(f"Rotary positions need an even head size, got {d}.")
    place = torch.arange(position, position + n, device=x.device, dtype=torch.float32)
    frequency = base ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / d)
    angle = place[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def _bool_padding(mask: Tensor | None) -> Tensor | None:
    """torch's layers turn a bool padding mask into 0 / -inf; back to bool, or refuse other weights."""
    if mask is None or _mask_tensor(mask, "key_padding_mask").dtype == torch.bool:
        return mask
    ignored = mask == -torch.inf
    if not torch.compiler.is_compiling() and not bool((ignored | (mask == 0)).all()):
        raise BochnerError("A float 'key_padding_mask' may hold only 0 and -inf; additive biases cannot be linearised.")
    return ignored


def _mask_tensor(mask: Any, name: str) -> Tensor:
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise BochnerError(f"The {name!r} of {OWNER} must be a bool or floating-point tensor, got {got}.")
    return mask


def _is_causal_mask(mask: Tensor | None, shape: tuple[int, int, int], is_causal: bool) -> bool:
    """True for the causal mask of n queries and s keys, False for no mask at all; anything else is refused.

    `shape`: (b h, n, s). With `is_causal` the mask is said to be causal, as in torch: its values are not looked at.
    """
    if mask is None:
        return is_causal
    hidden = mask if _mask_tensor(mask, "attn_mask").dtype == torch.bool else mask == -torch.inf
    _, n, s = shape
    if tuple(mask.shape) not in ((n, s), shape):
        raise BochnerError(
            f"The 'attn_mask' must have shape (n, s) = {(n, s)} or (b h, n, s) = {shape}, got {tuple(mask.shape)}."
        )
    if is_causal:
        return True
    if n == s:
        causal = torch.ones_like(hidden).triu(1)
        if bool((hidden == causal).all()) and (mask.dtype == torch.bool or bool((mask[~causal] == 0).all())):
            return True
    if not bool(hidden.any()) and (mask.dtype == torch.bool or bool((mask == 0).all())):
        return False
    raise BochnerError(
        f"The 'attn_mask' of shape {tuple(mask.shape)} is neither causal nor empty, and linear attention cannot honour "
        "an arbitrary mask; use key_padding_mask, is_causal, or window."
    )


def _keep_own_map(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """A state_dict of torch's own module has no feature map: keep ours."""
    own = f"{prefix}feature_map."
    if not any(name.startswith(own) for name in state_dict) and isinstance(module, MultiheadAttention):
        state_dict.update({own + name: t for name, t in module.feature_map.state_dict().items()})
