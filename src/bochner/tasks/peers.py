"""Attentions that are not ours, for comparison: none at all, Linformer, performer-pytorch, and five of transformers.

The first three replace the attention function of transformers' BERT, GPT-2 or Conformer; the others are models of their
own, given the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bochner._checks import BochnerError, extra
from bochner.tasks.base import PAD, SEP, Preset, Task

transformers = extra("transformers", "train", "bochner.tasks")

BLOCK = 16  # block or chunk length of sparse attentions
LANDMARKS = 32


class Linformer(nn.Module):
    """Softmax attention over keys and values projected along the sequence (Wang et al. 2020): softmax(q (E k)') F v.

    E and F are one matrix (k, n), shared by the heads of a layer. Padded keys are zeroed before projecting. The rows of
    E mix all positions, so that there is no causal version.
    """

    def __init__(self, length: int, rank: int) -> None:
        super().__init__()
        self.projection = nn.Parameter(torch.randn(rank, length) * length**-0.5)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, scale: float) -> Tensor:
        mix = self.projection[:, : k.shape[-2]]
        if padding is not None:
            k, v = (t.masked_fill(padding[:, None, :, None], 0.0) for t in (k, v))
        return nn.functional.scaled_dot_product_attention(q, mix @ k, mix @ v, scale=scale)


class Favor(nn.Module):
    """performer-pytorch's attention as it is: padded keys are left out of the values only."""

    def __init__(self, dim: int, features: int, causal: bool) -> None:
        super().__init__()
        package = extra("performer_pytorch", "train", "The attention 'performer_pytorch'")
        self.inner = package.FastAttention(dim, features, causal=causal)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, scale: float) -> Tensor:
        if padding is not None:
            v = v.masked_fill(padding[:, None, :, None], 0.0)
        return self.inner(q, k, v)


def call(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, None]:
    """The attention function of transformers' interface: identity, or what `module.peer` does."""
    if not hasattr(module, "peer"):
        return v.transpose(1, 2).contiguous(), None
    padding = None if mask is None else ~mask[:, 0, -1]  # the last row sees every key that is not padding
    scale = kwargs.get("scaling") or q.shape[-1] ** -0.5
    out: Tensor = module.get_submodule("peer")(q, k, v, padding, scale)
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    transformers.AttentionInterface.register("bochner_peer", call)
    AttentionMaskInterface.register("bochner_peer", sdpa_mask)


def attach(model: nn.Module, make: Callable[[], nn.Module]) -> None:
    """Give every attention module of a model a `peer` of its own."""
    found = [m for m in model.modules() if type(m).__name__ in ("BertSelfAttention", "GPT2Attention")]
    if not found:
        raise BochnerError(f"The model {type(model).__name__} has no attention that a peer could replace.")
    for module in found:
        module.add_module("peer", make())


def sizes(task: Task, p: Preset, length: int) -> dict[str, Any]:
    """A preset in the words of transformers' configurations; what a model does not know it ignores."""
    return {
        "vocab_size": task.symbols,
        "hidden_size": p.width,
        "num_hidden_layers": p.layers,
        "num_attention_heads": p.heads,
        "intermediate_size": p.feedforward,
        "hidden_dropout_prob": p.dropout,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": length,
        "initializer_range": p.width**-0.5,
        "pad_token_id": PAD,
        "num_labels": task.classes,
        "type_vocab_size": 1,
    }


def bert(task: Task, p: Preset, length: int) -> Any:
    return transformers.BertConfig(**sizes(task, p, length))


def gpt2(task: Task, p: Preset, length: int) -> Any:
    own = {"n_inner": p.feedforward, "resid_pdrop": p.dropout, "embd_pdrop": p.dropout, "attn_pdrop": 0.0}
    ends = {"bos_token_id": PAD, "eos_token_id": PAD}
    return transformers.GPT2Config(**sizes(task, p, length), **own, **ends, use_cache=False)


def conformer(task: Task, p: Preset, length: int) -> Any:
    from bochner.tasks.speech import BANDS

    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    own = {"num_mel_bins": BANDS, "subsampling_conv_channels": p.width, "conv_kernel_size": 9}
    dropout = {"dropout": p.dropout, "activation_dropout": p.dropout, "attention_dropout": 0.0, "layerdrop": 0.0}
    encoder = {name: sizes(task, p, length)[name] for name in names} | own | dropout
    return transformers.LasrCTCConfig(vocab_size=task.classes + 1, pad_token_id=PAD, encoder_config=encoder)


def nystromformer(task: Task, p: Preset, length: int) -> Any:
    own = {"num_landmarks": LANDMARKS, "segment_means_seq_len": length, "conv_kernel_size": 33}
    return transformers.NystromformerConfig(**sizes(task, p, length), **own)


def longformer(task: Task, p: Preset, length: int) -> Any:
    given = sizes(task, p, length + PAD + 1)  # positions are counted from the padding index
    return transformers.LongformerConfig(**given, attention_window=[2 * BLOCK] * p.layers)


def big_bird(task: Task, p: Preset, length: int) -> Any:
    own = {"sep_token_id": SEP, "block_size": BLOCK, "num_random_blocks": 1, "use_cache": False}
    return transformers.BigBirdConfig(**sizes(task, p, length), **own)


def fnet(task: Task, p: Preset, length: int) -> Any:
    return transformers.FNetConfig(**sizes(task, p, length))


def reformer(task: Task, p: Preset, length: int) -> Any:
    chunks = {"lsh_attn_chunk_length": BLOCK, "local_attn_chunk_length": BLOCK, "axial_pos_embds": False}
    own = {"attention_head_size": p.width // p.heads, "feed_forward_size": p.feedforward, "num_hashes": 2}
    kinds = [("lsh", "local")[i % 2] for i in range(p.layers)]
    how = {"attn_layers": kinds, "hash_seed": 0, "is_decoder": task.is_causal, "eos_token_id": PAD, "use_cache": False}
    return transformers.ReformerConfig(**sizes(task, p, length), **own, **chunks, **how)


class Peer(NamedTuple):
    """An attention that is not ours: the tasks it can do, and how it comes into a model.

    `config`: of a model of its own in transformers. Else `module(length, head size, m, causal)` is put into each
    attention of the usual model. `multiple`, `takes_mask`: what its batches need.
    """

    kinds: tuple[str, ...]
    config: Callable[[Task, Preset, int], Any] | None = None
    module: Callable[[int, int, int, bool], nn.Module] | None = None
    multiple: int = 1
    takes_mask: bool = True


BOTH_WAYS = ("classify", "masked", "match")
PEERS: dict[str, Peer] = {
    "identity": Peer((*BOTH_WAYS, "causal", "ctc")),
    "linformer": Peer(BOTH_WAYS, module=lambda length, size, m, causal: Linformer(length, m)),
    "performer_pytorch": Peer((*BOTH_WAYS, "causal"), module=lambda length, size, m, causal: Favor(size, m, causal)),
    # transformers makes it a mask of a shape its attention cannot take: it sees the padding.
    "nystromformer": Peer(BOTH_WAYS, nystromformer, multiple=LANDMARKS, takes_mask=False),
    "longformer": Peer(BOTH_WAYS, longformer, multiple=2 * BLOCK),
    "big_bird": Peer(BOTH_WAYS, big_bird, multiple=BLOCK),
    "reformer": Peer((*BOTH_WAYS, "causal"), reformer, multiple=BLOCK),
    "fnet": Peer(BOTH_WAYS, fnet, takes_mask=False),
}
