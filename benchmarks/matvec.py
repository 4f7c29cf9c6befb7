"""Kernel products against the honest baseline, KeOps and scikit-learn: time, pairs, achieved error, growth.

    python benchmarks/matvec.py --quick          n up to 2e4, seconds
    python benchmarks/matvec.py                  n = 1e4, 1e5, 1e6 and the growth from 2e4 to 4e5 on GloVe, half an hour

The baseline is the fastest exact product we know on a CPU: one single-precision matrix product per tile gives the
whole exponent, `exp2` in place, then a matrix-vector product; exponents clamped at -100 so that denormals do not
slow it down ("clamped"), and, because that is what is usually written, the same without the clamp ("plain").
Speed-ups are against the clamped one, in core-seconds of one thread. Before any time is reported the product must
meet eps on every x tried. Each case runs in a process of its own, whose peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _timing import machine, write_page
from torch import Tensor

from bochner.matvec import KernelOperator
from bochner.matvec.kernels import KERNELS
from bochner.matvec.tiles import COLUMNS, ROWS, Tiles, exact_product, left, make_frame, right

EPS = 0.1


def best(call: Callable[[], object], repeat: int = 3) -> float:
    """Best of several, in core-seconds: one thread, and other processes do not count."""
    times = []
    for _ in range(repeat):
        begun = time.process_time()
        call()
        times.append(time.process_time() - begun)
    return min(times)


# ---- data ----------------------------------------------------------------------------------------------------------


def mixture(n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = 4.0 * rng.normal(size=(300, 64))
    return (centres[rng.integers(300, size=n)] + rng.normal(size=(n, 64))).astype(np.float32)


def patches(n: int, seed: int = 0) -> np.ndarray:
    """Grey 8 x 8 patches of scikit-learn's two sample photographs."""
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(seed)
    parts = []
    for image in load_sample_images().images:
        grey = image.astype(np.float32).mean(-1) / 255
        window = np.lib.stride_tricks.sliding_window_view(grey, (8, 8))
        rows = rng.integers(0, window.shape[0], size=n // 2)
        columns = rng.integers(0, window.shape[1], size=n // 2)
        parts.append(window[rows, columns].reshape(-1, 64))
    return np.concatenate(parts)


def glove(n: int, seed: int = 0) -> np.ndarray:
    """Word vectors, 50 dimensions, a random n of 400,000."""
    from bochner.data import fetch

    path = Path(fetch("glove"))
    file = path if path.suffix == ".npy" else next(path.rglob("*emb.npy"))
    table = np.load(file, mmap_mode="r")
    chosen = np.random.default_rng(seed).permutation(len(table))[:n]
    return np.ascontiguousarray(table[np.sort(chosen)]).astype(np.float32)


def attention(n: int, seed: int = 0) -> np.ndarray:
    """Keys of one head of a pretrained sentence encoder over prose, after the reduction to a Gaussian kernel."""
    from transformers import AutoModel, AutoTokenizer

    from bochner.data import fetch, paragraphs
    from bochner.matvec.reduction import queries_and_keys, reduce_attention

    where = str(fetch("minilm"))
    model, tokenizer = AutoModel.from_pretrained(where).eval(), AutoTokenizer.from_pretrained(where)
    rows: list[Tensor] = []
    for text in paragraphs("calibration", count=math.ceil(n / 60)):
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        rows.append(queries_and_keys(model, **inputs)[2][1][0, 3])
        if sum(r.shape[0] for r in rows) >= n:
            break
    keys = torch.cat(rows)[:n]
    return reduce_attention(keys, keys)[1].numpy()


DATA: dict[str, tuple[Callable[[int], np.ndarray], float]] = {
    "mixture": (mixture, 3.0),
    "patches": (patches, 0.02),
    "glove": (glove, 0.5),
    "attention": (attention, 32**0.25),
}


def vectors(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    hot = np.zeros(n)
    hot[n // 3] = 1.0
    x = {
        "gaussian": rng.normal(size=n),
        "one-hot": hot,
        "ones": np.ones(n),
        "alternating": 1.0 - 2.0 * (np.arange(n) % 2),
        "heavy-tailed": rng.standard_t(1.1, size=n),
    }
    return {name: v.astype(np.float32) for name, v in x.items()}


# ---- baselines -----------------------------------------------------------------------------------------------------


def prepared(points: np.ndarray, bandwidth: float) -> tuple[Tensor, Tensor]:
    frame = make_frame(KERNELS["gaussian"], torch.from_numpy(points), bandwidth, "float32")
    z = frame.place(torch.from_numpy(points))
    return left(z), right(z)


def baseline(z: Tensor, w: Tensor, x: Tensor, clamp: bool, rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    """Tiled matrix product, exp2 in place, matrix-vector product."""
    y = torch.zeros(z.shape[0], 1)
    buffer = torch.empty(rows * columns)
    for i in range(0, z.shape[0], rows):
        for j in range(0, w.shape[0], columns):
            a, b = z[i : i + rows], w[j : j + columns]
            tile = buffer[: len(a) * len(b)].view(len(a), len(b))
            torch.mm(a, b.T, out=tile)
            if clamp:
                tile.clamp_min_(-100.0)
            tile.exp2_()
            y[i : i + rows].addmm_(tile, x[j : j + columns])
    return y


def exact_rows(points: np.ndarray, bandwidth: float, rows: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Rows of K x in double precision."""
    frame = make_frame(KERNELS["gaussian"], torch.from_numpy(points), bandwidth, "float64")
    w = right(frame.place(torch.from_numpy(points)))
    z = left(frame.place(torch.from_numpy(points[rows])))
    return exact_product(Tiles(frame), z, w, torch.from_numpy(x)).numpy()


# ---- measurements --------------------------------------------------------------------------------------------------


def compare(name: str, n: int, full_error: bool) -> dict[str, Any]:
    """One data set at one size: baselines, build, product, error for every x."""
    make, bandwidth = DATA[name]
    points = make(n)
    n = len(points)
    xs = vectors(n)
    KernelOperator(points[:5000], bandwidth=bandwidth, eps=EPS, method="cells")  # libraries warm up
    build = math.inf
    for _ in range(2 if n <= 100_000 else 1):
        begun = time.process_time()
        K = KernelOperator(points, bandwidth=bandwidth, eps=EPS)
        build = min(build, time.process_time() - begun)
    products = np.stack([K @ x for x in xs.values()], 1)
    table = np.stack(list(xs.values()), 1).astype(np.float64)
    checked = np.arange(n) if full_error and n <= 100_000 else np.random.default_rng(0).choice(n, 4000, replace=False)
    truth = exact_rows(points, bandwidth, checked, table)
    errors = np.linalg.norm(truth - products[checked], axis=0) / np.linalg.norm(table, axis=0)
    norms = np.sqrt(n / len(checked)) * errors
    worst = float(norms.max())
    if worst > EPS:
        sys.exit(f"refused: on {name}, n = {n}, the error {worst:.3g} |x| exceeds eps = {EPS}; no time is reported.")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    z, w = prepared(points, bandwidth)
    one = torch.from_numpy(xs["gaussian"])[:, None]
    rows = min(n, math.ceil(1e10 / n))  # a larger baseline is extrapolated from a share of the rows
    clamped = product = math.inf
    for _ in range(2 if K.method != "exact" or n < 100_000 else 1):  # taking turns
        clamped = min(clamped, best(lambda: baseline(z[:rows], w, one, clamp=True), 1) * n / rows)
        product = min(product, best(lambda: K @ xs["gaussian"], 2))
    few = max(min(n, ROWS), rows // 8)
    plain = best(lambda: baseline(z[:few], w, one, clamp=False), 1) * n / few
    estimate = K.matvec_with_certificate(xs["gaussian"])
    row: dict[str, Any] = {
        "data": name,
        "n": n,
        "d": points.shape[1],
        "bandwidth": bandwidth,
        "method": K.method,
        "baseline_s": clamped,
        "baseline_plain_s": plain,
        "build_s": build,
        "product_s": product,
        "speedup": clamped / product,
        "speedup_with_build": clamped / (product + build),
        "speedup_over_plain": plain / product,
        "pairs": estimate.cost.fraction,
        "errors": dict(zip(xs, norms.tolist(), strict=True)),
        "certificate": str(estimate),
        "points_mb": points.nbytes / 2**20,
        "peak_memory_mb": memory,
    }
    print(
        f"{name:9s} n={n:<8d} baseline {clamped:7.2f} s (plain {plain:7.2f})  build {build:5.2f}"
        f"  product {product:6.3f}"
        f"  speed-up {clamped / product:5.1f}x, with build {clamped / (product + build):5.1f}x"
        f"  pairs {estimate.cost.fraction:6.2%}  worst error {worst:.2g} |x|",
        flush=True,
    )
    return row


def growth(sizes: list[int]) -> dict[str, Any]:
    """Exponent of the time of a product in n on GloVe at a fixed bandwidth; operators built, times interleaved."""
    operators, build = [], []
    for n in sizes:
        points = glove(n)
        begun = time.process_time()
        operators.append(KernelOperator(points, bandwidth=0.5, eps=EPS, method="cells"))
        build.append(time.process_time() - begun)
    xs = [vectors(n)["gaussian"] for n in sizes]
    seconds = [math.inf] * len(sizes)
    for _ in range(4):
        for i, (K, x) in enumerate(zip(operators, xs, strict=True)):
            seconds[i] = min(seconds[i], best(lambda K=K, x=x: K @ x, 1))
    exponent = float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
    whole = float(np.polyfit(np.log(sizes), np.log(np.add(seconds, build)), 1)[0])
    print(f"growth on GloVe: {dict(zip(sizes, np.round(seconds, 3), strict=True))}: n^{exponent:.2f}, ", end="")
    print(f"with build n^{whole:.2f}", flush=True)
    return {"sizes": sizes, "seconds": seconds, "build": build, "exponent": exponent, "exponent_with_build": whole}


def exact_floor(n: int) -> dict[str, Any]:
    """The `exact` method against its own floor (matrix product and exp2, nothing else), and against KeOps."""
    points = mixture(n)
    z, w = prepared(points, 3.0)
    x = vectors(n)["gaussian"]
    buffer = torch.empty(ROWS, COLUMNS)
    # exp2 on the true exponents would hit denormals: the floor gets benign ones, the fastest there can be.
    benign = w * 0.1

    def floor() -> None:
        for i in range(0, n, ROWS):
            for j in range(0, n, COLUMNS):
                a, b = z[i : i + ROWS], benign[j : j + COLUMNS]
                tile = buffer.view(-1)[: len(a) * len(b)].view(len(a), len(b))
                torch.mm(a, b.T, out=tile)
                tile.exp2_()

    rect = KernelOperator(points, points.copy(), bandwidth=3.0, method="exact")
    square = KernelOperator(points, bandwidth=3.0, method="exact")
    seconds = {"floor": math.inf, "exact": math.inf, "exact_symmetric": math.inf, "baseline": math.inf}
    for _ in range(8):
        for key, call in {
            "floor": floor,
            "exact": lambda: rect @ x,
            "exact_symmetric": lambda: square @ x,
            "baseline": lambda: baseline(z, w, torch.from_numpy(x)[:, None], clamp=True),
        }.items():
            seconds[key] = min(seconds[key], best(call, 1))
    row: dict[str, Any] = {"n": n, **seconds, "exact_over_floor": seconds["exact"] / seconds["floor"]}
    print(f"exact n={n}: {seconds['exact'] / seconds['floor']:.2f}x the bare product and exp2, ", end="")
    print(f"symmetric {seconds['exact_symmetric'] / seconds['floor']:.2f}x", flush=True)
    return row


def peers(n: int, exact_seconds: float) -> dict[str, Any]:
    """KeOps as it comes and with -march=native -ffast-math; scikit-learn's KernelDensity and Nystroem."""
    points = mixture(n)
    x = vectors(n)["gaussian"]
    out: dict[str, Any] = {"n": n, "exact_s": exact_seconds}
    for label, flags in (("keops", ""), ("keops_native", "-march=native -ffast-math")):
        seconds = keops_seconds(points, x, flags, label)
        if seconds is not None:
            out[f"{label}_s"] = seconds
            print(f"{label}: {seconds:.2f} s, {seconds / exact_seconds:.1f}x our exact product", flush=True)
    try:
        from sklearn.kernel_approximation import Nystroem
        from sklearn.neighbors import KernelDensity
    except ImportError:
        print("scikit-learn is not installed: skipped")
        return out
    few = points[: max(200, n // 20)]
    density = KernelDensity(bandwidth=3.0, rtol=0.1).fit(points)
    out["kernel_density_s"] = best(lambda: density.score_samples(few), 1) * n / len(few)
    nystroem = Nystroem(gamma=1 / 18, n_components=1000, random_state=0)
    begun = time.process_time()
    features = nystroem.fit_transform(points)
    y = features @ (features.T @ x)
    out["nystroem_s"] = time.process_time() - begun
    truth = exact_rows(points, 3.0, np.arange(n), x.astype(np.float64)[:, None])[:, 0]
    out["nystroem_error"] = float(np.linalg.norm(truth - y) / np.linalg.norm(x))
    print(
        f"KernelDensity (densities only): {out['kernel_density_s']:.1f} s; "
        f"Nystroem, 1,000 landmarks: {out['nystroem_s']:.2f} s, error {out['nystroem_error']:.2g} |x|",
        flush=True,
    )
    return out


def keops_seconds(points: np.ndarray, x: np.ndarray, flags: str, label: str) -> float | None:
    """Seconds per product in a process of its own: the compiler flags are read once, at import."""
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "data.npz", points=points, x=x)
        script = (
            "import sys, time, numpy as np, torch\n"
            "torch.set_num_threads(1)\n"
            "from pykeops.torch import LazyTensor\n"
            "f = np.load(sys.argv[1]); p = torch.from_numpy(f['points']) / 3.0; x = torch.from_numpy(f['x'])[:, None]\n"
            "q, k = LazyTensor(p[:, None]), LazyTensor(p[None])\n"
            "K = (-((q - k) ** 2).sum(-1) / 2).exp()\n"
            "K @ x\n"
            "t = []\n"
            "for _ in range(2):\n"
            "    b = time.process_time(); K @ x; t.append(time.process_time() - b)\n"
            "print('SECONDS', min(t))\n"
        )
        environment = {
            **os.environ,
            "CXXFLAGS": flags,
            "OMP_NUM_THREADS": "1",
            "KEOPS_CACHE_FOLDER": f"{tempfile.gettempdir()}/bochner_{label}",
        }
        command = [sys.executable, "-c", script, str(Path(folder) / "data.npz")]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    for line in done.stdout.splitlines():
        if line.startswith("SECONDS"):
            return float(line.split()[1])
    print(f"{label}: could not run ({(done.stderr.strip().splitlines() or ['no message'])[-1][:120]}): skipped")
    return None


def in_its_own_process(name: str, n: int, full_error: bool) -> dict[str, Any]:
    """`compare` in a fresh process."""
    import subprocess

    line = [sys.executable, str(Path(__file__).resolve()), "--case", name, str(n), *(["--full-error"] * full_error)]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    told, _, found = done.stdout.rstrip().rpartition("\n")
    print(told, flush=True)
    return json.loads(found)


def tables(results: dict[str, Any]) -> str:
    """The report as Markdown."""
    machine, exact, peers, growth = (results[x] for x in ("machine", "exact", "peers", "growth"))
    columns = ["data", "n", "exact tiles (without clamp)", "build", "product", "speed-up", "with build", "pairs"]
    columns += ["worst error of 5 kinds of x", "memory (points), MB"]
    lines = [
        f"One run, one core ({machine['processor']}, torch {machine['torch']}), eps = {results['eps']}, core-seconds:",
        "",
        f"| {' | '.join(columns)} |",
        "|" + "---|" * len(columns),
    ]
    for r in results["products"]:
        lines.append(
            f"| {r['data']}, d = {r['d']}, sigma {r['bandwidth']:.3g} | {r['n']:,} | {r['baseline_s']:.3g} "
            f"({r['baseline_plain_s']:.3g}) | {r['build_s']:.2g} | {r['product_s']:.2g} ({r['method']}) | "
            f"{r['speedup']:.1f}x | {r['speedup_with_build']:.1f}x | {r['pairs']:.2%} | "
            f"{max(r['errors'].values()):.1g} | {r['peak_memory_mb']:.0f} ({r['points_mb']:.0f}) |"
        )
    lines += [
        "",
        f"On GloVe the time of a product grows like n^{growth['exponent']:.2f} from {growth['sizes'][0]:,} to "
        f"{growth['sizes'][-1]:,} points (with the build n^{growth['exponent_with_build']:.2f}).",
        "",
        f"`exact` takes {exact['exact_over_floor']:.2f} times a bare matrix product and `exp2` of the same tiles "
        f"({exact['exact_symmetric'] / exact['floor']:.2f} times when queries are keys). n = {exact['n']:,}, d = 64:",
        "",
        "| method | core-seconds | of our exact product |",
        "|---|---|---|",
    ]
    named = {
        "exact_s": "exact",
        "keops_s": "KeOps as it comes",
        "keops_native_s": "KeOps with -march=native -ffast-math",
        "kernel_density_s": "scikit-learn KernelDensity (densities only, rtol = 0.1)",
        "nystroem_s": f"scikit-learn Nystroem, 1,000 landmarks (error {peers.get('nystroem_error', math.nan):.2g})",
    }
    for key, label in named.items():
        if key in peers:
            lines.append(f"| {label} | {peers[key]:.3g} | {peers[key] / peers['exact_s']:.1f}x |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="n up to 2e4")
    parser.add_argument("--data", nargs="*", choices=sorted(DATA), default=sorted(DATA))
    parser.add_argument("--output", type=Path, default=None, help="write the numbers as JSON")
    parser.add_argument("--page", type=Path, default=None, help="replace the tables between the markers of this page")
    parser.add_argument("--case", nargs=2, metavar=("DATA", "N"), help="one case only; its numbers are the last line")
    parser.add_argument("--full-error", action="store_true", help="with --case: check every row up to n = 1e5")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.case:
        case = compare(options.case[0], int(options.case[1]), options.full_error)
        print(json.dumps(case))
        return case
    sizes = [10_000, 20_000] if options.quick else [10_000, 100_000, 1_000_000]
    most = {"attention": 20_000, "glove": 400_000, "patches": 400_000}
    results: dict[str, Any] = {"eps": EPS, "machine": machine(1)}
    floor = exact_floor(20_000)
    results["exact"] = floor
    results["peers"] = peers(20_000, float(floor["exact"]))
    cases = list(dict.fromkeys((name, min(n, most.get(name, n))) for name in options.data for n in sizes))
    results["products"] = [in_its_own_process(name, n, not options.quick) for name, n in cases]
    if "glove" in options.data:
        results["growth"] = growth(
            [5_000, 10_000, 20_000] if options.quick else [20_000, 50_000, 100_000, 200_000, 400_000]
        )
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    if options.page:
        write_page(options.page, "matvec", tables(results))
    return results


if __name__ == "__main__":
    main()
