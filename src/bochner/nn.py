"""Module shells around linear attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bochner._checks import BochnerError, flag, floating, positive_float, positive_int, spawn_seed
from bochner.attention.api import linear_attention
from bochner.attention.checks import check_scale, check_window
from bochner.attention.oracle import attention_matrix
from bochner.attention.state import State
from bochner.maps import MapLike
from bochner.maps import feature_map as make_feature_map
from bochner.maps.base import FeatureMap

OWNER = "MultiheadAttention"


class DecodingState(NamedTuple):
    """What `MultiheadAttention.step` carries from token to token: the attention state and the position."""

    attention: State | None
    position: int


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with linear attention inside: same signature, parameters and state_dict keys.

    A torch state_dict loads (the feature map keeps its own state), and the module can take the place of `self_attn` in
    `torch.nn.TransformerEncoderLayer` and `TransformerDecoderLayer`. What linear attention cannot honour is refused in
    one sentence: dropout of attention weights, and any `attn_mask` that is not causal. One deliberate departure:
    `need_weights` is False unless asked for, since the weights are quadratic.

    - `feature_map`, `num_features`, `projection`, `seed`, `map_options`: the map, by name (one per head with
      `per_head=True`), by its class, as a function `f(x, role)`, or an instance.
    - `window`, `sinks`, `window_kind`: exact softmax near the diagonal and on the first keys, see `linear_attention`.
    - `scale`: multiplies q . k, default head_dim^-1/2; `normalize=False`: the sums of values alone, for maps trained
      without a normaliser.
    - `rotary`: rotate queries and keys by their positions (`rotary_base`), Su et al. 2021.

    >>> attention = MultiheadAttention(16, 4, feature_map="positive", num_features=32, batch_first=True)
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
        *,
        feature_map: MapLike = "positive",
        num_features: int = 256,
        projection: str = "orthogonal",
        per_head: bool = False,
        map_options: dict[str, Any] | None = None,
        seed: int | None = 0,
        window: int | None = None,
        sinks: int = 0,
        window_kind: str = "block",
        rotary: bool = False,
        rotary_base: float = 10_000.0,
        scale: float | None = None,
        normalize: bool = True,
    ) -> None:
        if dropout:
            raise BochnerError(
                f"The 'dropout' of MultiheadAttention must be 0, got {dropout!r}: linear attention never forms the "
                "weights to be dropped; put dropout after the module."
            )
        embed_dim, num_heads = (
            positive_int(x, n, OWNER) for x, n in ((embed_dim, "embed_dim"), (num_heads, "num_heads"))
        )
        if embed_dim % num_heads:
            raise BochnerError(
                f"The 'embed_dim' of {OWNER} must be a multiple of 'num_heads', got {embed_dim!r} and {num_heads!r}."
            )
        super().__init__(
            embed_dim, num_heads, 0.0, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.window, self.sinks, self.window_kind = check_window(window, sinks, window_kind, OWNER)
        self.rotary, self.rotary_base = flag(rotary, "rotary", OWNER), positive_float(rotary_base, "rotary_base", OWNER)
        self.scale = None if scale is None else positive_float(scale, "scale", OWNER)
        self.normalize = flag(normalize, "normalize", OWNER)
        if isinstance(feature_map, FeatureMap):
            self.feature_map = feature_map
        else:
            options = {"projection": projection, "seed": seed, **(map_options or {})}
            options.update({"num_heads": num_heads if per_head else None})
            self.feature_map = make_feature_map(feature_map, self.head_dim, num_features, **options)
            if device is not None:
                self.feature_map.to(device)
        if self.feature_map.dim != self.head_dim:
            raise BochnerError(
                f"The 'feature_map' has dim={self.feature_map.dim}, but embed_dim / num_heads is {self.head_dim}."
            )
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
        axis, batched = -2 if query.ndim == 2 or self.batch_first else 0, query.ndim == 3
        rows = self.num_heads * (query.shape[0 if self.batch_first else 1] if batched else 1)
        shape = (rows, query.shape[axis], key.shape[axis])
        is_causal = _is_causal_mask(attn_mask, shape, flag(is_causal, "is_causal", OWNER))
        padding = _bool_padding(key_padding_mask)
        if not batched:
            query, key, value = (t.unsqueeze(0 if self.batch_first else 1) for t in (query, key, value))
            padding = None if padding is None else padding.unsqueeze(0)
        if not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = self._heads(query, key, value)
        if self.rotary:
            q, k = rotate(q, 0, self.rotary_base), rotate(k, 0, self.rotary_base)
        k, v, padding = self._extra_keys(k, v, padding, is_causal)
        options = self._options() | {"is_causal": is_causal, "key_padding_mask": padding}
        out = linear_attention(q, k, v, self.feature_map, **options)
        out = self.out_proj(out.transpose(1, 2).flatten(-2))
        weights = None
        if need_weights:
            weights = attention_matrix(q, k, self.feature_map, **options)
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        if not self.batch_first:
            out = out.transpose(0, 1)
        return (out if batched else out.squeeze(0 if self.batch_first else 1)), weights

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
        if self.rotary:
            q, k = (rotate(t, held.position, self.rotary_base) for t in (q, k))
        options = self._options() | {"is_causal": True, "state": held.attention, "return_state": True}
        out, attention = linear_attention(q, k, v, self.feature_map, **options)
        return self.out_proj(out.transpose(1, 2).flatten(-2)), DecodingState(attention, held.position + x.shape[1])

    @torch.no_grad()
    def calibrate_(self, query: Tensor, key: Tensor | None = None) -> MultiheadAttention:
        """Fix the map's statistics from module inputs (b, n, embed_dim), as `FeatureMap.calibrate_` does from heads."""
        key = query if key is None else key
        self._check_inputs(query=query, key=key)
        q, k, _ = self._heads(query, key, key)
        if self.rotary:
            q, k = rotate(q, 0, self.rotary_base), rotate(k, 0, self.rotary_base)
        root = check_scale(self.scale, q, "MultiheadAttention") ** 0.5
        self.feature_map.calibrate_(q * root, k * root)
        return self

    def _check_inputs(self, **inputs: Any) -> None:
        """Refuse inputs that the projections cannot take."""
        axes = None
        for (name, x), size in zip(inputs.items(), (self.embed_dim, self.kdim, self.vdim), strict=False):
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
        near = {"window": self.window, "sinks": self.sinks, "window_kind": self.window_kind}
        return near | {"scale": self.scale, "normalize": self.normalize}

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projected inputs (b, n, e) as heads (b, h, n, d)."""
        if self._packed:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = (
            nn.functional.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)
        )
        q, k, v = (t.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for t in projected)
        return q, k, v

    def _extra_keys(
        self, k: Tensor, v: Tensor, padding: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The learned bias key and the zero key of torch's module, appended."""
        extra = []
        if self.bias_k is not None and self.bias_v is not None:
            extra.append(tuple(t.view(1, self.num_heads, 1, self.head_dim) for t in (self.bias_k, self.bias_v)))
        if self.add_zero_attn:
            extra.append((torch.zeros_like(k[:1, :, :1]), torch.zeros_like(v[:1, :, :1])))
        if extra and is_causal:
            raise BochnerError("'add_bias_kv' and 'add_zero_attn' cannot be combined with causal attention here.")
        for a, c in extra:
            k, v = (torch.cat([t, e.expand(t.shape[0], -1, -1, -1)], dim=2) for t, e in ((k, a), (v, c)))
            padding = None if padding is None else nn.functional.pad(padding, (0, 1))
        return k, v, padding


