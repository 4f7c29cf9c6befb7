"""Drift: are inputs of the kind that the maps were calibrated on? A few numbers per layer, and one warning.

Maps are fitted to the queries and keys of the calibration texts, and can be far off for others. A sequence's signature
is the mean of its first queries and keys, over a fixed number of places so that rotary positions are the same, in a few
random directions. Its mean and spread over the calibration sequences are noted in the plan; a call whose signatures lie
many spreads away is unlike all that was seen. One layer tells little: the mean over all layers of a pass is about 1 for
texts of the same kind, whoever wrote them, and about 2 for kinds on which maps lose half as much again
(experiments/fits_that_travel.py).

With c sequences the variance of a new signature about their mean is estimated by

    (1 + 3/(2 c)) (w t + (c - 1) s) / (w + c - 1),

s being the variance of the c signatures and t what the tokens within them let expect, their variance over the number of
places, times a factor for their correlation: one sequence is enough, and many speak for themselves.

A decoder's landmark map is as good as random for keys farther back than any it was fitted to, so that texts much longer
than the calibration's are warned of as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from bochner._checks import BochnerWarning
from bochner.hf.attention import LinearAttention
from bochner.hf.calls import Call
from bochner.hf.plan import LayerPlan

DIRECTIONS = 8
PLACES = 64  # places of a sequence that its signature is the mean of, at most
CORRELATION = 1.4  # of tokens: by how much means vary more than those of independent ones, in models of text 0.5 to 7
WEIGHT = 2.0  # w above, in sequences
FAR, FAR_TOGETHER = 3.5, 1.8  # spreads beyond which inputs are strange: of one layer, and of the mean of many
LONGER = 2  # times the longest calibration sequence: beyond that a text is too long for a decoder's maps


class Alarm:
    """Shared by the layers of a converted model: it warns once of strange inputs, and once of long ones.

    `names`: the layers that have notes; each tells its distance, and the last of a pass makes their mean complete.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names, self.distances = frozenset(names), dict[str, float]()
        self.warned = self.warned_of_length = False

    def hear(self, name: str, distance: float) -> None:
        """The distance of one layer's inputs; the first one again begins another pass."""
        if name in self.distances:
            self.distances.clear()
        self.distances[name] = distance
        count, mean = len(self.distances), sum(self.distances.values()) / len(self.distances)
        if count < len(self.names) or mean <= max(FAR / count**0.5, FAR_TOGETHER):
            return
        self.warned = True
        warnings.warn(
            f"These inputs are unlike the calibration data: their queries and keys lie {mean:.1f} spreads from what "
            "was seen, and the maps were fitted to others; add inputs of this kind to the calibration data, or expect "
            "worse.",
            BochnerWarning,
            stacklevel=6,
        )


def warn(layer: LinearAttention, call: Call, seen: int | None) -> None:
    """Warn of inputs unlike the calibration data; pieces of a sequence after its first for their length alone.

    `seen`: the tokens that a cache has seen with this call, None without a cache.
    """
    alarm, plan, new = layer.drift, layer.plan, call.key.shape[-2]
    if alarm is None or layer.trained or not plan.has_map or plan.seen is None or torch.compiler.is_compiling():
        return
    tokens, fitted = new if seen is None else seen, plan.seen["length"]
    landmarks = plan.is_causal and any(getattr(fate, "feature_map", None) == "landmark" for fate in plan.fates)
    if landmarks and tokens > LONGER * fitted and not alarm.warned_of_length:
        alarm.warned_of_length = True
        warnings.warn(
            f"A text of {tokens} tokens is too long for the maps of {plan.name}, which were fitted to {fitted} tokens: "
            "they are as good as random for keys farther back; calibrate on texts as long as yours (the 'max_length' "
            "of Calibration), or leave the far ones out (Recipe(None, window=...)).",
            BochnerWarning,
            stacklevel=5,
        )
    if not alarm.warned and tokens == new and (far := distance(plan, call)) is not None:
        alarm.hear(plan.name, far)


def note(plan: LayerPlan, q: Sequence[Tensor], k: Sequence[Tensor]) -> None:
    """Note in a layer's plan what the calibration sequences look like: q, k (h, n, d) each, scaled."""
    lengths = sorted(min(x.shape[-2], y.shape[-2]) for x, y in zip(q, k, strict=True))
    places = min(PLACES, lengths[len(lengths) // 4]) if lengths else 0
    if places < 2 or plan.is_cross:
        return
    pairs = zip(q, k, strict=True)
    rows = torch.stack([_rows(x, y, places, plan.seed) for x, y in pairs if x.shape[-2] >= places]).double()
    found, more = rows.mean(1), len(rows) - 1
    expected = CORRELATION * rows.var(1).mean(0) / places
    measured = found.var(0) if more else torch.zeros_like(expected)
    variance = (1 + 1.5 / len(rows)) * (WEIGHT * expected + more * measured) / (WEIGHT + more)
    spread = variance.sqrt().clamp_min(1e-12).tolist()
    longest = max(y.shape[-2] for y in k)
    plan.seen = {"places": places, "mean": found.mean(0).tolist(), "spread": spread, "length": longest}


def distance(plan: LayerPlan, call: Call) -> float | None:
    """How many spreads the sequences of a call lie from the calibration's mean; None if it cannot be told."""
    seen: dict[str, Any] | None = plan.seen
    if seen is None or min(call.query.shape[-2], call.key.shape[-2]) < seen["places"] or call.segments is not None:
        return None
    root = call.scale**0.5
    q, k = (t[..., : seen["places"], :] for t in (call.query, call.key))
    if call.padding is not None:
        whole = ~call.padding[:, : seen["places"]].any(-1)
        q, k = q[whole], k[whole]
        if not len(q):
            return None
    found = _rows(q * root, k * root, seen["places"], plan.seed).mean(-2)
    mean, spread = (torch.tensor(seen[name], dtype=found.dtype, device=found.device) for name in ("mean", "spread"))
    return ((found - mean) / spread).square().mean(-1).sqrt().mean().item()


def _rows(q: Tensor, k: Tensor, places: int, seed: int) -> Tensor:
    """Queries (..., h, n, d) and keys of each of the first places in random directions, (..., places, r)."""
    row = torch.cat([t[..., :places, :].float().movedim(-2, -3).flatten(-2) for t in (q, k)], dim=-1)
    g = torch.Generator().manual_seed(seed)
    directions = torch.randn(DIRECTIONS, row.shape[-1], generator=g) / row.shape[-1] ** 0.5
    return row @ directions.to(row).mT
