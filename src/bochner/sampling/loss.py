"""The softmax loss over very many classes, estimated from a few."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bochner._checks import BochnerError, make_generator, one_of, positive_int
from bochner.sampling.samplers import Sampler

ROWS = 256  # queries whose full logits are formed at a time by the exact loss
PENDING = 1 << 14  # class numbers noted before they are gone through for repeated ones


class SampledSoftmaxLoss(nn.Module):
    """Cross entropy `log Z(x) - (x . y_t + b_t)` with Z estimated from `num_samples` classes of a sampler.

    `Z ~ exp(o_t) + (1/k) sum_{j != t} exp(o_j) / q(j | x)`, o = x . y + b: the log-q correction, which makes the
    estimate of Z unbiased for every sampler q; draws that hit the target are left out. On average the loss is above the
    exact one by no more than the relative variance of Z (Jensen). So a q near the softmax needs few draws.
    In `eval()` the loss is exact.

    The class vectors belong to the caller. After `optimizer.step()` call `refresh_(weight, bias)`. Optimizers that move
    every row (Adam on dense gradients, weight decay) want `refresh_(weight, bias, all_classes=True)` now and then.

    Args:
        sampler: any `Sampler`.
        num_samples: k.
        sparse: gradients of `weight` as sparse tensors, for SGD and SparseAdam; dense ones cost more than the rest.
        reduction: "mean", "sum" or "none".
        ignore_index: targets that do not count; where none does, the loss is zero.
        seed: of the draws.

    >>> from bochner.sampling import UniformSampler
    >>> loss = SampledSoftmaxLoss(UniformSampler(1000), 20)
    >>> weight = torch.zeros(1000, 8, requires_grad=True)
    >>> loss(torch.ones(4, 8), torch.tensor([1, 2, 3, 4]), weight).backward()
    """

    def __init__(
        self,
        sampler: Sampler,
        num_samples: int,
        *,
        sparse: bool = False,
        reduction: str = "mean",
        ignore_index: int = -100,
        seed: int = 0,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        if not isinstance(sampler, Sampler):
            raise BochnerError(f"The 'sampler' of {owner} must be a Sampler, got {type(sampler).__name__}.")
        self.sampler = sampler
        self.num_samples = positive_int(num_samples, "num_samples", owner)
        self.sparse, self.ignore_index = sparse, ignore_index
        self.reduction = one_of(reduction, "reduction", owner, ("mean", "sum", "none"))
        self.generator = make_generator(seed)
        self._touched: list[Tensor] = []  # classes since the last refresh; no repeats in the first entry

    def forward(self, hidden: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """hidden (..., d), target (...) of class ids, weight (n, d), bias (n,)."""
        x, t = self._flat(hidden, target, weight)
        used = t != self.ignore_index
        x, t = x[used], t[used]
        if len(t) and not 0 <= int(t.min()) <= int(t.max()) < len(weight):
            outside = int(t.min()) if int(t.min()) < 0 else int(t.max())
            raise BochnerError(
                f"The 'target' of {type(self).__name__} must be in 0..{len(weight) - 1}, or ignore_index "
                f"({self.ignore_index}), got {outside}."
            )
        value = self._sampled(x, t, weight, bias) if self.training else self._exact(x, t, weight, bias)
        if self.reduction == "none":
            return hidden.new_zeros(target.shape, dtype=value.dtype).masked_scatter(used.view(target.shape), value)
        return value.sum() / (max(1, len(t)) if self.reduction == "mean" else 1)

    def _sampled(self, x: Tensor, t: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ids, log_q = self.sampler.draw(x, self.num_samples, generator=self.generator)
        classes = torch.cat([t[:, None], ids], 1)
        self._note(classes.detach().flatten())
        y = F.embedding(classes, weight, sparse=self.sparse)
        logits = torch.bmm(y, x.to(y.dtype).unsqueeze(-1)).squeeze(-1)
        if bias is not None:
            logits = logits + bias[classes]
        correction = F.pad(log_q.to(logits.dtype) + math.log(self.num_samples), (1, 0))
        hit = F.pad(ids == t[:, None], (1, 0))
        return torch.logsumexp((logits - correction).masked_fill(hit, -math.inf), 1) - logits[:, 0]

    def _note(self, classes: Tensor) -> None:
        """Remember the classes for `refresh_`, in memory that their number bounds, however long it is not called."""
        if type(self.sampler).update_ is Sampler.update_:  # it does not look at class vectors
            return
        self._touched.append(classes)
        if sum(map(len, self._touched)) > 2 * len(self._touched[0]) + PENDING:
            self._touched = [torch.unique(torch.cat(self._touched))]

    def _exact(self, x: Tensor, t: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        parts = [
            F.cross_entropy(F.linear(a, weight, bias), b, reduction="none")
            for a, b in zip(x.split(ROWS), t.split(ROWS), strict=True)
        ]
        return torch.cat(parts) if parts else x.new_zeros(0)

    @torch.no_grad()
    def refresh_(self, weight: Tensor, bias: Tensor | None = None, *, all_classes: bool = False) -> None:
        """Tell the sampler the present vectors of the classes that took part since the last call, or of all."""
        if all_classes:
            self.sampler.set_classes_(weight, bias)
        elif self._touched:
            ids = torch.unique(torch.cat(self._touched))
            self.sampler.update_(ids, weight[ids], None if bias is None else bias[ids])
        self._touched = []

    def _flat(self, hidden: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        owner = type(self).__name__
        if hidden.shape[:-1] != target.shape or weight.shape != (self.sampler.num_classes, hidden.shape[-1]):
            raise BochnerError(
                f"The inputs of {owner} must be hidden (..., d), target (...) and weight "
                f"({self.sampler.num_classes}, d), got {tuple(hidden.shape)}, {tuple(target.shape)} and "
                f"{tuple(weight.shape)}."
            )
        if target.dtype not in (torch.int64, torch.int32):
            raise BochnerError(f"The 'target' of {owner} must be integers, got {target.dtype}; call .long() on it.")
        return hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1).long()
