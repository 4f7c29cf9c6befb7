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


def attach(model: nn.Module, make: Callable[[nn.Module], nn.Module]) -> None:
    """Give every attention module of a model a `peer` of its own."""
    found = [m for m in model.modules() if type(m).__name__ in ("BertSelfAttention", "GPT2Attention")]
    if not found:
        raise BochnerError(f"The model {type(model).__name__} has no attention that a peer could replace.")
    for module in found:
        module.add_module("peer", make(module))


def _bert_like(task: Task, p: Preset, length: int) -> dict[str, Any]:
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
    return transformers.BertConfig(**_bert_like(task, p, length))


def gpt2(task: Task, p: Preset, length: int) -> Any:
    return transformers.GPT2Config(
        vocab_size=task.symbols,
        n_embd=p.width,
        n_layer=p.layers,
        n_head=p.heads,
        n_inner=p.feedforward,
        n_positions=length,
        resid_pdrop=p.dropout,
        embd_pdrop=p.dropout,
        attn_pdrop=0.0,
        initializer_range=p.width**-0.5,
        pad_token_id=PAD,
        bos_token_id=PAD,
        eos_token_id=PAD,
        use_cache=False,
    )


def conformer(task: Task, p: Preset, length: int) -> Any:
    from bochner.tasks.speech import BANDS

    encoder = {
        "hidden_size": p.width,
        "num_hidden_layers": p.layers,
        "num_attention_heads": p.heads,
        "intermediate_size": p.feedforward,
        "num_mel_bins": BANDS,
        "subsampling_conv_channels": p.width,
        "conv_kernel_size": 9,
        "dropout": p.dropout,
        "activation_dropout": p.dropout,
        "attention_dropout": 0.0,
        "layerdrop": 0.0,
    }
    return transformers.LasrCTCConfig(vocab_size=task.classes + 1, pad_token_id=PAD, encoder_config=encoder)


def nystromformer(task: Task, p: Preset, length: int) -> Any:
    return transformers.NystromformerConfig(
        **_bert_like(task, p, length), num_landmarks=LANDMARKS, segment_means_seq_len=length, conv_kernel_size=33
    )


def longformer(task: Task, p: Preset, length: int) -> Any:
    sizes = _bert_like(task, p, length + PAD + 1)  # positions are counted from the padding index
    return transformers.LongformerConfig(**sizes, attention_window=[2 * BLOCK] * p.layers)


def big_bird(task: Task, p: Preset, length: int) -> Any:
    sizes = _bert_like(task, p, length)
    return transformers.BigBirdConfig(**sizes, sep_token_id=SEP, block_size=BLOCK, num_random_blocks=1, use_cache=False)


def fnet(task: Task, p: Preset, length: int) -> Any:
    sizes = _bert_like(task, p, length)
    del sizes["num_attention_heads"], sizes["attention_probs_dropout_prob"]
    return transformers.FNetConfig(**sizes)


def reformer(task: Task, p: Preset, length: int) -> Any:
    kinds = [("lsh", "local")[i % 2] for i in range(p.layers)]
    return transformers.ReformerConfig(
        vocab_size=task.symbols,
        hidden_size=p.width,
        attn_layers=kinds,
        num_attention_heads=p.heads,
        attention_head_size=p.width // p.heads,
        feed_forward_size=p.feedforward,
        hidden_dropout_prob=p.dropout,
        max_position_embeddings=length,
        axial_pos_embds=False,
        lsh_attn_chunk_length=BLOCK,
        local_attn_chunk_length=BLOCK,
        num_hashes=2,
        hash_seed=0,
        initializer_range=p.width**-0.5,
        is_decoder=task.is_causal,
        num_labels=task.classes,
        pad_token_id=PAD,
        eos_token_id=PAD,
        use_cache=False,
    )


class Peer(NamedTuple):
    """A model of transformers with an attention of its own: its config, what it can do, what its batches need."""

    config: Callable[[Task, Preset, int], Any]
    kinds: tuple[str, ...]
    multiple: int = 1
    takes_mask: bool = True


BOTH_WAYS = ("classify", "masked", "match")
PEERS: dict[str, Peer] = {
    # transformers makes it a mask of a shape its attention cannot take: it sees the padding.
    "nystromformer": Peer(nystromformer, BOTH_WAYS, LANDMARKS, takes_mask=False),
    "longformer": Peer(longformer, BOTH_WAYS, 2 * BLOCK),
    "big_bird": Peer(big_bird, BOTH_WAYS, BLOCK),
    "reformer": Peer(reformer, (*BOTH_WAYS, "causal"), BLOCK),
    "fnet": Peer(fnet, BOTH_WAYS, takes_mask=False),
}
