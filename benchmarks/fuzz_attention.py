"""Random small calls of `linear_attention` against its definition in double precision.

    python benchmarks/fuzz_attention.py [--calls 100000] [--seed 0] [--output FILE.json] [--only CALL]

A call is drawn from its own seed: maps, shapes, dtypes, windows, sinks, padding, cuts into parts that are resumed by a
state, single steps, gradients. It fails if an output or gradient differs from the quadratic definition, if anything but
a `BochnerError` is raised, if a warning is wrong, or if an input was changed. `--only` repeats one call and says more.
Memory and the number of maps alive are compared between a fifth of the calls and the end. A run that was stopped goes
on where its output ends.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import random
import re
import resource
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bochner import BochnerError, BochnerWarning, _products, feature_map, linear_attention
from bochner.attention import PreparedMap, features, scan, softmax
from bochner.maps.base import FeatureMap

Case = dict[str, Any]
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2}  # of the largest value
GRADIENT = {"float64": 1e-7, "float32": 2e-3, "bfloat16": 5e-2}  # of the largest gradient
SMALL = 0.1  # of its bound: the least normaliser of a signed map that is divided by
KERNELS = ("positive", "calibrated", "hyperbolic", "optimal", "trig", "angular_hybrid", "gmm_prf", "gmm_rks")
OTHERS = ("relu", "elu", "sum_poly", "landmark+", "landmark-")
KINKED = ("relu", "angular_hybrid", "landmark+", "landmark-")  # gradients jump: compared in double precision only
POOL = 4  # fitted maps of each shape
LARGEST = 1e36  # beyond a hundredth of what single precision holds a result may be refused: sums pass it on the way


class Want(NamedTuple):
    """Rows (b, h, n, v) by the definition, and of each row (b, h, n): whether it is given a mean, whether that hangs on
    rounding, the mean itself, and the size that errors are relative to."""

    out: Tensor
    bad: Tensor
    unsure: Tensor
    mean: Tensor
    size: Tensor


# A call, from its seed.


def draw_case(seed: int) -> Case:
    r = random.Random(seed)
    window = r.choice([None, None, r.randint(1, 70), r.choice([15, 16, 17, 31, 32, 33, 63, 64, 65, 70])])
    near = [16, 32, 64, 128] + ([window, 2 * window, 3 * window] if window else [])
    around = max(1, min(200, r.choice(near) + r.choice([-1, 0, 1])))
    name, is_causal = r.choice(KERNELS + OTHERS), r.random() < 0.65
    s = around if r.random() < 0.6 else r.randint(1, 200)
    n = s
    if is_causal and r.random() < 0.2:
        n = r.randint(1, s)
    elif not is_causal and window is None and r.random() < 0.3:
        n = r.randint(1, 200)
    g = r.choice([1, 1, 2, 3])
    case: Case = {
        "seed": seed,
        "map": name,
        "b": r.randint(1, 3),
        "g": g,
        "h": g * r.choice([1, 1, 2, 3]),
        "n": n,
        "s": s,
        "d": r.randint(2, 8),
        "v": r.randint(1, 6),
        "m": r.choice([2, 5, 8, 16, 32]),
        "kernel": r.choice(["softmax", "softmax", "gaussian"]) if name in KERNELS else "softmax",
        "heads": r.random() < 0.3,
        "dtype": r.choice(["float64", "float64", "float32", "float32", "bfloat16"]),
        "size": r.choice([0.1, 0.5, 1.0, 1.0, 2.0, 3.0]),
        "scale": r.choice([None, None, None, 0.3]),
        "is_causal": is_causal,
        "window": window,
        "window_kind": r.choice(["block", "sliding"]),
        "sinks": r.choice([0, 0, 0, 1, 2, 3, 4]),
        "mask": r.choice(["none", "none", "left", "right", "scattered", "whole"]),
        "nan": r.random() < 0.3,
        "zeros": r.random() < 0.05,
        "policy": r.choice(["mean", "mean", "mean", "zero"]),
        "recompute": r.random() < 0.7,
        "diagnostics": r.random() < 0.7,
        "strided": r.random() < 0.2,
        "prepared": r.random() < 0.1,
        "trainable": r.random() < 0.2,
        "gradient": r.random() < 0.25,
        "mode": r.choice(["no_grad", "no_grad", "grad", "inference"]),
        "small_parts": r.random() < 0.3,
        "workspace": r.random() < 0.3,
        "shifted": r.random() < 0.3,
        "future": r.random() < 0.1,
        "decay": r.choice([None, None, "head", "token"]) if is_causal else None,
        "cuts": [],
    }
    if case["gradient"]:
        case["mode"] = "grad"
    if is_causal and n == s > 1 and r.random() < 0.5:
        case["cuts"] = draw_cuts(r, s)
    return case


def draw_cuts(r: random.Random, s: int) -> list[tuple[int, int, int]]:
    """Parts (first key, first query, end) of a sequence: long ones, and runs of single steps."""
    parts, i = [], 0
    while i < s:
        if i and r.random() < 0.4:
            steps = min(s - i, r.randint(1, 20))
            parts += [(j, j, j + 1) for j in range(i, i + steps)]
            i += steps
            continue
        end = min(s, i + r.choice([r.randint(1, s), r.randint(1, 20), 16, 32, 64]))
        first = r.randint(i, end - 1) if r.random() < 0.2 else i
        parts.append((i, first, end))
        i = end
    return parts


def draw_map(case: Case) -> FeatureMap:
    """The map of a call in float32."""
    name, heads = case["map"], case["g"] if case["heads"] else None
    r = random.Random(case["seed"] + 1)
    if name.startswith("landmark"):
        return copy.deepcopy(fitted(case["d"], name == "landmark+", heads, r.randrange(POOL)))
    options: dict[str, Any] = {"num_heads": heads, "seed": case["seed"]}
    if name in KERNELS:
        options["kernel"] = case["kernel"]
    if name == "optimal":
        options["A"] = r.choice([0.0, -0.1, 0.05])
    elif name.startswith("gmm"):
        options |= {"num_components": r.choice([1, 2]), "init_std": 0.3}
    elif name == "angular_hybrid":
        options["num_coefficients"] = r.choice([1, 3])
    elif name == "sum_poly":
        options |= {"coef": r.choice([0.0, 1.0]), "degree": r.choice([1, 2, 3])}
    elif name == "relu" and r.random() < 0.3:
        options["kernel_epsilon"] = 0.0
    if name not in ("sum_poly", "elu"):
        laws = ["orthogonal", "orthogonal", "iid", "orthogonal" if case["trainable"] else "hadamard"]
        options["projection"] = r.choice(laws)
    phi = feature_map(name, dim=case["d"], num_features=case["m"], **options)
    if name in ("calibrated", "optimal") and r.random() < 0.7:
        phi.calibrate_(*calibration(case["d"], case["g"], case["seed"]))
    return phi


@cache
def fitted(d: int, positive: bool, heads: int | None, number: int) -> FeatureMap:
    """One of a few landmark maps that were fitted to random data."""
    phi = feature_map("landmark", dim=d, num_features=8, positive=positive, num_heads=heads, seed=number)
    return phi.calibrate_(*calibration(d, heads or 1, number))


def calibration(d: int, heads: int, seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(6, heads, 30, d, generator=g) * d**-0.25 + 0.3 for _ in range(2)]


def draw_inputs(case: Case) -> tuple[list[Tensor], Tensor | None]:
    """q, k and v in double precision, but of the call's dtype, and its mask."""
    g, (b, h, n, s, d) = torch.Generator().manual_seed(case["seed"]), (case[x] for x in "bhnsd")
    shapes = ((b, h, n, d), (b, case["g"], s, d), (b, case["g"], s, case["v"]))
    q, k, v = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes)
    q, k = q * case["size"], k * case["size"]
    if case["zeros"]:
        q[..., torch.randint(n, (), generator=g), :] = 0
        k[..., torch.randint(s, (), generator=g), :] = 0
    place, kind = torch.arange(s).expand(b, s), case["mask"]
    length = torch.randint(0, s + 1, (b, 1), generator=g)
    masks = {
        "none": None,
        "left": place < s - length,
        "right": place >= length,
        "scattered": torch.rand(b, s, generator=g) < 0.3,
        "whole": (torch.rand(b, 1, generator=g) < 0.5) | (torch.rand(b, s, generator=g) < 0.1),
    }
    return [t.to(DTYPES[case["dtype"]]).double() for t in (q, k, v)], masks[kind]


