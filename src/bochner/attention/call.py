"""The frozen description of one call of attention, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bochner.attention.numerics import FeatureFunction, feature_function, floor_of, may_look
from bochner.attention.state import State
from bochner.maps.base import FeatureMap

BLOCK_ELEMENTS = 2**22  # features of one block of rows on the CPU: 16 MB in float32


@dataclass(frozen=True)
class Call:
    """What is asked of attention, apart from the tensors.

    `root`: the square root of the scale, applied to queries and keys alike. `groups`: query heads per key head, r.
    `window` is 0 where there is none. `parameters`: what of the map a gradient can reach. `learns`: whether a backward
    pass may come.
    """

    phi: FeatureMap
    root: float
    dtype: torch.dtype
    groups: int = 1
    is_causal: bool = False
    window: int = 0
    window_kind: str = "sliding"
    sinks: int = 0
    normalize: bool = True
    policy: str = "clamp"
    parameters: tuple[Tensor, ...] = ()
    learns: bool = False
    recompute: bool = True
    diagnostics: bool = True

    def may_look(self, x: Tensor) -> bool:
        """Whether results may be looked at, to compute some of them again."""
        return self.diagnostics and may_look(x)

    @property
    def exact_terms(self) -> bool:
        return self.window > 0 or self.sinks > 0

    @property
    def row_scale_matters(self) -> bool:
        """Whether a query's own scale does not cancel."""
        return self.exact_terms or not self.normalize

    @property
    def positive(self) -> bool:
        """Whether normalisers are positive by themselves."""
        return self.phi.positive or self.phi.top_up is not None

    @property
    def top_up(self) -> Tensor | None:
        """The map's least share as it broadcasts against (b, g, t, n, 1)."""
        least = self.phi.top_up
        return None if least is None else least.to(self.dtype).reshape(-1, 1, 1, 1)

    @property
    def floor(self) -> float:
        return floor_of(self.phi, self.dtype)

    def features(self, role: str) -> FeatureFunction:
        return feature_function(self.phi, role, self.root, self.dtype)

    def traced_features(self, role: str) -> FeatureFunction:
        """The same with a graph to the parameters of the map, for a backward pass."""
        with torch.enable_grad():
            return self.features(role)

    def rows(self, lead: int, device: torch.device) -> int:
        """How many rows of `lead` sequences and heads make a block, a multiple of 64."""
        # Most maps hold several temporaries as large as their features, the exponential ones none; so does a backward.
        share = (1 if self.phi.is_exponential else 4) * (4 if self.learns else 1)
        elements = BLOCK_ELEMENTS // share * (1 if device.type == "cpu" else 64)
        return max(64, elements // (lead * self.phi.feature_dim) // 64 * 64)


class Result(NamedTuple):
    """Rows of attention (b, g, N, v), the state after the keys, and the rows that did not come out.

    `lost` and `small`, (b, g, N, 1) or None: see `numerics.Rows`.
    """

    out: Tensor
    state: State | None = None
    lost: Tensor | None = None
    small: Tensor | None = None
