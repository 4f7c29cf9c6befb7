"""What attention looks like on calibration data: samples for fitting maps, errors of heads, and which heads retrieve.

The error of linear attention is a sum over pairs of (attention weight)^2 times the relative variance of their kernel
estimate, so the moments that `calibrated` is fitted to weigh pairs by the attention they get: half of the weight is
the softmax, half is uniform. With an exact window only pairs outside it count.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bochner.attention.layout import leading
from bochner.hf import inputs
from bochner.hf.calls import Call, exact
from bochner.maps.landmark_fit import Near
from bochner.moments import PairMoments

ROWS = 4096  # keys of each head that maps are fitted to; with 2,048 errors of MiniLM are 2 % higher, with 1,024 10 %
LOOKED = 1024  # queries of a sequence that are looked at, from all over it: what they attend to is (queries, keys)
PROBE, PROBES = 120, 3  # tokens of a passage, and number of probes, for finding heads that retrieve
GOLDEN = (5**0.5 - 1) / 2  # multiples of it lie evenly between whole numbers
GATES = (0.1, 0.5, 0.9)  # where the gradient of the heads' gates is taken
Attention = Callable[[Call], Tensor]


class HeadErrors:
    """The one measure of error: |out - exact| / |exact| of each head's output, over all rows that are not padding.

    >>> q, k, v = (torch.ones(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), torch.tensor([[[[1.0], [3.0]]]]))
    >>> call = Call(q, k, v, False, None, 1.0)  # every query gets the mean of the values, 2
    >>> HeadErrors().add(call, torch.full((1, 1, 2, 1), 3.0)).relative()
    tensor([0.5000], dtype=torch.float64)
    """

    def __init__(self) -> None:
        self.error: Any = 0.0
        self.size: Any = 0.0

    def add(self, call: Call, out: Tensor, truth: Tensor | None = None) -> HeadErrors:
        """Count the output (b, h, n, v) of one call; `truth` if it is known already."""
        truth = exact(call) if truth is None else truth
        error, size = (out - truth).double(), truth.double()
        if call.padding is not None and call.padding.shape[1] == truth.shape[-2]:
            keep = ~call.padding[:, None, :, None]
            error, size = error * keep, size * keep
        self.error = self.error + error.square().sum((0, 2, 3))
        self.size = self.size + size.square().sum((0, 2, 3))
        return self

    def squared(self) -> Tensor:
        """Squares of the relative errors, (h,); what distillation minimises."""
        return self.error / self.size.clamp_min(1e-30)

    def relative(self) -> Tensor:
        """Relative errors, (h,)."""
        return self.squared().sqrt()


def option_errors(
    model: Any,
    options: Mapping[str, Mapping[Any, Attention]],
    data: Sequence[dict[str, Any]],
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[Any, HeadErrors]]:
    """Errors of each head of some modules under each of several attentions, on the inputs that exact attention sees."""
    from bochner.hf.observe import recording, run

    found = {name: {key: HeadErrors() for key in several} for name, several in options.items()}

    @torch.no_grad()
    def look(name: str, call: Call) -> Tensor | None:
        if name not in options:
            return None
        truth = exact(call)
        for key, attention in options[name].items():
            found[name][key].add(call, attention(call), truth)
        return truth

    with recording(model, look):
        for i, batch in enumerate(data):
            say(f"measuring errors, batch {i + 1} of {len(data)}")
            run(model, batch)
    return {name: e for name, e in found.items() if all(isinstance(x.error, Tensor) for x in e.values())}


@dataclass
class Far:
    """Which pairs of a call are allowed, and which of those lie outside window and sinks: (b, 1, n, s) bool."""

    allowed: Tensor
    far: Tensor

    @classmethod
    def of(
        cls,
        call: Call,
        window: int | None = None,
        sinks: int = 0,
        window_kind: str = "block",
        rows: Tensor | None = None,
    ) -> Far:
        """Of all queries of a call, or of some `rows` of them; places are counted from the first unpadded key."""
        n, s = call.query.shape[-2], call.key.shape[-2]
        rows = torch.arange(n, device=call.key.device) if rows is None else rows
        near, i, j = Near(call.is_causal, window, sinks, window_kind), s - n + rows, torch.arange(s, device=rows.device)
        allowed, starts = near.allowed(i, j)[None, None], [0]
        if call.padding is not None:
            keep, starts = ~call.padding[:, None, None, :], leading(call.padding).tolist()
            allowed = allowed & keep & (keep.mT[..., rows, :] if n == s else torch.ones_like(keep[..., :1]))
        allowed = allowed.expand(call.query.shape[0], 1, len(rows), s)
        return cls(allowed, allowed & torch.stack([near.far(i - first, j - first) for first in starts])[:, None])


def attention_weights(call: Call, allowed: Tensor) -> Tensor:
    """The softmax weights (b, h, n, s) in float32; rows that see nothing are zero."""
    key = call.key.repeat_interleave(call.group, dim=1)
    logits = ((call.query.float() @ key.float().mT) * call.scale).masked_fill(~allowed, -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0)


@dataclass
class Samples:
    """Sequences of queries (h, n, d), keys and values (g, n, d) of a layer, scaled: what its maps are fitted to."""

    q: list[Tensor] = field(default_factory=list)
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    rows: int = 0

    @property
    def length(self) -> int:
        """The keys of the longest sequence."""
        return max((k.shape[1] for k in self.k), default=0)

    def add(self, call: Call) -> None:
        """Take the sequences of a call, unless there are enough."""
        root = call.scale**0.5
        for b in range(call.query.shape[0]):
            if self.rows >= ROWS:
                return
            q, k, v = call.query[b], call.key[b], call.value[b]
            if call.padding is not None:
                keep = ~call.padding[b]
                k, v = k[:, keep], v[:, keep]
                q = q[:, keep] if q.shape[1] == keep.shape[0] else q
            self.q.append(q.float() * root)
            self.k.append(k.float() * root)
            self.v.append(v.float())
            self.rows += k.shape[1]

    @torch.no_grad()
    def moments_of(self, heads: Sequence[int], *, is_causal: bool, **near: Any) -> PairMoments:
        """The moments of the pairs outside a window (`near`: `window`, `sinks`, `window_kind`) of some key heads.

        Half by attention and half uniform, as in `CalibratedFeatures.calibrate_`.
        """
        total: PairMoments | None = None
        for q, k, v in zip(self.q, self.k, self.v, strict=True):
            group, n = len(q) // len(k), q.shape[1]
            places = [g * group + i for g in heads for i in range(group)]
            call = Call(q[None, places], k[None, list(heads)], v[None, list(heads)], is_causal, None, 1.0)
            rows = torch.linspace(0, n - 1, min(n, LOOKED), device=q.device).round().long()
            far = Far.of(call, **near, rows=rows)
            call = call._replace(query=call.query[..., rows, :])
            attended = (attention_weights(call, far.allowed) * far.far)[0]  # (h, n, s)
            count = far.far.sum().clamp_min(1)
            w = attended + attended.sum((1, 2), keepdim=True) / count * far.far[0]
            x = call.query[0].reshape(len(heads), -1, q.shape[-1])  # the query heads of a group, one after another
            sums = [t.double() for t in PairMoments.of(x, call.key[0], w.reshape(*x.shape[:2], -1))[:-1]]
            found = PairMoments(*sums, rows=int(far.allowed.any(-1).sum()))  # type: ignore[arg-type, misc]
            total = found if total is None else total + found
        assert total is not None
        return total


def observe(
    model: Any,
    names: Iterable[str],
    data: Sequence[dict[str, Any]],
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Samples]:
    """Run the exact model over the data and gather samples of some attention modules.

    Batches are taken from all over the data until there are enough, so that texts of several kinds all have a part.
    """
    from bochner.hf.observe import recording, run

    found = {name: Samples() for name in names}

    def look(name: str, call: Call) -> None:
        if name in found:
            found[name].add(call)

    with recording(model, look):
        for i, index in enumerate(_all_over(len(data))):
            if found and min(s.rows for s in found.values()) >= ROWS:
                break
            say(f"observing attention, batch {i + 1} of at most {len(data)}")
            run(model, data[index])
    return found


def _all_over(count: int) -> list[int]:
    """0, 1, ..., count - 1 in an order whose every beginning is spread over all of them.

    >>> _all_over(6)
    [0, 5, 2, 4, 1, 3]
    """
    return sorted(range(count), key=lambda i: i * GOLDEN % 1)


def retrieval_scores(model: Any, layers: Mapping[str, Any], data: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Which query heads of a language model look something up, (h,) by module name: the fall of a loss as they become
    exact.

    Probes are made of the calibration tokens: a passage, another, the first again; the loss is that on the repeat. Its
    gradient is taken along gates of all heads, from 0, the attention of `layers`, to 1, exact attention. Layers whose
    gates have no influence are left out.
    """
    from bochner.hf.observe import frozen, recording, run

    tokens = inputs.stream(data)
    reach = max(getattr(fate, "reach", 0) for layer in layers.values() for fate in layer.plan.fates)
    length = min(max(PROBE, reach // 2 + 32), len(tokens) // 2, inputs.positions(model).get("input_ids", 2**31) // 3)
    pieces = [tokens[start : start + 2 * length].split(length) for start in range(0, len(tokens), 2 * length)]
    probes = [torch.cat([p[0], p[1], p[0]])[None] for p in pieces[:PROBES] if len(p) == 2 and len(p[1]) == length]
    device, gates, total = next(model.parameters()).device, dict[str, Tensor](), dict[str, Tensor]()

    def look(name: str, call: Call) -> Tensor | None:
        if name not in layers:
            return None
        approximate = layers[name](call)
        g = gates[name][None, :, None, None].to(approximate.dtype)
        return g * exact(call) + (1 - g) * approximate

    with frozen(model):
        for level, ids in itertools.product(GATES, probes):
            for name, layer in layers.items():
                gates[name] = torch.full((layer.plan.num_heads,), level, device=device, requires_grad=True)
            with recording(model, look), torch.enable_grad():
                logits = run(model, {"input_ids": ids}, gradient=True).logits[:, -length:-1]
                target = ids[:, -length + 1 :].to(logits.device)
                nn.functional.cross_entropy(logits.float().transpose(1, 2), target).backward()
            for name, g in gates.items():
                if g.grad is not None:
                    total[name] = total.get(name, 0) - g.grad.double().cpu() / (len(GATES) * len(probes))
    return total


def peak_scores(samples: Samples, is_causal: bool, **near: Any) -> Tensor:
    """How high the attention of each query head peaks outside window and sinks (`near`), the mean over rows, (h,)."""
    total, rows = torch.zeros(()), 0
    for q, k, v in zip(samples.q, samples.k, samples.v, strict=True):
        call = Call(q[None], k[None], v[None], is_causal, None, 1.0)
        far = Far.of(call, **near)
        total = total + (attention_weights(call, far.allowed) * far.far).amax(-1).double().sum((0, 2)).cpu()
        rows += q.shape[1]
    return total / max(rows, 1)
