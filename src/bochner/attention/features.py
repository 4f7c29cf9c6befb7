"""A map made ready for attention: its features, kept in range.

A feature of an exponential map is `exp(w.z + row)`. Rows with small logits, bounded by `|w| |z|`, are exponentiated as
they are, all others relative to their largest logit: no later row moves an earlier one even by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from bochner._products import may_look
from bochner.maps.base import ROLES, Exponent, FeatureMap, Features

EMPTY = -1e30  # the log scale of nothing: finite, so that differences are never NaN
MASKED = -2e30  # below EMPTY, so that exp(MASKED - EMPTY) is 0
BOUNDED_FLOOR = {torch.float32: 1e-30, torch.float64: 1e-200}  # of the normaliser, for features that are at most 1


class Range(NamedTuple):
    """What a dtype holds, in powers of e: twice `calm` or `peak` is below the largest exponent."""

    calm: float  # logits up to here are exponentiated as they are
    peak: float  # where the largest logit of any other row is put
    floor: float  # the least normaliser of exponential features from which no term that mattered has underflowed


RANGES = {torch.float32: Range(43.0, 30.0, 6e-6), torch.float64: Range(340.0, 250.0, 1e-80)}


class PreparedMap:
    """A map with all that does not depend on queries and keys computed once; attention takes it in place of the map.

    `PreparedMap(phi, scale)` is what `linear_attention` makes of a map at every call. Hold one to save that work, for
    example while decoding; make a new one after the map was redrawn, calibrated or trained.
    """

    def __init__(self, phi: FeatureMap, scale: float, dtype: torch.dtype = torch.float32) -> None:
        self.phi, self.scale, self.dtype, self.root = phi, scale, dtype, math.sqrt(scale)
        self.positive = phi.has_positive_sums  # whether normalisers are positive by themselves
        self.reader = phi if phi.has_constant else None  # the map where it sums keys and reads sums in its own way
        # The normaliser of a positive map below which a row is out of range.
        self.floor = RANGES[dtype].floor if phi.is_exponential else BOUNDED_FLOOR[dtype]
        self._exponents: dict[str, Exponent] = {}
        self._functions: dict[str, Callable[[Tensor], Features]] = {}

    def fitted_to(self, k: Tensor, mask: Tensor | None) -> PreparedMap:
        """The same for the keys k (b, g, s, d) of one call, for maps that look at them."""
        if type(self.phi).fitted_to is FeatureMap.fitted_to:
            return self
        phi = self.phi.fitted_to(k.to(self.dtype) * self.root, mask)
        return self if phi is self.phi else PreparedMap(phi, self.scale, self.dtype)

    def exponent(self, role: str) -> Exponent:
        """What an exponential map computes of unscaled rows."""
        if role not in self._exponents:
            found = self.phi.exponent(role)
            assert found is not None
            self._exponents[role] = found.scaled(self.root, self.dtype)
        return self._exponents[role]

    def features(self, role: str, x: Tensor, shift: Tensor | None = None) -> Features:
        """The features of `root * x`, (..., n, d); `shift` (..., n, 1) is added to their log scales."""
        found = self.function(role)(x)
        return found if shift is None else Features(found.values, found.log_scale + shift)

    def function(self, role: str) -> Callable[[Tensor], Features]:
        """The map of one role as a function, made once."""
        if role not in self._functions:
            made = self._exponential(role) if self.phi.is_exponential else None
            self._functions[role] = made or self.phi.prepare_scaled(role, self.root, self.dtype)
        return self._functions[role]

    def few_features(self, role: str, x: Tensor, shift: Tensor | None = None, *, scaled: bool = True) -> Features:
        """The same for so few rows that a bound of their logits costs more than it saves; where a factor of each row
        cancels (not `scaled`), the log scale is anything."""
        if not self.phi.is_exponential:
            return self.features(role, x, shift)
        exponent, x = self.exponent(role), x.to(self.dtype)
        z, row = exponent.at(x) if scaled else (exponent.inner(x), None)
        logits = z @ exponent.weight.mT
        if exponent.offset is not None:
            logits = logits + exponent.offset.unsqueeze(-2)
        top = logits.amax(-1, keepdim=True) - RANGES[self.dtype].peak
        log_scale = top if row is None else row + top
        return Features((logits - top).exp_(), log_scale if shift is None else log_scale + shift)

    def _exponential(self, role: str) -> Callable[[Tensor], Features]:
        exponent, limits, dtype = self.exponent(role), RANGES[self.dtype], self.dtype
        weight = exponent.weight.mT
        reach = torch.linalg.vector_norm(weight.detach(), dim=-2).amax(-1)[..., None, None]
        offset: Tensor | None = None
        lift: Tensor | float = 0.0
        most: Tensor | None = None
        if exponent.offset is not None:  # relative to the largest, which goes into the scale of every row
            offset = exponent.offset.unsqueeze(-2)
            most = offset.detach().amax(-1, keepdim=True)
            offset = offset - most
            lift = offset.detach().abs().amax(-1, keepdim=True)

        def features(x: Tensor) -> Features:
            z, row, square = exponent.parts(x.to(dtype))
            row = row if most is None else row + most
            logits = z @ weight
            if offset is not None:
                logits = logits + offset if logits.requires_grad else logits.add_(offset)
            bound = square.detach().sqrt() * reach + lift
            if may_look(x) and bool(bound.amax() <= limits.calm):
                return Features(logits.exp_(), row)  # what the line below computes, in one pass
            shift = torch.where(bound <= limits.calm, 0, logits.detach().amax(-1, keepdim=True) - limits.peak)
            return Features((logits - shift).exp_(), row + shift)

        return features

    # What a backward pass needs: the tensors that a gradient can reach, and the same map computed from others.

    def tensors(self) -> list[Tensor]:
        """All tensors that features are computed from and that require a gradient."""
        if self.phi.is_exponential:
            found = [t for role in ("query", "key") for t in self.exponent(role) if isinstance(t, Tensor)]
        else:
            found = [*self.phi.parameters(), *self.phi.buffers()]
        return [t for t in found if t.requires_grad]

    def computed_from(self, others: Sequence[Tensor]) -> PreparedMap:
        """The same map made anew, of an exponential one with `others` in place of `tensors()`."""
        again = PreparedMap(self.phi, self.scale, self.dtype)
        if self.phi.is_exponential:
            left = list(others)
            for role in ("query", "key"):
                parts = [left.pop(0) if isinstance(t, Tensor) and t.requires_grad else t for t in self.exponent(role)]
                again._exponents[role] = Exponent(*parts)  # type: ignore[arg-type]
        return again

    def is_closed(self, q: Tensor, k: Tensor) -> bool:
        """Whether no gradient leaves by another way than `tensors()`: of maps that a network outside of them feeds."""
        if self.phi.is_exponential:
            return True
        own = {name: t.detach() for name, t in (*self.phi.named_parameters(), *self.phi.named_buffers())}
        probes = [torch.zeros_like(t[:, :, :1]) for t in (q, k)]
        devices = [] if q.device.type == "cpu" else [q.device]
        with torch.enable_grad(), torch.random.fork_rng(devices, device_type=q.device.type):
            pairs = [functional_call(self.phi, own, x) for x in zip(probes, ROLES, strict=True)]
        return not any(f.requires_grad for pair in pairs for f in pair)
