"""How often statements about kernel products are false: random operators of every kind, enemies among the vectors.

    python benchmarks/coverage.py              2,000 operators
    python benchmarks/coverage.py --quick      100 of them

Operators of every kernel, method and dtype, bandwidths from 1e-12 to 1e12, one or one per feature, clouds up to 1e9
from the origin, scales from 1e-3 to 1e3 in one table. x: Gaussian, ones, unit vectors, signs, heavy-tailed, sparse, at
scales from 1e-20 to 1e20; and chosen by someone who knows the error matrix.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _timing import arguments, kept, write

from bochner._progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from kernel_sets import random_operator


def count(seeds: range) -> dict[str, int]:
    found = dict.fromkeys(("operators", "statements", "false", "false_rows", "certain", "beyond_eps"), 0)
    for seed in track(seeds, len(seeds), "operators"):
        drawn = random_operator(seed)
        if drawn is None:
            continue
        K, truth, xs = drawn
        found["operators"] += 1
        for x in xs:
            said = K.matvec_with_certificate(x)
            error = np.abs(np.asarray(said.value, dtype=np.float64) - truth @ x)
            found["statements"] += 1
            found["false"] += bool(np.linalg.norm(error) > said.bound)
            found["false_rows"] += bool((error > said.row_bounds).any())
            found["certain"] += bool(K.certain)
            found["beyond_eps"] += bool(K.certain and np.linalg.norm(error) > K.eps * said.norm_x * (1 + 1e-9))
    return found


def tables(results: dict[str, Any]) -> str:
    """The count in words."""
    found = results["hostile"]
    return (
        f"`python benchmarks/coverage.py` counts. Of {found['statements']:,} deterministic statements on random "
        f"hostile data, by {found['operators']:,} operators, {found['false']} are false in norm and "
        f"{found['false_rows']} in any row. Products beyond eps: {found['beyond_eps']}."
    )


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = arguments(__doc__, "100 operators", page=False).parse_args(argv)
    torch.set_num_threads(1)
    results = kept(options.output)
    results["hostile"] = count(range(100 if options.quick else 2000))
    print(tables(results))
    write(results, options)
    return results


if __name__ == "__main__":
    main()
