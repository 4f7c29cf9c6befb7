"""Polynomial maps and local masks: speed against scikit-learn, error at equal size, growth in L, use of masks.

python benchmarks/sketches.py [--quick] [--output FILE.json]
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _timing import arguments, best_times, machine, show, write
from torch import Tensor

from bochner._checks import BochnerWarning
from bochner.attention import linear_attention
from bochner.maps.base import FeatureMap, kernel_estimate
from bochner.maps.exponential import PositiveFeatures
from bochner.maps.local import (
    L1BallProjection,
    LocalGaussianFeatures,
    LocalL1Features,
    LocalLaplaceFeatures,
    ProductFeatures,
    with_positions,
)
from bochner.maps.polynomial import MaclaurinFeatures, NonnegativePolyFeatures, SumPolyFeatures, TensorSketchFeatures
from bochner.theory import mse_tensor_sketch


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def against_sklearn(rounds: int) -> list[dict[str, Any]]:
    """TensorSketch and PolynomialCountSketch at equal size: the same features on the same hashes, and their time."""
    from sklearn.kernel_approximation import PolynomialCountSketch

    found = []
    for n, d, m, degree in [(2000, 64, 256, 2), (2000, 64, 1000, 3), (1000, 384, 512, 2), (2000, 16, 250, 4)]:
        x = rows(n, d) / d**0.5
        phi = TensorSketchFeatures(d, m, degree=degree)
        peer = PolynomialCountSketch(degree=degree, n_components=m, random_state=0).fit(x.numpy())
        ours, theirs = kernel_estimate(phi, x[:200], x[:200]), peer.transform(x[:200].numpy())
        exact = (x[:200] @ x[:200].mT) ** degree
        errors = [float((k - exact).square().mean().sqrt()) for k in (ours, torch.from_numpy(theirs @ theirs.T))]
        predicted = mse_tensor_sketch(x[:200, None], x[:200], m, degree).mean().sqrt().item()
        seconds = best_times({"ours": partial(phi, x), "theirs": partial(peer.transform, x.numpy())}, repeats=rounds)
        found.append(
            {
                "n": n,
                "d": d,
                "m": m,
                "degree": degree,
                "rmse": errors[0],
                "rmse_sklearn": errors[1],
                "rmse_predicted": predicted,
                "speedup": seconds["theirs"] / seconds["ours"],
            }
        )
    return found


def equal_size(draws: int) -> list[dict[str, Any]]:
    """Root mean squared error of `(x.y)^2` relative to the kernel's, m = 256, unit vectors of two kinds."""
    kinds = {
        "gaussian": lambda: torch.nn.functional.normalize(rows(64, 32), dim=-1),
        "sparse": lambda: torch.nn.functional.normalize(rows(64, 32) * (rows(64, 32, seed=1) > 1), dim=-1),
    }
    maps: dict[str, Callable[[int], FeatureMap]] = {
        "sum_poly": lambda s: SumPolyFeatures(32, 256, seed=s),
        "tensor_sketch": lambda s: TensorSketchFeatures(32, 256, seed=s),
        "maclaurin": lambda s: MaclaurinFeatures(32, 256, seed=s),
        "nonnegative_poly": lambda s: NonnegativePolyFeatures(32, 256, seed=s),
    }
    found = []
    for kind, make in kinds.items():
        x = make()
        exact = (x @ x.mT) ** 2
        for name, build in maps.items():
            errors = [(kernel_estimate(build(s), x, x) - exact).square().mean() for s in range(draws)]
            error = torch.stack(errors).mean().sqrt() / exact.square().mean().sqrt()
            found.append({"data": kind, "map": name, "relative_rmse": float(error)})
    return found


def growth(lengths: list[int], rounds: int) -> list[dict[str, Any]]:
    """The exponent of the time of polynomial attention in L."""
    found = []
    for name, phi in {
        "tensor_sketch": TensorSketchFeatures(64, 256, degree=2, coef=1.0),
        "nonnegative_poly": NonnegativePolyFeatures(64, 276, degree=4, coef=1.0),
    }.items():
        inputs = {length: [rows(1, 1, length, 64, seed=s) for s in range(3)] for length in lengths}
        runs = {str(n): partial(linear_attention, *qkv, phi) for n, qkv in inputs.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BochnerWarning)  # a signed map has a few small normalisers
            seconds = list(best_times(runs, repeats=rounds).values())
        slope = math.log(seconds[-1] / seconds[0]) / math.log(lengths[-1] / lengths[0])
        found.append({"map": name, "lengths": lengths, "seconds": seconds, "exponent": slope})
    return found


def mask_noise(m: int) -> list[dict[str, Any]]:
    """E[c^2] of the importance-sampled L1 ball and the features that make its error 0.1; its least possible value."""
    found = []
    for d in (1, 2, 3, 4, 6, 8):
        for ratio in (2 * d + 2, 4 * d + 4):
            c = L1BallProjection(d, m, smooth=1 / ratio).importance.double()
            second, least = float(c.square().mean()), float(c.abs().mean() ** 2)
            found.append({"d": d, "delta/s": ratio, "E c^2": second, "least": least, "m for 0.1": round(100 * second)})
    return found


def masked_attention(length: int, counts: list[int]) -> list[dict[str, Any]]:
    """Relative error of masked attention against the exact mask times softmax, window a fraction of the sequence."""
    q, k, v = (rows(1, 1, length, 16, seed=s) / 2 for s in range(3))
    p = torch.arange(length).float()
    qp, kp = with_positions(q, p), with_positions(k, p)
    found = []
    for fraction in (0.5, 0.125, 0.03125):
        delta = fraction * length
        for name, build in {
            "local_l1": LocalL1Features,
            "local_laplace": LocalLaplaceFeatures,
            "local_gaussian": LocalGaussianFeatures,
        }.items():
            for m in counts:
                phi = ProductFeatures(build(1, m, delta=delta), PositiveFeatures(16, m))
                a = phi.kernel_matrix(qp.double(), kp.double())
                exact = (a / a.sum(-1, keepdim=True)) @ v.double()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", BochnerWarning)
                    out = linear_attention(qp, kp, v, phi, scale=1.0)
                error = float((out - exact).norm() / exact.norm())
                found.append({"window/L": fraction, "mask": name, "m": m, "relative_error": error})
    return found


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = arguments(__doc__, "smaller sizes, seconds", page=False).parse_args(argv)
    quick = options.quick
    torch.set_num_threads(1)
    results = {
        "machine": machine(1),
        "against_sklearn": against_sklearn(3 if quick else 10),
        "equal_size": equal_size(5 if quick else 50),
        "growth": growth([2048, 8192] if quick else [4096, 8192, 16384, 32768], 3 if quick else 5),
        "mask_noise": mask_noise(2000 if quick else 20_000),
        "masked_attention": masked_attention(512, [256, 1024] if quick else [256, 1024, 4096, 16384]),
    }
    show(results["against_sklearn"], "TensorSketch against scikit-learn's PolynomialCountSketch")
    show(results["equal_size"], "Relative RMSE of (x.y)^2, 256 features, d = 32")
    show(results["growth"], "Polynomial attention, time against L")
    show(results["mask_noise"], "Noise of the L1-ball mask")
    show(results["masked_attention"], "Masked attention, L = 512, d = 16")
    write(results, options)
    return results


if __name__ == "__main__":
    main()
