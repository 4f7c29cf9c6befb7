"""Moments: attention read from the mean and the covariance of the keys, with nothing to calibrate."""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from bochner._checks import BochnerError, make_generator, positive_int
from bochner.maps.base import NOTHING, FeatureMap, Features, pooled
from bochner.projections import some_seed

CLAMP = 4.0  # the most that the variance of a group's keys along a query adds to its logarithm
ROUNDS = 4  # of k-means; more change the error of attention by less than 1 %


class MomentsFeatures(FeatureMap):
    """The second-order cumulant of the keys of each group: exact where they are Gaussian.

    Of the keys of a group and their values are kept the number n, the means `k` and `u`, the covariance S of the keys
    and their covariance C with the values. To a query these keys weigh, and are worth on average,

        sum_j exp(q . k_j) ~ n exp(q . k + q'S q / 2),        u + C'q,

    with `q'S q / 2` cut off at 4 and `C'q` made smaller by as much. The sums of `[k, 1] [v, 1, k]'` hold it all.
    They are a monoid, as the sums of features are, but a row is not linear in them: `answer` reads them.

    Biased, deterministic; signed, with positive normalisers. The moments are those of the sequence that is read:
    nothing is fitted and nothing can drift. It is the map to put beside an exact window where there is no calibration
    data. Not for models trained from scratch.

    `num_groups`: G. With several the keys are divided among anchors: of `calibrate_`, else k-means of the sequence
    itself, which causal attention cannot see. Cost O(G d (d + v)) per row, as of 2 d features per group.
    `num_features` and `seed` are those of every map; the first means nothing here, the second draws the first anchors.

    >>> from bochner import exact_attention, linear_attention
    >>> q, k = (torch.randn(1, 1, 2000, 8, generator=torch.Generator().manual_seed(i)) for i in range(2))
    >>> want = exact_attention(q, k, k)
    >>> float((linear_attention(q, k, k, MomentsFeatures(8)) - want).norm() / want.norm()) < 0.2
    True
    """

    unbiased = False
    has_constant = True
    has_positive_sums = True
    anchors: Tensor
    is_fitted: Tensor

    def __init__(
        self,
        dim: int,
        num_features: int | None = None,
        *,
        num_groups: int = 1,
        num_heads: int | None = None,
        seed: int | None = 0,
        generator: Generator | None = None,
    ) -> None:
        super().__init__(dim, dim + 1, num_heads=num_heads)
        self.num_groups = positive_int(num_groups, "num_groups", "MomentsFeatures")
        self.seed = some_seed(make_generator(seed, generator))
        anchors = torch.zeros(*self._lead, num_groups, dim, device="cpu")
        self._keep(anchors=anchors, is_fitted=torch.zeros((), dtype=torch.bool, device="cpu"))

    def _features(self, x: Tensor, role: str) -> Features:
        last = torch.zeros_like(x[..., :1]) if role == "query" else torch.ones_like(x[..., :1])
        return Features(torch.cat([x, last], dim=-1), torch.zeros_like(last))

    def num_columns(self, value_dim: int) -> int:
        return self.num_groups * (value_dim + 1 + self.dim)

    def columns(self, features: Features, v: Tensor) -> Tensor:
        k = features.values[..., :-1]
        own = torch.cat([v, features.values[..., -1:], k], dim=-1)
        if self.num_groups == 1:
            return own
        group = one_hot(nearest(k, self.anchors.to(k.dtype)), self.num_groups).to(k.dtype)
        return (group.unsqueeze(-1) * own.unsqueeze(-2)).flatten(-2)

    def answer(self, total: Tensor, last: Tensor | None, query: Tensor) -> tuple[Tensor, Tensor | None]:
        assert last is not None
        by_group = (self.num_groups, -1)
        size = total.shape[-1] // self.num_groups - 1 - self.dim
        total, last, q = total.unflatten(-1, by_group), last.unflatten(-1, by_group), query[..., None, :-1]
        count = last[..., size : size + 1]
        n = torch.where(count > 0, count, 1)
        # 1. Means and second moments along the query.
        mean, value = total[..., size : size + 1] / n, last[..., :size] / n
        half = (((total[..., size + 1 :] * q).sum(-1, keepdim=True) / n - mean.square()) / 2).clamp_min(0)
        tilt = total[..., :size] / n - mean * value
        # 2. The weight of each group and its mean value.
        kept = CLAMP / half.clamp_min(CLAMP)
        log_weight = torch.where(count > 0, n.log() + mean + half.clamp_max(CLAMP), NOTHING)
        rows = torch.cat([value + kept * tilt, torch.ones_like(mean)], dim=-1)
        # 3. All groups.
        ref = log_weight.detach().amax(-2)
        weight = (log_weight - ref.unsqueeze(-2)).exp() * (count > 0)
        return (weight * rows).sum(-2), ref

    def fitted_to(self, k: Tensor, mask: Tensor | None) -> FeatureMap:
        """The map with anchors for the keys k (b, g, s, d), scaled, of these sequences; `mask` (b, s)."""
        if self.num_groups == 1 or bool(self.is_fitted):
            return self
        anchors = k_means(k.detach(), mask, self.num_groups, self.seed)
        other = MomentsFeatures(self.dim, num_groups=self.num_groups, num_heads=self.num_heads)
        other.anchors = anchors
        return other

    def check_causal(self) -> None:
        if self.num_groups > 1 and not bool(self.is_fitted):
            raise BochnerError(
                f"MomentsFeatures with num_groups={self.num_groups} takes its groups from the whole sequence, which "
                "causal attention must not see; call calibrate_(q, k) first, or use num_groups=1."
            )

    def _calibrate(self, q: Tensor, k: Tensor) -> None:
        self._keep(anchors=k_means(k.unsqueeze(0), None, self.num_groups, self.seed)[0])
        self.is_fitted.fill_(True)

    def _calibrate_sequences(self, q: list[Tensor], k: list[Tensor]) -> None:
        self._calibrate(q[0], torch.cat([pooled(t) for t in k], dim=1))

    def extra_repr(self) -> str:
        heads = "" if self.num_heads is None else f", num_heads={self.num_heads}"
        return f"dim={self.dim}, num_groups={self.num_groups}{heads}"


def nearest(k: Tensor, anchors: Tensor) -> Tensor:
    """For keys (..., s, d) the nearest of anchors (..., G, d), (..., s)."""
    return (k @ anchors.mT - 0.5 * anchors.square().sum(-1).unsqueeze(-2)).argmax(-1)


def k_means(k: Tensor, mask: Tensor | None, groups: int, seed: int) -> Tensor:
    """Centres (b, g, G, d) of the keys k (b, g, s, d) that are not masked (b, s): a few rounds from random keys."""
    b, _, s, _ = k.shape
    order = torch.randperm(s, generator=make_generator(seed), device="cpu").to(k.device)
    there = torch.ones(b, s, dtype=torch.bool, device=k.device) if mask is None else ~mask
    chosen = there[:, order].to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :groups]
    index = order[chosen] if s >= groups else order[chosen].repeat(1, groups)[:, :groups]
    centres = k.gather(2, index[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[-1]))
    for _ in range(ROUNDS):
        member = one_hot(nearest(k, centres), groups).to(k.dtype) * there[:, None, :, None]
        count = member.sum(-2).unsqueeze(-1)
        centres = torch.where(count > 0, member.mT @ k / count.clamp_min(1), centres)
    return centres
