"""Windows and training: linear attention against exact attention, performer-pytorch and the floor of bare products.

    python benchmarks/windows.py [--quick] [--output FILE.json] [--page FILE.md] [--threads 2]

An encoder's shape (12 heads, d = 32, window 32, one sink) with 64 positive features, 64 and 16 landmark features, and a
decoder's (8 heads, d = 64, m = 128, causal, window 64, four sinks); training at 8 heads, d = 64. Best of several
rounds in which the methods take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _timing import arguments, best_times, machine, write
from attention import backward, exact, forward, gate, performer
from torch import Tensor

from bochner import feature_map, linear_attention

Row = dict[str, Any]
SHAPES: dict[str, Row] = {
    "encoder": {"heads": 12, "d": 32, "m": 64, "window": 32, "sinks": 1, "is_causal": False},
    "encoder, landmark 64": {"heads": 12, "d": 32, "m": 64, "window": 32, "sinks": 1, "is_causal": False},
    "encoder, landmark 16": {"heads": 12, "d": 32, "m": 16, "window": 32, "sinks": 1, "is_causal": False},
    "decoder": {"heads": 8, "d": 64, "m": 128, "window": 64, "sinks": 4, "is_causal": True},
}


def inputs(heads: int, n: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(1, heads, n, d, generator=g) for _ in range(3))
    return q, k, v


def bare_products(q: Tensor, k: Tensor, v: Tensor, m: int, window: int) -> dict[str, Callable[[], None]]:
    """The products of a bidirectional kernel, and of the same with a block window, with nothing between them."""
    (_, h, n, d), t = q.shape, q.shape[-2] // window
    w = torch.randn(m, d, generator=torch.Generator().manual_seed(0)).mT.contiguous()
    phi, psi, kv = torch.empty(1, h, n, m), torch.empty(1, h, n, m), torch.empty(1, h, m, d)
    keys, values = (torch.nn.functional.pad(x, (0, 0, window, window)).unfold(2, 3 * window, window) for x in (k, v))
    rows, zone = q.unflatten(2, (t, window)), torch.empty(1, h, t, window, 3 * window)
    sums, far = torch.empty(1, h, t, m, d), torch.empty(1, h, t, m * d)
    apart, out = torch.ones(t, t), torch.empty_like(rows)

    def kernel() -> None:
        torch.matmul(k, w, out=psi)
        torch.matmul(psi.mT, v, out=kv)
        torch.matmul(q, w, out=phi)
        torch.matmul(phi, kv, out=out.view(q.shape))

    def block() -> None:
        torch.matmul(k, w, out=psi)
        torch.matmul(psi.unflatten(2, (t, window)).mT, v.unflatten(2, (t, window)), out=sums)
        torch.matmul(apart, sums.flatten(3), out=far)
        torch.matmul(q, w, out=phi)
        torch.matmul(phi.unflatten(2, (t, window)), far.view(sums.shape), out=out)
        torch.matmul(rows, keys, out=zone)
        torch.matmul(zone, values.mT, out=out)

    return {"kernel floor": kernel, "block floor": block}


def measure_windows(lengths: list[int], budget: float) -> list[Row]:
    rows = []
    for name, s in SHAPES.items():
        fitted = "landmark" in name
        phi = feature_map(
            "landmark" if fitted else "positive",
            dim=s["d"],
            num_features=s["m"],
            num_heads=s["heads"] if fitted else None,
        )
        if fitted:
            q, k, _ = inputs(s["heads"], 1000, s["d"])
            phi.calibrate_(q * s["d"] ** -0.25, k * s["d"] ** -0.25)
        how = {"is_causal": s["is_causal"]}
        near = how | {"window": s["window"], "sinks": s["sinks"]}
        for n in lengths:
            qkv = inputs(s["heads"], n, s["d"])
            subjects: dict[str, Callable[..., Tensor]] = {
                "kernel": lambda q, k, v, phi=phi, how=how: linear_attention(q, k, v, phi, **how),
                "block": lambda q, k, v, phi=phi, near=near: linear_attention(
                    q, k, v, phi, window_kind="block", **near
                ),
                "sliding": lambda q, k, v, phi=phi, near=near: linear_attention(
                    q, k, v, phi, window_kind="sliding", **near
                ),
                "exact": exact(s["is_causal"]),
            }
            calls = {key: forward(f, qkv) for key, f in subjects.items()}
            if name == "encoder":
                calls |= bare_products(*qkv, s["m"], s["window"])
            seconds = best_times(calls, budget=budget)
            rows.append({"shape": name, "length": n, "seconds": seconds})
            show(rows[-1])
    return rows


def twelve_products(m: int) -> Callable[[Tensor, Tensor, Tensor], Callable[[], None]]:
    """The bare products of a bidirectional forward and backward pass: four and eight of n m d."""

    def make(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], None]:
        w = torch.randn(m, q.shape[-1], generator=torch.Generator().manual_seed(0))
        rows = max(64, 2**20 // (q.shape[1] * m))

        def run() -> None:
            kv = torch.zeros(1, q.shape[1], m, v.shape[-1])
            blocks = [slice(i, i + rows) for i in range(0, q.shape[-2], rows)]
            for part in blocks:  # absorb, then read
                kv += (k[..., part, :] @ w.mT).mT @ v[..., part, :]
            for part in blocks:
                (q[..., part, :] @ w.mT) @ kv
            dkv = torch.zeros_like(kv)
            for part in blocks:  # queries: features, their gradient, the state's, q's
                phi = q[..., part, :] @ w.mT
                dkv += phi.mT @ v[..., part, :]
                (v[..., part, :] @ kv.mT) @ w
            for part in blocks:  # keys: features, their gradient, v's, k's
                psi = k[..., part, :] @ w.mT
                psi @ dkv
                (v[..., part, :] @ dkv.mT) @ w

        return run

    return make


def measure_training(lengths: list[int], features: tuple[int, ...], budget: float) -> list[Row]:
    rows = []
    for m in features:
        phi = feature_map("positive", dim=64, num_features=m)
        for n in lengths:
            q, k, v = inputs(8, n, 64)
            calls = {"floor": twelve_products(m)(q, k, v)}
            for causal in (False, True):
                kind = "causal" if causal else "bidirectional"
                calls[f"{kind} kernel"] = backward(
                    lambda q, k, v, phi=phi, causal=causal: linear_attention(q, k, v, phi, is_causal=causal), (q, k, v)
                )
                if n <= 4096:
                    calls[f"{kind} exact"] = backward(exact(causal), (q, k, v))
            if m == 256 and n <= 4096:
                calls["bidirectional performer"] = backward(performer(False), (q, k, v))
            rows.append({"num_features": m, "length": n, "seconds": best_times(calls, budget=budget)})
            show(rows[-1])
    return rows


def show(row: Row) -> None:
    what = row.get("shape") or f"training m={row['num_features']}"
    print(f"{what:17} L={row['length']:6d}  " + "  ".join(f"{k} {1e3 * s:.2f} ms" for k, s in row["seconds"].items()))


def tables(results: Row) -> str:
    lines = ["Forward, milliseconds: the map alone, with a block window and with a sliding one, exact attention,"]
    lines += ["and the bare products of the first two:", ""]
    names = ["kernel", "block", "sliding", "exact", "kernel floor", "block floor"]
    lines += ["| shape | L | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    for r in results["windows"]:
        cells = (f"{1e3 * r['seconds'][n]:.1f}" if n in r["seconds"] else "" for n in names)
        lines.append(f"| {r['shape']} | {r['length']:,} | " + " | ".join(cells) + " |")
    names = ["floor"] + [f"{d} {s}" for d in ("bidirectional", "causal") for s in ("kernel", "exact")]
    names.append("bidirectional performer")
    lines += ["", "Forward and backward, milliseconds (the floor: twelve bare products):", ""]
    lines += ["| m | L | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    for r in results["training"]:
        cells = (f"{1e3 * r['seconds'][n]:.1f}" if n in r["seconds"] else "" for n in names)
        lines.append(f"| {r['num_features']} | {r['length']:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> Row:
    parser = arguments(__doc__, "fewer lengths and rounds")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    wrong = gate()
    if wrong:
        raise SystemExit("No report: " + "; ".join(wrong) + ".")
    budget = 0.4 if options.quick else 0.8
    results: Row = {"machine": machine(options.threads), "shapes": SHAPES}
    lengths = [512, 1024, 4096] if options.quick else [256, 512, 768, 1024, 1536, 2048, 4096]
    results["windows"] = measure_windows(lengths, budget)
    results["training"] = measure_training(
        [256, 1024] if options.quick else [256, 512, 1024, 2560, 16_384], (64, 256), budget
    )
    write(results, options, "windows", tables(results))
    if not options.page:
        print("\n" + tables(results))
    return results


if __name__ == "__main__":
    main()
