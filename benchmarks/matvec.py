"""Kernel products against the honest baseline, KeOps and scikit-learn: time, pairs, achieved error, growth.

    python benchmarks/matvec.py --quick                      n up to 2e4, seconds
    python benchmarks/matvec.py --output results.json        n = 1e4, 1e5, 1e6, smooth kernels, growth; half an hour
    python benchmarks/matvec.py --output results.json --part "glove 100000"      one part; others in the file stay

Parts of the stored results under "earlier" were measured with the code before the rounding of products was bounded for
every x.

The baseline is the fastest exact product we know on a CPU: one single-precision matrix product per tile gives the
whole exponent, `exp2` in place, then a matrix-vector product; exponents clamped at -100 so that denormals do not
slow it down ("clamped"), and, because that is what is usually written, the same without the clamp ("plain").
Speed-ups are against the clamped one, in core-seconds of one thread. Before any time is reported the product must
meet eps on every x tried. Each part runs in a process of its own, whose peak memory is its own, and is written to the
file when it is done: a run that was interrupted goes on with what is missing.
"""

from __future__ import annotations

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
from _timing import arguments, machine, table, write_page
from torch import Tensor

from bochner.matvec import KernelOperator
from bochner.matvec.engines.exact import ExactEngine
from bochner.matvec.kernels import KERNELS
from bochner.matvec.spectrum import noisy_power_method
from bochner.matvec.tiles import COLUMNS, ROWS, Tiles, exact_product, left, make_frame, right

