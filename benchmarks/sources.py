"""Attention of this source against that of another directory of sources, in one process, the two taking turns.

    python benchmarks/sources.py OTHER/src [--only WORD] [--budget 1.0] [--output FILE.json] [--threads 1]

Prints for every row how much time this source takes, as a multiple of the other's: forward, with backward, and steps of
decoding, with and without windows, of several maps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent.parent / "src"
SHAPES: dict[str, dict[str, Any]] = {
    "encoder": {"heads": 12, "d": 32, "m": 64, "near": {"window": 32, "sinks": 1}, "is_causal": False},
    "decoder": {"heads": 8, "d": 64, "m": 128, "near": {"window": 64, "sinks": 4}, "is_causal": True},
    "large": {"heads": 8, "d": 64, "m": 256, "near": {"window": 64, "sinks": 4}, "is_causal": True},
    "large, both ways": {"heads": 8, "d": 64, "m": 256, "near": {}, "is_causal": False},
}
LENGTHS = (256, 1024, 4096)
Calls = dict[str, Callable[[], Any]]


def load(source: Path) -> tuple[Any, Callable[..., Any]]:
    """The package of a directory of sources, beside others of the same name, and its timer."""
    for name in [name for name in sys.modules if name.split(".")[0] == "bochner"]:
        del sys.modules[name]
    sys.path.insert(0, str(source))
    try:
        import bochner
        from bochner._timing import best_times

        _ = bochner.linear_attention, bochner.feature_map
        from bochner.attention import PreparedMap

        return (bochner.linear_attention, bochner.feature_map, PreparedMap), best_times
    finally:
        sys.path.pop(0)


def inputs(shape: dict[str, Any], n: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(n)
    return [torch.randn(1, shape["heads"], n, shape["d"], generator=g) for _ in range(3)]


def rows(package: Any) -> Calls:
    """Every call by its name."""
    attend, feature_map, prepared = package
    found: Calls = {}
    for name, shape in SHAPES.items():
        for kind in ("positive", "landmark", "trig"):
            if kind != "positive" and name != "encoder":
                continue
            phi = feature_map(kind, dim=shape["d"], num_features=shape["m"], seed=0)
            if kind == "landmark":
                q, k, _ = inputs(shape, 1000)
                phi.calibrate_(q * shape["d"] ** -0.25, k * shape["d"] ** -0.25)
            nears = {"": {}, "block": shape["near"], "sliding": shape["near"] | {"window_kind": "sliding"}}
            for near, how in nears.items():
                if near and not shape["near"]:
                    continue
                call = partial(attend, phi=phi, is_causal=shape["is_causal"], **how)
                for n in LENGTHS:
                    title = ", ".join(filter(None, (name, kind, near, f"{n}")))
                    found[f"forward, {title}"] = partial(_forward, call, inputs(shape, n))
                    found[f"backward, {title}"] = partial(_backward, call, inputs(shape, n))
                if shape["is_causal"]:
                    made = prepared(phi, shape["d"] ** -0.5)
                    call = partial(attend, is_causal=True, return_state=True, **how)
                    with torch.no_grad():
                        _, state = call(*inputs(shape, 1000), phi=phi)
                    steps = {"": {"phi": phi}, ", trusted": {"phi": made, "diagnostics": False}}
                    for said, more in steps.items():
                        step = partial(call, state=state, **more)
                        found[f"step{said}, {name}, {near}"] = partial(_forward, step, inputs(shape, 1))
    return found


def _forward(call: Callable[..., Any], qkv: list[torch.Tensor]) -> None:
    with torch.no_grad():
        call(*qkv)


def _backward(call: Callable[..., Any], qkv: list[torch.Tensor]) -> None:
    learning = [t.detach().requires_grad_() for t in qkv]
    torch.autograd.grad(call(*learning).sum(), learning)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for a row and source")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    (old, _), (new, best_times) = load(options.other), load(HERE)
    before, after, found = rows(old), rows(new), {}
    for name in after:
        if options.only in name:
            seconds = best_times(
                {"before": before[name], "after": after[name]}, repeats=options.repeats, budget=options.budget
            )
            found[name] = {**seconds, "ratio": seconds["after"] / seconds["before"]}
            print(f"{found[name]['ratio']:5.2f}  {1e3 * seconds['after']:9.3f} ms  {name}", flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    print(f"largest {max(row['ratio'] for row in found.values()):.3f} of {len(found)} rows")


if __name__ == "__main__":
    main()
