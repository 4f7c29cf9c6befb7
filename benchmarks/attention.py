"""Linear attention against exact attention, performer-pytorch and the floor of four bare matrix products.

    python benchmarks/attention.py [--quick] [--output FILE.json] [--plot FILE.png] [--page FILE.md] [--threads 2]

8 heads, d = 64, m = 256 unless said otherwise. Times are the best of several rounds in which the methods take turns;
memory is the peak beyond the inputs. Nothing is reported if the quick check of correctness fails.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _timing import arguments, best_times, bfloat16_works, kept, machine, peak_memory, write
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from bochner import absorb, attention_matrix, empty_state, feature_map, linear_attention
from bochner.attention import PreparedMap
from bochner.attention.layout import CHUNK
from bochner.attention.scan import ELEMENTS
from bochner.maps.base import FeatureMap

HEADS, D, M = 8, 64, 256
LENGTHS = [2**i for i in range(8, 17)]
SLOW = 12.0  # seconds; a call predicted to take longer is left out
LARGE = 4 * 2**30  # bytes; so is one predicted to hold more
CROSSOVER_FEATURES = (64, 128, 256, 512, 1024)
PARTS = ("forward", "backward", "bfloat16", "memory", "crossover", "decoding", "compiled")
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Row = dict[str, Any]


# The subjects.


def bochner_attention(is_causal: bool, m: int = M) -> Attention:
    phi = feature_map("positive", dim=D, num_features=m)
    return lambda q, k, v: linear_attention(q, k, v, phi, is_causal=is_causal)


def exact(is_causal: bool) -> Attention:
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def performer(is_causal: bool) -> Attention:
    from performer_pytorch import FastAttention

    with contextlib.redirect_stdout(io.StringIO()):  # it prints that its CUDA extension is missing
        return FastAttention(dim_heads=D, nb_features=M, causal=is_causal)


def floor(is_causal: bool) -> Attention:
    """Two projections, keys' features times values, queries' features times the state: in our blocks, without exp."""
    w = feature_map("positive", dim=D, num_features=M).projection.matrix()

    def products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        wt = w.to(q.dtype).mT
        rows = min(CHUNK if is_causal else max(64, ELEMENTS // (q.shape[0] * q.shape[1] * M)), q.shape[-2])
        out = torch.empty_like(v)
        kv = torch.zeros(*k.shape[:2], M, v.shape[-1], dtype=q.dtype)
        features, part = (q.new_empty(*q.shape[:2], rows, size) for size in (M, v.shape[-1]))

        def absorb(block: slice) -> None:
            kv.add_(torch.matmul(k[..., block, :], wt, out=features).mT @ v[..., block, :])

        def read(block: slice) -> None:
            out[..., block, :] = torch.matmul(torch.matmul(q[..., block, :], wt, out=features), kv, out=part)

        blocks = [slice(i, i + rows) for i in range(0, q.shape[-2], rows)]
        for block in blocks:
            absorb(block)
            if is_causal:
                read(block)
        for block in blocks if not is_causal else ():
            read(block)
        return out

    return products


SUBJECTS: dict[str, Callable[[bool], Attention]] = {
    "bochner": bochner_attention,
    "exact": exact,
    "performer": performer,
    "floor": floor,
}


def inputs(n: int, dtype: torch.dtype = torch.float32, *, learns: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(1, HEADS, n, D, generator=g).to(dtype).requires_grad_(learns) for _ in range(3))
    return q, k, v


# The gate.


def gate() -> list[str]:
    """What is wrong with the results, in words; empty when all is well."""
    wrong = []
    q, k, v = (t.double() for t in inputs(300))
    phi = feature_map("positive", dim=D, num_features=M)
    for is_causal in (False, True):
        out = linear_attention(q, k, v, phi, is_causal=is_causal)
        want = attention_matrix(q, k, phi, is_causal=is_causal) @ v
        if float((out - want).abs().max()) > 1e-10:
            wrong.append(f"linear_attention(is_causal={is_causal}) differs from the attention matrix")
        single = linear_attention(q.float(), k.float(), v.float(), phi, is_causal=is_causal)
        if float((single - want).norm() / want.norm()) > 1e-4:
            wrong.append(f"linear_attention(is_causal={is_causal}) is inaccurate in float32")
    late = torch.cat([k[:, :, :200], 1e3 * k[:, :, 200:]], dim=2)
    past = (linear_attention(q, x, v, phi, is_causal=True)[:, :, :200] for x in (k, late))
    if not torch.equal(*past):
        wrong.append("a large future key changes the past")
    return wrong


# The measurements.


def forward(attend: Attention, qkv: tuple[Tensor, Tensor, Tensor]) -> Callable[[], Any]:
    def call() -> Tensor:
        with torch.no_grad():
            return attend(*qkv)

    return call


def backward(attend: Attention, qkv: tuple[Tensor, Tensor, Tensor]) -> Callable[[], Any]:
    learning = tuple(t.detach().requires_grad_() for t in qkv)

    def call() -> Any:
        return torch.autograd.grad(attend(*learning).sum(), learning)

    return call


def predicted(name: str, n: int, known: dict[int, float], is_causal: bool, passes: str) -> tuple[float, float]:
    """Seconds and bytes of a call, from shorter lengths and from what the method is known to keep."""
    seconds = 0.0
    if known:
        longest = max(known)
        seconds = known[longest] * (n / longest) ** (2 if name == "exact" else 1)
    memory = 0.0
    if name == "performer":
        rows = n if passes == "forward+backward" else n / 128
        memory = 4.0 * HEADS * (3 * rows * M * D if is_causal else 4 * n * M)
    return seconds, memory


def measure_times(lengths: list[int], dtypes: list[torch.dtype], passes: list[str], budget: float) -> list[Row]:
    rows: list[Row] = []
    crash = torch.bfloat16 in dtypes and not bfloat16_works()
    for dtype in dtypes:
        for is_causal in (False, True):
            for which in passes:
                known: dict[str, dict[int, float]] = {name: {} for name in SUBJECTS}
                names = [name for name in SUBJECTS if not (name == "floor" and which != "forward")]
                for n in lengths:
                    qkv = inputs(n, dtype)
                    calls, left_out = {}, {}
                    for name in names:
                        seconds, memory = predicted(name, n, known[name], is_causal, which)
                        if seconds > SLOW:
                            left_out[name] = f"would take {seconds:.0f} s"
                        elif memory > LARGE:
                            left_out[name] = f"would hold {memory / 2**30:.0f} GiB"
                        elif name == "performer" and dtype != torch.float32:
                            left_out[name] = "float32 only"
                        elif crash and dtype == torch.bfloat16 and name != "bochner":
                            left_out[name] = "bfloat16 products crash here"
                        else:
                            make = forward if which == "forward" else backward
                            calls[name] = make(SUBJECTS[name](is_causal), qkv)
                    for name, seconds in best_times(calls, budget=budget).items():
                        known[name][n] = seconds
                    row = {"dtype": str(dtype).split(".")[1], "is_causal": is_causal, "passes": which, "length": n}
                    rows.append({**row, "seconds": {x: known[x][n] for x in calls}, "left_out": left_out})
                    show_times(rows[-1])
    return rows


def show_times(row: Row) -> None:
    kind = "causal" if row["is_causal"] else "bidirectional"
    times = "  ".join(f"{name} {1e3 * s:9.2f} ms" for name, s in row["seconds"].items())
    print(f"{row['dtype']:9} {kind:13} {row['passes']:16} L={row['length']:6d}  {times}", flush=True)


def measure_memory(lengths: list[int]) -> list[Row]:
    """Peak of forward+backward beyond the inputs, also as a multiple of q, k and v together."""
    rows = []
    for is_causal in (False, True):
        for n in lengths:
            qkv = inputs(n)
            own = sum(t.numel() * t.element_size() for t in qkv)
            row: Row = {"is_causal": is_causal, "length": n, "qkv_bytes": own, "bytes": {}}
            for name in ("bochner", "exact", "performer"):
                too_large = predicted(name, n, {}, is_causal, "forward+backward")[1] > LARGE / 2
                if not too_large and not (name == "exact" and n > 8192):
                    row["bytes"][name] = peak_memory(backward(SUBJECTS[name](is_causal), qkv))
            rows.append(row)
            multiples = "  ".join(f"{name} {b / own:6.2f}x" for name, b in row["bytes"].items())
            print(f"memory  causal={is_causal!s:5}  L={n:6d}  peak / (q, k, v): {multiples}", flush=True)
    return rows


def measure_crossover(lengths: list[int], features: tuple[int, ...], budget: float) -> list[Row]:
    """The length from which linear attention is faster than exact attention, forward, float32."""
    rows = []
    for is_causal in (False, True):
        times: dict[int, dict[str, float]] = {}
        for n in lengths:
            qkv = inputs(n)
            calls = {str(m): forward(bochner_attention(is_causal, m), qkv) for m in features}
            times[n] = best_times({"exact": forward(exact(is_causal), qkv), **calls}, budget=budget)
        for m in features:
            ratio = {n: t[str(m)] / t["exact"] for n, t in times.items()}
            rows.append({"is_causal": is_causal, "num_features": m, "length": crossing(ratio), "ratio": ratio})
            print(
                f"crossover  causal={is_causal!s:5}  m={m:5d}  L = {crossing(ratio) or f'> {lengths[-1]}'}", flush=True
            )
    return rows


def crossing(ratio: dict[int, float]) -> int | None:
    """Where a ratio falls below 1 for good, interpolated in logarithms; None if it does not."""
    lengths = sorted(ratio)
    above = [n for n in lengths if ratio[n] >= 1]
    if not above:
        return lengths[0]
    last = above[-1]
    if last == lengths[-1]:
        return None
    after = lengths[lengths.index(last) + 1]
    share = math.log(ratio[last]) / (math.log(ratio[last]) - math.log(ratio[after]))
    return round(last * (after / last) ** share)


def measure_decoding(budget: float, positions: tuple[int, int] = (10, 100_000)) -> Row:
    """One decoding step after few and after many keys, and exact attention over a cache of as many keys."""
    phi = feature_map("positive", dim=D, num_features=M)
    token = inputs(1)
    calls, sizes = {}, {}
    for n in positions:
        _, k, v = inputs(n)
        state = empty_state((1, HEADS), M, D, dtype=torch.float32)
        for y, u in zip((k * D**-0.25).split(4096, dim=-2), v.split(4096, dim=-2), strict=True):
            state = absorb(state, phi(y, "key"), u)
        sizes[n] = state.nbytes
        calls[f"bochner {n}"] = _step(phi, state, token)
        calls[f"exact {n}"] = forward(exact(False), (token[0], k, v))
    times = best_times(calls, repeats=200, budget=budget)
    row = {"positions": positions, "state_bytes": sizes, "seconds": times, "step": measure_step(phi, budget)}
    few, many = (times[f"bochner {n}"] for n in positions)
    print(f"decoding  step at {positions[1]} / step at {positions[0]} = {many / few:.3f}", flush=True)
    return row


def _step(phi: FeatureMap, state: Any, token: tuple[Tensor, Tensor, Tensor]) -> Callable[[], Any]:
    return forward(lambda q, k, v: linear_attention(q, k, v, phi, is_causal=True, state=state), token)


def measure_step(phi: FeatureMap, budget: float) -> dict[str, float]:
    """Seconds of a step behind 1,024 tokens that returns its state, of exact attention, and of bare operators."""
    (q, k, v), (_, keys, values) = inputs(1), inputs(1024)
    prepared, w = PreparedMap(phi, D**-0.5), phi.projection.matrix().mT.contiguous()
    causal: dict[str, Any] = {"is_causal": True, "return_state": True}
    near: dict[str, Any] = {"": {}, ", window": {"window": 64, "sinks": 4}}
    with torch.no_grad():
        states = {name: linear_attention(*inputs(1024), phi, **causal, **how)[1] for name, how in near.items()}
    sums, calls = states[""].sums, {}
    for name, how in near.items():
        for kind, made, checks in (("", phi, True), (", prepared", prepared, True), (", trusted", prepared, False)):
            call = causal | how | {"phi": made, "state": states[name], "diagnostics": checks}
            calls[f"step{name}{kind}"] = forward(partial(linear_attention, **call), (q, k, v))

    def bare(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Two projections, two exponentials, one product into the sums, one out of them, and the division."""
        psi, phi = (k @ w).exp_(), (q @ w).exp_()
        row = phi @ torch.addcmul(sums, psi.mT, pad(v, (0, 1), value=1.0))
        return row[..., :-1] / row[..., -1:]

    def appending(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = (torch.cat([old[:, :, 1:], new], dim=2) for old, new in ((keys, k), (values, v)))
        return scaled_dot_product_attention(q, *cache)

    calls["bare operators"] = forward(bare, (q, k, v))
    calls["exact, 1,024 keys"] = forward(exact(False), (q, keys, values))
    calls["exact, appending to 1,024 keys"] = forward(appending, (q, k, v))
    times = best_times(calls, repeats=200, budget=budget)
    print("step  " + "  ".join(f"{name} {1e6 * s:.0f} us" for name, s in times.items()), flush=True)
    return times


def measure_compiled(lengths: list[int], budget: float) -> list[Row]:
    """Causal attention by `torch.compile(fullgraph=True)` and eager."""
    rows = []
    attend = bochner_attention(True)
    for n in lengths:
        for which, make in (("forward", forward), ("forward+backward", backward)):
            if which != "forward" and n > 4096:
                continue  # a compiled graph keeps its features
            torch.compiler.reset()
            calls = {
                "eager": make(attend, inputs(n)),
                "compiled": make(torch.compile(attend, fullgraph=True), inputs(n)),
            }
            calls["compiled"]()
            times = best_times(calls, budget=budget)
            rows.append({"length": n, "passes": which, "seconds": times})
            print(f"compiled / eager  {which} L={n:6d}  {times['compiled'] / times['eager']:.2f}", flush=True)
    return rows


# The claims.


def claims(results: Row) -> list[Row]:
    """Each claim with what was measured; `holds` is None where the run was too short to tell."""
    times = {(r["dtype"], r["is_causal"], r["passes"], r["length"]): r["seconds"] for r in results["times"]}

    def get(causal: bool, n: int, name: str) -> float:
        return times.get(("float32", causal, "forward", n), {}).get(name, math.nan)

    def ratio(causal: bool, n: int, above: str, below: str) -> float:
        return get(causal, n, above) / get(causal, n, below)

    found = [
        ("bidirectional forward at 16,384, of the floor", ratio(False, 16384, "bochner", "floor"), "<=", 1.35),
        (
            "bidirectional forward at 16,384, faster than performer",
            ratio(False, 16384, "performer", "bochner"),
            ">=",
            3,
        ),
        ("causal forward at 4,096, of the floor", ratio(True, 4096, "bochner", "floor"), "<=", 2.0),
        ("causal forward at 4,096, faster than performer", ratio(True, 4096, "performer", "bochner"), ">=", 15),
    ]
    for causal, kind in ((False, "bidirectional"), (True, "causal")):
        per_token = get(causal, 65536, "bochner") / 16 / get(causal, 4096, "bochner")
        found.append((f"{kind} time per token at 65,536, of that at 4,096", per_token, "<=", 1.1))
    longer = [n for n in (2048, 4096, 8192, 16384) if not math.isnan(get(False, n, "exact"))]
    slowest = min((ratio(False, n, "exact", "bochner") for n in longer), default=math.nan)
    found.append(("bidirectional forward from 2,048 on, faster than exact", slowest, ">=", 1))
    multiples = [r["bytes"]["bochner"] / r["qkv_bytes"] for r in results.get("memory", [])]
    found.append(("peak memory of forward+backward, of q, k, v", max(multiples, default=math.nan), "<=", 6))
    seconds, (few, many) = results["decoding"]["seconds"], results["decoding"]["positions"]
    found.append(
        (
            f"decoding step at {many:,}, of that at {few}",
            seconds[f"bochner {many}"] / seconds[f"bochner {few}"],
            "<=",
            1.1,
        )
    )
    # A decoder appends every token to its cache; exact attention alone is the harder baseline.
    steps = results["decoding"].get("step", {})
    for kind in ("step", "step, window"):
        for baseline in ("exact, appending to 1,024 keys", "exact, 1,024 keys"):
            value = steps.get(f"{kind}, trusted", math.nan) / steps.get(baseline, math.nan)
            found.append((f"decoding {kind}, prepared without diagnostics, of {baseline}", value, "<=", 1))
    sizes = set(results["decoding"]["state_bytes"].values())
    found.append(("sizes of the decoding state", float(len(sizes)), "<=", 1))
    rows = []
    for what, value, sign, bound in found:
        holds = None if math.isnan(value) else (value <= bound if sign == "<=" else value >= bound)
        rows.append(
            {"what": what, "value": None if math.isnan(value) else value, "claim": f"{sign} {bound}", "holds": holds}
        )
    return rows


# The report.


def plot(results: Row, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"bochner": "#0b6e4f", "exact": "#c0392b", "performer": "#8e7cc3", "floor": "#7f8c8d"}
    labels = {
        "bochner": "bochner, m = 256",
        "exact": "exact (torch)",
        "performer": "performer-pytorch",
        "floor": "floor",
    }
    figure, axes = plt.subplots(1, 3, figsize=(13, 4))
    for axis, is_causal in zip(axes[:2], (False, True), strict=True):
        for name in SUBJECTS:
            points = [
                (r["length"], r["seconds"][name] / r["length"] * 1e6)
                for r in results["times"]
                if r["is_causal"] == is_causal
                and r["dtype"] == "float32"
                and r["passes"] == "forward"
                and name in r["seconds"]
            ]
            if points:
                style = "--" if name == "floor" else "o-"
                axis.plot(*zip(*points, strict=True), style, ms=4, color=colours[name], label=labels[name])
        axis.set_title(f"{'Causal' if is_causal else 'Bidirectional'}, forward, float32")
        axis.set_ylabel("microseconds per token, 8 heads")
    for name in ("bochner", "exact", "performer"):
        points = [
            (r["length"], r["bytes"][name] / 2**20) for r in results["memory"] if name in r["bytes"] and r["is_causal"]
        ]
        if points:
            axes[2].plot(*zip(*points, strict=True), "o-", ms=4, color=colours[name], label=labels[name])
    own = [(r["length"], r["qkv_bytes"] / 2**20) for r in results["memory"] if r["is_causal"]]
    axes[2].plot(*zip(*own, strict=True), ":", color="black", label="q, k, v")
    axes[2].set_title("Causal, forward+backward: peak memory")
    axes[2].set_ylabel("MiB beyond the inputs")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("sequence length")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].legend(frameon=False, fontsize=9)
    axes[2].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def tables(results: Row) -> str:
    """The report as Markdown."""
    lines = [
        f"Measured on {results['machine']['processor']}, {results['machine']['threads']} threads, torch "
        f"{results['machine']['torch']}; {HEADS} heads, d = {D}, m = {M}.",
        "",
    ]
    lines += ["| claim | wanted | measured | |", "|---|---|---|---|"]
    for c in results["claims"]:
        value = "not measured" if c["value"] is None else f"{c['value']:.2f}"
        lines.append(f"| {c['what']} | {c['claim']} | {value} | {_word(c['holds'])} |")
    for dtype in dict.fromkeys(r["dtype"] for r in results["times"]):
        for which in dict.fromkeys(r["passes"] for r in results["times"]):
            for causal in (False, True):
                chosen = [
                    r for r in results["times"] if (r["dtype"], r["passes"], r["is_causal"]) == (dtype, which, causal)
                ]
                if chosen:
                    names = [n for n in SUBJECTS if any(n in r["seconds"] for r in chosen)]
                    kind = "Causal" if causal else "Bidirectional"
                    lines += ["", f"{kind}, {which}, {dtype}, milliseconds:", ""]
                    lines += ["| L | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
                    for r in chosen:
                        cells = (
                            f"{1e3 * r['seconds'][n]:.1f}" if n in r["seconds"] else r["left_out"][n] for n in names
                        )
                        lines.append(f"| {r['length']:,} | " + " | ".join(cells) + " |")
    lines += ["", "Length from which linear attention is faster than exact attention (forward, float32):", ""]
    features = list(dict.fromkeys(r["num_features"] for r in results.get("crossover", [])))
    lines += ["| | " + " | ".join(f"m = {m}" for m in features) + " |", "|---|" + "---|" * len(features)]
    for causal in (False, True):
        cells = [
            f"{r['length']:,}" if r["length"] else f"> {max(int(n) for n in r['ratio']):,}"
            for r in results.get("crossover", [])
            if r["is_causal"] == causal
        ]
        lines.append(f"| {'causal' if causal else 'bidirectional'} | " + " | ".join(cells) + " |")
    lines += ["", "Peak memory of forward+backward beyond the inputs, in multiples of q, k and v together:", ""]
    lines += ["| L | direction | bochner | exact | performer |", "|---|---|---|---|---|"]
    for r in results["memory"]:
        cells = [
            f"{r['bytes'][n] / r['qkv_bytes']:.1f}" if n in r["bytes"] else ""
            for n in ("bochner", "exact", "performer")
        ]
        kind = "causal" if r["is_causal"] else "bidirectional"
        lines.append(f"| {r['length']:,} | {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _word(holds: bool | None) -> str:
    return "" if holds is None else "yes" if holds else "**no**"


def measure(parts: list[str], times: list[Row], *, quick: bool) -> dict[str, Any]:
    """The parts that were asked for; `times` are those known before, all others of which are kept."""
    single, half = [torch.float32], [torch.bfloat16]
    short, few = ([256, 1024, 4096], [1024, 2048]) if quick else (LENGTHS, LENGTHS[::2])
    found: dict[str, Any] = {}
    new: list[Row] = []
    if "forward" in parts:
        new += measure_times(short, single, ["forward"], budget=0.5 if quick else 2.0)
    if "backward" in parts and not quick:
        new += measure_times(few, single, ["forward+backward"], budget=1.5)
    if "bfloat16" in parts and not quick:
        new += measure_times(few, half, ["forward", "forward+backward"], budget=1.0)
    known = {(r["dtype"], r["passes"]) for r in new}
    found["times"] = new + [r for r in times if (r["dtype"], r["passes"]) not in known]
    if "memory" in parts:
        found["memory"] = measure_memory(few)
    if "crossover" in parts:
        lengths, features = ([512, 1024, 2048], (64, 256)) if quick else (LENGTHS[:6], CROSSOVER_FEATURES)
        found["crossover"] = measure_crossover(lengths, features, budget=0.3 if quick else 1.0)
    if "decoding" in parts:
        found["decoding"] = measure_decoding(budget=0.5 if quick else 2.0)
    if "compiled" in parts and not quick:
        found["compiled"] = measure_compiled([4096, 65536], budget=3.0)
    return found


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = arguments(__doc__, "short lengths, float32 only, under 90 seconds", parts=PARTS)
    parser.add_argument("--plot", type=Path, default=None, help="write the figure")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    wrong = gate()
    if wrong:
        print("No report: " + "; ".join(wrong) + ".", file=sys.stderr)
        raise SystemExit(1)
    results = kept(options.output) | {"machine": machine(options.threads), "heads": HEADS, "d": D, "m": M}
    results["machine"]["onednn_isa"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "default")
    results |= measure(options.part, results.get("times", []), quick=options.quick)
    results["claims"] = claims(results)
    print("\n" + tables(results))
    write(results, options, "attention", tables(results))
    if options.plot:
        plot(results, options.plot)
    return results


if __name__ == "__main__":
    if "ONEDNN_MAX_CPU_ISA" not in os.environ and "--quick" not in sys.argv and not bfloat16_works():
        # Without AMX torch's own bfloat16 products can be measured; the variable is read when torch is loaded.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"})
    main()
