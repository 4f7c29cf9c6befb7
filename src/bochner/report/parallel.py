"""What attention over a sequence split over devices costs: memory, bytes on the wire and time, before buying them.

The numbers of bytes are those of `sequence_parallel_attention`, counted by a test; time is a measured shard, scaled
linearly in its length, and a line for the network: latency and bandwidth.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bochner._checks import BochnerError, positive_float, positive_int
from bochner._timing import best_times
from bochner.attention.parallel import sequence_parallel_attention
from bochner.maps import feature_map

FLOAT = 4  # bytes of the numbers that states are made of
SAMPLE = 4096  # tokens of the shard that is measured
OWNER = "sequence_parallel_cost"


@dataclass(frozen=True)
class SequenceParallelCost:
    """One attention layer over a split sequence; bytes and seconds are those of one device.

    `sent`: bytes that a device hands to its network. `ring_sent`: what exact ring attention sends, every key and value
    past every device. `shard`, `states`: bytes of this device's queries, keys, values and output, and of the states
    it holds at most.
    """

    length: int
    devices: int
    tokens: int
    shard: int
    states: int
    sent: int
    ring_sent: int
    compute: float
    communication: float
    ring_communication: float

    @property
    def memory(self) -> int:
        return self.shard + self.states

    @property
    def seconds(self) -> float:
        return self.compute + self.communication


@dataclass(frozen=True)
class AttentionShape:
    """One attention layer: its heads (`kv_heads` None: as many key heads), their size, the map, and the batch.

    `element_size`: bytes of a number of the queries, keys and values.
    """

    heads: int = 32
    kv_heads: int | None = None
    dim: int = 128
    num_features: int = 256
    batch: int = 1
    is_causal: bool = True
    element_size: int = 2

    def __post_init__(self) -> None:
        for name in ("heads", "dim", "num_features", "batch", "element_size"):
            positive_int(getattr(self, name), name, "AttentionShape")
        if self.heads % positive_int(self.key_heads, "kv_heads", "AttentionShape"):
            raise BochnerError(
                f"The 'heads' of AttentionShape must be a multiple of 'kv_heads' {self.kv_heads}, got {self.heads}."
            )

    @property
    def key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads


@dataclass(frozen=True)
class Network:
    """The network of one device: bytes per second, and seconds of one message."""

    bandwidth: float = 10e9
    latency: float = 10e-6

    def __post_init__(self) -> None:
        positive_float(self.bandwidth, "bandwidth", "Network")
        positive_float(self.latency, "latency", "Network")


def sequence_parallel_cost(
    length: int,
    devices: int,
    layer: AttentionShape | None = None,
    network: Network | None = None,
    *,
    seconds_per_token: float,
) -> SequenceParallelCost:
    """Memory, communication and time of one layer of `sequence_parallel_attention`, forward.

    With P devices, g key heads, values of size v = d and m features a state is `S = 4 b g ((m + 1) (v + 1) + 1)` bytes.
    Bidirectional attention reduces it over the devices, `2 S (P - 1) / P` bytes sent by each in a ring; causal
    attention gathers the states, `S (P - 1)` bytes, and holds P of them twice. Neither depends on the length. Ring
    attention sends `2 b g d (L / P) (P - 1)` numbers. Each sends 4 bytes more, which say whether its inputs are finite.
    `seconds_per_token`: of one device, as `shard_seconds` measures it on this machine.

    >>> layer = AttentionShape(heads=8, dim=64, num_features=128)
    >>> cost = sequence_parallel_cost(1_000_000, 64, layer, seconds_per_token=1e-6)
    >>> cost.tokens, cost.sent, cost.ring_sent // cost.sent
    (15625, 16906180, 119)
    """
    L, P = positive_int(length, "length", OWNER), positive_int(devices, "devices", OWNER)
    if P > L:
        raise BochnerError(f"The 'devices' of {OWNER} must be at most the length {L}, got {P}.")
    layer, network = layer or AttentionShape(), network or Network()
    b, g, d, size = layer.batch, layer.key_heads, layer.dim, layer.element_size
    tokens = -(-L // P)
    state = FLOAT * b * g * ((layer.num_features + 1) * (d + 1) + 1)
    # 1. What is sent: the states, and one number that says whether all inputs are finite.
    sent = (state * (P - 1) if layer.is_causal else 2 * state * (P - 1) // P) + (FLOAT if P > 1 else 0)
    ring = 2 * b * g * d * size * tokens * (P - 1)
    # 2. What is held: the shard; the own state, and what the collective brings.
    shard = size * b * tokens * d * (2 * layer.heads + 2 * g)
    states = state * (2 * P + 1 if layer.is_causal else 2)
    # 3. How long it takes.
    steps = P - 1 if layer.is_causal else 2 * (P - 1)
    return SequenceParallelCost(
        L,
        P,
        tokens,
        shard,
        states,
        sent,
        ring,
        compute=seconds_per_token * tokens,
        communication=sent / network.bandwidth + steps * network.latency,
        ring_communication=ring / network.bandwidth + (P - 1) * network.latency,
    )


@torch.no_grad()
def shard_seconds(layer: AttentionShape, tokens: int) -> float:
    """Seconds per token of a shard on this machine, by `sequence_parallel_attention` itself in a group of one.

    Attention that is not split is faster: its state need not be there before the first query is answered.
    """
    if not dist.is_available() or dist.is_initialized() or not dist.is_gloo_available():
        raise BochnerError(
            "A shard is timed in a process group of its own, which cannot be made here; give seconds_per_token."
        )
    n = min(tokens, SAMPLE)
    generator = torch.Generator().manual_seed(0)
    counts = (layer.heads, layer.key_heads, layer.key_heads)
    q, k, v = (torch.randn(layer.batch, heads, n, layer.dim, generator=generator) for heads in counts)
    phi = feature_map("positive", dim=layer.dim, num_features=layer.num_features)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            runs = {"shard": lambda: sequence_parallel_attention(q, k, v, phi, is_causal=layer.is_causal)}
            return best_times(runs, repeats=3)["shard"] / n
        finally:
            dist.destroy_process_group()
