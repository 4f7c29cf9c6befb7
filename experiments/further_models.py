"""Four pretrained models that had no part in development, converted to a target at first try.

BERTs of antibody sequences and of reactions, an ALBERT of reactions, whose twelve layers share one attention module,
and a small RoBERTa of human antibodies. They read at most 512 tokens (the last one 142), where the original attention
may well be the fastest: then the search says so and leaves the model alone. A recipe, window 32 and a sink with
landmark features beside, shows what the maps keep of them.
"""

from __future__ import annotations

import argparse
import gzip
import math
import re
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from _framework import Said, Store, experiment, kept
from torch import Tensor

from bochner import BochnerWarning, Recipe, Target, convert, data
from bochner.demo import quietly

LENGTH = 512
RECIPES = {
    "window 32, sink": Recipe(None, window=32, sinks=1),
    "window 32, sink, landmark m=64": Recipe("landmark", 64, window=32, sinks=1),
}


def vocabulary(path: Path) -> dict[str, int]:
    return {token: i for i, token in enumerate(path.read_text(encoding="utf-8").split("\n")) if token}


def framed(tokens: list[str], known: dict[str, int]) -> dict[str, Tensor]:
    """One sequence of `LENGTH` tokens with the marks that BERT puts around it."""
    ids = [known.get(token, known["[UNK]"]) for token in ["[CLS]", *tokens[: LENGTH - 2], "[SEP]"]]
    return {"input_ids": torch.tensor([ids])}


def proteins(least: int) -> Iterator[list[str]]:
    """Sequences of at least so many residues; few of them are antibodies, but no registry has thousands of those."""
    with gzip.open(data.fetch("proteins") / "DB.fasta.gz", "rt", encoding="ascii") as file:
        records = file.read().split(">")[1:]
    sequences = (list("".join(record.split("\n")[1:])) for record in records)
    return (s for s in sequences if len(s) >= least)


def antibodies() -> tuple[Any, Iterator[dict[str, Tensor]]]:
    """AntiBERTy, and protein sequences."""
    from transformers import BertForMaskedLM

    home = data.fetch("antiberty")
    known = vocabulary(home / "vocab.txt")
    model = BertForMaskedLM.from_pretrained(home / "AntiBERTy_md_smooth")
    return model, (framed(s, known) for s in proteins(LENGTH))


def molecules(known: dict[str, int]) -> Iterator[dict[str, Tensor]]:
    """Many molecules to a sequence, as reactions write them."""
    lines = (data.fetch("molecules") / "NCI" / "first_5K.smi").read_text(encoding="ascii").splitlines()
    text = ".".join(line.split()[0] for line in lines)
    tokens = re.findall(r"\[[^]]*\]|Br|Cl|%\d\d|.", text)
    step = LENGTH - 2
    return (framed(tokens[i : i + step], known) for i in range(0, len(tokens) - step, step))


def mapper() -> tuple[Any, Iterator[dict[str, Tensor]]]:
    """The model of RXNMapper, and molecules."""
    from transformers import AlbertForMaskedLM

    home = data.fetch("rxnmapper")
    return AlbertForMaskedLM.from_pretrained(home), molecules(vocabulary(home / "vocab.txt"))


def fingerprints() -> tuple[Any, Iterator[dict[str, Tensor]]]:
    """The model of rxnfp, and molecules."""
    from transformers import BertForMaskedLM

    home = data.fetch("rxnfp")
    return BertForMaskedLM.from_pretrained(home), molecules(vocabulary(home / "vocab.txt"))


