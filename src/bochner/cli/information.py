"""`bochner info`, `fetch` and `plan`: what is here, what can be had, and how many features an error needs."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from bochner._checks import ArgumentError
from bochner.cli.common import Json, print_json, say, show

plan = typer.Typer(no_args_is_help=True, help="Find out how many features an error needs.")
MAPS = ("trig", "positive", "hyperbolic", "optimal")


def info(as_json: Json = False) -> None:
    """Show versions, machine, extras and cache, as a bug report needs them.

    Example: `bochner info --json`
    """
    from bochner.report.machine import PACKAGES, facts

    found = facts()
    if as_json:
        print_json(found)
        return
    packages = found.pop("packages")
    found["cached"] = ", ".join(found["cached"]) or "nothing"
    for name, value in found.items():
        print(f"{name:12s} {value if value is not None else 'none'}")
    for name, version in packages.items():
        what = version or f"not installed: pip install 'bochner[{PACKAGES[name]}]'"
        print(f"  {name:18s} {what}")


def fetch(
    name: Annotated[str, typer.Argument(help="name of a model or data set; leave it out for a list")] = "",
    as_json: Json = False,
) -> None:
    """Fetch a pinned model or data set into the cache, and print its path.

    Example: `bochner fetch minilm`
    """
    from bochner import data

    if name:
        path = data.fetch(name)
        print_json({"name": name, "path": str(path)}) if as_json else print(path)
        return
    if as_json:
        print_json({n: a._asdict() for n, a in data.ARTEFACTS.items()})
        return
    rows = [[n, a.tool, f"{a.package} {a.version}", str(a.megabytes), a.what] for n, a in data.ARTEFACTS.items()]
    show(["name", "from", "package", "MB", "what"], rows)


@plan.command()
def features(
    error: Annotated[float, typer.Option(help="relative error of a kernel value (root mean square)")] = 0.1,
    norm: Annotated[float, typer.Option(help="length of queries and keys, each times d^(-1/4)")] = 1.0,
    angle: Annotated[float, typer.Option(help="degrees between query and key")] = 60.0,
    dim: Annotated[int, typer.Option(min=2, help="head size")] = 64,
    as_json: Json = False,
) -> None:
    """Show how many features each map needs to stay below an error.

    Example: `bochner plan features --error 0.1 --norm 1.5 --dim 64`
    """
    import torch

    from bochner import theory
    from bochner.moments import optimal_a

    if not 0 < error < math.inf:
        raise ArgumentError(f"The --error must be positive, got {error}.")
    if not 0 <= norm < math.inf or not 0 <= angle <= 180:
        raise ArgumentError(f"The --norm must be at least 0 and the --angle within 0 .. 180, got {norm} and {angle}.")
    x, y = torch.zeros(2, dim, dtype=torch.float64)
    x[0] = norm
    y[0], y[1] = norm * math.cos(math.radians(angle)), norm * math.sin(math.radians(angle))
    rows: dict[str, dict[str, float]] = {}
    for name in MAPS:
        law = theory.Estimator(name, A=optimal_a((x + y).square().sum() / dim) if name == "optimal" else 0.0)
        rows[name] = {
            p: float(theory.features_needed(x, y, error, map=law, projection=p))
            for p in ("iid", "orthogonal")
            if p == "iid" or name != "optimal"
        }
    if as_json:
        print_json({"error": error, "norm": norm, "angle": angle, "dim": dim, "features": rows})
        return
    kernel = float((x @ y).exp())
    cells = [[n, *(count(r[p]) if p in r else "-" for p in ("iid", "orthogonal"))] for n, r in rows.items()]
    show(
        ["map", "independent", "orthogonal"],
        cells,
        f"features for a relative error of {error:g} at exp(x.y) = {kernel:.3g}",
    )
    say("this is the error of kernel values; attention divides by their sum, so prefer a positive map to trig there")


def count(features: float) -> str:
    """A number of features; beyond a thousand million only its size matters."""
    if features == math.inf:
        return "beyond 1e308"
    return f"{features:,.0f}" if features < 1e9 else f"{features:.1e}"
