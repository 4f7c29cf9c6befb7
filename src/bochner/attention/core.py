"""`linear_attention`: checks, the choice of a scan, diagnostics."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bochner._checks import BochnerError, BochnerWarning, accumulation_dtype, floating
from bochner.attention.bidirectional import absorb_keys, bidirectional
from bochner.attention.blocks import block_rows, suits
from bochner.attention.call import Call, Result
from bochner.attention.careful import careful_causal
from bochner.attention.causal import causal
from bochner.attention.checks import check_call, check_finite, check_origin, origin_of
from bochner.attention.decode import can_step, step
from bochner.attention.numerics import is_composed
from bochner.attention.phases import by_phase, starts
from bochner.attention.state import State, WindowState, empty_state, unmasked
from bochner.attention.window import windowed
from bochner.maps import feature_map
from bochner.maps.base import FeatureMap


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
    window_kind: str = "sliding",
    cu_seqlens: Tensor | None = None,
    state: State | None = None,
    return_state: bool = False,
    normalize: bool = True,
    on_small_normalizer: str = "clamp",
    recompute: bool = True,
    diagnostics: bool = True,
) -> Any:
    """Attention in linear time, `out_i = sum_j K(q_i, k_j) v_j / sum_j K(q_i, k_j)` with `K ~ phi . psi`.

    Cost O(L m (d + v)) time, O(L (d + v) + m v) memory, also under autograd: features are recomputed.

    q (b, h, n, d); k (b, g, s, d) and v (b, g, s, v) with g = h or, for grouped heads, a divisor of h: query heads
    `i * h/g ... (i+1) * h/g - 1` share key head i, as in transformers. Returns (b, h, n, v) in q's dtype;
    accumulation is in float32 (float64 for float64 inputs).

    - `phi`: a feature map or its name. With heads of its own it has `num_heads = g`.
    - `is_causal`: row i sees keys up to its own; with n < s the queries are the last n.
    - `key_padding_mask` (b, s) bool, True = ignore: such keys enter neither sum. A row with no key gives zeros.
    - `scale`: multiplies q . k; default d^-1/2.
    - `window=w`, `sinks=t`: exact softmax near a row and on the first t unpadded keys, the kernel elsewhere, one
      normaliser for all. `window_kind="block"`: exact on the row's own and the neighbouring blocks of w keys (causal:
      its own up to the row, and the one before), the fast kind; `"sliding"`: on `i - w < j <= i` (not causal:
      `|i - j| < w`). Blocks are counted from a sequence's first unpadded key; while compiling and under torch.func,
      which cannot look where that is, from its first place.
    - `cu_seqlens` (B + 1,) int: several sequences packed along n in a batch of 1, as in flash-attention.
    - `state`, `return_state`: resume causal attention after the keys of `state`; returns (out, state).
    - `normalize=False`: the numerator alone.
    - `on_small_normalizer`: signed maps can have a normaliser near or below zero. `"clamp"` raises it to a floor,
      `"zero"` zeroes the row, both with a `BochnerWarning` that counts the rows; `"raise"` refuses.
    - `recompute=False` keeps features for the backward pass: O(L m) memory. Second derivatives work either way.
    - `diagnostics=False`: trust the inputs to be finite (else rows before a NaN may be NaN too); no look at results, so
      no small normalisers counted, and no rows beyond the range of the dtype computed again.
    - Compiled, exported and under torch.func nothing can be refused or counted: a row that sees what is not finite, or
      that is beyond the range, is NaN. Under torch.func such a range is that of float64, on the CPU.

    >>> q, k, v = (torch.randn(1, 2, 10, 4) for _ in range(3))
    >>> linear_attention(q, k, v, feature_map("positive", dim=4, num_features=16), is_causal=True).shape
    torch.Size([1, 2, 10, 4])
    """
    phi = feature_map(phi, dim=floating(q, "q", "linear_attention").shape[-1])
    options: dict[str, Any] = {"is_causal": is_causal, "window": window, "sinks": sinks, "window_kind": window_kind}
    options |= {"scale": scale, "normalize": normalize, "on_small_normalizer": on_small_normalizer}
    options |= {"return_state": return_state, "recompute": recompute, "diagnostics": diagnostics}
    options = check_call(q, k, v, phi, key_padding_mask, state, cu_seqlens, options)
    if state is not None:
        check_origin(state, phi, options["scale"])
    if cu_seqlens is not None:
        spans = [slice(i, j) for i, j in pairwise(cu_seqlens.tolist()) if j > i]
        parts = [linear_attention(q[..., s, :], k[..., s, :], v[..., s, :], phi, **options) for s in spans]
        return torch.cat(parts, dim=-2)
    if q.is_meta:  # only shapes are asked for
        if options["return_state"]:
            raise BochnerError("A 'state' cannot be returned for tensors on the meta device; use real tensors.")
        return q.new_empty(*q.shape[:-1], v.shape[-1])
    with torch.autocast(q.device.type, enabled=False):
        result = _result(_describe(q, k, v, phi, state, options), q, k, v, key_padding_mask, state)
    out = result.out.reshape(*q.shape[:-1], v.shape[-1]).to(q.dtype)
    if not options["return_state"]:
        return out
    assert result.state is not None
    return out, State(*result.state[:-1], origin_of(phi, options["scale"]))


def _result(call: Call, q: Tensor, k: Tensor, v: Tensor, hole: Tensor | None, state: State | None) -> Result:
    k, v = unmasked(hole, k, v)
    if is_composed():
        return _unseen(call, q, k, v, hole, state)
    if not call.diagnostics:
        return attend(call, q, k, v, hole, state)
    check_finite("linear_attention", q=q, k=k, v=v)
    return _look(call, attend(call, q, k, v, hole, state), q, k, v, hole, state)


def _describe(q: Tensor, k: Tensor, v: Tensor, phi: FeatureMap, state: State | None, options: dict[str, Any]) -> Call:
    learns = torch.is_grad_enabled()
    parameters = tuple(t for t in (*phi.parameters(), *phi.buffers()) if t.requires_grad) if learns else ()
    return Call(
        phi,
        math.sqrt(options["scale"]),
        _dtype(q, phi, state, options),
        q.shape[1] // k.shape[1],
        options["is_causal"],
        options["window"] or 0,
        options["window_kind"],
        options["sinks"],
        options["normalize"],
        options["on_small_normalizer"],
        parameters,
        learns and (bool(parameters) or _learns(q, k, v, state)),
        options["recompute"],
        options["diagnostics"],
    )


def _unseen(call: Call, q: Tensor, k: Tensor, v: Tensor, hole: Tensor | None, state: State | None) -> Result:
    """Attention where nothing can be refused: NaN for rows that see what is not finite, and for those that are lost."""
    bad_query, bad = (~t.isfinite().all(-1) for t in (q, k))
    bad = bad | ~v.isfinite().all(-1)
    q = q.masked_fill(bad_query.unsqueeze(-1), 0)
    k, v = (t.masked_fill(bad.unsqueeze(-1), 0) for t in (k, v))
    # Written out, for the compiler of torch 2.5 does not follow `_replace`.
    out, after, lost, small = attend(call, q, k, v, hole, state)
    if call.is_causal:
        seen = (bad.cumsum(-1) > 0)[..., -q.shape[-2] :].repeat(1, 1, call.groups)
    else:
        seen = bad.any(-1, keepdim=True)
    wrong = (seen | bad_query.reshape(*k.shape[:2], -1)).unsqueeze(-1)
    if lost is not None:
        wrong = wrong | lost
    if after is not None:
        after = State(after.kv.masked_fill(bad.any(-1)[..., None, None], torch.nan), *after[1:])
    return Result(out.masked_fill(wrong, torch.nan), after, lost, small)


def _dtype(q: Tensor, phi: FeatureMap, state: State | None, options: dict[str, Any]) -> torch.dtype:
    """Where rows that leave the range of float32 can be neither seen nor computed again, all are taken from float64.

    Not in compiled graphs, whose speed matters, and not where a state carries the dtype on.
    """
    plain = accumulation_dtype(q.dtype)
    if state is not None or options["return_state"] or q.device.type != "cpu":
        return plain
    if torch.compiler.is_compiling() or not (is_composed() and (phi.positive or phi.top_up is not None)):
        return plain
    stable = phi.is_exponential and not (options["is_causal"] or options["window"] or options["sinks"])
    return plain if stable else torch.float64


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor, hole: Tensor | None, state: State | None) -> Result:
    """Attention as described by `call`: q (b, h, n, d), k and v (b, g, s, .), zero where `hole` (b, s)."""
    start = starts(call, hole, state)
    if state is not None and can_step(call, q, k, hole, state):
        result = step(call, q, k, v, state, start)
        if result.lost is None or not bool(result.lost.any()):
            return result
    if start is not None:
        return by_phase(call, q, k, v, hole, state, start, _attend)
    return _attend(call, q, k, v, hole, state)


def _attend(call: Call, q: Tensor, k: Tensor, v: Tensor, hole: Tensor | None, state: State | None) -> Result:
    """The same with blocks counted from the first place."""
    b, g, s, _ = k.shape
    n, d = q.shape[-2:]
    if not (call.is_causal or call.exact_terms):
        return bidirectional(call, q.reshape(b, g, -1, d), k, v, hole)
    if suits(call, q, k, v, hole):
        rows = block_rows(call, q, k, v, hole)
        if rows is not None:
            return Result(rows)
    if state is None:
        state = empty_state((b, g), call.phi.feature_dim, v.shape[-1], dtype=call.dtype, device=k.device)
    q = q.reshape(b, g, call.groups, n, d)
    if call.exact_terms:
        return windowed(call, q, k, v, hole, state)
    if n < s:
        first, rest = slice(0, s - n), slice(s - n, s)
        state = absorb_keys(call, state, k[..., first, :], v[..., first, :], None if hole is None else hole[:, first])
        k, v, hole = k[..., rest, :], v[..., rest, :], None if hole is None else hole[:, rest]
    result = causal(call, q, k, v, hole, state)
    if call.may_look(q) and result.lost is not None and bool(result.lost.any()):
        rows, doubtful = careful_causal(call, q, k, v, hole, state, result.lost)
        return result._replace(out=torch.where(result.lost, rows, result.out), lost=result.lost & doubtful)
    return result


def _look(
    call: Call, result: Result, q: Tensor, k: Tensor, v: Tensor, hole: Tensor | None, state: State | None
) -> Result:
    """Compute again what overflowed on the way, and say what did not come out."""
    rows = result.out.detach()
    if not math.isfinite(float(rows.sum())) and not bool(rows.isfinite().all()):
        size = v.detach().abs().amax().to(call.dtype)
        if state is None and bool(size > 1):  # attention is linear in the values
            again = attend(call, q, k, v / size.to(v.dtype), hole, None)
            new = again.state
            if new is not None:
                new = new._replace(kv=new.kv * size, window=_scaled_window(new, size))
            result = again._replace(out=again.out * size, state=new)
    return report(call, result, stacklevel=5)


def report(call: Call, result: Result, stacklevel: int) -> Result:
    """Count the rows that are lost, and those of a signed map with a small normaliser."""
    name = type(call.phi).__name__
    lost = 0 if result.lost is None else int(result.lost.sum())
    if lost and result.lost is not None:
        warnings.warn(
            f"{lost} of {result.lost.numel()} attention rows are zero or doubtful: their terms span more than "
            f"{call.dtype} holds with {name}; scale q and k down or pass float64.",
            BochnerWarning,
            stacklevel=stacklevel,
        )
    small = 0 if result.small is None or call.positive else int(result.small.sum())
    if small and result.small is not None:
        message = (
            f"{small} of {result.small.numel()} attention rows have a normaliser near or below zero: "
            f"the signed map {name} is too noisy here; use a positive map or more features"
        )
        if call.policy == "raise":
            raise BochnerError(f"{message}, or on_small_normalizer='clamp'.")
        warnings.warn(f"{message} (policy: {call.policy}).", BochnerWarning, stacklevel=stacklevel)
    return result


def _scaled_window(state: State, size: Tensor) -> WindowState | None:
    window = state.window
    if window is None:
        return None
    return window._replace(**{name: getattr(window, name) * size.to(window.v.dtype) for name in ("v", "sink_v")})


def _learns(q: Tensor, k: Tensor, v: Tensor, state: State | None) -> bool:
    """Whether a gradient can reach any of the tensors."""
    carried = () if state is None else (*state[:3], *(state.window or ()))
    return any(isinstance(t, Tensor) and t.requires_grad for t in (q, k, v, *carried))