def draw_decay(case: Case) -> Tensor | None:
    """Log decays in double precision, per key head or per token; some tokens do not decay."""
    if case["decay"] is None:
        return None
    shape = (case["g"],) if case["decay"] == "head" else (case["b"], case["g"], case["s"])
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(case["seed"] + 2), dtype=torch.float64)
    return -(x - 0.3).clamp_min(0) * (2.0 if case["size"] > 1 else 0.2)


def by_token(case: Case, decay: Tensor | None) -> Tensor | None:
    """Log decays of every token, (b, g, s)."""
    shape = case["b"], case["g"], case["s"]
    return None if decay is None else (decay.reshape(1, -1, 1) if decay.ndim == 1 else decay).expand(shape)


# The definition.


def define(
    case: Case, phi: FeatureMap, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, decay: Tensor | None
) -> Want:
    """Attention with every weight formed; all tensors and the map in double precision, or all but decays in single."""
    (b, h, n, d), (g, s) = q.shape, k.shape[1:3]
    root = (d**-0.5 if case["scale"] is None else case["scale"]) ** 0.5
    x, y = (q * root).reshape(b, g, -1, d), k * root
    f, p = phi(x, "query"), phi(y, "key")
    near, seen = (t[:, None, None] for t in places(case, mask))  # (b, 1, 1, n, s)
    lost = torch.ones(1, 1, 1, 1, 1, dtype=q.dtype)
    if decay is not None:  # exp of the log decays of all tokens behind a key, up to the row's
        each = by_token(case, decay)
        assert each is not None
        total = (each if mask is None else each.masked_fill(mask[:, None], 0)).cumsum(-1)
        lost = (total[..., s - n :, None] - total[..., None, :]).clamp_max(0).exp().unsqueeze(2).to(q.dtype)
    far = ((seen & ~near) * lost).expand(b, g, h // g, n, s).flatten(2, 3)  # (b, g, r n, s)
    pairs = f.values @ p.values.mT
    size = f.values.abs() @ p.values.abs().mT
    if phi.top_up is not None:
        most = far.sum(-1, keepdim=True)
        share = (pairs * far).sum(-1, keepdim=True) / torch.where(most > 0, most, 1)
        lack = (phi.top_up.to(q.dtype).reshape(-1, 1, 1) - share).clamp_min(0)
        pairs, size = pairs + lack, size + lack
    factor = (f.log_scale + p.log_scale.mT).exp()
    logits = x @ y.mT
    if phi.kernel == "gaussian":
        logits = logits - 0.5 * (x.square().sum(-1, keepdim=True) + y.square().sum(-1, keepdim=True).mT)
    exact = logits.exp() * ((near & seen) * lost).expand(b, g, h // g, n, s).flatten(2, 3)
    weights, size = pairs * factor * far + exact, (size * factor * far + exact).sum(-1).detach()
    num, den = weights @ v, weights.sum(-1)
    visible = seen.to(q.dtype).expand(b, g, h // g, n, s).flatten(2, 3)
    count = visible.sum(-1)
    mean = visible @ v / count.clamp_min(1).unsqueeze(-1)
    bad, unsure = den.detach() == 0, torch.zeros_like(den, dtype=torch.bool)
    if case["map"] == "relu" and case["dtype"] != "float64":
        unsure = hangs_on_signs(phi, x, y, far)
    if not phi.positive and phi.top_up is None:
        total = far @ (p.values * p.log_scale.exp())
        bound = ((f.values * f.log_scale.exp()).norm(dim=-1) * total.norm(dim=-1) + exact.sum(-1)).detach()
        least = SMALL * bound
        rounding = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-5}[case["dtype"]]
        unsure = ((den.detach() - least).abs() <= rounding * size) & (size > 0)
        bad = (den.detach() < least) | (den.detach() == 0)
    out = torch.where(bad[..., None], mean, num / torch.where(bad, 1, den)[..., None])
    if case["policy"] == "zero" and not phi.positive and phi.top_up is None:
        out = torch.where((bad & (count > 0))[..., None], 0, out)
    size = torch.where(bad, 1, size / torch.where(bad, 1, den.detach()))
    size = size * v.detach().abs().max()
    shape = (b, h, n)
    bad = bad & (count > 0)
    return Want(out.view(*shape, -1), bad.view(shape), unsure.view(shape), mean.view(*shape, -1), size.view(shape))


def hangs_on_signs(phi: Any, x: Tensor, y: Tensor, far: Tensor) -> Tensor:
    """Rows (b, g, r n) of relu features without a normaliser to speak of, where single precision may turn a sign."""
    a, b = (phi.projection(t) for t in (x, y))
    error, eps = 1e-5, phi.kernel_epsilon
    least, most = ([(t + e * t.norm(dim=-1, keepdim=True)).relu() + eps for t in (a, b)] for e in (-error, error))
    least, most = ((f * (far @ p)).sum(-1) for f, p in (least, most))
    return (least < 0.5 * most).detach()


def places(case: Case, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which keys a row sees exactly if it sees them, and which it sees, (b, n, s)."""
    b, n, s, w = case["b"], case["n"], case["s"], case["window"]
    j = torch.arange(s)[None, None]
    i = torch.arange(s - n, s)[None, :, None] if case["is_causal"] else torch.arange(n)[None, :, None]
    padded = torch.zeros(b, s, dtype=torch.bool) if mask is None else mask
    near = torch.zeros(b, n, s, dtype=torch.bool)
    if w and case["window_kind"] == "block":
        first = padded.long().cumprod(1).sum(1)[:, None, None]
        near = near | (((i - first) // w - (j - first) // w).abs() <= 1)
    elif w:
        near = near | ((i - j).abs() < w)
    near = near | (~padded & ((~padded).cumsum(1) <= case["sinks"]))[:, None]
    seen = (j <= i if case["is_causal"] else torch.ones(1, n, s, dtype=torch.bool)) & ~padded[:, None]
    return near, seen


# What is run and compared.


class Failure(Exception):
    """What a call did wrong: a kind, and a sentence."""


@contextlib.contextmanager
def small_limits(case: Case) -> Iterator[None]:
    """Limits so small that short sequences are taken in parts, memory is used again and logits are shifted."""
    before, ranges = (scan.ELEMENTS, softmax.BLOCK, _products.WORTHWHILE), dict(features.RANGES)
    if case["small_parts"]:
        scan.ELEMENTS, softmax.BLOCK = 1, 32
    if case["workspace"]:
        _products.WORTHWHILE = 1
    if case["shifted"]:
        features.RANGES.update({dtype: limits._replace(calm=1.0) for dtype, limits in ranges.items()})
    try:
        yield
    finally:
        features.RANGES.update(ranges)
        scan.ELEMENTS, softmax.BLOCK, _products.WORTHWHILE = before


def modes(case: Case) -> Any:
    return {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}[case["mode"]]()


def attend(
    case: Case, phi: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, decay: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Rows of a call, in one piece or in parts, and their places among the queries."""
    names = ("is_causal", "window", "window_kind", "sinks", "scale", "recompute", "diagnostics")
    how: dict[str, Any] = {name: case[name] for name in names} | {"on_small_normalizer": case["policy"]}
    if not case["cuts"]:
        return linear_attention(q, k, v, phi, key_padding_mask=mask, decay=decay, **how), torch.arange(q.shape[2])
    state, rows, found = None, [], []
    for i, first, end in case["cuts"]:
        part = None if mask is None else mask[:, i:end]
        x, y, u = q[:, :, first:end], k[:, :, i:end], v[:, :, i:end]
        how["decay"] = decay if decay is None or decay.ndim == 1 else decay[..., i:end]
        out, state = linear_attention(x, y, u, phi, key_padding_mask=part, state=state, return_state=True, **how)
        rows.append(out)
        found.append(torch.arange(first, end))
    return torch.cat(rows, dim=2), torch.cat(found)


def run(case: Case) -> Counter[str]:
    """Run a call and compare it; counts of rows. Raises `Failure`."""
    plain = draw_map(case)
    if case["trainable"]:
        plain.trainable_()
    wide = copy.deepcopy(plain).double()
    phi = wide if case["dtype"] == "float64" else plain
    inputs, mask = draw_inputs(case)
    if near_a_sign(case, wide, inputs):
        return Counter(skipped=1)
    wants_gradient = case["gradient"] and not (case["map"] in KINKED and case["dtype"] != "float64")
    given = [prepare_input(case, t, mask if i else None) for i, t in enumerate(inputs)]
    decays = [draw_decay(case)] * 2  # ours, and that of the definition
    copies = [t.clone() for t in given]
    leaves = [t.requires_grad_() for t in inputs] if wants_gradient else inputs
    if wants_gradient:
        given = [t.requires_grad_() for t in given]
        decays = [None if t is None else t.clone().requires_grad_() for t in (decays[0], by_token(case, decays[1]))]
    with warnings.catch_warnings(record=True) as caught, small_limits(case), modes(case):
        warnings.simplefilter("always")
        scale = case["d"] ** -0.5 if case["scale"] is None else case["scale"]
        dtype = torch.float64 if case["dtype"] == "float64" else torch.float32
        used: Any = PreparedMap(phi, scale, dtype) if case["prepared"] else phi
        with torch.set_grad_enabled(wants_gradient):
            k, v = (t if mask is None else t.masked_fill(mask[:, None, :, None], 0) for t in leaves[1:])
            want = define(case, wide, leaves[0], k, v, mask, decays[1])
        try:
            got, rows = attend(case, used, given[0], given[1], given[2], mask, decays[0])
        except BochnerError as error:
            if "leave torch.float32" in str(error) and float(want.out.detach().abs().max()) > LARGEST:
                return Counter(refused=1)  # rightly: the result itself does not fit
            raise Failure("refused", str(error)) from error
        want = Want(*(t[:, :, rows] for t in want))
        counts = compare(case, wide, got, want)
        if wants_gradient:
            ours, theirs = ([*t, *([] if d is None else [d])] for t, d in zip((given, leaves), decays, strict=True))

            def again(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None) -> Tensor:
                """The definition in single precision."""
                k, v = (t if mask is None else t.masked_fill(mask[:, None, :, None], 0) for t in (k, v))
                return define(case, plain, q, k, v, mask, decay).out[:, :, rows]

            compare_gradients(case, phi, wide, got, ours, want, theirs, again)
    if any(not same(a, b) for a, b in zip(given, copies, strict=True)):
        raise Failure("inputs changed", "")
    check_warnings(case, caught, wide, got.detach(), want, counts)
    if case["future"] and case["is_causal"] and case["n"] == case["s"] > 1:
        check_future(case, phi, got.detach(), rows, [t.detach() for t in given], mask, decays[0])
    return counts


def near_a_sign(case: Case, wide: FeatureMap, inputs: list[Tensor]) -> bool:
    """Whether rounding to single precision may turn a sign in the features of the angular hybrid."""
    if case["map"] != "angular_hybrid" or case["dtype"] == "float64":
        return False
    b, g, d = case["b"], case["g"], case["d"]
    q = inputs[0].reshape(b, g, -1, d)
    return any(bool((wide.coefficient_projection(t).abs() < 1e-5 * case["size"]).any()) for t in (q, inputs[1]))


def prepare_input(case: Case, t: Tensor, mask: Tensor | None) -> Tensor:
    t = t.to(DTYPES[case["dtype"]]).clone()
    if case["nan"] and mask is not None:
        t = t.masked_fill(mask[:, None, :, None], torch.nan)
    return t.transpose(1, 2).contiguous().transpose(1, 2) if case["strided"] else t


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.detach().nan_to_num(1234.5), b.nan_to_num(1234.5))


def compare(case: Case, phi: FeatureMap, got: Tensor, want: Want) -> Counter[str]:
    """Every row, but for those of signed maps whose normaliser is at the threshold up to rounding."""
    if got.dtype != DTYPES[case["dtype"]] or got.shape != want.out.shape:
        raise Failure("shape", f"{got.dtype} {tuple(got.shape)} for {tuple(want.out.shape)}")
    got, tolerance = got.detach().double(), TOLERANCE[case["dtype"]]
    if not got.isfinite().all():
        huge = want.out.detach().abs() * tolerance > 1e32 if case["dtype"] != "float64" else torch.zeros_like(got) > 0
        if not (got.isfinite() | huge).all():
            raise Failure("not finite", f"{int((~got.isfinite()).any(-1).sum())} rows")
        return Counter(rows=got[..., 0].numel(), overflow=1)
    error = (got - want.out.detach()).abs().amax(-1)
    least = 0.0 if case["dtype"] == "float64" else 1e-36  # below it single precision has no digits
    wrong = (error > tolerance * want.size + least) & ~want.unsure
    lost = torch.zeros_like(wrong)
    if phi.positive:  # out of range: allowed, and counted
        lost = wrong & ((got - want.mean.detach()).abs().amax(-1) <= tolerance * want.size)
        wrong = wrong & ~lost
    if wrong.any():
        at = [int(i) for i in wrong.nonzero()[0]]
        worst = float((error / want.size.clamp_min(1e-300)).masked_fill(~wrong, 0).max())
        what = f"{int(wrong.sum())} of {wrong.numel()} rows, first (b, h, i) = {at}, by {worst:.1e}"
        b, h, i = at
        sample = f"got {rounded(got[b, h, i])}, want {rounded(want.out[b, h, i])}"
        raise Failure("mismatch", f"{what}; {sample}, bad {bool(want.bad[b, h, i])}")
    counts = Counter(rows=got[..., 0].numel(), lost=int(lost.sum()), unsure=int(want.unsure.sum()))
    counts["mean"] = int(want.bad.sum())
    want.unsure.logical_or_(lost)
    return counts


def compare_gradients(
    case: Case,
    phi: FeatureMap,
    wide: FeatureMap,
    got: Tensor,
    given: list[Tensor],
    want: Want,
    leaves: list[Tensor],
    again: Callable[..., Tensor],
) -> None:
    """Gradients of one random functional, with regard to inputs and all parameters of the map.

    In lower precision one that is further off than usual may be up to twice as far off as that of the definition in
    single precision, `again`.
    """
    g = torch.Generator().manual_seed(case["seed"])
    weight = torch.randn(got.shape, generator=g, dtype=torch.float64)
    # Rows of one size: without normalisers the largest would hide the others.
    sizes = want.size.clamp_min(1e-6 * float(want.size.max()) or 1.0).unsqueeze(-1)
    weight = (weight / sizes).masked_fill(want.unsure.unsqueeze(-1), 0).to(got.dtype)  # the same for both
    ours, theirs = [*given, *phi.parameters()], [*leaves, *wide.parameters()]
    found = torch.autograd.grad(got, ours, weight, allow_unused=True)
    expected = torch.autograd.grad(want.out, theirs, weight.double(), allow_unused=True)
    names = [*("q", "k", "v", "decay")[: len(given)], *(name for name, _ in phi.named_parameters())]
    largest = {name: 0.0 if e is None else float(e.abs().max()) for name, e in zip(names, expected, strict=True)}
    for i, (name, a, e) in enumerate(zip(names, found, expected, strict=True)):
        e = torch.zeros(()) if e is None else e
        a = torch.zeros(()) if a is None else a.double()
        if not a.isfinite().all():
            raise Failure("gradient not finite", name)
        # A gradient that cancels is a sum of terms as large as the others, those of small queries and keys larger.
        size = max(largest[name], 0.01 / case["size"] * max(largest.values()))
        by_head = name == "decay" and a.ndim == 1  # a sum over all tokens, most of which cancel
        e = e.sum((0, 2)) if by_head else e
        error = float((a - e).abs().max())
        allowed = GRADIENT[case["dtype"]] * size
        if error > allowed and case["dtype"] != "float64":
            inputs = [t.detach().float() for t in leaves[:3]] + [t.detach() for t in leaves[3:]]
            inputs = [t.requires_grad_() for t in inputs]
            at = [*inputs, *phi.parameters()]
            single = torch.autograd.grad(again(*inputs), at, weight.float(), allow_unused=True)[i]
            single = torch.zeros(()) if single is None else single.double()
            allowed = max(allowed, 2 * float(((single.sum((0, 2)) if by_head else single) - e).abs().max()))
        if error > allowed:
            raise Failure("gradient", f"of {name} by {error:.1e}, its size {largest[name]:.1e}")


def check_warnings(
    case: Case, caught: list[Any], phi: FeatureMap, got: Tensor, want: Want, counts: Counter[str]
) -> None:
    """As many rows are said to be bad as are, where something is said.

    A row of a positive map may be out of range wherever it has the mean: that of a single key is its value anyway.
    """
    said = 0
    for w in caught:
        found = re.match(r"(\d+) of (\d+) attention rows", str(w.message))
        if not issubclass(w.category, BochnerWarning) or found is None:
            raise Failure("warning", f"{w.category.__name__}: {w.message}")
        said += int(found[1])
    counts["warnings"] = len(caught)
    if case["diagnostics"]:
        may_be = want.bad | want.unsure
        if phi.positive:
            may_be |= (got - want.mean.detach()).abs().amax(-1) <= TOLERANCE[case["dtype"]] * want.size
        least, most = int((want.bad & ~want.unsure).sum()), int(may_be.sum())
        if not least <= said <= most:
            raise Failure("count", f"{said} rows said to be bad, {least} to {most} are")


def check_future(
    case: Case, phi: Any, got: Tensor, rows: Tensor, given: list[Tensor], mask: Tensor | None, decay: Tensor | None
) -> None:
    """Later keys, values and decays do not move an earlier row by a bit."""
    i = case["s"] // 2
    if decay is not None and decay.ndim == 3:
        decay = torch.cat([decay[..., :i], 2 * decay[..., i:]], dim=-1).detach()
    q, k, v = (t.clone() for t in given)
    k[:, :, i:] *= -1.5
    v[:, :, i:] += 1
    with warnings.catch_warnings(), small_limits(case), modes(case):
        warnings.simplefilter("ignore")
        if case["gradient"]:
            q = q.requires_grad_()
        try:
            again, _ = attend(case, phi, q, k, v, mask, decay)
        except BochnerError as error:
            if "leave torch.float32" in str(error):  # the larger keys may be too large
                return
            raise
    if not torch.equal(again.detach()[:, :, rows < i], got[:, :, rows < i]):
        raise Failure("future", f"keys from {i} on change earlier rows")


def rounded(t: Tensor) -> list[float]:
    return [float(f"{x:.4g}") for x in t.tolist()]


def live_maps() -> int:
    gc.collect()
    return sum(issubclass(type(x), FeatureMap) for x in gc.get_objects()) - fitted.cache_info().currsize


def memory() -> float:
    """The most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident() -> float:
    """The memory that this process has now, in MB; what `memory` says can only grow."""
    gc.collect()
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * resource.getpagesize() / 2**20


def attempt(case: Case) -> tuple[Counter[str], dict[str, Any] | None]:
    """Counts of a call, and what it did wrong."""
    try:
        return run(case), None
    except Failure as failure:
        kind, what = failure.args
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        kind, what = "crash", f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
    return Counter(), {"kind": kind, "what": what.splitlines()[0] if what else "", "case": case}


SIMPLE: dict[str, list[Any]] = {
    "cuts": [[]],
    "gradient": [False],
    "mask": ["none", "left", "right"],
    "window": [None, 1, 2, 3, 4, 8],
    "sinks": [0, 1],
    "map": ["positive", "elu", "trig"],
    "dtype": ["float64", "float32"],
    "kernel": ["softmax"],
    "b": [1, 2],
    "h": [1, 2],
    "g": [1],
    "d": [2, 4],
    "v": [1],
    "m": [2, 8],
    "mode": ["grad", "no_grad"],
    "scale": [None],
    "size": [0.1, 1.0],
    "policy": ["mean"],
    "window_kind": ["sliding", "block"],
    "recompute": [False],
    "diagnostics": [True],
    "decay": [None, "head"],
}
SWITCHES = (
    "heads",
    "nan",
    "zeros",
    "strided",
    "prepared",
    "trainable",
    "small_parts",
    "workspace",
    "shifted",
    "future",
)


def shrunk(case: Case, kind: str) -> Case:
    """A simpler call that fails in the same way."""

    def fails(trial: Case) -> bool:
        if trial["h"] % trial["g"] or (trial["window"] and not trial["is_causal"] and trial["n"] != trial["s"]):
            return False
        _, failure = attempt(trial)
        return failure is not None and failure["kind"] == kind

    before = None
    while before != case:
        before = case
        trials = [{name: value} for name, values in SIMPLE.items() for value in values]
        trials += [{name: False} for name in SWITCHES]
        while trials:
            change = trials.pop(0)
            values = [*SIMPLE.get(next(iter(change)), []), False]
            ((name, value),) = change.items()
            if case[name] == value or (case[name] in values and values.index(case[name]) < values.index(value)):
                continue
            trial = case | change
            if fails(trial):
                case = trial
        if not case["cuts"]:
            for n in [*range(1, 8), *range(8, 200, 4)]:
                both = case["n"] == case["s"]
                trial = case | ({"n": n, "s": n} if both else {"n": min(n, case["n"]), "s": n})
                if n < case["s"] and fails(trial):
                    case = trial
                    break
        else:
            for i in range(len(case["cuts"]) - 1):
                trial = case | {"cuts": case["cuts"][: i + 1]}
                trial["n"] = trial["s"] = trial["cuts"][-1][2]
                if fails(trial):
                    case = trial
                    break
            for i in range(len(case["cuts"]) - 1):  # two parts as one
                (a, f, _), (_, _, e) = case["cuts"][i : i + 2]
                trial = case | {"cuts": [*case["cuts"][:i], (a, f, e), *case["cuts"][i + 2 :]]}
                if fails(trial):
                    case = trial
                    break
    return case


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--quick", action="store_true", help="2,000 calls")
    parser.add_argument("--seed", type=int, default=0, help="the first call's; the others count on")
    parser.add_argument("--only", type=int, default=None, help="repeat the call of this seed alone")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args(argv)
    options.calls = 2000 if options.quick else options.calls
    torch.set_num_threads(1)
    if options.only is not None:
        case = draw_case(options.only)
        counts, failure = attempt(case)
        print(f"{case}\n{dict(counts) or (failure and (failure['kind'], failure['what']))}")
        if failure is not None:
            smaller = shrunk(case, failure["kind"])
            _, failure = attempt(smaller)
            print(f"Less: {smaller}\n{failure and failure['what']}")
            run(smaller)
        return {}
    return many(options.calls, options.seed, options.output)


def many(calls: int, seed: int, output: Path | None) -> dict[str, Any]:
    """Many calls; with an output they go on behind those that it holds, and it is written every thousand calls."""
    held: dict[str, Any] = json.loads(output.read_text()) if output is not None and output.exists() else {"seed": seed}
    if held["seed"] != seed:
        raise SystemExit(
            f"{output} holds the calls from {held['seed']} on; pass --seed {held['seed']} or another file."
        )
    names = ("memory", "resident", "live_maps")  # after a fifth of the calls of a run, and at its end
    failures, seconds = held.pop("failures", []), held.pop("seconds", 0.0)
    totals = Counter({k: x for k, x in held.items() if k not in ("seed", *names)})
    start = said = time.time()
    first, early = totals["calls"], (memory(), resident(), live_maps())
    results: dict[str, Any] = {}
    for i in range(first, calls):
        counts, failure = attempt(draw_case(seed + i))
        totals += counts
        totals["calls"] += 1
        if failure is not None:
            failures.append(failure)
            totals[failure["kind"]] += 1
            print(f"--only {seed + i}: {failure['kind']}: {failure['what']}", flush=True)
        if counts["lost"]:
            print(f"--only {seed + i}: {counts['lost']} rows of a positive map got the mean", flush=True)
        if i + 1 - first == max(1, (calls - first) // 5):
            early = memory(), resident(), live_maps()
        if time.time() - said > 10:
            said = time.time()
            speed = (i + 1 - first) / (said - start)
            print(f"[{i + 1} calls, {speed:.0f}/s, {len(failures)} failures, {memory():.0f} MB]", flush=True)
        if (i + 1) % 1000 == 0 or i + 1 == calls:
            late = memory(), resident(), live_maps()
            results = {"seed": seed, **totals, "seconds": seconds + time.time() - start}
            results |= {name: [a, b] for name, a, b in zip(names, early, late, strict=True)} | {"failures": failures}
            if output is not None:
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps({k: x for k, x in results.items() if k != "failures"}))
    return results


if __name__ == "__main__":
    main()
