"""What the functions of attention accept: one sentence for a mistake, at the entry."""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bochner import _checks
from bochner._checks import DTYPES, BochnerError, accumulation_dtype, flag, is_int, one_of
from bochner._products import is_composed
from bochner.attention.features import PreparedMap
from bochner.attention.state import Keys, State
from bochner.maps.base import FeatureMap

POLICIES = ("mean", "zero", "raise")
WINDOW_KINDS = ("block", "sliding")
FLAGS = ("is_causal", "return_state", "recompute", "diagnostics")
LONGEST = 2**31  # no sequence is longer


class Options(NamedTuple):
    """The arguments of `linear_attention` beside its tensors; oracles and split sequences take some of them."""

    is_causal: Any = False
    scale: Any = None
    window: Any = None
    sinks: Any = 0
    window_kind: Any = "block"
    on_small_normalizer: Any = "mean"
    return_state: Any = False
    recompute: Any = True
    diagnostics: Any = True

    def checked(self, q: Tensor, k: Tensor, owner: str, *, goes_on: bool = False) -> Options:
        """Each of its own type and within bounds."""
        o, n, s = self, q.shape[-2], k.shape[-2]
        if unusual := [name for name in FLAGS if type(getattr(o, name)) is not bool]:
            o = o._replace(**{name: flag(getattr(o, name), name, owner) for name in unusual})
        if o.on_small_normalizer not in POLICIES:
            one_of(o.on_small_normalizer, "on_small_normalizer", owner, POLICIES)
        if o.is_causal and n > s:
            raise BochnerError(
                f"Causal attention needs at least as many keys as queries, got n={n} and s={s}; pass the earlier keys "
                "as well, or 'state' where there is one."
            )
        window, sinks = check_window(o.window, o.sinks, o.window_kind, owner, None if goes_on else s)
        if window is not None and n != s and not o.is_causal:
            raise BochnerError(
                f"A 'window' that is not causal needs as many queries as keys, got n={n} and s={s}; use window=None."
            )
        return o._replace(window=window, sinks=sinks, scale=check_scale(o.scale, q, owner))


def check_call(
    q: Tensor, keys: Keys, phi: FeatureMap, made: PreparedMap | None, state: State | None, decay: Any, options: Options
) -> tuple[Options, Tensor | None]:
    """Refuse what `linear_attention` cannot do; returns the options and log decays as they are used."""
    owner, (k, v, mask, *_) = "linear_attention", keys
    check_qkv(q, k, v, owner, mask, phi)
    if made is not None and options.scale is None:
        options = options._replace(scale=made.scale)
    o = options.checked(q, k, owner, goes_on=bool(options.return_state) or state is not None)
    if o.return_state and not o.is_causal:
        raise BochnerError("'return_state' needs is_causal=True; for bidirectional attention use absorb and read.")
    if state is not None:
        _check_resumed(q, k, v, phi, state, o)
    if made is not None and (made.scale, made.dtype) != (o.scale, dtype := accumulation_dtype(q.dtype)):
        raise BochnerError(
            f"The 'phi' of {owner} was prepared for scale={made.scale:.6g} and {made.dtype}, this call has scale="
            f"{o.scale:.6g} and {dtype}; prepare it for these."
        )
    if decay is None and state is not None and state.window is not None and state.window.held.shift is not None:
        decay = 0.0  # what has decayed stays so
    return o, check_decay(decay, k, owner, is_causal=o.is_causal)


def check_window(window: Any, sinks: Any, kind: Any, owner: str, length: int | None = None) -> tuple[int | None, int]:
    """The exact terms that are asked for; beyond all lengths they are cut down, to `length` where that is known."""
    if window is not None and (not is_int(window) or window < 1):
        raise BochnerError(f"The 'window' of {owner} must be a positive int or None, got {window!r}.")
    if not (type(sinks) is int or is_int(sinks)) or sinks < 0:
        raise BochnerError(f"The 'sinks' of {owner} must be an int >= 0, got {sinks!r}.")
    if kind not in WINDOW_KINDS:
        one_of(kind, "window_kind", owner, WINDOW_KINDS)
    most = LONGEST if length is None else length
    window, sinks = (x if x is None or x <= LONGEST else most for x in (window, sinks))
    return None if window is None else int(window), int(sinks)


def check_decay(decay: Any, k: Tensor, owner: str, *, is_causal: bool) -> Tensor | None:
    """The logarithms of decays that are asked for, per token or less, in double precision; broadcasts to (b, g, s)."""
    if decay is None:
        return None
    if not is_causal:
        raise BochnerError(f"The 'decay' of {owner} needs is_causal=True: it counts from a key to the rows after it.")
    (b, g, s), got = k.shape[:3], repr(decay)
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        found = torch.as_tensor(decay, device=k.device).to(torch.float64)
        if found.ndim < 2 and found.numel() in (1, g):
            return found.reshape(1, -1, 1)
        if found.ndim == 3 and all(n in (1, most) for n, most in zip(found.shape, (b, g, s), strict=True)):
            return found
        got = f"shape {tuple(found.shape)}"
    raise BochnerError(
        f"The 'decay' of {owner} must be log decays, one for each key head ({g},) or for each token {(b, g, s)}, got "
        f"{got}."
    )


