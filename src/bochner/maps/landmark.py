"""Landmark features: fitted in closed form to the queries and keys of real heads."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot, pad

from bochner._checks import (
    BochnerError,
    BochnerWarning,
    accumulation_dtype,
    finite,
    flag,
    floating,
    is_int,
    make_generator,
    one_of,
    positive_int,
)
from bochner._products import product
from bochner._progress import track
from bochner.maps.base import FeatureMap, Features, in_turn
from bochner.maps.landmark_fit import WINDOW_KINDS, Head, Near, Rows, fit_head, rectified
from bochner.projections import gaussian, some_seed

LEARNED = ("key_landmarks", "key_log_weights", "query_landmarks", "offsets", "mix_query", "mix_key", "bias_key")
ENOUGH = 64  # landmarks, unless there are more features
LARGEST = 1e8  # entry of a query or key whose products the fit can square in float32


class Given(NamedTuple):
    """Sequences to fit to: q (b, h, r n, d) with the r query heads of a group in turn, k and v (b, h, s, .); n."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    n: int


class LandmarkFeatures(FeatureMap):
    """Attention over landmarks, then the best few linear combinations of it, fitted to real queries and keys.

    With M landmarks c_a among the keys, each of weight w_a, and M landmarks b_a among the queries,

        f_a(q) = w_a exp(q . c_a - z(q)),        z(q) = log sum_a w_a exp(q . c_a),
        g_a(k) = exp(min(k . b_a - t_a, cap_a)),
        phi(q) = exp(z(q)) P' f(q),              psi(k) = [R' g(k) + r, 1].

    `calibrate_` puts the landmarks where the queries and keys are and finds P and R by reduced-rank ridge regression:
    `phi(q) . psi(k)` is near exp(q . k) on the pairs that matter. `positive=True` rectifies both features.
    `positive=False` is closer, but its normaliser may vanish: through the last feature of a key, the constant 1,
    attention tops every row up to at least `top_up` times the weight of uniform attention.

    Biased and deterministic. Its error is measured on sequences that the fit has not seen: `error` per head, and
    `error_interval`, which holds that of a new sequence of the same kind with probability 95 %. O(M (d + m)) per row.

    `num_features`: m, the constant among them. `num_landmarks`: M, default 2 m up to 64, but at least m.

    >>> q, k = (0.7 * torch.randn(12, 40, 4, generator=torch.Generator().manual_seed(i)) for i in range(2))
    >>> phi = LandmarkFeatures(dim=4, num_features=16).calibrate_(q, k)
    >>> float(phi.error) < 0.5
    True
    """

    unbiased = False
    key_landmarks: Tensor
    key_log_weights: Tensor
    query_landmarks: Tensor
    offsets: Tensor
    caps: Tensor
    mix_query: Tensor
    mix_key: Tensor
    bias_key: Tensor
    least: Tensor
    error: Tensor
    error_interval: Tensor
    rows_seen: Tensor

    def __init__(
        self,
        dim: int,
        num_features: int,
        *,
        positive: bool = True,
        num_landmarks: int | None = None,
        num_heads: int | None = None,
        seed: int | None = 0,
        generator: Generator | None = None,
    ) -> None:
        super().__init__(dim, num_features, num_heads=num_heads)
        self.warns = True  # of attention before it was fitted
        if num_features < 2:
            raise BochnerError(
                f"The 'num_features' of LandmarkFeatures must be at least 2, one being constant, got {num_features}."
            )
        self.positive = flag(positive, "positive", "LandmarkFeatures")
        m = num_features
        M = max(m, min(2 * m, ENOUGH)) if num_landmarks is None else num_landmarks
        self.num_landmarks = positive_int(M, "num_landmarks", "LandmarkFeatures")
        self.seed = some_seed(make_generator(seed, generator))
        self._fill(make_generator(self.seed))
        self._keep(rows_seen=torch.zeros((), dtype=torch.long, device="cpu"))

    @property
    def top_up(self) -> Tensor | None:
        """Least normaliser of a row per head, that of uniform attention being the number of keys; None if positive."""
        return None if self.positive else self.least

    def _redraw(self, g: Generator) -> None:
        """Other random landmarks; once calibrated or learned, only another sample for the next calibration."""
        self.seed = some_seed(g)
        if self._is_fresh():
            self._fill(make_generator(self.seed))

    def _is_fresh(self) -> bool:
        """Whether the map was neither fitted nor is trained."""
        return not int(self.rows_seen) and next(self.parameters(), None) is None

    @torch.no_grad()
    def calibrate_(
        self,
        q: Tensor | Sequence[Tensor],
        k: Tensor | Sequence[Tensor],
        v: Tensor | Sequence[Tensor] | None = None,
        *,
        is_causal: bool = False,
        window: int | None = None,
        sinks: int = 0,
        window_kind: str = "block",
        progress: bool = False,
    ) -> LandmarkFeatures:
        """Fit the map to scaled queries and keys of whole sequences, per key head; see `FeatureMap.calibrate_`.

        The last quarter of the sequences chooses the ridge and measures the error; of a single one the last quarter of
        its queries. `v`: values (..., s, v), for the error of the attention output in place of its weights.
        `is_causal`, `window`, `sinks`, `window_kind`: how attention will be called; the map is fitted to the pairs that
        are left to it. 4,000 rows per head are plenty.
        """
        given = self._given(q, k, v)
        near = _near(is_causal, window, sinks, window_kind, given)
        g = make_generator(self.seed)
        m, M, count = self.num_features, self.num_landmarks, self.num_heads or 1
        self._take(
            [
                fit_head(self._rows(head, given, g), m, M, near, positive=self.positive, generator=g)
                for head in track(range(count), count, "fitting heads", progress)
            ]
        )
        self.rows_seen.fill_(sum(t.k.shape[0] * t.k.shape[2] for t in given))
        self._fingerprint = None
        return self

    def trainable_(self, names: Sequence[str] | None = None) -> FeatureMap:
        """Turn named buffers into parameters; by default the landmarks and all that is linear in their features."""
        names = LEARNED if names is None else [names] if isinstance(names, str) else names
        return super().trainable_([one_of(name, "names", "trainable_", (*LEARNED, "caps")) for name in names])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Refuse the fit of a map of the other sign: a signed one has a top-up in every head, a positive one none."""
        least, rows = (state_dict.get(prefix + name) for name in ("least", "rows_seen"))
        if least is not None and rows is not None and not (least.is_meta or rows.is_meta) and int(rows):
            fitted = not bool(least.any())
            if fitted != self.positive:
                raise BochnerError(
                    f"This state_dict is of LandmarkFeatures fitted with positive={fitted}, the map has "
                    f"positive={self.positive}; build it with positive={fitted}."
                )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def prepare(self, role: str) -> Callable[[Tensor], Features]:
        return lambda x: self._prepared(role, 1.0, accumulation_dtype(x.dtype))(x)

    def prepare_scaled(self, role: str, root: float, dtype: torch.dtype) -> Callable[[Tensor], Features]:
        if self.warns and not torch.compiler.is_compiling():
            self.warns = False  # on other devices reading the count at every call would wait
            if self._is_fresh():
                warnings.warn(
                    "These LandmarkFeatures were never fitted, their attention means nothing: call calibrate_(q, k) "
                    "with scaled queries and keys first, or use the map 'positive', which needs no data.",
                    BochnerWarning,
                    stacklevel=2,
                )
        return self._prepared(role, root, dtype)

    def _prepared(self, role: str, root: float, dtype: torch.dtype) -> Callable[[Tensor], Features]:
        """The features of `root * x`: the factor goes into the landmarks."""
        own, start, mix = self.key_landmarks, self.key_log_weights, self.mix_query
        if role == "key":  # the last feature is 1 whatever training does to the coefficients
            own, start, mix = self.query_landmarks, -self.offsets, pad(self.mix_key, (0, 1))
        landmarks, start, mix = (own * root).to(dtype).mT, self._spread(start, dtype), mix.to(dtype)
        caps, bias = (self._spread(t, dtype) for t in (self.caps, pad(self.bias_key, (0, 1), value=1.0)))

        def query(x: Tensor) -> Features:
            logits = _added(product("landmarks", x.to(dtype), landmarks), start)
            peak = logits.detach().amax(-1, keepdim=True)
            weights = _added(logits, -peak).exp_()
            total = weights.sum(-1, keepdim=True)
            values = product("query", weights, mix).div_(total)
            if self.positive:
                values = rectified(values, out=None if values.requires_grad else values)
            return Features(values, total.log().add_(peak))

        def key(x: Tensor) -> Features:
            logits = _added(product("landmarks", x.to(dtype), landmarks), start)
            has_graph = logits.requires_grad or caps.requires_grad
            hidden = torch.minimum(logits, caps).exp() if has_graph else logits.clamp_(max=caps).exp_()
            values = _added(product("key", hidden, mix), bias)
            return Features(values.clamp_min_(0) if self.positive else values, torch.zeros_like(values[..., :1]))

        return query if role == "query" else key

    def _fill(self, g: Generator) -> None:
        """Random landmarks, and coefficients that sort them into features."""
        M, m, cpu = self.num_landmarks, self.num_features, torch.device("cpu")
        group = one_hot(torch.arange(M, device=cpu) % m, m).double()
        none = torch.zeros(max(M, m), device=cpu)
        same = {
            "key_log_weights": none[:M] - math.log(M),
            "offsets": none[:M],
            "caps": none[:M] + 2.0,
            "mix_query": group,
            "mix_key": (group / group.sum(0).clamp_min(1))[:, : m - 1],
            "bias_key": none[: m - 1],
            "least": none[0],
            "error": none[0] + torch.inf,
            "error_interval": torch.tensor([0.0, torch.inf], device=cpu),
        }
        landmarks = {name: gaussian(*self._lead, M, self.dim, g=g) for name in ("key_landmarks", "query_landmarks")}
        self._keep(**landmarks, **{name: value.expand((*self._lead, *value.shape)) for name, value in same.items()})

    def _given(self, q: Any, k: Any, v: Any) -> list[Given]:
        """What calibrate_ was given, checked, without sequences of one key."""
        given = {"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v}
        found = [t for parts in in_turn(**given) if (t := self._one(*parts)) is not None]
        rows = sum(t.k.shape[0] * t.k.shape[2] for t in found)
        if not rows:
            raise BochnerError("calibrate_ needs at least one sequence with a query and 2 keys, got none.")
        if rows < self.num_features:
            warnings.warn(
                f"calibrate_ was given {rows} keys per head for {self.num_features} features, too few: give more keys, "
                "better 2,000.",
                BochnerWarning,
                stacklevel=3,
            )
        return found

    def _one(self, q: Any, k: Any, v: Any = None) -> Given | None:
        """One entry of q, k and v, checked; None if there is nothing to fit."""
        owner, x, y = "calibrate_", self._sequences(q, "q"), self._sequences(k, "k")
        if v is not None and finite(floating(v, "v", owner), "v", owner).shape[:-1] != k.shape[:-1]:
            raise BochnerError(
                f"The 'v' of {owner} must have the shape of 'k' up to its last axis, got {tuple(v.shape)} for "
                f"{tuple(k.shape)}."
            )
        if len(x) != len(y) or self._group(k) != 1:
            raise BochnerError(
                f"{owner} needs as many sequences of 'q' as of 'k', and as many key heads as the map has, got "
                f"{tuple(q.shape)} and {tuple(k.shape)} with num_heads={self.num_heads}; give a map of fewer key heads "
                "than query heads num_heads."
            )
        if x.numel() == 0 or y.numel() == 0 or y.shape[2] < 2:
            return None
        for t, name in ((x, "q"), (y, "k")):
            if (size := float(t.abs().amax())) > LARGEST:
                raise BochnerError(
                    f"The {name!r} of {owner} must have entries of at most {LARGEST:g}, got {size:.3g}; give queries "
                    "and keys as attention scales them."
                )
        return Given(x, y, None if v is None else v.detach().reshape(*y.shape[:3], -1), q.shape[-2])

    def _rows(self, head: int, given: list[Given], g: Generator) -> list[Rows]:
        """The sequences of one key head. Without values, random ones: their mean square is that of the weights."""
        found = []
        for q, k, v, n in given:
            (b, _, s, _), i = k.shape, torch.arange(n).repeat(q.shape[2] // n)
            u = torch.randn(b, s, 32, generator=g, dtype=torch.float32) if v is None else v[:, head]
            x, y, u = (t.float().cpu() for t in (q[:, head], k[:, head], u))
            found += [Rows(*rows, i, torch.arange(s)) for rows in zip(x, y, u, strict=True)]
        return found

    def _take(self, heads: list[Head]) -> None:
        hidden = ("key_landmarks", "key_log_weights", "query_landmarks", "offsets", "caps")
        names = (*hidden, "mix_query", "mix_key", "bias_key", "least", "error", "error_interval")
        found = [(*h.hidden, h.p, h.r, h.bias, *map(torch.tensor, (h.top_up, h.error, h.interval))) for h in heads]
        self._keep(**{name: torch.stack(parts) for name, *parts in zip(names, *found, strict=True)})

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, positive={self.positive}, num_landmarks={self.num_landmarks}"


def _added(x: Tensor, y: Tensor) -> Tensor:
    """x + y, in the memory of x where no gradient needs it."""
    return x + y if x.requires_grad or y.requires_grad else x.add_(y)


def _near(is_causal: bool, window: int | None, sinks: int, window_kind: str, given: list[Given]) -> Near:
    owner = "calibrate_"
    one_of(window_kind, "window_kind", owner, WINDOW_KINDS)
    is_causal = flag(is_causal, "is_causal", owner)
    window = None if window is None else positive_int(window, "window", owner)
    if not is_int(sinks) or sinks < 0:
        raise BochnerError(f"The 'sinks' of {owner} must be an int >= 0, got {sinks!r}.")
    uneven = [f"{t.n} and {t.k.shape[2]}" for t in given if t.n != t.k.shape[2]]
    if uneven and (is_causal or window):
        raise BochnerError(
            f"With is_causal or a window {owner} needs as many queries as keys in every sequence, got {uneven[0]}."
        )
    return Near(is_causal, window, int(sinks), window_kind)