class RedrawSchedule:
    """New random frequencies for all feature maps of a model, every `every` steps of a training loop.

    Called like a scheduler of learning rates, after the optimizer. The draw is a function of the step, the map's place
    in the model and `seed`, so that ranks agree; it is part of the model's state_dict, and the count part of the
    schedule's, so that a resumed run goes on as if it had not been stopped. Calibration and learned parts stay, also
    frequencies that were made trainable.

    >>> model = MultiheadAttention(16, 4, num_features=32)
    >>> schedule = RedrawSchedule(model, every=100)
    >>> [schedule.step() for step in range(100)][-2:]  # after optimizer.step(): whether the maps were redrawn
    [False, True]
    """

    def __init__(self, model: nn.Module, every: int, *, seed: int = 0) -> None:
        self.every, self.seed, self.steps = positive_int(every, "every", "RedrawSchedule"), seed, 0
        self.maps = _maps_of(model)
        if not self.maps:
            raise BochnerError("The 'model' of RedrawSchedule holds no feature map; nothing can be redrawn.")

    def step(self) -> bool:
        """Count one step; whether the maps were redrawn after it."""
        self.steps += 1
        if self.steps % self.every:
            return False
        for i, phi in enumerate(self.maps):
            if not any(p.requires_grad for name, p in phi.named_parameters() if "projection" in name):
                phi.redraw_(seed=spawn_seed(self.seed, self.steps, i))
        return True

    def state_dict(self) -> dict[str, int]:
        """The count of steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a saved count."""
        self.steps = state["steps"]


def parameter_groups(
    model: nn.Module, lr: float, *, map_lr: float | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer: matrices, which decay; vectors, which do not; maps, which do not either.

    `map_lr`: the learning rate of the maps, default `lr`. Only what requires gradients is listed, and each parameter
    once: `torch.optim.AdamW(parameter_groups(model, 1e-4, map_lr=1e-3, weight_decay=0.01))`.
    """
    maps = {id(p) for phi in _maps_of(model) for p in phi.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if id(p) not in maps and p.ndim > 1], "lr": lr, "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) not in maps and p.ndim <= 1], "lr": lr, "weight_decay": 0.0},
        {
            "params": [p for p in trained if id(p) in maps],
            "lr": lr if map_lr is None else map_lr,
            "weight_decay": 0.0,
        },
    ]
    return [group for group in groups if group["params"]]


def _maps_of(model: nn.Module) -> list[FeatureMap]:
    """The feature maps of a model, in its order; not those that are parts of another."""
    found: list[FeatureMap] = []
    inner: set[int] = set()
    for module in model.modules():
        if isinstance(module, FeatureMap) and id(module) not in inner:
            found.append(module)
            inner.update(id(m) for m in module.modules())
    return found


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
    if not any(name.startswith(own) for name in state_dict):
        assert isinstance(module, MultiheadAttention)
        state_dict.update({own + name: t for name, t in module.feature_map.state_dict().items()})
