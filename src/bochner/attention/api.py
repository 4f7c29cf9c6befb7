"""`linear_attention`: checks, the call, and what is said of its result."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from bochner._checks import BochnerError, BochnerWarning, accumulation_dtype, floating
from bochner.attention.attend import attention
from bochner.attention.checks import Options, check_call, check_origin, refuse_values
from bochner.attention.features import PreparedMap
from bochner.attention.layout import Near
from bochner.attention.scan import Call, Result
from bochner.attention.state import Keys, State, unmasked
from bochner.maps import FeatureMap, MapLike, feature_map


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi: MapLike | PreparedMap,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    window_kind: str = "block",
    decay: Tensor | float | Sequence[float] | None = None,
    state: State | None = None,
    return_state: bool = False,
    on_small_normalizer: str = "mean",
    recompute: bool = True,
    diagnostics: bool = True,
) -> Any:
    """Attention in linear time, `out_i = sum_j K(q_i, k_j) v_j / sum_j K(q_i, k_j)` with `K ~ phi . psi`.

    q (b, h, n, d), k (b, g, s, d), v (b, g, s, v) to (b, h, n, v), as in torch; h / g query heads share a key head.
    Cost O(L m (d + v)) time, O(L (d + v) + m v) memory, also under autograd: features are recomputed.

    - `phi`: a feature map, its name or class, a function `f(x, role)`, or a `PreparedMap`.
    - `is_causal`: row i sees keys up to its own; with n < s the queries are the last n.
    - `key_padding_mask` (b, s) bool, True = ignore. A row with no key gives zeros.
    - `scale`: multiplies q . k; default d^-1/2.
    - `window=w`, `sinks=t`: exact softmax near a row and on the first t unpadded keys. Kind `"block"`: its block of w
      keys and the neighbouring ones, counted from the first unpadded key; `"sliding"`: where `|i - j| < w`.
    - `decay`, causal: log decays (g,) or (b, g, s); K(q_i, k_j) is multiplied by `exp(decay_{j+1} + ... + decay_i)`.
    - `state`, `return_state`: resume causal attention after the keys of `state`; returns (out, state).
    - `on_small_normalizer`, below a tenth of its bound, of signed maps: `"mean"` gives the row the mean of what it may
      see, `"zero"` zeroes it, `"raise"` refuses. Terms out of a dtype's range give the mean. A warning counts the rows.
    - `recompute=False` keeps features for the backward pass, O(L m) memory; second derivatives need it.
    - `diagnostics=False`: inputs are trusted, nothing is counted, and no device waits for the host. Nothing is counted
      while compiling, exporting or in torch.func either: there a row that sees what is not finite is NaN.

    >>> q, k, v = (torch.randn(1, 2, 10, 4) for _ in range(3))
    >>> linear_attention(q, k, v, feature_map("positive", dim=4, num_features=16), is_causal=True).shape
    torch.Size([1, 2, 10, 4])
    """
    made, phi = (phi, phi.phi) if isinstance(phi, PreparedMap) else (None, phi)
    if not isinstance(phi, FeatureMap):
        phi = feature_map(phi, dim=floating(q, "q", "linear_attention").shape[-1])
    how = (on_small_normalizer, return_state, recompute, diagnostics)
    options = Options(is_causal, scale, window, sinks, window_kind, *how)
    keys = Keys(k, v, key_padding_mask)
    options, fade = check_call(q, keys, phi, made, state, decay, options)
    if q.is_meta:  # only shapes are asked for
        if return_state:
            raise BochnerError("A 'state' cannot be returned for tensors on the meta device; use real tensors.")
        return q.new_empty(*q.shape[:-1], v.shape[-1])
    if made is None and phi.redraw_every is not None:
        phi.begin_pass_()
    made = made or PreparedMap(phi, options.scale, accumulation_dtype(q.dtype))
    return checked_attention(made, q, keys, state, fade, options)


def checked_attention(
    prepared: PreparedMap, q: Tensor, keys: Keys, state: State | None, decay: Tensor | None, options: Options
) -> Any:
    """What `linear_attention` returns, from arguments that were checked."""
    phi, goes_on = prepared.phi, options.return_state or state is not None
    near = Near(options.is_causal, options.window or 0, options.window_kind, options.sinks)
    call = Call.of(near, prepared, q, keys.k, options.recompute, options.return_state)
    origin = None if call.composed or not goes_on else (type(phi).__name__, phi.fingerprint(), options.scale)
    if state is not None and state.origin != origin:
        check_origin(state, origin)
    is_mixed = torch.is_autocast_enabled(q.device.type)
    with torch.autocast(q.device.type, enabled=False) if is_mixed else nullcontext():
        out, after, _ = _attend(call, q, keys, state, decay, options)
    out = out.reshape(*q.shape[:-1], keys.v.shape[-1]).to(q.dtype)
    if phi.redraw_every is not None:
        out = phi.end_pass(out)
    return (out, after._replace(origin=origin)) if options.return_state and after is not None else out


def _attend(call: Call, q: Tensor, keys: Keys, state: State | None, decay: Tensor | None, options: Options) -> Result:
    if (mask := keys.padded) is not None and call.looks and not bool(mask.any()):
        keys = keys._replace(padded=None)
    elif mask is not None:  # what they hold there must not matter, not even NaN
        k, v = unmasked(mask, keys.k, keys.v)
        keys = Keys(k, v, mask)
        decay = None if decay is None else decay.expand(*keys.k.shape[:3]).masked_fill(mask[:, None], 0)
    if call.composed:
        return _unseen(call, q, keys, state, decay)
    result = attention(call, q, keys, state, decay)
    if options.diagnostics:  # one look at everything, when all is done
        found = [_total(call.map.dtype, q, keys.k, keys.v, result.out, decay)]
        if result.bad is not None:
            found.append(result.bad.sum().to(call.map.dtype))
        total, *count = map(float, found) if call.looks else torch.stack(found).tolist()
        if not math.isfinite(total):
            refuse_values("linear_attention", q, keys.k, keys.v, decay)
            if not bool(result.out.isfinite().all()):
                result = _smaller_values(call, q, keys, state, decay)
        if result.bad is not None and any(count):
            _report(call.map, int(count[0]), result.bad.numel(), options.on_small_normalizer)
    if options.on_small_normalizer == "zero" and result.bad is not None and not call.map.positive:
        return result._replace(out=result.out.masked_fill(result.bad, 0))
    return result


def _smaller_values(call: Call, q: Tensor, keys: Keys, state: State | None, decay: Tensor | None) -> Result:
    """Attention is linear in the values: those whose sums overflow are made smaller by a power of two, exactly."""
    if state is not None or call.goes_on:
        raise BochnerError(f"The sums of linear_attention leave {call.map.dtype}; scale 'v' down or pass float64.")
    size = 2.0 ** math.ceil(math.log2(max(1.0, float(keys.v.detach().abs().amax()))))
    result = attention(call, q, keys._replace(v=keys.v / size), None, decay)
    return result._replace(out=result.out * size)


def _total(dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, out: Tensor, decay: Tensor | None) -> Tensor:
    """One number that is not finite where any of the tensors is not or a log decay is positive."""
    found = [q, k, v, out] if decay is None else [q, k, v, out, torch.where(decay <= 0, decay, torch.nan)]
    found = [t.detach() for t in found]
    if sum(t.numel() for t in found) < 2**14:  # one copy is less work than several sums
        return torch.cat([t.reshape(-1) for t in found]).sum(dtype=dtype)
    return torch.stack([t.sum(dtype=dtype) for t in found]).sum()


def _unseen(call: Call, q: Tensor, keys: Keys, state: State | None, decay: Tensor | None) -> Result:
    """Attention where nothing can be refused: NaN for rows that see what is not finite."""
    bad_query, bad = ~q.isfinite().all(-1, keepdim=True), ~(keys.k.isfinite().all(-1) & keys.v.isfinite().all(-1))
    k, v = (t.masked_fill(bad.unsqueeze(-1), 0) for t in keys[:2])
    out, after, small = attention(call, q.masked_fill(bad_query, 0), Keys(k, v, keys.padded), state, decay)
    last = (bad.cumsum(-1) > 0)[..., -q.shape[-2] :] if call.near.is_causal else bad.any(-1, keepdim=True)
    seen = last.repeat_interleave(call.groups, dim=1).unsqueeze(-1)
    if after is not None:
        after = after._replace(sums=after.sums.masked_fill(bad.any(-1)[..., None, None], torch.nan))
    return Result(out.masked_fill((seen | bad_query).reshape(*out.shape[:-1], 1), torch.nan), after, small)


def _report(prepared: PreparedMap, count: int, rows: int, policy: str) -> None:
    """Say how many rows could not be divided; refuse them if that is the policy."""
    name, said = type(prepared.phi).__name__, f"{count} of {rows} attention rows"
    if prepared.positive:
        said += f" got the mean of the values they see: their terms span more than {prepared.dtype} holds with {name}; "
        said += "scale q and k down or pass float64."
    else:
        said += f" have a normaliser near or below zero: the signed map {name} is too noisy here; use a positive map "
        said += "or more features"
        if policy == "raise":
            raise BochnerError(f"{said}, or on_small_normalizer='mean'.")
        said += f" (policy: {policy})."
    warnings.warn(said, BochnerWarning, stacklevel=5)
