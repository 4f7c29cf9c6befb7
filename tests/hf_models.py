"""Tiny random models of many families, float32, no download."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.nemotron import modeling_nemotron

TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 60,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TEXT, "num_key_value_heads": 2}
IMAGE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 4,
}
SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "vocab_size": 60,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
AUDIO = {
    **TEXT,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}

ENCODERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["bert", "roberta", "electra", "esm", "camembert", "xlm-roberta", "roberta-prelayernorm"], TEXT),
    **dict.fromkeys(["data2vec-text", "ernie", "splinter", "bert-generation"], TEXT),
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 32, "vocab_size": 60},
    "albert": {**TEXT, "embedding_size": 16},
}
DECODERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["llama", "qwen2", "qwen3", "phi3", "phi", "olmo", "olmo2", "starcoder2"], GROUPED),
    **dict.fromkeys(["stablelm", "granite", "cohere", "smollm3", "glm"], GROUPED),
    **dict.fromkeys(["gpt_neox", "biogpt", "persimmon"], TEXT),
    "gemma": {**GROUPED, "head_dim": 8},
    "mistral": {**GROUPED, "sliding_window": None},
    "opt": {**TEXT, "ffn_dim": 32, "word_embed_proj_dim": 32},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60, "n_positions": 512},
}
OTHERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["vit", "deit", "dinov2", "clip_vision_model", "siglip_vision_model", "ijepa", "vit_msn"], IMAGE),
    **dict.fromkeys(["bart", "marian", "mbart", "m2m_100", "blenderbot", "pegasus", "plbart"], SEQ2SEQ),
    "whisper": {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20},
    **dict.fromkeys(["wav2vec2", "hubert"], AUDIO),
}
if hasattr(modeling_nemotron, "ALL_ATTENTION_FUNCTIONS"):
    DECODERS["nemotron"] = GROUPED
SUPPORTED = {**ENCODERS, **DECODERS, **OTHERS}
# Family, settings, and what the refusal must name.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "deberta": (TEXT, "interface"),
    "deberta-v2": (TEXT, "interface"),
    "mpnet": (TEXT, "interface"),
    "bloom": (TEXT, "interface"),
    "falcon": (TEXT, "interface"),
    "wavlm": (AUDIO, "interface"),
    "mpt": (TEXT, "interface"),
    "t5": ({"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 60}, "position_bias"),
    "modernbert": (TEXT, "sliding_window"),
    "gemma2": (GROUPED, "softcap"),
    "mistral": (GROUPED, "sliding_window"),
}
if "nemotron" not in DECODERS:  # not yet part of the interface in the oldest version that is supported
    REFUSED["nemotron"] = (GROUPED, "interface")


def build(family: str, settings: dict[str, Any], *, head: str = "AutoModel", std: float = 0.15) -> Any:
    """A tiny model with weights large enough for attention to matter."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **settings)
    model = getattr(transformers, head).from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=std)
    return model


def inputs(model: Any, *, batch: int = 2, length: int = 12) -> dict[str, Tensor]:
    """Random inputs of the model's main kind; text has padding at the end of its last row."""
    from bochner.hf.observe import dummy_inputs

    g = torch.Generator().manual_seed(0)
    x = dummy_inputs(model)
    if "input_ids" not in x:
        return {k: torch.randn(v.shape, generator=g) if v.is_floating_point() else v for k, v in x.items()}
    ids = torch.randint(4, 50, (batch, length), generator=g)
    mask = torch.ones_like(ids)
    mask[-1, 9:] = 0
    found = {"input_ids": ids, "attention_mask": mask}
    if "decoder_input_ids" in x:
        found["decoder_input_ids"] = ids[:, :7]
    return found


def texts_as_batches(count: int = 6, batch: int = 2, length: int = 64, seed: int = 1) -> list[dict[str, Tensor]]:
    """Calibration batches of random tokens."""
    g = torch.Generator().manual_seed(seed)
    shape = (batch, length)
    return [
        {"input_ids": torch.randint(4, 50, shape, generator=g), "attention_mask": torch.ones(shape, dtype=torch.long)}
        for _ in range(count)
    ]


class Labelled(torch.utils.data.Dataset):
    """Short random texts with two classes, as a Trainer takes them."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        ids = torch.randint(4, 50, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "attention_mask": torch.ones(16, dtype=torch.long), "labels": i % 2}


@torch.no_grad()
def whole_and_pieces(model: Any, ids: Tensor, cuts: list[int], cache: Any) -> tuple[Tensor, Tensor]:
    """The logits of a sequence at once, and those of its pieces, cut at `cuts`, through a cache."""
    pieces = zip([0, *cuts], [*cuts, ids.shape[1]], strict=True)
    parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in pieces]
    return model(ids, use_cache=False).logits, torch.cat(parts, dim=1)