def refuse_values(owner: str, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None) -> None:
    """Say what is not finite, if anything is and may be looked at."""
    if is_composed() or q.is_meta:
        return
    for name, x in (("q", q), ("k", k), ("v", v)):
        _checks.finite(x, name, owner)
    if decay is not None and not bool((good := (decay <= 0) & decay.isfinite()).all()):
        worst = float(decay.detach()[~good][0])
        raise BochnerError(
            f"The 'decay' of {owner} must be finite logarithms of at most 0, got {worst:.6g}; pass the log of a factor "
            "in (0, 1]."
        )


def _check_resumed(q: Tensor, k: Tensor, v: Tensor, phi: FeatureMap, state: Any, o: Options) -> None:
    if not isinstance(state, State):
        raise BochnerError(f"The 'state' of linear_attention must be a bochner.State, got {type(state).__name__}.")
    if not o.is_causal:
        raise BochnerError("A 'state' can be resumed only with is_causal=True.")
    have, want = state.sums.shape, (*k.shape[:2], phi.feature_dim, phi.num_columns(v.shape[-1]))
    if have != want:
        raise BochnerError(
            f"The 'state' has sums of shape {tuple(have)}, this call needs {want}: it belongs to another map, batch or "
            "value size."
        )
    dtype, made = accumulation_dtype(q.dtype), (0, 0, "") if state.window is None else state.window.setting
    if state.sums.dtype != dtype or state.sums.device != q.device:
        raise BochnerError(
            f"The 'state' is {state.sums.dtype} on {state.sums.device}, this call needs {dtype} on {q.device}; "
            "resume with the dtype and device that the state was made with."
        )
    near = made, (o.window or 0, o.sinks, o.window_kind)
    one, other = (f"window={w}, sinks={t}" + f", window_kind={kind!r}" * bool(w) for w, t, kind in near)
    if one != other:
        raise BochnerError(f"The 'state' was made with {one}, this call has {other}; use the same.")


def check_origin(state: State, now: tuple[str, int, float] | None) -> None:
    """Refuse a state that another map, another draw of it, or another scale has made."""
    if now is None or state.origin is None:
        return
    name, _, made = state.origin
    if made != now[2]:
        raise BochnerError(f"The 'state' was made with scale={made:.6g}, this call has scale={now[2]:.6g}; use that.")
    raise BochnerError(
        f"The 'state' was made by another map ({name}) or before this one was redrawn or calibrated; resume with the "
        "map that made it, or start again."
    )


def check_scale(scale: Any, q: Tensor, owner: str) -> float:
    """The factor of q . k: a positive number, d^-1/2 unless given."""
    if scale is None:
        return q.shape[-1] ** -0.5
    return scale if type(scale) is float and 0 < scale < math.inf else _checks.positive_float(scale, "scale", owner)


def check_qkv(
    q: Tensor, k: Tensor, v: Tensor, owner: str, mask: Tensor | None = None, phi: FeatureMap | None = None
) -> None:
    """Shapes, heads, dtypes and devices of the tensors of attention, and whether a map fits them."""
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        if not isinstance(x, Tensor) or x.dtype not in DTYPES:
            _checks.floating(x, name, owner)
        if x.ndim != 4 or 0 in x.shape:
            what = "4 axes (b, h, n, d)" + ", none of them empty" * (x.ndim == 4)
            raise BochnerError(f"The {name!r} of {owner} must have {what}, got shape {tuple(x.shape)}.")
        if x.dtype != q.dtype or x.device != q.device:
            raise BochnerError(
                f"q, k and v of {owner} must share dtype and device, got {q.dtype} on {q.device} for 'q' and {x.dtype} "
                f"on {x.device} for {name!r}; cast or move one."
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
    wanted = (torch.bool, (k.shape[0], k.shape[2]))
    if mask is not None and (not isinstance(mask, Tensor) or (mask.dtype, tuple(mask.shape)) != wanted):
        got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise BochnerError(
            f"The 'key_padding_mask' of {owner} must be a bool tensor of shape {wanted[1]}, True for "
            f"keys to ignore, got {got}."
        )
    if phi is not None and (phi.dim != q.shape[-1] or phi.num_heads is not None):
        for x, name in ((q, "q"), (k, "k")):
            phi.check_input(x, name)
        if phi.num_heads not in (None, k.shape[1]):
            raise BochnerError(
                f"The map has num_heads={phi.num_heads} but 'k' has {k.shape[1]} heads; build it with num_heads="
                f"{k.shape[1]} (query heads of a group share their key head's map) or num_heads=None."
            )