EPS = 0.1
PAIRS = 2e9  # of a baseline that is timed; larger ones are extrapolated
KEPT_MEMORY, SMOOTH_MEMORY = 1 << 33, 3 << 30


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
    """One data set at one size: baselines, build, product, kept product, error for every x."""
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
    one = xs["gaussian"]
    product = best(lambda: K @ one)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    fresh = best(lambda: K.materialize(memory=KEPT_MEMORY), 1)
    touch_memory()
    materialize = math.inf
    for _ in range(2 if n <= 100_000 else 1):
        kept = K  # frees the first before the second is built
        begun = time.process_time()
        kept = K.materialize(memory=KEPT_MEMORY)
        materialize = min(materialize, time.process_time() - begun)
    worst = {"once": worst_error(K, points, xs, full_error)}
    worst["kept"] = worst["once"] if kept is K else worst_error(kept, points, xs, full_error)
    if max(worst.values()) > EPS:
        sys.exit(f"refused: on {name}, n = {n}, the errors {worst} exceed eps = {EPS}; no time is reported.")
    z, w = prepared(points, bandwidth)
    column = torch.from_numpy(one)[:, None]
    rows = min(n, math.ceil(PAIRS / n))  # a larger baseline is extrapolated from a share of the rows
    clamped = again = math.inf
    for _ in range(3):  # taking turns
        clamped = min(clamped, best(lambda: baseline(z[:rows], w, column, clamp=True), 1) * n / rows)
        product = min(product, best(lambda: K @ one, 1))
        again = min(again, best(lambda: kept @ one, 1 if kept is K else 3))
    few = max(min(n, ROWS), rows // 8)
    plain = best(lambda: baseline(z[:few], w, column, clamp=False), 1) * n / few
    estimate = K.matvec_with_certificate(one)
    row: dict[str, Any] = {
        "data": name,
        "n": n,
        "d": points.shape[1],
        "bandwidth": bandwidth,
        "method": K.method,
        "dtype": str(K._engine.dtype).removeprefix("torch."),
        "certain": K.certain,
        "baseline_s": clamped,
        "baseline_plain_s": plain,
        "build_s": build,
        "product_s": product,
        "speedup": clamped / product,
        "speedup_with_build": clamped / (product + build),
        "speedup_over_plain": plain / product,
        "kept_method": kept.method,
        "kept_build_s": materialize,
        "kept_build_fresh_s": fresh,
        "kept_product_s": again,
        "pairs": estimate.cost.fraction,
        "error": worst["once"],
        "kept_error": worst["kept"],
        "certificate": str(estimate),
        "points_mb": points.nbytes / 2**20,
        "peak_memory_mb": memory,
    }
    print(
        f"{name:9s} n={n:<8d} baseline {clamped:7.2f} s (plain {plain:7.2f})  build {build:5.2f}"
        f"  product {product:6.3f}  speed-up {clamped / product:5.1f}x, with build {clamped / (product + build):5.1f}x"
        f"  kept in {materialize:5.2f} ({fresh:5.2f} in new memory) product {again:.4f}"
        f"  error {worst['once']:.2g} {worst['kept']:.2g} |x|",
        flush=True,
    )
    return row


def touch_memory(size: int = 1 << 31) -> None:
    """Use and free so many bytes: a virtual machine may take a millisecond for two new megabytes, once."""
    np.empty(size, dtype=np.uint8).fill(1)


def worst_error(K: KernelOperator, points: np.ndarray, xs: dict[str, np.ndarray], full: bool) -> float:
    """The largest |Kx - y| / |x| over the kinds of x; from a sample of rows unless `full`."""
    n = len(points)
    table = np.stack(list(xs.values()), 1).astype(np.float64)
    products = np.asarray(K @ table)
    checked = np.arange(n) if full and n <= 20_000 else np.random.default_rng(0).choice(n, min(n, 4000), replace=False)
    truth = exact_rows(points, K.bandwidth, checked, table)
    errors = np.linalg.norm(truth - products[checked], axis=0) / np.linalg.norm(table, axis=0)
    return float(np.sqrt(n / len(checked)) * errors.max())


def casp(n: int) -> np.ndarray:
    """Nine columns of a table of protein structures, of mean 0 and variance 1."""
    from bochner.data import fetch

    table = np.genfromtxt(fetch("casp"), delimiter=",", skip_header=1)[:, 1:]
    table = (table - table.mean(0)) / table.std(0)
    return table[np.random.default_rng(0).permutation(len(table))[:n]].astype(np.float32)


def rims(n: int) -> np.ndarray:
    """The 16 pixels of the rims of 5 x 5 patches of scikit-learn's two sample photographs."""
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    parts = []
    for image in load_sample_images().images:
        windows = np.lib.stride_tricks.sliding_window_view(image.mean(-1) / 255, (5, 5)).reshape(-1, 25)
        parts.append(windows[rng.choice(len(windows), n // 2, replace=False)])
    inner = [6, 7, 8, 11, 12, 13, 16, 17, 18]
    return np.delete(np.concatenate(parts), inner, 1).astype(np.float32)


SMOOTH: dict[str, Callable[[int], np.ndarray]] = {"CASP": casp, "patches": patches, "rims": rims}


def smooth(name: str, n: int, eps: float) -> dict[str, Any]:
    """Real points at the usual bandwidth, the median distance: exact tiles against what `auto` takes.

    The tiles are in single precision, whether that would keep eps for every x or not: the fastest there is.
    """
    points = SMOOTH[name](n)
    n = len(points)
    some = points[np.random.default_rng(1).permutation(n)[:2000]]
    bandwidth = float(np.median(np.linalg.norm(some[:1000, None] - some[None, 1000:], axis=-1)))
    tensor = torch.from_numpy(points)
    exact = ExactEngine(make_frame(KERNELS["gaussian"], tensor, bandwidth, "float32"), tensor, tensor, symmetric=True)
    begun = time.process_time()
    K = KernelOperator(points, bandwidth=bandwidth, eps=eps, products=100, memory=SMOOTH_MEMORY)
    build = time.process_time() - begun
    xs = vectors(n)
    worst = worst_error(K, points, xs, full=False)
    if worst > eps:
        sys.exit(f"refused: on {name}, n = {n}, the error {worst:.3g} |x| exceeds eps = {eps}; no time is reported.")
    tiles = product = math.inf
    for _ in range(3):
        tiles = min(tiles, best(lambda: exact.apply(torch.from_numpy(xs["gaussian"])[:, None]), 1))
        product = min(product, best(lambda: K @ xs["gaussian"], 3))
    said = K.matvec_with_certificate(xs["gaussian"])
    row = {
        "data": name,
        "n": n,
        "d": points.shape[1],
        "bandwidth": bandwidth,
        "eps": eps,
        "method": K.method,
        "exact_s": tiles,
        "build_s": build,
        "product_s": product,
        "error": worst,
        "bound": said.relative,
        "kind": said.kind,
        "norm": noisy_power_method(K)[0],
        "explained": K.explain(),
    }
    print(
        f"smooth {name} n={n}: exact {tiles:.3f} s, {K.method} {product:.4f} s after {build:.1f} s, "
        f"{tiles / product:.1f}x, error {worst:.2g}, bound {said.relative:.2g} |x| ({said.kind})",
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


def peers(n: int) -> dict[str, Any]:
    """KeOps as it comes and with -march=native -ffast-math; scikit-learn's KernelDensity and Nystroem."""
    points = mixture(n)
    x = vectors(n)["gaussian"]
    rect = KernelOperator(points, points.copy(), bandwidth=3.0, method="exact")
    exact_seconds = best(lambda: rect @ x)
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


def parts(quick: bool) -> dict[str, Callable[[], Any]]:
    """Everything there is to measure, by name."""
    sizes = [10_000, 20_000] if quick else [10_000, 100_000, 1_000_000]
    most = {"attention": 20_000, "glove": 400_000, "patches": 400_000}
    out: dict[str, Callable[[], Any]] = {"exact": lambda: exact_floor(20_000), "peers": lambda: peers(20_000)}
    for name in sorted(DATA):
        for n in dict.fromkeys(min(n, most.get(name, n)) for n in sizes):
            out[f"{name} {n}"] = lambda name=name, n=n: compare(name, n, not quick)
    smooths = [("CASP", 20_000, EPS), ("CASP", 45_730, EPS), ("patches", 20_000, EPS), ("rims", 100_000, EPS)]
    smooths += [("patches", 100_000, 1.0)]  # less smooth: 1/60,000 of the norm of K
    for name, n, eps in smooths[: 1 if quick else None]:
        out[f"smooth {name} {n}"] = lambda name=name, n=n, eps=eps: smooth(name, n, eps)
    counts = [5_000, 10_000, 20_000] if quick else [20_000, 50_000, 100_000, 200_000]
    return {**out, "growth": lambda: growth(counts)}


def in_its_own_process(name: str, quick: bool) -> Any:
    """One part in a fresh process."""
    import subprocess

    line = [sys.executable, str(Path(__file__).resolve()), "--part", name, *(["--quick"] * quick)]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    told, _, found = done.stdout.rstrip().rpartition("\n")
    print(told, flush=True)
    return json.loads(found)


def tables(results: dict[str, Any]) -> str:
    """The report as Markdown."""
    machine, found = results["machine"], results["parts"]
    head = ["data", "n", "exact tiles (without clamp)", "build", "product", "speed-up", "with build", "for every x"]
    head += [
        "kept: build (in new memory)",
        "in products",
        "product",
        "of `cells`",
        "worst error (kept)",
        "memory (points), MB",
    ]
    rows = [found[name] for name in parts(False) if name in found and name.split()[0] in DATA]
    lines = [
        f"One core ({machine['processor']}, torch {machine['torch']}), eps = {results['eps']}, core-seconds; "
        "worst error of 5 kinds of x:",
        "",
        table(
            head,
            [
                [
                    f"{r['data']}, d = {r['d']}, sigma {r['bandwidth']:.3g}",
                    f"{r['n']:,}",
                    f"{r['baseline_s']:.3g} ({r['baseline_plain_s']:.3g})",
                    f"{r['build_s']:.2g}",
                    f"{r['product_s']:.2g} ({r['method']}{', float64' if r.get('dtype') == 'float64' else ''})",
                    f"{r['speedup']:.1f}x",
                    f"{r['speedup_with_build']:.1f}x",
                    "yes" if r["certain"] else "checked",
                    *kept_columns(r),
                    f"{r['error']:.1g} ({r['kept_error']:.1g})",
                    f"{r['peak_memory_mb']:.0f} ({r['points_mb']:.0f})",
                ]
                for r in rows
            ],
        ),
        "",
    ]
    smooth_rows = [found[name] for name in parts(False) if name in found and name.startswith("smooth")]
    if smooth_rows:
        head = [
            "data",
            "n",
            "exact tiles, symmetric",
            "method",
            "build",
            "product",
            "speed-up",
            "eps",
            "error",
            "bound",
            "of the norm of K",
            "statement",
        ]
        body = [
            [
                f"{r['data']}, d = {r['d']}, sigma {r['bandwidth']:.3g}",
                f"{r['n']:,}",
                f"{r['exact_s']:.3g}",
                r["method"],
                f"{r['build_s']:.3g}",
                f"{r['product_s']:.2g}",
                f"{r['exact_s'] / r['product_s']:.1f}x",
                f"{r['eps']:g}",
                f"{r['error']:.1g}",
                f"{r['bound']:.2g}",
                f"{r['bound'] / r['norm']:.1g}",
                r["kind"],
            ]
            for r in smooth_rows
        ]
        lines += [
            "At the median distance as bandwidth, many products expected (`products=100`):",
            "",
            table(head, body),
            "",
        ]
    if "growth" in found:
        growth = found["growth"]
        lines += [
            f"On GloVe the time of a product grows like n^{growth['exponent']:.2f} from {growth['sizes'][0]:,} to "
            f"{growth['sizes'][-1]:,} points (with the build n^{growth['exponent_with_build']:.2f}).",
            "",
        ]
    if "exact" in found and "peers" in found:
        lines += peer_lines(found["exact"], found["peers"])
    return "\n".join(lines)


def kept_columns(r: dict[str, Any]) -> list[str]:
    if r["kept_method"] == r["method"]:
        return ["", "", "", ""]
    builds = [r[key] for key in ("kept_build_s", "kept_build_fresh_s") if key in r]
    seconds, products = (
        [f"{b / unit:{form}}" for b in builds] for unit, form in ((1.0, ".2g"), (r["product_s"], ".1f"))
    )
    return [
        seconds[0] + "".join(f" ({text})" for text in seconds[1:]),
        products[0] + "".join(f" ({text})" for text in products[1:]),
        f"{r['kept_product_s']:.2g} ({r['kept_method']})",
        f"1/{r['product_s'] / r['kept_product_s']:.0f}",
    ]


def peer_lines(exact: dict[str, Any], peers: dict[str, Any]) -> list[str]:
    """Our exact product against its floor and against others."""
    named = {
        "keops_s": "KeOps as it comes",
        "keops_native_s": "KeOps with -march=native -ffast-math",
        "kernel_density_s": "scikit-learn KernelDensity (densities only, rtol = 0.1)",
        "nystroem_s": f"scikit-learn Nystroem, 1,000 landmarks (error {peers.get('nystroem_error', math.nan):.2g})",
    }
    rows = [["exact", f"{peers['exact_s']:.3g}", "1.0x"]]
    rows += [
        [label, f"{peers[k]:.3g}", f"{peers[k] / peers['exact_s']:.1f}x"] for k, label in named.items() if k in peers
    ]
    return [
        f"`exact` takes {exact['exact_over_floor']:.2f} times a bare matrix product and `exp2` of the same tiles "
        f"({exact['exact_symmetric'] / exact['floor']:.2f} times when queries are keys). n = {exact['n']:,}, d = 64:",
        "",
        table(["method", "core-seconds", "of our exact product"], rows),
    ]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = arguments(__doc__, "n up to 2e4")
    parser.add_argument("--part", default=None, help="one part only; its numbers are the last line")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    results: dict[str, Any] = {"eps": EPS, "machine": machine(1), "parts": {}}
    if options.output and options.output.exists():
        before = json.loads(options.output.read_text())
        results["parts"], results["earlier"] = before.get("parts", {}), before.get("earlier", [])
    chosen = parts(options.quick)
    if options.part is not None and options.part not in chosen:
        parser.error(f"unknown part {options.part!r}; there are {list(chosen)}")
    if options.part is not None and not options.output:
        print(json.dumps(chosen[options.part]()))
        return results
    for name in [options.part] if options.part else [n for n in chosen if n not in results["parts"]]:
        results["parts"][name] = chosen[name]() if options.part else in_its_own_process(name, options.quick)
        results["earlier"] = [n for n in results.get("earlier", []) if n != name]
        if options.output:
            options.output.write_text(json.dumps(results, indent=1) + "\n")
    if options.page:
        write_page(options.page, "matvec", tables(results))
    return results


if __name__ == "__main__":
    main()