def humans() -> tuple[Any, Iterator[dict[str, Tensor]]]:
    """The heavy chains of Sapiens, whose weights are named as in fairseq, and protein sequences."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    home = data.fetch("sapiens")
    with torch.serialization.safe_globals([argparse.Namespace]):
        weights = torch.load(home / "checkpoint_vh.pt", map_location="cpu", weights_only=True)["model"]
    names = {
        r"^decoder\.lm_head\.weight": "lm_head.decoder.weight",
        r"^decoder\.lm_head\.": "lm_head.",
        r"^decoder\.sentence_encoder\.layers\.": "roberta.encoder.layer.",
        r"^decoder\.sentence_encoder\.embed_tokens": "roberta.embeddings.word_embeddings",
        r"^decoder\.sentence_encoder\.embed_positions": "roberta.embeddings.position_embeddings",
        r"^decoder\.sentence_encoder\.emb_layer_norm": "roberta.embeddings.LayerNorm",
        r"self_attn\.q_proj": "attention.self.query",
        r"self_attn\.k_proj": "attention.self.key",
        r"self_attn\.v_proj": "attention.self.value",
        r"self_attn\.out_proj": "attention.output.dense",
        r"self_attn_layer_norm": "attention.output.LayerNorm",
        r"fc1": "intermediate.dense",
        r"fc2": "output.dense",
        r"final_layer_norm": "output.LayerNorm",
    }
    renamed = {}
    for old, value in weights.items():
        new = old
        for pattern, name in names.items():
            new = re.sub(pattern, name, new)
        renamed[new] = value
    words, places = (renamed[f"roberta.embeddings.{x}_embeddings.weight"] for x in ("word", "position"))
    config = RobertaConfig(
        vocab_size=len(words), hidden_size=128, num_hidden_layers=4, num_attention_heads=8, intermediate_size=256,
        max_position_embeddings=len(places), type_vocab_size=1,
    )  # fmt: skip
    model = RobertaForMaskedLM(config)
    missing, unexpected = model.load_state_dict(renamed, strict=False)
    assert not unexpected
    assert set(missing) <= {
        "roberta.embeddings.token_type_embeddings.weight",
        "lm_head.decoder.bias",
    }
    torch.nn.init.zeros_(model.roberta.embeddings.token_type_embeddings.weight)
    model.lm_head.decoder.bias = model.lm_head.bias
    letters = (home / "dict.txt").read_text(encoding="ascii").split()[::2]
    known = {letter: i for i, letter in enumerate(letters, start=4)}  # behind <s>, <pad>, </s> and <unk>
    n = len(places) - 4
    return model, ({"input_ids": torch.tensor([[0, *(known.get(x, 3) for x in s[:n]), 2]])} for s in proteins(n))


def apart(model: Any, held: list[dict[str, Tensor]], truth: list[Tensor]) -> float:
    """Mean divergence of the predictions from the original's, in nats."""
    from bochner.hf.observe import run

    found = [run(model, batch).logits.log_softmax(-1) for batch in held]
    return sum((p.exp() * (p - q)).sum(-1).mean().item() for p, q in zip(truth, found, strict=True)) / len(held)


def measured(model: Any, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    """The target, then the recipes on other sequences than they were calibrated on."""
    from bochner.hf.observe import run

    half = len(batches) // 2
    conversion = convert(model, Target(keep=0.98, length=batches[0]["input_ids"].shape[1]), batches)
    report = conversion.report
    row: dict[str, Any] = {
        "kept": report.verified.quality.retained,
        "met": report.met,
        "converted_layers": len(report.plan.converted),
        "layers": len(report.plan.layers),
        "reasons": report.reasons,
        "whole": report.verified.whole,
        "seconds": report.seconds,
        "plan": str(conversion.plan),
    }
    conversion.revert()
    truth = [run(model, batch).logits.log_softmax(-1) for batch in batches[half:]]
    for name, recipe in RECIPES.items():
        conversion = convert(model, recipe, batches[:half])
        row[name] = math.exp(-apart(model, batches[half:], truth))
        conversion.revert()
    return row


MODELS = {"AntiBERTy": antibodies, "RXNMapper": mapper, "rxnfp": fingerprints, "Sapiens": humans}


@experiment(
    claim="Ours: `keep=0.98` needs to know nothing of a model: it keeps what it says on models that had no part in "
    "development.",
    ours="four models, 9 sequences of up to 512 tokens each",
    quick="searches a target for each of four models",
    needs=("transformers",),
)
def measure(store: Store, texts: int = 9) -> None:
    def one(name: str) -> dict[str, Any]:
        with quietly():
            model, sequences = MODELS[name]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BochnerWarning)  # a target that is missed is in the report
            return measured(model.eval(), list(islice(sequences, texts)))

    for name in MODELS:
        store.cell(name, lambda n=name: one(n))


def judge(found: Any) -> Said:
    told = "; ".join(
        f"{n}: kept {row['kept']:.3f} with {row['converted_layers']} of {row['layers']} layers converted"
        for n, row in found.items()
    )
    good, missed = all(row["kept"] >= 0.98 for row in found.values()), [n for n, row in found.items() if not row["met"]]
    left = f"left alone, since nothing faster keeps it: {', '.join(missed)}" if missed else ""
    return Said(f"{told}{'; ' + left if left else ''}.", kept(good), "a target is missed")
