"""`bochner plan`: how many features for an error, and what a long sequence on many devices costs."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Annotated

import typer

from bochner._checks import ArgumentError
from bochner.cli.common import Json, Threads, print_json, show, use_threads

app = typer.Typer(no_args_is_help=True, help="How many features for an error; what many devices cost.")
MAPS = ("trig", "positive", "hyperbolic", "optimal")


@app.command()
def features(
    error: Annotated[float, typer.Option(help="the relative error of a kernel value, root mean square")] = 0.1,
    norm: Annotated[float, typer.Option(help="norm of queries and keys, scaled by d^(-1/4)")] = 1.0,
    angle: Annotated[float, typer.Option(help="angle between query and key, in degrees")] = 60.0,
    dim: Annotated[int, typer.Option(min=2, help="head size")] = 64,
    as_json: Json = False,
) -> None:
    """The least number of features of every map with a closed form that keeps an error.

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


def count(features: float) -> str:
    """A number of features; beyond a thousand million only its size matters."""
    if features == math.inf:
        return "beyond 1e308"
    return f"{features:,.0f}" if features < 1e9 else f"{features:.1e}"


@app.command()
def parallel(
    length: Annotated[int, typer.Option(min=1, help="tokens of the whole sequence")] = 1_000_000,
    devices: Annotated[int, typer.Option(min=1)] = 64,
    heads: Annotated[int, typer.Option(min=1)] = 32,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="key heads; default as many as heads")] = None,
    dim: Annotated[int, typer.Option(min=1, help="head size")] = 128,
    num_features: Annotated[int, typer.Option("--num-features", "--features", min=1)] = 256,
    layers: Annotated[int, typer.Option(min=1)] = 1,
    causal: Annotated[bool, typer.Option(help="causal, or bidirectional")] = True,
    gigabytes: Annotated[float, typer.Option(help="network of one device, gigabytes per second")] = 10.0,
    latency: Annotated[float, typer.Option(help="of one message, microseconds")] = 10.0,
    microseconds: Annotated[
        float | None, typer.Option(help="of one device per token and layer; default: measured here")
    ] = None,
    threads: Threads = 1,
    as_json: Json = False,
) -> None:
    """Memory, communication and time of attention over a sequence split over devices.

    Example: `bochner plan parallel --length 1000000 --devices 64 --microseconds 0.5`
    """
    from bochner.report.parallel import AttentionShape, Network, sequence_parallel_cost, shard_seconds

    for option, value in (("--gigabytes", gigabytes), ("--latency", latency), ("--microseconds", microseconds)):
        if value is not None and not 0 < value < math.inf:
            raise ArgumentError(f"The {option} must be positive and finite, got {value}.")
    if kv_heads is not None and heads % kv_heads:
        raise ArgumentError(f"The --heads must be a multiple of --kv-heads {kv_heads}, got {heads}.")
    use_threads(threads)
    layer = AttentionShape(heads, kv_heads, dim, num_features, is_causal=causal)
    seconds = shard_seconds(layer, -(-length // devices)) if microseconds is None else microseconds * 1e-6
    network = Network(gigabytes * 1e9, latency * 1e-6)
    cost = sequence_parallel_cost(length, devices, layer, network, seconds_per_token=seconds)
    if as_json:
        print_json({**asdict(cost), "layers": layers, "memory": cost.memory, "seconds": layers * cost.seconds})
        return
    mega = 1e6
    rows = [
        ["tokens on a device", f"{cost.tokens:,}", f"{cost.tokens:,}"],
        ["queries, keys, values, output, MB a layer", f"{cost.shard / mega:,.1f}", f"{cost.shard / mega:,.1f}"],
        ["states, MB a layer", f"{cost.states / mega:,.1f}", "-"],
        ["sent by a device, MB a layer", f"{cost.sent / mega:,.1f}", f"{cost.ring_sent / mega:,.1f}"],
        ["network, ms a layer", f"{1e3 * cost.communication:,.2f}", f"{1e3 * cost.ring_communication:,.2f}"],
        ["attention on the device, ms a layer", f"{1e3 * cost.compute:,.1f}", "quadratic"],
        [f"attention of {layers} layers, s", f"{layers * cost.seconds:,.2f}", "-"],
    ]
    show(["one device", "linear", "exact, in a ring"], rows, f"{length:,} tokens on {devices} devices")
    if microseconds is None:
        print("The device's time was measured on this machine; give --microseconds for another device.")
