"""What the kernel sees inside the zones of a sliding window: all places that the band does not hold exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from bochner.attention.call import Call
from bochner.attention.geometry import Geometry
from bochner.attention.numerics import is_composed, product

pad = torch.nn.functional.pad


class Band(NamedTuple):
    """Any part of a zone: log_scale (b, g, t, r c, z) of what a row sees; psi, u (b, g, t, z, .): features, values."""

    place: Geometry
    psi: Tensor
    log_scale: Tensor
    u: Tensor

    def top(self) -> Tensor:
        """The largest scale that a row sees, (b, g, t, r c, 1)."""
        return self.log_scale.amax(-1, keepdim=True)

    def add(self, phi: Tensor, own: Tensor, log_ref: Tensor, *sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of rows (.., r c, v + 1), of their last feature alone, and of features (.., r c, m), with these keys."""
        kernel, last, norm = sums
        decay, u = self._decay(own, log_ref), pad(self.u, (0, 1), value=1.0)
        kernel = kernel + ((phi @ self.psi.mT) * decay) @ u
        return kernel, last + (decay * self.psi[..., -1:].mT) @ u, norm + decay @ self.psi

    def adjoint(self, phi: Tensor, own: Tensor, log_ref: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of phi, and of the features and values of the first keys of the segment, from those of the rows."""
        decay = self._decay(own, log_ref)
        back = (g[..., :-1] @ self.u.mT + g[..., -1:]) * decay
        du = ((phi @ self.psi.mT) * decay).mT @ g[..., :-1]
        return back @ self.psi, self.place.zones_adjoint(back.mT @ phi), self.place.zones_adjoint(du)

    def twice(self) -> Band:
        """For all rows twice, one after another."""
        return self._replace(log_scale=self.log_scale.repeat(1, 1, 1, 2, 1))

    def _decay(self, own: Tensor, log_ref: Tensor) -> Tensor:
        return (self.log_scale + (own - log_ref)).exp()


class Stairs(NamedTuple):
    """Causal, blocks as long as the window: row i of a block sees the places up to i of the block before.

    psi (b, g, t, c, m); weight (b, g, t, c, 1), and values with ones times it (b, g, t, c, v + 1), relative to
    exp(ref), ref (b, g, t): no key of the rows' own block enters it. `first`: the place of the first row in its block.
    """

    call: Call
    psi: Tensor
    weight: Tensor
    values: Tensor
    ref: Tensor
    first: int

    def top(self) -> Tensor:
        return self.ref[..., None, None]

    def add(self, phi: Tensor, own: Tensor, log_ref: Tensor, *sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kernel, last, norm = sums
        factor = (self.top() + own - log_ref).exp()
        scores = self._lower(product("scores", phi, self.psi.mT))
        kernel = kernel + product("near", scores, self.values) * factor
        if self.call.top_up is not None:
            last = last + self._lower(self.psi[..., -1:].mT.expand_as(scores).clone()) @ self.values * factor
        if not self.call.positive:
            norm = norm + self._lower(self.weight.mT.expand_as(scores).clone()) @ self.psi * factor
        return kernel, last, norm

    def adjoint(self, phi: Tensor, own: Tensor, log_ref: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scaled = g * (self.top() + own - log_ref).exp()
        scores, back = self._lower(phi @ self.psi.mT), self._lower(scaled @ self.values.mT)
        dvalues = (scores.mT @ scaled[..., :-1]) * self.weight
        return back @ self.psi, (back.mT @ phi).flatten(2, 3), dvalues.flatten(2, 3)

    def twice(self) -> Stairs:
        return self._replace(call=replace(self.call, groups=2 * self.call.groups))

    def _lower(self, scores: Tensor) -> Tensor:
        """Scores (b, g, t, r c, c) with zeros where the place is beyond the row's."""
        rows = scores.unflatten(3, (self.call.groups, -1))
        kept = scores.requires_grad or is_composed()
        return (rows.tril(self.first) if kept else rows.tril_(self.first)).flatten(3, 4)
