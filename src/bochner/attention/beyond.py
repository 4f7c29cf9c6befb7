"""Sums of all blocks outside each zone, some blocks of rows at a time: what the kernel sees of windowed attention.

Row block i sees the laid-out key blocks i to i + width - 1 exactly (`Geometry`), and these sums of all others. A
*segment* of row blocks needs the sums before it, those behind it, and of the blocks that its zones touch each its own;
one product with a small triangular matrix adds them up. Nothing is subtracted, and memory does not grow with the
number of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bochner.attention.call import Call
from bochner.attention.geometry import Geometry
from bochner.attention.numerics import EMPTY, MASKED, add_product, may_look, mixed, product, weighted
from bochner.attention.recompute import Traced
from bochner.attention.state import spread_mask
from bochner.maps.base import Features


class Sums(NamedTuple):
    """Packed sums of some keys, (b, g, m, v + 1), relative to exp(ref), ref (b, g)."""

    total: Tensor
    ref: Tensor


class Outside(NamedTuple):
    """What lies beyond the zone of each row block, (b, g, t, m, v + 1), relative to exp(refs), refs (b, g, t)."""

    far: Tensor
    refs: Tensor


class Mixture(NamedTuple):
    """How the sums beyond t zones and before the next segment are made of l blocks, and of those before and behind.

    blocks (b, g, t + 1, l) or (t + 1, l); before, behind (b, g, t + 1); key_refs (b, g, l or 1), refs (b, g, t + 1):
    what the sums of the blocks and the result are relative to.
    """

    blocks: Tensor
    before: Tensor
    behind: Tensor | None
    key_refs: Tensor
    refs: Tensor


@dataclass(frozen=True)
class Beyond:
    """`holes` (b, keys): keys that the kernel leaves out."""

    call: Call
    place: Geometry
    holes: Tensor

    def behind(self, k: Tensor, v: Tensor, segments: list[slice]) -> list[Sums | None]:
        """The sums of all keys behind the last zone of each segment, None for none."""
        if self.call.is_causal:
            return [None] * len(segments)
        found: list[Sums | None] = [None]
        features = self.call.features("key")
        for blocks in reversed(segments[1:]):
            span = self._shifted(blocks)
            psi, scale, values = self.by_blocks(features(self.place.take(k, span)), self.place.take(v, span), span)
            psi, scale, values = (t.flatten(2, 3) for t in (psi, scale, values))
            last, ref = found[-1], scale.detach().amax((-2, -1))
            if last is not None:
                ref = torch.maximum(ref, last.ref)
            total = psi.mT @ weighted(values, (scale - ref[..., None, None]).exp())
            if last is not None:
                total = add_product(total, last.total, (last.ref - ref).exp()[..., None, None])
            found.append(Sums(total, ref))
        return found[::-1]

    def behind_adjoint(
        self, k: Tensor, v: Tensor, segments: list[slice], behind: list[Sums | None], grads: list[Tensor | None]
    ) -> Iterator[tuple[slice, Tensor, Tensor, list[Tensor | None]]]:
        """Spans with the gradients of their keys and values, and of the parameters, from those of the sums behind."""
        call, grad, last = self.call, None, None
        features = call.traced_features("key")
        for blocks, sums, more in zip(segments[1:], behind, grads, strict=False):
            if sums is None or more is None:
                return
            if grad is not None and last is not None:
                more = torch.addcmul(more, grad, (sums.ref - last).exp()[..., None, None])
            grad, last, span = more, sums.ref, self._shifted(blocks)
            f = Traced(features, self.place.take(k, span), call.parameters)
            psi, scale, values = self.by_blocks(Features(f.values, f.log_scale), self.place.take(v, span), span)
            dpsi, dv = _sums_adjoint(psi, scale - last[..., None, None, None], values, grad.unsqueeze(2))
            dk, params = f.pull(dpsi, (f.values * dpsi).sum(-1, keepdim=True))
            yield span, dk, dv, params

    def outside(self, f: Features, v: Tensor, blocks: slice, before: Sums, behind: Sums | None) -> tuple[Outside, Sums]:
        """For a segment, from features and values of its `span` or of more keys; and what lies before the next."""
        psi, scale, values = self.by_blocks(f, v, self.span(blocks))
        mix = self._mixture(scale, blocks, before, behind)
        values = weighted(values, (scale - mix.key_refs[..., None, None]).exp(), name="weighted")
        sums = product("sums", psi.mT, values)
        more = [(before.total, mix.before)] if not may_look(before.ref) or bool((before.ref > EMPTY).any()) else []
        if behind is not None and mix.behind is not None:
            more.append((behind.total, mix.behind))
        far, last = mixed("outside", mix.blocks, sums, more)
        return Outside(far, mix.refs[..., :-1]), Sums(last, mix.refs[..., -1])

    def outside_adjoint(
        self, f: Features, v: Tensor, blocks: slice, before: Sums, behind: Sums | None, dfar: Tensor, dnext: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of the features and values of the `span`, and of the sums before and behind."""
        psi, scale, values = self.by_blocks(f, v, self.span(blocks))
        mix = self._mixture(scale, blocks, before, behind)
        grads = torch.cat([dfar, dnext.unsqueeze(2)], dim=2)
        dbefore = (grads * mix.before[..., None, None]).sum(2)
        dbehind = None if mix.behind is None else (grads * mix.behind[..., None, None]).sum(2)
        dsums = (mix.blocks.mT @ grads.flatten(3)).unflatten(-1, grads.shape[3:])
        return *_sums_adjoint(psi, scale - mix.key_refs[..., None, None], values, dsums), dbefore, dbehind

    def span(self, blocks: slice) -> slice:
        """The laid-out keys whose sums a segment needs."""
        c, place = self.place.block, self.place
        stop = blocks.stop if self.call.is_causal else blocks.stop + place.before + place.after
        return slice(blocks.start * c, stop * c)

    def _shifted(self, blocks: slice) -> slice:
        """The laid-out keys behind the segment before this one and not behind this one."""
        c, near = self.place.block, self.place.before + self.place.after
        return slice((blocks.start + near) * c, (blocks.stop + near) * c)

    def by_blocks(self, f: Features, v: Tensor, span: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Features, log scales and values of some keys, by blocks (b, g, l, c, .)."""
        c, place = self.place.block, self.place
        psi, scale, values = (t[..., : span.stop - span.start, :] for t in (*f, v))
        scale = scale.masked_fill(spread_mask(place.take_mask(self.holes, span)), MASKED)
        return psi.unflatten(2, (-1, c)), scale.unflatten(2, (-1, c)), values.to(psi.dtype).unflatten(2, (-1, c))

    def _mixture(self, scale: Tensor, blocks: slice, before: Sums, behind: Sums | None) -> Mixture:
        tops = scale.detach().amax((-2, -1))
        count, t = scale.shape[2], blocks.stop - blocks.start
        row = torch.arange(t + 1, device=scale.device)[:, None]
        block = torch.arange(count, device=scale.device)[None, :]
        if self.call.is_causal:  # no later key may move a row, even by rounding: references that grow
            refs = torch.cat([before.ref.unsqueeze(-1), tops], dim=-1).cummax(-1).values
            fade = (refs[..., None, 1:] - refs[..., :, None]).clamp_max(0).exp()
            return Mixture(fade * (block < row), (refs[..., :1] - refs).exp(), None, refs[..., 1:], refs)
        width = 1 + self.place.before + self.place.after
        outside = (block < row) | ((block >= row + width) & (row < t))
        top = torch.maximum(before.ref, tops.amax(-1))
        if behind is not None:
            top = torch.maximum(top, behind.ref)
        lead = (*top.shape, t + 1)
        stop = None if behind is None else (behind.ref - top).exp().unsqueeze(-1) * (t > row.T)
        start = (before.ref - top).exp().unsqueeze(-1).expand(lead)
        return Mixture(outside.to(scale.dtype), start, stop, top.unsqueeze(-1), top.unsqueeze(-1).expand(lead))


def _sums_adjoint(psi: Tensor, log_weight: Tensor, values: Tensor, dsums: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of features (b, g, l c, m) and values (b, g, l c, v) of blocks, from those of their sums."""
    weight = log_weight.exp()
    return (weighted(values, weight) @ dsums.mT).flatten(2, 3), ((psi @ dsums[..., :-1]) * weight).flatten(2, 3)
