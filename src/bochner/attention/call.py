"""What is asked of attention, checked once, and what comes of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bochner import _products
from bochner.attention.features import PreparedMap
from bochner.attention.state import State


class Keys(NamedTuple):
    """Keys and values (b, g, s, .) by their places; which are padding and which sinks (b, s), None for none.

    `shift` (b, g, s, 1): what decay adds to the log weight of each key, None for nothing. It is in double precision:
    differences of large sums matter.
    """

    k: Tensor
    v: Tensor
    padded: Tensor | None = None
    sink: Tensor | None = None
    shift: Tensor | None = None

    @property
    def far_holes(self) -> Tensor | None:
        """Those that the kernel leaves out."""
        if self.sink is None or self.padded is None:
            return self.padded if self.sink is None else self.sink
        return self.padded | self.sink

    def part(self, span: slice) -> Keys:
        padded, sink = (None if t is None else t[:, span] for t in (self.padded, self.sink))
        shift = None if self.shift is None else self.shift[:, :, span]
        return Keys(self.k[:, :, span], self.v[:, :, span], padded, sink, shift)


class Near:
    """Which keys a row sees exactly: `window` keys of a `kind`, 0 for none, and the first `sinks` ones."""

    def __init__(self, is_causal: bool, window: int = 0, kind: str = "block", sinks: int = 0) -> None:
        self.is_causal, self.window, self.kind, self.sinks = is_causal, window, kind, sinks
        self.setting = window, sinks, kind
        self.exact = window > 0 or sinks > 0
        self.in_blocks = window > 0 and kind == "block"  # whether zones are exact as a whole
        self.most_held = 2 * window - 1 if self.in_blocks else window  # keys that a row sees exactly before its own

    def held_from(self, seen: int) -> int:
        """The place of the first key that the next row sees exactly, after `seen` keys."""
        w = self.window
        if not w:
            return seen
        return max(0, (seen // w - 1) * w if self.in_blocks else seen - w)

    def held_places(self, start: Tensor, seen: int) -> Tensor:
        """The same for sequences whose blocks begin at the places `start` (b,).

        Of a sequence that has not begun: the first place that it may see so, wherever it will begin.
        """
        w = self.window
        begun = ((seen - start) // w - 1) * w + start
        return torch.where(start < seen, begun, seen - 2 * w + 1).clamp_min(0)


class Call(NamedTuple):
    """How attention is computed.

    `groups`: query heads per key head, r. `goes_on`: whether the state is wanted. `composed`: whether everything must
    be plain differentiable operations. `looks`: whether asking for a value is cheap and possible.
    """

    near: Near
    map: PreparedMap
    groups: int
    composed: bool
    looks: bool
    normalize: bool = True
    recompute: bool = True
    goes_on: bool = False

    @classmethod
    def of(cls, near: Near, prepared: PreparedMap, q: Tensor, k: Tensor, *how: bool) -> Call:
        """For q (b, h, n, d) and k (b, g, s, d); then whether to normalise, to recompute and to go on."""
        composed = _products.is_composed()
        looks = _products.LOOKS and not composed and q.device.type == "cpu"
        return cls(near, prepared, q.shape[1] // k.shape[1], composed, looks, *how)


class Result(NamedTuple):
    """Rows (b, g, r n, v), the state after the keys, and which rows (b, g, r n, 1) were given a mean; None for none."""

    out: Tensor
    state: State | None = None
    bad: Tensor | None = None
