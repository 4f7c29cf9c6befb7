"""Linear attention: one monoid, five uses.

`State(kv, norm, log_scale)` summarises any set of keys and values: `kv = sum psi(k_j) v_j'` and `norm = sum psi(k_j)`,
both relative to `exp(log_scale)`, a running maximum. `absorb` adds keys, `merge` joins two states (associative),
`read` answers queries. Bidirectional attention is one absorb and one read; causal attention a chunked scan; decoding
one step; sequences over several ranks a merge (`bochner.parallel`); a document too long for memory a stream.

Rows are processed in blocks that stay in cache, and under autograd every block is recomputed in the backward pass, so
memory is O(L d), never O(L m).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bochner._checks import (
    BochnerError,
    BochnerWarning,
    accumulation_dtype,
    finite,
    floating,
    one_of,
    positive_float,
)
from bochner._scratch import Scratch
from bochner.attention import window as _window
from bochner.attention.state import (
    MASKED,
    Partial,
    Quotient,
    State,
    absorb,
    cat_rows,
    chunks_to_heads,
    empty_state,
    flatten_groups,
    is_lost,
    lost_below,
    merge,
    normalize_partial,
    read,
    read_partial,
    spread_mask,
    widen,
)
from bochner.maps import feature_map
from bochner.maps.base import FeatureMap, Features
from bochner.maps.exponential import HEADROOM

__all__ = [
    "State",
    "absorb",
    "empty_state",
    "linear_attention",
    "merge",
    "read",
]

CHUNK = 128  # rows of one causal chunk
BLOCK_ELEMENTS = 2**22  # features of one block of rows on the CPU: 16 MB in float32
LARGEST = math.exp(HEADROOM)  # feature of a row that was not shifted
SMALLEST = 1e-3  # sum of such features: smaller ones leave too little room below
POLICIES = ("clamp", "zero", "raise")


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi: FeatureMap | str,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    cu_seqlens: Tensor | None = None,
    state: State | None = None,
    return_state: bool = False,
    normalize: bool = True,
    on_small_normalizer: str = "clamp",
    recompute: bool = True,
) -> Any:
    """Attention in linear time, `out_i = sum_j K(q_i, k_j) v_j / sum_j K(q_i, k_j)` with `K ~ phi . psi`.

    Cost O(L m (d + v)) time, O(L (d + v) + m v) memory, also under autograd (features are recomputed).

    q (b, h, n, d); k (b, g, s, d) and v (b, g, s, v) with g = h or, for grouped heads, a divisor of h: query heads
    `i * h/g ... (i+1) * h/g - 1` share key head i, as in transformers. Returns (b, h, n, v) in q's dtype;
    accumulation is in float32 (float64 for float64 inputs).

    - `phi`: a feature map or its name. With heads of its own it has `num_heads = g`.
    - `is_causal`: row i sees keys up to i (n = s).
    - `key_padding_mask` (b, s) bool, True = ignore: such keys enter neither sum. A row with no key gives zeros.
    - `scale`: multiplies q . k; default d^-1/2.
    - `window=w`, `sinks=t`: exact softmax on keys within the window (`i - w < j <= i`, or `|i - j| < w` when not
      causal) and on the first t unpadded keys, the kernel elsewhere, one normaliser for all.
    - `cu_seqlens` (B + 1,) int: several sequences packed along n in a batch of 1, as in flash-attention.
    - `state`, `return_state`: resume causal attention after the keys of `state`; returns (out, state).
    - `normalize=False`: the numerator alone.
    - `on_small_normalizer`: signed maps can have a normaliser near or below zero. `"clamp"` raises it to a floor,
      `"zero"` zeroes the row, both with a `BochnerWarning` that counts the rows; `"raise"` refuses.
    - `recompute=False` keeps features for the backward pass: O(L m) memory. Second derivatives work either way.

    >>> q, k, v = (torch.randn(1, 2, 10, 4) for _ in range(3))
    >>> linear_attention(q, k, v, feature_map("positive", dim=4, num_features=16), is_causal=True).shape
    torch.Size([1, 2, 10, 4])
    """
    phi = feature_map(phi, dim=floating(q, "q", "linear_attention").shape[-1])
    _check(q, k, v, phi, is_causal, key_padding_mask, window, sinks, state, on_small_normalizer, cu_seqlens)
    if return_state and (not is_causal or cu_seqlens is not None):
        raise BochnerError(
            "'return_state' needs is_causal=True and no 'cu_seqlens'; for bidirectional attention use absorb and read."
        )
    scale = check_scale(scale, q, "linear_attention")
    if cu_seqlens is not None:
        options: dict[str, Any] = {
            "is_causal": is_causal,
            "scale": scale,
            "window": window,
            "sinks": sinks,
            "normalize": normalize,
        }
        options |= {"on_small_normalizer": on_small_normalizer, "recompute": recompute}
        bounds = cu_seqlens.tolist()
        parts = [
            linear_attention(q[..., i:j, :], k[..., i:j, :], v[..., i:j, :], phi, **options)
            for i, j in pairwise(bounds)
            if j > i
        ]
        return torch.cat(parts, dim=-2)

    given = state
    exact_terms = window is not None or sinks > 0
    with torch.autocast(q.device.type, enabled=False):
        call = _Call(phi, q, k, v, math.sqrt(scale), recompute, normalize, on_small_normalizer, exact_terms, state)
        with torch.set_grad_enabled(call.learns):
            if key_padding_mask is not None:
                # What a masked key holds must not matter, not even NaN.
                hole = spread_mask(key_padding_mask)
                k, v = k.masked_fill(hole, 0), v.masked_fill(hole, 0)
            if exact_terms or not normalize:
                # The sums that `report` looks at do not hold every row here.
                for x, name in ((q, "q"), (k, "k"), (v, "v")):
                    finite(x, name, "linear_attention")
            if exact_terms:
                partial, state = _window.attend(call, q, k, v, key_padding_mask, is_causal, window or 0, sinks, state)
                rows = call.new_rows(partial.num.shape[-2])
                rows.add(call.finish(partial))
                out = rows.join()
            elif is_causal:
                out, state = call.causal(q, k, v, key_padding_mask, state, call.finish)
            else:
                out, state = call.bidirectional(q, k, v, key_padding_mask, call.finish)
            lost = call.report(q, k, v)
    out = out.reshape(*q.shape[:-1], v.shape[-1])
    if call.overflowed:  # in the sums at least
        far = ~out.detach().isfinite().all(-1, keepdim=True)
        if call.learns and bool(far.any()):
            raise BochnerError(
                f"The 'v' of linear_attention is too large for gradients in {call.dtype}, up to "
                f"{float(v.detach().abs().max()):.3g}; scale it or pass float64."
            )
        lost = far if lost is None else lost | far
    if lost is not None and q.dtype != torch.float64 and q.device.type != "mps":
        # Some rows' terms span more than float32 holds (from about 10 sigma on), and such rows are zero so far. Taking
        # them, and only them, from float64 leaves every other row's rounding alone.
        how: dict[str, Any] = {"is_causal": is_causal, "key_padding_mask": key_padding_mask, "scale": scale}
        how |= {"window": window, "sinks": sinks, "state": None if given is None else widen(given)}
        wide = linear_attention(q.double(), k.double(), v.double(), phi, **how, recompute=recompute)
        out = torch.where(lost, wide.to(out.dtype), out)
    return (out, state) if return_state else out


class _Call:
    """One call of linear attention: the prepared maps, the block size, how a block is run and finished."""

    def __init__(
        self,
        phi: FeatureMap,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        root: float,
        recompute: bool,
        normalize: bool,
        policy: str,
        exact_terms: bool,
        state: State | None = None,
    ) -> None:
        self.scale_cancels = normalize and not exact_terms
        self.phi, self.root, self.normalize, self.policy = phi, root, normalize, policy
        self.groups = q.shape[1] // k.shape[1]
        self.out_dtype, self.dtype = q.dtype, accumulation_dtype(q.dtype)
        raised = type(phi).prepare_attention is not FeatureMap.prepare_attention
        self.floor = lost_below(self.dtype, HEADROOM if raised else 0.0)
        self.query, self.key = self.prepare("query"), self.prepare("key")
        self.scratch = Scratch()
        self.tracing = torch.compiler.is_compiling()
        carried = () if state is None else (*state[:3], *(state.window or ()))
        tensors = (q, k, v, *phi.parameters(), *phi.buffers(), *carried)
        learns = any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
        self.learns = torch.is_grad_enabled() and (learns or self.tracing)
        # Exponentials without row maxima, checked afterwards: where asking is cheap and nothing has to be recomputed.
        self.bold = phi.bold and q.device.type == "cpu" and not self.tracing and not self.learns
        self.recompute = recompute and self.learns and not self.tracing
        lead = q.shape[0] * k.shape[1]
        # Most maps hold several temporaries as large as their features, the exponential ones none.
        elements = BLOCK_ELEMENTS // (1 if phi.bold else 4) * (1 if q.device.type == "cpu" else 64)
        self.rows = max(64, elements // (lead * phi.feature_dim) // 64 * 64)
        self.health: list[tuple[Tensor, Tensor, Tensor, Tensor | None]] | None = None if self.tracing else []
        self.overflowed = False

    def prepare(self, role: str, *, bold: bool = False) -> Callable[[Tensor], Features]:
        cancels = self.scale_cancels and role == "query"
        return self.phi.prepare_attention(role, root=self.root, scale_cancels=cancels, bold=bold)

    def finish(self, partial: Partial) -> Tensor | Quotient:
        """The output rows of a partial result, undivided where they can be divided into place; `report` is told."""
        if not self.normalize:
            return (partial.num * partial.log_ref.exp()).to(self.out_dtype)
        quotient, small = normalize_partial(partial, self.policy, self.floor)
        if self.health is not None:
            self.health.append((partial.num.detach().sum(), partial.den.detach(), partial.log_ref.detach(), small))
        return (quotient.num / quotient.den).to(self.out_dtype) if self.learns or self.tracing else quotient

    def report(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Refuse non-finite inputs, which show in the sums; count the rows with a small normaliser.

        Returns which rows of a positive map, (b, h, n, 1), lost their normaliser to underflow, or None. `overflowed` is
        set if the sum of the numerators of finite inputs is not finite.
        """
        health, self.health = self.health, None  # a recomputed block notes nothing
        if not health:
            return None
        den = torch.cat([x for _, x, _, _ in health], dim=-2)
        sums = torch.stack([*(total for total, _, _, _ in health), den.sum()])
        if not bool(sums.isfinite().all()):
            for x, name in ((q, "q"), (k, "k"), (v, "v")):
                finite(x, name, "linear_attention")
            self.overflowed = True
        if self.phi.positive:
            if not bool((den < self.floor).any()):
                return None
            lost = torch.cat([is_lost(x, ref, self.floor) for _, x, ref, _ in health], dim=-2)
            return lost.reshape(*q.shape[:-1], 1) if bool(lost.any()) else None
        count = sum(int(small.sum()) for _, _, _, small in health if small is not None)
        if count:
            message = (
                f"{count} of {den.numel()} attention rows have a normaliser near or below zero: "
                f"the signed map {type(self.phi).__name__} is too noisy here; use a positive map or more features"
            )
            if self.policy == "raise":
                raise BochnerError(f"{message}, or on_small_normalizer='clamp'.")
            warnings.warn(f"{message} (policy: {self.policy}).", BochnerWarning, stacklevel=3)
        return None

    def run(self, block: Callable[..., Any], *args: Any) -> Any:
        """A block, its features recomputed in the backward pass if there will be one."""
        if self.recompute:
            return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False)
        return block(*args)

    def blocks(self, length: int) -> list[int]:
        """Sizes of the row blocks."""
        # Under autograd at least four blocks, unless very short: a block holds several copies of its features.
        most = max(64, length // 4) if self.recompute else length
        rows = length if self.tracing else min(self.rows, most)
        return [min(rows, length - start) for start in range(0, length, rows)]

    def bidirectional(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, finish: Callable[[Partial], Any]
    ) -> tuple[Any, State]:
        """One absorb and one read; rows grouped as (b, g, h/g * n), each block passed through `finish`."""
        state = self.absorb_all(k, v, mask)
        return self.read_all(q, state, k.shape[1], finish), state

    def read_all(self, q: Tensor, state: State, heads: int, finish: Callable[[Partial], Any]) -> Any:
        q = q.reshape(q.shape[0], heads, -1, q.shape[-1])
        scratch = self.scratch if finish == self.finish else None  # else a block's result is kept
        bold = self.prepare("query", bold=True) if self.bold else self.query

        def block(x: Tensor, *state: Any) -> Any:
            keys, positive = State(*state), self.phi.positive
            if self.bold:
                partial = read_partial(keys, bold(x), positive=positive, scratch=scratch)
                # phi_i norm_i <= den for every feature i.
                least, most = partial.den.amin((-2, -1)), partial.den.amax((-2, -1))
                if bool(((most <= LARGEST * keys.norm.amin(-1)) & (least >= SMALLEST)).all()):
                    return finish(partial)
                self.bold = False
            return finish(read_partial(keys, self.query(x), positive=positive, scratch=scratch))

        rows = self.new_rows(q.shape[-2])
        for x in q.split(self.blocks(q.shape[-2]), dim=-2):
            rows.add(self.run(block, x, *state[:3]))
        return rows.join()

    def absorb_all(self, k: Tensor, v: Tensor, mask: Tensor | None) -> State:
        state = self.empty(k, v)
        bold = self.prepare("key", bold=True) if self.bold else self.key

        def block(x: Tensor, u: Tensor, hole: Tensor | None, *state: Any) -> State:
            before = State(*state)
            if self.bold:
                features = bold(x)
                after = absorb(before, features, u, hole, scratch=self.scratch)
                # psi_i weight <= norm_i for every key and feature i.
                weight = (features.log_scale.amin((-2, -1)) - after.log_scale).exp()
                least, most = after.norm.aminmax(dim=-1)
                if bool(((most <= LARGEST * weight) & (least >= SMALLEST)).all()):
                    return after
                self.bold = False
            return absorb(before, self.key(x), u, hole, scratch=self.scratch)

        for x, u, hole in self.split(k, v, mask, self.blocks(k.shape[-2])):
            if self.recompute:  # only the block's own sums are kept for the backward pass
                state = merge(state, self.run(block, x, u, hole, *self.empty(k, v)[:3]))
            else:
                state = block(x, u, hole, *state[:3])
        return state

    def empty(self, k: Tensor, v: Tensor) -> State:
        return empty_state(k.shape[:2], self.phi.feature_dim, v.shape[-1], dtype=self.dtype, device=k.device)

    def causal(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        state: State | None,
        finish: Callable[[Partial], Any],
    ) -> tuple[Any, State]:
        """A scan over chunks; rows grouped as (b, g, h/g * n), each block passed through `finish`."""
        b, g, n, _ = k.shape
        if state is None:
            state = self.empty(k, v)
        if n == 1:
            part, state = self.run(self._step, q.reshape(b, g, -1, q.shape[-1]), k, v, mask, finish, *state[:3])
            rows = self.new_rows(self.groups)
            rows.add(part)
            return rows.join(), state
        q = q.reshape(b, g, self.groups, n, q.shape[-1])

        def block(*args: Any) -> Any:
            partial, state = self._causal_block(*args)
            return finish(partial), state

        chunk = CHUNK // 2 if self.recompute and n < 4 * CHUNK else CHUNK  # short sequences: less memory for backward
        # A block is several chunks, for fewer and larger operations; a traced graph must not depend on the batch size.
        size = 4 * self.groups * max(1.0, chunk / self.phi.feature_dim)  # of its queries and scores beside its keys
        chunks = 1 if self.recompute else 4 if self.tracing else max(1, int(self.rows / size) // chunk)
        whole = n - n % chunk  # the last chunk may be shorter; it is a block of its own
        sizes = [min(chunks * chunk, whole - start) for start in range(0, whole, chunks * chunk)]
        sizes += [n - whole] * (n > whole)
        rows = self.new_rows(n)
        for x, (y, u, hole) in zip(q.split(sizes, dim=-2), self.split(k, v, mask, sizes), strict=True):
            part, state = self.run(block, x, y, u, hole, min(chunk, y.shape[-2]), *state[:3])
            rows.add(part)
        return flatten_groups(rows.join()), state

    def _step(
        self, q: Tensor, k: Tensor, v: Tensor, hole: Tensor | None, finish: Callable[[Partial], Any], *carried: Any
    ) -> tuple[Any, State]:
        """One key: absorb it, then read."""
        state = absorb(State(*carried), self.key(k), v, hole)
        return finish(read_partial(state, self.query(q), positive=self.phi.positive)), state

    def _causal_block(
        self, q: Tensor, k: Tensor, v: Tensor, hole: Tensor | None, c: int, *carried: Any
    ) -> tuple[Partial, State]:
        """A block of t chunks of c rows after the state `carried`: q (b, g, r, t c, d), k and v (b, g, t c, .).

        No statistic of a later key enters an earlier row's arithmetic, so that the future cannot move the past even by
        rounding.
        """
        state = State(*carried)
        b, g, r, n, d = q.shape
        t = n // c
        # Rows of queries in the order of chunks, then of the heads of the group.
        fq = self.query(q.unflatten(3, (t, c)).transpose(2, 3).reshape(b, g, t * r * c, d))
        fk = self.key(k)
        phi, psi = fq.values.unflatten(2, (t, r * c)), fk.values.unflatten(2, (t, c))
        lq, lk = fq.log_scale.unflatten(2, (t, r * c)), fk.log_scale
        if hole is not None:
            lk = lk.masked_fill(spread_mask(hole), MASKED)
        # 1. Each row's reference: the largest key scale up to it.
        peak = lk.detach().squeeze(-1).cummax(-1).values
        row_ref = torch.maximum(peak, state.log_scale[..., None]).unflatten(2, (t, c))
        ref = row_ref[..., -1]  # after each chunk
        start = torch.cat([state.log_scale[..., None], ref[..., :-1]], dim=-1)  # before it
        # 2. Keys of earlier chunks, by the state; and the state after each chunk.
        lk, v = lk.unflatten(2, (t, c)), v.to(self.dtype).unflatten(2, (t, c))
        weight = (lk - ref[..., None, None]).exp()
        weighted = self.scratch.mul(v, weight)
        fade = (start - ref).exp()
        parts = []
        for i in range(t):
            parts.append(read_partial(state, Features(phi[:, :, i], lq[:, :, i]), positive=self.phi.positive))
            y, f = psi[:, :, i], fade[:, :, i, None]
            kv = torch.addcmul(y.mT @ weighted[:, :, i], state.kv, f.unsqueeze(-1))
            norm = torch.addcmul((weight[:, :, i].mT @ y).squeeze(-2), state.norm, f)
            state = State(kv, norm, ref[..., i])
        before = cat_rows(parts)
        # 3. Keys of the same chunk, by scores. Later keys' are clamped before exp, so that it cannot overflow.
        decay = (lk.mT - row_ref.unsqueeze(-1)).clamp_max_(0).exp_().unsqueeze(3)
        lower = torch.ones(c, c, dtype=self.dtype, device=q.device).tril()
        scores = self.scratch.matmul(phi, psi.mT).unflatten(3, (r, c)).mul_(decay).mul_(lower)
        scores = scores.flatten(3, 4)
        carry = self._per_row(start.unsqueeze(-1) - row_ref).exp()
        num = (before.num * carry).view(-1, r * c, v.shape[-1])
        num = torch.baddbmm(num, scores.flatten(0, 2), v.reshape(-1, *v.shape[-2:]))
        den = torch.addcmul(scores.sum(-1, keepdim=True).flatten(2, 3), before.den, carry)
        bound = None
        if before.bound is not None:
            bound = scores.detach().abs().sum(-1, keepdim=True).flatten(2, 3) + before.bound * carry
        partial = Partial(num.view_as(before.num), den, self._per_row(row_ref) + fq.log_scale, bound)
        return chunks_to_heads(partial, (t, r, c)), state._replace(log_scale=state.log_scale.clone())

    def _per_row(self, x: Tensor) -> Tensor:
        """(b, g, t, c) to (b, g, t r c, 1): what all query heads of a group share."""
        return (x if self.groups == 1 else x.repeat(1, 1, 1, self.groups)).flatten(2).unsqueeze(-1)

    def new_rows(self, length: int) -> _Rows:
        return _Rows(length, self.out_dtype)

    @staticmethod
    def split(
        k: Tensor, v: Tensor, mask: Tensor | None, sizes: list[int]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        holes = [None] * len(sizes) if mask is None else mask.split(sizes, dim=-1)
        return zip(k.split(sizes, dim=-2), v.split(sizes, dim=-2), holes, strict=True)


class _Rows:
    """Blocks of rows being joined: divided into place while in cache, or kept for one `cat` under autograd."""

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        self.length, self.dtype, self.start = length, dtype, 0
        self.parts: list[Any] = []
        self.out: Tensor | None = None

    def add(self, part: Any) -> None:
        if not isinstance(part, Quotient):
            self.parts.append(part)
            return
        num, den = part
        if self.out is None:
            self.out = num.new_empty(*num.shape[:-2], self.length, num.shape[-1], dtype=self.dtype)
        place = self.out[..., self.start : self.start + num.shape[-2], :]
        self.start += num.shape[-2]
        if num.dtype == self.dtype:
            torch.div(num, den, out=place)
        else:
            place.copy_(num / den)

    def join(self) -> Any:
        return cat_rows(self.parts) if self.out is None else self.out


def check_scale(scale: Any, q: Tensor, owner: str) -> float:
    """The factor of q . k: a positive number, d^-1/2 unless given."""
    return q.shape[-1] ** -0.5 if scale is None else positive_float(scale, "scale", owner)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi: FeatureMap,
    is_causal: bool,
    mask: Tensor | None,
    window: int | None,
    sinks: int,
    state: State | None,
    policy: str,
    cu_seqlens: Tensor | None,
) -> None:
    owner = "linear_attention"
    check_qkv(q, k, v, owner)
    one_of(policy, "on_small_normalizer", owner, POLICIES)
    for x, name in ((q, "q"), (k, "k")):
        phi.check_input(x, name)
    if phi.num_heads is not None and phi.num_heads != k.shape[1]:
        raise BochnerError(
            f"The map has num_heads={phi.num_heads} but 'k' has {k.shape[1]} heads; build it with "
            f"num_heads={k.shape[1]} (query heads of a group share their key head's map) or num_heads=None."
        )
    n, s = q.shape[-2], k.shape[-2]
    if is_causal and n != s:
        raise BochnerError(
            f"Causal attention needs as many queries as keys, got n={n} and s={s}; pass earlier keys by 'state'."
        )
    check_mask(mask, k, owner)
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise BochnerError(f"The 'window' of {owner} must be a positive int or None, got {window!r}.")
    if isinstance(sinks, bool) or not isinstance(sinks, int) or sinks < 0:
        raise BochnerError(f"The 'sinks' of {owner} must be an int >= 0, got {sinks!r}.")
    if window is not None and n != s:
        raise BochnerError(f"A 'window' needs as many queries as keys, got n={n} and s={s}; use window=None.")
    if state is not None:
        if not isinstance(state, State):
            raise BochnerError(f"The 'state' of {owner} must be a bochner.State, got {type(state).__name__}.")
        if not is_causal:
            raise BochnerError("A 'state' can be resumed only with is_causal=True.")
        want = (k.shape[0], k.shape[1], phi.feature_dim, v.shape[-1])
        if tuple(state.kv.shape) != want:
            raise BochnerError(
                f"The 'state' has kv of shape {tuple(state.kv.shape)}, this call needs {want}: it belongs to another "
                "map, batch or value size."
            )
        dtype = accumulation_dtype(q.dtype)
        if state.kv.dtype != dtype or state.kv.device != q.device:
            raise BochnerError(
                f"The 'state' is {state.kv.dtype} on {state.kv.device}, this call needs {dtype} on {q.device}; "
                "resume with the dtype and device that the state was made with."
            )
        _window.check_state(state.window, window, sinks)
    if cu_seqlens is not None:
        if mask is not None or state is not None or q.shape[0] != 1 or n != s:
            raise BochnerError("'cu_seqlens' needs a batch of 1, n = s, and neither 'key_padding_mask' nor 'state'.")
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point():
            raise BochnerError("'cu_seqlens' must be an int tensor of shape (B + 1,), the bounds of the sequences.")
        bounds = cu_seqlens.tolist()
        if bounds[:1] != [0] or bounds[-1] != n or any(i > j for i, j in pairwise(bounds)):
            raise BochnerError(f"'cu_seqlens' must rise from 0 to n={n}, got {bounds}.")


def check_qkv(q: Tensor, k: Tensor, v: Tensor, owner: str) -> None:
    """Shapes, heads, dtypes, devices and finiteness of the three tensors of attention."""
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        floating(x, name, owner)
        if x.ndim != 4:
            raise BochnerError(f"The {name!r} of {owner} must have 4 axes (b, h, n, d), got shape {tuple(x.shape)}.")
        if x.dtype != q.dtype or x.device != q.device:
            raise BochnerError(
                f"q, k and v of {owner} must share dtype and device, got {q.dtype} on {q.device} for 'q' and {x.dtype} "
                f"on {x.device} for {name!r}; cast or move one."
            )
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise BochnerError(
            f"{owner} needs at least one sequence, head, query and key, got shapes {tuple(q.shape)}, {tuple(k.shape)} "
            f"and {tuple(v.shape)}."
        )
    if k.shape[:3] != v.shape[:3]:
        raise BochnerError(
            f"'k' and 'v' of {owner} must agree in batch, heads and length, got {tuple(k.shape)} and {tuple(v.shape)}."
        )
    if q.shape[0] != k.shape[0] or q.shape[1] % k.shape[1] or q.shape[-1] != k.shape[-1]:
        raise BochnerError(
            f"'q' and 'k' of {owner} must agree in batch and head size, with q's heads a multiple of k's, got "
            f"{tuple(q.shape)} and {tuple(k.shape)}."
        )


def check_mask(mask: Tensor | None, k: Tensor, owner: str) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or tuple(mask.shape) != (k.shape[0], k.shape[2]):
        got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise BochnerError(
            f"The 'key_padding_mask' of {owner} must be a bool tensor of shape {(k.shape[0], k.shape[2])}, True for "
            f"keys to ignore, got {got}."
        )
