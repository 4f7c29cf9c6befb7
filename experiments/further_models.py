"""Four pretrained models that had no part in development, converted to a target at first try.

Claim: `convert(model, keep=0.98)` needs to know nothing of a model. It works on BERTs of antibody sequences and of
reactions, on an ALBERT of reactions, whose twelve layers share one attention module, and on a small RoBERTa of human
antibodies, and keeps what it says on sequences held back. They read at most 512 tokens (the last one 142), where the
original attention may well be the fastest: then the search says so and leaves the model alone. A recipe, window 32 and
a sink with landmark features beside, shows what the maps keep of them.

    python experiments/further_models.py [--texts 9] [--threads 1]

Writes experiments/results/further_models.json; what is there is not done again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bochner import BochnerWarning, convert, data, revert
from bochner.demo import quietly
from bochner.hf import capture, plan_of, report_of

RESULTS = Path(__file__).parent / "results" / "further_models.json"
LENGTH = 512
RECIPES: dict[str, dict[str, Any]] = {
    "window 32, sink": {"feature_map": None},
    "window 32, sink, landmark m=64": {"num_features": 64},
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
    found = [capture.run(model, batch).logits.log_softmax(-1) for batch in held]
    return sum((p.exp() * (p - q)).sum(-1).mean().item() for p, q in zip(truth, found, strict=True)) / len(held)


def measured(model: Any, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    """The target, then the recipes on other sequences than they were calibrated on."""
    half = len(batches) // 2
    convert(model, calibration=batches, keep=0.98, length=batches[0]["input_ids"].shape[1])
    report = report_of(model).target
    assert report is not None
    row: dict[str, Any] = {
        "kept": report.verified.kept,
        "met": report.met,
        "converted_layers": len(report.plan.converted),
        "layers": len(report.plan.layers),
        "reasons": report.reasons,
        "whole": report.whole,
        "seconds": report.seconds["in all"],
        "plan": str(plan_of(model)),
    }
    revert(model)
    truth = [capture.run(model, batch).logits.log_softmax(-1) for batch in batches[half:]]
    for name, recipe in RECIPES.items():
        convert(model, calibration=batches[:half], window=32, sinks=1, exact_below=0, **recipe)
        row[name] = math.exp(-apart(model, batches[half:], truth))
        revert(model)
    return row


MODELS = {"AntiBERTy": antibodies, "RXNMapper": mapper, "rxnfp": fingerprints, "Sapiens": humans}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=9, help="sequences for each model")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name, load in MODELS.items():
        if name in result:
            continue
        try:
            with quietly():
                model, sequences = load()
        except data.ArtefactUnavailable as error:
            print(f"skipped: {error}")
            continue
        batches = [batch for batch, _ in zip(sequences, range(arguments.texts), strict=False)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BochnerWarning)  # a target that is missed is in the report
            result[name] = measured(model.eval(), batches)
        shown = {k: v for k, v in result[name].items() if isinstance(v, (int, float, list))}
        print(f"{name}: {shown}", flush=True)
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    holds = all(row["kept"] >= 0.98 for row in result.values())
    print(f"claim {'holds' if holds else 'does not hold'}")
    return int(not holds)


if __name__ == "__main__":
    raise SystemExit(main())
