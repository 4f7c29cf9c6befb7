"""A published, trained Performer with our attention inside: the TIS Transformer, which finds start codons.

The model is built from the settings in its checkpoint and run on random transcripts; what matters is that both
attentions see the same. `without_epsilon` is how far the model moves if the 1e-4 that performer-pytorch adds to every
feature is left out: it was trained to rely on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from _framework import Said, Store, experiment
from torch import Tensor, nn

from bochner import data, migrate

LENGTHS = (300, 1_000, 3_000)


class Tis(nn.Module):
    """Embedding, Performer, two layers: logits (n, 2) of no start and start at every nucleotide."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        import performer_pytorch
        from performer_pytorch.performer_pytorch import FixedPositionalEmbedding

        with torch.serialization.safe_globals([nn.ReLU]):
            saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
        s = saved["hyper_parameters"]
        names = "dim depth heads dim_head causal nb_features generalized_attention reversible ff_chunks use_scalenorm"
        names += " use_rezero ff_glu local_attn_heads local_window_size"
        self.transformer = performer_pytorch.Performer(**{name: s[name] for name in names.split()})
        self.nuc_emb = nn.Embedding(s["num_tokens"], s["dim"])
        self.pos_emb = FixedPositionalEmbedding(s["dim"], s["max_seq_len"] + 2)
        self.layer_pos_emb = FixedPositionalEmbedding(s["dim_head"], s["max_seq_len"] + 2)
        self.ff_1, self.ff_2 = nn.Linear(s["dim"], 2 * s["dim"]), nn.Linear(2 * s["dim"], 2)
        missing, unexpected = self.load_state_dict(saved["state_dict"], strict=False)
        assert not missing, missing
        assert not [u for u in unexpected if "rel_pos" not in u and "loss" not in u], unexpected
        self.eval()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.nuc_emb(ids)
        x = x + self.pos_emb(x)
        x = self.transformer(x, pos_emb=self.layer_pos_emb(x), mask=torch.ones_like(ids, dtype=torch.bool))
        return self.ff_2(torch.relu(self.ff_1(x)))


def transcripts(seed: int = 0) -> list[Tensor]:
    """Random transcripts of three lengths, between the symbols that mark both ends."""
    rng = np.random.default_rng(seed)
    return [torch.tensor([[5, *rng.integers(0, 4, n), 6]]) for n in LENGTHS]


@experiment(
    claim="Ours: a published, trained Performer keeps its outputs with our attention inside, probabilities to 1e-4.",
    ours="five human folds, random transcripts of up to 3,000 nucleotides",
    quick="runs five models of eight layers over whole transcripts, twice",
    needs=("performer_pytorch",),
)
def measure(store: Store) -> None:
    for path in sorted((data.fetch("tis") / "tt_models").glob("Homo*.ckpt")):
        store.cell(path.name, lambda p=path: compare(p))


def compare(checkpoint: Path) -> dict[str, float]:
    model = Tis(checkpoint)
    with torch.no_grad():
        before = [model(ids) for ids in transcripts()]
        migrate.performer_(model)
        after = [model(ids) for ids in transcripts()]
        migrated = [m for m in model.modules() if isinstance(m, migrate.PerformerAttention)]
        for module in migrated:
            module.epsilon = 0.0
        plain = [model(ids) for ids in transcripts()]
    pairs = list(zip(before, after, strict=True))
    return {
        "layers": len(migrated),
        "probability": max((a.softmax(-1) - b.softmax(-1)).abs().max().item() for a, b in pairs),
        "logit": max((a - b).abs().max().item() for a, b in pairs),
        "logit_size": max(a.abs().max().item() for a in before),
        "without_epsilon": max(
            (a.softmax(-1) - b.softmax(-1)).abs().max().item() for a, b in zip(before, plain, strict=True)
        ),
    }


def judge(found: Any) -> Said:
    worst, logit = (max(v[k] for v in found.values()) for k in ("probability", "logit"))
    share = max(v["logit"] / v["logit_size"] for v in found.values())
    holds = max(worst, share) < 1e-4
    return Said(
        f"largest difference over {len(found)} published models: of a probability {worst:.1e}, of a logit {logit:.1e} "
        f"({share:.0e} of the largest one).",
        "holds" if holds else "fails",
        "" if holds else "an output differs",
    )
