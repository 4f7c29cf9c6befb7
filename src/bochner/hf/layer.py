"""What `convert` attaches to an attention module: its maps, and attention by the plan's kinds of heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bochner.attention.core import linear_attention
from bochner.attention.state import EMPTY
from bochner.hf.plan import LayerPlan
from bochner.hf.step import can_step, step
from bochner.maps import feature_map
from bochner.maps.base import FeatureMap, Features

if TYPE_CHECKING:
    from bochner.hf.cache import RecurrentLayer

LINEAR = ("window", "hybrid", "kernel")


class NoFeatures(FeatureMap):
    """The map of heads without a kernel term: its features are zero, relative to nothing."""

    positive = True
    unbiased = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim, 1)

    def _features(self, x: Tensor, role: str) -> Features:
        zero = torch.zeros_like(x[..., :1])
        return Features(zero, zero + EMPTY)


class LinearAttention(nn.Module):
    """Attention of one module by its plan: each kind of head runs on its own key heads, then the heads are put back.

    Key heads whose query heads differ in kind run under each of them; memory is saved by whole key heads.
    """

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__()
        self.plan = plan.check()
        maps: dict[str, FeatureMap] = {}
        for kind in ("hybrid", "kernel"):
            heads = plan.kv_heads_of(kind)
            if heads:
                maps[kind] = feature_map(
                    plan.feature_map,
                    dim=plan.head_dim,
                    num_features=plan.num_features,
                    num_heads=len(heads),
                    seed=plan.seed,
                    **plan.options,
                )
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

    def map_of(self, kind: str) -> FeatureMap:
        return self._nothing if kind == "window" else self.map_norm[kind]  # type: ignore[return-value]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        is_causal: bool,
        padding: Tensor | None,
        scale: float,
        cache: RecurrentLayer | None = None,
    ) -> Tensor:
        """(b, h, n, v). `padding` (b, s) is True at keys to ignore; with a cache, k and v are the new ones only."""
        outs = []
        for kind, heads in self.parts:
            x, y, u = self._pick(q, heads, self.plan.group), self._pick(k, heads, 1), self._pick(v, heads, 1)
            if kind == "exact":
                if cache is not None:
                    y, u = cache.append(y, u)
                outs.append(exact(x, y, u, is_causal, padding, scale))
            else:
                outs.append(self._linear(kind, x, y, u, is_causal, padding, scale, cache))
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        return out if self.in_order else out.index_select(1, self._index(tuple(self.order), out.device))

    def _linear(
        self,
        kind: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool,
        padding: Tensor | None,
        scale: float,
        cache: RecurrentLayer | None,
    ) -> Tensor:
        n, s = q.shape[-2], k.shape[-2]
        options: dict[str, Any] = {"scale": scale}
        if kind != "kernel":
            options |= {"window": self.plan.window, "sinks": self.plan.sinks}
        phi = self.map_of(kind)
        if cache is not None:
            held = cache.states.get(kind)
            if n == 1 and held is not None and not torch.is_grad_enabled() and can_step(phi, held, padding):
                out, cache.states[kind] = step(None if kind == "window" else phi, q, k, v, held, scale)
                return out
            hole = None if padding is None else padding[:, -n:]
            out, cache.states[kind] = linear_attention(
                q,
                k,
                v,
                phi,
                is_causal=True,
                key_padding_mask=hole,
                state=held,
                return_state=True,
                **options,
            )
            return out
        if is_causal and n < s:  # the queries are the last ones: earlier rows, thrown away, put them in their places
            q = torch.cat([q.new_zeros(*q.shape[:2], s - n, q.shape[-1]), q], dim=-2)
        out = linear_attention(q, k, v, phi, is_causal=is_causal, key_padding_mask=padding, **options)
        return out[..., -n:, :]

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


def exact(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, padding: Tensor | None, scale: float) -> Tensor:
    """Softmax attention; with fewer queries than keys the queries are the last ones."""
    n, s = q.shape[-2], k.shape[-2]
    causal = is_causal and n > 1
    allowed = None
    if padding is not None or (causal and n < s):
        allowed = torch.ones(n, s, dtype=torch.bool, device=q.device)
        if causal:
            allowed = allowed.tril(s - n)
        if padding is not None:
            allowed = allowed & ~padding[:, None, None, :]
            allowed = allowed | ~allowed.any(-1, keepdim=True)  # rows of padding: any finite value will do
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=allowed,
        is_causal=causal and allowed is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
